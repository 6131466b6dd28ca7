"""Layers: modules with parameters, a training mode, and state dicts with torchvision's keys.

Note [precision]: a precision is a property of a layer, handed to it by its model. It says in which dtype the layer
computes, with which math, and in which memory order. A layer with a precision takes any floating input and copies it to
its dtype and layout when it is not so already; so images of float32 become float16 and channels-last once, at the
model's first layer. Integer images are refused: whoever reads them decides how they are scaled. Batch norm's parameters
are float32 (float64 for float64).

Note [initial values]: all initial values come from flcuda.rng on the host, in logical order. So they depend on the seed
only, not on device, layout or, but for rounding, precision.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from flcuda import device as devices
from flcuda import functional as F
from flcuda import rng
from flcuda.autograd import Tensor
from flcuda.device import Array, Device
from flcuda.functional import IntOrPair, Padding
from flcuda.ops.convolution import Convolution, convolution
from flcuda.parameters import (
    Arena,
    BatchNormState,
    Parameter,
    Statistics,
    build_arenas,
    build_statistics,
    master_dtype,
)

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, slots=True)
class Precision:
    """How a layer computes; see Note [precision].

    Attributes:
        name: the word that users give.
        dtype: of activations, weights and gradients.
        math: "fma" or "tensor_op".
        layout: the memory order of activations and filters.
    """

    name: str
    dtype: str
    math: Literal["fma", "tensor_op"]
    layout: Literal["nchw", "nhwc"]

    @property
    def master(self) -> str:
        """The dtype of master weights, batch-norm parameters and statistics."""
        return master_dtype(self.dtype)

    def enter(self, x: Tensor) -> Tensor:
        """Gives a layer's input in this precision's dtype and, from rank 3, layout: itself when it is so already."""
        if x.dtype.name not in devices.DTYPES:
            raise TypeError(
                f"x: has dtype {x.dtype.name}; a layer takes floating-point input (scale and convert images first)"
            )
        return F.convert(x, self.dtype, self.layout if x.ndim > 2 else None)


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("float64", "float64", "fma", "nchw"),
        Precision("float32", "float32", "fma", "nchw"),
        Precision("tf32", "float32", "tensor_op", "nhwc"),
        Precision("float16", "float16", "tensor_op", "nhwc"),
        Precision("bfloat16", "bfloat16", "tensor_op", "nhwc"),
    )
}


def precision_of(name: str) -> Precision:
    """Gives the precision of a word.

    Args:
        name: "float64", "float32", "tf32", "float16" or "bfloat16".

    Returns:
        The precision.

    Raises:
        ValueError: another word.
    """
    if name not in PRECISIONS:
        raise ValueError(f"precision: {name!r} is none of {list(PRECISIONS)}")
    return PRECISIONS[name]


class Draws:
    """The random numbers of a seed, taken in order; several layers share one so that each gets its own.

    Args:
        seed: 0 to 2^64 - 1; None takes one from the operating system.

    Raises:
        TypeError: seed is no whole number.
        ValueError: seed is out of range.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = int.from_bytes(os.urandom(8), "little") if seed is None else F.count("seed", seed, least=0)
        if self.seed >= 1 << 64:
            raise ValueError(f"seed: {seed} has more than 64 bits")
        self.offset = 0

    def skip(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Takes numbers without drawing them.

        Args:
            shape: of what they are for.

        Returns:
            Their position in the stream, and how many they are.
        """
        n = math.prod(shape)
        offset = self.offset
        # whole Philox blocks, so that no two parameters share one
        self.offset += -(-n // 4) * 4
        return offset, n

    def uniform(self, shape: tuple[int, ...], bound: float) -> NDArray[np.float32]:
        """Draws uniformly from -bound to bound.

        Args:
            shape: of the result.
            bound: the largest magnitude.

        Returns:
            float32.
        """
        offset, n = self.skip(shape)
        values = rng.uniform(self.seed, offset, n).reshape(shape)
        return (values * np.float32(2 * bound) - np.float32(bound)).astype(np.float32, copy=False)

    def normal(self, shape: tuple[int, ...], deviation: float) -> NDArray[np.float32]:
        """Draws from the normal distribution around 0.

        Args:
            shape: of the result.
            deviation: the standard deviation.

        Returns:
            float32.
        """
        offset, n = self.skip(shape)
        return rng.normal(self.seed, offset, n).reshape(shape) * np.float32(deviation)


Seed = int | Draws | None
Initializer = Callable[[Draws, tuple[int, ...]], NDArray[np.float32]]


def _draws(seed: Seed) -> Draws:
    return seed if isinstance(seed, Draws) else Draws(seed)


def _fan_in(w_shape: tuple[int, ...]) -> int:
    return math.prod(w_shape[1:])


def fan_in_uniform(draws: Draws, w_shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Draws a weight uniformly within 1 / sqrt(fan in): PyTorch's default for convolutions and linear layers.

    Args:
        draws: where the numbers come from.
        w_shape: (K, C, ...).

    Returns:
        float32, w_shape.
    """
    return draws.uniform(w_shape, 1 / math.sqrt(_fan_in(w_shape)))


def fan_out_normal(draws: Draws, w_shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Draws a weight normally with variance 2 / (fan out): torchvision's for the convolutions of ResNets.

    Args:
        draws: where the numbers come from.
        w_shape: (K, C, ...).

    Returns:
        float32, w_shape.

    Source: He et al. 2015, "Delving deep into rectifiers", section 2.2, backward case.
    """
    return draws.normal(w_shape, math.sqrt(2 / (w_shape[0] * math.prod(w_shape[2:]))))


class Module:
    """A layer or a model: what has parameters, and modules, as attributes.

    A subclass has ``forward``. Its order of attributes is the order of its parameters, and their names are the keys.

    Attributes:
        training: dropout drops and batch norm uses the batch's statistics.
    """

    training: bool = True

    def forward(self, x: Tensor) -> Tensor:
        """Computes the output; subclasses define it."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def __call__(self, x: Any) -> Tensor:
        """Runs forward.

        Args:
            x: a Tensor, or an array without a gradient.

        Returns:
            The output.
        """
        return self.forward(x if isinstance(x, Tensor) else F.as_tensor(x))

    # --- what is in it

    def named_children(self) -> Iterator[tuple[str, "Module"]]:
        """Lists the modules that are attributes, by name.

        Raises:
            TypeError: an attribute is a list, tuple or dict with modules or parameters, which would be overlooked.
        """
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, list | tuple | dict):
                parts = value.values() if isinstance(value, dict) else value
                if any(isinstance(part, Module | Parameter | BatchNormState) for part in parts):
                    raise TypeError(
                        f"{type(self).__name__}.{name}: modules or parameters in a {type(value).__name__} are not "
                        "found; use Sequential or attributes"
                    )

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, "Module"]]:
        """Lists this module and all below it, by dotted name; one that is used twice comes twice.

        Args:
            prefix: this module's own name.
        """
        yield prefix, self
        for name, child in self.named_children():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def _owned(self, kind: type[Any]) -> Iterator[tuple[str, Any]]:
        """Lists the attributes of a kind, by dotted name, in the order of the attributes."""
        for prefix, module in self.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, kind):
                    yield f"{prefix}.{name}" if prefix else name, value

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Lists the parameters by dotted name, each once, under its first name."""
        seen: set[int] = set()
        for name, p in self._owned(Parameter):
            if id(p) not in seen:
                seen.add(id(p))
                yield name, p

    def parameters(self) -> Iterator[Parameter]:
        """Lists the parameters, each once."""
        return (p for _, p in self.named_parameters())

    def _states(self) -> list[BatchNormState]:
        """Lists the batch-norm states, each once."""
        return list({id(state): state for _, state in self._owned(BatchNormState)}.values())

    def named_buffers(self) -> Iterator[tuple[str, Array]]:
        """Lists batch norm's running statistics by dotted name; the arrays themselves, on their device."""
        for prefix, module in self.named_modules():
            for state in vars(module).values():
                if isinstance(state, BatchNormState):
                    for name in BUFFERS:
                        yield f"{prefix}.{name}" if prefix else name, getattr(state, name)

    # --- storage

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The flat storages of the parameters; built in place when first asked for, and anew when they changed."""
        return self._storage()[0]

    @property
    def statistics(self) -> tuple[Statistics, ...]:
        """The flat storages of batch norm's statistics; built with the arenas."""
        return self._storage()[1]

    def _storage(self) -> tuple[tuple[Arena, ...], tuple[Statistics, ...]]:
        named = list(self.named_parameters())
        states = self._states()
        arenas, statistics = self.__dict__.get("_built", ((), ()))
        held = {id(p) for arena in arenas for p in arena.parameters}
        current = held == {id(p) for _, p in named} and all(arena.is_current() for arena in arenas)
        if not current or {id(s) for s in statistics} != {id(state.statistics) for state in states}:
            arenas, statistics = build_arenas(named), build_statistics(states)
            self.__dict__["_built"] = (arenas, statistics)
        return arenas, statistics

    def __getstate__(self) -> dict[str, Any]:
        # A copy builds storage of its own; Parameter and BatchNormState copy their values.
        return {name: value for name, value in vars(self).items() if name != "_built"}

    # --- mode and statistics

    def train(self, mode: bool = True) -> Self:
        """Sets training mode in this module and all below it.

        Args:
            mode: False for evaluation mode, as ``eval``.

        Returns:
            This module.
        """
        if not mode:
            self.commit_statistics()
        for _, module in self.named_modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        """Sets evaluation mode; commits the batch-norm statistics of forwards that no optimizer step has settled.

        Returns:
            This module.
        """
        return self.train(False)

    def commit_statistics(self) -> None:
        """Makes pending batch-norm statistics the running ones, for training forwards without an optimizer's step.

        See Note [pending statistics] in flcuda.parameters. ``eval`` and ``state_dict`` do it too.
        """
        for statistics in {id(state.statistics): state.statistics for state in self._states()}.values():
            if not statistics.settled:
                statistics.settle()

    def discard_statistics(self) -> None:
        """Puts the running statistics back: what forwards since the last settled step had seen is forgotten."""
        for statistics in {id(state.statistics): state.statistics for state in self._states()}.values():
            if not statistics.settled:
                statistics.discard()

    # --- state dicts

    def _entries(self) -> Iterator[tuple[str, tuple[int, ...], Callable[[], NDArray[Any]], Callable[[Any], None]]]:
        """Lists key, shape, reader and writer of everything that a state dict holds, in torchvision's order."""
        for prefix, module in self.named_modules():
            dot = f"{prefix}." if prefix else ""
            for name, value in vars(module).items():
                if isinstance(value, Parameter):
                    yield f"{dot}{name}", value.shape, value.values, value.write
                elif isinstance(value, BatchNormState):
                    for buffer in BUFFERS:
                        shape = () if buffer == "num_batches_tracked" else tuple(value.running_mean.shape)
                        yield f"{dot}{buffer}", shape, _reader(value, buffer), _writer(value, buffer)

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Copies parameters and running statistics to host memory; commits pending statistics first.

        Returns:
            torchvision's keys; float32 (float64 for a float64 model), C-contiguous in logical order (K, C, R, S); int64
            without dimension for num_batches_tracked. Parameters are the masters, not rounded to 16 bits.
        """
        self.commit_statistics()
        return {key: read() for key, _, read, _ in self._entries()}

    def load_state_dict(
        self, state: Mapping[str, Any], *, strict: bool = True
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Sets parameters and running statistics in place; optimizers and arenas stay valid.

        Everything is checked first: on an error nothing has changed.

        Args:
            state: arrays by key, of any library and float dtype; borrowed.
            strict: missing and unexpected keys are errors.

        Returns:
            The missing and the unexpected keys; both empty when strict.

        Raises:
            ValueError: shapes differ or, when strict, keys do; lists every one.
            TypeError: a value is no array, or not of numbers.
        """
        entries = list(self._entries())
        expected = {key for key, *_ in entries}
        missing = tuple(key for key, *_ in entries if key not in state)
        unexpected = tuple(key for key in state if key not in expected)
        faults = []
        if strict and missing:
            faults.append(f"missing keys: {', '.join(missing)}")
        if strict and unexpected:
            faults.append(f"unexpected keys: {', '.join(unexpected)}")
        values = {}
        for key, shape, *_ in entries:
            if key not in state:
                continue
            values[key] = _on_host(key, state[key])
            if values[key].shape != shape:
                faults.append(f"{key}: shape {values[key].shape} where the model has {shape}")
        if faults:
            raise ValueError("state: does not fit the model\n  " + "\n  ".join(faults))
        for key, _, _, write in entries:
            if key in values:
                write(values[key])
        return missing, unexpected


