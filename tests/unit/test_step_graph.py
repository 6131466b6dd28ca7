"""Captured steps, with a fake in place of CUDA: a capture that does nothing yet, launches without Python."""

import contextlib
import copy
import gc
import itertools
import threading
import types
import warnings
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import flcuda
from flcuda import amp, autograd, device, nn, optim
from flcuda import functional as F
from flcuda.autograd import Function, Tensor
from flcuda.device import CPU
from flcuda.errors import CaptureError, CudnnError, FlcudaError
from flcuda.parameters import Parameter
from flcuda.training import CapturedStep, Trainer, step_graph
from flcuda.training.step_graph import WARM_UP

World = Callable[[], list[Any]]


class FakePlace:
    """A device on which a capture has no effect on arrays, and a launch has none on what Python keeps.

    Both come of running the step as it is: the capture then puts the arrays of all objects back, and the launch all
    that is not an array, whether the objects have told of it or not.
    """

    def __init__(self, world: World = list) -> None:
        self.device = CPU
        self.world = world
        self.calls: list[str] = []
        self.capturing = False
        self.fails: BaseException | None = None
        self.nbytes = 100

    def is_capturing(self) -> bool:
        return self.capturing

    def begin(self) -> None:
        self.calls.append("begin")

    def end(self) -> None:
        self.calls.append("end")

    def wait(self) -> None:
        self.calls.append("wait")

    def close(self) -> None:
        self.calls.append("close")

    def fixed(self, a: Any, layout: str) -> Any:
        out = device.empty(a.shape, a.dtype, device=CPU, layout=layout)
        out[...] = 0
        return out

    def fill(self, a: Any, out: Any) -> None:
        out[...] = a

    def run(self, step: Callable[[], Any]) -> Any:
        self.calls.append("run")
        return step()

    def capture(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        self.calls.append("capture")
        before = [(o, state_of(o)) for o in self.world()]
        contents = [(a, a.copy()) for o in self.world() for a in arrays_of(o)]
        self.capturing = True
        try:
            results = step()
        finally:
            self.capturing = False
            for a, values in contents:
                a[...] = values
        made = [
            (o, name, value)
            for o, state in before
            for name, value in state_of(o).items()
            if isinstance(value, np.ndarray) and value is not state[name]
        ]
        return (step, results, made, before), results

    def launch(self, graph: Any) -> None:
        self.calls.append("launch")
        if self.fails is not None:
            raise self.fails
        step, results, made, before = graph
        kept = [(o, state_of(o)) for o in self.world()]
        set_states(before)
        if device.is_recording_step():
            raise AssertionError("a launch is not a part of the step")
        with device.recording(capturing=True):  # the host's part after a launch is left to the captured step
            again = step()
        # Into the arrays that the graph knows.
        for o, name, out in made:
            if getattr(o, name) is not None and getattr(o, name) is not out:
                out[...] = getattr(o, name)
        set_states(kept)
        for a, b in zip(leaves(results), leaves(again), strict=True):
            a[...] = b


def set_states(states: list[tuple[Any, dict[str, Any]]]) -> None:
    for o, state in states:
        for name, value in state.items():
            setattr(o, name, copy.copy(value) if isinstance(value, list | dict) else value)


def state_of(o: Any) -> dict[str, Any]:
    if isinstance(o, Parameter):
        return {"grad": o.grad, "buffer": o.buffer}
    if isinstance(o, Tensor):
        return {"grad": o.grad}
    if hasattr(o, "__slots__"):
        return {name: getattr(o, name) for name in o.__slots__}
    return {name: copy.copy(v) if isinstance(v, list | dict) else v for name, v in vars(o).items()}


def arrays_of(o: Any) -> list[np.ndarray]:
    found = []
    for value in state_of(o).values():
        parts = value if isinstance(value, list | tuple) else [value]
        found += [part for part in parts if isinstance(part, np.ndarray)]
    return found


def leaves(results: Any) -> Iterator[np.ndarray]:
    if isinstance(results, Tensor):
        yield results.data
    elif isinstance(results, np.ndarray):
        yield results
    elif isinstance(results, tuple | list):
        for part in results:
            yield from leaves(part)
    elif isinstance(results, dict):
        yield from leaves(list(results.values()))


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[FakePlace]:
    """Makes captured steps take fakes; lists them."""
    made: list[FakePlace] = []

    def new_place(_: Any) -> FakePlace:
        made.append(FakePlace(lambda: made[0].things))  # type: ignore[attr-defined]
        made[-1].things = []  # type: ignore[attr-defined]
        return made[-1]

    monkeypatch.setattr(step_graph, "_new_place", new_place)
    return made


class Spoiled(Function):
    """Passes x; multiplies its gradient by a factor, 1 or NaN."""

    def forward(self, x: Any, factor: Any) -> Any:
        self.factor = factor
        return x.copy()

    def backward(self, grad: Any) -> tuple[Any, ...]:
        return (grad * self.factor.astype(grad.dtype),)


class Case:
    """A network with optimizer and scaler; counts how often Python ran its step."""

    def __init__(self, way: str, **options: Any) -> None:
        draws = nn.Draws(3)
        self.model = nn.Sequential(
            nn.Conv2D(2, 4, 3, padding=1, precision="float16", device="cpu", seed=draws),
            nn.BatchNorm2D(4, precision="float16", device="cpu"),
            nn.ReLU(),
            nn.Dropout(0.3, device="cpu", seed=draws),
            nn.Flatten(),
            nn.Linear(4 * 9, 5, precision="float16", device="cpu", seed=draws),
        )
        self.optimizer = optim.SGD(self.model, 0.05, momentum=0.9, max_norm=1.0, weight_decay=1e-3)
        self.scaler = amp.DynamicScaler(**{"init_scale": 256.0, "growth_interval": 3, "max_scale": 4096.0, **options})
        self.factor = np.ones(1)
        self.runs = 0
        self.way = way

    def step(self, x: Any, y: Any) -> Any:
        self.runs += 1
        loss = F.cross_entropy(Spoiled.apply(self.model(x), factor=self.factor), y)
        if self.way == "scaler":
            self.scaler.step(self.optimizer, loss)
        elif self.way == "zero first":
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        elif self.way == "zero last":
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        elif self.way == "unscale":
            self.scaler.scale(loss).backward()
            self.scaler.unscale(self.optimizer)
        elif self.way == "accumulate":
            self.scaler.scale(loss).backward()
        else:
            raise AssertionError(self.way)
        return loss, F.correct_count(loss.data.reshape(1, 1), np.zeros(1, np.int64))

    def things(self) -> list[Any]:
        homes = [arena._home for arena in self.optimizer.arenas]
        states = [m.state for _, m in self.model.named_modules() if isinstance(m, nn.Dropout)]
        checks = [_Flags(check.flags) for check in self.scaler._checks.values()]
        on_device = _Flags(self.scaler._state) if self.scaler._device is not None else _Flags(np.zeros(0))
        return [
            *(p for arena in self.optimizer.arenas for p in arena.parameters),
            *self.optimizer.arenas,
            *homes,
            *self.optimizer.statistics,
            self.optimizer,
            *(_Flags(a) for flats in self.optimizer._states().values() for a in flats),
            self.scaler,
            *checks,
            on_device,
            *states,
        ]

    def host(self) -> list[Any]:
        """What Python would go on by."""
        grads = [p.grad is None for p in self.model.parameters()]
        settled = [s.settled for s in self.optimizer.statistics]
        o, s = self.optimizer, self.scaler
        scaled = None if s._scaled_at is None else s._scaled_at < o.last_gradient
        known = [o.inv_scale is None, o.flags is None, o._unscaled_at in (None, o.last_gradient), o.last_gradient > 0]
        return [*grads, *settled, *known, scaled, s._order, s._optimizer is o, s._last is None, s._steps_since_news]

    def written(self) -> list[np.ndarray]:
        arrays = [a for arena in self.optimizer.arenas for a in (arena.master, arena.data, arena.grad)]
        arrays += [a for flats in self.optimizer._states().values() for a in flats]
        arrays += [a for s in self.optimizer.statistics for a in (s.running, s.running_counts, s.pending)]
        return [a.copy() for a in (*arrays, self.optimizer.steps)]


class _Flags:
    def __init__(self, array: Any) -> None:
        self.array = array


def batch(seed: int, n: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, 2, 3, 3)).astype(np.float32), rng.integers(0, 5, n)


