"""A stub cuDNN, compiled from the real headers, that records what it is called with; and the calls that prove it.

The prototypes come from a reading of the headers with regular expressions, independent of libclang and of
flcuda.cudnn.generate, so that a mistake of the generator cannot hide in its own test.

As a program (``python stub_cudnn.py FOLDER``), in a process of its own because a process can have only one cuDNN, it
loads the stub through flcuda, calls every function and prints as JSON what was sent and what arrived.
"""

import ctypes
import importlib.util
import json
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEADERS = ("graph", "ops", "adv", "cnn", "subquadratic_ops", "gnn_ops")
MOST_ARGUMENTS = 48
SEEN_BYTES = 64


@dataclass(frozen=True)
class Prototype:
    """A function as the header spells it: parameters are (type without name, name), arrays as ``int[]``."""

    name: str
    result: str
    parameters: tuple[tuple[str, str], ...]


def nvidia_folder(inside: str, file: str) -> Path | None:
    """Finds a folder of an installed NVIDIA wheel that has a file."""
    spec = importlib.util.find_spec("nvidia")
    for root in [] if spec is None else list(spec.submodule_search_locations or []):
        if (Path(root) / inside / file).is_file():
            return Path(root) / inside
    return None


def include_folders() -> list[Path]:
    """The folders that a C file with ``#include <cudnn.h>`` needs; raises LookupError saying what is missing."""
    if shutil.which("gcc") is None:
        raise LookupError("gcc is not installed")
    folders = []
    for inside, file in (
        ("cudnn/include", "cudnn.h"),
        ("cuda_runtime/include", "cuda_runtime_api.h"),
        ("cuda_nvcc/include", "crt/host_defines.h"),
    ):
        folder = nvidia_folder(inside, file)
        if folder is None:
            raise LookupError(f"{file} is not installed")
        folders.append(folder)
    return folders


def source_text(folder: Path) -> str:
    """All of cuDNN's public headers, without comments and preprocessor lines."""
    paths = [folder / f"cudnn_{name}.h" for name in HEADERS]
    # An older cuDNN has not all of them.
    text = "".join(path.read_bytes().decode("latin-1") for path in paths if path.is_file())
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", " ", text)
    return re.sub(r"^[ \t]*#[^\n]*(?:\\\n[^\n]*)*", " ", text, flags=re.MULTILINE)


def prototypes(folder: Path) -> dict[str, Prototype]:
    """Reads every function of the headers in a folder."""
    found = {}
    pattern = r"([\w \t\n*]+?)\bCUDNNWINAPI\s+(cudnn\w+)\s*\(([^;{}]*)\)\s*;"
    for result, name, listed in re.findall(pattern, source_text(folder)):
        spelled = " ".join(result.replace("CUDNN_DEPRECATED", " ").split())
        parameters = []
        for parameter in [] if listed.strip() in ("void", "") else listed.split(","):
            match = re.fullmatch(r"(.*?)(\w+)(\[\])?", " ".join(parameter.split()))
            assert match is not None, parameter
            kind = re.sub(r"\s*\*\s*", " *", match[1]).strip().replace("* *", "**").removesuffix(" const")
            parameters.append((kind + (match[3] or ""), match[2]))
        found[name] = Prototype(name, re.sub(r"\s*\*\s*", " *", spelled), tuple(parameters))
    return found


def enums(folder: Path) -> dict[str, tuple[str, ...]]:
    """Reads every enum of the headers in a folder: its members' names."""
    found = {}
    for body, name in re.findall(r"typedef\s+enum\s*\w*\s*\{([^}]*)\}\s*(\w+)", source_text(folder)):
        members = re.sub(r"\([^()]*\)", "", body).split(",")
        found[name] = tuple(re.findall(r"\w+", member)[0] for member in members if member.strip())
    return found


def structs(folder: Path) -> dict[str, tuple[str, ...]]:
    """Reads every struct with fields of the headers in a folder: its fields' names."""
    found = {}
    for body, name in re.findall(r"typedef\s+struct\s*\w*\s*\{([^}]*)\}\s*(\w+)", source_text(folder)):
        found[name] = tuple(re.findall(r"(\w+)\s*(?:\[\d+\])?\s*;", body))
    return found


def compile_program(folder: Path, text: str, *options: str) -> Path:
    """Compiles a C file against the real headers, with the compiler's own idea of every type."""
    source = folder / "program.c"
    source.write_text(text, encoding="utf-8")
    output = folder / "program"
    includes = [f"-I{found}" for found in include_folders()]
    subprocess.run(["gcc", "-std=c11", "-w", *options, *includes, str(source), "-o", str(output)], check=True)
    return output


