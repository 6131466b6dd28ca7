"""A Plan's operands: several inputs and outputs, and the fast path, which must refuse all that the long way refuses.

The arrays on CUDA are CuPy's own, of memory that is not there: nothing reads it.
"""

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import finder_fakes
import numpy as np
import pytest

import flcuda
from flcuda import device as devices
from flcuda.device import CPU, Device
from flcuda.errors import CudnnError, CudnnNotSupportedError, FlcudaError
from flcuda.finder.plan import Plan
from flcuda.finder.problem import ConvolutionProblem, Problem

cupy = pytest.importorskip("cupy")

CUDA = Device("cuda", 0)
PROBLEM = ConvolutionProblem.parse("forward n2 c8 6x5 k16 3x3 p1 float16 nhwc")
ADDRESSES = iter(range(0x7F0000000000, 0x7F8000000000, 1 << 20))


@dataclass(frozen=True, slots=True)
class TwoOutputs(Problem):
    """z = x * w + b and y, two outputs of three inputs, each (2, 3)."""

    def __str__(self) -> str:
        return "two outputs"

    kind = "graph"
    compute = "float32"
    math = "fma"
    accumulate = False
    inputs = ("x", "w", "b")
    outputs = ("z", "y")

    def shape_of(self, name: str) -> tuple[int, ...]:
        return (2, 3)

    def strides_of(self, name: str) -> tuple[int, ...]:
        return (3, 1)

    def dtype_of(self, name: str) -> str:
        return "float32"

    def alignment_of(self, name: str) -> int:
        return 16


class Launches:
    """A runner that takes addresses, and must not be called with arrays."""

    workspace = 0

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.error = error

    def launch(self, addresses: tuple[int, ...]) -> None:
        self.calls.append(addresses)
        if self.error is not None:
            raise self.error

    def __call__(self, *operands: Any) -> None:
        self.launch(addresses_of(operands))


def addresses_of(arrays: Iterable[Any]) -> tuple[int, ...]:
    return tuple(array.data.ptr for array in arrays)


class Runs:
    """A runner that keeps what it is called with."""

    workspace = 0

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error = error

    def __call__(self, *operands: Any) -> None:
        self.calls.append(operands)
        if self.error is not None:
            raise self.error


def array(
    problem: Problem, name: str, *, device: int = 0, offset: int = 0, dtype: Any = None, layout: Any = None
) -> Any:
    """A CuPy array of memory that is not there."""
    memory = cupy.cuda.UnownedMemory(next(ADDRESSES), 1 << 20, None, device)
    kind = devices.DTYPES[problem.dtype_of(name)] if dtype is None else np.dtype(dtype)
    shape = problem.shape_of(name)
    elements = problem.strides_of(name) if layout is None else devices.contiguous_strides(shape, layout)
    strides = tuple(step * kind.itemsize for step in elements)
    return cupy.ndarray(shape, kind, cupy.cuda.MemoryPointer(memory, offset), strides)


def operands(problem: Problem = PROBLEM) -> list[Any]:
    return [array(problem, name) for name in problem.operands]


@dataclass
class Cuda:
    """Which device is current, and how often a Plan made one current."""

    current: int = 0
    used: int = 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    state = Cuda()

    @contextlib.contextmanager
    def use(device: Device) -> Iterator[None]:
        state.used += 1
        before, state.current = state.current, device.index
        yield
        state.current = before

    monkeypatch.setattr(Device, "use", use)
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: state.current)
    monkeypatch.setattr(devices, "is_capturing", lambda: False)
    return state


def made(problem: Problem = PROBLEM, runner: Any = None, device: Device = CUDA, **arguments: Any) -> Plan:
    choice = finder_fakes.choice(finder_fakes.key(PROBLEM))
    choice = replace(choice, key=replace(choice.key, problem=problem))
    return Plan(choice, device, Runs() if runner is None else runner, **arguments)


def warm(problem: Problem = PROBLEM) -> tuple[Plan, Runs]:
    """A Plan that has seen good operands, so that its next call may take the fast path."""
    runner = Runs()
    result = made(problem, runner)
    *inputs, out = operands(problem)
    result(*inputs, out=out)
    runner.calls.clear()
    return result, runner


# --- the fast path ----------------------------------------------------------------------------------------------------


