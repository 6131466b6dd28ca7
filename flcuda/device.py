"""Arrays and where they are: NumPy or CuPy, device, stream, workspace, layout, and DLPack in.

A CuPy array is on CUDA, a NumPy array on the CPU. Nothing here imports CuPy until an array or a caller asks for CUDA.
Streams and memory are the caller's: CuPy's current stream and CuPy's current allocator, never our own.

Shapes are logical, (N, C, *spatial), whatever the memory order; the layout of an array is its strides.

Note [connections]: CUDA sends the work of all streams through a few queues, 8 unless CUDA_DEVICE_MAX_CONNECTIONS says
otherwise, at most 32. Work that shares a queue waits for each other: nvImageCodec, which has many streams, then decodes
only between the graphs of a training (on an H200, 8,700 images a second reached the training; 11,100 with 16 queues,
14,050 with 32). CUDA reads the variable when a device is used first, so it is set before CuPy is asked for anything
here, where nvImageCodec is installed and the user has not set it. A GPU has queues for about a dozen such processes:
who starts more on one device, and is told that memory is out while it is not, sets the variable to 8.
"""

import contextlib
import functools
import importlib.util
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

import ml_dtypes
import numpy as np

from flcuda.errors import DeviceNotFoundError, FlcudaError

# NumPy and CuPy arrays share no static type that mypy could check.
Array = Any
Kind = Literal["cpu", "cuda"]

