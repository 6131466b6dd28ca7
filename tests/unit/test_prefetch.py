"""Prefetching: every sample once, in order, unmixed; and nothing left behind, whatever ends an iteration."""

import contextlib
import ctypes
import gc
import itertools
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from link_fakes import Event, FakeLink, Pool, Resident, memory_of

from flcuda.data import prefetch
from flcuda.data.dataset import ConcatDataset, MergeDataset, ResampleDataset, TensorDataset, TransformDataset
from flcuda.data.epochs import BatchDataset, DistributedDataset, ShuffleDataset
from flcuda.data.images import ImageBatch
from flcuda.data.prefetch import DeviceTransform, PrefetchDataset
from flcuda.data.sample import RingMemory, Sample
from flcuda.data.transforms import Augment, Draws
from flcuda.errors import FlcudaError

ROOT = Path(__file__).parents[2]
WORKERS = (0, 1, 3)


class OnFake(PrefetchDataset):
    """A loader to a device that is not there; `links` are those of its iterations."""

    def __init__(self, *args: Any, seed_of_link: int = 0, eager: bool = False, speed: float = 0.3, **options: Any):
        super().__init__(*args, **{"device": "cpu", **options})
        self.links: list[FakeLink] = []
        self._options = {"eager": eager, "speed": speed}
        self._seed_of_link = seed_of_link

    def _new_link(self) -> FakeLink:
        self.links.append(FakeLink(self._seed_of_link + len(self.links), **self._options))
        return self.links[-1]

    @property
    def link(self) -> FakeLink:
        return self.links[-1]


class Stamps:
    """Sample i of `count` is as many copies of i as `sizes` says, after a while, and counts how often it was made."""

    def __init__(self, count: int, sizes: list[int] | None = None, pauses: list[float] | None = None) -> None:
        self.count = count
        self.sizes = sizes or [100]
        self.pauses = pauses or [0.0]
        self.served: list[int] = []
        self.before: Callable[[int], None] = lambda index: None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        self.served.append(index)
        self.before(index)
        if pause := self.pauses[index % len(self.pauses)]:
            time.sleep(pause)
        return np.full(self.sizes[index % len(self.sizes)], index, np.int32), index


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flcuda prefetch")]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    assert running() == []
    yield
    assert running() == []


def require_clean(loader: PrefetchDataset) -> None:
    """No thread, no stream, no byte."""
    assert running() == []
    assert loader.memory == RingMemory()
    for link in getattr(loader, "links", ()):
        assert link.closed == 1
        assert link.live["pinned"] == 0


# --- order ------------------------------------------------------------------------------------------------------------


class Asked:
    """A data set that says how many threads it should have."""

    def __init__(self, dataset=None, best_workers=None):
        self.best_workers = best_workers
        self.dataset = dataset

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return (np.array(index),)


def test_a_data_set_is_asked_how_many_workers_it_wants(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(5))
    assert PrefetchDataset(Asked(), "cpu").workers == 5
    assert PrefetchDataset(Asked(best_workers=2), "cpu").workers == 2
    assert PrefetchDataset(BatchDataset(Asked(Asked(best_workers=3)), 2), "cpu").workers == 3
    assert PrefetchDataset(Asked(Asked(best_workers=3), 1), "cpu").workers == 1
    assert PrefetchDataset(Asked(best_workers=2), "cpu", workers=7).workers == 7
    with pytest.raises(ValueError, match="best_workers must be at least 0, not -1"):
        PrefetchDataset(Asked(best_workers=-1), "cpu")


@pytest.mark.parametrize("kind", [PrefetchDataset, OnFake])
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_one_epoch_in_order(kind, workers, depth):
    dataset = Stamps(23, pauses=[0.0, 0.002, 0.001])
    loader = kind(
        dataset, device="cpu", depth=depth, workers=workers, **({} if kind is PrefetchDataset else {"eager": True})
    )
    assert len(loader) == 23
    for _ in range(2):
        dataset.served.clear()
        indices = []
        for sample in loader:
            image, label = sample
            assert set(image.tolist()) == {sample.index} == {int(label)}
            indices.append(sample.index)
        assert indices == list(range(23))
        assert sorted(dataset.served) == indices
        require_clean(loader)


@settings(max_examples=60)
@given(data=st.data())
def test_every_sample_once_in_order_unmixed(data):
    """Whatever sizes, depths, workers, starts, late copies, late kernels and early releases: stamps in the pixels."""
    draw = data.draw
    count = draw(st.integers(1, 40), "count")
    batch_size = draw(st.integers(1, 7), "batch_size")
    depth = draw(st.integers(1, 4), "depth")
    workers = draw(st.integers(0, 5), "workers")
    policy = draw(st.sampled_from(["include-last", "skip-last"]), "policy")
    epochs = draw(st.integers(1, 3), "epochs")
    speed = draw(st.sampled_from([0.0, 0.2, 0.8]), "speed")
    seed = draw(st.integers(0, 2**31), "seed")
    width = draw(st.sampled_from([1, 33, 9000]), "width")
    habits = draw(st.lists(st.sampled_from(["release", "drain", "leave", "ignore"]), min_size=1, max_size=5), "habits")
    sleeps = draw(st.sampled_from([0.0, 0.001]), "sleeps")
    pixels = np.broadcast_to(np.arange(count, dtype=np.int32)[:, None], (count, width))
    dataset = BatchDataset(ShuffleDataset(TensorDataset(pixels, np.arange(count)), seed=seed), batch_size, policy)
    start = draw(st.integers(0, len(dataset)), "start")
    loader = OnFake(dataset, depth=depth, workers=workers, start=start, seed_of_link=seed, speed=speed)
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        expected = [fields[1].tolist() for fields in dataset][start if epoch == 0 else 0 :]
        seen: list[tuple[int, list[int], list[int]]] = []
        steps = []
        for place, sample in enumerate(loader):
            link = loader.link
            steps.append(sample.index)
            assert sample.epoch == epoch
            habit = habits[place % len(habits)]
            if habit == "ignore":
                expected[place] = None
                continue
            rows, labels = sample

            def kernel(place=place, rows=rows, labels=labels, seen=seen):
                assert (rows == rows[:, :1]).all()
                seen.append((place, rows[:, 0].tolist(), labels.tolist()))

            link.launch(kernel)
            if habit == "release":
                sample.release()
            if habit == "drain":
                link.drain()
            if sleeps:
                time.sleep(sleeps)
        link = loader.link
        link.drain()
        assert steps == list(range(start if epoch == 0 else 0, len(dataset)))
        assert [(p, labels) for p, _, labels in sorted(seen)] == [
            (p, e) for p, e in enumerate(expected) if e is not None
        ]
        assert all(rows == labels for _, rows, labels in seen)
        require_clean(loader)


@settings(max_examples=30)
@given(
    count=st.integers(1, 30),
    batch_size=st.integers(1, 6),
    world_size=st.integers(1, 3),
    repeats=st.integers(1, 2),
    workers=st.integers(0, 3),
    depth=st.integers(1, 3),
    policy=st.sampled_from(["include-last", "skip-last"]),
)
def test_ranks_serve_what_their_data_sets_do(count, batch_size, world_size, repeats, workers, depth, policy):
    source = TensorDataset(np.arange(count))
    for rank in range(world_size):
        dataset = DistributedDataset(source, rank, world_size, batch_size, repeats, seed=3, policy=policy)
        loader = PrefetchDataset(dataset, device="cpu", depth=depth, workers=workers)
        for epoch in range(2):
            loader.set_epoch(epoch)
            served = [labels.tolist() for (labels,) in loader]
            assert served == [dataset.sample(step, epoch)[0].tolist() for step in range(len(dataset))]


