"""PyTorch's own map-style data sets inside of the package's."""

import numpy as np
import pytest

from flcuda import data

torch = pytest.importorskip("torch")
from torch.utils import data as torch_data  # noqa: E402 - there may be no torch

pytestmark = pytest.mark.peer


def test_tensors_subsets_and_concatenations() -> None:
    values = torch.arange(40, dtype=torch.float32).reshape(10, 4)
    labels = torch.arange(10)
    whole = torch_data.TensorDataset(values, labels)
    half = torch_data.Subset(whole, [9, 7, 5, 3, 1])
    both = torch_data.ConcatDataset([whole, half])
    expected = [*range(10), 9, 7, 5, 3, 1]
    dataset = data.BatchDataset(data.ShuffleDataset(both, seed=3), 4)
    assert len(dataset) == 4
    for epoch in range(3):
        dataset.set_epoch(epoch)
        parts = list(dataset)
        assert all(isinstance(field, np.ndarray) for part in parts for field in part)
        order = data.epoch_order(15, 3, epoch)
        np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), np.array(expected)[order])
        np.testing.assert_array_equal(
            np.concatenate([part[0] for part in parts]), values.numpy()[np.array(expected)[order]]
        )


def test_ranks_and_pytorch_sampler_agree_on_the_counts() -> None:
    whole = torch_data.TensorDataset(torch.arange(23))
    served = []
    for rank in range(4):
        part = data.DistributedDataset(whole, rank, 4, 3)
        served += [value for step, (values,) in enumerate(part) for value in values[: part.count(step)].tolist()]
    assert sorted(served) == list(range(23))
    # PyTorch's sampler pads to equal lengths with samples that are then counted twice.
    sampler = torch_data.distributed.DistributedSampler(whole, 4, 0)
    assert len(sampler) * 4 == 24


def test_the_package_s_data_set_in_a_pytorch_loader() -> None:
    dataset = data.ShuffleDataset(data.TensorDataset(np.arange(12), np.arange(12.0)), seed=1)
    dataset.set_epoch(2)
    loader = torch_data.DataLoader(dataset, batch_size=5)
    found = torch.cat([first for first, _ in loader]).tolist()
    assert found == data.epoch_order(12, 1, 2).tolist()
