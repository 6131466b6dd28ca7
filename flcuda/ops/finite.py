"""The search for NaN and infinity in gradients, on the device: in a flat storage of arrays, and in separate arrays.

Note [launches of a search]: a search is one launch when it has a ticket, a word on the device by which the block that
finishes last knows itself and makes the flags; without one a second, tiny launch makes them. Sums of squares always
take the second launch. A ticket is zero between searches, so only one search at a time may have it: one a caller, not
one for all.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from flcuda import device as devices
from flcuda import reference
from flcuda.device import Device, cupy
from flcuda.errors import FlcudaError
from flcuda.kernel_loader import launch_blocks
from flcuda.ops.arrays import (
    multiprocessors,
    new,
    on_cuda,
    require_dense,
    require_dtype,
    require_shape,
    strided_copy,
    suffix,
)

Array = Any

# As in kernels/finite.cu: threads of a block, its warps, the bytes of a row (what a warp reads by one instruction).
_THREADS = 256
_WARPS = 8
_ROW_BYTES = 512
# Four blocks keep 128 KiB under way a multiprocessor, several times what its share of the memory's latency needs.
_BLOCKS_A_MULTIPROCESSOR = 4
_FORMATS = {"f16": 0, "bf16": 1, "f32": 2, "f64": 3}
_PIECE = np.dtype(
    [("start", np.uint64), ("count", np.int64), ("array", np.int32), ("next", np.int32), ("format", np.int64)]
)


def new_ticket(place: Device) -> Array:
    """Makes what lets the searches of one caller be one launch each.

    Args:
        place: the searches' device.

    Returns:
        uint32, (1,), zero; owned by the caller. Two searches that may run at the same time need two.
    """
    return devices.zeros((1,), np.uint32, device=place)


def find_invalid(
    flat: Array,
    offsets: Array,
    flags: Array,
    *,
    sums: Array | None = None,
    inv_scale: Array | None = None,
    ticket: Array | None = None,
) -> None:
    """Says which of the arrays in a flat storage hold NaN or infinity, and sums their squares in the same pass.

    flags becomes [1 if any is invalid else 0, index of the first invalid array (n when there is none), then one 0 or 1
    an array]. On CUDA it is one launch with a ticket and without sums, else two; the host waits for none. Bits are
    tested (an exponent of all ones), so no floating-point option of a compiler can remove the test. Deterministic:
    sums are added in an order that depends on the sizes, flat's alignment to 16 bytes and the device model alone.

    Args:
        flat: one of the four dtypes, one-dimensional, C-contiguous, at any alignment; borrowed.
        offsets: int64, (n + 1,), not decreasing, within flat: array i is flat[offsets[i]:offsets[i + 1]] and may be
            empty. Borrowed; on CUDA its values are not checked.
        flags: int32, (2 + n,); borrowed, overwritten.
        sums: float64, (n,): becomes the sum of squares of each array as it is stored, added in float64; NaN or infinity
            in an array makes its sum the same. None: not wanted. Borrowed, overwritten.
        inv_scale: float64, one element: what the update will multiply by. An element counts as invalid, too, when that
            product is not finite in the accumulator's dtype (float64 for float64, else float32). None is 1. Borrowed.
        ticket: from `new_ticket`, for no other search that may run at the same time; None for two launches. Not used on
            the CPU. Borrowed.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape does not fit, an array is not contiguous, or the devices differ.
    """
    kind = suffix("flat", flat)
    require_dtype("offsets", offsets, np.int64)
    require_dtype("flags", flags, np.int32)
    if flat.ndim != 1:
        raise ValueError(f"flat: expected one dimension, got shape {flat.shape}")
    if offsets.ndim != 1 or offsets.size == 0:
        raise ValueError(f"offsets: expected (n + 1,), got shape {offsets.shape}")
    segments = offsets.size - 1
    require_shape("flags", flags, (2 + segments,))
    arrays = {"flat": flat, "offsets": offsets, "flags": flags, "sums": sums, "inv_scale": inv_scale, "ticket": ticket}
    if sums is not None:
        require_dtype("sums", sums, np.float64)
        require_shape("sums", sums, (segments,))
    if inv_scale is not None:
        require_dtype("inv_scale", inv_scale, np.float64)
        if inv_scale.size != 1:
            raise ValueError(f"inv_scale: expected one element, got shape {inv_scale.shape}")
    if ticket is not None:
        require_dtype("ticket", ticket, np.uint32)
        require_shape("ticket", ticket, (1,))
    for name, a in arrays.items():
        if a is not None:
            require_dense(name, a)
    if not on_cuda(**arrays):
        reference.find_invalid(flat, offsets, flags, sums, inv_scale)
        return
    work = Work(int(flat.data.ptr), flat.size, flat.itemsize, multiprocessors())
    memory = devices.workspace(work.workspace(segments, sums is not None))
    cells, records, marks = (np.uint64(memory.data.ptr + place) for place in work.places(segments, sums is not None))
    sizes = (np.int64(flat.size), offsets, np.int64(segments), np.int64(work.quotient), np.int64(work.remainder))
    grid, block = (work.blocks, 1), (_THREADS, 1)
    if sums is None:
        launch_blocks(
            "finite", f"find_invalid_{kind}", grid, block, flags, records, marks, ticket, flat, *sizes, inv_scale
        )
        if ticket is not None:
            return
    else:
        launch_blocks(
            "finite", f"find_invalid_sums_{kind}", grid, block, records, marks, cells, flat, *sizes, inv_scale
        )
    launch_blocks(
        "finite",
        "finish_invalid",
        (1 if sums is None else max(1, -(-segments // _WARPS)), 1),
        block,
        flags,
        records,
        marks,
        sums,
        cells,
        offsets,
        np.int64(segments),
        np.int64(work.blocks),
        np.int64(work.quotient),
        np.int64(work.remainder),
        np.int64(work.lead),
        np.int64(work.row),
    )


class Work:
    """How a search over elements in memory is shared out.

    Args:
        address: of the first element, in bytes.
        count: elements.
        itemsize: bytes of an element.
        multiprocessors: the device's.

    Attributes:
        lead: elements between the 16-byte boundary below the address and the address.
        row: elements of a row.
        rows: how many there are.
        blocks: of the launch.
        quotient, remainder: each warp has `quotient` rows, the first `remainder` warps one more.
    """

    def __init__(self, address: int, count: int, itemsize: int, multiprocessors: int) -> None:
        self.lead = address % 16 // itemsize
        self.row = _ROW_BYTES // itemsize
        self.rows = -(-(self.lead + count) // self.row) if count else 0
        self.blocks = block_count(self.rows, multiprocessors)
        self.quotient, self.remainder = divmod(self.rows, self.blocks * _WARPS)

    def places(self, segments: int, sums: bool) -> tuple[int, int, int]:
        """Where the cells, records and marks lie in the workspace, in bytes."""
        cells = 8 * (self.blocks * _WARPS + segments) if sums else 0
        return 0, cells, cells + 8 * self.blocks

    def workspace(self, segments: int, sums: bool) -> int:
        """The workspace's size in bytes."""
        return self.places(segments, sums)[2] + 4 * (self.blocks + segments)


