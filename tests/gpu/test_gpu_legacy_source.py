"""Every algorithm that cuDNN offers for a problem, run and compared with float64."""

import numpy as np
import pytest
from convolution_oracle import TOLERANCE, exact, host

from flcuda import device as devices
from flcuda.errors import CudnnNotSupportedError
from flcuda.finder.choice import Choice, Key
from flcuda.finder.policy import Policy
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem
from flcuda.finder.sources import legacy
from flcuda.finder.sources.legacy import LegacySource

LINES = [
    "n4 c16 14x14 k32 3x3 p1 float32 nchw",
    "n4 c16 14x14 k32 5x5 p2 float32 nchw",
    "n4 c16 14x14 k32 3x3 p1:2 float32 nchw",
    "n4 c16 14x14 k32 3x3 p1 s2 float32 nhwc",
    "n4 c16 14x14 k32 3x3 p1 tf32 nhwc",
    "n4 c16 14x14 k32 3x3 p1 float16 nhwc",
    "n4 c16 14x14 k32 3x3 p1 bfloat16 nhwc",
    "n4 c16 14x14 k32 3x3 p1 float64 nchw",
    "n4 c16 14x14 k32 3x3 p1 float32 nchw acc",
]


@pytest.mark.parametrize(("mode", "effort"), [("find", "fast"), ("find", "wide"), ("heuristic", "fast")])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("line", LINES)
def test_every_candidate_is_right_or_says_why_not(line, direction, mode, effort):
    device = devices.resolve("cuda")
    problem = ConvolutionProblem.parse(f"{direction} {line}")
    arrays = problem.random_arrays(seed=3, device=device)
    first, second, _ = problem.operands
    policy = Policy(mode=mode, effort=effort)
    key = Key.of(problem, policy, device, ("legacy",))
    before = host(arrays["out"])
    wanted, scale = exact(problem, arrays)
    if problem.accumulate:
        wanted, scale = wanted + before, scale + np.abs(before)
    with device.use():
        candidates = list(LegacySource().candidates(problem, policy, device))
        usable = [candidate for candidate in candidates if candidate.reason is None]
        assert usable, [candidate.reason for candidate in candidates]
        # The search ran on arrays of its own.
        np.testing.assert_array_equal(host(arrays["out"]), before)
        assert len({candidate.identity for candidate in candidates}) == len(candidates)
        ran = 0
        for candidate in usable:
            if problem.math == "fma":
                assert candidate.math == "fma"
            assert (candidate.reported_ms is not None) == (effort == "wide")
            arrays["out"][...] = devices.cupy().asarray(before.astype(devices.DTYPES[problem.x_dtype]))
            again = LegacySource().restore(problem, Choice.of(key, candidate), device)
            assert again == candidate
            try:
                runner = again.build()
                runner(arrays[first], arrays[second], arrays["out"])
            except CudnnNotSupportedError:
                # The heuristic may rank first what then does not run (pytorch#1485); what was measured runs.
                assert effort == "fast"
                continue
            ran += 1
            assert runner.workspace <= max(candidate.workspace, devices.workspace_limit(device))
            error = np.abs(host(arrays["out"]) - wanted).max()
            assert error <= TOLERANCE[problem.precision] * scale.max(), f"{candidate}: {error} of {scale.max()}"
        assert ran > 0


@pytest.mark.parametrize("word", ["float32 nchw", "tf32 nhwc", "float16 nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_without_measuring_no_algorithm_is_missing(direction, word):
    """What cuDNN's own measurement finds usable is listed without it too, with the same workspace.

    A fast search leaves out what cannot be the best, and nothing else.
    """
    device = devices.resolve("cuda")
    problem = ConvolutionProblem.parse(f"{direction} n8 c32 28x28 k32 3x3 p1 {word}")
    with device.use():
        found = {}
        policies = {"measured": Policy(effort="wide"), "listed": Policy(mode="heuristic"), "fast": Policy()}
        for name, policy in policies.items():
            usable = [
                candidate
                for candidate in LegacySource().candidates(problem, policy, device)
                if candidate.reason is None
            ]
            found[name] = {candidate.algo: candidate for candidate in usable}
        row = legacy._DIRECTIONS[direction]
        assert found["measured"].keys() <= found["listed"].keys()
        hopeless = set() if problem.math == "fma" else set(row.plain)
        assert found["fast"].keys() == found["listed"].keys() - hopeless
        assert found["fast"]
        for algo in found["measured"]:
            quick = found["listed"][algo]
            assert quick.reported_ms is None
            assert quick.build().workspace == quick.workspace
            # what the table of this source says of algorithms that have no entry is what entries say
            assert quick.deterministic == found["measured"][algo].deterministic == (algo not in row.racy)


@pytest.mark.parametrize("effort", ["fast", "wide"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_find_stays_within_the_workspace_limit(direction, effort):
    device = devices.resolve("cuda")
    problem = ConvolutionProblem.parse(f"{direction} n16 c64 28x28 k64 3x3 p1 float32 nchw")
    with device.use():
        for limit in (0, 1 << 20):
            policy = Policy(workspace_limit=limit, effort=effort)
            candidates = list(LegacySource().candidates(problem, policy, device))
            usable = [candidate for candidate in candidates if candidate.reason is None]
            assert usable
            assert all(candidate.workspace <= limit for candidate in usable)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_deterministic_candidates_repeat_their_bits(direction):
    device = devices.resolve("cuda")
    problem = ConvolutionProblem.parse(f"{direction} n8 c32 28x28 k32 3x3 p1 float32 nchw")
    arrays = problem.random_arrays(seed=4, device=device)
    first, second, _ = problem.operands
    with device.use():
        for candidate in LegacySource().candidates(problem, Policy(), device):
            if candidate.reason is not None or not candidate.deterministic:
                continue
            try:
                runner = candidate.build()
                runner(arrays[first], arrays[second], arrays["out"])
            except CudnnNotSupportedError:
                continue
            bits = host(arrays["out"])
            for _ in range(5):
                arrays["out"].fill(np.nan)
                runner(arrays[first], arrays[second], arrays["out"])
                np.testing.assert_array_equal(host(arrays["out"]), bits)


def test_nothing_usable_lists_every_reason():
    device = devices.resolve("cuda")
    problem = ConvolutionProblem.parse("forward n1 c2 3x3x3x3x3x3x3 k2 1x1x1x1x1x1x1 float32 nchw")
    with device.use():
        candidates = list(LegacySource().candidates(problem, Policy(), device))
        assert candidates
        assert all(candidate.reason for candidate in candidates)
        with pytest.raises(CudnnNotSupportedError):
            candidates[0].build()
