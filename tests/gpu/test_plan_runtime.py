"""A Plan at run time on the GPU: streams, threads, several outputs, checks of memory, cuDNN's log, NVTX ranges."""

import ctypes
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import to_numpy

import flcuda
from flcuda import cudnn
from flcuda import device as devices
from flcuda.cudnn.resources import handle
from flcuda.errors import CudnnError, FlcudaError
from flcuda.finder.plan import Plan
from flcuda.finder.problem import ConvolutionProblem
from flcuda.ops.convolution import convolution

ROOT = Path(__file__).parents[2]
PROBLEM = ConvolutionProblem.parse("forward n4 c16 14x14 k32 3x3 p1 float16 nhwc")
CUDA = devices.Device("cuda", 0)


@pytest.fixture
def plan() -> Plan:
    """Of the graph API, unmeasured."""
    report = flcuda.find(PROBLEM, device="cuda", sources=["graph"], policy=flcuda.Policy(mode="heuristic"))
    return report.rows[0].plan()


def operands(seed: int = 0) -> tuple[Any, Any, Any]:
    arrays = PROBLEM.random_arrays(seed, "cuda")
    return arrays["x"], arrays["w"], arrays["out"]


def right(x: Any, w: Any, y: Any) -> bool:
    expected = convolution(padding=1).forward(to_numpy(x).astype(np.float64), to_numpy(w).astype(np.float64))
    error = np.abs(to_numpy(y).astype(np.float64) - expected).max()
    return bool(error <= 4e-3 * np.abs(expected).max())


# --- the fast path ----------------------------------------------------------------------------------------------------


def test_many_arrays_on_the_fast_path(plan: Plan, only_fast: Callable[[Plan], None]) -> None:
    """More than there are variant packs, in turn, and outputs that the Plan makes."""
    x, w, y = operands()
    plan(x, w, out=y)
    only_fast(plan)
    sets = [operands(seed) for seed in range(70)]
    for _ in range(2):
        for x, w, y in sets:
            y[...] = np.nan
            plan(x, w, out=y)
    for x, w, y in sets:
        assert right(x, w, y)
        new = plan(x, w)
        assert right(x, w, new)
        assert devices.element_strides(new) == PROBLEM.strides_of("y")
        assert new.dtype == np.float16


def test_the_stream_is_followed_on_the_fast_path(plan: Plan, only_fast: Callable[[Plan], None]) -> None:
    """While one stream is held up, a call on it waits, and a call on another one does not."""
    cupy = devices.cupy()
    x, w, y = operands()
    other = operands(1)
    busy, free = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    plan(x, w, out=y)
    devices.synchronize(CUDA)
    # A stream's first call gets memory from the driver, which might wait for all streams.
    for stream, arrays in ((busy, (x, w, y)), (free, other)):
        with stream:
            plan(*arrays[:2], out=arrays[2])
            stream.synchronize()
    only_fast(plan)
    y[...] = np.nan
    other[2][...] = np.nan
    devices.synchronize(CUDA)
    released = threading.Event()
    with busy:
        # The host function holds the stream up until it is released.
        busy.launch_host_func(lambda _: released.wait(20), None)
        plan(x, w, out=y)
        assert handle().stream == busy.ptr
    with free:
        plan(*other[:2], out=other[2])
        assert handle().stream == free.ptr
    free.synchronize()
    assert not busy.done
    assert right(*other)
    released.set()
    busy.synchronize()
    assert right(x, w, y)
    assert handle().stream == cupy.cuda.get_current_stream().ptr


def test_wrong_operands_are_refused_after_good_ones(plan: Plan) -> None:
    cupy = devices.cupy()
    x, w, y = operands()
    plan(x, w, out=y)
    before = to_numpy(y).copy()
    small = x[:2]
    for inputs, out, error, words in (
        ((small, w), y, ValueError, "x has shape"),
        ((x, w), y[:, :16], ValueError, "out has shape"),
        ((x.astype(np.float32), w), y, TypeError, "x has dtype float32"),
        ((cupy.ascontiguousarray(x), w), y, ValueError, "x has strides"),
        ((x, to_numpy(w)), y, ValueError, "w is on cpu"),
    ):
        with pytest.raises(error, match=words):
            plan(*inputs, out=out)
    reshaped = x.view()
    for _ in range(3):
        plan(reshaped, w, out=y)
    reshaped.shape = (1, *x.shape)
    with pytest.raises(ValueError, match="x has shape"):
        plan(reshaped, w, out=y)
    np.testing.assert_array_equal(to_numpy(y), before)


def test_another_thread_is_refused(plan: Plan) -> None:
    x, w, y = operands()
    plan(x, w, out=y)
    errors: list[Exception] = []

    def call() -> None:
        try:
            plan(x, w, out=y)
        except FlcudaError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert [str(error) for error in errors if "was made on another thread" in str(error)]


