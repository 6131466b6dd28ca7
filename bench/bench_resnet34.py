"""Images per second of training a ResNet: flcuda beside every mode of PyTorch and JAX, from one command.

A row is SIDE:MODE, with +OPTION as often as wanted; `peers/torch_resnet.py`, `peers/jax_resnet.py` and
`peers/flcuda_resnet.py` say what they are. Without `--mode` they are those of ROWS; `--mode` takes names, or patterns
of those ("torch:*"). max-autotune takes minutes to compile and is a part of its own:

    python bench/bench_resnet34.py --precision float16 --batch 128 --json
    python bench/bench_resnet34.py --precision float16 --mode flcuda:captured torch:max-autotune --seconds 330

All train the same network on the same images and labels, float32 on the device in the layout that the side likes best,
with SGD with momentum and weight decay; float16 with loss scaling, but for JAX's row without "scaler". Each row is a
process of its own, one after another in an order drawn anew for each precision and batch. Times are by the wall clock,
with one wait at the end of each sample of so many steps; `host ms` is what the host needs to issue a step. Images per
second are the batch over the median of the samples. What a row compiled or found serves no other row's first step,
unless `--caches` says where to keep it.

A row that is not done in `--seconds` is ended and reported, with what it had measured if that is five samples or more;
rows for which `--total` leaves no time are named as skipped. Memory is the peak of bytes in use, without the pools'
reserve and without CUDA's own: after the first step, in which PyTorch and flcuda search with large workspaces; JAX
tells only that of all. `+lean` is flcuda with small workspaces.

A row in strict float32 counts only if a convolution of its process had no more error than float32 without TF32 has.
`ratio` is the best flcuda row over the best peer's.

`--show FILE...` prints recorded answers in place of measuring; `--trial` runs everything small on the CPU, to see that
it runs: its figures mean nothing.
"""

import argparse
import fnmatch
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer_process import SIDES, Told, ask_side
from record import machine, machine_line
from steps import BLOCKS, LR, MOMENTUM, WEIGHT_DECAY, Request

from flcuda import device as devices
from flcuda import timing

Answer = dict[str, Any]

PRECISIONS = ("float32", "tf32", "float16", "bfloat16")

MODES = {
    "flcuda": ("captured", "eager"),
    "torch": ("eager", "cuda-graph", "compiled", "compiled-graphs", "max-autotune"),
    "jax": ("jit",),
}
OPTIONS = {
    "flcuda": ("wide", "lean", "deterministic"),
    "torch": ("legacy", "limit0", "nchw", "nhwc"),
    "jax": ("scaler",),
}

COMMON = ("flcuda:captured", "flcuda:captured+lean", "flcuda:eager", "torch:eager", "torch:eager+legacy", "jax:jit")
ROWS = {
    "float32": (*COMMON, "torch:eager+limit0", "torch:cuda-graph+legacy", "torch:compiled", "torch:compiled-graphs"),
    "tf32": (*COMMON, "torch:eager+limit0", "torch:cuda-graph", "torch:compiled", "torch:compiled-graphs"),
    "float16": (
        *COMMON,
        "jax:jit+scaler",
        "torch:eager+limit0",
        "torch:cuda-graph",
        "torch:compiled",
        "torch:compiled-graphs",
    ),
    "bfloat16": (*COMMON, "torch:eager+limit0", "torch:cuda-graph", "torch:compiled", "torch:compiled-graphs"),
}
ASKED_FOR = ("torch:max-autotune",)
"""Rows that patterns find, but that are not run unless asked for."""

BARS = {
    ("resnet34", "float32", 128): 1.25,
    ("resnet34", "tf32", 128): 1.10,
    ("resnet34", "float16", 128): 1.20,
    ("resnet34", "bfloat16", 128): 1.20,
    ("resnet34", "float32", 256): 1.20,
    ("resnet34", "tf32", 256): 1.05,
    ("resnet34", "float16", 256): 1.10,
    ("resnet34", "bfloat16", 256): 1.10,
}
"""Of the ratio."""
MEMORY_BAR = 1.1
FEWEST_IMAGES = {("resnet50", "float16", 256): 4000.0}
"""A second: a bar where there is none of the ratio."""

