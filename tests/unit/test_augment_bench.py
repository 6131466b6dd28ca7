"""The search for the constants of the augmentation's kernels: what it compiles is right, whatever the constants."""

import re
from dataclasses import replace
from types import SimpleNamespace

import bench_scripts
import host_kernels
import numpy as np
import pytest
from augment_cases import CASES, assert_like, case, exact, images, table

from flcuda import device as devices
from flcuda import kernel_loader
from flcuda.data import Augment
from flcuda.device import CPU
from flcuda.ops import augment as ops


@pytest.fixture(scope="module")
def bench():
    return bench_scripts.load(bench_scripts.BENCH / "bench_augment.py")


def build(folder):
    # Several builds in one process: each has shared memory of its own.
    return host_kernels.build("augment", folder, ["-fno-gnu-unique"])


def host_launch(library):
    def launch(name, function, grid, block, *arguments):
        host_kernels.run(library, function, grid, block, arguments)

    return launch


def send_to_host(monkeypatch, library) -> None:
    monkeypatch.setattr(ops, "on_cuda", lambda **_: True)
    monkeypatch.setattr(ops, "new", lambda *args: devices.empty(*args[:2], device="cpu", layout=(*args, "nchw")[2]))
    monkeypatch.setattr(ops, "_on_device", lambda *tables: tables)
    monkeypatch.setattr(ops, "launch_blocks", host_launch(library))


def test_constants_are_found_and_changed(bench) -> None:
    text = kernel_loader.source("augment")
    own = bench.as_it_is(text)
    assert own.LINES == ops._LINES
    assert own in bench.variants()
    for variant in bench.variants():
        assert bench.as_it_is(bench.edited(text, variant)) == variant
        assert variant.LINES <= 32
        # Some pixels of a row for each of the most groups that a block may have.
        assert variant.BYTES // (ops._THREADS // 32) // 2 >= 256
    with pytest.raises(ValueError, match="has 0 lines that define ROWS"):
        bench.edited(text.replace("ROWS = ", "ROWS_ = "), own)


@pytest.mark.parametrize("name", ["random-resized float16 nhwc4", "random-resized bfloat16 nchw"])
def test_the_one_kernel_compiles(name, bench, tmp_path) -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    for header in kernel_loader.kernel_dir().glob("*.cuh"):
        (tmp_path / header.name).write_bytes(header.read_bytes())
    text, function = bench.only(kernel_loader.source("augment"), replace(Augment(8), **bench.CASES[name]))
    for variant in (bench.variants()[0], bench.variants()[-1]):
        (tmp_path / "augment.cu").write_text(bench.edited(text, variant))
        cubin = kernel_loader.compile_to_cubin("augment", 90, tmp_path)
        assert set(re.findall(rb"augment_\w+?_[134]\b", cubin)) == {function.encode()}


@pytest.mark.parametrize("values", [(1, 1, 4096, 2), (32, 16, 28672, 5), (14, 3, 12288, 3)])
def test_other_constants_give_the_definition(values, bench, tmp_path, rng, monkeypatch) -> None:
    variant = bench.Variant(*values)
    text = (kernel_loader.kernel_dir() / "augment.cu").read_text()
    (tmp_path / "augment.cu").write_text(bench.edited(text, variant))
    send_to_host(monkeypatch, build(tmp_path))
    with bench.launched_with(variant.LINES):
        for size, channels, options in CASES:
            batch, parameters, description = case(rng, size, channels, options)
            found = ops.augment(batch, parameters, description)
            assert_like(found, exact(batch, parameters, description), description)
        for sizes, size in (([(6, 1700), (3, 513)], (5, 24)), ([(300, 70)], (40, 3)), ([(40, 50)], (67, 97))):
            batch, parameters, description = images(rng, sizes, 3), table(rng, sizes), Augment(size)
            found = ops.augment(batch, parameters, description)
            assert_like(found, exact(batch, parameters, description), description)
    assert ops._LINES == bench.as_it_is(text).LINES


def test_the_search(bench, tmp_path, monkeypatch, capsys) -> None:
    """On the processor, where one build stands for kernels that only differ in their registers."""
    library = build(tmp_path)

    class Kernel:
        num_regs = 80
        local_size_bytes = 0

        def __init__(self, function):
            self.function = function

        def __call__(self, grid, block, arguments):
            host_kernels.run(library, self.function, grid, block, arguments)

    own = bench.as_it_is(kernel_loader.source("augment"))
    compiled = []

    def new_module(name, text, flags):
        compiled.append(bench.as_it_is(text))
        return SimpleNamespace(get_function=Kernel)

    monkeypatch.setattr(kernel_loader, "new_module", new_module)
    monkeypatch.setattr(kernel_loader, "options", lambda: ())
    monkeypatch.setattr(devices, "cupy", lambda: np)
    blocks = (own.BLOCKS, own.BLOCKS + 1)
    monkeypatch.setattr(bench, "CHOICES", {name: (value,) for name, value in vars(own).items()} | {"BLOCKS": blocks})
    augment = replace(Augment(24, **bench.IMAGENET), **bench.HALF)
    sizes = np.array([[40, 50], [31, 20]], np.int32)
    bench.tune("small", augment, sizes, CPU, 2)
    lines = capsys.readouterr().out.splitlines()
    assert {variant.BLOCKS for variant in compiled} == {*blocks}
    assert len([line for line in lines if line.endswith(", as it is")]) == 1
    errors = [float(error) for error in re.findall(r"error (\S+?)(?:,|$)", "\n".join(lines), re.M)]
    assert len(errors) == 2
    assert max(errors) < 3e-3
    assert lines[-1].endswith("2 tried")
