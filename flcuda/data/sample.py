"""A sample on its way to the device, and the ring of buffers that it travels in.

A `Ring` has a few slots, each with one pinned and one device buffer that are used again and again. A sample passes a
slot in three steps, each by another thread of the prefetcher:

- `stage` (a worker): the fields of the host are written into the pinned buffer, once the copy before has left it. Those
  of the device may still be in the making, on the worker's current stream.
- `send` (one thread for all slots): both are copied into the device buffer on the one copy stream, which first waits
  for the worker's stream, and for what the readers of the sample before had queued when they released it. There, too,
  `ahead` makes of what arrived what the consumer sees. It takes fields of the device where they are, without a copy.
- `Sample.arrays` (the consumer): the consumer's current stream waits for all of that; the host does not.

Workers have streams of their own: on the copy stream what they make on the device would wait for the readers. So the
copy stream does not order what they allocate next after the copies, and their fields are kept until those are done, and
`ahead` with them.

What `ahead` makes is allocated in the copy stream's order. Its slot keeps it, whoever else lets go of it, until that
stream waits for the last readers: before the next sample of the slot is sent. Not at the release, or all other samples
would wait for the readers of this one.

Buffers never move on before an event says so, and events wait on the device. The host waits in `stage` only, for what
was queued when that slot's last sample was sent.

What the ring needs of CUDA is the `Link`; without one (the CPU device) fields are handed over as they are.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from flcuda import device as devices
from flcuda.data.images import ImageBatch
from flcuda.device import Array, Device
from flcuda.errors import FlcudaError

# Fields begin at multiples of so many bytes, as allocations do.
_ALIGNMENT = 256
# Buffers have an eighth more than is needed: batches of images differ a little in size, and to free a buffer and to
# allocate a larger one keeps the device from working.
_HEADROOM = 8
_GRANULE = 1 << 16
_MIB = float(1 << 20)
_CUDA_ERROR_MEMORY_ALLOCATION = 2
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

Finish = Callable[[list[Any]], Sequence[Any]]
"""What makes other fields of those that arrived, on the current stream: the copy stream, or the consumer's."""


class Link(Protocol):
    """The way to a device: page-locked and device memory, one copy stream, others to load on, and events.

    Streams and events are opaque; a stream is hashable. `stream` and `follow` are called by consumers, everything else
    inside of `use`.
    """

    device: Device

    def use(self, stream: Any = None) -> AbstractContextManager[Any]:
        """Makes the device and a stream, by default the copy stream, this thread's current ones.

        With the copy stream comes an allocator in its order, whose arrays may outlive the link.
        """
        ...

    def new_stream(self) -> Any:
        """Returns a stream to load on, which waits for no other and no other for it; may be called outside of `use`."""
        ...

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocates page-locked host memory, which is freed with the array."""
        ...

    def memory(self, nbytes: int) -> Array:
        """Allocates device memory, uint8 (nbytes,), which is freed with the array."""
        ...

    def allocated(self) -> int:
        """Returns the bytes that the copy stream's allocator holds; may be called outside of `use`."""
        ...

    def is_resident(self, a: object) -> bool:
        """Says whether an array is in the device's memory already."""
        ...

    def copy(self, source: NDArray[np.uint8], target: Array) -> None:
        """Queues a copy from page-locked to device memory on the copy stream."""
        ...

    def copy_resident(self, source: Array, target: Array) -> None:
        """Queues a copy from device memory to device memory on the copy stream."""
        ...

    def stream(self) -> Any:
        """Returns the calling thread's current stream of the device."""
        ...

    def is_capturing(self, stream: Any) -> bool:
        """Says whether a graph is captured where work on this stream would end up in it, or break it."""
        ...

    def record(self, stream: Any = None) -> Any:
        """Returns an event after all that is queued on a stream, by default the copy stream."""
        ...

    def follow(self, event: Any, stream: Any = None) -> None:
        """Makes a stream, by default the copy stream, wait for an event."""
        ...

    def wait(self, event: Any) -> None:
        """Makes the host wait for an event."""
        ...

    def is_done(self, event: Any) -> bool:
        """Says whether an event has happened."""
        ...

    def finish(self) -> None:
        """Makes the host wait for the copy stream."""
        ...

    def close(self) -> None:
        """Gives the streams back, and the memory that was allocated in their order."""
        ...


