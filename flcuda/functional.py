"""The differentiable operations: one Function an op, and its lower-case function.

Every function takes Tensors (arrays are wrapped, without a gradient) and gives a Tensor. Shapes are logical, (N, C, H,
W), in any memory layout; results keep the layout of their input. The arguments are checked by the ops before anything
is allocated.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from flcuda import device as devices
from flcuda import rng
from flcuda.autograd import Function, GradTarget, Tensor, is_recording, result
from flcuda.device import Array
from flcuda.ops import batch_norm as batch_norm_ops
from flcuda.ops import bias as bias_ops
from flcuda.ops import convolution as convolution_ops
from flcuda.ops import elementwise, loss, pooling
from flcuda.ops import linear as linear_ops
from flcuda.parameters import BatchNormState

Math = Literal["fma", "tensor_op"]
IntOrPair = int | Sequence[int]
Padding = int | Sequence[int] | Sequence[tuple[int, int]]


def as_tensor(x: Any, name: str = "x") -> Tensor:
    """Gives a Tensor as it is, and wraps an array.

    Args:
        x: a Tensor, or an array that ``device.asarray`` takes.
        name: the argument's name in messages.

    Returns:
        A Tensor.

    Raises:
        TypeError: x is neither.
    """
    return x if isinstance(x, Tensor) else Tensor(devices.asarray(x, name))


def _into(target: GradTarget | None) -> dict[str, Any]:
    """The keyword arguments by which an op writes a gradient into its target."""
    return {} if target is None else {"out": target.array, "accumulate": target.accumulate}


def _layout(a: Array) -> str:
    return "nhwc" if devices.memory_layout(a) == "nhwc" else "nchw"


# --- convolution and linear -------------------------------------------------------------------------------------------


class Conv2D(Function):
    """Cross-correlation; see conv2d."""

    @classmethod
    def of(
        cls,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        convolution: convolution_ops.Convolution,
        layout: str | None,
    ) -> Tensor:
        """Does what ``apply`` does, in half the time: of a small convolution on a GPU the host's part is the whole."""
        node = cls()
        recording = is_recording()
        if bias is None:
            node.needs_grad = (recording and x.requires_grad, recording and w.requires_grad, False)
            y = node.forward(x.data, w.data, None, convolution, layout)
        else:
            node.needs_grad = (
                recording and x.requires_grad,
                recording and w.requires_grad,
                recording and bias.requires_grad,
            )
            y = node.forward(x.data, w.data, bias.data, convolution, layout)
        return result(y, node, x, w, bias)

    def forward(
        self,
        x: Array,
        w: Array,
        bias: Array | None,
        convolution: convolution_ops.Convolution,
        layout: str | None,
    ) -> Array:
        """Computes y, keeping x for the filter's gradient and w for the data's."""
        if self.needs_grad[0] or self.needs_grad[1]:
            self.convolution = convolution
            # The filter's gradient needs no more of it than its shape and layout, but filters live on anyway.
            self.w = w
            self.x_shape = x.shape
        if self.needs_grad[1]:
            self.x = x
        return convolution.forward(x, w, bias=bias, layout=layout)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """Computes what is asked of the data's, the filter's and the bias's gradients."""
        dx = dw = db = None
        if self.needs_grad[0]:
            dx = self.convolution.backward_data(grad, self.w, self.x_shape)
        if self.needs_grad[1]:
            into = _into(self.targets[1]) or {"layout": _layout(self.w)}
            dw = self.convolution.backward_filter(self.x, grad, self.w.shape, **into)
        if self.needs_grad[2]:
            db = bias_ops.bias_backward(grad, **_into(self.targets[2]))
        return dx, dw, db


