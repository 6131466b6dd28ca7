"""Measures candidates: each runs on the caller's current stream and on arrays that the caller gives.

Nobody else may be using the arrays: the outputs are overwritten. What runs out of memory or is refused by its library
is reported with the reason, and the next one is tried.

Note [cpu]: a GPU's times are repeatable, those of a CPU that others use too are not: one sample may be ten times
another. So on CUDA a coarse look decides who may win, and those alone are measured well. On the CPU the candidates take
turns, and the smallest sample, the least disturbed, ranks them. There a run may also take seconds, so that the samples
of all together have a budget.

Note [rounds]: on CUDA, a candidate that the first run shows to be hopeless runs no more. The others are launched once
(the first coarse round), and those near the best of them are sampled well once (the second), and those that this leaves
just short of being a leader once more. The best sample counts: what is slow for some milliseconds, such as a GPU that
has just been woken (on an H200 a copy of 256 MiB took a tenth longer, for two samples in a row), must not put a
candidate out of the race. Those that are nearly the best then, the leaders, take turns in the fine round, so that
clocks and neighbours disturb all alike. Each launch in all of this takes the next set of operands:
see `flcuda.timing` Note [cold].
"""

import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from flcuda import device as devices
from flcuda import timing
from flcuda.device import Device
from flcuda.errors import FlcudaError
from flcuda.finder import ranking
from flcuda.finder.candidate import Candidate, Runner
from flcuda.finder.plan import is_out_of_memory
from flcuda.finder.policy import Policy
from flcuda.finder.problem import OPERAND_DTYPES, Problem, fill_normal
from flcuda.finder.verify import Verification, Verifier
from flcuda.timing import Timing

HOPELESS = 3.0
HOPELESS_SLACK_MS = 0.05
"""CUDA: a candidate whose first run takes so many times the fastest one's time and this much more is dropped."""

NEAR = 1.5
NEAR_SLACK_MS = 0.005
"""CUDA: the others get a sample of one launch, and those that are near the best by it another. Near is what takes so
many times the best's time and this much more; a single launch's time has the distance of two events in it, a few
microseconds."""

LEADING = 1.1
"""CUDA: a candidate within this many times the best coarse time may be the best."""

CLOSE = 1.25
"""CUDA: what is within so many times the best's time by both samples and may not be the best gets a third."""

LEADERS = 5
"""CUDA: so many of these, the first by the coarse rounds, are in the fine round."""

FINE_REPEATS = {"fast": 10, "wide": 20}
FINE_BUDGET_S = {"fast": 0.006, "wide": 0.015}
"""CUDA: samples of each leader, by the policy's effort, and seconds for them."""

CPU_BUDGET_S = 0.3
"""Seconds for the samples of all candidates; each runs once even if that takes longer."""

CPU_REPEATS = 10
CPU_SLOW_S = 0.2
"""What takes longer runs once only."""

CPU_LONE_REPEATS = 3
"""Samples of a candidate that has no rival."""

