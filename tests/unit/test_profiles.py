"""Profiles of GPUs without a GPU or a cuDNN: names, files, everything that may be wrong with them, and writing."""

import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flcuda import cli, device
from flcuda.cudnn import bindings, library, resources
from flcuda.cudnn.device_properties import KEYS, DeviceProperties, Profile, profiles, read_profile, write_profile
from flcuda.errors import CudnnError, CudnnNotSupportedError, LibraryNotFoundError

ROOT = Path(__file__).parents[2]
GPUS = ("a100", "b200", "h100", "h200", "l4", "l40s", "rtx4090")
FILES = sorted(path.stem for path in (ROOT / "flcuda" / "cudnn" / "profiles").iterdir())
ADDED_SINCE_9_19 = {"oversizedSharedMemoryPerBlock", "memoryBusWidth"}


def h200() -> dict[str, Any]:
    return dict(read_profile("h200.cudnn-9.28").properties)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- what is shipped ------------------------------------------------------------------------------------------------


def test_names() -> None:
    assert profiles() == GPUS
    assert set(FILES) == {*GPUS, "h200.cudnn-9.19", "h200.cudnn-9.28"} - {"h200"}


@pytest.mark.parametrize("stem", FILES)
def test_shipped_file_says_where_it_comes_from(stem: str) -> None:
    profile = read_profile(stem)
    lacking = ADDED_SINCE_9_19 if profile.cudnn == "9.19.0" else set()
    assert set(profile.properties) == set(KEYS) - lacking
    if stem.startswith("h200"):
        assert profile.origin.startswith("read")
        assert "all" in profile.sources
    else:
        assert profile.origin == "constructed, not read"
        assert set(profile.sources) == set(KEYS)
    assert all(profile.sources.values())
    assert profile.name.startswith("NVIDIA ")


@pytest.mark.parametrize("stem", FILES)
def test_shipped_numbers_agree_with_each_other(stem: str) -> None:
    found = read_profile(stem).properties
    optin, most = {
        800: (163, 2048),
        890: (99, 1536),
        900: (227, 2048),
        1000: (227, 2048),
    }[found["deviceVer"]]
    assert found["maxSharedMemoryPerBlockOptin"] == optin * 1024
    assert found["maxThreadsPerSM"] == most
    assert found["maxCtasPerSM"] == (24 if most == 1536 else 32)
    # memory bandwidth in GB/s as the data sheets print it, from clock and bus width; twice the clock a wire
    bandwidth = {"a100": 2039, "b200": 7700, "h100": 3350, "h200": 4800, "l4": 300, "l40s": 864, "rtx4090": 1008}
    if "memoryBusWidth" in found:
        computed = 2 * found["memClockRateKHz"] * 1e3 * found["memoryBusWidth"] / 8 / 1e9
        assert computed == pytest.approx(bandwidth[stem.partition(".")[0]], rel=0.03)


def test_the_two_of_the_h200_differ_in_what_was_filled() -> None:
    older, newer = (read_profile(f"h200.cudnn-{version}") for version in ("9.19", "9.28"))
    added = {"oversizedSharedMemoryPerBlock": 232448, "memoryBusWidth": 6144}
    assert {**older.properties, **added} == newer.properties
    assert set(newer.sources) > ADDED_SINCE_9_19


@pytest.mark.parametrize(
    ("version", "picked"),
    [(None, "9.28.0"), (90800, "9.19.0"), (91900, "9.19.0"), (92001, "9.19.0"), (92800, "9.28.0"), (100000, "9.28.0")],
)
def test_name_picks_the_file_for_the_loaded_version(
    monkeypatch: pytest.MonkeyPatch, version: int | None, picked: str
) -> None:
    monkeypatch.setattr(library, "is_loaded", lambda: version is not None)
    monkeypatch.setattr(library, "load", lambda: SimpleNamespace(version=version))
    assert read_profile("h200").cudnn == picked
    assert read_profile("h200.cudnn-9.19").cudnn == "9.19.0"
    assert read_profile("l4").cudnn == "9.28.0"


