"""The source of the graph API through the real library, on the profile of an H200: no GPU is needed."""

import gc
import json
import math
import subprocess
import sys
import threading
import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import CUDNN, require_device_properties

from flcuda import device as devices
from flcuda.cudnn import bindings, library
from flcuda.cudnn.device_properties import DeviceProperties
from flcuda.cudnn.graph import EngineConfig, Knob
from flcuda.errors import CudnnError, CudnnNotSupportedError
from flcuda.finder import errata, search
from flcuda.finder.choice import Choice, Key
from flcuda.finder.policy import Policy
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem, Problem
from flcuda.finder.sources import graph as module
from flcuda.finder.sources.graph import LIMIT, OF_EACH, GraphSource, offers, operation_graph
from flcuda.finder.sources.reference import Columns
from flcuda.finder.sources.staging import split_padding
from flcuda.finder.store import ChoiceStore

pytestmark = CUDNN

LINES = [
    "n4 c16 14x14 k32 3x3 p1",
    "n2 c3 9x7 k5 3x2 p1x0 s2x1",
    "n2 c4 9x7 k6 3x2 p1 g2",
    "n2 c16 9x7 k16 3x3 p1 g16",
    "n2 c4 9x7 k6 3x3 p0x3 d1x2",
    "n3 c2 11 k6 4 p1 s3",
    "n3 c8 11 k16 4 p2 d2",
    "n1 c4 5x6x7 k2 3x3x1 p0x1x0 s2",
    "n2 c1 6x6 k4 3x3 p1",
    "n2 c4 1x1 k4 1x1",
    "n2 c8 12x12 k8 5x5 p2",
    "n2 c3 5x6 k4 3x3 p1 xs:400x100x14x2",
    "n2 c8 5x6 k8 3x3 p1 ys:2000x3x200x25",
    "n2 c3 5x6 k4 3x3 p1 align:8",
]
WORDS = ["float32 nchw", "float32 nhwc", "tf32 nhwc", "float16 nhwc", "float16 nchw", "bfloat16 nhwc", "float64 nchw"]


@pytest.fixture(scope="module")
def h200():
    require_device_properties()
    with DeviceProperties.from_profile("h200") as properties:
        yield properties


@pytest.fixture
def _on_9_28(h200):
    if library.load().version // 100 != 928:
        pytest.skip(f"holds for cuDNN 9.28; {library.load().version_text} is loaded")


def candidates(properties, line, **policy):
    problem = ConvolutionProblem.parse(line)
    return problem, list(GraphSource(properties).candidates(problem, Policy(**policy), None))


def chosen(candidate, **policy):
    """What `restore` reads of a stored Choice."""
    return SimpleNamespace(
        algo=candidate.algo,
        parameters=candidate.parameters,
        workspace=candidate.workspace,
        policy=Policy(**policy),
    )


