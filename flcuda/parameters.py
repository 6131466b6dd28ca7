"""Parameters and batch-norm statistics in flat storage.

Note [arenas]: all parameters of one device and dtype lie in one flat array, their gradients in a second and, for 16-bit
ones, their float32 masters in a third, at the same element offsets. A parameter's ``data``, ``grad`` and ``master`` are
views. So the check of the gradients and the update are one launch an arena, and a backward writes a gradient where it
is needed. Each segment is padded to 256 bytes; the padding is zero from the start and nobody writes it.

Note [pending statistics]: a training forward writes the new running mean, variance and batch count as pending ones. The
optimizer's step settles them on the device: a valid step makes them the running ones, a skipped step puts the last good
ones back. Without an optimizer, putting the model in evaluation mode or reading its state dict commits them.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flcuda import device as devices
from flcuda.autograd import GradTarget, Tensor
from flcuda.device import DTYPES, Array, Device, Moment
from flcuda.ops import elementwise
from flcuda.ops import optimizer as optimizer_ops

SEGMENT_BYTES = 256

_numbers = itertools.count(1)
_moves = itertools.count(1)
_last_move = 0


def gradient_number() -> Moment:
    """Gives the next number of those by which an arena's ``last_gradient`` says when it came."""
    return Moment(next(_numbers))


def last_move() -> int:
    """Gives a number that changes when parameters or statistics move to other memory, anywhere."""
    return _last_move


def _moved() -> None:
    global _last_move
    _last_move = next(_moves)


def master_dtype(dtype: str) -> str:
    """Names the dtype in which a parameter of a dtype is updated: float64 for float64, else float32."""
    return "float64" if dtype == "float64" else "float32"


def _assign(out: Array, values: Any) -> None:
    """Copies host or device values into an array of the same shape on its device; host values are converted there."""
    if not devices.is_cuda(values):
        values = np.asarray(values, out.dtype)
    out[...] = devices.array_module(out).asarray(values)