def test_the_same_and_new_arrays_take_the_fast_path(cuda: Cuda, only_fast: Callable[[Plan], None]) -> None:
    plan, runner = warm()
    only_fast(plan)
    used = cuda.used
    x, w, y = operands()
    other = operands()
    assert plan(x, w, out=y) is y
    plan(x, w, out=y)
    plan(other[0], w, out=other[2])
    assert [[each.data.ptr for each in call] for call in runner.calls] == [
        [each.data.ptr for each in call] for call in ((x, w, y), (x, w, y), (other[0], w, other[2]))
    ]
    assert cuda.used == used


def _shape_set(arrays: list[Any]) -> None:
    """The same object with another shape: CuPy lets it be set."""
    arrays[0].shape = (1, *arrays[0].shape[:1], *arrays[0].shape[1:])


BAD: dict[str, tuple[type[Exception], Callable[[list[Any]], None]]] = {
    "shape": (ValueError, lambda a: a.__setitem__(0, a[0][:1])),
    "shape set in place": (ValueError, _shape_set),
    "output's shape": (ValueError, lambda a: a.__setitem__(2, a[2][:, :8])),
    "dtype": (TypeError, lambda a: a.__setitem__(0, array(PROBLEM, "x", dtype=np.int16))),
    "bfloat16": (TypeError, lambda a: a.__setitem__(1, array(PROBLEM, "w", dtype=devices.DTYPES["bfloat16"]))),
    "strides": (ValueError, lambda a: a.__setitem__(1, array(PROBLEM, "w", layout="nchw"))),
    "output's strides": (ValueError, lambda a: a.__setitem__(2, array(PROBLEM, "y", layout="nchw"))),
    "alignment": (ValueError, lambda a: a.__setitem__(0, array(PROBLEM, "x", offset=2))),
    "output's alignment": (ValueError, lambda a: a.__setitem__(2, array(PROBLEM, "y", offset=8))),
    "device": (ValueError, lambda a: a.__setitem__(1, array(PROBLEM, "w", device=1))),
    "output's device": (ValueError, lambda a: a.__setitem__(2, array(PROBLEM, "y", device=1))),
    "NumPy": (ValueError, lambda a: a.__setitem__(0, np.zeros(a[0].shape, np.float16))),
    "NumPy output": (ValueError, lambda a: a.__setitem__(2, np.zeros(a[2].shape, np.float16))),
    "a number": (TypeError, lambda a: a.__setitem__(0, 3)),
    "the inputs exchanged": (ValueError, lambda a: a.insert(0, a.pop(1))),
    "a tuple as output": (TypeError, lambda a: a.__setitem__(2, (a[2],))),
    "too many": (TypeError, lambda a: a.insert(0, a[0])),
    "too few": (TypeError, lambda a: a.pop(0)),
}


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("bad", BAD)
def test_what_is_wrong_is_refused_in_the_same_words(bad: str, times: int, cuda: Cuda) -> None:
    """Also in the very arrays that passed before, as often as it takes to be known by the array itself."""
    error, spoil = BAD[bad]
    fresh = made()
    plan, runner = warm()
    arrays = operands()
    for _ in range(times):
        plan(arrays[0], arrays[1], out=arrays[2])
    runner.calls.clear()
    spoil(arrays)
    *inputs, out = arrays
    with pytest.raises(error) as expected:
        fresh(*inputs, out=out)
    for _ in range(2):
        with pytest.raises(error) as caught:
            plan(*inputs, out=out)
        assert str(caught.value) == str(expected.value)
    if "output" not in bad:
        # without an output the inputs alone are to blame
        with pytest.raises((ValueError, TypeError)):
            plan(*inputs)
    assert not runner.calls


