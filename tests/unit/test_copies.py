"""Copies of operands in another form: by NumPy against the rule as it is written, and by the kernels on a processor."""

import math
from dataclasses import replace

import host_kernels
import numpy as np
import pytest
from copy_cases import bits, held, memory, random_copy

from flcuda import device as devices
from flcuda import kernel_loader
from flcuda.finder.copies import Copy, launch_of


def spread(copy, rng, *, numbers=False):
    """Memory of an operand and of its copy."""
    dtype = devices.DTYPES[copy.dtype]
    operand = memory(copy.shape, copy.strides, dtype, copy.alignment, rng, numbers=numbers)
    staged = memory(copy.staged_shape, copy.staged_strides, dtype, 16, rng, numbers=numbers)
    return operand, staged


# --- NumPy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_a_copy_holds_what_the_rule_says(seed) -> None:
    rng = np.random.default_rng(seed)
    copy = random_copy(rng)
    (raw, operand), (_, staged) = spread(copy, rng)
    before = raw.copy()
    copy.gathering()(staged, operand)
    wanted = np.zeros(copy.staged_shape, bits(staged).dtype)
    for place, source in held(copy):
        wanted[place] = bits(operand)[source]
    np.testing.assert_array_equal(bits(staged), wanted)
    np.testing.assert_array_equal(raw, before)


@pytest.mark.parametrize("seed", range(60))
def test_a_copy_is_written_back_to_where_it_came_from(seed) -> None:
    rng = np.random.default_rng(seed)
    copy = random_copy(rng, windows=False)
    (raw, operand), (_, staged) = spread(copy, rng)
    wanted_raw = raw.copy()
    offset = operand.__array_interface__["data"][0] - raw.ctypes.data
    wanted = np.ndarray(operand.shape, operand.dtype, wanted_raw.data, offset, operand.strides)
    bits(wanted)[...] = 0
    places = held(copy)
    assert len({source for _, source in places}) == len(places)
    for place, source in places:
        bits(wanted)[source] = bits(staged)[place]
    copy.scattering(add=False)(operand, staged)
    np.testing.assert_array_equal(raw, wanted_raw)


@pytest.mark.parametrize("seed", range(60))
def test_a_copy_is_added_in_float32_and_rounded_once(seed) -> None:
    rng = np.random.default_rng(seed)
    copy = random_copy(rng, windows=False)
    (raw, operand), (_, staged) = spread(copy, rng, numbers=True)
    compute = np.float64 if copy.dtype == "float64" else np.float32
    wanted = operand.copy()
    for place, source in held(copy):
        wanted[source] = (compute(operand[source]) + compute(staged[place])).astype(operand.dtype)
    gaps = raw.copy()
    copy.scattering(add=True)(operand, staged)
    np.testing.assert_array_equal(bits(operand), bits(np.ascontiguousarray(wanted)))
    bits(operand)[...] = 0
    offset = operand.__array_interface__["data"][0] - raw.ctypes.data
    bits(np.ndarray(operand.shape, operand.dtype, gaps.data, offset, operand.strides))[...] = 0
    np.testing.assert_array_equal(raw, gaps)


def test_what_makes_no_copy_is_refused() -> None:
    shape = (2, 3, 8, 8)
    strides = devices.contiguous_strides(shape)
    windows = Copy.create(
        shape, strides, "float32", layout="nchw", staged_shape=(2, 18, 4, 4), step=(2, 2), factor=(3, 2)
    )
    with pytest.raises(ValueError, match=r"factor \(3, 2\) is above step \(2, 2\)"):
        windows.scattering(add=False)
    with pytest.raises(ValueError, match=r"step \(2, 2\), factor \(0, 2\)"):
        Copy.create(shape, strides, "float32", layout="nchw", staged_shape=(2, 18, 4, 4), step=(2, 2), factor=(0, 2))
    with pytest.raises(ValueError, match="do not make"):
        Copy.create(shape, strides, "float32", layout="nchw", staged_shape=(2, 11, 4, 4), step=(2, 2), factor=(2, 2))
    with pytest.raises(ValueError, match="batch must be 2 or more"):
        Copy.create(shape, strides, "float32", layout="nchw", staged_shape=(1, 3, 8, 8))


