"""Seconds to the first trained step of a ResNet: flcuda with an empty and a full store, beside PyTorch and JAX.

Each figure is of a process of its own that imports, builds the model, trains one step and ends. `first step` is the
seconds from the model and the batch being ready to the end of that step: with the search for algorithms and with all
compilation that the first call brings. `process` is all, from the process's start.

    nothing   no cache at all: CuPy has to compile flcuda's own kernels too, which happens once a machine
    empty     nothing was searched or compiled before, but for those kernels: a first training on this machine
    full      what the process before it found and compiled is there: flcuda's choices, Inductor's and Triton's
              kernels, XLA's programs. PyTorch keeps nothing of cuDNN's searches

Rows are those of bench_resnet34.py. They take turns, round by round, in a random order; rounds for which `--total`
leaves no time are not begun.

Run: python bench/bench_first_step.py [--precision float16] [--json]
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_resnet34 import PRECISIONS, TRIAL, Row, add_pythons, count, note, number, pythons_of, versions
from peer_process import Told, ask_side
from record import machine, machine_line
from steps import BLOCKS, Request

Answer = dict[str, Any]

ROWS = ("flcuda:captured", "flcuda:eager", "torch:eager", "torch:compiled", "torch:compiled-graphs", "jax:jit")
CACHES = ("nothing", "empty", "full")
FIGURES = ("import_s", "build_s", "first_step_s", "process_s")

BARS = {"empty": 5.0, "full": 1.5}
"""Of flcuda's first step on ResNet-34."""

SHORTEST_S = 10.0

Ask = Callable[..., Told]


def one(row: Row, args: argparse.Namespace, *, caches: Path, kernels: Path, limit_s: float, ask: Ask) -> Answer:
    """Runs a process to its first step."""
    request = Request(
        args.network,
        args.precision,
        args.batch,
        row.how,
        row.options,
        device=args.device,
        size=args.size,
        classes=args.classes,
        samples=0,
    )
    env = {"CUPY_CACHE_DIR": str(kernels / "cupy"), "CUDA_CACHE_PATH": str(kernels / "cuda")}
    told = ask(row.side, request, pythons=args.python, limit_s=limit_s, caches=caches, env=env)
    found = {name: told.values[name] for name in FIGURES if name in told.values}
    return {**found, "wall_s": told.wall_s, "why": told.why, "settings": told.values.get("settings", {})}


def rounds(
    rows: Sequence[Row], args: argparse.Namespace, folder: Path, *, left: Callable[[], float], ask: Ask
) -> dict[str, dict[str, list[Answer]]]:
    """Runs every row in every round: with an empty cache, then with the full one; the first time with nothing."""
    found: dict[str, dict[str, list[Answer]]] = {str(row): {kind: [] for kind in CACHES} for row in rows}
    generator = random.Random(args.seed)
    kernels = {row: folder / f"kernels-{place}" for place, row in enumerate(rows)}
    for turn in range(args.rounds):
        order = list(rows)
        generator.shuffle(order)
        for row in order:
            caches = Path(tempfile.mkdtemp(dir=folder))
            # The peers' kernels come with them: for them nothing and empty are the same.
            first = turn == 0 and row.side == "flcuda"
            for kind in (*(("nothing",) if first else ()), "empty", "full"):
                limit = min(args.seconds, left())
                if limit < min(args.seconds, SHORTEST_S):
                    continue
                place = Path(tempfile.mkdtemp(dir=folder)) if kind == "nothing" else caches
                answer = one(row, args, caches=place, kernels=kernels[row], limit_s=limit, ask=ask)
                found[str(row)][kind].append(answer)
                told = answer["why"] or f"{answer['first_step_s']:.2f} s, the process {answer['process_s']:.2f} s"
                note(f"{row}, {kind}: {told}")
    return found


def rows_of(found: dict[str, dict[str, list[Answer]]], network: str) -> list[Answer]:
    """Makes the table; a figure is the median over the rounds, None where no process came so far."""
    rows: list[Answer] = []
    for name, kinds in found.items():
        for kind, answers in kinds.items():
            if not answers:
                continue
            row: Answer = {"row": name, "caches": kind, "runs": answers}
            for figure in FIGURES:
                values = [answer[figure] for answer in answers if figure in answer]
                row[figure] = statistics.median(values) if values else None
            bar = BARS.get(kind) if name.startswith("flcuda:") and network == "resnet34" else None
            row["bar"] = bar
            row["met"] = None if bar is None or row["first_step_s"] is None else row["first_step_s"] <= bar
            rows.append(row)
    return rows


def run(args: argparse.Namespace, ask: Ask = ask_side) -> Answer:
    chosen = [Row.parse(name) for name in args.mode]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="flcuda-bench-", ignore_cleanup_errors=True) as folder:

        def left() -> float:
            return float(args.total - (time.perf_counter() - begin))

        found = rounds(chosen, args, Path(folder), left=left, ask=ask)
    return {
        "network": args.network,
        "precision": args.precision,
        "batch": args.batch,
        "image": [3, args.size, args.size],
        "device": args.device,
        "trial": args.trial,
        "rounds": args.rounds,
        "rows": rows_of(found, args.network),
        "machine_line": machine_line(machine()),
    }


def show(result: Answer) -> None:
    print(result["machine_line"])
    print(f"{result['network']}, {result['precision']}, batch {result['batch']}: seconds")
    if result["trial"]:
        print("A TRIAL: its figures mean nothing")
    print(f"{'':<28} caches     import    build  first step  process")
    for row in result["rows"]:
        bar = "" if row["met"] is None else f"  (bar {row['bar']:.1f}: {'met' if row['met'] else 'NOT MET'})"
        why = next((f"  {each['why']}" for each in row["runs"] if each["why"]), "")
        print(
            f"{row['row']:<28} {row['caches']:<8} {number(row['import_s'], '8.2f')} {number(row['build_s'], '8.2f')} "
            f"{number(row['first_step_s'], '11.2f')} {number(row['process_s'], '8.2f')}{bar}{why}"
        )
    print(versions(each for row in result["rows"] for each in row["runs"]))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--network", choices=BLOCKS, default="resnet34")
    made.add_argument("--precision", choices=PRECISIONS, default="float16")
    made.add_argument("--batch", type=count, default=128)
    made.add_argument("--mode", nargs="+", default=list(ROWS), help="rows of bench_resnet34.py")
    made.add_argument("--rounds", type=count, default=3)
    made.add_argument("--seconds", type=float, default=90.0, help="for a process")
    made.add_argument("--total", type=float, default=400.0, help="seconds for all")
    made.add_argument("--size", type=count, default=224, help="pixels of an image's side")
    made.add_argument("--classes", type=count, default=1000)
    made.add_argument("--seed", type=int, default=0, help="of the order")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_pythons(made)
    made.add_argument("--trial", action="store_true", help="everything small, on the CPU")
    made.add_argument("--json", action="store_true")
    return made


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    args = parser().parse_args(words)
    args.python = pythons_of(args)
    if args.trial:
        vars(args).update({name: value[0] if isinstance(value, list) else value for name, value in TRIAL.items()})
    return args


def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    try:
        result = run(args)
    except ValueError as error:
        sys.exit(f"bench_first_step: {error}")
    if args.json:
        json.dump(result, sys.stdout, indent=1)
        print()
    else:
        show(result)


if __name__ == "__main__":
    main()
