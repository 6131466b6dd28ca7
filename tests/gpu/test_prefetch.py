"""Prefetching to a GPU: no batch is mixed however slow its consumer and its copy, nobody waits, and nothing is left."""

import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import to_numpy

from flcuda import data, device
from flcuda.data.images import ImageBatch
from flcuda.data.prefetch import PrefetchDataset
from flcuda.data.sample import CudaLink, Link, RingMemory
from flcuda.data.transforms import Augment, Draws
from flcuda.device import DTYPES, Device
from flcuda.errors import FlcudaError

CUDA = Device("cuda", 0)
MS = 1_000_000
SPIN = """
extern "C" __global__ void spin(long long nanoseconds) {
  long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}
"""
_kernels: list[Any] = []


def spin(milliseconds: float) -> None:
    """Keeps the current stream busy, on one multiprocessor."""
    if not _kernels:
        _kernels.append(device.cupy().RawKernel(SPIN, "spin"))
    _kernels[0]((1,), (1,), (np.int64(milliseconds * MS),))


class CountingLink(CudaLink):
    """Counts the bytes that are alive, and makes each copy late."""

    live: Counter[str]
    copy_ms = 0.0

    def pinned(self, nbytes: int) -> Any:
        array = super().pinned(nbytes)
        # What has the memory, which views share, and not the array: base is a view of a pointer to it.
        self._count("pinned", nbytes, array.base.obj.mem)
        return array

    def copy(self, source: Any, target: Any) -> None:
        if self.copy_ms:
            spin(self.copy_ms)  # the copy stream is current
        super().copy(source, target)

    def count_pool(self) -> None:
        """Counts what its allocator takes from CUDA, too."""
        cuda = device.cupy().cuda
        with self.device.use():
            self._pool = cuda.MemoryPool(functools.partial(_block, self.live))
            self._pool.free_all_blocks()

    def _new_memory(self, nbytes: int) -> Any:
        memory = _memory(nbytes)
        self._count("device", nbytes, memory)
        return memory

    def _count(self, kind: str, nbytes: int, memory: Any) -> None:
        self.live[kind] += nbytes
        weakref.finalize(memory, _gone, self.live, kind, nbytes)


def _memory(nbytes: int) -> Any:
    class Memory(device.cupy().cuda.Memory):  # type: ignore[misc]
        """One that can be referred to weakly."""

    return Memory(nbytes)


def _block(live: Counter[str], nbytes: int) -> Any:
    memory = _memory(nbytes)
    live["pool"] += nbytes
    weakref.finalize(memory, _gone, live, "pool", nbytes)
    return device.cupy().cuda.MemoryPointer(memory, 0)


def _gone(live: Counter[str], kind: str, nbytes: int) -> None:
    live[kind] -= nbytes


class Counted(PrefetchDataset):
    """A loader whose links are counted and all forgotten."""

    def __init__(self, dataset: Any, *, copy_ms: float = 0.0, **options: Any) -> None:
        super().__init__(dataset, **{"device": CUDA, **options})
        self.live: Counter[str] = Counter()
        self.links: list[weakref.ref[Link]] = []
        self.streams: list[weakref.ref[Any]] = []
        self._copy_ms = copy_ms

    def _new_link(self) -> Link:
        link = CountingLink(self.device)
        link.live = self.live
        link.count_pool()
        link.copy_ms = self._copy_ms
        self.links.append(weakref.ref(link))
        self.streams.append(weakref.ref(link._copy))
        return link

    def require_clean(self) -> None:
        """No thread, no stream, no byte."""
        assert running() == []
        assert self.memory == RingMemory()
        assert [link() for link in self.links] == [None] * len(self.links)
        assert [stream() for stream in self.streams] == [None] * len(self.streams)
        assert self.live["pinned"] == 0
        assert self.live["device"] == 0
        assert self.live["pool"] == 0


class Stamps:
    """Sample i is many copies of i, more or fewer of them, and i."""

    def __init__(self, count: int, size: int = 200_000, *, varies: bool = True, pause: float = 0.0) -> None:
        self.count = count
        self.size = size
        self.varies = varies
        self.pause = pause

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if self.pause:
            time.sleep(self.pause)
        size = self.size + 20_011 * (7 * index % 11) if self.varies else self.size
        return np.full(size, index, np.int32), np.full(3, index, np.int64)


