"""Calls of every function of cuDNN's graph, ops and cnn headers, in families; see every_function.py.

Each expectation is NumPy's in float64, from the formula that cuDNN documents.
"""

import ctypes
from collections.abc import Callable
from ctypes import byref, c_char, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_uint, c_uint32, c_void_p
from typing import Any

import numpy as np
import pytest
from every_function import Session, close, family
from helpers import numeric_gradient

from flcuda import device
from flcuda.cudnn import library
from flcuda.cudnn.graph import Graph
from flcuda.errors import CudnnNotSupportedError

# Where cuDNN may use the GPU's approximate functions or Winograd's algorithm; what is wrong is wrong by much more.
APPROXIMATE = 1e-3


# --- the library, handles -------------------------------------------------------------------------------------------


def fail_on_purpose() -> None:
    """Makes a call that cuDNN refuses, past the bound functions: those would read the text of the error away."""
    function = library.load().function("cudnnCreateTensorDescriptor")
    function.argtypes = (c_void_p,)
    assert function(None) != 0


@family("""
    cudnnGetVersion cudnnGetMaxDeviceVersion cudnnGetCudartVersion cudnnGetProperty cudnnGetErrorString
    cudnnGetLastErrorString cudnnGraphVersionCheck cudnnOpsVersionCheck cudnnCnnVersionCheck
""")
def versions(s: Session) -> None:
    c = s.c
    numbers = []
    for kind in (c.MAJOR_VERSION, c.MINOR_VERSION, c.PATCH_LEVEL):
        number = c_int(-1)
        c.cudnnGetProperty(kind, byref(number))
        numbers.append(number.value)
    assert c.cudnnGetVersion() == numbers[0] * 10000 + numbers[1] * 100 + numbers[2]
    assert c.cudnnGetCudartVersion() // 1000 in (12, 13)
    assert c.cudnnGetMaxDeviceVersion() >= 900
    assert c.cudnnGetErrorString(c.CUDNN_STATUS_BAD_PARAM) == b"CUDNN_STATUS_BAD_PARAM"
    c.cudnnGraphVersionCheck()
    c.cudnnOpsVersionCheck()
    c.cudnnCnnVersionCheck()
    text = (c_char * 4096)()
    fail_on_purpose()
    c.cudnnGetLastErrorString(text, len(text))
    assert b"tensorDesc" in text.value
    c.cudnnGetLastErrorString(text, len(text))
    assert text.value == b""


@family("cudnnCreate cudnnDestroy cudnnSetStream cudnnGetStream cudnnQueryRuntimeError")
def handles(s: Session) -> None:
    c = s.c
    handle = c.cudnnHandle_t()
    c.cudnnCreate(byref(handle))
    try:
        stream = device.cupy().cuda.Stream(non_blocking=True)
        c.cudnnSetStream(handle, stream.ptr)
        found = c.cudaStream_t()
        c.cudnnGetStream(handle, byref(found))
        assert found.value == stream.ptr
        y = s.nan(2, 3, 4, 5)
        device.synchronize(device.resolve("cuda"))
        c.cudnnSetTensor(handle, s.tensor(y.shape), y, 2.5)
        stream.synchronize()
        assert (y.get() == 2.5).all()
        status = c_int(-1)
        c.cudnnQueryRuntimeError(handle, byref(status), c.CUDNN_ERRQUERY_BLOCKING, None)
        assert status.value == c.CUDNN_STATUS_SUCCESS
    finally:
        c.cudnnDestroy(handle)


@family("cudnnSetCallback cudnnGetCallback")
def callbacks(s: Session) -> None:
    c = s.c
    before, data, pointer = c_uint(), c_void_p(), c.cudnnCallback_t()
    c.cudnnGetCallback(byref(before), byref(data), byref(pointer))
    messages: list[tuple[int, int, bytes]] = []
    call = c.cudnnCallback_t(lambda severity, own, _debug, text: messages.append((severity, own, text)))
    c.cudnnSetCallback(c.CUDNN_SEV_ERROR_EN, c_void_p(1234), call)
    try:
        mask = c_uint()
        c.cudnnGetCallback(byref(mask), byref(data), byref(pointer))
        assert (mask.value, data.value) == (c.CUDNN_SEV_ERROR_EN, 1234)
        assert ctypes.cast(pointer, c_void_p).value == ctypes.cast(call, c_void_p).value
        fail_on_purpose()
    finally:
        c.cudnnSetCallback(before.value, None, None)
    assert [(severity, own) for severity, own, _ in messages] == [(c.CUDNN_SEV_ERROR, 1234)]
    assert b"cudnnCreateTensorDescriptor" in messages[0][2]


# --- the graph API --------------------------------------------------------------------------------------------------


@family("""
    cudnnBackendCreateDescriptor cudnnBackendInitialize cudnnBackendSetAttribute cudnnBackendFinalize
    cudnnBackendGetAttribute cudnnBackendDestroyDescriptor
""")
def backend_descriptors(s: Session) -> None:
    c = s.c
    descriptor = c.cudnnBackendDescriptor_t()
    c.cudnnBackendCreateDescriptor(c.CUDNN_BACKEND_TENSOR_DESCRIPTOR, byref(descriptor))
    s.stack.callback(c.cudnnBackendDestroyDescriptor, descriptor)
    c.cudnnBackendInitialize(descriptor)
    dims, strides = (c_int64 * 4)(2, 3, 4, 5), (c_int64 * 4)(60, 20, 5, 1)
    for name, kind, count, values in (
        (c.CUDNN_ATTR_TENSOR_UNIQUE_ID, c.CUDNN_TYPE_INT64, 1, c_int64(7)),
        (c.CUDNN_ATTR_TENSOR_DATA_TYPE, c.CUDNN_TYPE_DATA_TYPE, 1, c_int(c.CUDNN_DATA_HALF)),
        (c.CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, c.CUDNN_TYPE_INT64, 1, c_int64(16)),
        (c.CUDNN_ATTR_TENSOR_DIMENSIONS, c.CUDNN_TYPE_INT64, 4, dims),
        (c.CUDNN_ATTR_TENSOR_STRIDES, c.CUDNN_TYPE_INT64, 4, strides),
    ):
        c.cudnnBackendSetAttribute(descriptor, name, kind, count, byref(values))
    c.cudnnBackendFinalize(descriptor)
    count, found = c_int64(), (c_int64 * 8)()
    c.cudnnBackendGetAttribute(
        descriptor, c.CUDNN_ATTR_TENSOR_STRIDES, c.CUDNN_TYPE_INT64, len(found), byref(count), found
    )
    assert list(found[: count.value]) == list(strides)


def variant_pack(s: Session, pointers: dict[int, Any], workspace: Any) -> Any:
    c = s.c
    pack = c.cudnnBackendDescriptor_t()
    c.cudnnBackendCreateDescriptor(c.CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, byref(pack))
    s.stack.callback(c.cudnnBackendDestroyDescriptor, pack)
    count = len(pointers)
    uids = (c_int64 * count)(*pointers)
    addresses = (c_void_p * count)(*(array.data.ptr for array in pointers.values()))
    scratch = (c_void_p * 1)(workspace.data.ptr)
    c.cudnnBackendSetAttribute(pack, c.CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, c.CUDNN_TYPE_INT64, count, uids)
    c.cudnnBackendSetAttribute(pack, c.CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, c.CUDNN_TYPE_VOID_PTR, count, addresses)
    c.cudnnBackendSetAttribute(pack, c.CUDNN_ATTR_VARIANT_PACK_WORKSPACE, c.CUDNN_TYPE_VOID_PTR, 1, scratch)
    c.cudnnBackendFinalize(pack)
    return pack


@family("""
    cudnnBackendExecute cudnnGetExecutionPlanWorkspaceSize cudnnBackendPopulateCudaGraph cudnnBackendUpdateCudaGraph
""")
def backend_execution(s: Session) -> None:
    c = s.c
    shape = (2, 16, 8, 8)  # in the layout NHWC, which makes no difference to the arrays here
    graph = Graph()
    a, b = (graph.tensor(shape, "float32", layout="nhwc", name=name) for name in "ab")
    y = graph.output(graph.relu(graph.add(a, b)), layout="nhwc", name="y")
    built = graph.build(s.handle)
    native = [made for made in built.configurations() if "supports_cuda_graph_native_api" in made.behavior_notes]
    plan = native[0].plan(s.handle)
    s.stack.callback(plan.close)
    values = [s.normal(*shape), s.normal(*shape)]
    first, second = s.gpu(values[0]), s.gpu(values[1])
    outputs = [s.nan(*shape), s.nan(*shape)]
    workspace = s.workspace(plan.workspace)
    packs = [variant_pack(s, {a.uid: first, b.uid: second, y.uid: output}, workspace) for output in outputs]
    expected = np.maximum(values[0] + values[1], 0)

    c.cudnnBackendExecute(s.handle, plan.descriptor, packs[0])
    close(outputs[0], expected)
    size = c_size_t(1 << 60)
    if library.load().version >= 92300:
        c.cudnnGetExecutionPlanWorkspaceSize(s.handle, plan.descriptor, packs[0], byref(size))
        assert size.value <= plan.workspace
    else:
        with pytest.raises(CudnnNotSupportedError, match=r"cuDNN 9\.23\.0 brought it"):
            c.cudnnGetExecutionPlanWorkspaceSize(s.handle, plan.descriptor, packs[0], byref(size))

    # CuPy has no call that makes an empty graph; the driver is in the process already.
    driver = ctypes.CDLL("libcuda.so.1")
    cuda_graph = c_void_p()
    assert driver.cuGraphCreate(byref(cuda_graph), 0) == 0
    runtime = device.cupy().cuda.runtime
    stream = device.cupy().cuda.get_current_stream()
    outputs[0][...] = np.nan
    c.cudnnBackendPopulateCudaGraph(s.handle, plan.descriptor, packs[0], cuda_graph.value)
    launch(runtime, cuda_graph, stream)
    close(outputs[0], expected)
    outputs[0][...] = np.nan
    c.cudnnBackendUpdateCudaGraph(s.handle, plan.descriptor, packs[1], cuda_graph.value)
    launch(runtime, cuda_graph, stream)
    close(outputs[1], expected)
    assert np.isnan(outputs[0].get()).all()
    assert driver.cuGraphDestroy(cuda_graph) == 0


