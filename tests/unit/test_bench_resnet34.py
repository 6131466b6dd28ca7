"""The benchmarks of whole training steps beside their peers: their arithmetic, their processes, and small runs."""

import argparse
import gzip
import importlib.util
import json
import math
import os
import random
import struct
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flcuda import timing

BENCH = Path(__file__).parents[2] / "bench"
PEERS = BENCH / "peers"
MACHINE = {"gpus": None, "cuda": {}, "cores": 2, "python": "3", "cupy": None, "cudnn": None}


@pytest.fixture(scope="module")
def load():
    """Loads a script as it is run: with its own folder in the path, for the modules beside it."""
    before = list(sys.path)
    sys.path[:0] = [str(BENCH), str(PEERS)]

    def loaded(name: str, folder: Path = BENCH, known_as: str | None = None):
        known_as = known_as or name
        if known_as not in sys.modules:
            spec = importlib.util.spec_from_file_location(known_as, folder / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            sys.modules[known_as] = module
            spec.loader.exec_module(module)
            module.machine = lambda: MACHINE
        return sys.modules[known_as]

    yield loaded
    sys.path[:] = before


@pytest.fixture(scope="module")
def steps(load):
    return load("steps", PEERS)


@pytest.fixture(scope="module")
def processes(load):
    return load("peer_process")


@pytest.fixture(scope="module")
def bench(load):
    return load("bench_resnet34")


@pytest.fixture(scope="module")
def first_step(load):
    return load("bench_first_step")


@pytest.fixture(scope="module")
def curves(load):
    return load("bench_curves")


@pytest.fixture(scope="module")
def own(load):
    return load("flcuda_resnet", PEERS)


def case(bench, precision="float16", batch=128, network="resnet34"):
    return bench.Case(network, precision, batch)


def told(processes, times=(0.01,) * 5, **values):
    found = processes.Told(values={"first_loss": 7.0, "last_loss": 6.0, "probe_error": 3e-7, **values})
    for each in times:
        found.add({"sample": {"step_s": each, "host_s": each / 4}})
    return found


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["torch:eager", "torch:cuda-graph+legacy+limit0", "jax:jit+scaler", "flcuda:captured"])
def test_a_row_is_read_as_it_is_written(bench, text):
    assert str(bench.Row.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "part"),
    [("mxnet:eager", "'mxnet'"), ("torch", "''"), ("torch:jit", "'jit'"), ("jax:jit+legacy", "'legacy'")],
)
def test_a_wrong_row_is_named(bench, text, part):
    with pytest.raises(ValueError, match=part):
        bench.Row.parse(text)


def test_every_precision_has_rows_of_every_side_and_none_that_takes_minutes(bench):
    for precision in bench.PRECISIONS:
        rows = bench.rows_for(precision, [])
        assert {row.side for row in rows} == set(bench.SIDES)
        assert len(set(rows)) == len(rows)
        assert not any(row.how == "max-autotune" for row in rows)
        layouts = {word for row in rows for word in row.options} & {"nchw", "nhwc"}
        assert not layouts  # the default layout is each precision's best
    assert {case[1:] for case in bench.BARS} == {(p, b) for p in bench.PRECISIONS for b in (128, 256)}


def test_modes_are_names_and_patterns(bench):
    names = [str(row) for row in bench.rows_for("float16", ["jax:*", "flcuda:captured", "jax:jit", "torch:max-*"])]
    assert names == ["jax:jit", "jax:jit+scaler", "flcuda:captured", "torch:max-autotune"]
    with pytest.raises(ValueError, match="'tch:\\*' fits none"):
        bench.rows_for("float16", ["tch:*"])


# --- what counts, and the comparison ----------------------------------------------------------------------------------


def test_a_row_has_the_median_and_the_percentiles(bench, processes):
    times = [0.010, 0.014, 0.011, 0.012, 0.030]
    settings = {"torch": "2"}
    clocks = [timing.Clocks(1800, 1980, 3201, ("power",)), None, timing.Clocks(1900, 1980, 3201, ())]
    found = bench.answer_of(
        case(bench), bench.Row.parse("torch:eager"), told(processes, times, settings=settings), clocks
    )
    assert found["images_per_s"] == pytest.approx(128 / 0.012)
    assert found["host_ms"] == pytest.approx(3.0)
    low, high = found["range"]
    assert low == pytest.approx(128 / np.percentile(times, 80))
    assert high == pytest.approx(128 / np.percentile(times, 20))
    assert found["sm_mhz"] == [1800, 1900]
    assert found["throttled"] == ["power"]
    assert found["counts"]
    assert found["settings"] == settings
    json.dumps(found)


