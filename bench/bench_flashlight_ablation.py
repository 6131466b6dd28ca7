"""What flashlight's pull request 631 changed, one part after the other: images per second of training ResNet-34.

    (a)  the heuristic's algorithms; gradients unscaled and looked at one tensor at a time, each with a read by the host
    (b)  the algorithms that the finder found, the rest as (a)
    (c)  as (b), but one check on the device, and the update unscales or skips: DynamicScaler.step
    (r)  as (c), but the host learns the outcome, as flashlight's adjustScaleFactor() returns it: scale, unscale,
         adjust_scale_factor and step; what it costs beside (c) is what returning False costs

All train the same model on the same synthetic images, which are on the device, with SGD with momentum and weight
decay. They take turns. Wall clock: so many steps between two waits for the device, median over the repeats. Events: one
step at a time by flcuda.timing, with all of it queued before it begins where the host does not wait within it
(`queued`). The search for algorithms and every kernel's first load come before; their seconds are `first_step_s`.

The original's figures are of one V100 with 16 GB at batch 128 in float32: 1143 images/s before, and 1371, 1.20 times as
many, with cudnnFind and the check on the device.

Run: python bench/bench_flashlight_ablation.py [--json]
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from networks import CLASSES, NETWORKS, network
from record import machine, machine_line

import flcuda
from flcuda import device as devices
from flcuda import functional as F
from flcuda import nn, timing
from flcuda.amp import DynamicScaler
from flcuda.autograd import Tensor
from flcuda.device import Device
from flcuda.optim import SGD

Answer = dict[str, Any]

ORIGINAL: Answer = {
    "of": "flashlight#631: ResNet-34, batch 128, float32, one V100 16 GB",
    "images_per_s": {"a": 1143.0, "c": 1371.0},
    "ratios": {"a": 1.0, "c": 1.20},
    "ratio": 1.20,
}

VARIANTS = {
    "a": "heuristic, a host check per tensor",
    "b": "+ find",
    "c": "+ device check",
    "r": "(c) that returns False to the host",
}

LR = 1e-3
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4

BUDGET_S = 120.0
"""For the events of each variant: more than enough, since the repeats are what is asked for."""


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class HostScaler:
    """Loss scaling as it was before the change: a division, a test and a read by the host for each parameter.

    The rule itself is the one of DynamicScaler, so that all variants train alike.
    """

    def __init__(self, scale: float = 65536.0, min_scale: float = 1e-4, growth_interval: int = 2000) -> None:
        self.scale = self.max_scale = scale
        self.min_scale = min_scale
        self.growth_interval = growth_interval
        self.good_steps = 0
        self.skipped_steps = 0

    def step(self, model: nn.Module, optimizer: SGD, loss: Tensor) -> bool:
        """Does all of a step after the forward; gradients are forgotten afterwards.

        Returns:
            Whether the gradients were valid.
        """
        xp = optimizer.device.xp
        F.scale(loss, self.scale).backward()
        valid = True
        for _, parameter in model.named_parameters():
            grad = parameter.grad
            if grad is None:
                continue
            xp.multiply(grad, 1.0 / self.scale, out=grad, casting="same_kind")
            if not bool(xp.isfinite(grad).all()):
                valid = False
                break
        if valid:
            optimizer.step()
            self.good_steps += 1
            if self.good_steps >= self.growth_interval:
                self.good_steps = 0
                self.scale = min(2 * self.scale, self.max_scale)
        else:
            model.discard_statistics()
            self.good_steps = 0
            self.skipped_steps += 1
            if self.scale / 2 >= self.min_scale:
                self.scale /= 2
        optimizer.zero_grad()
        return valid


class Training:
    """A model, a batch on the device, and the step of each variant.

    Args:
        model: its optimizer is made here.
        images: float32, (N, C, H, W), on the model's device.
        labels: int64, (N,), there too.
        effort: of the finder.
    """

    def __init__(self, model: nn.Module, images: Any, labels: Any, effort: str = "fast") -> None:
        self.model = model
        self.optimizer = SGD(model, LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
        self.images = Tensor(images)
        self.labels = labels
        self.effort = effort
        self.host_scaler = HostScaler()
        self.scaler = DynamicScaler()
        self.loss: Tensor | None = None

    def forward(self) -> Tensor:
        self.loss = F.cross_entropy(self.model(self.images), self.labels)
        return self.loss

    def host_check(self) -> None:
        self.host_scaler.step(self.model, self.optimizer, self.forward())

    def device_check(self) -> None:
        self.scaler.step(self.optimizer, self.forward())

    def returning(self) -> None:
        self.scaler.scale(self.forward()).backward()
        self.scaler.unscale(self.optimizer)
        if self.scaler.adjust_scale_factor():
            self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self) -> dict[str, Callable[[], None]]:
        """Gives the step of each variant, which brings its policy with it."""

        def under(step: Callable[[], None], mode: str) -> Callable[[], None]:
            def run() -> None:
                with flcuda.policy(mode=mode, effort=self.effort):
                    step()

            return run

        return {
            "a": under(self.host_check, "heuristic"),
            "b": under(self.host_check, "find"),
            "c": under(self.device_check, "find"),
            "r": under(self.returning, "find"),
        }

    def skipped(self) -> int:
        """Says how many steps changed nothing, which makes a measurement worthless."""
        return self.host_scaler.skipped_steps + int(self.scaler.state_dict()["skipped_steps"])

    def last_loss(self) -> float:
        assert self.loss is not None
        return float(self.loss.data)


def wall(
    steps: dict[str, Callable[[], None]],
    wait: Callable[[], None],
    *,
    count: int,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Times rounds of so many steps of each; gives the seconds a step of each round.

    Each round begins with another one, so that none has always the same before it.
    """
    names = list(steps)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            wait()
            start = clock()
            for _ in range(count):
                steps[name]()
            wait()
            found[name].append((clock() - start) / count)
    return found


