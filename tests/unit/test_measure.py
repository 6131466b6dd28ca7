"""Measuring candidates: who runs how often, who is verified, and who comes first."""

import functools
import itertools
import time
import types

import numpy as np
import pytest
from finder_fakes import PROBLEM

from flcuda import device as devices
from flcuda import timing
from flcuda.device import CPU, Device
from flcuda.errors import CudnnNotSupportedError
from flcuda.finder import measure as measuring
from flcuda.finder.candidate import Candidate
from flcuda.finder.measure import measure, names_in_graph, operand_sets, short_name
from flcuda.finder.policy import Policy
from flcuda.finder.problem import ConvolutionProblem, fill_normal
from flcuda.finder.verify import Verification

GPU = Device("cuda", 0)
OPERANDS = (np.ones(3), np.ones(3), np.empty(3))
GIB = 1 << 30

run_all = functools.partial(measure, workspace_limit=GIB)


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


def candidate(algo, runner, reason=None, **fields):
    def build():
        if isinstance(runner, Exception):
            raise runner
        return runner

    return Candidate(
        "test",
        algo,
        "fma",
        fields.pop("workspace", 0),
        fields.pop("deterministic", True),
        build,
        reason=reason,
        **fields,
    )


def algos(rows):
    return [row.candidate.algo for row in rows]


class Clock:
    """Stands for the timer of the CPU: each candidate takes the milliseconds that it is told, the last one for ever."""

    def __init__(self, monkeypatch, **times):
        self.times = {name: list(values) for name, values in times.items()}
        self.runs = dict.fromkeys(times, 0)
        monkeypatch.setattr(timing, "once", self.once)
        monkeypatch.setattr(timing, "first", self.first)

    def first(self, run, device):
        took_ms = self.once(run, device)
        return timing.summary([took_ms], [took_ms])

    def candidates(self):
        return [candidate(name, functools.partial(self.run, name)) for name in self.times]

    def run(self, name, a, b, out):
        self.last = name

    def once(self, run, device):
        run()
        name = self.last
        self.runs[name] += 1
        times = self.times[name]
        return times.pop(0) if len(times) > 1 else times[0]


class TestCpu:
    def test_disturbed_samples_do_not_count(self, monkeypatch):
        """One hiccup, even in the first run or in most of them, does not cost a fast candidate its place."""
        clock = Clock(monkeypatch, slow=[8.0], fast=[90.0, 30.0, 4.0, 25.0], steady=[5.0])
        rows = run_all(clock.candidates(), [OPERANDS], CPU, Policy())
        assert algos(rows) == ["fast", "steady", "slow"]
        assert rows[0].timing.low_ms >= 4

    def test_what_is_slow_runs_once(self, monkeypatch):
        clock = Clock(monkeypatch, slower=[900.0], slow=[250.0])
        rows = run_all(clock.candidates(), [OPERANDS], CPU, Policy())
        assert algos(rows) == ["slow", "slower"]
        assert clock.runs == {"slower": 1, "slow": 1}
        assert rows[0].timing.median_ms == 250.0
        assert rows[0].timing.samples == 1

    def test_all_candidates_share_one_budget(self, monkeypatch):
        clock = Clock(monkeypatch, a=[100.0], b=[60.0])
        rows = run_all(clock.candidates(), [OPERANDS], CPU, Policy())
        assert algos(rows) == ["b", "a"]
        # 160 ms, then 100 and 60: then the 300 ms are used up
        assert clock.runs == {"a": 2, "b": 2}

    def test_quick_ones_are_sampled_well_and_one_alone_hardly(self, monkeypatch):
        clock = Clock(monkeypatch, a=[1.0], b=[2.0])
        run_all(clock.candidates(), [OPERANDS], CPU, Policy())
        assert clock.runs == {"a": 10, "b": 10}
        clock = Clock(monkeypatch, alone=[1.0])
        assert run_all(clock.candidates(), [OPERANDS], CPU, Policy())[0].timing.samples == 3

    def test_what_is_known_is_ranked_with_the_rest(self, monkeypatch):
        clock = Clock(monkeypatch, a=[3.0], b=[2.0])
        first, second = clock.candidates()
        known = run_all([first], [OPERANDS], CPU, Policy())
        rows = run_all([second], [OPERANDS], CPU, Policy(), known=known)
        assert algos(rows) == ["b", "a"]
        assert all(row.timing.samples == 10 for row in rows)

    def test_with_the_clock(self):
        fast, slow = Sleeper(0.004), Sleeper(0.012)
        rows = run_all([candidate("slow", slow), candidate("fast", fast)], [OPERANDS], CPU, Policy())
        assert algos(rows) == ["fast", "slow"]
        assert all(row.reason is None and row.runner is not None and row.kernels is None for row in rows)
        assert rows[0].timing.median_ms >= 4
        assert rows[0].build_ms < 4 <= rows[0].first_run_ms

    def test_what_fails_later_is_unusable(self, monkeypatch):
        def fails_when_run_again(a, b, out):
            runs.append(1)
            if len(runs) > 1:
                raise MemoryError("full")

        runs = []
        pair = [candidate("a", fails_when_run_again), candidate("b", Sleeper(0))]
        rows = run_all(pair, [OPERANDS], CPU, Policy())
        assert algos(rows) == ["b", "a"]
        assert rows[1].reason == "out of memory: full"
        assert rows[1].timing is None
        assert len(runs) == 2


