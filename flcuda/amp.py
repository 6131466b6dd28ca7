"""Loss scaling: gradients of 16 bits are kept from underflow, and a step with an invalid one is skipped.

The scale, its reciprocal, the counters and the flags live on the device, and ``DynamicScaler.step`` never waits for it.
What the host wants to know is copied to pinned memory and read some steps later; see Note [late news].

Note [late news]: at every few steps the state and the flags are copied to the next slot of a ring in pinned memory,
behind the step on its stream, and an event is recorded. Later steps ask the event, and read the slot once it says that
the copy has arrived. When all slots are on their way, because the host is far ahead, nothing is copied: the next one
tells as much. On the CPU device there is nothing to wait for, and every step is read at once.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from flcuda import device as devices
from flcuda import functional as F
from flcuda.autograd import Tensor
from flcuda.device import Array, Device
from flcuda.errors import FlcudaError
from flcuda.ops import elementwise, finite
from flcuda.ops import optimizer as optimizer_ops
from flcuda.ops.flags import join_flags
from flcuda.optim import MOST_STEPS, Optimizer
from flcuda.parameters import Parameter, gradient_number

STATE_VERSION = 2
MAX_SCALE = 2.0**126
"""The largest scale, and the reciprocal of the smallest: float32 holds both, and what they multiply keeps all bits."""

NEWS_INTERVAL = 8
NEWS_SLOTS = 4
_NAMES_SHOWN = 5
_COUNTERS = ("good_steps", "skipped_steps", "consecutive_skips", "steps")


def find_invalid(arrays: Iterable[Any]) -> Array:
    """Says which arrays hold NaN or infinity; on CUDA in one launch, and the host does not wait.

    Args:
        arrays: of CuPy, PyTorch, NumPy or any library with DLPack, all on one device, of float64, float32, float16 or
            bfloat16, of any shape, strides and alignment; borrowed. None and an empty array are valid. One that is not
            dense in memory is copied first.

    Returns:
        int32, (2 + n,), on the arrays' device (NumPy when there is none): whether any is invalid, the index of the
        first invalid array (n when there is none), and one 0 or 1 for each of the n arrays. Owned by the caller.

    Raises:
        TypeError: one is no array, or of another dtype; names it by its index.
        ValueError: they are on different devices, or on a CUDA device that is not the current one.
        FlcudaError: a CUDA graph is being captured, which cannot hold the copy of the arrays' addresses.
    """
    if hasattr(arrays, "shape") or hasattr(arrays, "__dlpack__"):
        raise TypeError(f"arrays: a single {type(arrays).__name__}; pass a list of arrays")
    return finite.find_invalid_list(list(arrays))


class Slot(Protocol):
    """A place in host memory for one copy of arrays from the device."""

    def fetch(self, arrays: Sequence[Array]) -> None:
        """Queues the copy on the current stream, one array behind the other."""
        ...

    def done(self) -> bool:
        """Says whether the copy has arrived; never waits."""
        ...

    def read(self) -> NDArray[np.uint8]:
        """Gives the bytes that have arrived."""
        ...


class _PinnedSlot:
    """Pinned memory with the event that says when a copy has arrived."""

    def __init__(self, memory: Any, start: int, capacity: int) -> None:
        cuda = devices.cupy().cuda
        self._pointer = cuda.PinnedMemoryPointer(memory, start)
        self._bytes = np.frombuffer(self._pointer, np.uint8, capacity)
        self._event = cuda.Event(disable_timing=True)

    def fetch(self, arrays: Sequence[Array]) -> None:
        """Queues the copy on the current stream."""
        stream = devices.cupy().cuda.get_current_stream()
        address = self._pointer.ptr
        for a in arrays:
            a.data.copy_to_host_async(address, a.nbytes, stream)
            address += a.nbytes
        self._event.record(stream)

    def done(self) -> bool:
        """Asks the event."""
        return bool(self._event.done)

    def read(self) -> NDArray[np.uint8]:
        """Gives all of the slot."""
        return self._bytes


def _pinned_slots(capacity: int) -> list[Slot]:
    """Allocates a ring's slots in pinned memory.

    Not from CuPy's pool: that would give memory to somebody else while a copy is still on its way, where CUDA waits
    before it frees.
    """
    memory = devices.cupy().cuda.PinnedMemory(NEWS_SLOTS * capacity)
    return [_PinnedSlot(memory, i * capacity, capacity) for i in range(NEWS_SLOTS)]


@dataclass(frozen=True, eq=False)
class Checked:
    """Where a check leaves its outcome on the device.

    Attributes:
        names: of the arrays that are looked at.
        parts: int32, (2 + n_i,) an arena, as ``find_invalid`` leaves it; empty where there are no arenas.
        flags: int32, (2 + n,), the parts in one; the part itself when there is one.
    """

    names: tuple[str, ...]
    parts: tuple[Array, ...]
    flags: Array


@dataclass(frozen=True)
class News:
    """The scaler as it was after a step.

    Attributes:
        scale: the scale.
        counters: good steps, skipped steps, skips in a row, all steps.
        flagged: a check found its step invalid.
        invalid: names of the parameters with an invalid gradient in such a step.
    """

    scale: float
    counters: tuple[int, ...]
    flagged: bool
    invalid: tuple[str, ...]


class Ring:
    """Copies of state and flags on their way to the host; see Note [late news].

    Args:
        make_slots: makes the slots for a capacity in bytes.
    """

    def __init__(self, make_slots: Callable[[int], list[Slot]] = _pinned_slots) -> None:
        self._make_slots = make_slots
        self._slots: list[Slot] = []
        # To free pinned memory is to wait for the device.
        self._outgrown: list[list[Slot]] = []
        self._capacity = 0
        self._next = 0
        self._on_the_way: list[tuple[Slot, tuple[Checked, ...], bool]] = []

    def reserve(self, checks: Sequence[Checked]) -> None:
        """Makes slots for what `send` will be given, where those there are too small; it may wait for the device.

        Args:
            checks: as for `send`.
        """
        size = 8 * _STATE_WORDS + sum(check.flags.nbytes for check in checks)
        if size > self._capacity:
            self._outgrown.append(self._slots)
            self._capacity = max(4096, 1 << (size - 1).bit_length())
            self._slots = self._make_slots(self._capacity)
            self._next = 0

    def send(self, state: Array, checks: Sequence[Checked]) -> bool:
        """Queues a copy on the current stream, if there is a slot for it.

        Args:
            state: int64, as ``DynamicScaler`` keeps it.
            checks: whose flags are sent with it.

        Returns:
            False when all slots are on their way.
        """
        self.reserve(checks)
        slot = self._slots[self._next]
        if any(taken is slot for taken, _, _ in self._on_the_way):
            return False
        self._next = (self._next + 1) % len(self._slots)
        slot.fetch((state, *(check.flags for check in checks)))
        self._on_the_way.append((slot, tuple(checks), True))
        return True

    def forget(self) -> None:
        """Makes what is on its way not be told any more; its slots stay taken until it has arrived."""
        self._on_the_way = [(slot, checks, False) for slot, checks, _ in self._on_the_way]

    def receive(self) -> News | None:
        """Takes the oldest copy off the ring if it has arrived; never waits.

        Returns:
            What it says; None when none has arrived.
        """
        while self._on_the_way and self._on_the_way[0][0].done():
            slot, checks, wanted = self._on_the_way.pop(0)
            if wanted:
                content = slot.read()
                ends = np.cumsum([8 * _STATE_WORDS, *(4 * (2 + len(check.names)) for check in checks)]).tolist()
                flags = [content[s:e].view(np.int32) for s, e in itertools.pairwise(ends)]
                return _news(content[: ends[0]].view(np.int64), flags, checks)
        return None


_STATE_WORDS = 2 + len(_COUNTERS)


def _news(state: NDArray[np.int64], flags: Sequence[NDArray[np.int32]], checks: Sequence[Checked]) -> News:
    scale = float(state[:1].view(np.float64)[0])
    flagged = [(check.names, given[2:]) for check, given in zip(checks, flags, strict=True) if given[0]]
    invalid = tuple(names[i] for names, given in flagged for i in np.flatnonzero(given).tolist())
    return News(scale, tuple(state[2:].tolist()), bool(flagged), invalid)


class _Scaled(F.Scale):
    """A loss times a scaler's scale, which tells the scaler when its backward runs."""

    def forward(self, x: Array, s: float | Array, tell: Callable[[], None]) -> Array:  # type: ignore[override]
        """Computes x * s."""
        self.tell = tell
        return super().forward(x, s)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """Scales the gradient."""
        self.tell()
        return super().backward(grad)


