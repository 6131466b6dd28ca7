"""`flcuda find`: the candidates for a convolution, measured and ranked; or planned only, for a GPU that is not here."""

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flcuda import device as devices
from flcuda.cudnn import library as libraries
from flcuda.cudnn.device_properties import DeviceProperties
from flcuda.cudnn.graph import NOTES
from flcuda.errors import FlcudaError
from flcuda.finder import search
from flcuda.finder.policy import Policy
from flcuda.finder.problem import DIRECTIONS, Problem
from flcuda.finder.report import problem_text
from flcuda.finder.sources import graph

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(" + "|".join(_UNITS) + ")")
# a bar for a search that ends at once would only flicker
_SHOW_AFTER_S = 1.0
_WIDTH = 80
_MB = 1e6
_UNMEASURED = "Nothing was measured: this is cuDNN's own order."
_NO_LEGACY = " The legacy algorithms are not listed without a GPU."


def configure(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand `find`.

    Args:
        subparsers: of the command's parser.
    """
    parser = subparsers.add_parser(
        "find",
        help="measure and rank every algorithm for a convolution or a fused graph",
        description="Measures every candidate for a convolution or a fused graph, prints them ranked and stores the "
        "best.",
        epilog='Examples: flcuda find "all n128 c64 56x56 k64 3x3 p1 float16 nhwc"; on a machine with no GPU: '
        'flcuda find --gpu h200 --plan-only "forward n128 c64 56x56 k64 3x3 p1 float16 nhwc"',
    )
    parser.add_argument(
        "problem",
        nargs="+",
        help="a line such as 'forward n128 c64 56x56 k64 3x3 p1 float32 nchw'; the direction is forward, "
        "backward_data, backward_filter, or all for the three; or a graph: 'graph float32; x float16 8x64x9x9 nhwc; "
        "w float16 64x64x3x3 nhwc; t = convolution_forward(%%x, %%w, padding=1); y = silu(%%t); out y'",
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--json", action="store_true", help="print JSON: an object; with all, a list")
    parser.add_argument("--deterministic", action="store_true", help="only what gives the same bits in each run")
    parser.add_argument("--workspace-limit", type=_bytes, metavar="SIZE", help="largest workspace, such as 512MiB")
    parser.add_argument("--mode", choices=("find", "heuristic"), default="find", help="heuristic: do not measure")
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        help="compare every candidate's results with float64 ones (by default those of a graph; without, its best is "
        "not stored)",
    )
    parser.add_argument("--gpu", metavar="NAME|FILE", help="with --plan-only: the GPU, such as h200, or its profile")
    parser.add_argument(
        "--plan-only", action="store_true", help="list cuDNN's engines for a GPU that need not be here; nothing is run"
    )
    parser.add_argument(
        "--cudnn",
        action="append",
        default=[],
        metavar="FOLDER",
        help="with --plan-only, given twice: compare what the cuDNN in each folder offers",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand.

    Args:
        args: what `configure` declared.

    Returns:
        The exit status: 0.

    Raises:
        ValueError: the line is no Problem, options contradict each other, the GPU's name is unknown, or on the CPU
            nothing can be used.
        OSError: the GPU's profile cannot be read.
        FlcudaError: the device, cuDNN or libcuda.so.1 is not here, or on CUDA nothing can be used.
    """
    problems = _problems(" ".join(args.problem))
    _check_plan_options(args)
    if args.plan_only:
        return _compare(args, problems) if args.cudnn else _plan_only(args, problems)
    device = devices.resolve(args.device)
    if device.kind == "cpu":
        missing = devices.cuda_missing_reason() if args.device == "auto" else None
        why = f" ({missing})" if missing else ""
        print(f"no GPU is used{why}: the reference source runs on the CPU", file=sys.stderr)
    policy = Policy(mode=args.mode, deterministic=args.deterministic, workspace_limit=args.workspace_limit)
    reports = []
    for problem in problems:
        with _progress(problem) as progress:
            reports.append(search.find(problem, policy=policy, device=device, verify=args.verify, progress=progress))
        if not args.json:
            if len(reports) > 1:
                print()
            print(reports[-1], flush=True)
    if args.json:
        texts = [report.to_json() for report in reports]
        print(texts[0] if len(problems) == 1 else "[" + ",\n".join(texts) + "]")
    return 0


def _problems(line: str) -> list[Problem]:
    words = line.split()
    if ";" in line or "all" not in words:
        return [Problem.parse(line)]
    words.remove("all")
    return [Problem.parse(" ".join([direction, *words])) for direction in DIRECTIONS]


# --- plans for a GPU that is not here -------------------------------------------------------------------------------


def _check_plan_options(args: argparse.Namespace) -> None:
    if args.gpu is None and args.plan_only:
        raise ValueError("--plan-only needs --gpu: the name of a GPU, such as h200, or the file of its profile")
    if args.gpu is not None and not args.plan_only:
        raise ValueError(f"--gpu {args.gpu} needs --plan-only: on a GPU that is not here nothing can be measured")
    if args.plan_only and args.device != "auto":
        raise ValueError(f"--device {args.device} contradicts --plan-only, which runs on no device")
    if args.plan_only and args.verify:
        raise ValueError("--verify contradicts --plan-only, which runs nothing")
    if args.cudnn and not args.plan_only:
        raise ValueError("--cudnn needs --plan-only: it compares what two versions offer")
    if args.cudnn and len(args.cudnn) != 2:
        raise ValueError(f"--cudnn was given {len(args.cudnn)} times; give it twice, with the two folders to compare")


def _plan_only(args: argparse.Namespace, problems: list[Problem]) -> int:
    """Lists the engines for each problem."""
    policy = Policy(mode="heuristic", deterministic=args.deterministic, workspace_limit=args.workspace_limit)
    reports = []
    with DeviceProperties.from_profile(args.gpu) as properties:
        for problem in problems:
            reports.append(_planned(problem, policy, properties))
            if not args.json:
                if len(reports) > 1:
                    print()
                print(_plan_text(reports[-1]), flush=True)
    if args.json:
        print(json.dumps(reports[0] if len(problems) == 1 else reports, indent=2))
    return 0


def _planned(problem: Problem, policy: Policy, properties: DeviceProperties) -> dict[str, Any]:
    """Gives what cuDNN offers as JSON values, in its own order; sizes in bytes."""
    rows = []
    for offer in graph.offers(problem, policy, properties=properties):
        configuration = offer.configuration
        rows.append(
            {
                "engine": configuration.engine_id,
                "knobs": configuration.knobs,
                "heuristic": configuration.mode,
                "math": offer.candidate.math,
                "notes": [*configuration.numerical_notes, *configuration.behavior_notes],
                "workspace": None if offer.plan is None else offer.plan.workspace,
                "deterministic": offer.candidate.deterministic,
                "reason": offer.candidate.reason,
            }
        )
    return {
        "problem": str(problem),
        "math": problem.math,
        "gpu": properties.name,
        "gpu_profile": properties.origin,
        "gpu_profile_filled": list(properties.filled),
        "cudnn": libraries.load().version_text,
        "measured": False,
        "rows": rows,
    }


def _plan_text(report: dict[str, Any]) -> str:
    """Puts what was planned into a table of at most 80 columns, and the notes and reasons below."""
    usable = [row for row in report["rows"] if row["reason"] is None]
    filled = report["gpu_profile_filled"]
    profile = report["gpu_profile"] or "of unknown origin"
    lines = [
        f"for {report['gpu']}, cuDNN {report['cudnn']}",
        f"GPU profile: {profile}" + (f"; filled for this cuDNN: {', '.join(filled)}" if filled else ""),
        _unmeasured(report["problem"]),
    ]
    text = "\n".join([problem_text(report["problem"]), *(textwrap.fill(line, _WIDTH) for line in lines)])
    if usable:
        text += "\n" + _table(usable)
    else:
        text += "\nno engine can be used"
        if any(row["math"] == "tensor_op" and row["reason"] for row in report["rows"]) and report["math"] == "fma":
            text += ": those that use tensor cores need math 'tensor_op'\n(TF32 on float32 operands)"
    notes = {row["engine"]: row["notes"] for row in usable}
    if notes:
        text += "\nengines:"
    for engine, words in notes.items():
        meaning = "; ".join(NOTES.get(word, word) for word in words) or "cuDNN says nothing of it"
        text += "\n" + textwrap.fill(f"  {engine}: {meaning}", _WIDTH, subsequent_indent="    ")
    reasons: dict[str, dict[int, None]] = {}
    for row in report["rows"]:
        if row["reason"] is not None:
            # What has a plan is refused for its workspace only, each for another one.
            reason = row["reason"] if row["workspace"] is None else "workspace above the limit"
            reasons.setdefault(reason, {})[row["engine"]] = None
    if reasons:
        text += "\nnot usable:"
    for reason, engines in reasons.items():
        names = ", ".join(str(engine) for engine in engines)
        text += "\n" + textwrap.fill(f"  {names}: {reason}", _WIDTH, subsequent_indent="    ")
    return text


def _unmeasured(problem: str) -> str:
    return _UNMEASURED if problem.startswith("graph") else _UNMEASURED + _NO_LEGACY


def _table(rows: list[dict[str, Any]]) -> str:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("#", justify="right")
    table.add_column("engine", justify="right", no_wrap=True)
    table.add_column("MB", justify="right", min_width=7, no_wrap=True)
    table.add_column("det.", no_wrap=True)
    table.add_column("knobs")
    for rank, row in enumerate(rows, 1):
        knobs = " ".join(f"{name}={value}" for name, value in row["knobs"].items())
        table.add_row(
            str(rank),
            str(row["engine"]),
            f"{row['workspace'] / _MB:.1f}",
            "yes" if row["deterministic"] else "no",
            knobs or "cuDNN chooses",
        )
    return _rendered(table)


def _rendered(table: Table) -> str:
    text = io.StringIO()
    Console(file=text, width=_WIDTH, force_terminal=False, color_system=None, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))