class CudaLink:
    """The link to a CUDA device by CuPy, with streams of its own.

    The buffers are neither of CuPy's pools. A pool would keep page-locked memory for ever, and device memory in the
    order of a stream that is no more when a consumer lets go of its last arrays. For the same reason what is allocated
    on the copy stream is of a pool of its own, which goes with the link and the last of its arrays.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._cuda = devices.cupy().cuda
        with device.use():
            # Non-blocking: the legacy default stream, on which consumers work by default, must not wait for copies.
            self._copy = self._cuda.Stream(non_blocking=True)
            self._pool = self._cuda.MemoryPool()
            # Makes the device's part of it now, and not on two threads at once.
            self._pool.free_all_blocks()
        # To load on, each with what allocates in its order: a thread may have an allocator of its own.
        self._others: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def use(self, stream: Any = None) -> Iterator[None]:
        """Makes the device and a stream, by default the copy stream, this thread's current ones."""
        allocator = contextlib.nullcontext() if stream is not None else self._cuda.using_allocator(self._allocate)
        with self.device.use(), self._copy if stream is None else stream, allocator:
            yield

    def _allocate(self, nbytes: int) -> Any:
        try:
            block = self._pool.malloc(nbytes)
        except MemoryError:
            # Perhaps CuPy's pool has it and does not need it.
            devices.cupy().get_default_memory_pool().free_all_blocks()
            block = self._pool.malloc(nbytes)
        # Blocks of a pool do not keep it, and are gone with it.
        memory = self._cuda.UnownedMemory(block.ptr, nbytes, (block, self._pool), self.device.index)
        return self._cuda.MemoryPointer(memory, 0)

    def allocated(self) -> int:
        """Returns the bytes that the copy stream's allocator holds; may be called outside of `use`."""
        with self.device.use():
            return int(self._pool.total_bytes())

    def new_stream(self) -> Any:
        """Returns a stream to load on, which waits for no other and no other for it; may be called outside of `use`."""
        with self.device.use():
            stream = self._cuda.Stream(non_blocking=True)
        self._others.append((stream, self._cuda.get_allocator()))
        return stream

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocates page-locked host memory, which is freed with the array."""
        memory = self._cuda.PinnedMemory(nbytes, self._cuda.runtime.hostAllocPortable)
        return np.frombuffer(self._cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes)

    def memory(self, nbytes: int) -> Array:
        """Allocates device memory, uint8 (nbytes,), which is freed with the array; MemoryError when there is none."""
        try:
            memory = self._new_memory(nbytes)
        except self._cuda.runtime.CUDARuntimeError as error:
            if error.status != _CUDA_ERROR_MEMORY_ALLOCATION:
                raise
            # Perhaps a pool has it and does not need it.
            devices.cupy().get_default_memory_pool().free_all_blocks()
            self._pool.free_all_blocks()
            try:
                memory = self._new_memory(nbytes)
            except self._cuda.runtime.CUDARuntimeError as again:
                raise MemoryError(f"{self.device} has no room for a slot of {nbytes / _MIB:.1f} MiB") from again
        return devices.cupy().ndarray((nbytes,), np.uint8, memptr=self._cuda.MemoryPointer(memory, 0))

    def _new_memory(self, nbytes: int) -> Any:
        return self._cuda.Memory(nbytes)

    def is_resident(self, a: object) -> bool:
        """Says whether an array is a CuPy array."""
        return devices.is_cuda(a)

    def copy(self, source: NDArray[np.uint8], target: Array) -> None:
        """Queues a copy from page-locked to device memory on the copy stream."""
        target.data.copy_from_host_async(source.ctypes.data, source.nbytes, self._copy)

    def copy_resident(self, source: Array, target: Array) -> None:
        """Queues a copy from device memory to device memory on the copy stream, which is current."""
        target[...] = source

    def stream(self) -> Any:
        """Returns the calling thread's current stream of the device."""
        return self._cuda.get_current_stream(self.device.index)

    def is_capturing(self, stream: Any) -> bool:
        """Says whether a graph is captured where work on this stream would end up in it, or break it."""
        try:
            with self.device.use():
                return bool(stream.is_capturing())
        except self._cuda.runtime.CUDARuntimeError as error:
            if error.status == devices.CUDA_ERROR_CAPTURE_IMPLICIT:
                return True
            raise
        except RuntimeError:
            # CuPy's word for a capture that an error has made invalid.
            return True

    def record(self, stream: Any = None) -> Any:
        """Returns an event after all that is queued on a stream, by default the copy stream."""
        with self.device.use():
            # Blocking: a worker that waits leaves its core to the others.
            event = self._cuda.Event(block=True, disable_timing=True)
            event.record(self._copy if stream is None else stream)
        return event

    def follow(self, event: Any, stream: Any = None) -> None:
        """Makes a stream, by default the copy stream, wait for an event."""
        # The default stream is that of the current device, and a consumer's may be another.
        with self.device.use():
            (self._copy if stream is None else stream).wait_event(event)

    def wait(self, event: Any) -> None:
        """Makes the host wait for an event."""
        event.synchronize()

    def is_done(self, event: Any) -> bool:
        """Says whether an event has happened."""
        return bool(event.done)

    def finish(self) -> None:
        """Makes the host wait for the copy stream."""
        self._copy.synchronize()

    def close(self) -> None:
        """Gives the streams back, and the blocks that were allocated in their order and that nobody has."""
        others, self._others = self._others, []
        with self.device.use():
            self._pool.free_all_blocks()
            for stream, allocator in others:
                pool = getattr(allocator, "__self__", None)
                if isinstance(pool, self._cuda.MemoryPool):
                    pool.free_all_blocks(stream=stream)


