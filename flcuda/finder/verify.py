"""Says whether a candidate computes what its Problem says: by float64 values at sampled places, and by its memory.

What is expected and how far off it may be is a matter of `flcuda.finder.expectation`. Everything runs on the device of
the arrays, by element-wise operations and sums.

Note [guards]: each output lies between two bands of a pattern, and so does whatever a run allocates, its workspace
among it: a candidate that writes outside of what it was given is not used, however right its results are.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from flcuda.device import Device
from flcuda.finder.candidate import Runner
from flcuda.finder.expectation import STORED, UNITS, Evaluator, wide
from flcuda.finder.problem import OPERAND_DTYPES, Problem

GUARD = 256
"""Bytes of pattern in front of and behind each output and each allocation of a run. See Note [guards]."""

_PATTERN = 0xA5
_ALIGNED = 256

_PRESETS = 65_521  # numbers that a preset output repeats

# Of dtypes: half of the smallest step, and the largest number.
_SMALLEST = {"float16": 2.0**-24}
_LARGEST = {"float16": 65504.0, "bfloat16": 3.39e38, "float32": 3.4028235e38}


@dataclass(frozen=True, slots=True)
class Verification:
    """What checking a candidate found.

    Attributes:
        error: of the sampled element that is worst for its bound: how far it is from float64.
        bound: how far it may be.
        repeats: whether a second run gave the same bits; None where that was not promised.
        reason: what is wrong with the results, in words; None when nothing is. Other bits in a second run, each result
            within its bound, are no wrong results.
        relative: the largest error of any sampled element, as a share of the root mean square of what the sampled
            elements of its output should be: what `Policy.max_error` limits.
    """

    error: float
    bound: float
    repeats: bool | None
    reason: str | None
    relative: float = 0.0


class Verifier:
    """Checks the candidates of one Problem on the same inputs.

    It holds sampled float64 expectations and buffers for the outputs, on the device.

    Args:
        problem: what the candidates compute.
        inputs: arrays in the order of ``problem.inputs``, with its strides; borrowed.
        device: where they are; current at each call.
        samples: places of each output; fewer where one costs much, all where there are few.
        seed: of the places.
    """

    def __init__(
        self, problem: Problem, inputs: tuple[Any, ...], device: Device, *, samples: int = 256, seed: int = 0
    ) -> None:
        self._inputs = tuple(inputs)
        self._device = device
        evaluator = Evaluator(problem, self._inputs, device)
        rng = np.random.default_rng(seed)
        with np.errstate(all="ignore"):
            self._outputs = [_Output(problem, name, device, evaluator, samples, rng) for name in problem.outputs]

    def check(self, runner: Runner, *, deterministic: bool) -> Verification:
        """Runs a candidate and looks at what it wrote.

        Args:
            runner: takes the inputs and the outputs in the order of ``problem.operands``.
            deterministic: whether it promises the same bits in each run; it is run twice then.

        Returns:
            What was found. Exceptions of the runner go through.
        """
        arrays = [output.prepared() for output in self._outputs]
        reasons = self._run(runner, arrays)
        worst = (0.0, 1.0)
        relative = 0.0
        for output in self._outputs:
            error, bound, share, found = output.examined()
            reasons += found
            relative = max(relative, share)
            if error * worst[1] > worst[0] * bound or math.isinf(error):
                worst = (error, bound)
        repeats = None
        if deterministic:
            before = [output.bits.copy() for output in self._outputs]
            for output in self._outputs:
                output.prepared()
            reasons += self._run(runner, arrays)
            pairs = zip(before, self._outputs, strict=True)
            repeats = not any(bool((old != output.bits).any()) for old, output in pairs)
        for output in self._outputs:
            reasons += output.overwritten()
        return Verification(worst[0], worst[1], repeats, "; ".join(dict.fromkeys(reasons)) or None, relative)

    def _run(self, runner: Runner, arrays: list[Any]) -> list[str]:
        """Runs a candidate; says what it has written beside its allocations."""
        if self._device.kind == "cpu":
            runner(*self._inputs, *arrays)
            return []
        with _guarded(self._device.xp) as bands:
            runner(*self._inputs, *arrays)
        changed = sum(int((band != _PATTERN).sum()) for band in bands)
        return [f"workspace: {changed} bytes around it were written"] if changed else []


@contextlib.contextmanager
def _guarded(cupy: Any) -> Iterator[list[Any]]:
    """Lets allocations of the current allocator lie between bands of the pattern; yields the bands, which are kept."""
    allocate = cupy.cuda.get_allocator()
    bands: list[Any] = []

    def guarded(size: int) -> Any:
        if size == 0:
            return allocate(size)
        memory = allocate(size + 2 * GUARD)
        for start in (0, GUARD + size):
            band = cupy.ndarray((GUARD,), np.uint8, memory + start)
            band.fill(_PATTERN)
            bands.append(band)
        return memory + GUARD

    with cupy.cuda.using_allocator(guarded):
        yield bands


def _address(array: Any) -> int:
    return int(array.data.ptr if hasattr(array.data, "ptr") else array.ctypes.data)


class _Output:
    """One output: its buffer, and what it has to be at its sampled places."""

    def __init__(
        self,
        problem: Problem,
        name: str,
        device: Device,
        evaluator: Evaluator,
        samples: int,
        rng: np.random.Generator,
    ) -> None:
        xp = device.xp
        self.name = name
        self._xp = xp
        self._accumulate = problem.accumulate
        self._word = problem.dtype_of(name)
        self._dtype = OPERAND_DTYPES[self._word]
        shape, strides = problem.shape_of(name), problem.strides_of(name)
        self._places = _places(shape, evaluator.affordable(name, samples), rng)
        index = tuple(xp.asarray(column) for column in self._places.T)
        values, errors = evaluator.expected(name, index)
        count = len(self._places)
        self._expected = xp.broadcast_to(xp.asarray(values, dtype=np.float64), (count,))
        self._error = xp.broadcast_to(xp.asarray(errors, dtype=np.float64), (count,))
        self._offsets = xp.asarray(self._places @ np.asarray(strides, np.int64))
        # The memory: pattern, the array, pattern.
        item = self._dtype.itemsize
        extent = item * (1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True)))
        self._raw = xp.empty(extent + 2 * GUARD + 2 * _ALIGNED, np.uint8)
        alignment = problem.alignment_of(name)
        self._start = GUARD + -(_address(self._raw) + GUARD) % _ALIGNED + (alignment if alignment < 16 else 0)
        self._end = self._start + extent
        steps = tuple(step * item for step in strides)
        unsigned = np.dtype(f"u{item}")
        self._array = self._view(shape, self._dtype, steps)
        self.bits = self._view(shape, unsigned, steps)
        self._line = self._view((extent // item,), self._dtype, (item,))
        self._pattern = unsigned.type(int.from_bytes(bytes([_PATTERN]) * item, "little"))
        self._poison = unsigned.type(2 ** (8 * item) - 1)
        self._preset: Any = None
        if self._accumulate:
            numbers = rng.standard_normal(min(_PRESETS, math.prod(shape))).astype(self._dtype)
            self._preset = xp.resize(xp.asarray(numbers.view(unsigned)), math.prod(shape)).reshape(shape)
            self.prepared()
            before = wide(xp, self._line, self._offsets)
            self._expected = self._expected + before
            self._error = self._error + STORED * UNITS[self._word] * xp.abs(before)

    def _view(self, shape: tuple[int, ...], dtype: np.dtype[Any], steps: tuple[int, ...]) -> Any:
        if self._xp is np:
            return np.ndarray(shape, dtype, self._raw.data, self._start, steps)
        return self._xp.ndarray(shape, dtype, self._raw.data + self._start, steps)

    def prepared(self) -> Any:
        """Fills the buffer with the pattern and the output with NaN, or with the preset; gives the output."""
        self._raw.fill(_PATTERN)
        if self._preset is None:
            self.bits[...] = self._poison
        else:
            self.bits[...] = self._preset
        return self._array

    def examined(self) -> tuple[float, float, float, list[str]]:
        """Compares the sampled places: error and bound of the worst, `Verification.relative`, and what is wrong."""
        xp = self._xp
        reasons = []
        if self._preset is None and self._dtype.kind not in "iu":
            unwritten = self.bits == self._poison
            count = int(unwritten.sum())
            if count:
                first = int(unwritten.ravel().astype(np.uint8).argmax())
                place = tuple(int(i) for i in np.unravel_index(first, unwritten.shape))
                reasons.append(f"{self.name}: {count} elements were not written, the first at {place}")
        with np.errstate(all="ignore"):
            found = wide(xp, self._line, self._offsets)
            wanted = self._expected
            bound = self._error + self._rounding(wanted)
            error = xp.abs(found - wanted)
            # Equal infinities, NaN for NaN, and what overflows the dtype.
            same = (found == wanted) | (xp.isnan(found) & xp.isnan(wanted))
            largest = _LARGEST.get(self._word, math.inf)
            same |= xp.isinf(found) & (found * wanted > 0) & (xp.abs(wanted) + bound >= largest)
            error = xp.where(same, 0.0, xp.where(xp.isnan(error), math.inf, error))
            bound = xp.where(xp.isnan(bound), math.inf, bound)
            error = xp.where(xp.isinf(bound), 0.0, error)
            finite = xp.where(xp.isfinite(wanted), wanted, 0.0)
            largest_error, size = float(error.max()), math.sqrt(float((finite * finite).mean()))
            ratio = error / xp.maximum(bound, float(np.finfo(np.float64).tiny))
        at = int(ratio.argmax())
        worst, limit = float(error[at]), float(bound[at])
        if not float(ratio[at]) <= 1:
            place = tuple(int(i) for i in self._places[at])
            wrong = int((ratio > 1).sum())
            reasons.append(
                f"{self.name} at {place} is {float(found[at]):.9g}, not {float(wanted[at]):.9g} (error {worst:.3g}, "
                f"bound {limit:.3g}; {wrong} of {len(self._places)} places are wrong)"
            )
        relative = 0.0 if largest_error == 0 else largest_error / size if size > 0 else math.inf
        return worst, max(limit, float(np.finfo(np.float64).tiny)), relative, reasons

    def _rounding(self, wanted: Any) -> Any:
        if self._dtype.kind in "iu":
            return (wanted != self._xp.rint(wanted)).astype(np.float64)
        size = self._xp.where(self._xp.isfinite(wanted), self._xp.abs(wanted), 0.0)
        return STORED * UNITS[self._word] * size + _SMALLEST.get(self._word, 0.0)

    def overwritten(self) -> list[str]:
        """Looks for bytes that were written and are no element; the output's values are lost."""
        self.bits[...] = self._pattern
        changed = self._raw != _PATTERN
        count = int(changed.sum())
        if not count:
            return []
        first = int(changed.astype(np.uint8).argmax())
        where = "in front of it" if first < self._start else "behind its end" if first >= self._end else "in its gaps"
        return [f"{self.name}: {count} bytes that are none of it were written, the first {where}"]


def _places(shape: tuple[int, ...], count: int, rng: np.random.Generator) -> Any:
    """Chooses places: all where there are few; else corners, places at edges, and any, (places, rank)."""
    size = math.prod(shape)
    if size <= count:
        return np.stack(np.unravel_index(np.arange(size), shape), axis=1).astype(np.int64)
    corners = np.array(list(product(*({0, n - 1} for n in shape))), np.int64)
    rng.shuffle(corners)
    corners = corners[: max(1, count // 4)]
    places = rng.integers(0, shape, (count - len(corners), len(shape)))
    edges = len(places) // 2
    dims = rng.integers(0, len(shape), edges)
    places[np.arange(edges), dims] = rng.integers(0, 2, edges) * (np.asarray(shape)[dims] - 1)
    return np.concatenate([corners, places])
