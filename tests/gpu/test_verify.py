"""The verifier on the GPU: what cuDNN computes is right, what is broken is caught, the bounds are those of NumPy."""

import numpy as np
import pytest
from helpers import to_numpy

from flcuda import device as devices
from flcuda.errors import CudnnNotSupportedError
from flcuda.finder.policy import Policy
from flcuda.finder.problem import DIRECTIONS, Problem
from flcuda.finder.sources import source_named
from flcuda.finder.verify import Verifier

LINES = [
    "n4 c16 14x14 k32 3x3 p1 float32 nchw",
    "n4 c16 14x14 k32 5x5 p2 float32 nchw",
    "n8 c64 28x28 k64 3x3 p1 tf32 nhwc",
    "n8 c64 28x28 k64 3x3 p1 s2 float16 nhwc",
    "n8 c256 7x7 k64 3x3 p1 float16 nchw",
    "n4 c64 14x14 k64 3x3 p1 bfloat16 nhwc",
    "n4 c16 14x14 k32 3x3 p1 float64 nchw",
    "n3 c16 12x12 k16 3x3 p1 g16 float16 nhwc",
    "n4 c16 50 k32 5 p2 d3 float32 nchw",
    "n2 c8 7x8x9 k16 3x3x3 p1 tf32 nhwc",
    "n4 c16 14x14 k32 3x3 p1 float32 nchw acc",
    "n4 c16 14x14 k32 1x1 bfloat16 nhwc acc",
]
X = "x float16 8x64x28x28 nhwc; w float16 64x64x3x3 nhwc; b float16 1x64x1x1 nhwc"
GRAPHS = {
    "two outputs": f"graph; {X}; t = convolution_forward(%x, %w, padding=1); u = add(%t, %b); y = relu(%u); "
    "out u float16 nhwc; out y float16 nhwc",
    "swish backward": "graph; dy float16 8x64x28x28 nhwc; x float16 8x64x28x28 nhwc; "
    "u = pointwise(swish_bwd, %dy, %x); s = reduction(add, %u, (1, 64, 1, 1)); out u float16 nhwc; out s float32 nhwc",
}
# Read by CuPy only: cuDNN need not have an engine.
OTHERS = [
    "graph; x float16 8x64x28x28 nhwc; w float16 64x64x3x3 nhwc; t = convolution_forward(%x, %w, padding=1); "
    "s, q = generate_statistics(%t); out t float16 nhwc; out s float32; out q float32",
    "graph; x bfloat16 4x6x5x7; s float32 1x6x1x1; b float32 1x6x1x1; m float32 1x6x1x1; v float32 1x6x1x1; "
    "y, a, i, n, r = norm_forward(batch, %x, %s, %b, running_mean=%m, running_variance=%v); "
    "z = gelu(%y); out z bfloat16; out a; out i; out n; out r",
    "graph; x float32 4x6x5x7; dy float32 4x6x5x7; s float32 1x6x1x1; "
    "dx, ds, db = norm_backward(batch, %dy, %x, %s, epsilon=0.001); out dx; out ds; out db",
    "graph; x float32 4x6x5x7; y, i = resample_forward(max, %x, window=3, stride=2, padding=1, index=True); "
    "d = resample_backward(average_include_padding, %y, (4, 6, 5, 7), window=3, stride=2, padding=1); "
    "out y; out i int8; out d",
    "graph; a float16 2x5x7; b float16 1x7x9; c = matmul(%a, %b); d = reshape(%c, (5, 2, 9)); "
    "e = concatenate((%d, %d), 1); f = pointwise(softplus_fwd, %e); k = pointwise(cmp_gt, %f, 0.5); "
    "i = pointwise(gen_index, %f, axis=2); g = pointwise(binary_select, %f, %i, %k); out g; out c float32",
    *(
        f"graph; x float32 4x6x5x7; t = elu(%x); y = reduction({mode}, %t, (4, 1, 5, 1)); out y"
        for mode in ("mul", "min", "amax", "avg", "norm1", "norm2")
    ),
]


@pytest.fixture
def device():
    found = devices.resolve("cuda")
    with found.use():
        yield found


def inputs_of(problem, device, seed=2):
    arrays = problem.random_arrays(seed=seed, device=device)
    return tuple(arrays[name] for name in problem.inputs)


def check_candidates(problem, device, source):
    """Verifies all candidates; gives how many ran."""
    verifier = Verifier(problem, inputs_of(problem, device), device)
    ran = 0
    try:
        candidates = list(source_named(source).candidates(problem, Policy(), device))
    except CudnnNotSupportedError:
        return 0
    for candidate in candidates:
        if candidate.reason is not None:
            continue
        try:
            found = verifier.check(candidate.build(), deterministic=candidate.deterministic)
        except CudnnNotSupportedError:
            continue
        assert found.reason is None, f"{candidate}: {found.reason}"
        assert found.repeats is (True if candidate.deterministic else None)
        assert 0 <= found.error <= found.bound
        ran += 1
    return ran


