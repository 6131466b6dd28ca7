"""Which functions cuDNN's headers have, and the means to run each of them on a GPU and to note that it ran.

The calls themselves are in function_families.py: a family is a function that calls some of them with real arguments and
checks what they compute. Families run in a process of their own (`Worker`), because one wrong argument of a C call can
end a process or leave its CUDA context unusable, which would take all other tests with it.
"""

import ast
import contextlib
import functools
import inspect
import multiprocessing
import re
import time
import traceback
from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from helpers import to_numpy

from flcuda import cudnn, device
from flcuda.cudnn import bindings, library, resources
from flcuda.errors import CudnnNotSupportedError

HEADERS = ("graph", "ops", "cnn")


@dataclass(frozen=True)
class Listed:
    """Why a function is not executed.

    Attributes:
        reason: in words.
        refused: whether a family calls it all the same and it has to raise CudnnNotSupportedError.
    """

    reason: str
    refused: bool = False


# The functions that no family can execute on a GPU, each with the reason. Those that are newer than the loaded cuDNN
# need no entry.
LISTED: dict[str, Listed] = {}


@dataclass(frozen=True)
class Function:
    """A function of the headers.

    Attributes:
        header: "graph", "ops" or "cnn".
        since: the CUDNN_VERSION that brought it.
    """

    header: str
    since: int


@functools.cache
def functions() -> dict[str, Function]:
    """Reads all bound functions of HEADERS out of bindings.py: of which header, and since when."""
    source = inspect.getsource(bindings)
    sections = [
        (number, match[1])
        for number, line in enumerate(source.splitlines(), 1)
        if (match := re.fullmatch(r"# cudnn_(\w+)\.h", line))
    ]
    found = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("cudnn"):
            continue
        header = [name for number, name in sections if number < node.lineno][-1]
        if header not in HEADERS:
            continue
        (bind,) = node.decorator_list
        assert isinstance(bind, ast.Call)
        since = next((ast.literal_eval(word.value) for word in bind.keywords if word.arg == "since"), "") or "9.0.0"
        major, minor, patch = (int(part) for part in since.split("."))
        found[node.name] = Function(header, major * 10000 + minor * 100 + patch)
    return found


def newer_than(version: int) -> set[str]:
    """The functions that a cuDNN of this version does not have yet."""
    return {name for name, function in functions().items() if function.since > version}


class RefusedError(Exception):
    """A listed function refused, as its entry says; the rest of its family cannot run."""


class Calls:
    """flcuda.cudnn, with a note of every function that returned without an error."""

    def __init__(self) -> None:
        self.executed: set[str] = set()
        self.refused: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        value = getattr(cudnn, name)
        if name not in functions():
            return value

        @functools.wraps(value)
        def call(*arguments: Any, **keywords: Any) -> Any:
            try:
                result = value(*arguments, **keywords)
            except CudnnNotSupportedError as error:
                self.refused.add(name)
                if name in LISTED and LISTED[name].refused:
                    raise RefusedError(name) from error
                raise
            self.executed.add(name)
            return result

        return call


@dataclass
class Session:
    """What a family gets.

    Attributes:
        c: cuDNN's functions, enums and types.
        rng: random numbers.
        stack: what is to be closed when the family is through, whatever happens.
    """

    c: Calls
    rng: np.random.Generator
    stack: contextlib.ExitStack

    @functools.cached_property
    def handle(self) -> resources.Handle:
        """This thread's handle, on the current stream."""
        return resources.handle()

    def normal(self, *shape: int) -> np.ndarray:
        """Standard normal numbers that float32 holds exactly, as float64."""
        return self.rng.standard_normal(shape).astype(np.float32).astype(np.float64)

    def gpu(self, values: np.ndarray, dtype: Any = np.float32) -> Any:
        """A copy on the GPU, rounded to the dtype."""
        return device.cupy().asarray(np.ascontiguousarray(values, dtype))

    def nan(self, *shape: int, dtype: Any = np.float32) -> Any:
        """An array on the GPU full of NaN, so that what nobody writes is seen."""
        return device.cupy().full(shape, np.nan, dtype)

    def workspace(self, nbytes: int) -> Any:
        """Device memory; at least one byte, as an address is wanted even where no byte is used."""
        return device.cupy().empty(max(nbytes, 1), np.uint8)

    def new(self, kind: str, *arguments: Any) -> Any:
        """Creates a descriptor, or another thing with functions cudnnCreate<kind> and cudnnDestroy<kind>."""
        pointer = getattr(self.c, f"cudnn{kind}_t")()
        getattr(self.c, f"cudnnCreate{kind}")(byref(pointer), *arguments)
        assert pointer
        self.stack.callback(getattr(self.c, f"cudnnDestroy{kind}"), pointer)
        return pointer

    def tensor(self, shape: tuple[int, ...], layout: str = "NCHW", dtype: str = "FLOAT") -> Any:
        """A 4-D tensor descriptor."""
        pointer = self.new("TensorDescriptor")
        self.c.cudnnSetTensor4dDescriptor(pointer, self._format(layout), self._data_type(dtype), *shape)
        return pointer

    def filter(self, shape: tuple[int, ...], layout: str = "NCHW", dtype: str = "FLOAT") -> Any:
        """A 4-D filter descriptor."""
        pointer = self.new("FilterDescriptor")
        self.c.cudnnSetFilter4dDescriptor(pointer, self._data_type(dtype), self._format(layout), *shape)
        return pointer

    def _format(self, layout: str) -> Any:
        return self.c.cudnnTensorFormat_t[f"CUDNN_TENSOR_{layout}"]

    def _data_type(self, dtype: str) -> Any:
        return self.c.cudnnDataType_t[f"CUDNN_DATA_{dtype}"]