class DynamicScaler:
    """Multiplies the loss by a scale that halves when a gradient is invalid and doubles after many good steps.

    The rule: an invalid step is skipped and halves the scale, unless that falls below min_scale. A good step counts; at
    growth_interval good steps since the last change the scale doubles, unless that exceeds max_scale. Powers of two
    make unscaling exact. A step is invalid when a gradient is NaN or infinite, is so once it is unscaled (by a scale
    below 1), or when the optimizer clips and the norm of all gradients is so.

    Two ways to use it. Without waiting for the device::

        scaler.step(optimizer, loss)      # backward, check, update or skip, new scale; gradients are forgotten

    and step by step, where the host learns the outcome::

        scaler.scale(loss).backward()
        scaler.unscale(optimizer)
        if scaler.adjust_scale_factor():  # False: invalid, a step would change nothing; repeat the batch or go on
            optimizer.step()
        optimizer.zero_grad()

    The optimizer learns of the scale by ``unscale`` only: its ``step`` without that takes the scaled gradients as they
    are, which it cannot notice. Nor may a loss that was not scaled go backward into the same gradients.

    For micro-batches, ``scale(loss).backward()`` each, the last one by ``step`` if one likes. An invalid one makes the
    whole step invalid.

    Each optimizer needs a scaler of its own, and each scaler one optimizer (or another one later): the gradients of
    one step must all have one scale. A second optimizer is refused where it is noticed, while the gradients of the
    first wait for their step; so is one whose gradients another scaler, or none, has scaled, by ``step``.

    A step can be captured in a CUDA graph, once one was done without: nothing is then read back or kept anew. Capture
    it with a memory pool of its own (``cupy.cuda.using_allocator(pool.malloc)``) that lives as long as the graph: what
    a step takes from the pool and gives back, replays use again. After replays call ``poll``, which does not wait, or
    ``check``, which does.

    Everything is queued on CuPy's current stream, and what waits for the device waits for that stream: call all of a
    scaler on the stream of the steps.

    A copy (``copy.deepcopy``, ``pickle``) has the state of ``state_dict`` in storage of its own, and begins a new step.

    Args:
        init_scale: the first scale.
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: good steps between two growths, at least 1.
        min_scale: at least 2**-126.
        max_scale: at most 2**126.
        max_consecutive_skips: after so many invalid steps in a row an error names scale, step and parameters.
            ``adjust_scale_factor`` raises it at once. So does ``step`` on the CPU; on CUDA a later ``step`` does, once
            the news has arrived without waiting (every 8th step is looked at).

    Raises:
        ValueError: a number is out of range; names it and its value.
        TypeError: an argument is no number.
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1e-4,
        max_scale: float = 65536.0,
        max_consecutive_skips: int = 50,
    ) -> None:
        F.number("max_scale", max_scale, most=MAX_SCALE)
        F.number("min_scale", min_scale, 1 / MAX_SCALE, max_scale)
        F.number("init_scale", init_scale, min_scale, max_scale)
        F.number("growth_factor", growth_factor)
        F.number("backoff_factor", backoff_factor)
        if growth_factor <= 1:
            raise ValueError(f"growth_factor: {growth_factor} is not above 1")
        if not 0 < backoff_factor < 1:
            raise ValueError(f"backoff_factor: {backoff_factor} is not between 0 and 1")
        self.growth_factor = float(growth_factor)
        self.backoff_factor = float(backoff_factor)
        self.growth_interval = F.count("growth_interval", growth_interval, most=MOST_STEPS)
        self.min_scale = float(min_scale)
        self.max_scale = float(max_scale)
        self.max_consecutive_skips = F.count("max_consecutive_skips", max_consecutive_skips, most=MOST_STEPS)
        self._host_scale = float(init_scale)
        self._host_counters = [0] * len(_COUNTERS)
        self._device: Device | None = None
        self._order: Literal["ready", "scaled", "unscaled"] = "ready"
        self._optimizer: Optimizer | None = None
        self._tensors: list[Tensor] = []
        # When the first backward of a scaled loss since the last step ran.
        self._scaled_at: int | None = None
        # One for each set of arenas, by the names in them, and kept: a CUDA graph may have captured its check.
        self._checks: dict[tuple[tuple[str, ...], ...], Checked] = {}
        self._last: Checked | None = None
        self._ring = Ring()
        self._late = False
        self._steps_since_news = 0

    # --- state on the device

    def _on(self, place: Device) -> None:
        """Puts scale and counters on a device at the first use."""
        if self._device is None:
            if place.kind == "cuda":
                self._not_captured("the scaler's first use")
            with place.use():
                # One array, which one copy brings to the host; the others are views.
                self._state: Array = devices.zeros((_STATE_WORDS,), np.int64, device=place)
                self._scale: Array = self._state[0:1].view(np.float64).reshape(())
                self._inv_scale: Array = self._state[1:2].view(np.float64).reshape(())
                self._counters: Array = self._state[2:5]
                self._steps: Array = self._state[5:6]
                self._ticket: Array | None = finite.new_ticket(place) if place.kind == "cuda" else None
            self._device = place
            self._late = place.kind == "cuda"
            if self._late:
                with place.use():
                    self._ring.reserve(())
            self._write()
        elif place != self._device:
            raise ValueError(f"loss: is on {place}, and this scaler's state on {self._device}")

    def _not_captured(self, what: str) -> None:
        if devices.is_capturing():
            raise FlcudaError(f"{what} cannot be captured in a CUDA graph; do one step with this optimizer before")

    def _write(self) -> None:
        assert self._device is not None
        words = np.array([0, 0, *self._host_counters], np.int64)
        words[:2].view(np.float64)[:] = self._host_scale, 1.0 / self._host_scale
        with self._device.use():
            self._state[...] = self._device.xp.asarray(words)

    def _read(self) -> None:
        if self._device is not None:
            words = self._state.get() if devices.is_cuda(self._state) else self._state
            self._host_scale = float(words[:1].view(np.float64)[0])
            self._host_counters = words[2:].tolist()

    @property
    def scale_factor(self) -> float:
        """The scale; waits for the device, on the current stream."""
        self._read()
        return self._host_scale

    @property
    def is_invalid_array(self) -> Array:
        """The flags of the last check, on the device; the next check overwrites them.

        int32, (2 + n,): whether the step is invalid, the index of the first invalid parameter (n when there is none),
        and one 0 or 1 for each of the n parameters, in the order of the optimizer's arenas. Copy what is to last.

        Raises:
            FlcudaError: nothing was checked yet.
        """
        if self._last is None:
            raise FlcudaError("is_invalid_array: no gradient was checked yet")
        return self._last.flags

    def _require(self, call: str, *allowed: str) -> None:
        if self._order in allowed:
            return
        done = {
            "ready": "nothing was scaled since the last step",
            "scaled": "the loss was scaled and its gradients not unscaled",
            "unscaled": "the gradients were unscaled and adjust_scale_factor not called",
        }[self._order]
        raise FlcudaError(f"{call}: wrong order, {done}; the order is scale, backward, unscale, adjust_scale_factor")

    # --- step by step

    def scale(self, loss: Tensor) -> Tensor:
        """Multiplies a loss by the scale; call backward on the result.

        Args:
            loss: one element, float32 or float64.

        Returns:
            The scaled loss.

        Raises:
            TypeError: the loss is no Tensor, or of 16 bits, which most scales would overflow.
            ValueError: the loss has several elements, is on another device than before, or is scaled already.
            FlcudaError: wrong order of calls.
        """
        self._require("scale", "ready", "scaled")
        self._check_loss(loss)
        self._on(loss.device)
        scaled = _Scaled.apply(loss, s=self._scale, tell=self._backward_runs)
        self._order = "scaled"
        return scaled

    def _backward_runs(self) -> None:
        if self._scaled_at is None:
            self._scaled_at = gradient_number()

    def _check_loss(self, loss: Tensor) -> None:
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss: {type(loss).__name__} is no Tensor")
        if loss.dtype.name not in ("float32", "float64"):
            raise TypeError(
                f"loss: has dtype {loss.dtype.name}; float32 or float64 is needed (F.cross_entropy gives it)"
            )
        if loss.data.size != 1:
            raise ValueError(f"loss: has shape {loss.shape}, not one element")
        if isinstance(loss._node, _Scaled):
            raise ValueError("loss: is scaled already; call backward on it, or pass the loss as it was before scale")

    def _check_optimizer(self, call: str, optimizer: Optimizer, place: Device) -> None:
        if optimizer.device != place:
            raise ValueError(f"optimizer: is on {optimizer.device}, and the loss on {place}")
        optimizer.require_current(call)
        if self._scaled_at is not None and optimizer.last_gradient < self._scaled_at:
            raise FlcudaError(
                f"{call}: the losses that were scaled since the last step gave this optimizer's parameters no "
                "gradient; they are another one's, which needs a scaler of its own"
            )

    def unscale(self, target: Optimizer | Iterable[Tensor]) -> None:
        """Looks for invalid gradients and unscales them; the host does not wait.

        Given an optimizer, the gradients stay as they are and its next step unscales them in float32 on the way: those
        of 16 bits would underflow in place. Steps until its zero_grad are skipped when one is invalid. Given tensors,
        their gradients are multiplied in place, then looked at.

        A backward into the optimizer's gradients between here and its step makes the step an error. What else changes
        them (clipping by hand) is not looked at again: with the optimizer's max_norm a norm that is no longer finite
        skips the step, else see to it that they stay finite.

        Args:
            target: the optimizer, or leaf tensors of float32 or float64; one without a gradient counts as valid.

        Raises:
            TypeError: target is neither, or a tensor is of 16 bits.
            ValueError: the optimizer is on another device than the loss.
            FlcudaError: wrong order of calls; the model's arenas were built anew since the optimizer was made; or the
                scaled losses gave it no gradient, which was another one's.
        """
        self._require("unscale", "scaled")
        assert self._device is not None
        with self._device.use():
            if isinstance(target, Optimizer):
                self._check_optimizer("unscale", target, self._device)
                check = self._check_of(target)
                self._look_at_arenas(target, check)
                target.check_norm(self._inv_scale, check.flags)
                # Copies: adjust_scale_factor may change the scale before the step, the next check the flags.
                target.unscaled(self._inv_scale.copy(), check.flags.copy())
                self._optimizer = target
            else:
                self._unscale_tensors(_tensors(target))
        self._order = "unscaled"

    def _unscale_tensors(self, tensors: list[Tensor]) -> None:
        names = tuple((t.name if isinstance(t, Parameter) else "") or f"tensor {i}" for i, t in enumerate(tensors))
        with np.errstate(over="ignore", invalid="ignore"):
            unscaled = [None if t.grad is None else elementwise.scale(t.grad, self._inv_scale) for t in tensors]
        check = Checked(names, (), _new_flags(len(names), self._device))
        finite.find_invalid_list(unscaled, check.flags)
        for t, grad in zip(tensors, unscaled, strict=True):
            if isinstance(t, Parameter) and grad is not None:
                elementwise.copy(grad, t.grad)
            else:
                t.grad = grad
        self._tensors = tensors
        self._last = check
        if self._late:
            self._ring.reserve(self._all_checks())

    def _check_of(self, optimizer: Optimizer) -> Checked:
        names = tuple([tuple([segment.name for segment in arena.segments]) for arena in optimizer.arenas])
        check = self._checks.get(names)
        if check is None:
            if optimizer.device.kind == "cuda":
                self._not_captured("the first step with these arenas")
            parts = tuple(_new_flags(len(part), self._device) for part in names)
            together = tuple(itertools.chain.from_iterable(names))
            flags = parts[0] if len(parts) == 1 else _new_flags(len(together), self._device)
            check = self._checks[names] = Checked(together, parts, flags)
            if self._late:
                self._ring.reserve(self._all_checks())
        return check

    def _all_checks(self) -> tuple[Checked, ...]:
        # The last is of tensors, or one of the others.
        return tuple({id(check): check for check in (*self._checks.values(), self._last) if check is not None}.values())

    def _look_at_arenas(self, optimizer: Optimizer, check: Checked) -> None:
        all_sums = optimizer.sums or [None] * len(check.parts)
        for arena, part, sums in zip(optimizer.arenas, check.parts, all_sums, strict=True):
            arena.fill_missing()
            finite.find_invalid(
                arena.grad, arena.offsets, part, sums=sums, inv_scale=self._inv_scale, ticket=self._ticket
            )
        if len(check.parts) > 1:
            join_flags(check.parts, check.flags)
        self._last = check

    def _update(self) -> None:
        optimizer_ops.scaler_update(
            self._scale,
            self._inv_scale,
            self._counters,
            self.is_invalid_array,
            steps=self._steps,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            min_scale=self.min_scale,
            max_scale=self.max_scale,
        )

    def adjust_scale_factor(self) -> bool:
        """Applies the rule and says whether the gradients are valid; waits for the device.

        When they are not, the optimizer given to unscale has had its gradients forgotten and its model's pending
        batch-norm statistics put back, and until its zero_grad a step changes nothing. Tensors given to unscale have
        had their gradients forgotten, too, so that the batch can be repeated; no optimizer and no model is known then:
        do not step, and call the model's discard_statistics.

        Returns:
            True when all gradients were finite.

        Raises:
            FlcudaError: wrong order of calls, or max_consecutive_skips invalid steps in a row.
        """
        self._require("adjust_scale_factor", "unscaled")
        assert self._device is not None
        with self._device.use():
            self._update()
            valid = int(self.is_invalid_array[0]) == 0
            if not valid and self._optimizer is not None:
                # Not by its zero_grad, which would forget that a step is to be skipped.
                for arena in self._optimizer.arenas:
                    arena.zero_grad()
                for statistics in self._optimizer.statistics:
                    statistics.discard()
            if not valid:
                for t in self._tensors:
                    t.grad = None
        self._begin()
        if not valid:
            self._judge(self._latest(self._last_check()))
        return valid

    def _begin(self) -> None:
        """Begins a new step."""
        self._order = "ready"
        self._optimizer = None
        self._tensors = []
        self._scaled_at = None

    # --- without waiting

    def step(self, optimizer: Optimizer, loss: Tensor) -> None:
        """Does all of a step after the forward: scaled backward, check, update or skip, new scale.

        The gradients are forgotten afterwards: no zero_grad is needed. The host never waits for the device; see the
        class for when an endless row of skips is an error.

        Args:
            optimizer: its model's gradients are used.
            loss: one element, float32 or float64.

        Raises:
            TypeError: optimizer is none, the loss is no Tensor, or it is of 16 bits.
            ValueError: the loss has several elements, is on another device than before or than the optimizer, or is
                scaled already.
            FlcudaError: wrong order of calls; the optimizer has gradients that this scaler did not scale, or the losses
                that it did scale gave it none; the model's arenas were built anew since the optimizer was made;
                max_consecutive_skips invalid steps in a row, this one or an earlier one the last (this step is done
                all the same); or a CUDA graph is being captured and no step was done before.
        """
        self._require("step", "ready", "scaled")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer: {type(optimizer).__name__} is no Optimizer")
        self._check_loss(loss)
        self._check_optimizer("step", optimizer, loss.device)
        if self._scaled_at is None and optimizer.has_gradients():
            raise FlcudaError(
                "step: the optimizer has gradients that this scaler did not scale (of a backward without scale, or of "
                "another scaler), which do not go with those of this loss; call its zero_grad"
            )
        self._on(loss.device)
        assert self._device is not None
        with self._device.use():
            check = self._check_of(optimizer)
            loss.backward(elementwise.cast(self._scale, loss.dtype).reshape(loss.shape))
            self._look_at_arenas(optimizer, check)
            # Nobody can change a gradient between the check and the update.
            optimizer.apply(self._inv_scale, check.flags, sums_are_current=True)
            self._update()
        optimizer.zero_grad()
        self._begin()
        self._steps_since_news += 1
        send = self._steps_since_news >= min(NEWS_INTERVAL, self.max_consecutive_skips)
        self._poll(send, self._last_check())

    def poll(self) -> None:
        """Looks whether too many steps were skipped in a row, without waiting: at what has arrived of earlier steps.

        ``step`` does so by itself. Call it after replays of a captured step, on their stream.

        Raises:
            FlcudaError: max_consecutive_skips or more; names scale, step and parameters.
        """
        # Which of the captured steps was replayed is not known here, only what the device says.
        self._poll(True, self._all_checks())

    def _last_check(self) -> tuple[Checked, ...]:
        return () if self._last is None else (self._last,)

    def _poll(self, send: bool, checks: Sequence[Checked]) -> None:
        if self._device is None or not self._late:
            self._judge(self._latest(checks))
            return
        with self._device.use():
            if devices.is_capturing():
                return
            while (news := self._ring.receive()) is not None:
                self._judge(news)
            if send and self._ring.send(self._state, checks):
                self._steps_since_news = 0

    def check(self) -> None:
        """Looks whether too many steps were skipped in a row; waits for the device.

        Raises:
            FlcudaError: max_consecutive_skips or more; names scale, step and parameters.
        """
        self._judge(self._latest(self._all_checks()))

    def _latest(self, checks: Sequence[Checked]) -> News:
        """Reads the state, and the flags of checks; waits for the device."""
        if self._device is None:
            return News(self._host_scale, tuple(self._host_counters), False, ())
        arrays = (self._state, *(check.flags for check in checks))
        state, *flags = (a.get() if devices.is_cuda(a) else a for a in arrays)
        return _news(state, flags, checks)

    def _judge(self, news: News) -> None:
        _, _, skips, steps = news.counters
        if skips < self.max_consecutive_skips:
            return
        # What else is on its way says the same.
        self._ring.forget()
        shown = ", ".join(repr(name) for name in news.invalid[:_NAMES_SHOWN])
        more = f" and {len(news.invalid) - _NAMES_SHOWN} more" if len(news.invalid) > _NAMES_SHOWN else ""
        found = f"invalid in {shown}{more}" if shown else "finite one by one, but the norm of all together is not"
        where = f"In that step gradients were {found}" if news.flagged else "That is what the loaded state says"
        raise FlcudaError(
            f"{skips} steps in a row up to step {steps} had invalid gradients and were skipped; the scale is "
            f"{news.scale:g} (its floor {self.min_scale:g}). {where}. The loss or the data is not finite, or the "
            "learning rate is too high"
        )

    # --- state dicts

    def state_dict(self) -> dict[str, Any]:
        """Copies the state to the host, between two steps; waits for the device.

        Returns:
            "version", "scale", the counters ("good_steps" since the scale last changed or was tried to,
            "skipped_steps", "consecutive_skips", "steps") and the arguments of the rule, as Python numbers. With
            them another scaler goes on as this one would have.
        """
        self._read()
        return {
            "version": STATE_VERSION,
            "scale": self._host_scale,
            **dict(zip(_COUNTERS, self._host_counters, strict=True)),
            **{name: getattr(self, name) for name in _RULE},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the state in place, between two steps; on an error nothing has changed.

        A CUDA graph that has captured a step goes on with the state, but keeps the arguments of the rule that it was
        captured with.

        Args:
            state: as ``state_dict`` gave it; of version 1, which did not count all steps, too.

        Raises:
            ValueError: a key is missing or unknown, the version is another, or a number is out of range.
            TypeError: the state is no mapping, or a value is no number.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state: {state!r} is no mapping")
        if state.get("version") == 1 and "skipped_steps" in state:
            # As many steps there have been at least.
            state = {"steps": state["skipped_steps"], **state, "version": STATE_VERSION}
        keys = ("version", "scale", *_COUNTERS, *_RULE)
        if state.get("version", STATE_VERSION) != STATE_VERSION:
            raise ValueError(f"state: version {state['version']!r} is not {STATE_VERSION}")
        faults = [f"missing key: {key}" for key in keys if key not in state]
        faults += [f"unexpected key: {key}" for key in state if key not in keys]
        if faults:
            raise ValueError("state: does not fit the scaler\n  " + "\n  ".join(faults))
        checked = DynamicScaler(init_scale=state["min_scale"], **{name: state[name] for name in _RULE})
        scale = F.number("scale", state["scale"], checked.min_scale, checked.max_scale)
        counters = [F.count(name, state[name], least=0, most=MOST_STEPS) for name in _COUNTERS]
        for name in _RULE:
            setattr(self, name, getattr(checked, name))
        self._begin()
        self._host_scale = scale
        self._host_counters = counters
        self._ring.forget()
        self._steps_since_news = 0
        if self._device is not None:
            self._write()
            with self._device.use():
                for check in self._all_checks():
                    _clear(check.flags)

    def __getstate__(self) -> dict[str, Any]:
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.load_state_dict(state)


_RULE = ("growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale", "max_consecutive_skips")


def _new_flags(arrays: int, place: Device | None) -> Array:
    flags = devices.empty((2 + arrays,), np.int32, device=place)
    _clear(flags)
    return flags


def _clear(flags: Array) -> None:
    flags[...] = 0
    flags[1:2] = flags.size - 2


def _tensors(target: Any) -> list[Tensor]:
    """Lists the tensors of a target of `unscale`, each once: a shared one would be unscaled twice."""
    if isinstance(target, Tensor) or not isinstance(target, Iterable):
        raise TypeError(f"target: {type(target).__name__} is neither an Optimizer nor a list of tensors")
    tensors = list({id(t): t for t in list(target)}.values())
    for i, t in enumerate(tensors):
        if not isinstance(t, Tensor):
            raise TypeError(f"target: element {i} is a {type(t).__name__} and no Tensor")
        if t.dtype.itemsize < 4:
            raise TypeError(
                f"target: tensor {i} is {t.dtype.name}, which unscaling would underflow; pass the optimizer"
            )
    return tensors