# --- comparing two versions -----------------------------------------------------------------------------------------


def _compare(args: argparse.Namespace, problems: list[Problem]) -> int:
    """Lists what came, went or changed rank from one cuDNN to another."""
    reports = []
    for problem in problems:
        before, after = (_planned_by(folder, problem, args) for folder in args.cudnn)
        engines = _changes(before["rows"], after["rows"])
        versions = [report["cudnn"] for report in (before, after)]
        reports.append(
            {"problem": str(problem), "gpu": after["gpu"], "cudnn": versions, "measured": False, "engines": engines}
        )
    if args.json:
        print(json.dumps(reports[0] if len(problems) == 1 else reports, indent=2))
    else:
        print("\n\n".join(_comparison_text(report) for report in reports))
    return 0


def _planned_by(folder: str, problem: Problem, args: argparse.Namespace) -> dict[str, Any]:
    """Plans in a child process, because a process can load one cuDNN only."""
    words = [sys.executable, "-m", "flcuda", "find", "--gpu", args.gpu, "--plan-only", "--json", str(problem)]
    if args.deterministic:
        words.append("--deterministic")
    if args.workspace_limit is not None:
        words += ["--workspace-limit", str(args.workspace_limit)]
    environment = {**os.environ, libraries.PATH_VARIABLE: folder}
    child = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        said = child.stderr.strip().removeprefix("flcuda: error: ")
        raise FlcudaError(f"the cuDNN in {folder} cannot plan {problem}: {said}")
    report: dict[str, Any] = json.loads(child.stdout)
    return report


