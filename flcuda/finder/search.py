"""The two questions: which candidate is best (`find`), and a live solution, found if it must be (`plan`).

A search may take a while, and `plan` has nobody to show it to: the logger "flcuda.finder" says at level INFO when one
begins and what it found.

Note [climbing]: what the sources offer first is measured coarsely, and so is, round by round, what they offer around
the leaders, until nothing new leads. Then the leaders of all are measured well.

Note [wide]: with the effort "wide" the sources list every engine, not only those that a heuristic puts first, and
around the leaders every configuration that differs from them in one knob, not only those that a heuristic lists.
Engines that no heuristic lists are engines that nobody has vetted for the Problem. So whatever may win is verified.
"""

import contextlib
import copy
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from flcuda import device as devices
from flcuda import timing
from flcuda.device import Device
from flcuda.errors import NOT_SUPPORTED, CudnnError, CudnnNotSupportedError, FlcudaError
from flcuda.finder import measure, ranking
from flcuda.finder.candidate import Candidate
from flcuda.finder.choice import Choice, Key
from flcuda.finder.graph_problem import GraphProblem
from flcuda.finder.plan import Plan, Solution, callers_level, is_refusal
from flcuda.finder.policy import Policy, current_policy
from flcuda.finder.problem import Problem
from flcuda.finder.report import FindReport, Row, labels
from flcuda.finder.sources import REWRITES, Climbing, Source, source_named, sources_for
from flcuda.finder.store import ChoiceStore, default_store
from flcuda.finder.verify import Verifier

Progress = Callable[[int, int], None]

ROUNDS = 3
"""So often at most a search looks around its leaders. See Note [climbing]."""

LEADERS = {"fast": 2, "wide": 3}
"""So many candidates, by effort, it looks around each time: the best of those whose sources know what is near."""

_log = logging.getLogger("flcuda.finder")

# one search at a time: two that measure at once would time each other; re-entrant, since a source may itself ask for a
# plan
_searching = threading.RLock()


def find(
    problem: Problem,
    *,
    policy: Policy | None = None,
    device: str | Device | None = None,
    sources: Sequence[str] | None = None,
    verify: bool | None = None,
    progress: Progress | None = None,
    store: bool = True,
    details: bool = True,
) -> FindReport:
    """Asks every source for candidates, measures them on scratch arrays and ranks them; stores the best.

    Runs on the current stream and takes memory from the current allocator. In the mode "heuristic" nothing is measured
    or stored, and the rows stand in their sources' order. What `plan` would verify is not stored with `verify=False`:
    it would be taken for verified.

    Args:
        problem: what is to be computed.
        policy: by default that of the context, `current_policy()`.
        device: a Device, "cuda", "cpu" or None for a GPU if there is one.
        sources: names of the sources to ask; by default all for the device that know this kind of Problem.
        verify: whether the results of every candidate are compared with float64 ones, so that a wrong one is not used;
            by default those of a GraphProblem are, and those of a convolution where the policy has a `max_error`; with
            the effort "wide", of whatever may win.
        progress: called with the number of candidates tried so far and their number, which grows in a wide search.
        store: whether the best is stored, as the answer for `plan`.
        details: whether the report has what takes time and ranks nothing: names of kernels, clocks.

    Returns:
        The report; its first row is the best by `flcuda.finder.ranking`, or on the CPU, where samples are disturbed, by
        the smallest sample.

    Raises:
        CudnnNotSupportedError: on CUDA, no candidate can be used; the text gives each one's reason.
        ValueError: the same on the CPU; the mode is "pinned", or "heuristic" and `verify` true; `verify` is False and
            the policy has a `max_error`; or an argument is invalid.
        DeviceNotFoundError: the device is not here.
        FlcudaError: a CUDA graph is being captured.
        MemoryError: memory does not suffice for the arrays of a search; the Problem is in a note.
    """
    policy = current_policy() if policy is None else policy
    if policy.mode == "pinned":
        raise ValueError("policy.mode 'pinned' takes stored choices only, there is nothing to find; use flcuda.plan")
    if verify and policy.mode == "heuristic":
        raise ValueError("verify is True and policy.mode 'heuristic', in which nothing is run; use the mode 'find'")
    if verify is False and policy.max_error is not None:
        raise ValueError(f"verify is False, and policy.max_error {policy.max_error} needs every candidate's error")
    place, asked = _resolve(problem, device, sources)
    with _searching, place.use():
        key = Key.of(problem, policy, place, tuple(source.name for source in asked))
        verified = _verifies(key) if verify is None else verify
        report = _search(key, place, asked, progress, verify=verified, details=details)
        if store and policy.mode == "find" and (verified or not _verifies(key)):
            default_store().put(report.best)
        return report


