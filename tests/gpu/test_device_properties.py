"""Properties read from the GPU that is here, against the CUDA runtime's, and as a profile."""

import json
from ctypes import byref, c_int64
from pathlib import Path
from typing import Any

import pytest

from flcuda import cli, device
from flcuda.cudnn import bindings, library, resources
from flcuda.cudnn.device_properties import KEYS, SINCE, DeviceProperties, read_profile

# Facts about one machine and moment, not about the model of GPU.
OF_THE_MACHINE = ("pciDeviceId", "cudaDeviceId", "driverVer", "totalGlobalMem", "smClockRateKHz", "memClockRateKHz")


@pytest.fixture(autouse=True)
def _new_enough() -> None:
    if library.load().version < SINCE:
        pytest.skip(f"cuDNN {library.load().version_text} is older than device properties")


def test_read_properties_are_this_gpu_s() -> None:
    runtime = device.cupy().cuda.runtime
    index = runtime.getDevice()
    expected = runtime.getDeviceProperties(index)
    with DeviceProperties.of_handle(resources.handle()) as found:
        profile = found.profile
        assert found.name == expected["name"].decode()
        assert found.origin == "read"
        assert found.filled == ()
    assert profile["multiProcessorCount"] == expected["multiProcessorCount"]
    assert profile["deviceVer"] == 100 * expected["major"] + 10 * expected["minor"]
    assert profile["warpSize"] == expected["warpSize"]
    assert profile["l2CacheSize"] == expected["l2CacheSize"]
    assert profile["totalGlobalMem"] == expected["totalGlobalMem"]
    assert profile["maxSharedMemoryPerBlockOptin"] == expected["sharedMemPerBlockOptin"]
    assert tuple(profile["maxGridSize"]) == tuple(expected["maxGridSize"])
    assert tuple(profile["maxBlockSize"]) == tuple(expected["maxThreadsDim"])
    if "memoryBusWidth" in profile:
        assert profile["memoryBusWidth"] == expected["memoryBusWidth"]


def test_read_properties_load_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    with DeviceProperties.of_handle(resources.handle()) as found:
        assert found.write_profile(path)
        with DeviceProperties.from_profile(path) as again:
            assert again.profile == found.profile
            assert again.filled == ()
            assert again.origin == "read"
    assert read_profile(path).cudnn == library.load().version_text
    if library.load().version // 100 == 928:
        assert set(found.profile) == set(KEYS)


def test_properties_outlive_the_handle() -> None:
    handle = resources.Handle()
    found = DeviceProperties.of_handle(handle)
    handle.close()
    count = c_int64()
    with found:
        attribute = bindings.CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION
        bindings.cudnnBackendGetAttribute(found, attribute, bindings.CUDNN_TYPE_CHAR, 0, byref(count), None)
        assert count.value > 100
    with pytest.raises(ValueError, match="closed"):
        DeviceProperties.of_handle(handle)


def test_shipped_h200_is_this_one() -> None:
    """Of the shipped profile the filled keys are checked here, too."""
    with DeviceProperties.of_handle(resources.handle()) as found:
        if found.name != "NVIDIA H200":
            pytest.skip(f"this is an {found.name}")
        with DeviceProperties.from_profile("h200") as shipped:
            here, there = (
                {k: v for k, v in one.profile.items() if k not in OF_THE_MACHINE} for one in (found, shipped)
            )
            assert here == {key: value for key, value in there.items() if key in here}


def test_info_writes_the_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.json"
    assert cli.main(["info", "--profile", str(path)]) == 0
    written: dict[str, Any] = json.loads(path.read_text())
    assert written["origin"] == "read"
    assert f"written to {path}" in capsys.readouterr().out
    assert cli.main(["info", "--profile", str(path)]) == 0
    assert "already" in capsys.readouterr().out
    path.write_text("mine")
    assert cli.main(["info", "--profile", str(path)]) == 2
    assert "left as it is" in capsys.readouterr().err
    assert path.read_text() == "mine"