class Gpu:
    """Stands for the three timers of a GPU.

    A candidate `takes` milliseconds in the coarse and in the fine round, and its first run, in which `loading` more
    pass on the host. It can be told to fail from its n-th run on.
    """

    def __init__(self, monkeypatch):
        self.takes = {}
        self.fails = {}
        self.host_us = {}
        self.runs = []
        self.sets = []
        self.checked = []
        self.rounds = []
        for name in ("first", "measure", "in_turn"):
            monkeypatch.setattr(timing, name, getattr(self, name))
        monkeypatch.setattr(devices, "synchronize", lambda device: None)
        pool = types.SimpleNamespace(free_all_blocks=lambda: None)
        monkeypatch.setattr(devices, "cupy", lambda: types.SimpleNamespace(get_default_memory_pool=lambda: pool))
        monkeypatch.setattr(devices, "is_capturing", lambda: False)

    def add(self, name, coarse, fine=None, *, host_us=5.0, fails_at=None, **fields):
        self.takes[name] = (coarse, coarse if fine is None else fine)
        self.host_us[name] = host_us
        self.fails[name] = fails_at
        return candidate(name, functools.partial(self.run, name), **fields)

    def run(self, name, *operands):
        self.runs.append(name)
        self.sets.append(operands)
        if self.fails[name] is not None and self.runs.count(name) >= self.fails[name]:
            raise MemoryError(f"{name} has none")

    def timing_of(self, run, repeats, fine):
        run()
        name = self.runs[-1]
        return timing.summary([self.takes[name][fine]] * repeats, [self.host_us[name] / 1e3])

    def first(self, run, device):
        found = self.timing_of(run, 1, False)
        loading = 5.0
        low = max(0.0, found.median_ms - 0.1)
        return timing.Timing(
            low, low, found.median_ms + loading, 1, found.host_us + 1e3 * loading, queued=False, at_least=True
        )

    def measure(self, run, device, *, warmup, repeats, launches=None):
        assert warmup == 0
        return self.timing_of(run, repeats, False)

    def in_turn(self, works, device, *, repeats, budget_s):
        start = len(self.runs)
        found = [self.timing_of(run, repeats, True) for (run,) in works]
        self.rounds.append(self.runs[start:])
        return found


class Verifier:
    """Finds what a test tells it to, by the candidate's name."""

    def __init__(self, gpu, **found):
        self.gpu = gpu
        self.found = found

    def check(self, runner, *, deterministic):
        (name,) = runner.args
        self.gpu.checked.append(name)
        values = {"error": 0.0, "bound": 1.0, "repeats": True if deterministic else None, "reason": None}
        return Verification(**{**values, **self.found.get(name, {})})


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def on_gpu(candidates, policy=None, *arguments, sets=(OPERANDS,), **more):
    return run_all(candidates, sets, GPU, Policy() if policy is None else policy, *arguments, **more)


