"""Loading the real cuDNN: from links, beside decoys, in part, and beside PyTorch; each in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flcuda.cudnn import library

ROOT = Path(__file__).parents[2]
PLACES = [place for place in library.search_places() if place.usable]
pytestmark = pytest.mark.skipif(not PLACES, reason="cuDNN is not installed")
COMPILER = shutil.which("cc") or shutil.which("gcc")

SHOW = """
import json
from flcuda.cudnn import library
loaded = library.load()
print(json.dumps({"path": loaded.path, "version": loaded.version, "why": loaded.why, "skipped": loaded.skipped,
                  "files": loaded.files, "mapped": library.mapped_files("libcudnn"), "foreign": loaded.foreign_files(),
                  "neighbours": library.mapped_files("libnvrtc.so") + library.mapped_files("libcublasLt.so")}))
"""


def start(code: str, **variables: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != library.PATH_VARIABLE}
    environment["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment |= {name: str(value) for name, value in variables.items()}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)


def shown(code: str = SHOW, **variables: object) -> dict[str, Any]:
    done = start(code, **variables)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def refused(code: str = SHOW, **variables: object) -> str:
    done = start(code, **variables)
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert "flcuda.errors.LibraryNotFoundError: " in done.stderr
    return done.stderr


def link(folder: Path, leave_out: tuple[str, ...] = ()) -> Path:
    """A folder of links to all files of the installed cuDNN but some."""
    folder.mkdir()
    for part, file in PLACES[0].files.items():
        if part not in leave_out:
            (folder / Path(file).name).symlink_to(os.path.realpath(file))
    return folder


def decoy(folder: Path, part: str) -> Path:
    folder.mkdir()
    out = folder / f"libcudnn_{part}.so.9"
    command = [str(COMPILER), "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{out.name}", "-o", str(out)]
    subprocess.run(command, check=True)
    return folder


def test_every_file_is_opened_from_one_folder() -> None:
    facts = shown()
    assert facts["version"] >= 90000
    assert facts["foreign"] == []
    assert {os.path.realpath(file) for file in facts["files"]} == set(facts["mapped"])
    assert len(facts["files"]) + len(facts["skipped"]) == len(PLACES[0].files)
    assert Path(facts["files"][0]).name.startswith("libcudnn_graph.so")
    assert Path(facts["files"][-1]).name.startswith("libcudnn.so")
    for file in facts["skipped"]:
        assert "engines_runtime_compiled" in file


def test_version_agrees_with_header_and_wheel() -> None:
    from flcuda import cudnn

    loaded = library.load()
    assert cudnn.cudnnGetVersion() == loaded.version
    assert PLACES[0].version.startswith(loaded.version_text)


def test_neighbours_are_there_for_the_engines() -> None:
    """NVRTC is what the run-time compiled engines open by bare name."""
    folder = Path(PLACES[0].path).parents[1]
    if not [*folder.glob("cuda_nvrtc/lib/libnvrtc.so.*"), *folder.glob("cu[0-9]*/lib/libnvrtc.so.*")]:
        pytest.skip("the NVRTC wheel is not installed beside this cuDNN")
    assert any("libnvrtc.so" in file for file in shown()["neighbours"])


@pytest.mark.skipif(COMPILER is None, reason="the decoy needs a C compiler")
@pytest.mark.parametrize("part", ["engines_tensor_ir", "engines_precompiled", "heuristic", "ops"])
def test_missing_part_with_a_decoy_of_it_elsewhere(tmp_path: Path, part: str) -> None:
    if part not in PLACES[0].files:
        pytest.skip(f"this cuDNN has no {part}")
    folder = link(tmp_path / "links", leave_out=(part,))
    elsewhere = decoy(tmp_path / "decoy", part)
    text = refused(FLCUDA_CUDNN_PATH=folder, LD_LIBRARY_PATH=elsewhere)
    assert f"libcudnn_{part}.so.9 is missing" in text
    assert str(folder) in text


@pytest.mark.skipif(COMPILER is None, reason="the decoy needs a C compiler")
def test_decoys_beside_a_complete_copy_do_nothing(tmp_path: Path) -> None:
    folder = link(tmp_path / "links")
    parts = [part for part in PLACES[0].files if part]
    paths = ":".join(str(decoy(tmp_path / part, part)) for part in parts)
    facts = shown(FLCUDA_CUDNN_PATH=folder, LD_LIBRARY_PATH=paths)
    assert facts["path"] == str(folder)
    assert facts["foreign"] == []
    assert not [file for file in facts["mapped"] if str(tmp_path) in file]


def test_shim_alone_exits_with_1(tmp_path: Path) -> None:
    folder = tmp_path / "alone"
    folder.mkdir()
    shutil.copy(os.path.realpath(PLACES[0].files[""]), folder / "libcudnn.so.9")
    text = refused("from flcuda import cudnn\nprint(cudnn.cudnnGetVersion())", FLCUDA_CUDNN_PATH=folder)
    assert "libcudnn_graph.so.9" in text
    assert "FLCUDA_CUDNN_PATH" in text


@pytest.mark.parametrize("length", [0, 10, 100, 100_000])
def test_truncated_file_is_an_exception(tmp_path: Path, length: int) -> None:
    """A download or a disk that ended early; opening such a file can kill the process by SIGBUS."""
    folder = link(tmp_path / "links", leave_out=("cnn",))
    with Path(PLACES[0].files["cnn"]).open("rb") as whole:
        (folder / "libcudnn_cnn.so.9").write_bytes(whole.read(length))
    text = refused(FLCUDA_CUDNN_PATH=folder)
    assert "libcudnn_cnn.so.9 is cut short" in text or "libcudnn_cnn.so.9 cannot be opened: " in text


def test_found_through_ld_library_path_alone(tmp_path: Path) -> None:
    folder = link(tmp_path / "modules")
    code = f"from flcuda.cudnn import library as l\nl.site_folders = lambda: []\n{SHOW}"
    facts = shown(code, LD_LIBRARY_PATH=folder)
    assert (facts["path"], facts["why"]) == (str(folder), "LD_LIBRARY_PATH")


def test_copy_that_somebody_mapped_before_is_used() -> None:
    shim = PLACES[0].files[""]
    facts = shown(f"import ctypes\nctypes.CDLL({shim!r}, ctypes.RTLD_GLOBAL)\n{SHOW}")
    assert facts["why"] == "already loaded"
    assert facts["foreign"] == []


def test_other_path_than_the_mapped_one_names_both(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for part, file in PLACES[0].files.items():
        if part in ("", "graph"):
            shutil.copy(os.path.realpath(file), other / Path(file).name)
        else:
            (other / Path(file).name).symlink_to(os.path.realpath(file))
    shim = PLACES[0].files[""]
    text = refused(f"import ctypes\nctypes.CDLL({shim!r}, ctypes.RTLD_GLOBAL)\n{SHOW}", FLCUDA_CUDNN_PATH=other)
    assert str(other) in text
    assert os.path.realpath(shim) in text


def test_importing_and_arrays_load_nothing() -> None:
    code = (
        "import numpy as np\nimport flcuda\nfrom flcuda import cudnn, device\n"
        "from flcuda.cudnn import library, resources\n"
        "device.asarray(np.ones(3)); cudnn.CUDNN_DATA_FLOAT; resources.cudnn_dtype('float16')\n"
        "assert library.mapped_files() == [] and not cudnn.is_loaded()\n"
    )
    done = start(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_loading_from_threads_at_once() -> None:
    code = (
        "from concurrent.futures import ThreadPoolExecutor\nfrom flcuda import cudnn\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    found = set(pool.map(lambda _: cudnn.cudnnGetVersion(), range(8)))\n"
        "assert len(found) == 1, found\n"
    )
    done = start(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_info_prints_facts_that_fit_80_columns() -> None:
    code = "import sys\nfrom flcuda.cli import main\nsys.exit(main(['info']))"
    done = start(code, COLUMNS=80)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    for words in ("flcuda", "cuDNN", library.load().version_text, "chosen by", "GPU"):
        assert words in done.stdout


def test_info_json_is_one_object() -> None:
    facts = shown("import sys\nfrom flcuda.cli import main\nsys.exit(main(['info', '--json']))")
    assert facts["cudnn"]["version"] == library.load().version_text
    assert facts["cudnn"]["path"] == library.load().path
    assert facts["cudnn"]["places"]


@pytest.mark.parametrize("lost", ["cupy", "cudnn", "both"])
def test_info_without_cupy_or_cudnn_is_facts(lost: str, tmp_path: Path) -> None:
    hide = ""
    variables: dict[str, object] = {}
    if lost != "cudnn":
        hide = "sys.modules['cupy'] = None\n"
    if lost != "cupy":
        variables["FLCUDA_CUDNN_PATH"] = tmp_path
    code = f"import sys\n{hide}from flcuda.cli import main\nsys.exit(main(['info'{{}}]))"
    text = start(code.format(""), **variables)
    assert (text.returncode, text.stderr) == (0, "")
    assert "Traceback" not in text.stdout
    facts = shown(code.format(", '--json'"), **variables)
    assert ("error" in facts["cudnn"]) is (lost != "cupy")
    assert ("error" in facts["cupy"]) is (lost != "cudnn")
    if lost != "cudnn":
        assert "No GPU here" in text.stdout
        assert "pip install" in facts["cupy"]["error"]


def test_shim_of_another_wheel_is_seen_before_anything_is_opened(tmp_path: Path) -> None:
    """A shim of another minor forwards every question about versions to the graph library; only the files tell."""
    folder = link(tmp_path / "links", leave_out=("",))
    other = tmp_path / "site/nvidia/cudnn/lib/libcudnn.so.9"
    other.parent.mkdir(parents=True)
    shutil.copy(os.path.realpath(PLACES[0].files[""]), other)
    record = tmp_path / "site/nvidia_cudnn_cu12-9.1.0.70.dist-info/RECORD"
    record.parent.mkdir()
    record.write_text(f"nvidia/cudnn/lib/libcudnn.so.9,sha256=x,{other.stat().st_size}\n")
    (folder / "libcudnn.so.9").symlink_to(other)
    text = refused(FLCUDA_CUDNN_PATH=folder)
    assert "9.1.0 and 9." in text
    assert f"{other} (9.1.0.70)" in text
