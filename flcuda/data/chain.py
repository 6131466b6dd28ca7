"""What a data set is, how a batch is made of one, and what data sets made of others have in common.

A data set is anything with a length and `dataset[i] -> (field, field, ...)`; one of PyTorch's map style is one, whether
its samples are tuples, lists or single values. It may also have `batch(indices, epoch) -> (stacked field, ...)`, which
makes a whole batch at once.

A data set that may leave samples of a batch out says which ones are left by `batch_kept`, see `KeepsSome`: without it
nobody can tell which random numbers, weights or rows of another data set belong to the rows that came.

The epoch is an argument, never a state that a batch depends on: threads still at work on the last batches of an epoch
and those at the first of the next cannot disturb one another. `set_epoch` only says which epoch `dataset[i]` means.
"""

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flcuda.data.images import ImageBatch
from flcuda.errors import FlcudaError

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


class KeepsSome(Protocol):
    """A data set that serves what it can of a batch, and says what that is.

    Its `batch` returns the same fields, and raises when no sample is left.
    """

    def batch_kept(self, indices: NDArray[np.int64], epoch: int, /) -> tuple[tuple[Any, ...], NDArray[np.int64] | None]:
        """Returns what can be served of a batch.

        Args:
            indices: int64 (N,), from 0 to less than the length.
            epoch: counted from 0.

        Returns:
            (fields, kept): row i of each field is sample `indices[kept[i]]`; kept rises, int64 (n,), NumPy. When no
            sample is left kept is empty, and fields are not looked at. None for kept says nothing, as `batch` does.
        """
        ...


class Chain:
    """A data set made of others, with one epoch for all of them.

    A subclass gives `sample`. One of single samples is a `SampleChain`.

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

    def sample_kept(self, index: int, epoch: int) -> tuple[tuple[Any, ...], NDArray[np.int64] | None]:
        """Returns the fields of one sample, and which of its rows are left where it is a batch; see `KeepsSome`."""
        return self.sample(index, epoch), None

    def numbers(self, indices: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Returns the numbers that the random changes of these samples are drawn by; see `sample_numbers`."""
        return sample_numbers(self._inner[0], indices, epoch)

    @property
    def serves_batches(self) -> bool:
        """Whether what it calls a sample is a batch."""
        return any(isinstance(dataset, Chain) and dataset.serves_batches for dataset in self._inner)

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch's samples `dataset[i]` returns from now on, here and in all data sets that this is made of.

        Args:
            epoch: counted from 0.

        Raises:
            ValueError: a negative epoch.
        """
        self.epoch = whole_number("epoch", epoch, 0)
        for dataset in self._inner:
            below = getattr(dataset, "set_epoch", None)
            if callable(below):
                below(self.epoch)


class SampleChain(Chain):
    """A `Chain` of single samples: a subclass gives `batch_kept`, and `batch` follows."""

    def batch(self, indices: NDArray[np.int64], epoch: int) -> tuple[Any, ...]:
        """Returns the samples of these indices that are left, stacked; an error when there are none."""
        fields, kept = self.batch_kept(indices, epoch)
        if kept is not None and not len(kept):
            require_any(self, int(indices[0]), epoch)
        return fields

    def batch_kept(self, indices: NDArray[np.int64], epoch: int) -> tuple[tuple[Any, ...], NDArray[np.int64] | None]:
        """Returns the samples of these indices that are left, stacked, and which they are; see `KeepsSome`."""
        raise NotImplementedError


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
    places = _some_indices(indices, len(dataset))
    whole = getattr(dataset, "batch", None)
    if callable(whole):
        return tuple(whole(places, epoch))
    samples = []
    for index in places.tolist():
        try:
            samples.append(sample_of(dataset, index, epoch))
        except Exception as error:
            add_note(error, f"sample {index} of {len(dataset)} of a {type(dataset).__name__}", ("fetch", id(dataset)))
            raise
    return collated(samples, places)


def fetch_kept(
    dataset: Dataset, indices: ArrayLike, epoch: int = 0
) -> tuple[tuple[Any, ...], NDArray[np.int64] | None]:
    """Returns those of the samples that can be served, stacked, and which they are.

    Args:
        dataset: any data set; its own `batch_kept` is asked where it has one, see `KeepsSome`.
        indices: as for `fetch`.
        epoch: likewise.

    Returns:
        (fields, kept) as `KeepsSome.batch_kept`. kept is None for a data set that does not say: then all samples are
        there, unless it leaves some out without a word.

    Raises:
        ValueError: kept does not rise, is out of range, or is of another length than a field; or as `fetch`.
    """
    places = _some_indices(indices, len(dataset))
    if not _tells(dataset, "batch_kept", "batch"):
        return fetch(dataset, places, epoch), None
    told: Any = dataset
    fields, kept = told.batch_kept(places, epoch)
    if kept is None:
        return tuple(fields), None
    kept = np.asarray(kept, np.int64)
    if kept.ndim != 1 or (np.diff(kept, prepend=-1) < 1).any() or (kept >= len(places)).any():
        message = f"batch_kept of a {type(dataset).__name__} must return rising places among the {len(places)} samples"
        raise ValueError(f"{message}, not {kept.tolist()}")
    if not len(kept):
        return (), kept
    check_rows(fields, len(kept))
    return tuple(fields), kept


def sample_kept(dataset: Dataset, index: int, epoch: int) -> tuple[tuple[Any, ...], NDArray[np.int64] | None]:
    """Returns the fields of one sample as `sample_of`, and which of its rows are left where it is a batch.

    Returns:
        (fields, kept) as `fetch_kept`.
    """
    if isinstance(dataset, Chain) and _tells(dataset, "sample_kept", "sample"):
        return dataset.sample_kept(index, epoch)
    return sample_of(dataset, index, epoch), None


def kept_of(fields: Sequence[Any], kept: NDArray[np.int64] | None, count: int) -> NDArray[np.int64]:
    """Returns which of so many samples the rows of a batch are; ValueError where nobody can tell."""
    if kept is not None:
        return kept
    check_rows(fields, count)
    return np.arange(count, dtype=np.int64)


def require_any(dataset: Dataset, index: int, epoch: int) -> NoReturn:
    """Raises what is wrong with a sample that was left out, as all of its batch were."""
    sample_of(dataset, index, epoch)
    raise FlcudaError(
        f"sample {index} of {len(dataset)} of a {type(dataset).__name__} and all of its batch were left out"
    )


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
    if callable(whole):
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


def assembled_kept(
    parts: Sequence[tuple[NDArray[np.int64], tuple[tuple[Any, ...], NDArray[np.int64] | None]]],
    indices: NDArray[np.int64],
) -> tuple[tuple[Any, ...], NDArray[np.int64] | None]:
    """Puts what is left of batches together into one.

    Args:
        parts: (places, (fields, kept)): row i of each field is sample `places[kept[i]]` of the whole. Places of a part
            rise, and all of them together are 0..N-1.
        indices: int64 (N,), name the samples in errors.

    Returns:
        (fields, kept) as `fetch_kept`.

    Raises:
        ValueError: as `assembled`.
    """
    if len(parts) == 1:
        return parts[0][1]
    if all(kept is None for _, (_, kept) in parts):
        return assembled([(places, fields) for places, (fields, _) in parts], indices), None
    left = [(places[kept_of(fields, kept, len(places))], fields) for places, (fields, kept) in parts]
    left = [(places, fields) for places, fields in left if len(places)]
    if not left:
        return (), np.empty(0, np.int64)
    every = np.sort(np.concatenate([places for places, _ in left]))
    fields = assembled([(np.searchsorted(every, places), fields) for places, fields in left], indices[every])
    return fields, every


def check_rows(fields: Sequence[Any], count: int) -> None:
    """Refuses a batch that leaves samples out without a word, where it matters which ones those are.

    Raises:
        ValueError: a field with another number of rows than `count`.
    """
    for place, field in enumerate(fields):
        if len(field) != count:
            message = f"field {place} has {len(field)} rows for the {count} samples asked for"
            raise ValueError(
                f"{message}: leave out what cannot be served by a ResampleDataset of the others, or say by batch_kept "
                "which samples are left"
            )


def row(field: Any, index: int) -> Any:
    """Returns one sample's part of a stacked field."""
    return field.image(index) if isinstance(field, ImageBatch) else field[index]


