"""A function traced for one signature: what it does, as problems."""

import inspect
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flcuda import device as devices
from flcuda.device import Array, Device
from flcuda.errors import FlcudaError
from flcuda.finder.graph_problem import GraphProblem, GraphTensor, Operation
from flcuda.finder.problem import default_math, dtype_word, is_broadcast, same_strides
from flcuda.traced.derivatives import Derivative, differentiate
from flcuda.traced.operations import Operations, Traced
from flcuda.traced.recorder import FunctionRecorder, Input, Recorder, live_operations, references

ALIGNMENT = 16
"""An address counts modulo so many bytes."""

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
# Results of a norm's forward pass that cuDNN does without.
_OPTIONAL = {"norm_forward": (1, 2)}


def is_array(value: Any) -> bool:
    """Says whether a value is an array of ours, NumPy's or CuPy's."""
    return isinstance(value, np.ndarray) or devices.is_cuda(value)


@dataclass(frozen=True, eq=False)
class Trace:
    """What tracing a function for one signature gave. It belongs to no thread.

    Attributes:
        recorder: its operations.
        inputs: by name, those that outputs depend on.
        outputs: names of what the function returned.
        several: it returned a tuple.
        layouts: by rank, the layout of what is written.
        math: of its problems.
        argument_shapes: by argument, the shape of an array.
        derivative: how backward is done; None when no gradient is wanted.
    """

    recorder: Recorder
    inputs: Mapping[str, Input]
    outputs: tuple[str, ...]
    several: bool
    layouts: Mapping[int, str]
    math: str
    argument_shapes: Mapping[int, tuple[int, ...]]
    derivative: Derivative | None = None

    @property
    def recomputed_needed(self) -> bool:
        """Whether backward needs what neither went in nor came out."""
        return self.derivative is not None and any(name not in self.outputs for name in self.derivative.saved)

    def written(self, recorder: Recorder, name: str) -> GraphTensor:
        """Describes what a graph writes."""
        shape = recorder.shapes[name]
        strides = devices.contiguous_strides(shape, self.layouts.get(len(shape), "nchw"))
        return GraphTensor(name, shape, strides, recorder.dtypes[name])

    def forward(self, saving: bool) -> GraphProblem:
        """Gives the forward problem, with what backward needs as further outputs or without."""
        saved = () if self.derivative is None or not saving else self.derivative.saved
        names = list(dict.fromkeys((*self.outputs, *saved)))
        return self.assemble(self.recorder, live_operations(self.recorder.operations, names), names)

    def recomputed(self) -> GraphProblem:
        """Gives the problem that makes what backward needs out of the inputs."""
        assert self.derivative is not None
        names = [name for name in self.derivative.saved if name not in self.outputs]
        return self.assemble(self.recorder, live_operations(self.recorder.operations, names), names)

    def assemble(
        self,
        recorder: Recorder,
        operations: Sequence[Operation],
        names: Sequence[str],
        known: Mapping[str, GraphTensor] | None = None,
        results: Mapping[str, GraphTensor] | None = None,
    ) -> GraphProblem:
        """Makes a problem of operations: what they read and do not make is known, `names` are the outputs."""
        tensors = {name: entry.tensor for name, entry in self.inputs.items()} if known is None else known
        read = {name for operation in operations for name in references(operation)}
        made = {name for operation in operations for name in operation.results if name is not None}
        written = dict.fromkeys(names)
        cleaned = []
        for operation in operations:
            kept: list[str | None] = []
            for position, name in enumerate(operation.results):
                used = name in read or name in written
                if name is not None and not used and position not in _OPTIONAL.get(operation.method, ()):
                    # cuDNN makes it whether it is wanted or not.
                    written[name] = None
                    used = True
                kept.append(name if used else None)
            cleaned.append(replace(operation, results=tuple(kept)))
        given = results or {}
        return GraphProblem(
            tensors=tuple(tensor for name, tensor in tensors.items() if name in read and name not in made),
            operations=tuple(cleaned),
            results=tuple(given.get(name) or self.written(recorder, name) for name in written),
            compute=recorder.compute,
            intermediate=recorder.intermediate,
            math=self.math,
        )


def must_copy(a: Array) -> bool:
    """Says whether no graph takes an array: it repeats memory, runs backward through it, or is not aligned (CUDA)."""
    unaligned = devices.is_cuda(a) and devices.alignment(a, ALIGNMENT) < ALIGNMENT
    return unaligned or is_broadcast(a) or any(step < 0 for step in a.strides)


def described(name: str, a: Array, layout: str | None, device: Device) -> GraphTensor:
    """Describes an array; one that may count as both layouts gets the one that is preferred."""
    strides = devices.element_strides(a)
    if layout is not None:
        preferred = devices.contiguous_strides(a.shape, layout)
        if same_strides(a.shape, strides, preferred):
            strides = preferred
    # NumPy runs alike at any address.
    alignment = ALIGNMENT if device.kind == "cpu" else devices.alignment(a, ALIGNMENT)
    return GraphTensor(name, tuple(a.shape), strides, dtype_word(a.dtype, name), alignment)


def _layouts(arrays: Iterable[Array]) -> dict[int, str]:
    """Gives by rank the layout of the first array that has one and not the other."""
    found: dict[int, str] = {}
    for a in arrays:
        if a.ndim < 3 or a.ndim in found:
            continue
        strides = devices.element_strides(a)
        fits = [x for x in devices.LAYOUTS if same_strides(a.shape, strides, devices.contiguous_strides(a.shape, x))]
        if len(fits) == 1:
            found[a.ndim] = fits[0]
        elif not fits:
            found[a.ndim] = "nhwc" if a.shape[1] > 1 and strides[1] == 1 else "nchw"
    return found


