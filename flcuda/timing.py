"""The timer: how long something takes on a device, as median and spread.

CUDA is timed by events on the caller's current stream, the CPU by its clock.

Note [hold]: where the host launches more slowly than the GPU works, the time between two events is the host's. So the
stream is held until all launches of a sample are queued: a host function in it waits until the timer says so, at most
`HOLD_LIMIT_S`. What makes the host wait for the GPU within a sample, or keeps it longer than that, outlives the hold;
it is timed without, and `Timing.queued` is False. Warm-up runs are never held: a first run loads kernels, which may
wait for the GPU.

Note [cold]: operands that fit into the second-level cache are in it when a run follows one on the same buffers. Where
that is not wanted, the caller gives several callables, which do the same on different buffers, `buffer_sets` of them.
They are taken in turn, over samples and works, so that no run finds what the one before has read.

Note [timeline]: between the many parts of one long run a hold of all of it would not do, since launching waits where
about a thousand are queued. So the stream is held for `_CHUNK` marks at a time: while the GPU works on some, the host
queues the next. A hold stands where the caller permits it, and its time belongs to no part.
"""

import collections
import contextlib
import functools
import importlib
import itertools
import math
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flcuda import device as devices
from flcuda.device import Device
from flcuda.errors import FlcudaError

Run = Callable[[], object]

LEAST_REPEATS = 3
"""So many samples are taken even when the budget of time is used up: a median of fewer says nothing of the spread."""

SAMPLE_MS = 0.2
"""A CUDA sample has so many launches that it takes about this long: an event is good to half a microsecond."""

MOST_LAUNCHES = 20
"""A CUDA sample has at most so many launches: a stream takes about a thousand before launching waits."""

HOLD_LIMIT_S = 0.5
"""Seconds after which a stream goes on whether everything is queued or not. See Note [hold]."""

MOST_BUFFER_SETS = 256

_IN_FLIGHT = 2  # samples queued at a time: one runs, and one is ready when it ends

_CHUNK = 64  # marks of a timeline that are queued while the stream is held; each may come with a few launches


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one thing.

    Attributes:
        median_ms: median over the samples, in milliseconds a launch.
        low_ms: 10th percentile.
        high_ms: 90th percentile.
        samples: how many times it was timed.
        host_us: median time that one call kept the host, in microseconds; on the CPU the same as the median.
        launches: calls a sample; its time is divided by them.
        queued: whether all launches of each sample were queued before the first began, so that only the GPU's time was
            counted; False where the host was too slow for that: the time is the host's as well.
        at_least: whether this is a first run, so that the median is only the least that it took. See `first`.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    samples: int
    host_us: float
    launches: int = 1
    queued: bool = True
    at_least: bool = False

    @property
    def spread_ms(self) -> float:
        """The distance of the 10th and the 90th percentile, in milliseconds."""
        return self.high_ms - self.low_ms


def measure(
    runs: Run | Sequence[Run],
    device: Device,
    *,
    warmup: int = 2,
    repeats: int = 10,
    budget_s: float = 0.5,
    launches: int | None = None,
) -> Timing:
    """Times a callable.

    Args:
        runs: launches the work on CuPy's current stream (CPU: does it). Or several callables that do the same work on
            other buffers; see Note [cold].
        device: where it runs; of several CUDA devices the one that is current.
        warmup: runs before the first sample.
        repeats: samples to take, at least 1.
        budget_s: seconds for all samples together; fewer than `repeats` are taken when they would take longer, though
            not fewer than LEAST_REPEATS.
        launches: calls a sample, at least 1; by default as many as make it SAMPLE_MS long, at most MOST_LAUNCHES, and
            on the CPU one.

    Returns:
        The times. All work is complete.

    Raises:
        ValueError: `runs` is empty, `repeats` or `launches` is less than 1, or `warmup` or `budget_s` negative.
        FlcudaError: a CUDA graph is being captured.
        Exception: what a callable raises; the stream goes on.
    """
    work = (runs,) if callable(runs) else tuple(runs)
    (result,) = in_turn([work], device, warmup=warmup, repeats=repeats, budget_s=budget_s, launches=launches)
    return result


