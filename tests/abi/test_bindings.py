"""bindings.py against the headers: what the compiler says of every type, and a second reading of every prototype."""

import ctypes
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stub_cudnn

from flcuda import cudnn
from flcuda.cudnn import bindings, library


def headers() -> Path:
    folder = stub_cudnn.nvidia_folder("cudnn/include", "cudnn.h")
    if folder is None:
        pytest.skip("cuDNN's headers are not installed (nvidia-cudnn-cu12)")
    return folder


def version_of(folder: Path) -> int:
    text = (folder / "cudnn_version.h").read_text()
    major, minor, patch = (int(re.findall(rf"#define CUDNN_{word} (\d+)", text)[0]) for word in _VERSION_WORDS)
    return major * 10000 + minor * 100 + patch


_VERSION_WORDS = ("MAJOR", "MINOR", "PATCHLEVEL")


def pinned() -> Path:
    folder = headers()
    if version_of(folder) != cudnn.CUDNN_VERSION:
        pytest.skip(f"the headers here are {version_of(folder)}, not those of bindings.py, {cudnn.CUDNN_VERSION}")
    return folder


def bound(name: str) -> dict[str, Any]:
    """What a function of bindings.py was bound with."""
    return dict(inspect.getclosurevars(getattr(bindings, name)).nonlocals)


def bound_names() -> set[str]:
    return {name for name in bindings.__all__ if hasattr(getattr(bindings, name), "__wrapped__")}


def test_every_function_of_the_headers_is_bound() -> None:
    folder = headers()
    found = set(stub_cudnn.prototypes(folder))
    if version_of(folder) == cudnn.CUDNN_VERSION:
        assert found == bound_names()
        assert len(found) == 239
    elif version_of(folder) < cudnn.CUDNN_VERSION:
        assert found <= bound_names()
    elif found - bound_names():
        pytest.skip(f"cuDNN {version_of(folder)} has functions newer than bindings.py: {sorted(found - bound_names())}")


def test_prototypes_match_an_independent_reading_of_the_headers() -> None:
    found = stub_cudnn.prototypes(pinned())
    for name, prototype in found.items():
        about = bound(name)
        assert about["status"] == (prototype.result == "cudnnStatus_t"), name
        if not about["status"]:
            expected = {"size_t": ctypes.c_size_t, "const char *": ctypes.c_char_p, "void": None}[prototype.result]
            assert about["restype"] is expected, name
        names = list(inspect.signature(getattr(bindings, name)).parameters)
        assert names == [parameter for _, parameter in prototype.parameters], name
        assert len(about["argtypes"]) == len(names), name
        for argtype, (spelled, parameter) in zip(about["argtypes"], prototype.parameters, strict=True):
            problem = mismatch(argtype, spelled)
            assert not problem, f"{name}: {parameter}: {spelled}: {problem}"


NUMBERS = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "unsigned": ctypes.c_uint,
    "unsigned int": ctypes.c_uint,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_size_t,
    "unsigned long long": ctypes.c_ulonglong,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "char": ctypes.c_char,
}


def mismatch(argtype: Any, spelled: str) -> str:
    """Says how a converter differs from the C type that the header spells; empty when it does not."""
    kind = spelled.removeprefix("const ")
    if kind.endswith("[]"):
        kind = kind.removesuffix("[]") + " *"
    if not kind.endswith("*"):
        expected = NUMBERS.get(kind) or getattr(bindings, kind)
        actual = argtype.ctype if isinstance(argtype, library.Integer | library.Callback) else argtype
        return "" if actual is expected else f"{actual} instead of {expected}"
    target = kind.removesuffix("*").strip()
    if isinstance(argtype, library.DevicePointer):
        return "" if target in {"void", *NUMBERS} else "device memory"
    if isinstance(argtype, library.HostPointer | library.Scaling):
        return "" if target == "void" else f"untyped pointer to {target}"
    expected = NUMBERS.get(target) or (ctypes.c_void_p if target == "void *" else getattr(bindings, target))
    if isinstance(argtype, library.TypedPointer):
        return "" if argtype.target is expected else f"pointer to {argtype.target}"
    return "" if argtype is ctypes.POINTER(expected) else f"{argtype} instead of a pointer to {expected}"