FEWEST_SAMPLES = 5
FEWEST_STEPS = 20
SHORTEST_S = 12.0
"""A row for which less is left is not begun."""

STRICT_ERROR = 1e-5
"""Of a convolution of normal values, 576 products a sum: float32 has some 1e-6 even by Winograd, TF32 some 3e-4."""


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Row:
    """What is measured.

    Attributes:
        side: of SIDES.
        how: the mode.
        options: of the mode.
    """

    side: str
    how: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "+".join((f"{self.side}:{self.how}", *self.options))

    @classmethod
    def parse(cls, text: str) -> "Row":
        """Reads what `str` gives.

        Raises:
            ValueError: it names no such side, mode or option.
        """
        side, _, rest = text.partition(":")
        if side not in SIDES:
            raise ValueError(f"{text!r}: the side {side!r} is none of {', '.join(SIDES)}")
        how, *options = rest.split("+")
        if how not in MODES[side]:
            raise ValueError(f"{text!r}: the mode {how!r} is none of {', '.join(MODES[side])}")
        for option in options:
            if option not in OPTIONS[side]:
                raise ValueError(f"{text!r}: the option {option!r} is none of {', '.join(OPTIONS[side])}")
        return cls(side, how, tuple(options))


def rows_for(precision: str, asked: Sequence[str]) -> list[Row]:
    """Lists the rows of a precision.

    Args:
        precision: of PRECISIONS.
        asked: names and patterns; none: all of ROWS.

    Raises:
        ValueError: a name is of no row, or a pattern fits none.
    """
    if not asked:
        return [Row.parse(name) for name in ROWS[precision]]
    known = (*ROWS[precision], *ASKED_FOR)
    found: dict[Row, None] = {}
    for text in asked:
        if any(sign in text for sign in "*?["):
            names: Iterable[str] = fnmatch.filter(known, text)
            if not names:
                raise ValueError(f"{text!r} fits none of {', '.join(known)}")
        else:
            names = [text]
        found.update(dict.fromkeys(Row.parse(name) for name in names))
    return list(found)


@dataclass(frozen=True)
class Case:
    """A table: one network, one precision, one batch."""

    network: str
    precision: str
    batch: int

    def __str__(self) -> str:
        return f"{self.network}, {self.precision}, batch {self.batch}"


# --- one row ----------------------------------------------------------------------------------------------------------


def fault_of(case: Case, told: Told) -> str | None:
    """Says why a row does not count; None: it does."""
    values = told.values
    if told.ended == "error" or len(told.samples) < FEWEST_SAMPLES:
        return told.why or f"{len(told.samples)} samples"
    for name in ("first_loss", "last_loss"):
        # A row that was ended has no last loss.
        if name in values and not math.isfinite(values[name]):
            return f"{name} is {values[name]}"
    if case.precision != "float32":
        return None
    error = values.get("probe_error")
    if error is None:
        return told.why or "not shown to be strict float32"
    return None if error < STRICT_ERROR else f"not strict float32: a convolution's relative error is {error:.1e}"


def answer_of(case: Case, row: Row, told: Told, clocks: Sequence[timing.Clocks | None] = ()) -> Answer:
    """Makes the row of the table of what a process told."""
    fault = fault_of(case, told)
    found: Answer = {
        "row": str(row),
        "side": row.side,
        "counts": fault is None,
        "fault": fault,
        "ended": told.ended,
        "why": told.why,
        "wall_s": told.wall_s,
        **{name: value for name, value in told.values.items() if name not in ("done", "stage")},
        "stage": told.values.get("stage", "importing"),
    }
    if told.samples:
        times = [sample["step_s"] for sample in told.samples]
        step_s = statistics.median(times)
        low, high = percentiles(times)
        found.update(
            images_per_s=case.batch / step_s,
            range=[case.batch / high, case.batch / low],
            step_ms=1e3 * step_s,
            step_ms_samples=[1e3 * each for each in times],
            host_ms=1e3 * statistics.median(sample["host_s"] for sample in told.samples),
        )
    known = [each for each in clocks if each is not None]
    if known:
        found["sm_mhz"] = [min(each.sm_mhz for each in known), max(each.sm_mhz for each in known)]
        found["throttled"] = sorted({word for each in known for word in each.throttled})
    return found


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """Gives the 20th and the 80th percentile."""
    if len(values) < 2:
        return values[0], values[0]
    cuts = statistics.quantiles(values, n=5, method="inclusive")
    return cuts[0], cuts[-1]


