"""No question about a graph may end the process: all are asked through the real cuDNN in a process of their own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from planning import CUDNN, require_device_properties

from flcuda.cudnn import library
from flcuda.cudnn.device_properties import DeviceProperties
from flcuda.cudnn.graph import _FATAL_POOLING_BEFORE, Graph
from flcuda.errors import CudnnNotSupportedError

ROOT = Path(__file__).parents[2]


pytestmark = CUDNN


@pytest.fixture(autouse=True, scope="module")
def _device_properties() -> None:
    require_device_properties()


@pytest.fixture
def faulty() -> None:
    version = library.load()
    if version.version >= _FATAL_POOLING_BEFORE:
        pytest.skip(f"cuDNN {version.version_text} has not the fault of cuDNN 9.19")


@pytest.fixture
def sound() -> None:
    version = library.load()
    if version.version < _FATAL_POOLING_BEFORE:
        pytest.skip(f"cuDNN {version.version_text} is not known to be without the fault of cuDNN 9.19")


# What all scripts begin with. The last line that a process wrote says which question ended it.
START = """
import contextlib, itertools, sys
sys.path[:0] = [{root!r}, {here!r}, {tests!r}]
import graph_cases
from flcuda.cudnn import graph
from flcuda.cudnn.device_properties import DeviceProperties
from flcuda.cudnn.graph import Graph
from flcuda.errors import CudnnError

def ask(name, build, device, *, plans=0):
    print(name, "build", flush=True)
    try:
        built = build().build(device=device)
    except CudnnError:
        return
    found = []
    for mode in graph.HEURISTIC_MODES:
        print(name, mode, flush=True)
        with contextlib.suppress(CudnnError):
            found += built.heuristics(mode)
    for question in (built.engines, built.why_not, built.configurations):
        print(name, question.__name__, flush=True)
        with contextlib.suppress(CudnnError):
            question()
    with contextlib.suppress(CudnnError):
        for engine in built.engines():
            print(name, "configure", engine.id, flush=True)
            with contextlib.suppress(CudnnError):
                found.append(engine.configure())
    for configuration in found[:plans]:
        print(name, "plan", configuration.tag, flush=True)
        with contextlib.suppress(CudnnError):
            text = configuration.plan().to_json()
            scalars = {{t.uid: t.value for t in built.tensors.values() if t.value is not None}}
            graph.ExecutionPlan.from_json(text, device=device, scalars=scalars)

