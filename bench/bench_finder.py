"""What the finder finds, what it costs, and PyTorch on the same convolutions in its best modes.

    network   every convolution of a network: the finder's pick, the best of each source alone, PyTorch by cuDNN's graph
              API and by its legacy one, with benchmark limit 10 and 0 (every plan); totals as often as each occurs
    suite     the suite of 300 problems against PyTorch's graph API with limit 0
    regret    how often a search repeated picks something else, what that costs, and cuDNN's own times beside ours
    startup   seconds of a cold start of a network's plans, fast and wide, then from the store in a new process
    policies  what each policy would cost on a network (`flcuda.compare`), and PyTorch beside them
    plans     one process of `startup`: plans for the problems, from whatever is stored

PyTorch runs in processes of its own (`peers/torch_convolutions.py`), one after another and never beside a measurement
here; it gets the same operands in the same number of sets and the same timer. In `network` the picks are measured
again before and after each such process, and compared with it by the mean of the two, so that a drift of the clocks
shows and does not count. Times are medians of device events, with operands that lie in no cache unless `--l2 warm`. A
ratio is PyTorch's time over ours: above 1 the finder's pick is faster.

Strict float32 is measured in NCHW, the other precisions in NHWC, in which tensor cores work. `--problems FILE` takes
one problem a line, as often as it counts, in place of the named ones, all of the precision that is told.

Run: python bench/bench_finder.py network --precision float32 [--json]
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGIN = time.perf_counter()

import flcuda  # noqa: E402
from flcuda import device as devices  # noqa: E402
from flcuda import timing  # noqa: E402
from flcuda.cudnn.resources import handle  # noqa: E402
from flcuda.device import Device  # noqa: E402
from flcuda.errors import CudnnNotSupportedError, FlcudaError  # noqa: E402
from flcuda.finder import FindReport, Plan, Policy, Problem, measure  # noqa: E402
from flcuda.finder.compare import Comparison, compare, repeat  # noqa: E402
from flcuda.finder.problems import read_problems  # noqa: E402
from flcuda.finder.sources import REWRITES  # noqa: E402
from flcuda.finder.verify import Verifier  # noqa: E402

PEER = Path(__file__).parent / "peers" / "torch_convolutions.py"

LAYOUTS = {"float32": "nchw", "tf32": "nhwc", "float16": "nhwc", "bfloat16": "nhwc"}

# How both sides are timed.
WARMUP = 2
REPEATS = 10
BUDGET_S = 0.3

SLOWER = 1.02
"""So many times PyTorch's time is called slower."""

GRACE_S = 60.0
"""Seconds that PyTorch's process may take to begin, and for the one search that was going on when its time was up."""

ALONE: dict[str, dict[str, Sequence[str]]] = {
    "cuda": {"legacy": ("legacy",), "graph": ("graph",), "rewrites": REWRITES},
    "cpu": {"reference": ("reference",)},
}
"""Sources that are asked alone, beside all together."""

SHOWN = 10
"""Rows of a list in print."""

LISTED = 8
"""Candidates of each problem that `network` keeps."""

Answer = dict[str, Any]


@dataclass(frozen=True)
class Mode:
    """How PyTorch asks cuDNN."""

    api: str
    limit: int

    def __str__(self) -> str:
        return f"{self.api}:{self.limit}"

    @classmethod
    def parse(cls, text: str) -> "Mode":
        api, _, limit = text.partition(":")
        if api not in ("graph", "legacy") or not limit.isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r} is not graph:LIMIT or legacy:LIMIT")
        return cls(api, int(limit))


MODES = (Mode("graph", 10), Mode("graph", 0), Mode("legacy", 10), Mode("legacy", 0))


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- the two sides ----------------------------------------------------------------------------------------------------


def timed(plans: Sequence[Plan], device: Device, policy: Policy) -> list[Answer]:
    """Times plans for one problem as PyTorch is timed: on operands of their own, in turn."""
    problem = plans[0].problem
    sets = measure.with_memory(lambda: measure.operand_sets(problem, device, policy), device)
    found = []
    for plan in plans:
        runs = [functools.partial(plan.run, *arrays) for arrays in sets]
        found.append(times_of(timing.measure(runs, device, warmup=WARMUP, repeats=REPEATS, budget_s=BUDGET_S)))
        del runs
    del sets
    give_back(device)
    return found


def times_of(times: timing.Timing) -> Answer:
    """Gives what a file of results keeps of times."""
    names = ("median_ms", "low_ms", "high_ms", "samples", "host_us", "queued")
    return {name: getattr(times, name) for name in names}


