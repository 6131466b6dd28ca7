"""The launch shapes of the reductions over everything but the channel, and of batch norm's other passes.

Stage one: blocks of the grid (channels, splits) reduce a part of a channel's elements each. Stage two: a warp a channel
combines the parts in a fixed order. The numbers depend on the shape and layout alone, so two runs are equal bit for
bit, also on different devices. The kernels are `reduce_rows` and `reduce_columns` of `kernels/common.cuh`.

Batch norm's passes have a launch shape of their own, `tiles`: that of `kernels/batch_norm.cuh`. It depends on the
number of multiprocessors as well, because each should have the same share of the blocks: two runs are equal bit for bit
on devices of one model.
"""

import functools
import math
from dataclasses import dataclass
from typing import Literal

from flcuda.ops.arrays import Layout

THREADS = 256
WARPS = 8
# Enough blocks to fill any device of today; and the least that one thread should sum before a split is worth its cost.
_BLOCKS = 1024
_ITEMS_A_THREAD = 16

_TILE_CHANNELS = 64
_WARP = 32

Width = Literal["vector", "scalar"]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a pass.

    Attributes:
        nhwc: threads of a block, and blocks on each multiprocessor, all of which run at once.
        nchw: the same for this order.
    """

    nhwc: tuple[int, int]
    nchw: tuple[int, int]


MAPPING = Blocks(nhwc=(384, 2), nchw=(384, 2))
"""A pass without sums: `NORM_THREADS` of `kernels/batch_norm.cuh`."""

SUMMING = Blocks(nhwc=(256, 2), nchw=(512, 2))
"""A pass with sums: `REDUCTION` of `kernels/batch_norm.cuh`. Few parts to add up, and yet enough loads under way."""


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


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a pass of batch norm is launched.

    Attributes:
        order: "nchw" or "nhwc", of the kernel: nchw without space is nhwc.
        lanes: threads side by side in a row of nhwc; 1 for nchw.
        slots: channels of a tile.
        threads: of a block.
        grid: (tiles, splits).
    """

    order: Literal["nchw", "nhwc"]
    lanes: int
    slots: int
    threads: int
    grid: tuple[int, int]


@functools.cache
def tiles(
    shape: tuple[int, ...], layout: Layout, elements: int, at_once: int, blocks: Blocks, processors: int
) -> Tiles:
    """Divides a dense array among blocks.

    Args:
        shape: (N, C, *spatial).
        layout: of the array.
        elements: what a thread reads in one access; must divide a row of the order.
        at_once: accesses of a thread that a block takes together; 1 of a pass with sums.
        blocks: of the pass.
        processors: multiprocessors of the device.

    Returns:
        The launch shape; no tiles when there are no channels.
    """
    n, channels, *spatial = shape
    space = math.prod(spatial)
    if layout == "nchw" and space > 1:
        threads, each = blocks.nchw
        count, step, columns, lanes, slots = n * space // elements, threads, channels, 1, 1
        order: Literal["nchw", "nhwc"] = "nchw"
    else:
        threads, each = blocks.nhwc
        needed = -(-channels // elements)
        lanes = 1 << max(0, needed - 1).bit_length()
        lanes = min(lanes, _WARP, max(1, _TILE_CHANNELS // elements))
        count, step, columns, slots = n * space, threads // lanes, -(-needed // lanes), lanes * elements
        order = "nhwc"
    chunks = -(-count // (step * at_once))
    splits = max(1, min(chunks, processors * each // max(1, columns)))
    return Tiles(order, lanes, slots, threads, (columns, splits))
