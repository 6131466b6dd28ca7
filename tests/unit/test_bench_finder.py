"""The benchmark of the finder: its arithmetic, its processes, and PyTorch's side where PyTorch is installed."""

import json
import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from bench_scripts import BENCH, load

import flcuda
from flcuda import device as devices
from flcuda.device import CPU
from flcuda.finder import FindReport, Policy, Problem, measure

LINES = [
    "forward n2 c3 9x8 k4 3x3 p1 s2 float32 nchw",
    "backward_data n2 c4 6x5 k6 3x3 p1 s1 float32 nchw",
    "backward_filter n2 c4 6x5 k6 1x1 p0 s1 float32 nchw",
]


@pytest.fixture(scope="module")
def bench():
    return load(BENCH / "bench_finder.py")


@pytest.fixture(scope="module")
def peer_script():
    pytest.importorskip("torch")
    return load(BENCH / "peers" / "torch_convolutions.py")


def answer(median: float, low: float | None = None, high: float | None = None, **more) -> dict:
    low = median if low is None else low
    high = median if high is None else high
    return {"median_ms": median, "low_ms": low, "high_ms": high, "spread_ms": high - low, "search_s": 0.5, **more}


class FakePeer:
    """Answers with given times; remembers what it was asked."""

    def __init__(self, times: dict[str, float | str]) -> None:
        self.times = times
        self.asked = []

    def __call__(self, lines, precision, mode, **how):
        self.asked.append((list(lines), precision, str(mode), how))
        answers = {}
        for line in lines:
            time = self.times.get(line, "no such problem")
            answers[line] = {"error": time} if isinstance(time, str) else answer(time)
        return {"settings": {"torch": "0"}, "answers": answers}


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_the_peer_is_compared_with_the_mean_of_before_and_after_by_how_often_each_occurs(bench):
    answers = {"a": answer(4.0), "b": answer(1.0), "c": {"error": "no"}}
    before = {"a": answer(1.0), "b": answer(2.0), "c": answer(9.0)}
    after = {"a": answer(3.0), "b": answer(2.0), "c": answer(9.0)}
    found = bench.against(answers, before, after, Counter(a=3, b=1, c=5))
    assert found["total_ms"] == 3 * 4 + 1
    assert found["ours_ms"] == 3 * 2 + 2
    assert found["ratio"] == 13 / 8
    assert found["geometric_mean"] == pytest.approx(math.sqrt(4 / 2 * 1 / 2))
    assert (found["compared"], found["of"]) == (4, 9)
    assert found["not_compared"] == {"c": "no"}
    assert found["search_s"] == 1.0


def test_nothing_compared_is_no_ratio(bench):
    found = bench.against({"a": {"skipped": "late"}}, {"a": answer(1.0)}, {"a": answer(1.0)}, Counter(a=1))
    assert found["ratio"] is None
    assert found["geometric_mean"] is None


@pytest.mark.parametrize(
    ("ours", "theirs", "slower", "beyond"),
    [
        (answer(1.0), answer(1.0), False, False),
        (answer(1.019, 1.015, 1.03), answer(1.0), False, False),
        (answer(1.05, 0.99, 1.06), answer(1.0, 0.97, 1.01), True, False),
        (answer(1.05, 1.04, 1.06), answer(1.0, 0.97, 1.01), True, True),
        (answer(0.9), answer(1.0), False, False),
    ],
)
def test_slower_and_beyond_noise(bench, ours, theirs, slower, beyond):
    (row,) = bench.ranked({"a": ours, "only ours": answer(1.0)}, {"a": theirs, "only theirs": answer(1.0)})
    assert bench.is_slower(row) is slower
    assert bench.beyond_noise(row) is beyond


