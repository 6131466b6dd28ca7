"""The timer: how long something takes on a device, as median and spread.

CUDA is timed by events on the caller's current stream, the CPU by its clock. What this first form does not do: nothing
flushes the second-level cache or rotates buffers, so operands that fit into it are timed warm; and where the host
launches more slowly than the GPU works, the time between two events is the host's (compare ``Timing.host_us``).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flcuda import device as devices
from flcuda.device import Device

LEAST_REPEATS = 3
"""So many samples are taken even when the budget of time is used up: a median of fewer says nothing of the spread."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one thing.

    Attributes:
        median_ms: median, in milliseconds.
        low_ms: 10th percentile.
        high_ms: 90th percentile.
        samples: how many times it was timed.
        host_us: median time that the call itself kept the host, in microseconds; on the CPU the same as the median.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    samples: int
    host_us: float

    @property
    def spread_ms(self) -> float:
        """The distance of the 10th and the 90th percentile, in milliseconds."""
        return self.high_ms - self.low_ms


def measure(
    run: Callable[[], object], device: Device, *, warmup: int = 2, repeats: int = 10, budget_s: float = 0.5
) -> Timing:
    """Times a callable.

    Args:
        run: launches the work on CuPy's current stream (CPU: does it).
        device: where it runs; of several CUDA devices the one that is current.
        warmup: runs before the first sample.
        repeats: samples to take, at least 1.
        budget_s: seconds for all samples together; fewer than ``repeats`` are taken when they would take longer, though
            not fewer than LEAST_REPEATS.

    Returns:
        The times. All work is complete.

    Raises:
        ValueError: repeats is less than 1 or warmup or budget_s negative.
        Exception: what ``run`` raises.
    """
    if repeats < 1:
        raise ValueError(f"repeats: {repeats} is less than 1")
    if warmup < 0:
        raise ValueError(f"warmup: {warmup} is negative")
    if budget_s < 0:
        raise ValueError(f"budget_s: {budget_s} is negative")
    if device.kind == "cuda":
        return _measure_cuda(run, warmup, repeats, budget_s)
    return _measure_cpu(run, warmup, repeats, budget_s)


def once(run: Callable[[], object], device: Device) -> float:
    """Times a single run, with no warm-up.

    Args:
        run: as for ``measure``.
        device: as for ``measure``.

    Returns:
        Milliseconds. The work is complete.
    """
    return measure(run, device, warmup=0, repeats=1).median_ms


def summary(times_ms: Sequence[float], host_ms: Sequence[float]) -> Timing:
    """Gives the statistics of samples.

    Args:
        times_ms: milliseconds of each run, at least one.
        host_ms: milliseconds for which each call kept the host.

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
    )


def _affordable(repeats: int, budget_s: float, first_ms: float) -> int:
    """Gives how many samples fit into the budget, the first one included."""
    if first_ms <= 0:
        return repeats
    return min(repeats, max(LEAST_REPEATS, int(1e3 * budget_s / first_ms)))


def _measure_cpu(run: Callable[[], object], warmup: int, repeats: int, budget_s: float) -> Timing:
    for _ in range(warmup):
        run()
    times: list[float] = []
    while len(times) < repeats and (len(times) < LEAST_REPEATS or sum(times) < 1e3 * budget_s):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return summary(times, times)


def _measure_cuda(run: Callable[[], object], warmup: int, repeats: int, budget_s: float) -> Timing:
    cupy = devices.cupy()
    stream = cupy.cuda.get_current_stream()
    for _ in range(warmup):
        run()
    first = _CudaSample(cupy, stream, run)
    first.end.synchronize()
    samples = [first]
    # The others are queued without a wait between them, so that the GPU does not idle while the host launches.
    samples.extend(
        _CudaSample(cupy, stream, run) for _ in range(_affordable(repeats, budget_s, first.elapsed_ms()) - 1)
    )
    samples[-1].end.synchronize()
    return summary([sample.elapsed_ms() for sample in samples], [sample.host_ms for sample in samples])


class _CudaSample:
    """One run between two events on a stream."""

    def __init__(self, cupy: Any, stream: Any, run: Callable[[], object]) -> None:
        self._cupy = cupy
        self._begin = cupy.cuda.Event()
        self.end = cupy.cuda.Event()
        self._begin.record(stream)
        start = time.perf_counter()
        run()
        self.host_ms = 1e3 * (time.perf_counter() - start)
        self.end.record(stream)

    def elapsed_ms(self) -> float:
        """Gives the milliseconds between the two events, which have passed."""
        return float(self._cupy.cuda.get_elapsed_time(self._begin, self.end))
