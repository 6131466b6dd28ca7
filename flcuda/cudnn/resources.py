"""Owners of cuDNN's handles and descriptors.

An owner creates its object and destroys it: on ``close()`` (as often as you like), at the end of a ``with``, or when
nothing refers to it any more. It can be passed wherever a C function wants the pointer.

Note [exit]: nothing is destroyed when the interpreter exits. By then the CUDA context or the driver may be gone, a
destroy call would crash, and the process gives everything back anyway. So no finalizer runs at exit.

Streams, arrays and workspaces belong to CuPy and are borrowed.

Note [each call]: `handle` is a part of every call of a plan. So it asks CuPy for device and stream, compares, and does
no more; whether there is any CUDA was found out by the thread's first call.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np

from flcuda import device as devices
from flcuda.cudnn import bindings
from flcuda.cudnn import library as libraries
from flcuda.errors import NOT_SUPPORTED, CudnnError, cudnn_error

LARGEST = 2**31 - 1
"""The largest number of elements, and the largest stride, that a legacy descriptor holds."""

_DTYPES = {
    "float64": bindings.CUDNN_DATA_DOUBLE,
    "float32": bindings.CUDNN_DATA_FLOAT,
    "float16": bindings.CUDNN_DATA_HALF,
    "bfloat16": bindings.CUDNN_DATA_BFLOAT16,
    "int8": bindings.CUDNN_DATA_INT8,
    "uint8": bindings.CUDNN_DATA_UINT8,
}
_FORMATS = {"nchw": bindings.CUDNN_TENSOR_NCHW, "nhwc": bindings.CUDNN_TENSOR_NHWC}
MATH_TYPES = {
    "fma": bindings.CUDNN_FMA_MATH,
    "tensor_op": bindings.CUDNN_TENSOR_OP_MATH,
    "tensor_op_allow_conversion": bindings.CUDNN_TENSOR_OP_MATH_ALLOW_CONVERSION,
    "default": bindings.CUDNN_DEFAULT_MATH,
}
"""flcuda's words for cudnnMathType_t. Only "fma" forbids TF32 and other conversions of float32."""


def cudnn_dtype(dtype: str | np.dtype[Any] | type) -> bindings.cudnnDataType_t:
    """Gives cuDNN's code of a dtype.

    Args:
        dtype: "float16", "bfloat16", ... or a NumPy dtype.

    Returns:
        The code.

    Raises:
        ValueError: cuDNN's legacy descriptors have no such type.
    """
    try:
        name = devices.numpy_dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in _DTYPES:
        raise ValueError(f"dtype: {name!r} is none of {', '.join(_DTYPES)}")
    return _DTYPES[name]


class Owner:
    """Something of cuDNN's that is destroyed by its owner, once."""

    __slots__ = ("__weakref__", "_finalizer", "_pointer")

    def __init__(self, pointer: Any, destroy: Callable[[Any], None]) -> None:
        """Takes over a pointer.

        Args:
            pointer: what the create function gave.
            destroy: called with it once; must not refer to the owner.
        """
        self._pointer: Any = pointer  # None when closed
        self._finalizer = weakref.finalize(self, destroy, pointer)
        # See Note [exit].
        self._finalizer.atexit = False

    @property
    def _as_parameter_(self) -> Any:
        pointer = self._pointer
        if pointer is None:
            raise ValueError(f"this {type(self).__name__} is closed")
        return pointer

    @property
    def closed(self) -> bool:
        """Whether it has been destroyed."""
        return self._pointer is None

    def close(self) -> None:
        """Destroys it; does nothing the second time."""
        self._pointer = None
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} belongs to this process and cannot be copied or pickled")


# --- handles --------------------------------------------------------------------------------------------------------


def _destroy_handle(index: int, pointer: Any) -> None:
    module = devices.cupy()
    try:
        with module.cuda.Device(index):
            bindings.cudnnDestroy(pointer)
    except (CudnnError, module.cuda.runtime.CUDARuntimeError):
        # The device or driver is lost: its resources are gone, and there is nobody who could act on it.
        return