@pytest.mark.parametrize("problem", [PROBLEM, TwoOutputs()], ids=str)
def test_the_same_arrays(problem: Problem, cuda: Cuda, only_fast: Callable[[Plan], None]) -> None:
    """They may be reshaped in between, are told from others with the same addresses, and are not kept alive."""
    runner = Launches()
    plan = made(problem, runner)
    arrays = operands(problem)
    expected = addresses_of(arrays)

    def call(given: list[Any]) -> None:
        count = len(problem.inputs)
        out = tuple(given[count:]) if len(problem.outputs) > 1 else given[count]
        assert plan(*given[:count], out=out) is out

    for _ in range(4):
        call(arrays)
        only_fast(plan)
    shape = arrays[0].shape
    arrays[0].shape = (1, *shape)
    with pytest.raises(AssertionError, match="the long way"):
        call(arrays)
    arrays[0].shape = shape
    call(arrays)
    assert runner.calls == [expected] * 5
    first = arrays[0]
    for place, array in enumerate(arrays):
        # the same memory in another array: of the right shape, and of a wrong one
        view = cupy.ndarray(array.shape, array.dtype, array.data, array.strides)
        call([*arrays[:place], view, *arrays[place + 1 :]])
        with pytest.raises(AssertionError, match="the long way"):
            call([*arrays[:place], array[:1, :1], *arrays[place + 1 :]])
        call(arrays)
    assert set(runner.calls) == {expected}
    gone = weakref.ref(first)
    del first, array
    arrays.clear()
    assert gone() is None


def test_a_runner_that_takes_addresses(cuda: Cuda, only_fast: Callable[[Plan], None]) -> None:
    runner = Launches()
    plan = made(PROBLEM, runner)
    sets = [operands() for _ in range(3)]
    for x, w, y in sets * 2:
        plan(x, w, out=y)
        only_fast(plan)
    assert runner.calls == [addresses_of(arrays) for arrays in sets * 2]


