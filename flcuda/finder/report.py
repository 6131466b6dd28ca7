"""What the finder found: every candidate with its times, or the reason why it cannot be used.

Note [shares]: the share of the machine's peak counts the operations of the direct method and each operand once
(`flcuda.finder.peaks.work`). So it may pass 1: where Winograd or Fourier transforms need fewer operations, and in the
memory's share, where operands stay in the cache (`Policy.l2` "warm").
"""

import html
import importlib
import io
import json
import math
import os
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flcuda import device as devices
from flcuda.device import Device
from flcuda.errors import FlcudaError
from flcuda.finder import peaks as machine
from flcuda.finder import ranking
from flcuda.finder.candidate import Candidate, Runner
from flcuda.finder.choice import Choice, Key
from flcuda.finder.peaks import Peaks
from flcuda.finder.plan import Plan
from flcuda.finder.policy import Policy
from flcuda.finder.problem import Problem
from flcuda.finder.verify import Verification
from flcuda.timing import Clocks, Timing

_WIDTH = 80
_MB = 1e6
# rows whose kernels and notes stand below the printed table
_DETAILED = 3
_KERNEL_WIDTH = 72

AXES = (
    "median_ms",
    "spread_ms",
    "host_us",
    "reported_ms",
    "build_ms",
    "first_run_ms",
    "workspace",
    "error",
    "error_of_bound",
    "relative_error",
)
"""The numbers of a row of which less is better, by their names in its JSON: axes of `FindReport.pareto` and `plot`."""


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate of a report.

    Attributes:
        label: names it within the report: source and algo, with math and parameters where others share these.
        candidate: the candidate.
        choice: the Choice that it would be.
        device: where it was asked for.
        timing: its times; None when it was not measured.
        build_ms: milliseconds to build it; None when that was not tried.
        first_run_ms: milliseconds of its first run, which loads its kernels; None when it did not come to it.
        reason: why it cannot be used, also when the policy forbids it; None when it can.
        verification: whether its results are right; None when that was not asked.
        runner: what was measured, on the thread that searched; None when it was not.
        kernels: names of the kernels of one run; None when that was not asked or cannot be known.
    """

    label: str
    candidate: Candidate
    choice: Choice
    device: Device
    timing: Timing | None = None
    build_ms: float | None = None
    first_run_ms: float | None = None
    reason: str | None = None
    verification: Verification | None = None
    runner: Runner | None = field(default=None, repr=False, compare=False)
    kernels: tuple[str, ...] | None = None

    def plan(self) -> Plan:
        """Makes a Plan that runs this candidate and no other, on this thread; also one that the policy forbids.

        Raises:
            CudnnNotSupportedError: its source cannot build it.
        """
        with self.device.use():
            return Plan(self.choice, self.device, self.candidate.build())

    def pin(self, folder: str | os.PathLike[str]) -> Path:
        """Writes this row's Choice into a folder of choices, so that the mode "pinned" uses it.

        Raises:
            FlcudaError: it cannot be used; the text says why.
            OSError: the folder cannot be written.
        """
        if self.reason is not None:
            raise FlcudaError(f"{self.label} cannot be pinned: {self.reason}")
        return self.choice.pin(folder)

    @property
    def deterministic(self) -> bool:
        """Whether its source promises the same bits in each run, and none were seen to differ."""
        return self.candidate.deterministic and (self.verification is None or self.verification.repeats is not False)

    @property
    def tflop_per_s(self) -> float | None:
        """10^12 floating-point operations a second, of the direct method; None without a time or operations."""
        flops, _ = machine.work(self.choice.problem)
        return _rate(flops, self.timing, 1e12)

    @property
    def gb_per_s(self) -> float | None:
        """10^9 bytes a second, each operand once; None without a time."""
        _, moved = machine.work(self.choice.problem)
        return _rate(moved, self.timing, 1e9)

    def shares(self, peaks: Peaks | None) -> dict[str, float]:
        """Returns which share it uses of the peak of "arithmetic" and of "memory", as far as known. See Note [shares].

        Args:
            peaks: of the machine.
        """
        if peaks is None:
            return {}
        found = {}
        flops = peaks.arithmetic(self.choice.problem)
        if self.tflop_per_s is not None and flops is not None:
            found["arithmetic"] = 1e12 * self.tflop_per_s / flops
        if self.gb_per_s is not None:
            found["memory"] = 1e9 * self.gb_per_s / peaks.bandwidth
        return found

    def to_json(self, peaks: Peaks | None = None) -> dict[str, Any]:
        """Returns the row as JSON values; times in milliseconds, those of the host in microseconds, workspace in bytes.

        Args:
            peaks: of the machine, for "share_of_peak", the larger share, and "limit", the peak that it is of.
        """
        candidate = self.candidate
        timing = self.timing
        seen = self.verification
        shares = self.shares(peaks)
        limit = max(shares, key=shares.__getitem__, default=None)
        return {
            "id": self.label,
            "source": candidate.source,
            "algo": candidate.algo,
            "math": candidate.math,
            "parameters": dict(candidate.parameters),
            "notes": list(candidate.notes),
            "kernels": None if self.kernels is None else list(self.kernels),
            "median_ms": None if timing is None else timing.median_ms,
            "spread_ms": None if timing is None else timing.spread_ms,
            "samples": None if timing is None else timing.samples,
            "at_least": None if timing is None else timing.at_least,
            "launches": None if timing is None else timing.launches,
            "queued": None if timing is None else timing.queued,
            "host_us": None if timing is None else timing.host_us,
            "tflop_per_s": self.tflop_per_s,
            "gb_per_s": self.gb_per_s,
            "share_of_peak": None if limit is None else shares[limit],
            "limit": limit,
            "reported_ms": candidate.reported_ms,
            "build_ms": self.build_ms,
            "first_run_ms": self.first_run_ms,
            "workspace": candidate.workspace,
            "deterministic": candidate.deterministic,
            "repeats": None if seen is None else seen.repeats,
            "error": None if seen is None else _finite(seen.error),
            "bound": None if seen is None else _finite(seen.bound),
            "error_of_bound": None if seen is None else _error_of_bound(seen),
            "relative_error": None if seen is None else _finite(seen.relative),
            "reason": self.reason,
        }


class FindReport:
    """All candidates for a Problem, ranked.

    Attributes:
        key: Problem, policy, device model, library version and sources.
        device: where they ran.
        rows: the usable ones, the best first, then the others in their sources' order.
        clocks: of the GPU while it measured; None when they were not noted.
        seconds: what the search took, by part.
    """

    def __init__(
        self,
        key: Key,
        device: Device,
        rows: list[Row],
        *,
        clocks: Clocks | None = None,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        self.key = key
        self.device = device
        self.rows = rows
        self.clocks = clocks
        self.seconds = dict(seconds or {})

    @cached_property
    def peaks(self) -> Peaks | None:
        """The peaks of the machine; None on the CPU and for a GPU of an unknown generation."""
        return machine.peaks(self.device)

    @property
    def best(self) -> Choice:
        """The Choice of the best row.

        Raises:
            FlcudaError: no candidate can be used.
        """
        usable = self.usable
        if not usable:
            raise FlcudaError(f"no candidate can be used for {self.key.problem}: {self.reasons}")
        return usable[0].choice

    @property
    def usable(self) -> list[Row]:
        """The rows that can be used, the best first."""
        return [row for row in self.rows if row.reason is None]

    @property
    def reasons(self) -> str:
        """Why the others cannot be used, in one line."""
        return "; ".join(f"{row.label}: {row.reason}" for row in self.rows if row.reason is not None) or "there is none"

    def __getitem__(self, name: str) -> Row:
        """Returns the row of a label, or the best row of a source and algo ("legacy:GEMM").

        Raises:
            KeyError: there is none; the message lists the labels.
        """
        for row in self.rows:
            if row.label == name:
                return row
        for row in self.rows:
            if row.candidate.id == name:
                return row
        raise KeyError(f"no row {name!r}; there are {', '.join(row.label for row in self.rows)}")

    def __len__(self) -> int:
        return len(self.rows)

    # --- other views --------------------------------------------------------------------------------------------------

    def pareto(self, *axes: str) -> list[Row]:
        """Returns the rows worth a choice: those that no other beats.

        A row beats another when it is better in one axis and not worse in any.

        Args:
            axes: names of `AXES`, of which less is better; by default "median_ms" and "workspace".

        Returns:
            Usable rows, by the first axis. Rows that lack a value (`None` in their JSON) are left out.

        Raises:
            ValueError: an axis is unknown; the message lists those that there are.
        """
        names = axes or ("median_ms", "workspace")
        for name in names:
            _check_axis("axes", name)
        found = []
        for row in self.usable:
            values = row.to_json()
            point = tuple(values[name] for name in names)
            if None not in point:
                found.append((point, row))
        best = [(point, row) for point, row in found if not any(_beats(other, point) for other, _ in found)]
        return [row for _, row in sorted(best, key=lambda pair: pair[0])]

    def under(self, policy: Policy) -> "FindReport":
        """Says what another policy would have chosen from the same measurements; nothing is run.

        What the search did not measure, because its own policy forbade it (a candidate that is not deterministic, or
        above the workspace limit), cannot come back: it keeps a reason that says so.

        Args:
            policy: of the mode "find".

        Returns:
            A report of the same rows under that policy's key, ranked and refused anew.

        Raises:
            ValueError: the policy needs what was not measured: another `l2` or `effort`, a `max_error` where nothing
                was verified, times where the mode was "heuristic"; or its mode is not "find".
        """
        old = self.key.policy
        if policy.mode != "find":
            raise ValueError(f"policy.mode {policy.mode!r} must be 'find': only what was measured can be ranked again")
        if old.mode == "heuristic":
            raise ValueError(
                "policy: this report is of the mode 'heuristic', in which nothing was measured; find again"
            )
        for name in ("l2", "effort"):
            if getattr(policy, name) != getattr(old, name):
                raise ValueError(
                    f"policy.{name} {getattr(policy, name)!r}: this report was measured with {getattr(old, name)!r}; "
                    "find again"
                )
        if policy.max_error is not None and all(row.verification is None for row in self.rows):
            raise ValueError(
                f"policy.max_error {policy.max_error}: no result of this report was verified; find again with "
                "verify=True"
            )
        key = replace(self.key, policy=policy)
        rows = [
            replace(row, choice=replace(row.choice, key=key), reason=self._reason_under(row, policy))
            for row in self.rows
        ]
        usable = [row for row in rows if row.reason is None]
        report = FindReport(
            key,
            self.device,
            self._ranked(usable, policy) + [row for row in rows if row.reason is not None],
            clocks=self.clocks,
            seconds=self.seconds,
        )
        report.peaks = self.peaks
        return report

    def _reason_under(self, row: Row, policy: Policy) -> str | None:
        """Says why a row cannot be used under another policy than that of the search."""
        if row.reason is not None and not self._forbids(row):
            return row.reason
        reason = ranking.refusal(row.candidate, row.verification, policy, self._workspace_limit)
        if reason is not None:
            return reason
        if row.timing is None:
            return f"not measured, since the policy of the search forbade it: {row.reason}"
        if row.verification is not None and row.verification.reason is not None:
            return row.verification.reason
        return _UNVERIFIED if policy.max_error is not None and row.verification is None else None

    def _forbids(self, row: Row) -> bool:
        """Says whether a row cannot be used because of the policy, and for no other reason."""
        if row.reason is None:
            return False
        # what was seen to differ is no longer called deterministic, and its reason was another one
        candidates = (row.candidate, replace(row.candidate, deterministic=True))
        return row.reason == _UNVERIFIED or row.reason in (
            ranking.refusal(candidate, row.verification, self.key.policy, self._workspace_limit)
            for candidate in candidates
        )

    @cached_property
    def _workspace_limit(self) -> int:
        """Bytes, where the policy names none."""
        return devices.workspace_limit(self.device)

    def _ranked(self, usable: list[Row], policy: Policy) -> list[Row]:
        """Sorts usable rows anew."""
        if self.device.kind == "cpu":
            return self._ranked_cpu(usable)
        # Of what ranked the search, coarse samples have said already who cannot win; of anything else they have not.
        # A coarse time is that of one sample.
        fine = {row.label for row in usable if policy.time == self.key.policy.time and _timing(row).samples > 1}
        return [
            row
            for group in (True, False)
            for row in ranking.ranked(
                (row for row in usable if (row.label in fine) == group),
                policy,
                timing_of=_timing,
                candidate_of=lambda row: row.candidate,
            )
        ]

    def _ranked_cpu(self, usable: list[Row]) -> list[Row]:
        """Keeps the order of the search, which had the smallest samples; places what comes back by percentiles."""
        before = {row.label: place for place, row in enumerate(self.usable)}
        ordered = sorted((row for row in usable if row.label in before), key=lambda row: before[row.label])
        for row in usable:
            if row.label not in before:
                slower = (at for at, other in enumerate(ordered) if _timing(other).low_ms > _timing(row).low_ms)
                ordered.insert(next(slower, len(ordered)), row)
        return ordered

    # --- for a terminal -----------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """The report as a table of at most 80 columns, and below it what there is to know of the best.

        candidate: source, algo and knobs, and the math where it is not the Problem's; ms: median (`*`: the host was
        slower than the GPU, so that this is the host's time; `≥`: it ran once, and took at least that); spread: of its
        10th to 90th percentile, as a share of the median; peak: share of the machine's, see Note [shares]; MB: of
        workspace; det.: deterministic; error: the largest, as a share of the root mean square of the results.
        """
        text = io.StringIO()
        console = Console(file=text, width=_WIDTH, force_terminal=False, color_system=None, highlight=False)
        console.print(Text(problem_text(self.key.problem)), soft_wrap=True)
        for line in self._head():
            console.print(Text(textwrap.fill(line, _WIDTH)))
        usable = self.usable
        if usable:
            console.print(self._table(usable))
        else:
            console.print("no candidate can be used")
        for line in self._summary():
            console.print(Text(textwrap.fill(line, _WIDTH, subsequent_indent="  ")))
        for line in self._details(usable):
            console.print(Text(line))
        refused = [row for row in self.rows if row.reason is not None]
        if refused:
            console.print("not usable:")
            by_reason: dict[str | None, list[str]] = {}
            for row in refused:
                by_reason.setdefault(row.reason, []).append(row.label)
            for reason, names in by_reason.items():
                text_of = f"  {', '.join(dict.fromkeys(names))}: {reason}"
                console.print(Text(textwrap.fill(text_of, _WIDTH, subsequent_indent="    ")))
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))

    def _head(self) -> list[str]:
        """Gives the machine, and what a reader has to know of the times."""
        lines = [self._machine]
        if self.device.kind == "cpu":
            lines.append("measured on the CPU (ranked by the smallest sample): says nothing about a GPU")
        asked = {name: value for name, value in self.key.policy.to_json().items() if value != _DEFAULTS[name]}
        if asked:
            lines.append("policy: " + ", ".join(f"{name} {value}" for name, value in asked.items()))
        return lines

    @property
    def _machine(self) -> str:
        model = dict(self.key.device_model)
        return f"{self.device.kind}: {model.get('name', 'unknown')}, {self.key.library_version}"

    def _table(self, usable: list[Row]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
        table.add_column("#", justify="right", no_wrap=True)
        table.add_column("candidate", overflow="fold")
        for name, width in (("ms", 6), ("spread", 6), ("host us", 7)):
            table.add_column(name, justify="right", min_width=width, no_wrap=True)
        shares = [row.shares(self.peaks) for row in usable]
        if any(shares):
            table.add_column("peak", justify="right", min_width=4, no_wrap=True)
        table.add_column("MB", justify="right", min_width=6, no_wrap=True)
        table.add_column("det.", no_wrap=True)
        verified = any(row.verification is not None for row in usable)
        if verified:
            table.add_column("error", justify="right", min_width=7, no_wrap=True)
        for rank, (row, share) in enumerate(zip(usable, shares, strict=True), 1):
            timing = row.timing
            cells = [str(rank), self._named(row)]
            if timing is None:
                cells += ["-", "-", "-"]
            else:
                spread = f"{100 * timing.spread_ms / timing.median_ms:.0f}%" if timing.median_ms > 0 else "-"
                # the first run, which loads kernels, says no more than that
                once = timing.at_least
                cells += [
                    ("≥" if once else "") + milliseconds(timing.median_ms) + ("*" if _host_bound(timing) else ""),
                    spread if timing.samples > 1 else "-",
                    "-" if once else f"{timing.host_us:.{0 if timing.host_us >= 99.95 else 1}f}",
                ]
            if any(shares):
                cells.append(f"{100 * max(share.values()):.0f}%" if share else "-")
            cells += [f"{row.candidate.workspace / _MB:.1f}", "yes" if row.deterministic else "no"]
            if verified:
                cells.append("-" if row.verification is None else f"{row.verification.relative:.1e}")
            table.add_row(*cells)
        return table

    def _named(self, row: Row) -> str:
        """Gives source, algo and knobs, and the math where it is not the one that the Problem asks for."""
        parameters = dict(row.candidate.parameters)
        # cuDNN's own word for the math, where there is one, says more than "fma" or "tensor_op".
        word = str(parameters.pop("math_type", row.candidate.math))
        words = [] if word.lower() == self.key.problem.math else [word]
        return " ".join([row.candidate.id, *words, *(f"{name}={value}" for name, value in parameters.items())])

    def _summary(self) -> list[str]:
        """Gives a line each on the rates of the best, the clocks, and the price of what the policy asks."""
        usable = self.usable
        lines = []
        if usable and usable[0].timing is not None:
            lines.append(f"best: {self._rates(usable[0])}")
            if any(_host_bound(row.timing) for row in usable):
                lines.append("*: the host launches more slowly than the GPU runs; this is the host's time")
        if self.device.kind == "cuda" and any(row.timing is not None for row in self.rows):
            lines.append(self._clocks())
        lines += self._prices()
        if self.seconds:
            lines.append("took: " + ", ".join(f"{name} {value:.2f} s" for name, value in self.seconds.items()))
        return lines

    def _rates(self, row: Row) -> str:
        shares = row.shares(self.peaks)
        arithmetic = None if self.peaks is None else self.peaks.arithmetic(self.key.problem)
        words = []
        if row.tflop_per_s is not None:
            of = "" if arithmetic is None else f" ({100 * shares['arithmetic']:.0f}% of {_four(arithmetic / 1e12)})"
            words.append(f"{_four(row.tflop_per_s)} TFLOP/s{of}")
        if row.gb_per_s is not None:
            of = f" ({100 * shares['memory']:.0f}% of {self.peaks.bandwidth / 1e9:.0f})" if self.peaks else ""
            words.append(f"{_four(row.gb_per_s)} GB/s{of}")
        text = ", ".join(words)
        if len(shares) > 1:
            text += f"; {max(shares, key=shares.__getitem__)} is the nearer peak"
        return text or "-"

    def _clocks(self) -> str:
        clocks = self.clocks
        if clocks is None:
            return "clocks and throttling were not noted (the package nvidia-ml-py reads them)"
        throttled = f"throttled: {', '.join(clocks.throttled)}" if clocks.throttled else "not throttled"
        return f"clocks: SM {clocks.sm_mhz} of {clocks.sm_max_mhz} MHz, memory {clocks.memory_mhz} MHz; {throttled}"

    def _prices(self) -> list[str]:
        """Says what determinism costs, whether or not the policy asks for it, and what the workspace limit costs."""
        usable = [row for row in self.usable if row.timing is not None]
        if not usable:
            return []
        best = usable[0]
        lines = []
        if not best.deterministic:
            repeatable = [row for row in usable if row.deterministic]
            if repeatable:
                lines.append(f"best deterministic: {self._beside(repeatable[0], best)}")
            else:
                lines.append("best deterministic: no usable candidate is deterministic")
        forbidden = [row for row in self.rows if self._forbids(row)]
        racy = [row for row in forbidden if not row.deterministic] if self.key.policy.deterministic else []
        limit = self.key.policy.workspace_limit
        limit = self._workspace_limit if limit is None and forbidden else limit or 0
        large = [row for row in forbidden if row.candidate.workspace > limit]
        for what, rows in (("determinism", racy), (f"workspace limit of {limit / _MB:.1f} MB", large)):
            if not rows:
                continue
            timed = [row for row in rows if row.timing is not None]
            claims = [row for row in rows if row.timing is None and row.candidate.reported_ms is not None]
            text = f"{what}: excludes {len(rows)} candidate{'s' if len(rows) > 1 else ''}"
            if timed:
                text += f"; the best is {self._beside(best, min(timed, key=self._cost))}"
            elif claims:
                fastest = min(claims, key=lambda row: row.candidate.reported_ms or math.inf)
                text += f", not measured; {fastest.label} claims {milliseconds(fastest.candidate.reported_ms or 0)} ms"
            else:
                text += ", not measured"
            lines.append(text)
        return lines

    def _cost(self, row: Row) -> float:
        return math.inf if row.timing is None else ranking.cost_ms(row.timing, self.key.policy)

    def _beside(self, row: Row, other: Row) -> str:
        """Compares what the policy ranks by."""
        ratio = self._cost(row) / self._cost(other) if self._cost(other) > 0 else math.nan
        return (
            f"{row.label} {milliseconds(self._cost(row))} ms, {ratio:.2f} times {other.label} "
            f"({milliseconds(self._cost(other))} ms)"
        )

    def _details(self, usable: list[Row]) -> list[str]:
        """Gives notes and kernels of the first rows, as far as there are any."""
        lines = []
        for rank, row in enumerate(usable[:_DETAILED], 1):
            if row.candidate.notes:
                text = f"{rank:2} {row.label}: {', '.join(row.candidate.notes)}"
                lines += textwrap.wrap(text, _WIDTH, subsequent_indent="     ")
            elif row.kernels:
                lines += textwrap.wrap(f"{rank:2} {row.label}", _WIDTH, subsequent_indent="     ")
            for kernel, times in Counter(row.kernels or ()).items():
                often = f" ({times} times)" if times > 1 else ""
                lines.append(f"     {shortened(kernel, _KERNEL_WIDTH - len(often))}{often}")
        return ["notes and kernels of the first:", *lines] if lines else []

    # --- for other programs -------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Returns the report as JSON text: the key, the device, the best row's id, and the rows.

        "flops" and "bytes" are what the Problem asks for at least; "peaks", a second, what the machine can do.
        """
        usable = self.usable
        flops, moved = machine.work(self.key.problem)
        value = {
            **self.key.to_json(),
            "device": str(self.device),
            "best": usable[0].label if usable else None,
            "flops": flops,
            "bytes": moved,
            "peaks": None if self.peaks is None else asdict(self.peaks),
            "clocks": None if self.clocks is None else asdict(self.clocks),
            "seconds": self.seconds,
            "rows": [row.to_json(self.peaks) for row in self.rows],
        }
        return json.dumps(value, indent=2)

    def _flat(self) -> list[dict[str, Any]]:
        """Gives the rows with numbers and texts only."""
        return [{name: _plain(value) for name, value in row.to_json(self.peaks).items()} for row in self.rows]

    def to_pandas(self) -> Any:
        """Returns a pandas DataFrame: a line a candidate, the columns those of the JSON, lists as one text each.

        Its `attrs` hold the key and the device.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise ImportError("to_pandas needs pandas, which flcuda does not install: pip install pandas") from error
        frame = pandas.DataFrame(self._flat())
        frame.attrs = {**self.key.to_json(), "device": str(self.device)}
        return frame

    def _repr_html_(self) -> str:
        """Returns the report for a notebook: an HTML table of all columns."""
        rows = self._flat()
        names = [name for name in rows[0] if any(row[name] is not None for row in rows)] if rows else []
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(_cell(row[name]))}</td>" for name in names) + "</tr>" for row in rows
        )
        above = "".join(f"<div>{html.escape(line)}</div>" for line in self._head())
        below = "".join(f"<div>{html.escape(line)}</div>" for line in self._summary())
        return (
            f"<div><code>{html.escape(str(self.key.problem))}</code></div>{above}"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"
        )

    def plot(self, path: str | os.PathLike[str] | None = None, x: str = "workspace", y: str = "median_ms") -> Any:
        """Draws the usable rows, both axes logarithmic, with the labels of those that no other beats.

        Args:
            path: of a file to write, its kind by its ending (png, svg, pdf); by default none.
            x: the horizontal axis, one of `AXES`.
            y: the vertical axis, likewise.

        Returns:
            The matplotlib Figure, which a notebook shows.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: an axis is unknown, or no usable row has both values.
            OSError: the file cannot be written.
        """
        _check_axis("x", x)
        _check_axis("y", y)
        try:
            figures = importlib.import_module("matplotlib.figure")
        except ImportError as error:
            raise ImportError("plot needs matplotlib: pip install 'flcuda[plot]'") from error
        by_source: dict[str, list[tuple[float, float]]] = {}
        for row in self.usable:
            values = row.to_json()
            if values[x] is not None and values[y] is not None:
                by_source.setdefault(row.candidate.source, []).append((values[x], values[y]))
        if not by_source:
            raise ValueError(f"x {x!r}, y {y!r}: no usable row has both values")
        figure = figures.Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        for source, points in by_source.items():
            axes.scatter(*zip(*points, strict=True), label=source, alpha=0.7)
        for place, scale in enumerate((axes.set_xscale, axes.set_yscale)):
            numbers = [point[place] for points in by_source.values() for point in points]
            if min(numbers) > 0:
                scale("log")
            else:
                # zero, which many a workspace is, has no logarithm
                scale("symlog", linthresh=min((number for number in numbers if number > 0), default=1.0))
        first = self.pareto(x, y)
        front = [tuple(row.to_json()[name] for name in (x, y)) for row in first]
        axes.plot(*zip(*front, strict=True), drawstyle="steps-post", color="0.6", linewidth=1, zorder=0)
        for row, point in zip(first, front, strict=True):
            axes.annotate(shortened(row.label, 40), point, xytext=(4, 4), textcoords="offset points", fontsize=8)
        axes.set_xlabel(_AXIS_WORDS[x])
        axes.set_ylabel(_AXIS_WORDS[y])
        axes.set_title(f"{problem_text(self.key.problem)}\n{self._machine}", fontsize=9)
        axes.margins(0.15)
        axes.legend(fontsize=8)
        if path is not None:
            figure.savefig(path)
        return figure


_UNVERIFIED = "not verified, and the policy names a largest error"

_DEFAULTS = Policy().to_json()

_AXIS_WORDS = {
    "median_ms": "median time, ms",
    "spread_ms": "spread of the times, ms",
    "host_us": "host time of a call, us",
    "reported_ms": "time that the library reports, ms",
    "build_ms": "time to build, ms",
    "first_run_ms": "time of the first run, ms",
    "workspace": "workspace, bytes",
    "error": "largest error",
    "error_of_bound": "largest error, share of its bound",
    "relative_error": "largest error, share of the results' root mean square",
}


def problem_text(problem: Problem | str) -> str:
    """Returns a Problem's line in lines of at most 80 columns, a longer word in one of its own; they read back."""
    return textwrap.fill(str(problem), _WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def _check_axis(argument: str, name: str) -> None:
    if name not in AXES:
        raise ValueError(f"{argument}: {name!r} must be one of {', '.join(AXES)}")


def _beats(point: Sequence[float], other: Sequence[float]) -> bool:
    """Says whether a point is better than another in one axis, and not worse in any."""
    return point != other and all(mine <= its for mine, its in zip(point, other, strict=True))


def _timing(row: Row) -> Timing:
    """Returns the times of a row that has some."""
    if row.timing is None:
        raise AssertionError(f"{row.label} is usable and was not timed")
    return row.timing


def _rate(amount: int, timing: Timing | None, unit: float) -> float | None:
    """Gives an amount a second; None where there is no time or nothing is done."""
    if timing is None or timing.median_ms <= 0 or amount == 0:
        return None
    return 1e3 * amount / timing.median_ms / unit


def _host_bound(timing: Timing | None) -> bool:
    """Says whether what was timed is the host; a single run, whose time is only known within bounds, does not count."""
    return timing is not None and not timing.queued and not timing.at_least


def _error_of_bound(verification: Verification) -> float | None:
    """Gives the error as a share of its bound, which is at most 1 where the results are right."""
    return _finite(verification.error / verification.bound) if verification.bound > 0 else None


def _finite(value: float) -> float | None:
    """Returns a number that JSON has; None for the others."""
    return value if math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """Puts a JSON value of a row that is a list or an object into one text."""
    if isinstance(value, dict):
        return " ".join(f"{name}={entry}" for name, entry in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def _cell(value: Any) -> str:
    """Puts a value of a row into a cell."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _four(value: float) -> str:
    """Returns a rate as text of some four digits."""
    return f"{value:.{3 if value < 10 else 1 if value < 1000 else 0}f}"


def shortened(text: str, width: int) -> str:
    """Returns a text of at most so many characters: of a longer one the beginning and the end."""
    if len(text) <= width:
        return text
    tail = width // 3
    return f"{text[: width - tail - 3]}...{text[-tail:]}"


def milliseconds(value: float) -> str:
    """Returns a time in milliseconds as text of some four digits."""
    decimals = 4 if value < 1 else 3 if value < 10 else 2 if value < 100 else 1
    return f"{value:.{decimals}f}"


def labels(candidates: list[Candidate]) -> list[str]:
    """Returns one name a candidate: its id, with math, then parameters, then a number where others share it."""
    names = [candidate.id for candidate in candidates]
    maths: dict[str, set[str]] = {}
    for candidate in candidates:
        maths.setdefault(candidate.id, set()).add(candidate.math)
    names = [
        f"{name}/{candidate.math}" if len(maths[name]) > 1 else name
        for name, candidate in zip(names, candidates, strict=True)
    ]
    shared = Counter(names)
    names = [
        "/".join([name, *(f"{key}={value}" for key, value in candidate.parameters)]) if shared[name] > 1 else name
        for name, candidate in zip(names, candidates, strict=True)
    ]
    shared = Counter(names)
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(f"{name}#{seen[name]}" if shared[name] > 1 else name)
    return unique
