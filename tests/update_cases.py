"""Random updates of flat storages by each optimizer's rule, for the kernels on a processor and on CUDA."""

import functools
from typing import Any

import numpy as np
from helpers import assert_close, bits, place, to_numpy

from flcuda.device import DTYPES
from flcuda.ops import optimizer

# Of segments, in elements: none, odd, one chunk of a block and its neighbours, several.
SIZES = (0, 0, 1, 2, 3, 7, 64, 100, 1023, 2048, 2049, 5000)
RULES = ("plain", "sgd", "dampened", "nesterov", "adam", "adamw")
WIDE = ("master", "velocity", "exp_avg", "exp_avg_sq")


class Update:
    """The arrays of an update, random, each at an alignment of its own, with NaN around them.

    Args:
        rule: one of RULES.
        dtype: of data and gradients.
        sizes: of the segments.
        before, after: elements before the first segment and after the last.
        shifts: by array, elements in its memory before it.
        uniform: all decay factors are equal.
        seed: of the values.
    """

    def __init__(
        self,
        rule: str,
        dtype: str,
        sizes: Any,
        *,
        before: int = 0,
        after: int = 0,
        shifts: dict[str, int] | None = None,
        uniform: bool = False,
        seed: int = 0,
    ) -> None:
        generator = np.random.default_rng(seed)
        self.rule = rule
        self.dtype = dtype
        self.shifts = shifts or {}
        offsets = before + np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64))]).astype(np.int64)
        self.part = slice(before, int(offsets[-1]))
        self.size = int(offsets[-1]) + after
        compute = DTYPES["float64" if dtype == "float64" else "float32"]
        self.same = DTYPES[dtype] == compute
        names = ["master", "grad"] if self.same else ["master", "data", "grad"]
        names += {"plain": [], "adam": ["exp_avg", "exp_avg_sq"], "adamw": ["exp_avg", "exp_avg_sq"]}.get(
            rule, ["velocity"]
        )
        self.holders: dict[str, Any] = {}
        for name in names:
            values = generator.normal(size=self.size)
            if name == "grad":
                values *= 100
            values = np.square(values) if name == "exp_avg_sq" else values
            holder = np.full(
                self.shifts.get(name, 0) + self.size + 9, np.nan, compute if name in WIDE else DTYPES[dtype]
            )
            holder[self.shifts.get(name, 0) :][: self.size] = values
            self.holders[name] = holder
        self.small: dict[str, Any] = {
            "offsets": offsets,
            "decay": (np.ones(len(sizes)) if uniform else generator.choice([1, 0, 0.5], len(sizes))).astype(np.float32),
            "lr": np.array([0.0125]),
            "steps": np.array([int(generator.choice([0, 1, 7, 1000, 123456]))]),
            "inv_scale": np.array(1 / 64),
            "clip": np.array([0.375]),
            "flags": np.zeros(2 + len(sizes), np.int32),
        }

    def on(self, device: str) -> "Update":
        """The same, copied."""
        other = object.__new__(Update)
        other.__dict__.update(self.__dict__)
        other.holders = {name: place(to_numpy(a), device) for name, a in self.holders.items()}
        other.small = {name: None if a is None else place(to_numpy(a), device) for name, a in self.small.items()}
        return other

    def view(self, name: str) -> Any:
        """An array without what is around it."""
        shift = self.shifts.get(name, 0)
        return self.holders[name][shift : shift + self.size]

    def run(self) -> None:
        """One step."""
        views = {name: self.view(name) for name in self.holders}
        master = views["master"]
        numbers = {name: self.small[name] for name in ("inv_scale", "clip", "flags")}
        common = (self.small["offsets"], self.small["decay"], self.small["lr"])
        head = (master, master if self.same else views["data"], views["grad"])
        if self.rule in ("adam", "adamw"):
            optimizer.adam_update(
                *head,
                views["exp_avg"],
                views["exp_avg_sq"],
                *common,
                self.small["steps"],
                betas=(0.8, 0.99),
                eps=1e-6,
                weight_decay=0.05,
                decoupled=self.rule == "adamw",
                **numbers,
            )
            return
        optimizer.sgd_update(
            *head,
            views.get("velocity"),
            *common,
            momentum=0.0 if self.rule == "plain" else 0.9,
            dampening=0.25 if self.rule == "dampened" else 0.0,
            nesterov=self.rule == "nesterov",
            weight_decay=0.05,
            steps=self.small["steps"] if self.rule == "dampened" else None,
            **numbers,
        )

    def expected(self) -> dict[str, np.ndarray]:
        """The arrays after one step, by the formulas in float64, without what is around them."""
        old = {name: to_numpy(self.view(name)).astype(np.float64)[self.part] for name in self.holders}
        small = {name: to_numpy(a).astype(np.float64) if a is not None else None for name, a in self.small.items()}
        decay = 0.05 * np.repeat(small["decay"], np.diff(to_numpy(self.small["offsets"])))
        factor = functools.reduce(
            lambda product, name: product * (1.0 if small[name] is None else float(small[name].reshape(-1)[0])),
            ("inv_scale", "clip"),
            1.0,
        )
        lr, steps, master = float(small["lr"][0]), float(small["steps"][0]), old["master"]
        g = old["grad"] * factor
        if self.rule == "adamw":
            master = master * (1 - lr * decay)
        else:
            g = g + decay * master
        new = {"grad": old["grad"]}
        if self.rule in ("adam", "adamw"):
            new["exp_avg"] = 0.8 * old["exp_avg"] + 0.2 * g
            new["exp_avg_sq"] = 0.99 * old["exp_avg_sq"] + 0.01 * g**2
            mean = new["exp_avg"] / (1 - 0.8 ** (steps + 1))
            square = new["exp_avg_sq"] / (1 - 0.99 ** (steps + 1))
            new["master"] = master - lr * mean / (np.sqrt(square) + 1e-6)
        elif self.rule == "plain":
            new["master"] = master - lr * g
        else:
            share = 0.75 if self.rule == "dampened" and steps else 1.0
            new["velocity"] = 0.9 * old["velocity"] + share * g
            step = g + 0.9 * new["velocity"] if self.rule == "nesterov" else new["velocity"]
            new["master"] = master - lr * step
        return new