_ALIGNED = 256  # bytes, of each operand for which the Problem promises the usual alignment
_PERIOD = 1_048_573  # numbers that are drawn; they repeat
_SPACING = 1 << 20  # between the numbers of two operands
_KERNEL_PARAMETERS = 4  # cudaGraphDebugDotFlagsKernelNodeParams

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
        verification: whether its results are right; None when that was not asked, or it came too late to matter.
        kernels: names of the kernels that one run launches, in order; None when that was not asked or cannot be told.
    """

    candidate: Candidate
    runner: Runner | None
    timing: Timing | None
    build_ms: float
    first_run_ms: float | None
    reason: str | None
    verification: Verification | None = None
    kernels: tuple[str, ...] | None = None


def operand_sets(problem: Problem, device: Device, policy: Policy) -> list[Operands]:
    """Makes the arrays on which the candidates for a Problem are measured.

    Args:
        problem: what they compute.
        device: where, current.
        policy: with `l2` "cold" there are so many sets that a run finds none of its operands in the cache, at most
            `timing.MOST_BUFFER_SETS` and in at most a quarter of the memory that is free; else one.

    Returns:
        At least one set: the operands in the order of `problem.operands`, with the Problem's strides. Inputs are
        standard normal (integers 0), outputs too when the Problem accumulates, else NaN. Each operand is aligned
        exactly as the Problem says where that is less than 16 bytes, else to 256. On CUDA the arrays of one operand are
        views of one allocation from the current allocator.

    Raises:
        MemoryError: not even one set fits.
    """
    if device.kind == "cpu":
        arrays = problem.random_arrays(device=device)
        outputs = arrays["out"] if isinstance(arrays["out"], tuple) else (arrays["out"],)
        return [(*(arrays[name] for name in problem.inputs), *outputs)]
    extents = [_extent(problem, name) for name in problem.operands]
    count = 1
    if policy.l2 == "cold":
        count = timing.buffer_sets(sum(extents), timing.l2_bytes(device))
        count = max(1, min(count, _free_bytes() // 4 // max(1, sum(extents))))
    columns = [_copies(problem, position, count, device) for position in range(len(extents))]
    return list(zip(*columns, strict=True))


def measure(
    candidates: Iterable[Candidate],
    sets: Sequence[Operands],
    device: Device,
    policy: Policy,
    verifier: Verifier | None = None,
    *,
    workspace_limit: int | None = None,
    kernels: bool = False,
    known: Sequence[Measurement] = (),
    fine: bool = True,
) -> list[Measurement]:
    """Runs and times candidates.

    Args:
        candidates: what to measure; those that carry a reason are passed through.
        sets: of operands, at least one, as `operand_sets` gives them: the inputs and the outputs in the Problem's order
            and layout, on the device, which is current. The outputs are overwritten, or added to where the Problem
            accumulates.
        device: where they are.
        policy: says what ranks, how well the leaders are measured, and what is forbidden.
        verifier: says whether results are right; by default nobody does. All usable candidates are verified, and those
            that are wrong not timed. Only with `policy.effort` "wide" and no `max_error` on CUDA, where candidates are
            many, are those alone verified that are in the fine round; when one is wrong, the next takes its place.
        workspace_limit: bytes of scratch memory where the policy names no limit; by default the device's.
        kernels: whether the names of the kernels of those in the fine round are asked for.
        known: what an earlier call found. It is in the result again, ranked with the rest, and its leaders are in the
            fine round; nothing of it is built, run for the first time or verified again.
        fine: whether there is a fine round; without it the coarse ones rank. On the CPU there is only one kind.

    Returns:
        One measurement a candidate: those of the fine round, the best first; behind them the others that work, by what
        they cost in the coarse round; then the unusable ones in their order. On the CPU by the smallest sample.
    """
    if workspace_limit is None:
        workspace_limit = devices.workspace_limit(device)
    tried = [_Tried.of(each) for each in known]
    judge = _Judge(verifier, policy, workspace_limit, device)
    rotation = itertools.cycle(sets)
    everyone = device.kind == "cpu" or policy.effort != "wide" or policy.max_error is not None
    for candidate in candidates:
        each = _Tried(candidate, candidate.reason)
        each.first_run(rotation, device)
        if everyone:
            judge.verify(each)
        tried.append(each)
    usable = [each for each in tried if each.reason is None]
    if device.kind == "cpu":
        ranked = _ranked_cpu(usable, rotation, device)
    else:
        ranked = _ranked_cuda(usable, rotation, device, policy, judge, fine=fine)
        if kernels:
            for each in ranked:
                if each.fine and each.kernels is None and each.runner is not None:
                    each.kernels = kernel_names(each.call(rotation), device)
    return [each.measured() for each in (*ranked, *(each for each in tried if each.reason is not None))]


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


def kernel_names(run: Callable[[], object], device: Device) -> tuple[str, ...] | None:
    """Tells the names of the CUDA kernels that something launches, by capturing it; nothing is run.

    Args:
        run: launches work on CuPy's current stream; it has run before.
        device: where, current.

    Returns:
        The names in the order of the launches, as `short_name` writes them; None on the CPU and when `run` cannot be
        captured or CUDA does not tell.
    """
    if device.kind == "cpu":
        return None
    cupy = devices.cupy()
    pool = cupy.get_default_memory_pool()
    try:
        side = cupy.cuda.Stream(non_blocking=True)
        side.wait_event(cupy.cuda.get_current_stream().record())
        try:
            # An asynchronous allocator would become nodes of the graph, the pool does not; what it allocates for this
            # stream is given back, since nobody uses the stream again.
            with cupy.cuda.using_allocator(pool.malloc), side:
                side.begin_capture()
                try:
                    run()
                finally:
                    graph = side.end_capture()
            text = graph.debug_dot_str(_KERNEL_PARAMETERS)
        finally:
            pool.free_all_blocks(side)
    except Exception:
        # a name is only a note beside a measurement: there is none where the run, or the driver, does not permit it
        return None
    return names_in_graph(text)


def names_in_graph(text: str) -> tuple[str, ...]:
    r"""Finds the kernels in what `cudaGraphDebugDotPrint` wrote.

    Args:
        text: a graph in the DOT language. A kernel's label has its name in front of its launch configuration, such as
            `_Z3addPf`, `\<\<\<4,256,0\>\>\>` in a line of its own (CUDA 13.0), or behind it.

    Returns:
        Their names as `short_name` writes them, in the order of the text.
    """
    found = re.findall(r'([^|{}\n"]+?)\n?(?:\\*<){3}', text)
    return tuple(short_name(name.replace("\\", "").strip()) for name in found)


def short_name(symbol: str) -> str:
    """Makes a kernel's symbol readable.

    Args:
        symbol: a name, which C++ may have mangled.

    Returns:
        The qualified name without parameters; of template arguments only a first one that is a class, as CUTLASS names
        its kernels by. What is not mangled, or in no way that is known here, stays as it is.
    """
    found = re.match(r"_ZN?[KVrL]*", symbol)
    if found is None:
        return symbol
    parts, rest = _source_names(symbol[found.end() :])
    if not parts:
        return symbol
    # an argument's namespace may be that of the template, written as a substitution
    argument = re.match(r"IN?(S[0-9A-Z]*_)?", rest)
    arguments = [] if argument is None else _source_names(rest[argument.end() :])[0]
    return "::".join(parts) + (f"<{'::'.join(arguments)}>" if arguments else "")


def _source_names(text: str) -> tuple[list[str], str]:
    """Reads names, each behind its length in digits; returns them and what follows."""
    names = []
    while (found := re.match(r"\d+", text)) is not None:
        end = found.end() + int(found.group())
        name = text[found.end() : end]
        names.append("(anonymous)" if name.startswith("_GLOBAL__N_") else name)
        text = text[end:]
    return names, text


def _extent(problem: Problem, name: str) -> int:
    """Gives the bytes from the first element of an operand to the end of its last."""
    pairs = zip(problem.shape_of(name), problem.strides_of(name), strict=True)
    return OPERAND_DTYPES[problem.dtype_of(name)].itemsize * (1 + sum((size - 1) * step for size, step in pairs))


def _free_bytes() -> int:
    """Gives how much the current CUDA device's memory, and CuPy's pool in it, has free."""
    cupy = devices.cupy()
    return int(cupy.cuda.runtime.memGetInfo()[0]) + int(cupy.get_default_memory_pool().free_bytes())


def _copies(problem: Problem, position: int, count: int, device: Device) -> list[Any]:
    """Makes arrays of one operand, all in one allocation on a GPU, that lie as the Problem says."""
    xp = device.xp
    name = problem.operands[position]
    dtype = OPERAND_DTYPES[problem.dtype_of(name)]
    alignment = problem.alignment_of(name)
    step = -(-_extent(problem, name) // _ALIGNED) * _ALIGNED
    raw = xp.empty(count * step + 2 * _ALIGNED, np.uint8)
    start = -int(raw.data.ptr) % _ALIGNED + (alignment if alignment < 16 else 0)
    line = xp.ndarray((count * step // dtype.itemsize,), dtype, raw.data + start)
    if dtype.kind in "iu":
        line[...] = 0
    else:
        _fill(line, position, device, normal=name in problem.inputs or problem.accumulate)
    strides = tuple(dtype.itemsize * each for each in problem.strides_of(name))
    return [xp.ndarray(problem.shape_of(name), dtype, raw.data + start + n * step, strides) for n in range(count)]


def _fill(line: Any, position: int, device: Device, *, normal: bool) -> None:
    """Writes random numbers, or NaN, into a line of memory; moved as bits, of which the device knows each dtype's."""
    xp = device.xp
    unsigned = np.dtype(f"u{line.itemsize}")
    bits = line.view(unsigned)
    if not normal:
        bits[...] = np.array(math.nan, line.dtype).view(unsigned)[()]
        return
    numbers = xp.empty(min(line.size, _PERIOD), line.dtype)
    fill_normal(numbers, 0, position * _SPACING, device)
    numbers = numbers.view(unsigned)
    whole = line.size // numbers.size * numbers.size
    bits[:whole].reshape(-1, numbers.size)[...] = numbers
    bits[whole:] = numbers[: line.size - whole]


