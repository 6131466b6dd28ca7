"""Data sets: numbered samples of any number of fields, the batches made of them, and the ones known by name.

A data set is anything with a length and `dataset[i] -> (field, field, ...)`; one of PyTorch's map style is one. It may
also have `batch(indices, epoch) -> (stacked field, ...)`, which makes a whole batch at once.
"""

import gzip
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flcuda import rng
from flcuda.data.transforms import (
    Compose,
    Draws,
    Flip,
    Normalize,
    PadCrop,
    Transform,
    channel_statistics,
    seed_key,
)
from flcuda.errors import FlcudaError

FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")
FASHION_MNIST_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
LAST_BATCH_POLICIES = ("include-last", "skip-last", "divisible-only")

# Marks the counters that the order of an epoch is drawn from.
_ORDER_TAG = 0x04DE4000


class Dataset(Protocol):
    """Numbered samples."""

    def __len__(self) -> int:
        """Returns the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> tuple[Any, ...]:
        """Returns the fields of one sample; IndexError out of range."""
        ...


class TensorDataset:
    """Fields held as arrays of one length: sample i is `(fields[0][i], fields[1][i], ...)`.

    Args:
        *fields: NumPy arrays with at least one dimension; borrowed, not copied.

    Raises:
        TypeError: a field is no NumPy array.
        ValueError: no field, or different lengths.
    """

    def __init__(self, *fields: NDArray[Any]) -> None:
        if not fields:
            raise ValueError("fields must be at least one array")
        for place, field in enumerate(fields):
            if not isinstance(field, np.ndarray):
                raise TypeError(f"fields[{place}] must be a NumPy array, not {type(field).__name__}")
            if field.ndim == 0:
                raise ValueError(f"fields[{place}] has no dimension to number samples by")
        lengths = [len(field) for field in fields]
        if len(set(lengths)) > 1:
            raise ValueError(f"fields must have one length, not {lengths}")
        self.fields = fields

    def __len__(self) -> int:
        return len(self.fields[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        place = _checked_index(index, len(self))
        return tuple(field[place] for field in self.fields)

    def batch(self, indices: NDArray[np.int64], epoch: int) -> tuple[NDArray[Any], ...]:  # noqa: ARG002
        """Returns the samples of these indices, stacked, as new arrays."""
        return tuple(field[indices] for field in self.fields)


class TransformDataset:
    """A data set whose i-th field goes through the i-th transform; a missing one or None leaves it as it is.

    Args:
        dataset: any data set.
        *transforms: each called with a stacked field and its random numbers.
        seed: of the random numbers.
    """

    def __init__(self, dataset: Dataset, *transforms: Transform | None, seed: int = 0) -> None:
        self.dataset = dataset
        self.transforms = transforms
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        place = _checked_index(index, len(self))
        return tuple(field[0] for field in self.batch(np.array([place], np.int64), 0))

    def batch(self, indices: NDArray[np.int64], epoch: int) -> tuple[NDArray[Any], ...]:
        """Returns the transformed samples of these indices, stacked."""
        fields = list(fetch(self.dataset, indices, epoch))
        for place, transform in enumerate(self.transforms[: len(fields)]):
            if transform is not None:
                # Streams are apart by 256, so a composed transform of one field does not meet the next field's.
                fields[place] = transform(fields[place], Draws(self.seed, epoch, indices, 256 * place))
        return tuple(fields)


@dataclass(frozen=True)
class ImageData:
    """A data set ready for training a classifier.

    Attributes:
        name: how it is called.
        train: samples (float32 image (C, H, W), int64 label), augmented by epoch.
        test: the same, never augmented.
        classes: the names, by label.
        image_shape: (channels, height, width).
        note: how it was split or what else its user should know.
    """

    name: str
    train: Dataset
    test: Dataset
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    note: str = ""


def fetch(dataset: Dataset, indices: NDArray[np.int64], epoch: int = 0) -> tuple[NDArray[Any], ...]:
    """Returns the samples of these indices with each field stacked.

    Args:
        dataset: its own `batch` makes the batch where it has one.
        indices: int64 (N,), N at least 1.
        epoch: which epoch's random changes.

    Raises:
        ValueError: samples with different numbers of fields, or a field whose samples differ in shape.
    """
    whole = getattr(dataset, "batch", None)
    if whole is not None:
        return tuple(whole(indices, epoch))
    samples = [dataset[int(index)] for index in indices]
    count = len(samples[0])
    for index, sample in zip(indices, samples, strict=True):
        if len(sample) != count:
            raise ValueError(f"sample {index} has {len(sample)} fields, sample {indices[0]} has {count}")
    fields = []
    for place in range(count):
        values = [np.asarray(sample[place]) for sample in samples]
        for index, value in zip(indices, values, strict=True):
            if value.shape != values[0].shape:
                message = f"field {place} of sample {index} is {value.shape}, of sample {indices[0]} {values[0].shape}"
                raise ValueError(f"{message}: a batch needs equal shapes")
        fields.append(np.stack(values))
    return tuple(fields)


def epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns a permutation of 0..count-1 that depends on (seed, epoch) alone."""
    counter = np.array([[epoch & 0xFFFFFFFF, 0, 0, _ORDER_TAG]], np.uint32)
    words = rng.philox4x32(counter, seed_key(seed))[0]
    return np.asarray(rng.permutation(int(words[0]) | int(words[1]) << 32, count), np.int64)