def both(way: str, places: list[FakePlace], **options: Any) -> tuple[Case, Case, Any]:
    ours, theirs = Case(way, **options), Case(way, **options)
    step = flcuda.capture(ours.step)
    step(*batch(0))
    theirs.step(*batch(0))
    places[0].world = ours.things
    return ours, theirs, step


def assert_alike(ours: Case, theirs: Case) -> None:
    assert ours.host() == theirs.host()
    for a, b in zip(ours.written(), theirs.written(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert ours.scaler.state_dict() == theirs.scaler.state_dict()


@pytest.mark.parametrize("way", ["scaler", "zero first", "zero last"])
def test_each_call_is_one_step_and_leaves_what_the_step_would(way, places):
    ours, theirs, step = both(way, places)
    for seed in range(1, 14):
        for case in (ours, theirs):
            case.optimizer.lr = 0.1 / seed
            case.factor[0] = np.nan if way == "scaler" and seed in (5, 8) else 1.0
        loss, _ = step(*batch(seed))
        expected, _ = theirs.step(*batch(seed))
        np.testing.assert_array_equal(loss.data, expected.data)
        assert_alike(ours, theirs)
    assert ours.runs == WARM_UP + 1 + places[0].calls.count("launch")  # the fake runs it at each launch
    assert step.captured == 1
    assert places[0].calls.count("capture") == 1
    assert places[0].calls.count("run") == WARM_UP - 1
    assert (ours.scaler.state_dict()["skipped_steps"] == 2) == (way == "scaler")


def test_a_step_whose_outcome_the_host_asks_for(places):
    ours, theirs, step = both("unscale", places)
    for seed in range(1, 10):
        for case in (ours, theirs):
            case.factor[0] = np.nan if seed in (4, 7) else 1.0
            if case.scaler.adjust_scale_factor():
                case.optimizer.step()
            case.optimizer.zero_grad()
        step(*batch(seed))
        theirs.step(*batch(seed))
        assert_alike(ours, theirs)
        assert ours.optimizer.flags is not None
    assert step.captured == 1


def test_gradients_that_are_there_make_another_graph(places):
    """Four micro-batches: the first writes gradients, the others add to them, eager ones in between as well."""
    ours, theirs, step = both("accumulate", places)
    for seed in range(1, 30):
        if seed % 4 == 0:
            for case in (ours, theirs):
                case.scaler.step(case.optimizer, F.cross_entropy(case.model(batch(seed)[0]), batch(seed)[1]))
        if seed == 22:
            ours.step(*batch(seed))
        else:
            step(*batch(seed))
        theirs.step(*batch(seed))
        assert_alike(ours, theirs)
    assert step.captured == 2


def test_a_loss_that_the_scaler_did_not_scale_is_still_noticed(places):
    ours, _, step = both("scaler", places)
    for seed in range(1, 6):
        step(*batch(seed))
    F.cross_entropy(ours.model(batch(6)[0]), batch(6)[1]).backward()
    with pytest.raises(FlcudaError, match="gradients that this scaler did not scale"):
        step(*batch(7))
    ours.optimizer.zero_grad()
    step(*batch(7))
    assert step.captured == 1


@pytest.mark.parametrize("change", ["weight_decay", "momentum", "rule", "storage"])
def test_what_a_graph_has_fixed_is_captured_anew(change, places):
    ours, theirs, step = both("scaler", places)
    for seed in range(1, 12):
        step(*batch(seed))
        theirs.step(*batch(seed))
        assert_alike(ours, theirs)
        if seed != 5:
            continue
        for case in (ours, theirs):
            if change == "weight_decay":
                case.optimizer.weight_decay = 0.1
            elif change == "momentum":
                case.optimizer.load_state_dict({**case.optimizer.state_dict(), "momentum": 0.5})
            elif change == "rule":
                case.scaler.growth_interval = 2
            else:
                larger = nn.Sequential(case.model, nn.Linear(5, 5, device="cpu", seed=1))
                case.optimizer = optim.SGD(larger, 0.05)
    assert places[0].calls.count("capture") == 2


def test_too_many_skips_in_replays_raise_and_the_step_is_done(places):
    ours, _, step = both("scaler", places, max_consecutive_skips=3)
    for seed in range(1, 5):
        step(*batch(seed))
    ours.factor[0] = np.nan
    for seed in range(2):
        step(*batch(seed))
    with pytest.raises(FlcudaError, match="3 steps in a row up to step 8 "):
        step(*batch(6))
    assert places[0].calls[-2:] == ["launch", "end"]
    assert ours.scaler.state_dict()["steps"] == 8
    assert step.captured == 1


def test_a_signature_each_for_shapes_dtypes_layouts_words_and_contexts(places):
    seen = []

    def function(x: Any, y: Any = None, *, word: Any = None) -> Any:
        seen.append((x, word))
        return x.data * 2 if isinstance(x, Tensor) else x * 2

    step = flcuda.capture(function)
    base = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    calls: list[Callable[[], Any]] = [
        lambda: step(base),
        lambda: step(base[..., :3]),
        lambda: step(base.astype(np.float64)),
        lambda: step(device.to_layout(base, "nhwc")),
        lambda: step(Tensor(base)),
        lambda: step(base, word="a"),
        lambda: step(base, word=1),
        lambda: step(base, word=True),
        lambda: step(base, [base, (base, 3)]),
        lambda: step(base, {"k": base}),
    ]
    for _ in range(4):
        for call in calls:
            call()
        with autograd.no_grad():
            step(base)
        with flcuda.policy(deterministic=True):
            step(base)
    assert step.captured == len(calls) + 2
    assert all(isinstance(x, Tensor | np.ndarray) for x, _ in seen)
    assert {device.memory_layout(x) for x, _ in seen if not isinstance(x, Tensor)} == {"nchw", "nhwc"}
    np.testing.assert_array_equal(step(base[..., :3]), base[..., :3] * 2)


def test_results_stay_in_their_arrays_and_may_be_of_many_kinds(places):
    Pair = namedtuple("Pair", "a b")

    @flcuda.capture
    def step(x: Any) -> Any:
        return {"pair": Pair(Tensor(x + 1), [x * 2, 3, "word", None]), "same": x}

    results = [step(np.full(3, float(i))) for i in range(6)]
    for i, result in enumerate(results[:WARM_UP]):
        np.testing.assert_array_equal(result["pair"].a.data, np.full(3, i + 1.0))
        np.testing.assert_array_equal(result["same"], np.full(3, float(i)))
    assert all(result is results[-1] for result in results[WARM_UP:])
    assert type(results[-1]["pair"]) is Pair
    np.testing.assert_array_equal(results[-1]["pair"].a.data, np.full(3, 6.0))
    assert results[-1]["pair"].b[1:] == [3, "word", None]
    assert not results[-1]["pair"].a.requires_grad


def test_results_and_arguments_that_no_graph_can_have(places):
    with pytest.raises(TypeError, match=r"the result: a captured step gives arrays.*not a object"):
        flcuda.capture(lambda x: object())(np.ones(2))
    step = flcuda.capture(lambda x, y: x)
    with pytest.raises(TypeError, match="argument 1: a set is neither an array nor hashable"):
        step(np.ones(2), {1})
    with pytest.raises(TypeError, match=r"argument 1\[0\]: a Tensor that requires a gradient"):
        step(np.ones(2), [Tensor(np.ones(2), requires_grad=True)])
    for bad in (0, 1.5, True):
        with pytest.raises((ValueError, TypeError), match="signatures: "):
            flcuda.capture(signatures=bad)(lambda: None)
    with pytest.raises(TypeError, match="function: a int cannot be called"):
        CapturedStep(3)  # type: ignore[arg-type]


def test_old_signatures_go_with_one_warning(places):
    step = flcuda.capture(lambda x: x + 1, signatures=2)
    for size, _ in itertools.product((1, 2), range(3)):
        step(np.zeros(size))
    with pytest.warns(UserWarning, match="more than 2 kinds of arguments"):
        step(np.zeros(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(np.zeros(2))
        assert places[0].calls[-2] == "launch"
        step(np.zeros(1))
        step(np.zeros(4))
    assert step.captured == 0


def test_a_step_that_never_begins_alike_runs_without_a_graph_and_says_so(places):
    ours = Case("zero last")
    step = flcuda.capture(ours.step)

    def calls() -> None:
        for seed in range(9):
            step(*batch(seed))
            ours.optimizer.weight_decay = 1e-3 * seed

    with pytest.warns(UserWarning, match="in more ways than it keeps graphs for"):
        calls()
    assert step.captured == 0
    assert ours.optimizer.state_dict()["weight_decay"] == 8e-3


class CUDARuntimeError(RuntimeError):
    status = 900


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (RuntimeError("the current stream is capturing, so synchronous API calls are disallowed"), "give arrays back"),
        (CUDARuntimeError("cudaErrorStreamCaptureUnsupported"), r"the host cannot read a value \(float\(\)"),
        (NotImplementedError("calling cuBLAS API during stream capture is currently unsupported"), "F.linear"),
        (FlcudaError("none can be searched while a CUDA graph is captured"), "did what none of them did"),
        (FlcudaError("the scaler's first use cannot be captured in a CUDA graph"), "first use cannot be captured"),
        (CudnnError("cudnnBackendExecute", 5000), "cuDNN refused to be captured"),
        (MemoryError("out of memory"), "make the batch smaller"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_what_cannot_be_captured_is_undone_and_explained(error, match, late, places):
    ours, theirs, step = both("scaler", places)
    model = ours.model

    def poisoned(x: Any) -> Any:
        if places[0].capturing:
            raise error
        return nn.Sequential.forward(model, x)

    model.forward = poisoned  # type: ignore[method-assign]
    if late:
        model.forward = lambda x: nn.Sequential.forward(model, x)  # type: ignore[method-assign]
        places[0].fails = error
    step(*batch(1))
    theirs.step(*batch(1))
    with pytest.raises(CaptureError, match=match) as caught:
        step(*batch(2))
    assert caught.value.__cause__ is error
    assert str(caught.value).startswith("the step Case.step cannot be captured in a CUDA graph: ")
    assert "Nothing of this call has happened on the device" in str(caught.value)
    assert_alike(ours, theirs)
    assert not device.is_recording_step()
    # The same batch by hand, and then the next calls run again.
    ours.step(*batch(2))
    theirs.step(*batch(2))
    del model.forward
    places[0].fails = None
    for seed in range(3, 9):
        step(*batch(seed))
        theirs.step(*batch(seed))
        assert_alike(ours, theirs)
        # What was not searched yet is searched before the next try.
        assert places[0].calls.count("capture") == (1 if seed < 3 + WARM_UP else 2)
    assert step.captured == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("mine")])
def test_other_errors_of_a_step_come_as_they_are(error, places):
    ours, theirs, step = both("zero first", places)
    step(*batch(1))
    theirs.step(*batch(1))
    apply = optim.SGD.apply
    try:
        optim.SGD.apply = lambda *_, **__: (_ for _ in ()).throw(error)  # type: ignore[method-assign]
        with pytest.raises(type(error)) as caught:
            step(*batch(2))
    finally:
        optim.SGD.apply = apply  # type: ignore[method-assign]
    assert caught.value is error
    assert "captured in a CUDA graph" in error.__notes__[0]
    assert_alike(ours, theirs)
    for seed in range(3, 7):
        step(*batch(seed))
        theirs.step(*batch(seed))
    assert_alike(ours, theirs)


def test_weights_that_move_are_read_where_they_are(places):
    model = nn.Linear(3, 2, device="cpu", seed=1)
    step = flcuda.capture(lambda x: model(x))
    x = batch(0)[0][0, 0]
    for _ in range(4):
        step(x)
    optim.SGD(model, 0.1)
    model.load_state_dict({key: value * 2 for key, value in model.state_dict().items()})
    for _ in range(4):
        np.testing.assert_array_equal(step(x).data, model(x).data)
    assert places[0].calls.count("capture") == 2


def test_gradients_of_before_a_replay_stay_older_than_what_comes_between(places):
    """An update alone is captured; gradients and scales are made without."""
    ours, other = Case("zero first"), Case("zero first")
    scaler = amp.DynamicScaler(4.0)
    update = flcuda.capture(lambda x: ours.optimizer.step())
    for seed in range(5):
        ours.optimizer.zero_grad()
        F.cross_entropy(ours.model(batch(seed)[0]), batch(seed)[1]).backward()
        came = ours.optimizer.last_gradient
        scaler.scale(F.cross_entropy(other.model(batch(seed)[0]), batch(seed)[1])).backward()
        update(np.zeros(1))
        places[0].world = ours.things
        assert ours.optimizer.last_gradient == came
        with pytest.raises(FlcudaError, match="gave this optimizer's parameters no gradient"):
            scaler.unscale(ours.optimizer)
        scaler.step(other.optimizer, F.cross_entropy(other.model(batch(seed)[0]), batch(seed)[1]))
    assert update.captured == 1


def test_what_a_plan_runs_is_kept_with_the_graph(places):
    w = np.ones((2, 2, 3, 3), np.float32)
    step = flcuda.capture(lambda x: F.conv2d(Tensor(x), Tensor(w)))
    kept = []
    for i in range(4):
        step(batch(i)[0])
        kept.append([v._kept for s in step._graphs.signatures.values() for v in s.variants])
    assert kept[:WARM_UP] == [[[]]] * WARM_UP
    assert len(kept[-1][0]) == 1
    assert callable(kept[-1][0][0])


def test_a_learning_rate_within_a_captured_step_is_refused(monkeypatch):
    ours = Case("zero first")
    monkeypatch.setattr(ours.optimizer, "device", device.Device("cuda"))
    monkeypatch.setattr(device, "is_capturing", lambda: True)
    before = ours.optimizer.lr
    with pytest.raises(FlcudaError, match=r"lr: set to 0\.5 while a CUDA graph is captured"):
        ours.optimizer.lr = 0.5
    assert ours.optimizer.lr == before


def test_a_result_in_host_memory_is_refused(places, monkeypatch):
    monkeypatch.setattr(step_graph.devices, "device_of", lambda a: device.Device("cuda", 1))
    step = flcuda.capture(lambda: 3)
    [step() for _ in range(3)]
    step = flcuda.capture(lambda: np.ones(2))
    [step() for _ in range(WARM_UP)]
    with pytest.raises(CaptureError, match="gives an array on cuda:1, which no replay on cpu"):
        step()


def test_steps_within_steps_are_parts_of_them(places):
    inner = flcuda.capture(lambda x: x + 1)
    outer = flcuda.capture(lambda x: inner(x) * 2)
    for i in range(5):
        np.testing.assert_array_equal(outer(np.full(2, float(i))), np.full(2, 2.0 * (i + 1)))
    assert (inner.captured, outer.captured) == (0, 1)
    [inner(np.zeros(2)) for _ in range(3)]
    assert inner.captured == 1
    places[0].capturing = True
    before = list(places[0].calls)
    np.testing.assert_array_equal(outer(np.zeros(2)), [2, 2])
    assert places[0].calls == before


def test_on_the_cpu_the_function_is_just_called(monkeypatch):
    given = []

    @flcuda.capture
    def step(x: Any) -> Any:
        """A step."""
        given.append(x)
        return object()

    x = np.ones(3)
    results = [step(x) for _ in range(5)]
    assert all(g is x for g in given)
    assert len({id(r) for r in results}) == 5
    assert (step.__name__, step.__doc__, step.captured) == ("step", "A step.", 0)


def test_threads_take_turns(places):
    active, most = [], []

    def function(x: Any) -> Any:
        active.append(1)
        most.append(len(active))
        y = x + 1
        active.pop()
        return y

    step = flcuda.capture(function)
    found: list[Any] = []

    def work(size: int) -> None:
        found.extend(np.array_equal(step(np.full(size, float(i))), np.full(size, i + 1.0)) for i in range(50))

    threads = [threading.Thread(target=work, args=(size,)) for size in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 200
    assert max(most) == 1
    assert step.captured == 4


def test_a_thread_captures_only_what_it_has_run_itself(places):
    """cuDNN's plans are a thread's own, and to make them is no work for a capture."""
    step = flcuda.capture(lambda x: x + 1)

    def call(times: int) -> None:
        for _ in range(times):
            step(np.zeros(2))

    def elsewhere(times: int) -> None:
        thread = threading.Thread(target=call, args=(times,))
        thread.start()
        thread.join()

    call(WARM_UP)
    elsewhere(WARM_UP)
    assert step.captured == 0
    call(WARM_UP)
    assert places[0].calls.count("run") == 3 * (WARM_UP - 1)
    assert step.captured == 0
    call(1)
    assert step.captured == 1
    elsewhere(3)
    assert places[0].calls.count("launch") == 4
    assert places[0].calls.count("run") == 3 * (WARM_UP - 1)


def test_graphs_are_let_go_of_when_the_device_has_done_with_them(places):
    step = flcuda.capture(lambda x: x + 1, signatures=1)
    [step(np.zeros(1)) for _ in range(3)]
    places[0].calls.clear()
    with pytest.warns(UserWarning, match="more than 1 kinds"):
        step(np.zeros(2))
    assert "wait" in places[0].calls
    model = nn.Linear(2, 2, device="cpu", seed=1)
    forward = flcuda.capture(lambda x: model(x))
    [forward(np.zeros((1, 2), np.float32)) for _ in range(3)]
    optim.SGD(model, 0.1)
    places[1].calls.clear()
    forward(np.zeros((1, 2), np.float32))
    assert places[1].calls[:2] == ["begin", "wait"]


@pytest.mark.parametrize("way", ["outside", "inside"])
def test_gradients_of_leaves_that_are_no_parameters(way, places):
    """Of one that the step finds, and of one that it makes each time."""
    w = Tensor(np.full(3, 2.0), requires_grad=True)

    @flcuda.capture
    def step(x: Any) -> Any:
        leaf = w if way == "outside" else Tensor(x.copy(), requires_grad=True)
        F.relu(leaf).backward(x * 3)
        return leaf.grad if way == "inside" else None

    for i in range(6):
        grad = step(np.full(3, float(i)))
        if way == "outside":
            places[0].world = lambda: [w]
            grad, w.grad = w.grad, None
        np.testing.assert_array_equal(grad, np.full(3, 3.0 * i))
    assert step.captured == 1


def test_methods_and_copies_have_graphs_of_their_own(places):
    class Net(nn.Module):
        def __init__(self, by: float) -> None:
            self.w = Parameter(np.full(2, by), device="cpu")

        @flcuda.capture(signatures=3)
        def step(self, x: Any) -> Any:
            return x * self.w.data

    one, two = Net(2.0), Net(3.0)
    assert isinstance(Net.step, CapturedStep)
    assert one.step is one.step is not two.step
    for _ in range(4):
        np.testing.assert_array_equal(one.step(np.ones(2, np.float32)), [2, 2])
        np.testing.assert_array_equal(two.step(np.ones(2, np.float32)), [3, 3])
    twin = copy.deepcopy(one)
    assert (one.step.captured, twin.step.captured) == (1, 0)
    one.w.write(np.full(2, 7.0))
    for _ in range(4):
        np.testing.assert_array_equal(twin.step(np.ones(2, np.float32)), [2, 2])
    assert list(dict(one.named_parameters())) == ["w"]

    class Slotted:
        __slots__ = ()

        @flcuda.capture
        def step(self) -> None: ...

    with pytest.raises(TypeError, match=r"Slotted\.step: a captured method is kept in its object"):
        Slotted().step()


def test_reset_close_and_the_end(places):
    def function(x: Any) -> Any:
        return x + 1

    step = flcuda.capture(function)
    [step(np.zeros(2)) for _ in range(4)]
    assert step.nbytes == 100
    step.reset()
    assert places[0].calls[-2:] == ["wait", "close"]
    assert (step.captured, step.nbytes) == (0, 0)
    [step(np.zeros(2)) for _ in range(4)]
    assert step.captured == 1
    with step as same:
        assert same is step
    step.close()
    assert places[1].calls[-2:] == ["wait", "close"]
    with pytest.raises(FlcudaError, match=r"<captured step .*function: closed> cannot be called"):
        step(np.zeros(2))
    other = flcuda.capture(function)
    result = [other(np.zeros(2)) for _ in range(4)][-1]
    place, gone = places[2], weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    assert place.calls[-2:] == ["wait", "close"]
    np.testing.assert_array_equal(result, [1, 1])


def test_nothing_is_recorded_outside_of_steps():
    state = Case("zero first").optimizer
    device.touch(state)
    called = []
    device.after_launch(lambda: called.append(1))
    assert called == [1]
    with device.recording(capturing=True) as found:
        device.touch(state)
        device.after_launch(lambda: called.append(2))
        device.keep_captured(state)
        with pytest.raises(FlcudaError, match="already"), device.recording(capturing=False):
            pass
    assert (called, len(found.first), list(found.kept.values())) == ([1], 1, [state])
    assert not device.recordings


def blobs(n: int) -> Any:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 3, n)
    images = rng.normal(size=(n, 1, 4, 4)).astype(np.float32)
    images[np.arange(n), 0, labels] += 2.0
    return flcuda.data.TensorDataset(images, labels)


def trainer(**options: Any) -> Trainer:
    model = nn.Sequential(nn.BatchNorm2D(1, device="cpu"), nn.Flatten(), nn.Linear(16, 3, device="cpu", seed=1))
    return Trainer(model, optim.SGD(model, 0.05, momentum=0.9), blobs(80), blobs(11), batch_size=16, **options)


def captured_trainer(places: list[FakePlace], monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A trainer that takes the CPU for a device with graphs."""
    ours = trainer()
    fit = Trainer._epoch

    def epoch(self: Trainer, *args: Any) -> Any:
        if self._captured is None:
            self._captured = CapturedStep(self._step)
            homes = [arena._home for arena in self.model.arenas]
            flats = [_Flags(a) for a in self.optimizer._velocity]  # type: ignore[attr-defined]
            everything = [*self.model.parameters(), *self.model.arenas, *homes, *self.model.statistics]

            def new_place(_: Any) -> FakePlace:
                places.append(FakePlace(lambda: [*everything, self.optimizer, *flats]))
                return places[-1]

            monkeypatch.setattr(step_graph, "_new_place", new_place)
        return fit(self, *args)

    monkeypatch.setattr(Trainer, "_epoch", epoch)
    return ours


def test_the_trainer_trains_as_without_graphs(places, monkeypatch):
    expected = trainer().fit(3)
    ours = captured_trainer(places, monkeypatch)
    found = ours.fit(3)
    assert places[-1].calls.count("launch") == 15 - WARM_UP
    assert places[-1].calls[-2:] == ["wait", "close"]
    for a, b in zip(found, expected, strict=True):
        assert (a.train_loss, a.train_accuracy, a.test_loss) == (b.train_loss, b.train_accuracy, b.test_loss)


def test_the_trainer_goes_on_without_a_graph_where_there_can_be_none(places, monkeypatch):
    expected = trainer().fit(1)
    ours = captured_trainer(places, monkeypatch)
    update = ours._update

    def refused(loss: Tensor) -> None:
        if places[-1].capturing:
            raise RuntimeError("the current stream is capturing, so synchronous API calls are disallowed")
        update(loss)

    ours._update = refused  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="training without a CUDA graph: the step .* cannot be captured"):
        found = ours.fit(1)
    assert found[0].train_loss == expected[0].train_loss
    assert ours.step == 5


@pytest.mark.parametrize("change", ["freeze", "label_smoothing"])
def test_the_trainer_captures_anew_what_is_changed_between_epochs(change, places, monkeypatch):
    def alter(ours: Trainer) -> Callable[[Any], None]:
        def altered(result: Any) -> None:
            if result.epoch == 2 and change == "freeze":
                ours.model[2].bias.requires_grad = False  # type: ignore[index]
            elif result.epoch == 2:
                ours.label_smoothing = 0.3

        return altered

    theirs = trainer()
    expected = theirs.fit(4, on_epoch=alter(theirs))
    ours = captured_trainer(places, monkeypatch)
    found = ours.fit(4, on_epoch=alter(ours))
    assert sum(place.calls.count("capture") for place in places) == 2
    assert [r.train_loss for r in found] == [r.train_loss for r in expected]


def test_the_trainer_looks_at_labels_before_a_replay(places, monkeypatch):
    ours = captured_trainer(places, monkeypatch)
    ours.fit(1)
    ours.train.fields[1][:] = 7
    before = ours.model.state_dict()
    ours.history.clear()
    monkeypatch.setattr(ours, "_classes", 3)
    with pytest.raises(ValueError, match=r"label 7 of sample \d+ is no class: the model has 3"):
        ours.fit(1)
    for key, value in ours.model.state_dict().items():
        np.testing.assert_array_equal(value, before[key])


# --- the CUDA side, with a fake of CuPy -------------------------------------------------------------------------------


class FakeCuda:
    """What the place calls of CuPy, as a log."""

    def __init__(self) -> None:
        self.runtime = types.SimpleNamespace(streamCaptureModeRelaxed=2, CUDARuntimeError=CUDARuntimeError)
        self.log: list[Any] = []
        self.current = FakeStream(self, "caller")
        self.allocator = "default"
        self.broken = False
        self.full = 0
        self.pools: list[Any] = []

    def get_current_stream(self) -> Any:
        return self.current

    def Stream(self, non_blocking: bool) -> Any:
        assert non_blocking
        return FakeStream(self, "own")

    def Event(self, disable_timing: bool = False) -> Any:
        return FakeEvent(self, "queued")

    def MemoryPool(self, allocator: Any) -> Any:
        pool = FakePool(self, allocator)
        self.pools.append(weakref.ref(pool))
        return pool

    def Memory(self, size: int) -> Any:
        if self.full:
            self.full -= 1
            error = CUDARuntimeError("out of memory")
            error.status = 2
            raise error
        return FakeMemory(size)

    def MemoryPointer(self, memory: Any, offset: int) -> Any:
        return (memory, offset)

    def using_allocator(self, allocator: Any) -> Any:
        @contextlib.contextmanager
        def use() -> Iterator[None]:
            before, self.allocator = self.allocator, "private"
            try:
                yield
            finally:
                self.allocator = before

        return use()


class FakeMemory:
    def __init__(self, size: int) -> None:
        self.size = size


class FakePool:
    """As CuPy's: of what is free nothing is given back unless it is asked to, and then not what is in use."""

    def __init__(self, cuda: FakeCuda, allocator: Any) -> None:
        self.allocator = allocator
        self.malloc = "malloc"
        self.in_use = 0

    def set_limit(self, size: int) -> None:
        assert size == 0

    def free_all_blocks(self) -> None:
        self.is_asked = True

    def total_bytes(self) -> int:
        return self.in_use


class FakeEvent:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def record(self, stream: Any) -> None:
        self.cuda.log.append(("record", self.name, stream.name))

    def synchronize(self) -> None:
        self.cuda.log.append(("synchronize", self.name))


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name, self.ptr = cuda, name, hash(name)
        self.before: list[Any] = []

    def record(self) -> Any:
        self.cuda.log.append(("record", "new", self.name))
        return FakeEvent(self.cuda, f"of {self.name}")

    def wait_event(self, event: Any) -> None:
        self.cuda.log.append(("wait", self.name, event.name))

    def __enter__(self) -> Any:
        self.before.append(self.cuda.current)
        self.cuda.current = self
        return self

    def __exit__(self, *_: Any) -> None:
        self.cuda.current = self.before.pop()

    def begin_capture(self, mode: int) -> None:
        assert (mode, self.cuda.current) == (2, self)
        self.cuda.log.append("begin")

    def end_capture(self) -> Any:
        self.cuda.log.append("end")
        if self.cuda.broken:
            raise CUDARuntimeError("cudaErrorStreamCaptureInvalidated")
        return types.SimpleNamespace(launch=lambda: self.cuda.log.append(("launch", self.cuda.current.name)))


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    pool = types.SimpleNamespace(free_all_blocks=lambda: cuda.log.append("trim"))
    module = types.SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: pool)
    monkeypatch.setattr(device, "cupy", lambda: module)
    monkeypatch.setattr(step_graph.library, "is_loaded", lambda: True)
    monkeypatch.setattr(
        step_graph.resources, "handle", lambda: cuda.log.append(("handle", cuda.current.name)) or "handle"
    )
    return cuda


def test_a_warm_up_run_is_between_what_the_caller_queues(fake_cuda):
    place = step_graph._CudaPlace(CPU)
    place.begin()
    assert fake_cuda.log == []

    def step() -> str:
        fake_cuda.log.append(("step", fake_cuda.current.name, fake_cuda.allocator))
        return "result"

    assert place.run(step) == "result"
    place.end()
    assert fake_cuda.log == [
        "trim",
        ("record", "new", "caller"),
        ("wait", "own", "of caller"),
        ("step", "own", "private"),
        ("record", "new", "own"),
        ("wait", "caller", "of own"),
        ("record", "queued", "caller"),
    ]
    fake_cuda.log.clear()
    # Also on a stream of the same address: it may be a new one, or another thread's default stream.
    place.begin()
    with FakeStream(fake_cuda, "another"):
        place.begin()
    assert fake_cuda.log == [("wait", "caller", "queued"), ("wait", "another", "queued")]
    place.wait()
    assert fake_cuda.log[-1] == ("synchronize", "queued")


def test_a_capture_is_on_the_own_stream_in_private_memory_without_collections(fake_cuda):
    place = step_graph._CudaPlace(CPU)

    def step(take: Any = place._pool.allocator) -> str:
        take(512)
        fake_cuda.log.append(("step", fake_cuda.current.name, fake_cuda.allocator, gc.isenabled()))
        return "result"

    graph, results = place.capture(step)
    assert (results, place.nbytes, gc.isenabled()) == ("result", 512, True)
    assert fake_cuda.log == [("handle", "own"), "begin", ("step", "own", "private", False), "end"]
    place.launch(graph)
    assert fake_cuda.log[-1] == ("launch", "caller")
    # The memory goes with the place, and the place as soon as nobody has it.
    blocks = [weakref.ref(block) for block in place._blocks]
    gc.disable()
    try:
        del place, step, graph
        assert [ref() for ref in (*blocks, *fake_cuda.pools)] == [None, None]
    finally:
        gc.enable()


def test_a_closed_place_has_its_pool_give_the_memory_back(fake_cuda):
    first, second = (step_graph._CudaPlace(CPU) for _ in range(2))
    pools = [first._pool, second._pool]
    first._pool.allocator(512)
    block = weakref.ref(first._blocks[0])
    pools[0].in_use = 512  # somebody has a result
    first.close()
    second.close()
    assert (block(), first.nbytes) == (None, 0)
    assert [pool.is_asked for pool in pools] == [True, True]
    # What is not free yet is looked at again.
    assert step_graph._outlived == [(CPU, pools[0])]
    pools[0].in_use, pools[0].is_asked = 0, False
    step_graph._CudaPlace(CPU)
    assert pools[0].is_asked
    assert step_graph._outlived == []


def test_memory_that_is_short_is_an_error_by_which_the_pool_keeps_its_blocks(fake_cuda):
    """CuPy's pool lets go of all free blocks at CUDA's own error."""
    place = step_graph._CudaPlace(CPU)
    fake_cuda.full = 1
    place._pool.allocator(512)
    assert (fake_cuda.log, place.nbytes) == (["trim"], 512)
    fake_cuda.full = 2
    with pytest.raises(MemoryError, match="no room for a block of 1,024 bytes") as caught:
        place._pool.allocator(1024)
    assert not isinstance(caught.value, CUDARuntimeError)
    assert step_graph._advice(caught.value) == step_graph._MEMORY


@pytest.mark.parametrize("broken", [False, True])
def test_a_failed_step_ends_the_capture_and_keeps_its_own_error(broken, fake_cuda):
    place = step_graph._CudaPlace(CPU)
    fake_cuda.broken = broken

    def step() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        place.capture(step)
    assert fake_cuda.log == [("handle", "own"), "begin", "end"]
    assert (fake_cuda.current.name, fake_cuda.allocator, gc.isenabled()) == ("caller", "default", True)
    if broken:
        with pytest.raises(CUDARuntimeError, match="Invalidated"):
            place.capture(lambda: None)
        assert (fake_cuda.current.name, gc.isenabled()) == ("caller", True)
