"""The list of known faults, and whom it concerns."""

import contextlib
import dataclasses
import math
from dataclasses import replace

import engine_sweep
import pytest

from flcuda.finder import errata
from flcuda.finder.candidate import Candidate
from flcuda.finder.errata import ERRATA, Erratum, Gpu, apply
from flcuda.finder.graph_problem import GraphProblem
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem, Problem
from flcuda.finder.sources.reference import ReferenceSource

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


def test_windows(fault):
    fault(dataclasses.replace(FAULT, windows=((5, 5),)))
    five = ConvolutionProblem.parse(str(PROBLEM).replace("3x3", "5x5"))
    assert apply(candidate(), five, GPU).reason is not None
    assert apply(candidate(), PROBLEM, GPU).reason is None


def test_depthwise_only_large_only_and_layouts(fault):
    fault(dataclasses.replace(FAULT, depthwise_only=True))
    assert apply(candidate(), PROBLEM, GPU).reason is None
    depthwise = "forward n2 c8 9x9 k8 3x3 p1 g8 float16 nhwc"
    assert apply(candidate(), ConvolutionProblem.parse(depthwise), GPU).reason is not None
    fault(dataclasses.replace(FAULT, large_only=True))
    assert apply(candidate(), PROBLEM, GPU).reason is None
    large = ConvolutionProblem.parse("forward n32768 c64 32x32 k8 3x3 p1 float16 nhwc")
    assert apply(candidate(), large, GPU).reason is not None
    fault(dataclasses.replace(FAULT, layouts=("nchw",)))
    assert apply(candidate(), PROBLEM, GPU).reason is None
    fault(dataclasses.replace(FAULT, layouts=("nhwc",)))
    assert apply(candidate(), PROBLEM, GPU).reason is not None


def graph_of(dtype, size, window):
    return GraphProblem.parse(
        f"graph float32 tensor_op; x {dtype} 2x8x{size} nhwc; w {dtype} 8x8x{window} nhwc; "
        f"t = convolution_forward(%x, %w, padding=1); y = pointwise(relu_fwd, %t); out y {dtype} nhwc"
    )


def test_a_graph_has_the_faults_of_its_convolutions_but_not_of_numbered_engines(fault):
    problem = graph_of("float16", "9x9", "3x3")
    fault(FAULT)
    assert apply(candidate(), problem, GPU) == candidate()
    assert apply(candidate(), problem, GPU).reason is None
    fault(dataclasses.replace(FAULT, algos=()))
    assert "is wrong" in apply(candidate(), problem, GPU).reason
    fault(dataclasses.replace(FAULT, algos=(), directions=("backward_data",)))
    assert apply(candidate(), problem, GPU).reason is None
    plain = GraphProblem.parse("graph float32 fma; x float16 2x8x9x9; y = pointwise(relu_fwd, %x); out y float16")
    fault(Erratum("is wrong", "a report", 90000, 99999))
    assert apply(candidate(), plain, GPU).reason is None


# --- the list -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "line", "fault"),
    [
        ("9", "backward_filter n3 c12 8x12 k12 2x5 p1x2 g3 float16 nhwc", True),
        ("23", "backward_filter n4 c12 13 k12 2 p1 s2 g3 tf32 nhwc", True),
        ("9", "backward_filter n3 c24 8x12 k24 2x5 p1x2 g3 float16 nhwc", False),
        ("9", "backward_filter n3 c12 8x12 k12 2x5 p1x2 float16 nhwc", False),
        ("9", "forward n3 c12 8x12 k12 2x5 p1x2 g3 float16 nhwc", False),
        ("70", "backward_filter n2 c48 9x3 k32 3x1 p1x3 g2 bfloat16 nchw", True),
        ("70", "backward_filter n2 c48 9x3 k32 3x1 p1x3 g2 bfloat16 nhwc", False),
        ("70", "forward n2 c48 9x3 k32 3x1 p1x3 g2 bfloat16 nchw", False),
        ("72", "forward n1 c40 2x5 k9 5x1 p2 float16 out:float32 nchw", True),
        ("72", "forward n1 c40 2x5 k9 5x1 p2 float16 out:float32 nhwc", False),
        ("78", "backward_data n5 c24 11 k8 3 p3 float32 nchw", True),
        ("69", "backward_filter n2 c1 2x7 k2 4x2 p2 d1x2 tf32 nhwc", True),
        ("69", "backward_filter n2 c2 2x7 k2 4x2 p2 d1x2 tf32 nhwc", False),
        ("4", "backward_filter n3 c6 9 k6 1 p2 g2 float64 nchw ys:177x29x2", True),
        ("6", "forward n8 c64 28x28 k64 5x5 p2 float32 nchw", True),
        ("6", "forward n8 c64 28x28 k64 3x3 p1 float32 nchw", False),
        ("6", "forward n8 c64 28x28 k64 5x5 p2 float16 nchw", False),
        ("7", "backward_data n8 c96 27x27 k256 5x5 p2 g2 float32 nchw", True),
        ("7", "backward_data n8 c96 27x27 k256 3x3 p1 g2 float32 nchw", False),
        ("2", "forward n8 c64 28x28 k64 3x3 p1 float64 nchw", True),
        ("2", "forward n8 c64 28x28 k64 3x3 p1 float32 nchw", False),
    ],
)
def test_engines_that_gave_wrong_numbers(algo, line, fault):
    problem = ConvolutionProblem.parse(line)
    marked = apply(dataclasses.replace(candidate(), algo=algo), problem, Gpu(90, 91900))
    assert (marked.reason is not None) is fault


