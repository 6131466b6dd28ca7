"""A fused graph of operations as a Problem: `GraphProblem`.

A GraphProblem says what `flcuda.cudnn.graph.Graph` is told: its inputs, its operations in their order, and which
results are outputs. It is checked by telling a Graph, which needs no cuDNN, and it prints as one line that reads back::

    graph float32 tensor_op; x float16 128x64x56x56 nhwc; w float16 64x64x3x3 nhwc; b float16 1x64x1x1 nhwc;
    t1 = convolution_forward(%x, %w, padding=1); t2 = pointwise(add, %t1, %b); y = pointwise(swish_fwd, %t2);
    out y float16 nhwc

Note [canonical]: equal graphs have to be equal Problems, since choices are stored by the line. So arguments stand in
the order of the method's parameters, those that have their default are left out, numbers have the parameter's type, one
number stands for as many equal ones (`stride=2`), and a short form (`silu`) is the `pointwise` that it stands for.
"""

import functools
import inspect
import math as mathematics
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import NoneType, UnionType
from typing import Any, Self, get_args

import numpy as np

from flcuda.cudnn.graph import COMPUTE_DTYPES, Graph, Tensor
from flcuda.device import contiguous_strides
from flcuda.finder.problem import (
    DEFAULT_ALIGNMENT,
    DTYPES,
    LAYOUTS,
    MATHS,
    OPERAND_DTYPES,
    ConvolutionProblem,
    Problem,
    default_math,
    padding_pair,
)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# "_" stands for a result that nobody uses; `out` is an argument of a Plan, and the word for an output
_TAKEN = ("_", "out")
_NO_OPERATIONS = ("tensor", "scalar", "output")
_SHORT_FORMS = (
    "identity",
    "add",
    "sub",
    "mul",
    "div",
    "relu",
    "relu_backward",
    "sigmoid",
    "tanh",
    "elu",
    "gelu",
    "softplus",
    "silu",
)
_GEOMETRY = ("padding", "stride", "dilation", "window")
_NOTHING = inspect.Parameter.empty
# no argument has more: padding is a tuple of pairs
_DEEPEST = 8
_LITERALS: dict[str, Any] = {"None": None, "True": True, "False": False, "inf": mathematics.inf}
# of `pointwise`, which passes these on to cuDNN when they are given; else cuDNN has these
_POINTWISE_DEFAULTS = {
    "lower_clip": 0.0,
    "lower_slope": 0.0,
    "elu_alpha": 1.0,
    "softplus_beta": 1.0,
    "swish_beta": 1.0,
}
# method: its direction, and which tensor of a convolution its two operands and its result are, or are the gradient of
_CONVOLUTIONS = {
    "convolution_forward": ("forward", "xwy"),
    "convolution_backward_data": ("backward_data", "ywx"),
    "convolution_backward_filter": ("backward_filter", "xyw"),
}


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """An input or output of a graph.

    Attributes:
        name: a word of letters, digits and _.
        shape: (N, C, *spatial), or any other 1 to 8 dimensions.
        strides: in elements, positive and without overlap.
        dtype: a word of `flcuda.finder.problem.OPERAND_DTYPES`.
        alignment: bytes that divide its address, a power of two.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    alignment: int = DEFAULT_ALIGNMENT

    def __post_init__(self) -> None:
        _check_name(self.name)
        for field in ("shape", "strides"):
            object.__setattr__(self, field, _whole_numbers(f"{self.name}: {field}", getattr(self, field)))
        (alignment,) = _whole_numbers(f"{self.name}: alignment", (self.alignment,))
        object.__setattr__(self, "alignment", alignment)
        if self.dtype not in OPERAND_DTYPES:
            raise ValueError(f"{self.name}: dtype {self.dtype!r} must be one of {', '.join(OPERAND_DTYPES)}")


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor as an argument of an operation, by its name."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a graph.

    Attributes:
        method: an operation of `flcuda.cudnn.graph.Graph`, such as "convolution_forward", "pointwise" or "matmul".
        arguments: by the names of that method's parameters: a Ref, int, float, Fraction, str, None, bool, or a tuple of
            these. A plain number where a tensor may be given is a scalar by value.
        results: names for what it returns, in its order; None where there is nothing, or nobody uses it.
    """

    method: str
    arguments: tuple[tuple[str, Any], ...]
    results: tuple[str | None, ...]

    def get(self, parameter: str) -> Any:
        """Returns the argument of a parameter: the one given, else the method's default.

        Raises:
            ValueError: the method has no such parameter, or it has no default and was not given.
        """
        for name, value in self.arguments:
            if name == parameter:
                return value
        known = _parameters(self.method).get(parameter)
        if known is None and self.method == "pointwise" and parameter in _POINTWISE_DEFAULTS:
            return _POINTWISE_DEFAULTS[parameter]
        if known is None or known.default is _NOTHING:
            raise ValueError(f"operation {self.method}: argument {parameter!r} was not given")
        return known.default

    @property
    def refs(self) -> tuple[str, ...]:
        """The names of the tensors that it takes, in the order of its arguments."""
        return tuple(_refs(value for _, value in self.arguments))

    def __str__(self) -> str:
        known = _parameters(self.method)
        given = dict(self.arguments)
        words = []
        for position, name in enumerate(given):
            entry = known.get(name)
            by_place = entry is not None and entry.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            by_place = by_place and list(known)[position] == name
            words.append(_printed(given[name]) if by_place else f"{name}={_printed(given[name])}")
        results = ", ".join("_" if name is None else name for name in self.results)
        return f"{results} = {self.method}({', '.join(words)})"