_STUB_HEAD = f"""
#include <cudnn.h>
#include <cudnn_backend.h>
#include <stdio.h>
#include <string.h>

/* What the last call brought: each argument's bytes, and the first bytes of what a pointer points to. */
struct stub_argument {{ size_t size; unsigned char bytes[16]; unsigned char seen[{SEEN_BYTES}]; }};
struct stub_record {{ char name[128]; size_t count; struct stub_argument arguments[{MOST_ARGUMENTS}]; }};
struct stub_record stub_record;
int stub_status = 0;
int stub_data_type = 0;
#ifndef STUB_VERSION
#define STUB_VERSION CUDNN_VERSION
#endif
size_t stub_version = STUB_VERSION;
size_t stub_see = 0;          /* bytes to copy from behind each pointer to const */
size_t stub_calls = 0;

static void stub_begin(const char *name) {{
    memset(&stub_record, 0, sizeof stub_record);
    strcpy(stub_record.name, name);
    ++stub_calls;
}}

static void stub_take(const void *argument, size_t size, const void *behind) {{
    struct stub_argument *to = &stub_record.arguments[stub_record.count++];
    to->size = size;
    memcpy(to->bytes, argument, size);
    if (behind != NULL && stub_see > 0) memcpy(to->seen, behind, stub_see);
}}
"""

_STUB_RESULTS = {
    "cudnnGetVersion": "return stub_version;",
    "cudnnGetMaxDeviceVersion": "return CUDNN_MAX_DEVICE_VERSION;",
    "cudnnGetCudartVersion": "return 12090;",
    "cudnnGetErrorString": 'static char text[64]; sprintf(text, "STUB_STATUS_%d", (int)status); return text;',
    "cudnnGetLastErrorString": 'if (message) snprintf(message, max_size, "the stub was told to");',
    "cudnnGetTensorNdDescriptor": "if (dataType) *dataType = stub_data_type; return stub_status;",
    "cudnnGetFilterNdDescriptor": "if (dataType) *dataType = stub_data_type; return stub_status;",
}


def stub_source(found: dict[str, Prototype], leave_out: tuple[str, ...] = ()) -> str:
    """Writes the stub. The compiler compares each definition with the header's declaration."""
    parts = [_STUB_HEAD]
    for prototype in found.values():
        if prototype.name in leave_out:
            continue
        declared = []
        body = [f'stub_begin("{prototype.name}");']
        for kind, name in prototype.parameters:
            array = kind.endswith("[]")
            declared.append(f"{kind.removesuffix('[]')} {name}{'[]' if array else ''}")
            readable = kind.startswith("const ") and ("*" in kind or array)
            body.append(f"stub_take(&{name}, sizeof {name}, {f'(const void *){name}' if readable else 'NULL'});")
        if prototype.name.endswith("VersionCheck"):
            body.append("return CUDNN_STATUS_SUCCESS;")
        else:
            body.append(_STUB_RESULTS.get(prototype.name, "return (cudnnStatus_t)stub_status;"))
        if prototype.name == "cudnnGetLastErrorString":
            body = [line for line in body if not line.startswith("stub_")]
        lines = "\n    ".join(body)
        parts.append(f"{prototype.result} {prototype.name}({', '.join(declared) or 'void'}) {{\n    {lines}\n}}\n")
    return "\n".join(parts)


def build_stub(folder: Path, leave_out: tuple[str, ...] = (), *options: str) -> Path:
    """Compiles a stub libcudnn.so.9 into a folder.

    Args:
        folder: where to.
        leave_out: functions that it shall not have.
        *options: more options of gcc; ``-DSTUB_VERSION=90000`` chooses its version.

    Returns:
        The folder.
    """
    source = stub_source(prototypes(include_folders()[0]), leave_out)
    built = compile_program(folder, source, "-shared", "-fPIC", "-Wl,-soname,libcudnn.so.9", *options)
    built.rename(folder / "libcudnn.so.9")
    return folder


# --- inside the process that has the stub ---------------------------------------------------------------------------


class Argument(ctypes.Structure):
    """``struct stub_argument``."""

    _fields_ = [("size", ctypes.c_size_t), ("bytes", ctypes.c_ubyte * 16), ("seen", ctypes.c_ubyte * SEEN_BYTES)]


class Record(ctypes.Structure):
    """``struct stub_record``."""

    _fields_ = [("name", ctypes.c_char * 128), ("count", ctypes.c_size_t), ("arguments", Argument * MOST_ARGUMENTS)]


