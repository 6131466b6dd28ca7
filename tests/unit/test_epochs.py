"""Every composition of data sets serves each sample as often as it should, in the order it should, epoch after epoch.

Each composition is built twice: of the package's data sets, and as a plain list of samples an epoch by the definitions.
"""

import copy
import pickle
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flcuda import data

POLICIES = ("include-last", "skip-last", "divisible-only")


class Foreign:
    """A data set of PyTorch's map style: samples are tuples, lists or single values; it has no batch and no epoch."""

    def __init__(self, start: int, count: int, kind: str) -> None:
        self.start = start
        self.count = count
        self.kind = kind

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        stamp = self.start + index
        if self.kind == "single":
            return stamp
        return [stamp, float(stamp)] if self.kind == "list" else (np.full((2, 3), stamp), stamp)


@dataclass
class Jitter:
    """Adds to a field a number that tells every draw from every other."""

    def __call__(self, batch: Any, draws: data.Draws) -> Any:
        added = np.floor(draws.uniform()[:, 1] * 2**30) * 2**20
        return batch + added.reshape(-1, *[1] * (batch.ndim - 1))


@dataclass
class Numbered:
    """What a sample should be: the number it is drawn by, and one value a field."""

    number: int
    fields: tuple[float, ...]


Rows = Callable[[int], list[Numbered]]


def jittered(rows: Rows, place: int, seed: int) -> Rows:
    def changed(epoch: int) -> list[Numbered]:
        result = []
        for row in rows(epoch):
            draws = data.Draws(seed, epoch, np.array([row.number]), 256 * place)
            fields = list(row.fields)
            fields[place] += float(np.floor(draws.uniform()[0, 1] * 2**30) * 2**20)
            result.append(Numbered(row.number, tuple(fields)))
        return result

    return changed


def shuffled(rows: Rows, seed: int) -> Rows:
    return lambda epoch: [rows(epoch)[i] for i in data.epoch_order(len(rows(epoch)), seed, epoch)]


def resampled(rows: Rows, chosen: list[int]) -> Rows:
    return lambda epoch: [Numbered(place, rows(epoch)[i].fields) for place, i in enumerate(chosen)]


def merged(first: Rows, second: Rows) -> Rows:
    return lambda epoch: [
        Numbered(a.number, a.fields + b.fields) for a, b in zip(first(epoch), second(epoch), strict=True)
    ]


def concatenated(parts: list[Rows]) -> Rows:
    def joined(epoch: int) -> list[Numbered]:
        result: list[Numbered] = []
        for part in parts:
            start = len(result)
            result += [Numbered(start + row.number, row.fields) for row in part(epoch)]
        return result

    return joined


@st.composite
def leaves(draw: st.DrawFn, kind: str) -> tuple[data.Dataset, Rows]:
    count = draw(st.integers(1, 12))
    start = draw(st.integers(0, 10)) * 100
    stamps = list(range(start, start + count))
    fields = 1 if kind == "single" else 2
    rows = [Numbered(i, (float(stamp),) * fields) for i, stamp in enumerate(stamps)]
    if kind == "tensor":
        return data.TensorDataset(np.array(stamps), np.array(stamps, np.float32)), lambda epoch: rows
    return Foreign(start, count, kind), lambda epoch: rows


@st.composite
def chains(draw: st.DrawFn, kind: str, depth: int) -> tuple[data.Dataset, Rows]:
    """A composition at most so deep, whose fields are those of one kind of leaf."""
    step = draw(st.sampled_from(["leaf", "transform", "shuffle", "resample", "concat"])) if depth else "leaf"
    if step == "leaf":
        return draw(leaves(kind))
    dataset, rows = draw(chains(kind, depth - 1))
    seed = draw(st.integers(0, 3))
    if step == "shuffle":
        return data.ShuffleDataset(dataset, seed), shuffled(rows, seed)
    if step == "transform":
        place = draw(st.integers(0, 0 if kind == "single" else 1))
        transforms = [None] * place + [Jitter()]
        return data.TransformDataset(dataset, *transforms, seed=seed), jittered(rows, place, seed)
    if step == "resample":
        chosen = draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=12))
        return data.ResampleDataset(dataset, chosen), resampled(rows, chosen)
    other, other_rows = draw(chains(kind, depth - 1))
    return data.ConcatDataset(dataset, other), concatenated([rows, other_rows])


