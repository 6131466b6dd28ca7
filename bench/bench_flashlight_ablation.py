"""What flashlight's pull request 631 changed, one part after the other: images per second of training ResNet-34.

    (a)  the heuristic's algorithms; gradients unscaled and looked at one tensor at a time, each with a read by the host
    (b)  the algorithms that the finder found, the rest as (a)
    (c)  as (b), but one check on the device, and the update unscales or skips: DynamicScaler.step
    (r)  as (c), but the host learns the outcome, as flashlight's adjustScaleFactor() returns it: scale, unscale,
         adjust_scale_factor and step; what it costs beside (c) is what returning False costs

These train the same model on the same synthetic images, which are on the device, with SGD with momentum and weight
decay. They take turns. Wall clock: so many steps between two waits for the device, median over the repeats. Events: one
step at a time by flcuda.timing, with all of it queued before it begins where the host does not wait within it
(`queued`). The search for algorithms and every kernel's first load come before; their seconds are `first_step_s`.

With --photos, the change's third part as well: the training of (c), but each step's images come from JPEG files:

    (d0) a synchronous loader: the step's own thread reads, decodes, transforms and copies on the step's stream, and
         waits until the batch is there
    (dp) threads do all of that ahead on streams of their own; the step's thread copies the batch and waits for it
    (d1) as (dp), but the transforms come after the prefetch, on the step's thread and stream; it waits for them
    (d2) `Sample`: decoded ahead into a ring of slots, the step's stream waits by events, the host never

Who decodes and what changes an image are the same in all of them, so that only when it happens differs. (c) takes turns
with them, and all begin each round with steps that are not timed, so that none lives on what was loaded before. The
photographs are cut from pictures of Debian packages and repeated, see photographs.py.

The original's figures are of one V100 with 16 GB at batch 128 in float32: 1143 images/s before, and 1371, 1.20 times as
many, with cudnnFind and the check on the device; 1507, 1.10 times as many again, with `Sample` and the transforms moved
after the prefetch.

Run: python bench/bench_flashlight_ablation.py [--photos .data/photos [--only loaders]] [--json]
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import photographs
from networks import CLASSES, NETWORKS, network
from record import machine, machine_line

import flcuda
from flcuda import device as devices
from flcuda import functional as F
from flcuda import nn, timing
from flcuda.amp import DynamicScaler
from flcuda.autograd import Tensor
from flcuda.data import Augment, BatchDataset, Decoder, Draws, ImageBatch, ImageFiles, PrefetchDataset
from flcuda.data.folder import PHOTOGRAPH_MEAN, PHOTOGRAPH_STD
from flcuda.device import CPU, Device
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

LOADER_VARIANTS = {
    "c": "images on the device",
    "d0": "a synchronous loader",
    "dp": "prefetched and transformed by threads",
    "d1": "transforms after the prefetch",
    "d2": "Sample",
}

ORIGINAL_LOADER: Answer = {
    "of": ORIGINAL["of"],
    "images_per_s": {"d0": 1371.0, "d2": 1507.0},
    "ratios": {"d0": 1.0, "d2": 1.10},
    "ratio": 1.10,
}

LR = 1e-3
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4

LOADED_S = 60.0
"""A batch that takes longer than this will not come."""

BATCHES = 1 << 14
"""An epoch of the loaders has so many: it does not end while they are measured."""

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

    def device_check_on(self, images: Any, labels: Any) -> None:
        """Does the step of (c) on another batch."""
        self.loss = F.cross_entropy(self.model(Tensor(images)), labels)
        self.scaler.step(self.optimizer, self.loss)

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
    lead: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Times rounds of so many steps of each; gives the seconds a step of each round.

    Each round begins with another one, so that none has always the same before it. Before its steps are timed each does
    `lead` more: what was loaded ahead while others had their turn is used up, and the others' threads come to rest.
    """
    names = list(steps)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            for _ in range(lead):
                steps[name]()
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


@contextlib.contextmanager
def watchdog(limit_s: float) -> Iterator[None]:
    """Ends the process, and says where each thread is, when what is inside takes longer; 0 for no limit."""
    if limit_s:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        if limit_s:
            faulthandler.cancel_dump_traceback_later()


