"""Samples and the ring of buffers, on a device that runs what is queued as late as it may."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from link_fakes import Event, FakeLink, Pool, Resident, memory_of

from flcuda.data.images import ImageBatch
from flcuda.data.sample import Ring, RingMemory, Sample, Slot
from flcuda.errors import FlcudaError

DTYPES = (np.uint8, np.int32, np.int64, np.float16, np.float32, np.float64, np.bool_, np.complex64, ml_dtypes.bfloat16)


def send(ring: Ring, index: int, *fields: object) -> Sample:
    """Takes a sample through its slot."""
    sample = Sample(index, 0, ring.link)
    slot = ring.slot(index)
    if ring.link is None:
        slot.stage(sample, fields)
        return slot.send()
    with ring.link.use():
        slot.stage(sample, fields)
        return slot.send()


def stamped(index: int, size: int = 1000) -> np.ndarray:
    return np.full(size, index, np.int32)


@pytest.mark.parametrize("on_device", [True, False])
def test_fields_arrive_as_they_were(on_device, rng):
    ring = Ring(FakeLink(eager=True) if on_device else None, 1)
    images = ImageBatch.of([rng.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((5, 7), (1, 3), (20, 2))])
    plain = [rng.normal(size=(3, 5)).astype(dtype) for dtype in DTYPES]
    fields = [*plain, images, np.int64(7), 3.5, np.zeros((0, 4), np.float32), np.array(2, ml_dtypes.bfloat16)]
    sample = send(ring, 0, *fields)
    arrived = sample.arrays()
    assert len(sample) == len(arrived) == len(fields)
    for before, after in zip(fields, arrived, strict=True):
        if before is images:
            assert after.channels == 3
            for i in range(len(images)):
                np.testing.assert_array_equal(after.image(i), images.image(i))
            continue
        assert after.shape == np.shape(before)
        assert after.dtype == np.asarray(before).dtype
        np.testing.assert_array_equal(after, before)
    first, *_ = sample
    assert first is arrived[0] is sample[0]


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.transpose(0, 3, 1, 2),  # channels last in memory
        lambda a: a[:, ::2],
        lambda a: a[::-1],
        lambda a: a.T,
        lambda a: a.astype(">f4"),
        lambda a: np.broadcast_to(a[:1], a.shape),
    ],
)
def test_any_strides_and_byte_order(view, rng):
    ring = Ring(FakeLink(eager=True), 1)
    array = view(rng.normal(size=(4, 6, 5, 3)).astype(np.float32))
    (after,) = send(ring, 0, array).arrays()
    np.testing.assert_array_equal(after, array)
    assert after.dtype == np.float32


def test_channels_last_stays_channels_last(rng):
    link = FakeLink(eager=True)
    ring = Ring(link, 1)
    array = rng.normal(size=(2, 5, 4, 3)).transpose(0, 3, 1, 2)
    copied = []
    copy_resident = link.copy_resident
    link.copy_resident = lambda *pair: (copied.append(pair), copy_resident(*pair))  # type: ignore[method-assign]
    for after in send(ring, 0, array, array.view(Resident)).arrays():
        assert after.strides == array.strides
        np.testing.assert_array_equal(after, array)
    (pair,) = copied
    assert all(each.flags.c_contiguous for each in pair)  # no kernel is needed


def test_fields_on_the_device_are_copied_there_in_stream_order():
    link = FakeLink(1)
    ring = Ring(link, 2)
    seen = []
    for index in range(6):
        sample = send(ring, index, stamped(index).view(Resident), stamped(-index), stamped(index, 3).view(Resident))
        for array in sample.arrays():
            link.launch(lambda array=array: seen.append(set(array.tolist())))
        sample.release()
    link.drain()
    assert seen == [{value} for i in range(6) for value in (i, -i, i)]
    assert link.copies == 6  # one for what was on the host


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("a.jpg", "field 1 must be an array, an ImageBatch or a number, not str"),
        ({"a": 1}, "field 1 must be an array, an ImageBatch or a number, not dict"),
        (np.array(["a"]), "field 1 must be numbers, not <U1"),
        (np.array([object()]), "field 1 must be numbers, not object"),
        (None, "not NoneType"),
    ],
)
def test_other_fields_are_named(index, field, message):
    ring = Ring(FakeLink() if index else None, 1)
    with pytest.raises(TypeError, match=message):
        send(ring, 0, np.zeros(3), field)


def test_states():
    link = FakeLink()
    ring = Ring(link, 1)
    sample = Sample(4, 2, link)
    assert sample.state == "host"
    with pytest.raises(FlcudaError, match="sample 4 is still on the host"):
        sample.arrays()
    with link.use():
        ring.slot(4).stage(sample, [stamped(4)])
        assert sample.state == "host"
        ring.slot(4).send()
    assert sample.state == "in transit"
    link.drain()
    assert sample.state == "device"
    assert repr(sample) == "<Sample 4 of epoch 2: device>"
    sample.release()
    assert sample.state == "released"
    sample.release()


@pytest.mark.parametrize("on_device", [True, False])
def test_reading_after_the_release_is_an_error(on_device):
    ring = Ring(FakeLink() if on_device else None, 2)
    sample = send(ring, 3, stamped(3))
    sample.arrays()
    sample.release()
    for read in (sample.arrays, lambda: list(sample), lambda: sample[0], lambda: len(sample)):
        with pytest.raises(FlcudaError, match="sample 3 of epoch 0 was released"):
            read()


def test_a_slot_that_is_held_takes_no_other_sample():
    link = FakeLink()
    ring = Ring(link, 1)
    first = send(ring, 0, stamped(0))
    with pytest.raises(FlcudaError, match="not free"):
        send(ring, 1, stamped(1))
    first.release()
    ring.slot(1).send()


def test_the_host_waits_for_nothing_but_the_pinned_buffer():
    link = FakeLink()
    waits = []
    link.wait = waits.append  # type: ignore[method-assign]
    ring = Ring(link, 2)
    for index in range(2):
        sample = send(ring, index, stamped(index))
        sample.arrays()
        sample.release()
    assert waits == []
    link.wait = lambda event: (waits.append(event), FakeLink.wait(link, event))  # type: ignore[method-assign]
    send(ring, 2, stamped(2)).arrays()
    assert len(waits) == 1


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    depth=st.integers(1, 4),
    sizes=st.lists(st.integers(0, 50_000), min_size=1, max_size=20),
    streams=st.integers(1, 3),
    speed=st.sampled_from([0.0, 0.3, 0.9]),
)
def test_what_is_queued_reads_its_own_sample(seed, depth, sizes, streams, speed):
    """However late copies and kernels run, on however many streams, and while the buffers grow."""
    link = FakeLink(seed, speed=speed)
    ring = Ring(link, depth)
    consumers = [link.new_stream(f"consumer {i}") for i in range(streams)]
    seen = []
    for index, size in enumerate(sizes):
        sample = send(ring, index, stamped(index, size), stamped(-index, 3))
        for stream in consumers[: 1 + index % streams]:
            with link.on(stream):
                large, small = sample.arrays()
                link.launch(lambda i=index, a=large, b=small: seen.append((i, set(a.tolist()), set(b.tolist()))))
        sample.release()
    link.drain()
    expected = [(i, {i} if size else set(), {-i}) for i, size in enumerate(sizes) for _ in range(1 + i % streams)]
    assert sorted(seen, key=lambda row: row[0]) == expected
    ring.close()


def test_growth_is_bounded_and_told():
    link = FakeLink(eager=True)
    ring = Ring(link, 2)
    assert ring.memory == RingMemory(2, 0, 0, 0)
    mib = 1 << 20
    for index, size in enumerate((mib, mib, 2 * mib, mib + mib // 8, 2 * mib, mib // 2)):
        send(ring, index, np.zeros(size, np.uint8)).release()
    memory = ring.memory
    assert memory.largest == 2 * mib
    # The slot of samples 0, 2 and 4 has grown, the other had room for one that is a little larger than its first.
    assert memory.device == memory.pinned == (2 * mib + mib) * 9 // 8
    assert memory.device == link.live["device"]
    assert memory.pinned == link.live["pinned"]
    # The old buffer goes before the new one comes.
    assert link.peak["device"] == memory.device
    assert str(memory) == "2 slots: 3.4 MiB pinned, 3.4 MiB on the device; largest sample 2.0 MiB"
    ring.close()
    assert link.live == {"device": 0, "pinned": 0}
    assert link.closed == 1
    ring.close()
    assert link.closed == 1


def test_close_waits_for_reads_and_releases():
    link = FakeLink()
    ring = Ring(link, 2)
    seen = []
    samples = [send(ring, index, stamped(index)) for index in range(2)]
    (array,) = samples[0].arrays()
    link.launch(lambda: seen.append(set(array.tolist())))
    ring.close()
    assert seen == [{0}]
    assert [sample.state for sample in samples] == ["released", "released"]
    assert link.live["pinned"] == 0


def test_close_while_a_stream_captures():
    link = FakeLink()
    ring = Ring(link, 1)
    stream = link.new_stream("capturing")
    with link.on(stream):
        send(ring, 0, stamped(0)).arrays()
        stream.capturing = True
    ring.close()
    assert link.live["pinned"] == 0


def test_nothing_is_first_read_or_released_within_a_capture():
    link = FakeLink()
    ring = Ring(link, 1)
    stream = link.new_stream("capturing")
    sample = send(ring, 0, stamped(0))
    with link.on(stream):
        stream.capturing = True
        assert sample.state == "in transit"
        with pytest.raises(FlcudaError, match="call arrays\\(\\) under this stream before the capture"):
            sample.arrays()
        stream.capturing = False
        arrays = sample.arrays()
        stream.capturing = True
        assert sample.arrays() is arrays
        with pytest.raises(FlcudaError, match="sample 0 cannot be released while a stream of it captures"):
            sample.release()
    # Another stream may be current.
    with pytest.raises(FlcudaError, match="captures"):
        sample.release()
    assert sample.arrays() is arrays
    stream.capturing = False
    sample.release()


def test_transforms_run_once_and_other_streams_wait_for_them():
    link = FakeLink(3)
    calls = []

    def finish(fields):
        calls.append(link.stream().name)
        result = np.zeros(5)
        link.launch(lambda: np.copyto(result, fields[0][0] + 0.5))
        return [result]

    ring = Ring(link, 1)
    for index in range(20):
        sample = Sample(index, 0, link, finish)
        with link.use():
            ring.slot(index).stage(sample, [stamped(index)])
            ring.slot(index).send()
        seen = []
        with link.on(link.new_stream("first")):
            sample.arrays()
        with link.on(link.new_stream("second")):
            (array,) = sample.arrays()
            link.launch(lambda array=array, seen=seen: seen.append(array.tolist()))
        sample.release()
        link.drain()
        assert seen == [[index + 0.5] * 5]
    assert calls == ["first"] * 20


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("leaves", [False, True])
def test_what_transforms_made_stays_until_the_last_stream_has_read_it(seed, leaves):
    """Its memory is used again in the order of the stream that made it, and the other stream is late."""
    link = FakeLink(seed)
    pool = Pool()
    seen = []

    def finish(fields):
        array, memory = pool.empty(5, link.stream())
        field = fields[0]
        link.launch(lambda: np.copyto(memory, field[:5]))
        return [array]

    ring = Ring(link, 3)
    makes, reads = link.new_stream("makes"), link.new_stream("reads")
    for index in range(9):
        sample = Sample(index, 0, link, finish)
        with link.use():
            ring.slot(index).stage(sample, [stamped(index)])
            ring.slot(index).send()
        with link.on(makes):
            sample.arrays()
        with link.on(reads):
            (array,) = sample.arrays()
            memory = array.view(np.ndarray)
            link.launch(lambda memory=memory, index=index: seen.append((index, set(memory.tolist()))))
            del array
            sample._abandon() if leaves else sample.release()
    link.drain()
    assert seen == [(index, {index}) for index in range(9)]


class Ahead:
    """Makes of the first field ten times it, late, on the copy stream; or hands it on."""

    def __init__(self, link: FakeLink, way: str = "own") -> None:
        self.link = link
        self.way = way

    def __call__(self, fields):
        first, *others = fields
        assert self.link.stream() is self.link.copy_stream
        if self.way == "same":
            return fields
        if self.way == "part":
            return [first[1:], *others]
        result, memory = self.link.empty(len(first))
        source = memory_of(first)
        self.link.launch(lambda: np.multiply(source, 10, out=memory))
        return [result, *others]


def send_ahead(ring: Ring, index: int, ahead: Ahead, *fields: object) -> Sample:
    sample = Sample(index, 0, ring.link, ahead=ahead, taken=(0,))
    link = ring.link
    with link.use(ahead.link.streams[2]):
        ring.slot(index).stage(sample, fields)
    with link.use():
        return ring.slot(index).send()


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1),
    depth=st.integers(1, 3),
    way=st.sampled_from(["own", "same", "part"]),
    on_device=st.booleans(),
    streams=st.integers(1, 2),
    habit=st.sampled_from(["release", "abandon", "keep"]),
    speed=st.sampled_from([0.0, 0.3, 0.9]),
)
def test_what_is_made_ahead_is_its_samples_until_the_last_reader_is_done(
    seed, depth, way, on_device, streams, habit, speed
):
    """Late kernels of workers, of the copy stream and of readers; memory that is used again as soon as it may be."""
    link = FakeLink(seed, speed=speed)
    worker, sources = link.new_stream("worker"), Pool()
    assert link.streams[2] is worker
    ring = Ring(link, depth)
    consumers = [link.new_stream(f"consumer {i}") for i in range(streams)]
    ahead = Ahead(link, way)
    seen = []
    kept = None
    for index in range(1, 14):
        field = np.full(8, index, np.int32)
        if on_device:
            field, memory = sources.empty(8, worker)
            with link.on(worker):
                link.launch(lambda memory=memory, index=index: memory.fill(index))
            del memory
        sample = send_ahead(ring, index, ahead, field, stamped(-index, 3))
        del field
        for stream in consumers[: 1 + index % streams]:
            with link.on(stream):
                large, small = sample.arrays()
                a, b = memory_of(large), memory_of(small)
                link.launch(lambda i=index, a=a, b=b: seen.append((i, set(a.tolist()), set(b.tolist()))))
                if habit == "keep":
                    kept = large
                del large, small
        sample._abandon() if habit == "abandon" else sample.release()
    link.drain()
    factor = 10 if way == "own" else 1
    expected = [(i, {factor * i}, {-i}) for i in range(1, 14) for _ in range(1 + i % streams)]
    assert sorted(seen, key=lambda row: row[0]) == expected
    assert link.resident_copies == 0
    # As many results as slots, and one more that is kept.
    assert link.allocated() <= (depth + 1) * 32
    assert sources.nbytes <= (2 * depth + 1) * 32
    ring.close()
    del kept


def test_a_sample_is_made_ahead_while_the_readers_of_those_before_are_at_work():
    link = FakeLink(2)
    link.new_stream("worker")
    ring = Ring(link, 3)
    ahead = Ahead(link)
    stuck = Event()
    with link.on(link.new_stream("consumer")):
        first = send_ahead(ring, 0, ahead, stamped(0))
        first.arrays()
        link.follow(stuck, link.stream())
        first.release()
        for index in (1, 2):
            # The slots of these are free, whatever has just been released.
            link.wait(send_ahead(ring, index, ahead, stamped(index))._ready)
        sent = send_ahead(ring, 3, ahead, stamped(3))
        with pytest.raises(AssertionError, match="waits for ever"):
            link.wait(sent._ready)
        assert sent.state == "in transit"
        stuck.done = True
        link.wait(sent._ready)
        assert set(sent.arrays()[0].tolist()) == {30}


def test_what_is_taken_where_it_is_has_no_place_in_the_slot_and_is_told():
    link = FakeLink(eager=True)
    link.new_stream("worker")
    ring = Ring(link, 1)
    mib = 1 << 20
    large = np.zeros(mib, np.int32).view(Resident)
    sample = send_ahead(ring, 0, Ahead(link), large, np.zeros(mib, np.uint8))
    memory = ring.memory
    assert link.live["device"] == mib * 9 // 8
    assert memory.device == mib * 9 // 8 + 4 * mib
    assert memory.kept == 4 * mib
    assert memory.largest == 5 * mib
    assert str(memory).endswith("5.1 MiB on the device, 4.0 MiB of the data set's; largest sample 5.0 MiB")
    sample.release()
    ring.close()
    assert ring.memory == RingMemory()


def test_fields_that_ahead_does_not_take_are_copied():
    """Images of which only the pixels are on the device, too."""
    link = FakeLink(eager=True)
    link.new_stream("worker")
    ring = Ring(link, 1)
    images = ImageBatch.of([np.full((2, 3, 3), value, np.uint8) for value in (5, 6)])
    pixels = images.pixels.view(Resident)
    given = []

    def ahead(fields):
        given.extend(fields)
        return [fields[0].pixels.copy(), fields[1]]

    ahead.link = link
    other = stamped(4).view(Resident)
    sample = send_ahead(ring, 0, ahead, ImageBatch(pixels, images.offsets, images.sizes, 3), other)
    assert given[0].pixels is pixels
    assert [image[0, 0, 0] for image in given[0].images()] == [5, 6]
    assert link.resident_copies == 1
    result, copied = sample.arrays()
    np.testing.assert_array_equal(result, pixels)
    assert not np.may_share_memory(copied, other)
    np.testing.assert_array_equal(copied, other)


def test_an_error_ahead_leaves_what_is_queued_its_memory():
    link = FakeLink(3)
    worker, sources = link.new_stream("worker"), Pool()
    ring = Ring(link, 2)
    seen = []

    def ahead(fields):
        source = memory_of(fields[0])
        link.launch(lambda: seen.append(set(source.tolist())))
        raise ZeroDivisionError("in the transform")

    ahead.link = link
    field, memory = sources.empty(8, worker)
    with link.on(worker):
        link.launch(lambda: memory.fill(7))
    with pytest.raises(ZeroDivisionError, match="in the transform"):
        send_ahead(ring, 0, ahead, field)
    del field
    with link.on(worker):
        _other, again = sources.empty(8, worker)
        link.launch(lambda: again.fill(8))
    ring.close()
    assert seen == [{7}]
    assert link.live["pinned"] == 0


def test_a_slot_without_a_sample_sends_nothing():
    with pytest.raises(FlcudaError, match="nothing to send"):
        Slot(FakeLink()).send()


def test_a_released_sample_is_still_something():
    ring = Ring(None, 1)
    sample = send(ring, 0, stamped(0))
    assert sample
    sample.release()
    assert sample
    with pytest.raises(FlcudaError, match="was released"):
        len(sample)
