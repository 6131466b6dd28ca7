"""Images from many places into one array, in one launch."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from flcuda.device import cupy
from flcuda.kernel_loader import launch_blocks
from flcuda.ops.arrays import require_dense, require_dtype

Array = Any

_THREADS = 256
# A copy has so many blocks: of a photograph of 500x375 each thread moves some ten vectors of 16 bytes.
_BLOCKS = 16
_MOST = 65535  # rows of blocks of a launch


def gather_images(
    pixels: Array,
    offsets: ArrayLike,
    sources: ArrayLike,
    rows: ArrayLike,
    row_bytes: ArrayLike,
    pitches: ArrayLike | None = None,
) -> None:
    """Copies images from device memory into an array, on the current stream.

    Mostly one launch: a copy for each image would keep the host, and Python's lock, for some microseconds an image.

    Args:
        pixels: uint8 (bytes,), on CUDA, its device current; written where images go, borrowed.
        offsets: integers (n,), NumPy or a sequence, as all that follow: the byte in pixels at which each image begins.
        sources: the address of each on the same device; not checked. Multiples of 16, as offsets, are faster.
        rows: of each.
        row_bytes: bytes of a row of each; rows follow one another without gaps in pixels.
        pitches: bytes from row to row in the source; None where there are no gaps either.

    Raises:
        TypeError: pixels are not uint8.
        ValueError: pixels are not one dense dimension, the lists are not of one length, or an image does not fit.
    """
    require_dtype("pixels", pixels, np.uint8)
    require_dense("pixels", pixels)
    lists = (sources, offsets, rows, row_bytes, row_bytes if pitches is None else pitches)
    columns = [np.asarray(each, np.int64) for each in lists]
    if len({each.shape for each in columns}) != 1 or columns[0].ndim != 1:
        shapes = ", ".join(str(each.shape) for each in columns)
        raise ValueError(f"sources, offsets, rows, row_bytes and pitches must be (n,) alike, not {shapes}")
    if not len(columns[0]):
        return
    # As kernels/images.cu reads it.
    table = np.stack(columns, axis=1)
    ends = table[:, 1] + table[:, 2] * table[:, 3]
    if pixels.ndim != 1 or int(ends.max()) > pixels.size or int(table[:, 1:].min()) < 0:
        raise ValueError(f"pixels: {pixels.shape} do not hold images that end at {int(ends.max())}")
    moved = cupy().asarray(table)
    for start in range(0, len(table), _MOST):
        part = moved[start : start + _MOST]
        launch_blocks("images", "gather_bytes", (_BLOCKS, len(part)), (_THREADS, 1), pixels, part)