@pytest.mark.parametrize("workers", WORKERS)
def test_resumes_at_a_step_exactly(workers):
    dataset = BatchDataset(ShuffleDataset(TensorDataset(np.arange(50)), seed=1), 7)
    whole = {}
    for epoch in range(3):
        loader = PrefetchDataset(dataset, device="cpu", workers=workers)
        loader.set_epoch(epoch)
        whole[epoch] = [labels.tolist() for (labels,) in loader]
    for start in range(len(dataset) + 1):
        loader = PrefetchDataset(dataset, device="cpu", workers=workers, start=start)
        loader.set_epoch(1)
        assert [(s.index, s[0].tolist()) for s in loader] == list(enumerate(whole[1]))[start:]
        loader.set_epoch(2)  # from its beginning
        assert [labels.tolist() for (labels,) in loader] == whole[2]
        loader.start = start
        assert [labels.tolist() for (labels,) in loader] == whole[2][start:]


def test_the_epoch_is_handed_down_and_told():
    dataset = BatchDataset(ShuffleDataset(TensorDataset(np.arange(50)), seed=1), 7)
    loader = PrefetchDataset(dataset, device="cpu")
    loader.set_epoch(4)
    assert loader.epoch == dataset.epoch == dataset.dataset.epoch == 4
    dataset.set_epoch(5)
    assert loader.epoch == 5
    assert {sample.epoch for sample in loader} == {5}
    plain = PrefetchDataset(Stamps(2), device="cpu")
    plain.set_epoch(3)
    assert [sample.epoch for sample in plain] == [3, 3]
    with pytest.raises(ValueError, match="epoch must be at least 0, not -1"):
        plain.set_epoch(-1)


def test_two_iterations_at_once_and_across_epochs():
    """The next epoch may begin before this one is over: the epoch belongs to the iteration."""
    dataset = BatchDataset(ShuffleDataset(TensorDataset(np.arange(60)), seed=1), 7)
    loader = PrefetchDataset(dataset, device="cpu", workers=2)
    first = iter(loader)
    served = [next(first)[0].tolist()]
    loader.set_epoch(1)
    second = iter(loader)
    pairs = [(a[0].tolist(), b[0].tolist()) for a, b in zip(first, itertools.islice(second, 8), strict=True)]
    assert served + [a for a, _ in pairs] == [dataset.sample(i, 0)[0].tolist() for i in range(9)]
    assert [b for _, b in pairs] == [dataset.sample(i, 1)[0].tolist() for i in range(8)]
    second.close()


def test_no_samples():
    loader = PrefetchDataset(Stamps(0), device="cpu")
    assert list(loader) == []
    loader = OnFake(Stamps(3), start=3)
    assert list(loader) == []
    require_clean(loader)


# --- how far ahead ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("workers", [1, 2])
def test_backpressure(depth, workers):
    """A consumer that does not come back lets the workers load so much and no more."""
    dataset = Stamps(100)
    loader = OnFake(dataset, depth=depth, workers=workers, speed=1.0)
    iteration = iter(loader)
    sample = next(iteration)
    # In the ring: as many as there are slots, and one more in each pinned buffer whose copy is queued.
    most = 2 * depth + workers
    deadline = time.monotonic() + 5
    while len(dataset.served) < most and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert len(dataset.served) == most
    assert sample.index == 0
    iteration.close()
    require_clean(loader)


def test_it_loads_ahead_while_the_consumer_works():
    dataset = Stamps(10)
    with iter(OnFake(dataset, depth=3, workers=1, speed=1.0)) as iteration:
        next(iteration)
        deadline = time.monotonic() + 5
        while len(dataset.served) < 5 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(dataset.served) >= 5


def test_synchronous_loading_does_nothing_ahead_and_starts_no_thread():
    dataset = Stamps(5)
    for place, _ in enumerate(OnFake(dataset, depth=2, workers=0)):
        assert dataset.served == list(range(place + 1))
        assert running() == []


