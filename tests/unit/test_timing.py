"""The timer and the measuring of candidates, on the CPU."""

import time

import numpy as np
import pytest

from flcuda import timing
from flcuda.device import CPU, Device
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


class Clock:
    """Stands for both timers: each candidate takes the milliseconds that it is told, the last one for ever."""

    def __init__(self, monkeypatch, **times):
        self.times = {name: list(values) for name, values in times.items()}
        self.runs = dict.fromkeys(times, 0)
        monkeypatch.setattr(timing, "once", self.once)
        monkeypatch.setattr(timing, "measure", self.measure)

    def candidates(self):
        return [candidate(name, Runner(self, name)) for name in self.times]

    def once(self, run, device):
        run()
        name = self.last
        self.runs[name] += 1
        times = self.times[name]
        return times.pop(0) if len(times) > 1 else times[0]

    def measure(self, run, device, *, warmup, repeats, budget_s=0.0):
        return timing.summary([self.once(run, device) for _ in range(repeats)], [0.0] * repeats)


class Runner:
    workspace = 0

    def __init__(self, clock, name):
        self.clock = clock
        self.name = name

    def __call__(self, a, b, out):
        self.clock.last = self.name


OPERANDS = (np.ones(3), np.ones(3), np.empty(3))


def algos(rows):
    return [row.candidate.algo for row in rows]


class TestCpu:
    def test_disturbed_samples_do_not_count(self, monkeypatch):
        """One hiccup, even in the first run or in most of them, does not cost a fast candidate its place."""
        clock = Clock(monkeypatch, slow=[8.0], fast=[90.0, 30.0, 4.0, 25.0], steady=[5.0])
        rows = measure(clock.candidates(), OPERANDS, CPU)
        assert algos(rows) == ["fast", "steady", "slow"]
        assert rows[0].timing.low_ms >= 4

    def test_what_is_slow_runs_once(self, monkeypatch):
        clock = Clock(monkeypatch, slower=[900.0], slow=[250.0])
        rows = measure(clock.candidates(), OPERANDS, CPU)
        assert algos(rows) == ["slow", "slower"]
        assert clock.runs == {"slower": 1, "slow": 1}
        assert rows[0].timing.median_ms == 250.0
        assert rows[0].timing.samples == 1

    def test_all_candidates_share_one_budget(self, monkeypatch):
        clock = Clock(monkeypatch, a=[100.0], b=[60.0])
        rows = measure(clock.candidates(), OPERANDS, CPU)
        assert algos(rows) == ["b", "a"]
        # 160 ms, then 100 and 60: then the 300 ms are used up
        assert clock.runs == {"a": 2, "b": 2}

    def test_quick_ones_are_sampled_well_and_one_alone_hardly(self, monkeypatch):
        clock = Clock(monkeypatch, a=[1.0], b=[2.0])
        measure(clock.candidates(), OPERANDS, CPU)
        assert clock.runs == {"a": 10, "b": 10}
        clock = Clock(monkeypatch, alone=[1.0])
        assert measure(clock.candidates(), OPERANDS, CPU)[0].timing.samples == 3

    def test_with_the_clock(self):
        fast, slow = Sleeper(0.004), Sleeper(0.012)
        rows = measure([candidate("slow", slow), candidate("fast", fast)], OPERANDS, CPU)
        assert algos(rows) == ["fast", "slow"]
        assert all(row.reason is None and row.runner is not None for row in rows)
        assert rows[0].timing.median_ms >= 4
        assert rows[0].build_ms < 4 <= rows[0].first_run_ms

    def test_what_fails_later_is_unusable(self, monkeypatch):
        def fails_when_run_again(a, b, out):
            runs.append(1)
            if len(runs) > 1:
                raise MemoryError("full")

        runs = []
        rows = measure([candidate("a", fails_when_run_again), candidate("b", Sleeper(0))], OPERANDS, CPU)
        assert algos(rows) == ["b", "a"]
        assert rows[1].reason == "out of memory: full"
        assert len(runs) == 2


class TestCuda:
    """How a GPU's candidates are ranked, with a clock instead of a GPU."""

    def test_the_hopeless_are_dropped_and_stay_behind(self, monkeypatch):
        # once, then two coarse samples; "fast" is disturbed afterwards
        clock = Clock(monkeypatch, hopeless=[9.0, 4.0], fast=[9.0, 1.0, 1.0, 6.0], close=[9.0, 2.0, 2.0, 5.0])
        rows = measure(clock.candidates(), OPERANDS, Device("cuda", 0))
        assert algos(rows) == ["close", "fast", "hopeless"]
        assert clock.runs["hopeless"] == 3
        assert rows[2].timing.samples == 2
        assert rows[0].timing.samples == 10
        assert all(row.reason is None for row in rows)


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
