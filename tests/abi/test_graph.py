"""Operation graphs, heuristics, engines and plans through the real cuDNN for an H200 that is not here."""

import contextlib
import copy
import ctypes
import gc
import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import graph_cases
import numpy as np
import pytest
from planning import CUDNN, require_libcuda

from flcuda.cudnn import bindings, graph, library, memory
from flcuda.cudnn.device_properties import DeviceProperties
from flcuda.cudnn.graph import Backend, EngineConfig, ExecutionPlan, Graph, OperationGraph
from flcuda.errors import CudnnError, CudnnNotSupportedError

ROOT = Path(__file__).parents[2]


pytestmark = CUDNN


@pytest.fixture(autouse=True, scope="module")
def _libcuda() -> None:
    require_libcuda()


# What cuDNN 9.28 has no descriptor for, whatever the tensors are.
NO_DESCRIPTOR = {f"reduction {mode}" for mode in ("avg", "norm1", "norm2", "mul_no_zeros")}
# What cuDNN 9.28 has no engine for on an H200, alone as it is here.
NO_ENGINE = {
    "pointwise floor_mod",
    "pointwise logical_and",
    "pointwise logical_or",
    "pointwise logical_not",
    "pointwise gen_index",
    "pointwise with a number, and factors",
    "generate_statistics",
    "batch_norm_backward_weights",
    "reduction mul",
    "resample_forward nearest",
    "resample_forward nearest with index",
    "resample_backward nearest",
    "resample_forward bilinear",
    "resample_backward bilinear",
    "reshape",
    "concatenate",
}


@pytest.fixture(scope="module")
def h200() -> DeviceProperties:
    if library.load().version < 90800:
        pytest.skip("device properties came with cuDNN 9.8")
    return DeviceProperties.from_profile("h200")


@pytest.fixture
def only_928() -> None:
    version = library.load().version_text
    if not version.startswith("9.28."):
        pytest.skip(f"these counts are those of cuDNN 9.28; this is {version}")


def first_plan(build: Any, device: DeviceProperties) -> tuple[OperationGraph, ExecutionPlan]:
    built = build().build(device=device)
    return built, built.configurations()[0].plan()


@pytest.fixture(scope="module")
def plan(h200: DeviceProperties) -> ExecutionPlan:
    return first_plan(graph_cases.convolution, h200)[1]


# --- graphs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", graph_cases.CASES)
def test_every_operation_finalizes(name: str, h200: DeviceProperties) -> None:
    since = graph._POINTWISE_SINCE.get(name.removeprefix("pointwise "), 0)
    if library.load().version < since:
        pytest.skip(f"cuDNN {library.version_text(since)} brought this mode")
    if name in NO_DESCRIPTOR:
        with pytest.raises(CudnnNotSupportedError) as caught:
            graph_cases.CASES[name]().build(device=h200)
        assert name in caught.value.__notes__[0]
        return
    built = graph_cases.CASES[name]().build(device=h200)
    assert built.outputs
    assert built.engine_count > 0
    assert str(built).startswith(("operation 1", "pointwise"))


@pytest.mark.parametrize("name", [name for name in graph_cases.CASES if name not in NO_DESCRIPTOR])
def test_plans_or_why_not(name: str, h200: DeviceProperties, only_928: None) -> None:
    """Every graph has a plan for the H200, which is the same after its JSON, or an error that says why not."""
    built = graph_cases.CASES[name]().build(device=h200)
    if name in NO_ENGINE:
        with pytest.raises(CudnnNotSupportedError) as caught:
            built.configurations()
        assert "no engine supports operation 1" in str(caught.value)
        assert re.search(r"engine [0-9, -]+: NOT_SUPPORTED", str(caught.value))
        return
    configuration = built.configurations()[0]
    told = configuration.workspace
    made = configuration.plan()
    assert made.workspace == told
    assert made.uids == built.pointers
    text = made.to_json()
    scalars = {tensor.uid: tensor.value for tensor in built.tensors.values() if tensor.value is not None}
    restored = ExecutionPlan.from_json(text, device=h200, scalars=scalars)
    assert restored.to_json() == text
    assert (restored.uids, restored.workspace, restored.tag) == (made.uids, made.workspace, made.tag)
    compiled = "runtime_compilation" in configuration.behavior_notes
    assert bool(made.kernel_names) == compiled


def test_misbuilt_graphs_do_not_reach_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    library.load()
    monkeypatch.setattr(bindings, "cudnnBackendCreateDescriptor", lambda *_: pytest.fail("cuDNN was asked"))
    for name, build, kind, names in graph_cases.MISBUILT:
        with pytest.raises(kind) as caught:
            build(Graph())
        assert all(text in str(caught.value) for text in names), name


def test_an_error_of_cudnn_names_the_operation(h200: DeviceProperties, monkeypatch: pytest.MonkeyPatch) -> None:
    """What our checks would miss: a broken output shape goes through to cuDNN."""
    monkeypatch.setattr(graph._Geometry, "output", lambda self, where, x, w: (5, 5))
    g = graph_cases.convolution()
    with pytest.raises(CudnnError) as caught:
        g.build(device=h200)
    assert "operation 1, convolution_forward of 'x' (128, 64, 56, 56) float16" in caught.value.__notes__[0]


# --- heuristics and engines -----------------------------------------------------------------------------------------


def test_forty_configurations(h200: DeviceProperties, only_928: None) -> None:
    """`forward n128 c64 56x56 k64 3x3 p1 float16 nhwc`: 40 configurations, and a plan of each."""
    built = graph_cases.convolution().build(device=h200)
    found = built.heuristics("A")
    assert len(found) == 40
    assert found[0].engine_id == 62
    assert found[0].knobs == {
        "tile_size": 4,
        "tilek": 0,
        "idx_mode": 0,
        "workspace": 1,
        "tile_cga_m": 8,
        "tile_cga_n": 1,
    }
    assert found[0].numerical_notes == ("tensor_core",)
    assert len({configuration.key for configuration in found}) == 40
    for configuration in found:
        made = configuration.plan()
        assert made.workspace == configuration.workspace
        assert json.loads(made.to_json())["engine"]["engineId"] == configuration.engine_id