def batch_indices(
    count: int, batch_size: int, *, seed: int | None = None, epoch: int = 0, last: str = "include-last"
) -> list[NDArray[np.int64]]:
    """Divides the indices of a data set into batches.

    Args:
        count: number of samples.
        batch_size: samples a batch.
        seed: None keeps the order; a number gives the permutation of (seed, epoch).
        epoch: counted from 0.
        last: "include-last" makes a shorter last batch, "skip-last" leaves it out, "divisible-only" refuses it.

    Returns:
        int64 arrays.

    Raises:
        ValueError: a batch size below 1, an unknown policy, or a count that does not divide under "divisible-only".
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    if last not in LAST_BATCH_POLICIES:
        raise ValueError(f"last must be one of {', '.join(LAST_BATCH_POLICIES)}, not {last!r}")
    if last == "divisible-only" and count % batch_size:
        raise ValueError(f"batch_size {batch_size} does not divide the {count} samples (last='divisible-only')")
    order = np.arange(count, dtype=np.int64) if seed is None else epoch_order(count, seed, epoch)
    stop = count - count % batch_size if last == "skip-last" else count
    return [order[start : min(start + batch_size, stop)] for start in range(0, stop, batch_size)]


def batches(
    dataset: Dataset, batch_size: int, *, seed: int | None = None, epoch: int = 0, last: str = "include-last"
) -> Iterator[tuple[NDArray[Any], ...]]:
    """Iterates over a data set once, in batches of stacked fields; the arguments are those of `batch_indices`."""
    # Checked now, not at the first batch.
    parts = batch_indices(len(dataset), batch_size, seed=seed, epoch=epoch, last=last)
    return (fetch(dataset, part, epoch) for part in parts)


def checked_labels(labels: NDArray[Any], classes: int, name: str = "labels") -> NDArray[np.int64]:
    """Returns labels as int64 (N,) after checking that each is a class.

    Raises:
        TypeError: not integers.
        ValueError: not one-dimensional, or one is outside 0..classes-1; the message says which.
    """
    if labels.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, not {labels.dtype}")
    if labels.ndim != 1:
        raise ValueError(f"{name} must be (N,), not {labels.shape}")
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        value = labels[wrong[0]]
        raise ValueError(f"{name}[{wrong[0]}] is {value}, but there are {classes} classes (0 to {classes - 1})")
    return labels.astype(np.int64, copy=False)


def read_idx(path: Path, ndim: int) -> NDArray[np.uint8]:
    """Reads an idx file of unsigned bytes, plain or compressed by gzip (`.gz`).

    Args:
        path: the file.
        ndim: the dimensions that it must have: 3 for images, 1 for labels.

    Returns:
        uint8 of the shape that its header gives; owned by the caller.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an idx file of unsigned bytes, other dimensions, truncated or too long; names the file.

    Source: http://yann.lecun.com/exdb/mnist, "the IDX file format".
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file: {error}") from error
    if len(content) < 4:
        raise ValueError(f"{path}: truncated: {len(content)} bytes have no room for an idx header")
    magic = content[:4].hex()
    expected = f"000008{ndim:02x}"
    if magic != expected:
        raise ValueError(f"{path}: magic number 0x{magic}, expected 0x{expected} ({ndim}-dimensional unsigned bytes)")
    offset = 4 + 4 * ndim
    if len(content) < offset:
        raise ValueError(f"{path}: truncated: the idx header needs {offset} bytes, the file has {len(content)}")
    shape = struct.unpack(f">{ndim}I", content[4:offset])
    size = 1
    for length in shape:
        size *= length
    found = len(content) - offset
    if found != size:
        kind = "truncated" if found < size else "too long"
        raise ValueError(f"{path}: {kind}: shape {shape} needs {size} bytes of data, the file has {found}")
    return np.frombuffer(content, np.uint8, offset=offset).reshape(shape).copy()