# --- what is offered ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [*WORDS, "float32 nchw acc", "bfloat16 nhwc acc"])
@pytest.mark.parametrize("line", LINES)
def test_every_problem_of_one_dtype_has_plans_in_every_direction(h200, line, word):
    for direction in DIRECTIONS:
        problem, found = candidates(h200, f"{direction} {line} {word}")
        usable = [candidate for candidate in found if candidate.reason is None]
        assert usable
        if problem.math == "tensor_op":
            others = Counter(candidate.algo for candidate in usable[LIMIT:])
            assert all(count <= OF_EACH for count in others.values())
        assert len({candidate.identity for candidate in found}) == len(found)
        for candidate in usable:
            assert candidate.source == "graph"
            assert candidate.id == f"graph:{candidate.algo}"
            assert candidate.algo.isdecimal()
            assert candidate.reported_ms is None
            runner = candidate.build()
            assert runner.workspace == candidate.workspace
            knobs = "".join(f",{name}={value}" for name, value in sorted(candidate.parameters))[1:]
            assert runner.plan.tag == f"engine{candidate.algo}" + (f"[{knobs}]" if knobs else "")
            assert runner.plan.uids == (1, 2, 3)
            if problem.math == "fma":
                assert candidate.math == "fma"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_graph_is_the_problem(h200, direction):
    line = "n2 c6 9x7 k4 3x2 p2x1 s2x1 d1x2 g2 bfloat16 nhwc align:16x16x32 xs:2000x2x200x15"
    problem = ConvolutionProblem.parse(f"{direction} {line}")
    tensors = list(operation_graph(problem, properties=h200).tensors.values())
    assert [tensor.name for tensor in tensors] == list(problem.operands)
    for tensor in tensors:
        assert tensor.shape == problem.shape_of(tensor.name)
        assert tensor.strides == problem.strides_of(tensor.name)
        assert tensor.dtype == problem.dtype_of(tensor.name)
        assert tensor.alignment == problem.alignment_of(tensor.name)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_operands_that_engines_get_wrong_are_copied(h200, direction):
    """Aligned to less than 16 bytes; and a filter whose dimensions lie in another order."""
    line = f"{direction} n2 c8 9x7 k16 3x3 p1 float16 nhwc"
    problem = ConvolutionProblem.parse(line)
    plain = operation_graph(problem, properties=h200).tensors
    for words in ("align:4x8x2", "ws:1x16x128x384", "align:1"):
        assert operation_graph(ConvolutionProblem.parse(f"{line} {words}"), properties=h200).tensors == plain
    _, found = candidates(h200, f"{line} align:16x8x16")
    room = -(-16 * 8 * 9 * 2 // 512) * 512
    usable = [candidate for candidate in found if candidate.reason is None]
    assert usable
    for candidate in usable:
        runner = candidate.build()
        assert runner.workspace == candidate.workspace == room + runner.plan.workspace


def test_a_graph_of_an_operand_that_engines_get_wrong_is_refused(h200):
    with pytest.raises(CudnnNotSupportedError, match=r"x is aligned to 8 bytes.*give a copy"):
        graph_candidates(h200, "graph; x float16 8x64x28x28 nhwc align:8; y = silu(%x); out y")


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_1d_is_2d_of_height_1(h200, direction, layout):
    flat = ConvolutionProblem.parse(f"{direction} n2 c8 11 k4 3 p2 s2 d2 float32 {layout}")
    high = ConvolutionProblem.parse(f"{direction} n2 c8 1x11 k4 1x3 p0x2 s1x2 d1x2 float32 {layout}")
    flat_tensors, high_tensors = (operation_graph(problem, properties=h200).tensors for problem in (flat, high))
    assert flat_tensors == high_tensors


def plan_json(problem, properties):
    plan = next(offer.plan for offer in offers(problem, Policy(), properties=properties) if offer.plan is not None)
    return json.loads(plan.to_json())


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_padding_and_beta_reach_cudnn(h200, direction):
    line = f"{direction} n2 c8 9x7 k8 3x3 p2x1 s3x1 d1x2 float32 nchw"
    plain = plan_json(ConvolutionProblem.parse(line), h200)["operationGraph"]
    adding = plan_json(ConvolutionProblem.parse(f"{line} acc"), h200)["operationGraph"]
    text = json.dumps(plain).replace(" ", "")
    assert "[2,1]" in text
    assert json.dumps(plain) != json.dumps(adding)


@pytest.mark.usefixtures("_on_9_28")
def test_the_order_is_cudnns(h200):
    problem, found = candidates(h200, "forward n128 c64 56x56 k64 3x3 p1 float16 nhwc")
    everything = offers(problem, Policy(), properties=h200)
    assert len(everything) == 40
    assert all(offer.plan is not None for offer in everything)
    first = [candidate.identity for candidate in found[:LIMIT]]
    assert first == [offer.candidate.identity for offer in everything[:LIMIT]]
    assert found[0].algo == "62"
    assert candidates(h200, str(problem), mode="heuristic")[1] == found[:LIMIT]


@pytest.mark.parametrize("line", ["backward_data n4 c64 33x33 k64 3x3 p6 d6", "forward n8 c64 14x14 k64 3x3 p1 g2"])
def test_of_rare_convolutions_one_plan_of_each_compiled_engine_is_built(h200, line):
    def compiled(line, **policy):
        _, found = candidates(h200, line, **policy)
        return Counter(candidate.algo for candidate in found if "runtime_compilation" in candidate.notes)

    found = compiled(f"{line} float16 nhwc")
    assert found
    assert set(found.values()) == {1}
    assert not found.keys() & module.SLOW
    common = " ".join(word for word in line.split() if word not in ("d6", "g2"))
    assert not compiled(f"{common} float16 nhwc")
    # in strict float32 all are measured that need none
    assert not compiled(f"{line} float32 nchw")
    # for groups of one channel there are our own kernels
    depthwise = ConvolutionProblem.parse(f"{line.replace('g2', '').replace('d6', '')} g64 float16 nhwc")
    first = {str(each.engine_id) for each in operation_graph(depthwise, properties=h200).heuristics("A")}
    assert compiled(str(depthwise)).keys() <= first


@pytest.fixture
def source(h200):
    made = GraphSource(h200)
    with made.climbing():
        yield made


def test_a_fast_search_climbs_over_what_is_listed(h200, source):
    problem = ConvolutionProblem.parse("forward n8 c160 32x32 k160 3x3 p1 float16 nhwc")
    found = [each for each in source.candidates(problem, Policy(), None) if each.reason is None]
    graph = operation_graph(problem, properties=h200)
    listed = {
        (str(each.engine_id), tuple(each.knobs.items()))
        for mode in ("A", "fallback", "B")
        for each in graph.heuristics(mode)
    }
    seen = {each.identity for each in found}
    distances = []
    for _ in range(3):
        near = list(source.around(problem, found[0], Policy(), None))
        assert len(near) <= module.NEAREST
        for each in near:
            assert each.identity not in seen
            seen.add(each.identity)
            assert (each.algo, each.parameters) in listed
            assert "runtime_compilation" not in each.notes
            before = dict(found[0].parameters)
            distances.append(sum(before[name] != value for name, value in each.parameters))
            assert each.build().workspace == each.workspace
    assert len(distances) > module.NEAREST
    assert distances == sorted(distances)
    assert 1 <= distances[0] <= distances[-1] <= module.NEAR_KNOBS
    # outside of a search nothing is known of what is listed
    assert list(GraphSource(h200).around(problem, found[0], Policy(), None)) == []


def test_a_search_within_another_does_not_end_it(h200):
    problem, source = ConvolutionProblem.parse("forward n8 c160 32x32 k160 3x3 p1 float16 nhwc"), GraphSource(h200)
    with source.climbing():
        leader = next(iter(source.candidates(problem, Policy(), None)))
        near = list(source.around(problem, leader, Policy(), None))
        other = ConvolutionProblem.parse(str(problem).replace("n8", "n9"))
        list(source.candidates(other, Policy(mode="heuristic"), None))
        with source.climbing():
            assert list(source.around(problem, leader, Policy(), None)) == []
        again = list(source.around(problem, leader, Policy(), None))
    assert again
    assert not {each.identity for each in near} & {each.identity for each in again}


def test_what_is_listed_is_kept_until_the_search_ends(h200, monkeypatch):
    """A configuration is 27 KiB of cuDNN's; a candidate may live as long as the process."""
    problem, source = ConvolutionProblem.parse("forward n8 c160 32x32 k160 3x3 p1 float16 nhwc"), GraphSource(h200)
    made = []
    configured = GraphSource._configured
    monkeypatch.setattr(
        GraphSource, "_configured", lambda self, *asked: made.append(asked[1]) or configured(self, *asked)
    )
    listed = weakref.WeakSet()
    heuristics = module.OperationGraph.heuristics

    def watched(self, *arguments, **keywords):
        found = heuristics(self, *arguments, **keywords)
        listed.update(found)
        return found

    monkeypatch.setattr(module.OperationGraph, "heuristics", watched)
    for mode in ("find", "heuristic"):
        with source.climbing():
            candidates = [each for each in source.candidates(problem, Policy(mode=mode), None) if each.reason is None]
            near = list(source.around(problem, candidates[0], Policy(mode=mode), None))
            gc.collect()
            assert len(listed) > len(candidates) + len(near)
        gc.collect()
        assert len(listed) == 0
        assert candidates[1].build().plan.tag != candidates[0].build().plan.tag
    # of a mode in which plans are not built, one that was not built within the search is made anew
    assert made == [candidates[1].algo]


@pytest.mark.usefixtures("_on_9_28")
def test_other_engines_than_the_first_are_heard(h200):
    # of two groups the list begins with twelve of one engine
    _, found = candidates(h200, "forward n32 c224 28x28 k224 3x3 p1 g2 float16 nhwc")
    others = Counter(candidate.algo for candidate in found[LIMIT:])
    assert len(others) >= 2
    compiled = {candidate.algo for candidate in found[LIMIT:] if "runtime_compilation" in candidate.notes}
    assert all(count <= (1 if algo in compiled else OF_EACH) for algo, count in others.items())
    assert compiled
    assert all("tensor_core" in candidate.notes for candidate in found)
    # without tensor cores all that the three modes list
    problem, found = candidates(h200, "backward_filter n64 c64 56x56 k256 1x1 float32 nchw")
    graph = operation_graph(problem, properties=h200)
    listed = {
        (str(each.engine_id), tuple(each.knobs.items()))
        for mode in ("A", "fallback", "B")
        for each in graph.heuristics(mode)
        if "tensor_core" not in each.numerical_notes and "runtime_compilation" not in each.behavior_notes
    }
    offered = {(candidate.algo, candidate.parameters) for candidate in found if candidate.reason is None}
    assert offered <= listed
    assert {algo for algo, _ in listed - offered} <= {"0"}


@pytest.mark.usefixtures("_on_9_28")
def test_the_fallback_is_asked_where_mode_a_has_nothing_usable(h200):
    problem = ConvolutionProblem.parse("forward n128 c64 56x56 k64 3x3 p1 float32 nchw")
    for offer in offers(problem, Policy(), properties=h200):
        if offer.candidate.reason is None:
            assert offer.configuration.mode in ("fallback", "B")
        else:
            assert "tensor_core" in offer.configuration.numerical_notes
    half = ConvolutionProblem.parse("forward n128 c64 56x56 k64 3x3 p1 float16 nhwc")
    assert {offer.configuration.mode for offer in offers(half, Policy(), properties=h200)} == {"A"}


@pytest.mark.parametrize("word", ["float32 nchw", "float32 nhwc", "float16 nhwc fma"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_fma_never_uses_tensor_cores(h200, direction, word):
    problem = ConvolutionProblem.parse(f"{direction} n8 c32 28x28 k32 3x3 p1 {word}")
    found = offers(problem, Policy(), properties=h200)
    refused = 0
    for offer in found:
        if "tensor_core" in offer.configuration.numerical_notes:
            assert offer.plan is None
            assert "tensor cores" in offer.candidate.reason or "lower precision" in offer.candidate.reason
            refused += 1
        else:
            assert offer.candidate.math == "fma"
    assert 0 < refused < len(found)
    # In the report an engine that must not be used is one row.
    rows = [each for each in candidates(h200, str(problem))[1] if each.reason is not None]
    assert len(rows) == len({row.algo for row in rows}) < refused


def test_tf32_prefers_tensor_cores(h200):
    _, found = candidates(h200, "forward n8 c32 28x28 k32 3x3 p1 tf32 nhwc")
    assert found[0].math == "tensor_op"


@pytest.mark.parametrize(
    ("note", "text"),
    [
        ("down_convert_inputs", "lower precision"),
        ("reduced_precision_reduction", "sums in a lower precision"),
        ("winograd_tile_13x13", "13x13"),
    ],
)
def test_imprecise_engines_are_refused(note, text):
    problem = ConvolutionProblem.parse("forward n8 c32 28x28 k32 5x5 p2 tf32 nhwc")
    configuration = SimpleNamespace(
        engine_id=7,
        numerical_notes=("tensor_core", note),
        behavior_notes=(),
        knobs={"tile_size": 3},
        deterministic=True,
    )
    candidate = module._candidate(problem, configuration, errata.Gpu(90, 92800))
    assert text in candidate.reason
    configuration.numerical_notes = ("tensor_core",)
    assert module._candidate(problem, configuration, errata.Gpu(90, 92800)).reason is None


@pytest.mark.parametrize(("math", "text"), [("fma", "on float32 operands that is TF32"), ("tensor_op", None)])
def test_what_calls_cublaslt_may_use_tensor_cores(math, text):
    problem = Problem.parse(f"graph {math}; a float32 4x64x32; b float32 4x32x64; y = matmul(%a, %b); out y")
    configuration = SimpleNamespace(
        engine_id=0, numerical_notes=(), behavior_notes=("cublaslt_dependency",), knobs={}, deterministic=True
    )
    candidate = module._candidate(problem, configuration, errata.Gpu(90, 91900))
    assert candidate.math == "tensor_op"
    assert text in candidate.reason if text else candidate.reason is None


@pytest.mark.parametrize(
    "line",
    [
        "forward n8 c32 28x28 k32 3x3 p1 float32 nchw",
        "backward_data n8 c32 28x28 k32 3x3 p1 tf32 nhwc",
        "backward_filter n8 c32 28x28 k32 3x3 p1 float16 nhwc",
    ],
)
def test_candidates_carry_the_notes_of_their_engines(h200, line):
    problem, found = candidates(h200, line, effort="wide")
    engines = {str(engine.id): engine for engine in operation_graph(problem, properties=h200).engines()}
    words = set()
    for candidate in found:
        engine = engines[candidate.algo]
        assert candidate.notes == (*engine.numerical_notes, *engine.behavior_notes)
        words.update(candidate.notes)
    assert words >= {"tensor_core", "runtime_compilation"} if problem.math == "tensor_op" else {"strict_nan_prop"}
    first = next(candidate for candidate in found if candidate.reason is None)
    assert GraphSource(h200).restore(problem, chosen(first), None).notes == first.notes


def test_what_is_asked_once_an_engine_is_what_each_engine_says(h200):
    """Of one graph; of another one an engine may say something else, so nothing is kept beyond it."""
    said = {}
    for word in ("tf32 nhwc", "float16 nhwc", "float32 nchw"):
        for direction in DIRECTIONS:
            problem = ConvolutionProblem.parse(f"{direction} n8 c32 28x28 k32 3x3 p1 {word}")
            graph = operation_graph(problem, properties=h200)
            for each in graph.heuristics("A"):
                alone = EngineConfig(graph, each._backend)
                assert each.engine_id == alone.engine_id
                assert each.numerical_notes == alone.numerical_notes
                assert each.behavior_notes == alone.behavior_notes
                assert each.sm_count == alone.sm_count == 0
                assert each.knobs == alone.knobs
            for engine in graph.engines():
                said.setdefault((direction, engine.id), set()).add(engine.numerical_notes)
    assert any(len(notes) > 1 for notes in said.values())


# --- the effort "wide" ----------------------------------------------------------------------------------------------

WIDE = [
    "forward n8 c32 28x28 k32 3x3 p1 float32 nchw",
    "backward_data n8 c32 28x28 k32 3x3 p1 tf32 nhwc",
    "backward_filter n8 c32 28x28 k32 3x3 p1 float16 nhwc",
]


@pytest.mark.parametrize("line", WIDE)
def test_wide_offers_what_all_modes_list_and_every_other_engine(h200, line, monkeypatch):
    monkeypatch.setattr(module, "COMPILED", 1)
    problem, found = candidates(h200, line, effort="wide")
    _, fast = candidates(h200, line)
    usable = [candidate for candidate in found if candidate.reason is None]
    first = [candidate for candidate in fast if candidate.reason is None]
    assert usable[0] == first[0]
    identities = {candidate.identity for candidate in usable}
    assert identities > {candidate.identity for candidate in first}
    assert len({candidate.identity for candidate in found}) == len(found)
    graph = operation_graph(problem, properties=h200)
    listed = [each for mode in ("A", "fallback", "B") for each in graph.heuristics(mode)]
    offered = {(candidate.algo, tuple(sorted(candidate.parameters))) for candidate in found}
    rows = {candidate.algo: candidate for candidate in found}
    compiled = 0
    for each in listed:
        if (str(each.engine_id), each.key[1]) in offered:
            continue
        # an engine that must not be used is one row; and few are compiled
        refused = str(each.engine_id) in rows and rows[str(each.engine_id)].reason is not None
        assert refused or "runtime_compilation" in each.behavior_notes
    known = {each.engine_id for each in listed}
    others = [engine for engine in graph.engines() if engine.id not in known]
    assert others
    for engine in others:
        if (str(engine.id), ()) in offered:
            compiled += "runtime_compilation" in engine.behavior_notes and rows[str(engine.id)].reason is None
        elif "runtime_compilation" not in engine.behavior_notes:
            with pytest.raises(CudnnError):
                engine.configure()
    assert compiled <= 1
    if problem.math == "fma":
        assert all(candidate.math == "fma" for candidate in usable)
    by_default = next(each for each in usable if int(each.algo) in {engine.id for engine in others})
    again = GraphSource(h200).restore(problem, chosen(by_default), None)
    assert again == by_default
    assert again.build().workspace == by_default.workspace == by_default.build().workspace


def test_wide_keeps_to_the_rules(h200, monkeypatch):
    line = "backward_data n8 c32 28x28 k32 3x3 p1 float32 nchw"
    _, found = candidates(h200, line, effort="wide", deterministic=True, workspace_limit=1 << 20)
    assert any(candidate.reason is None for candidate in found)
    for candidate in found:
        if candidate.reason is None:
            assert candidate.deterministic
            assert candidate.workspace <= 1 << 20
            assert "tensor_core" not in candidate.notes
    plain = next(candidate.algo for candidate in found if candidate.reason is None)
    fault = errata.Erratum("is wrong", "a test", 0, 10**6, sources=("graph",), algos=(plain,))
    monkeypatch.setattr(errata, "ERRATA", (fault,))
    _, now = candidates(h200, line, effort="wide", deterministic=True, workspace_limit=1 << 20)
    assert {candidate.reason for candidate in now if candidate.algo == plain} == {fault.text}


def test_without_measuring_wide_builds_one_plan(h200, monkeypatch):
    line = "forward n128 c64 56x56 k64 3x3 p1 float16 nhwc"
    _, narrow = candidates(h200, line, mode="heuristic")
    built = []
    real = module.build_plans
    monkeypatch.setattr(module, "build_plans", lambda some, *rest: built.extend(some) or real(some, *rest))
    assert candidates(h200, line, mode="heuristic", effort="wide")[1] == narrow
    assert len(built) == 1


@pytest.mark.parametrize("line", [*WIDE, "backward_filter n8 c32 28x28 k32 3x3 p1 bfloat16 nhwc"])
def test_around_a_candidate_one_knob_differs(h200, source, line):
    policy = Policy(effort="wide")
    problem = ConvolutionProblem.parse(line)
    found = [candidate for candidate in source.candidates(problem, policy, None) if candidate.reason is None]
    seen = {candidate.identity for candidate in found}
    total = 0
    for candidate in [each for each in found if "runtime_compilation" not in each.notes][:4]:
        near = list(source.around(problem, candidate, policy, None))
        assert len(near) <= module.AROUND
        ranges = {
            knob.type: range(knob.minimum, knob.maximum + 1, max(1, knob.stride))
            for knob in operation_graph(problem, properties=h200).engine(int(candidate.algo)).knobs
        }
        for each in near:
            assert each.identity not in seen
            seen.add(each.identity)
            assert each.reason is None
            assert (each.source, each.algo, each.math) == ("graph", candidate.algo, candidate.math)
            before, after = dict(candidate.parameters), dict(each.parameters)
            changed = [name for name in after if after[name] != before.get(name)]
            assert len(changed) == 1
            assert before.keys() <= after.keys()
            assert after[changed[0]] in ranges[changed[0]]
            runner = each.build()
            assert runner.workspace == each.workspace
            assert {f"{name}={value}" for name, value in after.items()} == set(
                runner.plan.tag.split("[")[1][:-1].split(",")
            )
        # asked again it has nothing new, and in a new search everything
        assert list(source.around(problem, candidate, policy, None)) == []
        total += len(near)
        if near:
            assert GraphSource(h200).restore(problem, chosen(near[-1]), None) == near[-1]
    assert total > 0
    first = next(source.candidates(problem, policy, None))
    assert first.identity in seen


def test_around_keeps_to_the_rules(h200, monkeypatch):
    line = "backward_filter n8 c64 28x28 k64 3x3 p1 tf32 nhwc"
    problem, source = ConvolutionProblem.parse(line), GraphSource(h200)
    # how often the sum over the images is split decides how large its workspace is
    leader = next(
        each
        for each in source.candidates(problem, Policy(effort="wide"), None)
        if each.reason is None and "split_k" in "".join(dict(each.parameters))
    )
    free = list(source.around(problem, leader, Policy(effort="wide", workspace_limit=1 << 30), None))
    limit = sorted(each.workspace for each in free)[len(free) // 2] - 1
    held = list(source.around(problem, leader, Policy(effort="wide", workspace_limit=limit), None))
    assert 0 < len(held) < len(free)
    assert all(each.workspace <= limit for each in held)
    monkeypatch.setattr(module, "AROUND", 3)
    near = list(GraphSource(h200).around(problem, leader, Policy(effort="wide", workspace_limit=1 << 30), None))
    assert near == free[:3]
    fault = errata.Erratum("is wrong", "a test", 0, 10**6, sources=("graph",), algos=(leader.algo,))
    monkeypatch.setattr(errata, "ERRATA", (fault,))
    assert list(GraphSource(h200).around(problem, leader, Policy(effort="wide"), None)) == []
    with pytest.raises(ValueError, match="no engine 'GEMM'"):
        list(source.around(problem, replace(leader, algo="GEMM"), Policy(effort="wide"), None))


def test_around_a_compiled_candidate_few_are_built(h200, source, monkeypatch):
    monkeypatch.setattr(module, "COMPILED_AROUND", 2)
    problem = ConvolutionProblem.parse("forward n8 c32 28x28 k32 3x3 p1 float16 nhwc")
    engines = operation_graph(problem, properties=h200).engines()
    engine = next(each for each in engines if "runtime_compilation" in each.behavior_notes and each.knobs)
    leader = module._candidate(problem, engine.configure(), errata.Gpu(90, 92800))
    wide = Policy(effort="wide")
    near = list(source.around(problem, leader, wide, None))
    assert len(near) == 2
    assert all("runtime_compilation" in each.notes for each in near)
    # of one search all leaders together; another search begins anew
    assert list(source.around(problem, near[0], wide, None)) == []
    assert len(list(source.around(problem, near[0], replace(wide, deterministic=True), None))) == 2


def test_what_was_not_built_keeps_its_configuration_until_it_is(h200, monkeypatch):
    problem = ConvolutionProblem.parse("forward n8 c32 28x28 k32 3x3 p1 float16 nhwc")
    source = GraphSource(h200)
    made = []
    configured = GraphSource._configured
    monkeypatch.setattr(
        GraphSource, "_configured", lambda self, *asked: made.append(asked[1]) or configured(self, *asked)
    )
    with source.climbing():
        first, second, *_ = [
            candidate
            for candidate in source.candidates(problem, Policy(mode="heuristic"), None)
            if candidate.reason is None
        ]
        assert first.build().plan.tag == first.build().plan.tag
        assert made == [first.algo]
        made.clear()
        assert second.build().plan.tag == second.build().plan.tag != first.build().plan.tag
        assert made == [second.algo, first.algo]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 300), st.integers(0, 4)).map(
            lambda of: Knob(f"k{of[0]}{of[1]}{of[2]}", of[0], of[0] + of[1], of[2])
        ),
        max_size=4,
        unique_by=lambda knob: knob.type,
    ),
    st.data(),
)
def test_neighbours(knobs, data):
    ranges = {knob.type: range(knob.minimum, knob.maximum + 1, max(1, knob.stride)) for knob in knobs}
    chosen_knobs = {
        name: data.draw(st.one_of(st.just(-1), st.sampled_from(values)))
        for name, values in ranges.items()
        if data.draw(st.booleans())
    }
    found = list(module.neighbours(knobs, chosen_knobs))
    assert len({tuple(setting.items()) for setting in found}) == len(found)
    for setting in found:
        (name,) = [name for name in setting if setting[name] != chosen_knobs.get(name)]
        assert setting[name] in ranges[name]
        assert list(setting)[: len(chosen_knobs)] == list(chosen_knobs)
    for name, values in ranges.items():
        tried = [setting[name] for setting in found if name in setting and setting[name] != chosen_knobs.get(name)]
        other = {value for value in values if value != chosen_knobs.get(name)}
        if len(values) <= module.ALL_VALUES:
            assert set(tried) == other
        else:
            assert len(tried) <= 3 * values[-1].bit_length() + 1
            now = chosen_knobs.get(name, values[0])
            assert {
                value for value in (now - values.step, now + values.step) if value in values and now in values
            } <= set(tried)
            assert {1, 2, 64} & set(values) <= {*tried, chosen_knobs.get(name)}