def pooling_gradient(mode, given, layout, size, dtype="float16"):
    g = Graph()
    rank = len(size)
    x_shape, y_shape = (4, 16, *size), (4, 16, *((extent - 1) // 2 + 1 for extent in size))
    dy = g.tensor(y_shape, dtype, layout=layout, name="dy")
    tensors = {{}}
    if "index" in given:
        tensors["index"] = g.tensor(y_shape, "int8", layout=layout, name="index")
    if "x" in given:
        tensors["x"] = g.tensor(x_shape, dtype, layout=layout, name="x")
        tensors["y"] = g.tensor(y_shape, dtype, layout=layout, name="y")
    g.output(g.resample_backward(mode, dy, x_shape, window=3, stride=2, padding=1, **tensors))
    return g
""".format(root=str(ROOT), here=str(Path(__file__).parent), tests=str(ROOT / "tests"))


def start(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDNN_LOGLEVEL_DBG": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", START + code], capture_output=True, text=True, env=environment, timeout=300
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def check(code: str) -> None:
    done = start(code + '\nprint("done")\n')
    last = done.stdout.splitlines()[-1:]
    assert (done.returncode, last) == (0, ["done"]), f"ended with {done.returncode} at {last}: {done.stderr[-500:]}"


@pytest.mark.parametrize("profile", ["h200", "a100", "rtx4090", "b200"])
def test_every_graph_can_be_asked_about(profile: str) -> None:
    check(f"""
device = DeviceProperties.from_profile({profile!r})
for name, build in graph_cases.CASES.items():
    ask(name, build, device)
""")


@pytest.mark.parametrize("profile", ["h200", "rtx4090"])
def test_every_gradient_of_pooling_can_be_asked_about(profile: str) -> None:
    check(f"""
device = DeviceProperties.from_profile({profile!r})
modes = {{"max": [("index",), ("x",), ("index", "x")], "average_include_padding": [(), ("x",)]}}
for mode, givens in modes.items():
    for given, layout, size in itertools.product(givens, ("nhwc", "nchw"), ((9,), (9, 7), (9, 7, 5))):
        ask((mode, given, layout, size), lambda: pooling_gradient(mode, given, layout, size), device, plans=1)
""")


def gradient(x_shape: tuple[int, ...], layout: str, *, index: bool) -> Graph:
    g = Graph()
    y_shape = (*x_shape[:2], *(size // 2 for size in x_shape[2:]))
    dy = g.tensor(y_shape, "float16", layout=layout, name="dy")
    x = None if index else g.tensor(x_shape, "float16", layout=layout, name="x")
    y = None if index else g.tensor(y_shape, "float16", layout=layout, name="y")
    chosen = g.tensor(y_shape, "int8", layout=layout, name="index") if index else None
    g.output(g.resample_backward("max", dy, x_shape, window=2, stride=2, index=chosen, x=x, y=y, name="pool"))
    return g


def refused(shape: tuple[int, ...], *, index: bool, words: tuple[str, ...]) -> None:
    device = DeviceProperties.from_profile("h200")
    built = gradient(shape, "nhwc", index=index).build()
    asked = [lambda mode=mode: built.heuristics(mode, device=device) for mode in ("A", "B", "fallback", "instant")]
    asked += [lambda question=question: question(device) for question in (built.engines, built.why_not)]
    asked += [lambda: built.engine(0, device), lambda: built.configurations(device)]
    for question in asked:
        with pytest.raises(CudnnNotSupportedError) as caught:
            question()
        for word in ("resample_backward max 'pool'", library.load().version_text, "give", *words):
            assert word in str(caught.value)


@pytest.mark.parametrize("shape", [(4, 16, 8, 6), (4, 16, 8, 6, 4), (4, 1, 8, 6)])
def test_what_ends_the_process_is_refused(shape: tuple[int, ...], faulty: None) -> None:
    refused(shape, index=False, words=("9.28",))


@pytest.mark.parametrize("index", [False, True])
def test_what_ends_the_process_in_some_runs_is_refused(index: bool) -> None:
    """In 9.28 one run in some hundreds, on a busy machine."""
    refused((4, 16, 8), index=index, words=("one spatial dimension",))


def test_what_does_not_end_the_process_is_not_refused(faulty: None) -> None:
    """The remedies that the refusals name, and layouts that cuDNN does not take for nhwc."""
    check("""
device = DeviceProperties.from_profile("h200")
for given, layout, size in ((("index",), "nhwc", (9, 7)), (("x",), "nchw", (9, 7)), (("x",), "nchw", (9,)),
                            (("index",), "nhwc", (1, 9))):
    assert pooling_gradient("max", given, layout, size).build(device=device).configurations()
""")


def test_a_damaged_plan_does_not_end_the_process() -> None:
    check("""
import json
from flcuda import device as devices
device = DeviceProperties.from_profile("h200")
plan = pooling_gradient("max", ("x",), "nchw", (9, 7)).build(device=device).configurations()[0].plan()
content = json.loads(plan.to_json())
for tensor in content["operationGraph"]["tensors"]:
    tensor["stride"] = list(devices.contiguous_strides(tensor["dim"], "nhwc"))
for engine in range(4):
    content["engine"] |= {"engineId": engine, "knobChoices": {}}
    print("engine", engine, flush=True)
    try:
        graph.ExecutionPlan.from_json(json.dumps(content), device=device)
    except CudnnError as error:
        continue
    raise SystemExit("restored")
""")


UNGUARDED = """
graph._FATAL_POOLING_BEFORE = 0
device = DeviceProperties.from_profile("h200")
built = pooling_gradient("max", ("x",), "nhwc", (9, 7)).build(device=device)
"""


@pytest.mark.parametrize("question", ["heuristics('A')", "heuristics('fallback')", "why_not()"])
def test_the_fault_of_9_19_is_there(question: str, faulty: None) -> None:
    """Where it is not, the refusal can be narrower."""
    if not library.load().version_text.startswith("9.19."):
        pytest.skip(f"the fault is known of cuDNN 9.19; this is {library.load().version_text}")
    assert start(f"{UNGUARDED}built.{question}").returncode == -signal.SIGSEGV


def test_the_fault_is_not_in_later_versions(sound: None) -> None:
    check(f"""
{UNGUARDED}
assert built.why_not()
for _ in range(20):
    for given in (("index",), ("x",), ("index", "x")):
        ask(given, lambda: pooling_gradient("max", given, "nhwc", (9, 7)), device, plans=1)
""")
