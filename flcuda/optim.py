"""Optimizers over a model's arenas: SGD, Adam and AdamW by PyTorch's formulas, one launch an arena.

What changes from step to step (learning rate, step count, scale, flags) is in device memory, so a captured step can be
replayed. A skipped step leaves parameters, states, step count and batch norm's statistics as they are, to the bit.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np

from flcuda import device as devices
from flcuda import functional as F
from flcuda.device import Array
from flcuda.errors import FlcudaError
from flcuda.ops import elementwise
from flcuda.ops import optimizer as optimizer_ops
from flcuda.ops.finite import find_invalid
from flcuda.parameters import Arena, Statistics

STATE_VERSION = 1
MOST_STEPS = 2**63 - 1
"""What the device's counters, int64, hold."""


class HasArenas(Protocol):
    """What an optimizer takes: a model by its flat storages."""

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The flat storages of the parameters."""
        ...

    @property
    def statistics(self) -> tuple[Statistics, ...]:
        """The flat storages of batch norm's statistics."""
        ...


class Optimizer:
    """What all optimizers share; make an ``SGD``, ``Adam`` or ``AdamW``.

    A parameter without a gradient counts as one with a gradient of zero; one that requires no gradient when the
    optimizer is made does not decay either, so it stays as it is. States and 16-bit parameters' masters are float32
    (float64 for float64).

    Attributes:
        arenas, statistics: the model's.
        device: where they are.
        weight_decay: applies to parameters whose ``decay`` is true (all, unless said otherwise).
        inv_scale: float64, one element, on the device, or None: what a step multiplies gradients by.
        flags: int32, as ``find_invalid`` leaves it, on the device, or None: whether a step counts. Both are set by
            ``DynamicScaler.unscale`` and hold until ``zero_grad``.
        sums: None without max_norm; else for each arena float64, (n,): where a check of the gradients before the step
            may write each segment's sum of squares.
        steps: int64, (1,), on the device: the valid steps so far, where the formula needs them (see ``counts_steps``).
    """

    _STATES: ClassVar[tuple[str, ...]] = ()
    _OPTIONS: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "max_norm")

    def __init__(self, model: HasArenas, lr: float, weight_decay: float, max_norm: float | None) -> None:
        if not hasattr(model, "arenas") or not hasattr(model, "statistics"):
            raise TypeError(f"model: {type(model).__name__} has no arenas; pass the Module itself, not its parameters")
        self.arenas = model.arenas
        self.statistics = model.statistics
        places = {arena.device for arena in self.arenas}
        if len(places) != 1:
            raise ValueError(f"model: its parameters must be on one device, not {sorted(map(str, places))}")
        self.device = places.pop()
        self.weight_decay = weight_decay
        self.inv_scale: Array | None = None
        self.flags: Array | None = None
        self._unscaled_at: int | None = None
        with self.device.use():
            xp = self.device.xp
            self._decay = [
                xp.asarray(np.array([s.decay and p.requires_grad for s, p in pairs], np.float32))
                for pairs in (zip(arena.segments, arena.parameters, strict=True) for arena in self.arenas)
            ]
            self._lr_array = devices.zeros((1,), np.float64, device=self.device)
            self.steps: Array = devices.zeros((1,), np.int64, device=self.device)
        self._set_max_norm(max_norm)
        self.lr = lr

    @property
    def max_norm(self) -> float | None:
        """Above it the norm of all gradients together, unscaled, is brought down to it; None for no clipping."""
        return self._max_norm

    def _set_max_norm(self, max_norm: float | None) -> None:
        self._max_norm = max_norm
        self.sums: tuple[Array, ...] | None = None
        if max_norm is None:
            return
        ends = np.cumsum([len(arena.segments) for arena in self.arenas]).tolist()
        # A norm that the narrowest master cannot hold would make its unscaled gradients overflow.
        self._norm_limit = min(float(np.finfo(arena.master.dtype).max) for arena in self.arenas)
        with self.device.use():
            self._all_sums = devices.zeros((ends[-1],), np.float64, device=self.device)
            self._clip = devices.zeros((1,), np.float64, device=self.device)
            self._checks = [devices.zeros((2 + len(a.segments),), np.int32, device=self.device) for a in self.arenas]
        self.sums = tuple(self._all_sums[s:e] for s, e in zip([0, *ends], ends, strict=False))

    def _zeros(self) -> list[Array]:
        return [devices.zeros((arena.size,), arena.master.dtype, device=self.device) for arena in self.arenas]

    @property
    def lr(self) -> float:
        """The learning rate; setting it writes the device's copy, without waiting, for captured steps too."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr = F.number("lr", value, 0.0)
        with self.device.use():
            elementwise.fill(self._lr_array, self._lr)

    @property
    def counts_steps(self) -> bool:
        """Whether the formula needs the step count; where not, ``steps`` stays 0, which saves a launch."""
        return True

    @property
    def last_gradient(self) -> int:
        """The ``gradient_number`` of the latest gradient that a backward gave one of the parameters; 0 before any."""
        return max(arena.last_gradient for arena in self.arenas)

    def has_gradients(self) -> bool:
        """Says whether a parameter has a gradient."""
        return any(p.grad is not None for arena in self.arenas for p in arena.parameters)

    def zero_grad(self) -> None:
        """Forgets all gradients and what ``DynamicScaler.unscale`` said of them; writes nothing."""
        self.inv_scale = self.flags = None
        self._unscaled_at = None
        for arena in self.arenas:
            arena.zero_grad()

    def unscaled(self, inv_scale: Array, flags: Array) -> None:
        """Takes what ``DynamicScaler.unscale`` says of the gradients; holds for every step until ``zero_grad``.

        Args:
            inv_scale: float64, one element, on the device: what a step multiplies gradients by; kept.
            flags: int32, as ``find_invalid`` leaves it, on the device: whether a step counts; kept.
        """
        self.inv_scale = inv_scale
        self.flags = flags
        self._unscaled_at = self.last_gradient

    def require_current(self, call: str) -> None:
        """Refuses an optimizer whose model has other arenas by now.

        Args:
            call: what is refused, for the error.

        Raises:
            FlcudaError: the model's arenas were built anew since the optimizer was made.
        """
        for arena in self.arenas:
            if not arena.is_current():
                raise FlcudaError(
                    f"{call}: the model's parameters moved to other arenas after this optimizer was made (modules or "
                    "parameters were added, or the model became part of another one); make the optimizer last"
                )

    def step(self, *, flags: Array | None = None) -> None:
        """Updates the parameters, and settles batch norm's pending statistics; the host does not wait.

        A second step without ``zero_grad`` in between takes the same gradients again, unscaled and skipped as in the
        first.

        Args:
            flags: int32, as ``find_invalid`` leaves it, on the device: if the first element is not 0, parameters,
                states, step count and running statistics stay as they are, to the bit. None: those of
                ``DynamicScaler.unscale``; without it the step is valid. With max_norm a norm that is not finite makes
                the step invalid: the first element is set.

        Raises:
            FlcudaError: the model's arenas were built anew since the optimizer was made; or a backward has added to the
                gradients after ``DynamicScaler.unscale`` looked at them.
        """
        self.require_current("step")
        if self._unscaled_at not in (None, self.last_gradient):
            raise FlcudaError(
                "step: a backward has added to the gradients after unscale, which neither looked at that nor unscales "
                "it; do all backwards before unscale, and call zero_grad before those of the next step"
            )
        self.apply(self.inv_scale, self.flags if flags is None else flags)

    def apply(self, inv_scale: Array | None, flags: Array | None, *, sums_are_current: bool = False) -> None:
        """Does what ``step`` does, with what is given here instead of what ``DynamicScaler.unscale`` said.

        Args:
            inv_scale: float64, one element, on the device: what gradients are multiplied by; None is 1.
            flags: as for ``step``; None: the step is valid.
            sums_are_current: the search that wrote flags wrote ``sums`` too, and no gradient has changed since: they
                are not read a second time for the norm.
        """
        with self.device.use():
            for arena in self.arenas:
                arena.fill_missing()
            clip = None
            if self.max_norm is not None:
                if flags is None or not sums_are_current:
                    own = self._sum_squares()
                    flags = own if flags is None else flags
                self.check_norm(inv_scale, flags)
                clip = self._clip
            for i, arena in enumerate(self.arenas):
                self._update(i, arena, inv_scale, clip, flags)
            if self.counts_steps:
                optimizer_ops.advance_steps(self.steps, flags)
            for statistics in self.statistics:
                statistics.settle(flags)

    def check_norm(self, inv_scale: Array | None, flags: Array) -> None:
        """Marks a step invalid whose norm, unscaled, is not finite in a master's dtype; without max_norm does nothing.

        Args:
            inv_scale: float64, one element, on the device, or None: what the step would multiply gradients by.
            flags: int32, as ``find_invalid`` leaves it, on the device; its first element is set or left. The search
                that wrote them wrote ``sums`` too.
        """
        if self.max_norm is not None:
            with self.device.use():
                optimizer_ops.clip_factor(
                    self._all_sums, inv_scale, self.max_norm, flags, self._clip, limit=self._norm_limit
                )

    def _sum_squares(self) -> Array:
        """Searches all arenas, for the sums.

        Returns:
            The first arena's flags. An invalid gradient in another makes the norm NaN or infinite, which raises them.
        """
        # No ticket: a search with sums has a second launch in any case.
        for arena, check, sums in zip(self.arenas, self._checks, self.sums or (), strict=True):
            find_invalid(arena.grad, arena.offsets, check, sums=sums)
        return self._checks[0]

    def _update(
        self, index: int, arena: Arena, inv_scale: Array | None, clip: Array | None, flags: Array | None
    ) -> None:
        """Launches the update of one arena."""
        raise NotImplementedError

    def _states(self) -> dict[str, list[Array]]:
        """The flat states by name, an array an arena; leaves out what the options do without."""
        raise NotImplementedError

    @classmethod
    def _check(cls, options: Mapping[str, Any]) -> None:
        """Checks all options but the learning rate."""
        F.number("weight_decay", options["weight_decay"], 0.0)
        max_norm = options["max_norm"]
        if max_norm is not None and F.number("max_norm", max_norm) <= 0:
            raise ValueError(f"max_norm: {max_norm} is not above 0")

    def _set(self, options: Mapping[str, Any]) -> None:
        """Takes over all options but the learning rate, and makes the states or drops them."""
        self.weight_decay = options["weight_decay"]
        if options["max_norm"] != self.max_norm:
            self._set_max_norm(options["max_norm"])

    def state_dict(self) -> dict[str, Any]:
        """Copies the state to host memory; waits for the device.

        Returns:
            "version", "optimizer" (the class's name), "steps", the arguments by name, and for each state ("velocity";
            "exp_avg" and "exp_avg_sq") arrays by parameter name, in logical order (none for SGD without momentum).
        """
        states: dict[str, dict[str, Any]] = {name: {} for name in self._STATES}
        for state, flats in self._states().items():
            for arena, flat in zip(self.arenas, flats, strict=True):
                for segment in arena.segments:
                    view = segment.view(flat)
                    states[state][segment.name] = np.array(view.get() if devices.is_cuda(view) else view, order="C")
        return {
            "version": STATE_VERSION,
            "optimizer": type(self).__name__,
            "steps": int(self.steps[0]),
            **{name: getattr(self, name) for name in self._OPTIONS},
            **states,
        }

    @staticmethod
    def _upgraded(state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Gives a state of an older version as one of today's."""
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the state; on an error nothing has changed.

        In place where the options are those that the optimizer has. A CUDA graph that has captured a step keeps the
        options it was captured with, and other ones may free memory that it uses (the velocity, what clipping needs):
        after a load that changes an option but the learning rate, capture anew.

        Args:
            state: as ``state_dict`` gave it.

        Raises:
            ValueError: version, class, keys, names or shapes do not fit; lists every one.
            TypeError: the state is no mapping, or a value is of the wrong type.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state: {state!r} is no mapping")
        state = self._upgraded(state)
        keys = ("version", "optimizer", "steps", *self._OPTIONS, *self._STATES)
        faults = [f"missing key: {key}" for key in keys if key not in state]
        faults += [f"unexpected key: {key}" for key in state if key not in keys]
        faults += [
            f"{key}: {state[key]!r} where this optimizer has {own!r}"
            for key, own in (("version", STATE_VERSION), ("optimizer", type(self).__name__))
            if key in state and state[key] != own
        ]
        if faults:
            raise ValueError("state: does not fit the optimizer\n  " + "\n  ".join(faults))
        F.number("lr", state["lr"], 0.0)
        self._check(state)
        steps = F.count("steps", state["steps"], 0, MOST_STEPS)
        for kind in self._STATES:
            if not isinstance(state[kind], Mapping):
                raise TypeError(f"{kind}: {state[kind]!r} is no mapping of names to arrays")
        given = {kind: {name: _on_host(kind, name, a) for name, a in state[kind].items()} for kind in self._STATES}
        segments = {segment.name: segment for arena in self.arenas for segment in arena.segments}
        for kind, arrays in given.items():
            # SGD without momentum has none.
            if state.get("momentum", True):
                faults += [f"missing {kind}: {name}" for name in segments if name not in arrays]
            faults += [f"unexpected {kind}: {name}" for name in arrays if name not in segments]
            faults += [
                f"{kind} {name}: shape {arrays[name].shape} where the model has {segment.shape}"
                for name, segment in segments.items()
                if name in arrays and arrays[name].shape != segment.shape
            ]
        if faults:
            raise ValueError("state: does not fit the model\n  " + "\n  ".join(faults))
        self._set(state)
        self.lr = state["lr"]
        with self.device.use():
            self.steps[...] = self.device.xp.asarray(np.array([steps], np.int64))
            for kind, flats in self._states().items():
                for arena, flat in zip(self.arenas, flats, strict=True):
                    for segment in arena.segments:
                        segment.view(flat)[...] = self.device.xp.asarray(given[kind][segment.name])


