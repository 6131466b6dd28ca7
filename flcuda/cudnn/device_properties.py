"""A GPU's properties as cuDNN's planner sees them: read from a GPU here, or of a GPU that is not here.

With them heuristics answer and plans are built for a GPU that this machine does not have; only running a plan needs it.
cuDNN takes and gives the properties as JSON. A *profile* is that JSON with a word on where it comes from; some GPUs'
profiles are shipped in the folder ``profiles`` beside this file. A profile that cuDNN read from a GPU says so; one
whose numbers were put together from documents says "constructed, not read" and names the source of each.

Note [filling]: each version of cuDNN wants the keys that it knows, and ignores others. So a profile read by one version
lacks keys that a later one wants. Which those are is asked of the loaded cuDNN itself: a key that it reads, it refuses
with a value of the wrong type. What it wants and the profile lacks is filled where there is a rule for it, and
reported; otherwise the error names it.
"""

import contextlib
import copy
import ctypes
import functools
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from flcuda.cudnn import bindings
from flcuda.cudnn import library as libraries
from flcuda.cudnn.resources import Handle, Owner
from flcuda.errors import NOT_SUPPORTED, CudnnError, LibraryNotFoundError, cudnn_error

ProfileSource = str | os.PathLike[str] | Mapping[str, Any]
"""Where a profile comes from: the name of a shipped one, a file, or the properties themselves."""

SINCE = 90800
"""The first cuDNN version with device properties, 9.8.0."""

_FOLDER = Path(__file__).with_name("profiles")
_VERSION = ".cudnn-"  # in a file's name, before the cuDNN version

_INT = 2**31 - 1
# What each key that cuDNN 9.28 knows must be: the largest whole number, three of them, or a text. cuDNN itself checks
# types only in part: it takes a grid of two numbers, or of fractions.
_LARGEST = {
    "regsPerBlock": _INT,
    "multiProcessorCount": _INT,
    "warpSize": _INT,
    "maxSharedMemoryPerBlock": _INT,
    "maxSharedMemoryPerBlockOptin": _INT,
    "reservedSharedMemoryPerBlock": _INT,
    "maxRegistersPerSM": _INT,
    "maxCtasPerSM": _INT,
    "maxThreadsPerBlock": _INT,
    "maxThreadsPerSM": _INT,
    "pciDeviceId": _INT,
    "isTccDriver": 1,
    "supportCoopLaunch": 1,
    "totalGlobalMem": 2**64 - 1,
    "smClockRateKHz": _INT,
    "memClockRateKHz": _INT,
    "l2CacheSize": _INT,
    "cudaDeviceId": _INT,
    "deviceVer": _INT,
    "driverVer": _INT,
    "oversizedSharedMemoryPerBlock": _INT,
    "memoryBusWidth": _INT,
}
_TRIPLES = ("maxGridSize", "maxBlockSize")
_TEXT = "deviceName"
KEYS = (*_TRIPLES, *_LARGEST, _TEXT)
"""The keys that are known here: all that cuDNN 9.28 wants."""


@dataclass(frozen=True)
class Profile:
    """Properties of a GPU and where they come from.

    Attributes:
        properties: what cuDNN takes, by its own keys; sizes in bytes, clocks in kHz, the bus width in bits, deviceVer
            the compute capability times 100.
        cudnn: the cuDNN version whose keys these are, such as "9.19.0"; empty when unknown.
        origin: "read", "constructed, not read", or another word on where it comes from; empty when unknown.
        sources: by key where its value comes from; "all" is every key without one of its own.
    """

    properties: Mapping[str, Any]
    cudnn: str = ""
    origin: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The GPU's name as the driver gives it, such as "NVIDIA H200"; of a profile without one what it is."""
        return str(self.properties.get(_TEXT, f"a GPU of deviceVer {self.properties.get('deviceVer', 'unknown')}"))

    def to_json(self) -> str:
        """Returns the text of a profile file."""
        fields = {"cudnn": self.cudnn, "origin": self.origin, "sources": dict(self.sources)}
        return json.dumps({**fields, "properties": dict(self.properties)}, indent=2) + "\n"


# --- reading and writing profiles -----------------------------------------------------------------------------------


def profiles() -> tuple[str, ...]:
    """Returns the names of the shipped profiles, such as "h200"."""
    return tuple(sorted({stem.partition(_VERSION)[0] for stem in _shipped()}))


@functools.cache
def _shipped() -> dict[str, Path]:
    """The shipped files by name, such as "l4", or "h200.cudnn-9.19" where there are several versions'."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.json"))}


def _versions(stem: str) -> tuple[int, ...]:
    """The cuDNN version in a file's name, such as (9, 19); () where there is none."""
    return tuple(int(number) for number in re.findall(r"\d+", stem.partition(_VERSION)[2]))