class OnDevice(Stamps):
    """The same, made on the GPU by the worker, late."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if self.pause:
            time.sleep(self.pause)
        size = self.size + 20_011 * (7 * index % 11) if self.varies else self.size
        result = device.cupy().full(size, -1, np.int32)
        spin(1.0)
        result += index + 1
        return result, np.full(3, index, np.int64)


class Rows:
    """Samples that are many copies of their number, and the number; batches made on the GPU by the worker are late."""

    def __init__(
        self, count: int, size: int = 100_000, *, on_device: bool = True, varies: bool = False, pause: float = 0.0
    ) -> None:
        self.count = count
        self.size = size
        self.on_device = on_device
        self.varies = varies
        self.pause = pause

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        raise AssertionError(index)

    def batch(self, indices: Any, epoch: int) -> tuple[Any, ...]:
        if self.pause:
            time.sleep(self.pause)
        size = self.size + 20_011 * (int(indices[0]) % 11) if self.varies else self.size
        numbers = indices.astype(np.int32)[:, None]
        if not self.on_device:
            return np.repeat(numbers, size, axis=1), indices.copy()
        result = device.cupy().full((len(indices), size), -1, np.int32)
        spin(0.5)
        result += device.cupy().asarray(numbers + 1)
        return result, indices.copy()


class Late:
    """Three times the number, late, by way of memory that goes back to the allocator; or what it was given."""

    def __init__(self, milliseconds: float = 0.0, *, same: bool = False) -> None:
        self.milliseconds = milliseconds
        self.same = same
        self.fails_at = -1
        self.calls = 0
        self.streams: set[Any] = set()

    def parameters(self, batch: Any, draws: Draws) -> Any:
        return draws.indices.astype(np.int32)

    def apply(self, batch: Any, parameters: Any) -> Any:
        self.calls += 1
        self.streams.add(device.cupy().cuda.get_current_stream().ptr)
        double = batch * 2
        spin(self.milliseconds)
        if self.calls == self.fails_at:
            raise ZeroDivisionError("in the transform")
        return batch if self.same else double + parameters[:, None]


def wrong_rows(sample: Any, factor: int = 3) -> Any:
    """Queues a count of what does not belong to a sample of `Rows` by `Late`; read it later."""
    rows, numbers = sample.arrays()
    first = sample.index * len(numbers)
    expected = device.cupy().arange(first, first + len(numbers))
    return (rows != factor * expected[:, None]).sum() + (numbers != expected).sum()


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flcuda prefetch")]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    # Loads its kernel: that may wait for the device.
    spin(0.0)
    yield
    device.synchronize(CUDA)
    assert running() == []


def wrong(sample: Any) -> Any:
    """Queues a count of what does not belong to a sample; read it later."""
    stamps, label = sample.arrays()
    return (stamps != sample.index).sum() + (label != sample.index).sum()


def total(counts: list[Any]) -> int:
    """Waits once: a wait takes long where other processes use the GPU as well."""
    return int(sum(counts))


# --- no batch is mixed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize(("consumer_ms", "copy_ms"), [(3.0, 0.0), (0.0, 3.0), (1.0, 1.0), (0.0, 0.0)])
@pytest.mark.parametrize("own_stream", [False, True])
def test_stamps(depth, workers, consumer_ms, copy_ms, own_stream):
    """A slow consumer, a slow copy, a ring of one, and buffers that grow meanwhile."""
    cupy = device.cupy()
    stream = cupy.cuda.Stream(non_blocking=True) if own_stream else cupy.cuda.Stream.null
    loader = Counted(Stamps(40), depth=depth, workers=workers, copy_ms=copy_ms)
    with stream:
        counts = []
        for sample in loader:
            sample.arrays()
            if consumer_ms:
                spin(consumer_ms)
            counts.append(wrong(sample))
            if sample.index % 3 == 0:
                sample.release()
        assert len(counts) == 40
        assert total(counts) == 0
    del sample
    loader.require_clean()


@pytest.mark.parametrize("depth", [1, 2])
def test_stamps_on_two_streams(depth):
    """Both read a sample, the second one late; the release is on a third."""
    cupy = device.cupy()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    loader = Counted(Stamps(30), depth=depth, workers=2)
    counts = []
    for sample in loader:
        for number, stream in enumerate(streams):
            with stream:
                sample.arrays()
                spin(2.0 * number)
                counts.append(wrong(sample))
    device.synchronize(CUDA)
    assert len(counts) == 60
    assert total(counts) == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_stamps_of_transforms_on_two_streams(depth):
    """The memory of a transform's result goes to what its own stream does next; another still reads it."""
    cupy = device.cupy()
    makes, reads = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    dataset = data.BatchDataset(Stamps(40, varies=False), 1)
    loader = Counted(dataset, depth=depth, workers=2, transforms=(lambda batch, draws: batch + 0,))
    counts = []
    for sample in loader:
        with makes:
            sample.arrays()
        with reads:
            sample.arrays()
            spin(2.0)
            counts.append(wrong(sample))
    device.synchronize(CUDA)
    assert len(counts) == 40
    assert total(counts) == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("consumer_ms", [0.0, 2.0])
