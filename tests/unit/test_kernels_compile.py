"""Every kernel file compiles for every architecture, with no GPU; and what the loader says when one does not."""

import contextlib
import functools
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from flcuda import kernel_loader
from flcuda.errors import KernelCompileError, LibraryNotFoundError
from flcuda.ops import batch_norm
from flcuda.ops.preparation import step_modules


def _nvrtc_version() -> int | None:
    try:
        from cupy_backends.cuda.libs import nvrtc

        return int(nvrtc.getVersion()[0])
    except (ImportError, RuntimeError, OSError):
        return None


NVRTC = _nvrtc_version()
needs_nvrtc = pytest.mark.skipif(NVRTC is None, reason="no NVRTC (CuPy and its compiler) here")
NAMES = sorted(path.stem for path in kernel_loader.kernel_dir().glob("*.cu"))


def test_all_files_are_here() -> None:
    assert NAMES == [
        "augment",
        "batch_norm",
        "bias",
        "depthwise",
        "elementwise",
        "finite",
        "images",
        "loss",
        "optimizer",
        "pooling",
        "random",
        "rewrite",
    ]


@functools.cache
def _cubin(name: str, arch: int) -> bytes:
    return kernel_loader.compile_to_cubin(name, arch)


@needs_nvrtc
@pytest.mark.parametrize("arch", kernel_loader.ARCHITECTURES)
@pytest.mark.parametrize("name", NAMES)
def test_compiles(name: str, arch: int) -> None:
    assert _cubin(name, arch)[:4] == b"\x7fELF"


@needs_nvrtc
def test_every_kernel_that_an_op_launches_exists() -> None:
    launched = re.compile(r'launch(?:_blocks)?\(\s*"(\w+)",\s*f?"(\w+)(?:\{|")')
    found = {name: _cubin(name, 80) for name in NAMES}
    seen = 0
    for file in (Path(kernel_loader.__file__).parent / "ops").glob("*.py"):
        for name, function in launched.findall(file.read_text(encoding="utf-8")):
            assert function.encode() in found[name], f"{file.name} launches {function}"
            seen += 1
    assert seen > 20


def _folder(tmp_path: Path, body: str, header: str = "#define VALUE 1\n") -> Path:
    (tmp_path / "common.cuh").write_text(header)
    (tmp_path / "probe.cu").write_text(body)
    return tmp_path


@needs_nvrtc
def test_an_error_names_file_and_line_and_frees_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy_backends.cuda.libs import nvrtc

    destroyed: list[int] = []
    destroy = nvrtc.destroyProgram
    monkeypatch.setattr(nvrtc, "destroyProgram", lambda program: (destroyed.append(program), destroy(program)))
    folder = _folder(
        tmp_path, '#include "common.cuh"\nextern "C" __global__ void f(int* out) {\n  *out = nothing;\n}\n'
    )
    with pytest.raises(KernelCompileError, match=r"kernels/probe\.cu\(3\).*nothing") as raised:
        kernel_loader.compile_to_cubin("probe", 80, folder)
    assert raised.value.file == "kernels/probe.cu"
    assert len(destroyed) == 1