def test_sizes_that_the_kernels_do_not_count_are_not_possible() -> None:
    def possible(shape, **changes):
        return Copy.create(shape, devices.contiguous_strides(shape), "float16", layout="nhwc", **changes).is_possible

    assert possible((1 << 20, 64, 224, 224))
    assert not possible((1, 64, 1 << 25))
    assert not possible((1, 4, 1 << 20), staged_shape=(1, 2048, 1 << 20))
    assert not possible((1, 4, 1 << 20), staged_shape=(1, 4, 1 << 26), step=(64,))
    assert not possible((1, 1, 2, 2, 2, 2))


# --- the kernels' launches --------------------------------------------------------------------------------------------


def stem(word: str, layout: str, staged_layout: str, channels: int) -> Copy:
    shape = (128, 3, 224, 224)
    return Copy.create(
        shape,
        devices.contiguous_strides(shape, layout),
        word,
        layout=staged_layout,
        staged_shape=(128, channels, 115, 115),
        step=(2, 2),
        factor=(2, 2),
        shift=(3, 3),
    )


def packed(word: str, shape, layout: str, staged_layout: str, channels: int | None = None, **changes) -> Copy:
    return Copy.create(
        shape,
        devices.contiguous_strides(shape, layout),
        word,
        layout=staged_layout,
        staged_shape=(shape[0], channels or shape[1], *shape[2:]),
        **changes,
    )


def windows(word: str, layout: str, staged_layout: str, channels: int, rows: str) -> Copy:
    shape = (128, 3, 224, 224)
    folded = rows == "folded"
    return Copy.create(
        shape,
        devices.contiguous_strides(shape, layout),
        word,
        layout=staged_layout,
        staged_shape=(128, channels, 115 if folded else 229, 112),
        step=(2, 2) if folded else (1, 2),
        factor=(2, 7) if folded else (1, 7),
        shift=(3, 3),
    )


IMAGES = (128, 64, 56, 56)
LAUNCHES = [
    (stem("float16", "nhwc", "nhwc", 16), "gather_lines_bytes2", "scatter_rows_f16"),
    (stem("float32", "nhwc", "nhwc", 16), "gather_lines_bytes4", "scatter_rows_f32"),
    (stem("bfloat16", "nchw", "nhwc", 16), "gather_lines_bytes2", "scatter_rows_bf16"),
    (stem("float32", "nchw", "nchw", 12), "gather_planes_bytes4", "scatter_rows_f32"),
    (windows("float16", "nhwc", "nhwc", 48, "folded"), "gather_lines_bytes2", None),
    (windows("float32", "nhwc", "nhwc", 32, "kept"), "gather_lines_bytes4", None),
    (windows("float32", "nchw", "nchw", 21, "kept"), "gather_planes_bytes4", None),
    (packed("float16", (128, 3, 224, 224), "nhwc", "nhwc", 4), "gather_quads_bytes2", "scatter_rows_f16"),
    (packed("float32", (128, 3, 224, 224), "nhwc", "nhwc", 4), "gather_lines_bytes4", "scatter_rows_f32"),
    (packed("float16", (128, 3, 224, 224), "nchw", "nchw", 4), "gather_rows_bytes2", "scatter_rows_f16"),
    # wider than what shared memory takes
    (packed("float16", (1, 9001, 3), "nhwc", "nhwc", 9008), "gather_channels_bytes2", "scatter_rows_f16"),
    (packed("float16", (8, 60, 14, 14), "nhwc", "nhwc", 64), "gather_lines_bytes2", "scatter_rows_f16"),
    (packed("float16", (8, 56, 14, 14), "nhwc", "nhwc", 64), "gather_wide_bytes2", "scatter_channels_f16"),
    (packed("float16", (8, 56, 14, 14), "nhwc", "nhwc", 64, alignment=2), "gather_lines_bytes2", "scatter_rows_f16"),
    (packed("float16", IMAGES, "nchw", "nhwc"), "transpose_pairs_f16", "transpose_pairs_f16"),
    (packed("float32", IMAGES, "nhwc", "nchw"), "transpose_f32", "transpose_f32"),
    (packed("bfloat16", (8, 61, 7, 7), "nchw", "nhwc", 64), "transpose_bf16", "transpose_bf16"),
    (packed("float64", (8, 3, 7, 7), "nchw", "nhwc", 4), "gather_lines_bytes8", "scatter_rows_f64"),
]