class Parameter(Tensor):
    """A leaf that an optimizer updates.

    Args:
        values: the initial values, an array of the logical shape; copied.
        dtype: the word of the dtype in which forward and backward compute; values are also kept as master in float32
            (float64 for float64).
        layout: "nchw" or "nhwc": the memory order of data, gradient and master. The logical shape does not change.
        device: where; as for ``device.resolve``.
        decay: weight decay applies to it.
        name: the dotted name in its model, which reports use; set when the model's arenas are built.

    Attributes:
        master: the values that are updated; the same array as data when the dtypes are equal.
        buffer: where the gradient is written; its content counts only once ``grad`` is that array. Another array that
            is assigned to ``grad`` is copied into it by the next backward, check or update.

    Raises:
        ValueError: the dtype or layout is unknown.
    """

    __slots__ = ("buffer", "decay", "home", "layout", "master", "name")

    def __init__(
        self,
        values: Any,
        dtype: str = "float32",
        *,
        layout: str = "nchw",
        device: str | Device | None = None,
        decay: bool = True,
        name: str = "",
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype: {dtype!r} is none of {list(DTYPES)}")
        place = devices.resolve(device)
        shape = np.shape(values) if not hasattr(values, "shape") else values.shape
        with place.use():
            master = devices.empty(shape, master_dtype(dtype), device=place, layout=layout)
            _assign(master, values)
            same = dtype == master_dtype(dtype)
            data = master if same else devices.empty(shape, dtype, device=place, layout=layout)
        super().__init__(data, requires_grad=True)
        self.master: Array = master
        self.buffer: Array | None = None
        self.layout = layout
        self.decay = decay
        self.name = name
        self.home: _Home | None = None
        self._copy_master()

    def _copy_master(self) -> None:
        if self.data is not self.master:
            elementwise.cast(self.master, self.data.dtype, out=self.data)

    def write(self, values: Any) -> None:
        """Sets the values in place.

        Args:
            values: an array of the same logical shape; borrowed.

        Raises:
            ValueError: the shape differs.
        """
        if tuple(np.shape(values)) != self.shape:
            raise ValueError(
                f"values: shape {tuple(np.shape(values))} is not {self.name or 'the parameter'}'s {self.shape}"
            )
        _assign(self.master, values)
        self._copy_master()

    def values(self) -> np.ndarray[Any, Any]:
        """Gives a copy of the master in host memory, C-contiguous in logical order; waits for the device."""
        master = self.master.get() if devices.is_cuda(self.master) else self.master
        return np.array(master, order="C")

    def target(self) -> GradTarget:
        """Gives the gradient's array, and whether it already holds something to add to."""
        if devices.recordings:
            self._touch()
        if self.buffer is None:
            self.buffer = devices.empty(self.shape, self.dtype, device=self.device, layout=self.layout)
        if self.grad is not None and self.grad is not self.buffer:
            # The user assigned one, a clipped gradient for instance.
            elementwise.copy(self.grad, self.buffer)
            self.grad = self.buffer
        return GradTarget(self.buffer, self.grad is not None)

    def receive(self, grad: Array) -> None:
        """Takes a gradient: one that a backward wrote in place, or an array to copy or add.

        Args:
            grad: the target's array itself, or an array like data.
        """
        array, accumulate = self.target()
        if grad is not array:
            if accumulate:
                elementwise.accumulate_(array, grad)
            else:
                elementwise.copy(grad, array)
        self.grad = array
        if self.home is not None:
            self.home.last_gradient = gradient_number()

    def _touch(self) -> None:
        arena = None if self.home is None else self.home.arena()
        devices.touch(self if arena is None else arena)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "master": self.master,
            "dtype": self.dtype.name,
            "layout": self.layout,
            "device": self.device,
            "decay": self.decay,
            "name": self.name,
            "requires_grad": self.requires_grad,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy has storage of its own and no gradient; deepcopy and pickle do not keep views or memory orders.
        self.__init__(  # type: ignore[misc]
            state["master"],
            state["dtype"],
            layout=state["layout"],
            device=state["device"],
            decay=state["decay"],
            name=state["name"],
        )
        self.requires_grad = state["requires_grad"]


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter's place in an arena; offset and size count elements."""

    name: str
    offset: int
    size: int
    shape: tuple[int, ...]
    layout: str
    decay: bool

    def view(self, flat: Array) -> Array:
        """Gives the segment of a flat array in its logical shape."""
        order = devices.memory_order(self.layout, len(self.shape))
        memory = flat[self.offset : self.offset + self.size].reshape([self.shape[dim] for dim in order])
        return memory.transpose(sorted(range(len(order)), key=order.__getitem__))


class _Home:
    """What the parameters of one arena share: its identity, and when a backward last gave one of them a gradient."""

    __slots__ = ("arena", "last_gradient")

    def __init__(self, arena: "Arena") -> None:
        # Weak, so that no circle keeps memory of the device until it is found.
        self.arena: Callable[[], Arena | None] = weakref.ref(arena)
        self.last_gradient = Moment(0)


class Arena:
    """Flat storage of parameters; see Note [arenas]. Building it moves the parameters in, values and gradients kept.

    Args:
        parameters: at least one; all on one device and of one dtype, each once.

    Attributes:
        parameters: as given.
        segments: one a parameter.
        data, grad: flat, of the parameters' dtype.
        master: flat, float32 or float64; the same array as data when the dtypes are equal.
        offsets: int64, (n + 1,), on the device: where each segment starts, and the end.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        first = parameters[0]
        self.device = first.device
        self.dtype = first.dtype
        self.parameters = tuple(parameters)
        step = SEGMENT_BYTES // self.dtype.itemsize
        segments: list[Segment] = []
        offset = 0
        for p in parameters:
            if p.device != self.device or p.dtype != self.dtype:
                raise ValueError(
                    f"parameters: {p.name!r} is {p.dtype.name} on {p.device}, "
                    f"the arena {self.dtype.name} on {self.device}"
                )
            segments.append(Segment(p.name, offset, int(p.data.size), p.shape, p.layout, p.decay))
            offset += -(-int(p.data.size) // step) * step
        self.segments = tuple(segments)
        self.size = offset
        with self.device.use():
            self.data: Array = devices.zeros((offset,), self.dtype, device=self.device)
            self.grad: Array = devices.zeros((offset,), self.dtype, device=self.device)
            same = first.data is first.master
            self.master: Array = self.data if same else devices.zeros((offset,), first.master.dtype, device=self.device)
            self.offsets: Array = self.device.xp.asarray(np.array([*(s.offset for s in segments), offset], np.int64))
        self._home = _Home(self)
        _moved()
        for p, segment in zip(parameters, segments, strict=True):
            data, grad, master = segment.view(self.data), segment.view(self.grad), segment.view(self.master)
            elementwise.copy(p.data, data)
            if not same:
                elementwise.copy(p.master, master)
            if p.grad is not None:
                elementwise.copy(p.grad, grad)
                p.grad = grad
                self._home.last_gradient = gradient_number()
            p.data = data
            p.master = data if same else master
            p.buffer = grad
            p.home = self._home

    @property
    def last_gradient(self) -> Moment:
        """The ``gradient_number`` of the latest gradient that a backward gave one of the parameters; 0 before any."""
        return self._home.last_gradient

    def is_current(self) -> bool:
        """Says whether every parameter still lives here; another model's arenas may have taken one over."""
        return all(p.home is self._home for p in self.parameters)

    def host_state(self) -> tuple[Any, ...]:
        """Gives which parameters have a gradient; see Note [host state] in flcuda.device."""
        return (self._home.last_gradient, *[p.grad for p in self.parameters])

    def set_host_state(self, state: tuple[Any, ...]) -> None:
        """Sets the gradients, and when the last came."""
        self._home.last_gradient, *gradients = state
        for p, grad in zip(self.parameters, gradients, strict=True):
            p.grad = grad

    def zero_grad(self) -> None:
        """Forgets the gradients; nothing is written, the next backward overwrites."""
        devices.touch(self, reads=False)
        for p in self.parameters:
            p.grad = None

    def fill_missing(self) -> None:
        """Writes zeros where a parameter has no gradient: for check and update that is what it counts as."""
        for p in self.parameters:
            buffer, filled = p.target()
            if not filled:
                elementwise.fill(buffer, 0)


def build_arenas(parameters: Iterable[tuple[str, Parameter]]) -> tuple[Arena, ...]:
    """Names parameters and moves them into arenas, one a device and dtype.

    Args:
        parameters: names and parameters, each parameter once.

    Returns:
        The arenas, in the order in which their first parameters came.
    """
    groups: dict[tuple[Device, str], list[Parameter]] = {}
    for name, p in parameters:
        p.name = name
        groups.setdefault((p.device, p.dtype.name), []).append(p)
    return tuple(Arena(group) for group in groups.values())


class Statistics:
    """Flat storage of batch-norm statistics, running and pending; see Note [pending statistics].

    Args:
        channels: the channel counts of the layers.
        dtype: "float32" or "float64".
        device: where.

    Attributes:
        running, pending: flat; for each layer its means and its variances.
        running_counts, pending_counts: int64, one a layer: how many batches went in.
    """

    def __init__(self, channels: Sequence[int], dtype: str, device: Device) -> None:
        step = SEGMENT_BYTES // DTYPES[dtype].itemsize
        self.device = device
        self._segments: list[tuple[int, int]] = []
        offset = 0
        for count in channels:
            self._segments.append((offset, count))
            offset += 2 * (-(-count // step) * step)
        self._step = step
        self.running: Array = devices.zeros((offset,), dtype, device=device)
        self.pending: Array = devices.zeros((offset,), dtype, device=device)
        self.running_counts: Array = devices.zeros((len(channels),), np.int64, device=device)
        self.pending_counts: Array = devices.zeros((len(channels),), np.int64, device=device)
        self._settled = True

    @property
    def settled(self) -> bool:
        """Whether pending equals running."""
        devices.touch(self)
        return self._settled

    @settled.setter
    def settled(self, value: bool) -> None:
        devices.touch(self, reads=False)
        self._settled = value

    def host_state(self) -> tuple[Any, ...]:
        """Gives ``settled``; see Note [host state] in flcuda.device."""
        return (self._settled,)

    def set_host_state(self, state: tuple[Any, ...]) -> None:
        """Sets ``settled``."""
        (self._settled,) = state

    def views(self, layer: int, *, pending: bool) -> tuple[Array, Array, Array]:
        """Gives a layer's mean, variance and batch count, (C,), (C,) and (1,).

        Args:
            layer: its index.
            pending: the pending ones, not the running ones.

        Returns:
            Views.
        """
        offset, count = self._segments[layer]
        second = offset + -(-count // self._step) * self._step
        flat, counts = (self.pending, self.pending_counts) if pending else (self.running, self.running_counts)
        return flat[offset : offset + count], flat[second : second + count], counts[layer : layer + 1]

    def settle(self, flags: Array | None = None) -> None:
        """Makes the pending statistics the running ones, or puts the running ones back, on the device.

        Args:
            flags: int32; a first element other than 0 says that the step was invalid. None: it was valid.
        """
        optimizer_ops.commit_statistics(self.running, self.pending, flags)
        optimizer_ops.commit_statistics(self.running_counts, self.pending_counts, flags)
        self.settled = True

    def discard(self) -> None:
        """Puts the running statistics back in place of the pending ones."""
        elementwise.copy(self.running, self.pending)
        elementwise.copy(self.running_counts, self.pending_counts)
        self.settled = True


class BatchNormState:
    """What a batch norm is besides its input: the ``bn`` of ``functional.batch_norm``.

    Args:
        weight, bias: float32 parameters, (C,); float64 for float64 inputs.
        momentum: the share of the new batch in the running statistics (cuDNN's exponential average factor); None for
            the plain average over all batches.
        eps: added to the variance.

    Attributes:
        running_mean, running_var: (C,), the statistics of valid steps; 0 and 1 at first.
        num_batches_tracked: int64, (1,).
        pending_mean, pending_var, pending_batches: the same with the forwards since then.
        statistics: the storage of which these are views.
    """

    def __init__(self, weight: Parameter, bias: Parameter, momentum: float | None, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.momentum = momentum
        self.eps = eps
        self._live_in(Statistics([weight.shape[0]], weight.dtype.name, weight.device), 0)
        elementwise.fill(self.running_var, 1)
        elementwise.fill(self.pending_var, 1)

    def _live_in(self, statistics: Statistics, layer: int) -> None:
        self.statistics = statistics
        self.running_mean, self.running_var, self.num_batches_tracked = statistics.views(layer, pending=False)
        self.pending_mean, self.pending_var, self.pending_batches = statistics.views(layer, pending=True)

    def _arrays(self) -> tuple[Array, ...]:
        running = (self.running_mean, self.running_var, self.num_batches_tracked)
        return (*running, self.pending_mean, self.pending_var, self.pending_batches)

    def move_to(self, statistics: Statistics, layer: int) -> None:
        """Moves the statistics into another storage.

        Args:
            statistics: the new storage.
            layer: the index there.
        """
        old = self._arrays()
        settled = self.statistics.settled
        _moved()
        self._live_in(statistics, layer)
        for source, out in zip(old, self._arrays(), strict=True):
            elementwise.copy(source, out)
        statistics.settled = statistics.settled and settled

    def write(self, name: str, values: Any) -> None:
        """Sets one running statistic in place, and the pending one with it.

        Args:
            name: "running_mean", "running_var" or "num_batches_tracked".
            values: an array of as many elements.
        """
        pending = {
            "running_mean": "pending_mean",
            "running_var": "pending_var",
            "num_batches_tracked": "pending_batches",
        }
        for attribute in (name, pending[name]):
            out = getattr(self, attribute)
            _assign(out, np.asarray(values).reshape(out.shape))

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("weight", "bias", "momentum", "eps")}
        # Copies, because a view's base is the storage of the whole model.
        return {**kept, "arrays": [a.copy() for a in self._arrays()], "settled": self.statistics.settled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["weight"], state["bias"], state["momentum"], state["eps"])  # type: ignore[misc]
        for values, out in zip(state["arrays"], self._arrays(), strict=True):
            elementwise.copy(values, out)
        self.statistics.settled = state["settled"]


def build_statistics(states: Sequence[BatchNormState]) -> tuple[Statistics, ...]:
    """Moves batch-norm statistics into flat storages, one a device and dtype.

    Args:
        states: each once.

    Returns:
        The storages.
    """
    groups: dict[tuple[Device, str], list[BatchNormState]] = {}
    for state in states:
        groups.setdefault((state.statistics.device, state.running_mean.dtype.name), []).append(state)
    storages = []
    for (place, dtype), group in groups.items():
        storage = Statistics([int(state.running_mean.size) for state in group], dtype, place)
        for layer, state in enumerate(group):
            state.move_to(storage, layer)
        storages.append(storage)
    return tuple(storages)