def test_memory_is_told_bounded_and_flat():
    sizes = [1000, 50_000, 200_000, 10]
    loader = OnFake(Stamps(40, sizes=sizes), depth=3, workers=2, speed=1.0)
    assert loader.memory == RingMemory()
    for _ in range(20):
        for _ in loader:
            memory = loader.memory
        assert memory.slots == 3
        assert memory.largest <= 800_512
        assert memory.device <= 3 * (800_512 * 9 // 8 + 65536)
        require_clean(loader)
    assert all(link.peak["pinned"] <= 3 * (800_512 * 9 // 8 + 65536) for link in loader.links)


# --- samples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PrefetchDataset, OnFake])
@pytest.mark.parametrize("workers", WORKERS)
def test_a_sample_is_an_error_once_the_next_is_taken(kind, workers):
    loader = kind(Stamps(3), device="cpu", workers=workers)
    samples = []
    for sample in loader:
        samples.append(sample)
        sample.arrays()
        for before in samples[:-1]:
            with pytest.raises(FlcudaError, match="was released"):
                before.arrays()
    with pytest.raises(FlcudaError, match="sample 2 of epoch 0 was released"):
        samples[-1].arrays()


def test_the_cpu_device_hands_over_without_a_copy():
    class Same:
        array = np.zeros(3)

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> tuple[Any, ...]:
            return (self.array,)

    for sample in PrefetchDataset(Same(), device="cpu"):
        assert sample.state == "device"
        assert sample[0] is Same.array
    assert str(PrefetchDataset(Same(), device="cpu").device) == "cpu"


def test_images_of_different_sizes_and_resident_fields():
    class Images:
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> tuple[Any, ...]:
            batch = ImageBatch.of([np.full((1 + index, 2 + i, 3), 10 * index + i, np.uint8) for i in range(3)])
            if index % 2:
                # As a decoder on the device gives it.
                batch = ImageBatch(batch.pixels.view(Resident), batch.offsets, batch.sizes, 3)
            return batch, np.full(4, index).view(Resident)

    for sample in OnFake(Images(), depth=2, workers=2, eager=True):
        images, labels = sample
        for i in range(3):
            assert images.image(i).shape == (1 + sample.index, 2 + i, 3)
            assert set(images.image(i).ravel().tolist()) == {10 * sample.index + i}
        assert set(labels.tolist()) == {sample.index}


class MadeOnDevice:
    """Sample i is an array of the device, which becomes i late, in memory that was another's before."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.pool = Pool()
        self.links: list[FakeLink] = []
        self.streams: dict[int, Any] = {}
        self.waits_for: Callable[[int], None] = lambda index: None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        link = self.links[-1]
        array, memory = self.pool.empty(50, link.stream())
        self.streams[index] = link.stream()
        link.launch(lambda: memory.fill(index))
        self.waits_for(index)
        return array, index


@settings(max_examples=60)
@given(
    depth=st.integers(1, 3),
    workers=st.integers(0, 4),
    seed=st.integers(0, 2**31),
    speed=st.sampled_from([0.0, 0.2, 0.8]),
    releases=st.booleans(),
)
def test_fields_made_on_the_device_are_whole_and_unmixed(depth, workers, seed, speed, releases):
    """The copy stream waits for the worker's, and their memory is not used again before the copy is done."""
    dataset = MadeOnDevice(25)
    loader = OnFake(dataset, depth=depth, workers=workers, seed_of_link=seed, speed=speed)
    dataset.links = loader.links
    seen = []
    for sample in loader:
        array, label = sample
        loader.link.launch(lambda a=array, b=label: seen.append((set(a.tolist()), int(b))))
        if releases:
            sample.release()
    loader.link.drain()
    assert sorted(seen, key=lambda pair: pair[1]) == [({index}, index) for index in range(25)]
    assert loader.link.copy_stream not in dataset.streams.values()
    assert len(set(dataset.streams.values())) <= max(workers, 1)
    require_clean(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_made_on_the_device_does_not_wait_for_the_consumers_reads(workers):
    """A data set that waits for its own work, as a decoder does, while the consumer's stream is stuck."""
    dataset = MadeOnDevice(3)
    loader = OnFake(dataset, depth=1, workers=workers, speed=0.0)
    dataset.links = loader.links
    stuck = Event()

    def waits_for(index: int) -> None:
        link = loader.link
        if index == 2:
            assert not stuck.done
            link.wait(link.record(link.stream()))
            stuck.done = True

    dataset.waits_for = waits_for
    iteration = iter(loader)
    link = loader.link
    seen = []
    with link.on(link.new_stream("consumer")):
        for sample in iteration:
            array, _ = sample
            if sample.index == 0:
                link.follow(stuck, link.stream())
            link.launch(lambda array=array: seen.append(array.tolist()))
        link.drain()
    assert seen == [[index] * 50 for index in range(3)]
    require_clean(loader)


def test_a_capture_of_the_consumer_is_left_alone():
    """The threads go on, and do not touch its stream; the next sample is refused until the capture has ended."""
    loader = OnFake(Stamps(8), depth=2, workers=2)
    iteration = iter(loader)
    link = loader.link
    stream = link.new_stream("capturing")
    with link.on(stream):
        first = next(iteration)
        arrays = first.arrays()
        stream.capturing = True
        time.sleep(0.02)
        assert first.arrays() is arrays
        with pytest.raises(FlcudaError, match="captures"):
            next(iteration)
        stream.capturing = False
        assert [sample.index for sample in iteration] == list(range(1, 8))
    require_clean(loader)


# --- transforms -------------------------------------------------------------------------------------------------------


def shifted(batch, draws):
    return batch + draws.uniform()[:, :1]


class Shift:
    """The same in two steps."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def parameters(self, batch: Any, draws: Draws) -> np.ndarray:
        self.threads.add(threading.current_thread().name)
        return draws.uniform()[: len(batch), :1]

    def apply(self, batch: Any, parameters: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        return batch + parameters


@pytest.mark.parametrize("two_steps", [False, True])
@pytest.mark.parametrize("kind", [PrefetchDataset, OnFake])
def test_transforms_change_each_sample_as_a_transform_data_set_would(kind, two_steps):
    values = np.arange(60.0).reshape(30, 2)
    labels = np.arange(30)
    shuffled = ShuffleDataset(TensorDataset(labels, values), seed=5)
    expected = BatchDataset(TransformDataset(shuffled, None, shifted, seed=9), 4)
    transform = Shift() if two_steps else shifted
    assert isinstance(transform, DeviceTransform) is two_steps
    for workers, depth, start in ((0, 1, 0), (1, 2, 3), (3, 3, 0)):
        options = {} if kind is PrefetchDataset else {"eager": True}
        loader = kind(
            BatchDataset(shuffled, 4), device="cpu", workers=workers, depth=depth, transforms=(None, transform),
            start=start, seed=9, **options,
        )  # fmt: skip
        loader.set_epoch(2)
        steps = 0
        for sample in loader:
            assert len(sample) == 2
            for got, wanted in zip(sample, expected.sample(sample.index, 2), strict=True):
                np.testing.assert_array_equal(got, wanted)
            steps += 1
        assert steps == 8 - start
    if two_steps:
        workers = {name for name in transform.threads if "worker" in name}
        assert workers
        # Without workers the consumer does all; on the CPU device it applies whatever the workers.
        applies = {"flcuda prefetch copies"} if kind is OnFake else set()
        assert transform.threads - workers == {"MainThread", *applies}


@pytest.mark.parametrize("kind", [PrefetchDataset, OnFake])
def test_augmentation_is_that_of_the_sample(kind, rng):
    """Whatever the workers, the depth and where the epoch was taken up."""

    class Photographs(BatchDataset):
        def sample(self, index: int, epoch: int) -> tuple[Any, ...]:
            images = [photographs[i] for i in self.indices(index, epoch)]
            return ImageBatch.of(images), self.indices(index, epoch)

    photographs = [rng.integers(0, 256, (*rng.integers(9, 30, 2), 3), np.uint8) for _ in range(11)]
    augment = Augment(8, brightness=0.3, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.2))
    assert isinstance(augment, DeviceTransform)
    expected = {
        index: augment(ImageBatch.of([photograph]), Draws(4, 3, np.array([index])))[0]
        for index, photograph in enumerate(photographs)
    }
    options = {} if kind is PrefetchDataset else {"eager": True}
    for workers, depth, start, batch_size in ((0, 1, 0, 3), (2, 3, 1, 4)):
        dataset = Photographs(TensorDataset(np.arange(11)), batch_size)
        loader = kind(
            dataset, device="cpu", workers=workers, depth=depth, start=start, transforms=(augment,), seed=4, **options
        )
        loader.set_epoch(3)
        for images, indices in loader:
            for image, index in zip(images, indices.tolist(), strict=True):
                np.testing.assert_array_equal(image, expected[index])


@pytest.mark.parametrize("crop", ["random-resized", "resize-then-crop", "centre"])
@pytest.mark.parametrize("repeats", [2, 3])
def test_copies_of_a_sample_are_augmented_each_in_its_own_way(crop, repeats, rng):
    class Photographs:
        def __len__(self) -> int:
            return len(photographs)

        def __getitem__(self, index: int) -> tuple[Any, ...]:
            return photographs[index], index

    photographs = [rng.integers(0, 256, (*rng.integers(9, 30, 2), 3), np.uint8) for _ in range(7)]
    augment = Augment(8, crop=crop, scale=(0.6, 1.0), brightness=0.3)
    copies: dict[int, list[np.ndarray]] = {index: [] for index in range(7)}
    for rank in range(2):
        dataset = DistributedDataset(Photographs(), rank, 2, 3, repeats=repeats, seed=1)
        loader = PrefetchDataset(dataset, device="cpu", workers=2, transforms=(augment,), seed=4)
        loader.set_epoch(2)
        for images, labels in loader:
            for image, label in zip(images, labels.tolist(), strict=True):
                copies[label].append(image)
    for index, found in copies.items():
        expected = [
            augment(ImageBatch.of([photographs[index]]), Draws(4, 2 * repeats + k, np.array([index])))[0]
            for k in range(repeats)
        ]
        assert sorted(a.tobytes() for a in found) == sorted(a.tobytes() for a in expected)


def test_a_transform_that_nobody_asks_for_does_not_run():
    def never(batch, draws):
        raise AssertionError("it ran")

    loader = PrefetchDataset(BatchDataset(TensorDataset(np.arange(9)), 2), device="cpu", transforms=(never,))
    assert len(list(loader)) == 5


def test_what_transforms_cannot_be_given():
    batches = BatchDataset(TensorDataset(np.arange(9)), 2)
    with pytest.raises(TypeError, match="transforms need a data set of batches, such as BatchDataset, not a Stamps"):
        PrefetchDataset(Stamps(3), device="cpu", transforms=(shifted,))
    PrefetchDataset(Stamps(3), device="cpu", transforms=(None,))
    with pytest.raises(ValueError, match=r"transforms\[1\] has no field: the samples have 1"):
        list(PrefetchDataset(batches, device="cpu", transforms=(None, shifted)))

    class Short(BatchDataset):
        def sample(self, index: int, epoch: int) -> tuple[Any, ...]:
            return tuple(field[1:] for field in super().sample(index, epoch))

    with pytest.raises(ValueError, match=r"transforms\[0\]: field 0 has 1 rows and the batch 2 samples"):
        list(PrefetchDataset(Short(TensorDataset(np.arange(9)), 2), device="cpu", transforms=(shifted,)))


@pytest.mark.parametrize("two_steps", [False, True])
@pytest.mark.parametrize("workers", WORKERS)
def test_an_error_of_a_transform_names_sample_and_field(two_steps, workers):
    def fails(batch, draws):
        raise ZeroDivisionError("in the transform")

    class Fails(Shift):
        def apply(self, batch: Any, parameters: Any) -> Any:
            return fails(batch, None)

    dataset = BatchDataset(TensorDataset(np.arange(9), np.arange(18.0).reshape(9, 2)), 4)
    loader = PrefetchDataset(dataset, device="cpu", workers=workers, transforms=(None, Fails() if two_steps else fails))
    loader.set_epoch(3)
    iteration = iter(loader)
    next(iteration)
    sample = next(iteration)
    note = "while transforms[1] changed field 1 of sample 1 of epoch 3: a batch of samples 4, 5, 6, 7"
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="in the transform") as caught:
            sample.arrays()
        assert caught.value.__notes__ == [note]
    iteration.close()


class Rows:
    """Samples that are their numbers, which a batch on the device becomes late, in memory that was another's before."""

    def __init__(self, count: int, *, on_device: bool = True) -> None:
        self.count = count
        self.on_device = on_device
        self.pool = Pool()
        self.links: list[FakeLink] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        raise AssertionError(index)

    def batch(self, indices: np.ndarray, epoch: int) -> tuple[Any, ...]:
        numbers = indices.astype(np.int32)
        if not self.on_device:
            return numbers, numbers + 1
        link = self.links[-1]
        array, memory = self.pool.empty(len(indices), link.stream())
        link.launch(lambda: np.copyto(memory, numbers))
        return array, numbers + 1


class Late:
    """Adds 1000 times its parameter, late; or returns what it was given."""

    def __init__(self, dataset: Rows, *, same: bool = False) -> None:
        self.dataset = dataset
        self.same = same
        self.fails_at = -1
        self.error: Exception = ZeroDivisionError("in the transform")
        self.applied: list[str] = []

    def parameters(self, batch: Any, draws: Draws) -> np.ndarray:
        assert len(batch) == len(draws.indices)
        return draws.indices.astype(np.int32)

    def apply(self, batch: Any, parameters: Any) -> Any:
        link = self.dataset.links[-1]
        assert link.stream() is link.copy_stream
        if len(self.applied) == self.fails_at:
            raise self.error
        self.applied.append(threading.current_thread().name)
        if self.same:
            return batch
        result, memory = link.empty(len(batch))
        source, numbers = memory_of(batch), memory_of(parameters)
        link.launch(lambda: np.add(source, 1000 * numbers, out=memory))
        return result


def rows_loader(dataset: Rows, transforms: tuple[Any, ...], batch_size: int = 2, **options: Any) -> OnFake:
    loader = OnFake(BatchDataset(dataset, batch_size, "skip-last"), transforms=transforms, **options)
    dataset.links = loader.links
    return loader


@settings(max_examples=80)
@given(
    depth=st.integers(1, 3),
    workers=st.integers(0, 3),
    seed=st.integers(0, 2**31),
    speed=st.sampled_from([0.0, 0.2, 0.8]),
    on_device=st.booleans(),
    same=st.booleans(),
    habit=st.sampled_from(["ignore", "release", "keep", "two streams", "break"]),
)
def test_device_transforms_are_applied_ahead_and_nothing_is_mixed(depth, workers, seed, speed, on_device, same, habit):
    """Late workers, a late transform and late readers; memory that is used again as soon as it may be."""
    dataset = Rows(40, on_device=on_device)
    transform = Late(dataset, same=same)

    def doubled(batch: Any, draws: Draws) -> Any:
        # A plain one, on the consumer's stream and thread.
        link = loader.link
        assert link.stream() is link.null
        assert threading.current_thread() is threading.main_thread()
        result, source = np.full(len(batch), -1, np.int32), memory_of(batch)
        link.launch(lambda: np.multiply(source, 2, out=result))
        return result

    loader = rows_loader(dataset, (transform, doubled), depth=depth, workers=workers, seed_of_link=seed, speed=speed)
    factor = 1 if same else 1001
    for _ in range(3):
        seen: list[tuple[int, list[int], list[int]]] = []
        expected = []
        kept: list[Any] = []
        for sample in loader:
            link = loader.link
            streams = [link.null, link.new_stream("other")] if habit == "two streams" else [link.null]
            for stream in streams:
                with link.on(stream):
                    rows, labels = sample
                    a, b = memory_of(rows), memory_of(labels)
                    link.launch(lambda i=sample.index, a=a, b=b, seen=seen: seen.append((i, a.tolist(), b.tolist())))
                numbers = [2 * sample.index, 2 * sample.index + 1]
                expected.append((sample.index, [factor * n for n in numbers], [2 * (n + 1) for n in numbers]))
            memory = loader.memory
            assert memory.device <= depth * 65536 + (depth + 1) * 8
            assert memory.kept <= (2 if same else 1) * depth * 8
            if habit == "release":
                sample.release()
            if habit == "keep":
                kept[:] = [rows]  # until the next one is there
            del rows, labels
            if habit == "break" and sample.index == 7:
                break
        loader.link.drain()
        assert sorted(seen) == sorted(expected)
        assert loader.link.resident_copies == 0
        del kept
        require_clean(loader)
    assert set(transform.applied) == {"flcuda prefetch copies" if workers else "MainThread"} or same


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("on_device", [False, True])
def test_what_is_made_ahead_does_not_wait_for_the_consumers_stream(workers, on_device):
    dataset = Rows(12, on_device=on_device)
    loader = rows_loader(dataset, (Late(dataset),), depth=2, workers=workers)
    iteration = iter(loader)
    link = loader.link
    stuck = Event()
    with link.on(link.new_stream("consumer")):
        next(iteration).arrays()
        link.follow(stuck, link.stream())
        sample = next(iteration)
        link.wait(sample._ready)
        assert sample.state == "device"
        stuck.done = True
        assert sample[0].tolist() == [2002, 3003]
    iteration.close()
    require_clean(loader)


def test_device_transforms_of_a_ring_of_one_wait_for_the_readers():
    dataset = Rows(12)
    transform = Late(dataset)
    loader = rows_loader(dataset, (transform,), depth=1, workers=1)
    iteration = iter(loader)
    sample = next(iteration)
    time.sleep(0.02)
    assert len(transform.applied) == 1
    sample.release()
    deadline = time.monotonic() + 10
    while len(transform.applied) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(transform.applied) == 2
    iteration.close()
    require_clean(loader)


def test_a_capture_of_the_consumer_is_left_alone_by_device_transforms():
    dataset = Rows(16)
    transform = Late(dataset)
    loader = rows_loader(dataset, (transform,), depth=3, workers=2)
    iteration = iter(loader)
    link = loader.link
    stream = link.new_stream("capturing")
    with link.on(stream):
        first = next(iteration)
        arrays = first.arrays()
        queued = len(stream.queue)
        stream.capturing = True
        deadline = time.monotonic() + 10
        while len(transform.applied) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(transform.applied) == 3
        assert first.arrays() is arrays
        assert len(stream.queue) <= queued
        stream.capturing = False
        assert [sample.index for sample in iteration] == list(range(1, 8))
    require_clean(loader)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    "error", [ZeroDivisionError("in the transform"), MemoryError("the device is full"), StopIteration(), SystemExit(3)]
)
def test_an_error_of_a_device_transform_ends_the_iteration_at_its_sample(workers, on_device, error):
    dataset = Rows(24, on_device=on_device)
    transform = Late(dataset)
    transform.fails_at, transform.error = 2, error
    loader = rows_loader(dataset, (transform,), batch_size=4, workers=workers)
    loader.set_epoch(3)
    iteration = iter(loader)
    served = []
    kind = RuntimeError if isinstance(error, StopIteration) else type(error)
    with pytest.raises(kind) as caught:
        served.extend(sample.index for sample in iteration)
    assert served == [0, 1]
    of_transform = "while transforms[0] changed field 0 of sample 2 of epoch 3: a batch of samples 8, 9, 10, 11"
    of_sample = "while sample 2 of epoch 3 of a BatchDataset was loaded: a batch of samples 8, 9, 10, 11"
    if kind is RuntimeError:
        assert caught.value.__cause__ is error
        assert error.__notes__ == [of_transform]
        assert caught.value.__notes__ == [of_sample]
    else:
        assert caught.value.__notes__ == ([] if kind is SystemExit else [of_transform]) + [of_sample]
    assert list(iteration) == []
    require_clean(loader)
    transform.fails_at = -1
    assert [sample.index for sample in loader] == list(range(6))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_device_that_is_full_is_an_error_of_the_transforms_sample(workers):
    dataset = Rows(24)
    loader = rows_loader(dataset, (Late(dataset),), workers=workers, depth=1)
    iteration = iter(loader)
    next(iteration)
    loader.link.refuse_memory = True
    loader.link.pool._free.clear()
    with pytest.raises(MemoryError, match="the device is full") as caught:
        next(iteration)
    assert caught.value.__notes__[0].startswith("while transforms[0] changed field 0 of sample 1 of epoch 0")
    require_clean(loader)


def test_device_transforms_keep_nothing_over_epochs():
    """The arrays of an epoch's last sample are kept into the next one, as a loop does."""
    dataset = Rows(24)
    loader = rows_loader(dataset, (Late(dataset),), workers=2, depth=2)
    for _ in range(20):
        for rows, _labels in loader:
            memory = loader.memory
            assert memory.device <= 2 * 65536 + 3 * rows.nbytes
        assert loader.memory == RingMemory()
    # Each link's workers have streams of their own.
    assert dataset.pool.nbytes <= 20 * 2 * (2 + 1 + 1) * 8
    del rows, _labels
    require_clean(loader)


# --- batches of which something is left -------------------------------------------------------------------------------


class Lossy:
    """Sample i is its number and values, unless it is broken."""

    def __init__(self, first: int, count: int, broken: set[int]) -> None:
        self.numbers = np.arange(first, first + count)
        self.broken = broken

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self.batch(np.array([index]), 0)[0][0], np.zeros(2)

    def batch(self, indices: np.ndarray, epoch: int) -> tuple[Any, ...]:
        fields, _ = self.batch_kept(indices, epoch)
        if not fields:
            raise BrokenImageError(f"{self.numbers[indices].tolist()} are broken")
        return fields

    def batch_kept(self, indices: np.ndarray, epoch: int) -> tuple[tuple[Any, ...], np.ndarray]:
        numbers = self.numbers[indices]
        kept = np.flatnonzero([int(number) not in self.broken for number in numbers])
        return ((numbers[kept], np.zeros((len(kept), 2))) if len(kept) else ()), kept


@st.composite
def lossy_compositions(draw: st.DrawFn) -> Callable[[set[int]], Any]:
    """What makes a composition when it is told which numbers are broken; those of its samples are field 0 and 2."""
    count = draw(st.integers(1, 12))
    steps = draw(st.lists(st.sampled_from(["shuffle", "resample", "concat", "whole", "merge", "change"]), max_size=4))
    chosen = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=9))

    def made(broken: set[int]) -> Any:
        dataset: Any = Lossy(0, count, broken)
        merged = False
        for step in steps:
            size = len(dataset)
            if step == "shuffle":
                dataset = ShuffleDataset(dataset, seed=3)
            elif step == "resample":
                dataset = ResampleDataset(dataset, [i % size for i in chosen])
            elif step == "change":
                dataset = TransformDataset(dataset, None, shifted, seed=2)
            elif step == "merge" and not merged:
                merged = True
                dataset = MergeDataset(dataset, Lossy(100, size, broken))
            elif not merged:
                other = (
                    Lossy(200, 3, broken) if step == "concat" else TensorDataset(np.arange(300, 303), np.ones((3, 2)))
                )
                dataset = ConcatDataset(dataset, other)
        return dataset

    return made


@settings(max_examples=150)
@given(
    made=lossy_compositions(),
    broken=st.one_of(
        st.sets(st.one_of(st.integers(0, 12), st.integers(100, 112), st.integers(200, 203)), max_size=12),
        st.just(set(range(300))),
    ),
    batch_size=st.integers(1, 5),
    ranks=st.sampled_from([0, 1]),
    repeats=st.integers(1, 3),
    workers=st.integers(0, 2),
    on_fake=st.booleans(),
)
def test_what_is_left_of_a_batch_has_its_own_random_numbers(made, broken, batch_size, ranks, repeats, workers, on_fake):
    def loader_of(broken: set[int]) -> Any:
        dataset = made(broken)
        batched = DistributedDataset(dataset, 0, 1, batch_size, repeats) if ranks else BatchDataset(dataset, batch_size)
        kind, options = (OnFake, {"eager": True}) if on_fake else (PrefetchDataset, {})
        loader = kind(
            batched, device="cpu", workers=workers, transforms=(None, Shift() if repeats > 1 else shifted), **options
        )
        loader.set_epoch(1)
        return loader

    whole = [[np.array(field) for field in sample] for sample in loader_of(set())]
    loader = loader_of(broken)
    iteration = iter(loader)
    skipped = 0
    expected = list(enumerate(whole))
    for sample in iteration:
        while True:
            step, fields = expected.pop(0)
            rows = zip(*fields[::2], strict=True)
            kept = np.flatnonzero([all(int(n) not in broken for n in numbers) for numbers in rows])
            if len(kept):
                break
            skipped += 1
        assert sample.index == step
        assert sample.skipped == iteration.skipped == skipped
        # Data sets that lose nothing do not say what is left.
        assert sample.kept is None or sample.kept.tolist() == kept.tolist()
        for got, wanted in zip(sample, fields, strict=True):
            np.testing.assert_array_equal(got, wanted[kept])
        if ranks:
            weights = loader.dataset.weights(step, sample.kept)
            np.testing.assert_allclose(np.mean(weights), len(kept) / len(fields[0]), rtol=1e-6)
    for _, fields in expected:
        assert all(any(int(n) in broken for n in numbers) for numbers in zip(*fields[::2], strict=True))
    assert iteration.skipped == skipped + len(expected)
    require_clean(loader)


def test_a_batch_of_which_nothing_is_left_is_an_error_where_it_is_asked_for():
    dataset = Lossy(0, 6, {2, 3})
    for chain in (
        BatchDataset(dataset, 2),
        DistributedDataset(dataset, 0, 1, 2, seed=None),
        BatchDataset(TransformDataset(ConcatDataset(dataset, dataset), None, shifted), 2),
    ):
        with pytest.raises(BrokenImageError, match="are broken"):
            chain[1]
        assert chain[0][0].tolist() == [0, 1]
    place = ShuffleDataset(TensorDataset(np.arange(6))).batch(np.arange(6), 0)[0].tolist().index(2)
    with pytest.raises(BrokenImageError, match=r"\[2\] are broken"):
        TransformDataset(ShuffleDataset(dataset), None)[place]


def test_a_rank_whose_batch_is_empty_says_so():
    """The others would wait for it for ever."""
    ranks = [DistributedDataset(Lossy(0, 8, {2, 4, 6}), rank, 2, 2, seed=None) for rank in range(2)]
    served = [list(map(list, sample)) for sample in PrefetchDataset(ranks[1], device="cpu", workers=1)]
    assert [numbers for numbers, _ in served] == [[1, 3], [5, 7]]
    iteration = iter(PrefetchDataset(ranks[0], device="cpu", workers=1))
    first = next(iteration)
    assert (first[0].tolist(), first.kept.tolist()) == ([0], [0])
    assert ranks[0].weights(0, first.kept).tolist() == [0.5]
    with pytest.raises(BrokenImageError, match=r"\[4\] are broken"):
        next(iteration)


def test_a_subclass_that_makes_its_own_batches_is_asked_for_those():
    class Own(BatchDataset):
        def sample(self, index: int, epoch: int) -> tuple[Any, ...]:
            return (np.full(2, -index),)

    class OwnBatch(Lossy):
        def batch(self, indices: np.ndarray, epoch: int) -> tuple[Any, ...]:
            return (indices * 10,)

    loader = PrefetchDataset(Own(Lossy(0, 4, {1}), 2), device="cpu")
    assert [(numbers.tolist()) for (numbers,) in loader] == [[0, 0], [-1, -1]]
    loader = PrefetchDataset(BatchDataset(OwnBatch(0, 4, {1}), 2), device="cpu")
    assert [(sample[0].tolist(), sample.kept) for sample in loader] == [([0, 10], None), ([20, 30], None)]


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([1, 0], r"batch_kept of a Wrong must return rising places among the 2 samples, not \[1, 0\]"),
        ([0, 2], "rising places among the 2"),
        ([-1, 0], "rising places among the 2"),
        ([[0, 1]], "rising places among the 2"),
        ([0], "field 0 has 2 rows for the 1 samples"),
    ],
)
def test_what_a_data_set_says_is_left_is_checked(kept, message):
    class Wrong(TensorDataset):
        def batch_kept(self, indices: np.ndarray, epoch: int) -> tuple[tuple[Any, ...], np.ndarray]:
            return self.batch(indices, epoch), np.array(kept)

    with pytest.raises(ValueError, match=message):
        list(PrefetchDataset(BatchDataset(Wrong(np.arange(2)), 2), device="cpu"))


