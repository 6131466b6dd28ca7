"""The list of known faults, and whom it concerns."""

import dataclasses

import pytest

from flcuda.finder import errata
from flcuda.finder.candidate import Candidate
from flcuda.finder.errata import ERRATA, Erratum, Gpu, apply
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem

PROBLEM = ConvolutionProblem.parse("forward n2 c8 9x9 k8 3x3 p1 float16 nhwc")
FAULT = Erratum(
    reason="is wrong",
    report="a report",
    since=92301,
    before=92400,
    sources=("graph",),
    algos=("5",),
    maths=("tensor_op",),
    sms=(86,),
    directions=("forward",),
    precisions=("float16",),
    ranks=(2,),
)
GPU = Gpu(86, 92301)


def candidate(**changes) -> Candidate:
    values = {"source": "graph", "algo": "5", "math": "tensor_op", "workspace": 7, "deterministic": True}
    return Candidate(**{**values, **changes}, build=lambda: None)


@pytest.fixture
def fault(monkeypatch):
    def use(*faults: Erratum) -> None:
        monkeypatch.setattr(errata, "ERRATA", faults)

    return use


def test_what_matches_in_everything_gets_the_reason(fault):
    fault(FAULT)
    marked = apply(candidate(), PROBLEM, GPU)
    assert marked.reason == "known fault of cuDNN: is wrong (a report)"
    assert marked.deterministic
    assert dataclasses.replace(marked, reason=None) == candidate()


@pytest.mark.parametrize(
    ("changes", "line", "gpu"),
    [
        ({"source": "legacy"}, "", GPU),
        ({"algo": "15"}, "", GPU),
        ({"math": "fma"}, "", GPU),
        ({}, "", Gpu(90, 92301)),
        ({}, "", Gpu(86, 92300)),
        ({}, "", Gpu(86, 92400)),
        ({}, "backward_data n2 c8 9x9 k8 3x3 p1 float16 nhwc", GPU),
        ({}, "forward n2 c8 9x9 k8 3x3 p1 bfloat16 nhwc", GPU),
        ({}, "forward n2 c8 9 k8 3 p1 float16 nhwc", GPU),
    ],
)
def test_what_differs_in_one_thing_is_left_alone(fault, changes, line, gpu):
    fault(FAULT)
    problem = ConvolutionProblem.parse(line) if line else PROBLEM
    assert apply(candidate(**changes), problem, gpu) == candidate(**changes)
    assert apply(candidate(**changes), problem, gpu).reason is None


def test_what_is_not_said_is_any(fault):
    fault(Erratum("is wrong", "a report", 90000, 99999))
    for direction in DIRECTIONS:
        problem = PROBLEM.with_direction(direction)
        assert apply(candidate(source="legacy", algo="GEMM", math="fma"), problem, Gpu(75, 92800)).reason is not None


def test_a_nondeterministic_one_stays_usable(fault):
    fault(dataclasses.replace(FAULT, nondeterministic=True))
    marked = apply(candidate(), PROBLEM, GPU)
    assert not marked.deterministic
    assert marked.reason is None


def test_a_reason_that_is_there_stays_and_the_first_fault_speaks(fault):
    fault(FAULT, dataclasses.replace(FAULT, reason="is slow"))
    assert apply(candidate(reason="not supported"), PROBLEM, GPU).reason == "not supported"
    assert "is wrong" in apply(candidate(), PROBLEM, GPU).reason


def test_windows_only(fault):
    fault(dataclasses.replace(FAULT, windows_only=True))
    point = ConvolutionProblem.parse("forward n2 c8 9x9 k8 1x1 float16 nhwc")
    assert apply(candidate(), point, GPU).reason is None
    assert apply(candidate(), PROBLEM, GPU).reason is not None


# --- the list -------------------------------------------------------------------------------------------------------


def test_every_entry_is_bounded_and_says_why_and_where():
    for entry in ERRATA:
        assert 90000 <= entry.since < entry.before < 100000
        assert entry.reason
        assert "pytorch" in entry.report
        assert set(entry.sources) <= {"graph", "legacy"}
        assert set(entry.maths) <= {"fma", "tensor_op"}
        assert set(entry.directions) <= set(DIRECTIONS)


@pytest.mark.parametrize(("sm", "cudnn", "expected"), [(86, 92301, False), (90, 92301, True), (86, 92400, True)])
def test_engine_5_is_not_deterministic_on_8_6_only(sm, cudnn, expected):
    marked = apply(candidate(), PROBLEM, Gpu(sm, cudnn))
    assert marked.deterministic == expected
    assert marked.reason is None
    assert apply(candidate(algo="6"), PROBLEM, Gpu(sm, cudnn)).deterministic


@pytest.mark.parametrize("source", ["graph", "legacy"])
@pytest.mark.parametrize(
    ("line", "cudnn", "refused"),
    [
        ("forward n1 c8 9x9x9 k8 3x3x3 bfloat16 nhwc", 91002, True),
        ("backward_filter n1 c8 9x9x9 k8 1x3x3 float16 nhwc", 90800, True),
        ("forward n1 c8 9x9x9 k8 1x1x1 bfloat16 nhwc", 91002, False),
        ("forward n1 c8 9x9 k8 3x3 bfloat16 nhwc", 91002, False),
        ("forward n1 c8 9x9x9 k8 3x3x3 bfloat16 nhwc", 91500, False),
        ("forward n1 c8 9x9x9 k8 3x3x3 bfloat16 nhwc", 90701, False),
        ("forward n1 c8 9x9x9 k8 3x3x3 tf32 nhwc", 91002, True),
        ("forward n1 c8 9x9x9 k8 3x3x3 tf32 nhwc", 91501, True),
        ("forward n1 c8 9x9x9 k8 3x3x3 tf32 nhwc", 91600, False),
        ("forward n1 c8 9x9x9 k8 3x3x3 float32 nhwc", 91002, False),
    ],
)
def test_3d(source, line, cudnn, refused):
    marked = apply(candidate(source=source, algo="7"), ConvolutionProblem.parse(line), Gpu(90, cudnn))
    assert (marked.reason is not None) == refused


def test_without_tensor_cores_tf32_in_3d_is_right():
    problem = ConvolutionProblem.parse("forward n1 c8 9x9x9 k8 3x3x3 tf32 nhwc")
    assert apply(candidate(math="fma"), problem, Gpu(90, 91002)).reason is None


def test_nothing_is_known_of_9_28():
    for line in ("forward n1 c8 9x9x9 k8 3x3x3 bfloat16 nhwc", "forward n1 c8 9x9 k8 3x3 float16 nhwc"):
        problem = ConvolutionProblem.parse(line)
        assert apply(candidate(), problem, Gpu(86, 92800)) == candidate()
