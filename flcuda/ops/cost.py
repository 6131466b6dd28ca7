"""What an operation asks of a machine at least: the bytes that it must move and the operations that it must do.

Bytes are those of an implementation that keeps nothing on the chip between two passes over an array: what needs the
statistics of a whole array before it can go on reads that array twice. An array that lies in a cache can be had for
less, so a measured time may be below its floor.
"""

from dataclasses import dataclass
from typing import Any

from flcuda.finder.peaks import work
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem, default_math
from flcuda.ops.convolution import Convolution

Array = Any

CONVOLUTION_KINDS = {direction: f"convolution {direction.replace('_', ' ')}" for direction in DIRECTIONS}
"""The kind of each direction of a convolution."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one part of a step asks for at least.

    Attributes:
        kind: what it is, in words: parts of one kind are added up.
        bytes: that it must move, reads and writes.
        operations: floating-point operations, two a multiply-add; 0 where only the bytes count.
        precision: of the operations: a key of `flcuda.finder.peaks.Peaks.flops`, or nothing.
    """

    kind: str
    bytes: int
    operations: int = 0
    precision: str = ""

    def floor_ms(self, bandwidth: float, flops: float | None) -> float:
        """Gives the least time.

        Args:
            bandwidth: bytes a second.
            flops: operations a second at the precision; None where it is not known.

        Returns:
            Milliseconds: of the bytes or of the operations, whichever take longer.
        """
        return 1e3 * max(self.bytes / bandwidth, self.operations / flops if flops else 0.0)


def nbytes(*arrays: Array | None) -> int:
    """Counts the bytes of arrays; None has none."""
    return sum(a.size * a.dtype.itemsize for a in arrays if a is not None)


def passes(kind: str, forward: int, backward: int) -> dict[str, Cost]:
    """Gives the costs of an operation that only moves bytes.

    Args:
        kind: of both parts.
        forward: bytes of the forward pass.
        backward: bytes of the backward pass, with one incoming gradient.

    Returns:
        The costs of "forward" and "backward".
    """
    return {"forward": Cost(kind, forward), "backward": Cost(kind, backward)}


def precision_of(a: Array, math: str | None) -> str:
    """Gives the word for an operand's dtype and the math on it, as in `flcuda.finder.peaks`.

    Args:
        a: an operand.
        math: "fma", "tensor_op", or None for the dtype's default.

    Returns:
        "float64", "float32", "tf32", "float16" or "bfloat16"; 16-bit operands without tensor cores are computed in
        float32.
    """
    word = str(a.dtype.name)
    math = math or default_math(word)
    if word == "float32":
        return "tf32" if math == "tensor_op" else word
    return "float32" if word in ("float16", "bfloat16") and math == "fma" else word


def convolution(geometry: Convolution, x: Array, w: Array) -> dict[str, Cost]:
    """Gives the costs of a convolution's three directions.

    Args:
        geometry: of the convolution.
        x: what it is applied to, or its gradient.
        w: the filter.

    Returns:
        A cost a direction; the operations are those of the direct method, so that others may pass the peak.
    """
    costs = {}
    for direction in DIRECTIONS:
        problem = ConvolutionProblem.create(
            direction,
            x.shape,
            w.shape,
            dtype=w.dtype.name,
            padding=tuple(zip(*geometry.padding, strict=True)),
            stride=geometry.stride,
            dilation=geometry.dilation,
            groups=geometry.groups,
            math=geometry.math,
        )
        operations, moved = work(problem)
        costs[direction] = Cost(CONVOLUTION_KINDS[direction], moved, operations, precision_of(w, geometry.math))
    return costs
