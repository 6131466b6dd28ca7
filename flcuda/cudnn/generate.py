"""Generates flcuda/cudnn/bindings.py from cuDNN's headers: ``python -m flcuda.cudnn.generate [--check]``.

libclang reads the headers, so types, values and layouts are the compiler's own. The docstrings are ours: a purpose made
from the function's name, and each parameter's direction and role from its type, its name and the header's ``@param``
tags. Nothing of the machine (paths, dates) gets into the output, so two runs on the same headers are byte-equal.
"""

import argparse
import difflib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).with_name("bindings.py")
DEVELOPMENT_PACKAGES = "libclang nvidia-cudnn-cu12 nvidia-cuda-runtime-cu12 nvidia-cuda-nvcc-cu12"


class GenerateError(Exception):
    """The headers cannot be found, parsed, or expressed."""


# What C's types do not say ------------------------------------------------------------------------------------

# `const void *` to one number in host memory: its type follows a tensor's data type.
_SCALING = re.compile(r"(alpha|beta)(\d|DataDiff|ParamDiff|Dgrid)?")
_EXACT_SCALING = {("cudnnSetTensor", "valuePtr")}

# `void *` is device memory but for these, which are host memory ...
_HOST = {
    ("cudnnBackendSetAttribute", "arrayOfElements"),
    ("cudnnBackendGetAttribute", "arrayOfElements"),
    ("cudnnSetRNNDataDescriptor", "paddingFill"),
    ("cudnnGetRNNDataDescriptor", "paddingFill"),
    ("cudnnSetSeqDataDescriptor", "paddingFill"),
    ("cudnnGetSeqDataDescriptor", "paddingFill"),
}
# ... and these, which are what another argument says.
_HOST_OR_DEVICE = {
    ("cudnnSetCallback", "udata"),
    ("cudnnSetFusedOpsConstParamPackAttribute", "param"),
    ("cudnnGetFusedOpsConstParamPackAttribute", "param"),
    ("cudnnSetFusedOpsVariantParamPackAttribute", "ptr"),
    ("cudnnGetFusedOpsVariantParamPackAttribute", "ptr"),
}
# A pointer to numbers is host memory but for these.
_DEVICE_NAMES = re.compile(r"devSeq\w*|dropoutMask|gradAttention")
_DEVICE = {("cudnnCTCLoss_v8", "labels"), ("cudnnCTCLoss_v8", "labelLengths"), ("cudnnCTCLoss_v8", "inputLengths")}

# A pointer that C calls `void *`, made a type of its own so that nothing else passes for it.
_OPAQUE_VOID = {"cudnnBackendDescriptor_t": "cudnnBackendDescriptorStruct"}

_WIDTH = 120

_INTEGERS = {
    "int": "c_int",
    "unsigned int": "c_uint",
    "long": "c_long",
    "unsigned long": "c_ulong",
    "long long": "c_longlong",
    "unsigned long long": "c_ulonglong",
}
_FIXED = {
    "size_t": "c_size_t",
    "int32_t": "c_int32",
    "uint32_t": "c_uint32",
    "int64_t": "c_int64",
    "uint64_t": "c_uint64",
}
_REALS = {"float": "c_float", "double": "c_double"}

# Words for the docstrings -------------------------------------------------------------------------------------

