"""The NumPy convolutions: against an independent float64 loop, finite differences and PyTorch; and graphs."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flcuda import device as devices
from flcuda import graph_reference
from flcuda.finder.policy import Policy
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem, Problem
from flcuda.finder.sources.reference import Columns, Fft, Operations, ReferenceSource

# Largest error, as a share of the sum of the magnitudes that are added up.
TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "float16": 1.5e-3, "bfloat16": 1.2e-2}


def direct(problem, first, second):
    """The convolution by its definition, in float64: one loop over groups, positions and taps.

    Returns the result and the sum of the magnitudes, the scale of rounding errors.
    """
    p = problem
    operands = {p.operands[0][-1]: np.asarray(first, np.float64), p.operands[1][-1]: np.asarray(second, np.float64)}
    out_name = p.operands[2][-1]
    shapes = {"x": p.x_shape, "w": p.w_shape, "y": p.y_shape}
    results = []
    for of in (np.asarray, np.abs):
        operands_of = {name: of(a) for name, a in operands.items()}
        operands_of[out_name] = out = np.zeros(shapes[out_name])
        x, w, y = (operands_of[name] for name in "xwy")
        k, c = p.w_shape[0] // p.groups, p.w_shape[1]
        spatial = range(len(p.stride))
        for position in np.ndindex(*p.y_shape[2:]):
            for tap in np.ndindex(*p.w_shape[2:]):
                place = tuple(position[i] * p.stride[i] + tap[i] * p.dilation[i] - p.padding_before[i] for i in spatial)
                if not all(0 <= place[i] < p.x_shape[2 + i] for i in spatial):
                    continue
                for group in range(p.groups):
                    ks, cs = slice(group * k, group * k + k), slice(group * c, group * c + c)
                    at_x, at_y = (slice(None), cs, *place), (slice(None), ks, *position)
                    at_w = (ks, slice(None), *tap)
                    if out_name == "y":
                        y[at_y] += x[at_x] @ w[at_w].T
                    elif out_name == "x":
                        x[at_x] += y[at_y] @ w[at_w]
                    else:
                        w[at_w] += y[at_y].T @ x[at_x]
        results.append(out)
    return results


def runners(problem, chunks=(1, 500, 1 << 20)):
    algos = ["im2col"]
    if problem.direction == "backward_data":
        algos = ["im2col", "col2im"] if set(problem.stride) == {1} else ["col2im"]
    return [Columns(problem, algo, chunk) for algo in algos for chunk in chunks] + [Fft(problem)]


def check(problem, rng):
    first, second, out = (problem.empty(name, devices.CPU) for name in problem.operands)
    for a in (first, second):
        a[...] = rng.standard_normal(a.shape)
    before = rng.standard_normal(out.shape) if problem.accumulate else np.full(out.shape, np.nan)
    want, scale = direct(problem, first, second)
    kept = first.copy(), second.copy()
    for run in runners(problem):
        out[...] = before
        added = np.array(out, np.float64) if problem.accumulate else 0.0
        run(first, second, out)
        error = np.abs(np.asarray(out, np.float64) - (want + added))
        word = problem.x_dtype
        # A transform mixes all elements, so its error is not a share of each element's own sum.
        bound = scale.max() if isinstance(run, Fft) else scale
        assert np.all(error <= TOLERANCE[word] * (1 + bound + np.abs(added))), f"{run}: {error.max()}"
        assert run.workspace >= 0
        for a, b in zip((first, second), kept, strict=True):
            np.testing.assert_array_equal(a, b)


@st.composite
def convolution_problems(draw):
    ndim = draw(st.integers(1, 3))

    def numbers(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(ndim))

    groups, c, k = (draw(st.integers(1, 3)) for _ in range(3))
    kernel, dilation, stride = numbers(1, 3), numbers(1, 3), numbers(1, 3)
    padding = tuple(zip(numbers(0, 3), numbers(0, 3), strict=True))
    size = tuple(
        max(1, (r - 1) * d + 1 - sum(pad)) + more
        for r, d, pad, more in zip(kernel, dilation, padding, numbers(0, 4), strict=True)
    )
    return ConvolutionProblem.create(
        draw(st.sampled_from(DIRECTIONS)),
        (draw(st.integers(1, 3)), groups * c, *size),
        (groups * k, c, *kernel),
        dtype=draw(st.sampled_from(["float64", "float32", "float16", "bfloat16"])),
        layout=draw(st.sampled_from(["nchw", "nhwc"])),
        padding=padding,
        stride=stride,
        dilation=dilation,
        groups=groups,
        accumulate=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(convolution_problems(), st.integers(0, 2**32 - 1))
def test_agrees_with_the_definition(problem, seed):
    check(problem, np.random.default_rng(seed))


LINES = [
    "n2 c3 11x13 k5 3x3 p1",
    "n3 c1 8x8 k64 3x3 p1 s1",  # one channel
    "n4 c16 1x1 k8 3x3 p1",  # all taps but one see padding only
    "n2 c4 2x2 k6 3x3 p1 s2",
    "n2 c6 9x9 k4 1x1 s2",
    "n2 c6 9x9 k4 1x1",
    "n2 c4 16x16 k4 7x7 p3 s2",
    "n2 c4 5x5 k4 5x5",  # the kernel covers the image
    "n1 c2 3x3 k2 2x2 p3 s4",  # no position of the second tap sees the image
    "n2 c4 12x10 k8 3x2 p2:0x1:3 s2x1 d1x2 g2",
    "n2 c8 10x10 k8 3x3 p1 g8",  # depthwise
    "n2 c3 40 k4 9 p4 d2",
    "n2 c2 5x6x7 k3 3x2x1 p1x0x2 s1x2x1",
    "n1 c2 4x3x3x4 k2 2x2x2x2 p1",
]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("line", LINES)
def test_shapes_that_take_their_own_path(line, direction, layout, dtype, rng):
    check(ConvolutionProblem.parse(f"{direction} {line} {dtype} {layout}"), rng)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_any_strides(direction, rng):
    check(
        ConvolutionProblem.parse(f"{direction} n2 c3 5x6 k4 3x3 p1 acc xs:400x100x14x2 ws:1x4x16x50 ys:1000x3x200x13"),
        rng,
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_out_may_be_wider_than_the_16_bit_operands(direction, rng):
    check(ConvolutionProblem.parse(f"{direction} n2 c3 6x6 k4 3x3 p1 float16 out:float32"), rng)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_16_bit_results_are_rounded_once(direction):
    # 4096 products of 1 and 1: in float16 alone the sum stops at 2048.
    lines = {
        "forward": "n1 c4096 1x1 k1 1x1",
        "backward_data": "n1 c1 1x1 k4096 1x1",
        "backward_filter": "n4096 c1 1x1 k1 1x1",
    }
    problem = ConvolutionProblem.parse(f"{direction} {lines[direction]} float16 acc")
    for run in runners(problem):
        first, second = (np.ones(problem.shape_of(name), np.float16) for name in problem.operands[:2])
        out = np.full(problem.shape_of(problem.operands[2]), 3, np.float16)
        run(first, second, out)
        assert out.item() == 4100  # 4099 rounded to float16


@pytest.mark.parametrize("line", ["n1 c2 5x4 k4 3x2 p1:0x0:2 s2x1 d1x2 g2", "n2 c2 4x4 k3 3x3 p1", "n2 c2 7 k2 3 s3"])
def test_gradients_agree_with_finite_differences(line, rng):
    forward = ConvolutionProblem.parse(f"forward {line} float64")
    x, w = (rng.standard_normal(forward.shape_of(name)) for name in "xw")
    dy = rng.standard_normal(forward.y_shape)

    def loss(x, w):
        y = np.empty(forward.y_shape)
        Columns(forward, "im2col", 1 << 20)(x, w, y)
        return float(np.sum(y * dy))

    for direction, changed in (("backward_data", x), ("backward_filter", w)):
        problem = forward.with_direction(direction)
        for run in runners(problem):
            gradient = np.empty(changed.shape)
            operands = {"x": x, "w": w, "dy": dy}
            run(*(operands[name] for name in problem.operands[:2]), gradient)
            for index in itertools.islice(np.ndindex(*changed.shape), 0, None, max(1, changed.size // 12)):
                kept = changed[index]
                changed[index] = kept + 1e-5
                above = loss(x, w)
                changed[index] = kept - 1e-5
                below = loss(x, w)
                changed[index] = kept
                # The loss is linear in each element, so the difference is exact but for rounding.
                assert gradient[index] == pytest.approx((above - below) / 2e-5, rel=1e-7, abs=1e-7)


@pytest.mark.peer
@pytest.mark.parametrize("line", LINES[:12])
def test_agrees_with_torch(line, rng):
    torch = pytest.importorskip("torch")
    p = ConvolutionProblem.parse(f"forward {line} float32")
    if p.padding_before != p.padding_after:
        pytest.skip("torch pads both sides alike")
    x, w = (rng.standard_normal(p.shape_of(name), np.float32) for name in "xw")
    tx, tw = (torch.from_numpy(a).requires_grad_() for a in (x, w))
    convolve = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d}[len(p.stride)]
    ty = convolve(tx, tw, None, p.stride, p.padding_before, p.dilation, p.groups)
    dy = rng.standard_normal(p.y_shape, np.float32)
    ty.backward(torch.from_numpy(dy))
    wanted = {"y": ty.detach(), "dx": tx.grad, "dw": tw.grad}
    operands = {"x": x, "w": w, "dy": dy}
    for direction in DIRECTIONS:
        problem = p.with_direction(direction)
        *inputs, out = problem.operands
        for run in runners(problem):
            result = np.full(problem.shape_of(out), np.nan, np.float32)
            run(*(operands[name] for name in inputs), result)
            np.testing.assert_allclose(result, wanted[out].numpy(), rtol=1e-4, atol=1e-4)


# --- the source -------------------------------------------------------------------------------------------------------


def candidates(line):
    return list(ReferenceSource().candidates(ConvolutionProblem.parse(line), Policy(), devices.CPU))


def test_candidates_are_restored_by_what_a_choice_keeps():
    source = ReferenceSource()
    for line in ("forward", "backward_data", "backward_data s2", "backward_filter"):
        problem = ConvolutionProblem.parse(f"{line} n8 c16 20x20 k32 3x3 p1")
        offered = list(source.candidates(problem, Policy(), devices.CPU))
        assert len({c.identity for c in offered}) == len(offered)
        for candidate in offered:
            assert candidate.deterministic
            again = source.restore(problem, candidate, devices.CPU)
            assert again.identity == candidate.identity
            assert again.reason is None
            assert again.build() == candidate.build()


def test_restore_refuses_what_it_does_not_have():
    source = ReferenceSource()
    problem = ConvolutionProblem.parse("forward n2 c2 5x5 k2 3x3")
    for algo, parameters in (("col2im", ()), ("winograd", ()), ("im2col", (("chunk", 1),))):
        stored = type("Stored", (), {"algo": algo, "parameters": parameters})
        with pytest.raises(ValueError, match="choice"):
            source.restore(problem, stored, devices.CPU)


@pytest.mark.parametrize(
    ("line", "tried"),
    [
        ("forward n128 c64 28x28 k64 3x3 p1", ["im2col"]),
        ("forward n128 c512 4x4 k512 3x3 p1", ["im2col"]),
        ("forward n32 c512 28x28 k512 1x1", ["im2col"]),
        ("backward_filter n128 c256 7x7 k256 3x3 p1", ["im2col"]),
        ("backward_data n128 c64 28x28 k64 3x3 p1", ["im2col"]),
        # fewer input channels make smaller columns on that side
        ("backward_data n128 c1 28x28 k64 3x3 p1", ["im2col", "col2im"]),
        ("backward_data n2 c2 9x9 k2 3x3 s2", ["col2im"]),
        ("forward n4 c4 128x128 k4 31x31 p15", ["im2col", "fft"]),
        ("backward_data n4 c4 128x128 k4 31x31 p15", ["im2col", "fft"]),
    ],
)
def test_only_what_may_win_is_tried(line, tried):
    """Each candidate costs a run of seconds in a user's first training step."""
    offered = candidates(line)
    assert [c.algo for c in offered if c.reason is None] == tried
    for candidate in offered:
        if candidate.algo not in tried:
            assert candidate.algo == "fft"
            assert "times slower" in candidate.reason


