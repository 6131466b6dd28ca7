"""Convolution on arrays, in three directions, by the plan that the finder chose for exactly these arrays.

Note [hit]: a layer calls with the same kind of arrays thousands of times. Each thread keeps what was worked out for the
first call of a kind, by what can be read off the arrays at once (device, shape, strides, dtype, address modulo 16) and
the policy. On a hit nothing is built or checked: the output is allocated where none is given, and the plan runs.

Reading all that off three arrays takes longer than allocating one. But one of the three is the same array from step to
step: the filter, or the place where its gradient is written. So a second table leads from that array, told by a weak
reference, and the shape of the first other one, to the last such call, and only the others are read. Of the array
itself the shape is compared, since CuPy lets nothing else of an array be set (Note [same arrays] of
flcuda.finder.plan). It is for CuPy arrays only.

Note [bounds]: plans hold memory of the host. Bounded are those of a thread, those of all threads together, and those of
one layer in a thread, so that a layer whose input is different in every batch does not push out all others. The oldest
go first, of the thread that has most; a thread's go when it ends. None goes while a CUDA graph is captured, since what
the driver does for that may not be done then.

Note [variable shapes]: a search pays when what it found is used often. A layer that has been searched for `SEARCHED`
shapes of its input is one whose shapes vary, and further ones get what the heuristic says, after one warning. What is
stored is used as before. A layer is its geometry, the filter's shape, dtype, device and policy: layers that agree in
these count as one, because their searches are the same.
"""

import functools
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from flcuda import device as devices
from flcuda import finder
from flcuda.device import Device
from flcuda.finder.plan import callers_level
from flcuda.finder.policy import Policy, current_policy
from flcuda.finder.problem import ConvolutionProblem, default_math, is_broadcast, output_shape, padding_pair
from flcuda.finder.sources import sources_for
from flcuda.kernel_loader import BLOCK, SUFFIXES, load_module
from flcuda.ops import bias as bias_ops

Array = Any

REMEMBERED = 1024
"""How many kinds of calls a thread remembers: more than twice those of a ResNet-152 in training."""

REMEMBERED_BY_LAYER = 256
"""How many of them may be of one layer and direction."""

REMEMBERED_BY_ALL = 4096
"""How many all threads remember together."""

SEARCHED = 16
"""For so many shapes of its input a layer is searched: more than training, evaluation and their last batches have, or
a few sizes of images; at a tenth of a second each, a network of 50 layers has then spent minutes."""

LAYERS = 4096
"""For so many layers it is counted how often they were searched."""

_NO_ARRAY = (None,)
_BIAS_BLOCKS = 65535


class _Calls:
    """What one thread remembers. See Note [hit].

    Attributes:
        calls: by all that tells a call from another.
        layers: for each layer and direction the keys of its calls, oldest first.
        forward: for each filter, by its id, and shape of x the last call of the forward pass.
        backward_data: for each filter and shape of dy likewise.
        backward_filter: for each place of a gradient and shape of x; the first for writing, the second for adding.
        kind: the class of CuPy's arrays; None where there is nothing in these three.
    """

    __slots__ = ("__weakref__", "backward_data", "backward_filter", "calls", "forward", "kind", "layers")

    def __init__(self) -> None:
        self.calls: dict[Any, _Call] = {}
        self.layers: dict[Any, dict[Any, None]] = {}
        self.forward: _Hits = {}
        self.backward_data: _Hits = {}
        self.backward_filter: tuple[_Hits, _Hits] = ({}, {})
        self.kind: Any = None

    def keep(self, key: Any, call: "_Call") -> None:
        """Remembers a call, and forgets others for it. See Note [bounds]."""
        with _changing:
            self.calls[key] = call
            keys = self.layers.setdefault(call.layer, {})
            keys[key] = None
            if devices.is_capturing():
                return
            while len(keys) > REMEMBERED_BY_LAYER:
                self._forget(next(iter(keys)))
            while len(self.calls) > REMEMBERED:
                self._forget(next(iter(self.calls)))
            kept = list(_threads)
            for _ in range(sum(len(each.calls) for each in kept) - REMEMBERED_BY_ALL):
                most = max(kept, key=lambda each: len(each.calls))
                most._forget(next(iter(most.calls)))

    def clear(self) -> None:
        """Forgets everything."""
        with _changing:
            for key in list(self.calls):
                self._forget(key)

    def _forget(self, key: Any) -> None:
        layer = self.calls.pop(key).layer
        keys = self.layers[layer]
        del keys[key]
        if not keys:
            del self.layers[layer]
        # They hold calls, too. Those that are still remembered come back with their next call.
        for hits in (self.forward, self.backward_data, *self.backward_filter):
            hits.clear()


