"""The kernels of the optimizer step, compiled for a processor and launched by the ops, against NumPy and formulas."""

import functools
from pathlib import Path
from typing import Any

import host_kernels
import numpy as np
import pytest
from helpers import TOLERANCES, bits
from hypothesis import given, settings
from hypothesis import strategies as st
from step_cases import PlainScaler
from update_cases import RULES, Update, assert_updated, random_update

from flcuda.ops import optimizer


@functools.cache
def library(folder: Path) -> Any:
    # No contraction to fused products and sums, and no assumption about types in memory: as NumPy computes.
    return host_kernels.build("optimizer", folder, ("-ffp-contract=off", "-fno-strict-aliasing"))


class Kernels:
    """Has the ops launch kernels on the processor, over NumPy arrays, inside a ``with``."""

    def __init__(self, folder: Path, most_blocks: int | None = None) -> None:
        self._library = library(folder)
        self._most_blocks = most_blocks
        self.launched: list[str] = []

    def launch_blocks(self, file: str, function: str, grid: Any, block: Any, *arguments: Any) -> None:
        assert file == "optimizer"
        self.launched.append(function)
        if 0 in grid:
            return
        blocks = min(grid[0], self._most_blocks or grid[0])
        host_kernels.run(self._library, function, (blocks, grid[1]), block, arguments)

    def launch(self, file: str, function: str, count: int, *arguments: Any) -> None:
        self.launch_blocks(file, function, (-(-count // 256), 1), (256, 1), *arguments)

    def __enter__(self) -> "Kernels":
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(optimizer, "on_cuda", lambda **_: True)
        self._patch.setattr(optimizer, "launch_blocks", self.launch_blocks)
        self._patch.setattr(optimizer, "launch", self.launch)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def agrees(update: Update, folder: Path, most_blocks: int | None = None) -> None:
    """Compares the kernel with NumPy's twin, to the bit but for Adam's powers of beta, and with the formula."""
    twin, kernel = update.on("cpu"), update.on("cpu")
    twin.run()
    with Kernels(folder, most_blocks) as kernels:
        kernel.run()
    assert len(kernels.launched) == 1
    assert_updated(kernel, update)
    assert_updated(twin, update)
    if not update.rule.startswith("adam"):
        assert bits(kernel.holders.values()) == bits(twin.holders.values())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_kernels_against_numpy_and_formulas(folder: Path, dtype: str, rule: str) -> None:
    generator = np.random.default_rng([5, RULES.index(rule), list(TOLERANCES).index(dtype)])
    for _ in range(8):
        agrees(random_update(generator, rule, dtype), folder)


@pytest.mark.parametrize("rule", ["nesterov", "adamw"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_blocks_may_be_fewer_than_chunks(folder: Path, blocks: int, rule: str) -> None:
    for dtype in TOLERANCES:
        agrees(Update(rule, dtype, [3000, 0, 70, 9000, 1], before=1, shifts={"master": 1, "grad": 1}), folder, blocks)


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_more_segments_than_threads(folder: Path, rule: str) -> None:
    update = Update(rule, "float32", [700] * 513)
    update.small["decay"] = (np.arange(513) // 5 % 2).astype(np.float32)
    agrees(update, folder)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=6),
    before=st.integers(0, 9),
    after=st.integers(0, 3),
    shift=st.integers(0, 9),
    dtype=st.sampled_from(list(TOLERANCES)),
    rule=st.sampled_from(RULES),
)
def test_any_shape(folder: Path, sizes: list[int], before: int, after: int, shift: int, dtype: str, rule: str) -> None:
    shifts = dict.fromkeys(("master", "data", "grad", "velocity", "exp_avg", "exp_avg_sq"), shift)
    agrees(Update(rule, dtype, sizes, before=before, after=after, shifts=shifts), folder)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_skipped_step_changes_no_bit(folder: Path, dtype: str, rule: str) -> None:
    update = Update(rule, dtype, [7, 0, 3000, 64])
    update.view("grad")[100] = np.nan
    update.small["flags"][:2] = 1, 2
    kernel = update.on("cpu")
    steps = update.small["steps"].copy()
    with Kernels(folder):
        kernel.run()
        optimizer.advance_steps(kernel.small["steps"], kernel.small["flags"])
    assert bits(kernel.holders.values()) == bits(update.holders.values())
    np.testing.assert_array_equal(kernel.small["steps"], steps)
    kernel.small["flags"][:2] = 0, 4
    with Kernels(folder):
        kernel.run()
        optimizer.advance_steps(kernel.small["steps"], kernel.small["flags"])
    assert bits([kernel.view("master")]) != bits([update.view("master")])
    np.testing.assert_array_equal(kernel.small["steps"], steps + 1)


def test_nothing_to_update(folder: Path) -> None:
    for sizes in ([], [0, 0]):
        for rule in RULES:
            agrees(Update(rule, "float32", sizes, before=3, after=4), folder)


@pytest.mark.parametrize("count", [0, 1, 111, 256, 1000])
def test_clip_factor(folder: Path, count: int, rng: np.random.Generator) -> None:
    sums = rng.random(count)
    norm = float(np.sqrt(sums.sum())) / 8
    for max_norm in (norm / 3 or 1.0, norm * 3 or 1.0, np.inf):
        for limit, valid in ((np.inf, True), (max(norm, 1e-300) / 2, norm == 0)):
            results = []
            for on_host in (True, False):
                out, flags = np.full(1, np.nan), np.array([0, 7, 0], np.int32)
                if on_host:
                    with Kernels(folder):
                        optimizer.clip_factor(sums, np.array([1 / 8]), max_norm, flags, out, limit=limit)
                else:
                    optimizer.clip_factor(sums, np.array([1 / 8]), max_norm, flags, out, limit=limit)
                assert flags.tolist() == [0 if valid else 1, 7, 0]
                np.testing.assert_allclose(out, min(1.0, max_norm / norm) if valid and norm else 1.0, rtol=1e-14)
                results.append(out[0])
            np.testing.assert_allclose(*results, rtol=1e-15)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_norm_that_is_not_finite_is_invalid(folder: Path, bad: float) -> None:
    for sums, inv_scale in ((np.array([1.0, bad]), 1.0), (np.array([1e300]), 1e200)):
        for place in (None, Kernels(folder)):
            out, flags = np.full(1, np.nan), np.zeros(4, np.int32)
            if place is None:
                optimizer.clip_factor(sums, np.array(inv_scale), 1.0, flags, out)
            else:
                with place:
                    optimizer.clip_factor(sums, np.array(inv_scale), 1.0, flags, out)
            assert flags[0] == 1
            assert out[0] == 1


def test_statistics_and_scaler(folder: Path) -> None:
    with Kernels(folder):
        for dtype in (np.float32, np.float64, np.int64):
            for flag in (0, 1):
                running, pending = np.arange(700).astype(dtype), 10 + np.arange(700).astype(dtype)
                optimizer.commit_statistics(running, pending, np.array([flag], np.int32))
                for a in (running, pending):
                    np.testing.assert_array_equal(a, np.arange(700) + (0 if flag else 10))
        plain = PlainScaler(65536.0, 3, 1e-4, 65536.0)
        scale, inverse, counters = np.array(65536.0), np.array(2.0**-16), np.zeros(3, np.int64)
        generator = np.random.default_rng(0)
        for phase in range(12):
            for invalid in generator.random(40) < (0.02, 0.5, 0.95)[phase % 3]:
                plain.update(bool(invalid))
                optimizer.scaler_update(scale, inverse, counters, np.array([invalid], np.int32), growth_interval=3)
                assert (float(scale), counters.tolist()) == (plain.scale, plain.counters)
                assert float(inverse) == 1 / plain.scale
