"""Owners without a cuDNN: life cycle, arguments, and which handle and stream a thread gets."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flcuda import device
from flcuda.cudnn import bindings, library, resources
from flcuda.errors import CudnnError, CudnnNotSupportedError

ROOT = Path(__file__).parents[2]

# --- life cycle -----------------------------------------------------------------------------------------------------


def test_close_destroys_once() -> None:
    destroyed: list[int] = []
    owner = resources.Owner(7, destroyed.append)
    assert not owner.closed
    owner.close()
    owner.close()
    assert owner.closed
    assert destroyed == [7]


def test_with_closes_also_after_an_error() -> None:
    destroyed: list[int] = []

    def use() -> None:
        with resources.Owner(7, destroyed.append) as owner:
            assert owner._as_parameter_ == 7
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert destroyed == [7]


def test_garbage_destroys_and_the_finalizer_holds_nothing() -> None:
    destroyed: list[int] = []
    owner = resources.Owner(7, destroyed.append)
    alive = weakref.ref(owner)
    del owner
    gc.collect()
    assert alive() is None
    assert destroyed == [7]


def test_closed_owner_cannot_be_passed() -> None:
    owner = resources.Owner(7, lambda pointer: None)
    owner.close()
    assert owner.closed
    with pytest.raises(ValueError, match="this Owner is closed"):
        owner._as_parameter_  # noqa: B018


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_owners_are_not_copied(how: Any) -> None:
    with pytest.raises(TypeError, match="a Owner belongs to this process"):
        how(resources.Owner(7, lambda pointer: None))


def test_nothing_is_destroyed_at_exit() -> None:
    code = (
        "from flcuda.cudnn import resources\n"
        "def destroy(pointer): print('destroyed', pointer, flush=True)\n"
        "kept = resources.Owner(7, destroy)\n"
        "resources._handles.by_device[0] = resources.Owner(8, destroy)\n"
        "cycle = [resources.Owner(9, destroy)]\ncycle.append(cycle)\n"
        "resources.Owner(10, destroy)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "destroyed 10\n", "")


def test_descriptor_that_cannot_be_set_is_destroyed() -> None:
    destroyed: list[Any] = []

    def refuse(pointer: Any) -> None:
        raise CudnnError("cudnnSet", 2000)

    with pytest.raises(CudnnError):
        resources._Descriptor(bindings.cudnnTensorDescriptor_t(), lambda out: None, destroyed.append, refuse)
    assert len(destroyed) == 1


# --- arguments, before anything is loaded ---------------------------------------------------------------------------

TENSOR = {"shape": (2, 3, 5, 7), "strides": (105, 35, 7, 1), "dtype": "float16"}
FILTER = {"shape": (4, 3, 3, 3), "dtype": "float32", "layout": "nhwc"}
CONVOLUTION = {
    "padding": (1, 0),
    "stride": (1, 2),
    "dilation": (1, 1),
    "groups": 1,
    "compute": "float32",
    "math": "fma",
}


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str | None = None) -> None:
        raise AssertionError("cuDNN was loaded before the arguments were checked")

    monkeypatch.setattr(library, "load", load)


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("owner", "good", "argument", "value", "error"),
    [
        (resources.TensorDescriptor, TENSOR, "shape", (2, 0, 5, 7), ValueError),
        (resources.TensorDescriptor, TENSOR, "shape", (2, 3.0, 5, 7), TypeError),
        (resources.TensorDescriptor, TENSOR, "shape", (2, True, 5, 7), TypeError),
        (resources.TensorDescriptor, TENSOR, "strides", (105, 35, -7, 1), ValueError),
        (resources.TensorDescriptor, TENSOR, "strides", (105, 35, 0, 1), ValueError),
        (resources.TensorDescriptor, TENSOR, "strides", (1, 1, 1, 1), ValueError),
        (resources.TensorDescriptor, TENSOR, "strides", (35, 7, 1), ValueError),
        (resources.TensorDescriptor, TENSOR, "dtype", "complex64", ValueError),
        (resources.TensorDescriptor, TENSOR, "dtype", "float4", ValueError),
        (resources.FilterDescriptor, FILTER, "shape", (4, 3, -3, 3), ValueError),
        (resources.FilterDescriptor, FILTER, "dtype", np.complex128, ValueError),
        (resources.FilterDescriptor, FILTER, "layout", "NHWC", ValueError),
        (resources.ConvolutionDescriptor, CONVOLUTION, "padding", (-1, 0), ValueError),
        (resources.ConvolutionDescriptor, CONVOLUTION, "padding", (1,), ValueError),
        (resources.ConvolutionDescriptor, CONVOLUTION, "stride", (0, 1), ValueError),
        (resources.ConvolutionDescriptor, CONVOLUTION, "dilation", (1, 0), ValueError),
        (resources.ConvolutionDescriptor, CONVOLUTION, "groups", 0, ValueError),
        (resources.ConvolutionDescriptor, CONVOLUTION, "groups", 1.5, TypeError),
        (resources.ConvolutionDescriptor, CONVOLUTION, "math", "tf32", ValueError),
    ],
)
def test_bad_argument_is_named(owner: Any, good: dict[str, Any], argument: str, value: Any, error: Any) -> None:
    with pytest.raises(error, match=argument):
        owner(**{**good, argument: value})


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("shape", "strides", "text"),
    [
        ((4096, 1024, 32, 32), (1 << 20, 1024, 32, 1), "2^31-1 elements"),
        ((2, 3, 5, 7), (1 << 31, 35, 7, 1), "2^31-1 elements and strides"),
        ((2,) * 9, tuple(1 << dim for dim in range(8, -1, -1)), "at most 8 dimensions"),
    ],
)
def test_what_legacy_descriptors_cannot_hold_is_said(shape: Any, strides: Any, text: str) -> None:
    with pytest.raises(CudnnNotSupportedError) as caught:
        resources.TensorDescriptor(shape, strides, "float16")
    assert text in str(caught.value)
    assert str(shape) in str(caught.value)


def test_dtype_codes() -> None:
    assert resources.cudnn_dtype("bfloat16") == bindings.CUDNN_DATA_BFLOAT16
    assert resources.cudnn_dtype(np.dtype(ml_dtypes.bfloat16)) == bindings.CUDNN_DATA_BFLOAT16
    assert resources.cudnn_dtype(np.float32) == bindings.CUDNN_DATA_FLOAT
    codes = [resources.cudnn_dtype(word) for word in resources._DTYPES]
    assert len(set(codes)) == len(codes)


def test_math_words() -> None:
    assert resources.cudnn_math("fma") == bindings.CUDNN_FMA_MATH
    assert resources.cudnn_math("tensor_op") == bindings.CUDNN_TENSOR_OP_MATH
    assert resources.cudnn_math(bindings.CUDNN_DEFAULT_MATH) is bindings.CUDNN_DEFAULT_MATH


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=4))
def test_overlaps_says_what_counting_says(dims: list[tuple[int, int]]) -> None:
    shape, strides = zip(*dims, strict=True)
    offsets = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*shape)]
    assert resources.overlaps(shape, strides) == (len(set(offsets)) < len(offsets))


def test_huge_arrays_are_judged_by_their_strides_alone() -> None:
    assert not resources.overlaps((1 << 12, 1 << 10, 64, 64), (1 << 22, 1 << 12, 64, 1))
    assert resources.overlaps((1 << 12, 1 << 10, 64, 64), (1, 1, 1, 1))


# --- handles: a make-believe CUDA that keeps a book -----------------------------------------------------------------


class FakeCuda:
    """CuPy's current device and stream of each thread, and what was asked of cuDNN."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.here = threading.local()
        self.made = 0
        outer = self

        class Device:
            def __init__(self, index: int) -> None:
                self.index = index

            def __enter__(self) -> None:
                self.before = outer.device
                outer.here.device = self.index

            def __exit__(self, *_: object) -> None:
                outer.here.device = self.before

        class CUDARuntimeError(Exception):
            pass

        runtime = SimpleNamespace(
            getDevice=lambda: self.device, getDeviceCount=lambda: 2, CUDARuntimeError=CUDARuntimeError
        )
        self.module = SimpleNamespace(
            cuda=SimpleNamespace(Device=Device, runtime=runtime, get_current_stream=lambda: self.stream)
        )

    @property
    def device(self) -> int:
        return getattr(self.here, "device", 0)

    @property
    def stream(self) -> SimpleNamespace:
        return getattr(self.here, "stream", SimpleNamespace(ptr=0, device_id=-1))

    def use(self, ptr: int, device_id: int = -1) -> None:
        self.here.stream = SimpleNamespace(ptr=ptr, device_id=device_id)

    def create(self, out: Any) -> None:
        self.made += 1
        self.calls.append(("create", self.device))

    def destroy(self, pointer: Any) -> None:
        self.calls.append(("destroy", self.device))

    def set_stream(self, owner: resources.Handle, ptr: int) -> None:
        self.calls.append(("stream", owner.device.index, ptr))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == kind]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    monkeypatch.setattr(device, "cupy", lambda: fake.module)
    monkeypatch.setattr(bindings, "cudnnCreate", fake.create)
    monkeypatch.setattr(bindings, "cudnnDestroy", fake.destroy)
    monkeypatch.setattr(bindings, "cudnnSetStream", fake.set_stream)
    monkeypatch.setattr(
        library, "load", lambda path=None: SimpleNamespace(verify=lambda: None, require_cublas=lambda: None)
    )
    monkeypatch.setattr(resources, "_handles", resources._ThreadHandles())
    yield fake
    resources._handles.by_device.clear()


