"""Source ``reference``: convolutions in NumPy, by columns and BLAS or by FFT, and graphs operation by operation.

It is what the CPU device runs on.

All three directions work on channels-last views, (N, *spatial, C), because there a kernel row is one run of memory: the
columns of an image are then copied by long runs, and one matrix product with BLAS does the rest. Images are taken a
chunk at a time, so that the columns stay in cache.

float16 and bfloat16 are computed in float32 and rounded once, when the result is written (after the addition, when
accumulating); tensors inside a graph are not rounded. math "tensor_op" has no meaning on the CPU: float32 is computed
in float32.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from flcuda import graph_reference
from flcuda.device import Device
from flcuda.finder.candidate import Candidate
from flcuda.finder.choice import Choice
from flcuda.finder.graph_problem import GraphProblem
from flcuda.finder.policy import Policy
from flcuda.finder.problem import ConvolutionProblem, Problem

Array = np.ndarray[Any, np.dtype[Any]]

CHUNK = 4 << 20
"""Bytes of columns that are built at a time. From 1 to 8 MiB an idle machine is equally fast; on a busy one fewer and
larger products wait less often for BLAS's threads."""

# Rough speeds, operations and bytes a second. They only decide whether an FFT is worth a trial.
_BLAS_SPEED = 100e9
_FFT_SPEED = 2e9
_COPY_SPEED = 4e9


