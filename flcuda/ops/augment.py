"""Images of different sizes to one batch for training, in one launch.

Crop, resampling with antialias, flip, colour jitter, normalization, cast, layout and channel padding. What happens to
an image is a row of numbers, which the host draws; `flcuda.data.Augment` does that.
"""

from typing import Any, Protocol

import numpy as np

from flcuda import reference
from flcuda.device import Device, cupy, device_of, empty, is_capturing, is_cuda, memory_layout, numpy_dtype
from flcuda.errors import FlcudaError
from flcuda.kernel_loader import SUFFIXES, launch_blocks
from flcuda.ops.arrays import Layout, new, on_cuda, require_dense, require_dtype, require_shape

Array = Any

PARAMETERS = ("top", "left", "height", "width", "flip", "brightness", "contrast", "saturation", "hue")
"""The columns of a table of parameters: the crop in pixels of the image (fractions are allowed); 1 to mirror it left to
right, else 0; three factors, of which 1 changes nothing; and what is added to the hue, in turns."""

CHANNELS = (1, 3, 4)
DTYPES = ("float32", "float16", "bfloat16")

_UNCHANGED = (1.0, 1.0, 1.0, 0.0)  # brightness, contrast, saturation, hue
_TOP, _LEFT, _HEIGHT, _WIDTH, _FLIP = range(5)
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(5, 9)
# What rounding a crop's place and size to float32 may add to its end, relative to the image's side.
_ROUNDING = 2.0**-20

# As in kernels/augment.cu.
_THREADS = 224
_LINES = 28
# Pixels that are stored together where a pixel is no vector by itself: tiles begin at a multiple.
_PACKED = 4
_INT_MAX = 2**31 - 1


class Images(Protocol):
    """Images of different sizes: a `flcuda.data.ImageBatch`."""

    @property
    def pixels(self) -> Array:
        """uint8 (bytes,): images (height, width, channels), each packed."""

    @property
    def offsets(self) -> Array:
        """int64 (n,): where in pixels each image begins."""

    @property
    def sizes(self) -> Array:
        """int32 (n, 2): height and width."""

    @property
    def channels(self) -> int:
        """Of every image."""


