"""What cuDNN says to mistakes, without a GPU, and that it arrives whole: status, name and text, on the right thread."""

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from ctypes import byref, c_int, c_void_p
from typing import Any

import numpy as np
import pytest

from flcuda import cudnn, device
from flcuda.cudnn import library, resources
from flcuda.errors import CudnnError, CudnnNotSupportedError

pytestmark = pytest.mark.skipif(
    not any(place.usable for place in library.search_places()), reason="cuDNN is not installed"
)
FLOAT, NCHW = cudnn.CUDNN_DATA_FLOAT, cudnn.CUDNN_TENSOR_NCHW


@pytest.fixture
def tensor() -> resources.TensorDescriptor:
    return resources.TensorDescriptor((2, 3, 8, 8), (192, 64, 8, 1), "float32")


@pytest.fixture
def convolution() -> resources.ConvolutionDescriptor:
    return resources.ConvolutionDescriptor((1, 1), (1, 1), (1, 1), 1, "float32", "fma")


def failure(call: Callable[[], object]) -> CudnnError:
    with pytest.raises(CudnnError) as caught:
        call()
    return caught.value


def test_empty_batch_names_the_dimensions(tensor: resources.TensorDescriptor) -> None:
    error = failure(lambda: cudnn.cudnnSetTensor4dDescriptor(tensor, NCHW, FLOAT, 0, 3, 8, 8))
    assert (error.function, error.status) == ("cudnnSetTensor4dDescriptor", 2000)
    assert error.name == "CUDNN_STATUS_BAD_PARAM"
    assert "n <= 0" in error.text
    assert str(error) == f"cudnnSetTensor4dDescriptor: CUDNN_STATUS_BAD_PARAM (2000): {error.text}"


def test_too_many_elements_have_no_text(tensor: resources.TensorDescriptor) -> None:
    error = failure(lambda: cudnn.cudnnSetTensor4dDescriptor(tensor, NCHW, FLOAT, 4096, 1024, 32, 32))
    assert type(error) is CudnnNotSupportedError
    assert (error.status, error.text) == (3000, "")
    assert "cuDNN gives no further text" in str(error)


def test_what_cudnn_takes_silently(tensor: resources.TensorDescriptor) -> None:
    """Why our own owners check strides: none of these raises."""
    cudnn.cudnnSetTensor4dDescriptorEx(tensor, FLOAT, 2, 3, 8, 8, 1, 1, 1, 1)
    cudnn.cudnnSetTensorNdDescriptor(tensor, FLOAT, 4, (2, 3, 8, 8), (192, 64, -8, 1))


def test_stride_of_zero(tensor: resources.TensorDescriptor) -> None:
    error = failure(lambda: cudnn.cudnnSetTensorNdDescriptor(tensor, FLOAT, 4, (2, 3, 8, 8), (192, 64, 0, 1)))
    assert error.status == 2000


def test_nine_dimensions(tensor: resources.TensorDescriptor) -> None:
    error = failure(lambda: cudnn.cudnnSetTensorNdDescriptor(tensor, FLOAT, 9, (1,) * 9, (1,) * 9))
    assert error.status == 3000


@pytest.mark.parametrize("code", range(10))
def test_dtype_codes_of_the_legacy_descriptors(code: int, tensor: resources.TensorDescriptor) -> None:
    cudnn.cudnnSetTensorNdDescriptor(tensor, cudnn.cudnnDataType_t(code), 4, (2, 32, 8, 8), (2048, 64, 8, 1))


@pytest.mark.parametrize("code", [code for code in cudnn.cudnnDataType_t if code > 9])
def test_dtype_codes_of_the_graph_api_alone(code: Any, tensor: resources.TensorDescriptor) -> None:
    error = failure(lambda: cudnn.cudnnSetTensorNdDescriptor(tensor, code, 4, (2, 32, 8, 8), (2048, 64, 8, 1)))
    assert error.status // 1000 in (2, 3)


@pytest.mark.parametrize(
    ("padding", "stride", "dilation", "words"),
    [
        ((-1, 1), (1, 1), (1, 1), "pad"),
        ((1, 1), (0, 1), (1, 1), "tride"),
        ((1, 1), (1, 1), (1, 0), "ilation"),
    ],
)
def test_bad_geometry_has_a_precise_text(
    convolution: resources.ConvolutionDescriptor, padding: Any, stride: Any, dilation: Any, words: str
) -> None:
    error = failure(
        lambda: cudnn.cudnnSetConvolutionNdDescriptor(
            convolution, 2, padding, stride, dilation, cudnn.CUDNN_CROSS_CORRELATION, FLOAT
        )
    )
    assert error.status == 2000
    assert words in error.text


def test_no_groups(convolution: resources.ConvolutionDescriptor) -> None:
    error = failure(lambda: cudnn.cudnnSetConvolutionGroupCount(convolution, 0))
    assert error.status == 2000
    assert error.text


def test_new_convolution_descriptor_permits_tf32() -> None:
    """Why ConvolutionDescriptor wants its math said."""
    pointer, groups, math = cudnn.cudnnConvolutionDescriptor_t(), c_int(), c_int()
    cudnn.cudnnCreateConvolutionDescriptor(byref(pointer))
    try:
        cudnn.cudnnGetConvolutionGroupCount(pointer, byref(groups))
        cudnn.cudnnGetConvolutionMathType(pointer, byref(math))
    finally:
        cudnn.cudnnDestroyConvolutionDescriptor(pointer)
    assert (groups.value, math.value) == (1, cudnn.CUDNN_DEFAULT_MATH)


