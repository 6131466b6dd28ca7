"""The benchmarks of the scaler and of flashlight's change: their arithmetic, and small runs of both on the CPU."""

import collections
import contextlib
import json
import math
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import bench_scripts
import numpy as np
import pytest
from PIL import Image

import flcuda
from flcuda import kernel_loader
from flcuda.device import CPU
from flcuda.timing import Timing

TINY = ("--network", "tiny", "--device", "cpu")


@pytest.fixture(scope="module")
def load():
    with bench_scripts.loading() as loaded:
        yield loaded


@pytest.fixture(scope="module")
def bench(load):
    return load("bench_scaler")


@pytest.fixture(scope="module")
def ablation(load):
    return load("bench_flashlight_ablation")


@pytest.fixture
def sets(bench):
    values = bench.normal_values(1 << 12)
    return [bench.Set("tiny", "float16", CPU, values) for _ in range(2)]


class Clock:
    """Goes on by itself by nothing, and by what is added."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# --- floors, ratios, bars ---------------------------------------------------------------------------------------------


def row(side: str, name: str, of: str, ms: float | None, nbytes: int | None = None) -> dict:
    moved = {"check": 1000, "step": 6000}[of] if nbytes is None else nbytes
    times = {"error": "no"} if ms is None else {"median_ms": ms}
    return {"side": side, "name": name, "of": of, "nbytes": moved, **times}


def rows() -> list[dict]:
    return [
        row("floor", "copy of half the bytes", "check", 0.025),
        row("floor", "read only, 4 blocks a processor", "check", 0.03),
        row("floor", "read only, 8 blocks a processor", "check", 0.02),
        row("floor", "copy of half the bytes, step", "step", 0.1),
        row("floor", "read only, then read and write, 4 blocks a processor", "step", 0.125),
        row("flcuda", "check", "check", 0.024),
        row("flcuda", "check, unscale, SGD momentum", "step", 0.125),
        row("cupy", "isfinite: a loop without reads", "check", None),
        row("torch", "fused SGD", "step", 0.4, 3000),
    ]


def test_a_floor_is_the_smaller_of_the_best_copy_and_the_best_kernel(bench):
    floors, kept = bench.with_floors(rows())
    assert floors["check"] == {"copy_ms": 0.025, "kernel_ms": 0.02, "ms": 0.02, "nbytes": 1000}
    assert floors["step"] == {"copy_ms": 0.1, "kernel_ms": 0.125, "ms": 0.1, "nbytes": 6000}
    by_name = {(r["side"], r["name"]): r for r in kept}
    assert ("floor", "read only, 4 blocks a processor") not in by_name
    assert by_name["flcuda", "check"]["ratio"] == pytest.approx(1.2)
    # of half the bytes, for which the floor would take half the time
    assert by_name["torch", "fused SGD"]["ratio"] == pytest.approx(8.0)
    assert "ratio" not in by_name["cupy", "isfinite: a loop without reads"]


def test_a_bar_holds_only_against_the_smaller_floor(bench):
    floors, kept = bench.with_floors(rows())
    check, step = bench.bars_of(floors, kept)
    assert check["met"] is True
    assert check["to_the_copy"] == pytest.approx(0.96)
    assert check["to_the_kernel"] == pytest.approx(1.2)
    # within the bar by the kernel alone
    assert step["to_the_kernel"] == pytest.approx(1.0)
    assert step["to_the_copy"] == pytest.approx(1.25)
    assert step["met"] is False


def test_without_floors_no_bar_is_known(bench):
    floors, kept = bench.with_floors([r for r in rows() if r["side"] != "floor"])
    assert floors["check"]["ms"] is None
    assert [bar["met"] for bar in bench.bars_of(floors, kept)] == [None, None]
    assert all("ratio" not in r for r in kept)


# --- the sets ---------------------------------------------------------------------------------------------------------


def test_the_bytes_of_a_step_are_those_of_each_array_it_reads_or_writes(bench, sets):
    half, single = sets[0].arenas
    assert (half.dtype.name, single.dtype.name) == ("float16", "float32")
    # check 2; update: gradient 2, master and velocity read and written 16, copy 2. Of float32: 4; 4 and 16.
    assert sets[0].check_bytes == 2 * half.size + 4 * single.size
    assert sets[0].step_bytes == 22 * half.size + 24 * single.size
    assert bench.Set("tiny", "float32", CPU, bench.normal_values(1 << 12)).step_bytes % 24 == 0


def test_check_and_update_skips_an_invalid_set_and_changes_a_valid_one(sets):
    for each, poison in zip(sets, (None, math.nan), strict=True):
        if poison is not None:
            each.arenas[1].grad[0] = poison
        before = [arena.master.copy() for arena in each.arenas]
        each.check_and_update()
        assert int(each.flags[0]) == (poison is not None)
        changed = [not np.array_equal(arena.master, old) for arena, old in zip(each.arenas, before, strict=True)]
        assert changed == [poison is None] * 2
    # the flags of both arenas, counted through
    assert int(sets[1].flags[1]) == len(sets[1].arenas[0].segments)


@pytest.mark.parametrize("poisoned", [False, True])
def test_the_scaler_updates_as_the_kernels_alone(bench, poisoned):
    values = bench.normal_values(1 << 12)
    alone, whole, stepwise = (bench.Set("tiny", "float16", CPU, values) for _ in range(3))
    statistics = [state.pending.copy() + 1 for state in whole.optimizer.statistics]
    for each in (alone, whole, stepwise):
        each.arenas[1].grad[3] = math.inf if poisoned else 3
        for state in each.optimizer.statistics:
            state.pending += 1
    before = alone.arenas[0].master.copy()
    for _ in range(2):
        alone.check_and_update()
        whole.whole()
        assert stepwise.stepwise() is not poisoned
    assert np.array_equal(before, alone.arenas[0].master) is poisoned
    for other in (whole, stepwise):
        for first, second in zip(alone.arenas, other.arenas, strict=True):
            np.testing.assert_array_equal(first.master, second.master)
            np.testing.assert_array_equal(first.data, second.data)
            np.testing.assert_array_equal(first.grad, second.grad)
        state = other.scaler.state_dict()
        assert (state["skipped_steps"], state["steps"]) == (2 * poisoned, 2)
        assert state["scale"] == (bench.SCALE / 4 if poisoned else bench.SCALE)
    for state, expected in zip(whole.optimizer.statistics, statistics, strict=True):
        np.testing.assert_array_equal(state.running, expected - poisoned)


def test_cupys_ways_see_what_is_invalid(bench, sets):
    theirs = bench.CupySet(sets[0], CPU)
    assert [bits.dtype.name for bits in theirs.bits] == ["uint16", "uint32"]
    assert theirs.reading()
    assert theirs.flat_reading()
    sets[0].arenas[1].grad[0] = math.nan
    assert not theirs.reading()
    assert not theirs.flat_reading()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_an_exponent_of_all_ones_is_what_is_not_finite(bench, dtype):
    dtype_of = bench.devices.DTYPES[dtype]
    values = np.array([0, 1, -6e4, 3e-8, math.inf, -math.inf, math.nan, -math.nan]).astype(dtype_of)
    bits = values.view(f"uint{8 * values.itemsize}").astype(np.uint32)
    full = (bits & bench.EXPONENT[dtype]) == bench.EXPONENT[dtype]
    np.testing.assert_array_equal(full, ~np.isfinite(values.astype(np.float64)))


def test_the_kernels_that_cupy_is_given(bench, monkeypatch):
    made = []
    kernels = SimpleNamespace(
        ReductionKernel=lambda *words: made.append(words), ElementwiseKernel=lambda *words: made.append(words)
    )
    monkeypatch.setattr(bench.devices, "cupy", lambda: kernels)
    for make in (bench.cupy_check, bench.cupy_update):
        make.cache_clear()
    bench.cupy_check("bfloat16")
    bench.cupy_update(1, False)
    bench.cupy_update(2, True)
    for make in (bench.cupy_check, bench.cupy_update):
        make.cache_clear()
    reduction, single, double = made
    assert reduction[2] == "(bits & 0x7f80u) == 0x7f80u"
    assert "if (found[0] == 0)" in single[2]
    assert "data" not in single[1] + single[2]
    assert "found[0] == 0 && found[1] == 0" in double[2]
    assert double[1].endswith("T data")
    assert len({words[-1] for words in made}) == 3


def test_a_peer_that_raises_gives_the_reason_and_one_of_ours_ends_the_run(bench):
    def refuse() -> None:
        raise KeyError("no bfloat16\nhere")

    calls: Counter[str] = Counter()

    def good(index: int) -> None:
        calls[str(index)] += 1

    works = [
        bench.Work("loop", "cupy", [refuse], "check", nbytes=1000),
        bench.Work("check", "flcuda", [lambda: good(0), lambda: good(1)], "check", nbytes=1000),
    ]
    failed, ok = bench.measured(works, CPU, repeats=3, budget_s=1.0)
    assert failed["error"] == r"KeyError: 'no bfloat16\nhere'"
    assert "median_ms" not in failed
    assert ok["samples"] == 3
    assert ok["gb_per_s"] == pytest.approx(1000 / ok["median_ms"] / 1e6)
    assert min(calls.values()) >= 2
    with pytest.raises(KeyError, match="no bfloat16"):
        bench.measured([bench.Work("check", "flcuda", [refuse], "check", 1000)], CPU, repeats=3, budget_s=1.0)


def test_no_wait_is_claimed_that_no_capture_has_proved(bench, monkeypatch):
    def work(name: str, waits: int = 0, side: str = "cupy"):
        return bench.Work(name, side, [lambda: None], "check", 1000, waits)

    # A graph of two kernels, none at all where a wait broke the capture, and none that was asked for.
    graphs = iter([("a", "b"), None])
    monkeypatch.setattr(bench, "kernel_names", lambda run, device: next(graphs))
    works = [work("captured"), work("broken", side="flcuda"), work("reads", waits=3)]
    rows = bench.measured(works, CPU, repeats=3, budget_s=1.0)
    assert [(r["waits"], r["kernels"]) for r in rows] == [(0, 2), (None, None), (3, None)]


def test_pytorch_is_captured_on_the_stream_that_captures(bench, monkeypatch):
    seen = []

    class Torch:
        class cuda:
            ExternalStream = staticmethod(lambda pointer: ("stream", pointer))

            @staticmethod
            @contextlib.contextmanager
            def stream(stream):
                seen.append(stream)
                yield

    monkeypatch.setattr(bench.devices, "current_stream", lambda: 7)
    monkeypatch.setattr(bench, "kernel_names", lambda run, device: run() or ("one",))
    work = bench.Work("check", "torch", [lambda: seen.append("run")], "check", 1000)
    assert bench.captured(work, CPU, Torch) == ("one",)
    assert seen == [("stream", 7), "run"]


@pytest.mark.peer
@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_pytorch_works_on_our_memory(bench, precision):
    torch = pytest.importorskip("torch")
    one = bench.Set("tiny", precision, CPU, bench.normal_values(1 << 12))
    eager = {name: getattr(way, "__wrapped__", way) for name, way in bench.compiled_ways(Eager(torch)).items()}
    theirs = bench.TorchSet(torch, one, eager)
    assert len(theirs.parameters) == sum(len(arena.segments) for arena in one.arenas)
    before = one.arenas[0].grad.copy()
    theirs.check()
    assert float(theirs.found) == 0
    np.testing.assert_array_equal(one.arenas[0].grad, before)
    one.arenas[0].grad[0] = math.inf
    theirs.check()
    assert float(theirs.found) == 1
    assert not theirs.reading()
    old = one.arenas[0].data.copy()
    theirs.check_and_fused()
    theirs.flat_check_and_fused()
    theirs.compiled_step()
    theirs.grad_scaler("fused")
    np.testing.assert_array_equal(one.arenas[0].data, old)
    one.arenas[0].grad[0] = 1
    theirs.fused.param_groups[0]["lr"] = 0.5
    theirs.fused.step()
    assert not np.array_equal(one.arenas[0].data, old)
    works = bench.torchs(torch, [one], CPU, eager)
    assert len({work.name for work in works}) == len(works) == 15
    assert next(work for work in works if "a read each" in work.name).waits == len(theirs.parameters)
    for work in works:
        if precision == "float16" and work.name.startswith("GradScaler, foreach"):
            with pytest.raises(ValueError, match="FP16 gradients"):
                work.runs[0]()
            continue
        work.runs[0]()


class Eager:
    """PyTorch that compiles nothing."""

    def __init__(self, torch) -> None:
        self.torch = torch

    def __getattr__(self, name: str):
        return getattr(self.torch, name)

    def compile(self, function, **how):
        return function


@pytest.mark.peer
@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_what_pytorch_compiles_updates_as_ours(bench, precision):
    torch = pytest.importorskip("torch")
    own, other = (bench.Set("tiny", precision, CPU, bench.normal_values(1 << 12)) for _ in range(2))
    own.inv_scale[0] = 1
    theirs = bench.TorchSet(torch, other, bench.compiled_ways(Eager(torch)))
    for _ in range(2):
        own.check_and_update()
        theirs.compiled_step()
    for mine, yours in zip(own.arenas, other.arenas, strict=True):
        np.testing.assert_allclose(mine.master, yours.master, rtol=1e-6, atol=1e-9)
        np.testing.assert_array_equal(mine.data, yours.data)


# --- the reviewers' questions -----------------------------------------------------------------------------------------


def test_flags_as_they_must_be(bench):
    offsets = [0, 64, 64, 192]
    poisons = bench.poisons(offsets)
    assert bench.expected_flags("int32_first", poisons["none"], offsets) == [0, 3, 0, 0, 0]
    assert bench.expected_flags("uint8", poisons["none"], offsets) == [0, 0, 0, 0, 0]
    last = poisons["one element of the last tensor"]
    assert bench.expected_flags("flcuda", last, offsets) == [1, 2, 0, 0, 1]
    assert bench.expected_flags("int32", last, offsets) == [1, 0, 0, 0, 1]
    assert bench.expected_flags("int32_first", poisons["every element"], offsets) == [1, 0, 1, 0, 1]


class FakeKernels:
    """The kernels beside ours on NumPy's arrays; remembers the launches."""

    def __init__(self) -> None:
        self.launches = []

    def __call__(self, name: str):
        def launch(grid, block, arguments) -> None:
            self.launches.append((name, grid, arguments))
            if name.startswith("reset"):
                flags, segments = arguments
                flags[:] = 0
                flags[1] = segments if name.endswith("first") else 0
            elif name.startswith("find"):
                flags, grad, offsets, segments, vectors = arguments
                assert 4 * vectors == grad.size
                for i in range(segments):
                    if not np.isfinite(grad[offsets[i] : offsets[i + 1]]).all():
                        flags[0] = flags[2 + i] = 1
                        if name.endswith("first"):
                            flags[1] = min(flags[1], i)

        return launch