@dataclass(frozen=True, slots=True)
class RingMemory:
    """What the rings of a loader have allocated.

    Attributes:
        slots: how many there are.
        pinned: page-locked host memory, in bytes.
        device: device memory, in bytes: the buffers, and what was made of the samples ahead.
        largest: the largest sample so far, in bytes.
        kept: fields that the data set made on the device, kept until they are read there, in bytes.
    """

    slots: int = 0
    pinned: int = 0
    device: int = 0
    largest: int = 0
    kept: int = 0

    def __str__(self) -> str:
        kept = f", {self.kept / _MIB:.1f} MiB of the data set's" if self.kept else ""
        return (
            f"{self.slots} slots: {self.pinned / _MIB:.1f} MiB pinned, {self.device / _MIB:.1f} MiB on the device"
            f"{kept}; largest sample {self.largest / _MIB:.1f} MiB"
        )

    def __add__(self, other: "RingMemory") -> "RingMemory":
        return RingMemory(
            self.slots + other.slots,
            self.pinned + other.pinned,
            self.device + other.device,
            max(self.largest, other.largest),
            self.kept + other.kept,
        )


class Sample:
    """One sample of a data set (often a batch) of any number of fields, on its way to the device or there.

    It is its consumer's until `release`, or until the next one is taken from the same iteration, or that ends. Then its
    memory takes in another one, and reading it is an error. Arrays that `arrays` has returned are views of that memory,
    or were made by a `DeviceTransform` in memory that is taken again likewise: what is queued on a stream that called
    `arrays` before the release still reads this sample; what is kept longer must be copied before it. They are not to
    be written: such a transform may have returned what the data set gave. Only what other transforms made is its own.

    `image, label = sample` and `for image, label in loader` read the arrays.

    Attributes:
        index: its place in the data set, the step of the epoch.
        epoch: counted from 0.
        kept: for a batch of a data set that leaves out what it cannot serve, which of the batch's samples are in it:
            int64 (n,), NumPy, rising; `DistributedDataset.weights` takes it. None where the data set does not say.
        skipped: steps of the iteration so far that were passed over because nothing of them could be served.
    """

    def __init__(
        self,
        index: int,
        epoch: int,
        link: Link | None = None,
        finish: Finish | None = None,
        *,
        ahead: Finish | None = None,
        taken: Iterable[int] = (),
        kept: NDArray[np.int64] | None = None,
    ) -> None:
        self.index = index
        self.epoch = epoch
        self.kept = kept
        self.skipped = 0
        self._link = link
        self._finish = finish  # on the stream of whoever asks for the arrays first
        self._ahead = ahead  # on the copy stream, before
        self._taken = frozenset(taken)  # places of fields that only `ahead` reads
        self._fields: list[Any] | None = None
        self._result: tuple[Any, ...] | None = None
        self._ready: Any = None  # the event after which the arrays are whole
        self._streams: dict[Any, None] = {}  # those that wait for it, in order
        self._maker: Any = None  # that on which `finish` ran, and in whose order its results are allocated
        self._released = False
        self._readers: tuple[Any, ...] = ()  # events after the last reads, once released
        self._on_release: Callable[[], None] | None = None

    @property
    def state(self) -> str:
        """Where it is: "host", "in transit", "device" (for the CPU device: handed over) or "released"."""
        if self._released:
            return "released"
        if self._fields is None:
            return "host"
        link = self._link
        if link is None:
            return "device"
        # To ask for an event can break a capture.
        arrived = not link.is_capturing(link.stream()) and link.is_done(self._ready)
        return "device" if arrived else "in transit"

    def arrays(self) -> tuple[Any, ...]:
        """Returns the fields on the device, after the loader's transforms.

        The current stream waits for them; the host does not. A consumer that reads on several streams calls this under
        each of them. `DeviceTransform`s were queued when the sample was sent to the device, other transforms run in the
        first call; on the CPU device all do.

        Returns:
            Arrays of the device and `ImageBatch`es of such; borrowed, see the class.

        Raises:
            FlcudaError: it was released, or the current stream captures a graph and has not waited for this sample
                before the capture.
        """
        self._require_held()
        if self._fields is None:
            raise FlcudaError(f"sample {self.index} is still on the host")
        link = self._link
        if link is not None:
            stream = link.stream()
            if stream not in self._streams:
                if link.is_capturing(stream):
                    raise FlcudaError(
                        f"sample {self.index}: the current stream captures a graph and cannot wait for a copy from "
                        "outside of it: call arrays() under this stream before the capture"
                    )
                link.follow(self._ready, stream)
                self._streams[stream] = None
        if self._result is None:
            if self._finish is None:
                self._result = tuple(self._fields)
            else:
                self._result = tuple(self._finish(self._fields))
                if link is not None:
                    # Another stream that reads them has to wait for the transforms as well.
                    self._ready = link.record(stream)
                    self._maker = stream
        return self._result

    def release(self) -> None:
        """Gives the memory back to the ring; what is queued on the streams that read it is waited for there.

        Does nothing when it was released before.

        Raises:
            FlcudaError: the current stream, or one that read it, captures a graph.
        """
        if self._released:
            return
        link = self._link
        if link is not None and self._streams:
            streams = dict(self._streams)
            # Work that another stream ordered after the reads may be queued here.
            streams[link.stream()] = None
            for stream in streams:
                if link.is_capturing(stream):
                    raise FlcudaError(f"sample {self.index} cannot be released while a stream of it captures a graph")
            self._readers = self._recorded(link, streams)
        notify = self._on_release
        self._let_go()
        if notify is not None:
            notify()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.arrays())

    def __len__(self) -> int:
        return len(self.arrays())

    def __bool__(self) -> bool:
        # By its length otherwise, which a released sample does not tell.
        return True

    def __getitem__(self, place: int) -> Any:
        return self.arrays()[place]

    def __repr__(self) -> str:
        return f"<Sample {self.index} of epoch {self.epoch}: {self.state}>"

    def _require_held(self) -> None:
        if self._released:
            raise FlcudaError(
                f"sample {self.index} of epoch {self.epoch} was released, and its memory may hold another one: read it "
                "before the next is taken and before the iteration ends, or copy what is to be kept"
            )

    def _abandon(self) -> None:
        """Releases it for an iteration that ends on whatever thread; streams that capture are not waited for."""
        if self._released:
            return
        link = self._link
        if link is not None:
            self._readers = self._recorded(link, [each for each in self._streams if not link.is_capturing(each)])
        self._let_go()

    def _recorded(self, link: Link, streams: Iterable[Any]) -> tuple[Any, ...]:
        """Returns events after what is queued on the streams, and keeps what `finish` made until those."""
        events = {stream: link.record(stream) for stream in streams}
        if self._maker in events:
            # The allocator gives its memory to whatever is queued there next.
            for stream, event in events.items():
                if stream != self._maker:
                    link.follow(event, self._maker)
        return tuple(events.values())

    def _let_go(self) -> None:
        self._released = True
        # What is kept of a released sample keeps neither memory nor stream.
        self._fields = self._result = self._finish = self._ahead = None
        self._on_release = self._link = self._ready = None
        self._streams, self._maker = {}, None