@st.composite
def compositions(draw: st.DrawFn) -> tuple[data.Dataset, Rows]:
    dataset, rows = draw(st.sampled_from(["tensor", "tuple", "list", "single"]).flatmap(lambda k: chains(k, 3)))
    if draw(st.booleans()):
        other, other_rows = draw(chains("tensor", 2))
        count = len(dataset)
        chosen = [i % len(other) for i in range(count)]
        beside = data.ResampleDataset(other, lambda index: index % len(other), count)
        return data.MergeDataset(dataset, beside), merged(rows, resampled(other_rows, chosen))
    return dataset, rows


def values(fields: tuple[Any, ...]) -> tuple[float, ...]:
    """One number a field of a sample, whose elements must all be the same."""
    return tuple(float(np.unique(np.asarray(field)).item()) for field in fields)


def batch_values(fields: tuple[Any, ...]) -> list[tuple[float, ...]]:
    return [values(tuple(field[i] for field in fields)) for i in range(len(fields[0]))]


def wanted(rows: list[Numbered]) -> list[tuple[float, ...]]:
    return [row.fields for row in rows]


class TestCompositions:
    @settings(max_examples=150)
    @given(compositions(), st.lists(st.integers(0, 4), min_size=1, max_size=3), st.data())
    def test_samples_batches_and_numbers(
        self, composition: tuple[data.Dataset, Rows], epochs: list[int], draw: st.DataObject
    ) -> None:
        dataset, rows = composition
        count = len(dataset)
        for epoch in epochs:
            expected = rows(epoch)
            assert count == len(expected)
            # Of any epoch at any time, whatever `set_epoch` said last.
            indices = draw.draw(st.lists(st.integers(-count, count - 1), min_size=1, max_size=15))
            assert batch_values(data.fetch(dataset, indices, epoch)) == [expected[i].fields for i in indices]
            numbers = data.sample_numbers(dataset, np.arange(count), epoch)
            assert numbers.tolist() == [row.number for row in expected]
            if isinstance(dataset, Foreign | data.TensorDataset):
                continue
            dataset.set_epoch(epoch)
            assert [values(sample) for sample in dataset] == wanted(expected)
            assert values(dataset[-1]) == expected[-1].fields
            sent = pickle.loads(pickle.dumps(dataset))
            assert [values(sample) for sample in sent] == wanted(expected)
        for index in (count, -count - 1):
            with pytest.raises(IndexError, match=f"index {index} is out of range for {count} samples"):
                data.fetch(dataset, [0, index])
            with pytest.raises(IndexError):
                dataset[index]

    @settings(max_examples=100)
    @given(compositions(), st.integers(1, 7), st.sampled_from(POLICIES), st.integers(0, 3), st.integers(0, 2))
    def test_batches(
        self, composition: tuple[data.Dataset, Rows], size: int, policy: str, epoch: int, seed: int
    ) -> None:
        dataset, rows = composition
        count = len(dataset)
        if policy == "divisible-only" and count % size:
            with pytest.raises(ValueError, match=f"batch_size {size} does not divide the {count} samples"):
                data.BatchDataset(dataset, size, policy)
            return
        batched = data.BatchDataset(data.ShuffleDataset(dataset, seed), size, policy)
        steps = count // size if policy == "skip-last" else -(-count // size)
        assert len(batched) == steps
        for one in (epoch, epoch + 1):
            expected = shuffled(rows, seed)(one)
            batched.set_epoch(one)
            served = list(pickle.loads(pickle.dumps(batched)))
            assert [len(fields[0]) for fields in served] == [min(size, count - i * size) for i in range(steps)]
            assert [row for fields in served for row in batch_values(fields)] == wanted(expected)[: steps * size]
            for i in range(steps):
                draws = batched.draws(i, one, seed=5)
                assert (draws.seed, draws.epoch) == (5, one)
                assert draws.indices.tolist() == [row.number for row in expected[i * size : (i + 1) * size]]

    @settings(max_examples=100)
    @given(
        compositions(),
        st.integers(1, 5),
        st.integers(1, 4),
        st.integers(1, 3),
        st.sampled_from(POLICIES),
        st.sampled_from([None, 0, 3]),
        st.integers(0, 3),
    )
    def test_ranks(
        self,
        composition: tuple[data.Dataset, Rows],
        world: int,
        size: int,
        repeats: int,
        policy: str,
        seed: int | None,
        epoch: int,
    ) -> None:
        dataset, rows = composition
        count = len(dataset)
        total = count * repeats
        step_size = world * size

        def made(rank: int) -> data.DistributedDataset:
            return data.DistributedDataset(dataset, rank, world, size, repeats, seed, policy)

        if policy == "divisible-only" and total % step_size:
            with pytest.raises(ValueError, match=f"world_size {step_size} does not divide the {total} samples"):
                made(0)
            return
        ranks = [made(rank) for rank in range(world)]
        steps = total // step_size if policy == "skip-last" else -(-total // step_size)
        assert {len(rank) for rank in ranks} == {steps}
        for one in (epoch, epoch + 1):
            # Copy k of a sample is the one of pass `epoch * repeats + k`, in the order of the epoch.
            passes = [rows(one * repeats + k) for k in range(repeats)]
            order = range(count) if seed is None else data.epoch_order(count, seed, one)
            expected = [passes[k][i] for i in order for k in range(repeats)]
            served = []
            for step in range(steps):
                share = expected[step * step_size : (step + 1) * step_size]
                loss = 0.0
                for rank, part in enumerate(ranks):
                    part.set_epoch(one)
                    found = batch_values(part[step])
                    own = share[rank::world]
                    assert part.count(step) == len(own)
                    weights = part.weights(step)
                    assert len(weights) == len(found) == max(len(own), 1) <= size
                    assert found[: len(own)] == wanted(own)
                    if not own:
                        assert weights.tolist() == [0]
                        assert found[0] in wanted(share)
                    elif len(share) == step_size:
                        assert (weights == 1).all()
                    loss += float(np.mean(weights * (np.arange(len(found)) * world + rank)))
                    draws = part.draws(step, one)
                    assert draws.indices.tolist()[: len(own)] == [row.number for row in own]
                    served.append(
                        [(step * world * size + j * world + rank, row) for j, row in enumerate(found[: len(own)])]
                    )
                np.testing.assert_allclose(loss / world, np.mean(np.arange(len(share))), rtol=1e-5, atol=1e-6)
            whole = [row for _, row in sorted(pair for group in served for pair in group)]
            assert whole == wanted(expected)[: steps * step_size]


