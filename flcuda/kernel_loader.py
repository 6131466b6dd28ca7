"""Compiles the kernels of `kernels/` with NVRTC, at run time through CuPy, and launches them.

Nothing else compiles. `load_module` gives what runs here; `compile_to_cubin` compiles the same source with the same
options for any architecture and needs no GPU.

Note [ahead]: a file takes NVRTC up to two seconds, once a machine, and all files of a training step some nine, one
after another. `prepare` has threads compile them at the same time, which NVRTC does without Python's lock, while the
host does something else; whoever needs one of them early waits for that one alone.
"""

import functools
import hashlib
import importlib.util
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from flcuda.device import DTYPES, cupy
from flcuda.errors import KernelCompileError, LibraryNotFoundError

Array = Any

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
"""The compute capabilities, times ten, for which every kernel must compile."""

SUFFIXES: dict[np.dtype[Any], str] = {
    DTYPES["float32"]: "f32",
    DTYPES["float64"]: "f64",
    DTYPES["float16"]: "f16",
    DTYPES["bfloat16"]: "bf16",
}
"""How the instances of a kernel for the four dtypes are named."""

BLOCK = 256
# Blocks of a grid-stride launch: enough to fill any device of today, few enough to start at once.
_MAX_GRID = 4096
_SYSTEM_CUDA = "/usr/local/cuda"
_HEADERS = ("cuda_fp16.h", "cuda_bf16.h")
_MOST_THREADS = 12


@functools.cache
def kernel_dir() -> Path:
    """The folder of the kernels.

    Returns:
        `flcuda/kernels` of an installed package, else `kernels/` of the checkout.

    Raises:
        LibraryNotFoundError: there is neither.
    """
    package = Path(__file__).resolve().parent
    places = (package / "kernels", package.parent / "kernels")
    for place in places:
        if (place / "common.cuh").is_file():
            return place
    raise LibraryNotFoundError("The kernels' folder is missing from this installation", tuple(map(str, places)))


def include_dir(cuda_major: int) -> Path:
    """Finds the headers that the kernels include, of the CUDA version of the compiler.

    Args:
        cuda_major: 12 or 13, NVRTC's.

    Returns:
        The folder for the compiler's `-I`.

    Raises:
        LibraryNotFoundError: they are nowhere; lists the places searched.
    """
    places: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for root in [] if spec is None or spec.submodule_search_locations is None else spec.submodule_search_locations:
        folder = "cuda_runtime" if cuda_major <= 12 else f"cu{cuda_major}"
        places.append(Path(root) / folder / "include")
    roots = (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), _SYSTEM_CUDA)
    places.extend(Path(root) / "include" for root in roots if root)
    for place in places:
        if all((place / header).is_file() for header in _HEADERS):
            return place
    wheel = "nvidia-cuda-runtime-cu12" if cuda_major <= 12 else "nvidia-cuda-runtime"
    raise LibraryNotFoundError(
        f"The kernels include {' and '.join(_HEADERS)} of CUDA {cuda_major}, which are not here: "
        f"pip install {wheel}, or set CUDA_PATH",
        tuple(map(str, places)),
    )


def source(name: str, folder: Path | None = None) -> str:
    """The text of a kernel file as it is compiled.

    Its first line holds a digest of all headers beside it, because CuPy's compile cache is keyed by text and options
    and does not look into included files: an edited header must recompile. `#line` makes messages name the file.

    Args:
        name: the file's name without `.cu`.
        folder: where it lies; `kernel_dir()` when None.

    Returns:
        CUDA C++.

    Raises:
        ValueError: there is no such file.
    """
    folder = kernel_dir() if folder is None else folder
    path = folder / f"{name}.cu"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.cu")))
        raise ValueError(f"name: there is no kernel file {name!r}; there are {known}")
    digest = hashlib.sha256()
    for header in sorted(folder.glob("*.cuh")):
        digest.update(header.name.encode() + b"\0" + header.read_bytes() + b"\0")
    return f'// headers {digest.hexdigest()}\n#line 1 "kernels/{name}.cu"\n{path.read_text(encoding="utf-8")}'


def options(folder: Path | None = None) -> tuple[str, ...]:
    """The compiler's options but for the architecture.

    Args:
        folder: the kernels' folder; `kernel_dir()` when None.

    Returns:
        C++17 and the include folders: the kernels' and that of CUDA's headers of NVRTC's version.
    """
    from cupy_backends.cuda.libs import nvrtc

    folder = kernel_dir() if folder is None else folder
    return ("--std=c++17", f"-I{folder}", f"-I{include_dir(nvrtc.getVersion()[0])}")


