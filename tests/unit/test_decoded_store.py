"""Images decoded once: in memory, on disk, and on a device that is played."""

import errno
import os
import pickle
import re
import sys
import threading
import time
import types
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


def stored_files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


def bytes_in(tmp_path: Path) -> int:
    return sum(path.stat().st_size for path in stored_files(tmp_path))


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
        with pytest.warns(RuntimeWarning, match=r"images that are not in it are decoded each time") as caught:
            store.fill()
        # Once: the batches below say nothing.
        assert len(caught) == 1
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
            raised = []
            for _ in range(2):
                with pytest.raises(DecodeError, match=r"7.png cannot be decoded") as caught:
                    store.batch(np.array([7]), 0)
                caught.value.add_note("seen")
                raised.append(caught.value)
            # Another one each time: notes and tracebacks do not pile up.
            assert [error.__notes__ for error in raised] == [["seen"], ["seen"]]

    def test_says_what_is_left_of_a_batch(self, cache: str, files: list[Path], tmp_path: Path) -> None:
        files[3].write_bytes(b"")
        store = make_store(files, cache, tmp_path, decoder=Decoder(on_error="skip"))
        for _ in range(2):
            (images, labels), kept = store.batch_kept(np.array([3, 8, 3, 1]), 0)
            np.testing.assert_array_equal(kept, [1, 3])
            np.testing.assert_array_equal(labels, [2, 1])
            check(images, [data.decode(files[8]), data.decode(files[1])])
            fields, kept = store.batch_kept(np.array([3]), 0)
            assert (fields, len(kept)) == ((), 0)
        with pytest.raises(ValueError, match="indices must be at least one"):
            store.batch(np.array([], np.int64), 0)
        with pytest.raises(IndexError, match="index 9 is out of range for 9 samples"):
            store.batch(np.array([9]), 0)

    def test_what_cannot_be_read_now_is_tried_again(
        self, cache: str, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = make_store(files, cache, tmp_path, decoder=Decoder(on_error="skip"))
        real = decode_module._read

        def refused(path: Path) -> bytes:
            if path.name == "4.png":
                raise OSError(errno.EMFILE, "Too many open files")
            return real(path)

        monkeypatch.setattr(decode_module, "_read", refused)
        np.testing.assert_array_equal(store.batch_kept(np.arange(9), 0)[1], [0, 1, 2, 3, 5, 6, 7, 8])
        with pytest.raises(DecodeError, match=r"4\.png cannot be read: Too many open files"):
            store.batch(np.array([4]), 0)
        monkeypatch.undo()
        assert len(store.batch_kept(np.arange(9), 0)[1]) == 9
        assert store.stored == 9

    def test_from_many_threads(self, cache: str, files: list[Path], tmp_path: Path) -> None:
        expected = [data.decode(file) for file in files]
        limit = 6 * expected[4].nbytes
        store = make_store(files, cache, tmp_path, limit=limit)

        def one(seed: int) -> None:
            indices = np.random.default_rng(seed).integers(0, 9, 5)
            check(store.batch(indices, 0)[0], [expected[i] for i in indices])

        with ThreadPoolExecutor(8) as pool, pytest.warns(RuntimeWarning, match="decoded each time") as caught:
            list(pool.map(one, range(60)))
        assert len(caught) == 1
        assert store.nbytes <= limit

    def test_pickles_without_its_images(self, cache: str, files: list[Path], tmp_path: Path) -> None:
        store = make_store(files, cache, tmp_path, side=15)
        store.fill()
        stored = pickle.dumps(store)
        assert len(stored) < 5000
        copy = pickle.loads(stored)
        assert (copy.cache, copy.side, copy.stored) == (cache, 15, 9 if cache == "disk" else 0)
        check(copy.batch(np.array([2]), 0)[0], [store[2][0]])


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"cache": "ram"}, "cache must be one of device, host, disk, not 'ram'"),
            ({"side": 0}, "side must be at least 1, not 0"),
            ({"limit": 0}, "limit must be at least 1, not 0"),
            ({"threads": -1}, "threads must be at least 0, not -1"),
            ({"limit": -3}, "limit must be at least 1, not -3"),
            ({"folder": "x"}, "folder is for cache='disk', not 'host'"),
        ],
    )
    def test_bad_ones(self, files: list[Path], options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            DecodedStore(ImageFiles(files, np.zeros(9, int)), **options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"side": 1.5}, r"side must be a whole number, not 1\.5"),
            ({"limit": float("inf")}, "limit must be a whole number, not inf"),
            ({"limit": "1 GiB"}, "limit must be a whole number, not '1 GiB'"),
            ({"threads": 2.0}, r"threads must be a whole number, not 2\.0"),
        ],
    )
    def test_numbers_that_are_not_whole(self, files: list[Path], options: dict[str, Any], message: str) -> None:
        with pytest.raises(TypeError, match=message):
            DecodedStore(ImageFiles(files, np.zeros(9, int)), **options)


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
        with pytest.warns(RuntimeWarning, match=r"store in host memory is full at 0\.0 MiB"):
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

    def test_a_changed_source_takes_the_place_of_the_old_one(self, files: list[Path], tmp_path: Path) -> None:
        make_store(files, "disk", tmp_path).fill()
        count = len(stored_files(tmp_path))
        Image.new("RGB", (50, 50), (1, 2, 3)).save(files[0])
        store = make_store(files, "disk", tmp_path)
        assert (store.plan.present, store.stored) == (8, 8)
        store.fill()
        assert len(stored_files(tmp_path)) == count
        assert store.nbytes == bytes_in(tmp_path)
        np.testing.assert_array_equal(make_store(files, "disk", tmp_path)[0][0][0, 0], (1, 2, 3))

    def test_a_source_that_changes_while_it_is_decoded_is_decoded_anew(
        self, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = decode_module.pillow_image

        def changing(source: Any, channels: int, name: str | None = None) -> Any:
            image = real(source, channels, name)
            Image.new("RGB", (20, 20), (1, 2, 3)).save(files[0])
            return image

        with monkeypatch.context() as patch:
            patch.setattr(decode_module, "pillow_image", changing)
            make_store(files, "disk", tmp_path).batch(np.array([0]), 0)
        image, _ = make_store(files, "disk", tmp_path)[0]
        np.testing.assert_array_equal(image[0, 0], (1, 2, 3))

    def test_a_full_store_still_follows_its_sources(self, files: list[Path], tmp_path: Path) -> None:
        make_store(files, "disk", tmp_path).fill()
        Image.fromarray(np.asarray(Image.open(files[0])) // 2).save(files[0])
        os.utime(files[0], ns=(1, 1))
        store = make_store(files, "disk", tmp_path, limit=bytes_in(tmp_path))
        for _ in range(2):
            np.testing.assert_array_equal(store[0][0], data.decode(files[0]))
        assert store.stored == 9
        assert store.nbytes == bytes_in(tmp_path) == store.limit

    def test_says_what_is_there(self, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_store(files, "disk", tmp_path).batch(np.array([0, 2, 4]), 0)
        store = make_store(files, "disk", tmp_path)
        assert (store.plan.present, store.stored) == (3, 3)
        assert "all 9 images fit" in str(store)
        assert str(store).endswith("3 are there")
        monkeypatch.setattr(store_module, "_SURVEYED_HEADERS", 5)
        part = make_store(files, "disk", tmp_path)
        assert part.plan.present == round(9 * 3 / 5)
        assert str(part).endswith("about 5 are there")

    def test_the_plan_counts_what_else_is_there(
        self, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_store(files, "disk", tmp_path, side=8).fill()
        first = bytes_in(tmp_path)
        whole = make_store(files, "disk", tmp_path)
        each = [data.decode(file).nbytes + 32 for file in files]
        limit = first + sum(each[:4])
        assert make_store(files, "disk", tmp_path, limit=limit).plan.fits == 4
        whole.batch(np.array([7, 8]), 0)
        # Those two and the first two.
        assert make_store(files, "disk", tmp_path, limit=first + sum(each[7:]) + sum(each[:2])).plan.fits == 4
        assert make_store(files, "disk", tmp_path, limit=1).plan.fits == 2
        monkeypatch.setattr(store_module, "_SURVEYED_HEADERS", 5)
        assert make_store(files, "disk", tmp_path, limit=limit).plan.fits in (3, 4, 5)

    def test_a_half_filled_store_goes_on_after_a_restart(
        self, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        needed = sum(data.decode(file).nbytes + 32 for file in files)

        def usage(_: Path) -> Any:
            return types.SimpleNamespace(free=2 * needed + 100 - bytes_in(tmp_path))

        monkeypatch.setattr(store_module.shutil, "disk_usage", usage)
        make_store(files, "disk", tmp_path).batch(np.arange(6), 0)
        again = make_store(files, "disk", tmp_path)
        assert again.limit == needed + 50
        again.fill()
        assert again.stored == 9

    def test_damage_is_counted_once(self, files: list[Path], tmp_path: Path) -> None:
        store = make_store(files, "disk", tmp_path)
        store.fill()
        for _ in range(3):
            store._file(4)[0].write_bytes(store._file(4)[0].read_bytes()[:-1] + b"?")
            with pytest.warns(RuntimeWarning, match="its checksum is wrong"):
                store.batch(np.array([4]), 0)
            assert store.nbytes == bytes_in(tmp_path)

    def test_two_stores_share_a_folder(self, files: list[Path], tmp_path: Path) -> None:
        sizes = [data.decode(file).nbytes + 32 for file in files]
        limit = 6 * max(sizes)
        stores = [make_store(files, "disk", tmp_path, limit=limit, side=side) for side in (None, 1000)]

        def read() -> None:
            for index in range(9):
                for store in stores:
                    store.batch(np.array([index]), 0)

        with pytest.warns(RuntimeWarning, match="has reached its limit"):
            read()
        # One image each more at most, not twice the limit.
        assert bytes_in(tmp_path) <= limit + 2 * max(sizes)

    def test_room_made_by_others_is_seen(self, files: list[Path], tmp_path: Path) -> None:
        other = make_store(files, "disk", tmp_path, side=8)
        other.fill()
        store = make_store(files, "disk", tmp_path, limit=bytes_in(tmp_path) + sum(f.stat().st_size for f in files))
        assert store.nbytes == bytes_in(tmp_path)
        for index in range(9):
            other._file(index)[0].unlink()
        store.fill()
        assert store.stored == 9
        assert store.nbytes == bytes_in(tmp_path)

    def test_a_stored_image_that_cannot_be_opened_now_is_kept(
        self, files: list[Path], decoded: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_store(files, "disk", tmp_path).fill()
        store = make_store(files, "disk", tmp_path)
        place = store._file(4)[0]
        content = place.read_bytes()
        real = Path.open
        refusing = [1]

        def refused(path: Path, *args: Any, **options: Any) -> Any:
            if path == place and refusing:
                refusing.pop()
                raise OSError(errno.EMFILE, "Too many open files")
            return real(path, *args, **options)

        monkeypatch.setattr(Path, "open", refused)
        decoded.clear()
        with pytest.warns(RuntimeWarning, match="is decoded anew: .*Too many open files"):
            check(store.batch(np.array([4]), 0)[0], [data.decode(files[4])])
        assert place.read_bytes() == content
        decoded.clear()
        store.batch(np.array([4]), 0)
        assert decoded == []

    def test_an_image_that_cannot_be_written_now_is_written_later(
        self, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = make_store(files, "disk", tmp_path)

        def refused(*_: object, **__: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(store_module.tempfile, "mkstemp", refused)
            with pytest.warns(RuntimeWarning, match=r"is not stored: .*Too many open files") as caught:
                store.batch(np.array([1, 2]), 0)
            assert len(caught) == 1
        assert (store.stored, store.nbytes) == (0, 0)
        store.fill()
        assert store.stored == 9
        assert store.nbytes == bytes_in(tmp_path)

    @pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "empty", "longer", "huge"])
    def test_damage_costs_one_decoding_and_one_warning(
        self, damage: str, files: list[Path], decoded: list[str], tmp_path: Path
    ) -> None:
        make_store(files, "disk", tmp_path).fill()
        store = make_store(files, "disk", tmp_path)
        path, _ = store._file(4)
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
        store._file(4)[0].mkdir(parents=True)
        with pytest.warns(RuntimeWarning) as caught:
            check(store.batch(np.arange(9), 0)[0], [data.decode(file) for file in files])
        assert len(caught) == 2
        assert "is decoded anew" in str(caught[0].message)
        assert "is not stored" in str(caught[1].message)
        # The others are.
        assert store.stored == 8

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
        with pytest.warns(RuntimeWarning, match=r"has reached its limit of .* remove the folder"):
            second.fill()
        assert second.nbytes <= used + 500
        assert 0 < second.stored < 9


class TestDevice:
    def test_batches_and_views(self, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        played = FakeCupy()
        device = FakeDevice(played)
        monkeypatch.setattr(decode_module, "resolve", lambda name: CPU if name in ("cpu", CPU) else device)
        monkeypatch.setattr(store_module, "cupy", lambda: played)
        monkeypatch.setattr(store_module, "gather_images", played.gather_images)
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