def close(actual: Any, expected: np.ndarray, tolerance: float = 1e-4) -> None:
    """Compares an array on the GPU with float64, relative to the element and to the largest one."""
    found = to_numpy(actual).astype(np.float64)
    assert found.size == expected.size
    scale = float(np.abs(expected).max())
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=tolerance, atol=tolerance * scale)


@dataclass(frozen=True)
class Family:
    """A function that calls some of cuDNN's, and the names of those that it has to execute."""

    run: Callable[[Session], None]
    functions: frozenset[str]


FAMILIES: dict[str, Family] = {}


def family(names: str) -> Callable[[Callable[[Session], None]], Callable[[Session], None]]:
    """Declares which functions a family executes: their names, separated by white space."""

    def declare(run: Callable[[Session], None]) -> Callable[[Session], None]:
        FAMILIES[run.__name__] = Family(run, frozenset(names.split()))
        return run

    return declare


@dataclass(frozen=True)
class Outcome:
    """What came of a family.

    Attributes:
        executed: the functions that returned without an error, on a GPU that was well afterwards.
        refused: those that raised CudnnNotSupportedError at least once.
        failure: what went wrong, a traceback as a rule; empty when nothing did.
        unusable: whether the process is no longer of use.
        version: of the loaded cuDNN.
        seconds: how long it took.
    """

    executed: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    failure: str = ""
    unusable: bool = False
    version: int = 0
    seconds: float = 0.0


def run_family(name: str, seed: int) -> Outcome:
    """Runs a family in this process."""
    begin = time.perf_counter()
    chosen = FAMILIES[name]
    calls = Calls()
    failure = ""
    unusable = False
    version = 0
    try:
        version = library.load().version
        with contextlib.ExitStack() as stack, contextlib.suppress(RefusedError):
            chosen.run(Session(calls, np.random.default_rng(seed), stack))
    except Exception:
        failure = traceback.format_exc()
    try:
        if device.cuda_available():
            device.synchronize(device.resolve("cuda"))
    except Exception:
        failure += traceback.format_exc()
        unusable = True
        calls.executed.clear()
    if not failure:
        missing = chosen.functions - calls.executed - newer_than(version) - set(LISTED)
        if missing:
            failure = f"declared but not executed: {', '.join(sorted(missing))}"
    seconds = time.perf_counter() - begin
    return Outcome(frozenset(calls.executed), frozenset(calls.refused), failure, unusable, version, seconds)


def serve(connection: Any, seed: int) -> None:
    """Runs families by name until None comes; the body of the worker's process."""
    import function_families  # noqa: F401 (fills FAMILIES)

    while (name := connection.recv()) is not None:
        connection.send(run_family(name, seed))


@dataclass
class Worker:
    """Runs each family once, in a process that is started anew after it has died or has become unusable."""

    seed: int
    timeout: float = 120.0
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    _process: Any = None
    _connection: Any = None

    def outcome(self, name: str) -> Outcome:
        """Gives a family's outcome; runs it the first time."""
        if name not in self.outcomes:
            self.outcomes[name] = self._run(name)
        return self.outcomes[name]

    def _run(self, name: str) -> Outcome:
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=serve, args=(theirs, self.seed), daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._connection.send(name)
            if not self._connection.poll(self.timeout):
                self.close(kill=True)
                return Outcome(failure=f"not through after {self.timeout:g} s", unusable=True)
            outcome: Outcome = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(10)
            code = self._process.exitcode
            self.close(kill=True)
            return Outcome(failure=f"the process ended with exit code {code}", unusable=True)
        if outcome.unusable:
            self.close(kill=True)
        return outcome

    def close(self, *, kill: bool = False) -> None:
        """Ends the process: by asking it to, or at once."""
        if self._process is None:
            return
        if not kill:
            with contextlib.suppress(OSError):
                self._connection.send(None)
            self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._connection.close()
        self._process = self._connection = None