def _reader(state: BatchNormState, buffer: str) -> Callable[[], NDArray[Any]]:
    def read() -> NDArray[Any]:
        array = getattr(state, buffer)
        host: NDArray[Any] = array.get() if devices.is_cuda(array) else array.copy()
        return host.reshape(()) if buffer == "num_batches_tracked" else host

    return read


def _writer(state: BatchNormState, buffer: str) -> Callable[[Any], None]:
    return lambda values: state.write(buffer, values)


def _on_host(key: str, value: Any) -> NDArray[Any]:
    if isinstance(value, int | float | np.generic):
        return np.asarray(value)
    array = devices.asarray(value, f"state[{key!r}]")
    host: NDArray[Any] = array.get() if devices.is_cuda(array) else array
    if host.dtype.name not in devices.DTYPES and host.dtype.kind not in "iuf":
        raise TypeError(f"state[{key!r}]: dtype {host.dtype.name} is not one of numbers")
    return host


# --- layers -----------------------------------------------------------------------------------------------------------


class Conv2D(Module):
    """Cross-correlation with a learned filter.

    Args:
        in_channels: C of the input.
        out_channels: C of the output.
        kernel_size: a number, or height and width.
        stride: likewise.
        padding: a number, one a dimension, one (before, after) pair a dimension, or "same". "same" keeps the size at
            stride 1 as PyTorch does (the odd zero goes behind); at a larger stride s it pads both sides by
            max(0, floor(((k - 1) * dilation - r + 2) / 2)), r being the size modulo s, or s for 0.
        dilation: a number, or one a dimension.
        groups: must divide both channel counts.
        bias: adds one number an output channel.
        precision: see Note [precision].
        device: where the parameters are; None is CUDA when available.
        seed: of the initial values; a Draws to share one stream, None for one from the operating system.
        init: draws the weight.

    Attributes:
        weight: (out_channels, in_channels / groups, R, S).
        bias: (out_channels,) or None.

    Raises:
        ValueError: an argument is out of range; names it and its value.
        TypeError: an argument is of the wrong type.

    Source of "same" at larger strides: flashlight.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrPair,
        stride: IntOrPair = 1,
        padding: Padding | Literal["same"] = 0,
        dilation: IntOrPair = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        precision: str = "float32",
        device: str | Device | None = None,
        seed: Seed = None,
        init: Initializer = fan_in_uniform,
    ) -> None:
        self.precision = precision_of(precision)
        self.kernel_size = F.pair("kernel_size", kernel_size, least=1)
        self.stride = F.pair("stride", stride, least=1)
        self.dilation = F.pair("dilation", dilation, least=1)
        self.padding = _padding(padding)
        self.groups = _groups(groups, in_channels, out_channels)
        # What forward worked out last: from what, the convolution, and whether the input can be taken as it is.
        self._known: tuple[Any, Any, bool] = (None, None, False)
        w_shape = (out_channels, in_channels // groups, *self.kernel_size)
        self.weight, self.bias = _weight_and_bias(w_shape, out_channels, bias, self.precision, device, seed, init)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the output.

        Args:
            x: (N, in_channels, H, W), floating.

        Returns:
            (N, out_channels, P, Q) in the layer's precision.
        """
        a = x.data
        precision = self.precision
        key = (a.shape, a.strides, a.dtype, self.stride, self.padding, self.dilation, self.groups, precision)
        # Read once, since other threads may call this layer, too.
        known, geometry, as_it_is = self._known
        if known != key:
            geometry = self._geometry(x)
        if known != key or not as_it_is:
            entered = precision.enter(x)
            self._known = (key, geometry, entered is x)
            x = entered
        # x of one channel has no layout of its own.
        return F.Conv2D.of(x, self.weight, self.bias, geometry, precision.layout)

    def _geometry(self, x: Tensor) -> Convolution:
        """Gives the geometry for an input."""
        if x.ndim != 4:
            raise ValueError(f"x: shape {x.shape} is not (N, C, H, W)")
        padding = self.padding
        if padding == "same":
            padding = tuple(
                _same(size, k, s, d)
                for size, k, s, d in zip(x.shape[2:], self.kernel_size, self.stride, self.dilation, strict=True)
            )
        return convolution(self.stride, padding, self.dilation, self.groups, self.precision.math)


