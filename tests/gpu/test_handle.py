"""cuDNN handles on a real device: streams, threads, the end of the process, and life beside PyTorch."""

import gc
import os
import shutil
import subprocess
import sys
import threading
from ctypes import byref, c_float
from pathlib import Path
from typing import Any

import pytest

from flcuda import cudnn, device
from flcuda.cudnn import bindings, library, resources
from flcuda.device import Device

ROOT = Path(__file__).parents[2]


def stream_of(handle: resources.Handle) -> int:
    stream = cudnn.cudaStream_t()
    cudnn.cudnnGetStream(handle, byref(stream))
    return stream.value or 0


def fill(handle: resources.Handle, y: Any, value: float) -> None:
    """Lets cuDNN write a value into an array, on the handle's stream."""
    with resources.TensorDescriptor(y.shape, device.element_strides(y), y.dtype) as descriptor:
        cudnn.cudnnSetTensor(handle, descriptor, y, byref(c_float(value)))


@pytest.fixture
def y() -> Any:
    return device.zeros((2, 3, 8, 8), "float32", device="cuda")


def test_current_stream_is_set_and_followed(y: Any) -> None:
    cupy = device.cupy()
    first = resources.handle()
    assert stream_of(first) == device.current_stream()
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(), cupy.cuda.Stream.null):
        with stream:
            handle = resources.handle()
            assert handle is first
            assert stream_of(handle) == handle.stream == stream.ptr
            fill(handle, y, stream.ptr % 1000)
            stream.synchronize()
            assert (y.get() == stream.ptr % 1000).all()


def test_stream_is_set_only_when_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = device.cupy()
    calls: list[int] = []
    real = bindings.cudnnSetStream

    def counted(handle: resources.Handle, ptr: int) -> None:
        calls.append(ptr)
        real(handle, ptr)

    monkeypatch.setattr(bindings, "cudnnSetStream", counted)
    resources.handle()
    calls.clear()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for _ in range(5):
            resources.handle()
    for _ in range(5):
        resources.handle()
    assert calls == [stream.ptr, 0]


def test_calls_are_captured_on_the_current_stream(y: Any) -> None:
    cupy = device.cupy()
    resources.handle()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        fill(resources.handle(), y, 2.5)
        graph = stream.end_capture()
        stream.synchronize()
        assert not y.get().any()
        graph.launch(stream)
        stream.synchronize()
    assert (y.get() == 2.5).all()


def test_threads_have_their_own_and_give_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = device.cupy()
    destroyed: list[int] = []
    real = bindings.cudnnDestroy

    def counted(pointer: Any) -> None:
        destroyed.append(threading.get_ident())
        real(pointer)

    monkeypatch.setattr(bindings, "cudnnDestroy", counted)
    mine = resources.handle()
    results: list[tuple[int, bool]] = []
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                y = device.zeros((2, 3, 8, 8), "float32", device="cuda")
                handle = resources.handle()
                assert handle is not mine
                assert stream_of(handle) == stream.ptr
                for _ in range(50):
                    fill(resources.handle(), y, number)
                stream.synchronize()
                results.append((threading.get_ident(), bool((y.get() == number).all())))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number + 1,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert errors == []
    assert [right for _, right in results] == [True] * 4
    # On the threads that made them.
    assert sorted(destroyed) == sorted(ident for ident, _ in results)
    assert resources.handle() is mine


def test_double_close_and_a_new_one() -> None:
    handle = resources.handle()
    handle.close()
    handle.close()
    with pytest.raises(ValueError, match="this Handle is closed"):
        cudnn.cudnnSetStream(handle, 0)
    assert resources.handle() is not handle


def test_absent_device_is_named() -> None:
    with pytest.raises(Exception, match="cuda:64"):
        resources.Handle(64)


def test_two_devices_are_told_apart() -> None:
    cupy = device.cupy()
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU here")
    resources.handle()
    with pytest.raises(ValueError, match="cuda:1 and the current device is cuda:0"):
        resources.handle(1)
    stream = cupy.cuda.Stream(non_blocking=True)
    with Device("cuda", 1).use():
        other = resources.handle()
        assert other.device == Device("cuda", 1)
        y = device.zeros((2, 3, 8, 8), "float32", device="cuda:1")
        fill(other, y, 3)
        assert (y.get() == 3).all()
    assert stream.device_id == 0


@pytest.mark.parametrize("part", ["heuristic", "engines_precompiled"])
def test_decoy_under_a_versioned_name_is_reported(tmp_path: Path, part: str) -> None:
    """cuDNN tries libcudnn_heuristic.so.9.28.0 before .so.9: another folder's file is mapped after loading."""
    loaded = library.load()
    own = next(file for file in loaded.files if f"libcudnn_{part}.so" in file)
    foreign = tmp_path / f"libcudnn_{part}.so.{loaded.version_text}"
    shutil.copy(own, foreign)
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}",
    }
    code = (
        "from flcuda.cudnn import library, resources\nfrom flcuda.errors import LibraryNotFoundError\n"
        "try:\n    resources.handle()\nexcept LibraryNotFoundError as error:\n    print(error)\n"
        "else:\n    print(library.load().foreign_files())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == "[]" or (str(foreign) in done.stdout and own in done.stdout)


def test_one_copy_after_the_engines_are_open() -> None:
    resources.handle()
    loaded = library.load()
    assert loaded.foreign_files() == []
    assert loaded.skipped == {}
    loaded.verify()


HEAD = """
import threading, time
import numpy as np
from flcuda import cudnn, device
from flcuda.cudnn import library, resources
from ctypes import byref, c_float
def fill():
    y = device.zeros((2, 3, 8, 8), "float32", device="cuda")
    with resources.TensorDescriptor(y.shape, device.element_strides(y), y.dtype) as d:
        cudnn.cudnnSetTensor(resources.handle(), d, y, byref(c_float(3)))
    return y
"""
TORCH_CONVOLUTION = """
x = torch.randn(2, 8, 16, 16, device="cuda")
w = torch.randn(8, 8, 3, 3, device="cuda")
r = torch.nn.functional.conv2d(x.double().cpu(), w.double().cpu(), padding=1)
assert (torch.nn.functional.conv2d(x, w, padding=1).double().cpu() - r).abs().max() < 0.1
"""
EXITS = {
    "plain": "fill()",
    "kept arrays and handles": "kept = [fill(), resources.Handle(), resources.handle()]",
    "in a cycle": "cycle = [resources.Handle()]; cycle.append(cycle)",
    "pending work": "kept = [fill() for _ in range(1000)]",
    "closed at exit": "import atexit; h = resources.Handle(); atexit.register(h.close); fill()",
    "thread ended": "t = threading.Thread(target=fill); t.start(); t.join()",
    "daemon thread running": (
        "def work():\n    fill(); ready.set(); time.sleep(60)\n"
        "ready = threading.Event(); threading.Thread(target=work, daemon=True).start(); ready.wait()"
    ),
    "kept in a late module": "import sys; sys.flcuda_kept = [resources.Handle(), fill()]",
    "torch first": f"import torch\n{TORCH_CONVOLUTION}\nkept = fill()\nassert library.load().why == 'already loaded'",
    "torch last": f"kept = fill()\nimport torch\n{TORCH_CONVOLUTION}\nassert library.load().foreign_files() == []",
}


@pytest.mark.parametrize("how", EXITS)
def test_process_ends_with_0(how: str) -> None:
    if "torch" in how:
        pytest.importorskip("torch")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", HEAD + EXITS[how] + "\n"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