# --- policy ---------------------------------------------------------------------------------------------------------


def test_nondeterministic_engines_say_so_and_are_not_built_where_they_must_not_run(h200):
    line = "backward_data n8 c32 28x28 k32 3x3 p1 float32 nchw"
    _, found = candidates(h200, line)
    racy = {candidate.algo for candidate in found if not candidate.deterministic and candidate.reason is None}
    assert racy
    problem = ConvolutionProblem.parse(line)
    for offer in offers(problem, Policy(), properties=h200):
        assert offer.candidate.deterministic == ("nondeterministic" not in offer.configuration.numerical_notes)
    _, strict = candidates(h200, line, deterministic=True)
    assert all(candidate.deterministic for candidate in strict if candidate.reason is None)
    assert {candidate.algo for candidate in strict if candidate.reason == "not deterministic"} == racy
    assert any(candidate.reason is None for candidate in strict)


def test_what_is_above_the_workspace_limit_does_not_count(h200):
    line = "forward n128 c64 56x56 k64 3x3 p1 tf32 nchw"
    problem, found = candidates(h200, line, workspace_limit=150 << 20)
    usable = [candidate for candidate in found if candidate.reason is None]
    assert all(candidate.workspace <= 150 << 20 for candidate in usable)
    # What is behind the first ten moves up.
    first = [offer.candidate.identity for offer in offers(problem, Policy(), properties=h200)][:LIMIT]
    assert any(candidate.identity not in first for candidate in usable)
    excluded = [candidate for candidate in found if candidate.reason is not None]
    assert excluded
    for candidate in excluded:
        assert candidate.reason == f"workspace of {candidate.workspace} bytes is above the limit of {150 << 20}"
    # The default limit is the one that a GPU of this memory has.
    assert all(candidate.workspace <= 2 << 30 for candidate in candidates(h200, line)[1] if candidate.reason is None)


