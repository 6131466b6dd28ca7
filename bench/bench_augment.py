"""How fast a batch of images is augmented on the GPU, beside a plain copy of as many bytes in the same run.

Run: python bench/bench_augment.py [--images 128] [--height 375] [--width 500] [--size 224] [--json | --tune [CASE]]

The images are noise, on the device, as are the tables: times are those of the kernels, medians of device events with
cold operands, sets of which take turns. Bytes are those that must move: the pixels of each image's crop and those
around it that the triangle reaches, once, and the result, once. `with_tables_us` is a whole call with offsets, sizes
and parameters on the host.

With --tune [CASE], by default the first case: tries the kernel's constants, all in this process, and prints the best.
They are those of kernels/augment.cu; LINES is also `_LINES` of flcuda/ops/augment.py.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import itertools
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flcuda import device as devices
from flcuda import kernel_loader, timing
from flcuda.data import Augment, Draws, ImageBatch
from flcuda.ops import augment as ops

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF = {"dtype": "float16", "layout": "nhwc", "channels": 4}
JITTER = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
CASES = {
    "random-resized float16 nhwc4": {**HALF},
    "random-resized float16 nhwc8": {**HALF, "channels": 8},
    "random-resized float16 nhwc3": {**HALF, "channels": 3},
    "random-resized float32 nhwc4": {"layout": "nhwc", "channels": 4},
    "random-resized float32 nchw": {},
    "random-resized bfloat16 nchw": {"dtype": "bfloat16"},
    "resize-then-crop float16 nhwc4": {**HALF, "crop": "resize-then-crop"},
    "centre float16 nhwc4": {**HALF, "crop": "centre"},
    "whole image float16 nhwc4": {**HALF, "scale": (1.0, 1.0), "ratio": (1e-3, 1e3)},
    "random-resized float16 nhwc4 hue saturation brightness": {**HALF, **JITTER, "contrast": 0.0},
    "random-resized float16 nhwc4 all jitter": {**HALF, **JITTER},
}


def noise(sizes: np.ndarray, seed: int) -> ImageBatch:
    cupy = devices.cupy()
    each = -(-sizes.astype(np.int64).prod(axis=1) * 3 // 16) * 16
    offsets = np.concatenate([[0], np.cumsum(each)[:-1]])
    pixels = np.frombuffer(np.random.default_rng(seed).bytes(int(each.sum())), np.uint8)
    return ImageBatch(cupy.asarray(pixels), cupy.asarray(offsets), cupy.asarray(sizes), 3)


def bytes_read(parameters: np.ndarray, sizes: np.ndarray, shape: tuple[int, int]) -> int:
    """Of whole pixels under each crop, and half a triangle more on either side of its first and last pixel."""
    start, length = parameters[:, :2].astype(np.float64), parameters[:, 2:4].astype(np.float64)
    scale = length / shape
    support = np.maximum(scale, 1)
    first = np.clip(np.floor(start + scale / 2 - support + 0.5), 0, sizes)
    end = np.clip(np.floor(start + length - scale / 2 + support + 0.5), 0, sizes)
    return int((end - first).prod(axis=1).sum()) * 3


def sets_of(augment: Augment, sizes: np.ndarray, device: devices.Device) -> tuple[list[tuple[Any, ...]], int]:
    """(batch, parameters, result, parameters on the host), so many that each is cold; and the mean bytes of one."""
    cupy = devices.cupy()
    count = len(sizes)
    out_bytes = math.prod((count, augment.channels or 3, *augment.shape)) * (2 if "16" in augment.dtype else 4)
    sets = []
    totals = []
    for index in range(timing.buffer_sets(int(sizes.prod(axis=1).sum()) * 3 + out_bytes, timing.l2_bytes(device))):
        parameters = augment.parameters(sizes, Draws(0, index, np.arange(count)))
        totals.append(bytes_read(parameters, sizes, augment.shape) + out_bytes)
        batch = noise(sizes, index)
        sets.append((batch, cupy.asarray(parameters), augment.apply(batch, parameters), parameters))
    return sets, int(np.mean(totals))


def row_of(name: str, augment: Augment, sizes: np.ndarray, device: devices.Device) -> dict[str, object]:
    cupy = devices.cupy()
    count = len(sizes)
    sets, total = sets_of(augment, sizes, device)
    runs = [functools.partial(augment.apply, batch, table, out=out) for batch, table, out, _ in sets]
    own = timing.measure(runs, device, repeats=20)
    host_sizes = sizes.astype(np.int32)
    host_offsets = sets[0][0].offsets.get()
    on_host = [
        functools.partial(augment.apply, _OnHost(batch.pixels, host_offsets, host_sizes), parameters, out=out)
        for batch, _, out, parameters in sets
    ]
    whole = timing.measure(on_host, device, repeats=20)
    halves = [(cupy.empty(total // 2, np.uint8), cupy.empty(total // 2, np.uint8)) for _ in sets]
    copies = [functools.partial(to.data.copy_from_device_async, of.data, total // 2) for to, of in halves]
    plain = timing.measure(copies, device, repeats=20)
    return {
        "case": name,
        "images": count,
        "bytes": total,
        "us": own.median_ms * 1e3,
        "host_us": own.host_us,
        "with_tables_us": whole.median_ms * 1e3,
        "with_tables_host_us": whole.host_us,
        "images_per_s": count / own.median_ms * 1e3,
        "gb_per_s": total / own.median_ms / 1e6,
        "copy_gb_per_s": total / plain.median_ms / 1e6,
        "share_of_plain_copy": plain.median_ms / own.median_ms,
    }


class _OnHost:
    """Pixels on the device, and where they are on the host."""

    channels = 3

    def __init__(self, pixels: object, offsets: np.ndarray, sizes: np.ndarray) -> None:
        self.pixels = pixels
        self.offsets = offsets
        self.sizes = sizes


# --- the constants ----------------------------------------------------------------------------------------------------

CHOICES = {"LINES": (8, 14, 16, 28, 32), "ROWS": (8, 12, 16, 24), "BYTES": (12288, 20480, 36864), "BLOCKS": (3, 4, 5)}
MOST_SHARED = 48 << 10
TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}


@dataclass(frozen=True)
class Variant:
    """The constants of a kernel."""

    LINES: int
    ROWS: int
    BYTES: int
    BLOCKS: int

    @property
    def shared_bytes(self) -> int:
        # A line's and a row's tables have 16 bytes each, and a group of threads less than 256 more.
        groups = ops._THREADS // 32
        return self.BYTES + 32 + groups * (16 * self.LINES + 2 * 16 * self.ROWS + 256)

    def __str__(self) -> str:
        return " ".join(f"{name} {value}" for name, value in vars(self).items())


def variants() -> list[Variant]:
    made = (Variant(*values) for values in itertools.product(*CHOICES.values()))
    return [variant for variant in made if variant.shared_bytes <= MOST_SHARED]


def as_it_is(text: str) -> Variant:
    return Variant(*(int(re.findall(rf"^const int {name} = (\d+);", text, re.M)[0]) for name in CHOICES))


def edited(text: str, variant: Variant) -> str:
    """The text of augment.cu with other constants."""
    for name, value in vars(variant).items():
        text, found = re.subn(rf"^const int {name} = \d+;", f"const int {name} = {value};", text, flags=re.M)
        if found != 1:
            raise ValueError(f"augment.cu has {found} lines that define {name}")
    return text


def only(text: str, augment: Augment) -> tuple[str, str]:
    """The text with the one kernel of colour images that a description needs, and that kernel's name."""
    jitters = ops.jitters(augment)
    name = f"augment_{'jitter_' if jitters else ''}{kernel_loader.SUFFIXES[devices.numpy_dtype(augment.dtype)]}_3"
    bare = re.sub(r"^AUGMENT_KERNELS?\([^\n]*\)$", "", text, flags=re.M)
    return f"{bare}\nAUGMENT_KERNEL({name}, {TYPES[augment.dtype]}, 3, {str(jitters).lower()}, false)\n", name


