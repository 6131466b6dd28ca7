"""The backward pass of a traced function, planned and run.

`flcuda.traced.derivatives` gives backward operations in groups. A group that is one convolution becomes a
ConvolutionProblem, for which all sources compete; another becomes a GraphProblem, and where no engine takes it, its
parts do.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from flcuda import device as devices
from flcuda.autograd import GradTarget
from flcuda.device import Array, Device
from flcuda.errors import CudnnNotSupportedError
from flcuda.finder.graph_problem import GraphTensor, Operation
from flcuda.finder.problem import ConvolutionProblem, Problem, padding_pair
from flcuda.ops import bias as bias_ops
from flcuda.ops import elementwise
from flcuda.traced.collapse import plan_or_collapse
from flcuda.traced.derivatives import VIEWS, groups, split
from flcuda.traced.recorder import live_operations, references
from flcuda.traced.trace import ALIGNMENT, Trace, described

Planner = Callable[[Problem], Any]
"""Makes the plan of a Problem, or raises CudnnNotSupportedError."""

_CONVOLUTION_ROLES = {
    "convolution_forward": ("x", "w", "y"),
    "convolution_backward_data": ("dy", "w", "dx"),
    "convolution_backward_filter": ("x", "dy", "dw"),
}


def copied(a: Array, layout: str) -> Array:
    """Gives a copy of an array on the current device, in a layout."""
    out = devices.empty(a.shape, a.dtype, device=devices.device_of(a), layout=layout)
    elementwise.copy(a, out)
    return out


def ordered(a: Array, layout: str) -> Array:
    """Gives the array itself where it is dense in a layout, else a copy that is."""
    dense = a.transpose(devices.memory_order(layout, a.ndim)).flags.c_contiguous
    return a if dense else copied(a, layout)


def reshaped(a: Array, shape: tuple[int, ...]) -> Array:
    """Gives an array another shape, by a copy in logical order where its memory does not allow a view."""
    return ordered(a, "nchw").reshape(shape)


class Allocation:
    """How a new array of a layout is made: its shape in memory, and the axes that turn it into the logical one."""

    __slots__ = ("axes", "dtype", "empty", "memory")

    def __init__(self, tensor: GraphTensor, xp: Any) -> None:
        self.dtype = devices.numpy_dtype(tensor.dtype)
        self.empty = xp.empty
        order = sorted(range(len(tensor.shape)), key=lambda dim: (-tensor.strides[dim], dim))
        self.memory = tuple(tensor.shape[dim] for dim in order)
        axes = tuple(order.index(dim) for dim in range(len(order)))
        self.axes = None if axes == tuple(range(len(axes))) else axes

    def make(self) -> Array:
        """Makes an array on the current device."""
        a = self.empty(self.memory, self.dtype)
        return a if self.axes is None else a.transpose(self.axes)


# --- steps ------------------------------------------------------------------------------------------------------------


class _PlanStep(NamedTuple):
    """Runs a plan on named arrays; a result is allocated, or goes into the target of an argument."""

    plan: Any
    sources: tuple[str, ...]
    results: tuple[tuple[str, "Allocation | int"], ...]

    def run(self, arrays: dict[str, Array], outs: Mapping[int, Array]) -> None:
        made = [outs[how] if isinstance(how, int) else how.make() for _, how in self.results]
        self.plan.run(*[arrays[name] for name in self.sources], *made)
        arrays.update((name, a) for (name, _), a in zip(self.results, made, strict=True))


class _ArrayStep(NamedTuple):
    """Makes one array out of another."""

    function: Callable[[Array], Array]
    source: str
    result: str

    def run(self, arrays: dict[str, Array], outs: Mapping[int, Array]) -> None:  # noqa: ARG002
        arrays[self.result] = self.function(arrays[self.source])


class _Planned(NamedTuple):
    """A problem, the names of what it reads and writes, and by result the argument whose target it writes."""

    problem: Problem
    sources: tuple[str, ...]
    results: tuple[GraphTensor, ...]
    direct: Mapping[str, int] = {}


class Backward:
    """The backward pass for one kind of gradient and targets, planned; see Note [backward].

    Args:
        trace: the forward pass, with a derivative.
        saving: whether the forward pass wrote what backward needs.
        grad: the output's gradient.
        targets: by argument, where its gradient may be written.
        device: where.
        plan: makes the plan of a Problem, or raises CudnnNotSupportedError.

    Attributes:
        problems: what is planned, in the order of running.
    """

    def __init__(
        self,
        trace: Trace,
        saving: bool,
        grad: GraphTensor,
        targets: Mapping[int, GradTarget],
        device: Device,
        plan: Planner,
    ) -> None:
        assert trace.derivative is not None
        self.trace = trace
        self.derivative = trace.derivative
        self.problems: list[Problem] = []
        self._device = device
        self._plan = functools.partial(plan_or_collapse, plan=plan)
        self._steps: list[_PlanStep | _ArrayStep] = []
        self._known = {name: entry.tensor for name, entry in trace.inputs.items()}
        self._known[self.derivative.seed] = grad
        for name in self.derivative.saved:
            if saving or name in trace.outputs:
                self._known[name] = trace.written(trace.recorder, name)
        # By argument, the inputs that it is, and the names of their gradients.
        self._parts: dict[int, list[tuple[str, str]]] = {}
        for name, made in self.derivative.gradients.items():
            self._parts.setdefault(trace.inputs[name].argument, []).append((name, made))
        # By argument, its own shape.
        self._shapes = {entry.argument: trace.argument_shapes[entry.argument] for entry in trace.inputs.values()}
        self._input_of = {made: name for name, made in self.derivative.gradients.items()}
        # By argument, the shape in which a problem writes its target.
        self._direct: dict[int, tuple[int, ...]] = {}
        if not saving and trace.recomputed_needed:
            self._recompute([name for name in self.derivative.saved if name not in trace.outputs])
        for group in groups(self.derivative.operations):
            self._group(group, targets)

    # planning

    def _recompute(self, names: Sequence[str]) -> None:
        """Makes values of the forward pass out of what is there: all in one graph, else one after another."""
        recorder = self.trace.recorder
        operations = live_operations(recorder.operations, names, there=self._known)
        problem = self.trace.assemble(recorder, operations, names, self._known)
        self.problems.append(problem)
        try:
            plan = self._plan(problem)
        except CudnnNotSupportedError:
            self.problems.pop()
            if len(names) == 1:
                raise
            for name in names:
                self._recompute([name])
            return
        self._add(_Planned(problem, problem.inputs, problem.results), plan)

    def _group(self, group: Sequence[Operation], targets: Mapping[int, GradTarget]) -> None:
        if group[0].method in VIEWS:
            self._view(group[0])
            return
        planned = self._problem(group, targets)
        self.problems.append(planned.problem)
        try:
            plan = self._plan(planned.problem)
        except CudnnNotSupportedError as error:
            self.problems.pop()
            parts = split(group)
            if not parts:
                # The last resort: what it computes again is made before.
                again = self._again(group)
                parts = [*((operation,) for operation in again), tuple(group)] if again else []
            for part in parts:
                self._group(part, targets)
            if not parts and not self._summed(group[0]):
                error.add_note(f"while the gradient of {self.trace.outputs[0]} was planned")
                raise
            return
        self._add(planned, plan)

    def _problem(self, group: Sequence[Operation], targets: Mapping[int, GradTarget]) -> "_Planned":
        """Makes the problem of a group."""
        inside = {id(operation) for operation in group}
        elsewhere = {
            name
            for operation in self.derivative.operations
            if id(operation) not in inside
            for name in references(operation)
        }
        final = Counter(self.derivative.gradients.values())
        made = [name for operation in group for name in operation.results if name is not None]
        names = [name for name in made if name in elsewhere or name in final or name in self.derivative.recomputed]
        recorder = self.derivative.recorder
        results = {name: self._result(name) for name in names}
        direct: dict[str, int] = {}
        single = len(group) == 1 and group[0].method in _CONVOLUTION_ROLES
        accumulate = False
        for name in names:
            if final[name] != 1 or name in elsewhere:
                continue
            argument = self.trace.inputs[self._input_of[name]].argument
            target = targets.get(argument)
            if target is None or len(self._parts[argument]) > 1 or (target.accumulate and not single):
                continue
            tensor = self._target_tensor(results[name], target.array)
            # Engines of the graph API load 16 bytes at once; a ConvolutionProblem has other sources too.
            if tensor is not None and (single or tensor.alignment >= ALIGNMENT):
                results[name] = tensor
                direct[name] = argument
                accumulate = target.accumulate
        if single:
            arguments = dict(group[0].arguments)
            sources = tuple(arguments[role].name for role in _CONVOLUTION_ROLES[group[0].method][:2])
            problem = self._convolution(group[0], results[names[0]], accumulate)
            if problem is not None:
                return _Planned(problem, sources, (results[names[0]],), direct)
            results, direct = {name: self._result(name) for name in names}, {}
        graph_problem = self.trace.assemble(recorder, [*self._again(group), *group], names, self._known, results)
        return _Planned(graph_problem, graph_problem.inputs, graph_problem.results, direct)

    def _again(self, group: Sequence[Operation]) -> list[Operation]:
        """Gives the forward operations that a group contains as well, in their order."""
        needed: dict[str, Operation] = {}
        for operation in group:
            self._pull(references(operation), needed)
        order = {id(operation): i for i, operation in enumerate(self.trace.recorder.operations)}
        return sorted(needed.values(), key=lambda operation: order[id(operation)])

    def _pull(self, names: Iterable[str], needed: dict[str, Operation]) -> None:
        """Collects the forward operations that a group computes again."""
        for name in names:
            operation = self.derivative.recomputed.get(name)
            if operation is not None and name not in needed and name not in self._known:
                needed[name] = operation
                self._pull(references(operation), needed)

    def _result(self, name: str) -> GraphTensor:
        """Describes a result; the gradient of an input has its memory order."""
        recorder = self.derivative.recorder
        tensor = self.trace.written(recorder, name)
        of = self._input_of.get(name)
        if of is None:
            return tensor
        like = self.trace.inputs[of].tensor
        for layout in devices.LAYOUTS:
            if like.strides == devices.contiguous_strides(like.shape, layout):
                tensor = replace(tensor, strides=like.strides)
        maker = next(op for op in self.derivative.operations if name in op.results)
        return replace(tensor, dtype=like.dtype) if maker.method != "reduction" else tensor

    def _target_tensor(self, tensor: GraphTensor, array: Array) -> GraphTensor | None:
        """Describes a target, if a problem can write it itself."""
        if array.shape != tensor.shape:
            if not array.flags.c_contiguous:
                return None
            array = array.reshape(tensor.shape)
        made = described(tensor.name, array, self.trace.layouts.get(array.ndim), self._device)
        return made if made.dtype == tensor.dtype else None

    def _convolution(self, operation: Operation, result: GraphTensor, accumulate: bool) -> ConvolutionProblem | None:
        """Makes the problem of a single convolution; None where only a graph can say it."""
        arguments = dict(operation.arguments)
        roles = _CONVOLUTION_ROLES[operation.method]
        operands = {role[-1]: self._known[arguments[role].name] for role in roles[:2]}
        dtypes = {tensor.dtype for tensor in operands.values()}
        if dtypes != {result.dtype} or self.derivative.recorder.compute != (
            "float64" if result.dtype == "float64" else "float32"
        ):
            return None
        x, w, y = (({**operands, roles[2][-1]: result})[letter] for letter in "xwy")
        before, after = padding_pair(arguments["padding"], len(x.shape) - 2)
        return ConvolutionProblem(
            direction=operation.method.removeprefix("convolution_"),
            x_shape=x.shape,
            w_shape=w.shape,
            x_strides=x.strides,
            w_strides=w.strides,
            y_strides=y.strides,
            x_dtype=x.dtype,
            w_dtype=w.dtype,
            y_dtype=y.dtype,
            compute=self.derivative.recorder.compute,
            math=self.trace.math,
            padding_before=before,
            padding_after=after,
            stride=arguments["stride"],
            dilation=arguments["dilation"],
            groups=x.shape[1] // w.shape[1],
            accumulate=accumulate,
            x_alignment=x.alignment,
            w_alignment=w.alignment,
            y_alignment=y.alignment,
        )

    def _add(self, planned: _Planned, plan: Any) -> None:
        """Takes a planned problem as the next step."""
        made: list[tuple[str, Allocation | int]] = []
        for tensor in planned.results:
            self._known[tensor.name] = tensor
            argument = planned.direct.get(tensor.name)
            if argument is not None:
                self._direct[argument] = tensor.shape
            how = Allocation(tensor, self._device.xp) if argument is None else argument
            made.append((tensor.name, how))
        self._steps.append(_PlanStep(plan, planned.sources, tuple(made)))

    def _summed(self, operation: Operation) -> bool:
        """Takes a sum by the bias's kernel, where no engine does it; False if it is none."""
        arguments = dict(operation.arguments)
        if operation.method != "reduction" or arguments["mode"] != "add":
            return False
        x = self._known[arguments["x"].name]
        name = str(operation.results[0])
        self._known[name] = replace(self._result(name), dtype=x.dtype)
        self._steps.append(_ArrayStep(functools.partial(_sum, shape=arguments["shape"]), x.name, name))
        return True

    def _view(self, operation: Operation) -> None:
        """Takes what is done with an array as the next step."""
        arguments = dict(operation.arguments)
        source, shape = self._known[arguments["x"].name], arguments["shape"]
        name = str(operation.results[0])
        made = replace(self.trace.written(self.derivative.recorder, name), dtype=source.dtype)
        function: Callable[[Array], Array]
        if operation.method == "transpose":
            made = replace(made, strides=(*source.strides[:-2], source.strides[-1], source.strides[-2]))
            function = _transposed
        elif operation.method == "slice":
            axis, start = arguments["axis"], arguments["start"]
            offset = start * source.strides[axis] * devices.numpy_dtype(source.dtype).itemsize
            alignment = math.gcd(source.alignment, offset) if offset else source.alignment
            made = replace(made, strides=source.strides, alignment=alignment)
            part = (*(slice(None),) * axis, slice(start, start + shape[axis]))
            function = functools.partial(_part, part=part)
        elif operation.method == "reshape":
            made = replace(made, strides=devices.contiguous_strides(shape))
            function = functools.partial(reshaped, shape=shape)
        else:
            function = functools.partial(_expanded, shape=shape, made=Allocation(made, self._device.xp))
        self._known[name] = made
        self._steps.append(_ArrayStep(function, source.name, name))

    # running

    def run(self, arrays: dict[str, Array], grad: Array, targets: Mapping[int, GradTarget]) -> dict[int, Array]:
        """Runs all steps on the current device.

        Args:
            arrays: by name, what the forward pass kept.
            grad: the output's gradient.
            targets: as they were when this was planned.

        Returns:
            Gradients by argument; the target's array itself where that was written.
        """
        arrays[self.derivative.seed] = grad
        outs = {}
        for argument, shape in self._direct.items():
            out = targets[argument].array
            outs[argument] = out if out.shape == shape else out.reshape(shape)
        for step in self._steps:
            step.run(arrays, outs)
        return {argument: self._delivered(arrays, argument, targets.get(argument)) for argument in self._parts}

    def _delivered(self, arrays: Mapping[str, Array], argument: int, target: GradTarget | None) -> Array:
        if argument in self._direct:
            assert target is not None
            return target.array
        total: Array = None
        for name, made in self._parts[argument]:
            part = arrays[made]
            dtype = devices.numpy_dtype(self.trace.inputs[name].tensor.dtype)
            shape = self._shapes[argument]
            if part.shape != shape:
                part = reshaped(part, shape)
            if target is not None and not target.accumulate and len(self._parts[argument]) == 1:
                elementwise.copy(part, target.array)
                return target.array
            if part.dtype != dtype:
                part = elementwise.cast(part, dtype)
            total = part if total is None else elementwise.add(total, part)
        return total


def _sum(a: Array, shape: tuple[int, ...]) -> Array:
    """Sums to a shape, as the gradient of a bias of the dimensions that stay."""
    if a.ndim < 2 or shape != (1, a.shape[1], *(1,) * (a.ndim - 2)):
        gone = [dim for dim, size in enumerate(shape) if size != a.shape[dim]]
        kept = [dim for dim in range(a.ndim) if dim not in gone]
        rows = math.prod(a.shape[dim] for dim in gone)
        a = reshaped(a.transpose(*gone, *kept), (rows, math.prod(shape)))
    return bias_ops.bias_backward(a).reshape(shape)


def _transposed(a: Array) -> Array:
    return a.swapaxes(-1, -2)


def _part(a: Array, part: tuple[slice, ...]) -> Array:
    return a[part]


def _expanded(a: Array, shape: tuple[int, ...], made: Allocation) -> Array:
    out = made.make()
    elementwise.copy(devices.array_module(a).broadcast_to(a, shape), out)
    return out
