"""Threads and streams on the GPU: eight threads with two streams each, what they share, and what they leave behind.

Choices are shared by all threads; plans and handles belong to one.
"""

import ctypes
import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import to_numpy

import flcuda
from flcuda import device as devices
from flcuda.cudnn.resources import handle
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem
from flcuda.ops import convolution as op

ROOT = Path(__file__).parents[2]
CUDA = devices.Device("cuda", 0)
THREADS = 8
LINES = ("n4 c16 14x14 k32 3x3 p1", "n3 c8 15x13 k8 5x3 p2x1 s2")
PROBLEMS = [
    ConvolutionProblem.parse(f"{direction} {line} {word}")
    for line in LINES
    for word in ("float32 nchw", "float16 nhwc")
    for direction in DIRECTIONS
]
TOLERANCE = {"float32": 2e-5, "float16": 4e-3}


def run(problem: ConvolutionProblem, first: Any, second: Any, out: Any) -> Any:
    """Calls the op with a Problem's geometry."""
    pads = tuple(zip(problem.padding_before, problem.padding_after, strict=True))
    geometry = op.convolution(problem.stride, pads, problem.dilation, problem.groups, problem.math)
    if problem.direction == "forward":
        return geometry.forward(first, second, out=out)
    return getattr(geometry, problem.direction)(first, second, out.shape, out=out)


def in_threads(work: Callable[[int], None], count: int = THREADS) -> None:
    """Runs work(number) in threads of which all have begun before one goes on; raises the first error."""
    begin = threading.Barrier(count, timeout=120)
    errors: list[BaseException] = []

    def body(number: int) -> None:
        try:
            begin.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.fixture
def inputs() -> list[tuple[Any, Any]]:
    """Of each Problem; read by all threads."""
    made = []
    for number, problem in enumerate(PROBLEMS):
        arrays = problem.random_arrays(number, "cuda")
        made.append(tuple(arrays[name] for name in problem.inputs))
    devices.synchronize(CUDA)
    return made


def new_output(problem: ConvolutionProblem) -> Any:
    out = problem.empty(problem.outputs[0], CUDA)
    out[...] = np.nan
    return out


def serial(inputs: list[tuple[Any, Any]]) -> list[np.ndarray]:
    return [
        to_numpy(run(problem, *arrays, new_output(problem))) for problem, arrays in zip(PROBLEMS, inputs, strict=True)
    ]


def address_of_handle() -> int:
    return int(ctypes.cast(handle()._as_parameter_, ctypes.c_void_p).value or 0)