def plan(problem: Problem, *, policy: Policy | None = None, device: str | Device | None = None) -> Plan:
    """Makes a live solution on this thread: of the stored choice, from memory or the folder, else of a new search.

    Where memory does not suffice to search, the first candidate that runs is used, with a warning, and nothing is
    stored.

    Args:
        problem: what is to be computed.
        policy: by default that of the context, `current_policy()`.
        device: a Device, "cuda", "cpu" or None for a GPU if there is one.

    Returns:
        The Plan.

    Raises:
        CudnnNotSupportedError: on CUDA, no candidate can be used; the text gives each one's reason.
        ValueError: the same on the CPU.
        DeviceNotFoundError: the device is not here.
        FlcudaError: nothing is stored, and the mode is "pinned" or a CUDA graph is being captured.
    """
    policy = current_policy() if policy is None else policy
    place, asked = _resolve(problem, device, None)
    store = default_store()
    with place.use():
        key = Key.of(problem, policy, place, tuple(source.name for source in asked))
        pinned = policy.mode == "pinned"
        stored = _stored(key, store)
        found = None if stored is None else _restored(stored, key, place, asked, store, pinned)
        if found is not None:
            return found
        _refuse_to_search(key, store, pinned)
        with _searching:
            # another thread may have searched for the same while this one waited
            newer = _stored(key, store)
            found = None if newer in (None, stored) else _restored(newer, key, place, asked, store, pinned)
            if found is not None:
                return found
            if policy.mode == "heuristic":
                return _first_that_builds(key, place, asked, store)
            report = None
            try:
                report = _search(key, place, asked, None, verify=_verifies(key), details=False)
            except MemoryError as error:
                warnings.warn(
                    f"memory does not suffice to search for {problem} ({error}); the first candidate that runs is used",
                    UserWarning,
                    stacklevel=callers_level(),
                )
            # not in the handler: until that ends, the error's frames keep what the search had allocated
            if report is None:
                return _first_that_builds(_heuristic(key), place, asked, store)
            store.put(report.best)
        best, *others = report.usable
        if best.runner is None:
            raise AssertionError(f"{best.label} was measured without a runner")
        solutions = [(row.choice, row.candidate) for row in others]
        return Plan(best.choice, place, best.runner, others=lambda: iter(solutions), ran=_keeper(store, key))


def _resolve(
    problem: Problem, device: str | Device | None, names: Sequence[str] | None
) -> tuple[Device, tuple[Source, ...]]:
    """Checks the arguments; returns the device and the sources to ask."""
    if not isinstance(problem, Problem):
        raise TypeError(f"problem must be a Problem, not {problem!r} (Problem.parse reads a line)")
    place = devices.resolve(device)
    if names is None:
        return place, sources_for(place, problem)
    asked = tuple(source_named(name) for name in names)
    for source in asked:
        if place.kind not in source.devices:
            raise ValueError(f"sources: {source.name!r} does not compute on {place}")
        if not isinstance(problem, tuple(source.kinds)):
            raise ValueError(f"sources: {source.name!r} does not know a {type(problem).__name__}")
    if not asked:
        raise ValueError("sources is empty: name at least one")
    return place, asked


