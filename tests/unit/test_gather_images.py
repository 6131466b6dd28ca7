"""Copies of images into one array: the kernel, compiled for the processor, and what is refused."""

import types

import host_kernels
import numpy as np
import pytest

from flcuda.ops import images


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory):
    return host_kernels.build("images", tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def on_host(library, monkeypatch):
    """Launches go to the processor."""
    launches = []

    def launch(name, function, grid, block, *arguments):
        assert name == "images"
        launches.append(grid)
        host_kernels.run(library, function, grid, block, arguments)

    monkeypatch.setattr(images, "launch_blocks", launch)
    monkeypatch.setattr(images, "cupy", lambda: types.SimpleNamespace(asarray=np.asarray))
    monkeypatch.setattr(images, "_THREADS", 32)
    monkeypatch.setattr(images, "_BLOCKS", 3)
    return launches


@pytest.mark.parametrize("pitched", [False, True])
@pytest.mark.parametrize("shift", [0, 1, 5, 16])
def test_images_of_all_sizes(on_host, rng, pitched, shift):
    shapes = [(1, 1), (3, 5), (7, 48), (40, 37), (16, 160), (1, 4000)]
    sources = []
    columns = []
    end = 0
    for rows, row_bytes in shapes:
        pitch = row_bytes + (int(rng.integers(0, 20)) if pitched else 0)
        memory = rng.integers(0, 256, rows * pitch + 32, np.uint8)
        sources.append(memory)
        columns.append((end, memory.ctypes.data + shift, rows, row_bytes, pitch))
        end += -(-rows * row_bytes // 16) * 16 + 16
    pixels = np.full(end, 7, np.uint8)
    expected = pixels.copy()
    for memory, (offset, _, rows, row_bytes, pitch) in zip(sources, columns, strict=True):
        image = np.lib.stride_tricks.as_strided(memory[shift:], (rows, row_bytes), (pitch, 1))
        expected[offset : offset + rows * row_bytes] = image.reshape(-1)
    lists = [list(column) for column in zip(*columns, strict=True)]
    images.gather_images(pixels, *(lists if pitched else lists[:4]))
    np.testing.assert_array_equal(pixels, expected)
    assert on_host == [(3, len(shapes))]


def test_more_images_than_a_launch_takes(on_host, rng, monkeypatch):
    monkeypatch.setattr(images, "_MOST", 4)
    memory = rng.integers(0, 256, 10, np.uint8)
    pixels = np.zeros(10, np.uint8)
    images.gather_images(pixels, list(range(10)), [memory.ctypes.data + 9 - i for i in range(10)], [1] * 10, [1] * 10)
    np.testing.assert_array_equal(pixels, memory[::-1])
    assert on_host == [(3, 4), (3, 4), (3, 2)]


def test_nothing_is_launched_for_nothing(on_host):
    images.gather_images(np.zeros(0, np.uint8), [], [], [], [])
    assert on_host == []


@pytest.mark.parametrize(
    ("pixels", "lists", "error", "words"),
    [
        (np.zeros(8, np.int8), ([0], [1], [1], [8]), TypeError, "pixels"),
        (np.zeros(16, np.uint8)[::2], ([0], [1], [1], [8]), ValueError, "pixels"),
        (np.zeros((2, 4), np.uint8), ([0], [1], [1], [8]), ValueError, "pixels"),
        (np.zeros(8, np.uint8), ([1], [1], [2], [4]), ValueError, "end at 9"),
        (np.zeros(8, np.uint8), ([-1], [1], [2], [4]), ValueError, "pixels"),
        (np.zeros(8, np.uint8), ([0, 4], [1], [1], [4]), ValueError, "alike, not"),
        (np.zeros(8, np.uint8), (0, 1, 2, 4), ValueError, "alike, not"),
    ],
)
def test_bad_input(on_host, pixels, lists, error, words):
    with pytest.raises(error, match=words):
        images.gather_images(pixels, *lists)
    assert on_host == []
