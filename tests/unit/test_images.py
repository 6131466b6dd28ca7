"""Batches of images of different sizes, and folders of images."""

import sys
import types
from pathlib import Path

import numpy as np
import pytest
from fake_nvimgcodec import FakeCupy, FakeDevice, FakeNvimgcodec
from PIL import Image

from flcuda import data
from flcuda.data import DecodeError, Decoder, ImageBatch
from flcuda.data import folder as folder_module
from flcuda.data import nvimgcodec as nvimgcodec_module
from flcuda.device import CPU

decode_module = sys.modules["flcuda.data.decode"]


class TestImageBatch:
    def test_holds_images_of_any_size(self, rng: np.random.Generator) -> None:
        shapes = [(1, 1, 3), (5, 7, 3), (16, 1, 3), (33, 2, 3), (4, 4, 3)]
        images = [rng.integers(0, 256, shape, np.uint8) for shape in shapes]
        # Rows of a larger image: not contiguous.
        images[1] = np.repeat(images[1], 2, axis=1)[:, ::2]
        batch = ImageBatch.of(images)
        assert len(batch) == 5
        assert (batch.pixels.dtype, batch.offsets.dtype, batch.sizes.dtype) == (np.uint8, np.int64, np.int32)
        assert not (batch.offsets % 16).any()
        assert len(batch.pixels) % 16 == 0
        for index, image in enumerate(images):
            np.testing.assert_array_equal(batch.image(index), image)
            np.testing.assert_array_equal(batch.image(index - 5), image)
            np.testing.assert_array_equal(batch.images()[index], image)
            assert np.shares_memory(batch.image(index), batch.pixels)
        # What is between images is zero.
        assert int(batch.pixels.sum(dtype=np.int64)) == sum(int(image.sum(dtype=np.int64)) for image in images)
        assert batch.nbytes == len(batch.pixels) + 5 * 8 + 5 * 8
        with pytest.raises(IndexError, match="image 5 is out of range for 5 images"):
            batch.image(5)

    @pytest.mark.parametrize(
        ("images", "error", "message"),
        [
            ([], ValueError, "images must be at least one"),
            ([np.zeros((2, 2), np.uint8)], ValueError, r"images\[0\] must be \(height, width, channels\)"),
            ([np.zeros((2, 0, 3), np.uint8)], ValueError, r"images\[0\] must be .* not empty"),
            ([np.zeros((2, 2, 3), np.int8)], TypeError, r"images\[0\] must be uint8, not int8"),
            ([np.zeros((2, 2, 3), np.uint8), np.zeros((2, 2, 1), np.uint8)], ValueError, r"images\[1\] has 1 channels"),
            ([[1]], TypeError, "expected NumPy or CuPy arrays, got list"),
        ],
    )
    def test_bad_images(self, images: list, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            ImageBatch.of(images)

    def test_bad_places(self) -> None:
        pixels, offsets, sizes = np.zeros(64, np.uint8), np.array([0, 16]), np.array([[2, 2], [4, 4]], np.int32)
        ImageBatch(pixels, offsets, sizes, 3)
        for wrong in ([0, 32], [8, 16], [-16, 16]):
            with pytest.raises(ValueError, match="must have pixels, begin at a multiple of 16 and end within"):
                ImageBatch(pixels, np.array(wrong), sizes, 3)
        with pytest.raises(ValueError, match="image 1 of 0x4x3 at byte 16"):
            ImageBatch(pixels, offsets, np.array([[2, 2], [0, 4]], np.int32), 3)
        with pytest.raises(TypeError, match="sizes must be int32, not int64"):
            ImageBatch(pixels, offsets, sizes.astype(np.int64), 3)
        with pytest.raises(ValueError, match=r"sizes must be \(2, 2\)"):
            ImageBatch(pixels, offsets, sizes[:1], 3)
        with pytest.raises(ValueError, match="channels must be at least 1"):
            ImageBatch(pixels, offsets, sizes, 0)


def make_folder(root: Path, counts: dict[str, int], size: tuple[int, int] = (20, 16), mode: str = "RGB") -> None:
    generator = np.random.default_rng(1)
    for place, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True)
        for number in range(count):
            shape = (size[1] + number % 3, size[0], 3) if mode == "RGB" else (size[1] + number % 3, size[0])
            pixels = (generator.integers(0, 60, shape) + 60 * place).astype(np.uint8)
            kind = (".png", ".jpg", ".JPEG")[number % 3]
            Image.fromarray(pixels).save(root / name / f"{number:03}{kind}")