@pytest.mark.parametrize(
    ("direction", "dtype", "layout", "listed", "delivered"),
    [
        ("forward", "bfloat16", "nhwc", 40, 33),
        ("forward", "float32", "nhwc", 40, 40),
        ("forward", "float32", "nchw", 40, 39),
        ("backward_data", "float16", "nhwc", 40, 40),
        ("backward_filter", "float16", "nhwc", 40, 40),
    ],
)
def test_counts(
    direction: str, dtype: str, layout: str, listed: int, delivered: int, h200: DeviceProperties, only_928: None
) -> None:
    """Note [counts]: what is asked for beforehand is more than what comes."""
    built = graph_cases.convolution(direction, dtype=dtype, layout=layout).build(device=h200)
    backend = Backend("ENGINEHEUR").set("ENGINEHEUR_OPERATION_GRAPH", built)
    backend.set("ENGINEHEUR_MODE", bindings.CUDNN_HEUR_MODE_A).set("ENGINEHEUR_DEVICEPROP", h200).finalize()
    assert backend.count("ENGINEHEUR_RESULTS") == listed
    assert len(built.heuristics("A")) == delivered


def test_modes_and_limit(h200: DeviceProperties) -> None:
    built = graph_cases.convolution().build(device=h200)
    counts = {mode: len(built.heuristics(mode)) for mode in graph.HEURISTIC_MODES}
    assert all(counts.values())
    assert [c.key for c in built.heuristics("A", limit=3)] == [c.key for c in built.heuristics("A")[:3]]
    assert {c.mode for c in built.heuristics("fallback")} == {"fallback"}
    with pytest.raises(ValueError, match="mode: 'C' is none of A, B, fallback, instant"):
        built.heuristics("C")
    with pytest.raises(ValueError, match="sm_count"):
        built.heuristics("A", sm_count=0)


def test_configurations_are_a_then_fallback(h200: DeviceProperties) -> None:
    built = graph_cases.convolution().build(device=h200)
    a, fallback = ([c.key for c in built.heuristics(mode)] for mode in ("A", "fallback"))
    expected = [*a, *(key for key in fallback if key not in a)]
    assert [c.key for c in built.configurations()] == expected


def test_float64_has_fallback_engines_only(h200: DeviceProperties, only_928: None) -> None:
    built = graph_cases.convolution(dtype="float64", layout="nchw").build(device=h200)
    assert built.heuristics("A") == []
    assert len(built.configurations()) == 3


def test_sm_count(h200: DeviceProperties) -> None:
    built = graph_cases.convolution().build(device=h200)
    found = built.heuristics("A", sm_count=16, limit=3)
    assert {c.sm_count for c in found} == {16}
    assert found[0].tag.endswith("@16")
    made = found[0].plan()
    assert json.loads(made.to_json())["engine"]["targetSMcount"] == 16
    assert ExecutionPlan.from_json(made.to_json(), device=h200).tag == made.tag
    by_hand = built.engine(found[0].engine_id, sm_count=16).configure(found[0].knobs)
    assert by_hand.key == found[0].key
    everything = built.heuristics("A", sm_count=h200.profile["multiProcessorCount"])
    assert [c.key for c in everything] == [c.key for c in built.heuristics("A")]
    with pytest.raises(ValueError, match="sm_count: 133 is more than the 132 multiprocessors of NVIDIA H200"):
        built.heuristics("A", sm_count=133)


def test_no_gpu_was_named(h200: DeviceProperties) -> None:
    built = graph_cases.convolution().build()
    for ask in (built.heuristics, built.configurations, built.engines, built.why_not, lambda: built.engine(0)):
        with pytest.raises(ValueError, match="for which GPU"):
            ask()
    configuration = built.configurations(h200)[0]
    with pytest.raises(ValueError, match="for which GPU"):
        configuration.plan()
    assert configuration.plan(device=h200).workspace >= 0


def test_engines_and_knobs(h200: DeviceProperties) -> None:
    built = graph_cases.convolution().build(device=h200)
    engines = built.engines()
    refused = {engine for engine, _ in built.why_not()}
    assert 0 < len(engines) < built.engine_count
    assert refused.isdisjoint({c.engine_id for c in built.heuristics("A")})
    first = built.heuristics("A", limit=1)[0]
    engine = built.engine(first.engine_id)
    knobs = {knob.type: knob for knob in engine.knobs}
    assert set(first.knobs) <= set(knobs)
    for word, value in first.knobs.items():
        assert knobs[word].minimum <= value <= knobs[word].maximum
    by_hand = engine.configure(first.knobs)
    assert by_hand.key == first.key
    assert by_hand.plan().to_json() == first.plan().to_json()
    assert engine.configure().engine_id == first.engine_id
    # cuDNN's own word for its own choice; whether a knob takes it is cuDNN's to say.
    own = []
    for word in knobs:
        with contextlib.suppress(CudnnError):
            own.append(engine.configure({word: -1}))
    assert own
    assert all(-1 in configuration.knobs.values() for configuration in own)
    with pytest.raises(ValueError, match=f"engine {engine.id} has no 'speed'"):
        engine.configure({"speed": 1})
    with pytest.raises(ValueError, match=r"tile_size of engine \d+ goes from"):
        engine.configure({"tile_size": 10**6})
    with pytest.raises(ValueError, match="is no engine"):
        built.engine(built.engine_count)
    with pytest.raises(CudnnNotSupportedError):
        built.engine(min(refused))
    for engine in engines:
        for note in (*engine.numerical_notes, *engine.behavior_notes):
            assert note in graph.NOTES


def test_what_heuristics_deliver_can_be_configured_again(h200: DeviceProperties) -> None:
    """Also knobs of -1, which some of cuDNN's own configurations for 3-D convolutions have."""
    for dtype in ("float32", "float16"):
        g = Graph()
        x = g.tensor((2, 16, 8, 8, 8), dtype, layout="nhwc")
        w = g.tensor((16, 16, 3, 3, 3), dtype, layout="nhwc")
        g.output(g.convolution_forward(x, w, padding=1))
        built = g.build(device=h200)
        for configuration in built.configurations():
            again = built.engine(configuration.engine_id).configure(configuration.knobs)
            assert again.key == configuration.key


# --- why not --------------------------------------------------------------------------------------------------------


def _statistics(dtype: str, layout: str = "nhwc", channels: int = 64, alignment: int = 16) -> Graph:
    g = Graph()
    x = g.tensor((8, channels, 14, 14), dtype, layout=layout, alignment=alignment, name="x")
    w = g.tensor((channels, channels, 3, 3), dtype, layout=layout, name="w")
    y = g.output(g.convolution_forward(x, w, padding=1))
    for total in g.generate_statistics(y):
        g.output(total)
    return g


