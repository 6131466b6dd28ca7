"""Checks that the tests of all ops share."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flcuda.device import DTYPES, Device, cupy, device_of, empty, is_cuda, memory_layout

# Largest error by dtype, relative to the element plus the largest element of the result. One table for all tests.
TOLERANCES = {"float64": 1e-12, "float32": 4e-6, "float16": 1.5e-3, "bfloat16": 1.2e-2}

LAYOUTS = ("nchw", "nhwc", "strided")


def to_numpy(a: Any) -> np.ndarray:
    """The array on the host; bfloat16 by its bits, so that no conversion of CuPy's is trusted."""
    if not is_cuda(a):
        return np.asarray(a)
    if a.dtype == DTYPES["bfloat16"]:
        return a.view(np.uint16).get().view(DTYPES["bfloat16"])
    return a.get()


def place(a: np.ndarray, device: str, layout: str = "nchw") -> Any:
    """A copy of a host array on a device in a layout; strided: every second element of a larger array, transposed."""
    if a.ndim < 3 and layout == "nhwc":
        layout = "nchw"
    if layout == "strided" and a.ndim >= 2:
        axes = (*range(1, a.ndim), 0)
        larger = np.zeros([2 * a.shape[axis] for axis in axes], a.dtype)
        holder = larger[tuple(slice(None, None, 2) for _ in axes)]
        holder[...] = a.transpose(axes)
        moved = _move(larger, device)
        return moved[tuple(slice(None, None, 2) for _ in axes)].transpose(a.ndim - 1, *range(a.ndim - 1))
    if layout == "nhwc":
        axes = (0, *range(2, a.ndim), 1)
        back = (0, a.ndim - 1, *range(1, a.ndim - 1))
        return _move(np.ascontiguousarray(a.transpose(axes)), device).transpose(back)
    return _move(np.array(a, order="C"), device)


def _move(a: np.ndarray, device: str) -> Any:
    return a if device == "cpu" else cupy().asarray(a)


def assert_close(actual: Any, expected: np.ndarray, dtype: str, name: str = "result", factor: float = 1.0) -> None:
    """Compares with the float64 reference under the dtype's tolerance times a factor."""
    found = to_numpy(actual).astype(np.float64)
    assert found.shape == expected.shape, f"{name}: shape {found.shape}, expected {expected.shape}"
    if expected.size == 0:
        return
    tolerance = factor * TOLERANCES[dtype]
    finite = np.isfinite(expected)
    scale = float(np.abs(expected[finite]).max()) if finite.any() else 0.0
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * scale, err_msg=name, equal_nan=True)


@dataclass(frozen=True)
class OpCase:
    """An op with random arguments.

    Attributes:
        name: for the test's name.
        op: called with the arrays by name; gives a tuple of arrays.
        arrays: float64 or integer host arrays by argument.
        wide: arguments and numbers of results that keep the compute dtype (float32 for 16-bit).
        fixed: arguments that are not laid out: vectors and the like.
        factor: what the dtype's tolerance is multiplied by: sums over many elements.
        like: results that have the layout of the first array.
    """

    name: str
    op: Callable[..., tuple[Any, ...]]
    arrays: dict[str, np.ndarray]
    wide: tuple[str, ...] = ()
    wide_results: tuple[int, ...] = ()
    fixed: tuple[str, ...] = ()
    factor: float = 1.0
    like: tuple[int, ...] = (0,)
    exact: tuple[int, ...] = field(default=())


def check_op(case: OpCase, *, dtype: str, layout: str, device: str) -> None:
    """Runs an op in a dtype, layout and on a device, and compares with the float64 CPU reference on the same values."""
    compute = "float64" if dtype == "float64" else "float32"
    given: dict[str, Any] = {}
    oracle: dict[str, Any] = {}
    for name, values in case.arrays.items():
        if values.dtype == np.float64:
            rounded = values.astype(DTYPES[compute if name in case.wide else dtype])
            oracle[name] = rounded.astype(np.float64)
        else:
            rounded = values
            oracle[name] = values.copy()
        given[name] = place(rounded, device, "nchw" if name in case.fixed or name in case.wide else layout)
    first = next(iter(given.values()))
    results = case.op(**given)
    expected = case.op(**oracle)
    assert len(results) == len(expected)
    for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        label = f"{case.name} {dtype} {layout} {device}: result {number}"
        assert device_of(result).kind == device, label
        if wanted.dtype != np.float64 or number in case.exact:
            np.testing.assert_array_equal(to_numpy(result).astype(wanted.dtype), wanted, err_msg=label)
            continue
        assert result.dtype == DTYPES[compute if number in case.wide_results else dtype], label
        if number in case.like and result.ndim > 2 and 1 not in result.shape and result.size:
            assert memory_layout(result) == ("nchw" if layout == "strided" else layout), label
        if number in case.wide_results:
            # wide results still come from 16-bit arguments, but are not rounded to them
            assert_close(result, wanted, compute, label, case.factor)
        else:
            assert_close(result, wanted, dtype, label, case.factor)
    assert device_of(first).kind == device


def numeric_gradient(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, step: float = 1e-6) -> Any:
    """The central differences of a function's sum of all elements, in float64."""
    gradient = empty(x.shape, np.float64, device=Device("cpu"))
    for index in np.ndindex(*x.shape):
        values = []
        for sign in (1, -1):
            moved = x.copy()
            moved[index] += sign * step
            values.append(function(moved).sum())
        gradient[index] = (values[0] - values[1]) / (2 * step)
    return gradient


def bits(arrays: Iterable[Any]) -> list[bytes]:
    """The arrays' bytes, for tests that two runs are equal bit for bit."""
    return [np.ascontiguousarray(to_numpy(a)).tobytes() for a in arrays]