@dataclass(slots=True)
class _Tried:
    """A candidate while it is measured; what has failed has a reason."""

    candidate: Candidate
    reason: str | None
    runner: Runner | None = None
    build_ms: float = 0.0
    first_run_ms: float | None = None
    timing: Timing | None = None
    verification: Verification | None = None
    kernels: tuple[str, ...] | None = None
    coarse: bool = False  # has been timed, not only run for the first time
    fine: bool = False

    @classmethod
    def of(cls, known: Measurement) -> "_Tried":
        """Takes up a candidate that was measured before."""
        return cls(
            known.candidate,
            known.reason,
            known.runner,
            known.build_ms,
            known.first_run_ms,
            known.timing,
            known.verification,
            known.kernels,
            coarse=known.timing is not None and not known.timing.at_least,
        )

    @property
    def times(self) -> Timing:
        """Its times, of one that has been run."""
        if self.timing is None:
            raise AssertionError(f"{self.candidate.id} has not been timed")
        return self.timing

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
        self.timing = None

    def call(self, rotation: Iterator[Operands]) -> Callable[[], None]:
        """Returns what runs the candidate on the next set of operands."""
        runner = self.runner
        if runner is None:
            raise AssertionError(f"{self.candidate.id} has not been built")
        return lambda: runner(*next(rotation))

    def timed(self, timer: Callable[[Callable[[], None]], T], rotation: Iterator[Operands]) -> T | None:
        """Calls a timer with what runs the candidate; a failure becomes the reason."""
        return self.attempt(lambda _: timer(self.call(rotation)))

    def first_run(self, rotation: Iterator[Operands], device: Device) -> None:
        """Builds the candidate and runs it once, with whatever is loaded at the first run."""
        if self.reason is not None:
            return

        def first(run: Callable[[], None]) -> Timing:
            start = time.perf_counter()
            found = with_memory(lambda: timing.first(run, device), device)
            self.first_run_ms = 1e3 * (time.perf_counter() - start)
            return found

        self.timing = self.timed(first, rotation)

    def measured(self) -> Measurement:
        """Gives the result."""
        return Measurement(
            self.candidate,
            self.runner,
            self.timing,
            self.build_ms,
            self.first_run_ms,
            self.reason,
            self.verification,
            self.kernels,
        )