@dataclass(frozen=True, slots=True)
class _Geometry:
    """What each kernel tap reads, by spatial dimensions.

    At a position, a tap reads element ``position * stride + tap * dilation`` of a window buffer; element i of that
    buffer is element ``i + start`` of the image, or zero where the image has none. Taps that see nothing but padding at
    every position are left out, in a late layer of a small image most; ``first_tap`` counts those cut off in front.
    """

    image: tuple[int, ...]
    positions: tuple[int, ...]
    taps: tuple[int, ...]
    first_tap: tuple[int, ...]
    start: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def create(
        cls,
        image: tuple[int, ...],
        positions: tuple[int, ...],
        taps: tuple[int, ...],
        start: tuple[int, ...],
        stride: tuple[int, ...],
        dilation: tuple[int, ...],
    ) -> "_Geometry":
        first, count, moved = [], [], []
        for i in range(len(image)):
            low, high = _useful_taps(image[i], positions[i], taps[i], start[i], stride[i], dilation[i])
            first.append(low)
            count.append(high - low)
            moved.append(start[i] + low * dilation[i])
        return cls(image, positions, tuple(count), tuple(first), tuple(moved), stride, dilation)

    @property
    def extent(self) -> tuple[int, ...]:
        """The size of the window buffer."""
        return tuple(
            (o - 1) * s + (r - 1) * d + 1
            for o, s, r, d in zip(self.positions, self.stride, self.taps, self.dilation, strict=True)
        )

    @property
    def tap_slices(self) -> tuple[slice, ...]:
        """The kept part of the kernel."""
        return tuple(slice(f, f + r) for f, r in zip(self.first_tap, self.taps, strict=True))

    def overlap(self) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Gives the part of the window buffer that lies in the image, and the same part as the image counts it."""
        buffer, image = [], []
        for size, extent, start in zip(self.image, self.extent, self.start, strict=True):
            low = max(0, -start)
            high = max(low, min(extent, size - start))
            buffer.append(slice(low, high))
            image.append(slice(low + start, high + start))
        return tuple(buffer), tuple(image)

    def covers(self) -> bool:
        """Says whether the window buffer lies wholly in the image, so that no padded copy is needed."""
        return all(
            start >= 0 and start + extent <= size
            for size, extent, start in zip(self.image, self.extent, self.start, strict=True)
        )


def _useful_taps(image: int, positions: int, taps: int, start: int, stride: int, dilation: int) -> tuple[int, int]:
    """Gives the range of taps that see the image at some position; one tap at least, so that no product is empty."""
    useful = [
        tap
        for tap in range(taps)
        if any(0 <= position * stride + tap * dilation + start < image for position in range(positions))
    ]
    return (useful[0], useful[-1] + 1) if useful else (0, 1)


def _channels_last(a: Array) -> Array:
    return a.transpose(0, *range(2, a.ndim), 1)


def _taps_last(w: Array, geometry: _Geometry, compute: np.dtype[Any], flip: bool = False) -> Array:
    """Gives the kept taps of a filter as (K, taps, C), contiguous, in the compute dtype."""
    if flip:
        w = w[(slice(None), slice(None), *(slice(None, None, -1) for _ in geometry.taps))]
    kept = _channels_last(w[(slice(None), slice(None), *geometry.tap_slices)])
    return np.ascontiguousarray(kept, dtype=compute).reshape(w.shape[0], -1, w.shape[1])


def _write(out: Array, value: Array, accumulate: bool) -> None:
    """Stores a result computed in the compute dtype; the one place where 16-bit results are rounded."""
    with np.errstate(over="ignore", invalid="ignore"):
        if not accumulate:
            out[...] = value
        elif out.dtype == value.dtype:
            out += value
        else:
            out[...] = out.astype(value.dtype) + value


def _columns(x: Array, geometry: _Geometry, compute: np.dtype[Any], chunk: int) -> Iterator[tuple[slice, slice, Array]]:
    """Walks over the columns of a channels-last array, a chunk of them at a time.

    Args:
        x: (N, *image, C), any strides and dtype.
        geometry: which element each tap reads.
        compute: the dtype of the columns.
        chunk: bytes of columns to build at a time; at least one line of positions is built.

    Yields:
        The images, the positions of the first spatial dimension, and their columns, (rows, taps * C), which the next
        step overwrites.
    """
    n, channels = x.shape[0], x.shape[-1]
    one_tap = math.prod(geometry.taps) == 1
    direct = geometry.covers() and (one_tap or (x.dtype == compute and x.strides[-1] == x.itemsize))
    if direct:
        origin = x[(slice(None), *(slice(s, s + e) for s, e in zip(geometry.start, geometry.extent, strict=True)))]
        if one_tap and set(geometry.stride) == {1} and x.dtype == compute and origin.flags.c_contiguous:
            # Every position and one tap: the array is its own matrix of columns.
            yield slice(0, n), slice(0, geometry.positions[0]), origin.reshape(-1, channels)
            return
    images, lines = _chunk_shape(n, channels, geometry, compute, chunk)
    if not direct:
        origin = np.zeros((images, *geometry.extent, channels), compute)
    steps = origin.strides
    windows = np.lib.stride_tricks.as_strided(
        origin,
        (origin.shape[0], *geometry.positions, *geometry.taps, channels),
        (
            steps[0],
            *(step * s for step, s in zip(steps[1:-1], geometry.stride, strict=True)),
            *(step * d for step, d in zip(steps[1:-1], geometry.dilation, strict=True)),
            steps[-1],
        ),
        writeable=False,
    )
    columns = np.empty((images, lines, *windows.shape[2:]), compute)
    width = math.prod(geometry.taps) * channels
    inside, wanted = geometry.overlap()
    for first in range(0, n, images):
        batch = slice(first, min(n, first + images))
        count = batch.stop - batch.start
        if not direct:
            origin[(slice(0, count), *inside)] = x[(batch, *wanted)]
        source = windows[batch] if direct else windows[:count]
        for line in range(0, geometry.positions[0], lines):
            part = slice(line, min(geometry.positions[0], line + lines))
            # Contiguous: either whole images are taken, or parts of one.
            target = columns[:count, : part.stop - part.start]
            target[...] = source[:, part]
            yield batch, part, target.reshape(-1, width)


def _chunk_shape(n: int, channels: int, geometry: _Geometry, compute: np.dtype[Any], chunk: int) -> tuple[int, int]:
    """Gives the images, and the lines of each (more than one image: all), whose columns fit into a chunk."""
    line = math.prod(geometry.positions[1:]) * math.prod(geometry.taps) * channels * compute.itemsize
    lines = max(1, min(geometry.positions[0], chunk // max(1, line)))
    return max(1, min(n, chunk // max(1, line * geometry.positions[0]))), lines


def _rows(a: Array, compute: np.dtype[Any]) -> Array:
    """Gives a part of a channels-last array as a contiguous matrix, (rows, C); a copy only where it must be."""
    return np.ascontiguousarray(a, dtype=compute).reshape(-1, a.shape[-1])


def _correlate(x: Array, weights: Array, out: Array, geometry: _Geometry, chunk: int, accumulate: bool) -> None:
    """Computes out[n, o, k] (+)= sum over taps r and c of window[n, o, r, c] * weights[k, r, c].

    Args:
        x: (N, *image, C).
        weights: (K, taps, C), contiguous, in the compute dtype.
        out: (N, *positions, K); written.
        geometry: which element of x each tap reads.
        chunk: bytes of columns at a time.
        accumulate: whether to add to out.
    """
    compute = weights.dtype
    matrix = weights.reshape(weights.shape[0], -1).T
    in_place = not accumulate and out.dtype == compute and out.flags.c_contiguous
    scratch = np.empty((0, 0), compute)
    for batch, part, columns in _columns(x, geometry, compute, chunk):
        target = out[batch, part]
        if in_place:
            np.matmul(columns, matrix, out=target.reshape(-1, target.shape[-1]))
            continue
        if len(scratch) < len(columns):
            scratch = np.empty((len(columns), len(weights)), compute)
        product = np.matmul(columns, matrix, out=scratch[: len(columns)])
        _write(target, product.reshape(target.shape), accumulate)


def _scatter(dy: Array, weights: Array, dx: Array, geometry: _Geometry, chunk: int, accumulate: bool) -> None:
    """Computes dx (+)= the sum of each position's products with the taps, added where the tap reads: col2im.

    Args:
        dy: (N, *positions, K).
        weights: (K, taps, C), contiguous, in the compute dtype.
        dx: (N, *image, C); written.
        geometry: of the forward pass.
        chunk: bytes of columns at a time.
        accumulate: whether to add to dx.
    """
    compute = weights.dtype
    channels = weights.shape[-1]
    matrix = weights.reshape(weights.shape[0], -1)
    images, lines = _chunk_shape(len(dy), channels, geometry, compute, chunk)
    window = np.empty((images, *geometry.extent, channels), compute)
    columns = np.empty((images * lines * math.prod(geometry.positions[1:]), matrix.shape[1]), compute)
    inside, wanted = geometry.overlap()
    for first in range(0, len(dy), images):
        batch = slice(first, min(len(dy), first + images))
        count = batch.stop - batch.start
        window[:count] = 0
        for line in range(0, geometry.positions[0], lines):
            stop = min(geometry.positions[0], line + lines)
            rows = _rows(dy[batch, line:stop], compute)
            product = np.matmul(rows, matrix, out=columns[: len(rows)])
            product = product.reshape(count, stop - line, *geometry.positions[1:], *geometry.taps, channels)
            _add_taps(window[:count], product, geometry, line)
        target = dx[batch]
        if wanted == tuple(slice(0, size) for size in geometry.image):
            _write(target, window[(slice(0, count), *inside)], accumulate)
            continue
        # Some of the image is read by no tap: its gradient is zero.
        if not accumulate:
            target[...] = 0
        _write(target[(slice(None), *wanted)], window[(slice(0, count), *inside)], accumulate)


def _add_taps(window: Array, product: Array, geometry: _Geometry, line: int) -> None:
    """Adds each tap's products to the elements of the window buffer that the tap reads, from a line of positions on."""
    counts = product.shape[1 : 1 + len(geometry.taps)]
    firsts = (line, *(0 for _ in counts[1:]))
    for tap in np.ndindex(*geometry.taps):
        read = tuple(
            slice(t * d + f * s, t * d + (f + c - 1) * s + 1, s)
            for t, d, s, f, c in zip(tap, geometry.dilation, geometry.stride, firsts, counts, strict=True)
        )
        target = window[(slice(None), *read)]
        target += product[(slice(None), *(slice(None) for _ in counts), *tap)]


