"""Rewritten convolutions on the CPU: the reference source solves the inner Problem, float64 says what is right."""

import math

import numpy as np
import pytest
from finder_fakes import key
from random_problems import random_problem

from flcuda.device import Device
from flcuda.errors import CudnnNotSupportedError
from flcuda.finder.candidate import Candidate
from flcuda.finder.choice import Choice
from flcuda.finder.graph_problem import GraphProblem
from flcuda.finder.policy import Policy
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem, Problem
from flcuda.finder.sources import REWRITES, source_named, sources_for
from flcuda.finder.sources.reference import ReferenceSource
from flcuda.finder.sources.rewrites import (
    FAST,
    FAST_WINDOWS,
    WIDE,
    Matmul,
    Padded,
    Relayout,
    RewrittenRunner,
    SpaceToDepth,
)
from flcuda.finder.verify import Verifier

CPU = Device("cpu")
SOURCES = (SpaceToDepth, Padded, Relayout, Matmul)
FAST_POLICY, WIDE_POLICY = Policy(), Policy(effort="wide")


def rewrites(kind, line: str, policy: Policy = FAST_POLICY):
    return list(kind(()).rewrites(ConvolutionProblem.parse(line), policy))


def inner_lines(kind, line: str, policy: Policy = FAST_POLICY) -> list[str]:
    return [str(rewrite.inner) for rewrite in rewrites(kind, line, policy)]


# --- results ----------------------------------------------------------------------------------------------------------


def check(problem: ConvolutionProblem, kinds=SOURCES, policies=(WIDE_POLICY,)) -> int:
    """Verifies every candidate, and the one that its stored choice restores."""
    arrays = problem.random_arrays(seed=3, device="cpu")
    verifier = Verifier(problem, tuple(arrays[name] for name in problem.inputs), CPU)
    checked = 0
    for kind in kinds:
        source = kind((ReferenceSource(),))
        for policy in policies:
            for candidate in source.candidates(problem, policy, CPU):
                assert candidate.source == source.name
                assert candidate.algo.startswith("reference:")
                runner = candidate.build()
                found = verifier.check(runner, deterministic=True)
                assert found.reason is None, f"{problem}: {candidate}"
                assert found.repeats
                choice = Choice.of(key(problem, policy), candidate)
                restored = source.restore(problem, Choice.from_json(choice.to_json()), CPU)
                assert restored.identity == candidate.identity
                assert restored.workspace == candidate.workspace
                assert verifier.check(restored.build(), deterministic=False).reason is None
                checked += 1
    return checked


@pytest.mark.parametrize("part", range(10))
def test_random_problems_are_computed_right(part) -> None:
    checked = 0
    for index in range(15):
        checked += check(random_problem(np.random.default_rng([11, part, index])), policies=(FAST_POLICY, WIDE_POLICY))
    assert checked > 10


GEOMETRIES = [
    # a first layer; a kernel smaller than the stride, larger, no multiple of it; strides that differ
    "n2 c3 21x20 k8 7x7 p3 s2",
    "n2 c3 17x16 k5 2x3 p0:1x1 s4x3",
    "n2 c1 16x16 k4 4x4 s4",
    "n1 c3 14x15 k6 5x4 p2x0 s2x3",
    "n2 c2 9x8 k3 3x3 p1 s1x2",
    "n2 c3 23 k6 7 p2:3 s3",
    "n1 c2 6x7x8 k4 3x3x2 p1 s2",
    # positions behind the last window
    "n2 c3 10x11 k4 3x3 s4",
    # channels that no vector fits, padding that differs
    "n2 c5 7x6 k11 3x3 p1:2x0:1",
    "n2 c12 7x6 k8 3x3 p1 d2",
    # one element
    "n3 c12 5x4 k7 1x1",
    "n3 c12 5x4 k8 1x1 s2",
    "n3 c5 5x4 k7 1x1 p1x2:0 s3x2",
    "n4 c16 1x1 k10 1x1",
    "n3 c4 7 k5 1 s2",
]