def _bfloat16_prologue() -> Graph:
    g = Graph()
    x = g.tensor((8, 64, 14, 14), "bfloat16", layout="nhwc", name="x")
    w = g.tensor((64, 64, 3, 3), "bfloat16", layout="nhwc", name="w")
    scale = g.tensor((1, 64, 1, 1), "bfloat16", layout="nhwc", name="scale")
    y = g.output(g.convolution_forward(g.relu(g.mul(x, scale)), w, padding=1))
    for total in g.generate_statistics(y):
        g.output(total)
    return g


def _bfloat16_filter() -> Graph:
    g = Graph()
    x, dy = (g.tensor((8, 64, 14, 14), "bfloat16", layout="nhwc", name=name) for name in ("x", "dy"))
    scale, bias = (g.tensor((1, 64, 1, 1), "bfloat16", layout="nhwc", name=name) for name in ("scale", "bias"))
    prepared = g.relu(g.add(g.mul(x, scale), bias))
    g.output(g.convolution_backward_filter(prepared, dy, (64, 64, 3, 3), padding=1))
    return g


def _mixed_convolution() -> Graph:
    g = Graph()
    x = g.tensor((8, 64, 14, 14), "float16", layout="nhwc", name="x")
    w = g.tensor((64, 64, 1, 1), "float16", layout="nhwc", name="w")
    g.output(g.convolution_forward(x, w, name="mine"), dtype="bfloat16")
    return g


@pytest.mark.parametrize(
    ("build", "rule"),
    [
        (_mixed_convolution, "dtype: the tensors of convolution_forward 'mine' mix bfloat16, float16"),
        (lambda: _statistics("float32"), "dtype: statistics are fused for 16-bit tensors"),
        (lambda: _statistics("float16", "nchw"), "layout: 'x' (8, 64, 14, 14) float16 is not nhwc"),
        (lambda: _statistics("float16", channels=60), "channels: 'x' (8, 60, 14, 14) float16 has 60 channels"),
        (lambda: _statistics("float16", alignment=2), "alignment: 'x' (8, 64, 14, 14) float16 is aligned to 2 bytes"),
        (_bfloat16_prologue, "dtype: what is fused before a bfloat16 convolution needs bfloat16 intermediates"),
        (graph_cases.CASES["generate_statistics"], "pattern: statistics are fused behind a convolution"),
        (graph_cases.CASES["batch_norm_backward_weights"], "pattern: batch norm weight gradients"),
        (_bfloat16_filter, "dtype: scale, bias and ReLU before a filter gradient are fused for float16 only"),
    ],
)
def test_why_not_names_the_rule(build: Any, rule: str, h200: DeviceProperties) -> None:
    built = build().build(device=h200)
    assert any(text.startswith(rule) for text in built.likely_rules())
    error = built._unsupported(None, [])
    assert isinstance(error, CudnnNotSupportedError)
    assert rule in str(error)
    assert "no engine supports" in str(error)


def test_why_not_by_engine(h200: DeviceProperties, only_928: None) -> None:
    """Statuses and cuDNN's own reasons for each engine, which the last-error text alone does not hold."""
    built = graph_cases.convolution().build(device=h200)
    refused = dict(built.why_not())
    assert refused[7] == "NOT_SUPPORTED_ARCH_MISMATCH (3007)"
    assert refused[20].startswith("NOT_SUPPORTED (3000): Engine 20 is not enabled for CONV_FORWARD")
    assert len(refused) >= 56
    fused = graph_cases.CASES["generate_statistics"]().build(device=h200)
    reasons = dict(fused.why_not())
    assert "(mmaNodeCount == 0) && !is_pointwise_fusion" in reasons[1]
    assert all(len(text) < 400 for text in reasons.values())


def test_older_gpus_are_named() -> None:
    properties = DeviceProperties.from_profile("h200").profile
    properties |= {"deviceVer": 750, "deviceName": "an older GPU"}
    older = DeviceProperties.from_profile(properties)
    built = _statistics("bfloat16").build(device=older)
    rules = built.likely_rules()
    assert any("needs compute capability 8.0; the GPU has 7.5" in rule for rule in rules)
    assert any("statistics are fused from compute capability 8.0" in rule for rule in rules)
    with pytest.raises(CudnnNotSupportedError, match=r"the GPU has 7\.5"):
        built.configurations()


def test_listening_keeps_the_callback_that_was_there(h200: DeviceProperties) -> None:
    """Somebody else's callback is called meanwhile and is installed again afterwards."""
    seen = []

    def receive(severity: int, data: Any, debug: Any, message: bytes) -> None:
        seen.append(message)

    own = bindings.cudnnCallback_t(receive)
    bindings.cudnnSetCallback(bindings.CUDNN_SEV_WARNING_EN, None, own)
    try:
        graph_cases.convolution().build(device=h200).why_not()
        count = len(seen)
        assert count >= 56
        mask, data, found = ctypes.c_uint(), ctypes.c_void_p(), bindings.cudnnCallback_t()
        bindings.cudnnGetCallback(ctypes.byref(mask), ctypes.byref(data), ctypes.byref(found))
        assert ctypes.cast(found, ctypes.c_void_p).value == ctypes.cast(own, ctypes.c_void_p).value
        # cuDNN itself adds the bits of what is worse.
        assert mask.value == bindings.CUDNN_SEV_WARNING_EN | bindings.CUDNN_SEV_ERROR_EN
    finally:
        bindings.cudnnSetCallback(0, None, None)


# --- JSON -----------------------------------------------------------------------------------------------------------


def test_json_round_trip(plan: ExecutionPlan, h200: DeviceProperties) -> None:
    text = plan.to_json()
    restored = ExecutionPlan.from_json(text, device=h200)
    assert restored.to_json() == text
    assert restored.workspace == plan.workspace
    assert restored.uids == plan.uids
    assert restored.tag == plan.tag


