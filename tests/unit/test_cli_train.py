"""`flcuda train` on the CPU device, from end to end on small data."""

import gzip
import io
import json
import os
import re
import struct
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from flcuda import cli, data, device, training
from flcuda.cli import train

NO_GPU = not device.cuda_available()


def write_idx(path: Path, array: np.ndarray) -> None:
    content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(content))


@pytest.fixture
def fashion(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Fashion-MNIST's files with a few tiny images."""
    folder = tmp_path / "fashion"
    folder.mkdir()
    for part, count in (("train", 12), ("t10k", 5)):
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", rng.integers(0, 256, (count, 9, 8), np.uint8))
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", rng.integers(0, 10, count, np.uint8))
    return folder


def command(*arguments: str) -> list[str]:
    return ["train", "--device", "cpu", "--epochs", "1", "--batch-size", "4", *arguments]


def test_lines_and_summary(fashion: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command("--data", f"fashion-mnist:{fashion}")) == 0
    output = capsys.readouterr()
    text = output.out
    assert output.err == ""
    assert "\x1b" not in text
    assert "\r" not in text
    assert "resnet18 (11,172,810 parameters, small stem, float32) on cpu (" in text
    assert "fashion-mnist: 12 training and 5 test images of 1x9x8, 10 classes" in text
    assert len(re.findall(r"^epoch 1: train loss \d", text, re.MULTILINE)) == 1
    assert re.search(r"^Test accuracy \d\.\d{4} after \d", text, re.MULTILINE)
    assert "numpy" in text.splitlines()[-1]


def test_json_alone_on_standard_output(fashion: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command("--data", f"fashion-mnist:{fashion}", "--seed", "7", "--lr", "0.01", "--json")) == 0
    output = capsys.readouterr()
    summary = json.loads(output.out)
    assert "epoch 1" in output.err
    assert summary["seed"] == 7
    assert summary["lr"] == 0.01
    assert (summary["train_images"], summary["test_images"], summary["batch_size"]) == (12, 5, 4)
    assert summary["parameters"] == 11_172_810
    assert not summary["interrupted"]
    assert set(summary["loader_memory"]) == {"slots", "pinned", "device", "largest", "kept"}
    assert summary["loader_memory"]["largest"] > 0
    assert [result["epoch"] for result in summary["history"]] == [1]
    for key in ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "images_per_second", "seconds"):
        assert summary["history"][0][key] >= 0
    assert {"flcuda", "python", "numpy"} <= set(summary["versions"])