def in_turn(
    works: Sequence[Sequence[Run]],
    device: Device,
    *,
    warmup: int = 1,
    repeats: int = 10,
    budget_s: float = 0.5,
    launches: int | None = None,
) -> list[Timing]:
    """Times several works, which take turns sample by sample: what disturbs one of them disturbs all alike.

    Args:
        works: of each work the callables, as for `measure`.
        device: as for `measure`.
        warmup: runs of each work before the first sample.
        repeats: samples of each work.
        budget_s: seconds for the samples of each work.
        launches: as for `measure`.

    Returns:
        The times of each work, in order. All work is complete.

    Raises:
        ValueError: as for `measure`.
        FlcudaError: a CUDA graph is being captured.
        Exception: what a callable raises; the stream goes on.
    """
    if any(not runs for runs in works):
        raise ValueError("runs: a work has no callable")
    if repeats < 1:
        raise ValueError(f"repeats: {repeats} is less than 1")
    if launches is not None and launches < 1:
        raise ValueError(f"launches: {launches} is less than 1")
    if warmup < 0:
        raise ValueError(f"warmup: {warmup} is negative")
    if budget_s < 0:
        raise ValueError(f"budget_s: {budget_s} is negative")
    turn = itertools.count()
    entries = [_Work(turn, tuple(runs), repeats) for runs in works]
    for entry in entries:
        for _ in range(warmup):
            entry.run()
    if device.kind == "cuda":
        _sample_cuda(entries, budget_s, launches)
    else:
        _sample_cpu(entries, budget_s, launches or 1)
    return [entry.timing() for entry in entries]


def once(run: Run, device: Device) -> float:
    """Times a single run, with no warm-up and no hold.

    Args:
        run: as for `measure`.
        device: as for `measure`.

    Returns:
        Milliseconds. The work is complete.

    Raises:
        FlcudaError: a CUDA graph is being captured.
        Exception: what `run` raises.
    """
    return first(run, device).high_ms


def first(run: Run, device: Device) -> Timing:
    """Times a first run, in which kernels may be loaded, so that the GPU's time is only known within bounds.

    Args:
        run: as for `measure`.
        device: as for `measure`.

    Returns:
        `high_ms` is all that passed on the device. `low_ms` and `median_ms` are what passed there after the call had
        returned: of a long run nearly all of its work, and in no case more than that. On the CPU all are the same. The
        work is complete.

    Raises:
        FlcudaError: a CUDA graph is being captured.
        Exception: what `run` raises.
    """
    if device.kind == "cpu":
        start = time.perf_counter()
        run()
        took = 1e3 * (time.perf_counter() - start)
        return summary([took], [took])
    cupy, stream = _current_stream()
    sample = _CudaSample(cupy, stream, run, 1, held=False)
    sample.wait()
    (host_ms,) = sample.host_ms
    high = sample.elapsed_ms()
    low = max(0.0, high - host_ms)
    return Timing(low, low, high, 1, 1e3 * host_ms, queued=False, at_least=True)


def summary(times_ms: Sequence[float], host_ms: Sequence[float], *, launches: int = 1, queued: bool = True) -> Timing:
    """Gives the statistics of samples.

    Args:
        times_ms: milliseconds a launch of each sample, at least one.
        host_ms: milliseconds for which each call kept the host.
        launches: calls a sample.
        queued: as in `Timing`.

    Returns:
        The times.
    """
    low = high = times_ms[0]
    if len(times_ms) > 1:
        low, *_, high = statistics.quantiles(times_ms, n=10, method="inclusive")
    return Timing(
        median_ms=statistics.median(times_ms),
        low_ms=low,
        high_ms=high,
        samples=len(times_ms),
        host_us=1e3 * statistics.median(host_ms),
        launches=launches,
        queued=queued,
    )