def conv2d(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    stride: IntOrPair = 1,
    padding: Padding = 0,
    dilation: IntOrPair = 1,
    groups: int = 1,
    math: Math | None = None,
    layout: str | None = None,
) -> Tensor:
    """Cross-correlates x with w and adds a bias.

    Args:
        x: (N, C, H, W).
        w: (K, C / groups, R, S), of x's dtype.
        bias: (K,), of x's dtype.
        stride: a number, or one a dimension.
        padding: a number, one a dimension, or one (before, after) pair a dimension.
        dilation: a number, or one a dimension.
        groups: how many groups the channels fall into.
        math: "fma" or "tensor_op" (TF32 for float32); None is fma for float32 and float64, tensor_op for the 16-bit
            dtypes.
        layout: of the result, "nchw" or "nhwc"; None is x's, and nchw where x is both (one channel).

    Returns:
        (N, K, P, Q), in x's dtype.

    Raises:
        ValueError: shapes do not fit together or an argument is out of range; names argument and value.
        TypeError: dtypes differ, or arrays are on different devices.
    """
    x, w = as_tensor(x), as_tensor(w, "w")
    for name, t in (("x", x), ("w", w)):
        if t.ndim != 4:
            raise ValueError(f"{name}: shape {t.shape} is not of rank 4")
    return Conv2D.of(
        x,
        w,
        None if bias is None else as_tensor(bias, "bias"),
        convolution_ops.convolution(stride, padding, dilation, groups, math),
        layout,
    )


class ConvTranspose2D(Function):
    """The data gradient of a convolution as a forward; see conv_transpose2d."""

    def forward(
        self,
        x: Array,
        w: Array,
        bias: Array | None,
        convolution: convolution_ops.Convolution,
        y_shape: tuple[int, ...],
    ) -> Array:
        """Computes y, keeping x for the filter's gradient and w for the data's."""
        self.convolution = convolution
        self.w_shape = w.shape
        if self.needs_grad[0]:
            self.w = w
        if self.needs_grad[1]:
            self.x = x
            self.w_layout = _layout(w)
        y = convolution.backward_data(x, w, y_shape)
        if bias is not None:
            bias_ops.bias_forward(y, bias)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """Computes what is asked: here the data's gradient is a forward convolution."""
        dx = dw = db = None
        if self.needs_grad[0]:
            dx = self.convolution.forward(grad, self.w)
        if self.needs_grad[1]:
            into = _into(self.targets[1]) or {"layout": self.w_layout}
            dw = self.convolution.backward_filter(grad, self.x, self.w_shape, **into)
        if self.needs_grad[2]:
            db = bias_ops.bias_backward(grad, **_into(self.targets[2]))
        return dx, dw, db


def conv_transpose2d(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    stride: IntOrPair = 1,
    padding: IntOrPair = 0,
    output_padding: IntOrPair = 0,
    dilation: IntOrPair = 1,
    groups: int = 1,
    math: Math | None = None,
) -> Tensor:
    """Computes the transposed convolution: the map from y to x whose derivative is the convolution with w.

    Args:
        x: (N, C, H, W).
        w: (C, K / groups, R, S), PyTorch's order, of x's dtype.
        bias: (K,), of x's dtype.
        stride: of the convolution that is transposed; a number, or one a dimension.
        padding: likewise; it makes the result smaller.
        output_padding: rows and columns more at the end, less than the stride: which of the inputs that the convolution
            maps to x's size is meant.
        dilation: a number, or one a dimension.
        groups: how many groups the channels fall into.
        math: as for conv2d.

    Returns:
        (N, K, P, Q) with P = (H - 1) * stride - 2 * padding + dilation * (R - 1) + output_padding + 1.

    Raises:
        ValueError: shapes do not fit together or an argument is out of range; names argument and value.
        TypeError: dtypes differ, or arrays are on different devices.
    """
    x, w = as_tensor(x), as_tensor(w, "w")
    for name, t in (("x", x), ("w", w)):
        if t.ndim != 4:
            raise ValueError(f"{name}: shape {t.shape} is not of rank 4")
    strides = pair("stride", stride, least=1)
    paddings = pair("padding", padding)
    extra = pair("output_padding", output_padding)
    dilations = pair("dilation", dilation, least=1)
    count("groups", groups)
    if any(e >= s for e, s in zip(extra, strides, strict=True)):
        raise ValueError(f"output_padding: {extra} must be less than stride {strides}")
    if x.shape[1] != w.shape[0]:
        raise ValueError(f"x: has {x.shape[1]} channels, w of shape {w.shape} takes {w.shape[0]}")
    size = [
        (x.shape[2 + i] - 1) * strides[i] - 2 * paddings[i] + dilations[i] * (w.shape[2 + i] - 1) + extra[i] + 1
        for i in range(2)
    ]
    if min(size) < 1:
        raise ValueError(f"padding: {paddings} leaves a result of size {tuple(size)} for x of shape {x.shape}")
    return ConvTranspose2D.apply(
        x,
        w,
        None if bias is None else as_tensor(bias, "bias"),
        convolution=convolution_ops.convolution(strides, paddings, dilations, groups, math),
        y_shape=(x.shape[0], w.shape[1] * groups, *size),
    )


