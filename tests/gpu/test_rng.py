"""The CUDA twin of the random numbers."""

import numpy as np
import pytest
from helpers import TOLERANCES, assert_close, to_numpy

from flcuda import kernel_loader, rng
from flcuda.device import DTYPES, Device, cupy
from flcuda.kernel_loader import SUFFIXES


def _normal(dtype: str, seed: int, offset: int, n: int) -> np.ndarray:
    out = cupy().zeros(n, DTYPES[dtype])
    kernel_loader.launch(
        "random",
        f"normal_fill_{SUFFIXES[DTYPES[dtype]]}",
        n // 4 + 2,
        out,
        np.uint64(seed),
        np.uint64(offset),
        np.uint32(rng.VALUES_STREAM),
        np.int64(n),
    )
    return to_numpy(out)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_normal_is_equal_within_rounding(dtype: str) -> None:
    # The last two: where the low word of the block counter runs over, and far beyond.
    for offset in (0, 1, 2, 3, 4 * 2**32 - 6, 2**50 + 3):
        found = _normal(dtype, 3, offset, 100_001)
        wanted = rng.normal(3, offset, 100_001).astype(np.float64)
        assert_close(found, wanted, "float32" if dtype == "float64" else dtype)


def test_state_keeps_its_counter_on_the_device() -> None:
    state = rng.State(5, Device("cuda", 0))
    assert isinstance(state.counter, cupy().ndarray)
    assert state.counter.dtype == np.uint64
    np.testing.assert_array_equal(state.counter.get(), [0])
