"""Compiling and loading kernels on a GPU."""

from pathlib import Path

import numpy as np
import pytest

from flcuda import amp, kernel_loader, models, optim
from flcuda import functional as F
from flcuda.autograd import Tensor
from flcuda.device import cupy
from flcuda.errors import KernelCompileError


def _run(folder: Path) -> int:
    module = kernel_loader.new_module("probe", kernel_loader.source("probe", folder), kernel_loader.options(folder))
    out = cupy().zeros(1, np.int32)
    module.get_function("probe")((1,), (1,), (out,))
    return int(out.get()[0])


def test_a_header_edit_recompiles(tmp_path: Path) -> None:
    (tmp_path / "probe.cu").write_text(
        '#include "common.cuh"\nextern "C" __global__ void probe(int* out) { *out = VALUE; }\n'
    )
    for value in (1, 2, 1, 3):
        (tmp_path / "common.cuh").write_text(f"#define VALUE {value}\n")
        assert _run(tmp_path) == value


def test_an_error_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "common.cuh").write_text("")
    (tmp_path / "probe.cu").write_text('extern "C" __global__ void probe(int* out) {\n  *out = nothing;\n}\n')
    with pytest.raises(KernelCompileError, match=r"kernels/probe\.cu\(2\).*nothing"):
        _run(tmp_path)


def test_modules_are_kept() -> None:
    assert kernel_loader.load_module("bias") is kernel_loader.load_module("bias")


@pytest.mark.parametrize("precision", ["float16", "tf32", "float32", "float64"])
def test_a_step_launches_nothing_that_was_not_prepared(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_loader, "_modules", {})
    monkeypatch.setattr(kernel_loader, "_functions", {})
    monkeypatch.setattr(kernel_loader, "_coming", {})
    model = models.resnet18(10, precision=precision, device="cuda")
    ahead = set(kernel_loader._modules) | set(kernel_loader._coming)
    optimizer = optim.SGD(model, 0.1, momentum=0.9)
    x = cupy().zeros((4, 3, 224, 224), np.float32)
    loss = F.cross_entropy(model(Tensor(x)), cupy().zeros(4, np.int64))
    if precision == "float16":
        amp.DynamicScaler().step(optimizer, loss)
    else:
        loss.backward()
        optimizer.step()
    cupy().cuda.get_current_stream().synchronize()
    # A search may try our own depthwise kernels.
    assert {key for key in kernel_loader._modules if key[0] != "depthwise"} <= ahead


@pytest.mark.parametrize("name", sorted(path.stem for path in kernel_loader.kernel_dir().glob("*.cu")))
def test_every_file_loads(name: str) -> None:
    kernel_loader.load_module(name)