class Ring:
    """Slots that samples pass in turn: sample i is in slot i modulo depth.

    Args:
        link: to the device; None hands fields over as they are.
        depth: number of slots.
    """

    def __init__(self, link: Link | None, depth: int) -> None:
        self.link = link
        self.slots = [Slot(link) for _ in range(depth)]

    def slot(self, index: int) -> "Slot":
        """Returns the slot of a sample."""
        return self.slots[index % len(self.slots)]

    @property
    def memory(self) -> RingMemory:
        """What is allocated now."""
        # Whoever closes it, on another thread, takes both away.
        slots, link = self.slots, self.link
        return RingMemory(
            len(slots),
            sum(_nbytes(slot.pinned) for slot in slots),
            sum(_nbytes(slot.device) for slot in slots) + (0 if link is None else link.allocated()),
            max((slot.largest for slot in slots), default=0),
            sum(slot.kept for slot in slots),
        )

    def abandon(self) -> None:
        """Releases the samples that consumers hold; nothing may be sent any more."""
        for slot in self.slots:
            sample = slot.held
            if sample is not None:
                sample._abandon()

    def close(self) -> None:
        """Releases all samples and frees everything, after all copies and all queued reads; idempotent.

        No other thread may use the ring any more.
        """
        slots, self.slots = self.slots, []
        link, self.link = self.link, None
        for slot in slots:
            for sample in (slot.staged, slot.held):
                if sample is not None:
                    sample._abandon()
        if link is None:
            return
        try:
            with link.use():
                for slot in slots:
                    slot.follow_readers()
                link.finish()
        finally:
            for slot in slots:
                slot.clear()
            link.close()


