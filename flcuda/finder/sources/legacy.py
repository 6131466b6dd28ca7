"""Source ``legacy``: the algorithms behind cudnnFindConvolution*, cudnnGetConvolution*_v7 and cudnnConvolution*.

NVIDIA marks these functions deprecated; on many problems in strict float32 nothing else of cuDNN's is as fast.

Note [staging]: what these functions cannot take as it is goes through a packed copy from CuPy's pool, made at each run
and so part of the time that the finder measures: padding that differs before and after (the copy of x is padded, that
of dx cropped), filters that are packed in no layout or in another than the tensors, and operands whose address is
aligned to fewer than 16 bytes. When all is refused like that, there is a second attempt on packed NCHW copies of all
operands. 1-D convolutions run as 2-D ones of height 1. A candidate's workspace counts the copies.

Note [lists]: cudnnGet*_v7 ranks algorithms without running them, each with its workspace, determinism and math type,
and that is enough for a finder that measures by itself. It may leave algorithms out; those that have a workspace size
for the problem are added behind its list. What cannot be the best is left out under the effort "fast", since a run of
it may take longer than those of all others together (100 ms on an H200 where the best took one): what uses no tensor
cores and transforms nothing, where others do and a group has `FEW_CHANNELS` or more on both sides. cudnnFind* runs
every algorithm some times and reports times, 1.2 to 1.4 times those that events give: it is called with the effort
"wide" only, where its times tell of what the workspace limit excludes.

Note [math]: Find reports a math type for each entry, and that one is set before the entry runs (cupy PR#1428). With
math "fma" every entry runs under CUDNN_FMA_MATH, the only type that forbids TF32, and entries that want tensor
operations are dropped. With "tensor_op" those that would convert operands to a smaller type first (ALLOW_CONVERSION)
are dropped.

Note [5x5 Winograd]: in float32 the non-fused Winograd algorithm for 5x5 filters, which runs in all three directions,
loses more digits than TF32 does: on an H200 with cuDNN 9.19 its largest error was 0.2 to 0.3 where the outputs'
standard deviation was about 20 (16 and 32 channels, normal data). It is never offered.
"""

import contextlib
import ctypes
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flcuda import cudnn
from flcuda import device as devices
from flcuda.device import Device
from flcuda.errors import NOT_SUPPORTED, CudnnError, CudnnNotSupportedError
from flcuda.finder import errata
from flcuda.finder.candidate import Candidate
from flcuda.finder.choice import Choice
from flcuda.finder.plan import is_out_of_memory
from flcuda.finder.policy import Policy
from flcuda.finder.problem import ConvolutionProblem, Problem
from flcuda.finder.sources.staging import ALIGNMENT, BITS, Operand, split_padding

LARGEST = 2**31 - 1
"""More elements, or a larger stride, does not fit into the 32-bit integers of the descriptors."""

FEW_CHANNELS = 8
"""Tensor cores multiply so many at a time, and more; with fewer, who is best is open."""

_NCHW = "nchw"
_GIVEN = "given"
_NUMBERED = "ALGO_"


@dataclass(frozen=True, slots=True)
class _Direction:
    """One row of the table of the three directions: the C functions, and the order in which they take the operands.

    Attributes:
        find: name of the function that measures the algorithms.
        get: name of the one that ranks them by heuristics.
        workspace: name of the one that gives an algorithm's workspace.
        run: name of the one that computes.
        entry: name of the struct in which the first two answer.
        prefix: what the enum's members begin with.
        count: name of the member that counts the algorithms.
        swapped: the C functions take the second input first.
        plain: names of the algorithms that use no tensor cores and transform nothing, so that they do all operations on
            the ordinary cores (cuDNN's documentation of the enum).
        racy: names of the algorithms that add with atomics, so that their bits differ from run to run (the header).
    """

    find: str
    get: str
    workspace: str
    run: str
    entry: str
    prefix: str
    count: str
    swapped: bool
    plain: tuple[str, ...]
    racy: tuple[str, ...] = ()


