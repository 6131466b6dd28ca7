"""`flcuda find` on a machine with no GPU."""

import argparse
import io
import json
import subprocess
import time
from types import SimpleNamespace

import pytest
from finder_fakes import Fake, only
from rich.console import Console

from flcuda import device as devices
from flcuda.cli import find as command
from flcuda.errors import CudnnNotSupportedError, DeviceNotFoundError, FlcudaError
from flcuda.finder import default_store
from flcuda.finder.policy import Policy
from flcuda.finder.problem import Problem
from flcuda.finder.problems import NAMES, problems

LINE = "forward n2 c3 6x5 k4 3x3 p1 float32 nchw"


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.configure(parser.add_subparsers())
    args = parser.parse_args(["find", *words])
    status: int = args.run(args)
    return status


def test_prints_a_table_and_stores_the_choice(capsys):
    assert call(LINE, "--device", "cpu") == 0
    out, err = capsys.readouterr()
    assert "reference" in out
    assert "im2col" in out
    assert out.startswith("forward n2 c3 6x5 k4 3x3 p1 s1 float32 nchw\n")
    assert err == "no GPU is used: the reference source runs on the CPU\n"
    assert len(list(default_store().folder.glob("forward-*.json"))) == 1


def test_without_quotes(capsys):
    assert call(*LINE.split(), "--device", "cpu") == 0
    assert "im2col" in capsys.readouterr().out


@pytest.mark.skipif(devices.cuda_available(), reason="there is a GPU")
def test_says_that_there_is_no_gpu(capsys):
    assert call(LINE, "--mode", "heuristic") == 0
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("no GPU is used (")
    with pytest.raises(DeviceNotFoundError):
        call(LINE, "--device", "cuda")


def test_all_prints_three_tables(capsys):
    assert call(LINE.replace("forward", "all"), "--device", "cpu") == 0
    out = capsys.readouterr().out
    places = [out.index(f"{direction} n2 c3") for direction in ("forward", "backward_data", "backward_filter")]
    assert places == sorted(places)
    assert out.count("host us") == 3


def test_json(capsys):
    assert call(LINE, "--device", "cpu", "--json") == 0
    one = json.loads(capsys.readouterr().out)
    assert one["problem"] == "forward n2 c3 6x5 k4 3x3 p1 s1 float32 nchw"
    assert one["rows"][0]["median_ms"] > 0
    assert call(LINE.replace("forward", "all"), "--device", "cpu", "--json") == 0
    three = json.loads(capsys.readouterr().out)
    assert [report["problem"].split()[0] for report in three] == ["forward", "backward_data", "backward_filter"]


GRAPH = "graph; x float32 2x3x4x5; w float32 4x3x3x3; t = convolution_forward(%x, %w, padding=1); y = silu(%t); out y"


def test_a_graph(capsys):
    assert call(GRAPH, "--device", "cpu") == 0
    out = capsys.readouterr().out
    problem = Problem.parse(GRAPH)
    assert Problem.parse(out[: out.index("\ncpu: ")]) == problem
    assert "numpy" in out
    assert "error" in out
    assert len(list(default_store().folder.glob("graph-*.json"))) == 1
    assert call(GRAPH, "--device", "cpu", "--json", "--no-verify") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problem"] == str(problem)
    assert report["rows"][0]["error"] is None
    assert call(LINE, "--device", "cpu", "--json", "--verify") == 0
    best = json.loads(capsys.readouterr().out)["rows"][0]
    assert 0 <= best["error"] <= best["bound"]


def test_a_graph_may_have_a_tensor_called_all(capsys):
    line = "graph; all float32 2x3x4x5 ; y = tanh( %all ); out y"
    assert call(line, "--device", "cpu") == 0
    assert "pointwise(tanh_fwd, %all)" in capsys.readouterr().out


def test_a_bad_graph():
    with pytest.raises(ValueError, match="'convolve' is no operation"):
        call("graph; x float32 2x3; y = convolve(%x); out y", "--device", "cpu")