class Description(Protocol):
    """What is the same for all images: a `flcuda.data.Augment`."""

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the result."""

    @property
    def mean(self) -> tuple[float, ...] | None:
        """One number a channel of the images, in units of the full scale; None is 0."""

    @property
    def std(self) -> tuple[float, ...] | None:
        """Likewise; None is 1."""

    @property
    def dtype(self) -> str:
        """Of the result: float32, float16 or bfloat16."""

    @property
    def layout(self) -> Layout:
        """Of the result."""

    @property
    def channels(self) -> int | None:
        """Of the result; None for those of the images."""

    @property
    def brightness(self) -> float:
        """How far the factor may be from 1; 0 for images of unchanged brightness."""

    @property
    def contrast(self) -> float:
        """Likewise."""

    @property
    def saturation(self) -> float:
        """Likewise."""

    @property
    def hue(self) -> float:
        """How far the hue may be turned; 0 for not at all."""


def augment(batch: Images | Array, parameters: Array, description: Description, *, out: Array | None = None) -> Array:
    """Makes a batch of images of different sizes.

    Each image's crop is resampled to the result's size by a triangle as wide as a pixel of the coarser of both grids
    (bilinear; with antialias where the image gets smaller), mirrored, jittered in the order brightness, contrast,
    saturation, hue, scaled to 0 to 1, less the mean, divided by the standard deviation, and rounded to the dtype, once.
    Before that it differs by at most one of 255 levels from Pillow's `resize(size, BILINEAR, box)`. On CUDA that is one
    launch on the current stream; with jitter of the contrast two, since each image's mean must be known before.

    Args:
        batch: an `ImageBatch`, or uint8 (n, height, width, c), C-contiguous; c is 1, 3 or 4. Borrowed. The pixels
            decide on the device; offsets and sizes may be NumPy arrays in any case.
        parameters: float32 (n, 9), NumPy or on the batch's device: a row for each image, see `PARAMETERS`. Borrowed.
            What is on the host is checked and goes to the device in one copy. What is on the device is taken as it is:
            of a crop that is not inside of its image NaN comes, and jitter that the description excludes is left out.
        description: a `flcuda.data.Augment`.
        out: (n, channels, height, width) of the description's dtype and layout; borrowed, written.

    Returns:
        `out`, or a new array, owned by the caller.

    Raises:
        TypeError: an array of another dtype, or no array.
        ValueError: an array of another shape or layout or on another device; an image outside of the pixels; a crop
            that is not inside of its image, a factor that is negative or not finite, a hue beyond half a turn, a flip
            that is neither 0 nor 1, jitter that the description excludes, or that of images with 4 channels; mean or
            std of other lengths than channels; fewer channels in the result than in the images.
        FlcudaError: a CUDA graph is being captured, and offsets, sizes or parameters are on the host.
    """
    pixels, offsets, sizes, channels = _parts(batch)
    count = len(sizes)
    cuda = on_cuda(pixels=pixels)
    _check_table("offsets", offsets, np.int64, (count,), pixels)
    _check_table("sizes", sizes, np.int32, (count, 2), pixels)
    _check_table("parameters", parameters, np.float32, (count, len(PARAMETERS)), pixels)
    if channels not in CHANNELS:
        raise ValueError(f"batch: images must have 1, 3 or 4 channels, not {channels}")
    mean, std = _statistics(description, channels)
    result_channels = channels if description.channels is None else description.channels
    if result_channels < channels:
        raise ValueError(f"description: channels {result_channels} are fewer than the images' {channels}")
    if channels == 4 and jitters(description):
        raise ValueError("description: the colours of images with 4 channels cannot be jittered")
    if not is_cuda(sizes):
        _check_images(offsets, sizes, channels, pixels)
    if not is_cuda(parameters):
        _check_parameters(parameters, None if is_cuda(sizes) else sizes, description)
    shape = (count, result_channels, *description.shape)
    dtype = numpy_dtype(description.dtype)
    if out is None:
        out = (
            new(shape, dtype, description.layout)
            if cuda
            else empty(shape, dtype, device=Device("cpu"), layout=description.layout)
        )
    else:
        _check_out(out, shape, dtype, description.layout, pixels)
    if not cuda:
        images = [
            pixels[offset : offset + height * width * channels].reshape(height, width, channels)
            for offset, (height, width) in zip(offsets.tolist(), sizes.tolist(), strict=True)
        ]
        reference.augment(images, parameters, mean, std, out)
        return out
    _launch(out, pixels, _on_device(offsets, sizes, parameters), channels, mean, std, description)
    return out


def jitters(description: Description) -> bool:
    """Says whether any colour may change."""
    return any((description.brightness, description.contrast, description.saturation, description.hue))


def launch_shape(count: int, height: int, width: int) -> tuple[int, tuple[int, int], int, int, int]:
    """How the kernels are launched for a result of a size.

    Args:
        count: images.
        height: of the result.
        width: of the result.

    Returns:
        Blocks; threads of a block, across and down; columns of a tile; tiles across; bands of `_LINES` rows for each
        thread down.

    Raises:
        ValueError: more blocks than a launch may have.
    """
    even_tiles = -(-width // _THREADS)
    tile_width = -(-width // (even_tiles * _PACKED)) * _PACKED
    column_tiles = -(-width // tile_width)
    across = -(-tile_width // 32) * 32
    down = min(_THREADS // across, -(-height // _LINES))
    bands = -(-height // (down * _LINES))
    blocks = count * bands * column_tiles
    if blocks > _INT_MAX:
        raise ValueError(f"batch: {count} images of {height}x{width} are too many for one launch")
    return blocks, (across, down), tile_width, column_tiles, bands


def arguments(
    out: Array, mean: tuple[float, ...], std: tuple[float, ...], tile_width: int, column_tiles: int, bands: int
) -> list[np.generic]:
    """What the kernels take behind their arrays, each of the kernel's own type."""
    n_stride, c_stride, h_stride, w_stride = (step // out.itemsize for step in out.strides)
    pixel_bytes = out.shape[1] * out.itemsize
    address = out.data.ptr if is_cuda(out) else out.ctypes.data
    # Channels are innermost, and this many pixels are whole vectors of this many bytes.
    three = len(mean) == out.shape[1] == 3 and out.itemsize == 2 and out.shape[3] % _PACKED == 0
    vector_bytes = 8 if three else pixel_bytes
    whole = (three or pixel_bytes in (8, 16)) and address % vector_bytes == 0 and w_stride == out.shape[1]
    whole = whole and (c_stride == 1 or out.shape[1] == 1)
    whole = whole and all(step * out.itemsize % vector_bytes == 0 for step in (n_stride, h_stride))
    scale = [1.0 / (255.0 * value) for value in std]
    shift = [-m / s for m, s in zip(mean, std, strict=True)]
    padding = [0.0] * (4 - len(mean))
    return [
        *(np.int32(value) for value in (*out.shape[2:], tile_width, column_tiles, bands)),
        *(np.int64(step) for step in (n_stride, c_stride, h_stride, w_stride)),
        np.int32(out.shape[1]),
        np.int32(pixel_bytes if whole else 0),
        *(np.float32(value) for value in (*scale, *padding, *shift, *padding)),
    ]


def _launch(
    out: Array,
    pixels: Array,
    tables: tuple[Array, Array, Array],
    channels: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    description: Description,
) -> None:
    count, _, height, width = out.shape
    blocks, block, tile_width, column_tiles, bands = launch_shape(count, height, width)
    numbers = arguments(out, mean, std, tile_width, column_tiles, bands)
    kind = SUFFIXES[out.dtype]
    partial: Array = None
    if description.contrast:
        partial = new((count, bands * column_tiles), np.float32)
        launch_blocks(
            "augment", f"augment_means_{channels}", (blocks, 1), block, None, partial, pixels, *tables, *numbers
        )
    word = f"jitter_{kind}" if jitters(description) else kind
    launch_blocks("augment", f"augment_{word}_{channels}", (blocks, 1), block, out, partial, pixels, *tables, *numbers)


def _parts(batch: Any) -> tuple[Array, Array, Array, int]:
    """Pixels, offsets, sizes and channels of a batch."""
    if not hasattr(batch, "pixels"):
        device_of(batch)  # raises for what is no array
        require_dtype("batch", batch, np.uint8)
        if batch.ndim != 4:
            raise ValueError(f"batch: expected (n, height, width, channels), got shape {batch.shape}")
        require_dense("batch", batch)
        count, height, width, channels = batch.shape
        offsets = np.arange(count, dtype=np.int64) * (height * width * channels)
        sizes = np.empty((count, 2), np.int32)
        sizes[:] = height, width
        return batch.reshape(-1), offsets, sizes, channels
    require_dtype("batch.pixels", batch.pixels, np.uint8)
    if batch.pixels.ndim != 1:
        raise ValueError(f"batch.pixels: expected one dimension, got shape {batch.pixels.shape}")
    require_dense("batch.pixels", batch.pixels)
    return batch.pixels, batch.offsets, batch.sizes, batch.channels


def _check_table(name: str, a: Array, dtype: type, shape: tuple[int, ...], pixels: Array) -> None:
    require_dtype(name, a, dtype)
    require_shape(name, a, shape)
    require_dense(name, a)
    if is_cuda(a) and (not is_cuda(pixels) or device_of(a) != device_of(pixels)):
        raise ValueError(f"{name} is on {device_of(a)} and the images are on {device_of(pixels)}")


def _check_images(offsets: Array, sizes: Array, channels: int, pixels: Array) -> None:
    if is_cuda(offsets):
        return
    if (sizes < 1).any():
        i = int(np.flatnonzero((sizes < 1).any(axis=1))[0])
        raise ValueError(f"sizes: image {i} is {sizes[i, 0]}x{sizes[i, 1]}")
    nbytes = sizes[:, 0].astype(np.int64) * sizes[:, 1] * channels
    outside = (offsets < 0) | (offsets + nbytes > len(pixels))
    if outside.any():
        i = int(np.flatnonzero(outside)[0])
        raise ValueError(
            f"offsets: image {i} of {sizes[i, 0]}x{sizes[i, 1]} at byte {offsets[i]} is outside of {len(pixels)} bytes"
        )
    if (sizes[:, 1].astype(np.int64) * channels > _INT_MAX).any():
        raise ValueError(f"sizes: an image of {sizes[:, 1].max()} columns is too wide")


def _check_parameters(parameters: Array, sizes: Array | None, description: Description) -> None:
    def require(valid: Array, message: str) -> None:
        if not valid.all():
            i = int(np.flatnonzero(~valid)[0])
            row = dict(zip(PARAMETERS, parameters[i].tolist(), strict=True))
            image = "" if sizes is None else f" of {sizes[i, 0]}x{sizes[i, 1]}"
            raise ValueError(f"parameters: {message}, not so for image {i}{image}: {row}")

    require(np.isfinite(parameters).all(axis=1), "all must be finite")
    require(np.isin(parameters[:, _FLIP], (0, 1)), "flip must be 0 or 1")
    factors = parameters[:, _BRIGHTNESS : _SATURATION + 1]
    require((factors >= 0).all(axis=1), "brightness, contrast and saturation must not be negative")
    require(np.abs(parameters[:, _HUE]) <= 0.5, "hue must be from -0.5 to 0.5")
    for column, unchanged in enumerate(_UNCHANGED, _BRIGHTNESS):
        name = PARAMETERS[column]
        if not getattr(description, name):
            require(parameters[:, column] == unchanged, f"{name} must be {unchanged}, which the description says")
    require((parameters[:, [_HEIGHT, _WIDTH]] > 0).all(axis=1), "the crop must have a height and a width")
    if sizes is not None:
        sides = sizes.astype(np.float64)
        start = parameters[:, [_TOP, _LEFT]].astype(np.float64)
        end = start + parameters[:, [_HEIGHT, _WIDTH]]
        inside = (start >= -_ROUNDING * sides) & (end <= sides * (1 + _ROUNDING))
        require(inside.all(axis=1), "the crop must be inside of the image")


def _check_out(out: Array, shape: tuple[int, ...], dtype: np.dtype[Any], layout: Layout, pixels: Array) -> None:
    require_dtype("out", out, dtype)
    require_shape("out", out, shape)
    if device_of(out) != device_of(pixels):
        raise ValueError(f"out is on {device_of(out)} and the images are on {device_of(pixels)}")
    if out.size and memory_layout(out) != layout and not _both_layouts(out):
        raise ValueError(f"out: expected the layout {layout}, got strides {out.strides} for shape {out.shape}")


def _both_layouts(a: Array) -> bool:
    """Whether a contiguous array is in both layouts, as with one channel."""
    return memory_layout(a) == "nchw" and a.transpose(0, 2, 3, 1).flags.c_contiguous


def _statistics(description: Description, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    found = []
    for name, unset in (("mean", 0.0), ("std", 1.0)):
        values = getattr(description, name)
        if values is None:
            values = (unset,) * channels
        if len(values) != channels:
            raise ValueError(f"description: {name} {values} must have one number for each of {channels} channels")
        found.append(tuple(float(value) for value in values))
    return found[0], found[1]


def _on_device(offsets: Array, sizes: Array, parameters: Array) -> tuple[Array, Array, Array]:
    """The three tables on the current device; those of the host in one copy."""
    tables = [offsets, sizes, parameters]
    on_host = [place for place, table in enumerate(tables) if not is_cuda(table)]
    if not on_host:
        return offsets, sizes, parameters
    if is_capturing():
        names = ", ".join(("offsets", "sizes", "parameters")[place] for place in on_host)
        raise FlcudaError(f"a CUDA graph is being captured, and {names} of the images to augment are on the host")
    # int64 comes first, so that each is aligned.
    packed = cupy().asarray(np.concatenate([tables[place].reshape(-1).view(np.uint8) for place in on_host]))
    start = 0
    for place in on_host:
        table = tables[place]
        tables[place] = packed[start : start + table.nbytes].view(table.dtype).reshape(table.shape)
        start += table.nbytes
    return tables[0], tables[1], tables[2]
