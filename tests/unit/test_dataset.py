"""Data sets: fields, batches, orders, transforms, idx files and the sets known by name."""

import gzip
import pickle
import struct
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flcuda import data
from flcuda.errors import FlcudaError


def write_idx(path: Path, array: np.ndarray, magic: bytes | None = None) -> None:
    head = magic or bytes([0, 0, 8, array.ndim])
    content = head + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_fashion(folder: Path, rng: np.random.Generator, train: int = 30, test: int = 7) -> dict[str, np.ndarray]:
    arrays = {}
    for part, count in (("train", train), ("t10k", test)):
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (count, 28, 28), np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = rng.integers(0, 10, count, np.uint8)
    for place, (name, array) in enumerate(arrays.items()):
        write_idx(folder / (name + (".gz" if place % 2 else "")), array)
    return arrays


class Squares:
    """A map-style data set with three fields and no batch of its own."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[np.ndarray, int, float]:
        return np.full((2, 3), index, np.float32), index * index, index / 2


class TestTensorDataset:
    def test_samples_and_batches_agree(self, rng: np.random.Generator) -> None:
        fields = (rng.normal(size=(9, 2, 3)), rng.integers(0, 5, 9), rng.normal(size=9))
        dataset = data.TensorDataset(*fields)
        assert len(dataset) == 9
        indices = np.array([8, 0, 3, 3])
        for field, stacked in zip(fields, data.fetch(dataset, indices), strict=True):
            np.testing.assert_array_equal(stacked, field[indices])
        np.testing.assert_array_equal(dataset[-1][0], fields[0][8])
        with pytest.raises(IndexError, match="9 is out of range for 9"):
            dataset[9]
        with pytest.raises(IndexError, match="index -10 is out of range for 9"):
            dataset.batch(np.array([0, -10]), 0)

    def test_bad_fields(self) -> None:
        with pytest.raises(ValueError, match=r"\[3, 4\]"):
            data.TensorDataset(np.zeros(3), np.zeros(4))
        with pytest.raises(TypeError, match=r"fields\[1\] must be a NumPy array, not list"):
            data.TensorDataset(np.zeros(3), [1, 2, 3])
        with pytest.raises(ValueError, match=r"fields\[0\]"):
            data.TensorDataset(np.array(3))
        with pytest.raises(ValueError, match="at least one"):
            data.TensorDataset()

    def test_labels(self) -> None:
        assert data.checked_labels(np.array([0, 2], np.uint8), 3).dtype == np.int64
        with pytest.raises(ValueError, match=r"labels\[1\] is 3, but there are 3 classes"):
            data.checked_labels(np.array([0, 3]), 3)
        with pytest.raises(ValueError, match=r"labels\[0\] is -1"):
            data.checked_labels(np.array([-1, 3]), 3)
        with pytest.raises(TypeError, match="integers"):
            data.checked_labels(np.array([0.5]), 3)


class TestBatches:
    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 40), st.integers(1, 12), st.sampled_from([None, 0, 7]), st.integers(0, 3))
    def test_each_index_once(self, count: int, size: int, seed: int | None, epoch: int) -> None:
        parts = data.batch_indices(count, size, seed=seed, epoch=epoch)
        assert [len(part) for part in parts] == [min(size, count - start) for start in range(0, count, size)]
        served = np.concatenate([np.zeros(0, np.int64), *parts])
        assert sorted(served) == list(range(count))
        if seed is None:
            assert list(served) == list(range(count))
        skipped = data.batch_indices(count, size, seed=seed, epoch=epoch, last="skip-last")
        assert len(skipped) == count // size
        assert all(len(part) == size for part in skipped)

    def test_order_depends_on_seed_and_epoch(self) -> None:
        orders = {tuple(data.epoch_order(50, seed, epoch)) for seed in (0, 1, 2**40) for epoch in range(3)}
        assert len(orders) == 9
        np.testing.assert_array_equal(data.epoch_order(50, 3, 4), data.epoch_order(50, 3, 4))

    def test_policies(self) -> None:
        with pytest.raises(ValueError, match="batch_size 4 does not divide the 11 samples"):
            data.batches(Squares(), 4, last="divisible-only")
        with pytest.raises(ValueError, match="must be one of include-last"):
            data.batches(Squares(), 4, last="drop")
        with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
            data.batches(Squares(), 0)

    def test_any_map_dataset_is_stacked(self) -> None:
        parts = list(data.batches(Squares(), 4, seed=5, epoch=1))
        assert [len(part[0]) for part in parts] == [4, 4, 3]
        squares = np.concatenate([part[1] for part in parts])
        values = np.concatenate([part[0] for part in parts])
        assert values.shape == (11, 2, 3)
        np.testing.assert_array_equal(values[:, 0, 0] ** 2, squares)

    def test_unequal_samples_are_named(self) -> None:
        class Ragged(Squares):
            def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
                return (np.zeros(3 if index != 2 else 4),) * (2 if index == 5 else 1)

        with pytest.raises(ValueError, match=r"field 0 of sample 2 is \(4,\), of sample 1 \(3,\)"):
            data.fetch(Ragged(), np.array([1, 2]))
        with pytest.raises(ValueError, match="sample 5 has 2 fields, sample 4 has 1"):
            data.fetch(Ragged(), np.array([4, 5]))


class TestFetch:
    def test_indices(self) -> None:
        for dataset in (Squares(), data.TensorDataset(np.arange(11.0), np.arange(11) ** 2)):
            np.testing.assert_array_equal(data.fetch(dataset, [10, -1, 0])[1], [100, 100, 0])
            for index in (11, -12):
                with pytest.raises(IndexError, match=f"index {index} is out of range for 11 samples"):
                    data.fetch(dataset, np.array([0, index]))
            with pytest.raises(TypeError, match="indices must be integers, not float64"):
                data.fetch(dataset, [0.0])
            with pytest.raises(ValueError, match=r"indices must be \(N,\), not \(1, 1\)"):
                data.fetch(dataset, [[0]])
            with pytest.raises(ValueError, match="indices must be at least one"):
                data.fetch(dataset, [])

    def test_an_error_says_which_sample(self) -> None:
        class Broken(Squares):
            def __getitem__(self, index: int) -> tuple[np.ndarray, int, float]:
                return super().__getitem__(index // (index - 7))

        with pytest.raises(ZeroDivisionError) as caught:
            data.fetch(data.ShuffleDataset(Broken()), np.arange(11))
        assert caught.value.__notes__ == ["sample 7 of 11 of a Broken"]

    def test_an_error_that_is_raised_again_has_one_note(self) -> None:
        broken = ZeroDivisionError("the same each time")

        class Broken(Squares):
            def __getitem__(self, index: int) -> tuple[np.ndarray, int, float]:
                raise broken

        dataset = Broken()
        broken.add_note("its own")
        for index in range(3):
            with pytest.raises(ZeroDivisionError):
                data.fetch(dataset, [index])
            assert broken.__notes__ == ["its own", f"sample {index} of 11 of a Broken"]
        again = pickle.loads(pickle.dumps(broken))
        assert again.__notes__ == broken.__notes__

    def test_an_error_that_takes_no_notes_is_raised_all_the_same(self) -> None:
        @dataclass(frozen=True)
        class FrozenError(Exception):
            code: int

        class Broken(Squares):
            def __getitem__(self, index: int) -> tuple[np.ndarray, int, float]:
                raise FrozenError(index)

        with pytest.raises(FrozenError) as caught:
            data.fetch(Broken(), [5])
        assert caught.value.code == 5

    def test_a_mapping_has_no_order(self) -> None:
        class Mapped(Squares):
            def __getitem__(self, index: int) -> dict[str, int]:  # type: ignore[override]
                return {"image": index, "label": index}

        with pytest.raises(TypeError, match="sample 3 is a mapping of image, label"):
            data.fetch(Mapped(), [3])

    def test_an_index_error_from_inside_is_not_the_end(self) -> None:
        class Short(Squares):
            def __getitem__(self, index: int) -> tuple[np.ndarray, int, float]:
                return super().__getitem__([0, 1, 2][index])

        dataset = data.ResampleDataset(Short(), range(11))
        with pytest.raises(IndexError, match="list index"):
            list(dataset)
        assert len(list(data.TensorDataset(np.arange(4)))) == 4


class Photographs:
    """Images of different sizes, uint8 (H, W, channels), each of one value, with a label."""

    def __init__(self, sizes: list[tuple[int, int, int]]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full(self.sizes[index], index + 1, np.uint8), index


class TestImages:
    SIZES = ((4, 5, 3), (7, 2, 3), (4, 5, 3), (1, 1, 3), (9, 9, 3))

    def check(self, fields: tuple[data.ImageBatch, np.ndarray], expected: list[int]) -> None:
        images, labels = fields
        assert isinstance(images, data.ImageBatch)
        assert labels.tolist() == expected
        for place, label in enumerate(expected):
            np.testing.assert_array_equal(images.image(place), np.full(self.SIZES[label], label + 1))

    def test_of_different_sizes_become_an_image_batch(self) -> None:
        dataset = Photographs(list(self.SIZES))
        self.check(data.fetch(dataset, [3, 1, 4, 1]), [3, 1, 4, 1])
        assert data.fetch(dataset, [0, 2])[0].shape == (2, 4, 5, 3)
        self.check(data.BatchDataset(dataset, 5)[0], [0, 1, 2, 3, 4])

    def test_put_together_from_several_data_sets(self) -> None:
        # Each of the inner ones stacks what it gives: (2, 4, 5, 3), an ImageBatch, and (1, 9, 9, 3).
        inner = Photographs(list(self.SIZES))
        parts = [data.ResampleDataset(inner, chosen) for chosen in ([0, 2], [1, 3], [4])]
        whole = data.ConcatDataset(*parts)
        self.check(data.fetch(whole, [2, 4, 0, 1, 3]), [1, 4, 0, 2, 3])
        self.check(data.fetch(whole, [2, 3]), [1, 3])
        order = data.epoch_order(5, 0, 2)
        served = data.DistributedDataset(whole, 0, 1, 10, repeats=2).sample(0, 2)
        self.check(served, [[0, 2, 1, 3, 4][i] for i in order for _ in range(2)])

    def test_of_the_device_are_put_together_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Away:
            """As much of a CuPy array as it takes; NumPy cannot have it."""

            def __init__(self, values: np.ndarray) -> None:
                self.values = values

            def __getattr__(self, name: str) -> Any:
                return getattr(self.values, name)

            def __array__(self, *args: object) -> np.ndarray:
                raise TypeError("Implicit conversion to a NumPy array is not allowed")

            def __getitem__(self, place: Any) -> "Away":
                return Away(self.values[place])

            def __setitem__(self, place: Any, value: "Away") -> None:
                self.values[place] = value.values

            def __len__(self) -> int:
                return len(self.values)

            def reshape(self, *shape: Any) -> "Away":
                return Away(self.values.reshape(*shape))

        class OnDevice(Photographs):
            def batch(self, indices: np.ndarray, epoch: int) -> tuple[Any, ...]:
                images = data.ImageBatch.of([self[i][0] for i in indices.tolist()])
                return data.ImageBatch(Away(images.pixels), images.offsets, images.sizes, 3), indices

        cupy = types.ModuleType("cupy")
        cupy.ndarray = Away  # type: ignore[attr-defined]
        cupy.zeros = lambda *args: Away(np.zeros(*args))  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        for sizes in (self.SIZES, [(4, 5, 3)] * 5):
            whole = OnDevice(list(sizes))
            parts = data.ConcatDataset(*(data.ResampleDataset(whole, chosen) for chosen in ([0, 3], [1, 2], [4])))
            for images, labels in (
                data.fetch(parts, [3, 4, 0, 1]),
                data.DistributedDataset(whole, 0, 1, 10, repeats=2, seed=None).sample(0, 0),
            ):
                assert isinstance(images.pixels, Away)
                for place, label in enumerate(labels.tolist()):
                    expected = np.full(sizes[label], label + 1)
                    np.testing.assert_array_equal(images.image(place).values, expected)

    def test_through_a_transform_of_another_field(self) -> None:
        class Later:
            def __call__(self, batch: np.ndarray, draws: data.Draws) -> np.ndarray:
                return batch + 10

        dataset = data.TransformDataset(Photographs(list(self.SIZES)), None, Later())
        image, label = dataset[1]
        assert (image.shape, image[0, 0, 0], label) == ((7, 2, 3), 2, 11)

    def test_what_is_no_image_is_refused(self) -> None:
        for sizes in ([(4, 5, 3), (4, 5, 1)], [(3, 5, 7), (3, 6, 7)], [(2, 2, 3), (0, 2, 3)]):
            with pytest.raises(
                ValueError, match=r"field 0 of sample 1 is .*: a batch needs equal shapes, or uint8 images"
            ):
                data.fetch(Photographs(sizes), [0, 1])

    def test_a_batch_of_them_is_no_sample(self) -> None:
        batched = data.BatchDataset(Photographs(list(self.SIZES)), 2)
        with pytest.raises(TypeError, match="field 0 of sample 0 is an ImageBatch"):
            data.fetch(batched, [0, 1])


class TestCompositions:
    """Errors and edges; what they serve is in test_epochs.py."""

    def test_merge(self) -> None:
        merged = data.MergeDataset(Squares(), data.TensorDataset(np.arange(11) * 3))
        assert [float(np.mean(field)) for field in merged[4]] == [4, 16, 2, 12]
        with pytest.raises(ValueError, match=r"datasets must have one length, not \[11, 9, 11\]"):
            data.MergeDataset(Squares(), data.TensorDataset(np.arange(9)), Squares())
        with pytest.raises(ValueError, match="datasets must be at least one"):
            data.MergeDataset()

    def test_concat(self) -> None:
        empty = data.TensorDataset(np.zeros(0), np.zeros(0))
        two = data.TensorDataset(np.array([1.0, 2.0]), np.array([5, 6]))
        joined = data.ConcatDataset(empty, two, empty, empty, two, empty)
        assert len(joined) == 4
        np.testing.assert_array_equal(data.fetch(joined, [3, 0, 2, 1])[1], [6, 5, 5, 6])
        assert [sample[1] for sample in joined] == [5, 6, 5, 6]
        assert len(data.ConcatDataset(empty)) == 0
        with pytest.raises(ValueError, match="datasets must be at least one"):
            data.ConcatDataset()
        with pytest.raises(ValueError, match="sample 2 has 3 fields, sample 0 has 2"):
            data.fetch(data.ConcatDataset(two, Squares()), [0, 2])
        with pytest.raises(ValueError, match=r"field 0 of sample 1 is \(2,\), of sample 0 \(3,\)"):
            data.fetch(data.ConcatDataset(*(data.TensorDataset(np.zeros((1, n))) for n in (3, 2))), [0, 1])

    def test_a_batch_that_loses_a_sample_is_named(self) -> None:
        class Losing(data.TensorDataset):
            def batch(self, indices: np.ndarray, epoch: int) -> tuple[np.ndarray, ...]:
                return super().batch(indices[:-1], epoch)

        whole, losing = data.TensorDataset(np.arange(3)), Losing(np.arange(3))
        for dataset in (
            data.ConcatDataset(whole, losing),
            data.MergeDataset(whole, losing),
            data.TransformDataset(losing, data.Flip()),
        ):
            with pytest.raises(ValueError, match=r"field \d has \d rows for the [23] samples asked for"):
                data.fetch(dataset, [0, len(dataset) - 1, len(dataset) - 2])
        # Nobody needs to know which one is missing.
        assert len(data.BatchDataset(losing, 3)[0][0]) == 2

    @pytest.mark.parametrize("value", [32, None, "16"])
    def test_attributes_of_a_foreign_data_set_are_its_own(self, value: object) -> None:
        class Named(Squares):
            pass

        foreign = Named()
        for name in ("batch", "batch_kept", "set_epoch", "numbers", "serves_batches", "epoch", "draws", "indices"):
            setattr(foreign, name, value)
        chain = data.ShuffleDataset(data.TransformDataset(foreign, None))
        chain.set_epoch(3)
        assert data.fetch(chain, [0, 1], 3)[1].tolist() == [i * i for i in data.epoch_order(11, 0, 3)[:2]]
        assert len(chain[0]) == 3

    def test_resample(self) -> None:
        chosen = [3, -1, 3]
        picked = data.ResampleDataset(Squares(), chosen)
        chosen[0] = 0
        assert [sample[1] for sample in picked] == [9, 100, 9]
        backwards = data.ResampleDataset(Squares(), lambda index: 10 - index)
        assert [sample[1] for sample in pickle.loads(pickle.dumps(backwards))] == [i * i for i in range(10, -1, -1)]
        assert len(data.ResampleDataset(Squares(), lambda index: index // 2, 22)) == 22
        assert len(data.ResampleDataset(Squares(), [])) == 0
        with pytest.raises(IndexError, match="index 11 is out of range for 11 samples"):
            data.ResampleDataset(Squares(), [0, 11])
        with pytest.raises(IndexError, match="index 11 is out of range for 11 samples"):
            data.ResampleDataset(Squares(), lambda index: index + 1)
        with pytest.raises(TypeError, match="integers"):
            data.ResampleDataset(Squares(), [0.5])
        with pytest.raises(TypeError):
            data.ResampleDataset(Squares(), lambda index: index / 2)  # type: ignore[arg-type, return-value]
        with pytest.raises(ValueError, match="length 3 is for a function"):
            data.ResampleDataset(Squares(), [0], 3)
        with pytest.raises(ValueError, match="length must not be negative, not -1"):
            data.ResampleDataset(Squares(), lambda index: index, -1)

    def test_copies_of_a_resampled_sample(self) -> None:
        leaf = data.TensorDataset(np.zeros((1, 1, 9, 9), np.uint8) + np.arange(81, dtype=np.uint8).reshape(9, 9))
        crop = data.PadCrop(4)
        inside = data.fetch(data.ResampleDataset(data.TransformDataset(leaf, crop), [0] * 8), range(8))[0]
        outside = data.fetch(data.TransformDataset(data.ResampleDataset(leaf, [0] * 8), crop), range(8))[0]
        assert len(np.unique(inside, axis=0)) == 1
        assert len(np.unique(outside, axis=0)) > 4

    def test_changes_are_the_same_before_and_after_a_shuffle(self, rng: np.random.Generator) -> None:
        leaf = data.TensorDataset(rng.integers(0, 256, (20, 1, 6, 6), np.uint8))
        before = data.ShuffleDataset(data.TransformDataset(leaf, data.PadCrop(2), seed=1), seed=2)
        after = data.TransformDataset(data.ShuffleDataset(leaf, seed=2), data.PadCrop(2), seed=1)
        for epoch in (0, 3):
            found = data.fetch(before, range(20), epoch)[0]
            np.testing.assert_array_equal(found, data.fetch(after, range(20), epoch)[0])
            plain = data.fetch(data.TransformDataset(leaf, data.PadCrop(2), seed=1), range(20), epoch)[0]
            np.testing.assert_array_equal(found, plain[data.epoch_order(20, 2, epoch)])

    def test_a_transform_without_a_field(self) -> None:
        dataset = data.TransformDataset(data.TensorDataset(np.zeros(3)), None, None, data.PadCrop(1))
        with pytest.raises(ValueError, match=r"transforms\[2\] has no field: the samples have 1"):
            dataset[0]
        assert data.TransformDataset(data.TensorDataset(np.zeros(3)), None, None)[0] == (0,)


class TestStreams:
    """Which stream of random numbers each of composed transforms draws from."""

    @staticmethod
    def streams(count: int, shape: Any, stream: int = 0) -> list[int]:
        """Composes `count` transforms in the shape that a function of the list gives; returns their streams."""
        seen: list[int] = []

        def see(batch: np.ndarray, draws: data.Draws) -> np.ndarray:
            seen.append(draws.stream)
            return batch

        shape([see] * count)(np.zeros(1), data.Draws(0, 0, np.arange(1), stream))
        return seen

    def test_as_ever_for_a_few_side_by_side(self) -> None:
        assert self.streams(16, lambda see: data.Compose(*see), 512) == list(range(512, 528))

    def test_composed_ones_have_streams_of_their_own(self) -> None:
        compose = data.Compose
        for shape in (
            lambda see: compose(compose(*see[:2]), *see[2:]),
            lambda see: compose(see[0], compose(see[1], compose(), compose(*see[2:5])), *see[5:]),
        ):
            assert self.streams(7, shape) == list(range(7))

    def test_one_that_calls_them_itself_is_one(self) -> None:
        class Twice(data.Compose):
            def __call__(self, batch: np.ndarray, draws: data.Draws) -> np.ndarray:
                return super().__call__(super().__call__(batch, draws), draws)

        assert self.streams(3, lambda see: data.Compose(Twice(*see[:2]), see[2])) == [0, 1, 0, 1, 1]

    def test_as_many_as_there_may_be_never_meet(self) -> None:
        """Each may be an `Augment`, which draws from twelve streams 16 apart; and fields are apart by 256."""
        seen = [
            stream + 16 * step
            for field in range(256)
            for stream in self.streams(256, lambda see: data.Compose(*see), 256 * field)
            for step in range(12)
        ]
        assert len(set(seen)) == len(seen)
        assert max(seen) < 2**20
        with pytest.raises(ValueError, match="transforms must be at most 256, not 257"):
            self.streams(257, lambda see: data.Compose(data.Compose(*see[1:]), see[0]))
        first, last = (data.Draws(1, 2, np.arange(5), stream).uniform() for stream in (0, max(seen)))
        assert not (first == last).any()


class TestTransforms:
    def test_some_of_the_samples(self) -> None:
        rows = np.array([4, 0, 2])
        for epoch in (3, np.array([3, 3, 9, 4, 2**33])):
            draws = data.Draws(7, epoch, np.arange(10, 15), 5)
            np.testing.assert_array_equal(draws.take(rows).uniform(), draws.uniform()[rows])
            assert (draws.take(rows).seed, draws.take(rows).stream) == (7, 5)

    def test_normalize(self, rng: np.random.Generator) -> None:
        images = rng.integers(0, 256, (5, 3, 4, 6), np.uint8)
        mean, std = data.channel_statistics(images)
        result = data.Normalize(mean, std)(images, data.Draws(0, 0, np.arange(5)))
        assert result.dtype == np.float32
        expected = (images / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
        np.testing.assert_allclose(result, expected, atol=1e-5)
        np.testing.assert_allclose(result.mean((0, 2, 3)), 0, atol=1e-5)
        np.testing.assert_allclose(result.std((0, 2, 3)), 1, atol=1e-5)

    def test_normalize_refuses(self) -> None:
        with pytest.raises(ValueError, match="one number a channel"):
            data.Normalize([0.5], [0.5, 0.5])
        with pytest.raises(ValueError, match="std must be positive"):
            data.Normalize([0.5], [0.0])
        draws = data.Draws(0, 0, np.arange(1))
        with pytest.raises(TypeError, match="uint8, not float32"):
            data.Normalize([0.5], [1.0])(np.zeros((1, 1, 2, 2), np.float32), draws)
        with pytest.raises(ValueError, match=r"\(N, 1, H, W\), not \(1, 3, 2, 2\)"):
            data.Normalize([0.5], [1.0])(np.zeros((1, 3, 2, 2), np.uint8), draws)

    def test_a_channel_without_change(self) -> None:
        assert data.channel_statistics(np.full((2, 1, 3, 3), 51, np.uint8)) == ((0.2,), (1.0,))

    def test_pad_crop_shifts(self, rng: np.random.Generator) -> None:
        images = rng.integers(1, 256, (64, 2, 5, 7), np.uint8)
        result = data.PadCrop(2)(images, data.Draws(1, 0, np.arange(64)))
        padded = np.pad(images, ((0, 0), (0, 0), (2, 2), (2, 2)))
        places = set()
        for image, changed in zip(padded, result, strict=True):
            found = [
                (top, left)
                for top in range(5)
                for left in range(5)
                if np.array_equal(image[:, top : top + 5, left : left + 7], changed)
            ]
            assert len(found) == 1
            places.add(found[0])
        assert {top for top, _ in places} == {left for _, left in places} == {0, 1, 2, 3, 4}

    def test_flip(self, rng: np.random.Generator) -> None:
        images = rng.integers(0, 256, (400, 1, 3, 4), np.uint8)
        before = images.copy()
        result = data.Flip()(images, data.Draws(1, 0, np.arange(400)))
        np.testing.assert_array_equal(images, before)
        flipped = (result == images[..., ::-1]).all((1, 2, 3))
        assert ((result == images).all((1, 2, 3)) | flipped).all()
        assert 140 < flipped.sum() < 260

    def test_a_samples_numbers_are_its_own(self) -> None:
        whole = data.Draws(3, 2, np.arange(100))
        part = data.Draws(3, 2, np.array([17, 99, 4]))
        np.testing.assert_array_equal(part.uniform(), whole.uniform()[[17, 99, 4]])
        others = [data.Draws(4, 2, np.arange(100)), data.Draws(3, 1, np.arange(100)), whole.with_stream(1)]
        for other in others:
            assert not (other.uniform() == whole.uniform()).any()
        assert ((whole.uniform() >= 0) & (whole.uniform() < 1)).all()

    def test_transform_dataset(self, rng: np.random.Generator) -> None:
        images = rng.integers(0, 256, (20, 1, 6, 6), np.uint8)
        labels = np.arange(20)
        changed = data.TransformDataset(
            data.TensorDataset(images, labels), data.Compose(data.PadCrop(1), data.Flip()), seed=9
        )
        first = data.fetch(changed, np.arange(20), epoch=0)
        np.testing.assert_array_equal(first[1], labels)
        parts = list(data.batches(changed, 7, epoch=0))
        np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), first[0])
        assert (data.fetch(changed, np.arange(20), epoch=1)[0] != first[0]).any()
        np.testing.assert_array_equal(changed[5][0], first[0][5])
        assert changed[-1][1] == 19


class TestIdx:
    @pytest.mark.parametrize("suffix", ["", ".gz"])
    def test_round_trip(self, tmp_path: Path, rng: np.random.Generator, suffix: str) -> None:
        array = rng.integers(0, 256, (5, 3, 2), np.uint8)
        write_idx(tmp_path / f"x{suffix}", array)
        read = data.read_idx(tmp_path / f"x{suffix}", 3)
        np.testing.assert_array_equal(read, array)
        assert read.flags.writeable

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "truncated: 0 bytes"),
            (b"\0\0\x08", "truncated: 3 bytes"),
            (b"\0\0\x0d\x03" + bytes(12), "magic number 0x00000d03, expected 0x00000803"),
            (b"\0\0\x08\x01" + bytes(12), "magic number 0x00000801, expected 0x00000803"),
            (b"\0\0\x08\x03" + bytes(11), "truncated: the idx header needs 16 bytes, the file has 15"),
            (b"\0\0\x08\x03" + struct.pack(">3I", 2, 2, 2) + bytes(7), "truncated: shape .* needs 8 .* has 7"),
            (b"\0\0\x08\x03" + struct.pack(">3I", 2, 2, 2) + bytes(9), "too long: shape .* needs 8 .* has 9"),
            (b"\0\0\x08\x03" + b"\xff" * 12 + bytes(9), "truncated: shape"),
        ],
    )
    def test_broken_files_are_named(self, tmp_path: Path, content: bytes, message: str) -> None:
        path = tmp_path / "train-images"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path}: {message}"):
            data.read_idx(path, 3)

    def test_broken_gzip_is_named(self, tmp_path: Path) -> None:
        whole = gzip.compress(b"\0\0\x08\x01" + struct.pack(">I", 4000) + bytes(4000))
        cases = {"cut.gz": whole[:-20], "no.gz": b"hello there", "bits.gz": whole[:12] + b"\xff" * 20}
        for name, content in cases.items():
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ValueError, match=f"{name}: not a whole gzip file"):
                data.read_idx(tmp_path / name, 1)


class TestFashionMnist:
    def test_reads_both_kinds_of_files(self, tmp_path: Path, rng: np.random.Generator) -> None:
        arrays = write_fashion(tmp_path, rng)
        split = data.fashion_mnist(tmp_path)
        assert (len(split.train), len(split.test), len(split.classes)) == (30, 7, 10)
        assert split.image_shape == (1, 28, 28)
        images, labels = data.fetch(split.test, np.arange(7))
        assert images.shape == (7, 1, 28, 28)
        assert (images.dtype, labels.dtype) == (np.float32, np.int64)
        np.testing.assert_array_equal(labels, arrays["t10k-labels-idx1-ubyte"])
        mean, std = arrays["train-images-idx3-ubyte"].mean(), arrays["train-images-idx3-ubyte"].std()
        np.testing.assert_allclose(images[:, 0], (arrays["t10k-images-idx3-ubyte"] - mean) / std, atol=1e-4)

    def test_missing_says_what_to_install(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte.*apt install dataset-fashion-mnist"):
            data.fashion_mnist(tmp_path)

    def test_counts_and_labels(self, tmp_path: Path, rng: np.random.Generator) -> None:
        write_fashion(tmp_path, rng)
        labels = tmp_path / "train-labels-idx1-ubyte.gz"
        write_idx(labels, np.zeros(29, np.uint8))
        with pytest.raises(ValueError, match=r"has 30 images, .* has 29 labels"):
            data.fashion_mnist(tmp_path)
        write_idx(labels, np.full(30, 10, np.uint8))
        with pytest.raises(ValueError, match=r"train-labels.*labels\[0\] is 10"):
            data.fashion_mnist(tmp_path)
        write_idx(labels, np.zeros(30, np.uint8))
        write_idx(tmp_path / "t10k-images-idx3-ubyte", np.zeros((7, 20, 28), np.uint8))
        with pytest.raises(ValueError, match=r"\(28, 28\) for training, of \(20, 28\) for the test"):
            data.fashion_mnist(tmp_path)


class TestDigits:
    def test_split(self) -> None:
        pytest.importorskip("sklearn")
        split = data.digits()
        assert (len(split.train), len(split.test)) == (1437, 360)
        assert split.image_shape == (1, 8, 8)
        images, labels = data.fetch(split.test, np.arange(360))
        assert np.bincount(labels).min() >= 20
        again, _ = data.fetch(data.digits(5).test, np.arange(360))
        np.testing.assert_array_equal(images, again)

    def test_missing_scikit_learn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "sklearn", None)
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
        with pytest.raises(FlcudaError, match=r"pip install 'flcuda\[demo\]'"):
            data.digits()


def test_synthetic() -> None:
    split = data.synthetic(150, (3, 5, 4), 7)
    assert (len(split.train), len(split.test), len(split.classes)) == (150, 18, 7)
    images, labels = data.fetch(split.train, np.arange(150))
    assert images.shape == (150, 3, 5, 4)
    assert set(labels) == set(range(7))
    np.testing.assert_array_equal(images[:22], images[128:])
    np.testing.assert_array_equal(split.train[130][0], images[2])
    with pytest.raises(ValueError, match="count must be at least 1, not 0"):
        data.synthetic(0)