def served(
    split: data.ImageData, *, train: bool = True, epoch: int = 0, seed: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    """All images of one part as the training sees them, and their labels."""
    files, transforms = (split.train, split.transforms) if train else (split.test, split.test_transforms)
    loader = data.PrefetchDataset(data.BatchDataset(files, len(files)), "cpu", transforms=transforms, seed=seed)
    loader.set_epoch(epoch)
    for images, labels in loader:
        return np.array(images), np.array(labels)
    raise AssertionError("an epoch has a batch")


def cropped(image: Image.Image, side: int, across: float, down: float, is_random: bool) -> np.ndarray:
    """A window of 224x224 of the image resized to a shorter side, by Pillow."""
    scale = side / min(image.size)
    width, height = (max(side, round(length * scale)) for length in image.size)
    if is_random:
        left, top = int(across * (width - 224 + 1)), int(down * (height - 224 + 1))
    else:
        left, top = (width - 224) // 2, (height - 224) // 2
    x, y = image.width / width, image.height / height
    box = (left * x, top * y, (left + 224) * x, (top + 224) * y)
    return np.asarray(image.resize((224, 224), Image.Resampling.BILINEAR, box=box))


class TestImageFolder:
    def test_split_is_stated_and_deterministic(self, tmp_path: Path) -> None:
        make_folder(tmp_path, {"cat": 10, "ant": 7, "bee": 2})
        (tmp_path / ".hidden").mkdir()
        (tmp_path / "ant" / "notes.txt").write_text("not an image")
        first, second = data.image_folder(tmp_path), data.image_folder(tmp_path)
        assert first.classes == ("ant", "bee", "cat")
        assert (len(first.train), len(first.test)) == (15, 4)
        assert "a fifth" in first.note
        assert first.image_shape == (3, 17, 17)
        files = [set(split.files) for split in (first.train, first.test, second.train, second.test)]
        assert files[:2] == files[2:]
        assert not files[0] & files[1]
        raw, labels = first.test.batch(np.arange(4), 0)
        assert served(first, train=False)[0].shape == (4, 3, 17, 17)
        assert list(labels) == [0, 1, 2, 2]
        # The classes differ in brightness by construction: cat, ant, bee.
        assert [int(image.mean() // 60) for image in raw.images()] == [1, 2, 0, 0]
        for index, file in enumerate(first.train.files):
            assert file.parent.name == first.classes[first.train[index][1]]

    def test_train_and_val(self, tmp_path: Path) -> None:
        make_folder(tmp_path / "train", {"a": 3, "b": 4, "c": 1})
        make_folder(tmp_path / "val", {"c": 2, "a": 1})
        split = data.image_folder(tmp_path)
        assert (len(split.train), len(split.test)) == (8, 3)
        assert split.test.labels.tolist() == [0, 2, 2]
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
        split = data.image_folder(tmp_path)
        first = served(split)[0]
        assert split.transforms[0].shorter_sides == (31, 35)
        np.testing.assert_array_equal(served(split)[0], first)
        assert (served(split, epoch=1)[0] != first).any()
        assert (served(split, seed=4)[0] != first).any()
        np.testing.assert_array_equal(served(split, train=False)[0], served(split, train=False, epoch=1)[0])

    @pytest.mark.parametrize("train", [True, False])
    def test_images_are_those_that_pillow_crops_one_by_one(self, tmp_path: Path, train: bool) -> None:
        rng = np.random.default_rng(0)
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            for number in range(6):
                pixels = rng.integers(0, 256, (5, 7, 3), np.uint8)
                image = Image.fromarray(pixels).resize((130 + 9 * number, 110), Image.Resampling.BICUBIC)
                image.save(tmp_path / name / f"{number}.png")
        split = data.image_folder(tmp_path)
        assert split.image_shape == (3, 224, 224)
        assert split.note.endswith(f"decoded by {split.train.decoder.description}")
        assert split.train.decoder.description.startswith("Pillow ")
        images, labels = served(split, train=train, epoch=2)
        files = split.train if train else split.test
        np.testing.assert_array_equal(labels, files.labels)
        draws = data.Draws(3, 2, np.arange(len(files))).uniform()
        for place, file in enumerate(files.files):
            side, across, down, mirror = draws[place] if train else (0.0, 0.5, 0.5, 1.0)
            expected = cropped(Image.open(file), 256 + int(side * 225) if train else 256, across, down, train)
            expected = expected[:, ::-1] if mirror < 0.5 else expected
            expected = (expected / 255 - folder_module.PHOTOGRAPH_MEAN) / folder_module.PHOTOGRAPH_STD
            # Pillow rounds to eight bits, the kernel does not.
            np.testing.assert_allclose(images[place].transpose(1, 2, 0), expected, rtol=0, atol=1.1 / 255 / 0.224)

    def test_a_long_thin_image_needs_little_memory(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            for number in range(2):
                Image.new("RGB", (30_000, 1) if number else (300, 300)).save(tmp_path / name / f"{number}.png")
        # Resized whole it would have 1.7 Gpixel or more: 5 GB.
        assert served(data.image_folder(tmp_path))[0].shape == (2, 3, 224, 224)

    def test_photographs_are_served_at_224(self, tmp_path: Path) -> None:
        make_folder(tmp_path, {"a": 2, "b": 2}, size=(150, 120))
        split = data.image_folder(tmp_path)
        assert split.image_shape == (3, 224, 224)
        assert split.transforms[0].shorter_sides == (256, 480)
        assert served(split)[0].shape == served(split, train=False)[0].shape == (2, 3, 224, 224)

    def test_grey_stays_grey(self, tmp_path: Path) -> None:
        make_folder(tmp_path, {"a": 3, "b": 3}, mode="L")
        assert data.image_folder(tmp_path).image_shape == (1, 17, 17)
        Image.new("RGB", (16, 16)).save(tmp_path / "a" / "colour.png")
        split = data.image_folder(tmp_path)
        assert split.image_shape[0] == 3
        assert served(split)[0].shape[1] == 3

    def test_nvimgcodec_decodes_where_it_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_folder(tmp_path, {"a": 3, "b": 3})
        played = FakeCupy()
        module = FakeNvimgcodec(played)
        package = types.ModuleType("nvidia")
        package.nvimgcodec = module
        monkeypatch.setattr(decode_module, "resolve", lambda name: CPU if name in ("cpu", CPU) else FakeDevice(played))
        monkeypatch.setattr(nvimgcodec_module, "cupy", lambda: played)
        monkeypatch.setattr(nvimgcodec_module, "gather_images", played.gather_images)
        monkeypatch.setitem(sys.modules, "nvidia", package)
        monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", module)
        split = data.image_folder(tmp_path, "cuda")
        assert "decoded by nvImageCodec 0.9.0 (JPEG engine, GPU and CPU, CPU), Pillow" in split.note
        assert split.train.decoder is split.test.decoder
        assert split.train.decoder.device.kind == "cuda"
        indices = np.arange(len(split.train))
        for found, expected in zip(
            split.train.batch(indices, 0)[0].images(),
            data.image_folder(tmp_path).train.batch(indices, 0)[0].images(),
            strict=True,
        ):
            np.testing.assert_array_equal(found, expected)
        monkeypatch.setitem(sys.modules, "nvidia", None)
        split = data.image_folder(tmp_path, "cuda")
        assert "decoded by Pillow" in split.note
        assert split.train.decoder.device == CPU

    def test_bad_folders(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no such folder"):
            data.image_folder(tmp_path / "none")
        (tmp_path / "file").write_text("")
        with pytest.raises(NotADirectoryError, match="is not a folder"):
            data.image_folder(tmp_path / "file")
        with pytest.raises(ValueError, match="0 sub-folders"):
            data.image_folder(tmp_path)
        make_folder(tmp_path, {"a": 2, "b": 0})
        with pytest.raises(ValueError, match="b: no image files"):
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


class TestImageFiles:
    def test_serves_whole_images(self, tmp_path: Path) -> None:
        make_folder(tmp_path, {"a": 6, "b": 5})
        tree = data.image_files(tmp_path)
        assert (len(tree.train), len(tree.test), tree.classes, tree.side) == (9, 2, ("a", "b"), 17)
        indices = np.array([7, 0, 3])
        images, labels = tree.train.batch(indices, 0)
        np.testing.assert_array_equal(labels, tree.train.labels[indices])
        assert len({tuple(size) for size in images.sizes.tolist()}) > 1
        for place, index in enumerate(indices.tolist()):
            expected = data.decode(tree.train.files[index])
            np.testing.assert_array_equal(images.image(place), expected)
            image, label = tree.train[index]
            np.testing.assert_array_equal(image, expected)
            assert label == labels[place]
        with pytest.raises(IndexError, match="9 is out of range for 9 samples"):
            tree.train[9]
        with pytest.raises(ValueError, match="one length, not 2 and 1"):
            data.ImageFiles([tmp_path, tmp_path], np.array([0]))
        with pytest.raises(ValueError, match=r"labels must be \(N,\), not \(1, 2\)"):
            data.ImageFiles([tmp_path], np.array([[0, 1]]))
        with pytest.raises(TypeError, match="labels must be integers, not float64"):
            data.ImageFiles([tmp_path], np.array([0.5]))
        assert data.ImageFiles([tmp_path], [3]).labels.dtype == np.int64

    def test_grey_files_have_one_channel(self, tmp_path: Path) -> None:
        make_folder(tmp_path, {"a": 3, "b": 3}, mode="L")
        assert data.image_files(tmp_path).train.batch(np.arange(4), 0)[0].channels == 1

    def test_broken_files_are_errors_or_left_out(self, tmp_path: Path) -> None:
        make_folder(tmp_path, {"a": 8})
        files = sorted((tmp_path / "a").iterdir())
        files[2].write_bytes(b"")
        files[5].write_bytes(files[5].read_bytes()[:100])
        files[6].unlink()
        labels = np.arange(8)
        with pytest.raises(DecodeError, match="is empty"):
            data.ImageFiles(files, labels).batch(np.arange(8), 0)
        decoder = Decoder(on_error="skip")
        images, kept = data.ImageFiles(files, labels, decoder).batch(np.arange(8), 0)
        assert len(images) == 5
        np.testing.assert_array_equal(kept, [0, 1, 3, 4, 7])
        assert decoder.skipped == 3
        assert [error.name for error in decoder.last_errors] == [str(files[place]) for place in (2, 5, 6)]
        dataset = data.ImageFiles(files, labels, decoder)
        with pytest.raises(DecodeError, match=f"{files[2].name} is empty"):
            dataset.batch(np.array([2, 5]), 0)

    def test_says_what_is_left_of_a_batch(self, tmp_path: Path) -> None:
        make_folder(tmp_path, {"a": 8})
        files = sorted((tmp_path / "a").iterdir())
        files[2].write_bytes(b"")
        files[5].write_bytes(b"text")
        dataset = data.ImageFiles(files, np.arange(8), Decoder(on_error="skip"))
        (images, labels), kept = dataset.batch_kept(np.array([5, 7, 2, 1, -8]), 0)
        np.testing.assert_array_equal(kept, [1, 3, 4])
        np.testing.assert_array_equal(labels, [7, 1, 0])
        np.testing.assert_array_equal(images.image(2), data.decode(files[0]))
        fields, kept = dataset.batch_kept(np.array([5, 2]), 0)
        assert (fields, len(kept)) == ((), 0)
        with pytest.raises(ValueError, match="indices must be at least one"):
            dataset.batch(np.array([], np.int64), 0)
        with pytest.raises(IndexError, match="index 8 is out of range for 8 samples"):
            dataset.batch(np.array([8]), 0)

    def test_a_broken_header_does_not_stop_who_skips(self, tmp_path: Path) -> None:
        make_folder(tmp_path, {"a": 5, "b": 5})
        (tmp_path / "a" / "0.png").write_bytes(b"")
        (tmp_path / "b" / "broken.png").write_bytes(b"text")
        with pytest.raises(DecodeError, match=r"a/0\.png is empty|broken\.png cannot be decoded"):
            data.image_files(tmp_path, Decoder())
        tree = data.image_files(tmp_path, Decoder(on_error="skip"))
        assert len(tree.train) + len(tree.test) == len(list(tmp_path.glob("*/*")))
        assert tree.side == 17
        for file in tmp_path.glob("*/*"):
            file.write_bytes(b"")
        with pytest.raises(DecodeError, match="is empty"):
            data.image_files(tmp_path, Decoder(on_error="skip"))


class TestLabelsFile:
    def test_lines_number_the_classes(self, tmp_path: Path) -> None:
        make_folder(tmp_path / "train", {"n02": 3, "n01": 4, "n07": 2})
        make_folder(tmp_path / "val", {"n07": 2, "n01": 1})
        lines = "n07,sea snail\nn03,ray\n\nn01,tench, Tinca tinca\nn02,cock\n"
        (tmp_path / "labels.txt").write_text(lines)
        tree = data.image_files(tmp_path)
        assert tree.classes == ("sea snail", "ray", "tench, Tinca tinca", "cock")
        for part in (tree.train, tree.test):
            expected = [{"n07": 0, "n03": 1, "n01": 2, "n02": 3}[file.parent.name] for file in part.files]
            np.testing.assert_array_equal(part.labels, expected)

    def test_divides_a_flat_folder_by_class(self, tmp_path: Path) -> None:
        make_folder(tmp_path, {"x": 5, "y": 5})
        (tmp_path / "labels.txt").write_text("y,why\nx,ex\n")
        tree = data.image_files(tmp_path)
        np.testing.assert_array_equal(sorted(tree.test.labels), [0, 1])
        assert data.image_folder(tmp_path).classes == ("why", "ex")

    def test_a_mark_of_the_encoding_is_no_part_of_a_name(self, tmp_path: Path) -> None:
        make_folder(tmp_path, {"x": 5, "y": 5})
        (tmp_path / "labels.txt").write_text("y,why\nx,ex\n", encoding="utf-8-sig")
        assert data.image_files(tmp_path).classes == ("why", "ex")

    @pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
    def test_other_encodings_are_refused(self, encoding: str, tmp_path: Path) -> None:
        make_folder(tmp_path, {"x": 5, "y": 5})
        (tmp_path / "labels.txt").write_text("y,wäh\nx,ex\n", encoding=encoding)
        with pytest.raises(ValueError, match=r"labels\.txt must be UTF-8: "):
            data.image_files(tmp_path)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "labels.txt is empty"),
            ("x,one\ny two\n", "labels.txt, line 2: 'y two' must be FOLDER,NAME"),
            ("x,one\nx,two\n", "labels.txt, line 2: x is listed twice"),
            ("x,one\nz,two\n", "y: labels.txt does not list it"),
        ],
    )
    def test_bad_lines(self, tmp_path: Path, text: str, message: str) -> None:
        make_folder(tmp_path, {"x": 2, "y": 2})
        (tmp_path / "labels.txt").write_text(text)
        with pytest.raises(ValueError, match=message):
            data.image_files(tmp_path)
