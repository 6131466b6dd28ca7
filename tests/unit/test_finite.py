"""The search for invalid gradients: on the CPU device, its kernels on a processor, and the text of its kernels."""

import ctypes
import math
import re
from types import SimpleNamespace
from typing import Any

import host_kernels
import numpy as np
import pytest
from helpers import TOLERANCES
from step_cases import BAD, expected_flags, expected_flags_of_list, find, random_arrays, random_storage

from flcuda import kernel_loader, reference
from flcuda.device import DTYPES
from flcuda.errors import FlcudaError
from flcuda.ops import finite, flags
from flcuda.ops.flags import join_flags

DATA_TYPES = tuple(TOLERANCES)


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


def test_sums_of_squares_are_those_of_the_stored_values() -> None:
    flat = np.array([9, 3e30, 4, np.inf, 1, np.nan, 60000], np.float32)
    sums = np.full(4, 7.0)
    finite.find_invalid(flat, np.array([1, 3, 3, 4, 6]), np.zeros(6, np.int32), sums=sums)
    np.testing.assert_array_equal(sums, [float(np.float32(3e30)) ** 2 + 16, 0, np.inf, np.nan])
    halves = np.full(2000, 60000, np.float16)
    finite.find_invalid(halves, np.array([0, 2000]), np.zeros(3, np.int32), sums=sums[:1])
    assert sums[0] == 2000 * 60000.0**2


def test_separate_arrays_on_the_cpu() -> None:
    generator = np.random.default_rng(0)
    for _ in range(40):
        arrays = random_arrays(generator)
        found = np.full(2 + len(arrays), 9, np.int32)
        assert finite.find_invalid_list(arrays, found) is found
        np.testing.assert_array_equal(found, expected_flags_of_list(arrays))
        np.testing.assert_array_equal(finite.find_invalid_list(arrays), found)


def test_no_separate_arrays() -> None:
    np.testing.assert_array_equal(finite.find_invalid_list([]), [0, 0])
    np.testing.assert_array_equal(finite.find_invalid_list([None, None]), [0, 2, 0, 0])


def test_arrays_of_another_library_are_taken() -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.ones(3, 4).T, None, torch.tensor([1.0, math.inf], dtype=torch.bfloat16), torch.ones(0)]
    np.testing.assert_array_equal(finite.find_invalid_list(tensors), [1, 2, 0, 0, 1, 0])


def test_bad_separate_arrays_are_named() -> None:
    with pytest.raises(TypeError, match=r"arrays\[1\]: .*int64"):
        finite.find_invalid_list([np.ones(3), np.ones(2, np.int64)])
    with pytest.raises(TypeError, match=r"arrays\[0\]: .*list"):
        finite.find_invalid_list([[1.0, 2.0]])
    with pytest.raises(ValueError, match=r"flags: expected shape \(3,\), got \(4,\)"):
        finite.find_invalid_list([np.ones(3)], np.zeros(4, np.int32))
    with pytest.raises(TypeError, match=r"flags: .*int64"):
        finite.find_invalid_list([np.ones(3)], np.zeros(3, np.int64))


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
    with pytest.raises(TypeError, match=r"sums: .*float32"):
        finite.find_invalid(flat, offsets, flags, sums=np.zeros(1, np.float32))
    with pytest.raises(ValueError, match=r"sums: expected shape \(1,\), got \(2,\)"):
        finite.find_invalid(flat, offsets, flags, sums=np.zeros(2))
    with pytest.raises(TypeError, match=r"ticket: .*int32"):
        finite.find_invalid(flat, offsets, flags, ticket=np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="parts: expected at least one"):
        join_flags([], flags)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_numbers_that_only_unscaling_makes_infinite_count(dtype: str) -> None:
    check_unscaling(dtype, np.asarray)