class Linear(Function):
    """A matrix product and a bias; see linear."""

    def forward(self, x: Array, w: Array, bias: Array | None, math: Math | None) -> Array:
        """Computes y, keeping x for the weight's gradient and w for the data's."""
        self.math = math
        if self.needs_grad[0]:
            self.w = w
        if self.needs_grad[1]:
            self.x = x
        return linear_ops.linear_forward(x, w, bias, math=math)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """Computes what is asked of the data's, the weight's and the bias's gradients."""
        dx = dw = db = None
        if self.needs_grad[0]:
            dx = linear_ops.linear_backward_data(grad, self.w, math=self.math)
        if self.needs_grad[1]:
            dw = linear_ops.linear_backward_weight(self.x, grad, math=self.math, **_into(self.targets[1]))
        if self.needs_grad[2]:
            db = bias_ops.bias_backward(grad, **_into(self.targets[2]))
        return dx, dw, db


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, *, math: Math | None = None) -> Tensor:
    """Computes x times w transposed, plus a bias.

    Args:
        x: (N, C).
        w: (K, C), of x's dtype.
        bias: (K,), of x's dtype.
        math: as for conv2d.

    Returns:
        (N, K).

    Raises:
        ValueError: shapes do not fit together.
        TypeError: dtypes differ, or arrays are on different devices.
    """
    return Linear.apply(as_tensor(x), as_tensor(w, "w"), None if bias is None else as_tensor(bias, "bias"), math=math)


# --- batch norm -------------------------------------------------------------------------------------------------------


class BatchNorm(Function):
    """Normalization by channel; see batch_norm."""

    def forward(self, x: Array, weight: Array, bias: Array, bn: BatchNormState, training: bool) -> Array:
        """Normalizes by the batch's or the running statistics, keeping x and those."""
        self.x = x
        self.weight = weight
        self.training = training
        self.eps = bn.eps
        if not training:
            self.mean, self.variance = bn.running_mean, bn.running_var
            return batch_norm_ops.batch_norm_inference(x, weight, bias, bn.running_mean, bn.running_var, bn.eps)
        y, self.mean, self.inv_variance = batch_norm_ops.batch_norm_training(
            x, weight, bias, bn.pending_mean, bn.pending_var, bn.pending_batches, bn.momentum, bn.eps
        )
        bn.statistics.settled = False
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """Computes all three gradients in one op."""
        into: dict[str, Any] = {}
        weight_target, bias_target = self.targets[1:]
        # One flag serves both: where they differ, the engine adds.
        if weight_target and bias_target and weight_target.accumulate == bias_target.accumulate:
            into = {"dweight": weight_target.array, "dbias": bias_target.array, "accumulate": weight_target.accumulate}
        if self.training:
            return batch_norm_ops.batch_norm_backward(grad, self.x, self.weight, self.mean, self.inv_variance, **into)
        return batch_norm_ops.batch_norm_inference_backward(
            grad, self.x, self.weight, self.mean, self.variance, self.eps, **into
        )