@pytest.mark.parametrize(
    ("mode", "word", "names"),
    [
        ("heuristic", "float32 nchw", ["legacy", "mine", "graph"]),
        ("heuristic", "float16 nhwc", ["graph", "legacy", "mine"]),
        ("find", "float32 nchw", ["graph", "legacy", "mine"]),
    ],
)
def test_without_measuring_the_graph_api_comes_last_in_strict_float32(mode, word, names):
    problem = ConvolutionProblem.parse(f"forward n2 c8 9x9 k8 3x3 {word}")
    key = Key(problem, Policy(mode=mode), (), "cudnn 9.28.0", ("graph", "legacy", "mine"))
    asked = tuple(SimpleNamespace(name=name) for name in ("graph", "legacy", "mine"))
    assert [source.name for source in search._in_order(key, asked)] == names


# --- padding that differs before and after ----------------------------------------------------------------------------

PADDED = [
    "n2 c3 8x8 k4 3x3 p1:2x0:1",
    "n2 c4 9x7 k6 3x2 p1:2x0 s2x1 g2",
    "n2 c4 9x7 k6 3x3 p0:3 d1x2",
    "n3 c2 11 k6 4 p2:1 d2",
    "n1 c4 5x6x7 k2 3x3x1 p1:0x1x0 s2",
    "n2 c3 5x6 k4 3x3 p1:2 xs:400x100x14x2",
    "n2 c3 5x6 k4 3x3 p1:2 xs:400x100x14x2 ws:27x1x9x3 ys:168x1x28x4",
]
GAPS = [
    "n2 c3 5x6 k4 3x3 p1 ws:1x4x16x50",
    "n2 c3 5x6 k4 3x3 p1:2 ws:1x4x16x50",
    "n2 c4 7 k6 3 ws:26x6x2 ys:40x6x1",
    "n2 c4 7x8x9 k8 3x3x3 p0:1 g2 ws:1x300x96x32x8",
]


