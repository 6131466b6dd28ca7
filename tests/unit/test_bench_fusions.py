"""The benchmark of the fusions: what its graphs compute beside the parts, its counts, and its process of its own."""

import io
import json
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from bench_scripts import loading

from flcuda import graph_reference
from flcuda.cudnn.graph import Graph
from flcuda.device import CPU
from flcuda.errors import cudnn_error
from flcuda.finder import problems


@pytest.fixture(scope="module")
def bench():
    with loading() as load:
        yield load("bench_fusions")


class Numbers:
    """Has the methods of a Graph that the fused graphs are drawn with, and computes them in float64."""

    def __init__(self, arrays):
        self.arrays = arrays

    def tensor(self, shape, dtype, *, layout, name):
        assert layout == "nhwc"
        given = np.asarray(self.arrays[name], np.float64)
        return given.reshape(shape)

    @staticmethod
    def output(tensor, *, dtype):
        return tensor

    mul = staticmethod(np.multiply)
    add = staticmethod(np.add)
    sub = staticmethod(np.subtract)
    reduction = staticmethod(graph_reference.reduction)
    generate_statistics = staticmethod(graph_reference.generate_statistics)
    batch_norm_backward_weights = staticmethod(graph_reference.batch_norm_backward_weights)
    convolution_forward = staticmethod(graph_reference.convolution_forward)
    convolution_backward_data = staticmethod(graph_reference.convolution_backward_data)
    convolution_backward_filter = staticmethod(graph_reference.convolution_backward_filter)

    @staticmethod
    def relu(x):
        return np.maximum(x, 0)

    @staticmethod
    def relu_backward(dy, x):
        return np.where(x > 0, dy, 0)


def site(bench, **changes):
    sizes = {"batch": 3, "channels": 4, "size": 6, "filters": 4, "window": 3, "stride": 1}
    return bench.Site(**{**sizes, **changes}, counts={"all": 1})


def computed(bench, pattern, place, precision):
    """The results of a fused graph, the operands, and what the parts give."""
    maker = bench.Bench(CPU, precision, "nhwc", None)
    draft = bench.Draft(Graph(), place, precision)
    pattern.draw(draft)
    draft.graph.check()
    arrays = bench.operands(maker, draft, precision)
    parts = pattern.parts(bench.Convolutions(maker, precision), place, arrays)
    expected = bench.masked(parts.run(), arrays)
    numbers = bench.Draft(Numbers(arrays), place, precision)
    pattern.draw(numbers)
    found = {**arrays, **{role: np.asarray(value, np.float32) for role, value in numbers.roles.items()}}
    return found, expected, parts


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("index", [0, 1, 3, 4, 5, 6, 7, 8])
def test_a_fused_graph_computes_what_the_parts_do(bench, index, precision):
    pattern = bench.PATTERNS[index]
    place = site(bench, **({"stride": 2, "filters": 6} if pattern.kind == "all" else {}))
    found, expected, _ = computed(bench, pattern, place, precision)
    if pattern.finalizes:
        count = np.prod(place.y) // place.filters
        ones = np.ones((1, place.filters, 1, 1))
        made = graph_reference.batch_norm_finalize(
            found["total"], found["square_sum"], ones, ones, count=count, epsilon=bench.EPS
        )
        found |= {"mean_of_y": made[2].astype(np.float32).ravel(), "inverse_of_y": made[3].astype(np.float32).ravel()}
    for role in ("dweight", "dbias"):
        if role in expected:
            found[role] = found[role].ravel()
    off = bench.errors(found, expected)
    assert off
    assert max(off.values()) < bench.TOLERANCE[precision], off
    # and it is no comparison of zeros, nor one that always holds
    wrong = {role: found[role] * np.float32(1.2) for role in expected}
    assert min(value for role, value in bench.errors(wrong, expected).items() if role != "mean_of_y") > 0.1


