"""Source ``graph``: the engines of cuDNN's graph API, for one convolution.

On tensor cores they are the fastest that cuDNN has. They take what the legacy functions do not: any strides of any
operand, 16-bit operands with a float32 result, more than 2^31 elements. 1-D convolutions run as 2-D ones of height 1.

Note [padding]: padding that differs before and after is an attribute of the convolution, and cuDNN builds plans for it.
On an H200 with cuDNN 9.19, engines 1, 20 and 50 computed something else than that without a word (3x3, padding 1
before and 2 after: errors as large as the result). Such Problems are refused; the legacy source pads a copy.

Note [order]: cuDNN's heuristics rank configurations, an engine with values for its knobs, and the ranking is good: the
first loses some per cent against the best. So only the first `LIMIT` that may be used are built and measured. Mode A is
asked; where nothing of it may be used, the fallback list and mode B are.

Note [math]: cuDNN knows no math type in its graph API. An engine that uses tensor cores says so in its numerical notes,
and on float32 operands that is TF32. With math "fma" those are refused. FP64 tensor cores compute in float64, so that a
float64 Problem takes every engine.

Note [precision]: never offered are engines that convert their inputs to a smaller type or sum in one, and Winograd with
13x13 tiles, which is how 5x5 filters are done: it loses more digits than TF32 (Note [5x5 Winograd] of the legacy
source).
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from flcuda import device as devices
from flcuda.cudnn import library as libraries
from flcuda.cudnn import resources
from flcuda.cudnn.device_properties import DeviceProperties
from flcuda.cudnn.graph import EngineConfig, ExecutionPlan, Graph, OperationGraph, Tensor
from flcuda.cudnn.resources import Handle
from flcuda.device import Device
from flcuda.errors import NOT_SUPPORTED, CudnnError, CudnnNotSupportedError, cudnn_error
from flcuda.finder import errata
from flcuda.finder.candidate import Candidate
from flcuda.finder.choice import Choice
from flcuda.finder.policy import Policy
from flcuda.finder.problem import ConvolutionProblem

LIMIT = 10
"""So many configurations are built and measured: PyTorch's torch.backends.cudnn.benchmark_limit. See Note [order]."""

LARGEST_RANK = 3
"""Spatial dimensions that cuDNN's convolutions take."""

_REFUSED_NOTES = {
    "down_convert_inputs": "converts its inputs to a lower precision",
    "reduced_precision_reduction": "sums in a lower precision",
    "winograd_tile_13x13": "Winograd with 13x13 tiles is less exact than TF32",
}
_TENSOR_CORE = "tensor_core"
_BAD_PARAMETER = 2000


# --- the graph --------------------------------------------------------------------------------------------------------


def operation_graph(
    problem: ConvolutionProblem, handle: Handle | None = None, properties: DeviceProperties | None = None
) -> OperationGraph:
    """Makes the graph of a Problem: one convolution, its tensors numbered 1, 2 and 3 in the order of the operands.

    Args:
        problem: any ConvolutionProblem.
        handle: of the GPU here; borrowed.
        properties: of another GPU; borrowed. One of the two.

    Returns:
        The finalized graph.

    Raises:
        CudnnNotSupportedError: cuDNN has no such graph; the text says what it does not take.
        CudnnError: cuDNN cannot be used.
    """
    rank = len(problem.stride)
    if rank > LARGEST_RANK:
        raise _not_supported(f"cuDNN's convolutions have at most {LARGEST_RANK} spatial dimensions", problem)
    if problem.padding_before != problem.padding_after:
        raise _not_supported("some of cuDNN's engines get padding wrong that differs before and after", problem)
    for name in problem.operands:
        size = devices.DTYPES[problem.dtype_of(name)].itemsize
        if problem.alignment_of(name) < size:
            raise _not_supported(
                f"{name} is aligned to {problem.alignment_of(name)} bytes, and one element has {size}", problem
            )
    graph = Graph(problem.compute)
    first, second, out = problem.operands
    a, b = _tensor(graph, problem, first), _tensor(graph, problem, second)
    flat = rank == 1
    geometry: dict[str, Any] = {
        "padding": _raised(tuple(zip(problem.padding_before, problem.padding_after, strict=True)), (0, 0), flat),
        "stride": _raised(problem.stride, 1, flat),
        "dilation": _raised(problem.dilation, 1, flat),
        "beta": 1.0 if problem.accumulate else 0.0,
        "name": problem.direction,
    }
    shape, strides = _described(problem, out)
    if problem.direction == "forward":
        result = graph.convolution_forward(a, b, **geometry)
    elif problem.direction == "backward_data":
        result = graph.convolution_backward_data(a, b, shape, **geometry)
    else:
        result = graph.convolution_backward_filter(a, b, shape, **geometry)
    graph.output(result, dtype=problem.dtype_of(out), strides=strides, alignment=problem.alignment_of(out), name=out)
    try:
        return graph.build(handle, properties)
    except CudnnError as error:
        if error.status // 1000 * 1000 != _BAD_PARAMETER:
            raise
        # The Problem has been checked: what cuDNN finds wrong with it is what it does not take.
        raise _not_supported(str(error), problem) from error