_VERBS = {
    "Create": "Creates",
    "Set": "Sets",
    "Get": "Gets",
    "Destroy": "Destroys",
    "Find": "Measures and ranks",
    "Query": "Queries",
    "Restore": "Restores",
    "Derive": "Derives",
    "Init": "Initializes",
    "Initialize": "Initializes",
    "Transform": "Transforms",
    "Add": "Adds",
    "Scale": "Scales",
    "Reduce": "Reduces",
    "Reorder": "Reorders",
    "Build": "Builds",
    "Make": "Makes",
    "Finalize": "Finalizes",
    "Execute": "Executes",
    "Populate": "Fills",
    "Update": "Updates",
}
_PASSES = ("Forward", "Backward", "Data", "Filter", "Weights", "Inference", "Training")
_SPELLED = {
    "2d": "2-D",
    "4d": "4-D",
    "Nd": "N-D",
    "1d": "1-D",
    "Dim": "dimensions",
    "Algo": "algorithm",
    "Tf": "transformer",
    "Attn": "attention",
    "Seq": "sequence",
    "Ops": "ops",
    "Op": "operation",
    "Agg": "aggregation",
    "Mha": "multi-head attention",
    "Gnn": "graph neural network",
    "Csc": "CSC",
    "Param": "parameter",
    "Params": "parameters",
    "Dest": "destination",
    "Temp": "temporary",
    "BN": "batch norm",
    "Bn": "batch norm",
    "Src": "source",
    "Dst": "destination",
    "Cnt": "count",
    "Idx": "index",
    "Addr": "address",
    "Inv": "inverse",
    "Proj": "projection",
    "Num": "number of",
    "Lin": "linear",
    "Lrn": "LRN",
    "Nan": "NaN",
    "Wspace": "workspace",
    "Lo": "low",
    "Hi": "high",
    "Win": "window",
    "B2B": "back-to-back",
    "Norm": "normalization",
    "Max": "maximal",
    "Const": "constant",
    "Feat": "feature",
    "Grad": "gradient",
    "Conv": "convolution",
    "Calc": "calculation",
    "Fwd": "forward",
    "Bwd": "backward",
    "Dev": "device",
    "Gat": "graph attention",
    "V2": "version 2",
    "Adv": "adv",
    "Cnn": "cnn",
    "Desc": "descriptor",
    "Comp": "compute",
    "Opt": "option",
    "Prec": "precision",
    "Im2Col": "im2col",
    "Nwh": "in NWH layout",
    "Cudart": "CUDA runtime",
    "Cuda": "CUDA",
    "Fft": "FFT",
    "Ctc": "CTC",
    "Swish": "swish",
}
_PURPOSES = {
    "cudnnGetErrorString": "Names a status",
    "cudnnGetLastErrorString": "Copies this thread's last error text",
    "cudnnGetVersion": "Gets the version of the loaded cuDNN, major * 10000 + minor * 100 + patch",
    "cudnnGetMaxDeviceVersion": "Gets the highest compute capability that the loaded cuDNN knows",
    "cudnnGetCudartVersion": "Gets the version of the CUDA runtime that the loaded cuDNN was built with",
    "cudnnCreate": "Creates a library handle on the current device",
    "cudnnDestroy": "Destroys a library handle; waits for the device",
    "cudnnSetStream": "Sets the stream of a handle",
    "cudnnGetStream": "Gets the stream of a handle",
    "cudnnSetSpatialTransformerNdDescriptor": "Sets the N-D spatial transformer descriptor",
    "cudnnBuildRNNDynamic": "Compiles the persistent kernels of a dynamic RNN",
    "cudnnGetProperty": "Gets one number of the library's version",
    "cudnnBackendPopulateCudaGraph": "Fills a CUDA graph with an execution plan's work",
    "cudnnBackendUpdateCudaGraph": "Updates the pointers of a CUDA graph filled before",
    "cudnnBackendSetAttribute": "Sets an attribute of a backend descriptor",
    "cudnnBackendGetAttribute": "Gets an attribute of a finalized backend descriptor",
    "cudnnBackendExecute": "Runs an execution plan on the handle's stream",
    "cudnnIm2Col": "Unfolds an image batch to columns (im2col)",
    "cudnnOpTensor": "Combines two tensors element by element",
    "cudnnSetTensor": "Fills a tensor with one value",
    "cudnnCTCLoss": "Computes the CTC loss and its gradient; labels in host memory",
    "cudnnCTCLoss_v8": "Computes the CTC loss and its gradient; labels in device memory",
}
_NAMES = {
    "n": "batch size",
    "c": "channels",
    "h": "height",
    "w": "width",
    "k": "output channels",
    "u": "stride, height",
    "v": "stride, width",
    "pad_h": "padding, height",
    "pad_w": "padding, width",
    "dilation_h": "dilation, height",
    "dilation_w": "dilation, width",
    "nbDims": "number of dimensions",
    "nbDimsRequested": "number of dimensions to give back at most",
    "arrayLength": "number of spatial dimensions",
    "arrayLengthRequested": "number of spatial dimensions to give back at most",
    "dimA": "dimensions",
    "strideA": "strides in elements",
    "filterDimA": "filter dimensions",
    "padA": "padding of each dimension",
    "filterStrideA": "stride of each dimension",
    "dilationA": "dilation of each dimension",
    "requestedAlgoCount": "room in perfResults",
    "returnedAlgoCount": "number of results written",
    "perfResults": "results, fastest first",
    "groupCount": "number of groups",
    "workSpaceSizeInBytes": "bytes of the workspace",
    "workspaceSizeInBytes": "bytes of the workspace",
    "sizeInBytes": "size in bytes",
    "seqLen": "sequence length",
    "dim": "number of channels",
    "batch": "batch size",
    "count": "number of algorithms",
    "mode": "mode",
    "epsilon": "added to the variance",
    "exponentialAverageFactor": "weight of the new statistics",
}
_MEMORY = {"workSpace": "workspace", "A": "A", "B": "B", "C": "C"}
_TYPES = {
    "cudnnHandle_t": "library handle",
    "cudaStream_t": "CUDA stream",
    "cudaGraph_t": "CUDA graph",
}

