"""The benchmark of whole training steps on a GPU: the count of memory, and small runs of the processes."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from flcuda import device as devices

BENCH = Path(__file__).parents[2] / "bench"
PEERS = BENCH / "peers"


@pytest.fixture(scope="module")
def load():
    before = list(sys.path)
    sys.path[:0] = [str(BENCH), str(PEERS)]

    def loaded(name: str, folder: Path):
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        return sys.modules[name]

    yield loaded
    sys.path[:] = before


def test_the_peak_is_of_bytes_in_use_of_every_pool(load):
    peak = load("flcuda_resnet", PEERS).Peak()
    cupy = devices.cupy()
    pool = cupy.cuda.MemoryPool()
    with peak.watching():
        a = cupy.empty(1 << 20, cupy.uint8)
        with cupy.cuda.using_allocator(pool.malloc):
            b = cupy.empty(2 << 20, cupy.uint8)
        assert peak.used == 3 << 20
        del a
        assert peak.used == 2 << 20
        peak.restart()
        c = cupy.empty(1 << 19, cupy.uint8)
        del b
    assert (peak.used, peak.peak, peak.peak_all) == (1 << 19, (2 << 20) + (1 << 19), 3 << 20)
    del c


@pytest.mark.parametrize("row", ["flcuda:captured", "flcuda:eager+lean", "torch:eager", "torch:cuda-graph", "jax:jit"])
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_rows_train(load, capsys, row, precision):
    library = row.partition(":")[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    words = ["--network", "resnet18", "--precision", precision, "--batch", "16", "--size", "64", "--classes", "10"]
    words += ["--mode", row, "--steps", "20", "--samples", "5", "--warmup", "10", "--seconds", "60", "--json"]
    load("bench_resnet34", BENCH).main(words)
    ((found,),) = [table["rows"] for table in json.loads(capsys.readouterr().out)["tables"]]
    assert found["fault"] is None
    assert found["first_loss"] != found["last_loss"]
    assert found["memory"]["allocated_peak"] > 20 << 20
