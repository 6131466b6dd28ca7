"""How a fused graph is done: the engines for each of its problems, and why the others refuse.

Note [refusals]: an engine that does not take a graph says so when its configuration is finalized, which needs no run.
So this works for the GPU here as for the profile of another.
"""

import contextlib
import io
import json
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from flcuda import finder
from flcuda.cudnn import resources
from flcuda.cudnn.device_properties import DeviceProperties
from flcuda.cudnn.graph import OperationGraph, by_reason, engine_ranges
from flcuda.device import Device
from flcuda.errors import NOT_SUPPORTED, CudnnNotSupportedError
from flcuda.finder.candidate import Candidate
from flcuda.finder.graph_problem import GraphProblem
from flcuda.finder.policy import Policy
from flcuda.finder.problem import ConvolutionProblem, Problem
from flcuda.finder.report import FindReport
from flcuda.finder.sources.graph import GraphSource, operation_graph

_WIDTH = 80
_MB = 1e6


@dataclass(frozen=True, slots=True)
class Part:
    """One problem.

    Attributes:
        title: what it is for.
        problem: the problem.
        report: what was measured; None for a GPU that is not here, or where nothing can be used.
        candidates: for a GPU that is not here, what the graph API has, in its own order.
        refusals: (engine, text) for each engine of the graph API that does not take it.
        engines: how many engines the graph API has for such a graph; 0 where it was not asked.
        refusal: why nothing can be used; None when something can.
    """

    title: str
    problem: Problem
    report: FindReport | None = None
    candidates: tuple[Candidate, ...] = ()
    refusals: tuple[tuple[int, str], ...] = ()
    engines: int = 0
    refusal: CudnnNotSupportedError | None = field(default=None, repr=False)

    @property
    def others(self) -> tuple[int, ...]:
        """The engines that take it and are not among what was listed: the first of cuDNN's ranking."""
        rows = () if self.report is None else (row.candidate for row in self.report.rows)
        listed = {candidate.algo for candidate in (*rows, *self.candidates) if candidate.source == GraphSource.name}
        refused = {engine for engine, _ in self.refusals}
        return tuple(each for each in range(self.engines) if each not in refused and str(each) not in listed)

    def __str__(self) -> str:
        lines = [f"{self.title}:"]
        if self.report is not None:
            lines.append(str(self.report))
        else:
            lines.append(_wrapped(str(self.problem), ""))
        if self.candidates:
            lines.append(_table([candidate for candidate in self.candidates if candidate.reason is None]))
            lines += [
                _wrapped(f"{candidate.id}: {candidate.reason}")
                for candidate in self.candidates
                if candidate.reason is not None
            ]
        if self.refusal is not None:
            first, *more = (self.refusal.text or str(self.refusal)).split("\n")
            lines.append(_wrapped(f"nothing can be used: {first}", ""))
            lines += [_wrapped(line) for line in more if line.strip() and not line.strip().startswith("engine")]
        if self.others:
            lines.append(
                _wrapped(f"engines that take it too, further down cuDNN's list: {engine_ranges(self.others)}", "")
            )
        if self.refusals:
            lines.append("engines of the graph API that do not take it:")
            for text, engines in by_reason(self.refusals).items():
                lines.append(_wrapped(f"{'all' if engines == [-1] else engine_ranges(engines)}: {text}"))
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Gives the part as JSON values; times in milliseconds, workspace in bytes."""
        rows = [] if self.report is None else json.loads(self.report.to_json())["rows"]
        rows += [
            {
                "source": candidate.source,
                "algo": candidate.algo,
                "math": candidate.math,
                "parameters": dict(candidate.parameters),
                "workspace": candidate.workspace,
                "deterministic": candidate.deterministic,
                "median_ms": None,
                "reason": candidate.reason,
            }
            for candidate in self.candidates
        ]
        return {
            "title": self.title,
            "problem": str(self.problem),
            "rows": rows,
            "others": list(self.others),
            "refusals": [{"engine": engine, "reason": text} for engine, text in self.refusals],
            "refusal": None if self.refusal is None else self.refusal.text or str(self.refusal),
        }


@dataclass(slots=True)
class Explanation:
    """How a traced function is done.

    Attributes:
        name: the function's.
        parts: the forward problem, then those of the backward pass, in the order of running; a problem that nothing
            takes stands before its parts.
    """

    name: str
    parts: list[Part] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n\n".join([self.name, *(str(part) for part in self.parts)])

    def to_json(self) -> str:
        """Gives all as JSON text: the function's name, and the parts."""
        return json.dumps({"function": self.name, "parts": [part.to_json() for part in self.parts]}, indent=2)