def batch_norm(x: Tensor, bn: BatchNormState, *, training: bool) -> Tensor:
    """Normalizes each channel over N, H and W, scales by bn's weight and adds its bias.

    Args:
        x: (N, C, H, W) or (N, C).
        bn: parameters and statistics. In training the new running statistics are written as pending; see
            Note [pending statistics] in flcuda.parameters.
        training: normalize by the batch's statistics (biased variance), not by the running ones.

    Returns:
        Like x.

    Raises:
        ValueError: C differs from bn's, or training on one value a channel.
        TypeError: bn's parameters are not of the dtype that goes with x's.

    Source: Ioffe and Szegedy 2015, algorithm 1.
    """
    return BatchNorm.apply(as_tensor(x), bn.weight, bn.bias, bn=bn, training=training)


# --- element by element -----------------------------------------------------------------------------------------------


class ReLU(Function):
    """The positive part; see relu."""

    def forward(self, x: Array) -> Array:
        """Computes y and keeps it: its sign is the mask."""
        self.y = elementwise.relu_forward(x)
        return self.y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """Passes the gradient where y is positive."""
        return (elementwise.relu_backward(grad, self.y),)


def relu(x: Tensor) -> Tensor:
    """Computes max(x, 0); the gradient at 0 is 0.

    Args:
        x: any shape.

    Returns:
        Like x.
    """
    return ReLU.apply(as_tensor(x))


class Add(Function):
    """The sum of two tensors; see add."""

    def forward(self, a: Array, b: Array) -> Array:
        """Computes a + b."""
        return elementwise.add(a, b)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """Passes the gradient to both."""
        return grad, grad


def add(a: Tensor, b: Tensor) -> Tensor:
    """Adds two tensors of one shape and dtype.

    Args:
        a: any shape.
        b: like a; the layout may differ.

    Returns:
        Like a.

    Raises:
        ValueError: shapes differ.
        TypeError: dtypes differ.
    """
    return Add.apply(as_tensor(a, "a"), as_tensor(b, "b"))


class Scale(Function):
    """A tensor times one number; see scale."""

    def forward(self, x: Array, s: float | Array) -> Array:
        """Computes x * s."""
        self.s = s
        return elementwise.scale(x, s)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """Scales the gradient."""
        return (elementwise.scale(grad, self.s),)


def scale(x: Tensor, s: float | Array) -> Tensor:
    """Multiplies by one number, which has no gradient.

    Args:
        x: any shape.
        s: a number, or a 0-d array on x's device, read when the work runs.

    Returns:
        Like x.
    """
    return Scale.apply(as_tensor(x), s=s)


class Convert(Function):
    """Another dtype and layout in one copy; see convert."""

    def forward(self, x: Array, dtype: str, layout: str | None) -> Array:
        """Copies x."""
        self.dtype, self.layout = x.dtype, _layout(x)
        return _converted(x, dtype, layout or self.layout)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """Copies the gradient back."""
        return (_converted(grad, self.dtype, self.layout),)


def _converted(x: Array, dtype: Any, layout: str) -> Array:
    out = devices.empty(x.shape, dtype, device=devices.device_of(x), layout=layout)
    elementwise.cast(x, out.dtype, out=out)
    return out