@pytest.mark.parametrize("source", ["legacy", "graph"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("line", LINES)
def test_candidates_of_convolutions_are_right(line, direction, source, device):
    ran = check_candidates(Problem.parse(f"{direction} {line}"), device, source)
    assert ran > 0 or source == "legacy"


@pytest.mark.parametrize("name", GRAPHS)
def test_candidates_of_graphs_are_right(name, device):
    assert check_candidates(Problem.parse(GRAPHS[name]), device, "graph") > 0


def any_runner(problem, device):
    source = "graph" if problem.kind == "graph" else "legacy"
    for candidate in source_named(source).candidates(problem, Policy(), device):
        if candidate.reason is None:
            return candidate.build()
    raise AssertionError("there is no candidate")


def one_wrong(out):
    out[(1,) * out.ndim] += 3 * abs(out).max()


def wrong_by_a_share(out):
    out *= 1.05


def left_nan(out):
    out[(0,) * out.ndim] = np.nan


def rolled(out):
    out[...] = devices.cupy().roll(out, 1, axis=-1)


def past_the_end(out):
    last = sum((size - 1) * step for size, step in zip(out.shape, out.strides, strict=True))
    memory = devices.cupy().ndarray((8,), np.uint8, out.data + last + out.itemsize)
    memory[...] = 0


@pytest.mark.parametrize("change", [one_wrong, wrong_by_a_share, left_nan, rolled, past_the_end])
@pytest.mark.parametrize(
    "line", ["forward n2 c8 9x8 k8 3x3 p1 float32", "backward_filter n8 c8 9x8 k8 3x3 p1 float16 nhwc"]
)
def test_broken_runners_are_caught(line, change, device):
    problem = Problem.parse(line)
    right = any_runner(problem, device)
    verifier = Verifier(problem, inputs_of(problem, device), device, samples=1 << 12)

    def broken(*operands):
        right(*operands)
        change(operands[-1])

    assert verifier.check(right, deterministic=False).reason is None
    found = verifier.check(broken, deterministic=False)
    assert found.reason is not None
    assert ("behind its end" in found.reason) is (change is past_the_end)


def test_the_relative_error_is_a_share_of_the_results(device):
    problem = Problem.parse("forward n2 c64 9x8 k8 3x3 p1 float32")
    right = any_runner(problem, device)
    verifier = Verifier(problem, inputs_of(problem, device), device, samples=1 << 12)

    def off(*operands):
        right(*operands)
        operands[-1][0, 0, 0, 0] += 24.0  # the root mean square of 64 x 9 products is 24

    assert verifier.check(right, deterministic=False).relative < 1e-5
    assert 0.5 < verifier.check(off, deterministic=False).relative < 2


def test_other_bits_in_a_second_run_are_caught(device):
    problem = Problem.parse("forward n2 c8 9x8 k8 3x3 p1 float32")
    right = any_runner(problem, device)
    runs = []

    def unsteady(*operands):
        right(*operands)
        runs.append(0)
        operands[-1][0, 0, 0, 0] *= 1 + 2.0**-20 * len(runs)

    found = Verifier(problem, inputs_of(problem, device), device).check(unsteady, deterministic=True)
    assert found.repeats is False
    assert found.reason is None


def test_a_wrong_padding_is_caught(device):
    problem = Problem.parse("forward n4 c64 14x14 k64 3x3 p1 float16 nhwc")
    wide = Problem.parse("forward n4 c64 14x14 k64 3x3 p2 float16 nhwc")
    verifier = Verifier(problem, inputs_of(problem, device), device)
    other = any_runner(wide, device)

    def shifted(x, w, y):
        larger = wide.empty("y", device)
        other(x, w, larger)
        y[...] = larger[:, :, :14, :14]

    found = verifier.check(shifted, deterministic=False)
    assert found.error > found.bound


@pytest.mark.parametrize("line", [*(f"{word} {line}" for word in DIRECTIONS for line in LINES), *OTHERS])
def test_expectations_and_bounds_are_those_of_the_cpu(line, device):
    problem = Problem.parse(line)
    inputs = inputs_of(problem, device)
    there = Verifier(problem, inputs, device, samples=16)
    here = Verifier(problem, tuple(to_numpy(array) for array in inputs), devices.CPU, samples=16)
    for ours, theirs in zip(here._outputs, there._outputs, strict=True):
        count = min(len(ours._places), len(theirs._places))
        if not np.array_equal(ours._places[:count], theirs._places[:count]):
            continue  # one of the devices can afford more places
        expected = to_numpy(theirs._expected)[:count]
        np.testing.assert_allclose(expected, ours._expected[:count], rtol=1e-9, atol=1e-9 * np.abs(expected).max())
        np.testing.assert_allclose(to_numpy(theirs._error)[:count], ours._error[:count], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_large_problem_takes_little_memory(direction, device):
    problem = Problem.parse(f"{direction} n128 c64 56x56 k64 3x3 p1 float16 nhwc")
    inputs = inputs_of(problem, device)
    pool = devices.cupy().get_default_memory_pool()
    Verifier(problem, inputs, device)  # compiles the kernels
    pool.free_all_blocks()
    before = pool.total_bytes()
    Verifier(problem, inputs, device)
    devices.synchronize(device)
    assert pool.total_bytes() - before < 1 << 30