def random_update(generator: np.random.Generator, rule: str, dtype: str) -> Update:
    """One with segments, alignment and options of any kind."""
    sizes = generator.choice(SIZES, generator.integers(1, 12))
    if generator.random() < 0.15:
        # More segments than a block has threads.
        sizes = generator.choice([0, 1, 2, 5], 1000)
    arrays = (*WIDE, "data", "grad")
    alike = int(generator.integers(0, 4))
    shifts = {name: alike if generator.random() < 0.9 else int(generator.integers(0, 4)) for name in arrays}
    update = Update(
        rule,
        dtype,
        sizes,
        before=int(generator.choice([0, 0, 1, 3])),
        after=int(generator.choice([0, 5])),
        shifts=shifts,
        uniform=bool(generator.random() < 0.4),
        seed=int(generator.integers(1 << 30)),
    )
    for name in ("inv_scale", "clip", "flags"):
        if generator.random() < 0.25:
            update.small[name] = None
    return update


def assert_updated(after: Update, before: Update) -> None:
    """Checks a step against the formulas, and that all memory around the arrays is as it was."""
    compute = "float64" if before.dtype == "float64" else "float32"
    for name, wanted in before.expected().items():
        found = to_numpy(after.view(name))[before.part]
        assert_close(found, wanted, before.dtype if name == "grad" else compute, name, 4.0)
    for name, holder in after.holders.items():
        start = before.shifts.get(name, 0)
        untouched = np.ones(holder.size, bool)
        untouched[start + before.part.start : start + before.part.stop] = False
        assert bits([to_numpy(holder)[untouched]]) == bits([to_numpy(before.holders[name])[untouched]]), name
    if not before.same:
        copied, master = (to_numpy(after.view(name))[before.part] for name in ("data", "master"))
        np.testing.assert_array_equal(copied, master.astype(copied.dtype))