class Slot:
    """One pinned and one device buffer.

    Attributes:
        pinned: the pinned buffer, uint8; None before the first sample.
        device: the device buffer, likewise.
        largest: bytes of the largest sample so far.
        staged: the sample in the pinned buffer that has not been sent yet.
        held: the sample in the device buffer, released or not.
    """

    def __init__(self, link: Link | None) -> None:
        self.pinned: NDArray[np.uint8] | None = None
        self.device: Array | None = None
        self.largest = 0
        self.staged: Sample | None = None
        self.held: Sample | None = None
        self._link = link
        self._sent: Any = None  # the event after the last copy, and what was made ahead
        self._made: Any = None  # the event after which the staged fields of the device are whole
        self._sources: list[Any] = []  # the fields of the device that may be read until `_sent`
        self._lent: list[Any] = []  # those that may be part of what the consumer has
        self._results: list[Any] = []  # what was made ahead, and its readers are not waited for yet
        self._layout: _Layout | None = None
        self._fields: list[Any] = []

    @property
    def is_free(self) -> bool:
        """Whether the next sample can be sent: the last one was released."""
        return self.held is None or self.held._released

    @property
    def kept(self) -> int:
        """Bytes of the fields on the device that are kept, in transit or to be sent."""
        # In this order, as another thread may be sending them.
        layout = self._layout
        staged = [] if layout is None else layout.residents
        return sum({id(array): array.nbytes for array in (*staged, *self._sources, *self._lent)}.values())

    def stage(self, sample: Sample, fields: Sequence[Any]) -> None:
        """Takes the fields of a sample; those on the host are in the pinned buffer when this returns.

        Args:
            sample: a new one, of this link.
            fields: numbers, arrays of the host or of the device, and `ImageBatch`es of such; borrowed. Those of the
                device are made on the current stream.

        Raises:
            TypeError: a field of another kind.
        """
        link = self._link
        if link is None:
            self._fields = [_host_field(field, place) for place, field in enumerate(fields)]
            self.largest = max(self.largest, sum(field.nbytes for field in self._fields))
        else:
            layout = _Layout(fields, link, sample._taken)
            if self._sent is not None:
                link.wait(self._sent)
            self._sources = []
            self._made = link.record(link.stream()) if layout.residents else None
            if self.pinned is None or self.pinned.nbytes < layout.host_bytes:
                size = _capacity(layout.host_bytes)
                self.pinned = None  # freed before the larger one is asked for
                self.pinned = link.pinned(size)
            layout.write(self.pinned)
            self.largest = max(self.largest, layout.sample_bytes)
            self._layout = layout
        self.staged = sample

    def send(self) -> Sample:
        """Queues the copy of the staged sample, after what still reads the buffer, and `ahead`; needs `is_free`.

        Returns:
            The sample, ready for its consumer.

        Raises:
            MemoryError: the device is full.
            Exception: what `ahead` raised; the slot can only be cleared then.
        """
        sample = self.staged
        if sample is None or not self.is_free:
            raise FlcudaError("there is nothing to send, or the slot is not free")
        link, layout = self._link, self._layout
        if link is None:
            sample._fields = self._fields
        elif layout is not None:
            self.follow_readers()
            if self.device is None or self.device.nbytes < layout.nbytes:
                size = _capacity(layout.nbytes)
                self.device = None  # the device's free waits for what still reads it
                self.device = link.memory(size)
            if layout.host_bytes and self.pinned is not None:
                link.copy(self.pinned[: layout.host_bytes], self.device[: layout.host_bytes])
            if self._made is not None:
                link.follow(self._made)
                self._made = None
            # The readers of what was lent have just been waited for.
            self._sources, self._lent = [*self._lent, *layout.residents], []
            layout.copy_residents(self.device, link)
            sample._fields = self._made_ahead(sample, layout.read(self.device), layout)
            self._sent = sample._ready = link.record()
        self._fields, self._layout = [], None
        self.staged, self.held = None, sample
        return sample

    def _made_ahead(self, sample: Sample, arrived: list[Any], layout: "_Layout") -> list[Any]:
        if sample._ahead is None:
            return arrived
        self._results = list(sample._ahead(arrived))
        # For memory of another stream's allocator the copy stream's order is not enough.
        self._lent = layout.lent(self._results)
        return self._results

    def follow_readers(self) -> None:
        """Makes the copy stream wait for the last reads of the sample that the device buffer held."""
        if self._link is None or self.held is None:
            return
        for event in self.held._readers:
            self._link.follow(event)
        self.held = None
        # The allocator may give it to what is queued from here on.
        self._results = []

    def clear(self) -> None:
        """Lets go of everything."""
        self.pinned = self.device = self.staged = self.held = self._sent = self._made = self._layout = None
        self._fields, self._sources, self._lent, self._results = [], [], [], []