def _filter_gradient(x: Array, dy: Array, geometry: _Geometry, compute: np.dtype[Any], chunk: int) -> Array:
    """Computes sum over n and o of dy[n, o, k] * window[n, o, r, c].

    Args:
        x: (N, *image, C).
        dy: (N, *positions, K).
        geometry: of the forward pass.
        compute: the dtype in which to compute.
        chunk: bytes of columns at a time.

    Returns:
        (K, taps * C) in the compute dtype.
    """
    total: Array | None = None
    scratch: Array | None = None
    for batch, part, columns in _columns(x, geometry, compute, chunk):
        rows = _rows(dy[batch, part], compute)
        if total is None:
            total = np.matmul(rows.T, columns)
            continue
        scratch = np.matmul(rows.T, columns, out=scratch)
        total += scratch
    assert total is not None
    return total


@dataclass(frozen=True)
class Columns:
    """A runner: one of the three directions by im2col or col2im and BLAS.

    Args:
        problem: what to compute.
        algo: "im2col", or "col2im" (backward data only; the only one of the two for a strided backward data).
        chunk: bytes of columns at a time.
    """

    problem: ConvolutionProblem
    algo: str
    chunk: int

    @property
    def workspace(self) -> int:
        """Roughly how many bytes a run allocates beside its operands."""
        p = self.problem
        compute = np.dtype(p.compute)
        forward = _forward_geometry(p)
        channels = p.w_shape[1]
        images, lines = _chunk_shape(p.x_shape[0], channels, forward, compute, self.chunk)
        row = math.prod(forward.positions[1:]) * math.prod(forward.taps) * channels
        window = math.prod(forward.extent) * channels
        return (images * (lines * row + window) + math.prod(p.w_shape)) * compute.itemsize

    def __call__(self, a: Array, b: Array, out: Array) -> None:
        """Runs on two operands in the problem's order and writes, or adds to, the third."""
        p = self.problem
        with np.errstate(over="ignore", invalid="ignore"):
            for group in range(p.groups):
                _DIRECTIONS[p.direction](self, *_group(p, group, a, b, out))

    def _forward(self, x: Array, w: Array, y: Array) -> None:
        geometry = _forward_geometry(self.problem)
        weights = _taps_last(w, geometry, np.dtype(self.problem.compute))
        _correlate(_channels_last(x), weights, _channels_last(y), geometry, self.chunk, self.problem.accumulate)

    def _backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        p = self.problem
        compute = np.dtype(p.compute)
        if self.algo == "col2im":
            geometry = _forward_geometry(p)
            weights = _taps_last(w, geometry, compute)
            _scatter(_channels_last(dy), weights, _channels_last(dx), geometry, self.chunk, p.accumulate)
            return
        # With stride 1 the data gradient is the correlation of dy with the filter, turned round and channels swapped.
        geometry = _gather_geometry(p)
        weights = _taps_last(w.swapaxes(0, 1), geometry, compute, flip=True)
        _correlate(_channels_last(dy), weights, _channels_last(dx), geometry, self.chunk, p.accumulate)

    def _backward_filter(self, x: Array, dy: Array, dw: Array) -> None:
        p = self.problem
        geometry = _forward_geometry(p)
        total = _filter_gradient(_channels_last(x), _channels_last(dy), geometry, np.dtype(p.compute), self.chunk)
        target = dw[(slice(None), slice(None), *geometry.tap_slices)]
        if target.shape != dw.shape and not p.accumulate:
            # The other taps see nothing but padding.
            dw[...] = 0
        kept = _channels_last(target)
        _write(kept, total.reshape(kept.shape), p.accumulate)