def block_count(rows: int, multiprocessors: int) -> int:
    """The blocks of a launch over rows: what fills the device, fewer where a warp would have less than two rows."""
    return max(1, min(_BLOCKS_A_MULTIPROCESSOR * multiprocessors, -(-rows // (2 * _WARPS))))


# --- separate arrays --------------------------------------------------------------------------------------------------


def find_invalid_list(
    arrays: Sequence[Any], flags: Array | None = None, *, table: "PointerTable | None" = None
) -> Array:
    """Says which of separate arrays hold NaN or infinity.

    On CUDA it is one launch for all of them, of whatever dtypes, and the host does not wait. An array that is dense in
    memory in any order of its dimensions is read where it lies; another one is copied first. Bits are tested (an
    exponent of all ones), so no floating-point option of a compiler can remove the test. Deterministic.

    Args:
        arrays: of the four dtypes, any shapes and alignments, all on one device: NumPy, CuPy, or with ``__dlpack__``
            (PyTorch). Empty ones and None, a missing gradient, are valid. Borrowed.
        flags: int32, (2 + n,), on their device: becomes [1 if any is invalid else 0, index of the first invalid array
            (n when there is none), then one 0 or 1 an array]. Borrowed, overwritten. None: a new one is made.
        table: keeps the arrays' addresses on the device from call to call; it must outlive a CUDA graph that has
            captured the search. None: they are copied there in every call, which no capture can hold.

    Returns:
        The flags. Of no arrays, or only None: in host memory, unless flags is given.

    Raises:
        TypeError: an element is no such array, or has another dtype.
        ValueError: the devices differ, or flags has another shape.
        FlcudaError: the addresses are new and a CUDA graph is being captured.
    """
    taken = [None if a is None else devices.asarray(a, f"arrays[{i}]") for i, a in enumerate(arrays)]
    named = {f"arrays[{i}]": a for i, a in enumerate(taken) if a is not None}
    for name, a in named.items():
        suffix(name, a)
    if flags is not None:
        require_dtype("flags", flags, np.int32)
        require_shape("flags", flags, (2 + len(taken),))
        require_dense("flags", flags)
        named["flags"] = flags
    if not named or not on_cuda(**named):
        if flags is None:
            flags = np.empty(2 + len(taken), np.int32)
        reference.find_invalid_list(taken, flags)
        return flags
    if flags is None:
        flags = new((2 + len(taken),), np.int32)
    dense = [None if a is None else _dense_memory(a) for a in taken]
    table = PointerTable() if table is None else table
    table.update(dense)
    table.launch(flags)
    return flags


class PointerTable:
    """Where the arrays of a `find_invalid_list` lie, in device memory: which part of them each warp reads.

    Built at the first search and again when an address, size or dtype has changed. One search at a time: another one
    that may run on another stream at the same time needs a table of its own.
    """

    def __init__(self) -> None:
        self._key: tuple[int, tuple[tuple[int, int, str] | None, ...]] | None = None
        self._memory: Array = None
        self._marks: Array = None
        self._blocks = 0
        self._pieces = 0

    def update(self, arrays: Sequence[Array | None]) -> None:
        """Takes the arrays of the next search.

        Args:
            arrays: CuPy arrays on the current device, dense in memory, and None; borrowed, not kept alive.

        Raises:
            FlcudaError: they lie elsewhere than before and a CUDA graph is being captured.
        """
        index = cupy().cuda.runtime.getDevice()
        parts = tuple(None if a is None else (int(a.data.ptr), int(a.size), suffix("arrays", a)) for a in arrays)
        if self._key == (index, parts):
            return
        if devices.is_capturing():
            raise FlcudaError(
                "The arrays lie elsewhere than in the table, and no CUDA graph can hold the copy of their addresses: "
                "search once with this table and these arrays before the capture"
            )
        pieces, self._blocks = pieces_of(parts, multiprocessors())
        self._pieces = len(pieces)
        # One copy brings the ticket, zero, behind the pieces. New memory: a search of the old ones may be under way.
        self._memory = cupy().asarray(np.concatenate([pieces.view(np.uint8), np.zeros(4, np.uint8)]))
        self._marks = cupy().empty(self._pieces, np.int32)
        self._key = (index, parts)

    def launch(self, flags: Array) -> None:
        """Launches the search on CuPy's current stream.

        Args:
            flags: int32, (2 + n,), as for `find_invalid_list`, for the arrays of the last update.
        """
        launch_blocks(
            "finite",
            "find_invalid_list",
            (self._blocks, 1),
            (_THREADS, 1),
            flags,
            self._marks,
            np.uint64(self._memory.data.ptr + self._pieces * _PIECE.itemsize),
            self._memory,
            np.int64(self._pieces),
            np.int64(flags.size - 2),
        )


def pieces_of(parts: Sequence[tuple[int, int, str] | None], multiprocessors: int) -> tuple[np.ndarray[Any, Any], int]:
    """Shares arrays out among the warps of a launch, in rows: a piece is what one warp reads of one array.

    Args:
        parts: address, number of elements and kernel suffix of each array, or None.
        multiprocessors: the device's.

    Returns:
        The pieces, as kernels/finite.cu has them: warp w begins with piece w; and the blocks of the launch.
    """
    present = [(i, *part) for i, part in enumerate(parts) if part is not None and part[1] > 0]
    arrays = np.array([part[0] for part in present], np.int32)
    addresses = np.array([part[1] for part in present], np.uint64)
    counts = np.array([part[2] for part in present], np.int64)
    formats = np.array([_FORMATS[part[3]] for part in present], np.int64)
    itemsizes = np.array([2, 2, 4, 8], np.int64)[formats]
    leads = (addresses % np.uint64(16)).astype(np.int64) // itemsizes
    in_row = _ROW_BYTES // itemsizes
    ends = np.cumsum(-(-(leads + counts) // in_row))
    rows = int(ends[-1]) if len(ends) else 0
    blocks = block_count(rows, multiprocessors)
    warps = blocks * _WARPS
    quotient, remainder = divmod(rows, warps)
    starts = np.arange(warps, dtype=np.int64) * quotient + np.minimum(np.arange(warps), remainder)
    # A piece begins where a warp's rows or an array's begin.
    begins = np.unique(np.concatenate([starts[starts < rows], ends[:-1]]))
    stops = np.append(begins[1:], rows)[: len(begins)]
    owner = np.searchsorted(starts, begins, side="right") - 1
    array = np.searchsorted(ends, begins, side="right")
    first_row = np.append(0, ends)[array]
    lower = np.maximum((begins - first_row) * in_row[array] - leads[array], 0)
    upper = np.minimum((stops - first_row) * in_row[array] - leads[array], counts[array])
    # The first piece of a warp has the warp's place, the others follow behind all those.
    leading = np.append(True, owner[1:] != owner[:-1])[: len(owner)]
    place = np.where(leading, owner, warps - 1 + np.cumsum(~leading))
    pieces = np.zeros(warps + int((~leading).sum()), _PIECE)
    pieces["array"] = -1
    pieces["next"] = -1
    pieces["start"][place] = addresses[array] + (lower * itemsizes[array]).astype(np.uint64)
    pieces["count"][place] = upper - lower
    pieces["array"][place] = arrays[array]
    pieces["format"][place] = formats[array]
    pieces["next"][place[:-1][~leading[1:]]] = place[1:][~leading[1:]]
    return pieces, blocks


def _dense_memory(a: Array) -> Array:
    """The array itself when its elements fill its memory in some order, else a copy that is C-contiguous."""
    expected = a.itemsize
    for step, size in sorted((step, size) for step, size in zip(a.strides, a.shape, strict=True) if size > 1):
        if step != expected and a.size:
            out = new(a.shape, a.dtype)
            strided_copy(a, out)
            return out
        expected *= size
    return a