def _refuse_to_search(key: Key, store: ChoiceStore, pinned: bool) -> None:
    """Raises when a miss must not lead to a search."""
    if pinned:
        raise FlcudaError(
            f"policy.mode is 'pinned' and no choice is stored in {store.folder} for {key.problem} "
            f"({key.text}); find it first and pin it there: flcuda.find(problem).best.pin(folder)"
        )
    if devices.is_capturing():
        raise FlcudaError(
            f"no choice is stored for {key.problem}, and none can be searched while a CUDA graph is captured; "
            "run the step once before the capture"
        )


def _stored(key: Key, store: ChoiceStore) -> Choice | None:
    """Returns the stored choice for a key; in the mode "heuristic" a measured one is the better answer."""
    if key.policy.mode == "heuristic":
        measured = store.get(replace(key, policy=replace(key.policy, mode="find")))
        if measured is not None:
            return measured
    return store.get(key)


def _restored(
    choice: Choice, key: Key, device: Device, asked: tuple[Source, ...], store: ChoiceStore, pinned: bool
) -> Plan | None:
    """Makes the Plan of a stored choice; None, with a warning, when it no longer works."""
    by_name = {source.name: source for source in asked}
    try:
        candidate = by_name[choice.source].restore(key.problem, choice, device)
        runner = candidate.build()
    except (FlcudaError, ValueError, LookupError, MemoryError) as error:
        if pinned:
            raise FlcudaError(
                f"policy.mode is 'pinned' and the stored choice {choice.id} for {key.problem} "
                f"does not work here: {error}"
            ) from error
        warnings.warn(
            f"the stored choice {choice.id} for {key.problem} no longer works: {error}; searching again",
            UserWarning,
            stacklevel=callers_level(),
        )
        return None
    if pinned:
        return Plan(choice, device, runner)
    others = _unmeasured(key, device, asked, {choice.identity})
    # under the choice's own key: in the mode "heuristic" it may be that of a measured one
    return Plan(choice, device, runner, others=others, ran=_keeper(store, choice.key))


def _heuristic(key: Key) -> Key:
    """Returns the key by which the sources are asked without measuring."""
    return replace(key, policy=replace(key.policy, mode="heuristic"))


def _keeper(store: ChoiceStore, key: Key) -> Callable[[Choice], None]:
    """Returns what a Plan calls with the choice that it ran instead, or without measuring: kept for this process only.

    Memory may suffice again in the next process, so the folder keeps the measured choice.
    """

    def keep(choice: Choice) -> None:
        store.put(replace(choice, key=key), folder=False)

    return keep


def _unmeasured(
    key: Key, device: Device, asked: tuple[Source, ...], tried: set[object]
) -> Callable[[], Iterator[Solution]]:
    """Returns an iterator, made when needed, over the candidates in their sources' order, without those tried.

    Where results are verified, only those that are right are among them, and none when memory does not suffice for
    that: one of them may be what a search rejected as wrong.
    """

    def others() -> Iterator[Solution]:
        right: Callable[[Candidate], bool] | None = None
        for candidate in _offered(_heuristic(key), device, asked):
            if candidate.reason is not None or candidate.identity in tried:
                continue
            if _verifies(key) and key.policy.mode != "heuristic":
                try:
                    right = right or _judge(key, device)
                    if not right(candidate):
                        continue
                except MemoryError:
                    return
            yield Choice.of(key, candidate), candidate

    return others


def _judge(key: Key, device: Device) -> Callable[[Candidate], bool]:
    """Returns what says of a candidate whether it runs and its results are right, and repeat where that is asked."""
    problem = key.problem
    arrays = measure.with_memory(lambda: problem.random_arrays(device=device), device)
    verifier = Verifier(problem, tuple(arrays[name] for name in problem.inputs), device)

    def right(candidate: Candidate) -> bool:
        try:
            found = verifier.check(candidate.build(), deterministic=key.policy.deterministic)
        except CudnnError:
            return False
        limit = devices.workspace_limit(device)
        return found.reason is None and ranking.refusal(candidate, found, key.policy, limit) is None

    return right


