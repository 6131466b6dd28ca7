"""Many Problems at once: what each of several policies would cost, and whether a search repeated finds the same.

Nothing here reads or writes the store.

Note [one measurement]: two searches never give quite the same times, so what policies would pick is compared by one
search a Problem, which refuses nothing that any of them permits; each pick is read from its rows, and costs what was
measured there. Only what changes the measurement itself (effort and cache) needs a search of its own. A heuristic's
pick is the first that works in its own order, and costs what the search measured for it.
"""

import html
import io
import json
import math
import statistics
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flcuda import device as devices
from flcuda.device import Device
from flcuda.errors import CudnnError, KernelCompileError
from flcuda.finder import ranking, search
from flcuda.finder.candidate import Candidate
from flcuda.finder.choice import library_version
from flcuda.finder.measure import failure_reason
from flcuda.finder.policy import Policy, current_policy
from flcuda.finder.problem import Problem
from flcuda.finder.report import FindReport, Row, labels, milliseconds

Progress = Callable[[int, int, Problem], None]
"""Called with the number of searches done, their number and the Problem of the next one; at the end, of the last."""

FAILURES = (CudnnError, KernelCompileError, MemoryError, ValueError)
"""What the search of one Problem raises without saying anything of the next one's."""

NOTABLE = 0.02
"""A smaller difference from the first policy is called neither faster nor slower."""

SHOWN = 10
"""Problems in the list of those that differ most, in print."""

_WIDTH = 80