class SGD(Optimizer):
    """Stochastic gradient descent as PyTorch's SGD, one launch an arena.

    g = gradient + weight_decay * parameter; velocity = momentum * velocity + (1 - dampening) * g, the first time g;
    parameter -= lr * velocity, or with Nesterov lr * (g + momentum * velocity). See ``Optimizer`` for what else counts.

    Args:
        model: a Module, or anything else with arenas and statistics; on one device.
        lr: the learning rate, not negative.
        momentum: from 0 to 1.
        nesterov: look ahead; needs momentum, and no dampening.
        weight_decay: L2 factor, not negative; applies to parameters whose ``decay`` is true (all, unless said
            otherwise).
        dampening: from 0 to 1; without momentum it does nothing.
        max_norm: above it the norm of all gradients together is brought down to it, on the device; None never.

    Raises:
        ValueError: a number is out of range, nesterov has no momentum, or the model has no parameters or is on several
            devices.
        TypeError: an argument is of the wrong type.
    """

    _STATES = ("velocity",)
    _OPTIONS = ("lr", "momentum", "dampening", "nesterov", "weight_decay", "max_norm")

    def __init__(
        self,
        model: HasArenas,
        lr: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        dampening: float = 0.0,
        max_norm: float | None = None,
    ) -> None:
        F.number("lr", lr, 0.0)
        options = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        self._check({**options, "weight_decay": weight_decay, "max_norm": max_norm})
        super().__init__(model, lr, weight_decay, max_norm)
        self.momentum = momentum
        self.dampening = dampening
        self.nesterov = nesterov
        self._velocity = self._zeros() if momentum else None

    @property
    def counts_steps(self) -> bool:
        """With momentum and dampening, for the first step has none."""
        return bool(self.momentum and self.dampening)

    def _update(
        self, index: int, arena: Arena, inv_scale: Array | None, clip: Array | None, flags: Array | None
    ) -> None:
        optimizer_ops.sgd_update(
            arena.master,
            arena.data,
            arena.grad,
            None if self._velocity is None else self._velocity[index],
            arena.offsets,
            self._decay[index],
            self._lr_array,
            momentum=self.momentum,
            dampening=self.dampening if self.momentum else 0.0,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            steps=self.steps if self.counts_steps else None,
            inv_scale=inv_scale,
            clip=clip,
            flags=flags,
        )

    def _states(self) -> dict[str, list[Array]]:
        return {} if self._velocity is None else {"velocity": self._velocity}

    @classmethod
    def _check(cls, options: Mapping[str, Any]) -> None:
        super()._check(options)
        momentum, dampening, nesterov = (options[name] for name in ("momentum", "dampening", "nesterov"))
        F.probability("momentum", momentum)
        F.probability("dampening", dampening)
        if not isinstance(nesterov, bool):
            raise TypeError(f"nesterov: {nesterov!r} is neither True nor False")
        if nesterov and not momentum:
            raise ValueError("nesterov: True needs a momentum above 0")
        if nesterov and dampening:
            raise ValueError(f"nesterov: True needs no dampening, got {dampening}")

    def _set(self, options: Mapping[str, Any]) -> None:
        super()._set(options)
        self.momentum, self.dampening, self.nesterov = (options[n] for n in ("momentum", "dampening", "nesterov"))
        self._velocity = (self._velocity or self._zeros()) if self.momentum else None

    @staticmethod
    def _upgraded(state: Mapping[str, Any]) -> Mapping[str, Any]:
        # Before there were versions.
        if "version" in state or "velocity" not in state:
            return state
        return {"version": STATE_VERSION, "optimizer": "SGD", "steps": 0, "dampening": 0.0, "max_norm": None, **state}