@dataclass(frozen=True, slots=True)
class GraphProblem(Problem):
    """A fused graph of operations: everything that decides how it can be computed, and nothing else.

    Attributes:
        tensors: the inputs, in the order of a call.
        operations: in an order in which each finds its operands; see Note [canonical].
        results: the outputs, in the order of a call: what operations give, with dtype, strides and alignment as they
            are written.
        compute: the dtype in which operations compute.
        intermediate: the dtype of what stays inside the graph; "" is that of `compute`.
        math: "fma" or "tensor_op"; "" is the default of the first input's dtype. With float32, tensor_op means TF32.

    Raises:
        ValueError, TypeError: an operation or a tensor does not fit; the message names it and what would be right.
    """

    tensors: tuple[GraphTensor, ...]
    operations: tuple[Operation, ...]
    results: tuple[GraphTensor, ...]
    compute: str = "float32"
    intermediate: str = ""
    math: str = ""

    def __post_init__(self) -> None:
        for field, kind in (("tensors", GraphTensor), ("operations", Operation), ("results", GraphTensor)):
            values = tuple(getattr(self, field))
            for value in values:
                if not isinstance(value, kind):
                    raise TypeError(f"{field}: {value!r} is no {kind.__name__}")
            if not values:
                raise ValueError(f"{field}: there is none")
            object.__setattr__(self, field, values)
        object.__setattr__(self, "operations", tuple(_canonical(operation) for operation in self.operations))
        if self.intermediate == self.compute:
            object.__setattr__(self, "intermediate", "")
        if not self.math:
            object.__setattr__(self, "math", default_math(self.tensors[0].dtype))
        if self.math not in MATHS:
            raise ValueError(f"math {self.math!r} must be one of {', '.join(MATHS)}")
        if self.math == "tensor_op" and self.compute == "float64":
            raise ValueError("math 'tensor_op' is not for graphs that compute in float64, which have 'fma' only")
        if len(set(self.outputs)) < len(self.results):
            raise ValueError(f"results: {', '.join(self.outputs)} has a name twice")
        self.graph()
        # only now: a list of the wrong length has been refused
        object.__setattr__(self, "operations", tuple(_collapsed(operation) for operation in self.operations))

    @classmethod
    def parse(cls, line: str) -> Self:
        """Reads a GraphProblem from a line of statements, such as `str` prints.

        Args:
            line: statements that are separated by semicolons:

                - `graph float32 tensor_op`, the first: the compute dtype (float32 when not said) and the math (by the
                  first input's dtype when not said); `intermediate:float16` where that differs from compute;
                - `x float16 128x64x56x56 nhwc`: an input; `nchw` when not said, `s:1x2x3` for strides in elements,
                  `align:8` for an alignment in bytes other than 16;
                - `y = pointwise(add, %t, %b, dtype=float32)`: an operation of `flcuda.cudnn.graph.Graph` with its
                  arguments, tensors with a %; `a, b = ...` for several results, `_` for one that nobody uses;
                - `out y float16 nhwc`: an output; without these words it is as its operation gives it.

        Returns:
            The GraphProblem.

        Raises:
            ValueError, TypeError: a statement is not understood, or the graph is invalid; the message names what.
        """
        return cls(**_parse(line))

    def __str__(self) -> str:
        head = ["graph", self.compute]
        if self.intermediate:
            head.append(f"intermediate:{self.intermediate}")
        head.append(self.math)
        statements = [" ".join(head)]
        statements += [
            " ".join([tensor.name, tensor.dtype, _join(tensor.shape), *_placement(tensor)]) for tensor in self.tensors
        ]
        statements += [str(operation) for operation in self.operations]
        statements += [" ".join(["out", tensor.name, tensor.dtype, *_placement(tensor)]) for tensor in self.results]
        return "; ".join(statements)

    def graph(self) -> tuple[Graph, dict[str, Tensor]]:
        """Makes the graph anew, the inputs first: `flcuda.cudnn.graph.Graph`, not built.

        Returns:
            The Graph, and its tensors by their names here, the virtual ones too.
        """
        outputs: dict[str, dict[str, Any]] = {
            tensor.name: {
                "shape": tensor.shape,
                "dtype": tensor.dtype,
                "strides": tensor.strides,
                "alignment": tensor.alignment,
            }
            for tensor in self.results
        }
        return _replayed(self.compute, self.intermediate, self.tensors, self.operations, outputs)

    @property
    def kind(self) -> str:
        """The word "graph"."""
        return "graph"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs."""
        return tuple(tensor.name for tensor in self.tensors)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return tuple(tensor.name for tensor in self.results)

    @property
    def accumulate(self) -> bool:
        """False: a graph replaces its outputs."""
        return False

    @property
    def contracts(self) -> bool:
        """Whether it has a convolution or a matrix product, which are what tensor cores compute."""
        return any(operation.method in (*_CONVOLUTIONS, "matmul") for operation in self.operations)

    @property
    def convolutions(self) -> tuple[ConvolutionProblem, ...]:
        """The convolutions in it, in the order of its operations; those of a dtype that no convolution has left out."""
        return _convolutions(self) if any(entry.method in _CONVOLUTIONS for entry in self.operations) else ()

    def tensor(self, name: str) -> GraphTensor:
        """Returns an operand.

        Raises:
            KeyError: there is none of that name.
        """
        for tensor in (*self.tensors, *self.results):
            if tensor.name == name:
                return tensor
        raise KeyError(f"no operand {name!r}; there are {', '.join(self.operands)}")

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Returns the shape of an operand."""
        return self.tensor(name).shape

    def strides_of(self, name: str) -> tuple[int, ...]:
        """Returns the strides of an operand, in elements."""
        return self.tensor(name).strides

    def dtype_of(self, name: str) -> str:
        """Returns the dtype word of an operand."""
        return self.tensor(name).dtype

    def alignment_of(self, name: str) -> int:
        """Returns the alignment of an operand, in bytes."""
        return self.tensor(name).alignment


