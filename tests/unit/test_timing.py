"""The timer: on the CPU, and on a stream that is a thread."""

import sys
import time
import types

import pytest
from finder_fakes import fake_cupy

from flcuda import device as devices
from flcuda import timing
from flcuda.device import CPU, Device
from flcuda.errors import CudnnNotSupportedError, FlcudaError

GPU = Device("cuda", 0)


def test_times_a_sleep():
    times = timing.measure(lambda: time.sleep(0.01), CPU, warmup=1, repeats=5)
    assert times.samples == 5
    assert 10 <= times.low_ms <= times.median_ms <= times.high_ms
    assert times.median_ms < 100
    assert times.spread_ms == times.high_ms - times.low_ms
    assert times.host_us == pytest.approx(1e3 * times.median_ms)
    assert (times.launches, times.queued) == (1, True)


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


@pytest.mark.parametrize("arguments", [{"repeats": 0}, {"warmup": -1}, {"budget_s": -1.0}, {"launches": 0}])
def test_bad_arguments_are_named(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        timing.measure(lambda: None, CPU, **arguments)


def test_nothing_to_run_is_an_error():
    with pytest.raises(ValueError, match="runs"):
        timing.measure([], CPU)


def test_callables_take_turns():
    calls = []
    timing.measure([lambda: calls.append("a"), lambda: calls.append("b")], CPU, warmup=1, repeats=4)
    assert calls == ["a", "b", "a", "b", "a"]


def test_works_take_turns_and_each_has_its_own_times():
    calls = []

    def work(name, seconds):
        def run():
            calls.append(name)
            time.sleep(seconds)

        return [run]

    slow, fast = timing.in_turn([work("slow", 0.012), work("fast", 0.002)], CPU, warmup=1, repeats=3)
    assert calls == ["slow", "fast"] * 4
    assert slow.median_ms >= 12
    assert 2 <= fast.median_ms < 12
    assert timing.in_turn([], CPU) == []


def test_no_two_works_share_a_buffer_in_a_row():
    """On a GPU the second one would find what the first one has read in the cache."""
    used = []
    works = [[lambda buffer=buffer: used.append(buffer) for buffer in range(3)] for _ in range(2)]
    timing.in_turn(works, CPU, warmup=1, repeats=5)
    assert used == [n % 3 for n in range(12)]


def test_summary_is_of_percentiles():
    times = timing.summary([float(n) for n in range(1, 12)], [0.001, 0.002, 0.009], launches=3, queued=False)
    assert (times.low_ms, times.median_ms, times.high_ms) == (2.0, 6.0, 10.0)
    assert (times.samples, times.launches, times.queued) == (11, 3, False)
    assert times.host_us == pytest.approx(2.0)


def test_enough_buffer_sets_push_two_caches_of_data_between_two_uses_of_one():
    mib = 1 << 20
    assert timing.buffer_sets(200 * mib, 50 * mib) == 2
    assert timing.buffer_sets(30 * mib, 50 * mib) == 5
    assert timing.buffer_sets(100, 50 * mib) == timing.MOST_BUFFER_SETS
    assert timing.buffer_sets(100, 0) == 1
    for set_bytes in (3 * mib, 7 * mib, 99 * mib):
        sets = timing.buffer_sets(set_bytes, 50 * mib)
        assert (sets - 1) * set_bytes >= 100 * mib
        assert (sets - 2) * set_bytes < 100 * mib


class TestStream:
    """The CUDA side, on a stream that sleeps for its kernels."""

    def test_the_devices_time_is_counted_and_the_hosts_apart(self, monkeypatch):
        cupy = fake_cupy(monkeypatch)

        def run():
            time.sleep(0.02)
            cupy.kernel(3.0)

        times = timing.measure(run, GPU, warmup=1, repeats=5)
        assert times.queued
        assert times.samples == 5
        assert 3 <= times.median_ms < 15
        assert times.host_us >= 20e3

    def test_without_a_hold_the_hosts_time_would_be_counted(self, monkeypatch):
        cupy = fake_cupy(monkeypatch)
        monkeypatch.setattr(timing, "HOLD_LIMIT_S", 0.005)

        def run():
            time.sleep(0.02)
            cupy.kernel(1.0)

        times = timing.measure(run, GPU, warmup=0, repeats=4)
        assert not times.queued
        assert times.median_ms >= 20
        assert times.samples == 4

    def test_a_run_that_waits_for_its_stream_ends_and_says_so(self, monkeypatch):
        cupy = fake_cupy(monkeypatch)
        monkeypatch.setattr(timing, "HOLD_LIMIT_S", 0.05)

        def run():
            cupy.kernel(1.0)
            cupy.stream.synchronize()

        start = time.perf_counter()
        times = timing.measure(run, GPU, repeats=3)
        assert not times.queued
        assert 1 <= times.median_ms < 40
        assert time.perf_counter() - start < 2

    def test_what_a_run_raises_lets_the_stream_go_on(self, monkeypatch):
        cupy = fake_cupy(monkeypatch)
        monkeypatch.setattr(timing, "HOLD_LIMIT_S", 60.0)
        calls = []

        def run():
            calls.append(1)
            if len(calls) == 4:
                raise CudnnNotSupportedError("cudnnX", 3000, "no kernel")
            cupy.kernel(0.5)

        with pytest.raises(CudnnNotSupportedError, match="no kernel"):
            timing.measure(run, GPU, warmup=1, repeats=10, launches=2)
        cupy.stream.synchronize()  # would fail after 10 s
        assert cupy.stream.done >= cupy.stream.queued - 1

    def test_short_runs_are_sampled_together_and_long_ones_alone(self, monkeypatch):
        cupy = fake_cupy(monkeypatch)
        monkeypatch.setattr(timing, "SAMPLE_MS", 20.0)
        short = timing.measure(lambda: cupy.kernel(2.0), GPU, repeats=3)
        assert 3 <= short.launches <= 10
        assert 2 <= short.median_ms < 10
        assert short.samples == 3
        long = timing.measure(lambda: cupy.kernel(21.0), GPU, repeats=3)
        assert long.launches == 1
        assert long.samples == 3
        given = timing.measure(lambda: cupy.kernel(2.0), GPU, warmup=0, repeats=3, launches=4)
        assert (given.launches, given.samples) == (4, 3)

    def test_no_run_is_wasted_where_the_number_of_launches_is_given(self, monkeypatch):
        cupy = fake_cupy(monkeypatch)
        calls = []

        def run():
            calls.append(1)
            cupy.kernel(0.1)

        timing.measure(run, GPU, warmup=1, repeats=3, launches=4)
        assert len(calls) == 13

    def test_a_slow_host_has_fewer_launches_a_sample(self):
        assert timing._launches(0.01, 0.005) == 20
        assert timing._launches(0.05, 0.005) == 4
        assert timing._launches(5.0, 0.005) == 1
        assert timing._launches(0.01, 50.0) == 5
        assert timing._launches(0.0, 400.0) == 1

    def test_a_budget_lowers_the_number_of_samples(self, monkeypatch):
        cupy = fake_cupy(monkeypatch)
        times = timing.measure(lambda: cupy.kernel(10.0), GPU, warmup=0, repeats=100, budget_s=0.06)
        assert times.samples in range(3, 7)

    def test_works_take_turns_on_a_stream(self, monkeypatch):
        cupy = fake_cupy(monkeypatch)
        calls = []

        def work(name, milliseconds):
            def run():
                calls.append(name)
                cupy.kernel(milliseconds)

            return [run]

        fast, slow = timing.in_turn([work("fast", 2.0), work("slow", 8.0)], GPU, repeats=4, launches=1)
        assert 2 <= fast.median_ms < slow.median_ms
        assert slow.median_ms >= 8
        # the warm-up, a first sample of each, and the others
        assert calls == ["fast", "slow"] * 5

    def test_one_disturbed_sample_does_not_count(self, monkeypatch):
        cupy = fake_cupy(monkeypatch)
        monkeypatch.setattr(timing, "HOLD_LIMIT_S", 0.05)
        calls = []

        def run():
            calls.append(1)
            time.sleep(0.2 if len(calls) == 4 else 0.0)
            cupy.kernel(2.0)

        times = timing.measure(run, GPU, warmup=1, repeats=6, launches=1)
        assert times.queued
        assert times.samples == 5
        assert times.high_ms < 50

    def test_a_first_run_is_bounded(self, monkeypatch):
        cupy = fake_cupy(monkeypatch)

        def run():
            time.sleep(0.03)  # loads its kernel
            cupy.kernel(20.0)

        times = timing.first(run, GPU)
        assert 10 <= times.low_ms == times.median_ms < 40
        assert times.high_ms >= 50
        assert times.host_us >= 30e3
        assert (times.samples, times.queued) == (1, False)
        assert timing.once(run, GPU) >= 50

    def test_nothing_is_timed_while_capturing(self, monkeypatch):
        fake_cupy(monkeypatch)
        monkeypatch.setattr(devices, "is_capturing", lambda: True)
        with pytest.raises(FlcudaError, match="captured"):
            timing.measure(lambda: None, GPU, warmup=0)
        with pytest.raises(FlcudaError, match="captured"):
            timing.once(lambda: None, GPU)


class Nvml(types.ModuleType):
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    reasons = 0x1 | 0x4 | 0x40

    def __init__(self):
        super().__init__("pynvml")
        self.started = 0

    def nvmlInit(self):
        self.started += 1

    def nvmlDeviceGetHandleByPciBusId(self, bus_id):
        return f"handle of {bus_id}"

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        assert handle == "handle of 0000:65:00.0"
        return self.reasons

    def nvmlDeviceGetClockInfo(self, handle, clock):
        return {self.NVML_CLOCK_SM: 1755, self.NVML_CLOCK_MEM: 3201}[clock]

    def nvmlDeviceGetMaxClockInfo(self, handle, clock):
        return {self.NVML_CLOCK_SM: 1980}[clock]


class TestClocks:
    @pytest.fixture(autouse=True)
    def bus(self, monkeypatch):
        cupy = fake_cupy(monkeypatch)
        cupy.runtime = types.SimpleNamespace(deviceGetPCIBusId=lambda index: f"0000:{65 + index}:00.0")
        timing._nvml.cache_clear()
        yield
        timing._nvml.cache_clear()

    def test_reads_them_in_words(self, monkeypatch):
        nvml = Nvml()
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        found = timing.clocks(GPU)
        assert found == timing.Clocks(1755, 1980, 3201, ("software power cap", "hardware thermal slowdown"))
        assert timing.clocks(GPU) == found
        assert nvml.started == 1

    def test_an_idle_gpu_is_not_throttled(self, monkeypatch):
        nvml = Nvml()
        nvml.reasons = 1
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        assert timing.clocks(GPU).throttled == ()

    def test_never_raises_nor_prints(self, monkeypatch, capfd):
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert timing.clocks(GPU) is None
        nvml = Nvml()
        nvml.nvmlInit = lambda: 1 / 0
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        assert timing.clocks(GPU) is None
        monkeypatch.setitem(sys.modules, "pynvml", Nvml())
        assert timing.clocks(Device("cuda", 3)) is None
        assert timing.clocks(CPU) is None
        assert capfd.readouterr() == ("", "")

    def test_the_real_package_without_a_gpu(self, monkeypatch):
        """Where there is a driver, no GPU has that bus id."""
        pytest.importorskip("pynvml")
        monkeypatch.setattr(devices.cupy().cuda.runtime, "deviceGetPCIBusId", lambda index: "ffff:ff:ff.f")
        assert timing.clocks(GPU) is None


class TestTimeline:
    def test_each_part_has_its_time_and_parts_without_a_label_are_left_out(self):
        timeline = timing.Timeline(CPU)
        timeline.mark("a")
        time.sleep(0.01)
        timeline.mark(None)
        time.sleep(0.03)
        timeline.mark("b")
        time.sleep(0.02)
        timeline.mark("a")
        spans = timeline.close()
        assert [label for label, _ in spans] == ["a", "b", "a"]
        assert 10 <= spans[0][1] < 30
        assert 20 <= spans[1][1] < 50
        assert spans[2][1] < 10
        assert timeline.queued

    def test_times_are_the_devices_and_not_the_hosts(self, monkeypatch):
        cupy = fake_cupy(monkeypatch)
        timeline = timing.Timeline(GPU)
        for part in range(3):
            timeline.mark(part, may_hold=True)
            time.sleep(0.03)
            cupy.kernel(2.0)
        spans = timeline.close()
        assert [label for label, _ in spans] == [0, 1, 2]
        assert all(2 <= ms < 20 for _, ms in spans)
        assert timeline.queued

    def test_parts_are_queued_some_at_a_time(self, monkeypatch):
        """The device works on one chunk while the host queues the next, and no part has the time between them."""
        cupy = fake_cupy(monkeypatch)
        monkeypatch.setattr(timing, "_CHUNK", 4)
        monkeypatch.setattr(timing, "HOLD_LIMIT_S", 0.25)
        timeline = timing.Timeline(GPU)
        # Longer altogether than a hold may last.
        for part in range(24):
            timeline.mark(part, may_hold=True)
            time.sleep(0.02)
            cupy.kernel(1.0)
        spans = timeline.close()
        assert timeline.queued
        assert [label for label, _ in spans] == list(range(24))
        assert sorted(ms for _, ms in spans)[-3] < 15

    def test_only_where_it_may_the_stream_is_held(self, monkeypatch):
        cupy = fake_cupy(monkeypatch)
        monkeypatch.setattr(timing, "_CHUNK", 2)
        timeline = timing.Timeline(GPU)
        for part in range(9):
            timeline.mark(part)
            cupy.kernel(0.1)
        assert len(timeline._holds) == 1
        timeline.mark("last", may_hold=True)
        assert len(timeline._holds) == 2
        assert len(timeline.close()) == 10

    def test_a_slow_host_is_told(self, monkeypatch):
        cupy = fake_cupy(monkeypatch)
        monkeypatch.setattr(timing, "HOLD_LIMIT_S", 0.01)
        timeline = timing.Timeline(GPU)
        timeline.mark("part")
        time.sleep(0.05)
        cupy.kernel(1.0)
        timeline.close()
        assert not timeline.queued

    def test_given_up_it_lets_the_stream_go_on(self, monkeypatch):
        cupy = fake_cupy(monkeypatch)
        timeline = timing.Timeline(GPU)
        timeline.mark("part")
        cupy.kernel(1.0)
        timeline.release()
        start = time.perf_counter()
        cupy.cuda.get_current_stream().synchronize()
        assert time.perf_counter() - start < 0.1
