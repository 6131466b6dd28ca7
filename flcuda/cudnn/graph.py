"""cuDNN's graph API: a builder of operation graphs, their engines, and execution plans.

A `Graph` collects tensors and operations and checks them; ``build`` makes the backend descriptors, an
`OperationGraph`. That one is asked for `EngineConfig` objects (by heuristics, or by hand from an `Engine` and its
knobs), and a configuration becomes an `ExecutionPlan`, which has a workspace size, a JSON form, and runs::

    g = Graph()
    x = g.tensor((128, 64, 56, 56), "float16", layout="nhwc")
    w = g.tensor((64, 64, 3, 3), "float16", layout="nhwc")
    y = g.output(g.relu(g.convolution_forward(x, w, padding=1)))
    graph = g.build(device=DeviceProperties.from_profile("h200"))
    plan = graph.configurations()[0].plan()
    plan.execute(handle, {x.uid: px, w.uid: pw, y.uid: py}, workspace)

Every descriptor is a `Backend` with ``.descriptor``, so the raw functions of `flcuda.cudnn.bindings` work on it too.

Note [counts]: a number of results that is asked for beforehand is an upper bound. Only the count returned together with
the results says how many of the descriptors were filled; one that was not is unusable.

Note [multiprocessors]: a target of as many multiprocessors as the GPU has is not the same as no target: cuDNN then
delivers only the few engines that know targets. It takes a larger number as well. So a target is set only where it is
below what the GPU has. It is a part of the engine, and of the plan.

Note [zero]: heuristics take absent device properties and properties that were never finalized, report success and a
count, and then deliver nothing. And a graph for which modes A and B know nothing may still have fallback engines. So
every finalize is checked, and "not supported" means zero over all modes.

Note [order of frees]: cuDNN does not promise that a descriptor may go before another one that was given it. A
descriptor is therefore destroyed once, when its owner is closed or gone and everything that was given it is gone as
well; owners may be closed in any order.

Note [by value]: a scalar by value is read from host memory at each run, by an address in the variant pack. The plan
owns that memory.

Note [JSON]: a plan's JSON fits one cuDNN version and one GPU model. Restored with neither handle nor device properties
it crashes the process instead of failing, and so do some damaged texts; what would crash is refused here before cuDNN
sees it. Not in the JSON: device properties, how CUDA graphs keep the plan alive, and the scalars' values.

Note [reasons]: an engine that refuses often leaves no last-error text, but cuDNN logs the reason. `why_not` therefore
listens to the log meanwhile, for its own thread, and calls the callback that was there before.

Note [factors]: alpha1 and alpha2 of a pointwise operation finalize, and no engine of cuDNN 9.28 takes them; a scalar
that is multiplied is taken.

Note [FLCUDA_CHECK]: with FLCUDA_CHECK=1 in the environment when this module is imported, each run first checks that
every pointer is aligned and has the bytes behind it that its tensor reaches over (flcuda.cudnn.memory says how far that
can be known), that the workspace has its bytes, and that neither an output nor the workspace shares memory with another
tensor; a plan restored from JSON does not know its outputs. That costs some ten microseconds a tensor; without the
variable it costs nothing.

Note [pooling]: some gradients of max pooling of nhwc tensors end the process, for the GPU here and for one told by
device properties. In cuDNN 9.19 that with x and y instead of the index does, in every mode of the heuristics, in
finalizing a configuration, and in restoring a plan. With one spatial dimension, index or not, they do so in some runs
only, in 9.19 and in 9.28, where it is a division by zero in finalizing a plan. They are refused before cuDNN is asked.

Note [capture]: before cuDNN 9.28 a CUDA graph does not keep the plan that it was captured from alive. Keep the plan as
long as the graph.

Note [variant packs]: what cudnnBackendExecute runs on is a variant pack, a descriptor with the addresses. Once it is
finalized it cannot be set again (cuDNN 9.19 and 9.28 refuse with status 2000), so other addresses are another pack; a
plan keeps those of the last sets of addresses. cuDNN copies what is set, so the arrays that it is set from are the
plan's own and filled again for each pack. cudnnBackendExecute has read the pack when it returns, also while a CUDA
graph is captured: the addresses are then arguments of kernels. So a pack may go as soon as the call is over. All these
functions release the interpreter's lock, those too that never wait: cuDNN calls a log callback from them, and another
thread that logs meanwhile may hold a lock of cuDNN's and wait for the interpreter's.

Note [threads]: descriptors that are finalized can be read from several threads, and plans may be built in several. One
plan is run by one thread at a time.
"""

import collections
import concurrent.futures
import contextlib
import ctypes
import functools
import json
import math
import os
import re
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self, TypeAlias

import numpy as np

from flcuda import device as devices
from flcuda.cudnn import bindings, log, memory, resources
from flcuda.cudnn import library as libraries
from flcuda.cudnn.resources import Handle, Owner, overlaps
from flcuda.errors import NOT_SUPPORTED, CudnnError, CudnnNotSupportedError, cudnn_error

if TYPE_CHECKING:
    from flcuda.cudnn.device_properties import DeviceProperties

Ints: TypeAlias = int | Sequence[int]
Padding: TypeAlias = int | Sequence[int] | Sequence[Sequence[int]]

_BAD_PARAM = 2000
_VERSION_MISMATCH = 1002
_SERIALIZATION_MISMATCH = 1003
_ARCH_MISMATCH = 3007


# --- backend descriptors --------------------------------------------------------------------------------------------

# Which version brought an attribute, by the longest of these prefixes that its name begins with; all others came with
# 9.0. From the headers of cuDNN 9.28.
_ATTRIBUTE_SINCE = {
    prefix: version
    for version, prefixes in {
        90000: "OPERATION_REDUCTION_DESC OPERATION_REDUCTION_XDESC OPERATION_REDUCTION_YDESC",
        90200: "ENGINECFG_SHARED ENGINECFG_WORKSPACE",
        90400: "EXECUTION_PLAN_KERNEL KERNEL_CACHE_IS OPERATIONGRAPH_IS OPERATION_PAGED",
        90500: "KERNEL_CACHE_OPERATION",
        90600: "OPERATIONGRAPH_IS_SAME",
        90700: "OPERATION_BLOCK",
        90800: "DEVICEPROP ENGINEHEUR_DEVICEPROP ENGINE_DEVICEPROP EXECUTION_PLAN_DEVICEPROP",
        91000: "KERNEL_CACHE_JSON OPERATION_CONTRACT OPERATION_EXPAND",
        91100: "REDUCTION_IS",
        91300: "OPERATION_BLOCK_SCALE_DEQUANTIZE_NEG OPERATION_EXPAND_BAND_MATRIX_SPECULATIVE OPERATION_SDPA_FWD_KDESC "
        "OPERATION_SDPA_FWD_ODESC OPERATION_SDPA_FWD_QDESC OPERATION_SDPA_FWD_SCALEDESC OPERATION_SDPA_FWD_STATSDESC "
        "OPERATION_SDPA_FWD_VDESC",
        91400: "OPERATION_SDPA_FWD_BLOCK",
        91500: "OPERATION_MOE OPERATION_SDPA_FWD_PAGE OPERATION_SDPA_FWD_SEQ",
        91700: "ENGINE_DISABLE OPERATION_SDPA_BWD",
        91800: "VARIANT_PACK_OVERRIDE",
        92000: "OPERATION_DIAGONAL OPERATION_SOFTMAX",
        92100: "OPERATIONGRAPH_IS_OVERRIDE OPERATION_SDPA OPERATION_SDPA_BWD_DSINK OPERATION_SDPA_BWD_MAX "
        "OPERATION_SDPA_BWD_SINK OPERATION_SDPA_BWD_SUBGRAPH",
        92200: "OPERATION_MOE_GROUPED_MATMUL_BWD OPERATION_RESHAPE_MODE OPERATION_SDPA_FWD_UNFUSE OPERATION_SLICE "
        "OPERATION_TRANSPOSE TENSOR_CONSTANT",
        92300: "OPERATIONGRAPH_MODE",
        92400: "OPERATION_DIAGONAL_BAND_MASK_CU OPERATION_REDUCTION_GROUP OPERATION_ROPE OPERATION_SDPA_FWD_CU "
        "TENSOR_RAGGED_OFFSET_MULTIPLIER",
        92500: "OPERATION_ROPE_BWD OPERATION_SDPA_FWD_AMAX OPERATION_SDPA_FWD_DESCALE OPERATION_SDPA_FWD_SCALE",
        92700: "KERNEL OPERATION_REDUCTION OPERATION_SOFTMAX_STATS_LOG2",
        92800: "ENGINEHEUR_SHARED ENGINE_SHARED EXECUTION_PLAN_CUDA OPERATION_SDPA_BWD_CU OPERATION_SDPA_BWD_DBIAS "
        "OPERATION_SDPA_BWD_DROPOUT",
    }.items()
    for prefix in prefixes.split()
}
_KIND_SINCE = {
    "KERNEL_CACHE": 90400,
    "OPERATION_PAGED_CACHE_LOAD": 90400,
    "OPERATION_BLOCK_SCALE_QUANTIZE": 90700,
    "OPERATION_BLOCK_SCALE_DEQUANTIZE": 90700,
    "DEVICEPROP": 90800,
    "OPERATION_EXPAND_BAND_MATRIX": 91000,
    "OPERATION_CONTRACT_BAND_MATRIX": 91000,
    "OPERATION_SDPA_FWD": 91300,
    "OPERATION_MOE_GROUPED_MATMUL": 91500,
    "OPERATION_SDPA_BWD": 91700,
    "OPERATION_DIAGONAL_BAND_MASK": 92000,
    "OPERATION_SOFTMAX": 92000,
    "OPERATION_TRANSPOSE": 92200,
    "OPERATION_SLICE": 92200,
    "OPERATION_MOE_GROUPED_MATMUL_BWD": 92200,
    "OPERATION_ROPE_FWD": 92400,
    "OPERATION_ROPE_BWD": 92500,
}
# The types of attributes whose name does not tell it; the rest follows the rules of `attribute_type`.
_ATTRIBUTE_TYPES = {
    "POINTWISE_MODE": "POINTWISE_MODE",
    "CONVOLUTION_CONV_MODE": "CONVOLUTION_MODE",
    "ENGINEHEUR_MODE": "HEUR_MODE",
    "ENGINEHEUR_SM_COUNT_TARGET": "INT32",
    "ENGINEHEUR_SHARED_MEMORY_LIMIT": "INT32",
    "ENGINECFG_ENGINE": "BACKEND_DESCRIPTOR",
    "ENGINECFG_INTERMEDIATE_INFO": "BACKEND_DESCRIPTOR",
    "ENGINECFG_KNOB_CHOICES": "BACKEND_DESCRIPTOR",
    "ENGINECFG_SHARED_MEMORY_USED": "INT32",
    "ENGINEHEUR_RESULTS": "BACKEND_DESCRIPTOR",
    "ENGINE_KNOB_INFO": "BACKEND_DESCRIPTOR",
    "ENGINE_LAYOUT_INFO": "BACKEND_DESCRIPTOR",
    "ENGINE_NUMERICAL_NOTE": "NUMERICAL_NOTE",
    "ENGINE_BEHAVIOR_NOTE": "BEHAVIOR_NOTE",
    "ENGINE_SM_COUNT_TARGET": "INT32",
    "ENGINE_SHARED_MEMORY_LIMIT": "INT32",
    "EXECUTION_PLAN_ENGINE_CONFIG": "BACKEND_DESCRIPTOR",
    "EXECUTION_PLAN_KERNEL_CACHE": "BACKEND_DESCRIPTOR",
    "EXECUTION_PLAN_CUDA_GRAPH_RETENTION": "CUDA_GRAPH_RETENTION",
    "INTERMEDIATE_INFO_DEPENDENT_ATTRIBUTES": "ATTRIB_NAME",
    "KERNEL_CACHE_IS_ENGINECFG_KERNEL_CACHED": "BOOLEAN",
    "KNOB_CHOICE_KNOB_TYPE": "KNOB_TYPE",
    "KNOB_INFO_TYPE": "KNOB_TYPE",
    "LAYOUT_INFO_TYPES": "LAYOUT_TYPE",
    "OPERATIONGRAPH_OPS": "BACKEND_DESCRIPTOR",
    "OPERATIONGRAPH_MODE": "OPERATIONGRAPH_MODE",
    "OPERATION_GENSTATS_MODE": "GENSTATS_MODE",
    "OPERATION_BN_FINALIZE_STATS_MODE": "BN_FINALIZE_STATS_MODE",
    "OPERATION_BN_BWD_WEIGHTS_EQ_BIAS": "BACKEND_DESCRIPTOR",
    "OPERATION_NORM_FWD_MODE": "NORM_MODE",
    "OPERATION_NORM_FWD_PHASE": "NORM_FWD_PHASE",
    "OPERATION_NORM_BWD_MODE": "NORM_MODE",
    "OPERATION_RESHAPE_MODE": "RESHAPE_MODE",
    "OPERATION_SIGNAL_MODE": "SIGNAL_MODE",
    "REDUCTION_OPERATOR": "REDUCTION_OPERATOR_TYPE",
    "REDUCTION_IS_DETERMINISTIC": "BOOLEAN",
    "RESAMPLE_MODE": "RESAMPLE_MODE",
    "RESAMPLE_PADDING_MODE": "PADDING_MODE",
    "TENSOR_DATA_TYPE": "DATA_TYPE",
    "TENSOR_REORDERING_MODE": "TENSOR_REORDERING_MODE",
    "VARIANT_PACK_WORKSPACE": "VOID_PTR",
    "VARIANT_PACK_DATA_POINTERS": "VOID_PTR",
    "VARIANT_PACK_INTERMEDIATES": "VOID_PTR",
}
_SUFFIX_TYPES = {
    "DESCRIPTOR": "BACKEND_DESCRIPTOR",
    "DEVICEPROP": "BACKEND_DESCRIPTOR",
    "OPERATION_GRAPH": "BACKEND_DESCRIPTOR",
    "FORWARD_X": "BACKEND_DESCRIPTOR",
    "FORWARD_W": "BACKEND_DESCRIPTOR",
    "FORWARD_Y": "BACKEND_DESCRIPTOR",
    "BWD_DATA_W": "BACKEND_DESCRIPTOR",
    "BWD_DATA_DX": "BACKEND_DESCRIPTOR",
    "BWD_DATA_DY": "BACKEND_DESCRIPTOR",
    "BWD_FILTER_X": "BACKEND_DESCRIPTOR",
    "BWD_FILTER_DW": "BACKEND_DESCRIPTOR",
    "BWD_FILTER_DY": "BACKEND_DESCRIPTOR",
    "HANDLE": "HANDLE",
    "JSON_REPRESENTATION": "CHAR",
    "COMP_TYPE": "DATA_TYPE",
    "MATH_PREC": "DATA_TYPE",
    "NAN_PROPAGATION": "NAN_PROPOGATION",
    "IS_VIRTUAL": "BOOLEAN",
    "IS_BY_VALUE": "BOOLEAN",
    "ENABLED": "BOOLEAN",
    "IS_SAME_TOPOLOGY": "BOOLEAN",
    "ALPHA": "FLOAT",
    "BETA": "FLOAT",
    "ALPHA1": "FLOAT",
    "ALPHA2": "FLOAT",
    "CLIP": "FLOAT",
    "CLIP_SLOPE": "FLOAT",
    "PADDING_VALUE": "DOUBLE",
}
# What the descriptors are that an attribute gives.
_CONTENT_KINDS = {
    "ENGINEHEUR_RESULTS": "ENGINECFG",
    "ENGINECFG_ENGINE": "ENGINE",
    "ENGINECFG_KNOB_CHOICES": "KNOB_CHOICE",
    "ENGINE_KNOB_INFO": "KNOB_INFO",
    "ENGINE_LAYOUT_INFO": "LAYOUT_INFO",
    "ENGINE_OPERATION_GRAPH": "OPERATIONGRAPH",
    "EXECUTION_PLAN_ENGINE_CONFIG": "ENGINECFG",
}
_ELEMENTS: dict[str, Any] = {
    "HANDLE": bindings.cudnnHandle_t,
    "BOOLEAN": ctypes.c_bool,
    "INT64": ctypes.c_int64,
    "INT32": ctypes.c_int32,
    "FLOAT": ctypes.c_float,
    "DOUBLE": ctypes.c_double,
    "VOID_PTR": ctypes.c_void_p,
    "BACKEND_DESCRIPTOR": bindings.cudnnBackendDescriptor_t,
    "CHAR": ctypes.c_char,
    "FRACTION": bindings.cudnnFractionStruct,
}


@functools.cache
def attribute_type(name: str) -> str:
    """Gives the type that an attribute's values have.

    Args:
        name: the attribute without its prefix, such as "TENSOR_DIMENSIONS".

    Returns:
        The type without its prefix, such as "INT64". Where cuDNN takes several, the first of FLOAT and INT64.
    """
    if name in _ATTRIBUTE_TYPES:
        return _ATTRIBUTE_TYPES[name]
    if name.endswith(("DESC", "DESCS")):
        return "BACKEND_DESCRIPTOR"
    words = name.split("_")
    for start in range(1, len(words)):
        kind = _SUFFIX_TYPES.get("_".join(words[start:]))
        if kind is not None:
            return kind
    return "INT64"


@functools.cache
def attribute_since(name: str) -> int:
    """Gives the cuDNN version that brought an attribute, as cudnnGetVersion counts.

    Args:
        name: the attribute without its prefix.

    Returns:
        90800 for 9.8.0; 90000 for what is as old or older.
    """
    prefix = max((known for known in _ATTRIBUTE_SINCE if name.startswith(known)), key=len, default="")
    return _ATTRIBUTE_SINCE.get(prefix, 90000)


def _require(version: int, function: str, what: str) -> None:
    """Refuses what the loaded cuDNN is too old for; by itself it would answer with a bad parameter."""
    library = libraries.load()
    if library.version < version:
        text = (
            f"cuDNN {library.version_text} of {library.path} has no {what}; "
            f"cuDNN {libraries.version_text(version)} brought it"
        )
        raise cudnn_error(function, NOT_SUPPORTED, text, "CUDNN_STATUS_NOT_SUPPORTED")


class _Held(Owner):
    """One descriptor and all that was given it; see Note [order of frees]."""

    __slots__ = ("uses",)

    def __init__(self, kind: bindings.cudnnBackendDescriptorType_t) -> None:
        libraries.load().require_cublas()
        pointer = bindings.cudnnBackendDescriptor_t()
        bindings.cudnnBackendCreateDescriptor(kind, ctypes.byref(pointer))
        super().__init__(pointer, bindings.cudnnBackendDestroyDescriptor)
        self.uses: list[Any] = []


