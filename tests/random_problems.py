"""Random convolutions of every kind with operands that show any wrong element, and what must come out of them.

The inputs are a few small whole numbers among zeros, so that every sum is exact in every dtype, TF32 too: a result is
right or wrong, and nothing is close. Only methods that transform what they multiply (Fourier, Winograd) get a
tolerance. Whatever must not be read is NaN: the gaps between strides and the memory around each operand. Whatever must
not be written is compared afterwards.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from flcuda import device as devices
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem, output_shape

LARGEST_SUM = 200
"""Magnitudes of products that one output may sum: whole numbers up to 256 are exact in bfloat16."""

_PRODUCTS = 8
_GUARD = 512
_BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
# NaNs that no computation makes.
_POISON = {"float16": 0x7E5A, "bfloat16": 0x7FDA, "float32": 0x7FC5A5A5, "float64": 0x7FF85A5A5A5A5A5A}


# --- problems ---------------------------------------------------------------------------------------------------------


def random_problems(seed: int, part: int, count: int) -> Iterator[tuple[ConvolutionProblem, np.random.Generator]]:
    """Yields problems, each with a generator of its own: any one can be made again without the others."""
    for index in range(count):
        rng = np.random.default_rng([seed, part, index])
        yield random_problem(rng), rng


def random_problem(rng: np.random.Generator) -> ConvolutionProblem:
    """A small problem of any kind."""

    def chance(probability):
        return rng.random() < probability

    def numbers(low, high, size):
        return tuple(int(n) for n in rng.integers(low, high + 1, size))

    while True:
        rank = int(rng.choice([1, 2, 2, 2, 3]))
        groups = int(rng.choice([1, 1, 1, 2, 3, 8]))
        # Engines differ by whether the channels fill vectors.
        channels, filters = ((8 * n if chance(0.4) else n) for n in numbers(1, 9 if groups == 1 else 4, 2))
        if chance(0.2):
            channels = 1
        size = numbers(1, 14 if rank < 3 else 7, rank)
        kernel = numbers(1, 5 if rank < 3 else 3, rank) if chance(0.8) else (1,) * rank
        before = numbers(0, 3, rank)
        after = numbers(0, 3, rank) if chance(0.3) else before
        stride, dilation = (numbers(1, high, rank) if chance(0.5) else (1,) * rank for high in (3, 2))
        x_shape = (*numbers(1, 5, 1), groups * channels, *size)
        w_shape = (groups * filters, channels, *kernel)
        try:
            y_shape = output_shape(x_shape, w_shape, before, after, stride, dilation, groups)
        except ValueError:
            continue
        direction = str(rng.choice(DIRECTIONS))
        word = str(rng.choice(["float32", "tf32", "float16", "bfloat16", "float64"]))
        words = [direction, word, str(rng.choice(["nchw", "nhwc"])), f"n{x_shape[0]}", f"c{x_shape[1]}", _times(size)]
        words += [f"k{w_shape[0]}", _times(kernel), f"g{groups}", f"s{_times(stride)}", f"d{_times(dilation)}"]
        words.append("p" + _times(f"{b}:{a}" for b, a in zip(before, after, strict=True)))
        if word in ("float16", "bfloat16"):
            words += ["out:float32"] * chance(0.1) + ["fma"] * chance(0.1)
        if chance(0.25):
            words.append("acc")
        if chance(0.25):
            for letter, shape in zip("xwy", (x_shape, w_shape, y_shape), strict=True):
                if chance(0.5):
                    words.append(f"{letter}s:{_times(_random_strides(shape, rng))}")
        if chance(0.1):
            words.append(f"align:{_times(int(n) for n in rng.choice([8, 16], 3))}")
        return ConvolutionProblem.parse(" ".join(words))


def _times(entries) -> str:
    return "x".join(str(entry) for entry in entries)


def _random_strides(shape, rng) -> tuple[int, ...]:
    """Strides of a part of a larger array whose dimensions stand in any order, the last one or the channels fastest."""
    fastest = int(rng.choice([1, len(shape) - 1]))
    rest = [int(dim) for dim in rng.permutation(len(shape)) if dim != fastest]
    strides = [0] * len(shape)
    step = int(rng.integers(1, 3))
    for dim in (fastest, *rest):
        strides[dim] = step
        step = step * shape[dim] + int(rng.integers(0, 4))
    return tuple(strides)


# --- what must come out -----------------------------------------------------------------------------------------------


def correlate(problem: ConvolutionProblem, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The result in float64: one matrix product for each place of the window."""
    groups = problem.groups
    n, c, *size = problem.x_shape
    k, _, *kernel = problem.w_shape
    _, _, *out = problem.y_shape
    area = math.prod(out)
    pads = tuple(zip(problem.padding_before, problem.padding_after, strict=True))
    inside = tuple(slice(before, before + extent) for (before, _), extent in zip(pads, size, strict=True))
    padded = np.zeros((n, c, *(extent + before + after for (before, after), extent in zip(pads, size, strict=True))))
    operands = dict(zip((name[-1] for name in problem.operands[:2]), (first, second), strict=True))
    if "x" in operands:
        padded[:, :, *inside] = operands["x"]
    w = operands["w"].astype(np.float64) if "w" in operands else np.empty(problem.w_shape)
    if "y" in operands:
        y = operands["y"].astype(np.float64).reshape(n, groups, k // groups, area)
    else:
        y = np.zeros((n, groups, k // groups, area))
    for tap in itertools.product(*map(range, kernel)):
        window = tuple(
            slice(at * far, at * far + (count - 1) * step + 1, step)
            for at, far, count, step in zip(tap, problem.dilation, out, problem.stride, strict=True)
        )
        seen = padded[:, :, *window]
        x = seen.reshape(n, groups, c // groups, area)
        v = w[:, :, *tap].reshape(groups, k // groups, c // groups)
        if problem.direction == "forward":
            y += v @ x
        elif problem.direction == "backward_data":
            seen += (v.swapaxes(1, 2) @ y).reshape(seen.shape)
        else:
            w[:, :, *tap] = (y @ x.swapaxes(2, 3)).sum(0).reshape(k, c // groups)
    if problem.direction == "forward":
        return y.reshape(problem.y_shape)
    return padded[:, :, *inside] if problem.direction == "backward_data" else w


def _reduced(problem: ConvolutionProblem) -> int:
    """How many products one output sums, at most."""
    if problem.direction == "forward":
        return math.prod(problem.w_shape[1:])
    taps = math.prod(problem.w_shape[2:])
    if problem.direction == "backward_data":
        return taps * problem.w_shape[0] // problem.groups
    return problem.x_shape[0] * math.prod(problem.y_shape[2:])


class Case:
    """A problem with its operands in guarded memory on a device, which is current.

    Attributes:
        problem: the problem.
        arrays: the two inputs and the output, ready for a runner.
    """

    def __init__(self, problem: ConvolutionProblem, rng: np.random.Generator, device: devices.Device) -> None:
        self.problem = problem
        density = min(0.5, math.sqrt(_PRODUCTS / _reduced(problem)))
        values = []
        for name in problem.operands[:2]:
            shape = problem.shape_of(name)
            values.append((rng.choice([-2, -1, 1, 2], shape) * (rng.random(shape) < density)).astype(np.float64))
        self.wanted = correlate(problem, *values)
        assert correlate(problem, *map(np.abs, values)).max() <= LARGEST_SUM, problem
        out = problem.operands[2]
        before = None
        if problem.accumulate:
            before = rng.integers(-2, 3, problem.shape_of(out)).astype(np.float64)
            self.wanted = self.wanted + before
        inputs = [_Guarded(problem, name, value, device) for name, value in zip(problem.operands, values, strict=False)]
        self._out = _Guarded(problem, out, before, device)
        self.arrays = (*(each.array for each in inputs), self._out.array)

    def reset(self) -> None:
        """Makes the output what it was before a run."""
        self._out.write()

    def fault(self, *, exact: bool = True) -> str | None:
        """Says what is wrong with the output after a run; None when nothing is.

        Args:
            exact: compare for equality; otherwise a Fourier or Winograd transform has been at work.
        """
        found, outside = self._out.read()
        if outside:
            return f"{outside} elements outside {self.problem.operands[2]} were written"
        short = self._out.array.dtype.itemsize == 2
        # A wrong element is off by 1 or more, as long as the sums are small.
        room = 0.0 if exact else (0.25 if short else 0.05) + (2.0**-8 if short else 0.0) * np.abs(self.wanted)
        wrong = ~(np.abs(found - self.wanted) <= room)
        if not wrong.any():
            return None
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        return f"{int(wrong.sum())} of {wrong.size} are wrong, first {place}: {found[place]}, not {self.wanted[place]}"


class _Guarded:
    """An operand in memory whose other elements are poison."""

    def __init__(
        self, problem: ConvolutionProblem, name: str, values: np.ndarray | None, device: devices.Device
    ) -> None:
        self._word = problem.dtype_of(name)
        dtype = devices.DTYPES[self._word]
        bits = _BITS[dtype.itemsize]
        self._shape = problem.shape_of(name)
        self._strides = tuple(step * dtype.itemsize for step in problem.strides_of(name))
        extent = 1 + sum((n - 1) * step for n, step in zip(self._shape, problem.strides_of(name), strict=True))
        alignment = problem.alignment_of(name)
        # Aligned to what the problem says and to no more.
        self._start = (_GUARD + (alignment if alignment < 16 else 0)) // dtype.itemsize
        self._host = np.full(self._start + extent + _GUARD // dtype.itemsize, _POISON[self._word], bits)
        if values is not None:
            self._inside(self._host)[...] = values.astype(dtype).view(bits)
        self._xp = device.xp
        memory = self._xp.empty(self._host.size, dtype)
        self.memory = memory.view(bits)
        self.array = self._inside(memory)
        self.write()

    def _inside(self, memory):
        xp = np if isinstance(memory, np.ndarray) else self._xp
        return xp.lib.stride_tricks.as_strided(memory[self._start :], self._shape, self._strides)

    def write(self) -> None:
        """Makes the memory what it was at first."""
        self.memory[...] = self._xp.asarray(self._host)

    def read(self) -> tuple[np.ndarray, int]:
        """The values in float64, and how many elements are no longer poison that must be."""
        memory = self.memory.copy() if isinstance(self.memory, np.ndarray) else self._xp.asnumpy(self.memory)
        inside = self._inside(memory)
        values = np.ascontiguousarray(inside).view(devices.DTYPES[self._word]).astype(np.float64)
        inside[...] = _POISON[self._word]
        return values, int((memory != _POISON[self._word]).sum())