def wait_for_stream(device: Device) -> None:
    """Waits for the current stream alone: not for what loaders still do on theirs."""
    if device.kind == "cuda":
        devices.cupy().cuda.get_current_stream().synchronize()


class Ahead:
    """Loads the steps 0, 1, 2, ... ahead in threads: a prefetch of the simplest kind.

    Args:
        load: called with a step, on any of the threads.
        workers: threads.
        ahead: steps under way or done that were not taken.
    """

    def __init__(self, load: Callable[[int], Any], workers: int, ahead: int) -> None:
        self._load = load
        self._steps = itertools.count()
        self._pool = ThreadPoolExecutor(workers, "loader")
        self._queue: deque[Future[Any]] = deque()
        for _ in range(ahead):
            self._submit()

    def _submit(self) -> None:
        self._queue.append(self._pool.submit(self._load, next(self._steps)))

    def take(self) -> Any:
        self._submit()
        return self._queue.popleft().result(timeout=LOADED_S)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._queue.clear()


class Loading:
    """The steps of each loader of photographs; a context, which ends the loading.

    Args:
        training: whose step (c) is done.
        files: photographs.
        labels: int64 (N,).
        device: the training's.
        batch: images a step.
        size: pixels of an image's side in the network.
        workers: threads of the loaders that have some.
        depth: slots of the ring; the others' threads are as many steps ahead.
        on_host: Pillow decodes, and the pixels are copied to the device; else nvImageCodec does, where it is.
    """

    def __init__(
        self,
        training: Training,
        files: Sequence[Path],
        labels: Any,
        device: Device,
        *,
        batch: int,
        size: int,
        workers: int,
        depth: int,
        on_host: bool = False,
    ) -> None:
        self.training = training
        self.device = device
        self.workers = workers
        self.depth = depth
        place = CPU if on_host else device
        # One batch at a time has all cores; of several at a time each has a thread, and nvImageCodec its own.
        self.alone = Decoder(place, threads=len(os.sched_getaffinity(0)))
        self.decoder = Decoder(place)
        low = round(size * 8 / 7)
        self.augment = Augment(
            size, "resize-then-crop", sides=(low, low + size), mean=PHOTOGRAPH_MEAN, std=PHOTOGRAPH_STD
        )
        total = batch * BATCHES
        self.batches_alone = BatchDataset(photographs.repeated(ImageFiles(files, labels, self.alone), total), batch)
        self.batches = BatchDataset(photographs.repeated(ImageFiles(files, labels, self.decoder), total), batch)
        self._local = threading.local()
        self._alone_step = itertools.count()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Loading":
        with contextlib.ExitStack() as stack:
            stack.callback(self.alone.close)
            stack.callback(self.decoder.close)
            self._transformed = Ahead(self._load_transformed, self.workers, self.workers + self.depth)
            stack.callback(self._transformed.close)
            self._plain = Ahead(self._load_plain, self.workers, self.workers + self.depth)
            stack.callback(self._plain.close)
            loader = PrefetchDataset(
                self.batches, self.device, depth=self.depth, workers=self.workers, transforms=(self.augment,)
            )
            self._samples = stack.enter_context(photographs.Endless(loader))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._stack.__exit__(kind, error, traceback)  # type: ignore[arg-type]

    def steps(self) -> dict[str, Callable[[], None]]:
        """Gives the step of each variant."""

        def under(step: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                with flcuda.policy(mode="find", effort=self.training.effort):
                    step()

            return run

        return {
            "c": under(self.training.device_check),
            "d0": under(self._synchronous),
            "dp": under(self._prefetched_and_transformed),
            "d1": under(self._transformed_after),
            "d2": under(self._with_sample),
        }

    def _synchronous(self) -> None:
        step = next(self._alone_step) % BATCHES
        images, labels = self.batches_alone.sample(step, 0)
        self._train(self._changed(images, self.batches_alone.draws(step, 0)), labels)

    def _prefetched_and_transformed(self) -> None:
        images, labels = self._transformed.take()
        # A copy on this stream: the original is memory of another's, free to be used again when it is let go of.
        self._train(images.copy(), labels)

    def _transformed_after(self) -> None:
        images, labels, draws = self._plain.take()
        # Waits, and only then lets go of the images.
        self._train(self._changed(images, draws), labels)

    def _with_sample(self) -> None:
        images, labels = self._samples.take().arrays()
        self.training.device_check_on(images, labels)

    def _train(self, images: Any, labels: Any) -> None:
        labels = self.device.xp.asarray(labels)
        wait_for_stream(self.device)
        self.training.device_check_on(images, labels)

    def _changed(self, images: ImageBatch, draws: Draws) -> Any:
        if self.device != CPU and not devices.is_cuda(images.pixels):
            pixels = self.device.xp.asarray(images.pixels)
            images = ImageBatch(pixels, images.offsets, images.sizes, images.channels)
        return self.augment(images, draws)

    def _load_plain(self, step: int) -> tuple[ImageBatch, Any, Draws]:
        with self._own_stream():
            images, labels = self.batches.sample(step % BATCHES, 0)
            wait_for_stream(self.device)
        return images, labels, self.batches.draws(step % BATCHES, 0)

    def _load_transformed(self, step: int) -> tuple[Any, Any]:
        with self._own_stream():
            images, labels = self.batches.sample(step % BATCHES, 0)
            changed = self._changed(images, self.batches.draws(step % BATCHES, 0))
            wait_for_stream(self.device)
        return changed, labels

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Makes the device and this thread's own stream current."""
        if self.device == CPU:
            yield
            return
        with self.device.use():
            if not hasattr(self._local, "stream"):
                self._local.stream = devices.cupy().cuda.Stream(non_blocking=True)
            with self._local.stream:
                yield


def loader_rows(batch: int, seconds: dict[str, list[float]]) -> list[Answer]:
    """Makes the table of the loaders: images per second, and ratios to (d0) and (c), medians over the rounds."""

    def ratio(of: list[float], to: list[float]) -> float:
        return statistics.median(to_s / of_s for of_s, to_s in zip(of, to, strict=True))

    return [
        {
            "variant": name,
            "what": LOADER_VARIANTS[name],
            "images_per_s": batch / statistics.median(samples),
            "range": [batch / max(samples), batch / min(samples)],
            "step_ms": 1e3 * statistics.median(samples),
            "step_ms_samples": [1e3 * each for each in samples],
            "ratio_to_d0": ratio(samples, seconds["d0"]),
            "ratio_to_c": ratio(samples, seconds["c"]),
        }
        for name, samples in seconds.items()
    ]


def loaders(training: Training, device: Device, args: argparse.Namespace) -> Answer:
    """Measures the loaders."""
    files, labels = photographs.listed(args.photos, args.kib)
    loading = Loading(
        training,
        files,
        labels % CLASSES[args.network],
        device,
        batch=args.batch,
        size=args.size,
        workers=args.workers,
        depth=args.depth,
        on_host=args.decoder == "pillow",
    )
    # A batch in each thread, and two for each slot: one sent, one to be sent.
    lead = args.workers + 2 * args.depth + 2
    with loading:
        steps = loading.steps()
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            wait_for_stream(device)
            note(f"({name}) {LOADER_VARIANTS[name]}: the first step took {time.perf_counter() - start:.1f} s")
        seconds = wall(steps, lambda: wait_for_stream(device), count=args.steps, repeats=args.repeats, lead=lead)
        rows = loader_rows(args.batch, seconds)
        for row in rows:
            note(loader_line(row))
        description = loading.decoder.description
    by_name = {row["variant"]: row for row in rows}
    return {
        "photographs": {
            "source": photographs.SOURCE,
            "distinct": len(files),
            "repeated": True,
            "mean_kib": sum(file.stat().st_size for file in files) / len(files) / 1024,
        },
        "decoder": description,
        "workers": args.workers,
        "depth": args.depth,
        "lead": lead,
        "rows": rows,
        "ratio": by_name["d2"]["ratio_to_d0"],
        "ratio_of_prefetching": by_name["dp"]["ratio_to_d0"],
        "ratio_of_moving_the_transforms": by_name["d1"]["images_per_s"] / by_name["dp"]["images_per_s"],
        "ratio_of_sample": by_name["d2"]["images_per_s"] / by_name["d1"]["images_per_s"],
        "original": ORIGINAL_LOADER,
    }


def parts_of(training: Training, device: Device, args: argparse.Namespace) -> Answer:
    """Measures the change's first two parts."""
    rows, clocks = ablation(
        training, device, batch=args.batch, steps=args.steps, warmup=args.warmup, repeats=args.repeats
    )
    by_name = {row["variant"]: row for row in rows}
    return {
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
        "clocks": clocks,
    }


def run(args: argparse.Namespace) -> Answer:
    device = devices.resolve(args.device)
    with device.use():
        model = network(args.network, precision=args.precision, device=device)
        batch_of = synthetic(args.batch, args.size, CLASSES[args.network], device)
        training = Training(model, *batch_of, effort=args.effort)
        parts = {} if args.only == "loaders" else parts_of(training, device, args)
        if args.photos is None:
            note("the rows of the loaders are left out: they need --photos")
        else:
            parts["loaders"] = loaders(training, device, args)
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
            **parts,
            "skipped_steps": training.skipped(),
            "last_loss": training.last_loss(),
            "machine_line": machine_line(found),
        }