class ConvTranspose2D(Module):
    """The transposed convolution with a learned filter.

    Args:
        in_channels: C of the input.
        out_channels: C of the output.
        kernel_size: a number, or height and width.
        stride: likewise.
        padding: likewise; makes the output smaller.
        output_padding: likewise, less than the stride; makes the output larger at its end.
        groups: must divide both channel counts.
        bias: adds one number an output channel.
        dilation: a number, or one a dimension.
        precision: see Note [precision].
        device: where the parameters are; None is CUDA when available.
        seed: of the initial values; a Draws to share one stream, None for one from the operating system.
        init: draws the weight.

    Attributes:
        weight: (in_channels, out_channels / groups, R, S).
        bias: (out_channels,) or None.

    Raises:
        ValueError: an argument is out of range; names it and its value.
        TypeError: an argument is of the wrong type.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrPair,
        stride: IntOrPair = 1,
        padding: IntOrPair = 0,
        output_padding: IntOrPair = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: IntOrPair = 1,
        *,
        precision: str = "float32",
        device: str | Device | None = None,
        seed: Seed = None,
        init: Initializer = fan_in_uniform,
    ) -> None:
        self.precision = precision_of(precision)
        self.kernel_size = F.pair("kernel_size", kernel_size, least=1)
        self.stride = F.pair("stride", stride, least=1)
        self.padding = F.pair("padding", padding)
        self.output_padding = F.pair("output_padding", output_padding)
        if any(e >= s for e, s in zip(self.output_padding, self.stride, strict=True)):
            raise ValueError(f"output_padding: {self.output_padding} must be less than stride {self.stride}")
        self.dilation = F.pair("dilation", dilation, least=1)
        self.groups = _groups(groups, in_channels, out_channels)
        w_shape = (in_channels, out_channels // groups, *self.kernel_size)
        self.weight, self.bias = _weight_and_bias(w_shape, out_channels, bias, self.precision, device, seed, init)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the output.

        Args:
            x: (N, in_channels, H, W), floating.

        Returns:
            (N, out_channels, P, Q) in the layer's precision.
        """
        return F.conv_transpose2d(
            self.precision.enter(x),
            self.weight,
            self.bias,
            stride=self.stride,
            padding=self.padding,
            output_padding=self.output_padding,
            dilation=self.dilation,
            groups=self.groups,
            math=self.precision.math,
        )


