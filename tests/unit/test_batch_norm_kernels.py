"""The kernels of batch norm, compiled for a processor and launched by the ops, against NumPy in float64."""

import functools
from pathlib import Path
from typing import Any

import host_kernels
import numpy as np
import pytest
from helpers import TOLERANCES, bits, place
from hypothesis import given, settings
from hypothesis import strategies as st
from norm_cases import MODES, Case, assert_agree

from flcuda import device as devices
from flcuda import kernel_loader
from flcuda.device import DTYPES
from flcuda.ops import batch_norm
from flcuda.ops.channel_reduction import MAPPING, SUMMING, tiles


def _has_nvrtc() -> bool:
    try:
        from cupy_backends.cuda.libs import nvrtc

        return bool(nvrtc.getVersion())
    except (ImportError, RuntimeError, OSError):
        return False


CPU = devices.Device("cpu")
# Whole vectors and odd counts of channels and places, one split and several, one tile and several, and a single place.
SHAPES = {
    "nhwc": [(1, 72, 5, 4), (2, 16, 33, 31), (5, 3, 7, 9), (17, 24), (9, 1, 1, 2)],
    "nchw": [(2, 2, 112, 120), (5, 3, 7, 9), (1, 3, 2, 4, 4)],
}


@functools.cache
def library(folder: Path) -> Any:
    return host_kernels.build("batch_norm", folder, ("-ffp-contract=off", "-fno-strict-aliasing"))


