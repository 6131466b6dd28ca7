"""Joining the flag arrays of several searches for invalid gradients, on the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from flcuda.device import array_module
from flcuda.ops.arrays import require_dtype, require_shape

Array = Any


def join_flags(parts: Sequence[Array], out: Array) -> None:
    """Makes one flag array, as `find_invalid` leaves it, of those of several storages.

    Args:
        parts: int32, (2 + n_i,) each, as `find_invalid` left them; at least one; borrowed.
        out: int32, (2 + the sum of n_i,); borrowed, overwritten. Arrays are counted through in the order of parts.

    Raises:
        TypeError: a dtype is not int32, or NumPy and CuPy arrays are mixed.
        ValueError: out has another size.
    """
    require_dtype("out", out, np.int32)
    for part in parts:
        require_dtype("parts", part, np.int32)
    require_shape("out", out, (2 + sum(part.size - 2 for part in parts),))
    xp = array_module(out, *parts)
    # Part by part: CuPy's concatenate copies the addresses of more than eight arrays from the host, which no capture
    # survives.
    start = out.size - 2
    out[0:1] = 0
    out[1:2] = start
    for part in reversed(parts):
        stop, start = start, start - (part.size - 2)
        out[2 + start : 2 + stop] = part[2:]
        out[0:1] |= part[0:1]
        out[1:2] = xp.where(part[0:1] != 0, part[1:2] + np.int32(start), out[1:2])
