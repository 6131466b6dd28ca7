"""What the finder found: every candidate with its times, or the reason why it cannot be used."""

import io
import json
import math
import os
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flcuda.device import Device
from flcuda.errors import FlcudaError
from flcuda.finder.candidate import Candidate, Runner
from flcuda.finder.choice import Choice, Key
from flcuda.finder.plan import Plan
from flcuda.finder.problem import Problem
from flcuda.finder.verify import Verification
from flcuda.timing import Timing

_WIDTH = 80
_MB = 1e6


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

    def to_json(self) -> dict[str, Any]:
        """Returns the row as JSON values; times in milliseconds, workspace in bytes."""
        candidate = self.candidate
        return {
            "id": self.label,
            "source": candidate.source,
            "algo": candidate.algo,
            "math": candidate.math,
            "parameters": dict(candidate.parameters),
            "median_ms": None if self.timing is None else self.timing.median_ms,
            "spread_ms": None if self.timing is None else self.timing.spread_ms,
            "samples": None if self.timing is None else self.timing.samples,
            "host_us": None if self.timing is None else self.timing.host_us,
            "reported_ms": candidate.reported_ms,
            "build_ms": self.build_ms,
            "first_run_ms": self.first_run_ms,
            "workspace": candidate.workspace,
            "deterministic": candidate.deterministic,
            "error": None if self.verification is None else _finite(self.verification.error),
            "bound": None if self.verification is None else _finite(self.verification.bound),
            "repeats": None if self.verification is None else self.verification.repeats,
            "reason": self.reason,
        }


class FindReport:
    """All candidates for a Problem, ranked.

    Attributes:
        key: Problem, policy, device model, library version and sources.
        device: where they ran.
        rows: the usable ones, the best first, then the others in their sources' order.
    """

    def __init__(self, key: Key, device: Device, rows: list[Row]) -> None:
        self.key = key
        self.device = device
        self.rows = rows

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

    def __str__(self) -> str:
        """The report as a table of at most 80 columns.

        Spread in milliseconds, MB of workspace, det.: deterministic, error: the largest, as a share of its bound.
        """
        text = io.StringIO()
        console = Console(file=text, width=_WIDTH, force_terminal=False, color_system=None, highlight=False)
        model = dict(self.key.device_model)
        console.print(Text(problem_text(self.key.problem)), soft_wrap=True)
        console.print(Text(f"{self.device.kind}: {model.get('name', 'unknown')}, {self.key.library_version}"))
        if self.device.kind == "cpu":
            console.print(Text("measured on the CPU (ranked by the smallest sample): says nothing about a GPU"))
        usable = self.usable
        if usable:
            console.print(self._table(usable))
        else:
            console.print("no candidate can be used")
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

    def _table(self, usable: list[Row]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
        table.add_column("#", justify="right")
        table.add_column("source", min_width=9, no_wrap=True)
        table.add_column("algo", overflow="fold")
        table.add_column("math", min_width=9, no_wrap=True)
        table.add_column("median ms", justify="right", no_wrap=True)
        table.add_column("spread", justify="right", min_width=7, no_wrap=True)
        table.add_column("MB", justify="right", min_width=7, no_wrap=True)
        table.add_column("det.", no_wrap=True)
        verified = any(row.verification is not None for row in usable)
        if verified:
            table.add_column("error", justify="right", no_wrap=True)
        for rank, row in enumerate(usable, 1):
            candidate = row.candidate
            parameters = dict(candidate.parameters)
            # cuDNN's own word for the math, where there is one, says more than "fma" or "tensor_op".
            word = str(parameters.pop("math_type", candidate.math))
            cells = [
                str(rank),
                candidate.source,
                " ".join([candidate.algo, *(f"{name}={value}" for name, value in parameters.items())]),
                word,
                "-" if row.timing is None else milliseconds(row.timing.median_ms),
                "-" if row.timing is None or row.timing.samples < 2 else milliseconds(row.timing.spread_ms),
                f"{candidate.workspace / _MB:.1f}",
                "yes" if candidate.deterministic else "no",
            ]
            if verified:
                cells.append("-" if row.verification is None else _share(row.verification))
            table.add_row(*cells)
        return table

    def to_json(self) -> str:
        """Returns the report as JSON text: the key, the device, the best row's id, and the rows."""
        usable = self.usable
        value = {
            **self.key.to_json(),
            "device": str(self.device),
            "best": usable[0].label if usable else None,
            "rows": [row.to_json() for row in self.rows],
        }
        return json.dumps(value, indent=2)


def problem_text(problem: Problem | str) -> str:
    """Returns a Problem's line in lines of at most 80 columns, a longer word in one of its own; they read back."""
    return textwrap.fill(str(problem), _WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def _share(verification: Verification) -> str:
    """Puts an error into the table: as a share of its bound."""
    return f"{verification.error / verification.bound:.2f}" if verification.bound > 0 else f"{verification.error:.1e}"


def _finite(value: float) -> float | None:
    """Returns a number that JSON has; None for the others."""
    return value if math.isfinite(value) else None


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