def compile_to_cubin(name: str, arch: int, folder: Path | None = None, defines: tuple[str, ...] = ()) -> bytes:
    """Compiles a kernel file for an architecture; needs NVRTC but no GPU.

    Args:
        name: the file's name without `.cu`.
        arch: compute capability times ten: 90 for sm_90.
        folder: where the file lies; `kernel_dir()` when None.
        defines: macros, "NAME=VALUE" each.

    Returns:
        The cubin.

    Raises:
        KernelCompileError: the file does not compile; has NVRTC's log.
        DeviceNotFoundError: CuPy is not installed.
        ValueError: there is no such file.
    """
    cupy()
    from cupy_backends.cuda.libs import nvrtc

    text = source(name, folder)
    flags = (*options(folder), *(f"-D{each}" for each in defines), f"--gpu-architecture=sm_{arch}")
    program = nvrtc.createProgram(text, f"{name}.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, flags)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise KernelCompileError(f"kernels/{name}.cu", f"{error}\n{log}") from error
        return bytes(nvrtc.getCUBIN(program))
    finally:
        nvrtc.destroyProgram(program)


_modules: dict[tuple[str, tuple[str, ...], int], Any] = {}
_coming: dict[tuple[str, tuple[str, ...], int], "Future[Any]"] = {}
_functions: dict[tuple[str, str, tuple[str, ...], int], Any] = {}


def load_module(name: str, defines: tuple[str, ...] = ()) -> Any:
    """Compiles a kernel file for the current device and loads it, once a device and set of macros.

    CuPy keeps compiled files in its cache folder, so that later processes only load.

    Args:
        name: the file's name without `.cu`.
        defines: macros, "NAME=VALUE" each, by which a file says which of its kernels it has.

    Returns:
        A cupy.RawModule, kept for the life of the process.

    Raises:
        KernelCompileError: the file does not compile; has NVRTC's log.
        ValueError: there is no such file.
    """
    module = cupy()
    key = (name, defines, module.cuda.runtime.getDevice())
    if key not in _modules:
        coming = _coming.get(key)
        try:
            _modules[key] = _compiled(*key) if coming is None else coming.result()
        finally:
            _coming.pop(key, None)
    return _modules[key]


def _compiled(name: str, defines: tuple[str, ...], device: int) -> Any:
    with cupy().cuda.Device(device):
        return new_module(name, source(name), (*options(), *(f"-D{each}" for each in defines)))


def prepare(modules: Iterable[tuple[str, tuple[str, ...]]]) -> None:
    """Has threads compile and load files for the current device; see Note [ahead].

    Does not wait, and does not raise what the compiler says: `load_module` does, where the file is needed.

    Args:
        modules: names and macros, as for `load_module`; those that are loaded or on their way are left out. What is
            needed first should come first.
    """
    device = cupy().cuda.runtime.getDevice()
    keys = [(name, defines, device) for name, defines in dict.fromkeys(modules)]
    keys = [key for key in keys if key not in _modules and key not in _coming]
    if not keys:
        return
    threads = ThreadPoolExecutor(min(_MOST_THREADS, len(keys), os.cpu_count() or 1), "flcuda-compile")
    for key in keys:
        _coming[key] = threads.submit(_compiled, *key)
    threads.shutdown(wait=False)


def new_module(name: str, text: str, flags: tuple[str, ...]) -> Any:
    """Compiles a text for the current device, without a look at what is loaded.

    Args:
        name: the file's name without `.cu`, for messages.
        text: as from `source`.
        flags: as from `options`.

    Returns:
        A cupy.RawModule.

    Raises:
        KernelCompileError: it does not compile; has NVRTC's log.
    """
    module = cupy()
    raw = module.RawModule(code=text, options=flags, backend="nvrtc")
    try:
        raw.compile()
    except module.cuda.compiler.CompileException as error:
        raise KernelCompileError(f"kernels/{name}.cu", str(error)) from error
    return raw


def launch(
    name: str, function: str, count: int, *arguments: Array | np.generic | None, defines: tuple[str, ...] = ()
) -> None:
    """Launches a grid-stride kernel over `count` items on CuPy's current stream; nothing for no items.

    Args:
        name: the kernel file.
        function: its kernel.
        count: items; threads beyond a limit take several each.
        *arguments: CuPy arrays (None is a null pointer) and NumPy scalars of the kernel's own types.
        defines: as for `load_module`.
    """
    grid = min(-(-count // BLOCK), _MAX_GRID)
    launch_blocks(name, function, (grid, 1), (BLOCK, 1), *arguments, defines=defines)


def launch_blocks(
    name: str,
    function: str,
    grid: tuple[int, int],
    block: tuple[int, int],
    *arguments: Array | np.generic | None,
    defines: tuple[str, ...] = (),
) -> None:
    """Launches a kernel whose launch shape has a meaning, on CuPy's current stream; nothing for no blocks.

    Args:
        name: the kernel file.
        function: its kernel.
        grid: blocks.
        block: threads of a block.
        *arguments: CuPy arrays (None is a null pointer) and NumPy scalars of the kernel's own types; a Python number
            would be passed as CuPy's idea of a type.
        defines: as for `load_module`.
    """
    assert not any(isinstance(a, int | float) and not isinstance(a, np.generic) for a in arguments), arguments
    if 0 in grid:
        return
    key = (name, function, defines, cupy().cuda.runtime.getDevice())
    kernel = _functions.get(key)
    if kernel is None:
        kernel = _functions[key] = load_module(name, defines).get_function(function)
    kernel(grid, block, tuple(_NULL if a is None else a for a in arguments))


_NULL = np.uint64(0)
