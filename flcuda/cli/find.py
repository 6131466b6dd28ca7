"""`flcuda find`: the candidates for a convolution, measured and ranked; or planned only, for a GPU that is not here.

For one convolution it prints every candidate; for those of a network or a file one line each, and the totals.
"""

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
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flcuda import device as devices
from flcuda.cudnn import library as libraries
from flcuda.cudnn.device_properties import DeviceProperties
from flcuda.cudnn.graph import NOTES
from flcuda.device import Device
from flcuda.errors import FlcudaError
from flcuda.finder import ranking, search
from flcuda.finder.compare import FAILURES, by_reason, repeat
from flcuda.finder.compare import Progress as SearchesProgress
from flcuda.finder.measure import failure_reason
from flcuda.finder.peaks import work
from flcuda.finder.policy import CACHES, EFFORTS, TIMES, Policy
from flcuda.finder.problem import DIRECTIONS, DTYPES, LAYOUTS, Problem
from flcuda.finder.problems import DEFAULT_BATCH, NAMES, parse_problems, problems, read_problems
from flcuda.finder.report import milliseconds, problem_text
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
        "best; or the best for each convolution of a network or a file, one line each.",
        epilog='Examples: flcuda find "all n128 c64 56x56 k64 3x3 p1 float16 nhwc"; flcuda find --model resnet34 '
        "--precision float16; on a machine with no GPU: "
        'flcuda find --gpu h200 --plan-only "forward n128 c64 56x56 k64 3x3 p1 float16 nhwc". '
        "The exit status is 1 when some of several problems failed, 2 for an error.",
    )
    parser.add_argument(
        "problem",
        nargs="*",
        help="a line such as 'forward n128 c64 56x56 k64 3x3 p1 float32 nchw'; the direction is forward, "
        "backward_data, backward_filter, or all for the three; or a graph: 'graph float32; x float16 8x64x9x9 nhwc; "
        "w float16 64x64x3x3 nhwc; t = convolution_forward(%%x, %%w, padding=1); y = silu(%%t); out y'",
    )
    parser.add_argument("--model", metavar="NAME", help=f"every convolution of a network or list: {', '.join(NAMES)}")
    parser.add_argument(
        "--batch", type=int, metavar="N", help=f"with --model: images (default {DEFAULT_BATCH}, or the list's own)"
    )
    parser.add_argument(
        "--precision", choices=("tf32", *DTYPES), help="with --model: of operands and math (default float32)"
    )
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        help="with --model: nhwc by default for the precisions of tensor cores (tf32, float16, bfloat16), else nchw",
    )
    parser.add_argument("--problems", metavar="FILE", help="every problem of a file, one a line, # begins a comment")
    parser.add_argument(
        "--repeat", type=int, metavar="N", help="search N times each; print how often the choice changes, and its cost"
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--json", action="store_true", help="print JSON: an object; with all, a list of three")
    parser.add_argument("--deterministic", action="store_true", help="only what gives the same bits in each run")
    parser.add_argument("--workspace-limit", type=_bytes, metavar="SIZE", help="largest workspace, such as 512MiB")
    parser.add_argument("--mode", choices=("find", "heuristic"), default="find", help="heuristic: do not measure")
    parser.add_argument("--effort", choices=EFFORTS, default="fast", help="wide: every engine, its knobs turned (slow)")
    parser.add_argument("--time", choices=TIMES, help="rank by the device's time (default), the host's, or the larger")
    parser.add_argument("--l2", choices=CACHES, help="measure with operands in no cache (cold, default) or in it")
    parser.add_argument(
        "--max-error",
        type=float,
        metavar="SHARE",
        help="largest error, as a share of the root mean square of the right results; verifies every candidate",
    )
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
        The exit status: 0, or 1 when some of several problems failed.

    Raises:
        ValueError: a line is no Problem, options contradict each other, a name is unknown, or on the CPU nothing can be
            used for the only problem.
        OSError: the GPU's profile or the file of problems cannot be read.
        FlcudaError: the device, cuDNN or libcuda.so.1 is not here, or on CUDA nothing can be used for the only problem.
    """
    _check_options(args)
    found = _problems(args)
    if args.plan_only:
        return _compare(args, found) if args.cudnn else _plan_only(args, found)
    device = devices.resolve(args.device)
    if device.kind == "cpu":
        missing = devices.cuda_missing_reason() if args.device == "auto" else None
        why = f" ({missing})" if missing else ""
        print(f"no GPU is used{why}: the reference source runs on the CPU", file=sys.stderr)
    policy = Policy(
        mode=args.mode,
        deterministic=args.deterministic,
        workspace_limit=args.workspace_limit,
        max_error=args.max_error,
        time=args.time or "device",
        effort=args.effort,
        l2=args.l2 or "cold",
    )
    if args.repeat is not None:
        return _repeat(args, found, policy, device)
    if _listed(args):
        return _find_many(args, found, policy, device)
    return _find_each(args, found, policy, device)


def _listed(args: argparse.Namespace) -> bool:
    """Says whether the problems are those of a network or a file: too many for a table each."""
    return args.model is not None or args.problems is not None


def _problems(args: argparse.Namespace) -> list[Problem]:
    """Gives what is asked for, in order; a problem that a network has several times stands several times."""
    if args.problems is not None:
        return list(read_problems(args.problems))
    if args.model is None:
        return list(parse_problems(" ".join(args.problem)))
    precision = args.precision or "float32"
    layout = args.layout or ("nhwc" if precision in ("tf32", "float16", "bfloat16") else "nchw")
    return list(problems(args.model, args.batch, dtype=precision, layout=layout, distinct=False))


def _check_options(args: argparse.Namespace) -> None:
    given = [
        *(["a problem"] if args.problem else []),
        *(["--model"] if args.model is not None else []),
        *(["--problems"] if args.problems is not None else []),
    ]
    if not given:
        raise ValueError("name what to find: a problem, --model NAME or --problems FILE")
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} contradict each other: give one of them")
    for option in ("batch", "precision", "layout"):
        if getattr(args, option) is not None and args.model is None:
            raise ValueError(f"--{option} needs --model: a problem's own line says it")
    _check_plan_options(args)
    unmeasured = "--plan-only" if args.plan_only else "--mode heuristic" if args.mode == "heuristic" else None
    for option in ("repeat", "time", "l2", "max_error"):
        if unmeasured and getattr(args, option) is not None:
            raise ValueError(f"--{option.replace('_', '-')} contradicts {unmeasured}, which measures nothing")
    if args.mode == "heuristic" and args.effort == "wide" and not args.plan_only:
        raise ValueError("--effort wide contradicts --mode heuristic, which measures nothing")
    if args.repeat is not None and args.repeat < 2:
        raise ValueError(f"--repeat {args.repeat} must be 2 or more: one search cannot differ from itself")
    if args.max_error is not None and args.verify is False:
        raise ValueError(f"--max-error {args.max_error} contradicts --no-verify: it needs every candidate's error")
    if args.repeat is not None and args.verify is not None:
        raise ValueError("--repeat contradicts --verify and --no-verify: it searches as the policy says")


def _find_each(args: argparse.Namespace, found: list[Problem], policy: Policy, device: Device) -> int:
    """Prints every candidate for each of few problems."""
    texts: list[str] = []
    failures: dict[Problem, str] = {}
    shown = False
    for problem in found:
        try:
            with _progress(problem) as progress:
                report = search.find(problem, policy=policy, device=device, verify=args.verify, progress=progress)
        except FAILURES as error:
            if len(found) == 1:
                raise
            failures[problem] = failure_reason(error)
            texts.append(json.dumps({"problem": str(problem), "failure": failures[problem]}, indent=2))
            continue
        if args.json:
            texts.append(report.to_json())
        else:
            print(("\n" if shown else "") + str(report), flush=True)
            shown = True
    if args.json:
        print(texts[0] if len(found) == 1 else "[" + ",\n".join(texts) + "]")
    return _failed(args, failures)


# --- many problems --------------------------------------------------------------------------------------------------


def _find_many(args: argparse.Namespace, found: list[Problem], policy: Policy, device: Device) -> int:
    """Prints one line a problem as it is found, and the totals."""
    counts = Counter(found)
    width = min(_WIDTH, max(len(str(problem)) for problem in counts))
    rows: list[dict[str, Any]] = []
    failures: dict[Problem, str] = {}
    begin = time.perf_counter()
    if not args.json:
        unit = "host ms" if policy.time == "host" else "ms"
        print(f"{unit:>8} {'TFLOP/s':>8} {'times':>5}  {'problem':<{width}}  best", flush=True)
    with _progress_of_many() as progress:
        for done, problem in enumerate(counts):
            progress(done, len(counts), problem)
            try:
                row = _row(args, problem, counts[problem], policy, device)
            except FAILURES as error:
                failures[problem] = failure_reason(error)
                row = _line(problem, counts[problem])
            if not args.json:
                print(_row_text(row, width), flush=True)
            rows.append(row)
        progress(len(counts), len(counts), problem)
    totals = {**_totals(rows), "seconds": time.perf_counter() - begin}
    if args.json:
        value = {
            "device": str(device),
            "device_model": devices.device_model(device),
            "policy": policy.to_json(),
            "totals": totals,
            "problems": [row for row in rows if row["best"] is not None],
            "failures": [{"problem": str(problem), "reason": reason} for problem, reason in failures.items()],
        }
        print(json.dumps(value, indent=2))
    else:
        print(_totals_text(totals, rows))
    return _failed(args, failures)


def _row(args: argparse.Namespace, problem: Problem, count: int, policy: Policy, device: Device) -> dict[str, Any]:
    """Searches; gives what is said of the best, and for JSON the report. The report itself, with its plans, goes."""
    report = search.find(problem, policy=policy, device=device, verify=args.verify, details=args.json)
    best = report.usable[0]
    row = {**_line(problem, count), "best": best.label, "id": best.choice.id}
    if best.timing is not None:
        row["ms"] = ranking.cost_ms(best.timing, policy)
        row["tflops"] = row["flops"] / best.timing.median_ms / 1e9 if row["flops"] else None
    if args.json:
        row["report"] = json.loads(report.to_json())
    return row


def _line(problem: Problem, count: int) -> dict[str, Any]:
    """Gives what is said of a problem of which nothing was found."""
    flops, _ = work(problem)
    nothing = dict.fromkeys(("best", "id", "ms", "tflops"))
    return {"problem": str(problem), "kind": problem.kind, "count": count, "flops": flops, **nothing}


def _row_text(row: dict[str, Any], width: int) -> str:
    took = "-" if row["ms"] is None else milliseconds(row["ms"])
    speed = "-" if row["tflops"] is None else _speed(row["tflops"])
    return f"{took:>8} {speed:>8} {row['count']:>5}  {row['problem']:<{width}}  {row['id'] or 'failed'}"


def _speed(tflops: float) -> str:
    """Writes three digits."""
    return f"{tflops:.0f}" if tflops >= 100 else f"{tflops:#.3g}" if tflops >= 0.01 else f"{tflops:.4f}"


def _totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds up what was measured, each problem as often as it occurs."""
    measured = [row for row in rows if row["ms"] is not None]
    total_ms = sum(row["count"] * row["ms"] for row in measured)
    flops = sum(row["count"] * row["flops"] for row in measured)
    kinds = dict.fromkeys(DIRECTIONS, 0.0)
    for row in measured:
        kinds[row["kind"]] = kinds.get(row["kind"], 0.0) + row["count"] * row["ms"]
    return {
        "total_ms": total_ms if measured else None,
        "tflops": flops / total_ms / 1e9 if total_ms > 0 else None,
        "count": sum(row["count"] for row in measured),
        "distinct": len(measured),
        "by_kind_ms": {kind: ms for kind, ms in kinds.items() if ms > 0},
    }


def _totals_text(totals: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    seconds = f"searched in {totals['seconds']:.1f} s"
    if totals["total_ms"] is None:
        return f"{len(rows)} problems, none measured; {seconds}"
    kinds = ", ".join(f"{kind} {milliseconds(ms)}" for kind, ms in totals["by_kind_ms"].items())
    speed = "" if not totals["tflops"] else f", {_speed(totals['tflops'])} TFLOP/s"
    text = (
        f"total {milliseconds(totals['total_ms'])} ms{speed} for {totals['count']} ({totals['distinct']} distinct): "
        f"{kinds}; {seconds}"
    )
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _repeat(args: argparse.Namespace, found: list[Problem], policy: Policy, device: Device) -> int:
    """Prints how often the choice changes when the search is repeated."""
    with _progress_of_many() as progress:
        repetition = repeat(found, args.repeat, policy=policy, device=device, progress=progress)
    print(repetition.to_json() if args.json else repetition)
    return 1 if repetition.failures else 0


def _failed(args: argparse.Namespace, failures: Mapping[Problem, str]) -> int:
    """Lists what failed, in print; gives the exit status."""
    if failures and not args.json:
        print("\n".join(by_reason("failed:", failures)))
    return 1 if failures else 0


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


def _plan_only(args: argparse.Namespace, found: list[Problem]) -> int:
    """Lists the engines for each problem; of a network or a file one line each."""
    policy = Policy(
        mode="heuristic",
        deterministic=args.deterministic,
        workspace_limit=args.workspace_limit,
        effort=args.effort,
    )
    counts = Counter(found)
    reports = []
    failures: dict[Problem, str] = {}
    brief = _listed(args) and not args.json
    shown = False
    with contextlib.ExitStack() as stack:
        properties = stack.enter_context(DeviceProperties.from_profile(args.gpu))
        progress = stack.enter_context(_progress_of_many()) if len(counts) > 1 else None
        for done, problem in enumerate(counts):
            if progress is not None:
                progress(done, len(counts), problem)
            try:
                report = _planned(problem, policy, properties)
            except FAILURES as error:
                if len(counts) == 1:
                    raise
                failures[problem] = failure_reason(error)
                report = {"problem": str(problem), "failure": failures[problem]}
            reports.append({**report, "count": counts[problem]} if _listed(args) else report)
            if brief:
                if done == 0:
                    print(f"for {properties.name}, cuDNN {libraries.load().version_text}. {_UNMEASURED}")
                    print(f"{'usable':>8} {'of':>4} {'times':>5}  problem; the first engine's number and workspace")
                print(_plan_line(reports[-1]), flush=True)
            elif not args.json and "failure" not in report:
                print(("\n" if shown else "") + _plan_text(report), flush=True)
                shown = True
    if args.json:
        print(json.dumps(reports[0] if len(found) == 1 and not _listed(args) else reports, indent=2))
    return _failed(args, failures)


def _plan_line(report: dict[str, Any]) -> str:
    if "failure" in report:
        return f"{'-':>8} {'-':>4} {report['count']:>5}  {report['problem']}; failed"
    usable = [row for row in report["rows"] if row["reason"] is None]
    first = f"{usable[0]['engine']}, {usable[0]['workspace'] / _MB:.1f} MB" if usable else "none"
    return f"{len(usable):>8} {len(report['rows']):>4} {report['count']:>5}  {report['problem']}; {first}"


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


def _compare(args: argparse.Namespace, found: list[Problem]) -> int:
    """Lists what came, went or changed rank from one cuDNN to another."""
    reports = []
    for problem in dict.fromkeys(found):
        before, after = (_planned_by(folder, problem, args) for folder in args.cudnn)
        engines = _changes(before["rows"], after["rows"])
        versions = [report["cudnn"] for report in (before, after)]
        reports.append(
            {"problem": str(problem), "gpu": after["gpu"], "cudnn": versions, "measured": False, "engines": engines}
        )
    if args.json:
        print(json.dumps(reports[0] if len(found) == 1 and not _listed(args) else reports, indent=2))
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
    if args.effort != "fast":
        words += ["--effort", args.effort]
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


@contextlib.contextmanager
def _progress_of_many() -> Iterator[SearchesProgress]:
    """Yields a callback that shows on a terminal's standard error how far many searches are and the problem at hand."""
    console = Console(stderr=True)
    bar = Progress(
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        # lines that go to a file or a pipe must not go to the terminal instead
        redirect_stdout=sys.stdout.isatty(),
    )
    with bar:
        task = bar.add_task("", total=None)

        def tell(done: int, total: int, problem: Problem) -> None:
            bar.update(task, completed=done, total=total, description=str(problem))

        yield tell
