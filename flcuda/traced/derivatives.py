"""Derivatives of traced graphs: backward operations by reverse mode, grouped into what one graph may take.

Note [views]: what only looks at memory in another way, or fills it, is no operation of a graph engine: a transposition,
a slice, a reshape, an expansion to a larger shape. Backward operations of the methods in `VIEWS` are done with arrays,
between graphs.

Note [needed values]: derivatives use values of the forward pass. Inputs and outputs are there anyway. Of the others,
what pointwise operations make of values that are there is computed again inside the backward graph; the rest has to be
saved by the forward pass, as further outputs of its graph.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flcuda.errors import FlcudaError
from flcuda.finder.graph_problem import Operation, Ref
from flcuda.traced.recorder import Recorder, is_truth, live_operations, references

VIEWS = ("transpose", "slice", "reshape", "expand")
"""Methods of backward operations that are done with arrays; see Note [views]."""

_FUSED = ("pointwise", "reduction")


# --- reverse mode -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Derivative:
    """The backward operations of a graph.

    Attributes:
        recorder: shapes and dtypes of all names in them.
        operations: in the order in which they may run; methods of Graph, or `VIEWS`.
        recomputed: forward operations by result, which a group that reads the result contains as well.
        saved: values that the forward pass has to write, because backward cannot make them; see Note [needed values].
        read: inputs and values of the forward pass that backward reads.
        gradients: by input, the name of its gradient; no entry where it is zero.
        seed: the name of the output's gradient.
    """

    recorder: Recorder
    operations: tuple[Operation, ...]
    recomputed: Mapping[str, Operation]
    saved: tuple[str, ...]
    read: tuple[str, ...]
    gradients: Mapping[str, str]
    seed: str


def differentiate(
    forward: Recorder, operations: Sequence[Operation], inputs: Sequence[str], wanted: Iterable[str], output: str
) -> Derivative:
    """Derives the backward operations of a forward pass with one output.

    Args:
        forward: its recorder.
        operations: those of its operations that the output depends on.
        inputs: the names of its inputs.
        wanted: the inputs whose gradients are wanted.
        output: the name of its output.

    Returns:
        The derivative.

    Raises:
        FlcudaError: a gradient would have to flow through an operation without a derivative.
    """
    reverse = _Reverse(forward, operations, wanted, output)
    for operation in reversed(operations):
        grads = [None if name is None else reverse.gradients.get(name) for name in operation.results]
        if not any(grads) or not any(name in reverse.depends for name in references(operation)):
            continue
        rule = _RULES.get(operation.method)
        if rule is None:
            raise _no_rule(operation, operation.method)
        rule(reverse, operation, grads)
    gradients = {name: reverse.gradients[name].name for name in inputs if name in reverse.gradients}
    recorder = reverse.recorder
    live = live_operations(recorder.operations, [gradients[name] for name in gradients if name in reverse.depends])
    used = {name for operation in live for name in references(operation)} & set(forward.shapes)
    makers = {name: operation for operation in operations for name in operation.results if name is not None}
    there = set(inputs) | ({output} & used)
    saved: list[str] = []

    # What a convolution or a view reads is in memory, so that they stay what they are.
    direct = {name for operation in live if operation.method not in _FUSED for name in references(operation)}

    recomputed: dict[str, Operation] = {}

    def recompute(name: str) -> None:
        if name in there or name in recomputed:
            return
        for part in references(makers[name]):
            recompute(part)
        recomputed[name] = makers[name]
        for part in references(makers[name]):
            if part not in recorder.shapes:
                recorder.input(part, forward.shapes[part], forward.dtypes[part])

    # What is there or can be computed again, in the order of the forward pass.
    possible = set(there)

    def save(name: str) -> None:
        if is_truth(makers[name]):
            # Truth values are not written to memory: what they are made of is.
            for part in references(makers[name]):
                if part not in possible:
                    save(part)
        else:
            saved.append(name)
            there.add(name)
        possible.add(name)

    for name in forward.shapes:
        if name in possible or name not in makers:
            continue
        again = makers[name].method == "pointwise" and possible.issuperset(references(makers[name]))
        if name in used and (name in direct or not again):
            save(name)
        elif again:
            possible.add(name)
    if output in used and output not in inputs:
        saved.append(output)
    for name in forward.shapes:
        if name in used:
            recompute(name)
    read = used | {part for operation in recomputed.values() for part in references(operation)}
    return Derivative(
        recorder,
        tuple(live),
        recomputed,
        tuple(saved),
        tuple(name for name in forward.shapes if name in read and name not in recomputed),
        {name: made for name, made in gradients.items() if name in reverse.depends},
        reverse.seed,
    )


def _no_rule(operation: Operation, what: str) -> FlcudaError:
    name = next(name for name in operation.results if name is not None)
    return FlcudaError(
        f"{name}: flcuda.graph has no derivative of {what}, and an argument that flows through it requires a gradient; "
        f"call the function in flcuda.no_grad(), pass that argument's .data, or write it with operations that have one"
    )


class _Reverse:
    """What the rules work with: gradients by name, and a recorder of backward operations."""

    def __init__(self, forward: Recorder, operations: Sequence[Operation], wanted: Iterable[str], output: str) -> None:
        self.forward = forward
        self.recorder = Recorder(forward.compute, forward.intermediate, forward.shapes)
        self.depends = set(wanted)
        for operation in operations:
            if not is_truth(operation) and self.depends.intersection(references(operation)):
                self.depends.update(name for name in operation.results if name is not None)
        self.seed = "grad"
        while self.seed in forward.shapes:
            self.seed += "_"
        self.gradients = {
            output: self.recorder.input(self.seed, forward.shapes[output], forward.dtypes[output]),
        }

    def shape(self, operand: Ref) -> tuple[int, ...]:
        """Gives the shape of a tensor of either pass."""
        return self.recorder.shapes.get(operand.name) or self.forward.shapes[operand.name]

    def wants(self, operand: Any) -> bool:
        """Says whether an operand's gradient is wanted."""
        return isinstance(operand, Ref) and operand.name in self.depends

    def value(self, operand: Any) -> Any:
        """Makes a value of the forward pass known to the backward recorder."""
        if isinstance(operand, Ref) and operand.name not in self.recorder.shapes:
            name = operand.name
            self.recorder.input(name, self.forward.shapes[name], self.forward.dtypes[name])
        return operand

    def pointwise(self, mode: str, x: Any, b: Any = None, t: Any = None, **parameters: float) -> Ref:
        """Records a pointwise operation on tensors of either pass, or numbers."""
        given = {"x": self.value(x), "b": self.value(b), "t": self.value(t)}
        arguments = {role: operand for role, operand in given.items() if operand is not None}
        return self.recorder.one(f"d_{mode.split('_')[0]}", "pointwise", mode=mode, **arguments, **parameters)

    def operation(self, word: str, method: str, **arguments: Any) -> Ref:
        """Records any other operation and gives its first result."""
        return self.recorder.one(word, method, **{key: self.value(value) for key, value in arguments.items()})

    def view(self, method: str, x: Ref, shape: Sequence[int], **arguments: Any) -> Ref:
        """Records what is done with an array."""
        return self.recorder.view(method, self.value(x), shape, **arguments)

    def transposed(self, x: Ref) -> Ref:
        """Swaps the last two dimensions."""
        shape = self.shape(x)
        return self.view("transpose", x, (*shape[:-2], shape[-1], shape[-2]))

    def give(self, operand: Any, gradient: Ref) -> None:
        """Adds to an operand's gradient; one of a broadcast operand is summed to its shape."""
        if not self.wants(operand):
            return
        shape = self.shape(operand)
        if self.recorder.shapes[gradient.name] != shape:
            gradient = self.recorder.one("d_sum", "reduction", mode="add", x=gradient, shape=shape)
        known = self.gradients.get(operand.name)
        self.gradients[operand.name] = gradient if known is None else self.pointwise("add", known, gradient)