@pytest.mark.parametrize("value", [None, 32, "x"])
def test_attributes_of_a_foreign_data_set_are_its_own(value):
    dataset = Stamps(3)
    for name in ("epoch", "batch", "batch_kept", "set_epoch", "sample_kept", "indices"):
        setattr(dataset, name, value)
    loader = PrefetchDataset(dataset, device="cpu")
    assert loader.epoch == 0
    loader.set_epoch(2)
    assert [(sample.index, sample.epoch) for sample in loader] == [(0, 2), (1, 2), (2, 2)]
    dataset.draws = value
    with pytest.raises(TypeError, match="transforms need a data set of batches"):
        PrefetchDataset(dataset, device="cpu", transforms=(shifted,))


# --- errors -----------------------------------------------------------------------------------------------------------


class BrokenImageError(Exception):
    pass


@pytest.mark.parametrize("kind", [PrefetchDataset, OnFake])
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("place", [0, 4, 9])
def test_a_failing_sample_is_named_after_those_before_it(kind, workers, place):
    dataset = Stamps(10)

    def before(index: int) -> None:
        if index == place:
            raise BrokenImageError("broken")

    dataset.before = before
    loader = kind(dataset, device="cpu", workers=workers, depth=2)
    iteration = iter(loader)
    served = []
    with pytest.raises(BrokenImageError, match="broken") as caught:
        served.extend(sample.index for sample in iteration)
    assert served == list(range(place))
    assert caught.value.__notes__ == [f"while sample {place} of epoch 0 of a Stamps was loaded"]
    assert "before" in [entry.name for entry in caught.traceback]  # where it was raised
    assert list(iteration) == []
    require_clean(loader)
    dataset.before = lambda index: None
    assert [sample.index for sample in loader] == list(range(10))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_failing_batch_names_its_samples(workers):
    class Broken:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> tuple[Any, ...]:
            if index == 23:
                raise OSError("gone")
            return (index,)

    loader = PrefetchDataset(BatchDataset(Broken(), 10), device="cpu", workers=workers)
    with pytest.raises(OSError, match="gone") as caught:
        list(loader)
    inner, outer = caught.value.__notes__
    assert inner == "sample 23 of 40 of a Broken"
    assert outer == (
        "while sample 2 of epoch 0 of a BatchDataset was loaded: a batch of samples 20, 21, 22, 23, 24, 25, 26, 27, ..."
    )


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("error", [StopIteration(), IndexError("deep"), GeneratorExit(), SystemExit(3)])
def test_no_exception_passes_for_the_end(workers, error):
    """A loop takes StopIteration, and may take IndexError, for the end: samples would be lost without a word."""
    dataset = Stamps(5)

    def before(index: int) -> None:
        if index == 2:
            raise error

    dataset.before = before
    kind = RuntimeError if isinstance(error, StopIteration) else type(error)
    with pytest.raises(kind) as caught:
        list(PrefetchDataset(dataset, device="cpu", workers=workers))
    if kind is RuntimeError:
        assert caught.value.__cause__ is error


