"""The optimizer step, the commit of statistics and the scaler's rule on CUDA."""

import numpy as np
import pytest
from helpers import TOLERANCES, assert_close, bits, place, to_numpy
from step_cases import PlainScaler, Storage

from flcuda.device import cupy
from flcuda.ops import finite, optimizer


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_steps_as_on_the_cpu(dtype: str, nesterov: bool) -> None:
    host, card = Storage(dtype, "cpu"), Storage(dtype, "cuda")
    for _ in range(3):
        host.step(nesterov=nesterov)
        card.step(nesterov=nesterov)
    compute = "float64" if dtype == "float64" else "float32"
    names = ("master", "data", "velocity") if host.data is not host.master else ("master", "velocity")
    for name in names:
        wanted = getattr(host, name).astype(np.float64)
        assert_close(getattr(card, name), wanted, dtype if name == "data" else compute, name)
    if host.data is not host.master:
        np.testing.assert_array_equal(to_numpy(card.data), to_numpy(card.master).astype(card.data.dtype))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_plain_step_without_optional_arrays(dtype: str) -> None:
    host, card = Storage(dtype, "cpu", velocity=False), Storage(dtype, "cuda", velocity=False)
    for storage in (host, card):
        storage.step(momentum=0.0, weight_decay=0.0, inv_scale=None, flags=None)
    assert_close(card.master, host.master.astype(np.float64), "float64" if dtype == "float64" else "float32")


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_an_invalid_step_writes_nothing_and_the_next_one_does(dtype: str) -> None:
    storage = Storage(dtype, "cuda")
    storage.grad[1302] = np.nan
    before = bits(storage.written())
    finite.find_invalid(storage.grad, storage.offsets, storage.flags)
    storage.step()
    assert bits(storage.written()) == before
    np.testing.assert_array_equal(storage.flags.get(), [1, 4, 0, 0, 0, 0, 1])
    storage.grad[1302] = 1
    finite.find_invalid(storage.grad, storage.offsets, storage.flags)
    storage.step()
    assert bits(storage.written()) != before


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_statistics_are_committed_or_taken_back(dtype: type) -> None:
    for flag in (None, 0, 1):
        running, pending = (place((start + np.arange(700)).astype(dtype), "cuda") for start in (0, 10))
        flags = None if flag is None else place(np.array([flag, 0], np.int32), "cuda")
        optimizer.commit_statistics(running, pending, flags)
        wanted = np.arange(700) + (0 if flag else 10)
        np.testing.assert_array_equal(running.get(), wanted)
        np.testing.assert_array_equal(pending.get(), wanted)


def test_scaler_against_a_plain_model() -> None:
    plain = PlainScaler(65536.0, 3, 1e-4, 65536.0)
    scale, inverse, counters = (
        place(a, "cuda") for a in (np.array(65536.0), np.array(2.0**-16), np.zeros(3, np.int64))
    )
    generator = np.random.default_rng(0)
    for phase in range(12):
        for invalid in generator.random(60) < (0.02, 0.5, 0.95)[phase % 3]:
            plain.update(bool(invalid))
            flags = place(np.array([invalid, 0], np.int32), "cuda")
            optimizer.scaler_update(scale, inverse, counters, flags, growth_interval=3)
            assert float(scale.get()) == plain.scale
            assert float(inverse.get()) == 1 / plain.scale
            assert counters.get().tolist() == plain.counters


def test_check_update_and_rule_are_captured_and_replayed() -> None:
    storage, expected = Storage("float16", "cuda"), Storage("float16", "cuda")
    scale, inverse, counters = (place(a, "cuda") for a in (np.array(1024.0), np.array(1 / 1024), np.zeros(3, np.int64)))
    storage.inv_scale = inverse

    def step() -> None:
        finite.find_invalid(storage.grad, storage.offsets, storage.flags)
        storage.step()
        optimizer.scaler_update(scale, inverse, counters, storage.flags)

    # compiles and loads everything before the capture, on a throw-away step
    Storage("float16", "cuda").step()
    finite.find_invalid(storage.grad, storage.offsets, storage.flags)
    optimizer.scaler_update(place(np.array(1.0), "cuda"), inverse.copy(), counters.copy(), storage.flags)
    stream = cupy().cuda.Stream(non_blocking=True)
    cupy().cuda.runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    expected.step()
    assert bits(storage.written()) == bits(expected.written())
    storage.grad[3] = np.inf
    cupy().cuda.runtime.deviceSynchronize()
    graph.launch(stream)
    stream.synchronize()
    assert bits(storage.written()) == bits(expected.written())
    assert float(scale.get()) == 512
    assert counters.get().tolist() == [0, 1, 1]
