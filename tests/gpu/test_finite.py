"""The search for invalid gradients on CUDA."""

import numpy as np
import pytest
from helpers import TOLERANCES, place
from step_cases import BAD, expected_flags, find, random_storage

from flcuda import kernel_loader
from flcuda.device import DTYPES, cupy
from flcuda.ops import finite
from flcuda.ops.flags import join_flags


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_random_storages_at_every_alignment(dtype: str) -> None:
    for seed in range(40):
        flat, offsets = random_storage(np.random.default_rng(seed), dtype)
        for misalign in range(9):
            found = find(flat, offsets, "cuda", misalign)
            np.testing.assert_array_equal(found, expected_flags(flat, offsets), err_msg=f"{seed} {misalign}")


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_bad_value_at_each_place_and_alignment(dtype: str) -> None:
    offsets = [0, 4, 4, 30, 40]
    for misalign in range(9):
        for position in range(40):
            flat = np.ones(40, DTYPES[dtype])
            flat[position] = BAD[(position + misalign) % len(BAD)]
            found = find(flat, offsets, "cuda", misalign)
            np.testing.assert_array_equal(found, expected_flags(flat, offsets), err_msg=f"{position} {misalign}")


def test_no_arrays_and_nothing_bad() -> None:
    np.testing.assert_array_equal(find(np.ones(3, np.float32), [0], "cuda"), [0, 0])
    np.testing.assert_array_equal(find(np.empty(0, np.float32), [0, 0, 0], "cuda"), [0, 2, 0, 0])


def test_a_large_storage_full_of_nan_and_with_a_single_one() -> None:
    sizes = np.full(110, 200_000)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    flat = cupy().zeros(int(offsets[-1]), np.float32)
    flags = cupy().empty(112, np.int32)
    place_ = place(offsets, "cuda")
    flat[12_345_678] = np.nan
    finite.find_invalid(flat, place_, flags)
    expected = np.zeros(112, np.int32)
    expected[[0, 2 + 61]] = 1
    expected[1] = 61
    np.testing.assert_array_equal(flags.get(), expected)
    flat[...] = np.inf
    finite.find_invalid(flat, place_, flags)
    np.testing.assert_array_equal(flags.get(), [1, 0, *[1] * 110])
    flat[...] = 3e38
    finite.find_invalid(flat, place_, flags)
    np.testing.assert_array_equal(flags.get(), [0, 110, *[0] * 110])


def test_flags_of_many_storages_are_joined_in_a_capture(rng: np.random.Generator) -> None:
    sizes = [3, 1, 0, 5, 2, 1, 4, 1, 1, 2, 7, 1]
    parts = [cupy().zeros(2 + size, np.int32) for size in sizes]
    out = cupy().zeros(2 + sum(sizes), np.int32)
    join_flags(parts, out)
    cupy().cuda.runtime.deviceSynchronize()
    with cupy().cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        join_flags(parts, out)
        graph = stream.end_capture()
        for bad in ([], [11], [10, 3, 0], [7]):
            expected = [int(bool(bad)), sum(sizes)]
            for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
                values = rng.permutation(size) < 1 if number in bad else np.zeros(size, bool)
                part.set(np.array([values.any(), values.argmax() if values.any() else size, *values], np.int32))
                expected += values.tolist()
            if bad:
                expected[1] = expected[2:].index(True)
            graph.launch(stream)
            stream.synchronize()
            np.testing.assert_array_equal(out.get(), expected)


def test_fast_math_cannot_remove_the_test() -> None:
    fast = kernel_loader.new_module(
        "finite", kernel_loader.source("finite"), (*kernel_loader.options(), "--use_fast_math")
    )
    for dtype, kind in (("float16", "f16"), ("bfloat16", "bf16"), ("float32", "f32"), ("float64", "f64")):
        for value in BAD:
            flat = np.ones(77, DTYPES[dtype])
            flat[50] = value
            flags = place(np.array([0, 2, 0, 0], np.int32), "cuda")
            arguments = (flags, place(flat, "cuda"), place(np.array([0, 20, 77]), "cuda"), np.int64(2))
            fast.get_function(f"find_invalid_{kind}")((1,), (256,), arguments)
            np.testing.assert_array_equal(flags.get(), [1, 1, 0, 1])