_DIRECTIONS: dict[str, Callable[[Columns, Array, Array, Array], None]] = {
    "forward": Columns._forward,
    "backward_data": Columns._backward_data,
    "backward_filter": Columns._backward_filter,
}


def _group(p: ConvolutionProblem, group: int, a: Array, b: Array, out: Array) -> Iterable[Array]:
    """Cuts one group's channels (of a filter: its output channels) out of the three operands."""
    if p.groups == 1:
        return a, b, out
    k, c = p.w_shape[0] // p.groups, p.w_shape[1]
    size = {"x": c, "y": k}
    parts = []
    for name, array in zip(p.operands, (a, b, out), strict=True):
        kind = name.removeprefix("d")
        if kind == "w":
            parts.append(array[group * k : (group + 1) * k])
        else:
            parts.append(array[:, group * size[kind] : (group + 1) * size[kind]])
    return parts


def _forward_geometry(p: ConvolutionProblem) -> _Geometry:
    start = tuple(-before for before in p.padding_before)
    return _Geometry.create(p.x_shape[2:], p.y_shape[2:], p.w_shape[2:], start, p.stride, p.dilation)


def _gather_geometry(p: ConvolutionProblem) -> _Geometry:
    start = tuple(
        before - (r - 1) * d for before, r, d in zip(p.padding_before, p.w_shape[2:], p.dilation, strict=True)
    )
    return _Geometry.create(p.y_shape[2:], p.x_shape[2:], p.w_shape[2:], start, p.stride, p.dilation)