def test_stamps_of_what_workers_make_on_the_device(depth, workers, consumer_ms):
    """A quick consumer reads what is still in the making unless the copy waits; a slow one lets workers run ahead."""
    loader = Counted(OnDevice(30), depth=depth, workers=workers)
    counts = []
    for sample in loader:
        sample.arrays()
        if consumer_ms:
            spin(consumer_ms)
        counts.append(wrong(sample))
    assert total(counts) == 0
    assert len(counts) == 30
    del sample
    loader.require_clean()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize(("consumer_ms", "transform_ms"), [(3.0, 0.0), (0.0, 3.0), (1.0, 1.0), (0.0, 0.0)])
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_stamps_of_device_transforms(depth, workers, consumer_ms, transform_ms, own_stream, on_device):
    """A slow consumer, a slow transform, late sources, and sizes that change meanwhile."""
    cupy = device.cupy()
    stream = cupy.cuda.Stream(non_blocking=True) if own_stream else cupy.cuda.Stream.null
    transform = Late(transform_ms)
    dataset = data.BatchDataset(Rows(60, on_device=on_device, varies=True), 2)
    loader = Counted(dataset, depth=depth, workers=workers, transforms=(transform,))
    with stream:
        counts = []
        for sample in loader:
            sample.arrays()
            if consumer_ms:
                spin(consumer_ms)
            counts.append(wrong_rows(sample))
            if sample.index % 3 == 0:
                sample.release()
        assert len(counts) == 30
        assert total(counts) == 0
        assert stream.ptr not in transform.streams
        assert len(transform.streams) == 1
    del sample
    loader.require_clean()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("workers", [0, 3])
def test_stamps_of_device_transforms_on_two_streams(depth, same, workers):
    """Both read a sample, the second one late; the release is on a third, and the last arrays are kept for a while."""
    cupy = device.cupy()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    dataset = data.BatchDataset(Rows(60), 2)
    loader = Counted(dataset, depth=depth, workers=workers, transforms=(Late(0.5, same=same),))
    counts = []
    for sample in loader:
        for number, stream in enumerate(streams):
            with stream:
                kept = sample.arrays()
                spin(2.0 * number)
                counts.append(wrong_rows(sample, 1 if same else 3))
    device.synchronize(CUDA)
    assert len(counts) == 60
    assert total(counts) == 0
    del sample, kept
    loader.require_clean()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_device_transform_and_a_plain_one(workers):
    """The plain one sees its own field, on the consumer's stream."""
    cupy = device.cupy()
    streams = set()

    def negated(batch: Any, draws: Draws) -> Any:
        streams.add(cupy.cuda.get_current_stream().ptr)
        assert (draws.indices == to_numpy(batch)).all()
        return -batch

    loader = Counted(data.BatchDataset(Rows(20), 2), workers=workers, transforms=(Late(0.5), negated))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for sample in loader:
            rows, numbers = sample
            assert (to_numpy(numbers) == [-2 * sample.index, -2 * sample.index - 1]).all()
            assert (to_numpy(rows) == -3 * to_numpy(numbers)[:, None]).all()
        assert streams == {stream.ptr}


