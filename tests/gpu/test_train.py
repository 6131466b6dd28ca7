"""Training on a GPU: learning in every precision, the command, and no wait for the device within a step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flcuda import cli, data, device, models, optim, training
from flcuda.amp import DynamicScaler


def patterns(count: int, seed: int) -> data.Dataset:
    """Noisy 8x8 images with a bright quadrant a class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, count)
    images = rng.normal(size=(count, 1, 8, 8)).astype(np.float32)
    for label in range(4):
        top, left = 4 * (label // 2), 4 * (label % 2)
        images[labels == label, :, top : top + 4, left : left + 4] += 1.5
    return data.TensorDataset(images, labels)


def make_trainer(precision: str, place: str = "cuda", **options: object) -> training.Trainer:
    model = models.resnet18(num_classes=4, in_channels=1, stem="small", precision=precision, device=place, seed=0)
    optimizer = optim.SGD(model, lr=0.02, momentum=0.9)
    scaler = DynamicScaler() if precision == "float16" else None
    return training.Trainer(
        model, optimizer, patterns(512, 1), patterns(131, 2), **{"batch_size": 64, "scaler": scaler, **options}
    )


@pytest.mark.parametrize("precision", ["float32", "tf32", "float16", "bfloat16", "float64"])
def test_learns(precision: str) -> None:
    trainer = make_trainer(precision)
    assert trainer.device.kind == "cuda"
    history = trainer.fit(4)
    assert history[-1].train_loss < history[0].train_loss
    assert history[-1].test_accuracy is not None
    assert history[-1].test_accuracy > 0.9


def test_same_losses_as_on_the_cpu() -> None:
    """Order and first weights are the same, so the first losses are, too."""
    seen = []
    for place in ("cuda", "cpu"):
        reports: list[training.Report] = []
        trainer = make_trainer("float64", place, report_interval=0.0, batch_size=32)
        trainer.train = patterns(64, 3)
        trainer.test = None
        trainer.fit(1, on_report=reports.append)
        seen.append([report.loss for report in reports])
    np.testing.assert_allclose(seen[0], seen[1], rtol=1e-8)


def test_images_of_many_sizes_train_as_on_the_cpu() -> None:
    """Loaded ahead, copied in a ring and augmented on the device: the same images, but for rounding."""
    rng = np.random.default_rng(4)
    sizes = rng.integers(8, 14, (96, 2))
    images = [rng.integers(0, 256, (height, width, 1), np.uint8) for height, width in sizes]
    samples = list(zip(images, rng.integers(0, 4, 96), strict=True))
    seen = []
    for place in ("cuda", "cpu"):
        reports: list[training.Report] = []
        augment = data.Augment(8, "resize-then-crop", sides=(8, 12), mean=(0.5,), std=(0.25,))
        trainer = make_trainer("float64", place, report_interval=0.0, batch_size=32, transforms=(augment,), workers=2)
        # Rounding moves numbers across the kink of a ReLU, where the gradient jumps: larger steps show it in the loss.
        trainer.optimizer.lr = 1e-4
        trainer.train = samples
        trainer.test = None
        trainer.fit(1, on_report=reports.append)
        seen.append([report.loss for report in reports])
    assert len(seen[0]) == 3
    np.testing.assert_allclose(seen[0], seen[1], rtol=2e-4)


def test_the_device_is_read_at_display_intervals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    real = training.Meter.collect

    def collect(self: training.Meter) -> None:
        reads.append(1)
        real(self)

    monkeypatch.setattr(training.Meter, "collect", collect)
    trainer = make_trainer("float16", report_interval=3600.0)
    trainer.fit(2)
    assert len(reads) == 4  # at the end of training and test, twice


def test_a_bad_label_is_named_before_the_device_sees_it() -> None:
    trainer = make_trainer("float32")
    _, labels = trainer.train.fields  # type: ignore[attr-defined]
    labels[7] = 4
    with pytest.raises(ValueError, match="label 4 of sample 7 is no class: the model has 4"):
        trainer.fit(1)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_the_command(precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "summary.json"
    pytest.importorskip("sklearn")
    assert cli.main(["train", "--data", "digits", "--precision", precision, "--json", str(target)]) == 0
    summary = json.loads(target.read_text())
    assert summary["history"][-1]["test_accuracy"] >= 0.95
    assert summary["device"].startswith("cuda:0 (NVIDIA")
    assert {"cupy", "cudnn"} <= set(summary["versions"])
    assert "No GPU" not in capsys.readouterr().out


@pytest.mark.skipif(not data.dataset.FASHION_MNIST_FOLDER.is_dir(), reason="no Fashion-MNIST here")
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_fashion_mnist_epoch(precision: str, tmp_path: Path) -> None:
    target = tmp_path / "summary.json"
    arguments = ["train", "--data", "fashion-mnist", "--device", "cuda", "--epochs", "1", "--json", str(target)]
    assert cli.main([*arguments, "--precision", precision]) == 0
    assert json.loads(target.read_text())["history"][0]["test_accuracy"] > 0.8


def test_the_second_device_is_refused_when_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    count = device.cupy().cuda.runtime.getDeviceCount()
    assert cli.main(["train", "--data", "digits", "--device", f"cuda:{count}"]) == 2
    assert capsys.readouterr().err.startswith("flcuda: error: ")


def test_raw_cudnn_example() -> None:
    example = Path(__file__).parents[2] / "examples" / "custom_layer_raw_cudnn.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    by_cudnn, by_hand = (float(text) for text in done.stdout.split("= ")[1].split(", by hand"))
    assert abs(by_cudnn - by_hand) < 1e-4
