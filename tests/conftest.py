"""Fixtures and the one rule by which a GPU test may be skipped."""

import collections
import os
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest

from flcuda import device
from flcuda.finder.plan import Plan

# No deadline: how long an example takes says nothing on a machine that does other things as well.
hypothesis.settings.register_profile("flcuda", deadline=None)
hypothesis.settings.load_profile("flcuda")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="a test that needs a GPU fails, not skips, without one")
    parser.addoption("--seed", type=int, default=0, help="seed of the random data of the tests")


def pytest_report_header(config: pytest.Config) -> str:
    return f"flcuda: seed {config.getoption('--seed')}, GPU {'found' if device.cuda_available() else 'none'}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says once a reason why tests were skipped, not once a test."""
    reasons = collections.Counter(
        report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        for report in terminalreporter.getreports("skipped")
    )
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/gpu/" in str(item.path).replace(os.sep, "/"):
            item.add_marker(pytest.mark.gpu)
    reason = device.cuda_missing_reason()
    if reason is None:
        return
    on_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if on_gpu and config.getoption("--require-gpu"):
        raise pytest.UsageError(f"--require-gpu: {len(on_gpu)} tests need a GPU, and there is none here: {reason}")
    for item in on_gpu:
        item.add_marker(pytest.mark.skip(reason="no CUDA device or driver here"))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(request.config.getoption("--seed"))


@pytest.fixture(autouse=True)
def own_choice_store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has an empty store of choices of its own, never the user's."""
    monkeypatch.setenv("FLCUDA_CHOICES", str(tmp_path_factory.mktemp("choices")))


@pytest.fixture
def only_fast(monkeypatch: pytest.MonkeyPatch) -> Callable[[Plan], None]:
    """Makes a Plan fail where it takes the long way."""

    def arrange(plan: Plan) -> None:
        def long_way(*_: Any) -> None:
            raise AssertionError("the long way was taken")

        monkeypatch.setattr(plan, "_checked", long_way)

    return arrange
