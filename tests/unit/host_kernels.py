"""Kernels of kernels/, compiled by g++ for the processor: see kernels_on_host.h."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flcuda import kernel_loader


def build(name: str, folder: Path, options: Sequence[str] = ()) -> ctypes.CDLL:
    """Compiles tests/unit/NAME_on_host.cpp into a folder and loads it; skips the test where there is no g++.

    Args:
        name: of the file.
        folder: any that is empty.
        options: of the compiler, beside the usual ones.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    for header in ("cuda_fp16.h", "cuda_bf16.h"):
        (folder / header).touch()
    built = folder / f"{name}.so"
    source = Path(__file__).with_name(f"{name}_on_host.cpp")
    command: list[str | Path] = [compiler, "-std=c++17", "-O1", "-w", "-fPIC", "-shared", *options, "-o", built, source]
    subprocess.run([*command, f"-I{folder}", f"-I{kernel_loader.kernel_dir()}"], check=True)
    return ctypes.CDLL(str(built))


def run(
    library: ctypes.CDLL,
    function: str,
    grid: Sequence[int],
    block: Sequence[int],
    arguments: Sequence[Any],
) -> None:
    """Launches a kernel as kernel_loader does: of arrays the addresses, numbers by their NumPy types, None as null."""
    values = [np.array(each if isinstance(each, np.generic) else _address(each)) for each in arguments]
    pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
    assert library.run(function.encode(), *grid, *block, pointers) == 0, function


def _address(array: Any) -> np.uint64:
    return np.uint64(0 if array is None else array.__array_interface__["data"][0])