# --- FFT --------------------------------------------------------------------------------------------------------------


def _fast_length(n: int) -> int:
    """Gives the smallest number from n on that has no prime factor above 5: such transforms are fast."""
    while True:
        rest = n
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return n
        n += 1


@dataclass(frozen=True)
class Fft:
    """A runner: one of the three directions as a product of spectra.

    Each direction is a circular correlation or convolution of at least the padded input's size, so that nothing wraps
    round into the part that is kept; strides and dilation become zeros between the elements.

    Args:
        problem: what to compute.
    """

    problem: ConvolutionProblem

    @property
    def lengths(self) -> tuple[int, ...]:
        """The transform's size, a spatial dimension."""
        return tuple(_fast_length(extent) for extent in self._geometry.extent)

    @property
    def _geometry(self) -> _Geometry:
        return _forward_geometry(self.problem)

    @property
    def workspace(self) -> int:
        """Roughly how many bytes a run allocates beside its operands."""
        p = self.problem
        values = (p.x_shape[0] * p.w_shape[1] + p.y_shape[0] * p.w_shape[0] // p.groups) + math.prod(p.w_shape[:2])
        return 3 * values * math.prod(self.lengths) * np.dtype(p.compute).itemsize

    def estimated_seconds(self) -> float:
        """Estimates a run's time from the number of operations: enough to leave out what is hopeless."""
        p = self.problem
        n, (k, c) = p.x_shape[0], p.w_shape[:2]
        points = math.prod(self.lengths)
        transforms = n * c * p.groups + n * k + k * c
        products = 4 * points * n * k * c
        return 2.5 * points * math.log2(points + 1) * transforms / _FFT_SPEED + products / _BLAS_SPEED

    def __call__(self, a: Array, b: Array, out: Array) -> None:
        """Runs on two operands in the problem's order and writes, or adds to, the third."""
        p = self.problem
        with np.errstate(over="ignore", invalid="ignore"):
            for group in range(p.groups):
                first, second, target = (_channels_last(each) for each in _group(p, group, a, b, out))
                self._run(first, second, target)

    def _run(self, a: Array, b: Array, out: Array) -> None:
        p = self.problem
        geometry = self._geometry
        inside, wanted = geometry.overlap()
        everywhere = tuple(slice(0, size) for size in geometry.image)
        positions = tuple(
            slice(0, (o - 1) * s + 1, s) for o, s in zip(geometry.positions, geometry.stride, strict=True)
        )
        taps = tuple(slice(0, (r - 1) * d + 1, d) for r, d in zip(geometry.taps, geometry.dilation, strict=True))
        if p.direction == "forward":
            x, w = self._spectrum(a[(slice(None), *wanted)], inside), self._filter_spectrum(b, taps)
            y = self._inverse(np.matmul(x, w.conj().swapaxes(1, 2)))
            _write(out, y[(slice(None), *positions)], p.accumulate)
        elif p.direction == "backward_data":
            dy, w = self._spectrum(a, positions), self._filter_spectrum(b, taps)
            dx = self._inverse(np.matmul(dy, w))
            if wanted != everywhere and not p.accumulate:
                out[...] = 0
            _write(out[(slice(None), *wanted)], dx[(slice(None), *inside)], p.accumulate)
        else:
            x, dy = self._spectrum(a[(slice(None), *wanted)], inside), self._spectrum(b, positions)
            dw = self._inverse(np.matmul(dy.conj().swapaxes(1, 2), x))
            kept = out[(slice(None), *geometry.tap_slices)]
            if kept.shape != out.shape and not p.accumulate:
                out[...] = 0
            _write(kept, dw[(slice(None), *taps)], p.accumulate)

    def _filter_spectrum(self, w: Array, taps: tuple[slice, ...]) -> Array:
        return self._spectrum(w[(slice(None), *self._geometry.tap_slices)], taps)

    def _spectrum(self, a: Array, places: tuple[slice, ...]) -> Array:
        """Puts a channels-last array into zeros at the given places and transforms it: (frequencies, N, C)."""
        buffer = np.zeros((a.shape[0], *self.lengths, a.shape[-1]), np.dtype(self.problem.compute))
        buffer[(slice(None), *places)] = a
        axes = tuple(range(1, buffer.ndim - 1))
        spectrum = np.fft.rfftn(buffer, axes=axes)
        return spectrum.reshape(a.shape[0], -1, a.shape[-1]).swapaxes(0, 1)

    def _inverse(self, spectrum: Array) -> Array:
        """Transforms (frequencies, N, C) back: (N, *lengths, C)."""
        frequencies = (*self.lengths[:-1], self.lengths[-1] // 2 + 1)
        values = spectrum.swapaxes(0, 1).reshape(spectrum.shape[1], *frequencies, spectrum.shape[2])
        axes = tuple(range(1, values.ndim - 1))
        return np.fft.irfftn(values, s=self.lengths, axes=axes)


# --- graphs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operations:
    """A runner: the operations of a graph, one after another.

    It computes in float64 where the graph does and in float32 otherwise; only the outputs are rounded.

    Args:
        problem: what to compute.
    """

    problem: GraphProblem

    @property
    def workspace(self) -> int:
        """Roughly how many bytes a run allocates beside its operands: copies of them in the compute dtype."""
        p = self.problem
        return sum(math.prod(p.shape_of(name)) for name in p.operands) * self._compute.itemsize

    @property
    def _compute(self) -> np.dtype[Any]:
        return np.dtype(np.float64 if self.problem.compute == "float64" else np.float32)

    def __call__(self, *operands: Array) -> None:
        """Runs on the inputs and writes the outputs, in the problem's order."""
        p = self.problem
        inputs = dict(zip(p.inputs, operands, strict=False))
        made = graph_reference.evaluate(p.operations, inputs, self._compute)
        with np.errstate(all="ignore"):
            for name, out in zip(p.outputs, operands[len(p.inputs) :], strict=True):
                out[...] = np.rint(made[name]) if out.dtype.kind in "iu" else made[name]


# --- the source -------------------------------------------------------------------------------------------------------


class ReferenceSource:
    """The source ``reference``: NumPy, for arrays in host memory."""

    name = "reference"
    devices = ("cpu",)
    kinds: tuple[type[Problem], ...] = (ConvolutionProblem, GraphProblem)

    def candidates(self, problem: Problem, policy: Policy, device: Device) -> Iterator[Candidate]:  # noqa: ARG002
        """Yields everything that can compute a Problem, the likely fastest first.

        Args:
            problem: a ConvolutionProblem or a GraphProblem.
            policy: ignored here: all candidates are deterministic; the finder holds them to the workspace limit.
            device: the CPU.

        Yields:
            "im2col", or for a strided backward data "col2im"; both where neither is sure to be faster. Then "fft", with
            the reason why it is not tried unless a large kernel makes it likely to be faster. For a graph, "numpy".
        """
        if isinstance(problem, GraphProblem):
            yield self._candidate(problem, "numpy", Operations(problem), None)
        if not isinstance(problem, ConvolutionProblem):
            return
        for algo in _likely_algos(problem):
            yield self._columns_candidate(problem, algo)
        yield self._fft_candidate(problem)

    def restore(self, problem: Problem, choice: Choice, device: Device) -> Candidate:  # noqa: ARG002
        """Makes the candidate of a stored choice again, without measuring.

        Args:
            problem: the Problem it was chosen for.
            choice: what was stored.
            device: the CPU.

        Returns:
            The candidate.

        Raises:
            ValueError: this source has no such algo for the Problem.
        """
        if isinstance(problem, GraphProblem) and choice.algo == "numpy" and not choice.parameters:
            return self._candidate(problem, "numpy", Operations(problem), None)
        if isinstance(problem, ConvolutionProblem):
            if choice.algo == "fft":
                return self._fft_candidate(problem, may_refuse=False)
            if choice.algo in _possible_algos(problem) and not choice.parameters:
                return self._columns_candidate(problem, choice.algo)
        raise ValueError(f"choice: reference has no {choice.algo} {dict(choice.parameters)} for {problem}")

    def _columns_candidate(self, problem: ConvolutionProblem, algo: str) -> Candidate:
        return self._candidate(problem, algo, Columns(problem, algo, CHUNK), None)

    def _fft_candidate(self, problem: ConvolutionProblem, *, may_refuse: bool = True) -> Candidate:
        runner = Fft(problem)
        ratio = runner.estimated_seconds() / _columns_seconds(problem)
        reason = None
        if may_refuse and ratio > 1:
            reason = f"not tried: estimated to be {ratio:.1f} times slower than {_likely_algos(problem)[0]}"
        return self._candidate(problem, "fft", runner, reason)

    def _candidate(
        self,
        problem: Problem,
        algo: str,
        runner: Columns | Fft | Operations,
        reason: str | None,
    ) -> Candidate:
        return Candidate(
            source=self.name,
            algo=algo,
            math=problem.math,
            workspace=runner.workspace,
            deterministic=True,
            reason=reason,
            build=lambda: runner,
        )


def _possible_algos(problem: ConvolutionProblem) -> tuple[str, ...]:
    if problem.direction != "backward_data":
        return ("im2col",)
    return ("im2col", "col2im") if set(problem.stride) == {1} else ("col2im",)


def _likely_algos(problem: ConvolutionProblem) -> tuple[str, ...]:
    """Gives the algos worth measuring: col2im beside im2col only where it builds the smaller columns."""
    possible = _possible_algos(problem)
    k, c = problem.w_shape[0] // problem.groups, problem.w_shape[1]
    return possible[:1] if c >= k else possible


def _columns_seconds(problem: ConvolutionProblem) -> float:
    """Estimates the time of im2col or col2im: the products, and writing the columns."""
    y = problem.y_shape
    columns = y[0] * math.prod(y[2:]) * problem.groups * math.prod(problem.w_shape[1:])
    return problem.flops / _BLAS_SPEED + columns * np.dtype(problem.compute).itemsize / _COPY_SPEED