def _changes(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gives each engine's best rank, number of configurations and smallest workspace in both, by the later rank."""
    sides = [_by_engine(before), _by_engine(after)]
    changes = []
    for engine in dict.fromkeys((*sides[1], *sides[0])):
        old, new = (side.get(engine) for side in sides)
        if old is None or new is None:
            change = "came" if old is None else "went"
        elif old["rank"] != new["rank"]:
            change = "rank"
        else:
            change = "same" if old == new else "configurations"
        changes.append({"engine": engine, "change": change, "before": old, "after": new})
    return changes


def _by_engine(rows: list[dict[str, Any]]) -> dict[int, dict[str, int]]:
    engines: dict[int, dict[str, int]] = {}
    usable = [row for row in rows if row["reason"] is None]
    for rank, row in enumerate(usable, 1):
        found = engines.setdefault(
            row["engine"], {"rank": rank, "configurations": 0, "least_workspace": row["workspace"]}
        )
        found["configurations"] += 1
        found["least_workspace"] = min(found["least_workspace"], row["workspace"])
    return engines


def _comparison_text(report: dict[str, Any]) -> str:
    before, after = report["cudnn"]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    table.add_column("\nengine", justify="right", no_wrap=True)
    table.add_column("\nchange", no_wrap=True)
    for version in (before, after):
        table.add_column(f"{version}\nrank", justify="right", no_wrap=True)
        table.add_column("\nplans", justify="right", no_wrap=True)
        table.add_column("\nleast MB", justify="right", no_wrap=True)
    for row in report["engines"]:
        cells = []
        for side in (row["before"], row["after"]):
            if side is None:
                cells += ["-", "-", "-"]
            else:
                least = f"{side['least_workspace'] / _MB:.1f}"
                cells += [str(side["rank"]), str(side["configurations"]), least]
        table.add_row(str(row["engine"]), row["change"], *cells)
    lines = [
        f"for {report['gpu']}: cuDNN {before} and cuDNN {after}",
        _unmeasured(report["problem"]),
        "An engine is compared by its number, which NVIDIA promises for no other version.",
    ]
    text = "\n".join([problem_text(report["problem"]), *(textwrap.fill(line, _WIDTH) for line in lines)])
    return f"{text}\n{_rendered(table)}" if report["engines"] else f"{text}\nno engine can be used with either"


def _bytes(text: str) -> int:
    """Reads a size: a number with or without a unit."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 512MiB, 2GiB or a number of bytes")
    return int(float(match.group(1)) * _UNITS[match.group(2)])


@contextlib.contextmanager
def _progress(problem: Problem) -> Iterator[search.Progress]:
    """Yields the callback of a search, which shows a bar on a terminal's standard error once the search takes long."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn(problem.kind),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task(problem.kind, total=None)
    begin = time.monotonic()
    started = False

    def tell(done: int, total: int) -> None:
        nonlocal started
        if not started and time.monotonic() - begin > _SHOW_AFTER_S:
            bar.start()
            started = True
        bar.update(task, completed=done, total=total)

    try:
        yield tell
    finally:
        if started:
            bar.stop()
