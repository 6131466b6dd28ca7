"""Convolution on arrays, in three directions, by the plan that the finder chose for exactly these arrays.

Note [hit]: a layer calls with the same kind of arrays thousands of times. Each thread keeps a bounded dict from what
can be read off the arrays at once (device, shape, strides, dtype, address modulo 16, policy) to what was worked out for
the first call. On a hit nothing is built or checked: the output is allocated where none is given, and the plan runs.
"""

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flcuda import device as devices
from flcuda import finder
from flcuda.finder.policy import current_policy
from flcuda.finder.problem import ConvolutionProblem, default_math, is_broadcast, output_shape, padding_pair

Array = Any

REMEMBERED = 1024
"""How many kinds of calls a thread remembers; the oldest goes first."""

_NO_ARRAY = (None,)


class _Remembered(threading.local):
    """The dict of Note [hit]; plans belong to a thread."""

    def __init__(self) -> None:
        self.calls: dict[Any, _Call] = {}


_remembered = _Remembered()


@dataclass(frozen=True, slots=True)
class _Call:
    """What the first call of a kind worked out: see Note [hit].

    Attributes:
        plan: what to run.
        copy_first: the first input is a broadcast array and is copied before each run.
        copy_second: the same of the second.
        out_memory: shape of a new output as it lies in memory.
        out_axes: the axes that turn it into the logical shape; None where they are the same.
        out_dtype: dtype of a new output.
        xp: numpy or cupy.
    """

    plan: finder.Plan
    copy_first: bool
    copy_second: bool
    out_memory: tuple[int, ...]
    out_axes: tuple[int, ...] | None
    out_dtype: Any
    xp: Any

    def run(self, first: Array, second: Array, out: Array | None) -> Array:
        if self.copy_first:
            first = first.copy()
        if self.copy_second:
            second = second.copy()
        if out is None:
            out = self.xp.empty(self.out_memory, self.out_dtype)
            if self.out_axes is not None:
                out = out.transpose(self.out_axes)
        self.plan.run(first, second, out)
        return out


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

    def forward(self, x: Array, w: Array, *, out: Array | None = None) -> Array:
        """Computes y, the correlation of x with w.

        Args:
            x: (N, C, *spatial).
            w: (K, C / groups, *kernel).
            out: (N, K, *spatial), to be written; by default a new array in the layout of x.

        Returns:
            y; ``out`` where it was given.

        Raises:
            ValueError: shapes, strides or devices do not fit; the message names the argument.
            TypeError: dtypes are mixed or unknown.
            CudnnNotSupportedError: no source takes it (CUDA).
        """
        return self._run("forward", x, w, None, out, False, None)

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
        call = _remembered.calls.get(key)
        if call is None:
            return self._first_run(key, first, second, out)
        if call.xp is np or first.data.device_id == call.xp.cuda.runtime.getDevice():
            return call.run(first, second, out)
        with devices.device_of(first).use():
            return call.run(first, second, out)

    def _first_run(self, key: tuple[Any, ...], first: Array, second: Array, out: Array | None) -> Array:
        """Checks and plans a call that this thread does not remember, runs it and remembers it."""
        direction, _, out_shape, accumulate, layout, *_ = key
        names = _NAMES[direction]
        ours = [
            a if a is None else devices.asarray(a, name)
            for a, name in zip((first, second, out), (*names[:2], "out"), strict=True)
        ]
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
            call = _Call(
                finder.plan(problem, device=device),
                *copies,
                *_memory(shape, problem.layout_of(names[2])),
                first.dtype,
                device.xp,
            )
            result = call.run(first, second, out)
        # Remembered once it has run.
        calls = _remembered.calls
        if len(calls) >= REMEMBERED:
            del calls[next(iter(calls))]
        calls[key] = call
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


def _memory(shape: tuple[int, ...], layout: str) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Gives the memory shape of a new array of a logical shape, and the axes that turn it into the logical one."""
    if layout != "nhwc":
        return shape, None
    order = devices.memory_order(layout, len(shape))
    return tuple(shape[dim] for dim in order), tuple(order.index(dim) for dim in range(len(shape)))


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
