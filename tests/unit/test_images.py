"""Decoding as a person expects, and folders of images."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flcuda import data
from flcuda.data import images as images_module


def smooth(height: int, width: int, channels: int = 3) -> np.ndarray:
    """A gradient that JPEG keeps well."""
    rows = np.linspace(20, 230, height)[:, None, None]
    columns = np.linspace(0, 25, width)[None, :, None]
    return np.clip(rows + columns * np.arange(1, channels + 1) / channels, 0, 255).astype(np.uint8)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png16(values: np.ndarray) -> bytes:
    """A 16-bit grey PNG, chunk by chunk."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    height, width = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", width, height, 16, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


class TestDecode:
    def test_rgb_png_is_exact(self, rng: np.random.Generator) -> None:
        pixels = rng.integers(0, 256, (5, 7, 3), np.uint8)
        np.testing.assert_array_equal(data.decode(encoded(Image.fromarray(pixels), "PNG")), pixels)

    @pytest.mark.parametrize("progressive", [False, True])
    def test_jpeg(self, progressive: bool) -> None:
        pixels = smooth(33, 21)
        content = encoded(Image.fromarray(pixels), "JPEG", quality=95, subsampling=0, progressive=progressive)
        assert np.abs(data.decode(content).astype(int) - pixels).max() <= 6

    def test_grey(self, rng: np.random.Generator) -> None:
        pixels = rng.integers(0, 256, (4, 6), np.uint8)
        content = encoded(Image.fromarray(pixels), "PNG")
        np.testing.assert_array_equal(data.decode(content), np.repeat(pixels[:, :, None], 3, axis=2))
        np.testing.assert_array_equal(data.decode(content, channels=1), pixels[:, :, None])

    def test_sixteen_bits_keep_the_high_byte(self, rng: np.random.Generator) -> None:
        values = rng.integers(0, 1 << 16, (4, 6), np.uint16)
        np.testing.assert_array_equal(data.decode(png16(values), 1)[:, :, 0], values >> 8)

    def test_one_bit(self, rng: np.random.Generator) -> None:
        bits = rng.integers(0, 2, (5, 9)).astype(bool)
        np.testing.assert_array_equal(data.decode(encoded(Image.fromarray(bits), "PNG"), 1)[:, :, 0], bits * 255)

    def test_cmyk_jpeg_looks_like_its_rgb(self) -> None:
        pixels = smooth(32, 32)
        content = encoded(Image.fromarray(pixels).convert("CMYK"), "JPEG", quality=95)
        assert np.abs(data.decode(content).astype(int) - pixels).max() <= 10

    def test_palette(self, rng: np.random.Generator) -> None:
        palette = rng.integers(0, 256, (4, 3), np.uint8)
        indices = rng.integers(0, 4, (6, 5), np.uint8)
        image = Image.fromarray(indices)
        image.putpalette(palette.tobytes())
        assert image.mode == "P"
        np.testing.assert_array_equal(data.decode(encoded(image, "PNG")), palette[indices])

    def test_transparency_lies_on_white(self) -> None:
        pixels = np.zeros((2, 2, 4), np.uint8)
        pixels[0, 0] = (10, 20, 30, 255)
        result = data.decode(encoded(Image.fromarray(pixels), "PNG"))
        np.testing.assert_array_equal(result[0, 0], (10, 20, 30))
        np.testing.assert_array_equal(result[1], np.full((2, 3), 255))

    def test_transparent_palette(self) -> None:
        image = Image.fromarray(np.array([[0, 1]], np.uint8))
        image.putpalette([9, 8, 7, 1, 2, 3])
        result = data.decode(encoded(image, "PNG", transparency=0))
        np.testing.assert_array_equal(result, [[[255, 255, 255], [1, 2, 3]]])

    @pytest.mark.parametrize(("orientation", "turns"), [(1, 0), (6, 3), (3, 2), (8, 1)])
    def test_exif_orientation(self, rng: np.random.Generator, orientation: int, turns: int) -> None:
        pixels = rng.integers(0, 256, (4, 6, 3), np.uint8)
        exif = Image.Exif()
        exif[0x0112] = orientation
        content = encoded(Image.fromarray(pixels), "PNG", exif=exif)
        np.testing.assert_array_equal(data.decode(content), np.rot90(pixels, turns))

    def test_broken_files_are_named(self, tmp_path: Path) -> None:
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
        jpeg, png = (encoded(Image.fromarray(noise), kind) for kind in ("JPEG", "PNG"))
        cases = {
            "empty.jpg": (b"", "is empty"),
            "text.jpg": (b"not an image at all", "cannot be decoded: not a JPEG or PNG image"),
            "gif.png": (encoded(Image.fromarray(noise), "GIF"), "cannot be decoded: not a JPEG or PNG image"),
            "cut.jpg": (jpeg[: len(jpeg) // 2], "cannot be decoded: "),
            "cut.png": (png[: len(png) // 2], "cannot be decoded: "),
            "head.png": (png[:20], "cannot be decoded: "),
        }
        for name, (content, message) in cases.items():
            path = tmp_path / name
            path.write_bytes(content)
            with pytest.raises(ValueError, match=f"{path} {message}"):
                data.decode(path)
        with pytest.raises(FileNotFoundError):
            data.decode(tmp_path / "none.jpg")
        with pytest.raises(ValueError, match="channels must be 1 or 3, not 4"):
            data.decode(png, channels=4)


def make_folder(root: Path, counts: dict[str, int], size: tuple[int, int] = (20, 16), mode: str = "RGB") -> None:
    generator = np.random.default_rng(1)
    for place, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True)
        for number in range(count):
            shape = (size[1] + number % 3, size[0], 3) if mode == "RGB" else (size[1] + number % 3, size[0])
            pixels = (generator.integers(0, 60, shape) + 60 * place).astype(np.uint8)
            kind = (".png", ".jpg", ".JPEG")[number % 3]
            Image.fromarray(pixels).save(root / name / f"{number:03}{kind}")


class TestImageFolder:
    def test_split_is_stated_and_deterministic(self, tmp_path: Path) -> None:
        make_folder(tmp_path, {"cat": 10, "ant": 7, "bee": 2})
        (tmp_path / ".hidden").mkdir()
        (tmp_path / "ant" / "notes.txt").write_text("not an image")
        first, second = data.image_folder(tmp_path), data.image_folder(tmp_path, seed=8)
        assert first.classes == ("ant", "bee", "cat")
        assert (len(first.train), len(first.test)) == (15, 4)
        assert "a fifth" in first.note
        assert first.image_shape == (3, 17, 17)
        files = [set(split.dataset.files) for split in (first.train, first.test, second.train, second.test)]
        assert files[:2] == files[2:]
        assert not files[0] & files[1]
        images, labels = data.fetch(first.test, np.arange(4))
        assert images.shape == (4, 3, 17, 17)
        assert list(labels) == [0, 1, 2, 2]
        # The classes differ in brightness by construction: cat, ant, bee.
        raw, _ = first.test.dataset.batch(np.arange(4), 0)
        assert list(raw.mean((1, 2, 3)) // 60) == [1, 2, 0, 0]
        for index, file in enumerate(first.train.dataset.files):
            assert file.parent.name == first.classes[first.train[index][1]]

    def test_train_and_val(self, tmp_path: Path) -> None:
        make_folder(tmp_path / "train", {"a": 3, "b": 4, "c": 1})
        make_folder(tmp_path / "val", {"c": 2, "a": 1})
        split = data.image_folder(tmp_path)
        assert (len(split.train), len(split.test)) == (8, 3)
        assert list(data.fetch(split.test, np.arange(3))[1]) == [0, 2, 2]
        (tmp_path / "val" / "d").mkdir()
        with pytest.raises(ValueError, match=r"val/d: no such class in .*train"):
            data.image_folder(tmp_path)

    def test_hidden_folders_are_no_classes(self, tmp_path: Path) -> None:
        for part in ("train", "val"):
            make_folder(tmp_path / part, {"a": 3, "b": 4})
            (tmp_path / part / ".ipynb_checkpoints").mkdir()
        assert data.image_folder(tmp_path).classes == ("a", "b")

    def test_odd_names_links_and_other_files(self, tmp_path: Path) -> None:
        make_folder(tmp_path, {"ä é [b]": 3, "b": 2})
        folder = tmp_path / "b"
        (folder / "gone.png").symlink_to(tmp_path / "nowhere.png")
        (folder / "linked.png").symlink_to(folder / "000.png")
        (folder / "folder.png").mkdir()
        (folder / "deep").mkdir()
        Image.new("RGB", (9, 9)).save(folder / "deep" / "1.png")
        (tmp_path / "linked").symlink_to(folder)
        split = data.image_folder(tmp_path)
        assert split.classes == ("b", "linked", "ä é [b]")
        assert len(split.train) + len(split.test) == 3 + 3 + 3

    def test_too_many_pixels_are_called_that(self, tmp_path: Path) -> None:
        make_folder(tmp_path, {"a": 2, "b": 2})
        huge = tmp_path / "b" / "huge.png"
        Image.new("1", (20_000, 9_000)).save(huge)
        with pytest.raises(ValueError, match=r"huge.png cannot be decoded: Image size \(180000000 pixels\) exceeds"):
            data.image_folder(tmp_path)
        with pytest.raises(ValueError, match=r"huge.png cannot be decoded: Image size"):
            data.decode(huge)

    def test_training_crops_by_seed_epoch_and_index(self, tmp_path: Path) -> None:
        make_folder(tmp_path, {"a": 6, "b": 6}, size=(40, 30))
        split = data.image_folder(tmp_path, seed=3)
        everything = np.arange(len(split.train))
        first = data.fetch(split.train, everything, 0)[0]
        np.testing.assert_array_equal(data.fetch(split.train, everything, 0)[0], first)
        np.testing.assert_array_equal(data.fetch(split.train, everything[[4, 1]], 0)[0], first[[4, 1]])
        assert (data.fetch(split.train, everything, 1)[0] != first).any()
        tests = np.arange(len(split.test))
        np.testing.assert_array_equal(data.fetch(split.test, tests, 0)[0], data.fetch(split.test, tests, 1)[0])

    def test_centre_crop(self, tmp_path: Path) -> None:
        pixels = np.zeros((10, 16, 3), np.uint8)
        pixels[:, 3:13] = np.random.default_rng(0).integers(1, 256, (10, 10, 3))
        path = tmp_path / "x.png"
        Image.fromarray(pixels).save(path)
        dataset = images_module.ImageFolder([path], np.array([4]), size=10, sides=(10, 10), train=False)
        images, labels = dataset.batch(np.array([0]), 0)
        np.testing.assert_array_equal(images[0], pixels[:, 3:13].transpose(2, 0, 1))
        assert labels == [4]
        with pytest.raises(IndexError, match="1 is out of range"):
            dataset[1]

    @pytest.mark.parametrize("shape", [(300, 400), (400, 301), (256, 999), (7, 500), (1, 1), (129, 64), (641, 479)])
    def test_the_window_is_that_of_the_resized_image(self, tmp_path: Path, shape: tuple[int, int]) -> None:
        pixels = np.random.default_rng(1).integers(0, 256, (*shape, 3), np.uint8)
        image = Image.fromarray(pixels)
        image.save(tmp_path / "x.png")
        dataset = images_module.ImageFolder([tmp_path / "x.png"], np.array([0]), size=40, sides=(50, 50), train=False)
        height, width = (max(50, round(length * 50 / min(shape))) for length in shape)
        whole = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
        top, left = (height - 40) // 2, (width - 40) // 2
        expected = whole[top : top + 40, left : left + 40].transpose(2, 0, 1).astype(int)
        assert abs(dataset[0][0] - expected).max() <= 1
        random = images_module.ImageFolder([tmp_path / "x.png"] * 50, np.zeros(50), size=40, sides=(40, 60), train=True)
        assert random.batch(np.arange(50), 1)[0].shape == (50, 3, 40, 40)

    def test_a_long_thin_image_needs_little_memory(self, tmp_path: Path) -> None:
        Image.new("RGB", (30_000, 1)).save(tmp_path / "thin.png")
        dataset = images_module.ImageFolder(
            [tmp_path / "thin.png"], np.array([0]), size=224, sides=(480, 480), train=False
        )
        # Resized whole it would have 6.9 Gpixel: 20 GB.
        assert dataset[0][0].shape == (3, 224, 224)

    def test_photographs_are_served_at_224(self, tmp_path: Path) -> None:
        make_folder(tmp_path, {"a": 2, "b": 2}, size=(150, 120))
        split = data.image_folder(tmp_path)
        assert split.image_shape == (3, 224, 224)
        assert split.train[0][0].shape == split.test[0][0].shape == (3, 224, 224)

    def test_grey_stays_grey(self, tmp_path: Path) -> None:
        make_folder(tmp_path, {"a": 3, "b": 3}, mode="L")
        assert data.image_folder(tmp_path).image_shape == (1, 17, 17)
        Image.new("RGB", (16, 16)).save(tmp_path / "a" / "colour.png")
        split = data.image_folder(tmp_path)
        assert split.image_shape[0] == 3
        assert data.fetch(split.train, np.arange(len(split.train)))[0].shape[1] == 3

    def test_bad_folders(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no such folder"):
            data.image_folder(tmp_path / "none")
        (tmp_path / "file").write_text("")
        with pytest.raises(NotADirectoryError, match="is not a folder"):
            data.image_folder(tmp_path / "file")
        with pytest.raises(ValueError, match="0 sub-folders"):
            data.image_folder(tmp_path)
        make_folder(tmp_path, {"a": 2, "b": 0})
        with pytest.raises(ValueError, match="b: no JPEG or PNG files"):
            data.image_folder(tmp_path)
        Image.new("RGB", (9, 9)).save(tmp_path / "b" / "1.png")
        with pytest.raises(ValueError, match="b: one image cannot be divided"):
            data.image_folder(tmp_path)

    def test_a_broken_file_is_named(self, tmp_path: Path) -> None:
        make_folder(tmp_path, {"a": 3, "b": 3})
        (tmp_path / "b" / "broken.png").write_bytes(b"")
        with pytest.raises(ValueError, match=r"b/broken.png is empty"):
            data.image_folder(tmp_path)
        (tmp_path / "b" / "broken.png").write_bytes(b"nonsense")
        with pytest.raises(ValueError, match=r"b/broken.png cannot be decoded"):
            data.image_folder(tmp_path)
