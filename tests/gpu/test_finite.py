"""The search for invalid gradients on CUDA."""

import itertools
from typing import Any

import numpy as np
import pytest
from helpers import TOLERANCES, place, to_numpy
from step_cases import BAD, expected_flags, expected_flags_of_list, find, random_arrays, random_storage

from flcuda import kernel_loader
from flcuda.device import DTYPES, cupy, device_of
from flcuda.errors import FlcudaError
from flcuda.ops import finite
from flcuda.ops.flags import join_flags


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_random_storages_at_every_alignment(dtype: str) -> None:
    for seed in range(40):
        flat, offsets = random_storage(np.random.default_rng(seed), dtype)
        for misalign in range(9):
            for ticket in (False, True):
                found = find(flat, offsets, "cuda", misalign, ticket)
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


def random_position(generator: np.random.Generator, offsets: np.ndarray) -> tuple[int, int]:
    """An element of a storage, and the array that holds it."""
    position = int(generator.integers(offsets[0], offsets[-1]))
    return position, int(np.searchsorted(offsets, position, side="right") - 1)


def test_a_storage_like_a_network_with_a_ticket_sums_and_neither(rng: np.random.Generator) -> None:
    sizes = rng.choice([64, 64, 128, 512, 9408, 36_864, 147_456, 2_359_296], 60)
    offsets = np.concatenate([[0], np.cumsum(-(-sizes // 64) * 64)])
    flat = cupy().asarray(rng.standard_normal(int(offsets[-1]), np.float32))
    host, place_ = flat.get().astype(np.float64), place(offsets, "cuda")
    wanted = [np.square(host[start:stop]).sum() for start, stop in itertools.pairwise(offsets)]
    ticket = finite.new_ticket(device_of(flat))
    sums = cupy().zeros((2, 60))
    flags = cupy().empty(62, np.int32)
    for round_ in range(2):
        finite.find_invalid(flat, place_, flags, sums=sums[round_])
        np.testing.assert_array_equal(flags.get(), [0, 60, *[0] * 60])
    np.testing.assert_allclose(sums[0].get(), wanted, rtol=1e-12)
    np.testing.assert_array_equal(sums[0].get(), sums[1].get())
    # Back to back, so that one search begins while the one before ends.
    found, expected = [], []
    for number in range(120):
        position, holder = random_position(rng, offsets)
        bad = number % 3 > 0
        kept = flat[position : position + 1].copy()
        if bad:
            flat[position] = BAD[number % len(BAD)]
        flags = cupy().empty(62, np.int32)
        options = ({"ticket": ticket}, {}, {"sums": sums[1]})[number % 7 % 3]
        finite.find_invalid(flat, place_, flags, **options)
        flat[position : position + 1] = kept
        found.append(flags)
        expected.append([int(bad), holder if bad else 60, *(int(bad and i == holder) for i in range(60))])
    np.testing.assert_array_equal(cupy().stack(found).get(), expected)
    assert int(ticket[0]) == 0


def test_more_elements_than_32_bits_count() -> None:
    """2^31 and some halves on a device that has room for them."""
    free, _ = cupy().cuda.runtime.memGetInfo()
    size = min(2**31 + 1001, free // 4)
    flat = cupy().zeros(size, np.float16)
    offsets = np.array([3, 3, 1000, size - 500, size - 2, size])
    flags, sums, ticket = cupy().empty(7, np.int32), cupy().empty(5), finite.new_ticket(device_of(flat))
    flat[-501] = 2
    for position, array in ((size - 1, 4), (size - 3, 3), (size - 501, 2), (999, 1)):
        kept = flat[position].copy()
        flat[position] = np.inf
        for options in ({"ticket": ticket}, {"sums": sums}):
            flags.fill(9)
            finite.find_invalid(flat, place(offsets, "cuda"), flags, **options)
            np.testing.assert_array_equal(flags.get(), [1, array, *(int(i == array) for i in range(5))])
        assert np.isinf(sums.get()).tolist() == [i == array for i in range(5)]
        np.testing.assert_array_equal(finite.find_invalid_list([flat]).get(), [1, 0, 1])
        flat[position] = kept
    finite.find_invalid(flat, place(offsets, "cuda"), flags, sums=sums)
    np.testing.assert_array_equal(flags.get(), [0, 5, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(sums.get(), [0, 0, 4, 0, 0])
    np.testing.assert_array_equal(finite.find_invalid_list([None, flat]).get(), [0, 2, 0, 0])


def unaligned(a: np.ndarray, misalign: int) -> Any:
    """A copy on CUDA, `misalign` elements behind the start of its memory, NaN around it."""
    holder = place(np.full(a.size + 32, np.nan, a.dtype), "cuda")
    part = holder[misalign : misalign + a.size]
    part[...] = place(a.reshape(-1), "cuda")
    return part.reshape(a.shape)


def test_separate_arrays_of_all_kinds(rng: np.random.Generator) -> None:
    table = finite.PointerTable()
    for case in range(80):
        arrays = random_arrays(rng, longest=int(rng.choice([1000, 300_000])))
        placed = [None if a is None else unaligned(np.ascontiguousarray(a), int(rng.integers(0, 9))) for a in arrays]
        if case % 2:
            # The same elements in another order, with gaps and without.
            placed = [a.T if a is not None and a.ndim == 2 else a for a in placed]
        found = [to_numpy(finite.find_invalid_list(placed, table=table)) for _ in range(2)]
        for flags in (*found, to_numpy(finite.find_invalid_list(placed))):
            np.testing.assert_array_equal(flags, expected_flags_of_list(arrays), err_msg=str(case))


def test_arrays_with_gaps_in_between() -> None:
    holder = cupy().ones((40, 64), np.float32)
    holder[1::2] = np.nan
    holder[:, 5] = np.inf
    arrays = [holder[::2, :5], holder[::2], holder[::-2, ::-1], cupy().broadcast_to(holder[:1, :1], (7, 9))]
    np.testing.assert_array_equal(finite.find_invalid_list(arrays).get(), [1, 1, 0, 1, 1, 0])


def test_many_small_arrays(rng: np.random.Generator) -> None:
    flat = cupy().zeros(30_000, np.float32)
    cuts = [0, *np.sort(rng.integers(0, flat.size, 5000)).tolist(), flat.size]
    arrays = [flat[start:stop] for start, stop in itertools.pairwise(cuts)]
    table = finite.PointerTable()
    for position in (0, 17_000, 29_999):
        flat[...] = 0
        flat[position] = np.nan
        flags = finite.find_invalid_list(arrays, table=table).get()
        holder = int(np.searchsorted(cuts, position, side="right") - 1)
        assert flags[:2].tolist() == [1, holder]
        assert np.flatnonzero(flags[2:]).tolist() == [holder]


def test_pytorch_and_dlpack_arrays() -> None:
    torch = pytest.importorskip("torch")
    tensors = [
        torch.ones(3, 5, 7, device="cuda").to(memory_format=torch.contiguous_format),
        None,
        torch.ones(2, 3, 4, 5, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last),
        torch.ones(1001, device="cuda", dtype=torch.bfloat16)[1:],
        torch.ones(0, device="cuda", dtype=torch.float64),
        torch.ones(1001, device="cuda", dtype=torch.float64)[1:],
    ]
    np.testing.assert_array_equal(finite.find_invalid_list(tensors).get(), [0, 6, *[0] * 6])
    for count, which in enumerate((5, 3, 2, 0), 1):
        if which == 2:
            tensors[2][1, 2, 3, 4] = float("nan")
        else:
            tensors[which].view(-1)[-1] = BAD[which % 4]
        expected = [int(i in (5, 3, 2, 0)[:count]) for i in range(6)]
        found = finite.find_invalid_list(tensors).get()
        np.testing.assert_array_equal(found, [1, expected.index(1), *expected], err_msg=str(which))


class OnlyDLPack:
    """An array of a library that nobody knows."""

    def __init__(self, a: Any) -> None:
        self._a = a

    def __dlpack__(self, **options: Any) -> Any:
        return self._a.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._a.__dlpack_device__()


def test_arrays_of_any_library() -> None:
    a = cupy().ones((300, 7), np.float32)
    np.testing.assert_array_equal(finite.find_invalid_list([OnlyDLPack(a), OnlyDLPack(a.T)]).get(), [0, 2, 0, 0])
    a[299, 6] = np.nan
    np.testing.assert_array_equal(finite.find_invalid_list([OnlyDLPack(a[:299]), OnlyDLPack(a)]).get(), [1, 1, 0, 1])


def test_searches_in_a_captured_graph(rng: np.random.Generator) -> None:
    flat = cupy().zeros(1_000_003, np.float32)
    offsets = place(np.array([0, 10, 500_000, 1_000_003]), "cuda")
    arrays = [flat[:10], None, flat[10:]]
    flags, listed, sums = cupy().empty(5, np.int32), cupy().empty(5, np.int32), cupy().empty(3)
    ticket, table = finite.new_ticket(device_of(flat)), finite.PointerTable()
    with_sums = cupy().empty(5, np.int32)

    def search() -> None:
        finite.find_invalid(flat, offsets, flags, ticket=ticket)
        finite.find_invalid(flat, offsets, with_sums, sums=sums)
        finite.find_invalid_list(arrays, listed, table=table)

    pool = cupy().cuda.MemoryPool()
    with cupy().cuda.using_allocator(pool.malloc), cupy().cuda.Stream(non_blocking=True) as stream:
        search()
        stream.synchronize()
        stream.begin_capture()
        try:
            with pytest.raises(FlcudaError, match="before the capture"):
                finite.find_invalid_list(arrays, listed)
            search()
        finally:
            graph = stream.end_capture()
        for position in (None, 3, 700_000, None, 499_999):
            flat[...] = 0.5
            if position is not None:
                flat[position] = np.inf
            graph.launch(stream)
            stream.synchronize()
            holder = 3 if position is None else int(np.searchsorted([10, 500_000], position, side="right"))
            expected = [int(holder < 3), holder, *(int(i == holder) for i in range(3))]
            np.testing.assert_array_equal(flags.get(), expected)
            np.testing.assert_array_equal(with_sums.get(), expected)
            of_list = [0, 3, 0, 0, 0] if position is None else [1, 0, 1, 0, 0] if position < 10 else [1, 2, 0, 0, 1]
            np.testing.assert_array_equal(listed.get(), of_list)
            assert np.isfinite(sums.get()).tolist() == [i != holder for i in range(3)]


def test_two_streams_with_a_ticket_each() -> None:
    streams = [cupy().cuda.Stream(non_blocking=True) for _ in range(2)]
    flats = [cupy().zeros(3_000_000, np.float16) for _ in range(2)]
    flats[1][2_999_999] = np.nan
    offsets = place(np.array([0, 1_000_000, 3_000_000]), "cuda")
    tickets = [finite.new_ticket(device_of(flat)) for flat in flats]
    flags = cupy().empty((2, 100, 4), np.int32)
    cupy().cuda.runtime.deviceSynchronize()
    for i in range(100):
        for k, stream in enumerate(streams):
            with stream:
                finite.find_invalid(flats[k], offsets, flags[k, i], ticket=tickets[k])
    cupy().cuda.runtime.deviceSynchronize()
    np.testing.assert_array_equal(flags[0].get(), np.tile([0, 2, 0, 0], (100, 1)))
    np.testing.assert_array_equal(flags[1].get(), np.tile([1, 1, 0, 1], (100, 1)))


def test_fast_math_cannot_remove_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = kernel_loader.new_module(
        "finite", kernel_loader.source("finite"), (*kernel_loader.options(), "--use_fast_math")
    )

    def launch_fast(_: str, name: str, grid: Any, block: Any, *arguments: Any) -> None:
        fast.get_function(name)(grid, block, tuple(np.uint64(0) if a is None else a for a in arguments))

    monkeypatch.setattr(finite, "launch_blocks", launch_fast)
    for dtype in TOLERANCES:
        for value in BAD:
            flat = np.ones(77, DTYPES[dtype])
            flat[50] = value
            flat[3] = 1e-38 if dtype in ("float32", "bfloat16") else 1
            a, offsets, flags = (
                place(flat, "cuda"),
                place(np.array([0, 20, 77]), "cuda"),
                place(np.zeros(4, "i4"), "cuda"),
            )
            sums = cupy().empty(2)
            for options in ({}, {"ticket": finite.new_ticket(device_of(a))}, {"sums": sums}):
                flags.fill(5)
                finite.find_invalid(a, offsets, flags, **options)
                np.testing.assert_array_equal(flags.get(), [1, 1, 0, 1])
            assert np.isfinite(sums.get()).tolist() == [True, False]
            np.testing.assert_array_equal(finite.find_invalid_list([a[:20], a[20:]]).get(), [1, 1, 0, 1])