def rows_of(
    batch: int, seconds: dict[str, list[float]], events: dict[str, timing.Timing], first_s: dict[str, float]
) -> list[Answer]:
    """Makes the table: images per second by both clocks, and their ratios to (a)."""
    rows: list[Answer] = []
    for name, samples in seconds.items():
        step_s = statistics.median(samples)
        of_device = events[name]
        rows.append(
            {
                "variant": name,
                "what": VARIANTS[name],
                "images_per_s": batch / step_s,
                "range": [batch / max(samples), batch / min(samples)],
                "step_ms": 1e3 * step_s,
                "step_ms_samples": [1e3 * each for each in samples],
                "images_per_s_by_events": 1e3 * batch / of_device.median_ms,
                "events_ms": of_device.median_ms,
                "events_ms_range": [of_device.low_ms, of_device.high_ms],
                "events_samples": of_device.samples,
                "queued": of_device.queued,
                "host_ms": of_device.host_us / 1e3,
                "first_step_s": first_s[name],
            }
        )
    first = next(row for row in rows if row["variant"] == "a")
    for row in rows:
        row["ratio"] = row["images_per_s"] / first["images_per_s"]
        row["ratio_by_events"] = row["images_per_s_by_events"] / first["images_per_s_by_events"]
    return rows


def ablation(
    training: Training, device: Device, *, batch: int, steps: int, warmup: int, repeats: int
) -> tuple[list[Answer], Answer | None]:
    """Measures every variant; gives the rows, and the clocks at the end."""
    # (a) comes first and its plans stay: a heuristic that comes after a search takes what that found.
    runs = training.steps()
    first_s = {}
    for name, run in runs.items():
        start = time.perf_counter()
        run()
        devices.synchronize(device)
        first_s[name] = time.perf_counter() - start
        note(f"({name}) {VARIANTS[name]}: the first step took {first_s[name]:.1f} s")
        for _ in range(warmup):
            run()
    seconds = wall(runs, lambda: devices.synchronize(device), count=steps, repeats=repeats)
    # One step a sample: of more than a thousand launches the stream takes no more, and the host would wait.
    timed = timing.in_turn([[run] for run in runs.values()], device, repeats=repeats, launches=1, budget_s=BUDGET_S)
    now = timing.clocks(device)
    rows = rows_of(batch, seconds, dict(zip(runs, timed, strict=True)), first_s)
    return rows, None if now is None else dataclasses.asdict(now)


