"""The timer and the measuring of candidates on the GPU: by what is known of a copy, and against NVBench."""

import functools
import statistics
import time
import warnings

import numpy as np
import pytest

import flcuda
from flcuda import device as devices
from flcuda import timing
from flcuda.errors import CudnnNotSupportedError, FlcudaError
from flcuda.finder import measure
from flcuda.finder.candidate import Candidate
from flcuda.finder.policy import Policy
from flcuda.finder.problem import ConvolutionProblem

MIB = 1 << 20

SOURCE = r"""
extern "C" __global__ void copy_for_timing(const float4* x, float4* y, long long count) {
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += step) y[i] = x[i];
}
"""


@pytest.fixture
def device():
    found = devices.resolve("cuda")
    with found.use():
        yield found


@functools.cache
def kernel():
    return devices.cupy().RawKernel(SOURCE, "copy_for_timing")


def copy(source, target):
    """Copies arrays of float32 whose size is a multiple of 4."""
    kernel()((2048,), (256,), (source, target, np.int64(source.size // 4)))


def pairs(nbytes, count=1):
    """Makes so many pairs of arrays of so many bytes each, one allocation for all."""
    cupy = devices.cupy()
    memory = cupy.zeros((2 * count, nbytes // 4), np.float32)
    return [(memory[2 * n], memory[2 * n + 1]) for n in range(count)]


def copies(nbytes, count=1):
    return [functools.partial(copy, source, target) for source, target in pairs(nbytes, count)]


class TestTimer:
    def test_a_copy_of_four_times_the_bytes_takes_four_times_as_long(self, device):
        small = timing.measure(copies(128 * MIB), device)
        large = timing.measure(copies(512 * MIB), device)
        assert 3.5 < large.median_ms / small.median_ms < 4.5
        assert small.queued
        assert large.queued
        assert large.spread_ms < 0.2 * large.median_ms
        # of GB/s, what some GPU may have: slower than a laptop's or faster than any would be a unit mistaken
        assert 50 < 2 * 512 * MIB / 1e6 / large.median_ms < 20_000

    def test_a_sample_has_as_many_launches_as_make_it_long(self, device):
        assert timing.measure(copies(MIB), device).launches > 5
        assert timing.measure(copies(1024 * MIB), device).launches == 1

    def test_cold_is_slower_than_warm(self, device):
        nbytes = timing.l2_bytes(device) // 6 // 4096 * 4096
        assert nbytes > 0
        sets = timing.buffer_sets(2 * nbytes, timing.l2_bytes(device))
        assert sets > 6
        warm = timing.measure(copies(nbytes), device, repeats=30)
        cold = timing.measure(copies(nbytes, sets), device, repeats=30)
        assert cold.median_ms > 1.1 * warm.median_ms

    def test_a_slow_host_is_hidden_and_counted_apart(self, device):
        (run,) = copies(64 * MIB)

        def slow():
            time.sleep(0.002)
            run()

        plain = timing.measure(run, device)
        hidden = timing.measure(slow, device)
        assert hidden.queued
        assert hidden.median_ms < 1.5 * plain.median_ms < 2
        assert hidden.host_us >= 2000
        assert plain.host_us < 500

    def test_beyond_the_limit_the_host_is_counted(self, device, monkeypatch):
        (run,) = copies(MIB)
        monkeypatch.setattr(timing, "HOLD_LIMIT_S", 0.01)

        def slow():
            time.sleep(0.03)
            run()

        times = timing.measure(slow, device, repeats=4)
        assert not times.queued
        assert times.median_ms >= 25
        assert times.samples == 4

    def test_a_run_that_waits_for_the_gpu_ends(self, device):
        cupy = devices.cupy()
        (run,) = copies(64 * MIB)

        def waits():
            run()
            cupy.cuda.get_current_stream().synchronize()

        start = time.perf_counter()
        times = timing.measure(waits, device, repeats=5)
        assert not times.queued
        assert times.median_ms >= 0.9 * timing.measure(run, device).median_ms
        assert time.perf_counter() - start < 5

    def test_what_is_raised_lets_the_stream_go_on(self, device):
        cupy = devices.cupy()
        (run,) = copies(MIB)
        calls = []

        def fails():
            calls.append(1)
            if len(calls) == 5:
                raise CudnnNotSupportedError("cudnnX", 3000, "no kernel")
            run()

        with pytest.raises(CudnnNotSupportedError):
            timing.measure(fails, device, launches=2)
        start = time.perf_counter()
        cupy.cuda.get_current_stream().synchronize()
        assert time.perf_counter() - start < 0.3

    @pytest.mark.parametrize("flags", [{"null": True}, {}, {"non_blocking": True}], ids=str)
    def test_works_on_any_stream(self, device, flags):
        cupy = devices.cupy()
        with cupy.cuda.Stream(**flags):
            (run,) = copies(64 * MIB)
            times = timing.measure(run, device, repeats=5)
            assert times.queued
            assert 0.001 < times.median_ms < 10
            cupy.cuda.get_current_stream().synchronize()

    def test_works_take_turns(self, device):
        small, large = timing.in_turn([copies(64 * MIB), copies(256 * MIB)], device, repeats=10)
        assert 3 < large.median_ms / small.median_ms < 5
        assert (small.samples, large.samples) == (10, 10)

    def test_a_first_run_lies_within_its_bounds(self, device):
        (run,) = copies(512 * MIB)
        run()
        found = timing.first(run, device)
        known = timing.measure(run, device)
        assert found.low_ms <= 1.2 * known.median_ms
        assert found.high_ms >= 0.9 * known.median_ms
        assert found.high_ms - found.low_ms <= 1.01 * found.host_us / 1e3

    def test_nothing_is_timed_in_a_capture(self, device):
        cupy = devices.cupy()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            try:
                with pytest.raises(FlcudaError, match="captured"):
                    timing.measure(lambda: None, device, warmup=0)
            finally:
                stream.end_capture()

    def test_the_clocks_are_told(self, device):
        pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
        (run,) = copies(512 * MIB)
        for _ in range(20):
            run()
        found = timing.clocks(device)
        devices.synchronize(device)
        if found is None:
            pytest.skip("the driver does not tell the clocks here")
        assert 0 < found.sm_mhz <= found.sm_max_mhz
        assert found.memory_mhz > 0


class Copy:
    """A runner that copies its first operand to its last, so many times."""

    workspace = 0

    def __init__(self, times, error=None):
        self.times = times
        self.error = error
        self.calls = 0

    def __call__(self, *operands):
        self.calls += 1
        if self.error is not None:
            raise self.error
        for _ in range(self.times):
            copy(operands[0], operands[-1])


def candidates(**runners):
    return [
        Candidate("test", name, "fma", 0, True, build=lambda runner=runner: runner) for name, runner in runners.items()
    ]


class TestMeasure:
    def test_ranks_by_the_time_and_runs_the_hopeless_once(self, device):
        runners = {
            "hopeless": Copy(40),
            "full": Copy(1, MemoryError("5 GB wanted")),
            "slow": Copy(2),
            "fast": Copy(1),
            "as_fast": Copy(1),
        }
        sets = pairs(256 * MIB, 3)
        rows = measure.measure(candidates(**runners), sets, device, Policy(), kernels=True)
        assert {row.candidate.algo for row in rows[:2]} == {"fast", "as_fast"}
        assert [row.candidate.algo for row in rows[2:]] == ["slow", "hopeless", "full"]
        assert runners["hopeless"].calls == 1
        assert runners["full"].calls == 2
        fast, other, slow, hopeless, full = rows
        assert 1.7 < slow.timing.median_ms / fast.timing.median_ms < 2.3
        assert 0.9 < other.timing.median_ms / fast.timing.median_ms < 1.1
        assert 20 < hopeless.timing.median_ms / fast.timing.median_ms < 60
        assert full.reason == "out of memory: 5 GB wanted"
        assert [row.kernels for row in rows] == [("copy_for_timing",)] * 2 + [None] * 3
        again = measure.measure(candidates(third=Copy(1)), sets, device, Policy(), known=rows)
        assert {row.candidate.algo for row in again[:3]} == {"fast", "as_fast", "third"}
        assert runners["hopeless"].calls == 1

    def test_kernels_are_named_and_nothing_is_run(self, device):
        cupy = devices.cupy()
        source = cupy.ones(64, np.float32)
        target = cupy.zeros(64, np.float32)
        copy(source, cupy.empty_like(source))

        def run():
            scratch = cupy.empty(64, np.float32)
            copy(source, scratch)
            copy(scratch, target)

        assert measure.kernel_names(run, device) == ("copy_for_timing", "copy_for_timing")
        assert not target.any()

    def test_what_cannot_be_captured_has_no_names_and_does_no_harm(self, device):
        cupy = devices.cupy()
        source = cupy.ones(64, np.float32)

        def run():
            cupy.cuda.get_current_stream().synchronize()

        assert measure.kernel_names(run, device) is None
        target = cupy.zeros(64, np.float32)
        copy(source, target)
        assert target.all()

    @pytest.mark.parametrize("line", ["n8 c64 28x28 k64 3x3 p1 float32 nchw", "n8 c64 28x28 k64 3x3 p1 float16 nhwc"])
    def test_the_kernels_of_a_convolution(self, device, line):
        problem = ConvolutionProblem.parse(f"forward {line}")
        plan = flcuda.plan(problem)
        arrays = problem.random_arrays(device=device)
        plan(**arrays)
        names = measure.kernel_names(lambda: plan(**arrays), device)
        assert names
        assert all(name and "\\" not in name for name in names)


LINES = [
    "forward n8 c64 28x28 k64 3x3 p1 float32 nchw",
    "backward_data n4 c32 14x14 k64 3x3 p1 s2 float16 nhwc",
    "backward_filter n4 c32 14x14 k64 3x3 p1 bfloat16 nhwc acc",
]


class TestOperandSets:
    @pytest.mark.parametrize("line", LINES)
    def test_lie_and_are_filled_as_the_problem_says(self, device, line):
        problem = ConvolutionProblem.parse(line)
        sets = measure.operand_sets(problem, device, Policy())
        nbytes = sum(array.nbytes for array in sets[0])
        wanted = timing.buffer_sets(nbytes, timing.l2_bytes(device))
        assert wanted - 1 <= len(sets) <= wanted
        assert len(sets) > 1
        for position, name in enumerate(problem.operands):
            column = [each[position] for each in sets]
            assert len({array.data.ptr for array in column}) == len(sets)
            for array in (column[0], column[-1]):
                assert array.shape == problem.shape_of(name)
                assert array.dtype.name == problem.dtype_of(name)
                assert devices.element_strides(array) == problem.strides_of(name)
                assert array.data.ptr % 256 == 0
                values = devices.cupy().asnumpy(array.view(np.dtype(f"u{array.itemsize}"))).view(array.dtype)
                values = values.astype(np.float64)
                if name in problem.inputs or problem.accumulate:
                    assert abs(values.mean()) < 0.1
                    assert 0.9 < values.std() < 1.1
                else:
                    assert np.isnan(values).all()

    def test_smaller_alignments_are_exact(self, device):
        problem = ConvolutionProblem.from_arrays(
            "forward",
            x=devices.cupy().empty(4 * 8 * 9 * 9 + 1, np.float32)[1:].reshape(4, 8, 9, 9),
            w=devices.cupy().empty(16 * 8 * 9 + 2, np.float32)[2:].reshape(16, 8, 3, 3),
        )
        assert (problem.x_alignment, problem.w_alignment, problem.y_alignment) == (4, 8, 16)
        for x, w, y in measure.operand_sets(problem, device, Policy()):
            assert (x.data.ptr % 16, w.data.ptr % 16, y.data.ptr % 256) == (4, 8, 0)

    def test_warm_is_one(self, device):
        problem = ConvolutionProblem.parse(LINES[0])
        assert len(measure.operand_sets(problem, device, Policy(l2="warm"))) == 1

    def test_they_need_no_more_than_a_quarter_of_the_free_memory(self, device, monkeypatch):
        problem = ConvolutionProblem.parse(LINES[0])
        nbytes = sum(array.nbytes for array in measure.operand_sets(problem, device, Policy())[0])
        monkeypatch.setattr(measure, "_free_bytes", lambda: 4 * 2 * nbytes + 4096)
        assert len(measure.operand_sets(problem, device, Policy())) == 2
        monkeypatch.setattr(measure, "_free_bytes", lambda: 0)
        assert len(measure.operand_sets(problem, device, Policy())) == 1


# one kernel of a steady time: two of a Fourier transform each scatter by more than what is asked
NVBENCH_PROBLEM = "forward n256 c64 56x56 k64 3x3 p1 float16 nhwc"


@pytest.fixture(scope="module")
def nvbench(tmp_path_factory):
    """Cold times in milliseconds by NVBench, and ours just before and behind it, of a convolution and of a copy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # it takes its benchmarks once a process
        bench = pytest.importorskip("cuda.bench", reason="cuda-bench is not installed")
        results = pytest.importorskip("cuda.bench.results", reason="cuda-bench has no results module")
        try:
            run_all = bench.run_all_benchmarks
        except (ImportError, RuntimeError) as error:
            pytest.skip(f"cuda-bench cannot be loaded: {error}")
    device = devices.resolve("cuda")
    cupy = devices.cupy()
    folder = tmp_path_factory.mktemp("nvbench")
    ours = {}

    def benchmark(name, runs):
        def measured(state):
            with cupy.cuda.Stream.from_external(state.get_stream()):
                # the workspace comes from the allocator now, not within a sample
                runs[0]()
                cupy.cuda.get_current_stream().synchronize()
            before = timing.measure(runs, device, repeats=50, budget_s=1.0)

            def launch(launch):
                with cupy.cuda.Stream.from_external(launch.get_stream()):
                    runs[0]()

            state.exec(launch, batched=False)
            ours[name] = (before, timing.measure(runs, device, repeats=50, budget_s=1.0))

        bench.register(measured).set_name(name)

    with device.use(), pytest.MonkeyPatch.context() as patch:
        # the fixture that gives each test a store of its own comes later than this one
        patch.setenv("FLCUDA_CHOICES", str(folder))
        problem = ConvolutionProblem.parse(NVBENCH_PROBLEM)
        plan = flcuda.plan(problem)
        sets = measure.operand_sets(problem, device, Policy())
        benchmark("convolution", [functools.partial(plan, x, w, out=y) for x, w, y in sets])
        benchmark("copy", copies(512 * MIB, 2))
        path = folder / "result.json"
        run_all(["nvbench", "--devices", str(device.index), "--timeout", "5", "--jsonbin", str(path)])
    found = results.BenchmarkResult.from_json(path)
    theirs = {}
    for name in ours:
        (state,) = found[name].states
        assert not state.is_skipped, state.skip_reason
        seconds = state.center(statistics.median)
        assert seconds is not None, f"NVBench measured nothing of {name}: its log is in the captured output"
        theirs[name] = 1e3 * seconds
    return theirs, ours


@pytest.mark.parametrize("name", ["convolution", "copy"])
def test_agrees_with_nvbench(nvbench, name):
    theirs, ours = nvbench
    before, behind = ours[name]
    assert before.queued
    assert theirs[name] > 0.1
    mine = (before.median_ms + behind.median_ms) / 2
    assert mine == pytest.approx(theirs[name], rel=0.03), (before, behind, theirs[name])