def _first_that_builds(key: Key, device: Device, asked: tuple[Source, ...], store: ChoiceStore) -> Plan:
    """Makes the Plan of the first candidate that builds; the others follow when it does not run.

    A source is asked only when those before it had nothing.
    """
    reasons = []
    refused = []
    candidates = _offered(key, device, asked)
    for candidate in candidates:
        if candidate.reason is not None:
            reasons.append(f"{candidate.id}: {candidate.reason}")
            refused.append(candidate)
            continue
        try:
            runner = candidate.build()
        except (CudnnError, MemoryError) as error:
            if not is_refusal(error):
                error.add_note(f"problem: {key.problem}; candidate: {candidate.id}")
                raise
            reasons.append(f"{candidate.id}: {error}")
            continue
        others = _solutions(key, candidates)
        return Plan(Choice.of(key, candidate), device, runner, others=others.__iter__, ran=_keeper(store, key))
    raise _nothing_usable(key, device, "; ".join(dict.fromkeys(reasons)), refused)


def _solutions(key: Key, candidates: Iterator[Candidate]) -> Iterator[Solution]:
    for candidate in candidates:
        if candidate.reason is None:
            yield Choice.of(key, candidate), candidate


def _nothing_usable(
    key: Key, device: Device, reasons: str, candidates: Sequence[Candidate] = ()
) -> FlcudaError | ValueError:
    text = f"no candidate can be used for {key.problem} under {key.policy}: {reasons or 'there is none'}"
    if key.problem.math == "fma" and any(candidate.math == "tensor_op" for candidate in candidates):
        text += "; those that use tensor cores need a Problem of math 'tensor_op' (TF32 on float32 operands)"
    if device.kind == "cpu":
        return ValueError(text)
    return CudnnNotSupportedError("flcuda.find", NOT_SUPPORTED, text, "CUDNN_STATUS_NOT_SUPPORTED")


def _offered(key: Key, device: Device, asked: tuple[Source, ...]) -> Iterator[Candidate]:
    """Asks the sources one after the other; what the policy forbids gets a reason."""
    limit = devices.workspace_limit(device)
    for source in _in_order(key, asked):
        offered: list[Candidate] = []
        try:
            offered.extend(source.candidates(key.problem, key.policy, device))
        except CudnnNotSupportedError as error:
            offered.append(_refused(source, key.problem, error))
        for candidate in offered:
            yield _judged(candidate, key, limit)


def _judged(candidate: Candidate, key: Key, limit: int) -> Candidate:
    """Gives a candidate, with a reason when the policy forbids it."""
    reason = candidate.reason or ranking.refusal(candidate, None, key.policy, limit)
    return candidate if reason == candidate.reason else replace(candidate, reason=reason)


def _in_order(key: Key, asked: tuple[Source, ...]) -> list[Source]:
    """Gives the sources in the order of the rows, which decides where nothing is measured.

    Over the convolutions of ResNet-34 on an H200, cuDNN's legacy algorithms take 42 ms in strict float32 and its graph
    API 56, in float16 they take 13 and the graph API 6. So without tensor cores the graph API comes after them. Then
    come our own kernels, and last those that rewrite a Problem: whether that pays, only a measurement says.
    """
    if key.policy.mode != "heuristic":
        return list(asked)
    later = "graph" if key.problem.math == "fma" else None
    return sorted(asked, key=lambda source: (source.name in REWRITES, source.name == "depthwise", source.name == later))