@pytest.mark.parametrize(
    ("precision", "times", "values", "fault"),
    [
        ("float16", 5, {}, None),
        ("float16", 4, {}, "4 samples"),
        ("float16", 5, {"last_loss": math.nan}, "last_loss is nan"),
        ("float16", 5, {"probe_error": 3e-4}, None),
        ("float32", 5, {"probe_error": 3e-4}, "not strict float32"),
        ("float32", 5, {"probe_error": math.nan}, "not strict float32"),
        ("float32", 5, {"probe_error": None}, "not shown"),
        ("tf32", 5, {"probe_error": 3e-4}, None),
    ],
)
def test_what_does_not_count(bench, processes, precision, times, values, fault):
    found = bench.fault_of(case(bench, precision), told(processes, (0.01,) * times, **values))
    assert found is None if fault is None else fault in found


def test_a_row_that_was_ended_counts_with_the_samples_that_it_has(bench, processes):
    ended = told(processes)
    ended.ended, ended.why = "timeout", "its 9 s were used up while: samples"
    del ended.values["last_loss"], ended.values["probe_error"]
    assert bench.fault_of(case(bench), ended) is None
    assert bench.fault_of(case(bench, "float32"), ended) == ended.why
    failed = told(processes)
    failed.ended, failed.why = "error", "exit status 1: out of memory"
    assert bench.fault_of(case(bench), failed) == failed.why
    ended.samples.pop()
    assert bench.fault_of(case(bench), ended) == ended.why
    found = bench.answer_of(case(bench), bench.Row.parse("torch:eager"), ended)
    assert not found["counts"]
    assert "images_per_s" in found


def row(name, images_per_s, peak=None, counts=True):
    memory = {} if peak is None else {"memory": {"allocated_peak": peak}}
    times = {"images_per_s": images_per_s, "range": [0.9 * images_per_s, images_per_s], "step_ms": 1.0, "host_ms": 0.5}
    side = name.partition(":")[0]
    return {"row": name, "side": side, "counts": counts, "fault": None if counts else "no", **times, **memory}


def test_the_best_are_compared_and_what_does_not_count_is_left_out(bench):
    rows = [
        row("flcuda:captured", 1300.0, 100),
        row("flcuda:captured+lean", 1200.0, 63),
        row("torch:eager", 1000.0, 60),
        row("torch:compiled", 9000.0, 10, counts=False),
        row("jax:jit", 1100.0),
    ]
    found = bench.summary(case(bench), rows)
    assert (found["best"], found["best_peer"]) == ("flcuda:captured", "jax:jit")
    assert found["ratio"] == pytest.approx(1300 / 1100)
    assert found["bar"] == 1.20
    assert found["met"] is False
    assert (found["leanest"], found["leanest_peer"]) == ("flcuda:captured+lean", "torch:eager")
    assert found["memory_ratio"] == pytest.approx(63 / 60)
    assert found["memory_met"] is True
    assert bench.summary(case(bench, batch=256), rows)["met"] is True
    assert bench.summary(case(bench, network="resnet18"), rows)["met"] is None
    assert found["fewest_images_met"] is None
    assert bench.summary(case(bench, network="resnet50", batch=256), rows)["fewest_images_met"] is False


def test_without_a_peer_there_is_no_ratio(bench):
    for rows in ([row("flcuda:eager", 1.0, 1)], [row("jax:jit", 1.0, 1)], []):
        found = bench.summary(case(bench), rows)
        assert found["ratio"] is None
        assert found["met"] is None
        assert found["memory_met"] is None


def test_rows_run_in_a_drawn_order_while_there_is_time(bench):
    rows = bench.rows_for("float16", [])
    orders = []
    for seed in range(2):
        seen = []
        now = [0.0]

        def one(_, each, limit, seen=seen, now=now):
            seen.append((str(each), limit))
            now[0] += 100.0
            return row(str(each), 1.0)

        generator = random.Random(seed)
        left = lambda now=now: 250.0 - now[0]  # noqa: E731
        found = bench.table(case(bench), rows, one, seconds=100.0, left=left, generator=generator)
        assert [limit for _, limit in seen] == [100.0, 100.0, 50.0]
        assert sorted(each["row"] for each in found["rows"]) == sorted(map(str, rows))
        skipped = [each for each in found["rows"] if each.get("ended") == "skipped"]
        assert len(skipped) == len(rows) - 3
        assert not any(each["counts"] for each in skipped)
        orders.append([each["row"] for each in found["rows"]])
    assert orders[0] != orders[1]