Ask = Callable[..., Told]


def measured(
    case: Case,
    row: Row,
    args: argparse.Namespace,
    *,
    limit_s: float,
    caches: Path,
    ask: Ask = ask_side,
    clocks: Callable[[], timing.Clocks | None] = lambda: None,
) -> Answer:
    request = Request(
        case.network,
        case.precision,
        case.batch,
        row.how,
        row.options,
        device=args.device,
        size=args.size,
        classes=args.classes,
        warmup=args.warmup,
        samples=args.samples,
        steps=args.steps,
    )
    seen: list[timing.Clocks | None] = []

    def on_line(line: Answer) -> None:
        if "sample" in line:
            seen.append(clocks())

    told = ask(row.side, request, pythons=args.python, limit_s=limit_s, caches=caches, on_line=on_line)
    return answer_of(case, row, told, seen)


# --- all rows ---------------------------------------------------------------------------------------------------------


def best(rows: Iterable[Answer]) -> Answer | None:
    counting = [row for row in rows if row["counts"]]
    return max(counting, key=lambda row: row["images_per_s"], default=None)


def leanest(rows: Iterable[Answer]) -> Answer | None:
    known = [row for row in rows if row["counts"] and row.get("memory", {}).get("allocated_peak")]
    return min(known, key=lambda row: row["memory"]["allocated_peak"], default=None)


def summary(case: Case, rows: Sequence[Answer]) -> Answer:
    """Compares the best and the leanest rows; a ratio is None where one side has none that counts."""
    ours = [row for row in rows if row["side"] == "flcuda"]
    theirs = [row for row in rows if row["side"] != "flcuda"]
    fast, peer = best(ours), best(theirs)
    lean, lean_peer = leanest(ours), leanest(theirs)
    key = (case.network, case.precision, case.batch)
    bar, fewest = BARS.get(key), FEWEST_IMAGES.get(key)
    ratio = fast["images_per_s"] / peer["images_per_s"] if fast and peer else None
    memory = None
    if lean and lean_peer:
        memory = lean["memory"]["allocated_peak"] / lean_peer["memory"]["allocated_peak"]
    return {
        "best": fast and fast["row"],
        "best_peer": peer and peer["row"],
        "ratio": ratio,
        "bar": bar,
        "met": None if ratio is None or bar is None else ratio >= bar,
        "fewest_images": fewest,
        "fewest_images_met": None if fewest is None or fast is None else fast["images_per_s"] >= fewest,
        "leanest": lean and lean["row"],
        "leanest_peer": lean_peer and lean_peer["row"],
        "memory_ratio": memory,
        "memory_bar": MEMORY_BAR,
        "memory_met": None if memory is None else memory <= MEMORY_BAR,
    }


def table(
    case: Case,
    rows: Sequence[Row],
    run: Callable[[Case, Row, float], Answer],
    *,
    seconds: float,
    left: Callable[[], float],
    generator: random.Random,
) -> Answer:
    """Measures the rows of a case in a random order, as long as there is time.

    Args:
        case: what all train.
        rows: of the case.
        run: measures a row in so many seconds.
        seconds: for each row.
        left: seconds for all that is still to come.
        generator: draws the order.
    """
    order = list(rows)
    generator.shuffle(order)
    answers: list[Answer] = []
    for row in order:
        limit = min(seconds, left())
        if limit < min(seconds, SHORTEST_S):
            why = "no time was left"
            answers.append({"row": str(row), "side": row.side, "counts": False, "fault": why, "ended": "skipped"})
        else:
            answers.append(run(case, row, limit))
        note(f"{case}: {line_of(answers[-1])}")
    return {
        "network": case.network,
        "precision": case.precision,
        "batch": case.batch,
        "rows": answers,
        **summary(case, answers),
    }