def digits(seed: int = 0) -> ImageData:
    """Returns scikit-learn's handwritten digits: 1797 grey images of 8x8 pixels, 360 of them for the test.

    Args:
        seed: of the augmentation; the split is always the same.

    Raises:
        FlcudaError: scikit-learn is not installed; the message says how to get it.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "sklearn":
            raise
        message = "the digits come with scikit-learn, which is not installed: pip install 'flcuda[demo]'"
        raise FlcudaError(message) from error
    values, labels = load_digits(return_X_y=True)
    # 0..16 becomes 0..240: whole numbers in eight bits.
    images = (np.asarray(values) * 15.0).astype(np.uint8).reshape(-1, 1, 8, 8)
    order = epoch_order(len(images), 0, 0)
    test, train = order[:360], order[360:]
    return image_data(
        "digits",
        (images[train], checked_labels(np.asarray(labels)[train], 10)),
        (images[test], checked_labels(np.asarray(labels)[test], 10)),
        tuple(str(digit) for digit in range(10)),
        augment=(PadCrop(1),),
        seed=seed,
        note=f"{len(test)} of {len(images)} images, drawn once and for all, are the test",
    )


def fashion_mnist(folder: Path | str = FASHION_MNIST_FOLDER, seed: int = 0) -> ImageData:
    """Returns Fashion-MNIST: 60,000 and 10,000 grey images of 28x28 pixels in ten classes.

    Args:
        folder: holds the four idx files, each plain or with `.gz`.
        seed: of the augmentation.

    Raises:
        FileNotFoundError: a file is missing; says what to install.
        ValueError: a file is broken, counts differ, or a label is no class; names the file.
    """
    folder = Path(folder)
    parts = []
    for part in ("train", "t10k"):
        images_file = _idx_file(folder, f"{part}-images-idx3-ubyte")
        labels_file = _idx_file(folder, f"{part}-labels-idx1-ubyte")
        images = read_idx(images_file, 3)
        labels = read_idx(labels_file, 1)
        if len(images) != len(labels):
            raise ValueError(f"{images_file} has {len(images)} images, {labels_file} has {len(labels)} labels")
        if not images.size:
            raise ValueError(f"{images_file}: no images (shape {images.shape})")
        parts.append((images[:, None], checked_labels(labels, len(FASHION_MNIST_CLASSES), f"{labels_file}: labels")))
    train, test = parts
    if train[0].shape[1:] != test[0].shape[1:]:
        raise ValueError(f"{folder}: images of {train[0].shape[2:]} for training, of {test[0].shape[2:]} for the test")
    return image_data("fashion-mnist", train, test, FASHION_MNIST_CLASSES, augment=(PadCrop(2), Flip()), seed=seed)


def synthetic(count: int, image_shape: tuple[int, int, int] = (3, 224, 224), classes: int = 1000) -> ImageData:
    """Returns random images with random labels, for timing: there is nothing to learn.

    Args:
        count: training images; the test has an eighth of it, at least one.
        image_shape: (channels, height, width).
        classes: number of classes.

    Raises:
        ValueError: a count below 1.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, not {count}")
    # Few distinct images, served again and again: the memory stays small and nothing is drawn while timing.
    pool = min(count, 128)
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (pool, *image_shape), np.uint8)
    labels = generator.integers(0, classes, count, np.int64)
    normalize = Normalize(*channel_statistics(images))
    sizes = (count, max(1, count // 8))
    train, test = (TransformDataset(_Repeated(images, labels[:size]), normalize) for size in sizes)
    names = tuple(str(label) for label in range(classes))
    note = f"{pool} different images of noise: nothing to learn"
    return ImageData("synthetic", train, test, names, image_shape, note)


def image_data(
    name: str,
    train: tuple[NDArray[np.uint8], NDArray[np.int64]],
    test: tuple[NDArray[np.uint8], NDArray[np.int64]],
    classes: Sequence[str],
    *,
    augment: Sequence[Transform] = (),
    seed: int = 0,
    note: str = "",
) -> ImageData:
    """Makes a data set for training of uint8 images in memory, normalized by the training images' statistics.

    Args:
        name: how it is called.
        train: images uint8 (N, C, H, W) and labels int64 (N,); borrowed.
        test: likewise.
        classes: the names, by label.
        augment: applied to the training images, before they are normalized.
        seed: of the augmentation.
        note: passed on.
    """
    normalize = Normalize(*channel_statistics(train[0]))
    channels, height, width = train[0].shape[1:]
    return ImageData(
        name,
        TransformDataset(TensorDataset(*train), Compose(*augment, normalize), seed=seed),
        TransformDataset(TensorDataset(*test), normalize),
        tuple(classes),
        (channels, height, width),
        note,
    )


class _Repeated:
    """A few images under many labels."""

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        place = _checked_index(index, len(self))
        return self.images[place % len(self.images)], self.labels[place]

    def batch(self, indices: NDArray[np.int64], epoch: int) -> tuple[NDArray[Any], ...]:  # noqa: ARG002
        return self.images[indices % len(self.images)], self.labels[indices]


def _idx_file(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{folder / name}[.gz] is missing: install Debian's package dataset-fashion-mnist (apt install "
        "dataset-fashion-mnist), or give the folder that holds the four idx files: --data fashion-mnist:FOLDER"
    )


def _checked_index(index: int, length: int) -> int:
    if not -length <= index < length:
        raise IndexError(f"index {index} is out of range for {length} samples")
    return index % length
