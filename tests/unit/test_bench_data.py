"""The benchmark of the data pipeline and the photographs that it reads: their arithmetic, and small runs on the CPU."""

import io
import json
import threading
from pathlib import Path

import bench_scripts
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from flcuda.data import BatchDataset, PrefetchDataset, TensorDataset
from flcuda.device import CPU


@pytest.fixture(scope="module")
def load():
    with bench_scripts.loading() as loaded:
        yield loaded


@pytest.fixture(scope="module")
def bench(load):
    return load("bench_data")


@pytest.fixture(scope="module")
def photographs(load):
    return load("photographs")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Six small files of two classes, as photographs.py lays them out."""
    folder = tmp_path_factory.mktemp("photos")
    draws = np.random.default_rng(0)
    for number in range(6):
        place = folder / "1" / "train" / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(0, 256, (20 + number, 24, 3), np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.jpg", quality=60)
    return folder


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# --- photographs ------------------------------------------------------------------------------------------------------


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise of several sizes, which needs many bytes."""
    draws = np.random.default_rng(seed)
    small = Image.fromarray(draws.integers(0, 256, (height // 4, width // 4, 3), np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=60), st.integers(-10, 2000), st.integers(1, 40))
def test_the_nearest_quality_is_found(photographs, steps, target, low):
    sizes = np.cumsum(steps)
    found = photographs.nearest_quality(lambda quality: int(sizes[quality - low]), target, low, low + len(steps) - 1)
    assert low <= found < low + len(steps)
    assert abs(sizes[found - low] - target) == np.abs(sizes - target).min()


def test_a_file_has_the_size_that_is_asked_for(photographs):
    image = picture(500, 375)
    for target in (40_000, 60_000):
        content, quality = photographs.sized(image, target)
        assert abs(len(content) - target) <= 0.08 * target
        assert 40 <= quality <= 98
        with Image.open(io.BytesIO(content)) as opened:
            assert opened.size == (500, 375)
            assert "progressive" not in opened.info
            # 4:2:0: twice as many samples of the brightness in both directions.
            assert [layer[1:3] for layer in opened.layer] == [(2, 2), (1, 1), (1, 1)]
    assert photographs.sized(Image.new("RGB", (500, 375)), 50_000) is None


def test_a_cut_is_about_as_large_as_is_asked_for(photographs):
    draws = np.random.default_rng(0)
    for width, height in ((2560, 1600), (1280, 1024), (600, 600)):
        image = picture(width, height)
        for _ in range(8):
            sides = photographs.cut(image, draws).size
            assert 437 <= max(sides) <= 563
            assert 328 <= min(sides) <= 422


def test_the_same_packages_give_the_same_files(photographs, tmp_path, capsys):
    for number, name in enumerate(photographs.PHOTOGRAPHS):
        file = tmp_path / "usr/share" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        picture(1000, 750, number).save(file, quality=90)
    outs = [tmp_path / "first", tmp_path / "second"]
    for out in outs:
        photographs.main([str(tmp_path / "usr"), "--out", str(out), "--sizes", "50:9", "40:2"])
    files, labels = photographs.listed(outs[0], 50)
    assert len(files) == 9
    assert labels.dtype == np.int64
    assert labels.tolist() == sorted(labels.tolist())
    assert len({file.read_bytes() for file in files}) == 9
    for file in files:
        assert file.read_bytes() == (outs[1] / file.relative_to(outs[0])).read_bytes()
    about = json.loads((outs[0] / "about.json").read_text())
    assert [each["images"] for each in about["sizes"]] == [9, 2]
    assert about["sizes"][0]["mean_bytes"] == pytest.approx(50 * 1024, rel=0.08)
    assert "Debian" in about["source"]


def test_a_missing_package_is_named(photographs, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"YellowFlower.jpg is in none of .*both packages"):
        photographs.main([str(tmp_path), "--out", str(tmp_path)])
    with pytest.raises(FileNotFoundError, match=r"has no CLASS/NAME.jpg"):
        photographs.listed(tmp_path, 50)
    with pytest.raises(SystemExit):
        photographs.main([str(tmp_path), "--out", str(tmp_path), "--sizes", "50"])


def test_cuts_that_cannot_be_had_end_in_an_error(photographs):
    with pytest.raises(RuntimeError, match="only 0 of 1 cuts"):
        list(photographs.cuts([Image.new("RGB", (600, 600))], 50_000, 1, 0))


def test_every_pass_of_a_repeated_data_set_has_all_samples(photographs):
    dataset = photographs.repeated(TensorDataset(np.arange(7)), 7 * 4 + 3)
    assert len(dataset) == 31
    found = [int(dataset[place][0]) for place in range(31)]
    passes = [tuple(found[start : start + 7]) for start in range(0, 28, 7)]
    assert all(sorted(each) == list(range(7)) for each in passes)
    assert len(set(passes)) > 1
    assert len(set(found[28:])) == 3


def test_a_loader_goes_on_after_an_epoch(photographs):
    loader = PrefetchDataset(BatchDataset(TensorDataset(np.arange(4)), 2), "cpu", workers=1)
    with photographs.Endless(loader) as samples:
        found = [(sample.epoch, sample.index) for sample in (samples.take() for _ in range(5))]
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert loader.memory.slots == 0


# --- rates ------------------------------------------------------------------------------------------------------------


def test_a_rate_is_of_stretches_after_a_warm_up(bench):
    clock = Clock()
    waits = []

    def take() -> int:
        clock.now += 0.5 if clock.now >= 2 else 1.0
        return 8

    # One batch before anything else, and one that is not counted; then two seconds each.
    rates = bench.steady(take, lambda: waits.append(clock.now), seconds=4.0, repeats=2, clock=clock)
    assert rates == [16.0, 16.0]
    assert waits == [1.0, 2.0, 4.0, 6.0]


def test_a_batch_longer_than_a_stretch_counts(bench):
    clock = Clock()

    def take() -> int:
        clock.now += 10.0
        return 5

    assert bench.steady(take, lambda: None, seconds=1.0, repeats=3, clock=clock) == [0.5] * 3


def test_threads_are_counted_together_and_end(bench):
    pause = threading.Event()

    def work() -> int:
        pause.wait(0.001)
        return 3

    before = threading.active_count()
    rates = bench.steady_threads([work, work], seconds=0.1, repeats=2)
    assert len(rates) == 2
    assert all(0 < rate <= 6100 for rate in rates)
    assert threading.active_count() == before


def test_an_error_of_a_thread_is_raised(bench):
    def work() -> int:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        bench.steady_threads([work, lambda: 1], seconds=0.1, repeats=2)


def test_a_rate_is_held_against_what_is_asked(bench):
    row = bench.rate_row("decode and augment", 50, [19_000.0, 20_000.0, 30_000.0], threads=8)
    assert row["images_per_s"] == 20_000
    assert row["range"] == [19_000, 30_000]
    assert row["reached"] is True
    line = bench.rate_line(row)
    assert "asked 20,000: reached" in line
    assert "8 threads" in line
    assert "NOT REACHED" in bench.rate_line(bench.rate_row("decode and augment", 110, [19_999.0]))
    assert "asked" not in bench.rate_row("decode alone", 110, [1.0])


def test_a_row_that_fails_leaves_the_others(bench, tmp_path, capsys):
    stream = io.StringIO()
    record = bench.Record({}, tmp_path / "out.json", stream)

    def fails() -> list[float]:
        raise OSError("no engine")

    record.rate("decode", "decode alone", 50, fails)
    record.rate("decode", "decode alone", 110, lambda: [5.0])
    rows = json.loads((tmp_path / "out.json").read_text())["decode"]
    assert rows[0]["error"] == "OSError: no engine"
    assert rows[1]["images_per_s"] == 5
    assert "NOT MEASURED: OSError: no engine" in stream.getvalue()
    assert "no engine" in capsys.readouterr().err


def test_shares_are_medians_of_the_turns(bench):
    seconds = {"synthetic": [1.0, 2.0, 3.0], "jpeg": [1.25, 2.0, 4.0], "store": [1.0, 2.0, 30.0]}
    rows = {row["row"]: row for row in bench.share_rows(4, seconds, {"jpeg": 0.97, "store": 0.99})}
    assert rows["synthetic"]["share"] == 1
    assert "asked" not in rows["synthetic"]
    assert rows["jpeg"]["share"] == 0.8
    assert rows["jpeg"]["reached"] is False
    assert rows["store"]["share"] == 1
    assert rows["store"]["share_range"] == [0.1, 1]
    assert rows["store"]["images_per_s"] == 2
    assert "80.00 per cent of synthetic (75.00 to 100.00); asked 97: NOT REACHED" in bench.share_line(rows["jpeg"])


# --- memory -----------------------------------------------------------------------------------------------------------


def test_what_grows_is_not_flat(bench):
    mib = 1 << 20
    flat = [100 * mib] * 3 + [900 * mib] * 17
    assert bench.growth(flat) == {"before": 900 * mib, "after": 900 * mib, "growth": 0, "flat": True}
    leaking = [1000 * mib + epoch * 2 * mib for epoch in range(20)]
    assert bench.growth(leaking)["flat"] is False
    assert bench.growth(leaking)["growth"] == 11 * 2 * mib
    slowly = [1000 * mib + epoch * mib // 4 for epoch in range(20)]
    assert bench.growth(slowly)["flat"] is True
    assert bench.growth([5])["growth"] == 0


def test_page_locked_bytes_are_counted(bench):
    class Memory:
        def __init__(self, size: int, flags: int = 0) -> None:
            if size < 0:
                raise MemoryError
            self.size = size

        def __del__(self) -> None:
            self.size = 0

    pinned = bench.PinnedBytes()
    counted = bench.counting_memory(Memory, pinned.add)
    first, second = counted(100), counted(20, 1)
    assert isinstance(first, Memory)
    assert pinned.live == 120
    del first
    with pytest.raises(MemoryError):
        counted(-1)
    assert pinned.live == 20
    assert pinned.take_peak() == 120
    assert pinned.take_peak() == 20
    del second
    assert pinned.live == 0
    with pinned.counting(CPU):
        pass


def test_this_process_is_in_memory(bench):
    now = bench.memory_now(CPU, bench.PinnedBytes())
    assert now["resident"] > 10 << 20
    assert now["device"] == now["device_pool"] == now["pinned"] == 0
    assert now["threads"] >= 1
    assert now["files"] > 0


# --- all --------------------------------------------------------------------------------------------------------------


def words(photos: Path) -> list[str]:
    tiny = ["--network", "tiny", "--precision", "float32", "--device", "cpu", "--batch", "4", "--size", "8"]
    short = ["--seconds", "0.04", "--repeats", "2", "--steps", "2", "--epochs", "4", "--epoch-steps", "2"]
    return ["--photos", str(photos), "--kib", "1", "--workers", "2", "--limit", "0", "--cores", "2", *tiny, *short]


def test_the_whole_of_it_on_the_cpu(bench, photos, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FLCUDA_CHOICES", "")  # it sets it; put back afterwards
    monkeypatch.setattr(bench, "EPOCH", 64)  # epochs end while they are measured
    before = threading.active_count()
    bench.main([*words(photos), "decode", "train", "memory", "--json", "--out", str(tmp_path / "to" / "data.json")])
    text = capsys.readouterr()
    result = json.loads(text.out)
    assert json.loads((tmp_path / "to" / "data.json").read_text()) == result
    assert not [key for key in result if key.endswith("_error")]
    names = ["decode and augment", "decode alone", "decode by Pillow and augment", "decode alone by Pillow"]
    assert [row["row"] for row in result["decode"]] == names
    assert all(row["images_per_s"] > 0 and len(row["samples"]) == 2 for row in result["decode"])
    assert [row["row"] for row in result["train"]] == ["synthetic", "jpeg 1 KiB, 2 threads", "store"]
    assert result["train"][1]["asked"] == 0.97
    assert result["train"][2]["asked"] == 0.99
    assert result["training"]["valid"] is True
    assert [row["epoch"] for row in result["memory"]] == [1, 2, 3, 4]
    assert set(result["memory_growth"]) == {"resident", "pinned", "pinned_peak", "device", "device_pool"}
    assert result["photographs"]["sizes"][0]["distinct"] == 6
    assert "about 500x375, repeated: 6 of 1 KiB" in text.err
    assert "epoch  4: resident" in text.err
    assert threading.active_count() == before


def test_what_is_printed_without_json(bench, photos, capsys, monkeypatch):
    monkeypatch.setenv("FLCUDA_CHOICES", "")
    bench.main([*words(photos), "memory"])
    text = capsys.readouterr().out
    assert "resident" in text
    assert "decode" not in text


def test_a_part_that_fails_is_said(bench, photos, capsys, monkeypatch):
    monkeypatch.setenv("FLCUDA_CHOICES", "")

    def fails(*_: object) -> None:
        raise RuntimeError("lost")

    monkeypatch.setitem(bench.RUN, "train", fails)
    bench.main([*words(photos), "train", "memory", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["train_error"] == {"error": "RuntimeError: lost"}
    assert len(result["memory"]) == 4


def test_an_unknown_part_is_refused(bench, photos, capsys):
    with pytest.raises(SystemExit):
        bench.main([*words(photos), "decoding"])
    assert "not 'decoding'" in capsys.readouterr().err