def gpu_clocks(device: str) -> Callable[[], timing.Clocks | None]:
    """Gives what asks for the clocks; this process has no other business on the GPU."""
    if device == "cpu":
        return lambda: None
    place = devices.resolve(device)
    return lambda: timing.clocks(place)


def run(args: argparse.Namespace) -> Answer:
    cases = [Case(*each) for each in itertools.product(args.network, args.precision, args.batch)]
    # Before anything is run, so that a wrong name costs no time.
    rows = {case: rows_for(case.precision, args.mode) for case in cases}
    begin = time.perf_counter()
    clocks = gpu_clocks(args.device)

    def left() -> float:
        return float(args.total - (time.perf_counter() - begin))

    with tempfile.TemporaryDirectory(prefix="flcuda-bench-", ignore_cleanup_errors=True) as folder:

        def one(case: Case, row: Row, limit_s: float) -> Answer:
            caches = args.caches or Path(tempfile.mkdtemp(dir=folder))
            return measured(case, row, args, limit_s=limit_s, caches=caches, clocks=clocks)

        generator = random.Random(args.seed)
        tables = [table(case, rows[case], one, seconds=args.seconds, left=left, generator=generator) for case in cases]
    found = machine()
    return {
        "image": [3, args.size, args.size],
        "classes": args.classes,
        "optimizer": {"name": "SGD", "lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY},
        "warmup": args.warmup,
        "steps": args.steps,
        "samples": args.samples,
        "seconds": args.seconds,
        "total": args.total,
        "order_seed": args.seed,
        "device": args.device,
        "trial": args.trial,
        "caches_kept": args.caches is not None,
        "tables": tables,
        "wall_s": time.perf_counter() - begin,
        "machine_line": machine_line(found),
    }


# --- print ------------------------------------------------------------------------------------------------------------


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def mebibytes(row: Mapping[str, Any]) -> str:
    peak = row.get("memory", {}).get("allocated_peak")
    return "-" if peak is None else f"{peak / 2**20:.0f}"


def line_of(row: Answer) -> str:
    figures = ""
    if "images_per_s" in row:
        low, high = row["range"]
        figures = (
            f"{row['images_per_s']:9.1f}  {low:9.1f} - {high:9.1f}  {row['step_ms']:9.3f}  {row['host_ms']:9.3f}  "
            f"{number(row.get('first_step_s'), '.1f'):>7}  {mebibytes(row):>8}"
        )
    fault = "" if row["counts"] else f"  DOES NOT COUNT: {row['fault']}"
    return f"{row['row']:<28}{figures}{fault}"


def versions(rows: Iterable[Answer]) -> str:
    """Names the libraries of all rows, once each."""
    found: dict[str, None] = {}
    for row in rows:
        settings = row.get("settings", {})
        words = [
            f"{name} {settings[name]}" for name in ("flcuda", "torch", "jax", "flax", "cupy") if settings.get(name)
        ]
        if settings.get("cudnn"):
            words.append(f"cuDNN {settings['cudnn']}")
        found[", ".join(words)] = None
    return "; ".join(text for text in found if text)


def show_table(found: Answer) -> None:
    print(f"\n{found['network']}, {found['precision']}, batch {found['batch']}")
    print(f"{'':<28} images/s       20 % - 80 %            step ms    host ms  first s       MiB")
    for row in sorted(found["rows"], key=lambda row: -row.get("images_per_s", 0.0)):
        print(line_of(row))
    print(versions(found["rows"]))
    if found["ratio"] is not None:
        bar = "" if found["bar"] is None else f" (bar {found['bar']:.2f}: {'met' if found['met'] else 'NOT MET'})"
        print(f"{found['best']} / {found['best_peer']}: {found['ratio']:.3f}{bar}")
    if found["fewest_images_met"] is not None:
        print(f"at least {found['fewest_images']:.0f} images/s: {'met' if found['fewest_images_met'] else 'NOT MET'}")
    if found["memory_ratio"] is not None:
        met = "met" if found["memory_met"] else "NOT MET"
        print(
            f"memory, {found['leanest']} / {found['leanest_peer']}: {found['memory_ratio']:.3f} "
            f"(bar {found['memory_bar']:.1f}: {met})"
        )


def show(result: Answer) -> None:
    print(result["machine_line"])
    shape = "x".join(map(str, result["image"]))
    print(f"images {shape} on the device, {result['samples']} samples of {result['steps']} steps, by the wall clock")
    if result["trial"]:
        print("A TRIAL: its figures mean nothing")
    for each in result["tables"]:
        show_table(each)


def recorded(path: Path) -> Answer:
    """Reads an answer that `record.py` wrote; ValueError when the file has none of this benchmark's."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--show {path}: {error}") from error
    result = found.get("result") if isinstance(found, dict) else None
    if not isinstance(result, dict) or "samples" not in result or "tables" not in result:
        raise ValueError(f"--show {path}: has no tables of this benchmark")
    return result


# --- the command ------------------------------------------------------------------------------------------------------


def count(text: str, least: int = 1) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is less than {least}")
    return value


TRIAL = {"network": ["resnet10"], "batch": [8], "size": 64, "classes": 10, "device": "cpu", "warmup": 2}


def add_pythons(made: argparse.ArgumentParser) -> None:
    """Adds `--torch-python` and `--jax-python`, for libraries that live in environments of their own."""
    for side in SIDES[1:]:
        made.add_argument(f"--{side}-python", default=sys.executable, help=f"the Python that has {side}")


def pythons_of(args: argparse.Namespace) -> dict[str, str]:
    return {side: getattr(args, f"{side}_python") for side in SIDES[1:]}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--network", nargs="+", choices=BLOCKS, default=["resnet34"])
    made.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["float16"])
    made.add_argument("--batch", nargs="+", type=count, default=[128])
    made.add_argument(
        "--mode", nargs="+", default=[], help="rows, or patterns of rows; by default all but max-autotune"
    )
    made.add_argument("--seconds", type=float, default=100.0, help="for a row, from its process's start")
    made.add_argument("--total", type=float, default=450.0, help="seconds for all rows")
    made.add_argument("--size", type=count, default=224, help="pixels of an image's side")
    made.add_argument("--classes", type=count, default=1000)
    made.add_argument("--warmup", type=lambda text: count(text, 10), default=15, help="steps; at least 10")
    made.add_argument(
        "--steps", type=lambda text: count(text, FEWEST_STEPS), default=30, help="of a sample; at least 20"
    )
    made.add_argument("--samples", type=lambda text: count(text, FEWEST_SAMPLES), default=7, help="at least 5")
    made.add_argument("--caches", type=Path, help="folder in which the libraries keep what they compiled and found")
    made.add_argument("--seed", type=int, default=None, help="of the order of the rows; by default by the clock")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_pythons(made)
    made.add_argument("--trial", action="store_true", help="everything small, on the CPU")
    made.add_argument("--show", nargs="+", type=Path, metavar="FILE", help="print recorded answers")
    made.add_argument("--json", action="store_true")
    return made


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    args = parser().parse_args(words)
    args.python = pythons_of(args)
    if args.seed is None:
        args.seed = time.time_ns() % 1_000_000
    if args.trial:
        vars(args).update(TRIAL, steps=2, samples=FEWEST_SAMPLES)
    return args


def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    try:
        if args.show:
            for path, result in [(path, recorded(path)) for path in args.show]:
                print(f"{path.name}: ", end="")
                show(result)
                print()
            return
        result = run(args)
    except ValueError as error:
        sys.exit(f"bench_resnet34: {error}")
    if args.json:
        json.dump(result, sys.stdout, indent=1)
        print()
    else:
        show(result)


if __name__ == "__main__":
    main()