_DIRECTIONS = {
    "forward": _Direction(
        find="cudnnFindConvolutionForwardAlgorithmEx",
        get="cudnnGetConvolutionForwardAlgorithm_v7",
        workspace="cudnnGetConvolutionForwardWorkspaceSize",
        run="cudnnConvolutionForward",
        entry="cudnnConvolutionFwdAlgoPerf_t",
        prefix="CUDNN_CONVOLUTION_FWD_ALGO_",
        count="CUDNN_CONVOLUTION_FWD_ALGO_COUNT",
        swapped=False,
        plain=("IMPLICIT_GEMM", "GEMM", "DIRECT"),
    ),
    "backward_data": _Direction(
        find="cudnnFindConvolutionBackwardDataAlgorithmEx",
        get="cudnnGetConvolutionBackwardDataAlgorithm_v7",
        workspace="cudnnGetConvolutionBackwardDataWorkspaceSize",
        run="cudnnConvolutionBackwardData",
        entry="cudnnConvolutionBwdDataAlgoPerf_t",
        prefix="CUDNN_CONVOLUTION_BWD_DATA_ALGO_",
        count="CUDNN_CONVOLUTION_BWD_DATA_ALGO_COUNT",
        swapped=True,
        plain=("ALGO_0",),
        racy=("ALGO_0",),
    ),
    "backward_filter": _Direction(
        find="cudnnFindConvolutionBackwardFilterAlgorithmEx",
        get="cudnnGetConvolutionBackwardFilterAlgorithm_v7",
        workspace="cudnnGetConvolutionBackwardFilterWorkspaceSize",
        run="cudnnConvolutionBackwardFilter",
        entry="cudnnConvolutionBwdFilterAlgoPerf_t",
        prefix="CUDNN_CONVOLUTION_BWD_FILTER_ALGO_",
        count="CUDNN_CONVOLUTION_BWD_FILTER_ALGO_COUNT",
        swapped=False,
        plain=("ALGO_0", "ALGO_3"),
        racy=("ALGO_0", "ALGO_3"),
    ),
}


# --- what cuDNN is given ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """A Problem as the legacy functions take it.

    Attributes:
        problem: the Problem.
        layout: "given", or "nchw" for the second attempt of Note [staging].
        x: x or dx.
        w: w or dw.
        y: y or dy.
        filter_layout: in which layout the filter is packed.
        padding: on both sides, what both sides have in common.
        stride: one number a spatial dimension.
        dilation: likewise.
    """

    problem: ConvolutionProblem
    layout: str
    x: Operand
    w: Operand
    y: Operand
    filter_layout: str
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def create(cls, problem: ConvolutionProblem, layout: str = _GIVEN) -> "Call":
        """Works out what cuDNN is given.

        Args:
            problem: any Problem.
            layout: "given": tensors keep their strides; "nchw": everything that is not packed NCHW is copied.

        Returns:
            The call. Nothing is allocated.
        """
        x_name, w_name, y_name = sorted(problem.operands, key=lambda name: "xwy".index(name[-1]))
        agreed = problem.layout_of(x_name)
        if agreed != problem.layout_of(y_name) or agreed == "strided" or layout == _NCHW:
            agreed = _NCHW
        raised = len(problem.stride) == 1
        common, borders = split_padding(problem)
        pack = layout == _NCHW
        how: dict[str, Any] = {"layout": agreed, "alignment": ALIGNMENT, "raised": raised}
        return cls(
            problem=problem,
            layout=layout,
            x=Operand.create(problem, x_name, borders=borders, packed=pack, **how),
            w=Operand.create(problem, w_name, packed=True, **how),
            y=Operand.create(problem, y_name, packed=pack, **how),
            filter_layout=agreed,
            padding=(0, *common) if raised else common,
            stride=(1, *problem.stride) if raised else problem.stride,
            dilation=(1, *problem.dilation) if raised else problem.dilation,
        )

    @property
    def operands(self) -> tuple[Operand, Operand, Operand]:
        """The two inputs and the output, in the Problem's order."""
        by_letter = {"x": self.x, "w": self.w, "y": self.y}
        first, second, out = self.problem.operands
        return by_letter[first[-1]], by_letter[second[-1]], by_letter[out[-1]]

    @property
    def copies_nothing(self) -> bool:
        """Whether no operand is staged."""
        return not any(operand.staged for operand in self.operands)

    @property
    def copied(self) -> int:
        """Bytes of all copies."""
        return sum(operand.nbytes for operand in self.operands)

    def refusal(self) -> str | None:
        """Says why the legacy functions cannot take the Problem at all; None when they may."""
        p = self.problem
        first, _, out = p.operands
        if p.dtype_of(out) != p.dtype_of(first):
            return (
                f"of {p.dtype_of(first)} operands the legacy functions write {p.dtype_of(first)}, not {p.dtype_of(out)}"
            )
        for operand in self.operands:
            elements = math.prod(operand.shape)
            if elements > LARGEST:
                return f"{operand.name} has {elements} elements; legacy descriptors hold at most 2^31-1"
            if max(operand.strides) > LARGEST:
                return f"{operand.name} has strides {operand.strides}; legacy descriptors hold at most 2^31-1"
        return None


