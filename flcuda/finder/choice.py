"""The serialisable answer of the finder, and the key by which it is stored.

Note [key]: a Choice holds for one Problem, policy, device model, library version and set of sources. Forgetting one of
these has been a shipped bug of every library of this kind, so the key is made from the objects themselves:
`str(problem)` says everything that the Problem holds, and the file names the key in full; its name is only a digest,
and whoever reads it compares the key. The mode is in the key because what a heuristic picked is no answer for a caller
who wants a measured one. Driver and date are recorded and not keyed.

Note [no fsync]: a file is written under another name and renamed, which is whole or not at all for whoever reads it,
also when the writer is killed. It is not forced to the disk. After a power cut it may be missing, empty or full of
zeros; that costs a new search and a warning, while an fsync would cost each search milliseconds, on a network folder
many of them.
"""

import contextlib
import datetime
import functools
import hashlib
import json
import os
import re
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

SCHEMA = 2

Parameters = tuple[tuple[str, int | str], ...]


class SchemaError(ValueError):
    """What was read is a Choice, of a schema that this version of flcuda does not read.

    Attributes:
        schema: its number.
        problem: the line of its Problem.
    """

    def __init__(self, schema: int, problem: str) -> None:
        age = "an older" if schema < SCHEMA else "a newer"
        super().__init__(f"it is of {age} flcuda (schema {schema}, not {SCHEMA})")
        self.schema = schema
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        return SchemaError, (self.schema, self.problem)


def library_version(device: Device) -> str:
    """Returns the version of what computes on a device: "cudnn 9.28.0" or "numpy 2.4.6".

    Raises:
        LibraryNotFoundError: cuDNN is needed and cannot be loaded.
    """
    if device.kind == "cpu":
        return f"numpy {np.__version__}"
    version = library.load().version
    return f"cudnn {version // 10000}.{version // 100 % 100}.{version % 100}"


@functools.lru_cache(maxsize=256)
def _circumstances(
    policy: Policy, device: Device, sources: tuple[str, ...]
) -> tuple[Policy, tuple[tuple[str, int | str], ...], str, tuple[str, ...]]:
    """Gives the fields of a Key but the Problem. None of them changes while a process runs."""
    mode = "heuristic" if policy.mode == "heuristic" else "find"
    return (
        replace(policy, mode=mode),
        tuple(sorted(devices.device_model(device).items())),
        library_version(device),
        tuple(sorted(sources)),
    )


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
    # Hashed once: a key is looked up in several dictionaries.
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        parts = (self.problem, self.policy, self.device_model, self.library_version, self.sources)
        object.__setattr__(self, "_hash", hash(parts))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # Made again when unpickled: another process hashes the same words otherwise.
        return Key, (self.problem, self.policy, self.device_model, self.library_version, self.sources)

    @classmethod
    def of(cls, problem: Problem, policy: Policy, device: Device, sources: tuple[str, ...]) -> Self:
        """Makes the key of a Problem on a device that is here.

        Args:
            problem: what is to be computed.
            policy: under which policy; "pinned" is keyed as "find".
            device: where; cuDNN is loaded for one of CUDA.
            sources: names of the sources that are asked, in any order.

        Returns:
            The key.

        Raises:
            LibraryNotFoundError: cuDNN is needed and cannot be loaded.
        """
        return cls(problem, *_circumstances(policy, device, sources))

    def to_json(self) -> dict[str, Any]:
        """Returns the key as JSON values; equal keys give equal text, and different ones different text."""
        return {
            "problem": str(self.problem),
            "policy": self.policy.to_json(),
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
            SchemaError: it is a Choice of another schema.
            ValueError: it is not JSON or not a Choice; the message says which.
        """
        try:
            value = json.loads(text)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        _check_schema(value)
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

        The file appears whole or not at all, also when other processes write the same one or this one is killed, which
        leaves a file whose name `is_unfinished_name` knows. See Note [no fsync]. A link in its place is replaced, not
        followed.

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
            with temporary.open("x", encoding="utf-8") as file:
                file.write(self.to_json())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        return path


_NAME = re.compile(r"[a-z_]+-[0-9a-f]{24}\.json")
_UNFINISHED_NAME = re.compile(r"\.[a-z_]+-[0-9a-f]{24}\.json\.[0-9]+\.[0-9a-f]{8}\.tmp")


def is_file_name(name: str) -> bool:
    """Says whether a file's name is one that a Key gives."""
    return _NAME.fullmatch(name) is not None


def is_unfinished_name(name: str) -> bool:
    """Says whether a file's name is one that `Choice.pin` gives to what it has not finished writing."""
    return _UNFINISHED_NAME.fullmatch(name) is not None


def _check_schema(value: Any) -> None:
    """Raises when a JSON value is no Choice of this schema by its outside."""
    if not isinstance(value, dict):
        raise ValueError(f"not a Choice: a JSON {type(value).__name__}")
    schema = value.get("schema")
    if type(schema) is int and schema == SCHEMA:
        return
    key = value.get("key")
    problem = key.get("problem") if isinstance(key, dict) else None
    if type(schema) is int and isinstance(problem, str) and isinstance(value.get("choice"), dict):
        raise SchemaError(schema, problem)
    raise ValueError(f"not a Choice: its schema is {schema!r}")


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
