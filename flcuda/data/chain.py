"""What a data set is, how a batch is made of one, and what data sets made of others have in common.

A data set is anything with a length and `dataset[i] -> (field, field, ...)`; one of PyTorch's map style is one, whether
its samples are tuples, lists or single values. It may also have `batch(indices, epoch) -> (stacked field, ...)`, which
makes a whole batch at once.

The epoch is an argument, never a state that a batch depends on: threads still at work on the last batches of an epoch
and those at the first of the next cannot disturb one another. `set_epoch` only says which epoch `dataset[i]` means.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flcuda.data.images import ImageBatch

# Grey, grey with alpha, colour, colour with alpha: a field with another last dimension is no image.
_MOST_CHANNELS = 4


class Dataset(Protocol):
    """Numbered samples."""

    def __len__(self) -> int:
        """Returns the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Returns the fields of one sample; IndexError out of range."""
        ...


class Chain:
    """A data set made of others, with one epoch for all of them.

    A subclass gives `sample`, and `batch` where it makes more than one sample at once.

    Args:
        *datasets: what it is made of.
        length: number of its samples.

    Attributes:
        epoch: which epoch's samples `dataset[i]` returns.
    """

    def __init__(self, *datasets: Dataset, length: int) -> None:
        self.epoch = 0
        self._inner = datasets
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self.sample(checked_index(index, self._length), self.epoch)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        # Without it Python would take an IndexError from deep inside for the end, and lose the samples after it.
        return (self[index] for index in range(self._length))

    def sample(self, index: int, epoch: int) -> tuple[Any, ...]:
        """Returns the fields of one sample of an epoch; index from 0 to less than the length."""
        raise NotImplementedError

    def numbers(self, indices: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Returns the numbers that the random changes of these samples are drawn by; see `sample_numbers`."""
        return sample_numbers(self._inner[0], indices, epoch)

    @property
    def serves_batches(self) -> bool:
        """Whether what it calls a sample is a batch."""
        return any(getattr(dataset, "serves_batches", False) for dataset in self._inner)

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch's samples `dataset[i]` returns from now on, here and in all data sets that this is made of.

        Args:
            epoch: counted from 0.

        Raises:
            ValueError: a negative epoch.
        """
        number = operator.index(epoch)
        if number < 0:
            raise ValueError(f"epoch must not be negative, not {epoch}")
        self.epoch = number
        for dataset in self._inner:
            below = getattr(dataset, "set_epoch", None)
            if below is not None:
                below(number)


def fetch(dataset: Dataset, indices: ArrayLike, epoch: int = 0) -> tuple[Any, ...]:
    """Returns the samples of these indices with each field stacked.

    Args:
        dataset: its own `batch` makes the batch where it has one.
        indices: integers (N,), N at least 1; negative ones count from the end.
        epoch: which epoch's order and random changes.

    Returns:
        A NumPy array (N, ...) for each field; an `ImageBatch` for images, uint8 (height, width, channels), of
        different sizes.

    Raises:
        IndexError: an index out of range.
        TypeError: indices that are no integers, or a sample that is a mapping.
        ValueError: no index, samples with different numbers of fields, or a field whose samples differ in shape and
            are no images. Errors of a data set without `batch` have a note that says which sample they come from.
    """
    places = checked_indices(indices, len(dataset))
    if not len(places):
        raise ValueError("indices must be at least one")
    whole = getattr(dataset, "batch", None)
    if whole is not None:
        return tuple(whole(places, epoch))
    samples = []
    for index in places.tolist():
        try:
            samples.append(sample_of(dataset, index, epoch))
        except Exception as error:
            error.add_note(f"sample {index} of {len(dataset)} of a {type(dataset).__name__}")
            raise
    return collated(samples, places)


def sample_of(dataset: Dataset, index: int, epoch: int) -> tuple[Any, ...]:
    """Returns the fields of one sample of an epoch.

    Args:
        dataset: any data set.
        index: from 0 to less than the length.
        epoch: only what is a `Chain` or has `batch` can heed it.

    Raises:
        TypeError: the sample is a mapping, whose fields have no order.
    """
    if isinstance(dataset, Chain):
        return dataset.sample(index, epoch)
    whole = getattr(dataset, "batch", None)
    if whole is not None:
        return tuple(row(field, 0) for field in whole(np.array([index], np.int64), epoch))
    fields = dataset[index]
    if isinstance(fields, Mapping):
        names = ", ".join(str(name) for name in fields)
        raise TypeError(f"sample {index} is a mapping of {names}: it must be a tuple of fields, which have an order")
    return tuple(fields) if isinstance(fields, tuple | list) else (fields,)


def sample_numbers(dataset: Dataset, indices: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
    """Returns the numbers that the random changes of samples are drawn by.

    They are the indices themselves, except where a data set only serves another's samples in another order: then they
    are the other's numbers. So a sample is changed in the same way before and after it is shuffled.

    Args:
        dataset: any data set.
        indices: int64 (N,), from 0 to less than the length.
        epoch: counted from 0.

    Returns:
        int64 (N,).
    """
    return dataset.numbers(indices, epoch) if isinstance(dataset, Chain) else indices


def collated(samples: Sequence[tuple[Any, ...]], indices: NDArray[np.int64]) -> tuple[Any, ...]:
    """Stacks the fields of samples; the indices name them in errors, which are those of `fetch`."""
    count = len(samples[0])
    for index, sample in zip(indices, samples, strict=True):
        if len(sample) != count:
            raise ValueError(f"sample {index} has {len(sample)} fields, sample {indices[0]} has {count}")
    return tuple(_stacked([sample[place] for sample in samples], indices, place) for place in range(count))


def assembled(
    parts: Sequence[tuple[NDArray[np.int64], tuple[Any, ...]]], indices: NDArray[np.int64]
) -> tuple[Any, ...]:
    """Puts batches together into one.

    Args:
        parts: (places, fields): row i of each field is sample `places[i]` of the result. Places of a part rise, and
            all of them together are 0..N-1.
        indices: int64 (N,), name the samples in errors.

    Returns:
        Fields as `fetch` returns them.

    Raises:
        ValueError: parts with different numbers of fields or rows, or as `fetch`.
    """
    if len(parts) == 1:
        return parts[0][1]
    for places, fields in parts:
        check_rows(fields, len(places))
    count = len(parts[0][1])
    for places, fields in parts:
        if len(fields) != count:
            first = indices[parts[0][0][0]]
            raise ValueError(f"sample {indices[places[0]]} has {len(fields)} fields, sample {first} has {count}")
    return tuple(
        _assembled_field([(places, fields[place]) for places, fields in parts], indices, place)
        for place in range(count)
    )


def check_rows(fields: Sequence[Any], count: int) -> None:
    """Refuses a batch that leaves samples out, where it matters which ones those are.

    Raises:
        ValueError: a field with another number of rows than `count`.
    """
    for place, field in enumerate(fields):
        if len(field) != count:
            message = f"field {place} has {len(field)} rows for the {count} samples asked for"
            raise ValueError(f"{message}: leave out what cannot be served by a ResampleDataset of the others")


def row(field: Any, index: int) -> Any:
    """Returns one sample's part of a stacked field."""
    return field.image(index) if isinstance(field, ImageBatch) else field[index]


