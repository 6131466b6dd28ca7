"""Changes made to a batch of images on their way into training, with counter-based random numbers.

A transform is called with a batch and its `Draws`. The random numbers of a sample depend on (seed, epoch, index of the
sample) alone, so a sample is changed in the same way whatever the batch size, the order or the number of workers.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from flcuda import rng
from flcuda.device import is_cuda
from flcuda.ops import augment as ops

# Marks the counters of this module: the same seed also draws initial values and dropout masks.
_COUNTER_TAG = 0xDA7A0000
# Streams of one transform: composed ones take the numbers between, so many in a row.
_STREAMS_APART = 16
# Those that there is no room for between have streams that no field reaches, which are 256 apart for at most 256.
_BLOCK = 1 << 16
_BLOCKS = 16
# Of a random part of an image, as in torchvision.
_ATTEMPTS = 10


@dataclass(frozen=True)
class Draws:
    """The random numbers of the samples of one batch.

    Args:
        seed: an integer of at most 64 bits.
        epoch: counted from 0; one for all samples, or int64 (N,), each sample's own.
        indices: int64 (N,), each sample's place in its data set.
        stream: which of the independent streams of each sample to draw from, 0 to 2**20 - 1.
    """

    seed: int
    epoch: int | NDArray[np.int64]
    indices: NDArray[np.int64]
    stream: int = 0

    def uniform(self) -> NDArray[np.float64]:
        """Returns float64 (N, 4) in [0, 1): four numbers a sample, the same at every call."""
        numbers: NDArray[np.float64] = self.uniforms(1)[0]
        return numbers

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """Returns float64 (count, N, 4): `uniform` of this stream and of others, each 16 after the one before.

        At once: for a batch it takes hardly longer to draw from several streams than from one.
        """
        counters = np.empty((count, len(self.indices), 4), np.uint32)
        indices = np.asarray(self.indices).astype(np.uint64)
        counters[..., 0] = indices & np.uint64(0xFFFFFFFF)
        counters[..., 1] = indices >> np.uint64(32)
        counters[..., 2] = self.epoch & 0xFFFFFFFF
        streams = _COUNTER_TAG + self.stream + _STREAMS_APART * np.arange(count)
        counters[..., 3] = streams.astype(np.uint32)[:, None]
        words = rng.philox4x32(counters.reshape(-1, 4), rng.seed_key(self.seed))
        return np.asarray(words, np.float64).reshape(counters.shape) * 2.0**-32

    def with_stream(self, stream: int) -> "Draws":
        """Returns the same samples' numbers of another stream."""
        return replace(self, stream=stream)

    def take(self, rows: NDArray[np.int64]) -> "Draws":
        """Returns the numbers of some of the samples: `rows` are their places among them."""
        epoch = self.epoch[rows] if isinstance(self.epoch, np.ndarray) else self.epoch
        return replace(self, epoch=epoch, indices=np.asarray(self.indices)[rows])


class Transform(Protocol):
    """A change of a batch: `transform(batch, draws) -> batch`; it never writes into its argument."""

    def __call__(self, batch: NDArray[Any], draws: Draws) -> NDArray[Any]:
        """Returns the changed batch."""
        ...


@dataclass(frozen=True)
class PadCrop:
    """Pads with zeros on every side and cuts a window of the first size out at a random place.

    Args:
        padding: pixels on every side.
    """

    padding: int

    def __call__(self, batch: NDArray[Any], draws: Draws) -> NDArray[Any]:
        """Returns images like batch, (N, C, H, W), each shifted by at most `padding` pixels up, down and sideways."""
        height, width = batch.shape[2:]
        edge = (self.padding, self.padding)
        padded = np.pad(batch, ((0, 0), (0, 0), edge, edge))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
        places = np.floor(draws.uniform()[:, :2] * (2 * self.padding + 1)).astype(np.int64)
        # Two advanced indices around a slice put their dimension first: (N, C, H, W) again, and a copy.
        return np.ascontiguousarray(windows[np.arange(len(batch)), :, places[:, 0], places[:, 1]])