def test_a_runner_that_takes_addresses_gets_new_outputs(
    cuda: Cuda, only_fast: Callable[[Plan], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for problem in (PROBLEM, TwoOutputs()):
        monkeypatch.setattr(cupy.cuda, "alloc", lambda size: array(PROBLEM, "x").data)
        runner = Launches()
        plan = made(problem, runner)
        arrays = operands(problem)
        count = len(problem.inputs)
        out = tuple(arrays[count:]) if len(problem.outputs) > 1 else arrays[count]
        plan(*arrays[:count], out=out)
        only_fast(plan)
        for _ in range(3):
            results = plan(*arrays[:count])
            outputs = results if len(problem.outputs) > 1 else (results,)
            assert runner.calls[-1] == addresses_of((*arrays[:count], *outputs))
            assert [each.shape for each in outputs] == [problem.shape_of(name) for name in problem.outputs]


def test_after_a_fall_the_other_runner_is_called_as_it_wants(cuda: Cuda) -> None:
    runner = Launches(CudnnNotSupportedError("cudnnBackendExecute", 3000))
    other = Runs()
    third = Launches()
    candidate = finder_fakes.Fake("other").candidate("fake")
    plan = made(PROBLEM, runner)
    chosen = finder_fakes.choice(algo="other")
    builders: tuple[Callable[[], Any], ...] = (lambda: other, lambda: third)
    plan._others = lambda: iter([(chosen, replace(candidate, build=build)) for build in builders])
    x, w, y = operands()
    with pytest.warns(UserWarning, match="other is used instead"):
        plan(x, w, out=y)
    plan(x, w, out=y)
    assert other.calls == [(x, w, y)] * 2
    other.error = runner.error
    with pytest.warns(UserWarning, match="other is used instead") as caught:
        plan(x, w, out=y)
    assert caught[0].filename == __file__
    plan(x, w, out=y)
    assert third.calls == [addresses_of((x, w, y))] * 2


def test_another_thread_is_refused(cuda: Cuda) -> None:
    plan, runner = warm()
    x, w, y = operands()
    errors: list[Exception] = []

    def call() -> None:
        try:
            plan(x, w, out=y)
        except FlcudaError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "was made on another thread" in str(errors[0])
    assert not runner.calls


def test_another_current_device_is_changed_for_the_run(cuda: Cuda) -> None:
    plan, _ = warm()
    seen: list[int] = []
    plan._runner = lambda *_: seen.append(cuda.current)  # type: ignore[assignment]
    x, w, y = operands()
    cuda.current = 1
    plan(x, w, out=y)
    assert (seen, cuda.current) == ([0], 1)
    cuda.current = 0
    plan(x, w, out=y)
    assert seen == [0, 0]


def test_strides_of_size_1_dimensions_may_be_any_and_change(cuda: Cuda, only_fast: Callable[[Plan], None]) -> None:
    problem = ConvolutionProblem.parse("forward n1 c8 6x5 k16 1x1 float16 nhwc")
    plan, runner = warm(problem)
    x, w, y = operands(problem)
    odd = cupy.ndarray(x.shape, x.dtype, x.data, (2, *x.strides[1:]))
    for first in (x, odd, x, odd):
        plan(first, w, out=y)
    assert len(runner.calls) == 4
    only_fast(plan)
    plan(odd, w, out=y)


def test_a_subclass_and_names_take_the_long_way(cuda: Cuda) -> None:
    class Own(cupy.ndarray):  # type: ignore[misc, name-defined]
        pass

    plan, runner = warm()
    x, w, y = operands()
    plan(Own(x.shape, x.dtype, x.data, x.strides), w, out=y)
    plan(x=x, w=w, out=y)
    plan(x, w=w, out=y)
    assert len(runner.calls) == 3
    with pytest.raises(TypeError, match="'x' is given twice"):
        plan(x, x=x, w=w, out=y)


def test_new_outputs(cuda: Cuda, only_fast: Callable[[Plan], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are from CuPy's current allocator, with the Problem's strides."""
    taken: list[int] = []

    def alloc(size: int) -> Any:
        taken.append(size)
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(next(ADDRESSES), size, None, 0), 0)

    monkeypatch.setattr(cupy.cuda, "alloc", alloc)
    plan, runner = warm()
    only_fast(plan)
    x, w, _ = operands()
    y = plan(x, w)
    assert runner.calls == [(x, w, y)]
    assert (y.shape, y.dtype) == (PROBLEM.shape_of("y"), np.float16)
    assert devices.element_strides(y) == PROBLEM.strides_of("y")
    assert taken == [y.nbytes]


def test_an_accumulating_plan_needs_its_output(cuda: Cuda) -> None:
    plan, runner = warm(ConvolutionProblem.parse(f"{PROBLEM} acc"))
    x, w, _ = operands()
    with pytest.raises(ValueError, match="out is None; this Problem adds"):
        plan(x, w)
    assert not runner.calls


def test_a_refusal_on_the_fast_path_falls_to_the_next_candidate(cuda: Cuda) -> None:
    plan, runner = warm()
    other = Runs()
    candidate = finder_fakes.Fake("other").candidate("fake")
    candidate = replace(candidate, build=lambda: other)
    plan._others = lambda: iter([(finder_fakes.choice(algo="other"), candidate)])
    runner.error = CudnnNotSupportedError("cudnnBackendExecute", 3000)
    x, w, y = operands()
    with pytest.warns(UserWarning, match="other is used instead") as caught:
        plan(x, w, out=y)
    assert caught[0].filename == __file__
    assert len(other.calls) == 1
    runner.error = None
    plan(x, w, out=y)
    assert len(other.calls) == 2
    other.error = CudnnError("cudnnBackendExecute", 5000)
    with pytest.raises(CudnnError) as failed:
        plan(x, w, out=y)
    assert any("problem: " in note for note in failed.value.__notes__)


def falling(runner: Any, *others: Any) -> Plan:
    """A Plan with other candidates, of the workspaces that their runners have."""
    plan = made(PROBLEM, runner)
    candidate = finder_fakes.Fake("other").candidate("fake")
    chosen = finder_fakes.choice(algo="other")
    plan._others = lambda: iter(
        [
            (chosen, replace(candidate, build=lambda other=other: other, workspace=other.workspace))  # type: ignore[misc]
            for other in others
        ]
    )
    return plan


def test_the_long_path_warns_its_caller(cuda: Cuda) -> None:
    x, w, y = operands()
    for call in (lambda plan: plan(x, w, out=y), lambda plan: plan(x=x, w=w, out=y), lambda plan: plan.run(x, w, y)):
        plan = falling(Runs(CudnnNotSupportedError("cudnnBackendExecute", 3000)), Runs())
        with pytest.warns(UserWarning, match="other is used instead") as caught:
            call(plan)
        assert caught[0].filename == __file__


OUT_OF_MEMORY = [
    MemoryError("full"),
    CudnnError("cudnnBackendExecute", 4002, "device"),
    CudnnError("cudnnBackendExecute", 4003, "host"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["CuPy's", "cuDNN's, device", "cuDNN's, host"])
def test_out_of_memory_goes_to_one_that_takes_less(
    error: Exception, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To any other where the one that failed takes no workspace: then an engine allocated for itself."""
    monkeypatch.setattr(devices, "synchronize", lambda device: None)
    freed: list[int] = []
    pool = type("Pool", (), {"free_all_blocks": lambda self: freed.append(1)})()
    monkeypatch.setattr(cupy, "get_default_memory_pool", lambda: pool)
    x, w, y = operands()
    for needed, more, less in ((100, 100, 99), (0, 50, 0)):
        best, larger, smaller = Launches(error), Runs(), Runs()
        best.workspace, larger.workspace, smaller.workspace = needed, more, less
        plan = falling(best, larger, smaller)
        with pytest.warns(UserWarning, match="other is used instead"):
            plan(x, w, out=y)
        assert len(best.calls) == 2, "once more after the pool was emptied"
        assert [len(each.calls) for each in (larger, smaller)] == ([0, 1] if needed else [1, 0])
    assert len(freed) == 2


def test_out_of_memory_is_remembered_for_that_limit_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all threads of the process, and for no other limit: there the same candidate may fit."""
    best = finder_fakes.Fake("best", 1.0, workspace=100)
    finder_fakes.only(monkeypatch, best, finder_fakes.Fake("less", 3.0, delay=60, workspace=99))
    limits = (None, 1000, 2000)

    def chosen(limit: int | None) -> str:
        policy = flcuda.Policy(workspace_limit=limit)
        arrays = finder_fakes.PROBLEM.random_arrays()
        plan = flcuda.plan(finder_fakes.PROBLEM, policy=policy, device="cpu")
        plan(**arrays)
        return plan.choice.algo

    assert [chosen(limit) for limit in limits] == ["best"] * 3
    best.run_errors = lambda _: MemoryError("full")
    with pytest.warns(UserWarning, match="less is used instead"):
        assert chosen(1000) == "less"
    tried = best.calls
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(chosen(1000)))
    thread.start()
    thread.join()
    assert found == ["less"]
    assert best.calls == tried
    best.run_errors = lambda _: None
    assert [chosen(limit) for limit in limits] == ["best", "less", "best"]


def test_what_an_error_leaves_behind_is_no_candidate(cuda: Cuda) -> None:
    """Every candidate out of memory: the caller gets that error, and the next call tries no candidate again."""
    runner, other = Launches(MemoryError("full")), Runs(MemoryError("full too"))
    runner.workspace = 100
    plan = falling(runner, other)
    x, w, y = operands()
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Plan, "_retried", lambda *_: False)
            with pytest.raises(MemoryError, match="full") as caught:
                plan(x, w, out=y)
        assert any(str(PROBLEM) in note for note in caught.value.__notes__)
    assert len(other.calls) == 1


def test_run_at_runs_by_addresses_and_falls_like_run(cuda: Cuda) -> None:
    runner, other = Launches(), Runs()
    plan = falling(runner, other)
    arrays = tuple(operands())
    plan.run_at((1, 2, 3), arrays)
    assert runner.calls == [(1, 2, 3)]
    runner.error = CudnnNotSupportedError("cudnnBackendExecute", 3000)
    with pytest.warns(UserWarning, match="other is used instead") as caught:
        plan.run_at((1, 2, 3), arrays)
    assert caught[0].filename == __file__
    plan.run_at((1, 2, 3), arrays)
    assert other.calls == [arrays, arrays]


def test_what_ran_is_told_once(cuda: Cuda) -> None:
    told: list[str] = []
    plan = made(PROBLEM, Launches(), ran=lambda choice: told.append(choice.algo))
    plan.choice = replace(plan.choice, median_ms=None)
    plan._news = True
    arrays = tuple(operands())
    for _ in range(3):
        plan.run_at(addresses_of(arrays), arrays)
    assert told == ["im2col"]


# --- several inputs and outputs ---------------------------------------------------------------------------------------


def numbers(*names: str) -> dict[str, Any]:
    rng = np.random.default_rng(len(names))
    return {name: rng.standard_normal((2, 3)).astype(np.float32) for name in names}


def two_outputs(x: Any, w: Any, b: Any, z: Any, y: Any) -> None:
    z[...] = x * w + b
    y[...] = np.maximum(z, 0)


two_outputs.workspace = 0  # type: ignore[attr-defined]


def test_outputs_of_every_form() -> None:
    plan = made(TwoOutputs(), two_outputs, CPU)
    given = numbers("x", "w", "b")
    z, y = (np.empty((2, 3), np.float32) for _ in range(2))
    out = (z, y)
    assert plan(*given.values(), out=out) is out
    expected = given["x"] * given["w"] + given["b"]
    np.testing.assert_array_equal(z, expected)
    np.testing.assert_array_equal(y, np.maximum(expected, 0))
    made_by_it = plan(given["x"], b=given["b"], w=given["w"])
    assert isinstance(made_by_it, tuple)
    np.testing.assert_array_equal(made_by_it[0], expected)
    np.testing.assert_array_equal(made_by_it[1], np.maximum(expected, 0))
    z[...] = 0
    plan(**given, out=[z, y])
    np.testing.assert_array_equal(z, expected)
    z[...] = 0
    plan.run(*given.values(), z, y)
    np.testing.assert_array_equal(z, expected)


@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        (lambda z, y: z, TypeError, "out must be a tuple of the 2 outputs z and y, not numpy.ndarray"),
        (lambda z, y: (z,), TypeError, "out has 1 arrays; the plan has the 2 outputs z and y"),
        (lambda z, y: (z, y, y), TypeError, "out has 3 arrays"),
        (lambda z, y: (z, None), TypeError, r"out\[1\] \(y\): expected a NumPy or CuPy array"),
        (lambda z, y: (z, y[:1]), ValueError, r"out\[1\] \(y\) has shape \(1, 3\)"),
        (lambda z, y: (z.astype(np.float64), y), TypeError, r"out\[0\] \(z\) has dtype float64"),
        (lambda z, y: (z, np.broadcast_to(y, y.shape)), ValueError, r"out\[1\] \(y\) is read-only"),
    ],
)
def test_wrong_outputs(out: Any, error: type[Exception], words: str) -> None:
    plan = made(TwoOutputs(), two_outputs, CPU)
    z, y = (np.empty((2, 3), np.float32) for _ in range(2))
    with pytest.raises(error, match=words):
        plan(*numbers("x", "w", "b").values(), out=out(z, y))


def test_wrong_inputs() -> None:
    plan = made(TwoOutputs(), two_outputs, CPU)
    given = numbers("x", "w", "b")
    with pytest.raises(TypeError, match="a plan of graph needs w and b"):
        plan(given["x"])
    with pytest.raises(TypeError, match="a plan of graph has no input 'q'; it has x, w, b"):
        plan(**given, q=1)
    with pytest.raises(TypeError, match="takes the inputs x, w and b, not 4; give the output as out="):
        plan(*given.values(), given["x"])


def test_several_outputs_on_the_fast_path(cuda: Cuda, only_fast: Callable[[Plan], None]) -> None:
    runner = Runs()
    plan = made(TwoOutputs(), runner)
    x, w, b, z, y = operands(TwoOutputs())
    plan(x, w, b, out=(z, y))
    only_fast(plan)
    out = (z, y)
    assert plan(x, w, b, out=out) is out
    assert runner.calls == [(x, w, b, z, y)] * 2
    with pytest.raises(AssertionError, match="the long way"):
        plan(x, w, b, out=(z,))
    with pytest.raises(AssertionError, match="the long way"):
        plan(x, w, b, out=[z, y])


# --- ranges for profilers ---------------------------------------------------------------------------------------------


def test_ranges_only_where_a_profiler_is(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[str] = []
    monkeypatch.setattr(cupy.cuda.nvtx, "RangePush", lambda name: pushed.append(name))
    monkeypatch.setattr(cupy.cuda.nvtx, "RangePop", lambda: pushed.append("pop"))
    runner = Runs()
    assert made(PROBLEM, runner)._runner is runner
    monkeypatch.setattr(sys.modules[Plan.__module__], "_PROFILED", True)
    assert made(TwoOutputs(), runner, CPU)._runner is runner
    plan = made(PROBLEM, runner)
    assert plan.workspace == runner.workspace
    x, w, y = operands()
    plan(x, w, out=y)
    assert pushed == [f"{PROBLEM} / reference:im2col", "pop"]
    runner.error = CudnnError("cudnnBackendExecute", 5000)
    with pytest.raises(CudnnError):
        plan(x, w, out=y)
    assert pushed[2:] == [f"{PROBLEM} / reference:im2col", "pop"]