@pytest.fixture
def gpu(bench, monkeypatch):
    """What a GPU's side of the benchmark sees, with NumPy and nobody to launch."""
    kernels = FakeKernels()
    monkeypatch.setattr(bench, "bench_kernel", kernels)
    monkeypatch.setattr(bench.devices, "device_model", lambda _: {"sm_count": 3})

    def run_each_once(works, device, **how):
        for work in works:
            for run in work.runs:
                run()
        return [{"name": work.name, "median_ms": 1.0} for work in works]

    monkeypatch.setattr(bench, "measured", run_each_once)
    return SimpleNamespace(device=SimpleNamespace(kind="cuda", xp=np), kernels=kernels)


@pytest.mark.parametrize("wrong", [False, True])
def test_flags_of_each_type_are_looked_at_after_they_were_timed(bench, gpu, monkeypatch, wrong):
    sets = [bench.Set("tiny", "float32", CPU, bench.normal_values(1 << 12)) for _ in range(2)]
    if wrong:
        monkeypatch.setattr(bench, "bench_kernel", lambda name: lambda *arguments: None)
        with pytest.raises(AssertionError, match="the flags of"):
            bench.flag_types(sets, gpu.device, repeats=3, budget_s=1.0)
        return
    found = bench.flag_types(sets, gpu.device, repeats=3, budget_s=1.0)
    assert found["bytes"] == {"uint8": 16, "int32": 64}
    assert len(found["rows"]) == 4
    assert all(set(r["ms"]) == {"uint8", "int32", "int32_first", "flcuda"} for r in found["rows"])
    dtypes = {arguments[0].dtype.name for name, _, arguments in gpu.kernels.launches if name == "find_uint8"}
    assert dtypes == {"uint8"}
    assert np.isfinite(sets[0].arenas[0].grad).all()


