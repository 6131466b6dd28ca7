"""nvImageCodec on the GPU beside Pillow, and the decoded store in device memory."""

import gc
import importlib.util
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np
import pytest
from helpers import to_numpy
from PIL import Image

from flcuda import data
from flcuda.data import DecodedStore, DecodeError, Decoder, ImageBatch, ImageFiles

needs_nvimgcodec = pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.nvimgcodec") is None,
    reason="nvidia-nvimgcodec is not installed",
)


def photograph(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth shapes of any colour, as JPEG keeps them."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def turned(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x112] = value
    return exif


def on_host(batch: ImageBatch) -> list[np.ndarray]:
    return [to_numpy(image) for image in batch.images()]


def check(found: np.ndarray, expected: np.ndarray, mean: float = 1.0, largest: int = 40) -> None:
    """Close: the decoders differ in how they round the transform and interpolate the colours."""
    assert found.shape == expected.shape
    error = np.abs(found.astype(int) - expected.astype(int))
    assert error.mean() <= mean
    assert error.max() <= largest


def luma(pixels: np.ndarray) -> np.ndarray:
    weights = [0.299, 0.587, 0.114] if pixels.shape[2] == 3 else [1.0]
    return pixels @ np.array(weights)


def check_subsampled(found: np.ndarray, expected: np.ndarray) -> None:
    """Close in luma, whose pixels are all in the file; in colour as close as colours that are not interpolated.

    Of such images libjpeg's are, without interpolation, at most 11 off in the mean, 64 at most, and 0.5 in luma. The
    engine, which interpolates, does not do so at the edges: of an image three pixels wide that is all of it.
    """
    check(found, expected, 12.0, 96)
    assert np.abs(luma(found) - luma(expected)).mean() <= 1.2


@needs_nvimgcodec
class TestNvimgcodec:
    def test_starts(self) -> None:
        description = Decoder("cuda").description
        assert description.startswith("nvImageCodec ")
        assert "GPU and CPU, CPU" in description
        name = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
        if any(model in name for model in ("A100", "A30", "H100", "H200", "B200")):
            assert "JPEG engine" in description, "in a container the driver's capability `video` may be missing"

    @pytest.mark.parametrize("channels", [1, 3])
    @pytest.mark.parametrize("subsampling", [0, 1, 2])
    @pytest.mark.parametrize("progressive", [False, True])
    def test_jpeg_of_many_sizes(self, channels: int, subsampling: int, progressive: bool) -> None:
        sizes = [(375, 500), (1, 1), (8, 8), (17, 33), (64, 3), (501, 333), (1200, 800)]
        contents = [
            encoded(photograph(*size, seed), quality=92, subsampling=subsampling, progressive=progressive)
            for seed, size in enumerate(sizes)
        ]
        decoder = Decoder("cuda", channels=channels)
        for _ in range(3):
            batch = decoder.decode(contents).batch
            assert isinstance(batch.pixels, cp.ndarray)
            for content, image in zip(contents, on_host(batch), strict=True):
                (check if subsampling == 0 else check_subsampled)(image, data.decode(content, channels))

    @pytest.mark.parametrize("progressive", [False, True])
    def test_colours_are_interpolated_as_pillow_does(self, progressive: bool) -> None:
        """By the engine (baseline) and by the kernels. Without interpolation the mean is 3.1 off."""
        content = encoded(photograph(375, 500, 1), quality=92, subsampling=2, progressive=progressive)
        check(on_host(Decoder("cuda").decode([content]).batch)[0], data.decode(content))

    def test_grey(self) -> None:
        content = encoded(photograph(90, 130).convert("L"), quality=95)
        for channels in (1, 3):
            check(
                on_host(Decoder("cuda", channels=channels).decode([content]).batch)[0], data.decode(content, channels)
            )

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_exif(self, orientation: int) -> None:
        content = encoded(photograph(64, 112), quality=95, subsampling=0, exif=turned(orientation))
        check(on_host(Decoder("cuda").decode([content]).batch)[0], data.decode(content))

    def test_odd_files_are_pillows(self) -> None:
        photo = photograph(50, 70)
        contents = [
            encoded(photo.convert("CMYK"), quality=95),
            encoded(photo, quality=95, keep_rgb=True),
            encoded(photo, "PNG"),
            encoded(photo, "WEBP", lossless=True),
            encoded(photo.convert("P"), "GIF"),
        ]
        images = on_host(Decoder("cuda").decode(contents).batch)
        for content, image in zip(contents, images, strict=True):
            np.testing.assert_array_equal(image, data.decode(content))

    def test_mixed_with_broken_ones(self) -> None:
        good = encoded(photograph(300, 200), quality=90)
        contents = [good, b"", good[: len(good) // 2], encoded(photograph(20, 30), "PNG"), b"text", good + b"\0" * 9]
        decoder = Decoder("cuda", on_error="skip")
        decoded = decoder.decode(contents)
        np.testing.assert_array_equal(decoded.kept, [0, 3, 5])
        assert decoder.skipped == 3
        for place, image in zip(decoded.kept, on_host(decoded.batch), strict=True):
            check_subsampled(image, data.decode(contents[place]))
        with pytest.raises(DecodeError, match="image 2 cannot be decoded"):
            Decoder("cuda").decode([good, good, contents[2]])

    def test_damaged_in_the_middle(self) -> None:
        good = bytearray(encoded(photograph(300, 200), quality=90))
        good[len(good) // 2 : len(good) // 2 + 40] = b"\x55" * 40
        # Nobody can tell what was there; but it is an image of its size, or an error, and the next one is whole.
        whole = encoded(photograph(60, 60), quality=90)
        decoded = Decoder("cuda", on_error="skip").decode([bytes(good), whole])
        check_subsampled(on_host(decoded.batch)[-1], data.decode(whole))

    def test_from_many_threads_and_streams(self) -> None:
        contents = [[encoded(photograph(100 + k, 80 + 7 * i, i + 9 * k)) for i in range(8)] for k in range(4)]
        decoder = Decoder("cuda")
        expected = [on_host(decoder.decode(part).batch) for part in contents]

        def one(turn: int) -> None:
            part = turn % 4
            with cp.cuda.Stream(non_blocking=True) as stream:
                batch = decoder.decode(contents[part]).batch
                stream.synchronize()
                images = on_host(batch)
            for image, wanted in zip(images, expected[part], strict=True):
                np.testing.assert_array_equal(image, wanted)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(one, range(60)))

    def test_files_that_processes_read(self, tmp_path: Path) -> None:
        """From memory that they write to again and again, while the batches of other threads are decoded."""
        paths = [tmp_path / f"{number}.jpg" for number in range(40)]
        for number, path in enumerate(paths):
            # Some more than those before them at their place of a batch, some less.
            path.write_bytes(encoded(photograph(340 + 2 * number, 560 - 3 * number, number), quality=95))
        with Decoder("cuda") as decoder:
            expected = on_host(decoder.decode([path.read_bytes() for path in paths]).batch)

            def one(turn: int) -> None:
                order = np.random.default_rng(turn).permutation(40)
                with cp.cuda.Stream(non_blocking=True) as stream:
                    batch = decoder.decode([paths[place] for place in order]).batch
                    stream.synchronize()
                    images = on_host(batch)
                for image, place in zip(images, order, strict=True):
                    np.testing.assert_array_equal(image, expected[place])

            with ThreadPoolExecutor(3) as pool:
                list(pool.map(one, range(100)))
            assert 1 <= len(decoder._readers._all) <= 3
            # Else the driver copies the files first.
            assert all(reader._memory._locked for reader in decoder._readers._all)

    def test_streams_that_are_no_more(self) -> None:
        """Each epoch of a prefetcher has streams of its own, and what was decoded on them goes after they have."""
        decoder = Decoder("cuda")
        for turn in range(12):
            contents = [encoded(photograph(60 + 30 * turn, 200 - 9 * turn, k)) for k in range(5)]
            stream = cp.cuda.Stream(non_blocking=True)
            with stream:
                batch = decoder.decode(contents).batch
                stream.synchronize()
                images = on_host(batch)
            del stream, batch
            gc.collect()
            for content, image in zip(contents, images, strict=True):
                check_subsampled(image, data.decode(content))
            if turn % 5 == 4:
                decoder.close()
                gc.collect()

    def test_memory_stays_flat(self) -> None:
        contents = [encoded(photograph(375, 500, seed), quality=90) for seed in range(32)]
        decoder = Decoder("cuda")
        for _ in range(5):
            decoder.decode(contents)
        cp.cuda.Device().synchronize()
        free = cp.cuda.runtime.memGetInfo()[0]
        for _ in range(50):
            decoder.decode(contents)
        cp.cuda.Device().synchronize()
        assert free - cp.cuda.runtime.memGetInfo()[0] < 64 << 20

    def test_says_nothing(self, capfd: pytest.CaptureFixture[str]) -> None:
        Decoder("cuda", on_error="skip").decode([encoded(photograph(30, 30)), b"text"])
        captured = capfd.readouterr()
        assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize("workers", [0, 3])
def test_folder_to_batches(workers: int, tmp_path: Path) -> None:
    """What `flcuda train --data folder:PATH` is fed, for some epochs, beside the CPU's."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(12):
            image = photograph(120 + 5 * number, 160 - 3 * number, number)
            options = {"quality": 95, "subsampling": 0, "progressive": number % 3 == 0}
            if number == 7:
                image.save(tmp_path / name / f"{number}.png")
            else:
                (tmp_path / name / f"{number}.jpg").write_bytes(encoded(image, exif=turned(1 + number % 8), **options))
    loaders = []
    for device in ("cpu", "cuda"):
        tree = data.image_folder(tmp_path, device)
        batches = data.BatchDataset(tree.train, 5, policy="include-last")
        loaders.append(data.PrefetchDataset(batches, device, workers=workers, transforms=tree.transforms, seed=1))
    for epoch in range(3):
        for loader in loaders:
            loader.set_epoch(epoch)
        steps = 0
        for (expected, expected_labels), (images, labels) in zip(*loaders, strict=True):
            np.testing.assert_array_equal(to_numpy(labels), expected_labels)
            error = np.abs(to_numpy(images) - expected) * 0.225 * 255
            assert error.mean() <= 1.0
            assert error.max() <= 40
            steps += 1
        assert steps == 4


class TestStore:
    @pytest.mark.parametrize("side", [None, 64])
    def test_batches_and_views(self, side: int | None, tmp_path: Path) -> None:
        files = []
        for number in range(12):
            path = tmp_path / f"{number}.png"
            photograph(90 + number, 120 - number, number).save(path)
            files.append(path)
        source = ImageFiles(files, np.arange(12), Decoder("cuda"))
        store = DecodedStore(source, "device", side=side)
        plain = DecodedStore(ImageFiles(files, np.arange(12)), "host", side=side)
        store.fill()
        assert store.stored == 12
        indices = np.array([7, 3, 7, 0])
        first, labels = store.batch(indices, 0)
        np.testing.assert_array_equal(labels, indices)
        view = store.view(indices)
        assert view.pixels.data.ptr == store.view(indices[::-1]).pixels.data.ptr
        for batch in (first, view):
            for image, index in zip(on_host(batch), indices, strict=True):
                np.testing.assert_array_equal(image, plain[index][0])

    def test_what_does_not_fit(self, tmp_path: Path) -> None:
        files = []
        for number in range(8):
            path = tmp_path / f"{number}.jpg"
            photograph(100, 100, number).save(path)
            files.append(path)
        store = DecodedStore(ImageFiles(files, np.arange(8), Decoder("cuda")), "device", limit=100_000)
        with pytest.warns(RuntimeWarning, match="decoded each time"):
            store.fill()
        assert 0 < store.stored < 8
        for image, file in zip(on_host(store.batch(np.arange(8), 0)[0]), files, strict=True):
            check_subsampled(image, data.decode(file))


def test_without_nvimgcodec() -> None:
    content = encoded(photograph(60, 40))
    decoder = Decoder("cuda", nvimgcodec=False, threads=2)
    assert decoder.description.startswith("Pillow ")
    images = on_host(decoder.decode([content, content]).batch)
    np.testing.assert_array_equal(images[1], data.decode(content))
    decoder.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("flcuda-decode")]
