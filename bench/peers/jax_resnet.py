"""Trains a ResNet with JAX and Flax, as the benchmarks ask (see `steps.py`).

The one mode is "jit": the whole step is one compiled function, whose parameters, statistics and optimizer state are
donated; NHWC; parameters in float32, float16 and bfloat16 as Flax's `dtype`. In strict float32 every convolution and
product has the highest precision; in tf32 they have JAX's default, which on a GPU is TF32. Option "scaler": dynamic
loss scaling (flax.training.dynamic_scale), without which the float16 step does less than the others' do.

Run: python bench/peers/jax_resnet.py < request.json
"""

import time

BEGAN = time.perf_counter()

import contextlib  # noqa: E402
import functools  # noqa: E402
from importlib import metadata  # noqa: E402
from typing import Any  # noqa: E402

import flax  # noqa: E402
import flax.linen as nn  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import steps  # noqa: E402
from flax.training.dynamic_scale import DynamicScale  # noqa: E402

DTYPES = {"float32": jnp.float32, "tf32": jnp.float32, "float16": jnp.float16, "bfloat16": jnp.bfloat16}
PRECISION = {"float32": jax.lax.Precision.HIGHEST}
"""What is not here has the default."""

Tree = Any


class Block(nn.Module):
    """A basic or a bottleneck block."""

    channels: int
    stride: int
    bottleneck: bool
    dtype: Any
    precision: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        convolution, norm = layers(self.dtype, self.precision)
        out_channels = self.channels * (4 if self.bottleneck else 1)
        if self.bottleneck:
            y = nn.relu(norm()(convolution(self.channels, 1)(x)))
            y = nn.relu(norm()(convolution(self.channels, 3, self.stride)(y)))
            y = norm()(convolution(out_channels, 1)(y))
        else:
            y = nn.relu(norm()(convolution(self.channels, 3, self.stride)(x)))
            y = norm()(convolution(self.channels, 3)(y))
        if self.stride != 1 or x.shape[-1] != out_channels:
            x = norm()(convolution(out_channels, 1, self.stride)(x))
        return nn.relu(x + y)


