"""Operations recorded one by one on named tensors, checked by a `flcuda.cudnn.graph.Graph` alongside."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from flcuda import device as devices
from flcuda.cudnn import graph as graphs
from flcuda.finder.graph_problem import GraphTensor, Operation, Ref
from flcuda.finder.problem import same_strides

# Results in the compute dtype, whatever the operands are: cuDNN takes no 16-bit statistics or reductions.
_WIDE = ("reduction", "generate_statistics", "batch_norm_finalize", "batch_norm_backward_weights")
_TRUTH = ("cmp_", "logical_")


def references(operation: Operation) -> list[str]:
    """Lists the names of the tensors that an operation reads, in order, each once."""
    return list(dict.fromkeys(operation.refs))


def is_truth(operation: Operation) -> bool:
    """Says whether an operation gives truth values, which have no derivative."""
    return operation.method == "pointwise" and str(dict(operation.arguments)["mode"]).startswith(_TRUTH)


class Recorder:
    """Operations in the order in which they run, checked one by one.

    Args:
        compute: the dtype in which operations compute.
        intermediate: the dtype of tensors inside the graph; "" is compute.
        taken: names that are not given to results.

    Attributes:
        operations: what was recorded.
        shapes: by name, of inputs and results.
        dtypes: by name: the dtype that a tensor has when it is written to memory.
    """

    def __init__(self, compute: str, intermediate: str = "", taken: Iterable[str] = ()) -> None:
        self.compute = compute
        self.intermediate = intermediate
        self.operations: list[Operation] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._graph = graphs.Graph(compute, intermediate=intermediate or None)
        self._tensors: dict[str, graphs.Tensor] = {}
        self._taken = {*taken, "out", "_"}

    def input(self, name: str, shape: Sequence[int], dtype: str) -> Ref:
        """Adds a tensor from outside."""
        self._tensors[name] = self._graph.tensor(shape, dtype, name=name)
        self._taken.add(name)
        self.shapes[name] = tuple(shape)
        self.dtypes[name] = dtype
        return Ref(name)

    def add(self, word: str, method: str, **arguments: Any) -> tuple[Ref | None, ...]:
        """Records an operation.

        Args:
            word: what its first result is called, with a number.
            method: of `flcuda.cudnn.graph.Graph`.
            **arguments: by that method's names and in their order; tensors as Ref.

        Returns:
            Its results, None where there is none.

        Raises:
            TypeError, ValueError: what the graph finds wrong; names operation, tensor and remedy.
        """
        name = self._name(word)
        made = getattr(self._graph, method)(
            **{key: self._given(value) for key, value in arguments.items()},
            name=name,
        )
        fields = getattr(made, "_fields", None) or (
            ("", "squares") if method == "generate_statistics" else ("", "index")
        )
        parts = made if isinstance(made, tuple) else (made,)
        names: list[str | None] = []
        for position, tensor in enumerate(parts):
            if tensor is None:
                names.append(None)
                continue
            result = name if position == 0 else self._name(f"{name}_{fields[position]}", number=False)
            self._taken.add(result)
            self._tensors[result] = tensor
            self.shapes[result] = tensor.shape
            names.append(result)
        operation = Operation(method, tuple(arguments.items()), tuple(names))
        for position, result_name in enumerate(names):
            if result_name is not None:
                self.dtypes[result_name] = self._written(operation, position, self.shapes[result_name])
        self.operations.append(operation)
        return tuple(None if result_name is None else Ref(result_name) for result_name in names)

    def one(self, word: str, method: str, **arguments: Any) -> Ref:
        """Records an operation and gives its first result; see `add`."""
        first = self.add(word, method, **arguments)[0]
        assert first is not None
        return first

    def view(self, method: str, x: Ref, shape: Sequence[int], **arguments: Any) -> Ref:
        """Records what is done with an array; see Note [views]."""
        name = self._name(method)
        made = self.input(name, shape, self.dtypes[x.name])
        given = (("x", x), *arguments.items(), ("shape", tuple(shape)))
        self.operations.append(Operation(method, given, (name,)))
        return made

    def _name(self, word: str, number: bool = True) -> str:
        count = 1
        name = f"{word}1" if number else word
        while name in self._taken:
            count += 1
            name = f"{word}{count}"
        return name

    def _given(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self._tensors[value.name]
        if isinstance(value, tuple) and any(isinstance(part, Ref) for part in value):
            return [self._given(part) for part in value]
        return value

    def _written(self, operation: Operation, position: int, shape: tuple[int, ...]) -> str:
        """Gives the dtype in which a result is written to memory."""
        if is_truth(operation):
            return "boolean"
        if operation.method in _WIDE or (operation.method == "norm_forward" and position > 0):
            return self.compute
        operands = references(operation)
        if operation.method == "norm_backward" and position > 0:
            return self.dtypes[dict(operation.arguments)["scale"].name]
        if operation.method == "resample_forward" and position == 1:
            return "int8"
        fitting = [name for name in operands if self.shapes[name] == shape] or operands
        known = [name for name in fitting if self.dtypes[name] != "boolean"] or fitting
        return self._number(known[0] if operation.method == "pointwise" else operands[0])

    def _number(self, name: str) -> str:
        """Gives the dtype of a tensor; of a truth value, by which numbers are selected, that of what was compared."""
        while self.dtypes[name] == "boolean":
            name = references(next(operation for operation in self.operations if name in operation.results))[0]
        return self.dtypes[name]


def live_operations(
    operations: Sequence[Operation], wanted: Iterable[str], there: Container[str] = ()
) -> list[Operation]:
    """Gives the operations that the wanted results depend on, in their order.

    Args:
        operations: in the order in which they run.
        wanted: names of results.
        there: names of what need not be made.

    Returns:
        Some of the operations.
    """
    needed = set(wanted)
    live = []
    for operation in reversed(operations):
        if needed.intersection(name for name in operation.results if name is not None):
            live.append(operation)
            needed.update(name for name in references(operation) if name not in there)
    return live[::-1]


class Input(NamedTuple):
    """An input of a problem.

    Attributes:
        argument: which of the call's values it is.
        tensor: what the graph is told.
        copied: the layout into which the array is copied before each run, because it repeats memory or runs backward
            through it; "" where it is not.
        shape: to which the array is reshaped before each run; None where it is not.
    """

    argument: int
    tensor: GraphTensor
    copied: str = ""
    shape: tuple[int, ...] | None = None


class FunctionRecorder(Recorder):
    """Records a traced function, whose arguments can be reshaped outside the graph.

    Args:
        compute: as for a Recorder.
        intermediate: likewise.
        layouts: by rank, the layout of the arrays.
        gradients: whether gradients are wanted.

    Attributes:
        arguments: by name, the inputs.
    """

    def __init__(self, compute: str, intermediate: str, layouts: Mapping[int, str], gradients: bool) -> None:
        super().__init__(compute, intermediate)
        self._layouts = layouts
        self._gradients = gradients
        self.arguments: dict[str, Input] = {}

    def argument(self, name: str, entry: Input) -> str:
        """Adds an array argument; gives its name."""
        self.arguments[name] = entry
        self.input(name, entry.tensor.shape, entry.tensor.dtype)
        return name

    def wants_index(self, rank: int) -> bool:
        """Says whether max pooling also gives which element it took: cuDNN's backward pass wants that for nhwc only."""
        return self._gradients and self._layouts.get(rank) == "nhwc"

    def reshaped(self, name: str, shape: tuple[int, ...]) -> str:
        """Adds an argument in another shape; gives its name."""
        entry = self.arguments[name]
        made = self._name(f"{name}_", number=True)
        strides = devices.contiguous_strides(shape)
        preferred = devices.contiguous_strides(shape, self._layouts.get(len(shape), "nchw"))
        if same_strides(shape, strides, preferred):
            strides = preferred
        tensor = replace(entry.tensor, name=made, shape=shape, strides=strides)
        self.arguments[made] = entry._replace(tensor=tensor, shape=shape)
        self.input(made, shape, tensor.dtype)
        return made