class _Remembered(threading.local):
    """The calls of this thread, which go when it ends."""

    def __init__(self) -> None:
        self.mine = _Calls()
        with _changing:
            _threads.add(self.mine)


_changing = threading.RLock()
_threads: "weakref.WeakSet[_Calls]" = weakref.WeakSet()
_remembered = _Remembered()


class _Call:
    """What the first call of a kind worked out: see Note [hit].

    Attributes:
        layer: what it is counted with; see Note [bounds].
        plan: what to run.
        copy_first: the first input is a broadcast array and is copied before each run.
        copy_second: the same of the second.
        out_shape: shape of the output.
        new: makes a new output, on the current device.
        device: where it runs.
        current: gives the number of the current CUDA device.
        hit: of the last array that had this call. See Note [hit].
    """

    __slots__ = ("copy_first", "copy_second", "current", "device", "hit", "layer", "new", "out_shape", "plan")

    def __init__(
        self,
        layer: Any,
        plan: finder.Plan,
        copy_first: bool,
        copy_second: bool,
        out_shape: tuple[int, ...],
        new: Callable[[], Array],
        device: Device,
    ) -> None:
        self.layer = layer
        self.plan = plan
        self.copy_first = copy_first
        self.copy_second = copy_second
        self.out_shape = out_shape
        self.new = new
        self.device = device
        self.current: Callable[[], int] | None = None if device.kind == "cpu" else device.xp.cuda.runtime.getDevice
        self.hit: _Hit | None = None

    def run(self, first: Array, second: Array, out: Array | None) -> Array:
        if self.current is not None and self.current() != self.device.index:
            with self.device.use():
                return self.run(first, second, out)
        if self.copy_first:
            first = first.copy()
        if self.copy_second:
            second = second.copy()
        if out is None:
            out = self.new()
        self.plan.run(first, second, out)
        return out


class _Hit:
    """The last call with an array that stays the same, the kept one. See Note [hit].

    Its fields are what such a call must agree in, and what it then needs. Those of the second array that is read are
    those of the first where there is none.
    """

    __slots__ = (
        "add_bias",
        "call",
        "current",
        "dtype",
        "geometry",
        "index",
        "kept",
        "kept_address",
        "kept_shape",
        "kind",
        "layout",
        "low",
        "new",
        "other_low",
        "other_shape",
        "other_strides",
        "plan",
        "policy",
        "strides",
    )

    def __init__(
        self, geometry: "Convolution", call: _Call, kept: Array, read: Array, other: Array, layout: str | None
    ) -> None:
        self.geometry = geometry
        self.policy = current_policy()
        self.layout = layout
        self.call = call
        self.plan = call.plan
        self.new = call.new
        self.current: Any = call.current
        self.index = call.device.index
        self.kind = type(kept)
        self.dtype = kept.dtype
        self.kept: Callable[[], Array] = weakref.ref(kept)
        self.kept_shape = kept.shape
        self.kept_address = kept.data.ptr
        self.strides = read.strides
        self.low = read.data.ptr & 15
        self.other_shape = other.shape
        self.other_strides = other.strides
        self.other_low = other.data.ptr & 15
        self.add_bias: _BiasAdder | None = None

    def fits(self, geometry: "Convolution", kept: Array, a: Array, layout: str | None) -> int:
        """Says whether it is the call with these two arrays: gives the address of `a`, a CuPy array, or 0."""
        if (
            self.kept() is kept
            and self.geometry is geometry
            and ((policy := current_policy()) is self.policy or policy == self.policy)
            and self.layout == layout
            and a.strides == self.strides
            and a.dtype is self.dtype
            and kept.shape == self.kept_shape
        ):
            memory = a.data
            address: int = memory.ptr
            index = self.index
            if address & 15 == self.low and memory.device_id == index and self.current() == index:
                return address
        return 0

    def fits_other(self, a: Array) -> int:
        """Says the same of the second array that is read."""
        if (
            type(a) is self.kind
            and a.shape == self.other_shape
            and a.strides == self.other_strides
            and a.dtype is self.dtype
        ):
            memory = a.data
            address: int = memory.ptr
            if address & 15 == self.other_low and memory.device_id == self.index:
                return address
        return 0


