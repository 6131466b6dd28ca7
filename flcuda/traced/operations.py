"""What a traced function works with: stand-ins for arrays, and the operations on them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flcuda.finder.graph_problem import Ref
from flcuda.finder.problem import padding_pair
from flcuda.traced.recorder import FunctionRecorder, Recorder

# --- traced tensors ---------------------------------------------------------------------------------------------------


class Traced:
    """Stands for an array while a function is traced; only operations can be done with it.

    Attributes:
        name: what the graph calls it.
    """

    __slots__ = ("_recorder", "name")
    # NumPy leaves operators with it to this class, which then says what is wrong.
    __array_ufunc__ = None

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self.name = name

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self._recorder.shapes[self.name]

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def dtype(self) -> str:
        """The dtype that it has when it is an output."""
        return self._recorder.dtypes[self.name]

    def __repr__(self) -> str:
        return f"Traced({self.name!r}, {self.shape}, {self.dtype})"

    def _no_value(self, *_: Any) -> Any:
        raise TypeError(
            f"{self.name}: a function of flcuda.graph is traced, so its tensors have no values here: no if, while, "
            f"for, float() or NumPy function of them; select with flcuda.graph.where, and pass numbers as arguments"
        )

    __bool__ = __float__ = __int__ = __index__ = __complex__ = __iter__ = __len__ = __getitem__ = _no_value
    __array__ = __contains__ = _no_value
    __hash__ = object.__hash__

    def __add__(self, other: Any) -> "Traced":
        return _OPERATIONS.add(self, other)

    def __radd__(self, other: Any) -> "Traced":
        return _OPERATIONS.add(self, other)

    def __sub__(self, other: Any) -> "Traced":
        return _OPERATIONS.subtract(self, other)

    def __rsub__(self, other: Any) -> "Traced":
        return _OPERATIONS.subtract(other, self)

    def __mul__(self, other: Any) -> "Traced":
        return _OPERATIONS.multiply(self, other)

    def __rmul__(self, other: Any) -> "Traced":
        return _OPERATIONS.multiply(self, other)

    def __truediv__(self, other: Any) -> "Traced":
        return _OPERATIONS.divide(self, other)

    def __rtruediv__(self, other: Any) -> "Traced":
        return _OPERATIONS.divide(other, self)

    def __pow__(self, other: Any) -> "Traced":
        return _OPERATIONS.power(self, other)

    def __rpow__(self, other: Any) -> "Traced":
        return _OPERATIONS.power(other, self)

    def __matmul__(self, other: Any) -> "Traced":
        return _OPERATIONS.matmul(self, other)

    def __neg__(self) -> "Traced":
        return _OPERATIONS.negative(self)

    def __abs__(self) -> "Traced":
        return _OPERATIONS.abs(self)

    def __eq__(self, other: object) -> "Traced":  # type: ignore[override]
        return _OPERATIONS.equal(self, other)

    def __ne__(self, other: object) -> "Traced":  # type: ignore[override]
        return _OPERATIONS.not_equal(self, other)

    def __gt__(self, other: Any) -> "Traced":
        return _OPERATIONS.greater(self, other)

    def __ge__(self, other: Any) -> "Traced":
        return _OPERATIONS.greater_equal(self, other)

    def __lt__(self, other: Any) -> "Traced":
        return _OPERATIONS.less(self, other)

    def __le__(self, other: Any) -> "Traced":
        return _OPERATIONS.less_equal(self, other)


def _given(where: str, name: str, value: Any, number: bool = False) -> Any:
    """Gives an operand as an argument of an Operation: a Ref, or a number where one may be."""
    if isinstance(value, Traced):
        return Ref(value.name)
    if number and isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        return float(value)
    if hasattr(value, "shape") or hasattr(value, "__dlpack__"):
        raise TypeError(
            f"{where}: {name}: an array or Tensor of shape {tuple(value.shape)} that is no argument of the traced "
            f"function; what a graph reads must be passed as an argument"
        )
    wanted = "a tensor or a number" if number else "a tensor"
    raise TypeError(f"{where}: {name}: expected {wanted} of the traced function, got {value!r}")


def _recorder_of(where: str, values: Iterable[Any]) -> Recorder:
    """Gives the one recorder of an operation's tensors."""
    found = list(dict.fromkeys(value._recorder for value in values if isinstance(value, Traced)))
    if not found:
        raise TypeError(
            f"{where}: no operand is a tensor of a traced function; operations of flcuda.graph work inside a function "
            f"that is decorated with @flcuda.graph"
        )
    if len(found) > 1:
        raise TypeError(f"{where}: its tensors belong to different calls of traced functions")
    return found[0]


