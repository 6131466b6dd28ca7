"""Random `Copy`s of every kind, and what they hold, element by element."""

import math

import numpy as np

from flcuda import device as devices
from flcuda.finder.copies import VECTOR, Copy

GUARD = 64


def random_copy(rng: np.random.Generator, *, windows: bool = True) -> Copy:
    """A small Copy: another layout, borders and channels, blocks or windows as channels, a slice, or all at once.

    Without `windows` no blocks overlap, so that it can be written back.
    """
    rank = int(rng.integers(1, 4))
    word = str(rng.choice(list(devices.DTYPES)))
    batch = int(rng.integers(1, 4))
    channels = int(rng.choice([1, 2, 3, 4, 5, 6, 8, 16, 17, 24]))
    space = _numbers(rng, 1, 12 if rank < 3 else 6, rank)
    staged = {"batch": batch, "channels": channels, "space": space}
    ones, zeros = (1,) * rank, (0,) * rank
    step, factor, shift = ones, ones, zeros
    kind = str(rng.choice(["layout", "border", "blocks", "slice", "all", *["windows"] * windows]))
    if kind == "layout":
        if rank == 2 and rng.random() < 0.7:
            channels, space = int(rng.integers(14, 70)), _numbers(rng, 4, 12, 2)
        padded = -(-channels // 8) * 8 if rng.random() < 0.5 else channels
        staged = {"batch": batch, "channels": padded, "space": space}
    elif kind == "border":
        shift = _numbers(rng, 0, 2, rank)
        more = _numbers(rng, 0, 2, rank)
        staged["space"] = tuple(sum(sizes) for sizes in zip(space, shift, more, strict=True))
        staged["channels"] = channels + int(rng.integers(0, 8))
        staged["batch"] = batch + int(rng.integers(0, 2))
    elif kind == "blocks":
        step = factor = _numbers(rng, 1, 4, rank)
        shift = _numbers(rng, 0, 3, rank)
        full = channels * math.prod(factor)
        staged["channels"] = -(-full // 8) * 8 if rng.random() < 0.7 else full
        staged["space"] = tuple(
            int(rng.integers(1, -(-(size + front) // count) + 2))
            for size, front, count in zip(space, shift, step, strict=True)
        )
    elif kind == "windows":
        channels = int(rng.choice([1, 2, 3, 4, 8]))
        step = _numbers(rng, 1, 3, rank)
        factor = (*_numbers(rng, 1, 3, rank - 1), int(rng.integers(1, 8)))
        shift = _numbers(rng, 0, 4, rank)
        staged["channels"] = channels * math.prod(factor)
        if rng.random() < 0.8:
            staged["channels"] = -(-staged["channels"] // 16) * 16
        staged["space"] = _numbers(rng, 1, 9, rank)
    elif kind == "slice":
        step = _numbers(rng, 1, 3, rank)
        shift = _numbers(rng, 0, 1, rank)
        staged["space"] = tuple(
            int(rng.integers(1, -(-size // count) + 1)) for size, count in zip(space, step, strict=True)
        )
    else:
        step = _numbers(rng, 1, 4, rank)
        factor = tuple(int(rng.integers(1, count + 1)) for count in step)
        shift = _numbers(rng, 0, 3, rank)
        staged["space"] = _numbers(rng, 1, 8, rank)
        staged["channels"] = channels * math.prod(factor) + int(rng.integers(0, 9))
        staged["batch"] = batch + int(rng.integers(0, 2))
    shape = (batch, channels, *space)
    itemsize = devices.DTYPES[word].itemsize
    return Copy.create(
        shape,
        _strides(rng, shape),
        word,
        layout=str(rng.choice(devices.LAYOUTS)),
        alignment=VECTOR if rng.random() < 0.75 else itemsize,
        staged_shape=(staged["batch"], staged["channels"], *staged["space"]),
        step=step,
        factor=factor,
        shift=shift,
    )


def _numbers(rng: np.random.Generator, low: int, high: int, count: int) -> tuple[int, ...]:
    return tuple(int(number) for number in rng.integers(low, high + 1, count))


def _strides(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[int, ...]:
    if rng.random() < 0.75:
        return devices.contiguous_strides(shape, str(rng.choice(devices.LAYOUTS)))
    strides = [0] * len(shape)
    step = int(rng.integers(1, 3))
    for dim in rng.permutation(len(shape)):
        strides[dim] = step
        step = step * shape[dim] + int(rng.integers(0, 3))
    return tuple(strides)


def bits(array):
    return array.view(np.dtype(f"u{array.itemsize}"))


def memory(shape, strides, dtype, alignment, rng, *, numbers=False):
    """Random bytes with an array in them: of any bits, or of standard normal numbers.

    Returns:
        The bytes, (n,), with a guard on both sides, and the array, aligned to exactly so many bytes.
    """
    extent = dtype.itemsize * (1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True)))
    raw = rng.integers(0, 256, extent + 4 * GUARD, dtype=np.uint8)
    start = GUARD + -(raw.ctypes.data + GUARD) % GUARD + (alignment if alignment < VECTOR else 0)
    array = np.ndarray(shape, dtype, raw.data, start, tuple(step * dtype.itemsize for step in strides))
    if numbers:
        array[...] = rng.standard_normal(shape).astype(dtype)
    return raw, array


def held(copy: Copy) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Pairs each place of the copy that holds something with the operand's place, by the rule as it is written."""
    pairs = []
    channels = copy.shape[1]
    for place in np.ndindex(*copy.staged_shape):
        n, channel, *space = place
        number, c = divmod(channel, channels)
        offsets = []
        for factor in reversed(copy.factor):
            number, offset = divmod(number, factor)
            offsets.insert(0, offset)
        at = tuple(
            s * step + offset - shift
            for s, step, offset, shift in zip(space, copy.step, offsets, copy.shift, strict=True)
        )
        inside = all(0 <= position < size for position, size in zip(at, copy.shape[2:], strict=True))
        if number == 0 and n < copy.shape[0] and inside:
            pairs.append((place, (n, c, *at)))
    return pairs