_Hits = dict[tuple[int, tuple[int, ...]], _Hit]


class _BiasAdder:
    """Adds one bias to new outputs of one call, without the checks of `bias_forward`, which the first output passed."""

    __slots__ = ("_block", "_grid", "_kernel", "_shape", "_sizes", "bias")

    def __init__(self, y: Array, bias: Array) -> None:
        self.bias: Callable[[], Array] = weakref.ref(bias)
        self._shape = bias.shape
        n, channels = y.shape[:2]
        space = y.size // (n * channels)
        nhwc = not y.flags.c_contiguous
        self._sizes = tuple(np.int64(size) for size in ((n * space, channels, 1) if nhwc else (n, channels, space)))
        self._grid = (min(-(-y.size // BLOCK), _BIAS_BLOCKS), 1)
        self._block = (BLOCK, 1)
        self._kernel = load_module("bias").get_function(f"bias_forward_{SUFFIXES[y.dtype]}")

    def __call__(self, y: Array, bias: Array) -> bool:
        """Adds it; False where it is another bias."""
        if self.bias() is not bias or bias.shape != self._shape:
            return False
        self._kernel(self._grid, self._block, (y, bias, *self._sizes))
        return True


@dataclass(frozen=True, slots=True)
class Convolution:
    """The geometry and math of a convolution; its methods compute it on arrays of either device.

    Arrays are (N, C, *spatial) and filters (K, C / groups, *kernel), float64, float32, float16 or bfloat16 of one
    dtype, in any layout with positive strides and without overlap; broadcast inputs are copied. Inputs are borrowed and
    read on the current stream; an ``out`` must not share memory with them. Make one with ``convolution``.

    Attributes:
        padding: zeros before, and zeros after, each spatial dimension.
        stride: one number a spatial dimension.
        dilation: one number a spatial dimension.
        groups: number of groups.
        math: "fma", "tensor_op" (for float32: TF32), or None: tensor_op for the 16-bit dtypes, else fma.
    """

    padding: tuple[tuple[int, ...], tuple[int, ...]]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    math: str | None = None
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        # Hashed once: it is a part of every key of Note [hit].
        object.__setattr__(self, "_hash", hash((self.padding, self.stride, self.dilation, self.groups, self.math)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # Made again when unpickled: another process hashes the same values otherwise.
        return _shared, (self.padding, self.stride, self.dilation, self.groups, self.math)

    def output_shape(self, x_shape: Sequence[int], w_shape: Sequence[int]) -> tuple[int, ...]:
        """Gives the shape of y.

        Args:
            x_shape: (N, C, *spatial); N may be 0.
            w_shape: (K, C / groups, *kernel).

        Returns:
            (N, K, *spatial).

        Raises:
            ValueError: the shapes do not fit together.
        """
        before, after = self.padding
        return output_shape(x_shape, w_shape, before, after, self.stride, self.dilation, self.groups)

    def forward(
        self, x: Array, w: Array, *, bias: Array | None = None, out: Array | None = None, layout: str | None = None
    ) -> Array:
        """Computes y, the correlation of x with w, and adds a bias.

        Args:
            x: (N, C, *spatial).
            w: (K, C / groups, *kernel).
            bias: (K,), of their dtype, C-contiguous; see ``bias_forward``.
            out: (N, K, *spatial), to be written; by default a new array.
            layout: "nchw" or "nhwc", of a new array; by default that of x.

        Returns:
            y; ``out`` where it was given.

        Raises:
            ValueError: shapes, strides or devices do not fit; the message names the argument.
            TypeError: dtypes are mixed or unknown.
            CudnnNotSupportedError: no source takes it (CUDA).
        """
        mine = _remembered.mine
        if type(x) is mine.kind and out is None:
            hit = mine.forward.get((id(w), x.shape))
            if hit is not None and (address := hit.fits(self, w, x, layout)):
                y = hit.new()
                hit.plan.run_at((address, hit.kept_address, y.data.ptr), (x, w, y))
                if bias is not None and (hit.add_bias is None or not hit.add_bias(y, bias)):
                    bias_ops.bias_forward(y, bias)
                    hit.add_bias = _BiasAdder(y, bias)
                return y
        y = self._run("forward", x, w, None, out, False, layout)
        return y if bias is None else bias_ops.bias_forward(y, bias)

    def backward_data(
        self, dy: Array, w: Array, x_shape: Sequence[int], *, out: Array | None = None, accumulate: bool = False
    ) -> Array:
        """Computes dx, the gradient by x; it is also the forward pass of a transposed convolution.

        Args:
            dy: (N, K, *spatial).
            w: (K, C / groups, *kernel).
            x_shape: the shape of x, (N, C, *spatial), which strides leave open.
            out: dx, to be written, or to be added to; by default a new array in the layout of dy.
            accumulate: add to ``out``.

        Returns:
            dx; ``out`` where it was given.

        Raises:
            ValueError: as for ``forward``; or accumulate without out.
            TypeError: as for ``forward``.
            CudnnNotSupportedError: as for ``forward``.
        """
        mine = _remembered.mine
        if type(dy) is mine.kind and out is None and not accumulate:
            hit = mine.backward_data.get((id(w), dy.shape))
            if hit is not None and hit.call.out_shape == x_shape and (address := hit.fits(self, w, dy, None)):
                dx = hit.new()
                hit.plan.run_at((address, hit.kept_address, dx.data.ptr), (dy, w, dx))
                return dx
        return self._run("backward_data", dy, w, tuple(x_shape), out, accumulate, None)

    def backward_filter(
        self,
        x: Array,
        dy: Array,
        w_shape: Sequence[int],
        *,
        out: Array | None = None,
        accumulate: bool = False,
        layout: str | None = None,
    ) -> Array:
        """Computes dw, the gradient by w; zeros for an empty batch.

        Args:
            x: (N, C, *spatial).
            dy: (N, K, *spatial).
            w_shape: the shape of w, (K, C / groups, *kernel).
            out: dw, to be written, or to be added to; by default a new array.
            accumulate: add to ``out``.
            layout: "nchw" or "nhwc", of a new array; by default that of x.

        Returns:
            dw; ``out`` where it was given.

        Raises:
            ValueError: as for ``forward``; or accumulate without out.
            TypeError: as for ``forward``.
            CudnnNotSupportedError: as for ``forward``.
        """
        mine = _remembered.mine
        if type(x) is mine.kind and out is not None:
            hit = mine.backward_filter[1 if accumulate else 0].get((id(out), x.shape))
            if (
                hit is not None
                and hit.kept_shape == w_shape
                and (address := hit.fits(self, out, x, layout))
                and (other := hit.fits_other(dy))
            ):
                hit.plan.run_at((address, other, hit.kept_address), (x, dy, out))
                return out
        return self._run("backward_filter", x, dy, tuple(w_shape), out, accumulate, layout)

    def _run(
        self,
        direction: str,
        first: Array,
        second: Array,
        out_shape: tuple[int, ...] | None,
        out: Array | None,
        accumulate: bool,
        layout: str | None,
    ) -> Array:
        key = (
            direction,
            self,
            out_shape,
            accumulate,
            layout,
            current_policy(),
            _raw(first),
            _raw(second),
            _NO_ARRAY if out is None else _raw(out),
        )
        mine = _remembered.mine
        call = mine.calls.get(key)
        if call is None:
            return self._first_run(key, first, second, out)
        result = call.run(first, second, out)
        if call.current is not None and not (call.copy_first or call.copy_second):
            _expect(mine, call, direction, self, first, second, out, accumulate, layout)
        return result

    def _first_run(self, key: tuple[Any, ...], first: Array, second: Array, out: Array | None) -> Array:
        """Checks and plans a call that this thread does not remember, runs it and remembers it."""
        direction, _, out_shape, accumulate, layout, *_ = key
        names = _NAMES[direction]
        ours = (
            devices.asarray(first, names[0]),
            devices.asarray(second, names[1]),
            None if out is None else devices.asarray(out, "out"),
        )
        if any(a is not given for a, given in zip(ours, (first, second, out), strict=True)):
            # Arrays of another library are remembered as ours.
            first, second, our_out = ours
            result = self._run(direction, first, second, out_shape, our_out, accumulate, layout)
            return result if out is None else out
        device = devices.require_same_device(**{names[0]: first, names[1]: second, "out": out})
        if accumulate and out is None:
            raise ValueError("accumulate: there is no out to add to")
        shape = self._checked_out_shape(direction, first, second, out_shape)
        if out is not None and out.shape != shape:
            raise ValueError(f"out: shape {out.shape} where {names[2]} is {shape}")
        if out is not None and is_broadcast(out):
            raise ValueError(f"out: a broadcast array (strides {out.strides} bytes) cannot be written")
        if out is not None and device.kind == "cpu" and not out.flags.writeable:
            raise ValueError("out: the array is read-only")
        with device.use():
            if 0 in first.shape[:1]:
                return self._empty_batch(direction, first, second, shape, out, accumulate, layout)
            copies = is_broadcast(first), is_broadcast(second)
            problem = self._problem(
                direction,
                first.copy() if copies[0] else first,
                second.copy() if copies[1] else second,
                shape if out is None else out,
                accumulate,
                layout,
            )
            if device.kind == "cpu":
                # NumPy runs alike at any address.
                problem = replace(problem, x_alignment=16, w_alignment=16, y_alignment=16)
            policy = _policy_for(self, problem, device)
            call = _Call(
                (direction, self, problem.w_shape),
                finder.plan(problem, policy=policy, device=device),
                *copies,
                shape,
                _new(shape, problem.layout_of(names[2]), first.dtype, device),
                device,
            )
            result = call.run(first, second, out)
        # Remembered once it has run.
        _remembered.mine.keep(key, call)
        return result

    def _checked_out_shape(
        self, direction: str, first: Array, second: Array, out_shape: tuple[int, ...] | None
    ) -> tuple[int, ...]:
        """Gives the output's shape, after checking that all three fit together."""
        if direction == "forward":
            return self.output_shape(first.shape, second.shape)
        assert out_shape is not None
        x_shape, w_shape, dy = (
            (out_shape, second.shape, first) if direction == "backward_data" else (first.shape, out_shape, second)
        )
        y_shape = self.output_shape(x_shape, w_shape)
        if dy.shape != y_shape:
            raise ValueError(f"dy: shape {dy.shape}, where x of {x_shape} and w of {w_shape} make y {y_shape}")
        return out_shape

    def _problem(
        self, direction: str, first: Array, second: Array, out: Any, accumulate: bool, layout: str | None
    ) -> ConvolutionProblem:
        tensors = dict(zip((name[-1] for name in _NAMES[direction]), (first, second, out), strict=True))
        before, after = self.padding
        return ConvolutionProblem.from_arrays(
            direction,
            x=tensors["x"],
            w=tensors["w"],
            y=tensors["y"],
            padding=tuple(zip(before, after, strict=True)),
            stride=self.stride,
            dilation=self.dilation,
            groups=self.groups,
            accumulate=accumulate,
            math=default_math(str(first.dtype)) if self.math is None else self.math,
            layout=layout,
        )

    def _empty_batch(
        self,
        direction: str,
        first: Array,
        second: Array,
        shape: tuple[int, ...],
        out: Array | None,
        accumulate: bool,
        layout: str | None,
    ) -> Array:
        """Gives the result of no images: an empty array, or a filter gradient of zeros. No library is called."""
        for name, a in zip(_NAMES[direction], (first, second), strict=False):
            if str(a.dtype) not in devices.DTYPES:
                raise TypeError(f"{name}: dtype {a.dtype} is none of {', '.join(devices.DTYPES)}")
        if first.dtype != second.dtype or (out is not None and out.dtype != first.dtype):
            mixed = ", ".join(str(a.dtype) for a in (first, second, out) if a is not None)
            raise TypeError(f"dtypes are mixed: {mixed}")
        if out is None:
            return devices.zeros(shape, first.dtype, device=devices.device_of(first), layout=layout or "nchw")
        if not accumulate:
            out[...] = 0
        return out


_NAMES = {
    "forward": ("x", "w", "y"),
    "backward_data": ("dy", "w", "dx"),
    "backward_filter": ("x", "dy", "dw"),
}


def _raw(a: Array) -> tuple[Any, ...]:
    """Reads off an array what Note [hit] is keyed by."""
    if isinstance(a, np.ndarray):
        return (a.shape, a.strides, a.dtype, a.flags.writeable)
    if devices.is_cuda(a):
        data = a.data
        return (a.shape, a.strides, a.dtype, data.device_id, data.ptr & 15)
    # Not an array of ours: a key that finds nothing, because each object is equal to itself only.
    return (object(),)


def _new(shape: tuple[int, ...], layout: str, dtype: Any, device: Device) -> Callable[[], Array]:
    """Gives what makes a new array of a layout, nchw for a strided one, as `devices.empty` does, in less time."""
    if device.kind == "cpu":
        order = devices.memory_order("nhwc" if layout == "nhwc" else "nchw", len(shape))
        memory = tuple(shape[dim] for dim in order)
        axes = tuple(order.index(dim) for dim in range(len(shape)))
        return lambda: np.empty(memory, dtype).transpose(axes)
    cupy = device.xp
    array, alloc = cupy.ndarray, cupy.cuda.alloc
    nbytes = prod(shape) * dtype.itemsize
    # None is nchw: CuPy works it out faster than it reads strides.
    strides = None
    if layout == "nhwc":
        strides = tuple(step * dtype.itemsize for step in devices.contiguous_strides(shape, layout))
    return lambda: array(shape, dtype, alloc(nbytes), strides)


def _expect(
    mine: _Calls,
    call: _Call,
    direction: str,
    geometry: Convolution,
    first: Array,
    second: Array,
    out: Array | None,
    accumulate: bool,
    layout: str | None,
) -> None:
    """Notes a call of CuPy arrays as the last one of its filter or gradient. See Note [hit]."""
    kept, read, other = second, first, first
    if direction == "backward_filter":
        if out is None:
            return
        kept, other = out, second
        hits = mine.backward_filter[1 if accumulate else 0]
    elif out is not None:
        return
    else:
        hits = mine.forward if direction == "forward" else mine.backward_data
    hit = call.hit
    if hit is None or hit.kept() is not kept:
        if type(kept) is not type(read) or kept.dtype is not read.dtype:
            return
        hit = call.hit = _Hit(geometry, call, kept, read, other, layout)
    if len(hits) >= REMEMBERED:
        hits.clear()
    hits[id(kept), read.shape] = hit
    mine.kind = hit.kind


# --- variable shapes --------------------------------------------------------------------------------------------------


class _Searches:
    """For which shapes of the input each layer was searched. See Note [variable shapes]."""

    def __init__(self) -> None:
        self.shapes: OrderedDict[Any, set[tuple[int, ...]]] = OrderedDict()
        self.warned: set[Any] = set()
        self.lock = threading.Lock()

    def has(self, layer: Any, shape: tuple[int, ...]) -> bool:
        """Says whether a layer was searched for a shape."""
        with self.lock:
            return shape in self.shapes.get(layer, ())

    def permits(self, layer: Any, shape: tuple[int, ...]) -> bool:
        """Counts a search of a layer for a shape; False where there were enough of other shapes."""
        with self.lock:
            shapes = self.shapes.setdefault(layer, set())
            self.shapes.move_to_end(layer)
            if shape not in shapes and len(shapes) >= SEARCHED:
                return False
            shapes.add(shape)
            while len(self.shapes) > LAYERS:
                gone, _ = self.shapes.popitem(last=False)
                self.warned.discard(gone)
            return True

    def is_news(self, layer: Any) -> bool:
        """Says once a layer that it has not been said."""
        with self.lock:
            if layer in self.warned:
                return False
            self.warned.add(layer)
            return True


_searches = _Searches()


def _policy_for(geometry: Convolution, problem: ConvolutionProblem, device: Device) -> Policy:
    """Gives the policy to plan with: the current one, or that with the heuristic. See Note [variable shapes]."""
    policy = current_policy()
    if policy.mode != "find":
        return policy
    layer = (geometry, problem.w_shape, problem.x_dtype, device, policy)
    shape = problem.x_shape
    if _searches.has(layer, shape):
        return policy
    key = finder.Key.of(problem, policy, device, tuple(source.name for source in sources_for(device, problem)))
    if finder.default_store().get(key) is not None or devices.is_capturing() or _searches.permits(layer, shape):
        return policy
    if _searches.is_news(layer):
        warnings.warn(
            f"a convolution has been searched for {SEARCHED} shapes of its input, and there are more; for new ones the "
            f"libraries' heuristics choose from now on, which may be slower. It is the layer of: {problem}. Pad the "
            "inputs to a few shapes, or find the choices for all of them beforehand: flcuda find --problems FILE",
            UserWarning,
            stacklevel=callers_level(),
        )
    return replace(policy, mode="heuristic")


# --- making one -------------------------------------------------------------------------------------------------------


def convolution(
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | Sequence[tuple[int, int]] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    math: str | None = None,
    ndim: int = 2,
) -> Convolution:
    """Gives the Convolution of a geometry; the same object for equal arguments.

    Args:
        stride: one number, or one a spatial dimension.
        padding: one number, one a spatial dimension, or one (before, after) pair a spatial dimension.
        dilation: one number, or one a spatial dimension.
        groups: number of groups.
        math: "fma", "tensor_op" or None; see ``Convolution``.
        ndim: number of spatial dimensions.

    Returns:
        The convolution.

    Raises:
        ValueError: a number is out of range or there are not ``ndim`` of them; the message names the argument.
        TypeError: something is not an integer.
    """
    if type(stride) is type(padding) is type(dilation) is type(groups) is type(ndim) is int and (
        math is None or type(math) is str
    ):
        return _of_numbers(stride, padding, dilation, groups, math, ndim)
    return _checked(stride, padding, dilation, groups, math, ndim)


def _checked(
    stride: int | Sequence[int],
    padding: int | Sequence[int] | Sequence[tuple[int, int]],
    dilation: int | Sequence[int],
    groups: int,
    math: str | None,
    ndim: int,
) -> Convolution:
    """Checks the arguments of `convolution`."""
    if ndim < 1:
        raise ValueError(f"ndim: {ndim} is less than 1")
    before, after = padding_pair(padding, ndim)
    for side in (before, after):
        if min(side) < 0:
            raise ValueError(f"padding: {padding} is negative")
    if isinstance(groups, bool) or not isinstance(groups, int | np.integer):
        raise TypeError(f"groups: {groups!r} is not an integer")
    if groups < 1:
        raise ValueError(f"groups: {groups} is less than 1")
    if math not in (None, "fma", "tensor_op"):
        raise ValueError(f"math: {math!r} is none of 'fma', 'tensor_op', None")
    return _shared(
        (before, after), _positive("stride", stride, ndim), _positive("dilation", dilation, ndim), int(groups), math
    )


# What is equal to a number may be of a type that must be refused (1.0, True), so that only plain numbers come here.
_of_numbers = functools.lru_cache(maxsize=1024)(_checked)


@functools.lru_cache(maxsize=1024)
def _shared(
    padding: tuple[tuple[int, ...], tuple[int, ...]],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    math: str | None,
) -> Convolution:
    return Convolution(padding, stride, dilation, groups, math)


def _positive(name: str, value: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """Gives one positive integer a spatial dimension."""
    given = tuple(value) if isinstance(value, Sequence | np.ndarray) else (value,) * ndim
    for number in given:
        if isinstance(number, bool) or not isinstance(number, int | np.integer):
            raise TypeError(f"{name}: {value!r} is not made of integers")
    if len(given) != ndim:
        raise ValueError(f"{name}: {value!r} has {len(given)} numbers for {ndim} spatial dimensions")
    if min(given) < 1:
        raise ValueError(f"{name}: {value!r} is less than 1")
    return tuple(int(number) for number in given)
