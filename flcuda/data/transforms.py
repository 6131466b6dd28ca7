"""Changes made to a batch of images on their way into training, with counter-based random numbers.

A transform is called with a batch and its `Draws`. The random numbers of a sample depend on (seed, epoch, index of the
sample) alone, so a sample is changed in the same way whatever the batch size, the order or the number of workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flcuda import rng

# Marks the counters of this module: the same seed also draws initial values and dropout masks.
_COUNTER_TAG = 0xDA7A0000


@dataclass(frozen=True)
class Draws:
    """The random numbers of the samples of one batch.

    Args:
        seed: an integer of at most 64 bits.
        epoch: counted from 0.
        indices: int64 (N,), each sample's place in its data set.
        stream: which of the independent streams of each sample to draw from, 0 to 65535.
    """

    seed: int
    epoch: int
    indices: NDArray[np.int64]
    stream: int = 0

    def uniform(self) -> NDArray[np.float64]:
        """Returns float64 (N, 4) in [0, 1): four numbers a sample, the same at every call."""
        counters = np.empty((len(self.indices), 4), np.uint32)
        indices = np.asarray(self.indices).astype(np.uint64)
        counters[:, 0] = indices & np.uint64(0xFFFFFFFF)
        counters[:, 1] = indices >> np.uint64(32)
        counters[:, 2] = np.uint32(self.epoch & 0xFFFFFFFF)
        counters[:, 3] = np.uint32(_COUNTER_TAG + self.stream)
        words = rng.philox4x32(counters, seed_key(self.seed))
        return np.asarray(words, np.float64) * 2.0**-32

    def with_stream(self, stream: int) -> "Draws":
        """Returns the same samples' numbers of another stream."""
        return replace(self, stream=stream)


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


class Compose:
    """Applies transforms in order, each with a stream of random numbers of its own."""

    def __init__(self, *transforms: Transform) -> None:
        self.transforms = transforms

    def __call__(self, batch: NDArray[Any], draws: Draws) -> NDArray[Any]:
        """Returns the batch after all transforms."""
        for place, transform in enumerate(self.transforms):
            batch = transform(batch, draws.with_stream(draws.stream + place))
        return batch


def channel_statistics(images: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and standard deviation of each channel of uint8 (N, C, H, W), in units of the full scale.

    A channel that never changes gets the standard deviation 1, so that it can be divided by.
    """
    mean = images.mean(axis=(0, 2, 3), dtype=np.float64) / 255.0
    std = images.std(axis=(0, 2, 3), dtype=np.float64) / 255.0
    std = np.where(std > 0, std, 1.0)
    return tuple(mean.tolist()), tuple(std.tolist())


def seed_key(seed: int) -> tuple[int, int]:
    """Returns the Philox key of a seed of at most 64 bits: its low and its high 32 bits."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
