"""Finds, loads and verifies cuDNN, binds its functions when they are first called, and checks every status.

Note [search order]: the argument of ``load``; ``FLCUDA_CUDNN_PATH``; a cuDNN that this process has already mapped
(PyTorch's, say); the wheels in all site folders; ``CUDA_PATH`` and ``CUDA_HOME``; ``LD_LIBRARY_PATH``; the system's
folders. The first complete copy is taken. A given path (argument or variable) is taken or is an error: nothing else is
tried, and a different copy that is already mapped is an error that names both, because the dynamic loader ignores a
second file of the same soname.

Note [one folder]: cuDNN 9 is a small shim that opens its sub-libraries by bare name, so one that is missing beside it
silently comes from anywhere else on the machine, in another version. Therefore a folder counts only when it holds every
sub-library that its own shim and graph library name; all of them are opened by path, dependencies first, before
anything can open them by name; and afterwards ``/proc/self/maps`` must show no file of another folder.

Note [abort trap]: the five functions without a status (``cudnnGetVersion`` is one) end the process when the graph
library cannot be opened. None is called before it is open.

Importing this module loads nothing.
"""

import contextlib
import ctypes
import enum
import functools
import importlib.metadata
import inspect
import math
import mmap
import operator
import os
import re
import shutil
import site
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import ml_dtypes
import numpy as np

from flcuda.errors import NOT_SUPPORTED, CudnnError, LibraryNotFoundError, cudnn_error

PATH_VARIABLE = "FLCUDA_CUDNN_PATH"
OLDEST_MAJOR = 9
# The order in which the sub-libraries need one another; names that a later cuDNN adds come after these.
LOAD_ORDER = (
    "graph",
    "ops",
    "cnn",
    "adv",
    "ext",
    "heuristic",
    "engines_precompiled",
    "engines_tensor_ir",
    "engines_runtime_compiled",
)
# Opened when it can be: it needs the driver's libcuda.so.1.
BEST_EFFORT = frozenset({"engines_runtime_compiled"})
# What the nvidia-cudnn-jit wheels leave out: the legacy API and the pre-compiled engines.
NOT_IN_JIT = frozenset({"ops", "cnn", "adv", "ext", "engines_precompiled", "engines_tensor_ir", "heuristic"})
VERSION_CHECKS = {
    "graph": "cudnnGraphVersionCheck",
    "ops": "cudnnOpsVersionCheck",
    "cnn": "cudnnCnnVersionCheck",
    "adv": "cudnnAdvVersionCheck",
}
SUBLIBRARY_UNAVAILABLE = 3009  # CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE
# What a mixed or incomplete copy causes; the first is CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH.
MIXED_COPY_STATUSES = (1002, SUBLIBRARY_UNAVAILABLE)
# Opened by cuDNN by bare soname; in the CUDA 13 wheels its RUNPATH need not reach them.
NEIGHBOURS = (("cuda_nvrtc", "libnvrtc"), ("cublas", "libcublasLt"))

Bound = TypeVar("Bound", bound=Callable[..., Any])