@dataclass(frozen=True)
class Flip:
    """Mirrors an image left to right with the given probability."""

    probability: float = 0.5

    def __call__(self, batch: NDArray[Any], draws: Draws) -> NDArray[Any]:
        """Returns images like batch, (N, C, H, W), some of them mirrored."""
        chosen = draws.uniform()[:, 0] < self.probability
        result = batch.copy()
        result[chosen] = batch[chosen, :, :, ::-1]
        return result


class Normalize:
    """Turns uint8 images into float32: x / 255, less the mean, divided by the standard deviation of each channel.

    Args:
        mean: one number a channel, in units of the full scale (1.0 is 255).
        std: likewise.

    Raises:
        ValueError: different lengths, or a std that is not positive.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        if len(mean) != len(std) or not len(mean):
            raise ValueError(f"mean and std must have one number a channel each, not {len(mean)} and {len(std)}")
        if not all(value > 0 for value in std):
            raise ValueError(f"std must be positive, not {tuple(std)}")
        self.mean = tuple(float(value) for value in mean)
        self.std = tuple(float(value) for value in std)
        # One multiplication and one addition an element.
        self._scale = (1.0 / (255.0 * np.array(self.std))).astype(np.float32).reshape(-1, 1, 1)
        self._shift = (-np.array(self.mean) / np.array(self.std)).astype(np.float32).reshape(-1, 1, 1)

    def __call__(self, batch: NDArray[Any], draws: Draws) -> NDArray[Any]:  # noqa: ARG002 - a Transform
        """Returns float32 (N, C, H, W) from uint8 (N, C, H, W)."""
        if batch.dtype != np.uint8:
            raise TypeError(f"batch must be uint8, not {batch.dtype}")
        if batch.ndim != 4 or batch.shape[1] != len(self.mean):
            raise ValueError(f"batch must be (N, {len(self.mean)}, H, W), not {batch.shape}")
        result = batch * self._scale
        result += self._shift
        return result


@dataclass(frozen=True)
class Augment:
    """Images of different sizes to a batch of one size: crop, resample, flip, jitter, normalize, cast.

    All at once, on the device of the images, and the same numbers (but for rounding) on both; `flcuda.ops.augment` says
    how. What is random is drawn on the host from (seed, epoch, number of the sample) alone.

    Args:
        size: height and width of the result, or the side of a square.
        crop: "random-resized": a part of a share `scale` of the image's area and an aspect ratio `ratio`, as
            torchvision's RandomResizedCrop. "resize-then-crop": the shorter side becomes `sides` pixels, one of them at
            random, and a window of `size` is cut out at a random place. "centre": the same with one side and the window
            in the middle.
        scale: least and largest share of the area, above 0 and at most 1; of "random-resized".
        ratio: least and largest width by height, above 0; the logarithm is drawn evenly. Of "random-resized".
        sides: pixels of the shorter side, a number or the least and the largest; at least the larger of `size`. None is
            8/7 of that, and for "resize-then-crop" up to 15/7: 256 to 480 for 224.
        flip: probability of being mirrored left to right.
        brightness: the factor is drawn from 1 - brightness (at least 0) to 1 + brightness; 0 for none.
        contrast: likewise. It costs a second launch: the mean of each image must be known first.
        saturation: likewise; nothing to grey images.
        hue: the shift is drawn from -hue to hue turns, at most 0.5; nothing to grey images.
        mean: one number a channel of the images, in units of the full scale (1.0 is 255); None for 0.
        std: likewise; None for 1.
        dtype: of the result: "float32", "float16" or "bfloat16".
        layout: of the result in memory, "nchw" or "nhwc"; its shape is (N, channels, H, W) in both.
        channels: of the result; those that the images do not have are zeros. None for those of the images.

    Raises:
        TypeError: an argument is of another kind; names it.
        ValueError: an argument is out of range; names it.
    """

    size: int | tuple[int, int]
    crop: Literal["random-resized", "resize-then-crop", "centre"] = "random-resized"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    sides: int | tuple[int, int] | None = None
    flip: float = 0.5
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    dtype: str = "float32"
    layout: Literal["nchw", "nhwc"] = "nchw"
    channels: int | None = None

    def __post_init__(self) -> None:
        self._settle("size", _whole, "one whole number or two", (1, 2))
        self._settle("sides", _whole, "one whole number or two", (1, 2))
        self._settle("scale", _real, "two numbers, the least and the largest", (2,))
        self._settle("ratio", _real, "two numbers, the least and the largest", (2,))
        for name in ("flip", "brightness", "contrast", "saturation", "hue"):
            self._settle(name, _real, "a number", (1,))
        for name in ("mean", "std"):
            self._settle(name, _real, "a sequence of numbers, one a channel", None)
        self._settle("channels", _whole, "a whole number", (1,))
        self._check()

    def _settle(self, name: str, convert: Callable[[Any], Any], kinds: str, lengths: tuple[int, ...] | None) -> None:
        """Makes an argument Python's own numbers, so that equal ones are equal; of None for lengths a sequence."""
        value = getattr(self, name)
        if value is None and name in ("sides", "mean", "std", "channels"):
            return
        try:
            if lengths is not None and 1 in lengths and not np.ndim(value):
                settled = convert(value)
            elif lengths == (1,) or isinstance(value, str | bytes):
                raise TypeError
            else:
                settled = tuple(convert(item) for item in value)
        except TypeError:
            raise TypeError(f"{name} must be {kinds}, not {value!r}") from None
        if lengths is not None and isinstance(settled, tuple) and len(settled) not in lengths:
            raise ValueError(f"{name} must be {kinds}, not {value!r}")
        object.__setattr__(self, name, settled)

    def _check(self) -> None:
        if len(self.shape) != 2 or min(self.shape) < 1:
            raise ValueError(f"size must be positive, one number or two, not {self.size}")
        if self.crop not in ("random-resized", "resize-then-crop", "centre"):
            raise ValueError(f"crop must be 'random-resized', 'resize-then-crop' or 'centre', not {self.crop!r}")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale must rise from above 0 to at most 1, not {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1] < np.inf:
            raise ValueError(f"ratio must rise from above 0, not {self.ratio}")
        if self.crop == "random-resized":
            if self.sides is not None:
                raise ValueError(f"sides must be None for crop 'random-resized', not {self.sides}")
        else:
            low, high = self.shorter_sides
            if not max(self.shape) <= low <= high:
                raise ValueError(
                    f"sides must rise from at least {max(self.shape)}, the larger of size, not {self.sides}"
                )
            if self.crop == "centre" and low != high:
                raise ValueError(f"sides must be one number for crop 'centre', not {self.sides}")
        for name, most in (("flip", 1), ("brightness", np.inf), ("contrast", np.inf), ("saturation", np.inf)):
            if not 0 <= getattr(self, name) <= most or getattr(self, name) == np.inf:
                raise ValueError(f"{name} must be from 0{' to 1' if most == 1 else ' on'}, not {getattr(self, name)}")
        if not 0 <= self.hue <= 0.5:
            raise ValueError(f"hue must be from 0 to 0.5, not {self.hue}")
        if self.std is not None and not all(0 < value < np.inf for value in self.std):
            raise ValueError(f"std must be positive, not {self.std}")
        if self.mean is not None and not np.isfinite(self.mean).all():
            raise ValueError(f"mean must be finite, not {self.mean}")
        if self.mean is not None and self.std is not None and len(self.mean) != len(self.std):
            raise ValueError(f"mean and std must have one number a channel each, not {self.mean} and {self.std}")
        if self.dtype not in ops.DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(ops.DTYPES)}, not {self.dtype!r}")
        if self.layout not in ("nchw", "nhwc"):
            raise ValueError(f"layout must be 'nchw' or 'nhwc', not {self.layout!r}")
        if self.channels is not None and self.channels < 1:
            raise ValueError(f"channels must be at least 1, not {self.channels}")

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the result."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    @property
    def shorter_sides(self) -> tuple[int, int]:
        """The least and the largest shorter side that an image is resized to, where it is."""
        if self.sides is None:
            least = round(max(self.shape) * 8 / 7)
            return least, round(max(self.shape) * 15 / 7) if self.crop == "resize-then-crop" else least
        return (self.sides, self.sides) if isinstance(self.sides, int) else self.sides

    def __call__(self, batch: Any, draws: Draws) -> Any:
        """Draws what is random and makes the batch.

        Args:
            batch: an `ImageBatch`, or uint8 (N, H, W, c); c is 1, 3 or 4. NumPy or CuPy; borrowed. CuPy sizes are read
                first, which waits for the current stream: take `parameters` of the batch on the host, then `apply`, to
                be spared that.
            draws: of the N samples.

        Returns:
            (N, channels, H, W) of the dtype and the layout, on the images' device; owned by the caller.

        Raises:
            TypeError, ValueError: as `flcuda.ops.augment.augment`; or `draws` is of another number of samples.
        """
        return self.apply(batch, self.parameters(batch, draws))

    def apply(self, batch: Any, parameters: Any, *, out: Any = None) -> Any:
        """Makes the batch by a table of parameters; waits for nothing.

        Args:
            batch: as when called.
            parameters: as from `parameters`, or on the device.
            out: where to write the result; None for a new array.

        Returns:
            As when called; `out` when given.
        """
        return ops.augment(batch, parameters, self, out=out)

    def parameters(self, batch: Any, draws: Draws) -> NDArray[np.float32]:
        """Draws what is random.

        Args:
            batch: as when called, or the sizes of its images alone: (N, 2), height and width.
            draws: of the N samples. Numbers are taken of twelve of their streams, 16 apart from one another.

        Returns:
            float32 (N, 9), NumPy; the columns are `flcuda.ops.augment.PARAMETERS`.

        Raises:
            ValueError: sizes that are not positive, another shape, or `draws` is of another number of samples.
        """
        sizes = _sizes(batch)
        if (sizes < 1).any():
            raise ValueError(f"batch must have images with pixels, not of the sizes {sizes.tolist()}")
        if len(draws.indices) != len(sizes):
            raise ValueError(f"draws are of {len(draws.indices)} samples, and there are {len(sizes)} images")
        result = np.empty((len(sizes), len(ops.PARAMETERS)), np.float32)
        is_part = self.crop == "random-resized"
        numbers = draws.uniforms(2 + (_ATTEMPTS if is_part else 0))
        places, colours = numbers[:2]
        result[:, :4] = self._part(sizes, numbers[2:]) if is_part else self._window(sizes, places)
        result[:, 4] = places[:, 3] < self.flip
        for column, reach in enumerate((self.brightness, self.contrast, self.saturation)):
            low = max(0.0, 1.0 - reach)
            result[:, 5 + column] = low + colours[:, column] * (1.0 + reach - low)
        result[:, 8] = (2.0 * colours[:, 3] - 1.0) * self.hue
        return result

    def _window(self, sizes: NDArray[np.int32], places: NDArray[np.float64]) -> NDArray[np.float64]:
        """Top, left, height and width, in pixels of the image, of a window of the resized image."""
        low, high = self.shorter_sides
        sides = low + np.floor(places[:, :1] * (high - low + 1))
        resized = np.maximum(sides, np.rint(sizes * (sides / sizes.min(axis=1, keepdims=True))))
        room = resized - self.shape
        # The first number is the side, then across, then down.
        start = np.floor(room / 2 if self.crop == "centre" else places[:, [2, 1]] * (room + 1))
        window = np.concatenate([start, np.broadcast_to(self.shape, start.shape)], axis=1)
        return np.asarray(window * np.tile(sizes / resized, 2))

    def _part(self, sizes: NDArray[np.int32], numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """Top, left, height and width of a random part: the first of the attempts that fits, else most of the middle.

        Args:
            sizes: (N, 2), height and width.
            numbers: (attempts, N, 4).
        """
        heights, widths = sizes.astype(np.float64).T
        least, largest = self.ratio
        # The middle: whole in one direction, and in the other as far as the ratios allow.
        narrow, broad = widths / heights < least, widths / heights > largest
        height = np.where(narrow, np.clip(np.rint(widths / least), 1, heights), heights)
        width = np.where(broad, np.clip(np.rint(heights * largest), 1, widths), widths)
        top, left = np.floor((heights - height) / 2), np.floor((widths - width) / 2)
        result = np.stack([top, left, height, width], axis=1)
        area = heights * widths * (self.scale[0] + numbers[..., 0] * np.ptp(self.scale))
        low, high = np.log(self.ratio)
        ratio = np.exp(low + numbers[..., 1] * (high - low))
        part_heights, part_widths = np.rint(np.sqrt(area / ratio)), np.rint(np.sqrt(area * ratio))
        fits = (part_heights >= 1) & (part_heights <= heights) & (part_widths >= 1) & (part_widths <= widths)
        found = np.flatnonzero(fits.any(axis=0))
        first = fits.argmax(axis=0)[found]
        part = np.stack([part_heights[first, found], part_widths[first, found]], axis=1)
        result[found, :2] = np.floor(numbers[first, found, 2:] * (sizes[found] - part + 1))
        result[found, 2:] = part
        return result


class Compose:
    """Applies transforms in order, each with a stream of random numbers of its own.

    The streams are numbered as if composed ones among them stood there one by one.

    Args:
        *transforms: at most 256, with those that composed ones are made of.

    Raises:
        ValueError: too many.
    """

    def __init__(self, *transforms: Transform) -> None:
        self.transforms = transforms
        count = len(self._flat())
        if count > _BLOCKS * _STREAMS_APART:
            raise ValueError(f"transforms must be at most {_BLOCKS * _STREAMS_APART}, not {count}")

    def __call__(self, batch: NDArray[Any], draws: Draws) -> NDArray[Any]:
        """Returns the batch after all transforms."""
        for place, transform in enumerate(self._flat()):
            block, place_in_block = divmod(place, _STREAMS_APART)
            batch = transform(batch, draws.with_stream(draws.stream + block * _BLOCK + place_in_block))
        return batch

    def _flat(self) -> list[Transform]:
        result: list[Transform] = []
        for transform in self.transforms:
            # Not of one that calls them in a way of its own.
            if isinstance(transform, Compose) and type(transform).__call__ is Compose.__call__:
                result += transform._flat()
            else:
                result.append(transform)
        return result


def _whole(value: Any) -> int:
    if isinstance(value, bool | np.bool_):
        raise TypeError
    return operator.index(value)


def _real(value: Any) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise TypeError
    return float(value)


def _sizes(batch: Any) -> NDArray[np.int32]:
    """Heights and widths of the images of a batch, on the host."""
    sizes: Any = getattr(batch, "sizes", batch)
    shape = getattr(sizes, "shape", None)
    if shape is None or not (len(shape) == 4 or (len(shape) == 2 and shape[1] == 2)):
        kind = type(batch).__name__ if shape is None else shape
        raise ValueError(f"batch must be an ImageBatch, (N, H, W, channels), or sizes (N, 2), not {kind}")
    if len(shape) == 4:
        return np.tile(np.array(shape[1:3], np.int32), (shape[0], 1))
    return np.asarray(sizes.get() if is_cuda(sizes) else sizes)


def channel_statistics(images: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and standard deviation of each channel of uint8 (N, C, H, W), in units of the full scale.

    A channel that never changes gets the standard deviation 1, so that it can be divided by.
    """
    mean = images.mean(axis=(0, 2, 3), dtype=np.float64) / 255.0
    std = images.std(axis=(0, 2, 3), dtype=np.float64) / 255.0
    std = np.where(std > 0, std, 1.0)
    return tuple(mean.tolist()), tuple(std.tolist())