def test_importing_and_reading_loads_nothing() -> None:
    code = (
        "import sys\n"
        "from flcuda.cudnn import device_properties, library\n"
        "assert device_properties.read_profile('l4').name == 'NVIDIA L4'\n"
        "assert not library.is_loaded()\n"
        "assert 'cupy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


# --- sources and their errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h2oo", "H200", "", "h200.cudnn-9.20", "../h200"])
def test_unknown_name_lists_the_names(name: str) -> None:
    if "/" in name:
        with pytest.raises(FileNotFoundError):
            read_profile(name)
        return
    with pytest.raises(ValueError, match="neither a file nor the name") as raised:
        read_profile(name)
    assert repr(name) in str(raised.value)
    assert ", ".join(GPUS) in str(raised.value)


def test_missing_file(tmp_path: Path) -> None:
    for source in (tmp_path / "none", tmp_path / "none.json", str(tmp_path / "none")):
        with pytest.raises(FileNotFoundError, match="none"):
            read_profile(source)


def test_path_named_like_a_gpu_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "l4").write_text(json.dumps({**h200(), "deviceName": "mine"}))
    assert read_profile("l4").name == "NVIDIA L4"
    assert read_profile(Path("l4")).name == "mine"
    (tmp_path / "mine").write_text(json.dumps({**h200(), "deviceName": "mine too"}))
    assert read_profile("mine").name == "mine too"


@pytest.mark.parametrize("source", [None, 7, b"h200", ["h200"]])
def test_other_types_are_refused(source: Any) -> None:
    with pytest.raises(TypeError, match=f"a dict, got {type(source).__name__}"):
        read_profile(source)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "no JSON, or cut short"),
        (json.dumps(h200()).encode()[:300], "no JSON, or cut short"),
        (b"\xff\xfe\x00", "no JSON, or cut short"),
        (b'{"deviceVer": NaN}', "NaN is no JSON"),
        (b"[" * 100_000, "no JSON, or cut short"),
        (b"[1, 2]", "a JSON object, found list"),
        (b'"h200"', "a JSON object, found str"),
        (b"null", "a JSON object, found NoneType"),
        (b"{}", "none of cuDNN's keys"),
        (b'{"properties": {}}', "none of cuDNN's keys"),
        (b'{"problem": "forward n1"}', "none of cuDNN's keys"),
    ],
)
def test_file_that_is_no_profile(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=says) as raised:
        read_profile(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("warpSize", "32", TypeError),
        ("warpSize", 32.0, TypeError),
        ("warpSize", True, TypeError),
        ("warpSize", None, TypeError),
        ("warpSize", -1, ValueError),
        ("warpSize", 2**31, ValueError),
        ("totalGlobalMem", 2**64, ValueError),
        ("totalGlobalMem", -1, ValueError),
        ("isTccDriver", 2, ValueError),
        ("maxGridSize", 65535, TypeError),
        ("maxGridSize", "xyz", TypeError),
        ("maxGridSize", [1, 2], ValueError),
        ("maxGridSize", [1, 2, 3.5], TypeError),
        ("maxBlockSize", [1, 2, -3], ValueError),
        ("deviceName", 200, TypeError),
        ("deviceName", "", ValueError),
        ("aNewerKey", {1, 2}, TypeError),
        ("aNewerKey", float("nan"), TypeError),
    ],
)
def test_value_of_the_wrong_type_is_named(tmp_path: Path, key: str, value: Any, kind: type[Exception]) -> None:
    properties = {**h200(), key: value}
    with pytest.raises(kind, match=f"profile: {key}: "):
        read_profile(properties)
    with pytest.raises(kind, match=f"profile: {key}: "):
        read_profile({"properties": properties})
    if key == "aNewerKey":
        return
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(properties))
    with pytest.raises(kind, match=f"bad.json: {key}: "):
        read_profile(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("properties", [1]), ("cudnn", 9.28), ("origin", None), ("sources", "me"), ("sources", {"a": 1})],
)
def test_frame_of_the_wrong_type_is_named(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"profile: {name}: expected"):
        read_profile({"properties": h200(), name: value})