class Kernels:
    """Has the ops launch kernels on the processor, over NumPy arrays, inside a ``with``."""

    def __init__(self, folder: Path, processors: int = 132) -> None:
        self._library = library(folder)
        self.processors = processors
        self.launched: list[str] = []
        self.made: list[np.ndarray] = []

    def launch_blocks(
        self, file: str, function: str, grid: Any, block: Any, *arguments: Any, defines: tuple[str, ...] = ()
    ) -> None:
        assert file == "batch_norm"
        width, order, kind = (each.partition("=")[2] for each in defines)
        assert function.endswith(f"_{width}_{order}_{kind}")
        self.launched.append(function)
        if 0 not in grid:
            host_kernels.run(self._library, function, grid, block, arguments)

    def launch(self, file: str, function: str, count: int, *arguments: Any) -> None:
        self.launched.append(function)
        host_kernels.run(self._library, function, (-(-count // 256), 1), (256, 1), arguments)

    def new(self, shape: tuple[int, ...], dtype: Any, layout: str = "nchw") -> np.ndarray:
        made = devices.empty(shape, dtype, device=CPU, layout=layout)
        made.view(np.uint8 if made.ndim == 1 else made.dtype)[...] = 77  # what a kernel does not write shows
        self.made.append(made)
        return made

    def dense(self, a: np.ndarray, layout: str) -> np.ndarray:
        if a.transpose(devices.memory_order(layout, a.ndim)).flags.c_contiguous:
            return a
        out = devices.empty(a.shape, a.dtype, device=CPU, layout=layout)
        out[...] = a
        return out

    def __enter__(self) -> "Kernels":
        self._patch = pytest.MonkeyPatch()
        for name in ("launch_blocks", "launch", "new", "dense"):
            self._patch.setattr(batch_norm, name, getattr(self, name))
        self._patch.setattr(batch_norm, "on_cuda", lambda **_: True)
        self._patch.setattr(batch_norm, "cupy", lambda: np)
        self._patch.setattr(batch_norm, "multiprocessors", lambda: self.processors)
        self._patch.setattr(batch_norm, "_address", lambda a: a.ctypes.data)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def agrees(
    folder: Path, case: Case, dtype: str, mode: str, relu: bool, momentum: float | None = 0.1, constant: bool = False
) -> Kernels:
    expected = case.widened().run(mode, relu, momentum, constant)
    ticket = np.zeros(case.x.shape[1] + 1, np.uint32)
    with Kernels(folder) as kernels:
        found = case.run(mode, relu, momentum, constant, ticket)
    assert not ticket.any()
    assert_agree(found, expected, dtype, case)
    return kernels


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_all_passes_against_float64(folder: Path, dtype: str, layout: str, mode: str) -> None:
    widths = set()
    for i, shape in enumerate(SHAPES[layout]):
        case = Case(shape, dtype, layout, i, gradients=1 + i % 2)
        kernels = agrees(folder, case, dtype, mode, relu=i != 1, momentum=None if i % 2 else 0.1)
        widths |= {name.split("_")[-3] for name in kernels.launched}
    assert widths == {"vector", "scalar"}


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_random_cases(folder: Path, data: st.DataObject) -> None:
    shape = data.draw(
        st.tuples(*(st.integers(1, most) for most in (5, 20, 6, 6))).filter(lambda s: s[0] * s[2] * s[3] > 7)
    )
    dtype, layout = (
        data.draw(st.sampled_from(list(TOLERANCES))),
        data.draw(st.sampled_from(["nchw", "nhwc", "strided"])),
    )
    case = Case(shape, dtype, layout, data.draw(st.integers(0, 99)), data.draw(st.integers(1, 3)))
    mode = data.draw(st.sampled_from(MODES))
    relu, constant = data.draw(st.booleans()), data.draw(st.booleans())
    agrees(folder, case, dtype, mode, relu, data.draw(st.sampled_from([0.1, None])), constant)


def test_launches_of_a_residual_block(folder: Path) -> None:
    case = Case((2, 8, 3, 3), "float16", "nhwc", 0, gradients=2)
    suffix = "vector_nhwc_f16"
    for mode, apply, sums, backward in (
        ("none", "apply", "sums", "backward"),
        ("raw", "apply_raw", "sums_raw", "backward"),
        ("normalised", "apply_normalised", "sums_normalised", "backward_normalised"),
    ):
        if mode == "none":
            case.dys = case.dys[:1]
        else:
            case = Case((2, 8, 3, 3), "float16", "nhwc", 0, gradients=2)
        statistics = ["statistics"] * (2 if mode == "normalised" else 1)
        expected = [f"batch_norm_{name}_{suffix}" for name in (*statistics, apply, sums, backward)]
        assert agrees(folder, case, "float16", mode, relu=True).launched == expected


def test_a_single_gradient_without_relu_is_the_residual_s_own(folder: Path) -> None:
    case = Case((2, 8, 3, 3), "float32", "nhwc", 1)
    with Kernels(folder):
        assert case.run("raw", False, 0.1, False)["dresidual"] is case.dys[0]


def test_arrays_that_are_not_aligned(folder: Path) -> None:
    # x itself, and only a gradient behind a mask that was written by vectors
    for mode in MODES:
        for names in (["x"], ["dys"], ["x", "dys", "residual"]):
            case = Case((3, 16, 3, 3), "float32", "nhwc", 2)
            for name in names:
                array = case.dys[0] if name == "dys" else getattr(case, name)
                memory = np.zeros(array.size + 1, np.float32)
                start = 1 if memory.ctypes.data % 16 == 0 else 0
                moved = memory[start : start + array.size].reshape(3, 3, 3, 16).transpose(0, 3, 1, 2)
                moved[...] = array
                assert moved.ctypes.data % 16
                setattr(case, name, [moved] if name == "dys" else moved)
            agrees(folder, case, "float32", mode, relu=True)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_digits_at_a_large_mean(folder: Path, dtype: str, layout: str) -> None:
    # float16 has a step of 0.5 at 1000, so the spread is chosen for the values to differ
    exact = np.random.default_rng(3).normal(1000, 8, (8, 3, 24, 24)).astype(DTYPES[dtype]).astype(np.float64)
    with Kernels(folder):
        mean, inverse = batch_norm.statistics(
            place(exact.astype(DTYPES[dtype]), "cpu", layout), None, None, None, 0.1, 0.0
        )
    np.testing.assert_allclose(mean, exact.mean(axis=(0, 2, 3)), rtol=2e-7 if dtype != "float64" else 1e-14)
    np.testing.assert_allclose(inverse, 1 / exact.std(axis=(0, 2, 3)), rtol=1e-6 if dtype != "float64" else 1e-12)


def test_a_first_chunk_unlike_the_others(folder: Path) -> None:
    # what the means of the parts are shifted by is far off here
    x = np.random.default_rng(4).normal(1000, 1, (40, 2, 12, 12))
    x[:1] = -1000
    with Kernels(folder):
        mean, inverse = batch_norm.statistics(x.astype(np.float32), None, None, None, 0.1, 0.0)
    np.testing.assert_allclose(mean, x.mean(axis=(0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(inverse, 1 / x.std(axis=(0, 2, 3)), rtol=1e-6)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_first_value_unlike_the_others(folder: Path, layout: str) -> None:
    # a thread's sums are around it, until there are more
    x = np.random.default_rng(7).normal(1000, 1, (20, 8, 12, 12))
    x[0, :, 0, :4] = -1000
    x = x.astype(np.float32).astype(np.float64)
    with Kernels(folder):
        mean, inverse = batch_norm.statistics(place(x.astype(np.float32), "cpu", layout), None, None, None, 0.1, 0.0)
    np.testing.assert_allclose(mean, x.mean(axis=(0, 2, 3)), rtol=2e-7)
    np.testing.assert_allclose(inverse, 1 / x.std(axis=(0, 2, 3)), rtol=1e-6)


@pytest.mark.parametrize("shape", [(2, 8, 3, 3), (64, 8, 30, 30)])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("mean", [1e20, 2e19])
def test_a_mean_whose_square_is_infinite(folder: Path, mean: float, layout: str, shape: tuple[int, ...]) -> None:
    # warps that have no element of the channel have no mean either
    spread = 0.0 if mean == 1e20 else 2e13
    x = np.random.default_rng(8).normal(mean, spread, shape).astype(np.float32)
    exact = x.astype(np.float64)
    with Kernels(folder):
        found, inverse = batch_norm.statistics(place(x, "cpu", layout), None, None, None, 0.1, 1e-5)
    np.testing.assert_allclose(found, exact.mean(axis=(0, 2, 3)), rtol=1e-6)
    if not spread:
        np.testing.assert_allclose(inverse, np.full(shape[1], 1e-5**-0.5), rtol=1e-6)
    else:
        np.testing.assert_allclose(inverse, (exact.var(axis=(0, 2, 3)) + 1e-5) ** -0.5, rtol=0.1)


def test_nan_and_infinity_pass(folder: Path) -> None:
    for mode in MODES:
        case = Case((2, 8, 3, 3), "float16", "nhwc", 5)
        case.x[0, 1, 0, 0], case.x[1, 2, 1, 1] = np.nan, np.inf
        case.dys[0][0, 3, 0, 0], case.dys[0][1, 4, 1, 1] = np.nan, np.inf
        with np.errstate(all="ignore"):
            expected = case.widened().run(mode, True, 0.1, False)
            with Kernels(folder):
                found = case.run(mode, True, 0.1, False)
        for name in ("y", "dx", "dweight", "dbias"):
            np.testing.assert_array_equal(
                np.isfinite(found[name]), np.isfinite(expected[name]), err_msg=f"{mode} {name}"
            )


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (4, 0, 5, 5), (0, 8, 4, 4)])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_no_elements(folder: Path, shape: tuple[int, ...], layout: str) -> None:
    x = place(np.zeros(shape, np.float32), "cpu", layout)
    vector = np.ones(shape[1], np.float32)
    with Kernels(folder):
        assert batch_norm.batch_norm_inference(x, vector, vector, vector, vector, 1e-5).shape == shape
        dx, dweight, dbias = batch_norm.batch_norm_inference_backward(x, x, vector, vector, vector, 1e-5)
    assert dx.shape == shape
    np.testing.assert_array_equal(dweight, np.zeros(shape[1]))
    np.testing.assert_array_equal(dbias, np.zeros(shape[1]))


def test_two_runs_are_equal_bit_for_bit(folder: Path) -> None:
    with Kernels(folder):
        first, second = (
            Case((2, 16, 20, 20), "float32", "nhwc", 6, 2).run("normalised", True, 0.1, False) for _ in range(2)
        )
    assert bits(first.values()) == bits(second.values())


@pytest.mark.parametrize("shape", [(128, 64, 112, 112), (128, 512, 7, 7), (256, 128, 28, 28), (4, 3, 5, 5), (7, 1000)])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("processors", [20, 132])
def test_the_launch_shape_covers_an_array_in_balance(shape: tuple[int, ...], layout: str, processors: int) -> None:
    n, channels, *spatial = shape
    space = int(np.prod(spatial))
    for elements, at_once, blocks in (
        (1, 16, MAPPING),
        (4, 4, MAPPING),
        (8, 8, MAPPING),
        (1, 1, SUMMING),
        (8, 1, SUMMING),
    ):
        if (channels if layout == "nhwc" or space == 1 else space) % elements:
            continue
        shape_of = tiles(shape, layout, elements, at_once, blocks, processors)
        columns, splits = shape_of.grid
        threads, each = blocks.nchw if shape_of.order == "nchw" else blocks.nhwc
        assert shape_of.threads == threads
        assert columns * shape_of.slots >= channels > (columns - 1) * shape_of.slots
        assert threads % shape_of.lanes == 0
        assert shape_of.lanes <= 32
        assert shape_of.slots <= 64
        assert splits >= 1
        assert splits == 1 or columns * splits <= processors * each
        accesses = n * space // (elements if shape_of.order == "nchw" else 1)
        chunks = -(-accesses // (threads // shape_of.lanes * at_once))
        assert splits <= max(1, chunks)
        if layout == "nhwc" and elements > 1 and n >= 128:
            # rounds of the busiest block, against the mean
            assert -(-chunks // splits) * splits / chunks < 1.2


@pytest.mark.parametrize("processors", [1, 5, 132])
@pytest.mark.parametrize("mode", ["none", "normalised"])
def test_any_number_of_multiprocessors(folder: Path, mode: str, processors: int) -> None:
    # One part, and parts by the dozen for each thread that adds them up.
    for shape, layout in (((2, 8, 40, 40), "nhwc"), ((3, 2, 60, 64), "nchw")):
        case = Case(shape, "float32", layout, processors)
        ticket = np.zeros(shape[1] + 1, np.uint32)
        expected = case.widened().run(mode, True, 0.1, False)
        with Kernels(folder, processors):
            found = case.run(mode, True, 0.1, False, ticket)
        assert not ticket.any()
        assert_agree(found, expected, "float32", case)


needs_nvrtc = pytest.mark.skipif(not _has_nvrtc(), reason="no NVRTC (CuPy and its compiler) here")


@needs_nvrtc
@pytest.mark.parametrize("arch", [75, 90, 120])
def test_every_module_compiles_and_has_its_kernels(arch: int, folder: Path) -> None:
    for width in ("vector", "scalar"):
        for order in ("nchw", "nhwc"):
            for kind in ("f32", "f64", "f16", "bf16") if arch == 90 else ("f16",):
                defines = (f"NORM_WIDTH={width}", f"NORM_ORDER={order}", f"NORM_KIND={kind}")
                cubin = kernel_loader.compile_to_cubin("batch_norm", arch, defines=defines)
                for name in batch_norm._AT_ONCE:
                    assert f"batch_norm_{name}_{width}_{order}_{kind}".encode() + b"\0" in cubin