@dataclass(frozen=True)
class FrozenError(Exception):
    code: int


@pytest.mark.parametrize("kind", [PrefetchDataset, OnFake])
@pytest.mark.parametrize("workers", WORKERS)
def test_an_exception_that_takes_no_notes_arrives(kind, workers):
    dataset = Stamps(5)

    def before(index: int) -> None:
        if index == 2:
            raise FrozenError(7)

    dataset.before = before
    loader = kind(dataset, device="cpu", workers=workers)
    with pytest.raises(FrozenError) as caught:
        list(loader)
    assert caught.value.code == 7
    require_clean(loader)


@pytest.mark.parametrize("name", ["_stage", "_send"])
def test_a_thread_that_fails_outside_of_the_data_set_is_no_hang(monkeypatch, name):
    real = getattr(prefetch._Pipeline, name)

    def fails(self: Any, step: int) -> Any:
        if step == 2:
            raise FrozenError(step)
        return real(self, step)

    monkeypatch.setattr(prefetch._Pipeline, name, fails)
    loader = OnFake(Stamps(5), workers=1, depth=1)
    served = []
    with pytest.raises(FrozenError):
        served.extend(sample.index for sample in loader)
    assert served == [0, 1]
    require_clean(loader)


def test_nothing_is_loaded_after_a_failing_sample():
    dataset = Stamps(1000)

    def before(index: int) -> None:
        if index == 2:
            raise OSError("gone")

    dataset.before = before
    with pytest.raises(OSError, match="gone"):
        list(PrefetchDataset(dataset, device="cpu", workers=1, depth=3))
    assert dataset.served == [0, 1, 2]


