"""Packed copies of operands in another form, and the way back: what a rewritten convolution works on.

A `Copy` says what form: borders of zeros, more channels or filters than the operand has, another layout, blocks of
space as channels, every other position. One rule holds them all. With C the operand's channels, the copy's element
(n, c', *s) is the operand's element (n, c, *(s * step + f - shift)), where c' counts the offsets f within a block, the
last dimension fastest, and then c; it is zero where the operand has none. Blocks may overlap, as the windows of a
filter do: such a copy is not written back.

On CUDA the kernels of kernels/rewrite.cu do it on CuPy's current stream, on the CPU NumPy does, with the same bits.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flcuda import device as devices
from flcuda import kernel_loader
from flcuda.finder.problem import same_strides

VECTOR = 16
"""Bytes that a thread moves at once where addresses and strides allow it; a copy is aligned to them."""

LARGEST_RANK = 3
"""Spatial dimensions that the kernels take."""

KERNELS = "rewrite"
"""The kernel file."""

_LARGEST = 2**30
_MOST_ROWS = 64
_THREADS = 256
_ITEMS = 8
_TILE_LINES = 8
# of kernels/rewrite.cu; and how large a tile of lines is at most, and how narrow at least
_LINES_BYTES = 16384
_LINE_CHANNELS = 1024
_MOST_TILE_ROWS = 16
_FEWEST_COLUMNS = 16
# a side of a matrix below which tiles are mostly empty
_SMALLEST_SIDE = 16
# blocks that fill any GPU of today several times, and the most of a launch; the kernels loop
_FULL = 3072
_MOST_BLOCKS = 1 << 16


@dataclass(frozen=True, slots=True)
class Copy:
    """The packed copy of one operand.

    Attributes:
        shape: of the operand, (N, C, *spatial).
        strides: of the operand, in elements.
        dtype: word of both.
        alignment: bytes that divide the operand's address.
        staged_shape: of the copy: its batch and channels at least those of the operand (times the block), its spatial
            sizes any.
        layout: in which the copy is packed, "nchw" or "nhwc".
        step: distance of the operand's positions, or blocks, that are neighbours in the copy, a spatial dimension each.
        factor: size of a block; above the step, blocks overlap.
        shift: zeros in front.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    alignment: int
    staged_shape: tuple[int, ...]
    layout: str
    step: tuple[int, ...]
    factor: tuple[int, ...]
    shift: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.step) < 1 or min(self.factor) < 1 or self.staged_shape[1] < self.shape[1] * math.prod(self.factor):
            raise ValueError(f"step {self.step}, factor {self.factor}: they do not make {self.staged_shape}")
        if self.staged_shape[0] < self.shape[0]:
            raise ValueError(f"staged_shape {self.staged_shape}: its batch must be {self.shape[0]} or more")

    @classmethod
    def create(
        cls,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: str,
        *,
        layout: str,
        alignment: int = VECTOR,
        staged_shape: Sequence[int] | None = None,
        step: Sequence[int] | None = None,
        factor: Sequence[int] | None = None,
        shift: Sequence[int] | None = None,
    ) -> "Copy":
        """Makes a Copy; what is not given leaves the operand as it is.

        Args:
            shape: as the attribute.
            strides: as the attribute.
            dtype: as the attribute.
            layout: as the attribute.
            alignment: as the attribute.
            staged_shape: as the attribute; by default `shape`.
            step: as the attribute; by default 1.
            factor: as the attribute; by default 1.
            shift: as the attribute; by default 0.

        Raises:
            ValueError: the copy does not hold the operand's batch or channels, or a size is below 1.
        """
        rank = len(shape) - 2
        return cls(
            shape=tuple(shape),
            strides=tuple(strides),
            dtype=dtype,
            alignment=alignment,
            staged_shape=tuple(shape if staged_shape is None else staged_shape),
            layout=layout,
            step=(1,) * rank if step is None else tuple(step),
            factor=(1,) * rank if factor is None else tuple(factor),
            shift=(0,) * rank if shift is None else tuple(shift),
        )

    @property
    def staged_strides(self) -> tuple[int, ...]:
        """Strides of the copy, in elements."""
        return devices.contiguous_strides(self.staged_shape, self.layout)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return devices.DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return math.prod(self.staged_shape) * self.itemsize

    @property
    def plain(self) -> bool:
        """Whether positions stay what they are: no border, blocks or steps."""
        return set(self.step) == {1} and not any(self.shift) and self.staged_shape[2:] == self.shape[2:]

    @property
    def overlaps(self) -> bool:
        """Whether the copy may hold an element more than once."""
        return any(factor > step for factor, step in zip(self.factor, self.step, strict=True))

    @property
    def is_possible(self) -> bool:
        """Whether the kernels take it: at most three spatial dimensions, and what a row holds counts in 30 bits."""
        if len(self.step) > LARGEST_RANK:
            return False
        channels = (1,) * (len(self.step) - 1) + (self.staged_shape[1],)
        reaches = [self.shape[0], self.staged_shape[0], self.staged_shape[1]]
        for size, count, step, factor, shift, each in zip(
            self.shape[2:], self.staged_shape[2:], self.step, self.factor, self.shift, channels, strict=True
        ):
            reaches += [(size + shift) * each, (count * step + factor + shift) * each]
        return max(reaches) <= _LARGEST

    def placing(self) -> Callable[[Any, int], Any]:
        """Returns what makes the array of the copy in scratch memory.

        It takes a uint8 array of CuPy or NumPy, which the new array keeps alive, and the copy's offset in it in bytes,
        a multiple of `VECTOR`; it gives an array of `staged_shape`, not initialised.
        """
        shape, dtype = self.staged_shape, devices.DTYPES[self.dtype]
        steps = tuple(step * dtype.itemsize for step in self.staged_strides)

        def place(memory: Any, start: int) -> Any:
            if isinstance(memory, np.ndarray):
                return np.ndarray(shape, dtype, memory.data, start, steps)
            return devices.cupy().ndarray(shape, dtype, memory.data + start, steps)

        return place

    def gathering(self) -> "Transfer":
        """Returns what makes the copy: called with the copy and the operand."""
        return Transfer(self, gather=True, add=False)

    def scattering(self, *, add: bool) -> "Transfer":
        """Returns what writes the copy back: called with the operand and the copy.

        What the copy holds nothing for becomes zero.

        Args:
            add: add to the operand instead (16-bit types: in float32, rounded once).

        Raises:
            ValueError: blocks overlap.
        """
        if self.overlaps:
            raise ValueError(
                f"factor {self.factor} is above step {self.step}: blocks that overlap are not written back"
            )
        return Transfer(self, gather=False, add=add)