def check_unscaling(dtype: str, put: Any) -> None:
    """By elements, to the last bit, not by sums; the largest finite scale too."""
    wide = np.float64 if dtype == "float64" else np.float32
    most = np.finfo(wide).max
    generator = np.random.default_rng(7)
    flat = generator.normal(size=900).astype(DTYPES[dtype])
    offsets = np.array([0, 3, 3, 500, 900])
    largest = np.array(1.0, DTYPES[dtype]).view({2: np.uint16, 4: np.uint32, 8: np.uint64}[flat.itemsize])
    exponents = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF0000000000000}
    largest = largest.dtype.type(exponents[dtype] - 1).reshape(1).view(DTYPES[dtype])[0]
    for scale in (2.0**-10, 1.0, 2.0, 3.7, 1e4, 2.0**126):
        with np.errstate(over="ignore"):
            edge = min(float(largest), float(most) / scale)
            number = np.array([edge]).astype(DTYPES[dtype])[0]
            for value in (number, np.nextafter(number, flat.dtype.type(0)), number * flat.dtype.type(1.01), largest):
                flat[[1, 2]] = 1.0
                flat[77] = -value if np.isfinite(value) else 1.0
                bad = not np.isfinite(flat[77].astype(wide) * wide(scale))
                found = put(np.zeros(6, np.int32))
                arguments = put(flat), put(offsets), found
                finite.find_invalid(*arguments, inv_scale=put(np.array([scale])))
                np.testing.assert_array_equal(found, [bad, 2 if bad else 4, 0, 0, bad, 0], err_msg=f"{scale} {value}")
                finite.find_invalid(*arguments, inv_scale=put(np.array([scale])), sums=put(np.zeros(4)))
                np.testing.assert_array_equal(found, [bad, 2 if bad else 4, 0, 0, bad, 0], err_msg=f"{scale} {value}")
        flat[1] = np.nan
        finite.find_invalid(put(flat), put(offsets), found, inv_scale=put(np.array([scale])))
        assert found[0] == found[2] == 1


# --- how the work is shared -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiprocessors", [1, 3, 132])
def test_pieces_are_all_elements_once(multiprocessors: int) -> None:
    generator = np.random.default_rng(multiprocessors)
    suffixes, itemsizes = ("f16", "bf16", "f32", "f64"), (2, 2, 4, 8)
    for case in range(60):
        parts: list[tuple[int, int, str] | None] = []
        address = 1 << 40
        for _ in range(generator.integers(0, 20)):
            kind = int(generator.integers(0, 4))
            count = int(generator.choice([0, 1, 63, 64, 65, 300, 5000, 1_000_000, 3_000_000_000], p=[1 / 9] * 9))
            address += int(generator.integers(0, 9)) * itemsizes[kind]
            address += -address % itemsizes[kind]
            parts.append(None if generator.random() < 0.2 else (address, count, suffixes[kind]))
            address += count * itemsizes[kind]
        pieces, blocks = finite.pieces_of(parts, multiprocessors)
        assert 1 <= blocks <= 4 * multiprocessors
        seen: list[list[tuple[int, int]]] = [[] for _ in parts]
        rows = []
        visited = 0
        for warp in range(8 * blocks):
            place = warp
            rows.append(0)
            while place >= 0:
                visited += 1
                piece = pieces[place]
                if piece["array"] >= 0:
                    size = itemsizes[piece["format"]]
                    assert suffixes[piece["format"]] == parts[piece["array"]][2]
                    seen[piece["array"]].append((int(piece["start"]), int(piece["count"]) * size))
                    rows[-1] += -(-(int(piece["start"]) % 16 + int(piece["count"]) * size) // 512)
                else:
                    assert piece["count"] == 0
                place = int(piece["next"])
        assert visited == len(pieces), case
        assert max(rows) - min(rows) <= 1
        for part, places in zip(parts, seen, strict=True):
            end = 0 if part is None else part[0]
            for start, nbytes in sorted(places):
                assert start == end
                assert nbytes > 0
                end += nbytes
            if part is not None:
                assert end == part[0] + part[1] * itemsizes[suffixes.index(part[2])]


def test_rows_of_large_storages() -> None:
    for count in (1, 2**31 + 5, 2**40):
        work = finite.Work(1 << 20 | 14, count, 2, 132)
        assert work.lead == 7
        assert (work.rows - 1) * 256 < count + 7 <= work.rows * 256
        assert work.quotient * work.blocks * 8 + work.remainder == work.rows
        assert 0 <= work.remainder < work.blocks * 8


# --- the kernels on a processor ---------------------------------------------------------------------------------------


class HostArray(np.ndarray):
    """A NumPy array with CuPy's way to its address."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


def on_host(a: np.ndarray, misalign: int = 0) -> HostArray:
    """A copy that starts `misalign` elements behind a 16-byte boundary, with NaN or other rubbish around it."""
    holder = np.full(a.nbytes + 64, 0xFF, np.uint8)
    start = -holder.ctypes.data % 16 + 16 + misalign * a.itemsize
    placed = holder[start : start + a.nbytes].view(a.dtype)
    placed[...] = a.reshape(-1)
    return placed.reshape(a.shape).view(HostArray)


def empty(shape: int | tuple[int, ...], dtype: Any = np.float64) -> HostArray:
    return on_host(np.full(np.prod(shape) * np.dtype(dtype).itemsize, 0x7F, np.uint8).view(dtype).reshape(shape))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return host_kernels.build("finite", tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def launches(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has the ops take NumPy arrays for those of a GPU with one multiprocessor; the kernels that were launched."""
    names: list[str] = []

    def launch_blocks(_: str, name: str, grid: tuple[int, int], block: tuple[int, int], *arguments: Any) -> None:
        host_kernels.run(library, name, grid, block, arguments)
        names.append(name)

    runtime = SimpleNamespace(getDevice=lambda: 0)
    module = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime), asarray=on_host, empty=empty)
    for name, value in {
        "on_cuda": lambda **_: True,
        "launch_blocks": launch_blocks,
        "cupy": lambda: module,
        "multiprocessors": lambda: 1,
        "new": empty,
        "strided_copy": lambda src, out: np.copyto(out, src),
    }.items():
        monkeypatch.setattr(finite, name, value)
        if hasattr(flags, name):
            monkeypatch.setattr(flags, name, value)
    monkeypatch.setattr(finite.devices, "workspace", lambda nbytes: empty(nbytes, np.uint8))
    monkeypatch.setattr(finite.devices, "is_capturing", lambda: False)
    return names