@dataclass(frozen=True, slots=True)
class _Descriptors:
    """The descriptors of a Call in the order of the C functions."""

    first: Any
    second: Any
    convolution: Any
    out: Any

    @property
    def all(self) -> tuple[Any, Any, Any, Any]:
        """As Get and the workspace function take them."""
        return self.first, self.second, self.convolution, self.out


def descriptors(call: Call, math_type: Any) -> _Descriptors:
    """Makes the cuDNN descriptors of a call; needs no GPU.

    Args:
        call: what is called.
        math_type: a cudnnMathType_t.

    Returns:
        The descriptors, owned by the result.

    Raises:
        CudnnError: cuDNN refuses one of them.
    """
    from flcuda.cudnn.resources import ConvolutionDescriptor, FilterDescriptor, TensorDescriptor

    made: dict[str, Any] = {}
    for operand in call.operands:
        if operand.name in ("w", "dw"):
            made[operand.name] = FilterDescriptor(operand.shape, operand.dtype, call.filter_layout)
        else:
            made[operand.name] = TensorDescriptor(operand.shape, operand.strides, operand.dtype)
    p = call.problem
    first, second, out = p.operands
    if _DIRECTIONS[p.direction].swapped:
        first, second = second, first
    convolution = ConvolutionDescriptor(call.padding, call.stride, call.dilation, p.groups, p.compute, math_type)
    return _Descriptors(made[first], made[second], convolution, made[out])


# --- running ----------------------------------------------------------------------------------------------------------


