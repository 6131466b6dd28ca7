"""The decorator: a traced function as something to call, with gradients.

Note [hit]: a function is called with the same kind of arrays thousands of times. Each thread keeps a bounded dict from
what can be read off the arguments at once (device, shape, strides, dtype, address modulo 16, policy, which gradients
are wanted, all that is no array) to what was worked out for the first call. On a hit outputs are allocated and the plan
runs. Where no engine takes the forward graph with the further outputs that backward needs, backward computes these
again.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flcuda import device as devices
from flcuda import finder
from flcuda.autograd import Function, Tensor
from flcuda.device import Array, Device
from flcuda.errors import CudnnNotSupportedError
from flcuda.finder.graph_problem import GraphProblem
from flcuda.finder.policy import current_policy
from flcuda.finder.problem import Problem
from flcuda.traced.backward import Allocation, Backward, Planner, copied, ordered, reshaped
from flcuda.traced.collapse import plan_or_collapse
from flcuda.traced.derivatives import Derivative
from flcuda.traced.explanation import Explanation, explain_for, explain_here
from flcuda.traced.operations import Operations
from flcuda.traced.recorder import Input
from flcuda.traced.trace import ALIGNMENT, Settings, Trace, described, is_array, line_of, must_copy, trace_function

REMEMBERED = 256
"""How many kinds of calls a thread remembers; the oldest goes first."""


class _Remembered(threading.local):
    """The dict of Note [hit]; plans belong to a thread."""

    def __init__(self) -> None:
        self.calls: dict[Any, Any] = {}


_remembered = _Remembered()


def _remember(key: Any, call: Any) -> None:
    calls = _remembered.calls
    if len(calls) >= REMEMBERED:
        del calls[next(iter(calls))]
    calls[key] = call


def _raw(value: Any) -> tuple[Any, ...]:
    """Reads off an argument what Note [hit] is keyed by."""
    if isinstance(value, np.ndarray):
        return (value.shape, value.strides, value.dtype)
    if devices.is_cuda(value):
        data = value.data
        return (value.shape, value.strides, value.dtype, data.device_id, data.ptr & (ALIGNMENT - 1))
    # Numbers that are equal and of different types are different arguments.
    return (type(value), value)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


class Call:
    """What the first call of a kind worked out: see Note [hit].

    Attributes:
        trace: what the function does.
        device: where.
        kept: names of the inputs that backward reads.
        saved: names of the results that backward reads, with their positions.
        saving: whether the forward problem writes what backward needs.
    """

    def __init__(self, trace: Trace, device: Device) -> None:
        self.trace = trace
        self.device = device
        self.saving = trace.derivative is not None
        problem = trace.forward(self.saving)
        try:
            self.plan = _planned(problem, device, last=not trace.recomputed_needed)
        except CudnnNotSupportedError:
            if not trace.recomputed_needed:
                raise
            self.saving = False
            problem = trace.forward(saving=False)
            self.plan = _planned(problem, device)
        self._inputs = tuple(trace.inputs[name] for name in problem.inputs)
        self._plain = not any(entry.copied or entry.shape for entry in self._inputs)
        self._positions = tuple(entry.argument for entry in self._inputs)
        self._made = tuple(Allocation(tensor, device.xp) for tensor in problem.results)
        self.count = len(trace.outputs)
        self.kept: tuple[str, ...] = ()
        self.saved: tuple[tuple[str, int], ...] = ()
        if trace.derivative is not None:
            self._keep(problem, trace.derivative)

    def _keep(self, problem: GraphProblem, derivative: Derivative) -> None:
        read = set(derivative.read)
        if not self.saving and self.trace.recomputed_needed:
            read |= set(self.trace.recomputed().inputs)
        self.kept = tuple(name for name in problem.inputs if name in read)
        self.saved = tuple((name, i) for i, name in enumerate(problem.outputs) if name in read)
        self._names = problem.inputs

    def run(self, values: Sequence[Any]) -> tuple[list[Array], list[Array]]:
        """Runs the plan; gives the operands and the results."""
        if self.device.kind == "cpu" or self.device.xp.cuda.runtime.getDevice() == self.device.index:
            return self._run(values)
        with self.device.use():
            return self._run(values)

    def _run(self, values: Sequence[Any]) -> tuple[list[Array], list[Array]]:
        operands = [values[i] for i in self._positions]
        if not self._plain:
            operands = [_prepared(a, entry) for a, entry in zip(operands, self._inputs, strict=True)]
        results = [made.make() for made in self._made]
        self.plan.run(*operands, *results)
        return operands, results

    def environment(self, operands: Sequence[Array], results: Sequence[Array]) -> dict[str, Array]:
        """Gives by name the arrays that backward reads."""
        found = {name: a for name, a in zip(self._names, operands, strict=True) if name in self.kept}
        found.update((name, results[i]) for name, i in self.saved)
        return found


def _planned(problem: GraphProblem, device: Device, last: bool = True) -> Any:
    """Plans a forward problem; an error that is the last word says what would be right."""
    try:
        return plan_or_collapse(problem, functools.partial(finder.plan, device=device))
    except CudnnNotSupportedError as error:
        if last and problem.contracts and problem.precision == "float32":
            error.add_note(
                "nearly all fused engines use tensor cores, and on float32 that is TF32, which has to be asked for: "
                "@flcuda.graph(math='tensor_op')"
            )
        raise


def _prepared(a: Array, entry: Input) -> Array:
    if entry.copied:
        a = copied(a, entry.copied)
    return a if entry.shape is None else reshaped(a, entry.shape)


# --- the decorator ----------------------------------------------------------------------------------------------------


class GraphCall(Function):
    """One call of a traced function, with its derivative."""

    def forward(
        self,
        *arrays: Array,
        function: "GraphFunction",
        values: tuple[Any, ...],
        words: tuple[str, ...],
        rest: list[Array],
    ) -> Array:
        """Runs the forward graph, keeping what the backward graphs read; results after the first go into rest."""
        given = tuple(value if a is None else a for value, a in zip(values, arrays, strict=True))
        needs = self.needs_grad if any(self.needs_grad) else ()
        call, given = function.lookup(given, words, needs)
        operands, results = call.run(given)
        if needs:
            self.trace, self.saving, self.device = call.trace, call.saving, call.device
            self.function = function.__wrapped__
            self.arrays = call.environment(operands, results)
        rest.append(call.trace.several)
        rest.extend(results[1 : call.count])
        return results[0]

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """Runs the backward graphs."""
        derivative = self.trace.derivative
        assert derivative is not None
        targets = {i: target for i, target in enumerate(self.targets) if target is not None and self.needs_grad[i]}
        places = tuple((i, _raw(target.array), target.accumulate) for i, target in targets.items())
        with self.device.use():
            # Engines want one memory order, and an address of theirs.
            layout = self.trace.layouts.get(grad.ndim, "nchw")
            grad = copied(grad, layout) if must_copy(grad) else ordered(grad, layout)
            key = (self.trace, self.saving, current_policy(), _raw(grad), places)
            backward = _remembered.calls.get(key)
            if backward is None:
                tensor = described(derivative.seed, grad, self.trace.layouts.get(grad.ndim), self.device)
                plan = functools.partial(finder.plan, device=self.device)
                try:
                    backward = Backward(self.trace, self.saving, tensor, targets, self.device, plan)
                except Exception as error:
                    error.add_note(f"while the backward pass of {line_of(self.function)} was planned")
                    raise
                gradients = backward.run(self.arrays, grad, targets)
                # Remembered once it has run.
                _remember(key, backward)
            else:
                gradients = backward.run(self.arrays, grad, targets)
        return tuple(gradients.get(i) for i in range(len(self.needs_grad)))


class GraphFunction:
    """A traced function: call it with arrays, or with Tensors for gradients.

    Made by `flcuda.graph`. Arrays (CuPy, NumPy, or by DLPack) give arrays; where an argument is a Tensor or Parameter
    the result is a Tensor, through which gradients flow. All other arguments are static: hashable, and a new trace for
    each value. What the function reads and does not get as an argument, such as a number of a closure, a global or an
    attribute, is read when it is traced and then stays: pass what changes as an argument. Outputs have the inputs'
    dtype, reductions and statistics the compute dtype, and the layout of the first input of that rank.
    """

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        self.settings = settings
        functools.update_wrapper(self, function)
        self.__wrapped__ = function

    __qualname__: str

    def __repr__(self) -> str:
        return f"<flcuda.graph of {self.__qualname__}>"

    def __reduce__(self) -> str:
        # As a function: by its name, and its copy is itself.
        return self.__qualname__

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        raise TypeError(f"{self.__qualname__}: flcuda.graph decorates functions, and this one is called as a method")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the function.

        Args:
            *args: arrays or Tensors on one device, borrowed; and static arguments.
            **kwargs: likewise.

        Returns:
            An array or a Tensor, or a tuple of these where the function returns a tuple; owned by the caller.

        Raises:
            TypeError, ValueError: what the function does with these arguments is no graph; a note names its line.
            CudnnNotSupportedError: no engine takes the graph; the text says why each refuses.
            FlcudaError: a gradient is wanted of what has none; or there is no plan, and a CUDA graph is captured.
        """
        values = (*args, *kwargs.values())
        words = tuple(kwargs)
        for value in values:
            if isinstance(value, Tensor):
                return self._with_tensors(values, words)
        call, values = self.lookup(values, words, ())
        results = call.run(values)[1]
        return tuple(results[: call.count]) if call.trace.several else results[0]

    def _with_tensors(self, values: tuple[Any, ...], words: tuple[str, ...]) -> Any:
        tensors: list[Tensor | None] = []
        for i, value in enumerate(values):
            if isinstance(value, Tensor):
                tensors.append(value)
            elif hasattr(value, "__dlpack__"):
                tensors.append(Tensor(devices.asarray(value, f"argument {i + 1}")))
            else:
                tensors.append(None)
        rest: list[Any] = []
        first = GraphCall.apply(*tensors, function=self, values=values, words=words, rest=rest)
        several, *others = rest
        return (first, *map(Tensor, others)) if several else first

    def lookup(
        self, values: tuple[Any, ...], words: tuple[str, ...], needs: Sequence[bool]
    ) -> tuple[Call, tuple[Any, ...]]:
        """Finds what was worked out for such a call, or works it out; also gives the values with arrays of ours.

        Args:
            values: the positional arguments, then those by keyword.
            words: the keywords.
            needs: for each value, whether its gradient is wanted; () for none.

        Returns:
            The call, and the values.
        """
        parts = []
        for i, value in enumerate(values):
            if not is_array(value) and hasattr(value, "__dlpack__"):
                ours = devices.asarray(value, f"argument {i + 1}")
                return self.lookup((*values[:i], ours, *values[i + 1 :]), words, needs)
            parts.append(_raw(value))
        key = (self, current_policy(), words, needs, *parts)
        try:
            call = _remembered.calls.get(key)
        except TypeError:
            for i, value in enumerate(values):
                if not is_array(value) and not _is_hashable(value):
                    raise TypeError(
                        f"{self.__qualname__}: argument {i + 1}, {value!r}, is neither an array nor hashable; give a "
                        f"number, a word or a tuple of these"
                    ) from None
            raise
        if call is None:
            trace, device = self._traced(values, words, needs)
            try:
                with device.use():
                    call = Call(trace, device)
            except Exception as error:
                error.add_note(f"while {line_of(self.__wrapped__)} was planned")
                raise
            _remember(key, call)
        return call, values

    def _traced(self, values: tuple[Any, ...], words: tuple[str, ...], needs: Sequence[bool]) -> tuple[Trace, Device]:
        count = len(values) - len(words)
        return trace_function(
            self.__wrapped__, self.settings, values[:count], dict(zip(words, values[count:], strict=True)), needs
        )

    # what it would do

    def problem(self, *args: Any, **kwargs: Any) -> GraphProblem:
        """Gives the GraphProblem of a call, without gradients; nothing is run.

        Args:
            *args: as for a call.
            **kwargs: as for a call.

        Returns:
            The problem.
        """
        values, _ = self._plain((*args, *kwargs.values()))
        return self._traced(values, tuple(kwargs), ())[0].forward(saving=False)

    def backward_problems(self, *args: Any, **kwargs: Any) -> tuple[Problem, ...]:
        """Gives the Problems of the backward pass, in the order of running; nothing is run.

        Args:
            *args: as for a call; the gradients that are wanted are those of Tensors that require one, or of all arrays
                where no argument is a Tensor.
            **kwargs: as for a call.

        Returns:
            The problems, as they are where engines take each one; see Note [backward].
        """
        values, needs = self._plain((*args, *kwargs.values()))
        if not any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
            needs = tuple(is_array(value) for value in values)
        if not any(needs):
            return ()
        trace, device = self._traced(values, tuple(kwargs), needs)
        return tuple(_backward_like_output(trace, device, True, lambda _: None).problems)

    def explain(self, *args: Any, gpu: str | None = None, **kwargs: Any) -> Explanation:
        """Says how a call is done: every engine with its time, and why each other one refuses.

        Args:
            *args: as for a call; with Tensors that require a gradient the backward problems are explained too.
            gpu: the name or file of a GPU's profile, such as "h200": what cuDNN has for it is listed and nothing is
                run; the arrays are NumPy's then. By default the candidates are measured on the arrays' device.
            **kwargs: as for a call.

        Returns:
            What prints as text of 80 columns; `to_json` gives the same as JSON text.

        Raises:
            FlcudaError: the GPU, cuDNN or libcuda.so.1 is not here.
        """
        values, needs = self._plain((*args, *kwargs.values()))
        trace, device = self._traced(values, tuple(kwargs), needs if any(needs) else ())
        explanation = Explanation(self.__qualname__)
        with device.use(), explain_here(device) if gpu is None else explain_for(gpu) as explain:

            def asked(title: str, problem: Problem) -> None:
                part = explain(title, problem)
                explanation.parts.append(part)
                if part.refusal is not None:
                    raise part.refusal

            saving = trace.derivative is not None
            try:
                plan_or_collapse(trace.forward(saving), functools.partial(asked, "forward"))
            except CudnnNotSupportedError:
                if not saving or not trace.recomputed_needed:
                    return explanation
                saving = False
                try:
                    title = "forward, without what backward needs"
                    plan_or_collapse(trace.forward(saving=False), functools.partial(asked, title))
                except CudnnNotSupportedError:
                    return explanation
            if trace.derivative is not None:
                numbers = itertools.count(1)
                try:
                    _backward_like_output(trace, device, saving, lambda p: asked(f"backward {next(numbers)}", p))
                except CudnnNotSupportedError:
                    return explanation
        return explanation

    def _plain(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        """Gives the arrays of Tensors, and which require a gradient."""
        needs = tuple(isinstance(value, Tensor) and value.requires_grad for value in values)
        plain = tuple(value.data if isinstance(value, Tensor) else value for value in values)
        return tuple(
            devices.asarray(value, f"argument {i + 1}") if hasattr(value, "__dlpack__") else value
            for i, value in enumerate(plain)
        ), needs


def _backward_like_output(trace: Trace, device: Device, saving: bool, plan: Planner) -> Backward:
    """Plans the backward pass for a gradient that lies in memory as the output does."""
    assert trace.derivative is not None
    grad = replace(trace.written(trace.recorder, trace.outputs[0]), name=trace.derivative.seed)
    return Backward(trace, saving, grad, {}, device, plan)


class GraphDecorator(Operations):
    """What `flcuda.graph` is: the decorator of traced functions, and by its methods their operations."""

    def __call__(
        self,
        function: Callable[..., Any] | None = None,
        *,
        compute: str | None = None,
        intermediate: str | None = None,
        math: str | None = None,
    ) -> Any:
        """Decorates a function of tensors: `@flcuda.graph`, or `@flcuda.graph(compute="float32")`.

        Args:
            function: what is traced: its array arguments become tensors on which the operations of `flcuda.graph` and
                + - * / ** @ work; it returns one tensor or a tuple.
            compute: the dtype in which operations compute; by default float64 where an argument is float64, else
                float32.
            intermediate: the dtype of what stays inside the graph; by default that of compute.
            math: "tensor_op" or "fma"; by default tensor_op for 16-bit arrays and fma for others: TF32 is used when
                tensor_op is asked for, never silently.

        Returns:
            A GraphFunction; without a function, what makes one of the function that follows.

        Raises:
            ValueError: an argument is no such word.
            TypeError: function is none.
        """
        for name, word, known in (
            ("compute", compute, ("float64", "float32", "float16", "bfloat16", "int32")),
            ("intermediate", intermediate, devices.DTYPES),
            ("math", math, ("fma", "tensor_op")),
        ):
            if word is not None and word not in known:
                raise ValueError(f"{name}: {word!r} is none of {', '.join(known)}")
        if function is None:
            return functools.partial(self, compute=compute, intermediate=intermediate, math=math)
        if not callable(function) or not hasattr(function, "__qualname__"):
            raise TypeError(f"function: {function!r} is no function")
        return GraphFunction(function, Settings(compute, intermediate, math))

    def __repr__(self) -> str:
        return "flcuda.graph"