class Backend:
    """Owner of one backend descriptor of any kind.

    It stays alive as long as this owner or any descriptor that was given it, so owners may be closed in any order.

    Args:
        kind: the descriptor type, as the enum member or by its name, such as "TENSOR".

    Raises:
        CudnnNotSupportedError: the loaded cuDNN is older than the kind; names the version that brought it.
        ValueError: there is no such kind.
    """

    __slots__ = ("__weakref__", "_finalized", "_held", "kind")

    def __init__(self, kind: str | bindings.cudnnBackendDescriptorType_t) -> None:
        full = kind.name if isinstance(kind, bindings.cudnnBackendDescriptorType_t) else str(kind)
        self.kind = full.removeprefix("CUDNN_BACKEND_").removesuffix("_DESCRIPTOR")
        try:
            member = bindings.cudnnBackendDescriptorType_t[f"CUDNN_BACKEND_{self.kind}_DESCRIPTOR"]
        except KeyError:
            raise ValueError(f"kind: {kind!r} is no kind of backend descriptor") from None
        if self.kind in _KIND_SINCE:
            _require(_KIND_SINCE[self.kind], "cudnnBackendCreateDescriptor", f"{self.kind} descriptor")
        self._held: _Held | None = _Held(member)
        self._finalized = False

    @property
    def descriptor(self) -> Any:
        """The raw cudnnBackendDescriptor_t; borrowed.

        Raises:
            ValueError: this owner is closed.
        """
        if self._held is None:
            raise ValueError(f"this {self.kind} descriptor is closed")
        return self._held._as_parameter_

    @property
    def _as_parameter_(self) -> Any:
        return self.descriptor

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._held is None

    @property
    def finalized(self) -> bool:
        """Whether `finalize` succeeded, or cuDNN delivered it finalized."""
        return self._finalized

    def set(self, attribute: str, *values: Any, kind: str = "") -> Self:
        """Sets an attribute.

        Args:
            attribute: its name without its prefix.
            *values: all its values: numbers, enum members, `Backend` owners, handles, addresses, a `Fraction`; for a
                CHAR attribute one bytes object.
            kind: the type without its prefix when it is not the one of `attribute_type`.

        Returns:
            This owner.

        Raises:
            CudnnError: cuDNN refuses it; the attribute is in a note.
            CudnnNotSupportedError: the loaded cuDNN is older than the attribute.
            ValueError: there is no such attribute, or a descriptor among the values is not finalized.
        """
        asked = _attribute(attribute, kind)
        asked.require("cudnnBackendSetAttribute")
        array, count = _elements(asked.name, asked.kind, values)
        held = self._held
        try:
            bindings.cudnnBackendSetAttribute(self.descriptor, asked.member, asked.code, count, array)
        except CudnnError as error:
            error.add_note(f"attribute {asked.name} of a {self.kind} descriptor, set to {_shown(values)}")
            raise
        assert held is not None
        for value in values:
            if isinstance(value, Backend):
                held.uses.append(value._held)
            elif hasattr(value, "descriptor"):
                held.uses.append(value)
        return self

    def count(self, attribute: str, *, kind: str = "") -> int:
        """Asks how many values an attribute has; see Note [counts].

        Args:
            attribute: its name without its prefix.
            kind: the type without its prefix when it is not the one of `attribute_type`.

        Returns:
            An upper bound; 0 for the knob choices of a configuration, whose number cuDNN does not tell beforehand.

        Raises:
            CudnnError: cuDNN refuses it.
            CudnnNotSupportedError: the loaded cuDNN is older than the attribute.
            ValueError: there is no such attribute.
        """
        asked = _attribute(attribute, kind)
        asked.require("cudnnBackendGetAttribute")
        count = ctypes.c_int64()
        bindings.cudnnBackendGetAttribute(self.descriptor, asked.member, asked.code, 0, ctypes.byref(count), None)
        return count.value

    def get(self, attribute: str, *, limit: int | None = None, room: int | None = None, kind: str = "") -> list[Any]:
        """Reads an attribute.

        Args:
            attribute: its name without its prefix.
            limit: read at most as many values.
            room: how many values there may be; by default what `count` says.
            kind: the type without its prefix when it is not the one of `attribute_type`.

        Returns:
            As many values as cuDNN delivered (Note [counts]): numbers, `Backend` owners; for CHAR one bytes object.

        Raises:
            CudnnError: cuDNN refuses it.
            CudnnNotSupportedError: the loaded cuDNN is older than the attribute.
            ValueError: there is no such attribute.
        """
        asked = _attribute(attribute, kind)
        if room is None:
            room = self.count(asked.name, kind=kind)
        else:
            asked.require("cudnnBackendGetAttribute")
        if limit is not None:
            room = min(room, limit)
        if room <= 0:
            return []
        count = ctypes.c_int64()
        owners = []
        array = (asked.element * room)()
        if asked.kind == "BACKEND_DESCRIPTOR":
            owners = [Backend(_CONTENT_KINDS[asked.name]) for _ in range(room)]
            array = (asked.element * room)(*(owner.descriptor for owner in owners))
        bindings.cudnnBackendGetAttribute(self.descriptor, asked.member, asked.code, room, ctypes.byref(count), array)
        delivered = min(room, count.value)
        if owners:
            for owner in owners[:delivered]:
                owner._finalized = True
                assert owner._held is not None
                owner._held.uses.append(self._held)
            return owners[:delivered]
        if asked.kind == "CHAR":
            return [bytes(array[:delivered]).rstrip(b"\0")]
        return list(array[:delivered])

    def get_one(self, attribute: str, *, kind: str = "") -> Any:
        """Reads an attribute that has one value.

        Args:
            attribute: its name without its prefix.
            kind: as for `get`.

        Returns:
            The value.

        Raises:
            CudnnError: cuDNN refuses it, or delivers nothing.
        """
        # One value has room for itself: it need not be counted first.
        values = self.get(attribute, room=None if _attribute(attribute, kind).kind == "CHAR" else 1, kind=kind)
        if not values:
            text = f"cuDNN delivers no {attribute} of this {self.kind} descriptor"
            raise cudnn_error("cudnnBackendGetAttribute", _BAD_PARAM, text, "CUDNN_STATUS_BAD_PARAM")
        return values[0]

    def finalize(self, what: str = "") -> Self:
        """Finalizes the descriptor: from here on it can be read and used, and not be changed.

        Args:
            what: what it describes, for the error.

        Returns:
            This owner.

        Raises:
            CudnnError: cuDNN refuses it; a note says what it was.
        """
        try:
            bindings.cudnnBackendFinalize(self.descriptor)
        except CudnnError as error:
            error.add_note(f"while finalizing {what or f'a {self.kind} descriptor'}")
            raise
        self._finalized = True
        return self

    def close(self) -> None:
        """Gives the descriptor up; it is destroyed when nothing uses it any more. Does nothing the second time."""
        self._held = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {self.kind} descriptor belongs to this process and cannot be copied or pickled")

    def __repr__(self) -> str:
        state = "closed" if self.closed else "finalized" if self._finalized else "not finalized"
        return f"Backend({self.kind!r}, {state})"


class _Attribute(NamedTuple):
    """What there is to know of an attribute before its values."""

    name: str
    kind: str
    member: bindings.cudnnBackendAttributeName_t
    code: bindings.cudnnBackendAttributeType_t
    element: Any
    since: int

    def require(self, function: str) -> None:
        """Refuses what the loaded cuDNN is too old for."""
        if libraries.load().version < self.since:
            _require(self.since, function, f"attribute {self.name}")


@functools.cache
def _attribute(name: str, kind: str = "") -> _Attribute:
    short = name.removeprefix("CUDNN_ATTR_")
    try:
        member = bindings.cudnnBackendAttributeName_t[f"CUDNN_ATTR_{short}"]
    except KeyError:
        raise ValueError(f"attribute: {name!r} is no attribute of a backend descriptor") from None
    kind = kind or attribute_type(short)
    return _Attribute(
        name=short,
        kind=kind,
        member=member,
        code=bindings.cudnnBackendAttributeType_t[f"CUDNN_TYPE_{kind}"],
        element=_ELEMENTS.get(kind, ctypes.c_int),
        since=attribute_since(short),
    )


def _elements(name: str, kind: str, values: Sequence[Any]) -> tuple[Any, int]:
    """Makes the C array of an attribute's values."""
    if kind == "CHAR":
        (text,) = values
        return ctypes.create_string_buffer(text, len(text) + 1), len(text)
    if kind == "FRACTION":
        fractions = [Fraction(value) for value in values]
        pairs = [bindings.cudnnFractionStruct(value.numerator, value.denominator) for value in fractions]
        return (bindings.cudnnFractionStruct * len(pairs))(*pairs), len(pairs)
    element = _ELEMENTS.get(kind, ctypes.c_int)
    if kind == "BACKEND_DESCRIPTOR":
        for value in values:
            if not getattr(value, "finalized", True):
                raise ValueError(f"{name}: the {value.kind} descriptor is not finalized")
        values = [value.descriptor for value in values]
    elif kind == "HANDLE":
        values = [getattr(value, "_as_parameter_", value) for value in values]
    return (element * len(values))(*values), len(values)


def _shown(values: Sequence[Any]) -> str:
    text = ", ".join(str(value) for value in values)
    return text if len(text) <= 200 else text[:197] + "..."


# --- what the library says beside its status ------------------------------------------------------------------------

# Reasons that only repeat that an inner step failed.
_EMPTY_REASONS = ("status", "getStatus()", "isSupported()", "finalize_internal()", "finalize()")


def _reason(error: CudnnError, lines: Iterable[str]) -> str:
    """Makes one line of a refusal: its status and the innermost reasons that cuDNN gives or logs.

    cuDNN's reasons are the expressions of its own checks, the innermost first, then one for each step around it.
    """
    reasons = []
    for line in (*error.text.splitlines(), *lines):
        for reason in re.findall(r"Reason: (.*?)(?= (?:Warning|Error|Info): |$)", line):
            told = reason.strip().removesuffix(" at: true")
            if not told.endswith(_EMPTY_REASONS) and told not in reasons:
                reasons.append(told)
    name = error.name.removeprefix("CUDNN_STATUS_") or "status"
    if not reasons and error.text:
        reasons = [error.text.replace("\n", " ")]
    short = [told if len(told) <= 160 else f"{told[:157]}..." for told in reasons[:2]]
    return ": ".join([f"{name} ({error.status})", *short])


# --- tensors --------------------------------------------------------------------------------------------------------


class _DataType(NamedTuple):
    code: bindings.cudnnDataType_t
    bits: int
    since: int = 90000


_DATA_TYPES = {
    "float64": _DataType(bindings.CUDNN_DATA_DOUBLE, 64),
    "float32": _DataType(bindings.CUDNN_DATA_FLOAT, 32),
    "float16": _DataType(bindings.CUDNN_DATA_HALF, 16),
    "bfloat16": _DataType(bindings.CUDNN_DATA_BFLOAT16, 16),
    "float8_e4m3fn": _DataType(bindings.CUDNN_DATA_FP8_E4M3, 8),
    "float8_e5m2": _DataType(bindings.CUDNN_DATA_FP8_E5M2, 8),
    "float8_e8m0fnu": _DataType(bindings.CUDNN_DATA_FP8_E8M0, 8, 90700),
    "float4_e2m1fn": _DataType(bindings.CUDNN_DATA_FP4_E2M1, 4, 90700),
    "int64": _DataType(bindings.CUDNN_DATA_INT64, 64),
    "int32": _DataType(bindings.CUDNN_DATA_INT32, 32),
    "int8": _DataType(bindings.CUDNN_DATA_INT8, 8),
    "int4": _DataType(bindings.CUDNN_DATA_INT4, 4, 91100),
    "uint32": _DataType(bindings.CUDNN_DATA_UINT32, 32, 91100),
    "uint8": _DataType(bindings.CUDNN_DATA_UINT8, 8),
    "uint4": _DataType(bindings.CUDNN_DATA_UINT4, 4, 91100),
    "boolean": _DataType(bindings.CUDNN_DATA_BOOLEAN, 1),
    "byte_boolean": _DataType(bindings.CUDNN_DATA_BYTE_BOOLEAN, 8, 92500),
}
DTYPES = tuple(_DATA_TYPES)
"""The words for a graph's data types: NumPy's and ml_dtypes' names, and cuDNN's two booleans ("boolean" is one bit)."""
COMPUTE_DTYPES = ("float32", "float64", "float16", "bfloat16", "int32")
ALIGNMENTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def _word(where: str, argument: str, dtype: Any, among: Sequence[str] = DTYPES) -> str:
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in among:
        raise ValueError(f"{where}: {argument}: {name!r} is none of {', '.join(among)}")
    return name


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a `Graph`, described; it holds no data.

    Attributes:
        uid: its number in the graph, by which pointers are given to a plan.
        name: what errors call it.
        shape: its dimensions in logical order (N, C, *spatial); () for a scalar that no operation uses yet.
        strides: in elements.
        dtype: a word of `DTYPES`.
        alignment: bytes that divide its address.
        virtual: whether it lives inside the graph only and has no pointer.
        value: the number of a scalar by value, else None.
    """

    uid: int
    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    alignment: int = 16
    virtual: bool = False
    value: float | int | None = None
    _graph: object = field(default=None, repr=False, compare=False)

    @property
    def extent(self) -> int:
        """The bytes from its address to its end, gaps included."""
        elements = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        return -(-elements * _DATA_TYPES[self.dtype].bits // 8)

    def __str__(self) -> str:
        shape = "scalar" if self.value is not None else f"({', '.join(map(str, self.shape))})"
        return f"{self.name!r} {shape} {self.dtype}"


class NormForward(NamedTuple):
    """What `Graph.norm_forward` gives; None where there is no such output."""

    y: Tensor
    mean: Tensor | None
    inv_variance: Tensor | None
    running_mean: Tensor | None
    running_variance: Tensor | None


class NormBackward(NamedTuple):
    """What `Graph.norm_backward` gives; dbias is None for the RMS norm."""

    dx: Tensor
    dscale: Tensor
    dbias: Tensor | None


class BatchNormFinalized(NamedTuple):
    """What `Graph.batch_norm_finalize` gives: y = equivalent_scale * x + equivalent_bias is the normalised tensor."""

    equivalent_scale: Tensor
    equivalent_bias: Tensor
    mean: Tensor
    inv_std: Tensor
    running_mean: Tensor | None
    running_variance: Tensor | None


class BatchNormBackwardWeights(NamedTuple):
    """What `Graph.batch_norm_backward_weights` gives.

    dx = equivalent_dy_scale * dy + equivalent_x_scale * x + equivalent_bias.
    """

    dscale: Tensor
    dbias: Tensor
    equivalent_dy_scale: Tensor
    equivalent_x_scale: Tensor
    equivalent_bias: Tensor


@dataclass(frozen=True)
class _Setting:
    """An attribute of an operation that is no tensor: plain values, or a descriptor of its own."""

    attribute: str
    values: tuple[Any, ...] = ()
    kind: str = ""
    descriptor: str = ""
    settings: tuple["_Setting", ...] = ()


@dataclass
class _Operation:
    label: str
    kind: str
    inputs: dict[str, tuple[int, ...]]
    outputs: dict[str, int]
    optional: frozenset[str]
    settings: list[_Setting]


# --- the builder ----------------------------------------------------------------------------------------------------


def _pointwise_modes() -> dict[str, bindings.cudnnPointwiseMode_t]:
    return {
        member.name.removeprefix("CUDNN_POINTWISE_").lower(): member
        for member in bindings.cudnnPointwiseMode_t.__members__.values()
    }


_POINTWISE = _pointwise_modes()
POINTWISE_MODES = tuple(_POINTWISE)
"""The words for pointwise modes: the header's names in small letters, "relu_fwd", "add", "gen_index", ..."""
_POINTWISE_SINCE = {"atan2": 90100, "floor_mod": 92700}
_TRUTH = ("cmp_", "logical_")
_BINARY = frozenset(("add", "add_square", "div", "max", "min", "mod", "mul", "pow", "sub", "atan2", "floor_mod")) | {
    word for word in _POINTWISE if word.startswith(_TRUTH) and word != "logical_not"
}
# The parameters of a mode: the keyword, its attribute, and the modes that have it.
_POINTWISE_PARAMETERS = {
    "lower_clip": ("POINTWISE_RELU_LOWER_CLIP", ("relu_fwd", "relu_bwd")),
    "upper_clip": ("POINTWISE_RELU_UPPER_CLIP", ("relu_fwd", "relu_bwd")),
    "lower_slope": ("POINTWISE_RELU_LOWER_CLIP_SLOPE", ("relu_fwd", "relu_bwd")),
    "elu_alpha": ("POINTWISE_ELU_ALPHA", ("elu_fwd", "elu_bwd")),
    "softplus_beta": ("POINTWISE_SOFTPLUS_BETA", ("softplus_fwd", "softplus_bwd")),
    "swish_beta": ("POINTWISE_SWISH_BETA", ("swish_fwd", "swish_bwd")),
}
_REDUCTIONS = {
    member.name.removeprefix("CUDNN_REDUCE_TENSOR_").lower(): member
    for member in bindings.cudnnReduceTensorOp_t.__members__.values()
}
REDUCTION_MODES = tuple(_REDUCTIONS)
_NORMS = {
    "batch": bindings.CUDNN_BATCH_NORM,
    "instance": bindings.CUDNN_INSTANCE_NORM,
    "layer": bindings.CUDNN_LAYER_NORM,
    "rms": bindings.CUDNN_RMS_NORM,
}
NORM_MODES = tuple(_NORMS)
_RESAMPLES = {
    "nearest": (bindings.CUDNN_RESAMPLE_NEAREST, bindings.CUDNN_EDGE_VAL_PAD),
    "bilinear": (bindings.CUDNN_RESAMPLE_BILINEAR, bindings.CUDNN_EDGE_VAL_PAD),
    "average_include_padding": (bindings.CUDNN_RESAMPLE_AVGPOOL_INCLUDE_PADDING, bindings.CUDNN_ZERO_PAD),
    "average_exclude_padding": (bindings.CUDNN_RESAMPLE_AVGPOOL_EXCLUDE_PADDING, bindings.CUDNN_ZERO_PAD),
    "max": (bindings.CUDNN_RESAMPLE_MAXPOOL, bindings.CUDNN_NEG_INF_PAD),
}
RESAMPLE_MODES = tuple(_RESAMPLES)
_INDEXED = ("nearest", "max")  # modes whose gradient needs to know which element was taken


def _choice(where: str, argument: str, word: Any, table: Mapping[str, Any]) -> Any:
    if word not in table:
        raise ValueError(f"{where}: {argument}: {word!r} is none of {', '.join(table)}")
    return table[word]


def _whole(where: str, argument: str, values: Any, least: int) -> tuple[int, ...]:
    """Checks a sequence of whole numbers."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{where}: {argument}: {values!r} is no sequence of whole numbers")
    numbers = []
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{where}: {argument}: {value!r} is no whole number")
        number = int(value.__index__())
        if number < least:
            raise ValueError(f"{where}: {argument}: {number} of {tuple(values)} is less than {least}")
        numbers.append(number)
    return tuple(numbers)


def _per_dimension(where: str, argument: str, value: Any, rank: int, least: int) -> tuple[int, ...]:
    numbers = _whole(where, argument, value if isinstance(value, Iterable) else (value,) * rank, least)
    if len(numbers) != rank:
        raise ValueError(f"{where}: {argument}: {numbers} is not one number for each of {rank} spatial dimensions")
    return numbers


def _paddings(where: str, padding: Any, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Reads a padding: one number, one a dimension, or a (before, after) pair a dimension."""
    if isinstance(padding, Iterable) and not isinstance(padding, str):
        pairs = list(padding)
        if pairs and all(isinstance(pair, Sequence) and not isinstance(pair, str) for pair in pairs):
            if len(pairs) != rank or any(len(pair) != 2 for pair in pairs):
                raise ValueError(
                    f"{where}: padding: {tuple(pairs)} is not one (before, after) pair for each of {rank} spatial "
                    f"dimensions"
                )
            return (
                _whole(where, "padding", [pair[0] for pair in pairs], 0),
                _whole(where, "padding", [pair[1] for pair in pairs], 0),
            )
    both = _per_dimension(where, "padding", padding, rank, 0)
    return both, both


def _fractions(where: str, argument: str, value: Any, rank: int) -> tuple[Fraction, ...]:
    values = value if isinstance(value, Iterable) else (value,) * rank
    numbers = []
    for number in values:
        if not isinstance(number, int | Fraction) or isinstance(number, bool):
            raise TypeError(f"{where}: {argument}: {number!r} is neither a whole number nor a Fraction")
        if number <= 0:
            raise ValueError(f"{where}: {argument}: {number} is not positive")
        numbers.append(Fraction(number))
    if len(numbers) != rank:
        raise ValueError(f"{where}: {argument}: {value} is not one number for each of {rank} spatial dimensions")
    return tuple(numbers)


def _packed(shape: Sequence[int], like: Tensor) -> tuple[int, ...]:
    """Gives packed strides in the memory order of another tensor."""
    if len(shape) == len(like.shape):
        for layout in devices.LAYOUTS:
            if like.strides == devices.contiguous_strides(like.shape, layout):
                return devices.contiguous_strides(shape, layout)
        order = sorted(range(len(shape)), key=lambda dim: (-like.strides[dim], dim))
    else:
        order = list(range(len(shape)))
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


