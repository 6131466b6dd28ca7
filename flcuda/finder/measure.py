"""Measures candidates: each runs a few times on the caller's current stream and on arrays that the caller gives.

Nobody else may be using the arrays: the output is overwritten. What runs out of memory or is refused by its library is
reported with the reason, and the next one is tried.

Note [cpu]: a GPU's times are repeatable, those of a CPU that others use too are not: one sample may be ten times
another. So on CUDA the hopeless are dropped after a coarse look and the others ranked by the median. On the CPU the
candidates take turns, so that what disturbs one disturbs all, and the smallest sample, the least disturbed, ranks them.
There a run may also take seconds, so that the samples of all together have a budget.
"""

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from flcuda import device as devices
from flcuda import timing
from flcuda.device import Device
from flcuda.errors import FlcudaError
from flcuda.finder.candidate import Candidate, Runner
from flcuda.finder.plan import is_out_of_memory
from flcuda.finder.verify import Verification, Verifier
from flcuda.timing import Timing

HOPELESS = 3.0
HOPELESS_SLACK_MS = 0.05
"""CUDA: a candidate whose best first run takes so many times the fastest one's and this much more is dropped."""

COARSE_REPEATS = 2
"""CUDA: samples by which that is decided."""

CUDA_WARMUP = 2
CUDA_REPEATS = 10
CUDA_BUDGET_S = 0.5
"""Seconds a candidate for all its samples."""

CPU_BUDGET_S = 0.3
"""Seconds for the samples of all candidates; each runs once even if that takes longer."""

CPU_REPEATS = 10
CPU_SLOW_S = 0.2
"""What takes longer runs once only."""

CPU_LONE_REPEATS = 3
"""Samples of a candidate that has no rival."""