def checked_index(index: int, length: int) -> int:
    """Returns an index counted from the start; IndexError out of range, TypeError for what is no integer."""
    number = operator.index(index)
    if not -length <= number < length:
        raise IndexError(f"index {number} is out of range for {length} samples")
    return number % length


def checked_indices(indices: ArrayLike, length: int) -> NDArray[np.int64]:
    """Returns indices counted from the start, int64 (N,).

    Raises:
        IndexError: one is out of range; named.
        TypeError: no integers.
        ValueError: not one-dimensional.
    """
    numbers = np.asarray(indices)
    if numbers.ndim != 1:
        raise ValueError(f"indices must be (N,), not {numbers.shape}")
    if len(numbers) and numbers.dtype.kind not in "iu":
        raise TypeError(f"indices must be integers, not {numbers.dtype}")
    wrong = np.flatnonzero((numbers < -length) | (numbers >= length))
    if len(wrong):
        raise IndexError(f"index {numbers[wrong[0]]} is out of range for {length} samples")
    places = numbers.astype(np.int64, copy=False)
    return np.where(places < 0, places + length, places) if (places < 0).any() else places


def _assembled_field(
    parts: Sequence[tuple[NDArray[np.int64], Any]], indices: NDArray[np.int64], place: int
) -> NDArray[Any] | ImageBatch:
    arrays = [field for _, field in parts if isinstance(field, np.ndarray)]
    if len(arrays) == len(parts) and len({array.shape[1:] for array in arrays}) == 1:
        result = np.empty((len(indices), *arrays[0].shape[1:]), np.result_type(*arrays))
        for places, field in parts:
            result[places] = field
        return result
    rows: list[Any] = [None] * len(indices)
    for places, field in parts:
        for index, target in enumerate(places.tolist()):
            rows[target] = row(field, index)
    return _stacked(rows, indices, place)


def _stacked(values: Sequence[Any], indices: NDArray[np.int64], place: int) -> NDArray[Any] | ImageBatch:
    for index, value in zip(indices, values, strict=True):
        if isinstance(value, ImageBatch):
            raise TypeError(f"field {place} of sample {index} is an ImageBatch, which cannot be part of another batch")
    arrays = [np.asarray(value) for value in values]
    different = [i for i, array in enumerate(arrays) if array.shape != arrays[0].shape]
    if not different:
        return np.stack(arrays)
    if all(_is_image(array) for array in arrays) and len({array.shape[2] for array in arrays}) == 1:
        return ImageBatch.of(arrays)
    i = different[0]
    message = f"field {place} of sample {indices[i]} is {arrays[i].shape}, of sample {indices[0]} {arrays[0].shape}"
    raise ValueError(
        f"{message}: a batch needs equal shapes, or uint8 images (height, width, channels) of equal channels"
    )


def _is_image(array: NDArray[Any]) -> bool:
    return array.dtype == np.uint8 and array.ndim == 3 and array.size > 0 and array.shape[2] <= _MOST_CHANNELS