def layers(dtype: Any, precision: Any) -> tuple[Any, Any]:
    """Gives what makes a convolution (channels, kernel, stride), and a batch norm."""

    def convolution(channels: int, kernel: int, stride: int = 1) -> nn.Conv:
        return nn.Conv(
            channels,
            (kernel, kernel),
            (stride, stride),
            padding=[(kernel // 2, kernel // 2)] * 2,
            use_bias=False,
            dtype=dtype,
            precision=precision,
            kernel_init=nn.initializers.variance_scaling(2.0, "fan_out", "normal"),
        )

    return convolution, functools.partial(
        nn.BatchNorm, use_running_average=False, momentum=0.9, epsilon=1e-5, dtype=dtype
    )


class ResNet(nn.Module):
    """torchvision's network in NHWC; the arguments are those of PyTorch's twin."""

    blocks: tuple[int, ...]
    bottleneck: bool
    classes: int
    stem: str
    dtype: Any
    precision: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        convolution, norm = layers(self.dtype, self.precision)
        x = x.astype(self.dtype)
        x = nn.relu(norm()(convolution(64, *((7, 2) if self.stem == "imagenet" else (3, 1)))(x)))
        if self.stem == "imagenet":
            x = nn.max_pool(x, (3, 3), (2, 2), padding=[(1, 1), (1, 1)])
        for stage, count in enumerate(self.blocks):
            for place in range(count):
                stride = 2 if stage and not place else 1
                x = Block(64 << stage, stride, self.bottleneck, self.dtype, self.precision)(x)
        return nn.Dense(self.classes, dtype=jnp.float32, precision=self.precision)(x.mean((1, 2)))


def cudnn_version() -> str | None:
    """Says which cuDNN lies beside JAX."""
    for cuda in (13, 12):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(f"nvidia-cudnn-cu{cuda}")
    return None


class Training:
    """A model in training; see `steps.Side`.

    Args:
        request: what is asked.

    Raises:
        ValueError: an unknown mode.
    """

    def __init__(self, request: steps.Request) -> None:
        if request.how != "jit":
            raise ValueError(f"{request.how!r} is not jit")
        self.request = request
        self.dtype = DTYPES[request.precision]
        self.precision = PRECISION.get(request.precision)
        if self.precision is not None:
            jax.config.update("jax_default_matmul_precision", "highest")
        bottleneck = request.network in steps.BOTTLENECK
        self.model = ResNet(
            steps.BLOCKS[request.network], bottleneck, request.classes, request.stem, self.dtype, self.precision
        )
        self.optimizer = optax.chain(
            optax.add_decayed_weights(steps.WEIGHT_DECAY), optax.sgd(request.lr, momentum=steps.MOMENTUM)
        )
        shape = (1, request.size, request.size, request.in_channels)
        # float32 throughout, so that the initial values do not depend on the precision
        variables = jax.jit(self.model.init)(jax.random.key(0), jnp.zeros(shape, jnp.float32))
        params = variables["params"]
        scale = None
        if "scaler" in request.options:
            # Arrays, as a step gives them: after Python's numbers the second step would be compiled anew.
            scale = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(steps.INIT_SCALE))
        self.state: Tree = (params, variables["batch_stats"], self.optimizer.init(params), scale)
        self.run = jax.jit(self._step, donate_argnums=0)

    def _step(self, state: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, jax.Array]:
        params, statistics, opt_state, scale = state

        def loss_of(params: Tree) -> tuple[jax.Array, Tree]:
            variables = {"params": params, "batch_stats": statistics}
            logits, updates = self.model.apply(variables, x, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return losses.mean(), updates["batch_stats"]

        if scale is None:
            (loss, new_statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        else:
            scale, valid, (loss, new_statistics), gradients = scale.value_and_grad(loss_of, has_aux=True)(params)
        updates, new_opt_state = self.optimizer.update(gradients, opt_state, params)
        new = (optax.apply_updates(params, updates), new_statistics, new_opt_state)
        if scale is not None:
            new = jax.tree.map(functools.partial(jnp.where, valid), new, (params, statistics, opt_state))
        return (*new, scale), loss

    def settings(self) -> steps.Answer:
        return {
            "jax": jax.__version__,
            "flax": flax.__version__,
            "cudnn": cudnn_version(),
            "device": jax.devices()[0].device_kind,
            "precision": "default" if self.precision is None else "highest",
            "dtype": jnp.dtype(self.dtype).name,
            "layout": "nhwc",
            "scaler": self.state[3] is not None,
        }

    def put(self, images: Any, labels: Any) -> tuple[jax.Array, jax.Array]:
        x = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
        return jax.device_put(x), jax.device_put(labels.astype(np.int32))

    def step(self, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        self.state, loss = self.run(self.state, *batch)
        return loss

    def value(self, loss: jax.Array) -> float:
        return float(loss)

    def wait(self) -> None:
        jax.block_until_ready(self.state)

    def load(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("JAX's side draws its own initial values")

    def scale(self) -> float | None:
        return None if self.state[3] is None else float(self.state[3].scale)

    def settled(self) -> None:
        pass

    def warm(self) -> None:
        pass

    def memory(self) -> steps.Answer:
        # JAX holds most of the device's memory from the start, and its peak cannot be set back.
        peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        return {"allocated_peak": peak, "allocated_peak_all": peak, "device_used": None}

    def convolve(self, x: Any, w: Any) -> Any:
        @jax.jit
        def run(x: jax.Array, w: jax.Array) -> jax.Array:
            return jax.lax.conv_general_dilated(
                x.astype(self.dtype),
                w.astype(self.dtype),
                (1, 1),
                "VALID",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                precision=self.precision,
            )

        y = run(x.transpose(0, 2, 3, 1), w.transpose(2, 3, 1, 0))
        return np.asarray(y.astype(jnp.float32)).transpose(0, 3, 1, 2)


if __name__ == "__main__":
    steps.serve(Training, BEGAN)
