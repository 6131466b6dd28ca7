"""Data sets of any number of fields, those made of others, and the ones known by name."""

import gzip
import operator
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flcuda import rng
from flcuda.data.chain import (
    Chain,
    Dataset,
    SampleChain,
    assembled_kept,
    checked_index,
    checked_indices,
    fetch,
    fetch_kept,
    kept_of,
    row,
    sample_numbers,
    sample_of,
    taken,
)
from flcuda.data.transforms import (
    Compose,
    Draws,
    Flip,
    Normalize,
    PadCrop,
    Transform,
    channel_statistics,
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

# Marks the counters that the order of an epoch is drawn from.
_ORDER_TAG = 0x04DE4000


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
        place = checked_index(index, len(self))
        return tuple(field[place] for field in self.fields)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return (self[index] for index in range(len(self)))

    def batch(self, indices: NDArray[np.int64], epoch: int) -> tuple[NDArray[Any], ...]:  # noqa: ARG002
        """Returns the samples of these indices, stacked, as new arrays."""
        places = checked_indices(indices, len(self))
        return tuple(field[places] for field in self.fields)


class TransformDataset(SampleChain):
    """A data set whose i-th field goes through the i-th transform; a missing one or None leaves it as it is.

    Args:
        dataset: any data set of single samples.
        *transforms: each called with a stacked field and its random numbers, which are those of (seed, epoch, number of
            the sample); see `sample_numbers`.
        seed: of the random numbers.

    Raises:
        TypeError: a data set of batches: transform the samples before they are batched.
    """

    def __init__(self, dataset: Dataset, *transforms: Transform | None, seed: int = 0) -> None:
        if isinstance(dataset, Chain) and dataset.serves_batches:
            raise TypeError(f"dataset must have single samples, not the batches of a {type(dataset).__name__}")
        super().__init__(dataset, length=len(dataset))
        self.dataset = dataset
        self.transforms = transforms
        self.seed = rng.checked_seed(seed)

    def sample(self, index: int, epoch: int) -> tuple[Any, ...]:
        """Returns the transformed fields of one sample."""
        places = np.array([index], np.int64)
        # Where it cannot be served, the error of the data set.
        fields = self._changed(fetch(self.dataset, places, epoch), places, epoch)
        return tuple(row(field, 0) for field in fields)

    def batch_kept(self, indices: NDArray[np.int64], epoch: int) -> tuple[tuple[Any, ...], NDArray[np.int64]]:
        """Returns the transformed samples of these indices that are left, stacked, and which they are.

        Raises:
            ValueError: more transforms than fields, or the data set leaves samples out without a word: then the random
                numbers are not those of the rows.
        """
        places = checked_indices(indices, len(self))
        fields, kept = fetch_kept(self.dataset, places, epoch)
        kept = kept_of(fields, kept, len(places))
        return self._changed(fields, places[kept], epoch) if len(kept) else (), kept

    def _changed(self, fields: tuple[Any, ...], places: NDArray[np.int64], epoch: int) -> tuple[Any, ...]:
        """Applies the transforms to samples of these places, which all are there."""
        changed = list(fields)
        numbers = sample_numbers(self.dataset, places, epoch)
        for place, transform in enumerate(self.transforms):
            if transform is None:
                continue
            if place >= len(changed):
                raise ValueError(f"transforms[{place}] has no field: the samples have {len(changed)}")
            # Streams are apart by 256, so a composed transform of one field does not meet the next field's.
            changed[place] = transform(changed[place], Draws(self.seed, epoch, numbers, 256 * place))
        return tuple(changed)


class MergeDataset(SampleChain):
    """The fields of several data sets side by side: sample i has those of sample i of each.

    Args:
        *datasets: any data sets of one length.

    Raises:
        ValueError: no data set, or different lengths.
    """

    def __init__(self, *datasets: Dataset) -> None:
        if not datasets:
            raise ValueError("datasets must be at least one")
        lengths = [len(dataset) for dataset in datasets]
        if len(set(lengths)) > 1:
            raise ValueError(f"datasets must have one length, not {lengths}")
        super().__init__(*datasets, length=lengths[0])
        self.datasets = datasets

    def sample(self, index: int, epoch: int) -> tuple[Any, ...]:
        """Returns the fields of one sample of every data set."""
        return tuple(field for dataset in self.datasets for field in sample_of(dataset, index, epoch))

    def batch_kept(self, indices: NDArray[np.int64], epoch: int) -> tuple[tuple[Any, ...], NDArray[np.int64]]:
        """Returns the fields of every data set, stacked, of the samples that are left in all of them, and which.

        Raises:
            ValueError: a data set leaves samples out without a word: then rows no longer belong together.
        """
        parts = [fetch_kept(dataset, indices, epoch) for dataset in self.datasets]
        rows = [kept_of(fields, kept, len(indices)) for fields, kept in parts]
        common = np.arange(len(indices), dtype=np.int64)
        for kept in rows:
            common = np.intersect1d(common, kept, assume_unique=True)
        if not len(common):
            return (), common
        return tuple(
            field if len(kept) == len(common) else taken(field, np.searchsorted(kept, common))
            for (fields, _), kept in zip(parts, rows, strict=True)
            for field in fields
        ), common


class ConcatDataset(SampleChain):
    """The samples of several data sets, one after another.

    Args:
        *datasets: any data sets, with the same number of fields.

    Raises:
        ValueError: no data set.
    """

    def __init__(self, *datasets: Dataset) -> None:
        if not datasets:
            raise ValueError("datasets must be at least one")
        bounds = np.cumsum([0, *(len(dataset) for dataset in datasets)], dtype=np.int64)
        super().__init__(*datasets, length=int(bounds[-1]))
        self.datasets = datasets
        self._bounds = bounds

    def sample(self, index: int, epoch: int) -> tuple[Any, ...]:
        """Returns the fields of one sample."""
        part = int(np.searchsorted(self._bounds, index, side="right")) - 1
        return sample_of(self.datasets[part], index - int(self._bounds[part]), epoch)

    def batch_kept(self, indices: NDArray[np.int64], epoch: int) -> tuple[tuple[Any, ...], NDArray[np.int64] | None]:
        """Returns the samples of these indices that are left, stacked, and which they are."""
        places = checked_indices(indices, len(self))
        parts = [
            (rows, fetch_kept(self.datasets[part], places[rows] - self._bounds[part], epoch))
            for part, rows in self._parts(places)
        ]
        return assembled_kept(parts, places)

    def numbers(self, indices: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Returns the numbers in the data sets, each counted on from where the one before it ends."""
        result = np.empty_like(indices)
        for part, rows in self._parts(indices):
            start = self._bounds[part]
            result[rows] = start + sample_numbers(self.datasets[part], indices[rows] - start, epoch)
        return result

    def _parts(self, places: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
        """Returns, for each data set that has some of the samples, which it is and where they stand."""
        owners = np.searchsorted(self._bounds, places, side="right") - 1
        return [(int(part), np.flatnonzero(owners == part)) for part in np.unique(owners)]


class ResampleDataset(SampleChain):
    """Chosen samples of a data set, in a chosen order; one may be chosen several times, or never.

    It numbers its samples anew: transforms of a `ResampleDataset` change each copy of a sample in its own way, those
    inside of it change all copies alike.

    Args:
        dataset: any data set.
        indices: integers (N,), which sample each one is; or a function of 0..length-1 that returns that, called here
            and never again, so that it need not be one that can be pickled.
        length: number of samples, for a function only; as many as the data set's when it is not given.

    Raises:
        IndexError: an index that is out of range for the data set; named.
        TypeError: no integers.
        ValueError: a length for a list of indices, or a negative one.
    """

    def __init__(self, dataset: Dataset, indices: ArrayLike | Callable[[int], int], length: int | None = None) -> None:
        if callable(indices):
            count = len(dataset) if length is None else operator.index(length)
            if count < 0:
                raise ValueError(f"length must not be negative, not {length}")
            chosen = np.array([operator.index(indices(index)) for index in range(count)], np.int64)
        elif length is not None:
            raise ValueError(f"length {length} is for a function: a list of indices has its own")
        else:
            # A copy: what the caller does to the list later changes nothing here.
            chosen = np.array(indices)
        self._chosen = checked_indices(chosen, len(dataset)).astype(np.int64, copy=False)
        super().__init__(dataset, length=len(self._chosen))
        self.dataset = dataset

    def sample(self, index: int, epoch: int) -> tuple[Any, ...]:
        """Returns the fields of one chosen sample."""
        return sample_of(self.dataset, int(self._chosen[index]), epoch)

    def batch_kept(self, indices: NDArray[np.int64], epoch: int) -> tuple[tuple[Any, ...], NDArray[np.int64] | None]:
        """Returns the chosen samples of these indices that are left, stacked, and which they are."""
        return fetch_kept(self.dataset, self._chosen[checked_indices(indices, len(self))], epoch)

    def numbers(self, indices: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:  # noqa: ARG002
        """Returns the indices themselves."""
        return indices


@dataclass(frozen=True)
class ImageData:
    """A data set ready for training a classifier.

    Attributes:
        name: how it is called.
        train: samples (float32 image (C, H, W), int64 label), augmented by epoch; or images of any kind, of which
            `transforms` makes that.
        test: the same, never augmented.
        classes: the names, by label.
        image_shape: (channels, height, width).
        note: how it was split or what else its user should know.
        transforms: of the fields of a training batch on the device, as a `PrefetchDataset` takes them.
        test_transforms: likewise, of a test batch.
    """

    name: str
    train: Dataset
    test: Dataset
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    note: str = ""
    transforms: tuple[Any, ...] = ()
    test_transforms: tuple[Any, ...] = ()


def epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns a permutation of 0..count-1 that depends on (seed, epoch) alone."""
    counter = np.array([[epoch & 0xFFFFFFFF, 0, 0, _ORDER_TAG]], np.uint32)
    words = rng.philox4x32(counter, rng.seed_key(seed))[0]
    return np.asarray(rng.permutation(int(words[0]) | int(words[1]) << 32, count), np.int64)


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
        place = checked_index(index, len(self))
        return self.images[place % len(self.images)], self.labels[place]

    def batch(self, indices: NDArray[np.int64], epoch: int) -> tuple[NDArray[Any], ...]:  # noqa: ARG002
        places = checked_indices(indices, len(self))
        return self.images[places % len(self.images)], self.labels[places]


def _idx_file(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{folder / name}[.gz] is missing: install Debian's package dataset-fashion-mnist (apt install "
        "dataset-fashion-mnist), or give the folder that holds the four idx files: --data fashion-mnist:FOLDER"
    )
