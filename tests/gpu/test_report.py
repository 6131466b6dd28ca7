"""The report of a search on the GPU: its numbers are those of a machine that exists, and its rows can be run."""

import json

import numpy as np
import pytest
from helpers import to_numpy

from flcuda import device as devices
from flcuda import timing
from flcuda.finder import peaks, search
from flcuda.finder.policy import Policy
from flcuda.finder.problem import Problem
from flcuda.finder.report import FindReport

LINES = [
    "forward n32 c64 56x56 k64 3x3 p1 float16 nhwc",
    "backward_filter n8 c32 28x28 k48 3x3 p1 s2 float32 nchw",
]
DEVICE = devices.Device("cuda", 0)


@pytest.fixture(scope="module", params=LINES)
def found(request: pytest.FixtureRequest) -> FindReport:
    return search.find(Problem.parse(request.param), device=DEVICE, verify=True, policy=Policy(), store=False)


def test_the_driver_names_the_clocks():
    properties = devices.cupy().cuda.runtime.getDeviceProperties(DEVICE.index)
    model = devices.device_model(DEVICE)
    clocks = [properties[name] for name in ("clockRate", "memoryClockRate", "memoryBusWidth")]
    assert min(clocks) > 0
    assert peaks.peaks(DEVICE) == peaks.of(model["sm"], model["sm_count"], *clocks, name=model["name"])


def test_a_copy_comes_near_the_peak_of_the_memory_and_not_above():
    machine = peaks.peaks(DEVICE)
    assert machine is not None, f"no peaks are known of {devices.device_model(DEVICE)}"
    cupy = devices.cupy()
    with DEVICE.use():
        source = cupy.ones(1 << 28, np.uint8)
        target = cupy.empty_like(source)
        took = timing.measure(lambda: cupy.copyto(target, source), DEVICE)
    rate = 2 * source.nbytes / (1e-3 * took.median_ms)
    assert 0.5 * machine.bandwidth < rate < 1.02 * machine.bandwidth


def test_no_candidate_is_above_the_peaks(found):
    values = [value for value in json.loads(found.to_json())["rows"] if value["reason"] is None]
    assert values
    for value in values:
        # transforms need fewer operations than are counted
        words = " ".join([value["algo"], *value["notes"]]).lower()
        if "fft" not in words and "winograd" not in words:
            assert 0 < value["share_of_peak"] < 1.05, value
        assert value["limit"] in ("arithmetic", "memory")
        assert value["relative_error"] >= 0


def test_the_printed_report(found):
    text = str(found)
    assert max(len(line) for line in text.split("\n")) <= 80
    assert text.startswith(str(found.key.problem) + "\ncuda: ")
    assert " peak " in text
    assert "TFLOP/s (" in text
    assert "clocks" in text
    assert "<table>" in found._repr_html_()


def test_rows_run_and_agree(found):
    problem = found.key.problem
    arrays = problem.random_arrays(seed=3, device=DEVICE)
    arrays.pop("out")
    results = [to_numpy(row.plan()(**arrays)).astype(np.float64) for row in found.usable[:6]]
    scale = results[0].std()
    for result in results[1:]:
        assert np.abs(result - results[0]).max() < 0.05 * scale


def test_a_row_is_pinned_and_used(found, tmp_path, monkeypatch):
    row = found.usable[-1]
    row.pin(tmp_path)
    monkeypatch.setenv("FLCUDA_CHOICES", str(tmp_path))
    plan = search.plan(found.key.problem, policy=Policy(mode="pinned"), device=DEVICE)
    assert plan.choice.identity == row.candidate.identity


def test_another_policy_without_measuring(found):
    same = found.under(Policy())
    assert same.best == found.best
    strict = found.under(Policy(deterministic=True, workspace_limit=0))
    for row in strict.usable:
        assert row.candidate.deterministic
        assert row.candidate.workspace == 0
    host = found.under(Policy(time="host"))
    times = [row.timing.host_us for row in host.usable]
    assert times[0] <= 1.02 * min(times)
    errors = sorted(row.verification.relative for row in found.usable)
    exact = found.under(Policy(max_error=1.0001 * errors[0] + 1e-30))
    assert 1 <= len(exact.usable) <= len(found.usable)