def test_stamps_while_memory_is_short():
    """Blocks that CuPy's pool has given out before, and takes back, are not the ring's."""
    cupy = device.cupy()
    counts = []
    for sample in Counted(Stamps(40), depth=2, workers=3):
        scratch = cupy.full(300_000, -1, np.int32)
        counts.append(wrong(sample))
        del scratch
        if sample.index % 10 == 0:
            cupy.get_default_memory_pool().free_all_blocks()
    assert total(counts) == 0


# --- fields -----------------------------------------------------------------------------------------------------------


def test_fields_arrive_as_they_were(rng):
    images = ImageBatch.of([rng.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((5, 7), (1, 3), (20, 2))])
    cupy = device.cupy()
    fields = (
        *(rng.normal(size=(3, 5)).astype(dtype) for dtype in (*DTYPES.values(), np.int64, np.uint8, np.bool_)),
        rng.normal(size=(2, 5, 4, 3)).astype(np.float32).transpose(0, 3, 1, 2),
        rng.normal(size=(4, 6))[:, ::2],
        np.zeros((0, 4), np.float32),
        np.float32(2.5),
        7,
        images,
        ImageBatch(cupy.asarray(images.pixels), images.offsets, images.sizes, 3),
        cupy.arange(10, dtype=np.float32)[::2],
    )

    class Fixed:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[Any, ...]:
            return fields

    device.synchronize(CUDA)
    for sample in Counted(Fixed(), workers=2):
        for before, after in zip(fields, sample, strict=True):
            if isinstance(before, ImageBatch):
                assert after.channels == 3
                for name in ("pixels", "offsets", "sizes"):
                    assert device.device_of(getattr(after, name)) == CUDA
                    np.testing.assert_array_equal(to_numpy(getattr(after, name)), to_numpy(getattr(images, name)))
                continue
            assert device.device_of(after) == CUDA
            wanted = to_numpy(before)
            assert after.shape == wanted.shape
            assert after.dtype == wanted.dtype
            np.testing.assert_array_equal(to_numpy(after), wanted)
        channels_last = sample[7]
        assert device.memory_layout(channels_last) == "nhwc"


def test_augmentation_is_the_cpus(rng):
    photographs = [rng.integers(0, 256, (*rng.integers(20, 60, 2), 3), np.uint8) for _ in range(30)]

    class Photographs:
        def __len__(self) -> int:
            return len(photographs)

        def __getitem__(self, index: int) -> tuple[Any, ...]:
            return photographs[index], index

    augment = Augment(16, brightness=0.2, contrast=0.2, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.2))
    results = []
    for place, workers in (("cpu", 0), ("cuda", 0), ("cuda", 4)):
        dataset = data.BatchDataset(data.ShuffleDataset(Photographs(), seed=1), 7)
        loader = PrefetchDataset(dataset, place, workers=workers, transforms=(augment,), seed=2)
        loader.set_epoch(1)
        results.append([(to_numpy(images), to_numpy(labels)) for images, labels in loader])
    for other in results[1:]:
        for (images, labels), (other_images, other_labels) in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(labels, other_labels)
            # A level of 255, by the smallest deviation.
            np.testing.assert_allclose(images, other_images, atol=1 / 255 / 0.2 + 1e-5)


# --- who waits --------------------------------------------------------------------------------------------------------


def test_the_host_waits_for_no_kernel():
    """While the consumer's stream is busy two more samples are taken, and the next kernels queued behind them."""
    cupy = device.cupy()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        iteration = iter(Counted(Stamps(20, varies=False), depth=2, workers=2))
        counts = [wrong(next(iteration)) for _ in range(6)]  # buffers have their size, kernels are compiled
        cupy.empty(1 << 26, np.uint8)  # for CuPy's pool: to ask the driver for memory may wait
        stream.synchronize()
        spin(2000.0)
        begin = time.monotonic()
        counts += [wrong(next(iteration)) for _ in range(2)]
        taken = time.monotonic() - begin
        busy = not stream.done
        stream.synchronize()
        assert busy, f"taking two samples took {taken:.3f} s and the stream's 2 s"
        assert total(counts) == 0
        iteration.close()


