"""Comparing policies and repeating searches, on candidates that seem to take what a test tells them."""

import json
import math

import pytest
from finder_fakes import PROBLEM, Clock, Fake, only

from flcuda.errors import CudnnNotSupportedError
from flcuda.finder import default_store, search
from flcuda.finder.compare import Comparison, compare, repeat
from flcuda.finder.policy import Policy
from flcuda.finder.problem import Problem
from flcuda.finder.problems import parse_problems

OTHER = PROBLEM.with_direction("backward_filter")
FAST = Policy()
POLICIES = {
    "fastest": FAST,
    "repeatable": Policy(deterministic=True),
    "small": Policy(workspace_limit=100),
    "heuristic": Policy(mode="heuristic"),
}
# in the source's own order; milliseconds are a thousandth more
FAKES = (
    Fake("first", delay=7, workspace=50),
    Fake("racy", delay=2, deterministic=False, workspace=200),
    Fake("steady", delay=3, workspace=200),
    Fake("small", delay=5, workspace=100, deterministic=False),
)


def stored() -> int:
    folder = default_store().folder
    return len(list(folder.glob("*.json"))) if folder.exists() else 0


def test_each_policy_picks_from_one_search(monkeypatch):
    source = only(monkeypatch, *FAKES)
    found = compare([PROBLEM, OTHER, PROBLEM], POLICIES, device="cpu")
    assert found.counts == {PROBLEM: 2, OTHER: 1}
    picks = {name: cost.id for name, cost in found.costs[PROBLEM].items()}
    assert picks == {
        "fastest": "fake:racy",
        "repeatable": "fake:steady",
        "small": "fake:small",
        "heuristic": "fake:first",
    }
    assert [found.total_ms(name) for name in POLICIES] == pytest.approx([3 * ms for ms in (2.001, 3.001, 5.001, 7.001)])
    assert found.ratio("fastest") == found.geometric_mean("fastest") == 1
    assert found.ratio("heuristic") == pytest.approx(7.001 / 2.001)
    assert found.geometric_mean("small") == pytest.approx(5.001 / 2.001)
    assert found.costs[OTHER]["repeatable"].deterministic is True
    assert found.costs[OTHER]["small"].workspace == 100
    # one search and one question for the heuristic a problem
    assert [policy.mode for policy in source.asked] == ["find", "heuristic"] * 2
    assert stored() == 0
    assert default_store().get(search.find(PROBLEM, device="cpu", store=False).key) is None


def test_what_changes_the_measurement_has_a_search_of_its_own(monkeypatch):
    source = only(monkeypatch, *FAKES)
    policies = {"cold": FAST, "warm": Policy(l2="warm"), "safe": Policy(deterministic=True)}
    found = compare([PROBLEM], policies, device="cpu")
    assert [policy.l2 for policy in source.asked] == ["cold", "warm"]
    assert not any(policy.deterministic for policy in source.asked)
    assert list(found.costs[PROBLEM]) == ["cold", "warm", "safe"]


def test_the_widest_workspace_limit_is_searched(monkeypatch):
    huge = 1 << 40
    source = only(monkeypatch, Fake("huge", workspace=huge), Fake("plain", delay=4))
    found = compare([PROBLEM], {"default": FAST, "large": Policy(workspace_limit=huge)}, device="cpu")
    assert source.asked[0].workspace_limit == huge
    assert {name: cost.id for name, cost in found.costs[PROBLEM].items()} == {
        "default": "fake:plain",
        "large": "fake:huge",
    }


def test_the_heuristic_passes_over_what_fails(monkeypatch):
    refusal = CudnnNotSupportedError("build", 3000, "no", "CUDNN_STATUS_NOT_SUPPORTED")
    only(monkeypatch, Fake("broken", build_error=refusal), Fake("slow", delay=9), Fake("fast", delay=1))
    found = compare([PROBLEM], {"find": FAST, "heuristic": Policy(mode="heuristic")}, device="cpu")
    assert found.costs[PROBLEM]["heuristic"].id == "fake:slow"


def test_a_heuristics_pick_that_was_not_measured_has_no_time(monkeypatch):
    source = only(monkeypatch, Fake("known", delay=1))
    own = type(source).candidates

    def candidates(problem, policy, device):
        if policy.mode == "heuristic":
            yield Fake("unknown").candidate("fake")
        yield from own(source, problem, policy, device)

    source.candidates = candidates
    found = compare([PROBLEM], {"find": FAST, "heuristic": Policy(mode="heuristic")}, device="cpu")
    assert found.costs[PROBLEM]["heuristic"].ms is None
    assert "fake:unknown" in found.costs[PROBLEM]["heuristic"].reason
    assert found.missing("heuristic") == [PROBLEM]


