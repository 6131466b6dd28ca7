"""The data pipeline: images per second of decoding and augmenting, of training from files, and what 20 epochs keep.

    decode  JPEG files to augmented batches by a PrefetchDataset, as a training reads them; decoding alone; the same by
            Pillow in as many threads as there are cores, which is what is left without nvImageCodec
    train   ResNet-34 in float16, channels last: images on the device, from JPEG files through the whole pipeline, and
            from a DecodedStore in device memory; they take turns, and a ratio is the median of those of the turns
    memory  epochs of Trainer.fit from JPEG files: after each the process's resident set, page-locked bytes, and used
            device memory
    peers   decoding alone by torchvision: its CUDA decoder, and its CPU one in as many threads as there are cores

The photographs are cut from pictures of Debian packages by photographs.py. They are few and repeated: in random order,
each time augmented in another way, read from the system's file cache and decoded anew.

All by wall clock. A rate is of a stretch between two waits for the stream that the work is on, in the middle of one
pass: threads and buffers are there, and full where they can be filled. Page-locked bytes are those that CuPy allocates;
nvImageCodec's own are not known. A series is flat when its last epochs' median is above that of earlier ones by no more
than 16 MiB or 1 per cent.

Run: python bench/bench_data.py --photos .data/photos [decode] [train] [memory] [peers] [--out FILE] [--json]
"""

import argparse
import contextlib
import gc
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import photographs
from bench_flashlight_ablation import Answer, count, note, wait_for_stream, wall, watchdog
from networks import CLASSES, NETWORKS, network
from record import machine, machine_line

import flcuda
from flcuda import device as devices
from flcuda import functional as F
from flcuda.amp import DynamicScaler
from flcuda.autograd import Tensor
from flcuda.data import Augment, BatchDataset, DecodedStore, Decoder, ImageFiles, PrefetchDataset, decode
from flcuda.data.folder import PHOTOGRAPH_MEAN, PHOTOGRAPH_STD
from flcuda.device import Device
from flcuda.optim import SGD
from flcuda.training import Trainer

PARTS = ("decode", "train", "memory", "peers")

ASKED = {"decode and augment": 20_000.0, "jpeg": 0.97, "store": 0.99}
"""Images per second; of training a share of the rate with images on the device."""

EPOCH = 1 << 20
"""Images of the endless data sets: an epoch does not end while one is measured."""

DECODING_THREADS = 4
"""That call the decoder alone: two batches are prepared while two are decoded."""

FLAT_BYTES = 16 << 20
FLAT_SHARE = 0.01
JOIN_S = 20.0
MOST_SKIPPED = 8
LR = 1e-3
MIB = 1 << 20


# --- rates ------------------------------------------------------------------------------------------------------------


