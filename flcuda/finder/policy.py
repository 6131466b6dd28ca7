"""How the finder may choose: the one setting of flcuda that is ambient, kept in a context variable."""

import contextlib
import contextvars
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

MODES = ("find", "heuristic", "pinned")


@dataclass(frozen=True, slots=True)
class Policy:
    """What a choice must fulfil and how it is come by.

    Attributes:
        mode: "find" measures what is not stored; "heuristic" takes the first candidate, in its source's own order, that
            runs, and never measures; "pinned" takes stored choices only.
        deterministic: only candidates whose source promises the same bits in each run.
        workspace_limit: bytes of scratch memory that a candidate may use; None is `flcuda.device.workspace_limit`: 2
            GiB, at most an eighth of the device's memory.

    Raises:
        ValueError: the mode is unknown or the limit negative.
        TypeError: a field has the wrong type.
    """

    mode: str = "find"
    deterministic: bool = False
    workspace_limit: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode {self.mode!r} must be one of {', '.join(MODES)}")
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
        changes: fields of `Policy`: mode, deterministic, workspace_limit.

    Yields:
        The policy that now holds.

    Raises:
        ValueError: a value is invalid.
        TypeError: a field is unknown or of the wrong type.
    """
    unknown = set(changes) - {"mode", "deterministic", "workspace_limit"}
    if unknown:
        raise TypeError(
            f"policy has no field {', '.join(sorted(unknown))}; it has mode, deterministic, workspace_limit"
        )
    token = _current.set(replace(_current.get(), **changes))
    try:
        yield _current.get()
    finally:
        _current.reset(token)