def give_back(device: Device) -> None:
    """Gives the GPU back what CuPy's pool holds: the next one, which may be another process, finds it free."""
    if device.kind == "cuda":
        devices.cupy().get_default_memory_pool().free_all_blocks()


def clocks(device: Device) -> Answer | None:
    now = timing.clocks(device)
    return None if now is None else dataclasses.asdict(now)


def peer(
    lines: Sequence[str],
    precision: str,
    mode: Mode,
    *,
    device: str,
    l2: str,
    seconds: float,
    command: Sequence[str] = (sys.executable, str(PEER)),
) -> dict[str, Any]:
    """Runs PyTorch on problems in another process, and in a new one for the rest where a problem ends it.

    Args:
        lines: of the problems, each once.
        precision: says whether TF32 is allowed.
        mode: which of cuDNN's APIs and how many plans.
        device: where.
        l2: "cold" or "warm".
        seconds: for all of them; what they do not suffice for is "skipped".
        command: what to run.

    Returns:
        "settings" as PyTorch says them, None where it said none; and "answers" by line, of which each has "median_ms",
        "error" or "skipped".
    """
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_CUDNN_V8_API_DISABLED"}
    if mode.api == "legacy":
        environment["TORCH_CUDNN_V8_API_DISABLED"] = "1"
    packages = str(Path(flcuda.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (packages, environment.get("PYTHONPATH"))))
    end = time.perf_counter() + seconds
    settings: Answer | None = None
    answers: dict[str, Answer] = {}
    while left := [line for line in lines if line not in answers]:
        remaining = end - time.perf_counter()
        if remaining <= 0:
            answers.update({line: {"skipped": f"the {seconds:.0f} s were used up"} for line in left})
            break
        request = {
            "problems": left,
            "precision": precision,
            "benchmark_limit": mode.limit,
            "device": device,
            "l2": l2,
            "warmup": WARMUP,
            "repeats": REPEATS,
            "budget_s": BUDGET_S,
            "total_s": remaining,
        }
        status, values = _process(command, environment, json.dumps(request), remaining + GRACE_S)
        for value in values:
            settings = value.get("settings", settings)
            if value.get("problem") in left:
                answers[value.pop("problem")] = value
        unanswered = next((line for line in left if line not in answers), None)
        if unanswered is not None and settings is None:
            raise RuntimeError(f"{' '.join(command)} ended with status {status} before it began")
        if unanswered is not None and left[0] == unanswered:
            answers[unanswered] = {"error": f"the process ended with status {status}"}
    return {"settings": settings, "answers": answers}


