"""A step as one CUDA graph an input signature: `flcuda.capture`.

Note [calls]: the first `WARM_UP` calls of a signature are real steps that run as they are; they search, compile, and
make what is made once. They are of the thread that captures, whose cuDNN plans they make. The first runs where its
caller is. The others run on the stream that will capture, and take memory from the pool that the graph will use. Then a
call is captured, which queues nothing, and the graph is launched; later ones are launched only. So a call does its step
exactly once, whichever way.

Note [memory]: what a graph uses it must find in place at each replay, also what its step has given back. So the capture
has a pool of its own, that nobody else takes from, and its blocks are kept, whatever the pool does with them. The
graphs of one step share it, since they never run at the same time: each call waits for the one before, on the device.
Inputs are copied into fixed arrays there, and results are fixed arrays there. A pool of CuPy's that is let go of never
gives back what it has free: so it is told to, and kept for as long as somebody still has an array of it.

Note [host]: what Python decides by, and what it would have written, is kept beside the graph: see Note [host state] in
flcuda.device. A call whose Python would decide otherwise than at the capture (gradients are there to be added to,
another weight decay) is another variant of its signature, and gets a graph of its own.
"""

import contextlib
import copy
import functools
import gc
import logging
import threading
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar, cast, overload

import numpy as np

from flcuda import device as devices
from flcuda.autograd import Tensor, is_recording
from flcuda.cudnn import library, resources
from flcuda.device import Array, Device, HostState, Moment, Recording, Written
from flcuda.errors import CaptureError, CudnnError, FlcudaError
from flcuda.finder.plan import callers_level
from flcuda.finder.policy import current_policy
from flcuda.ops import elementwise
from flcuda.parameters import gradient_number, last_move

P = ParamSpec("P")
R = TypeVar("R")

WARM_UP = 2
"""So many calls of a signature run before one is captured."""

SIGNATURES = 16
"""So many signatures a step keeps unless it is told otherwise."""

VARIANTS = 4
"""So many variants it keeps of each; see Note [host]."""

_CAPTURE_ERRORS = range(900, 909)
"""CUDA's statuses of captures, from cudaErrorStreamCaptureUnsupported to cudaErrorStreamCaptureWrongThread."""

_CUDA_ERROR_MEMORY_ALLOCATION = 2

_log = logging.getLogger(__name__)


# --- the device's side ------------------------------------------------------------------------------------------------