class Graph:
    """A graph of operations on tensors, collected and checked before cuDNN sees it.

    Inputs come from `tensor` and `scalar`. Each operation returns its output tensors, virtual until `output` makes one
    a result. Dimensions are (N, C, *spatial) in every layout; the layout is in the strides. An operation's output takes
    the memory order of its first input and, while it is virtual, the intermediate dtype.

    Args:
        compute: the dtype in which operations compute, "float32" unless said otherwise.
        intermediate: the dtype of virtual tensors; by default `compute`. Some engines take 16-bit intermediates only,
            others are faster with them.

    Raises:
        ValueError: a dtype is no such word.
    """

    def __init__(self, compute: str = "float32", *, intermediate: str | None = None) -> None:
        self.compute = _word("Graph", "compute", compute, COMPUTE_DTYPES)
        self.intermediate = _word("Graph", "intermediate", intermediate or compute)
        self._token = object()
        self._tensors: dict[int, Tensor] = {}
        self._operations: list[_Operation] = []
        # Of what an operation made: which operation, and the dtype that it has as a result.
        self._makers: dict[int, str] = {}
        self._natural: dict[int, str] = {}
        self._names: dict[str, int] = {}
        self._stem = ""  # the name of the operation that is being added

    # inputs and outputs

    def tensor(
        self,
        shape: Sequence[int],
        dtype: Any,
        *,
        layout: str | None = None,
        strides: Sequence[int] | None = None,
        alignment: int = 16,
        name: str = "",
    ) -> Tensor:
        """Adds an input that a pointer is given for at each run.

        Args:
            shape: its dimensions (N, C, *spatial), at most 8, each at least 1.
            dtype: a word of `DTYPES` or a NumPy dtype.
            layout: "nchw" (the default) or "nhwc".
            strides: in elements, instead of a layout.
            alignment: bytes that divide every address that it will have; a power of two.
            name: what errors call it.

        Returns:
            The tensor.

        Raises:
            TypeError, ValueError: an argument is not as above; names the tensor, the argument and its value.
        """
        uid = len(self._tensors) + 1
        name = self._unique(name or f"tensor{uid}")
        where = f"tensor {name!r}"
        sizes = _whole(where, "shape", shape, 1)
        if not 1 <= len(sizes) <= bindings.CUDNN_DIM_MAX:
            raise ValueError(f"{where}: shape: {sizes} has {len(sizes)} dimensions; cuDNN takes 1 to 8")
        word = _word(where, "dtype", dtype)
        steps = self._steps(where, sizes, layout, strides)
        made = Tensor(uid, name, sizes, steps, word, self._aligned(where, alignment, word), _graph=self._token)
        self._tensors[uid] = made
        self._natural[uid] = word
        return made

    def scalar(self, value: float, dtype: Any = None, *, name: str = "") -> Tensor:
        """Adds a number that is an input by value; see Note [by value].

        Args:
            value: the number, part of the plan: it is the same at each run.
            dtype: its dtype; by default the graph's compute dtype.
            name: what errors call it.

        Returns:
            The tensor; it gets the rank of what it is used with.

        Raises:
            TypeError, ValueError: the value is no number, or does not fit the dtype.
        """
        uid = len(self._tensors) + 1
        name = self._unique(name or f"scalar{uid}")
        word = _word(f"scalar {name!r}", "dtype", dtype or self.compute, tuple(_SCALARS))
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise TypeError(f"scalar {name!r}: value: {value!r} is no number")
        number = int(value) if isinstance(value, int | np.integer) else float(value)
        if word.startswith("int") and (not float(number).is_integer() or not -(2**63) <= number < 2**63):
            raise ValueError(f"scalar {name!r}: value: {value!r} does not fit in {word}")
        size = _DATA_TYPES[word].bits // 8
        made = Tensor(uid, name, (), (), word, size, value=number, _graph=self._token)
        self._tensors[uid] = made
        self._natural[uid] = word
        return made

    def output(
        self,
        tensor: Tensor,
        *,
        dtype: Any = None,
        layout: str | None = None,
        strides: Sequence[int] | None = None,
        alignment: int = 16,
        name: str = "",
    ) -> Tensor:
        """Makes what an operation returned a result of the graph, that a pointer is given for at each run.

        Args:
            tensor: an operation's output; other operations may use it as well.
            dtype: its dtype; by default that of the operation's first input, and the compute dtype for statistics.
            layout: "nchw" or "nhwc"; by default the memory order that it has already.
            strides: in elements, instead of a layout.
            alignment: bytes that divide every address that it will have.
            name: what errors call it; by default it keeps its name.

        Returns:
            The same tensor as it is now.

        Raises:
            TypeError, ValueError: it is no operation's output, or an argument is not as above.
        """
        known = self._known("output", "tensor", tensor)
        where = f"output {known.name!r}"
        if known.uid not in self._makers:
            raise ValueError(f"{where}: it is an input of the graph; only what an operation returned can be an output")
        if not known.virtual:
            raise ValueError(f"{where}: it is an output already; call output once for it")
        word = _word(where, "dtype", dtype or self._natural[known.uid])
        steps = known.strides
        if layout is not None or strides is not None:
            steps = self._steps(where, known.shape, layout, strides)
        made = replace(
            known,
            name=self._unique(name) if name else known.name,
            strides=steps,
            dtype=word,
            alignment=self._aligned(where, alignment, word),
            virtual=False,
        )
        self._tensors[known.uid] = made
        return made

    # convolutions

    def convolution_forward(
        self,
        x: Tensor,
        w: Tensor,
        *,
        padding: Padding = 0,
        stride: Ints = 1,
        dilation: Ints = 1,
        alpha: float = 1.0,
        beta: float = 0.0,
        dtype: Any = None,
        name: str = "",
    ) -> Tensor:
        """Adds y = alpha * conv(x, w) + beta * y, a cross-correlation.

        Args:
            x: (N, C, *spatial), any number of spatial dimensions from one.
            w: (K, C / groups, *window); the groups follow from it.
            padding: zeros around x: one number, one a dimension, or a (before, after) pair a dimension.
            stride: one number, or one a dimension.
            dilation: one number, or one a dimension.
            alpha: factor of the result.
            beta: 1 adds to what is in y's memory.
            dtype: of the virtual output; by default the graph's intermediate dtype.
            name: what errors call the operation.

        Returns:
            y (N, K, *spatial).

        Raises:
            TypeError, ValueError: shapes, dtypes or numbers do not fit; names operation, tensor and remedy.
        """
        where = self._label("convolution_forward", name)
        x, w, groups, rank = self._operands(where, x, w)
        geometry = _Geometry.read(where, rank, padding, stride, dilation)
        spatial = geometry.output(where, x, w)
        if w.shape[0] % groups:
            raise ValueError(
                f"{where}: w: {w} has {w.shape[0]} filters, not a multiple of the {groups} groups that follow from "
                f"{x.shape[1]} channels of x {x} over {w.shape[1]} of w"
            )
        shape = (x.shape[0], w.shape[0], *spatial)
        return self._convolution(
            where, "FORWARD", {"X": x, "W": w}, ("Y", shape, x), geometry, alpha, beta, dtype, "FORWARD"
        )

    def convolution_backward_data(
        self,
        dy: Tensor,
        w: Tensor,
        x_shape: Sequence[int],
        *,
        padding: Padding = 0,
        stride: Ints = 1,
        dilation: Ints = 1,
        alpha: float = 1.0,
        beta: float = 0.0,
        dtype: Any = None,
        name: str = "",
    ) -> Tensor:
        """Adds the gradient of a convolution with respect to x.

        Args:
            dy: the gradient of y, (N, K, *spatial).
            w: (K, C / groups, *window).
            x_shape: the shape of x, (N, C, *spatial); it does not follow from dy where the stride is above 1.
            padding: as in the forward convolution.
            stride: as in the forward convolution.
            dilation: as in the forward convolution.
            alpha: factor of the result.
            beta: 1 adds to what is in dx's memory.
            dtype: of the virtual output.
            name: what errors call the operation.

        Returns:
            dx of x_shape.

        Raises:
            TypeError, ValueError: shapes, dtypes or numbers do not fit; names operation, tensor and remedy.
        """
        where = self._label("convolution_backward_data", name)
        dy = self._take(where, "dy", dy, least=3)
        w = self._take(where, "w", w, rank_of=dy)
        shape = _whole(where, "x_shape", x_shape, 1)
        geometry = _Geometry.read(where, len(dy.shape) - 2, padding, stride, dilation)
        self._gradient_shapes(where, dy, shape, w.shape, geometry)
        self._same_dtype(where, dy, w, "w")
        return self._convolution(
            where, "BWD_DATA", {"DY": dy, "W": w}, ("DX", shape, dy), geometry, alpha, beta, dtype, "BACKWARD_DATA"
        )

    def convolution_backward_filter(
        self,
        x: Tensor,
        dy: Tensor,
        w_shape: Sequence[int],
        *,
        padding: Padding = 0,
        stride: Ints = 1,
        dilation: Ints = 1,
        alpha: float = 1.0,
        beta: float = 0.0,
        dtype: Any = None,
        name: str = "",
    ) -> Tensor:
        """Adds the gradient of a convolution with respect to w.

        Args:
            x: (N, C, *spatial).
            dy: the gradient of y, (N, K, *spatial).
            w_shape: the shape of w, (K, C / groups, *window).
            padding: as in the forward convolution.
            stride: as in the forward convolution.
            dilation: as in the forward convolution.
            alpha: factor of the result.
            beta: 1 adds to what is in dw's memory.
            dtype: of the virtual output.
            name: what errors call the operation.

        Returns:
            dw of w_shape, in the memory order of x.

        Raises:
            TypeError, ValueError: shapes, dtypes or numbers do not fit; names operation, tensor and remedy.
        """
        where = self._label("convolution_backward_filter", name)
        x = self._take(where, "x", x, least=3)
        dy = self._take(where, "dy", dy, rank_of=x)
        shape = _whole(where, "w_shape", w_shape, 1)
        geometry = _Geometry.read(where, len(x.shape) - 2, padding, stride, dilation)
        self._gradient_shapes(where, dy, x.shape, shape, geometry, x=x)
        self._same_dtype(where, x, dy, "dy")
        return self._convolution(
            where, "BWD_FILTER", {"X": x, "DY": dy}, ("DW", shape, x), geometry, alpha, beta, dtype, "BACKWARD_FILTER"
        )

    def _operands(self, where: str, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, int, int]:
        x = self._take(where, "x", x, least=3)
        w = self._take(where, "w", w, rank_of=x)
        if x.shape[1] % w.shape[1]:
            raise ValueError(
                f"{where}: w: {w} has {w.shape[1]} channels, which do not divide the {x.shape[1]} channels of x {x}; "
                f"w's shape is (K, C / groups, *window)"
            )
        self._same_dtype(where, x, w, "w")
        return x, w, x.shape[1] // w.shape[1], len(x.shape) - 2

    def _same_dtype(self, where: str, first: Tensor, second: Tensor, role: str) -> None:
        # A virtual tensor counts as what it was made from: 16-bit inputs may have float32 intermediates.
        words = {self._natural[tensor.uid] if tensor.virtual else tensor.dtype for tensor in (first, second)}
        if len(words) > 1 and not all(word.startswith("float8") for word in words):
            raise TypeError(
                f"{where}: {role}: {second} and {first} differ in dtype; convert one with identity(..., dtype=...)"
            )
        if "float64" in words and self.compute != "float64":
            raise TypeError(
                f"{where}: {first} is float64 and the graph computes in {self.compute}; use Graph(compute='float64')"
            )

    def _gradient_shapes(
        self,
        where: str,
        dy: Tensor,
        x_shape: tuple[int, ...],
        w_shape: tuple[int, ...],
        geometry: "_Geometry",
        x: Tensor | None = None,
    ) -> None:
        """Checks that dy is the gradient of a convolution of these shapes."""
        given = "w_shape" if x is not None else "x_shape"
        for argument, shape in (("x_shape", x_shape), ("w_shape", w_shape)):
            if len(shape) != len(dy.shape):
                raise ValueError(f"{where}: {argument}: {shape} has not the rank {len(dy.shape)} of dy {dy}")
        if x_shape[0] != dy.shape[0]:
            raise ValueError(f"{where}: dy: {dy} and x of shape {x_shape} differ in their first dimension, the batch")
        if w_shape[0] != dy.shape[1]:
            raise ValueError(
                f"{where}: dy: {dy} has {dy.shape[1]} channels and w of shape {w_shape} {w_shape[0]} filters; they "
                f"have to be equal"
            )
        if x_shape[1] % w_shape[1]:
            raise ValueError(
                f"{where}: {given}: the {w_shape[1]} channels of w {w_shape} do not divide the {x_shape[1]} of x "
                f"{x_shape}"
            )
        groups = x_shape[1] // w_shape[1]
        if w_shape[0] % groups:
            raise ValueError(f"{where}: {given}: {w_shape[0]} filters are no multiple of the {groups} groups")
        spatial = geometry.spatial(where, x_shape, w_shape)
        if spatial != dy.shape[2:]:
            raise ValueError(
                f"{where}: dy: {dy} does not fit x {x_shape} and w {w_shape} with {geometry}: its spatial dimensions "
                f"would be {spatial}"
            )

    def _convolution(
        self,
        where: str,
        prefix: str,
        inputs: dict[str, Tensor],
        output: tuple[str, tuple[int, ...], Tensor],
        geometry: "_Geometry",
        alpha: float,
        beta: float,
        dtype: Any,
        kind: str,
    ) -> Tensor:
        attribute, shape, like = output
        scale = "DOUBLE" if self.compute == "float64" else "FLOAT"
        start = f"OPERATION_CONVOLUTION_{prefix}_"
        settings = [
            _Setting(f"{start}CONV_DESC", descriptor="CONVOLUTION", settings=geometry.settings(self._code())),
            _Setting(f"{start}ALPHA", (float(alpha),), scale),
            _Setting(f"{start}BETA", (float(beta),), scale),
        ]
        made = self._make(where, attribute.lower(), shape, like, dtype)
        self._add(
            where,
            f"OPERATION_CONVOLUTION_{kind}",
            {f"{start}{role}": tensor for role, tensor in inputs.items()},
            {f"{start}{attribute}": made},
            settings,
        )
        return made

    # pointwise

    def pointwise(
        self,
        mode: str,
        x: Tensor | float,
        b: Tensor | float | None = None,
        t: Tensor | None = None,
        *,
        axis: int | None = None,
        alpha1: float = 1.0,
        alpha2: float = 1.0,
        dtype: Any = None,
        name: str = "",
        **parameters: float,
    ) -> Tensor:
        """Adds an operation element by element: y = op(alpha1 * x), op(alpha1 * x, alpha2 * b), or t ? x : b.

        Dimensions of size 1 are broadcast, but not in a selection.

        Args:
            mode: a word of `POINTWISE_MODES`. A backward mode takes dy as x and, as b, the forward operation's input.
            x: the first input; a number becomes a scalar.
            b: the second input, for modes that have one.
            t: the condition of "binary_select".
            axis: the axis of "gen_index".
            alpha1: factor of x.
            alpha2: factor of b.
            dtype: of the virtual output; by default the graph's intermediate dtype, "boolean" for a truth value.
            name: what errors call the operation.
            **parameters: lower_clip, upper_clip and lower_slope of ReLU, elu_alpha, softplus_beta, swish_beta.

        Returns:
            The result, of the broadcast shape.

        Raises:
            TypeError, ValueError: the mode has other arguments, or shapes do not fit; names operation, tensor and
                remedy.
        """
        member = _choice("pointwise", "mode", mode, _POINTWISE)
        where = self._label(f"pointwise {mode}", name)
        backward = mode.endswith("_bwd")
        wanted = 3 if mode == "binary_select" else 2 if mode in _BINARY or backward else 1
        given = [("x", x), ("b", b), ("t", t)]
        for position, (role, value) in enumerate(given):
            if (position < wanted) != (value is not None):
                need = "needs" if position < wanted else "does not take"
                raise TypeError(f"{where}: {role}: {mode} {need} it; it has {wanted} input(s)")
        numbers = [(role, value) for role, value in given if value is not None]
        tensors = [value for _, value in numbers if isinstance(value, Tensor)]
        if all(tensor.value is not None for tensor in tensors):
            raise TypeError(f"{where}: x: at least one input has to be a tensor that is no scalar")
        operands = [
            self._known(where, role, value if isinstance(value, Tensor) else self._number(where, role, value))
            for role, value in numbers
        ]
        largest = max((tensor for tensor in operands if tensor.value is None), key=lambda tensor: len(tensor.shape))
        operands = [
            self._take(where, role, operand, rank_of=largest, scalar=True)
            for (role, _), operand in zip(numbers, operands, strict=True)
        ]
        shape = self._broadcast(where, numbers, operands, same=backward)
        like = next((tensor for tensor in operands if tensor.shape == shape), largest)
        truth = mode.startswith(_TRUTH)
        roles = ("DYDESC", "XDESC") if backward else ("XDESC", "BDESC", "TDESC")
        start = "OPERATION_POINTWISE_"
        settings = [
            _Setting(
                f"{start}PW_DESCRIPTOR",
                descriptor="POINTWISE",
                settings=self._pointwise_settings(where, mode, member, axis, parameters, len(shape)),
            )
        ]
        scale = "DOUBLE" if self.compute == "float64" else "FLOAT"
        for attribute, factor in (("ALPHA1", alpha1), ("ALPHA2", alpha2)):
            if factor != 1.0:
                settings.append(_Setting(f"{start}{attribute}", (float(factor),), scale))
        natural = "boolean" if truth else self._natural[like.uid]
        if mode == "binary_select":
            natural = self._natural[operands[0].uid]
        made = self._make(
            where, "dx" if backward else "y", shape, like, dtype or ("boolean" if truth else None), natural
        )
        self._add(
            where,
            "OPERATION_POINTWISE",
            {f"{start}{role}": operand for role, operand in zip(roles, operands, strict=False)},
            {f"{start}{'DXDESC' if backward else 'YDESC'}": made},
            settings,
        )
        return made

    def _pointwise_settings(
        self,
        where: str,
        mode: str,
        member: bindings.cudnnPointwiseMode_t,
        axis: int | None,
        parameters: Mapping[str, float],
        rank: int,
    ) -> tuple[_Setting, ...]:
        scale = "DOUBLE" if self.compute == "float64" else "FLOAT"
        settings = [
            _Setting("POINTWISE_MODE", (member,)),
            _Setting("POINTWISE_MATH_PREC", (self._code(),)),
        ]
        for keyword, value in parameters.items():
            if keyword not in _POINTWISE_PARAMETERS:
                raise TypeError(f"{where}: {keyword} is no parameter; there are {', '.join(_POINTWISE_PARAMETERS)}")
            attribute, modes = _POINTWISE_PARAMETERS[keyword]
            if mode not in modes:
                raise TypeError(f"{where}: {keyword}: only {' and '.join(modes)} take it")
            settings.append(_Setting(attribute, (float(value),), scale))
        if (mode == "gen_index") != (axis is not None):
            raise TypeError(f"{where}: axis: gen_index needs it and no other mode takes it")
        if axis is not None:
            if not -rank <= axis < rank:
                raise ValueError(f"{where}: axis: {axis} is no axis of a tensor of rank {rank}")
            settings.append(_Setting("POINTWISE_AXIS", (axis % rank,)))
        return tuple(settings)

    def _broadcast(
        self, where: str, numbers: Sequence[tuple[str, Any]], operands: Sequence[Tensor], *, same: bool
    ) -> tuple[int, ...]:
        shape = tuple(max(sizes) for sizes in zip(*(tensor.shape for tensor in operands), strict=True))
        for (role, _), tensor in zip(numbers, operands, strict=True):
            fits = all(size in (1, full) for size, full in zip(tensor.shape, shape, strict=True))
            if not fits or (same and tensor.shape != shape):
                raise ValueError(
                    f"{where}: {role}: {tensor} does not fit the others, whose common shape is {shape}"
                    + ("" if same else "; each dimension has to be that size or 1")
                )
        return shape

    def identity(self, x: Tensor, *, dtype: Any = None, name: str = "") -> Tensor:
        """Adds a copy, which converts to the output's dtype and layout."""
        return self.pointwise("identity", x, dtype=dtype, name=name)

    def add(self, a: Tensor | float, b: Tensor | float, *, dtype: Any = None, name: str = "") -> Tensor:
        """Adds a + b."""
        return self.pointwise("add", a, b, dtype=dtype, name=name)

    def sub(self, a: Tensor | float, b: Tensor | float, *, dtype: Any = None, name: str = "") -> Tensor:
        """Adds a - b."""
        return self.pointwise("sub", a, b, dtype=dtype, name=name)

    def mul(self, a: Tensor | float, b: Tensor | float, *, dtype: Any = None, name: str = "") -> Tensor:
        """Adds a * b."""
        return self.pointwise("mul", a, b, dtype=dtype, name=name)

    def div(self, a: Tensor | float, b: Tensor | float, *, dtype: Any = None, name: str = "") -> Tensor:
        """Adds a / b."""
        return self.pointwise("div", a, b, dtype=dtype, name=name)

    def relu(
        self,
        x: Tensor,
        *,
        lower_clip: float = 0.0,
        upper_clip: float | None = None,
        lower_slope: float = 0.0,
        dtype: Any = None,
        name: str = "",
    ) -> Tensor:
        """Adds x above lower_clip, lower_clip + lower_slope * (x - lower_clip) below it, at most upper_clip."""
        chosen = _relu_parameters(lower_clip, upper_clip, lower_slope)
        return self.pointwise("relu_fwd", x, dtype=dtype, name=name, **chosen)

    def relu_backward(
        self,
        dy: Tensor,
        x: Tensor,
        *,
        lower_clip: float = 0.0,
        upper_clip: float | None = None,
        lower_slope: float = 0.0,
        dtype: Any = None,
        name: str = "",
    ) -> Tensor:
        """Adds the gradient of `relu`: dy of its output, x its input (its output does as well when it has no slope)."""
        chosen = _relu_parameters(lower_clip, upper_clip, lower_slope)
        return self.pointwise("relu_bwd", dy, x, dtype=dtype, name=name, **chosen)

    def sigmoid(self, x: Tensor, *, dtype: Any = None, name: str = "") -> Tensor:
        """Adds 1 / (1 + exp(-x))."""
        return self.pointwise("sigmoid_fwd", x, dtype=dtype, name=name)

    def tanh(self, x: Tensor, *, dtype: Any = None, name: str = "") -> Tensor:
        """Adds the hyperbolic tangent of x."""
        return self.pointwise("tanh_fwd", x, dtype=dtype, name=name)

    def elu(self, x: Tensor, *, alpha: float = 1.0, dtype: Any = None, name: str = "") -> Tensor:
        """Adds x above 0, alpha * (exp(x) - 1) below."""
        return self.pointwise("elu_fwd", x, dtype=dtype, name=name, elu_alpha=alpha)

    def gelu(self, x: Tensor, *, dtype: Any = None, name: str = "") -> Tensor:
        """Adds x * Phi(x), exactly, by the error function."""
        return self.pointwise("gelu_fwd", x, dtype=dtype, name=name)

    def softplus(self, x: Tensor, *, beta: float = 1.0, dtype: Any = None, name: str = "") -> Tensor:
        """Adds log(1 + exp(beta * x)) / beta."""
        return self.pointwise("softplus_fwd", x, dtype=dtype, name=name, softplus_beta=beta)

    def silu(self, x: Tensor, *, beta: float = 1.0, dtype: Any = None, name: str = "") -> Tensor:
        """Adds x / (1 + exp(-beta * x)), also called swish."""
        return self.pointwise("swish_fwd", x, dtype=dtype, name=name, swish_beta=beta)

    # statistics and normalization

    def generate_statistics(self, x: Tensor, *, name: str = "") -> tuple[Tensor, Tensor]:
        """Adds the sums of x and of its squares over all but the channels.

        Args:
            x: (N, C, *spatial).
            name: what errors call the operation.

        Returns:
            (sum, square_sum), each (1, C, 1, ...) in the compute dtype.

        Raises:
            TypeError, ValueError: x is no such tensor.
        """
        where = self._label("generate_statistics", name)
        x = self._take(where, "x", x, least=3)
        shape = (1, x.shape[1], *(1 for _ in x.shape[2:]))
        total = self._make(where, "sum", shape, x, self.compute, self.compute)
        squares = self._make(where, "square_sum", shape, x, self.compute, self.compute)
        self._add(
            where,
            "OPERATION_GEN_STATS",
            {"OPERATION_GENSTATS_XDESC": x},
            {"OPERATION_GENSTATS_SUMDESC": total, "OPERATION_GENSTATS_SQSUMDESC": squares},
            [
                _Setting("OPERATION_GENSTATS_MODE", (bindings.CUDNN_GENSTATS_SUM_SQSUM,)),
                _Setting("OPERATION_GENSTATS_MATH_PREC", (self._code(),)),
            ],
        )
        return total, squares

    def batch_norm_finalize(
        self,
        total: Tensor,
        square_sum: Tensor,
        scale: Tensor,
        bias: Tensor,
        *,
        count: int | Tensor,
        epsilon: float | Tensor = 1e-5,
        momentum: float | Tensor = 0.1,
        running_mean: Tensor | None = None,
        running_variance: Tensor | None = None,
        name: str = "",
    ) -> BatchNormFinalized:
        """Adds what makes a batch norm's factors out of the sums of `generate_statistics`.

        Args:
            total: the sum, (1, C, 1, ...).
            square_sum: the sum of the squares, of the same shape.
            scale: of the same shape.
            bias: of the same shape.
            count: how many elements a channel were summed, N * H * W.
            epsilon: added to the variance.
            momentum: the weight of this batch in the running statistics.
            running_mean: of the same shape; both running statistics or none.
            running_variance: of the same shape.
            name: what errors call the operation.

        Returns:
            The outputs; the running ones are None when they were not given.

        Raises:
            TypeError, ValueError: shapes do not fit; names operation, tensor and remedy.
        """
        where = self._label("batch_norm_finalize", name)
        start = "OPERATION_BN_FINALIZE_"
        total = self._take(where, "total", total, least=3)
        shape = total.shape
        if shape != (1, shape[1], *(1 for _ in shape[2:])):
            raise ValueError(f"{where}: total: {total} has not the shape (1, C, 1, ...) of channel sums")
        self._pair(where, running_mean, running_variance)
        inputs = {f"{start}Y_SUM_DESC": total}
        for role, value in (("square_sum", square_sum), ("scale", scale), ("bias", bias)):
            attribute = {"square_sum": "Y_SQ_SUM_DESC", "scale": "SCALE_DESC", "bias": "BIAS_DESC"}[role]
            inputs[f"{start}{attribute}"] = self._shaped(where, role, value, total, shape)
        if running_mean is not None and running_variance is not None:
            inputs[f"{start}PREV_RUNNING_MEAN_DESC"] = self._shaped(where, "running_mean", running_mean, total, shape)
            inputs[f"{start}PREV_RUNNING_VAR_DESC"] = self._shaped(
                where, "running_variance", running_variance, total, shape
            )
        inputs[f"{start}ACCUM_COUNT_DESC"] = self._by_value(where, "count", count, total, "int64")
        inputs[f"{start}EPSILON_DESC"] = self._by_value(where, "epsilon", epsilon, total)
        inputs[f"{start}EXP_AVERATE_FACTOR_DESC"] = self._by_value(where, "momentum", momentum, total)

        def made(role: str) -> Tensor:
            return self._make(where, role, shape, total, self.compute, self.compute)

        result = BatchNormFinalized(
            made("equivalent_scale"),
            made("equivalent_bias"),
            made("mean"),
            made("inv_std"),
            made("running_mean") if running_mean is not None else None,
            made("running_variance") if running_mean is not None else None,
        )
        roles = ("EQ_SCALE", "EQ_BIAS", "SAVED_MEAN", "SAVED_INV_STD", "UPDATED_RUNNING_MEAN", "UPDATED_RUNNING_VAR")
        outputs = {f"{start}{role}_DESC": t for role, t in zip(roles, result, strict=True) if t is not None}
        self._add(
            where,
            "OPERATION_BN_FINALIZE_STATISTICS",
            inputs,
            outputs,
            [
                _Setting(f"{start}STATS_MODE", (bindings.CUDNN_BN_FINALIZE_STATISTICS_TRAINING,)),
                _Setting(f"{start}MATH_PREC", (self._code(),)),
            ],
        )
        return result

    def norm_forward(
        self,
        mode: str,
        x: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        *,
        training: bool = True,
        epsilon: float | Tensor = 1e-5,
        momentum: float | Tensor = 0.1,
        mean: Tensor | None = None,
        inv_variance: Tensor | None = None,
        running_mean: Tensor | None = None,
        running_variance: Tensor | None = None,
        dtype: Any = None,
        name: str = "",
    ) -> NormForward:
        """Adds a normalization.

        Args:
            mode: "batch" (training only), "instance", "layer" or "rms" (which has no mean; its bias is optional).
            x: (N, C, *spatial).
            scale: (1, C, 1, ...) for batch and instance, (1, C, *spatial) or part of it for layer and rms: statistics
                are over the dimensions in which it is not 1.
            bias: of the shape of scale.
            training: whether statistics are computed; otherwise mean and inv_variance are given.
            epsilon: added to the variance.
            momentum: the weight of this batch in the running statistics.
            mean: of an inference, given.
            inv_variance: of an inference, given: 1 / sqrt(variance + epsilon).
            running_mean: for "batch" in training, of the shape of scale; both running statistics or none.
            running_variance: likewise.
            dtype: of the virtual y.
            name: what errors call the operation.

        Returns:
            The outputs: y, and in training the statistics.

        Raises:
            TypeError, ValueError: arguments do not fit the mode or one another; names operation, tensor and remedy.
        """
        member = _choice("norm_forward", "mode", mode, _NORMS)
        where = self._label(f"norm_forward {mode}", name)
        start = "OPERATION_NORM_FWD_"
        x = self._take(where, "x", x, least=3)
        scale, statistics = self._norm_shapes(where, mode, x, scale)
        inputs = {f"{start}XDESC": x, f"{start}SCALE_DESC": scale}
        if bias is None and mode != "rms":
            raise TypeError(f"{where}: bias: only the rms norm does without")
        if bias is not None:
            inputs[f"{start}BIAS_DESC"] = self._shaped(where, "bias", bias, x, scale.shape)
        if mode == "batch" and not training:
            raise ValueError(
                f"{where}: training: cuDNN has no inference of a batch norm; it is mul and add with factors computed "
                f"from the running statistics"
            )
        given = {"mean": mean, "inv_variance": inv_variance}
        for role, value in given.items():
            needed = not training and not (mode == "rms" and role == "mean")
            if needed != (value is not None):
                raise TypeError(f"{where}: {role}: {'an inference needs it' if needed else 'it is not given here'}")
            if value is not None:
                inputs[f"{start}{role.upper()}_DESC"] = self._shaped(where, role, value, x, statistics)
        self._pair(where, running_mean, running_variance)
        running = running_mean is not None and running_variance is not None
        if running and (mode != "batch" or not training):
            raise TypeError(f"{where}: running_mean: only a batch norm in training has running statistics")
        inputs[f"{start}EPSILON_DESC"] = self._by_value(where, "epsilon", epsilon, x)
        if running:
            for role, attribute, value in (
                ("running_mean", "INPUT_RUNNING_MEAN_DESC", running_mean),
                ("running_variance", "INPUT_RUNNING_VAR_DESC", running_variance),
            ):
                assert value is not None
                inputs[f"{start}{attribute}"] = self._shaped(where, role, value, x, statistics)
            inputs[f"{start}EXP_AVG_FACTOR_DESC"] = self._by_value(where, "momentum", momentum, x)

        def statistic(role: str, present: bool) -> Tensor | None:
            return self._make(where, role, statistics, x, self.compute, self.compute) if present else None

        result = NormForward(
            self._make(where, "y", x.shape, x, dtype),
            statistic("mean", training and mode != "rms"),
            statistic("inv_variance", training),
            statistic("running_mean", running),
            statistic("running_variance", running),
        )
        roles = ("YDESC", "MEAN_DESC", "INV_VARIANCE_DESC", "OUTPUT_RUNNING_MEAN_DESC", "OUTPUT_RUNNING_VAR_DESC")
        outputs = {f"{start}{role}": t for role, t in zip(roles, result, strict=True) if t is not None}
        phase = bindings.CUDNN_NORM_FWD_TRAINING if training else bindings.CUDNN_NORM_FWD_INFERENCE
        self._add(
            where,
            "OPERATION_NORM_FORWARD",
            inputs,
            outputs,
            [_Setting(f"{start}MODE", (member,)), _Setting(f"{start}PHASE", (phase,))],
            optional=(f"{start}MEAN_DESC", f"{start}INV_VARIANCE_DESC"),
        )
        return result

    def norm_backward(
        self,
        mode: str,
        dy: Tensor,
        x: Tensor,
        scale: Tensor,
        *,
        mean: Tensor | None = None,
        inv_variance: Tensor | None = None,
        epsilon: float | Tensor | None = None,
        bias: bool = True,
        dtype: Any = None,
        name: str = "",
    ) -> NormBackward:
        """Adds the gradients of a normalization in training.

        Args:
            mode: as in `norm_forward`.
            dy: the gradient of y.
            x: the forward input, of the shape of dy.
            scale: as in `norm_forward`.
            mean: the forward pass's; the rms norm has none.
            inv_variance: the forward pass's.
            epsilon: needed where mean and inv_variance are not given.
            bias: whether there was a bias; only an rms norm may have none.
            dtype: of the virtual dx.
            name: what errors call the operation.

        Returns:
            The gradients of x, scale and bias.

        Raises:
            TypeError, ValueError: arguments do not fit the mode or one another; names operation, tensor and remedy.
        """
        member = _choice("norm_backward", "mode", mode, _NORMS)
        where = self._label(f"norm_backward {mode}", name)
        start = "OPERATION_NORM_BWD_"
        x = self._take(where, "x", x, least=3)
        inputs = {f"{start}DYDESC": self._shaped(where, "dy", dy, x, x.shape), f"{start}XDESC": x}
        scale, statistics = self._norm_shapes(where, mode, x, scale)
        inputs[f"{start}SCALE_DESC"] = scale
        if mode == "rms" and mean is not None:
            raise TypeError(f"{where}: mean: an rms norm has none")
        if not bias and mode != "rms":
            raise TypeError(f"{where}: bias: only the rms norm does without")
        saved = inv_variance is not None and (mean is not None or mode == "rms")
        if not saved and (epsilon is None or mean is not None or inv_variance is not None):
            raise TypeError(
                f"{where}: give the forward pass's {'inv_variance' if mode == 'rms' else 'mean and inv_variance'}, "
                f"or epsilon instead"
            )
        for role, value in (("mean", mean), ("inv_variance", inv_variance)):
            if value is not None:
                inputs[f"{start}{role.upper()}_DESC"] = self._shaped(where, role, value, x, statistics)
        if epsilon is not None:
            inputs[f"{start}EPSILON_DESC"] = self._by_value(where, "epsilon", epsilon, x)
        natural = self._natural[scale.uid]
        result = NormBackward(
            self._make(where, "dx", x.shape, x, dtype),
            self._make(where, "dscale", scale.shape, x, self.compute, natural),
            self._make(where, "dbias", scale.shape, x, self.compute, natural) if bias else None,
        )
        outputs = {
            f"{start}{role}": t
            for role, t in zip(("DXDESC", "DSCALE_DESC", "DBIAS_DESC"), result, strict=True)
            if t is not None
        }
        self._add(where, "OPERATION_NORM_BACKWARD", inputs, outputs, [_Setting(f"{start}MODE", (member,))])
        return result

    def batch_norm_backward_weights(
        self, dy: Tensor, x: Tensor, mean: Tensor, inv_std: Tensor, scale: Tensor, *, name: str = ""
    ) -> BatchNormBackwardWeights:
        """Adds the gradients of a batch norm's weights, and the factors that make dx out of dy and x.

        Args:
            dy: the gradient of the batch norm's output, (N, C, *spatial).
            x: its input.
            mean: the batch's, (1, C, 1, ...).
            inv_std: the batch's, 1 / sqrt(variance + epsilon).
            scale: of the same shape.
            name: what errors call the operation.

        Returns:
            The outputs.

        Raises:
            TypeError, ValueError: shapes do not fit; names operation, tensor and remedy.
        """
        where = self._label("batch_norm_backward_weights", name)
        start = "OPERATION_BN_BWD_WEIGHTS_"
        x = self._take(where, "x", x, least=3)
        shape = (1, x.shape[1], *(1 for _ in x.shape[2:]))
        inputs = {
            f"{start}X_DESC": x,
            f"{start}DY_DESC": self._shaped(where, "dy", dy, x, x.shape),
            f"{start}MEAN_DESC": self._shaped(where, "mean", mean, x, shape),
            f"{start}INVSTD_DESC": self._shaped(where, "inv_std", inv_std, x, shape),
            f"{start}BN_SCALE_DESC": self._shaped(where, "scale", scale, x, shape),
        }
        result = BatchNormBackwardWeights(
            *(
                self._make(where, role, shape, x, self.compute, self.compute)
                for role in BatchNormBackwardWeights._fields
            )
        )
        roles = ("DBN_SCALE_DESC", "DBN_BIAS_DESC", "EQ_DY_SCALE_DESC", "EQ_X_SCALE_DESC", "EQ_BIAS")
        outputs = {f"{start}{role}": t for role, t in zip(roles, result, strict=True)}
        self._add(where, "OPERATION_BN_BWD_WEIGHTS", inputs, outputs, [_Setting(f"{start}MATH_PREC", (self._code(),))])
        return result

    def _norm_shapes(self, where: str, mode: str, x: Tensor, scale: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Checks the shape of scale and gives the shape of the statistics."""
        channels = (1, x.shape[1], *(1 for _ in x.shape[2:]))
        if mode in ("batch", "instance"):
            scale = self._shaped(where, "scale", scale, x, channels)
            return scale, channels if mode == "batch" else (x.shape[0], *channels[1:])
        scale = self._take(where, "scale", scale, rank_of=x)
        fits = all(size in (1, full) for size, full in zip(scale.shape, x.shape, strict=True))
        if scale.shape[0] != 1 or not fits:
            raise ValueError(
                f"{where}: scale: {scale} has to have the shape (1, C, *spatial) of x {x}, with some of the sizes 1"
            )
        pairs = zip(scale.shape, x.shape, strict=True)
        return scale, tuple(full if size == 1 else 1 for size, full in pairs)

    def _pair(self, where: str, mean: Tensor | None, variance: Tensor | None) -> None:
        if (mean is None) != (variance is None):
            missing = "running_mean" if mean is None else "running_variance"
            raise TypeError(f"{where}: {missing}: give both running statistics or none")

    # others

    def reduction(self, mode: str, x: Tensor, shape: Sequence[int], *, dtype: Any = None, name: str = "") -> Tensor:
        """Adds a reduction over the dimensions in which the result's size is 1.

        Args:
            mode: a word of `REDUCTION_MODES`.
            x: any shape.
            shape: the result's shape: each size x's, or 1.
            dtype: of the virtual output.
            name: what errors call the operation.

        Returns:
            The result.

        Raises:
            TypeError, ValueError: the shape does not fit; names operation, tensor and remedy.
        """
        member = _choice("reduction", "mode", mode, _REDUCTIONS)
        where = self._label(f"reduction {mode}", name)
        x = self._take(where, "x", x)
        sizes = _whole(where, "shape", shape, 1)
        if len(sizes) != len(x.shape) or any(size not in (1, full) for size, full in zip(sizes, x.shape, strict=True)):
            raise ValueError(f"{where}: shape: {sizes} is not x {x} with some of its sizes 1")
        made = self._make(where, "y", sizes, x, dtype)
        self._add(
            where,
            "OPERATION_REDUCTION",
            {"OPERATION_REDUCTION_XDESC": x},
            {"OPERATION_REDUCTION_YDESC": made},
            [
                _Setting(
                    "OPERATION_REDUCTION_DESC",
                    descriptor="REDUCTION",
                    settings=(
                        _Setting("REDUCTION_OPERATOR", (member,)),
                        _Setting("REDUCTION_COMP_TYPE", (self._code(),)),
                    ),
                )
            ],
        )
        return made

    def matmul(self, a: Tensor, b: Tensor, *, dtype: Any = None, name: str = "") -> Tensor:
        """Adds a matrix product over the last two dimensions.

        Args:
            a: (*batch, M, K), of rank 3 or more.
            b: (*batch, K, N); a batch dimension of 1 is broadcast.
            dtype: of the virtual output.
            name: what errors call the operation.

        Returns:
            (*batch, M, N).

        Raises:
            TypeError, ValueError: shapes or dtypes do not fit; names operation, tensor and remedy.
        """
        where = self._label("matmul", name)
        a = self._take(where, "a", a, least=3)
        b = self._take(where, "b", b, rank_of=a)
        if a.shape[-1] != b.shape[-2]:
            raise ValueError(
                f"{where}: b: {b} has {b.shape[-2]} rows and a {a} has {a.shape[-1]} columns; they have to be equal"
            )
        batch = []
        for left, right in zip(a.shape[:-2], b.shape[:-2], strict=True):
            if left != right and 1 not in (left, right):
                raise ValueError(f"{where}: b: the batch dimensions of {b} and a {a} are neither equal nor 1")
            batch.append(max(left, right))
        self._same_dtype(where, a, b, "b")
        made = self._make(where, "c", (*batch, a.shape[-2], b.shape[-1]), a, dtype)
        # Of an operand that is transposed in memory the product is not.
        self._tensors[made.uid] = made = replace(made, strides=devices.contiguous_strides(made.shape))
        self._add(
            where,
            "OPERATION_MATMUL",
            {"OPERATION_MATMUL_ADESC": a, "OPERATION_MATMUL_BDESC": b},
            {"OPERATION_MATMUL_CDESC": made},
            [
                _Setting(
                    "OPERATION_MATMUL_DESC",
                    descriptor="MATMUL",
                    settings=(_Setting("MATMUL_COMP_TYPE", (self._code(),)),),
                )
            ],
        )
        return made

    def resample_forward(
        self,
        mode: str,
        x: Tensor,
        *,
        window: Any,
        stride: Any = 1,
        padding: Padding = 0,
        index: bool = False,
        dtype: Any = None,
        name: str = "",
    ) -> tuple[Tensor, Tensor | None]:
        """Adds a pooling or an interpolation.

        Args:
            mode: a word of `RESAMPLE_MODES`; averages count the padding or not.
            x: (N, C, *spatial).
            window: one number, or one a dimension; a `Fraction` where it is not whole.
            stride: one number, or one a dimension; a `Fraction` below 1 enlarges.
            padding: one number, one a dimension, or a (before, after) pair a dimension.
            index: whether "max" and "nearest" also give which element of each window was taken, for the backward pass.
            dtype: of the virtual y.
            name: what errors call the operation.

        Returns:
            (y, index), index None or int8 of the shape of y.

        Raises:
            TypeError, ValueError: arguments do not fit; names operation, tensor and remedy.
        """
        where = self._label(f"resample_forward {mode}", name)
        x = self._take(where, "x", x, least=3)
        window_sizes, settings = self._resample(where, mode, len(x.shape) - 2, window, stride, padding)
        spatial = self._resampled(where, f"x: {x}", x.shape, settings)
        if index and mode not in _INDEXED:
            raise TypeError(f"{where}: index: only {' and '.join(_INDEXED)} have one")
        if index and math.prod(window_sizes) > 127:
            raise ValueError(f"{where}: index: a window of {tuple(map(int, window_sizes))} is too large for int8")
        shape = (*x.shape[:2], *spatial)
        y = self._make(where, "y", shape, x, dtype)
        start = "OPERATION_RESAMPLE_FWD_"
        outputs = {f"{start}YDESC": y}
        chosen = None
        if index:
            chosen = self._make(where, "index", shape, x, "int8", "int8")
            outputs[f"{start}IDXDESC"] = chosen
        self._add(where, "OPERATION_RESAMPLE_FWD", {f"{start}XDESC": x}, outputs, [self._resampler(start, settings)])
        return y, chosen

    def resample_backward(
        self,
        mode: str,
        dy: Tensor,
        x_shape: Sequence[int],
        *,
        window: Any,
        stride: Any = 1,
        padding: Padding = 0,
        index: Tensor | None = None,
        x: Tensor | None = None,
        y: Tensor | None = None,
        dtype: Any = None,
        name: str = "",
    ) -> Tensor:
        """Adds the gradient of a pooling or an interpolation.

        Args:
            mode: as in the forward pass.
            dy: the gradient of y.
            x_shape: the shape of x.
            window: as in the forward pass.
            stride: as in the forward pass.
            padding: as in the forward pass.
            index: what "max" or "nearest" gave in the forward pass.
            x: the forward input, which NCHW needs; it may stand instead of index.
            y: the forward output, which goes with x.
            dtype: of the virtual dx.
            name: what errors call the operation.

        Returns:
            dx of x_shape.

        Raises:
            TypeError, ValueError: arguments do not fit; names operation, tensor and remedy.
        """
        where = self._label(f"resample_backward {mode}", name)
        dy = self._take(where, "dy", dy, least=3)
        shape = _whole(where, "x_shape", x_shape, 1)
        if len(shape) != len(dy.shape) or shape[:2] != dy.shape[:2]:
            raise ValueError(f"{where}: x_shape: {shape} and dy {dy} differ in rank, batch or channels")
        _, settings = self._resample(where, mode, len(shape) - 2, window, stride, padding)
        spatial = self._resampled(where, f"x_shape: {shape}", shape, settings)
        if spatial != dy.shape[2:]:
            raise ValueError(f"{where}: dy: {dy} does not fit x_shape {shape}; its spatial size would be {spatial}")
        start = "OPERATION_RESAMPLE_BWD_"
        inputs = {f"{start}DYDESC": dy}
        if (x is None) != (y is None):
            raise TypeError(f"{where}: {'x' if x is None else 'y'}: give both x and y or neither")
        if mode in _INDEXED and index is None and x is None:
            raise TypeError(f"{where}: index: {mode} needs the forward pass's index, or its x and y")
        if index is not None:
            if mode not in _INDEXED:
                raise TypeError(f"{where}: index: only {' and '.join(_INDEXED)} have one")
            inputs[f"{start}IDXDESC"] = self._shaped(where, "index", index, dy, dy.shape)
        if x is not None and y is not None:
            inputs[f"{start}XDESC"] = self._shaped(where, "x", x, dy, shape)
            inputs[f"{start}YDESC"] = self._shaped(where, "y", y, dy, dy.shape)
        dx = self._make(where, "dx", shape, dy, dtype)
        self._add(where, "OPERATION_RESAMPLE_BWD", inputs, {f"{start}DXDESC": dx}, [self._resampler(start, settings)])
        return dx

    def _resample(
        self, where: str, mode: str, rank: int, window: Any, stride: Any, padding: Padding
    ) -> tuple[tuple[Fraction, ...], tuple[_Setting, ...]]:
        member, padding_mode = _choice(where, "mode", mode, _RESAMPLES)
        windows = _fractions(where, "window", window, rank)
        strides = _fractions(where, "stride", stride, rank)
        before, after = _paddings(where, padding, rank)
        if mode in ("nearest", "bilinear") and any(size != 2 for size in windows):
            raise ValueError(f"{where}: window: {mode} has a window of 2, got {tuple(map(str, windows))}")
        broken = any(number.denominator != 1 for number in (*windows, *strides))
        kind = "FRACTION" if broken else "INT64"

        def numbers(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(values) if broken else tuple(int(value) for value in values)

        return windows, (
            _Setting("RESAMPLE_MODE", (member,)),
            _Setting("RESAMPLE_COMP_TYPE", (self._code(),)),
            _Setting("RESAMPLE_NAN_PROPAGATION", (bindings.CUDNN_PROPAGATE_NAN,)),
            _Setting("RESAMPLE_PADDING_MODE", (padding_mode,)),
            _Setting("RESAMPLE_SPATIAL_DIMS", (rank,)),
            _Setting("RESAMPLE_WINDOW_DIMS", numbers(windows), kind),
            _Setting("RESAMPLE_STRIDES", numbers(strides), kind),
            _Setting("RESAMPLE_PRE_PADDINGS", numbers(before), kind),
            _Setting("RESAMPLE_POST_PADDINGS", numbers(after), kind),
        )

    @staticmethod
    def _resampled(where: str, what: str, shape: tuple[int, ...], settings: tuple[_Setting, ...]) -> tuple[int, ...]:
        """Gives the spatial sizes: 1 + (x + before + after - window) / stride, rounded down."""
        values = {setting.attribute: setting.values for setting in settings}
        spatial = []
        for dim, size in enumerate(shape[2:]):
            padded = size + values["RESAMPLE_PRE_PADDINGS"][dim] + values["RESAMPLE_POST_PADDINGS"][dim]
            window = values["RESAMPLE_WINDOW_DIMS"][dim]
            if window > padded:
                raise ValueError(f"{where}: {what}: the window {window} is larger than the padded size {padded}")
            spatial.append(1 + math.floor(Fraction(padded - window) / values["RESAMPLE_STRIDES"][dim]))
        return tuple(spatial)

    @staticmethod
    def _resampler(start: str, settings: tuple[_Setting, ...]) -> _Setting:
        return _Setting(f"{start}DESC", descriptor="RESAMPLE", settings=settings)

    def reshape(self, x: Tensor, shape: Sequence[int], *, dtype: Any = None, name: str = "") -> Tensor:
        """Adds another view of the same elements in their logical order.

        Args:
            x: any tensor.
            shape: as many elements.
            dtype: of the virtual output; by default that of x.
            name: what errors call the operation.

        Returns:
            The result; nchw unless `output` says otherwise.

        Raises:
            TypeError, ValueError: the number of elements differs.
        """
        where = self._label("reshape", name)
        x = self._take(where, "x", x)
        sizes = _whole(where, "shape", shape, 1)
        if math.prod(sizes) != math.prod(x.shape):
            raise ValueError(
                f"{where}: shape: {sizes} has {math.prod(sizes)} elements and x {x} has {math.prod(x.shape)}"
            )
        if not 1 <= len(sizes) <= bindings.CUDNN_DIM_MAX:
            raise ValueError(f"{where}: shape: {sizes} has {len(sizes)} dimensions; cuDNN takes 1 to 8")
        made = self._make(where, "y", sizes, x, dtype or x.dtype)
        self._add(
            where,
            "OPERATION_RESHAPE",
            {"OPERATION_RESHAPE_XDESC": x},
            {"OPERATION_RESHAPE_YDESC": made},
            [],
        )
        return made

    def concatenate(self, tensors: Sequence[Tensor], axis: int, *, dtype: Any = None, name: str = "") -> Tensor:
        """Adds tensors one after another.

        Args:
            tensors: at least one; equal but for the axis.
            axis: the dimension along which they follow one another.
            dtype: of the virtual output; by default that of the first.
            name: what errors call the operation.

        Returns:
            The result.

        Raises:
            TypeError, ValueError: shapes or dtypes do not fit; names operation, tensor and remedy.
        """
        where = self._label("concatenate", name)
        if not tensors:
            raise ValueError(f"{where}: tensors: there is none")
        first = self._take(where, "tensors[0]", tensors[0])
        taken = [first]
        rank = len(first.shape)
        if not -rank <= axis < rank:
            raise ValueError(f"{where}: axis: {axis} is no axis of {first}")
        axis %= rank
        for position, tensor in enumerate(tensors[1:], start=1):
            other = self._take(where, f"tensors[{position}]", tensor, rank_of=first)
            rest = [size for dim, size in enumerate(other.shape) if dim != axis]
            if rest != [size for dim, size in enumerate(first.shape) if dim != axis]:
                raise ValueError(f"{where}: tensors[{position}]: {other} and {first} differ off axis {axis}")
            if other.dtype != first.dtype:
                raise TypeError(f"{where}: tensors[{position}]: {other} and {first} differ in dtype")
            taken.append(other)
        shape = list(first.shape)
        shape[axis] = sum(tensor.shape[axis] for tensor in taken)
        made = self._make(where, "y", tuple(shape), first, dtype or first.dtype)
        operation = self._add(
            where,
            "OPERATION_CONCAT",
            {},
            {"OPERATION_CONCAT_OUTPUT_DESC": made},
            [_Setting("OPERATION_CONCAT_AXIS", (axis,))],
        )
        operation.inputs["OPERATION_CONCAT_INPUT_DESCS"] = tuple(tensor.uid for tensor in taken)
        return made

    # checks and bookkeeping

    def _unique(self, name: str) -> str:
        count = self._names.get(name, 0) + 1
        self._names[name] = count
        return name if count == 1 else self._unique(f"{name}_{count}")

    def _label(self, method: str, name: str) -> str:
        """Names the operation that is being added."""
        self._stem = name
        return f"{method} {name!r}" if name else f"operation {len(self._operations) + 1}, {method}"

    def _code(self) -> bindings.cudnnDataType_t:
        return _DATA_TYPES[self.compute].code

    def _steps(
        self, where: str, shape: tuple[int, ...], layout: str | None, strides: Sequence[int] | None
    ) -> tuple[int, ...]:
        if strides is None:
            layout = "nchw" if layout is None else layout
            if layout not in devices.LAYOUTS:
                raise ValueError(f"{where}: layout: {layout!r} is neither 'nchw' nor 'nhwc'")
            return devices.contiguous_strides(shape, layout)
        if layout is not None:
            raise TypeError(f"{where}: strides: give a layout or strides, not both")
        steps = _whole(where, "strides", strides, 1)
        if len(steps) != len(shape):
            raise ValueError(f"{where}: strides: {steps} are not one for each dimension of {shape}")
        if overlaps(shape, steps):
            raise ValueError(
                f"{where}: strides: elements of shape {shape} overlap with strides {steps}; strides are in elements"
            )
        return steps

    @staticmethod
    def _aligned(where: str, alignment: int, dtype: str) -> int:
        size = max(1, _DATA_TYPES[dtype].bits // 8)
        if alignment not in ALIGNMENTS or alignment % size:
            raise ValueError(
                f"{where}: alignment: {alignment!r} is no power of two from the {size} bytes of {dtype} up to "
                f"{ALIGNMENTS[-1]}"
            )
        return alignment

    def _known(self, where: str, role: str, tensor: Any) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{where}: {role}: {type(tensor).__name__} is no tensor of a graph; make one with tensor(shape, dtype)"
            )
        if tensor._graph is not self._token:
            raise ValueError(f"{where}: {role}: {tensor} belongs to another graph")
        return self._tensors[tensor.uid]

    def _take(
        self,
        where: str,
        role: str,
        tensor: Any,
        *,
        least: int = 1,
        rank_of: Tensor | None = None,
        scalar: bool = False,
    ) -> Tensor:
        """Checks an operand and gives what the graph knows of it now."""
        known = self._known(where, role, tensor)
        if known.value is not None:
            if not scalar or rank_of is None:
                raise TypeError(f"{where}: {role}: {known} is by value; a tensor with a pointer has to be here")
            if not known.shape:
                ones = (1,) * len(rank_of.shape)
                self._tensors[known.uid] = known = replace(known, shape=ones, strides=ones)
        rank = len(known.shape)
        if rank_of is not None and rank != len(rank_of.shape):
            raise ValueError(
                f"{where}: {role}: {known} has rank {rank} and {rank_of} has rank {len(rank_of.shape)}; use reshape, "
                f"or give it dimensions of size 1"
            )
        if rank < least:
            raise ValueError(f"{where}: {role}: {known} has rank {rank}; at least {least} dimensions are needed")
        return known

    def _shaped(self, where: str, role: str, tensor: Any, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        known = self._take(where, role, tensor, rank_of=like)
        if known.shape != shape:
            raise ValueError(f"{where}: {role}: {known} has to have the shape {shape}")
        return known

    def _number(self, where: str, role: str, value: Any) -> Tensor:
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise TypeError(
                f"{where}: {role}: {type(value).__name__} is neither a number nor a tensor of a graph; make one with "
                f"tensor(shape, dtype)"
            )
        return self.scalar(int(value) if self.compute == "int32" else float(value))

    def _by_value(self, where: str, role: str, value: Any, like: Tensor, dtype: str | None = None) -> Tensor:
        if not isinstance(value, Tensor):
            made = self.scalar(value, dtype) if isinstance(value, int | float) else None
            if made is None or isinstance(value, bool):
                raise TypeError(f"{where}: {role}: {value!r} is neither a number nor a scalar of this graph")
            value = made
        if self._known(where, role, value).value is None:
            raise TypeError(f"{where}: {role}: {value} has a pointer; cuDNN takes a scalar(value) here")
        return self._take(where, role, value, rank_of=like, scalar=True)

    def _make(
        self,
        where: str,
        role: str,
        shape: tuple[int, ...],
        like: Tensor,
        dtype: Any = None,
        natural: str | None = None,
    ) -> Tensor:
        """Makes an operation's output."""
        word = _word(where, "dtype", dtype or self.intermediate)
        uid = len(self._tensors) + 1
        stem = f"{self._stem}.{role}" if self._stem else f"{role}{len(self._operations) + 1}"
        made = Tensor(
            uid,
            self._unique(stem),
            shape,
            _packed(shape, like),
            word,
            max(16, _DATA_TYPES[word].bits // 8),
            virtual=True,
            _graph=self._token,
        )
        self._tensors[uid] = made
        self._makers[uid] = where
        self._natural[uid] = natural or self._natural[like.uid]
        return made

    def _add(
        self,
        where: str,
        kind: str,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        settings: list[_Setting],
        optional: Iterable[str] = (),
    ) -> _Operation:
        operation = _Operation(
            where,
            kind,
            {attribute: (tensor.uid,) for attribute, tensor in inputs.items()},
            {attribute: tensor.uid for attribute, tensor in outputs.items()},
            frozenset(optional),
            settings,
        )
        self._operations.append(operation)
        return operation

    def build(self, handle: Handle | None = None, device: "DeviceProperties | None" = None) -> "OperationGraph":
        """Makes the backend descriptors.

        Args:
            handle: the cuDNN handle of the GPU here; borrowed. cuDNN before 9.8 needs it.
            device: the properties of another GPU; borrowed, and wins over the handle. Both are only what the graph's
                heuristics, engines and plans use unless they are told otherwise.

        Returns:
            The finalized operation graph.

        Raises:
            CudnnError: cuDNN refuses the graph; a note names operation and tensor.
            CudnnNotSupportedError: the loaded cuDNN is too old for a part of it.
            ValueError: there is no operation, an input that no operation uses, or a result that nothing uses; names it.
        """
        dropped = self._check_use()
        tensors: dict[int, Backend] = {}
        operations = []
        for operation in self._operations:
            outputs = {name: uid for name, uid in operation.outputs.items() if uid not in dropped}
            uids = [uid for group in operation.inputs.values() for uid in group] + list(outputs.values())
            for uid in uids:
                if uid not in tensors:
                    tensors[uid] = self._tensor_descriptor(operation.label, self._tensors[uid])
            backend = Backend(operation.kind)
            for setting in operation.settings:
                _apply(backend, setting, operation.label)
            for name, group in operation.inputs.items():
                backend.set(name, *(tensors[uid] for uid in group))
            for name, uid in outputs.items():
                backend.set(name, tensors[uid])
            shown = ", ".join(str(self._tensors[uid]) for uid in uids)
            operations.append(backend.finalize(f"{operation.label} of {shown}"))
        graph = Backend("OPERATIONGRAPH").set("OPERATIONGRAPH_OPS", *operations)
        if handle is not None and device is None:
            graph.set("OPERATIONGRAPH_HANDLE", handle)
        labels = tuple(operation.label for operation in self._operations)
        graph.finalize(f"the graph of {'; '.join(labels)}")
        used = tuple(self._tensors[uid] for uid in sorted(tensors))
        made = frozenset(self._makers)
        fatal = next(filter(None, map(self._fatal, self._operations)), "")
        return OperationGraph(graph, used, made, labels, self.compute, handle, device, fatal)

    def _fatal(self, operation: _Operation) -> str:
        """Says why an operation would end the process; see Note [pooling]."""
        if operation.kind != "OPERATION_RESAMPLE_BWD":
            return ""
        start = f"{operation.kind}_"
        (resampler,) = operation.settings
        modes = {setting.attribute: setting.values for setting in resampler.settings}["RESAMPLE_MODE"]
        (dy,) = (self._tensors[uid] for uid in operation.inputs[f"{start}DYDESC"])
        dx = self._tensors[operation.outputs[f"{start}DXDESC"]]
        why = _fatal_pooling(modes[0].name, dy, dx, f"{start}IDXDESC" in operation.inputs)
        return f"{operation.label}: {why}" if why else ""

    def check(self) -> None:
        """Checks that the graph is whole, as `build` does first; needs no cuDNN.

        Raises:
            ValueError: there is no operation, an input that no operation uses, or a result that nothing uses; names it.
        """
        self._check_use()

    def _check_use(self) -> set[int]:
        """Checks that the graph is whole; gives the optional outputs that nobody wants."""
        if not self._operations:
            raise ValueError("graph: it has no operation")
        used = {uid for operation in self._operations for group in operation.inputs.values() for uid in group}
        dropped = set()
        for operation in self._operations:
            for attribute, uid in operation.outputs.items():
                tensor = self._tensors[uid]
                if not tensor.virtual or uid in used:
                    continue
                if attribute not in operation.optional:
                    raise ValueError(
                        f"{operation.label}: its result {tensor} is used by no operation and is no output; make it one "
                        f"with output(...)"
                    )
                dropped.add(uid)
        for tensor in self._tensors.values():
            if tensor.uid not in used and tensor.uid not in self._makers and tensor.value is None:
                raise ValueError(f"graph: the input {tensor} is used by no operation")
        if not any(not self._tensors[uid].virtual for uid in self._makers):
            raise ValueError("graph: it has no output; make one with output(...)")
        return dropped

    @staticmethod
    def _tensor_descriptor(where: str, tensor: Tensor) -> Backend:
        kind = _DATA_TYPES[tensor.dtype]
        function = "cudnnBackendSetAttribute"
        _require(kind.since, function, f"data type {tensor.dtype}, which {where} has in {tensor}")
        if math.prod(tensor.shape) >= 2**31:
            _require(90300, function, f"tensors of more than 2^31-1 elements, which {where} has in {tensor}")
        backend = Backend("TENSOR")
        backend.set("TENSOR_DATA_TYPE", kind.code)
        backend.set("TENSOR_DIMENSIONS", *tensor.shape)
        backend.set("TENSOR_STRIDES", *tensor.strides)
        backend.set("TENSOR_UNIQUE_ID", tensor.uid)
        backend.set("TENSOR_BYTE_ALIGNMENT", tensor.alignment)
        if tensor.virtual:
            backend.set("TENSOR_IS_VIRTUAL", True)
        if tensor.value is not None:
            backend.set("TENSOR_IS_BY_VALUE", True)
        return backend.finalize(f"tensor {tensor} of {where}")


_SCALARS: dict[str, Any] = {
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.float16,
    "bfloat16": devices.DTYPES["bfloat16"],
    "int32": np.int32,
    "int64": np.int64,
}
"""The dtypes that a scalar by value may have."""


def _relu_parameters(lower_clip: float, upper_clip: float | None, lower_slope: float) -> dict[str, Any]:
    chosen = {}
    if lower_clip != 0.0:
        chosen["lower_clip"] = lower_clip
    if upper_clip is not None:
        chosen["upper_clip"] = upper_clip
    if lower_slope != 0.0:
        chosen["lower_slope"] = lower_slope
    return chosen


def _apply(backend: Backend, setting: _Setting, where: str) -> None:
    if not setting.descriptor:
        backend.set(setting.attribute, *setting.values, kind=setting.kind)
        return
    inner = Backend(setting.descriptor)
    for part in setting.settings:
        _apply(inner, part, where)
    backend.set(setting.attribute, inner.finalize(f"the {setting.descriptor} descriptor of {where}"))


@dataclass(frozen=True)
class _Geometry:
    """How a convolution's window moves."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def read(cls, where: str, rank: int, padding: Padding, stride: Ints, dilation: Ints) -> Self:
        before, after = _paddings(where, padding, rank)
        return cls(
            before,
            after,
            _per_dimension(where, "stride", stride, rank, 1),
            _per_dimension(where, "dilation", dilation, rank, 1),
        )

    def __str__(self) -> str:
        padding = self.before if self.before == self.after else (self.before, self.after)
        return f"padding {padding}, stride {self.stride} and dilation {self.dilation}"

    def output(self, where: str, x: Tensor, w: Tensor) -> tuple[int, ...]:
        return self.spatial(where, x.shape, w.shape)

    def spatial(self, where: str, x_shape: Sequence[int], w_shape: Sequence[int]) -> tuple[int, ...]:
        """Gives (size + before + after - reach) // stride + 1 for each dimension, reach the dilated window's extent."""
        sizes = []
        for dim, (size, window) in enumerate(zip(x_shape[2:], w_shape[2:], strict=True)):
            padded = size + self.before[dim] + self.after[dim]
            reach = (window - 1) * self.dilation[dim] + 1
            if reach > padded:
                raise ValueError(
                    f"{where}: w: the window of {tuple(w_shape)} reaches over {reach} elements of spatial dimension "
                    f"{dim}, where x {tuple(x_shape)} has {padded} with its padding; pad more"
                )
            sizes.append((padded - reach) // self.stride[dim] + 1)
        return tuple(sizes)

    def settings(self, compute: bindings.cudnnDataType_t) -> tuple[_Setting, ...]:
        return (
            _Setting("CONVOLUTION_COMP_TYPE", (compute,)),
            _Setting("CONVOLUTION_CONV_MODE", (bindings.CUDNN_CROSS_CORRELATION,)),
            _Setting("CONVOLUTION_SPATIAL_DIMS", (len(self.stride),)),
            _Setting("CONVOLUTION_DILATIONS", self.dilation),
            _Setting("CONVOLUTION_FILTER_STRIDES", self.stride),
            _Setting("CONVOLUTION_PRE_PADDINGS", self.before),
            _Setting("CONVOLUTION_POST_PADDINGS", self.after),
        )


# --- what ends the process -------------------------------------------------------------------------------------------

# See Note [pooling]. With two dimensions and more, 9.19.0 has the fault and 9.28.0 has it not; no version between or
# before was tried.
_FATAL_POOLING_BEFORE = 92800


def _fatal_pooling(mode: str, dy: Tensor, dx: Tensor, indexed: bool) -> str:
    """Says why cuDNN must not be asked for a gradient of pooling; empty when it may be."""
    # cuDNN compares strides, so a layout that only the sizes of 1 leave open is the one that the strides say.
    packed = all(t.strides == devices.contiguous_strides(t.shape, "nhwc") for t in (dy, dx))
    line = len(dx.shape) == 3
    if mode != bindings.CUDNN_RESAMPLE_MAXPOOL.name or not packed or (indexed and not line):
        return ""
    library = libraries.load()
    if line:
        what = "of nhwc tensors with one spatial dimension"
        remedy = f"give them a second one of size 1{' and the index of the forward pass' if not indexed else ''}"
        fixed = ""
    elif library.version < _FATAL_POOLING_BEFORE:
        what = "of nhwc tensors without the index of the forward pass"
        remedy = "give that index instead of x and y, or make the tensors nchw"
        fixed = f"; cuDNN {libraries.version_text(_FATAL_POOLING_BEFORE)} does not"
    else:
        return ""
    return (
        f"cuDNN {library.version_text} can end the process when a gradient of max pooling {what} is asked for{fixed}; "
        f"{remedy}"
    )


def _refuse_fatal(why: str) -> None:
    if why:
        raise cudnn_error("cudnnBackendFinalize", NOT_SUPPORTED, why, "CUDNN_STATUS_NOT_SUPPORTED")


# --- engines and their configurations -------------------------------------------------------------------------------

_MODES = {
    "A": bindings.CUDNN_HEUR_MODE_A,
    "B": bindings.CUDNN_HEUR_MODE_B,
    "fallback": bindings.CUDNN_HEUR_MODE_FALLBACK,
    "instant": bindings.CUDNN_HEUR_MODE_INSTANT,
}
HEURISTIC_MODES = tuple(_MODES)
NOTES = {
    "tensor_core": "uses tensor cores",
    "down_convert_inputs": "converts its inputs to a lower precision",
    "reduced_precision_reduction": "sums in a lower precision",
    "fft": "computes by Fourier transforms",
    "nondeterministic": "may give other bits in each run",
    "winograd": "computes by Winograd transforms",
    "winograd_tile_4x4": "Winograd with 4x4 tiles",
    "winograd_tile_6x6": "Winograd with 6x6 tiles",
    "winograd_tile_13x13": "Winograd with 13x13 tiles",
    "strict_nan_prop": "propagates every NaN",
    "runtime_compilation": "compiles its kernel when the plan is built",
    "requires_filter_int8x32_reorder": "needs its filter reordered for INT8x32",
    "requires_bias_int8x32_reorder": "needs its bias reordered for INT8x32",
    "supports_cuda_graph_native_api": "can fill a CUDA graph directly",
    "cublaslt_dependency": "calls cuBLASLt",
}
"""What the words of numerical and behaviour notes mean."""


def _enum_word(kind: type[libraries.CEnum], prefix: str, value: int) -> str:
    """Gives the word of an enum's value; of one newer than the headers its number."""
    try:
        return str(kind(value).name).removeprefix(prefix).lower()
    except ValueError:
        return str(value)


def _notes(engine: Backend) -> tuple[tuple[str, ...], tuple[str, ...]]:
    # There are fewer notes than that; so they need not be counted first.
    numerical = engine.get("ENGINE_NUMERICAL_NOTE", room=_MOST_NOTES)
    behavior = engine.get("ENGINE_BEHAVIOR_NOTE", room=_MOST_NOTES)
    return (
        tuple(_enum_word(bindings.cudnnBackendNumericalNote_t, "CUDNN_NUMERICAL_NOTE_", note) for note in numerical),
        tuple(_enum_word(bindings.cudnnBackendBehaviorNote_t, "CUDNN_BEHAVIOR_NOTE_", note) for note in behavior),
    )


class _EngineFacts(NamedTuple):
    """What an engine says of itself for one graph and GPU; for another graph its notes may be others."""

    id: int
    numerical_notes: tuple[str, ...]
    behavior_notes: tuple[str, ...]
    sm_count: int
    knob_count: int

    @classmethod
    def read(cls, engine: Backend, index: int) -> Self:
        """Asks cuDNN."""
        return cls(index, *_notes(engine), _sm_count(engine), engine.count("ENGINE_KNOB_INFO"))


@functools.cache
def _knob_word(value: int) -> str:
    return _enum_word(bindings.cudnnBackendKnobType_t, "CUDNN_KNOB_TYPE_", value)


class Knob(NamedTuple):
    """A knob of an engine: its type by a word such as "tile_size", and the values minimum, minimum + stride, ..."""

    type: str
    minimum: int
    maximum: int
    stride: int


class Engine:
    """One engine that takes a graph.

    Attributes:
        id: its number, which means the same kernel family in one cuDNN version only.
    """

    def __init__(self, graph: "OperationGraph", backend: Backend) -> None:
        """Takes over a finalized engine descriptor; `OperationGraph.engines` makes it."""
        self._graph = graph
        self._backend = backend
        self.id = int(backend.get_one("ENGINE_GLOBAL_INDEX"))
        self._knobs: tuple[Knob, ...] | None = None

    @property
    def descriptor(self) -> Any:
        """The raw cudnnBackendDescriptor_t; borrowed."""
        return self._backend.descriptor

    @functools.cached_property
    def _facts(self) -> _EngineFacts:
        return _EngineFacts.read(self._backend, self.id)

    @property
    def numerical_notes(self) -> tuple[str, ...]:
        """Words of `NOTES`."""
        return self._facts.numerical_notes

    @property
    def behavior_notes(self) -> tuple[str, ...]:
        """Words of `NOTES`."""
        return self._facts.behavior_notes

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """Its knobs; read from cuDNN when first asked for."""
        if self._knobs is None:
            self._knobs = tuple(
                Knob(
                    _knob_word(info.get_one("KNOB_INFO_TYPE")),
                    int(info.get_one("KNOB_INFO_MINIMUM_VALUE")),
                    int(info.get_one("KNOB_INFO_MAXIMUM_VALUE")),
                    int(info.get_one("KNOB_INFO_STRIDE")),
                )
                for info in self._backend.get("ENGINE_KNOB_INFO")
            )
        return self._knobs

    def configure(self, knobs: Mapping[str, int] | None = None) -> "EngineConfig":
        """Makes a configuration by hand.

        Args:
            knobs: values by the words of `knobs`; cuDNN chooses the others. -1 is cuDNN's own word for its own choice,
                which heuristics deliver too, and which not every knob takes.

        Returns:
            The finalized configuration.

        Raises:
            CudnnError: cuDNN refuses the combination, or -1.
            ValueError: the engine has no such knob, or not that value of it.
        """
        choices = []
        ranges = {knob.type: knob for knob in self.knobs}
        for word, value in (knobs or {}).items():
            if word not in ranges:
                raise ValueError(f"knobs: engine {self.id} has no {word!r}; it has {', '.join(ranges) or 'none'}")
            knob = ranges[word]
            off = knob.stride > 0 and (value - knob.minimum) % knob.stride
            if value != _OWN_CHOICE and (not knob.minimum <= value <= knob.maximum or off):
                raise ValueError(
                    f"knobs: {word} of engine {self.id} goes from {knob.minimum} to {knob.maximum} in steps of "
                    f"{knob.stride}, not to {value}"
                )
            choice = Backend("KNOB_CHOICE")
            choice.set("KNOB_CHOICE_KNOB_TYPE", _knob_code(word))
            choice.set("KNOB_CHOICE_KNOB_VALUE", value)
            choices.append(choice.finalize(f"knob {word} of engine {self.id}"))
        backend = Backend("ENGINECFG").set("ENGINECFG_ENGINE", self._backend)
        if choices:
            backend.set("ENGINECFG_KNOB_CHOICES", *choices)
        backend.finalize(f"engine {self.id} with knobs {dict(knobs or {})}")
        return EngineConfig(self._graph, backend, facts=self._facts)

    def __repr__(self) -> str:
        return f"Engine({self.id}, knobs={[knob.type for knob in self.knobs]}, notes={list(self.numerical_notes)})"


def _knob_code(word: str) -> int:
    if word.isdecimal():
        return int(word)
    return bindings.cudnnBackendKnobType_t[f"CUDNN_KNOB_TYPE_{word.upper()}"]


class EngineConfig:
    """An engine with values of its knobs: what a plan is built from.

    Attributes:
        engine_id: the engine's number.
        sm_count: how many multiprocessors it may use; 0 for all.
        numerical_notes: words of `NOTES`.
        behavior_notes: words of `NOTES`.
        mode: the heuristic mode that gave it; empty when made by hand.
    """

    def __init__(
        self,
        graph: "OperationGraph",
        backend: Backend,
        mode: str = "",
        *,
        facts: _EngineFacts | None = None,
        known: dict[int, _EngineFacts] | None = None,
    ) -> None:
        """Takes over a finalized configuration; `OperationGraph` and `Engine` make it.

        Args:
            graph: the graph that it computes.
            backend: its descriptor.
            mode: the heuristic mode that gave it.
            facts: what its engine says, where that is known.
            known: where what engines say is kept, by number, for configurations that were asked for together.
        """
        self._graph = graph
        self._backend = backend
        self.mode = mode
        if facts is None:
            facts = None if known is None else known.get(_engine_index(backend))
        if facts is None:
            engine = backend.get_one("ENGINECFG_ENGINE")
            facts = _EngineFacts.read(engine, int(engine.get_one("ENGINE_GLOBAL_INDEX")))
            if known is not None:
                known[facts.id] = facts
        self.engine_id = facts.id
        self.numerical_notes, self.behavior_notes = facts.numerical_notes, facts.behavior_notes
        self.sm_count = facts.sm_count
        self._knob_count = facts.knob_count
        self._workspace: int | None = None

    @property
    def descriptor(self) -> Any:
        """The raw cudnnBackendDescriptor_t; borrowed."""
        return self._backend.descriptor

    @property
    def graph(self) -> "OperationGraph":
        """The graph that it computes."""
        return self._graph

    @functools.cached_property
    def knobs(self) -> dict[str, int]:
        """The chosen values by the words of `Engine.knobs`; cuDNN chooses what is not there."""
        return _chosen_knobs(self._backend, self._knob_count)

    @functools.cached_property
    def key(self) -> tuple[int, tuple[tuple[str, int], ...], int]:
        """The engine, its knobs in order, and its multiprocessors: what makes two configurations equal."""
        return self.engine_id, tuple(sorted(self.knobs.items())), self.sm_count

    @property
    def tag(self) -> str:
        """A short text of engine, knobs and multiprocessors, ``engine62[tile_size=4,tilek=0]@16``."""
        return _tag(self.engine_id, self.key[1], self.sm_count)

    @property
    def deterministic(self) -> bool:
        """Whether cuDNN does not say that the result's bits may differ from run to run."""
        return "nondeterministic" not in self.numerical_notes

    @property
    def workspace(self) -> int | None:
        """The workspace in bytes that its plan needs; before a plan was built None where cuDNN cannot tell."""
        if self._workspace is None:
            with contextlib.suppress(CudnnError):
                self._workspace = int(self._backend.get_one("ENGINECFG_WORKSPACE_SIZE"))
        return self._workspace

    def plan(self, handle: Handle | None = None, device: "DeviceProperties | None" = None) -> "ExecutionPlan":
        """Builds a plan, which may compile a kernel.

        Args:
            handle: the cuDNN handle of the GPU here; borrowed. By default the graph's.
            device: the properties of another GPU; borrowed. By default the graph's when no handle is given.

        Returns:
            The finalized plan.

        Raises:
            CudnnError: cuDNN cannot build it.
            ValueError: there is neither a handle nor a device.
        """
        handle, device = self._graph._target("plan", handle, device)
        backend = Backend("EXECUTION_PLAN").set("EXECUTION_PLAN_ENGINE_CONFIG", self._backend)
        _attach(backend, handle, device)
        start = time.perf_counter()
        backend.finalize(f"a plan of {self.tag} for {self._graph}")
        build_ms = (time.perf_counter() - start) * 1e3
        graph = self._graph
        made = _plan(backend, graph.pointers, graph._scalars, self.tag, build_ms, graph.tensors, graph._made)
        self._workspace = made.workspace
        return made

    def __repr__(self) -> str:
        return f"EngineConfig({self.tag})"


def build_plans(
    configurations: Iterable[EngineConfig],
    handle: Handle | None = None,
    device: "DeviceProperties | None" = None,
    threads: int | None = None,
) -> list["ExecutionPlan | CudnnError"]:
    """Builds the plans of several configurations: those that need a compiler in threads, the others meanwhile.

    A plan that needs none takes cuDNN 0.02 to 0.2 ms, less than a thread costs; a compilation takes some 100 ms. How
    much threads save depends on the cuDNN and the NVRTC that it compiles with: those of CUDA 12 do most of a
    compilation one at a time in a process (with 9.28, two threads on two cores took 0.75 to 1 of the time of one).

    Args:
        configurations: in any order, of one graph or several.
        handle: the cuDNN handle of the GPU here; borrowed, and not to be used by others meanwhile. By default each
            configuration's own graph's.
        device: the properties of another GPU; borrowed. By default the graphs' when no handle is given.
        threads: at most so many beside this one; by default one a core that this process may use, up to 16.

    Returns:
        In the order of the configurations, the plan, whose `build_ms` says how long it took beside the others, or the
        error where cuDNN cannot build it.

    Raises:
        ValueError: threads is less than 1; there is neither a handle nor a device.
    """
    wanted = list(configurations)
    if threads is None:
        threads = min(_BUILD_THREADS, len(os.sched_getaffinity(0)))
    _whole("build_plans", "threads", (threads,), 1)
    # One that lacks handle and device is found before any thread starts.
    targets = [configuration.graph._target("build_plans", handle, device) for configuration in wanted]

    def build(position: int) -> "ExecutionPlan | CudnnError":
        of, properties = targets[position]
        try:
            # A thread begins with device 0 as its current one.
            with contextlib.nullcontext() if of is None else of.device.use():
                return wanted[position].plan(of, properties)
        except CudnnError as error:
            return error

    positions = range(len(wanted))
    slow = [position for position in positions if "runtime_compilation" in wanted[position].behavior_notes]
    if threads == 1 or not slow or len(wanted) < 2:
        return [build(position) for position in positions]
    with concurrent.futures.ThreadPoolExecutor(min(threads, len(slow)), "flcuda-build") as pool:
        waiting = {position: pool.submit(build, position) for position in slow}
        built = {position: build(position) for position in positions if position not in waiting}
        return [built[position] if position in built else waiting[position].result() for position in positions]


def _sm_count(engine: Backend) -> int:
    """Reads for how many multiprocessors an engine is; 0 for all."""
    try:
        return max(0, int(engine.get_one("ENGINE_SM_COUNT_TARGET")))
    except CudnnError:
        return 0


def _tag(engine: int, knobs: Iterable[tuple[str, int]], sm_count: int) -> str:
    chosen = ",".join(f"{word}={value}" for word, value in knobs)
    return f"engine{engine}" + (f"[{chosen}]" if chosen else "") + (f"@{sm_count}" if sm_count else "")


def _attach(plan: Backend, handle: Handle | None, device: "DeviceProperties | None") -> None:
    """Says for which GPU a plan is; device properties win."""
    if device is not None:
        plan.set("EXECUTION_PLAN_DEVICEPROP", device)
    elif handle is not None:
        plan.set("EXECUTION_PLAN_HANDLE", handle)


class OperationGraph:
    """A finalized graph of operations: what engines compute.

    Attributes:
        operations: the operations, named as in errors.
        tensors: all its tensors by uid, virtual ones too.
    """

    def __init__(
        self,
        backend: Backend,
        tensors: Iterable[Tensor],
        made: frozenset[int],
        operations: tuple[str, ...],
        compute: str,
        handle: Handle | None,
        device: "DeviceProperties | None",
        fatal: str = "",
    ) -> None:
        """Takes over a finalized descriptor; `Graph.build` makes it."""
        self._backend = backend
        self.tensors = {tensor.uid: tensor for tensor in tensors}
        self.operations = operations
        self.compute = compute
        self._made = made
        self._handle = handle
        self._device = device
        self._fatal = fatal
        self._scalars = {
            uid: np.array([tensor.value], dtype=_SCALARS[tensor.dtype])
            for uid, tensor in self.tensors.items()
            if tensor.value is not None
        }

    @property
    def descriptor(self) -> Any:
        """The raw cudnnBackendDescriptor_t; borrowed."""
        return self._backend.descriptor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that are read through pointers, by uid."""
        return tuple(t for t in self.tensors.values() if t.uid not in self._made and t.value is None)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The tensors that are written through pointers, by uid."""
        return tuple(t for t in self.tensors.values() if t.uid in self._made and not t.virtual)

    @property
    def pointers(self) -> tuple[int, ...]:
        """The uids of all tensors that need a pointer at each run, in order."""
        return tuple(t.uid for t in self.tensors.values() if not t.virtual and t.value is None)

    @property
    def engine_count(self) -> int:
        """How many engines cuDNN knows for graphs of this kind; few of them take this one."""
        return int(self._backend.get_one("OPERATIONGRAPH_ENGINE_GLOBAL_COUNT"))

    def close(self) -> None:
        """Gives the graph up; its configurations and plans live on."""
        self._backend.close()

    def _target(
        self, what: str, handle: Handle | None, device: "DeviceProperties | None"
    ) -> tuple[Handle | None, "DeviceProperties | None"]:
        if handle is None and device is None:
            handle, device = self._handle, self._device
        if handle is None and device is None:
            raise ValueError(
                f"{what}: for which GPU? Give device=DeviceProperties.from_profile(...) or the handle of the GPU here, "
                f"here or to Graph.build"
            )
        _refuse_fatal(self._fatal)
        return handle, device

    def heuristics(
        self,
        mode: str = "A",
        *,
        device: "DeviceProperties | None" = None,
        sm_count: int | None = None,
        limit: int | None = None,
    ) -> list[EngineConfig]:
        """Asks cuDNN for configurations, the best first as it thinks.

        Args:
            mode: "A", "B", "fallback" (slow engines that take more graphs) or "instant".
            device: the properties of another GPU; by default the graph's, or the current GPU.
            sm_count: how many multiprocessors may be used; by default all.
            limit: at most so many configurations.

        Returns:
            The configurations that were delivered (Note [counts]); may be empty.

        Raises:
            CudnnError: cuDNN refuses the question.
            CudnnNotSupportedError: the question would end the process; see Note [pooling].
            ValueError: mode or a number is not as above; no GPU was named.
        """
        member = _choice("heuristics", "mode", mode, _MODES)
        _, device = self._target("heuristics", None, device)
        backend = Backend("ENGINEHEUR").set("ENGINEHEUR_OPERATION_GRAPH", self._backend)
        backend.set("ENGINEHEUR_MODE", member)
        if device is not None:
            backend.set("ENGINEHEUR_DEVICEPROP", device)
        target = _sm_target("heuristics", sm_count, device)
        if target:
            backend.set("ENGINEHEUR_SM_COUNT_TARGET", target)
        if limit is not None:
            _whole("heuristics", "limit", (limit,), 1)
        backend.finalize(f"heuristics {mode} for {self}")
        delivered = backend.get("ENGINEHEUR_RESULTS", limit=limit)
        # Without a target of multiprocessors an engine is the same one in each configuration.
        known: dict[int, _EngineFacts] | None = None if target else {}
        return [EngineConfig(self, found, mode, known=known) for found in delivered]

    def configurations(
        self, device: "DeviceProperties | None" = None, *, sm_count: int | None = None
    ) -> list[EngineConfig]:
        """Asks mode A, then the fallback, then mode B where those have nothing.

        Args:
            device: the properties of another GPU; by default the graph's, or the current GPU.
            sm_count: how many multiprocessors may be used; by default all.

        Returns:
            The configurations, the best first as cuDNN thinks, none twice, at least one.

        Raises:
            CudnnNotSupportedError: no mode has any; the text lists what each engine says and the likely rule.
            ValueError: no GPU was named.
        """
        found: dict[Any, EngineConfig] = {}
        refusals = []
        for mode in ("A", "fallback", "B"):
            if mode == "B" and found:
                break
            try:
                delivered = self.heuristics(mode, device=device, sm_count=sm_count)
            except CudnnError as error:
                if not isinstance(error, CudnnNotSupportedError):
                    raise
                refusals.append(f"heuristics {mode}: {_reason(error, ())}")
                continue
            for configuration in delivered:
                found.setdefault(configuration.key, configuration)
        if not found:
            raise self._unsupported(device, refusals)
        return list(found.values())

    def _engine(self, index: int, device: "DeviceProperties | None", target: int = 0) -> Backend:
        backend = Backend("ENGINE").set("ENGINE_OPERATION_GRAPH", self._backend).set("ENGINE_GLOBAL_INDEX", index)
        if device is not None:
            backend.set("ENGINE_DEVICEPROP", device)
        if target:
            backend.set("ENGINE_SM_COUNT_TARGET", target)
        return backend.finalize(f"engine {index} for {self}")

    def engines(self, device: "DeviceProperties | None" = None) -> list[Engine]:
        """Lists the engines that take this graph, by number.

        Args:
            device: the properties of another GPU; by default the graph's, or the current GPU.

        Returns:
            The engines; their plans can still be refused.

        Raises:
            CudnnNotSupportedError: the question would end the process; see Note [pooling].
            ValueError: no GPU was named.
        """
        _, device = self._target("engines", None, device)
        found = []
        for index in range(self.engine_count):
            with contextlib.suppress(CudnnNotSupportedError):
                found.append(Engine(self, self._engine(index, device)))
        return found

    def engine(self, index: int, device: "DeviceProperties | None" = None, *, sm_count: int | None = None) -> Engine:
        """Gives one engine.

        Args:
            index: its number.
            device: the properties of another GPU; by default the graph's, or the current GPU.
            sm_count: how many multiprocessors may be used; by default all.

        Returns:
            The engine.

        Raises:
            CudnnNotSupportedError: the engine does not take this graph.
            ValueError: there is no such engine; no GPU was named.
        """
        _, device = self._target("engine", None, device)
        if not 0 <= index < self.engine_count:
            raise ValueError(f"index: {index} is no engine; for this graph they are 0 to {self.engine_count - 1}")
        return Engine(self, self._engine(index, device, _sm_target("engine", sm_count, device)))

    def why_not(self, device: "DeviceProperties | None" = None) -> list[tuple[int, str]]:
        """Asks every engine why it does not take this graph.

        Args:
            device: the properties of another GPU; by default the graph's, or the current GPU.

        Returns:
            (engine, text) for each that refuses, by number: its status, and the innermost reasons that cuDNN gives as
            its last error or logs, which are the expressions of its own checks.

        Raises:
            CudnnNotSupportedError: the question would end the process; see Note [pooling].
            ValueError: no GPU was named.
        """
        _, device = self._target("why_not", None, device)
        refused = []
        with log.listen() as lines:
            for index in range(self.engine_count):
                lines.clear()
                try:
                    engine = self._engine(index, device)
                    lines.clear()
                    Backend("ENGINECFG").set("ENGINECFG_ENGINE", engine).finalize()
                except CudnnError as error:
                    refused.append((index, _reason(error, lines)))
        return refused

    def likely_rules(self, device: "DeviceProperties | None" = None) -> list[str]:
        """Names the documented rules that this graph breaks, which is why engines most often refuse one.

        Args:
            device: the properties of another GPU; by default the graph's, or none.

        Returns:
            A sentence a rule; may be empty.
        """
        device = device or self._device
        return _likely_rules(self, device)

    def _unsupported(self, device: "DeviceProperties | None", refusals: list[str]) -> CudnnError:
        reasons = self.why_not(device)
        lines = [f"no engine supports {self}"]
        lines += [f"likely: {rule}" for rule in self.likely_rules(device)]
        lines += refusals
        lines += [f"engine {engine_ranges(engines)}: {text}" for text, engines in by_reason(reasons).items()]
        if not reasons:
            lines.append("every engine takes the graph, and heuristics deliver none: are these the GPU's properties?")
        return cudnn_error("cudnnBackendGetAttribute", NOT_SUPPORTED, "\n  ".join(lines), "CUDNN_STATUS_NOT_SUPPORTED")

    def __str__(self) -> str:
        return f"{' -> '.join(self.operations)} [{', '.join(str(self.tensors[uid]) for uid in self.pointers)}]"


def _sm_target(where: str, sm_count: int | None, device: "DeviceProperties | None") -> int:
    """Checks a number of multiprocessors; 0 for no target, see Note [multiprocessors]."""
    if sm_count is None:
        return 0
    (count,) = _whole(where, "sm_count", (sm_count,), 1)
    present = int(device.profile.get("multiProcessorCount", 0)) if device is not None else 0
    if present and count > present:
        name = device.name if device is not None else ""
        raise ValueError(f"{where}: sm_count: {count} is more than the {present} multiprocessors of {name}")
    return 0 if count == present else count


def by_reason(refusals: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Gives what `OperationGraph.why_not` says the other way round.

    Args:
        refusals: engines and their reasons.

    Returns:
        For each reason the engines that give it, in their order.
    """
    same: dict[str, list[int]] = {}
    for engine, text in refusals:
        same.setdefault(text, []).append(engine)
    return same


def engine_ranges(numbers: Iterable[int]) -> str:
    """Writes ascending numbers of engines shortly: 3-5, 8.

    Args:
        numbers: the numbers.

    Returns:
        The text.
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def _likely_rules(graph: OperationGraph, device: "DeviceProperties | None") -> list[str]:
    """Checks a graph against the rules that cuDNN's documentation gives for engines with tensor cores and fusions."""
    rules = []
    pointers = [graph.tensors[uid] for uid in graph.pointers]
    profile: Mapping[str, Any] = device.profile if device is not None else {}
    capability = int(profile.get("deviceVer", 0))
    for tensor in pointers:
        bits = _DATA_TYPES[tensor.dtype].bits
        wide = len(tensor.shape) >= 3 and math.prod(tensor.shape[2:]) > 1
        channels = tensor.shape[1] if len(tensor.shape) >= 2 else 1
        multiple = 128 // bits
        if wide and 8 <= bits < 64 and channels > 1 and channels % multiple:
            rules.append(f"channels: {tensor} has {channels} channels, no multiple of {multiple}; pad them")
        if tensor.alignment < 16 and math.prod(tensor.shape) > 1:
            rules.append(f"alignment: {tensor} is aligned to {tensor.alignment} bytes; fused engines want 16")
        nhwc = devices.contiguous_strides(tensor.shape, "nhwc")
        if wide and 8 <= bits <= 16 and tensor.strides != nhwc:
            rules.append(f"layout: {tensor} is not nhwc, which 16-bit engines want")
        if tensor.dtype == "float64":
            rules.append(f"dtype: {tensor} is float64, for which there are fallback engines of plain operations only")
        if tensor.dtype == "bfloat16" and capability and capability < 800:
            rules.append(f"SM: {tensor} is bfloat16, which needs compute capability 8.0; the GPU has {_sm(capability)}")
        if tensor.dtype.startswith("float8") and capability and capability < 890:
            rules.append(f"SM: {tensor} is {tensor.dtype}, which needs compute capability 8.9, not {_sm(capability)}")
    statistics = any("generate_statistics" in label for label in graph.operations)
    if statistics and capability and capability < 800:
        rules.append(f"SM: statistics are fused from compute capability 8.0; the GPU has {_sm(capability)}")
    images = [t for t in pointers if len(t.shape) >= 3 and math.prod(t.shape[2:]) > 1]
    dtypes = {t.dtype for t in images if not t.dtype.endswith("boolean")}
    if statistics and not dtypes <= {"float16", "bfloat16"}:
        rules.append(f"dtype: statistics are fused for 16-bit tensors, these are {', '.join(sorted(dtypes))}")
    prologue = "pointwise" in graph.operations[0]
    filters = any("convolution_backward_filter" in label for label in graph.operations)
    forwards = any("convolution_forward" in label for label in graph.operations)
    weights = any("batch_norm_backward_weights" in label for label in graph.operations)
    virtual = {t.dtype for t in graph.tensors.values() if t.virtual and not t.dtype.endswith("boolean")}
    if filters and prologue and dtypes != {"float16"}:
        rules.append("dtype: scale, bias and ReLU before a filter gradient are fused for float16 only")
    if forwards and prologue and "bfloat16" in dtypes and virtual - {"bfloat16"}:
        rules.append(
            "dtype: what is fused before a bfloat16 convolution needs bfloat16 intermediates; use "
            "Graph(intermediate='bfloat16')"
        )
    if weights and len(graph.operations) > 1 and dtypes != {"float16"}:
        rules.append("dtype: batch norm weight gradients are fused for float16 only")
    if weights and len(graph.operations) == 1:
        rules.append("pattern: batch norm weight gradients are fused behind a data gradient with ReLU's, never alone")
    if statistics and len(graph.operations) == 1:
        rules.append("pattern: statistics are fused behind a convolution, never alone")
    version = libraries.load().version
    if version < 90800 and weights:
        rules.append(
            f"version: batch norm weight gradients are fused from cuDNN 9.8; this is {libraries.version_text(version)}"
        )
    alone = len(graph.operations) == 1
    contracts = any(word in graph.operations[0] for word in ("convolution", "matmul"))
    # Per-channel numbers, and what a reduction sums, are of another dtype where all is well; a 1x1 filter is none.
    mixed = {t.dtype for t in (pointers if alone and contracts else images) if "float" in t.dtype}
    if len(mixed) > 1:
        what = graph.operations[0] if alone else "a fusion"
        rules.append(f"dtype: the tensors of {what} mix {', '.join(sorted(mixed))}")
    return rules


def _sm(capability: int) -> str:
    return f"{capability // 100}.{capability % 100 // 10}"


# --- plans ----------------------------------------------------------------------------------------------------------

_PLAN_KEYS = ("cudnnVersion", "schemaVersion", "operationGraph", "GPUProfile", "engine")
_PACKS = 64  # variant packs that a plan keeps, of 4 to 10 KB each: more than a program has sets of operands for it
_BUILD_THREADS = 16
_MOST_NOTES = 64  # room for more notes than there are
_OWN_CHOICE = -1  # the value of a knob that is left to cuDNN, also in a plan's JSON


class ExecutionPlan:
    """A graph compiled for one engine configuration and one GPU model.

    Attributes:
        workspace: the bytes of device memory that a run needs.
        tag: a short text of engine and knobs.
        uids: the tensors that need a pointer at each run, in the order of `run`.
        build_ms: milliseconds of the host that cuDNN took to build or restore it.
    """

    def __init__(
        self, backend: Backend, uids: tuple[int, ...], scalars: Mapping[int, Any], tag: str, build_ms: float
    ) -> None:
        """Takes over a finalized plan; `EngineConfig.plan` and `from_json` make it."""
        self._backend = backend
        self.uids = uids
        self.tag = tag
        self.build_ms = build_ms
        self.workspace = int(backend.get_one("EXECUTION_PLAN_WORKSPACE_SIZE"))
        # The arrays that the scalars' addresses point into; see Note [by value].
        self._scalars = dict(scalars)
        self._all_uids = (ctypes.c_int64 * (len(uids) + len(scalars)))(*uids, *scalars)
        scalar_addresses = tuple(array.ctypes.data for array in scalars.values())
        self._raw = _raw_functions()
        self._pointer: Any = backend.descriptor  # None when closed
        # See Note [variant packs].
        self._packs: collections.OrderedDict[tuple[tuple[int, ...], int], _Pack] = collections.OrderedDict()
        self._addresses: Any = (ctypes.c_void_p * len(self._all_uids))(*[0] * len(uids), *scalar_addresses)
        self._given = slice(len(uids))
        self._scratch_address = ctypes.c_void_p()
        self._count = ctypes.c_int64.from_param(len(self._all_uids))
        arguments: tuple[Any, ...] = (self._all_uids, self._addresses, self._scratch_address)
        self._references = tuple([ctypes.byref(argument) for argument in arguments])
        # See Note [exit] of flcuda.cudnn.resources.
        weakref.finalize(self, _destroy_packs, self._packs, self._raw.destroy).atexit = False

    @property
    def descriptor(self) -> Any:
        """The raw cudnnBackendDescriptor_t; borrowed."""
        return self._backend.descriptor

    def close(self) -> None:
        """Gives the plan up. A CUDA graph captured from it may need it still; see Note [capture]."""
        self._pointer = None
        _destroy_packs(self._packs, self._raw.destroy)
        self._backend.close()

    # JSON

    def to_json(self) -> str:
        """Gives cuDNN's own JSON of the plan; see Note [JSON].

        Returns:
            The text.

        Raises:
            CudnnError: this engine's plans have none.
        """
        text: bytes = self._backend.get_one("EXECUTION_PLAN_JSON_REPRESENTATION")
        return text.decode()

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """The names of the kernels that were compiled for it; empty where cuDNN tells none."""
        try:
            content = json.loads(self.to_json())
        except CudnnError:
            return ()
        kernels = content["engine"].get("payload", {}).get("kernels", [])
        return tuple(kernel["kernelName"] for kernel in kernels if "kernelName" in kernel)

    @staticmethod
    def from_json(
        text: str,
        handle: Handle | None = None,
        device: "DeviceProperties | None" = None,
        *,
        scalars: Mapping[int, float] | None = None,
    ) -> "ExecutionPlan":
        """Restores a plan. The text may hold compiled code: take it only from where you would take a program.

        Args:
            text: what `to_json` gave, under the same cuDNN version and for the same GPU model.
            handle: the cuDNN handle of the GPU here; borrowed.
            device: the properties of another GPU; borrowed. One of the two.
            scalars: the values of scalars by value, by uid; the text does not hold them.

        Returns:
            The finalized plan.

        Raises:
            CudnnError: the text is damaged (status 2000), of another cuDNN version (1002) or schema (1003).
            CudnnNotSupportedError: it names an engine that there is not (3000), or another GPU (3007).
            TypeError: the text is none.
            ValueError: neither handle nor device was given, or not the scalars of the plan.
        """
        if not isinstance(text, str):
            raise TypeError(f"text: expected a str, got {type(text).__name__}")
        if handle is None and device is None:
            raise ValueError(
                "handle, device: give one; without device properties cuDNN crashes when it restores a plan"
            )
        content = _plan_content(text)
        _refuse_fatal(_fatal_plan(content))
        backend = Backend("EXECUTION_PLAN")
        _attach(backend, handle, device)
        backend.set("EXECUTION_PLAN_JSON_REPRESENTATION", text.encode())
        start = time.perf_counter()
        try:
            backend.finalize("a plan restored from JSON")
        except CudnnError as error:
            raise _restore_error(error, content, device) from error
        build_ms = (time.perf_counter() - start) * 1e3
        tensors = [entry for entry in content["operationGraph"]["tensors"] if not entry.get("isVirtual")]
        uids = tuple(int(entry["name"]) for entry in tensors if not entry.get("isByValue"))
        wanted = {int(entry["name"]): entry for entry in tensors if entry.get("isByValue")}
        values = dict(scalars or {})
        if set(values) != set(wanted):
            raise ValueError(f"scalars: the plan has the scalars {sorted(wanted)} and {sorted(values)} were given")
        arrays = {
            uid: np.array([values[uid]], dtype=_SCALARS[_json_dtype(entry)]) for uid, entry in sorted(wanted.items())
        }
        engine = content["engine"]
        knobs = {
            name.removeprefix("CUDNN_KNOB_TYPE_").lower(): value
            for name, value in engine.get("knobChoices", {}).items()
            if value != _OWN_CHOICE
        }
        tag = _tag(engine["engineId"], sorted(knobs.items()), int(engine.get("targetSMcount", 0)))
        described = {int(entry["name"]): _json_tensor(entry) for entry in tensors} if _CHECKS else {}
        return _plan(backend, tuple(sorted(uids)), arrays, tag, build_ms, described, frozenset())

    # running

    def execute(self, handle: Handle, pointers: Mapping[int, Any], workspace: Any = 0) -> None:
        """Runs the plan on the handle's stream.

        Args:
            handle: the handle that the plan was built with, or another one of that device.
            pointers: for each uid of `uids` a device address: an int, or a CuPy array. What is at them has the shape,
                strides and alignment of the tensor; nothing checks that.
            workspace: the address of `workspace` bytes of device memory, or a CuPy array; 0 when none is needed.

        Raises:
            CudnnError: cuDNN refuses.
            ValueError: a pointer or the workspace is missing; names it.
        """
        self.run(handle, self._ordered(pointers), _address(workspace))

    def run(self, handle: Handle, pointers: tuple[int, ...], workspace: int = 0) -> None:
        """Runs the plan as `execute` does, with pointers in the order of `uids`: the fastest form.

        Args:
            handle: as for `execute`.
            pointers: device addresses in the order of `uids`.
            workspace: the address of `workspace` bytes of device memory; 0 when none is needed.

        Raises:
            CudnnError: cuDNN refuses.
            ValueError: a pointer or the workspace is missing.
        """
        key = (pointers, workspace)
        pack = self._packs.get(key) or self._new_pack(key)
        status = self._raw.execute(handle._as_parameter_, self._pointer, pack.address)
        if status:
            raise libraries.failure("cudnnBackendExecute", status)

    def __call__(self, *arrays: Any) -> None:
        """Runs the plan on this thread's handle and CuPy's current stream, with a workspace of the current allocator.

        Args:
            arrays: CuPy arrays on the current device, one for each of `uids`, in that order. What is in them has the
                shape, strides and alignment of the tensor; nothing checks that.

        Raises:
            CudnnError: cuDNN refuses.
            MemoryError: there is no memory for the workspace.
            ValueError: there are too many or too few arrays, or one has no memory.
        """
        pointers = tuple([array.data.ptr for array in arrays])
        if self.workspace:
            # CuPy's pool gives a block that was freed to the same stream only, so it may go as soon as the work is in
            # the stream.
            scratch = devices.cupy().cuda.alloc(self.workspace)
            self.run(resources.handle(), pointers, scratch.ptr)
        else:
            self.run(resources.handle(), pointers, 0)

    def launcher(self, handle: Handle) -> Callable[[tuple[int, ...]], None] | None:
        """Gives what runs the plan as a call of it does, for one handle and by addresses: one frame instead of three.

        Args:
            handle: the handle of the thread and device on which it will be called, with that device current; borrowed.

        Returns:
            A function of device addresses in the order of `uids`, which raises what a call of the plan raises. None
            where each call is checked, for which addresses are too little; see Note [FLCUDA_CHECK].
        """
        cuda = devices.cupy().cuda
        current_stream, alloc = cuda.get_current_stream, cuda.alloc
        packs, new_pack, size = self._packs, self._new_pack, self.workspace
        execute = self._raw.execute
        on, plan = (
            ctypes.c_void_p.from_param(ctypes.cast(each, ctypes.c_void_p).value)
            for each in (handle._as_parameter_, self.descriptor)
        )

        def launch(pointers: tuple[int, ...]) -> None:
            if handle._pointer is None:
                raise ValueError("the cuDNN handle of the plan is closed")
            if current_stream().ptr != handle._stream:
                handle.use_current_stream()
            if size:
                scratch = alloc(size)  # kept until the work is in the stream
                key = (pointers, scratch.ptr)
            else:
                key = (pointers, 0)
            pack = packs.get(key) or new_pack(key)
            status = execute(on, plan, pack.address)
            if status:
                raise libraries.failure("cudnnBackendExecute", status)

        return launch

    def populate_cuda_graph(
        self, handle: Handle, cuda_graph: Any, pointers: Mapping[int, Any], workspace: Any = 0
    ) -> None:
        """Fills an empty CUDA graph with the plan's work, without capturing.

        Args:
            handle: as for `execute`.
            cuda_graph: the cudaGraph_t, an int.
            pointers: as for `execute`.
            workspace: as for `execute`.

        Raises:
            CudnnNotSupportedError: the engine has not the note "supports_cuda_graph_native_api", or cuDNN is older
                than 9.5.
            ValueError: a pointer or the workspace is missing.
        """
        pack = self._pack(self._ordered(pointers), _address(workspace))
        bindings.cudnnBackendPopulateCudaGraph(handle, self.descriptor, pack, cuda_graph)

    def update_cuda_graph(
        self, handle: Handle, cuda_graph: Any, pointers: Mapping[int, Any], workspace: Any = 0
    ) -> None:
        """Gives new pointers to a CUDA graph that `populate_cuda_graph` filled.

        Args:
            handle: as for `execute`.
            cuda_graph: the cudaGraph_t, an int.
            pointers: as for `execute`.
            workspace: as for `execute`.

        Raises:
            CudnnError: the graph is not of this plan.
            ValueError: a pointer or the workspace is missing.
        """
        pack = self._pack(self._ordered(pointers), _address(workspace))
        bindings.cudnnBackendUpdateCudaGraph(handle, self.descriptor, pack, cuda_graph)

    def _ordered(self, pointers: Mapping[int, Any]) -> tuple[int, ...]:
        try:
            return tuple([_address(pointers[uid]) for uid in self.uids])
        except KeyError as error:
            raise ValueError(f"pointers: there is none for the tensor with uid {error.args[0]}") from None

    def _pack(self, addresses: tuple[int, ...], scratch: int) -> "_Pack":
        """Gives the variant pack of these pointers, kept or new."""
        key = (addresses, scratch)
        return self._packs.get(key) or self._new_pack(key)

    def _new_pack(self, key: tuple[tuple[int, ...], int]) -> "_Pack":
        """Makes the variant pack of pointers and a workspace; see Note [variant packs]."""
        addresses, scratch = key
        if len(addresses) != len(self.uids) or 0 in addresses or (self.workspace and not scratch):
            self._refuse(addresses)
        if self._pointer is None:
            raise ValueError(f"this {self._backend.kind} descriptor is closed")
        packs = self._packs
        create, put, finalize, _, destroy, _ = self._raw
        if len(packs) >= _PACKS:
            _, pack = packs.popitem(last=False)
            destroy(pack.address)
        else:
            pack = _Pack()
        self._addresses[self._given] = addresses
        uids, pointers, workspace = self._references
        count = self._count
        status = create(_PACK_KIND, pack.reference)
        if status:
            raise libraries.failure("cudnnBackendCreateDescriptor", status)
        address = pack.address
        status = put(address, _PACK_UIDS, _INT64, count, uids) or put(
            address, _PACK_POINTERS, _VOID_PTR, count, pointers
        )
        if scratch and not status:
            self._scratch_address.value = scratch
            status = put(address, _PACK_WORKSPACE, _VOID_PTR, _ONE, workspace)
        status = status or finalize(address)
        if status:
            error = libraries.failure("cudnnBackendFinalize", status)
            error.add_note(f"a variant pack with the pointers {addresses}")
            destroy(address)
            raise error
        packs[key] = pack
        return pack

    def _refuse(self, addresses: tuple[int, ...]) -> NoReturn:
        """Says what is missing."""
        if len(addresses) != len(self.uids):
            raise ValueError(f"pointers: {len(addresses)} for the {len(self.uids)} tensors {self.uids}")
        for uid, address in zip(self.uids, addresses, strict=True):
            if not address:
                raise ValueError(f"pointers: that of the tensor with uid {uid} is null")
        raise ValueError(f"workspace: the plan needs {self.workspace} bytes")

    def __repr__(self) -> str:
        return f"ExecutionPlan({self.tag}, workspace={self.workspace})"


# --- checks before each run ------------------------------------------------------------------------------------------

_CHECKS = os.environ.get("FLCUDA_CHECK", "") not in ("", "0")


class _CheckedPlan(ExecutionPlan):
    """A plan that checks its pointers before each run; all plans are, under FLCUDA_CHECK=1. See Note [FLCUDA_CHECK]."""

    _tensors: Mapping[int, Tensor]
    _written: frozenset[int]

    def launcher(self, handle: Handle) -> None:  # noqa: ARG002
        return None

    def __call__(self, *arrays: Any) -> None:
        self._check_arrays(dict(zip(self.uids, arrays, strict=False)))
        super().__call__(*arrays)

    def execute(self, handle: Handle, pointers: Mapping[int, Any], workspace: Any = 0) -> None:
        self._check_arrays(pointers)
        if self.workspace and hasattr(workspace, "data"):
            memory.check_array(self._scratch(_address(workspace)), workspace)
        super().execute(handle, pointers, workspace)

    def run(self, handle: Handle, pointers: tuple[int, ...], workspace: int = 0) -> None:
        # A new pack finds missing pointers, in its own words.
        self._pack(pointers, workspace)
        regions = [self._region(uid, address) for uid, address in zip(self.uids, pointers, strict=True)]
        if self.workspace:
            regions.append(self._scratch(workspace))
        memory.check_regions(regions)
        super().run(handle, pointers, workspace)

    def _check_arrays(self, arrays: Mapping[int, Any]) -> None:
        for uid, array in arrays.items():
            if uid in self._tensors and hasattr(array, "data"):
                memory.check_array(self._region(uid, _address(array)), array)

    def _region(self, uid: int, address: int) -> memory.Region:
        tensor = self._tensors[uid]
        bits = _DATA_TYPES[tensor.dtype].bits
        return memory.Region(
            f"{self.tag}: tensor {tensor} (uid {uid})",
            address,
            tensor.extent,
            tensor.alignment,
            tensor.shape,
            tuple(step * bits // 8 for step in tensor.strides),
            bits // 8,
            uid in self._written,
        )

    def _scratch(self, address: int) -> memory.Region:
        size = self.workspace
        return memory.Region(f"{self.tag}: the workspace", address, size, 1, (size,), (1,), 1, written=True)


def _plan(
    backend: Backend,
    uids: tuple[int, ...],
    scalars: Mapping[int, Any],
    tag: str,
    build_ms: float,
    tensors: Mapping[int, Tensor],
    written: frozenset[int],
) -> ExecutionPlan:
    """Makes the plan of a finalized descriptor, with checks where they are asked for."""
    if not _CHECKS:
        return ExecutionPlan(backend, uids, scalars, tag, build_ms)
    made = _CheckedPlan(backend, uids, scalars, tag, build_ms)
    made._tensors = {uid: tensors[uid] for uid in uids}
    made._written = written
    return made


def _json_tensor(entry: Mapping[str, Any]) -> Tensor:
    """Describes a tensor of a plan's JSON."""
    uid = int(entry["name"])
    dtype = next(word for word, kind in _DATA_TYPES.items() if kind.code.name == entry["dataType"])
    return Tensor(uid, str(uid), tuple(entry["dim"]), tuple(entry["stride"]), dtype, int(entry["ptrAlignment"]))


# Arguments of raw functions are made once and need no conversion at the call.
_PACK_KIND = ctypes.c_int.from_param(bindings.CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)
_PACK_UIDS = ctypes.c_int.from_param(bindings.CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS)
_PACK_POINTERS = ctypes.c_int.from_param(bindings.CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS)
_PACK_WORKSPACE = ctypes.c_int.from_param(bindings.CUDNN_ATTR_VARIANT_PACK_WORKSPACE)
_INT64 = ctypes.c_int.from_param(bindings.CUDNN_TYPE_INT64)
_VOID_PTR = ctypes.c_int.from_param(bindings.CUDNN_TYPE_VOID_PTR)
_ONE = ctypes.c_int64.from_param(1)
_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)
_PARTS = {
    kind: ctypes.c_int.from_param(getattr(bindings, f"CUDNN_BACKEND_{kind}_DESCRIPTOR"))
    for kind in ("ENGINE", "KNOB_CHOICE")
}
_ENGINE_OF = ctypes.c_int.from_param(bindings.CUDNN_ATTR_ENGINECFG_ENGINE)
_ENGINE_INDEX = ctypes.c_int.from_param(bindings.CUDNN_ATTR_ENGINE_GLOBAL_INDEX)
_CHOICES_OF = ctypes.c_int.from_param(bindings.CUDNN_ATTR_ENGINECFG_KNOB_CHOICES)
_CHOICE_TYPE = ctypes.c_int.from_param(bindings.CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE)
_CHOICE_VALUE = ctypes.c_int.from_param(bindings.CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE)
_DESCRIPTOR = ctypes.c_int.from_param(bindings.CUDNN_TYPE_BACKEND_DESCRIPTOR)
_KNOB_TYPE = ctypes.c_int.from_param(bindings.CUDNN_TYPE_KNOB_TYPE)


class _RawFunctions(NamedTuple):
    """Functions of cuDNN without the bound functions' checks of arguments, each of which returns its status.

    They have no argtypes, which cost as much again as a call: each argument must be an object of ctypes of the right
    type, best one that its `from_param` or `byref` gave.
    """

    create: Any
    set_attribute: Any
    finalize: Any
    execute: Any
    destroy: Any
    get_attribute: Any


@functools.cache
def _raw_functions() -> _RawFunctions:
    library = libraries.load()
    return _RawFunctions(
        *(
            library.function(f"cudnnBackend{name}")
            for name in (
                "CreateDescriptor",
                "SetAttribute",
                "Finalize",
                "Execute",
                "DestroyDescriptor",
                "GetAttribute",
            )
        )
    )


@contextlib.contextmanager
def _parts(configuration: Backend, attribute: Any, kind: str, room: int) -> Iterator[list[ctypes.c_void_p]]:
    """Reads descriptors out of a configuration, by raw functions: heuristics list thousands in a search.

    Args:
        configuration: finalized; alive until the end, see Note [order of frees].
        attribute: of it.
        kind: of the descriptors, a key of `_PARTS`.
        room: how many there may be.

    Yields:
        Those that cuDNN delivered; destroyed at the end.
    """
    raw = _raw_functions()
    array = (ctypes.c_void_p * room)()
    made = 0
    try:
        for place in range(room):
            _succeed("CreateDescriptor", raw.create(_PARTS[kind], ctypes.byref(array, place * _POINTER_BYTES)))
            made += 1
        count = ctypes.c_int64()
        given = configuration.descriptor
        _succeed(
            "GetAttribute",
            raw.get_attribute(given, attribute, _DESCRIPTOR, ctypes.c_int64(room), ctypes.byref(count), array),
        )
        yield [ctypes.c_void_p(address) for address in array[: min(room, count.value)]]
    finally:
        for address in array[:made]:
            raw.destroy(ctypes.c_void_p(address))


def _engine_index(configuration: Backend) -> int:
    """Reads the number of a configuration's engine."""
    with _parts(configuration, _ENGINE_OF, "ENGINE", 1) as (engine,):
        return _number(engine, _ENGINE_INDEX, _INT64, ctypes.c_int64())


def _chosen_knobs(configuration: Backend, room: int) -> dict[str, int]:
    """Reads the values of a configuration's knobs, by the words of their types."""
    if room == 0:
        return {}
    with _parts(configuration, _CHOICES_OF, "KNOB_CHOICE", room) as choices:
        return {
            _knob_word(_number(choice, _CHOICE_TYPE, _KNOB_TYPE, ctypes.c_int())): _number(
                choice, _CHOICE_VALUE, _INT64, ctypes.c_int64()
            )
            for choice in choices
        }


def _number(descriptor: ctypes.c_void_p, attribute: Any, kind: Any, value: Any) -> int:
    """Reads an attribute that is one number, by a raw function, into a value of its type."""
    count = ctypes.c_int64()
    get = _raw_functions().get_attribute
    _succeed("GetAttribute", get(descriptor, attribute, kind, _ONE, ctypes.byref(count), ctypes.byref(value)))
    return int(value.value)


def _succeed(name: str, status: int) -> None:
    """Raises for the status of a raw function that is not success."""
    if status:
        raise libraries.failure(f"cudnnBackend{name}", status)


class _Pack:
    """A variant pack, or the place for one; its plan creates and destroys it. See Note [variant packs].

    Attributes:
        address: the descriptor.
        reference: where create puts it.
    """

    __slots__ = ("address", "reference")

    def __init__(self) -> None:
        self.address = ctypes.c_void_p()
        self.reference = ctypes.byref(self.address)

    @property
    def _as_parameter_(self) -> Any:
        return bindings.cudnnBackendDescriptor_t.from_buffer(self.address)


def _destroy_packs(packs: dict[Any, _Pack], destroy: Callable[[Any], int]) -> None:
    while packs:
        destroy(packs.popitem()[1].address)


def _address(pointer: Any) -> int:
    if type(pointer) is int:
        return pointer
    memory = getattr(pointer, "data", pointer)
    address = getattr(memory, "ptr", memory)
    if isinstance(address, bool) or not hasattr(address, "__index__"):
        raise TypeError(f"pointer: expected a device address or a CuPy array, got {type(pointer).__name__}")
    return int(address)


def _refusal(status: int, text: str, name: str = "") -> CudnnError:
    return cudnn_error("cudnnBackendFinalize", status, text, name)


def _plan_content(text: str) -> dict[str, Any]:
    """Reads a plan's JSON and refuses what cuDNN would refuse without words or crash on."""
    bad = "CUDNN_STATUS_BAD_PARAM"
    try:
        content = json.loads(text)
    except ValueError as error:
        raise _refusal(_BAD_PARAM, f"the plan's JSON is damaged or cut short: {error}", bad) from None
    if not isinstance(content, dict) or not content.keys() >= set(_PLAN_KEYS):
        raise _refusal(_BAD_PARAM, f"the text is no plan: it has to have {', '.join(_PLAN_KEYS)}", bad)
    problem = _plan_problem(content)
    if problem:
        raise _refusal(_BAD_PARAM, f"the plan's JSON is damaged: {problem}", bad)
    version = libraries.load().version
    if content["cudnnVersion"] != version:
        raise _refusal(
            _VERSION_MISMATCH,
            f"the plan is of cuDNN {content['cudnnVersion']} and this is {version}; build it again",
            "CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH",
        )
    return content


def _restore_error(error: CudnnError, content: Mapping[str, Any], device: "DeviceProperties | None") -> CudnnError:
    """Says in words why cuDNN does not restore a plan; it gives a status and often no text."""
    engine = content["engine"].get("engineId")
    gpu = content["GPUProfile"].get("deviceName", "an unknown GPU")
    if error.status == _SERIALIZATION_MISMATCH:
        why = f"the plan's JSON has schema version {content['schemaVersion']}, which this cuDNN does not read"
    elif error.status == _ARCH_MISMATCH:
        other = device.name if device is not None else "the GPU here"
        why = f"the plan is for {gpu} and not for {other}"
    elif error.status // 1000 * 1000 == NOT_SUPPORTED:
        why = f"this cuDNN has no engine {engine} for the plan's graph on {gpu}"
    else:
        why = "the plan's JSON is damaged"
    return _refusal(error.status, f"{why}; build it again{f' ({error.text})' if error.text else ''}", error.name)


def _json_dtype(entry: Mapping[str, Any]) -> str:
    """Gives the word of a data type in a plan's JSON."""
    for word, kind in _DATA_TYPES.items():
        if kind.code.name == entry.get("dataType") and word in _SCALARS:
            return word
    raise _refusal(_BAD_PARAM, f"the plan's scalar {entry.get('name')} has the data type {entry.get('dataType')}")


def _fatal_plan(content: Mapping[str, Any]) -> str:
    """Says why a plan must not be restored; see Note [pooling]."""
    tensors = {entry["name"]: entry for entry in content["operationGraph"]["tensors"]}
    for node in content["operationGraph"]["nodes"]:
        if node.get("operation") != "CUDNN_BACKEND_OPERATION_RESAMPLE_BWD_DESCRIPTOR":
            continue
        try:
            dy, dx = (_json_tensor(tensors[node[role]]) for role in ("dY", "dX"))
            why = _fatal_pooling(node["mode"], dy, dx, "Idx" in node)
        except (LookupError, StopIteration, TypeError, ValueError):
            continue  # cuDNN refuses it
        if why:
            return f"the plan's {node['operation']}: {why}"
    return ""


def _plan_problem(content: Mapping[str, Any]) -> str:
    """Finds what makes cuDNN end the process: lists that are none, and names of tensors that are no numbers."""
    for key in ("operationGraph", "GPUProfile", "engine"):
        if not isinstance(content[key], dict):
            return f"{key} is no object"
    for key in ("tensors", "nodes"):
        entries = content["operationGraph"].get(key)
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            return f"operationGraph.{key} is no list of objects"
    names = set()
    for tensor in content["operationGraph"]["tensors"]:
        name = tensor.get("name")
        if not isinstance(name, str) or not re.fullmatch(r"[0-9]{1,18}", name):
            return f"the tensor name {name!r} is no number"
        names.add(name)
    for node in content["operationGraph"]["nodes"]:
        for role, value in node.items():
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and not text.startswith("CUDNN_") and text not in names:
                    return f"{role} of {node.get('operation')} names the tensor {text!r}, which there is not"
    if not isinstance(content["engine"].get("engineId"), int):
        return "engine.engineId is no number"
    if not isinstance(content["engine"].get("knobChoices", {}), dict):
        return "engine.knobChoices is no object"
    return ""