class TestRounds:
    def test_the_hopeless_run_once_the_near_three_times_and_the_leaders_in_turn(self, gpu):
        rows = on_gpu(
            [
                gpu.add("hopeless", 16.0),
                gpu.add("close", 1.05, 0.9),
                gpu.add("fast", 1.0, 1.1),
                gpu.add("near", 1.4),
                gpu.add("slow", 2.0),
            ]
        )
        assert algos(rows) == ["close", "fast", "near", "slow", "hopeless"]
        assert {name: gpu.runs.count(name) for name in gpu.takes} == {
            "hopeless": 1,
            "close": 4,
            "fast": 4,
            "near": 3,
            "slow": 2,
        }
        assert gpu.rounds == [["fast", "close"]]
        assert [row.timing.samples for row in rows] == [10, 10, 1, 1, 1]
        assert [row.timing.at_least for row in rows] == [False] * 4 + [True]
        assert all(row.reason is None and row.runner is not None for row in rows)
        assert rows[4].timing.median_ms == pytest.approx(15.9)

    def test_one_disturbed_sample_puts_nobody_out_of_the_race(self, gpu, monkeypatch):
        """A GPU that has just been woken is slow for the first that is sampled."""
        disturbed = []

        def woken(run, repeats, fine):
            found = timing_of(run, repeats, fine)
            if gpu.runs[-1] == "first" and gpu.runs.count("first") == 2:
                disturbed.append(found)
                return timing.summary([1.2 * found.median_ms], [0.005])
            return found

        timing_of = gpu.timing_of
        monkeypatch.setattr(gpu, "timing_of", woken)
        rows = on_gpu([gpu.add("first", 1.0), gpu.add("second", 1.01)])
        assert len(disturbed) == 1
        assert algos(rows) == ["first", "second"]
        assert gpu.rounds == [["first", "second"]]

    def test_two_disturbed_samples_put_nobody_out_of_the_race(self, gpu, monkeypatch):
        disturbed = []

        def woken(run, repeats, fine):
            found = timing_of(run, repeats, fine)
            if gpu.runs[-1] == "first" and gpu.runs.count("first") in (2, 3):
                disturbed.append(found)
                return timing.summary([1.12 * found.median_ms], [0.005])
            return found

        timing_of = gpu.timing_of
        monkeypatch.setattr(gpu, "timing_of", woken)
        rows = on_gpu([gpu.add("first", 1.0), gpu.add("second", 1.01), gpu.add("third", 1.4)])
        assert len(disturbed) == 2
        assert algos(rows) == ["first", "second", "third"]
        assert gpu.rounds == [["first", "second"]]
        assert gpu.runs.count("third") == 3

    def test_without_a_fine_round_the_coarse_ones_rank(self, gpu):
        first = on_gpu([gpu.add("a", 1.0), gpu.add("b", 2.0), gpu.add("c", 9.0)], fine=False)
        assert algos(first) == ["a", "b", "c"]
        assert gpu.rounds == []
        assert [gpu.runs.count(name) for name in "abc"] == [3, 2, 1]
        second = on_gpu([gpu.add("d", 1.02, 0.9)], fine=False, known=first)
        assert algos(second) == ["a", "d", "b", "c"]
        # what is known is not sampled again, and what could not win by then still cannot
        assert [gpu.runs.count(name) for name in "abcd"] == [3, 2, 1, 3]
        last = on_gpu([], known=second)
        assert algos(last) == ["d", "a", "b", "c"]
        assert gpu.rounds == [["a", "d"]]

    def test_loading_kernels_makes_nobody_hopeless(self, gpu):
        """All but a little of what the first run took was loading."""
        rows = on_gpu([gpu.add("a", 0.01), gpu.add("b", 0.05), gpu.add("c", 0.009)])
        assert algos(rows) == ["c", "a", "b"] or algos(rows) == ["a", "c", "b"]
        assert not any(row.timing.at_least for row in rows)

    def test_no_more_leaders_than_five(self, gpu):
        rows = on_gpu([gpu.add(f"c{n}", 1 + n / 1000) for n in range(9)])
        assert gpu.rounds == [[f"c{n}" for n in range(5)]]
        assert algos(rows)[5:] == ["c5", "c6", "c7", "c8"]

    def test_one_alone_is_measured_well(self, gpu):
        (row,) = on_gpu([gpu.add("alone", 1.0)])
        assert row.timing.samples == 10

    def test_ties_are_for_the_lower_id(self, gpu, monkeypatch):
        def scattered(run, repeats, fine):
            run()
            middle = gpu.takes[gpu.runs[-1]][fine]
            return timing.summary([middle + 0.01 * (n - 4.5) for n in range(repeats)], [0.005])

        monkeypatch.setattr(gpu, "timing_of", scattered)
        assert algos(on_gpu([gpu.add("b", 1.0), gpu.add("a", 1.005), gpu.add("c", 1.05)])) == ["a", "b", "c"]

    def test_each_run_takes_the_next_set_whoever_runs(self, gpu):
        sets = [(np.full(2, n), np.full(2, n), np.empty(2)) for n in range(3)]
        on_gpu([gpu.add("a", 1.0), gpu.add("b", 1.0)], sets=sets)
        assert [int(operands[0][0]) for operands in gpu.sets] == [n % 3 for n in range(8)]

    def test_by_the_hosts_time_the_devices_makes_nobody_hopeless(self, gpu):
        rows = on_gpu([gpu.add("fast", 1.0, host_us=40.0), gpu.add("quick", 9.0, host_us=5.0)], Policy(time="host"))
        assert algos(rows) == ["quick", "fast"]
        assert gpu.rounds == [["quick"]]

    def test_by_both_the_larger_time_counts(self, gpu):
        rows = on_gpu([gpu.add("fast", 0.01, host_us=40.0), gpu.add("quick", 0.02, host_us=5.0)], Policy(time="both"))
        assert algos(rows) == ["quick", "fast"]

    def test_wide_samples_more(self, gpu):
        (row,) = on_gpu([gpu.add("alone", 1.0)], Policy(effort="wide"))
        assert row.timing.samples == 20

    def test_who_fails_in_the_coarse_round_is_out(self, gpu):
        rows = on_gpu([gpu.add("fails", 1.0, fails_at=2), gpu.add("works", 2.0)])
        assert algos(rows) == ["works", "fails"]
        assert rows[1].reason == "out of memory: fails has none"
        assert rows[1].runner is None
        assert rows[1].timing is None

    def test_who_fails_in_the_fine_round_is_out_and_the_others_run_it_again(self, gpu):
        rows = on_gpu([gpu.add("a", 1.0), gpu.add("fails", 1.01, fails_at=3), gpu.add("b", 1.02), gpu.add("c", 1.2)])
        assert algos(rows) == ["a", "b", "c", "fails"]
        assert gpu.rounds == [["a", "b"]]
        assert rows[3].reason == "out of memory: fails has none"

    def test_when_all_fail_all_are_reported(self, gpu):
        rows = on_gpu([gpu.add(f"c{n}", 1.0, fails_at=1 + n) for n in range(3)])
        assert algos(rows) == ["c0", "c1", "c2"]
        assert all(row.reason is not None for row in rows)
        assert on_gpu([]) == []

    def test_who_does_not_build_or_is_excluded_is_behind(self, gpu):
        refused = CudnnNotSupportedError("cudnnX", 3000, "no kernel")
        rows = on_gpu(
            [candidate("excluded", None, reason="not deterministic"), candidate("refused", refused), gpu.add("a", 1.0)]
        )
        assert algos(rows) == ["a", "excluded", "refused"]
        assert "no kernel" in rows[2].reason

    def test_kernels_are_named_for_the_fine_round_only(self, gpu, monkeypatch):
        asked = []

        def names(run, device):
            run()
            asked.append(gpu.runs[-1])
            return (f"kernel_of_{gpu.runs[-1]}",)

        monkeypatch.setattr(measuring, "kernel_names", names)
        pair = [gpu.add("slow", 2.0), gpu.add("fast", 1.0)]
        rows = on_gpu(pair, kernels=True)
        assert [row.kernels for row in rows] == [("kernel_of_fast",), None]
        assert asked == ["fast"]
        assert on_gpu([], kernels=True, known=rows)[0].kernels == ("kernel_of_fast",)
        assert asked == ["fast"]
        assert [row.kernels for row in on_gpu(pair)] == [None, None]