def test_a_row_asks_for_what_was_told_and_notes_the_clocks_of_each_sample(bench, processes, tmp_path):
    asked = {}

    def ask(side, request, **options):
        asked.update(options, side=side, request=request)
        found = told(processes)
        for _ in range(3):
            options["on_line"]({"sample": {}})
        options["on_line"]({"stage": "probe"})
        return found

    clocks = iter([timing.Clocks(1000 + each, 1980, 3201, ()) for each in range(3)])
    args = bench.arguments(["--size", "192", "--steps", "25", "--samples", "9", "--torch-python", "other"])
    found = bench.measured(
        case(bench, "tf32", 256),
        bench.Row.parse("torch:eager+legacy"),
        args,
        limit_s=7.0,
        caches=tmp_path,
        ask=ask,
        clocks=lambda: next(clocks),
    )
    request = asked["request"]
    assert (request.precision, request.batch, request.how, request.options) == ("tf32", 256, "eager", ("legacy",))
    assert (request.size, request.steps, request.samples, request.classes) == (192, 25, 9, 1000)
    assert asked["pythons"]["torch"] == "other"
    assert asked["pythons"]["jax"] == sys.executable
    assert (asked["limit_s"], asked["caches"]) == (7.0, tmp_path)
    assert found["sm_mhz"] == [1000, 1002]


@pytest.mark.parametrize("words", [["--steps", "19"], ["--samples", "4"], ["--warmup", "9"]])
def test_too_few_of_anything_is_refused(bench, words, capsys):
    with pytest.raises(SystemExit):
        bench.arguments(words)
    assert "is less than" in capsys.readouterr().err


def test_recorded_answers_are_printed(bench, processes, tmp_path, capsys):
    memory = {"allocated_peak": 3 << 30}
    rows = [
        bench.answer_of(case(bench), bench.Row.parse(name), told(processes, memory=memory, first_step_s=2.5))
        for name in ("flcuda:captured", "jax:jit")
    ]
    rows.append({"row": "torch:eager", "side": "torch", "counts": False, "fault": "no time was left"})
    table = {"network": "resnet34", "precision": "float16", "batch": 128, "rows": rows}
    result = {"machine_line": "H200", "image": [3, 224, 224], "samples": 7, "steps": 30, "trial": False}
    result["tables"] = [{**table, **bench.summary(case(bench), rows)}]
    path = tmp_path / "resnet34.json"
    path.write_text(json.dumps({"result": result}))
    bench.main(["--show", str(path)])
    shown = capsys.readouterr().out
    assert "flcuda:captured / jax:jit: 1.000 (bar 1.20: NOT MET)" in shown
    assert "no time was left" in shown
    assert "3072" in shown


@pytest.mark.parametrize(
    ("text", "words"), [(None, "No such file"), ("{", "line 1"), ("[]", "has no tables"), ('{"result": {}}', "has no")]
)
def test_what_is_no_recorded_answer_is_an_error_before_anything_is_shown(bench, text, words, tmp_path, capsys):
    good = BENCH / "results" / "resnet34_float16_128.json"
    path = tmp_path / "answer.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match=f"--show .*answer.json: .*{words}"):
        bench.main(["--show", str(good), str(path)])
    assert capsys.readouterr().out == ""
    bench.main(["--show", str(good)])
    assert "flcuda:captured / torch:compiled-graphs: 1.293" in capsys.readouterr().out


# --- processes --------------------------------------------------------------------------------------------------------


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text("import json, os, subprocess, sys, time\nrequest = json.load(sys.stdin)\n" + text)
    return [sys.executable, str(path)]


SAY = "def say(**values): print(json.dumps(values), flush=True)\n"


