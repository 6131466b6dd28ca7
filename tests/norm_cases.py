"""Random cases of all of batch norm's passes, run by tests/unit on a processor and by tests/gpu on CUDA."""

from typing import Any

import numpy as np
from helpers import assert_close, place, to_numpy

from flcuda import device as devices
from flcuda.device import DTYPES
from flcuda.ops import batch_norm
from flcuda.ops.batch_norm import Into, Norm

MODES = ["none", "raw", "normalised"]
# Of the tolerances: what sums over many elements may be off more.
_SUMS = {"float64": 1, "float32": 8, "float16": 4, "bfloat16": 4}


class Case:
    """Random arguments of a whole pass, forward and backward."""

    def __init__(
        self, shape: tuple[int, ...], dtype: str, layout: str, seed: int, gradients: int = 1, device: str = "cpu"
    ) -> None:
        generator = np.random.default_rng([seed, *shape])
        wide = np.float64 if dtype == "float64" else np.float32
        channels = shape[1]

        def tensor(mean: float = 0.0) -> np.ndarray:
            values = generator.normal(mean, 1.5, shape) + generator.normal(size=channels).reshape(
                -1, *[1] * (len(shape) - 2)
            )
            return place(values.astype(DTYPES[dtype]), device, layout)

        def vector(sign: bool = False) -> np.ndarray:
            values = generator.uniform(0.5, 1.5, channels) * (generator.choice([-1, 1], channels) if sign else 1)
            return place(values.astype(wide), device)

        self.device, self.layout = device, layout
        self.x, self.residual = tensor(0.5), tensor(-0.5)
        self.dys = [tensor() for _ in range(gradients)]
        self.vectors = [(vector(True), vector(True)) for _ in range(2)]
        self.pending = [vector(), vector(), place(np.array([3], np.int64), device)]
        self.into = [Into(vector(), vector(), True), None]

    def widened(self) -> "Case":
        """The same numbers in float64 on the CPU device."""
        other = object.__new__(Case)
        other.device, other.layout = "cpu", "nchw"

        def wide(a: Any) -> Any:
            a = to_numpy(a)
            return a.copy() if a.dtype == np.int64 else a.astype(np.float64)

        other.x, other.residual, other.dys = wide(self.x), wide(self.residual), [wide(dy) for dy in self.dys]
        other.vectors = [tuple(wide(each) for each in pair) for pair in self.vectors]
        other.pending = [wide(each) for each in self.pending]
        other.into = [Into(wide(self.into[0].dweight), wide(self.into[0].dbias), True), None]
        return other

    def settle(self, mode: str) -> None:
        """Sets the gradients to zero where ReLU's argument is so near zero that rounding may choose its side."""
        near = np.abs(self.widened().run(mode, False, 0.1, False)["y"]) < 1e-5
        for i, dy in enumerate(self.dys):
            values = to_numpy(dy).copy()
            values[near] = 0
            self.dys[i] = place(values, self.device, self.layout)

    def run(self, mode: str, relu: bool, momentum: float | None, constant: bool, ticket: Any = None) -> dict[str, Any]:
        """All results by name. mode: none, raw or normalised."""
        adds, normalised = mode != "none", mode == "normalised"
        statistics = batch_norm.statistics(self.x, *self.pending, momentum, 1e-5, ticket=ticket)
        norm = Norm(*self.vectors[0], *statistics)
        other = None
        if normalised:
            other = Norm(*self.vectors[1], *batch_norm.statistics(self.residual, None, None, None, 0.1, 1e-5))
        y, mask = batch_norm.apply(
            self.x, norm, residual=self.residual if adds else None, residual_norm=other, relu=relu, keep_mask=True
        )
        gradients = batch_norm.backward(
            self.dys,
            self.x,
            norm,
            relu=relu,
            adds=adds,
            residual=self.residual if normalised else None,
            residual_norm=other,
            mask=mask,
            constant=constant,
            into=self.into[0],
            residual_into=self.into[1],
            ticket=ticket,
        )
        names = ("mean", "variance", "batches")
        results = {"y": y, **gradients._asdict(), **dict(zip(names, self.pending, strict=True))}
        results |= {"saved_mean": statistics[0], "saved_inverse": statistics[1]}
        return {name: result for name, result in results.items() if result is not None}


def assert_agree(found: dict[str, Any], expected: dict[str, Any], dtype: str, case: Case) -> None:
    """Compares what a case's run gave with the float64 results, and their layouts with its own."""
    layout = devices.memory_layout(case.x) if case.x.ndim > 2 else "strided"
    assert found.keys() == expected.keys()
    for name, result in found.items():
        elements = name in ("y", "dx", "dresidual")
        # Statistics are of numbers that are exact; what comes from gradients may be from rounded ones.
        precision = dtype if dtype == "float64" or elements or name.startswith("d") else "float32"
        assert_close(result, expected[name], precision, name, factor=_SUMS[dtype] * (2 if elements else 4))
        if elements and layout != "strided":
            assert devices.memory_layout(result) == layout