def _process(
    command: Sequence[str], environment: dict[str, str], text: str, limit_s: float
) -> tuple[int, list[Answer]]:
    """Runs a process that prints one JSON object a line, and kills it when it takes too long."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        watch = threading.Timer(limit_s, process.kill)
        watch.start()
        values = []
        try:
            try:
                process.stdin.write(text)
                process.stdin.close()
            except BrokenPipeError:
                pass  # it ended at once; its status tells
            for line in process.stdout:
                try:
                    value = json.loads(line)
                except ValueError:
                    note(line.rstrip())
                    continue
                if isinstance(value, dict):
                    values.append(value)
        finally:
            watch.cancel()
    return process.returncode, values


# --- arithmetic on what both found ------------------------------------------------------------------------------------


def finite(value: float) -> float | None:
    """Returns a number that JSON has."""
    return value if math.isfinite(value) else None


def geometric_mean(ratios: Iterable[float]) -> float | None:
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(statistics.fmean(logarithms)) if logarithms else None


def weighted(times: dict[str, float], counts: Counter[str]) -> float:
    """Sums times by how often each problem occurs."""
    return sum(counts[line] * time_ms for line, time_ms in times.items())


def against(
    answers: dict[str, Answer], before: dict[str, Answer], after: dict[str, Answer], counts: Counter[str]
) -> dict[str, Any]:
    """Compares PyTorch's times with ours on the problems that it answered.

    Args:
        answers: PyTorch's, by line.
        before: our times before it ran, by line.
        after: our times after it ran.
        counts: how often each problem occurs.
    """
    theirs = {line: answer["median_ms"] for line, answer in answers.items() if "median_ms" in answer}
    ours = {line: (before[line]["median_ms"] + after[line]["median_ms"]) / 2 for line in theirs}
    total, own = weighted(theirs, counts), weighted(ours, counts)
    return {
        "compared": sum(counts[line] for line in theirs),
        "of": counts.total(),
        "total_ms": total,
        "ours_ms": own,
        "ratio": total / own if own else None,
        "geometric_mean": geometric_mean(theirs[line] / ours[line] for line in theirs),
        "search_s": sum(answer.get("search_s", 0.0) for answer in answers.values()),
        "not_compared": {
            line: answer.get("error") or answer.get("skipped")
            for line, answer in answers.items()
            if "median_ms" not in answer
        },
    }


def ranked(ours: dict[str, Answer], theirs: dict[str, Answer]) -> list[dict[str, Any]]:
    """Puts both times of each problem that both have beside each other, the largest win first."""
    rows = [
        {
            "problem": line,
            "ratio": theirs[line]["median_ms"] / answer["median_ms"],
            "ours_ms": answer["median_ms"],
            "ours_range_ms": [answer["low_ms"], answer["high_ms"]],
            "peer_ms": theirs[line]["median_ms"],
            "peer_range_ms": [theirs[line]["low_ms"], theirs[line]["high_ms"]],
            "id": answer.get("id"),
        }
        for line, answer in ours.items()
        if "median_ms" in answer and "median_ms" in theirs.get(line, {})
    ]
    return sorted(rows, key=lambda row: -row["ratio"])


def is_slower(row: dict[str, Any]) -> bool:
    return bool(row["ratio"] * SLOWER < 1)


def beyond_noise(row: dict[str, Any]) -> bool:
    """Says whether even our quickest samples are above its slowest: the ranges of 10th to 90th percentile lie apart."""
    return is_slower(row) and bool(row["ours_range_ms"][0] > row["peer_range_ms"][1])


# --- network ----------------------------------------------------------------------------------------------------------


def network(
    problems: Sequence[Problem],
    precision: str,
    *,
    policy: Policy,
    device: Device,
    verify: bool = True,
    modes: Sequence[Mode] = MODES,
    seconds: float = 100.0,
    ask: Callable[..., dict[str, Any]] = peer,
) -> dict[str, Any]:
    """Searches, then measures the picks before, between and after PyTorch's modes.

    Args:
        problems: as often as each occurs.
        precision: what PyTorch may use.
        policy: of the search.
        device: where.
        verify: whether all candidates are verified.
        modes: PyTorch's, in turn.
        seconds: for each mode.
        ask: runs PyTorch, as `peer` does.
    """
    counts = Counter(map(str, problems))
    by_line = {str(problem): problem for problem in problems}
    rows: dict[str, dict[str, Any]] = {}
    plans: dict[str, Plan] = {}
    clocks_before = clocks(device)
    sources = ALONE[device.kind]
    for line, problem in by_line.items():
        start = time.perf_counter()
        report = flcuda.find(problem, policy=policy, device=device, verify=verify, store=False)
        took = time.perf_counter() - start
        best = report.usable[0]
        assert best.timing is not None
        plans[line] = best.plan()
        rows[line] = {
            "problem": line,
            "count": counts[line],
            "id": best.label,
            "found_ms": best.timing.median_ms,
            "kernels": list(best.kernels or ()),
            "workspace": best.candidate.workspace,
            "error": None if best.verification is None else finite(best.verification.relative),
            "search_s": took,
            # what ran once only has bounds, no time
            "report": [
                {"id": row.label, **times_of(row.timing)}
                for row in report.usable[:LISTED]
                if row.timing is not None and not row.timing.at_least
            ],
            "rows": len(report.rows),
            "usable": len(report.usable),
            "alone": beside(
                plans[line],
                {name: _alone(problem, some, policy, device, verify) for name, some in sources.items()},
                device,
            ),
        }
        note(f"ours: {line}: {best.timing.median_ms:.4f} ms by {best.label}, {took:.2f} s")
        give_back(device)
    rounds = [_round(plans, device, policy)]
    peers = []
    for mode in modes:
        found = ask(list(by_line), precision, mode, device=device.kind, l2=policy.l2, seconds=seconds)
        rounds.append(_round(plans, device, policy))
        summary = against(found["answers"], rounds[-2], rounds[-1], counts)
        peers.append({"mode": str(mode), "settings": found["settings"], **summary, "answers": found["answers"]})
    for line, row in rows.items():
        row["rounds"] = [each[line] for each in rounds]
    return {
        "precision": precision,
        "policy": policy.to_json(),
        "verified": verify,
        "search_s": sum(row["search_s"] for row in rows.values()),
        "clocks": [clocks_before, clocks(device)],
        "total_ms": [weighted({line: answer["median_ms"] for line, answer in each.items()}, counts) for each in rounds],
        "found_total_ms": weighted({line: row["found_ms"] for line, row in rows.items()}, counts),
        "alone": alone(rows.values(), counts),
        "peers": peers,
        "rows": list(rows.values()),
    }


def _round(plans: dict[str, Plan], device: Device, policy: Policy) -> dict[str, Answer]:
    return {line: timed([plan], device, policy)[0] for line, plan in plans.items()}


def _alone(problem: Problem, sources: Sequence[str], policy: Policy, device: Device, verify: bool) -> FindReport | None:
    """Searches with some sources only; None when they have nothing."""
    try:
        report: FindReport = flcuda.find(
            problem, policy=policy, device=device, sources=sources, verify=verify, store=False, details=False
        )
        return report
    except (CudnnNotSupportedError, ValueError):
        return None


def beside(plan: Plan, reports: dict[str, FindReport | None], device: Device) -> dict[str, Any]:
    """Times a pick and those of sources alone one right after the other.

    Args:
        plan: the pick of all sources together.
        reports: by the name of the source or sources; None where these have nothing.
        device: where.

    Returns:
        "ours", and under each name its pick's id and times; where that is the same candidate, the same times.
    """
    rows = {name: report.usable[0] for name, report in reports.items() if report is not None}
    others = {name: row.plan() for name, row in rows.items() if row.choice.identity != plan.choice.identity}
    ours, *times = timed([plan, *others.values()], device, plan.choice.policy)
    found: dict[str, Any] = {"ours": ours}
    found.update({name: {"id": row.label, "same": name not in others, **ours} for name, row in rows.items()})
    for name, each in zip(others, times, strict=True):
        found[name].update(each)
    return found


def alone(rows: Iterable[dict[str, Any]], counts: Counter[str]) -> dict[str, Any]:
    """Says what each source alone would cost beside the picks of all together, for what it can do."""
    rows = list(rows)
    found = {}
    for name in dict.fromkeys(name for row in rows for name in row["alone"] if name != "ours"):
        able = [row for row in rows if name in row["alone"]]
        total = weighted({row["problem"]: row["alone"][name]["median_ms"] for row in able}, counts)
        picks = weighted({row["problem"]: row["alone"]["ours"]["median_ms"] for row in able}, counts)
        found[name] = {
            "solves": sum(row["count"] for row in able),
            "of": counts.total(),
            "total_ms": total,
            "picks_ms": picks,
            "ratio": total / picks,
            "picked_slower": [
                row["problem"]
                for row in able
                if row["alone"]["ours"]["median_ms"] > SLOWER * row["alone"][name]["median_ms"]
            ],
            "picked": sum(row["count"] for row in able if row["alone"][name]["same"]),
        }
    return found


def print_network(result: dict[str, Any]) -> None:
    print(f"{result['precision']}, effort {result['policy']['effort']}, L2 {result['policy']['l2']}")
    print(f"search: {result['search_s']:.2f} s; picks, ms: {', '.join(f'{ms:.3f}' for ms in result['total_ms'])}")
    for name, entry in result["alone"].items():
        print(
            f"{name:<16} alone {entry['total_ms']:9.3f} ms, the picks {entry['picks_ms']:9.3f} ms, "
            f"{entry['ratio']:.3f} times, for {entry['solves']} of {entry['of']}; picked for {entry['picked']}"
        )
        for line in entry["picked_slower"]:
            print(f"  slower than it by more than 2 %: {line}")
    for entry in result["peers"]:
        print(
            f"torch {entry['mode']:<10} {entry['total_ms']:9.3f} ms, ours {entry['ours_ms']:9.3f} ms, "
            f"{_times(entry['ratio'])}, for {entry['compared']} of {entry['of']}; searched in {entry['search_s']:.1f} s"
        )
        for line, why in entry["not_compared"].items():
            print(f"  not compared: {line}: {why}")
    if result["peers"]:
        print("each, ms: ours, then PyTorch's modes in that order")
    for row in result["rows"]:
        theirs = [entry["answers"].get(row["problem"], {}).get("median_ms") for entry in result["peers"]]
        ours = statistics.median(entry["median_ms"] for entry in row["rounds"])
        print(f"{_ms(ours)} {' '.join(map(_ms, theirs))}  x{row['count']} {row['problem']}  {row['id']}")


def _times(ratio: float | None) -> str:
    return "no ratio" if ratio is None else f"{ratio:.3f} times"


def _ms(value: float | None) -> str:
    return f"{'-':>9}" if value is None else f"{value:9.4f}"


# --- suite ------------------------------------------------------------------------------------------------------------


def suite(
    problems: Sequence[Problem],
    precision: str,
    *,
    policy: Policy,
    device: Device,
    mode: Mode = Mode("graph", 0),
    seconds: tuple[float, float, float] = (70.0, 90.0, 30.0),
    ask: Callable[..., dict[str, Any]] = peer,
) -> dict[str, Any]:
    """Searches each problem, lets PyTorch do the same, and looks again where it was faster.

    The order is random, always the same, so that what time does not suffice for is a fair part of all.

    Args:
        problems: each once.
        precision: what PyTorch may use.
        policy: of the search.
        device: where.
        mode: PyTorch's.
        seconds: for our searches, for PyTorch, and for the second look at what was slower.
        ask: runs PyTorch, as `peer` does.
    """
    order = random.Random(1).sample(list(problems), len(problems))
    ours: dict[str, Answer] = {}
    plans: dict[str, Plan] = {}
    start = time.perf_counter()
    for problem in order:
        line = str(problem)
        if time.perf_counter() - start > seconds[0]:
            ours[line] = {"skipped": f"the {seconds[0]:.0f} s were used up"}
            continue
        begin = time.perf_counter()
        try:
            report = flcuda.find(problem, policy=policy, device=device, store=False, details=False)
            search_s = time.perf_counter() - begin
            plans[line] = report.usable[0].plan()
            ours[line] = {"id": report.usable[0].label, "search_s": search_s, **timed([plans[line]], device, policy)[0]}
        except (FlcudaError, MemoryError, ValueError) as error:
            ours[line] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:500]}"}
        told = ours[line].get("error") or f"{ours[line]['median_ms']:.4f} ms by {ours[line]['id']}"
        note(f"ours: {len(ours)}/{len(order)} {line}: {told}")
    took = time.perf_counter() - start
    found = ask(list(plans), precision, mode, device=device.kind, l2=policy.l2, seconds=seconds[1])
    theirs = found["answers"]
    compared = ranked(ours, theirs)
    slower = [row for row in compared if is_slower(row)]
    if slower:
        _look_again(slower, plans, precision, mode, policy, device, seconds[2], ask)
    wins = [dict(row) for row in compared[:SHOWN] if row["ratio"] > 1]
    for row in wins:
        row["verification"] = verified(plans[row["problem"]], device)
    answered = [answer for answer in theirs.values() if "median_ms" in answer]
    return {
        "precision": precision,
        "policy": policy.to_json(),
        "mode": str(mode),
        "settings": found["settings"],
        "problems": len(order),
        "compared": len(compared),
        "geometric_mean": geometric_mean(row["ratio"] for row in compared),
        "median": statistics.median(row["ratio"] for row in compared) if compared else None,
        "faster": sum(row["ratio"] > SLOWER for row in compared),
        "slower": slower,
        "slower_beyond_noise": [
            row["problem"] for row in slower if beyond_noise(row) and ("again" not in row or beyond_noise(row["again"]))
        ],
        "wins": wins,
        "seconds": {
            "ours": took,
            "our_searches": sum(answer.get("search_s", 0.0) for answer in ours.values()),
            "peer_searches": sum(answer["search_s"] for answer in answered),
        },
        "not_compared": {
            line: reason
            for line, answer in ours.items()
            if (reason := _why_not(answer, theirs.get(line, {}))) is not None
        },
        "rows": compared,
    }


def _why_not(ours: Answer, theirs: Answer) -> str | None:
    """Says why a problem was not compared; None where it was."""
    for whose, answer in (("ours", ours), ("torch", theirs)):
        if "median_ms" not in answer:
            return f"{whose}: {answer.get('error') or answer.get('skipped')}"
    return None


def _look_again(
    slower: list[dict[str, Any]],
    plans: dict[str, Plan],
    precision: str,
    mode: Mode,
    policy: Policy,
    device: Device,
    seconds: float,
    ask: Callable[..., dict[str, Any]],
) -> None:
    """Measures both sides of the slower ones once more, ours just before PyTorch; adds "again" to those answered."""
    lines = [row["problem"] for row in slower]
    ours = _round({line: plans[line] for line in lines}, device, policy)
    theirs = ask(lines, precision, mode, device=device.kind, l2=policy.l2, seconds=seconds)["answers"]
    again = {row["problem"]: row for row in ranked(ours, theirs)}
    for row in slower:
        if row["problem"] in again:
            row["again"] = {
                name: value for name, value in again[row["problem"]].items() if name not in ("problem", "id")
            }


def verified(plan: Plan, device: Device) -> dict[str, Any]:
    """Compares a plan's results with float64."""
    arrays = plan.problem.random_arrays(device=device)
    verifier = Verifier(plan.problem, tuple(arrays[name] for name in plan.problem.inputs), device)
    found = verifier.check(plan._runner, deterministic=False)
    give_back(device)
    return {"error": finite(found.relative), "reason": found.reason}