class TestKnown:
    def test_is_not_built_or_run_first_or_verified_again_but_races(self, gpu):
        verifier = Verifier(gpu)
        old = on_gpu([gpu.add("old", 1.0), gpu.add("slow", 2.0), gpu.add("hopeless", 9.0)], None, verifier)
        runs = gpu.runs.copy()
        rows = on_gpu([gpu.add("new", 1.02, 0.8), gpu.add("bad", 3.0)], None, verifier, known=old)
        assert algos(rows) == ["new", "old", "slow", "bad", "hopeless"]
        assert gpu.runs[len(runs) :] == ["new", "bad", "new", "old", "new"] or gpu.rounds[-1] == ["old", "new"]
        assert gpu.runs.count("slow") == runs.count("slow")
        assert gpu.runs.count("hopeless") == 1
        assert sorted(gpu.checked) == ["bad", "hopeless", "new", "old", "slow"]
        assert rows[1].build_ms == old[0].build_ms
        assert rows[1].first_run_ms == old[0].first_run_ms

    def test_who_led_and_is_far_behind_now_keeps_its_times(self, gpu):
        old = on_gpu([gpu.add("old", 1.0)])
        rows = on_gpu([gpu.add("new", 0.5)], known=old)
        assert algos(rows) == ["new", "old"]
        assert rows[1].timing == old[0].timing

    def test_what_was_unusable_stays_so(self, gpu):
        old = on_gpu([gpu.add("old", 1.0, fails_at=1)])
        rows = on_gpu([gpu.add("new", 0.5)], known=old)
        assert algos(rows) == ["new", "old"]
        assert rows[1].reason == "out of memory: old has none"


