"""How fast the copies of the rewriting sources are: each operand of each form, beside a plain copy of as many bytes.

Run: python bench/bench_copies.py [--problem LINE ...] [--json]. Times are medians of device events with cold operands:
sets of them take turns. Bytes are those of the operand and of its copy, once each.
"""

import argparse
import functools
import json
import math
import sys

import numpy as np

from flcuda import device as devices
from flcuda import timing
from flcuda.finder import Policy, Problem
from flcuda.finder.problem import ConvolutionProblem
from flcuda.finder.sources.rewrites import Padded, Relayout, SpaceToDepth

PROBLEMS = (
    "forward n128 c3 224x224 k64 7x7 p3 s2 float16 nhwc",
    "forward n128 c3 224x224 k64 7x7 p3 s2 tf32 nhwc",
    "forward n128 c3 224x224 k64 7x7 p3 s2 float32 nchw",
    "backward_filter n128 c3 224x224 k64 7x7 p3 s2 float16 nhwc",
    "forward n128 c64 56x56 k64 3x3 p1 float16 nchw",
    "forward n128 c64 56x56 k64 3x3 p1 float32 nhwc",
)
LEAST_BYTES = 1 << 20
"""Smaller copies, of filters, are launches and nothing else."""


def rows_of(problem: ConvolutionProblem, device: devices.Device) -> list[dict[str, object]]:
    cupy = devices.cupy()
    rows = []
    for source in (SpaceToDepth(), Padded(), Relayout()):
        for rewrite in source.rewrites(problem, Policy()):
            for name, copy in zip(problem.operands, rewrite.copies, strict=True):
                if copy is None or name in problem.outputs or copy.nbytes < LEAST_BYTES:
                    continue
                operand_bytes = math.prod(copy.shape) * copy.itemsize
                total = operand_bytes + copy.nbytes
                count = timing.buffer_sets(total, timing.l2_bytes(device))
                sets = []
                for _ in range(count):
                    memory = cupy.empty(operand_bytes, np.uint8)
                    memory.fill(60)
                    strides = tuple(step * copy.itemsize for step in copy.strides)
                    operand = cupy.ndarray(copy.shape, devices.DTYPES[copy.dtype], memory.data, strides)
                    sets.append((copy.placing()(devices.workspace(copy.nbytes), 0), operand))
                gathering = copy.gathering()
                own = timing.measure([functools.partial(gathering, *each) for each in sets], device, repeats=20)
                halves = [(cupy.empty(total // 2, np.uint8), cupy.empty(total // 2, np.uint8)) for _ in range(count)]
                plain = timing.measure(
                    [
                        functools.partial(to.data.copy_from_device_async, source_.data, total // 2)
                        for to, source_ in halves
                    ],
                    device,
                    repeats=20,
                )
                rows.append(
                    {
                        "problem": str(problem),
                        "source": source.name,
                        "form": dict(rewrite.parameters),
                        "operand": name,
                        "bytes": total,
                        "ms": own.median_ms,
                        "gb_per_s": total / own.median_ms / 1e6,
                        "share_of_plain_copy": plain.median_ms / own.median_ms,
                    }
                )
                del sets, halves
                cupy.get_default_memory_pool().free_all_blocks()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = devices.resolve("cuda")
    rows = []
    with device.use():
        for line in args.problem or PROBLEMS:
            problem = Problem.parse(line)
            assert isinstance(problem, ConvolutionProblem)
            rows += rows_of(problem, device)
    if args.json:
        json.dump({"rows": rows}, sys.stdout, indent=1)
        print()
        return
    for row in rows:
        form = " ".join(f"{name}={value}" for name, value in row["form"].items())
        print(
            f"{row['ms'] * 1e3:7.1f} us {row['gb_per_s']:6.0f} GB/s {row['share_of_plain_copy']:5.2f}  "
            f"{row['source']} {form}: {row['operand']} of {row['problem']}"
        )


if __name__ == "__main__":
    main()