Grads = Sequence[Ref | None]


def _first(grads: Grads, operation: Operation) -> Ref:
    """Gives the gradient of the first result; that of the others cannot be followed."""
    for name, grad in zip(operation.results[1:], grads[1:], strict=True):
        if grad is not None:
            raise _no_rule(operation, f"{operation.method}'s result {name}")
    assert grads[0] is not None
    return grads[0]


def _geometry(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in ("padding", "stride", "dilation")}


def _convolution_forward(r: _Reverse, operation: Operation, grads: Grads) -> None:
    a = dict(operation.arguments)
    x, w, g = a["x"], a["w"], _first(grads, operation)
    if r.wants(x):
        r.give(x, r.operation("dgrad", "convolution_backward_data", dy=g, w=w, x_shape=r.shape(x), **_geometry(a)))
    if r.wants(w):
        r.give(w, r.operation("wgrad", "convolution_backward_filter", x=x, dy=g, w_shape=r.shape(w), **_geometry(a)))


def _convolution_backward_data(r: _Reverse, operation: Operation, grads: Grads) -> None:
    a = dict(operation.arguments)
    dy, w, g = a["dy"], a["w"], _first(grads, operation)
    if r.wants(dy):
        r.give(dy, r.operation("conv", "convolution_forward", x=g, w=w, **_geometry(a)))
    if r.wants(w):
        r.give(w, r.operation("wgrad", "convolution_backward_filter", x=g, dy=dy, w_shape=r.shape(w), **_geometry(a)))