def test_another_current_device_is_no_obstacle(plan: Plan) -> None:
    cupy = devices.cupy()
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    x, w, y = operands()
    plan(x, w, out=y)
    y[...] = np.nan
    devices.synchronize(CUDA)
    with cupy.cuda.Device(1):
        plan(x, w, out=y)
        assert cupy.cuda.runtime.getDevice() == 1
    devices.synchronize(CUDA)
    assert right(x, w, y)


def test_captured_on_the_fast_path(plan: Plan, only_fast: Callable[[Plan], None]) -> None:
    cupy = devices.cupy()
    x, w, y = operands()
    plan(x, w, out=y)
    only_fast(plan)
    stream = cupy.cuda.Stream(non_blocking=True)
    devices.synchronize(CUDA)
    with stream:
        plan(x, w, out=y)
        stream.begin_capture()
        plan(x, w, out=y)
        captured = stream.end_capture()
        y[...] = np.nan
        captured.launch(stream)
        stream.synchronize()
    assert right(x, w, y)


# --- several outputs --------------------------------------------------------------------------------------------------


def test_several_outputs() -> None:
    """A convolution with bias and SiLU whose sum before the activation is an output too."""
    graph_problem = pytest.importorskip("flcuda.finder.graph_problem")
    ref = graph_problem.Ref
    shapes = {"x": (4, 16, 14, 14), "w": (32, 16, 3, 3), "b": (1, 32, 1, 1), "z": (4, 32, 14, 14), "y": (4, 32, 14, 14)}
    tensors = {
        name: graph_problem.GraphTensor(name, shape, devices.contiguous_strides(shape, "nhwc"), "float16")
        for name, shape in shapes.items()
    }
    steps = (
        graph_problem.Operation(
            "convolution_forward", (("x", ref("x")), ("w", ref("w")), ("padding", 1)), ("sum_of_products",)
        ),
        graph_problem.Operation("pointwise", (("mode", "add"), ("x", ref("sum_of_products")), ("b", ref("b"))), ("z",)),
        graph_problem.Operation("pointwise", (("mode", "swish_fwd"), ("x", ref("z"))), ("y",)),
    )
    problem = graph_problem.GraphProblem(
        tensors=tuple(tensors[name] for name in "xwb"),
        operations=steps,
        results=tuple(tensors[name] for name in "zy"),
        compute="float32",
        math="tensor_op",
    )
    assert (problem.inputs, problem.outputs) == (("x", "w", "b"), ("z", "y"))
    plan = flcuda.plan(problem, device="cuda", policy=flcuda.Policy(mode="heuristic"))
    given = problem.random_arrays(0, "cuda")
    z, y = given.pop("out")
    out = (z, y)
    for _ in range(2):
        z[...] = np.nan
        y[...] = np.nan
        assert plan(given["x"], given["w"], given["b"], out=out) is out
    wide = {name: to_numpy(array).astype(np.float64) for name, array in given.items()}
    expected = convolution(padding=1).forward(wide["x"], wide["w"]) + wide["b"]
    for found, value in ((z, expected), (y, expected / (1 + np.exp(-expected)))):
        error = np.abs(to_numpy(found).astype(np.float64) - value).max()
        assert error <= 4e-3 * np.abs(value).max()
    made = plan(**given)
    np.testing.assert_array_equal(to_numpy(made[0]), to_numpy(z))
    with pytest.raises(TypeError, match="out must be a tuple of the 2 outputs"):
        plan(**given, out=z)


# --- FLCUDA_CHECK=1 ---------------------------------------------------------------------------------------------------

