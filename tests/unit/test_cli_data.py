"""`flcuda data check` and `flcuda data bench`."""

import json
import os
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_nvimgcodec import FakeCupy, FakeDevice, FakeNvimgcodec
from PIL import Image
from rich.cells import cell_len

from flcuda import cli
from flcuda.cli import data as data_command


def make_folder(root: Path, counts: dict[str, int]) -> None:
    rng = np.random.default_rng(2)
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (12 + number, 20, 3), np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}{('.jpg', '.png')[number % 2]}")


def terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Standard output is a terminal of this width."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1, raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((width, 24)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_folder(tmp_path, {"cat": 4, "ant": 3})
    return tmp_path


class TestCheck:
    def test_everything_is_whole(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "cat" / "notes.txt").write_text("x")
        (folder / ".hidden.jpg").write_text("x")
        assert cli.main(["data", "check", str(folder)]) == 0
        captured = capsys.readouterr()
        lines = captured.out.splitlines()
        assert [line.split() for line in lines[2:4]] == [["JPEG", "RGB", "4"], ["PNG", "RGB", "3"]]
        assert "shorter side: 12 to 15, median 13" in lines
        assert any(line.startswith("2 classes, 5 training and 2 test images") for line in lines)
        assert "1 other files were left alone" in lines
        assert lines[-1] == "all 7 images are whole"
        assert captured.err == ""

    def test_what_is_broken_is_listed(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        png = (folder / "cat" / "1.png").read_bytes()
        broken = {
            "cat/empty.jpg": (b"", "is empty"),
            "cat/text.png": (b"hello", "cannot be decoded: not a JPEG, PNG, BMP, GIF, TIFF or WebP image"),
            "ant/cut.png": (png[: len(png) // 2], "cannot be decoded: "),
        }
        for name, (content, _) in broken.items():
            (folder / name).write_bytes(content)
        (folder / "ant" / "folder.jpg").mkdir()
        (folder / "ant" / "gone.png").symlink_to(folder / "nowhere.png")
        os.mkfifo(folder / "ant" / "pipe.jpg")
        (folder / "ant" / "loop").symlink_to(folder)
        assert cli.main(["data", "check", str(folder), "--workers", "3"]) == 1
        out = capsys.readouterr().out
        for name, (_, message) in broken.items():
            assert f"broken: {folder / name} {message}" in out
        assert f"broken: {folder / 'ant' / 'folder.jpg'} is a folder, not an image" in out
        assert f"broken: {folder / 'ant' / 'gone.png'} cannot be read: No such file or directory" in out
        assert f"broken: {folder / 'ant' / 'pipe.jpg'} is no file" in out
        assert out.endswith("6 of 13 files are broken\n")

    def test_json(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        exif = Image.Exif()
        exif[0x112] = 6
        Image.new("L", (30, 9)).save(folder / "cat" / "turned.jpg", exif=exif)
        Image.new("RGB", (9, 9)).save(folder / "cat" / "named.jpg", "PNG")
        assert cli.main(["data", "check", str(folder), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["images"], found["broken"], found["other_files"]) == (9, [], 0)
        assert found["kinds"][-1] == {"format": "JPEG", "mode": "L", "images": 1}
        assert [9, 30] in found["sizes"]
        assert {Path(entry["file"]).name: entry["what"] for entry in found["unusual"]} == {
            "turned.jpg": ["turned by EXIF"],
            "named.jpg": ["PNG files named .jpg"],
        }
        (folder / "cat" / "empty.jpg").write_bytes(b"")
        assert cli.main(["data", "check", str(folder), "--json"]) == 1
        broken = json.loads(capsys.readouterr().out)["broken"]
        assert broken == [{"file": str(folder / "cat" / "empty.jpg"), "fault": "is empty"}]

    def test_unusual_images_are_counted(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        Image.new("RGB", (9, 9)).save(folder / "cat" / "named.jpg", "PNG")
        assert cli.main(["data", "check", str(folder)]) == 0
        assert f"1 PNG files named .jpg, such as {folder / 'cat' / 'named.jpg'}" in capsys.readouterr().out

    def test_several_pictures_of_a_phone(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        picture = Image.new("RGB", (20, 12))
        picture.save(folder / "cat" / "phone.jpg", "MPO", save_all=True, append_images=[picture])
        assert cli.main(["data", "check", str(folder)]) == 0
        out = capsys.readouterr().out
        assert "all 8 images are whole" in out
        assert ["JPEG", "RGB", "5"] in [line.split() for line in out.splitlines()]
        assert "named" not in out

    def test_lines_fit_a_terminal(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        terminal(monkeypatch, 80)
        names = ["n" * 120 + ".jpg", "two  words " * 9 + ".png", "\u732b" * 60 + ".jpg"]
        for name in names:
            (folder / "cat" / name).write_bytes(b"")
        Image.new("RGB", (9, 9)).save(folder / "cat" / ("m" * 90 + ".jpg"), "PNG")
        assert cli.main(["data", "check", str(folder)]) == 1
        out = capsys.readouterr().out
        assert max(map(cell_len, out.splitlines())) <= 80
        joined = out.replace("\n", "").replace(" ", "")
        for name in names:
            assert f"{folder}/cat/{name}isempty".replace(" ", "") in joined

    def test_names_are_shown_without_control_characters(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        name = os.fsdecode(b"a\x1b[2J\nbroken: b\xff.jpg")
        (folder / "cat" / name).write_bytes(b"")
        (folder / "new\nline").mkdir()
        assert cli.main(["data", "check", str(folder)]) == 1
        out = capsys.readouterr().out
        assert r"cat/a\x1b[2J\nbroken: b\udcff.jpg is empty" in out
        assert r"new\nline" in out
        assert all(character.isprintable() for character in out.replace("\n", ""))

    def test_a_folder_that_is_no_data_set_is_checked_too(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        make_folder(tmp_path, {"only": 2})
        assert cli.main(["data", "check", str(tmp_path)]) == 0
        assert "not to be trained from: " in capsys.readouterr().out

    def test_pillows_remarks_are_kept_back(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        exif = Image.Exif()
        exif[0x112] = 6
        Image.new("RGB", (9, 9)).save(folder / "cat" / "odd.jpg", exif=exif.tobytes()[:-6])
        assert cli.main(["data", "check", str(folder)]) == 0
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize(
        ("name", "message"),
        [("none", "none: no such folder"), ("file", "file is not a folder"), ("empty", "empty: no image files in it")],
    )
    @pytest.mark.parametrize("action", ["check", "bench"])
    def test_no_folder(
        self, name: str, message: str, action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").write_text("")
        (tmp_path / "empty").mkdir()
        assert cli.main(["data", action, str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err

    def test_a_long_check_shows_a_bar(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setattr(data_command, "_PATIENCE_S", 0.0)
        real = data_command._examined
        started = threading.Event()

        def slow(path: Path) -> Any:
            started.wait(0.3)
            return real(path)

        monkeypatch.setattr(data_command, "_examined", slow)
        assert cli.main(["data", "check", str(folder), "--workers", "1"]) == 0
        captured = capsys.readouterr()
        assert "checking" in captured.err
        assert "checking" not in captured.out

    def test_interrupted(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(path: Path) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(data_command, "_examined", interrupted)
        assert cli.main(["data", "check", str(folder)]) == 130


class TestBench:
    def test_rates(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["data", "bench", str(folder), "--seconds", "0.01", "--device", "cpu", "--workers", "2"]
        assert cli.main(arguments) == 0
        captured = capsys.readouterr()
        lines = captured.out.splitlines()
        stages = [line.rsplit(maxsplit=2) for line in lines[2:8]]
        assert [stage.strip() for stage, _, _ in stages] == [
            "read files, 2 threads",
            "decode, Pillow, 1 thread",
            "decode, Pillow, 2 threads",
            "put a batch together",
            "augment to 224x224",
            "decode and augment to 224x224",
        ]
        assert all(float(rate.replace(",", "")) > 0 for _, rate, _ in stages)
        assert lines[8].startswith("7 of 7 files, ")
        assert lines[9].startswith("cpu: Pillow ")
        assert captured.err == ""
        assert max(map(len, lines)) <= 80

    def test_json_and_broken_files(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "cat" / "bad.jpg").write_bytes(b"x")
        arguments = ["data", "bench", str(folder), "--seconds", "0.01", "--device", "cpu", "--batch", "3", "--json"]
        assert cli.main(arguments) == 1
        found = json.loads(capsys.readouterr().out)
        assert (found["files"], found["sample"], found["broken"], found["batch"]) == (8, 7, 1, 3)
        assert len(found["stages"]) == 6
        for stage in found["stages"]:
            assert stage["images_per_second"] == pytest.approx(stage["images"] / stage["seconds"])

    def test_the_device_decodes_by_nvimgcodec_where_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        played = FakeCupy()
        device = FakeDevice(played)
        package = types.ModuleType("nvidia")
        package.nvimgcodec = FakeNvimgcodec(played)
        monkeypatch.setattr(sys.modules["flcuda.data.decode"], "resolve", lambda _: device)
        monkeypatch.setattr(sys.modules["flcuda.data.nvimgcodec"], "cupy", lambda: played)
        monkeypatch.setattr(sys.modules["flcuda.data.nvimgcodec"], "gather_images", played.gather_images)
        monkeypatch.setitem(sys.modules, "nvidia", package)
        monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", package.nvimgcodec)
        decoder = data_command._final_decoder(device, 5)
        assert decoder.description.startswith("nvImageCodec 0.9.0 (JPEG engine, ")
        assert (decoder.device, decoder.threads, decoder.on_error) == (device, 0, "skip")
        monkeypatch.setitem(sys.modules, "nvidia", None)
        decoder = data_command._final_decoder(device, 5)
        assert decoder.description.startswith("Pillow ")
        assert (decoder.device, decoder.threads, decoder.on_error) == (device, 5, "skip")

    def test_nothing_to_decode(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "x.jpg").write_bytes(b"x")
        assert cli.main(["data", "bench", str(tmp_path), "--device", "cpu"]) == 2
        assert "none of 1 image files can be decoded" in capsys.readouterr().err

    @pytest.mark.parametrize("option", [("--seconds", "0"), ("--seconds", "x"), ("--batch", "0"), ("--workers", "-1")])
    def test_bad_numbers(self, option: tuple[str, str], folder: Path) -> None:
        with pytest.raises(SystemExit) as caught:
            cli.main(["data", "bench", str(folder), *option])
        assert caught.value.code == 2

    def test_tables_fit_a_narrow_terminal(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        terminal(monkeypatch, 40)
        data_command._print_table(("stage", "images/s"), [("a very long name of a stage, 16 threads", "1,234,567")])
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 40