def _convolution_backward_filter(r: _Reverse, operation: Operation, grads: Grads) -> None:
    a = dict(operation.arguments)
    x, dy, g = a["x"], a["dy"], _first(grads, operation)
    if r.wants(x):
        r.give(x, r.operation("dgrad", "convolution_backward_data", dy=dy, w=g, x_shape=r.shape(x), **_geometry(a)))
    if r.wants(dy):
        r.give(dy, r.operation("conv", "convolution_forward", x=x, w=g, **_geometry(a)))


def _matmul(r: _Reverse, operation: Operation, grads: Grads) -> None:
    arguments = dict(operation.arguments)
    a, b, g = arguments["a"], arguments["b"], _first(grads, operation)
    if r.wants(a):
        r.give(a, r.operation("d_matmul", "matmul", a=g, b=r.transposed(b)))
    if r.wants(b):
        r.give(b, r.operation("d_matmul", "matmul", a=r.transposed(a), b=g))


def _reduction(r: _Reverse, operation: Operation, grads: Grads) -> None:
    arguments = dict(operation.arguments)
    x, g = arguments["x"], _first(grads, operation)
    if arguments["mode"] not in ("add", "avg"):
        raise _no_rule(operation, f"reduction {arguments['mode']}")
    if arguments["mode"] == "avg":
        g = r.pointwise("mul", g, math.prod(arguments["shape"]) / math.prod(r.shape(x)))
    r.give(x, r.view("expand", g, r.shape(x)))


def _statistics(r: _Reverse, operation: Operation, grads: Grads) -> None:
    x = dict(operation.arguments)["x"]
    total, squares = grads
    if squares is None:
        assert total is not None
        r.give(x, r.view("expand", total, r.shape(x)))
        return
    gradient = r.pointwise("mul", x, r.pointwise("mul", squares, 2.0))
    r.give(x, gradient if total is None else r.pointwise("add", gradient, total))


def _norm_forward(r: _Reverse, operation: Operation, grads: Grads) -> None:
    a = dict(operation.arguments)
    _, mean, inv_variance, *_ = operation.results
    statistics = {"mean": mean, "inv_variance": inv_variance}
    given = {role: r.value(Ref(name)) for role, name in statistics.items() if name is not None}
    made = r.recorder.add(
        "d_norm",
        "norm_backward",
        mode=a["mode"],
        dy=_first(grads, operation),
        x=r.value(a["x"]),
        scale=r.value(a["scale"]),
        **given,
        bias="bias" in a,
    )
    for operand, gradient in zip((a["x"], a["scale"], a.get("bias")), made, strict=True):
        if gradient is not None:
            r.give(operand, gradient)


def _resample(r: _Reverse, operation: Operation, grads: Grads) -> None:
    a = dict(operation.arguments)
    x = a["x"]
    window = {name: a[name] for name in ("window", "stride", "padding")}
    taken: dict[str, Ref] = {}
    if operation.results[1] is not None:
        taken["index"] = Ref(operation.results[1])
    elif a["mode"] in ("max", "nearest"):
        taken = {"x": x, "y": Ref(str(operation.results[0]))}
    gradient = r.operation(
        "d_pool",
        "resample_backward",
        mode=a["mode"],
        dy=_first(grads, operation),
        x_shape=r.shape(x),
        **window,
        **taken,
    )
    r.give(x, gradient)


