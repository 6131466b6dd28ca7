"""The table behind tests/gpu/test_every_function.py: complete for the bound headers, and it notes what it should."""

from typing import Any

import every_function
import function_families
import numpy as np
import pytest
from every_function import FAMILIES, HEADERS, LISTED, Calls, Listed, RefusedError, Session, functions, newer_than

from flcuda import cudnn
from flcuda.errors import CudnnError, CudnnNotSupportedError


def declared() -> set[str]:
    return {name for family in FAMILIES.values() for name in family.functions}


def test_every_function_is_in_a_family_or_listed() -> None:
    missing = functions().keys() - declared() - LISTED.keys()
    assert not missing, "new functions of the headers: call them in function_families.py, or list them with the reason"


def test_the_names_are_functions_of_these_headers() -> None:
    assert declared() - functions().keys() == set()
    assert LISTED.keys() - functions().keys() == set()
    assert all(entry.reason for entry in LISTED.values())
    # A family calls what is listed only to see that it is refused.
    assert {name for name in declared() & LISTED.keys() if not LISTED[name].refused} == set()
    assert {name for name, entry in LISTED.items() if entry.refused} - declared() == set()


def test_functions_are_read_from_the_bindings() -> None:
    found = functions()
    assert {function.header for function in found.values()} == set(HEADERS)
    assert found["cudnnBackendExecute"] == every_function.Function("graph", 90000)
    assert found["cudnnBackendPopulateCudaGraph"] == every_function.Function("graph", 90500)
    assert found["cudnnSoftmaxBackward"].header == "ops"
    assert found["cudnnFusedOpsExecute"].header == "cnn"
    assert "cudnnRNNForward" not in found
    assert "cudnnGetExecutionPlanWorkspaceSize" in newer_than(91900)
    assert newer_than(cudnn.CUDNN_VERSION) == set()


def fake(outcome: BaseException | None) -> Any:
    def function(*arguments: Any) -> Any:
        if outcome is not None:
            raise outcome
        return arguments

    return function


@pytest.fixture
def functions_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three functions of cuDNN, of which one works, one fails and one refuses."""
    outcomes = {
        "cudnnSetTensor": None,
        "cudnnScaleTensor": CudnnError("cudnnScaleTensor", 2000, ""),
        "cudnnAddTensor": CudnnNotSupportedError("cudnnAddTensor", 3000, ""),
    }
    for name, outcome in outcomes.items():
        monkeypatch.setattr(cudnn, name, fake(outcome), raising=False)


@pytest.mark.usefixtures("functions_of_cudnn")
def test_calls_note_what_returned_and_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    c = Calls()
    assert c.cudnnSetTensor(1, 2) == (1, 2)
    with pytest.raises(CudnnError):
        c.cudnnScaleTensor()
    with pytest.raises(CudnnNotSupportedError):
        c.cudnnAddTensor()
    assert (c.executed, c.refused) == ({"cudnnSetTensor"}, {"cudnnAddTensor"})
    assert c.CUDNN_TENSOR_NHWC == cudnn.CUDNN_TENSOR_NHWC
    monkeypatch.setitem(LISTED, "cudnnAddTensor", Listed("no such hardware", refused=True))
    with pytest.raises(RefusedError):
        c.cudnnAddTensor()
    with pytest.raises(AttributeError):
        _ = c.cudnnNothing


def family_of(monkeypatch: pytest.MonkeyPatch, run: Any, *names: str) -> every_function.Outcome:
    monkeypatch.setitem(FAMILIES, "probe", every_function.Family(run, frozenset(names)))
    monkeypatch.setattr(every_function.device, "cuda_available", lambda: False)
    monkeypatch.setattr(every_function.library, "load", lambda: type("Loaded", (), {"version": 91900}))
    return every_function.run_family("probe", 0)


@pytest.mark.usefixtures("functions_of_cudnn")
def test_a_family_says_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def right(s: Session) -> None:
        s.stack.callback(closed.append, True)
        s.c.cudnnSetTensor()

    outcome = family_of(monkeypatch, right, "cudnnSetTensor", "cudnnGetExecutionPlanWorkspaceSize")
    assert (outcome.executed, outcome.failure, outcome.version) == ({"cudnnSetTensor"}, "", 91900)
    outcome = family_of(monkeypatch, right, "cudnnSetTensor", "cudnnOpTensor")
    assert outcome.failure == "declared but not executed: cudnnOpTensor"

    def wrong(s: Session) -> None:
        right(s)
        s.c.cudnnAddTensor()

    outcome = family_of(monkeypatch, wrong, "cudnnSetTensor", "cudnnAddTensor")
    assert "CudnnNotSupportedError" in outcome.failure
    assert outcome.refused == {"cudnnAddTensor"}
    monkeypatch.setitem(LISTED, "cudnnAddTensor", Listed("no such hardware", refused=True))
    outcome = family_of(monkeypatch, wrong, "cudnnSetTensor", "cudnnAddTensor")
    assert (outcome.executed, outcome.refused, outcome.failure) == ({"cudnnSetTensor"}, {"cudnnAddTensor"}, "")
    assert closed == [True] * 4


def test_folding_keeps_every_number() -> None:
    """The reference of tensor transforms, on a case that is easy to see."""
    x = np.arange(1.0, 17.0).reshape(1, 1, 4, 4)
    found = function_families.folded(x, [0, 0, 0, 0], [0, 0, 0, 0], [2, 2])
    np.testing.assert_array_equal(found[0, :, 0, 0], [1, 2, 5, 6])
    padded = function_families.folded(x, [0, 0, 1, 0], [0, 0, 0, 0], [2, 2])
    assert padded.shape == (1, 4, 3, 2)
    assert padded.sum() == x.sum()
    np.testing.assert_array_equal(padded[0, :, 0, 0], [0, 0, 1, 2])