@pytest.mark.parametrize("kind", [Stamps, OnDevice])
@pytest.mark.parametrize("options", [{"null": True}, {}, {"non_blocking": True}], ids=["null", "blocking", "own"])
def test_copies_run_beside_the_consumers_kernels(kind, options):
    """Neither the default stream nor another holds up a sample that is made and copied while it is busy."""
    cupy = device.cupy()
    with cupy.cuda.Stream(**options) as stream:
        iteration = iter(Counted(kind(20, varies=False, pause=0.1), depth=3, workers=1))
        for _ in range(6):
            wrong(next(iteration))
        stream.synchronize()
        spin(2000.0)
        sample = next(iteration)  # loaded, and copied, only now
        deadline = time.monotonic() + 1.5
        while (state := sample.state) != "device" and time.monotonic() < deadline:
            time.sleep(0.001)
        busy = not stream.done
        count = wrong(sample)
        stream.synchronize()
        assert busy
        assert state == "device"
        assert int(count) == 0
        iteration.close()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("options", [{"null": True}, {}, {"non_blocking": True}], ids=["null", "blocking", "own"])
def test_device_transforms_run_beside_the_consumers_kernels(on_device, options):
    cupy = device.cupy()
    with cupy.cuda.Stream(**options) as stream:
        dataset = data.BatchDataset(Rows(40, on_device=on_device, pause=0.1), 2)
        iteration = iter(Counted(dataset, depth=3, workers=1, transforms=(Late(5.0),)))
        for _ in range(6):
            wrong_rows(next(iteration))  # the pools have their blocks
        stream.synchronize()
        spin(2000.0)
        sample = next(iteration)  # loaded, copied and changed only now
        deadline = time.monotonic() + 1.5
        while (state := sample.state) != "device" and time.monotonic() < deadline:
            time.sleep(0.001)
        busy = not stream.done
        count = wrong_rows(sample)
        stream.synchronize()
        assert busy
        assert state == "device"
        assert int(count) == 0
        iteration.close()


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["streamCaptureModeRelaxed", "streamCaptureModeThreadLocal"])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_capture_while_the_loader_augments(mode, on_device, rng):
    """Kernels, allocations and events beside it; the first ones of all while the consumer captures already.

    The first sample is taken after a capture that begins with the threads.
    """
    cupy = device.cupy()
    photographs = [rng.integers(0, 256, (*rng.integers(20, 60, 2), 3), np.uint8) for _ in range(30)]

    class Photographs(Rows):
        def batch(self, indices: Any, epoch: int) -> tuple[Any, ...]:
            images = ImageBatch.of([photographs[i] for i in indices])
            if on_device:
                images = ImageBatch(cupy.asarray(images.pixels), images.offsets, images.sizes, 3)
            return images, indices.copy()

    augment = Augment(16, contrast=0.2, dtype="float16", layout="nhwc")
    loader = Counted(data.BatchDataset(Photographs(30), 3), depth=2, workers=2, transforms=(augment,))
    results, graphs = [], []
    with cupy.cuda.Stream(non_blocking=True) as stream:
        static = cupy.zeros((3, 3, 16, 16), np.float16)
        result = cupy.zeros_like(static)
        cupy.add(static, static, out=result)
        stream.synchronize()
        iteration = iter(loader)
        for step in range(10):
            if step:
                static[...] = next(iteration)[0]
            stream.begin_capture(getattr(cupy.cuda.runtime, mode))
            try:
                cupy.add(static, static, out=result)
                time.sleep(0.02)
            finally:
                graph = stream.end_capture()
            graph.launch(stream)
            graphs.append(graph)
            results.append(result.copy())
        stream.synchronize()
        iteration.close()
    del iteration
    loader.require_clean()
    alone = PrefetchDataset(data.BatchDataset(Photographs(30), 3), CUDA, workers=0, transforms=(augment,))
    expected = [to_numpy(images) for images, _ in alone]
    assert not to_numpy(results[0]).any()
    for got, wanted in zip(results[1:], expected, strict=False):
        np.testing.assert_array_equal(to_numpy(got), wanted + wanted)


