"""Stored choices on the GPU: found in one process, used by others without a search."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flcuda
from flcuda import cli
from flcuda import device as devices
from flcuda.cli import choices as command
from flcuda.errors import FlcudaError
from flcuda.finder import default_store
from flcuda.finder.policy import Policy
from flcuda.finder.problem import Problem
from flcuda.finder.store import ChoiceStore

LINES = (
    "forward n4 c16 14x14 k32 3x3 p1 float16 nhwc",
    "backward_data n4 c16 14x14 k32 3x3 p1 float16 nhwc",
    "backward_filter n4 c16 14x14 k32 3x3 p1 float16 nhwc",
    "forward n4 c16 14x14 k32 3x3 p1 float32 nchw",
    "graph; x float16 4x16x14x14 nhwc; w float16 32x16x3x3 nhwc; "
    "t = convolution_forward(%x, %w, padding=1); y = relu(%t); out y",
)

# Plans and runs every line; says what was chosen, how often was searched, and what the store warned of.
SCRIPT = """
import json, logging, os, sys, warnings
import flcuda
from flcuda.finder.policy import Policy
from flcuda.finder.problem import Problem

searches, warned = [], []

class Counter(logging.Handler):
    def emit(self, record):
        text = record.getMessage()
        if text.startswith("searching for"):
            searches.append(text)

logger = logging.getLogger("flcuda.finder")
logger.setLevel(logging.INFO)
logger.addHandler(Counter())
warnings.simplefilter("always")
warnings.showwarning = lambda message, *_: warned.append(str(message))
mode, *lines = sys.argv[1:]
chosen = {}
for line in lines:
    problem = Problem.parse(line)
    plan = flcuda.plan(problem, policy=Policy(mode=mode), device="cuda")
    out = plan(**problem.random_arrays(device="cuda"))
    assert bool((out == out).all()), line
    chosen[line] = plan.choice.to_json()
folder = os.environ["FLCUDA_CHOICES"]
print(json.dumps([chosen, len(searches), [text for text in warned if folder in text or "choice" in text]]))
"""


def start(folder: Path, mode: str = "find") -> "subprocess.Popen[str]":
    path = os.pathsep.join(filter(None, [str(Path(flcuda.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "FLCUDA_CHOICES": str(folder), "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, mode, *LINES], env=environment, stdout=subprocess.PIPE, text=True
    )


def result(process: "subprocess.Popen[str]") -> tuple[dict[str, str], int, list[str]]:
    """What was chosen by line, the number of searches, and the store's warnings."""
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    chosen, searches, warned = json.loads(out.splitlines()[-1])
    return chosen, searches, warned


def stored(folder: Path) -> dict[str, Any]:
    entries = ChoiceStore(folder).entries()
    assert [entry.fault for entry in entries] == [None] * len(entries)
    return {str(entry.problem): entry.choice for entry in entries}


def test_what_one_process_stored_another_uses_without_a_search(tmp_path: Path) -> None:
    chosen, searches, warned = result(start(tmp_path))
    assert searches == len(LINES)
    assert warned == []
    assert len(list(tmp_path.iterdir())) == len(LINES)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for mode in ("find", "heuristic", "pinned"):
        again, searches, warned = result(start(tmp_path, mode))
        assert (again, searches, warned) == (chosen, 0, []), mode
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_two_processes_at_once(tmp_path: Path) -> None:
    """Both search in an empty folder; a third one uses what they have left."""
    folder = tmp_path / "choices"
    for chosen, searches, warned in [result(process) for process in [start(folder), start(folder)]]:
        assert set(chosen) == set(LINES)
        assert searches <= len(LINES)
        assert warned == []
    files = stored(folder)
    assert len(list(folder.iterdir())) == len(files) == len(LINES)
    chosen, searches, warned = result(start(folder))
    assert (searches, warned) == (0, [])
    assert chosen == {line: files[str(Problem.parse(line))].to_json() for line in LINES}


def test_pinned_takes_stored_choices_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.parse(LINES[0])
    report = flcuda.find(problem, device="cuda")
    second = report.usable[min(1, len(report.usable) - 1)]
    second.pin(tmp_path)
    monkeypatch.setenv("FLCUDA_CHOICES", str(tmp_path))
    with flcuda.policy(mode="pinned"):
        plan = flcuda.plan(problem, device="cuda")
        assert plan.choice == second.choice
        out = plan(**problem.random_arrays(device="cuda"))
        assert bool((out == out).all())
        with pytest.raises(FlcudaError, match="pinned") as caught:
            flcuda.plan(Problem.parse(LINES[1]), device="cuda")
    assert str(tmp_path) in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [second.choice.key.file_name]


def test_choices_are_checked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in LINES:
        flcuda.find(Problem.parse(line), device="cuda")
    folder = default_store().folder
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert cli.main(["choices", "pin", str(tmp_path)]) == 0
    capsys.readouterr()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    # Whether they are still the best is no question of a test; that all are found again is.
    assert cli.main(["choices", "check", str(tmp_path), "--regret", "1e6", "--json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)["choices"]
    assert [verdict["verdict"] for verdict in verdicts] == ["good"] * len(LINES)
    assert all(verdict["now_ms"] > 0 for verdict in verdicts)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_choice_that_the_search_does_not_list_is_measured_alone() -> None:
    device = devices.Device("cuda", 0)
    choice = flcuda.find(Problem.parse(LINES[0]), device=device).best
    timing, reason = command._measured_alone(choice, Policy(), device)
    assert reason is None
    assert timing is not None
    assert timing.median_ms > 0
    timing, reason = command._measured_alone(replace(choice, algo="no such algorithm"), Policy(), device)
    assert timing is None
    assert reason is not None
