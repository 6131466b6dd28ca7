"""Peaks of known boards against their data sheets, and what Problems ask for, counted by hand."""

import math

import numpy as np
import pytest

from flcuda.device import CPU, Device
from flcuda.finder import peaks
from flcuda.finder.problem import ConvolutionProblem, Problem

# Board: capability x 10, SMs, clock in kHz; then TFLOP/s of float64, float32, tf32, float16 as the data sheet has them.
BOARDS = {
    "Tesla T4": (75, 40, 1_590_000, 0.254, 8.1, None, 65),
    "NVIDIA TITAN RTX": (75, 72, 1_770_000, 0.51, 16.3, None, 130.5),
    "NVIDIA GeForce RTX 2080 Ti": (75, 68, 1_545_000, 0.42, 13.4, None, 53.8),
    "NVIDIA GeForce GTX 1660": (75, 22, 1_785_000, 0.157, 5.0, None, None),
    "NVIDIA A100-SXM4-80GB": (80, 108, 1_410_000, 19.5, 19.5, 156, 312),
    "NVIDIA RTX A6000": (86, 84, 1_800_000, 0.605, 38.7, 77.4, 154.8),
    "NVIDIA GeForce RTX 3090": (86, 82, 1_695_000, 0.556, 35.6, 35.6, 71),
    "NVIDIA L4": (89, 58, 2_040_000, 0.473, 30.3, 60, 121),
    "NVIDIA GeForce RTX 4090": (89, 128, 2_520_000, 1.29, 82.6, 82.6, 165.2),
    "H100 SXM5, tensor cores' clock": (90, 132, 1_830_000, None, None, 494.7, 989.4),
    "H100 SXM5, largest clock": (90, 132, 1_980_000, 66.9, 66.9, None, None),
    "B200, tensor cores' clock": (100, 148, 1_860_000, None, None, 1125, 2250),
    "B200, largest clock": (100, 148, 1_965_000, 37, 75, None, None),
    "NVIDIA GeForce RTX 5090": (120, 170, 2_407_000, 1.64, 104.8, 104.8, 209.5),
}


@pytest.mark.parametrize("name", BOARDS)
def test_data_sheets(name):
    capability, sm_count, clock_khz, *expected = BOARDS[name]
    found = peaks.of(capability, sm_count, clock_khz, 5_001_000, 256, name=name)
    assert found is not None
    for word, tflops in zip(("float64", "float32", "tf32", "float16"), expected, strict=True):
        if tflops is not None:
            assert found.flops[word] == pytest.approx(1e12 * tflops, rel=0.02), word
    assert ("tf32" in found.flops) == (capability > 75)
    assert ("float16" in found.flops) == ("GTX" not in name)
    if capability > 75:
        assert found.flops["bfloat16"] == found.flops["float16"]


@pytest.mark.parametrize(
    ("memory_khz", "bus_bits", "gb_per_s", "within"),
    [
        (5_001_000, 256, 320, 0.01),  # T4
        (1_593_000, 5120, 2039, 0.01),  # A100 80GB
        (2_619_000, 5120, 3350, 0.01),  # H100 SXM
        (3_201_000, 6144, 4800, 0.03),  # H200, whose data sheet says 4.8 TB/s
        (10_501_000, 384, 1008, 0.01),  # RTX 4090
    ],
)
def test_bandwidth(memory_khz, bus_bits, gb_per_s, within):
    found = peaks.of(90, 132, 1_980_000, memory_khz, bus_bits)
    assert found is not None
    assert found.bandwidth == pytest.approx(1e9 * gb_per_s, rel=within)


def test_unknown():
    assert peaks.of(61, 28, 1_582_000, 5_505_000, 352) is None
    assert peaks.of(90, 132, 1_980_000, 0, 6144) is None
    assert peaks.of(90, 132, 0, 3_201_000, 6144) is None
    assert peaks.peaks(CPU) is None


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(peaks.devices, "cuda_available", lambda: False)
    assert peaks.peaks(Device("cuda", 0)) is None


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("float32", "float32"),
        ("tf32", "tf32"),
        ("float16", "float16"),
        ("float16 fma", "float32"),
        ("bfloat16", "bfloat16"),
        ("float64", "float64"),
    ],
)
def test_the_peak_of_a_precision(line, word):
    found = peaks.of(90, 132, 1_980_000, 3_201_000, 6144)
    assert found is not None
    assert found.arithmetic(Problem.parse(f"forward n2 c4 5x5 k8 3x3 p1 {line} nchw")) == found.flops[word]
    turing = peaks.of(75, 40, 1_590_000, 5_001_000, 256)
    assert turing is not None
    assert turing.arithmetic(Problem.parse("forward n2 c4 5x5 k8 3x3 p1 bfloat16 nchw")) is None


