"""The examples run, as a user runs them."""

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
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == ["custom_layer_raw_cudnn.py", "train_digits.py"]


def test_train_digits() -> None:
    pytest.importorskip("sklearn")
    done = run_example("train_digits.py", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("epoch 1: train loss ")


@pytest.mark.skipif(device.cuda_available(), reason="there is a GPU here")
def test_raw_cudnn_says_that_it_needs_a_gpu() -> None:
    done = run_example("custom_layer_raw_cudnn.py")
    assert done.returncode == 1
    assert done.stderr == "this example needs an NVIDIA GPU, and there is none here\n"