@pytest.mark.parametrize("changes", [{"deterministic": True}, {}], ids=["deterministic", "default"])
def test_eight_threads_with_two_streams_give_the_serial_results(
    changes: dict[str, Any], inputs: list[tuple[Any, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    cupy = devices.cupy()
    with flcuda.policy(**changes):
        expected = serial(inputs)
    devices.synchronize(CUDA)
    caplog.clear()

    def work(number: int) -> None:
        order = np.random.default_rng(number).permutation(len(PROBLEMS) * 3) % len(PROBLEMS)
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        results: list[tuple[int, Any]] = []
        # A new thread has the default policy.
        with flcuda.policy(**changes):
            for step, place in enumerate(order):
                stream = streams[step % 2]
                with stream:
                    out = new_output(PROBLEMS[place])
                    run(PROBLEMS[place], *inputs[place], out)
                results.append((place, out))
            for stream in streams:
                stream.synchronize()
        for place, out in results:
            problem, found, wanted = PROBLEMS[place], to_numpy(out), expected[place]
            if changes:
                np.testing.assert_array_equal(found, wanted, err_msg=str(problem))
            else:
                error = np.abs(found.astype(np.float64) - wanted.astype(np.float64)).max()
                scale = np.abs(wanted.astype(np.float64)).max()
                assert error <= TOLERANCE[problem.precision] * scale, f"{problem}: {error} of {scale}"

    with caplog.at_level(logging.INFO, "flcuda.finder"):
        in_threads(work)
    assert not [record for record in caplog.records if "searching for" in record.getMessage()], "choices are shared"


def test_all_threads_that_miss_at_once_search_once(
    inputs: list[tuple[Any, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    def work(number: int) -> None:
        place = number % 2
        run(PROBLEMS[place], *inputs[place], new_output(PROBLEMS[place]))
        devices.cupy().cuda.get_current_stream().synchronize()

    with caplog.at_level(logging.INFO, "flcuda.finder"):
        in_threads(work)
    searched = [record for record in caplog.records if "searching for" in record.getMessage()]
    assert len(searched) == 2


def test_plans_and_handles_are_not_shared_and_go_with_their_thread(inputs: list[tuple[Any, Any]]) -> None:
    serial(inputs)
    lock = threading.Lock()
    plans: list[weakref.ref[Any]] = []
    handles: list[int] = []
    alive = threading.Barrier(THREADS, timeout=120)

    def work(number: int) -> None:
        run(PROBLEMS[number], *inputs[number], new_output(PROBLEMS[number]))
        run(PROBLEMS[0], *inputs[0], new_output(PROBLEMS[0]))
        devices.cupy().cuda.get_current_stream().synchronize()
        with lock:
            plans.extend(weakref.ref(call.plan) for call in op._remembered.mine.calls.values())
            handles.append(address_of_handle())
        # All are there at once, so that no address can be used twice.
        alive.wait()
        with lock:
            made = [plan() for plan in plans]
            assert None not in made
            assert len({id(plan) for plan in made}) == len(made)
        alive.wait()

    before = len(op._threads)
    in_threads(work)
    assert len(plans) == 2 * THREADS - 1
    assert len({*handles, address_of_handle()}) == THREADS + 1
    gc.collect()
    assert [plan for plan in plans if plan() is not None] == []
    assert len(op._threads) == before


def test_a_layer_in_eight_threads(inputs: list[tuple[Any, Any]]) -> None:
    """One layer, inputs of two sizes in turn, forward and backward: a thread's plans and tables are its own."""
    from flcuda import nn
    from flcuda.autograd import Tensor

    cupy = devices.cupy()
    layer = nn.Conv2D(16, 8, 3, padding=1, precision="float16", device="cuda", seed=1)
    weight, bias = layer.weight.data, layer.bias.data
    rng = np.random.default_rng(5)
    xs = []
    for shape in ((4, 16, 14, 14), (2, 16, 9, 14)):
        x = devices.empty(shape, "float16", device=CUDA, layout="nhwc")
        x[...] = cupy.asarray(rng.standard_normal(shape).astype(np.float16))
        xs.append(x)
    geometry = op.convolution(padding=1)
    expected = [
        geometry.forward(to_numpy(x).astype(np.float64), to_numpy(weight).astype(np.float64))
        + to_numpy(bias).astype(np.float64)[:, None, None]
        for x in xs
    ]
    for x in xs:
        layer(x)
    devices.synchronize(CUDA)

    def work(number: int) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for step in range(10):
                place = (number + step) % 2
                x = Tensor(xs[place], requires_grad=True)
                y = layer(x)
                found = to_numpy(y.data).astype(np.float64)
                assert np.abs(found - expected[place]).max() <= 4e-3 * np.abs(expected[place]).max()
            stream.synchronize()

    in_threads(work)


# --- memory of the host -----------------------------------------------------------------------------------------------

MANY_SHAPES = """
import sys
import flcuda
from flcuda import device as devices
from flcuda import nn
from flcuda.autograd import no_grad
from flcuda.ops import convolution as op

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS:"))

layer = nn.Conv2D(8, 8, 3, padding=1, bias=False, precision=sys.argv[1], device="cuda", seed=0)
word = nn.precision_of(sys.argv[1])
seen = []
with flcuda.policy(mode="heuristic"), no_grad():
    for number in range(2000):
        x = devices.empty((1, 8, 3 + number // 40, 3 + number % 40), word.dtype, device="cuda", layout=word.layout)
        x[...] = 1
        layer(x)
        if number in (499, 1249, 1999):
            devices.synchronize(devices.Device("cuda", 0))
            seen.append(resident())
print(*seen, len(op._remembered.mine.calls))
"""


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_two_thousand_shapes_leave_the_hosts_memory_flat(precision: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "FLCUDA_CHOICES": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", MANY_SHAPES, precision], capture_output=True, text=True, env=environment, timeout=550
    )
    assert done.returncode == 0, done.stderr
    early, middle, late, remembered = map(int, done.stdout.split())
    assert remembered == op.REMEMBERED_BY_LAYER
    # 1500 choices in memory, some 3 KiB each, and what allocators and cuDNN leave: the known leak happens once.
    assert late - early < 64 << 10, f"{early}, {middle}, {late} KiB"
    assert late - middle < 32 << 10, f"{early}, {middle}, {late} KiB"
