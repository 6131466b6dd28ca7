"""Who can solve a Problem: the protocol of a Source, and the table of the known ones."""

import importlib
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from flcuda.device import Device
from flcuda.finder.candidate import Candidate
from flcuda.finder.choice import Choice
from flcuda.finder.policy import Policy
from flcuda.finder.problem import ConvolutionProblem, Problem


class Source(Protocol):
    """Who can solve Problems.

    Attributes:
        name: of the Source; part of the name of each of its candidates and of the key of a stored choice.
        devices: kinds of device that it computes on: "cpu", "cuda".
        kinds: classes of Problems that it knows.
    """

    @property
    def name(self) -> str:
        """Name of the source."""

    @property
    def devices(self) -> Sequence[str]:
        """Kinds of device."""

    @property
    def kinds(self) -> Sequence[type[Problem]]:
        """Classes of Problems."""

    def candidates(self, problem: Problem, policy: Policy, device: Device) -> Iterable[Candidate]:
        """Yields what can solve a Problem, the likely fastest first; also what cannot, with the reason.

        Args:
            problem: what is to be computed.
            policy: its mode says whether the source may run something to find out ("find") or not ("heuristic").
            device: current for the calling thread.

        Raises:
            CudnnNotSupportedError: there is nothing, and the text says why.
        """

    def restore(self, problem: Problem, choice: Choice, device: Device) -> Candidate:
        """Makes the candidate of a stored choice again, without measuring.

        Raises:
            FlcudaError, ValueError, LookupError: it cannot, and the text says why.
        """


@runtime_checkable
class Climbing(Source, Protocol):
    """A Source that knows what is near a candidate, so that a search can climb from it."""

    def climbing(self) -> AbstractContextManager[None]:
        """Lasts for one search on this thread: what the source keeps for `around`, it keeps until the end."""

    def around(self, problem: Problem, candidate: Candidate, policy: Policy, device: Device) -> Iterable[Candidate]:
        """Yields what is near a candidate and may be faster; what it has yielded before may come again.

        It is asked within `climbing`, after `candidates`.

        Args:
            problem: what the candidate is for.
            candidate: one of this source's.
            policy: its effort says how far to look.
            device: current for the calling thread.

        Raises:
            FlcudaError, ValueError, MemoryError: it cannot.
        """


# of one of the kinds that it is registered for
CandidateFunction = Callable[[Any], Iterable[Candidate]]

# name -> (module, class, device kind): imported when first asked, because a source may bring a library
_BUILT_IN = {
    "graph": ("flcuda.finder.sources.graph", "GraphSource", "cuda"),
    "legacy": ("flcuda.finder.sources.legacy", "LegacySource", "cuda"),
    "reference": ("flcuda.finder.sources.reference", "ReferenceSource", "cpu"),
    "space_to_depth": ("flcuda.finder.sources.rewrites", "SpaceToDepth", "cuda"),
    "padded": ("flcuda.finder.sources.rewrites", "Padded", "cuda"),
    "relayout": ("flcuda.finder.sources.rewrites", "Relayout", "cuda"),
    "matmul": ("flcuda.finder.sources.rewrites", "Matmul", "cuda"),
    "depthwise": ("flcuda.finder.sources.depthwise", "DepthwiseSource", "cuda"),
}
REWRITES: tuple[str, ...] = ("space_to_depth", "padded", "relayout", "matmul")
"""Names of the built-in sources that rewrite a Problem into another one, which others solve."""

_registered: dict[str, Source] = {}
_lock = threading.Lock()