@pytest.mark.parametrize(
    ("copy", "gather", "scatter"), LAUNCHES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_each_copy_has_its_kernel(copy, gather, scatter) -> None:
    assert launch_of(copy, gather=True).function == gather
    if scatter is None:
        assert copy.overlaps
    else:
        assert launch_of(copy, gather=False, add=True).function == scatter


@pytest.mark.parametrize("seed", range(200))
def test_launches_keep_what_the_kernels_need(seed) -> None:
    copy = random_copy(np.random.default_rng(seed))
    for gather in (True,) if copy.overlaps else (True, False):
        launch = launch_of(copy, gather=gather)
        threads = math.prod(launch.block)
        assert 1 <= threads <= 256
        assert all(1 <= blocks <= 65536 for blocks in launch.grid)
        if launch.function.startswith(("gather_lines", "gather_quads", "gather_planes")):
            rows, columns, pitch, _ = map(int, launch.arguments[-4:])
            # of the Map: sizes and strides of both, steps, factors
            channels, depth, height = (int(launch.arguments[place]) for place in (11, 23, 24))
            assert launch.block == (32, 8)
            assert rows * channels * depth * height * pitch * copy.itemsize <= 16384
            assert rows == 1 or columns == copy.staged_shape[-1]
            assert pitch * copy.itemsize % 16 == 0
            assert copy.staged_shape[1] <= 1024
        elif not launch.function.startswith("transpose"):
            block_rows = int(launch.arguments[-1 if gather else -2])
            assert 1 <= block_rows <= min(64, threads)


def test_every_kernel_that_is_launched_exists() -> None:
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError):
        pytest.skip("no NVRTC here")
    cubin = kernel_loader.compile_to_cubin("rewrite", 90)
    for seed in range(300):
        copy = random_copy(np.random.default_rng(seed))
        for gather in (True,) if copy.overlaps else (True, False):
            launch = launch_of(copy, gather=gather)
            assert launch.function.encode() + b"\0" in cubin


# --- the kernels on a processor ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_on_host(tmp_path_factory):
    """Launches a kernel of kernels/rewrite.cu, compiled for the processor, on NumPy arrays."""
    library = host_kernels.build("rewrite", tmp_path_factory.mktemp("kernels"))

    def run(launch, target, source) -> None:
        host_kernels.run(library, launch.function, launch.grid, launch.block, (target, source, *launch.arguments))

    return run


@pytest.mark.parametrize("part", range(10))
def test_the_kernels_do_what_numpy_does(run_on_host, part) -> None:
    used = set()
    for index in range(40):
        rng = np.random.default_rng([7, part, index])
        copy = random_copy(rng)
        (raw, operand), (staged_raw, staged) = spread(copy, rng)
        wanted = np.empty_like(staged)
        copy.gathering()(wanted, operand)
        launch = launch_of(copy, gather=True)
        around = staged_raw.copy()
        run_on_host(launch, staged, operand)
        used.add(launch.function)
        np.testing.assert_array_equal(bits(staged), bits(wanted), err_msg=f"{launch.function} {copy}")
        start = staged.__array_interface__["data"][0] - staged_raw.ctypes.data
        np.testing.assert_array_equal(staged_raw[:start], around[:start])
        np.testing.assert_array_equal(staged_raw[start + copy.nbytes :], around[start + copy.nbytes :])
        for add in () if copy.overlaps else (False, True):
            (raw, operand), (_, staged) = spread(copy, rng, numbers=add)
            offset = operand.__array_interface__["data"][0] - raw.ctypes.data
            wanted_raw = raw.copy()
            wanted = np.ndarray(operand.shape, operand.dtype, wanted_raw.data, offset, operand.strides)
            copy.scattering(add=add)(wanted, staged)
            launch = launch_of(copy, gather=False, add=add)
            run_on_host(launch, operand, staged)
            used.add(launch.function)
            np.testing.assert_array_equal(raw, wanted_raw, err_msg=f"{launch.function} {copy}")
    assert len(used) > 5


