"""Every function of cuDNN's graph, ops and cnn headers runs here, or is listed with the reason why it cannot."""

from collections.abc import Iterator

import function_families  # noqa: F401 (fills FAMILIES)
import pytest
from every_function import FAMILIES, LISTED, Outcome, Worker, functions, newer_than


@pytest.fixture(scope="module")
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    made = Worker(request.config.getoption("--seed"))
    yield made
    made.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_family(worker: Worker, name: str) -> None:
    outcome = worker.outcome(name)
    assert not outcome.failure, outcome.failure


def test_every_function_ran_or_is_listed(worker: Worker) -> None:
    """Runs the families that have not run yet, so that it holds by itself too."""
    outcomes: dict[str, Outcome] = {name: worker.outcome(name) for name in FAMILIES}
    executed = frozenset[str]().union(*(outcome.executed for outcome in outcomes.values()))
    refused = frozenset[str]().union(*(outcome.refused for outcome in outcomes.values()))
    newer = newer_than(max(outcome.version for outcome in outcomes.values()))
    print(f"{len(executed)} of {len(functions())} functions ran, {len(LISTED)} are listed, {len(newer)} are newer")
    assert {name: LISTED[name].reason for name in executed & LISTED.keys()} == {}, "listed, but they ran"
    assert {name for name, entry in LISTED.items() if entry.refused} - refused - newer == set(), "listed as refused"
    missing = functions().keys() - executed - LISTED.keys() - newer
    failed = {name: outcome.failure for name, outcome in outcomes.items() if outcome.failure}
    assert {name: name in refused for name in missing} == {}, f"neither ran nor listed; failed families: {failed}"
