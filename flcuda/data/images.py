"""Images of different sizes as one batch.

Nothing here imports another module of the package's data sets, so that all of them can use it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flcuda.device import Array, array_module

ALIGNMENT = 16
"""Bytes: every image of a batch begins at a multiple of it, so that a kernel may load it in words of any size."""


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Images of one number of channels and of different sizes, behind one another in one array.

    Each image is uint8 (height, width, channels), C-contiguous, and begins at a multiple of 16 bytes; the gaps between
    images, and the end up to the next multiple of 16, are zeros when `of` made the batch.

    The pixels decide on the device. Of pixels in CuPy, offsets and sizes may still be NumPy arrays, as decoders give
    them: who draws crops by the sizes then need not wait for the device. What CuPy arrays hold is not checked.

    Attributes:
        pixels: uint8 (bytes,), C-contiguous.
        offsets: int64 (n,), where in `pixels` each image begins.
        sizes: int32 (n, 2), height and width.
        channels: of every image.

    Raises:
        TypeError: no arrays, NumPy mixed with CuPy, or other dtypes.
        ValueError: other shapes, or an image that is empty, not aligned or outside of `pixels`.
    """

    pixels: Array
    offsets: Array
    sizes: Array
    channels: int

    def __post_init__(self) -> None:
        array_module(self.pixels)
        places_on_host = array_module(self.offsets, self.sizes) is np
        if not places_on_host:
            # Mixed with pixels in NumPy: an error.
            array_module(self.pixels, self.offsets)
        for name, dtype in (("pixels", np.uint8), ("offsets", np.int64), ("sizes", np.int32)):
            found = getattr(self, name).dtype
            if found != dtype:
                raise TypeError(f"{name} must be {np.dtype(dtype)}, not {found}")
        if self.channels < 1:
            raise ValueError(f"channels must be at least 1, not {self.channels}")
        if self.pixels.ndim != 1 or not self.pixels.flags.c_contiguous:
            raise ValueError(f"pixels must be (bytes,) and contiguous, not {self.pixels.shape}")
        if self.offsets.ndim != 1:
            raise ValueError(f"offsets must be (n,), not {self.offsets.shape}")
        if self.sizes.shape != (len(self.offsets), 2):
            raise ValueError(f"sizes must be ({len(self.offsets)}, 2), not {self.sizes.shape}")
        if places_on_host:
            self._check_places()

    def _check_places(self) -> None:
        areas = self.sizes.astype(np.int64).prod(axis=1)
        ends = self.offsets + areas * self.channels
        wrong = (self.sizes < 1).any(axis=1) | (self.offsets < 0) | (self.offsets % ALIGNMENT != 0)
        places = np.flatnonzero(wrong | (ends > len(self.pixels)))
        if len(places):
            i = places[0]
            height, width = self.sizes[i]
            message = f"image {i} of {height}x{width}x{self.channels} at byte {self.offsets[i]}"
            raise ValueError(f"{message}: must have pixels, begin at a multiple of {ALIGNMENT} and end within pixels")

    @classmethod
    def of(cls, images: Sequence[Array]) -> "ImageBatch":
        """Copies images into a batch.

        Args:
            images: at least one; uint8 (height, width, channels), of one number of channels; all NumPy or all CuPy.

        Returns:
            A batch in memory of its own; for CuPy images on the current device, copied on the current stream, with
            offsets and sizes in NumPy.

        Raises:
            TypeError: one is no array or not uint8, or the kinds are mixed.
            ValueError: no image, one that is not (height, width, channels) or empty, or different channels.
        """
        if not len(images):
            raise ValueError("images must be at least one")
        xp = array_module(*images)
        channels = int(images[0].shape[-1]) if images[0].ndim == 3 else 0
        for i, image in enumerate(images):
            if image.dtype != np.uint8:
                raise TypeError(f"images[{i}] must be uint8, not {image.dtype}")
            if image.ndim != 3 or not image.size:
                raise ValueError(f"images[{i}] must be (height, width, channels) and not empty, not {image.shape}")
            if image.shape[2] != channels:
                raise ValueError(f"images[{i}] has {image.shape[2]} channels, images[0] has {channels}")
        sizes = np.array([image.shape[:2] for image in images], np.int32)
        offsets, total = places_of(sizes, channels)
        pixels = xp.zeros(total, np.uint8)
        for image, offset in zip(images, offsets.tolist(), strict=True):
            pixels[offset : offset + image.size].reshape(image.shape)[...] = image
        return cls(pixels, offsets, sizes, channels)

    def image(self, index: int) -> Array:
        """Returns one image, uint8 (height, width, channels): a view, not a copy.

        Where its place is in a CuPy array it must be read first, which waits for the device.

        Raises:
            IndexError: no such image.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} is out of range for {len(self)} images")
        offset = int(self.offsets[index])
        height, width = self.sizes[index].tolist()
        size = height * width * self.channels
        return self.pixels[offset : offset + size].reshape(height, width, self.channels)

    def images(self) -> list[Array]:
        """Returns all images: views, as `image` does; places in CuPy arrays are read once."""
        on_host = array_module(self.offsets) is np
        offsets, sizes = (a.tolist() if on_host else a.get().tolist() for a in (self.offsets, self.sizes))
        return [
            self.pixels[offset : offset + height * width * self.channels].reshape(height, width, self.channels)
            for offset, (height, width) in zip(offsets, sizes, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """The bytes of the three arrays."""
        return int(self.pixels.nbytes + self.offsets.nbytes + self.sizes.nbytes)

    def __len__(self) -> int:
        """Returns the number of images."""
        return len(self.offsets)


def places_of(sizes: Array, channels: int) -> tuple[Array, int]:
    """Returns where images lie behind one another: int64 offsets (n,) and the bytes of all, for NumPy sizes (n, 2)."""
    areas = np.asarray(sizes).astype(np.int64).prod(axis=1) * channels
    ends = np.cumsum(-(-areas // ALIGNMENT) * ALIGNMENT)
    offsets = np.zeros(len(ends), np.int64)
    offsets[1:] = ends[:-1]
    return offsets, int(ends[-1]) if len(ends) else 0