@pytest.mark.parametrize(("precision", "ratio"), [("float32", 1), ("float16", 2)])
def test_the_kernels_of_a_floor_move_what_check_and_update_do(bench, gpu, precision, ratio):
    sets = [bench.Set("tiny", precision, CPU, bench.normal_values(1 << 12)) for _ in range(2)]
    works = [work for work in bench.floors(sets, gpu.device) if not work.name.startswith("copy")]
    assert len(works) == 2 * len(bench.BLOCKS_PER_PROCESSOR)
    check = sets[0].check_bytes
    turn = {kernel: math.ceil(check / 16 / bench.BLOCK / each) for kernel, each in bench.VECTORS_A_TURN.items()}
    assert len({work.name for work in works}) == len(works)
    for work in works:
        for run in work.runs:
            run()
    read, move = (
        [entry for entry in gpu.kernels.launches if entry[0].startswith(word)] for word in ("read_bytes", "move_bytes")
    )
    assert {entry[1] for entry in read} == {(12,), (24,), (48,), (96,), (turn["read"],)}
    assert {entry[1] for entry in move} == {(12,), (24,), (48,), (96,), (turn["move"],)}
    assert len(read) == 2 * len(move)
    for name, _, (memory, a, b, out, vectors, zero) in move:
        assert name == f"move_bytes_{ratio}"
        assert (16 * vectors, zero) == (check, 0)
        # one behind the other, and the last still within
        places = [each.ctypes.data - memory.ctypes.data for each in (a, b)]
        assert places == [check, (1 + ratio) * check]
        if ratio == 2:
            assert out.ctypes.data - memory.ctypes.data == 5 * check
            assert out.nbytes >= check
        else:
            assert out == 0
            assert b.nbytes >= check