def test_what_follows_a_graph_is_our_pass_of_the_same(bench):
    patterns = {pattern.name: pattern for pattern in bench.PATTERNS}
    found, expected, parts = computed(bench, patterns["data gradient, relu's"], site(bench), "float16")
    assert set(expected) == {"dz"}
    found["dz"][...] = 1
    parts.after()
    _, _, parts = computed(bench, patterns["data gradient, add, end's relu, weight sums"], site(bench), "float16")
    both, first = parts.rest
    assert both().shape == site(bench).x
    assert len(first()) == 3


def test_counts_of_a_step(bench):
    places = list(bench.sites(128, 224))
    counts = {kind: sum(place.counts.get(kind, 0) for place in places) for kind in ("all", "inner", "second", "end")}
    assert counts == {"all": 36, "inner": 35, "second": 16, "end": 12}
    assert sum(place.counts.get("normalised end", 0) for place in places) == 3
    # the problems are ResNet-34's, but for the stem's padded channels
    network = problems("resnet34", 128, dtype="float16", layout="nhwc", distinct=False)
    wanted = Counter(str(problem).replace("c3 ", "c8 ") for problem in network if problem.direction == "forward")
    assert wanted == {str(place.problem("forward", "float16")): place.counts["all"] for place in places}


def test_what_is_measured_has_parts(bench):
    cases = bench.cases_of("", 128, 224, measurable=True)
    assert {pattern.name for pattern, _ in cases} == {each.name for each in bench.PATTERNS if each.parts is not None}
    assert len(bench.cases_of("", 128, 224, measurable=False)) > len(cases)
    assert len(bench.cases_of("end's", 128, 224, measurable=True)) == 7


def test_bytes(bench):
    patterns = {pattern.name: pattern for pattern in bench.PATTERNS}
    first = next(place for place in bench.sites(128, 224) if "second" in place.counts)
    a = 2 * 128 * 64 * 56 * 56
    assert patterns["convolution, statistics"].saved_bytes(first, 2) == a
    assert patterns["scale, bias, relu, convolution, statistics"].saved_bytes(first, 2) == 3 * a
    assert patterns["data gradient, relu's"].saved_bytes(first, 2) == -a
    assert patterns["data gradient, add, end's relu, weight sums"].saved_bytes(first, 2) == a + a // 16


def configuration(engine, *notes):
    return SimpleNamespace(engine_id=engine, behavior_notes=notes)


def test_only_so_many_are_run_and_fewer_that_compile(bench):
    quick = [configuration(2) for _ in range(bench.LISTED + 3)]
    slow = [configuration(3, "runtime_compilation") for _ in range(4)]
    taken = bench.chosen([*slow, *quick], 2)
    assert taken == [*slow[:2], *quick[: bench.LISTED]]
    assert bench.engines_text([*quick[:2], *slow[:1]]) == "2 x2, 3c x1"


# --- the process that measures ----------------------------------------------------------------------------------------

CHILD = """
import json, os, sys, time
asked = json.load(sys.stdin)
def tell(case, **line):
    print(json.dumps({"case": case, **line}), flush=True)
print("a word of a library")
for case in asked["cases"]:
    tell(case, trying="")
    skip = asked["skip"].get(str(case), [])
    if case == 1 and "bad" not in skip:
        tell(case, trying="bad")
        os._exit(7)
    if case == 2:
        os._exit(8)
    if case == 3 and "slow" not in skip:
        tell(case, trying="slow")
        time.sleep(30)
    tell(case, row={"case": case, "failed": {"refused": "no"}})
"""


def test_a_fault_ends_one_engine_only(bench):
    cases = bench.cases_of("statistics", 128, 224, measurable=True)[:5]
    rows = bench.ask({}, cases, silent_s=2.0, command=(sys.executable, "-c", CHILD))
    assert rows[0] == {"case": 0, "failed": {"refused": "no"}}
    assert rows[1]["failed"] == {"refused": "no", "bad": "the process ended with status 7"}
    assert rows[2]["error"] == "the process ended with status 8"
    assert (rows[2]["pattern"], rows[2]["site"]) == (cases[2][0].name, str(cases[2][1]))
    assert rows[3]["failed"]["slow"] == "the process ended with status -9"
    assert rows[4]["case"] == 4
    assert list(bench.table(rows[2:3]))[-1].endswith("status 8")


