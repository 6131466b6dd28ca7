"""GraphProblem: checked as a Graph checks it, printed as one line that reads back."""

import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flcuda
from flcuda.cudnn.graph import Graph
from flcuda.device import DTYPES, contiguous_strides
from flcuda.finder.graph_problem import GraphProblem, GraphTensor, Operation, Ref
from flcuda.finder.problem import ConvolutionProblem, Problem

SILU = (
    "graph float32 tensor_op; x float16 4x16x7x5 nhwc; w float16 8x16x3x3 nhwc; b float16 1x8x1x1 nhwc; "
    "t1 = convolution_forward(%x, %w, padding=1, stride=2); t2 = pointwise(add, %t1, %b); "
    "y = pointwise(swish_fwd, %t2); out t1 float16 nhwc; out y float16 nhwc"
)


def tensor(name, shape, dtype="float32", layout="nchw", **changes):
    return GraphTensor(name, shape, contiguous_strides(shape, layout), dtype, **changes)


def graph(statements, head="graph float32 fma"):
    return GraphProblem.parse(f"{head}; x float32 2x3x4x5; {statements}")


class TestProblem:
    def test_is_a_problem(self):
        problem = Problem.parse(SILU)
        assert isinstance(problem, GraphProblem)
        assert isinstance(problem, flcuda.Problem)
        assert flcuda.GraphProblem is GraphProblem
        assert (problem.inputs, problem.outputs) == (("x", "w", "b"), ("t1", "y"))
        assert problem.operands == ("x", "w", "b", "t1", "y")
        assert problem.kind == "graph"
        assert problem.precision == "float16"
        assert problem.math == "tensor_op"
        assert not problem.accumulate
        assert problem.shape_of("y") == (4, 8, 4, 3)
        assert problem.strides_of("y") == contiguous_strides((4, 8, 4, 3), "nhwc")
        assert problem.layout_of("b") == "nhwc"
        assert problem.alignment_of("t1") == 16
        with pytest.raises(KeyError, match="t2"):
            problem.shape_of("t2")

    def test_made_by_hand_equals_the_line(self):
        problem = GraphProblem(
            tensors=(
                tensor("x", (4, 16, 7, 5), "float16", "nhwc"),
                tensor("w", (8, 16, 3, 3), "float16", "nhwc"),
                tensor("b", (1, 8, 1, 1), "float16", "nhwc"),
            ),
            operations=(
                Operation(
                    "convolution_forward",
                    (("w", Ref("w")), ("x", Ref("x")), ("stride", 2), ("padding", np.int64(1)), ("alpha", 1)),
                    ("t1",),
                ),
                Operation("add", (("a", Ref("t1")), ("b", Ref("b"))), ("t2",)),
                Operation("silu", (("x", Ref("t2")), ("beta", 1)), ("y",)),
            ),
            results=(
                tensor("t1", (4, 8, 4, 3), "float16", "nhwc"),
                tensor("y", (4, 8, 4, 3), "float16", "nhwc"),
            ),
            intermediate="float32",
        )
        assert problem == GraphProblem.parse(SILU)
        assert hash(problem) == hash(GraphProblem.parse(SILU))
        assert str(problem) == SILU

    def test_the_graph_is_new_each_time_and_has_the_inputs_first(self):
        problem = GraphProblem.parse(SILU)
        made, tensors = problem.graph()
        again, _ = problem.graph()
        assert isinstance(made, Graph)
        assert made is not again
        assert [tensors[name].uid for name in problem.inputs] == [1, 2, 3]
        assert list(tensors) == ["x", "w", "b", "t1", "t2", "y"]
        assert [tensors[name].virtual for name in ("t1", "t2", "y")] == [False, True, False]
        assert tensors["y"].dtype == "float16"
        assert tensors["t2"].dtype == "float32"

    def test_needs_neither_cudnn_nor_cupy(self):
        code = (
            "import sys; from flcuda.finder.problem import Problem; from flcuda.cudnn import library;"
            f"p = Problem.parse({SILU!r}); assert Problem.parse(str(p)) == p; p.convolutions;"
            "assert not library.is_loaded(); assert 'cupy' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_random_arrays(self):
        arrays = Problem.parse(SILU).random_arrays(seed=3, device="cpu")
        assert list(arrays) == ["x", "w", "b", "out"]
        assert isinstance(arrays["out"], tuple)
        assert [array.shape for array in arrays["out"]] == [(4, 8, 4, 3), (4, 8, 4, 3)]
        assert all(np.isnan(array.astype(np.float32)).all() for array in arrays["out"])
        values = arrays["x"].astype(np.float64)
        assert values.shape == (4, 16, 7, 5)
        assert 0.8 < values.std() < 1.2
        again = Problem.parse(SILU).random_arrays(seed=3, device="cpu")
        assert (again["w"] == arrays["w"]).all()
        assert not (arrays["w"].reshape(-1)[:8] == arrays["b"].reshape(-1)).any()

    def test_one_output_is_no_tuple_and_integers_are_valid_indices(self):
        problem = graph(
            "dy float32 2x3x2x2; i int8 2x3x2x2; dx = resample_backward(max, %dy, (2, 3, 4, 4), window=2, stride=2, "
            "index=%i); y = reduction(add, %x, (1, 3, 1, 1)); out dx; out y"
        )
        arrays = problem.random_arrays(device="cpu")
        assert arrays["i"].dtype == np.int8
        assert not arrays["i"].any()
        assert graph("y = tanh(%x); out y").random_arrays(device="cpu")["out"].shape == (2, 3, 4, 5)

    def test_integers_as_output(self):
        problem = graph("y, i = resample_forward(max, %x, window=2, stride=2, index=True); out y; out i")
        assert problem.dtype_of("i") == "int8"
        assert problem.random_arrays(device="cpu")["out"][1].dtype == np.int8

    @pytest.mark.parametrize(
        ("statements", "contracts"),
        [
            ("y = tanh(%x); out y", False),
            ("w float32 4x3x1x1; y = convolution_forward(%x, %w); out y", True),
            ("b float32 2x3x5x2; y = matmul(%x, %b); out y", True),
            ("s, q = generate_statistics(%x); out s; out q", False),
        ],
    )
    def test_contracts(self, statements, contracts):
        assert graph(statements).contracts is contracts

    def test_math_and_intermediate(self):
        assert GraphProblem.parse("graph; x bfloat16 2x3x4; y = tanh(%x); out y").math == "tensor_op"
        assert GraphProblem.parse("graph; x float32 2x3x4; y = tanh(%x); out y").math == "fma"
        tf32 = GraphProblem.parse("graph tensor_op; x float32 2x3x4; y = tanh(%x); out y")
        assert tf32.precision == "tf32"
        half = GraphProblem.parse("graph intermediate:float16; x float16 2x3x4; t = tanh(%x); y = tanh(%t); out y")
        assert half.graph()[1]["t"].dtype == "float16"
        assert "intermediate:float16" in str(half)
        same = GraphProblem.parse("graph intermediate:float32; x float16 2x3x4; y = tanh(%x); out y")
        assert same.intermediate == ""


class TestConvolutions:
    @pytest.mark.parametrize(
        "line",
        [
            "forward n2 c4 9x7 k6 3x2 p1x0 s2x1 float16 nhwc",
            "backward_data n2 c4 9x7 k6 3x2 p1x0 s2x1 d1x2 tf32 nchw",
            "backward_filter n2 c4 9x7 k6 3x2 p0:1x0 g2 float64 nchw",
            "forward n1 c4 5x6x7 k2 3x3x1 p0x1x0 s2 bfloat16 nhwc",
        ],
    )
    def test_are_what_they_would_be_alone(self, line):
        wanted = ConvolutionProblem.parse(line)
        first, second, out = wanted.operands
        shape = {"backward_data": ("x_shape", wanted.x_shape), "backward_filter": ("w_shape", wanted.w_shape)}
        given = dict([shape[wanted.direction]]) if wanted.direction in shape else {}
        padding = tuple(zip(wanted.padding_before, wanted.padding_after, strict=True))
        arguments = {**given, "padding": padding, "stride": wanted.stride, "dilation": wanted.dilation}
        method = f"convolution_{wanted.direction}"
        roles = {"forward": ("x", "w"), "backward_data": ("dy", "w"), "backward_filter": ("x", "dy")}[wanted.direction]
        problem = GraphProblem(
            tensors=tuple(
                GraphTensor(name, wanted.shape_of(name), wanted.strides_of(name), wanted.dtype_of(name))
                for name in (first, second)
            ),
            operations=(
                Operation(method, ((roles[0], Ref(first)), (roles[1], Ref(second)), *arguments.items()), ("t",)),
                Operation("tanh", (("x", Ref("t")),), (out,)),
            ),
            results=(GraphTensor(out, wanted.shape_of(out), wanted.strides_of(out), wanted.dtype_of(out)),),
            compute=wanted.compute,
            math=wanted.math,
        )
        assert problem.convolutions == (wanted,)
        assert GraphProblem.parse(str(problem)) == problem

    def test_of_something_computed_inside(self):
        problem = GraphProblem.parse(
            "graph; x float16 2x8x6x6 nhwc; s float32 1x8x1x1 nhwc; w float16 16x8x3x3 nhwc; t = mul(%x, %s); "
            "y = convolution_forward(%t, %w); z = convolution_backward_filter(%t, %y, (16, 8, 3, 3)); out y; out z"
        )
        assert [(entry.direction, entry.precision) for entry in problem.convolutions] == [
            ("forward", "float16"),
            ("backward_filter", "float16"),
        ]
        assert problem.convolutions[0].x_shape == (2, 8, 6, 6)
        assert graph("y = tanh(%x); out y").convolutions == ()


BAD = [
    ("y = convolve(%x); out y", ValueError, "'convolve' is no operation; there are convolution_forward"),
    ("y = tensor(%x, float32); out y", ValueError, "'tensor' is no operation"),
    ("y = _make(%x); out y", ValueError, "'_make' is no operation"),
    ("y = build(); out y", ValueError, "'build' is no operation"),
    ("y = tanh(%x, beta=1.0); out y", ValueError, "operation tanh: 'beta' is no argument; there are x"),
    ("y = tanh(%x, name=z); out y", ValueError, "operation tanh: 'name' is no argument"),
    ("y = tanh(%x, x=%x); out y", ValueError, "operation tanh: argument 'x' is given twice"),
    ("y = pointwise(tanh_fwd, %x, parameters=1); out y", ValueError, "'parameters' is no argument"),
    ("y = pointwise(tanh_fwd, %x, swish=1.0); out y", TypeError, "swish is no parameter"),
    ("y = tanh(); out y", TypeError, "operation tanh: argument 'x' is missing"),
    ("y = reduction(add, %x); out y", TypeError, "operation reduction: argument 'shape' is missing"),
    ("y = tanh(%z); out y", ValueError, "operation 1, pointwise: x: there is no tensor z yet; there are x"),
    ("y = tanh(%y); out y", ValueError, "there is no tensor y yet"),
    ("y = elu(%x, alpha=%x); out y", TypeError, "operation elu: alpha: %x must be a number"),
    ("y = elu(%x, alpha=True); out y", TypeError, "alpha: True is a truth value"),
    ("y, i = resample_forward(max, %x, window=2, index=1); out y", TypeError, "index: 1 must be True or False"),
    ("w float32 4x2x1x1; y = convolution_forward(%x, %w); out y", ValueError, "convolution_forward 'y': w: 'w'"),
    ("w float32 4x3x1x1; y = convolution_forward(%x, %w, beta=1); out y", ValueError, "beta 1.0 must be 0"),
    ("y, _ = resample_forward(max, %x, window=(2, 2, 2)); out y", ValueError, "window"),
    ("x float32 2x3; y = tanh(%x); out y", ValueError, "tensor x: the name is there twice"),
    ("x = tanh(%x); out x", ValueError, "result x: the name is there twice"),
    ("y = tanh(%x); y = tanh(%x); out y", ValueError, "result y: the name is there twice"),
    ("y, z = tanh(%x); out y", ValueError, "must be 1 names"),
    ("y, i = resample_forward(max, %x, window=2); out y", ValueError, "result i: it gives nothing there"),
    ("y = generate_statistics(%x); out y", ValueError, "must be 2 names"),
    ("y = tanh(%x); z = tanh(%x); out y", ValueError, "'z.y'.*is used by no operation and is no output"),
    ("z float32 2x3; y = tanh(%x); out y", ValueError, "the input 'z'.*is used by no operation"),
    ("y = tanh(%x)", ValueError, "results: there is none"),
    ("y = tanh(%x); out z", ValueError, "output z: no operation gives it; there are y"),
    ("y = tanh(%x); out x; out y", ValueError, "output x: no operation gives it"),
    ("y = tanh(%x); out y; out y", ValueError, "y is an output twice"),
    ("y = tanh(%x); out y float15", ValueError, "'float15' is not understood in 'out y float15'"),
    ("y = tanh(%x); out y nhwc nchw", ValueError, "'nchw' comes after another layout"),
    ("y = tanh(%x); out y s:1x1x1x1", ValueError, "output 'y.y': strides: elements of shape"),
    ("y = tanh(%x); out y 2x3x4x6", ValueError, r"output y: shape \(2, 3, 4, 6\) must be \(2, 3, 4, 5\)"),
    ("y = tanh(%x); out y align:3", ValueError, "alignment: 3"),
    ("z nchw; y = tanh(%x); out y", ValueError, "a dtype such as float16 is missing in 'z nchw'"),
    ("z float32 nchw; y = tanh(%x); out y", ValueError, "a shape such as"),
    ("z float32 2x3 nchw s:3x1; y = tanh(%x); out y", ValueError, "give a layout or strides, not both"),
    ("out float32 2x3; y = tanh(%x); out y", ValueError, "output float32"),
    ("hello; y = tanh(%x); out y", ValueError, "'hello' is neither an input, an operation nor an output"),
    ("y = tanh(%x %x); out y", ValueError, "a comma is missing"),
    ("y = add(%x,,%x); out y", ValueError, "',' stands where an argument should be"),
    ("y = tanh(x=); out y", ValueError, "cut short"),
    ("y = tanh(%x, 3=4); out y", ValueError, "'3' is no name of an argument"),
    ("y = tanh(%x, 3); out y", ValueError, "tanh takes 1 arguments without a name"),
    ("y = tanh(%x, dtype='float16'); out y", ValueError, "is not understood"),
    ("y = add(%x, 1..2); out y", ValueError, "'1..2' is no number"),
    ("y = reduction(add, %x, (2, 3); out y", ValueError, "cut short"),
    ("_, q = generate_statistics(%x); out q", ValueError, "is used by no operation and is no output"),
]


class TestBadInput:
    @pytest.mark.parametrize(("statements", "kind", "text"), BAD)
    def test_says_what(self, statements, kind, text):
        with pytest.raises(kind, match=text):
            graph(statements)

    @pytest.mark.parametrize(
        ("head", "text"),
        [
            ("graph float31", "'float31' is not understood in 'graph float31'"),
            ("graph fma tensor_op", "'tensor_op' comes after another math"),
            ("graph float64 tensor_op", "not for graphs that compute in float64"),
            ("graph intermediate:no", "intermediate: 'no'"),
            ("forward", "a graph begins with the word graph"),
        ],
    )
    def test_head(self, head, text):
        with pytest.raises(ValueError, match=text):
            graph("y = tanh(%x); out y", head)

    def test_fields(self):
        x = tensor("x", (2, 3))
        tanh = Operation("tanh", (("x", Ref("x")),), ("y",))
        with pytest.raises(ValueError, match="results: there is none"):
            GraphProblem((x,), (tanh,), ())
        with pytest.raises(TypeError, match="tensors: 'x' is no GraphTensor"):
            GraphProblem(("x",), (tanh,), (tensor("y", (2, 3)),))
        with pytest.raises(ValueError, match=r"output y: shape \(3, 2\) must be \(2, 3\)"):
            GraphProblem((x,), (tanh,), (tensor("y", (3, 2)),))
        with pytest.raises(ValueError, match="math 'tf32' must be one of"):
            GraphProblem((x,), (tanh,), (tensor("y", (2, 3)),), math="tf32")
        with pytest.raises(ValueError, match="y, y has a name twice"):
            GraphProblem((x,), (tanh,), (tensor("y", (2, 3)), tensor("y", (2, 3))))
        with pytest.raises(TypeError, match="line must be a string"):
            GraphProblem.parse(3)
        with pytest.raises(ValueError, match="a graph begins"):
            GraphProblem.parse("")

    @pytest.mark.parametrize("name", ["out", "_", "1x", "a b", "", "ü", 3])
    def test_names(self, name):
        with pytest.raises(ValueError, match="name"):
            tensor(name, (2, 3))
        with pytest.raises(ValueError, match="name"):
            GraphProblem(
                (tensor("x", (2, 3)),),
                (Operation("tanh", (("x", Ref("x")),), (name,)),),
                (tensor("y", (2, 3)),),
            )

    @pytest.mark.parametrize(
        ("value", "kind"), [(math.nan, ValueError), ("a b", ValueError), (1j, TypeError), (None, TypeError)]
    )
    def test_values(self, value, kind):
        with pytest.raises(kind):
            GraphProblem(
                (tensor("x", (2, 3)),),
                (Operation("add", (("a", Ref("x")), ("b", value)), ("y",)),),
                (tensor("y", (2, 3)),),
            )

    def test_tensors(self):
        with pytest.raises(ValueError, match="x: dtype 'float8_e5m2' must be one of"):
            tensor("x", (2, 3), "float8_e5m2")
        with pytest.raises(TypeError, match=r"x: shape \(2, 1.5\) must be whole numbers"):
            GraphTensor("x", (2, 1.5), (1, 1), "float32")


LINES = [
    SILU,
    "graph float32 fma; x float32 2x3x4x5 nchw; s, q = generate_statistics(%x); out q float32 nchw; out s float32 nchw",
    "graph float32 tensor_op; x float16 64 nchw; y = pointwise(relu_fwd, %x, lower_slope=0.01, upper_clip=6.0); "
    "out y float32 nchw align:4",
    "graph float32 fma; x float32 2x3x4x5 s:100x25x6x1; y, _ = resample_forward(bilinear, %x, window=2, stride=1/2, "
    "padding=((0, 1), (1, 0))); out y float32 s:1000x200x20x1",
    "graph float32 fma; x float32 2x3x4x5 nchw; b float32 2x1x4x5 nchw; y = concatenate((%x, %b), 1); "
    "z = concatenate((%x,), 0); out y float32 nchw; out z float32 nchw",
    "graph float32 fma; x float32 2x3x4x5 nchw; s float32 1x3x1x1 nchw; y, m, v, _, _ = norm_forward(batch, %x, %s, "
    "%s, epsilon=0.001); out y float32 nchw; out m float32 nchw; out v float32 nchw",
    "graph float32 fma; x float32 2x3x4x5 nchw; y = pointwise(add, %x, -1e-07); z = pointwise(max, %x, -inf); "
    "out y float32 nchw; out z float32 nchw",
    "graph int32 fma; x int32 2x3x4x5 nchw; y = pointwise(add, %x, 2.0); out y int32 nchw",
    "graph float32 fma; t float32 1x3x1x1 nchw; q float32 1x3x1x1 nchw; a, b, m, i, _, _ = "
    "batch_norm_finalize(%t, %q, %t, %t, count=24); out a float32 nchw; out b float32 nchw; out m float32 nchw; "
    "out i float32 nchw",
]


class TestLine:
    @pytest.mark.parametrize("line", LINES)
    def test_reads_back(self, line):
        problem = GraphProblem.parse(line)
        assert str(problem) == line
        assert GraphProblem.parse(str(problem)) == problem
        # wrapped for a terminal, and without blanks where none are needed
        assert GraphProblem.parse(line.replace("; ", ";\n  ").replace(", ", ",")) == problem

    @pytest.mark.parametrize(
        ("short", "long"),
        [
            ("silu(%x)", "pointwise(swish_fwd, %x)"),
            ("silu(%x, beta=2)", "pointwise(swish_fwd, %x, swish_beta=2.0)"),
            ("pointwise(swish_fwd, %x, swish_beta=1)", "pointwise(swish_fwd, %x)"),
            ("relu(%x)", "pointwise(relu_fwd, %x)"),
            ("relu(%x, upper_clip=6)", "pointwise(relu_fwd, %x, upper_clip=6.0)"),
            ("relu_backward(%x, %x)", "pointwise(relu_bwd, %x, %x)"),
            ("add(%x, 1)", "pointwise(add, %x, 1.0)"),
            ("add(a=%x, b=-0.0)", "pointwise(add, %x, 0.0)"),
            ("mul(2, %x, dtype=float16)", "pointwise(mul, 2.0, %x, dtype=float16)"),
            ("gelu(x=%x)", "pointwise(gelu_fwd, %x)"),
            ("identity(%x, dtype=None)", "pointwise(identity, %x)"),
            ("pointwise(b=%x, x=%x, mode=sub, alpha1=1)", "pointwise(sub, %x, %x)"),
            ("reduction(avg, %x, shape=(1,3,1,1,), dtype=float32)", "reduction(avg, %x, (1, 3, 1, 1), dtype=float32)"),
            ("convolution_backward_data(%x, w=%w, x_shape=(2, 1, 4, 5))", None),
            ("convolution_backward_data(%x, %w, (2, 1, 4, 5), stride=(1, 1), padding=((0, 0), (0, 0)))", None),
            (
                "resample_forward(max, %x, window=(3, 3), stride=(2, 2), padding=((1, 1), (0, 0)))",
                "resample_forward(max, %x, window=3, stride=2, padding=(1, 0))",
            ),
            (
                "resample_forward(max, %x, window=(3, 2), padding=((0, 1), (1, 1)))",
                "resample_forward(max, %x, window=(3, 2), padding=((0, 1), (1, 1)))",
            ),
        ],
    )
    def test_one_form(self, short, long):
        more = "w float32 3x1x1x1; " if "%w" in short else ""
        result = "y, _" if "resample" in short else "y"
        printed = str(graph(f"{more}{result} = {short}; out y"))
        wanted = long or "convolution_backward_data(%x, %w, (2, 1, 4, 5))"
        assert f"; {result} = {wanted}; " in printed

    def test_values_keep_their_meaning(self):
        (operation,) = GraphProblem.parse(LINES[3]).operations
        assert operation.get("stride") == Fraction(1, 2)
        assert operation.get("padding") == ((0, 1), (1, 0))
        assert operation.get("index") is False
        assert operation.refs == ("x",)
        with pytest.raises(ValueError, match="'zoom' was not given"):
            operation.get("zoom")
        first, _ = GraphProblem.parse(LINES[4]).operations
        assert first.get("tensors") == (Ref("x"), Ref("b"))
        assert first.refs == ("x", "b")
        assert GraphProblem.parse(SILU).operations[2].get("swish_beta") == 1.0
        assert GraphProblem.parse(LINES[6]).operations[1].get("b") == -math.inf


@st.composite
def problems(draw):
    """Chains of pointwise operations, convolutions and reductions with random names, layouts and numbers."""
    names = iter(draw(st.lists(st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,5}", fullmatch=True), min_size=24, unique=True)))
    names = (name for name in names if name not in ("_", "out"))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    compute = "float64" if dtype == "float64" else "float32"

    def shaped(name, shape, kind=dtype):
        strides = list(contiguous_strides(shape, draw(st.sampled_from(("nchw", "nhwc")))))
        if draw(st.booleans()):
            strides = [3 * step for step in strides]
        return GraphTensor(name, shape, tuple(strides), kind, draw(st.sampled_from((8, 16, 32))))

    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(3, 5)), draw(st.integers(3, 5)))
    tensors = [shaped(next(names), shape)]
    operations = []
    value, size = tensors[0].name, shape
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(("convolution", "number", "bias", "clip", "cast")))
        result = next(names)
        if kind == "convolution" and operations and any(entry.method != "pointwise" for entry in operations):
            kind = "number"
        if kind == "convolution":
            w = shaped(next(names), (draw(st.integers(1, 4)), size[1], 1, 1))
            tensors.append(w)
            padding = draw(st.sampled_from((0, 1, (1, 2), ((0, 1), (2, 0)))))
            arguments = (
                ("x", Ref(value)),
                ("w", Ref(w.name)),
                ("padding", padding),
                ("stride", draw(st.integers(1, 2))),
            )
            operations.append(Operation("convolution_forward", arguments, (result,)))
            size = Graph(compute), size, w.shape, padding, operations[-1].get("stride")
            made = size[0].convolution_forward(
                size[0].tensor(size[1], dtype), size[0].tensor(size[2], dtype), padding=size[3], stride=size[4]
            )
            size = made.shape
        elif kind == "bias":
            b = shaped(next(names), (1, size[1], 1, 1))
            tensors.append(b)
            operations.append(
                Operation("pointwise", (("mode", "add"), ("x", Ref(value)), ("b", Ref(b.name))), (result,))
            )
        elif kind == "clip":
            arguments = (
                ("x", Ref(value)),
                ("lower_slope", draw(st.floats(0, 1))),
                ("upper_clip", draw(st.none() | st.floats(1, math.inf))),
            )
            operations.append(Operation("relu", arguments, (result,)))
        elif kind == "cast":
            operations.append(Operation("identity", (("x", Ref(value)), ("dtype", compute)), (result,)))
        else:
            number = draw(st.integers(-9, 9) | st.floats(allow_nan=False))
            mode = draw(st.sampled_from(("add", "mul", "max")))
            operations.append(Operation(mode if mode != "max" else "pointwise", (), (result,)))
            named = (
                (("mode", "max"), ("x", Ref(value)), ("b", number))
                if mode == "max"
                else (("a", Ref(value)), ("b", number))
            )
            operations[-1] = Operation(operations[-1].method, named, (result,))
        value = result
    results = (shaped(value, size, draw(st.sampled_from((dtype, compute)))),)
    math_word = "fma" if compute == "float64" else draw(st.sampled_from(("", "fma", "tensor_op")))
    return GraphProblem(
        tuple(tensors), tuple(operations), results, compute, draw(st.sampled_from(("", compute))), math_word
    )


@settings(max_examples=150, deadline=None)
@given(problems())
def test_every_problem_reads_back(problem):
    line = str(problem)
    assert "\n" not in line
    again = GraphProblem.parse(line)
    assert again == problem
    assert hash(again) == hash(problem)
    assert str(again) == line
    assert Problem.parse(line) == problem
    arrays = problem.random_arrays(device="cpu")
    for name in problem.inputs:
        assert arrays[name].shape == problem.shape_of(name)