def test_one_handle_a_thread_and_device(cuda: FakeCuda) -> None:
    first = resources.handle()
    assert resources.handle() is resources.handle(0) is first
    with device.Device("cuda", 1).use():
        other = resources.handle()
        assert resources.handle(1) is other
    assert other is not first
    assert other.device == device.Device("cuda", 1)
    assert cuda.of("create") == [(0,), (1,)]


def test_only_the_first_call_of_a_thread_asks_whether_there_is_cuda(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    resolve = device.resolve

    def counted(word: Any) -> device.Device:
        asked.append(word)
        return resolve(word)

    monkeypatch.setattr(device, "resolve", counted)
    first = resources.handle()
    count = len(asked)
    assert count > 0
    for _ in range(3):
        assert resources.handle() is first
    assert len(asked) == count
    thread = threading.Thread(target=resources.handle)
    thread.start()
    thread.join()
    assert len(asked) == 2 * count


def test_stream_is_set_only_when_it_differs(cuda: FakeCuda) -> None:
    resources.handle()
    assert cuda.of("stream") == []
    for ptr in (5, 5, 6, 6, 0, 0, 5):
        cuda.use(ptr)
        assert resources.handle().stream == ptr
    assert cuda.of("stream") == [(0, 5), (0, 6), (0, 0), (0, 5)]


def test_handle_of_another_device_than_the_current_names_both(cuda: FakeCuda) -> None:
    resources.handle()
    with pytest.raises(ValueError, match="cuda:1 and the current device is cuda:0"):
        resources.handle(1)
    assert cuda.of("create") == [(0,)]  # and not one for the device that was refused
    handle = resources.handle()
    with device.Device("cuda", 1).use(), pytest.raises(ValueError, match="cuda:0 and the current device is cuda:1"):
        handle.use_current_stream()


def test_stream_of_another_device_names_both(cuda: FakeCuda) -> None:
    cuda.use(5, device_id=1)
    with pytest.raises(ValueError, match="current stream is on cuda:1 and the cuDNN handle on cuda:0"):
        resources.handle()
    assert cuda.of("stream") == []
    cuda.use(6, device_id=0)
    assert resources.handle().stream == 6


def test_threads_have_handles_of_their_own_that_go_with_them(cuda: FakeCuda) -> None:
    mine = resources.handle()
    seen: list[int] = []
    on_thread: list[int] = []

    def work(number: int) -> None:
        cuda.here.device = 1
        cuda.use(10 + number)
        handle = resources.handle()
        assert handle is resources.handle()
        assert handle is not mine
        seen.append(handle.stream)

    for number in range(3):
        thread = threading.Thread(target=work, args=(number,))
        thread.start()
        thread.join()
        gc.collect()
        on_thread.append(len(cuda.of("destroy")))
    assert seen == [10, 11, 12]
    assert on_thread == [1, 2, 3]
    assert cuda.of("destroy") == [(1,), (1,), (1,)]
    assert resources.handle() is mine


def test_closed_handle_is_replaced(cuda: FakeCuda) -> None:
    first = resources.handle()
    first.close()
    first.close()
    assert resources.handle() is not first
    assert cuda.of("destroy") == [(0,)]


def test_lost_driver_is_tolerated(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(pointer: Any) -> None:
        raise CudnnError("cudnnDestroy", 5000, "the driver is shutting down")

    monkeypatch.setattr(bindings, "cudnnDestroy", lost)
    handle = resources.handle()
    handle.close()
    assert handle.closed
