"""Descriptors set and read back through the real library, and its output dimensions against our own; no GPU."""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from ctypes import byref, c_int
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flcuda import cudnn, device
from flcuda.cudnn import bindings, library, resources
from flcuda.errors import CudnnError, CudnnNotSupportedError
from flcuda.finder.problem import output_shape

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not any(place.usable for place in library.search_places()), reason="cuDNN is not installed"
)

DTYPES = st.sampled_from(sorted(resources._DTYPES))
SIZES = st.integers(1, 9)


@st.composite
def strided(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A shape and strides without overlap: any order of the dimensions, with gaps."""
    shape = draw(st.lists(SIZES, min_size=3, max_size=8).map(tuple))
    order = draw(st.permutations(range(len(shape))))
    strides = [0] * len(shape)
    step = 1
    for dim in order:
        strides[dim] = step
        step *= shape[dim] + draw(st.integers(0, 2))
    return shape, tuple(strides)


@settings(deadline=None)
@given(strided(), DTYPES)
def test_tensor_descriptor_reads_back(array: tuple[tuple[int, ...], tuple[int, ...]], dtype: str) -> None:
    shape, strides = array
    code, rank, dims, steps = c_int(), c_int(), (c_int * 8)(), (c_int * 8)()
    with resources.TensorDescriptor(shape, strides, dtype) as descriptor:
        cudnn.cudnnGetTensorNdDescriptor(descriptor, 8, byref(code), byref(rank), dims, steps)
    assert rank.value == len(shape)
    assert tuple(dims[: rank.value]) == shape
    assert tuple(steps[: rank.value]) == strides
    assert code.value == resources.cudnn_dtype(dtype)


@settings(deadline=None)
@given(st.lists(SIZES, min_size=4, max_size=5).map(tuple), st.sampled_from(device.LAYOUTS), DTYPES)
def test_tensor_descriptor_of_an_array(shape: tuple[int, ...], layout: str, dtype: str) -> None:
    """A descriptor's size in bytes is the array's own: strides went in as elements, in the right order."""
    a = device.empty(shape, dtype, device="cpu", layout=layout)
    with resources.TensorDescriptor(a.shape, device.element_strides(a), a.dtype) as descriptor:
        nbytes = np.zeros(1, np.uint64)
        cudnn.cudnnGetTensorSizeInBytes(descriptor, nbytes)
    assert nbytes[0] == a.nbytes


@settings(deadline=None)
@given(st.lists(SIZES, min_size=3, max_size=5).map(tuple), st.sampled_from(device.LAYOUTS), DTYPES)
def test_filter_descriptor_reads_back(shape: tuple[int, ...], layout: str, dtype: str) -> None:
    code, order, rank, dims = c_int(), c_int(), c_int(), (c_int * 8)()
    with resources.FilterDescriptor(shape, dtype, layout) as descriptor:
        cudnn.cudnnGetFilterNdDescriptor(descriptor, 8, byref(code), byref(order), byref(rank), dims)
    assert rank.value == len(shape)
    assert tuple(dims[: rank.value]) == shape
    assert code.value == resources.cudnn_dtype(dtype)
    assert order.value == {"nchw": cudnn.CUDNN_TENSOR_NCHW, "nhwc": cudnn.CUDNN_TENSOR_NHWC}[layout]


@settings(deadline=None)
@given(
    st.integers(2, 3).flatmap(
        lambda rank: st.tuples(
            *(st.lists(st.integers(low, 6), min_size=rank, max_size=rank).map(tuple) for low in (0, 1, 1))
        )
    ),
    st.integers(1, 64),
    st.sampled_from(["float32", "float64", "float16"]),
    st.sampled_from(sorted(resources.MATH_TYPES)),
)
def test_convolution_descriptor_reads_back(
    geometry: tuple[tuple[int, ...], ...], groups: int, compute: str, math: str
) -> None:
    padding, stride, dilation = geometry
    rank, mode, code, count, math_type = c_int(), c_int(), c_int(), c_int(), c_int()
    pads, steps, spread = (c_int * 8)(), (c_int * 8)(), (c_int * 8)()
    with resources.ConvolutionDescriptor(padding, stride, dilation, groups, compute, math) as descriptor:
        cudnn.cudnnGetConvolutionNdDescriptor(descriptor, 6, byref(rank), pads, steps, spread, byref(mode), byref(code))
        cudnn.cudnnGetConvolutionGroupCount(descriptor, byref(count))
        cudnn.cudnnGetConvolutionMathType(descriptor, byref(math_type))
    read = tuple(tuple(values[: rank.value]) for values in (pads, steps, spread))
    assert read == geometry
    assert mode.value == cudnn.CUDNN_CROSS_CORRELATION
    assert code.value == resources.cudnn_dtype(compute)
    assert count.value == groups
    assert math_type.value == resources.MATH_TYPES[math]


def output_of_cudnn(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> tuple[int, ...]:
    dims = (c_int * len(x_shape))()
    with (
        resources.TensorDescriptor(x_shape, device.contiguous_strides(x_shape), "float32") as x,
        resources.FilterDescriptor(w_shape, "float32") as w,
        resources.ConvolutionDescriptor(padding, stride, dilation, groups, "float32", "fma") as convolution,
    ):
        cudnn.cudnnGetConvolutionNdForwardOutputDim(convolution, x, w, len(x_shape), dims)
    return tuple(dims)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Any, ...]:
    rank = draw(st.integers(2, 3))
    groups = draw(st.integers(1, 4))
    each = lambda low, high: tuple(draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank)))  # noqa: E731
    kernel, padding, stride, dilation = each(1, 5), each(0, 4), each(1, 4), each(1, 3)
    spread = [(size - 1) * step + 1 for size, step in zip(kernel, dilation, strict=True)]
    least = [max(1, size - 2 * pad) for size, pad in zip(spread, padding, strict=True)]
    size = tuple(low + draw(st.integers(0, 20)) for low in least)
    per_group, filters = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    x_shape = (draw(SIZES), per_group * groups, *size)
    return x_shape, (filters * groups, per_group, *kernel), padding, stride, dilation, groups


@settings(max_examples=600, deadline=None)
@given(convolutions())
def test_output_dimensions_are_our_own(case: tuple[Any, ...]) -> None:
    x_shape, w_shape, padding, stride, dilation, groups = case
    assert output_of_cudnn(*case) == output_shape(x_shape, w_shape, padding, padding, stride, dilation, groups)


def test_key_collision_of_two_dilations() -> None:
    """Equal output sizes of different convolutions: what a key without the dilation would take for one."""
    for dilation in (1, 2):
        case = (1, 1, 8, 8), (1, 1, 3, 3), (1, 1), (4, 4), (dilation, dilation), 1
        assert output_of_cudnn(*case) == (1, 1, 2, 2)


def test_what_cudnn_takes_silently_is_refused_by_our_own_shape_function() -> None:
    """Five filters in two groups: cuDNN answers success and 5 channels."""
    case = (1, 4, 8, 8), (5, 2, 3, 3), (1, 1), (1, 1), (1, 1), 2
    assert output_of_cudnn(*case) == (1, 5, 8, 8)
    x_shape, w_shape, padding, stride, dilation, groups = case
    with pytest.raises(ValueError, match="group"):
        output_shape(x_shape, w_shape, padding, padding, stride, dilation, groups)


@pytest.mark.parametrize(
    "case",
    [
        ((1, 1, 3, 3), (1, 1, 5, 5), (0, 0), (1, 1), (1, 1), 1),
        ((1, 1, 5, 5), (1, 1, 3, 3), (0, 0), (1, 1), (3, 1), 1),
        ((1, 6, 8, 8), (4, 2, 3, 3), (1, 1), (1, 1), (1, 1), 2),
    ],
)
def test_both_refuse(case: tuple[Any, ...]) -> None:
    with pytest.raises(CudnnError) as caught:
        output_of_cudnn(*case)
    assert caught.value.status == 2000
    x_shape, w_shape, padding, stride, dilation, groups = case
    with pytest.raises(ValueError, match=r"shape|channel|kernel"):
        output_shape(x_shape, w_shape, padding, padding, stride, dilation, groups)


# --- life cycle on the real library ---------------------------------------------------------------------------------


def make() -> list[resources.Owner]:
    return [
        resources.TensorDescriptor((2, 3, 5, 7), (105, 35, 7, 1), "bfloat16"),
        resources.FilterDescriptor((4, 3, 3, 3), "float16", "nhwc"),
        resources.ConvolutionDescriptor((1, 1), (1, 1), (1, 1), 1, "float32", "tensor_op"),
    ]


def test_double_close_and_use_after_close() -> None:
    nbytes = np.zeros(1, np.uint64)
    for owner in make():
        owner.close()
        owner.close()
    with pytest.raises(ValueError, match="this TensorDescriptor is closed"):
        cudnn.cudnnGetTensorSizeInBytes(make_closed(), nbytes)


def make_closed() -> resources.Owner:
    owner = make()[0]
    owner.close()
    return owner


def test_wrong_descriptor_is_a_type_error() -> None:
    nbytes = np.zeros(1, np.uint64)
    _, w, _ = make()
    with pytest.raises(TypeError, match=r"cudnnGetTensorSizeInBytes: tensorDesc: "):
        cudnn.cudnnGetTensorSizeInBytes(w, nbytes)


def test_every_create_has_its_destroy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands from several threads, by close and by garbage: no crash, and the counts balance."""
    calls: list[str] = []

    def counted(name: str) -> Any:
        function = getattr(bindings, name)

        def call(pointer: Any) -> None:
            calls.append(name)
            function(pointer)

        return call

    kinds = ("Tensor", "Filter", "Convolution")
    for name in [f"cudnn{verb}{kind}Descriptor" for verb in ("Create", "Destroy") for kind in kinds]:
        monkeypatch.setattr(bindings, name, counted(name))

    def work() -> None:
        for number in range(300):
            owners = make()
            if number % 2:
                owners[number % 3].close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    for kind in kinds:
        assert calls.count(f"cudnnCreate{kind}Descriptor") == 1200
        assert calls.count(f"cudnnDestroy{kind}Descriptor") == 1200


EXITS = {
    "kept until the end": "kept = make()",
    "in a cycle": "cycle = make(); cycle.append(cycle)",
    "closed at exit": "import atexit; kept = make(); atexit.register(lambda: [owner.close() for owner in kept])",
    "in a module that goes late": "import sys; sys.flcuda_kept = make()",
    "of a thread that is still running": (
        "import threading, time\n"
        "def work():\n    kept = make()\n    ready.set()\n    time.sleep(30)\n"
        "ready = threading.Event(); threading.Thread(target=work, daemon=True).start(); ready.wait()"
    ),
    "after an uncaught error is handled": "kept = make()\ntry:\n    make()[9]\nexcept IndexError:\n    pass",
    "with a failed handle": (
        "from flcuda.errors import FlcudaError\nkept = make()\n"
        "try:\n    kept.append(resources.handle())\nexcept FlcudaError:\n    pass"
    ),
    "with CuPy imported": "import cupy; kept = make()",
}


@pytest.mark.parametrize("how", EXITS)
def test_interpreter_exit_is_clean(how: str) -> None:
    if "CuPy" in how:
        pytest.importorskip("cupy")
    code = f"from flcuda.cudnn import resources\nfrom test_descriptors import make\n{EXITS[how]}\n"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_legacy_limits_are_those_that_cudnn_has() -> None:
    """What our own message stands for: cuDNN refuses the same, without a word."""
    with resources.TensorDescriptor((1, 1, 1, 1), (1, 1, 1, 1), "float16") as descriptor:
        shape = (4096, 1024, 32, 32)
        with pytest.raises(CudnnNotSupportedError) as caught:
            cudnn.cudnnSetTensorNdDescriptor(
                descriptor, cudnn.CUDNN_DATA_HALF, 4, shape, device.contiguous_strides(shape)
            )
        assert caught.value.text == ""
        with pytest.raises(CudnnNotSupportedError):
            cudnn.cudnnSetTensorNdDescriptor(descriptor, cudnn.CUDNN_DATA_HALF, 9, (1,) * 9, (1,) * 9)


def test_a_folding_has_one_factor_for_each_spatial_dimension() -> None:
    descriptor = cudnn.cudnnTensorTransformDescriptor_t()
    cudnn.cudnnCreateTensorTransformDescriptor(byref(descriptor))
    try:
        words = (cudnn.CUDNN_TENSOR_NHWC, [0] * 4, [0] * 4)
        cudnn.cudnnSetTensorTransformDescriptor(descriptor, 4, *words, [2, 3], cudnn.CUDNN_TRANSFORM_FOLD)
        fold = np.zeros(4, np.uint32)
        layout, direction = c_int(), c_int()
        before, after = np.zeros(4, np.int32), np.zeros(4, np.int32)
        cudnn.cudnnGetTensorTransformDescriptor(descriptor, 4, byref(layout), before, after, fold, byref(direction))
        assert fold[:2].tolist() == [2, 3]
        with pytest.raises(ValueError, match="foldA: has 1 elements where nbDims is 4"):
            cudnn.cudnnSetTensorTransformDescriptor(descriptor, 4, *words, [2], cudnn.CUDNN_TRANSFORM_FOLD)
    finally:
        cudnn.cudnnDestroyTensorTransformDescriptor(descriptor)