def test_policy_options(capsys, monkeypatch):
    fakes = [
        Fake("racy", deterministic=False),
        Fake("big", workspace=(1 << 20) + 1),
        Fake("good", workspace=1 << 20, delay=20),
    ]
    source = only(monkeypatch, *fakes)
    assert call(LINE, "--device", "cpu", "--deterministic", "--workspace-limit", "1MiB", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"] == "fake:good"
    assert Policy(**found["policy"]) == Policy(deterministic=True, workspace_limit=1 << 20)
    options = ["--time", "host", "--effort", "wide", "--l2", "warm", "--max-error", "0.5"]
    with pytest.raises(ValueError, match="fake:good"):
        # its results are all 1, which verification finds to be wrong
        call(LINE, "--device", "cpu", *options)
    assert source.asked[-1] == Policy(time="host", effort="wide", l2="warm", max_error=0.5)
    assert call(LINE, "--device", "cpu", "--mode", "heuristic", "--json") == 0
    assert json.loads(capsys.readouterr().out)["best"] == "fake:racy"
    assert source.asked[-1].mode == "heuristic"


@pytest.mark.parametrize(
    ("text", "expected"), [("7", 7), ("2GiB", 2 << 30), ("512 MiB", 512 << 20), ("1.5kB", 1500), ("10MB", 10**7)]
)
def test_sizes(text, expected):
    assert command._bytes(text) == expected


@pytest.mark.parametrize("text", ["-1", "2 gigabytes", "MiB", "1e9", ""])
def test_bad_sizes(capsys, text):
    with pytest.raises(SystemExit):
        call(LINE, f"--workspace-limit={text}")
    assert "512MiB" in capsys.readouterr().err


def test_bad_line():
    with pytest.raises(ValueError, match="'3x3x'"):
        call(LINE.replace("3x3", "3x3x"), "--device", "cpu")
    with pytest.raises(ValueError, match="tpu"):
        call(LINE, "--device", "tpu")


@pytest.mark.parametrize(("patience", "shown"), [(0.0, True), (60.0, False)])
def test_a_bar_only_for_a_long_search_on_a_terminal(monkeypatch, capsys, patience, shown):
    screen = io.StringIO()
    monkeypatch.setattr(command, "_SHOW_AFTER_S", patience)
    monkeypatch.setattr(command, "Console", lambda **_: Console(file=screen, force_terminal=True, width=80))
    only(monkeypatch, *(Fake(f"algo{n}", run_errors=lambda call: time.sleep(0.01)) for n in range(6)))
    assert call(LINE, "--device", "cpu", "--json") == 0
    assert ("forward" in screen.getvalue()) == shown
    json.loads(capsys.readouterr().out)


# --- many problems --------------------------------------------------------------------------------------------------


def rows_of(out: str) -> list[list[str]]:
    """The words of the lines of problems."""
    return [line.split() for line in out.split("\n") if " n2 " in line or " n1 " in line]


def test_nothing_to_find():
    with pytest.raises(ValueError, match="name what to find: a problem, --model NAME or --problems FILE"):
        call("--device", "cpu")


def test_a_model_prints_a_line_a_problem_and_the_totals(monkeypatch, capsys):
    only(monkeypatch, Fake("slow", delay=8), Fake("fast", delay=2))
    assert call("--model", "resnet18", "--batch", "1", "--device", "cpu") == 0
    out, err = capsys.readouterr()
    assert err == "no GPU is used: the reference source runs on the CPU\n"
    rows = rows_of(out)
    found = problems("resnet18", 1)
    assert [" ".join(row[3:-1]) for row in rows] == [str(problem) for problem in found]
    assert {(row[0], row[-1]) for row in rows} == {("2.001", "fake:fast")}
    times = {" ".join(row[3:-1]): int(row[2]) for row in rows}
    assert times["forward n1 c64 56x56 k64 3x3 p1 s1 float32 nchw"] == 4
    # 20 convolutions, one of which has no data gradient
    assert sum(times.values()) == 59
    speed = found[0].flops / 2.001e9
    assert float(rows[0][1]) == pytest.approx(speed, rel=1e-2)
    total = " ".join(out[out.index("total") :].split())
    assert total.startswith("total 118.1 ms, ")
    assert "for 59 (32 distinct): forward 40.02, backward_data 38.02, backward_filter 40.02; searched in " in total
    # the best of each is stored, as by a search alone
    assert len(list(default_store().folder.glob("*.json"))) == 32


def test_the_default_layout_is_that_of_the_precision(monkeypatch, capsys):
    only(monkeypatch, Fake("a"))
    monkeypatch.setattr(command, "problems", lambda *args, **how: problems(*args, **how)[:1])
    words = ("--model", "unet", "--batch", "2", "--device", "cpu", "--mode", "heuristic")
    for precision, layout in (("float32", "nchw"), ("float64", "nchw"), ("tf32", "nhwc"), ("bfloat16", "nhwc")):
        assert call(*words, "--precision", precision) == 0
        ((*_, said, laid, _),) = rows_of(capsys.readouterr().out)
        assert (said, laid) == (precision, layout)
    assert call(*words, "--precision", "float16", "--layout", "nchw") == 0
    assert "float16 nchw" in capsys.readouterr().out
    with pytest.raises(ValueError, match="'resnet51' must be one of resnet18"):
        call("--model", "resnet51", "--device", "cpu")
    with pytest.raises(ValueError, match="batch 2: the problems of 'suite'"):
        call("--model", "suite", "--batch", "2", "--device", "cpu")


def test_help_names_the_models(capsys):
    with pytest.raises(SystemExit):
        call("--help")
    out = " ".join(capsys.readouterr().out.split())
    for name in NAMES:
        # a name may be broken at its hyphen
        assert name in out.replace("- ", "-")


@pytest.fixture
def half_refused(monkeypatch):
    """Lets backward_data fail everywhere."""
    source = only(monkeypatch, Fake("good", delay=3))
    own = source.candidates

    def candidates(problem, policy, device):
        if problem.kind == "backward_data":
            yield Fake("bad", reason="is refused here").candidate("fake")
        else:
            yield from own(problem, policy, device)

    source.candidates = candidates


def test_a_file_whose_failures_are_listed(half_refused, tmp_path, capsys):
    path = tmp_path / "mine.txt"
    path.write_text(f"# two\n{LINE}\n{LINE.replace('forward', 'all')} # again\n", encoding="utf-8")
    assert call("--problems", str(path), "--device", "cpu") == 1
    out = capsys.readouterr().out
    rows = [row for row in rows_of(out) if row[-1].startswith("fake") or row[-1] == "failed"]
    assert [(row[0], row[2], row[3], row[-1]) for row in rows] == [
        ("3.001", "2", "forward", "fake:good"),
        ("-", "1", "backward_data", "failed"),
        ("3.001", "1", "backward_filter", "fake:good"),
    ]
    assert "total 9.003 ms" in out
    ending = out[out.index("failed:") :]
    assert "\n  backward_data n2 c3 6x5 k4 3x3 p1 s1 float32 nchw\n" in ending
    assert ending.count("backward_data") == 1
    assert "fake:bad: is refused here" in " ".join(ending.split())
    assert call("--problems", str(path), "--device", "cpu", "--json") == 1
    value = json.loads(capsys.readouterr().out)
    assert [row["count"] for row in value["problems"]] == [2, 1]
    assert value["problems"][0]["report"]["best"] == "fake:good"
    assert value["totals"]["total_ms"] == pytest.approx(9.003)
    assert value["totals"]["count"] == 3
    assert [failure["problem"].split()[0] for failure in value["failures"]] == ["backward_data"]
    path.write_text("forward n2 c3\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"mine\.txt, line 1: "):
        call("--problems", str(path), "--device", "cpu")


def test_of_all_one_may_fail(half_refused, capsys):
    line = LINE.replace("forward", "all")
    assert call(line, "--device", "cpu") == 1
    out = capsys.readouterr().out
    assert out.count("fake:good") == 2
    assert out.index("backward_filter n2") < out.index("failed:")
    assert call(line, "--device", "cpu", "--json") == 1
    three = json.loads(capsys.readouterr().out)
    assert "is refused here" in three[1]["failure"]
    assert three[2]["best"] == "fake:good"
    with pytest.raises(ValueError, match="is refused here"):
        call(LINE.replace("forward", "backward_data"), "--device", "cpu")


def test_repeat(half_refused, capsys):
    assert call(LINE, "--device", "cpu", "--repeat", "3") == 0
    out = capsys.readouterr().out
    assert "3 searches of each of 1 problem\n" in out
    assert "changed in 0 of 2 repeats" in out
    assert not default_store().folder.exists() or not list(default_store().folder.glob("*.json"))
    assert call(LINE.replace("forward", "all"), "--device", "cpu", "--repeat", "2", "--json") == 1
    value = json.loads(capsys.readouterr().out)
    assert (value["times"], value["changes"], value["chances"]) == (2, 0, 2)
    assert len(value["failures"]) == 1


def test_the_bar_of_many_names_the_problem(monkeypatch, capsys):
    screen = io.StringIO()
    monkeypatch.setattr(command, "Console", lambda **_: Console(file=screen, force_terminal=True, width=100))
    only(monkeypatch, Fake("a", run_errors=lambda call: time.sleep(0.02)))
    assert call("--model", "unet", "--batch", "1", "--device", "cpu", "--mode", "heuristic", "--json") == 0
    assert " n1 c" in screen.getvalue()
    # and what is printed goes where it should
    json.loads(capsys.readouterr().out)


# --- plans for a GPU that is not here -------------------------------------------------------------------------------


def offer(engine, knobs=None, *, workspace=0, notes=(), behavior=(), reason=None, deterministic=True):
    """One configuration as the graph source gives it."""
    return SimpleNamespace(
        configuration=SimpleNamespace(
            engine_id=engine, knobs=knobs or {}, mode="A", numerical_notes=notes, behavior_notes=behavior
        ),
        candidate=SimpleNamespace(math="tensor_op", deterministic=deterministic, reason=reason),
        plan=None if workspace is None else SimpleNamespace(workspace=workspace),
    )


OFFERS = [
    offer(62, {"tile_size": 4, "stages": 3}, workspace=2_500_000, notes=("tensor_core",)),
    offer(62, {"tile_size": 1, "stages": 3}, workspace=131, notes=("tensor_core",)),
    offer(25, notes=("nondeterministic",), behavior=("runtime_compilation", "99"), deterministic=False),
    offer(0),
    offer(7, workspace=None, reason="is refused " + "for a long reason " * 8),
    offer(8, workspace=None, reason="is refused " + "for a long reason " * 8),
    offer(9, workspace=5000, reason="workspace of 5000 bytes is above the limit of 4096"),
]


class Properties:
    """Stands for the properties of a GPU, so that no cuDNN is needed."""

    name = "NVIDIA Test"
    origin = "constructed, not read"
    filled = ("memoryBusWidth",)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.fixture
def planned(monkeypatch):
    """Lets plans be those of `OFFERS`; gives the arguments with which they were asked for."""
    asked = []

    def offers(problem, policy, *, properties):
        asked.append((problem, policy, properties))
        return OFFERS

    monkeypatch.setattr(command.graph, "offers", offers)
    monkeypatch.setattr(command.DeviceProperties, "from_profile", lambda source: Properties())
    monkeypatch.setattr(command.libraries, "load", lambda: SimpleNamespace(version_text="9.99.0"))
    return asked


def test_plan_only_prints_cudnns_order_and_says_that_nothing_was_measured(planned, capsys):
    assert call(LINE, "--gpu", "test", "--plan-only") == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.split("\n")
    assert lines[0] == "forward n2 c3 6x5 k4 3x3 p1 s1 float32 nchw"
    assert lines[1] == "for NVIDIA Test, cuDNN 9.99.0"
    assert lines[2] == "GPU profile: constructed, not read; filled for this cuDNN: memoryBusWidth"
    assert lines[3].startswith("Nothing was measured")
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if line.strip()[:1].isdigit() and ":" not in line]
    assert rows == [
        ["1", "62", "2.5", "yes", "tile_size=4", "stages=3"],
        ["2", "62", "0.0", "yes", "tile_size=1", "stages=3"],
        ["3", "25", "0.0", "no", "cuDNN", "chooses"],
        ["4", "0", "0.0", "yes", "cuDNN", "chooses"],
    ]
    assert "\n  62: uses tensor cores\n" in out
    text = " ".join(out.split())
    assert "25: may give other bits in each run; compiles its kernel when the plan is built; 99 " in text
    assert "not usable: 7, 8: is refused for a long reason" in text
    assert "9: workspace above the limit" in text


def test_plan_only_as_json(planned, capsys):
    assert call(LINE, "--gpu", "test", "--plan-only", "--json") == 0
    one = json.loads(capsys.readouterr().out)
    assert one["measured"] is False
    assert (one["gpu"], one["cudnn"]) == ("NVIDIA Test", "9.99.0")
    assert [row["engine"] for row in one["rows"]] == [62, 62, 25, 0, 7, 8, 9]
    assert one["rows"][0] == {
        "engine": 62,
        "knobs": {"tile_size": 4, "stages": 3},
        "heuristic": "A",
        "math": "tensor_op",
        "notes": ["tensor_core"],
        "workspace": 2_500_000,
        "deterministic": True,
        "reason": None,
    }
    words = ("--gpu", "test", "--plan-only", "--json", "--deterministic", "--workspace-limit", "1MiB")
    assert call(LINE.replace("forward", "all"), *words) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3
    assert [problem.direction for problem, _, _ in planned[1:]] == ["forward", "backward_data", "backward_filter"]
    assert all(policy.deterministic and policy.workspace_limit == 1 << 20 for _, policy, _ in planned[1:])


def test_plan_only_of_a_graph(planned, monkeypatch, capsys):
    assert call(GRAPH, "--gpu", "test", "--plan-only") == 0
    out = capsys.readouterr().out
    assert Problem.parse(out[: out.index("\nfor NVIDIA Test")]) == Problem.parse(GRAPH)
    assert "Nothing was measured: this is cuDNN's own order.\n" in out
    assert "legacy" not in out
    monkeypatch.setattr(command.graph, "offers", lambda *_, **__: OFFERS[4:5])
    assert call(GRAPH, "--gpu", "test", "--plan-only") == 0
    assert "no engine can be used: those that use tensor cores need math 'tensor_op'" in capsys.readouterr().out
    assert call(GRAPH.replace("graph", "graph tensor_op"), "--gpu", "test", "--plan-only") == 0
    assert "no engine can be used\n" in capsys.readouterr().out


def test_plan_only_without_an_engine(planned, monkeypatch, capsys):
    monkeypatch.setattr(command.graph, "offers", lambda *_, **__: OFFERS[4:5])
    assert call(LINE, "--gpu", "test", "--plan-only") == 0
    assert "no engine can be used" in capsys.readouterr().out


def test_plan_only_of_a_model(planned, capsys):
    words = ("--model", "resnet18", "--batch", "2", "--gpu", "test", "--plan-only", "--effort", "wide")
    assert call(*words) == 0
    out = capsys.readouterr().out
    assert out.startswith("for NVIDIA Test, cuDNN 9.99.0. Nothing was measured")
    assert "       4    7     4  forward n2 c64 56x56 k64 3x3 p1 s1 float32 nchw; 62, 2.5 MB\n" in out
    assert len(planned) == 32
    assert all(policy.effort == "wide" for _, policy, _ in planned)
    assert call(*words, "--json") == 0
    reports = json.loads(capsys.readouterr().out)
    assert sum(report["count"] for report in reports) == 59
    assert reports[0]["rows"][0]["engine"] == 62


def test_plan_only_goes_on_after_a_failure(planned, monkeypatch, capsys):
    def offers(problem, policy, *, properties):
        if problem.kind == "forward":
            raise CudnnNotSupportedError("plan", 3000, "no such engine", "CUDNN_STATUS_NOT_SUPPORTED")
        return OFFERS

    monkeypatch.setattr(command.graph, "offers", offers)
    assert call(LINE.replace("forward", "all"), "--gpu", "test", "--plan-only") == 1
    out = capsys.readouterr().out
    assert out.startswith("backward_data n2")
    assert "no such engine" in out[out.index("failed:") :]
    with pytest.raises(CudnnNotSupportedError):
        call(LINE, "--gpu", "test", "--plan-only")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--gpu", "h200"], "--gpu h200 needs --plan-only"),
        (["--plan-only"], "--plan-only needs --gpu"),
        (["--plan-only", "--gpu", "h200", "--device", "cpu"], "--device cpu contradicts --plan-only"),
        (["--plan-only", "--gpu", "h200", "--verify"], "--verify contradicts --plan-only"),
        (["--plan-only", "--gpu", "h200", "--repeat", "3"], "--repeat contradicts --plan-only"),
        (["--plan-only", "--gpu", "h200", "--l2", "warm"], "--l2 contradicts --plan-only"),
        (["--mode", "heuristic", "--time", "host"], "--time contradicts --mode heuristic"),
        (["--mode", "heuristic", "--max-error", "0.1"], "--max-error contradicts --mode heuristic"),
        (["--max-error", "0.1", "--no-verify"], "--max-error 0.1 contradicts --no-verify"),
        (["--max-error", "-1", "--device", "cpu"], "max_error -1"),
        (["--repeat", "3", "--verify"], "--repeat contradicts --verify"),
        (["--repeat", "1", "--device", "cpu"], "--repeat 1 must be 2 or more"),
        (["--mode", "heuristic", "--effort", "wide"], "--effort wide contradicts --mode heuristic"),
        (["--model", "resnet18"], "a problem and --model contradict"),
        (["--problems", "mine.txt"], "a problem and --problems contradict"),
        (["--batch", "3"], "--batch needs --model"),
        (["--precision", "float16"], "--precision needs --model"),
        (["--layout", "nhwc"], "--layout needs --model"),
        (["--cudnn", "a", "--cudnn", "b"], "--cudnn needs --plan-only"),
        (["--plan-only", "--gpu", "h200", "--cudnn", "a"], "given 1 times"),
        (["--plan-only", "--gpu", "h200", *["--cudnn", "a"] * 3], "given 3 times"),
        (["--plan-only", "--gpu", "h300"], "'h300' is neither .* l4, l40s"),
    ],
)
def test_options_that_contradict_each_other(words, text):
    with pytest.raises(ValueError, match=text):
        call(LINE, *words)