_BANNER = '''\
"""cuDNN's C API. GENERATED by ``python -m flcuda.cudnn.generate`` from the headers of cuDNN {version}: do not edit.

Names are C's own. Each function is looked up in the loaded cuDNN on its first call, checks its status and raises
`flcuda.errors.CudnnError`, and says here what each parameter is:

- ``[in]`` is read, ``[out]`` written, ``[in,out]`` both; pointers are to memory of the caller, who keeps it.
- Device memory is a CuPy array or an address as an int; host memory is ``ctypes.byref(x)``, a ctypes array or a
  contiguous NumPy array of the right dtype; None is NULL. Integers to read may be a sequence.
- A scaling factor is a number, converted to what the tensor's data type asks for (double for double, else float), or
  a pointer, which is passed as it is.
- Descriptors and handles are pointers to empty classes, each of its own type, or owners with ``_as_parameter_``.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint,
    c_uint32,
    c_ulonglong,
    c_void_p,
)
from typing import Any

from flcuda.cudnn.library import (
    Address,
    Callback,
    CEnum,
    DevicePointer,
    HostPointer,
    Integer,
    Scaling,
    TypedPointer,
    bind,
    declare_headers,
)

_imported = set(globals())

# The argument types that many functions share: what is accepted, and what C gets.
_device = DevicePointer()
_host = HostPointer()
_const_host = HostPointer(const=True)
_either = HostPointer(device_too=True)
_const_either = HostPointer(const=True, device_too=True)
_int = Integer(c_int)
_uint = Integer(c_uint)
_ulonglong = Integer(c_ulonglong)
_size_t = Integer(c_size_t)
_int32_t = Integer(c_int32)
_uint32_t = Integer(c_uint32)
_int64_t = Integer(c_int64)
'''


# What was parsed ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function.

    Attributes:
        name: C's name.
        argtype: the expression in bindings.py that converts the argument.
        annotation: the Python type written in the signature.
        direction: "in", "out" or "in,out".
        role: what it is, in a few words.
    """

    name: str
    argtype: str
    annotation: str
    direction: str
    role: str


@dataclass(frozen=True)
class Function:
    """A function: its name, header, restype expression, Python return type, parameters, and what is said of it."""

    name: str
    header: str
    restype: str
    returns: str
    status: bool
    parameters: tuple[Parameter, ...]
    purpose: str
    since: str
    deprecated: bool


@dataclass(frozen=True)
class Enum:
    """An enum: its name and its members in the header's order, aliases included."""

    name: str
    members: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Struct:
    """A struct with fields (name, expression of the ctypes type), known by one name or by a tag and a typedef."""

    name: str
    fields: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Opaque:
    """A struct without fields."""

    name: str


@dataclass(frozen=True)
class Alias:
    """A typedef that is no more than an expression: a pointer to a struct, another name, a function type."""

    name: str
    expression: str


@dataclass
class Headers:
    """All that bindings.py will hold, in the headers' order."""

    macros: list[tuple[str, int]] = field(default_factory=list)
    types: list[Enum | Struct | Opaque | Alias] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)

    @property
    def version(self) -> str:
        """The version as "9.28.0"."""
        number = dict(self.macros)["CUDNN_VERSION"]
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


# Finding the headers ------------------------------------------------------------------------------------------