def test_a_process_is_asked_and_heard(processes, tmp_path):
    lines = []
    text = SAY + (
        "say(stage='building', got=request['word'], mine=os.environ['MINE'])\n"
        "say(sample={'step_s': 1.0, 'host_s': 0.5})\nsay(seed='3', losses=[2.0, 1.0])\nsay(done=True)\n"
        "time.sleep(0.2)\n"
    )
    found = processes.ask(
        script(tmp_path, text), {"word": "x"}, env={**os.environ, "MINE": "y"}, limit_s=60.0, on_line=lines.append
    )
    assert (found.ended, found.why) == ("done", None)
    assert found.values["got"] == "x"
    assert found.values["mine"] == "y"
    assert found.samples == [{"step_s": 1.0, "host_s": 0.5}]
    assert found.curves == {"3": [2.0, 1.0]}
    assert [line.get("stage") for line in lines] == ["building", None, None, None]


def test_a_process_that_fails_is_quoted(processes, tmp_path):
    text = SAY + "say(stage='building')\nraise SystemExit('out of memory')\n"
    found = processes.ask(script(tmp_path, text), {}, env=os.environ, limit_s=60.0)
    assert found.ended == "error"
    assert found.why == "exit status 1: out of memory"
    assert found.values["stage"] == "building"