class Adam(Optimizer):
    """Adam as PyTorch's, without amsgrad, one launch an arena.

    g = gradient + weight_decay * parameter; exp_avg = beta1 * exp_avg + (1 - beta1) * g; exp_avg_sq = beta2 *
    exp_avg_sq + (1 - beta2) * g * g; parameter -= lr / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq / (1 - beta2^t)) +
    eps), where t counts the valid steps. See ``Optimizer`` for what else counts.

    Args:
        model: a Module, or anything else with arenas and statistics; on one device.
        lr: the learning rate, not negative.
        betas: the shares of the past in exp_avg and exp_avg_sq, from 0 to below 1.
        eps: above 0.
        weight_decay: L2 factor, not negative; applies to parameters whose ``decay`` is true (all, unless said
            otherwise).
        max_norm: above it the norm of all gradients together is brought down to it, on the device; None never.

    Raises:
        ValueError: a number is out of range, or the model has no parameters or is on several devices.
        TypeError: an argument is of the wrong type.
    """

    _STATES = ("exp_avg", "exp_avg_sq")
    _OPTIONS = ("lr", "betas", "eps", "weight_decay", "max_norm")
    _DECOUPLED: ClassVar[bool] = False

    def __init__(
        self,
        model: HasArenas,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
    ) -> None:
        F.number("lr", lr, 0.0)
        self._check({"betas": betas, "eps": eps, "weight_decay": weight_decay, "max_norm": max_norm})
        super().__init__(model, lr, weight_decay, max_norm)
        self.betas = (float(betas[0]), float(betas[1]))
        self.eps = eps
        self._exp_avg = self._zeros()
        self._exp_avg_sq = self._zeros()

    def _update(
        self, index: int, arena: Arena, inv_scale: Array | None, clip: Array | None, flags: Array | None
    ) -> None:
        optimizer_ops.adam_update(
            arena.master,
            arena.data,
            arena.grad,
            self._exp_avg[index],
            self._exp_avg_sq[index],
            arena.offsets,
            self._decay[index],
            self._lr_array,
            self.steps,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            decoupled=self._DECOUPLED,
            inv_scale=inv_scale,
            clip=clip,
            flags=flags,
        )

    def _states(self) -> dict[str, list[Array]]:
        return {"exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq}

    @classmethod
    def _check(cls, options: Mapping[str, Any]) -> None:
        super()._check(options)
        betas = options["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise TypeError(f"betas: {betas!r} are not two numbers")
        for beta in betas:
            F.number("betas", beta, 0.0, math.nextafter(1.0, 0.0))
        if F.number("eps", options["eps"]) <= 0:
            raise ValueError(f"eps: {options['eps']} is not above 0")

    def _set(self, options: Mapping[str, Any]) -> None:
        super()._set(options)
        self.betas = (float(options["betas"][0]), float(options["betas"][1]))
        self.eps = options["eps"]


class AdamW(Adam):
    """Adam with decoupled weight decay, as PyTorch's AdamW.

    Weight decay takes lr * weight_decay * parameter from the parameter before the step and is not part of g; all else
    is as for ``Adam``.

    Args:
        model: a Module, or anything else with arenas and statistics; on one device.
        lr: the learning rate, not negative.
        betas: the shares of the past in exp_avg and exp_avg_sq, from 0 to below 1.
        eps: above 0.
        weight_decay: not negative; applies to parameters whose ``decay`` is true (all, unless said otherwise).
        max_norm: above it the norm of all gradients together is brought down to it, on the device; None never.

    Raises:
        ValueError: a number is out of range, or the model has no parameters or is on several devices.
        TypeError: an argument is of the wrong type.
    """

    _DECOUPLED = True

    def __init__(
        self,
        model: HasArenas,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        max_norm: float | None = None,
    ) -> None:
        super().__init__(model, lr, betas, eps, weight_decay, max_norm)


def _on_host(kind: str, name: str, values: Any) -> np.ndarray[Any, Any]:
    array = devices.asarray(values, f"{kind} {name}")
    if array.dtype.name not in devices.DTYPES:
        raise TypeError(f"{kind} {name}: dtype {array.dtype.name} is none of {list(devices.DTYPES)}")
    return array.get() if devices.is_cuda(array) else np.asarray(array)
