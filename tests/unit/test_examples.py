"""The examples run, as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flcuda import device

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # An example runs from anywhere: the package is found where this test found it.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )


def test_all_examples_are_run_here() -> None:
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert names == ["custom_layer_raw_cudnn.py", "fused_layer.py", "train_digits.py"]


def test_train_digits() -> None:
    pytest.importorskip("sklearn")
    done = run_example("train_digits.py", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("epoch 1: train loss ")


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_fused_layer(precision: str) -> None:
    arguments = ("--device", "cpu", "--shape", "3", "5", "7", "6", "--filters", "4", "--precision", precision)
    done = run_example("fused_layer.py", *arguments, "--repeats", "3")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "n3 c5 7x6 k4" in done.stdout
    assert "the results agree" in done.stdout
    done = run_example("fused_layer.py", *arguments, "--repeats", "3", "--json")
    report = json.loads(done.stdout)
    assert report["agree"]
    assert all(value < 1e-2 for value in report["differences"].values())
    assert report["times"]["forward + backward"]["fused"]["samples"] == 3


@pytest.mark.skipif(device.cuda_available(), reason="there is a GPU here")
def test_raw_cudnn_says_that_it_needs_a_gpu() -> None:
    done = run_example("custom_layer_raw_cudnn.py")
    assert done.returncode == 1
    assert done.stderr == "this example needs an NVIDIA GPU, and there is none here\n"
