"""Measures candidates: each runs a few times, the hopeless ones are dropped, the others are timed.

Everything runs on the caller's current stream and on arrays that the caller gives, which nobody else may be using: the
output is overwritten. What runs out of memory or is refused by its library is reported with the reason, and the next
one is tried.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from flcuda import device as devices
from flcuda import timing
from flcuda.device import Device
from flcuda.errors import FlcudaError
from flcuda.finder.candidate import Candidate, Runner
from flcuda.finder.plan import is_out_of_memory
from flcuda.timing import Timing

HOPELESS = 3.0
HOPELESS_SLACK_MS = 0.05
"""A candidate whose best first run takes so many times the fastest one's and this much more is not measured further."""

COARSE_REPEATS = 2
"""Samples by which that is decided."""

WARMUP = 2
REPEATS = 10
BUDGET_S = {"cuda": 0.5, "cpu": 0.15}
"""Seconds a candidate for all its samples."""

Operands = tuple[Any, Any, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was learnt of one candidate.

    Attributes:
        candidate: which one.
        runner: what it built, ready for more runs on this thread and device; None when unusable.
        timing: its times; of a dropped candidate COARSE_REPEATS samples; None when unusable.
        build_ms: host milliseconds of building it and of its first run.
        reason: why it is unusable, else None.
    """

    candidate: Candidate
    runner: Runner | None
    timing: Timing | None
    build_ms: float
    reason: str | None


def measure(
    candidates: Iterable[Candidate],
    operands: Operands,
    device: Device,
    *,
    repeats: int = REPEATS,
    budget_s: float | None = None,
) -> list[Measurement]:
    """Runs and times candidates.

    Args:
        candidates: what to measure; those that carry a reason are passed through.
        operands: the two inputs and the output in the Problem's order and layout, on the device, which is current. The
            output is overwritten, or added to where the Problem accumulates.
        device: where they are.
        repeats: samples a candidate.
        budget_s: seconds a candidate for its samples; by default BUDGET_S of the device.

    Returns:
        One measurement a candidate: the fastest first, then the unusable ones in their order.
    """
    budget = BUDGET_S[device.kind] if budget_s is None else budget_s
    tried = [_first_runs(candidate, operands, device) for candidate in candidates]
    coarse = [_coarse_ms(each) for each in tried if each.timing is not None]
    limit_ms = HOPELESS * min(coarse) + HOPELESS_SLACK_MS if coarse else 0.0
    measured = [_refined(each, operands, device, limit_ms, repeats, budget) for each in tried]
    return sorted(measured, key=lambda each: float("inf") if each.timing is None else each.timing.median_ms)


def failure_reason(error: BaseException) -> str:
    """Puts a failed attempt into one line: the message and the notes of the exception.

    Args:
        error: what building or running a candidate raised.

    Returns:
        The line.
    """
    kind = "out of memory: " if isinstance(error, MemoryError) else ""
    return "; ".join([f"{kind}{error}", *getattr(error, "__notes__", ())])


def with_memory(call: Callable[[], T], device: Device) -> T:
    """Calls something that allocates; when memory runs out, once more after CuPy's pool has given back its free blocks.

    Nothing pending is left behind by a failed allocation: CuPy clears the CUDA error before it raises.

    Args:
        call: what to do.
        device: where the memory is.

    Returns:
        What it returns.
    """
    try:
        return call()
    except Exception as error:
        if device.kind == "cpu" or not is_out_of_memory(error) or devices.is_capturing():
            raise
    devices.synchronize(device)
    devices.cupy().get_default_memory_pool().free_all_blocks()
    return call()


def _first_runs(candidate: Candidate, operands: Operands, device: Device) -> Measurement:
    """Builds a candidate, runs it once to warm up, and times a few runs."""
    if candidate.reason is not None:
        return Measurement(candidate, None, None, 0.0, candidate.reason)
    start = time.perf_counter()
    try:
        runner = candidate.build()
        with_memory(lambda: runner(*operands), device)
        devices.synchronize(device)
        build_ms = 1e3 * (time.perf_counter() - start)
        coarse = timing.measure(lambda: runner(*operands), device, warmup=0, repeats=COARSE_REPEATS)
    except (FlcudaError, MemoryError) as error:
        return Measurement(candidate, None, None, 1e3 * (time.perf_counter() - start), failure_reason(error))
    return Measurement(candidate, runner, coarse, build_ms, None)


def _coarse_ms(tried: Measurement) -> float:
    """Gives the best of the first runs: one alone may have been disturbed, or woken the threads of BLAS."""
    return float("inf") if tried.timing is None else min(tried.build_ms, tried.timing.low_ms)


def _refined(
    tried: Measurement, operands: Operands, device: Device, limit_ms: float, repeats: int, budget_s: float
) -> Measurement:
    """Times a candidate that is not hopeless."""
    runner = tried.runner
    if runner is None or _coarse_ms(tried) > limit_ms:
        return tried
    try:
        fine = timing.measure(lambda: runner(*operands), device, warmup=WARMUP, repeats=repeats, budget_s=budget_s)
    except (FlcudaError, MemoryError) as error:
        return Measurement(tried.candidate, None, None, tried.build_ms, failure_reason(error))
    return replace(tried, timing=fine)