class TestShuffle:
    def test_each_sample_once_in_another_order_each_epoch(self) -> None:
        dataset = data.ShuffleDataset(Foreign(0, 50, "single"), seed=2)
        orders = []
        for epoch in range(6):
            dataset.set_epoch(epoch)
            orders.append([value for (value,) in dataset])
        assert all(sorted(order) == list(range(50)) for order in orders)
        assert len({tuple(order) for order in orders}) == 6
        dataset.set_epoch(1)
        assert [value for (value,) in dataset] == orders[1]
        other = data.ShuffleDataset(Foreign(0, 50, "single"), seed=3)
        assert [value for (value,) in other] != orders[0]

    def test_threads_of_two_epochs_do_not_disturb_one_another(self) -> None:
        dataset = data.BatchDataset(data.ShuffleDataset(Foreign(0, 97, "tuple"), seed=2), 5)
        fence = threading.Barrier(4)

        def read(epoch: int) -> list[int]:
            fence.wait()
            return [int(stamp) for i in range(len(dataset)) for stamp in dataset.sample(i, epoch)[1]]

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(read, [0, 1, 2, 7]))
        for epoch, stamps in zip([0, 1, 2, 7], found, strict=True):
            assert stamps == data.epoch_order(97, 2, epoch).tolist()

    def test_an_order_cannot_be_written_into(self) -> None:
        dataset = data.DistributedDataset(Foreign(0, 9, "single"), 0, 1, 9)
        dataset.indices(0, 0)[:] = 0
        assert sorted(dataset.indices(0, 0)) == list(range(9))

    def test_seed(self) -> None:
        with pytest.raises(TypeError):
            data.ShuffleDataset(Foreign(0, 9, "single"), seed=1.5)  # type: ignore[arg-type]


