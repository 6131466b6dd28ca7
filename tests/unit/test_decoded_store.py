"""Images decoded once: in memory, on disk, and on a device that is played."""

import os
import pickle
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_nvimgcodec import FakeCupy, FakeDevice
from PIL import Image

from flcuda import data
from flcuda.data import DecodedStore, DecodeError, Decoder, ImageBatch, ImageFiles
from flcuda.data import store as store_module
from flcuda.device import CPU

decode_module = sys.modules["flcuda.data.decode"]


def make_files(folder: Path, count: int = 9, side: int = 20) -> list[Path]:
    """Images of different sizes in which every pixel is other."""
    rng = np.random.default_rng(5)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number in range(count):
        pixels = rng.integers(0, 256, (side + number % 4, side + 3 * (number % 3), 3), np.uint8)
        path = folder / f"{number}.png"
        Image.fromarray(pixels).save(path)
        files.append(path)
    return files


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return make_files(tmp_path / "images")


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were decoded, as they were."""
    names: list[str] = []
    real = decode_module.pillow_image

    def counted(source: Any, channels: int, name: str | None = None) -> Any:
        names.append(Path(name or "").name)
        return real(source, channels, name)

    monkeypatch.setattr(decode_module, "pillow_image", counted)
    return names


def make_store(files: list[Path], cache: str, tmp_path: Path, **options: Any) -> DecodedStore:
    if cache == "disk":
        options.setdefault("folder", tmp_path / "store")
    decoder = options.pop("decoder", None)
    return DecodedStore(ImageFiles(files, np.arange(len(files)) % 3, decoder), cache, **options)


def check(batch: ImageBatch, expected: list[np.ndarray]) -> None:
    assert len(batch) == len(expected)
    for place, image in enumerate(expected):
        np.testing.assert_array_equal(batch.image(place), image)


@pytest.mark.parametrize("cache", ["host", "disk", "device"])
class TestEveryCache:
    def test_decodes_once(self, cache: str, files: list[Path], decoded: list[str], tmp_path: Path) -> None:
        expected = [data.decode(file) for file in files]
        decoded.clear()
        store = make_store(files, cache, tmp_path)
        for indices in ([4, 1, 4, 8], [1, 2], [0, 1, 2, 3, 4, 5, 6, 7, 8], [8, 0]):
            images, labels = store.batch(np.array(indices), 0)
            check(images, [expected[i] for i in indices])
            np.testing.assert_array_equal(labels, np.array(indices) % 3)
        assert sorted(decoded) == [f"{i}.png" for i in range(9)]
        assert store.stored == 9
        image, label = store[-1]
        np.testing.assert_array_equal(image, expected[8])
        assert label == 2
        with pytest.raises(IndexError, match="9 is out of range for 9 samples"):
            store[9]

    def test_fill(self, cache: str, files: list[Path], decoded: list[str], tmp_path: Path) -> None:
        for threads in (1, 3):
            store = make_store(files, cache, tmp_path / str(threads), threads=threads)
            seen: list[tuple[int, int]] = []
            store.fill(lambda done, total, seen=seen: seen.append((done, total)))
            assert seen[-1] == (9, 9)
            assert store.stored == 9
            expected = [data.decode(file) for file in files]
            decoded.clear()
            check(store.batch(np.arange(9), 3)[0], expected)
            assert decoded == []
            assert "all 9 images fit" in str(store)
            assert "9 are there" in str(store)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("flcuda")]

    def test_reduced_to_a_shorter_side(self, cache: str, files: list[Path], tmp_path: Path) -> None:
        store = make_store(files, cache, tmp_path, side=10)
        images, _ = store.batch(np.arange(9), 0)
        for place, file in enumerate(files):
            with Image.open(file) as image:
                height, width = (
                    max(10, round(length * 10 / min(image.size))) for length in (image.height, image.width)
                )
                reduced = image.resize((width, height), Image.Resampling.BILINEAR)
            np.testing.assert_array_equal(images.image(place), np.asarray(reduced))
        assert "at shorter side 10" in str(store)
        large = make_store(files, cache, tmp_path, side=1000)
        np.testing.assert_array_equal(large.batch(np.array([3]), 0)[0].image(0), data.decode(files[3]))

    def test_what_does_not_fit_is_decoded_every_time(
        self, cache: str, files: list[Path], decoded: list[str], tmp_path: Path
    ) -> None:
        expected = [data.decode(file) for file in files]
        # About four images.
        store = make_store(files, cache, tmp_path, limit=4 * expected[4].nbytes)
        assert 2 < store.plan.fits < 9
        assert re.search(r": [345] of 9 fit in 0\.0 MiB; 0 are there", str(store))
        store.fill()
        assert 0 < store.stored < 9
        assert store.nbytes <= store.limit
        decoded.clear()
        for _ in range(2):
            check(store.batch(np.arange(9), 0)[0], expected)
        assert len(decoded) == 2 * (9 - store.stored)

    def test_broken_images(self, cache: str, files: list[Path], decoded: list[str], tmp_path: Path) -> None:
        files[3].write_bytes(b"")
        files[7].write_bytes(files[7].read_bytes()[:60])
        store = make_store(files, cache, tmp_path)
        for _ in range(2):
            with pytest.raises(DecodeError, match=r"3.png is empty"):
                store.batch(np.arange(5), 0)
        decoder = Decoder(on_error="skip")
        for side in (None, 12):
            decoder.skipped = 0
            store = make_store(files, cache, tmp_path / str(side), decoder=decoder, side=side)
            store.fill()
            decoded.clear()
            for _ in range(3):
                images, labels = store.batch(np.arange(9), 0)
                assert len(images) == 7
                np.testing.assert_array_equal(labels, np.array([0, 1, 2, 4, 5, 6, 8]) % 3)
            # Known to be broken: not decoded again, not counted again.
            assert decoded == []
            assert decoder.skipped == 2
            with pytest.raises(DecodeError, match=r"7.png cannot be decoded"):
                store.batch(np.array([7]), 0)

    def test_from_many_threads(self, cache: str, files: list[Path], tmp_path: Path) -> None:
        expected = [data.decode(file) for file in files]
        limit = 6 * expected[4].nbytes
        store = make_store(files, cache, tmp_path, limit=limit)

        def one(seed: int) -> None:
            indices = np.random.default_rng(seed).integers(0, 9, 5)
            check(store.batch(indices, 0)[0], [expected[i] for i in indices])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(60)))
        assert store.nbytes <= limit

    def test_pickles_without_its_images(self, cache: str, files: list[Path], tmp_path: Path) -> None:
        store = make_store(files, cache, tmp_path, side=15)
        store.fill()
        stored = pickle.dumps(store)
        assert len(stored) < 5000
        copy = pickle.loads(stored)
        assert (copy.cache, copy.side, copy.stored) == (cache, 15, 0)
        check(copy.batch(np.array([2]), 0)[0], [store[2][0]])


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"cache": "ram"}, "cache must be one of device, host, disk, not 'ram'"),
            ({"side": 0}, "side must be at least 1, not 0"),
            ({"limit": 0}, "limit must be at least 1, not 0"),
            ({"threads": -1}, "threads must be at least 0, not -1"),
            ({"folder": "x"}, "folder is for cache='disk', not 'host'"),
        ],
    )
    def test_bad_ones(self, files: list[Path], options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            DecodedStore(ImageFiles(files, np.zeros(9)), **options)


class TestPlan:
    def test_says_what_fits(self, tmp_path: Path) -> None:
        files = make_files(tmp_path, 8, 100)
        images = [data.decode(file) for file in files]
        limit = sum(image.nbytes for image in images[:3])
        plan = make_store(files, "host", tmp_path, limit=limit + 48).plan
        assert (plan.images, plan.fits, plan.exact, plan.side) == (8, 3, True, None)
        assert plan.height == pytest.approx(np.mean([image.shape[0] for image in images]))
        assert plan.image_bytes == pytest.approx(np.mean([image.nbytes for image in images]), abs=16)
        assert make_store(files, "host", tmp_path, limit=1 << 30).plan.fits == 8
        half = make_store(files, "host", tmp_path, side=50, limit=limit).plan
        assert half.fits == 8
        assert half.height < plan.height

    def test_a_part_of_many_files_is_looked_at(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store_module, "_SURVEYED_HEADERS", 4)
        files = make_files(tmp_path, 8)
        store = make_store(files, "host", tmp_path, limit=9000)
        assert not store.plan.exact
        assert "about" in str(store)
        store.fill()
        assert store.nbytes <= 9000

    def test_a_turned_image_is_measured_as_it_lies(self, tmp_path: Path) -> None:
        exif = Image.Exif()
        exif[0x112] = 6
        path = tmp_path / "x.png"
        Image.new("RGB", (40, 10)).save(path, exif=exif)
        plan = make_store([path], "host", tmp_path).plan
        assert (plan.height, plan.width) == (40, 10)

    def test_free_memory_is_a_number(self) -> None:
        assert 1 <= store_module.free_host_memory() < 1 << 50


class TestDisk:
    def test_survives_the_process(self, files: list[Path], decoded: list[str], tmp_path: Path) -> None:
        make_store(files, "disk", tmp_path).fill()
        decoded.clear()
        again = make_store(files, "disk", tmp_path)
        again.fill()
        assert decoded == []
        assert again.stored == 9
        # Another side and another number of channels are other images.
        make_store(files, "disk", tmp_path, side=5).fill()
        make_store(files, "disk", tmp_path, decoder=Decoder(channels=1)).fill()
        assert len(decoded) == 18

    def test_a_changed_source_is_decoded_anew(self, files: list[Path], tmp_path: Path) -> None:
        make_store(files, "disk", tmp_path).fill()
        Image.new("RGB", (20, 20), (1, 2, 3)).save(files[0])
        os.utime(files[0], ns=(1, 1))
        image, _ = make_store(files, "disk", tmp_path)[0]
        np.testing.assert_array_equal(image[0, 0], (1, 2, 3))

    @pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "empty", "longer", "huge"])
    def test_damage_costs_one_decoding_and_one_warning(
        self, damage: str, files: list[Path], decoded: list[str], tmp_path: Path
    ) -> None:
        make_store(files, "disk", tmp_path).fill()
        store = make_store(files, "disk", tmp_path)
        path = store._file(4)
        content = path.read_bytes()
        other = bytearray(content)
        other[100] ^= 1
        huge = bytearray(content)
        huge[8:12] = b"\xff\xff\xff\x7f"
        path.write_bytes(
            {
                "cut": content[:-9],
                "flipped": bytes(other),
                "foreign": b"GIF89a" * 40,
                "empty": b"",
                "longer": content + b"x",
                "huge": bytes(huge),
            }[damage]
        )
        decoded.clear()
        with pytest.warns(RuntimeWarning, match=f"{path} is decoded anew: it") as caught:
            images, _ = store.batch(np.arange(9), 0)
        assert len(caught) == 1
        assert decoded == ["4.png"]
        check(images, [data.decode(file) for file in files])
        decoded.clear()
        make_store(files, "disk", tmp_path).batch(np.arange(9), 0)
        assert decoded == []
        assert path.read_bytes() == content

    def test_a_folder_in_the_way(self, files: list[Path], decoded: list[str], tmp_path: Path) -> None:
        store = make_store(files, "disk", tmp_path)
        store._file(4).mkdir(parents=True)
        with pytest.warns(RuntimeWarning) as caught:
            check(store.batch(np.arange(9), 0)[0], [data.decode(file) for file in files])
        assert len(caught) == 2
        assert "no more images are stored" in str(caught[1].message)

    def test_full_disk(self, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = make_store(files, "disk", tmp_path)
        store.batch(np.arange(2), 0)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        with pytest.warns(RuntimeWarning, match="is full, no more images are stored") as caught:
            images = [store.batch(np.arange(9), epoch)[0] for epoch in range(2)]
        check(images[1], [data.decode(file) for file in files])
        assert len(caught) == 1
        names = [path.name for path in (tmp_path / "store").rglob("*") if path.is_file()]
        assert len(names) == 2
        assert all(name.endswith(".pixels") for name in names)

    def test_a_killed_process_leaves_nothing_for_long(self, files: list[Path], tmp_path: Path) -> None:
        left = tmp_path / "store" / "ab" / "x.tmp"
        left.parent.mkdir(parents=True)
        left.write_bytes(b"half")
        fresh = left.with_name("y.tmp")
        fresh.write_bytes(b"half")
        old = time.time() - 3 * 24 * 3600
        os.utime(left, (old, old))
        make_store(files, "disk", tmp_path).fill()
        assert not left.exists()
        assert fresh.exists()

    def test_the_limit_counts_what_was_there(self, files: list[Path], tmp_path: Path) -> None:
        first = make_store(files, "disk", tmp_path)
        first.fill()
        used = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file())
        assert first.nbytes == used
        second = make_store(files, "disk", tmp_path, side=8, limit=used + 500)
        second.fill()
        assert second.nbytes <= used + 500
        assert 0 < second.stored < 9


class TestDevice:
    def test_batches_and_views(self, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        played = FakeCupy()
        device = FakeDevice(played)
        monkeypatch.setattr(decode_module, "resolve", lambda name: CPU if name in ("cpu", CPU) else device)
        monkeypatch.setattr(store_module, "cupy", lambda: played)
        for side in (None, 12):
            decoder = Decoder("cuda", nvimgcodec=False)
            store = DecodedStore(ImageFiles(files, np.arange(9), decoder), "device", side=side, limit=1 << 20)
            plain = DecodedStore(ImageFiles(files, np.arange(9)), "host", side=side)
            indices = np.array([5, 2, 5])
            first, _ = store.batch(indices, 0)
            check(first, [plain[i][0] for i in indices])
            store.fill()
            batch, labels = store.batch(indices, 0)
            check(batch, [plain[i][0] for i in indices])
            np.testing.assert_array_equal(labels, indices)
            view = store.view(indices)
            check(view, [plain[i][0] for i in indices])
            assert view.pixels is store.view(np.arange(9)).pixels
            assert not np.shares_memory(batch.pixels, view.pixels)
            assert "device memory (cuda:0)" in str(store)


class TestView:
    def test_shares_the_stores_memory(self, files: list[Path], tmp_path: Path) -> None:
        store = make_store(files, "host", tmp_path)
        with pytest.raises(ValueError, match="indices cannot be viewed: image 3 is not stored"):
            store.view(np.array([3]))
        store.fill()
        view = store.view(np.array([7, 0, 7]))
        check(view, [data.decode(files[i]) for i in (7, 0, 7)])
        assert np.shares_memory(view.pixels, store.view(np.array([1])).pixels)
        disk = make_store(files, "disk", tmp_path)
        disk.fill()
        with pytest.raises(ValueError, match="the store is on disk"):
            disk.view(np.array([0]))
