"""The verifier: right runners pass, each kind of wrong one is caught, and its expectations are the reference's."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flcuda import device as devices
from flcuda import graph_reference
from flcuda.finder import expectation, verify
from flcuda.finder.graph_problem import GraphProblem
from flcuda.finder.policy import Policy
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem, Problem
from flcuda.finder.sources.reference import ReferenceSource
from flcuda.finder.verify import Verifier


def inputs_of(problem, seed=1):
    arrays = problem.random_arrays(seed=seed, device="cpu")
    return tuple(arrays[name] for name in problem.inputs)


def right_runners(problem):
    for candidate in ReferenceSource().candidates(problem, Policy(), devices.CPU):
        yield candidate.build()


def verified(problem, runner=None, *, seed=1, deterministic=True):
    verifier = Verifier(problem, inputs_of(problem, seed), devices.CPU)
    return verifier.check(runner or next(right_runners(problem)), deterministic=deterministic)


def check_right(problem, seed=1):
    verifier = Verifier(problem, inputs_of(problem, seed), devices.CPU)
    for runner in right_runners(problem):
        found = verifier.check(runner, deterministic=True)
        assert found.reason is None, found.reason
        assert found.repeats is True
        assert found.error <= found.bound


# --- convolutions -----------------------------------------------------------------------------------------------------


@st.composite
def convolution_problems(draw):
    rank = draw(st.integers(1, 3))

    def numbers(low, high):
        return [draw(st.integers(low, high)) for _ in range(rank)]

    groups, c, k = (draw(st.integers(1, 3)) for _ in range(3))
    kernel, dilation, stride = numbers(1, 3), numbers(1, 2), numbers(1, 3)
    padding = list(zip(numbers(0, 2), numbers(0, 2), strict=True))
    size = [
        max(1, (r - 1) * d + 1 - sum(pad)) + more
        for r, d, pad, more in zip(kernel, dilation, padding, numbers(0, 4), strict=True)
    ]
    return ConvolutionProblem.create(
        draw(st.sampled_from(DIRECTIONS)),
        (draw(st.integers(1, 3)), groups * c, *size),
        (groups * k, c, *kernel),
        dtype=draw(st.sampled_from(["float64", "float32", "tf32", "float16", "bfloat16"])),
        layout=draw(st.sampled_from(["nchw", "nhwc"])),
        padding=padding,
        stride=stride,
        dilation=dilation,
        groups=groups,
        accumulate=draw(st.booleans()),
    )


@settings(max_examples=80)
@given(convolution_problems(), st.integers(0, 1000))
def test_right_convolutions_pass(problem, seed):
    check_right(problem, seed)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "line",
    [
        "n8 c32 28x28 k32 3x3 p1 float32 nchw",
        "n8 c32 28x28 k32 3x3 p1 s2 float16 nhwc acc",
        "n2 c8 12x10 k16 3x3 p1 float32 nchw xs:2000x200x14x1 ys:8000x300x20x2",
        "n2 c8 12x10 k16 3x3 p1 float16 nhwc align:2",
    ],
)
def test_larger_problems_are_sampled(direction, line):
    check_right(Problem.parse(f"{direction} {line}"))


class Mutated:
    """A right runner whose result is changed afterwards, as `change(output, runs)` says."""

    workspace = 0

    def __init__(self, problem, change):
        self.right = next(right_runners(problem))
        self.change = change
        self.runs = 0

    def __call__(self, *operands):
        self.right(*operands)
        self.runs += 1
        self.change(operands[-1], self.runs)


def memory_behind(out, count):
    """The elements behind the last one."""
    last = sum((size - 1) * step for size, step in zip(out.shape, out.strides, strict=True))
    address = out.__array_interface__["data"][0] + last + out.itemsize
    return np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * count).from_address(address))


def one_wrong_element(out, _):
    out[(1,) * out.ndim] += 1


def slightly_wrong(out, _):
    out *= np.asarray(1.05, out.dtype)


def left_nan(out, _):
    out[(0,) * out.ndim] = np.nan


def infinite(out, _):
    out[(0,) * out.ndim] = np.inf


def all_zero(out, _):
    out[...] = 0


def channels_swapped(out, _):
    out[:, :2] = out[:, 1::-1].copy()


def shifted(out, _):
    out[...] = np.roll(out, 1, axis=-1)


def past_the_end(out, _):
    memory_behind(out, 4)[-1] = 0


def other_bits(out, runs):
    if runs > 1:
        out[(0,) * out.ndim] = np.nextafter(out[(0,) * out.ndim], np.asarray(np.inf, out.dtype))


CHANGES = [
    one_wrong_element,
    slightly_wrong,
    left_nan,
    infinite,
    all_zero,
    channels_swapped,
    shifted,
    past_the_end,
    other_bits,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("word", ["float32 nchw", "float16 nhwc"])
def test_wrong_results_are_caught(change, direction, word):
    problem = Problem.parse(f"{direction} n2 c8 7x6 k6 3x3 p1 {word}")
    found = verified(problem, Mutated(problem, change))
    assert found.repeats is (change is not other_bits)
    if change is other_bits:
        assert found.reason is None
        return
    assert found.reason is not None
    assert ("behind its end" if change is past_the_end else " is ") in found.reason
    if change is not past_the_end:
        assert found.error > found.bound


class OfAnother:
    """Runs another problem on the same operands: the wrong padding, a missing tap, ..."""

    workspace = 0

    def __init__(self, problem, prepare=lambda operands: operands):
        self.right = next(right_runners(problem))
        self.prepare = prepare

    def __call__(self, *operands):
        self.right(*self.prepare(operands))


@pytest.mark.parametrize("precision", ["float32", "tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_wrong_padding_is_caught(direction, precision):
    line = f"{direction} n4 c64 14x14 k64 3x3 {{}} {precision}"
    problem = Problem.parse(line.format("p1"))
    found = verified(problem, OfAnother(Problem.parse(line.format("p0:2x1"))))
    assert found.error > found.bound


@pytest.mark.parametrize("precision", ["float32", "tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("what", ["tap", "channel", "image"])
def test_something_left_out_of_large_sums_is_caught(what, precision):
    """One of 9 taps, one of 512 channels, one of 64 images."""
    direction, line = "forward", "n2 c512 7x7 k64 3x3 p1"
    if what == "image":
        direction, line = "backward_filter", "n64 c16 14x14 k16 3x3 p1"
    problem = Problem.parse(f"{direction} {line} {precision}")

    def prepared(operands):
        first, second, out = operands
        first, second = first.copy(), second.copy()
        if what == "tap":
            second[:, :, 2, 0] = 0
        elif what == "channel":
            first[:, 17] = 0
        else:
            first[-1] = 0
        return first, second, out

    found = verified(problem, OfAnother(problem, prepared))
    assert found.error > found.bound


def test_bits_of_one_that_promises_nothing_are_not_compared():
    problem = Problem.parse("forward n2 c8 7x6 k6 3x3 p1")
    found = verified(problem, Mutated(problem, other_bits), deterministic=False)
    assert found.reason is None
    assert found.repeats is None


def test_gaps_of_a_strided_output():
    problem = Problem.parse("forward n2 c3 5x4 k4 3x3 p1 ys:400x50x10x2")
    assert verified(problem).reason is None

    def in_a_gap(out, _):
        np.lib.stride_tricks.as_strided(out, (2,), (out.itemsize,))[1] = 7

    assert "in its gaps" in verified(problem, Mutated(problem, in_a_gap)).reason


def test_in_front_of_the_output():
    problem = Problem.parse("forward n2 c3 5x4 k4 3x3 p1")

    def before(out, _):
        np.lib.stride_tricks.as_strided(out, (2,), (-out.itemsize,))[1] = 7

    assert "in front of it" in verified(problem, Mutated(problem, before)).reason


def test_an_element_that_was_never_written():
    problem = Problem.parse("forward n8 c3 28x28 k16 3x3 p1 float16")

    class Lazy:
        workspace = 0

        def __call__(self, x, w, y):
            made = np.empty_like(y)
            next(right_runners(problem))(x, w, made)
            kept = y[5, 3, 7, 9]
            y[...] = made
            y[5, 3, 7, 9] = kept

    assert "1 elements were not written, the first at (5, 3, 7, 9)" in verified(problem, Lazy()).reason


def test_accumulating_problems_are_added_to_something():
    problem = Problem.parse("forward n2 c3 5x4 k4 3x3 p1 acc")
    assert verified(problem).reason is None
    replacing = OfAnother(Problem.parse("forward n2 c3 5x4 k4 3x3 p1"))
    found = verified(problem, replacing)
    assert found.error > found.bound


def test_errors_of_a_runner_go_through():
    problem = Problem.parse("forward n2 c3 5x4 k4 3x3 p1")

    def broken(*operands):
        raise MemoryError("no")

    with pytest.raises(MemoryError):
        verified(problem, broken)


def test_nothing_but_a_known_kind_of_problem():
    class Other(Problem):
        inputs = ()
        compute, math = "float32", "fma"

    with pytest.raises(TypeError, match="Other"):
        Verifier(Other(), (), devices.CPU)


# --- graphs -----------------------------------------------------------------------------------------------------------

X = "x float16 4x16x9x8 nhwc; w float16 12x16x3x3 nhwc; b float16 1x12x1x1 nhwc"
SMALL = "x float32 4x6x5x7; dy float32 4x6x5x7; s float32 1x6x1x1; b float32 1x6x1x1"
POOLED = "x float32 4x6x5x7; dy float32 4x6x3x4; y float32 4x6x3x4"
GRAPHS = {
    "fused": f"graph; {X}; t = convolution_forward(%x, %w, padding=1); u = add(%t, %b); y = silu(%u); "
    "out u float16 nhwc; out y float16 nhwc",
    "16-bit inside": f"graph intermediate:float16; {X}; t = convolution_forward(%x, %w, padding=1); u = add(%t, %b); "
    "y = relu(%u); out y float16 nhwc",
    "statistics": f"graph; {X}; a = add(%b, 1.0); t = convolution_forward(%x, %w); y = mul(%t, %a); "
    "s, q = generate_statistics(%y); out y float16 nhwc; out s float32; out q float32",
    "swish backward": "graph; dy bfloat16 4x16x9x8; x bfloat16 4x16x9x8; u = pointwise(swish_bwd, %dy, %x); "
    "s = reduction(add, %u, (1, 16, 1, 1)); out u bfloat16; out s float32",
    "batch norm": f"graph; {SMALL}; m float32 1x6x1x1; v float32 1x6x1x1; y, a, i, n, r = norm_forward(batch, %x, %s, "
    "%b, running_mean=%m, running_variance=%v, momentum=0.3); t = add(%y, %dy); z = relu(%t); out z; out a; out i; "
    "out n; out r",
    "instance norm": f"graph; {SMALL}; y, a, i, _, _ = norm_forward(instance, %x, %s, %b); z = mul(%y, %dy); out z; "
    "out a; out i",
    "layer norm": "graph; x float32 4x6x5x7; s float32 1x6x5x7; b float32 1x6x5x7; "
    "y, a, i, _, _ = norm_forward(layer, %x, %s, %b); out y; out a; out i",
    "rms norm": "graph; x float32 4x6x5x7; s float32 1x6x1x7; y, _, i, _, _ = norm_forward(rms, %x, %s); out y; out i",
    "layer norm backward": "graph float64; x float64 4x6x5x7; dy float64 4x6x5x7; s float64 1x6x5x7; "
    "dx, ds, db = norm_backward(layer, %dy, %x, %s, epsilon=0.001); out dx; out ds; out db",
    "batch norm backward": "graph; x float32 4x6x5x7; dy float32 4x6x5x7; s float32 1x6x1x1; "
    "dx, ds, db = norm_backward(batch, %dy, %x, %s, epsilon=0.001); out dx; out ds; out db",
    "weights": "graph; x float32 4x6x5x7; dy float32 4x6x5x7; s float32 1x6x1x1; m float32 1x6x1x1; i float32 1x6x1x1; "
    "ds, db, f, g, h = batch_norm_backward_weights(%dy, %x, %m, %i, %s); out ds; out db; out f; out g; out h",
    "finalize": f"graph; {SMALL}; t = mul(%x, %dy); u, q = generate_statistics(%t); "
    "f, o, m, i, _, _ = batch_norm_finalize(%u, %q, %s, %b, count=140); out f; out o; out m; out i",
    "max": "graph; x float32 4x6x5x7; y, i = resample_forward(max, %x, window=3, stride=2, padding=1, index=True); "
    "out y; out i int8",
    "average": "graph; x float32 4x6x5x7; t = silu(%x); "
    "y, _ = resample_forward(average_exclude_padding, %t, window=(3, 2), stride=2, padding=1); out y",
    "bilinear": "graph; x float32 4x6x5x7; y, _ = resample_forward(bilinear, %x, window=2, stride=1/2); out y",
    "nearest": "graph; x float32 4x6x5x7; y, i = resample_forward(nearest, %x, window=2, stride=1/2, index=True); "
    "out y; out i int8",
    "max backward": f"graph; {POOLED}; dx = resample_backward(max, %dy, (4, 6, 5, 7), window=3, stride=2, padding=1, "
    "x=%x, y=%y); out dx",
    "max backward by index": "graph; i int8 4x6x3x4; dy float32 4x6x3x4; dx = resample_backward(max, %dy, "
    "(4, 6, 5, 7), window=3, stride=2, padding=1, index=%i); out dx",
    "average backward": "graph; dy float32 4x6x3x4; dx = resample_backward(average_include_padding, %dy, "
    "(4, 6, 5, 7), window=3, stride=2, padding=1); out dx",
    "products": "graph; a float16 2x5x7; b float16 1x7x9; c = matmul(%a, %b); d = reshape(%c, (5, 2, 9)); "
    "e = concatenate((%d, %d), 1); f = gelu(%e); g = sub(2.5, %f); out g; out c float32",
    "one number": "graph; x float32 4x6x5x7; y float32 4x6x5x7; t = mul(%x, %y); "
    "s = reduction(norm2, %t, (1, 1, 1, 1)); z = pointwise(div, %t, %s); out s; out z",
    "3-D and groups": "graph; x float16 2x8x5x6x4 nhwc; w float16 12x4x3x2x1 nhwc; t = convolution_forward(%x, %w, "
    "padding=((1, 0), (0, 1), (2, 2)), stride=(2, 1, 3), dilation=(1, 2, 1)); y = relu(%t, upper_clip=6.0); "
    "out y float16 nhwc; out t float16",
    "1-D and groups": "graph float64; dy float64 2x6x9; w float64 6x2x3; "
    "t = convolution_backward_data(%dy, %w, (2, 4, 18), padding=1, stride=2); y = tanh(%t); out y",
    "log": "graph; x float16 2x5x7; c = pointwise(log, %x); i = pointwise(gen_index, %x, axis=-1); "
    "k = pointwise(cmp_gt, %c, %i); z = pointwise(binary_select, %c, %i, %k); out z; out c float32",
    "backward": "graph tensor_op; x float32 2x8x9x9 nhwc; w float32 16x8x3x3 nhwc; v float32 8x16x3x3 nhwc; "
    "t = convolution_forward(%x, %w, padding=1); r = relu(%t, lower_slope=0.1); "
    "p = convolution_backward_data(%x, %v, (2, 16, 9, 9), padding=1); m = relu_backward(%p, %r); "
    "q = convolution_backward_filter(%x, %m, (16, 8, 3, 3), padding=1, alpha=0.5); out q; out m",
}
GRAPHS |= {
    mode: f"graph; x float32 4x6x5x7; t = add(%x, 0.5); y = reduction({mode}, %t, (4, 1, 5, 1)); out y"
    for mode in ("add", "mul", "min", "max", "amax", "avg", "norm1", "norm2", "mul_no_zeros")
}


@pytest.mark.parametrize("name", GRAPHS)
def test_right_graphs_pass(name):
    problem = Problem.parse(GRAPHS[name])
    assert isinstance(problem, GraphProblem)
    check_right(problem)


@pytest.mark.parametrize("chunk", [64, 1 << 18])
@pytest.mark.parametrize("name", GRAPHS)
def test_expectations_are_those_of_the_whole_graph(name, chunk, monkeypatch):
    monkeypatch.setitem(expectation._CHUNK, "cpu", chunk)
    problem = Problem.parse(GRAPHS[name])
    inputs = inputs_of(problem, 7)
    for array in inputs:
        if array.dtype == np.int8:
            array[...] = np.random.default_rng(7).integers(0, 9, array.shape)
    known = graph_reference.evaluate(problem.operations, dict(zip(problem.inputs, inputs, strict=True)))
    for output in Verifier(problem, inputs, devices.CPU)._outputs:
        expected = known[output.name][tuple(output._places.T)]
        np.testing.assert_allclose(output._expected, expected, rtol=1e-9, atol=1e-9 * np.nanmax(np.abs(expected)))


@pytest.mark.parametrize("name", [name for name in GRAPHS if name not in ("log", "nearest")])
def test_each_wrong_output_of_a_graph_is_caught(name):
    problem = Problem.parse(GRAPHS[name])
    verifier = Verifier(problem, inputs_of(problem), devices.CPU)
    right = next(right_runners(problem))
    for position, output in enumerate(problem.outputs):

        def wrong(*operands, at=position):
            right(*operands)
            out = operands[len(problem.inputs) + at]
            # As far off as the numbers are large.
            out[...] = (out.astype(np.float64) * -1.25 + (out.dtype.kind == "i") * 3).astype(out.dtype)

        found = verifier.check(wrong, deterministic=False)
        assert found.reason is not None
        assert found.reason.startswith(f"{output} at ")
        assert found.error > found.bound


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("intermediate", ["", " intermediate:{}"])
def test_what_is_rounded_inside_is_no_error(precision, intermediate):
    """Engines may store what is virtual in 16 bits, and use what they have rounded for an output."""
    problem = Problem.parse(GRAPHS["fused"].replace("float16", precision))
    dtype = devices.DTYPES[precision]

    def rounding(x, w, b, u, y):
        known = graph_reference.evaluate(problem.operations, {"x": x, "w": w, "b": b}, np.float32, {"u": dtype})
        u[...] = known["u"]
        y[...] = known["y"]

    found = verified(problem, rounding)
    assert found.reason is None, found.reason


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("line", ["forward n2 c128 9x9 k32 3x3 p1 tf32", GRAPHS["backward"]])
def test_tf32_rounded_or_cut_is_no_error(line, cut):
    problem = Problem.parse(line)

    def tf32(a):
        if a.dtype != np.float32:
            return a
        bits = a.view(np.uint32) + np.uint32(0 if cut else 1 << 12)
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)

    right = next(right_runners(problem))
    count = len(problem.inputs)

    def run(*operands):
        right(*(tf32(a) for a in operands[:count]), *operands[count:])

    found = verified(problem, run)
    assert found.reason is None, found.reason
    if count == 2:
        exact = Problem.parse(line.replace("tf32", "float32"))
        assert verified(exact, run).error > verified(exact, run).bound


def test_not_a_number_is_right_where_it_is_expected():
    problem = Problem.parse("graph; x float32 3x4x5; y = pointwise(log, %x); out y")
    assert verified(problem).reason is None

    def plain(x, y):
        y[...] = np.log(np.abs(x))

    assert "nan" in verified(problem, plain).reason

    def zero(x, y):
        y[...] = np.where(x < 0, np.nan, 0)

    assert verified(problem, zero).reason is not None


def test_what_overflows_the_dtype_is_infinite():
    problem = Problem.parse("graph; x float16 3x4x5; t = mul(%x, 60000.0); y = mul(%t, 10.0); out y float16")
    assert verified(problem).reason is None

    def clamped(x, y):
        y[...] = np.clip(x.astype(np.float32) * 6e5, -60000, 60000)

    assert verified(problem, clamped).reason is not None


def test_kinks_and_jumps_give_no_false_alarm():
    """Inputs of a comparison that rounding moves to the other side of it."""
    line = (
        "graph; a float16 1x64x40; b float16 1x40x64; c = matmul(%a, %b); k = pointwise(floor, %c); "
        "m = pointwise(cmp_gt, %c, 0.0); n = pointwise(binary_select, %c, 0.0, %m); out k float32; out n float32"
    )
    line = line.replace("binary_select, %c, 0.0, %m", "binary_select, %c, %a2, %m").replace(
        "b float16", "a2 float16 1x64x64; b float16"
    )
    problem = Problem.parse(line)
    order = np.random.default_rng(0).permutation(40)

    def run(a, a2, b, k, n):
        c = np.zeros((1, 64, 64), np.float32)
        for i in order:
            c += a[:, :, i : i + 1].astype(np.float32) * b[:, i : i + 1].astype(np.float32)
        k[...] = np.floor(c)
        n[...] = np.where(c > 0, c, a2)

    inputs = inputs_of(problem)
    # Whole products, so that many sums are whole numbers, some of them zero.
    for array in inputs:
        array[...] = np.rint(array)
    found = Verifier(problem, inputs, devices.CPU, samples=4096).check(run, deterministic=True)
    assert found.reason is None, found.reason


def test_few_places_of_what_costs_much(monkeypatch):
    monkeypatch.setitem(expectation._BUDGET, "cpu", 1 << 12)
    problem = Problem.parse("backward_filter n8 c32 14x14 k32 3x3 p1")
    verifier = Verifier(problem, inputs_of(problem), devices.CPU)
    assert len(verifier._outputs[0]._places) == expectation._FEWEST
    assert verifier.check(next(right_runners(problem)), deterministic=True).reason is None


def test_places_are_corners_edges_and_any():
    shape = (5, 1, 30, 40)
    places = verify._places(shape, 64, np.random.default_rng(0))
    assert places.shape == (64, 4)
    assert (places >= 0).all()
    assert (places < shape).all()
    at_edge = ((places == 0) | (places == np.array(shape) - 1))[:, [0, 2, 3]]
    assert at_edge.all(axis=1).sum() >= 8
    assert 10 < at_edge.any(axis=1).sum() < 60
    assert {tuple(place) for place in verify._places((2, 3), 64, np.random.default_rng(0))} == {
        (i, j) for i in range(2) for j in range(3)
    }
    assert math.prod(shape) > 64


# --- Winograd ---------------------------------------------------------------------------------------------------------

# The transforms of F(4x4, 3x3): input, filter, output.
B = np.array(
    [
        [4, 0, -5, 0, 1, 0],
        [0, -4, -4, 1, 1, 0],
        [0, 4, -4, -1, 1, 0],
        [0, -2, -1, 2, 1, 0],
        [0, 2, -1, -2, 1, 0],
        [0, 4, 0, -5, 0, 1],
    ],
    np.float32,
)
G = np.array(
    [[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]],
    np.float32,
) / np.float32(24)
A = np.array(
    [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]],
    np.float32,
)


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("channels", [1, 4, 64, 512])
def test_winograd_is_right(channels, precision):
    """Tiles of 4x4: the largest errors of the algorithms that are offered. 16-bit ones round what is transformed."""
    problem = Problem.parse(f"forward n2 c{channels} 16x12 k8 3x3 p1 {precision}")
    dtype = devices.DTYPES[precision]

    def winograd(x, w, y):
        image = np.pad(x.astype(np.float32), ((0, 0), (0, 0), (1, 1), (1, 1)))
        filters = np.einsum("ir,kcrs,js->ijkc", G, w.astype(np.float32), G).astype(dtype).astype(np.float32)
        for row in range(0, 16, 4):
            for column in range(0, 12, 4):
                tile = image[:, :, row : row + 6, column : column + 6]
                tile = np.einsum("ir,ncrs,js->ijcn", B, tile, B).astype(dtype).astype(np.float32)
                made = np.einsum("oi,ijkn,pj->nkop", A, np.matmul(filters, tile), A)
                y[:, :, row : row + 4, column : column + 4] = made

    verifier = Verifier(problem, inputs_of(problem), devices.CPU, samples=4096)
    found = verifier.check(winograd, deterministic=True)
    assert found.reason is None, found.reason
    assert found.error > 1e-3 * found.bound