@pytest.mark.parametrize("mode", ["streamCaptureModeRelaxed", "streamCaptureModeThreadLocal"])
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_capture_while_the_threads_work(mode, workers, on_device):
    """They allocate, copy, record and wait beside it, for buffers grow; the graph has none of that."""
    cupy = device.cupy()
    kind = OnDevice if on_device else Stamps
    loader = Counted(kind(40, 1000, pause=0.001), depth=2, workers=workers)
    static = cupy.zeros(1000, np.int32)
    result = cupy.zeros(1000, np.int32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cupy.multiply(static, 3, out=result)
        kind(1, 1000)[0]  # loads the worker's kernels, too
        device.synchronize(CUDA)
        results = []
        graphs = []  # none is destroyed while it may run
        for sample in loader:
            static[...] = sample[0][:1000]
            stream.begin_capture(getattr(cupy.cuda.runtime, mode))
            try:
                cupy.multiply(static, 3, out=result)
                time.sleep(0.005)
                cupy.multiply(result, 2, out=result)
            finally:
                graph = stream.end_capture()
            graph.launch(stream)
            graphs.append(graph)
            results.append(result.copy())
        stream.synchronize()
        assert len(results) == 40
        for index, copied in enumerate(results):
            assert (to_numpy(copied) == 6 * index).all()
    del sample
    loader.require_clean()


def test_what_is_refused_within_a_capture_leaves_it_whole():
    cupy = device.cupy()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        static = cupy.zeros(1000, np.int32)
        static += 1
        iteration = iter(Counted(Stamps(5), workers=2))
        sample = next(iteration)
        stream.begin_capture()
        try:
            static += 1
            with pytest.raises(FlcudaError, match="before the capture"):
                sample.arrays()
            assert sample.state == "in transit"
        finally:
            graph = stream.end_capture()
        arrays = sample.arrays()
        stream.begin_capture()
        try:
            assert sample.arrays() is arrays
            with pytest.raises(FlcudaError, match="captures a graph"):
                sample.release()
            with pytest.raises(FlcudaError, match="captures a graph"):
                next(iteration)
            static += 1
        finally:
            second = stream.end_capture()
        graph.launch(stream)
        second.launch(stream)
        stream.synchronize()
        assert (to_numpy(static) == 3).all()
        assert next(iteration).index == 1
        iteration.close()


def test_closing_while_a_stream_captures():
    cupy = device.cupy()
    loader = Counted(Stamps(50), workers=2)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        static = cupy.zeros(1000, np.int32)
        static += 1
        iteration = iter(loader)
        sample = next(iteration)
        sample.arrays()
        stream.begin_capture()
        try:
            static += 1
            iteration.close()
        finally:
            graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        assert (to_numpy(static) == 2).all()
    del iteration
    loader.require_clean()


# --- what is left -----------------------------------------------------------------------------------------------------


def leave_by_break(loader: PrefetchDataset) -> None:
    for sample in loader:
        wrong(sample)
        spin(1.0)
        if sample.index == 3:
            break


def leave_by_exception(loader: PrefetchDataset) -> None:
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the loop is what is left
        for sample in loader:
            wrong(sample)
            1 // (3 - sample.index)


def leave_by_letting_go(loader: PrefetchDataset) -> None:
    sample = next(iter(loader))  # not within the assertion: pytest keeps the iteration there
    assert sample.state == "released"


def leave_before_the_first(loader: PrefetchDataset) -> None:
    iter(loader)


def leave_by_close(loader: PrefetchDataset) -> None:
    with iter(loader) as iteration:
        wrong(next(iteration))
        next(iteration)


def leave_by_ctrl_c(loader: PrefetchDataset) -> None:
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for sample in loader:
            wrong(sample)
            time.sleep(0.02)
    timer.join()


def leave_a_cycle(loader: PrefetchDataset) -> None:
    cycle: list[Any] = [iter(loader)]
    cycle.append(cycle)
    next(cycle[0])
    del cycle
    gc.collect()


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_exception,
        leave_by_letting_go,
        leave_before_the_first,
        leave_by_close,
        leave_by_ctrl_c,
        leave_a_cycle,
    ],
)
@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("depth", [1, 3])
def test_leaving_early_frees_everything(leave: Callable[[PrefetchDataset], None], workers: int, depth: int):
    loader = Counted(Stamps(1000), workers=workers, depth=depth, copy_ms=1.0)
    for _ in range(3):
        leave(loader)
        gc.collect()  # the traceback that pytest has kept
        loader.require_clean()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_data_set_frees_everything(workers):
    class Broken(Stamps):
        def __getitem__(self, index: int) -> tuple[Any, ...]:
            if index == 7:
                raise OSError("gone")
            return super().__getitem__(index)

    loader = Counted(Broken(20), workers=workers)
    counts = []
    with pytest.raises(OSError, match="gone") as caught:
        counts.extend(wrong(sample) for sample in loader)
    assert caught.value.__notes__ == ["while sample 7 of epoch 0 of a Broken was loaded"]
    assert len(counts) == 7
    assert total(counts) == 0
    del caught
    gc.collect()
    loader.require_clean()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_device", [False, True])
