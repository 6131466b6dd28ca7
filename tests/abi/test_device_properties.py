"""Properties of GPUs that are not here, through the real library: finalized, and used for heuristics and plans."""

import gc
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from planning import CUDNN, require_device_properties

from flcuda.cudnn import bindings, library
from flcuda.cudnn import device_properties as module
from flcuda.cudnn.device_properties import KEYS, DeviceProperties, profiles, read_profile
from flcuda.cudnn.graph import Backend
from flcuda.errors import CudnnError, CudnnNotSupportedError

ROOT = Path(__file__).parents[2]
STEMS = (*profiles(), "h200.cudnn-9.19", "h200.cudnn-9.28")


pytestmark = CUDNN


@pytest.fixture(autouse=True, scope="module")
def needed() -> None:
    require_device_properties()


@pytest.fixture
def _on_9_28() -> None:
    """What a version wants and plans is a fact about that version."""
    if library.load().version // 100 != 928:
        pytest.skip(f"holds for cuDNN 9.28; {library.load().version_text} is loaded")


ON_9_28 = pytest.mark.usefixtures("_on_9_28")


@pytest.fixture(scope="module")
def graph() -> Backend:
    """The operation graph of a 3x3 convolution, 128 x 64 x 56 x 56, float16, NHWC."""

    def tensor(uid: int, n: int, c: int, h: int, w: int) -> Backend:
        found = Backend("TENSOR").set("TENSOR_DATA_TYPE", bindings.CUDNN_DATA_HALF)
        found.set("TENSOR_DIMENSIONS", n, c, h, w).set("TENSOR_STRIDES", c * h * w, 1, c * w, c)
        return found.set("TENSOR_UNIQUE_ID", uid).set("TENSOR_BYTE_ALIGNMENT", 16).finalize()

    convolution = Backend("CONVOLUTION").set("CONVOLUTION_COMP_TYPE", bindings.CUDNN_DATA_FLOAT)
    convolution.set("CONVOLUTION_CONV_MODE", bindings.CUDNN_CROSS_CORRELATION).set("CONVOLUTION_SPATIAL_DIMS", 2)
    for name in ("DILATIONS", "FILTER_STRIDES", "PRE_PADDINGS", "POST_PADDINGS"):
        convolution.set(f"CONVOLUTION_{name}", 1, 1)
    operation = Backend("OPERATION_CONVOLUTION_FORWARD")
    operands = {
        "CONV_DESC": convolution.finalize(),
        "X": tensor(1, 128, 64, 56, 56),
        "W": tensor(2, 64, 64, 3, 3),
        "Y": tensor(3, 128, 64, 56, 56),
        "ALPHA": 1.0,
        "BETA": 0.0,
    }
    for name, value in operands.items():
        operation.set(f"OPERATION_CONVOLUTION_FORWARD_{name}", value)
    return Backend("OPERATIONGRAPH").set("OPERATIONGRAPH_OPS", operation.finalize()).finalize()


def configurations(graph: Backend, device: DeviceProperties) -> list[Backend]:
    heuristics = Backend("ENGINEHEUR").set("ENGINEHEUR_OPERATION_GRAPH", graph)
    heuristics.set("ENGINEHEUR_MODE", bindings.CUDNN_HEUR_MODE_A).set("ENGINEHEUR_DEVICEPROP", device)
    return heuristics.finalize().get("ENGINEHEUR_RESULTS")


def plan(configuration: Backend, device: DeviceProperties) -> Backend:
    found = Backend("EXECUTION_PLAN").set("EXECUTION_PLAN_ENGINE_CONFIG", configuration)
    return found.set("EXECUTION_PLAN_DEVICEPROP", device).finalize()


def plan_json(of: Backend) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(of.get_one("EXECUTION_PLAN_JSON_REPRESENTATION"))
    return content


# --- each shipped GPU -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", STEMS)
def test_shipped_profile_finalizes(stem: str) -> None:
    profile = read_profile(stem)
    with DeviceProperties.from_profile(stem) as device:
        assert device.name == profile.name
        assert set(device.profile) == {*profile.properties, *device.filled}
        assert {key: device.profile[key] for key in profile.properties} == profile.properties
        assert device.descriptor
        assert device.name in repr(device)
        assert device.origin.startswith(profile.origin)


# 40 for the H200 is what was also seen with the profile that was read; the others are what 9.28 said here.
@ON_9_28
@pytest.mark.parametrize(
    ("stem", "count", "first"),
    [
        ("a100", 35, 22),
        ("b200", 39, 75),
        ("h100", 40, 62),
        ("h200", 40, 62),
        ("h200.cudnn-9.19", 40, 62),
        ("l4", 37, 22),
        ("l40s", 37, 22),
        ("rtx4090", 37, 22),
    ],
)
def test_shipped_profile_gets_plans(graph: Backend, stem: str, count: int, first: int) -> None:
    with DeviceProperties.from_profile(stem) as device:
        found = configurations(graph, device)
        assert len(found) == count
        contents = [plan_json(plan(configuration, device)) for configuration in found]
    assert contents[0]["engine"]["engineId"] == first
    for content in contents:
        assert content["engine"]["smVersion"] <= device.profile["deviceVer"]
        assert {key: content["GPUProfile"][key] for key in KEYS} == device.profile


