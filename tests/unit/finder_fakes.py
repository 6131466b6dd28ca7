"""Sources whose candidates do, and seem to take, what a test tells them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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
    source = FakeSource(list(fakes))
    monkeypatch.setattr(sources, "_BUILT_IN", {})
    monkeypatch.setattr(sources, "_registered", {source.name: source})
    return source