@pytest.mark.parametrize("word", ["float32 nchw", "tf32 nhwc", "bfloat16 nhwc acc", "float64 nchw"])
@pytest.mark.parametrize("line", PADDED)
def test_cudnn_gets_a_padded_copy(h200, line, word):
    for direction in DIRECTIONS:
        problem, found = candidates(h200, f"{direction} {line} {word}")
        usable = [candidate for candidate in found if candidate.reason is None]
        assert usable
        copy, *_ = module._copies(problem)
        for tensor in operation_graph(problem, properties=h200).tensors.values():
            assert math.prod(tensor.shape) == math.prod(
                copy.shape if tensor.name == copy.name else problem.shape_of(tensor.name)
            )
            if tensor.name == copy.name:
                assert tensor.strides[0] == math.prod(tensor.shape[1:])
                borders = zip(problem.x_shape[2:], problem.padding_before, problem.padding_after, strict=True)
                wanted = tuple(size + abs(before - after) for size, before, after in borders)
                assert tensor.shape[-len(wanted) :] == wanted
        again = GraphSource(h200).restore(problem, chosen(usable[0]), None)
        assert again == usable[0]
        for candidate in (usable[0], again):
            runner = candidate.build()
            assert candidate.workspace == runner.workspace == runner.plan.workspace + -(-copy.nbytes // 512) * 512


@pytest.mark.parametrize("word", ["float32 nchw", "tf32 nhwc", "float16 nhwc"])
@pytest.mark.parametrize("line", GAPS)
def test_cudnn_gets_filters_without_gaps(h200, line, word):
    for direction in DIRECTIONS:
        problem, found = candidates(h200, f"{direction} {line} {word}")
        assert any(candidate.reason is None for candidate in found)
        (filters,) = (t for t in operation_graph(problem, properties=h200).tensors.values() if t.name[-1] == "w")
        reach = sum((size - 1) * step for size, step in zip(filters.shape, filters.strides, strict=True))
        assert reach + 1 == math.prod(problem.w_shape)


class NumpyRunner(module.StagedRunner):
    """Convolves in NumPy where cuDNN would be called: everything else is the real runner."""

    def __init__(self, problem):
        plan = SimpleNamespace(workspace=40, run=None)
        super().__init__(plan, None, problem, module._copies(problem))
        self._problem = problem

    def run_in(self, operands, scratch):
        problem = self._problem
        assert scratch.nbytes == 40
        dtype = devices.DTYPES[problem.x_dtype]
        for place, _, start in self._copies:
            assert start % 512 == 0
            assert operands[place].ctypes.data + self._room - start == scratch.ctypes.data
        views = [array.view(dtype) for array in operands]
        shapes = dict(zip((name[-1] for name in problem.operands), (view.shape for view in views), strict=True))
        common, _ = split_padding(problem)
        lowered = ConvolutionProblem.create(
            problem.direction,
            shapes["x"],
            shapes["w"],
            dtype=problem.x_dtype,
            padding=common,
            stride=problem.stride,
            dilation=problem.dilation,
            groups=problem.groups,
            accumulate=problem.accumulate,
        )
        Columns(lowered, "col2im" if problem.direction == "backward_data" else "im2col", 1 << 20)(*views)


@pytest.mark.parametrize("word", ["float64 nchw", "bfloat16 nhwc", "float64 nchw acc", "bfloat16 nhwc acc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("line", [*PADDED, *GAPS])
def test_copies_give_the_same_result(line, direction, word, rng, monkeypatch):
    monkeypatch.setattr(devices, "cupy", lambda: np)
    monkeypatch.setattr(devices, "workspace", lambda size: np.full(size, 255, np.uint8))
    problem = ConvolutionProblem.parse(f"{direction} {line} {word}")
    first, second, out = (problem.empty(name, devices.CPU) for name in problem.operands)
    for a in (first, second):
        a[...] = rng.standard_normal(a.shape)
    out[...] = rng.standard_normal(out.shape) if problem.accumulate else np.nan
    wanted = out.copy()
    Columns(problem, "col2im" if direction == "backward_data" else "im2col", 1 << 20)(first, second, wanted)
    NumpyRunner(problem)(first, second, out)
    np.testing.assert_array_equal(out.astype(np.float64), wanted.astype(np.float64))


@pytest.mark.parametrize("mode", ["find", "heuristic"])
def test_the_copy_counts_as_workspace(h200, mode):
    line = "forward n2 c8 9x7 k8 3x3 p1:2 float32 nchw"
    _, found = candidates(h200, line, mode=mode)
    least = min(candidate.workspace for candidate in found if candidate.reason is None)
    assert least >= 2 * 8 * 10 * 8 * 4
    _, found = candidates(h200, line, mode=mode, workspace_limit=least - 1)
    assert all("above the limit" in candidate.reason or "tensor cores" in candidate.reason for candidate in found)


# --- without measuring ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "forward n128 c64 56x56 k64 3x3 p1 float16 nhwc",
        "backward_data n8 c32 28x28 k32 3x3 p1 float32 nchw",
        "backward_filter n8 c32 28x28 k32 3x3 p1:2 tf32 nchw",
    ],
)
def test_one_plan_is_built(h200, line, monkeypatch):
    built = []
    real = module.build_plans

    def build(configurations, *args, **kwargs):
        built.extend(configurations)
        return real(configurations, *args, **kwargs)

    monkeypatch.setattr(module, "build_plans", build)
    problem, quick = candidates(h200, line, mode="heuristic")
    assert len(built) == 1
    _, slow = candidates(h200, line)
    assert quick == slow[: len(quick)]
    assert [each.workspace for each in quick] == [each.workspace for each in slow[: len(quick)]]
    for candidate in quick:
        if candidate.reason is None:
            assert candidate.build().workspace == candidate.workspace
    # What cannot be built is no reason to build no other.
    rounds = []

    def first_fails(configurations, *args, **kwargs):
        rounds.append(configurations)
        failed = CudnnNotSupportedError("cudnnBackendFinalize", 3000, "no such kernel")
        return [failed] if len(rounds) == 1 else real(configurations, *args, **kwargs)

    monkeypatch.setattr(module, "build_plans", first_fails)
    _, found = candidates(h200, str(problem), mode="heuristic")
    assert [len(each) for each in rounds] == [1, 1]
    assert any("no such kernel" in (candidate.reason or "") for candidate in found)
    assert any(candidate.reason is None for candidate in found)


def test_what_turns_out_above_the_workspace_limit_is_refused_when_it_is_built(h200, monkeypatch):
    line = "forward n128 c64 56x56 k64 3x3 p1 tf32 nchw"
    monkeypatch.setattr(module.EngineConfig, "workspace", None)
    problem, found = candidates(h200, line, mode="heuristic", workspace_limit=150 << 20)
    usable = [candidate for candidate in found if candidate.reason is None]
    assert usable[0].build().workspace <= 150 << 20
    every = offers(problem, Policy(), properties=h200)
    sizes = {offer.candidate.identity: offer.candidate.workspace for offer in every}
    refused = 0
    for candidate in usable[1:]:
        if sizes[candidate.identity] <= 150 << 20:
            assert candidate.build().workspace == sizes[candidate.identity]
            continue
        refused += 1
        with pytest.raises(CudnnNotSupportedError, match="above the limit"):
            candidate.build()
    assert refused > 0


def test_a_row_that_the_policy_forbids_can_be_built(h200):
    _, found = candidates(h200, "forward n128 c64 56x56 k64 3x3 p1 tf32 nchw", workspace_limit=150 << 20)
    excluded = next(candidate for candidate in found if candidate.reason is not None)
    assert excluded.build().workspace == excluded.workspace > 150 << 20


# --- building and restoring -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["float32 nchw", "float16 nhwc", "bfloat16 nhwc acc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_restore_gives_the_same_engine_and_knobs(h200, direction, word, monkeypatch):
    problem, found = candidates(h200, f"{direction} n8 c32 28x28 k32 3x3 p1 {word}")
    usable = [candidate for candidate in found if candidate.reason is None]
    monkeypatch.setattr(module.OperationGraph, "heuristics", lambda *_, **__: pytest.fail("heuristics were asked"))
    for candidate in usable:
        again = GraphSource(h200).restore(problem, chosen(candidate), None)
        assert again == candidate
        assert (again.math, again.deterministic, again.workspace) == (
            candidate.math,
            candidate.deterministic,
            candidate.workspace,
        )
        first, second = candidate.build(), again.build()
        assert first.plan.tag == second.plan.tag
        assert json.loads(first.plan.to_json())["engine"] == json.loads(second.plan.to_json())["engine"]
        assert first.workspace == second.workspace


def test_restore_refuses_what_is_not_there_or_must_not_be_used(h200):
    source = GraphSource(h200)
    problem, found = candidates(h200, "backward_data n8 c32 28x28 k32 3x3 p1 float32 nchw")
    usable = next(candidate for candidate in found if candidate.reason is None)
    refused = next(candidate for candidate in found if candidate.reason is not None)
    racy = next(candidate for candidate in found if candidate.reason is None and not candidate.deterministic)
    with pytest.raises(ValueError, match="tensor cores"):
        source.restore(problem, chosen(refused), None)
    with pytest.raises(ValueError, match="not deterministic"):
        source.restore(problem, chosen(racy, deterministic=True), None)
    for changes, text in [
        ({"algo": "GEMM"}, "no engine 'GEMM'"),
        ({"algo": "4096"}, "4096 is no engine"),
        ({"parameters": (("tile_size", 10**6),)}, "tile_size"),
        ({"parameters": (("colour", 1),)}, "colour"),
        ({"parameters": (("tile_size", "big"),)}, "big"),
    ]:
        choice = chosen(usable)
        vars(choice).update(changes)
        with pytest.raises(ValueError, match=text):
            source.restore(problem, choice, None)


def test_a_known_fault_is_neither_offered_nor_restored(h200, monkeypatch):
    problem, found = candidates(h200, "forward n8 c32 28x28 k32 3x3 p1 float16 nhwc")
    first = found[0]
    fault = errata.Erratum("is wrong", "a test", 0, 10**6, sources=("graph",), algos=(first.algo,), sms=(90,))
    monkeypatch.setattr(errata, "ERRATA", (fault,))
    _, now = candidates(h200, str(problem))
    assert [each.reason for each in now if each.algo == first.algo] == ["known fault of cuDNN: is wrong (a test)"]
    assert any(each.reason is None for each in now)
    with pytest.raises(ValueError, match="is wrong"):
        GraphSource(h200).restore(problem, chosen(first), None)


def test_every_build_gives_a_plan_of_its_own(h200):
    _, found = candidates(h200, "forward n8 c32 28x28 k32 3x3 p1 float16 nhwc")
    runners = [found[0].build() for _ in range(3)]
    threads = [threading.Thread(target=lambda: runners.append(found[0].build())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(runner.plan) for runner in runners}) == 7
    assert len({runner.plan.tag for runner in runners}) == 1
    # Closing one leaves the others whole.
    runners[0].plan.close()
    assert json.loads(runners[1].plan.to_json())


def test_a_prepared_runner_is_for_its_own_handle_only(h200, monkeypatch):
    """On a GPU a plan is built with the handle of its thread and device."""
    problem, found = candidates(h200, "forward n8 c32 28x28 k32 3x3 p1 float16 nhwc")
    source = GraphSource(h200)
    prepared = found[0].build()
    handles = [SimpleNamespace(_as_parameter_=bindings.cudnnHandle_t()) for _ in range(2)]
    prepared.handle = handles[0]
    monkeypatch.setattr(source, "_handle", lambda: handles[0])
    monkeypatch.setattr(source, "_configured", lambda *_: offers(problem, Policy(), properties=h200)[0].configuration)
    build = source._builder(problem, found[0], prepared, handles[0], 1 << 30)
    assert build() is prepared
    other = build()
    assert other.plan is not prepared.plan
    assert other.handle is handles[0]
    monkeypatch.setattr(source, "_handle", lambda: handles[1])
    elsewhere = source._builder(problem, found[0], prepared, handles[0], 1 << 30)()
    assert elsewhere.plan is not prepared.plan
    assert elsewhere.handle is handles[1]


def test_a_run_passes_the_operands_in_the_order_of_the_problem():
    class CalledPlan:
        workspace = 7
        run = None

        def __call__(self, *arrays):
            calls.append(arrays)

    calls = []
    runner = module.GraphRunner(CalledPlan(), None)
    assert runner.workspace == 7
    runner(1, 2, 3)
    assert calls == [(1, 2, 3)]


@pytest.mark.parametrize(("order", "expected"), [(None, (10, 20, 30)), ((2, 0, 1), (30, 10, 20))])
def test_a_run_by_addresses_is_in_the_order_of_the_problem_too(order, expected):
    calls = []
    plan = SimpleNamespace(workspace=7, run=None, launcher=lambda handle: calls.append)
    runner = module.GraphRunner(plan, object(), order)
    runner.launch((10, 20, 30))
    runner(*[SimpleNamespace(data=SimpleNamespace(ptr=address)) for address in (10, 20, 30)])
    assert calls == [expected] * 2
    with_checks = []
    plan = Checked(with_checks)
    runner = module.GraphRunner(plan, object(), order)
    assert runner.launch is None
    runner(10, 20, 30)
    assert with_checks == [expected]


class Checked:
    """A plan as FLCUDA_CHECK=1 makes it: addresses are too little for it."""

    workspace = 7
    run = None

    def __init__(self, calls):
        self._calls = calls

    def launcher(self, handle):
        return None

    def __call__(self, *arrays):
        self._calls.append(arrays)


# --- fused graphs ---------------------------------------------------------------------------------------------------

SILU = (
    "graph; x {0} 8x64x28x28 nhwc; w {0} 64x64x3x3 nhwc; b {0} 1x64x1x1 nhwc; "
    "t = convolution_forward(%x, %w, padding=1); s = add(%t, %b); y = silu(%s); out y; out s"
)
PRODUCT = "graph; a float32 4x64x32; b float32 4x32x64; t = matmul(%a, %b); y = tanh(%t); out y"


def graph_candidates(properties, line, **policy):
    problem = Problem.parse(line)
    return problem, list(GraphSource(properties).candidates(problem, Policy(**policy), None))


def addresses(runner, operands, monkeypatch):
    """Gives the addresses with which a runner calls its plan."""
    calls = []
    monkeypatch.setattr(runner, "plan", lambda *arrays: calls.append(tuple(array.data.ptr for array in arrays)))
    runner(*[SimpleNamespace(data=SimpleNamespace(ptr=address)) for address in operands])
    return calls[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_graph_has_candidates_that_restore_from_a_choice(h200, dtype, monkeypatch):
    problem, found = graph_candidates(h200, SILU.format(dtype))
    usable = [candidate for candidate in found if candidate.reason is None]
    assert usable
    assert all(candidate.math == "tensor_op" for candidate in usable)
    assert all(candidate.prepared_ms > 0 for candidate in usable)
    for candidate in usable[:2]:
        key = Key(problem, Policy(), (("name", "H200"),), "cudnn", ("graph",))
        stored = Choice.from_json(Choice.of(key, candidate).to_json())
        assert stored.problem == problem
        assert stored.key.file_name.startswith("graph-")
        runner = candidate.build()
        restored = GraphSource(h200).restore(stored.problem, stored, None)
        assert restored.identity == candidate.identity
        again = restored.build()
        assert again.plan.tag == runner.plan.tag
        assert again.workspace == runner.workspace == candidate.workspace
        # y is the first output of the Problem, and s has the smaller number in the graph
        _, tensors = problem.graph()
        assert tensors["s"].uid < tensors["y"].uid
        assert addresses(again, (10, 20, 30, 40, 50), monkeypatch) == (10, 20, 30, 50, 40)
        monkeypatch.undo()


def test_a_graph_of_tensor_cores_is_refused_under_fma_and_says_what_would_be_right(h200, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "workspace_limit", lambda device: 1 << 30)
    problem = Problem.parse(PRODUCT)
    assert problem.math == "fma"
    key = Key(problem, Policy(mode="heuristic", workspace_limit=1 << 30), (), "cudnn", ("graph",))
    with pytest.raises(CudnnNotSupportedError) as caught:
        search._first_that_builds(key, devices.Device("cuda", 0), (GraphSource(h200),), ChoiceStore(tmp_path))
    text = str(caught.value)
    assert str(problem) in text
    assert "uses tensor cores, which math 'fma' forbids: on float32 operands that is TF32" in text
    assert "need a Problem of math 'tensor_op' (TF32 on float32 operands)" in text
    _, found = graph_candidates(h200, PRODUCT.replace("graph", "graph tensor_op"))
    assert any(candidate.reason is None for candidate in found)


def test_a_fused_float32_convolution_never_uses_tensor_cores_under_fma(h200):
    _, found = graph_candidates(h200, SILU.format("float32"))
    assert any("on float32 operands that is TF32" in (candidate.reason or "") for candidate in found)
    for candidate in found:
        assert (candidate.math == "fma") == (candidate.reason is None)


def test_the_note_of_tensor_cores_means_nothing_without_products(h200):
    _, found = graph_candidates(h200, "graph fma; x float32 8x64x28x28 nhwc; y = silu(%x); out y")
    usable = [candidate for candidate in found if candidate.reason is None]
    assert usable
    assert {candidate.math for candidate in usable} == {"fma"}


def test_why_not_a_graph(h200):
    with pytest.raises(CudnnNotSupportedError) as caught:
        graph_candidates(h200, "graph; x float32 8x64x28x28 nhwc; s, q = generate_statistics(%x); out s; out q")
    assert "likely: dtype: statistics are fused for 16-bit tensors" in str(caught.value)


def test_a_fault_of_a_convolution_concerns_a_graph_that_has_it(h200, monkeypatch):
    fault = errata.Erratum("is wrong", "a report", 90000, 10**9, directions=("forward",), ranks=(2,), windows_only=True)
    monkeypatch.setattr(errata, "ERRATA", (fault,))
    _, found = graph_candidates(h200, SILU.format("float16"))
    assert {candidate.reason for candidate in found} == {"known fault of cuDNN: is wrong (a report)"}
    _, found = graph_candidates(h200, "graph; x float16 8x64x28x28 nhwc; y = silu(%x); out y")
    assert any(candidate.reason is None for candidate in found)


# --- what cuDNN does not take ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        ("forward n1 c1 3x3x3x3 k1 1x1x1x1", ["at most 3 spatial dimensions", "3x3x3x3"]),
        ("backward_filter n4 c4 9x9 k4 3x3 out:float32 float16 nhwc", ["no engine supports", "likely: channels", "dw"]),
    ],
)
def test_why_not(h200, line, texts):
    with pytest.raises(CudnnNotSupportedError) as caught:
        candidates(h200, line)
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.usefixtures("_on_9_28")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_16_bit_operands_with_a_float32_result(h200, direction):
    _, found = candidates(h200, f"{direction} n4 c16 14x14 k32 3x3 p1 out:float32 float16 nhwc")
    assert [candidate.reason for candidate in found] == [None]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_more_than_2_to_the_31_elements(h200, direction):
    problem, found = candidates(h200, f"{direction} n70000 c64 32x32 k64 3x3 p1 float16 nhwc")
    assert problem.x_strides[0] * problem.x_shape[0] > 2**31
    assert any(candidate.reason is None for candidate in found)


