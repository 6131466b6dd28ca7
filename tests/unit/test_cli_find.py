"""`flcuda find` on a machine with no GPU."""

import argparse
import io
import json
import time

import pytest
from finder_fakes import Fake, only
from rich.console import Console

from flcuda import device as devices
from flcuda.cli import find as command
from flcuda.errors import DeviceNotFoundError
from flcuda.finder import default_store

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