# --- what a folder holds --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A place where cuDNN was looked for.

    Args:
        why: which step of the search order it is.
        path: the folder; empty when the step names none.
        files: the cuDNN files in it by their part ("" is the shim, "graph", "ops", ...), each a path.
        missing: the parts that this copy needs and has not.
        version: what wheel, file names or header beside it say; empty when nothing does. A file proves nothing; the
            library itself is asked once it is open.
        cuda_major: the CUDA major that the wheel was built for; 0 when unknown.
        problem: why it cannot be used; empty when it can.
    """

    why: str
    path: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    version: str = ""
    cuda_major: int = 0
    problem: str = ""

    @property
    def usable(self) -> bool:
        """Whether there is a cuDNN here that can be loaded."""
        return bool(self.files) and not self.problem

    @property
    def graph_only(self) -> bool:
        """Whether this is an nvidia-cudnn-jit copy: shim, graph and run-time compiled engine, no legacy API."""
        return "graph" in self.files and "ops" not in self.files and not self.problem and bool(self.missing)

    def __str__(self) -> str:
        where = f"{self.why}: {self.path}" if self.path else self.why
        if self.problem:
            return f"{where}: {self.problem}"
        if not self.files:
            return f"{where}: no cuDNN"
        version = f"cuDNN {self.version}" if self.version else "a cuDNN of unknown version"
        return f"{where}: {version}" + (", graph API only (nvidia-cudnn-jit)" if self.graph_only else "")


def _file_name(part: str) -> str:
    return f"libcudnn_{part}" if part else "libcudnn"


def _cudnn_files(folder: Path) -> tuple[int, dict[str, str]]:
    """Lists the cuDNN files of a folder by part, and the major version of its shim (0 when its name has none)."""
    candidates: dict[str, list[tuple[str, str]]] = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            match = re.fullmatch(r"libcudnn(?:_([a-z0-9_]+))?\.so((?:\.\d+)*)", entry.name)
            if match is not None and Path(entry.path).is_file():
                candidates.setdefault(match[1] or "", []).append((match[2], entry.path))
    majors = [int(suffix.split(".")[1]) for suffix, _ in candidates.get("", []) if suffix]
    usable = [major for major in majors if major >= OLDEST_MAJOR]
    major = min(usable) if usable else max(majors, default=0)
    # Like the dynamic loader, take the name with the bare major; a longer or a bare one only where that is missing.
    wanted = [f".{major}"] if major else []
    files: dict[str, str] = {}
    for part, found in sorted(candidates.items()):
        named = dict(found)
        same_major = sorted(suffix for suffix in named if suffix.startswith(f".{major}."))
        for suffix in [*wanted, *reversed(same_major), ""]:
            if suffix in named:
                files[part] = named[suffix]
                break
    if "" not in files:
        return major, {}
    return major, files


def _named_parts(path: str) -> set[str]:
    """Reads out of a cuDNN file which sub-libraries it opens by name; looks through its constants only."""
    with Path(path).open("rb") as stream:
        try:
            image = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # An empty file cannot be mapped.
            return set()
        with image:
            begin, end = _constants(image)
            parts = set()
            at = image.find(b"libcudnn_", begin, end)
            while at >= 0:
                match = re.match(rb"libcudnn_([a-z0-9_]+)\.so", image[at : at + 64])
                if match is not None:
                    parts.add(match[1].decode())
                at = image.find(b"libcudnn_", at + 9, end)
            return parts


def _constants(image: mmap.mmap) -> tuple[int, int]:
    """Finds the .rodata section of a 64-bit little-endian ELF file; the whole file when there is none."""
    whole = (0, len(image))
    if len(image) < 64 or image[:6] != b"\x7fELF\x02\x01":
        return whole
    table, size, count, names_index = struct.unpack_from("<Q10xHHH", image, 40)
    if size != 64 or table + size * count > len(image) or names_index >= count:
        return whole
    names_offset = struct.unpack_from("<Q", image, table + size * names_index + 24)[0]
    for index in range(count):
        name, _, _, _, offset, length = struct.unpack_from("<IIQQQQ", image, table + size * index)
        start = names_offset + name
        if image[start : start + 8] == b".rodata\x00" and offset + length <= len(image):
            return offset, offset + length
    return whole


def _cut_short(path: str) -> bool:
    """Says whether an ELF file ends before what it says it holds; opening such a file kills the process (SIGBUS)."""
    size = Path(path).stat().st_size
    with Path(path).open("rb") as stream:
        header = stream.read(64)
        if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
            return False  # The dynamic loader refuses it with words.
        (table,) = struct.unpack_from("<Q", header, 32)
        entry, count = struct.unpack_from("<HH", header, 54)
        stream.seek(table)
        segments = stream.read(entry * count)
    if len(segments) < entry * count:
        return True
    for index in range(count):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", segments, index * entry)
        if kind == 1 and offset + length > size:  # PT_LOAD
            return True
    return False


@dataclass(frozen=True)
class _Wheel:
    name: str
    version: str
    sizes: Mapping[str, int]

    @property
    def cuda_major(self) -> int:
        match = re.search(r"cu(\d+)$", self.name)
        return int(match[1]) if match else 0


def _wheels(folder: Path) -> list[_Wheel]:
    """Lists the installed wheels whose RECORD names files of a folder."""
    if len(folder.parents) < 3:
        return []
    root = folder.parents[2]  # Of site-packages/nvidia/cudnn/lib.
    inside = folder.relative_to(root).as_posix() + "/"
    wheels = []
    for info in sorted(root.glob("nvidia_cudnn*.dist-info")):
        name, _, version = info.name.removesuffix(".dist-info").partition("-")
        sizes: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError):
            for line in (info / "RECORD").read_text(encoding="utf-8").splitlines():
                path, _, size = line.rsplit(",", 2)
                if path.startswith(inside) and size:
                    sizes[path.removeprefix(inside)] = int(size)
        if sizes:
            wheels.append(_Wheel(name, version, sizes))
    return wheels


def _owning_wheel(folder: Path, files: Mapping[str, str]) -> tuple[_Wheel | None, str]:
    """Tells which wheel the files of a folder are of.

    The wheels for CUDA 12 and 13 install into the same folder, so the second one overwrites the first, or a part of it;
    RECORD's sizes tell.

    Returns:
        The wheel (None when there is none, or when the files match none), and a problem when they are of several.
    """
    wheels = _wheels(folder)
    owners: dict[str, list[_Wheel]] = {}
    for path in files.values():
        name = Path(path).name
        size = Path(path).stat().st_size
        owners[name] = [wheel for wheel in wheels if wheel.sizes.get(name) == size]
    for wheel in wheels:
        if all(wheel in found for found in owners.values()):
            return wheel, ""
    if len({found[0].name for found in owners.values() if found}) > 1:
        mixed = "; ".join(
            f"{name} is of {' or '.join(f'{wheel.name} {wheel.version}' for wheel in found) or 'no wheel'}"
            for name, found in owners.items()
        )
        return None, f"the files of several wheels are mixed here ({mixed}); uninstall all and install one"
    return None, ""


def _name_version(path: str) -> str:
    """Reads a version out of a file's own name, links followed: 9.22.0 of libcudnn_ops.so.9.22.0."""
    match = re.search(r"\.so\.(\d+\.\d+(?:\.\d+)*)$", os.path.realpath(path))
    return match[1] if match else ""


def _header_version(folder: Path) -> str:
    for header in (folder.parent / "include" / "cudnn_version.h", folder.parent / "include" / "cudnn_version_v9.h"):
        with contextlib.suppress(OSError):
            text = header.read_text(encoding="utf-8", errors="replace")
            numbers = [re.search(rf"#define CUDNN_{word}\s+(\d+)", text) for word in ("MAJOR", "MINOR", "PATCHLEVEL")]
            if all(numbers):
                return ".".join(number[1] for number in numbers if number)
    return ""


def _file_version(path: str) -> str:
    """Says which version a cuDNN file is, as far as its name, its wheel or a header tells; "" when none does."""
    version = _name_version(path)
    if version:
        return version
    folder = Path(os.path.realpath(path)).parent
    wheel, _ = _owning_wheel(folder, {"": os.path.realpath(path)})
    return wheel.version if wheel else _header_version(folder)


@functools.lru_cache(maxsize=64)
def _needed_parts(shim: str, graph: str, stamps: tuple[float, ...]) -> frozenset[str]:
    del stamps  # A part of the key only: a file that is replaced is read again.
    needed = _named_parts(shim)
    if graph:
        needed |= _named_parts(graph)
    return frozenset(needed)


def inspect_folder(why: str, folder: Path) -> Place:
    """Looks at a folder without opening any library.

    Args:
        why: which step of the search it belongs to.
        folder: the folder.

    Returns:
        What is there and what is wrong with it.
    """
    try:
        return _inspect(why, folder)
    except OSError as error:
        return Place(why, str(folder), problem=f"cannot be read: {error}")


def _inspect(why: str, folder: Path) -> Place:
    path = str(folder)
    if not folder.is_dir():
        return Place(why, path, problem="no such folder")
    major, files = _cudnn_files(folder)
    if not files:
        parts = sorted(entry.name for entry in folder.glob("libcudnn*.so*"))
        lost = f"{', '.join(parts)} without libcudnn.so.{OLDEST_MAJOR}" if parts else "no cuDNN"
        return Place(why, path, problem=lost)
    wheel, problem = _owning_wheel(folder, files)
    versions = {part: _file_version(file) for part, file in files.items()}
    version = wheel.version if wheel else versions[""]
    cuda_major = wheel.cuda_major if wheel else 0
    if 0 < major < OLDEST_MAJOR:
        return Place(
            why, path, files, (), version, cuda_major, f"cuDNN {major}; flcuda needs cuDNN {OLDEST_MAJOR} or newer"
        )
    # A wheel's fourth number is its build's, which file names and headers leave out.
    distinct = {".".join(number.split(".")[:3]) for number in versions.values() if number}
    if not problem and len(distinct) > 1:
        listed = ", ".join(f"{os.path.realpath(files[part])} ({versions[part]})" for part in sorted(files))
        problem = f"files of cuDNN {' and '.join(sorted(distinct))} are mixed here: {listed}"
    short = sorted(Path(file).name for file in files.values() if _cut_short(file))
    if short and not problem:
        problem = f"half installed: {', '.join(short)} {'is' if len(short) == 1 else 'are'} cut short"
    stamps = tuple(Path(files[part]).stat().st_mtime for part in ("", "graph") if part in files)
    needed = _needed_parts(files[""], files.get("graph", ""), stamps)
    missing = tuple(sorted(needed - files.keys(), key=_load_position))
    if missing and not problem and not _is_jit(files, missing):
        names = ", ".join(f"{_file_name(part)}.so.{major or OLDEST_MAJOR}" for part in missing)
        problem = f"half installed: {names} {'is' if len(missing) == 1 else 'are'} missing"
    return Place(why, path, files, missing, version, cuda_major, problem)