def convert(x: Tensor, dtype: str, layout: str | None = None) -> Tensor:
    """Gives x in a dtype and a layout: x itself when it has them, else a copy.

    Args:
        x: floating, any shape; the layout of ranks below 3 is one.
        dtype: "float64", "float32", "float16" or "bfloat16".
        layout: "nchw", "nhwc", or None for x's own.

    Returns:
        (N, C, ...) like x.

    Raises:
        TypeError: x is not floating.
        ValueError: dtype or layout is unknown.
    """
    x = as_tensor(x)
    if x.dtype.name not in devices.DTYPES:
        raise TypeError(f"x: has dtype {x.dtype.name}; expected one of {list(devices.DTYPES)}")
    if dtype not in devices.DTYPES:
        raise ValueError(f"dtype: {dtype!r} is none of {list(devices.DTYPES)}")
    if x.dtype.name == dtype and (layout is None or _has_layout(x.data, layout)):
        return x
    return Convert.apply(x, dtype=dtype, layout=layout)


def _has_layout(a: Array, layout: str) -> bool:
    return bool(a.transpose(devices.memory_order(layout, a.ndim)).flags.c_contiguous)


class Dropout(Function):
    """Random zeros; see dropout."""

    def forward(self, x: Array, p: float, state: rng.State) -> Array:
        """Draws the mask and keeps it."""
        self.p = p
        y, self.mask = elementwise.dropout_forward(x, p, state)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """Applies the same mask."""
        return (elementwise.dropout_backward(grad, self.mask, self.p),)


def dropout(x: Tensor, p: float, state: rng.State, *, training: bool = True) -> Tensor:
    """Sets elements to zero with probability p and multiplies the others by 1 / (1 - p).

    Args:
        x: any shape.
        p: from 0 to 1.
        state: seed and counter, on x's device; the counter moves on.
        training: False gives x itself.

    Returns:
        Like x.

    Raises:
        ValueError: p is outside [0, 1].

    Source: Srivastava et al. 2014, scaled in training.
    """
    probability("p", p)
    if not training or p == 0:
        return as_tensor(x)
    return Dropout.apply(as_tensor(x), p=p, state=state)


