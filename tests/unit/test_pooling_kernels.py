"""The kernels of pooling and of the loss, compiled for a processor and launched by the ops, against NumPy."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_kernels
import numpy as np
import pytest
from helpers import LAYOUTS, TOLERANCES, OpCase, assert_close, bits, place
from op_cases import cases
from test_kernels_compile import needs_nvrtc

from flcuda import device as devices
from flcuda import kernel_loader, reference
from flcuda.device import DTYPES
from flcuda.ops import arrays, elementwise, loss, pooling
from flcuda.ops.batch_norm import Into, Norm

CASES = [
    case for case in cases() if case.name.startswith(("max_pool", "avg_pool", "global", "cross", "top1", "pooled"))
]
# (N, C, H, W) for which there are the kernels of windows of 3 x 3, in both layouts and all dtypes but float64.
FAST_SHAPES = [(2, 8, 9, 8), (1, 4, 8, 4), (3, 12, 1, 12), (2, 4, 2, 16), (1, 36, 7, 20)]


class HostArray(np.ndarray):
    """A NumPy array with CuPy's way to its address."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


def on_host(a: np.ndarray, misalign: int = 0) -> HostArray:
    """A copy of the same strides that starts so many elements behind a 16-byte boundary, rubbish around it."""
    order = np.argsort([-step for step in a.strides], kind="stable")
    if not a.transpose(order).flags.c_contiguous:
        return a.view(HostArray)
    holder = np.full(a.nbytes + 64, 0xFF, np.uint8)
    start = -holder.ctypes.data % 16 + 16 + misalign * a.itemsize
    placed = holder[start : start + a.nbytes].view(a.dtype).reshape([a.shape[dim] for dim in order])
    placed[...] = a.transpose(order)
    return placed.transpose(np.argsort(order)).view(HostArray)