def test_a_header_edit_changes_the_source(tmp_path: Path) -> None:
    folder = _folder(tmp_path, '#include "common.cuh"\n')
    before = kernel_loader.source("probe", folder)
    assert before == kernel_loader.source("probe", folder)
    assert before.splitlines()[1] == '#line 1 "kernels/probe.cu"'
    (folder / "common.cuh").write_text("#define VALUE 2\n")
    assert kernel_loader.source("probe", folder) != before
    (folder / "common.cuh").write_text("#define VALUE 1\n")
    assert kernel_loader.source("probe", folder) == before
    (folder / "more.cuh").write_text("")
    assert kernel_loader.source("probe", folder) != before


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Puts a compiler in NVRTC's place that takes its time and refuses "optimizer"; gives file, thread and device."""
    seen: list[tuple[str, str, int]] = []
    current = threading.local()

    class Place(contextlib.AbstractContextManager[None]):
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.index = self.index

        def __exit__(self, *_: object) -> None:
            current.index = 0

    def new_module(name: str, text: str, flags: tuple[str, ...]) -> object:
        time.sleep(0.05)
        seen.append((name, threading.current_thread().name, current.index))
        if name == "optimizer":
            raise KernelCompileError(f"kernels/{name}.cu", "refused")
        return object()

    runtime = SimpleNamespace(getDevice=lambda: getattr(current, "index", 0))
    fake = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=Place))
    monkeypatch.setattr(kernel_loader, "cupy", lambda: fake)
    monkeypatch.setattr(kernel_loader, "new_module", new_module)
    monkeypatch.setattr(kernel_loader, "options", lambda: ())
    monkeypatch.setattr(kernel_loader, "_modules", {})
    monkeypatch.setattr(kernel_loader, "_coming", {})
    monkeypatch.setattr("flcuda.kernel_loader.os.cpu_count", lambda: 8)
    return seen


def test_files_are_compiled_ahead_at_the_same_time(compiled: list[tuple[str, str, int]]) -> None:
    kernel_loader.load_module("loss")
    with kernel_loader.cupy().cuda.Device(1):
        begin = time.perf_counter()
        kernel_loader.prepare([("bias", ()), ("loss", ()), ("loss", ()), ("finite", ("A=1",)), ("optimizer", ())])
        kernel_loader.prepare([("bias", ())])
        assert time.perf_counter() - begin < 0.05
        module = kernel_loader.load_module("bias")
        assert kernel_loader.load_module("bias") is module
        for name, defines in (("loss", ()), ("finite", ("A=1",))):
            kernel_loader.load_module(name, defines)
        for _ in range(2):
            with pytest.raises(KernelCompileError, match="refused"):
                kernel_loader.load_module("optimizer")
    assert not kernel_loader._coming
    main = threading.current_thread().name
    assert [name for name, thread, _ in compiled if thread == main] == ["loss", "optimizer"]
    ahead = [(name, device) for name, thread, device in compiled if thread != main]
    assert sorted(ahead) == [("bias", 1), ("finite", 1), ("loss", 1), ("optimizer", 1)]
    assert len({thread for _, thread, _ in compiled}) == 5


@needs_nvrtc
def test_a_step_s_files_have_the_kernels_of_their_dtypes() -> None:
    names = set()
    for name, defines in step_modules("float16", "nhwc", pooled=True):
        names.add(name)
        if defines:
            kernels = kernel_loader.compile_to_cubin(name, 90, defines=defines)
            assert b"_f16" in kernels
            assert b"_bf16" not in kernels
    assert names == set(NAMES) - {"augment", "depthwise", "images"}


def test_a_step_s_files_depend_on_what_it_is() -> None:
    float32 = step_modules("float32", "nchw", pooled=False)
    assert ("batch_norm", batch_norm.defines_of("scalar", "nchw", "f32")) in float32
    assert ("finite", ()) not in float32
    assert [defines for name, defines in float32 if name == "pooling"] == [("POOL_PART=4", "POOL_KIND=f32")]
    parts = [defines[0] for name, defines in step_modules("float64", "nchw", pooled=True) if name == "pooling"]
    assert parts == ["POOL_PART=1", "POOL_PART=5", "POOL_PART=4"]


def test_an_unknown_file_is_named() -> None:
    with pytest.raises(ValueError, match="no kernel file 'nothing'; there are augment, batch_norm, bias"):
        kernel_loader.source("nothing")


def test_missing_headers_list_the_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(kernel_loader, "_SYSTEM_CUDA", str(tmp_path / "system"))
    with pytest.raises(LibraryNotFoundError, match=r"cuda_fp16\.h") as raised:
        kernel_loader.include_dir(99)
    assert str(tmp_path / "include") in raised.value.places
    (tmp_path / "include").mkdir()
    for header in ("cuda_fp16.h", "cuda_bf16.h"):
        (tmp_path / "include" / header).touch()
    assert kernel_loader.include_dir(99) == tmp_path / "include"