def launch(runtime: Any, cuda_graph: c_void_p, stream: Any) -> None:
    """Runs a CUDA graph once."""
    executable = runtime.graphInstantiate(cuda_graph.value)
    runtime.graphLaunch(executable, stream.ptr)
    stream.synchronize()
    runtime.graphExecDestroy(executable)


# --- tensors and filters --------------------------------------------------------------------------------------------


def ints(count: int) -> list[c_int]:
    return [c_int(-1) for _ in range(count)]


def read(variables: list[c_int]) -> list[int]:
    return [variable.value for variable in variables]


@family("""
    cudnnCreateTensorDescriptor cudnnSetTensor4dDescriptor cudnnSetTensor4dDescriptorEx cudnnGetTensor4dDescriptor
    cudnnSetTensorNdDescriptor cudnnSetTensorNdDescriptorEx cudnnGetTensorNdDescriptor cudnnGetTensorSizeInBytes
    cudnnDestroyTensorDescriptor
""")
def tensor_descriptors(s: Session) -> None:
    c = s.c
    descriptor = s.new("TensorDescriptor")
    c.cudnnSetTensor4dDescriptor(descriptor, c.CUDNN_TENSOR_NHWC, c.CUDNN_DATA_HALF, 2, 3, 4, 5)
    found, size = ints(9), c_size_t()
    c.cudnnGetTensor4dDescriptor(descriptor, *(byref(number) for number in found))
    assert read(found) == [c.CUDNN_DATA_HALF, 2, 3, 4, 5, 60, 1, 15, 3]
    c.cudnnGetTensorSizeInBytes(descriptor, byref(size))
    assert size.value == 240
    c.cudnnSetTensor4dDescriptorEx(descriptor, c.CUDNN_DATA_FLOAT, 2, 3, 4, 5, 100, 30, 6, 1)
    c.cudnnGetTensor4dDescriptor(descriptor, *(byref(number) for number in found))
    assert read(found) == [c.CUDNN_DATA_FLOAT, 2, 3, 4, 5, 100, 30, 6, 1]

    data_type, count = ints(2)
    dims, strides = (c_int * 8)(), (c_int * 8)()
    c.cudnnSetTensorNdDescriptor(descriptor, c.CUDNN_DATA_DOUBLE, 5, [2, 3, 4, 5, 6], [360, 120, 30, 6, 1])
    c.cudnnGetTensorNdDescriptor(descriptor, 8, byref(data_type), byref(count), dims, strides)
    assert (data_type.value, count.value) == (c.CUDNN_DATA_DOUBLE, 5)
    assert (list(dims[:5]), list(strides[:5])) == ([2, 3, 4, 5, 6], [360, 120, 30, 6, 1])
    c.cudnnSetTensorNdDescriptorEx(descriptor, c.CUDNN_TENSOR_NHWC, c.CUDNN_DATA_FLOAT, 5, [2, 3, 4, 5, 6])
    c.cudnnGetTensorNdDescriptor(descriptor, 8, byref(data_type), byref(count), dims, strides)
    assert (list(dims[:5]), list(strides[:5])) == ([2, 3, 4, 5, 6], [360, 1, 90, 18, 3])


@family("""
    cudnnCreateFilterDescriptor cudnnSetFilter4dDescriptor cudnnGetFilter4dDescriptor cudnnSetFilterNdDescriptor
    cudnnGetFilterNdDescriptor cudnnGetFilterSizeInBytes cudnnDestroyFilterDescriptor
""")
def filter_descriptors(s: Session) -> None:
    c = s.c
    descriptor = s.new("FilterDescriptor")
    c.cudnnSetFilter4dDescriptor(descriptor, c.CUDNN_DATA_HALF, c.CUDNN_TENSOR_NHWC, 6, 5, 4, 3)
    found, size = ints(6), c_size_t()
    c.cudnnGetFilter4dDescriptor(descriptor, *(byref(number) for number in found))
    assert read(found) == [c.CUDNN_DATA_HALF, c.CUDNN_TENSOR_NHWC, 6, 5, 4, 3]
    c.cudnnGetFilterSizeInBytes(descriptor, byref(size))
    assert size.value == 720
    c.cudnnSetFilterNdDescriptor(descriptor, c.CUDNN_DATA_FLOAT, c.CUDNN_TENSOR_NCHW, 5, [6, 5, 4, 3, 2])
    data_type, layout, count = ints(3)
    dims = (c_int * 8)()
    c.cudnnGetFilterNdDescriptor(descriptor, 8, byref(data_type), byref(layout), byref(count), dims)
    assert (data_type.value, layout.value, count.value) == (c.CUDNN_DATA_FLOAT, c.CUDNN_TENSOR_NCHW, 5)
    assert list(dims[:5]) == [6, 5, 4, 3, 2]