WRONG = {"reason": "y at (0, 0) is 7"}
UNSTEADY = {"repeats": False}


class TestVerification:
    def test_fast_verifies_all_and_times_none_that_is_wrong(self, gpu):
        verifier = Verifier(gpu, wrong=WRONG)
        rows = on_gpu([gpu.add("wrong", 0.5), gpu.add("right", 1.0), gpu.add("hopeless", 9.0)], None, verifier)
        assert algos(rows) == ["right", "hopeless", "wrong"]
        assert gpu.checked == ["wrong", "right", "hopeless"]
        assert rows[2].reason == "y at (0, 0) is 7"
        assert rows[2].verification.reason == rows[2].reason
        assert gpu.runs.count("wrong") == 1
        assert all(row.verification is not None for row in rows)

    def test_wide_verifies_the_leaders_and_the_next_takes_the_place_of_a_wrong_one(self, gpu):
        verifier = Verifier(gpu, best=WRONG, third=WRONG)
        candidates = [
            gpu.add("far", 1.5),
            gpu.add("third", 1.05),
            gpu.add("best", 0.8),
            gpu.add("second", 1.0),
            gpu.add("fourth", 1.09),
        ]
        rows = on_gpu(candidates, Policy(effort="wide"), verifier)
        assert algos(rows) == ["second", "fourth", "far", "third", "best"]
        assert gpu.checked == ["best", "second", "third", "fourth"]
        assert gpu.rounds == [["second", "fourth"]]
        assert [row.verification is None for row in rows] == [False, False, True, False, False]
        assert rows[2].reason is None
        assert rows[4].reason == "y at (0, 0) is 7"

    def test_wide_looks_past_five_wrong_ones(self, gpu):
        verifier = Verifier(gpu, **{f"c{n}": WRONG for n in range(7)})
        rows = on_gpu([gpu.add(f"c{n}", 1 + n / 1000) for n in range(9)], Policy(effort="wide"), verifier)
        assert algos(rows)[:2] == ["c7", "c8"]
        assert gpu.rounds == [["c7", "c8"]]

    def test_wide_under_a_largest_error_verifies_all(self, gpu):
        """What has not been verified might be above it."""
        verifier = Verifier(gpu, rough={"relative": 0.02})
        policy = Policy(effort="wide", max_error=0.01)
        rows = on_gpu([gpu.add("rough", 5.0), gpu.add("fine", 1.0), gpu.add("slow", 2.0)], policy, verifier)
        assert algos(rows) == ["fine", "slow", "rough"]
        assert "0.02" in rows[2].reason
        assert gpu.checked == ["rough", "fine", "slow"]

    def test_bits_that_differ_matter_where_determinism_is_asked(self, gpu):
        pair = [gpu.add("unsteady", 0.5), gpu.add("steady", 1.0)]
        rows = on_gpu(pair, None, Verifier(gpu, unsteady=UNSTEADY))
        assert algos(rows) == ["unsteady", "steady"]
        rows = on_gpu(pair, Policy(deterministic=True), Verifier(gpu, unsteady=UNSTEADY))
        assert algos(rows) == ["steady", "unsteady"]
        assert rows[1].reason == "not deterministic: a second run gave other bits"

    def test_memory_that_does_not_suffice_to_verify_is_a_reason(self, gpu):
        class Full(Verifier):
            def check(self, runner, *, deterministic):
                raise MemoryError("no buffer")

        (row,) = on_gpu([gpu.add("a", 1.0)], None, Full(gpu))
        assert row.reason == "out of memory: no buffer"

    def test_on_the_cpu_all_are_verified_whatever_the_effort(self, monkeypatch):
        gpu = types.SimpleNamespace(checked=[])
        clock = Clock(monkeypatch, a=[1.0], b=[9.0])
        rows = run_all(clock.candidates(), [OPERANDS], CPU, Policy(effort="wide"), Verifier(gpu, a=WRONG))
        assert algos(rows) == ["b", "a"]
        assert gpu.checked == ["a", "b"]


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_measure_reports_what_fails_and_goes_on(device, monkeypatch):
    if device == GPU:
        Gpu(monkeypatch)
        monkeypatch.setattr(timing, "first", lambda run, device: (run(), timing.summary([1.0], [0.1]))[1])
        monkeypatch.setattr(timing, "measure", lambda run, device, **_: (run(), timing.summary([1.0], [0.1]))[1])
        monkeypatch.setattr(timing, "in_turn", lambda works, device, **_: [timing.summary([1.0], [0.1]) for _ in works])
    refused = CudnnNotSupportedError("cudnnX", 3000, "no kernel")
    refused.add_note("seen with channels 3")
    never = Sleeper(0)
    full = Sleeper(0, MemoryError("5 GB wanted"))
    rows = run_all(
        [
            candidate("refused", refused),
            candidate("memory", full),
            candidate("excluded", never, reason="not deterministic"),
            candidate("works", Sleeper(0)),
        ],
        [OPERANDS],
        device,
        Policy(),
    )
    assert algos(rows) == ["works", "refused", "memory", "excluded"]
    reasons = [row.reason for row in rows]
    assert reasons[0] is None
    assert "no kernel" in reasons[1]
    assert "channels 3" in reasons[1]
    assert reasons[2] == "out of memory: 5 GB wanted"
    assert reasons[3] == "not deterministic"
    assert never.calls == 0
    # on a GPU once more, after the pool has given its free blocks back
    assert full.calls == (1 if device == CPU else 2)
    assert all(row.runner is None and row.timing is None for row in rows[1:])