@pytest.mark.parametrize("workers", WORKERS)
def test_notes_do_not_pile_up_on_an_error_that_is_raised_again(workers):
    error = OSError("the same each time")

    class Broken:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> tuple[Any, ...]:
            raise error

    loader = PrefetchDataset(BatchDataset(Broken(), 2), device="cpu", workers=workers)
    for epoch in range(3):
        loader.set_epoch(epoch)
        with pytest.raises(OSError, match="the same"):
            list(loader)
        of_batch = "of a BatchDataset was loaded: a batch of samples 0, 1"
        assert error.__notes__[-1] == f"while sample 0 of epoch {epoch} {of_batch}"
        assert len(error.__notes__) == 2


@pytest.mark.parametrize("workers", WORKERS)
def test_a_field_that_cannot_travel_is_an_error_of_its_sample(workers):
    class Named(Stamps):
        def __getitem__(self, index: int) -> tuple[Any, ...]:
            return np.zeros(3), "a.jpg" if index == 3 else 1

    loader = OnFake(Named(6), workers=workers)
    with pytest.raises(TypeError, match="field 1 must be an array, an ImageBatch or a number, not str") as caught:
        list(loader)
    assert caught.value.__notes__ == ["while sample 3 of epoch 0 of a Named was loaded"]
    require_clean(loader)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_full_device_is_an_error_of_its_sample(workers):
    loader = OnFake(Stamps(6, sizes=[10, 10, 10, 10**6]), workers=workers, depth=1)
    iteration = iter(loader)
    for _ in range(3):
        next(iteration)
    loader.link.refuse_memory = True
    with pytest.raises(MemoryError, match="the device is full") as caught:
        next(iteration)
    assert caught.value.__notes__ == ["while sample 3 of epoch 0 of a Stamps was loaded"]
    require_clean(loader)


