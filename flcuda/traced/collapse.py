"""Pointwise graphs on tensors of rank 3: the same elements, seen as fewer dimensions.

Note [row-major]: cuDNN's engines of pointwise graphs take the memory order nhwc and, of broadcast operands, a value a
channel, a value a pixel, or one value. At rank 3 in row-major order (cuDNN 9.19 and 9.28 on the profile of an H200)
they take any broadcast operand. Where all tensors of a pointwise graph lie densely in one memory order, dimensions that
are next to one another, and of which each tensor has both or neither, are one dimension: so graphs in nchw and with
other broadcast operands can be done after all, without a copy.

Note [one of three]: of an operand (1, C, 1) beside (N, C, L) cuDNN reads wrong numbers (`flcuda.finder.errata`). Such
an operand is copied into (1, C, L).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from flcuda import device as devices
from flcuda.device import Array
from flcuda.errors import CudnnNotSupportedError
from flcuda.finder.graph_problem import GraphProblem, GraphTensor
from flcuda.finder.problem import Problem, same_strides
from flcuda.ops import elementwise

_RANK = 3


class CollapsedPlan(NamedTuple):
    """A plan that is run on views of the operands.

    Attributes:
        plan: of the problem of rank 3.
        axes: the dimensions in memory order, the outermost first.
        shapes: of the views, in the order of the operands.
        wide: what the views are copied into, likewise; None for most. See Note [one of three].
    """

    plan: Any
    axes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    wide: tuple[tuple[int, ...] | None, ...]

    def run(self, *operands: Array) -> None:
        """Runs the plan; see Plan.run."""
        views = [a.transpose(self.axes).reshape(shape) for a, shape in zip(operands, self.shapes, strict=True)]
        self.plan.run(*[a if wide is None else _copied(a, wide) for a, wide in zip(views, self.wide, strict=True)])


def _copied(a: Array, shape: tuple[int, ...]) -> Array:
    xp = devices.array_module(a)
    out = xp.empty(shape, a.dtype)
    elementwise.copy(xp.broadcast_to(a, shape), out)
    return out


def plan_or_collapse(problem: Problem, plan: Callable[[Problem], Any]) -> Any:
    """Plans a problem and, where nothing takes it, the same at rank 3.

    Args:
        problem: any Problem.
        plan: makes the plan of a Problem, or raises CudnnNotSupportedError.

    Returns:
        What has a method `run`, of the problem's operands.

    Raises:
        CudnnNotSupportedError: nothing takes it, at rank 3 neither.
    """
    try:
        return plan(problem)
    except CudnnNotSupportedError as error:
        found = collapsed(problem) if isinstance(problem, GraphProblem) else None
        if found is None:
            raise
        smaller, axes = found
        shapes = tuple(smaller.shape_of(name) for name in smaller.operands)
        widened = _widened(smaller)
        try:
            made = plan(widened)
        except CudnnNotSupportedError:
            raise error from None
    planned = [widened.shape_of(name) for name in widened.operands]
    wide = tuple(None if new == old else new for new, old in zip(planned, shapes, strict=True))
    return CollapsedPlan(made, axes, shapes, wide)


def collapsed(problem: GraphProblem) -> tuple[GraphProblem, tuple[int, ...]] | None:
    """Gives a pointwise problem at rank 3, and the dimensions in memory order; see Note [row-major].

    Args:
        problem: any GraphProblem.

    Returns:
        None where it is not pointwise, or its tensors do not allow it, or it is of rank 3 already.
    """
    if any(entry.method != "pointwise" or entry.get("axis") is not None for entry in problem.operations):
        return None
    tensors = (*problem.tensors, *problem.results)
    full = tuple(max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True))
    if len(full) == _RANK:
        return None
    for layout in devices.LAYOUTS:
        axes = devices.memory_order(layout, len(full))
        if all(_dense(tensor, axes) for tensor in tensors):
            break
    else:
        return None
    cuts = _cuts([tuple(tensor.shape[dim] for dim in axes) for tensor in tensors], [full[dim] for dim in axes])
    if len(cuts) > _RANK:
        return None

    def seen(tensor: GraphTensor) -> GraphTensor:
        sizes = [tensor.shape[dim] for dim in axes]
        ends = [*cuts[1:], len(sizes)]
        merged = [math.prod(sizes[start:end]) for start, end in zip(cuts, ends, strict=True)]
        shape = (*(1,) * (_RANK - len(merged)), *merged)
        return replace(tensor, shape=shape, strides=devices.contiguous_strides(shape))

    tensors_now = tuple(seen(tensor) for tensor in problem.tensors)
    return replace(problem, tensors=tensors_now, results=tuple(seen(tensor) for tensor in problem.results)), axes


def _widened(problem: GraphProblem) -> GraphProblem:
    """Gives inputs of rank 3 that have one dimension of three a second one; see Note [one of three]."""
    full = tuple(max(sizes) for sizes in zip(*(problem.shape_of(name) for name in problem.operands), strict=True))

    def wide(tensor: GraphTensor) -> GraphTensor:
        if min(full) == 1 or sum(size > 1 for size in tensor.shape) != 1:
            return tensor
        batch, first, second = tensor.shape
        shape = (batch, first, full[2]) if first > 1 else (batch, full[1], second)
        return replace(tensor, shape=shape, strides=devices.contiguous_strides(shape))

    return replace(problem, tensors=tuple(wide(tensor) for tensor in problem.tensors))


def _dense(tensor: GraphTensor, axes: Sequence[int]) -> bool:
    shape = [tensor.shape[dim] for dim in axes]
    return same_strides(shape, [tensor.strides[dim] for dim in axes], devices.contiguous_strides(shape))


def _cuts(shapes: Sequence[tuple[int, ...]], full: Sequence[int]) -> list[int]:
    """Gives where merged dimensions start; two at least where there are two, because one row is a bad matrix."""
    cuts = [0]
    last: tuple[bool, ...] | None = None
    for dim, size in enumerate(full):
        if size == 1:
            continue
        pattern = tuple(shape[dim] == size for shape in shapes)
        if last is not None and pattern != last:
            cuts.append(dim)
        last = pattern
    wide = [dim for dim, size in enumerate(full) if size > 1]
    if len(cuts) == 1 and len(wide) > 1:
        cuts.append(wide[1])
    return cuts
