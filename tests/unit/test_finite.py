"""The search for invalid gradients on the CPU device."""

import numpy as np
import pytest
from helpers import TOLERANCES
from step_cases import BAD, expected_flags, find, random_storage

from flcuda.device import DTYPES
from flcuda.ops import finite


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_random_storages(dtype: str) -> None:
    for seed in range(60):
        flat, offsets = random_storage(np.random.default_rng(seed), dtype)
        np.testing.assert_array_equal(find(flat, offsets, "cpu"), expected_flags(flat, offsets), err_msg=str(seed))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("value", BAD)
def test_each_bad_value_at_each_place(dtype: str, value: float) -> None:
    for position in range(9):
        flat = np.ones(9, DTYPES[dtype])
        flat[position] = value
        segment = [0, 0, 0, 0, 2, 2, 2, 2, 4][position]
        flags = [1, segment, 0, 0, 0, 0, 0]
        flags[2 + segment] = 1
        # arrays 1 and 3 are empty
        np.testing.assert_array_equal(find(flat, [0, 4, 4, 8, 8, 9], "cpu"), flags)


def test_no_arrays_and_nothing_bad() -> None:
    np.testing.assert_array_equal(find(np.ones(3, np.float32), [0], "cpu"), [0, 0])
    np.testing.assert_array_equal(find(np.empty(0, np.float32), [0, 0, 0], "cpu"), [0, 2, 0, 0])


def test_bad_arguments_are_named() -> None:
    flat, offsets, flags = np.ones(4, np.float32), np.array([0, 4]), np.zeros(3, np.int32)
    with pytest.raises(TypeError, match=r"flat: .*int32"):
        finite.find_invalid(np.ones(4, np.int32), offsets, flags)
    with pytest.raises(TypeError, match=r"offsets: .*int32"):
        finite.find_invalid(flat, offsets.astype(np.int32), flags)
    with pytest.raises(TypeError, match=r"flags: .*uint8"):
        finite.find_invalid(flat, offsets, flags.astype(np.uint8))
    with pytest.raises(ValueError, match=r"flags: expected shape \(3,\), got \(2,\)"):
        finite.find_invalid(flat, offsets, flags[:2])
    with pytest.raises(ValueError, match="flat: expected a C-contiguous"):
        finite.find_invalid(np.ones(8, np.float32)[::2], offsets, flags)
    with pytest.raises(ValueError, match="offsets"):
        finite.find_invalid(flat, np.empty(0, np.int64), flags)
    with pytest.raises(ValueError, match="flat: expected one dimension"):
        finite.find_invalid(flat.reshape(2, 2), offsets, flags)