def folded(x: np.ndarray, before: list[int], after: list[int], fold: list[int]) -> np.ndarray:
    """Pads the last two dimensions with zeros and moves what is within each fold[0] by fold[1] block to channels."""
    shape = [size + low + high for size, low, high in zip(x.shape, before, after, strict=True)]
    after = [high + -shape[axis] % (1, 1, *fold[:2])[axis] for axis, high in enumerate(after)]
    padded = np.pad(x, list(zip(before, after, strict=True)))
    n, channels, rows, columns = padded.shape
    blocks = padded.reshape(n, channels, rows // fold[0], fold[0], columns // fold[1], fold[1])
    return blocks.transpose(0, 3, 5, 1, 2, 4).reshape(n, -1, rows // fold[0], columns // fold[1])


@family("""
    cudnnTransformTensor cudnnCreateTensorTransformDescriptor cudnnSetTensorTransformDescriptor
    cudnnGetTensorTransformDescriptor cudnnInitTransformDest cudnnTransformTensorEx cudnnTransformFilter
    cudnnDestroyTensorTransformDescriptor
""")
def tensor_transforms(s: Session) -> None:
    c = s.c
    values, prior = s.normal(2, 3, 5, 6), s.normal(2, 5, 6, 3)
    x, y = s.gpu(values), s.gpu(prior)
    x_desc = s.tensor(values.shape)
    c.cudnnTransformTensor(s.handle, 1.5, x_desc, x, 0.5, s.tensor(values.shape, "NHWC"), y)
    close(y, 1.5 * values.transpose(0, 2, 3, 1) + 0.5 * prior)

    # Of the factors cuDNN reads those of the last two dimensions: the first two numbers.
    before, after, fold = [0, 0, 1, 0], [0, 0, 0, 1], [2, 3, 1, 1]
    transform = s.new("TensorTransformDescriptor")
    c.cudnnSetTensorTransformDescriptor(transform, 4, c.CUDNN_TENSOR_NCHW, before, after, fold, c.CUDNN_TRANSFORM_FOLD)
    layout, direction = c_int(-1), c_int(-1)
    lows, highs, folds = (c_int32 * 4)(), (c_int32 * 4)(), (c_uint32 * 4)()
    c.cudnnGetTensorTransformDescriptor(transform, 4, byref(layout), lows, highs, folds, byref(direction))
    assert (layout.value, direction.value) == (c.CUDNN_TENSOR_NCHW, c.CUDNN_TRANSFORM_FOLD)
    assert (list(lows), list(highs), list(folds[:2])) == (before, after, fold[:2])

    expected = folded(values, before, after, fold)
    target, size = s.new("TensorDescriptor"), c_size_t()
    c.cudnnInitTransformDest(transform, x_desc, target, byref(size))
    assert size.value == 4 * expected.size
    data_type, count = ints(2)
    dims, strides = (c_int * 4)(), (c_int * 4)()
    c.cudnnGetTensorNdDescriptor(target, 4, byref(data_type), byref(count), dims, strides)
    assert tuple(dims) == expected.shape
    y = s.gpu(np.zeros(expected.shape))
    c.cudnnTransformTensorEx(s.handle, transform, 2.0, x_desc, x, 0.0, target, y)
    close(y, 2 * expected)

    values = s.normal(4, 3, 3, 3)
    before, after, fold = [0, 0, 1, 1], [0, 0, 0, 0], [2, 2, 1, 1]
    expected = folded(values, before, after, fold)
    c.cudnnSetTensorTransformDescriptor(transform, 4, c.CUDNN_TENSOR_NCHW, before, after, fold, c.CUDNN_TRANSFORM_FOLD)
    y = s.gpu(np.zeros(expected.shape))
    c.cudnnTransformFilter(
        s.handle, transform, 1.0, s.filter(values.shape), s.gpu(values), 0.0, s.filter(expected.shape), y
    )
    close(y, expected)


@family("""
    cudnnAddTensor cudnnCreateOpTensorDescriptor cudnnSetOpTensorDescriptor cudnnGetOpTensorDescriptor cudnnOpTensor
    cudnnDestroyOpTensorDescriptor cudnnSetTensor cudnnScaleTensor
""")
def elementwise(s: Session) -> None:
    c = s.c
    shape = (2, 3, 5, 7)
    values, bias, prior = s.normal(*shape), s.normal(1, 3, 1, 1), s.normal(*shape)
    desc, bias_desc = s.tensor(shape), s.tensor(bias.shape)
    y = s.gpu(prior)
    c.cudnnAddTensor(s.handle, 1.5, bias_desc, s.gpu(bias), 0.5, desc, y)
    close(y, 1.5 * bias + 0.5 * prior)

    op = s.new("OpTensorDescriptor")
    c.cudnnSetOpTensorDescriptor(op, c.CUDNN_OP_TENSOR_MAX, c.CUDNN_DATA_FLOAT, c.CUDNN_PROPAGATE_NAN)
    found = ints(3)
    c.cudnnGetOpTensorDescriptor(op, *(byref(number) for number in found))
    assert read(found) == [c.CUDNN_OP_TENSOR_MAX, c.CUDNN_DATA_FLOAT, c.CUDNN_PROPAGATE_NAN]
    y = s.gpu(prior)
    c.cudnnOpTensor(s.handle, op, 2.0, desc, s.gpu(values), -1.0, bias_desc, s.gpu(bias), 0.5, desc, y)
    close(y, np.maximum(2 * values, -bias) + 0.5 * prior)

    y = s.gpu(values)
    c.cudnnScaleTensor(s.handle, desc, y, -2.5)
    close(y, -2.5 * values)
    c.cudnnSetTensor(s.handle, desc, y, 0.75)
    assert (y.get() == 0.75).all()


@family("""
    cudnnCreateReduceTensorDescriptor cudnnSetReduceTensorDescriptor cudnnGetReduceTensorDescriptor
    cudnnGetReductionIndicesSize cudnnGetReductionWorkspaceSize cudnnReduceTensor cudnnDestroyReduceTensorDescriptor
""")
def reductions(s: Session) -> None:
    c = s.c
    values, prior = s.normal(4, 3, 5, 7), s.normal(1, 3, 1, 1)
    x, x_desc = s.gpu(values), s.tensor(values.shape)
    reduction = s.new("ReduceTensorDescriptor")

    def reduce(y: Any, alpha: float, beta: float) -> Any:
        y_desc = s.tensor(y.shape)
        indices, workspace = c_size_t(), c_size_t()
        c.cudnnGetReductionIndicesSize(s.handle, reduction, x_desc, y_desc, byref(indices))
        c.cudnnGetReductionWorkspaceSize(s.handle, reduction, x_desc, y_desc, byref(workspace))
        index, scratch = s.workspace(indices.value), s.workspace(workspace.value)
        c.cudnnReduceTensor(
            s.handle, reduction, index, indices.value, scratch, workspace.value, alpha, x_desc, x, beta, y_desc, y
        )
        return index[: indices.value]

    settings = (
        c.CUDNN_REDUCE_TENSOR_ADD, c.CUDNN_DATA_FLOAT, c.CUDNN_PROPAGATE_NAN,
        c.CUDNN_REDUCE_TENSOR_NO_INDICES, c.CUDNN_32BIT_INDICES,
    )  # fmt: skip
    c.cudnnSetReduceTensorDescriptor(reduction, *settings)
    found = ints(5)
    c.cudnnGetReduceTensorDescriptor(reduction, *(byref(number) for number in found))
    assert read(found) == list(settings)
    y = s.gpu(prior)
    reduce(y, 1.5, 0.5)
    close(y, 1.5 * values.sum((0, 2, 3), keepdims=True) + 0.5 * prior)

    c.cudnnSetReduceTensorDescriptor(
        reduction, c.CUDNN_REDUCE_TENSOR_MAX, c.CUDNN_DATA_FLOAT, c.CUDNN_PROPAGATE_NAN,
        c.CUDNN_REDUCE_TENSOR_FLATTENED_INDICES, c.CUDNN_32BIT_INDICES,
    )  # fmt: skip
    y = s.nan(1, 1, 1, 1)
    indices = reduce(y, 1.0, 0.0)
    close(y, values.max(keepdims=True))
    assert indices.get().view(np.uint32)[0] == values.argmax()


# --- layers ---------------------------------------------------------------------------------------------------------


def gradient(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """The gradient of sum(dy * function(x)) by x, from central differences."""
    result: np.ndarray = numeric_gradient(lambda moved: dy * function(moved), x)
    return result


@family("cudnnSoftmaxForward cudnnSoftmaxBackward")
def softmax(s: Session) -> None:
    c = s.c
    shape = (2, 5, 3, 4)
    values, slopes = s.normal(*shape), s.normal(*shape)
    desc, y, dx = s.tensor(shape), s.nan(*shape), s.nan(*shape)
    how = (c.CUDNN_SOFTMAX_ACCURATE, c.CUDNN_SOFTMAX_MODE_CHANNEL)
    c.cudnnSoftmaxForward(s.handle, *how, 1.0, desc, s.gpu(values), 0.0, desc, y)
    powers = np.exp(values - values.max(1, keepdims=True))
    expected = powers / powers.sum(1, keepdims=True)
    close(y, expected)
    c.cudnnSoftmaxBackward(s.handle, *how, 1.0, desc, y, desc, s.gpu(slopes), 0.0, desc, dx)
    close(dx, expected * (slopes - (slopes * expected).sum(1, keepdims=True)))


def windows(x: np.ndarray, size: int, padding: int, stride: int, fill: float = 0.0) -> np.ndarray:
    """The windows of images, (N, C, P, Q, size, size)."""
    around = [(0, 0), (0, 0), (padding, padding), (padding, padding)]
    padded = np.pad(x, around, constant_values=fill)
    every = np.lib.stride_tricks.sliding_window_view(padded, (size, size), (2, 3))
    return np.asarray(every[:, :, ::stride, ::stride])


@family("""
    cudnnCreatePoolingDescriptor cudnnSetPooling2dDescriptor cudnnGetPooling2dDescriptor cudnnSetPoolingNdDescriptor
    cudnnGetPoolingNdDescriptor cudnnGetPoolingNdForwardOutputDim cudnnGetPooling2dForwardOutputDim cudnnPoolingForward
    cudnnPoolingBackward cudnnDestroyPoolingDescriptor
""")
def pooling(s: Session) -> None:
    c = s.c
    pool = s.new("PoolingDescriptor")
    mode, nan, count = ints(3)
    sizes, paddings, strides = (c_int * 3)(), (c_int * 3)(), (c_int * 3)()
    c.cudnnSetPoolingNdDescriptor(pool, c.CUDNN_POOLING_MAX, c.CUDNN_PROPAGATE_NAN, 3, [2, 3, 4], [0, 1, 2], [1, 2, 3])
    c.cudnnGetPoolingNdDescriptor(pool, 3, byref(mode), byref(nan), byref(count), sizes, paddings, strides)
    assert (mode.value, nan.value, count.value) == (c.CUDNN_POOLING_MAX, c.CUDNN_PROPAGATE_NAN, 3)
    assert (list(sizes), list(paddings), list(strides)) == ([2, 3, 4], [0, 1, 2], [1, 2, 3])

    values = s.normal(2, 3, 7, 9)
    x, x_desc = s.gpu(values), s.tensor(values.shape)
    for kind, reduce in (
        (c.CUDNN_POOLING_MAX_DETERMINISTIC, lambda x: windows(x, 3, 1, 2, -np.inf).max((4, 5))),
        (c.CUDNN_POOLING_AVERAGE_COUNT_INCLUDE_PADDING, lambda x: windows(x, 3, 1, 2).mean((4, 5))),
    ):
        settings = [kind, c.CUDNN_NOT_PROPAGATE_NAN, 3, 3, 1, 1, 2, 2]
        c.cudnnSetPooling2dDescriptor(pool, *settings)
        found = ints(8)
        c.cudnnGetPooling2dDescriptor(pool, *(byref(number) for number in found))
        assert read(found) == settings
        expected = reduce(values)
        dims, each = (c_int * 4)(), ints(4)
        c.cudnnGetPoolingNdForwardOutputDim(pool, x_desc, 4, dims)
        c.cudnnGetPooling2dForwardOutputDim(pool, x_desc, *(byref(number) for number in each))
        assert tuple(dims) == tuple(read(each)) == expected.shape
        slopes = s.normal(*expected.shape)
        y, dx, y_desc = s.nan(*expected.shape), s.nan(*values.shape), s.tensor(expected.shape)
        c.cudnnPoolingForward(s.handle, pool, 1.0, x_desc, x, 0.0, y_desc, y)
        close(y, expected)
        c.cudnnPoolingBackward(s.handle, pool, 1.0, y_desc, y, y_desc, s.gpu(slopes), x_desc, x, 0.0, x_desc, dx)
        close(dx, gradient(reduce, values, slopes))


@family("""
    cudnnCreateActivationDescriptor cudnnSetActivationDescriptor cudnnGetActivationDescriptor
    cudnnSetActivationDescriptorSwishBeta cudnnGetActivationDescriptorSwishBeta cudnnActivationForward
    cudnnActivationBackward cudnnDestroyActivationDescriptor
""")
def activation(s: Session) -> None:
    c = s.c
    shape = (2, 3, 5, 7)
    act = s.new("ActivationDescriptor")
    mode, nan, number = c_int(), c_int(), c_double()
    c.cudnnSetActivationDescriptor(act, c.CUDNN_ACTIVATION_ELU, c.CUDNN_PROPAGATE_NAN, 1.25)
    c.cudnnGetActivationDescriptor(act, byref(mode), byref(nan), byref(number))
    assert (mode.value, nan.value, number.value) == (c.CUDNN_ACTIVATION_ELU, c.CUDNN_PROPAGATE_NAN, 1.25)
    c.cudnnSetActivationDescriptorSwishBeta(act, 1.5)
    c.cudnnGetActivationDescriptorSwishBeta(act, byref(number))
    assert number.value == 1.5

    c.cudnnSetActivationDescriptor(act, c.CUDNN_ACTIVATION_TANH, c.CUDNN_PROPAGATE_NAN, 0.0)
    values, slopes, prior = s.normal(*shape), s.normal(*shape), s.normal(*shape)
    desc, x, y, dx = s.tensor(shape), s.gpu(values), s.gpu(prior), s.nan(*shape)
    c.cudnnActivationForward(s.handle, act, 1.5, desc, x, 0.5, desc, y)
    expected = np.tanh(values)
    close(y, 1.5 * expected + 0.5 * prior, APPROXIMATE)
    y = s.gpu(expected)
    c.cudnnActivationBackward(s.handle, act, 1.0, desc, y, desc, s.gpu(slopes), desc, x, 0.0, desc, dx)
    close(dx, slopes * (1 - expected**2), APPROXIMATE)


@family("""
    cudnnCreateLRNDescriptor cudnnSetLRNDescriptor cudnnGetLRNDescriptor cudnnLRNCrossChannelForward
    cudnnLRNCrossChannelBackward cudnnDestroyLRNDescriptor
""")
def local_response(s: Session) -> None:
    c = s.c
    shape = (2, 7, 3, 4)
    n, alpha, beta, k = 5, 0.8, 0.75, 1.5
    norm = s.new("LRNDescriptor")
    c.cudnnSetLRNDescriptor(norm, n, alpha, beta, k)
    count, numbers = c_uint(), [c_double() for _ in range(3)]
    c.cudnnGetLRNDescriptor(norm, byref(count), *(byref(number) for number in numbers))
    assert (count.value, *(number.value for number in numbers)) == (n, alpha, beta, k)

    def forward(x: np.ndarray) -> np.ndarray:
        padded = np.pad(x * x, [(0, 0), (n // 2, n // 2), (0, 0), (0, 0)])
        sums = np.lib.stride_tricks.sliding_window_view(padded, n, 1).sum(-1)
        return np.asarray(x / (k + alpha / n * sums) ** beta)

    values, slopes = s.normal(*shape), s.normal(*shape)
    desc, x, y, dx = s.tensor(shape), s.gpu(values), s.nan(*shape), s.nan(*shape)
    mode = c.CUDNN_LRN_CROSS_CHANNEL_DIM1
    c.cudnnLRNCrossChannelForward(s.handle, norm, mode, 1.0, desc, x, 0.0, desc, y)
    close(y, forward(values), APPROXIMATE)
    c.cudnnLRNCrossChannelBackward(s.handle, norm, mode, 1.0, desc, y, desc, s.gpu(slopes), desc, x, 0.0, desc, dx)
    close(dx, gradient(forward, values, slopes), APPROXIMATE)


@family("cudnnDivisiveNormalizationForward cudnnDivisiveNormalizationBackward")
def divisive(s: Session) -> None:
    c = s.c
    shape = (1, 2, 5, 6)
    n, alpha, beta, k = 3, 1.5, 0.75, 1.0
    norm = s.new("LRNDescriptor")
    c.cudnnSetLRNDescriptor(norm, n, alpha, beta, k)
    inside = windows(np.ones(shape), n, n // 2, 1)

    def forward(x: np.ndarray, means: np.ndarray) -> np.ndarray:
        deviations = (windows(x, n, n // 2, 1) - means[..., None, None]) * inside
        return np.asarray(x / (k + alpha / n**2 * (deviations**2).sum((4, 5))) ** beta)

    values, means, slopes = s.normal(*shape), 0.1 * s.normal(*shape), s.normal(*shape)
    x, mean, dy = (s.gpu(array, np.float64) for array in (values, means, slopes))
    y, first, second, dx, dmean = (s.nan(*shape, dtype=np.float64) for _ in range(5))
    desc = s.tensor(shape, dtype="DOUBLE")
    mode = c.CUDNN_DIVNORM_PRECOMPUTED_MEANS
    c.cudnnDivisiveNormalizationForward(s.handle, norm, mode, 1.0, desc, x, mean, first, second, 0.0, desc, y)
    close(y, forward(values, means), 1e-10)
    dx[...] = 0
    dmean[...] = 0
    c.cudnnDivisiveNormalizationBackward(
        s.handle, norm, mode, 1.0, desc, x, mean, dy, first, second, 0.0, desc, dx, dmean
    )
    close(dx, gradient(lambda moved: forward(moved, means), values, slopes), 1e-5)
    close(dmean, gradient(lambda moved: forward(values, moved), means, slopes), 1e-5)


EPSILON = 1e-3
FACTOR = 0.25  # the weight of the new statistics


class Normalization:
    """Batch normalization over images: random arguments, on the GPU, and what has to come out."""

    def __init__(self, s: Session) -> None:
        shape, channels = (4, 8, 3, 5), (1, 8, 1, 1)
        self.shape, self.channels = shape, channels
        self.values, self.slopes = s.normal(*shape), s.normal(*shape)
        scale, bias = 1 + 0.5 * s.normal(*channels), s.normal(*channels)
        running_mean, running_variance = s.normal(*channels), 1 + s.normal(*channels) ** 2
        self.x, self.dy = s.gpu(self.values), s.gpu(self.slopes)
        self.scale, self.bias = s.gpu(scale), s.gpu(bias)
        self.running_mean, self.running_variance = s.gpu(running_mean), s.gpu(running_variance)
        self.y, self.dx = s.nan(*shape), s.nan(*shape)
        self.saved_mean, self.saved_inverse = s.nan(*channels), s.nan(*channels)
        self.dscale, self.dbias = s.nan(*channels), s.nan(*channels)
        self.desc = s.tensor(shape)

        axes = (0, 2, 3)
        count = self.values.size // channels[1]
        self.mean = self.values.mean(axes, keepdims=True)
        variance = self.values.var(axes, keepdims=True)
        self.inverse = 1 / np.sqrt(variance + EPSILON)
        normalized = (self.values - self.mean) * self.inverse

        def forward(x: np.ndarray) -> np.ndarray:
            spread = np.sqrt(x.var(axes, keepdims=True) + EPSILON)
            return np.asarray((x - x.mean(axes, keepdims=True)) / spread * scale + bias)

        self.expected = forward(self.values)
        self.inference = (self.values - running_mean) / np.sqrt(running_variance + EPSILON) * scale + bias
        self.new_mean = (1 - FACTOR) * running_mean + FACTOR * self.mean
        self.new_variance = (1 - FACTOR) * running_variance + FACTOR * variance * count / (count - 1)
        self.gradient = gradient(forward, self.values, self.slopes)
        self.scale_gradient = (self.slopes * normalized).sum(axes, keepdims=True)
        self.bias_gradient = self.slopes.sum(axes, keepdims=True)

    def check_training(self) -> None:
        close(self.y, self.expected)
        close(self.running_mean, self.new_mean)
        close(self.running_variance, self.new_variance)
        close(self.saved_mean, self.mean)
        close(self.saved_inverse, self.inverse)

    def check_backward(self) -> None:
        close(self.dx, self.gradient, APPROXIMATE)
        close(self.dscale, self.scale_gradient, APPROXIMATE)
        close(self.dbias, self.bias_gradient, APPROXIMATE)


@family("""
    cudnnDeriveBNTensorDescriptor cudnnBatchNormalizationForwardInference cudnnBatchNormalizationForwardTraining
    cudnnBatchNormalizationBackward
""")
def batch_normalization(s: Session) -> None:
    c = s.c
    n = Normalization(s)
    mode = c.CUDNN_BATCHNORM_SPATIAL
    derived = s.new("TensorDescriptor")
    c.cudnnDeriveBNTensorDescriptor(derived, n.desc, mode)
    found = ints(9)
    c.cudnnGetTensor4dDescriptor(derived, *(byref(number) for number in found))
    assert tuple(read(found)[1:5]) == n.channels
    c.cudnnBatchNormalizationForwardInference(
        s.handle, mode, 1.0, 0.0, n.desc, n.x, n.desc, n.y,
        derived, n.scale, n.bias, n.running_mean, n.running_variance, EPSILON,
    )  # fmt: skip
    close(n.y, n.inference)
    c.cudnnBatchNormalizationForwardTraining(
        s.handle, mode, 1.0, 0.0, n.desc, n.x, n.desc, n.y, derived, n.scale, n.bias, FACTOR,
        n.running_mean, n.running_variance, EPSILON, n.saved_mean, n.saved_inverse,
    )  # fmt: skip
    n.check_training()
    c.cudnnBatchNormalizationBackward(
        s.handle, mode, 1.0, 0.0, 1.0, 0.0, n.desc, n.x, n.desc, n.dy, n.desc, n.dx,
        derived, n.scale, n.dscale, n.dbias, EPSILON, n.saved_mean, n.saved_inverse,
    )  # fmt: skip
    n.check_backward()


@family("""
    cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize cudnnGetBatchNormalizationBackwardExWorkspaceSize
    cudnnGetBatchNormalizationTrainingExReserveSpaceSize cudnnBatchNormalizationForwardTrainingEx
    cudnnBatchNormalizationBackwardEx
""")
def batch_normalization_ex(s: Session) -> None:
    c = s.c
    n = Normalization(s)
    how = (c.CUDNN_BATCHNORM_SPATIAL, c.CUDNN_BATCHNORM_OPS_BN)
    derived = s.tensor(n.channels)
    forward, backward, reserve = c_size_t(), c_size_t(), c_size_t()
    c.cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
        s.handle, *how, n.desc, None, n.desc, derived, None, byref(forward)
    )
    c.cudnnGetBatchNormalizationBackwardExWorkspaceSize(
        s.handle, *how, n.desc, None, n.desc, None, n.desc, derived, None, byref(backward)
    )
    c.cudnnGetBatchNormalizationTrainingExReserveSpaceSize(s.handle, *how, None, n.desc, byref(reserve))
    kept = s.workspace(reserve.value)
    c.cudnnBatchNormalizationForwardTrainingEx(
        s.handle, *how, 1.0, 0.0, n.desc, n.x, None, None, n.desc, n.y, derived, n.scale, n.bias, FACTOR,
        n.running_mean, n.running_variance, EPSILON, n.saved_mean, n.saved_inverse, None,
        s.workspace(forward.value), forward.value, kept, reserve.value,
    )  # fmt: skip
    n.check_training()
    c.cudnnBatchNormalizationBackwardEx(
        s.handle, *how, 1.0, 0.0, 1.0, 0.0, n.desc, n.x, None, None, n.desc, n.dy, None, None, n.desc, n.dx,
        derived, n.scale, None, n.dscale, n.dbias, EPSILON, n.saved_mean, n.saved_inverse, None,
        s.workspace(backward.value), backward.value, kept, reserve.value,
    )  # fmt: skip
    n.check_backward()


@family("""
    cudnnDeriveNormTensorDescriptor cudnnNormalizationForwardInference cudnnNormalizationForwardTraining
    cudnnNormalizationBackward cudnnGetNormalizationForwardTrainingWorkspaceSize
    cudnnGetNormalizationBackwardWorkspaceSize cudnnGetNormalizationTrainingReserveSpaceSize
""")
def normalization(s: Session) -> None:
    c = s.c
    n = Normalization(s)
    how = (c.CUDNN_NORM_PER_CHANNEL, c.CUDNN_NORM_OPS_NORM, c.CUDNN_NORM_ALGO_STANDARD)
    weights, statistics = s.new("TensorDescriptor"), s.new("TensorDescriptor")
    c.cudnnDeriveNormTensorDescriptor(weights, statistics, n.desc, how[0], 1)
    found = ints(9)
    for derived in (weights, statistics):
        c.cudnnGetTensor4dDescriptor(derived, *(byref(number) for number in found))
        assert tuple(read(found)[1:5]) == n.channels
    c.cudnnNormalizationForwardInference(
        s.handle, *how, 1.0, 0.0, n.desc, n.x, weights, n.scale, n.bias, statistics, n.running_mean, n.running_variance,
        None, None, None, n.desc, n.y, EPSILON, 1,
    )  # fmt: skip
    close(n.y, n.inference)
    forward, backward, reserve = c_size_t(), c_size_t(), c_size_t()
    c.cudnnGetNormalizationForwardTrainingWorkspaceSize(
        s.handle, *how, n.desc, None, n.desc, weights, None, statistics, byref(forward), 1
    )
    c.cudnnGetNormalizationBackwardWorkspaceSize(
        s.handle, *how, n.desc, None, n.desc, None, n.desc, weights, None, statistics, byref(backward), 1
    )
    c.cudnnGetNormalizationTrainingReserveSpaceSize(s.handle, *how, None, n.desc, byref(reserve), 1)
    kept = s.workspace(reserve.value)
    c.cudnnNormalizationForwardTraining(
        s.handle, *how, 1.0, 0.0, n.desc, n.x, weights, n.scale, n.bias, FACTOR,
        statistics, n.running_mean, n.running_variance, EPSILON, n.saved_mean, n.saved_inverse,
        None, None, None, n.desc, n.y, s.workspace(forward.value), forward.value, kept, reserve.value, 1,
    )  # fmt: skip
    n.check_training()
    c.cudnnNormalizationBackward(
        s.handle, *how, 1.0, 0.0, 1.0, 0.0, n.desc, n.x, None, None, n.desc, n.dy, None, None, n.desc, n.dx,
        weights, n.scale, None, n.dscale, n.dbias, EPSILON, statistics, n.saved_mean, n.saved_inverse, None,
        s.workspace(backward.value), backward.value, kept, reserve.value, 1,
    )  # fmt: skip
    n.check_backward()


@family("""
    cudnnCreateSpatialTransformerDescriptor cudnnSetSpatialTransformerNdDescriptor cudnnSpatialTfGridGeneratorForward
    cudnnSpatialTfGridGeneratorBackward cudnnSpatialTfSamplerForward cudnnSpatialTfSamplerBackward
    cudnnDestroySpatialTransformerDescriptor
""")
def spatial_transformer(s: Session) -> None:
    c = s.c
    shape = (2, 3, 5, 6)
    images, _, height, width = shape
    transformer = s.new("SpatialTransformerDescriptor")
    c.cudnnSetSpatialTransformerNdDescriptor(transformer, c.CUDNN_SAMPLER_BILINEAR, c.CUDNN_DATA_FLOAT, 4, shape)

    # Points of the output from -1 to 1, (x, y, 1), moved by each image's 2x3 matrix.
    points = np.ones((height, width, 3))
    points[..., 0] = np.linspace(-1, 1, width)
    points[..., 1] = np.linspace(-1, 1, height)[:, None]
    matrices = (np.array([[0.6, 0.1, 0.05], [-0.15, 0.7, -0.1]]) + 0.05 * s.normal(images, 2, 3)).astype(np.float32)
    expected = np.einsum("nij,hwj->nhwi", matrices.astype(np.float64), points)
    grid = s.nan(*expected.shape)
    c.cudnnSpatialTfGridGeneratorForward(s.handle, transformer, s.gpu(matrices), grid)
    close(grid, expected)
    slopes = s.normal(*expected.shape)
    dtheta = s.nan(images, 2, 3)
    c.cudnnSpatialTfGridGeneratorBackward(s.handle, transformer, s.gpu(slopes), dtheta)
    close(dtheta, np.einsum("nhwi,hwj->nij", slopes, points))

    def sample(x: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Bilinear, with zeros outside."""
        column, row = ((places[..., axis] + 1) / 2 * (size - 1) for axis, size in ((0, width), (1, height)))
        # Weights of all pixels: the triangle of width 1 around each.
        near = [
            np.maximum(0, 1 - np.abs(at[..., None] - np.arange(size))) for at, size in ((row, height), (column, width))
        ]
        return np.einsum("nchw,npqh,npqw->ncpq", x, *near)

    values, slopes, places = s.normal(*shape), s.normal(*shape), grid.get().astype(np.float64)
    desc, x, y, dx, dgrid = s.tensor(shape), s.gpu(values), s.nan(*shape), s.nan(*shape), s.nan(*expected.shape)
    c.cudnnSpatialTfSamplerForward(s.handle, transformer, 1.0, desc, x, grid, 0.0, desc, y)
    close(y, sample(values, places), APPROXIMATE)
    dx[...] = 0
    dgrid[...] = 0
    c.cudnnSpatialTfSamplerBackward(
        s.handle, transformer, 1.0, desc, x, 0.0, desc, dx, 1.0, desc, s.gpu(slopes), grid, 0.0, dgrid
    )
    close(dx, gradient(lambda moved: sample(moved, places), values, slopes), APPROXIMATE)
    close(dgrid, sampler_gradient(sample, values, places, slopes), APPROXIMATE)


def sampler_gradient(
    sample: Callable[[np.ndarray, np.ndarray], np.ndarray], x: np.ndarray, places: np.ndarray, dy: np.ndarray
) -> np.ndarray:
    """The gradient by the grid, whose points do not influence each other."""
    result = np.empty_like(places)
    step = 1e-7
    for axis in range(2):
        moved = [places.copy(), places.copy()]
        moved[0][..., axis] += step
        moved[1][..., axis] -= step
        result[..., axis] = ((sample(x, moved[0]) - sample(x, moved[1])) * dy).sum(1) / (2 * step)
    return result


@family("""
    cudnnCreateDropoutDescriptor cudnnDropoutGetStatesSize cudnnDropoutGetReserveSpaceSize cudnnSetDropoutDescriptor
    cudnnRestoreDropoutDescriptor cudnnGetDropoutDescriptor cudnnDropoutForward cudnnDropoutBackward
    cudnnDestroyDropoutDescriptor
""")
def dropout(s: Session) -> None:
    c = s.c
    shape = (4, 8, 16, 16)
    chance, seed = 0.25, 1234567890123
    drop = s.new("DropoutDescriptor")
    desc, size, reserve = s.tensor(shape), c_size_t(), c_size_t()
    c.cudnnDropoutGetStatesSize(s.handle, byref(size))
    c.cudnnDropoutGetReserveSpaceSize(desc, byref(reserve))
    states, mask = s.workspace(size.value), s.workspace(reserve.value)
    c.cudnnSetDropoutDescriptor(drop, s.handle, chance, states, size.value, seed)
    first = states.copy()
    probability, place, found = c_float(), c_void_p(), ctypes.c_ulonglong()
    c.cudnnGetDropoutDescriptor(drop, s.handle, byref(probability), byref(place), byref(found))
    assert (probability.value, place.value, found.value) == (chance, states.data.ptr, seed)

    values, slopes = s.normal(*shape), s.normal(*shape)
    x, y, dx = s.gpu(values), s.nan(*shape), s.nan(*shape)
    c.cudnnDropoutForward(s.handle, drop, desc, x, desc, y, mask, reserve.value)
    kept = y.get() != 0
    assert abs(kept.mean() - (1 - chance)) < 0.02  # four standard deviations
    close(y, kept * values / (1 - chance))
    c.cudnnDropoutBackward(s.handle, drop, desc, s.gpu(slopes), desc, dx, mask, reserve.value)
    close(dx, kept * slopes / (1 - chance))

    # The next numbers are others; the first ones come again from the states of the beginning.
    c.cudnnDropoutForward(s.handle, drop, desc, x, desc, y, mask, reserve.value)
    assert ((y.get() != 0) != kept).any()
    c.cudnnRestoreDropoutDescriptor(drop, s.handle, chance, first, size.value, seed)
    c.cudnnDropoutForward(s.handle, drop, desc, x, desc, y, mask, reserve.value)
    np.testing.assert_array_equal(y.get() != 0, kept)


# --- convolutions ---------------------------------------------------------------------------------------------------


def convolve(x: np.ndarray, w: np.ndarray, padding: int, stride: int) -> np.ndarray:
    return np.einsum("ncpqrs,kcrs->nkpq", windows(x, w.shape[2], padding, stride), w)


def convolve_backward(dy: np.ndarray, w: np.ndarray, shape: tuple[int, ...], padding: int, stride: int) -> np.ndarray:
    """The gradient by x, which has this shape."""
    dx = np.zeros((*shape[:2], shape[2] + 2 * padding, shape[3] + 2 * padding))
    for r in range(w.shape[2]):
        for t in range(w.shape[3]):
            rows = slice(r, r + stride * dy.shape[2], stride)
            columns = slice(t, t + stride * dy.shape[3], stride)
            dx[:, :, rows, columns] += np.einsum("nkpq,kc->ncpq", dy, w[:, :, r, t])
    return dx[:, :, padding : padding + shape[2], padding : padding + shape[3]]


class Convolution:
    """A strided convolution: random arguments, on the GPU, and its descriptors."""

    padding, stride = 1, 2

    def __init__(self, s: Session) -> None:
        c = s.c
        self.values, self.weights = s.normal(2, 4, 9, 8), s.normal(6, 4, 3, 3)
        self.expected = convolve(self.values, self.weights, self.padding, self.stride)
        self.slopes = s.normal(*self.expected.shape)
        self.x, self.w, self.dy = s.gpu(self.values), s.gpu(self.weights), s.gpu(self.slopes)
        self.x_desc, self.w_desc = s.tensor(self.values.shape), s.filter(self.weights.shape)
        self.y_desc = s.tensor(self.expected.shape)
        self.desc = s.new("ConvolutionDescriptor")
        c.cudnnSetConvolution2dDescriptor(
            self.desc, self.padding, self.padding, self.stride, self.stride, 1, 1,
            c.CUDNN_CROSS_CORRELATION, c.CUDNN_DATA_FLOAT,
        )  # fmt: skip
        c.cudnnSetConvolutionMathType(self.desc, c.CUDNN_FMA_MATH)


FIND_WORKSPACE = 32 << 20  # the room that Find gets to try algorithms in


def check_algorithms(c: Any, name: str, *arguments: Any) -> int:
    """Calls a function that ranks algorithms, checks that they are ranked, and gives the best one that works."""
    kind = {"Forward": "Fwd", "BackwardData": "BwdData", "BackwardFilter": "BwdFilter"}
    direction = next(kind[word] for word in sorted(kind, key=len, reverse=True) if word in name)
    results = (getattr(c, f"cudnnConvolution{direction}AlgoPerf_t") * 16)()
    returned = c_int()
    split = next((i for i, argument in enumerate(arguments) if argument is ...), len(arguments))
    getattr(c, name)(*arguments[:split], len(results), byref(returned), results, *arguments[split + 1 :])
    usable = [result for result in results[: returned.value] if result.status == 0]
    assert usable
    if "Find" in name:
        times = [result.time for result in usable]
        assert times == sorted(times)
        assert times[0] > 0
    return int(usable[0].algo)


@family("""
    cudnnCreateConvolutionDescriptor cudnnSetConvolutionMathType cudnnGetConvolutionMathType
    cudnnSetConvolutionGroupCount cudnnGetConvolutionGroupCount cudnnSetConvolutionReorderType
    cudnnGetConvolutionReorderType cudnnSetConvolution2dDescriptor cudnnGetConvolution2dDescriptor
    cudnnSetConvolutionNdDescriptor cudnnGetConvolutionNdDescriptor cudnnGetConvolution2dForwardOutputDim
    cudnnGetConvolutionNdForwardOutputDim cudnnDestroyConvolutionDescriptor
""")
def convolution_descriptors(s: Session) -> None:
    c = s.c
    convolution = s.new("ConvolutionDescriptor")
    settings = [1, 2, 3, 2, 2, 1, c.CUDNN_CONVOLUTION, c.CUDNN_DATA_FLOAT]
    c.cudnnSetConvolution2dDescriptor(convolution, *settings)
    found = ints(8)
    c.cudnnGetConvolution2dDescriptor(convolution, *(byref(number) for number in found))
    assert read(found) == settings
    number = c_int()
    c.cudnnSetConvolutionMathType(convolution, c.CUDNN_FMA_MATH)
    c.cudnnGetConvolutionMathType(convolution, byref(number))
    assert number.value == c.CUDNN_FMA_MATH
    c.cudnnSetConvolutionReorderType(convolution, c.CUDNN_NO_REORDER)
    c.cudnnGetConvolutionReorderType(convolution, byref(number))
    assert number.value == c.CUDNN_NO_REORDER
    c.cudnnSetConvolutionGroupCount(convolution, 2)
    c.cudnnGetConvolutionGroupCount(convolution, byref(number))
    assert number.value == 2
    x, w = s.tensor((2, 8, 20, 30)), s.filter((6, 4, 3, 5))
    shape, each = (c_int * 4)(), ints(4)
    c.cudnnGetConvolution2dForwardOutputDim(convolution, x, w, *(byref(number) for number in each))
    c.cudnnGetConvolutionNdForwardOutputDim(convolution, x, w, 4, shape)
    assert list(shape) == read(each) == [2, 6, (20 + 2 - 5) // 3 + 1, (30 + 4 - 5) // 2 + 1]

    count, mode, data_type = ints(3)
    paddings, strides, dilations = (c_int * 3)(), (c_int * 3)(), (c_int * 3)()
    how = (c.CUDNN_CROSS_CORRELATION, c.CUDNN_DATA_DOUBLE)
    c.cudnnSetConvolutionNdDescriptor(convolution, 3, [0, 1, 2], [1, 2, 3], [3, 2, 1], *how)
    c.cudnnGetConvolutionNdDescriptor(
        convolution, 3, byref(count), paddings, strides, dilations, byref(mode), byref(data_type)
    )
    assert (count.value, mode.value, data_type.value) == (3, *how)
    assert (list(paddings), list(strides), list(dilations)) == ([0, 1, 2], [1, 2, 3], [3, 2, 1])


@family("""
    cudnnGetConvolutionForwardAlgorithmMaxCount cudnnGetConvolutionForwardAlgorithm_v7
    cudnnFindConvolutionForwardAlgorithm cudnnFindConvolutionForwardAlgorithmEx cudnnGetConvolutionForwardWorkspaceSize
    cudnnConvolutionForward cudnnConvolutionBiasActivationForward
""")
def convolution_forward(s: Session) -> None:
    c = s.c
    k = Convolution(s)
    count = c_int()
    c.cudnnGetConvolutionForwardAlgorithmMaxCount(s.handle, byref(count))
    assert count.value > 0
    y = s.nan(*k.expected.shape)
    descriptors = (k.x_desc, k.w_desc, k.desc, k.y_desc)
    check_algorithms(c, "cudnnGetConvolutionForwardAlgorithm_v7", s.handle, *descriptors)
    check_algorithms(c, "cudnnFindConvolutionForwardAlgorithm", s.handle, *descriptors)
    check_algorithms(
        c, "cudnnFindConvolutionForwardAlgorithmEx",
        s.handle, k.x_desc, k.x, k.w_desc, k.w, k.desc, k.y_desc, y, ..., s.workspace(FIND_WORKSPACE), FIND_WORKSPACE,
    )  # fmt: skip

    algorithm = c.CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM
    size = c_size_t()
    c.cudnnGetConvolutionForwardWorkspaceSize(s.handle, *descriptors, algorithm, byref(size))
    run = (k.desc, algorithm, s.workspace(size.value), size.value)
    prior = s.normal(*k.expected.shape)
    y = s.gpu(prior)
    c.cudnnConvolutionForward(s.handle, 1.5, k.x_desc, k.x, k.w_desc, k.w, *run, 0.5, k.y_desc, y)
    close(y, 1.5 * k.expected + 0.5 * prior, APPROXIMATE)

    act = s.new("ActivationDescriptor")
    c.cudnnSetActivationDescriptor(act, c.CUDNN_ACTIVATION_RELU, c.CUDNN_NOT_PROPAGATE_NAN, 0.0)
    bias = s.normal(1, 6, 1, 1)
    y = s.nan(*k.expected.shape)
    c.cudnnConvolutionBiasActivationForward(
        s.handle, 1.0, k.x_desc, k.x, k.w_desc, k.w, *run, 0.5, k.y_desc, s.gpu(prior),
        s.tensor(bias.shape), s.gpu(bias), act, k.y_desc, y,
    )  # fmt: skip
    close(y, np.maximum(k.expected + 0.5 * prior + bias, 0), APPROXIMATE)


@family("cudnnIm2Col")
def im2col(s: Session) -> None:
    c = s.c
    k = Convolution(s)
    every = windows(k.values, 3, k.padding, k.stride)  # (N, C, P, Q, R, S)
    columns = s.nan(2 * every.size)
    c.cudnnIm2Col(s.handle, k.x_desc, k.x, k.w_desc, k.desc, columns)
    found = columns.get()
    assert np.isnan(found[every.size :]).all()
    # The headers do not say what a row is: a tap of the filter, of all images or of each, or a place of the output.
    orders = ((1, 4, 5, 0, 2, 3), (0, 1, 4, 5, 2, 3), (0, 2, 3, 1, 4, 5))
    expected = [every.transpose(order).ravel().astype(np.float32) for order in orders]
    assert any(np.array_equal(found[: every.size], order) for order in expected)


@family("cudnnReorderFilterAndBias")
def reorder(s: Session) -> None:
    """It permutes filters for the tensor cores of one GPU; what stays true on all is which numbers there are."""
    c = s.c
    filters = s.rng.integers(-128, 128, (32, 1, 3, 3, 32)).astype(np.int8)  # the last dimension is 32 channels
    bias = s.normal(32)
    desc = s.filter((32, 32, 3, 3), "NCHW_VECT_C", "INT8x32")
    w, b = s.gpu(filters, np.int8), s.gpu(bias)
    moved, moved_bias = s.gpu(np.zeros_like(filters), np.int8), s.nan(32)
    c.cudnnReorderFilterAndBias(s.handle, desc, c.CUDNN_DEFAULT_REORDER, w, moved, 1, b, moved_bias)
    np.testing.assert_array_equal(np.sort(moved.get(), None), np.sort(filters, None))
    np.testing.assert_array_equal(np.sort(moved_bias.get()), np.sort(bias.astype(np.float32)))


@family("""
    cudnnGetConvolutionBackwardDataAlgorithmMaxCount cudnnFindConvolutionBackwardDataAlgorithm
    cudnnFindConvolutionBackwardDataAlgorithmEx cudnnGetConvolutionBackwardDataAlgorithm_v7
    cudnnGetConvolutionBackwardDataWorkspaceSize cudnnConvolutionBackwardData
""")
def convolution_backward_data(s: Session) -> None:
    c = s.c
    k = Convolution(s)
    count = c_int()
    c.cudnnGetConvolutionBackwardDataAlgorithmMaxCount(s.handle, byref(count))
    assert count.value > 0
    dx = s.nan(*k.values.shape)
    descriptors = (k.w_desc, k.y_desc, k.desc, k.x_desc)
    algorithm = check_algorithms(c, "cudnnGetConvolutionBackwardDataAlgorithm_v7", s.handle, *descriptors)
    check_algorithms(c, "cudnnFindConvolutionBackwardDataAlgorithm", s.handle, *descriptors)
    check_algorithms(
        c, "cudnnFindConvolutionBackwardDataAlgorithmEx",
        s.handle, k.w_desc, k.w, k.y_desc, k.dy, k.desc, k.x_desc, dx, ..., s.workspace(FIND_WORKSPACE), FIND_WORKSPACE,
    )  # fmt: skip

    size = c_size_t()
    c.cudnnGetConvolutionBackwardDataWorkspaceSize(s.handle, *descriptors, algorithm, byref(size))
    prior = s.normal(*k.values.shape)
    dx = s.gpu(prior)
    c.cudnnConvolutionBackwardData(
        s.handle, 1.5, k.w_desc, k.w, k.y_desc, k.dy, k.desc, algorithm, s.workspace(size.value), size.value,
        0.5, k.x_desc, dx,
    )  # fmt: skip
    expected = convolve_backward(k.slopes, k.weights, k.values.shape, k.padding, k.stride)
    close(dx, 1.5 * expected + 0.5 * prior, APPROXIMATE)


@family("cudnnGetFoldedConvBackwardDataDescriptors")
def folded_backward_data(s: Session) -> None:
    """A strided gradient by x as one of stride 1: fold the filter, pad dy, run it, unfold dx."""
    c = s.c
    values, weights = s.normal(2, 3, 8, 8), s.normal(4, 3, 3, 3)
    slopes = s.normal(*convolve(values, weights, 1, 2).shape)
    w_desc, dy_desc, dx_desc = s.filter(weights.shape), s.tensor(slopes.shape), s.tensor(values.shape)
    plain, convolution = s.new("ConvolutionDescriptor"), s.new("ConvolutionDescriptor")
    c.cudnnSetConvolution2dDescriptor(plain, 1, 1, 2, 2, 1, 1, c.CUDNN_CROSS_CORRELATION, c.CUDNN_DATA_FLOAT)
    c.cudnnSetConvolutionMathType(plain, c.CUDNN_FMA_MATH)
    folded_w = s.new("FilterDescriptor")
    padded_dy, folded_dx = s.new("TensorDescriptor"), s.new("TensorDescriptor")
    fold_w, pad_dy, fold_dx, unfold_dx = (s.new("TensorTransformDescriptor") for _ in range(4))
    c.cudnnGetFoldedConvBackwardDataDescriptors(
        s.handle, w_desc, dy_desc, plain, dx_desc, c.CUDNN_TENSOR_NCHW,
        folded_w, padded_dy, convolution, folded_dx, fold_w, pad_dy, fold_dx, unfold_dx,
    )  # fmt: skip
    c.cudnnSetConvolutionMathType(convolution, c.CUDNN_FMA_MATH)
    buffers = []
    for name, descriptor in (("Filter", folded_w), ("Tensor", padded_dy), ("Tensor", folded_dx)):
        size = c_size_t()
        getattr(c, f"cudnnGet{name}SizeInBytes")(descriptor, byref(size))
        buffers.append(s.gpu(np.zeros(size.value // 4)))
    c.cudnnTransformFilter(s.handle, fold_w, 1.0, w_desc, s.gpu(weights), 0.0, folded_w, buffers[0])
    c.cudnnTransformTensorEx(s.handle, pad_dy, 1.0, dy_desc, s.gpu(slopes), 0.0, padded_dy, buffers[1])
    descriptors = (folded_w, padded_dy, convolution, folded_dx)
    algorithm = check_algorithms(c, "cudnnGetConvolutionBackwardDataAlgorithm_v7", s.handle, *descriptors)
    size = c_size_t()
    c.cudnnGetConvolutionBackwardDataWorkspaceSize(s.handle, *descriptors, algorithm, byref(size))
    c.cudnnConvolutionBackwardData(
        s.handle, 1.0, folded_w, buffers[0], padded_dy, buffers[1], convolution, algorithm,
        s.workspace(size.value), size.value, 0.0, folded_dx, buffers[2],
    )  # fmt: skip
    dx = s.nan(*values.shape)
    c.cudnnTransformTensorEx(s.handle, unfold_dx, 1.0, folded_dx, buffers[2], 0.0, dx_desc, dx)
    close(dx, convolve_backward(slopes, weights, values.shape, 1, 2), APPROXIMATE)


@family("""
    cudnnGetConvolutionBackwardFilterAlgorithmMaxCount cudnnFindConvolutionBackwardFilterAlgorithm
    cudnnFindConvolutionBackwardFilterAlgorithmEx cudnnGetConvolutionBackwardFilterAlgorithm_v7
    cudnnGetConvolutionBackwardFilterWorkspaceSize cudnnConvolutionBackwardFilter cudnnConvolutionBackwardBias
""")
def convolution_backward_filter(s: Session) -> None:
    c = s.c
    k = Convolution(s)
    count = c_int()
    c.cudnnGetConvolutionBackwardFilterAlgorithmMaxCount(s.handle, byref(count))
    assert count.value > 0
    dw = s.nan(*k.weights.shape)
    descriptors = (k.x_desc, k.y_desc, k.desc, k.w_desc)
    algorithm = check_algorithms(c, "cudnnGetConvolutionBackwardFilterAlgorithm_v7", s.handle, *descriptors)
    check_algorithms(c, "cudnnFindConvolutionBackwardFilterAlgorithm", s.handle, *descriptors)
    check_algorithms(
        c, "cudnnFindConvolutionBackwardFilterAlgorithmEx",
        s.handle, k.x_desc, k.x, k.y_desc, k.dy, k.desc, k.w_desc, dw, ..., s.workspace(FIND_WORKSPACE), FIND_WORKSPACE,
    )  # fmt: skip

    size = c_size_t()
    c.cudnnGetConvolutionBackwardFilterWorkspaceSize(s.handle, *descriptors, algorithm, byref(size))
    prior = s.normal(*k.weights.shape)
    dw = s.gpu(prior)
    c.cudnnConvolutionBackwardFilter(
        s.handle, 1.5, k.x_desc, k.x, k.y_desc, k.dy, k.desc, algorithm, s.workspace(size.value), size.value,
        0.5, k.w_desc, dw,
    )  # fmt: skip
    expected = np.einsum("ncpqrs,nkpq->kcrs", windows(k.values, 3, k.padding, k.stride), k.slopes)
    close(dw, 1.5 * expected + 0.5 * prior, APPROXIMATE)

    prior = s.normal(1, 6, 1, 1)
    db = s.gpu(prior)
    c.cudnnConvolutionBackwardBias(s.handle, 1.5, k.y_desc, k.dy, 0.5, s.tensor(prior.shape), db)
    close(db, 1.5 * k.slopes.sum((0, 2, 3), keepdims=True) + 0.5 * prior)


# --- fused operations -----------------------------------------------------------------------------------------------


@family("""
    cudnnCreateFusedOpsConstParamPack cudnnDestroyFusedOpsConstParamPack cudnnSetFusedOpsConstParamPackAttribute
    cudnnGetFusedOpsConstParamPackAttribute cudnnCreateFusedOpsVariantParamPack cudnnDestroyFusedOpsVariantParamPack
    cudnnSetFusedOpsVariantParamPackAttribute cudnnGetFusedOpsVariantParamPackAttribute cudnnCreateFusedOpsPlan
    cudnnDestroyFusedOpsPlan cudnnMakeFusedOpsPlan cudnnFusedOpsExecute
""")
def fused_operations(s: Session) -> None:
    """The end of a batch normalization: statistics and an equivalent scale and bias out of sums and sums of squares."""
    c = s.c
    op = c.CUDNN_FUSED_BN_FINALIZE_STATISTICS_TRAINING
    count, channels = 32, 32
    values = s.normal(count, channels)
    sums, squares = values.sum(0).astype(np.float32), (values**2).sum(0).astype(np.float32)
    scale, bias = 1 + 0.25 * s.normal(channels), s.normal(channels)
    running_mean, running_variance = s.normal(channels), 1 + s.normal(channels) ** 2
    arrays = {
        "YSUM": s.gpu(sums),
        "YSQSUM": s.gpu(squares),
        "BN_SCALE": s.gpu(scale),
        "BN_BIAS": s.gpu(bias),
        "BN_RUNNING_MEAN": s.gpu(running_mean),
        "BN_RUNNING_VAR": s.gpu(running_variance),
        "BN_SAVED_MEAN": s.nan(channels),
        "BN_SAVED_INVSTD": s.nan(channels),
        "BN_EQSCALE": s.nan(channels, dtype=np.float16),
        "BN_EQBIAS": s.nan(channels, dtype=np.float16),
    }
    statistics = s.tensor((1, channels, 1, 1), "NHWC")
    equivalent = s.tensor((1, channels, 1, 1), "NHWC", "HALF")
    constants = s.new("FusedOpsConstParamPack", op)
    c.cudnnSetFusedOpsConstParamPackAttribute(constants, c.CUDNN_PARAM_BN_MODE, byref(c_int(c.CUDNN_BATCHNORM_SPATIAL)))
    c.cudnnSetFusedOpsConstParamPackAttribute(constants, c.CUDNN_PARAM_YSTATS_DESC, statistics)
    c.cudnnSetFusedOpsConstParamPackAttribute(constants, c.CUDNN_PARAM_BN_SCALEBIAS_MEANVAR_DESC, statistics)
    c.cudnnSetFusedOpsConstParamPackAttribute(constants, c.CUDNN_PARAM_BN_EQSCALEBIAS_DESC, equivalent)
    for name in arrays:
        label = c.cudnnFusedOpsConstParamLabel_t[f"CUDNN_PARAM_{name}_PLACEHOLDER"]
        c.cudnnSetFusedOpsConstParamPackAttribute(constants, label, byref(c_int(c.CUDNN_PTR_16B_ALIGNED)))
    back, is_null, found = s.new("TensorDescriptor"), c_int(-1), ints(9)
    c.cudnnGetFusedOpsConstParamPackAttribute(constants, c.CUDNN_PARAM_YSTATS_DESC, back, byref(is_null))
    c.cudnnGetTensor4dDescriptor(back, *(byref(number) for number in found))
    assert (is_null.value, read(found)[:5]) == (0, [c.CUDNN_DATA_FLOAT, 1, channels, 1, 1])

    plan, size = s.new("FusedOpsPlan", op), c_size_t()
    c.cudnnMakeFusedOpsPlan(s.handle, plan, constants, byref(size))
    variants = s.new("FusedOpsVariantParamPack", op)
    arrays["WORKSPACE"] = s.workspace(size.value)
    for name, array in arrays.items():
        label = c.cudnnFusedOpsVariantParamLabel_t[f"CUDNN_PTR_{name}"]
        c.cudnnSetFusedOpsVariantParamPackAttribute(variants, label, array)
    for label, number in (
        (c.CUDNN_SCALAR_SIZE_T_WORKSPACE_SIZE_IN_BYTES, size),
        (c.CUDNN_SCALAR_INT64_T_BN_ACCUMULATION_COUNT, c_int64(count)),
        (c.CUDNN_SCALAR_DOUBLE_BN_EXP_AVG_FACTOR, c_double(FACTOR)),
        (c.CUDNN_SCALAR_DOUBLE_BN_EPSILON, c_double(EPSILON)),
    ):
        c.cudnnSetFusedOpsVariantParamPackAttribute(variants, label, byref(number))
    place = c_void_p()
    c.cudnnGetFusedOpsVariantParamPackAttribute(variants, c.CUDNN_PTR_BN_EQBIAS, byref(place))
    assert place.value == arrays["BN_EQBIAS"].data.ptr

    c.cudnnFusedOpsExecute(s.handle, plan, variants)
    mean = sums.astype(np.float64) / count
    variance = squares.astype(np.float64) / count - mean**2
    inverse = 1 / np.sqrt(variance + EPSILON)
    close(arrays["BN_SAVED_MEAN"], mean)
    close(arrays["BN_SAVED_INVSTD"], inverse)
    close(arrays["BN_RUNNING_MEAN"], (1 - FACTOR) * running_mean + FACTOR * mean)
    close(arrays["BN_RUNNING_VAR"], (1 - FACTOR) * running_variance + FACTOR * variance * count / (count - 1))
    close(arrays["BN_EQSCALE"], scale * inverse, 2e-3)
    close(arrays["BN_EQBIAS"], bias - mean * scale * inverse, 2e-3)
