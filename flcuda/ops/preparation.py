"""What a residual network's training step launches, to be compiled ahead of it; see Note [ahead] in kernel_loader."""

from flcuda import kernel_loader
from flcuda.device import DTYPES, Device
from flcuda.finder import copies
from flcuda.ops import batch_norm, loss, pooling
from flcuda.ops.arrays import Layout
from flcuda.ops.channel_reduction import Width

Module = tuple[str, tuple[str, ...]]


def step_modules(dtype: str, layout: Layout, *, pooled: bool) -> list[Module]:
    """Lists kernel files and macros, in the order in which a first step needs them.

    Args:
        dtype: of activations and weights.
        layout: of images.
        pooled: batch norm, ReLU and max pooling are done in one, as in the stem for large images.

    Returns:
        Arguments of `flcuda.kernel_loader.load_module`. What few shapes need is not among them.
    """
    kind = kernel_loader.SUFFIXES[DTYPES[dtype]]
    # Rows of nchw are often no whole vectors.
    widths: tuple[Width, ...] = ("vector",) if layout == "nhwc" else ("vector", "scalar")
    found: list[Module] = [("elementwise", ()), ("random", ()), (copies.KERNELS, ())]
    found += [("batch_norm", batch_norm.defines_of(width, layout, kind)) for width in widths]
    found += [("pooling", defines) for defines in pooling.defines_of(DTYPES[dtype], kind, pooled=pooled)]
    found += [("bias", ()), ("loss", loss.defines_of(kind)), ("optimizer", ())]
    # The check of gradients, which a scaler of the loss needs.
    return [*found, ("finite", ())] if dtype == "float16" else found


def prepare_step(dtype: str, layout: Layout, place: Device, *, pooled: bool) -> None:
    """Starts compiling what `step_modules` lists, in threads, and does not wait; nothing on the CPU device."""
    if place.kind == "cuda":
        with place.use():
            kernel_loader.prepare(step_modules(dtype, layout, pooled=pooled))