@dataclass(frozen=True, slots=True)
class Cost:
    """What one policy would pick for one Problem.

    Attributes:
        ms: median milliseconds on the device; None when there is no pick.
        id: names the candidate as a report does; None for a time from elsewhere.
        spread_ms: distance of the 10th and the 90th percentile.
        host_us: microseconds that a call keeps the host.
        workspace: bytes.
        deterministic: as its source promises, or as was seen.
        reason: why there is no pick.
    """

    ms: float | None
    id: str | None = None
    spread_ms: float | None = None
    host_us: float | None = None
    workspace: int | None = None
    deterministic: bool | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that say something, by their names."""
        values = {name: getattr(self, name) for name in Cost.__slots__}
        return {name: value for name, value in values.items() if value is not None or name == "ms"}


@dataclass(frozen=True)
class Comparison:
    """What several policies would cost over the same Problems; the first one is what the others are compared with.

    Attributes:
        device: where was measured.
        device_model: what it is.
        library_version: what computed.
        policies: by their names, in order.
        counts: how often each Problem occurs.
        costs: for each Problem that could be measured what each policy, and each column of `with_times`, costs.
        failures: why the others could not.
        seconds: that the searches took.
        foreign: names of the columns of `with_times`.
    """

    device: Device
    device_model: Mapping[str, int | str]
    library_version: str
    policies: Mapping[str, Policy]
    counts: Mapping[Problem, int]
    costs: Mapping[Problem, Mapping[str, Cost]]
    failures: Mapping[Problem, str] = field(default_factory=dict)
    seconds: float = 0.0
    foreign: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The columns: the policies, then those of `with_times`."""
        return (*self.policies, *self.foreign)

    def total_ms(self, name: str) -> float:
        """Returns the milliseconds of all Problems for which a column has a time, each as often as it occurs."""
        return math.fsum(self.counts[problem] * ms for problem, ms in self._times(name).items())

    def ratio(self, name: str) -> float:
        """Returns a column's total over the first policy's, of the Problems for which both have a time.

        Above 1 the column is slower; NaN when there is no such Problem.
        """
        pairs = self._pairs(name)
        first = math.fsum(self.counts[problem] * own for problem, (own, _) in pairs.items())
        return math.fsum(self.counts[problem] * ms for problem, (_, ms) in pairs.items()) / first if pairs else math.nan

    def geometric_mean(self, name: str) -> float:
        """Returns the geometric mean of a column's times over the first policy's, each distinct Problem once.

        Of the Problems for which both have a time; NaN when there is none.
        """
        pairs = self._pairs(name)
        return statistics.geometric_mean([ms / own for own, ms in pairs.values()]) if pairs else math.nan

    def missing(self, name: str) -> list[Problem]:
        """Returns the measured Problems for which a column has no time."""
        times = self._times(name)
        return [problem for problem in self.costs if problem not in times]

    def differing(self) -> list[tuple[Problem, float]]:
        """Returns the Problems for which columns differ, with the largest time over the smallest, the largest first."""
        found = []
        for problem, costs in self.costs.items():
            times = [cost.ms for cost in costs.values() if cost.ms is not None]
            if times and max(times) > min(times):
                found.append((problem, max(times) / min(times)))
        return sorted(found, key=lambda entry: -entry[1])

    def with_times(self, name: str, times: Mapping[Problem, float]) -> "Comparison":
        """Adds a column of times that come from elsewhere, such as another library's.

        Args:
            name: of the column.
            times: milliseconds by Problem; those of which there is none are left out of this column's ratios.

        Returns:
            A new Comparison.

        Raises:
            ValueError: the name is taken, a Problem is not of this comparison, or a time is not above 0 and finite.
        """
        if name in self.names:
            raise ValueError(f"name {name!r} is taken; there are {', '.join(self.names)}")
        for problem, ms in times.items():
            if problem not in self.counts:
                raise ValueError(f"times: {problem} is not of this comparison")
            if not 0 < ms < math.inf:
                raise ValueError(f"times: {ms} milliseconds for {problem} must be a finite number above 0")
        costs = {
            problem: {**own, name: Cost(float(times[problem]) if problem in times else None)}
            for problem, own in self.costs.items()
        }
        return replace(self, costs=costs, foreign=(*self.foreign, name))

    def __str__(self) -> str:
        """The totals and the Problems that differ most, in at most 80 columns."""
        parts = [*(_hanging("", line) for line in self._heading()), _rendered(self._table())]
        differing = self.differing()
        if differing:
            parts.append(f"differing most (milliseconds), {min(SHOWN, len(differing))} of {len(differing)}:")
        for problem, ratio in differing[:SHOWN]:
            costs = "; ".join(self._cost_text(name, cost) for name, cost in self.costs[problem].items())
            parts += [
                _hanging(f"{ratio:7.2f} x  ", f"{problem}{_often(self.counts[problem])}"),
                _hanging(" " * 11, costs),
            ]
        for name in self.policies:
            parts += by_reason(f"{name} has no time:", self._reasons(name))
        parts += by_reason("not measured:", self.failures)
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        """The totals and every Problem as HTML tables."""
        head = ["policy", "total ms", "ratio", "geo. mean", "faster", "slower", "missing"]
        totals = _html_table(head, [[name, *self._cells(name)] for name in self.names])
        rows = [
            [str(problem), str(self.counts[problem]), *(self._html_cost(costs[name]) for name in self.names)]
            for problem, costs in self.costs.items()
        ]
        every = _html_table(["problem", "times", *self.names], rows)
        lost = _html_table(["not measured", "reason"], [[str(p), why] for p, why in self.failures.items()])
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in self._heading())
        return f"<div>{lines}{totals}{every}{lost if self.failures else ''}</div>"

    def to_json(self) -> str:
        """Returns the comparison as JSON text: where and how, the totals, and every Problem's costs."""
        value = {
            "device": str(self.device),
            "device_model": dict(self.device_model),
            "library_version": self.library_version,
            "seconds": self.seconds,
            "policies": {name: policy.to_json() for name, policy in self.policies.items()},
            "totals": {
                name: {
                    "total_ms": self.total_ms(name),
                    "ratio": _finite(self.ratio(name)),
                    "geometric_mean": _finite(self.geometric_mean(name)),
                    "missing": len(self.missing(name)),
                }
                for name in self.names
            },
            "problems": [
                {
                    "problem": str(problem),
                    "count": self.counts[problem],
                    "costs": {name: cost.to_json() for name, cost in costs.items()},
                }
                for problem, costs in self.costs.items()
            ],
            "failures": _failures_json(self.failures, self.counts),
        }
        return json.dumps(value, indent=2)

    def _times(self, name: str) -> dict[Problem, float]:
        if name not in self.names:
            raise ValueError(f"name {name!r} must be one of {', '.join(self.names)}")
        own = {problem: costs[name].ms for problem, costs in self.costs.items()}
        return {problem: ms for problem, ms in own.items() if ms is not None}

    def _pairs(self, name: str) -> dict[Problem, tuple[float, float]]:
        """Gives the first policy's time and that of a column where both have one."""
        first = self._times(self.names[0])
        return {problem: (first[problem], ms) for problem, ms in self._times(name).items() if problem in first}

    def _heading(self) -> list[str]:
        caches = " and ".join(dict.fromkeys(policy.l2 for policy in self.policies.values()))
        return [
            _where(self.device, self.device_model, self.library_version),
            f"{_many(self.counts)}; device time, L2 {caches}; ratios to {self.names[0]}",
        ]

    def _cells(self, name: str) -> list[str]:
        pairs = self._pairs(name)
        faster = sum(ms < own * (1 - NOTABLE) for own, ms in pairs.values())
        slower = sum(ms > own * (1 + NOTABLE) for own, ms in pairs.values())
        return [
            milliseconds(self.total_ms(name)) if self._times(name) else "-",
            f"{self.ratio(name):.3f}" if pairs else "-",
            f"{self.geometric_mean(name):.3f}" if pairs else "-",
            str(faster),
            str(slower),
            str(len(self.missing(name))),
        ]

    def _table(self) -> Table:
        table = _new_table()
        table.add_column("", overflow="fold")
        for title in ("total ms", "ratio", "geo. mean", "faster", "slower", "missing"):
            table.add_column(title, justify="right", no_wrap=True)
        for name in self.names:
            table.add_row(Text(name), *self._cells(name))
        return table

    def _reasons(self, name: str) -> dict[Problem, str]:
        return {problem: costs[name].reason or "" for problem, costs in self.costs.items() if costs[name].ms is None}

    @staticmethod
    def _cost_text(name: str, cost: Cost) -> str:
        if cost.ms is None:
            return f"{name} none"
        # without knobs, which may be wider than a line; the JSON has them
        return f"{name} {milliseconds(cost.ms)}" + (f" {cost.id.partition('/')[0]}" if cost.id else "")

    @staticmethod
    def _html_cost(cost: Cost) -> str:
        if cost.ms is None:
            return cost.reason or ""
        return f"{milliseconds(cost.ms)} {cost.id or ''}".strip()