def test_rows_that_several_blocks_share(run_on_host) -> None:
    rng = np.random.default_rng(0)
    # few and long rows: parts of a row; many and short ones: several rows a block
    for shape, staged_shape in (((1, 1, 3000), (1, 8, 3001)), ((40, 30, 1), (41, 32, 1)), ((2, 8, 700), (2, 16, 700))):
        for layout in devices.LAYOUTS:
            strides = devices.contiguous_strides(shape, layout)
            copy = Copy.create(shape, strides, "float16", layout=layout, staged_shape=staged_shape)
            (_, operand), (_, staged) = spread(copy, rng)
            wanted = np.empty_like(staged)
            copy.gathering()(wanted, operand)
            launch = launch_of(copy, gather=True)
            run_on_host(launch, staged, operand)
            np.testing.assert_array_equal(bits(staged), bits(wanted), err_msg=launch.function)
            run_on_host(replace(launch, grid=(2, 1)), staged, operand)
            np.testing.assert_array_equal(bits(staged), bits(wanted), err_msg=launch.function)


SMALL_STEM = (3, 3, 41, 48)
TILES = [
    # shape, staged shape, step, factor, shift; the last: columns that are no whole number of tiles
    (SMALL_STEM, (3, 4, 41, 48), (1, 1), (1, 1), (0, 0)),
    (SMALL_STEM, (3, 16, 23, 26), (2, 2), (2, 2), (3, 3)),
    (SMALL_STEM, (3, 48, 24, 24), (2, 2), (2, 7), (3, 3)),
    (SMALL_STEM, (4, 24, 47, 24), (1, 2), (1, 7), (3, 3)),
    ((1, 3, 4, 2112), (1, 32, 4, 1056), (1, 2), (1, 7), (0, 3)),
]


@pytest.mark.parametrize("word", ["float16", "float32", "float64"])
@pytest.mark.parametrize("staged_layout", devices.LAYOUTS)
@pytest.mark.parametrize("layout", devices.LAYOUTS)
def test_lines_of_many_tiles(run_on_host, layout, staged_layout, word) -> None:
    rng = np.random.default_rng(0)
    used = set()
    for shape, staged_shape, step, factor, shift in TILES:
        for alignment in (16, devices.DTYPES[word].itemsize):
            copy = Copy.create(
                shape,
                devices.contiguous_strides(shape, layout),
                word,
                layout=staged_layout,
                alignment=alignment,
                staged_shape=staged_shape,
                step=step,
                factor=factor,
                shift=shift,
            )
            (_, operand), (_, staged) = spread(copy, rng)
            wanted = np.empty_like(staged)
            copy.gathering()(wanted, operand)
            launch = launch_of(copy, gather=True)
            used.add(launch.function)
            # as many blocks as it wants; few that take one tile after the other; large tiles, the last one smaller
            launches = [launch, replace(launch, grid=(2, 1))]
            if launch.function.startswith(("gather_lines", "gather_quads", "gather_planes")):
                _, columns, pitch, wide = launch.arguments[-4:]
                assert bool(wide) == (alignment == 16)
                if columns == staged_shape[-1]:
                    more = 16384 // (int(launch.arguments[11]) * factor[0] * int(pitch) * copy.itemsize)
                    launches.append(
                        replace(
                            launch,
                            grid=(2, 1),
                            arguments=(*launch.arguments[:-4], np.int32(more), columns, pitch, wide),
                        )
                    )
            for each in launches:
                bits(staged)[...] = 77
                run_on_host(each, staged, operand)
                np.testing.assert_array_equal(bits(staged), bits(wanted), err_msg=f"{each} {copy}")
    assert used & {f"gather_{kind}_bytes{devices.DTYPES[word].itemsize}" for kind in ("lines", "planes")}
