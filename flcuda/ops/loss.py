"""Softmax cross-entropy and the count of right answers; nothing here waits for the device."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from flcuda import reference
from flcuda.device import cupy
from flcuda.kernel_loader import launch, launch_blocks
from flcuda.ops.arrays import (
    accumulator,
    dense,
    new,
    on_cuda,
    require_dense,
    require_dtype,
    require_shape,
    strided_copy,
    suffix,
)

Array = Any

THREADS = 256


@dataclass(frozen=True, slots=True)
class CrossEntropySaved:
    """What the backward pass of the cross-entropy needs.

    Attributes:
        probabilities: (N, classes), float32 (float64 for float64 logits).
        target: the targets, int64 on CUDA.
        count: int64, (1,): rows that are not ignored.
        label_smoothing: as given.
        ignore_index: as given.
        dtype: the logits' dtype.
    """

    probabilities: Array
    target: Array
    count: Array
    label_smoothing: float
    ignore_index: int
    dtype: np.dtype[Any]


def cross_entropy_forward(
    logits: Array,
    target: Array,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    *,
    correct: Array | None = None,
) -> tuple[Array, CrossEntropySaved]:
    """The mean of -log softmax(logits)[target] over the rows whose target is not `ignore_index`.

    With label smoothing e the target distribution is (1 - e) at the target plus e / classes everywhere, as in PyTorch.
    When every row is ignored the mean is 0 / 0, NaN, as in PyTorch, and the gradients are 0.

    A target outside 0 to classes - 1 that is not `ignore_index` raises on the CPU. On CUDA an exception would need a
    sync: there the loss and the row's gradients become NaN, and nothing is read out of bounds.

    Args:
        logits: (N, classes), one of the four dtypes; borrowed.
        target: int64 or int32, (N,); borrowed, and kept for the backward pass.
        label_smoothing: from 0 to 1.
        ignore_index: the target of rows that do not count.
        correct: int64, (2,): to be added to in the same launch are the numbers of rows that count and whose target is
            the largest logit, and is among the five largest; of equal logits the first is larger, NaN is the largest.

    Returns:
        The loss, 0-d, float32 (float64 for float64 logits), on the device; and what `cross_entropy_backward` needs.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape does not fit, the devices differ, label_smoothing is out of range, or (CPU) a target is.
    """
    kind = suffix("logits", logits)
    _check(logits, target)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing}")
    if correct is not None:
        require_dtype("correct", correct, np.int64)
        require_shape("correct", correct, (2,))
        require_dense("correct", correct)
    if not on_cuda(logits=logits, target=target, correct=correct):
        _check_labels(target, logits.shape[1], ignore_index)
        if correct is not None:
            correct += reference.correct_counts(logits, target, ignore_index)
        loss, probabilities, count = reference.cross_entropy_forward(logits, target, label_smoothing, ignore_index)
        return loss, CrossEntropySaved(probabilities, target, count, label_smoothing, ignore_index, logits.dtype)
    rows, classes = logits.shape
    dtype = accumulator(logits)
    target = _labels(target)
    loss = new((), dtype)
    count = new((1,), np.int64)
    losses = new((rows,), dtype)
    ranks = new((rows,), np.int64)
    probabilities = new(logits.shape, dtype)
    launch_blocks(
        "loss",
        f"cross_entropy_forward_{kind}",
        (max(1, rows), 1),
        (min(THREADS, 32 * -(-classes // 32)), 1),
        loss,
        count,
        correct,
        losses,
        ranks,
        probabilities,
        cupy().zeros(1, np.uint32),
        dense(logits, "nchw"),
        target,
        np.int64(rows),
        np.int64(classes),
        np.float64(label_smoothing),
        np.int64(ignore_index),
        defines=defines_of(kind),
    )
    return loss, CrossEntropySaved(probabilities, target, count, label_smoothing, ignore_index, logits.dtype)


def cross_entropy_backward(dloss: Array, saved: CrossEntropySaved) -> Array:
    """The gradient of the logits.

    Args:
        dloss: gradient of the loss, one element, dtype of the loss, on the device; borrowed.
        saved: from `cross_entropy_forward`.

    Returns:
        dlogits, (N, classes), dtype of the logits; owned by the caller.

    Raises:
        TypeError: dloss has another dtype.
        ValueError: dloss has another size or is on another device.
    """
    require_dtype("dloss", dloss, saved.probabilities.dtype)
    if dloss.size != 1:
        raise ValueError(f"dloss: expected one element, got shape {dloss.shape}")
    if not on_cuda(dloss=dloss, saved=saved.probabilities):
        return reference.cross_entropy_backward(
            dloss.reshape(()),
            saved.probabilities,
            saved.target,
            saved.count,
            saved.label_smoothing,
            saved.ignore_index,
            saved.dtype,
        )
    dlogits = new(saved.probabilities.shape, saved.dtype)
    kind = suffix("logits", dlogits)
    launch(
        "loss",
        f"cross_entropy_backward_{kind}",
        dlogits.size,
        dlogits,
        dloss,
        saved.probabilities,
        saved.target,
        saved.count,
        np.int64(dlogits.shape[0]),
        np.int64(dlogits.shape[1]),
        np.float64(saved.label_smoothing),
        np.int64(saved.ignore_index),
        defines=defines_of(kind),
    )
    return dlogits


def top1_count(logits: Array, target: Array) -> Array:
    """How many rows have their largest logit at the target; the first of equal ones counts, NaN counts as largest.

    Args:
        logits: (N, classes), one of the four dtypes; borrowed.
        target: int64 or int32, (N,); borrowed.

    Returns:
        int64, 0-d, on the device; owned by the caller.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape does not fit or the devices differ.
    """
    kind = suffix("logits", logits)
    _check(logits, target)
    if not on_cuda(logits=logits, target=target):
        return reference.top1_count(logits, target)
    rows, classes = logits.shape
    count = cupy().zeros((), np.int64)
    launch_blocks(
        "loss",
        f"top1_count_{kind}",
        (-(-rows // 8), 1),
        (THREADS, 1),
        count,
        dense(logits, "nchw"),
        _labels(target),
        np.int64(rows),
        np.int64(classes),
        defines=defines_of(kind),
    )
    return count


def defines_of(kind: str) -> tuple[str, ...]:
    """The macros by which kernels/loss.cu is compiled for one dtype, given its kernels' suffix."""
    return (f"LOSS_KIND={kind}",)


def _check(logits: Array, target: Array) -> None:
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits: expected (N, classes), got shape {logits.shape}")
    dtype = getattr(target, "dtype", None)
    if dtype not in (np.int64, np.int32):
        raise TypeError(f"target: expected an array of int64 or int32, got {dtype or type(target).__name__}")
    require_shape("target", target, (logits.shape[0],))


def _labels(target: Array) -> Array:
    """The targets as the kernels take them: dense int64."""
    if target.dtype == np.int64:
        return dense(target, "nchw")
    out = new(target.shape, np.int64)
    strided_copy(target, out)
    return out


def _check_labels(target: Array, classes: int, ignore_index: int) -> None:
    bad = np.flatnonzero(((target < 0) | (target >= classes)) & (target != ignore_index))
    if bad.size:
        first = int(bad[0])
        raise ValueError(
            f"target: {int(target[first])} at index {first} is not from 0 to {classes - 1} "
            f"and not ignore_index {ignore_index}"
        )