class TestEpoch:
    def test_goes_down_to_every_data_set(self) -> None:
        class Listening(Foreign):
            epoch = 0

            def set_epoch(self, epoch: int) -> None:
                self.epoch = epoch

        heard = [Listening(0, 6, "tuple") for _ in range(3)]
        chain = data.BatchDataset(
            data.MergeDataset(
                data.ConcatDataset(
                    data.TransformDataset(data.ShuffleDataset(heard[0])), data.ResampleDataset(heard[1], range(6))
                ),
                data.ResampleDataset(data.DistributedDataset(heard[2], 0, 1, 1), [0] * 12),
                Foreign(0, 12, "tuple"),
            ),
            4,
        )
        chain.set_epoch(np.int64(3))
        assert [leaf.epoch for leaf in heard] == [3, 3, 3]
        assert type(heard[0].epoch) is int

    def test_refused(self) -> None:
        dataset = data.ShuffleDataset(Foreign(0, 6, "tuple"))
        with pytest.raises(ValueError, match="epoch must be at least 0, not -1"):
            dataset.set_epoch(-1)
        with pytest.raises(TypeError, match=r"epoch must be a whole number, not 0\.5"):
            dataset.set_epoch(0.5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="seed must be a whole number, not 'x'"):
            data.ShuffleDataset(Foreign(0, 6, "tuple"), "x")  # type: ignore[arg-type]
        for seed in (-1, 1 << 64):
            for make in (data.ShuffleDataset, data.PrefetchDataset, data.TransformDataset):
                with pytest.raises(ValueError, match=rf"seed must be from 0 to 2\^64 - 1, got {seed}"):
                    make(Foreign(0, 6, "tuple"), seed=seed)
            with pytest.raises(ValueError, match=rf"seed must be from 0 to 2\^64 - 1, got {seed}"):
                data.epoch_order(5, seed, 0)
            with pytest.raises(ValueError, match=rf"seed must be from 0 to 2\^64 - 1, got {seed}"):
                data.Draws(seed, 0, np.arange(3)).uniform()


class TestBatchDataset:
    @given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    def test_sizes(self, sizes: list[int]) -> None:
        dataset = data.BatchDataset(Foreign(0, sum(sizes), "tuple"), sizes)
        parts = [part[1].tolist() for part in dataset]
        assert [len(part) for part in parts] == sizes
        assert [stamp for part in parts for stamp in part] == list(range(sum(sizes)))

    def test_refused(self) -> None:
        dataset = Foreign(0, 6, "tuple")
        with pytest.raises(ValueError, match="the 2 sizes are 5 samples, not all 6"):
            data.BatchDataset(dataset, [2, 3])
        with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
            data.BatchDataset(dataset, np.array([6, 0]))
        with pytest.raises(ValueError, match="policy 'skip-last' says nothing about a sequence"):
            data.BatchDataset(dataset, [6], "skip-last")
        with pytest.raises(ValueError, match="policy must be one of include-last, skip-last, divisible-only, not 'x'"):
            data.BatchDataset(dataset, 2, "x")
        with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
            data.BatchDataset(dataset, 0)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_nothing(self, policy: str) -> None:
        assert len(data.BatchDataset(Foreign(0, 0, "tuple"), 3, policy)) == 0
        assert len(data.DistributedDataset(Foreign(0, 0, "tuple"), 1, 2, 3, policy=policy)) == 0

    def test_index_errors(self) -> None:
        dataset = data.BatchDataset(Foreign(0, 7, "tuple"), 3)
        np.testing.assert_array_equal(dataset[-1][1], [6])
        for index in (3, -4):
            with pytest.raises(IndexError, match=f"index {index} is out of range for 3 samples"):
                dataset[index]
        with pytest.raises(TypeError):
            dataset[0.0]  # type: ignore[index]

    def test_batches_in_another_order(self) -> None:
        dataset = data.ShuffleDataset(data.BatchDataset(Foreign(0, 7, "tuple"), 3), seed=1)
        found = [part[1].tolist() for part in dataset]
        whole = [[0, 1, 2], [3, 4, 5], [6]]
        assert found == [whole[i] for i in data.epoch_order(3, 1, 0)]
        assert dataset.serves_batches

    def test_batches_are_not_transformed(self) -> None:
        batched = data.BatchDataset(Foreign(0, 7, "tuple"), 3)
        for dataset in (
            batched,
            data.ShuffleDataset(batched),
            data.DistributedDataset(Foreign(0, 7, "tuple"), 0, 1, 3),
        ):
            with pytest.raises(TypeError, match=f"single samples, not the batches of a {type(dataset).__name__}"):
                data.TransformDataset(dataset, Jitter())


