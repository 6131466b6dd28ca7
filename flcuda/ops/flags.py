"""Joining the flag arrays of several searches for invalid gradients, on the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from flcuda.kernel_loader import BLOCK, launch_blocks
from flcuda.ops.arrays import on_cuda, require_dense, require_dtype, require_shape

Array = Any

# As in kernels/finite.cu.
_PARTS_A_LAUNCH = 4


def join_flags(parts: Sequence[Array], out: Array) -> None:
    """Makes one flag array, as `find_invalid` leaves it, of those of several storages.

    On CUDA one small launch joins up to four of them.

    Args:
        parts: int32, (2 + n_i,) each, C-contiguous, as `find_invalid` left them; at least one; borrowed.
        out: int32, (2 + the sum of n_i,), C-contiguous; borrowed, overwritten. Arrays are counted through in the order
            of parts.

    Raises:
        TypeError: a dtype is not int32.
        ValueError: there is no part, out has another size, an array is not contiguous, or the devices differ.
    """
    if not parts:
        raise ValueError("parts: expected at least one flag array, got none")
    named = {"out": out, **{f"parts[{i}]": part for i, part in enumerate(parts)}}
    for name, a in named.items():
        require_dtype(name, a, np.int32)
    arrays = sum(part.size - 2 for part in parts)
    require_shape("out", out, (2 + arrays,))
    for name, a in named.items():
        require_dense(name, a)
    before = 0
    if not on_cuda(**named):
        out[:2] = 0, arrays
        for part in parts:
            out[2 + before : part.size + before] = part[2:]
            if part[0] and not out[0]:
                out[:2] = 1, before + part[1]
            before += part.size - 2
        return
    for start in range(0, len(parts), _PARTS_A_LAUNCH):
        group: list[Array | None] = list(parts[start : start + _PARTS_A_LAUNCH])
        sizes = [part.size - 2 for part in parts[start : start + _PARTS_A_LAUNCH]]
        missing = _PARTS_A_LAUNCH - len(group)
        pairs = zip(group + [None] * missing, sizes + [0] * missing, strict=True)
        given = [value for part, size in pairs for value in (part, np.int64(size))]
        launch_blocks("finite", "join_flags", (1, 1), (BLOCK, 1), out, np.int64(arrays), np.int64(before), *given)
        before += sum(sizes)
