"""The benchmarks of the scaler and of flashlight's change: their arithmetic, and small runs of both on the CPU."""

import importlib.util
import json
import math
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import flcuda
from flcuda import kernel_loader
from flcuda.device import CPU
from flcuda.timing import Timing

BENCH = Path(__file__).parents[2] / "bench"

TINY = ("--network", "tiny", "--device", "cpu")
MACHINE = {"gpus": None, "cuda": {}, "cores": 2, "python": "3", "cupy": None, "cudnn": None}


@pytest.fixture(scope="module")
def load():
    """Loads a script as it is run: with its own folder in the path, for the modules beside it."""
    sys.path.insert(0, str(BENCH))

    def loaded(name: str):
        spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where dataclasses look for the names of annotations
        spec.loader.exec_module(module)
        module.machine = lambda: MACHINE
        return module

    yield loaded
    sys.path.remove(str(BENCH))


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


def row(side: str, name: str, of: str, ms: float | None) -> dict:
    return {"side": side, "name": name, "of": of, **({"error": "no"} if ms is None else {"median_ms": ms})}


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
        row("torch", "fused SGD", "step", 0.4),
    ]


def test_a_floor_is_the_smaller_of_the_best_copy_and_the_best_kernel(bench):
    floors, kept = bench.with_floors(rows())
    assert floors["check"] == {"copy_ms": 0.025, "kernel_ms": 0.02, "ms": 0.02}
    assert floors["step"] == {"copy_ms": 0.1, "kernel_ms": 0.125, "ms": 0.1}
    by_name = {(r["side"], r["name"]): r for r in kept}
    assert ("floor", "read only, 4 blocks a processor") not in by_name
    assert by_name["flcuda", "check"]["ratio"] == pytest.approx(1.2)
    assert by_name["torch", "fused SGD"]["ratio"] == pytest.approx(4.0)
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


def test_the_whole_step_updates_as_the_kernels_alone(sets):
    sets[0].check_and_update()
    sets[1].whole()
    for first, second in zip(sets[0].arenas, sets[1].arenas, strict=True):
        np.testing.assert_array_equal(first.master, second.master)
    assert sets[1].counters.tolist() == [1, 0, 0]


def test_a_peer_that_raises_gives_the_reason_and_one_of_ours_ends_the_run(bench):
    def refuse() -> None:
        raise TypeError("no bfloat16\nhere")

    calls: Counter[str] = Counter()

    def good(index: int) -> None:
        calls[str(index)] += 1

    works = [
        bench.Work("loop", "cupy", [refuse], "check"),
        bench.Work("check", "flcuda", [lambda: good(0), lambda: good(1)], "check", nbytes=1000),
    ]
    failed, ok = bench.measured(works, CPU, repeats=3, budget_s=1.0)
    assert failed["error"] == "TypeError: no bfloat16"
    assert "median_ms" not in failed
    assert ok["samples"] == 3
    assert ok["gb_per_s"] == pytest.approx(1000 / ok["median_ms"] / 1e6)
    assert min(calls.values()) >= 2
    with pytest.raises(TypeError, match="no bfloat16"):
        bench.measured([bench.Work("check", "flcuda", [refuse], "check")], CPU, repeats=3, budget_s=1.0)


@pytest.mark.peer
@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_pytorch_works_on_our_memory(bench, precision):
    torch = pytest.importorskip("torch")
    one = bench.Set("tiny", precision, CPU, bench.normal_values(1 << 12))
    theirs = bench.TorchSet(torch, one)
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
    theirs.check_read_and_foreach()
    theirs.check_and_fused()
    np.testing.assert_array_equal(one.arenas[0].data, old)
    one.arenas[0].grad[0] = 1
    theirs.fused.param_groups[0]["lr"] = 0.5
    theirs.fused.step()
    assert not np.array_equal(one.arenas[0].data, old)
    for work in bench.torchs(torch, [one], CPU):
        work.runs[0]()


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
    assert len({work.name for work in works}) == len(works)
    for work in works:
        for run in work.runs:
            run()
    check = sets[0].check_bytes
    read, move = (
        [entry for entry in gpu.kernels.launches if entry[0].startswith(word)] for word in ("read_bytes", "move_bytes")
    )
    assert {entry[1] for entry in read} == {(12,), (24,), (48,), (96,)}
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

    waits = []
    found = bench.returning(Fake(), lambda: waits.append(1), count=10, repeats=3, clock=clock)
    times = {(r["gradients"], r["read"]): r["wall_us"] for r in found}
    assert times == {
        ("valid", False): pytest.approx(100),
        ("valid", True): pytest.approx(120),
        ("invalid", False): pytest.approx(10),
        ("invalid", True): pytest.approx(30),
    }
    assert len(waits) == 2 * 2 * 2 * 3
    assert Fake.arenas[0].grad.tolist() == list(range(8))


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
        assert "not measured: the kernels need a GPU" in text
        assert "NOT" not in text
        return
    result = json.loads(text)
    (table,) = result["tables"]
    assert table["tensors"] == 14
    assert table["any_invalid"] is False
    sides = {r["side"] for r in table["rows"]}
    assert {"floor", "flcuda", "numpy"} <= sides
    assert all("error" not in r for r in table["rows"])
    assert set(result["questions"]) == {"flags", "key", "returning_false", "regret"}


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
        assert "NOT VALID" not in text
        return
    result = json.loads(text)
    assert [r["variant"] for r in result["rows"]] == ["a", "b", "c", "r"]
    assert all(len(r["step_ms_samples"]) == 5 for r in result["rows"])
    assert result["rows"][0]["ratio"] == 1
    assert result["ratio"] == pytest.approx(result["ratio_of_find"] * result["ratio_of_the_check"])
    assert result["original"]["ratio"] == 1.20
    assert result["skipped_steps"] == 0


def test_less_than_five_repeats_are_refused(ablation, capsys):
    with pytest.raises(SystemExit):
        ablation.main(["--repeats", "4"])
    assert "4 is less than 5" in capsys.readouterr().err


def test_the_machine_in_one_line(load):
    record = load("record")
    assert record.machine_line(MACHINE) == "no GPU; 2 cores; Python 3"
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
