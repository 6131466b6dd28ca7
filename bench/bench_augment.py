"""How fast a batch of images is augmented on the GPU, beside a plain copy of as many bytes in the same run.

Run: python bench/bench_augment.py [--images 128] [--height 375] [--width 500] [--size 224] [--json]. The images are
noise, on the device, as are the tables: times are those of the kernels, medians of device events with cold operands,
sets of which take turns. Bytes are those that must move: the pixels of each image's crop and those around it that the
triangle reaches, once, and the result, once. `with_tables_us` is a whole call with offsets, sizes and parameters on the
host.
"""

import argparse
import functools
import json
import math
import sys
from dataclasses import replace

import numpy as np

from flcuda import device as devices
from flcuda import timing
from flcuda.data import Augment, Draws, ImageBatch

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
    generator = cupy.random.RandomState(seed)
    pixels = generator.randint(0, 256, int(each.sum()), dtype=np.uint8)
    return ImageBatch(pixels, cupy.asarray(offsets), cupy.asarray(sizes), 3)


def bytes_read(parameters: np.ndarray, sizes: np.ndarray, shape: tuple[int, int]) -> int:
    """Of whole pixels under each crop, and half a triangle more on either side of its first and last pixel."""
    start, length = parameters[:, :2].astype(np.float64), parameters[:, 2:4].astype(np.float64)
    scale = length / shape
    support = np.maximum(scale, 1)
    first = np.clip(np.floor(start + scale / 2 - support + 0.5), 0, sizes)
    end = np.clip(np.floor(start + length - scale / 2 + support + 0.5), 0, sizes)
    return int((end - first).prod(axis=1).sum()) * 3


def row_of(name: str, augment: Augment, sizes: np.ndarray, device: devices.Device) -> dict[str, object]:
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
    runs = [functools.partial(augment.apply, batch, table, out=out) for batch, table, out, _ in sets]
    own = timing.measure(runs, device, repeats=20)
    host_sizes = sizes.astype(np.int32)
    host_offsets = sets[0][0].offsets.get()
    on_host = [
        functools.partial(augment.apply, _OnHost(batch.pixels, host_offsets, host_sizes), parameters, out=out)
        for batch, _, out, parameters in sets
    ]
    whole = timing.measure(on_host, device, repeats=20)
    total = int(np.mean(totals))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--height", type=int, default=375)
    parser.add_argument("--width", type=int, default=500)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = devices.resolve("cuda")
    sizes = np.tile(np.array([args.height, args.width], np.int32), (args.images, 1))
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
