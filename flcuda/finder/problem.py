"""What is to be computed, frozen, validated, hashable and printable as one line that reads back.

`Problem` is what every kind has in common; `ConvolutionProblem` is one convolution. Descriptors, store keys and plans
are all made from the Problem, so that they cannot disagree.

Note [size-1 dimensions]: the stride of a dimension of size 1 is never used to address memory, so the arrays of a 1x1
filter or of a single channel have no layout of their own. `from_arrays` gives such an operand the strides of the layout
that the other operands have, because a library may choose another kernel by them; comparisons with an array ignore
them.
"""

import functools
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from flcuda import device as devices
from flcuda import kernel_loader, rng
from flcuda.device import Device, contiguous_strides

DIRECTIONS = ("forward", "backward_data", "backward_filter")
DTYPES = tuple(devices.DTYPES)
LAYOUTS = devices.LAYOUTS
MATHS = ("fma", "tensor_op")
OPERAND_DTYPES: dict[str, np.dtype[Any]] = {
    **devices.DTYPES,
    **{word: np.dtype(word) for word in ("int8", "uint8", "int32", "int64")},
}
"""The dtypes that an operand of any Problem may have: the floating ones of a convolution, and indices and masks."""

# in, in, out of each direction; the letter names the tensor that the operand is, or is the gradient of
_OPERANDS = {
    "forward": ("x", "w", "y"),
    "backward_data": ("dy", "w", "dx"),
    "backward_filter": ("x", "dy", "dw"),
}
_TENSOR = {"x": "x", "w": "w", "y": "y", "dx": "x", "dw": "w", "dy": "y"}

_LARGEST = 2**63 - 1
DEFAULT_ALIGNMENT = 16
_LARGEST_ALIGNMENT = 32
# up to so many elements, strides that fail the quick rule are tested by listing every offset (some 20 ms)
_EXACT_OVERLAP_ELEMENTS = 1 << 20
# random_arrays repeats its numbers after so many (a prime: no power-of-two stride sees the same number twice in a row)
_RANDOM_PERIOD = 1_048_573
_RANDOM_SPACING = 1 << 20


def _integers(name: str, value: Iterable[Any]) -> tuple[int, ...]:
    """Returns a sequence as a tuple of Python integers below 2^63, or raises naming the argument."""
    try:
        numbers = tuple(operator.index(entry) for entry in value)
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers, not {value!r}") from None
    for number in numbers:
        if abs(number) > _LARGEST:
            raise ValueError(f"{name} {numbers}: {number} does not fit into 64 bits")
    return numbers


def _at_least(name: str, numbers: tuple[int, ...], rank: int, least: int) -> None:
    if len(numbers) != rank:
        raise ValueError(f"{name} {numbers} must have {rank} entries, one a spatial dimension")
    if any(number < least for number in numbers):
        raise ValueError(f"{name} {numbers} must be {least} or more in each dimension")