class Transfer:
    """One way of a Copy: called with the array to write and the array to read, both of the Copy.

    On CUDA it belongs to the device that is current when it is prepared, or first called. Nothing is allocated there,
    and after that it may be captured.
    """

    def __init__(self, copy: Copy, *, gather: bool, add: bool) -> None:
        self._copy = copy
        self._gather = gather
        self._add = add
        self._run: Callable[[Any, Any], None] | None = None

    def __call__(self, target: Any, source: Any) -> None:
        """Writes `target`, or adds to it, on CuPy's current stream.

        Args:
            target: the copy when it is made, else the operand; borrowed.
            source: the other of the two; borrowed.
        """
        if isinstance(target, np.ndarray):
            if self._gather:
                _gather(self._copy, target, source)
            else:
                _scatter(self._copy, target, source, self._add)
            return
        run = self._run or self.prepare()
        run(target, source)

    def prepare(self) -> Callable[[Any, Any], None]:
        """Compiles and loads the kernel for the current device; a call does it otherwise.

        Returns:
            What launches it on two CuPy arrays.
        """
        launch = launch_of(self._copy, gather=self._gather, add=self._add)
        kernel = kernel_loader.load_module(KERNELS).get_function(launch.function)
        grid, block, arguments = launch.grid, launch.block, launch.arguments

        def run(target: Any, source: Any) -> None:
            kernel(grid, block, (target, source, *arguments))

        self._run = run
        return run