def show(result: Answer) -> None:
    print(result["machine_line"])
    shape = "x".join(map(str, result["image"]))
    print(f"{result['network']}, {result['precision']}, batch {result['batch']}, images {shape}")
    if "rows" in result:
        show_parts(result)
    if "loaders" in result:
        show_loaders(result["loaders"])
    if result["skipped_steps"] or not math.isfinite(result["last_loss"]):
        print(f"NOT VALID: {result['skipped_steps']} steps were skipped, the last loss is {result['last_loss']}")


def loader_line(row: Answer) -> str:
    original = ORIGINAL_LOADER["ratios"].get(row["variant"])
    theirs = "" if original is None else f"{original:.2f}"
    return (
        f"({row['variant']:<2}) {row['what']:<40} {row['images_per_s']:8.1f}  {row['ratio_to_d0']:6.3f}  {theirs:>8}   "
        f"{row['ratio_to_c']:6.3f}"
    )


def show_loaders(result: Answer) -> None:
    found = result["photographs"]
    print(f"{found['distinct']} photographs of {found['mean_kib']:.0f} KiB in the mean, repeated; of {found['source']}")
    print(f"{result['decoder']}; {result['workers']} threads, {result['depth']} slots")
    print(f"{'':<45} images/s to (d0)  original   to (c)")
    for row in result["rows"]:
        print(loader_line(row))
    before, after = ORIGINAL_LOADER["images_per_s"].values()
    theirs = f"{before:.0f} to {after:.0f}, {ORIGINAL_LOADER['ratio']:.2f}"
    print(f"(d2) to (d0): {result['ratio']:.3f}; the original: {theirs}")


def show_parts(result: Answer) -> None:
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
    made.add_argument("--photos", type=Path, help="folder made by photographs.py: for the rows of the loaders")
    made.add_argument("--kib", type=count, default=110, help="which size of photographs")
    made.add_argument("--only", choices=("loaders",), help="leave the other rows out")
    made.add_argument("--workers", type=count, default=4, help="threads of the loaders that have some")
    made.add_argument("--depth", type=count, default=2, help="slots of the ring")
    made.add_argument(
        "--decoder", choices=("device", "pillow"), default="device", help="pillow: on the host, and copies pixels"
    )
    made.add_argument("--device", default="cuda")
    made.add_argument("--limit", type=float, default=0.0, help="seconds after which it ends, whatever it is at")
    made.add_argument("--json", action="store_true")
    return made


def main(words: Sequence[str] | None = None) -> None:
    made = parser()
    args = made.parse_args(words)
    if args.only == "loaders" and args.photos is None:
        made.error("--only loaders needs --photos")
    with watchdog(args.limit), tempfile.TemporaryDirectory(prefix="flcuda-bench-") as folder:
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
