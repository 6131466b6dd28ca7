"""The source of the graph API through the real library, on the profile of an H200: no GPU is needed."""

import ctypes
import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from flcuda.cudnn import library
from flcuda.cudnn.device_properties import SINCE, DeviceProperties
from flcuda.errors import CudnnNotSupportedError
from flcuda.finder import errata, search
from flcuda.finder.choice import Key
from flcuda.finder.policy import Policy
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem
from flcuda.finder.sources import graph as module
from flcuda.finder.sources.graph import LIMIT, GraphSource, offers, operation_graph

pytestmark = pytest.mark.skipif(
    not any(place.usable for place in library.search_places()), reason="cuDNN is not installed"
)

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
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        pytest.skip(f"libcuda.so.1 cannot be loaded: {error}")
    if library.load().version < SINCE:
        pytest.skip(f"cuDNN {library.load().version_text} is older than device properties")
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
        assert 0 < len(usable) <= LIMIT
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
    line = "n2 c6 9x7 k4 3x2 p2x1 s2x1 d1x2 g2 bfloat16 nhwc align:4x8x16 xs:2000x2x200x15"
    problem = ConvolutionProblem.parse(f"{direction} {line}")
    tensors = list(operation_graph(problem, properties=h200).tensors.values())
    assert [tensor.name for tensor in tensors] == list(problem.operands)
    for tensor in tensors:
        assert tensor.shape == problem.shape_of(tensor.name)
        assert tensor.strides == problem.strides_of(tensor.name)
        assert tensor.dtype == problem.dtype_of(tensor.name)
        assert tensor.alignment == problem.alignment_of(tensor.name)


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
    assert len(found) == LIMIT
    assert [candidate.identity for candidate in found] == [offer.candidate.identity for offer in everything[:LIMIT]]
    assert found[0].algo == "62"
    assert candidates(h200, str(problem), mode="heuristic")[1] == found


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
        engine_id=7, numerical_notes=("tensor_core", note), knobs={"tile_size": 3}, deterministic=True
    )
    candidate = module._candidate(problem, configuration, errata.Gpu(90, 92800))
    assert text in candidate.reason
    configuration.numerical_notes = ("tensor_core",)
    assert module._candidate(problem, configuration, errata.Gpu(90, 92800)).reason is None


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


def test_padding_that_differs_before_and_after_is_refused(h200):
    for direction in DIRECTIONS:
        problem = ConvolutionProblem.parse(f"{direction} n2 c8 9x7 k8 3x3 p1x0:1 float32 nchw")
        with pytest.raises(CudnnNotSupportedError, match="padding wrong that differs before and after"):
            offers(problem, Policy(), properties=h200)


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
    handles = [object(), object()]
    prepared.handle = handles[0]
    monkeypatch.setattr(source, "_handle", lambda: handles[0])
    monkeypatch.setattr(source, "_configured", lambda *_: offers(problem, Policy(), properties=h200)[0].configuration)
    build = source._builder(problem, found[0], prepared)
    assert build() is prepared
    other = build()
    assert other.plan is not prepared.plan
    assert other.handle is handles[0]
    monkeypatch.setattr(source, "_handle", lambda: handles[1])
    elsewhere = source._builder(problem, found[0], prepared)()
    assert elsewhere.plan is not prepared.plan
    assert elsewhere.handle is handles[1]


def test_a_run_passes_the_operands_in_the_order_of_the_problem(monkeypatch):
    def array(address):
        return SimpleNamespace(data=SimpleNamespace(ptr=address))

    calls = []
    plan = SimpleNamespace(workspace=7, run=lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(module.resources, "handle", lambda: "the handle")
    monkeypatch.setattr(module.devices, "workspace", lambda size: array(1000 + size))
    runner = module.GraphRunner(plan, None)
    assert runner.workspace == 7
    runner(array(1), array(2), array(3))
    assert calls == [("the handle", (1, 2, 3), 1007)]


# --- what cuDNN does not take ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        ("forward n1 c1 3x3x3x3 k1 1x1x1x1", ["at most 3 spatial dimensions", "3x3x3x3"]),
        ("forward n2 c3 5x6 k4 3x3 p1 float16 nhwc align:1", ["x is aligned to 1 bytes"]),
        ("forward n2 c3 5x6 k4 3x3 p1 ws:1x4x16x50", ["ws:1x4x16x50"]),
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
    assert sum(candidate.reason is None for candidate in found) == LIMIT


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