def test_a_process_that_takes_too_long_is_ended_with_all_that_it_started(processes, tmp_path):
    child = tmp_path / "child"
    text = SAY + (
        f"process = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child)!r}, 'w').write(str(process.pid))\n"
        "say(sample={'step_s': 1.0, 'host_s': 0.5})\nsay(stage='compiling')\ntime.sleep(600)\n"
    )
    begin = time.perf_counter()
    found = processes.ask(script(tmp_path, text), {}, env=os.environ, limit_s=3.0)
    assert time.perf_counter() - begin < 30.0
    assert found.ended == "timeout"
    assert found.why == "its 3 s were used up while: compiling"
    assert len(found.samples) == 1
    until = time.perf_counter() + 10.0
    while alive(int(child.read_text())):
        assert time.perf_counter() < until
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_the_legacy_api_is_chosen_by_the_row_alone(processes, steps, monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_V8_API_DISABLED", "1")
    asked = []
    monkeypatch.setattr(processes, "ask", lambda command, request, **options: asked.append((command, options["env"])))
    for side, options in (("torch", ()), ("torch", ("legacy",)), ("jax", ()), ("flcuda", ())):
        request = steps.Request("resnet34", "float32", 128, "eager", options)
        processes.ask_side(side, request, pythons={"torch": "other"}, limit_s=1.0, caches=Path("/caches"))
    plain, legacy, jax, ours = (env for _, env in asked)
    assert "TORCH_CUDNN_V8_API_DISABLED" not in plain
    assert legacy["TORCH_CUDNN_V8_API_DISABLED"] == "1"
    assert jax["JAX_PLATFORMS"] == "cuda"
    assert ours["FLCUDA_CHOICES"] == "/caches/choices"
    assert plain["TORCHINDUCTOR_CACHE_DIR"] == "/caches/inductor"
    assert asked[0][0] == ["other", str(PEERS / "torch_resnet.py")]
    assert asked[3][0][0] == sys.executable


def test_without_a_folder_the_caches_stay_where_they_are(processes, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert "TORCHINDUCTOR_CACHE_DIR" not in processes.environment(None)


# --- what the processes share -----------------------------------------------------------------------------------------


class FakeSide:
    """Writes down what it is asked; a step takes a second of the device's and a tenth of the host's."""

    def __init__(self, request, clock) -> None:
        self.request = request
        self.clock = clock
        self.calls = []
        self.behind = 0.0

    def put(self, images, labels):
        self.calls.append(("put", images.shape, labels.shape))
        return images, labels

    def step(self, batch):
        self.calls.append("step")
        self.clock.now += 0.1
        self.behind += 0.9
        return 0.5

    def wait(self):
        self.calls.append("wait")
        self.clock.now += self.behind
        self.behind = 0.0

    def convolve(self, x, w):
        return sys.modules["steps"].convolution(x, w) * (1 + 1e-3)

    def value(self, loss):
        return loss

    def settings(self):
        return {}

    def scale(self):
        return None

    def settled(self):
        self.calls.append("settled")

    def warm(self):
        self.calls.append("warm")

    def memory(self):
        return {"allocated_peak": 1}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_measurement_waits_once_a_sample(steps):
    clock = Clock()
    sides = []

    def make(request):
        sides.append(FakeSide(request, clock))
        return sides[-1]

    said = []
    request = steps.Request("resnet34", "float16", 4, "eager", size=16, warmup=3, samples=2, steps=5)
    steps.measure(request, make, lambda **values: said.append(values), clock)
    calls = sides[0].calls
    assert calls[0] == ("put", (4, 3, 16, 16), (4,))
    assert calls[1:5] == ["wait", "step", "wait", "settled"]
    assert calls[5:10] == ["step", "wait", "step", "step", "wait"]
    assert calls[10:25] == ["warm", *(["wait", *["step"] * 5, "wait"] * 2)]
    samples = [line["sample"] for line in said if "sample" in line]
    assert [sample["step_s"] for sample in samples] == pytest.approx([1.0, 1.0])
    assert [sample["host_s"] for sample in samples] == pytest.approx([0.1, 0.1])
    values = {name: value for line in said for name, value in line.items()}
    assert values["first_step_s"] == pytest.approx(1.0)
    assert values["probe_error"] == pytest.approx(1e-3)
    assert values["memory"] == {"allocated_peak": 1}


def test_without_samples_all_ends_with_the_first_step(steps):
    said = []
    sides = []

    def make(request):
        sides.append(FakeSide(request, Clock()))
        return sides[-1]

    steps.measure(steps.Request("resnet34", "tf32", 2, "eager", size=8, samples=0), make, lambda **v: said.append(v))
    assert sides[0].calls.count("step") == 1
    assert any("first_step_s" in line for line in said)


def test_a_request_goes_through_json(steps):
    request = steps.Request("resnet50", "tf32", 7, "eager", ("legacy", "limit0"), curve={"data": "x"}, spawned=1.5)
    assert steps.Request.from_json(json.loads(json.dumps(request.to_json()))) == request


def test_all_draw_the_same_batch(steps):
    request = steps.Request("resnet18", "float32", 6, "eager", size=9, classes=5)
    (x, y), (again, _) = steps.batch_of(request), steps.batch_of(request)
    np.testing.assert_array_equal(x, again)
    assert x.shape == (6, 3, 9, 9)
    assert x.dtype == np.float32
    assert abs(x.std() - 1.0) < 0.1
    assert y.dtype == np.int64
    assert set(y) <= set(range(5))


def test_the_probe_convolves(steps, rng):
    x, w = rng.standard_normal((2, 3, 6, 5)), rng.standard_normal((4, 3, 3, 2))
    found = steps.convolution(x, w)
    assert found.shape == (2, 4, 4, 4)
    for n, k, i, j in ((0, 0, 0, 0), (1, 3, 3, 3), (1, 2, 0, 3)):
        assert found[n, k, i, j] == pytest.approx((x[n, :, i : i + 3, j : j + 2] * w[k]).sum())


def rounded(a, bits):
    """Cuts a float32's mantissa to so many bits, as tensor cores read it in TF32: to the nearest."""
    cut = 23 - bits
    whole = a.view(np.uint32) + np.uint32(1 << (cut - 1))
    return (whole & np.uint32(0xFFFFFFFF << cut & 0xFFFFFFFF)).view(np.float32)


def test_the_probe_tells_tf32_from_float32(bench, steps):
    def side(bits):
        def convolve(x, w):
            operands = [a if bits is None else rounded(a, bits) for a in (x, w)]
            return steps.convolution(*operands).astype(np.float32)

        return SimpleNamespace(convolve=convolve)

    assert steps.probe_error(side(None)) < 1e-6 < bench.STRICT_ERROR
    assert steps.probe_error(side(10)) > 10 * bench.STRICT_ERROR


def test_batches_are_normalized_and_come_in_epochs(steps, rng):
    images = rng.integers(0, 256, (12, 1, 4, 4), np.uint8)
    labels = np.arange(12)
    parts = list(steps.batches(images, labels, 5, 12))
    assert all(len(y) == 5 for _, y in parts)
    seen = np.concatenate([y for _, y in parts])
    for epoch in range(5):
        assert sorted(seen[12 * epoch : 12 * epoch + 12]) == list(range(12))
    assert list(seen[:12]) != list(seen[12:24])
    x, y = parts[0]
    assert x.dtype == np.float32
    np.testing.assert_allclose(x * images.std() + images.mean(), images[y], rtol=1e-5)
    again = [y for _, y in steps.batches(images, labels, 5, 12)]
    np.testing.assert_array_equal(np.concatenate(again), seen)


# --- flcuda's own side ------------------------------------------------------------------------------------------------


def test_the_peak_is_counted_from_where_it_is_asked(own):
    peak = own.Peak()
    peak.malloc(100, 0x100)
    peak.malloc(50, 0x200)
    peak.malloc(1000, 0)  # failed
    peak.free(100)
    peak.restart()
    peak.malloc(30, 0x100)
    peak.free(50)
    assert (peak.used, peak.peak, peak.peak_all) == (30, 80, 150)


def test_options_change_the_policy(own):
    assert own.policy_of(()) == {}
    found = own.policy_of(("wide", "lean", "deterministic"))
    assert found == {"effort": "wide", "workspace_limit": own.LEAN_BYTES, "deterministic": True}


def test_flcuda_trains_in_its_process(bench, capsys):
    """All of it: the process, its answers, the table, the print."""
    bench.main(["--trial", "--precision", "float32", "--mode", "flcuda:captured", "--json"])
    result = json.loads(capsys.readouterr().out)
    (table,) = result["tables"]
    (found,) = table["rows"]
    assert found["fault"] is None
    assert found["counts"]
    assert len(found["step_ms_samples"]) == bench.FEWEST_SAMPLES
    assert found["probe_error"] < bench.STRICT_ERROR
    assert found["first_loss"] != found["last_loss"]
    assert found["settings"]["layout"] == "nchw"
    assert found["process_s"] > found["first_step_s"]
    assert table["ratio"] is None
    assert result["trial"]
    bench.show(result)
    assert "flcuda:captured" in capsys.readouterr().out


def test_a_wrong_mode_costs_no_time(bench):
    with pytest.raises(SystemExit, match="'torch:eagre': the mode 'eagre'"):
        bench.main(["--trial", "--mode", "flcuda:eager", "torch:eagre"])


# --- first step -------------------------------------------------------------------------------------------------------


def test_caches_are_empty_then_full_and_kernels_stay(first_step, processes, tmp_path):
    seen = []

    def ask(side, request, *, caches, env, **_):
        seen.append((side, caches, env["CUPY_CACHE_DIR"], request.samples))
        seconds = float(len(seen))
        return processes.Told(values=dict.fromkeys(first_step.FIGURES, seconds))

    args = first_step.arguments(["--rounds", "2", "--mode", "flcuda:captured", "torch:eager"])
    rows = [first_step.Row.parse(name) for name in args.mode]
    found = first_step.rounds(rows, args, tmp_path, left=lambda: 1e9, ask=ask)
    counts = {name: {kind: len(each) for kind, each in kinds.items()} for name, kinds in found.items()}
    assert counts["flcuda:captured"] == {"nothing": 1, "empty": 2, "full": 2}
    assert counts["torch:eager"] == {"nothing": 0, "empty": 2, "full": 2}
    ours = [each[1:] for each in seen if each[0] == "flcuda"]
    folders = [folder for folder, *_ in ours]
    assert folders[1] == folders[2] != folders[0]
    assert folders[3] == folders[4]
    assert len(set(folders)) == 3
    assert len({kernels for _, kernels, _ in ours}) == 1
    assert ours[0][1] != next(each[2] for each in seen if each[0] == "torch")
    assert {each[3] for each in seen} == {0}


def test_first_steps_are_medians_with_bars(first_step):
    def run(seconds):
        return {"first_step_s": seconds, "why": None}

    kinds = {"nothing": [run(9.0)], "empty": [run(4.0), run(9.0), run(4.5)], "full": [{"why": "failed"}]}
    rows = first_step.rows_of({"flcuda:captured": kinds, "jax:jit": {"empty": [run(9.0)], "full": []}}, "resnet34")
    table = {(each["row"], each["caches"]): (each["first_step_s"], each["met"]) for each in rows}
    assert table == {
        ("flcuda:captured", "nothing"): (9.0, None),
        ("flcuda:captured", "empty"): (4.5, True),
        ("flcuda:captured", "full"): (None, None),
        ("jax:jit", "empty"): (9.0, None),
    }


def test_no_process_is_begun_without_time(first_step, tmp_path):
    args = first_step.arguments(["--mode", "flcuda:eager"])
    rows = [first_step.Row.parse("flcuda:eager")]
    found = first_step.rounds(rows, args, tmp_path, left=lambda: 5.0, ask=None)
    assert not any(found["flcuda:eager"].values())


# --- curves -----------------------------------------------------------------------------------------------------------


def test_windows_are_means_and_the_last_takes_the_rest(curves):
    np.testing.assert_allclose(curves.windows([1.0, 3.0, 5.0, 7.0, 9.0], 2), [2.0, 7.0])
    np.testing.assert_allclose(curves.windows([1.0, 3.0], 5), [2.0])


def curve(values, by=0.0):
    return [value + by for value in values]


def test_curves_within_the_spread_and_outside(curves):
    falling = [4.0, 3.0, 2.0, 1.0]
    theirs = {"0": curve(falling, -0.2), "1": curve(falling, 0.2), "2": falling}
    compare = {"window": 2, "first_error": 0.1}
    inside = curves.compared({"0": falling, "1": curve(falling, 0.1), "2": falling}, theirs, **compare)
    assert inside["within"]
    assert inside["outside"] == 0.0
    assert inside["learnt"]
    assert inside["first_agree"]
    assert [each["step"] for each in inside["windows"]] == [0, 2]
    above = {seed: [4.0, 3.0, 2.0, 2.0] for seed in theirs}
    outside = curves.compared(above, theirs, **compare)
    assert not outside["within"]
    assert outside["outside_windows"] == 1
    assert outside["outside"] == pytest.approx((2.0 - 1.7) / 1.5)
    below = curves.compared({seed: curve(falling, -0.3) for seed in theirs}, theirs, **compare)
    assert below["outside"] == pytest.approx(0.1 / 1.5)


def test_first_losses_and_learning_are_told(curves):
    theirs = {"0": [4.0, 4.0], "1": [4.2, 4.2]}
    found = curves.compared({"0": [4.2, 4.0], "1": [4.2, 4.2]}, theirs, window=1, first_error=1e-3)
    assert not found["first_agree"]
    assert found["first_difference"] == pytest.approx(0.05)
    assert not found["learnt"]


@pytest.mark.parametrize(
    ("ours", "theirs", "part"),
    [
        ({}, {}, "curves of the seeds"),
        ({"0": [1.0]}, {"1": [1.0]}, "'0'"),
        ({"0": [1.0]}, {"0": [1.0, 2.0]}, "1, 2 steps"),
    ],
)
def test_curves_that_cannot_be_compared(curves, ours, theirs, part):
    with pytest.raises(ValueError, match=part):
        curves.compared(ours, theirs, window=1, first_error=1.0)


def test_patterns_can_be_learnt_and_a_tenth_of_the_labels_cannot(curves):
    images, labels = curves.patterns(400, 24)
    again, _ = curves.patterns(400, 24)
    np.testing.assert_array_equal(images, again)
    assert images.shape == (400, 3, 24, 24)
    assert 20 < images.std() < 60
    # The spectrum's size does not change when an image is turned around: the nearest mean of a class is its label.
    spectra = np.abs(np.fft.fft2(images.astype(np.float64) - images.mean())).reshape(400, -1)
    means = np.stack([spectra[:200][labels[:200] == label].mean(0) for label in range(10)])
    nearest = ((spectra[200:, None] - means) ** 2).sum(-1).argmin(1)
    assert 0.8 < (nearest == labels[200:]).mean() < 0.98


def test_fashion_mnist_is_read_plain_and_compressed(curves, tmp_path, rng):
    images, labels = rng.integers(0, 256, (7, 28, 28), np.uint8), rng.integers(0, 10, 7, np.uint8)
    header = struct.pack(">4I", 0x803, *images.shape)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(header + images.tobytes())
    label_file = struct.pack(">2I", 0x801, 7) + labels.tobytes()
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(label_file))
    found, classes = curves.fashion_mnist(tmp_path, 5)
    np.testing.assert_array_equal(found, images[:5, None])
    np.testing.assert_array_equal(classes[:5], labels[:5])
    assert classes.dtype == np.int64


def test_both_sides_train_from_the_same_values_on_the_same_data(curves, steps, processes, own, capsys):
    """With flcuda on both sides, in this process: then the curves are equal."""
    asked = []

    def ask(side, request, *, on_line, **_):
        asked.append((side, request.how))
        found = processes.Told()

        def say(**values):
            found.add(values)
            on_line(values)

        steps.curves(request, own.Training, say)
        return found

    args = curves.arguments(["--trial", "--precision", "float32", "--ours", "flcuda:eager"])
    result = curves.run(args, ask)
    (table,) = result["tables"]
    assert asked == [("flcuda", "eager"), ("torch", "eager")]
    assert table["errors"] == {}
    assert table["first_difference"] == 0.0
    first = [losses[0] for losses in table["curves"]["flcuda:eager"].values()]
    assert len(set(first)) == args.seeds  # other initial values
    assert table["within"]
    assert result["within"]
    curves.show(result)
    assert "within: yes" in capsys.readouterr().out


def test_a_side_that_fails_is_told(curves, processes):
    args = curves.arguments(["--trial", "--precision", "tf32"])
    failed = processes.Told(why="exit status 1: no torch", ended="error")
    request = SimpleNamespace(**sys.modules["steps"].Request("resnet10", "tf32", 2, "eager").to_json())
    args.caches = None
    found = curves.curves("tf32", args, request, lambda *_, **__: failed)
    assert found["within"] is False
    assert found["errors"]["torch:eager"] == "exit status 1: no torch"
    assert "comparison" in found["errors"]


# --- with PyTorch -----------------------------------------------------------------------------------------------------


@pytest.fixture
def peer(load, steps):
    pytest.importorskip("torch")
    # The tests have a module of the script's own name.
    return load("torch_resnet", PEERS, "peer_torch_resnet")


@pytest.mark.peer
@pytest.mark.parametrize("network", ["resnet18", "resnet34", "resnet50"])
def test_pytorchs_network_has_flcudas_keys_and_shapes(steps, own, peer, network):
    request = steps.Request(network, "float32", 2, "eager", device="cpu")
    theirs = peer.Training(request).model.state_dict()
    ours = own.model_of(request).state_dict()
    assert {key: value.shape for key, value in ours.items()} == {key: (*v.shape,) for key, v in theirs.items()}


@pytest.mark.peer
@pytest.mark.parametrize("stem", ["imagenet", "small"])
def test_pytorch_trains_as_flcuda_does(steps, own, peer, stem):
    size = 48 if stem == "imagenet" else 12
    request = steps.Request("resnet10", "float32", 8, "eager", device="cpu", size=size, classes=10, stem=stem, lr=0.01)
    ours, theirs = own.Training(request), peer.Training(request)
    theirs.load(ours.model.state_dict())
    batch = steps.batch_of(request)
    for turn in range(3):
        mine, other = (side.value(side.step(side.put(*batch))) for side in (ours, theirs))
        assert mine == pytest.approx(other, rel=1e-3), turn


@pytest.mark.peer
def test_pytorch_trains_in_its_process(bench, peer, capsys):
    bench.main(["--trial", "--precision", "float32", "--mode", "torch:eager+legacy", "--json"])
    ((found,),) = [each["rows"] for each in json.loads(capsys.readouterr().out)["tables"]]
    assert found["fault"] is None
    assert found["settings"]["api"] == "legacy"
    assert found["settings"]["layout"] == "nchw"
    assert found["settings"]["allow_tf32"] is False
    assert found["first_loss"] != found["last_loss"]


@pytest.mark.peer
@pytest.mark.parametrize(("precision", "scaler"), [("float16", True), ("bfloat16", False), ("tf32", False)])
def test_pytorch_takes_its_precision(steps, peer, monkeypatch, precision, scaler):
    monkeypatch.delenv(peer.LEGACY, raising=False)
    request = steps.Request("resnet10", precision, 8, "eager", ("limit0",), device="cpu", size=48, classes=10)
    side = peer.Training(request)
    settings = side.settings()
    batch = side.put(*steps.batch_of(request))
    assert math.isfinite(side.value(side.step(batch)))
    assert (settings["layout"], settings["scaler"]) == ("nhwc", scaler)
    assert settings["allow_tf32"] is True
    assert settings["benchmark_limit"] == 0
    assert settings["autocast"] == (None if precision == "tf32" else precision)
    assert side.model.layer1[0].conv1.weight.stride()[1] == 1
    assert side.scale() == (steps.INIT_SCALE if scaler else None)


@pytest.mark.peer
def test_the_legacy_option_needs_its_variable(steps, peer, monkeypatch):
    monkeypatch.delenv(peer.LEGACY, raising=False)
    with pytest.raises(ValueError, match=peer.LEGACY):
        peer.Training(steps.Request("resnet10", "float32", 2, "eager", ("legacy",), device="cpu"))


def test_the_parser_knows_its_parts(bench):
    args = bench.arguments(["--precision", "float16", "tf32", "--batch", "128", "256", "--seconds", "330"])
    assert isinstance(args, argparse.Namespace)
    assert (args.precision, args.batch, args.seconds) == (["float16", "tf32"], [128, 256], 330.0)
    assert args.total < 480.0
