"""Stochastic gradient descent over a model's arenas."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from flcuda import device as devices
from flcuda import functional as F
from flcuda.device import Array
from flcuda.errors import FlcudaError
from flcuda.ops import elementwise
from flcuda.ops import optimizer as optimizer_ops
from flcuda.parameters import Arena, Statistics


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


class SGD:
    """Stochastic gradient descent as PyTorch's SGD, one launch an arena.

    g = gradient + weight_decay * parameter; velocity = momentum * velocity + g; parameter -= lr * velocity, or with
    Nesterov lr * (g + momentum * velocity). A parameter without a gradient counts as one with a gradient of zero; one
    that requires no gradient when the optimizer is made does not decay either, so it stays as it is.
    Momentum and 16-bit parameters' masters are float32 (float64 for float64).

    Args:
        model: a Module, or anything else with arenas and statistics; on one device.
        lr: the learning rate, not negative.
        momentum: from 0 to 1.
        nesterov: look ahead; needs momentum.
        weight_decay: L2 factor, not negative; applies to parameters whose ``decay`` is true (all, unless said
            otherwise).

    Attributes:
        arenas, statistics: the model's.
        inv_scale: float64, one element, on the device, or None: what the next step multiplies gradients by.
        flags: int32, as ``find_invalid`` leaves it, on the device, or None: whether the next step counts. Both are set
            by ``DynamicScaler.unscale`` and used once; ``zero_grad`` forgets them.

    Raises:
        ValueError: a number is out of range, nesterov has no momentum, or the model has no parameters or is on several
            devices.
        TypeError: an argument is of the wrong type.
    """

    def __init__(
        self,
        model: HasArenas,
        lr: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        F.number("lr", lr, 0.0)
        _check(momentum, nesterov, weight_decay)
        if not hasattr(model, "arenas") or not hasattr(model, "statistics"):
            raise TypeError(f"model: {type(model).__name__} has no arenas; pass the Module itself, not its parameters")
        self.arenas = model.arenas
        self.statistics = model.statistics
        places = {arena.device for arena in self.arenas}
        if len(places) != 1:
            raise ValueError(f"model: its parameters must be on one device, not {sorted(map(str, places))}")
        self.device = places.pop()
        self.momentum = momentum
        self.nesterov = nesterov
        self.weight_decay = weight_decay
        self.inv_scale: Array | None = None
        self.flags: Array | None = None
        with self.device.use():
            xp = self.device.xp
            self._decay = [
                xp.asarray(np.array([s.decay and p.requires_grad for s, p in pairs], np.float32))
                for pairs in (zip(arena.segments, arena.parameters, strict=True) for arena in self.arenas)
            ]
            self._lr_array = devices.zeros((1,), np.float64, device=self.device)
        self._velocity = self._zeros() if momentum else None
        self.lr = lr

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

    def zero_grad(self) -> None:
        """Forgets all gradients and what ``DynamicScaler.unscale`` said of them; writes nothing."""
        self.inv_scale = self.flags = None
        for arena in self.arenas:
            arena.zero_grad()

    def step(self, *, flags: Array | None = None) -> None:
        """Updates the parameters, and settles batch norm's pending statistics; the host does not wait.

        Args:
            flags: int32, as ``find_invalid`` leaves it, on the device: if the first element is not 0, parameters,
                momentum and running statistics stay as they are, to the bit. None: those of ``DynamicScaler.unscale``;
                without it the step is valid.

        Raises:
            FlcudaError: the model's arenas were built anew since the optimizer was made.
        """
        for arena in self.arenas:
            if not arena.is_current():
                raise FlcudaError(
                    "step: the model's parameters moved to other arenas after this optimizer was made (modules or "
                    "parameters were added, or the model became part of another one); make the optimizer last"
                )
        inv_scale = self.inv_scale
        flags = self.flags if flags is None else flags
        self.inv_scale = self.flags = None
        with self.device.use():
            for i, arena in enumerate(self.arenas):
                arena.fill_missing()
                optimizer_ops.sgd_update(
                    arena.master,
                    arena.data,
                    arena.grad,
                    None if self._velocity is None else self._velocity[i],
                    arena.offsets,
                    self._decay[i],
                    self._lr_array,
                    momentum=self.momentum,
                    nesterov=self.nesterov,
                    weight_decay=self.weight_decay,
                    inv_scale=inv_scale,
                    flags=flags,
                )
            for statistics in self.statistics:
                statistics.settle(flags)

    def state_dict(self) -> dict[str, Any]:
        """Copies the state to host memory.

        Returns:
            "lr", "momentum", "nesterov", "weight_decay", and "velocity": arrays by parameter name, in logical order
            (empty without momentum).
        """
        velocity = {}
        for arena, flat in zip(self.arenas, self._velocity or [], strict=False):
            for segment in arena.segments:
                view = segment.view(flat)
                velocity[segment.name] = np.array(view.get() if devices.is_cuda(view) else view, order="C")
        return {
            "lr": self.lr,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": self.weight_decay,
            "velocity": velocity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the state in place; on an error nothing has changed.

        Args:
            state: as ``state_dict`` gave it.

        Raises:
            ValueError: keys, names or shapes do not fit; lists every one.
            TypeError: a value is of the wrong type.
        """
        keys = ("lr", "momentum", "nesterov", "weight_decay", "velocity")
        faults = [f"missing key: {key}" for key in keys if key not in state]
        faults += [f"unexpected key: {key}" for key in state if key not in keys]
        if faults:
            raise ValueError("state: does not fit the optimizer\n  " + "\n  ".join(faults))
        F.number("lr", state["lr"], 0.0)
        _check(state["momentum"], state["nesterov"], state["weight_decay"])
        given = {name: _on_host(name, values) for name, values in state["velocity"].items()}
        segments = {segment.name: segment for arena in self.arenas for segment in arena.segments}
        if state["momentum"]:
            faults += [f"missing velocity: {name}" for name in segments if name not in given]
        faults += [f"unexpected velocity: {name}" for name in given if name not in segments]
        faults += [
            f"velocity {name}: shape {given[name].shape} where the model has {segment.shape}"
            for name, segment in segments.items()
            if name in given and given[name].shape != segment.shape
        ]
        if faults:
            raise ValueError("state: does not fit the model\n  " + "\n  ".join(faults))
        self.momentum, self.nesterov, self.weight_decay = state["momentum"], state["nesterov"], state["weight_decay"]
        self.lr = state["lr"]
        self._velocity = (self._velocity or self._zeros()) if self.momentum else None
        for arena, flat in zip(self.arenas, self._velocity or (), strict=False):
            for segment in arena.segments:
                segment.view(flat)[...] = self.device.xp.asarray(given[segment.name])


def _on_host(name: str, values: Any) -> np.ndarray[Any, Any]:
    array = devices.asarray(values, f"velocity {name}")
    if array.dtype.name not in devices.DTYPES:
        raise TypeError(f"velocity {name}: dtype {array.dtype.name} is none of {list(devices.DTYPES)}")
    return array.get() if devices.is_cuda(array) else np.asarray(array)


def _check(momentum: float, nesterov: bool, weight_decay: float) -> None:
    F.probability("momentum", momentum)
    F.number("weight_decay", weight_decay, 0.0)
    if not isinstance(nesterov, bool):
        raise TypeError(f"nesterov: {nesterov!r} is neither True nor False")
    if nesterov and not momentum:
        raise ValueError("nesterov: True needs a momentum above 0")