class LegacyRunner:
    """A runner: one algorithm with its descriptors, on the thread and device that made it.

    Args:
        call: what is called.
        algo: the number of the algorithm in cuDNN's enum.
        math_type: a cudnnMathType_t, as the algorithm must be run.

    Raises:
        CudnnError: cuDNN refuses a descriptor, or does not have the algorithm for this problem.
    """

    def __init__(self, call: Call, algo: int, math_type: Any) -> None:
        from flcuda.cudnn.resources import handle

        row = _DIRECTIONS[call.problem.direction]
        self._call = call
        self._algo = algo
        self._descriptors = descriptors(call, math_type)
        self._run = getattr(cudnn, row.run)
        self._handle = handle
        self._swapped = row.swapped
        scalar = ctypes.c_double if call.problem.compute == "float64" else ctypes.c_float
        self._alpha = scalar(1)
        self._beta = scalar(1 if call.problem.accumulate else 0)
        self._copies_nothing = call.copies_nothing
        size = ctypes.c_size_t()
        getattr(cudnn, row.workspace)(handle(), *self._descriptors.all, algo, ctypes.byref(size))
        self._workspace = size.value
        self.workspace = size.value + call.copied
        """Bytes that cuDNN wants beside the operands, and those of the copies of Note [staging]."""

    def __call__(self, a: Any, b: Any, out: Any) -> None:
        """Computes ``out`` from two operands in the Problem's order, on CuPy's current stream.

        Args:
            a: the first input.
            b: the second input.
            out: written, or added to.

        Raises:
            CudnnError: cuDNN refuses to run.
            MemoryError: there is no memory for the workspace or a copy.
        """
        if self._copies_nothing:
            self._launch(a, b, out)
            return
        first, second, result = self._call.operands
        # The copies live until the launch is queued; the pool hands their memory on in the order of the stream.
        a = first.copy_in(a) if first.staged else a
        b = second.copy_in(b) if second.staged else b
        if not result.staged:
            self._launch(a, b, out)
            return
        copy = result.copy_in(out) if self._call.problem.accumulate else result.empty()
        self._launch(a, b, copy)
        result.copy_out(copy, out)

    def _launch(self, a: Any, b: Any, out: Any) -> None:
        """Calls cuDNN on what each operand, or its staged copy, starts with in memory."""
        if self._swapped:
            a, b = b, a
        made = self._descriptors
        scratch = devices.workspace(self._workspace)
        self._run(
            self._handle(),
            self._alpha,
            made.first,
            a.data.ptr,
            made.second,
            b.data.ptr,
            made.convolution,
            self._algo,
            scratch.data.ptr,
            self._workspace,
            self._beta,
            made.out,
            out.data.ptr,
        )


# --- the source -------------------------------------------------------------------------------------------------------


class LegacySource:
    """The source ``legacy``, for CUDA.

    Args:
        gpu: known faults are looked up for it; by default for the device that the source is asked for.
    """

    name = "legacy"
    devices = ("cuda",)
    kinds = (ConvolutionProblem,)

    def __init__(self, gpu: errata.Gpu | None = None) -> None:
        self._gpu = gpu

    def candidates(self, problem: Problem, policy: Policy, device: Device) -> Iterator[Candidate]:
        """Yields cuDNN's algorithms for a Problem, in cuDNN's own order; the refused ones with the reason.

        With the effort "wide" cuDNN measures them on scratch arrays of CuPy's pool and on the current stream, otherwise
        and in the mode "heuristic" it only ranks them. See Note [lists].

        Args:
            problem: any ConvolutionProblem; for another kind there is nothing.
            policy: mode, effort and workspace limit.
            device: a CUDA device, which is current.

        Yields:
            The candidates.

        Raises:
            CudnnNotSupportedError: the legacy functions cannot take the Problem.
        """
        if not isinstance(problem, ConvolutionProblem):
            return
        calls = [Call.create(problem)]
        packed = Call.create(problem, _NCHW)
        if packed.operands != calls[0].operands:
            calls.append(packed)
        reason = calls[0].refusal()
        if reason is not None:
            raise CudnnNotSupportedError(
                "flcuda.finder.legacy", NOT_SUPPORTED, f"{reason} ({problem})", "CUDNN_STATUS_NOT_SUPPORTED"
            )
        limit = devices.workspace_limit(device) if policy.workspace_limit is None else policy.workspace_limit
        gpu = self._gpu or errata.Gpu.here(device)
        measure = policy.effort == "wide" and policy.mode != "heuristic"
        for call in calls:
            if call.refusal() is not None:
                continue
            offered = [errata.apply(candidate, problem, gpu) for candidate in _offered(call, measure, limit)]
            if policy.effort == "fast" and policy.mode == "find":
                offered = _hopeful(problem, offered)
            yield from offered
            if any(candidate.reason is None for candidate in offered):
                return

    def restore(self, problem: Problem, choice: Choice, device: Device) -> Candidate:
        """Makes the candidate of a stored choice again, without asking cuDNN.

        Args:
            problem: the Problem it was chosen for.
            choice: what was stored.
            device: a CUDA device, which is current.

        Returns:
            The candidate.

        Raises:
            ValueError: there is no such algorithm or math type, or it must not be used for this Problem.
        """
        if not isinstance(problem, ConvolutionProblem):
            raise ValueError(f"choice: legacy solves convolutions only, not {problem}")
        row = _DIRECTIONS[problem.direction]
        parameters = dict(choice.parameters)
        name = choice.algo.removeprefix(_NUMBERED)
        # A number without a name is an algorithm newer than the headers.
        algo = getattr(cudnn, f"{row.prefix}{name}", int(name) if name.isdecimal() else None)
        math_type = getattr(cudnn, f"CUDNN_{parameters.get('math_type')}_MATH", None)
        layout = parameters.get("layout", _GIVEN)
        if algo is None or math_type is None or layout not in (_GIVEN, _NCHW):
            raise ValueError(f"choice: legacy has no {choice.algo} with parameters {parameters} for {problem}")
        call = Call.create(problem, str(layout))
        candidate = Candidate(
            source=self.name,
            algo=choice.algo,
            math=choice.math,
            workspace=choice.workspace,
            deterministic=choice.deterministic,
            build=lambda: LegacyRunner(call, int(algo), math_type),
            parameters=choice.parameters,
            notes=_notes(choice.algo, choice.math, choice.deterministic),
        )
        candidate = errata.apply(candidate, problem, self._gpu or errata.Gpu.here(device))
        if candidate.reason is not None:
            raise ValueError(f"choice: {choice.algo} must not be used for {problem}: {candidate.reason}")
        if choice.policy.deterministic and not candidate.deterministic:
            raise ValueError(f"choice: {choice.algo} is not deterministic for {problem}")
        return candidate