def changed(text: str, **changes: Any) -> str:
    content = json.loads(text)
    for path, value in changes.items():
        *outer, last = path.split("__")
        part = content
        for key in outer:
            part = part[key]
        part[last] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("damage", "status", "words"),
    [
        (lambda text: text[: len(text) // 2], 2000, "damaged or cut short"),
        (lambda text: "", 2000, "damaged or cut short"),
        (lambda text: "[]", 2000, "the text is no plan"),
        (lambda text: changed(text, cudnnVersion=90100), 1002, "the plan is of cuDNN 90100"),
        (lambda text: changed(text, schemaVersion=1), 1003, "schema version 1"),
        (lambda text: changed(text, engine__engineId=999), 3000, "no engine 999"),
        (lambda text: changed(text, GPUProfile__multiProcessorCount=108), 3007, "for NVIDIA H200 and not for"),
        (lambda text: changed(text, engine={"engineId": "x"}), 2000, "engine.engineId"),
        (lambda text: changed(text, operationGraph__tensors="x"), 2000, "operationGraph.tensors"),
        (lambda text: changed(text, operationGraph__nodes=-1), 2000, "operationGraph.nodes"),
        (lambda text: text.replace('"name":"1"', '"name":"x"'), 2000, "tensor name 'x'"),
        (lambda text: text.replace('"X":"1"', '"X":"x"'), 2000, "names the tensor 'x'"),
        (lambda text: changed(text, GPUProfile=None), 2000, "GPUProfile"),
    ],
)
def test_refusals(damage: Any, status: int, words: str, plan: ExecutionPlan, h200: DeviceProperties) -> None:
    with pytest.raises(CudnnError) as caught:
        ExecutionPlan.from_json(damage(plan.to_json()), device=h200)
    assert caught.value.status == status
    assert isinstance(caught.value, CudnnNotSupportedError) == (status // 1000 == 3)
    assert words in str(caught.value)


def test_another_gpu(plan: ExecutionPlan) -> None:
    properties = DeviceProperties.from_profile("h200").profile
    properties |= {"deviceVer": 800, "multiProcessorCount": 108, "deviceName": "NVIDIA A100"}
    with pytest.raises(CudnnNotSupportedError, match="for NVIDIA H200 and not for NVIDIA A100") as caught:
        ExecutionPlan.from_json(plan.to_json(), device=DeviceProperties.from_profile(properties))
    assert caught.value.status == 3007


def test_neither_handle_nor_device(plan: ExecutionPlan) -> None:
    """cuDNN itself ends the process here."""
    with pytest.raises(ValueError, match="handle, device: give one"):
        ExecutionPlan.from_json(plan.to_json())
    with pytest.raises(TypeError, match="expected a str, got bytes"):
        ExecutionPlan.from_json(plan.to_json().encode(), device=None)  # type: ignore[arg-type]


def test_scalars_of_a_restored_plan(h200: DeviceProperties) -> None:
    built, made = first_plan(graph_cases.CASES["norm_forward batch training, running"], h200)
    text = made.to_json()
    scalars = {tensor.uid: tensor.value for tensor in built.tensors.values() if tensor.value is not None}
    assert len(scalars) == 2
    with pytest.raises(ValueError, match=r"scalars: the plan has the scalars \[\d, \d\] and \[\] were given"):
        ExecutionPlan.from_json(text, device=h200)
    restored = ExecutionPlan.from_json(text, device=h200, scalars=scalars)
    assert {uid: float(array[0]) for uid, array in restored._scalars.items()} == {
        uid: float(array[0]) for uid, array in made._scalars.items()
    }


FUZZ = """
import copy, json, os, sys
sys.path[:0] = [{root!r}, {here!r}]
import graph_cases
import numpy as np
from flcuda.cudnn.device_properties import DeviceProperties
from flcuda.cudnn.graph import ExecutionPlan
from flcuda.errors import CudnnError
device = DeviceProperties.from_profile("h200")
built = graph_cases.CASES[{name!r}]().build(device=device)
base = json.loads(built.configurations()[0].plan().to_json())
scalars = {{t.uid: t.value for t in built.tensors.values() if t.value is not None}}
def places(part, path=()):
    yield path
    items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))
for path in list(places(base)):
    if path and "payload" not in path:
        for value in ("zzz", None, -7, [], {{}}):
            content = copy.deepcopy(base)
            part = content
            for key in path[:-1]:
                part = part[key]
            part[path[-1]] = value
            print(path, value, file=sys.stderr, flush=True)
            try:
                ExecutionPlan.from_json(json.dumps(content), device=device, scalars=scalars)
            except (CudnnError, ValueError):
                pass
print("done")
"""


@pytest.mark.parametrize("name", ["convolution forward 2d nhwc", "fusion convolution, bias, activation"])
def test_damaged_json_never_ends_the_process(name: str, h200: DeviceProperties, only_928: None) -> None:
    script = FUZZ.format(root=str(ROOT), here=str(Path(__file__).parent), name=name)
    environment = {**os.environ, "CUDNN_LOGLEVEL_DBG": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.stdout == "done\n", f"ended with {done.returncode} at {done.stderr.splitlines()[-1:]}"


# --- what heuristics list ---------------------------------------------------------------------------------------------


def listed_graph(h200: DeviceProperties) -> OperationGraph:
    made = Graph("float32")
    x = made.tensor((8, 64, 28, 28), "float16", layout="nhwc")
    w = made.tensor((64, 64, 3, 3), "float16", layout="nhwc")
    made.output(made.convolution_forward(x, w, padding=1), layout="nhwc")
    return made.build(device=h200)


def test_a_configuration_says_what_its_descriptors_say(h200: DeviceProperties) -> None:
    described = listed_graph(h200)
    found = [each for mode in ("A", "B") for each in described.heuristics(mode)]
    assert len(found) > 20
    assert any(each.knobs for each in found)
    for each in found:
        engine = each._backend.get_one("ENGINECFG_ENGINE")
        assert each.engine_id == engine.get_one("ENGINE_GLOBAL_INDEX")
        choices = each._backend.get("ENGINECFG_KNOB_CHOICES", room=32)
        assert each.knobs == {
            graph._knob_word(choice.get_one("KNOB_CHOICE_KNOB_TYPE")): choice.get_one("KNOB_CHOICE_KNOB_VALUE")
            for choice in choices
        }


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_what_is_read_of_a_configuration_is_destroyed(
    h200: DeviceProperties, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Also when cuDNN refuses the n-th question."""
    raw = graph._raw_functions()
    live: set[int] = set()
    asked = 0

    def create(kind: Any, out: Any) -> int:
        status = int(raw.create(kind, out))
        live.add(made_at(out))
        return status

    def made_at(out: Any) -> int:
        # of an array the reference is into its middle: what is not yet known is the new one
        values = out._obj
        values = [values.value] if not isinstance(values, ctypes.Array) else list(values)
        (new,) = {value for value in values if value} - live
        return int(new)

    def destroy(descriptor: Any) -> int:
        live.remove(descriptor.value)
        return int(raw.destroy(descriptor))

    def get(*arguments: Any) -> int:
        nonlocal asked
        asked += 1
        return 5000 if asked == failing else int(raw.get_attribute(*arguments))

    configuration = next(each for each in listed_graph(h200).heuristics("A") if each._knob_count > 1)
    expected = configuration.knobs
    changed = raw._replace(create=create, destroy=destroy, get_attribute=get)
    monkeypatch.setattr(graph, "_raw_functions", lambda: changed)
    with pytest.raises(CudnnError, match="cudnnBackendGetAttribute"):
        graph._chosen_knobs(configuration._backend, configuration._knob_count)
    assert not live
    assert graph._chosen_knobs(configuration._backend, configuration._knob_count) == expected
    assert not live


# --- variant packs --------------------------------------------------------------------------------------------------


class Launches:
    """Stands in for cudnnBackendExecute, which needs a GPU, and keeps what was set in each variant pack."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.packs: list[int] = []
        self.contents: list[tuple[dict[int, int], int]] = []
        self._set: dict[tuple[int, Any], list[int]] = {}
        self.status = 0
        raw = graph._raw_functions()

        def recorded(pack: Any, attribute: Any, kind: Any, count: Any, values: Any) -> int:
            array = values._obj
            found = list(array) if isinstance(array, ctypes.Array) else [array.value]
            assert f"({len(found)})" in repr(count)
            self._set[pack.value, attribute] = [value or 0 for value in found]
            return int(raw.set_attribute(pack, attribute, kind, count, values))

        def created(kind: Any, out: Any) -> int:
            status = int(raw.create(kind, out))
            self._set = {key: values for key, values in self._set.items() if key[0] != out._obj.value}
            return status

        changed = raw._replace(create=created, set_attribute=recorded, execute=self)
        monkeypatch.setattr(graph, "_raw_functions", lambda: changed)

    def __call__(self, handle: Any, plan: Any, pack: Any) -> int:
        uids = self._set[pack.value, graph._PACK_UIDS]
        pointers = self._set[pack.value, graph._PACK_POINTERS]
        (workspace,) = self._set.get((pack.value, graph._PACK_WORKSPACE), [0])
        self.packs.append(pack.value)
        self.contents.append((dict(zip(uids, pointers, strict=True)), workspace))
        return self.status


HANDLE: Any = SimpleNamespace(_as_parameter_=bindings.cudnnHandle_t())


def test_variant_packs_hold_the_pointers(
    plan: ExecutionPlan, h200: DeviceProperties, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(monkeypatch)
    made = ExecutionPlan.from_json(plan.to_json(), device=h200)
    pointers = {uid: 0x7F0000000000 + 4096 * uid for uid in made.uids}
    made.execute(HANDLE, dict(reversed(pointers.items())), 0x100)
    made.execute(HANDLE, pointers, 0x100)
    made.run(HANDLE, tuple(pointers.values()), 0x100)
    assert launches.contents == [(pointers, 0x100)] * 3
    assert len(set(launches.packs)) == 1
    for step in range(1, 2 * graph._PACKS):
        moved = {uid: pointer + 256 * step for uid, pointer in pointers.items()}
        made.execute(HANDLE, moved, 0x200)
        assert launches.contents[-1] == (moved, 0x200)
    assert len(made._packs) == graph._PACKS
    made.execute(HANDLE, pointers, 0x100)
    assert launches.contents[-1] == (pointers, 0x100)
    with pytest.raises(ValueError, match=f"workspace: the plan needs {made.workspace} bytes"):
        made.execute(HANDLE, pointers)
    with pytest.raises(ValueError, match=r"pointers: 1 for the 3 tensors \(1, 2, 3\)"):
        made.run(HANDLE, (1,), 0x100)
    with pytest.raises(ValueError, match="pointers: there is none for the tensor with uid 2"):
        made.execute(HANDLE, {1: 1, 3: 1}, 0x100)
    with pytest.raises(ValueError, match="pointers: that of the tensor with uid 2 is null"):
        made.execute(HANDLE, {**pointers, 2: 0}, 0x100)
    with pytest.raises(TypeError, match="expected a device address or a CuPy array, got str"):
        made.execute(HANDLE, {**pointers, 2: "2"}, 0x100)
    launches.status = 3000
    with pytest.raises(CudnnNotSupportedError, match="cudnnBackendExecute"):
        made.execute(HANDLE, pointers, 0x100)
    made.close()
    with pytest.raises(ValueError, match="this EXECUTION_PLAN descriptor is closed"):
        made.execute(HANDLE, pointers, 0x100)


def test_a_finalized_variant_pack_cannot_be_set_again(plan: ExecutionPlan) -> None:
    """What Note [variant packs] says; were it otherwise, a pack could be used for other addresses."""
    raw = graph._raw_functions()
    pack = plan._pack(tuple(0x1000 * uid for uid in plan.uids), 0x100)
    pointers = ctypes.byref((ctypes.c_void_p * 3)(1, 2, 3))
    count = ctypes.c_int64.from_param(3)
    assert raw.set_attribute(pack.address, graph._PACK_POINTERS, graph._VOID_PTR, count, pointers) // 1000 == 2
    assert raw.finalize(pack.address) // 1000 == 2


class Followed:
    """Stands in for a Handle."""

    def __init__(self) -> None:
        self._pointer: Any = bindings.cudnnHandle_t()
        self._stream = 7
        self.asked = 0

    @property
    def _as_parameter_(self) -> Any:
        return self._pointer

    def use_current_stream(self) -> None:
        self.asked += 1
        self._stream = 9


def test_a_launcher_runs_as_a_call_does(
    plan: ExecutionPlan, h200: DeviceProperties, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = pytest.importorskip("cupy").cuda
    stream = SimpleNamespace(ptr=7)
    taken: list[int] = []

    def alloc(size: int) -> Any:
        taken.append(size)
        return SimpleNamespace(ptr=0x5000 + 0x100 * len(taken))

    monkeypatch.setattr(cuda, "get_current_stream", lambda: stream)
    monkeypatch.setattr(cuda, "alloc", alloc)
    launches = Launches(monkeypatch)
    made = ExecutionPlan.from_json(plan.to_json(), device=h200)
    handle: Any = Followed()
    launch = made.launcher(handle)
    assert launch is not None
    assert made.workspace > 0
    for step in range(1, 3 * graph._PACKS):
        addresses = tuple(0x1000 * step + 0x10 * uid for uid in made.uids)
        launch(addresses)
        assert launches.contents[-1] == (dict(zip(made.uids, addresses, strict=True)), 0x5000 + 0x100 * step)
    assert set(taken) == {made.workspace}
    assert handle.asked == 0
    stream.ptr = 9
    launch(addresses)
    launch(addresses)
    assert handle.asked == 1
    with pytest.raises(ValueError, match="that of the tensor with uid 2 is null"):
        launch((1, 0, 1))
    launches.status = 3000
    with pytest.raises(CudnnNotSupportedError, match="cudnnBackendExecute"):
        launch(addresses)
    count = len(launches.contents)
    handle._pointer = None
    with pytest.raises(ValueError, match="the cuDNN handle of the plan is closed"):
        launch(addresses)
    handle._pointer = bindings.cudnnHandle_t()
    made.close()
    with pytest.raises(ValueError, match="this EXECUTION_PLAN descriptor is closed"):
        launch(addresses)
    assert len(launches.contents) == count


def test_variant_packs_are_destroyed_once(
    plan: ExecutionPlan, h200: DeviceProperties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the plan drops them, at the latest with it; and not by a plan that is still there at the exit."""
    raw = graph._raw_functions()
    live: set[int] = set()
    made_packs = 0

    def create(kind: int, out: Any) -> int:
        nonlocal made_packs
        status: int = raw.create(kind, out)
        assert out._obj.value not in live
        live.add(out._obj.value)
        made_packs += 1
        return status

    def destroy(pack: Any) -> int:
        live.remove(pack.value)  # KeyError: the second time
        return int(raw.destroy(pack))

    changed = raw._replace(create=create, destroy=destroy, execute=lambda *_: 0)
    monkeypatch.setattr(graph, "_raw_functions", lambda: changed)
    made = ExecutionPlan.from_json(plan.to_json(), device=h200)
    for step in range(3 * graph._PACKS):
        made.run(HANDLE, tuple(0x1000 * (step + uid) for uid in made.uids), 0x100)
    assert made_packs == 3 * graph._PACKS
    assert len(live) == graph._PACKS
    made.close()
    assert not live
    other = ExecutionPlan.from_json(plan.to_json(), device=h200)
    other.run(HANDLE, tuple(0x1000 * uid for uid in other.uids), 0x100)
    assert len(live) == 1
    del other
    gc.collect()
    assert not live


def test_variant_packs_hold_the_scalars(h200: DeviceProperties, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their addresses are of memory that the plan keeps, with the values in it."""
    launches = Launches(monkeypatch)
    built, made = first_plan(graph_cases.CASES["batch_norm_finalize"], h200)
    scalars = {tensor.uid: tensor for tensor in built.tensors.values() if tensor.value is not None}
    assert {tensor.dtype for tensor in scalars.values()} == {"int64", "float32"}
    del built
    gc.collect()
    made.execute(HANDLE, dict.fromkeys(made.uids, 0x1000), 0x100)
    contents, _ = launches.contents[0]
    assert set(contents) == {*made.uids, *scalars}
    for uid, tensor in scalars.items():
        kind = ctypes.c_int64 if tensor.dtype == "int64" else ctypes.c_float
        assert kind.from_address(contents[uid]).value == pytest.approx(tensor.value)


# --- descriptors ----------------------------------------------------------------------------------------------------


class Ledger:
    """Which descriptors were made and which destroyed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        self.live: set[int] = set()
        create, destroy = bindings.cudnnBackendCreateDescriptor, bindings.cudnnBackendDestroyDescriptor

        def created(kind: Any, pointer: Any) -> None:
            create(kind, pointer)
            address = ctypes.cast(pointer._obj, ctypes.c_void_p).value
            assert address is not None
            assert address not in self.live
            self.made += 1
            self.live.add(address)

        def destroyed(pointer: Any) -> None:
            self.live.remove(ctypes.cast(pointer, ctypes.c_void_p).value)  # KeyError: the second time
            destroy(pointer)

        monkeypatch.setattr(bindings, "cudnnBackendCreateDescriptor", created)
        monkeypatch.setattr(bindings, "cudnnBackendDestroyDescriptor", destroyed)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_frees_exactly_once_in_any_order(
    order: tuple[int, ...], h200: DeviceProperties, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(monkeypatch)
    built = graph_cases.CASES["fusion convolution, bias, activation"]().build(device=h200)
    configurations = built.configurations()
    made = configurations[0].plan()
    text = made.to_json()
    restored = ExecutionPlan.from_json(text, device=h200)
    owners = [built._backend, configurations[0]._backend, made, restored]
    for index in order:
        owners[index].close()
        owners[index].close()
        for kept in (made, restored):
            if not kept._backend.closed:
                assert kept.to_json() == text
    assert made._backend.closed
    with pytest.raises(ValueError, match="this EXECUTION_PLAN descriptor is closed"):
        made.to_json()
    with pytest.raises(ValueError, match="this OPERATIONGRAPH descriptor is closed"):
        built.heuristics()
    owners.clear()
    del built, configurations, made, restored, kept
    gc.collect()
    assert ledger.made > 20
    assert ledger.live == set()


def test_frees_by_garbage_in_random_order(h200: DeviceProperties, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(monkeypatch)
    built = graph_cases.convolution().build(device=h200)
    kept: list[Any] = [built, *built.configurations()[:6], *built.engines()[:4]]
    kept += [configuration.plan() for configuration in kept[1:7]]
    kept += [kept[7].configure()]
    del built
    random.Random(3).shuffle(kept)
    while kept:
        kept.pop()
    gc.collect()
    assert ledger.live == set()


def test_a_refused_build_frees_everything(h200: DeviceProperties, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(monkeypatch)
    with pytest.raises(CudnnNotSupportedError):
        graph_cases.CASES["reduction avg"]().build(device=h200)
    built = graph_cases.CASES["reshape"]().build(device=h200)
    with pytest.raises(CudnnNotSupportedError):
        built.configurations()
    del built
    gc.collect()
    assert ledger.made > 0
    assert ledger.live == set()


def test_device_properties_may_go_first() -> None:
    device = DeviceProperties.from_profile("h200")
    built, made = first_plan(graph_cases.convolution, device)
    text = made.to_json()
    configuration = built.heuristics("A", limit=1)[0]
    device.close()
    assert made.to_json() == text
    assert configuration.engine_id >= 0
    with pytest.raises(ValueError, match="closed"):
        built.heuristics("A")


def test_plans_build_in_threads(h200: DeviceProperties) -> None:
    built = graph_cases.convolution().build(device=h200)
    configurations = built.configurations()
    texts: dict[int, list[str]] = {}

    def build(number: int) -> None:
        texts[number] = [configuration.plan().to_json() for configuration in configurations[:12]]

    threads = [threading.Thread(target=build, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 4
    assert all(text == texts[0] for text in texts.values())


def test_backend_is_raw_cudnn(h200: DeviceProperties) -> None:
    backend = Backend("TENSOR")
    with pytest.raises(ValueError, match="the TENSOR descriptor is not finalized"):
        Backend("OPERATION_RESHAPE").set("OPERATION_RESHAPE_XDESC", backend)
    backend.set("TENSOR_DATA_TYPE", bindings.CUDNN_DATA_HALF).set("TENSOR_DIMENSIONS", 1, 2, 3)
    backend.set("TENSOR_STRIDES", 6, 3, 1).set("TENSOR_UNIQUE_ID", 7).set("TENSOR_BYTE_ALIGNMENT", 16)
    with pytest.raises(CudnnError):
        backend.get("TENSOR_DIMENSIONS")
    assert not backend.finalized
    backend.finalize()
    assert backend.get("CUDNN_ATTR_TENSOR_DIMENSIONS") == [1, 2, 3]
    assert backend.get_one("TENSOR_DATA_TYPE") == bindings.CUDNN_DATA_HALF
    values = (ctypes.c_int64 * 3)()
    count = ctypes.c_int64()
    bindings.cudnnBackendGetAttribute(
        backend, bindings.CUDNN_ATTR_TENSOR_STRIDES, bindings.CUDNN_TYPE_INT64, 3, ctypes.byref(count), values
    )
    assert list(values) == [6, 3, 1]
    with pytest.raises(CudnnError) as caught:
        backend.set("TENSOR_UNIQUE_ID", 8)
    assert "attribute TENSOR_UNIQUE_ID of a TENSOR descriptor, set to 8" in caught.value.__notes__
    with pytest.raises(ValueError, match="kind: 'PICTURE'"):
        Backend("PICTURE")
    with pytest.raises(ValueError, match="attribute: 'TENSOR_COLOUR'"):
        backend.get("TENSOR_COLOUR")
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(backend)
    with Backend("TENSOR") as other:
        assert not other.closed
    assert other.closed


def test_attribute_tables_are_the_headers() -> None:
    """The versions that brought attributes and kinds, and their types, as the installed header documents them."""
    header = Path(library.load().path).parent / "include" / "cudnn_graph.h"
    if not header.is_file() or library.load().version < bindings.CUDNN_VERSION:
        pytest.skip("no header beside cuDNN of the version that the tables are from")
    text = header.read_text()
    body = text[: text.index("} cudnnBackendAttributeName_t;")]
    body = body[body.rindex("typedef enum {") :]
    found = 0
    for name, comment in re.findall(r"CUDNN_ATTR_(\w+)[^=/]*=\s*\d+\s*,?\s*/\*\*<(.*?)\*/", body, re.DOTALL):
        since = re.search(r"@since cuDNN (\d+)\.(\d+)\.(\d+)", comment)
        assert since is not None, name
        major, minor, patch = map(int, since.groups())
        assert graph.attribute_since(name) == major * 10000 + minor * 100 + patch, name
        found += 1
    assert found > 300
    kinds = text[text.index("} cudnnBackendAttributeType_t;") : text.index("} cudnnBackendDescriptorType_t;")]
    for name, major, minor in re.findall(
        r"CUDNN_BACKEND_(\w+)_DESCRIPTOR\s*=\s*\d+,\s*/\*\*<[^*]*@since cuDNN (\d+)\.(\d+)", kinds
    ):
        assert graph._KIND_SINCE.get(name, 90000) == int(major) * 10000 + int(minor) * 100, name
    documented = re.findall(r"(CUDNN_ATTR_\w+) \((CUDNN_TYPE_\w+)((?: or |/)CUDNN_TYPE_\w+)?", kinds)
    members = bindings.cudnnBackendAttributeName_t.__members__
    for name, first, second in documented:
        # The header's comments misspell a few names.
        if name in members and first.removeprefix("CUDNN_TYPE_") != "NAN_PROPAGATION":
            kind = f"CUDNN_TYPE_{graph.attribute_type(name.removeprefix('CUDNN_ATTR_'))}"
            assert kind == first or kind in second, name
    assert len(documented) > 100


# --- FLCUDA_CHECK=1 ---------------------------------------------------------------------------------------------------


class Checked:
    """A plan of two convolution operands and one result that checks each run, over memory that is made up."""

    def __init__(self, h200: DeviceProperties, monkeypatch: pytest.MonkeyPatch, restored: bool = False) -> None:
        monkeypatch.setattr(graph, "_CHECKS", True)
        monkeypatch.setattr(memory, "bytes_at", self.bytes_at)
        self.runs = 0
        raw = graph._raw_functions()._replace(execute=self.execute)
        monkeypatch.setattr(graph, "_raw_functions", lambda: raw)
        self.graph, self.plan = first_plan(graph_cases.convolution, h200)
        if restored:
            self.plan = ExecutionPlan.from_json(self.plan.to_json(), device=h200)
        self.tensors = self.graph.tensors
        self.pointers = {uid: 0x10000000 * uid for uid in self.plan.uids}
        self.scratch = 0x7000000000
        self.allocations = {address: self.tensors[uid].extent for uid, address in self.pointers.items()}
        self.allocations[self.scratch] = self.plan.workspace

    def bytes_at(self, address: int) -> int | None:
        for base, size in self.allocations.items():
            if base <= address < base + size:
                return base + size - address
        return 0

    def execute(self, handle: Any, plan: Any, pack: int) -> int:
        self.runs += 1
        return 0

    def run(self, **changes: int) -> None:
        pointers = {**self.pointers, **{int(name[1:]): address for name, address in changes.items() if name[0] == "p"}}
        self.plan.execute(HANDLE, pointers, changes.get("scratch", self.scratch))
        self.plan.run(HANDLE, tuple(pointers[uid] for uid in self.plan.uids), changes.get("scratch", self.scratch))


def test_checks_let_good_pointers_run(h200: DeviceProperties, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = Checked(h200, monkeypatch)
    checked.run()
    checked.run()
    assert checked.runs == 4


@pytest.mark.parametrize("restored", [False, True])
def test_checks_find_what_is_too_small(restored: bool, h200: DeviceProperties, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = Checked(h200, monkeypatch, restored)
    for uid, address in checked.pointers.items():
        tensor = checked.tensors[uid]
        checked.allocations[address] -= 1
        words = rf"tensor .*{re.escape(str(tensor.shape))}.*\(uid {uid}\) needs {tensor.extent} bytes at {address:#x}, "
        with pytest.raises(ValueError, match=f"{words}and the allocation .* has {tensor.extent - 1} from there on"):
            checked.run()
        checked.allocations[address] += 1
    with pytest.raises(ValueError, match=r"tensor .* \(uid 2\): 0x123400 is in no memory of CUDA's"):
        checked.run(p2=0x123400)
    with pytest.raises(ValueError, match=r"\(uid 1\) has to be aligned to 16 bytes, and 0x10000008 is not"):
        checked.run(p1=checked.pointers[1] + 8)
    assert checked.plan.workspace > 1
    checked.allocations[checked.scratch] -= 1
    with pytest.raises(ValueError, match=f"the workspace needs {checked.plan.workspace} bytes"):
        checked.run()
    assert checked.runs == 0


def test_checks_find_what_overlaps(h200: DeviceProperties, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = Checked(h200, monkeypatch)
    (out,) = [tensor.uid for tensor in checked.graph.outputs]
    first = checked.plan.uids[0]
    checked.allocations[checked.pointers[first]] += checked.tensors[out].extent
    with pytest.raises(ValueError, match=rf"\(uid {out}\) is written and overlaps with .*\(uid {first}\)"):
        checked.run(**{f"p{out}": checked.pointers[first] + 256})
    checked.allocations[checked.pointers[first]] += checked.plan.workspace
    with pytest.raises(ValueError, match=rf"the workspace is written and overlaps with .*\(uid {first}\)"):
        checked.run(scratch=checked.pointers[first])
    # Inputs may share memory.
    second = checked.plan.uids[1]
    if checked.tensors[second].extent <= checked.tensors[first].extent and second != out:
        checked.run(**{f"p{second}": checked.pointers[first]})


def test_checks_know_an_array_better_than_the_driver(h200: DeviceProperties, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy")
    checked = Checked(h200, monkeypatch)

    def array(uid: int, rows: int = 0, block: int = 0) -> Any:
        tensor = checked.tensors[uid]
        held = cupy.cuda.UnownedMemory(checked.pointers[uid], tensor.extent - block, None, 0)
        shape = (tensor.shape[0] - rows, *tensor.shape[1:])
        strides = tuple(2 * step for step in tensor.strides)
        return cupy.ndarray(shape, np.float16, cupy.cuda.MemoryPointer(held, 0), strides)

    scratch = cupy.ndarray(
        checked.plan.workspace,
        np.uint8,
        cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(checked.scratch, checked.plan.workspace, None, 0), 0),
    )
    arrays = {uid: array(uid) for uid in checked.plan.uids}
    checked.plan.execute(HANDLE, arrays, scratch)
    monkeypatch.setattr(graph.resources, "handle", lambda: HANDLE)
    monkeypatch.setattr(cupy.cuda, "alloc", lambda size: scratch.data)
    checked.plan(*arrays.values())
    assert checked.runs == 2
    extent = checked.tensors[1].extent
    few = {**arrays, 1: array(1, rows=1)}
    for call in (lambda: checked.plan.execute(HANDLE, few, scratch), lambda: checked.plan(*few.values())):
        with pytest.raises(ValueError, match=rf"\(uid 1\) needs {extent} bytes at .*, and the array has "):
            call()
    with pytest.raises(ValueError, match=rf"\(uid 1\) needs {extent} bytes at .*, and its memory has {extent - 1}"):
        checked.plan.execute(HANDLE, {**arrays, 1: array(1, block=1)}, scratch)
    with pytest.raises(ValueError, match=r"the workspace needs .* and the array has 1"):
        checked.plan.execute(HANDLE, arrays, scratch[:1])
    with pytest.raises(ValueError, match="pointers: 2 for the 3 tensors"):
        checked.plan(*list(arrays.values())[:2])


def test_no_checks_unless_asked_for(plan: ExecutionPlan) -> None:
    assert type(plan) is ExecutionPlan
    code = "from flcuda.cudnn import graph; print(graph._CHECKS)"
    for word, expected in (("", "False"), ("0", "False"), ("1", "True")):
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "FLCUDA_CHECK": word}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        assert done.stdout == f"{expected}\n"


# --- plans in threads -------------------------------------------------------------------------------------------------


def test_build_plans_keeps_the_order_and_the_errors(h200: DeviceProperties, monkeypatch: pytest.MonkeyPatch) -> None:
    built = graph_cases.CASES["fusion convolution, bias, activation"]().build(device=h200)
    wanted = built.configurations()[:6]
    refused = wanted[1].tag
    build = EngineConfig.plan

    def plan(configuration: EngineConfig, *target: Any) -> ExecutionPlan:
        if configuration.tag == refused:
            raise CudnnNotSupportedError("cudnnBackendFinalize", 3000, refused)
        return build(configuration, *target)

    monkeypatch.setattr(EngineConfig, "plan", plan)
    for threads in (None, 1, 3):
        made = graph.build_plans(wanted, device=h200, threads=threads)
        assert len(made) == len(wanted)
        for configuration, each in zip(wanted, made, strict=True):
            if configuration.tag == refused:
                assert isinstance(each, CudnnNotSupportedError)
            else:
                assert isinstance(each, ExecutionPlan)
                assert each.tag == configuration.tag
                assert each.build_ms > 0
    assert graph.build_plans([]) == []
    with pytest.raises(ValueError, match="build_plans: threads: 0"):
        graph.build_plans(wanted, threads=0)
    nowhere = graph_cases.convolution().build()
    configuration = nowhere.heuristics("A", device=h200, limit=1)[0]
    with pytest.raises(ValueError, match="build_plans: for which GPU"):
        graph.build_plans([configuration])