def _named(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Names the values of a call by the function's parameters, each once: the positional ones, then the keywords."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{function.__qualname__}: {error}") from None
    names: list[str] = []
    for parameter in signature.parameters.values():
        if len(names) == len(args) or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            break
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{index}" for index in range(len(args) - len(names))]
        else:
            names.append(parameter.name)
    unique: list[str] = []
    for name in [*names, *kwargs]:
        # The two words mean something else in a problem, and there may be both *a and a_0.
        while name in ("out", "_", *unique):
            name += "_"
        unique.append(name)
    return unique


class Settings(NamedTuple):
    """How a function's graphs compute: the decorator's arguments, None where they were left out."""

    compute: str | None = None
    intermediate: str | None = None
    math: str | None = None


def trace_function(
    function: Callable[..., Any],
    settings: Settings,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    needs: Sequence[bool],
) -> tuple[Trace, Device]:
    """Calls a user's function once, with a stand-in for each array.

    Args:
        function: the function.
        settings: how its graphs compute.
        args: its positional arguments, arrays and static ones.
        kwargs: those by keyword.
        needs: for each argument, whether its gradient is wanted; () for none.

    Returns:
        What it does, and where its arrays are.

    Raises:
        TypeError, ValueError: what it does is no graph; a note names its line.
        FlcudaError: a gradient is wanted of what has none.
    """
    where = function.__qualname__
    names = _named(function, args, kwargs)
    values = (*args, *kwargs.values())
    arrays = {i: value for i, value in enumerate(values) if is_array(value)}
    if any(isinstance(value, Traced) for value in values):
        raise TypeError(f"{where}: it is called inside another traced function; call {where}.__wrapped__ there")
    if not arrays:
        raise TypeError(f"{where}: no argument is an array")
    device = devices.require_same_device(**{names[i]: a for i, a in arrays.items()})
    for i, a in arrays.items():
        if 0 in a.shape:
            raise ValueError(f"{names[i]}: shape {a.shape} has no elements; a graph computes on none, so skip the call")
    copied = [i for i, a in arrays.items() if must_copy(a)]
    layouts = _layouts(a for i, a in arrays.items() if i not in copied)
    entries = {}
    for i, a in arrays.items():
        layout = layouts.get(a.ndim)
        if i in copied:
            strides = devices.contiguous_strides(a.shape, layout or "nchw")
            tensor = GraphTensor(names[i], tuple(a.shape), strides, dtype_word(a.dtype, names[i]))
            entries[i] = Input(i, tensor, layout or "nchw")
        else:
            entries[i] = Input(i, described(names[i], a, layout, device))
    words = [entry.tensor.dtype for entry in entries.values()]
    compute = settings.compute or ("float64" if "float64" in words else "float32")
    recorder = FunctionRecorder(compute, settings.intermediate or "", layouts, any(needs))
    stand_ins = list(values)
    for i, entry in entries.items():
        stand_ins[i] = Traced(recorder, recorder.argument(names[i], entry))
    try:
        returned = function(*stand_ins[: len(args)], **dict(zip(kwargs, stand_ins[len(args) :], strict=True)))
        outputs = _outputs(where, recorder, returned)
    except Exception as error:
        error.add_note(_place(error, function))
        raise
    operations = live_operations(recorder.operations, outputs)
    used = {name for operation in operations for name in references(operation)}
    inputs = {name: entry for name, entry in recorder.arguments.items() if name in used}
    derivative = None
    if any(needs):
        if len(outputs) != 1:
            raise FlcudaError(
                f"{where}: it returns {len(outputs)} tensors and an argument requires a gradient; gradients need a "
                f"function of one output: return one tensor, or call it in flcuda.no_grad()"
            )
        wanted = [name for name, entry in inputs.items() if needs[entry.argument]]
        try:
            derivative = differentiate(recorder, operations, list(inputs), wanted, outputs[0])
        except Exception as error:
            error.add_note(f"while the gradients of {line_of(function)} were derived")
            raise
    math = settings.math or default_math(words[0])
    several = isinstance(returned, tuple | list)
    shapes = {i: tuple(a.shape) for i, a in arrays.items()}
    return Trace(recorder, inputs, outputs, several, layouts, math, shapes, derivative), device


def _outputs(where: str, recorder: Recorder, returned: Any) -> tuple[str, ...]:
    """Gives the names of what a function returned, each the result of an operation of its own."""
    values = returned if isinstance(returned, tuple | list) else (returned,)
    names: list[str] = []
    for value in values:
        if not isinstance(value, Traced) or value._recorder is not recorder:
            raise TypeError(f"{where}: it returned {value!r}; a traced function returns its tensors, one or a tuple")
        if value.dtype == "boolean":
            raise TypeError(f"{where}: it returned the truth value {value.name}; use it in flcuda.graph.where instead")
        made = any(value.name in operation.results for operation in recorder.operations)
        names.append(value.name if made and value.name not in names else Operations().identity(value).name)
    if not names:
        raise TypeError(f"{where}: it returned no tensor")
    return tuple(names)


def line_of(function: Callable[..., Any]) -> str:
    """Names a function, with the file and line where it begins."""
    code = getattr(function, "__code__", None)
    return function.__qualname__ + (f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else "")


def _place(error: BaseException, function: Callable[..., Any]) -> str:
    """Says where in the user's code an error arose: the innermost frame that is not of this package."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_PACKAGE)]
    if not frames:
        return f"while {line_of(function)} was traced"
    return f"while {function.__qualname__} was traced: {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"
