"""The launch shape of the two-stage reductions over everything but the channel.

Stage one: blocks of the grid (channels, splits) reduce a part of a channel's elements each. Stage two: a warp a channel
combines the parts in a fixed order. The numbers depend on the shape and layout alone, so two runs are equal bit for
bit, also on different devices. The kernels are `reduce_rows` and `reduce_columns` of `kernels/common.cuh`.
"""

import math

from flcuda.ops.arrays import Layout

THREADS = 256
WARPS = 8
# Enough blocks to fill any device of today; and the least that one thread should sum before a split is worth its cost.
_BLOCKS = 1024
_ITEMS_A_THREAD = 16


def reduction(shape: tuple[int, ...], layout: Layout) -> tuple[tuple[int, int], tuple[int, int], str]:
    """The first stage's launch shape.

    Args:
        shape: (N, C, *spatial).
        layout: of the dense array.

    Returns:
        grid (its second number is the count of splits; its first is 0 when there are no channels), block, and which
        kernel: "nchw" has a block a channel, "nhwc" 32 neighbouring channels a block.
    """
    n, channels, *spatial = shape
    items = n * math.prod(spatial)
    order = "nchw" if layout == "nchw" and math.prod(spatial) > 1 else "nhwc"
    columns = channels if order == "nchw" else -(-channels // 32)
    threads = THREADS if order == "nchw" else WARPS
    block = (THREADS, 1) if order == "nchw" else (32, WARPS)
    splits = min(-(-items // (threads * _ITEMS_A_THREAD)), _BLOCKS // max(1, columns))
    return (columns, max(1, splits)), block, order


def finish_grid(channels: int) -> tuple[int, int]:
    """The second stage's grid: a warp a channel in blocks of `WARPS` warps."""
    return -(-channels // WARPS), 1
