"""The order of an epoch, its division into batches, and its division among ranks.

Orders are permutations of (seed, epoch): any batch of any epoch can be asked for at any time, on any thread, and a
training that is taken up again at step k gets what it would have got.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

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
    require_any,
    sample_numbers,
    sample_of,
    whole_number,
)
from flcuda.data.dataset import epoch_order
from flcuda.data.transforms import Draws

LAST_BATCH_POLICIES = ("include-last", "skip-last", "divisible-only")

# Two epochs meet where one ends; a data set whose samples are repeated asks for as many orders at once.
_ORDERS_KEPT = 4


class ShuffleDataset(SampleChain):
    """A data set in the order of a permutation of (seed, epoch).

    Args:
        dataset: any data set.
        seed: an integer of at most 64 bits.
    """

    def __init__(self, dataset: Dataset, seed: int = 0) -> None:
        super().__init__(dataset, length=len(dataset))
        self.dataset = dataset
        self.seed = rng.checked_seed(seed)
        self._orders = _Orders(len(dataset), self.seed)

    def sample(self, index: int, epoch: int) -> tuple[Any, ...]:
        """Returns the fields of the sample that stands at this place in an epoch's order."""
        return sample_of(self.dataset, int(self._orders.of(epoch)[index]), epoch)

    def batch_kept(self, indices: NDArray[np.int64], epoch: int) -> tuple[tuple[Any, ...], NDArray[np.int64] | None]:
        """Returns what is left of the samples at these places in an epoch's order, stacked, and which they are."""
        return fetch_kept(self.dataset, self._places(indices, epoch), epoch)

    def numbers(self, indices: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Returns the numbers of the shuffled data set."""
        return sample_numbers(self.dataset, self._places(indices, epoch), epoch)

    def _places(self, indices: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        return self._orders.of(epoch)[checked_indices(indices, len(self))]


class BatchDataset(Chain):
    """The batches of a data set: item i is the i-th batch, a tuple of stacked fields.

    What a batch is made of, and what a field becomes, is said at `fetch`.

    Args:
        dataset: any data set.
        batch_size: samples a batch; or a sequence, the size of each batch, which together are all samples.
        policy: for the samples that are left over: "include-last" makes a smaller batch of them, "skip-last" leaves
            them out, "divisible-only" raises.

    Raises:
        ValueError: a size below 1, sizes that are not all samples together, an unknown policy, samples left over under
            "divisible-only", or a policy for a sequence of sizes, which leaves nothing over.
    """

    serves_batches = True

    def __init__(self, dataset: Dataset, batch_size: int | Sequence[int], policy: str = "include-last") -> None:
        count = len(dataset)
        if isinstance(batch_size, Sequence | np.ndarray):
            sizes = [whole_number("batch_size", size, 1) for size in batch_size]
            if sum(sizes) != count:
                raise ValueError(f"batch_size: the {len(sizes)} sizes are {sum(sizes)} samples, not all {count}")
            if policy != "include-last":
                raise ValueError(f"policy {policy!r} says nothing about a sequence of sizes: leave it out")
            bounds = np.cumsum([0, *sizes], dtype=np.int64)
        else:
            size = whole_number("batch_size", batch_size, 1)
            steps = _steps(count, size, policy)
            bounds = np.minimum(np.arange(steps + 1, dtype=np.int64) * size, count)
        super().__init__(dataset, length=len(bounds) - 1)
        self.dataset = dataset
        self.batch_size = batch_size
        self.policy = policy
        self._bounds = bounds

    def sample(self, index: int, epoch: int) -> tuple[Any, ...]:
        """Returns the stacked fields of a batch of an epoch."""
        return fetch(self.dataset, self.indices(index, epoch), epoch)

    def sample_kept(self, index: int, epoch: int) -> tuple[tuple[Any, ...], NDArray[np.int64] | None]:
        """Returns the stacked fields of what is left of a batch, and which of its `indices` that is."""
        return fetch_kept(self.dataset, self.indices(index, epoch), epoch)

    def indices(self, index: int, epoch: int) -> NDArray[np.int64]:  # noqa: ARG002 - as of a DistributedDataset
        """Returns the indices, int64 (n,), of a batch's samples in the data set that it is made of."""
        place = checked_index(index, len(self))
        return np.arange(self._bounds[place], self._bounds[place + 1], dtype=np.int64)

    def draws(self, index: int, epoch: int, seed: int = 0) -> Draws:
        """Returns the random numbers of a batch's samples, for transforms of the batch after it was made.

        They are those that a `TransformDataset` of this seed would have used.
        """
        return Draws(seed, epoch, sample_numbers(self.dataset, self.indices(index, epoch), epoch))


class DistributedDataset(Chain):
    """One rank's batches of a data set that all ranks share: item i is what this rank does in step i.

    An epoch is every sample `repeats` times, in the order of a permutation of (seed, epoch) with the copies of a sample
    side by side. Steps take batch_size x world_size of them, dealt out one by one: rank r gets those at r,
    r + world_size, ... So the copies of a sample go to different ranks; copy k of a sample has the random changes of
    epoch `epoch * repeats + k`, which no other copy in any epoch has.

    Every rank has the same number of steps. In the last step of "include-last" the remaining samples are dealt out in
    the same way, so ranks may differ by one sample there. A rank that would get none gets a single one that another
    rank has too: `count` is 0 and its weight 0, so that it can take part in the step without being counted.

    Args:
        dataset: any data set; not shuffled or divided among ranks yet.
        rank: this process's, from 0 to world_size - 1.
        world_size: number of ranks.
        batch_size: samples a step on each rank.
        repeats: how often an epoch has each sample (Hoffer et al. 2020, "Augment your batch").
        seed: of the order; the same on all ranks. None keeps the data set's own order, as for a test.
        policy: for what a whole step leaves over: "include-last" makes a smaller step of it, "skip-last" leaves it out
            (of this epoch; another epoch has another order), "divisible-only" raises.

    Raises:
        ValueError: an argument out of range, an unknown policy, or samples left over under "divisible-only".
    """

    serves_batches = True

    def __init__(
        self,
        dataset: Dataset,
        rank: int,
        world_size: int,
        batch_size: int,
        repeats: int = 1,
        seed: int | None = 0,
        policy: str = "include-last",
    ) -> None:
        self.world_size = whole_number("world_size", world_size, 1)
        self.rank = whole_number("rank", rank)
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be from 0 to {self.world_size - 1}, not {rank}")
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.repeats = whole_number("repeats", repeats, 1)
        self.seed = None if seed is None else rng.checked_seed(seed)
        self.policy = policy
        self.dataset = dataset
        self._total = len(dataset) * self.repeats
        self._step_size = self.batch_size * self.world_size
        steps = _steps(self._total, self._step_size, policy, "batch_size x world_size")
        super().__init__(dataset, length=steps)
        self._orders = _Orders(len(dataset), self.seed)

    def sample(self, index: int, epoch: int) -> tuple[Any, ...]:
        """Returns the stacked fields of this rank's batch in a step of an epoch."""
        fields, kept = self.sample_kept(index, epoch)
        if kept is not None and not len(kept):
            self._require_any(index, epoch)
        return fields

    def sample_kept(self, index: int, epoch: int) -> tuple[tuple[Any, ...], NDArray[np.int64] | None]:
        """Returns the stacked fields of what is left of this rank's batch, and which of its `indices` that is.

        Where nothing is left and there are other ranks, which would wait for this one for ever, this raises what is
        wrong with the first sample.
        """
        places, passes = self._served(index, epoch)
        parts = [(rows, fetch_kept(self.dataset, places[rows], number)) for rows, number in _groups(passes)]
        fields, kept = assembled_kept(parts, places)
        if kept is not None and not len(kept) and self.world_size > 1:
            self._require_any(index, epoch)
        return fields, kept

    def _require_any(self, index: int, epoch: int) -> NoReturn:
        places, passes = self._served(index, epoch)
        require_any(self.dataset, int(places[0]), int(passes[0]))

    def indices(self, index: int, epoch: int) -> NDArray[np.int64]:
        """Returns the indices, int64 (n,), of this rank's samples of a step in the data set that all ranks share."""
        return self._served(index, epoch)[0]

    def draws(self, index: int, epoch: int, seed: int = 0) -> Draws:
        """Returns the random numbers of a batch's samples, for transforms of the batch after it was made.

        They are those that a `TransformDataset` of this seed would have used.
        """
        places, passes = self._served(index, epoch)
        if self.repeats == 1:
            return Draws(seed, epoch, sample_numbers(self.dataset, places, epoch))
        numbers = np.empty_like(places)
        for rows, number in _groups(passes):
            numbers[rows] = sample_numbers(self.dataset, places[rows], number)
        # Copies of several passes are in the batch: an epoch for each sample.
        return Draws(seed, passes, numbers)

    def count(self, index: int) -> int:
        """Returns how many samples of this rank's batch in a step are to be counted: all of them, or 0."""
        first, size = self._step(index)
        return len(range(first + self.rank, first + size, self.world_size))

    def weights(self, index: int, kept: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """Returns the weights, float32 (n,), of this rank's samples in a step.

        The mean of weight x loss over the batch, averaged over the ranks, is the mean loss over the step's samples,
        where a sample that was left out counts as one with the loss 0. All are 1 in a whole step.

        Args:
            index: the step.
            kept: which of the batch's samples are left, as `Sample.kept`; None for all of them.
        """
        _, size = self._step(index)
        count = self.count(index)
        rows = max(count, 1) if kept is None else len(kept)
        return np.full(rows, min(count, rows) * self.world_size / size, np.float32)

    def _step(self, index: int) -> tuple[int, int]:
        """Returns where a step begins in the epoch, and how many samples all ranks have in it together."""
        first = checked_index(index, len(self)) * self._step_size
        return first, min(self._step_size, self._total - first)

    def _served(self, index: int, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns indices and, for each, the number of the pass over the data set that it belongs to."""
        first, size = self._step(index)
        # Beyond the step's end only where this rank would have nothing.
        start = first + self.rank % size
        places = np.arange(start, first + size, self.world_size, dtype=np.int64)
        order = self._orders.of(epoch)
        return order[places // self.repeats], epoch * self.repeats + places % self.repeats


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
    size = whole_number("batch_size", batch_size, 1)
    steps = _steps(count, size, last, policy_name="last")
    order = np.arange(count, dtype=np.int64) if seed is None else epoch_order(count, seed, epoch)
    return [order[step * size : (step + 1) * size] for step in range(steps)]


def batches(
    dataset: Dataset, batch_size: int, *, seed: int | None = None, epoch: int = 0, last: str = "include-last"
) -> Iterator[tuple[Any, ...]]:
    """Iterates over a data set once, in batches of stacked fields; the arguments are those of `batch_indices`."""
    # Checked now, not at the first batch.
    parts = batch_indices(len(dataset), batch_size, seed=seed, epoch=epoch, last=last)
    return (fetch(dataset, part, epoch) for part in parts)


class _Orders:
    """The orders of the epochs last asked for, each computed once for all threads."""

    def __init__(self, count: int, seed: int | None) -> None:
        self._count = count
        self._seed = seed
        self._kept: dict[int, NDArray[np.int64]] = {}
        self._lock = threading.Lock()

    def of(self, epoch: int) -> NDArray[np.int64]:
        """Returns int64 (count,), not writeable."""
        key = 0 if self._seed is None else epoch
        with self._lock:
            order = self._kept.get(key)
            if order is None:
                if self._seed is None:
                    order = np.arange(self._count, dtype=np.int64)
                else:
                    order = epoch_order(self._count, self._seed, epoch)
                order.flags.writeable = False
                if len(self._kept) == _ORDERS_KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[key] = order
        return order

    def __reduce__(self) -> tuple[type["_Orders"], tuple[int, int | None]]:
        # The orders are computed again where it arrives; a lock cannot be sent.
        return _Orders, (self._count, self._seed)


def _groups(passes: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], int]]:
    """Returns, for each number among them, where it is and what it is."""
    return [(np.flatnonzero(passes == number), int(number)) for number in np.unique(passes)]


def _steps(count: int, size: int, policy: str, size_name: str = "batch_size", *, policy_name: str = "policy") -> int:
    """Returns how many batches of a size a policy makes of `count` samples."""
    if policy not in LAST_BATCH_POLICIES:
        raise ValueError(f"{policy_name} must be one of {', '.join(LAST_BATCH_POLICIES)}, not {policy!r}")
    if policy == "divisible-only" and count % size:
        raise ValueError(f"{size_name} {size} does not divide the {count} samples ({policy_name}='divisible-only')")
    return count // size if policy == "skip-last" else -(-count // size)
