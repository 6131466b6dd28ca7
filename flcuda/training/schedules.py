"""Learning rates as functions of the step, so that a resumed training finds the same ones."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class WarmupCosine:
    """Rises linearly over the first steps, then falls along half a cosine.

    Args:
        peak: the highest rate.
        steps: of the whole training.
        warmup: how many of them rise.
        final: the rate at the end.

    Raises:
        ValueError: a rate that is not finite or below zero, no steps, or a warm-up that is longer than the training.

    Source: Goyal et al. 2017 (warm-up); Loshchilov and Hutter 2017 (cosine).
    """

    peak: float
    steps: int
    warmup: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        for name, rate in (("peak", self.peak), ("final", self.final)):
            if not math.isfinite(rate) or rate < 0:
                raise ValueError(f"{name} must be a finite rate of at least 0, not {rate}")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps}")
        if not 0 <= self.warmup <= self.steps:
            raise ValueError(f"warmup must be between 0 and steps {self.steps}, not {self.warmup}")

    def __call__(self, step: int) -> float:
        """Returns the rate of a step, counted from 0; after the last one the final rate."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.final + (self.peak - self.final) * 0.5 * (1.0 + math.cos(math.pi * done))
