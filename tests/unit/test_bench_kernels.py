"""The benchmark of the kernels: a small run on the CPU, and what it counts."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from flcuda.device import CPU

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def bench():
    """Loads the script as it is run: with its own folder in the path."""
    sys.path.insert(0, str(BENCH))
    spec = importlib.util.spec_from_file_location("bench_kernels", BENCH / "bench_kernels.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_kernels"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(BENCH))


@pytest.mark.parametrize(("precision", "layout"), [("float32", "nchw"), ("float16", "nhwc"), ("bfloat16", "nhwc")])
def test_a_small_run(bench, precision, layout, capsys):
    small = ("--device", "cpu", "--batch", "2", "--size", "32", "--repeats", "1", "--budget", "0", "--no-torch")
    bench.main([*small, "--precision", precision, "--layout", layout, "--json"])
    answer = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in answer["rows"]]
    assert len(names) == 7 + 4 * 10 + 7
    for row in answer["rows"]:
        assert row["ms"] > 0
        assert row["share"] == row["copy_ms"] / row["ms"]
    lines = list(bench.table(answer["rows"]))
    assert len(lines) == 1 + len(names)
    assert all(name in line for name, line in zip(names, lines[1:], strict=True))


def test_bytes_at_a_network_s_shapes(bench):
    made = bench.Bench(CPU, "float16", "nhwc", None)
    cases = {(case.name, case.shape): case for case in bench.cases_of(made, 128, 224)}
    stem, first = (128, 64, 112, 112), (128, 64, 56, 56)
    a = 2 * 128 * 64 * 112 * 112
    assert cases["stem: statistics", stem].nbytes == a
    # read x, write a quarter twice and a byte for each of it
    assert cases["stem: apply, relu, max pool", stem].nbytes == a + a // 4 * 2 + a // 8
    assert cases["stem: backward of all", stem].nbytes == 2 * a + a // 4 * 3 + a // 8
    assert cases["batch norm: backward, relu", first].nbytes == 5 * a // 4
    assert cases["loss: backward", (128, 1000)].nbytes == 128 * 1000 * 6


def test_torchs_side_gives_the_same(bench, capsys):
    pytest.importorskip("torch")
    small = ("--device", "cpu", "--batch", "2", "--size", "64", "--repeats", "1", "--budget", "0")
    bench.main([*small, "--precision", "float32", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    errors = {row["name"]: row["error"] for row in rows if "error" in row}
    assert len(errors) == 16
    assert max(errors.values()) < 1e-5