def test_an_error_of_a_device_transform_frees_everything(workers, on_device):
    transform = Late(1.0)
    transform.fails_at = 8
    loader = Counted(
        data.BatchDataset(Rows(40, on_device=on_device), 2), workers=workers, transforms=(transform,)
    )  # fmt: skip
    counts = []
    with pytest.raises(ZeroDivisionError, match="in the transform") as caught:
        counts.extend(wrong_rows(sample) for sample in loader)
    assert caught.value.__notes__ == [
        "while transforms[0] changed field 0 of sample 7 of epoch 0: a batch of samples 14, 15",
        "while sample 7 of epoch 0 of a BatchDataset was loaded: a batch of samples 14, 15",
    ]
    assert len(counts) == 7
    assert total(counts) == 0
    del caught
    gc.collect()
    loader.require_clean()


@pytest.mark.parametrize("leave", [leave_by_letting_go, leave_before_the_first, leave_by_ctrl_c, leave_a_cycle])
@pytest.mark.parametrize("workers", [0, 3])
def test_leaving_device_transforms_early_frees_everything(leave, workers):
    dataset = data.BatchDataset(Rows(400), 2)
    loader = Counted(dataset, workers=workers, transforms=(Late(1.0),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "wrong", wrong_rows)
        for _ in range(3):
            leave(loader)
            gc.collect()
            loader.require_clean()


def host_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


@pytest.mark.parametrize("on_device", [False, True])
def test_memory_is_flat_over_20_epochs(on_device):
    """Host, pinned and device; the arrays of an epoch's last sample are kept into the next one, as a loop does."""
    cupy = device.cupy()
    kind = OnDevice if on_device else Stamps
    loader = Counted(kind(12, 2_000_000), depth=2, workers=3)
    pool, pinned_pool = cupy.get_default_memory_pool(), cupy.get_default_pinned_memory_pool()
    free_before = pinned_pool.n_free_blocks()
    pools, hosts = [], []
    largest = 4 * (2_000_000 + 20_011 * 10) + 512
    most = 2 * (largest * 9 // 8 + 65536)
    for _ in range(20):
        for stamps, _labels in loader:
            memory = loader.memory
            assert memory.pinned <= most
            assert memory.device <= most
            assert loader.live["pinned"] <= most
            # A buffer of the epoch before may be left.
            assert loader.live["device"] <= most + most // 2
            assert stamps.nbytes <= largest
        assert loader.live["pinned"] == 0
        gc.collect()
        pools.append(pool.total_bytes())
        hosts.append(host_mib())
    assert max(pools[5:]) <= max(pools[:5])
    assert max(hosts[10:]) - max(hosts[:10]) < 32
    assert pinned_pool.n_free_blocks() <= free_before + 1  # labels and the like that CuPy copied by itself
    del stamps, _labels
    loader.require_clean()


@pytest.mark.parametrize("on_device", [False, True])
def test_memory_of_device_transforms_is_flat_over_20_epochs(on_device):
    """The rows of an epoch's last sample are kept into the next one, as a loop does, and their pool with them."""
    cupy = device.cupy()
    size = 2_000_000
    loader = Counted(
        data.BatchDataset(Rows(24, size, on_device=on_device), 2), depth=2, workers=3, transforms=(Late(),)
    )  # fmt: skip
    nbytes = 2 * 4 * size
    pool = cupy.get_default_memory_pool()
    pools, used = [], []
    for _ in range(20):
        for rows, _numbers in loader:
            memory = loader.memory
            buffers = 2 * (65536 if on_device else nbytes * 9 // 8 + 65536)
            # Two slots' results, one more that this loop has, and what the transform lets go of.
            assert memory.device <= buffers + 4 * (nbytes + 512)
            assert memory.kept <= (2 * nbytes if on_device else 0)
            assert rows.nbytes == nbytes
        assert loader.memory == RingMemory()
        gc.collect()
        pools.append(pool.total_bytes())
        used.append(loader.live["pool"])
    assert max(pools[5:]) <= max(pools[:5])
    # The rows that this loop has, in a block that may have had more.
    assert nbytes <= min(used)
    assert max(used) <= 2 * (nbytes + 512)
    # What is kept beyond the end is whole, and is given back with the last of it.
    part = rows[1:, ::2]
    del rows, _numbers
    assert (to_numpy(part) == 3 * 23).all()
    del part
    gc.collect()
    assert loader.live["pool"] == 0
    loader.require_clean()


def test_many_short_epochs_leave_no_stream():
    loader = Counted(Stamps(2, 1000), workers=2)
    for _ in range(200):
        for sample in loader:
            sample.arrays()
    del sample
    loader.require_clean()
    assert len(loader.streams) == 200


def test_beyond_the_end_of_the_loader():
    """Arrays that are kept are memory of their own, and no more than that."""
    loader = Counted(Stamps(3), workers=2)
    for sample in loader:
        kept, _ = sample
    del sample
    live = loader.live
    links = loader.links
    del loader, _
    assert running() == []
    assert [link() for link in links] == [None]
    assert live["pinned"] == 0
    assert 0 < live["device"] <= 2_000_000
    assert (to_numpy(kept) == 2).all()
    del kept
    assert live["device"] == 0


def test_a_sample_too_large_for_the_device_is_named():
    cupy = device.cupy()
    free, _ = cupy.cuda.runtime.memGetInfo()

    class Huge(CudaLink):
        def _new_memory(self, nbytes: int) -> Any:
            return super()._new_memory(nbytes if nbytes < 1 << 20 else 2 * free)

    class ToHuge(PrefetchDataset):
        def _new_link(self) -> Link:
            return Huge(self.device)

    class Growing(Stamps):
        def __getitem__(self, index: int) -> tuple[Any, ...]:
            return (np.full(10 if index < 3 else 1 << 20, index, np.uint8),)

    served = []
    with pytest.raises(MemoryError, match=r"cuda:0 has no room for a slot of 1\.\d MiB") as caught:
        served.extend(sample.index for sample in ToHuge(Growing(6), CUDA, depth=1, workers=2))
    assert served == [0, 1, 2]
    assert caught.value.__notes__ == ["while sample 3 of epoch 0 of a Growing was loaded"]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_interpreter_ends_in_the_middle_of_an_epoch(workers):
    program = f"""
import numpy as np
from flcuda.data.prefetch import PrefetchDataset

class Stamps:
    def __len__(self):
        return 50

    def __getitem__(self, index):
        return np.full(200_000, index, np.int32), index

iteration = iter(PrefetchDataset(Stamps(), "cuda", workers={workers}))
kept = next(iteration).arrays()
sample = next(iteration)
print(int(sample[1]))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"
    assert "Exception ignored" not in done.stderr
    assert "Traceback" not in done.stderr
