"""Source ``depthwise``: convolutions in which each channel has filters of its own, by kernels of this package.

They are what cuDNN is slow at in strict float32 and NCHW: of 300 convolutions on an H200 with cuDNN 9.19, these alone
took clearly longer there than in PyTorch, which has kernels for them: up to twice as long. The work is small, and what
counts is to read and write each element once. On 43 of them these kernels take 1.45 to 13 times less than PyTorch's.

For one 3x3, 5x5 or 7x7 filter a channel, with the same stride of 1 or 2 both ways and no dilation, there are kernels
that are compiled for it, "direct", in several shapes of launch: which is best depends on the size of the planes, so all
are offered, to be measured. Anything else takes "general", a thread an output element and many loads.

Sums are float32, products are exact to a rounding: a candidate's math is "fma" whatever the Problem permits. All are
deterministic: the filter gradient is summed in two launches, in a fixed order, with its partial sums in the workspace.
How a Problem is cut depends on its sizes alone, so that every GPU gives the same bits.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flcuda import device as devices
from flcuda import kernel_loader
from flcuda.device import Device, contiguous_strides
from flcuda.finder.candidate import Candidate
from flcuda.finder.choice import Choice
from flcuda.finder.policy import Policy
from flcuda.finder.problem import ConvolutionProblem, Problem, same_strides

KERNELS = "depthwise"
"""The kernel file."""

FILTERS = (3, 5, 7)
"""Sizes of filters with kernels of their own."""

DIRECT = "direct"
GENERAL = "general"

_KINDS = {"forward": 0, "backward_data": 1, "backward_filter": 2}
_TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
_LARGEST = 2**30
# of kernels/depthwise.cu
_MOST_THREADS = 384
_GENERAL_THREADS = 256
_GENERAL_TAPS = 4
# rows of a thread: of the output, or pairs of rows of the data gradient with stride 2
_ROWS = (7, 4)
_PAIRS = (4, 2)
# floats of shared memory that a launch may have without asking, and that a sum at the end of a block may always take
_MOST_SHARED = 12288
_SUM_SHARED = 6144
_PARTS = 8
# what is written at once, and bytes of a row below which a warp would write many parts of that
_SECTOR = 32
_SHORT_ROW = 96
_VECTOR = 16
# so many blocks fill any GPU of today several times; up to there, a block takes one image only
_FULL = 2048
_MOST_IMAGES = 16
# filter gradients: fewer blocks, whose partial sums have to be written, read and added
_FULL_OF_SUMS = 1024
_MOST_SUMMED_IMAGES = 64
_MOST_BLOCKS = 2**31 - 1
_MOST_SPLITS = 256
_MOST_GRID = 4096


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of a kernel of kernels/depthwise.cu.

    Attributes:
        function: its name.
        defines: macros that the file is compiled with for it, "NAME=VALUE" each.
        grid: blocks.
        block: threads of a block.
        shared: bytes of dynamic shared memory.
        arguments: what follows the arrays.
    """

    function: str
    defines: tuple[str, ...]
    grid: tuple[int, int]
    block: tuple[int, int]
    shared: int
    arguments: tuple[np.generic, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """How a Problem is computed.

    Attributes:
        first: writes the output, or of a filter gradient the partial sums, from the inputs.
        second: of a filter gradient, adds them up into the output; else None.
        workspace: bytes of the partial sums.
    """

    first: Launch
    second: Launch | None = None
    workspace: int = 0


# --- geometry ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Planes:
    """A depthwise convolution in two dimensions: what the kernels see of a Problem."""

    direction: str
    batch: int
    channels: int
    filters_each: int
    size: tuple[int, int]
    kernel: tuple[int, int]
    out: tuple[int, int]
    stride: tuple[int, int]
    before: tuple[int, int]
    dilation: tuple[int, int]

    @classmethod
    def of(cls, problem: ConvolutionProblem) -> "_Planes":
        def pair(values: tuple[int, ...], filling: int) -> tuple[int, int]:
            return (filling, values[0]) if len(values) == 1 else (values[0], values[1])

        return cls(
            direction=problem.direction,
            batch=problem.x_shape[0],
            channels=problem.x_shape[1],
            filters_each=problem.w_shape[0] // problem.x_shape[1],
            size=pair(problem.x_shape[2:], 1),
            kernel=pair(problem.w_shape[2:], 1),
            out=pair(problem.y_shape[2:], 1),
            stride=pair(problem.stride, 1),
            before=pair(problem.padding_before, 0),
            dilation=pair(problem.dilation, 1),
        )

    @property
    def is_square(self) -> bool:
        """Whether it has kernels of its own."""
        return (
            self.filters_each == 1
            and self.kernel[0] == self.kernel[1]
            and self.kernel[0] in FILTERS
            and self.stride in ((1, 1), (2, 2))
            and self.dilation == (1, 1)
        )

    @property
    def spreads(self) -> bool:
        """Whether a position of the input reaches several of the output: the data gradient with stride 2."""
        return self.direction == "backward_data" and self.stride == (2, 2)

    def arguments(self) -> tuple[np.generic, ...]:
        """Gives the Geometry of the general kernels."""
        return tuple(
            map(
                np.int32,
                (
                    self.channels,
                    self.filters_each,
                    *self.size,
                    *self.kernel,
                    *self.out,
                    *self.stride,
                    *self.before,
                    *self.dilation,
                ),
            )
        )


def is_possible(problem: ConvolutionProblem) -> bool:
    """Says whether the kernels take a Problem.

    Args:
        problem: any convolution.

    Returns:
        True for one or two spatial dimensions with groups = channels, all operands packed NCHW and aligned to their
        elements, not of float64, where a padded plane counts in 31 bits.
    """
    rank = len(problem.stride)
    if rank > 2 or problem.groups != problem.x_shape[1] or problem.dtype_of(problem.operands[0]) not in _TYPES:
        return False
    for name in problem.operands:
        shape = problem.shape_of(name)
        if not same_strides(shape, problem.strides_of(name), contiguous_strides(shape, "nchw")):
            return False
        if problem.alignment_of(name) < devices.DTYPES[problem.dtype_of(name)].itemsize:
            return False
    planes = _Planes.of(problem)
    padded = 1
    for size, out, kernel, stride, before, dilation in zip(
        planes.size, planes.out, planes.kernel, planes.stride, planes.before, planes.dilation, strict=True
    ):
        padded *= max(size + before, (out - 1) * stride + (kernel - 1) * dilation + 1 + before) + stride
    taps = problem.w_shape[0] * planes.kernel[0] * planes.kernel[1]
    return max(padded, math.prod(planes.out), taps, planes.batch) <= _LARGEST


@dataclass(frozen=True, slots=True)
class _Tile:
    """How the planes are cut into tiles: the Tile of the kernels, and what it takes."""

    planes: int
    groups: int
    row_tiles: int
    columns: int
    lead: int
    pitch: int
    plane_pitch: int
    vector: bool
    behind: int

    @property
    def threads(self) -> int:
        return self.planes * self.groups * self.columns

    @property
    def floats(self) -> int:
        return self.planes * (self.plane_pitch + self.behind)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _tile(
    planes: _Planes, source: tuple[int, int], left: int, rows: int, threads: int, wide: int, staged: bool
) -> _Tile | None:
    """Cuts planes into tiles of at most so many threads.

    Args:
        planes: the convolution.
        source: height and width of the input.
        left: zeros in front of its rows.
        rows: of a thread.
        threads: the most of a block.
        wide: elements that the input's width is to be a multiple of for loads of 16 bytes; 0: no such loads.
        staged: whether the output goes by way of shared memory.

    Returns:
        The tiles; None when no row fits.
    """
    (kernel, _), (stride, _) = planes.kernel, planes.stride
    target = planes.size if planes.direction == "backward_data" else planes.out
    vector = wide > 0 and source[1] % wide == 0
    if planes.spreads:
        starts = tuple(before // 2 for before in planes.before)
        lines, columns = (
            (before + size - 1) // 2 - start + 1
            for before, size, start in zip(planes.before, planes.size, starts, strict=True)
        )
        lead = max(0, kernel // 2 - starts[1])
        left = -starts[1]
        halo, step, reach = kernel // 2, 1, columns
        made = 2 * rows
    else:
        lines, columns = target
        lead = max(0, left)
        step = 1 if planes.direction == "backward_data" else stride
        halo, reach = kernel - step, (columns - 1) * step + kernel
        made = rows
    if columns > threads:
        return None
    if vector:
        lead = _up(lead, 4)
    pitch = _up(max(lead + source[1], lead - left + reach), 4 if vector else step)
    group_count = -(-lines // rows)
    groups = min(group_count, threads // columns)
    while groups:
        row_tiles = -(-group_count // groups)
        groups = -(-group_count // row_tiles)
        tile = _Tile(
            planes=1,
            groups=groups,
            row_tiles=row_tiles,
            columns=columns,
            lead=lead,
            pitch=pitch,
            plane_pitch=(groups * rows * step + halo) * pitch,
            vector=vector,
            behind=groups * made * target[1] if staged else 0,
        )
        if tile.floats <= _MOST_SHARED:
            break
        groups -= 1
    else:
        return None
    if row_tiles > 1:
        return tile
    most = min(planes.channels, threads // tile.threads, _MOST_SHARED // tile.floats)
    shares = -(-planes.channels // most)
    return replace(tile, planes=-(-planes.channels // shares))


# --- launches ---------------------------------------------------------------------------------------------------------


def _defines(problem: ConvolutionProblem, planes: _Planes) -> tuple[str, ...]:
    # partial sums are float32, so the kernels of filter gradients do not depend on the output
    out = "float32" if planes.direction == "backward_filter" else problem.dtype_of(problem.operands[2])
    return (
        f"DEPTHWISE_KIND={_KINDS[planes.direction]}",
        f"DEPTHWISE_FILTER={planes.kernel[0]}",
        f"DEPTHWISE_STRIDE={planes.stride[0]}",
        f"DEPTHWISE_IN={_TYPES[problem.dtype_of(problem.operands[0])]}",
        f"DEPTHWISE_OUT={_TYPES[out]}",
    )


def direct(problem: ConvolutionProblem, rows: int, threads: int) -> Work | None:
    """Says how a Problem is computed by the kernels for its filter.

    Args:
        problem: one that `is_possible`.
        rows: that a thread computes, 7 or 4; of the data gradient with stride 2 pairs of rows, 4 or 2.
        threads: the most of a block, at most 384.

    Returns:
        The launches; None where there are no such kernels or a tile does not fit into a block.
    """
    planes = _Planes.of(problem)
    if not planes.is_square or rows not in (_PAIRS if planes.spreads else _ROWS) or not 1 <= threads <= _MOST_THREADS:
        return None
    kernel = planes.kernel[0]
    data, summed = planes.direction == "backward_data", planes.direction == "backward_filter"
    source, target = (planes.out, planes.size) if data else (planes.size, planes.out)
    # the data gradient of stride 1 correlates dy with the flipped filter
    flipped = data and not planes.spreads
    top, left = (kernel - 1 - before if flipped else before for before in planes.before)
    first, _, out = problem.operands
    itemsize = devices.DTYPES[problem.dtype_of(first)].itemsize
    out_itemsize = devices.DTYPES[problem.dtype_of(out)].itemsize
    row = target[1] * out_itemsize
    staged = not summed and (planes.spreads or (row % _SECTOR != 0 and row < _SHORT_ROW))
    wide = _VECTOR // itemsize if problem.alignment_of(first) >= _VECTOR else 0
    tile = _tile(planes, source, left, rows, threads, wide, staged)
    if tile is None:
        return None
    shares = -(-planes.channels // tile.planes)
    each = tile.row_tiles * shares
    full, most = (_FULL_OF_SUMS, _MOST_SUMMED_IMAGES) if summed else (_FULL, _MOST_IMAGES)
    images = max(1, min(planes.batch * each // full, most))
    chunks = -(-planes.batch // images)
    if each * chunks > _MOST_BLOCKS:
        return None
    block = _up(tile.threads, 32)
    shared = tile.floats
    geometry = (
        planes.channels,
        planes.batch,
        *source,
        *target,
        top,
        left,
        tile.planes,
        tile.groups,
        tile.row_tiles,
        images,
        tile.columns,
        tile.lead,
        tile.pitch,
        tile.plane_pitch,
        tile.vector,
    )
    add = int(problem.accumulate)
    own: tuple[int, ...]
    if summed:
        parts = _PARTS if tile.groups * tile.columns >= 32 else 1
        # eight floats more than whole banks: the threads that add up four taps side by side do not meet
        row_length = block + 8
        of_tap = row_length + tile.planes * parts
        taps = min(kernel * kernel, max(1, max(shared, _SUM_SHARED) // of_tap))
        shared = max(shared, taps * of_tap)
        own = (taps, row_length, parts)
    elif planes.spreads:
        own = (add,)
    else:
        own = (add, int(staged))
    launch = Launch(
        function=f"depthwise_{rows}",
        defines=_defines(problem, planes),
        grid=(each * chunks, 1),
        block=(block, 1),
        shared=4 * shared,
        arguments=tuple(map(np.int32, (*own, *geometry))),
    )
    return _summed(problem, launch, chunks * tile.row_tiles) if summed else Work(launch)


def general(problem: ConvolutionProblem) -> Work:
    """Says how a Problem is computed by the kernels for any geometry.

    Args:
        problem: one that `is_possible`.

    Returns:
        The launches.
    """
    planes = _Planes.of(problem)
    first, _, out = problem.operands
    word, out_word = problem.dtype_of(first), problem.dtype_of(out)
    suffix = kernel_loader.SUFFIXES[devices.DTYPES[word]]
    block = (_GENERAL_THREADS, 1)
    if planes.direction == "backward_filter":
        across = -(-planes.kernel[1] // _GENERAL_TAPS)
        blocks = problem.w_shape[0] * planes.kernel[0] * across
        splits = max(1, min(planes.batch, _FULL_OF_SUMS // blocks, _MOST_SPLITS))
        images = -(-planes.batch // splits)
        splits = -(-planes.batch // images)
        arguments = (np.int32(planes.batch), np.int32(images), *planes.arguments())
        shared = 4 * _GENERAL_TAPS * _GENERAL_THREADS
        return _summed(
            problem, Launch(f"general_filter_{suffix}", (), (blocks, splits), block, shared, arguments), splits
        )
    if out_word != word:
        suffix += "_" + kernel_loader.SUFFIXES[devices.DTYPES[out_word]]
    count = math.prod(problem.shape_of(out))
    more = (np.int64(count), np.int32(problem.accumulate))
    grid = (min(-(-count // _GENERAL_THREADS), 16 * _MOST_GRID), 1)
    if planes.direction == "forward":
        return Work(Launch(f"general_forward_{suffix}", (), grid, block, 0, (*more, *planes.arguments())))
    every = (step // math.gcd(step, dilation) for step, dilation in zip(planes.stride, planes.dilation, strict=True))
    return Work(
        Launch(f"general_data_{suffix}", (), grid, block, 0, (*more, *map(np.int32, every), *planes.arguments()))
    )


def _summed(problem: ConvolutionProblem, launch: Launch, splits: int) -> Work:
    """Adds the launch that adds up the partial sums of a filter gradient."""
    count = math.prod(problem.w_shape)
    suffix = kernel_loader.SUFFIXES[devices.DTYPES[problem.dtype_of(problem.operands[2])]]
    second = Launch(
        function=f"sum_partials_{suffix}",
        defines=(),
        grid=(min(-(-count // _GENERAL_THREADS), _MOST_GRID), 1),
        block=(_GENERAL_THREADS, 1),
        shared=0,
        arguments=(np.int64(splits), np.int64(count), np.int32(problem.accumulate)),
    )
    return Work(launch, second, 4 * splits * count)


# --- running ----------------------------------------------------------------------------------------------------------


class DepthwiseRunner:
    """One or two launches on CuPy's current stream.

    The kernels are those of the device that is current when it is made.

    Args:
        work: how the Problem is computed.

    Attributes:
        workspace: bytes of scratch memory that a call takes.
    """

    def __init__(self, work: Work) -> None:
        self.workspace = work.workspace
        self._first = _prepared(work.first)
        self._second = None if work.second is None else _prepared(work.second)

    def __call__(self, *operands: Any) -> None:
        """Computes the output from the inputs.

        Args:
            operands: two inputs and the output, CuPy arrays; the output is written, or added to.

        Raises:
            MemoryError: there is no memory for the workspace.
        """
        self.launch(tuple(array.data.ptr for array in operands))

    def launch(self, addresses: tuple[int, ...]) -> None:
        """Does what a call does, on arrays at these device addresses."""
        first, second, out = map(np.uint64, addresses)
        if self._second is None:
            self._first(out, first, second)
            return
        partial = devices.workspace(self.workspace)
        self._first(partial, first, second)
        self._second(out, partial)


def _prepared(launch: Launch) -> Callable[..., None]:
    """Loads the kernel of a launch for the current device; gives what launches it on arrays or addresses."""
    kernel = kernel_loader.load_module(KERNELS, launch.defines).get_function(launch.function)
    grid, block, shared, arguments = launch.grid, launch.block, launch.shared, launch.arguments

    def run(*arrays: Any) -> None:
        kernel(grid, block, (*arrays, *arguments), shared_mem=shared)

    return run


# --- the source -------------------------------------------------------------------------------------------------------


class DepthwiseSource:
    """The source ``depthwise``. See the module."""

    name = "depthwise"
    devices: tuple[str, ...] = ("cuda",)
    kinds = (ConvolutionProblem,)

    def candidates(
        self,
        problem: Problem,
        policy: Policy,  # noqa: ARG002
        device: Device,  # noqa: ARG002
    ) -> Iterator[Candidate]:
        """Yields what can solve a Problem, the likely fastest first. Nothing is run, and nothing compiled.

        Args:
            problem: a ConvolutionProblem; for another kind there is nothing.
            policy: not looked at.
            device: not looked at.

        Yields:
            Up to three candidates for a filter that has kernels of its own, else one; nothing for a Problem that
            the kernels do not take.
        """
        if not isinstance(problem, ConvolutionProblem) or not is_possible(problem):
            return
        found: list[Work] = []
        for rows, threads in _variants(problem):
            work = direct(problem, rows, threads)
            if work is None or work in found:
                continue
            found.append(work)
            yield self._candidate(DIRECT, work, (("rows", rows), ("threads", threads)))
        if not found:
            yield self._candidate(GENERAL, general(problem), ())

    def restore(self, problem: Problem, choice: Choice, device: Device) -> Candidate:  # noqa: ARG002
        """Makes the candidate of a stored choice again.

        Args:
            problem: the Problem it was chosen for.
            choice: what was stored.
            device: not looked at.

        Returns:
            The candidate.

        Raises:
            ValueError: the kernels do not take the Problem, or there is no such candidate.
        """
        if not isinstance(problem, ConvolutionProblem) or not is_possible(problem):
            raise ValueError(f"choice: {self.name} has nothing for {problem}")
        work: Work | None = None
        if choice.algo == GENERAL and not choice.parameters:
            work = general(problem)
        elif choice.algo == DIRECT:
            given = dict(choice.parameters)
            rows, threads = given.pop("rows", None), given.pop("threads", None)
            if not given and isinstance(rows, int) and isinstance(threads, int):
                work = direct(problem, rows, threads)
        if work is None or choice.math != "fma":
            raise ValueError(
                f"choice: {self.name} has no {choice.algo!r} of math {choice.math!r} with parameters "
                f"{dict(choice.parameters)} for {problem}"
            )
        return self._candidate(choice.algo, work, choice.parameters)

    def _candidate(self, algo: str, work: Work, parameters: tuple[tuple[str, int | str], ...]) -> Candidate:
        return Candidate(
            source=self.name,
            algo=algo,
            math="fma",
            workspace=work.workspace,
            deterministic=True,
            build=lambda: DepthwiseRunner(work),
            parameters=parameters,
        )


def _variants(problem: ConvolutionProblem) -> tuple[tuple[int, int], ...]:
    """Gives rows of a thread and threads of a block to offer: small planes in smaller blocks, large ones in larger."""
    planes = _Planes.of(problem)
    target = planes.size if planes.direction == "backward_data" else planes.out
    many, few = _PAIRS if planes.spreads else _ROWS
    made = 2 * many if planes.spreads else many
    small = target[1] * -(-target[0] // made) <= 128
    return ((many, 256), (few, 256), (many, 128 if small else _MOST_THREADS))