def test_an_engine_whose_plan_fails_is_a_reason(h200, monkeypatch):
    real = module.EngineConfig.plan
    calls = []

    def plan(self, *args):
        calls.append(self)
        if len(calls) == 1:
            raise CudnnNotSupportedError("cudnnBackendFinalize", 3000, "no such kernel")
        return real(self, *args)

    monkeypatch.setattr(module.EngineConfig, "plan", plan)
    _, found = candidates(h200, "forward n8 c32 28x28 k32 3x3 p1 float16 nhwc")
    assert "no such kernel" in found[0].reason
    assert sum(candidate.reason is None for candidate in found) >= LIMIT


def test_a_heuristic_mode_that_fails_is_passed_over(h200, monkeypatch):
    real = module.OperationGraph.heuristics
    asked = []

    def heuristics(self, mode, **kwargs):
        asked.append(mode)
        if mode in broken:
            raise CudnnError("cudnnBackendFinalize", status, "it failed")
        return real(self, mode, **kwargs)

    monkeypatch.setattr(module.OperationGraph, "heuristics", heuristics)
    line = "forward n8 c32 28x28 k32 3x3 p1 float16 nhwc"
    status, broken = 4000, ("A",)
    _, found = candidates(h200, line)
    assert asked == ["A", "fallback", "B"]
    assert any(candidate.reason is None for candidate in found)
    broken = ("A", "fallback", "B")
    with pytest.raises(CudnnNotSupportedError, match=r"it failed \(forward n8 c32 28x28") as caught:
        candidates(h200, line)
    assert caught.value.status == 3000
    status = 4003
    with pytest.raises(MemoryError, match="it failed"):
        candidates(h200, line)
    status = 5000
    with pytest.raises(CudnnError, match="it failed") as caught:
        candidates(h200, line)
    assert caught.value.status == 5000