def _refused(source: Source, problem: Problem, error: CudnnNotSupportedError) -> Candidate:
    """Makes the row of a source that has nothing, or nothing more, to offer."""
    # the row lives as long as the report: a copy has no traceback and no cause, whose frames keep what the source had
    # allocated when it refused; and what is raised is another one, since it gets the frames of its caller
    refusal = copy.copy(error)

    def build() -> object:
        raise copy.copy(refusal)

    return Candidate(
        source=source.name,
        algo="all",
        math=problem.math,
        workspace=0,
        deterministic=True,
        build=build,  # type: ignore[arg-type]
        reason=measure.failure_reason(error),
    )


def _unmeasured_rows(key: Key, device: Device, asked: tuple[Source, ...]) -> list[Row]:
    candidates = list(_offered(key, device, asked))
    rows = [
        Row(label=label, candidate=candidate, choice=Choice.of(key, candidate), device=device, reason=candidate.reason)
        for label, candidate in zip(labels(candidates), candidates, strict=True)
    ]
    return sorted(rows, key=lambda row: row.reason is not None)


def _verifies(key: Key) -> bool:
    """Says whether results are verified where nobody says otherwise, so that a stored choice counts as verified."""
    policy = key.policy
    return isinstance(key.problem, GraphProblem) or policy.max_error is not None or policy.effort == "wide"


def _search(
    key: Key,
    device: Device,
    asked: tuple[Source, ...],
    progress: Progress | None,
    *,
    verify: bool,
    details: bool,
) -> FindReport:
    """Makes the report for a key, or raises when nothing is usable; the details are what only a reader wants."""
    if devices.is_capturing():
        raise FlcudaError(f"nothing can be searched for {key.problem} while a CUDA graph is captured")
    measured = key.policy.mode != "heuristic"
    start = time.perf_counter()
    if measured:
        _log.info("searching for %s on %s", key.problem, device)
        try:
            rows, seconds = _measured_rows(key, device, asked, progress, verify, details)
        except (CudnnError, MemoryError) as error:
            error.add_note(f"problem: {key.problem}")
            raise
    else:
        rows, seconds = _unmeasured_rows(key, device, asked), {}
    seconds["search"] = time.perf_counter() - start
    clocks = timing.clocks(device) if measured and details else None
    report = FindReport(key, device, rows, clocks=clocks, seconds=seconds)
    if not report.usable:
        raise _nothing_usable(key, device, report.reasons, [row.candidate for row in rows])
    if measured:
        _log.info("found %s for %s in %.2f s", report.best.id, key.problem, seconds["search"])
    return report


def _measured_rows(
    key: Key, device: Device, asked: tuple[Source, ...], progress: Progress | None, verify: bool, details: bool
) -> tuple[list[Row], dict[str, float]]:
    """Measures the candidates; gives the rows, and the seconds of asking the sources and of measuring."""
    climbs = {source.name: source for source in asked if isinstance(source, Climbing)}
    with contextlib.ExitStack() as stack:
        for source in climbs.values():
            stack.enter_context(source.climbing())
        return _climbed_rows(key, device, asked, climbs, progress, verify, details)


def _climbed_rows(
    key: Key,
    device: Device,
    asked: tuple[Source, ...],
    climbs: Mapping[str, Climbing],
    progress: Progress | None,
    verify: bool,
    details: bool,
) -> tuple[list[Row], dict[str, float]]:
    """See `_measured_rows`; the sources that climb keep what they need for it."""
    start = time.perf_counter()
    problem, policy = key.problem, key.policy
    candidates = list(_offered(key, device, asked))
    asked_s = time.perf_counter() - start
    sets = measure.with_memory(lambda: measure.operand_sets(problem, device, policy), device)
    verifier = None
    if verify and any(candidate.reason is None for candidate in candidates):
        inputs = sets[0][: len(problem.inputs)]
        verifier = measure.with_memory(lambda: Verifier(problem, inputs, device), device)
    limit = devices.workspace_limit(device)

    def run(
        some: Sequence[Candidate], known: Sequence[measure.Measurement], *, fine: bool
    ) -> list[measure.Measurement]:
        announced = _announced(some, progress, len(candidates))
        return measure.measure(
            announced, sets, device, policy, verifier, workspace_limit=limit, kernels=details, known=known, fine=fine
        )

    measured = run(candidates, (), fine=not climbs)
    around: set[object] = set()
    for _ in range(ROUNDS if climbs else 0):
        fresh = [_judged(each, key, limit) for each in _neighbours(key, device, climbs, measured, around)]
        if not fresh:
            break
        candidates += fresh
        measured = run(fresh, measured, fine=False)
    if climbs:
        measured = run((), measured, fine=True)
    rows = _rows(key, device, candidates, measured)
    _warn_of_workspace(key, rows)
    return rows, {"sources": asked_s, "measure": time.perf_counter() - start - asked_s}


