"""The loss scaler's transitions and random steps, for tests/unit on the CPU device and tests/gpu on CUDA."""

from typing import Any

import numpy as np
from helpers import place, to_numpy
from step_cases import PlainScaler

from flcuda import amp
from flcuda.device import Device

# Options of a scaler that begins at 4, the steps (x for an invalid one), and the scale after each.
TRANSITIONS: dict[str, tuple[dict[str, Any], str, list[float]]] = {
    "a good step changes nothing before the interval": ({"growth_interval": 3}, "..", [4, 4]),
    "the scale doubles at the interval": ({"growth_interval": 3}, "....", [4, 4, 8, 8]),
    "the count begins anew after a growth": ({"growth_interval": 2}, ".....", [4, 8, 8, 16, 16]),
    "an invalid step halves": ({}, "x", [2]),
    "each invalid step of a row halves": ({}, "xxx", [2, 1, 0.5]),
    "the count begins anew after an invalid step": ({"growth_interval": 3}, "..x..." + ".", [4, 4, 2, 2, 2, 4, 4]),
    "growth counts good steps since the last change": (
        {"growth_interval": 3, "max_scale": 64.0},
        "....x...",
        [4, 4, 8, 8, 4, 4, 4, 8],
    ),
    "no invalid step counts for growth": ({"growth_interval": 2}, "x.x.x.." + ".", [2, 2, 1, 1, 0.5, 0.5, 1, 1]),
    "the ceiling is reached": ({"growth_interval": 1, "max_scale": 8.0}, "..", [8, 8]),
    "a growth past the ceiling is left out": ({"growth_interval": 1, "max_scale": 7.0}, "..", [4, 4]),
    "a growth that was left out begins the count anew": (
        {"growth_interval": 2, "max_scale": 7.0},
        "..x..",
        [4, 4, 2, 2, 4],
    ),
    "the floor is reached": ({"min_scale": 1.0}, "xxxx", [2, 1, 1, 1]),
    "a backoff past the floor is left out": ({"min_scale": 1.5}, "xxx", [2, 2, 2]),
    "from floor to ceiling": (
        {"min_scale": 1.5, "max_scale": 8.0, "growth_interval": 1},
        "...xxxx..",
        [8, 8, 8, 4, 2, 2, 2, 4, 8],
    ),
    "other factors": (
        {"growth_factor": 4, "backoff_factor": 0.25, "growth_interval": 1, "max_scale": 100.0},
        ".x.",
        [16, 4, 16],
    ),
}


def checked(names: tuple[str, ...], flags: Any) -> amp.Checked:
    """A check whose outcome the test has written itself."""
    return amp.Checked(names, (), flags)


def random_steps(where: str, rng: np.random.Generator, steps: int) -> None:
    """Compares the rule over random steps with a plain model, bit by bit, for random options.

    Steps are queued without waiting. Now and then another scaler goes on from the state dict.
    """
    interval = int(rng.integers(1, 12))
    floor, ceiling = 2.0 ** -int(rng.integers(0, 8)) * 1.25, 2.0 ** int(rng.integers(4, 12)) * 1.5
    growth = float(rng.choice([2.0, 4.0, 1.0 + 2.0**-20, rng.uniform(1.01, 5.0)]))
    backoff = float(rng.choice([0.5, 0.125, 1.0 - 2.0**-20, rng.uniform(0.1, 0.99)]))
    options = {
        "growth_interval": interval,
        "min_scale": floor,
        "max_scale": ceiling,
        "growth_factor": growth,
        "backoff_factor": backoff,
    }
    plain = PlainScaler(8.0, interval, floor, ceiling, growth, backoff)
    invalid = rng.random(steps) < np.repeat(rng.random(-(-steps // 100)) ** 2, 100)[:steps]
    restored = rng.random(steps) < 0.01
    flags = place(np.stack([invalid, ~invalid, invalid], axis=1).astype(np.int32), where)
    found = place(np.zeros((steps, 6), np.int64), where)
    expected = np.zeros((steps, 6), np.int64)
    scaler = amp.DynamicScaler(8.0, **options)
    scaler._on(Device(where))
    for step in range(steps):
        scaler._last = checked(("w",), flags[step])
        scaler._update()
        found[step] = scaler._state
        plain.update(bool(invalid[step]))
        expected[step, :2] = np.array([plain.scale, 1 / plain.scale]).view(np.int64)
        expected[step, 2:] = [*plain.counters, step + 1]
        assert floor <= plain.scale <= ceiling
        if restored[step]:
            state = scaler.state_dict()
            scaler = amp.DynamicScaler()
            scaler._on(Device(where))
            scaler.load_state_dict(state)
    np.testing.assert_array_equal(to_numpy(found), expected)
    assert {*invalid.tolist()} == {True, False}
