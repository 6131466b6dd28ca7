"""Who can solve a Problem: the protocol of a Source, and the table of the known ones."""

import importlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from flcuda.device import Device
from flcuda.finder.candidate import Candidate
from flcuda.finder.choice import Choice
from flcuda.finder.policy import Policy
from flcuda.finder.problem import ConvolutionProblem


class Source(Protocol):
    """Who can solve Problems.

    Attributes:
        name: of the Source; part of the name of each of its candidates and of the key of a stored choice.
        devices: kinds of device that it computes on: "cpu", "cuda".
    """

    @property
    def name(self) -> str:
        """Name of the source."""

    @property
    def devices(self) -> Sequence[str]:
        """Kinds of device."""

    def candidates(self, problem: ConvolutionProblem, policy: Policy, device: Device) -> Iterable[Candidate]:
        """Yields what can solve a Problem, the likely fastest first; also what cannot, with the reason.

        Args:
            problem: what is to be computed.
            policy: its mode says whether the source may run something to find out ("find") or not ("heuristic").
            device: current for the calling thread.

        Raises:
            CudnnNotSupportedError: there is nothing, and the text says why.
        """

    def restore(self, problem: ConvolutionProblem, choice: Choice, device: Device) -> Candidate:
        """Makes the candidate of a stored choice again, without measuring.

        Raises:
            FlcudaError, ValueError, LookupError: it cannot, and the text says why.
        """


CandidateFunction = Callable[[ConvolutionProblem], Iterable[Candidate]]

# name -> (module, class, device kind): imported when first asked, because a source may bring a library
_BUILT_IN = {
    "graph": ("flcuda.finder.sources.graph", "GraphSource", "cuda"),
    "legacy": ("flcuda.finder.sources.legacy", "LegacySource", "cuda"),
    "reference": ("flcuda.finder.sources.reference", "ReferenceSource", "cpu"),
}
# Asked by name only. Some of its engines gave wrong numbers on a GPU (Note [padding] of the source): until all of them
# have been compared there, none is chosen by default.
_ON_REQUEST = frozenset({"graph"})
_registered: dict[str, Source] = {}
_lock = threading.Lock()


class FunctionSource:
    """A Source made of a user's generator function."""

    def __init__(self, name: str, function: CandidateFunction, devices: Sequence[str]) -> None:
        self.name = name
        self.devices = tuple(devices)
        self._function = function

    def candidates(
        self,
        problem: ConvolutionProblem,
        policy: Policy,  # noqa: ARG002
        device: Device,  # noqa: ARG002
    ) -> Iterable[Candidate]:
        """Yields what the function yields."""
        for candidate in self._function(problem):
            if candidate.source != self.name:
                raise ValueError(f"source {self.name!r} yields a candidate of source {candidate.source!r}")
            yield candidate

    def restore(self, problem: ConvolutionProblem, choice: Choice, device: Device) -> Candidate:
        """Asks the function again and returns the candidate that the choice names.

        Raises:
            LookupError: the function does not yield it any more.
        """
        for candidate in self.candidates(problem, choice.policy, device):
            if candidate.identity == choice.identity:
                return candidate
        raise LookupError(f"source {self.name!r} no longer yields {choice.id} for {problem}")


def source(name: str, *, devices: Sequence[str] = ("cpu", "cuda")) -> Callable[[CandidateFunction], CandidateFunction]:
    """Registers a function as a Source, whose candidates are ranked beside all others.

    A choice stored before is not used afterwards: the names of the sources are part of its key.

    Args:
        name: of the Source; registering the same name again replaces it.
        devices: kinds of device that its candidates compute on.

    Returns:
        A decorator for a function that takes a ConvolutionProblem and yields Candidates; it returns the function
        unchanged.

    Raises:
        ValueError: the name is that of a built-in source or not a word, or a device kind is unknown.
    """
    if name in _BUILT_IN:
        raise ValueError(f"source name {name!r} is that of a built-in source")
    if not name.replace("-", "_").isidentifier():
        raise ValueError(f"source name {name!r} must be a word of letters, digits, - and _")
    for kind in devices:
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"devices {devices!r}: {kind!r} must be 'cpu' or 'cuda'")

    def register(function: CandidateFunction) -> CandidateFunction:
        with _lock:
            _registered[name] = FunctionSource(name, function, devices)
        return function

    return register


def sources_for(device: Device) -> tuple[Source, ...]:
    """Returns the Sources that are asked on a device by default: the built-in ones, then the registered ones."""
    with _lock:
        known = list(_registered.values())
    built_in = [
        _built_in(name) for name, (_, _, kind) in _BUILT_IN.items() if kind == device.kind and name not in _ON_REQUEST
    ]
    return (*built_in, *(entry for entry in known if device.kind in entry.devices))


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