def l2_bytes(device: Device) -> int:
    """Gives the size of a GPU's second-level cache.

    Args:
        device: which.

    Returns:
        Bytes; 0 for the CPU.
    """
    if device.kind == "cpu":
        return 0
    return int(devices.cupy().cuda.Device(device.index).attributes["L2CacheSize"])


def buffer_sets(set_bytes: int, l2_bytes: int) -> int:
    """Says how many sets of buffers, taken in turn, make every use of one cold.

    Args:
        set_bytes: what one run reads and writes.
        l2_bytes: size of the cache.

    Returns:
        So many that twice the cache passes between two uses of a set, at most MOST_BUFFER_SETS: what is smaller than
        that share of the cache stays in it.
    """
    return min(MOST_BUFFER_SETS, 1 + math.ceil(2 * l2_bytes / max(1, set_bytes)))


class _Work:
    """One work while it is timed."""

    def __init__(self, turn: Iterator[int], runs: Sequence[Run], repeats: int) -> None:
        self._turn = turn  # of all works: one must not find what another has just read
        self._runs = runs
        self.repeats = repeats  # that are still to be taken
        self.launches = 1
        self.held = True
        self.times_ms: list[float] = []
        self.host_ms: list[float] = []

    def run(self) -> None:
        """Runs the callable whose turn it is."""
        self._runs[next(self._turn) % len(self._runs)]()

    def fit(self, budget_s: float, sample_ms: float) -> None:
        """Lowers the number of samples to what the budget permits, with samples that take so long."""
        if sample_ms > 0:
            self.repeats = min(self.repeats, max(LEAST_REPEATS, int(1e3 * budget_s / sample_ms)))

    def timing(self) -> Timing:
        """Gives the statistics."""
        return summary(self.times_ms, self.host_ms, launches=self.launches, queued=self.held)


def _sample_cpu(works: Sequence[_Work], budget_s: float, launches: int) -> None:
    for turn in range(max((work.repeats for work in works), default=0)):
        for work in works:
            if turn >= work.repeats:
                continue
            start = time.perf_counter()
            for _ in range(launches):
                work.run()
            took_ms = 1e3 * (time.perf_counter() - start)
            work.launches = launches
            work.times_ms.append(took_ms / launches)
            work.host_ms.append(took_ms / launches)
            if turn + 1 >= LEAST_REPEATS and launches * sum(work.times_ms) >= 1e3 * budget_s:
                work.repeats = turn + 1


def _sample_cuda(works: Sequence[_Work], budget_s: float, launches: int | None) -> None:
    cupy, stream = _current_stream()

    def sample(work: _Work) -> _CudaSample:
        return _CudaSample(cupy, stream, work.run, work.launches, held=work.held)

    for work in works:
        work.launches = launches or 1
        trial = sample(work)
        trial.wait()
        if trial.expired:
            work.held = False
            trial = sample(work)
            trial.wait()
        took_ms = trial.elapsed_ms() / work.launches
        host_ms = statistics.median(trial.host_ms)
        if launches is None:
            work.launches = _launches(took_ms, host_ms)
        work.fit(budget_s, work.launches * max(took_ms, host_ms))
        if work.launches == (launches or 1):
            work.times_ms.append(took_ms)
            work.host_ms.extend(trial.host_ms)
            work.repeats -= 1
    # All are queued behind one another, so that the GPU does not idle while the host launches; but only a few at a
    # time, since launching waits where too many are, and a hold that the host waits for never ends in time.
    pending: collections.deque[tuple[_Work, _CudaSample]] = collections.deque()
    expired: list[tuple[_Work, _CudaSample]] = []

    def finish() -> None:
        work, done = pending.popleft()
        done.wait()
        if done.expired:
            expired.append((work, done))
        else:
            work.times_ms.append(done.elapsed_ms() / work.launches)
            work.host_ms.extend(done.host_ms)

    for turn in range(max((work.repeats for work in works), default=0)):
        for work in works:
            if turn >= work.repeats:
                continue
            if len(pending) >= _IN_FLIGHT:
                finish()
            pending.append((work, sample(work)))
    while pending:
        finish()
    for work, done in expired:
        # the odd one that something outside has kept too long says nothing; where there is no other, it must do
        if not work.times_ms:
            work.held = False
            work.times_ms.append(done.elapsed_ms() / work.launches)
            work.host_ms.extend(done.host_ms)