LAYOUTS = ("nchw", "nhwc")
DTYPES: dict[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""The four floating-point dtypes of flcuda by their words."""

CUDA_ERROR_INSUFFICIENT_DRIVER = 35
CUDA_ERROR_NO_DEVICE = 100
CUDA_ERROR_CAPTURE_IMPLICIT = 906
DLPACK_CPU = (1, 3)  # kDLCPU, kDLCUDAHost (pinned host memory)
DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged
INSTALL_CUPY = "pip install 'flcuda[cuda12]' (or 'flcuda[cuda13]')"
GIB = 1 << 30
CONNECTIONS = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")
"""See Note [connections]."""


@functools.cache
def _connect() -> None:
    """Once, as looking at the environment takes longer than all else of `cupy`. See Note [connections]."""
    # Not even the package that it is in, or something that stands in for it.
    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec("nvidia.nvimgcodec") is not None:
            os.environ.setdefault(*CONNECTIONS)


def cupy() -> ModuleType:
    """Imports CuPy.

    Returns:
        The module.

    Raises:
        DeviceNotFoundError: CuPy is not installed. A CuPy that is installed and broken raises its own ImportError.
    """
    _connect()
    try:
        import cupy as module
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise
        raise DeviceNotFoundError(f"CUDA needs CuPy, which is not installed: {INSTALL_CUPY}") from None
    return module  # type: ignore[no-any-return]


def is_cuda(a: object) -> bool:
    """Says whether an object is a CuPy array; never imports CuPy.

    Args:
        a: any object.

    Returns:
        True for a cupy.ndarray.
    """
    kind = getattr(sys.modules.get("cupy"), "ndarray", None)
    return kind is not None and isinstance(a, kind)


def array_module(*arrays: Array) -> ModuleType:
    """Gives the module whose functions work on these arrays.

    Args:
        *arrays: NumPy arrays or CuPy arrays; None is left out.

    Returns:
        numpy or cupy; numpy when there is no array at all.

    Raises:
        TypeError: the kinds are mixed, or one is no array.
    """
    cuda = host = False
    for a in arrays:
        if a is None:
            continue
        if is_cuda(a):
            cuda = True
        elif isinstance(a, np.ndarray | np.generic):
            host = True
        else:
            raise TypeError(f"expected NumPy or CuPy arrays, got {type(a).__name__}")
    if cuda and host:
        kinds = ", ".join("None" if a is None else "CuPy" if is_cuda(a) else "NumPy" for a in arrays)
        raise TypeError(f"NumPy and CuPy arrays are mixed ({kinds}); move them to one device first")
    return cupy() if cuda else np


def asarray(a: object, name: str = "array") -> Array:
    """Takes an array of any library without copying it.

    NumPy and CuPy arrays come back as they are. Any other object with ``__dlpack__`` is imported: one in host memory
    as NumPy, one in device memory as CuPy, with DLPack's stream handshake, so that CuPy's current stream waits for
    what the producer has still to do. bfloat16 arrives as ml_dtypes.bfloat16.

    Args:
        a: the array; borrowed. The result shares its memory and keeps it alive.
        name: the argument's name in messages.

    Returns:
        A NumPy or CuPy array.

    Raises:
        TypeError: a is a list, a number or another object that is no array; or its library does not let it out
            (a torch tensor that requires a gradient).
    """
    if isinstance(a, np.ndarray) or is_cuda(a):
        return a
    if not hasattr(a, "__dlpack__") or not hasattr(a, "__dlpack_device__"):
        raise TypeError(f"{name}: expected a NumPy or CuPy array or one with __dlpack__, got {type(a).__name__}")
    try:
        kind, _ = a.__dlpack_device__()
        if kind in DLPACK_CUDA:
            return _import_cuda(a)
        if kind in DLPACK_CPU:
            return _import_host(a)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{name}: this {type(a).__module__}.{type(a).__name__} cannot be imported: {error}") from error
    raise TypeError(f"{name}: a {type(a).__name__} on DLPack device type {int(kind)}; host and CUDA memory are known")


def _import_cuda(a: Any) -> Array:
    bits = _bfloat16_bits(a)
    # CuPy does the handshake: it passes its current stream to __dlpack__.
    imported = cupy().from_dlpack(a if bits is None else bits)
    return imported if bits is None else imported.view(ml_dtypes.bfloat16)


def _import_host(a: Any) -> Array:
    bits = _bfloat16_bits(a)
    if bits is not None:
        return np.from_dlpack(bits).view(ml_dtypes.bfloat16)
    if str(getattr(a, "dtype", "")) == "bfloat16":
        # NumPy knows no bfloat16 in DLPack; an array that names it so (JAX) hands it out through __array__.
        return np.asarray(a)
    return np.from_dlpack(a)


def _bfloat16_bits(a: Any) -> Any:
    """Views a torch bfloat16 tensor as int16, because NumPy's DLPack does not know bfloat16; None for anything else."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(a, torch.Tensor) or a.dtype != torch.bfloat16:
        return None
    if a.requires_grad:
        raise BufferError("it requires a gradient; use tensor.detach()")
    return a.view(torch.int16)


@dataclass(frozen=True, slots=True)
class Device:
    """A place for arrays: the CPU, or one CUDA device.

    Args:
        kind: "cpu" or "cuda".
        index: the CUDA device's number; 0 for the CPU.
    """

    kind: Kind
    index: int = 0

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"

    @property
    def xp(self) -> ModuleType:
        """The array module: numpy or cupy."""
        return np if self.kind == "cpu" else cupy()

    def use(self) -> AbstractContextManager[Any]:
        """Makes this CUDA device the current one inside a ``with``; does nothing for the CPU."""
        return contextlib.nullcontext() if self.kind == "cpu" else cupy().cuda.Device(self.index)


CPU = Device("cpu")


def device_of(a: Array) -> Device:
    """Gives the device on which an array is.

    Args:
        a: a NumPy or CuPy array.

    Returns:
        Its device.

    Raises:
        TypeError: a is no array.
    """
    if is_cuda(a):
        return Device("cuda", a.device.id)
    if isinstance(a, np.ndarray | np.generic):
        return CPU
    raise TypeError(f"expected a NumPy or CuPy array, got {type(a).__name__}")


def require_same_device(**named_arrays: Array) -> Device:
    """Checks that arrays are on one device.

    Args:
        **named_arrays: the arrays by their arguments' names; None is left out.

    Returns:
        That device; the CPU when there is no array.

    Raises:
        TypeError: one is no array.
        ValueError: they are on different devices; names each argument with its device.
    """
    found: dict[str, Device] = {}
    for name, a in named_arrays.items():
        if a is None:
            continue
        try:
            found[name] = device_of(a)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
    if len(set(found.values())) > 1:
        places = ", ".join(f"{name} is on {device}" for name, device in found.items())
        raise ValueError(f"all arrays must be on one device, but {places}")
    return next(iter(found.values()), CPU)


def cuda_missing_reason() -> str | None:
    """Says why there is no CUDA device here.

    "No CUDA here" is CuPy not being installed or exactly two answers of the CUDA runtime: no device, and a driver that
    is missing or older than the runtime. Everything else is a fault and is raised.

    Returns:
        The reason with what to do about it, or None when there is a CUDA device.

    Raises:
        Exception: what CuPy raised for any other reason.
    """
    try:
        module = cupy()
    except DeviceNotFoundError as error:
        return error.message
    runtime = module.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        if error.status == CUDA_ERROR_NO_DEVICE:
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
            hint = f"; CUDA_VISIBLE_DEVICES is {hidden!r}" if hidden is not None else ""
            return f"cudaErrorNoDevice (100): the driver is here and shows no GPU{hint}; see what nvidia-smi lists"
        if error.status == CUDA_ERROR_INSUFFICIENT_DRIVER:
            version = runtime.runtimeGetVersion()
            return (
                "cudaErrorInsufficientDriver (35): no NVIDIA driver, or one older than CuPy's CUDA runtime "
                f"{version // 1000}.{version % 1000 // 10}; install or update the driver"
            )
        raise
    return None if count > 0 else "the CUDA runtime counts 0 devices"


def cuda_available() -> bool:
    """Says whether there is a CUDA device, as ``cuda_missing_reason`` defines it.

    Returns:
        True when there is at least one.
    """
    return cuda_missing_reason() is None


def resolve(device: str | Device | None) -> Device:
    """Turns a device's word into a device that is here.

    Args:
        device: None or "auto" (CUDA when available, else the CPU), "cpu", "cuda" (CuPy's current device), "cuda:1", or
            a Device.

    Returns:
        The device.

    Raises:
        DeviceNotFoundError: it names a CUDA device that is not here.
        ValueError: it is another word.
        TypeError: it is no word.
    """
    if isinstance(device, Device):
        word = str(device)
    elif device is None:
        word = "auto"
    elif isinstance(device, str):
        word = device
    else:
        raise TypeError(f'device: expected "auto", "cpu", "cuda", "cuda:N" or a Device, got {type(device).__name__}')
    if word == "cpu":
        return CPU
    kind, colon, number = word.partition(":")
    if word != "auto" and (kind != "cuda" or (colon and not (number.isascii() and number.isdigit()))):
        raise ValueError(f'device: {word!r} is none of "auto", "cpu", "cuda", "cuda:N"')
    reason = cuda_missing_reason()
    if reason is not None:
        if word == "auto":
            return CPU
        raise DeviceNotFoundError(f"device {word!r} was asked for, and there is no CUDA here: {reason}")
    runtime = cupy().cuda.runtime
    if not colon:
        return Device("cuda", runtime.getDevice())
    count = runtime.getDeviceCount()
    if int(number) >= count:
        raise DeviceNotFoundError(
            f"device {word!r} was asked for, and there are {count} CUDA devices: 0 to {count - 1}"
        )
    return Device("cuda", int(number))


def current_stream() -> int:
    """Gives CuPy's current stream of this thread and device as a cudaStream_t; 0 is the default stream."""
    return int(cupy().cuda.get_current_stream().ptr)


def is_capturing() -> bool:
    """Says whether a CUDA graph is being captured where work on the current stream would end up in it, or break it.

    Returns:
        True while the current stream captures, or while it is the legacy default stream and another one captures;
        False when CuPy has not been imported.
    """
    if sys.modules.get("cupy") is None:
        return False
    module = cupy()  # waits for a thread that is still importing it
    runtime = module.cuda.runtime
    try:
        return bool(module.cuda.get_current_stream().is_capturing())
    except runtime.CUDARuntimeError as error:
        if error.status in (CUDA_ERROR_NO_DEVICE, CUDA_ERROR_INSUFFICIENT_DRIVER):
            return False
        if error.status == CUDA_ERROR_CAPTURE_IMPLICIT:
            return True
        raise
    except RuntimeError:
        # CuPy's word for a capture that an error has made invalid: it is one until it is ended.
        return True


def synchronize(device: Device) -> None:
    """Waits for all work on a device; returns at once for the CPU.

    Args:
        device: the device.
    """
    if device.kind == "cuda":
        cupy().cuda.Device(device.index).synchronize()


_empty_workspaces: dict[int, Array] = {}


def workspace(nbytes: int) -> Array:
    """Allocates scratch memory on the current CUDA device from CuPy's current allocator.

    Args:
        nbytes: its size in bytes; for 0 every call gets the same empty array.

    Returns:
        A cupy.ndarray of uint8, (nbytes,); owned by the caller.

    Raises:
        ValueError: nbytes is negative.
    """
    if nbytes < 0:
        raise ValueError(f"nbytes: {nbytes} is negative")
    module = cupy()
    if nbytes > 0:
        return module.empty(nbytes, np.uint8)
    index = module.cuda.runtime.getDevice()
    if index not in _empty_workspaces:
        _empty_workspaces[index] = module.empty(0, np.uint8)
    return _empty_workspaces[index]


@functools.lru_cache(maxsize=64)
def workspace_limit(device: Device) -> int:
    """Gives the largest workspace that a convolution may take unless the policy says otherwise.

    Args:
        device: where it would be.

    Returns:
        Bytes: 2 GiB, at most an eighth of the device's (for the CPU, the machine's) memory.
    """
    return min(2 * GIB, _total_memory(device) // 8)


def _total_memory(device: Device) -> int:
    if device.kind == "cuda":
        return int(cupy().cuda.runtime.getDeviceProperties(device.index)["totalGlobalMem"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.lru_cache(maxsize=64)
def _device_model(device: Device) -> dict[str, str | int]:
    if device.kind == "cpu":
        return {"name": _processor_name(), "cores": len(os.sched_getaffinity(0))}
    properties = cupy().cuda.runtime.getDeviceProperties(device.index)
    name = properties["name"]
    return {
        "name": name.decode() if isinstance(name, bytes) else str(name),
        "sm": 10 * int(properties["major"]) + int(properties["minor"]),
        "sm_count": int(properties["multiProcessorCount"]),
        # Whole GiB, because drivers keep a little for themselves, each another amount.
        "memory": f"{round(int(properties['totalGlobalMem']) / GIB)} GiB",
    }


def device_model(device: Device) -> dict[str, str | int]:
    """Describes a device by what a stored choice is keyed by: equal for equal machines, never a serial number or UUID.

    Args:
        device: the device.

    Returns:
        A new dict: "name", "sm" (90 for 9.0), "sm_count", "memory" ("140 GiB") for CUDA; "name", "cores" (those that
        this process may use) for the CPU.
    """
    return dict(_device_model(device))


def _processor_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            field, _, value = line.partition(":")
            if field.strip() in ("model name", "Processor", "cpu model") and value.strip():
                return " ".join(value.split())
    return os.uname().machine


def driver() -> dict[str, str | int]:
    """Gives the versions that are recorded with a measurement and are no part of a key.

    Returns:
        "numpy"; with CuPy imported also "cupy", "cuda_runtime" and "cuda_driver" (12090 for 12.9); with NVIDIA's kernel
        module loaded "nvidia_driver". What cannot be had is left out.
    """
    versions: dict[str, str | int] = {"numpy": np.__version__}
    if sys.modules.get("cupy") is not None:
        module = cupy()  # waits for a thread that is still importing it
        runtime = module.cuda.runtime
        versions["cupy"] = module.__version__
        versions["cuda_runtime"] = int(runtime.runtimeGetVersion())
        with contextlib.suppress(runtime.CUDARuntimeError):
            versions["cuda_driver"] = int(runtime.driverGetVersion())
    with contextlib.suppress(OSError):
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split("\n")[0].split()
        numbers = [word for word in words if word[0].isdigit() and "." in word]
        if numbers:
            versions["nvidia_driver"] = numbers[0]
    return versions


# --- what a CUDA graph does not hold ----------------------------------------------------------------------------------
#
# Note [host state]: a replay of a captured step runs no Python. What Python would have read (has a parameter a gradient
# already, to be added to?) was decided at the capture, and what it would have written (there are gradients now) is not.
# So while a step is recorded, each object with such state names itself by `touch` before it reads or writes it. The
# recording keeps what the state was then, and what it was at the end. A replay is right where the first is again the
# case, and sets the second. After a failed capture the first is put back. Leaves that the step itself makes, as it does
# each time, have no state of before. Nothing is recorded elsewhere, and a look whether it is costs a few dozen
# nanoseconds.


class Moment(int):
    """A number of the order in which things happened on the host: a replay gives new ones in the same order."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Written:
    """A part of a state that steps write and never read."""

    value: Any


class HostState(Protocol):
    """An object whose Python code decides by state on the host; see Note [host state]."""

    def host_state(self) -> tuple[Any, ...]:
        """Gives the state: words and numbers, compared by value; other objects, by identity; Moments; what is Written.

        Of Moments only the order counts.
        """
        ...

    def set_host_state(self, state: tuple[Any, ...]) -> None:
        """Takes over the state, but for what in it never changes in a step."""
        ...


class Recording:
    """What one run of a step read and wrote on the host; see Note [host state].

    Args:
        capturing: the run is captured in a CUDA graph, so that nothing on the device happens yet.

    Attributes:
        first: for each object its state when it was first touched.
        read: those whose first state was read, and not overwritten.
        after_launch: what is to be done on the host after each launch of the graph.
        kept: what must live as long as the graph.
        made: leaves that the run itself has made.
    """

    def __init__(self, capturing: bool) -> None:
        self.capturing = capturing
        self.first: dict[int, tuple[HostState, tuple[Any, ...]]] = {}
        self.read: set[int] = set()
        self.after_launch: list[Callable[[], None]] = []
        self.kept: dict[int, Any] = {}
        self.made: weakref.WeakSet[Any] = weakref.WeakSet()

    def undo(self) -> None:
        """Puts all states back to what they were at first."""
        for state_of, state in self.first.values():
            state_of.set_host_state(state)


recordings: dict[int, Recording] = {}
"""The recordings under way by thread; almost always empty."""


@contextlib.contextmanager
def recording(capturing: bool) -> Iterator[Recording]:
    """Records inside a ``with``, on this thread, what steps read and write on the host.

    Args:
        capturing: as for `Recording`.

    Raises:
        FlcudaError: this thread records already.
    """
    thread = threading.get_ident()
    if thread in recordings:
        raise FlcudaError("a step is being recorded on this thread already")
    found = recordings[thread] = Recording(capturing)
    try:
        yield found
    finally:
        del recordings[thread]


def is_recording_step() -> bool:
    """Says whether a step is being recorded on this thread."""
    return threading.get_ident() in recordings


def touch(state_of: HostState, *, reads: bool = True) -> None:
    """Says that an object's state on the host is about to be read or written; does nothing where nothing is recorded.

    Args:
        state_of: the object.
        reads: False where the state is overwritten whatever it is.
    """
    if not recordings:
        return
    found = recordings.get(threading.get_ident())
    if found is not None and id(state_of) not in found.first and state_of not in found.made:
        found.first[id(state_of)] = (state_of, state_of.host_state())
        if reads:
            found.read.add(id(state_of))


def made(leaf: Any) -> None:
    """Says that a leaf was just made, whose state on the host is no step's but this one's.

    Args:
        leaf: the object, which can be told by a weak reference.
    """
    found = recordings.get(threading.get_ident())
    if found is not None:
        found.made.add(leaf)


def after_launch(call: Callable[[], None]) -> None:
    """Does something on the host behind the work that was just queued: now, or after each launch of what is captured.

    Args:
        call: what to do, with the stream of the launch current.
    """
    found = recordings.get(threading.get_ident()) if recordings else None
    if found is not None and found.capturing:
        found.after_launch.append(call)
    else:
        call()


def keep_captured(owner: Any) -> None:
    """Keeps an object alive as long as the graph that is being captured by a recorded step, if there is one.

    Args:
        owner: of something whose device code or memory the graph uses.
    """
    if not recordings:
        return
    found = recordings.get(threading.get_ident())
    if found is not None and found.capturing:
        found.kept[id(owner)] = owner


# --- layout ---------------------------------------------------------------------------------------------------------


def memory_order(layout: str, ndim: int) -> tuple[int, ...]:
    """Lists the logical dimensions from the outermost to the innermost in memory.

    Args:
        layout: "nchw" or "nhwc".
        ndim: how many dimensions there are.

    Returns:
        (0, 1, 2, 3) for nchw and (0, 2, 3, 1) for nhwc of rank 4; below rank 3 the two are one.

    Raises:
        ValueError: another word.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: {layout!r} is neither 'nchw' nor 'nhwc'")
    if layout == "nchw" or ndim < 3:
        return tuple(range(ndim))
    return (0, *range(2, ndim), 1)


def contiguous_strides(shape: Sequence[int], layout: str = "nchw") -> tuple[int, ...]:
    """Gives the strides of a contiguous array.

    Args:
        shape: its logical shape; a dimension of 0 counts as 1.
        layout: "nchw" or "nhwc".

    Returns:
        Strides in elements, in the logical order of the dimensions.
    """
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(memory_order(layout, len(shape))):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


def element_strides(a: Array) -> tuple[int, ...]:
    """Gives an array's strides in elements, as cuDNN counts them.

    A dimension of size 1 may carry any stride; it gets the one that a contiguous array of the same memory order would
    have, so that equal layouts have equal strides.

    Args:
        a: a NumPy or CuPy array.

    Returns:
        One stride a dimension; negative or 0 where the array's own is.

    Raises:
        ValueError: a stride in bytes is no multiple of the element's size.
    """
    itemsize = a.itemsize
    shape = a.shape
    strides = []
    for dim, step in enumerate(a.strides):
        if step % itemsize and shape[dim] > 1:
            raise ValueError(f"strides: {step} bytes of dimension {dim} are no multiple of the {itemsize}-byte element")
        strides.append(step // itemsize)
    if 0 in shape:
        return contiguous_strides(shape)
    if 1 not in shape:
        return tuple(strides)
    wide = [dim for dim, size in enumerate(shape) if size > 1]
    for layout in LAYOUTS:
        plain = contiguous_strides(shape, layout)
        if all(strides[dim] == plain[dim] for dim in wide):
            return plain
    # A part of a larger array: each dimension of size 1 takes the extent of what lies inside it.
    for layout in LAYOUTS:
        order = memory_order(layout, len(shape))
        steps = [abs(strides[dim]) for dim in order if shape[dim] > 1]
        if steps == sorted(steps, reverse=True):
            break
    else:
        order = memory_order("nchw", len(shape))
    extent = 1
    for dim in reversed(order):
        if shape[dim] == 1:
            strides[dim] = extent
        else:
            extent = max(extent, abs(strides[dim]) * shape[dim])
    return tuple(strides)


def memory_layout(a: Array) -> Literal["nchw", "nhwc", "strided"]:
    """Names an array's layout.

    Args:
        a: a NumPy or CuPy array of logical shape (N, C, *spatial).

    Returns:
        "nchw" when it is C-contiguous (also where dimensions of size 1 would allow both), "nhwc" when it is contiguous
        with the channels innermost, else "strided".
    """
    if a.flags.c_contiguous:
        return "nchw"
    if a.ndim >= 3:
        plain = contiguous_strides(a.shape, "nhwc")
        itemsize = a.itemsize
        if all(size == 1 or step == itemsize * p for size, step, p in zip(a.shape, a.strides, plain, strict=True)):
            return "nhwc"
    return "strided"


def numpy_dtype(dtype: str | np.dtype[Any] | type) -> np.dtype[Any]:
    """Turns a dtype's word into the dtype.

    Args:
        dtype: "bfloat16" and whatever NumPy takes.

    Returns:
        The NumPy dtype; bfloat16 is ml_dtypes.bfloat16.
    """
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    return np.dtype(dtype)


def empty(
    shape: Sequence[int], dtype: str | np.dtype[Any] | type, *, device: str | Device | None, layout: str = "nchw"
) -> Array:
    """Allocates an array without setting its elements.

    Args:
        shape: the logical shape, (N, C, *spatial) or any other.
        dtype: a word or a NumPy dtype.
        device: where; as for ``resolve``. On CUDA the memory is of CuPy's current allocator.
        layout: "nchw" or "nhwc".

    Returns:
        A NumPy or CuPy array; owned by the caller.
    """
    return _allocate("empty", shape, dtype, device, layout)


def zeros(
    shape: Sequence[int], dtype: str | np.dtype[Any] | type, *, device: str | Device | None, layout: str = "nchw"
) -> Array:
    """Allocates an array of zeros; otherwise like ``empty``.

    Args:
        shape: the logical shape.
        dtype: a word or a NumPy dtype.
        device: where; as for ``resolve``.
        layout: "nchw" or "nhwc".

    Returns:
        A NumPy or CuPy array; owned by the caller.
    """
    return _allocate("zeros", shape, dtype, device, layout)


def _allocate(
    function: str,
    shape: Sequence[int],
    dtype: str | np.dtype[Any] | type,
    device: str | Device | None,
    layout: str,
) -> Array:
    place = device if isinstance(device, Device) else resolve(device)
    order = memory_order(layout, len(shape))
    memory_shape = tuple(shape[dim] for dim in order)
    with place.use():
        a = getattr(place.xp, function)(memory_shape, numpy_dtype(dtype))
    if order == tuple(range(len(shape))):
        return a
    return a.transpose(sorted(range(len(order)), key=order.__getitem__))


def to_layout(a: Array, layout: str) -> Array:
    """Gives an array in a layout.

    Args:
        a: a NumPy or CuPy array, (N, C, *spatial); borrowed, read on the current stream.
        layout: "nchw" or "nhwc".

    Returns:
        The array itself when it is in that layout (dimensions of size 1 may allow both), else a copy.

    Raises:
        ValueError: another word.
    """
    order = memory_order(layout, a.ndim)
    if a.transpose(order).flags.c_contiguous:
        return a
    out = empty(a.shape, a.dtype, device=device_of(a), layout=layout)
    out[...] = a
    return out


def alignment(a: Array, largest: int = 32) -> int:
    """Gives the power of two to which an array's first element is aligned.

    Args:
        a: a NumPy or CuPy array.
        largest: where to stop looking, in bytes.

    Returns:
        Bytes, from 1 to largest.
    """
    pointer = a.data.ptr if is_cuda(a) else a.ctypes.data
    return math.gcd(int(pointer), largest)