class Kernels:
    """Has the ops take NumPy arrays for those of a GPU with one multiprocessor, inside a ``with``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.launched: list[str] = []
        self.compiled: dict[tuple[str, tuple[str, ...]], set[str]] = {}

    def library(self, name: str) -> ctypes.CDLL:
        path = self._folder / name
        if not path.exists():
            path.mkdir()
            return host_kernels.build(name, path, ("-ffp-contract=off", "-fno-strict-aliasing"))
        return ctypes.CDLL(str(path / f"{name}.so"))

    def launch_blocks(
        self, file: str, function: str, grid: Any, block: Any, *arguments: Any, defines: tuple[str, ...]
    ) -> None:
        self.launched.append(function)
        self.compiled.setdefault((file, defines), set()).add(function)
        if 0 not in grid:
            host_kernels.run(self.library(file), function, grid, block, arguments)

    def launch(self, file: str, function: str, count: int, *arguments: Any, **defines: Any) -> None:
        self.launch_blocks(file, function, (min(-(-count // 256), 3), 1), (256, 1), *arguments, **defines)

    def new(self, shape: Any, dtype: Any, layout: str = "nchw") -> HostArray:
        made = devices.empty(shape, dtype, device=devices.Device("cpu"), layout=layout)
        made[...] = np.full(made.itemsize, 0x7F, np.uint8).view(made.dtype)[0]
        return on_host(made)

    def __enter__(self) -> "Kernels":
        module = SimpleNamespace(zeros=lambda shape, dtype: on_host(np.zeros(shape, dtype)))
        self._patch = pytest.MonkeyPatch()
        for ops in (pooling, loss, arrays):
            for name, value in {
                "on_cuda": lambda **_: True,
                "launch": self.launch,
                "launch_blocks": self.launch_blocks,
                "cupy": lambda: module,
                "new": self.new,
                "strided_copy": lambda src, out: np.copyto(out, src),
            }.items():
                self._patch.setattr(ops, name, value, raising=False)
        add = SimpleNamespace(add=lambda a, b: on_host(reference.add(a, b)))
        self._patch.setattr(pooling, "elementwise", add)
        self._patch.setattr(pooling, "multiprocessors", lambda: 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def kernels(folder: Path) -> Iterator[Kernels]:
    return Kernels(folder)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_float64(kernels: Kernels, case: OpCase, dtype: str) -> None:
    compute = "float64" if dtype == "float64" else "float32"
    images = next(iter(case.arrays.values())).ndim > 2
    for layout in LAYOUTS if images else LAYOUTS[::2]:
        given, oracle = {}, {}
        for name, values in case.arrays.items():
            rounded = values
            if values.dtype == np.float64:
                rounded = values.astype(DTYPES[compute if name in case.wide else dtype])
            oracle[name] = rounded.astype(np.float64) if values.dtype == np.float64 else values.copy()
            kept = name in case.fixed or name in case.wide
            given[name] = on_host(place(rounded, "cpu", "nchw" if kept else layout))
        expected = case.op(**oracle)
        with kernels:
            results = case.op(**given)
        for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            label = f"{layout}: result {number}"
            if wanted.dtype != np.float64 or number in case.exact:
                np.testing.assert_array_equal(result.astype(wanted.dtype), wanted, err_msg=label)
                continue
            kind = compute if number in case.wide_results else dtype
            assert result.dtype == DTYPES[kind]
            assert_close(result, wanted, kind, label, case.factor)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", FAST_SHAPES)
def test_the_fast_kernels_give_the_same_bits(
    kernels: Kernels, shape: tuple[int, ...], dtype: str, layout: str, rng: np.random.Generator
) -> None:
    """Ties, infinities and NaN among them: the kernels for any window do the same sums in the same order."""
    values = np.round(rng.normal(size=shape) * 3) / 2
    values[rng.random(shape) < 0.05] = -np.inf
    values[rng.random(shape) < 0.02] = np.nan
    x = place(values.astype(DTYPES[dtype]), "cpu", layout)
    y, indices = pooling.max_pool_forward(x, 3, 2, 1)
    dy = place(rng.normal(size=y.shape).astype(y.dtype), "cpu", layout)
    dx = pooling.max_pool_backward(dy, indices, shape, 3, 2, 1)
    gradients = []
    for misalign in (0, 1):
        with kernels:
            kernels.launched.clear()
            found, places = pooling.max_pool_forward(on_host(x, misalign), 3, 2, 1)
            gradient = pooling.max_pool_backward(on_host(dy, misalign), places, shape, 3, 2, 1)
        fast = [name.startswith("max_pool_3x3") for name in kernels.launched]
        assert fast == [misalign == 0] * 2
        assert found.strides == y.strides
        np.testing.assert_array_equal(found.astype(np.float64), y.astype(np.float64))
        np.testing.assert_array_equal(places, indices)
        assert_close(gradient, dx.astype(np.float64), dtype)
        gradients.append(gradient)
    assert bits(gradients[:1]) == bits(gradients[1:])


def _pooled_norm(shape: tuple[int, ...], dtype: str, layout: str, rng: np.random.Generator) -> tuple[np.ndarray, Norm]:
    """An image and what normalises it, with negative weights, a zero and a large mean."""
    wide = np.float64 if dtype == "float64" else np.float32
    channels = shape[1]
    x = place((rng.normal(size=shape) * 2 + 30).astype(DTYPES[dtype]), "cpu", layout)
    weight, bias = rng.normal(size=channels).astype(wide), (rng.normal(size=channels) - 1).astype(wide)
    weight[0], weight[-1] = 0, -1.5
    wide_x = x.astype(np.float64)
    mean, variance = wide_x.mean(axis=(0, 2, 3)), wide_x.var(axis=(0, 2, 3))
    return x, Norm(weight, bias, mean.astype(wide), (1 / np.sqrt(variance + 1e-5)).astype(wide))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [*FAST_SHAPES[:1], *FAST_SHAPES[2:], (2, 5, 6, 7)])
def test_pooled_batch_norm(
    kernels: Kernels, shape: tuple[int, ...], dtype: str, layout: str, rng: np.random.Generator
) -> None:
    x, norm = _pooled_norm(shape, dtype, layout, rng)
    y, saved = pooling.batch_norm_relu_max_pool_forward(x, norm, 3, 2, 1)
    dy, dy_2 = (place(rng.normal(size=y.shape).astype(y.dtype), "cpu", layout) for _ in range(2))
    before = [rng.normal(size=shape[1]).astype(norm.weight.dtype) for _ in range(2)]
    with kernels:
        found, kept = pooling.batch_norm_relu_max_pool_forward(on_host(x), Norm(*map(on_host, norm)), 3, 2, 1)
    assert 0.1 < (saved.indices == 255).mean() < 0.9
    np.testing.assert_array_equal(found.astype(np.float64), y.astype(np.float64))
    np.testing.assert_array_equal(kept.indices, saved.indices)
    np.testing.assert_array_equal(kept.largest.astype(np.float64), saved.largest.astype(np.float64))
    ticket = on_host(np.zeros(shape[1] + 1, np.uint32))
    for dys in ([dy], [dy, dy_2], [dy, dy, dy_2]):
        expected = pooling.batch_norm_relu_max_pool_backward(
            dys, saved, into=Into(before[0].copy(), before[1].copy(), True)
        )
        with kernels:
            results = [
                pooling.batch_norm_relu_max_pool_backward(
                    [on_host(each) for each in dys], kept, into=Into(*map(on_host, before), True), ticket=each_ticket
                )
                for each_ticket in (None, ticket)
            ]
        assert not ticket.any()
        assert bits(results[0]) == bits(results[1])
        compute = "float64" if dtype == "float64" else "float32"
        for number, (result, wanted) in enumerate(zip(results[0], expected, strict=True)):
            kind = compute if number else dtype
            assert_close(result, wanted.astype(np.float64), kind, f"result {number}", 8)
    fast = shape[1] != 5 and dtype != "float64"
    passes = [name for name in kernels.launched if "max_pool" in name]
    assert [("3x3" in name) for name in passes] == [fast] * 7


def test_pooled_batch_norm_of_large_windows(kernels: Kernels, rng: np.random.Generator) -> None:
    """More places than one byte tells apart, with the one for none of them."""
    x, norm = _pooled_norm((2, 3, 33, 21), "float32", "nchw", rng)
    norm.bias[...] -= 1
    for kernel in ((16, 16), (31, 9)):
        y, saved = pooling.batch_norm_relu_max_pool_forward(x, norm, kernel, 5, 3)
        assert saved.indices.dtype == np.int32
        with kernels:
            found, kept = pooling.batch_norm_relu_max_pool_forward(on_host(x), Norm(*map(on_host, norm)), kernel, 5, 3)
            dx = pooling.batch_norm_relu_max_pool_backward([on_host(np.ones_like(y))], kept)[0]
        np.testing.assert_array_equal(found, y)
        np.testing.assert_array_equal(kept.indices, saved.indices)
        assert_close(dx, pooling.batch_norm_relu_max_pool_backward([np.ones_like(y)], saved)[0], "float32", factor=8)


def test_correct_counts_and_the_ticket(kernels: Kernels, rng: np.random.Generator) -> None:
    for classes in (3, 5, 70, 700):
        values = rng.choice(
            [0.0, 1.0, 2.0, np.nan, -np.inf, np.inf], (40, classes), p=[0.4, 0.3, 0.26, 0.02, 0.01, 0.01]
        )
        target = rng.integers(0, classes, 40)
        target[::2] = values.argmax(axis=1)[::2]
        target[5:8] = -100
        for dtype in TOLERANCES:
            logits = values.astype(DTYPES[dtype])
            # NaN first, then by size, and the first of equal ones
            keys = np.where(np.isnan(values), np.inf, values)
            order = np.lexsort((np.broadcast_to(np.arange(classes), values.shape), -keys, ~np.isnan(values)))
            among = [(order[:, :most] == target[:, None]).any(axis=1).sum() for most in (1, 5)]
            on_cpu, correct = np.array([3, 4]), on_host(np.array([3, 4]))
            loss.cross_entropy_forward(logits, target, correct=on_cpu)
            with kernels:
                loss.cross_entropy_forward(on_host(logits), on_host(target), correct=correct)
            np.testing.assert_array_equal(on_cpu, np.add(among, [3, 4]))
            np.testing.assert_array_equal(correct, np.add(among, [3, 4]))


def test_losses_that_are_none(kernels: Kernels) -> None:
    with kernels:
        for logits, target in (
            (np.empty((0, 3), np.float32), np.empty(0, np.int64)),
            (np.ones((2, 3), np.float32), np.array([-100, -100])),
            (np.ones((2, 3), np.float32), np.array([0, 3])),
        ):
            correct = on_host(np.zeros(2, np.int64))
            value, saved = loss.cross_entropy_forward(on_host(logits), on_host(target), correct=correct)
            assert np.isnan(value)
            assert correct[0] == (target == 0).sum()
            gradient = loss.cross_entropy_backward(on_host(np.ones((), np.float32)), saved)
            np.testing.assert_array_equal(np.isnan(gradient), np.isin(np.arange(3), [])[None] | (target == 3)[:, None])


def test_two_runs_of_the_loss_are_equal(kernels: Kernels, rng: np.random.Generator) -> None:
    logits, target = rng.normal(size=(300, 33)).astype(np.float32), rng.integers(0, 33, 300)
    with kernels:
        first = loss.cross_entropy_forward(on_host(logits), on_host(target), 0.1)[0]
        assert bits([first]) == bits([loss.cross_entropy_forward(on_host(logits), on_host(target), 0.1)[0]])
    assert kernels.launched == ["cross_entropy_forward_f32"] * 2


def test_pooling_the_batch_norm_is_pooling_after_it(rng: np.random.Generator) -> None:
    """On the CPU, in float64: the ops one after the other."""
    x, norm = _pooled_norm((3, 5, 9, 8), "float64", "nhwc", rng)
    weight, bias, mean, inverse = norm
    weight[0] = 0.7  # with a weight of 0 all places of a window are equal
    normal = (x - mean[:, None, None]) * (inverse * weight)[:, None, None] + bias[:, None, None]
    relu = elementwise.relu_forward(normal)
    y, indices = pooling.max_pool_forward(relu, 3, 2, 1)
    found, saved = pooling.batch_norm_relu_max_pool_forward(x, norm, 3, 2, 1)
    np.testing.assert_array_equal(found, y)
    np.testing.assert_array_equal(saved.indices, np.where(y > 0, indices, 255))
    dy = rng.normal(size=y.shape)
    gradient = elementwise.relu_backward(pooling.max_pool_backward(dy, indices, x.shape, 3, 2, 1), relu)
    expected = reference.batch_norm_backward(gradient, x, weight, mean, inverse, None, None, False)
    for result, wanted in zip(pooling.batch_norm_relu_max_pool_backward([dy], saved), expected, strict=True):
        assert_close(result, wanted, "float64", factor=4)


@needs_nvrtc
def test_what_is_compiled_for_a_launch_has_the_kernel(kernels: Kernels, rng: np.random.Generator) -> None:
    """Files are compiled by parts: each with what the ops launch of it."""
    with kernels:
        for channels, layout in ((8, "nhwc"), (7, "nhwc"), (8, "nchw"), (7, "nchw")):
            x, norm = _pooled_norm((2, channels, 8, 7 + channels % 2), "float16", layout, rng)
            image = on_host(x)
            y, indices = pooling.max_pool_forward(image, 3, 2, 1)
            pooling.max_pool_backward(y, indices, x.shape, 3, 2, 1)
            y, saved = pooling.batch_norm_relu_max_pool_forward(image, Norm(*map(on_host, norm)), 3, 2, 1)
            pooling.batch_norm_relu_max_pool_backward([y], saved)
            pooling.avg_pool_backward(pooling.avg_pool_forward(image, 2), x.shape, 2)
            pooling.global_avg_pool_backward(pooling.global_avg_pool_forward(image), x.shape, layout)
        logits, target = on_host(np.ones((3, 5), np.float16)), on_host(np.array([0, 1, 2]))
        value, kept = loss.cross_entropy_forward(logits, target)
        loss.cross_entropy_backward(value, kept)
        loss.top1_count(logits, target)
    assert len(kernels.compiled) == 7
    for (file, defines), functions in kernels.compiled.items():
        cubin = kernel_loader.compile_to_cubin(file, 90, defines=defines)
        for function in functions:
            assert function.encode() + b"\0" in cubin, f"{file} {defines}: {function}"