# --- the command ----------------------------------------------------------------------------------------------------


def command(*words):
    return subprocess.run(
        [sys.executable, "-m", "flcuda", "find", *words], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.usefixtures("_on_9_28")
def test_plan_only(h200):
    done = command("--gpu", "h200", "--plan-only", "forward n128 c64 56x56 k64 3x3 p1 float16 nhwc")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    assert lines[0] == "forward n128 c64 56x56 k64 3x3 p1 s1 float16 nhwc"
    assert "NVIDIA H200" in lines[1]
    assert "cuDNN 9.28" in lines[1]
    assert "Nothing was measured" in done.stdout
    assert "\n 1     62     0.0 yes  tile_size=4 tilek=0" in done.stdout
    assert "\n40 " in done.stdout
    assert "\n  62: uses tensor cores" in done.stdout
    assert max(map(len, lines)) <= 80


@pytest.mark.usefixtures("_on_9_28")
def test_plan_only_of_a_graph(h200):
    done = command("--gpu", "h200", "--plan-only", SILU.format("float16"))
    assert done.returncode == 0, done.stderr
    head, _, rest = done.stdout.partition("\nfor NVIDIA H200")
    problem = Problem.parse(SILU.format("float16"))
    assert Problem.parse(head) == problem
    assert max(map(len, done.stdout.split("\n"))) <= 80
    assert "kernel_cfg=" in rest
    assert "legacy" not in rest
    done = command("--gpu", "h200", "--plan-only", "--json", PRODUCT)
    report = json.loads(done.stdout)
    assert report["problem"] == str(Problem.parse(PRODUCT))
    assert {row["math"] for row in report["rows"]} == {"tensor_op"}
    done = command("--gpu", "h200", "--plan-only", PRODUCT)
    assert "need math 'tensor_op'" in done.stdout


@pytest.mark.usefixtures("_on_9_28")
def test_two_versions_are_compared(h200):
    folder = str(library.load().path)
    words = ("--gpu", "h200", "--plan-only", "--cudnn", folder, "--cudnn", folder, "--json")
    done = command(*words, "all n8 c32 28x28 k32 3x3 p1 float32 nchw")
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    assert [report["problem"].split()[0] for report in reports] == list(DIRECTIONS)
    for report in reports:
        assert {engine["change"] for engine in report["engines"]} == {"same"}
        assert report["engines"][0]["after"]["rank"] == 1


def test_a_folder_without_cudnn_is_named(h200, tmp_path):
    folder = str(library.load().path)
    done = command("--gpu", "h200", "--plan-only", "--cudnn", folder, "--cudnn", str(tmp_path), "forward n1 c1 3 k1 1")
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
