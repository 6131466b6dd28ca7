"""Loss scaling: gradients of 16 bits are kept from underflow, and a step with an invalid one is skipped.

The scale, its reciprocal, the counters and the flags live on the device. ``DynamicScaler.step`` never waits for the
device but at every 50th call.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from flcuda import device as devices
from flcuda import functional as F
from flcuda.autograd import Tensor
from flcuda.device import Array, Device
from flcuda.errors import FlcudaError
from flcuda.ops import elementwise
from flcuda.ops import optimizer as optimizer_ops
from flcuda.ops.finite import find_invalid
from flcuda.ops.flags import join_flags
from flcuda.optim import SGD
from flcuda.parameters import Parameter

STATE_VERSION = 1
CHECK_INTERVAL = 50
_COUNTERS = ("good_steps", "skipped_steps", "consecutive_skips")


class DynamicScaler:
    """Multiplies the loss by a scale that halves when a gradient is invalid and doubles after many good steps.

    The rule: an invalid step is skipped and halves the scale, unless that falls below min_scale. A good step counts; at
    growth_interval good steps since the last change the scale doubles, unless that exceeds max_scale. Powers of two
    make unscaling exact.

    Two ways to use it. Without waiting for the device::

        scaler.step(optimizer, loss)      # backward, check, update or skip, new scale; gradients are forgotten

    and step by step, where the host learns the outcome::

        scaler.scale(loss).backward()
        scaler.unscale(optimizer)
        if scaler.adjust_scale_factor():  # False: invalid, a step would change nothing; repeat the batch or go on
            optimizer.step()
        optimizer.zero_grad()

    For micro-batches, ``scale(loss).backward()`` each, the last one by ``step`` if one likes.

    Args:
        init_scale: the first scale.
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: good steps between two growths, at least 1.
        min_scale: above 0.
        max_scale: finite.
        max_consecutive_skips: after so many invalid steps in a row an error says which parameter it is; ``step`` looks
            at every 50th call only, ``adjust_scale_factor`` always.

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
        F.number("max_scale", max_scale)
        F.number("min_scale", min_scale, most=max_scale)
        if min_scale <= 0:
            raise ValueError(f"min_scale: {min_scale} is not above 0")
        F.number("init_scale", init_scale, min_scale, max_scale)
        F.number("growth_factor", growth_factor)
        F.number("backoff_factor", backoff_factor)
        if growth_factor <= 1:
            raise ValueError(f"growth_factor: {growth_factor} is not above 1")
        if not 0 < backoff_factor < 1:
            raise ValueError(f"backoff_factor: {backoff_factor} is not between 0 and 1")
        self.growth_factor = float(growth_factor)
        self.backoff_factor = float(backoff_factor)
        self.growth_interval = F.count("growth_interval", growth_interval)
        self.min_scale = float(min_scale)
        self.max_scale = float(max_scale)
        self.max_consecutive_skips = F.count("max_consecutive_skips", max_consecutive_skips)
        self._host_scale = float(init_scale)
        self._host_counters = [0, 0, 0]
        self._device: Device | None = None
        self._state: Literal["ready", "scaled", "unscaled"] = "ready"
        self._optimizer: SGD | None = None
        self._flags: Array | None = None
        self._parts: list[Array] = []
        self._names: tuple[str, ...] = ()
        self._calls = 0

    # --- state on the device

    def _on(self, place: Device) -> None:
        """Puts scale and counters on a device at the first use."""
        if self._device is None:
            with place.use():
                self._scale = devices.zeros((), np.float64, device=place)
                self._inv_scale = devices.zeros((), np.float64, device=place)
                self._counters = devices.zeros((3,), np.int64, device=place)
            self._device = place
            self._write()
        elif place != self._device:
            raise ValueError(f"loss: is on {place}, and this scaler's state on {self._device}")

    def _write(self) -> None:
        assert self._device is not None
        with self._device.use():
            elementwise.fill(self._scale, self._host_scale)
            elementwise.fill(self._inv_scale, 1.0 / self._host_scale)
            self._counters[...] = self._device.xp.asarray(np.array(self._host_counters, np.int64))

    def _read(self) -> None:
        if self._device is not None:
            self._host_scale = float(self._scale)
            self._host_counters = [int(n) for n in self._counters.tolist()]

    @property
    def scale_factor(self) -> float:
        """The scale; waits for the device."""
        self._read()
        return self._host_scale

    @property
    def is_invalid_array(self) -> Array:
        """The flags of the last check, on the device.

        int32, (2 + n,): whether any gradient was invalid, the index of the first invalid parameter (n when there is
        none), and one 0 or 1 for each of the n parameters, in the order of the optimizer's arenas.

        Raises:
            FlcudaError: nothing was checked yet.
        """
        if self._flags is None:
            raise FlcudaError("is_invalid_array: no gradient was checked yet")
        return self._flags

    def _require(self, call: str, *allowed: str) -> None:
        if self._state in allowed:
            return
        done = {
            "ready": "nothing was scaled since the last step",
            "scaled": "the loss was scaled and its gradients not unscaled",
            "unscaled": "the gradients were unscaled and adjust_scale_factor not called",
        }[self._state]
        raise FlcudaError(f"{call}: wrong order, {done}; the order is scale, backward, unscale, adjust_scale_factor")

    # --- step by step

    def scale(self, loss: Tensor) -> Tensor:
        """Multiplies a loss by the scale; call backward on the result.

        Args:
            loss: one element, float32 or float64.

        Returns:
            The scaled loss.

        Raises:
            TypeError: the loss is of 16 bits, which most scales would overflow.
            ValueError: the loss has several elements, or is on another device than before.
            FlcudaError: wrong order of calls.
        """
        self._require("scale", "ready", "scaled")
        self._check_loss(loss)
        self._state = "scaled"
        return F.scale(loss, self._scale)

    def _check_loss(self, loss: Tensor) -> None:
        if loss.dtype.name not in ("float32", "float64"):
            raise TypeError(
                f"loss: has dtype {loss.dtype.name}; float32 or float64 is needed (F.cross_entropy gives it)"
            )
        if loss.data.size != 1:
            raise ValueError(f"loss: has shape {loss.shape}, not one element")
        self._on(loss.device)

    def unscale(self, target: SGD | Iterable[Tensor]) -> None:
        """Looks for invalid gradients and unscales them; the host does not wait.

        Given an optimizer, the gradients stay as they are and its next step unscales them in float32 on the way: those
        of 16 bits would underflow in place. That step is skipped when one is invalid. Given tensors, their gradients
        are multiplied in place, then looked at.

        Args:
            target: the optimizer, or leaf tensors of float32 or float64; one without a gradient counts as valid.

        Raises:
            TypeError: a tensor is of 16 bits.
            FlcudaError: wrong order of calls.
        """
        self._require("unscale", "scaled")
        assert self._device is not None
        with self._device.use():
            if isinstance(target, SGD):
                self._optimizer = target
                self._look_at_arenas(target)
                # Copies: adjust_scale_factor may change the scale before the step, the next check the flags.
                target.inv_scale = self._inv_scale.copy()
                target.flags = self.is_invalid_array.copy()
            else:
                self._optimizer = None
                # Each once: a shared one would be unscaled twice.
                self._unscale_tensors(list({id(t): t for t in target}.values()))
        self._state = "unscaled"

    def _unscale_tensors(self, tensors: list[Tensor]) -> None:
        for i, t in enumerate(tensors):
            if t.dtype.itemsize < 4:
                raise TypeError(
                    f"target: tensor {i} is {t.dtype.name}, which unscaling would underflow; pass the optimizer"
                )
        parts = []
        names = []
        for i, t in enumerate(tensors):
            if t.grad is None:
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                unscaled = elementwise.scale(t.grad, self._inv_scale)
            if isinstance(t, Parameter):
                elementwise.copy(unscaled, t.grad)
            else:
                t.grad = unscaled
            parts.append(_flags_of(unscaled))
            names.append((t.name if isinstance(t, Parameter) else "") or f"tensor {i}")
        self._names = tuple(names)
        self._flags = _new_flags(len(names), self._device)
        self._parts = []  # those of an optimizer, whose flags these are not
        if parts:
            join_flags(parts, self._flags)

    def _look_at_arenas(self, optimizer: SGD) -> None:
        names = tuple(segment.name for arena in optimizer.arenas for segment in arena.segments)
        sizes = [2 + len(arena.segments) for arena in optimizer.arenas]
        self._names = names
        if self._flags is None or [part.size for part in self._parts] != sizes:
            self._parts = [_new_flags(size - 2, self._device) for size in sizes]
            self._flags = self._parts[0] if len(self._parts) == 1 else _new_flags(len(names), self._device)
        for arena, part in zip(optimizer.arenas, self._parts, strict=True):
            arena.fill_missing()
            find_invalid(arena.grad, arena.offsets, part)
        if len(self._parts) > 1:
            join_flags(self._parts, self._flags)

    def _update(self) -> None:
        optimizer_ops.scaler_update(
            self._scale,
            self._inv_scale,
            self._counters,
            self.is_invalid_array,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            min_scale=self.min_scale,
            max_scale=self.max_scale,
        )

    def adjust_scale_factor(self) -> bool:
        """Applies the rule and says whether the gradients are valid; waits for the device.

        When they are not, the optimizer given to unscale has had its gradients forgotten and its model's pending
        batch-norm statistics put back, and until its zero_grad a step changes nothing. (With tensors given to unscale,
        do not step, and call the model's discard_statistics.)

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
                flags = self._optimizer.flags
                self._optimizer.zero_grad()
                self._optimizer.flags = flags
                for statistics in self._optimizer.statistics:
                    statistics.discard()
        self._state = "ready"
        self._optimizer = None
        if not valid:
            self.check()
        return valid

    # --- without waiting

    def step(self, optimizer: SGD, loss: Tensor) -> None:
        """Does all of a step after the forward: scaled backward, check, update or skip, new scale.

        The gradients are forgotten afterwards: no zero_grad is needed. The host waits for the device at every 50th call
        only, to see whether too many steps were skipped in a row; inside a CUDA graph capture it never does (call
        ``check`` now and then).

        Args:
            optimizer: its model's gradients are used.
            loss: one element, float32 or float64.

        Raises:
            TypeError: the loss is of 16 bits.
            ValueError: the loss has several elements, or is on another device than before.
            FlcudaError: wrong order of calls, or max_consecutive_skips invalid steps in a row.
        """
        self._require("step", "ready", "scaled")
        self._check_loss(loss)
        assert self._device is not None
        with self._device.use():
            loss.backward(elementwise.cast(self._scale, loss.dtype).reshape(loss.shape))
            self._look_at_arenas(optimizer)
            optimizer.inv_scale = self._inv_scale
            optimizer.step(flags=self.is_invalid_array)
            self._update()
        optimizer.zero_grad()
        self._state = "ready"
        self._calls += 1
        if self._calls % CHECK_INTERVAL == 0 and not (self._device.kind == "cuda" and devices.is_capturing()):
            self.check()

    def check(self) -> None:
        """Looks whether too many steps were skipped in a row; waits for the device.

        Raises:
            FlcudaError: max_consecutive_skips or more; names the scale and the first parameter with an invalid
                gradient.
        """
        self._read()
        skips = self._host_counters[2]
        if skips < self.max_consecutive_skips:
            return
        first = int(self.is_invalid_array[1]) if self._flags is not None else len(self._names)
        name = self._names[first] if first < len(self._names) else "unknown"
        raise FlcudaError(
            f"{skips} steps in a row had invalid gradients (the scale is {self._host_scale:g}, its floor "
            f"{self.min_scale:g}); the first parameter with one is {name!r}. The loss or the data is not finite, or "
            "the learning rate is too high"
        )

    # --- state dicts

    def state_dict(self) -> dict[str, Any]:
        """Copies the state to the host; waits for the device.

        Returns:
            "version", "scale", the counters and the arguments of the rule, as Python numbers.
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

        Args:
            state: as ``state_dict`` gave it.

        Raises:
            ValueError: a key is missing or unknown, the version is another, or a number is out of range.
            TypeError: a value is no number.
        """
        keys = ("version", "scale", *_COUNTERS, *_RULE)
        faults = [f"missing key: {key}" for key in keys if key not in state]
        faults += [f"unexpected key: {key}" for key in state if key not in keys]
        if faults:
            raise ValueError("state: does not fit the scaler\n  " + "\n  ".join(faults))
        if state["version"] != STATE_VERSION:
            raise ValueError(f"state: version {state['version']!r} is not {STATE_VERSION}")
        checked = DynamicScaler(init_scale=state["scale"], **{name: state[name] for name in _RULE})
        counters = [F.count(name, state[name], least=0) for name in _COUNTERS]
        for name in _RULE:
            setattr(self, name, getattr(checked, name))
        self._state = "ready"
        self._optimizer = None
        self._host_scale = float(state["scale"])
        self._host_counters = counters
        if self._device is not None:
            self._write()


_RULE = ("growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale", "max_consecutive_skips")


def _new_flags(arrays: int, place: Device | None) -> Array:
    flags = devices.zeros((2 + arrays,), np.int32, device=place)
    flags[1:2] = arrays
    return flags


def _flags_of(grad: Array) -> Array:
    """Looks at one array of any layout."""
    place = devices.device_of(grad)
    flags = _new_flags(1, place)
    order = devices.memory_order("nhwc" if devices.memory_layout(grad) == "nhwc" else "nchw", grad.ndim)
    flat = grad.transpose(order).reshape(-1)
    find_invalid(flat, place.xp.asarray(np.array([0, flat.size], np.int64)), flags)
    return flags
