"""Which of several candidates is best under a policy, and which a policy forbids.

Note [ties]: two candidates whose times differ by less than both scatter are not told apart by another measurement
either: the choice would change from search to search for nothing. So among those within the spread of the best, but at
most `TIE` of its time, the one of the lowest id comes first. One that scatters upwards more than the best does, as
kernels do that have two speeds, is no tie: it is slower on average.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from flcuda.finder.candidate import Candidate
from flcuda.finder.policy import Policy
from flcuda.finder.verify import Verification
from flcuda.timing import Timing

T = TypeVar("T")

TIE = 0.01
"""No difference above this share of the best time is a tie, whatever the spread. See Note [ties]."""


def cost_ms(timing: Timing, policy: Policy) -> float:
    """Gives what a policy ranks by, in milliseconds: the time of the device, that of the host, or the larger one."""
    host_ms = timing.host_us / 1e3
    if policy.time == "host":
        return host_ms
    return max(timing.median_ms, host_ms) if policy.time == "both" else timing.median_ms


def ranked(
    entries: Iterable[T], policy: Policy, *, timing_of: Callable[[T], Timing], candidate_of: Callable[[T], Candidate]
) -> list[T]:
    """Sorts what was measured on a GPU.

    Args:
        entries: what to sort.
        policy: says by which time.
        timing_of: gives the times of an entry.
        candidate_of: gives its candidate.

    Returns:
        The entries, the best first; see Note [ties] for the first one, the others by their time.
    """

    def cost(entry: T) -> float:
        return cost_ms(timing_of(entry), policy)

    ordered = sorted(
        entries, key=lambda entry: (cost(entry), timing_of(entry).median_ms, order_of(candidate_of(entry)))
    )
    if len(ordered) < 2:
        return ordered
    best = ordered[0]

    def tied(entry: T) -> bool:
        first, other = timing_of(best), timing_of(entry)
        scatters = other.high_ms - first.high_ms > TIE * first.median_ms
        spread = max(first.spread_ms, other.spread_ms)
        return not scatters and cost(entry) - cost(best) <= min(spread, TIE * cost(best))

    first = min(filter(tied, ordered), key=lambda entry: order_of(candidate_of(entry)))
    ordered.remove(first)
    return [first, *ordered]


def order_of(candidate: Candidate) -> tuple[object, ...]:
    """Gives a key by which candidates have one order: by source, algo (engines by number), math and parameters."""
    number = int(candidate.algo) if candidate.algo.isdecimal() else 0
    parameters = tuple((name, str(type(value)), value) for name, value in candidate.parameters)
    return (candidate.source, number, candidate.algo, candidate.math, parameters)


def refusal(
    candidate: Candidate, verification: Verification | None, policy: Policy, workspace_limit: int
) -> str | None:
    """Says why a policy forbids a candidate that works; None when it does not.

    Args:
        candidate: which.
        verification: what verifying it found; None when that was not done.
        policy: what is asked.
        workspace_limit: bytes, where the policy names none.

    Returns:
        The reason, in words.
    """
    limit = workspace_limit if policy.workspace_limit is None else policy.workspace_limit
    if candidate.workspace > limit:
        return f"workspace of {candidate.workspace} bytes is above the limit of {limit}"
    if policy.deterministic:
        if not candidate.deterministic:
            return "not deterministic"
        if verification is not None and verification.repeats is False:
            return "not deterministic: a second run gave other bits"
    if policy.max_error is not None and verification is not None and not verification.relative <= policy.max_error:
        return f"error of {verification.relative:.2g} is above the {policy.max_error:.2g} that the policy permits"
    return None
