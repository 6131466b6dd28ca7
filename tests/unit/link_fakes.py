"""A device that is not there: streams whose work runs as late, and in as bad an order, as CUDA would allow.

Work that is queued runs when somebody waits, a piece at a time, on a stream picked at random of those whose next piece
may run. So what is not ordered by an event happens in the wrong order sooner or later, and without a clock.
"""

import collections
import contextlib
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flcuda.device import Device

GARBAGE = 0xEE


class Resident(np.ndarray):
    """An array in the memory of this device."""


def memory_of(array: np.ndarray) -> np.ndarray:
    """Returns the memory that an array lies in, which keeps nothing: what is queued keeps no array."""
    root: Any = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    offset = array.ctypes.data - root.ctypes.data
    return np.ndarray(array.shape, array.dtype, root, offset, array.strides)


class Pool:
    """Memory that is used again in the order of the stream that it was allocated on, as CuPy's pool does."""

    def __init__(self) -> None:
        self._free: collections.defaultdict[Any, list[np.ndarray]] = collections.defaultdict(list)
        self.nbytes = 0

    def empty(self, size: int, stream: Any) -> tuple[Resident, np.ndarray]:
        """Returns an int32 array and, for what is queued, its memory."""
        free = self._free[stream, size]
        if not free:
            self.nbytes += 4 * size
            free.append(np.full(size, -1, np.int32))
        memory = free.pop()
        array = memory.view(Resident)
        weakref.finalize(array, free.append, memory)
        return array, memory


class Event:
    def __init__(self) -> None:
        self.done = False


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: collections.deque[tuple[str, Any]] = collections.deque()
        self.capturing = False


class FakeLink:
    """A `Link` whose device memory is the host's.

    Args:
        seed: of the order in which work runs.
        eager: work that may run does so at once, in order; for what reads device memory without a stream.
        speed: share of the queued pieces that run without anybody waiting, each time something is queued.
    """

    def __init__(self, seed: int = 0, *, eager: bool = False, speed: float = 0.0) -> None:
        self.device = Device("cuda", 0)
        self.copy_stream = Stream("copy")
        self.null = Stream("null")
        self.streams = [self.copy_stream, self.null]
        self.live = collections.Counter[str]()
        self.peak = collections.Counter[str]()
        self.copies = 0
        self.resident_copies = 0
        self.closed = 0
        self.pool = Pool()
        self.refuse_memory = False
        self._eager = eager
        self._speed = speed
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._current = threading.local()

    # --- the consumer's side ---

    def new_stream(self, name: str = "loading") -> Stream:
        stream = Stream(name)
        self.streams.append(stream)
        return stream

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = self.stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def launch(self, work: Callable[[], None]) -> None:
        """Queues a kernel on the current stream."""
        self._queue(self.stream(), "run", work)

    def empty(self, size: int) -> tuple[Resident, np.ndarray]:
        """Returns an int32 array of the copy stream's allocator and, for what is queued, its memory."""
        assert self.stream() is self.copy_stream
        assert not self.closed
        if self.refuse_memory:
            raise MemoryError("the device is full")
        return self.pool.empty(size, self.copy_stream)

    def drain(self) -> None:
        """Runs all that is queued."""
        with self._lock:
            while any(stream.queue for stream in self.streams):
                assert self._run_one(), "the streams wait for one another for ever"

    # --- a Link ---

    @contextlib.contextmanager
    def use(self, stream: Stream | None = None) -> Iterator[None]:
        with self.on(self.copy_stream if stream is None else stream):
            yield

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        return self._allocated("pinned", nbytes)

    def memory(self, nbytes: int) -> Any:
        assert self.stream() is self.copy_stream
        if self.refuse_memory:
            raise MemoryError("the device is full")
        return self._allocated("device", nbytes)

    def allocated(self) -> int:
        return self.pool.nbytes

    def is_resident(self, a: object) -> bool:
        return isinstance(a, Resident)

    def copy(self, source: NDArray[np.uint8], target: Any) -> None:
        self.copies += 1
        self._queue(self.copy_stream, "run", lambda: np.copyto(target, source))

    def copy_resident(self, source: Any, target: Any) -> None:
        assert self.stream() is self.copy_stream
        self.resident_copies += 1
        memory = memory_of(source)
        self._queue(self.copy_stream, "run", lambda: np.copyto(target, memory))

    def stream(self) -> Stream:
        return getattr(self._current, "stream", self.null)

    def is_capturing(self, stream: Stream) -> bool:
        return stream.capturing

    def record(self, stream: Stream | None = None) -> Event:
        event = Event()
        target = self.copy_stream if stream is None else stream
        assert not target.capturing, "an event of the prefetcher is in the consumer's graph"
        self._queue(target, "record", event)
        return event

    def follow(self, event: Event, stream: Stream | None = None) -> None:
        target = self.copy_stream if stream is None else stream
        assert not target.capturing, "a graph waits for what is outside of it"
        self._queue(target, "wait", event)

    def wait(self, event: Event) -> None:
        with self._lock:
            while not event.done:
                assert self._run_one(), "the host waits for ever"

    def is_done(self, event: Event) -> bool:
        return event.done

    def finish(self) -> None:
        with self._lock:
            while self.copy_stream.queue:
                assert self._run_one(), "the host waits for ever"

    def close(self) -> None:
        assert not self.copy_stream.queue, "memory is freed before the copies are done"
        self.closed += 1

    # --- the device's side ---

    def _allocated(self, kind: str, nbytes: int) -> Any:
        array = np.full(nbytes, GARBAGE, np.uint8)
        with self._lock:
            self.live[kind] += nbytes
            self.peak[kind] = max(self.peak[kind], self.live[kind])
        weakref.finalize(array, self._freed, kind, nbytes)
        return array

    def _freed(self, kind: str, nbytes: int) -> None:
        with self._lock:
            self.live[kind] -= nbytes

    def _queue(self, stream: Stream, kind: str, what: Any) -> None:
        with self._lock:
            stream.queue.append((kind, what))
            if self._eager:
                while self._run_one():
                    pass
            while self._random.random() < self._speed and self._run_one():
                pass

    def _run_one(self) -> bool:
        """Runs the next piece of a stream picked at random; False when none can go on."""
        able = [
            stream
            for stream in self.streams
            if stream.queue and (stream.queue[0][0] != "wait" or stream.queue[0][1].done)
        ]
        if not able:
            return False
        kind, what = self._random.choice(able).queue.popleft()
        if kind == "record":
            what.done = True
        elif kind == "run":
            what()
        return True