def test_json_file_and_precision(fashion: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out" / "summary.json"
    arguments = command("--data", f"fashion-mnist:{fashion}", "--precision", "float16", "--json", str(target))
    assert cli.main(arguments) == 2
    assert "its folder does not exist" in capsys.readouterr().err
    target.parent.mkdir()
    assert cli.main(arguments) == 0
    assert "Warning: the CPU only emulates float16" in capsys.readouterr().out
    assert json.loads(target.read_text())["precision"] == "float16"
    assert [path.name for path in target.parent.iterdir()] == ["summary.json"]


def test_json_goes_through_links_and_devices_and_has_the_usual_rights(tmp_path: Path) -> None:
    plain, link, device_file = tmp_path / "plain", tmp_path / "link", tmp_path / "device"
    link.symlink_to(tmp_path / "target")
    os.mkfifo(device_file)
    reader = os.open(device_file, os.O_RDONLY | os.O_NONBLOCK)
    for path in (plain, link, device_file):
        train._write(str(path), "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert device_file.is_fifo()
    assert link.is_symlink()
    assert link.read_text() == plain.read_text() == "text"
    expected = tmp_path / "expected"
    expected.write_text("")
    assert plain.stat().st_mode == expected.stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["device", "expected", "link", "plain", "target"]


def make_folder(path: Path) -> None:
    for name, shade in (("dark", 40), ("light", 200)):
        (path / name).mkdir(parents=True)
        for number in range(5):
            pixels = np.full((8 + number, 12, 3), shade + number, np.uint8)
            Image.fromarray(pixels).save(path / name / f"{number}.png")


def test_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "Bilder [ü]"
    make_folder(path)
    assert cli.main(command("--data", f"folder:{path}")) == 0
    text = capsys.readouterr().out
    assert f"folder:{path}: 8 training and 2 test images of 3x10x10, 2 classes; no train and val folders" in text
    assert "is the test; decoded by Pillow " in text
    assert "\n1 epoch, batch size 4" in text


def test_a_folder_of_photographs_with_a_broken_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path)
    whole = tmp_path / "dark" / "3.png"
    # The header is whole, so that it is found in the training only.
    for name in ("dark", "light"):
        for path in (tmp_path / name).iterdir():
            path.write_bytes(whole.read_bytes()[:-30])
    assert cli.main(command("--data", f"folder:{tmp_path}")) == 2
    error = capsys.readouterr().err
    assert error.startswith("flcuda: error: ")
    assert ".png" in error
    assert [thread.name for thread in threading.enumerate() if "prefetch" in thread.name] == []


def test_a_single_epoch_has_a_fall_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_folder(tmp_path / "images")
    monkeypatch.setenv("HOME", str(tmp_path))
    # Folders of small images warm up for two epochs unless the training is short.
    assert cli.main(command("--data", "folder:~/images", "--lr", "0.01", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["history"][0]["lr"] == pytest.approx(0.005)


def test_pillows_remarks_are_kept_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path)
    exif = Image.Exif()
    exif[0x112] = 6
    odd = exif.tobytes()[:-6]
    for name in ("dark", "light"):
        Image.new("RGB", (9, 9)).save(tmp_path / name / "odd.jpg", exif=odd)
    with pytest.warns(UserWarning, match="EXIF"):
        data.decode(tmp_path / "dark" / "odd.jpg")
    assert cli.main(command("--data", f"folder:{tmp_path}")) == 0
    assert capsys.readouterr().err == ""


def test_synthetic(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = data.synthetic
    monkeypatch.setattr(data, "synthetic", lambda count: real(count, (3, 16, 16), 10))
    assert cli.main(command("--data", "synthetic:9", "--model", "resnet34")) == 0
    text = capsys.readouterr().out
    assert "resnet34" in text
    assert "synthetic: 9 training and 1 test images of 3x16x16" in text


def test_progress_bar_on_a_terminal(
    fashion: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "140")
    assert cli.main(command("--data", f"fashion-mnist:{fashion}")) == 0
    text = capsys.readouterr().out
    assert "epoch 1/1" in text
    assert text.index("finding algorithms") < text.index("images/s") < text.index("epoch 1: train loss")


def test_the_progress_bar_has_room_in_80_columns() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, color_system=None, legacy_windows=False)
    with train._Bar(console, 15) as bar:
        bar.report(training.Report("test", 12, 15, 59_904, 60_000, 12.3456, 0.8123, 12345.0))
    text = stream.getvalue()
    assert "epoch 12/15 test ━" in text
    assert "100% loss 12.3456 acc. 0.8123 12,345 images/s" in text
    assert "…" not in text


def test_interrupted(fashion: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = training.Trainer.fit

    def fit(self: training.Trainer, epochs: int, **options: Any) -> object:
        def report(report: training.Report) -> None:
            options["on_report"](report)
            if report.epoch == 2 and report.done == 8:
                raise KeyboardInterrupt

        self.report_interval = 0.0
        return real(self, epochs, **{**options, "on_report": report})

    monkeypatch.setattr(training.Trainer, "fit", fit)
    arguments = ["train", "--device", "cpu", "--data", f"fashion-mnist:{fashion}", "--batch-size", "4", "--epochs", "3"]
    assert cli.main(arguments) == 130
    text = capsys.readouterr().out
    assert "Interrupted after 1 of 3 epochs." in text
    assert "Epoch 2 had reached image 8 of 12 (train): loss" in text


def test_no_gpu_is_said_in_one_line(
    fashion: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "cuda_missing_reason", lambda: "no CUDA device is visible")
    arguments = command("--data", f"fashion-mnist:{fashion}")
    arguments[arguments.index("cpu")] = "auto"
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "No GPU was found, training on the CPU (no CUDA device is visible)"


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU here")
def test_cuda_without_a_gpu(fashion: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = time.perf_counter()
    assert cli.main(["train", "--device", "cuda", "--data", f"fashion-mnist:{fashion}"]) == 2
    assert time.perf_counter() - start < 20
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("flcuda: error: ")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mnist", "--data must be digits, fashion-mnist"),
        ("digits:3", "--data must be digits"),
        ("folder", "--data must be digits"),
        ("folder:/nowhere/at/all", "/nowhere/at/all: no such folder"),
        ("fashion-mnist:/nowhere/at/all", "apt install dataset-fashion-mnist"),
        ("synthetic:0", "needs a whole number of at least 1, not '0'"),
        ("synthetic:many", "needs a whole number of at least 1, not 'many'"),
    ],
)
def test_bad_data(spec: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command("--data", spec)) == 2
    error = capsys.readouterr().err
    assert error.startswith("flcuda: error: ")
    assert message in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lr", "-1"], "must be a number above 0, not '-1'"),
        (["--lr", "nan"], "must be a number above 0, not 'nan'"),
        (["--batch-size", "0"], "must be a whole number of at least 1, not '0'"),
        (["--epochs", "1.5"], "must be a whole number of at least 1, not '1.5'"),
        (["--seed", str(2**64)], "must be a whole number from 0 to 2^64 - 1"),
        (["--precision", "int8"], "invalid choice: 'int8'"),
        (["--model", "vgg"], "invalid choice: 'vgg'"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "--data", "digits", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_bad_device_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--data", "digits", "--device", "tpu"]) == 2
    assert "tpu" in capsys.readouterr().err


def test_every_kind_of_data_has_a_recipe() -> None:
    cpu = device.Device("cpu")
    small = data.synthetic(4, (3, 32, 32), 5)
    large = data.synthetic(4, (3, 100, 120), 5)
    for split in (small, large):
        for name in ("digits", "fashion-mnist", "synthetic", "folder:x"):
            recipe = train._recipe(data.ImageData(name, split.train, split.test, split.classes, split.image_shape), cpu)
            assert recipe.epochs >= 1
            assert recipe.lr > 0