class FunctionSource:
    """A Source made of a user's generator function."""

    def __init__(
        self, name: str, function: CandidateFunction, devices: Sequence[str], kinds: Sequence[type[Problem]]
    ) -> None:
        self.name = name
        self.devices = tuple(devices)
        self.kinds = tuple(kinds)
        self._function = function

    def candidates(
        self,
        problem: Problem,
        policy: Policy,  # noqa: ARG002
        device: Device,  # noqa: ARG002
    ) -> Iterable[Candidate]:
        """Yields what the function yields."""
        for candidate in self._function(problem):
            if candidate.source != self.name:
                raise ValueError(f"source {self.name!r} yields a candidate of source {candidate.source!r}")
            yield candidate

    def restore(self, problem: Problem, choice: Choice, device: Device) -> Candidate:
        """Asks the function again and returns the candidate that the choice names.

        Raises:
            LookupError: the function does not yield it any more.
        """
        for candidate in self.candidates(problem, choice.policy, device):
            if candidate.identity == choice.identity:
                return candidate
        raise LookupError(f"source {self.name!r} no longer yields {choice.id} for {problem}")


def source(
    name: str,
    *,
    devices: Sequence[str] = ("cpu", "cuda"),
    problems: Sequence[type[Problem]] = (ConvolutionProblem,),
) -> Callable[[CandidateFunction], CandidateFunction]:
    """Registers a function as a Source, whose candidates are ranked beside all others.

    A choice stored before is not used afterwards: the names of the sources are part of its key.

    Args:
        name: of the Source; registering the same name again replaces it.
        devices: kinds of device that its candidates compute on.
        problems: the classes of Problems that the function takes: ConvolutionProblem, GraphProblem, or `Problem` for
            every kind.

    Returns:
        A decorator for a function that takes a Problem of these classes and yields Candidates; it returns the function
        unchanged.

    Raises:
        ValueError: the name is that of a built-in source or not a word, a device kind is unknown, or `devices` or
            `problems` is empty.
        TypeError: `problems` is not a sequence, or something in it is no class of Problems.
    """
    if name in _BUILT_IN:
        raise ValueError(f"source name {name!r} is that of a built-in source")
    if not name.replace("-", "_").isidentifier():
        raise ValueError(f"source name {name!r} must be a word of letters, digits, - and _")
    if isinstance(problems, type):
        raise TypeError(f"problems {problems!r} must be a tuple of classes, ({problems.__name__},)")
    for argument, given in (("devices", devices), ("problems", problems)):
        if not given:
            raise ValueError(f"{argument} is empty: name at least one, or the source is never asked")
    for kind in devices:
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"devices {devices!r}: {kind!r} must be 'cpu' or 'cuda'")
    for known in problems:
        if not isinstance(known, type) or not issubclass(known, Problem):
            raise TypeError(f"problems {problems!r}: {known!r} is no class of Problems")

    def register(function: CandidateFunction) -> CandidateFunction:
        with _lock:
            _registered[name] = FunctionSource(name, function, devices, problems)
        return function

    return register


def sources_for(device: Device, problem: Problem) -> tuple[Source, ...]:
    """Returns the Sources that are asked by default: the built-in ones, then the registered ones.

    Args:
        device: where is to be computed.
        problem: what; Sources that do not know its kind are left out.
    """
    with _lock:
        known = list(_registered.values())
    built_in = [_built_in(name) for name, (_, _, kind) in _BUILT_IN.items() if kind == device.kind]
    return tuple(
        entry
        for entry in (*built_in, *known)
        if device.kind in entry.devices and isinstance(problem, tuple(entry.kinds))
    )


def source_named(name: str) -> Source:
    """Returns a Source by its name.

    Raises:
        ValueError: there is none; the message lists the names.
    """
    if name in _BUILT_IN:
        return _built_in(name)
    with _lock:
        found = _registered.get(name)
        names = sorted({*_BUILT_IN, *_registered})
    if found is None:
        raise ValueError(f"source {name!r} is not known; there are {', '.join(names)}")
    return found


def _built_in(name: str) -> Source:
    module_name, class_name, _ = _BUILT_IN[name]
    made: Source = getattr(importlib.import_module(module_name), class_name)()
    return made
