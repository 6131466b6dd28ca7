"""Depthwise convolutions by kernels of this package on a GPU: against float64, repeated, captured, and by a plan."""

import numpy as np
import pytest
from convolution_oracle import bits
from depthwise_cases import LARGE, PRECISIONS, exact, random_depthwise

import flcuda
from flcuda import device as devices
from flcuda.finder.choice import Choice, Key
from flcuda.finder.plan import Plan
from flcuda.finder.policy import Policy
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem
from flcuda.finder.sources.depthwise import DepthwiseRunner, DepthwiseSource, direct, general
from flcuda.finder.verify import Verifier

SOURCE = DepthwiseSource()


@pytest.fixture
def device():
    found = devices.resolve("cuda")
    with found.use():
        yield found


def runs_right(problem, device) -> int:
    """Verifies every candidate, what its stored choice restores, and the general way; gives how many ran."""
    arrays = problem.random_arrays(seed=2, device=device)
    verifier = Verifier(problem, tuple(arrays[name] for name in problem.inputs), device)
    runners = [(general(problem), DepthwiseRunner(general(problem)))]
    key = Key.of(problem, Policy(), device, (SOURCE.name,))
    for candidate in SOURCE.candidates(problem, Policy(), device):
        choice = Choice.from_json(Choice.of(key, candidate).to_json())
        restored = SOURCE.restore(problem, choice, device)
        assert restored == candidate
        runner = restored.build()
        assert runner.workspace == candidate.workspace
        runners.append((candidate, runner))
    for what, runner in runners:
        found = verifier.check(runner, deterministic=True)
        assert found.reason is None, f"{problem}: {what}: {found.reason}"
        assert found.repeats, f"{problem}: {what}"
    return len(runners)


@pytest.mark.parametrize("part", range(4))
def test_every_candidate_is_right_for_random_problems(part, device):
    ran = 0
    for index in range(10):
        rng = np.random.default_rng([31, part, index])
        ran += runs_right(random_depthwise(rng, square=index < 7, words=PRECISIONS), device)
    assert ran >= 20


@pytest.mark.parametrize("word", ["float32", "float16", "bfloat16 acc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("line", LARGE)
def test_every_candidate_is_right_for_the_layers_of_networks(direction, line, word, device):
    assert runs_right(ConvolutionProblem.parse(f"{direction} {line} {word} nchw"), device) >= 3


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "line",
    [
        "n5 c70 7x7 k70 5x5 p2 g70",
        "n5 c33 28x28 k33 5x5 p2 g33",
        "n5 c9 61x60 k9 7x7 p3 s2 g9",
        "n5 c9 57x55 k9 3x3 p1:0 s2 g9",
        "n3 c3 300x350 k3 3x3 p1 g3",
    ],
)
def test_whole_numbers_are_exact_everywhere(direction, line, device):
    """Every element, not only sampled ones: sums of small whole numbers have one value in float32."""
    cupy = devices.cupy()
    problem = ConvolutionProblem.parse(f"{direction} {line} float32 nchw")
    rng = np.random.default_rng(4)
    inputs = [rng.integers(-3, 4, problem.shape_of(name)).astype(np.float32) for name in problem.inputs]
    wanted = exact(problem, *(array.astype(np.float64) for array in inputs))
    moved = [cupy.asarray(array) for array in inputs]
    for candidate in SOURCE.candidates(problem, Policy(), device):
        out = cupy.full(wanted.shape, np.nan, np.float32)
        candidate.build()(*moved, out)
        np.testing.assert_array_equal(cupy.asnumpy(out), wanted, str(candidate))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "line",
    [
        "n16 c96 28x28 k96 5x5 p2 g96 float32",
        "n16 c96 28x28 k96 3x3 p1 s2 g96 float16 acc",
        "n4 c6 19x17 k12 4x3 p1 d2 g6 float32",
    ],
)
def test_a_run_is_captured_and_replayed(direction, line, device):
    cupy = devices.cupy()
    problem = ConvolutionProblem.parse(f"{direction} {line} nchw")
    arrays = problem.random_arrays(seed=4, device=device)
    operands = (*(arrays[name] for name in problem.inputs), arrays["out"])
    before = bits(arrays["out"]).copy()
    captured = 0
    for candidate in SOURCE.candidates(problem, Policy(), device):
        runner = candidate.build()
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.get_current_stream().synchronize()
        with stream:
            runner(*operands)
            bits(arrays["out"])[...] = before
            runner.launch(tuple(array.data.ptr for array in operands))
            wanted = bits(arrays["out"]).copy()
            bits(arrays["out"])[...] = before
            stream.synchronize()
            stream.begin_capture()
            runner(*operands)
            graph = stream.end_capture()
            for _ in range(2):
                bits(arrays["out"])[...] = before
                graph.launch(stream)
                stream.synchronize()
                assert bool((bits(arrays["out"]) == wanted).all()), candidate
        captured += 1
    assert captured


def test_sums_do_not_depend_on_what_else_is_on_the_device(device):
    problem = ConvolutionProblem.parse("backward_filter n128 c96 28x28 k96 5x5 p2 g96 float32 nchw")
    arrays = problem.random_arrays(seed=5, device=device)
    runner = DepthwiseRunner(direct(problem, 7, 256))
    cupy = devices.cupy()
    results = []
    for round_ in range(4):
        out = cupy.empty_like(arrays["out"])
        other = cupy.cuda.Stream(non_blocking=True)
        if round_ % 2:
            with other:
                cupy.random.random((1 << 22,), dtype=np.float32)
        runner(arrays["x"], arrays["dy"], out)
        other.synchronize()
        results.append(cupy.asnumpy(bits(out)))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_it_is_found_stored_and_run_by_a_plan(direction, device):
    problem = ConvolutionProblem.parse(f"{direction} n32 c72 56x56 k72 5x5 p2 s2 g72 float32 nchw")
    report = flcuda.find(problem, sources=["depthwise"], verify=True)
    assert report.best.id == "depthwise:direct"
    arrays = problem.random_arrays(device=device)
    inputs = [arrays[name] for name in problem.inputs]
    wanted = devices.cupy().asnumpy(report.usable[0].plan()(*inputs))
    plan = Plan(report.best, device, SOURCE.restore(problem, report.best, device).build())
    for _ in range(2):
        np.testing.assert_array_equal(devices.cupy().asnumpy(plan(*inputs)), wanted)