def compare(
    problems: Iterable[Problem],
    policies: Mapping[str, Policy],
    *,
    device: str | Device | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Says what several policies would pick for Problems, and what that would cost. See Note [one measurement].

    The costs are milliseconds of the device for all policies, also for those that rank by the host's. The store is
    neither read nor written.

    Args:
        problems: what is to be computed; one that stands several times is searched once and counts as often.
        policies: by names for the table; the first one is what the others are compared with.
        device: a Device, "cuda", "cpu" or None for a GPU if there is one.
        progress: called before each search and at the end.

    Returns:
        The comparison; Problems of which nothing can be measured are among its `failures`.

    Raises:
        ValueError: there are no problems or no policies, or the mode of one is "pinned".
        TypeError: something is not a Problem or not a Policy.
        DeviceNotFoundError: the device is not here.
        FlcudaError: a CUDA graph is being captured.
    """
    counts = _counts(problems)
    named = _policies(policies)
    place = devices.resolve(device)
    groups: dict[tuple[str, str], list[str]] = {}
    for name, policy in named.items():
        groups.setdefault((policy.effort, policy.l2), []).append(name)
    costs: dict[Problem, dict[str, Cost]] = {}
    failures: dict[Problem, str] = {}
    begin = time.perf_counter()
    for done, problem in enumerate(counts):
        if progress is not None:
            progress(done, len(counts), problem)
        found: dict[str, Cost] = {}
        try:
            for names in groups.values():
                found.update(_searched(problem, {name: named[name] for name in names}, place))
        except FAILURES as error:
            failures[problem] = failure_reason(error)
            continue
        costs[problem] = {name: found[name] for name in named}
    if progress is not None:
        progress(len(counts), len(counts), problem)
    return Comparison(
        device=place,
        device_model=devices.device_model(place),
        library_version=library_version(place),
        policies=named,
        counts=counts,
        costs=costs,
        failures=failures,
        seconds=time.perf_counter() - begin,
    )


def _searched(problem: Problem, policies: Mapping[str, Policy], device: Device) -> dict[str, Cost]:
    """Searches once for policies of the same effort and cache; gives each one's pick. The report's arrays go."""
    every = list(policies.values())
    verify = True if any(policy.max_error is not None for policy in every) else None
    wide = _permissive(every, device)
    report = search.find(problem, policy=wide, device=device, verify=verify, store=False, details=False)
    return {name: _pick(report, policy) for name, policy in policies.items()}


def _permissive(policies: Sequence[Policy], device: Device) -> Policy:
    """Gives the policy that permits whatever one of these does, and measures as they do."""
    default = devices.workspace_limit(device)
    limits = [default if policy.workspace_limit is None else policy.workspace_limit for policy in policies]
    times = {policy.time for policy in policies}
    return Policy(
        deterministic=all(policy.deterministic for policy in policies),
        workspace_limit=None if max(limits) == default else max(limits),
        time=times.pop() if len(times) == 1 else "both",
        effort=policies[0].effort,
        l2=policies[0].l2,
    )


def _pick(report: FindReport, policy: Policy) -> Cost:
    """Reads from a measured report what a policy picks."""
    if policy.mode == "heuristic":
        return _heuristic_pick(report, policy)
    under = report.under(policy)
    if not under.usable:
        return Cost(None, reason=under.reasons)
    return _cost(under.usable[0])


def _heuristic_pick(report: FindReport, policy: Policy) -> Cost:
    """Gives the first candidate of a heuristic's order that works; what fails is passed over, as a Plan passes it."""
    try:
        unmeasured = search.find(report.key.problem, policy=policy, device=report.device, store=False)
    except FAILURES as error:
        return Cost(None, reason=failure_reason(error))
    measured = {row.candidate.identity: row for row in report.rows}
    reasons = []
    for row in unmeasured.usable:
        own = measured.get(row.candidate.identity)
        if own is None:
            # another one would not be what the heuristic picks
            return Cost(None, reason=f"{row.label}, which the heuristic picks, is not among what was measured")
        if own.timing is not None and own.reason is None:
            return _cost(own)
        reasons.append(f"{own.label}: {own.reason}")
    return Cost(None, reason="; ".join(reasons))


def _cost(row: Row) -> Cost:
    if row.timing is None:
        raise AssertionError(f"{row.label} was not measured")
    return Cost(
        ms=row.timing.median_ms,
        id=row.label,
        spread_ms=row.timing.spread_ms,
        host_us=row.timing.host_us,
        workspace=row.candidate.workspace,
        deterministic=row.candidate.deterministic,
    )


# --- one search, many times -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repeated:
    """What the searches of one Problem chose.

    Attributes:
        picks: the candidate that each search chose.
        pooled_ms: of each candidate the median of what all searches measured for it, in milliseconds of the time by
            which the policy ranks.
    """

    picks: tuple[str, ...]
    pooled_ms: Mapping[str, float]

    @property
    def changes(self) -> int:
        """How many searches chose another one than the search before."""
        return sum(one != other for one, other in zip(self.picks, self.picks[1:], strict=False))

    @property
    def best(self) -> str:
        """The best by the pooled medians."""
        return min(self.pooled_ms, key=self.pooled_ms.__getitem__)

    @property
    def regrets(self) -> tuple[float, ...]:
        """How much slower than the best each search's pick is, by the pooled medians: 0.01 is one per cent."""
        best = self.pooled_ms[self.best]
        return tuple(self.pooled_ms[pick] / best - 1 for pick in self.picks)


@dataclass(frozen=True)
class Repetition:
    """Whether a search repeated finds the same, and what it costs when it does not.

    Attributes:
        device: where was measured.
        device_model: what it is.
        library_version: what computed.
        policy: by which was chosen.
        times: how many searches a Problem.
        counts: how often each Problem occurs.
        problems: what was found for each that could be searched.
        failures: why the others could not.
        seconds: that all searches took.
    """

    device: Device
    device_model: Mapping[str, int | str]
    library_version: str
    policy: Policy
    times: int
    counts: Mapping[Problem, int]
    problems: Mapping[Problem, Repeated]
    failures: Mapping[Problem, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def changes(self) -> int:
        """How often a search chose another candidate than the one before, over all distinct Problems."""
        return sum(each.changes for each in self.problems.values())

    @property
    def mean_regret(self) -> float:
        """The mean regret of all picks, each distinct Problem once; NaN when there is none."""
        regrets = [regret for each in self.problems.values() for regret in each.regrets]
        return statistics.fmean(regrets) if regrets else math.nan

    @property
    def largest_regret(self) -> float:
        """The largest regret of a pick; NaN when there is none."""
        return max((max(each.regrets) for each in self.problems.values()), default=math.nan)

    @property
    def total_regrets(self) -> tuple[float, ...]:
        """For each repeat how much longer its picks take together than the best would, Problems as often as they occur.

        0.01 is one per cent.
        """
        best = math.fsum(self.counts[problem] * each.pooled_ms[each.best] for problem, each in self.problems.items())
        if not self.problems:
            return ()
        return tuple(
            math.fsum(self.counts[p] * each.pooled_ms[each.picks[turn]] for p, each in self.problems.items()) / best - 1
            for turn in range(self.times)
        )

    def __str__(self) -> str:
        """The summary and the Problems of largest regret, in at most 80 columns."""
        lines = [
            _where(self.device, self.device_model, self.library_version),
            f"{self.times} searches of each of {_many(self.counts)}",
        ]
        if self.problems:
            steady = sum(each.changes == 0 for each in self.problems.values())
            chances = len(self.problems) * (self.times - 1)
            totals = self.total_regrets
            lines += [
                f"the choice changed in {self.changes} of {chances} repeats; {steady} of {len(self.problems)} problems "
                "never changed",
                f"regret of a pick: mean {self.mean_regret:.2%}, largest {self.largest_regret:.2%}",
                f"regret of all together: mean {statistics.fmean(totals):.2%}, largest {max(totals):.2%}",
            ]
        lines = [textwrap.fill(line, _WIDTH) for line in lines]
        worst = sorted(self.problems.items(), key=lambda entry: -max(entry[1].regrets))
        worst = [(problem, each) for problem, each in worst if len(set(each.picks)) > 1 or max(each.regrets) > 0]
        if worst:
            lines.append("largest regret:")
        for problem, each in worst[:SHOWN]:
            picked = "; ".join(
                f"{name} {milliseconds(each.pooled_ms[name])} ms{_often(count)}"
                for name, count in Counter(each.picks).most_common()
            )
            lines.append(_hanging(f"{max(each.regrets):7.2%}  ", f"{problem}{_often(self.counts[problem])}"))
            lines.append(
                _hanging(" " * 9, f"picked {picked}; best {each.best} {milliseconds(each.pooled_ms[each.best])}")
            )
        return "\n".join([*lines, *by_reason("not searched:", self.failures)])

    def to_json(self) -> str:
        """Returns all of it as JSON text; regrets as shares of the best, 0.01 for one per cent."""
        totals = self.total_regrets
        value = {
            "device": str(self.device),
            "device_model": dict(self.device_model),
            "library_version": self.library_version,
            "policy": self.policy.to_json(),
            "times": self.times,
            "seconds": self.seconds,
            "changes": self.changes,
            "chances": len(self.problems) * (self.times - 1),
            "mean_regret": _finite(self.mean_regret),
            "largest_regret": _finite(self.largest_regret),
            "mean_total_regret": statistics.fmean(totals) if totals else None,
            "largest_total_regret": max(totals, default=None),
            "total_regrets": list(totals),
            "problems": [
                {
                    "problem": str(problem),
                    "count": self.counts[problem],
                    "changes": each.changes,
                    "picks": list(each.picks),
                    "best": each.best,
                    "regrets": list(each.regrets),
                    "pooled_ms": dict(each.pooled_ms),
                }
                for problem, each in self.problems.items()
            ],
            "failures": _failures_json(self.failures, self.counts),
        }
        return json.dumps(value, indent=2)


@dataclass
class _Pool:
    """What the searches of one Problem have measured so far, by the identities of the candidates."""

    candidates: dict[object, Candidate] = field(default_factory=dict)
    times_ms: dict[object, list[float]] = field(default_factory=dict)
    picks: list[object] = field(default_factory=list)

    def add(self, report: FindReport, policy: Policy) -> None:
        """Takes what is needed of a report, so that its arrays and plans go."""
        for row in report.usable:
            if row.timing is not None:
                self.candidates.setdefault(row.candidate.identity, row.candidate)
                cost = ranking.cost_ms(row.timing, policy)
                self.times_ms.setdefault(row.candidate.identity, []).append(cost)
        self.picks.append(report.best.identity)

    def result(self) -> Repeated:
        named = dict(zip(self.candidates, labels(list(self.candidates.values())), strict=True))
        return Repeated(
            picks=tuple(named[pick] for pick in self.picks),
            pooled_ms={named[identity]: statistics.median(some) for identity, some in self.times_ms.items()},
        )


def repeat(
    problems: Iterable[Problem],
    times: int,
    policy: Policy | None = None,
    device: str | Device | None = None,
    progress: Progress | None = None,
) -> Repetition:
    """Searches for Problems several times, round after round; says how often the choice changes and what that costs.

    The regret of a pick is how much slower it is than the best, both by the medians over all searches, each of which
    measures every candidate anew. The store is neither read nor written.

    Args:
        problems: what is to be computed; one that stands several times is searched once a round and counts as often.
        times: searches of each, at least 2.
        policy: by default that of the context, `current_policy()`.
        device: a Device, "cuda", "cpu" or None for a GPU if there is one.
        progress: called before each search and at the end.

    Returns:
        The repetition; Problems of which one search fails are among its `failures`.

    Raises:
        ValueError: there are no problems, `times` is less than 2, or the policy's mode does not measure.
        TypeError: something is not a Problem.
        DeviceNotFoundError: the device is not here.
        FlcudaError: a CUDA graph is being captured.
    """
    counts = _counts(problems)
    if isinstance(times, bool) or not isinstance(times, int):
        raise TypeError(f"times must be an integer, not {times!r}")
    if times < 2:
        raise ValueError(f"times {times} must be 2 or more: one search cannot differ from itself")
    policy = current_policy() if policy is None else policy
    if policy.mode != "find":
        raise ValueError(f"policy.mode {policy.mode!r} measures nothing; use 'find'")
    place = devices.resolve(device)
    pools = {problem: _Pool() for problem in counts}
    failures: dict[Problem, str] = {}
    begin = time.perf_counter()
    total = times * len(counts)
    for done, problem in enumerate([*counts] * times):
        if progress is not None:
            progress(done, total, problem)
        if problem in failures:
            continue
        try:
            report = search.find(problem, policy=policy, device=place, store=False, details=False)
            pools[problem].add(report, policy)
        except FAILURES as error:
            failures[problem] = failure_reason(error)
            del pools[problem]
    if progress is not None:
        progress(total, total, problem)
    return Repetition(
        device=place,
        device_model=devices.device_model(place),
        library_version=library_version(place),
        policy=policy,
        times=times,
        counts=counts,
        problems={problem: pool.result() for problem, pool in pools.items()},
        failures=failures,
        seconds=time.perf_counter() - begin,
    )


# --- arguments and text -----------------------------------------------------------------------------------------------


def _counts(problems: Iterable[Problem]) -> dict[Problem, int]:
    """Counts the Problems, in the order of their first occurrence."""
    found: dict[Problem, int] = {}
    for problem in problems:
        if not isinstance(problem, Problem):
            raise TypeError(f"problems: {problem!r} is no Problem (Problem.parse reads a line)")
        found[problem] = found.get(problem, 0) + 1
    if not found:
        raise ValueError("problems is empty: name at least one")
    return found


def _policies(policies: Mapping[str, Policy]) -> dict[str, Policy]:
    named = dict(policies)
    if not named:
        raise ValueError("policies is empty: name at least one")
    for name, policy in named.items():
        if not isinstance(policy, Policy):
            raise TypeError(f"policies: {name!r} must be a Policy, not {policy!r}")
        if policy.mode == "pinned":
            raise ValueError(
                f"policies: the mode of {name!r} is 'pinned', which takes stored choices and picks nothing"
            )
    return named


def _where(device: Device, model: Mapping[str, int | str], version: str) -> str:
    text = f"{device.kind}: {model.get('name', 'unknown')}, {version}"
    return f"{text}; says nothing about a GPU" if device.kind == "cpu" else text


def _many(counts: Mapping[Problem, int]) -> str:
    total = sum(counts.values())
    word = "problem" if len(counts) == 1 else "problems"
    return f"{len(counts)} {word}" + ("" if total == len(counts) else f", which occur {total} times")


def _often(count: int) -> str:
    return "" if count == 1 else f" ({count} times)"


def _hanging(prefix: str, text: str) -> str:
    """Writes text behind a prefix, further lines below the text."""
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=prefix,
        subsequent_indent=" " * len(prefix),
        break_on_hyphens=False,
        break_long_words=False,
    )


def by_reason(title: str, reasons: Mapping[Problem, str]) -> list[str]:
    """Lists Problems together with those that share a reason.

    Args:
        title: a line of its own, above them.
        reasons: for each Problem.

    Returns:
        Lines of at most 80 columns where the words permit; none when there is no Problem.
    """
    sharing: dict[str, list[Problem]] = {}
    for problem, reason in reasons.items():
        sharing.setdefault(reason.replace(str(problem), "it"), []).append(problem)
    lines = [title] if reasons else []
    for reason, some in sharing.items():
        lines += [_hanging("  ", str(problem)) for problem in some]
        lines.append(_hanging("    ", reason))
    return lines


def _new_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)


def _rendered(table: Table) -> str:
    text = io.StringIO()
    Console(file=text, width=_WIDTH, force_terminal=False, color_system=None, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))


def _html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f"<table><thead>{row(head, 'th')}</thead><tbody>{body}</tbody></table>"


def _failures_json(failures: Mapping[Problem, str], counts: Mapping[Problem, int]) -> list[dict[str, Any]]:
    return [
        {"problem": str(problem), "count": counts[problem], "reason": reason} for problem, reason in failures.items()
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