@dataclass(frozen=True, slots=True)
class _Judge:
    """Refuses the candidates whose results are wrong, or not what the policy asks."""

    verifier: Verifier | None
    policy: Policy
    workspace_limit: int
    device: Device

    def verify(self, each: _Tried) -> None:
        """Verifies a candidate, once, when anybody can."""
        verifier = self.verifier
        if verifier is None or each.reason is not None or each.verification is not None:
            return
        deterministic = each.candidate.deterministic
        found = each.attempt(
            lambda runner: with_memory(lambda: verifier.check(runner, deterministic=deterministic), self.device)
        )
        each.verification = found
        if found is None:
            return
        reason = found.reason or ranking.refusal(each.candidate, found, self.policy, self.workspace_limit)
        if reason is not None:
            each.fail(reason)


def _ranked_cpu(tried: list[_Tried], rotation: Iterator[Operands], device: Device) -> list[_Tried]:
    """Lets the candidates take turns; ranks by the smallest sample. See Note [cpu]."""
    samples = [[each.times.low_ms] for each in tried]
    spent_ms = sum(times[0] for times in samples)
    for _ in range(1, CPU_REPEATS if len(tried) > 1 else CPU_LONE_REPEATS):
        for each, times in zip(tried, samples, strict=True):
            if each.reason is not None or times[0] > 1e3 * CPU_SLOW_S or spent_ms > 1e3 * CPU_BUDGET_S:
                continue
            took_ms = each.timed(lambda run: timing.once(run, device), rotation)
            if took_ms is not None:
                times.append(took_ms)
                spent_ms += took_ms
    pairs = [pair for pair in zip(tried, samples, strict=True) if pair[0].reason is None]
    pairs.sort(key=lambda pair: min(pair[1]))
    for each, times in pairs:
        each.timing = timing.summary(times, times)
    return [each for each, _ in pairs]


