"""One way to solve a Problem, as a Source offers it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


class Runner(Protocol):
    """A candidate made ready for this thread and device; owns its descriptors.

    It may have an attribute `launch`: None, or a function that does what a call does and takes one tuple of the
    operands' device addresses instead of the arrays. A Plan calls that for operands that it has checked.

    Attributes:
        workspace: bytes of scratch memory that a call takes from the current allocator.
    """

    @property
    def workspace(self) -> int:
        """Bytes of scratch memory."""

    # to a type checker, these two together are any parameters: a runner may name its own
    def __call__(self, *operands: Any, **named: Any) -> None:
        """Computes the outputs from the inputs, by position in the order of `problem.operands`, on the current stream.

        Nothing is checked and nothing allocated but the workspace. May raise CudnnNotSupportedError or MemoryError
        before it has written anything; the plan then takes the next candidate.
        """


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to solve a Problem.

    Attributes:
        source: name of the Source.
        algo: name of the algorithm or engine within it, such as "IMPLICIT_PRECOMP_GEMM"; never an index into a list.
        math: "fma" or "tensor_op", as this candidate must be run.
        workspace: bytes of scratch memory.
        deterministic: the source promises the same bits in each run.
        build: makes the Runner for the calling thread and the current device; may raise CudnnNotSupportedError.
        parameters: what else the source needs to restore it, by name; also tells apart candidates of one algo.
        reported_ms: the time that the library itself claims, in milliseconds, if it does.
        notes: what its library says of it, in words such as "tensor_core", "winograd", "runtime_compilation".
        prepared_ms: host milliseconds of building that the source has spent already, so that `build` need not.
        reason: why it cannot be used; None when it can.
    """

    source: str
    algo: str
    math: str
    workspace: int
    deterministic: bool
    build: Callable[[], Runner] = field(compare=False, repr=False)
    parameters: tuple[tuple[str, int | str], ...] = ()
    reported_ms: float | None = field(default=None, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    prepared_ms: float = field(default=0.0, compare=False)
    reason: str | None = field(default=None, compare=False)

    @property
    def id(self) -> str:
        """Source and algo, "legacy:GEMM"; a report adds math and parameters where candidates share it."""
        return f"{self.source}:{self.algo}"

    @property
    def identity(self) -> tuple[str, str, str, tuple[tuple[str, int | str], ...]]:
        """What makes it this candidate and no other: source, algo, math and parameters."""
        return (self.source, self.algo, self.math, self.parameters)