def test_bare_properties_and_unknown_keys_are_taken() -> None:
    properties = {**h200(), "aNewerKey": [1, {"a": None}]}
    profile = read_profile(properties)
    assert profile == Profile(properties)
    assert read_profile(json.loads(profile.to_json())) == profile


def test_reading_needs_no_key_in_particular() -> None:
    profile = read_profile({"deviceVer": 900})
    assert profile.properties == {"deviceVer": 900}
    assert profile.name == "a GPU of deviceVer 900"


# --- writing --------------------------------------------------------------------------------------------------------


def test_written_profile_reads_back(tmp_path: Path) -> None:
    profile = Profile({**h200(), "deviceName": "Jürgens GPU"}, "9.28.0", "read", {"all": "a test"})
    path = tmp_path / "mine.json"
    assert write_profile(profile, path) is True
    assert read_profile(path) == profile
    assert names(tmp_path) == ["mine.json"]


def test_same_profile_is_left_and_another_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    profile = Profile({**h200(), "maxGridSize": (1, 2, 3)}, "9.28.0", "read")
    write_profile(profile, path)
    before = path.read_bytes()
    assert write_profile(Profile(profile.properties, "9.29.0"), str(path)) is False
    with pytest.raises(FileExistsError, match="left as it is"):
        write_profile(Profile({**profile.properties, "warpSize": 64}), path)
    assert path.read_bytes() == before
    assert names(tmp_path) == ["mine.json"]


@pytest.mark.parametrize("content", [b"", b"important", b"[]", b"\xff"])
def test_other_file_is_not_overwritten(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(FileExistsError, match="notes"):
        write_profile(read_profile("l4"), path)
    assert path.read_bytes() == content


def test_folder_or_dangling_link_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("folder", "link"):
        with pytest.raises(FileExistsError, match=name):
            write_profile(read_profile("l4"), tmp_path / name)
    with pytest.raises(FileNotFoundError):
        write_profile(read_profile("l4"), tmp_path / "none" / "l4.json")
    assert names(tmp_path) == ["folder", "link"]


def test_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "mine.json"
    assert write_profile(read_profile("l4"), path) is True
    assert write_profile(read_profile("l4"), path) is False
    with pytest.raises(FileExistsError, match="left as it is"):
        write_profile(read_profile("a100"), path)
    assert read_profile(path) == read_profile("l4")
    assert names(tmp_path) == ["mine.json"]


def test_of_many_writers_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    outcomes: list[Any] = []

    def write(number: int) -> None:
        try:
            outcomes.append(write_profile(Profile({**h200(), "pciDeviceId": number}), path))
        except FileExistsError:
            outcomes.append(None)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, outcomes)) == ["None"] * 7 + ["True"]
    assert read_profile(path).properties["pciDeviceId"] in range(8)
    assert names(tmp_path) == ["mine.json"]


# --- filling and refusals, with a cuDNN that is played --------------------------------------------------------------