class Reshape(Function):
    """Another logical shape; see flatten."""

    def forward(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Gives a view where the layout allows, else a copy."""
        self.shape = x.shape
        return _dense(x).reshape(shape)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """Gives the gradient the old shape."""
        return (_dense(grad).reshape(self.shape),)


def _dense(x: Array) -> Array:
    return x if x.flags.c_contiguous else _converted(x, x.dtype, "nchw")


def flatten(x: Tensor) -> Tensor:
    """Makes (N, C * H * W) of (N, C, H, W), in logical order whatever the layout.

    Args:
        x: at least one dimension.

    Returns:
        (N, the rest).

    Raises:
        ValueError: x has no dimension.
    """
    x = as_tensor(x)
    if x.ndim < 1:
        raise ValueError("x: has no dimension to keep")
    return Reshape.apply(x, shape=(x.shape[0], math.prod(x.shape[1:])))


# --- pooling ----------------------------------------------------------------------------------------------------------


class MaxPool2D(Function):
    """The largest of each window; see max_pool2d."""

    def forward(self, x: Array, **window: Any) -> Array:
        """Keeps where the largest were."""
        self.x_shape, self.window = x.shape, window
        y, self.indices = pooling.max_pool_forward(x, **window)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """Sends each gradient to where the largest was."""
        return (pooling.max_pool_backward(grad, self.indices, self.x_shape, **self.window),)


def max_pool2d(x: Tensor, kernel_size: IntOrPair, stride: IntOrPair | None = None, padding: IntOrPair = 0) -> Tensor:
    """Takes the largest of each window; of equal ones the first gets the gradient.

    Args:
        x: (N, C, H, W).
        kernel_size: a number, or one a dimension.
        stride: likewise; None is kernel_size.
        padding: likewise, at most half the kernel; padded places never win.

    Returns:
        (N, C, P, Q), rounded down.

    Raises:
        ValueError: x is not of rank 4, or an argument is out of range.
    """
    return MaxPool2D.apply(as_tensor(x), **window(kernel_size, stride, padding))


class AvgPool2D(Function):
    """The mean of each window; see avg_pool2d."""

    def forward(self, x: Array, **window: Any) -> Array:
        """Keeps the shape only."""
        self.x_shape, self.window = x.shape, window
        return pooling.avg_pool_forward(x, **window)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """Spreads each gradient evenly."""
        return (pooling.avg_pool_backward(grad, self.x_shape, **self.window),)


def avg_pool2d(x: Tensor, kernel_size: IntOrPair, stride: IntOrPair | None = None, padding: IntOrPair = 0) -> Tensor:
    """Takes the mean of each window, padded zeros counted (PyTorch's default).

    Args:
        x: (N, C, H, W).
        kernel_size: a number, or one a dimension.
        stride: likewise; None is kernel_size.
        padding: likewise, at most half the kernel.

    Returns:
        (N, C, P, Q), rounded down.

    Raises:
        ValueError: x is not of rank 4, or an argument is out of range.
    """
    return AvgPool2D.apply(as_tensor(x), **window(kernel_size, stride, padding))


def window(kernel_size: IntOrPair, stride: IntOrPair | None, padding: IntOrPair) -> dict[str, tuple[int, int]]:
    """Checks a pooling's window.

    Args:
        kernel_size: a number, or height and width.
        stride: likewise; None is kernel_size.
        padding: likewise, at most half the kernel.

    Returns:
        All three as pairs, by name.

    Raises:
        ValueError: an argument is out of range; names it and its value.
        TypeError: an argument is no whole number.
    """
    kernel = pair("kernel_size", kernel_size, least=1)
    paddings = pair("padding", padding)
    if any(2 * p > k for p, k in zip(paddings, kernel, strict=True)):
        raise ValueError(f"padding: {paddings} is more than half of kernel_size {kernel}")
    return {
        "kernel_size": kernel,
        "stride": kernel if stride is None else pair("stride", stride, least=1),
        "padding": paddings,
    }


class GlobalAvgPool2D(Function):
    """The mean over space; see global_avg_pool2d."""

    def forward(self, x: Array) -> Array:
        """Keeps shape and layout only."""
        self.x_shape, self.layout = x.shape, _layout(x)
        return pooling.global_avg_pool_forward(x)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """Spreads each gradient evenly, in x's layout."""
        return (pooling.global_avg_pool_backward(grad, self.x_shape, self.layout),)


def global_avg_pool2d(x: Tensor) -> Tensor:
    """Takes the mean over H and W.

    Args:
        x: (N, C, H, W).

    Returns:
        (N, C).

    Raises:
        ValueError: x is not of rank 4.
    """
    x = as_tensor(x)
    if x.ndim != 4:
        raise ValueError(f"x: shape {x.shape} is not (N, C, H, W)")
    return GlobalAvgPool2D.apply(x)


# --- loss -------------------------------------------------------------------------------------------------------------


class CrossEntropy(Function):
    """Log-softmax and negative log-likelihood; see cross_entropy."""

    def forward(self, logits: Array, target: Array, label_smoothing: float, ignore_index: int) -> Array:
        """Computes the mean loss and keeps the probabilities."""
        value, self.saved = loss.cross_entropy_forward(
            logits, target, label_smoothing=label_smoothing, ignore_index=ignore_index
        )
        return value

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """Computes the logits' gradient, in their dtype."""
        return (loss.cross_entropy_backward(grad, self.saved),)


def cross_entropy(logits: Tensor, target: Any, *, label_smoothing: float = 0.0, ignore_index: int = -100) -> Tensor:
    """Computes the mean cross-entropy of softmax(logits) with class labels.

    Logits of 16 bits are computed on in float32, and their gradient is rounded once.

    Args:
        logits: (N, K), floating.
        target: int32 or int64, (N,), an array or Tensor on the same device; from 0 to K - 1, or ignore_index.
        label_smoothing: from 0 to 1: the share of the label spread evenly over all classes.
        ignore_index: rows with this label count neither in the loss nor in the mean.

    Returns:
        The loss, of no dimension: float64 for float64, else float32. NaN when every row is ignored, as in PyTorch.

    Raises:
        ValueError: shapes do not fit together, label_smoothing is out of range, or (on the CPU) a label is.
        TypeError: a dtype is wrong, or the arrays are on different devices.
    """
    probability("label_smoothing", label_smoothing)
    return CrossEntropy.apply(
        as_tensor(logits, "logits"),
        target=as_tensor(target, "target").data,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
    )


def correct_count(logits: Any, target: Any) -> Array:
    """Counts the rows whose largest logit is the label's; has no gradient and does not wait for the device.

    Args:
        logits: (N, K), an array or Tensor.
        target: int32 or int64, (N,), on the same device.

    Returns:
        int64, no dimension, on the device.
    """
    return loss.top1_count(as_tensor(logits, "logits").data, as_tensor(target, "target").data)


# --- checks of arguments, also for the layers -------------------------------------------------------------------------


def count(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Checks a whole number.

    Args:
        name: the argument's name.
        value: its value.
        least: the smallest that is allowed.
        most: the largest; None for any, though an array may not hold it.

    Returns:
        The value as an int.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less than the smallest or more than the largest.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}: {value!r} is no whole number")
    if value < least:
        raise ValueError(f"{name}: {value} is less than {least}")
    if most is not None and value > most:
        raise ValueError(f"{name}: {value} is more than {most}")
    return int(value)


def pair(name: str, value: Any, least: int = 0) -> tuple[int, int]:
    """Checks a whole number for both spatial dimensions, or one for each.

    Args:
        name: the argument's name.
        value: a number, or two.
        least: the smallest that is allowed.

    Returns:
        Height's and width's.

    Raises:
        TypeError: it is neither.
        ValueError: there are not two, or one is less.
    """
    if isinstance(value, int | np.integer):
        number = count(name, value, least)
        return number, number
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{name}: {value!r} is neither a whole number nor two")
    if len(value) != 2:
        raise ValueError(f"{name}: {value!r} has {len(value)} entries, not 2")
    return count(name, value[0], least), count(name, value[1], least)


def probability(name: str, value: Any) -> float:
    """Checks a number from 0 to 1.

    Args:
        name: the argument's name.
        value: its value.

    Returns:
        The value.

    Raises:
        TypeError: it is no number.
        ValueError: it is outside.
    """
    return number(name, value, 0.0, 1.0)


def number(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    """Checks a finite number.

    Args:
        name: the argument's name.
        value: its value.
        least: the smallest that is allowed.
        most: the largest that is allowed.

    Returns:
        The value as a float.

    Raises:
        TypeError: it is no number.
        ValueError: it is not finite or outside.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name}: {value!r} is no number")
    if not math.isfinite(value):
        raise ValueError(f"{name}: {value} is not finite")
    if not least <= value <= most:
        raise ValueError(f"{name}: {value} is outside {least} to {most}")
    return float(value)


# --- operators of Tensor ----------------------------------------------------------------------------------------------


def _add(a: Tensor, b: Any) -> Any:
    return add(a, b) if isinstance(b, Tensor) else NotImplemented


def _subtract(a: Tensor, b: Any) -> Any:
    return add(a, scale(b, -1.0)) if isinstance(b, Tensor) else NotImplemented


def _multiply(x: Tensor, s: Any) -> Any:
    return scale(x, s) if isinstance(s, int | float | np.number) else NotImplemented


def _divide(x: Tensor, s: Any) -> Any:
    return scale(x, 1.0 / s) if isinstance(s, int | float | np.number) else NotImplemented


def _negative(x: Tensor) -> Tensor:
    return scale(x, -1.0)


Tensor.__add__ = _add
Tensor.__sub__ = _subtract
Tensor.__mul__ = _multiply
Tensor.__rmul__ = _multiply
Tensor.__truediv__ = _divide
Tensor.__neg__ = _negative