def test_the_kernels_beside_ours_compile(bench):
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc", exc_type=ImportError)
    for arch in (kernel_loader.ARCHITECTURES[0], kernel_loader.ARCHITECTURES[-1]):
        cubin = kernel_loader.compile_to_cubin("scaler", arch, bench.KERNELS)
        names = [f"{verb}_{kind}" for kind in bench.FLAGS for verb in ("reset", "find")]
        for name in (*names, "read_bytes", "move_bytes_1", "move_bytes_2"):
            assert name.encode() in cubin


def test_the_small_key_takes_different_convolutions_for_one(bench):
    problems = flcuda.problems("resnet34", 128, distinct=False)
    forward = [problem for problem in problems if problem.direction == "forward"]
    assert (len(problems), len(forward)) == (107, 36)
    time = iter(range(0, 10**9, 3600))
    found = bench.keys(forward, CPU, lookups=len(problems), step_ms=50.0, rounds=3, clock=lambda: next(time))
    assert found["full"]["distinct"] == len(set(forward))
    # 224, 56, 28, 14 and 7 pixels wide
    assert found["small"]["distinct"] == 5
    assert found["kept"]["distinct"] == 36
    for name in ("small", "full", "kept"):
        assert found[name]["made_ns"] == found[name]["lookup_ns"] == 100
        assert found[name]["share_of_a_step"] == pytest.approx(107 * 100 / 50e6)