class Stub:
    """The loaded stub's own side: what was recorded, and what it shall answer."""

    def __init__(self, folder: str) -> None:
        from flcuda.cudnn import library

        loaded = library.load(folder)
        self.cdll = ctypes.CDLL(loaded.files[-1])
        self.record = Record.in_dll(self.cdll, "stub_record")
        self.status = ctypes.c_int.in_dll(self.cdll, "stub_status")
        self.data_type = ctypes.c_int.in_dll(self.cdll, "stub_data_type")
        self.version = ctypes.c_size_t.in_dll(self.cdll, "stub_version")
        self.see = ctypes.c_size_t.in_dll(self.cdll, "stub_see")
        self.calls = ctypes.c_size_t.in_dll(self.cdll, "stub_calls")

    @property
    def name(self) -> str:
        return self.record.name.decode()

    def argument(self, index: int) -> bytes:
        taken = self.record.arguments[index]
        return bytes(taken.bytes[: taken.size])

    def seen(self, index: int, size: int) -> bytes:
        return bytes(self.record.arguments[index].seen[:size])


_FORMATS = {
    "int": "i",
    "int32_t": "i",
    "unsigned": "I",
    "unsigned int": "I",
    "uint32_t": "I",
    "int64_t": "q",
    "size_t": "Q",
    "unsigned long long": "Q",
    "float": "f",
    "double": "d",
}
_EXTREMES = {"i": -(1 << 31), "I": (1 << 32) - 1, "q": -(1 << 63), "Q": (1 << 64) - 1, "f": 0.0, "d": 0.0}


class Chooser:
    """Chooses for each C type a Python argument and the bytes in which C must see it, all of them different."""

    def __init__(self, names: dict[str, tuple[str, ...]]) -> None:
        from flcuda import cudnn

        self._cudnn = cudnn
        self._enums = {**names, "libraryPropertyType": ("MAJOR_VERSION", "MINOR_VERSION", "PATCH_LEVEL")}
        self._count = 0
        self.keep: list[Any] = []

    def choose(self, spelled: str) -> tuple[Any, bytes]:
        self._count += 1
        kind = spelled.removeprefix("const ").strip()
        if kind.endswith("[]") or "*" in kind:
            return self._pointer(kind)
        if kind in self._enums:
            members = self._enums[kind]
            member = getattr(self._cudnn, members[self._count % len(members)])
            return member, struct.pack("i", int(member))
        if kind in _FORMATS:
            code = _FORMATS[kind]
            if code in "fd":
                number: Any = struct.unpack("f", struct.pack("f", -1.1 * self._count))[0]
                number = -1.1 * self._count if code == "d" else number
            else:
                step = self._count if _EXTREMES[code] < 0 else -self._count
                number = int(_EXTREMES[code]) + step
            return number, struct.pack(code, number)
        address = 0x7FED_CBA9_8765_4000 + 64 * self._count
        if kind in ("cudaStream_t", "cudaGraph_t"):
            return address, struct.pack("Q", address)
        if kind == "cudnnCallback_t":
            callback = self._cudnn.cudnnCallback_t(lambda *_: None)
            self.keep.append(callback)
            return callback, struct.pack("Q", ctypes.cast(callback, ctypes.c_void_p).value)
        return ctypes.cast(address, getattr(self._cudnn, kind)), struct.pack("Q", address)

    def _pointer(self, kind: str) -> tuple[Any, bytes]:
        target = kind.removesuffix("[]").replace("*", "", 1).strip() if "*" in kind else kind.removesuffix("[]")
        simple = {"i": "c_int", "I": "c_uint", "q": "c_int64", "Q": "c_uint64", "f": "c_float", "d": "c_double"}
        if target == "void":
            # As device memory an address would do; as host memory only a ctypes object does; both take this.
            element: Any = ctypes.c_double
        elif target in ("void *", "void*"):
            element = ctypes.c_void_p
        elif target == "char":
            element = ctypes.c_char
        elif target in self._enums:
            element = ctypes.c_int
        elif target in _FORMATS:
            element = getattr(ctypes, simple[_FORMATS[target]])
        else:
            element = getattr(self._cudnn, target)
        array = (element * 64)()
        self.keep.append(array)
        return array, struct.pack("Q", ctypes.addressof(array))


def call_all(folder: str) -> list[dict[str, Any]]:
    """Calls every function of the headers through flcuda and the stub."""
    from flcuda import cudnn

    stub = Stub(folder)
    headers = include_folders()[0]
    chooser = Chooser(enums(headers))
    done = []
    for prototype in prototypes(headers).values():
        chosen = [chooser.choose(kind) for kind, _ in prototype.parameters]
        before = stub.calls.value
        result = getattr(cudnn, prototype.name)(*[argument for argument, _ in chosen])
        silent = prototype.name == "cudnnGetLastErrorString"
        done.append(
            {
                "name": prototype.name,
                "calls": 1 if silent else stub.calls.value - before,
                "arrived_at": prototype.name if silent else stub.name,
                "sent": [] if silent else [expected.hex() for _, expected in chosen],
                "got": [] if silent else [stub.argument(index).hex() for index in range(stub.record.count)],
                "result": result.decode() if isinstance(result, bytes) else result,
            }
        )
    return done


if __name__ == "__main__":
    print(json.dumps(call_all(sys.argv[1])))
