"""The serialisable answer of the finder, and the key by which it is stored.

Note [key]: a Choice holds for one Problem, policy, device model, library version and set of sources. Forgetting one of
these has been a shipped bug of every library of this kind, so the key is made from the objects themselves:
`str(problem)` says everything that the Problem holds, and the file names the key in full; its name is only a digest,
and whoever reads it compares the key. The mode is in the key because what a heuristic picked is no answer for a caller
who wants a measured one. Driver and date are recorded and not keyed.
"""

import datetime
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from flcuda import device as devices
from flcuda.cudnn import library
from flcuda.device import Device
from flcuda.finder.candidate import Candidate
from flcuda.finder.policy import Policy
from flcuda.finder.problem import Problem

SCHEMA = 1

Parameters = tuple[tuple[str, int | str], ...]


def library_version(device: Device) -> str:
    """Returns the version of what computes on a device: "cudnn 9.28.0" or "numpy 2.4.6".

    Raises:
        LibraryNotFoundError: cuDNN is needed and cannot be loaded.
    """
    if device.kind == "cpu":
        return f"numpy {np.__version__}"
    version = library.load().version
    return f"cudnn {version // 10000}.{version // 100 % 100}.{version % 100}"


@dataclass(frozen=True, slots=True)
class Key:
    """What a Choice holds for. See Note [key].

    Attributes:
        problem: what is computed.
        policy: how it may be; its mode is "find" or "heuristic": "pinned" uses what "find" has stored.
        device_model: what `flcuda.device.device_model` says, as sorted pairs.
        library_version: what `library_version` says.
        sources: names of the sources that were asked, sorted.
    """

    problem: Problem
    policy: Policy
    device_model: tuple[tuple[str, int | str], ...]
    library_version: str
    sources: tuple[str, ...]

    @classmethod
    def of(cls, problem: Problem, policy: Policy, device: Device, sources: tuple[str, ...]) -> Self:
        """Makes the key of a Problem on a device that is here."""
        mode = "heuristic" if policy.mode == "heuristic" else "find"
        return cls(
            problem=problem,
            policy=replace(policy, mode=mode),
            device_model=tuple(sorted(devices.device_model(device).items())),
            library_version=library_version(device),
            sources=tuple(sorted(sources)),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the key as JSON values; equal keys give equal text, and different ones different text."""
        return {
            "problem": str(self.problem),
            "policy": {
                "mode": self.policy.mode,
                "deterministic": self.policy.deterministic,
                "workspace_limit": self.policy.workspace_limit,
            },
            "device_model": dict(self.device_model),
            "library_version": self.library_version,
            "sources": list(self.sources),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Makes the key of what `to_json` returned; raises ValueError, TypeError or KeyError for anything else."""
        return cls(
            problem=Problem.parse(value["problem"]),
            policy=Policy(**value["policy"]),
            device_model=tuple(
                sorted((_text(name), _parameter(entry)) for name, entry in value["device_model"].items())
            ),
            library_version=_text(value["library_version"]),
            sources=tuple(_text(name) for name in value["sources"]),
        )

    @property
    def text(self) -> str:
        """The key as one line: equal exactly when the keys mean the same."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))

    @property
    def file_name(self) -> str:
        """Name of the file in a folder of choices: the Problem's kind, for people, and a digest of `text`."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return f"{self.problem.kind}-{digest[:24]}.json"


@dataclass(frozen=True, slots=True)
class Choice:
    """The answer for a Key: which candidate, and what was measured when it was chosen.

    Attributes:
        key: what it holds for.
        source: name of the Source that restores it.
        algo: name of the algorithm or engine.
        math: "fma" or "tensor_op".
        workspace: bytes of scratch memory.
        deterministic: the source promises the same bits in each run.
        parameters: what else the source needs to restore it, by name.
        median_ms: median time in milliseconds; None when it was not measured (mode "heuristic").
        spread_ms: distance of the 10th and 90th percentile of the times, in milliseconds; None likewise.
        recorded: driver, date: to read, never compared.
    """

    key: Key
    source: str
    algo: str
    math: str
    workspace: int
    deterministic: bool
    parameters: Parameters = ()
    median_ms: float | None = None
    spread_ms: float | None = None
    recorded: Mapping[str, int | str] = field(default_factory=dict, compare=False, hash=False)

    @classmethod
    def of(cls, key: Key, candidate: Candidate, median_ms: float | None = None, spread_ms: float | None = None) -> Self:
        """Makes the Choice of a candidate, recording the driver and the date of now."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(
            key=key,
            source=candidate.source,
            algo=candidate.algo,
            math=candidate.math,
            workspace=candidate.workspace,
            deterministic=candidate.deterministic,
            parameters=candidate.parameters,
            median_ms=median_ms,
            spread_ms=spread_ms,
            recorded={"date": now, **devices.driver()},
        )

    @property
    def problem(self) -> Problem:
        """The Problem that it answers."""
        return self.key.problem

    @property
    def policy(self) -> Policy:
        """The policy under which it was chosen."""
        return self.key.policy

    @property
    def device_model(self) -> dict[str, int | str]:
        """The device model that it holds for."""
        return dict(self.key.device_model)

    @property
    def library_version(self) -> str:
        """The library that it holds for."""
        return self.key.library_version

    @property
    def id(self) -> str:
        """Source and algo, as in a report: "legacy:GEMM"."""
        return f"{self.source}:{self.algo}"

    @property
    def identity(self) -> tuple[str, str, str, Parameters]:
        """Equals `Candidate.identity` of the candidate that it names."""
        return (self.source, self.algo, self.math, self.parameters)

    def to_json(self) -> str:
        """Returns the Choice as indented JSON text, ending in a newline, so that it can be read and diffed."""
        value = {
            "schema": SCHEMA,
            "key": self.key.to_json(),
            "choice": {
                "source": self.source,
                "algo": self.algo,
                "math": self.math,
                "workspace": self.workspace,
                "deterministic": self.deterministic,
                "parameters": dict(self.parameters),
                "median_ms": self.median_ms,
                "spread_ms": self.spread_ms,
            },
            "recorded": dict(self.recorded),
        }
        return json.dumps(value, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: it is not JSON, of another schema, or not a Choice; the message says which.
        """
        try:
            value = json.loads(text)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            schema = value.get("schema") if isinstance(value, dict) else None
            raise ValueError(f"schema {schema!r} is not {SCHEMA}")
        try:
            choice = value["choice"]
            return cls(
                key=Key.from_json(value["key"]),
                source=_text(choice["source"]),
                algo=_text(choice["algo"]),
                math=_text(choice["math"]),
                workspace=_whole(choice["workspace"]),
                deterministic=_truth(choice["deterministic"]),
                parameters=tuple((_text(name), _parameter(entry)) for name, entry in choice["parameters"].items()),
                median_ms=_time(choice["median_ms"]),
                spread_ms=_time(choice["spread_ms"]),
                recorded={_text(name): _parameter(entry) for name, entry in value["recorded"].items()},
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a Choice: {type(error).__name__}: {error}") from error

    def pin(self, folder: str | os.PathLike[str]) -> Path:
        """Writes the Choice into a folder of choices, which may be committed: a ChoiceStore of that folder returns it.

        The file appears whole or not at all, also when other processes write the same one or this one is killed.

        Args:
            folder: made when it does not exist.

        Returns:
            Path of the file written.

        Raises:
            OSError: the folder cannot be written.
        """
        path = Path(folder) / self.key.file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        # a name of its own for each writer: two that share one could publish a mixture
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        try:
            temporary.write_text(self.to_json(), encoding="utf-8")
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return path


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _parameter(value: Any) -> int | str:
    if not isinstance(value, int | str):
        raise TypeError(f"{value!r} is neither number nor text")
    return value


def _time(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no time")
    return float(value)