@functools.lru_cache(maxsize=256)
def _convolutions(problem: GraphProblem) -> tuple[ConvolutionProblem, ...]:
    _, tensors = problem.graph()
    found = []
    for operation in problem.operations:
        if operation.method not in _CONVOLUTIONS:
            continue
        direction, roles = _CONVOLUTIONS[operation.method]
        names = dict(zip(roles, (*operation.refs, operation.results[0]), strict=True))
        x, w, y = (tensors[str(names[role])] for role in "xwy")
        read = [tensors[name] for name in operation.refs]
        # a virtual tensor may have another dtype than what it is computed from
        dtype = next((tensor.dtype for tensor in read if not tensor.virtual), read[0].dtype)
        if dtype not in DTYPES:
            continue
        rank = len(x.shape) - 2
        before, after = padding_pair(operation.get("padding"), rank)
        stride, dilation = (
            (value,) * rank if isinstance(value, int) else value
            for value in (operation.get("stride"), operation.get("dilation"))
        )
        found.append(
            ConvolutionProblem(
                direction=direction,
                x_shape=x.shape,
                w_shape=w.shape,
                x_strides=x.strides,
                w_strides=w.strides,
                y_strides=y.strides,
                x_dtype=dtype,
                w_dtype=dtype,
                y_dtype=dtype,
                compute="float64" if dtype == "float64" else "float32",
                math="fma" if dtype == "float64" else problem.math,
                padding_before=before,
                padding_after=after,
                stride=stride,
                dilation=dilation,
                groups=x.shape[1] // w.shape[1],
            )
        )
    return tuple(found)


