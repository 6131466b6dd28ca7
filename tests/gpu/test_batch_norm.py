"""Batch norm's passes on CUDA against the float64 CPU reference, at sizes that fill the machine, and in a network."""

import itertools

import numpy as np
import pytest
from helpers import TOLERANCES, bits, place
from norm_cases import MODES, Case, assert_agree

from flcuda import device as devices
from flcuda import functional as F
from flcuda import kernel_loader, models
from flcuda.device import DTYPES, Device, cupy
from flcuda.ops import batch_norm
from flcuda.ops.batch_norm import new_ticket

# Vectors and single elements, odd counts, several tiles, and as many splits as there are.
SHAPES = [(2, 72, 5, 4), (5, 3, 7, 9), (17, 24), (9, 1, 1, 2), (3, 40, 33, 31), (8, 64, 56, 56), (16, 512, 7, 7)]


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead() -> None:
    """One after another the modules would take most of the time of these tests."""
    options = itertools.product(("vector", "scalar"), ("nchw", "nhwc"), kernel_loader.SUFFIXES.values())
    kernel_loader.prepare([("batch_norm", batch_norm.defines_of(*each)) for each in options])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["nchw", "nhwc", "strided"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_all_passes_against_float64(dtype: str, layout: str, mode: str) -> None:
    for i, shape in enumerate(SHAPES):
        case = Case(shape, dtype, layout, i, gradients=1 + i % 3, device="cuda")
        case.settle(mode)
        options = (mode, i != 1, None if i % 2 else 0.1, i == 2)
        expected = case.widened().run(*options)
        ticket = new_ticket(shape[1], Device("cuda", cupy().cuda.runtime.getDevice()))
        found = case.run(*options, ticket)
        assert not ticket.get().any()
        assert_agree(found, expected, dtype, case)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_runs_are_equal_bit_for_bit(dtype: str, layout: str, mode: str) -> None:
    first = None
    for _ in range(4):
        case = Case((16, 64, 31, 32), dtype, layout, 0, gradients=2, device="cuda")
        found = bits(case.run(mode, True, 0.1, False).values())
        first = first or found
        assert found == first


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_digits_at_a_large_mean_over_many_splits(dtype: str, layout: str, rng: np.random.Generator) -> None:
    exact = rng.normal(1000, 8, (64, 8, 56, 56)).astype(DTYPES[dtype])
    exact[:1] -= DTYPES[dtype].type(900)
    mean, inverse = batch_norm.statistics(place(exact, "cuda", layout), None, None, None, 0.1, 0.0)
    wide = exact.astype(np.float64)
    np.testing.assert_allclose(mean.get(), wide.mean(axis=(0, 2, 3)), rtol=3e-7)
    np.testing.assert_allclose(inverse.get(), 1 / wide.std(axis=(0, 2, 3)), rtol=2e-6)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_more_elements_than_31_bits_count(layout: str) -> None:
    shape = (2, 64, 1 << 12, (1 << 12) + 1)
    place = Device("cuda", cupy().cuda.runtime.getDevice())
    x = devices.zeros(shape, DTYPES["float16"], device=place, layout=layout)
    assert x.size > 1 << 31
    x[-1, :, -1, -1] = 1024
    count = x.size // 64
    mean, inverse = batch_norm.statistics(x, None, None, None, 0.1, 0.0)
    share = 1024 / count
    np.testing.assert_allclose(mean.get(), share, rtol=1e-5)
    np.testing.assert_allclose(inverse.get(), 1 / np.sqrt(1024 * share - share**2), rtol=1e-5)
    ones, zeros = cupy().ones(64, np.float32), cupy().zeros(64, np.float32)
    norm = batch_norm.Norm(ones, zeros, zeros, ones)
    y, mask = batch_norm.apply(x, norm, residual=x, relu=True, keep_mask=True)
    np.testing.assert_array_equal(y[-1, :, -1, -1].get(), np.full(64, 2048))
    assert int((y != 0).sum()) == 64
    # The gradient passes where y is above zero, at the last place alone.
    found = batch_norm.backward([y], x, norm, relu=True, adds=True, mask=mask, constant=True)
    np.testing.assert_array_equal(found.dbias.get(), np.full(64, 2048))
    np.testing.assert_array_equal(found.dweight.get(), np.full(64, 2048 * 1024))
    np.testing.assert_array_equal(found.dx[-1, :, -1, -1].get(), np.full(64, 2048))
    assert int((found.dx != 0).sum()) == 64


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("float64", 1e-9), ("float32", 1e-2), ("float16", 0.15), ("bfloat16", 0.5)]
)
def test_a_fused_network_is_the_plain_one(precision: str, tolerance: float, rng: np.random.Generator) -> None:
    x = cupy().asarray(rng.normal(size=(8, 3, 64, 64)).astype(np.float32))
    target = cupy().asarray(rng.integers(0, 10, 8))
    results = []
    for fused in (True, False):
        model = models.ResNet((1, 1, 1, 1), 10, precision=precision, device="cuda", fused=fused)
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        named = {name: p.grad.astype(np.float64).get() for name, p in model.named_parameters()}
        results.append({"loss": np.array(float(loss)), **named})
    for name, expected in results[1].items():
        # By its norm: where an element is rounded from zero, ReLU passes or not.
        distance = np.linalg.norm(results[0][name] - expected)
        assert distance <= tolerance * np.linalg.norm(expected), (name, distance, np.linalg.norm(expected))
