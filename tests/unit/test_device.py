import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flcuda import device
from flcuda.data.sample import CudaLink
from flcuda.device import CPU, Device
from flcuda.errors import DeviceNotFoundError

ROOT = Path(__file__).parents[2]
SHAPES = st.lists(st.integers(1, 4), min_size=3, max_size=5).map(tuple)


class FakeRuntime:
    """CuPy's runtime on a machine of our own making."""

    class CUDARuntimeError(Exception):
        def __init__(self, status: int) -> None:
            super().__init__(status)
            self.status = status

    def __init__(self, answer: int, error: int | None = None) -> None:
        self.answer, self.error = answer, error

    def getDeviceCount(self) -> int:
        if self.error is not None:
            raise self.CUDARuntimeError(self.error)
        return self.answer

    def getDevice(self) -> int:
        return 1

    def runtimeGetVersion(self) -> int:
        return 12090


def fake_cupy(monkeypatch: pytest.MonkeyPatch, count: int = 2, error: int | None = None) -> None:
    module = SimpleNamespace(cuda=SimpleNamespace(runtime=FakeRuntime(count, error)))
    monkeypatch.setattr(device, "cupy", lambda: module)


# --- where CUDA is and is not ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "word"), [(100, "cudaErrorNoDevice"), (35, "cudaErrorInsufficientDriver")])
def test_no_cuda_is_exactly_two_errors(monkeypatch: pytest.MonkeyPatch, error: int, word: str) -> None:
    fake_cupy(monkeypatch, error=error)
    assert not device.cuda_available()
    assert device.resolve(None) == device.resolve("auto") == CPU
    for wanted in ("cuda", "cuda:0", Device("cuda", 1)):
        with pytest.raises(DeviceNotFoundError, match=rf"{word} \({error}\)"):
            device.resolve(wanted)


