"""The optimizer step and the loss scaler's rule, on the device and without a sync.

Everything that changes from step to step (learning rate, scale, flags, counters) is read from device memory, so that a
captured CUDA graph can be replayed.
"""

import math
from typing import Any

import numpy as np

from flcuda import reference
from flcuda.kernel_loader import launch, launch_blocks
from flcuda.ops.arrays import accumulator, on_cuda, require_dense, require_dtype, require_shape, suffix

Array = Any

# As in the kernels: the threads of a block, and the bytes of master that a block takes at a time.
_THREADS = 256
_CHUNK_BYTES = _THREADS * 2 * 16
_MAX_GRID = 1 << 20


def sgd_update(
    master: Array,
    data: Array,
    grad: Array,
    velocity: Array | None,
    offsets: Array,
    decay: Array,
    lr: Array,
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    steps: Array | None = None,
    inv_scale: Array | None = None,
    clip: Array | None = None,
    flags: Array | None = None,
) -> None:
    """One step of stochastic gradient descent over a flat storage, as PyTorch's SGD, in one launch.

    With g = grad * inv_scale * clip + weight_decay * decay[segment] * master: velocity = momentum * velocity +
    (1 - dampening) * g; master -= lr * (g + momentum * velocity if nesterov else velocity); data = master, rounded. A
    velocity that starts at zeros makes the first step PyTorch's, which has no dampening. When flags[0] is not 0
    nothing is written.

    Args:
        master: float32 or float64, (size,), C-contiguous; updated in place.
        data: the parameters in the compute dtype, (size,), updated in place; `master` itself when the dtypes are equal.
        grad: dtype of data, (size,); borrowed.
        velocity: dtype of master, (size,), updated in place; None only when momentum is 0.
        offsets: int64, (n + 1,): segment i is [offsets[i], offsets[i + 1]); together they cover what is updated.
        decay: float32, (n,): the factor of weight_decay of each segment, mostly 0 or 1.
        lr: float64, one element, on the device.
        momentum: not negative.
        dampening: from 0 to 1; needs momentum and steps.
        nesterov: look ahead; needs momentum, and no dampening.
        weight_decay: L2 factor, not negative.
        steps: int64, one element, on the device: valid steps before this one; see `advance_steps`.
        inv_scale: float64, one element, on the device: what gradients are multiplied by first; None is 1.
        clip: float64, one element, on the device, the same; as `clip_factor` leaves it.
        flags: int32, as `find_invalid` leaves it; None when every step counts.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape does not fit, an array is not contiguous, the devices differ, or a number is out of range.
    """
    kind = suffix("data", data)
    _not_negative(momentum=momentum, weight_decay=weight_decay)
    if nesterov and momentum == 0:
        raise ValueError("nesterov: True needs momentum, got momentum=0")
    if not 0 <= dampening <= 1:
        raise ValueError(f"dampening must be from 0 to 1, got {dampening}")
    if dampening != 0 and (momentum == 0 or nesterov or steps is None):
        raise ValueError(f"dampening: {dampening} needs momentum and steps, and no nesterov")
    if velocity is None and momentum != 0:
        raise ValueError(f"velocity: momentum {momentum} needs it, got None")
    arrays = {"master": master, "data": data, "grad": grad, "velocity": velocity, "offsets": offsets, "decay": decay}
    scalars = {"lr": lr, "steps": steps, "inv_scale": inv_scale, "clip": clip}
    _check_storage(arrays, scalars, flags)
    if not on_cuda(**arrays, **scalars, flags=flags):
        reference.sgd_update(
            master,
            master if data.dtype == master.dtype else data,
            grad,
            velocity,
            offsets,
            decay,
            lr,
            momentum,
            dampening,
            nesterov,
            weight_decay,
            steps,
            inv_scale,
            clip,
            flags,
        )
        return
    launch_blocks(
        "optimizer",
        f"sgd_update_{kind}",
        _grid(master),
        (_THREADS, 1),
        master,
        data,
        grad,
        velocity,
        offsets,
        decay,
        lr,
        steps,
        inv_scale,
        clip,
        flags,
        np.float64(momentum),
        np.float64(dampening),
        np.float64(weight_decay),
        np.int32(nesterov),
        np.int64(decay.size),
    )