# --- replaying --------------------------------------------------------------------------------------------------------


def _replayed(
    compute: str,
    intermediate: str,
    inputs: Iterable[GraphTensor],
    operations: Iterable[Operation],
    outputs: Mapping[str, Mapping[str, Any]],
) -> tuple[Graph, dict[str, Tensor]]:
    """Tells a Graph; `outputs` has shapes and arguments of `Graph.output` by name. Raises what does not fit."""
    graph = Graph(compute, intermediate=intermediate or None)
    tensors: dict[str, Tensor] = {}
    for entry in inputs:
        if entry.name in tensors:
            raise ValueError(f"tensor {entry.name}: the name is there twice")
        tensors[entry.name] = graph.tensor(
            entry.shape, entry.dtype, strides=entry.strides, alignment=entry.alignment, name=entry.name
        )
    given = set(tensors)
    for position, operation in enumerate(operations, 1):
        where = f"operation {position}, {operation.method}"
        # an error of the Graph names the operation by its first result
        name = next((result for result in operation.results if result is not None), "")
        arguments = {parameter: _resolved(value, tensors, where, parameter) for parameter, value in operation.arguments}
        made = getattr(graph, operation.method)(**arguments, name=name)
        values = made if isinstance(made, tuple) else (made,)
        if len(values) != len(operation.results):
            raise ValueError(f"{where}: results {operation.results} must be {len(values)} names, None where unused")
        for result, value in zip(operation.results, values, strict=True):
            if result is None:
                continue
            if result in tensors:
                raise ValueError(f"{where}: result {result}: the name is there twice")
            if value is None:
                raise ValueError(f"{where}: result {result}: it gives nothing there; None would be right")
            tensors[result] = _output(graph, value, result, outputs[result]) if result in outputs else value
    for name in outputs:
        if name not in tensors or name in given:
            raise ValueError(
                f"output {name}: no operation gives it; there are {', '.join(sorted(set(tensors) - given))}"
            )
    graph.check()
    return graph, tensors


def _output(graph: Graph, tensor: Tensor, name: str, wanted: Mapping[str, Any]) -> Tensor:
    arguments = dict(wanted)
    shape = arguments.pop("shape", tensor.shape)
    if shape != tensor.shape:
        raise ValueError(f"output {name}: shape {shape} must be {tensor.shape}, which its operation gives")
    return graph.output(tensor, **arguments, name=name)


def _resolved(value: Any, tensors: Mapping[str, Tensor], where: str, parameter: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_resolved(entry, tensors, where, parameter) for entry in value)
    if not isinstance(value, Ref):
        return value
    if value.name not in tensors:
        raise ValueError(f"{where}: {parameter}: there is no tensor {value.name} yet; there are {', '.join(tensors)}")
    return tensors[value.name]


# --- operations -------------------------------------------------------------------------------------------------------


@functools.cache
def _parameters(method: str) -> dict[str, inspect.Parameter]:
    """Gives the parameters of an operation, that for its name left out."""
    function = getattr(Graph, method, None) if isinstance(method, str) and not method.startswith("_") else None
    if function is not None and method not in _NO_OPERATIONS:
        known = dict(inspect.signature(function).parameters)
        if known.pop("name", None) is not None:
            del known["self"]
            return known
    raise ValueError(f"{method!r} is no operation; there are {', '.join(_operations())}")


def _operations() -> list[str]:
    return [
        name
        for name, entry in vars(Graph).items()
        if inspect.isfunction(entry)
        and not name.startswith("_")
        and name not in _NO_OPERATIONS
        and "name" in inspect.signature(entry).parameters
    ]


class _Pointwise:
    """Stands for a Graph and keeps what a short form asks of it."""

    def pointwise(self, mode: str, *operands: Any, name: str, **arguments: Any) -> dict[str, Any]:
        """Returns the arguments by name; `name` is that of the operation, which its results name here."""
        del name
        return {"mode": mode, **dict(zip(("x", "b", "t"), operands, strict=False)), **arguments}


