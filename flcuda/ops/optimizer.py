"""The optimizer step and the loss scaler's rule, on the device and without a sync.

Everything that changes from step to step (learning rate, scale, flags, counters) is read from device memory, so that a
captured CUDA graph can be replayed.
"""

from typing import Any

import numpy as np

from flcuda import reference
from flcuda.kernel_loader import launch
from flcuda.ops.arrays import accumulator, on_cuda, require_dense, require_dtype, require_shape, suffix

Array = Any


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
    nesterov: bool = False,
    weight_decay: float = 0.0,
    inv_scale: Array | None = None,
    flags: Array | None = None,
) -> None:
    """One step of stochastic gradient descent over a flat storage, as PyTorch's SGD without dampening.

    With g = grad * inv_scale + weight_decay * decay[segment] * master: velocity = momentum * velocity + g;
    master -= lr * (g + momentum * velocity if nesterov else velocity); data = master, rounded. A velocity that starts
    at zeros makes the first step PyTorch's. When flags[0] is not 0 nothing is written.

    Args:
        master: float32 or float64, (size,), C-contiguous; updated in place.
        data: the parameters in the compute dtype, (size,), updated in place; `master` itself when the dtypes are equal.
        grad: dtype of data, (size,); borrowed.
        velocity: dtype of master, (size,), updated in place; None only when momentum is 0.
        offsets: int64, (n + 1,): segment i is [offsets[i], offsets[i + 1]); together they cover what is updated.
        decay: float32, (n,): the factor of weight_decay of each segment, mostly 0 or 1.
        lr: float64, one element, on the device.
        momentum: not negative.
        nesterov: look ahead; needs momentum.
        weight_decay: L2 factor, not negative.
        inv_scale: float64, one element, on the device: what gradients are multiplied by first; None is 1.
        flags: int32, as `find_invalid` leaves it; None when every step counts.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape does not fit, an array is not contiguous, the devices differ, or a number is out of range.
    """
    kind = suffix("data", data)
    require_dtype("master", master, accumulator(data))
    require_dtype("grad", grad, data.dtype)
    if data.dtype == master.dtype and data is not master and not _same_memory(data, master):
        raise ValueError("data: must be master itself when their dtypes are equal")
    if master.ndim != 1:
        raise ValueError(f"master: expected one dimension, got shape {master.shape}")
    require_shape("data", data, master.shape)
    require_shape("grad", grad, master.shape)
    if velocity is not None:
        require_dtype("velocity", velocity, master.dtype)
        require_shape("velocity", velocity, master.shape)
    elif momentum != 0:
        raise ValueError(f"velocity: momentum {momentum} needs it, got None")
    require_dtype("offsets", offsets, np.int64)
    require_dtype("decay", decay, np.float32)
    if decay.ndim != 1:
        raise ValueError(f"decay: expected (n,), got shape {decay.shape}")
    require_shape("offsets", offsets, (decay.size + 1,))
    _check_scalar("lr", lr)
    if inv_scale is not None:
        _check_scalar("inv_scale", inv_scale)
    if flags is not None:
        require_dtype("flags", flags, np.int32)
    for name, value in (("momentum", momentum), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    if nesterov and momentum == 0:
        raise ValueError("nesterov: True needs momentum, got momentum=0")
    arrays = {
        "master": master,
        "data": data,
        "grad": grad,
        "velocity": velocity,
        "offsets": offsets,
        "decay": decay,
        "lr": lr,
        "inv_scale": inv_scale,
        "flags": flags,
    }
    for name, a in arrays.items():
        if a is not None:
            require_dense(name, a)
    if not on_cuda(**arrays):
        target = master if data.dtype == master.dtype else data
        reference.sgd_update(
            master,
            target,
            grad,
            velocity,
            offsets,
            decay,
            lr,
            momentum,
            nesterov,
            weight_decay,
            inv_scale,
            flags,
        )
        return
    number = master.dtype.type
    launch(
        "optimizer",
        f"sgd_update_{kind}",
        master.size,
        master,
        data,
        velocity,
        grad,
        offsets,
        decay,
        lr,
        inv_scale,
        flags,
        number(momentum),
        number(weight_decay),
        np.int32(nesterov),
        np.int64(decay.size),
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
    if flags is not None:
        require_dtype("flags", flags, np.int32)
        require_dense("flags", flags)
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
    if not growth_factor > 1:
        raise ValueError(f"growth_factor must be above 1, got {growth_factor}")
    if not 0 < backoff_factor < 1:
        raise ValueError(f"backoff_factor must be between 0 and 1, got {backoff_factor}")
    if growth_interval < 1:
        raise ValueError(f"growth_interval must be at least 1, got {growth_interval}")
    if not 0 < min_scale <= max_scale < float("inf"):
        raise ValueError(f"min_scale and max_scale must be positive, finite and in order, got {min_scale}, {max_scale}")
    if not on_cuda(scale=scale, inv_scale=inv_scale, counters=counters, flags=flags):
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
    )


def _check_scalar(name: str, a: Array) -> None:
    require_dtype(name, a, np.float64)
    if a.size != 1:
        raise ValueError(f"{name}: expected one element, got shape {a.shape}")


def _same_memory(a: Array, b: Array) -> bool:
    """Says whether two dense arrays start at one address."""
    first, second = (x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr for x in (a, b))
    return bool(first == second)
