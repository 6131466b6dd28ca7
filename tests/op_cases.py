"""Random cases of every op, run on the CPU device by tests/unit and on CUDA by tests/gpu."""

from functools import partial
from typing import Any

import numpy as np
from helpers import OpCase

from flcuda.ops import batch_norm, bias, elementwise, loss, pooling

# Odd sizes, a single row, more than 32 channels, other ranks, more than one split of a reduction.
BATCH_SHAPES = [(2, 3, 5, 7), (1, 37, 4, 3), (5, 2, 1, 9), (3, 4, 6), (2, 3, 2, 4, 3), (6, 5), (3, 40, 33, 31)]
# And an empty batch, and no channels.
SHAPES = [*BATCH_SHAPES, (0, 3, 2, 2), (4, 0, 5, 5)]
POOLS = [
    ((2, 3, 9, 8), 3, 2, 1),
    ((1, 5, 7, 7), (2, 3), (1, 2), (1, 0)),
    ((2, 33, 6, 5), 2, 2, 0),
    ((1, 2, 19, 18), 17, 3, 8),
    ((0, 2, 4, 4), 2, 2, 0),
]


def _random(shape: tuple[int, ...], seed: int, spread: float = 1.0, mean: float = 0.0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(mean, spread, shape)


def _one(function: Any, **fixed: Any) -> Any:
    return lambda **arrays: (function(**arrays, **fixed),)


def _accumulate(out: Any, a: Any) -> tuple[Any]:
    elementwise.accumulate_(out, a)
    return (out,)


def _copy(src: Any, out: Any) -> tuple[Any]:
    elementwise.copy(src, out)
    return (out,)


def _fill(out: Any) -> tuple[Any]:
    elementwise.fill(out, 0.625)
    return (out,)


def _batch_norm_training(num_batches: Any, momentum: float | None, **arrays: Any) -> tuple[Any, ...]:
    y, mean, inverse = batch_norm.batch_norm_training(**arrays, num_batches=num_batches, momentum=momentum, eps=1e-5)
    return y, mean, inverse, arrays["pending_mean"], arrays["pending_var"], num_batches


def _cross_entropy(logits: Any, target: Any, dloss: Any, **options: Any) -> tuple[Any, ...]:
    value, saved = loss.cross_entropy_forward(logits, target, **options)
    return value, saved.probabilities, saved.count, loss.cross_entropy_backward(dloss, saved)


def _vectors(channels: int, *names: str) -> dict[str, np.ndarray]:
    return {name: np.abs(_random((channels,), 50 + i)) + 0.2 for i, name in enumerate(names)}


def cases() -> list[OpCase]:
    found: list[OpCase] = []
    for shape in SHAPES:
        label = "x".join(map(str, shape))
        x, other = _random(shape, 1), _random(shape, 2)
        channels = shape[1]
        found += [
            OpCase(f"relu_forward-{label}", _one(elementwise.relu_forward), {"x": x}),
            OpCase(f"relu_backward-{label}", _one(elementwise.relu_backward), {"dy": x, "y": np.maximum(other, 0)}),
            OpCase(f"add-{label}", _one(elementwise.add), {"a": x, "b": other}),
            OpCase(f"accumulate-{label}", _accumulate, {"out": x, "a": other}, like=()),
            OpCase(f"scale-{label}", _one(elementwise.scale, s=0.375), {"x": x}),
            OpCase(f"copy-{label}", _copy, {"src": x, "out": other}, like=()),
            OpCase(f"fill-{label}", _fill, {"out": x}, like=()),
            OpCase(
                f"bias_forward-{label}",
                _one(bias.bias_forward),
                {"y": x, "bias": other[:1].sum(axis=tuple(a for a in range(x.ndim) if a != 1))},
                fixed=("bias",),
                like=(),
            ),
            OpCase(f"bias_backward-{label}", _one(bias.bias_backward), {"dy": x}, like=(), factor=4),
            OpCase(
                f"bias_accumulate-{label}",
                _one(bias.bias_backward, accumulate=True),
                {"dy": x, "out": _random((channels,), 3)},
                fixed=("out",),
                like=(),
                factor=4,
            ),
        ]
    for shape in BATCH_SHAPES:
        label = "x".join(map(str, shape))
        channels = shape[1]
        x, dy = _random(shape, 4, 2.0, 0.5), _random(shape, 5)
        names = ("weight", "bias", "pending_mean", "pending_var")
        training = {"x": x, **_vectors(channels, *names)}
        for momentum in (0.1, None):
            found.append(
                OpCase(
                    f"batch_norm_training-{momentum}-{label}",
                    partial(_batch_norm_training, momentum=momentum),
                    {**training, "num_batches": np.array([4], np.int64)},
                    wide=names,
                    wide_results=(1, 2, 3, 4),
                    fixed=("num_batches",),
                    factor=4,
                )
            )
        saved = _vectors(channels, "weight", "saved_mean", "saved_inv_variance", "dweight", "dbias")
        found.append(
            OpCase(
                f"batch_norm_backward-{label}",
                partial(batch_norm.batch_norm_backward, accumulate=True),
                {"dy": dy, "x": x, **saved},
                wide=tuple(saved),
                wide_results=(1, 2),
                factor=8,
            )
        )
    for shape in SHAPES:
        label = "x".join(map(str, shape))
        channels = shape[1]
        x, dy = _random(shape, 4, 2.0, 0.5), _random(shape, 5)
        statistics = _vectors(channels, "weight", "bias", "running_mean", "running_var")
        found.append(
            OpCase(
                f"batch_norm_inference-{label}",
                _one(batch_norm.batch_norm_inference, eps=1e-5),
                {"x": x, **statistics},
                wide=tuple(statistics),
                factor=2,
            )
        )
        running = {name: statistics[name] for name in ("weight", "running_mean", "running_var")}
        found.append(
            OpCase(
                f"batch_norm_inference_backward-{label}",
                partial(batch_norm.batch_norm_inference_backward, eps=1e-5),
                {"dy": dy, "x": x, **running},
                wide=tuple(running),
                wide_results=(1, 2),
                factor=8,
            )
        )
    for shape, kernel_size, stride, padding in POOLS:
        label = "x".join(map(str, shape))
        x = _random(shape, 6)
        options = {"kernel_size": kernel_size, "stride": stride, "padding": padding}
        y, indices = pooling.max_pool_forward(x, **options)
        dy = _random(y.shape, 7)
        found += [
            OpCase(f"max_pool_forward-{label}", partial(pooling.max_pool_forward, **options), {"x": x}, exact=(0, 1)),
            OpCase(
                f"max_pool_backward-{label}",
                _one(pooling.max_pool_backward, x_shape=shape, **options),
                {"dy": dy, "indices": indices},
            ),
            OpCase(f"avg_pool_forward-{label}", _one(pooling.avg_pool_forward, **options), {"x": x}, factor=2),
            OpCase(
                f"avg_pool_backward-{label}",
                _one(pooling.avg_pool_backward, x_shape=shape, **options),
                {"dy": dy},
                factor=2,
            ),
        ]
    for shape in [(2, 3, 5, 7), (3, 40, 3, 2), (4, 5, 6), (0, 3, 2, 2), (2, 3, 2, 4, 3)]:
        label = "x".join(map(str, shape))
        found.append(
            OpCase(f"global_avg_pool_forward-{label}", _one(pooling.global_avg_pool_forward), {"x": _random(shape, 8)})
        )
        for layout in ("nchw", "nhwc"):
            found.append(
                OpCase(
                    f"global_avg_pool_backward-{layout}-{label}",
                    _one(pooling.global_avg_pool_backward, x_shape=shape, layout=layout),
                    {"dy": _random(shape[:2], 9)},
                    like=(),
                )
            )
    for rows, classes in [(5, 7), (1, 1), (17, 1000), (300, 10)]:
        generator = np.random.default_rng([rows, classes])
        for smoothing, ignored in ((0.0, 0), (0.1, rows // 3)):
            for label_dtype in (np.int64, np.int32):
                target = generator.integers(0, classes, rows).astype(label_dtype)
                target[:ignored] = -100
                found.append(
                    OpCase(
                        f"cross_entropy-{rows}x{classes}-{smoothing}-{np.dtype(label_dtype)}",
                        partial(_cross_entropy, label_smoothing=smoothing),
                        {"logits": _random((rows, classes), 10, 3.0), "target": target, "dloss": np.array(1.5)},
                        wide=("dloss",),
                        wide_results=(0, 1),
                        like=(),
                        factor=8,
                    )
                )
        found.append(
            OpCase(
                f"top1_count-{rows}x{classes}",
                _one(loss.top1_count),
                {
                    "logits": np.round(_random((rows, classes), 11)),  # ties: the first one counts
                    "target": np.round(_random((rows, classes), 11)).argmax(axis=1) * generator.integers(0, 2, rows),
                },
            )
        )
    return found