class Played:
    """Plays cuDNN's part: reads some keys and refuses properties where one of them is missing or of a wrong type."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reads: Collection[str]) -> None:
        self.reads = reads
        self.asked = 0
        monkeypatch.setattr(library, "load", lambda: SimpleNamespace(version=93000, version_text="9.30.0", path="/"))
        monkeypatch.setattr(library, "is_loaded", lambda: True)
        monkeypatch.setattr(DeviceProperties, "_of_json", self.take)

    def take(self, properties: dict[str, Any]) -> Any:
        self.asked += 1
        if any(key not in properties or isinstance(properties[key], dict) for key in self.reads):
            raise CudnnError("cudnnBackendFinalize", 2000)
        return SimpleNamespace(close=lambda: None, profile=properties, _profile=Profile(properties, "9.30.0"))


OLDER = tuple(key for key in KEYS if key not in ADDED_SINCE_9_19)


@pytest.mark.parametrize(
    ("reads", "filled"),
    [
        (OLDER, ()),
        (KEYS, ("oversizedSharedMemoryPerBlock", "memoryBusWidth")),
        ((*OLDER, "memoryBusWidth"), ("memoryBusWidth",)),
    ],
)
def test_only_what_is_wanted_is_filled(
    monkeypatch: pytest.MonkeyPatch, reads: tuple[str, ...], filled: tuple[str, ...]
) -> None:
    Played(monkeypatch, reads)
    found = DeviceProperties.from_profile("h200.cudnn-9.19")
    assert found._filled == filled
    assert found.profile == {key: value for key, value in h200().items() if key in OLDER or key in filled}
    assert found._profile.origin == ("read, with keys filled" if filled else "read")
    for key in filled:
        assert found._profile.sources[key] == "filled, not read, for cuDNN 9.30.0"


def test_nothing_is_tried_for_a_complete_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, KEYS)
    assert DeviceProperties.from_profile("h200")._filled == ()
    assert played.asked == 1


def test_key_that_cannot_be_filled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Played(monkeypatch, KEYS)
    properties = h200()
    for key in ("memoryBusWidth", "warpSize", "maxGridSize", "oversizedSharedMemoryPerBlock"):
        del properties[key]
    properties["deviceName"] = "NVIDIA Unheard-of"
    with pytest.raises(ValueError, match="lacks") as raised:
        DeviceProperties.from_profile(properties)
    assert "cuDNN 9.30.0 wants maxGridSize, warpSize, memoryBusWidth, which" in str(raised.value)
    assert "NVIDIA Unheard-of" in str(raised.value)


def test_key_that_is_not_wanted_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    Played(monkeypatch, [key for key in KEYS if key not in ("deviceName", "warpSize")])
    properties = h200()
    del properties["deviceName"], properties["warpSize"]
    found = DeviceProperties.from_profile(properties)
    assert found._filled == ()
    assert found.profile == properties


def test_key_that_is_unknown_here_says_whose_profile_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    Played(monkeypatch, [*KEYS, "aNewerKey"])
    with pytest.raises(CudnnError) as raised:
        DeviceProperties.from_profile("l4")
    assert raised.value.__notes__ == [
        "cuDNN 9.30.0 does not take the profile of NVIDIA L4 (deviceVer 890), which is of cuDNN 9.28.0"
    ]


def test_error_of_another_kind_is_not_taken_for_a_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, KEYS)

    def lost(properties: dict[str, Any]) -> Any:
        raise CudnnError("cudnnBackendFinalize", 1002)

    played.take = lost  # type: ignore[method-assign]
    monkeypatch.setattr(DeviceProperties, "_of_json", lost)
    with pytest.raises(CudnnError, match="1002"):
        DeviceProperties.from_profile("h200.cudnn-9.19")


def test_bad_source_is_refused_before_cudnn_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise LibraryNotFoundError("none")

    monkeypatch.setattr(library, "load", load)
    monkeypatch.setattr(library, "is_loaded", lambda: False)
    with pytest.raises(ValueError, match="name of a shipped profile"):
        DeviceProperties.from_profile("h2oo")
    with pytest.raises(LibraryNotFoundError):
        DeviceProperties.from_profile("h200")


def test_older_cudnn_is_told_which_version_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = SimpleNamespace(version=90701, version_text="9.7.1", path="/opt/cudnn")
    monkeypatch.setattr(library, "load", lambda: loaded)
    for source in ("h200", h200()):
        with pytest.raises(CudnnNotSupportedError, match=r"came with cuDNN 9\.8\.0; this is cuDNN 9\.7\.1 of /opt"):
            DeviceProperties.from_profile(source)


def test_without_the_driver_s_library(monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed: list[Any] = []

    def refuse(pointer: Any) -> None:
        raise CudnnError("cudnnBackendFinalize", 1008, "ptrDesc->finalize()")

    monkeypatch.setattr(library, "load", lambda: SimpleNamespace(version=92800, version_text="9.28.0", path="/"))
    monkeypatch.setattr(bindings, "cudnnBackendCreateDescriptor", lambda kind, pointer: None)
    monkeypatch.setattr(bindings, "cudnnBackendSetAttribute", lambda *arguments: None)
    monkeypatch.setattr(bindings, "cudnnBackendFinalize", refuse)
    monkeypatch.setattr(bindings, "cudnnBackendDestroyDescriptor", destroyed.append)
    monkeypatch.setattr(library, "mapped_files", lambda prefix: [])
    with pytest.raises(LibraryNotFoundError, match=r"libcuda\.so\.1 can be loaded.*no GPU is needed"):
        DeviceProperties.from_profile("h200")
    assert len(destroyed) == 1
    # Where it is mapped the status means something else.
    monkeypatch.setattr(library, "mapped_files", lambda prefix: ["/usr/lib/libcuda.so.535"])
    with pytest.raises(CudnnError, match="1008"):
        DeviceProperties.from_profile("h200")
    assert len(destroyed) == 2


def test_text_goes_to_cudnn_with_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def take(self: Any, attribute: int, kind: int, count: int, elements: Any) -> None:
        seen.append((attribute, kind, count, ctypes.string_at(elements, count)))

    monkeypatch.setattr(DeviceProperties, "__init__", take)
    DeviceProperties._of_json({"deviceName": "Jürgen"})
    assert seen == [(2702, 24, 29, b'{"deviceName": "J\\u00fcrgen"}')]


# --- the command ----------------------------------------------------------------------------------------------------


def test_info_lists_the_shipped_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    shipped = json.loads(capsys.readouterr().out)["profiles"]["shipped"]
    assert [profile["name"] for profile in shipped] == list(GPUS)
    assert {profile["name"] for profile in shipped if profile["origin"] == "constructed, not read"} == {*GPUS} - {
        "h200"
    }
    assert all(profile["gpu"].startswith("NVIDIA") and profile["cudnn"] for profile in shipped)
    assert cli.main(["info"]) == 0
    assert "l40s" in capsys.readouterr().out


@pytest.mark.skipif(device.cuda_available(), reason="there is a GPU")
def test_info_without_a_gpu_writes_no_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.json"
    assert cli.main(["info", "--profile", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("flcuda: error: device 'cuda' was asked for, and there is no CUDA here: ")
    assert err.endswith(f"Shipped are those of: {', '.join(GPUS)}\n")
    assert names(tmp_path) == []


class Here:
    """Plays a GPU that is here, by a shipped profile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.profile = read_profile(name)
        self.name = self.profile.name
        self.closed = 0
        monkeypatch.setattr(device, "resolve", lambda device: None)
        monkeypatch.setattr(resources, "handle", lambda: None)
        monkeypatch.setattr(DeviceProperties, "of_handle", lambda handle: self)

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *error: object) -> None:
        self.closed += 1

    def write_profile(self, path: str) -> bool:
        return write_profile(self.profile, path)


def test_info_writes_once_and_never_over_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "here.json"
    Here(monkeypatch, "l4")
    assert cli.main(["info", "--profile", str(path)]) == 0
    assert capsys.readouterr().out == f"The profile of NVIDIA L4 is written to {path}\n"
    assert cli.main(["info", "--profile", str(path)]) == 0
    assert capsys.readouterr().out == f"The profile of NVIDIA L4 is already in {path}\n"
    here = Here(monkeypatch, "a100")
    assert cli.main(["info", "--profile", str(path)]) == 2
    assert capsys.readouterr().err == f"flcuda: error: {path} exists and is not this profile; it is left as it is\n"
    assert here.closed == 1
    assert read_profile(path) == read_profile("l4")
    assert cli.main(["info", "--profile", str(tmp_path / "none" / "here.json")]) == 2
    assert "none" in capsys.readouterr().err


def test_info_takes_one_of_json_and_profile(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["info", "--json", "--profile", "x"])
    assert stopped.value.code == 2
    assert "not allowed with" in capsys.readouterr().err