class Linear(Module):
    """A matrix product with a learned weight.

    Args:
        in_features: C of the input.
        out_features: C of the output.
        bias: adds one number an output.
        precision: see Note [precision].
        device: where the parameters are; None is CUDA when available.
        seed: of the initial values; a Draws to share one stream, None for one from the operating system.
        init: draws the weight.

    Attributes:
        weight: (out_features, in_features).
        bias: (out_features,) or None.

    Raises:
        ValueError: an argument is out of range; names it and its value.
        TypeError: an argument is of the wrong type.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        precision: str = "float32",
        device: str | Device | None = None,
        seed: Seed = None,
        init: Initializer = fan_in_uniform,
    ) -> None:
        self.precision = precision_of(precision)
        w_shape = (F.count("out_features", out_features), F.count("in_features", in_features))
        self.weight, self.bias = _weight_and_bias(w_shape, out_features, bias, self.precision, device, seed, init)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the output.

        Args:
            x: (N, in_features), floating.

        Returns:
            (N, out_features) in the layer's precision.
        """
        return F.linear(self.precision.enter(x), self.weight, self.bias, math=self.precision.math)


class BatchNorm2D(Module):
    """Normalization of each channel over batch and space.

    Args:
        num_features: C.
        eps: added to the variance.
        momentum: the share of a new batch in the running statistics (cuDNN's exponential average factor); None is the
            plain average over all batches.
        precision: see Note [precision].
        device: where parameters and statistics are; None is CUDA when available.

    Attributes:
        weight, bias: (C,), float32 (float64 for float64): 1 and 0 at first.
        bn: the statistics; see Note [pending statistics] in flcuda.parameters.

    Raises:
        ValueError: an argument is out of range; names it and its value.
        TypeError: an argument is of the wrong type.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        *,
        precision: str = "float32",
        device: str | Device | None = None,
    ) -> None:
        self.precision = precision_of(precision)
        features = F.count("num_features", num_features)
        F.number("eps", eps, 0.0)
        if momentum is not None:
            F.probability("momentum", momentum)
        self.weight = Parameter(np.ones(features, np.float32), self.precision.master, device=device)
        self.bias = Parameter(np.zeros(features, np.float32), self.precision.master, device=device)
        self.bn = BatchNormState(self.weight, self.bias, momentum, eps)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the output; in training mode the statistics of x become pending.

        Args:
            x: (N, C, H, W), floating.

        Returns:
            Like x, in the layer's precision.
        """
        return F.batch_norm(self.precision.enter(x), self.state(), training=self.training)

    def state(self) -> BatchNormState:
        """Gives what ``functional.batch_norm`` takes."""
        # Whoever replaces or shares the layer's parameters means these.
        self.bn.weight, self.bn.bias = self.weight, self.bias
        return self.bn