Operands = tuple[Any, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was learnt of one candidate.

    Attributes:
        candidate: which one.
        runner: what it built, ready for more runs on this thread and device; None when unusable.
        timing: its times; None when unusable.
        build_ms: host milliseconds of building it, its source's preparation counted.
        first_run_ms: host milliseconds of its first run, which loads its kernels; None when it did not come to it.
        reason: why it is unusable, else None.
        verification: whether its results are right; None when that was not asked.
    """

    candidate: Candidate
    runner: Runner | None
    timing: Timing | None
    build_ms: float
    first_run_ms: float | None
    reason: str | None
    verification: Verification | None = None


def measure(
    candidates: Iterable[Candidate],
    operands: Operands,
    device: Device,
    verifier: Verifier | None = None,
    *,
    deterministic: bool = False,
) -> list[Measurement]:
    """Runs and times candidates; those whose results are wrong are not timed.

    Args:
        candidates: what to measure; those that carry a reason are passed through.
        operands: the inputs and the outputs in the Problem's order and layout, on the device, which is current. The
            outputs are overwritten, or added to where the Problem accumulates.
        device: where they are.
        verifier: says whether results are right; by default nobody does.
        deterministic: a candidate whose bits the verifier sees differ from run to run is unusable.

    Returns:
        One measurement a candidate: the fastest first, equals in their order; behind them those that were dropped; then
        the unusable ones in their order.
    """
    tried = [_first_run(candidate, operands, device, verifier, deterministic) for candidate in candidates]
    usable = [each for each in tried if each.reason is None]
    ranked = (_ranked_cpu if device.kind == "cpu" else _ranked_cuda)(usable, operands, device)
    return ranked + [
        Measurement(
            each.candidate, None, None, each.build_ms, each.first_run_ms, each.reason, verification=each.verification
        )
        for each in tried
        if each.reason is not None
    ]


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


@dataclass(slots=True)
class _Tried:
    """A candidate while it is measured; what has failed has a reason."""

    candidate: Candidate
    reason: str | None
    runner: Runner | None = None
    build_ms: float = 0.0
    first_run_ms: float | None = None
    first_ms: float = 0.0
    verification: Verification | None = None

    def attempt(self, call: Callable[[Runner], T]) -> T | None:
        """Calls something with the runner, built when it is not; a failure becomes the reason."""
        try:
            if self.runner is None:
                start = time.perf_counter()
                self.runner = self.candidate.build()
                self.build_ms = self.candidate.prepared_ms + 1e3 * (time.perf_counter() - start)
            return call(self.runner)
        except (FlcudaError, MemoryError) as error:
            self.fail(failure_reason(error))
            return None

    def fail(self, reason: str) -> None:
        """Gives the candidate up; what it holds goes."""
        self.reason = reason
        self.runner = None

    def timed(self, timer: Callable[[Callable[[], None]], T], operands: Operands) -> T | None:
        """Calls a timer with what runs the candidate; a failure becomes the reason."""
        return self.attempt(lambda runner: timer(functools.partial(runner, *operands)))

    def measured(self, times: Timing) -> Measurement:
        """Gives the result of a candidate that works."""
        return Measurement(
            self.candidate, self.runner, times, self.build_ms, self.first_run_ms, None, verification=self.verification
        )


def _first_run(
    candidate: Candidate, operands: Operands, device: Device, verifier: Verifier | None, deterministic: bool
) -> _Tried:
    """Builds a candidate, runs it once, with whatever is loaded at the first run, and verifies it."""
    tried = _Tried(candidate, candidate.reason)
    if tried.reason is not None:
        return tried

    def once(run: Callable[[], None]) -> float:
        start = time.perf_counter()
        took_ms = with_memory(lambda: timing.once(run, device), device)
        tried.first_run_ms = 1e3 * (time.perf_counter() - start)
        return took_ms

    first_ms = tried.timed(once, operands)
    tried.first_ms = 0.0 if first_ms is None else first_ms
    if verifier is not None and tried.reason is None:
        tried.verification = tried.attempt(
            lambda runner: with_memory(lambda: verifier.check(runner, deterministic=candidate.deterministic), device)
        )
        if tried.verification is not None and tried.verification.reason is not None:
            tried.fail(tried.verification.reason)
        elif deterministic and tried.verification is not None and tried.verification.repeats is False:
            tried.fail("not deterministic: a second run gave other bits")
    return tried


def _ranked_cpu(tried: list[_Tried], operands: Operands, device: Device) -> list[Measurement]:
    """Lets the candidates take turns; ranks by the smallest sample. See Note [cpu]."""
    samples = [[each.first_ms] for each in tried]
    spent_ms = sum(each.first_ms for each in tried)
    for _ in range(1, CPU_REPEATS if len(tried) > 1 else CPU_LONE_REPEATS):
        for each, times in zip(tried, samples, strict=True):
            if each.reason is not None or each.first_ms > 1e3 * CPU_SLOW_S or spent_ms > 1e3 * CPU_BUDGET_S:
                continue
            took_ms = each.timed(lambda run: timing.once(run, device), operands)
            if took_ms is not None:
                times.append(took_ms)
                spent_ms += took_ms
    ranked = sorted(
        (pair for pair in zip(tried, samples, strict=True) if pair[0].reason is None), key=lambda pair: min(pair[1])
    )
    return [each.measured(timing.summary(times, times)) for each, times in ranked]


def _ranked_cuda(tried: list[_Tried], operands: Operands, device: Device) -> list[Measurement]:
    """Drops the hopeless after a coarse look; ranks the others by the median. See Note [cpu]."""

    def timed(some: list[_Tried], **how: Any) -> list[tuple[_Tried, Timing]]:
        found = []
        for each in some:
            times = each.timed(lambda run: timing.measure(run, device, **how), operands)
            if times is not None:
                found.append((each, times))
        return found

    coarse = timed(tried, warmup=0, repeats=COARSE_REPEATS)
    limit_ms = HOPELESS * min((times.low_ms for _, times in coarse), default=0.0) + HOPELESS_SLACK_MS
    hopeful = [each for each, times in coarse if times.low_ms <= limit_ms]
    dropped = [(each, times) for each, times in coarse if times.low_ms > limit_ms]
    fine = timed(hopeful, warmup=CUDA_WARMUP, repeats=CUDA_REPEATS, budget_s=CUDA_BUDGET_S)
    return [
        each.measured(times)
        for group in (fine, dropped)
        for each, times in sorted(group, key=lambda pair: pair[1].median_ms)
    ]
