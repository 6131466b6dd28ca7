"""Known faults of cuDNN: what is not offered, or not called deterministic, although cuDNN offers it.

An entry is as narrow as what is known about it: direction, algorithm or engine, GPU generation, cuDNN versions, and the
problems that are affected. A wider one costs speed where nothing is wrong: a ban of one engine on all GPUs made models
up to 80 % slower (pytorch PR#189207).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from flcuda import device as devices
from flcuda.cudnn import library as libraries
from flcuda.device import Device
from flcuda.finder.candidate import Candidate
from flcuda.finder.graph_problem import GraphProblem, Operation
from flcuda.finder.problem import ConvolutionProblem, Problem


@dataclass(frozen=True, slots=True)
class Gpu:
    """What computes.

    Attributes:
        sm: the compute capability times ten: 90 for 9.0.
        cudnn: cuDNN's version as it gives it: 92800 for 9.28.0.
    """

    sm: int
    cudnn: int

    @classmethod
    def here(cls, device: Device) -> Self:
        """Describes a CUDA device that is here, with the cuDNN that is loaded."""
        return cls(int(devices.device_model(device)["sm"]), libraries.load().version)


@dataclass(frozen=True, slots=True)
class Erratum:
    """One known fault. An empty tuple means any.

    Attributes:
        reason: what goes wrong, and what helps.
        report: where it was reported.
        since: the first cuDNN version that is known to have it.
        before: the first one that is known not to have it any more.
        sources: names of the sources that are affected.
        algos: names of algorithms or numbers of engines.
        maths: "fma", "tensor_op": how the candidate computes.
        sms: compute capabilities times ten.
        directions: of the problem.
        graphs: says of a GraphProblem whether it is affected; no ConvolutionProblem is then.
        precisions: of the problem.
        ranks: numbers of spatial dimensions.
        layouts: of x, or its gradient.
        windows: sizes of the filter.
        windows_only: a window of one element is not affected.
        depthwise_only: only convolutions of which each group has one channel are affected.
        ragged_only: only grouped convolutions are affected whose filters are no multiple of 8.
        large_only: only those are affected whose x has 2^31 elements or more.
        parts_above: only candidates are affected whose knob ``split_k`` is larger.
        nondeterministic: the result is right, but its bits may differ from run to run; the candidate stays usable where
            that does not matter.
    """

    reason: str
    report: str
    since: int
    before: int
    sources: tuple[str, ...] = ()
    algos: tuple[str, ...] = ()
    maths: tuple[str, ...] = ()
    sms: tuple[int, ...] = ()
    directions: tuple[str, ...] = ()
    graphs: Callable[[GraphProblem], bool] | None = None
    precisions: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    layouts: tuple[str, ...] = ()
    windows: tuple[tuple[int, ...], ...] = ()
    windows_only: bool = False
    depthwise_only: bool = False
    ragged_only: bool = False
    large_only: bool = False
    parts_above: int = 0
    nondeterministic: bool = False

    def concerns(self, candidate: Candidate, problem: Problem, gpu: Gpu) -> bool:
        """Says whether a candidate for a problem has this fault on a GPU.

        A graph has the faults of its operations and of each convolution in it, but those of a numbered engine: in
        another graph that number is another engine's.
        """
        if not self.since <= gpu.cudnn < self.before:
            return False
        if self.graphs is not None:
            affected = isinstance(problem, GraphProblem) and self.graphs(problem)
            return affected and self._scoped(candidate, problem, gpu)
        if self.algos and isinstance(problem, GraphProblem):
            return False
        return any(self._of_convolution(candidate, convolution, gpu) for convolution in problem.convolutions)

    def _of_convolution(self, candidate: Candidate, problem: ConvolutionProblem, gpu: Gpu) -> bool:
        if self.windows_only and math.prod(problem.w_shape[2:]) == 1:
            return False
        if self.depthwise_only and problem.w_shape[1] > 1:
            return False
        if self.ragged_only and (problem.groups == 1 or problem.w_shape[0] % 8 == 0):
            return False
        if self.large_only and math.prod(problem.x_shape) < 2**31:
            return False
        return self._scoped(candidate, problem, gpu) and all(
            not allowed or value in allowed
            for allowed, value in (
                (self.directions, problem.direction),
                (self.ranks, len(problem.stride)),
                (self.layouts, problem.layout_of("x")),
                (self.windows, problem.w_shape[2:]),
            )
        )

    def _scoped(self, candidate: Candidate, problem: Problem, gpu: Gpu) -> bool:
        if self.parts_above and int(dict(candidate.parameters).get("split_k", 0)) <= self.parts_above:
            return False
        return all(
            not allowed or value in allowed
            for allowed, value in (
                (self.sources, candidate.source),
                (self.algos, candidate.algo),
                (self.maths, candidate.math),
                (self.sms, gpu.sm),
                (self.precisions, problem.precision),
            )
        )

    @property
    def text(self) -> str:
        """The reason with its report, in one line."""
        return f"known fault of cuDNN: {self.reason} ({self.report})"


def _sums(problem: GraphProblem) -> bool:
    return any(operation.method == "reduction" for operation in problem.operations)


def _flat(problem: GraphProblem) -> bool:
    return not problem.contracts and all(len(problem.shape_of(name)) <= 2 for name in problem.operands)


def _one_dimension_of_three(problem: GraphProblem) -> bool:
    shapes = [problem.shape_of(name) for name in problem.operands]
    if problem.contracts or any(len(shape) != 3 for shape in shapes):
        return False
    batch = max(shape[0] for shape in shapes)
    return batch > 1 and any(sum(size > 1 for size in shape) == 1 for shape in shapes)


def _modes(problem: GraphProblem, *modes: str) -> list[Operation]:
    return [each for each in problem.operations if each.method == "pointwise" and each.get("mode") in modes]


def _argument_written(problem: GraphProblem) -> bool:
    arguments = {name for each in _modes(problem, "sigmoid_fwd", "tanh_fwd") for name in each.refs}
    return problem.contracts and not arguments.isdisjoint(problem.outputs)


def _pooling_along_a_line(problem: GraphProblem) -> bool:
    pools = any(operation.method.startswith("resample") for operation in problem.operations)
    return pools and any(len(problem.shape_of(name)) == 3 for name in problem.operands)


def _index_of_pooling(problem: GraphProblem) -> bool:
    return any(
        operation.method == "resample_forward"
        and len(operation.results) > 1
        and operation.results[1] in problem.outputs
        and any(problem.layout_of(name) != "nhwc" for name in operation.refs if name in problem.inputs)
        for operation in problem.operations
    )


def _tanh_of_a_product(problem: GraphProblem) -> bool:
    return problem.contracts and bool(_modes(problem, "tanh_fwd"))


ERRATA: tuple[Erratum, ...] = (
    Erratum(
        reason="two equal runs of this engine differ on compute capability 8.6, and cuDNN does not say so",
        report="pytorch#188288, PR#188318, PR#189207, PR#189483",
        since=92301,
        before=92400,
        sources=("graph",),
        algos=("5",),
        sms=(86,),
        directions=("forward",),
        nondeterministic=True,
    ),
    # Seen with swish_bwd and a sum over (N, H, W) in one graph, in float16, on an H200. No other GPU or version was
    # tried; what is at stake is only whether such a graph counts as deterministic.
    Erratum(
        reason="two equal runs of a fused reduction differ in the last bits, and cuDNN does not say so",
        report="seen with cuDNN 9.19 on an H200, engine 1",
        since=90000,
        before=99999,
        sources=("graph",),
        graphs=_sums,
        nondeterministic=True,
    ),
    Erratum(
        reason="a graph of tensors with one or two dimensions writes its first row only; give them 3 dimensions, (1, "
        "rows, columns)",
        report="seen with cuDNN 9.19 on an H200; 9.28 refuses such graphs",
        since=90000,
        before=92800,
        sources=("graph",),
        graphs=_flat,
    ),
    Erratum(
        reason="at 3 dimensions an operand that has only one of them, (1, C, 1) of (N, C, L), is read at wrong places, "
        "or outside its memory; give it a second one, (1, C, L)",
        report="seen with cuDNN 9.19 on an H200",
        since=90000,
        before=99999,
        sources=("graph",),
        graphs=_one_dimension_of_three,
    ),
    # Neither engine nor GPU was ever named; PyTorch did without cuDNN for all of these, in all directions.
    Erratum(
        reason="16-bit 3-D convolutions silently give wrong results from 9.8 to 9.14; install cuDNN 9.15 or newer",
        report="pytorch#163539, PR#163581, PR#166480",
        since=90800,
        before=91500,
        precisions=("float16", "bfloat16"),
        ranks=(3,),
        windows_only=True,
    ),
    Erratum(
        reason="a TF32 kernel for 3-D convolutions is broken from 9.10.2 to 9.15, for shapes that nobody has bounded; "
        "use math 'fma' or install cuDNN 9.16 or newer",
        report="pytorch PR#167024",
        since=91002,
        before=91600,
        maths=("tensor_op",),
        precisions=("tf32",),
        ranks=(3,),
    ),
    # Its test failed from 9.11 on, not with 9.10.2; PyTorch did without cuDNN, in all dtypes, until 9.15.
    Erratum(
        reason="NHWC depthwise convolutions of 2^31 elements or more are broken from 9.11 to 9.14; install cuDNN 9.15 "
        "or newer",
        report="pytorch PR#163171, PR#168364",
        since=91100,
        before=91500,
        layouts=("nhwc",),
        depthwise_only=True,
        large_only=True,
    ),
    Erratum(
        reason="on float32 tensors every engine fails when it is run if the argument of sigmoid or tanh is an output",
        report="seen with cuDNN 9.19 on an H200: status 4000, get_user_ptrs()[idx] != nullptr",
        since=90000,
        before=92800,
        sources=("graph",),
        precisions=("float32", "tf32"),
        graphs=_argument_written,
    ),
    Erratum(
        reason="the engine's tanh of a large number is NaN instead of 1",
        report="seen with cuDNN 9.19 on an H200",
        since=90000,
        before=99999,
        sources=("graph",),
        algos=("0",),
        graphs=_tanh_of_a_product,
    ),
    Erratum(
        reason="pooling with one spatial dimension gives wrong numbers; give the tensors a second one of size 1",
        report="seen with cuDNN 9.19 on an H200, nhwc, all modes",
        since=90000,
        before=99999,
        sources=("graph",),
        graphs=_pooling_along_a_line,
    ),
    Erratum(
        reason="the index of max pooling is not written; make the tensors nhwc",
        report="seen with cuDNN 9.19 on an H200, nchw, engine 1",
        since=90000,
        before=99999,
        sources=("graph",),
        graphs=_index_of_pooling,
    ),
    # These were found by random convolutions with sparse whole numbers, 20,000 runs, engine by engine. Another version
    # may number its engines otherwise, and nobody has looked there: what is at stake is a wrong number or a write
    # outside an array, and what is lost is one engine of many, so the versions are not narrowed.
    Erratum(
        reason="the engine writes as many filters as the next multiple of 8, outside dw",
        report="seen with cuDNN 9.19 on an H200: c12 k12 g3",
        since=90000,
        before=99999,
        sources=("graph",),
        algos=("9", "10", "23"),
        directions=("backward_filter",),
        ragged_only=True,
    ),
    Erratum(
        reason="the engine gives wrong filter gradients in nchw",
        report="seen with cuDNN 9.19 on an H200, 28 of 127 problems",
        since=90000,
        before=99999,
        sources=("graph",),
        algos=("70",),
        directions=("backward_filter",),
        layouts=("nchw", "strided"),
    ),
    Erratum(
        reason="the engine gives wrong results in nchw, and writes outside y",
        report="seen with cuDNN 9.19 on an H200, 13 of 124 problems",
        since=90000,
        before=99999,
        sources=("graph",),
        algos=("71", "72"),
        directions=("forward",),
        layouts=("nchw", "strided"),
    ),
    Erratum(
        reason="the engine gives wrong data gradients in nchw",
        report="seen with cuDNN 9.19 on an H200, 5 of 8 problems",
        since=90000,
        before=99999,
        sources=("graph",),
        algos=("78",),
        directions=("backward_data",),
        layouts=("nchw", "strided"),
    ),
    # What the note winograd_tile_13x13 says of other engines, it does not say of this one.
    Erratum(
        reason="the engine's filter gradients of 5x5 filters are less exact than TF32",
        report="seen with cuDNN 9.19 on an H200: off by 4e-4 of the largest sum of magnitudes",
        since=90000,
        before=99999,
        sources=("graph",),
        algos=("17",),
        directions=("backward_filter",),
        precisions=("float32", "tf32"),
        windows=((5, 5),),
    ),
    # The same of the two other directions. A wide search runs these engines; heuristics for an H200 do
    # not list them.
    Erratum(
        reason="the engine's results with 5x5 filters are less exact than TF32",
        report="seen with cuDNN 9.19 on an H200: off by up to 1e-2 of the root mean square, in 8 problems",
        since=90000,
        before=99999,
        sources=("graph",),
        algos=("6",),
        directions=("forward",),
        precisions=("float32", "tf32"),
        windows=((5, 5),),
    ),
    Erratum(
        reason="the engine's data gradients with 5x5 filters are less exact than TF32",
        report="seen with cuDNN 9.19 on an H200: off by up to 2e-2 of the root mean square, in 7 problems",
        since=90000,
        before=99999,
        sources=("graph",),
        algos=("7",),
        directions=("backward_data",),
        precisions=("float32", "tf32"),
        windows=((5, 5),),
    ),
    # The parts are added to each other in dw's dtype: the error grew from 5e-2 of the root mean square for 64 to 128
    # parts to 0.1 for 512 and 0.5 for 2048.
    Erratum(
        reason="the engine adds that many parts of a sum in bfloat16",
        report="seen with cuDNN 9.19 on an H200: off by half of the root mean square for 2048 parts",
        since=90000,
        before=99999,
        sources=("graph",),
        algos=("47",),
        directions=("backward_filter",),
        precisions=("bfloat16",),
        parts_above=128,
    ),
    # A wide search runs it; heuristics do not list it for float64.
    Erratum(
        reason="the engine ends the process",
        report="seen with cuDNN 9.19 on an H200: a segmentation fault in 21 of about 90 problems, in both layouts",
        since=90000,
        before=99999,
        sources=("graph",),
        algos=("2",),
        directions=("forward",),
        precisions=("float64",),
    ),
    Erratum(
        reason="the engine leaves elements of filter gradients of one channel out",
        report="seen with cuDNN 9.19 on an H200, 2 of 18 problems",
        since=90000,
        before=99999,
        sources=("graph",),
        algos=("69",),
        directions=("backward_filter",),
        precisions=("tf32",),
        depthwise_only=True,
    ),
    Erratum(
        reason="the engine reads what lies between the elements of strided operands: NaN there makes the result NaN",
        report="seen with cuDNN 9.19 on an H200, 1 of 4 problems",
        since=90000,
        before=99999,
        sources=("graph",),
        algos=("4",),
        directions=("backward_filter",),
        precisions=("float64",),
    ),
)
"""The known faults. Each entry says no more than its report does."""


def apply(candidate: Candidate, problem: Problem, gpu: Gpu) -> Candidate:
    """Marks a candidate that has a known fault. Every source that calls cuDNN passes what it offers through this.

    Args:
        candidate: what the source offers.
        problem: what for.
        gpu: where it would run.

    Returns:
        The candidate; with a reason when its results may be wrong, not deterministic when its bits may differ.
    """
    for erratum in ERRATA:
        if not erratum.concerns(candidate, problem, gpu):
            continue
        if erratum.nondeterministic:
            candidate = replace(candidate, deterministic=False)
        elif candidate.reason is None:
            candidate = replace(candidate, reason=erratum.text)
    return candidate