def by_hand(problem: ConvolutionProblem) -> int:
    """Elements of x that the filter meets, by walking over every output and tap."""
    met = np.zeros(problem.x_shape[2:], bool)
    for place in np.ndindex(*problem.y_shape[2:]):
        for tap in np.ndindex(*problem.w_shape[2:]):
            at = tuple(
                place[d] * problem.stride[d] - problem.padding_before[d] + tap[d] * problem.dilation[d]
                for d in range(len(place))
            )
            if all(0 <= i < size for i, size in zip(at, met.shape, strict=True)):
                met[at] = True
    return math.prod(problem.x_shape[:2]) * int(met.sum())


@pytest.mark.parametrize("direction", ["forward", "backward_data", "backward_filter"])
@pytest.mark.parametrize(
    "line",
    [
        "n3 c6 11x8 k4 3x3 p1 float32 nchw",
        "n3 c6 11x8 k4 1x1 s2 float16 nhwc",
        "n2 c6 13x10 k9 2x3 p0x1 s3x2 d2 g3 float32 nchw",
        "n2 c5 17 k3 4 p0:3 s5 float64 nchw",
        "n2 c4 7x9x8 k6 3x2x1 p2:0x0x1 s2x3x2 d3x1x1 bfloat16 nhwc",
        "n3 c6 11x8 k4 3x3 p1 float32 nchw acc",
    ],
)
def test_work_of_a_convolution(direction, line):
    problem = ConvolutionProblem.parse(f"{direction} {line}")
    flops, moved = peaks.work(problem)
    assert flops == problem.flops
    size = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}[problem.x_dtype]
    sizes = {
        "x": by_hand(problem),
        "dx": math.prod(problem.x_shape),
        **dict.fromkeys(("w", "dw"), math.prod(problem.w_shape)),
        **dict.fromkeys(("y", "dy"), math.prod(problem.y_shape)),
    }
    out = problem.outputs[0]
    elements = sum(sizes[name] for name in problem.operands) + problem.accumulate * sizes[out]
    assert moved == size * elements


def test_a_1x1_filter_of_stride_2_meets_a_quarter():
    _, moved = peaks.work(Problem.parse("forward n1 c8 16x16 k4 1x1 s2 float32 nchw"))
    assert moved == 4 * (8 * 8 * 8 + 8 * 4 + 4 * 8 * 8)


def test_operands_of_several_dtypes():
    problem = Problem.parse("backward_filter n2 c8 6x6 k4 3x3 p1 float16 out:float32 nhwc")
    assert peaks.work(problem)[1] == 2 * (2 * 8 * 36 + 2 * 4 * 36) + 4 * 4 * 8 * 9


def test_work_of_a_graph():
    fused = Problem.parse(
        "graph; x float16 2x8x6x6 nhwc; w float16 4x8x3x3 nhwc; b float16 1x4x1x1 nhwc; "
        "t = convolution_forward(%x, %w, padding=1); u = add(%t, %b); y = silu(%u); out y float32 nhwc"
    )
    flops, moved = peaks.work(fused)
    assert flops == 2 * (2 * 4 * 6 * 6) * 8 * 9
    assert moved == 2 * (2 * 8 * 36 + 4 * 8 * 9 + 4) + 4 * 2 * 4 * 36


def test_work_of_a_graph_of_products():
    product = Problem.parse(
        "graph; a float16 3x5x7; b float16 1x7x11; c float16 3x11x2; t = matmul(%a, %b); y = matmul(%t, %c); out y"
    )
    flops, moved = peaks.work(product)
    assert flops == 2 * 3 * 5 * 7 * 11 + 2 * 3 * 5 * 11 * 2
    out = moved - 2 * (3 * 5 * 7 + 7 * 11 + 3 * 11 * 2)
    assert out == 3 * 5 * 2 * np.dtype(product.dtype_of("y")).itemsize
    assert peaks.work(Problem.parse("graph; x float32 2x3x4x5; y = tanh(%x); out y")) == (0, 2 * 4 * 120)