def _package_folder(module: str, file: str) -> Path:
    """Finds the folder inside a wheel that has a file; never an installed toolkit's, which varies by machine."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    for root in roots:
        folder = Path(root) / module
        if (folder / file).is_file():
            return folder
    raise GenerateError(f"{file} is missing. Install what the generator needs: pip install {DEVELOPMENT_PACKAGES}")


def header_folders(cudnn: Path | None = None) -> list[Path]:
    """Finds the folders that cuDNN's headers and what they include are in.

    Args:
        cudnn: the folder with ``cudnn.h``; by default that of the nvidia-cudnn wheel.

    Returns:
        cuDNN's, the CUDA runtime's, and that with ``crt/``.

    Raises:
        GenerateError: one is missing; the message says what to install.
    """
    if cudnn is None:
        cudnn = _package_folder("cudnn/include", "cudnn.h")
    elif not (cudnn / "cudnn.h").is_file():
        raise GenerateError(f"there is no cudnn.h in {cudnn}")
    return [
        cudnn,
        _package_folder("cuda_runtime/include", "cuda_runtime_api.h"),
        _package_folder("cuda_nvcc/include", "crt/host_defines.h"),
    ]


def _compiler_folder() -> Path:
    """Finds the compiler's own headers: the libclang wheel has none, and without them size_t would become int."""
    command = ["gcc", "-print-file-name=include"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise GenerateError(f"gcc is needed for the compiler's own headers, and {' '.join(command)} failed") from error
    folder = Path(done.stdout.strip())
    if not (folder / "stddef.h").is_file():
        raise GenerateError(f"the compiler's folder {folder} has no stddef.h")
    return folder


# Parsing ------------------------------------------------------------------------------------------------------


def parse(cudnn: Path | None = None) -> Headers:
    """Reads cuDNN's headers.

    Args:
        cudnn: the folder with ``cudnn.h``; by default that of the nvidia-cudnn wheel.

    Returns:
        Everything public in them.

    Raises:
        GenerateError: something is missing, does not parse, or cannot be expressed.
    """
    try:
        from clang import cindex
    except ImportError:
        raise GenerateError(f"libclang is missing: pip install {DEVELOPMENT_PACKAGES}") from None
    folders = header_folders(cudnn)
    arguments = ["-x", "c", "-std=c11", "-DCUDNN_WARN_DEPRECATED"]
    arguments += [f"-I{folder}" for folder in folders]
    arguments += ["-isystem", str(_compiler_folder())]
    source = "#include <cudnn.h>\n#include <cudnn_backend.h>\n"
    try:
        unit = cindex.Index.create().parse(
            "flcuda_cudnn.c",
            args=arguments,
            unsaved_files=[("flcuda_cudnn.c", source)],
            options=cindex.TranslationUnit.PARSE_DETAILED_PROCESSING_RECORD,
        )
    except cindex.TranslationUnitLoadError as error:
        raise GenerateError(f"libclang cannot read cuDNN's headers: {error}") from error
    errors = [str(found) for found in unit.diagnostics if found.severity >= cindex.Diagnostic.Error]
    if errors:
        raise GenerateError("the headers do not parse:\n" + "\n".join(errors))
    return _Parser(cindex, folders[0]).read(unit)


class _Parser:
    """Walks one translation unit."""

    def __init__(self, cindex: Any, folder: Path) -> None:
        self._cindex = cindex
        self._folder = folder.resolve()
        self._headers = Headers()
        self._enums: set[str] = set()
        self._structs: set[str] = set()
        self._opaque: set[str] = set()
        self._pointers: dict[str, str] = {}  # typedef of a pointer to an opaque struct -> the struct
        self._addresses: set[str] = set()
        self._callbacks: set[str] = set()
        self._texts: dict[str, str] = {}
        self._ends: dict[str, int] = {}

    def read(self, unit: Any) -> Headers:
        kinds = self._cindex.CursorKind
        macros: dict[str, str] = {}
        for cursor in unit.cursor.get_children():
            file = cursor.location.file
            if file is None or Path(file.name).resolve().parent != self._folder:
                continue
            if cursor.kind == kinds.MACRO_DEFINITION:
                macros[cursor.spelling] = " ".join(token.spelling for token in list(cursor.get_tokens())[1:])
            elif cursor.kind == kinds.ENUM_DECL:
                self._enum(cursor)
            elif cursor.kind == kinds.STRUCT_DECL:
                self._struct(cursor)
            elif cursor.kind == kinds.TYPEDEF_DECL:
                self._typedef(cursor)
            elif cursor.kind == kinds.FUNCTION_DECL:
                self._function(cursor)
            if cursor.kind.is_declaration():
                self._ends[file.name] = cursor.extent.end.offset
        self._macros(macros)
        return self._headers

    def _macros(self, macros: dict[str, str]) -> None:
        """Evaluates the macros that are plain integers, by the macros and members that they name."""
        known = {name: value for kind in self._headers.types if isinstance(kind, Enum) for name, value in kind.members}
        for name, text in macros.items():
            expression = re.sub(r"\b(\d+)U\b", r"\1", text)
            if not re.fullmatch(r"[\w\s+*()<]+", expression) or not re.search(r"\w", expression):
                continue
            try:
                value = eval(expression, {"__builtins__": {}}, known)
            except (NameError, SyntaxError, TypeError):
                continue
            if type(value) is int:
                known[name] = value
                self._headers.macros.append((name, value))

    def _enum(self, cursor: Any) -> None:
        name = cursor.type.spelling.removeprefix("enum ")
        members = tuple(
            (member.spelling, member.enum_value)
            for member in cursor.get_children()
            if member.kind == self._cindex.CursorKind.ENUM_CONSTANT_DECL
        )
        if not members or not all(-(1 << 31) <= value < 1 << 31 for _, value in members):
            raise GenerateError(f"{name}: an enum without members, or wider than a C int")
        if name not in self._enums:
            self._enums.add(name)
            self._headers.types.append(Enum(name, members))

    def _struct(self, cursor: Any) -> None:
        name = cursor.type.spelling.removeprefix("struct ")
        fields = tuple(
            (item.spelling, self._field(item.type, f"{name}.{item.spelling}"))
            for item in cursor.get_children()
            if item.kind == self._cindex.CursorKind.FIELD_DECL
        )
        if fields:
            self._structs.add(name)
            self._headers.types.append(Struct(name, fields))
        elif name not in self._opaque:
            self._opaque.add(name)
            self._headers.types.append(Opaque(name))

    def _field(self, kind: Any, where: str) -> str:
        kinds = self._cindex.TypeKind
        if kind.kind == kinds.CONSTANTARRAY:
            return f"{self._field(kind.element_type, where)} * {kind.element_count}"
        if kind.kind == kinds.POINTER and kind.get_pointee().spelling in ("void", "const void"):
            return "c_void_p"
        return self._value(kind, where)

    def _plain(self, kind: Any) -> str:
        """The spelling of a type without const and struct or enum."""
        spelling: str = kind.spelling
        plain: str = re.sub(r"^(const\s+)?((struct|enum)\s+)?", "", spelling).strip()
        return plain

    def _value(self, kind: Any, where: str) -> str:
        """The ctypes type of a value, as an expression."""
        name = self._plain(kind)
        self._foreign(kind)
        if name in self._enums:
            return "c_int"
        for table in (_FIXED, _INTEGERS, _REALS):
            if name in table:
                return table[name]
        if name in self._pointers or name in self._structs or name in self._addresses:
            return name
        if name.endswith("_t") and name in {alias.name for alias in self._headers.types if isinstance(alias, Alias)}:
            return name
        raise GenerateError(f"{where}: no way to express the C type {kind.spelling!r}")

    def _foreign(self, kind: Any) -> None:
        """Takes in a CUDA type that a signature needs: an enum as it is, a pointer to a struct as an address."""
        declaration = kind.get_declaration()
        name = self._plain(kind)
        kinds = self._cindex.TypeKind
        if declaration.kind != self._cindex.CursorKind.TYPEDEF_DECL or name in self._enums | self._addresses:
            return
        file = declaration.location.file
        if file is None or Path(file.name).resolve().parent == self._folder:
            return
        canonical = kind.get_canonical()
        if canonical.kind == kinds.ENUM:
            self._enums.add(name)
            members = canonical.get_declaration().get_children()
            self._headers.types.append(Enum(name, tuple((item.spelling, item.enum_value) for item in members)))
        elif canonical.kind == kinds.POINTER:
            self._addresses.add(name)
            self._headers.types.append(Alias(name, "Address"))

    def _typedef(self, cursor: Any) -> None:
        name = cursor.spelling
        kinds = self._cindex.TypeKind
        under = cursor.underlying_typedef_type
        target = under.get_pointee() if under.kind == kinds.POINTER else under
        spelled = self._plain(target)
        if name in self._enums | self._structs | self._opaque:
            return
        if under.kind == kinds.POINTER and target.get_canonical().kind == kinds.FUNCTIONPROTO:
            self._callback(name, target.get_canonical())
        elif name in _OPAQUE_VOID:
            self._headers.types.append(Opaque(_OPAQUE_VOID[name]))
            self._pointer(name, _OPAQUE_VOID[name])
        elif under.kind == kinds.POINTER and spelled in self._opaque:
            self._pointer(name, spelled)
        elif spelled in self._structs | self._opaque:
            self._structs.add(name)
            self._headers.types.append(Alias(name, spelled))
        else:
            raise GenerateError(f"no way to express the typedef {name} = {under.spelling!r}")

    def _pointer(self, name: str, struct: str) -> None:
        self._pointers[name] = struct
        self._headers.types.append(Alias(name, f"POINTER({struct})"))

    def _callback(self, name: str, prototype: Any) -> None:
        arguments = ["None"]
        for kind in prototype.argument_types():
            target = self._plain(kind.get_pointee()) if kind.kind == self._cindex.TypeKind.POINTER else ""
            if target == "void":
                arguments.append("c_void_p")
            elif target == "char":
                arguments.append("c_char_p")
            elif target:
                arguments.append(f"POINTER({target})")
            else:
                arguments.append(self._value(kind, name))
        self._callbacks.add(name)
        self._headers.types.append(Alias(name, f"CFUNCTYPE({', '.join(arguments)})"))

    # functions

    def _function(self, cursor: Any) -> None:
        kinds = self._cindex
        name = cursor.spelling
        result = cursor.result_type.spelling
        restype, returns = {
            "cudnnStatus_t": ("c_int", "None"),
            "size_t": ("c_size_t", "int"),
            "const char *": ("c_char_p", "bytes"),
            "void": ("None", "None"),
        }.get(result, ("", ""))
        if not restype:
            raise GenerateError(f"{name}: no way to express the return type {result!r}")
        comment = self._comment(cursor)
        tags = re.findall(r"@param\[([^\]]*)\]\s+(\w+)", comment)
        directions = {parameter: tag.replace(" ", "").replace("inout", "in,out") for tag, parameter in tags}
        arguments = list(cursor.get_arguments())
        names = [argument.spelling for argument in arguments]
        parameters = tuple(
            self._parameter(name, index, arguments, directions.get(argument.spelling, ""))
            for index, argument in enumerate(arguments)
        )
        if "" in names:
            raise GenerateError(f"{name}: a parameter without a name")
        since = re.search(r"@since\s+cuDNN\s+([\d.]+)", comment)
        self._headers.functions.append(
            Function(
                name=name,
                header=Path(cursor.location.file.name).name.replace("_v9.h", ".h"),
                restype=restype,
                returns=returns,
                status=result == "cudnnStatus_t",
                parameters=parameters,
                purpose=_purpose(name),
                since=since[1] if since else "",
                deprecated=cursor.availability == kinds.AvailabilityKind.DEPRECATED,
            )
        )

    def _comment(self, cursor: Any) -> str:
        """The last doc comment (else comment) between the declaration before and this one."""
        file = cursor.location.file.name
        if file not in self._texts:
            self._texts[file] = Path(file).read_bytes().decode("latin-1")
        gap = self._texts[file][self._ends.get(file, 0) : cursor.extent.start.offset]
        comments = re.findall(r"/\*.*?\*/", gap, re.DOTALL)
        documented = [comment for comment in comments if comment.startswith("/**")]
        return str((documented or comments or [""])[-1])

    def _parameter(self, function: str, index: int, arguments: list[Any], direction: str) -> Parameter:
        kinds = self._cindex.TypeKind
        argument = arguments[index]
        name = argument.spelling
        kind = argument.type
        where = f"{function}: {name}"
        if kind.kind in (kinds.INCOMPLETEARRAY, kinds.CONSTANTARRAY):
            target = kind.element_type
        elif kind.kind == kinds.POINTER and self._plain(kind) not in self._pointers:
            target = kind.get_pointee()
        else:
            target = None
        if target is None:
            argtype, annotation, role = self._by_value(kind, name, where)
            return Parameter(name, argtype, annotation, direction or "in", role)
        const = target.is_const_qualified()
        argtype, annotation, role = self._by_pointer(function, index, arguments, target)
        if direction == "in" and not const and self._plain(target) == "void":
            direction = "in,out"  # a workspace: the header means the address
        return Parameter(name, argtype, annotation, direction or ("in" if const else "out"), role)

    def _by_value(self, kind: Any, name: str, where: str) -> tuple[str, str, str]:
        spelled = self._plain(kind)
        value = self._value(kind, where) if spelled not in self._callbacks else spelled
        words = _NAMES.get(name, _words(name))
        if spelled in self._callbacks:
            return f"Callback({spelled})", f"{spelled} | None", "callback"
        if spelled in self._enums:
            return spelled, f"{spelled} | int", words
        if spelled in self._pointers:
            return spelled, "Any", _descriptor(spelled, name)
        if spelled in self._addresses:
            return spelled, "Any", _TYPES[spelled]
        if value in _REALS.values():
            return value, "float", words
        return f"_{value.removeprefix('c_')}{'_t' if value in ('c_int32', 'c_uint32', 'c_int64') else ''}", "int", words

    def _by_pointer(self, function: str, index: int, arguments: list[Any], target: Any) -> tuple[str, str, str]:
        name = arguments[index].spelling
        key = (function, name)
        const = target.is_const_qualified()
        spelled = self._plain(target)
        words = _NAMES.get(name, _words(name)) if spelled != "void" else _MEMORY.get(name, _words(name))
        if spelled == "void":
            if const and (_SCALING.fullmatch(name) or key in _EXACT_SCALING):
                return self._scaling(function, index, arguments)
            if key in _HOST:
                return "_const_host" if const else "_host", "Any", f"{words}, host memory"
            if key in _HOST_OR_DEVICE:
                return "_const_either" if const else "_either", "Any", f"{words}, as the other arguments say"
            return "_device", "Any", f"{words}, device memory"
        if key in _DEVICE or _DEVICE_NAMES.fullmatch(name):
            return "_device", "Any", f"{words}, device memory"
        suffix = ", const=True" if const else ""
        if spelled == "char":
            return f"TypedPointer(c_char{suffix})", "Any", f"{words}, host memory"
        if target.kind == self._cindex.TypeKind.POINTER and self._plain(target.get_pointee()) == "void":
            return "TypedPointer(c_void_p)", "Any", f"address of {words}"
        if spelled in self._enums:
            annotation = "Sequence[int] | Any" if const else "Any"
            return f"TypedPointer({spelled}{suffix})", annotation, words
        if spelled in self._pointers:
            return f"POINTER({spelled})", "Any", _descriptor(spelled, name)
        if spelled in self._structs | self._opaque:
            return f"POINTER({spelled})", "Any", words
        if spelled in self._callbacks:
            return f"POINTER({spelled})", "Any", "callback"
        value = self._value(target, f"{function}: {name}")
        annotation = "Sequence[int] | Any" if const else "Any"
        return f"TypedPointer({value}{suffix})", annotation, words

    def _scaling(self, function: str, index: int, arguments: list[Any]) -> tuple[str, str, str]:
        """A scaling factor follows the data type of the first tensor (else filter) of the call."""
        kinds = [self._plain(argument.type) for argument in arguments]
        for kind, word in (("cudnnTensorDescriptor_t", "tensor"), ("cudnnFilterDescriptor_t", "filter")):
            if kind not in kinds:
                continue
            position = kinds.index(kind)
            extra = "" if word == "tensor" else ', "filter"'
            name = arguments[index].spelling
            if (function, name) in _EXACT_SCALING:
                return f"Scaling({position}{extra}, exact=True)", "Any", "one value of the tensor's own data type"
            return f"Scaling({position}{extra})", "Any", f"scaling factor {name}, host memory"
        raise GenerateError(f"{function}: no descriptor says the type of {arguments[index].spelling}")


# Words --------------------------------------------------------------------------------------------------------


def _split(name: str) -> list[str]:
    """Splits a camel-case or snake-case name to its words."""
    return re.findall(r"Im2Col|B2B|V2|[1-9N]d(?![a-z])|[A-Z]{2,}(?![a-z])|[A-Z]?[a-z]+|\d+|[A-Z]", name)


def _words(name: str) -> str:
    """Says a name as lower-case words."""
    said = []
    for word in _split(name):
        spelled = _SPELLED.get(word[0].upper() + word[1:])
        said.append(spelled or (word if word.isupper() else word.lower()))
    if len(said) > 1 and said[-1] == "A":
        said.pop()  # the A of dimA says array
    return re.sub(r"(\w+) ([1-9N]-D)", r"\2 \1", " ".join(said))


def _descriptor(kind: str, name: str) -> str:
    """Says which descriptor a parameter is: "tensor descriptor of x"."""
    if kind in _TYPES:
        return _TYPES[kind]
    sort = _words(kind.removeprefix("cudnn").removesuffix("_t"))
    of = re.sub(r"_?[dD]esc(riptor)?$", "", name)
    redundant = (len(of) > 2 and of.lower() in sort.replace(" ", "").lower()) or not sort.endswith("descriptor")
    return sort if redundant else f"{sort} of {of}"


def _purpose(name: str) -> str:
    """Makes a purpose from a function's name: cudnnConvolutionBackwardData computes the convolution (backward data)."""
    if name in _PURPOSES:
        return _PURPOSES[name]
    match = re.fullmatch(r"cudnn(\w+?)(?:_v(\d+))?", name)
    if match is None:
        raise GenerateError(f"{name}: not a name of cuDNN")
    base, version = match.groups()
    parts = _split(base)
    if parts[-2:] == ["Version", "Check"]:
        return f"Checks that the {_words(''.join(parts[:-2]))} library and the core have the same version"
    suffix = " (extended form)" if "Ex" in parts else ""
    suffix += f" (version {version})" if version else ""
    parts = [part for part in parts if part != "Ex"]
    verb = next((part for part in parts if part in _VERBS), "")
    if verb:
        parts.remove(verb)
        article = "a" if verb in ("Create", "Destroy") or parts == ["Backend"] else "the"
        rest = _words("".join(parts)) if parts != ["Backend"] else "backend descriptor"
        if article == "a" and (rest[0] in "aeio" or rest.startswith(("RNN", "LRN"))):
            article = "an"
        return f"{_VERBS[verb]} {article} {rest}{suffix}"
    passes = [part for part in parts if part in _PASSES]
    rest = _words("".join(part for part in parts if part not in _PASSES))
    # What is left of "convolution backward bias" is the convolution, and of "RNN backward data" the RNN.
    which = f" ({_words(''.join(passes))})" if passes else ""
    return f"Computes the {rest}{which}{suffix}"


# Writing ------------------------------------------------------------------------------------------------------


def render(headers: Headers) -> str:
    """Writes bindings.py.

    Args:
        headers: what was parsed.

    Returns:
        The text of the module.
    """
    parts = [_BANNER.format(version=headers.version)]
    parts.append("\n# Versions and limits\n")
    parts += [f"{name} = {value}" for name, value in headers.macros]
    parts.append("\ndeclare_headers(CUDNN_VERSION)\n")
    for kind in headers.types:
        parts += _render_type(kind)
    header = ""
    for function in headers.functions:
        if function.header != header:
            header = function.header
            parts.append(f"\n\n# {header}")
        parts += _render_function(function)
    parts.append('\n\n__all__ = [name for name in globals() if name not in _imported and not name.startswith("_")]\n')
    return "\n".join(parts)


def _render_type(kind: Enum | Struct | Opaque | Alias) -> Iterator[str]:
    if isinstance(kind, Alias):
        if kind.expression == "Address":
            yield f'\n\nclass {kind.name}(Address):\n    """CUDA\'s {kind.name}."""\n'
        else:
            yield f"\n{kind.name} = {kind.expression}"
    elif isinstance(kind, Opaque):
        yield f'\n\nclass {kind.name}(Structure):\n    """Opaque."""\n'
    elif isinstance(kind, Struct):
        yield f"\n\nclass {kind.name}(Structure):"
        yield "    _fields_ = ["
        for name, expression in kind.fields:
            yield f'        ("{name}", {expression}),'
        yield "    ]\n"
    else:
        yield f"\n\nclass {kind.name}(CEnum):"
        for name, value in kind.members:
            yield f"    {name} = {value}"
        yield "\n"
        for name, _ in kind.members:
            yield f"{name} = {kind.name}.{name}"


def _render_function(function: Function) -> Iterator[str]:
    argtypes = [function.restype, *[parameter.argtype for parameter in function.parameters]]
    yield "\n"
    yield from _wrapped("@bind(", [*argtypes, f"status={function.status}", f'since="{function.since}"'], ")")
    signature = [f"{item.name}: {item.annotation}" for item in function.parameters]
    yield from _wrapped(f"def {function.name}(", signature, f") -> {function.returns}:")
    about = [f"since {function.since}" if function.since else "", "deprecated" if function.deprecated else ""]
    said = "; ".join(word for word in about if word)
    said = f" {said[0].upper()}{said[1:]}." if said else ""
    if not function.parameters:
        yield f'    """{function.purpose}.{said}"""'
        return
    yield f'    """{function.purpose}.{said}\n'
    yield "    Args:"
    for item in function.parameters:
        yield f"        {item.name}: [{item.direction}] {item.role}."
    yield '    """'


def _wrapped(start: str, items: list[str], end: str) -> Iterator[str]:
    """Writes a bracketed list on one line if it fits, else filled lines between the brackets."""
    one = f"{start}{', '.join(items)}{end}"
    if len(one) <= _WIDTH:
        yield one
        return
    yield start
    line = "   "
    for item in items:
        if len(line) + len(item) + 2 > _WIDTH:
            yield line
            line = "   "
        line += f" {item},"
    yield line
    yield end


# The command --------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: the command line without the program's name; by default the process's.

    Returns:
        The exit status: 0 done or equal, 1 different (with ``--check``), 2 the headers are missing or do not parse.
    """
    parser = argparse.ArgumentParser(prog="python -m flcuda.cudnn.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the output instead of writing it")
    parser.add_argument("--headers", type=Path, help="folder with cudnn.h (default: the nvidia-cudnn wheel's)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="file to write or compare (default: bindings.py)")
    options = parser.parse_args(arguments)
    try:
        text = render(parse(options.headers))
    except GenerateError as error:
        print(f"generate: {error}", file=sys.stderr)
        return 2
    if not options.check:
        options.output.write_text(text, encoding="utf-8")
        return 0
    current = options.output.read_text(encoding="utf-8") if options.output.is_file() else ""
    if current == text:
        return 0
    print(f"generate: {options.output.name} differs from what the headers give; run without --check", file=sys.stderr)
    changes = difflib.unified_diff(current.splitlines(), text.splitlines(), "committed", "generated", lineterm="", n=1)
    for number, line in enumerate(changes):
        if number == 40:
            print("...", file=sys.stderr)
            break
        print(line, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