class Handle(Owner):
    """A cuDNN handle on one CUDA device, for one thread. Most code takes the shared one from ``handle()``.

    Args:
        device_index: the device; by default the current one.

    Raises:
        CudnnError: cuDNN cannot be initialised.
        DeviceNotFoundError: there is no such CUDA device.
        LibraryNotFoundError: there is no cuDNN.
    """

    __slots__ = ("_device", "_stream")

    def __init__(self, device_index: int | None = None) -> None:
        self._device = devices.resolve("cuda" if device_index is None else f"cuda:{device_index}")
        libraries.load().require_cublas()
        pointer = bindings.cudnnHandle_t()
        with self._device.use():
            bindings.cudnnCreate(ctypes.byref(pointer))
            index = self._device.index
            super().__init__(pointer, lambda pointer: _destroy_handle(index, pointer))
        self._stream = 0
        # The first handle is what makes cuDNN open its engines.
        libraries.load().verify()

    @property
    def device(self) -> devices.Device:
        """The CUDA device that it was created on."""
        return self._device

    @property
    def stream(self) -> int:
        """The cudaStream_t last set, 0 for the default stream; borrowed."""
        return self._stream

    def use_current_stream(self) -> None:
        """Sets CuPy's current stream on the handle when it differs from the last one set; that call is not free.

        Raises:
            ValueError: another device is current, or the stream is another device's.
        """
        cuda = devices.cupy().cuda
        self._follow(cuda, cuda.runtime.getDevice())

    def _follow(self, cuda: Any, current: int) -> None:
        if current != self._device.index:
            raise ValueError(
                f"the cuDNN handle is on {self._device} and the current device is cuda:{current}; "
                f"make {self._device} current first"
            )
        stream = cuda.get_current_stream()
        ptr = stream.ptr
        if ptr == self._stream:
            return
        owner = getattr(stream, "device_id", -1)
        if owner not in (-1, current):
            raise ValueError(f"the current stream is on cuda:{owner} and the cuDNN handle on {self._device}")
        bindings.cudnnSetStream(self, ptr)
        self._stream = ptr


class _ThreadHandles(threading.local):
    """This thread's handles by device. They go when the thread ends, on that thread."""

    def __init__(self) -> None:
        self.by_device: dict[int, Handle] = {}
        self.cuda: Any = None  # the module cupy.cuda, when there is any CUDA here


_handles = _ThreadHandles()


def handle(device_index: int | None = None) -> Handle:
    """Gives this thread's cuDNN handle on a device, with CuPy's current stream set on it.

    Args:
        device_index: the device; by default the current one. Another than the current one is refused, because the
            current stream would be a stream of the wrong device.

    Returns:
        The handle; made when there is none yet, kept until the thread ends. Borrowed: do not close it.

    Raises:
        CudnnError: cuDNN cannot be initialised.
        DeviceNotFoundError: there is no CUDA here.
        LibraryNotFoundError: there is no cuDNN.
        ValueError: the device is not the current one; names both.
    """
    mine = _handles
    cuda = mine.cuda
    if cuda is None:
        devices.resolve("cuda")  # Only the first call has to find out whether there is any CUDA here.
        cuda = mine.cuda = devices.cupy().cuda
    current = cuda.runtime.getDevice()
    if device_index is not None and device_index != current:
        raise ValueError(f"the cuDNN handle is to be on cuda:{device_index} and the current device is cuda:{current}")
    found = mine.by_device.get(current)
    if found is None or found._pointer is None:
        found = mine.by_device[current] = Handle(current)
    if cuda.get_current_stream().ptr != found._stream:
        found._follow(cuda, current)
    return found


