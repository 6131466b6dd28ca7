"""The timer and the measuring of candidates, on the CPU."""

import time

import numpy as np
import pytest

from flcuda import timing
from flcuda.device import CPU
from flcuda.errors import CudnnNotSupportedError
from flcuda.finder.candidate import Candidate
from flcuda.finder.measure import measure


def test_times_a_sleep():
    times = timing.measure(lambda: time.sleep(0.01), CPU, warmup=1, repeats=5)
    assert times.samples == 5
    assert 10 <= times.low_ms <= times.median_ms <= times.high_ms
    assert times.median_ms < 100
    assert times.spread_ms == times.high_ms - times.low_ms
    assert times.host_us == pytest.approx(1e3 * times.median_ms)


def test_runs_no_more_often_than_it_says():
    calls = []
    timing.measure(lambda: calls.append(1), CPU, warmup=3, repeats=7)
    assert len(calls) == 10
    calls.clear()
    timing.measure(lambda: calls.append(1), CPU, warmup=0, repeats=1)
    assert len(calls) == 1


def test_a_budget_lowers_the_number_of_samples_but_not_to_none():
    calls = []

    def slow():
        calls.append(1)
        time.sleep(0.02)

    assert timing.measure(slow, CPU, warmup=0, repeats=100, budget_s=0.1).samples in range(3, 6)
    calls.clear()
    assert timing.measure(slow, CPU, warmup=0, repeats=100, budget_s=0).samples == timing.LEAST_REPEATS
    assert len(calls) == timing.LEAST_REPEATS


@pytest.mark.parametrize("arguments", [{"repeats": 0}, {"warmup": -1}, {"budget_s": -1.0}])
def test_bad_arguments_are_named(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        timing.measure(lambda: None, CPU, **arguments)


class Sleeper:
    workspace = 0

    def __init__(self, seconds, error=None):
        self.seconds = seconds
        self.error = error
        self.calls = 0

    def __call__(self, a, b, out):
        self.calls += 1
        if self.error is not None:
            raise self.error
        time.sleep(self.seconds)
        out[...] = a + b


def candidate(algo, runner, reason=None):
    def build():
        if isinstance(runner, Exception):
            raise runner
        return runner

    return Candidate("test", algo, "fma", 0, True, build, reason=reason)


def test_measure_ranks_and_drops_the_hopeless():
    fast, slow, hopeless = Sleeper(0.004), Sleeper(0.008), Sleeper(0.06)
    rows = measure(
        [candidate("hopeless", hopeless), candidate("slow", slow), candidate("fast", fast)],
        (np.ones(3), np.ones(3), np.empty(3)),
        CPU,
        repeats=4,
    )
    assert [row.candidate.algo for row in rows] == ["fast", "slow", "hopeless"]
    assert hopeless.calls == 3
    assert fast.calls > 4
    assert all(row.reason is None and row.runner is not None for row in rows)
    assert rows[0].timing.median_ms >= 4
    assert rows[0].timing.samples == 4
    assert rows[2].timing.samples == 2


def test_measure_reports_what_fails_and_goes_on():
    refused = CudnnNotSupportedError("cudnnX", 3000, "no kernel")
    refused.add_note("seen with channels 3")
    never = Sleeper(0)
    rows = measure(
        [
            candidate("refused", refused),
            candidate("memory", Sleeper(0, MemoryError("5 GB wanted"))),
            candidate("excluded", never, reason="not deterministic"),
            candidate("works", Sleeper(0)),
        ],
        (np.ones(3), np.ones(3), np.empty(3)),
        CPU,
    )
    assert [row.candidate.algo for row in rows] == ["works", "refused", "memory", "excluded"]
    reasons = [row.reason for row in rows]
    assert reasons[0] is None
    assert "no kernel" in reasons[1]
    assert "channels 3" in reasons[1]
    assert reasons[2] == "out of memory: 5 GB wanted"
    assert reasons[3] == "not deterministic"
    assert never.calls == 0
    assert all(row.runner is None and row.timing is None for row in rows[1:])


def test_measure_does_not_hide_a_bug():
    with pytest.raises(ZeroDivisionError):
        measure([candidate("bug", Sleeper(0, ZeroDivisionError()))], (np.ones(3), np.ones(3), np.empty(3)), CPU)
