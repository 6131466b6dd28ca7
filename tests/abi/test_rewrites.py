"""Rewritten convolutions through the real library, on the profile of an H200: what is offered, and its plans."""

import pytest
from finder_fakes import key
from planning import CUDNN, require_device_properties

from flcuda.cudnn import library
from flcuda.cudnn.device_properties import DeviceProperties
from flcuda.errors import CudnnError
from flcuda.finder.choice import Choice
from flcuda.finder.policy import Policy
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem
from flcuda.finder.sources.graph import GraphSource
from flcuda.finder.sources.rewrites import FAST, FAST_WINDOWS, Matmul, Padded, Relayout, SpaceToDepth

pytestmark = CUDNN

SOURCES = (SpaceToDepth, Padded, Relayout, Matmul)
LIMIT = 4 << 30
STEM = "n128 c3 224x224 k64 7x7 p3 s2"
LINES = [
    f"{STEM} float16 nhwc",
    f"{STEM} bfloat16 nhwc acc",
    f"{STEM} tf32 nhwc",
    f"{STEM} float32 nchw",
    f"{STEM} float16 nchw",
    "n16 c60 28x28 k61 3x3 p1:2 float16 nhwc",
    "n16 c3 33x31 k64 3x3 p1 tf32 nhwc",
    "n16 c32 28x28 k64 3x3 p1 float32 nhwc",
    "n8 c64 20x20 k64 3x3 p1 d2 bfloat16 nchw",
    "n8 c3 64 k32 8 s4 float16 nhwc",
    "n2 c3 8x16x16 k32 3x4x4 s2 tf32 nhwc",
]


@pytest.fixture(scope="module")
def h200():
    require_device_properties()
    with DeviceProperties.from_profile("h200") as properties:
        yield properties


def offered(kind, properties, problem, **policy):
    source = kind((GraphSource(properties),))
    return source, list(source.candidates(problem, Policy(workspace_limit=LIMIT, **policy), None))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("line", LINES)
def test_what_is_offered_has_a_plan_and_can_be_restored(h200, line, direction) -> None:
    problem = ConvolutionProblem.parse(f"{direction} {line}")
    built = 0
    for kind in (SpaceToDepth, Padded, Relayout):
        source, candidates = offered(kind, h200, problem)
        for candidate in candidates:
            assert candidate.reason is None
            assert candidate.algo.startswith("graph:")
            assert "runtime_compilation" not in candidate.notes
            try:
                runner = candidate.build()
            except CudnnError as error:
                # a heuristic may list what its engine then refuses; the finder takes the next one
                assert error.status // 1000 == 3  # noqa: PT017
                continue
            built += 1
            assert 0 < runner.workspace <= LIMIT
            choice = Choice.from_json(Choice.of(key(problem), candidate).to_json())
            again = source.restore(problem, choice, None)
            assert again.identity == candidate.identity
            assert again.build().workspace == runner.workspace
    assert built


def test_a_first_layer_gets_the_engines_made_for_hopper(h200) -> None:
    if library.load().version // 100 != 928:
        pytest.skip(f"holds for cuDNN 9.28; {library.load().version_text} is loaded")
    for direction, word, engine in (
        ("forward", "float16", "62"),
        ("forward", "bfloat16", "62"),
        ("forward", "tf32", "67"),
        ("backward_filter", "float16", "65"),
        ("backward_filter", "tf32", "68"),
    ):
        problem = ConvolutionProblem.parse(f"{direction} {STEM} {word} nhwc")
        plain = GraphSource(h200).candidates(problem, Policy(workspace_limit=LIMIT), None)
        assert engine not in {candidate.algo for candidate in plain if candidate.reason is None}
        _, candidates = offered(SpaceToDepth, h200, problem)
        forms: dict[tuple[object, object], set[str]] = {}
        for candidate in candidates:
            forms.setdefault(_form(candidate), set()).add(candidate.algo)
        wanted = {(16, None), (48, "folded"), (64, "folded")}
        assert forms.keys() == wanted | ({(32, "kept")} if direction == "forward" else set())
        assert all(f"graph:{engine}" in algos for algos in forms.values()), (direction, word, forms)
        assert len(candidates) <= FAST + 3 * FAST_WINDOWS


def test_windows_without_tensor_cores_are_for_the_forward_direction(h200) -> None:
    for direction in DIRECTIONS:
        problem = ConvolutionProblem.parse(f"{direction} {STEM} float32 nchw")
        _, candidates = offered(SpaceToDepth, h200, problem)
        kept = [candidate for candidate in candidates if dict(candidate.parameters).get("rows") == "kept"]
        assert bool(kept) == (direction == "forward")
        assert all(dict(candidate.parameters)["channels"] == 21 for candidate in kept)
        assert all(candidate.math == "fma" for candidate in kept)
        assert all(candidate.build() is not None for candidate in kept)


@pytest.mark.parametrize("line", ["n8 c64 14x14 k128 1x1 float16 nhwc", "n8 c64 14x14 k128 1x1 tf32 nchw"])
def test_a_matrix_product_has_a_plan_in_each_direction(h200, line) -> None:
    for direction in DIRECTIONS:
        problem = ConvolutionProblem.parse(f"{direction} {line}")
        source, candidates = offered(Matmul, h200, problem, effort="wide")
        candidate = candidates[0]
        assert candidate.math == "tensor_op"
        runner = candidate.build()
        choice = Choice.of(key(problem), candidate)
        assert source.restore(problem, choice, None).build().workspace == runner.workspace


def test_no_matrix_product_without_tensor_cores(h200) -> None:
    problem = ConvolutionProblem.parse("forward n8 c64 14x14 k128 1x1 float32 nhwc")
    _, candidates = offered(Matmul, h200, problem, effort="wide")
    assert not candidates


@pytest.mark.parametrize("form", [(16, None), (48, "folded"), (32, "kept")])
def test_neighbours_in_knob_space(h200, form) -> None:
    problem = ConvolutionProblem.parse(f"forward {STEM} float16 nhwc")
    source, candidates = offered(SpaceToDepth, h200, problem)
    own = 3 if form[1] else 2
    hopper = next(candidate for candidate in candidates if candidate.algo == "graph:62" and _form(candidate) == form)
    found = list(source.around(problem, hopper, Policy(effort="wide", workspace_limit=LIMIT), None))
    assert found
    assert {candidate.id for candidate in found} == {hopper.id}
    assert {candidate.identity for candidate in found} - {candidate.identity for candidate in candidates}
    assert all(candidate.parameters[:own] == hopper.parameters[:own] for candidate in found)


def _form(candidate):
    parameters = dict(candidate.parameters)
    return parameters["channels"], parameters.get("rows")