def _tensor(graph: Graph, problem: ConvolutionProblem, name: str) -> Tensor:
    shape, strides = _described(problem, name)
    return graph.tensor(shape, problem.dtype_of(name), strides=strides, alignment=problem.alignment_of(name), name=name)


def _described(problem: ConvolutionProblem, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Gives shape and strides of an operand as cuDNN gets them."""
    shape, strides = problem.shape_of(name), problem.strides_of(name)
    if len(shape) > 3:
        return shape, strides
    return (*shape[:2], 1, shape[2]), (*strides[:2], shape[2] * strides[2], strides[2])


def _raised(values: tuple[Any, ...], height: Any, flat: bool) -> tuple[Any, ...]:
    """Puts the value of a height in front of those of a 1-D convolution."""
    return (height, *values) if flat else values


def _not_supported(reason: str, problem: ConvolutionProblem) -> CudnnError:
    return cudnn_error("flcuda.finder.graph", NOT_SUPPORTED, f"{reason} ({problem})", "CUDNN_STATUS_NOT_SUPPORTED")


# --- running ----------------------------------------------------------------------------------------------------------


class GraphRunner:
    """A runner: an execution plan, on the thread and device that made it. It owns the plan.

    Args:
        plan: of the graph that `operation_graph` makes.
        handle: the handle that the plan was built with; None for a plan of a GPU that is not here.
    """

    def __init__(self, plan: ExecutionPlan, handle: Handle | None) -> None:
        self.plan = plan
        # Kept, so that the plan is not destroyed after it.
        self.handle = handle
        self._execute = plan.run

    @property
    def workspace(self) -> int:
        """Bytes of scratch memory."""
        return self.plan.workspace

    def __call__(self, a: Any, b: Any, out: Any) -> None:
        """Computes ``out`` from two operands in the Problem's order, on CuPy's current stream.

        Args:
            a: the first input.
            b: the second input.
            out: written, or added to.

        Raises:
            CudnnError: cuDNN refuses to run.
            MemoryError: there is no memory for the workspace.
        """
        scratch = devices.workspace(self.plan.workspace)
        self._execute(resources.handle(), (a.data.ptr, b.data.ptr, out.data.ptr), scratch.data.ptr)


# --- what cuDNN offers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offer:
    """One configuration in cuDNN's order.

    Attributes:
        configuration: engine and knobs.
        candidate: what the finder makes of it; its reason says why it cannot be used.
        plan: its plan; None when it cannot be built, or must not be used whatever its workspace.
    """

    configuration: EngineConfig
    candidate: Candidate
    plan: ExecutionPlan | None


def offers(
    problem: ConvolutionProblem,
    policy: Policy,
    *,
    handle: Handle | None = None,
    properties: DeviceProperties | None = None,
    limit: int | None = None,
) -> list[Offer]:
    """Asks cuDNN's heuristics and builds plans in their order. See Note [order].

    Args:
        problem: any ConvolutionProblem.
        policy: determinism and workspace limit.
        handle: of the GPU here, which is current; borrowed.
        properties: of another GPU; borrowed. One of the two.
        limit: stop after so many that can be used; None for all.

    Returns:
        The configurations, none twice, each with its plan or the reason why there is none.

    Raises:
        CudnnNotSupportedError: no heuristic mode has any; the text lists what each engine says and the likely rule.
        CudnnError: cuDNN cannot be used.
    """
    graph = operation_graph(problem, handle, properties)
    gpu = _gpu(handle, properties)
    largest = policy.workspace_limit if policy.workspace_limit is not None else _workspace_limit(handle, properties)
    found: dict[object, Offer] = {}
    usable = 0
    for modes in (("A",), ("fallback", "B")):
        for mode in modes:
            for configuration in _delivered(graph, mode):
                if usable == limit:
                    return list(found.values())
                if configuration.key in found:
                    continue
                offer = _offer(problem, configuration, policy, gpu, largest)
                found[configuration.key] = offer
                usable += offer.candidate.reason is None
        if usable:
            break
    if not found:
        # Asks every mode once more and raises with what each engine says.
        graph.configurations()
    return list(found.values())


def _delivered(graph: OperationGraph, mode: str) -> list[EngineConfig]:
    try:
        return graph.heuristics(mode)
    except CudnnNotSupportedError:
        return []


def _gpu(handle: Handle | None, properties: DeviceProperties | None) -> errata.Gpu:
    if properties is not None:
        return errata.Gpu(int(properties.profile["deviceVer"]) // 10, libraries.load().version)
    if handle is None:
        raise ValueError("handle, properties: one of them says for which GPU")
    return errata.Gpu.here(handle.device)


def _workspace_limit(handle: Handle | None, properties: DeviceProperties | None) -> int:
    if handle is not None:
        return devices.workspace_limit(handle.device)
    if properties is None:
        raise ValueError("handle, properties: one of them says for which GPU")
    return min(2 * devices.GIB, int(properties.profile["totalGlobalMem"]) // 8)


def _offer(
    problem: ConvolutionProblem, configuration: EngineConfig, policy: Policy, gpu: errata.Gpu, largest: int
) -> Offer:
    """Builds the plan of a configuration, unless it must not be used."""
    candidate = _candidate(problem, configuration, gpu)
    if candidate.reason is None and policy.deterministic and not candidate.deterministic:
        candidate = replace(candidate, reason="not deterministic")
    if candidate.reason is not None:
        return Offer(configuration, candidate, None)
    try:
        plan = configuration.plan()
    except CudnnError as error:
        return Offer(configuration, replace(candidate, reason=str(error)), None)
    reason = None
    if plan.workspace > largest:
        reason = f"workspace of {plan.workspace} bytes is above the limit of {largest}"
    return Offer(configuration, replace(candidate, workspace=plan.workspace, reason=reason), plan)


def _candidate(problem: ConvolutionProblem, configuration: EngineConfig, gpu: errata.Gpu) -> Candidate:
    """Makes the candidate of a configuration whose plan is not built yet; with the reason when it must not be used."""
    notes = configuration.numerical_notes
    tensor_cores = _TENSOR_CORE in notes and problem.compute != "float64"
    reason = next((why for note, why in _REFUSED_NOTES.items() if note in notes), None)
    if reason is None and tensor_cores and problem.math == "fma":
        reason = "uses tensor cores, which math 'fma' forbids"
        if problem.precision == "float32":
            reason += ": on float32 operands that is TF32"
    candidate = Candidate(
        source=GraphSource.name,
        algo=str(configuration.engine_id),
        math="tensor_op" if tensor_cores else "fma",
        workspace=0,
        deterministic=configuration.deterministic,
        build=lambda: GraphRunner(configuration.plan(), None),
        parameters=tuple(configuration.knobs.items()),
        reason=reason,
    )
    return errata.apply(candidate, problem, gpu)


# --- the source -------------------------------------------------------------------------------------------------------


class GraphSource:
    """The source ``graph``, for CUDA.

    Args:
        properties: plans are for this GPU, which need not be here; nothing can be run then. By default they are for the
            device that the source is asked for.
    """

    name = "graph"
    devices = ("cuda",)

    def __init__(self, properties: DeviceProperties | None = None) -> None:
        self._properties = properties

    def candidates(self, problem: ConvolutionProblem, policy: Policy, device: Device) -> Iterator[Candidate]:  # noqa: ARG002
        """Yields configurations of cuDNN's engines in cuDNN's own order; what must not be used with the reason.

        Nothing is run, whatever the policy's mode. An engine that must not be used is one row, whatever its knobs.

        Args:
            problem: any ConvolutionProblem.
            policy: mode, determinism and workspace limit.
            device: a CUDA device, which is current.

        Yields:
            The candidates, their plans built.

        Raises:
            CudnnNotSupportedError: no engine takes the Problem; the text says what each one says, and the likely rule.
        """
        handle = self._handle()
        refused = set()
        for offer in offers(problem, policy, handle=handle, properties=self._properties, limit=LIMIT):
            candidate = offer.candidate
            if offer.plan is not None:
                yield replace(candidate, build=self._builder(problem, candidate, GraphRunner(offer.plan, handle)))
                continue
            row = (candidate.algo, candidate.reason)
            if row not in refused:
                refused.add(row)
                yield replace(candidate, build=self._builder(problem, candidate, None))

    def restore(self, problem: ConvolutionProblem, choice: Choice, device: Device) -> Candidate:  # noqa: ARG002
        """Makes the candidate of a stored choice again: its engine with its knobs, without asking heuristics.

        Args:
            problem: the Problem it was chosen for.
            choice: what was stored.
            device: a CUDA device, which is current.

        Returns:
            The candidate; its plan is not built yet.

        Raises:
            CudnnError: the engine does not take this Problem any more.
            ValueError: there is no such engine or knob, or it must not be used for this Problem.
        """
        handle = self._handle()
        configuration = self._configured(problem, choice.algo, choice.parameters, handle)
        candidate = _candidate(problem, configuration, _gpu(handle, self._properties))
        if candidate.reason is not None:
            raise ValueError(f"choice: engine {choice.algo} must not be used for {problem}: {candidate.reason}")
        if choice.policy.deterministic and not candidate.deterministic:
            raise ValueError(f"choice: engine {choice.algo} is not deterministic for {problem}")
        return replace(
            candidate,
            workspace=choice.workspace,
            parameters=choice.parameters,
            build=self._builder(problem, candidate, None),
        )

    def _handle(self) -> Handle | None:
        return resources.handle() if self._properties is None else None

    def _configured(
        self,
        problem: ConvolutionProblem,
        algo: str,
        parameters: tuple[tuple[str, int | str], ...],
        handle: Handle | None,
    ) -> EngineConfig:
        """Makes a configuration by hand."""
        knobs = {name: value for name, value in parameters if isinstance(value, int)}
        if not algo.isdecimal() or len(knobs) != len(parameters):
            raise ValueError(f"choice: graph has no engine {algo!r} with knobs {dict(parameters)}")
        return operation_graph(problem, handle, self._properties).engine(int(algo)).configure(knobs)

    def _builder(
        self, problem: ConvolutionProblem, candidate: Candidate, prepared: GraphRunner | None
    ) -> Callable[[], GraphRunner]:
        """Gives what builds a runner: the first time the prepared one, if it is of the calling thread and device."""
        waiting = [] if prepared is None else [prepared]

        def build() -> GraphRunner:
            handle = self._handle()
            with contextlib.suppress(IndexError):
                runner = waiting.pop()
                if runner.handle is handle:
                    return runner
            configuration = self._configured(problem, candidate.algo, candidate.parameters, handle)
            return GraphRunner(configuration.plan(), handle)

        return build