class Operations:
    """The operations of traced functions: NumPy's and PyTorch's names, cuDNN's where these have none.

    Operands are tensors of the traced function; the pointwise ones take numbers as well. Dimensions of size 1 are
    broadcast, ranks have to be equal. Each gives a tensor; errors are TypeError or ValueError and name the operation,
    the tensor and what would be right.
    """

    # convolutions

    def conv(self, x: Traced, w: Traced, *, padding: Any = 0, stride: Any = 1, dilation: Any = 1) -> Traced:
        """Cross-correlates x (N, C, *spatial) with w (K, C / groups, *window).

        Args:
            x: the input.
            w: the filter; the groups follow from its shape.
            padding: one number, one a dimension, or a (before, after) pair a dimension.
            stride: one number, or one a dimension.
            dilation: one number, or one a dimension.

        Returns:
            (N, K, *spatial).
        """
        return self._convolution("conv", "convolution_forward", {"x": x, "w": w}, (), padding, stride, dilation)

    def conv_backward_data(
        self, dy: Traced, w: Traced, x_shape: Sequence[int], *, padding: Any = 0, stride: Any = 1, dilation: Any = 1
    ) -> Traced:
        """Gives the gradient of `conv` with respect to x, of x_shape: a transposed convolution of dy."""
        shape = (("x_shape", tuple(x_shape)),)
        return self._convolution(
            "conv_backward_data", "convolution_backward_data", {"dy": dy, "w": w}, shape, padding, stride, dilation
        )

    def conv_backward_filter(
        self, x: Traced, dy: Traced, w_shape: Sequence[int], *, padding: Any = 0, stride: Any = 1, dilation: Any = 1
    ) -> Traced:
        """Gives the gradient of `conv` with respect to w, of w_shape."""
        shape = (("w_shape", tuple(w_shape)),)
        return self._convolution(
            "conv_backward_filter", "convolution_backward_filter", {"x": x, "dy": dy}, shape, padding, stride, dilation
        )

    def _convolution(
        self,
        word: str,
        method: str,
        operands: Mapping[str, Traced],
        shape: tuple[tuple[str, tuple[int, ...]], ...],
        padding: Any,
        stride: Any,
        dilation: Any,
    ) -> Traced:
        recorder = _recorder_of(word, operands.values())
        given = {name: _given(word, name, value) for name, value in operands.items()}
        rank = max(len(next(iter(operands.values())).shape) - 2, 0)
        before, after = padding_pair(padding, rank)
        numbers = {
            "padding": before if before == after else tuple(zip(before, after, strict=True)),
            "stride": tuple(stride) if isinstance(stride, Sequence) else (stride,) * rank,
            "dilation": tuple(dilation) if isinstance(dilation, Sequence) else (dilation,) * rank,
        }
        made = recorder.one(word, method, **given, **dict(shape), **numbers)
        return Traced(recorder, made.name)

    # element by element

    def pointwise(
        self, mode: str, x: Any, b: Any = None, t: Any = None, *, name: str = "", **parameters: float
    ) -> Traced:
        """Does any pointwise operation of cuDNN; the others here are this one with a mode.

        Args:
            mode: a word of `flcuda.cudnn.graph.POINTWISE_MODES`.
            x: the first operand.
            b: the second, for modes that have one.
            t: the condition of "binary_select".
            name: what the result is called, with a number.
            **parameters: of the mode, such as swish_beta.

        Returns:
            The result, of the broadcast shape.
        """
        word = name or mode
        operands = {role: value for role, value in (("x", x), ("b", b), ("t", t)) if value is not None}
        recorder = _recorder_of(word, operands.values())
        given = {role: _given(word, role, value, number=role != "t") for role, value in operands.items()}
        _equal_ranks(word, [value for value in operands.values() if isinstance(value, Traced)])
        made = recorder.one(word, "pointwise", mode=mode, **given, **parameters)
        return Traced(recorder, made.name)

    def add(self, a: Any, b: Any) -> Traced:
        """Gives a + b."""
        return self.pointwise("add", *_tensor_first(a, b), name="add")

    def subtract(self, a: Any, b: Any) -> Traced:
        """Gives a - b."""
        if isinstance(a, Traced):
            return self.pointwise("sub", a, b, name="subtract")
        return self.add(self.negative(b), a)

    def multiply(self, a: Any, b: Any) -> Traced:
        """Gives a * b."""
        return self.pointwise("mul", *_tensor_first(a, b), name="multiply")

    def divide(self, a: Any, b: Any) -> Traced:
        """Gives a / b."""
        return self.pointwise("div", a, b, name="divide")

    def power(self, a: Any, b: Any) -> Traced:
        """Gives a to the power of b."""
        return self.pointwise("pow", a, b, name="power")

    def remainder(self, a: Any, b: Any) -> Traced:
        """Gives what is left of a after division by b, with b's sign (needs cuDNN 9.27)."""
        return self.pointwise("floor_mod", a, b, name="remainder")

    def fmod(self, a: Any, b: Any) -> Traced:
        """Gives what is left of a after division by b, with a's sign."""
        return self.pointwise("mod", a, b, name="fmod")

    def atan2(self, a: Any, b: Any) -> Traced:
        """Gives the angle of the point (b, a)."""
        return self.pointwise("atan2", a, b, name="atan2")

    def add_square(self, a: Any, b: Any) -> Traced:
        """Gives a + b * b."""
        return self.pointwise("add_square", a, b, name="add_square")

    def maximum(self, a: Any, b: Any) -> Traced:
        """Gives the larger of a and b; of equal ones b gets the gradient."""
        return self.pointwise("max", *_tensor_first(a, b), name="maximum")

    def minimum(self, a: Any, b: Any) -> Traced:
        """Gives the smaller of a and b; of equal ones b gets the gradient."""
        return self.pointwise("min", *_tensor_first(a, b), name="minimum")

    def where(self, condition: Traced, a: Any, b: Any) -> Traced:
        """Gives a where the condition, a comparison's result, holds, else b; all of one shape."""
        return self.pointwise("binary_select", a, b, condition, name="where")

    def equal(self, a: Any, b: Any) -> Traced:
        """Says where a equals b."""
        return self.pointwise("cmp_eq", a, b, name="equal")

    def not_equal(self, a: Any, b: Any) -> Traced:
        """Says where a differs from b."""
        return self.pointwise("cmp_neq", a, b, name="not_equal")

    def greater(self, a: Any, b: Any) -> Traced:
        """Says where a is above b."""
        return self.pointwise("cmp_gt", a, b, name="greater")

    def greater_equal(self, a: Any, b: Any) -> Traced:
        """Says where a is b or above."""
        return self.pointwise("cmp_ge", a, b, name="greater_equal")

    def less(self, a: Any, b: Any) -> Traced:
        """Says where a is below b."""
        return self.pointwise("cmp_lt", a, b, name="less")

    def less_equal(self, a: Any, b: Any) -> Traced:
        """Says where a is b or below."""
        return self.pointwise("cmp_le", a, b, name="less_equal")

    def logical_and(self, a: Traced, b: Traced) -> Traced:
        """Says where both hold."""
        return self.pointwise("logical_and", a, b, name="logical_and")

    def logical_or(self, a: Traced, b: Traced) -> Traced:
        """Says where one holds."""
        return self.pointwise("logical_or", a, b, name="logical_or")

    def logical_not(self, a: Traced) -> Traced:
        """Says where it does not hold."""
        return self.pointwise("logical_not", a, name="logical_not")

    def relu(
        self, x: Traced, *, lower_clip: float = 0.0, upper_clip: float | None = None, lower_slope: float = 0.0
    ) -> Traced:
        """Gives x above lower_clip, lower_clip + lower_slope * (x - lower_clip) below it, at most upper_clip."""
        chosen: dict[str, float] = {}
        if lower_clip != 0.0:
            chosen["lower_clip"] = float(lower_clip)
        if upper_clip is not None:
            chosen["upper_clip"] = float(upper_clip)
        if lower_slope != 0.0:
            chosen["lower_slope"] = float(lower_slope)
        return self.pointwise("relu_fwd", x, name="relu", **chosen)

    def elu(self, x: Traced, *, alpha: float = 1.0) -> Traced:
        """Gives x above 0, alpha * (exp(x) - 1) below."""
        return self.pointwise("elu_fwd", x, name="elu", elu_alpha=float(alpha))

    def softplus(self, x: Traced, *, beta: float = 1.0) -> Traced:
        """Gives log(1 + exp(beta * x)) / beta."""
        return self.pointwise("softplus_fwd", x, name="softplus", softplus_beta=float(beta))

    def silu(self, x: Traced, *, beta: float = 1.0) -> Traced:
        """Gives x / (1 + exp(-beta * x)), also called swish."""
        return self.pointwise("swish_fwd", x, name="silu", swish_beta=float(beta))

    def sigmoid(self, x: Traced) -> Traced:
        """Gives 1 / (1 + exp(-x))."""
        return self.pointwise("sigmoid_fwd", x, name="sigmoid")

    def tanh(self, x: Traced) -> Traced:
        """Gives the hyperbolic tangent."""
        return self.pointwise("tanh_fwd", x, name="tanh")

    def gelu(self, x: Traced) -> Traced:
        """Gives x * Phi(x), by the error function."""
        return self.pointwise("gelu_fwd", x, name="gelu")

    def gelu_tanh(self, x: Traced) -> Traced:
        """Gives the approximation of `gelu` by tanh."""
        return self.pointwise("gelu_approx_tanh_fwd", x, name="gelu_tanh")

    def identity(self, x: Traced) -> Traced:
        """Gives x."""
        return self.pointwise("identity", x, name="identity")

    def negative(self, x: Traced) -> Traced:
        """Gives -x."""
        return self.pointwise("neg", x, name="negative")

    def abs(self, x: Traced) -> Traced:
        """Gives |x|; its gradient at 0 is 0."""
        return self.pointwise("abs", x, name="abs")

    def reciprocal(self, x: Traced) -> Traced:
        """Gives 1 / x."""
        return self.pointwise("reciprocal", x, name="reciprocal")

    def exp(self, x: Traced) -> Traced:
        """Gives e to the power of x."""
        return self.pointwise("exp", x, name="exp")

    def log(self, x: Traced) -> Traced:
        """Gives the natural logarithm."""
        return self.pointwise("log", x, name="log")

    def sqrt(self, x: Traced) -> Traced:
        """Gives the square root."""
        return self.pointwise("sqrt", x, name="sqrt")

    def rsqrt(self, x: Traced) -> Traced:
        """Gives 1 / sqrt(x)."""
        return self.pointwise("rsqrt", x, name="rsqrt")

    def erf(self, x: Traced) -> Traced:
        """Gives the error function."""
        return self.pointwise("erf", x, name="erf")

    def sin(self, x: Traced) -> Traced:
        """Gives the sine."""
        return self.pointwise("sin", x, name="sin")

    def cos(self, x: Traced) -> Traced:
        """Gives the cosine."""
        return self.pointwise("cos", x, name="cos")

    def tan(self, x: Traced) -> Traced:
        """Gives the tangent."""
        return self.pointwise("tan", x, name="tan")

    def ceil(self, x: Traced) -> Traced:
        """Rounds up; has no derivative."""
        return self.pointwise("ceil", x, name="ceil")

    def floor(self, x: Traced) -> Traced:
        """Rounds down; has no derivative."""
        return self.pointwise("floor", x, name="floor")

    # reductions, statistics, norms

    def reduce(self, mode: str, x: Traced, axis: int | Sequence[int] | None = None) -> Traced:
        """Reduces over dimensions, whose size becomes 1.

        Args:
            mode: a word of `flcuda.cudnn.graph.REDUCTION_MODES`; "add" and "avg" have a derivative.
            x: any shape.
            axis: one dimension or several; all by default.

        Returns:
            The result; in memory it has the compute dtype, because cuDNN writes no 16-bit reductions.
        """
        word = f"reduce_{mode}"
        recorder = _recorder_of(word, (x,))
        rank = len(x.shape)
        chosen = range(rank) if axis is None else axis if isinstance(axis, Sequence) else (axis,)
        for dim in chosen:
            if isinstance(dim, bool) or not isinstance(dim, int) or not -rank <= dim < rank:
                raise ValueError(f"{word}: axis: {dim!r} is no dimension of {x!r}")
        gone = {dim % rank for dim in chosen}
        shape = tuple(1 if dim in gone else size for dim, size in enumerate(x.shape))
        made = recorder.one(word, "reduction", mode=mode, x=_given(word, "x", x), shape=shape)
        return Traced(recorder, made.name)

    def sum(self, x: Traced, axis: int | Sequence[int] | None = None) -> Traced:
        """Sums over dimensions, whose size becomes 1; see `reduce`."""
        return self.reduce("add", x, axis)

    def mean(self, x: Traced, axis: int | Sequence[int] | None = None) -> Traced:
        """Averages over dimensions, whose size becomes 1; see `reduce`."""
        return self.reduce("avg", x, axis)

    def max(self, x: Traced, axis: int | Sequence[int] | None = None) -> Traced:
        """Gives the largest over dimensions, whose size becomes 1; see `reduce`. Has no derivative."""
        return self.reduce("max", x, axis)

    def min(self, x: Traced, axis: int | Sequence[int] | None = None) -> Traced:
        """Gives the smallest over dimensions, whose size becomes 1; see `reduce`. Has no derivative."""
        return self.reduce("min", x, axis)

    def genstats(self, x: Traced) -> tuple[Traced, Traced]:
        """Gives the sums of x (N, C, *spatial) and of its squares by channel, (1, C, 1, ...) in the compute dtype."""
        recorder = _recorder_of("genstats", (x,))
        total, squares = recorder.add("genstats", "generate_statistics", x=_given("genstats", "x", x))
        assert total is not None
        assert squares is not None
        return Traced(recorder, total.name), Traced(recorder, squares.name)

    def norm(self, mode: str, x: Traced, scale: Traced, bias: Traced | None = None, *, epsilon: float = 1e-5) -> Traced:
        """Normalizes by the statistics of x itself, scales and adds a bias.

        Args:
            mode: "batch", "instance", "layer" or "rms" (which has no mean, and may have no bias).
            x: (N, C, *spatial).
            scale: (1, C, 1, ...) for batch and instance; for layer and rms statistics are over the dimensions in which
                it is not 1.
            bias: of scale's shape.
            epsilon: added to the variance.

        Returns:
            Like x.
        """
        word = f"{mode}_norm"
        recorder = _recorder_of(word, (x, scale))
        given = {"x": _given(word, "x", x), "scale": _given(word, "scale", scale)}
        if bias is not None:
            given["bias"] = _given(word, "bias", bias)
        made = recorder.one(word, "norm_forward", mode=mode, **given, epsilon=float(epsilon))
        return Traced(recorder, made.name)

    # others

    def matmul(self, a: Traced, b: Traced) -> Traced:
        """Multiplies matrices: (*batch, M, K) and (*batch, K, N), of rank 3 or more."""
        recorder = _recorder_of("matmul", (a, b))
        made = recorder.one("matmul", "matmul", a=_given("matmul", "a", a), b=_given("matmul", "b", b))
        return Traced(recorder, made.name)

    def resample(self, mode: str, x: Traced, *, window: Any, stride: Any = 1, padding: Any = 0) -> Traced:
        """Pools or interpolates x (N, C, *spatial); mode is a word of `flcuda.cudnn.graph.RESAMPLE_MODES`."""
        word = f"{mode}_pool"
        recorder = _recorder_of(word, (x,))
        given = {"window": window, "stride": stride, "padding": padding}
        numbers = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        taken = mode in ("max", "nearest") and isinstance(recorder, FunctionRecorder) and recorder.wants_index(x.ndim)
        numbers |= {"index": True} if taken else {}
        made = recorder.one(word, "resample_forward", mode=mode, x=_given(word, "x", x), **numbers)
        return Traced(recorder, made.name)

    def max_pool(self, x: Traced, window: Any, *, stride: Any = None, padding: Any = 0) -> Traced:
        """Takes the largest of each window; the stride is the window unless it is given."""
        return self.resample("max", x, window=window, stride=window if stride is None else stride, padding=padding)

    def avg_pool(
        self, x: Traced, window: Any, *, stride: Any = None, padding: Any = 0, count_include_pad: bool = True
    ) -> Traced:
        """Takes the mean of each window, padded zeros counted or not; the stride is the window unless it is given."""
        mode = "average_include_padding" if count_include_pad else "average_exclude_padding"
        return self.resample(mode, x, window=window, stride=window if stride is None else stride, padding=padding)

    def reshape(self, x: Traced, shape: Sequence[int]) -> Traced:
        """Gives x another shape, with its elements in logical order; one size may be -1.

        An argument is reshaped before the graph, which costs nothing when it is C-contiguous; anything else by an
        operation of the graph.
        """
        recorder = _recorder_of("reshape", (x,))
        given = _given("reshape", "x", x)
        sizes = tuple(shape)
        if sizes.count(-1) == 1:
            rest = -math.prod(sizes)
            sizes = tuple(math.prod(x.shape) // max(rest, 1) if size == -1 else size for size in sizes)
        if math.prod(sizes) != math.prod(x.shape):
            raise ValueError(f"reshape: shape: {tuple(shape)} does not hold the elements of {x!r}")
        if isinstance(recorder, FunctionRecorder) and x.name in recorder.arguments:
            return Traced(recorder, recorder.reshaped(x.name, sizes))
        made = recorder.one("reshape", "reshape", x=given, shape=sizes)
        return Traced(recorder, made.name)

    def concatenate(self, tensors: Sequence[Traced], axis: int) -> Traced:
        """Puts tensors one after another; they are equal but for the axis."""
        recorder = _recorder_of("concatenate", tensors)
        given = tuple(_given("concatenate", f"tensors[{i}]", tensor) for i, tensor in enumerate(tensors))
        dim = axis % len(tensors[0].shape) if -len(tensors[0].shape) <= axis < 0 else axis
        made = recorder.one("concatenate", "concatenate", tensors=given, axis=dim)
        return Traced(recorder, made.name)


def _tensor_first(a: Any, b: Any) -> tuple[Any, Any]:
    """Puts the tensor before the number, for operations that allow it."""
    return (a, b) if isinstance(a, Traced) or not isinstance(b, Traced) else (b, a)


def _equal_ranks(where: str, tensors: Sequence[Traced]) -> None:
    """Raises when ranks differ: NumPy would align shapes at the right, where a channel is seldom."""
    if not tensors:
        return
    largest = max(tensors, key=lambda tensor: tensor.ndim)
    for tensor in tensors:
        if tensor.ndim == largest.ndim:
            continue
        rank = largest.ndim
        right = (1,) * (rank - tensor.ndim) + tensor.shape
        if tensor.ndim == 1 and rank > 2 and tensor.shape[0] == largest.shape[1]:
            right = (1, tensor.shape[0], *(1,) * (rank - 2))
        raise ValueError(
            f"{where}: {tensor!r} and {largest!r} differ in rank, and a graph does not align shapes; reshape "
            f"{tensor.name} to {right}"
        )


_OPERATIONS = Operations()
