"""Source ``graph``: the engines of cuDNN's graph API, for one convolution or a GraphProblem.

On tensor cores they are the fastest that cuDNN has. They take what the legacy functions do not: any strides of the
tensors, 16-bit operands with a float32 result, more than 2^31 elements. 1-D convolutions run as 2-D ones of height 1.

Note [padding]: padding that differs before and after is an attribute of the convolution, and cuDNN builds plans for it.
On an H200 with cuDNN 9.19, engines 1, 20 and 50 computed something else than that without a word (3x3, padding 1
before and 2 after: errors as large as the result). So cuDNN only gets the padding that both sides have in common. The
rest is a border of zeros around a packed copy of x, or of dx, which is then cropped, as in the legacy source. The
copies are at the beginning of the workspace, and making them is part of each run.

Note [copies]: two more kinds of operands are copied, although a descriptor can say what they are. A filter that is
neither nchw nor nhwc: with gaps cuDNN refuses it, and with its dimensions in another order (K innermost, then C, H, W)
the same GPU and version gave errors as large as the result. And what is aligned to less than 16 bytes: there are
engines that take such an alignment in the descriptor and then load 16 bytes at once (bfloat16 and float32 filter
gradients with 4 and 8 bytes), which ends the CUDA context. A GraphProblem's operands are not copied: it is refused.

Note [order]: cuDNN's heuristics rank configurations, an engine with values for its knobs. On tensor cores the ranking
is good, but not good enough: over 129 convolutions in float16 (H200, cuDNN 9.19) the best of the first 12 of mode A's
36 took 2 per cent longer than the best of all that the modes list, for one in eight 5 to 40 per cent longer. So the
first `LIMIT` that may be used are built and measured, and `OF_EACH` of every other engine that any mode lists, which
may be three times as fast (groups). From there the finder climbs: `GraphSource.around` gives the listed configurations
that are nearest to a leader. With the numbers below that measured 23 configurations, and its best took 0.07 per cent
longer than the best of all, 3 per cent at most. Without tensor cores hardly anything of the list may be used, and the
best is often in the fallback list (strict float32 filter gradients: the engine of mode A with other knobs, in half its
time): there all are measured.

What needs a compiler is left out of these, but of grouped and dilated convolutions, which few engines do well: there
the one of each compiled engine took a fourth to three quarters of the time of the others. So is what cannot be the
best, since a run of it may take longer than all others together: engines without tensor cores beside those with them,
and engine 0, which takes every graph, beside others. Where nothing is measured, the first is built and the others when
they are needed, and the other modes are asked only when nothing of mode A may be used.

Note [wide]: with the effort "wide" everything follows that the three modes list, and then every engine of the graph
that none of them lists, its knobs left to cuDNN. `GraphSource.around` gives what differs from a candidate in one knob.
cuDNN refuses the values that an engine does not have when the configuration is finalized, in 0.1 ms, and a plan takes
it 0.2 ms; but a plan whose kernel is compiled takes 100 to 800 ms of a core. So of those only the first few are built,
`COMPILED`, and what needs no compiler is never left out but around a candidate, where a knob may have 2048 values.

Note [math]: cuDNN knows no math type in its graph API. An engine that uses tensor cores says so in its numerical notes,
and on float32 operands that is TF32. With math "fma" those are refused. Engines of graphs that have neither a
convolution nor a matrix product carry the note too; there it means nothing. FP64 tensor cores compute in float64, so
that a float64 Problem takes every engine.

Note [precision]: never offered are engines that convert their inputs to a smaller type or sum in one, and Winograd with
13x13 tiles, which is how 5x5 filters are done: it loses more digits than TF32 (Note [5x5 Winograd] of the legacy
source).
"""

import collections
import contextlib
import functools
import itertools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flcuda import device as devices
from flcuda.cudnn import library as libraries
from flcuda.cudnn import resources
from flcuda.cudnn.device_properties import DeviceProperties
from flcuda.cudnn.graph import Engine, EngineConfig, ExecutionPlan, Graph, Knob, OperationGraph, Tensor, build_plans
from flcuda.cudnn.resources import Handle
from flcuda.device import Device
from flcuda.errors import NOT_SUPPORTED, CudnnError, cudnn_error
from flcuda.finder import errata
from flcuda.finder.candidate import Candidate
from flcuda.finder.choice import Choice
from flcuda.finder.graph_problem import GraphProblem
from flcuda.finder.plan import is_out_of_memory
from flcuda.finder.policy import Policy
from flcuda.finder.problem import ConvolutionProblem, Problem
from flcuda.finder.sources.staging import ALIGNMENT, Operand, split_padding

LIMIT = 8
"""So many configurations, the first that may be used, are built and measured. See Note [order]."""

OF_EACH = 2
"""So many more are measured of each engine, of a compiled one only one. See Note [order]."""

NEAREST = 4
NEAR_KNOBS = 4
"""A fast search looks at so many listed configurations around a leader, which differ from it in at most so many knobs.
See Note [order]."""

COMPILED = 3
COMPILED_AROUND = 4
"""So many plans that need a compiler are built beyond the first `LIMIT`, and so many around all leaders of a search
together. An H200's host took a quarter of a second for each, whatever the number of threads. See Note [wide]."""