# --- NumPy ------------------------------------------------------------------------------------------------------------


def _bits(array: Any) -> Any:
    return array.view(np.dtype(f"u{array.itemsize}"))


def _parts(copy: Copy) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Pairs the parts of the copy with the parts of the operand that they hold, one pair an offset within a block."""
    batch, channels = copy.shape[:2]
    parts = []
    for number, offsets in enumerate(itertools.product(*map(range, copy.factor))):
        staged = [slice(0, batch), slice(number * channels, (number + 1) * channels)]
        given = [slice(None), slice(None)]
        for size, count, step, shift, offset in zip(
            copy.shape[2:], copy.staged_shape[2:], copy.step, copy.shift, offsets, strict=True
        ):
            # the positions s with 0 <= s * step + offset - shift < size
            first = max(0, -((offset - shift) // step))
            last = min(count, (size - 1 - offset + shift) // step + 1)
            last = max(first, last)
            start = first * step + offset - shift
            staged.append(slice(first, last))
            given.append(slice(start, start + (last - first) * step, step) if last > first else slice(0, 0))
        parts.append((tuple(staged), tuple(given)))
    return parts


def _gather(copy: Copy, staged: Any, source: Any) -> None:
    staged, source = _bits(staged), _bits(source)
    staged[...] = 0
    for inside, given in _parts(copy):
        staged[inside] = source[given]


def _scatter(copy: Copy, target: Any, staged: Any, add: bool) -> None:
    compute = np.promote_types(np.float32, target.dtype) if target.itemsize > 2 else np.dtype(np.float32)
    if not add:
        _bits(target)[...] = 0
    for inside, given in _parts(copy):
        if add:
            with np.errstate(all="ignore"):
                total = target[given].astype(compute) + staged[inside].astype(compute)
                target[given] = total.astype(target.dtype)
        else:
            _bits(target)[given] = _bits(staged)[inside]


# --- CUDA -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of a kernel of kernels/rewrite.cu.

    Attributes:
        function: its name.
        grid: blocks.
        block: threads of a block.
        arguments: what follows the two arrays.
    """

    function: str
    grid: tuple[int, int]
    block: tuple[int, int]
    arguments: tuple[np.generic, ...]


@dataclass(frozen=True, slots=True)
class _Map:
    """A Copy as the kernels take it: five dimensions n, c, d, h, w."""

    staged: tuple[int, ...]
    staged_strides: tuple[int, ...]
    size: tuple[int, ...]
    strides: tuple[int, ...]
    step: tuple[int, ...]
    factor: tuple[int, ...]
    shift: tuple[int, ...]

    @classmethod
    def of(cls, copy: Copy) -> "_Map":
        missing = LARGEST_RANK - len(copy.step)

        def raised(values: tuple[int, ...], filling: int) -> tuple[int, ...]:
            return (*values[:2], *(filling,) * missing, *values[2:])

        return cls(
            staged=raised(copy.staged_shape, 1),
            staged_strides=raised(copy.staged_strides, 0),
            size=raised(copy.shape, 1),
            strides=raised(copy.strides, 0),
            step=(1,) * missing + copy.step,
            factor=(1,) * missing + copy.factor,
            shift=(0,) * missing + copy.shift,
        )

    def merged(self) -> "_Map | None":
        """Makes one dimension of width and channels where the operand has no gaps there; None where it has."""
        channels, width = self.size[1], self.size[4]
        if channels > 1 and self.strides[1] != 1:
            return None
        if width > 1 and self.strides[4] != channels:
            return None
        last = (self.step[2], self.factor[2], self.shift[2])
        step, factor, shift = (
            (*old[:2], value * channels) for old, value in zip((self.step, self.factor, self.shift), last, strict=True)
        )
        return _Map(
            staged=self.staged,
            staged_strides=self.staged_strides,
            size=(self.size[0], 1, *self.size[2:4], width * channels),
            strides=(self.strides[0], 1, *self.strides[2:4], 1),
            step=step,
            factor=factor,
            shift=shift,
        )

    def arguments(self) -> tuple[np.generic, ...]:
        return (
            *map(np.int32, self.staged),
            *map(np.int64, self.staged_strides),
            *map(np.int32, self.size),
            *map(np.int64, self.strides),
            *map(np.int32, self.step),
            *map(np.int32, self.factor),
            *map(np.int32, self.shift),
        )