def taken(field: Any, rows: NDArray[np.int64]) -> Any:
    """Returns some rows of a stacked field; of an `ImageBatch` with the same pixels."""
    if isinstance(field, ImageBatch):
        return ImageBatch(field.pixels, field.offsets[rows], field.sizes[rows], field.channels)
    return field[rows]


def add_note(error: BaseException, note: str, source: object) -> None:
    """Adds a note to an exception, in place of the one that the same source added when it was raised before.

    Exceptions that refuse notes stay as they are: what explains an error must not become another.
    """
    with contextlib.suppress(Exception):
        notes = [known for known in getattr(error, "__notes__", ()) if getattr(known, "source", None) != source]
        if notes != getattr(error, "__notes__", []):
            error.__notes__ = notes
        error.add_note(_Note(note, source))


class _Note(str):
    """A note that says who added it."""

    source: object

    def __new__(cls, text: str, source: object = None) -> "_Note":
        note = super().__new__(cls, text)
        note.source = source
        return note


def whole_number(name: str, value: object, least: int | None = None) -> int:
    """Returns an argument that must be a whole number; TypeError or ValueError name it and its value."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return number


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


def _some_indices(indices: ArrayLike, length: int) -> NDArray[np.int64]:
    places = checked_indices(indices, length)
    if not len(places):
        raise ValueError("indices must be at least one")
    return places


def _tells(dataset: object, name: str, plain: str) -> bool:
    """Says whether a data set has a method that also tells what is left, and no subclass changed only the plain one."""
    for kind in type(dataset).__mro__:
        if name in vars(kind):
            return callable(vars(kind)[name])
        if plain in vars(kind):
            return False
    return callable(getattr(dataset, name, None))


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
    if all(isinstance(field, ImageBatch) for _, field in parts):
        # Of whatever device, which `_stacked` is not.
        return ImageBatch.of(rows)
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