Explain = Callable[[str, Problem], Part]


@contextlib.contextmanager
def explain_here(device: Device) -> Iterator[Explain]:
    """Gives what finds and measures a problem on a device.

    Args:
        device: where; the caller has made it current.

    Yields:
        A function of a title and a problem.
    """

    def explain(title: str, problem: Problem) -> Part:
        part = Part(title, problem)
        if device.kind == "cuda":
            part = _asked(part, resources.handle(), None)
        try:
            return replace(part, report=finder.find(problem, device=device))
        except CudnnNotSupportedError as error:
            return replace(part, refusal=error)

    yield explain


@contextlib.contextmanager
def explain_for(gpu: str) -> Iterator[Explain]:
    """Gives what lists the graph API's engines for a problem on a GPU that need not be here.

    Args:
        gpu: a profile's name or file.

    Yields:
        A function of a title and a problem.
    """
    with DeviceProperties.from_profile(gpu) as properties:
        source = GraphSource(properties)

        def explain(title: str, problem: Problem) -> Part:
            part = _asked(Part(title, problem), None, properties)
            try:
                found = tuple(source.candidates(problem, Policy(mode="heuristic"), Device("cuda")))
            except CudnnNotSupportedError as error:
                return replace(part, refusal=error)
            refusal = None
            if all(candidate.reason is not None for candidate in found):
                reasons = "; ".join(dict.fromkeys(f"{candidate.id}: {candidate.reason}" for candidate in found))
                refusal = CudnnNotSupportedError("flcuda.graph", NOT_SUPPORTED, reasons, "CUDNN_STATUS_NOT_SUPPORTED")
            return replace(part, candidates=found, refusal=refusal)

        yield explain


def _asked(part: Part, handle: resources.Handle | None, properties: DeviceProperties | None) -> Part:
    """Asks each engine of the graph API why it does not take a problem."""
    try:
        built = _built(part.problem, handle, properties)
        return replace(part, refusals=tuple(built.why_not()), engines=built.engine_count)
    except CudnnNotSupportedError as error:
        return replace(part, refusals=((-1, error.text or str(error)),))


def _built(problem: Problem, handle: resources.Handle | None, properties: DeviceProperties | None) -> OperationGraph:
    assert isinstance(problem, ConvolutionProblem | GraphProblem)
    return operation_graph(problem, handle, properties)


def _wrapped(text: str, indent: str = "  ") -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")


def _table(candidates: list[Candidate]) -> str:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("#", justify="right")
    table.add_column("engine", overflow="fold")
    table.add_column("math", min_width=9, no_wrap=True)
    table.add_column("MB", justify="right", min_width=7, no_wrap=True)
    table.add_column("det.", no_wrap=True)
    for rank, candidate in enumerate(candidates, 1):
        knobs = " ".join(f"{name}={value}" for name, value in candidate.parameters)
        table.add_row(
            str(rank),
            f"{candidate.algo} {knobs}".strip(),
            candidate.math,
            f"{candidate.workspace / _MB:.1f}",
            "yes" if candidate.deterministic else "no",
        )
    text = io.StringIO()
    Console(file=text, width=_WIDTH, force_terminal=False, color_system=None, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))