def adam_update(
    master: Array,
    data: Array,
    grad: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    offsets: Array,
    decay: Array,
    lr: Array,
    steps: Array,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    inv_scale: Array | None = None,
    clip: Array | None = None,
    flags: Array | None = None,
) -> None:
    """One step of Adam or AdamW over a flat storage, as PyTorch's, in one launch.

    With g = grad * inv_scale * clip and t = steps + 1: weight decay adds weight_decay * decay[segment] * master to g,
    or, decoupled, first takes lr * weight_decay * decay[segment] * master from master; exp_avg = beta1 * exp_avg +
    (1 - beta1) * g; exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g; master -= lr / (1 - beta1^t) * exp_avg /
    (sqrt(exp_avg_sq) / sqrt(1 - beta2^t) + eps); data = master, rounded. When flags[0] is not 0 nothing is written.

    Source: Kingma and Ba, ICLR 2015; Loshchilov and Hutter, ICLR 2019.

    Args:
        master: float32 or float64, (size,), C-contiguous; updated in place.
        data: the parameters in the compute dtype, (size,), updated in place; `master` itself when the dtypes are equal.
        grad: dtype of data, (size,); borrowed.
        exp_avg: dtype of master, (size,), updated in place; zeros at first.
        exp_avg_sq: as exp_avg.
        offsets: int64, (n + 1,): segment i is [offsets[i], offsets[i + 1]); together they cover what is updated.
        decay: float32, (n,): the factor of weight_decay of each segment, mostly 0 or 1.
        lr: float64, one element, on the device.
        steps: int64, one element, on the device: valid steps before this one; `advance_steps` counts on, after all
            storages of a model have had theirs.
        betas: from 0 to 1, below 1.
        eps: above 0.
        weight_decay: not negative.
        decoupled: AdamW.
        inv_scale: float64, one element, on the device: what gradients are multiplied by first; None is 1.
        clip: float64, one element, on the device, the same; as `clip_factor` leaves it.
        flags: int32, as `find_invalid` leaves it; None when every step counts.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape does not fit, an array is not contiguous, the devices differ, or a number is out of range.
    """
    kind = suffix("data", data)
    for beta in betas:
        if not 0 <= beta < 1:
            raise ValueError(f"betas must be from 0 to below 1, got {betas}")
    if not eps > 0:
        raise ValueError(f"eps must be above 0, got {eps}")
    _not_negative(weight_decay=weight_decay)
    arrays = {
        "master": master,
        "data": data,
        "grad": grad,
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
        "offsets": offsets,
        "decay": decay,
    }
    scalars = {"lr": lr, "steps": steps, "inv_scale": inv_scale, "clip": clip}
    _check_storage(arrays, scalars, flags)
    if not on_cuda(**arrays, **scalars, flags=flags):
        reference.adam_update(
            master,
            master if data.dtype == master.dtype else data,
            grad,
            exp_avg,
            exp_avg_sq,
            offsets,
            decay,
            lr,
            steps,
            betas,
            eps,
            weight_decay,
            decoupled,
            inv_scale,
            clip,
            flags,
        )
        return
    launch_blocks(
        "optimizer",
        f"adam_update_{kind}",
        _grid(master),
        (_THREADS, 1),
        master,
        data,
        grad,
        exp_avg,
        exp_avg_sq,
        offsets,
        decay,
        lr,
        steps,
        inv_scale,
        clip,
        flags,
        np.float64(betas[0]),
        np.float64(betas[1]),
        np.float64(eps),
        np.float64(weight_decay),
        np.int32(decoupled),
        np.int64(decay.size),
    )


def advance_steps(steps: Array, flags: Array | None = None) -> None:
    """Counts a step, unless it was skipped.

    Args:
        steps: int64, one element; updated in place.
        flags: int32, as `find_invalid` leaves it; None when every step counts.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape does not fit or the devices differ.
    """
    _check_scalar("steps", steps, np.int64)
    _check_flags(flags)
    if not on_cuda(steps=steps, flags=flags):
        reference.advance_steps(steps, flags)
        return
    launch("optimizer", "advance_steps", 1, steps, flags)