@dataclass(frozen=True, slots=True)
class _Part:
    """Where one array lies: `order` brings its dimensions into the order of the memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Array) -> Array:
        raw = buffer[self.offset : self.offset + self.nbytes].view(self.dtype)
        dense = raw.reshape(tuple(self.shape[axis] for axis in self.order))
        return dense.transpose(tuple(int(place) for place in np.argsort(self.order)))


class _Layout:
    """How the fields of one sample lie in a slot: first those of the host, then those of the device.

    Arrays keep their order of dimensions in memory where they are dense in one, so that channels-last stays so. Arrays
    of the device that belong to a field in `taken` are read where they are, and have no place in the slot.

    Attributes:
        residents: the arrays that are on the device.
        host_bytes: of the slot, for the arrays of the host.
        nbytes: of the slot, for all.
        sample_bytes: of the slot, and of the arrays that have no place there.
    """

    def __init__(self, fields: Sequence[Any], link: Link, taken: Collection[int] = ()) -> None:
        self._images: list[int | None] = []  # channels of a field that is an ImageBatch
        arrays: list[Any] = []
        self._is_taken: list[bool] = []
        for place, field in enumerate(fields):
            self._images.append(field.channels if isinstance(field, ImageBatch) else None)
            for array in _arrays_of(field):
                resident = link.is_resident(array)
                arrays.append(array if resident else _host_array(array, place))
                self._is_taken.append(resident and place in taken)
                if resident and devices.is_cuda(array) and devices.device_of(array) != link.device:
                    raise TypeError(f"field {place} is on {devices.device_of(array)}, the loader on {link.device}")
        self._arrays: list[Any] = arrays
        self._parts: list[_Part] = [_Part(0, (), np.dtype(np.uint8), ())] * len(arrays)
        self._resident = [link.is_resident(array) for array in arrays]
        self.residents: list[Any] = list(compress(arrays, self._resident))
        end = 0
        for resident in (False, True):
            for i, array in enumerate(arrays):
                if self._resident[i] == resident and not self._is_taken[i]:
                    start = -(-end // _ALIGNMENT) * _ALIGNMENT
                    part = _Part(start, tuple(array.shape), array.dtype.newbyteorder("="), _memory_order(array))
                    self._parts[i] = part
                    end = start + part.nbytes
            if not resident:
                self.host_bytes = end
        self.nbytes = end
        self.sample_bytes = end + sum(map(_nbytes, compress(arrays, self._is_taken)))

    def write(self, buffer: Array) -> None:
        """Copies the host's arrays into a buffer, and lets go of them."""
        for i, part in enumerate(self._parts):
            if not self._resident[i]:
                part.view(buffer)[...] = self._arrays[i]
                self._arrays[i] = None

    def copy_residents(self, buffer: Array, link: Link) -> None:
        """Queues copies of the device's arrays into a buffer, but of those taken."""
        for i, part in enumerate(self._parts):
            if self._resident[i] and not self._is_taken[i]:
                # In the order of the memory, where a plain copy does for both.
                link.copy_resident(self._arrays[i].transpose(part.order), part.view(buffer).transpose(part.order))

    def read(self, buffer: Array) -> list[Any]:
        """Returns the fields as views of a buffer; arrays that are taken as they are."""
        remaining = iter(
            [
                array if taken else part.view(buffer)
                for array, taken, part in zip(self._arrays, self._is_taken, self._parts, strict=True)
            ]
        )
        return [
            next(remaining)
            if channels is None
            else ImageBatch(next(remaining), next(remaining), next(remaining), channels)
            for channels in self._images
        ]

    def lent(self, fields: Sequence[Any]) -> list[Any]:
        """Returns the arrays, of those taken as they are, that fields may lie in the memory of."""
        others = [array for field in fields for array in _arrays_of(field)]
        taken = compress(self._arrays, self._is_taken)
        return [array for array in taken if any(_may_share(array, other) for other in others)]