CHECKED = """
import numpy as np, sys
import flcuda
from flcuda import device as devices
from flcuda.cudnn.graph import Graph, _CheckedPlan
from flcuda.cudnn.resources import handle

cupy = devices.cupy()
g = Graph()
x = g.tensor((8, 64, 28, 28), "float16", layout="nhwc", name="x")
w = g.tensor((64, 64, 3, 3), "float16", layout="nhwc", name="w")
y = g.output(g.convolution_forward(x, w, padding=1), name="y")
plan = g.build(handle()).configurations()[0].plan()
assert isinstance(plan, _CheckedPlan)
size = lambda tensor: tensor.extent // 2

def raw(nbytes):
    # No part of a pool's chunk: the driver knows where it ends.
    return cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)

arrays = {t.uid: cupy.ndarray((size(t),), np.float16, raw(t.extent)) for t in (x, w, y)}
for array in arrays.values():
    array[...] = 1
workspace = cupy.empty(max(1, plan.workspace), np.uint8)
plan.execute(handle(), arrays, workspace)
addresses = {uid: array.data.ptr for uid, array in arrays.items()}
plan.execute(handle(), addresses, workspace.data.ptr if plan.workspace else 0)
cupy.cuda.Device().synchronize()
print("good")

def refused(call):
    try:
        call()
    except ValueError as error:
        print(error)
    else:
        print("NOT REFUSED")

half = raw(x.extent // 2)
small = cupy.ndarray((size(x) // 2,), np.float16, half)
refused(lambda: plan.execute(handle(), {**arrays, x.uid: small}, workspace))
refused(lambda: plan.execute(handle(), {**addresses, y.uid: addresses[x.uid]}, workspace))
refused(lambda: plan.execute(handle(), {**addresses, x.uid: addresses[x.uid] + 2}, workspace))
refused(lambda: plan.execute(handle(), {**addresses, x.uid: 16}, workspace))
refused(lambda: plan.execute(handle(), {**addresses, x.uid: addresses[x.uid] + x.extent - 256}, workspace))
restored = type(plan).from_json(plan.to_json(), handle())
refused(lambda: restored.execute(handle(), {**arrays, x.uid: small}, workspace))

problem = flcuda.Problem.parse("forward n4 c16 14x14 k32 3x3 p1 float16 nhwc")
report = flcuda.find(problem, device="cuda", sources=["graph"], policy=flcuda.Policy(mode="heuristic"))
found = report.rows[0].plan()
given = problem.random_arrays(0, "cuda")
out = given.pop("out")
found(**given, out=out)
print("finder's plans run")
"""


def run_script(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with variables of the environment; an empty one is taken out."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", **variables}
    environment = {name: value for name, value in environment.items() if value}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300)


def test_checks_find_what_is_too_small() -> None:
    done = run_script(CHECKED, FLCUDA_CHECK="1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "NOT REFUSED" not in lines
    assert lines[0] == "good"
    needed = 8 * 64 * 28 * 28 * 2
    assert f"tensor 'x' (8, 64, 28, 28) float16 (uid 1) needs {needed} bytes" in lines[1]
    assert f"the array has {needed // 2}" in lines[1]
    assert "is written and overlaps with" in lines[2]
    assert "has to be aligned to 16 bytes" in lines[3]
    assert "is in no memory of CUDA's" in lines[4]
    assert f"(uid 1) needs {needed} bytes at" in lines[5]
    assert "the allocation that holds it has" in lines[5]
    assert f"needs {needed} bytes" in lines[6]
    assert lines[7] == "finder's plans run"


# --- cuDNN's log ------------------------------------------------------------------------------------------------------


def test_log_to_python(plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    x, w, y = operands()
    try:
        with caplog.at_level(logging.DEBUG, "flcuda.cudnn"):
            cudnn.log_to_python("INFO")
            plan(x, w, out=y)
            functions = {record.cudnn_function for record in caplog.records}  # type: ignore[attr-defined]
            assert "cudnnBackendExecute" in functions
            caplog.clear()
            cudnn.log_to_python("WARNING")
            descriptor = cudnn.cudnnTensorDescriptor_t()
            cudnn.cudnnCreateTensorDescriptor(ctypes.byref(descriptor))
            with pytest.raises(CudnnError):
                cudnn.cudnnSetTensor4dDescriptor(
                    descriptor, cudnn.CUDNN_TENSOR_NCHW, cudnn.CUDNN_DATA_FLOAT, -1, 1, 1, 1
                )
            cudnn.cudnnDestroyTensorDescriptor(descriptor)
            assert all(record.levelno >= logging.WARNING for record in caplog.records)
    finally:
        cudnn.log_to_python(None)
    devices.synchronize(CUDA)
    assert right(x, w, y)


# --- profilers' ranges ------------------------------------------------------------------------------------------------

RANGED = """
import flcuda, sys
from flcuda.finder.plan import _Ranged
problem = flcuda.Problem.parse("forward n4 c16 14x14 k32 3x3 p1 float16 nhwc")
report = flcuda.find(problem, device="cuda", sources=["graph"], policy=flcuda.Policy(mode="heuristic"))
plan = report.rows[0].plan()
arrays = problem.random_arrays(0, "cuda")
y = plan(**arrays)
plan(arrays["x"], arrays["w"], out=y)
print(isinstance(plan._runner, _Ranged), bool((y == y).all()))
"""


@pytest.mark.parametrize("attached", [False, True])
def test_ranges_do_not_break_a_run(attached: bool, tmp_path: Path) -> None:
    """NVTX is given a library that is not there: it goes on without one."""
    others = ("CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE")
    library = str(tmp_path / "libnothing.so") if attached else ""
    done = run_script(RANGED, NVTX_INJECTION64_PATH=library, **dict.fromkeys(others, ""))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(attached), "True"]