def _canonical(operation: Operation) -> Operation:
    """Gives an operation as Note [canonical] says."""
    method = operation.method
    arguments = _checked(method, operation.arguments)
    for name, entry in _parameters(method).items():
        needed = entry.default is _NOTHING and entry.kind is not inspect.Parameter.VAR_KEYWORD
        if needed and name not in arguments:
            raise TypeError(f"operation {method}: argument {name!r} is missing")
    if method in _SHORT_FORMS:
        form: Callable[..., dict[str, Any]] = getattr(Graph, method)
        method = "pointwise"
        arguments = _checked(method, tuple(form(_Pointwise(), **arguments).items()))
    results = tuple(operation.results)
    for result in results:
        if result is not None:
            _check_name(result)
    return Operation(method, tuple(arguments.items()), results)


def _collapsed(operation: Operation) -> Operation:
    """Writes one number for equal ones, of an operation that a Graph has taken."""
    arguments = [(name, _uniform(value) if name in _GEOMETRY else value) for name, value in operation.arguments]
    return Operation(operation.method, tuple(_checked(operation.method, arguments).items()), operation.results)


def _uniform(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    entries = tuple(_uniform(entry) for entry in value)
    if any(isinstance(entry, tuple) for entry in entries):
        return value
    return entries[0] if len(set(entries)) == 1 else entries


def _checked(method: str, arguments: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Gives arguments in the order of the parameters, without those that are the default."""
    known = dict(_parameters(method))
    where = f"operation {method}"
    more = next((entry for entry in known.values() if entry.kind is inspect.Parameter.VAR_KEYWORD), None)
    if more is not None:
        del known[more.name]
    given: dict[str, Any] = {}
    for name, value in arguments:
        entry = known.get(name, more)
        if entry is None or (more is not None and name == more.name) or not _NAME.fullmatch(name):
            raise ValueError(f"{where}: {name!r} is no argument; there are {', '.join(known)}")
        if name in given:
            raise ValueError(f"{where}: argument {name!r} is given twice")
        given[name] = _value(f"{where}: {name}", value, entry.annotation)
    if given.get("beta", 0.0) != 0.0 and method in _CONVOLUTIONS:
        raise ValueError(f"{where}: beta {given['beta']} must be 0: a graph does not add to its outputs")
    ordered = [name for name in known if name in given] + sorted(name for name in given if name not in known)
    defaults = {name: entry.default for name, entry in known.items()}
    if more is not None:
        defaults |= _POINTWISE_DEFAULTS
    return {name: given[name] for name in ordered if not _same(given[name], defaults.get(name, _NOTHING))}


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and value == default


def _value(where: str, value: Any, annotation: Any = None) -> Any:
    """Gives an argument's value in the one form that it has here."""
    # the arguments of a union, not those of Sequence[int]
    kinds = set(get_args(annotation)) if isinstance(annotation, UnionType) else {annotation}
    if kinds <= {float, int, NoneType} and isinstance(value, Ref | str | tuple | list):
        raise TypeError(f"{where}: {_printed(value)} must be a number")
    if isinstance(value, tuple | list):
        return tuple(_value(where, entry) for entry in value)
    if value is None or isinstance(value, Ref):
        return value
    if isinstance(value, str):
        if not _NAME.fullmatch(value) or value in _LITERALS:
            raise ValueError(f"{where}: {value!r} must be a word of letters, digits and _")
        return value
    if isinstance(value, bool | np.bool_):
        if bool not in kinds:
            raise TypeError(f"{where}: {value!r} is a truth value, and it takes none")
        return bool(value)
    if bool in kinds:
        raise TypeError(f"{where}: {value!r} must be True or False")
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else value
    if isinstance(value, int | np.integer):
        number = operator.index(value)
        return float(number) if float in kinds and int not in kinds else number
    if isinstance(value, float | np.floating):
        if mathematics.isnan(value):
            raise ValueError(f"{where}: it is not a number")
        # -0.0 equals 0.0 and would print otherwise
        return float(value) + 0.0
    raise TypeError(f"{where}: {value!r} is neither a number, a word, a Ref, None nor a tuple of these")


def _refs(values: Iterable[Any]) -> list[str]:
    found = []
    for value in values:
        if isinstance(value, Ref):
            found.append(value.name)
        elif isinstance(value, tuple):
            found += _refs(value)
    return found


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _TAKEN:
        raise ValueError(f"name {name!r} must be a word of letters, digits and _, and neither of {', '.join(_TAKEN)}")


def _whole_numbers(where: str, values: Any) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise TypeError(f"{where} {values!r} must be whole numbers") from None


# --- the line ---------------------------------------------------------------------------------------------------------


def _join(numbers: Sequence[int]) -> str:
    return "x".join(map(str, numbers))


def _placement(tensor: GraphTensor) -> list[str]:
    """Gives the words for strides and alignment."""
    for layout in LAYOUTS:
        if tensor.strides == contiguous_strides(tensor.shape, layout):
            words = [layout]
            break
    else:
        words = [f"s:{_join(tensor.strides)}"]
    if tensor.alignment != DEFAULT_ALIGNMENT:
        words.append(f"align:{tensor.alignment}")
    return words


def _printed(value: Any) -> str:
    if isinstance(value, tuple):
        inner = ", ".join(_printed(entry) for entry in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return str(value) if isinstance(value, Ref | str | Fraction) else repr(value)


_STATEMENT = re.compile(r"(?P<results>[\w\s,]+?)\s*=\s*(?P<method>\w+)\s*\((?P<arguments>.*)\)", re.DOTALL)
_SIZES = re.compile(r"[0-9]+(?:x[0-9]+)*")
_TOKEN = re.compile(
    r"\s*(?:(?P<ref>%[A-Za-z_]\w*)|(?P<word>-?inf\b|[A-Za-z_]\w*)|(?P<fraction>[0-9]+/[0-9]+)"
    r"|(?P<number>[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)|(?P<mark>[(),=]))"
)


def _parse(line: str) -> dict[str, Any]:
    """Reads a line into the fields of a GraphProblem."""
    if not isinstance(line, str):
        raise TypeError(f"line must be a string, not {line!r}")
    head, *statements = [statement.strip() for statement in line.strip().rstrip(";").split(";")]
    fields = _parse_head(head)
    tensors = []
    operations = []
    outputs: dict[str, dict[str, Any]] = {}
    for statement in statements:
        match = _STATEMENT.fullmatch(statement)
        words = statement.split()
        if match:
            operations.append(_parse_operation(statement, match))
        elif words[:1] == ["out"] and len(words) > 1:
            if words[1] in outputs:
                raise ValueError(f"{statement!r}: {words[1]} is an output twice")
            outputs[words[1]] = _parse_words(statement, words[2:])
        elif len(words) > 1:
            tensors.append(_parse_input(statement, words))
        else:
            raise ValueError(f"{statement!r} is neither an input, an operation nor an output, in the graph {line!r}")
    operations = [_canonical(operation) for operation in operations]
    if not outputs:
        raise ValueError(f"results: there is none; a statement such as 'out y' is missing in {line!r}")
    _, known = _replayed(fields["compute"], fields["intermediate"], tensors, operations, outputs)
    results = [
        GraphTensor(name, known[name].shape, known[name].strides, known[name].dtype, known[name].alignment)
        for name in outputs
    ]
    return {**fields, "tensors": tuple(tensors), "operations": tuple(operations), "results": tuple(results)}


def _parse_head(head: str) -> dict[str, str]:
    first, *words = head.split() or [""]
    if first != "graph":
        raise ValueError(f"{head!r}: a graph begins with the word graph")
    fields: dict[str, str] = {}
    for word in words:
        if word in COMPUTE_DTYPES:
            field, value = "compute", word
        elif word in MATHS:
            field, value = "math", word
        elif word.startswith("intermediate:"):
            field, value = "intermediate", word.removeprefix("intermediate:")
        else:
            raise ValueError(f"{word!r} is not understood in {head!r}")
        if field in fields:
            raise ValueError(f"{word!r} comes after another {field} in {head!r}")
        fields[field] = value
    return {"compute": "float32", "intermediate": "", "math": "", **fields}


def _parse_words(statement: str, words: Sequence[str]) -> dict[str, Any]:
    """Reads what is said of an operand into arguments of `Graph.output`, and its shape."""
    found: dict[str, Any] = {}
    value: Any
    for word in words:
        if word in OPERAND_DTYPES:
            field, value = "dtype", word
        elif word in LAYOUTS:
            field, value = "layout", word
        elif _SIZES.fullmatch(word):
            field, value = "shape", _sizes(word)
        elif word.startswith("s:") and _SIZES.fullmatch(word[2:]):
            field, value = "strides", _sizes(word[2:])
        elif word.startswith("align:") and word[6:].isdecimal():
            field, value = "alignment", int(word[6:])
        else:
            raise ValueError(f"{word!r} is not understood in {statement!r}")
        if field in found:
            raise ValueError(f"{word!r} comes after another {field} in {statement!r}")
        found[field] = value
    return found


def _parse_input(statement: str, words: Sequence[str]) -> GraphTensor:
    found = _parse_words(statement, words[1:])
    for field, example in (("dtype", "a dtype such as float16"), ("shape", "a shape such as 128x64x56x56")):
        if field not in found:
            raise ValueError(f"{example} is missing in {statement!r}")
    shape = found["shape"]
    if "strides" in found and "layout" in found:
        raise ValueError(f"{statement!r}: give a layout or strides, not both")
    strides = found.get("strides", contiguous_strides(shape, found.get("layout", "nchw")))
    return GraphTensor(words[0], shape, strides, found["dtype"], found.get("alignment", DEFAULT_ALIGNMENT))


def _parse_operation(statement: str, match: re.Match[str]) -> Operation:
    """Reads `a, _ = method(argument, name=argument)`."""
    method = match["method"]
    known = _parameters(method)
    places = [name for name, entry in known.items() if entry.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    reader = _Reader(statement, match["arguments"])
    arguments: list[tuple[str, Any]] = []
    while not reader.done:
        name = reader.keyword()
        if name is None:
            if len(arguments) >= len(places):
                raise ValueError(f"{statement!r}: {method} takes {len(places)} arguments without a name")
            name = places[len(arguments)]
        arguments.append((name, reader.value()))
        reader.comma()
    results = tuple(None if name == "_" else name for name in re.split(r"\s*,\s*", match["results"].strip()))
    return Operation(method, tuple(arguments), results)


class _Reader:
    """Reads arguments from a text."""

    def __init__(self, statement: str, text: str) -> None:
        self._statement = statement
        self._tokens: list[tuple[str, str]] = []
        place = 0
        while text[place:].strip():
            match = _TOKEN.match(text, place)
            if match is None:
                raise ValueError(f"{text[place:].strip()!r} is not understood in {statement!r}")
            self._tokens.append((str(match.lastgroup), match[str(match.lastgroup)]))
            place = match.end()
        self._next = 0
        self._depth = 0

    @property
    def done(self) -> bool:
        return self._next == len(self._tokens)

    def _take(self) -> tuple[str, str]:
        if self.done:
            raise ValueError(f"an argument is cut short in {self._statement!r}")
        self._next += 1
        return self._tokens[self._next - 1]

    def _is_mark(self, mark: str, ahead: int = 0) -> bool:
        place = self._next + ahead
        return place < len(self._tokens) and self._tokens[place] == ("mark", mark)

    def keyword(self) -> str | None:
        """Takes `name =`, if that is what comes."""
        if not self._is_mark("=", 1):
            return None
        kind, name = self._take()
        self._take()
        if kind != "word":
            raise ValueError(f"{name!r} is no name of an argument in {self._statement!r}")
        return name

    def comma(self) -> None:
        """Takes the comma after an argument, unless it was the last."""
        if not self.done and self._take() != ("mark", ","):
            raise ValueError(f"a comma is missing in {self._statement!r}")

    def value(self) -> Any:
        """Takes a value."""
        kind, text = self._take()
        if kind == "ref":
            return Ref(text[1:])
        if kind == "word":
            return -mathematics.inf if text == "-inf" else _LITERALS.get(text, text)
        if kind == "fraction":
            try:
                return Fraction(text)
            except ZeroDivisionError:
                raise ValueError(f"{text!r} is no fraction in {self._statement!r}") from None
        if kind == "number":
            return self._number(text)
        if text == "(":
            return self._tuple()
        raise ValueError(f"{text!r} stands where an argument should be in {self._statement!r}")

    def _number(self, text: str) -> int | float:
        try:
            return int(text)
        except ValueError:
            pass
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{text!r} is no number in {self._statement!r}") from None

    def _tuple(self) -> tuple[Any, ...]:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError(f"tuples are nested too deeply in {self._statement!r}")
        entries = []
        while not self._is_mark(")"):
            entries.append(self.value())
            if not self._is_mark(")") and self._take() != ("mark", ","):
                raise ValueError(f"a comma is missing in {self._statement!r}")
        self._take()
        self._depth -= 1
        return tuple(entries)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(entry) for entry in text.split("x"))