def print_suite(result: dict[str, Any]) -> None:
    print(
        f"{result['precision']}: {result['compared']} of {result['problems']} compared with torch {result['mode']}; "
        f"geometric mean {_times(result['geometric_mean'])}, faster in {result['faster']}, "
        f"slower by more than 2 % in {len(result['slower'])}, beyond noise in {len(result['slower_beyond_noise'])}"
    )
    for title, rows in (("wins", result["wins"]), ("slower", result["slower"][::-1])):
        print(f"{title}:")
        for row in rows:
            low, high = row["ours_range_ms"]
            print(
                f"  {row['ratio']:.3f}  {_ms(row['ours_ms'])} ({low:.4f} to {high:.4f}) torch {_ms(row['peer_ms'])} "
                f"({row['peer_range_ms'][0]:.4f} to {row['peer_range_ms'][1]:.4f})"
                + (f" again {row['again']['ratio']:.3f}" if "again" in row else "")
                + f"  {row['problem']}  {row['id']}"
            )
    for why, count in Counter(why[:60] for why in result["not_compared"].values()).most_common(SHOWN):
        print(f"{count} not compared: {why}")


# --- regret -----------------------------------------------------------------------------------------------------------


def claims(problems: Sequence[Problem], device: Device, l2: str) -> dict[str, Any]:
    """Compares the times that cuDNN's legacy search reports with ours, and what following its pick would cost."""
    rows = []
    policy = Policy(effort="wide", l2=l2)
    for problem in problems:
        report = flcuda.find(
            problem, policy=policy, device=device, sources=["legacy"], verify=False, store=False, details=False
        )
        reported = {row.label: row.candidate.reported_ms for row in report.usable if row.candidate.reported_ms}
        if not reported:
            continue
        # each anew, since a search takes no good time of what cannot win
        measured = timed([report[label].plan() for label in reported], device, policy)
        ours = {label: answer["median_ms"] for label, answer in zip(reported, measured, strict=True)}
        pick = min(reported, key=reported.__getitem__)
        rows.append(
            {
                "problem": str(problem),
                "pick": pick,
                "pick_regret": ours[pick] / min(ours.values()) - 1,
                "ratios": {label: claimed / ours[label] for label, claimed in reported.items()},
            }
        )
    ratios = [ratio for row in rows for ratio in row["ratios"].values()]
    return {
        "l2": l2,
        "algorithms": len(ratios),
        "ratio": _spread_of(ratios),
        "pick_regret": _spread_of([row["pick_regret"] for row in rows]),
        "rows": rows,
    }