SLOW = frozenset(("19", "69", "77", "80", "84"))
"""Engines of which no plan is compiled beyond what heuristics list first. One plan of 69 and 80 may keep the
compiler for 10 to 16 seconds (3x3 and 7x7 filters), one of 77 for 2.5; those of 19, 77 and 84 took half a second and
more, and ran 30 to 1000, 1.4 to 2.7 and 12 to 260 times as long as the best for each problem of ResNet-34 in float16
(H200, cuDNN 9.19)."""

AROUND = 64
"""So many neighbours of a candidate are offered, the nearest first. Each is run, in a millisecond or two: with a few
leaders in a few rounds this is a second a problem, of the two that a wide search may take. Most engines have 20 to 40.
"""

ALL_VALUES = 32
"""A knob with more values than that is turned by 1, 2, 4, ... steps and to its powers of two."""

LARGEST_RANK = 3
"""Spatial dimensions that cuDNN's convolutions take."""

_REFUSED_NOTES = {
    "down_convert_inputs": "converts its inputs to a lower precision",
    "reduced_precision_reduction": "sums in a lower precision",
    "winograd_tile_13x13": "Winograd with 13x13 tiles is less exact than TF32",
}
_TENSOR_CORES = frozenset(("tensor_core", "cublaslt_dependency"))
"""What says that an engine may use tensor cores. Those that call cuBLASLt do not carry the first note, and computed
float32 products of strict float32 graphs in TF32 (H200, cuDNN 9.19: off by 1e-3 of the root mean square)."""
_TAKES_ALL = "0"
_COMPILED = "runtime_compilation"
_MODES = ("A", "fallback", "B")
_BAD_PARAMETER = 2000
_INTERNAL = 4000
_BLOCK = 512


# --- the graph --------------------------------------------------------------------------------------------------------


def operation_graph(
    problem: Problem, handle: Handle | None = None, properties: DeviceProperties | None = None
) -> OperationGraph:
    """Makes the graph of a Problem.

    Of a convolution the tensors are numbered 1, 2 and 3 in the order of the operands; of a GraphProblem, as
    `GraphProblem.graph` numbers them.

    Args:
        problem: a ConvolutionProblem or a GraphProblem.
        handle: of the GPU here; borrowed.
        properties: of another GPU; borrowed. One of the two.

    Returns:
        The finalized graph.

    Raises:
        CudnnNotSupportedError: cuDNN has no such graph; the text says what it does not take.
        CudnnError: cuDNN cannot be used.
    """
    try:
        return _graph(problem).build(handle, properties)
    except CudnnError as error:
        if error.status // 1000 * 1000 != _BAD_PARAMETER:
            raise
        # The Problem has been checked: what cuDNN finds wrong with it is what it does not take.
        raise _not_supported(str(error), problem) from error


def _graph(problem: Problem) -> Graph:
    if isinstance(problem, GraphProblem):
        for name in problem.operands:
            if problem.alignment_of(name) < ALIGNMENT and math.prod(problem.shape_of(name)) > 1:
                raise _not_supported(
                    f"{name} is aligned to {problem.alignment_of(name)} bytes, and engines load {ALIGNMENT} at once: "
                    f"give a copy of it, which is aligned",
                    problem,
                )
        return problem.graph()[0]
    if not isinstance(problem, ConvolutionProblem):
        raise TypeError(f"problem: {problem!r} is neither a ConvolutionProblem nor a GraphProblem")
    rank = len(problem.stride)
    if rank > LARGEST_RANK:
        raise _not_supported(f"cuDNN's convolutions have at most {LARGEST_RANK} spatial dimensions", problem)
    copies = {copy.name: copy for copy in _copies(problem)}
    graph = Graph(problem.compute)
    first, second, out = problem.operands
    a, b = _tensor(graph, problem, first, copies), _tensor(graph, problem, second, copies)
    flat = rank == 1
    geometry: dict[str, Any] = {
        "padding": _raised(split_padding(problem)[0], 0, flat),
        "stride": _raised(problem.stride, 1, flat),
        "dilation": _raised(problem.dilation, 1, flat),
        "beta": 1.0 if problem.accumulate else 0.0,
        "name": problem.direction,
    }
    shape, strides, alignment = _described(problem, out, copies)
    if problem.direction == "forward":
        result = graph.convolution_forward(a, b, **geometry)
    elif problem.direction == "backward_data":
        result = graph.convolution_backward_data(a, b, shape, **geometry)
    else:
        result = graph.convolution_backward_filter(a, b, shape, **geometry)
    graph.output(result, dtype=problem.dtype_of(out), strides=strides, alignment=alignment, name=out)
    return graph


@functools.lru_cache(maxsize=64)
def _copies(problem: Problem) -> tuple[Operand, ...]:
    """Gives the operands of which cuDNN gets a packed copy. See Note [padding] and Note [copies]."""
    if not isinstance(problem, ConvolutionProblem):
        return ()
    _, borders = split_padding(problem)
    made = []
    for name in problem.operands:
        layouts = (problem.layout_of(operand) for operand in (name, *problem.operands))
        layout = next((layout for layout in layouts if layout != "strided"), "nchw")
        if name[-1] == "x":
            operand = Operand.create(problem, name, borders=borders, layout=layout, alignment=ALIGNMENT)
        else:
            packed = name[-1] == "w" and problem.layout_of(name) == "strided"
            operand = Operand.create(problem, name, layout=layout, packed=packed, alignment=ALIGNMENT)
        if operand.staged:
            made.append(operand)
    return tuple(made)