def _neighbours(
    key: Key,
    device: Device,
    climbs: Mapping[str, Climbing],
    measured: Sequence[measure.Measurement],
    around: set[object],
) -> list[Candidate]:
    """Gives what lies around the leaders and is new; notes in `around` whose neighbours have been asked for."""
    known = {each.candidate.identity for each in measured}
    found: dict[object, Candidate] = {}
    leaders = [
        each.candidate
        for each in measured
        if each.reason is None and each.timing is not None and each.candidate.source in climbs
    ]
    for leader in leaders[: LEADERS[key.policy.effort]]:
        if leader.identity in around:
            continue
        around.add(leader.identity)
        for candidate in climbs[leader.source].around(key.problem, leader, key.policy, device):
            if candidate.identity not in known:
                found.setdefault(candidate.identity, candidate)
    return list(found.values())


def _rows(
    key: Key, device: Device, candidates: Sequence[Candidate], measured: Sequence[measure.Measurement]
) -> list[Row]:
    names = dict(zip((id(candidate) for candidate in candidates), labels(list(candidates)), strict=True))
    return [
        Row(
            label=names[id(each.candidate)],
            candidate=_as_seen(each),
            choice=Choice.of(
                key,
                _as_seen(each),
                None if each.timing is None else each.timing.median_ms,
                None if each.timing is None else each.timing.spread_ms,
            ),
            device=device,
            timing=each.timing,
            build_ms=each.build_ms if each.candidate.reason is None else None,
            first_run_ms=each.first_run_ms,
            reason=each.reason,
            verification=each.verification,
            kernels=each.kernels,
            runner=each.runner,
        )
        for each in measured
    ]


def _as_seen(measured: measure.Measurement) -> Candidate:
    """Gives the candidate, which is not deterministic when its bits were seen to differ, whatever its library says."""
    seen = measured.verification
    if seen is None or seen.repeats is not False:
        return measured.candidate
    return replace(measured.candidate, deterministic=False)


def _announced(candidates: Sequence[Candidate], progress: Progress | None, total: int) -> Iterator[Candidate]:
    """Yields the last candidates of a total, telling `progress` of each one that is taken."""
    start = total - len(candidates)
    for index, candidate in enumerate(candidates):
        if progress is not None:
            progress(start + index, total)
        yield candidate
    if progress is not None:
        progress(total, total)


def _warn_of_workspace(key: Key, rows: list[Row]) -> None:
    """Warns when a candidate above the workspace limit claims to be faster than the best."""
    usable = [row for row in rows if row.reason is None and row.timing is not None]
    if not usable or usable[0].timing is None:
        return
    best = usable[0].timing.median_ms
    for row in rows:
        claimed = row.candidate.reported_ms
        if row.reason is not None and row.reason.startswith("workspace of") and claimed is not None and claimed < best:
            warnings.warn(
                f"the workspace limit excluded {row.label}, which claims {claimed:.3f} ms against {best:.3f} ms of "
                f"{usable[0].label}: {row.reason} ({key.problem})",
                UserWarning,
                stacklevel=callers_level(),
            )
            return