def output_shape(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    padding_before: Sequence[int],
    padding_after: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> tuple[int, ...]:
    """Returns the shape of a convolution's output, and checks everything that the shapes decide.

    Args:
        x_shape: (N, C, *spatial), with any number of spatial dimensions from one; N may be 0.
        w_shape: (K, C / groups, *kernel).
        padding_before: zeros in front, one number a spatial dimension.
        padding_after: zeros behind, one number a spatial dimension.
        stride: one number a spatial dimension.
        dilation: one number a spatial dimension.
        groups: how many groups the channels fall into.

    Returns:
        (N, K, *spatial of the output); spatial sizes are
        floor((size + before + after - (kernel - 1) * dilation - 1) / stride) + 1.

    Raises:
        ValueError: ranks differ, channels do not agree or do not divide by groups, the dilated kernel is larger than
            the padded input, a padding is negative, or a size, stride or dilation is less than 1.
        TypeError: something is not an integer.
    """
    x_shape = _integers("x_shape", x_shape)
    w_shape = _integers("w_shape", w_shape)
    padding_before = _integers("padding_before", padding_before)
    padding_after = _integers("padding_after", padding_after)
    stride = _integers("stride", stride)
    dilation = _integers("dilation", dilation)
    (groups,) = _integers("groups", (groups,))
    rank = len(x_shape) - 2
    if rank < 1:
        raise ValueError(f"x_shape {x_shape} must be (N, C, *spatial) with at least one spatial dimension")
    if len(w_shape) != len(x_shape):
        raise ValueError(f"w_shape {w_shape} must have the rank of x_shape {x_shape}: (K, C / groups, *kernel)")
    if x_shape[0] < 0 or any(size < 1 for size in x_shape[1:]):
        raise ValueError(f"x_shape {x_shape} must have channels and spatial sizes of 1 or more")
    if any(size < 1 for size in w_shape):
        raise ValueError(f"w_shape {w_shape} must have sizes of 1 or more")
    _at_least("padding_before", padding_before, rank, 0)
    _at_least("padding_after", padding_after, rank, 0)
    _at_least("stride", stride, rank, 1)
    _at_least("dilation", dilation, rank, 1)
    if groups < 1:
        raise ValueError(f"groups {groups} must be 1 or more")
    if x_shape[1] % groups:
        raise ValueError(f"groups {groups} does not divide the {x_shape[1]} channels of x_shape {x_shape}")
    if w_shape[0] % groups:
        raise ValueError(f"groups {groups} does not divide the {w_shape[0]} filters of w_shape {w_shape}")
    if w_shape[1] * groups != x_shape[1]:
        raise ValueError(
            f"w_shape {w_shape} has {w_shape[1]} channels a group; x_shape {x_shape} with groups {groups} "
            f"needs {x_shape[1] // groups}"
        )
    spatial = []
    for axis in range(rank):
        padded = x_shape[2 + axis] + padding_before[axis] + padding_after[axis]
        kernel = (w_shape[2 + axis] - 1) * dilation[axis] + 1
        if kernel > padded:
            raise ValueError(
                f"w_shape {w_shape}: kernel of {kernel} (dilation {dilation[axis]}) is larger than the padded input "
                f"of {padded} in spatial dimension {axis} of x_shape {x_shape}"
            )
        spatial.append((padded - kernel) // stride[axis] + 1)
    return (x_shape[0], w_shape[0], *spatial)


def is_broadcast(array: Any) -> bool:
    """Says whether an array repeats memory by a stride of 0, so that it must be copied before a Problem can take it."""
    return any(step == 0 and size > 1 for size, step in zip(array.shape, array.strides, strict=True))


def same_strides(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Says whether two stride tuples address the same memory. See Note [size-1 dimensions]."""
    return all(size == 1 or step == other for size, step, other in zip(shape, strides, others, strict=True))


def _overlaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool | None:
    """Says whether two elements share memory, for positive strides; None when that is not cheap to decide.

    The quick rule takes the dimensions by ascending stride: when each stride is larger than the largest offset that the
    dimensions before it reach, no two elements meet. It is sufficient, not necessary (shape (2, 3), strides (3, 2)
    fails it and does not overlap), so small arrays that fail it are decided by listing their offsets.
    """
    dimensions = sorted((step, size) for size, step in zip(shape, strides, strict=True) if size > 1)
    reach = 0
    for step, size in dimensions:
        if step <= reach:
            break
        reach += (size - 1) * step
    else:
        return False
    largest = sum((size - 1) * step for step, size in dimensions)
    count = math.prod(size for _, size in dimensions)
    if count > largest + 1:
        return True
    if count > _EXACT_OVERLAP_ELEMENTS:
        return None
    offsets = np.zeros(1, np.int64)
    for step, size in dimensions:
        offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * step).reshape(-1)
    return bool(np.unique(offsets).size < count)


@functools.lru_cache(maxsize=4096)
def _check_strides(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Raises when strides cannot belong to an operand: one is not positive, or elements overlap."""
    if len(strides) != len(shape):
        raise ValueError(f"{name} {strides} must have {len(shape)} entries, one a dimension of shape {shape}")
    for size, step in zip(shape, strides, strict=True):
        if step == 0 and size > 1:
            raise ValueError(
                f"{name} {strides} of shape {shape}: a stride is 0 (a broadcast array); copy the array first"
            )
        if step < 1:
            raise ValueError(f"{name} {strides} of shape {shape}: strides must be positive; copy the array first")
    overlap = _overlaps(shape, strides)
    if overlap is None:
        raise ValueError(
            f"{name} {strides} of shape {shape}: dimensions interleave, and the array is too large to prove that its "
            "elements do not overlap; copy the array first"
        )
    if overlap:
        raise ValueError(f"{name} {strides} of shape {shape}: elements overlap in memory; copy the array first")


def dtype_word(dtype: npt.DTypeLike, name: str = "dtype") -> str:
    """Returns the word of a supported dtype: float64, float32, float16 or bfloat16.

    Raises:
        TypeError: the dtype is another one; the message names the argument.
    """
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype
    try:
        word = np.dtype(dtype).name
    except TypeError:
        word = repr(dtype)
    if word not in DTYPES:
        raise TypeError(f"{name} has dtype {word}; supported are {', '.join(DTYPES)}")
    return word


def default_math(dtype: str) -> str:
    """Returns the math of a dtype when nobody asks: tensor_op for the 16-bit ones, else fma (TF32 only when asked)."""
    return "tensor_op" if dtype in ("float16", "bfloat16") else "fma"


def _compute(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def _per_dimension(name: str, value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    if isinstance(value, Sequence | np.ndarray):
        return _integers(name, value)
    return _integers(name, (value,)) * rank


def padding_pair(
    padding: int | Sequence[int] | Sequence[tuple[int, int]], rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the padding before and after of an argument `padding`.

    Args:
        padding: one number for all, one a spatial dimension, or one (before, after) pair a spatial dimension.
        rank: number of spatial dimensions.

    Raises:
        TypeError: entries are neither integers nor pairs of integers.
        ValueError: the number of entries is not `rank`, or a pair has not two entries.
    """
    if not isinstance(padding, Sequence | np.ndarray):
        numbers = _integers("padding", (padding,)) * rank
        return numbers, numbers
    if len(padding) != rank:
        raise ValueError(f"padding {padding!r} must have {rank} entries, one a spatial dimension")
    before = []
    after = []
    for entry in padding:
        pair = (
            _integers("padding", entry)
            if isinstance(entry, Sequence | np.ndarray)
            else _integers("padding", (entry,)) * 2
        )
        if len(pair) != 2:
            raise ValueError(f"padding {padding!r}: {entry!r} must be a number or a pair (before, after)")
        before.append(pair[0])
        after.append(pair[1])
    return tuple(before), tuple(after)


class Problem:
    """What every kind of Problem has: named operands, the inputs first, each with shape, strides, dtype and alignment.

    Attributes:
        compute: dtype of the sums.
        math: "fma" or "tensor_op"; with float32 operands, tensor_op means TF32.
        accumulate: the result is added to the output instead of replacing it.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def compute(self) -> str:
            """Dtype of the sums."""

        @property
        def math(self) -> str:
            """How products are computed: "fma" or "tensor_op"."""

        @property
        def accumulate(self) -> bool:
            """Whether the result is added to the output."""

    @staticmethod
    def parse(line: str) -> "Problem":
        """Reads a Problem of either kind: `graph ...` is a GraphProblem, anything else a ConvolutionProblem.

        Args:
            line: what `str` of a Problem prints, or what `parse` of its class understands.

        Returns:
            The Problem.

        Raises:
            ValueError, TypeError: the line is none; the message names what is wrong.
        """
        if not isinstance(line, str):
            raise TypeError(f"line must be a string, not {line!r}")
        if re.match(r"\s*graph\b", line):
            # it is built on this module
            from flcuda.finder.graph_problem import GraphProblem

            return GraphProblem.parse(line)
        return ConvolutionProblem.parse(line)

    @property
    def kind(self) -> str:
        """The word that a stored choice's file name begins with: a direction, or "graph"."""
        raise NotImplementedError

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of what is read, in the order of a call."""
        raise NotImplementedError

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of what is written, in the order of a call."""
        raise NotImplementedError

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the inputs, then of the outputs: the order in which a runner takes them."""
        return self.inputs + self.outputs

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Returns the shape of an operand."""
        raise NotImplementedError

    def strides_of(self, name: str) -> tuple[int, ...]:
        """Returns the strides of an operand, in elements."""
        raise NotImplementedError

    def dtype_of(self, name: str) -> str:
        """Returns the dtype word of an operand."""
        raise NotImplementedError

    def alignment_of(self, name: str) -> int:
        """Returns the alignment of an operand, in bytes."""
        raise NotImplementedError

    @property
    def contracts(self) -> bool:
        """Whether it sums products, in a convolution or a matrix product, which is what tensor cores compute."""
        raise NotImplementedError

    @property
    def convolutions(self) -> tuple["ConvolutionProblem", ...]:
        """The convolutions in it: what a fault of one concerns."""
        raise NotImplementedError

    def layout_of(self, name: str) -> str:
        """Returns the layout of an operand: "nchw", "nhwc" (of strides that say both, the exact one) or "strided"."""
        shape = self.shape_of(name)
        strides = self.strides_of(name)
        for layout in LAYOUTS:
            if strides == contiguous_strides(shape, layout):
                return layout
        for layout in LAYOUTS:
            if same_strides(shape, strides, contiguous_strides(shape, layout)):
                return layout
        return "strided"

    @property
    def precision(self) -> str:
        """The word for dtype and math of the first input: float64, float32, tf32, float16, bfloat16, or an integer."""
        dtype = self.dtype_of(self.inputs[0])
        return "tf32" if dtype == "float32" and self.math == "tensor_op" else dtype

    def random_arrays(self, seed: int = 0, device: Any = None) -> dict[str, Any]:
        """Makes operands for a call of a Plan: `plan(**problem.random_arrays())`.

        Args:
            seed: of the numbers, which are the same on both devices but for the last bits.
            device: where the arrays live: a Device, "cuda", "cpu" or None for a GPU if there is one.

        Returns:
            A dict of new arrays, owned by the caller: the inputs by their names, standard normal (integers are 0, which
            is a valid index), with the Problem's strides; and "out", standard normal too when the Problem accumulates,
            else NaN, so that an element not written shows. Of several outputs "out" is a tuple. Numbers repeat after
            1,048,573.
        """
        target = devices.resolve(device)
        arrays = {}
        results = []
        with target.use():
            for position, name in enumerate(self.operands):
                array = self.empty(name, target)
                if np.dtype(array.dtype).kind in "iu":
                    array[...] = 0
                elif name in self.outputs and not self.accumulate:
                    bits = _bits(array)
                    array.view(bits)[...] = np.array(math.nan, array.dtype).view(bits)[()]
                else:
                    fill_normal(array, seed, position * _RANDOM_SPACING, target)
                if name in self.outputs:
                    results.append(array)
                else:
                    arrays[name] = array
        arrays["out"] = results[0] if len(results) == 1 else tuple(results)
        return arrays

    def empty(self, name: str, device: Any) -> Any:
        """Allocates an operand, not initialised, with the Problem's strides.

        Args:
            name: of the operand.
            device: a Device, which the caller has made current.

        Returns:
            An array owned by the caller, from the device's current allocator.
        """
        xp = device.xp
        shape = self.shape_of(name)
        strides = self.strides_of(name)
        dtype = OPERAND_DTYPES[self.dtype_of(name)]
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        memory = xp.empty(extent, dtype)
        return xp.lib.stride_tricks.as_strided(memory, shape, tuple(step * dtype.itemsize for step in strides))


@dataclass(frozen=True, slots=True)
class ConvolutionProblem(Problem):
    """One convolution in one direction: everything that decides how it can be computed, and nothing else.

    The tensors are x (N, C, *spatial), w (K, C / groups, *kernel) and y (N, K, *spatial); in a backward direction the
    field of a tensor describes its gradient where the gradient is the operand (`y_strides` are those of dy).
    Correlation, as in every deep-learning library: the filter is not flipped.

    Attributes:
        direction: "forward" (y of x, w), "backward_data" (dx of dy, w) or "backward_filter" (dw of x, dy).
        x_shape: (N, C, *spatial); any number of spatial dimensions from one; no size is 0.
        w_shape: (K, C / groups, *kernel).
        x_strides: in elements, positive and without overlap.
        w_strides: in elements.
        y_strides: in elements.
        x_dtype: "float64", "float32", "float16" or "bfloat16". The two inputs agree; the output agrees with them or is
            float32 for 16-bit inputs.
        w_dtype: likewise.
        y_dtype: likewise.
        compute: dtype of the sums: float64 for float64, else float32.
        math: "fma" or "tensor_op"; with float32, tensor_op means TF32.
        padding_before: zeros in front, one number a spatial dimension.
        padding_after: zeros behind.
        stride: one number a spatial dimension.
        dilation: one number a spatial dimension.
        groups: number of groups.
        accumulate: the result is added to the output instead of replacing it.
        x_alignment: bytes that divide the address of the operand, a power of two up to 32.
        w_alignment: likewise.
        y_alignment: likewise.

    Raises:
        ValueError: a field is invalid; the message names it and its value.
        TypeError: a field has the wrong type, or dtypes are mixed.
    """

    direction: str
    x_shape: tuple[int, ...]
    w_shape: tuple[int, ...]
    x_strides: tuple[int, ...]
    w_strides: tuple[int, ...]
    y_strides: tuple[int, ...]
    x_dtype: str
    w_dtype: str
    y_dtype: str
    compute: str
    math: str
    padding_before: tuple[int, ...]
    padding_after: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    accumulate: bool = False
    x_alignment: int = DEFAULT_ALIGNMENT
    w_alignment: int = DEFAULT_ALIGNMENT
    y_alignment: int = DEFAULT_ALIGNMENT

    def __post_init__(self) -> None:
        _check_direction(self.direction)
        for name in (
            "x_shape",
            "w_shape",
            "x_strides",
            "w_strides",
            "y_strides",
            "padding_before",
            "padding_after",
            "stride",
            "dilation",
        ):
            object.__setattr__(self, name, _integers(name, getattr(self, name)))
        for name in ("groups", "x_alignment", "w_alignment", "y_alignment"):
            object.__setattr__(self, name, _integers(name, (getattr(self, name),))[0])
        y_shape = self.y_shape
        if self.x_shape[0] == 0:
            raise ValueError(
                f"x_shape {self.x_shape}: an empty batch leaves nothing to compute, so there is no Problem for it"
            )
        _check_strides("x_strides", self.x_shape, self.x_strides)
        _check_strides("w_strides", self.w_shape, self.w_strides)
        _check_strides("y_strides", y_shape, self.y_strides)
        self._check_precision()
        if not isinstance(self.accumulate, bool):
            raise TypeError(f"accumulate must be True or False, not {self.accumulate!r}")
        for name in ("x_alignment", "w_alignment", "y_alignment"):
            value = getattr(self, name)
            if not 1 <= value <= _LARGEST_ALIGNMENT or value & (value - 1):
                raise ValueError(f"{name} {value} must be a power of two from 1 to {_LARGEST_ALIGNMENT}")

    def _check_precision(self) -> None:
        for name in ("x_dtype", "w_dtype", "y_dtype"):
            word = getattr(self, name)
            if word not in DTYPES:
                raise ValueError(f"{name} {word!r} must be one of {', '.join(DTYPES)}")
        first, second, out = self.operands
        dtype = self.dtype_of(first)
        if self.dtype_of(second) != dtype:
            raise TypeError(f"dtypes are mixed: {first} is {dtype}, {second} is {self.dtype_of(second)}")
        out_dtype = self.dtype_of(out)
        if out_dtype != dtype and not (out_dtype == "float32" and dtype in ("float16", "bfloat16")):
            raise TypeError(f"dtypes are mixed: {first} and {second} are {dtype}, the output {out} is {out_dtype}")
        if self.compute != _compute(dtype):
            raise ValueError(f"compute {self.compute!r} must be {_compute(dtype)} for {dtype} operands")
        if self.math not in MATHS:
            raise ValueError(f"math {self.math!r} must be one of {', '.join(MATHS)}")
        if self.math == "tensor_op" and dtype == "float64":
            raise ValueError("math 'tensor_op' is not for float64, which has 'fma' only")

    @classmethod
    def create(
        cls,
        direction: str,
        x_shape: Sequence[int],
        w_shape: Sequence[int],
        *,
        dtype: npt.DTypeLike = "float32",
        layout: str = "nchw",
        padding: int | Sequence[int] | Sequence[tuple[int, int]] = 0,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        accumulate: bool = False,
        math: str | None = None,
    ) -> Self:
        """Makes the Problem of contiguous operands of one dtype and layout.

        Args:
            direction: "forward", "backward_data" or "backward_filter".
            x_shape: (N, C, *spatial).
            w_shape: (K, C / groups, *kernel).
            dtype: of all operands; "tf32" is float32 with math "tensor_op".
            layout: "nchw" or "nhwc", of all operands.
            padding: one number, one a spatial dimension, or one (before, after) pair a spatial dimension.
            stride: one number, or one a spatial dimension.
            dilation: one number, or one a spatial dimension.
            groups: number of groups.
            accumulate: add to the output.
            math: "fma" or "tensor_op"; by default tensor_op for 16-bit dtypes and "tf32", else fma.

        Raises:
            ValueError: an argument is invalid; the message names it and its value.
            TypeError: an argument has the wrong type.
        """
        _check_direction(direction)
        x_shape = _integers("x_shape", x_shape)
        w_shape = _integers("w_shape", w_shape)
        rank = max(len(x_shape) - 2, 0)
        before, after = padding_pair(padding, rank)
        stride = _per_dimension("stride", stride, rank)
        dilation = _per_dimension("dilation", dilation, rank)
        word, math = _precision(dtype, math)
        y_shape = output_shape(x_shape, w_shape, before, after, stride, dilation, groups)
        return cls(
            direction=direction,
            x_shape=x_shape,
            w_shape=w_shape,
            x_strides=contiguous_strides(x_shape, layout),
            w_strides=contiguous_strides(w_shape, layout),
            y_strides=contiguous_strides(y_shape, layout),
            x_dtype=word,
            w_dtype=word,
            y_dtype=word,
            compute=_compute(word),
            math=math,
            padding_before=before,
            padding_after=after,
            stride=stride,
            dilation=dilation,
            groups=groups,
            accumulate=accumulate,
        )

    @classmethod
    def from_arrays(
        cls,
        direction: str,
        *,
        x: Any,
        w: Any,
        y: Any = None,
        padding: int | Sequence[int] | Sequence[tuple[int, int]] = 0,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        accumulate: bool = False,
        math: str | None = None,
        layout: str | None = None,
    ) -> Self:
        """Makes the Problem of given arrays: shapes, strides, dtypes and alignments are read off them.

        Alignments are read off up to 16 bytes, the most that an engine asks for, so that this Problem equals that of
        `create`.

        Args:
            direction: "forward", "backward_data" or "backward_filter".
            x: array (N, C, *spatial) of x or dx; or only its shape, when it is the output and not there yet.
            w: array (K, C / groups, *kernel) of w or dw; or only its shape, likewise.
            y: array of y or dy; or its shape, or None, when it is the output and not there yet.
            padding: as in `create`.
            stride: as in `create`.
            dilation: as in `create`.
            groups: number of groups.
            accumulate: add to the output.
            math: "fma" or "tensor_op"; by default tensor_op for 16-bit dtypes, else fma.
            layout: of an output that is not there yet; by default that of the inputs.

        Raises:
            ValueError: as for the class; an array that `is_broadcast` must be copied first.
            TypeError: likewise.
        """
        _check_direction(direction)
        first, second, out = _OPERANDS[direction]
        given = {"x": x, "w": w, "y": y}
        for operand in (first, second):
            if not _is_array(given[_TENSOR[operand]]):
                raise TypeError(f"{operand} must be an array, not {given[_TENSOR[operand]]!r}")
        shapes: dict[str, tuple[int, ...] | None] = {
            tensor: None if value is None else _integers(tensor, getattr(value, "shape", value))
            for tensor, value in given.items()
        }
        x_shape = shapes["x"]
        w_shape = shapes["w"]
        if x_shape is None or w_shape is None:
            raise TypeError(f"{'x' if x_shape is None else 'w'} must be an array or a shape, not None")
        rank = max(len(x_shape) - 2, 0)
        before, after = padding_pair(padding, rank)
        stride = _per_dimension("stride", stride, rank)
        dilation = _per_dimension("dilation", dilation, rank)
        y_shape = output_shape(x_shape, w_shape, before, after, stride, dilation, groups)
        if shapes["y"] is not None and shapes["y"] != y_shape:
            name = "y" if direction == "forward" else "dy"
            raise ValueError(f"{name} has shape {shapes['y']}; x {x_shape} and w {w_shape} make it {y_shape}")
        dtype = dtype_word(given[_TENSOR[first]].dtype, first)
        logical = {"x": x_shape, "w": w_shape, "y": y_shape}
        strides: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, str] = {}
        alignments: dict[str, int] = {}
        arrays = {tensor: value for tensor, value in given.items() if _is_array(value)}
        names = {_TENSOR[operand]: operand for operand in (first, second, out)}
        preferred = _common_layout(arrays, (_TENSOR[first], _TENSOR[second], _TENSOR[out]))
        for tensor, shape in logical.items():
            if tensor in arrays:
                strides[tensor] = _array_strides(names[tensor], arrays[tensor], preferred)
                dtypes[tensor] = dtype_word(arrays[tensor].dtype, names[tensor])
                alignments[tensor] = alignment_of(arrays[tensor])
            else:
                strides[tensor] = contiguous_strides(shape, layout or preferred)
                dtypes[tensor] = dtype
                alignments[tensor] = DEFAULT_ALIGNMENT
        return cls(
            direction=direction,
            x_shape=x_shape,
            w_shape=w_shape,
            x_strides=strides["x"],
            w_strides=strides["w"],
            y_strides=strides["y"],
            x_dtype=dtypes["x"],
            w_dtype=dtypes["w"],
            y_dtype=dtypes["y"],
            compute=_compute(dtype),
            math=default_math(dtype) if math is None else math,
            padding_before=before,
            padding_after=after,
            stride=stride,
            dilation=dilation,
            groups=groups,
            accumulate=accumulate,
            x_alignment=alignments["x"],
            w_alignment=alignments["w"],
            y_alignment=alignments["y"],
        )

    @classmethod
    def parse(cls, line: str) -> Self:
        """Reads a Problem from a line such as `forward n128 c64 56x56 k64 3x3 p1 s1 float16 nhwc`.

        Words may stand in any order, but the input's spatial size comes before the kernel's. `str` prints a line that
        reads back as the same Problem.

        Args:
            line: the words, separated by blanks:

                - `forward`, `backward_data` or `backward_filter`;
                - `n128 c64 k64`: batch, input channels, filters;
                - `56x56`, then `3x3`: spatial sizes, kernel; one number for one dimension, three for three;
                - `p1`, `p1x0`, `p0:1` (before:after), `p0:1x2`: padding, 0 when not said;
                - `s1`, `s2x1`: stride, 1 when not said; `d2`: dilation, 1; `g4`: groups, 1;
                - `float64`, `float32` (when not said), `tf32`, `float16`, `bfloat16`; `out:float32` when the output
                  differs;
                - `fma` or `tensor_op`, when it is not the precision's default;
                - `nchw` (when not said) or `nhwc`; `xs:`, `ws:`, `ys:` and strides in elements, `ws:576x1x192x64`,
                  where an operand is laid out otherwise;
                - `acc`: the result is added to the output; `align:16` or `align:16x16x8`: bytes, of x, w and y.

        Raises:
            ValueError: a word is not understood, doubled or missing (the message names it), or the Problem is invalid.
        """
        return cls(**_parse(line))

    def __str__(self) -> str:
        n, c, *sizes = self.x_shape
        k, _, *kernel = self.w_shape
        layout = self.layout_of("x")
        layout = "nchw" if layout == "strided" else layout
        words = [self.direction, f"n{n}", f"c{c}", _join(sizes), f"k{k}", _join(kernel)]
        paddings = [
            str(before) if before == after else f"{before}:{after}"
            for before, after in zip(self.padding_before, self.padding_after, strict=True)
        ]
        words.append("p" + _join(paddings[:1] if len(set(paddings)) == 1 else paddings))
        words.append("s" + _collapse(self.stride))
        if set(self.dilation) != {1}:
            words.append("d" + _collapse(self.dilation))
        if self.groups != 1:
            words.append(f"g{self.groups}")
        dtype = self.dtype_of(self.operands[0])
        words.append(self.precision)
        if self.dtype_of(self.operands[2]) != dtype:
            words.append("out:" + self.dtype_of(self.operands[2]))
        if self.precision != "tf32" and self.math != default_math(dtype):
            words.append(self.math)
        words.append(layout)
        for letter, shape, strides in (
            ("x", self.x_shape, self.x_strides),
            ("w", self.w_shape, self.w_strides),
            ("y", self.y_shape, self.y_strides),
        ):
            if strides != contiguous_strides(shape, layout):
                words.append(f"{letter}s:{_join(strides)}")
        if self.accumulate:
            words.append("acc")
        alignments = (self.x_alignment, self.w_alignment, self.y_alignment)
        if set(alignments) != {DEFAULT_ALIGNMENT}:
            words.append("align:" + _collapse(alignments))
        return " ".join(words)

    @property
    def y_shape(self) -> tuple[int, ...]:
        """The shape (N, K, *spatial) of y and dy, by `output_shape`."""
        return output_shape(
            self.x_shape, self.w_shape, self.padding_before, self.padding_after, self.stride, self.dilation, self.groups
        )

    @property
    def kind(self) -> str:
        """The direction."""
        return self.direction

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the two inputs: x w, dy w or x dy."""
        return _OPERANDS[self.direction][:2]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The name of the output: y, dx or dw."""
        return _OPERANDS[self.direction][2:]

    @property
    def contracts(self) -> bool:
        """True."""
        return True

    @property
    def convolutions(self) -> tuple["ConvolutionProblem", ...]:
        """Itself."""
        return (self,)

    @property
    def operands(self) -> tuple[str, str, str]:
        """The names of the two inputs and the output, as in a call of a Plan: x w y, dy w dx or x dy dw."""
        return _OPERANDS[self.direction]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Returns the shape of an operand named x, w, y, dx, dw or dy."""
        shape: tuple[int, ...] = getattr(self, _TENSOR[name] + "_shape")
        return shape

    def strides_of(self, name: str) -> tuple[int, ...]:
        """Returns the strides, in elements, of an operand named x, w, y, dx, dw or dy."""
        strides: tuple[int, ...] = getattr(self, _TENSOR[name] + "_strides")
        return strides

    def dtype_of(self, name: str) -> str:
        """Returns the dtype word of an operand named x, w, y, dx, dw or dy."""
        dtype: str = getattr(self, _TENSOR[name] + "_dtype")
        return dtype

    def alignment_of(self, name: str) -> int:
        """Returns the alignment, in bytes, of an operand named x, w, y, dx, dw or dy."""
        alignment: int = getattr(self, _TENSOR[name] + "_alignment")
        return alignment

    @property
    def flops(self) -> int:
        """Floating-point operations of the direct method, two a multiply-add, padding counted; for any direction."""
        return 2 * math.prod(self.y_shape) * math.prod(self.w_shape[1:])

    def with_direction(self, direction: str) -> Self:
        """Returns the Problem of the same tensors in another direction.

        Raises:
            TypeError: the output's dtype differs from the inputs', so that the other direction would have mixed inputs.
        """
        return replace(self, direction=direction)


def _bits(array: Any) -> np.dtype[Any]:
    """Returns the unsigned dtype of an array's element size: moved as bits, a dtype need not be known to the device."""
    return np.dtype(f"u{array.itemsize}")


@functools.lru_cache(maxsize=3)
def _normal(seed: int, offset: int, count: int) -> Any:
    """Gives `rng.normal`, read-only; it takes some 50 ms, and a search of many Problems asks for the same each time."""
    numbers = rng.normal(seed, offset, count)
    numbers.flags.writeable = False
    return numbers


def fill_normal(array: Any, seed: int, offset: int, device: Device) -> None:
    """Writes a seed's standard normal numbers into an array; they repeat after 1,048,573.

    Args:
        array: of any shape and strides, of a floating-point dtype.
        seed: of the numbers.
        offset: position of the first one.
        device: where the array is.
    """
    count = min(array.size, _RANDOM_PERIOD)
    if device.kind == "cuda":
        numbers = device.xp.empty(count, array.dtype)
        kernel_loader.launch(
            "random",
            f"normal_fill_{kernel_loader.SUFFIXES[array.dtype]}",
            -(-count // 4) + 1,
            numbers,
            np.uint64(seed),
            np.uint64(offset),
            np.uint32(rng.VALUES_STREAM),
            np.int64(count),
        )
    else:
        numbers = _normal(seed, offset, count).astype(array.dtype)
    bits = _bits(array)
    array.view(bits)[...] = device.xp.resize(numbers.view(bits), array.size).reshape(array.shape)


def _check_direction(direction: str) -> None:
    if direction not in DIRECTIONS:
        raise ValueError(f"direction {direction!r} must be one of {', '.join(DIRECTIONS)}")


def _precision(dtype: npt.DTypeLike, math: str | None) -> tuple[str, str]:
    """Returns dtype word and math of a dtype that may be "tf32"."""
    if isinstance(dtype, str) and dtype == "tf32":
        if math not in (None, "tensor_op"):
            raise ValueError(f"math {math!r} contradicts dtype 'tf32', which is float32 with math 'tensor_op'")
        return "float32", "tensor_op"
    word = dtype_word(dtype)
    return word, default_math(word) if math is None else math


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "strides") and hasattr(value, "dtype")


def address_of(array: Any) -> int:
    """Returns the address of an array's first element."""
    return int(array.data.ptr if devices.is_cuda(array) else array.__array_interface__["data"][0])


def alignment_of(array: Any) -> int:
    """Returns the largest power of two, up to 16, that divides the address of an array's first element."""
    address = address_of(array)
    return min(DEFAULT_ALIGNMENT, address & -address) if address else DEFAULT_ALIGNMENT


def element_strides(name: str, array: Any) -> tuple[int, ...]:
    """Returns an array's strides in elements, by `flcuda.device.element_strides`.

    Raises:
        ValueError: a stride is no multiple of the element size; the message names the argument.
    """
    try:
        return devices.element_strides(array)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; copy the array first") from None


def _matching_layouts(name: str, array: Any) -> list[str]:
    strides = element_strides(name, array)
    return [layout for layout in LAYOUTS if same_strides(array.shape, strides, contiguous_strides(array.shape, layout))]


def _common_layout(arrays: Mapping[str, Any], order: Iterable[str]) -> str:
    """Returns the layout of the first array that has exactly one, else nchw. See Note [size-1 dimensions]."""
    for tensor in order:
        if tensor in arrays:
            layouts = _matching_layouts(tensor, arrays[tensor])
            if len(layouts) == 1:
                return layouts[0]
    return "nchw"


def _array_strides(name: str, array: Any, preferred: str) -> tuple[int, ...]:
    """Returns an array's strides in elements, those of size-1 dimensions made regular."""
    if is_broadcast(array):
        raise ValueError(
            f"{name} of shape {array.shape} is a broadcast array (strides {array.strides} bytes); copy it first"
        )
    strides = element_strides(name, array)
    regular = contiguous_strides(array.shape, preferred)
    return regular if same_strides(array.shape, strides, regular) else strides


def _join(entries: Iterable[Any]) -> str:
    return "x".join(str(entry) for entry in entries)


def _collapse(entries: tuple[int, ...]) -> str:
    return str(entries[0]) if len(set(entries)) == 1 else _join(entries)


_SIZES = r"[0-9]+(?:x[0-9]+)*"
_WORDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("direction", re.compile("|".join(DIRECTIONS))),
    ("n", re.compile(r"n([0-9]+)")),
    ("c", re.compile(r"c([0-9]+)")),
    ("k", re.compile(r"k([0-9]+)")),
    ("g", re.compile(r"g([0-9]+)")),
    ("p", re.compile(r"p([0-9]+(?::[0-9]+)?(?:x[0-9]+(?::[0-9]+)?)*)")),
    ("s", re.compile(f"s({_SIZES})")),
    ("d", re.compile(f"d({_SIZES})")),
    ("precision", re.compile("|".join((*DTYPES, "tf32")))),
    ("out", re.compile("out:(" + "|".join(DTYPES) + ")")),
    ("math", re.compile("|".join(MATHS))),
    ("layout", re.compile("|".join(LAYOUTS))),
    ("xs", re.compile(f"xs:({_SIZES})")),
    ("ws", re.compile(f"ws:({_SIZES})")),
    ("ys", re.compile(f"ys:({_SIZES})")),
    ("acc", re.compile("acc")),
    ("align", re.compile(f"align:({_SIZES})")),
)
_SPATIAL = re.compile(_SIZES)


def _words(line: str) -> dict[str, str]:
    """Splits a line into named words."""
    words: dict[str, str] = {}
    for token in line.split():
        if _SPATIAL.fullmatch(token):
            name = "size" if "size" not in words else "kernel"
            value = token
        else:
            for candidate, pattern in _WORDS:
                match = pattern.fullmatch(token)
                if match:
                    name = candidate
                    value = match.group(match.lastindex or 0)
                    break
            else:
                raise ValueError(f"{token!r} is not understood in the problem {line!r}")
        if name in words:
            raise ValueError(f"{token!r} comes after another {name} in the problem {line!r}")
        words[name] = value
    for name, example in (
        ("direction", "one of " + ", ".join(DIRECTIONS)),
        ("n", "a batch size such as n128"),
        ("c", "input channels such as c64"),
        ("size", "a spatial size such as 56x56"),
        ("k", "filters such as k64"),
        ("kernel", "a kernel such as 3x3 after the spatial size"),
    ):
        if name not in words:
            raise ValueError(f"{example} is missing in the problem {line!r}")
    return words


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(entry) for entry in text.split("x"))


def _expanded(letter: str, entries: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    if len(entries) == 1:
        return entries * rank
    if len(entries) != rank:
        raise ValueError(f"'{letter}{_join(entries)}' has {len(entries)} entries for {rank} spatial dimensions")
    return entries


def _parse(line: str) -> dict[str, Any]:
    """Reads a line into the fields of a Problem."""
    if not isinstance(line, str):
        raise TypeError(f"line must be a string, not {line!r}")
    words = _words(line)
    sizes = _numbers(words["size"])
    kernel = _numbers(words["kernel"])
    rank = len(sizes)
    if len(kernel) != rank:
        raise ValueError(f"kernel {words['kernel']!r} must have as many dimensions as the size {words['size']!r}")
    channels = int(words["c"])
    groups = int(words.get("g", "1"))
    if groups < 1 or channels % groups:
        raise ValueError(f"'g{groups}': groups {groups} does not divide the {channels} channels 'c{channels}'")
    x_shape = (int(words["n"]), channels, *sizes)
    w_shape = (int(words["k"]), channels // groups, *kernel)
    pairs = _expanded("p", tuple(words.get("p", "0").split("x")), rank)
    before = tuple(int(pair.split(":")[0]) for pair in pairs)
    after = tuple(int(pair.split(":")[-1]) for pair in pairs)
    stride = _expanded("s", _numbers(words.get("s", "1")), rank)
    dilation = _expanded("d", _numbers(words.get("d", "1")), rank)
    y_shape = output_shape(x_shape, w_shape, before, after, stride, dilation, groups)
    dtype, math = _precision(words.get("precision", "float32"), words.get("math"))
    dtypes = {"x": dtype, "w": dtype, "y": dtype}
    if "out" in words:
        dtypes[_TENSOR[_OPERANDS[words["direction"]][2]]] = words["out"]
    layout = words.get("layout", "nchw")
    alignments = _numbers(words.get("align", str(DEFAULT_ALIGNMENT)))
    if len(alignments) not in (1, 3):
        raise ValueError(f"'align:{words['align']}' must have one entry, or three for x, w and y")
    alignments = alignments * 3 if len(alignments) == 1 else alignments
    shapes = {"x": x_shape, "w": w_shape, "y": y_shape}
    fields: dict[str, Any] = {}
    for tensor, alignment in zip("xwy", alignments, strict=True):
        strides = words.get(tensor + "s")
        fields[tensor + "_strides"] = (
            contiguous_strides(shapes[tensor], layout) if strides is None else _numbers(strides)
        )
        fields[tensor + "_dtype"] = dtypes[tensor]
        fields[tensor + "_alignment"] = alignment
    return {
        **fields,
        "direction": words["direction"],
        "x_shape": x_shape,
        "w_shape": w_shape,
        "compute": _compute(dtype),
        "math": math,
        "padding_before": before,
        "padding_after": after,
        "stride": stride,
        "dilation": dilation,
        "groups": groups,
        "accumulate": "acc" in words,
    }