def clip_factor(
    sums: Array,
    inv_scale: Array | None,
    max_norm: float,
    flags: Array,
    out: Array,
    *,
    limit: float = math.inf,
) -> None:
    """Finds by what gradients are multiplied so that the norm of all together is at most max_norm.

    norm = sqrt(the sum of sums) * inv_scale; out = min(1, max_norm / norm). A norm that is NaN, infinite or above limit
    raises flags[0], so that the update changes nothing. On CUDA one small launch.

    Args:
        sums: float64, (n,): the sum of squares of each segment of all storages, in units of the stored gradients, as
            `find_invalid` leaves it; borrowed.
        inv_scale: float64, one element; None is 1.
        max_norm: above 0; infinity only checks.
        flags: int32, as `find_invalid` leaves it; its first element is set or left.
        out: float64, one element; overwritten.
        limit: the largest valid norm. With the largest number of the master's dtype no unscaled gradient overflows.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape does not fit, an array is not contiguous, the devices differ, or a number is out of range.
    """
    require_dtype("sums", sums, np.float64)
    if sums.ndim != 1:
        raise ValueError(f"sums: expected (n,), got shape {sums.shape}")
    require_dense("sums", sums)
    if inv_scale is not None:
        _check_scalar("inv_scale", inv_scale)
    _check_scalar("out", out)
    require_dtype("flags", flags, np.int32)
    _check_flags(flags)
    for name, value in (("max_norm", max_norm), ("limit", limit)):
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}")
    limit = min(limit, float(np.finfo(np.float64).max))
    if not on_cuda(sums=sums, inv_scale=inv_scale, flags=flags, out=out):
        reference.clip_factor(sums, inv_scale, max_norm, flags, out, limit)
        return
    launch_blocks(
        "optimizer",
        "clip_factor",
        (1, 1),
        (_THREADS, 1),
        out,
        flags,
        sums,
        inv_scale,
        np.float64(max_norm),
        np.float64(limit),
        np.int64(sums.size),
    )


def commit_statistics(running: Array, pending: Array, flags: Array | None) -> None:
    """Makes batch norm's pending statistics the running ones after a valid step, and takes them back after another.

    Args:
        running: float32, float64 or int64, C-contiguous; written when flags[0] is 0.
        pending: same shape and dtype; written otherwise.
        flags: int32, as `find_invalid` leaves it; None when every step counts.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: the shapes or devices differ or an array is not contiguous.
    """
    if running.dtype not in (np.float32, np.float64, np.int64):
        raise TypeError(f"running: expected float32, float64 or int64, got {running.dtype}")
    require_dtype("pending", pending, running.dtype)
    require_shape("pending", pending, running.shape)
    _check_flags(flags)
    require_dense("running", running)
    require_dense("pending", pending)
    if not on_cuda(running=running, pending=pending, flags=flags):
        reference.commit_statistics(running, pending, flags)
        return
    function = f"commit_statistics_bytes{running.itemsize}"
    launch("optimizer", function, running.size, running, pending, flags, np.int64(running.size))