def _launches(took_ms: float, host_ms: float) -> int:
    """Gives how many launches make a good sample, and can be queued in half the time that a hold lasts."""
    wanted = math.ceil(SAMPLE_MS / max(took_ms, 1e-6))
    quick = int(1e3 * HOLD_LIMIT_S / 2 / max(host_ms, 1e-6))
    return max(1, min(wanted, quick, MOST_LAUNCHES))


def _current_stream() -> tuple[Any, Any]:
    """Returns CuPy and its current stream; raises while that captures."""
    if devices.is_capturing():
        raise FlcudaError("nothing can be timed while a CUDA graph is captured")
    cupy = devices.cupy()
    return cupy, cupy.cuda.get_current_stream()


class _Hold:
    """Holds a stream where it is put into it until it is released, or until its limit. See Note [hold]."""

    def __init__(self, stream: Any) -> None:
        self._released = threading.Event()
        self.expired = False
        stream.launch_host_func(_Hold._wait, self)

    def release(self) -> None:
        """Lets the stream go on."""
        self._released.set()

    def _wait(self) -> None:
        # in a thread of CUDA's, which must not call CUDA; waiting gives the interpreter's lock away
        if not self._released.wait(HOLD_LIMIT_S):
            self.expired = True


class _CudaSample:
    """Some runs between two events on a stream."""

    def __init__(self, cupy: Any, stream: Any, run: Run, launches: int, *, held: bool) -> None:
        self._cupy = cupy
        self._begin = cupy.cuda.Event()
        self._end = cupy.cuda.Event()
        self._hold = None
        self.host_ms: list[float] = []
        with contextlib.ExitStack() as stack:
            if held:
                self._hold = _Hold(stream)
                stack.callback(self._hold.release)
            self._begin.record(stream)
            for _ in range(launches):
                start = time.perf_counter()
                run()
                self.host_ms.append(1e3 * (time.perf_counter() - start))
            self._end.record(stream)

    @property
    def expired(self) -> bool:
        """Whether the stream went on before everything was queued; known when the sample is complete."""
        return self._hold is not None and self._hold.expired

    def wait(self) -> None:
        """Waits until the sample is complete."""
        self._end.synchronize()

    def elapsed_ms(self) -> float:
        """Gives the milliseconds between the two events, which have passed."""
        return float(self._cupy.cuda.get_elapsed_time(self._begin, self._end))