def test_the_largest_win_comes_first(bench):
    ours = {"a": answer(1.0), "b": answer(1.0), "c": answer(1.0)}
    theirs = {"a": answer(2.0), "b": answer(4.0), "c": answer(0.5)}
    assert [(row["problem"], row["ratio"]) for row in bench.ranked(ours, theirs)] == [
        ("b", 4.0),
        ("a", 2.0),
        ("c", 0.5),
    ]


def test_a_source_alone_beside_the_picks_for_what_it_can_do(bench):
    graph, legacy = {"id": "graph:1", "same": True}, {"id": "legacy:GEMM", "same": False}
    rows = [
        {
            "problem": "a",
            "count": 2,
            "alone": {"ours": answer(1.0), "legacy": answer(3.0, **legacy), "graph": answer(1.0, **graph)},
        },
        {"problem": "b", "count": 1, "alone": {"ours": answer(1.1), "legacy": answer(1.0, **legacy)}},
    ]
    found = bench.alone(rows, Counter(a=2, b=1))
    assert found["legacy"]["total_ms"] == 7.0
    assert found["legacy"]["picks_ms"] == 3.1
    assert found["legacy"]["picked_slower"] == ["b"]
    assert (found["legacy"]["picked"], found["graph"]["picked"]) == (0, 2)
    assert (found["graph"]["solves"], found["graph"]["of"], found["graph"]["total_ms"]) == (2, 3, 2.0)


def test_the_pick_of_a_source_alone_is_timed_beside_ours(bench):
    problem = Problem.parse(LINES[1])
    report = flcuda.find(problem, device="cpu", store=False)
    best, other = report.usable[0], report.usable[-1]
    assert best.choice.identity != other.choice.identity
    backwards = FindReport(report.key, report.device, report.rows[::-1])
    found = bench.beside(best.plan(), {"one": report, "two": backwards, "three": None}, CPU)
    assert set(found) == {"ours", "one", "two"}
    assert (found["one"]["same"], found["two"]["same"]) == (True, False)
    assert found["one"]["median_ms"] == found["ours"]["median_ms"]
    assert found["two"]["id"] == other.label
    assert found["two"]["low_ms"] <= found["two"]["median_ms"] != found["ours"]["median_ms"]


@pytest.mark.parametrize("text", ["graph", "v8:0", "graph:-1", "legacy:ten"])
def test_modes_are_checked(bench, text):
    with pytest.raises(bench.argparse.ArgumentTypeError, match=text):
        bench.Mode.parse(text)


def test_modes_read_back(bench):
    assert [bench.Mode.parse(str(mode)) for mode in bench.MODES] == list(bench.MODES)


# --- PyTorch's process ------------------------------------------------------------------------------------------------

FAKE = """
import json, os, sys, time
request = json.load(sys.stdin)
api = "legacy" if "TORCH_CUDNN_V8_API_DISABLED" in os.environ else "graph"
print(json.dumps({"settings": {"api": api, **request}}), flush=True)
print("a word of a library")
for line in request["problems"]:
    if "k5 " in line:
        time.sleep(30)
    if "k6 " in line:
        print("dying", file=sys.stderr)
        os._exit(3)
    print(json.dumps({"problem": line, "median_ms": 1.0, "low_ms": 1.0, "high_ms": 1.0, "search_s": 0.1}), flush=True)
"""


@pytest.fixture
def fake(tmp_path):
    path = tmp_path / "fake_peer.py"
    path.write_text(FAKE)
    return (sys.executable, str(path))


def ask(bench, fake, lines, mode="graph:0", seconds=30.0):
    return bench.peer(lines, "float32", bench.Mode.parse(mode), device="cpu", l2="cold", seconds=seconds, command=fake)