def test_a_profile_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        call(LINE, "--gpu", str(tmp_path / "absent.json"), "--plan-only")


def child(rows, version):
    return json.dumps({"gpu": "NVIDIA Test", "cudnn": version, "rows": rows})


def row(engine, workspace=0, reason=None):
    return {"engine": engine, "workspace": workspace, "reason": reason}


def test_comparison_of_two_versions(monkeypatch, capsys):
    before = [row(1, 2_000_000), row(2), row(1, 500_000), row(3), row(4), row(9, None, "is refused")]
    after = [row(2), row(1, 500_000), row(5), row(4)]
    commands = []

    def run(words, *, env, **_):
        folder = env[command.libraries.PATH_VARIABLE]
        commands.append((folder, words))
        rows, version = {"old": (before, "9.19.0"), "new": (after, "9.28.0")}[folder]
        return SimpleNamespace(returncode=0, stdout=child(rows, version), stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    words = ("--gpu", "test", "--plan-only", "--cudnn", "old", "--cudnn", "new", "--deterministic")
    assert call(LINE, *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cudnn"] == ["9.19.0", "9.28.0"]
    changes = {engine["engine"]: engine for engine in found["engines"]}
    assert {number: engine["change"] for number, engine in changes.items()} == {
        2: "rank",
        1: "rank",
        5: "came",
        4: "rank",
        3: "went",
    }
    assert changes[1]["before"] == {"rank": 1, "configurations": 2, "least_workspace": 500_000}
    assert changes[1]["after"] == {"rank": 2, "configurations": 1, "least_workspace": 500_000}
    assert changes[5]["before"] is None
    assert [folder for folder, _ in commands] == ["old", "new"]
    for _, asked in commands:
        assert asked[1:] == [
            *["-m", "flcuda", "find", "--gpu", "test", "--plan-only", "--json"],
            *["forward n2 c3 6x5 k4 3x3 p1 s1 float32 nchw", "--deterministic"],
        ]
    assert call(LINE, *words) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.split("\n"))) <= 80
    assert ["5", "came", "-", "-", "-", "3", "1", "0.0"] in [line.split() for line in out.split("\n")]


def test_the_same_rank_with_other_configurations():
    assert command._changes([row(1), row(2)], [row(1), row(1), row(2)])[0]["change"] == "configurations"
    assert [each["change"] for each in command._changes([row(1)], [row(1)])] == ["same"]


def test_a_version_that_cannot_plan_is_named(monkeypatch):
    failed = SimpleNamespace(returncode=2, stdout="", stderr="flcuda: error: no cuDNN\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(FlcudaError, match=r"the cuDNN in old cannot plan forward [^:]*: no cuDNN$"):
        call(LINE, "--gpu", "test", "--plan-only", "--cudnn", "old", "--cudnn", "new")