def test_device_memory_is_told_from_host_memory() -> None:
    """Every pointer to numbers whose comment speaks of the GPU is bound as device memory, and no other."""
    folder = pinned()
    text = "".join((folder / f"cudnn_{name}.h").read_bytes().decode("latin-1") for name in stub_cudnn.HEADERS)
    device = set()
    for name, prototype in stub_cudnn.prototypes(folder).items():
        for argtype, (spelled, parameter) in zip(bound(name)["argtypes"], prototype.parameters, strict=True):
            if isinstance(argtype, library.DevicePointer) and "void" not in spelled:
                device.add((name, parameter))
    said = set(re.findall(r"const int (\w+)\[\], +/\*[^*]*GPU memory", text))
    said |= set(re.findall(r"(\w+) [^\n*]*\(device memory\)", text))
    assert said == {"labels", "labelLengths", "inputLengths", "devSeqLengths"}
    assert said <= {parameter for _, parameter in device}
    assert {parameter for _, parameter in device} - said == {
        "devSeqLengthsQO",
        "devSeqLengthsKV",
        "devSeqLengthsDQDO",
        "devSeqLengthsDKDV",
        "dropoutMask",
        "gradAttention",
    }
    assert ("cudnnGetCTCLossWorkspaceSize", "labels") not in device


def test_scaling_factors_follow_a_descriptor_of_their_call() -> None:
    folder = pinned()
    count = 0
    for name, prototype in stub_cudnn.prototypes(folder).items():
        for argtype, (_, parameter) in zip(bound(name)["argtypes"], prototype.parameters, strict=True):
            if parameter.startswith(("alpha", "beta")) or parameter == "valuePtr":
                count += 1
                kind = prototype.parameters[argtype.descriptor][0]
                assert re.fullmatch(r"(const )?cudnn(Tensor|Filter)Descriptor_t", kind), name
            else:
                assert not isinstance(argtype, library.Scaling), (name, parameter)
    assert count == 27 + 27 + 2 + 2 + 4 * 3 + 2 + 1


def compiled(tmp_path: Path, lines: list[str]) -> list[int]:
    """Runs printf of each expression in a C program built with the real headers."""
    try:
        stub_cudnn.include_folders()
    except LookupError as error:
        pytest.skip(f"no C program can be built with cuDNN's headers: {error}")
    body = "\n".join(f'printf("%lld\\n", (long long)({line}));' for line in lines)
    head = "#include <cudnn.h>\n#include <cudnn_backend.h>\n#include <stddef.h>\n#include <stdio.h>\n"
    program = stub_cudnn.compile_program(tmp_path, f"{head}int main(void) {{\n{body}\nreturn 0;\n}}\n")
    return [int(line) for line in subprocess.run([program], capture_output=True, check=True).stdout.split()]


def test_enums_have_the_compiler_s_values(tmp_path: Path) -> None:
    found = stub_cudnn.enums(pinned())
    ours = {name for name in bindings.__all__ if is_enum(getattr(bindings, name))}
    assert ours == {*found, "libraryPropertyType"}
    assert len(found) == 73
    assert sum(len(members) for members in found.values()) == 960
    names = [(enum, member) for enum, members in found.items() for member in members]
    for (enum, member), value in zip(names, compiled(tmp_path, [member for _, member in names]), strict=True):
        assert int(getattr(bindings, member)) == value, member
        assert getattr(bindings, member) is getattr(bindings, enum)[member]
    for enum, members in found.items():
        assert tuple(getattr(bindings, enum).__members__) == members
    sizes = compiled(tmp_path, [f"sizeof({enum})" for enum in found])
    assert set(sizes) == {ctypes.sizeof(ctypes.c_int)}


def is_enum(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, library.CEnum)


def test_structs_have_the_compiler_s_sizes_and_offsets(tmp_path: Path) -> None:
    found = stub_cudnn.structs(pinned())
    assert len(found) == 7
    for name, fields in found.items():
        ours = getattr(bindings, name)
        assert tuple(field for field, *_ in ours._fields_) == fields
        lines = [f"sizeof({name})", f"_Alignof({name})"]
        lines += [f"offsetof({name}, {field})" for field in fields]
        lines += [f"sizeof((({name} *)0)->{field})" for field in fields]
        # C's own conversion tells a floating field from an integer one, and a signed from an unsigned one.
        expected = [ctypes.sizeof(ours), ctypes.alignment(ours)]
        expected += [getattr(ours, field).offset for field in fields]
        expected += [getattr(ours, field).size for field in fields]
        assert compiled(tmp_path, lines) == expected, name


