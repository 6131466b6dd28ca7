"""The order of candidates under a policy, and what a policy forbids."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flcuda.finder.candidate import Candidate
from flcuda.finder.policy import Policy
from flcuda.finder.ranking import TIE, order_of, ranked, refusal
from flcuda.finder.verify import Verification
from flcuda.timing import Timing


@dataclass(frozen=True)
class Entry:
    candidate: Candidate
    timing: Timing


def entry(algo, ms, *, spread=0.0, host_us=1.0, source="graph", **candidate):
    made = Candidate(source, algo, "fma", candidate.pop("workspace", 0), candidate.pop("deterministic", True), None)
    return Entry(made, Timing(ms, ms - spread / 2, ms + spread / 2, 10, host_us))


def order(entries, policy=None):
    found = ranked(
        entries, policy or Policy(), timing_of=lambda each: each.timing, candidate_of=lambda each: each.candidate
    )
    return [each.candidate.algo for each in found]


def test_by_the_device_the_host_or_the_larger():
    entries = [entry("1", 0.10, host_us=30), entry("2", 0.02, host_us=90), entry("3", 0.05, host_us=40)]
    assert order(entries) == ["2", "3", "1"]
    assert order(entries, Policy(time="host")) == ["1", "3", "2"]
    assert order(entries, Policy(time="both")) == ["3", "2", "1"]


def test_ties_go_to_the_lower_id():
    assert order([entry("62", 1.000, spread=0.02), entry("7", 1.004, spread=0.0), entry("9", 1.2)]) == ["7", "62", "9"]
    # engines are numbers: 9 comes before 62
    assert order([entry("62", 1.000, spread=0.02), entry("9", 1.004, spread=0.02)]) == ["9", "62"]


def test_what_differs_by_more_than_the_spread_is_no_tie():
    assert order([entry("62", 1.000, spread=0.002), entry("7", 1.004, spread=0.003)]) == ["62", "7"]


def test_a_wide_spread_hides_no_more_than_the_limit():
    slower = 1 + 1.5 * TIE
    assert order([entry("62", 1.0, spread=0.5), entry("7", slower, spread=0.5)]) == ["62", "7"]


def test_one_that_has_two_speeds_is_no_tie():
    steady = Entry(entry("67", 1.0).candidate, Timing(0.0505, 0.0504, 0.0507, 10, 1.0))
    unsteady = Entry(entry("9", 1.0).candidate, Timing(0.0506, 0.0504, 0.0530, 10, 1.0))
    assert order([steady, unsteady]) == ["67", "9"]
    assert order([steady, Entry(unsteady.candidate, Timing(0.0506, 0.0504, 0.0508, 10, 1.0))]) == ["9", "67"]


@given(st.lists(st.tuples(st.integers(0, 99), st.floats(0.01, 1.0), st.floats(0, 0.3)), max_size=12), st.randoms())
def test_the_order_does_not_depend_on_the_order_of_measuring(rows, random):
    entries = [entry(f"{number}", ms, spread=spread) for number, ms, spread in rows]
    shuffled = entries.copy()
    random.shuffle(shuffled)
    assert order(entries) == order(shuffled)
    if entries:
        best = min(each.timing.median_ms for each in entries)
        picked = next(each for each in entries if each.candidate.algo == order(entries)[0])
        assert min(
            each.timing.median_ms for each in entries if each.candidate.algo == picked.candidate.algo
        ) <= best * (1 + TIE)


def test_order_of_mixed_parameters():
    candidates = [
        Candidate("graph", "4", "fma", 0, True, None, (("a", 1), ("b", "x"))),
        Candidate("graph", "4", "fma", 0, True, None, (("a", "1"),)),
        Candidate("legacy", "FFT", "fma", 0, True, None),
    ]
    assert sorted(candidates, key=order_of)[-1].source == "legacy"


@pytest.mark.parametrize(
    ("policy", "candidate", "verification", "reason"),
    [
        (Policy(), {}, None, None),
        (Policy(workspace_limit=99), {"workspace": 100}, None, "workspace of 100 bytes is above the limit of 99"),
        (Policy(), {"workspace": 1001}, None, "workspace of 1001 bytes is above the limit of 1000"),
        (Policy(workspace_limit=2000), {"workspace": 1001}, None, None),
        (Policy(deterministic=True), {"deterministic": False}, None, "not deterministic"),
        (Policy(deterministic=True), {}, Verification(0, 1, False, None), "a second run gave other bits"),
        (Policy(), {}, Verification(0, 1, False, None), None),
        (Policy(max_error=1e-4), {}, Verification(1, 2, None, None, 2e-4), "error of 0.0002 is above the 0.0001"),
        (Policy(max_error=1e-4), {}, Verification(1, 2, None, None, float("nan")), "error of nan"),
        (Policy(max_error=1e-3), {}, Verification(1, 2, None, None, 2e-4), None),
    ],
)
def test_refusal(policy, candidate, verification, reason):
    found = refusal(entry("1", 1.0, **candidate).candidate, verification, policy, 1000)
    assert (found is None) if reason is None else (found is not None and reason in found)