class ReLU(Module):
    """The positive part."""

    def forward(self, x: Tensor) -> Tensor:
        """Computes max(x, 0)."""
        return F.relu(x)


class MaxPool2D(Module):
    """The largest of each window.

    Args:
        kernel_size: a number, or height and width.
        stride: likewise; None is kernel_size.
        padding: likewise, at most half the kernel.

    Raises:
        ValueError: an argument is out of range; names it and its value.
        TypeError: an argument is of the wrong type.
    """

    def __init__(self, kernel_size: IntOrPair, stride: IntOrPair | None = None, padding: IntOrPair = 0) -> None:
        self.window = F.window(kernel_size, stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        """Computes (N, C, P, Q) of (N, C, H, W)."""
        return F.max_pool2d(x, **self.window)


class AvgPool2D(Module):
    """The mean of each window, padded zeros counted.

    Args:
        kernel_size: a number, or height and width.
        stride: likewise; None is kernel_size.
        padding: likewise, at most half the kernel.

    Raises:
        ValueError: an argument is out of range; names it and its value.
        TypeError: an argument is of the wrong type.
    """

    def __init__(self, kernel_size: IntOrPair, stride: IntOrPair | None = None, padding: IntOrPair = 0) -> None:
        self.window = F.window(kernel_size, stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        """Computes (N, C, P, Q) of (N, C, H, W)."""
        return F.avg_pool2d(x, **self.window)


class GlobalAvgPool2D(Module):
    """The mean over space."""

    def forward(self, x: Tensor) -> Tensor:
        """Computes (N, C) of (N, C, H, W)."""
        return F.global_avg_pool2d(x)


class Dropout(Module):
    """Random zeros in training mode.

    Args:
        p: the probability of a zero, from 0 to 1.
        device: where it runs; None is CUDA when available.
        seed: of the zeros; None for one from the operating system.

    Attributes:
        state: seed and counter; the counter is on the device.

    Raises:
        ValueError: p is outside [0, 1].
        TypeError: p is no number.
    """

    def __init__(self, p: float = 0.5, *, device: str | Device | None = None, seed: Seed = None) -> None:
        self.p = F.probability("p", p)
        if isinstance(seed, Draws):
            # A seed of its own, so that two layers of one model do not drop alike.
            first, second = rng.words(seed.seed, *seed.skip((2,)))
            seed = int(first) << 32 | int(second)
        self.state = rng.State(Draws(seed).seed, devices.resolve(device))

    def forward(self, x: Tensor) -> Tensor:
        """Computes an output like x; x itself in evaluation mode."""
        return F.dropout(x, self.p, self.state, training=self.training)


class Flatten(Module):
    """(N, C, H, W) as (N, C * H * W), in logical order."""

    def forward(self, x: Tensor) -> Tensor:
        """Computes (N, C * H * W)."""
        return F.flatten(x)


class Sequential(Module):
    """Modules one after the other; their names are "0", "1", ...

    Args:
        *modules: in order.

    Raises:
        TypeError: one is no Module.
    """

    def __init__(self, *modules: Module) -> None:
        for i, module in enumerate(modules):
            if not isinstance(module, Module):
                raise TypeError(f"modules: entry {i} is a {type(module).__name__}, not a Module")
            setattr(self, str(i), module)

    def __iter__(self) -> Iterator[Module]:
        return (child for _, child in self.named_children())

    def __len__(self) -> int:
        return sum(1 for _ in self.named_children())

    def __getitem__(self, i: int) -> Module:
        return list(self)[i]

    def forward(self, x: Tensor) -> Tensor:
        """Runs the modules in order."""
        for module in self:
            x = module(x)
        return x


# --- arguments and parameters of layers -------------------------------------------------------------------------------


def _groups(groups: int, in_channels: int, out_channels: int) -> int:
    F.count("in_channels", in_channels)
    F.count("out_channels", out_channels)
    F.count("groups", groups)
    for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
        if channels % groups:
            raise ValueError(f"groups: {groups} does not divide {name} {channels}")
    return groups


def _padding(padding: Padding | Literal["same"]) -> tuple[tuple[int, int], ...] | Literal["same"]:
    if isinstance(padding, str):
        if padding != "same":
            raise ValueError(f'padding: {padding!r} is neither "same" nor numbers')
        return "same"
    if isinstance(padding, int | np.integer):
        padding = (int(padding), int(padding))
    if not isinstance(padding, Sequence):
        raise TypeError(f'padding: {padding!r} is neither "same" nor whole numbers')
    if len(padding) != 2:
        raise ValueError(f"padding: {padding!r} has {len(padding)} entries, not 2")
    return tuple(F.pair("padding", entry) for entry in padding)


def _same(size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    reach = (kernel - 1) * dilation
    if stride == 1:
        return reach // 2, reach - reach // 2
    both = max(0, (reach - (size % stride or stride) + 2) // 2)
    return both, both


def _weight_and_bias(
    w_shape: tuple[int, ...],
    out_channels: int,
    bias: bool,
    precision: Precision,
    device: str | Device | None,
    seed: Seed,
    init: Initializer,
) -> tuple[Parameter, Parameter | None]:
    draws = _draws(seed)
    weight = Parameter(
        init(draws, w_shape), precision.dtype, layout=precision.layout if len(w_shape) > 2 else "nchw", device=device
    )
    if not bias:
        return weight, None
    # PyTorch's default, whatever the weight's.
    values = draws.uniform((out_channels,), 1 / math.sqrt(_fan_in(w_shape)))
    return weight, Parameter(values, precision.dtype, device=device)
