"""What the outputs of a Problem have to be at any places, in float64, and how far off a right candidate may be.

A Problem is read as a graph of simple operations (a norm, for one, becomes reductions and pointwise operations), which
is evaluated at the places that are asked for only: a convolution reads its windows, a filter gradient sums over the
batch for the filter elements in question, a pointwise operation asks for the same places of its inputs. What is asked
for more often than it has elements is computed once for all of them.

It works on NumPy and CuPy arrays by element-wise operations and sums only: no BLAS.

Note [bounds]: errors of different elements are taken as independent. So a sum's rounding error is a multiple of the
unit roundoff u times the root of the sum of squared products (r), not times the sum of their magnitudes: that is small
enough for a missing channel to show, of thousands. The multiples, which are far above what plain sums need:

- float32 and float64 sums: (4096 + 8 sqrt(n)) u r. Winograd's and Fourier transforms lose some hundred u.
- 16-bit and TF32 products: 96 u r more (16 for bfloat16) with the u of the products, since Winograd engines round the
  transformed operands; and 2 u of the result, since tensor cores may cut off the lower bits of TF32.
- r holds the average of windows that lie inside too, since a transform spreads errors over a tile.

Sums of values with errors e of their own: root of the sum of e^2, and a share of the sum of e for errors in one
direction. Pointwise operations: the largest change of the result when an input moves by its error in either direction;
at a jump (comparison, floor) that bound is as wide as the jump, where it is not known on which side an input lies.
Approximate transcendental functions may be off by 2^-10. Whatever is stored in a dtype is off by 2 u of it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flcuda import graph_reference
from flcuda.device import Device
from flcuda.finder.graph_problem import GraphProblem, Operation, Ref
from flcuda.finder.problem import OPERAND_DTYPES, ConvolutionProblem, Problem
from flcuda.graph_reference import Geometry

# Elements that are computed at a time, and evaluations of inputs for all samples of an output.
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}
_BUDGET = {"cpu": 1 << 23, "cuda": 1 << 29}
_KEPT = 1 << 24  # the largest tensor that is computed whole, in elements
_FEWEST = 4  # samples of an output, whatever they cost

# See Note [bounds].
UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_TF32_UNIT = 2.0**-11
_SUM, _SUM_ROOT = 4096.0, 8.0
_NARROW_SUM, _NARROW_SUM_ROOT = 16.0, 2.0  # for a 16-bit compute dtype
_PRODUCT = {"float16": 96.0, "bfloat16": 16.0, "tf32": 96.0}
STORED = 2.0
_SAME_DIRECTION = 1 / 64
_SAME_DIRECTION_TF32 = 1 / 8
_APPROXIMATE = 2.0**-10
_ELEMENTARY = 8.0

_EXACT_MODES = frozenset(("identity", "neg", "abs", "max", "min", "ceil", "floor", "binary_select"))
_APPROXIMATE_MODES = {
    # What the error is a share of, beside the result: "" of nothing more, x of the first input, d of dy * (1 + |x|).
    "cos": "1",
    "exp": "",
    "log": "1",
    "sin": "1",
    "tan": "1",
    "erf": "",
    "pow": "",
    "atan2": "",
    "tanh_fwd": "",
    "sigmoid_fwd": "1",
    "elu_fwd": "1",
    "gelu_fwd": "x",
    "softplus_fwd": "1",
    "swish_fwd": "x",
    "gelu_approx_tanh_fwd": "x",
    "tanh_bwd": "d",
    "sigmoid_bwd": "d",
    "elu_bwd": "d",
    "gelu_bwd": "d",
    "softplus_bwd": "d",
    "swish_bwd": "d",
    "gelu_approx_tanh_bwd": "d",
    "rsqrt": "",
    "sqrt": "",
    "div": "",
    "reciprocal": "",
}


def wide(xp: Any, line: Any, offsets: Any) -> Any:
    """Reads elements of a one-dimensional array in float64; bfloat16 by its bits, which any CuPy can move."""
    if line.dtype == OPERAND_DTYPES["bfloat16"]:
        upper = xp.take(line.view(np.uint16), offsets).astype(np.uint32) << np.uint32(16)
        return upper.view(np.float32).astype(np.float64)
    return xp.take(line, offsets).astype(np.float64)


Index = tuple[Any, ...]  # an index array, or 0, a dimension; together they broadcast to the shape of what is asked for
Value = tuple[Any, Any]  # values and the errors that they may have; the errors 0.0 when there are none


@dataclass(slots=True)
class _Node:
    """A simple operation that gives one tensor."""

    method: str
    get: dict[str, Any]
    shape: tuple[int, ...]
    unit: float = 0.0  # the unit roundoff of what it is stored as, when others use it
    whole: bool = False  # it is stored as a whole number


def _is_exact(error: Any) -> bool:
    return isinstance(error, float) and error == 0.0


class Evaluator:
    """Evaluates a Problem's tensors at any places, with error bounds."""

    def __init__(self, problem: Problem, inputs: Sequence[Any], device: Device) -> None:
        self._xp = device.xp
        self._chunk = _CHUNK[device.kind]
        self._budget = _BUDGET[device.kind]
        self._unit = UNITS.get(problem.compute, 0.0)
        words = {problem.dtype_of(name) for name in problem.inputs}
        self._tf32 = "float32" in words and problem.math == "tensor_op"
        # The dtype in which products are taken: its unit roundoff and factor, see Note [bounds].
        self._product_unit, self._product_factor = 0.0, 0.0
        for word, unit in (("tf32", _TF32_UNIT), *UNITS.items()):
            if word in _PRODUCT and (word in words or (word == "tf32" and self._tf32)):
                self._product_unit = max(self._product_unit, unit)
                self._product_factor = _PRODUCT[word]
        self._memory = {}
        for name, array in zip(problem.inputs, inputs, strict=True):
            strides = tuple(step // array.itemsize for step in array.strides)
            extent = 1 + sum((size - 1) * step for size, step in zip(array.shape, strides, strict=True))
            line = self._xp.lib.stride_tricks.as_strided(array, (extent,), (array.itemsize,))
            self._memory[name] = (line, strides)
        self._nodes: dict[str, _Node] = {}
        self._shapes = {name: problem.shape_of(name) for name in problem.inputs}
        self._asked: dict[str, int] = {}
        self._kept: dict[str, Value] = {}
        self._costs: dict[tuple[str, int], int] = {}
        self._memo: dict[Any, Any] = {}
        if isinstance(problem, GraphProblem):
            self._read_graph(problem)
        elif isinstance(problem, ConvolutionProblem):
            self._read_convolution(problem)
        else:
            raise TypeError(f"problem: {type(problem).__name__} is no Problem that can be verified")

    # reading a Problem

    def _add(self, method: str, name: str | None, shape: Iterable[int], **get: Any) -> Ref:
        name = name or f"~{len(self._nodes)}"
        self._nodes[name] = _Node(method, get, tuple(shape))
        self._shapes[name] = tuple(shape)
        return Ref(name)

    def _point(self, mode: str, x: Any, b: Any = None, name: str | None = None) -> Ref:
        shapes = [self._shapes[value.name] for value in (x, b) if isinstance(value, Ref)]
        return self._add("pointwise", name, np.broadcast_shapes(*shapes), mode=mode, x=x, b=b)

    def _reduce(self, mode: str, x: Ref, shape: Iterable[int], name: str | None = None) -> Ref:
        return self._add("reduction", name, shape, mode=mode, x=x)

    def _read_convolution(self, problem: ConvolutionProblem) -> None:
        first, second, out = problem.operands
        geometry = Geometry(problem.padding_before, problem.padding_after, problem.stride, problem.dilation)
        operands = {role: Ref(name) for role, name in zip(("a", "b"), (first, second), strict=True)}
        self._add(
            f"convolution_{problem.direction}",
            out,
            problem.shape_of(out),
            geometry=geometry,
            x_shape=problem.x_shape,
            w_shape=problem.w_shape,
            y_shape=problem.y_shape,
            alpha=1.0,
            **operands,
        )

    def _read_graph(self, problem: GraphProblem) -> None:
        _, tensors = problem.graph()
        for operation in problem.operations:
            made = [name for name in operation.results if name is not None]
            shapes = {name: tensors[name].shape for name in made}
            _READERS.get(operation.method, Evaluator._read_plain)(self, operation, shapes)
            for name in made:
                word = tensors[name].dtype
                node = self._nodes[name]
                node.unit = UNITS.get(word, 0.0)
                node.whole = word.startswith(("int", "uint"))

    def _read_plain(self, operation: Operation, shapes: dict[str, tuple[int, ...]]) -> None:
        (name,) = operation.results
        if name is None:
            return
        get = {key: value for key, value in operation.arguments if key not in ("dtype", "beta", "shape")}
        if operation.method.startswith("convolution_"):
            get = self._convolution_arguments(operation, shapes[name])
        self._add(operation.method, name, shapes[name], **get)

    def _convolution_arguments(self, operation: Operation, shape: tuple[int, ...]) -> dict[str, Any]:
        given = operation.get
        geometry = Geometry.read(len(shape) - 2, given("padding"), given("stride"), given("dilation"))
        roles = {
            "convolution_forward": ("x", "w", "y"),
            "convolution_backward_data": ("dy", "w", "x"),
            "convolution_backward_filter": ("x", "dy", "w"),
        }[operation.method]
        a, b = given(roles[0]), given(roles[1])
        known = {roles[0][-1]: self._shapes[a.name], roles[1][-1]: self._shapes[b.name], roles[2]: shape}
        get = {f"{letter}_shape": known[letter] for letter in "xwy"}
        return {**get, "geometry": geometry, "alpha": given("alpha"), "a": a, "b": b}

    def _read_statistics(self, operation: Operation, shapes: dict[str, tuple[int, ...]]) -> None:
        x = operation.get("x")
        total, squares = operation.results
        if total is not None:
            self._reduce("add", x, shapes[total], total)
        if squares is not None:
            self._reduce("add", self._point("mul", x, x), shapes[squares], squares)

    def _factors(self, x: Ref, mode: str, shape: Iterable[int], epsilon: Any, names: Sequence[Any]) -> tuple[Any, ...]:
        """The statistics of a norm: mean, variance, inverse deviation."""
        shape = tuple(shape)
        variance = self._reduce("avg", self._point("mul", x, x), shape)
        mean = None
        if mode != "rms":
            mean = self._reduce("avg", x, shape, names[0])
            variance = self._point("sub", variance, self._point("mul", mean, mean))
        return mean, variance, self._point("rsqrt", self._point("add", variance, epsilon), name=names[1])

    def _blend(self, old: Any, new: Any, momentum: float, name: str | None) -> None:
        if name is not None:
            self._point("add", self._point("mul", old, 1 - momentum), self._point("mul", new, momentum), name)

    def _read_finalize(self, operation: Operation, _: dict[str, tuple[int, ...]]) -> None:
        given = operation.get
        count = float(given("count"))
        factor, offset, mean_name, inverse_name, running_mean, running_variance = operation.results
        mean = self._point("div", given("total"), count, mean_name)
        variance = self._point("sub", self._point("div", given("square_sum"), count), self._point("mul", mean, mean))
        inverse = self._point("rsqrt", self._point("add", variance, given("epsilon")), name=inverse_name)
        scaled = self._point("mul", given("scale"), inverse, factor)
        self._point("sub", given("bias"), self._point("mul", mean, scaled), offset)
        self._blend(given("running_mean"), mean, given("momentum"), running_mean)
        if running_variance is not None:
            unbiased = self._point("mul", variance, count / (count - 1))
            self._blend(given("running_variance"), unbiased, given("momentum"), running_variance)

    def _statistics_shape(self, mode: str, x: Ref, scale: Ref) -> tuple[int, ...]:
        full = self._shapes[x.name]
        axes = graph_reference.statistics_axes(mode, full, self._shapes[scale.name])
        return tuple(1 if axis in axes else size for axis, size in enumerate(full))

    def _normalized(self, x: Ref, mean: Any, inverse: Any) -> Ref:
        return self._point("mul", x if mean is None else self._point("sub", x, mean), inverse)

    def _read_norm_forward(self, operation: Operation, _: dict[str, tuple[int, ...]]) -> None:
        given = operation.get
        mode, x, scale, bias = given("mode"), given("x"), given("scale"), given("bias")
        y_name, *names, running_mean, running_variance = operation.results
        mean, inverse = given("mean"), given("inv_variance")
        if given("training"):
            shape = self._statistics_shape(mode, x, scale)
            mean, variance, inverse = self._factors(x, mode, shape, given("epsilon"), names)
            self._blend(given("running_mean"), mean, given("momentum"), running_mean)
            if running_variance is not None:
                count = math.prod(self._shapes[x.name]) // math.prod(shape)
                unbiased = self._point("mul", variance, count / (count - 1))
                self._blend(given("running_variance"), unbiased, given("momentum"), running_variance)
        y = self._point("mul", self._normalized(x, mean, inverse), scale, y_name if bias is None else None)
        if bias is not None:
            self._point("add", y, bias, y_name)

    def _read_norm_backward(self, operation: Operation, _: dict[str, tuple[int, ...]]) -> None:
        given = operation.get
        mode, dy, x, scale = given("mode"), given("dy"), given("x"), given("scale")
        dx_name, dscale, dbias = operation.results
        shape = self._statistics_shape(mode, x, scale)
        mean, inverse = given("mean"), given("inv_variance")
        if inverse is None:
            mean, _variance, inverse = self._factors(x, mode, shape, given("epsilon"), (None, None))
        unit = self._normalized(x, mean, inverse)
        gradient = self._point("mul", dy, scale)
        along = self._point("mul", unit, self._reduce("avg", self._point("mul", gradient, unit), shape))
        dx = self._point("sub", gradient, along)
        if mode != "rms":
            dx = self._point("sub", dx, self._reduce("avg", gradient, shape))
        self._point("mul", dx, inverse, dx_name)
        if dscale is not None:
            self._reduce("add", self._point("mul", dy, unit), self._shapes[scale.name], dscale)
        if dbias is not None:
            self._reduce("add", dy, self._shapes[scale.name], dbias)

    def _read_weights(self, operation: Operation, _: dict[str, tuple[int, ...]]) -> None:
        given = operation.get
        dy, x, mean, inverse, scale = (given(role) for role in ("dy", "x", "mean", "inv_std", "scale"))
        dscale_name, dbias_name, factor_name, x_name, bias_name = operation.results
        shape = self._shapes[mean.name]
        count = math.prod(self._shapes[x.name]) // math.prod(shape)
        dscale = self._reduce("add", self._point("mul", dy, self._normalized(x, mean, inverse)), shape, dscale_name)
        dbias = self._reduce("add", dy, shape, dbias_name)
        factor = self._point("mul", scale, inverse, factor_name)
        share = self._point("mul", self._point("mul", factor, inverse), dscale)
        of_x = self._point("mul", share, -1 / count, x_name)
        share = self._point("mul", self._point("mul", factor, dbias), -1 / count)
        self._point("sub", share, self._point("mul", of_x, mean), bias_name)

    def _read_resample_forward(self, operation: Operation, shapes: dict[str, tuple[int, ...]]) -> None:
        y, index = operation.results
        if y is not None:
            self._resample("resample_forward", operation, operation.get("x"), shapes[y], y)
        if index is not None:
            self._resample("resample_index", operation, operation.get("x"), shapes[index], index)

    def _resample(
        self, method: str, operation: Operation, x: Any, y_shape: Iterable[int], name: str | None, **more: Any
    ) -> Ref:
        given = operation.get
        x_shape = more.get("x_shape") or self._shapes[x.name]
        y_shape = tuple(y_shape)
        geometry = Geometry.read(len(y_shape) - 2, given("padding"), given("stride"))
        windows = Geometry.read(len(y_shape) - 2, 0, given("window")).stride
        taps = [
            graph_reference.resample_taps(given("mode"), size, out, window, stride, before)
            for size, out, window, stride, before in zip(
                x_shape[2:], y_shape[2:], windows, geometry.stride, geometry.before, strict=True
            )
        ]
        shape = x_shape if method == "resample_backward" else y_shape
        return self._add(method, name, shape, mode=given("mode"), x=x, taps=taps, **more)

    def _read_resample_backward(self, operation: Operation, shapes: dict[str, tuple[int, ...]]) -> None:
        (name,) = operation.results
        given = operation.get
        if name is None:
            return
        dy, index = given("dy"), given("index")
        if given("mode") in ("max", "nearest") and index is None:
            index = self._resample("resample_index", operation, given("x"), self._shapes[dy.name], None)
        self._resample(
            "resample_backward", operation, dy, self._shapes[dy.name], name, x_shape=shapes[name], index=index
        )

    # costs

    def _fan(self, node: _Node) -> int:
        """How many elements of its inputs one element reads; 0 where it is as many as the inputs."""
        get = node.get
        if node.method == "convolution_forward":
            return math.prod(get["w_shape"][1:])
        if node.method == "convolution_backward_data":
            groups = get["x_shape"][1] // get["w_shape"][1]
            return math.prod((get["w_shape"][0] // groups, *get["w_shape"][2:]))
        if node.method == "convolution_backward_filter":
            return math.prod((get["y_shape"][0], *get["y_shape"][2:]))
        if node.method == "reduction":
            return math.prod(self._shapes[get["x"].name]) // math.prod(node.shape)
        if node.method == "matmul":
            return int(self._shapes[get["a"].name][-1])
        if node.method in ("resample_forward", "resample_index"):
            return math.prod(taps.index.shape[1] for taps in get["taps"])
        if node.method == "resample_backward":
            return math.prod(table[0].shape[1] for table in self._transposed(node))
        return 0

    def _cost(self, name: str, count: int) -> int:
        key = (name, count)
        if key not in self._costs:
            node = self._nodes.get(name)
            cost = count
            if node is not None:
                fan = self._fan(node)
                if fan and math.prod(node.shape) <= _KEPT:
                    count = min(count, math.prod(node.shape))
                count *= max(1, fan)
                cost = count + sum(self._cost(child, count) for child in _children(node))
            self._costs[key] = cost
        return self._costs[key]

    def affordable(self, name: str, samples: int) -> int:
        """How many places of an output are evaluated."""
        size = math.prod(self._shapes[name])
        count = size if size <= 4 * samples else samples
        while count > _FEWEST and self._cost(name, count) > self._budget:
            count //= 2
        return count

    # values

    def expected(self, name: str, index: Index) -> Value:
        """Evaluates an output at places; its own rounding is not counted."""
        self._memo = {}
        value = self.at(Ref(name), index, stored=False)
        self._memo = {}
        return value

    def at(self, value: Any, index: Index, *, stored: bool = True) -> Value:
        """Evaluates a tensor, or a number, at places.

        Args:
            value: a Ref or a number.
            index: one a dimension.
            stored: whether to count the rounding of what other operations read.

        Returns:
            Values and errors, which broadcast to the shape of the index.
        """
        xp = self._xp
        if not isinstance(value, Ref):
            return xp.asarray(float(value)), 0.0
        shape = self._shapes[value.name]
        index = tuple(0 if size == 1 else places for size, places in zip(shape, index, strict=True))
        if value.name in self._memory:
            line, strides = self._memory[value.name]
            offsets = sum(places * step for places, step in zip(index, strides, strict=True))
            return wide(xp, line, xp.asarray(offsets)), 0.0
        key = (value.name, *map(id, index))
        if key not in self._memo:
            # The index is kept with the result, so that its identity stays its own.
            self._memo[key] = (index, self._evaluated(value.name, index))
        values, errors = self._memo[key][1]
        node = self._nodes[value.name]
        if stored and node.unit:
            errors = errors + STORED * node.unit * xp.abs(values)
        if stored and node.whole:
            errors = errors + (values != xp.rint(values)).astype(np.float64)
        return values, errors

    def _evaluated(self, name: str, index: Index) -> Value:
        node = self._nodes[name]
        if node.method in _SIMPLE:
            return _SIMPLE[node.method](self, node, index)
        if name in self._kept:
            return self._of_kept(name, index)
        size = math.prod(node.shape)
        count = math.prod(np.broadcast_shapes(*(np.shape(places) for places in index)))
        self._asked[name] = self._asked.get(name, 0) + count
        if self._asked[name] > size and size <= _KEPT:
            values, errors = self._flat(node, self._unravelled(self._xp.arange(size), node.shape))
            self._kept[name] = (values, errors)
            return self._of_kept(name, index)
        full = np.broadcast_shapes(*(np.shape(places) for places in index))
        rows = tuple(0 if isinstance(places, int) else self._xp.broadcast_to(places, full).ravel() for places in index)
        values, errors = self._flat(node, rows)
        return values.reshape(full), errors.reshape(full)

    def _of_kept(self, name: str, index: Index) -> Value:
        offsets = self._ravelled(index, self._nodes[name].shape)
        values, errors = self._kept[name]
        return self._xp.take(values, offsets), self._xp.take(errors, offsets)

    def _ravelled(self, index: Index, shape: Sequence[int]) -> Any:
        offsets: Any = 0
        for places, size in zip(index, shape, strict=True):
            offsets = offsets * size + places
        return self._xp.asarray(offsets)

    def _unravelled(self, numbers: Any, shape: Sequence[int]) -> list[Any]:
        """The index of each number in row-major order."""
        index: list[Any] = []
        for size in reversed(shape):
            index.append(0 if size == 1 else numbers % size)
            numbers = numbers // size
        return index[::-1]

    def _flat(self, node: _Node, rows: Sequence[Any]) -> Value:
        """Evaluates an operation that reads many elements for each of its own, some rows at a time."""
        if all(isinstance(places, int) for places in rows):
            rows = (self._xp.zeros(1, np.int64), *rows[1:])
        count = max(len(places) for places in rows if not isinstance(places, int))
        fan = self._fan(node)
        step = max(1, self._chunk // max(1, fan))
        rule = _RULES[node.method]
        parts = []
        for start in range(0, count, step):
            part = [
                places if isinstance(places, int) else places[start : start + step].reshape(-1, 1) for places in rows
            ]
            parts.append(rule(self, node, part, min(step, count - start), fan))
        if len(parts) == 1:
            return parts[0]
        return tuple(self._xp.concatenate([part[which] for part in parts]) for which in range(2))

    def _sums(self, count: int, fan: int, term: Callable[[Any], Value]) -> tuple[Any, Any, Any, Any]:
        """Sums terms, squared terms, errors and squared errors over the elements that are read, some at a time."""
        xp = self._xp
        sums = [xp.zeros(count) for _ in range(4)]
        for values, errors in self._terms(count, fan, term):
            sums[0] += values.sum(axis=1)
            sums[1] += (values * values).sum(axis=1)
            if not _is_exact(errors):
                sums[2] += errors.sum(axis=1)
                sums[3] += (errors * errors).sum(axis=1)
        return sums[0], sums[1], sums[2], sums[3]

    def _terms(self, count: int, fan: int, term: Callable[[Any], Value]) -> Iterable[Value]:
        xp = self._xp
        step = max(1, self._chunk // count)
        for start in range(0, fan, step):
            numbers = xp.arange(start, min(fan, start + step)).reshape(1, -1)
            outside, self._memo = self._memo, {}
            values, errors = term(numbers)
            self._memo = outside
            shape = (count, numbers.shape[1])
            yield xp.broadcast_to(values, shape), errors if _is_exact(errors) else xp.broadcast_to(errors, shape)

    def _carried(self, errors: Any, squared_errors: Any) -> Any:
        share = _SAME_DIRECTION_TF32 if self._tf32 else _SAME_DIRECTION
        return self._xp.sqrt(squared_errors) + share * errors

    def _rounding(self, fan: int) -> float:
        if self._unit > 2.0**-12:
            return (_NARROW_SUM + _NARROW_SUM_ROOT * math.sqrt(fan)) * self._unit
        return (_SUM + _SUM_ROOT * math.sqrt(fan)) * self._unit

    def _multiplied(self, count: int, fan: int, term: Callable[[Any], tuple[Value, Value, Any]]) -> Value:
        """A sum of products, with the bounds of Note [bounds]."""
        xp = self._xp
        # What the squares of a window that lies inside add up to, on average.
        average = xp.zeros(())

        def products(numbers: Any) -> Value:
            nonlocal average
            (a, a_error), (b, b_error), mask = term(numbers)
            values, errors = a * b, 0.0
            average = average + (values * values).mean() * numbers.size
            if not _is_exact(a_error) or not _is_exact(b_error):
                errors = abs(a) * b_error + a_error * abs(b) + a_error * b_error
            if mask is not None:
                values = xp.where(mask, values, 0.0)
                errors = 0.0 if _is_exact(errors) else xp.where(mask, errors, 0.0)
            return values, errors

        total, squares, errors, squared_errors = self._sums(count, fan, products)
        root = xp.sqrt(squares + average)
        factor = self._rounding(fan) + self._product_factor * self._product_unit
        bound = factor * root + 2 * self._product_unit * xp.abs(total)
        return total, bound + self._carried(errors, squared_errors)

    def _operand(self, ref: Ref, index: Index) -> Value:
        """An operand of products: what an engine makes itself it may round to the dtype of the products."""
        values, errors = self.at(ref, index)
        if ref.name in self._nodes and self._product_unit:
            errors = errors + self._product_unit * self._xp.abs(values)
        return values, errors

    def _inside(self, places: Sequence[Any], sizes: Sequence[int]) -> tuple[list[Any], Any]:
        """Moves places into a tensor, and says which were there."""
        xp = self._xp
        mask: Any = None
        moved = []
        for at, size in zip(places, sizes, strict=True):
            inside = (at >= 0) & (at < size)
            mask = inside if mask is None else mask & inside
            moved.append(xp.clip(at, 0, size - 1))
        return moved, mask

    def _convolution_forward(self, node: _Node, rows: Sequence[Any], count: int, fan: int) -> Value:
        get, geometry = node.get, node.get["geometry"]
        _, per_group, *window = get["w_shape"]
        filters = get["w_shape"][0] * per_group // get["x_shape"][1]  # of a group
        n, k, *positions = rows

        def term(numbers: Any) -> tuple[Value, Value, Any]:
            c, *taps = self._unravelled(numbers, (per_group, *window))
            places = [
                o * s + r * d - before
                for o, r, s, d, before in zip(
                    positions, taps, geometry.stride, geometry.dilation, geometry.before, strict=True
                )
            ]
            places, mask = self._inside([self._xp.asarray(p) for p in places], get["x_shape"][2:])
            x = self._operand(get["a"], (n, k // filters * per_group + c, *places))
            return x, self._operand(get["b"], (k, c, *taps)), mask

        return self._scaled(self._multiplied(count, fan, term), get["alpha"])

    def _convolution_backward_data(self, node: _Node, rows: Sequence[Any], count: int, fan: int) -> Value:
        get, geometry = node.get, node.get["geometry"]
        _, per_group, *window = get["w_shape"]
        filters = get["w_shape"][0] * per_group // get["x_shape"][1]
        n, c, *places = rows

        def term(numbers: Any) -> tuple[Value, Value, Any]:
            k, *taps = self._unravelled(numbers, (filters, *window))
            k = c // per_group * filters + k
            scaled = [
                self._xp.asarray(x + before - r * d)
                for x, r, d, before in zip(places, taps, geometry.dilation, geometry.before, strict=True)
            ]
            positions, mask = self._inside(
                [at // s for at, s in zip(scaled, geometry.stride, strict=True)], get["y_shape"][2:]
            )
            for at, s in zip(scaled, geometry.stride, strict=True):
                if s > 1:
                    mask = mask & (at % s == 0)
            dy = self._operand(get["a"], (n, k, *positions))
            return dy, self._operand(get["b"], (k, c % per_group, *taps)), mask

        return self._scaled(self._multiplied(count, fan, term), get["alpha"])

    def _convolution_backward_filter(self, node: _Node, rows: Sequence[Any], count: int, fan: int) -> Value:
        get, geometry = node.get, node.get["geometry"]
        per_group = get["w_shape"][1]
        filters = get["w_shape"][0] * per_group // get["x_shape"][1]
        k, c, *taps = rows

        def term(numbers: Any) -> tuple[Value, Value, Any]:
            n, *positions = self._unravelled(numbers, (get["y_shape"][0], *get["y_shape"][2:]))
            places = [
                o * s + r * d - before
                for o, r, s, d, before in zip(
                    positions, taps, geometry.stride, geometry.dilation, geometry.before, strict=True
                )
            ]
            places, mask = self._inside([self._xp.asarray(p) for p in places], get["x_shape"][2:])
            x = self._operand(get["a"], (n, k // filters * per_group + c, *places))
            return x, self._operand(get["b"], (n, k, *positions)), mask

        return self._scaled(self._multiplied(count, fan, term), get["alpha"])

    def _scaled(self, value: Value, alpha: float) -> Value:
        return alpha * value[0], abs(alpha) * value[1]

    def _matmul(self, node: _Node, rows: Sequence[Any], count: int, fan: int) -> Value:
        *batch, m, n = rows

        def term(numbers: Any) -> tuple[Value, Value, Any]:
            a = self._operand(node.get["a"], (*batch, m, numbers))
            return a, self._operand(node.get["b"], (*batch, numbers, n)), None

        return self._multiplied(count, fan, term)

    def _reduction(self, node: _Node, rows: Sequence[Any], count: int, fan: int) -> Value:
        xp = self._xp
        mode, x = node.get["mode"], node.get["x"]
        full = self._shapes[x.name]
        reduced = [axis for axis, size in enumerate(full) if size != node.shape[axis]]

        def term(numbers: Any) -> Value:
            index = list(rows)
            for axis, places in zip(reduced, self._unravelled(numbers, [full[a] for a in reduced]), strict=True):
                index[axis] = places
            values, errors = self.at(x, tuple(index))
            if mode in ("norm1", "amax"):
                return xp.abs(values), errors
            if mode == "norm2":
                return values * values, 0.0 if _is_exact(errors) else (2 * xp.abs(values) + errors) * errors
            return values, errors

        if mode in ("add", "avg", "norm1", "norm2"):
            total, squares, errors, squared_errors = self._sums(count, fan, term)
            # Sums on the way are at most about as large as the result, or as the root of the squares.
            largest = xp.maximum(xp.abs(total), xp.sqrt(squares))
            error = self._carried(errors, squared_errors) + self._partial_sums(fan) * largest
            if mode == "avg":
                return total / fan, error / fan
            if mode == "norm2":
                low, high = xp.sqrt(xp.maximum(total - error, 0.0)), xp.sqrt(total + error)
                return xp.sqrt(total), high - low
            return total, error
        return self._extreme(mode, count, fan, term)

    def _partial_sums(self, fan: int) -> float:
        return (64.0 + 4.0 * math.sqrt(fan)) * self._unit

    def _extreme(self, mode: str, count: int, fan: int, term: Callable[[Any], Value]) -> Value:
        """min, max, amax, mul and mul_no_zeros."""
        xp = self._xp
        parts: list[Value] = []
        for values, errors in self._terms(count, fan, term):
            errors = xp.zeros(values.shape) if _is_exact(errors) else errors
            if mode.startswith("mul"):
                if mode == "mul_no_zeros":
                    values = xp.where(values == 0, 1.0, values)
                made = values.prod(axis=1)
                size = xp.abs(values)
                parts.append((made, (size + errors).prod(axis=1) - size.prod(axis=1)))
            else:
                pick = "min" if mode == "min" else "max"
                parts.append((getattr(values, pick)(axis=1), errors.max(axis=1)))
        result, error = parts[0]
        for values, errors in parts[1:]:
            if mode.startswith("mul"):
                error = error * (xp.abs(values) + errors) + xp.abs(result) * errors
                result = result * values
            else:
                result = (xp.minimum if mode == "min" else xp.maximum)(result, values)
                error = xp.maximum(error, errors)
        if mode.startswith("mul"):
            error = error + 2 * fan * self._unit * xp.abs(result)
        return result, error

    def _windows(self, node: _Node, rows: Sequence[Any], numbers: Any) -> tuple[Value, Any]:
        """What a resampling reads, and with which weights."""
        n, c, *positions = rows
        taps = node.get["taps"]
        weight: Any = 1.0
        places = []
        offsets = self._unravelled(numbers, [table.index.shape[1] for table in taps])
        for o, t, table in zip(positions, offsets, taps, strict=True):
            at = self._xp.asarray(o * table.index.shape[1] + t)
            places.append(self._xp.take(self._xp.asarray(table.index.ravel()), at))
            weight = weight * self._xp.take(self._xp.asarray(table.weight.ravel()), at)
        return self.at(node.get["x"], (n, c, *places)), weight

    def _resample_forward(self, node: _Node, rows: Sequence[Any], count: int, fan: int) -> Value:
        xp = self._xp
        if node.get["mode"] == "max":

            def candidates(numbers: Any) -> Value:
                (values, errors), weight = self._windows(node, rows, numbers)
                return xp.where(weight != 0, values, -math.inf), errors

            return self._extreme("max", count, fan, candidates)

        def term(numbers: Any) -> Value:
            (values, errors), weight = self._windows(node, rows, numbers)
            return weight * values, 0.0 if _is_exact(errors) else weight * errors

        total, squares, errors, squared_errors = self._sums(count, fan, term)
        return total, self._carried(errors, squared_errors) + _ELEMENTARY * fan * self._unit * xp.sqrt(squares)

    def _resample_index(self, node: _Node, rows: Sequence[Any], count: int, fan: int) -> Value:
        """Which element of a window is taken; where two are as large as one another, either."""
        xp = self._xp
        numbers = xp.arange(fan).reshape(1, -1)
        (values, errors), weight = self._windows(node, rows, numbers)
        weight = xp.broadcast_to(weight, (count, fan))
        if node.get["mode"] == "nearest":
            return weight.argmax(axis=1).astype(np.float64), xp.zeros(count)
        values = xp.where(weight != 0, values, -math.inf)
        errors = xp.broadcast_to(xp.asarray(errors), values.shape)
        best = values.argmax(axis=1)
        least = (values - errors).max(axis=1)
        rivals = (values + errors >= least.reshape(-1, 1)).sum(axis=1)
        return best.astype(np.float64), float(fan) * (rivals > 1).astype(np.float64)

    def _transposed(self, node: _Node) -> list[tuple[Any, Any, Any]]:
        """For each input place of each dimension: which outputs read it, by which tap, with which weight."""
        if "transposed" not in node.get:
            node.get["transposed"] = [
                _transposed(table, size) for table, size in zip(node.get["taps"], node.shape[2:], strict=True)
            ]
        tables: list[tuple[Any, Any, Any]] = node.get["transposed"]
        return tables

    def _resample_backward(self, node: _Node, rows: Sequence[Any], count: int, fan: int) -> Value:
        xp = self._xp
        n, c, *places = rows
        tables = self._transposed(node)
        index = node.get["index"]
        widths = [taps.index.shape[1] for taps in node.get["taps"]]

        def term(numbers: Any) -> Value:
            entries = self._unravelled(numbers, [table[0].shape[1] for table in tables])
            positions = []
            weight: Any = 1.0
            number: Any = 0
            for x, entry, table, width in zip(places, entries, tables, widths, strict=True):
                at = xp.asarray(x * table[0].shape[1] + entry)
                output, tap, share = (xp.take(xp.asarray(each.ravel()), at) for each in table)
                positions.append(output)
                number = number * width + tap
                weight = weight * (xp.maximum(share, 0.0) if index is None else (share >= 0))
            values, errors = self.at(node.get["x"], (n, c, *positions))
            if index is not None:
                chosen, doubt = self.at(index, (n, c, *positions))
                weight = weight * (chosen == number)
                if not _is_exact(doubt):
                    errors = errors + xp.where(doubt > 0, xp.abs(values), 0.0)
            return weight * values, 0.0 if _is_exact(errors) else errors * xp.ones_like(weight * values)

        total, squares, errors, squared_errors = self._sums(count, fan, term)
        return total, self._carried(errors, squared_errors) + _ELEMENTARY * fan * self._unit * xp.sqrt(squares)

    # operations that read as many elements as they give

    def _pointwise(self, node: _Node, index: Index) -> Value:
        xp = self._xp
        get = dict(node.get)
        mode, axis = get.pop("mode"), get.pop("axis", None)
        operands = [get.pop(role, None) for role in ("x", "b", "t")]
        if mode == "gen_index":
            return xp.asarray(index[axis % len(node.shape)]).astype(np.float64), 0.0
        given = [self.at(operand, index) for operand in operands if operand is not None]

        def function(*values: Any) -> Any:
            return graph_reference.pointwise(mode, *values, xp=xp, **get)

        values = function(*(value for value, _ in given))
        error: Any = 0.0
        moved = [position for position, (_, doubt) in enumerate(given) if not _is_exact(doubt)]
        for position in moved:
            change: Any = 0.0
            for sign in (1.0, -1.0):
                arguments = [value for value, _ in given]
                arguments[position] = arguments[position] + sign * given[position][1]
                change = xp.maximum(change, self._difference(function(*arguments), values))
            error = error + change
        if len(moved) > 1:
            together = function(*(value if _is_exact(doubt) else value + doubt for value, doubt in given))
            error = xp.maximum(error, self._difference(together, values))
        return values, error + self._own_error(mode, values, given)

    def _difference(self, moved: Any, values: Any) -> Any:
        """How far moving an input moves a result: nothing between equal infinities or NaNs, any way to or from NaN."""
        xp = self._xp
        same = (moved == values) | (xp.isnan(moved) & xp.isnan(values))
        change = xp.abs(moved - values)
        return xp.where(same, 0.0, xp.where(xp.isnan(change), math.inf, change))

    def _own_error(self, mode: str, values: Any, given: Sequence[Value]) -> Any:
        xp = self._xp
        if mode in _EXACT_MODES or mode.startswith(("cmp_", "logical_")):
            return 0.0
        size = xp.where(xp.isfinite(values), xp.abs(values), 0.0)
        if mode not in _APPROXIMATE_MODES:
            if mode in ("add", "sub", "add_square", "mod", "floor_mod"):
                size = size + sum(xp.abs(value) for value, _ in given)
            return _ELEMENTARY * self._unit * size
        share = _APPROXIMATE if self._unit > UNITS["float64"] else _ELEMENTARY * _ELEMENTARY * self._unit
        of = _APPROXIMATE_MODES[mode]
        if of == "1":
            size = size + 1.0
        elif of == "x":
            size = size + xp.abs(given[0][0])
        elif of == "d":
            size = size + xp.abs(given[0][0]) * (1.0 + xp.abs(given[1][0]))
        if mode in ("sqrt", "rsqrt", "div", "reciprocal"):
            share = share if self._unit == UNITS["float64"] else 2.0**-18
        return share * size

    def _reshape(self, node: _Node, index: Index) -> Value:
        x = node.get["x"]
        return self.at(x, tuple(self._unravelled(self._ravelled(index, node.shape), self._shapes[x.name])))

    def _concatenate(self, node: _Node, index: Index) -> Value:
        xp = self._xp
        axis = node.get["axis"] % len(node.shape)
        place = xp.asarray(index[axis])
        start = 0
        values, errors = xp.zeros(()), xp.zeros(())
        for tensor in node.get["tensors"]:
            size = self._shapes[tensor.name][axis]
            moved = tuple(xp.clip(place - start, 0, size - 1) if a == axis else at for a, at in enumerate(index))
            part, doubt = self.at(tensor, moved)
            values = xp.where(place >= start, part, values)
            errors = xp.where(place >= start, xp.asarray(doubt), errors)
            start += size
        return values, errors


def _children(node: _Node) -> list[str]:
    """The tensors that an operation reads."""
    found = []
    for value in node.get.values():
        for each in value if isinstance(value, tuple) else (value,):
            found += [each.name] if isinstance(each, Ref) else []
    return found


def _transposed(taps: graph_reference.Taps, size: int) -> tuple[Any, Any, Any]:
    """For each input place: outputs that read it, their taps and weights, filled up with weight -1."""
    entries: list[list[tuple[int, int, float]]] = [[] for _ in range(size)]
    for output, (places, weights) in enumerate(zip(*taps, strict=True)):
        for tap, (place, weight) in enumerate(zip(places, weights, strict=True)):
            if weight:
                entries[place].append((output, tap, weight))
    width = max(1, *(len(each) for each in entries))
    table = np.full((3, size, width), -1.0)
    table[:2] = 0
    for place, each in enumerate(entries):
        for number, entry in enumerate(each):
            table[:, place, number] = entry
    return table[0].astype(np.int64), table[1].astype(np.int64), table[2]


_READERS: dict[str, Callable[[Evaluator, Operation, dict[str, tuple[int, ...]]], None]] = {
    "generate_statistics": Evaluator._read_statistics,
    "batch_norm_finalize": Evaluator._read_finalize,
    "norm_forward": Evaluator._read_norm_forward,
    "norm_backward": Evaluator._read_norm_backward,
    "batch_norm_backward_weights": Evaluator._read_weights,
    "resample_forward": Evaluator._read_resample_forward,
    "resample_backward": Evaluator._read_resample_backward,
}
_SIMPLE: dict[str, Callable[[Evaluator, _Node, Index], Value]] = {
    "pointwise": Evaluator._pointwise,
    "reshape": Evaluator._reshape,
    "concatenate": Evaluator._concatenate,
}
_RULES: dict[str, Callable[[Evaluator, _Node, Sequence[Any], int, int], Value]] = {
    "convolution_forward": Evaluator._convolution_forward,
    "convolution_backward_data": Evaluator._convolution_backward_data,
    "convolution_backward_filter": Evaluator._convolution_backward_filter,
    "matmul": Evaluator._matmul,
    "reduction": Evaluator._reduction,
    "resample_forward": Evaluator._resample_forward,
    "resample_index": Evaluator._resample_index,
    "resample_backward": Evaluator._resample_backward,
}
