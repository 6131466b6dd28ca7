"""Sources whose candidates do, and seem to take, what a test tells them."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from flcuda import device as devices
from flcuda import timing
from flcuda.finder import sources
from flcuda.finder.candidate import Candidate
from flcuda.finder.choice import Choice, Key
from flcuda.finder.policy import Policy
from flcuda.finder.problem import ConvolutionProblem, Problem

PROBLEM = ConvolutionProblem.parse("forward n2 c3 6x5 k4 3x3 p1 float32 nchw")


def key(problem: Problem = PROBLEM, policy: Policy | None = None, **changes) -> Key:
    values = {
        "device_model": (("cores", 2), ("name", "a processor")),
        "library_version": "numpy 2.0.0",
        "sources": ("reference",),
    }
    return Key(problem, Policy() if policy is None else policy, **{**values, **changes})


def choice(of: Key | None = None, **changes) -> Choice:
    values = {
        "source": "reference",
        "algo": "im2col",
        "math": "fma",
        "workspace": 4096,
        "deterministic": True,
        "parameters": (("chunk_mib", 4), ("order", "rows")),
        "median_ms": 0.1 + 0.2,
        "spread_ms": 1e-3,
        "recorded": {"date": "2026-01-01T00:00:00+00:00", "cuda_driver": 13000},
    }
    return Choice(key() if of is None else of, **{**values, **changes})


class Clock:
    """What the timer of these tests reads: the milliseconds of the last call, the same on a busy machine."""

    last_ms = 0.0

    @classmethod
    def once(cls, run, device) -> float:
        run()
        return cls.last_ms

    @classmethod
    def first(cls, run, device) -> timing.Timing:
        took_ms = cls.once(run, device)
        return timing.summary([took_ms], [took_ms])


@dataclass
class Fake:
    """One candidate: writes `value`, seems to take `delay` milliseconds, fails as it is told."""

    algo: str
    value: float = 1.0
    delay: int = 0
    workspace: int = 0
    deterministic: bool = True
    math: str = "fma"
    parameters: tuple[tuple[str, int | str], ...] = ()
    reported_ms: float | None = None
    reason: str | None = None
    build_error: Exception | None = None
    run_errors: Callable[[int], Exception | None] = lambda call: None
    builds: int = 0
    calls: int = 0
    inputs: int = 2
    operands: tuple = ()
    prepared_ms: float = 0.0

    def __call__(self, *operands) -> None:
        self.calls += 1
        self.operands = operands
        error = self.run_errors(self.calls)
        if error is not None:
            raise error
        Clock.last_ms = self.delay + 1e-3
        count = len(operands) - self.inputs
        for out in operands[-count:]:
            out[...] = self.value

    def candidate(self, source: str) -> Candidate:
        def build():
            self.builds += 1
            if self.build_error is not None:
                raise self.build_error
            return self

        return Candidate(
            source=source,
            algo=self.algo,
            math=self.math,
            workspace=self.workspace,
            deterministic=self.deterministic,
            build=build,
            parameters=self.parameters,
            reported_ms=self.reported_ms,
            prepared_ms=self.prepared_ms,
            reason=self.reason,
        )


@dataclass
class FakeSource:
    fakes: list[Fake]
    name: str = "fake"
    devices: tuple[str, ...] = ("cpu",)
    kinds: tuple[type[Problem], ...] = (Problem,)
    asked: list[Policy] = field(default_factory=list)

    def candidates(self, problem, policy, device) -> Iterator[Candidate]:
        self.asked.append(policy)
        for fake in self.fakes:
            yield fake.candidate(self.name)

    def restore(self, problem, choice, device) -> Candidate:
        for fake in self.fakes:
            candidate = fake.candidate(self.name)
            if candidate.identity == choice.identity:
                return candidate
        raise LookupError(f"no {choice.id} here")


def only(monkeypatch, *fakes: Fake) -> FakeSource:
    """Makes one fake source the only one that there is, and the timer one that it can foretell."""
    monkeypatch.setattr(timing, "once", Clock.once)
    monkeypatch.setattr(timing, "first", Clock.first)
    source = FakeSource(list(fakes))
    monkeypatch.setattr(sources, "_BUILT_IN", {})
    monkeypatch.setattr(sources, "_registered", {source.name: source})
    return source


class FakeStream:
    """A stream as a thread that works off what is queued: sleeps for kernels, calls host functions."""

    ptr = 0

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self.queued = 0
        self.done = 0
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._queue.get()()
            self.done += 1

    def put(self, work: Callable[[], object]) -> None:
        self.queued += 1
        self._queue.put(work)

    def launch(self, milliseconds: float) -> None:
        self.put(lambda: time.sleep(milliseconds / 1e3))

    def launch_host_func(self, callback, arg) -> None:
        self.put(lambda: callback(arg))

    def synchronize(self) -> None:
        reached = threading.Event()
        self.put(reached.set)
        assert reached.wait(10)


class FakeCupy:
    """As much of CuPy as the timer needs, with one stream; by `kernel` a test launches."""

    def __init__(self) -> None:
        self.stream = FakeStream()
        self.cuda = self
        self.events = 0

    def get_current_stream(self) -> FakeStream:
        return self.stream

    def kernel(self, milliseconds: float) -> None:
        self.stream.launch(milliseconds)

    def Event(self) -> "FakeEvent":
        self.events += 1
        return FakeEvent()

    def get_elapsed_time(self, begin: "FakeEvent", end: "FakeEvent") -> float:
        assert begin.reached.is_set()
        assert end.reached.is_set()
        return 1e3 * (end.at - begin.at)


class FakeEvent:
    def __init__(self) -> None:
        self.reached = threading.Event()
        self.at = 0.0

    def record(self, stream: FakeStream) -> None:
        def reach() -> None:
            self.at = time.perf_counter()
            self.reached.set()

        stream.put(reach)

    def synchronize(self) -> None:
        assert self.reached.wait(10)


def fake_cupy(monkeypatch) -> FakeCupy:
    """Puts a fake in the place of CuPy, for what asks `flcuda.device` for it."""
    fake = FakeCupy()
    monkeypatch.setattr(devices, "cupy", lambda: fake)
    monkeypatch.setattr(devices, "is_capturing", lambda: False)
    return fake