@contextlib.contextmanager
def launched_with(lines: int) -> Iterator[None]:
    before = ops._LINES
    ops._LINES = lines
    try:
        yield
    finally:
        ops._LINES = before


def tune(name: str, augment: Augment, sizes: np.ndarray, device: devices.Device, shown: int) -> None:
    if augment.contrast:
        raise SystemExit(f"{name!r} has a contrast, for which there are two launches: choose another case")
    begin = time.perf_counter()
    text, function = only(kernel_loader.source("augment"), augment)
    own = as_it_is(text)
    choices = list(dict.fromkeys([own, *variants()]))

    def compiled(variant: Variant) -> Any:
        with device.use():
            return kernel_loader.new_module("augment", edited(text, variant), kernel_loader.options())

    with concurrent.futures.ThreadPoolExecutor() as pool:
        modules = list(pool.map(compiled, choices))
    print(f"{name}: {len(modules)} kernels compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    sets, total = sets_of(augment, sizes, device)
    mean, std = ops._statistics(augment, 3)
    works: dict[Variant, list[timing.Run]] = {}
    kernels = {variant: module.get_function(function) for variant, module in zip(choices, modules, strict=True)}
    for variant, kernel in kernels.items():
        runs: list[timing.Run] = []
        for batch, table, out, _ in sets:
            with launched_with(variant.LINES):
                blocks, block, *shape = ops.launch_shape(len(out), *out.shape[2:])
                numbers = ops.arguments(out, mean, std, *shape)
            arrays = (out, np.uint64(0), batch.pixels, batch.offsets, batch.sizes, table)
            runs.append(functools.partial(kernel, (blocks, 1), block, (*arrays, *numbers)))
        works[variant] = runs
    times = timing.in_turn(list(works.values()), device, repeats=5, budget_s=0.05)
    ranked = sorted(zip(times, works, strict=True), key=lambda row: row[0].median_ms)
    best = [variant for _, variant in ranked[:shown]]
    if own not in best:
        best.append(own)
    times = timing.in_turn([works[variant] for variant in best], device, repeats=60, budget_s=0.3)
    batch, table, out, _ = sets[0]
    wanted = augment.apply(batch, table).astype(np.float32)
    for found, variant in sorted(zip(times, best, strict=True), key=lambda row: row[0].median_ms):
        out.fill(7)
        works[variant][0]()
        error = float(abs(out.astype(np.float32) - wanted).max())
        kernel = kernels[variant]
        notes = ["" if found.queued else ", not queued", ", as it is" if variant == own else ""]
        print(
            f"{found.median_ms * 1e3:7.2f} us ({found.low_ms * 1e3:.2f}-{found.high_ms * 1e3:.2f}) "
            f"{total / found.median_ms / 1e6:5.0f} GB/s  {variant}; {kernel.num_regs} registers, "
            f"{kernel.local_size_bytes} bytes of local memory, error {error:.1e}{''.join(notes)}"
        )
    print(f"{time.perf_counter() - begin:.1f} s in all, {len(works)} tried")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--height", type=int, default=375)
    parser.add_argument("--width", type=int, default=500)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tune", nargs="?", const=next(iter(CASES)), choices=CASES, metavar="CASE")
    parser.add_argument("--shown", type=int, default=20, help="with --tune: lines")
    args = parser.parse_args()
    device = devices.resolve("cuda")
    sizes = np.tile(np.array([args.height, args.width], np.int32), (args.images, 1))
    if args.tune is not None:
        with device.use():
            described = replace(Augment(args.size, **IMAGENET), **CASES[args.tune])
            tune(args.tune, described, sizes, device, args.shown)
        return
    rows = []
    with device.use():
        for name, options in CASES.items():
            rows.append(row_of(name, replace(Augment(args.size, **IMAGENET), **options), sizes, device))
            devices.cupy().get_default_memory_pool().free_all_blocks()
    if args.json:
        json.dump({"height": args.height, "width": args.width, "size": args.size, "rows": rows}, sys.stdout, indent=1)
        print()
        return
    for row in rows:
        print(
            f"{row['us']:7.1f} us {row['images_per_s'] / 1e6:5.2f} M images/s {row['gb_per_s']:6.0f} GB/s "
            f"{row['share_of_plain_copy']:5.2f} of a copy, host {row['host_us']:5.1f} us, "
            f"with tables {row['with_tables_us']:6.1f} us  {row['case']}"
        )


if __name__ == "__main__":
    main()