def synthetic(batch: int, size: int, classes: int, device: Device) -> tuple[Any, Any]:
    """Makes standard normal images, and labels, on the device."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((batch, 3, size, size), np.float32)
    labels = rng.integers(0, classes, batch)
    return device.xp.asarray(images), device.xp.asarray(labels)


def run(args: argparse.Namespace) -> Answer:
    device = devices.resolve(args.device)
    with device.use():
        model = network(args.network, precision=args.precision, device=device)
        batch_of = synthetic(args.batch, args.size, CLASSES[args.network], device)
        training = Training(model, *batch_of, effort=args.effort)
        rows, clocks = ablation(
            training, device, batch=args.batch, steps=args.steps, warmup=args.warmup, repeats=args.repeats
        )
        by_name = {row["variant"]: row for row in rows}
        found = machine()
        return {
            "network": args.network,
            "precision": args.precision,
            "batch": args.batch,
            "image": [3, args.size, args.size],
            "optimizer": {"name": "SGD", "lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY},
            "effort": args.effort,
            "steps": args.steps,
            "repeats": args.repeats,
            "rows": rows,
            "ratio": by_name["c"]["ratio"],
            "ratio_by_events": by_name["c"]["ratio_by_events"],
            "ratio_of_find": by_name["b"]["ratio"],
            "ratio_of_the_check": by_name["c"]["images_per_s"] / by_name["b"]["images_per_s"],
            "cost_of_returning_false": {
                "images_per_s": by_name["c"]["images_per_s"] - by_name["r"]["images_per_s"],
                "step_ms": by_name["r"]["step_ms"] - by_name["c"]["step_ms"],
            },
            "original": ORIGINAL,
            "skipped_steps": training.skipped(),
            "last_loss": training.last_loss(),
            "clocks": clocks,
            "machine_line": machine_line(found),
        }


def show(result: Answer) -> None:
    print(result["machine_line"])
    shape = "x".join(map(str, result["image"]))
    print(f"{result['network']}, {result['precision']}, batch {result['batch']}, images {shape}, on the device")
    print(f"{'':<44} images/s   ratio  original   by events   ratio    host ms")
    for row in result["rows"]:
        original = result["original"]["ratios"].get(row["variant"])
        theirs = "" if original is None else f"{original:.2f}"
        print(
            f"({row['variant']}) {row['what']:<40} {row['images_per_s']:8.1f}  {row['ratio']:6.3f}  "
            f"{theirs:>8}   {row['images_per_s_by_events']:9.1f}  {row['ratio_by_events']:6.3f}  {row['host_ms']:9.2f}"
            f"{'' if row['queued'] else '  (the host waits within)'}"
        )
    before, after = ORIGINAL["images_per_s"].values()
    print(f"(c) to (a): {result['ratio']:.3f}; the original: {before:.0f} to {after:.0f}, {ORIGINAL['ratio']:.2f}")
    print(f"its conditions: {ORIGINAL['of']}")
    cost = result["cost_of_returning_false"]
    print(f"returning False costs {cost['images_per_s']:.1f} images/s, {cost['step_ms']:.3f} ms a step")
    if result["skipped_steps"] or not math.isfinite(result["last_loss"]):
        print(f"NOT VALID: {result['skipped_steps']} steps were skipped, the last loss is {result['last_loss']}")


def count(text: str, least: int = 1) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is less than {least}")
    return value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--network", choices=NETWORKS, default="resnet34")
    # (a) unscales in place, where gradients of 16 bits would underflow
    made.add_argument("--precision", choices=("float32", "tf32"), default="float32")
    made.add_argument("--batch", type=count, default=128)
    made.add_argument("--size", type=count, default=224, help="pixels of an image's side")
    made.add_argument("--steps", type=count, default=10, help="between two waits for the device")
    made.add_argument("--warmup", type=lambda text: count(text, 0), default=5, help="steps after each one's first")
    made.add_argument("--repeats", type=lambda text: count(text, 5), default=7, help="at least 5")
    made.add_argument("--effort", choices=("fast", "wide"), default="fast", help="of the finder")
    made.add_argument("--device", default="cuda")
    made.add_argument("--json", action="store_true")
    return made


def main(words: Sequence[str] | None = None) -> None:
    args = parser().parse_args(words)
    with tempfile.TemporaryDirectory(prefix="flcuda-bench-") as folder:
        # What is found here must not become anybody's stored choice, and nothing that is stored must be taken.
        os.environ["FLCUDA_CHOICES"] = folder
        result = run(args)
    if args.json:
        json.dump(result, sys.stdout, indent=1)
        print()
    else:
        show(result)


if __name__ == "__main__":
    main()