class Place(Protocol):
    """Where steps are captured and launched: a device with its stream, pool and events."""

    device: Device

    @property
    def nbytes(self) -> int:
        """Bytes of the private memory."""
        ...

    def is_capturing(self) -> bool:
        """Says whether a capture is under way where the caller is."""
        ...

    def begin(self) -> None:
        """Makes the caller's stream wait for what was done here before on another one."""
        ...

    def end(self) -> None:
        """Remembers what is queued on the caller's stream, for `begin` and `wait`."""
        ...

    def wait(self) -> None:
        """Waits until the device has done all that was queued here."""
        ...

    def close(self) -> None:
        """Gives the private memory back, once nothing is queued and no graph is left."""
        ...

    def fixed(self, a: Array, layout: str) -> Array:
        """Makes an array like another one in the private memory."""
        ...

    def fill(self, a: Array, out: Array) -> None:
        """Copies an input into its fixed array, on the caller's stream."""
        ...

    def run(self, step: Callable[[], Any]) -> Any:
        """Runs a step on the capturing stream, in the private memory, between what the caller queues."""
        ...

    def capture(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        """Captures a step on the capturing stream, in the private memory; gives the graph, and what the step gave."""
        ...

    def launch(self, graph: Any) -> None:
        """Launches a graph on the caller's stream."""
        ...


def _new_block(blocks: list[Any], size: int) -> Any:
    """Takes memory from CUDA for a pool, and keeps it whatever the pool does."""
    cuda = devices.cupy().cuda
    try:
        memory = cuda.Memory(size)
    except cuda.runtime.CUDARuntimeError as error:
        if error.status != _CUDA_ERROR_MEMORY_ALLOCATION:
            raise
        # Perhaps the pool of all others has it and does not need it.
        devices.cupy().get_default_memory_pool().free_all_blocks()
        try:
            memory = cuda.Memory(size)
        except cuda.runtime.CUDARuntimeError as again:
            # At CUDA's own error the pool would give up its free blocks, which graphs use, and which a smaller
            # workspace may fit in.
            raise MemoryError(f"no room for a block of {size:,} bytes of a captured step's memory") from again
    blocks.append(memory)
    return cuda.MemoryPointer(memory, 0)


_outlived: list[tuple[Device, Any]] = []
"""Pools of closed steps of which somebody still has an array: the loss of the last call, say. See Note [memory]."""


def _give_back() -> None:
    """Gives back what nobody has any more of the pools of closed steps."""
    pools = []
    with contextlib.suppress(IndexError):  # another thread does the same
        while True:
            pools.append(_outlived.pop())
    for device, pool in pools:
        with device.use():
            pool.free_all_blocks()
            if pool.total_bytes():
                _outlived.append((device, pool))


class _CudaPlace:
    """A CUDA device with a stream for captures and a memory pool for their graphs; see Note [memory]."""

    def __init__(self, device: Device) -> None:
        cuda = devices.cupy().cuda
        self.device = device
        self._stream = cuda.Stream(non_blocking=True)
        self._blocks: list[Any] = []
        # No method of this object: a circle would keep the memory after close.
        self._pool = cuda.MemoryPool(functools.partial(_new_block, self._blocks))
        # A limit of the environment would make the pool give back free blocks.
        self._pool.set_limit(size=0)
        self._queued = cuda.Event(disable_timing=True)
        self._is_used = False
        _give_back()

    @property
    def nbytes(self) -> int:
        """Bytes of the private memory."""
        return sum(block.size for block in self._blocks)

    def is_capturing(self) -> bool:
        """Asks CUDA."""
        return devices.is_capturing()

    def begin(self) -> None:
        """Waits, on the device, for the event of the call before.

        On the same stream, too, which costs the device nothing: a new stream may have the address of one that is gone,
        and each thread's default stream has the same.
        """
        if self._is_used:
            devices.cupy().cuda.get_current_stream().wait_event(self._queued)

    def end(self) -> None:
        """Records the event."""
        self._queued.record(devices.cupy().cuda.get_current_stream())
        self._is_used = True

    def wait(self) -> None:
        """Waits for the event."""
        if self._is_used:
            self._queued.synchronize()

    def close(self) -> None:
        """Leaves the blocks to the pool, and has it give back those that are free."""
        self._blocks.clear()
        _outlived.append((self.device, self._pool))
        _give_back()

    def fixed(self, a: Array, layout: str) -> Array:
        """Allocates for the capturing stream."""
        with self._stream, devices.cupy().cuda.using_allocator(self._pool.malloc):
            return devices.empty(a.shape, a.dtype, device=self.device, layout=layout)

    def fill(self, a: Array, out: Array) -> None:
        """Copies memory as it is where it can."""
        if a.strides == out.strides:
            if out.nbytes and a.data.ptr != out.data.ptr:
                out.data.copy_from_device_async(a.data, out.nbytes, devices.cupy().cuda.get_current_stream())
        else:
            elementwise.copy(a, out)

    def run(self, step: Callable[[], Any]) -> Any:
        """Runs it between two events."""
        cuda = devices.cupy().cuda
        # What the step before has searched with, and needed, it will not need there again.
        devices.cupy().get_default_memory_pool().free_all_blocks()
        caller = cuda.get_current_stream()
        self._stream.wait_event(caller.record())
        try:
            with self._stream, cuda.using_allocator(self._pool.malloc):
                return step()
        finally:
            caller.wait_event(self._stream.record())

    def capture(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        """Captures in relaxed mode: loader threads may go on calling CUDA."""
        cuda = devices.cupy().cuda
        # What is collected while a graph is captured may free or destroy what then may not be.
        gc.collect()
        collecting = gc.isenabled()
        gc.disable()
        before = self.nbytes
        try:
            with self._stream, cuda.using_allocator(self._pool.malloc):
                handle = None
                if library.is_loaded():
                    # Sets the stream now; what the handle owns may be in the graph.
                    handle = resources.handle()
                self._stream.begin_capture(cuda.runtime.streamCaptureModeRelaxed)
                try:
                    results = step()
                except BaseException:
                    try:
                        self._stream.end_capture()
                    except cuda.runtime.CUDARuntimeError:
                        # It was broken by what broke the step. The stream has ended its capture all the same.
                        _log.debug("a capture ended with an error", exc_info=True)
                    raise
                graph = self._stream.end_capture()
        finally:
            if collecting:
                gc.enable()
        grown = self.nbytes - before
        # Not wrong, since CUDA gives memory while it captures in relaxed mode; but the warm-up should have taken it.
        _log.info("captured a step; private memory %d bytes, of which %d taken while capturing", self.nbytes, grown)
        return (graph, handle), results

    def launch(self, graph: Any) -> None:
        """Launches it on the current stream."""
        graph[0].launch()


def _new_place(device: Device) -> Place | None:
    """Makes the place for a device; None where steps just run."""
    return None if device.kind == "cpu" else _CudaPlace(device)


# --- arguments and results --------------------------------------------------------------------------------------------

_NUMBERS = (type(None), bool, int, float, complex, str, bytes, np.generic)


def _take(name: str, value: Any, arrays: dict[str, Array]) -> Any:
    """Lists the arrays in an argument, and gives what the argument is besides their elements: hashable."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise TypeError(
                f"{name}: a Tensor that requires a gradient cannot be an argument of a captured step, which is given "
                "copies; let the step find it in its closure"
            )
        arrays[name] = value.data
        return (Tensor, *_kind_of(value.data))
    if isinstance(value, tuple | list):
        return (type(value), *[_take(f"{name}[{i}]", part, arrays) for i, part in enumerate(value)])
    if isinstance(value, dict):
        return (dict, *[(key, _take(f"{name}[{key!r}]", part, arrays)) for key, part in value.items()])
    if _is_array(value):
        array = arrays[name] = devices.asarray(value, name)
        return (np.ndarray, *_kind_of(array))
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{name}: a {type(value).__name__} is neither an array nor hashable, so no signature can be told by it"
        ) from None
    return (type(value), value)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (hasattr(value, "__dlpack__") and not isinstance(value, np.generic))


def _kind_of(a: Array) -> tuple[Any, ...]:
    return (a.shape, a.dtype, _layout(a))


def _layout(a: Array) -> str:
    return "nhwc" if a.ndim > 2 and devices.memory_layout(a) == "nhwc" else "nchw"


def _put(value: Any, arrays: Iterator[Array]) -> Any:
    """Gives an argument with other arrays, in the order of `_take`."""
    if isinstance(value, Tensor):
        return Tensor(next(arrays))
    if isinstance(value, tuple | list):
        return _sequence(value, [_put(part, arrays) for part in value])
    if isinstance(value, dict):
        return {key: _put(part, arrays) for key, part in value.items()}
    if _is_array(value):
        return next(arrays)
    return value


def _sequence(like: Any, parts: list[Any]) -> Any:
    """Makes a list, tuple or named tuple."""
    make = getattr(like, "_make", None)
    return make(parts) if make is not None else type(like)(parts)


def _give(name: str, value: Any, treat: Callable[[Array], Array]) -> Any:
    """Gives a result with each array treated, and Tensors without the graph behind them."""
    if isinstance(value, Tensor):
        return Tensor(treat(value.data))
    if isinstance(value, np.ndarray) or devices.is_cuda(value):
        return treat(value)
    if isinstance(value, tuple | list):
        return _sequence(value, [_give(f"{name}[{i}]", part, treat) for i, part in enumerate(value)])
    if isinstance(value, dict):
        return {key: _give(f"{name}[{key!r}]", part, treat) for key, part in value.items()}
    if isinstance(value, _NUMBERS):
        return value
    raise TypeError(
        f"{name}: a captured step gives arrays, Tensors, numbers and words, alone or in tuples, lists and dicts, not a "
        f"{type(value).__name__}"
    )


# --- graphs -----------------------------------------------------------------------------------------------------------


class _Variant:
    """The calls of a signature in which Python decides alike; see Note [host].

    Attributes:
        runs: how many have run on one thread, the last one's, since the last failed capture.
        thread: that one, whose plans a capture can use.
        graph: what is launched; None before the capture.
        results: what a call gives.
    """

    def __init__(self, found: Recording) -> None:
        self.runs = 0
        self.thread = threading.current_thread()
        self.graph: Any = None
        self.results: Any = None
        self._move = 0
        self._last: list[tuple[HostState, tuple[Any, ...]]] = []
        self._taken: list[Moment] = []
        self._after: list[Callable[[], None]] = []
        self._kept: list[Any] = []
        self.learn(found)

    def learn(self, found: Recording) -> None:
        """Takes over by what Python decided in a run."""
        self._first = [found.first[key] for key in found.first if key in found.read]
        self._move = last_move()

    def captured(self, found: Recording, since: Moment, graph: Any, results: Any) -> None:
        """Takes a graph, with what Python did while it was captured."""
        self.learn(found)
        self._last = [
            (state_of, tuple([_written(a, b, since) for a, b in zip(first, state_of.host_state(), strict=True)]))
            for state_of, first in found.first.values()
        ]
        self._taken = sorted({value for _, state in self._last for value in state if isinstance(value, Moment)})
        self._after = found.after_launch
        self._kept = list(found.kept.values())
        self.graph, self.results = graph, results

    def is_stale(self) -> bool:
        """Says whether parameters have moved since."""
        return self._move != last_move()

    def is_warm(self) -> bool:
        """Says whether enough has run, here, for a capture: each thread has cuDNN's plans of its own."""
        return self.runs >= WARM_UP and self.thread is threading.current_thread()

    def has_run(self) -> None:
        """Counts a run."""
        # Not by its number, which a thread gets that comes after it.
        here = threading.current_thread()
        self.runs = self.runs + 1 if self.thread is here else 1
        self.thread = here

    def fits(self) -> bool:
        """Says whether Python would decide as it did."""
        return all(_same(state, state_of.host_state()) for state_of, state in self._first)

    def done(self) -> None:
        """Does what Python would have done in a step that was launched."""
        moments = {old: gradient_number() for old in self._taken}
        for state_of, state in self._last:
            new = list(state)
            for i, value in enumerate(state):
                if value is _AS_IT_IS:
                    new[i] = state_of.host_state()[i]
                elif isinstance(value, Moment):
                    new[i] = moments[value]
            state_of.set_host_state(tuple(new))

    def after_launch(self) -> None:
        """Does what follows each launch; it may raise, and the step is done all the same."""
        for call in self._after:
            call()


_AS_IT_IS = object()


def _written(first: Any, last: Any, since: Moment) -> Any:
    """Gives what a part of a state is after a step; _AS_IT_IS where no step sets it."""
    if isinstance(last, Moment):
        return last if last > since else _AS_IT_IS
    if isinstance(last, Written) and isinstance(first, Written) and last.value is first.value:
        return _AS_IT_IS
    return last


def _same(a: Any, b: Any) -> bool:
    """Compares two states as `HostState` says."""
    if a is b:
        return True
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, Moment | Written):
        return type(a) is type(b)
    return isinstance(a, str | int | float) and type(a) is type(b) and bool(a == b)


class _Signature:
    """The calls with one kind of arguments.

    Attributes:
        inputs: the fixed arrays.
        variants: see Note [host].
    """

    def __init__(self, inputs: list[Array]) -> None:
        self.inputs = inputs
        self.variants: list[_Variant] = []

    def variant(self, place: Place) -> _Variant | None:
        """Finds the one that a call now is of."""
        if any(variant.is_stale() for variant in self.variants):
            # A graph may be destroyed while it runs, the code of a plan that it runs may not.
            place.wait()
            self.variants = [variant for variant in self.variants if not variant.is_stale()]
        return next((variant for variant in self.variants if variant.fits()), None)


class _Graphs:
    """All that a step keeps; goes with it, and then waits for the device."""

    def __init__(self) -> None:
        self.places: dict[Device, Place | None] = {}
        self.signatures: OrderedDict[Any, _Signature] = OrderedDict()

    def clear(self) -> None:
        """Frees everything once the device has done with it."""
        places = [place for place in self.places.values() if place is not None]
        for place in places:
            with place.device.use():
                place.wait()
        self.signatures.clear()
        self.places.clear()
        for place in places:
            with place.device.use():
                place.close()


class CapturedStep(Generic[P, R]):
    """A function of arrays as CUDA graphs; made by ``flcuda.capture``, which says what it does.

    Args:
        function: the step.
        signatures: how many signatures are kept.

    Raises:
        TypeError: the function cannot be called, or signatures is no whole number.
        ValueError: signatures is below 1.
    """

    def __init__(self, function: Callable[P, R], signatures: int = SIGNATURES) -> None:
        if not callable(function):
            raise TypeError(f"function: a {type(function).__name__} cannot be called")
        if isinstance(signatures, bool) or not isinstance(signatures, int):
            raise TypeError(f"signatures: {signatures!r} is no whole number")
        if signatures < 1:
            raise ValueError(f"signatures: {signatures} is below 1")
        # Not the attributes: of a Module they would be its parameters.
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._limit = signatures
        self._lock = threading.RLock()
        self._graphs = _Graphs()
        self._closed = False
        self._warned: set[str] = set()
        self._name = ""
        # Not at exit: the driver may be gone by then.
        self._finalizer = weakref.finalize(self, _Graphs.clear, self._graphs)
        self._finalizer.atexit = False

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        with self._lock:
            return sum(v.graph is not None for s in self._graphs.signatures.values() for v in s.variants)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the graphs use and nobody else may: they share them."""
        with self._lock:
            return sum(place.nbytes for place in self._graphs.places.values() if place is not None)

    def reset(self) -> None:
        """Forgets all graphs, once the device has done with them; the next calls capture anew.

        For when something has changed that the function reads from Python, such as a model's training mode.
        """
        with self._lock:
            self._graphs.clear()

    def close(self) -> None:
        """Frees graphs and memory, once the device has done with them; a later call is an error. Idempotent."""
        with self._lock:
            self._closed = True
            self._graphs.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> "CapturedStep[..., R]": ...

    def __get__(self, instance: object, owner: type) -> Any:
        """Makes the step of one object, as a method; kept in the object's attribute of the same name."""
        if instance is None:
            return self
        bound = CapturedStep(types.MethodType(self._function, instance), self._limit)
        try:
            return vars(instance).setdefault(self._name, bound)
        except TypeError:
            raise TypeError(
                f"{owner.__name__}.{self._name}: a captured method is kept in its object, and this one has no __dict__"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy begins anew: its model and its memory are other ones.
        return type(self), (self._function, self._limit)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CapturedStep[P, R]":
        return type(self)(copy.deepcopy(self._function, memo), self._limit)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.captured} graphs"
        return f"<captured step {getattr(self, '__qualname__', self._function)!s}: {state}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Does a step; see ``flcuda.capture``."""
        if self._closed:
            raise FlcudaError(f"{self!r} cannot be called")
        if devices.is_recording_step():
            # A step within a step is a part of it.
            return self._function(*args, **kwargs)
        arrays: dict[str, Array] = {}
        kinds = [_take(f"argument {i}", value, arrays) for i, value in enumerate(args)]
        named = [(name, _take(name, value, arrays)) for name, value in kwargs.items()]
        device = devices.require_same_device(**arrays) if arrays else devices.resolve(None)
        with device.use():
            place = self._place(device)
            if place is None or place.is_capturing():
                return self._function(*args, **kwargs)
            key = (device, tuple(kinds), tuple(named), is_recording(), current_policy())
            with self._lock:
                place.begin()
                try:
                    return cast(R, self._step(place, key, list(arrays.values()), args, kwargs))
                finally:
                    place.end()

    def _place(self, device: Device) -> Place | None:
        with self._lock:
            if device not in self._graphs.places:
                self._graphs.places[device] = _new_place(device)
            return self._graphs.places[device]

    def _step(
        self, place: Place, key: Any, arrays: Sequence[Array], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        signature = self._signature(place, key, arrays)
        for a, out in zip(arrays, signature.inputs, strict=True):
            place.fill(a, out)
        variant = signature.variant(place)
        if variant is not None and variant.graph is not None:
            place.launch(variant.graph)
            variant.done()
            variant.after_launch()
            return variant.results
        inputs = iter(signature.inputs)
        args, kwargs = _put(args, inputs), _put(kwargs, inputs)
        step = functools.partial(self._function, *args, **kwargs)
        if variant is None or not variant.is_warm():
            return self._warm_up(place, signature, variant, step)
        return self._capture(place, variant, step)

    def _signature(self, place: Place, key: Any, arrays: Sequence[Array]) -> _Signature:
        signatures = self._graphs.signatures
        found = signatures.get(key)
        if found is None:
            while len(signatures) >= self._limit:
                place.wait()  # as in _Signature.variant
                _, oldest = signatures.popitem(last=False)
                if any(variant.graph is not None for variant in oldest.variants):
                    self._warn(
                        f"has been called with more than {self._limit} kinds of arguments, and the graph of the one "
                        "that was used longest ago is dropped; make batches of few sizes, pass what changes from call "
                        "to call as arrays, not as numbers, or give flcuda.capture a larger number of signatures"
                    )
            found = signatures[key] = _Signature([place.fixed(a, _layout(a)) for a in arrays])
        signatures.move_to_end(key)
        return found

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            name = getattr(self, "__qualname__", repr(self._function))
            warnings.warn(f"the captured step {name} {text}", UserWarning, stacklevel=callers_level() + 1)

    def _warm_up(self, place: Place, signature: _Signature, variant: _Variant | None, step: Callable[[], Any]) -> Any:
        """Does a step as it is; see Note [calls]."""
        first = variant is None or variant.runs == 0 or variant.thread is not threading.current_thread()
        with devices.recording(capturing=False) as found:
            results = step() if first else place.run(step)
        if variant is None:
            variant = _Variant(found)
            signature.variants.append(variant)
            if len(signature.variants) > VARIANTS:
                place.wait()  # as in _Signature.variant
                del signature.variants[0]
                self._warn(
                    "finds gradients, or the state of an optimizer or a scaler, in more ways than it keeps graphs for, "
                    "so that it is mostly run without; let each call begin as the others do, for instance with "
                    "zero_grad"
                )
        else:
            variant.learn(found)
        variant.has_run()
        # Copies, since their memory is wanted for the capture, and inputs are overwritten.
        return _give("the result", results, lambda a: a.copy(order="K"))

    def _capture(self, place: Place, variant: _Variant, step: Callable[[], Any]) -> Any:
        since = gradient_number()
        found: Recording | None = None
        try:
            with devices.recording(capturing=True) as found:
                graph, results = place.capture(step)
            results = _give("the result", results, functools.partial(_on, place.device))
            for state_of, _ in found.first.values():
                where = getattr(state_of, "device", place.device)
                if where != place.device:
                    raise CaptureError(f"a {type(state_of).__name__} of it is on {where}, and not on {place.device}")
            place.launch(graph)
        except BaseException as error:
            if found is not None:
                found.undo()
            variant.runs = 0
            refusal = self._refusal(error)
            if refusal is None:
                error.add_note("raised while the step was captured in a CUDA graph; nothing of it has happened")
                raise
            raise refusal from error
        variant.captured(found, since, graph, results)
        variant.after_launch()
        return results

    def _refusal(self, error: BaseException) -> CaptureError | None:
        """Gives the error that says why a step cannot be captured; None for an error that does not come of that."""
        advice = _advice(error)
        if advice is None:
            return None
        name = getattr(self, "__qualname__", repr(self._function))
        return CaptureError(
            f"the step {name} cannot be captured in a CUDA graph: {error}. {advice}Nothing of this call has "
            "happened on the device"
        )


def _on(device: Device, a: Array) -> Array:
    """Gives a result that replays can give, too."""
    if devices.device_of(a) != device:
        raise CaptureError(f"it gives an array on {devices.device_of(a)}, which no replay on {device} would write")
    return a


_READ = (
    "While it is captured nothing has run, so the host cannot read a value (float(), item(), get(), an array as a "
    "condition), wait, or copy from its own memory: give arrays back, or pass them in, and read them outside. "
)
_LIBRARY = (
    "Use flcuda's functions in place of cupy.matmul, @ and cupy.random, which call libraries that CuPy does not let "
    "capture: F.linear and F.conv2d run on cuDNN, F.dropout has random numbers of its own. "
)
_ONCE = (
    "What is done once only, such as searching and compiling, the calls before the capture are to do; this call did "
    "what none of them did. "
)
_CUDNN = "cuDNN refused to be captured in what it did before; pin another algorithm (flcuda.find). "
_MEMORY = "A graph has memory of its own, and that of the device does not suffice; make the batch smaller. "


def _advice(error: BaseException) -> str | None:
    """Says what to do about an error of a capture; None where it has nothing to do with one."""
    text = str(error)
    if isinstance(error, NotImplementedError) and "capture" in text:
        return _LIBRARY
    if isinstance(error, CudnnError):
        return _CUDNN
    if isinstance(error, FlcudaError) and "searched" in text:
        return _ONCE
    if isinstance(error, CaptureError) or (isinstance(error, FlcudaError) and "captured" in text):
        # It says itself what to do.
        return ""
    if isinstance(error, MemoryError):
        return _MEMORY
    if isinstance(error, RuntimeError) and ("capturing" in text or getattr(error, "status", 0) in _CAPTURE_ERRORS):
        # CuPy's own refusals, and CUDA's.
        return _READ
    return None


@overload
def capture(function: Callable[P, R], *, signatures: int = ...) -> CapturedStep[P, R]: ...


@overload
def capture(function: None = None, *, signatures: int = ...) -> Callable[[Callable[P, R]], CapturedStep[P, R]]: ...


def capture(function: Any = None, *, signatures: int = SIGNATURES) -> Any:
    """Makes a step one CUDA graph for each kind of arguments: a replay costs the host microseconds.

    ::

        @flcuda.capture
        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            scaler.step(optimizer, loss)
            return loss

        for x, y in loader:
            loss = step(x, y)

    Each call does the step exactly once, on the caller's current stream. Of each signature (shapes, dtypes and layouts
    of the arrays, all other arguments by value, ``no_grad``, the finder's policy) the first two calls run as they are,
    and search and compile what they must; the third is captured, and from then on the graph is launched. Learning
    rate, loss scale, dropout's random numbers, weights (``load_state_dict``) and inputs are on the device and change
    without another capture. Under ``flcuda.policy(deterministic=True)`` a replay gives the bits that the function
    itself would. On the CPU, inside another captured step, and while somebody else captures, the function is just
    called. May be used on methods; each object has graphs of its own, as each copy has.

    Arguments: arrays (CuPy, or with DLPack) and Tensors without gradient, all on one device, alone or in tuples, lists
    and dicts, and anything hashable. Arrays are copied; the function gets CuPy arrays, or Tensors, that stay the same.

    Results: arrays, Tensors, numbers and words, alone or in tuples, lists and dicts. Tensors come without the graph
    behind them. **Arrays are valid until the next call of the same signature**, which overwrites them: copy what is to
    last, or add it up on the device.

    The function's Python code runs in the first three calls only. So it must not set a learning rate (set it before the
    call), count, print, or read what may change, such as a model's training mode (``reset`` after it changed). Nor can
    it read a value from the device, wait for it, use cuBLAS (``cupy.matmul``) or ``cupy.random``: the third call then
    raises ``CaptureError``, which says what to do, with the step undone and the stream as it was. What flcuda's own
    objects keep on the host, a replay keeps too: whether there are gradients to add to, a scaler's order of calls and
    its news of too many skips, and whether batch norm's statistics are settled. An optimizer's or scaler's options may
    change, and weights may move to other storage: that is captured anew. The gradient of a Tensor that is no Parameter
    is made anew by each call, so let each begin without one; it is valid for as long as a result.

    Args:
        function: the step; None to get a decorator.
        signatures: how many signatures are kept. Beyond it the one that was used longest ago goes, with a warning.

    Returns:
        A ``CapturedStep``: to be called as the function is; with ``reset``, ``close``, ``captured`` and ``nbytes``.

    Raises:
        TypeError, ValueError: as ``CapturedStep``.
    """
    if function is None:
        return functools.partial(capture, signatures=signatures)
    return cast(Any, CapturedStep(function, signatures))