# --- descriptors ----------------------------------------------------------------------------------------------------


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Says whether two elements of an array share memory.

    Args:
        shape: the dimensions, none of them 0.
        strides: the strides in elements, none negative.

    Returns:
        True when they do; also for an array too large to be sure of.
    """
    wide = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    reach = 0
    for stride, size in wide:
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    if wide[0][0] == 0 or int(np.prod([size for _, size in wide], dtype=object)) > 1 << 20:
        return True
    # Dimensions that interleave can still be disjoint: look at every offset.
    offsets = np.zeros(1, np.int64)
    for stride, size in wide:
        offsets = np.add.outer(offsets, np.arange(size, dtype=np.int64) * stride).ravel()
    return len(np.unique(offsets)) < len(offsets)


def _integers(name: str, values: Sequence[int], least: int) -> tuple[int, ...]:
    """Checks a list of whole numbers; names the argument and the value."""
    numbers = []
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name}: {value!r} is no whole number")
        number = value.__index__()
        if number < least:
            raise ValueError(f"{name}: {number} of {tuple(values)} is less than {least}")
        numbers.append(number)
    return tuple(numbers)


def _check_size(function: str, shape: tuple[int, ...], strides: tuple[int, ...] = ()) -> None:
    """Refuses what does not fit into legacy descriptors, which cuDNN does without a word."""
    if len(shape) > bindings.CUDNN_DIM_MAX:
        text = f"legacy descriptors have at most {bindings.CUDNN_DIM_MAX} dimensions; the shape is {shape}"
        raise cudnn_error(function, NOT_SUPPORTED, text, "CUDNN_STATUS_NOT_SUPPORTED")
    elements = int(np.prod(shape, dtype=object))
    if elements > LARGEST or max(strides, default=0) > LARGEST:
        text = f"legacy descriptors hold at most 2^31-1 elements and strides; the shape is {shape}"
        text += f" with strides {strides}" if strides else ""
        raise cudnn_error(function, NOT_SUPPORTED, text, "CUDNN_STATUS_NOT_SUPPORTED")


class _Descriptor(Owner):
    """An owner that is set once, when it is made."""

    __slots__ = ()

    def __init__(
        self, pointer: Any, create: Callable[[Any], None], destroy: Callable[[Any], None], fill: Callable[[Any], None]
    ) -> None:
        create(ctypes.byref(pointer))
        super().__init__(pointer, destroy)
        try:
            fill(pointer)
        except BaseException:
            self.close()
            raise

    @property
    def desc(self) -> Any:
        """The C pointer; borrowed.

        Raises:
            ValueError: the descriptor is closed.
        """
        return self._as_parameter_


class TensorDescriptor(_Descriptor):
    """A cudnnTensorDescriptor_t, immutable.

    Args:
        shape: the logical dimensions (N, C, *spatial), 3 to 8 of them, each at least 1.
        strides: the strides in elements (not in bytes), each at least 1 where the dimension is larger than 1.
        dtype: "float16", "bfloat16", ... or a NumPy dtype.

    Raises:
        CudnnNotSupportedError: more than 2^31-1 elements, or a rank that cuDNN does not take.
        TypeError, ValueError: an argument is not as above, or elements overlap; names argument and value.
    """

    __slots__ = ("_dtype", "_shape", "_strides")

    def __init__(self, shape: Sequence[int], strides: Sequence[int], dtype: str | np.dtype[Any] | type) -> None:
        self._shape = _integers("shape", shape, 1)
        self._strides = _integers("strides", strides, 0)
        self._dtype = cudnn_dtype(dtype)
        if len(self._shape) != len(self._strides):
            raise ValueError(f"strides: {self._strides} are not one for each dimension of {self._shape}")
        if overlaps(self._shape, self._strides):
            raise ValueError(f"strides: elements of shape {self._shape} with strides {self._strides} overlap")
        _check_size("cudnnSetTensorNdDescriptor", self._shape, self._strides)
        # A dimension of size 1 may have any stride; cuDNN wants a positive one.
        strides = [max(1, stride) for stride in self._strides]
        super().__init__(
            bindings.cudnnTensorDescriptor_t(),
            bindings.cudnnCreateTensorDescriptor,
            bindings.cudnnDestroyTensorDescriptor,
            lambda pointer: bindings.cudnnSetTensorNdDescriptor(
                pointer, self._dtype, len(self._shape), self._shape, strides
            ),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical dimensions."""
        return self._shape

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides in elements."""
        return self._strides

    @property
    def dtype(self) -> bindings.cudnnDataType_t:
        """The dtype by cuDNN's code."""
        return self._dtype

    def __repr__(self) -> str:
        return f"TensorDescriptor({self._shape}, {self._strides}, {self._dtype.name})"


