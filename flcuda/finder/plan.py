"""A live, callable solution of a Problem on this thread and device."""

import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from flcuda import device as devices
from flcuda.device import Device
from flcuda.errors import CudnnError, CudnnNotSupportedError, FlcudaError
from flcuda.finder.candidate import Candidate, Runner
from flcuda.finder.choice import Choice
from flcuda.finder.problem import ConvolutionProblem, address_of, dtype_word, element_strides, same_strides

# CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED, CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED
_ALLOCATION_FAILED = (4002, 4003)

Solution = tuple[Choice, Candidate]


def is_out_of_memory(error: BaseException) -> bool:
    """Says whether an error means that memory, of the device or the host, did not suffice."""
    return isinstance(error, MemoryError) or (isinstance(error, CudnnError) and error.status in _ALLOCATION_FAILED)


def is_refusal(error: BaseException) -> bool:
    """Says whether an error means that another candidate may still do: not supported, or out of memory."""
    return isinstance(error, CudnnNotSupportedError) or is_out_of_memory(error)


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
        self._runner = runner
        self._others = others
        self._remaining: Iterator[Solution] | None = None
        self._ran = ran
        self._news = ran is not None and choice.median_ms is None
        self._thread = threading.get_ident()

    @property
    def problem(self) -> ConvolutionProblem:
        """What it computes."""
        return self.choice.problem

    @property
    def workspace(self) -> int:
        """Bytes of scratch memory that a call takes."""
        return self._runner.workspace

    def __repr__(self) -> str:
        return f"<Plan of {self.problem} by {self.choice.id} on {self.device}>"

    def __call__(self, *operands: Any, out: Any = None, **named: Any) -> Any:
        """Computes the Problem: `plan(x, w, out=y)`, `plan(dy, w)`, `plan(x=x, dy=dy, out=dw)`.

        Args:
            operands: the two inputs in the order of `problem.operands`: arrays on the Plan's device with the Problem's
                shapes, dtypes and strides; borrowed.
            out: the array to write, or to add to where the Problem accumulates; allocated when None.
            named: the inputs by their names.

        Returns:
            `out`, or the new array, owned by the caller.

        Raises:
            TypeError: an input is missing or doubled, no array, or of another dtype.
            ValueError: an array's device, shape, strides or alignment is not the Problem's, or `out` is missing though
                the Problem accumulates; the message names the argument.
            FlcudaError: called on another thread; or an error of cuDNN when no candidate is left, with the Problem in
                a note.
        """
        if threading.get_ident() != self._thread:
            raise FlcudaError(f"{self!r} was made on another thread; plans belong to their thread, so make one there")
        problem = self.problem
        first, second, out_name = problem.operands
        a, b = self._bind((first, second), operands, named)
        a = self._check(first, first, devices.asarray(a, first))
        b = self._check(second, second, devices.asarray(b, second))
        with self.device.use():
            if out is not None:
                result = self._check("out", out_name, devices.asarray(out, "out"))
                if isinstance(result, np.ndarray) and not result.flags.writeable:
                    raise ValueError("out is read-only")
            elif problem.accumulate:
                raise ValueError("out is None; this Problem adds to its output, so it must be given")
            else:
                result = problem.empty(out_name, self.device)
            self.run(a, b, result)
        return result if out is None else out

    def run(self, a: Any, b: Any, out: Any) -> None:
        """Computes the Problem on operands that are known to fit; the caller has made the device current.

        Falls to the next candidate when this one is refused or memory runs out, and stays there.

        Args:
            a: first input of `problem.operands`.
            b: second input.
            out: written, or added to.

        Raises:
            CudnnError, MemoryError: no candidate is left; the Problem is in a note.
        """
        try:
            self._runner(a, b, out)
        except (CudnnError, MemoryError) as error:
            if not is_refusal(error):
                error.add_note(f"problem: {self.problem}")
                raise
            self._fall(error, a, b, out)
        if self._news and self._ran is not None:
            self._news = False
            self._ran(self.choice)

    def _bind(self, names: tuple[str, str], operands: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        if len(operands) > 2:
            raise TypeError(
                f"a plan takes the inputs {names[0]} and {names[1]}, not {len(operands)}; give the output as out="
            )
        values = dict(zip(names, operands, strict=False))
        for name, value in named.items():
            if name not in names:
                raise TypeError(f"a plan of {self.problem.direction} has no input {name!r}; it has {', '.join(names)}")
            if name in values:
                raise TypeError(f"argument {name!r} is given twice")
            values[name] = value
        missing = [name for name in names if name not in values]
        if missing:
            raise TypeError(f"a plan of {self.problem.direction} needs {' and '.join(missing)}")
        return values[names[0]], values[names[1]]

    def _check(self, argument: str, name: str, array: Any) -> Any:
        """Raises when an array is not what the Problem says of an operand; returns it."""
        problem = self.problem
        shape = problem.shape_of(name)
        place = devices.device_of(array)
        if place != self.device:
            raise ValueError(f"{argument} is on {place}, the plan on {self.device}")
        if tuple(array.shape) != shape:
            raise ValueError(f"{argument} has shape {tuple(array.shape)}, the plan needs {shape}")
        if dtype_word(array.dtype, argument) != problem.dtype_of(name):
            raise TypeError(f"{argument} has dtype {array.dtype}, the plan needs {problem.dtype_of(name)}")
        strides = element_strides(argument, array)
        if not same_strides(shape, strides, problem.strides_of(name)):
            raise ValueError(f"{argument} has strides {strides} (elements), the plan needs {problem.strides_of(name)}")
        if address_of(array) % problem.alignment_of(name):
            raise ValueError(f"{argument} is not aligned to the {problem.alignment_of(name)} bytes that the plan needs")
        return array

    def _fall(self, error: CudnnError | MemoryError, a: Any, b: Any, out: Any) -> None:
        """Runs the next candidate that works after `error`, and keeps it."""
        failed = self.choice
        error.add_note(f"problem: {self.problem}; candidate: {failed.id}")
        if devices.is_capturing():
            error.add_note("while a CUDA graph is captured no other candidate is tried")
            raise error
        # the frames of the failed run would keep its copies of operands in memory
        traceback.clear_frames(error.__traceback__)
        out_of_memory = is_out_of_memory(error)
        if out_of_memory and self._retried(a, b, out):
            return
        if self._remaining is None:
            self._remaining = iter(()) if self._others is None else self._others()
        limit = self._runner.workspace
        for choice, candidate in self._remaining:
            if out_of_memory and candidate.workspace >= limit:
                continue
            try:
                runner = candidate.build()
                runner(a, b, out)
            except (CudnnError, MemoryError) as other:
                if not is_refusal(other):
                    other.add_note(f"problem: {self.problem}; candidate: {choice.id}")
                    raise
                error.add_note(f"candidate {choice.id}: {other}")
                traceback.clear_frames(other.__traceback__)
                continue
            self.choice = choice
            self._runner = runner
            self._news = True
            warnings.warn(
                f"{failed.id} ran out of memory or is not supported ({error}); {choice.id} is used instead for "
                f"{self.problem}",
                UserWarning,
                stacklevel=4,
            )
            return
        raise error

    def _retried(self, a: Any, b: Any, out: Any) -> bool:
        """Runs the same candidate again after CuPy's pool has given its free blocks back; False when that fails too."""
        if self.device.kind == "cpu":
            return False
        devices.synchronize(self.device)
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
        try:
            self._runner(a, b, out)
        except (CudnnError, MemoryError) as again:
            if not is_refusal(again):
                raise
            return False
        return True