def test_max_error_verifies(monkeypatch):
    wrong = Fake("wrong", value=1.0)
    only(monkeypatch, wrong)
    found = compare([PROBLEM], {"find": FAST, "exact": Policy(max_error=1e-3)}, device="cpu")
    # its results, all 1, are wrong, so that nothing is left for either
    assert found.costs == {}
    assert "fake:wrong" in found.failures[PROBLEM]


def test_failures_are_kept_beside_results(monkeypatch):
    source = only(monkeypatch, Fake("good", delay=1))
    own = source.candidates

    def candidates(problem, policy, device):
        if problem == OTHER:
            yield Fake("bad", reason="is refused here").candidate("fake")
        else:
            yield from own(problem, policy, device)

    source.candidates = candidates
    told = []
    found = compare([OTHER, PROBLEM], {"find": FAST}, device="cpu", progress=lambda *told_of: told.append(told_of))
    assert told == [(0, 2, OTHER), (1, 2, PROBLEM), (2, 2, PROBLEM)]
    assert list(found.costs) == [PROBLEM]
    assert "is refused here" in found.failures[OTHER]
    text = str(found)
    assert "not measured:" in text
    assert "is refused here" in text
    assert json.loads(found.to_json())["failures"][0]["problem"] == str(OTHER)
    assert "is refused here" in found._repr_html_()
    again = repeat([OTHER, PROBLEM], 3, device="cpu")
    assert list(again.problems) == [PROBLEM]
    assert "is refused here" in str(again)


def test_a_policy_without_a_pick(monkeypatch):
    only(monkeypatch, Fake("racy", deterministic=False, delay=1))
    found = compare([PROBLEM, OTHER], {"fastest": FAST, "safe": Policy(deterministic=True)}, device="cpu")
    assert found.missing("safe") == [PROBLEM, OTHER]
    assert found.total_ms("safe") == 0
    assert math.isnan(found.ratio("safe"))
    assert "not deterministic" in found.costs[PROBLEM]["safe"].reason
    text = str(found)
    assert "safe has no time:" in text
    assert "nan" not in text
    totals = json.loads(found.to_json())["totals"]
    assert totals["safe"] == {"total_ms": 0.0, "ratio": None, "geometric_mean": None, "missing": 2}


def test_times_from_elsewhere(monkeypatch):
    only(monkeypatch, *FAKES)
    found = compare([PROBLEM, OTHER, PROBLEM], {"fastest": FAST}, device="cpu")
    more = found.with_times("PyTorch", {PROBLEM: 4.002})
    assert found.names == ("fastest",)
    assert more.names == ("fastest", "PyTorch")
    # the ratio is over what both have
    assert more.ratio("PyTorch") == pytest.approx(2)
    assert more.total_ms("PyTorch") == pytest.approx(8.004)
    assert more.missing("PyTorch") == [OTHER]
    assert more.differing() == [(PROBLEM, pytest.approx(2))]
    third = more.with_times("other", {PROBLEM: 1.0, OTHER: 10.0})
    assert [problem for problem, _ in third.differing()] == [OTHER, PROBLEM]
    for name, times, text in (
        ("fastest", {}, "taken"),
        ("more", {PROBLEM.with_direction("backward_data"): 1.0}, "not of this comparison"),
        ("more", {PROBLEM: 0.0}, "above 0"),
        ("more", {PROBLEM: math.nan}, "above 0"),
    ):
        with pytest.raises(ValueError, match=text):
            found.with_times(name, times)
    with pytest.raises(ValueError, match="'nobody' must be one of fastest"):
        found.ratio("nobody")


def test_print_json_and_html(monkeypatch):
    only(monkeypatch, *FAKES)
    lines = [f"forward n{n} c3 6x5 k4 3x3 p1 float32 nchw" for n in range(1, 14)]
    problems = [Problem.parse(line) for line in lines]
    found = compare([*problems, problems[0]], POLICIES, device="cpu").with_times("a <name>", {problems[0]: 20.0})
    text = str(found)
    assert max(map(len, text.split("\n"))) <= 80
    assert "13 problems, which occur 14 times" in text
    assert "differing most (milliseconds), 10 of 13:" in text
    # the one with the foreign time differs most
    assert text.index(str(problems[0])) < text.index(str(problems[1]))
    assert f"{20 / 2.001:.2f} x  {problems[0]} (2 times)" in text
    row = next(line.split() for line in text.split("\n") if line.startswith("heuristic"))
    assert row == ["heuristic", "98.01", f"{7.001 / 2.001:.3f}", f"{7.001 / 2.001:.3f}", "0", "13", "0"]
    value = json.loads(found.to_json())
    assert value["totals"]["repeatable"]["total_ms"] == pytest.approx(14 * 3.001)
    assert value["policies"]["small"] == POLICIES["small"].to_json()
    assert value["problems"][0]["count"] == 2
    assert value["problems"][0]["costs"]["fastest"]["id"] == "fake:racy"
    assert value["problems"][1]["costs"]["a <name>"] == {"ms": None}
    html = found._repr_html_()
    assert "a &lt;name&gt;" in html
    assert "<name>" not in html
    assert html.count("<tr>") == 1 + 5 + 1 + 13