@pytest.mark.parametrize("error", [1, 2, 3, 34, 36, 46, 99, 101, 802, 804, 999])
def test_any_other_error_is_raised(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    fake_cupy(monkeypatch, error=error)
    for probe in (device.cuda_available, lambda: device.resolve(None), lambda: device.resolve("cuda")):
        with pytest.raises(FakeRuntime.CUDARuntimeError) as caught:
            probe()
        assert caught.value.status == error


def test_hidden_devices_are_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy(monkeypatch, error=100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES is '7'" in str(device.cuda_missing_reason())


def test_no_cupy_is_no_cuda_and_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    real_import = __import__

    def refuse(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "cupy":
            raise ModuleNotFoundError("No module named 'cupy'", name="cupy")
        return real_import(name, *arguments, **keywords)

    monkeypatch.setattr("builtins.__import__", refuse)
    assert not device.cuda_available()
    assert device.resolve(None) == CPU
    with pytest.raises(DeviceNotFoundError, match=r"pip install 'flcuda\[cuda12\]'"):
        device.resolve("cuda")


def test_broken_cupy_is_no_missing_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = __import__

    def refuse(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "cupy":
            raise ModuleNotFoundError("No module named 'cupy_backends'", name="cupy_backends")
        return real_import(name, *arguments, **keywords)

    monkeypatch.setattr("builtins.__import__", refuse)
    with pytest.raises(ModuleNotFoundError, match="cupy_backends"):
        device.cuda_available()


def test_resolve_with_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy(monkeypatch, count=2)
    assert device.resolve("cpu") == CPU
    assert device.resolve(CPU) == CPU
    assert device.resolve(None) == device.resolve("cuda") == device.resolve("cuda:1") == Device("cuda", 1)
    assert str(device.resolve("cuda:0")) == "cuda:0"
    with pytest.raises(DeviceNotFoundError, match=r"'cuda:2'.*2 CUDA devices: 0 to 1"):
        device.resolve("cuda:2")


@pytest.mark.parametrize("word", ["gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:1:2", "cpu:0", "CUDA", "", "cuda:²"])
def test_other_words_are_refused_and_named(word: str) -> None:
    with pytest.raises(ValueError, match="device"):
        device.resolve(word)


def test_a_number_is_no_device() -> None:
    with pytest.raises(TypeError, match=r"device.*int"):
        device.resolve(0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("installed", "ours", "wanted"), [(True, None, "32"), (True, "4", "4"), (False, None, "None")])
def test_connections_are_set_before_cupy_is_asked(installed: bool, ours: str | None, wanted: str) -> None:
    """See Note [connections]."""
    name = device.CONNECTIONS[0]
    environment = {key: text for key, text in os.environ.items() if key != name}
    if ours is not None:
        environment[name] = ours
    code = f"""
import importlib.machinery, os, sys
from flcuda import device

class Finder:
    def find_spec(self, module, path=None, target=None):
        if module == "nvidia" or {installed} and module == "nvidia.nvimgcodec":
            return importlib.machinery.ModuleSpec(module, self, is_package=True)
        if module == "nvidia.nvimgcodec":
            raise ModuleNotFoundError(module)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Finder())
sys.modules["cupy"] = sys
assert device.cupy() is sys
print(os.environ.get({name!r}))
"""
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == wanted


def test_something_that_stands_in_for_nvimgcodec_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", SimpleNamespace(__spec__=None))
    device._connect.cache_clear()
    device.cupy()


def test_import_needs_no_cupy() -> None:
    code = (
        "import sys, numpy as np\nfrom flcuda import device\na = np.ones(3)\n"
        "assert not device.is_cuda(a) and device.array_module(a) is np and device.device_of(a) == device.CPU\n"
        "assert not device.is_capturing()\ndevice.synchronize(device.CPU)\ndevice.driver()\n"
        "device.device_model(device.CPU)\nassert 'cupy' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)


def test_a_cupy_that_another_thread_is_importing_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text(
        "import threading, time, types\nstarted.set()\ntime.sleep(0.5)\n"
        "__version__ = '0'\nError = type('Error', (Exception,), {})\n"
        "stream = types.SimpleNamespace(is_capturing=lambda: True)\n"
        "runtime = types.SimpleNamespace(CUDARuntimeError=Error)\n"
        "runtime.runtimeGetVersion, runtime.driverGetVersion = lambda: 1, lambda: 2\n"
        "cuda = types.SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream)\n"
    )
    code = (
        "import builtins, threading\nfrom flcuda import device\nbuiltins.started = threading.Event()\n"
        "threading.Thread(target=device.cupy).start()\nassert started.wait(30)\n"
        "assert {what}\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    for what in ("device.is_capturing()", "device.driver()['cuda_driver'] == 2"):
        command = [sys.executable, "-c", code.format(what=what)]
        subprocess.run(command, check=True, env=environment, timeout=60)


@pytest.mark.parametrize(
    ("status", "expected"), [(None, True), (906, True), (100, False), (35, False), (900, "raises")]
)
def test_whether_a_stream_captures_that_cannot_say_so(status: Any, expected: Any, monkeypatch: Any) -> None:
    """Of a capture that an error has made invalid CuPy raises a RuntimeError of no status."""

    class CUDARuntimeError(RuntimeError):
        pass

    def is_capturing() -> bool:
        error = RuntimeError("the stream was capturing, but ...") if status is None else CUDARuntimeError()
        error.status = status  # type: ignore[union-attr]
        raise error

    stream = SimpleNamespace(is_capturing=is_capturing)
    runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError)
    cuda = SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    link = CudaLink.__new__(CudaLink)
    link.device, link._cuda = device.CPU, cuda
    if expected == "raises":
        with pytest.raises(CUDARuntimeError):
            device.is_capturing()
        return
    assert device.is_capturing() is expected
    if expected:
        assert link.is_capturing(stream)


# --- arrays in ------------------------------------------------------------------------------------------------------


class Producer:
    """An array of another library."""

    def __init__(self, array: np.ndarray, kind: int = 1) -> None:
        self.array, self.kind = array, kind

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0


def test_numpy_comes_back_as_it_is(rng: np.random.Generator) -> None:
    a = rng.standard_normal((2, 3))
    assert device.asarray(a) is a


def test_dlpack_shares_memory(rng: np.random.Generator) -> None:
    a = rng.standard_normal((2, 3, 5)).transpose(0, 2, 1)
    b = device.asarray(Producer(a))
    assert isinstance(b, np.ndarray)
    assert b.strides == a.strides
    a[1, 2, 0] = 7.5
    assert b[1, 2, 0] == 7.5


@pytest.mark.parametrize("a", [[1.0, 2.0], 3.0, np.float32(1), (1, 2), "x", None, memoryview(b"abc")])
def test_what_is_no_array_is_named(a: object) -> None:
    with pytest.raises(TypeError, match=r"^weight: expected.*" + type(a).__name__):
        device.asarray(a, "weight")


def test_unknown_dlpack_device_is_named() -> None:
    with pytest.raises(TypeError, match=r"^x: .*DLPack device type 10"):
        device.asarray(Producer(np.ones(2), kind=10), "x")


def test_array_that_is_nowhere_is_named() -> None:
    class Meta(Producer):
        def __dlpack_device__(self) -> tuple[int, int]:
            raise ValueError("a meta tensor has no memory")

    with pytest.raises(TypeError, match=r"^x: .*Meta cannot be imported: a meta tensor"):
        device.asarray(Meta(np.ones(2)), "x")


def test_array_that_its_library_keeps_is_named() -> None:
    class Keeps(Producer):
        def __dlpack__(self, **keywords: Any) -> Any:
            raise BufferError("requires a gradient")

    with pytest.raises(TypeError, match=r"^x: .*Keeps cannot be imported: requires a gradient"):
        device.asarray(Keeps(np.ones(2)), "x")


def test_bfloat16_of_an_array_library_without_dlpack_for_it(rng: np.random.Generator) -> None:
    class Jax(Producer):
        dtype = np.dtype(ml_dtypes.bfloat16)

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return self.array

    a = rng.standard_normal((2, 3)).astype(ml_dtypes.bfloat16)
    b = device.asarray(Jax(a))
    assert b.dtype == ml_dtypes.bfloat16
    assert np.array_equal(a, b)


@pytest.mark.peer
def test_torch_tensors(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    a = torch.from_numpy(rng.standard_normal((2, 3, 4, 5)).astype(np.float32))
    assert np.array_equal(device.asarray(a), a.numpy())
    last = a.to(memory_format=torch.channels_last)
    assert device.memory_layout(device.asarray(last)) == "nhwc"
    half = a.to(torch.bfloat16)
    b = device.asarray(half)
    assert b.dtype == ml_dtypes.bfloat16
    assert np.array_equal(b.astype(np.float32), half.float().numpy())
    half[1, 2, 3, 4] = 100
    assert b[1, 2, 3, 4] == 100
    for grad in (a.clone().requires_grad_(), half.clone().requires_grad_()):
        with pytest.raises(TypeError, match=r"^x: .*detach"):
            device.asarray(grad, "x")


def test_array_module_names_the_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeCudaArray:
        device = SimpleNamespace(id=1)

    module = SimpleNamespace(ndarray=FakeCudaArray)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(device, "cupy", lambda: module)
    there, here = FakeCudaArray(), np.ones(2)
    assert device.is_cuda(there)
    assert device.array_module(None, there) is module
    assert device.array_module(None, here) is np
    assert device.array_module() is np
    with pytest.raises(TypeError, match=r"mixed \(CuPy, NumPy, None\)"):
        device.array_module(there, here, None)
    with pytest.raises(TypeError, match="list"):
        device.array_module([1.0])
    assert device.require_same_device(x=there, w=None) == Device("cuda", 1)
    assert device.require_same_device() == CPU
    with pytest.raises(ValueError, match="x is on cuda:1, w is on cpu"):
        device.require_same_device(x=there, w=here)
    with pytest.raises(TypeError, match=r"^bias: .*list"):
        device.require_same_device(x=here, bias=[1.0])


# --- what is recorded -----------------------------------------------------------------------------------------------


def test_device_model_of_the_cpu_travels() -> None:
    model = device.device_model(CPU)
    assert set(model) == {"name", "cores"}
    assert model["name"]
    model["name"] = "changed"
    assert device.device_model(CPU)["name"] != "changed"


def test_workspace_limit_of_the_cpu() -> None:
    assert 0 < device.workspace_limit(CPU) <= 2 << 30


# --- layout ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(SHAPES, st.sampled_from(device.LAYOUTS), st.sampled_from(sorted(device.DTYPES)))
def test_empty_and_zeros_have_the_layout(shape: tuple[int, ...], layout: str, dtype: str) -> None:
    for a in (
        device.empty(shape, dtype, device="cpu", layout=layout),
        device.zeros(shape, dtype, device=CPU, layout=layout),
    ):
        assert a.shape == shape
        assert a.dtype == device.DTYPES[dtype]
        assert device.to_layout(a, layout) is a
        assert device.element_strides(a) == device.contiguous_strides(shape, device.memory_layout(a))
        if min(shape) > 1:
            assert device.memory_layout(a) == layout
    assert not a.astype(np.float32).any()


@settings(deadline=None)
@given(SHAPES, st.sampled_from(device.LAYOUTS), st.sampled_from(device.LAYOUTS))
def test_to_layout_keeps_every_element(shape: tuple[int, ...], before: str, after: str) -> None:
    a = device.empty(shape, "float32", device="cpu", layout=before)
    a[...] = np.arange(a.size).reshape(shape)
    b = device.to_layout(a, after)
    assert np.array_equal(a, b)
    order = device.memory_order(after, len(shape))
    assert b.transpose(order).flags.c_contiguous
    assert device.to_layout(b, after) is b


@settings(deadline=None)
@given(SHAPES, st.sampled_from(device.LAYOUTS), st.data())
def test_size_one_has_the_contiguous_stride(shape: tuple[int, ...], layout: str, data: st.DataObject) -> None:
    """Whatever stride an array carries where a dimension is 1, equal layouts give equal strides."""
    a = device.empty(shape, "float32", device="cpu", layout=layout)
    odd = tuple(4 * data.draw(st.integers(-9, 9)) if n == 1 else s for n, s in zip(shape, a.strides, strict=True))
    b = np.lib.stride_tricks.as_strided(a, shape, odd)
    assert device.element_strides(b) == device.element_strides(a)


def test_element_strides_of_a_part() -> None:
    a = np.zeros((4, 6, 8, 10), np.float32)
    assert device.element_strides(a[:, :3]) == (480, 80, 10, 1)
    assert device.element_strides(a[:, :1, :, ::2]) == (480, 80, 10, 2)
    assert device.element_strides(a[:1, :, :5, :7]) == (480, 80, 10, 1)
    assert device.element_strides(a[:, :, :, :1]) == (480, 80, 10, 1)
    assert device.element_strides(a[:, :, ::-1]) == (480, 80, -10, 1)
    assert device.element_strides(np.broadcast_to(np.float32(1), (2, 3, 4))) == (0, 0, 0)
    last = np.zeros((4, 8, 10, 6), np.float32).transpose(0, 3, 1, 2)
    assert device.element_strides(last[:, :4, :5]) == (480, 1, 60, 6)
    # One channel of either order: nchw wins, as in memory_layout.
    assert device.element_strides(last[:, :1]) == (480, 480, 60, 6)
    assert device.memory_layout(last) == "nhwc"
    assert device.memory_layout(last[:, :4]) == "strided"
    assert device.memory_layout(a[:, :, ::2]) == "strided"
    assert device.memory_layout(a[:2]) == "nchw"
    assert device.memory_layout(np.zeros((3, 5, 1, 1)).transpose(0, 1, 2, 3)) == "nchw"


def test_stride_that_is_no_whole_element_is_named() -> None:
    raw = np.zeros(64, np.uint8)
    a = np.lib.stride_tricks.as_strided(raw.view(np.float32), (3, 2, 2), (10, 8, 4))
    with pytest.raises(ValueError, match="10 bytes of dimension 0"):
        device.element_strides(a)


def test_zero_size_arrays_have_plain_strides() -> None:
    assert device.element_strides(np.zeros((0, 3, 4, 5))) == (60, 20, 5, 1)
    assert device.memory_layout(np.zeros((0, 3, 4, 5))) == "nchw"


@pytest.mark.parametrize(
    "call", [device.memory_order, lambda layout, _: device.empty((1,), "f4", device="cpu", layout=layout)]
)
def test_unknown_layout_is_named(call: Any) -> None:
    with pytest.raises(ValueError, match="layout: 'NCHW'"):
        call("NCHW", 4)


def test_alignment() -> None:
    raw = np.zeros(256, np.uint8)
    start = -raw.ctypes.data % 64
    for shift, wanted in ((0, 32), (1, 1), (2, 2), (12, 4), (16, 16), (32, 32)):
        assert device.alignment(raw[start + shift :]) == wanted
    assert device.alignment(raw[start:], 16) == 16