def test_a_smaller_chunk_takes_less_memory():
    problem = ConvolutionProblem.parse("forward n64 c64 28x28 k64 3x3 p1")
    small, large = (Columns(problem, "im2col", mib << 20).workspace for mib in (1, 8))
    assert 1 << 20 <= small < large < math.prod(problem.x_shape) * 9 * 4


# --- graphs -----------------------------------------------------------------------------------------------------------

GRAPH = (
    "graph {}; x {} 2x4x6x5 nhwc; w {} 8x4x3x3; b {} 1x8x1x1; t = convolution_forward(%x, %w, padding=1); "
    "u = add(%t, %b); y = silu(%u); s, q = generate_statistics(%y); i = pointwise(gen_index, %y, axis=3); "
    "out u s:500x1x80x10; out y nhwc; out s; out q; out i int32"
)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_graph(dtype):
    compute = "float64" if dtype == "float64" else "float32"
    problem = Problem.parse(GRAPH.format(compute, *[dtype] * 4))
    source = ReferenceSource()
    (candidate,) = source.candidates(problem, Policy(), devices.CPU)
    assert candidate.id == "reference:numpy"
    assert candidate.deterministic
    assert candidate.workspace > 0
    arrays = problem.random_arrays(seed=4, device="cpu")
    inputs = [arrays[name] for name in problem.inputs]
    exact = graph_reference.evaluate(problem.operations, dict(zip(problem.inputs, inputs, strict=True)))
    for runner in (candidate.build(), source.restore(problem, candidate, devices.CPU).build()):
        outputs = [problem.empty(name, devices.CPU) for name in problem.outputs]
        runner(*inputs, *outputs)
        for name, out in zip(problem.outputs, outputs, strict=True):
            error = np.abs(out.astype(np.float64) - exact[name]).max()
            own = dtype if problem.dtype_of(name) == dtype else compute
            assert error <= TOLERANCE[own] * np.abs(exact[name]).max(), name
        assert outputs[-1].max() == 4


def test_a_graph_has_one_candidate_and_restores_no_other():
    problem = Problem.parse(GRAPH.format("float32", *["float32"] * 4))
    for algo, parameters in (("im2col", ()), ("numpy", (("chunk", 1),))):
        stored = type("Stored", (), {"algo": algo, "parameters": parameters})
        with pytest.raises(ValueError, match="choice"):
            ReferenceSource().restore(problem, stored, devices.CPU)
    assert Operations(problem) == Operations(Problem.parse(str(problem)))


def test_what_is_no_problem_of_this_source_has_no_candidate():
    assert list(ReferenceSource().candidates(Problem(), Policy(), devices.CPU)) == []
    assert ReferenceSource().devices == ("cpu",)