def _tensor(graph: Graph, problem: ConvolutionProblem, name: str, copies: Mapping[str, Operand]) -> Tensor:
    shape, strides, alignment = _described(problem, name, copies)
    return graph.tensor(shape, problem.dtype_of(name), strides=strides, alignment=alignment, name=name)


def _described(
    problem: ConvolutionProblem, name: str, copies: Mapping[str, Operand]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Gives shape, strides and alignment of an operand, or of its copy, as cuDNN gets them."""
    if name in copies:
        shape, strides, alignment = copies[name].shape, copies[name].strides, ALIGNMENT
    else:
        shape, strides, alignment = problem.shape_of(name), problem.strides_of(name), problem.alignment_of(name)
    if len(shape) > 3:
        return shape, strides, alignment
    return (*shape[:2], 1, shape[2]), (*strides[:2], shape[2] * strides[2], strides[2]), alignment


def _raised(values: tuple[Any, ...], height: Any, flat: bool) -> tuple[Any, ...]:
    """Puts the value of a height in front of those of a 1-D convolution."""
    return (height, *values) if flat else values


def _not_supported(reason: str, problem: Problem) -> CudnnError:
    return cudnn_error("flcuda.finder.graph", NOT_SUPPORTED, f"{reason} ({problem})", "CUDNN_STATUS_NOT_SUPPORTED")


# --- running ----------------------------------------------------------------------------------------------------------


class GraphRunner:
    """A runner: an execution plan, on the thread and device that made it. It owns the plan.

    Args:
        plan: of the graph that `operation_graph` makes.
        handle: the handle that the plan was built with; None for a plan of a GPU that is not here.
        order: for each of the plan's pointers the place of its operand; by default operands come as the pointers do.

    Attributes:
        plan: as given.
        handle: as given; kept, so that the plan is not destroyed after it.
        launch: runs it by the operands' addresses; None where it needs the arrays. See `Runner`.
    """

    def __init__(self, plan: ExecutionPlan, handle: Handle | None, order: tuple[int, ...] | None = None) -> None:
        self.plan = plan
        self.handle = handle
        self._execute = plan.run
        self._order = order
        self.launch = None if handle is None else self._launcher(plan, handle, order)

    @staticmethod
    def _launcher(
        plan: ExecutionPlan, handle: Handle, order: tuple[int, ...] | None
    ) -> Callable[[tuple[int, ...]], None] | None:
        launch = plan.launcher(handle)
        if launch is None or order is None:
            return launch
        return lambda addresses: launch(tuple([addresses[place] for place in order]))

    @property
    def workspace(self) -> int:
        """Bytes of scratch memory."""
        return self.plan.workspace

    def __call__(self, *operands: Any) -> None:
        """Computes the outputs from the inputs, on CuPy's current stream.

        Args:
            operands: the inputs and the outputs in the Problem's order; outputs are written, or added to.

        Raises:
            CudnnError: cuDNN refuses to run.
            MemoryError: there is no memory for the workspace.
        """
        if self.launch is not None:
            self.launch(tuple([array.data.ptr for array in operands]))
            return
        if self._order is not None:
            operands = tuple([operands[place] for place in self._order])
        self.plan(*operands)

    def run_in(self, operands: Sequence[Any], scratch: Any) -> None:
        """Computes as a call does, with a workspace that is there already.

        Args:
            operands: as for a call; nothing of them is looked at but the address.
            scratch: a uint8 array of at least the plan's workspace.

        Raises:
            CudnnError: cuDNN refuses to run.
        """
        if self._order is not None:
            operands = [operands[place] for place in self._order]
        self._execute(resources.handle(), tuple([array.data.ptr for array in operands]), scratch.data.ptr)


class StagedRunner(GraphRunner):
    """A runner that gives the plan copies of some operands. See Note [copies].

    Args:
        plan: as for `GraphRunner`.
        handle: likewise.
        problem: the Problem.
        copies: what is copied.
    """

    def __init__(
        self, plan: ExecutionPlan, handle: Handle | None, problem: ConvolutionProblem, copies: Sequence[Operand]
    ) -> None:
        super().__init__(plan, handle)
        self.launch = None
        self._out = len(problem.operands) - 1
        self._accumulate = problem.accumulate
        self._room = 0
        self._copies = []
        for copy in copies:
            self._copies.append((problem.operands.index(copy.name), copy, self._room))
            self._room += _room((copy,))

    @property
    def workspace(self) -> int:
        """Bytes of scratch memory, the copies among them."""
        return self._room + self.plan.workspace

    def __call__(self, *operands: Any) -> None:
        """Computes the output from the inputs, as `GraphRunner` does."""
        memory = devices.workspace(self.workspace)
        given = list(operands)
        for place, copy, start in self._copies:
            blank = place == self._out and not self._accumulate
            room = memory[start:]
            given[place] = copy.empty(room) if blank else copy.copy_in(operands[place], room)
        self.run_in(given, memory[self._room :])
        for place, copy, _ in self._copies:
            if place == self._out:
                copy.copy_out(given[place], operands[place])


def _room(copies: Iterable[Operand]) -> int:
    """Gives the bytes of workspace that copies take: whole blocks of CuPy's pool, so that all stay aligned."""
    return sum(-(-copy.nbytes // _BLOCK) * _BLOCK for copy in copies)


def _runner(problem: Problem, plan: ExecutionPlan, handle: Handle | None) -> GraphRunner:
    if isinstance(problem, GraphProblem):
        _, tensors = problem.graph()
        places = {tensors[name].uid: place for place, name in enumerate(problem.operands)}
        order = tuple(places[uid] for uid in plan.uids)
        return GraphRunner(plan, handle, None if order == tuple(range(len(order))) else order)
    if not isinstance(problem, ConvolutionProblem):
        raise TypeError(f"problem: {problem!r} is neither a ConvolutionProblem nor a GraphProblem")
    copies = _copies(problem)
    return StagedRunner(plan, handle, problem, copies) if copies else GraphRunner(plan, handle)


# --- what cuDNN offers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offer:
    """One configuration in cuDNN's order.

    Attributes:
        configuration: engine and knobs.
        candidate: what the finder makes of it; its reason says why it cannot be used.
        plan: its plan; None when it cannot be built, was not to be built, or must not be used whatever its workspace.
    """

    configuration: EngineConfig
    candidate: Candidate
    plan: ExecutionPlan | None


def offers(
    problem: Problem,
    policy: Policy,
    *,
    handle: Handle | None = None,
    properties: DeviceProperties | None = None,
    limit: int | None = None,
    plans: int | None = None,
    wide: bool = False,
    lists: "Lists | None" = None,
) -> list[Offer]:
    """Asks cuDNN's heuristics and builds plans in their order. See Note [order].

    Args:
        problem: a ConvolutionProblem or a GraphProblem.
        policy: determinism and workspace limit.
        handle: of the GPU here, which is current; borrowed.
        properties: of another GPU; borrowed. One of the two.
        limit: stop after so many that can be used; None for all. Where all of them are built, some of each other engine
            follow.
        plans: build so many that can be used; None for all. The others count as usable by what cuDNN says of them.
        wide: go on after the limit, with what all modes list and every other engine. See Note [wide].
        lists: of the Problem's graph; by default it is made.

    Returns:
        The configurations, none twice, each with its plan or the reason why there is none.

    Raises:
        CudnnNotSupportedError: no heuristic mode has any; the text lists what each engine says and the likely rule.
        CudnnError: cuDNN cannot be used.
    """
    lists = Lists(operation_graph(problem, handle, properties)) if lists is None else lists
    rules = _Rules(problem, policy, handle, properties, early=limit is not None)
    most = sys.maxsize if limit is None else limit
    to_build = sys.maxsize if plans is None else plans
    found: dict[object, Offer] = {}
    usable = 0
    for modes in (("A",), ("fallback", "B")):
        for mode in modes:
            waiting = collections.deque(lists.of(mode))
            while waiting and usable < most:
                batch = rules.first(waiting, min(most - usable, to_build or most), found)
                for offer in rules.offers(batch, build=to_build > 0):
                    found[offer.configuration.key] = offer
                    if offer.candidate.reason is None:
                        usable += 1
                        to_build -= offer.plan is not None
        if usable:
            break
    if wide:
        for offer in rules.offers(rules.cheapest(_everything(lists), COMPILED, found), build=True):
            found[offer.configuration.key] = offer
    elif limit is not None and plans is None and found:
        for offer in rules.offers(rules.of_each(lists.all(), found), build=True):
            found[offer.configuration.key] = offer
    if not found:
        # Asks every mode once more and raises with what each engine says.
        try:
            lists.graph.configurations()
        except CudnnError as error:
            if not _of_one_mode(error):
                raise
            raise _not_supported(str(error), problem) from error
    return list(found.values())


_Judged = tuple[EngineConfig, Candidate]


class Lists:
    """What cuDNN's heuristics list for a graph; a mode is asked when somebody wants it, and once.

    Args:
        graph: finalized, for one GPU.

    Attributes:
        graph: as given.
    """

    def __init__(self, graph: OperationGraph) -> None:
        self.graph = graph
        self._asked: dict[str, list[EngineConfig]] = {}

    def of(self, mode: str) -> list[EngineConfig]:
        """Gives what a mode lists; nothing where that one refuses."""
        if mode not in self._asked:
            self._asked[mode] = _delivered(self.graph, mode)
        return self._asked[mode]

    def all(self) -> Iterator[EngineConfig]:
        """Gives what all modes list."""
        for mode in _MODES:
            yield from self.of(mode)

    def asked(self) -> Iterator[EngineConfig]:
        """Gives what those modes list that have been asked."""
        for mode in _MODES:
            yield from self._asked.get(mode, ())


def _everything(lists: Lists) -> Iterator[EngineConfig]:
    """Gives what all modes list, then every other engine with the knobs that cuDNN chooses."""
    listed = set()
    for configuration in lists.all():
        listed.add(configuration.engine_id)
        yield configuration
    for engine in lists.graph.engines():
        if engine.id not in listed:
            made = _configured(engine, {})
            if made is not None:
                yield made


def _configured(engine: Engine, knobs: Mapping[str, int]) -> EngineConfig | None:
    """Sets an engine's knobs; None when it does not have these values together."""
    try:
        return engine.configure(knobs)
    except CudnnError as error:
        if is_out_of_memory(error):
            raise
        return None


def _compiles(configuration: EngineConfig) -> bool:
    return _COMPILED in configuration.behavior_notes


# --- around a candidate -----------------------------------------------------------------------------------------------


def neighbours(knobs: Iterable[Knob], chosen: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Gives the settings that differ in one knob.

    Args:
        knobs: those of the engine.
        chosen: values by the knobs' words; what is not there is left to cuDNN.

    Yields:
        The settings, in the order of `chosen`, of each knob in turn the value that is nearest to the chosen one. No
        value is cuDNN's own choice (-1) that was not before.
    """
    turned = [[{**chosen, knob.type: value} for value in _values(knob, chosen.get(knob.type))] for knob in knobs]
    for settings in itertools.zip_longest(*turned):
        yield from (setting for setting in settings if setting is not None)


def nearest(configurations: Iterable[EngineConfig], candidate: Candidate) -> list[EngineConfig]:
    """Gives the configurations of a candidate's engine that differ from it in few knobs. See Note [order].

    Args:
        configurations: in any order; those of other engines are passed over.
        candidate: one of the source ``graph``.

    Returns:
        Those that differ in at most `NEAR_KNOBS`, the nearest first, of equally near ones the first first.
    """
    chosen = dict(candidate.parameters)
    apart: list[tuple[int, EngineConfig]] = []
    for configuration in configurations:
        if str(configuration.engine_id) == candidate.algo:
            differing = sum(chosen.get(name) != value for name, value in configuration.knobs.items())
            apart.append((differing, configuration))
    apart.sort(key=lambda pair: pair[0])
    return [configuration for differing, configuration in apart if 0 < differing <= NEAR_KNOBS]


def _values(knob: Knob, now: int | None) -> list[int]:
    """Gives a knob's other values, the nearest first; of very many only some. See `ALL_VALUES`."""
    step = max(1, knob.stride)
    every = range(knob.minimum, knob.maximum + 1, step)
    # where cuDNN chose, nobody knows from where to begin
    begin = knob.minimum if now is None or now not in every else now
    values: Iterable[int] = every
    if len(every) > ALL_VALUES:
        place = every.index(begin)
        steps = {0, *(sign << power for power in range(len(every).bit_length()) for sign in (1, -1))}
        near = {every[place + away] for away in steps if 0 <= place + away < len(every)}
        powers = {1 << power for power in range(knob.maximum.bit_length())}
        values = near | powers.intersection(every)
    return sorted((value for value in values if value != now), key=lambda value: (abs(value - begin), value))


# --- what may be used -------------------------------------------------------------------------------------------------


class _Rules:
    """What may be used for a Problem under a Policy.

    Args:
        problem: a ConvolutionProblem or a GraphProblem.
        policy: determinism and workspace limit.
        handle: of the GPU here.
        properties: of another GPU.
        early: refuse before a plan is built what cuDNN says to need too large a workspace.

    Attributes:
        largest: bytes of the workspace limit.
    """

    def __init__(
        self,
        problem: Problem,
        policy: Policy,
        handle: Handle | None,
        properties: DeviceProperties | None,
        *,
        early: bool = True,
    ) -> None:
        self.largest = _largest(policy, handle, properties)
        self._problem = problem
        self._policy = policy
        self._handle = handle
        self._properties = properties
        self._early = early
        self._gpu = _gpu(handle, properties)
        self._copied = _room(_copies(problem))

    def candidate(self, configuration: EngineConfig) -> Candidate:
        """Makes the candidate of a configuration whose plan is not built; with the reason when it must not be used."""
        candidate = _candidate(self._problem, configuration, self._gpu)
        if candidate.reason is None and self._policy.deterministic and not candidate.deterministic:
            candidate = replace(candidate, reason="not deterministic")
        if candidate.reason is not None:
            return candidate
        return self._sized(candidate, self._copied + (configuration.workspace or 0), refuse=self._early)

    def first(
        self, waiting: collections.deque[EngineConfig], count: int, known: Container[object] = ()
    ) -> list[_Judged]:
        """Takes configurations away from the left until so many of them have no reason against them.

        Args:
            waiting: what is taken from.
            count: how many.
            known: keys of configurations that are passed over.

        Returns:
            Those taken, none twice, with their candidates.
        """
        taken: dict[object, _Judged] = {}
        while waiting and count > 0:
            configuration = waiting.popleft()
            if configuration.key in known or configuration.key in taken:
                continue
            candidate = self.candidate(configuration)
            taken[configuration.key] = (configuration, candidate)
            count -= candidate.reason is None
        return list(taken.values())

    def cheapest(
        self, configurations: Iterable[EngineConfig], compiled: int, known: Container[object] = ()
    ) -> list[_Judged]:
        """Judges configurations, and leaves out those whose plans would take too long. See Note [wide].

        Args:
            configurations: the better first.
            compiled: so many of them may need a compiler.
            known: keys of configurations that are passed over.

        Returns:
            Those to be built, and those that must not be used, none twice, with their candidates.
        """
        taken: dict[object, _Judged] = {}
        for configuration in configurations:
            if configuration.key in known or configuration.key in taken:
                continue
            candidate = self.candidate(configuration)
            if candidate.reason is None and _compiles(configuration):
                if compiled == 0 or candidate.algo in SLOW:
                    continue
                compiled -= 1
            taken[configuration.key] = (configuration, candidate)
        return list(taken.values())

    def of_each(self, configurations: Iterable[EngineConfig], known: Mapping[object, Offer]) -> list[_Judged]:
        """Judges configurations, and leaves out those of engines that have been heard. See Note [order].

        Args:
            configurations: the better first.
            known: what is offered already, by key.

        Returns:
            Those to be built, and those that must not be used, none twice, with their candidates.
        """
        usable = [offer.candidate for offer in known.values() if offer.candidate.reason is None]
        heard = collections.Counter(candidate.algo for candidate in usable)
        tensor_cores = any(candidate.math == "tensor_op" for candidate in usable)
        taken: dict[object, _Judged] = {}
        for configuration in configurations:
            # before its knobs are read, which takes cuDNN longest
            compiled = _compiles(configuration)
            enough = heard[str(configuration.engine_id)] >= (1 if compiled else OF_EACH) and self._problem.math != "fma"
            if enough or (compiled and not self._worth_compiling(configuration)):
                continue
            if configuration.key in known or configuration.key in taken:
                continue
            candidate = self.candidate(configuration)
            if candidate.reason is None:
                slow = tensor_cores and candidate.math != "tensor_op"
                last = candidate.algo == _TAKES_ALL and heard.total() > OF_EACH
                if slow or last:
                    continue
                heard[candidate.algo] += 1
            taken[configuration.key] = (configuration, candidate)
        return list(taken.values())

    def _worth_compiling(self, configuration: EngineConfig) -> bool:
        """Says whether a fast search compiles a plan for an engine that has not been heard. See Note [order]."""
        rare = any(
            max(convolution.dilation) > 1 or (convolution.groups > 1 and convolution.w_shape[1] > 1)
            for convolution in self._problem.convolutions
        )
        return rare and self._problem.math != "fma" and str(configuration.engine_id) not in SLOW

    def nearest(self, lists: Lists, candidate: Candidate, known: Container[object]) -> list[_Judged]:
        """Gives the `NEAREST` listed configurations around a candidate that may be used and need no compiler.

        Args:
            lists: of the Problem's graph.
            candidate: one of the source ``graph``.
            known: keys of configurations that are passed over.

        Returns:
            They with their candidates, none twice.
        """
        taken: dict[object, _Judged] = {}
        for configuration in nearest((each for each in lists.asked() if not _compiles(each)), candidate):
            if len(taken) == NEAREST:
                break
            if configuration.key not in known and configuration.key not in taken:
                judged = self.candidate(configuration)
                if judged.reason is None:
                    taken[configuration.key] = (configuration, judged)
        return list(taken.values())

    def offers(self, batch: list[_Judged], *, build: bool) -> list[Offer]:
        """Makes offers of configurations, their plans built in threads or not at all."""
        if not build:
            return [Offer(configuration, candidate, None) for configuration, candidate in batch]
        hopeful = [configuration for configuration, candidate in batch if candidate.reason is None]
        built = iter(build_plans(hopeful, self._handle, self._properties))
        return [
            Offer(configuration, candidate, None)
            if candidate.reason is not None
            else self._offer(configuration, candidate, next(built))
            for configuration, candidate in batch
        ]

    def _offer(self, configuration: EngineConfig, candidate: Candidate, plan: ExecutionPlan | CudnnError) -> Offer:
        if isinstance(plan, CudnnError):
            return Offer(configuration, replace(candidate, reason=str(plan)), None)
        return Offer(configuration, self._sized(candidate, self._copied + plan.workspace), plan)

    def _sized(self, candidate: Candidate, workspace: int, *, refuse: bool = True) -> Candidate:
        above = refuse and workspace > self.largest
        reason = f"workspace of {workspace} bytes is above the limit of {self.largest}" if above else None
        return replace(candidate, workspace=workspace, reason=reason)


def _delivered(graph: OperationGraph, mode: str) -> list[EngineConfig]:
    try:
        return graph.heuristics(mode)
    except CudnnError as error:
        if not _of_one_mode(error):
            raise
        return []


def _of_one_mode(error: CudnnError) -> bool:
    """Whether another heuristic mode may do: this one refuses, or fails within itself."""
    return error.status // 1000 * 1000 in (NOT_SUPPORTED, _INTERNAL) and not is_out_of_memory(error)


def _gpu(handle: Handle | None, properties: DeviceProperties | None) -> errata.Gpu:
    if properties is not None:
        return errata.Gpu(int(properties.profile["deviceVer"]) // 10, libraries.load().version)
    if handle is None:
        raise ValueError("handle, properties: one of them says for which GPU")
    return errata.Gpu.here(handle.device)


def _largest(policy: Policy, handle: Handle | None, properties: DeviceProperties | None) -> int:
    if policy.workspace_limit is not None:
        return policy.workspace_limit
    if handle is not None:
        return devices.workspace_limit(handle.device)
    if properties is None:
        raise ValueError("handle, properties: one of them says for which GPU")
    return min(2 * devices.GIB, int(properties.profile["totalGlobalMem"]) // 8)


def _candidate(problem: Problem, configuration: EngineConfig, gpu: errata.Gpu) -> Candidate:
    """Makes the candidate of a configuration whose plan is not built yet; with the reason when it must not be used."""
    notes = (*configuration.numerical_notes, *configuration.behavior_notes)
    tensor_cores = not _TENSOR_CORES.isdisjoint(notes) and problem.contracts and problem.compute != "float64"
    reason = next((why for note, why in _REFUSED_NOTES.items() if note in notes), None)
    if reason is None and tensor_cores and problem.math == "fma":
        reason = "uses tensor cores, which math 'fma' forbids"
        if any(convolution.precision == "float32" for convolution in problem.convolutions or (problem,)):
            reason += ": on float32 operands that is TF32"
    candidate = Candidate(
        source=GraphSource.name,
        algo=str(configuration.engine_id),
        math="tensor_op" if tensor_cores else "fma",
        workspace=0,
        deterministic=configuration.deterministic,
        build=lambda: GraphRunner(configuration.plan(), None),
        parameters=tuple(configuration.knobs.items()),
        notes=notes,
        reason=reason,
    )
    return errata.apply(candidate, problem, gpu)


# --- the source -------------------------------------------------------------------------------------------------------


Prepared = GraphRunner | EngineConfig | weakref.ref[EngineConfig]
"""What a candidate may have of its runner before anybody builds it."""


@dataclass(slots=True)
class _Search:
    """What one search was offered: no configuration twice, and few around leaders that are compiled.

    Attributes:
        lists: what cuDNN lists for it; None where nobody asked for its candidates.
        keys: of the configurations.
        compiled: how many more that need a compiler may be offered around leaders.
    """

    lists: Lists | None = None
    keys: set[object] = field(default_factory=set)
    compiled: int = field(default_factory=lambda: COMPILED_AROUND)


class _Searches(threading.local):
    """This thread's open search and those within it, by Problem and policy: one may ask for rewrites of its Problem.

    Attributes:
        kept: None when there is none open.
    """

    kept: dict[object, _Search] | None = None

    def begin(self, problem: Problem, policy: Policy) -> _Search:
        """Begins one; it is kept where a search is open."""
        begun = _Search()
        if self.kept is not None:
            self.kept[self._key(problem, policy)] = begun
        return begun

    def of(self, problem: Problem, policy: Policy) -> _Search:
        """Gives one that was begun, or begins it."""
        found = None if self.kept is None else self.kept.get(self._key(problem, policy))
        return self.begin(problem, policy) if found is None else found

    @staticmethod
    def _key(problem: Problem, policy: Policy) -> object:
        return problem, replace(policy, mode="find", effort="fast")


class GraphSource:
    """The source ``graph``, for CUDA.

    Args:
        properties: plans are for this GPU, which need not be here; nothing can be run then. By default they are for the
            device that the source is asked for.
    """

    name = "graph"
    devices = ("cuda",)
    kinds = (ConvolutionProblem, GraphProblem)

    def __init__(self, properties: DeviceProperties | None = None) -> None:
        self._properties = properties
        self._searches = _Searches()

    def candidates(self, problem: Problem, policy: Policy, device: Device) -> Iterator[Candidate]:  # noqa: ARG002
        """Yields configurations of cuDNN's engines in cuDNN's own order; what must not be used with the reason.

        Nothing is run. In the mode "heuristic" only the first plan is built. An engine that must not be used is one
        row, whatever its knobs. See Note [wide] for the effort "wide".

        Args:
            problem: a ConvolutionProblem or a GraphProblem.
            policy: mode, effort, determinism and workspace limit.
            device: a CUDA device, which is current.

        Yields:
            The candidates.

        Raises:
            CudnnNotSupportedError: no engine takes the Problem; the text says what each one says, and the likely rule.
            MemoryError: cuDNN has no memory, of the host or the device, to answer.
        """
        handle = self._handle()
        heuristic = policy.mode == "heuristic"
        search = self._searches.begin(problem, policy)
        try:
            search.lists = Lists(operation_graph(problem, handle, self._properties))
            found = offers(
                problem,
                policy,
                handle=handle,
                properties=self._properties,
                limit=LIMIT,
                plans=1 if heuristic else None,
                wide=policy.effort == "wide" and not heuristic,
                lists=search.lists,
            )
        except CudnnError as error:
            if is_out_of_memory(error):
                raise MemoryError(str(error)) from error
            raise
        refused = set()
        for offer in found:
            candidate = offer.candidate
            row = (candidate.algo, candidate.reason)
            if candidate.reason is not None and row in refused:
                continue
            refused.add(row)
            search.keys.add(offer.configuration.key)
            yield self._prepared(problem, policy, handle, offer)

    @contextlib.contextmanager
    def climbing(self) -> Iterator[None]:
        """Opens a search on this thread: until its end, what cuDNN lists and what was offered is kept for `around`.

        That is 27 KiB a configuration, 2.5 MB a Problem (cuDNN 9.19).
        """
        before = self._searches.kept
        self._searches.kept = {}
        try:
            yield
        finally:
            self._searches.kept = before

    def around(self, problem: Problem, candidate: Candidate, policy: Policy, device: Device) -> Iterator[Candidate]:  # noqa: ARG002
        """Yields what is near a candidate and may be used.

        With the effort "wide" that is what differs from it in one knob, see Note [wide], at most `AROUND`; otherwise
        what cuDNN lists nearest to it, see Note [order], at most `NEAREST`.

        Args:
            problem: the Problem that the candidate is for.
            candidate: one of this source's.
            policy: effort, determinism and workspace limit.
            device: a CUDA device, which is current.

        Yields:
            Candidates, none of which this source has yielded for this Problem and policy within the same `climbing`;
            outside of one nothing is known of what is listed.

        Raises:
            CudnnError: the engine does not take this Problem, or cuDNN cannot be used.
            ValueError: there is no such engine.
            MemoryError: cuDNN has no memory.
        """
        handle = self._handle()
        search = self._searches.of(problem, policy)
        try:
            rules = _Rules(problem, policy, handle, self._properties)
            if policy.effort == "wide":
                engine = self._engine(problem, candidate.algo, handle)
                chosen = {name: value for name, value in candidate.parameters if isinstance(value, int)}
                settings = (_configured(engine, setting) for setting in neighbours(engine.knobs, chosen))
                there = (each for each in settings if each is not None)
                judged = rules.cheapest(there, search.compiled, search.keys)
                batch = [each for each in judged if each[1].reason is None][:AROUND]
                search.compiled -= sum(_compiles(configuration) for configuration, _ in batch)
            else:
                batch = [] if search.lists is None else rules.nearest(search.lists, candidate, search.keys)
            for offer in rules.offers(batch, build=True):
                search.keys.add(offer.configuration.key)
                if offer.candidate.reason is None:
                    yield self._prepared(problem, policy, handle, offer)
        except CudnnError as error:
            if is_out_of_memory(error):
                raise MemoryError(str(error)) from error
            raise

    def restore(self, problem: Problem, choice: Choice, device: Device) -> Candidate:  # noqa: ARG002
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
            build=self._builder(
                problem, candidate, configuration, handle, _largest(choice.policy, handle, self._properties)
            ),
        )

    def _handle(self) -> Handle | None:
        return resources.handle() if self._properties is None else None

    def _engine(self, problem: Problem, algo: str, handle: Handle | None) -> Engine:
        if not algo.isdecimal():
            raise ValueError(f"choice: graph has no engine {algo!r}")
        return operation_graph(problem, handle, self._properties).engine(int(algo))

    def _configured(
        self,
        problem: Problem,
        algo: str,
        parameters: tuple[tuple[str, int | str], ...],
        handle: Handle | None,
    ) -> EngineConfig:
        """Makes a configuration by hand."""
        knobs = {name: value for name, value in parameters if isinstance(value, int)}
        if len(knobs) != len(parameters):
            raise ValueError(f"choice: graph has no engine {algo!r} with knobs {dict(parameters)}")
        return self._engine(problem, algo, handle).configure(knobs)

    def _prepared(self, problem: Problem, policy: Policy, handle: Handle | None, offer: Offer) -> Candidate:
        """Makes the candidate of an offer, whose plan it has already where one was built, else its configuration."""
        candidate = offer.candidate
        prepared: Prepared | None = None
        if offer.plan is not None:
            prepared = _runner(problem, offer.plan, handle)
        elif candidate.reason is None:
            # an open search keeps it
            prepared = weakref.ref(offer.configuration)
        # what is refused is not chosen, but a row of a report runs it all the same
        most = _largest(policy, handle, self._properties) if candidate.reason is None else sys.maxsize
        return replace(
            candidate,
            build=self._builder(problem, candidate, prepared, handle, most),
            prepared_ms=0.0 if offer.plan is None else offer.plan.build_ms,
        )

    def _builder(
        self,
        problem: Problem,
        candidate: Candidate,
        prepared: Prepared | None,
        of: Handle | None,
        largest: int,
    ) -> Callable[[], GraphRunner]:
        """Gives what builds a runner: the first time what is prepared, if it is of the calling thread and device.

        Of the candidate it keeps no configuration after that: that would hold cuDNN's memory as long as the candidate
        lives.
        """
        waiting = [] if prepared is None else [prepared]
        algo, parameters = candidate.algo, candidate.parameters

        def build() -> GraphRunner:
            handle = self._handle()
            made: Prepared | None = None
            with contextlib.suppress(IndexError):
                made = waiting.pop()
            if isinstance(made, weakref.ref):
                made = made()
            if isinstance(made, GraphRunner) and handle is of:
                return made
            if not isinstance(made, EngineConfig) or handle is not of:
                made = self._configured(problem, algo, parameters, handle)
            runner = _runner(problem, made.plan(), handle)
            if runner.workspace > largest:
                raise _not_supported(f"workspace of {runner.workspace} bytes is above the limit of {largest}", problem)
            return runner

        return build