class TestDistributed:
    def test_equal_steps_where_the_original_hangs(self) -> None:
        # 17 samples on 4 ranks in batches of 4: the first rank has a fifth sample, and there alone a second step.
        ranks = [data.DistributedDataset(Foreign(0, 17, "single"), rank, 4, 4) for rank in range(4)]
        assert [len(rank) for rank in ranks] == [2] * 4
        assert [rank.count(1) for rank in ranks] == [1, 0, 0, 0]
        assert [rank.weights(1).tolist() for rank in ranks] == [[4.0], [0.0], [0.0], [0.0]]
        assert {int(rank[1][0].item()) for rank in ranks} == {int(data.epoch_order(17, 0, 0)[-1])}

    def test_copies_are_changed_in_their_own_ways_and_never_again(self) -> None:
        jittered_set = data.TransformDataset(data.TensorDataset(np.zeros(20)), Jitter())
        found: Counter[float] = Counter()
        for rank in range(2):
            part = data.DistributedDataset(jittered_set, rank, 2, 5, repeats=3)
            for epoch in range(4):
                part.set_epoch(epoch)
                found.update(float(value) for (values,) in part for value in values)
        assert len(found) == 20 * 3 * 4
        assert set(found.values()) == {1}

    def test_draws_are_those_of_the_transform(self) -> None:
        changed = data.TransformDataset(data.ShuffleDataset(data.TensorDataset(np.zeros(20)), 4), Jitter(), seed=8)
        for repeats in (1, 2):
            part = data.DistributedDataset(changed, 1, 2, 3, repeats=repeats)
            plain = data.DistributedDataset(changed.dataset, 1, 2, 3, repeats=repeats)
            for step in range(len(part)):
                after = Jitter()(plain.sample(step, 5)[0], plain.draws(step, 5, seed=8))
                np.testing.assert_array_equal(after, part.sample(step, 5)[0])

    def test_a_resumed_epoch_goes_on(self) -> None:
        def made() -> data.DistributedDataset:
            return data.DistributedDataset(data.TransformDataset(Foreign(0, 40, "tuple"), Jitter()), 1, 2, 4, 2)

        whole = [batch_values(made().sample(step, 3)) for step in range(len(made()))]
        resumed = made()
        resumed.set_epoch(3)
        assert [batch_values(resumed[step]) for step in range(4, len(resumed))] == whole[4:]

    def test_refused(self) -> None:
        dataset = Foreign(0, 6, "tuple")
        for rank in (-1, 2):
            with pytest.raises(ValueError, match=f"rank must be from 0 to 1, not {rank}"):
                data.DistributedDataset(dataset, rank, 2, 1)
        for name in ("world_size", "batch_size", "repeats"):
            with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
                data.DistributedDataset(dataset, **{"rank": 0, "world_size": 1, "batch_size": 1, name: 0})
        for name in ("rank", "world_size", "batch_size", "repeats", "seed"):
            with pytest.raises(TypeError, match=f"{name} must be a whole number, not 0.5"):
                data.DistributedDataset(dataset, **{"rank": 0, "world_size": 1, "batch_size": 1, name: 0.5})
        with pytest.raises(ValueError, match="policy must be one of"):
            data.DistributedDataset(dataset, 0, 1, 1, policy="drop")

    def test_index_errors(self) -> None:
        dataset = data.DistributedDataset(Foreign(0, 7, "tuple"), 0, 2, 2)
        for call in (dataset.__getitem__, dataset.count, dataset.weights, lambda i: dataset.indices(i, 0)):
            with pytest.raises(IndexError, match="index 2 is out of range for 2 samples"):
                call(2)

    def test_copies_have_their_own_order(self) -> None:
        dataset = data.DistributedDataset(Foreign(0, 12, "single"), 0, 1, 5)
        dataset[0]
        twin = copy.deepcopy(dataset)
        twin.set_epoch(1)
        assert dataset.epoch == 0
        assert [v.tolist() for (v,) in twin] != [v.tolist() for (v,) in dataset]