@pytest.mark.parametrize(
    ("parts", "precision", "fault"),
    [
        (2048, "bfloat16", True),
        (129, "bfloat16", True),
        (128, "bfloat16", False),
        (None, "bfloat16", False),
        (2048, "float16", False),
    ],
)
def test_many_parts_of_a_sum_in_bfloat16(parts, precision, fault):
    problem = ConvolutionProblem.parse(f"backward_filter n253 c17 57x41 k19 5x5 p2 {precision} nchw")
    knobs = (("tile_size", 1),) if parts is None else (("split_k", parts), ("tile_size", 1))
    marked = apply(candidate(algo="47", parameters=knobs), problem, Gpu(90, 91900))
    assert (marked.reason is not None) is fault


@pytest.mark.parametrize(
    ("a", "b", "fault"),
    [
        ("6x40", "6x40", True),
        ("3x16x35", "1x16x1", True),
        ("3x16x35", "3x1x1", True),
        ("3x16x35", "1x16x35", False),
        ("3x16x35", "1x1x1", False),
        ("1x16x35", "1x16x1", False),
        ("3x16x7x5", "1x16x1x1", False),
    ],
)
def test_broadcasting_that_gave_wrong_numbers(a, b, fault):
    problem = Problem.parse(f"graph; a float16 {a}; b float16 {b}; y = mul(%a, %b); out y")
    marked = apply(candidate(algo="1"), problem, Gpu(90, 91900))
    assert (marked.reason is not None) is fault


LAYER = (
    "graph tensor_op; x {0} 4x16x9x9 nhwc; w {0} 24x16x3x3 nhwc; c = convolution_forward(%x, %w, padding=1); "
    "y = pointwise({1}, %c); out y; {2}"
)


@pytest.mark.parametrize(
    ("dtype", "mode", "more", "algo", "fault"),
    [
        ("float32", "sigmoid_fwd", "out c", "53", True),
        ("float32", "tanh_fwd", "out c", "53", True),
        ("float32", "swish_fwd", "out c", "53", False),
        ("float16", "sigmoid_fwd", "out c", "53", False),
        ("float32", "sigmoid_fwd", "", "53", False),
        ("float16", "tanh_fwd", "", "0", True),
        ("float16", "tanh_fwd", "", "2", False),
        ("float16", "swish_fwd", "", "0", False),
    ],
)
def test_activations_that_failed(dtype, mode, more, algo, fault):
    problem = Problem.parse(LAYER.format(dtype, mode, more))
    marked = apply(candidate(algo=algo), problem, Gpu(90, 91900))
    assert (marked.reason is not None) is fault


@pytest.mark.parametrize(("shape", "fault"), [("2x16x15", True), ("2x16x15x1", False), ("2x16x9x7", False)])
def test_pooling_along_a_line(shape, fault):
    rank = len(shape.split("x")) - 2
    window = "3" if rank == 1 else "(3, 1)"
    problem = Problem.parse(
        f"graph; x float16 {shape} nhwc; y, _ = resample_forward(max, %x, window={window}, stride=1); out y"
    )
    marked = apply(candidate(algo="2"), problem, Gpu(90, 91900))
    assert (marked.reason is not None) is fault


@pytest.mark.parametrize(
    ("layout", "outputs", "fault"), [("nchw", "out y; out i", True), ("nhwc", "out y; out i", False)]
)
def test_the_index_of_pooling(layout, outputs, fault):
    problem = Problem.parse(
        f"graph; x float16 2x16x9x7 {layout}; y, i = resample_forward(max, %x, window=3, stride=1, index=True); "
        f"{outputs}"
    )
    marked = apply(candidate(algo="1"), problem, Gpu(90, 91900))
    assert (marked.reason is not None) is fault


def test_a_graph_with_a_reduction_is_not_deterministic():
    graph = "graph; dy float16 8x16x9x9 nhwc; z float16 8x16x9x9 nhwc; d = pointwise(swish_bwd, %dy, %z); "
    gpu = Gpu(90, 91900)
    alone = Problem.parse(graph + "out d")
    summed = Problem.parse(graph + "s = reduction(add, %d, (1, 16, 1, 1)); out s float32")
    assert apply(candidate(), alone, gpu).deterministic
    marked = apply(candidate(), summed, gpu)
    assert not marked.deterministic
    assert marked.reason is None
    assert apply(candidate(), PROBLEM, gpu).deterministic