def _is_jit(files: Mapping[str, str], missing: Iterable[str]) -> bool:
    lost = set(missing)
    return {"graph", "engines_runtime_compiled"} <= files.keys() and {"ops", "cnn", "adv"} <= lost <= NOT_IN_JIT


def _load_position(part: str) -> tuple[int, str]:
    return (LOAD_ORDER.index(part) if part in LOAD_ORDER else len(LOAD_ORDER), part)


# --- where to look --------------------------------------------------------------------------------------------------


def mapped_files(prefix: str = "libcudnn") -> list[str]:
    """Lists the shared libraries mapped into this process.

    Args:
        prefix: how their names begin.

    Returns:
        Paths as the kernel knows them, links followed; sorted, each once.
    """
    found = set()
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            columns = line.rstrip("\n").split(maxsplit=5)
            if len(columns) == 6:
                name = columns[5].rpartition("/")[2]
                if name.startswith(prefix) and ".so" in name:
                    found.add(columns[5].removesuffix(" (deleted)"))
    return sorted(found)


def _mapped_cudnn() -> list[str]:
    found = []
    for path in mapped_files():
        match = re.match(r"libcudnn(?:_[a-z0-9_]+)?\.so(?:\.(\d+))?", path.rpartition("/")[2])
        # An older major has other sonames and lives beside this one.
        if match is not None and (match[1] is None or int(match[1]) >= OLDEST_MAJOR):
            found.append(path)
    return found


def _given_folder(path: str) -> Path:
    """Turns a given path into the folder with the libraries: a file's own, or lib or lib64 below a cuDNN's root."""
    given = Path(path).expanduser()
    if given.is_file():
        return given.parent.absolute()
    for folder in (given, given / "lib", given / "lib64"):
        if folder.is_dir() and _cudnn_files(folder)[1]:
            return folder.absolute()
    return given.absolute()


def site_folders() -> list[Path]:
    """Lists all folders in which wheels may be installed: sys.path, the site folders, the user's.

    Returns:
        Existing folders, each once, in that order.
    """
    folders = [entry for entry in sys.path if entry]
    with contextlib.suppress(AttributeError):
        folders += site.getsitepackages()
    with contextlib.suppress(AttributeError):
        folders.append(site.getusersitepackages())
    return _unique(Path(folder) for folder in folders)


def _unique(folders: Iterable[Path]) -> list[Path]:
    seen: dict[str, Path] = {}
    for folder in folders:
        if folder.is_dir():
            seen.setdefault(os.path.realpath(folder), folder.absolute())
    return list(seen.values())


def cupy_cuda_major() -> int:
    """Tells for which CUDA major the CuPy that is loaded, or else installed, was built.

    Returns:
        12 or 13, say; 0 when there is no CuPy, or several are installed.
    """
    module = sys.modules.get("cupy")
    if module is not None:
        with contextlib.suppress(Exception):
            return int(module.cuda.runtime.runtimeGetVersion()) // 1000
    majors = []
    for major in range(11, 20):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.distribution(f"cupy-cuda{major}x")
            majors.append(major)
    return majors[0] if len(majors) == 1 else 0


def _wheel_places() -> list[Place]:
    folders = []
    for folder in site_folders():
        nvidia = folder / "nvidia"
        folders += [nvidia / "cudnn" / "lib", nvidia / "cudnn_jit" / "lib", *sorted(nvidia.glob("cu[0-9]*/lib"))]
    places = [inspect_folder("wheel", folder) for folder in _unique(folders) if _has_any_part(folder)]
    if not places:
        return [Place("wheel", problem="no site folder has nvidia/cudnn/lib")]
    wanted = cupy_cuda_major()
    # Sorting is stable: within a class the order of the site folders stays.
    return sorted(places, key=lambda place: (place.graph_only, bool(wanted and place.cuda_major not in (0, wanted))))


def _variable_places() -> Iterator[Place]:
    for name in ("CUDA_PATH", "CUDA_HOME"):
        root = os.environ.get(name)
        if not root:
            yield Place(name, problem="not set")
            continue
        folders = [Path(root) / inside for inside in ("lib64", "lib", "targets/x86_64-linux/lib")]
        yield from _those_with_cudnn(name, folders, root)
    value = os.environ.get("LD_LIBRARY_PATH", "")
    folders = [Path(entry) for entry in value.split(":") if entry]
    if not folders:
        yield Place("LD_LIBRARY_PATH", problem="not set")
    else:
        yield from _those_with_cudnn("LD_LIBRARY_PATH", folders, value)


def _has_any_part(folder: Path) -> bool:
    return next(folder.glob("libcudnn*.so*"), None) is not None


def _those_with_cudnn(why: str, folders: Iterable[Path], text: str) -> list[Place]:
    places = [inspect_folder(why, folder) for folder in _unique(folders) if _has_any_part(folder)]
    return places or [Place(why, text)]