def _spread_of(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def _range(entry: dict[str, float] | None, unit: float) -> str:
    if entry is None:
        return "none"
    return f"{unit * entry['min']:.2f} to {unit * entry['max']:.2f}, median {unit * entry['median']:.2f}"


def regret(problems: Sequence[Problem], precision: str, *, repeats: int, policy: Policy, device: Device) -> Answer:
    """Repeats the search of each problem; then lets cuDNN report its own times, cold and warm.

    Args:
        problems: as often as each occurs.
        precision: theirs.
        repeats: searches of each.
        policy: of these searches.
        device: where.
    """
    distinct = list(dict.fromkeys(problems))

    def progress(done: int, total: int, problem: Problem) -> None:
        if done % len(distinct) == 0:
            note(f"regret: {done} of {total} searches; next {problem}")

    repetition = repeat(problems, repeats, policy=policy, device=device, progress=progress)
    print(repetition, file=sys.stderr)
    return {
        "precision": precision,
        "repetition": json.loads(repetition.to_json()),
        "reported": [claims(distinct, device, l2) for l2 in ("cold", "warm")] if device.kind == "cuda" else [],
    }


def print_regret(result: dict[str, Any]) -> None:
    found = result["repetition"]
    print(f"{result['precision']}: {found['times']} searches of each problem in {found['seconds']:.1f} s")
    print(f"the choice changed in {found['changes']} of {found['chances']} repeats")
    for name in ("mean_regret", "largest_regret", "mean_total_regret", "largest_total_regret"):
        if found[name] is not None:
            print(f"{name.replace('_', ' ')}: {found[name]:.2%}")
    for entry in result["reported"]:
        print(f"cuDNN's own times over ours, L2 {entry['l2']}: {_range(entry['ratio'], 1.0)}")
        print(f"  regret of its own pick, per cent: {_range(entry['pick_regret'], 100.0)}")


# --- policies ---------------------------------------------------------------------------------------------------------

POLICIES = {
    "fastest": Policy(),
    "deterministic": Policy(deterministic=True),
    "64 MiB of workspace": Policy(workspace_limit=64 << 20),
    "no workspace": Policy(workspace_limit=0),
    "host time": Policy(time="host"),
    "heuristic": Policy(mode="heuristic"),
}


def policies(
    problems: Sequence[Problem],
    precision: str,
    *,
    device: Device,
    mode: Mode,
    seconds: float,
    ask: Callable[..., dict[str, Any]] = peer,
) -> Comparison:
    """Compares policies on problems, given as often as each occurs, and adds PyTorch's times as a column."""
    found = compare(problems, POLICIES, device=device)
    give_back(device)
    lines = {str(problem): problem for problem in found.costs}
    answers = ask(list(lines), precision, mode, device=device.kind, l2="cold", seconds=seconds)["answers"]
    times = {lines[line]: answer["median_ms"] for line, answer in answers.items() if "median_ms" in answer}
    return found.with_times(f"PyTorch {mode}", times)


# --- startup ----------------------------------------------------------------------------------------------------------


def plans(problems: Sequence[Problem], *, policy: Policy, device: Device) -> dict[str, Any]:
    """Makes a plan for each problem in this process; says what took how long.

    Imports are counted from the first line of this file. What comes before the first plan: the CUDA context, and
    cuDNN's libraries and handle.
    """
    imported = time.perf_counter()
    if device.kind == "cuda":
        handle()
        devices.synchronize(device)
    ready = time.perf_counter()
    rows = []
    for problem in problems:
        start = time.perf_counter()
        choice = flcuda.plan(problem, policy=policy, device=device).choice
        rows.append(
            {
                "problem": str(problem),
                "seconds": time.perf_counter() - start,
                "identity": [*choice.identity[:3], dict(choice.parameters)],
                "median_ms": choice.median_ms,
            }
        )
    end = time.perf_counter()
    return {
        "import_s": imported - BEGIN,
        "prepare_s": ready - imported,
        "plans_s": end - ready,
        "process_s": end - BEGIN,
        "rows": rows,
    }


def startup(args: argparse.Namespace) -> dict[str, Any]:
    """Runs `plans` twice a new folder of choices, each time in a new process.

    Before, a process of its own has the kernels of searching and verifying compiled, which happens once a machine.

    Args:
        args: precision, device, problems, and efforts, each of which has a folder of its own.
    """
    arguments = ["--precision", args.precision, "--device", args.device, "--l2", args.l2]
    result: dict[str, Any] = {"precision": args.precision, "efforts": {}}
    with tempfile.TemporaryDirectory(prefix="flcuda-bench-") as name:
        folder = Path(name)
        few, chosen = folder / "few.txt", folder / "problems.txt"
        few.write_text(f"all n2 c8 9x9 k8 3x3 p1 {args.precision} {LAYOUTS[args.precision]}\n")
        chosen.write_text("".join(f"{problem}\n" for problem in problems_of(args, distinct=True)))
        compiling = _plans_process([*arguments, "--problems", str(few), "--effort", "wide"], folder / "few")
        result["compile_s"] = compiling["wall_s"]
        for effort in args.effort or ("fast", "wide"):
            words = [*arguments, "--problems", str(chosen), "--effort", effort]
            cold, stored = (_plans_process(words, folder / effort) for _ in range(2))
            identities = [[row["identity"] for row in entry["rows"]] for entry in (cold, stored)]
            result["efforts"][effort] = {"cold": cold, "stored": stored, "identical": identities[0] == identities[1]}
            note(f"startup, {effort}: cold {cold['plans_s']:.2f} s, stored {stored['plans_s']:.2f} s")
    return result


def _plans_process(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    packages = str(Path(flcuda.__file__).parents[1])
    path = os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "FLCUDA_CHOICES": str(folder), "PYTHONPATH": path}
    command = [sys.executable, str(Path(__file__).resolve()), "plans", *arguments, "--json"]
    start = time.perf_counter()
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True).stdout
    return {**json.loads(text), "wall_s": time.perf_counter() - start}