def _reshape(r: _Reverse, operation: Operation, grads: Grads) -> None:
    x = dict(operation.arguments)["x"]
    r.give(x, r.view("reshape", _first(grads, operation), r.shape(x)))


def _concatenate(r: _Reverse, operation: Operation, grads: Grads) -> None:
    arguments = dict(operation.arguments)
    axis, start = arguments["axis"], 0
    for x in arguments["tensors"]:
        shape = r.shape(x)
        if r.wants(x):
            r.give(x, r.view("slice", _first(grads, operation), shape, axis=axis, start=start))
        start += shape[axis]


def _pointwise(r: _Reverse, operation: Operation, grads: Grads) -> None:
    given = dict(operation.arguments)
    mode, x, b, t = given.pop("mode"), given.pop("x"), given.pop("b", None), given.pop("t", None)
    g = _first(grads, operation)
    if mode == "relu_fwd" and not given:
        # Its result says as well where it was active, and is there already when it is the output.
        r.give(x, r.pointwise("relu_bwd", g, Ref(str(operation.results[0]))))
    elif mode.endswith("_fwd"):
        r.give(x, r.pointwise(f"{mode.removesuffix('_fwd')}_bwd", g, x, **given))
    elif mode == "binary_select":
        nothing = r.pointwise("mul", g, 0.0)
        if r.wants(x):
            r.give(x, r.pointwise(mode, g, nothing, t))
        if r.wants(b):
            r.give(b, r.pointwise(mode, nothing, g, t))
    elif b is None:
        gradient = _unary(r, mode, g, x, Ref(str(operation.results[0])))
        if gradient is None:
            raise _no_rule(operation, f"pointwise {mode}")
        r.give(x, gradient)
    else:
        for operand, rule in ((x, _binary_first), (b, _binary_second)):
            if r.wants(operand):
                gradient = rule(r, mode, g, x, b)
                if gradient is None:
                    raise _no_rule(operation, f"pointwise {mode}")
                r.give(operand, gradient)


def _unary(r: _Reverse, mode: str, g: Ref, x: Ref, y: Ref) -> Ref | None:
    """Gives the gradient of an operand of the result y; None where there is no rule."""
    do = r.pointwise
    match mode:
        case "identity":
            return g
        case "neg":
            return do("neg", g)
        case "abs":
            return do("sub", do("relu_bwd", g, x), do("relu_bwd", g, do("neg", x)))
        case "exp":
            return do("mul", g, y)
        case "log":
            return do("div", g, x)
        case "sqrt":
            return do("div", do("mul", g, 0.5), y)
        case "rsqrt":
            return do("mul", g, do("mul", do("div", y, x), -0.5))
        case "reciprocal":
            return do("neg", do("mul", g, do("mul", y, y)))
        case "sin":
            return do("mul", g, do("cos", x))
        case "cos":
            return do("neg", do("mul", g, do("sin", x)))
        case "tan":
            return do("mul", g, do("add", do("mul", y, y), 1.0))
        case "erf":
            return do("mul", g, do("mul", do("exp", do("neg", do("mul", x, x))), 2 / math.sqrt(math.pi)))
    return None


def _binary_first(r: _Reverse, mode: str, g: Ref, a: Any, b: Any) -> Ref | None:
    """Gives the gradient of the first of two operands; None where there is no rule."""
    do = r.pointwise
    match mode:
        case "add" | "sub" | "add_square":
            return g
        case "mul":
            return do("mul", g, b)
        case "div":
            return do("div", g, b)
        case "pow" if b == 0:
            return do("mul", g, 0.0)
        case "pow" if isinstance(b, Ref):
            return do("mul", g, do("mul", b, do("pow", a, do("sub", b, 1.0))))
        case "pow" if b == 2:
            return do("mul", g, do("mul", a, 2.0))
        case "pow":
            return do("mul", g, do("mul", do("pow", a, b - 1.0), b))
        case "max":
            return _above(r, g, a, b)
        case "min":
            return _above(r, g, b, a)
        case "atan2":
            return _angle(r, g, a, b, b)
    return None