def check_flat(flat: np.ndarray, offsets: list[int], misalign: int = 0) -> np.ndarray:
    """All three ways against NumPy; gives the sums."""
    expected = expected_flags(flat, offsets)
    place, starts = on_host(flat, misalign), on_host(np.array(offsets, np.int64))
    count = len(offsets) - 1
    ticket = on_host(np.zeros(1, np.uint32))
    sums = empty(count)
    for options in ({}, {"ticket": ticket}, {"sums": sums}, {"sums": sums, "ticket": ticket}):
        found = empty(2 + count, np.int32)
        finite.find_invalid(place, starts, found, **options)
        np.testing.assert_array_equal(found, expected, err_msg=f"misalign {misalign}, {[*options]}")
        assert ticket[0] == 0
    wanted = np.empty(count)
    reference.find_invalid(flat, np.array(offsets), np.empty(2 + count, np.int32), wanted)
    np.testing.assert_allclose(np.asarray(sums), wanted, rtol=1e-12)
    return np.array(sums)


@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_kernels_on_random_storages_at_every_alignment(launches: list[str], dtype: str) -> None:
    for seed in range(30):
        flat, offsets = random_storage(np.random.default_rng(seed), dtype)
        check_flat(flat, offsets, seed % (16 // flat.itemsize))
    assert {"finish_invalid"} < set(launches)


@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_kernels_find_a_bad_value_at_every_place(launches: list[str], dtype: str) -> None:
    row = 512 // DTYPES[dtype].itemsize
    width = row // 32
    size = 3 * row + 5
    edges = (0, width, 2 * width, row, 2 * row, 3 * row, size)
    ticket = on_host(np.zeros(1, np.uint32))
    offsets = [0, 1, 1, width + 1, row, row, 2 * row + 3, size]
    for misalign in range(width):
        for number, position in enumerate(sorted({edge + by for edge in edges for by in (-misalign - 1, -1, 0, 1)})):
            if not 0 <= position < size:
                continue
            flat = np.ones(size, DTYPES[dtype])
            flat[position] = BAD[(number + misalign) % len(BAD)]
            found = empty(2 + 7, np.int32)
            finite.find_invalid(on_host(flat, misalign), on_host(np.array(offsets)), found, ticket=ticket)
            np.testing.assert_array_equal(found, expected_flags(flat, offsets), err_msg=f"{position} {misalign}")


@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_kernels_on_storages_of_many_rows(launches: list[str], dtype: str) -> None:
    generator = np.random.default_rng(5)
    size = 32 * 19 * 512 // DTYPES[dtype].itemsize + 77
    flat = (generator.normal(size=size) * 3).astype(DTYPES[dtype])
    cuts = [0, 0, 40, 41, size // 3, size // 3 + 64, size // 3 + 64, size // 3 + 200, size - 9, size, size]
    first = check_flat(flat, cuts, 1)
    for _ in range(2):
        np.testing.assert_array_equal(check_flat(flat, cuts, 1), first)
    # Arrays that begin and end near to where a warp does.
    for misalign in (0, 1):
        work = finite.Work(misalign * flat.itemsize, size, flat.itemsize, 1)
        starts = [warp * work.quotient + min(warp, work.remainder) for warp in range(8 * work.blocks)]
        assert work.quotient > 16
        for by in (-1, 0, 1):
            places = [max(row * work.row - work.lead + by, 0) for row in starts]
            check_flat(flat, [*places, size], misalign)
            check_flat(flat, [*places[::5], size], misalign)
    # The last rows of a warp, fewer than it reads at a time.
    work = finite.Work(0, size, flat.itemsize, 1)
    assert work.quotient % 8 != 0
    end = 5 * (work.quotient + 1) if work.remainder > 5 else 5 * work.quotient + work.remainder
    for row in range(end - 9, end + 2):
        spoiled = flat.copy()
        spoiled[row * work.row + row % work.row] = BAD[row % len(BAD)]
        check_flat(spoiled, [0, end * work.row, size])
    flat[generator.integers(0, size, 3)] = BAD[:3]
    check_flat(flat, cuts)
    check_flat(flat, sorted(generator.integers(0, size, 200).tolist()))
    flat[...] = np.nan
    check_flat(flat, cuts, 1)
    check_flat(flat, [70, 70, 90])


@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_kernels_and_unscaling(launches: list[str], dtype: str) -> None:
    check_unscaling(dtype, on_host)


def test_kernels_with_no_arrays_and_no_elements(launches: list[str]) -> None:
    check_flat(np.ones(3, np.float32), [0])
    check_flat(np.full(3, np.nan, np.float32), [0])
    check_flat(np.full(3, np.nan, np.float32), [2, 2, 2])
    check_flat(np.empty(0, np.float32), [0, 0, 0])


def test_one_launch_with_a_ticket_and_two_without(launches: list[str]) -> None:
    flat, starts, found = (on_host(a) for a in (np.ones(9, np.float16), np.array([0, 9]), np.zeros(3, np.int32)))
    finite.find_invalid(flat, starts, found, ticket=on_host(np.zeros(1, np.uint32)))
    assert launches == ["find_invalid_f16"]
    finite.find_invalid(flat, starts, found)
    assert launches[1:] == ["find_invalid_f16", "finish_invalid"]
    finite.find_invalid(flat, starts, found, sums=empty(1))
    assert launches[3:] == ["find_invalid_sums_f16", "finish_invalid"]


def test_kernels_on_separate_arrays(launches: list[str]) -> None:
    generator = np.random.default_rng(1)
    for case in range(60):
        arrays = [
            None if a is None else on_host(a, int(generator.integers(0, 16 // a.itemsize)))
            for a in random_arrays(generator, longest=9000)
        ]
        found = empty(2 + len(arrays), np.int32)
        table = finite.PointerTable()
        for _ in range(2):
            finite.find_invalid_list(arrays, found, table=table)
            np.testing.assert_array_equal(found, expected_flags_of_list(arrays), err_msg=str(case))
    assert set(launches) == {"find_invalid_list"}


def test_kernels_on_large_separate_arrays(launches: list[str]) -> None:
    generator = np.random.default_rng(2)
    for _ in range(6):
        arrays: list[HostArray] = []
        for dtype in generator.choice(sorted(DTYPES), 6):
            a = generator.normal(size=int(generator.integers(20_000, 60_000))).astype(DTYPES[dtype])
            arrays.append(on_host(a, int(generator.integers(0, 16 // a.itemsize))))
        table = finite.PointerTable()
        np.testing.assert_array_equal(finite.find_invalid_list(arrays, table=table), [0, 6, *[0] * 6])
        for which in (5, 2):
            place = int(generator.choice([0, 1, len(arrays[which]) - 1, generator.integers(len(arrays[which]))]))
            arrays[which][place] = np.nan
            found = finite.find_invalid_list(arrays, table=table)
            np.testing.assert_array_equal(found, expected_flags_of_list(arrays))


def test_a_table_is_built_again_only_when_something_moved(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    pieces_of = finite.pieces_of

    def counted(*arguments: Any) -> Any:
        built.append(1)
        return pieces_of(*arguments)

    monkeypatch.setattr(finite, "pieces_of", counted)
    arrays = [on_host(np.ones(5, np.float32)), None, on_host(np.ones((3, 4)).astype(np.float16))]
    table = finite.PointerTable()
    finite.find_invalid_list(arrays, table=table)
    arrays[0][3] = np.nan
    np.testing.assert_array_equal(finite.find_invalid_list(arrays, table=table), [1, 0, 1, 0, 0])
    assert len(built) == 1
    # In place of None, and transposed: the same memory.
    arrays[2] = arrays[2].T
    finite.find_invalid_list(arrays, table=table)
    assert len(built) == 1
    arrays[1] = on_host(np.full(2, np.inf))
    np.testing.assert_array_equal(finite.find_invalid_list(arrays, table=table), [1, 0, 1, 1, 0])
    assert len(built) == 2
    monkeypatch.setattr(finite.devices, "is_capturing", lambda: True)
    finite.find_invalid_list(arrays, table=table)
    with pytest.raises(FlcudaError, match="before the capture"):
        finite.find_invalid_list(arrays[:2], table=table)


def test_an_array_with_gaps_is_copied(launches: list[str]) -> None:
    holder = on_host(np.ones((6, 8), np.float32))
    holder[1::2] = np.nan
    np.testing.assert_array_equal(finite.find_invalid_list([holder[::2], holder[1::2, :3]]), [1, 1, 0, 1])
    np.testing.assert_array_equal(finite.find_invalid_list([holder[::-2].T, holder[::2, ::-1]]), [1, 0, 1, 0])


def test_the_joining_kernel(launches: list[str]) -> None:
    generator = np.random.default_rng(0)
    for case in range(60):
        parts = []
        for size in generator.integers(0, 6, generator.integers(1, 11)):
            bad = generator.random(size) < 0.1
            parts.append(on_host(np.array([bad.any(), bad.argmax() if bad.any() else size, *bad], np.int32)))
        out = empty(2 + sum(part.size - 2 for part in parts), np.int32)
        join_flags(parts, out)
        bad = np.concatenate([part[2:] for part in parts])
        expected = [bad.any(), bad.argmax() if bad.any() else bad.size, *bad]
        np.testing.assert_array_equal(out, expected, err_msg=str(case))


# --- the kernels' text ------------------------------------------------------------------------------------------------


def _ptx(*extra: str) -> str:
    nvrtc: Any = pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    try:
        nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError):
        pytest.skip("no NVRTC here")
    program = nvrtc.createProgram(kernel_loader.source("finite"), "finite.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*kernel_loader.options(), *extra, "--gpu-architecture=compute_90"))
        text = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    return text if isinstance(text, str) else text.decode()


def test_fast_math_keeps_the_tests_of_bits() -> None:
    text = _ptx("--use_fast_math")
    entries = dict(re.findall(r"\.entry (\w+)\((.*?)(?=\.entry|\Z)", text, re.S))
    masks = {"f16": (0x7C00,), "bf16": (0x7F80,), "f32": (0x7F800000,), "f64": (0x7FF00000,)}
    for kind, values in masks.items():
        for name in (f"find_invalid_{kind}", f"find_invalid_sums_{kind}"):
            for value in values:
                assert len(re.findall(rf"and\.b(?:32|16)\s.*, {value};", entries[name])) >= 8, name
            assert not re.search(r"testp|setp\.\w+\.f(?:16|32|64)|abs\.f", entries[name]), name
            assert len(re.findall(r"ld\.global(?:\.nc)?\.v4\.u32", entries[name])) >= 8, name
    for values in masks.values():
        assert f", {values[0]};" in entries["find_invalid_list"]