def print_startup(result: dict[str, Any]) -> None:
    for effort, entry in result["efforts"].items():
        for name in ("cold", "stored"):
            print(f"{effort}, {name}: {_process_line(entry[name])}, wall {entry[name]['wall_s']:.3f} s")
        print(f"{effort}: the same choices from the store: {'yes' if entry['identical'] else 'NO'}")


def _process_line(entry: dict[str, Any]) -> str:
    return (
        f"{len(entry['rows'])} plans in {entry['plans_s']:.3f} s; imports {entry['import_s']:.3f} s; "
        f"context and libraries {entry['prepare_s']:.3f} s"
    )


# --- the command ------------------------------------------------------------------------------------------------------


def problems_of(args: argparse.Namespace, *, distinct: bool) -> list[Problem]:
    """Gives the problems that the arguments name, each once or as often as it occurs."""
    if args.problems is not None:
        found = read_problems(args.problems)
        other = [str(problem) for problem in found if problem.precision != args.precision]
        if other:
            raise SystemExit(f"{args.problems}: {other[0]} is not of the precision {args.precision}")
        return list(dict.fromkeys(found)) if distinct else list(found)
    how = {"dtype": args.precision, "layout": LAYOUTS[args.precision]}
    if args.command == "suite":
        return list(flcuda.problems("suite", **how))
    return list(flcuda.problems(args.network, args.batch, distinct=distinct, **how))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--precision", choices=LAYOUTS, required=True)
    common.add_argument("--network", default="resnet34")
    common.add_argument("--batch", type=int, help="of the network, by default 128")
    common.add_argument("--problems", type=Path, metavar="FILE")
    common.add_argument("--device", default="cuda")
    common.add_argument("--l2", choices=("cold", "warm"), default="cold")
    common.add_argument("--json", action="store_true")
    for name in ("network", "suite", "regret", "policies", "startup", "plans"):
        command = commands.add_parser(name, parents=[common])
        if name == "startup":
            command.add_argument("--effort", choices=("fast", "wide"), action="append", help="by default both")
        elif name != "policies":
            command.add_argument("--effort", choices=("fast", "wide"), default="fast")
        if name in ("network", "suite", "policies"):
            command.add_argument("--python", default=sys.executable, help="which has torch")
        if name == "network":
            command.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True)
            command.add_argument("--mode", type=Mode.parse, action="append", help="graph:10, legacy:0, ...")
            command.add_argument("--seconds", type=float, default=100.0, help="for each mode of PyTorch")
        if name == "suite":
            command.add_argument("--mode", type=Mode.parse, default=Mode("graph", 0))
            command.add_argument(
                "--seconds", type=float, nargs=3, default=(70.0, 90.0, 30.0), help="ours, PyTorch's, the second look"
            )
        if name == "policies":
            command.add_argument("--mode", type=Mode.parse, default=Mode("graph", 0))
            command.add_argument("--seconds", type=float, default=100.0, help="for PyTorch")
        if name == "regret":
            command.add_argument("--repeats", type=int, default=20)
    return top