def test_every_entry_is_bounded_and_says_why_and_where():
    for entry in ERRATA:
        assert 90000 <= entry.since < entry.before < 100000
        assert entry.reason
        assert "pytorch" in entry.report or "seen with cuDNN" in entry.report
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


def test_3d_in_a_graph():
    problem = graph_of("bfloat16", "9x9x9", "3x3x3")
    assert "9.15" in apply(candidate(), problem, Gpu(90, 91002)).reason
    assert apply(candidate(), problem, Gpu(90, 91900)).reason is None


def test_without_tensor_cores_tf32_in_3d_is_right():
    problem = ConvolutionProblem.parse("forward n1 c8 9x9x9 k8 3x3x3 tf32 nhwc")
    assert apply(candidate(math="fma"), problem, Gpu(90, 91002)).reason is None


@pytest.mark.parametrize(
    ("line", "cudnn", "refused"),
    [
        ("forward n1 c2 32800x32800 k2 3x3 p1 g2 float16 nhwc", 91300, True),
        ("backward_data n1 c2 32800x32800 k2 3x3 p1 g2 float32 nhwc", 91100, True),
        ("forward n1 c2 32800x32800 k2 3x3 p1 g2 float16 nchw", 91300, False),
        ("forward n1 c2 32800x32800 k2 3x3 p1 float16 nhwc", 91300, False),
        ("forward n1 c2 3280x3280 k2 3x3 p1 g2 float16 nhwc", 91300, False),
        ("forward n1 c2 32800x32800 k2 3x3 p1 g2 float16 nhwc", 91002, False),
        ("forward n1 c2 32800x32800 k2 3x3 p1 g2 float16 nhwc", 91500, False),
    ],
)
def test_large_depthwise(line, cudnn, refused):
    marked = apply(candidate(algo="7"), ConvolutionProblem.parse(line), Gpu(90, cudnn))
    assert (marked.reason is not None) == refused


def test_nothing_is_known_of_9_28():
    for line in ("forward n1 c8 9x9x9 k8 3x3x3 bfloat16 nhwc", "forward n1 c8 9x9 k8 3x3 float16 nhwc"):
        problem = ConvolutionProblem.parse(line)
        assert apply(candidate(), problem, Gpu(86, 92800)) == candidate()


# --- the sweep that known faults come from ----------------------------------------------------------------------------

CHILD = """
import json, os, sys
skipped = json.load(sys.stdin)["skipped"]
for name, verdict in (("a", "right"), ("b", "fault wrong by 7"), ("c", None), ("d", "refused no"), ("e", "right")):
    if name in skipped:
        continue
    print("run", name, flush=True)
    if verdict is None:
        print("the context is lost", file=sys.stderr, flush=True)
        os.abort()
    print(verdict, flush=True)
"""


def test_a_sweep_goes_on_behind_what_ended_the_process(tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(engine_sweep, "__file__", str(child))
    found = engine_sweep.sweep(["any"], seconds=30)
    assert found.ran == 3
    wrong, ended = found.faults
    assert wrong == "b: wrong by 7"
    assert ended.startswith("c: ended the process with -6")
    assert "the context is lost" in ended
    child.write_text("import sys; sys.exit('no GPU')")
    with pytest.raises(RuntimeError, match="outside of any candidate: no GPU"):
        engine_sweep.sweep(["any"], seconds=30)


def test_a_sweep_runs_what_is_offered_and_what_is_around_it(monkeypatch, capsys):
    """On the CPU, with the reference's candidates in the place of engines."""
    problem = ConvolutionProblem.parse("forward n2 c3 5x5 k4 3x3 p1")

    class Source(ReferenceSource):
        def candidates(self, problem, policy, device):
            assert policy.effort == "wide"
            for candidate in super().candidates(problem, policy, device):
                yield replace(candidate, parameters=(("knob", 0),))

        def climbing(self):
            return contextlib.nullcontext()

        def around(self, problem, candidate, policy, device):
            runner = candidate.build()

            def wrong(x, w, out):
                runner(x, w, out)
                out += 1

            yield replace(candidate, parameters=(("knob", 1),), build=lambda: wrong)

    monkeypatch.setattr(engine_sweep.graph, "GraphSource", Source)
    monkeypatch.setattr(engine_sweep.devices, "resolve", lambda word: engine_sweep.devices.CPU)
    engine_sweep._child([str(problem)], [], math.inf, 1, 0)
    lines = capsys.readouterr().out.splitlines()
    names, verdicts = lines[::2], lines[1::2]
    assert [name.split("| ")[1] for name in names][-1].endswith('{"knob": 1}')
    assert set(verdicts[:-1]) == {"right"}
    assert verdicts[-1].startswith("fault ")
    engine_sweep._child([str(problem)], [name.removeprefix("run ") for name in names], math.inf, 1, 0)
    assert capsys.readouterr().out == ""
