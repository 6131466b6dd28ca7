"""What a GPU can do at most, and what a Problem asks of it: which share of the machine a candidate uses.

The peak of arithmetic is SMs x clock x operations per SM and clock; that of memory is clock x 2 x bus width. Operations
per SM and clock, two a multiply-add, dense, products of 16-bit operands and of TF32 summed in float32:

======================  =======  =======  ====  =======================  ============================================
compute capability      float64  float32  tf32  float16, bfloat16        agrees with
======================  =======  =======  ====  =======================  ============================================
7.5                     4        128      -     1024 (float16 only)      T4 data sheet: 65 TFLOP/s (40 SMs, 1590 MHz)
8.0                     128      128      1024  2048                     A100 white paper: 19.5, 19.5, 156 and 312
                                                                         TFLOP/s (108 SMs, 1410 MHz)
8.6                     4        256      512   1024                     GA102 white paper, RTX A6000: 38.7, 77.4 and
                                                                         154.8 TFLOP/s (84 SMs, 1800 MHz)
8.9                     4        256      512   1024                     L4 data sheet: 30.3, 60 and 121 TFLOP/s
                                                                         (58 SMs, 2040 MHz)
9.0                     256      256      2048  4096                     H100 white paper, SXM5: 66.9 and 66.9 TFLOP/s
                                                                         (132 SMs, 1980 MHz), 494.7 and 989.4 (1830 MHz)
10.0                    128      256      4096  8192                     HGX B200 data sheet: 37, 75, 1100 and 2250
                                                                         TFLOP/s (148 SMs; the last two at 1860 MHz)
12.0                    4        256      512   1024                     RTX Blackwell white paper, RTX 5090, halved as
                                                                         below: 104.8, 104.8 and 209.5 TFLOP/s (170 SMs,
                                                                         2407 MHz)
======================  =======  =======  ====  =======================  ============================================

float32 and float64 without tensor cores: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions";
float64 of 8.0 and 9.0 is that of the tensor cores, which compute float64 with the rounding of a multiply-add. GeForce
boards sum in float32 at half the rate of the tensor cores (GA102 white paper: 71 TFLOP/s of an RTX 3090, 142 with
float16 sums; likewise for the RTX 2080 Ti, 4090 and 5090), and the GTX ones of 7.5 have none.

The clock is the largest that the driver names. Data sheets count with a lower one for tensor cores: an H200 of 1980 MHz
has 1070 TFLOP/s here and 989 there. Under load the power limit may allow less again.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flcuda import device as devices
from flcuda.device import Device
from flcuda.finder.graph_problem import GraphProblem
from flcuda.finder.problem import OPERAND_DTYPES, ConvolutionProblem, Problem

_TENSOR_CORES = ("tf32", "float16", "bfloat16")

# By compute capability x 10; see the table above.
_PER_SM_AND_CLOCK: dict[int, dict[str, int]] = {
    75: {"float64": 4, "float32": 128, "float16": 1024},
    80: {"float64": 128, "float32": 128, "tf32": 1024, "float16": 2048, "bfloat16": 2048},
    86: {"float64": 4, "float32": 256, "tf32": 512, "float16": 1024, "bfloat16": 1024},
    89: {"float64": 4, "float32": 256, "tf32": 512, "float16": 1024, "bfloat16": 1024},
    90: {"float64": 256, "float32": 256, "tf32": 2048, "float16": 4096, "bfloat16": 4096},
    100: {"float64": 128, "float32": 256, "tf32": 4096, "float16": 8192, "bfloat16": 8192},
    120: {"float64": 4, "float32": 256, "tf32": 512, "float16": 1024, "bfloat16": 1024},
}


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a GPU can do at most.

    Attributes:
        flops: floating-point operations a second by precision word: "float64", "float32" (multiply-adds, no tensor
            cores), "tf32", "float16", "bfloat16" (both summed in float32); those that the GPU lacks are left out.
        bandwidth: bytes a second of the device memory.
    """

    flops: Mapping[str, float]
    bandwidth: float

    def arithmetic(self, problem: Problem) -> float | None:
        """Returns the operations a second for a Problem's precision; None when the GPU or the table lacks it.

        16-bit operands without tensor cores are computed in float32.
        """
        word = problem.precision
        if word in ("float16", "bfloat16") and problem.math == "fma":
            word = "float32"
        return self.flops.get(word)