def _offered(call: Call, measure: bool, limit: int) -> list[Candidate]:
    """Asks cuDNN for the algorithms of a call; what it refuses is a candidate with the reason."""
    row = _DIRECTIONS[call.problem.direction]
    count = int(getattr(cudnn, row.count))
    # One entry for each algorithm and math type.
    entries = (getattr(cudnn, row.entry) * (3 * count))()
    returned = ctypes.c_int()
    try:
        made = descriptors(call, _math_asked(call.problem))
        if measure:
            sizes = _workspaces(row, made, range(count))
            largest = max((size for size in sizes.values() if size <= limit - call.copied), default=0)
            _find(row, call, made, entries, returned, largest)
            listed = list(entries[: returned.value])
        else:
            _get(row, made, entries, returned)
            listed = list(entries[: returned.value])
            works = {int(entry.algo) for entry in listed if entry.status == 0}
            sizes = _workspaces(row, made, (algo for algo in range(count) if algo not in works))
            listed = _completed(row, call, listed, sizes)
    except CudnnError as error:
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        return [_refused(call, "all", str(error))]
    candidates: dict[object, Candidate] = {}
    for entry in listed:
        candidate = _candidate(row, call, entry, measure)
        size = sizes.get(int(entry.algo), 0) + call.copied
        if candidate is None:
            continue
        # What failed because Find's scratch was too small for it is reported as failed, its size unknown.
        size = candidate.workspace if entry.status == 0 else size
        if size > limit:
            candidate = replace(candidate, reason=f"workspace of {size} bytes is above the limit of {limit}")
        candidates.setdefault(candidate.identity, candidate)
    if not candidates:
        return [_refused(call, "all", f"{row.find if measure else row.get} returned no algorithm")]
    return list(candidates.values())