def scaler_update(
    scale: Array,
    inv_scale: Array,
    counters: Array,
    flags: Array,
    *,
    steps: Array | None = None,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 1e-4,
    max_scale: float = 65536.0,
) -> None:
    """Applies the loss scaler's rule after a step.

    Invalid (flags[0] is not 0): the scale is multiplied by backoff_factor unless that falls below min_scale; the count
    of good steps becomes 0; both counts of skips rise. Valid: the count of good steps rises, and when it reaches
    growth_interval the scale is multiplied by growth_factor unless that exceeds max_scale, and the count becomes 0; the
    count of consecutive skips becomes 0.

    Args:
        scale: float64, one element; updated in place.
        inv_scale: float64, one element; becomes 1 / scale.
        counters: int64, (3,): good steps since the scale last changed or was tried to, skipped steps in total, skipped
            steps in a row; updated in place.
        flags: int32, as `find_invalid` leaves it; borrowed.
        steps: int64, one element: all steps, skipped ones too; rises by one. None where nobody counts them.
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: at least 1.
        min_scale: above 0.
        max_scale: finite, at least min_scale.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape does not fit, the devices differ, or a number is out of range.
    """
    _check_scalar("scale", scale)
    _check_scalar("inv_scale", inv_scale)
    require_dtype("counters", counters, np.int64)
    require_shape("counters", counters, (3,))
    require_dtype("flags", flags, np.int32)
    require_dense("counters", counters)
    require_dense("flags", flags)
    if steps is not None:
        _check_scalar("steps", steps, np.int64)
    if not growth_factor > 1:
        raise ValueError(f"growth_factor must be above 1, got {growth_factor}")
    if not 0 < backoff_factor < 1:
        raise ValueError(f"backoff_factor must be between 0 and 1, got {backoff_factor}")
    if growth_interval < 1:
        raise ValueError(f"growth_interval must be at least 1, got {growth_interval}")
    if not 0 < min_scale <= max_scale < float("inf"):
        raise ValueError(f"min_scale and max_scale must be positive, finite and in order, got {min_scale}, {max_scale}")
    if not on_cuda(scale=scale, inv_scale=inv_scale, counters=counters, flags=flags, steps=steps):
        reference.scaler_update(
            scale,
            inv_scale,
            counters,
            flags,
            growth_factor,
            backoff_factor,
            growth_interval,
            min_scale,
            max_scale,
            steps,
        )
        return
    launch(
        "optimizer",
        "scaler_update",
        1,
        scale,
        inv_scale,
        counters,
        flags,
        np.float64(growth_factor),
        np.float64(backoff_factor),
        np.int64(growth_interval),
        np.float64(min_scale),
        np.float64(max_scale),
        steps,
    )


def _check_scalar(name: str, a: Array, dtype: type = np.float64) -> None:
    require_dtype(name, a, dtype)
    if a.size != 1:
        raise ValueError(f"{name}: expected one element, got shape {a.shape}")


def _check_flags(flags: Array | None) -> None:
    if flags is None:
        return
    require_dtype("flags", flags, np.int32)
    if flags.size == 0:
        raise ValueError("flags: expected one element at least")
    require_dense("flags", flags)


def _check_storage(arrays: dict[str, Array], scalars: dict[str, Array], flags: Array | None) -> None:
    """Checks what all updates take: the flat arrays and states, offsets and decay, and the numbers on the device."""
    master, data, offsets, decay = arrays["master"], arrays["data"], arrays["offsets"], arrays["decay"]
    require_dtype("master", master, accumulator(data))
    if data.dtype == master.dtype and data is not master and not _same_memory(data, master):
        raise ValueError("data: must be master itself when their dtypes are equal")
    if master.ndim != 1:
        raise ValueError(f"master: expected one dimension, got shape {master.shape}")
    require_dtype("offsets", offsets, np.int64)
    require_dtype("decay", decay, np.float32)
    if decay.ndim != 1:
        raise ValueError(f"decay: expected (n,), got shape {decay.shape}")
    require_shape("offsets", offsets, (decay.size + 1,))
    for name, a in arrays.items():
        if a is None:
            continue
        if name not in ("offsets", "decay"):
            require_dtype(name, a, data.dtype if name in ("data", "grad") else master.dtype)
            require_shape(name, a, master.shape)
        require_dense(name, a)
    for name, a in scalars.items():
        if a is not None:
            _check_scalar(name, a, np.int64 if name == "steps" else np.float64)
    _check_flags(flags)


def _not_negative(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}")


def _grid(master: Array) -> tuple[int, int]:
    """A block for each chunk."""
    return min(-(-master.nbytes // _CHUNK_BYTES), _MAX_GRID), 1


def _same_memory(a: Array, b: Array) -> bool:
    """Says whether two dense arrays start at one address."""
    first, second = (x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr for x in (a, b))
    return bool(first == second)