def _binary_second(r: _Reverse, mode: str, g: Ref, a: Any, b: Any) -> Ref | None:
    """Gives the gradient of the second of two operands; None where there is no rule."""
    do = r.pointwise
    match mode:
        case "add":
            return g
        case "sub":
            return do("neg", g)
        case "mul":
            return do("mul", g, a)
        case "div":
            return do("neg", do("mul", g, do("div", do("div", a, b), b)))
        case "add_square":
            return do("mul", g, do("mul", b, 2.0))
        case "pow" if isinstance(a, Ref) or a > 0:
            return do("mul", g, do("mul", do("pow", a, b), do("log", a) if isinstance(a, Ref) else math.log(a)))
        case "max":
            # Of equal ones the second gets the gradient.
            return do("sub", g, _above(r, g, a, b))
        case "min":
            return do("sub", g, _above(r, g, b, a))
        case "atan2":
            return do("neg", _angle(r, g, a, b, a))
    return None


def _above(r: _Reverse, g: Ref, a: Any, b: Any) -> Ref:
    """Passes the gradient where a is above b: ReLU's derivative needs no truth values."""
    if not isinstance(a, Ref):
        return r.pointwise("relu_bwd", g, r.pointwise("add", r.pointwise("neg", b), a))
    return r.pointwise("relu_bwd", g, r.pointwise("sub", a, b))


def _angle(r: _Reverse, g: Ref, top: Any, other: Any, factor: Any) -> Ref:
    """Gives g * factor / (top^2 + other^2)."""
    squares = r.pointwise("add", r.pointwise("mul", top, top), r.pointwise("mul", other, other))
    return r.pointwise("div", r.pointwise("mul", g, factor), squares)


_RULES: dict[str, Callable[[_Reverse, Operation, Grads], None]] = {
    "convolution_forward": _convolution_forward,
    "convolution_backward_data": _convolution_backward_data,
    "convolution_backward_filter": _convolution_backward_filter,
    "pointwise": _pointwise,
    "reduction": _reduction,
    "matmul": _matmul,
    "generate_statistics": _statistics,
    "norm_forward": _norm_forward,
    "resample_forward": _resample,
    "reshape": _reshape,
    "concatenate": _concatenate,
}


# --- groups -----------------------------------------------------------------------------------------------------------


def groups(operations: Sequence[Operation]) -> list[tuple[Operation, ...]]:
    """Groups operations into what is tried as one graph, in an order in which the groups can run.

    Pointwise operations and the reductions of what they make are one group, as far as they hang together; anything else
    is a group of its own. What uses a reduction is in a later group.

    Args:
        operations: in the order in which they may run.

    Returns:
        The groups.
    """
    levels: list[int] = []
    makers = {name: index for index, op in enumerate(operations) for name in op.results if name is not None}
    for operation in operations:
        level = 0
        for name in references(operation):
            if name in makers:
                maker = makers[name]
                joined = operations[maker].method == "pointwise" and operation.method in _FUSED
                level = max(level, levels[maker] if joined else levels[maker] + 1)
        levels.append(level)
    found: list[tuple[int, list[int], set[str]]] = []
    for index, operation in enumerate(operations):
        names = {*references(operation), *(name for name in operation.results if name is not None)}
        members = [index]
        if operation.method in _FUSED:
            for group in [g for g in found if g[0] == levels[index] and operations[g[1][0]].method in _FUSED]:
                if group[2] & names:
                    found.remove(group)
                    members = [*group[1], *members]
                    names |= group[2]
        found.append((levels[index], members, names))
    found.sort(key=lambda group: (group[0], min(group[1])))
    return [tuple(operations[index] for index in sorted(members)) for _, members, _ in found]


def split(group: Sequence[Operation]) -> list[tuple[Operation, ...]]:
    """Splits a group that no engine takes: its pointwise part and each reduction alone; else each operation alone.

    Returns:
        Smaller groups in an order in which they can run; none when the group is one operation.
    """
    if len(group) == 1:
        return []
    reductions = [operation for operation in group if operation.method == "reduction"]
    pointwise = [operation for operation in group if operation.method != "reduction"]
    if reductions and pointwise:
        return [tuple(pointwise), *((operation,) for operation in reductions)]
    return [(operation,) for operation in group]