def test_measure_does_not_hide_a_bug():
    with pytest.raises(ZeroDivisionError):
        run_all([candidate("bug", Sleeper(0, ZeroDivisionError()))], [OPERANDS], CPU, Policy())


class Pointer:
    """Memory of the fake device: an offset into an array of bytes that begins at an address of its own."""

    def __init__(self, raw, ptr, offset=0):
        self.raw = raw
        self.base = ptr
        self.offset = offset
        self.ptr = ptr + offset

    def __add__(self, count):
        return Pointer(self.raw, self.base, self.offset + count)


class Module:
    """As much of CuPy as makes operands, over NumPy; each allocation begins 48 bytes off a multiple of 256."""

    def __init__(self):
        self.allocated = []
        self.addresses = {}
        self.kept = []  # that no two arrays have one id
        self.free = 1 << 34
        self.cuda = types.SimpleNamespace(
            runtime=types.SimpleNamespace(memGetInfo=lambda: (self.free, 1 << 40)),
            Device=lambda index: types.SimpleNamespace(attributes={"L2CacheSize": 4000}),
        )

    def get_default_memory_pool(self):
        return types.SimpleNamespace(free_bytes=lambda: 0)

    def empty(self, count, dtype):
        if dtype != np.uint8:
            return np.empty(count, dtype)
        raw = np.zeros(count, np.uint8)
        self.allocated.append(raw)
        return types.SimpleNamespace(data=Pointer(raw, 256 * 1000 * len(self.allocated) + 48))

    def ndarray(self, shape, dtype, pointer, strides=None):
        array = np.ndarray(shape, dtype, pointer.raw.data, pointer.offset, strides)
        self.addresses[id(array)] = pointer.ptr
        self.kept.append(array)
        return array


