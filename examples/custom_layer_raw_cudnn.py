"""A convolution by the raw calls of cuDNN's C API on CuPy arrays: the names are C's, every status is checked.

Needs an NVIDIA GPU: pip install 'flcuda[cuda12]'.
"""

import ctypes

from flcuda import cudnn, device

if not device.cuda_available():
    raise SystemExit("this example needs an NVIDIA GPU, and there is none here")

import cupy as cp
import numpy as np

values = np.random.default_rng(0)
x = cp.asarray(values.normal(size=(8, 3, 32, 32)).astype(np.float32))
w = cp.asarray(values.normal(size=(16, 3, 3, 3)).astype(np.float32))

handle = cudnn.cudnnHandle_t()
x_desc, y_desc = cudnn.cudnnTensorDescriptor_t(), cudnn.cudnnTensorDescriptor_t()
w_desc, conv_desc = cudnn.cudnnFilterDescriptor_t(), cudnn.cudnnConvolutionDescriptor_t()
cudnn.cudnnCreate(ctypes.byref(handle))
cudnn.cudnnSetStream(handle, cp.cuda.get_current_stream().ptr)
cudnn.cudnnCreateTensorDescriptor(ctypes.byref(x_desc))
cudnn.cudnnCreateTensorDescriptor(ctypes.byref(y_desc))
cudnn.cudnnCreateFilterDescriptor(ctypes.byref(w_desc))
cudnn.cudnnCreateConvolutionDescriptor(ctypes.byref(conv_desc))

cudnn.cudnnSetTensor4dDescriptor(x_desc, cudnn.CUDNN_TENSOR_NCHW, cudnn.CUDNN_DATA_FLOAT, *x.shape)
cudnn.cudnnSetFilter4dDescriptor(w_desc, cudnn.CUDNN_DATA_FLOAT, cudnn.CUDNN_TENSOR_NCHW, *w.shape)
cudnn.cudnnSetConvolution2dDescriptor(
    conv_desc, 1, 1, 1, 1, 1, 1, cudnn.CUDNN_CROSS_CORRELATION, cudnn.CUDNN_DATA_FLOAT
)
shape = (ctypes.c_int * 4)()
cudnn.cudnnGetConvolutionNdForwardOutputDim(conv_desc, x_desc, w_desc, 4, shape)
y = cp.empty(tuple(shape), np.float32)
cudnn.cudnnSetTensor4dDescriptor(y_desc, cudnn.CUDNN_TENSOR_NCHW, cudnn.CUDNN_DATA_FLOAT, *y.shape)

algo = cudnn.CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM
size = ctypes.c_size_t()
cudnn.cudnnGetConvolutionForwardWorkspaceSize(handle, x_desc, w_desc, conv_desc, y_desc, algo, ctypes.byref(size))
workspace = cp.empty(size.value, np.uint8)
cudnn.cudnnConvolutionForward(handle, 1.0, x_desc, x, w_desc, w, conv_desc, algo, workspace, size.value, 0.0, y_desc, y)

# One output by hand: the middle of the first image, first filter.
expected = float((x[0, :, 15:18, 15:18].astype(np.float64) * w[0]).sum())
print(f"y is {y.shape}; y[0, 0, 16, 16] = {float(y[0, 0, 16, 16]):.5f}, by hand {expected:.5f}")

cudnn.cudnnDestroyConvolutionDescriptor(conv_desc)
cudnn.cudnnDestroyFilterDescriptor(w_desc)
cudnn.cudnnDestroyTensorDescriptor(x_desc)
cudnn.cudnnDestroyTensorDescriptor(y_desc)
cudnn.cudnnDestroy(handle)