def output(convolution: Any, x: Any, w_shape: tuple[int, ...]) -> Any:
    def call() -> tuple[int, ...]:
        dims = (c_int * 4)()
        with resources.FilterDescriptor(w_shape, "float32") as w:
            cudnn.cudnnGetConvolutionNdForwardOutputDim(convolution, x, w, 4, dims)
        return tuple(dims)

    return call


def test_kernel_larger_than_the_input_has_no_text(tensor: Any, convolution: Any) -> None:
    error = failure(output(convolution, tensor, (4, 3, 11, 11)))
    assert (error.status, error.text) == (2000, "")


def test_channels_that_disagree_have_an_expression(tensor: Any, convolution: Any) -> None:
    error = failure(output(convolution, tensor, (4, 2, 3, 3)))
    assert error.status == 2000
    assert error.text


def test_filters_that_do_not_divide_pass() -> None:
    with (
        resources.TensorDescriptor((2, 4, 8, 8), (256, 64, 8, 1), "float32") as x,
        resources.ConvolutionDescriptor((1, 1), (1, 1), (1, 1), 2, "float32", "fma") as convolution,
    ):
        assert output(convolution, x, (5, 2, 3, 3))() == (2, 5, 8, 8)


def test_destroying_null_is_harmless_and_twice_is_an_abort() -> None:
    """Why owners close once."""
    cudnn.cudnnDestroyTensorDescriptor(None)
    code = (
        "from ctypes import byref\nfrom flcuda import cudnn\np = cudnn.cudnnTensorDescriptor_t()\n"
        "cudnn.cudnnCreateTensorDescriptor(byref(p))\n"
        "cudnn.cudnnDestroyTensorDescriptor(p)\ncudnn.cudnnDestroyTensorDescriptor(p)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode < 0


@pytest.mark.skipif(device.cuda_available(), reason="with a GPU there is nothing to fail")
def test_no_gpu_says_so() -> None:
    error = failure(lambda: cudnn.cudnnCreate(byref(cudnn.cudnnHandle_t())))
    assert (error.status, error.name) == (1001, "CUDNN_STATUS_NOT_INITIALIZED")
    assert "cudaGetDeviceCount" in error.text


def test_text_belongs_to_its_thread(tensor: resources.TensorDescriptor) -> None:
    """Two threads fail at once, each in its own way, hundreds of times."""
    barrier = threading.Barrier(2)
    wrong: list[str] = []

    def fail(call: Callable[[], object], words: str) -> None:
        barrier.wait()
        for _ in range(500):
            try:
                call()
            except CudnnError as error:
                if words not in error.text:
                    wrong.append(error.text)

    own = resources.ConvolutionDescriptor((1, 1), (1, 1), (1, 1), 1, "float32", "fma")
    first = threading.Thread(
        target=fail, args=(lambda: cudnn.cudnnSetTensor4dDescriptor(tensor, NCHW, FLOAT, 0, 3, 8, 8), "n <= 0")
    )
    second = threading.Thread(target=fail, args=(lambda: cudnn.cudnnSetConvolutionGroupCount(own, 0), "roup"))
    for thread in (first, second):
        thread.start()
    for thread in (first, second):
        thread.join()
    assert wrong == []


def test_text_is_not_left_over(tensor: Any, convolution: Any) -> None:
    """A failure without a text of its own does not get the one of the failure before."""
    assert failure(lambda: cudnn.cudnnSetTensor4dDescriptor(tensor, NCHW, FLOAT, 0, 3, 8, 8)).text
    assert failure(output(convolution, tensor, (4, 3, 11, 11))).text == ""


def test_real_error_pickles(tensor: resources.TensorDescriptor) -> None:
    error = failure(lambda: cudnn.cudnnSetTensor4dDescriptor(tensor, NCHW, FLOAT, 0, 3, 8, 8))
    error.add_note("x (0, 3, 8, 8) float32")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.__notes__, vars(copy)) == (str(error), error.__notes__, vars(error))


def test_every_status_of_the_headers_has_its_name() -> None:
    older = library.load().version < cudnn.CUDNN_VERSION
    for status in cudnn.cudnnStatus_t:
        name = library._status_name(int(status))
        assert name == status.name or (older and name == "")
    assert library._status_name(2000) == "CUDNN_STATUS_BAD_PARAM"
    assert library._status_name(9999) == ""


def test_unknown_function_of_this_cudnn() -> None:
    @library.bind(c_int, c_void_p, status=True, since="99.0.0")
    def cudnnFromTheFuture(handle: Any) -> None: ...

    error = failure(lambda: cudnnFromTheFuture(None))
    assert type(error) is CudnnNotSupportedError
    assert "99.0.0" in error.text
    assert library.load().version_text in error.text


def test_bad_argument_reaches_no_c_code(tensor: resources.TensorDescriptor) -> None:
    with pytest.raises((TypeError, ValueError), match="dimA"):
        cudnn.cudnnSetTensorNdDescriptor(tensor, FLOAT, 4, (2, 3, 8, 2**31), (192, 64, 8, 1))
    with pytest.raises(TypeError, match="strideA"):
        cudnn.cudnnSetTensorNdDescriptor(tensor, FLOAT, 4, (2, 3, 8, 8), (192, 64, 8, 1.5))
    with pytest.raises(TypeError, match="dataType"):
        cudnn.cudnnSetTensorNdDescriptor(tensor, NCHW, 4, (2, 3, 8, 8), (192, 64, 8, 1))
    assert np.array_equal(tensor.shape, (2, 3, 8, 8))