def launch_of(copy: Copy, *, gather: bool, add: bool = False) -> Launch:
    """Chooses the kernel of a Copy, and the shape of its launch.

    Args:
        copy: one that `is_possible`.
        gather: make the copy; else write it back.
        add: when writing back, add.

    Returns:
        The launch.
    """
    found = _transposition(copy, gather=gather, add=add)
    if found is not None:
        return found
    dtype = devices.DTYPES[copy.dtype]
    suffix = f"bytes{dtype.itemsize}" if gather else kernel_loader.SUFFIXES[dtype]
    lanes = VECTOR // dtype.itemsize
    whole = _Map.of(copy)
    last_channels = copy.layout == "nhwc"
    wide = last_channels and _is_wide(whole, copy.alignment, lanes)
    merged = whole.merged()
    if gather and not (wide and whole.staged[1] % lanes == 0):
        launch = _lines(copy, whole if merged is None else merged, suffix)
        if launch is not None:
            return launch
    if gather and last_channels and whole.staged[1] % lanes == 0:
        row_count = whole.staged[0] * whole.staged[2] * whole.staged[3]
        items = whole.staged[4] * (whole.staged[1] // lanes)
        if wide:
            return _in_rows(f"gather_wide_{suffix}", row_count, items, whole)
        return _in_rows(f"gather_channels_{suffix}", row_count, items, whole)
    if gather:
        return _in_rows(f"gather_rows_{suffix}", math.prod(whole.staged[:4]), whole.staged[4], whole)
    flag = (np.int32(add),)
    if wide and whole.staged[1] % lanes == 0:
        row_count = whole.size[0] * whole.size[2] * whole.size[3]
        items = whole.size[4] * (whole.size[1] // lanes)
        return _in_rows(f"scatter_channels_{suffix}", row_count, items, whole, flag)
    chosen = merged if last_channels and merged is not None else whole
    return _in_rows(f"scatter_rows_{suffix}", math.prod(chosen.size[:4]), chosen.size[4], chosen, flag)


def _lines(copy: Copy, mapping: _Map, suffix: str) -> Launch | None:
    """Makes the launch of a copy by way of lines in shared memory; None where it does not fit or does not pay."""
    unit = VECTOR // copy.itemsize
    channels, width = mapping.staged[1], mapping.staged[4]
    if (mapping.size[4] > 1 and mapping.strides[4] != 1) or channels > _LINE_CHANNELS:
        return None
    if copy.layout == "nhwc":
        vector = unit if channels % unit == 0 else 4
        if channels % vector or vector * copy.itemsize < 8 or channels // vector > _THREADS:
            return None
        name = "lines" if vector == unit else "quads"
    else:
        # what is as long a row as it is now needs no detour
        if mapping.step[2] == 1 and math.prod(mapping.factor) == 1:
            return None
        name = "planes"
    count = mapping.factor[0] * mapping.factor[1] * mapping.size[1]
    room = _LINES_BYTES // (copy.itemsize * count)

    def pitch_of(columns: int) -> int:
        return -(-(unit - 1 + (columns - 1) * mapping.step[2] + mapping.factor[2]) // unit) * unit

    columns = width
    if pitch_of(width) > room:
        columns = ((room // unit - 1) * unit + 1 - mapping.factor[2]) // mapping.step[2] + 1
        if columns < min(width, _FEWEST_COLUMNS):
            return None
    pitch = pitch_of(columns)
    rows = mapping.staged[0] * mapping.staged[2] * mapping.staged[3]
    at_once = max(1, min(room // pitch, _MOST_TILE_ROWS)) if columns == width else 1
    across = -(-width // columns)
    while at_once > 1 and -(-rows // at_once) < _FULL:
        at_once //= 2
    wide = copy.alignment >= VECTOR and all(
        size == 1 or step % unit == 0 for size, step in zip(mapping.size[:4], mapping.strides[:4], strict=True)
    )
    arguments = (*mapping.arguments(), *map(np.int32, (at_once, columns, pitch, wide)))
    tiles = -(-rows // at_once) * across
    return Launch(f"gather_{name}_{suffix}", (min(tiles, _MOST_BLOCKS), 1), (32, _THREADS // 32), arguments)


def _is_wide(whole: _Map, alignment: int, lanes: int) -> bool:
    """Says whether an operand's channels can be moved a vector at a time."""
    if alignment < VECTOR or whole.size[1] % lanes or whole.strides[1] != 1:
        return False
    return all(
        size == 1 or step % lanes == 0
        for dim, (size, step) in enumerate(zip(whole.size, whole.strides, strict=True))
        if dim != 1
    )


def _in_rows(function: str, rows: int, items: int, mapping: _Map, more: tuple[np.generic, ...] = ()) -> Launch:
    """Shapes a launch over rows: threads along a row as far as it reaches, then several rows."""
    along = min(_THREADS, 1 << (items - 1).bit_length())
    beside = min(_MOST_ROWS, _THREADS // along)
    at_once = min(_MOST_ROWS, max(beside, _ITEMS))
    # few rows: fewer a block, so that more blocks have work
    while at_once > beside and at_once > 1 and rows < at_once * _FULL:
        at_once //= 2
    shares = -(-rows // at_once)
    parts = max(1, min(-(-items // along), -(-_FULL // shares)))
    arguments = (*mapping.arguments(), np.int32(at_once), *more)
    return Launch(function, (min(shares, _MOST_BLOCKS), parts), (along, beside), arguments)


def _transposition(copy: Copy, *, gather: bool, add: bool) -> Launch | None:
    """Makes the launch of a Copy that only changes the layout, and perhaps has more channels; None for another."""
    space = math.prod(copy.shape[2:])
    channels, staged_channels = copy.shape[1], copy.staged_shape[1]
    other = "nhwc" if copy.layout == "nchw" else "nchw"
    if not copy.plain or not same_strides(copy.shape, copy.strides, devices.contiguous_strides(copy.shape, other)):
        return None
    if min(space, channels) < _SMALLEST_SIDE or (gather and copy.staged_shape[0] != copy.shape[0]):
        return None
    last_channels = copy.layout == "nhwc"
    if gather and not last_channels and staged_channels != channels:
        return None
    outer = copy.shape[0]
    mine, staged = channels * space, staged_channels * space
    if gather and last_channels:
        rows, columns, padded, pitches = channels, space, staged_channels, (space, mine, staged_channels, staged)
    elif gather:
        rows, columns, padded, pitches = space, channels, space, (channels, mine, space, staged)
    elif last_channels:
        rows, columns, padded, pitches = space, channels, space, (staged_channels, staged, space, mine)
    else:
        rows, columns, padded, pitches = channels, space, channels, (space, staged, channels, mine)
    dtype = devices.DTYPES[copy.dtype]
    even = dtype.itemsize == 2 and copy.alignment >= 4 and not any(number % 2 for number in (columns, padded, *pitches))
    tile = 64 if even else 32
    tiles = outer * -(-columns // tile) * -(-padded // tile)
    name = f"transpose_{'pairs_' if even else ''}{kernel_loader.SUFFIXES[dtype]}"
    arguments = tuple(map(np.int64, (outer, rows, columns, padded, *pitches)))
    return Launch(name, (min(tiles, _MOST_BLOCKS), 1), (32, _TILE_LINES), (*arguments, np.int32(add)))
