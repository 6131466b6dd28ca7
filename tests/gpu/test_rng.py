"""The CUDA twin of the random numbers."""

import numpy as np
import pytest
from helpers import TOLERANCES, assert_close, to_numpy

from flcuda import kernel_loader, rng
from flcuda.device import DTYPES, Device, cupy
from flcuda.ops.arrays import SUFFIXES


def _fill(kind: str, dtype: str, seed: int, offset: int, n: int) -> np.ndarray:
    out = cupy().zeros(n, DTYPES[dtype])
    kernel_loader.launch(
        "random",
        f"{kind}_fill_{SUFFIXES[DTYPES[dtype]]}",
        n // 4 + 2,
        out,
        np.uint64(seed),
        np.uint64(offset),
        np.uint32(rng.VALUES_STREAM),
        np.int64(n),
    )
    return to_numpy(out)


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 5, 2**64 - 1])
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 4 * 2**32 - 6, 2**50 + 3])
def test_uniform_is_bit_equal(seed: int, offset: int) -> None:
    for n in (1, 2, 5, 4097):
        np.testing.assert_array_equal(_fill("uniform", "float32", seed, offset, n), rng.uniform(seed, offset, n))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_normal_is_equal_within_rounding(dtype: str) -> None:
    for offset in (0, 1, 2, 3):
        found = _fill("normal", dtype, 3, offset, 100_001)
        wanted = rng.normal(3, offset, 100_001).astype(np.float64)
        assert_close(found, wanted, "float32" if dtype == "float64" else dtype)


def test_uniform_in_other_dtypes_rounds() -> None:
    for dtype in ("float16", "bfloat16", "float64"):
        expected = rng.uniform(1, 0, 1000).astype(DTYPES[dtype])
        np.testing.assert_array_equal(_fill("uniform", dtype, 1, 0, 1000), expected)


def test_state_keeps_its_counter_on_the_device() -> None:
    state = rng.State(5, Device("cuda", 0))
    assert isinstance(state.counter, cupy().ndarray)
    assert state.counter.dtype == np.uint64
    np.testing.assert_array_equal(state.counter.get(), [0])