def test_a_process_that_cannot_begin_is_an_error(bench):
    cases = bench.cases_of("statistics", 128, 224, measurable=True)[:1]
    with pytest.raises(RuntimeError, match="ended with status 1 before it began"):
        bench.ask({}, cases, command=(sys.executable, "-c", "raise SystemExit(1)"))


# --- what is printed --------------------------------------------------------------------------------------------------


def measured_row(name, gain, **changes):
    row = {
        "pattern": name,
        "site": "256x14x14 k512 3x3 s2",
        "count": 11,
        "fused_us": 1234.5,
        "parts_us": 1234.5 + gain,
        "plain_us": 1000.0,
        "gain_us": gain,
        "step_us": 11 * gain,
        "same_bits": False,
        "engine": "engine2[tile_size=4]",
        "queued": True,
        "failed": {},
        "refusal": [],
    }
    return {**row, **changes}


def test_tables_fit_a_terminal(bench):
    rows = [
        measured_row(bench.PATTERNS[3].name, -3.0),
        measured_row(bench.PATTERNS[3].name, 5.0, failed={"engine3[x=1]": "wrong: " + "x" * 200}),
        {**measured_row(bench.PATTERNS[8].name, 0.0), "refusal": ["r" * 300]},
    ]
    del rows[2]["gain_us"], rows[2]["step_us"]
    lines = list(bench.table(rows))
    assert lines[0] == f"{bench.PATTERNS[3].name}: +22 us a step"
    assert f"{bench.PATTERNS[8].name}: not measured" in lines
    assert sum("left out: engine3" in line for line in lines) == 1
    assert max(map(len, lines)) <= 150
    assert all(len(line) <= 100 for line in lines if not line.startswith("left out"))
    assert json.dumps(bench.totals(rows, "step_us")) == json.dumps({bench.PATTERNS[3].name: 22.0})


def test_planned_rows_are_summed_over_a_step(bench):
    row = {
        "pattern": "p",
        "site": "64x56x56 k64 3x3 s1",
        "count": 6,
        "saved_us": 12.5,
        "engines": "2 x10, 3c x3",
        "intermediate": "float16",
        "by_hand": {"1": "", "4": "why"},
        "refusal": [],
    }
    other = {**row, "count": 2, "engines": "", "by_hand": {}, "refusal": ["likely: a rule"]}
    lines = list(bench.plan_table([row, other]))
    assert lines[0] == "p: 100 us a step of bytes"
    assert lines[2].endswith("2 x10, 3c x3 (16-bit intermediates); by hand 1")
    assert "  none: likely: a rule (1 sites)" in lines
    assert any("by hand: why" in line for line in lines)


# --- measuring, with a graph that the CPU computes --------------------------------------------------------------------


class FakePlan:
    def __init__(self, tag):
        self.tag, self.workspace = tag, 0