def _arrays_of(field: Any) -> tuple[Any, ...]:
    return (field.pixels, field.offsets, field.sizes) if isinstance(field, ImageBatch) else (field,)


def _may_share(mine: Array, other: object) -> bool:
    """Whether something may have memory in common with an array; of what is no array nobody knows."""
    if isinstance(other, np.ndarray) or devices.is_cuda(other):
        xp = devices.array_module(mine)
        return isinstance(other, xp.ndarray) and bool(xp.may_share_memory(mine, other))
    return True


def _nbytes(array: Array) -> int:
    return 0 if array is None else int(array.nbytes)


def _capacity(nbytes: int) -> int:
    """Returns how large a buffer is made for a sample of so many bytes."""
    wanted = nbytes + nbytes // _HEADROOM
    return max(1, -(-wanted // _GRANULE)) * _GRANULE


def _memory_order(array: Any) -> tuple[int, ...]:
    """Returns the order of dimensions in which an array is dense in memory; their own order when there is none."""
    own = tuple(range(array.ndim))
    order = tuple(sorted(own, key=lambda axis: (-abs(array.strides[axis]), axis)))
    return order if array.transpose(order).flags.c_contiguous else own


def _host_field(field: Any, place: int) -> Any:
    if isinstance(field, ImageBatch):
        _host_array(field.pixels, place)
        return field
    return _host_array(field, place)


def _host_array(value: Any, place: int) -> NDArray[Any]:
    """Returns a field as a NumPy array of numbers; TypeError names its place."""
    if devices.is_cuda(value):
        raise TypeError(f"field {place} is on {devices.device_of(value)}, the loader on the CPU")
    if isinstance(value, np.ndarray | np.generic | int | float | complex):
        array = np.asarray(value)
    elif hasattr(value, "__dlpack__"):
        array = np.asarray(devices.asarray(value, f"field {place}"))
    else:
        raise TypeError(f"field {place} must be an array, an ImageBatch or a number, not {type(value).__name__}")
    if array.dtype.kind not in "biufc" and array.dtype != _BFLOAT16:
        raise TypeError(f"field {place} must be numbers, not {array.dtype}")
    return array