def _system_places() -> list[Place]:
    folders = []
    program = shutil.which("ldconfig", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if program is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            listing = subprocess.run([program, "-p"], capture_output=True, text=True, timeout=20, check=False).stdout
            folders = [
                Path(path).parent for path in re.findall(r"^\s*libcudnn\.so\S* .*=> (\S+)$", listing, re.MULTILINE)
            ]
    folders += [Path(f"/usr/lib/{os.uname().machine}-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib")]
    folders += [Path("/usr/local/cuda/lib64"), Path("/usr/local/lib")]
    return _those_with_cudnn("system", folders, "ldconfig and the usual folders")


def search_places(path: str | None = None) -> list[Place]:
    """Looks through all places for cuDNN, in the order of Note [search order], and opens nothing.

    Args:
        path: a folder with cuDNN's files, a root with lib or lib64 in it, or the path of libcudnn.so.9 itself.

    Returns:
        What is where. Steps that name no place are there too and say so.
    """
    return list(_search(path))


def _search(path: str | None) -> Iterator[Place]:
    """Yields the places one by one, so that a search that has found its copy looks no further."""
    yield inspect_folder("argument", _given_folder(path)) if path else Place("argument", problem="not given")
    variable = os.environ.get(PATH_VARIABLE)
    yield (
        inspect_folder(PATH_VARIABLE, _given_folder(variable)) if variable else Place(PATH_VARIABLE, problem="not set")
    )
    mapped = _mapped_cudnn()
    for folder in _unique(Path(file).parent for file in mapped):
        yield inspect_folder("already loaded", folder)
    if not mapped:
        yield Place("already loaded", problem="nothing has loaded a cuDNN")
    yield from _wheel_places()
    yield from _variable_places()
    yield from _system_places()


# --- loading --------------------------------------------------------------------------------------------------------


class Library:
    """The cuDNN that this process uses.

    Attributes:
        path: the folder it was loaded from.
        version: as cudnnGetVersion gives it: 92800 is 9.28.0.
        cuda_version: the CUDA version it was built with, such as 12090; 0 when it does not tell.
        files: the paths of all files opened, in the order of opening.
        why: the step of the search that chose it.
        skipped: sub-libraries that could not be opened and need not be, each with the loader's reason.
        graph_only: whether it is an nvidia-cudnn-jit copy without the legacy API.
        missing_neighbours: which of NVRTC and cuBLASLt were found nowhere.
    """

    missing_neighbours: tuple[str, ...] = ()

    def __init__(self, place: Place, opened: Mapping[str, ctypes.CDLL], skipped: Mapping[str, str]) -> None:
        self.path = place.path
        self.why = place.why
        self.files = tuple(place.files[part] for part in opened)
        self.skipped = {place.files[part]: reason for part, reason in skipped.items()}
        self.graph_only = place.graph_only
        self._shim = opened[""]
        self._own = frozenset(os.path.realpath(file) for file in place.files.values())
        self.version = self._number("cudnnGetVersion")
        self.cuda_version = self._number("cudnnGetCudartVersion")

    def require_cublas(self) -> None:
        """Refuses to go on where cuDNN would end the process, because it opens cuBLASLt and that is nowhere.

        Raises:
            LibraryNotFoundError: says what to install.
        """
        for name in self.missing_neighbours:
            if "cublas" in name:
                major = self.cuda_version // 1000
                raise LibraryNotFoundError(
                    f"cuDNN in {self.path} needs {name}, which is neither beside it, in another site folder nor in the "
                    f"system's: pip install nvidia-cublas{'-cu12' if major == 12 else ''}, or set LD_LIBRARY_PATH",
                    (self.path, *(str(folder / "nvidia") for folder in site_folders())),
                )

    @property
    def version_text(self) -> str:
        """The version as people write it: 9.28.0."""
        return version_text(self.version)

    def function(self, name: str) -> Any:
        """Looks a function up.

        Args:
            name: its C name.

        Returns:
            A new ctypes function pointer, so that its argtypes and restype are the caller's own.

        Raises:
            AttributeError: this cuDNN has no such function.
        """
        return self._shim[name]

    def foreign_files(self) -> list[str]:
        """Lists the cuDNN files mapped into this process that are not of this copy."""
        return [file for file in _mapped_cudnn() if os.path.realpath(file) not in self._own]

    def verify(self) -> None:
        """Checks Note [one folder] again: cuDNN opens its engines late.

        Raises:
            LibraryNotFoundError: another copy's file is mapped; names every path and version.
        """
        if self.foreign_files():
            raise LibraryNotFoundError(f"two copies of cuDNN are mixed in this process:\n{describe_mapped_files()}")

    def _number(self, name: str) -> int:
        try:
            function = self.function(name)
        except AttributeError:
            return 0
        function.restype = ctypes.c_size_t
        return int(function())


def version_text(version: int) -> str:
    """Writes a version number as people do.

    Args:
        version: as cudnnGetVersion gives it.

    Returns:
        "9.28.0" for 92800, "8.0.3" for 8003.
    """
    major_step = 10000 if version >= 10000 * OLDEST_MAJOR else 1000
    return f"{version // major_step}.{version % major_step // 100}.{version % 100}"


def describe_mapped_files() -> str:
    """Lists every cuDNN file mapped into this process with its version, a line each."""
    lines = [f"  {file} (cuDNN {_file_version(file) or 'of unknown version'})" for file in _mapped_cudnn()]
    return "\n".join(lines) or "  none"


_lock = threading.RLock()
_library: Library | None = None


def is_loaded() -> bool:
    """Says whether cuDNN has been loaded by flcuda."""
    return _library is not None


def load(path: str | None = None) -> Library:
    """Finds, opens and verifies cuDNN; later calls give the same library. Safe from any thread.

    Args:
        path: a folder with cuDNN's files, a root with lib or lib64 in it, or the path of libcudnn.so.9 itself. Without
            it Note [search order] holds.

    Returns:
        The library.

    Raises:
        LibraryNotFoundError: there is none, or it is incomplete, mixed or too old, or another one than the given path's
            is loaded already. Lists the places searched and what is missing where.
    """
    global _library
    with _lock:
        if _library is not None:
            if path and os.path.realpath(_given_folder(path)) != os.path.realpath(_library.path):
                raise LibraryNotFoundError(
                    f"cuDNN was asked for from {_given_folder(path)}, but this process uses the one of {_library.path}"
                )
            return _library
        place, places = _choose(path)
        library = _open(place, places)
        _library = library
        return library


def _choose(path: str | None) -> tuple[Place, list[str]]:
    places: list[str] = []
    fallback: Place | None = None
    for place in _search(path):
        places.append(str(place))
        given = place.why in ("argument", PATH_VARIABLE) and bool(place.path)
        if place.why == "already loaded" and place.path and not place.usable:
            _fail(
                f"the cuDNN that this process has already mapped, {place.path}, cannot be used: {place.problem}", places
            )
        if given:
            if not place.usable:
                _fail(f"{place.path} ({place.why}) cannot be used: {place.problem}", places)
            _refuse_other_copy(place, places)
        if place.usable and (given or place.why == "already loaded" or not place.graph_only):
            return place, places
        if place.usable and fallback is None:
            fallback = place
    if fallback is None:
        major = cupy_cuda_major() or 12
        _fail(f"cuDNN {OLDEST_MAJOR} was not found; install it with: pip install nvidia-cudnn-cu{major}", places)
    return fallback, places


def _refuse_other_copy(place: Place, places: list[str]) -> None:
    own = {os.path.realpath(file) for file in place.files.values()}
    other = [file for file in _mapped_cudnn() if os.path.realpath(file) not in own]
    if other:
        _fail(
            f"cuDNN is to come from {place.path} ({place.why}, cuDNN {place.version or 'of unknown version'}), but "
            f"another copy is mapped already, and a process can use only one:\n{describe_mapped_files()}",
            places,
        )


def _fail(message: str, places: Iterable[str], cause: BaseException | None = None) -> NoReturn:
    raise LibraryNotFoundError(message, tuple(places)) from cause


def _open(place: Place, places: list[str]) -> Library:
    if place.why == "already loaded":
        _refuse_other_copy(place, places)
    opened: dict[str, ctypes.CDLL] = {}
    skipped: dict[str, str] = {}
    order = [*sorted((part for part in place.files if part), key=_load_position), ""]
    for part in order:
        try:
            opened[part] = ctypes.CDLL(place.files[part], mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            if part in BEST_EFFORT and "cannot open shared object file" in str(error):
                skipped[part] = str(error)
                continue
            hint = " (zlib is missing: install zlib1g or zlib)" if "libz.so" in str(error) else ""
            message = f"{place.files[part]} cannot be opened: {error}{hint}"
            if "undefined symbol" in str(error):
                message += f"\nFiles of different cuDNN versions are mixed:\n{describe_mapped_files()}"
            _fail(message, places, error)
    if "graph" in opened:
        _check_same_folder(place, places)
    _check_versions(place, opened, places)
    library = Library(place, opened, skipped)
    if library.version < 10000 * OLDEST_MAJOR:
        _fail(
            f"{place.files['']} is cuDNN {library.version_text} ({library.version}); flcuda needs cuDNN "
            f"{OLDEST_MAJOR}.0.0 or newer",
            places,
        )
    _check_same_folder(place, places)
    library.missing_neighbours = _open_neighbours(place, library.cuda_version // 1000)
    return library


def _check_same_folder(place: Place, places: list[str]) -> None:
    own = {os.path.realpath(file) for file in place.files.values()}
    foreign = [file for file in _mapped_cudnn() if os.path.realpath(file) not in own]
    if foreign:
        _fail(
            f"cuDNN was loaded from {place.path}, but {', '.join(foreign)} came from elsewhere:\n"
            f"{describe_mapped_files()}",
            places,
        )


def _check_versions(place: Place, opened: Mapping[str, ctypes.CDLL], places: list[str]) -> None:
    for part, name in VERSION_CHECKS.items():
        # Only for a part that is open here: the shim would look for another one on the machine.
        if part not in opened:
            continue
        try:
            status = int(opened[""][name]())
        except AttributeError:
            continue
        if status != 0:
            _fail(
                f"{place.files[part]} is of another version than the rest ({name} gives status {status}):\n"
                f"{describe_mapped_files()}",
                places,
            )


def _open_neighbours(place: Place, cuda_major: int) -> tuple[str, ...]:
    """Opens NVRTC and cuBLASLt, which cuDNN's engines open by bare name when they need them.

    Those of cuDNN's own site folder come first, then those of the others, then the system's.

    Args:
        place: where cuDNN is.
        cuda_major: the CUDA version that it was built with; 0 when it does not tell.

    Returns:
        The names of those that are nowhere.
    """
    if cuda_major == 0:
        return ()
    roots = [*Path(place.path).parents[1:2], *(folder / "nvidia" for folder in site_folders())]
    missing = []
    for package, stem in NEIGHBOURS:
        name = f"{stem}.so.{cuda_major}"
        if mapped_files(name):
            continue
        files = [root / folder / "lib" / name for root in roots for folder in (package, f"cu{cuda_major}")]
        for file in (*(str(file) for file in files if file.is_file()), name):
            with contextlib.suppress(OSError):
                ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
                break
        else:
            missing.append(name)
    return tuple(missing)


# --- binding --------------------------------------------------------------------------------------------------------


def last_error_string() -> str:
    """Gives cuDNN's text for the last call that failed on this thread; reading it clears it.

    Returns:
        The text; empty when there is none.
    """
    try:
        function = load().function("cudnnGetLastErrorString")
    except AttributeError:
        return ""
    function.restype = None
    function.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    buffer = ctypes.create_string_buffer(4096)
    function(buffer, len(buffer))
    return buffer.value.decode(errors="replace").strip()


def _status_name(status: int) -> str:
    try:
        function = load().function("cudnnGetErrorString")
    except AttributeError:
        return ""
    function.restype = ctypes.c_char_p
    function.argtypes = (ctypes.c_int,)
    name = (function(status) or b"").decode(errors="replace")
    return "" if "UNKNOWN" in name else name


def failure(name: str, status: int) -> CudnnError:
    """Makes the error of a cuDNN function that failed on this thread a moment ago.

    Args:
        name: the function's C name.
        status: what it returned.

    Returns:
        The error, with cuDNN's last-error text and the status's name.
    """
    # First of all, because the text belongs to this thread's last failing call.
    text = last_error_string()
    library = load()
    if status == SUBLIBRARY_UNAVAILABLE and library.graph_only:
        wheel = f"nvidia-cudnn-cu{library.cuda_version // 1000}"
        text = (
            f"{library.path} is an nvidia-cudnn-jit copy, which has no legacy API; pip install {wheel} has it. {text}"
        )
    error = cudnn_error(name, status, text.strip(), _status_name(status))
    if status in MIXED_COPY_STATUSES:
        error.add_note(f"cuDNN's files in this process:\n{describe_mapped_files()}")
    return error


def _look_up(name: str, since: str) -> Any:
    library = load()
    try:
        return library.function(name)
    except AttributeError:
        brought = f"cuDNN {since} brought it" if since else "a newer cuDNN brought it, or this one dropped it"
        text = f"cuDNN {library.version_text} of {library.path} has no such function; {brought}"
        raise cudnn_error(name, NOT_SUPPORTED, text, "CUDNN_STATUS_NOT_SUPPORTED") from None


def bind(restype: Any, *argtypes: Any, status: bool, since: str = "") -> Callable[[Bound], Bound]:
    """Makes a typed stub call the cuDNN function of its name.

    The library is loaded and the symbol looked up on the first call, then kept. This wrapper is the one place where a
    status is checked.

    Args:
        restype: the ctypes type of the result; not used when status is True.
        *argtypes: the ctypes types of the parameters.
        status: whether the function returns a cudnnStatus_t.
        since: the version that brought the function, when it is newer than 9.0.

    Returns:
        A decorator. The decorated function takes the stub's parameters, by position or keyword, returns None for a
        status function and raises CudnnError when the status is not success; a function that the loaded cuDNN lacks
        raises CudnnNotSupportedError.
    """

    def decorate(stub: Bound) -> Bound:
        name = stub.__name__
        count = len(argtypes)
        convert = argument_converter(stub, argtypes)
        function: Any = None

        @functools.wraps(stub)
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal function
            if function is None:
                symbol = _look_up(name, since)
                symbol.argtypes = argtypes
                symbol.restype = ctypes.c_int if status else restype
                function = symbol
            if keywords or len(arguments) != count:
                arguments = _arrange(stub, arguments, keywords)
            if convert is not None:
                arguments = convert(arguments)
            try:
                result = function(*arguments)
            except ctypes.ArgumentError as error:
                raise _argument_error(stub, str(error)) from None
            if status:
                if result != 0:
                    raise failure(name, result)
                return None
            return result

        return call  # type: ignore[return-value]

    return decorate


def _arrange(stub: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
    signature = inspect.signature(stub)
    try:
        return signature.bind(*arguments, **keywords).args
    except TypeError as error:
        raise TypeError(f"{stub.__name__}({', '.join(signature.parameters)}): {error}") from None


def _argument_error(stub: Callable[..., Any], text: str) -> Exception:
    """Turns the text of a ctypes.ArgumentError into the error that says which parameter it is."""
    match = re.match(r"argument (\d+): (?:<class ')?(\w+)(?:'>)?: (.*)", text, re.DOTALL)
    if match is None:
        return TypeError(f"{stub.__name__}: {text}")
    parameter = list(inspect.signature(stub).parameters)[int(match[1]) - 1]
    kind = ValueError if match[2] in ("ValueError", "OverflowError") else TypeError
    return kind(f"{stub.__name__}: {parameter}: {match[3]}")


# --- Argument conversion --------------------------------------------------------------------------------------------
#
# What bindings.py puts into its argument types: objects with ctypes' from_param. Each turns what Python users have
# (arrays, owners, numbers, sequences) into what C wants, refuses what C would misread, and names in `ctype` the C type
# that it passes. They run on every call, so the common case comes first and is short.

_SIMPLE: Any = ctypes.c_int.__mro__[1]  # all scalars of ctypes; its name is private there
_ADDRESSES = 1 << 64
_POINTER: Any = ctypes.POINTER(ctypes.c_int).__mro__[1]
_BYREF: Any = type(ctypes.byref(ctypes.c_int()))


class CEnum(enum.IntEnum):
    """A C enum. As an argument: a member, or the number of one; a member of another enum is a ``TypeError``."""

    @classmethod
    def from_param(cls, value: Any) -> int:
        """Converts an argument of this enum; ctypes passes the int as a C int."""
        if type(value) is cls:
            return value
        if isinstance(value, enum.Enum):
            raise TypeError(f"expected a {cls.__name__}, got {value!r}")
        number = _index(value.value if isinstance(value, _SIMPLE) else value, cls.__name__)
        if number not in cls._value2member_map_ and not _newer_than_headers():
            # cuDNN answers an unknown value with a misleading status or worse, so it does not get there.
            raise ValueError(f"{number} is no value of {cls.__name__}")
        return number


class Integer:
    """An integer passed by value: anything with ``__index__``, and in the range of the C type.

    Args:
        ctype: the C type.
        bare: whether an int is given back as it is; ctypes would pass it as a C int.
    """

    def __init__(self, ctype: Any, *, bare: bool = False) -> None:
        self.ctype = ctype
        self.low, self.high = _range(ctype)
        self._bare = bare or ctype is ctypes.c_int

    def from_param(self, value: Any) -> Any:
        """Converts an argument."""
        if type(value) is not int:
            value = _index(value.value if isinstance(value, _SIMPLE) else value, self.ctype.__name__)
        if not self.low <= value <= self.high:
            raise ValueError(f"{value} is outside the range of {self.ctype.__name__}, {self.low} to {self.high}")
        return value if self._bare else self.ctype(value)


class Address(ctypes.c_void_p):
    """A CUDA object that C knows by its address: an int, None for NULL, or an object with ``.ptr`` (a CuPy stream)."""

    @classmethod
    def from_param(cls, value: Any) -> Any:
        """Converts an argument; the object stays the caller's."""
        if value is None or isinstance(value, ctypes.c_void_p):
            return value
        if type(value) is not int:
            if hasattr(value, "_as_parameter_"):
                return cls.from_param(value._as_parameter_)
            value = getattr(value, "ptr", value)
        return _address(value)


class DevicePointer:
    """A pointer to device memory: a CuPy array, anything with an int ``.ptr``, an int, a ctypes pointer, or None.

    A NumPy array is refused: a kernel reading host memory fails later, elsewhere, and without a name. Managed or mapped
    memory is passed by its address as an int. Strides are the descriptor's affair, so any CuPy array will do.
    """

    ctype = ctypes.c_void_p

    def from_param(self, value: Any) -> Any:
        """Converts an argument; the memory stays the caller's."""
        if value is None:
            return None
        if isinstance(value, int):
            return _address(value)
        try:
            return ctypes.c_void_p(value.data.ptr)  # a CuPy array
        except AttributeError:
            pass
        if isinstance(value, np.integer):
            return _address(value)
        if isinstance(value, np.ndarray):
            raise TypeError("expected device memory (a CuPy array), got a NumPy array, which is in host memory")
        if hasattr(value, "ptr"):
            return _address(value.ptr)
        return _raw_pointer(value)


class HostPointer:
    """A pointer to host memory of a type that C leaves open: a NumPy array, a ctypes object, or None.

    An int is refused: it may be meant as the value; ``ctypes.c_void_p(address)`` passes an address. A handle or
    descriptor itself is refused too: cuDNN wants the address of a variable that holds it, ``byref(descriptor)``.

    Args:
        const: whether the function only reads it; otherwise a read-only array is refused.
        device_too: whether a CuPy array and an address as an int are accepted as well, for parameters that take either.
    """

    ctype = ctypes.c_void_p

    def __init__(self, *, const: bool = False, device_too: bool = False) -> None:
        self._const = const
        self._device_too = device_too

    def from_param(self, value: Any) -> Any:
        """Converts an argument; the memory stays the caller's."""
        if value is None:
            return None
        if isinstance(value, np.ndarray):
            return _host_array(value, writable=not self._const)
        if self._device_too:
            memory = getattr(value, "data", value)
            address = getattr(memory, "ptr", memory)
            if isinstance(address, int):
                return _address(address)
        return _raw_pointer(value, opaque=self._device_too)


class TypedPointer:
    """A pointer to host memory of a known type: ``byref(x)``, a ctypes object, a NumPy array of that dtype, or None.

    Args:
        ctype: the type pointed to; for an enum (a subclass of `CEnum`) C's int of either sign is accepted.
        const: whether the function only reads it. Then a sequence of numbers is accepted too.
    """

    def __init__(self, ctype: Any, *, const: bool = False) -> None:
        is_enum = issubclass(ctype, CEnum)
        element: Any = ctypes.c_int if is_enum else ctype
        accepted = [element]
        if is_enum:
            accepted.append(ctypes.c_uint)
        elif issubclass(element, Address):
            accepted.append(ctypes.c_void_p)
        self.ctype = ctypes.POINTER(element)
        self.target = ctype
        self._element = element
        self._pointers = tuple(ctypes.POINTER(kind) for kind in accepted)
        is_number = issubclass(element, _SIMPLE) and not issubclass(element, ctypes.c_void_p)
        self._dtypes = tuple(np.dtype(kind) for kind in accepted) if is_number else ()
        self.const = const
        self._item: Callable[[Any], Any] | None = None
        if is_enum:
            self._item = ctype.from_param
        elif is_number and element._type_ in _INTEGERS:
            self._item = Integer(element, bare=True).from_param

    def from_param(self, value: Any) -> Any:
        """Converts an argument; the memory stays the caller's."""
        for pointer in self._pointers:
            try:
                return pointer.from_param(value)
            except TypeError:
                continue
        if isinstance(value, np.ndarray) and self._dtypes:
            if value.dtype not in self._dtypes:
                raise TypeError(f"expected a NumPy array of {self._dtypes[0]}, got one of {value.dtype}")
            return _host_array(value, writable=not self.const)
        if self._item is not None and self.const and _is_list(value):
            return self._array(value, self._item)
        wanted = getattr(self._element, "__name__", str(self._element))
        raise TypeError(f"expected a pointer to {wanted} in host memory, got {_describe(value)}")

    def _array(self, values: Sequence[Any], convert: Callable[[Any], Any]) -> Any:
        """Copies a sequence of ints to a C array, which lives as long as the call."""
        numbers = []
        for position, value in enumerate(values):
            try:
                number = convert(value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"element {position}: {error}") from None
            numbers.append(number)
        return (self._element * len(numbers))(*numbers)


class Scaling:
    """A pointer to one number on the host whose C type follows from a tensor of the same call.

    A Python number is converted to that type. A NumPy or ctypes scalar is passed by address as it is, once its type was
    found to be that type. ``byref(c_float(1))`` and other pointers are passed unchecked, which saves the question to
    cuDNN (about a microsecond).

    Args:
        descriptor: index of the argument whose descriptor decides.
        kind: "tensor" or "filter": which descriptor that is.
        exact: the number has the tensor's own data type; otherwise the scaling type, double for a double tensor and
            float for all others.
    """

    ctype = ctypes.c_void_p

    def __init__(self, descriptor: int, kind: str = "tensor", *, exact: bool = False) -> None:
        self.descriptor = descriptor
        self._kind = kind
        self._exact = exact

    def from_param(self, value: Any) -> Any:
        """Converts an argument that `typed` has seen: only pointers are left."""
        return None if value is None else _raw_pointer(value)

    def data_type(self, arguments: Sequence[Any]) -> int:
        """Asks the deciding descriptor for the data type that the number must have, as a cudnnDataType_t."""
        code = _data_type(arguments[self.descriptor], self._kind)
        return code if self._exact or code == _DOUBLE else _FLOAT

    def typed(self, value: Any, code: int) -> Any:
        """Makes a pointer to the right type from a number.

        Args:
            value: the argument: a number, or a pointer, which is returned as it is.
            code: what `data_type` gave.

        Returns:
            A pointer that keeps its memory alive.

        Raises:
            TypeError: a typed number of the wrong type.
            ValueError: a Python number that the type cannot hold.
        """
        if type(value) is _C_TYPES.get(code):
            return ctypes.byref(value)
        dtype = _DTYPES.get(code)
        if dtype is None:
            raise TypeError(f"a number cannot be converted to cuDNN's data type {code}: pass a pointer to it")
        if isinstance(value, int | float) and not isinstance(value, np.generic):
            number = _fitted(value, dtype)
        else:
            number = np.array(value.value, np.dtype(type(value))) if isinstance(value, _SIMPLE) else np.array(value)
            if number.dtype != dtype or number.size != 1:
                raise TypeError(f"expected one {dtype} for tensors of this data type, got {_describe(value)}")
        return (ctypes.c_char * number.nbytes).from_buffer(number.reshape(1).view(np.uint8))


def _fitted(value: float, dtype: Any) -> Any:
    """Makes an array of one Python number, which has to fit."""
    number = np.empty(1, dtype)
    try:
        with np.errstate(over="ignore"):
            number[0] = value
        fits = bool(number[0] == value) if dtype.kind in "iu" else math.isinf(value) or not math.isinf(number[0])
    except OverflowError:
        fits = False
    if not fits:
        raise ValueError(f"{value!r} does not fit in {dtype}")
    return number


def _is_number(value: Any) -> bool:
    kinds = (int, float, np.generic, np.ndarray, _SIMPLE)
    return isinstance(value, kinds) and not isinstance(value, ctypes.c_void_p)


class Callback:
    """A function pointer: an instance of the function type, or None.

    Note: whatever was passed once is kept alive for the life of the process, because cuDNN may call it at any time.
    """

    def __init__(self, ctype: Any) -> None:
        self.ctype = ctype
        self._kept: list[Any] = []

    def from_param(self, value: Any) -> Any:
        """Converts an argument."""
        if value is None:
            return None
        if not isinstance(value, self.ctype):
            raise TypeError(f"expected a {self.ctype.__name__}, got {_describe(value)}")
        if not any(value is kept for kept in self._kept):
            self._kept.append(value)
        return value


def argument_converter(
    stub: Callable[..., Any], argtypes: tuple[Any, ...]
) -> Callable[[tuple[Any, ...]], tuple[Any, ...]] | None:
    """Makes the function for what one argument alone cannot tell: the type of scaling factors, the length of arrays.

    Args:
        stub: the function's stub; its parameters' names are C's.
        argtypes: its argument types.

    Returns:
        A function from all arguments, in order, to as many that the argument types take; None when there is nothing
        of the kind among them.
    """
    scalings = tuple((index, argtype) for index, argtype in enumerate(argtypes) if isinstance(argtype, Scaling))
    if not scalings:
        return _length_checker(stub, argtypes)

    # All scaling factors of a function follow the same descriptor.
    first = scalings[0][1]
    indices = tuple(index for index, _ in scalings)

    def convert(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        numbers = [index for index in indices if type(arguments[index]) is not _BYREF and _is_number(arguments[index])]
        if not numbers:
            return arguments
        code = first.data_type(arguments)
        converted = list(arguments)
        for index in numbers:
            try:
                converted[index] = first.typed(arguments[index], code)
            except (TypeError, ValueError) as error:
                parameter = list(inspect.signature(stub).parameters)[index]
                raise type(error)(f"{stub.__name__}: {parameter}: {error}") from None
        return tuple(converted)

    return convert


# How C names the number of elements of the arrays to read that follow it.
_COUNTS = ("nbDims", "arrayLength", "batchSize", "seqLengthArraySize")
# Arrays that have an element for each spatial dimension only: two fewer.
_SPATIAL = ("foldA",)


def _length_checker(
    stub: Callable[..., Any], argtypes: tuple[Any, ...]
) -> Callable[[tuple[Any, ...]], tuple[Any, ...]] | None:
    """Makes the function that refuses an array with fewer elements than C is told to read."""
    names = stub.__code__.co_varnames
    pairs = []
    count = -1
    for index, argtype in enumerate(argtypes):
        if names[index] in _COUNTS:
            count = index
        elif count >= 0 and isinstance(argtype, TypedPointer) and argtype.const:
            pairs.append((index, count, 2 if names[index] in _SPATIAL else 0))
    if not pairs:
        return None

    def check(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        for index, count, fewer in pairs:
            array, wanted = arguments[index], arguments[count]
            if _is_list(array) or isinstance(array, np.ndarray | ctypes.Array):
                length = array.size if isinstance(array, np.ndarray) else len(array)
                # What is no int, or none of C's, is the count's own mistake.
                if isinstance(wanted, int | np.integer) and length + fewer < wanted < 1 << 31:
                    raise ValueError(
                        f"{stub.__name__}: {names[index]}: has {length} elements where {names[count]} is {wanted}"
                    )
        return arguments

    return check


_FLOAT, _DOUBLE = 0, 1  # CUDNN_DATA_FLOAT, CUDNN_DATA_DOUBLE: this module is below bindings, which has their names
_DTYPES = {
    _FLOAT: np.dtype(np.float32),
    _DOUBLE: np.dtype(np.float64),
    2: np.dtype(np.float16),
    3: np.dtype(np.int8),
    4: np.dtype(np.int32),
    6: np.dtype(np.uint8),
    9: np.dtype(ml_dtypes.bfloat16),
    10: np.dtype(np.int64),
}
"""NumPy's dtype of each cudnnDataType_t whose single values can be told apart and converted."""
_C_TYPES = {_FLOAT: ctypes.c_float, _DOUBLE: ctypes.c_double}
_INTEGERS = "bBhHiIlLqQ"


def _data_type(descriptor: Any, kind: str) -> int:
    """Asks a tensor or filter descriptor for its data type; that of float for what cuDNN does not know."""
    data_type, number, dimension, last = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    outputs = (ctypes.byref(data_type), ctypes.byref(number), ctypes.byref(dimension), ctypes.byref(last))
    try:
        status: int = _descriptor_query(kind)(descriptor, 1, *outputs)
    except ctypes.ArgumentError:
        return _FLOAT  # the call itself refuses the descriptor, by the parameter's name
    return data_type.value if status == 0 else _FLOAT


@functools.cache
def _descriptor_query(kind: str) -> Any:
    # Of both functions the first of four outputs is the data type; the others have room for one dimension.
    function = load().function("cudnnGetTensorNdDescriptor" if kind == "tensor" else "cudnnGetFilterNdDescriptor")
    function.argtypes = (ctypes.c_void_p, ctypes.c_int, *[ctypes.c_void_p] * 4)
    return function


_headers_version = 0


def declare_headers(version: int) -> None:
    """Says which version's headers bindings.py was generated from; bindings.py calls it.

    Args:
        version: their CUDNN_VERSION.
    """
    global _headers_version
    _headers_version = version


def _newer_than_headers() -> bool:
    """Tells whether the loaded cuDNN may know more values of an enum than bindings.py."""
    return is_loaded() and load().version > _headers_version


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _index(value: Any, wanted: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"expected an int for {wanted}, got {_describe(value)}") from None


def _range(ctype: Any) -> tuple[int, int]:
    bits = 8 * ctypes.sizeof(ctype)
    signed = ctype(-1).value == -1
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


def _address(value: Any) -> Any:
    number = _index(value, "an address")
    if not 0 <= number < _ADDRESSES:
        raise ValueError(f"{number} is no address")
    return ctypes.c_void_p(number)


def _host_array(array: Any, *, writable: bool) -> Any:
    if not array.flags.c_contiguous:
        raise ValueError("expected a contiguous NumPy array; C sees only its first address")
    if writable and not array.flags.writeable:
        raise ValueError("expected a writable NumPy array, as the function writes to it")
    return ctypes.c_void_p(array.ctypes.data)


def _raw_pointer(value: Any, *, opaque: bool = False) -> Any:
    """Takes what ctypes itself knows as a pointer: byref, pointers, arrays, structures' owners; no text, no bytes.

    A handle or descriptor points to memory of cuDNN's own, which is nobody's data; C, to which all are `void *`, would
    read it as such. Only `opaque` lets one through.
    """
    if isinstance(value, _BYREF | ctypes.Array | ctypes.c_void_p):
        return value
    if isinstance(value, _POINTER):
        target = type(value)._type_
        if not opaque and issubclass(target, ctypes.Structure) and not hasattr(target, "_fields_"):
            raise TypeError(f"expected memory, got a pointer to an opaque {target.__name__}; byref gives its address")
        return value
    if isinstance(value, ctypes.Structure | _SIMPLE):
        return ctypes.byref(value)
    if hasattr(value, "_as_parameter_"):
        return _raw_pointer(value._as_parameter_, opaque=opaque)
    raise TypeError(f"expected a pointer, got {_describe(value)}")


def _describe(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        # repr would copy a device array to the host.
        return f"{type(value).__module__}.{type(value).__name__} of {value.dtype}, shape {tuple(value.shape)}"
    if isinstance(value, _BYREF):
        return f"byref of a {type(value._obj).__name__}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} of type {type(value).__name__}"