@pytest.mark.parametrize("word", ["float32 nchw", "float16 nhwc", "bfloat16 nchw acc", "tf32 nhwc acc", "float64 nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_direction_of_a_geometry(geometry, direction, word) -> None:
    assert check(ConvolutionProblem.parse(f"{direction} {geometry} {word}"))


def test_a_float32_result_of_16_bit_operands() -> None:
    for direction in DIRECTIONS:
        for geometry in ("n2 c3 21x20 k8 7x7 p3 s2", "n3 c12 5x4 k7 1x1"):
            assert check(ConvolutionProblem.parse(f"{direction} {geometry} bfloat16 nhwc out:float32"))


# --- what becomes of a Problem ----------------------------------------------------------------------------------------


def test_a_first_layer_loses_its_stride_and_its_padding() -> None:
    for direction in DIRECTIONS:
        stem = f"{direction} n128 c3 224x224 k64 7x7 p3 s2"
        for word, inner in (
            ("float16 nhwc", "c16 115x115 k64 4x4 p0 s1 float16 nhwc"),
            ("bfloat16 nhwc", "c16 115x115 k64 4x4 p0 s1 bfloat16 nhwc"),
            ("tf32 nhwc", "c16 115x115 k64 4x4 p0 s1 tf32 nhwc"),
            ("float32 nchw", "c12 115x115 k64 4x4 p0 s1 float32 nchw"),
            # FFT and Winograd are for NCHW
            ("float32 nhwc", "c12 115x115 k64 4x4 p0 s1 float32 nchw"),
        ):
            blocks, *windows = rewrites(SpaceToDepth, f"{stem} {word}")
            assert str(blocks.inner) == f"{direction} n128 {inner}"
            assert blocks.parameters[2:] == ()
            assert all(len(rewrite.parameters) == 3 for rewrite in windows)


def test_windows_of_a_first_layer_are_its_channels() -> None:
    folded, kept = "p0 s1", "p0 s2x1"
    stem = "n128 c3 224x224 k64 7x7 p3 s2"
    for word in ("float16", "bfloat16", "tf32"):
        both = [f"c48 115x112 k64 4x1 {folded} {word} nhwc", f"c64 115x112 k64 4x1 {folded} {word} nhwc"]
        for direction, wanted in (
            ("forward", [*both, f"c32 229x112 k64 7x1 {kept} {word} nhwc"]),
            ("backward_filter", both),
            ("backward_data", []),
        ):
            _, *found = inner_lines(SpaceToDepth, f"{direction} {stem} {word} nhwc")
            assert found == [f"{direction} n128 {inner}" for inner in wanted]
    _, found = inner_lines(SpaceToDepth, f"forward {stem} float32 nchw")
    assert found == f"forward n128 c21 229x112 k64 7x1 {kept} float32 nchw"
    assert len(inner_lines(SpaceToDepth, f"backward_filter {stem} float32 nchw")) == 1
    # 18 channels: 64 would be more than 1.6 times those
    _, *found = inner_lines(SpaceToDepth, "forward n32 c3 64x64 k256 3x3 p1 s2 float16 nhwc")
    assert found == [
        f"forward n32 c32 33x32 k256 2x1 {folded} float16 nhwc",
        f"forward n32 c16 65x32 k256 3x1 {kept} float16 nhwc",
    ]
    source = SpaceToDepth(())
    problem = ConvolutionProblem.parse(f"backward_data {stem} float16 nhwc")
    with pytest.raises(ValueError, match="no windows with rows 'kept' of backward_data"):
        source.rewritten(problem, {"channels": 32, "layout": "nhwc", "rows": "kept"})
    with pytest.raises(ValueError, match="no windows with rows 'turned'"):
        source.rewritten(problem.with_direction("forward"), {"channels": 32, "layout": "nhwc", "rows": "turned"})


def test_only_what_has_not_the_form_is_copied() -> None:
    stem, *_ = rewrites(SpaceToDepth, "forward n128 c3 224x224 k64 7x7 p3 s2 float16 nhwc acc")
    x, w, y = stem.copies
    assert x is not None
    assert w is not None
    assert y is None
    assert stem.inner.accumulate
    # 128 x 115 x 115 x 16 and 64 x 4 x 4 x 16 elements of two bytes
    assert stem.copied == 54_169_600 + 32_768
    stem, *_ = rewrites(SpaceToDepth, "forward n128 c3 224x224 k60 7x7 p3 s2 float16 nhwc acc")
    assert stem.copies[2] is not None
    assert not stem.inner.accumulate
    assert stem.inner.w_shape == (64, 16, 4, 4)
    _, padded, *_ = rewrites(Padded, "backward_filter n32 c3 32x32 k60 3x3 p1 float16 nhwc align:2x16x16", WIDE_POLICY)
    assert all(padded.copies)
    assert padded.inner.x_alignment == 16
    assert str(padded.inner) == "backward_filter n32 c8 32x32 k64 3x3 p1 s1 float16 nhwc"
    # a border for what differs before and after
    four, padded, _ = rewrites(Padded, "forward n32 c3 32x32 k64 3x3 p1:2 float16 nhwc")
    assert four.inner.x_shape == (32, 4, 33, 33)
    assert str(padded.inner) == "forward n32 c8 33x33 k64 3x3 p1 s1 float16 nhwc"


@pytest.mark.parametrize(
    ("kind", "line", "count"),
    [
        (SpaceToDepth, "n8 c3 64x64 k64 7x7 p3 s2 float16 nhwc", 4),
        (SpaceToDepth, "n8 c3 64x64 k64 7x7 p3 s2x3 float16 nhwc", 4),
        (SpaceToDepth, "n8 c5 64x64 k64 7x7 p3 s2 float16 nhwc", 1),
        (SpaceToDepth, "n8 c3 4096 k64 7 p3 s2 float16 nhwc", 1),
        # a few operations for each byte
        (SpaceToDepth, "n8 c3 64x64 k8 3x3 p1 s2 float16 nhwc", 1),
        (SpaceToDepth, "n8 c3 224x224 k64 16x16 s16 float16 nhwc", 1),
        (SpaceToDepth, "n8 c3 64x64 k64 7x7 p3 s1x2 float16 nhwc", 0),
        (SpaceToDepth, "n8 c16 64x64 k64 3x3 p1 s2 float16 nhwc", 0),
        (SpaceToDepth, "n8 c3 64x64 k64 1x1 s2 float16 nhwc", 0),
        (SpaceToDepth, "n8 c3 64x64 k64 3x3 p1 float16 nhwc", 0),
        (SpaceToDepth, "n8 c3 64x64 k64 3x3 p1 s2 d2 float16 nhwc", 0),
        (SpaceToDepth, "n8 c4 64x64 k64 3x3 p1 s2 g2 float16 nhwc", 0),
        (Padded, "n8 c3 64x64 k64 3x3 p1 float16 nhwc", 3),
        (Padded, "n8 c3 64x64 k64 3x3 p1 bfloat16 nhwc", 2),
        (Padded, "n8 c4 64x64 k64 3x3 p1 float16 nhwc", 2),
        (Padded, "n8 c3 64x64 k64 3x3 p1 tf32 nhwc", 2),
        (Padded, "n8 c3 64x64 k64 7x7 p3 s2 tf32 nhwc", 1),
        (Padded, "n8 c60 64x64 k64 3x3 p1 float16 nhwc", 1),
        (Padded, "n8 c64 64x64 k63 3x3 p1 float16 nhwc", 1),
        (Padded, "n8 c60 64x64 k64 3x3 p1 tf32 nhwc", 0),
        (Padded, "n8 c64 64x64 k64 3x3 p1 float16 nhwc", 0),
        (Padded, "n8 c3 64x64 k64 3x3 p1 float32 nhwc", 0),
        (Padded, "n8 c6 64x64 k64 3x3 p1 g2 float16 nhwc", 0),
        # one operation for each byte
        (Padded, "n8 c7 64x64 k7 1x1 float16 nhwc", 0),
        (Relayout, "n8 c64 64x64 k64 3x3 p1 float32 nhwc", 1),
        (Relayout, "n8 c64 64x64 k64 3x3 p1 tf32 nchw", 1),
        (Relayout, "n8 c64 64x64 k64 3x3 p1 float16 nchw", 1),
        (Relayout, "n8 c64 64x64 k64 3x3 p1 float32 nchw", 0),
        (Relayout, "n8 c64 64x64 k64 3x3 p1 float16 nhwc", 0),
        (Relayout, "n8 c64 64x64 k64 3x3 p1 g64 float16 nchw", 0),
        # each plan is compiled
        (Matmul, "n8 c64 64x64 k64 1x1 float16 nhwc", 0),
    ],
)
def test_a_fast_search_tries_what_is_likely_to_pay(kind, line, count) -> None:
    assert len(rewrites(kind, f"forward {line}")) == count


@pytest.mark.parametrize(
    ("kind", "line", "count"),
    [
        (SpaceToDepth, "n8 c3 64x64 k64 7x7 p3 s1x2 float16 nhwc", 6),
        # 27 and 9 channels: two layouts of each, of a block none
        (SpaceToDepth, "n8 c3 64x64 k64 3x3 p1 float16 nhwc", 2),
        (SpaceToDepth, "n8 c3 64x64 k64 7x7 p3 s2 float16 nhwc", 8),
        (SpaceToDepth, "n8 c16 64x64 k64 3x3 p1 s2 float16 nhwc", 2),
        (SpaceToDepth, "n8 c16 64x64 k64 1x1 s2 float16 nhwc", 0),
        (SpaceToDepth, "n8 c512 64x64 k64 3x3 p1 s2 float16 nhwc", 0),
        (Padded, "n8 c8 64x64 k64 3x3 p1 float16 nhwc", 4),
        (Padded, "n8 c7 64x64 k7 1x1 float16 nhwc", 4),
        (Relayout, "n8 c64 64x64 k64 3x3 p1 float16 nhwc", 1),
        (Relayout, "n8 c64 8x8 k64 3x3 p1 float16 nhwc xs:8000x1x900x100", 2),
        (Matmul, "n8 c64 64x64 k64 1x1 s2 float16 nhwc", 2),
        (Matmul, "n8 c64 64x64 k64 1x1 float16 nhwc", 1),
        (Matmul, "n8 c64 64x64 k64 1x1 tf32 nchw", 2),
        (Matmul, "n8 c64 1x1 k64 1x1 float16 nchw", 1),
        (Matmul, "n8 c64 64x64 k64 1x1 float16 nhwc acc", 2),
        (Matmul, "n8 c64 64x64 k64 3x3 p1 float16 nhwc", 0),
        (Matmul, "n8 c64 64x64 k64 1x1 g2 float16 nhwc", 0),
    ],
)
def test_a_wide_search_tries_what_is_possible(kind, line, count) -> None:
    assert len(rewrites(kind, f"forward {line}", WIDE_POLICY)) == count


def test_a_filter_of_one_element_is_a_matrix_product() -> None:
    (rewrite,) = rewrites(Matmul, "backward_filter n8 c64 6x5 k32 1x1 float16 nhwc", WIDE_POLICY)
    assert rewrite.copies == (None, None, None)
    assert isinstance(rewrite.inner, GraphProblem)
    assert str(rewrite.inner) == (
        "graph float32 tensor_op; x float16 1x240x64 nchw; dy float16 1x32x240 nhwc; "
        "dw = matmul(%dy, %x); out dw float16 nchw"
    )
    # not of each image: in NCHW as a copy in the other layout
    (copied,) = rewrites(Matmul, "backward_filter n8 c64 6x5 k32 1x1 float16 nchw", WIDE_POLICY)
    assert None not in copied.copies[:2]
    *_, rewrite = rewrites(Matmul, "backward_data n8 c64 6x5 k32 1x1 float16 nchw", WIDE_POLICY)
    assert str(rewrite.inner) == (
        "graph float32 tensor_op; dy float16 8x32x30 nchw; w float16 1x64x32 nhwc; "
        "dx = matmul(%w, %dy); out dx float16 nchw"
    )


# --- candidates -------------------------------------------------------------------------------------------------------


class Listing:
    """An inner source that lists what a test tells it."""

    name = "listing"
    devices = ("cpu",)
    kinds = (Problem,)

    def __init__(self, *offered: Candidate, error: Exception | None = None) -> None:
        self.offered = offered
        self.error = error
        self.asked: list[tuple[Problem, Policy]] = []

    def candidates(self, problem, policy, device):
        self.asked.append((problem, policy))
        if self.error is not None:
            raise self.error
        yield from self.offered

    def around(self, problem, candidate, policy, device):
        self.asked.append((problem, policy))
        assert candidate.source == self.name
        assert candidate.algo == "62"
        assert candidate.parameters == (("tile", 3),)
        yield offered("62", parameters=(("tile", 4),))
        yield offered("62", parameters=(("tile", 5),), reason="no")


def offered(algo: str, **changes) -> Candidate:
    values = {"math": "tensor_op", "workspace": 1000, "deterministic": False, "build": lambda: None}
    return Candidate(source="listing", algo=algo, **{**values, **changes})


# of which there is one rewrite
STEM = ConvolutionProblem.parse("backward_data n8 c3 64x64 k64 7x7 p3 s2 float16 nhwc")


def test_a_candidate_is_the_inner_one_and_the_copies() -> None:
    inner = Listing(offered("62", parameters=(("tile", 3),), notes=("tensor_core",), reported_ms=1.0))
    (candidate,) = SpaceToDepth((inner,)).candidates(STEM, Policy(), CPU)
    (rewrite,) = SpaceToDepth(()).rewrites(STEM, Policy())
    assert candidate.id == "space_to_depth:listing:62"
    assert candidate.parameters == (("channels", 16), ("layout", "nhwc"), ("inner.tile", 3))
    assert candidate.workspace == rewrite.copied + 1000
    assert not candidate.deterministic
    assert candidate.math == "tensor_op"
    assert candidate.notes == ("tensor_core",)
    # of the inner Problem alone
    assert candidate.reported_ms is None
    # nothing is to be built or measured while candidates are listed, and the copies count too
    ((problem, policy),) = inner.asked
    assert problem == rewrite.inner
    assert policy.mode == "heuristic"
    assert policy.workspace_limit is not None


def test_few_candidates_and_no_compiler_in_a_fast_search() -> None:
    many = [offered(str(engine), parameters=(("tile", tile),)) for engine in range(3) for tile in range(9)]
    many = [
        offered("0", reason="no"),
        *(offered(str(engine), notes=("runtime_compilation",)) for engine in range(9)),
        *many,
    ]
    source = SpaceToDepth((Listing(*many),))
    fast = list(source.candidates(STEM, Policy(), CPU))
    # the first of each engine, then the second of each
    assert [candidate.algo for candidate in fast] == [f"listing:{engine}" for engine in (0, 1, 2, 0, 1)]
    assert [dict(candidate.parameters)["inner.tile"] for candidate in fast] == [0, 0, 0, 1, 1]
    assert len(fast) == FAST
    # windows have several forms: of each there are fewer
    forms = list(source.candidates(STEM.with_direction("forward"), Policy(), CPU))
    assert len(forms) == FAST + 3 * FAST_WINDOWS
    wide = list(source.candidates(STEM, WIDE_POLICY, CPU))
    assert len(wide) == 2 * WIDE
    assert sum(bool(candidate.notes) for candidate in wide) == 4
    (first,) = source.candidates(STEM, Policy(mode="heuristic"), CPU)
    assert first.identity == fast[0].identity
    # of a matrix product every plan is compiled
    compiled = Listing(*(offered(str(engine), notes=("runtime_compilation",)) for engine in range(5)))
    product = ConvolutionProblem.parse("forward n8 c64 8x8 k64 1x1 float16 nhwc")
    assert not list(Matmul((compiled,)).candidates(product, Policy(), CPU))
    assert len(list(Matmul((compiled,)).candidates(product, WIDE_POLICY, CPU))) == 2


def test_of_four_channels_the_legacy_algorithms_are_asked() -> None:
    problem = ConvolutionProblem.parse("forward n8 c3 64x64 k64 7x7 p3 s2 float16 nhwc")
    source = Padded()
    asked = {
        rewrite.inner.x_shape[1]: [inner.name for inner in source._sources(rewrite, Policy())]
        for rewrite in source.rewrites(problem, Policy())
    }
    assert asked == {4: ["legacy"], 8: ["graph"]}
    four = source.rewritten(problem, {"channels": 4, "layout": "nhwc"})
    assert str(four.inner) == "forward n8 c4 64x64 k64 7x7 p3 s2 float16 nhwc"
    assert [inner.name for inner in source._sources(four, WIDE_POLICY)] == ["graph", "legacy"]


def test_what_the_inner_source_does_not_take_is_not_offered() -> None:
    error = CudnnNotSupportedError("f", 3000, "no", "CUDNN_STATUS_NOT_SUPPORTED")
    assert not list(SpaceToDepth((Listing(error=error),)).candidates(STEM, Policy(), CPU))
    with pytest.raises(MemoryError):
        list(SpaceToDepth((Listing(error=MemoryError("full")),)).candidates(STEM, Policy(), CPU))


def test_the_workspace_limit_holds_for_the_copies_too() -> None:
    inner = Listing(offered("62"))
    (rewrite,) = SpaceToDepth(()).rewrites(STEM, Policy())
    source = SpaceToDepth((inner,))
    assert list(source.candidates(STEM, Policy(workspace_limit=rewrite.copied), CPU))
    assert inner.asked[0][1].workspace_limit == 0
    assert not list(source.candidates(STEM, Policy(workspace_limit=rewrite.copied - 1), CPU))


def test_neighbours_are_those_of_the_inner_engine() -> None:
    inner = Listing(offered("62", parameters=(("tile", 3),)))
    source = SpaceToDepth((inner,))
    (candidate,) = source.candidates(STEM, Policy(), CPU)
    (neighbour,) = source.around(STEM, candidate, Policy(), CPU)
    assert neighbour.id == candidate.id
    assert neighbour.parameters == (("channels", 16), ("layout", "nhwc"), ("inner.tile", 4))
    assert neighbour.workspace == candidate.workspace
    assert inner.asked[0] == inner.asked[1]
    assert not list(SpaceToDepth((ReferenceSource(),)).around(STEM, *_reference_candidate(), Policy(), CPU))


def _reference_candidate() -> tuple[Candidate]:
    return (next(iter(SpaceToDepth((ReferenceSource(),)).candidates(STEM, Policy(), CPU))),)


def test_where_nothing_is_copied_a_plan_may_give_addresses() -> None:
    class Launched:
        workspace = 7

        def launch(self, addresses):
            return addresses

    inner = Launched()
    (product,) = rewrites(Matmul, "forward n8 c64 8x8 k64 1x1 float16 nhwc", WIDE_POLICY)
    runner = RewrittenRunner(product, inner)
    assert runner.launch == inner.launch
    assert runner.workspace == 7
    (stem,) = rewrites(SpaceToDepth, str(STEM))
    runner = RewrittenRunner(stem, inner)
    assert runner.launch is None
    assert runner.workspace == stem.copied + 7


def test_a_choice_of_another_source_cannot_be_restored() -> None:
    (candidate,) = _reference_candidate()
    choice = Choice.of(key(STEM), candidate)
    with pytest.raises(ValueError, match="space_to_depth has no inner source 'reference'"):
        SpaceToDepth(()).restore(STEM, choice, CPU)
    with pytest.raises(ValueError, match="rewrites convolutions only"):
        SpaceToDepth(()).restore(Matmul(()).rewritten(STEM_1X1, {"layout": "nhwc"}).inner, choice, CPU)


STEM_1X1 = ConvolutionProblem.parse("forward n2 c8 4x4 k8 1x1 float16 nhwc")


def test_operands_that_the_kernels_do_not_take_are_left_alone() -> None:
    huge = ConvolutionProblem.parse("forward n1 c3 2000000000 k4 7 s2 float16 nhwc")
    assert not list(SpaceToDepth((Listing(offered("62")),)).candidates(huge, Policy(workspace_limit=1 << 50), CPU))
    four = ConvolutionProblem.parse("forward n1 c3 4x4x4x4 k4 3x3x3x3 s2 float32 nchw")
    assert not list(SpaceToDepth((Listing(offered("62")),)).candidates(four, Policy(), CPU))


def test_the_table_of_sources_has_them_after_the_plain_ones() -> None:
    names = [source.name for source in sources_for(Device("cuda"), STEM)]
    assert names == ["graph", "legacy", *REWRITES, "depthwise"]
    assert [source_named(name).name for name in REWRITES] == list(REWRITES)
    graph = Matmul(()).rewritten(STEM_1X1, {"layout": "nhwc"}).inner
    assert [source.name for source in sources_for(Device("cuda"), graph)] == ["graph"]
    assert not {source.name for source in sources_for(CPU, STEM)} & set(REWRITES)


def test_a_run_takes_one_workspace_that_is_aligned() -> None:
    for kind in SOURCES:
        for line in ("forward n2 c3 9x9 k5 3x3 s2 float16 nhwc", "backward_data n2 c3 9x9 k5 1x1 s2 bfloat16 nchw"):
            for rewrite in rewrites(kind, line, WIDE_POLICY):
                assert rewrite.copied % 512 == 0
                assert rewrite.copied >= sum(copy.nbytes for copy in rewrite.copies if copy is not None)
                shapes = [rewrite.inner.shape_of(name) for name in rewrite.problem.operands]
                for copy, shape in zip(rewrite.copies, shapes, strict=True):
                    assert copy is None or math.prod(copy.staged_shape) == math.prod(shape)