def _hopeful(problem: ConvolutionProblem, offered: list[Candidate]) -> list[Candidate]:
    """Leaves out what cannot be the best. See Note [lists]."""
    channels = min(problem.w_shape[0] // problem.groups, problem.w_shape[1])
    if problem.math == "fma" or channels < FEW_CHANNELS:
        return offered
    plain = _DIRECTIONS[problem.direction].plain
    hopeful = [candidate for candidate in offered if candidate.algo not in plain or candidate.reason is not None]
    return hopeful if any(candidate.reason is None for candidate in hopeful) else offered


def _completed(row: _Direction, call: Call, listed: list[Any], sizes: dict[int, int]) -> list[Any]:
    """Adds the algorithms that cudnnGet* leaves out or refuses although they have a workspace size. See Note [lists].

    Args:
        row: the direction.
        call: what is called.
        listed: the entries that cuDNN returned.
        sizes: bytes of workspace by the number of each algorithm that works and is not among those.

    Returns:
        The entries, without cuDNN's refusals of what is added, and behind them those added.
    """
    added = []
    for algo, size in sizes.items():
        racy = _algo_name(row, algo) in row.racy
        added.append(
            getattr(cudnn, row.entry)(
                algo=algo,
                status=0,
                memory=size,
                determinism=cudnn.CUDNN_NON_DETERMINISTIC if racy else cudnn.CUDNN_DETERMINISTIC,
                mathType=_math_asked(call.problem),
            )
        )
    return [entry for entry in listed if int(entry.algo) not in sizes] + added


def _math_asked(problem: ConvolutionProblem) -> Any:
    """Gives the math type under which cuDNN is asked. See Note [math]."""
    if problem.math == "fma":
        return cudnn.CUDNN_FMA_MATH
    # DEFAULT is the one that permits TF32; for 16-bit operands TENSOR_OP asks for what they are made for.
    return cudnn.CUDNN_DEFAULT_MATH if problem.precision == "tf32" else cudnn.CUDNN_TENSOR_OP_MATH


def _math_type(problem: ConvolutionProblem, reported: int) -> Any:
    """Gives the math type under which an entry runs; None when it contradicts the Problem. See Note [math]."""
    if problem.math == "fma":
        plain = (int(cudnn.CUDNN_FMA_MATH), int(cudnn.CUDNN_DEFAULT_MATH))
        return cudnn.CUDNN_FMA_MATH if reported in plain else None
    for allowed in (cudnn.CUDNN_DEFAULT_MATH, cudnn.CUDNN_TENSOR_OP_MATH, cudnn.CUDNN_FMA_MATH):
        if reported == int(allowed):
            return allowed
    return None


def _candidate(row: _Direction, call: Call, entry: Any, measured: bool) -> Candidate | None:
    """Makes the candidate of one entry of cuDNN's answer; None when its math contradicts the Problem."""
    algo = int(entry.algo)
    name = _algo_name(row, algo)
    if entry.status != 0:
        return _refused(call, name, _status_text(int(entry.status)))
    if name == "WINOGRAD_NONFUSED" and call.w.shape[2:] == (5, 5):
        return _refused(call, name, "less exact than TF32 with 5x5 filters")
    math_type = _math_type(call.problem, int(entry.mathType))
    if math_type is None:
        return None
    parameters: list[tuple[str, int | str]] = [
        ("math_type", math_type.name.removeprefix("CUDNN_").removesuffix("_MATH")),
    ]
    if call.layout != _GIVEN:
        parameters.append(("layout", call.layout))
    math_word = "fma" if math_type is cudnn.CUDNN_FMA_MATH else "tensor_op"
    deterministic = int(entry.determinism) == int(cudnn.CUDNN_DETERMINISTIC)
    return Candidate(
        source=LegacySource.name,
        algo=name,
        math=math_word,
        workspace=int(entry.memory) + call.copied,
        deterministic=deterministic,
        build=lambda: LegacyRunner(call, algo, math_type),
        parameters=tuple(parameters),
        reported_ms=float(entry.time) if measured else None,
        notes=_notes(name, math_word, deterministic),
    )


def _algo_name(row: _Direction, algo: int) -> str:
    """Gives the name of an algorithm: ALGO_ and its number where it has no other, or is newer than the headers."""
    try:
        name = type(getattr(cudnn, row.count))(algo).name.removeprefix(row.prefix)
    except ValueError:
        name = str(algo)
    return f"{_NUMBERED}{name}" if name.isdecimal() else name


def _notes(name: str, math_word: str, deterministic: bool) -> tuple[str, ...]:
    """Gives the words that the graph API would have for an algorithm; see `flcuda.cudnn.graph.NOTES`."""
    words = {
        "winograd": name.startswith("WINOGRAD"),
        "fft": name.startswith("FFT"),
        "tensor_core": math_word == "tensor_op",
        "nondeterministic": not deterministic,
    }
    return tuple(word for word, holds in words.items() if holds)


def _refused(call: Call, algo: str, reason: str) -> Candidate:
    """Makes the row of what cuDNN does not do."""
    status = CudnnNotSupportedError("flcuda.finder.legacy", NOT_SUPPORTED, reason, "CUDNN_STATUS_NOT_SUPPORTED")

    def build() -> Any:
        raise status

    return Candidate(
        source=LegacySource.name,
        algo=algo,
        math=call.problem.math,
        workspace=0,
        deterministic=True,
        build=build,
        parameters=() if call.layout == _GIVEN else (("layout", call.layout),),
        reason=reason,
    )


def _status_text(status: int) -> str:
    try:
        return str(cudnn.cudnnStatus_t(status).name)
    except ValueError:
        return f"status {status}"


def _get(row: _Direction, made: _Descriptors, entries: Any, returned: Any) -> None:
    from flcuda.cudnn.resources import handle

    getattr(cudnn, row.get)(handle(), *made.all, len(entries), ctypes.byref(returned), entries)


def _find(row: _Direction, call: Call, made: _Descriptors, entries: Any, returned: Any, workspace: int) -> None:
    """Lets cuDNN measure on scratch arrays, with so many bytes of workspace; the caller's are never written."""
    from flcuda.cudnn.resources import handle

    first, second, out = call.operands
    a, b = _random(first), _random(second)
    result = devices.cupy().empty(out.extent, BITS[devices.DTYPES[out.dtype].itemsize])
    if row.swapped:
        a, b = b, a
    scratch = _scratch(workspace)
    getattr(cudnn, row.find)(
        handle(),
        made.first,
        a.data.ptr,
        made.second,
        b.data.ptr,
        made.convolution,
        made.out,
        result.data.ptr,
        len(entries),
        ctypes.byref(returned),
        entries,
        scratch.data.ptr,
        scratch.nbytes,
    )


def _workspaces(row: _Direction, made: _Descriptors, algos: Iterable[int]) -> dict[int, int]:
    """Gives the bytes of scratch memory that each algorithm asks for; one that is not for this problem is missing."""
    from flcuda.cudnn.resources import handle

    sizes = {}
    size = ctypes.c_size_t()
    for algo in algos:
        with contextlib.suppress(CudnnNotSupportedError):
            getattr(cudnn, row.workspace)(handle(), *made.all, algo, ctypes.byref(size))
            sizes[algo] = size.value
    return sizes


def _scratch(size: int) -> Any:
    """Allocates a workspace for Find: halved while memory runs out, after the pool's free blocks have been given back.

    CuPy clears the CUDA error of a failed allocation before it raises.
    """
    while True:
        try:
            return devices.workspace(size)
        except MemoryError as error:
            if size == 0 or not is_out_of_memory(error):
                raise
        devices.cupy().get_default_memory_pool().free_all_blocks()
        try:
            return devices.workspace(size)
        except MemoryError:
            size //= 2


def _random(operand: Operand) -> Any:
    """Fills the memory of an operand with numbers in [-1, 1) that no two neighbours share: zeros would run faster."""
    cupy = devices.cupy()
    # Fibonacci hashing: the odd number nearest to 2^32 divided by the golden ratio.
    spread = cupy.arange(operand.extent, dtype=np.uint32) * np.uint32(2654435769)
    values = spread.view(np.int32).astype(np.float32) * np.float32(2.0**-31)
    if operand.dtype == "bfloat16":
        # The upper half of a float32 is a bfloat16, rounded towards zero.
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return values.astype(devices.DTYPES[operand.dtype], copy=False)