def _shipped_file(name: str) -> Path | None:
    """The file of a name; of several versions' the newest that is not newer than the loaded cuDNN."""
    files = _shipped()
    if name in files:
        return files[name]
    stems = sorted((stem for stem in files if stem.partition(_VERSION)[0] == name), key=_versions)
    if libraries.is_loaded():
        version = libraries.load().version
        loaded = (version // 10000, version // 100 % 100)
        stems = [stem for stem in stems if _versions(stem) <= loaded] or stems[:1]
    return files[stems[-1]] if stems else None


def read_profile(source: ProfileSource) -> Profile:
    """Reads a profile; needs neither a GPU nor cuDNN.

    Args:
        source: the name of a shipped profile (`profiles`; where one is shipped for several versions of cuDNN, the
            newest that is not newer than a cuDNN that is loaded, and "h200.cudnn-9.19" is that very one), a file, or a
            dict. A file or a dict is a profile as `Profile.to_json` writes it, or bare properties as cuDNN gives them.

    Returns:
        The profile. Keys may be missing: that depends on the cuDNN it is used with.

    Raises:
        OSError: the file cannot be read.
        TypeError: it is none of these, or a value is of the wrong type; names the key.
        ValueError: an unknown name (lists the names), a file that is no JSON object, or a value out of range.
    """
    if isinstance(source, Mapping):
        return _parsed(source, "profile")
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"profile: expected a name, a file or a dict, got {type(source).__name__}")
    path = _shipped_file(source) if isinstance(source, str) else Path(source)
    if path is None:
        path = Path(source)
        if path.suffix != ".json" and path.parent == Path() and not path.is_file():
            raise ValueError(
                f"profile: {source!r} is neither a file nor the name of a shipped profile: {', '.join(profiles())}"
            )
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a GPU profile: no JSON, or cut short: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a GPU profile: expected a JSON object, found {type(content).__name__}")
    return _parsed(content, str(path))


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _parsed(content: Mapping[str, Any], where: str) -> Profile:
    bare = "properties" not in content
    properties = content if bare else content["properties"]
    if not isinstance(properties, Mapping):
        raise TypeError(f"{where}: properties: expected an object, got {type(properties).__name__}")
    if not any(key in properties for key in KEYS):
        raise ValueError(f"{where}: not a GPU profile: it has none of cuDNN's keys ({', '.join(KEYS)})")
    for key, value in properties.items():
        _check(f"{where}: {key}", key, value)
    if bare:
        return Profile(dict(properties))
    texts = {name: content.get(name, "") for name in ("cudnn", "origin")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise TypeError(f"{where}: {name}: expected a text, got {text!r}")
    sources = content.get("sources", {})
    if not isinstance(sources, Mapping) or not all(isinstance(text, str) for text in sources.values()):
        raise TypeError(f"{where}: sources: expected texts by key, got {sources!r}")
    return Profile(dict(properties), texts["cudnn"], texts["origin"], dict(sources))


def _check(where: str, key: Any, value: Any) -> None:
    """Refuses a value of the wrong type or range; a key that is unknown here may be a newer cuDNN's."""
    if not isinstance(key, str):
        raise TypeError(f"{where}: expected a text as key, got {key!r}")
    if key == _TEXT:
        if not isinstance(value, str):
            raise TypeError(f"{where}: expected a text, got {value!r}")
        if not value:
            raise ValueError(f"{where}: is empty")
    elif key in _TRIPLES:
        if not isinstance(value, list | tuple):
            raise TypeError(f"{where}: expected three whole numbers, got {value!r}")
        if len(value) != 3:
            raise ValueError(f"{where}: expected three whole numbers, got {value!r}")
        for number in value:
            _check_number(where, number, _INT)
    elif key in _LARGEST:
        _check_number(where, value, _LARGEST[key])
    else:
        try:
            json.dumps({key: value}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{where}: {value!r} is no JSON: {error}") from error


def _check_number(where: str, value: Any, largest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{where}: expected a whole number, got {value!r}")
    if not 0 <= value <= largest:
        raise ValueError(f"{where}: {value} is outside 0 to {largest}")


def write_profile(profile: Profile, path: str | os.PathLike[str]) -> bool:
    """Writes a profile's file. It appears whole or not at all.

    Args:
        profile: what to write.
        path: the file; its folder must exist.

    Returns:
        True when it was written, False when the file has the same properties already.

    Raises:
        FileExistsError: the file exists and is not the same; it is left as it is.
        OSError: the file cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(profile.to_json(), encoding="utf-8")
        _publish(temporary, target)
    except FileExistsError:
        with contextlib.suppress(OSError, TypeError, ValueError):
            if read_profile(target).properties == json.loads(profile.to_json())["properties"]:
                return False
        raise FileExistsError(f"{target} exists and is not this profile; it is left as it is") from None
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _publish(temporary: Path, target: Path) -> None:
    try:
        # Unlike a rename it fails where there is a file.
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:
        # A file system without hard links. Between these two lines another writer could be overwritten.
        if os.path.lexists(target):
            raise FileExistsError from None
        temporary.replace(target)


# --- the descriptor -------------------------------------------------------------------------------------------------


class DeviceProperties(Owner):
    """A finalized CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR: a GPU for heuristics and plans, here or not.

    It can be passed wherever the descriptor is wanted and is destroyed as every owner is. It needs cuDNN 9.8 or newer
    and the driver's libcuda.so.1, which loads without a GPU too.
    """

    __slots__ = ("_filled", "_profile")

    def __init__(self, attribute: int, attribute_type: int, count: int, elements: Any) -> None:
        """Makes one from an attribute of the descriptor; `of_handle` and `from_profile` are what is mostly wanted.

        Args:
            attribute: a CUDNN_ATTR_DEVICEPROP_ name.
            attribute_type: its CUDNN_TYPE_.
            count: the number of elements.
            elements: them, as C wants them; read, not kept.

        Raises:
            CudnnError: cuDNN refuses it, or is older than 9.8 (CudnnNotSupportedError).
            LibraryNotFoundError: there is no cuDNN or no libcuda.so.1.
        """
        library = libraries.load()
        if library.version < SINCE:
            text = f"device properties came with cuDNN 9.8.0; this is cuDNN {library.version_text} of {library.path}"
            raise cudnn_error("cudnnBackendFinalize", NOT_SUPPORTED, text, "CUDNN_STATUS_NOT_SUPPORTED")
        pointer = bindings.cudnnBackendDescriptor_t()
        bindings.cudnnBackendCreateDescriptor(bindings.CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, ctypes.byref(pointer))
        super().__init__(pointer, bindings.cudnnBackendDestroyDescriptor)
        try:
            bindings.cudnnBackendSetAttribute(pointer, attribute, attribute_type, count, elements)
            _finalize(pointer)
            properties = json.loads(_json_of(pointer))
        except BaseException:
            self.close()
            raise
        self._profile = Profile(properties, library.version_text)
        self._filled: tuple[str, ...] = ()

    @classmethod
    def of_handle(cls, handle: Handle) -> Self:
        """Reads the properties of the GPU that is here.

        Args:
            handle: a cuDNN handle on it; borrowed, and not needed any more afterwards.

        Returns:
            The properties.

        Raises:
            CudnnError: as the class.
            ValueError: the handle is closed.
        """
        pointers = (bindings.cudnnHandle_t * 1)(handle._as_parameter_)
        found = cls(bindings.CUDNN_ATTR_DEVICEPROP_HANDLE, bindings.CUDNN_TYPE_HANDLE, 1, pointers)
        library = found._profile.cudnn
        source = f"CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION of an {found.name} by cuDNN {library}"
        found._profile = Profile(found.profile, library, "read", {"all": source})
        return found

    @classmethod
    def from_profile(cls, source: ProfileSource) -> Self:
        """Makes the properties of a GPU that need not be here.

        Keys that the loaded cuDNN wants and the profile lacks are filled where that is possible: see `filled`.

        Args:
            source: the name of a shipped profile, a file or a dict; see `read_profile`.

        Returns:
            The properties.

        Raises:
            CudnnError: as the class, and for a GPU that the loaded cuDNN does not know.
            OSError, TypeError: as `read_profile`.
            ValueError: as `read_profile`, and for a missing key that cannot be filled; names the keys.
        """
        profile = read_profile(source)
        if isinstance(source, str):
            # Once more: a name may have files of several versions, and only loading tells which is wanted.
            libraries.load()
            profile = read_profile(source)
        properties = dict(profile.properties)
        try:
            filled = _fill(properties)
            found = cls._of_json(properties)
        except CudnnError as error:
            error.add_note(
                f"cuDNN {libraries.load().version_text} does not take the profile of {profile.name} (deviceVer "
                f"{properties.get('deviceVer')}), which is of cuDNN {profile.cudnn or 'an unknown version'}"
            )
            raise
        version = found._profile.cudnn
        sources = {**profile.sources, **dict.fromkeys(filled, f"filled, not read, for cuDNN {version}")}
        origin = f"{profile.origin}, with keys filled" if filled and profile.origin else profile.origin
        found._profile = Profile(found.profile, version, origin, sources)
        found._filled = filled
        return found

    @classmethod
    def _of_json(cls, properties: Mapping[str, Any]) -> Self:
        text = json.dumps(properties).encode()
        attribute = bindings.CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION
        # With the length of the text: cuDNN wants no closing zero.
        return cls(attribute, bindings.CUDNN_TYPE_CHAR, len(text), (ctypes.c_char * len(text)).from_buffer_copy(text))

    @property
    def descriptor(self) -> Any:
        """The cudnnBackendDescriptor_t; borrowed.

        Raises:
            ValueError: it is closed.
        """
        return self._as_parameter_

    @property
    def name(self) -> str:
        """The GPU's name as the driver gives it, such as "NVIDIA H200"."""
        return self._profile.name

    @property
    def profile(self) -> dict[str, Any]:
        """The properties as cuDNN has them, by cuDNN's keys; a copy."""
        return copy.deepcopy(dict(self._profile.properties))

    @property
    def filled(self) -> tuple[str, ...]:
        """The keys that the loaded cuDNN wants, the profile lacked, and `from_profile` filled."""
        return self._filled

    @property
    def origin(self) -> str:
        """Where the profile comes from: "read", "constructed, not read", ...; empty when unknown."""
        return self._profile.origin

    def write_profile(self, path: str | os.PathLike[str]) -> bool:
        """Writes the profile's file; see the function `write_profile`."""
        return write_profile(self._profile, path)

    def __repr__(self) -> str:
        return f"DeviceProperties({self.name!r})"


def _finalize(pointer: Any) -> None:
    try:
        bindings.cudnnBackendFinalize(pointer)
    except CudnnError as error:
        if error.status == bindings.CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED and not libraries.mapped_files("libcuda.so"):
            raise LibraryNotFoundError(
                "cuDNN plans only where the driver's libcuda.so.1 can be loaded, and here is none; no GPU is needed: "
                "install NVIDIA's driver, or its library alone (Debian: libcuda1, Ubuntu: libnvidia-compute-*)"
            ) from error
        raise


def _json_of(pointer: Any) -> bytes:
    attribute = bindings.CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION
    count = ctypes.c_int64()
    bindings.cudnnBackendGetAttribute(pointer, attribute, bindings.CUDNN_TYPE_CHAR, 0, ctypes.byref(count), None)
    text = ctypes.create_string_buffer(count.value)
    bindings.cudnnBackendGetAttribute(
        pointer, attribute, bindings.CUDNN_TYPE_CHAR, count.value, ctypes.byref(count), text
    )
    return text.raw.rstrip(b"\0")


# --- filling --------------------------------------------------------------------------------------------------------


def _bus_width(properties: Mapping[str, Any]) -> int | None:
    """The bus width belongs to the model of GPU: it is taken from a shipped profile of the same name."""
    for path in _shipped().values():
        shipped = read_profile(path).properties
        if shipped[_TEXT] == properties.get(_TEXT) and "memoryBusWidth" in shipped:
            return int(shipped["memoryBusWidth"])
    return None


_RULES: dict[str, Callable[[Mapping[str, Any]], int | None]] = {
    # Of every compute capability that cuDNN 9 knows (CUDA C++ Programming Guide, technical specifications).
    "maxThreadsPerBlock": lambda _: 1024,
    "oversizedSharedMemoryPerBlock": lambda properties: properties.get("maxSharedMemoryPerBlockOptin"),
    "memoryBusWidth": _bus_width,
}
"""What fills a key; None where this profile does not let it be filled."""


def _fill(properties: dict[str, Any]) -> tuple[str, ...]:
    """Fills in place what the loaded cuDNN wants and returns the keys filled; see Note [filling]."""
    missing = [key for key in KEYS if key not in properties]
    if not missing:
        return ()
    known = {key: _RULES[key](properties) if key in _RULES else None for key in missing}
    complete = {**properties, **{key: [1, 1, 1] if key in _TRIPLES else known[key] or 1 for key in missing}}
    wanted = [key for key in missing if _is_read(key, complete)]
    unknown = [key for key in wanted if known[key] is None]
    if unknown:
        raise ValueError(
            f"profile: cuDNN {libraries.load().version_text} wants {', '.join(unknown)}, which the profile of "
            f"{Profile(properties).name} lacks and which cannot be derived from the rest: add it to the profile"
        )
    properties.update({key: known[key] for key in wanted})
    return tuple(wanted)


def _is_read(key: str, complete: Mapping[str, Any]) -> bool:
    """Whether the loaded cuDNN reads a key: then it refuses properties in which that key alone has a wrong type."""
    try:
        DeviceProperties._of_json({**complete, key: {}}).close()
    except CudnnError as error:
        if error.status != bindings.CUDNN_STATUS_BAD_PARAM:
            raise
        return True
    return False
