"""Times PyTorch's convolutions on the operands and by the timer that flcuda's finder uses.

Reads one JSON object from standard input:

    {"problems": [lines of flcuda Problems], "precision": "float32", "benchmark_limit": 0, "device": "cuda",
     "l2": "cold", "warmup": 2, "repeats": 10, "budget_s": 0.3, "total_s": 120}

and prints one JSON object a line, at once, so that what was measured survives the end of the process: first the
settings, then for each problem in turn its times and the seconds of its first call, in which PyTorch searches, or
"error", or "skipped" when `total_s` is used up.

PyTorch is in benchmark mode with the limit that is told (0: every plan), without TF32 unless the precision is tf32.
Whether it asks cuDNN's graph API, as it does by default, or the legacy one is its environment's choice:
TORCH_CUDNN_V8_API_DISABLED=1. It gets flcuda's arrays themselves, as tensors: the same memory with the same strides, as
many sets of operands, so that the second-level cache is as cold. A result is kept until its set comes up again, so that
the results are as many and as cold too; PyTorch's allocator gives their memory from its pool, which costs the host
only. For a gradient the tensor of which PyTorch needs no more than the shape is the one that flcuda would write to.

Run: python bench/peers/torch_convolutions.py < request.json
"""

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from flcuda import device as devices
from flcuda import timing
from flcuda.device import Device
from flcuda.finder import measure
from flcuda.finder.policy import Policy
from flcuda.finder.problem import ConvolutionProblem

LEGACY = "TORCH_CUDNN_V8_API_DISABLED"


def tensor_of(array: Any, strides: tuple[int, ...]) -> torch.Tensor:
    """Gives an array to PyTorch: the same memory with the same strides, also those of dimensions of size 1.

    Args:
        array: NumPy or CuPy.
        strides: in elements, as the Problem has them.
    """
    half = array.dtype.name == "bfloat16"  # which DLPack does not take from NumPy
    tensor = torch.from_dlpack(array.view(np.int16) if half else array)
    if half:
        tensor = tensor.view(torch.bfloat16)
    tensor = tensor.as_strided(array.shape, strides)
    address = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    if tensor.data_ptr() != address:
        raise AssertionError(f"PyTorch copied an operand of shape {array.shape}")
    return tensor


class Convolution:
    """One set of operands as PyTorch takes them, and the call.

    Args:
        problem: what is computed.
        arrays: in the order of its operands.

    Raises:
        ValueError: PyTorch cannot be asked this.
    """

    def __init__(self, problem: ConvolutionProblem, arrays: tuple[Any, ...]) -> None:
        if problem.accumulate:
            raise ValueError("PyTorch does not add to an output")
        if problem.padding_before != problem.padding_after:
            raise ValueError("PyTorch pads alike on both sides")
        tensors = [
            tensor_of(array, problem.strides_of(name)) for name, array in zip(problem.operands, arrays, strict=True)
        ]
        # Of a line PyTorch knows no channels-last form and would copy it; an image of height 1 is the same.
        self.lifted = len(problem.stride) == 1 and problem.layout_of(problem.inputs[0]) == "nhwc"
        self.tensors = [tensor.unsqueeze(2) for tensor in tensors] if self.lifted else tensors
        self.problem = problem

    @property
    def layout(self) -> str:
        """What PyTorch reads off the strides of the first operand: "nchw", "nhwc" or "strided"."""
        first = self.tensors[0]
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        if first.dim() in formats and first.is_contiguous(memory_format=formats[first.dim()]):
            return "nhwc"
        return "nchw" if first.is_contiguous() else "strided"

    def call(self) -> Callable[[], torch.Tensor]:
        """Makes the call; it gives the result, in memory of PyTorch's."""
        problem, (a, b, out) = self.problem, self.tensors
        stride, padding, dilation = (
            ([fill] if self.lifted else []) + list(entries)
            for fill, entries in ((1, problem.stride), (0, problem.padding_before), (1, problem.dilation))
        )
        if problem.direction == "forward":
            functions = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)
            return functools.partial(functions[len(stride) - 1], a, b, None, stride, padding, dilation, problem.groups)
        if problem.direction == "backward_data":
            gradient, x, w, wanted = a, out, b, 0
        else:
            gradient, x, w, wanted = b, a, out, 1
        mask = [place == wanted for place in range(3)]
        zeros = [0] * len(stride)

        def backward() -> torch.Tensor:
            return torch.ops.aten.convolution_backward(
                gradient, x, w, None, stride, padding, dilation, False, zeros, problem.groups, mask
            )[wanted]

        return backward