def test_half_the_height_is_all_that_changes(bench):
    for problem in flcuda.problems("resnet34", 8):
        half = bench.lower(problem)
        assert half.x_shape == (*problem.x_shape[:2], problem.x_shape[2] // 2, problem.x_shape[3])
        same = ("direction", "w_shape", "padding_before", "padding_after", "stride", "x_dtype", "math")
        assert all(getattr(half, name) == getattr(problem, name) for name in same)
        assert half.y_shape[3] == problem.y_shape[3]


def test_the_first_of_a_key_chooses_for_all(bench):
    first, second, third, fourth, missing = flcuda.problems("resnet34", 8)[:5]
    times = {
        first: {"fft": 1.0, "gemm": 2.0},
        second: {"fft": 6.0, "gemm": 3.0, "direct": 4.0},
        third: {"gemm": 5.0},
        fourth: {"gemm": 7.0, "direct": 8.0},
    }
    asked = [("a", first, 1), ("a", second, 10), ("a", third, 1), ("a", missing, 1), ("b", fourth, 2)]
    assert bench.taken_for_one(asked, times) == {
        "problems": 4,
        "keys": 2,
        "other": 1,
        "refused": 1,
        "best_ms": 1 + 30 + 14,
        "ms": 1 + 60 + 14,
        "worst": 2.0,
    }
    every = [(problem, problem, count) for _, problem, count in asked]
    found = bench.taken_for_one(every, times)
    assert (found["keys"], found["other"], found["refused"]) == (4, 0, 0)
    assert found["ms"] == found["best_ms"] == 1 + 30 + 5 + 14
    assert "4 keys for 4 problems: 0 get another" in bench.cost_of_key(found)
    empty = bench.taken_for_one(every, {})
    assert empty["problems"] == 0
    assert "+0.0%" in bench.cost_of_key(empty)


def test_algorithms_are_timed_until_the_time_is_up(bench, monkeypatch):
    problems = flcuda.problems("resnet34", 8)[:4]
    clock = Clock()
    asked = []

    def find(problem, **how):
        asked.append((problem, how["sources"], how["store"]))
        clock.now += 2.0
        if problem is problems[1]:
            raise ValueError("nothing works")
        rows = [
            SimpleNamespace(choice=SimpleNamespace(identity="gemm"), timing=SimpleNamespace(median_ms=1.0)),
            SimpleNamespace(choice=SimpleNamespace(identity="fft"), timing=None),
        ]
        return SimpleNamespace(usable=rows)

    monkeypatch.setattr(bench.flcuda, "find", find)
    found = bench.legacy_times(problems, CPU, seconds=5.0, clock=clock)
    assert found == {problems[0]: {"gemm": 1.0}, problems[2]: {"gemm": 1.0}}
    assert asked == [(problem, ("legacy",), False) for problem in problems[:3]]


def test_what_the_small_key_costs_counts_each_layer_and_both_heights(bench, gpu, monkeypatch):
    problems = flcuda.problems("resnet34", 8, distinct=False)
    forward = problems[0]

    def times(asked, device, *, seconds):
        # The higher an image the better for "tall"; what is less than 20 pixels wide is not found in time.
        return {p: {"tall": 1.0, "low": 1.0 + p.x_shape[2] / p.x_shape[3] - 0.75} for p in asked if p.x_shape[3] >= 20}

    monkeypatch.setattr(bench, "legacy_times", times)
    found = bench.wrong_choices(problems, gpu.device, seconds=1.0)
    wide = {p for p in problems if p.x_shape[3] >= 20}
    assert found["asked"] == 2 * len(set(problems))
    assert found["timed"] == 2 * len(wide)
    shared, layer = found["shared"], found["a layer"]
    assert (shared["problems"], shared["other"]) == (len(wide), 0)
    assert shared["keys"] == len({(p.direction, p.x_shape[3]) for p in wide})
    assert shared["ms"] == pytest.approx(sum(p.x_shape[3] >= 20 for p in problems))
    assert (layer["problems"], layer["keys"], layer["other"]) == (2 * len(wide), len(wide), len(wide))
    assert layer["worst"] == pytest.approx(1 / 0.75)
    assert bench.lower(forward) not in wide


def test_the_read_is_the_only_difference_that_returning_makes(bench):
    clock = Clock()

    class Flag(list):
        def __getitem__(self, index):
            clock.now += 2e-5
            return super().__getitem__(index)

    class Fake:
        flags = Flag([0])
        arenas = (SimpleNamespace(grad=np.arange(8.0), segments=(SimpleNamespace(offset=4),)),)

        def check_and_update(self) -> None:
            clock.now += 1e-5 if math.isinf(self.arenas[0].grad[4]) else 1e-4

        def whole(self) -> None:
            clock.now += 3e-4

        def stepwise(self) -> bool:
            clock.now += 5e-4
            return True

    waits = []
    found = bench.returning(Fake(), lambda: waits.append(1), count=10, repeats=3, clock=clock)
    times = {(r["what"], r["gradients"], r["read"]): r["wall_us"] for r in found}
    assert times == {
        ("check, update", "valid", False): pytest.approx(100),
        ("check, update", "valid", True): pytest.approx(120),
        ("check, update", "invalid", False): pytest.approx(10),
        ("check, update", "invalid", True): pytest.approx(30),
        ("DynamicScaler", "valid", False): pytest.approx(300),
        ("DynamicScaler", "valid", True): pytest.approx(500),
        ("DynamicScaler", "invalid", False): pytest.approx(300),
        ("DynamicScaler", "invalid", True): pytest.approx(500),
    }
    assert len(waits) == 2 * 4 * 2 * 3
    assert Fake.arenas[0].grad.tolist() == list(range(8))


def test_all_questions_are_one_table(bench):
    entry = {"made_ns": 200.0, "lookup_ns": 50.0, "distinct": 5, "share_of_a_step": 0.001}
    cost = {"problems": 32, "keys": 15, "other": 9, "refused": 4, "best_ms": 40.0, "ms": 50.0, "worst": 3.0}
    found = {
        "flags": {
            "bytes": {"uint8": 112, "int32": 448},
            "rows": [{"invalid": "none", "ms": {"uint8": 0.0201, "int32": None}}],
        },
        "key": {"problems": 36, "small": entry, "full": entry, "kept": {**entry, "share_of_a_step": None}},
        "wrong_choices": {"shared": cost, "a layer": cost},
        "returning_false": {
            "alone": [{"what": "check, update", "gradients": "valid", "read": True, "wall_us": 120.0}],
            "whole_step": {"images_per_s": 2.0, "step_ms": 0.1, "file": "ablation.json"},
        },
        "regret": [{"precision": "float16", "changes": 3, "chances": 5, "largest_total_regret": None, "file": "f"}],
    }
    answers = {(question, tried): answer for question, tried, answer in bench.question_rows(found)}
    assert len(answers) == 11
    assert answers["flags as bool or int", "us, invalid: none"] == "uint8 20.1, int32 -"
    assert "0.1000% of a step" in answers["key of all dimensions", "everything"]
    assert "40.00 ms become 50.00, +25.0%" in answers["key of all dimensions", "small, one cache"]
    assert answers["returning False", "check, update, valid, a read"] == "120.0 us by wall clock"
    assert answers["returning False", "in training"] == "2.0 images/s, 0.100 ms (ablation.json)"
    assert answers["trusting a one-time find", "float16"].startswith("changed in 3 of 5 repeats")


def test_what_other_benchmarks_recorded_is_pointed_to(bench, tmp_path):
    assert bench.regrets(tmp_path) == []
    assert bench.ablation_step_ms(tmp_path) is None
    assert bench.of_ablation(tmp_path) is None
    repetition = {"times": 20, "changes": 3, "chances": 500, "mean_regret": 0.01, "largest_regret": 0.2}
    result = {"precision": "float16", "repetition": {**repetition, "largest_total_regret": 0.004, "problems": []}}
    (tmp_path / "finder_regret_float16.json").write_text(json.dumps({"result": result}))
    cost = {"images_per_s": 2.0, "step_ms": 0.1}
    lines = [{"variant": "a", "step_ms": 60.0}, {"variant": "c", "step_ms": 50.0}]
    result = {"rows": lines, "cost_of_returning_false": cost}
    (tmp_path / "flashlight_ablation.json").write_text(json.dumps({"result": result}))
    (found,) = bench.regrets(tmp_path)
    expected = {"file": "finder_regret_float16.json", "precision": "float16", "largest_total_regret": 0.004}
    assert found == {**expected, **repetition}
    assert bench.ablation_step_ms(tmp_path) == 50.0
    assert bench.of_ablation(tmp_path) == {"file": "flashlight_ablation.json", **cost}


@pytest.mark.parametrize("as_json", [False, True])
def test_the_whole_of_it_on_the_cpu(bench, tmp_path, capsys, as_json):
    words = [*TINY, "--batch", "2", "--repeats", "3", "--seconds", "0.01", "--calls", "2", "--precision", "float16"]
    bench.main([*words, "--results", str(tmp_path), *(["--json"] if as_json else [])])
    text = capsys.readouterr().out
    if not as_json:
        assert "check, unscale, SGD momentum" in text
        assert "DynamicScaler.step" in text
        assert "not measured: the kernels need a GPU" in text
        assert "NOT" not in text
        return
    result = json.loads(text)
    (table,) = result["tables"]
    assert table["tensors"] == 14
    assert table["any_invalid"] is False
    sides = {r["side"] for r in table["rows"]}
    assert {"floor", "flcuda", "numpy"} <= sides
    # PyTorch's scaler unscales gradients of 16 bits in a fused optimizer only.
    able = [r for r in table["rows"] if not r["name"].startswith("GradScaler, foreach")]
    assert all("error" not in r for r in able)
    assert set(result["questions"]) == {"flags", "key", "wrong_choices", "returning_false", "regret"}
    fields = {"median_ms", "low_ms", "high_ms", "nbytes", "gb_per_s", "ratio", "waits", "kernels", "host_us", "queued"}
    assert all(fields <= set(r) for r in able)
    names = [(r["side"], r["name"]) for r in table["rows"]]
    assert len(set(names)) == len(names)


# --- flashlight's change ----------------------------------------------------------------------------------------------


def test_rounds_begin_with_another_one_each_time(ablation):
    clock = Clock()
    seen = []

    def step(name: str, seconds: float):
        def run() -> None:
            seen.append(name)
            clock.now += seconds

        return run

    steps = {"a": step("a", 3.0), "b": step("b", 2.0), "c": step("c", 1.0)}
    waits = []
    found = ablation.wall(steps, lambda: waits.append(len(seen)), count=2, repeats=3, clock=clock)
    assert found == {"a": [3.0] * 3, "b": [2.0] * 3, "c": [1.0] * 3}
    assert seen[::2] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    # before and after each
    assert Counter(waits) == Counter({0: 1, 18: 1, **dict.fromkeys(range(2, 18, 2), 2)})


def test_rounds_begin_with_steps_that_are_not_timed(ablation):
    clock = Clock()
    seen = []

    def step() -> None:
        seen.append(clock.now)
        clock.now += 1.0

    assert ablation.wall({"a": step}, lambda: None, count=2, repeats=2, lead=3, clock=clock) == {"a": [1.0, 1.0]}
    assert len(seen) == 2 * (3 + 2)


def test_ratios_are_to_the_first_variant(ablation):
    seconds = {"a": [0.5, 0.25, 0.125], "b": [0.2], "c": [0.125], "r": [0.25]}
    events = {name: Timing(100.0 / n, 1.0, 2.0, 5, 2000.0, queued=name != "a") for n, name in enumerate(seconds, 1)}
    found = ablation.rows_of(8, seconds, events, dict.fromkeys(seconds, 1.0))
    by_name = {r["variant"]: r for r in found}
    assert by_name["a"]["images_per_s"] == 32
    assert by_name["a"]["range"] == [16, 64]
    assert by_name["c"]["ratio"] == 2
    assert by_name["c"]["ratio_by_events"] == pytest.approx(3)
    assert by_name["b"]["images_per_s_by_events"] == pytest.approx(160)
    assert by_name["a"]["queued"] is False
    assert by_name["b"]["host_ms"] == 2


def trained(ablation, variant: str, steps: int = 3, poison: int | None = None):
    model = ablation.network("tiny", precision="float32", device=CPU)
    images, labels = ablation.synthetic(2, 8, 10, CPU)
    training = ablation.Training(model, images, labels)
    run = training.steps()[variant]
    for step in range(steps):
        training.images.data[0, 0, 0, 0] = math.inf if step == poison else 0.5
        run()
    return training, model.state_dict()


@pytest.mark.parametrize("poison", [None, 1])
def test_all_variants_train_alike_and_skip_alike(ablation, monkeypatch, tmp_path, poison):
    monkeypatch.setenv("FLCUDA_CHOICES", str(tmp_path))
    asked = []
    policy = flcuda.policy
    monkeypatch.setattr(flcuda, "policy", lambda **words: asked.append(words["mode"]) or policy(mode="heuristic"))
    with np.errstate(all="ignore"):
        first, expected = trained(ablation, "a", poison=poison)
        for variant in ("b", "c", "r"):
            training, state = trained(ablation, variant, poison=poison)
            assert training.skipped() == (poison is not None)
            for name, values in expected.items():
                np.testing.assert_allclose(state[name], values, rtol=1e-5, atol=1e-6, err_msg=f"{variant}: {name}")
    assert first.skipped() == (poison is not None)
    assert first.host_scaler.scale == (65536 if poison is None else 32768)
    assert asked == ["heuristic"] * 3 + ["find"] * 9


def test_the_host_scaler_grows_again_and_stops_at_its_floor(ablation, monkeypatch, tmp_path):
    monkeypatch.setenv("FLCUDA_CHOICES", str(tmp_path))
    model = ablation.network("tiny", precision="float32", device=CPU)
    images, labels = ablation.synthetic(2, 8, 10, CPU)
    training = ablation.Training(model, images, labels)
    scaler = training.host_scaler = ablation.HostScaler(scale=4.0, min_scale=2.0, growth_interval=2)
    with flcuda.policy(mode="heuristic"), np.errstate(all="ignore"):
        scales = []
        for valid in (False, False, True, True, True, True):
            training.images.data[0, 0, 0, 0] = 0.5 if valid else math.nan
            training.host_check()
            scales.append(scaler.scale)
    assert scales == [2, 2, 2, 4, 4, 4]
    assert scaler.skipped_steps == 2


@pytest.mark.parametrize("as_json", [False, True])
def test_the_ablation_on_the_cpu(ablation, capsys, monkeypatch, as_json):
    monkeypatch.setenv("FLCUDA_CHOICES", "")  # it sets it; put back afterwards
    words = [*TINY, "--batch", "2", "--size", "8", "--steps", "1", "--warmup", "0", "--repeats", "5"]
    ablation.main([*words, *(["--json"] if as_json else [])])
    text = capsys.readouterr().out
    if not as_json:
        assert "1143 to 1371, 1.20" in text
        shown = {line[:3]: line.split() for line in text.splitlines() if line.startswith("(")}
        assert "1.20" in shown["(c)"]
        assert "1.20" not in shown["(b)"]
        assert "NOT VALID" not in text
        return
    result = json.loads(text)
    assert [r["variant"] for r in result["rows"]] == ["a", "b", "c", "r"]
    assert all(len(r["step_ms_samples"]) == 5 for r in result["rows"])
    assert result["rows"][0]["ratio"] == 1
    assert result["ratio"] == pytest.approx(result["ratio_of_find"] * result["ratio_of_the_check"])
    assert result["original"]["ratio"] == 1.20
    assert result["skipped_steps"] == 0


# --- the loaders of the ablation --------------------------------------------------------------------------------------


def photos(folder: Path, images: int = 6) -> Path:
    draws = np.random.default_rng(0)
    for number in range(images):
        place = folder / "1" / "train" / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(0, 256, (20 + number, 24, 3), np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.jpg", quality=60)
    return folder


def loading(ablation, folder: Path, **options):
    model = ablation.network("tiny", precision="float32", device=CPU)
    training = ablation.Training(model, *ablation.synthetic(4, 8, 10, CPU))
    files, labels = ablation.photographs.listed(photos(folder), 1)
    return ablation.Loading(training, files, labels, CPU, batch=4, size=8, workers=2, depth=2, **options)


@pytest.mark.parametrize("on_host", [False, True])
def test_all_loaders_give_the_same_batches(ablation, monkeypatch, tmp_path, on_host):
    taken: dict[str, list] = {}
    for name in ("d0", "dp", "d1", "d2"):
        with loading(ablation, tmp_path, on_host=on_host) as made:
            batches = taken[name] = []
            monkeypatch.setattr(
                made.training,
                "device_check_on",
                lambda images, labels, batches=batches: batches.append((images.copy(), labels.copy())),
            )
            for _ in range(5):
                made.steps()[name]()
    for name in ("dp", "d1", "d2"):
        for (images, labels), (expected_images, expected_labels) in zip(taken[name], taken["d0"], strict=True):
            np.testing.assert_array_equal(images, expected_images, err_msg=name)
            np.testing.assert_array_equal(labels, expected_labels, err_msg=name)
    assert not np.array_equal(taken["d0"][0][0], taken["d0"][1][0])
    assert {tuple(labels) for _, labels in taken["d0"]} != {(0, 0, 0, 0)}


def test_a_loader_that_fails_says_so_and_ends(ablation, monkeypatch, tmp_path):
    made = loading(ablation, tmp_path)
    made.batches.dataset.dataset.files[0].write_bytes(b"no image")
    with made:
        for variant in ("d0", "dp", "d1", "d2"):
            step = made.steps()[variant]
            with pytest.raises(ValueError, match="not a JPEG"):
                collections.deque((step() for _ in range(20)), maxlen=0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("loader", "flcuda prefetch"))]


def test_what_is_loaded_ahead_comes_in_order_and_is_bounded(ablation):
    started = []

    def load(step: int) -> int:
        started.append(step)
        time.sleep(0.001 * (step % 3))
        return step

    ahead = ablation.Ahead(load, workers=3, ahead=5)
    try:
        time.sleep(0.05)
        assert sorted(started) == [0, 1, 2, 3, 4]
        assert [ahead.take() for _ in range(20)] == list(range(20))
    finally:
        ahead.close()
    assert max(started) < 25


def test_ratios_of_the_loaders_are_those_of_the_turns(ablation):
    seconds = {"c": [1.0, 2.0, 4.0], "d0": [2.0, 4.0, 8.0], "d2": [1.25, 2.5, 16.0]}
    rows = {r["variant"]: r for r in ablation.loader_rows(8, seconds)}
    assert rows["d0"]["images_per_s"] == 2
    assert rows["d2"]["ratio_to_d0"] == 1.6
    assert rows["d2"]["ratio_to_c"] == 0.8
    assert rows["d2"]["range"] == [0.5, 6.4]
    assert "1.10" in ablation.loader_line(rows["d2"])
    assert "1.10" not in ablation.loader_line(rows["c"])


@pytest.mark.parametrize("as_json", [False, True])
def test_the_loaders_of_the_ablation_on_the_cpu(ablation, capsys, monkeypatch, tmp_path, as_json):
    monkeypatch.setenv("FLCUDA_CHOICES", "")  # it sets it; put back afterwards
    words = [*TINY, "--batch", "2", "--size", "8", "--steps", "1", "--repeats", "5", "--workers", "2", "--kib", "1"]
    words += ["--photos", str(photos(tmp_path)), "--only", "loaders", "--decoder", "pillow"]
    ablation.main([*words, *(["--json"] if as_json else [])])
    text = capsys.readouterr().out
    if not as_json:
        assert "6 photographs of 1 KiB" in text
        assert "1371 to 1507, 1.10" in text
        assert "heuristic" not in text
        assert "NOT VALID" not in text
        return
    result = json.loads(text)
    assert "rows" not in result
    found = result["loaders"]
    assert [r["variant"] for r in found["rows"]] == ["c", "d0", "dp", "d1", "d2"]
    assert all(len(r["step_ms_samples"]) == 5 for r in found["rows"])
    assert found["rows"][1]["ratio_to_d0"] == found["rows"][0]["ratio_to_c"] == 1
    assert found["ratio"] == found["rows"][4]["ratio_to_d0"]
    assert found["original"]["ratio"] == 1.10
    assert result["skipped_steps"] == 0


def test_the_loaders_alone_need_photographs(ablation, capsys):
    with pytest.raises(SystemExit):
        ablation.main(["--only", "loaders"])
    assert "--only loaders needs --photos" in capsys.readouterr().err


def test_less_than_five_repeats_are_refused(ablation, capsys):
    with pytest.raises(SystemExit):
        ablation.main(["--repeats", "4"])
    assert "4 is less than 5" in capsys.readouterr().err


def test_the_machine_in_one_line(load):
    record = load("record")
    assert record.machine_line(bench_scripts.MACHINE) == "no GPU; 2 cores; Python 3"
    found = {
        "gpus": [{"name": "NVIDIA H200"}],
        "cuda": {"nvidia_driver": "580.1", "cuda_driver": "13.0"},
        "cores": 16,
        "python": "3.12",
        "cupy": "14.2.0",
        "cudnn": "9.19.0",
    }
    expected = "NVIDIA H200, driver 580.1, CUDA 13.0; 16 cores; Python 3.12, CuPy 14.2.0, cuDNN 9.19.0"
    assert record.machine_line(found) == expected
