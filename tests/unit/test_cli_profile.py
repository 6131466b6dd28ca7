"""`flcuda profile` on the CPU device, on small images."""

import json
from pathlib import Path

import pytest

from flcuda import cli, device

NO_GPU = not device.cuda_available()


def command(*arguments: str) -> list[str]:
    return [
        *("profile", "--device", "cpu", "--model", "resnet18", "--image-size", "8", "--classes", "5"),
        *("--batch-size", "2", "--steps", "1", *arguments),
    ]


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command("--every-part")) == 0
    output = capsys.readouterr()
    assert "no GPU is used: the step runs on the CPU" in output.err
    lines = output.out.split("\n")
    assert lines[0].startswith("resnet18, 2 images of 3x8x8, float32; ")
    assert max(map(len, lines[1:])) <= 80
    for heading in ("every part, ms", "by kind, ms", "by layer, ms", "the 10 dearest parts, ms"):
        assert heading in output.out
    for kind in ("convolution backward filter", "batch norm", "loss", "optimizer", "check"):
        assert kind in output.out
    assert "images/s" in output.out
    assert "a copy moves" in output.out


def test_json_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command("--json", "--precision", "float16", "--regret")) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["batch_size"], found["precision"]) == ("resnet18", 2, "float16")
    assert found["captured_ms"] is None
    assert len({part["layer"] for part in found["parts"] if part["kind"].startswith("convolution")}) == 20
    assert {part["precision"] for part in found["parts"] if part["operations"]} == {"float16"}
    assert found["library"].startswith("numpy")
    assert len(found["regret"]["convolutions"]) == 10
    assert found["regret"]["regret_ms"] >= 0
    # A stem for small images: no pooling of windows.
    assert not any(part["name"] == "MaxPool2D" for part in found["parts"])


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "step.png"
    assert cli.main(command("--plot", str(path))) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert cli.main(command("--plot", str(tmp_path / "none" / "step.png"))) == 2
    assert "its folder does not exist" in capsys.readouterr().err
    assert cli.main(command("--plot", str(tmp_path / "step"))) == 2
    assert "its ending must say" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "vgg16"], "invalid choice: 'vgg16'"),
        (["--batch-size", "0"], "must be a whole number of at least 1, not '0'"),
        (["--steps", "-1"], "must be a whole number of at least 1, not '-1'"),
        (["--precision", "half"], "invalid choice: 'half'"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["profile", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU here")
def test_without_a_gpu_cuda_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", "--device", "cuda"]) == 2
    assert "flcuda: error:" in capsys.readouterr().err
