"""What the checks of FLCUDA_CHECK=1 know of memory, with a driver and arrays that are made up."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flcuda.cudnn import memory
from flcuda.cudnn.memory import Region


def region(what: str, address: int, shape: tuple[int, ...], strides: tuple[int, ...], **changes: Any) -> Region:
    nbytes = 2 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    values = {"alignment": 2, "itemsize": 2, "written": False, **changes}
    return Region(what, address, nbytes, values["alignment"], shape, strides, values["itemsize"], values["written"])


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "bytes_at", lambda address: None)


class Driver:
    """One allocation of 1000 bytes at 0x1000, and one page of host memory at 0x9000."""

    def __init__(self, failure: int = 500) -> None:
        self.failure = failure

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: int) -> int:
        if not 0x1000 <= address < 0x1000 + 1000:
            return self.failure
        base._obj.value, size._obj.value = 0x1000, 1000
        return 0

    def cuPointerGetAttribute(self, kind: Any, attribute: int, address: int) -> int:
        assert attribute == 2
        if address != 0x9000:
            return 1
        kind._obj.value = 1
        return 0


@pytest.mark.parametrize(
    ("address", "expected"), [(0x1000, 1000), (0x1000 + 999, 1), (0x1000 + 1000, 0), (0xFFF, 0), (0x9000, None)]
)
def test_bytes_at(address: int, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_driver", Driver)
    assert memory.bytes_at(address) == expected


def test_a_driver_that_cannot_answer_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_ERROR_INVALID_CONTEXT, say."""
    monkeypatch.setattr(memory, "_driver", lambda: Driver(201))
    assert memory.bytes_at(5) is None


def test_parts_of_one_buffer(plenty: None) -> None:
    """The halves of the channels of one nhwc buffer lie within one another, and have no element in common."""
    shape, strides = (2, 3, 5), (2 * 6 * 5, 2, 2 * 6)
    left = region("left", 0x1000, shape, strides, written=True)
    memory.check_regions([left, region("right", 0x1006, shape, strides, written=True)])
    with pytest.raises(ValueError, match="left is written and overlaps with right"):
        memory.check_regions([left, region("right", 0x1004, shape, strides)])
    with pytest.raises(ValueError, match="right is written and overlaps with left"):
        memory.check_regions(
            [region("left", 0x1000, shape, strides), region("right", 0x1000, shape, strides, written=True)]
        )
    memory.check_regions([region("left", 0x1000, shape, strides), region("right", 0x1000, shape, strides)])


@given(
    st.integers(0, 60),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=3),
)
def test_overlap_is_that_of_the_bytes(shift: int, one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    def touched(address: int, dims: list[tuple[int, int]]) -> set[int]:
        starts = {address}
        for size, step in dims:
            starts = {start + 2 * step * index for start in starts for index in range(size)}
        return {start + byte for start in starts for byte in (0, 1)}

    def made(address: int, dims: list[tuple[int, int]]) -> Region:
        return region("", address, tuple(size for size, _ in dims), tuple(2 * step for _, step in dims))

    expected = bool(touched(0x1000, one) & touched(0x1000 + shift, other))
    assert memory._overlap(made(0x1000, one), made(0x1000 + shift, other)) == expected


def test_bits_are_compared_by_their_extent(plenty: None) -> None:
    bits = Region("bits", 0x1000, 8, 1, (64,), (0,), 0, written=True)
    with pytest.raises(ValueError, match="bits is written and overlaps with x"):
        memory.check_regions([bits, region("x", 0x1006, (4,), (2,))])
    memory.check_regions([bits, region("x", 0x1008, (4,), (2,))])


def array(address: int, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, int]) -> Any:
    held = SimpleNamespace(ptr=block[0], size=block[1])
    return SimpleNamespace(
        data=SimpleNamespace(ptr=address, mem=held), shape=shape, strides=strides, itemsize=2, nbytes=0
    )


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (array(0x1000, (4, 3), (6, 2), (0x1000, 512)), (24, "the array")),
        (array(0x1010, (4, 3), (6, 2), (0x1000, 32)), (16, "its memory")),
        (array(0x1000, (4, 3), (2, 8), (0x1000, 512)), (24, "the array")),
        (array(0x1000, (4, 3), (0, 2), (0x1000, 512)), (6, "the array")),
        (array(0x1000, (4, 0), (6, 2), (0x1000, 512)), (0, "the array")),
        (SimpleNamespace(ptr=0x1100, mem=SimpleNamespace(ptr=0x1000, size=512)), (256, "its memory")),
    ],
)
def test_array_bytes(made: Any, expected: tuple[int, str]) -> None:
    assert memory.array_bytes(made) == expected


def test_the_driver_is_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr(
        ctypes,
        "CDLL",
        lambda name: (
            opened.append(name)
            or SimpleNamespace(cuMemGetAddressRange_v2=SimpleNamespace(), cuPointerGetAttribute=SimpleNamespace())
        ),
    )
    memory._driver.__wrapped__()
    assert opened == ["libcuda.so.1"]