def test_bad_arguments():
    for problems, policies, error, text in (
        ([], {"a": FAST}, ValueError, "problems is empty"),
        ([PROBLEM], {}, ValueError, "policies is empty"),
        ([str(PROBLEM)], {"a": FAST}, TypeError, "no Problem"),
        ([PROBLEM], {"a": "fast"}, TypeError, "'a' must be a Policy"),
        ([PROBLEM], {"a": Policy(mode="pinned")}, ValueError, "'pinned'"),
    ):
        with pytest.raises(error, match=text):
            compare(problems, policies, device="cpu")
    for times, policy, error, text in (
        (1, None, ValueError, "times 1 must be 2"),
        (2.0, None, TypeError, "times must be an integer"),
        (2, Policy(mode="heuristic"), ValueError, "'heuristic' measures nothing"),
    ):
        with pytest.raises(error, match=text):
            repeat([PROBLEM], times, policy, device="cpu")


def test_real_candidates():
    problems = parse_problems("all n2 c8 9x9 k8 3x3 p1")
    found = compare(problems, {"fastest": FAST, "exact": Policy(max_error=0.1)}, device="cpu")
    assert isinstance(found, Comparison)
    assert not found.failures
    assert found.total_ms("fastest") > 0


# --- repeat -----------------------------------------------------------------------------------------------------------


class Moody(Fake):
    """A candidate whose seeming time is another one in each search."""

    def __init__(self, algo, times, **how):
        super().__init__(algo, **how)
        self.times = times

    def __call__(self, *operands):
        super().__call__(*operands)
        # one build a search
        Clock.last_ms = self.times[(self.builds - 1) % len(self.times)]


def test_regret_is_by_pooled_medians(monkeypatch):
    # medians over the searches: 10 and 11; the second is picked once, when the first one seems slow
    only(monkeypatch, Moody("a", [10.0, 20.0, 10.0, 10.0]), Moody("b", [11.0, 11.0, 11.0, 11.0]))
    found = repeat([PROBLEM], 4, device="cpu")
    one = found.problems[PROBLEM]
    assert one.picks == ("fake:a", "fake:b", "fake:a", "fake:a")
    assert one.pooled_ms == {"fake:a": 10, "fake:b": 11}
    assert one.changes == found.changes == 2
    assert one.best == "fake:a"
    assert one.regrets == pytest.approx((0, 0.1, 0, 0))
    assert found.mean_regret == pytest.approx(0.025)
    assert found.largest_regret == pytest.approx(0.1)
    assert found.total_regrets == pytest.approx((0, 0.1, 0, 0))
    assert stored() == 0
    text = str(found)
    assert "the choice changed in 2 of 3 repeats; 0 of 1 problems never changed" in text
    assert "mean 2.50%, largest 10.00%" in text
    assert "fake:a 10.00 ms (3 times); fake:b 11.00 ms; best fake:a" in " ".join(text.split())
    assert max(map(len, text.split("\n"))) <= 80
    value = json.loads(found.to_json())
    assert value["changes"] == 2
    assert value["problems"][0]["picks"] == list(one.picks)
    assert value["mean_total_regret"] == pytest.approx(0.025)


def test_the_total_counts_a_problem_as_often_as_it_occurs(monkeypatch):
    source = only(monkeypatch, Fake("unused"))
    fakes = {
        PROBLEM: [Moody("a", [10.0, 20.0, 10.0]), Moody("b", [12.0])],
        OTHER: [Fake("c", delay=2)],
    }
    source.candidates = lambda problem, policy, device: (fake.candidate("fake") for fake in fakes[problem])
    found = repeat([PROBLEM, OTHER, OTHER, OTHER], 3, Policy(deterministic=True), device="cpu")
    assert found.problems[OTHER].changes == 0
    assert found.total_regrets == pytest.approx((0, 2 / (10 + 3 * 2.001), 0))
    assert found.mean_regret == pytest.approx(0.2 / 6)
    assert found.policy.deterministic


def test_labels_stay_apart_when_candidates_share_an_algorithm(monkeypatch):
    only(monkeypatch, Fake("a", delay=3, parameters=(("tile", 1),)), Fake("a", delay=2, parameters=(("tile", 2),)))
    found = repeat([PROBLEM], 2, device="cpu")
    assert found.problems[PROBLEM].picks == ("fake:a/tile=2",) * 2
    assert set(found.problems[PROBLEM].pooled_ms) == {"fake:a/tile=1", "fake:a/tile=2"}
