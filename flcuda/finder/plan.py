"""A live, callable solution of a Problem on this thread and device.

Note [fast path]: checking operands by every rule costs more than cuDNN's own part of a call. What the rules look at are
an array's type, shape, strides, dtype, device and address, and no more. So the Plan keeps those of the operands that
last passed (the address only by its alignment), and operands in which all of them are the same pass again. Everything
else, also what would pass by the rules with other strides of dimensions of size 1, takes the long way. So does a call
while another device is current. Streams and the workspace are the runner's affair, at each call.

Note [same arrays]: of the very arrays of the call before only the shape is compared: of what the rules look at, it is
all that CuPy lets be set. Setting it never moves an element, nor changes their order, so an array that has its old
shape again has its old strides, but for dimensions of size 1, whose strides mean nothing. Arrays are told apart by weak
references, since a Plan must not keep memory alive. They are made when addresses come a second time in a row: where
each call has other arrays they would cost more than they save.
"""

import os
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flcuda import device as devices
from flcuda.device import Device
from flcuda.errors import CudnnError, CudnnNotSupportedError, FlcudaError
from flcuda.finder.candidate import Candidate, Runner
from flcuda.finder.choice import Choice
from flcuda.finder.problem import OPERAND_DTYPES, Problem, address_of, element_strides, same_strides

# CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED, CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED
_ALLOCATION_FAILED = (4002, 4003)
_INTERNAL = 4

Solution = tuple[Choice, Candidate]

_get_ident = threading.get_ident

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"

# NVTX and the CUDA driver load a profiler's library by the first two; Nsight Systems and Nsight Compute set the others.
_PROFILED = any(
    os.environ.get(name)
    for name in (
        "NVTX_INJECTION64_PATH",
        "CUDA_INJECTION64_PATH",
        "NSYS_PROFILING_SESSION_ID",
        "NV_NSIGHT_INJECTION_TRANSPORT_TYPE",
    )
)


def is_out_of_memory(error: BaseException) -> bool:
    """Says whether an error means that memory, of the device or the host, did not suffice."""
    return isinstance(error, MemoryError) or (isinstance(error, CudnnError) and error.status in _ALLOCATION_FAILED)


def is_refusal(error: BaseException) -> bool:
    """Says whether an error means that another candidate may still do: not supported, or out of memory."""
    return isinstance(error, CudnnNotSupportedError) or is_out_of_memory(error)


def _is_internal(error: BaseException) -> bool:
    """Says whether a library failed within itself: engines that nobody has run here yet may, and others then do."""
    return isinstance(error, CudnnError) and error.status // 1000 == _INTERNAL


def callers_level() -> int:
    """Gives the `stacklevel` with which the function that calls this one warns whoever called flcuda."""
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
        level += 1
    return level


