"""The optimizer step, the commit of statistics and the scaler's rule on the CPU device."""

from typing import Any

import numpy as np
import pytest
from helpers import TOLERANCES, assert_close, bits
from step_cases import PlainScaler, Storage

from flcuda.device import DTYPES
from flcuda.ops import optimizer


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_step_against_its_formula(dtype: str, nesterov: bool) -> None:
    storage = Storage(dtype, "cpu")
    master, velocity, grad = (a.astype(np.float64) for a in (storage.master, storage.velocity, storage.grad))
    decay = np.repeat(storage.decay.astype(np.float64), np.diff(storage.offsets_host))
    storage.step(nesterov=nesterov)
    g = grad / 1024 + 1e-2 * decay * master
    velocity = 0.9 * velocity + g
    master -= 0.1 * (g + 0.9 * velocity if nesterov else velocity)
    compute = "float64" if dtype == "float64" else "float32"
    assert_close(storage.velocity, velocity, compute)
    assert_close(storage.master, master, compute)
    np.testing.assert_array_equal(storage.data, storage.master.astype(DTYPES[dtype]))


def test_plain_step_needs_no_velocity() -> None:
    storage = Storage("float32", "cpu", velocity=False)
    before = storage.master.copy()
    storage.step(momentum=0.0, weight_decay=0.0, inv_scale=None, flags=None)
    np.testing.assert_allclose(storage.master, before - np.float32(0.1) * storage.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_an_invalid_step_writes_nothing(dtype: str) -> None:
    storage = Storage(dtype, "cpu")
    storage.grad[17] = np.nan
    storage.flags[0] = 1
    before = bits(storage.written())
    storage.step()
    assert bits(storage.written()) == before


def test_padding_stays_zero() -> None:
    storage = Storage("float16", "cpu")
    for a in (storage.master, storage.data, storage.grad, storage.velocity):
        a[5:1300] = 0
    for _ in range(3):
        storage.step()
    for a in storage.written():
        assert not a[5:1300].any()
        assert a[:5].all()


@pytest.mark.parametrize(
    ("change", "options", "error", "text"),
    [
        ({"velocity": None}, {}, ValueError, "velocity: momentum 0.9"),
        ({"lr": np.array(0.1, np.float32)}, {}, TypeError, "lr: expected an array of float64"),
        ({"lr": np.ones(2)}, {}, ValueError, "lr: expected one element"),
        ({"decay": np.ones(4, np.float32)}, {}, ValueError, "offsets"),
        ({"grad": np.ones(4000)}, {}, TypeError, "grad: expected an array of float32, got float64"),
        ({"grad": np.ones(3, np.float32)}, {}, ValueError, "grad"),
        ({"data": np.ones(4000, np.float32)}, {}, ValueError, "data: must be master"),
        ({}, {"momentum": -0.1}, ValueError, "momentum must not be negative, got -0.1"),
        ({}, {"weight_decay": -1.0}, ValueError, "weight_decay"),
        ({"velocity": None}, {"momentum": 0.0, "nesterov": True}, ValueError, "nesterov"),
    ],
)
def test_bad_arguments_are_named(
    change: dict[str, Any], options: dict[str, Any], error: type[Exception], text: str
) -> None:
    storage = Storage("float32", "cpu")
    for name, value in change.items():
        setattr(storage, name, value)
    before = storage.master.copy()
    with pytest.raises(error, match=text):
        storage.step(**options)
    np.testing.assert_array_equal(storage.master, before)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_statistics_are_committed_or_taken_back(dtype: type) -> None:
    for flag in (None, 0, 1):
        running, pending = np.arange(6).astype(dtype), 10 + np.arange(6).astype(dtype)
        optimizer.commit_statistics(running, pending, None if flag is None else np.array([flag, 0], np.int32))
        wanted = np.arange(6) if flag else 10 + np.arange(6)
        np.testing.assert_array_equal(running, wanted)
        np.testing.assert_array_equal(pending, wanted)


@pytest.mark.parametrize("interval", [1, 3, 7])
def test_scaler_against_a_plain_model(interval: int) -> None:
    plain = PlainScaler(65536.0, interval, 1e-4, 65536.0)
    scale, inverse, counters = np.array(65536.0), np.array(1 / 65536), np.zeros(3, np.int64)
    generator = np.random.default_rng(interval)
    reached = set()
    for phase in range(60):
        share = (0.02, 0.5, 0.95)[phase % 3]
        for invalid in generator.random(60) < share:
            plain.update(bool(invalid))
            optimizer.scaler_update(
                scale, inverse, counters, np.array([invalid, 0, 0], np.int32), growth_interval=interval
            )
            assert float(scale) == plain.scale
            assert float(inverse) == 1 / plain.scale
            assert counters.tolist() == plain.counters
            reached.add(plain.scale)
    assert max(reached) == 65536
    assert 1e-4 <= min(reached) < 2e-4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"growth_factor": 1.0}, "growth_factor"),
        ({"backoff_factor": 1.0}, "backoff_factor"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"min_scale": 0.0}, "min_scale"),
        ({"max_scale": float("inf")}, "max_scale"),
    ],
)
def test_scaler_arguments_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        optimizer.scaler_update(np.ones(()), np.ones(()), np.zeros(3, np.int64), np.zeros(2, np.int32), **options)
