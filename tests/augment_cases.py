"""Random images, crops and descriptions for the tests of the augmentation."""

from typing import Any

import numpy as np

from flcuda import reference
from flcuda.data import Augment, ImageBatch
from flcuda.device import numpy_dtype
from flcuda.ops.augment import PARAMETERS, jitters

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
JITTER = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
# Of levels: what float32 leaves of weights, and of 16-bit results 2^-11 or 2^-8 of the value.
TOLERANCE = {"float32": 0.02, "float16": 0.2, "bfloat16": 1.2}
# More with jitter: brightness, contrast and saturation multiply what float32 leaves, each by at most 1.8.
JITTERED = 0.1


def image(rng: np.random.Generator, height: int, width: int, channels: int) -> Any:
    """Noise, half of it in blocks and with extreme levels: edges of all kinds."""
    pixels = rng.integers(0, 256, (height, width, channels), np.uint8)
    blocks = rng.choice(np.array([0, 7, 128, 255], np.uint8), (-(-height // 4), -(-width // 5), channels))
    large = blocks.repeat(4, axis=0).repeat(5, axis=1)[:height, :width]
    return np.where(rng.random((height, width, 1)) < 0.5, pixels, large)


def images(rng: np.random.Generator, sizes: Any, channels: int) -> ImageBatch:
    return ImageBatch.of([image(rng, height, width, channels) for height, width in sizes])


def table(rng: np.random.Generator, sizes: Any, *, jitter: bool = False) -> Any:
    """Random crops: any of the image's pixels and parts of pixels, the whole image as well; some without a jitter."""
    result = np.zeros((len(sizes), len(PARAMETERS)), np.float32)
    result[:, 5:8] = 1
    for row, size in zip(result, np.asarray(sizes), strict=True):
        share = rng.choice([1.0, rng.uniform(0.02, 1), rng.uniform(0.3, 1)])
        crop = np.maximum(size * share * rng.uniform(0.8, 1, 2), 0.5) if share < 1 else size
        if rng.random() < 0.5:
            crop = np.ceil(crop)
        row[2:4] = crop
        row[:2] = np.floor((size - crop) * rng.random(2) * 64) / 64
        row[4] = rng.integers(2)
        if jitter:
            row[5:8] = np.where(rng.random(3) < 0.2, 1, rng.uniform(0.3, 1.8, 3))
            row[8] = 0 if rng.random() < 0.2 else rng.uniform(-0.5, 0.5)
    return result


def exact(batch: ImageBatch, parameters: Any, description: Augment) -> Any:
    """The result in float32 by NumPy, from the definition."""
    channels = description.channels or batch.channels
    out = np.full((len(batch), channels, *description.shape), np.nan, np.float32)
    mean, std = description.mean or (0,) * batch.channels, description.std or (1,) * batch.channels
    reference.augment([batch.image(i) for i in range(len(batch))], parameters, mean, std, out)
    return out


def assert_like(found: Any, wanted: Any, description: Augment) -> None:
    """Compares in levels."""
    assert found.shape == wanted.shape
    assert found.dtype == numpy_dtype(description.dtype)
    std = description.std or (1.0,)
    levels = TOLERANCE[description.dtype] + (JITTERED if jitters(description) else 0.0)
    tolerance = levels / 255 / min(std)
    np.testing.assert_allclose(found.astype(np.float32), wanted, rtol=0, atol=tolerance)


RANDOM_SIZES = [(37, 53), (1, 1), (120, 9), (64, 64), (5, 200), (33, 32)]
CASES = [
    # size, channels, what else; on a GPU too
    ((24, 31), 3, {}),
    ((7, 13), 1, {"layout": "nhwc"}),
    ((16, 16), 4, {"dtype": "float16", "layout": "nhwc"}),
    ((32, 20), 3, {"dtype": "float16", "layout": "nhwc", "channels": 8, **IMAGENET}),
    ((32, 20), 3, {"dtype": "float16", "layout": "nhwc", "channels": 4, **IMAGENET}),
    ((9, 40), 3, {"dtype": "bfloat16", "channels": 5, **IMAGENET}),
    ((9, 40), 3, {"dtype": "bfloat16", "layout": "nhwc", "channels": 6, **IMAGENET}),
    ((11, 15), 3, {"layout": "nhwc", "channels": 4, **IMAGENET}),
    ((3, 300), 3, {"layout": "nhwc"}),
    ((20, 17), 3, {**JITTER, **IMAGENET}),
    ((20, 17), 3, {"hue": 0.5, "saturation": 1.0, "dtype": "float16", "layout": "nhwc", "channels": 4}),
    ((20, 270), 3, {"contrast": 0.5}),
    ((21, 17), 1, {**JITTER, "dtype": "bfloat16", "channels": 2}),
    ((1, 1), 3, {"dtype": "float16", **JITTER}),
]


def case(rng: np.random.Generator, size: Any, channels: int, options: Any) -> tuple[ImageBatch, Any, Augment]:
    """A batch, a table and a description for one of CASES."""
    description = Augment(size, **options)
    batch = images(rng, RANDOM_SIZES, channels)
    parameters = table(rng, RANDOM_SIZES, jitter=True)
    for column, name in enumerate(("brightness", "contrast", "saturation", "hue"), 5):
        if not getattr(description, name):
            parameters[:, column] = name != "hue"
    return batch, parameters, description
