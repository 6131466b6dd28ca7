"""Host time of many forms of a call, in rounds: what the benchmarks of the host share."""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from record import machine

from flcuda import device as devices

Round = Callable[[int], None]
"""Makes so many calls of one form."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """Makes the parser of such a benchmark."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=100)
    made.add_argument("--calls", type=int, default=200)
    made.add_argument("--json", action="store_true")
    return made


def measure(forms: dict[str, Round], rounds: int, calls: int, wait: Callable[[], object]) -> dict[str, list[float]]:
    """Times each form in rounds, in a random order, waiting for the device between them; microseconds a call."""
    samples: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(2):
        for run in forms.values():
            run(calls)
            wait()
    order = [name for name in forms for _ in range(rounds)]
    random.Random(1).shuffle(order)
    for name in order:
        run = forms[name]
        run(5)
        wait()
        start = time.perf_counter()
        run(calls)
        samples[name].append((time.perf_counter() - start) / calls * 1e6)
        wait()
    return samples


def show(
    forms: dict[str, Round], args: argparse.Namespace, wait: Callable[[], object], about: dict[str, Any], width: int
) -> None:
    """Times the forms and prints them, each in a line whose name has so many columns.

    Args:
        forms: by name.
        args: of `parser`.
        wait: waits for the device.
        about: what was measured; in print, texts of it come first and its "notes" last.
        width: columns.
    """
    samples = measure(forms, args.rounds, args.calls, wait)
    rows = [
        {"form": name, "median_us": statistics.median(times), "quartiles_us": statistics.quantiles(times, n=4)[::2]}
        for name, times in samples.items()
    ]
    notes = about.pop("notes")
    if args.json:
        result = {**about, "rounds": args.rounds, "calls": args.calls, "notes": notes, "rows": rows}
        json.dump(result, sys.stdout, indent=1)
        print()
        return
    where = machine()
    gpus = ", ".join(str(gpu["name"]) for gpu in where["gpus"] or [])
    processor = devices.device_model(devices.CPU)["name"]
    for text in about.values():
        if isinstance(text, str):
            print(text)
    print(f"{gpus}; {processor}; Python {where['python']}, CuPy {where['cupy']}, cuDNN {where['cudnn']}")
    for row in rows:
        low, high = row["quartiles_us"]
        print(f"{row['form']:<{width}} {row['median_us']:8.2f} us   ({low:.2f} to {high:.2f})")
    for note in notes:
        print(note)