@pytest.fixture
def on_the_cpu(bench, monkeypatch):
    """Puts in place of cuDNN a graph that is computed in float64, with engines of several characters."""
    engines = ["engine1[right]", "engine2[wrong]", "engine3[refuses]", "engine4[cannot be built]", "engine5[idle]"]
    refusal = cudnn_error("cudnnBackendExecute", 3000, "not this one")

    class FakeFused:
        def __init__(self, draft, plan, on, scratch):
            self.draft, self.tag = draft, plan.tag

        def run(self, a):
            def run():
                if "refuses" in self.tag:
                    raise refusal
                if "idle" in self.tag:
                    return
                numbers = bench.Draft(Numbers(a), self.draft.site, self.draft.precision)
                on_the_cpu.pattern.draw(numbers)
                for role in ("y", "dz", "total", "square_sum", "dweight", "dbias"):
                    if role in numbers.roles:
                        a[role][...] = np.reshape(numbers.roles[role], a[role].shape)
                        a[role][...] *= 1.5 if "wrong" in self.tag else 1

            return run

    def offered(pattern, place, precision, *, on):
        draft = bench.Draft(Graph(), place, precision)
        pattern.draw(draft)
        listed = [SimpleNamespace(tag=tag, engine_id=int(tag[6]), behavior_notes=()) for tag in engines]
        return bench.Offer(draft, None, "float32", listed)

    def build_plans(listed):
        return [refusal if "cannot" in each.tag else FakePlan(each.tag) for each in listed]

    def finalizing(place, precision, maker, on):
        def of(a):
            a |= {role: np.zeros(place.filters, np.float32) for role in ("mean_of_y", "inverse_of_y")}

            def run():
                count = np.prod(place.y) // place.filters
                sums = graph_reference.batch_norm_finalize(
                    a["total"].astype(float), a["square_sum"].astype(float), 1.0, 0.0, count=count, epsilon=bench.EPS
                )
                a["mean_of_y"][...], a["inverse_of_y"][...] = sums[2:4]

            return run

        return of

    on_the_cpu = SimpleNamespace(pattern=None, engines=engines)
    for name, fake in (
        ("Fused", FakeFused),
        ("offered", offered),
        ("build_plans", build_plans),
        ("finalizing", finalizing),
        ("ExecutionPlan", FakePlan),
        ("handle", lambda: None),
    ):
        monkeypatch.setattr(bench, name, fake)
    monkeypatch.setattr(bench.devices, "workspace", lambda nbytes: None)
    monkeypatch.setattr(bench.devices, "synchronize", lambda device: None)
    return on_the_cpu


@pytest.mark.parametrize("index", [0, 3, 5, 6, 8])
def test_the_fastest_right_engine_is_measured_beside_the_parts(bench, on_the_cpu, index):
    on_the_cpu.pattern = pattern = bench.PATTERNS[index]
    place = bench.Site(2, 4, 6, 4, 3, 1, {pattern.kind: 3})
    convolutions = bench.Convolutions(bench.Bench(CPU, "float16", "nhwc", None), "float16")
    told = []
    row = bench.measured(pattern, place, convolutions, skip=[], compiled=2, repeats=3, budget_s=0.0, tell=told.append)
    json.dumps(row)
    assert row["engine"] == "engine1[right]"
    assert set(row["failed"]) == {*on_the_cpu.engines[1:]}
    assert row["failed"]["engine2[wrong]"].startswith("wrong: ")
    assert "not this one" in row["failed"]["engine3[refuses]"]
    assert [line["trying"] for line in told] == [*on_the_cpu.engines[:3], on_the_cpu.engines[4], ""]
    assert row["step_us"] == 3 * row["gain_us"] == 3 * (row["parts_us"] - row["fused_us"])
    assert row["same_bits"] is True
    assert ("both_us" in row) is (index == 8)
    assert len(list(bench.table([row]))) == 3 + 4
    row = bench.measured(
        pattern, place, convolutions, skip=["engine1[right]"], compiled=2, repeats=3, budget_s=0.0, tell=told.append
    )
    assert "engine" not in row
    assert "not measured" in next(iter(bench.table([row])))


def test_the_child_says_what_it_tries_and_finds(bench, on_the_cpu, capsys):
    on_the_cpu.pattern = bench.PATTERNS[6]
    asked = {"device": "cpu", "precision": "float16", "batch": 1, "size": 32, "only": "relu's, weight sums"}
    bench.child(
        io.StringIO(json.dumps({**asked, "compiled": 2, "repeats": 1, "budget": 0.0, "cases": [3], "skip": {}}))
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["case"] for line in lines} == {3}
    assert lines[0] == {"case": 3, "trying": ""}
    assert lines[-1]["row"]["site"] == "512x1x1 k512 3x3 s1"
    assert "gain_us" in lines[-1]["row"]