def test_struct_fields_have_the_compiler_s_kinds(tmp_path: Path) -> None:
    choose = ", ".join(
        f"{kind}: {number}" for number, kind in enumerate(("float", "double", "long", "unsigned long"), 1)
    )
    for name in stub_cudnn.structs(pinned()):
        ours = getattr(bindings, name)
        lines = [
            f"_Generic((({name} *)0)->{field}, {choose}, int: 5, unsigned: 6, unsigned long long: 4, default: 0)"
            for field, *_ in ours._fields_
        ]
        kinds = {ctypes.c_float: {1}, ctypes.c_double: {2}, ctypes.c_int64: {3}, ctypes.c_uint64: {4}}
        # gcc's type of an enum without negative values is unsigned.
        kinds |= {ctypes.c_int: {5, 6}, ctypes.c_uint: {6}}
        for (field, kind, *_), value in zip(ours._fields_, compiled(tmp_path, lines), strict=True):
            assert value in kinds.get(kind, {0}), f"{name}.{field}"


def test_macros_have_the_compiler_s_values(tmp_path: Path) -> None:
    pinned()
    names = [name for name in bindings.__all__ if type(getattr(bindings, name)) is int]
    assert {"CUDNN_VERSION", "CUDNN_MAJOR", "CUDNN_DIM_MAX", "CUDNN_SEV_INFO_EN", "CUDNN_SEQDATA_DIM_COUNT"} <= {*names}
    assert compiled(tmp_path, names) == [getattr(bindings, name) for name in names]


def test_opaque_types_are_types_of_their_own() -> None:
    opaque = {name for name in bindings.__all__ if is_opaque(getattr(bindings, name))}
    # The 21 of the headers, and one for what C calls a void pointer.
    assert len(opaque) == 21 + 1
    pointers = {
        name for name in bindings.__all__ if name.endswith("_t") and points_to(getattr(bindings, name)) in opaque
    }
    assert len({getattr(bindings, name) for name in pointers}) == len(pointers) == len(opaque - {"cudnnRuntimeTag_t"})


def is_opaque(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, ctypes.Structure) and not hasattr(value, "_fields_")


def points_to(value: Any) -> str:
    target = getattr(value, "_type_", None)
    return target.__name__ if isinstance(target, type) else ""


def test_docstrings_say_direction_version_and_deprecation() -> None:
    folder = pinned()
    text = source = ""
    for name in stub_cudnn.HEADERS:
        source = (folder / f"cudnn_{name}.h").read_bytes().decode("latin-1")
        text += re.sub(r"/\*.*?\*/", " ", source, flags=re.DOTALL)
    deprecated = set(re.findall(r"CUDNN_DEPRECATED\s+cudnnStatus_t\s+CUDNNWINAPI\s+(\w+)", text))
    assert len(deprecated) == 135
    for name, prototype in stub_cudnn.prototypes(folder).items():
        docstring = getattr(bindings, name).__doc__
        first, _, rest = docstring.partition("\n")
        assert re.match(r"[A-Z][^.]*\.", first), name
        assert ("deprecated" in first) == (name in deprecated), name
        since = bound(name)["since"]
        assert (f"Since {since}" in first) if since else ("Since" not in first), name
        for kind, parameter in prototype.parameters:
            line = re.search(rf"^ +{parameter}: \[(in|out|in,out)\] \S", rest, re.MULTILINE)
            assert line is not None, (name, parameter)
            if (
                "*" not in kind
                and "[]" not in kind
                and "Desc" not in kind
                and "Pack" not in kind
                and "Plan" not in kind
            ):
                assert line[1] == "in" or kind == "cudaGraph_t", (name, parameter)
    assert bound("cudnnGetExecutionPlanWorkspaceSize")["since"] == "9.23.0"


def test_import_loads_nothing() -> None:
    code = (
        "import json, sys; from flcuda import cudnn; cudnn.cudnnCreate; maps = open('/proc/self/maps').read(); "
        "print(json.dumps(['cupy' in sys.modules, 'libcudnn' in maps, cudnn.is_loaded()]))"
    )
    root = Path(bindings.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, cwd=root)
    assert json.loads(done.stdout) == [False, False, False]


def test_the_package_exports_all_of_it() -> None:
    names: dict[str, Any] = {}
    exec("from flcuda.cudnn import *", names)
    assert {*bindings.__all__, "load", "is_loaded", "search_places"} <= set(names)
    assert "c_int" not in names
    assert "cudnnCreate" in dir(cudnn)
    with pytest.raises(AttributeError, match="cudnnNoSuchFunction"):
        cudnn.cudnnNoSuchFunction  # noqa: B018
    assert cudnn.MAJOR_VERSION == 0
