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
from flcuda.errors import DeviceNotFoundError, FlcudaError
from flcuda.finder import default_store
from flcuda.finder.problem import Problem

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
    assert out.count("median ms") == 3


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
    assert found["policy"] == {"mode": "find", "deterministic": True, "workspace_limit": 1 << 20}
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


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--gpu", "h200"], "--gpu h200 needs --plan-only"),
        (["--plan-only"], "--plan-only needs --gpu"),
        (["--plan-only", "--gpu", "h200", "--device", "cpu"], "--device cpu contradicts --plan-only"),
        (["--plan-only", "--gpu", "h200", "--verify"], "--verify contradicts --plan-only"),
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