@pytest.mark.parametrize(("mode", "api", "limit"), [("graph:10", "graph", 10), ("legacy:0", "legacy", 0)])
def test_the_api_is_chosen_by_the_environment(bench, fake, mode, api, limit, monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_V8_API_DISABLED", "1")
    found = ask(bench, fake, ["k4 a"], mode)
    assert found["settings"]["api"] == api
    assert found["settings"]["benchmark_limit"] == limit
    assert found["answers"]["k4 a"]["median_ms"] == 1.0


def test_what_ends_the_process_is_an_error_and_the_rest_is_asked_again(bench, fake):
    answers = ask(bench, fake, ["k4 a", "k6 b", "k4 c", "k6 d"])["answers"]
    assert [answers[line].get("median_ms") for line in ("k4 a", "k4 c")] == [1.0, 1.0]
    assert answers["k6 b"]["error"] == answers["k6 d"]["error"] == "the process ended with status 3"


def test_what_takes_too_long_is_ended_and_the_rest_skipped(bench, fake, monkeypatch):
    monkeypatch.setattr(bench, "GRACE_S", 0.5)
    answers = ask(bench, fake, ["k4 a", "k5 b", "k4 c"], seconds=0.5)["answers"]
    assert answers["k4 a"]["median_ms"] == 1.0
    assert "skipped" in answers["k4 c"]
    assert "error" in answers["k5 b"] or "skipped" in answers["k5 b"]


def test_a_peer_that_cannot_begin_is_an_error(bench):
    with pytest.raises(RuntimeError, match="ended with status 1 before it began"):
        ask(bench, (sys.executable, "-c", "import no_such_module"), ["k4 a"])


# --- the commands -----------------------------------------------------------------------------------------------------


def test_network(bench):
    problems = [Problem.parse(LINES[0]), *[Problem.parse(LINES[1])] * 3]
    ask = FakePeer({LINES[0]: 1e3, LINES[1]: "no memory"})
    result = bench.network(
        problems,
        "float32",
        policy=Policy(),
        device=CPU,
        modes=[bench.Mode("graph", 10), bench.Mode("legacy", 0)],
        seconds=7.0,
        ask=ask,
    )
    json.dumps(result)
    assert [row["count"] for row in result["rows"]] == [1, 3]
    assert all(len(row["rounds"]) == 3 for row in result["rows"])
    assert all(row["report"] and row["error"] < 1e-5 for row in result["rows"])
    assert result["alone"]["reference"]["solves"] == 4
    assert all(row["usable"] <= row["rows"] for row in result["rows"])
    assert [entry["mode"] for entry in result["peers"]] == ["graph:10", "legacy:0"]
    assert result["peers"][0]["ratio"] > 1
    assert result["peers"][0]["not_compared"] == {LINES[1]: "no memory"}
    total = sum(row["count"] * row["rounds"][1]["median_ms"] for row in result["rows"])
    assert result["total_ms"][1] == pytest.approx(total)
    assert ask.asked[0] == (LINES[:2], "float32", "graph:10", {"device": "cpu", "l2": "cold", "seconds": 7.0})
    bench.print_network(result)


def test_suite_looks_again_at_what_was_slower(bench, monkeypatch):
    times = iter([1.0, 1.0, 1.0, 0.4])
    monkeypatch.setattr(bench, "timed", lambda plans, *_: [answer(next(times)) for _ in plans])
    # three are measured; the one that PyTorch does in half the time is not so slow the second time
    ask = FakePeer({LINES[0]: 2.0, LINES[1]: 0.5, LINES[2]: 8.0})
    result = bench.suite(list(map(Problem.parse, LINES)), "float32", policy=Policy(), device=CPU, ask=ask)
    json.dumps(result)
    assert result["compared"] == 3
    assert result["geometric_mean"] == pytest.approx(2.0)
    assert [row["problem"] for row in result["wins"]] == [LINES[2], LINES[0]]
    assert all(row["verification"]["reason"] is None for row in result["wins"])
    (slower,) = result["slower"]
    assert slower["problem"] == LINES[1]
    assert slower["again"]["ratio"] == pytest.approx(0.5 / 0.4)
    assert result["slower_beyond_noise"] == []
    assert [lines for lines, *_ in ask.asked][1] == [LINES[1]]
    bench.print_suite(result)


def test_suite_says_what_was_not_compared(bench):
    ask = FakePeer({LINES[0]: "no memory"})
    problems = [Problem.parse(LINES[0])]
    result = bench.suite(problems, "float32", policy=Policy(), device=CPU, ask=ask)
    assert result["not_compared"] == {LINES[0]: "torch: no memory"}
    assert (result["compared"], result["geometric_mean"]) == (0, None)
    result = bench.suite(problems, "float32", policy=Policy(), device=CPU, seconds=(-1.0, 1.0, 1.0), ask=ask)
    assert "used up" in result["not_compared"][LINES[0]]
    bench.print_suite(result)


def test_suite_reports_what_cannot_be_searched(bench, monkeypatch):
    def nothing(*_, **__):
        raise ValueError("no candidate can be used\nat all")

    monkeypatch.setattr(bench.flcuda, "find", nothing)
    result = bench.suite([Problem.parse(LINES[0])], "float32", policy=Policy(), device=CPU, ask=FakePeer({}))
    assert result["not_compared"] == {LINES[0]: "ours: ValueError: no candidate can be used"}


@pytest.fixture
def problem_file(tmp_path):
    path = tmp_path / "problems.txt"
    path.write_text("\n".join([*LINES, LINES[0], "# a comment"]))
    return path


def test_policies_stand_beside_pytorch(bench):
    problems = [Problem.parse(line) for line in (*LINES, LINES[0])]
    peer = FakePeer({str(problems[0]): 2.0})
    found = bench.policies(problems, "float32", device=CPU, mode=bench.Mode("graph", 0), seconds=5, ask=peer)
    assert list(found.policies) == list(bench.POLICIES)
    assert found.counts[problems[0]] == 2
    assert found.total_ms("PyTorch graph:0") == 4.0
    assert found.total_ms("fastest") > 0
    assert str(found.costs[problems[1]]["PyTorch graph:0"].ms) == "None"
    ((lines, precision, mode, _),) = peer.asked
    assert (lines, precision, mode) == ([str(problem) for problem in dict.fromkeys(problems)], "float32", "graph:0")


def test_startup_finds_the_same_choices_in_a_new_process(bench, problem_file):
    words = ["startup", "--precision", "float32", "--device", "cpu", "--problems", str(problem_file)]
    everything = bench.startup(bench.parser().parse_args([*words, "--effort", "fast"]))
    json.dumps(everything)
    result = everything["efforts"]["fast"]
    assert result["identical"]
    assert [row["problem"] for row in result["stored"]["rows"]] == LINES
    assert [row["identity"][0] for row in result["stored"]["rows"]] == ["reference"] * 3
    assert 0 < result["stored"]["plans_s"] < result["stored"]["process_s"] < result["stored"]["wall_s"]
    bench.print_startup(everything)


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_regret_command(bench, problem_file, more, capsys):
    words = ["--precision", "float32", "--device", "cpu", "--problems", str(problem_file), "--repeats", "3"]
    bench.main(["regret", *words, *more])
    printed = capsys.readouterr().out
    if more:
        result = json.loads(printed)
        assert result["repetition"]["times"] == 3
        assert [entry["count"] for entry in result["repetition"]["problems"]] == [2, 1, 1]
        assert result["reported"] == []
    else:
        assert printed.startswith("float32: 3 searches")


def test_network_command(bench, problem_file, fake, capsys, monkeypatch):
    monkeypatch.setattr(bench, "PEER", Path(fake[1]))
    words = [
        "network",
        "--precision",
        "float32",
        "--device",
        "cpu",
        "--problems",
        str(problem_file),
        "--mode",
        "graph:3",
    ]
    monkeypatch.setattr(bench, "GRACE_S", 5.0)
    bench.main([*words, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["peers"][0]["settings"]["benchmark_limit"] == 3
    # the fake dies at filters of 6 channels
    assert set(result["peers"][0]["not_compared"]) == set(LINES[1:])
    assert [row["count"] for row in result["rows"]] == [2, 1, 1]


def test_a_file_of_another_precision_is_refused(bench, problem_file):
    with pytest.raises(SystemExit, match=r"forward n2 .* is not of the precision tf32"):
        bench.main(["plans", "--precision", "tf32", "--device", "cpu", "--problems", str(problem_file)])


# --- PyTorch ----------------------------------------------------------------------------------------------------------

GEOMETRIES = [
    "n2 c3 9x8 k4 3x3 p1 s2",
    "n2 c4 7x9 k8 1x1",
    "n3 c1 7x9 k8 3x2 p1x0",
    "n2 c8 9x9 k8 3x3 p2 d2 g8",
    "n2 c4 17 k6 5 p2 s2",
    "n1 c4 5x6x7 k6 3x3x3 p1",
    "n2 c6 1x1 k4 1x1",
]


@pytest.mark.peer
@pytest.mark.parametrize("word", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", ["forward", "backward_data", "backward_filter"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_pytorch_computes_the_problem_on_our_memory(peer_script, geometry, direction, layout, word):
    torch = pytest.importorskip("torch")
    problem = Problem.parse(f"{direction} {geometry} {word} {layout}")
    (arrays,) = measure.operand_sets(problem, CPU, Policy())
    convolution = peer_script.Convolution(problem, arrays)
    for tensor, array, name in zip(convolution.tensors, arrays, problem.operands, strict=True):
        assert tensor.data_ptr() == array.ctypes.data
        strides = list(tensor.stride())
        if convolution.lifted:
            del strides[2]
        assert tuple(strides) == problem.strides_of(name)
    found = convolution.call()()
    if convolution.lifted:
        found = found.squeeze(2)
    wide = Problem.parse(str(problem).replace(word, "float64"))
    row = flcuda.find(wide, device="cpu", store=False).rows[0]
    expected = row.plan()(*(array.astype(np.float64) for array in arrays[:2]))
    tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[word]
    difference = found.to(torch.float64).numpy() - expected
    assert np.linalg.norm(difference) <= tolerance * np.linalg.norm(expected)
    assert np.linalg.norm(expected) > 0


@pytest.mark.peer
@pytest.mark.parametrize(
    "line", ["forward n2 c4 9x8 k4 3x3 p1", "backward_filter n2 c4 3x9x8 k4 3x3x3", "forward n2 c4 9 k4 3"]
)
def test_channels_last_is_recognised(peer_script, line):
    for layout in ("nchw", "nhwc"):
        problem = Problem.parse(f"{line} float16 {layout}")
        arrays = measure.operand_sets(problem, CPU, Policy())[0]
        assert peer_script.Convolution(problem, arrays).layout == layout


@pytest.mark.peer
@pytest.mark.parametrize("words", ["p1:0", "p1 acc"])
def test_what_pytorch_cannot_be_asked(peer_script, words):
    problem = Problem.parse(f"forward n2 c4 9x8 k4 3x3 {words} float32 nchw")
    arrays = measure.operand_sets(problem, CPU, Policy())[0]
    with pytest.raises(ValueError, match="PyTorch"):
        peer_script.Convolution(problem, arrays)


@pytest.mark.peer
def test_the_whole_with_pytorch(bench, problem_file, capsys):
    pytest.importorskip("torch")
    bad = "forward n2 c4 9x8 k4 3x3 p1:0x0 s1 float32 nchw"
    problem_file.write_text("\n".join([*LINES, bad]))
    words = ["suite", "--precision", "float32", "--device", "cpu", "--problems", str(problem_file), "--json"]
    bench.main(words)
    result = json.loads(capsys.readouterr().out)
    assert result["compared"] == 3
    assert result["settings"]["device"] == str(devices.CPU)
    assert result["not_compared"] == {bad: "torch: ValueError: PyTorch pads alike on both sides"}