@pytest.fixture
def module(monkeypatch):
    found = Module()
    monkeypatch.setattr(devices, "cupy", lambda: found)
    monkeypatch.setattr(measuring, "fill_normal", lambda array, seed, offset, _: fill_normal(array, seed, offset, CPU))
    return found


class FakeDevice:
    kind = "cuda"
    index = 0

    def __init__(self, module):
        self.xp = module


def offset(array):
    return array.__array_interface__["data"][0]


class TestOperandSets:
    def test_one_allocation_an_operand_and_enough_sets(self, module):
        sets = operand_sets(PROBLEM, FakeDevice(module), Policy())
        # x 720 bytes, w 432, y 960... with a cache of 4000: 1 + ceil(8000 / 2112)
        assert len(sets) == 1 + -(-8000 // sum(array.nbytes for array in sets[0])) > 3
        assert len(module.allocated) == 3
        for position, name in enumerate(PROBLEM.operands):
            column = [each[position] for each in sets]
            assert all(array.shape == PROBLEM.shape_of(name) for array in column)
            assert all(module.addresses[id(array)] % 256 == 0 for array in column)
            starts = sorted(offset(array) for array in column)
            assert all(later - sooner >= column[0].nbytes for sooner, later in itertools.pairwise(starts))
        x, w, _ = sets[0]
        assert abs(x.mean()) < 0.3
        assert 0.7 < x.std() < 1.3
        assert not np.array_equal(x, sets[1][0])
        assert not np.array_equal(x.ravel()[: w.size], w.ravel())
        assert all(np.isnan(y).all() for *_, y in sets)

    def test_warm_is_one_set(self, module):
        assert len(operand_sets(PROBLEM, FakeDevice(module), Policy(l2="warm"))) == 1

    def test_memory_bounds_them(self, module):
        module.free = 4 * 3 * 2112 + 100
        assert len(operand_sets(PROBLEM, FakeDevice(module), Policy())) <= 3
        module.free = 10
        assert len(operand_sets(PROBLEM, FakeDevice(module), Policy())) == 1

    def test_strides_alignment_and_accumulation_are_the_problems(self, module):
        problem = ConvolutionProblem.create(
            "forward", (2, 3, 5, 4), (4, 3, 3, 3), dtype="float16", layout="nhwc", padding=1, accumulate=True
        )
        problem = ConvolutionProblem(
            **{
                **{name: getattr(problem, name) for name in problem.__dataclass_fields__ if not name.startswith("_")},
                "x_alignment": 2,
                "w_alignment": 8,
            }
        )
        sets = operand_sets(problem, FakeDevice(module), Policy())
        assert len(sets) > 3
        for each in sets:
            for array, name, remainder in zip(each, problem.operands, (2, 8, 0), strict=True):
                assert module.addresses[id(array)] % 256 == remainder
                assert tuple(step // 2 for step in array.strides) == problem.strides_of(name)
                assert np.isfinite(array).all()
                assert array.astype(float).std() > 0.5

    def test_on_the_cpu_one_set_of_the_usual_arrays(self):
        (operands,) = operand_sets(PROBLEM, CPU, Policy())
        arrays = PROBLEM.random_arrays(device=CPU)
        assert np.array_equal(operands[0], arrays["x"])
        assert np.array_equal(operands[1], arrays["w"])
        assert np.isnan(operands[2]).all()


DOT = r"""digraph dot {
subgraph cluster_1 {
label="graph_1" graph[style="dashed"];
"graph_1_node_0"[
shape="record"
label="{MEMSET
| {{ID | node handle | dptr | pitch | value} | {0 (topoId: 3) | 0x1 | 0x2 | 0 | 0}}}"];
"graph_1_node_1"[
shape="record"
label="{KERNEL
| {ID | 1 (topoId: 2) | _ZN5cudnn3ops16nchwToNhwcKernelI6__halfS2_fLb0EEEvNS0_8params_tE\<\<\<\{12,1,1\}, 256, 0\>\>\>}
| {{node handle | func handle} | {0x000055 | 0x000056}}}"];
"graph_1_node_2"[
shape="record"
label="{KERNEL
| {ID | 2 (topoId: 1) | sm80_xmma_fprop_implicit_gemm_f16f16_nhwckrsc_nhwc_kernel_cudnn\<\<\<392, 128, 81920\>\>\>}
| {{node handle | func handle} | {0x000057 | 0x000058}}}"];
"graph_1_node_0" -> "graph_1_node_1";
}
}
"""


class TestKernelNames:
    def test_are_found_in_a_graph(self):
        assert names_in_graph(DOT) == (
            "cudnn::ops::nchwToNhwcKernel<__half>",
            "sm80_xmma_fprop_implicit_gemm_f16f16_nhwckrsc_nhwc_kernel_cudnn",
        )
        assert names_in_graph("digraph dot {}") == ()

    def test_are_found_in_short_labels_and_where_they_are_not_mangled(self):
        assert names_in_graph('"n"[label="1\n_Z3addPfi\\<\\<\\<4,256,0\\>\\>\\>\n"];') == ("add",)
        assert names_in_graph(r"| {1 | void f\<int, g\<2\>\>(int)\<\<\<1, 2, 3\>\>\>}") == ("void f<int, g<2>>(int)",)

    @pytest.mark.parametrize(
        ("symbol", "name"),
        [
            ("_Z3addPfS_i", "add"),
            ("_ZL4copyv", "copy"),
            ("_ZN12_GLOBAL__N_13fooIfEEvPT_", "(anonymous)::foo"),
            ("_ZN7cutlass7Kernel2I22cutlass_80_s1688gemm_aEEvNT_6ParamsE", "cutlass::Kernel2<cutlass_80_s1688gemm_a>"),
            (
                "_ZN7cutlass13device_kernelINS_4gemm6kernel4UnivIiEEEEvNT_6ParamsE",
                "cutlass::device_kernel<gemm::kernel::Univ>",
            ),
            ("implicit_convolve_sgemm", "implicit_convolve_sgemm"),
            ("_Z", "_Z"),
            ("", ""),
        ],
    )
    def test_are_short(self, symbol, name):
        assert short_name(symbol) == name

    def test_nothing_is_asked_of_the_cpu(self):
        assert measuring.kernel_names(lambda: None, CPU) is None

    def test_no_name_is_no_error(self, monkeypatch):
        def refuse():
            raise AssertionError("ran outside a capture")

        cupy = types.SimpleNamespace(
            get_default_memory_pool=lambda: types.SimpleNamespace(free_all_blocks=lambda stream: None),
            cuda=types.SimpleNamespace(Stream=lambda non_blocking: 1 / 0),
        )
        monkeypatch.setattr(devices, "cupy", lambda: cupy)
        assert measuring.kernel_names(refuse, GPU) is None
