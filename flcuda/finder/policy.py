"""How the finder may choose: the one setting of flcuda that is ambient, kept in a context variable."""

import contextlib
import contextvars
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

MODES = ("find", "heuristic", "pinned")
TIMES = ("device", "host", "both")
EFFORTS = ("fast", "wide")
CACHES = ("cold", "warm")


@dataclass(frozen=True, slots=True)
class Policy:
    """What a choice must fulfil and how it is come by. Everything in it is part of the key of a stored choice.

    Attributes:
        mode: "find" measures what is not stored; "heuristic" takes the first candidate, in its source's own order, that
            runs, and never measures; "pinned" takes stored choices only.
        deterministic: only candidates whose source promises the same bits in each run.
        workspace_limit: bytes of scratch memory that a candidate may use; None is `flcuda.device.workspace_limit`: 2
            GiB, at most an eighth of the device's memory.
        max_error: the largest error that a candidate may have, as a share of the root mean square of the right results
            (`Verification.relative`); every candidate is verified then. None permits what verification permits.
        time: what ranks: "device", the GPU's time; "host", the time that a call keeps the host; "both", the larger of
            the two, which is what a call costs where many follow one another.
        effort: "fast" measures the first of what the libraries' heuristics list, and what they list near the leaders;
            "wide" every engine, with its knobs turned around the leaders, and verifies what may win.
        l2: "cold" measures with operands that lie in no cache, "warm" with those of the run before.

    Raises:
        ValueError: a word is unknown or a number out of range.
        TypeError: a field has the wrong type.
    """

    mode: str = "find"
    deterministic: bool = False
    workspace_limit: int | None = None
    max_error: float | None = None
    time: str = "device"
    effort: str = "fast"
    l2: str = "cold"
    # Hashed once: a policy is a part of the key by which each call of a layer is looked up.
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        for name, words in (("mode", MODES), ("time", TIMES), ("effort", EFFORTS), ("l2", CACHES)):
            if getattr(self, name) not in words:
                raise ValueError(f"{name} {getattr(self, name)!r} must be one of {', '.join(words)}")
        if not isinstance(self.deterministic, bool):
            raise TypeError(f"deterministic must be True or False, not {self.deterministic!r}")
        if self.workspace_limit is not None:
            try:
                limit = operator.index(self.workspace_limit)
            except TypeError:
                raise TypeError(f"workspace_limit must be bytes or None, not {self.workspace_limit!r}") from None
            if limit < 0:
                raise ValueError(f"workspace_limit {limit} must not be negative")
            object.__setattr__(self, "workspace_limit", limit)
        if self.max_error is not None:
            if isinstance(self.max_error, bool) or not isinstance(self.max_error, int | float | np.floating):
                raise TypeError(f"max_error must be a number or None, not {self.max_error!r}")
            if not 0 < self.max_error < math.inf:
                raise ValueError(f"max_error {self.max_error} must be a finite number above 0")
            object.__setattr__(self, "max_error", float(self.max_error))
        object.__setattr__(self, "_hash", hash(tuple(self.to_json().values())))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # Made again when unpickled: another process hashes the same words otherwise.
        return Policy, tuple(self.to_json().values())

    def to_json(self) -> dict[str, Any]:
        """Returns the fields by their names, in order, as JSON values: `Policy(**policy.to_json()) == policy`."""
        return {name: getattr(self, name) for name in FIELDS}


FIELDS = tuple(entry.name for entry in fields(Policy) if entry.init)


# a Policy is frozen, so that it may be the default
_current: contextvars.ContextVar[Policy] = contextvars.ContextVar("flcuda_policy", default=Policy())  # noqa: B039


def current_policy() -> Policy:
    """Returns the policy of this context: the innermost `with flcuda.policy(...)`, else the default one.

    A new thread starts with the default policy (that is how context variables work); an asyncio task inherits.
    """
    return _current.get()


@contextlib.contextmanager
def policy(**changes: Any) -> Iterator[Policy]:
    """Changes the policy inside a `with` statement; what is not named stays as it is outside.

    Args:
        changes: fields of `Policy`.

    Yields:
        The policy that now holds.

    Raises:
        ValueError: a value is invalid.
        TypeError: a field is unknown or of the wrong type.
    """
    unknown = sorted(set(changes) - set(FIELDS))
    if unknown:
        raise TypeError(f"policy has no field {', '.join(unknown)}; it has {', '.join(FIELDS)}")
    token = _current.set(replace(_current.get(), **changes))
    try:
        yield _current.get()
    finally:
        _current.reset(token)
