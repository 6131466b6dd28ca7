"""Random storages of gradients and optimizer steps, for tests/unit on the CPU device and tests/gpu on CUDA."""

import itertools
from typing import Any

import numpy as np
from helpers import place, to_numpy

from flcuda.device import DTYPES
from flcuda.ops import finite, optimizer

BAD = (np.nan, -np.nan, np.inf, -np.inf)


def find(flat: np.ndarray, offsets: list[int], device: str, misalign: int = 0, with_ticket: bool = False) -> np.ndarray:
    """Runs find_invalid with flags full of rubbish; `misalign` elements lie before the storage."""
    holder = place(np.concatenate([np.full(misalign, np.nan, flat.dtype), flat]), device)
    flags = place(np.full(2 + len(offsets) - 1, 77, np.int32), device)
    ticket = place(np.zeros(1, np.uint32), device) if with_ticket else None
    finite.find_invalid(holder[misalign:], place(np.array(offsets, np.int64), device), flags, ticket=ticket)
    return to_numpy(flags)


def expected_flags(flat: np.ndarray, offsets: list[int]) -> np.ndarray:
    bad = [
        int(not np.isfinite(flat[start:stop].astype(np.float64)).all()) for start, stop in itertools.pairwise(offsets)
    ]
    return np.array([max(bad, default=0), bad.index(1) if 1 in bad else len(bad), *bad], np.int32)


def random_storage(generator: np.random.Generator, dtype: str) -> tuple[np.ndarray, list[int]]:
    """A storage of arrays of which some are empty, with the largest finite values and some bad ones in it."""
    sizes = generator.choice([0, 0, 1, 2, 3, 7, 16, 33, 1000], size=generator.integers(1, 12))
    before = int(generator.integers(0, 5))
    offsets = [before, *(before + np.cumsum(sizes)).tolist()]
    wide = generator.normal(size=offsets[-1] + int(generator.integers(0, 5)))
    flat = wide.astype(DTYPES[dtype])
    largest = {"float16": 65504.0, "bfloat16": 3.3895314e38, "float32": 3.4028235e38, "float64": 1.797e308}[dtype]
    if flat.size:
        flat[generator.integers(0, flat.size, 3)] = largest
        # What lies outside the arrays must not count.
        flat[:before] = np.nan
        flat[offsets[-1] :] = np.inf
    for _ in range(generator.integers(0, 3)):
        if offsets[-1] > before:
            flat[generator.integers(before, offsets[-1])] = generator.choice(BAD)
    return flat, offsets


def random_arrays(generator: np.random.Generator, longest: int = 1000) -> list[np.ndarray | None]:
    """Separate arrays of all dtypes and several ranks, some empty, some missing, some with bad values."""
    arrays: list[np.ndarray | None] = []
    for _ in range(generator.integers(0, 12)):
        dtype = DTYPES[generator.choice(sorted(DTYPES))]
        size = int(generator.choice([0, 1, 2, 7, 64, 129, longest]))
        a = (generator.normal(size=size) * 100).astype(dtype)
        if size and generator.random() < 0.2:
            a[generator.integers(0, size, 2)] = generator.choice(BAD)
        shaped = a.reshape(2, -1).T if size % 2 == 0 else a
        arrays.append(None if generator.random() < 0.15 else shaped)
    return arrays


def expected_flags_of_list(arrays: list[np.ndarray | None]) -> np.ndarray:
    bad = [int(a is not None and not np.isfinite(np.asarray(a, np.float64)).all()) for a in arrays]
    return np.array([max(bad, default=0), bad.index(1) if 1 in bad else len(bad), *bad], np.int32)


class Storage:
    """The arrays of an optimizer step on a device, random but for what is given."""

    def __init__(self, dtype: str, device: str, seed: int = 0, velocity: bool = True) -> None:
        generator = np.random.default_rng(seed)
        wide = np.float64 if dtype == "float64" else np.float32
        self.offsets_host = [0, 5, 5, 1300, 1301, 4000]
        size = self.offsets_host[-1]
        master = generator.normal(size=size).astype(wide)
        self.master = place(master, device)
        self.data = self.master if dtype in ("float32", "float64") else place(master.astype(DTYPES[dtype]), device)
        self.grad = place(generator.normal(size=size).astype(DTYPES[dtype]), device)
        self.velocity = place(generator.normal(size=size).astype(wide), device) if velocity else None
        self.offsets = place(np.array(self.offsets_host, np.int64), device)
        self.decay = place(np.array([1, 1, 0, 1, 0.5], np.float32), device)
        self.lr = place(np.array(0.1), device)
        self.inv_scale = place(np.array(1 / 1024), device)
        self.flags = place(np.zeros(2 + 5, np.int32), device)

    def step(self, **options: Any) -> None:
        options = {"momentum": 0.9, "weight_decay": 1e-2, "inv_scale": self.inv_scale, "flags": self.flags, **options}
        optimizer.sgd_update(
            self.master, self.data, self.grad, self.velocity, self.offsets, self.decay, self.lr, **options
        )

    def written(self) -> list[np.ndarray]:
        return [to_numpy(a).copy() for a in (self.master, self.data, self.velocity) if a is not None]


class PlainScaler:
    """The scaler's rule in Python, from its description."""

    def __init__(
        self,
        scale: float,
        growth_interval: int,
        min_scale: float,
        max_scale: float,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
    ) -> None:
        self.scale = scale
        self.growth_interval = growth_interval
        self.min_scale = min_scale
        self.max_scale = max_scale
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.good = self.skipped = self.in_a_row = 0

    def update(self, invalid: bool) -> None:
        if invalid:
            smaller = self.scale * self.backoff_factor
            self.scale = smaller if smaller >= self.min_scale else self.scale
            self.good, self.skipped, self.in_a_row = 0, self.skipped + 1, self.in_a_row + 1
            return
        self.good, self.in_a_row = self.good + 1, 0
        if self.good >= self.growth_interval:
            larger = self.scale * self.growth_factor
            self.scale = larger if larger <= self.max_scale else self.scale
            self.good = 0

    @property
    def counters(self) -> list[int]:
        return [self.good, self.skipped, self.in_a_row]
