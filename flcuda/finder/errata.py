"""Known faults of cuDNN: what is not offered, or not called deterministic, although cuDNN offers it.

An entry is as narrow as what is known about it: direction, algorithm or engine, GPU generation, cuDNN versions, and the
problems that are affected. A wider one costs speed where nothing is wrong: a ban of one engine on all GPUs made models
up to 80 % slower (pytorch PR#189207).
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from flcuda import device as devices
from flcuda.cudnn import library as libraries
from flcuda.device import Device
from flcuda.finder.candidate import Candidate
from flcuda.finder.problem import ConvolutionProblem


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
        precisions: of the problem.
        ranks: numbers of spatial dimensions.
        windows_only: a window of one element is not affected.
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
    precisions: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    windows_only: bool = False
    nondeterministic: bool = False

    def concerns(self, candidate: Candidate, problem: ConvolutionProblem, gpu: Gpu) -> bool:
        """Says whether a candidate for a problem has this fault on a GPU."""
        if not self.since <= gpu.cudnn < self.before:
            return False
        if self.windows_only and math.prod(problem.w_shape[2:]) == 1:
            return False
        return all(
            not allowed or value in allowed
            for allowed, value in (
                (self.sources, candidate.source),
                (self.algos, candidate.algo),
                (self.maths, candidate.math),
                (self.sms, gpu.sm),
                (self.directions, problem.direction),
                (self.precisions, problem.precision),
                (self.ranks, len(problem.stride)),
            )
        )

    @property
    def text(self) -> str:
        """The reason with its report, in one line."""
        return f"known fault of cuDNN: {self.reason} ({self.report})"


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
)
"""The known faults. Each entry says no more than its report does."""


def apply(candidate: Candidate, problem: ConvolutionProblem, gpu: Gpu) -> Candidate:
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