@ON_9_28
def test_plan_outlives_the_properties(graph: Backend) -> None:
    device = DeviceProperties.from_profile("h200")
    found = configurations(graph, device)
    kept = plan(found[0], device)
    before = plan_json(kept)
    device.close()
    others = [DeviceProperties.from_profile("l4") for _ in range(50)]
    gc.collect()
    assert plan_json(kept) == before
    assert before["GPUProfile"]["deviceName"] == "NVIDIA H200"
    for other in others:
        other.close()


# --- filling --------------------------------------------------------------------------------------------------------


@ON_9_28
def test_profile_of_9_19_is_filled_on_9_28() -> None:
    with (
        DeviceProperties.from_profile("h200.cudnn-9.19") as older,
        DeviceProperties.from_profile("h200.cudnn-9.28") as newer,
    ):
        assert older.filled == ("oversizedSharedMemoryPerBlock", "memoryBusWidth")
        assert newer.filled == ()
        assert older.profile == newer.profile
        assert older.origin == newer.origin == "read, with keys filled"


@ON_9_28
def test_these_are_the_keys_of_9_28() -> None:
    complete = read_profile("h200").properties
    assert [key for key in KEYS if not module._is_read(key, complete)] == []
    assert not module._is_read("aNewerKey", complete)


@ON_9_28
@pytest.mark.parametrize("key", KEYS)
def test_missing_key_is_filled_or_named(key: str) -> None:
    properties = dict(read_profile("h200").properties)
    value = properties.pop(key)
    if key in ("maxThreadsPerBlock", "oversizedSharedMemoryPerBlock", "memoryBusWidth"):
        with DeviceProperties.from_profile(properties) as device:
            assert device.filled == (key,)
            assert device.profile == {**properties, key: value}
    else:
        with pytest.raises(ValueError, match=rf"cuDNN 9\.28\.\d wants {key}, which"):
            DeviceProperties.from_profile(properties)


@ON_9_28
def test_bus_width_of_an_unknown_gpu_is_named() -> None:
    properties = {**read_profile("h200.cudnn-9.19").properties, "deviceName": "NVIDIA Unheard-of"}
    with pytest.raises(ValueError, match="wants memoryBusWidth, which the profile of NVIDIA Unheard-of lacks"):
        DeviceProperties.from_profile(properties)
    with DeviceProperties.from_profile({**properties, "memoryBusWidth": 4096}) as device:
        assert device.filled == ("oversizedSharedMemoryPerBlock",)


# --- refusals and ownership -----------------------------------------------------------------------------------------


def test_gpu_that_cudnn_does_not_know() -> None:
    with pytest.raises(CudnnNotSupportedError) as raised:
        DeviceProperties.from_profile({**read_profile("h200").properties, "deviceVer": 300})
    assert raised.value.status == 3007
    assert "does not take the profile of NVIDIA H200 (deviceVer 300)" in raised.value.__notes__[0]


def test_cudnn_s_own_refusal_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed: list[Any] = []
    real: Callable[[Any], None] = bindings.cudnnBackendDestroyDescriptor

    def destroy(pointer: Any) -> None:
        destroyed.append(pointer)
        real(pointer)

    monkeypatch.setattr(bindings, "cudnnBackendDestroyDescriptor", destroy)
    with pytest.raises(CudnnError):
        DeviceProperties._of_json({"deviceName": 5})
    assert len(destroyed) == 1


def test_closed_once() -> None:
    device = DeviceProperties.from_profile("h200")
    other = DeviceProperties.from_profile("h200")
    device.close()
    device.close()
    assert device.closed
    assert not other.closed
    with pytest.raises(ValueError, match="this DeviceProperties is closed"):
        device.descriptor  # noqa: B018
    # What it said is still known.
    assert device.name == "NVIDIA H200"
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        pickle.dumps(other)


def test_profile_is_a_copy() -> None:
    with DeviceProperties.from_profile("h200") as device:
        device.profile["warpSize"] = 64
        device.profile["maxGridSize"].clear()
        assert device.profile == read_profile("h200").properties


def test_written_profile_loads_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    with DeviceProperties.from_profile("h200.cudnn-9.19") as device:
        assert device.write_profile(path)
        assert not device.write_profile(path)
        with DeviceProperties.from_profile(path) as again:
            assert again.profile == device.profile
            assert again.origin == device.origin
            assert again.filled == ()
    assert read_profile(path).cudnn == library.load().version_text


def test_bare_json_of_cudnn_s_loads(tmp_path: Path) -> None:
    path = tmp_path / "bare.json"
    path.write_text(json.dumps(read_profile("l4").properties))
    with DeviceProperties.from_profile(str(path)) as device:
        assert device.name == "NVIDIA L4"
        assert device.origin == ""


def test_from_many_threads() -> None:
    names: list[str] = []

    def use(stem: str) -> None:
        for _ in range(20):
            with DeviceProperties.from_profile(stem) as device:
                names.append(device.name)

    threads = [threading.Thread(target=use, args=(stem,)) for stem in STEMS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names) == sorted(read_profile(stem).name for stem in STEMS for _ in range(20))


def test_nothing_happens_at_exit() -> None:
    code = (
        "from flcuda.cudnn.device_properties import DeviceProperties\n"
        "kept = [DeviceProperties.from_profile(name) for name in ('h200', 'l4')]\n"
        "kept.append(kept)\n"
        "print(kept[0].name)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "NVIDIA H200\n", "")