def steady(
    take: Callable[[], int],
    wait: Callable[[], None],
    *,
    seconds: float,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Returns images per second of so many stretches, which together take `seconds`, after a quarter of that.

    Args:
        take: does a batch and returns how many images that is.
        wait: for what was queued.
        seconds: of all stretches.
        repeats: stretches.
        clock: in seconds.
    """
    take()
    wait()
    rates = []
    for length in (seconds / 4, *[seconds / repeats] * repeats):
        images = 0
        start = clock()
        while clock() - start < length or not images:
            images += take()
        wait()
        rates.append(images / (clock() - start))
    return rates[1:]


def steady_threads(works: Sequence[Callable[[], int]], *, seconds: float, repeats: int) -> list[float]:
    """Returns images per second as `steady` does, of threads each of which does its work over and over.

    Args:
        works: one a thread; does a batch, waits for it, and returns how many images that is.
        seconds: of all stretches.
        repeats: stretches.
    """
    done = [0] * len(works)
    failed: list[BaseException] = []
    stop = threading.Event()

    def loop(place: int) -> None:
        try:
            while not stop.is_set():
                done[place] += works[place]()
        except BaseException as error:
            failed.append(error)
            stop.set()

    threads = [threading.Thread(target=loop, args=(place,), daemon=True) for place in range(len(works))]
    for thread in threads:
        thread.start()
    rates = []
    try:
        # What is loaded once is loaded by the first batches.
        while not stop.is_set() and not all(done):
            stop.wait(0.001)
        stop.wait(seconds / 4)
        for _ in range(repeats):
            before, start = sum(done), time.perf_counter()
            stop.wait(seconds / repeats)
            while sum(done) == before and not stop.is_set():
                stop.wait(0.001)
            rates.append((sum(done) - before) / (time.perf_counter() - start))
    finally:
        stop.set()
        for thread in threads:
            thread.join(JOIN_S)
    if failed:
        raise failed[0]
    return rates


def rate_row(name: str, kib: int, rates: Sequence[float], **more: Any) -> Answer:
    row: Answer = {
        "row": name,
        "kib": kib,
        "images_per_s": statistics.median(rates),
        "range": [min(rates), max(rates)],
        "samples": list(rates),
        **more,
    }
    asked = ASKED.get(name)
    if asked is not None:
        row["asked"] = asked
        row["reached"] = bool(row["images_per_s"] >= asked)
    return row


def rate_line(row: Answer) -> str:
    what = f"{row['kib']:>4} KiB  {row['row']}"
    if "error" in row:
        return f"{what}: NOT MEASURED: {row['error']}"
    text = f"{what:<42} {row['images_per_s']:9,.0f} images/s ({row['range'][0]:,.0f} to {row['range'][1]:,.0f})"
    if "threads" in row:
        text += f", {row['threads']} threads"
    if "asked" in row:
        text += f"; asked {row['asked']:,.0f}: {'reached' if row['reached'] else 'NOT REACHED'}"
    return text


class Record:
    """What was found so far: each row is printed when it is there, and all are written to a file.

    Args:
        result: to be filled.
        path: rewritten with every row; None for no file.
        stream: where rows are printed.
    """

    def __init__(self, result: Answer, path: Path | None, stream: Any) -> None:
        self.result = result
        self._path = path
        self._stream = stream

    def add(self, part: str, row: Answer, line: str) -> None:
        self.result.setdefault(part, []).append(row)
        self.say(line)
        self.write()

    def set(self, part: str, answer: Answer) -> None:
        self.result[part] = answer
        self.write()

    def say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def write(self) -> None:
        if self._path is not None:
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self.result, indent=1) + "\n")
            new.replace(self._path)

    def rate(self, part: str, name: str, kib: int, measure: Callable[[], list[float]], **more: Any) -> None:
        """Adds a row, or the error that it ended with: the others are measured all the same."""
        try:
            row = rate_row(name, kib, measure(), **more)
        except Exception as error:
            traceback.print_exc()
            row = {"row": name, "kib": kib, "error": f"{type(error).__name__}: {error}", **more}
        self.add(part, row, rate_line(row))


# --- decode -----------------------------------------------------------------------------------------------------------


def augmentation(size: int, device: Device) -> Augment:
    """What the fastest precision takes: float16, channels last, as the first layer does; float32 on the CPU."""
    options: Any = {"dtype": "float16", "layout": "nhwc"} if device.kind == "cuda" else {}
    return Augment(size, mean=PHOTOGRAPH_MEAN, std=PHOTOGRAPH_STD, **options)


def loader_of(
    dataset: Any, device: Device, *, batch: int, workers: int | None, depth: int, transforms: Sequence[Any]
) -> PrefetchDataset:
    batches = BatchDataset(photographs.repeated(dataset, max(EPOCH // batch, 1) * batch), batch)
    return PrefetchDataset(batches, device, depth=depth, workers=workers, transforms=transforms)


def served(loader: PrefetchDataset, device: Device, *, seconds: float, repeats: int) -> list[float]:
    """Returns images per second of a loader whose consumer does nothing but ask for the next batch."""

    def take() -> int:
        _, labels = samples.take().arrays()
        return len(labels)

    with photographs.Endless(loader) as samples:
        return steady(take, lambda: wait_for_stream(device), seconds=seconds, repeats=repeats)


def decoding(decoder: Decoder, contents: Sequence[bytes], batch: int) -> Callable[[], int]:
    """Returns what decodes one batch after the other on a stream of its own, and waits for it."""
    order = itertools.cycle(range(len(contents)))
    device = decoder.device
    stream: Any = contextlib.nullcontext()
    if device.kind == "cuda":
        with device.use():
            stream = devices.cupy().cuda.Stream(non_blocking=True)

    def work() -> int:
        part = [contents[next(order)] for _ in range(batch)]
        with device.use(), stream:
            decoder.decode(part)
            wait_for_stream(device)
        return batch

    return work


def pillow(contents: Sequence[bytes], first: int) -> Callable[[], int]:
    """Returns what decodes one image after the other on the host, beginning with one of them."""
    order = itertools.cycle([*contents[first:], *contents[:first]])

    def work() -> int:
        decode(next(order))
        return 1

    return work


def decode_part(args: argparse.Namespace, device: Device, record: Record) -> None:
    times = {"seconds": args.seconds, "repeats": args.repeats}
    augment = augmentation(args.size, device)
    for kib in args.kib:
        files, labels = photographs.listed(args.photos, kib)
        contents = [file.read_bytes() for file in files]
        with Decoder(device) as decoder:
            if "decoder" not in record.result:
                record.set("decoder", {"description": decoder.description})
                record.say(decoder.description)
            for workers in args.workers:
                loader = loader_of(
                    ImageFiles(files, labels, decoder),
                    device,
                    batch=args.batch,
                    workers=workers,
                    depth=args.depth,
                    transforms=(augment,),
                )
                measure = lambda loader=loader: served(loader, device, **times)  # noqa: E731
                record.rate("decode", "decode and augment", kib, measure, threads=loader.workers, batch=args.batch)
            works = [decoding(decoder, contents, args.batch) for _ in range(DECODING_THREADS)]
            measure = lambda works=works: steady_threads(works, **times)  # noqa: E731
            record.rate("decode", "decode alone", kib, measure, threads=DECODING_THREADS, batch=args.batch)
        loader = loader_of(
            ImageFiles(files, labels, Decoder(device, nvimgcodec=False)),
            device,
            batch=args.batch,
            workers=args.cores,
            depth=args.depth,
            transforms=(augment,),
        )
        measure = lambda loader=loader: served(loader, device, **times)  # noqa: E731
        record.rate("decode", "decode by Pillow and augment", kib, measure, threads=args.cores, batch=args.batch)
        each = [pillow(contents, place % len(contents)) for place in range(args.cores)]
        measure = lambda each=each: steady_threads(each, **times)  # noqa: E731
        record.rate("decode", "decode alone by Pillow", kib, measure, threads=args.cores)


# --- peers ------------------------------------------------------------------------------------------------------------


def peers_part(args: argparse.Namespace, device: Device, record: Record) -> None:
    try:
        import torch
        import torchvision
        from torchvision.io import ImageReadMode, decode_jpeg
    except Exception as error:
        record.say(f"torchvision is left out: {type(error).__name__}: {error}")
        record.set("peers_left_out", {"error": f"{type(error).__name__}: {error}"})
        return
    record.set("peers_versions", {"torch": torch.__version__, "torchvision": torchvision.__version__})
    torch.set_num_threads(1)
    times = {"seconds": args.seconds, "repeats": args.repeats}

    def in_batches(tensors: Sequence[Any]) -> Callable[[], int]:
        order = itertools.cycle(tensors)

        def take() -> int:
            part = [next(order) for _ in range(args.batch)]
            decode_jpeg(part, mode=ImageReadMode.RGB, device=str(device))
            return int(args.batch)

        return take

    def one_by_one(tensors: Sequence[Any], first: int) -> Callable[[], int]:
        order = itertools.cycle([*tensors[first:], *tensors[:first]])

        def work() -> int:
            decode_jpeg(next(order), mode=ImageReadMode.RGB)
            return 1

        return work

    for kib in args.kib:
        files, _ = photographs.listed(args.photos, kib)
        tensors = [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files]
        if device.kind == "cuda":
            take = in_batches(tensors)
            measure = lambda take=take: steady(take, torch.cuda.synchronize, **times)  # noqa: E731
            record.rate("peers", "torchvision, CUDA, alone", kib, measure, threads=1, batch=args.batch)
        works = [one_by_one(tensors, place % len(tensors)) for place in range(args.cores)]
        measure = lambda works=works: steady_threads(works, **times)  # noqa: E731
        record.rate("peers", "torchvision, CPU, alone", kib, measure, threads=args.cores)


# --- train ------------------------------------------------------------------------------------------------------------


class Training:
    """A model and the step that Trainer does with it, captured as there."""

    def __init__(self, name: str, precision: str, device: Device) -> None:
        self.model = network(name, precision=precision, device=device)
        self.optimizer = SGD(self.model, LR, momentum=0.9, weight_decay=1e-4)
        self.scaler = DynamicScaler()
        self.loss: Tensor | None = None
        self.steps = 0
        self._captured = flcuda.capture(self._step)

    def _step(self, images: Tensor, labels: Any) -> Tensor:
        loss = F.cross_entropy(self.model(images), labels)
        self.scaler.step(self.optimizer, loss)
        return loss

    def step(self, images: Any, labels: Any) -> None:
        self.loss = self._captured(Tensor(images), labels)
        self.steps += 1

    def state(self) -> Answer:
        """Says whether it has trained: a scaler may skip a few of the first steps until it has found its scale."""
        assert self.loss is not None
        skipped = int(self.scaler.state_dict()["skipped_steps"])
        loss = float(self.loss.data)
        valid = math.isfinite(loss) and skipped <= max(MOST_SKIPPED, self.steps // 100)
        return {"steps": self.steps, "skipped_steps": skipped, "last_loss": loss, "valid": valid}


def synthetic(augment: Augment, batch: int, classes: int, device: Device) -> tuple[Any, Any]:
    """Returns standard normal images of the kind that the augmentation makes, and labels, on the device."""
    draws = np.random.default_rng(0)
    values = draws.standard_normal((batch, 3, *augment.shape), np.float32).astype(augment.dtype)
    images = devices.to_layout(device.xp.asarray(values), augment.layout)
    return images, device.xp.asarray(draws.integers(0, classes, batch))


def share_rows(batch: int, seconds: dict[str, list[float]], asked: dict[str, float]) -> list[Answer]:
    """Makes the table of a training: images per second, and their share of those with images on the device.

    Args:
        batch: images a step.
        seconds: a step's, by variant, of each turn; "synthetic" among them.
        asked: least shares, by variant.
    """
    rows = []
    for name, samples in seconds.items():
        shares = [to / of for of, to in zip(samples, seconds["synthetic"], strict=True)]
        row: Answer = {
            "row": name,
            "images_per_s": batch / statistics.median(samples),
            "range": [batch / max(samples), batch / min(samples)],
            "step_ms": 1e3 * statistics.median(samples),
            "step_ms_samples": [1e3 * each for each in samples],
            "share": statistics.median(shares),
            "share_range": [min(shares), max(shares)],
        }
        if name in asked:
            row["asked"] = asked[name]
            row["reached"] = bool(row["share"] >= asked[name])
        rows.append(row)
    return rows


def share_line(row: Answer) -> str:
    low, high = row["share_range"]
    text = (
        f"train {row['row']:<28} {row['images_per_s']:9,.1f} images/s, {100 * row['share']:6.2f} per cent of synthetic "
        f"({100 * low:.2f} to {100 * high:.2f})"
    )
    if "asked" in row:
        text += f"; asked {100 * row['asked']:.0f}: {'reached' if row['reached'] else 'NOT REACHED'}"
    return text


def train_part(args: argparse.Namespace, device: Device, record: Record) -> None:
    classes = CLASSES[args.network]
    augment = augmentation(args.size, device)
    training = Training(args.network, args.precision, device)
    images, labels = synthetic(augment, args.batch, classes, device)
    steps: dict[str, Callable[[], None]] = {"synthetic": lambda: training.step(images, labels)}
    asked = {}
    ahead = 0
    with contextlib.ExitStack() as stack:

        def add(name: str, dataset: Any, workers: int | None, share: float) -> None:
            loader = loader_of(
                dataset, device, batch=args.batch, workers=workers, depth=args.depth, transforms=(augment,)
            )
            samples = stack.enter_context(photographs.Endless(loader))
            steps[name] = lambda: training.step(*samples.take().arrays())
            asked[name] = share
            nonlocal ahead
            ahead = max(ahead, loader.workers + 2 * args.depth)

        decoder = stack.enter_context(Decoder(device))
        for kib in args.kib:
            files, numbers = photographs.listed(args.photos, kib)
            for workers in args.workers:
                name = f"jpeg {kib} KiB" + ("" if workers is None else f", {workers} threads")
                add(name, ImageFiles(files, numbers % classes, decoder), workers, ASKED["jpeg"])
        files, numbers = photographs.listed(args.photos, args.kib[0])
        cache = "device" if device.kind == "cuda" else "host"
        store = DecodedStore(ImageFiles(files, numbers % classes, decoder), cache)
        store.fill()
        record.say(str(store))
        add("store", store, None, ASKED["store"])
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            wait_for_stream(device)
            note(f"{name}: the first step took {time.perf_counter() - start:.1f} s")
        lead = ahead + 2
        seconds = wall(steps, lambda: wait_for_stream(device), count=args.steps, repeats=args.repeats, lead=lead)
    state = training.state()
    record.set("training", {"network": args.network, "precision": args.precision, "lead": lead, **state})
    for row in share_rows(args.batch, seconds, asked):
        record.add("train", row, share_line(row))
    if not state["valid"]:
        record.say(f"NOT VALID: {state}")


# --- memory -----------------------------------------------------------------------------------------------------------


class PinnedBytes:
    """Counts the page-locked memory that CuPy allocates while the context is entered.

    Attributes:
        live: bytes that are allocated now.
        peak: the most since the last `take_peak`.
    """

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.live += nbytes
            self.peak = max(self.peak, self.live)

    def take_peak(self) -> int:
        with self._lock:
            peak, self.peak = self.peak, self.live
        return peak

    @contextlib.contextmanager
    def counting(self, device: Device) -> Iterator[None]:
        """Has CuPy make memory that says when it comes and goes."""
        if device.kind == "cpu":
            yield
            return
        cuda = devices.cupy().cuda
        module, original = cuda.pinned_memory, cuda.PinnedMemory
        counted = counting_memory(original, self.add)
        # Its pool takes the one of its module.
        module.PinnedMemory = cuda.PinnedMemory = counted
        try:
            yield
        finally:
            module.PinnedMemory = cuda.PinnedMemory = original


def counting_memory(original: type, add: Callable[[int], None]) -> type:
    """Returns a class of memory like CuPy's, which tells of its bytes when it is made and when it goes."""

    class CountedMemory(original):  # type: ignore[misc]
        _counted = 0

        def __init__(self, size: int, flags: int = 0) -> None:
            super().__init__(size, flags)
            self._counted = size
            add(size)

        def __del__(self) -> None:
            super().__del__()
            add(-self._counted)

    return CountedMemory


def resident_bytes() -> int:
    """The process's resident set; Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_now(device: Device, pinned: PinnedBytes) -> Answer:
    used = pool = 0
    if device.kind == "cuda":
        cupy = devices.cupy()
        free, total = cupy.cuda.runtime.memGetInfo()
        used, pool = total - free, cupy.get_default_memory_pool().total_bytes()
    return {
        "resident": resident_bytes(),
        "pinned": pinned.live,
        "pinned_peak": pinned.take_peak(),
        "device": used,
        "device_pool": pool,
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - the folder changes while it is listed
    }


def growth(series: Sequence[int]) -> Answer:
    """Says how much more the last fifth of a series has than the fifth after its first quarter, by their medians."""
    width = max(1, len(series) // 5)
    early = series[len(series) // 4 : len(series) // 4 + width]
    before, after = statistics.median(early), statistics.median(series[-width:])
    limit = max(FLAT_BYTES, FLAT_SHARE * before)
    return {"before": before, "after": after, "growth": after - before, "flat": bool(after - before <= limit)}


def memory_part(args: argparse.Namespace, device: Device, record: Record) -> None:
    files, labels = photographs.listed(args.photos, args.kib[-1])
    training = Training(args.network, args.precision, device)
    pinned = PinnedBytes()
    epochs: list[Answer] = []
    with pinned.counting(device), Decoder(device) as decoder:
        dataset = photographs.repeated(
            ImageFiles(files, labels % CLASSES[args.network], decoder), args.batch * args.epoch_steps
        )
        trainer = Trainer(
            training.model,
            training.optimizer,
            dataset,
            batch_size=args.batch,
            scaler=training.scaler,
            transforms=(augmentation(args.size, device),),
            workers=args.workers[0],
        )

        def after_epoch(result: Any) -> None:
            epochs.append(memory_now(device, pinned))
            row = epochs[-1]
            record.add(
                "memory",
                {"epoch": result.epoch, **row, "images_per_s": result.images_per_second},
                f"epoch {result.epoch:>2}: resident {row['resident'] / MIB:8.1f} MiB, pinned "
                f"{row['pinned'] / MIB:6.1f} (most {row['pinned_peak'] / MIB:6.1f}), device "
                f"{row['device'] / MIB:8.1f} (CuPy's pool {row['device_pool'] / MIB:8.1f}), "
                f"{row['threads']} threads, {row['files']} open files, "
                f"{result.images_per_second:7,.0f} images/s, loss {result.train_loss:.3f}",
            )

        trainer.fit(args.epochs, on_epoch=after_epoch)
    found = {
        name: growth([row[name] for row in epochs])
        for name in ("resident", "pinned", "pinned_peak", "device", "device_pool")
    }
    record.set("memory_growth", found)
    for name, what in found.items():
        record.say(
            f"{name:<12} {what['before'] / MIB:8.1f} to {what['after'] / MIB:8.1f} MiB, "
            f"{what['growth'] / MIB:+.1f}: {'flat' if what['flat'] else 'NOT FLAT'}"
        )


# --- all --------------------------------------------------------------------------------------------------------------

RUN = {"decode": decode_part, "train": train_part, "memory": memory_part, "peers": peers_part}


def run(args: argparse.Namespace, stream: Any) -> Answer:
    device = devices.resolve(args.device)
    found = machine()
    described = []
    for kib in args.kib:
        sizes = [file.stat().st_size for file in photographs.listed(args.photos, kib)[0]]
        described.append({"kib": kib, "distinct": len(sizes), "mean_kib": statistics.fmean(sizes) / 1024})
    result: Answer = {
        "photographs": {"source": photographs.SOURCE, "repeated": True, "sizes": described},
        "batch": args.batch,
        "size": args.size,
        "depth": args.depth,
        "stream": "its own" if args.own_stream else "default",
        "cores": args.cores,
        "seconds": args.seconds,
        "repeats": args.repeats,
        "machine_line": machine_line(found),
    }
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    record = Record(result, args.out, stream)
    record.say(result["machine_line"])
    sizes_line = ", ".join(f"{each['distinct']} of {each['mean_kib']:.0f} KiB" for each in described)
    record.say(f"photographs cut from {photographs.SOURCE}, about 500x375, repeated: {sizes_line}")
    with device.use(), own_stream(device) if args.own_stream else contextlib.nullcontext():
        for part in PARTS:
            if part not in args.parts:
                continue
            start = time.perf_counter()
            try:
                RUN[part](args, device, record)
            except Exception as error:
                traceback.print_exc()
                record.set(f"{part}_error", {"error": f"{type(error).__name__}: {error}"})
                record.say(f"{part}: NOT MEASURED: {type(error).__name__}: {error}")
            note(f"{part} took {time.perf_counter() - start:.1f} s")
            free_memory(device)
    return result


def own_stream(device: Device) -> Any:
    """Returns a stream that the legacy default one does not wait for, nor it for others."""
    return contextlib.nullcontext() if device.kind == "cpu" else devices.cupy().cuda.Stream(non_blocking=True)


def free_memory(device: Device) -> None:
    """Gives back what a part has left in CuPy's pools: the next one's growth must not hide there."""
    gc.collect()
    if device.kind == "cuda":
        cupy = devices.cupy()
        devices.synchronize(device)
        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    made.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default all")
    made.add_argument("--photos", type=Path, required=True, help="folder made by photographs.py")
    made.add_argument("--kib", type=count, nargs="+", default=[50, 110], help="sizes of photographs")
    made.add_argument("--network", choices=NETWORKS, default="resnet34")
    made.add_argument("--precision", default="float16")
    made.add_argument("--batch", type=count, default=128)
    made.add_argument("--size", type=count, default=224, help="pixels of an image's side")
    made.add_argument("--workers", type=count, nargs="+", help="threads that load; several are rows each")
    made.add_argument("--depth", type=count, default=2, help="slots of the ring")
    made.add_argument("--cores", type=count, default=cores, help="threads of what decodes on the host")
    made.add_argument("--seconds", type=float, default=2.5, help="of each row of decode and peers")
    made.add_argument("--steps", type=count, default=100, help="of a round of the training")
    made.add_argument("--repeats", type=count, default=5, help="stretches of a row, rounds of the training")
    made.add_argument("--epochs", type=count, default=20)
    made.add_argument("--epoch-steps", type=count, default=20)
    made.add_argument("--own-stream", action="store_true", help="consume on a non-blocking stream, not the default one")
    made.add_argument("--device", default="cuda")
    made.add_argument("--limit", type=float, default=300.0, help="seconds after which it ends; 0 for none")
    made.add_argument("--out", type=Path, help="a file that is rewritten with every row")
    made.add_argument("--json", action="store_true", help="rows go to standard error, and all at the end to output")
    return made


def main(words: Sequence[str] | None = None) -> None:
    made = parser()
    args = made.parse_args(words)
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        made.error(f"PART must be of {', '.join(PARTS)}, not {unknown[0]!r}")
    args.parts = args.parts or PARTS
    args.workers = args.workers or [None]
    with watchdog(args.limit), tempfile.TemporaryDirectory(prefix="flcuda-bench-") as folder:
        # What is found here must not become anybody's stored choice, and nothing that is stored must be taken.
        os.environ["FLCUDA_CHOICES"] = folder
        result = run(args, sys.stderr if args.json else sys.stdout)
    if args.json:
        json.dump(result, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