def measured(problem: ConvolutionProblem, device: Device, request: dict[str, Any]) -> dict[str, Any]:
    """Lets PyTorch search for one problem, then times what it found."""
    sets = measure.operand_sets(problem, device, Policy(l2=request["l2"]))
    convolutions = [Convolution(problem, arrays) for arrays in sets]
    calls = [each.call() for each in convolutions]
    kept: list[torch.Tensor | None] = [None] * len(calls)

    def run(index: int) -> None:
        kept[index] = calls[index]()

    devices.synchronize(device)
    start = time.perf_counter()
    run(0)
    devices.synchronize(device)
    search_s = time.perf_counter() - start
    # Every set once and the first again: from then on the memory of the results is in PyTorch's pool.
    for index in (*range(1, len(calls)), 0):
        run(index)
    runs = [functools.partial(run, index) for index in range(len(calls))]
    times = timing.measure(
        runs, device, warmup=request["warmup"], repeats=request["repeats"], budget_s=request["budget_s"]
    )
    return {
        **{name: getattr(times, name) for name in ("median_ms", "low_ms", "high_ms", "host_us", "queued")},
        "spread_ms": times.spread_ms,
        "search_s": search_s,
        "sets": len(sets),
        "layout": convolutions[0].layout,
    }


@contextlib.contextmanager
def memory_given_back(device: Device) -> Iterator[None]:
    """Gives to the GPU what both allocators hold, so that each problem finds the memory that the one before did."""
    try:
        yield
    finally:
        if device.kind == "cuda":
            torch.cuda.empty_cache()
            devices.cupy().get_default_memory_pool().free_all_blocks()


def configure(request: dict[str, Any], device: Device) -> dict[str, Any]:
    """Sets PyTorch up as it is asked; returns the settings as they are then."""
    tf32 = request["precision"] == "tf32"
    if device.kind == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.benchmark_limit = request["benchmark_limit"]
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        if torch.cuda.current_stream().cuda_stream != devices.current_stream():
            raise AssertionError("the current streams of PyTorch and CuPy are not the same")
    return {
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if device.kind == "cuda" else None,
        "device": str(device),
        "api": "legacy" if os.environ.get(LEGACY) == "1" else "graph",
        "benchmark": torch.backends.cudnn.benchmark,
        "benchmark_limit": request["benchmark_limit"],
        "allow_tf32": tf32,
        "l2": request["l2"],
    }


def say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    request = json.load(sys.stdin)
    start = time.perf_counter()
    device = devices.resolve(request["device"])
    with device.use(), torch.no_grad():
        say({"settings": configure(request, device)})
        for line in request["problems"]:
            answer: dict[str, Any] = {"problem": line}
            if time.perf_counter() - start > request["total_s"]:
                say({**answer, "skipped": f"the {request['total_s']:.0f} s were used up"})
                continue
            with memory_given_back(device):
                try:
                    answer.update(measured(ConvolutionProblem.parse(line), device, request))
                except (ValueError, RuntimeError, MemoryError) as error:
                    answer["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                    if "CUDA error" in str(error):
                        # No later call in this process would work either.
                        say(answer)
                        sys.exit(f"{line}: {error}")
            say(answer)
            told = answer.get("error") or f"{answer['median_ms']:.4f} ms, searched in {answer['search_s']:.2f} s"
            print(f"torch: {line}: {told}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