def _ranked_cuda(
    tried: list[_Tried], rotation: Iterator[Operands], device: Device, policy: Policy, judge: _Judge, *, fine: bool
) -> list[_Tried]:
    """Ranks by what the policy counts. See Note [rounds]."""

    def cost(each: _Tried) -> float:
        return ranking.cost_ms(each.times, policy)

    _coarse_rounds(tried, rotation, device, policy)
    while True:
        # what was run once only has bounds, no time, and is slower than all that follow
        usable = sorted((each for each in tried if each.reason is None), key=lambda each: (not each.coarse, cost(each)))
        leaders = _leaders(usable, cost, judge)
        if not fine:
            return [each for each in usable if each.reason is None]
        try:
            times = timing.in_turn(
                [(_noting(each, rotation),) for each in leaders],
                device,
                repeats=FINE_REPEATS[policy.effort],
                budget_s=FINE_BUDGET_S[policy.effort],
            )
        except (FlcudaError, MemoryError):
            if all(each.reason is None for each in leaders):
                raise
            continue
        break
    for each, found in zip(leaders, times, strict=True):
        each.timing = found
        each.fine = True
    best = ranking.ranked(leaders, policy, timing_of=lambda each: each.times, candidate_of=lambda each: each.candidate)
    return best + [each for each in usable if each.reason is None and not each.fine]


def _coarse_rounds(tried: list[_Tried], rotation: Iterator[Operands], device: Device, policy: Policy) -> None:
    """Samples those that are not hopeless, the most promising first. See Note [rounds]."""
    best_ms = min(
        (ranking.cost_ms(each.times, policy) if each.coarse else each.times.high_ms for each in tried), default=0
    )
    sampled = []
    for each in sorted(tried, key=lambda each: each.times.low_ms):
        # what the first run took of the host says nothing: it has loaded kernels
        hopeless = policy.time != "host" and each.times.low_ms > HOPELESS * best_ms + HOPELESS_SLACK_MS
        if each.coarse or hopeless:
            continue
        found = each.timed(lambda run: timing.measure(run, device, warmup=0, repeats=1, launches=1), rotation)
        if found is not None:
            each.timing = found
            each.coarse = True
            best_ms = min(best_ms, ranking.cost_ms(found, policy))
            sampled.append(each)
    for low, high, slack_ms in ((0.0, NEAR, NEAR_SLACK_MS), (LEADING, CLOSE, 0.0)):
        usable = [each for each in sampled if each.reason is None]
        best_ms = min([best_ms, *(ranking.cost_ms(each.times, policy) for each in usable)])
        for each in usable:
            before = each.times
            if low * best_ms < ranking.cost_ms(before, policy) <= high * best_ms + slack_ms:
                found = each.timed(lambda run: timing.measure(run, device, warmup=0, repeats=1), rotation)
                if found is not None:
                    each.timing = min(before, found, key=lambda times: ranking.cost_ms(times, policy))


def _leaders(usable: Sequence[_Tried], cost: Callable[[_Tried], float], judge: _Judge) -> list[_Tried]:
    """Takes those that may be the best from the front of all, and verifies them; who fails makes room for the next."""
    leaders: list[_Tried] = []
    for each in usable:
        if leaders and (len(leaders) == LEADERS or cost(each) > LEADING * cost(leaders[0])):
            break
        judge.verify(each)
        if each.reason is None:
            leaders.append(each)
    return leaders


def _noting(each: _Tried, rotation: Iterator[Operands]) -> Callable[[], None]:
    """Returns what runs a candidate and gives it up when that fails: of several in turn, nobody else says which."""
    run = each.call(rotation)

    def noting() -> None:
        try:
            run()
        except (FlcudaError, MemoryError) as error:
            each.fail(failure_reason(error))
            raise

    return noting