class Timeline:
    """Times the parts of one run, in order: what is launched after a mark belongs to it until the next one.

    CUDA's are times of the device, on the stream that is current when the timeline is made; see Note [timeline]. Its
    work must not wait for the device. The CPU's are times of its clock.

    Args:
        device: where the parts run; of several CUDA devices the one that is current.

    Raises:
        FlcudaError: a CUDA graph is being captured.
    """

    def __init__(self, device: Device) -> None:
        self._cupy: Any = None
        self._stream: Any = None
        if device.kind == "cuda":
            self._cupy, self._stream = _current_stream()
        self._labels: list[object] = []
        self._marks: list[tuple[Any, Any]] = []  # where the part begins, and where the one before ended
        self._holds: list[_Hold] = []
        self._since_hold = 0
        if self._cupy is not None:
            self._holds.append(_Hold(self._stream))

    def mark(self, label: object, *, may_hold: bool = False) -> None:
        """Begins a part and ends the one before.

        Args:
            label: of the part; None where nobody asks for its time.
            may_hold: whether the stream may be held before the part begins.
        """
        now = end = self._now()
        self._since_hold += 1
        if may_hold and self._holds and self._since_hold >= _CHUNK:
            self._since_hold = 0
            self._holds.append(_Hold(self._stream))
            self._holds[-2].release()
            now = self._now()
        self._labels.append(label)
        self._marks.append((now, end))

    def close(self) -> list[tuple[object, float]]:
        """Ends the last part and waits for all of them.

        Returns:
            Label and milliseconds of each part with a label, in order.
        """
        self.mark(None)
        self.release()
        if self._cupy is not None:
            self._marks[-1][1].synchronize()
        return [
            (label, self._between(begin, end))
            for label, (begin, _), (_, end) in zip(self._labels, self._marks, self._marks[1:], strict=False)
            if label is not None
        ]

    def release(self) -> None:
        """Lets the stream go on; for who gives the timeline up, because the run has failed."""
        for hold in self._holds:
            hold.release()

    @property
    def queued(self) -> bool:
        """Whether the host was never so slow that a hold expired; then times may be the host's. Known when closed."""
        return not any(hold.expired for hold in self._holds)

    def _now(self) -> Any:
        if self._cupy is None:
            return time.perf_counter()
        event = self._cupy.cuda.Event()
        event.record(self._stream)
        return event

    def _between(self, begin: Any, end: Any) -> float:
        if self._cupy is None:
            return float(1e3 * (end - begin))
        return float(self._cupy.cuda.get_elapsed_time(begin, end))


# Bits of what NVML calls clock event reasons. That a GPU idles is none that slows work down.
_THROTTLE_WORDS = (
    (0x002, "application clocks setting"),
    (0x004, "software power cap"),
    (0x008, "hardware slowdown"),
    (0x010, "sync boost"),
    (0x020, "software thermal slowdown"),
    (0x040, "hardware thermal slowdown"),
    (0x080, "hardware power brake"),
    (0x100, "display clock setting"),
    (0x200, "board limit"),
    (0x400, "reliability"),
)


@dataclass(frozen=True, slots=True)
class Clocks:
    """At which clocks a GPU ran when it was asked.

    Attributes:
        sm_mhz: clock of the multiprocessors.
        sm_max_mhz: the most that it can be.
        memory_mhz: clock of the memory.
        throttled: what kept the clocks down, in words.
    """

    sm_mhz: int
    sm_max_mhz: int
    memory_mhz: int
    throttled: tuple[str, ...]


def clocks(device: Device) -> Clocks | None:
    """Asks a GPU for its clocks; ask while it works, or just after: an idle GPU lowers them.

    Args:
        device: which.

    Returns:
        The clocks; None for the CPU, without the package nvidia-ml-py, and where the driver does not tell.
    """
    if device.kind == "cpu":
        return None
    try:
        nvml, handle = _nvml(device.index)
        mask = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return Clocks(
            sm_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            sm_max_mhz=int(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
            memory_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            throttled=tuple(word for bit, word in _THROTTLE_WORDS if mask & bit),
        )
    except Exception:
        # what is only a note beside a measurement must not end it, whatever a driver, container or package lacks
        return None


@functools.lru_cache(maxsize=64)
def _nvml(index: int) -> tuple[Any, Any]:
    """Returns the module pynvml, ready, and its handle of a CUDA device."""
    with warnings.catch_warnings():
        # another package of that name warns, when it is imported, that it is not the one
        warnings.simplefilter("ignore")
        nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    bus_id = devices.cupy().cuda.runtime.deviceGetPCIBusId(index)
    return nvml, nvml.nvmlDeviceGetHandleByPciBusId(bus_id)