class Plan:
    """A live solution: call it with arrays.

    A Plan belongs to the thread and device that it was made on. It holds no array; a call takes its workspace from the
    current allocator and runs on the current stream, and does not wait for the device. It can be captured into a CUDA
    graph.

    Attributes:
        choice: what it runs; another one after it fell to the next candidate.
        device: where it runs.
    """

    def __init__(
        self,
        choice: Choice,
        device: Device,
        runner: Runner,
        *,
        others: Callable[[], Iterator[Solution]] | None = None,
        ran: Callable[[Choice], None] | None = None,
    ) -> None:
        """Makes a Plan; callers use `flcuda.plan`, or a row of a report.

        Args:
            choice: what `runner` runs.
            device: where.
            runner: ready for this thread and device; the Plan owns it.
            others: the candidates to try, in order, when this one is refused or memory runs out; None for no others.
            ran: called once with the choice that has run, when that is news: after the first call of a Plan that was
                not measured, and after a fall to another candidate.
        """
        self.choice = choice
        self.device = device
        self._use(runner)
        self._several = len(choice.problem.outputs) > 1
        # Shape and strides, dtype and the bits that the address must not have of each operand that passed last.
        self._seen: tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], Any, int], ...] = ()
        # The addresses of the last call on the fast path. And its arrays, and shapes; see Note [same arrays].
        self._last: tuple[int, ...] = ()
        self._same: tuple[Callable[[], Any], ...] = ()
        self._shapes: tuple[tuple[int, ...], ...] = ()
        self._enough = -1  # how many operands suffice for the fast path when there is no `out`
        self._index = device.index
        self._kind: Any = None
        # Shape, dtype, bytes and strides in bytes of each output.
        self._layouts: tuple[tuple[tuple[int, ...], Any, int, tuple[int, ...]], ...] = ()
        self._alloc: Any = None
        self._current_device: Callable[[], int] = lambda: 0
        self._others = others
        self._remaining: Iterator[Solution] | None = None
        self._ran = ran
        self._news = ran is not None and choice.median_ms is None
        self._thread = _get_ident()

    @property
    def problem(self) -> Problem:
        """What it computes."""
        return self.choice.problem

    @property
    def workspace(self) -> int:
        """Bytes of scratch memory that a call takes."""
        return self._runner.workspace

    def __repr__(self) -> str:
        return f"<Plan of {self.problem} by {self.choice.id} on {self.device}>"

    def __call__(self, *operands: Any, out: Any = None, **named: Any) -> Any:
        """Computes the Problem: `plan(x, w, out=y)`, `plan(dy, w)`, `plan(x=x, dy=dy)`, `plan(x, w, b, out=(z, y))`.

        Args:
            operands: the inputs in the order of `problem.inputs`: arrays on the Plan's device with the Problem's
                shapes, dtypes and strides; borrowed.
            out: the array to write, or to add to where the Problem accumulates; where the Problem has several outputs,
                a tuple of arrays in the order of `problem.outputs`. Allocated when None.
            named: the inputs by their names.

        Returns:
            `out`, or the new array or tuple of arrays, owned by the caller.

        Raises:
            TypeError: an input is missing or doubled, no array, or of another dtype.
            ValueError: an array's device, shape, strides or alignment is not the Problem's, or `out` is missing though
                the Problem accumulates; the message names the argument.
            FlcudaError: called on another thread; or an error of cuDNN when no candidate is left, with the Problem in
                a note.
        """
        if _get_ident() != self._thread:
            raise FlcudaError(f"{self!r} was made on another thread; plans belong to their thread, so make one there")
        addresses = None
        arrays = operands
        if not named:
            if out is None:
                if len(arrays) == self._enough:
                    addresses = self._addresses(arrays)
            elif not self._several:
                arrays = (*operands, out)
                if len(arrays) == len(self._seen):
                    addresses = self._addresses(arrays)
            elif type(out) is tuple:
                arrays = (*operands, *out)
                if len(arrays) == len(self._seen):
                    addresses = self._addresses(arrays)
        if addresses is None or self._current_device() != self._index:
            return self._checked(operands, named, out)
        if out is None:
            outputs, made = self._new_outputs()
            arrays, addresses = arrays + outputs, addresses + made
            out = outputs if self._several else outputs[0]
        launch = self._launch
        try:
            if launch is None:
                self._runner(*arrays)
            else:
                launch(addresses)
        except (CudnnError, MemoryError) as error:
            self._refused(error, arrays)
        if self._news:
            self._tell()
        if devices.recordings:
            devices.keep_captured(self._runner)
        return out

    def run(self, *operands: Any) -> None:
        """Computes the Problem on operands that are known to fit; the caller has made the device current.

        Falls to the next candidate when this one is refused or memory runs out, and stays there.

        Args:
            operands: the inputs, which are read, and the outputs, which are written or added to, in the order of
                `problem.operands`.

        Raises:
            CudnnError, MemoryError: no candidate is left; the Problem is in a note.
        """
        try:
            self._runner(*operands)
        except (CudnnError, MemoryError) as error:
            self._refused(error, operands)
        if self._news:
            self._tell()
        if devices.recordings:
            devices.keep_captured(self._runner)

    def run_at(self, addresses: tuple[int, ...], operands: tuple[Any, ...]) -> None:
        """Does what `run` does, on CuPy arrays whose device addresses are known.

        Args:
            addresses: of the operands.
            operands: as for `run`.

        Raises:
            CudnnError, MemoryError: as from `run`.
        """
        launch = self._launch
        try:
            if launch is None:
                self._runner(*operands)
            else:
                launch(addresses)
        except (CudnnError, MemoryError) as error:
            self._refused(error, operands)
        if self._news:
            self._tell()
        if devices.recordings:
            devices.keep_captured(self._runner)

    def _refused(self, error: CudnnError | MemoryError, operands: tuple[Any, ...]) -> None:
        """Falls to the next candidate where the error permits it."""
        untried = self._news and self.choice.median_ms is None
        if not is_refusal(error) and not (untried and _is_internal(error)):
            error.add_note(f"problem: {self.problem}")
            raise error
        self._fall(error, operands, untried)

    def _tell(self) -> None:
        """Tells what has run, when that is news."""
        self._news = False
        if self._ran is not None:
            self._ran(self.choice)

    def _use(self, runner: Runner) -> None:
        """Takes a runner: to be called with arrays, and with addresses where it can be."""
        self._runner = self._in_range(runner)
        self._launch: Callable[[tuple[int, ...]], None] | None = getattr(self._runner, "launch", None)

    def _in_range(self, runner: Runner) -> Runner:
        """Gives a runner whose calls are NVTX ranges where a profiler is attached, else the runner itself."""
        if not _PROFILED or self.device.kind == "cpu":
            return runner
        nvtx = devices.cupy().cuda.nvtx
        return _Ranged(runner, f"{self.problem} / {self.choice.id}", nvtx) if nvtx.available else runner

    # the fast path

    def _addresses(self, arrays: tuple[Any, ...]) -> tuple[int, ...] | None:
        """Gives the addresses of arrays that are what passed the checks last; else None. See Note [fast path].

        There are no more of them than of those. To say so to zip would take a quarter of the time.
        """
        same, shapes = self._same, self._shapes
        if len(same) != len(arrays):
            known = False
        elif len(same) == 3 == len(shapes):
            # A convolution's; the loop below takes twice as long.
            a, b, c = arrays
            is_a, is_b, is_c = same
            shape_a, shape_b, shape_c = shapes
            known = (
                is_a() is a
                and is_b() is b
                and is_c() is c
                and a.shape == shape_a
                and b.shape == shape_b
                and c.shape == shape_c
            )
        else:
            known = True
            for array, reference, shape in zip(arrays, same, shapes):  # noqa: B905
                if reference() is not array or array.shape != shape:
                    known = False
                    break
        if known:
            return self._last
        index, kind = self._index, self._kind
        found = []
        for array, (layout, dtype, misaligned) in zip(arrays, self._seen):  # noqa: B905
            if type(array) is not kind or array.dtype is not dtype or (array.shape, array.strides) != layout:
                return None
            memory = array.data
            address = memory.ptr
            if memory.device_id != index or address & misaligned:
                return None
            found.append(address)
        addresses = tuple(found)
        if addresses == self._last:
            self._same = tuple([weakref.ref(array) for array in arrays])
        else:
            self._last, self._same = addresses, ()
        return addresses

    def _new_outputs(self) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """Does what `_allocate` does, without asking the Problem again; gives the addresses too."""
        array = self._kind
        memories = [self._alloc(layout[2]) for layout in self._layouts]
        outputs = [
            array(shape, dtype, memory, strides)
            for memory, (shape, dtype, _, strides) in zip(memories, self._layouts, strict=True)
        ]
        return tuple(outputs), tuple([memory.ptr for memory in memories])

    def _remember(self, arrays: tuple[Any, ...]) -> None:
        """Keeps what the fast path needs of arrays that passed all checks, on a CUDA device."""
        cupy = devices.cupy()
        problem = self.problem
        self._last, self._same = (), ()
        self._shapes = tuple(array.shape for array in arrays)
        self._kind = cupy.ndarray
        self._alloc = cupy.cuda.alloc
        self._current_device = cupy.cuda.runtime.getDevice
        self._enough = -1 if problem.accumulate else len(problem.inputs)
        self._seen = tuple(
            ((array.shape, array.strides), array.dtype, problem.alignment_of(name) - 1)
            for array, name in zip(arrays, problem.operands, strict=True)
        )
        layouts = []
        for array, name in zip(arrays[len(problem.inputs) :], problem.outputs, strict=True):
            shape, size = problem.shape_of(name), array.itemsize
            strides = tuple(step * size for step in problem.strides_of(name))
            nbytes = size + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
            layouts.append((shape, array.dtype, nbytes, strides))
        self._layouts = tuple(layouts)

    # the long way

    def _allocate(self) -> tuple[Any, ...]:
        """Makes new outputs on the current device, from the current allocator."""
        return tuple([self.problem.empty(name, self.device) for name in self.problem.outputs])

    def _checked(self, operands: tuple[Any, ...], named: dict[str, Any], out: Any) -> Any:
        """Binds and checks by every rule, allocates what is missing, and runs."""
        problem = self.problem
        inputs = tuple(
            self._check(name, name, devices.asarray(value, name))
            for name, value in zip(problem.inputs, self._bind(operands, named), strict=True)
        )
        with self.device.use():
            if out is not None:
                results = tuple(
                    self._check_out(argument, name, value)
                    for argument, name, value in zip(*self._bind_out(out), strict=True)
                )
            elif problem.accumulate:
                raise ValueError("out is None; this Problem adds to its output, so it must be given")
            else:
                results = self._allocate()
            if self.device.kind == "cuda":
                self._remember((*inputs, *results))
            self.run(*inputs, *results)
        if out is not None:
            return out
        return results if self._several else results[0]

    def _bind(self, operands: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Puts the inputs into their order."""
        names = self.problem.inputs
        if len(operands) > len(names):
            word = "input" if len(names) == 1 else "inputs"
            raise TypeError(f"a plan takes the {word} {_listed(names)}, not {len(operands)}; give the output as out=")
        values = dict(zip(names, operands, strict=False))
        for name, value in named.items():
            if name not in names:
                raise TypeError(f"a plan of {self.problem.kind} has no input {name!r}; it has {', '.join(names)}")
            if name in values:
                raise TypeError(f"argument {name!r} is given twice")
            values[name] = value
        missing = [name for name in names if name not in values]
        if missing:
            raise TypeError(f"a plan of {self.problem.kind} needs {_listed(missing)}")
        return tuple(values[name] for name in names)

    def _bind_out(self, out: Any) -> tuple[list[str], tuple[str, ...], tuple[Any, ...]]:
        """Gives what the outputs are called in messages, their names, and the arrays."""
        names = self.problem.outputs
        if not self._several:
            return ["out"], names, (out,)
        if not isinstance(out, tuple | list):
            raise TypeError(f"out must be a tuple of the {len(names)} outputs {_listed(names)}, not {_kind_of(out)}")
        if len(out) != len(names):
            raise TypeError(f"out has {len(out)} arrays; the plan has the {len(names)} outputs {_listed(names)}")
        return [f"out[{position}] ({name})" for position, name in enumerate(names)], names, tuple(out)

    def _check_out(self, argument: str, name: str, value: Any) -> Any:
        array = self._check(argument, name, devices.asarray(value, argument))
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise ValueError(f"{argument} is read-only")
        return array

    def _check(self, argument: str, name: str, array: Any) -> Any:
        """Raises when an array is not what the Problem says of an operand; returns it."""
        problem = self.problem
        shape = problem.shape_of(name)
        place = devices.device_of(array)
        if place != self.device:
            raise ValueError(f"{argument} is on {place}, the plan on {self.device}")
        if tuple(array.shape) != shape:
            raise ValueError(f"{argument} has shape {tuple(array.shape)}, the plan needs {shape}")
        if array.dtype != OPERAND_DTYPES[problem.dtype_of(name)]:
            raise TypeError(f"{argument} has dtype {array.dtype}, the plan needs {problem.dtype_of(name)}")
        strides = element_strides(argument, array)
        if not same_strides(shape, strides, problem.strides_of(name)):
            raise ValueError(f"{argument} has strides {strides} (elements), the plan needs {problem.strides_of(name)}")
        if address_of(array) % problem.alignment_of(name):
            raise ValueError(f"{argument} is not aligned to the {problem.alignment_of(name)} bytes that the plan needs")
        return array

    def _fall(self, error: CudnnError | MemoryError, operands: tuple[Any, ...], untried: bool) -> None:
        """Runs the next candidate that works after `error`, and keeps it.

        Of one that was neither measured nor run yet it is no news that it does not work: nobody is warned.
        """
        failed = self.choice
        error.add_note(f"problem: {self.problem}; candidate: {failed.id}")
        if devices.is_capturing():
            error.add_note("while a CUDA graph is captured no other candidate is tried")
            raise error
        # the frames of the failed run would keep its copies of operands in memory
        traceback.clear_frames(error.__traceback__)
        out_of_memory = is_out_of_memory(error)
        if out_of_memory and self._retried(operands):
            return
        if self._remaining is None:
            self._remaining = iter(()) if self._others is None else self._others()
        limit = self._runner.workspace
        for choice, candidate in self._remaining:
            # one that takes none ran out of what an engine allocates itself, of which nobody knows how much that is
            if out_of_memory and candidate.workspace >= limit > 0:
                continue
            try:
                runner = candidate.build()
                runner(*operands)
            except (CudnnError, MemoryError) as other:
                if not is_refusal(other) and not _is_internal(other):
                    other.add_note(f"problem: {self.problem}; candidate: {choice.id}")
                    raise
                error.add_note(f"candidate {choice.id}: {other}")
                traceback.clear_frames(other.__traceback__)
                continue
            self.choice = choice
            self._use(runner)
            self._news = True
            if untried:
                return
            warnings.warn(
                f"{failed.id} ran out of memory or is not supported ({error}); {choice.id} is used instead for "
                f"{self.problem}",
                UserWarning,
                stacklevel=callers_level(),
            )
            return
        raise error

    def _retried(self, operands: tuple[Any, ...]) -> bool:
        """Runs the same candidate again after CuPy's pool has given its free blocks back; False when that fails too."""
        if self.device.kind == "cpu":
            return False
        devices.synchronize(self.device)
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
        try:
            self._runner(*operands)
        except (CudnnError, MemoryError) as again:
            if not is_refusal(again):
                raise
            return False
        return True


class _Ranged:
    """A runner each of whose calls is an NVTX range, which a profiler shows above what the call launches."""

    def __init__(self, runner: Runner, name: str, nvtx: Any) -> None:
        self._runner = runner
        self._name = name
        self._push = nvtx.RangePush
        self._pop = nvtx.RangePop

    @property
    def workspace(self) -> int:
        """Bytes of scratch memory."""
        return self._runner.workspace

    def __call__(self, *operands: Any) -> None:
        """Runs it in the range."""
        self._push(self._name)
        try:
            self._runner(*operands)
        finally:
            self._pop()


def _listed(names: Sequence[str]) -> str:
    """Writes names as words: x, w and b."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _kind_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