def run(args: argparse.Namespace) -> tuple[dict[str, Any], Callable[[dict[str, Any]], None]]:
    """Does what the arguments say; returns the result and what prints it."""
    if args.command == "startup":
        return startup(args), print_startup
    device = devices.resolve(args.device)
    chosen = problems_of(args, distinct=args.command not in ("network", "regret", "policies"))
    if args.command == "policies":
        ask = functools.partial(peer, command=(args.python, str(PEER)))
        found = policies(chosen, args.precision, device=device, mode=args.mode, seconds=args.seconds, ask=ask)
        return json.loads(found.to_json()), lambda _: print(found)
    policy = Policy(effort=args.effort, l2=args.l2)
    with device.use():
        if args.command == "plans":
            return plans(chosen, policy=policy, device=device), lambda result: print(_process_line(result))
        if args.command == "regret":
            return regret(chosen, args.precision, repeats=args.repeats, policy=policy, device=device), print_regret
        ask = functools.partial(peer, command=(args.python, str(PEER)))
        how: dict[str, Any] = {"policy": policy, "device": device, "ask": ask}
        if args.command == "suite":
            seconds = tuple(args.seconds)
            return suite(chosen, args.precision, mode=args.mode, seconds=seconds, **how), print_suite
        result = network(
            chosen, args.precision, verify=args.verify, modes=args.mode or MODES, seconds=args.seconds, **how
        )
        return result, print_network


def main(words: Sequence[str] | None = None) -> None:
    args = parser().parse_args(words)
    with tempfile.TemporaryDirectory(prefix="flcuda-bench-") as folder:
        if args.command != "plans":
            # What is found here must not become anybody's stored choice.
            os.environ["FLCUDA_CHOICES"] = folder
        result, show = run(args)
    if args.json:
        json.dump(result, sys.stdout, indent=1)
        print()
    else:
        show(result)


if __name__ == "__main__":
    main()