def test_what_an_error_refers_to_goes_with_it():
    """No cycle keeps the arrays of a failed sample until the garbage collector comes."""
    gone = []

    class Array(np.ndarray):
        pass

    class Failing(Stamps):
        def __getitem__(self, index: int) -> tuple[Any, ...]:
            array = np.zeros(10).view(Array)
            weakref.finalize(array, gone.append, index)
            return array, "not a number"

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(TypeError):
            list(PrefetchDataset(Failing(1), device="cpu", workers=1))
        assert gone == [0]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "depth must be at least 1, not 0"),
        ({"workers": -1}, "workers must be at least 0, not -1"),
        ({"start": -1}, "start must be at least 0, not -1"),
        ({"start": 4}, "start must be at most the 3 steps of an epoch, not 4"),
        ({"device": "gpu"}, "device: 'gpu' is none of"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        PrefetchDataset(Stamps(3), **{"device": "cpu", **options})


@pytest.mark.parametrize("name", ["depth", "workers", "start", "seed"])
def test_numbers_that_are_not_whole(name):
    with pytest.raises(TypeError, match=f"{name} must be a whole number, not 1.5"):
        PrefetchDataset(Stamps(3), "cpu", **{name: 1.5})


def test_a_data_set_is_not_asked_before_all_else_is_known_to_be_right():
    """A decoder that is asked for its workers loads nvImageCodec onto the device."""

    class Costly(Asked):
        @property
        def best_workers(self):
            raise AssertionError

        @best_workers.setter
        def best_workers(self, value):
            pass

    for options in ({"depth": 0}, {"start": 9}, {"seed": "x"}, {"device": "gpu"}, {"transforms": (Shift(),)}):
        with pytest.raises((TypeError, ValueError)):
            PrefetchDataset(Costly(), **{"device": "cpu", **options})


def test_a_start_set_later_is_checked():
    loader = PrefetchDataset(Stamps(3), device="cpu")
    loader.start = 4
    with pytest.raises(ValueError, match="start must be at most the 3 steps"):
        iter(loader)


def test_workers_by_default():
    loader = PrefetchDataset(Stamps(3), device="cpu")
    assert loader.workers == min(8, len(os.sched_getaffinity(0)))
    assert loader.depth == 2


def test_pickles():
    loader = PrefetchDataset(BatchDataset(TensorDataset(np.arange(9)), 2), device="cpu", depth=3, workers=1, start=1)
    loader.set_epoch(2)
    iteration = iter(loader)
    next(iteration)
    again = pickle.loads(pickle.dumps(loader))
    iteration.close()
    assert (again.depth, again.workers, again.epoch, again.start) == (3, 1, 2, 0)
    assert [labels.tolist() for (labels,) in again] == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


# --- endings ----------------------------------------------------------------------------------------------------------


def leave_by_break(loader: PrefetchDataset) -> None:
    for sample in loader:
        if sample.index == 3:
            break


def leave_by_exception(loader: PrefetchDataset) -> None:
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the loop is what is left
        for sample in loader:
            1 // (3 - sample.index)


def leave_by_close(loader: PrefetchDataset) -> None:
    iteration = iter(loader)
    next(iteration)
    iteration.close()
    iteration.close()
    assert list(iteration) == []


def leave_by_with(loader: PrefetchDataset) -> None:
    with iter(loader) as iteration:
        next(iteration)


def leave_by_letting_go(loader: PrefetchDataset) -> None:
    next(iter(loader))


def leave_before_the_first(loader: PrefetchDataset) -> None:
    iter(loader)


def leave_a_cycle(loader: PrefetchDataset) -> None:
    cycle: list[Any] = [iter(loader)]
    cycle.append(cycle)
    next(cycle[0])
    del cycle
    gc.collect()


def leave_a_generator(loader: PrefetchDataset) -> None:
    def generate() -> Iterator[Sample]:
        yield from loader

    generator = generate()
    next(generator)
    generator.close()


LEAVES = (
    leave_by_break,
    leave_by_exception,
    leave_by_close,
    leave_by_with,
    leave_by_letting_go,
    leave_before_the_first,
    leave_a_cycle,
    leave_a_generator,
)


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", [PrefetchDataset, OnFake])
@pytest.mark.parametrize("pause", [0.0, 0.003])
def test_leaving_early_ends_everything(leave, workers, kind, pause):
    loader = kind(Stamps(1000, pauses=[pause]), device="cpu", workers=workers, depth=2)
    for _ in range(3):
        leave(loader)
        require_clean(loader)
    assert next(iter(loader)).index == 0


def test_no_sample_is_begun_after_the_end():
    dataset = Stamps(1000, pauses=[0.05])
    with iter(PrefetchDataset(dataset, device="cpu", workers=2, depth=8)) as iteration:
        next(iteration)
        time.sleep(0.01)
        begun = len(dataset.served)
    assert len(dataset.served) == begun


def test_a_sample_does_not_keep_the_iteration():
    loader = OnFake(Stamps(100), workers=2)
    sample = next(iter(loader))
    require_clean(loader)
    assert sample.state == "released"
    sample.release()


def test_a_garbage_collection_on_one_of_its_own_threads():
    """The collector runs on any thread, that of a worker of the same iteration too, which cannot wait for itself."""
    dataset = Stamps(1000, pauses=[0.001])
    collect = threading.Event()
    collected = threading.Event()

    def before(index: int) -> None:
        if collect.is_set() and not collected.is_set():
            gc.collect()
            collected.set()

    dataset.before = before
    gc.collect()
    gc.disable()
    try:
        loader = OnFake(dataset, workers=2, depth=3)
        cycle: list[Any] = [iter(loader)]
        cycle.append(cycle)
        next(cycle[0])
        collect.set()
        del cycle
        loader.link.drain()
        assert collected.wait(10)
        deadline = time.monotonic() + 10
        while running() and time.monotonic() < deadline:
            time.sleep(0.001)
        require_clean(loader)
    finally:
        gc.enable()


def test_a_garbage_collection_while_the_lock_is_held(monkeypatch):
    """The consumer may be at the release of a sample whose iteration is garbage."""
    monkeypatch.setattr(prefetch, "_LOCK_PATIENCE_S", 0.01)
    loader = OnFake(Stamps(100), workers=2)
    iteration = iter(loader)
    sample = next(iteration)
    pipeline = iteration._pipeline
    with pipeline._condition:
        del iteration
    deadline = time.monotonic() + 10
    while running() and time.monotonic() < deadline:
        time.sleep(0.001)
    require_clean(loader)
    assert sample.state == "released"


def test_a_data_set_that_does_not_return_is_left_behind(monkeypatch):
    monkeypatch.setattr(prefetch, "PATIENCE_S", 0.05)
    dataset = Stamps(10)
    returns = threading.Event()

    def before(index: int) -> None:
        if index == 3:
            returns.wait(30)

    dataset.before = before
    loader = OnFake(dataset, workers=1)
    iteration = iter(loader)
    next(iteration)
    deadline = time.monotonic() + 10
    while 3 not in dataset.served and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.warns(RuntimeWarning, match="has not returned for 0.05 s: flcuda prefetch worker 0 will end"):
        iteration.close()
    assert loader.link.closed == 1
    assert running() == ["flcuda prefetch worker 0"]
    returns.set()
    while running() and time.monotonic() < deadline:
        time.sleep(0.001)
    require_clean(loader)


def test_a_transform_ahead_that_does_not_return_is_left_behind(monkeypatch):
    monkeypatch.setattr(prefetch, "PATIENCE_S", 0.05)
    returns = threading.Event()
    begun = threading.Event()

    class Hung(Late):
        def apply(self, batch: Any, parameters: Any) -> Any:
            if len(self.applied) == 1:
                begun.set()
                returns.wait(30)
            return super().apply(batch, parameters)

    dataset = Rows(40)
    loader = rows_loader(dataset, (Hung(dataset),), depth=2, workers=1)
    iteration = iter(loader)
    pipeline = iteration._pipeline
    next(iteration)
    assert begun.wait(10)
    with pytest.warns(RuntimeWarning, match="a transform has not returned for 0.05 s: flcuda prefetch copies will end"):
        iteration.close()
    returns.set()
    deadline = time.monotonic() + 10
    while running() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert running() == []
    # What it made nobody gets, and nobody keeps.
    assert not pipeline._ready
    assert not pipeline._staged


def test_close_from_another_thread_wakes_the_consumer():
    dataset = Stamps(10)
    returns = threading.Event()
    dataset.before = lambda index: returns.wait(30) and None
    iteration = iter(PrefetchDataset(dataset, device="cpu", workers=1))
    closer = threading.Timer(0.05, iteration.close)
    closer.start()
    threading.Timer(0.1, returns.set).start()
    with pytest.raises(FlcudaError, match="closed by another thread while sample 0 was waited for"):
        next(iteration)
    closer.join()


def interrupt_main(after: float) -> threading.Timer:
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


@pytest.mark.parametrize("workers", WORKERS)
def test_ctrl_c_while_waiting_ends_at_once(workers):
    dataset = Stamps(1000, pauses=[0.15])
    loader = OnFake(dataset, workers=workers)
    iteration = iter(loader)
    timer = interrupt_main(0.1)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        next(iteration)
    timer.join()
    assert time.monotonic() - start < 2
    require_clean(loader)
    assert list(iteration) == []


def test_ctrl_c_in_the_loop_ends_at_once():
    loader = OnFake(Stamps(1000), workers=2)
    timer = interrupt_main(0.05)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for _ in loader:
            time.sleep(0.5)
    timer.join()
    require_clean(loader)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("where", ["next", "body", "with"])
def test_ctrl_c_does_not_wait_for_a_data_set_that_is_blocked(where, monkeypatch):
    """The data set is at its sample until the consumer is back, and the end of the iteration is another thread's.

    No margin of time is needed: who waited for the data set would be at it for `PATIENCE_S`, and would have ended the
    iteration itself.
    """
    assert prefetch.HASTE_S <= 0.5
    monkeypatch.setattr(prefetch, "PATIENCE_S", 60.0)
    dataset = Stamps(100)
    returns, blocked, there = threading.Event(), threading.Event(), threading.Event()

    def before(index: int) -> None:
        if index == 3:
            blocked.set()
            returns.wait()

    dataset.before = before
    loader = OnFake(dataset, workers=2)
    kept: list[Sample] = []

    def wait_for_the_alarm() -> None:
        there.set()
        time.sleep(60)

    def consume() -> None:
        for sample in loader:
            kept.append(sample)
            if where == "body":
                wait_for_the_alarm()
            elif sample.index == 2:
                there.set()

    def consume_with() -> None:
        with iter(loader) as iteration:
            kept.append(next(iteration))
            wait_for_the_alarm()

    rung: list[float] = []

    def ring() -> None:
        assert there.wait(60)
        assert blocked.wait(60)
        time.sleep(0.05)  # until the consumer waits, by all likelihood
        rung.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    alarm = threading.Thread(target=ring)
    alarm.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            consume_with() if where == "with" else consume()
        left = time.monotonic()
        # The data set has still not returned, and nobody but the thread of the end waits for it.
        names = running()
        assert "flcuda prefetch end" in names
        assert [name for name in names if "worker" in name]
        assert kept
        assert all(sample.state == "released" for sample in kept)
        assert loader.link.closed == 0
        assert left - rung[0] < 30
    finally:
        returns.set()
        alarm.join()
    deadline = time.monotonic() + 30
    while running() and time.monotonic() < deadline:
        time.sleep(0.001)
    require_clean(loader)


def test_threads_that_cannot_be_started(monkeypatch):
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "flcuda prefetch worker 1":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    loader = OnFake(Stamps(10), workers=3)
    with pytest.raises(RuntimeError, match="can't start new thread") as caught:
        iter(loader)
    assert caught.traceback  # it keeps the iteration, which has ended all the same
    require_clean(loader)


@pytest.mark.parametrize("leave", ["next(iteration)", "next(iteration); os.kill(os.getpid(), signal.SIGINT)"])
def test_the_interpreter_ends_with_an_iteration_open(leave):
    script = f"""
        import os, signal, time
        import numpy as np
        from flcuda.data.prefetch import PrefetchDataset

        class Slow:
            def __len__(self): return 100
            def __getitem__(self, index):
                time.sleep(0.01)
                return (np.zeros(3),)

        iteration = iter(PrefetchDataset(Slow(), device="cpu", workers=3))
        {leave}
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    if "SIGINT" in leave:
        assert done.stderr.strip().endswith("KeyboardInterrupt")
        assert done.returncode == -signal.SIGINT
    else:
        assert done.stderr == ""
        assert done.returncode == 0


def test_the_interpreter_ends_while_a_data_set_is_blocked():
    script = """
        import time
        from flcuda.data.prefetch import PrefetchDataset

        class Blocked:
            def __len__(self): return 100
            def __getitem__(self, index):
                time.sleep(60 if index else 0)
                return (index,)

        iteration = iter(PrefetchDataset(Blocked(), device="cpu", workers=2))
        next(iteration)
        print(time.time())
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert time.time() - float(done.stdout) < 3
    assert (done.stderr, done.returncode) == ("", 0)


def test_random_endings_at_random_moments(rng):
    """An exception put into the consumer at any place it happens to be at."""
    for round_ in range(30):
        loader = OnFake(Stamps(10_000, pauses=[0.0, 0.0005]), workers=int(rng.integers(0, 4)), depth=2, eager=True)

        begun = threading.Event()

        def consume(loader=loader, begun=begun):
            with contextlib.suppress(KeyboardInterrupt):
                iteration = iter(loader)
                begun.set()
                for sample in iteration:
                    sample.arrays()

        thread = threading.Thread(target=consume)
        thread.start()
        # Not before: a thread that is being started would get the exception that is meant for its parent.
        assert begun.wait(10)
        time.sleep(float(rng.uniform(0.0, 0.01)))
        ident = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(KeyboardInterrupt))
        thread.join(20)
        assert not thread.is_alive(), round_
        deadline = time.monotonic() + 10
        while running() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert running() == []