def of(
    capability: int,
    sm_count: int,
    clock_khz: int,
    memory_khz: int,
    bus_bits: int,
    *,
    name: str = "",
) -> Peaks | None:
    """Computes the peaks of a GPU.

    Args:
        capability: compute capability times 10: 90 for 9.0.
        sm_count: multiprocessors.
        clock_khz: the largest clock of an SM.
        memory_khz: the largest memory clock, as the driver names it: two transfers a clock.
        bus_bits: width of the memory bus.
        name: of the board: "GeForce" in it halves the rates of tensor cores, "GTX" means that it has none.

    Returns:
        The peaks; None for a compute capability that is not in the table, or a clock or width that is 0.
    """
    table = _PER_SM_AND_CLOCK.get(capability)
    if table is None or min(sm_count, clock_khz, memory_khz, bus_bits) <= 0:
        return None
    tensor_cores = 0.0 if "GTX" in name else 0.5 if "GeForce" in name else 1.0
    shares = {word: tensor_cores if word in _TENSOR_CORES else 1.0 for word in table}
    flops = {
        word: shares[word] * operations * sm_count * 1e3 * clock_khz
        for word, operations in table.items()
        if shares[word] > 0
    }
    return Peaks(flops, 2e3 * memory_khz * bus_bits / 8)


def peaks(device: Device) -> Peaks | None:
    """Reads a GPU's clocks and gives its peaks.

    Args:
        device: which.

    Returns:
        The peaks; None on the CPU, without a GPU, for one that is not in the table, or where the driver names no
        clocks.
    """
    if device.kind == "cpu" or not devices.cuda_available():
        return None
    runtime: Any = devices.cupy().cuda.runtime
    model = devices.device_model(device)
    try:
        clock_khz, memory_khz, bus_bits = (
            int(runtime.deviceGetAttribute(attribute, device.index))
            for attribute in (
                runtime.cudaDevAttrClockRate,
                runtime.cudaDevAttrMemoryClockRate,
                runtime.cudaDevAttrGlobalMemoryBusWidth,
            )
        )
    except runtime.CUDARuntimeError:
        return None
    return of(int(model["sm"]), int(model["sm_count"]), clock_khz, memory_khz, bus_bits, name=str(model["name"]))


@functools.lru_cache(maxsize=1024)
def work(problem: Problem) -> tuple[int, int]:
    """Counts what a Problem asks for at least.

    Args:
        problem: a convolution or a graph.

    Returns:
        Floating-point operations of the direct method, two a multiply-add, padding counted: of a graph those of its
        floating-point convolutions and matrix products, so that Winograd and Fourier transforms may pass the peak. And
        bytes: each operand once, an output that is added to twice; of a convolution's input only the rows and columns
        that its filter touches; of a graph nothing that stays inside it.
    """
    if isinstance(problem, ConvolutionProblem):
        flops = problem.flops
    else:
        flops = sum(convolution.flops for convolution in problem.convolutions)
    if isinstance(problem, GraphProblem):
        flops += _matmul_flops(problem)
    moved = 0
    for name in problem.operands:
        elements = math.prod(problem.shape_of(name))
        if isinstance(problem, ConvolutionProblem) and name == "x":
            elements = _touched(problem)
        times = 2 if problem.accumulate and name in problem.outputs else 1
        moved += times * elements * OPERAND_DTYPES[problem.dtype_of(name)].itemsize
    return flops, moved


def _touched(problem: ConvolutionProblem) -> int:
    """Counts the elements of x that the filter meets: a 1x1 filter of stride 2 meets a quarter."""
    count = math.prod(problem.x_shape[:2])
    for size, taps, outputs, before, stride, dilation in zip(
        problem.x_shape[2:],
        problem.w_shape[2:],
        problem.y_shape[2:],
        problem.padding_before,
        problem.stride,
        problem.dilation,
        strict=True,
    ):
        met = np.zeros(size, bool)
        places = np.arange(outputs) * stride - before
        for tap in range(taps):
            at = places + tap * dilation
            met[at[(at >= 0) & (at < size)]] = True
        count *= int(met.sum())
    return count


def _matmul_flops(problem: GraphProblem) -> int:
    products = [operation for operation in problem.operations if operation.method == "matmul"]
    if not products:
        return 0
    _, tensors = problem.graph()
    flops = 0
    for operation in products:
        a, b = (tensors[operation.get(argument).name].shape for argument in "ab")
        batch = math.prod(max(left, right) for left, right in zip(a[:-2], b[:-2], strict=True))
        flops += 2 * batch * a[-2] * a[-1] * b[-1]
    return flops