class FilterDescriptor(_Descriptor):
    """A cudnnFilterDescriptor_t, immutable.

    Args:
        shape: the logical dimensions (K, C / groups, *window), 3 to 8 of them, each at least 1, in every layout.
        dtype: "float16", "bfloat16", ... or a NumPy dtype.
        layout: "nchw" or "nhwc": the order in memory, K outermost.

    Raises:
        CudnnNotSupportedError: more than 2^31-1 elements, or a rank that cuDNN does not take.
        TypeError, ValueError: an argument is not as above; names argument and value.
    """

    __slots__ = ("_dtype", "_layout", "_shape")

    def __init__(self, shape: Sequence[int], dtype: str | np.dtype[Any] | type, layout: str = "nchw") -> None:
        self._shape = _integers("shape", shape, 1)
        self._dtype = cudnn_dtype(dtype)
        if layout not in _FORMATS:
            raise ValueError(f"layout: {layout!r} is neither 'nchw' nor 'nhwc'")
        self._layout = layout
        _check_size("cudnnSetFilterNdDescriptor", self._shape)
        super().__init__(
            bindings.cudnnFilterDescriptor_t(),
            bindings.cudnnCreateFilterDescriptor,
            bindings.cudnnDestroyFilterDescriptor,
            lambda pointer: bindings.cudnnSetFilterNdDescriptor(
                pointer, self._dtype, _FORMATS[layout], len(self._shape), self._shape
            ),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical dimensions."""
        return self._shape

    @property
    def dtype(self) -> bindings.cudnnDataType_t:
        """The dtype by cuDNN's code."""
        return self._dtype

    @property
    def layout(self) -> str:
        """The order in memory, "nchw" or "nhwc"."""
        return self._layout

    def __repr__(self) -> str:
        return f"FilterDescriptor({self._shape}, {self._dtype.name}, {self._layout!r})"


def cudnn_math(math: str | bindings.cudnnMathType_t) -> bindings.cudnnMathType_t:
    """Gives cuDNN's math type of a word.

    Args:
        math: a word of MATH_TYPES, or a cudnnMathType_t, which comes back as it is.

    Returns:
        The math type.

    Raises:
        ValueError: another word.
    """
    if isinstance(math, bindings.cudnnMathType_t):
        return math
    if math not in MATH_TYPES:
        raise ValueError(f"math: {math!r} is none of {', '.join(MATH_TYPES)}")
    return MATH_TYPES[math]


class ConvolutionDescriptor(_Descriptor):
    """A cudnnConvolutionDescriptor_t (cross-correlation), immutable.

    Args:
        padding: zeros before and after each spatial dimension, at least 0; its length is the spatial rank, 2 or more.
        stride: at least 1 each.
        dilation: at least 1 each.
        groups: at least 1.
        compute: the dtype in which products are summed: "float32" or "float64" ("float16" is cuDNN's to refuse).
        math: "fma", "tensor_op", ... or a cudnnMathType_t. A new descriptor of cuDNN's own would have DEFAULT, which
            permits TF32; here it must be said.

    Raises:
        CudnnError: cuDNN refuses the values.
        TypeError, ValueError: an argument is not as above; names argument and value.
    """

    __slots__ = ("_math",)

    def __init__(
        self,
        padding: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        compute: str | np.dtype[Any] | type,
        math: str | bindings.cudnnMathType_t,
    ) -> None:
        pads = _integers("padding", padding, 0)
        steps = _integers("stride", stride, 1)
        spread = _integers("dilation", dilation, 1)
        (group_count,) = _integers("groups", (groups,), 1)
        if not len(pads) == len(steps) == len(spread):
            raise ValueError(f"padding {pads}, stride {steps} and dilation {spread} differ in length")
        code = cudnn_dtype(compute)
        math_type = self._math = cudnn_math(math)

        def fill(pointer: Any) -> None:
            bindings.cudnnSetConvolutionNdDescriptor(
                pointer, len(pads), pads, steps, spread, bindings.CUDNN_CROSS_CORRELATION, code
            )
            bindings.cudnnSetConvolutionGroupCount(pointer, group_count)
            bindings.cudnnSetConvolutionMathType(pointer, math_type)

        super().__init__(
            bindings.cudnnConvolutionDescriptor_t(),
            bindings.cudnnCreateConvolutionDescriptor,
            bindings.cudnnDestroyConvolutionDescriptor,
            fill,
        )

    @property
    def math(self) -> bindings.cudnnMathType_t:
        """The math type that was set."""
        return self._math
