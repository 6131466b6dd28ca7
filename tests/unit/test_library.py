"""How cuDNN is found, loaded and verified: on small stub libraries, each case in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flcuda.cudnn import library

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="stub libraries need a C compiler")

SUBLIBRARIES = ("graph", "ops", "cnn", "adv", "heuristic", "engines_precompiled", "engines_runtime_compiled")

# Like the real shim: opens its parts by bare soname, ends the process when one is missing, names them in its constants.
SHIM = r"""
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
const char *parts[] = {"libcudnn_graph.so", "libcudnn_ops.so", "libcudnn_cnn.so", "libcudnn_adv.so"};
static void *part(const char *name) {
    void *opened = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
    if (!opened) abort();
    return opened;
}
static int number(const char *file, const char *name) {
    int (*function)(void) = (int (*)(void))dlsym(part(file), name);
    return function();
}
size_t cudnnGetVersion(void) { return number("libcudnn_graph.so.9", "graph_version"); }
size_t cudnnGetCudartVersion(void) { return 12090; }
int cudnnGraphVersionCheck(void) { return 0; }
int cudnnOpsVersionCheck(void) {
    int same = number("libcudnn_ops.so.9", "ops_version") == number("libcudnn_graph.so.9", "graph_version");
    return same ? 0 : 1002;
}
int cudnnCnnVersionCheck(void) { part("libcudnn_cnn.so.9"); return 0; }
int cudnnAdvVersionCheck(void) { part("libcudnn_adv.so.9"); return 0; }
void cudnnGetLastErrorString(char *text, size_t size) { strncpy(text, "the stub says no", size); }
const char *cudnnGetErrorString(int status) { return status == 1002 ? "CUDNN_STATUS_STUB" : "CUDNN_UNKNOWN_STATUS"; }
int cudnnCreate(void **handle) { return 1002; }
int cudnnAddTensor(void) { return 3009; }
"""
GRAPH = r"""
const char *parts[] = {"libcudnn_heuristic.so", "libcudnn_engines_precompiled.so",
                       "libcudnn_engines_runtime_compiled.so", EXTRA};
int graph_version(void) { return VERSION; }
"""
PART = "int NAME(void) { return VERSION; }\n"
BROKEN = "int no_such_thing(void);\nint NAME(void) { return no_such_thing(); }\n"


class Stubs:
    """Compiles stub libraries, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, source: str, *options: str) -> Path:
        out = self.folder / f"{abs(hash((source, options)))}.so"
        if not out.exists():
            code = out.with_suffix(".c")
            code.write_text(source)
            command = [str(COMPILER), "-shared", "-fPIC", "-O1", *options, "-o", str(out), str(code), "-ldl"]
            subprocess.run(command, check=True)
        return out

    def part(self, name: str, version: int = 92800, extra: str = "0", source: str = PART) -> Path:
        soname = f"-Wl,-soname,libcudnn_{name}.so.9"
        if name == "graph":
            return self.file(GRAPH, soname, f"-DVERSION={version}", f"-DEXTRA={extra}")
        return self.file(source, soname, f"-DVERSION={version}", f"-DNAME={name}_version")

    def shim(self) -> Path:
        return self.file(SHIM, "-Wl,-soname,libcudnn.so.9")

    def install(self, folder: Path, version: int = 92800, leave_out: tuple[str, ...] = (), extra: str = "0") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name in SUBLIBRARIES:
            if name not in leave_out:
                shutil.copy(self.part(name, version, extra), folder / f"libcudnn_{name}.so.9")
        shutil.copy(self.shim(), folder / "libcudnn.so.9")
        return folder


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Stubs:
    return Stubs(tmp_path_factory.mktemp("stubs"))


# The machine's own wheels and system folders are hidden, so that a test sees only what it made.
PREAMBLE = """
import ctypes, json, os, sys
from pathlib import Path
from flcuda.cudnn import library
from flcuda.errors import *
library.site_folders = lambda: [Path(folder) for folder in json.loads(os.environ["SITES"])]
library._system_places = lambda: []
library.cupy_cuda_major = lambda: int(os.environ.get("CUPY_MAJOR", "0"))
def show():
    loaded = library.load()
    facts = {name: getattr(loaded, name) for name in ("path", "version", "why", "graph_only")}
    print(json.dumps(facts | {"mapped": library.mapped_files()}))
"""


def start(code: str, *, sites: tuple[Path, ...] = (), **variables: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("CUDA_PATH", "CUDA_HOME")}
    environment.pop(library.PATH_VARIABLE, None)
    environment.pop("LD_LIBRARY_PATH", None)
    environment |= {
        "SITES": json.dumps([str(site) for site in sites]),
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    environment |= {name: str(value) for name, value in variables.items()}
    command = [sys.executable, "-c", PREAMBLE + code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def loaded(code: str = "show()", **options: object) -> dict[str, object]:
    done = start(code, **options)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stderr
    facts: dict[str, object] = json.loads(done.stdout)
    return facts


def refused(code: str = "show()", **options: object) -> str:
    """The text of the LibraryNotFoundError with which a process ends: exit status 1, never an abort's 134."""
    done = start(code, **options)  # type: ignore[arg-type]
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert "flcuda.errors.LibraryNotFoundError: " in done.stderr
    return done.stderr.split("flcuda.errors.LibraryNotFoundError: ")[1]


def folders(facts: dict[str, object]) -> set[str]:
    return {os.path.dirname(path) for path in facts["mapped"]}  # type: ignore[attr-defined]  # noqa: PTH120


# --- one copy only --------------------------------------------------------------------------------------------------


def test_missing_engine_is_ours_to_report_not_taken_from_elsewhere(stubs: Stubs, tmp_path: Path) -> None:
    chosen = stubs.install(tmp_path / "chosen", leave_out=("engines_precompiled",))
    decoy = tmp_path / "decoy"
    decoy.mkdir()
    shutil.copy(stubs.part("engines_precompiled", 92200), decoy / "libcudnn_engines_precompiled.so.9")
    text = refused(f"library.load({str(chosen)!r})", LD_LIBRARY_PATH=decoy)
    assert "libcudnn_engines_precompiled.so.9 is missing" in text
    assert str(chosen) in text


def test_engine_that_only_a_newer_graph_library_names_is_needed(stubs: Stubs, tmp_path: Path) -> None:
    folder = stubs.install(tmp_path / "new", extra='"libcudnn_engines_tensor_ir.so"')
    assert "libcudnn_engines_tensor_ir.so.9 is missing" in refused(FLCUDA_CUDNN_PATH=folder)


@pytest.mark.parametrize("how", ["argument", "FLCUDA_CUDNN_PATH"])
def test_given_path_beats_everything(stubs: Stubs, tmp_path: Path, how: str) -> None:
    a = stubs.install(tmp_path / "a", 92100)
    b = stubs.install(tmp_path / "b", 92200)
    site = tmp_path / "site"
    stubs.install(site / "nvidia/cudnn/lib", 92300)
    options = {"sites": (site,), "LD_LIBRARY_PATH": b, "CUDA_PATH": b}
    if how == "argument":
        facts = loaded(f"library.load({str(a)!r}); show()", **options)
    else:
        facts = loaded(FLCUDA_CUDNN_PATH=a, **options)
    assert facts["version"] == 92100
    assert facts["why"] == how
    assert folders(facts) == {str(a)}


def test_argument_beats_variable(stubs: Stubs, tmp_path: Path) -> None:
    a = stubs.install(tmp_path / "a", 92100)
    b = stubs.install(tmp_path / "b", 92200)
    assert loaded(f"library.load({str(a)!r}); show()", FLCUDA_CUDNN_PATH=b)["version"] == 92100


@pytest.mark.parametrize("inside", ["lib", "lib64"])
def test_given_path_may_be_a_root_or_the_shim_itself(stubs: Stubs, tmp_path: Path, inside: str) -> None:
    folder = stubs.install(tmp_path / "root" / inside)
    assert loaded(FLCUDA_CUDNN_PATH=tmp_path / "root")["path"] == str(folder)
    assert loaded(FLCUDA_CUDNN_PATH=folder / "libcudnn.so.9")["path"] == str(folder)


def test_given_path_that_is_not_there_is_an_error(stubs: Stubs, tmp_path: Path) -> None:
    site = tmp_path / "site"
    stubs.install(site / "nvidia/cudnn/lib")
    text = refused(FLCUDA_CUDNN_PATH=tmp_path / "nowhere", sites=(site,))
    assert "no such folder" in text
    assert str(tmp_path / "nowhere") in text


def test_sub_libraries_come_by_path_before_an_older_system_copy(stubs: Stubs, tmp_path: Path) -> None:
    site = tmp_path / "site"
    wheel = stubs.install(site / "nvidia/cudnn/lib", 92800)
    old = tmp_path / "old"
    old.mkdir()
    for name in SUBLIBRARIES:
        shutil.copy(stubs.part(name, 90100), old / f"libcudnn_{name}.so.9")
    facts = loaded(sites=(site,), LD_LIBRARY_PATH=old)
    assert facts["version"] == 92800
    assert folders(facts) == {str(wheel)}
    assert len(facts["mapped"]) == len(SUBLIBRARIES) + 1  # type: ignore[arg-type]


def test_foreign_file_mapped_before_is_named_with_both_versions(stubs: Stubs, tmp_path: Path) -> None:
    folder = stubs.install(tmp_path / "own")
    foreign = tmp_path / "foreign" / "libcudnn_ops.so.9.22.0"
    foreign.parent.mkdir()
    shutil.copy(stubs.part("ops", 92200), foreign)
    text = refused(f"ctypes.CDLL({str(foreign)!r}); library.load({str(folder)!r})")
    assert str(foreign) in text
    assert "cuDNN 9.22.0" in text
    assert str(folder) in text


# --- the abort trap -------------------------------------------------------------------------------------------------


def test_shim_alone_raises_and_never_aborts(stubs: Stubs, tmp_path: Path) -> None:
    folder = tmp_path / "alone"
    folder.mkdir()
    shim = Path(shutil.copy(stubs.shim(), folder / "libcudnn.so.9"))
    trap = start(f"ctypes.CDLL({str(shim)!r}).cudnnGetVersion()")
    assert trap.returncode < 0, "the stub no longer has the trap that this test is about"
    for how in ({"FLCUDA_CUDNN_PATH": folder}, {"LD_LIBRARY_PATH": folder}):
        text = refused("from flcuda import cudnn; cudnn.cudnnGetVersion()", **how)
        assert "libcudnn_graph.so.9, libcudnn_ops.so.9, libcudnn_cnn.so.9, libcudnn_adv.so.9 are missing" in text
        assert f"{next(iter(how))}: {folder}" in text
    assert "pip install nvidia-cudnn-cu12" in text


def test_half_installed_wheel_is_passed_over_for_a_complete_copy(stubs: Stubs, tmp_path: Path) -> None:
    half, whole = tmp_path / "half", tmp_path / "whole"
    stubs.install(half / "nvidia/cudnn/lib", 92100, leave_out=("cnn",))
    stubs.install(whole / "nvidia/cudnn/lib", 92200)
    assert loaded(sites=(half, whole))["version"] == 92200


def test_nothing_found_lists_every_step_and_the_install_command(tmp_path: Path) -> None:
    text = refused(CUDA_PATH=tmp_path, CUPY_MAJOR=13)
    assert "pip install nvidia-cudnn-cu13" in text
    steps = ("argument", "FLCUDA_CUDNN_PATH", "already loaded", "wheel", f"CUDA_PATH: {tmp_path}", "LD_LIBRARY_PATH")
    at = [text.index(f"\n  {step}") for step in steps]
    assert at == sorted(at)


def test_wheel_without_the_shim_is_shown(stubs: Stubs, tmp_path: Path) -> None:
    folder = stubs.install(tmp_path / "nvidia/cudnn/lib")
    (folder / "libcudnn.so.9").unlink()
    text = refused(sites=(tmp_path,))
    assert f"wheel: {folder}: libcudnn_adv.so.9, libcudnn_cnn.so.9" in text
    assert "without libcudnn.so.9" in text


def test_engine_without_its_driver_is_passed_over_and_said(stubs: Stubs, tmp_path: Path) -> None:
    """The run-time compiled engine needs libcuda.so.1, which a machine without a driver has not."""
    folder = stubs.install(tmp_path / "cudnn")
    driver = tmp_path / "libdriver.so"
    shutil.copy(stubs.file("int driver;", "-Wl,-soname,libdriver.so.1"), driver)
    engine = stubs.file(PART, "-DNAME=engine", "-DVERSION=1", "-Wl,--no-as-needed", f"-L{tmp_path}", "-ldriver")
    shutil.copy(engine, folder / "libcudnn_engines_runtime_compiled.so.9")
    code = "print(json.dumps(library.load().skipped))"
    skipped = loaded(code, FLCUDA_CUDNN_PATH=folder)
    assert list(skipped) == [str(folder / "libcudnn_engines_runtime_compiled.so.9")]
    assert "libdriver.so.1" in str(skipped)
    shutil.copy(engine, folder / "libcudnn_heuristic.so.9")
    assert "libcudnn_heuristic.so.9 cannot be opened: libdriver.so.1" in refused(code, FLCUDA_CUDNN_PATH=folder)


# --- mixed and unfit copies -----------------------------------------------------------------------------------------


def test_two_minors_in_one_folder_are_seen_in_the_names(stubs: Stubs, tmp_path: Path) -> None:
    folder = stubs.install(tmp_path / "mixed")
    for name, minor in (("graph", "9.28.0"), ("ops", "9.22.0")):
        file = folder / f"libcudnn_{name}.so.9"
        file.rename(folder / f"libcudnn_{name}.so.{minor}")
        file.symlink_to(f"libcudnn_{name}.so.{minor}")
    text = refused(FLCUDA_CUDNN_PATH=folder)
    assert "9.22.0 and 9.28.0 are mixed" in text
    assert str(folder / "libcudnn_ops.so.9.22.0") in text


def test_version_check_that_fails_names_the_file(stubs: Stubs, tmp_path: Path) -> None:
    folder = stubs.install(tmp_path / "mixed")
    shutil.copy(stubs.part("ops", 92200), folder / "libcudnn_ops.so.9")
    text = refused(FLCUDA_CUDNN_PATH=folder)
    assert f"{folder / 'libcudnn_ops.so.9'} is of another version" in text
    assert "1002" in text


def test_undefined_symbol_of_another_minor_is_an_exception(stubs: Stubs, tmp_path: Path) -> None:
    folder = stubs.install(tmp_path / "mixed")
    shutil.copy(stubs.part("cnn", source=BROKEN), folder / "libcudnn_cnn.so.9")
    text = refused(FLCUDA_CUDNN_PATH=folder)
    assert "undefined symbol: no_such_thing" in text
    assert "different cuDNN versions are mixed" in text


def test_old_version_is_named_with_the_one_needed(stubs: Stubs, tmp_path: Path) -> None:
    folder = stubs.install(tmp_path / "old", version=8003)
    text = refused(FLCUDA_CUDNN_PATH=folder)
    assert "cuDNN 8.0.3 (8003)" in text
    assert "9.0.0 or newer" in text
    assert str(folder / "libcudnn.so.9") in text


def test_cudnn_8_by_its_file_name(stubs: Stubs, tmp_path: Path) -> None:
    folder = tmp_path / "eight"
    folder.mkdir()
    shutil.copy(stubs.shim(), folder / "libcudnn.so.8")
    assert "cuDNN 8; flcuda needs cuDNN 9" in refused(FLCUDA_CUDNN_PATH=folder)


# --- where it is found ----------------------------------------------------------------------------------------------


def test_known_only_through_ld_library_path(stubs: Stubs, tmp_path: Path) -> None:
    folder = stubs.install(tmp_path / "modules/cudnn/9/lib")
    facts = loaded(LD_LIBRARY_PATH=f"{tmp_path}:{folder}")
    assert facts["path"] == str(folder)
    assert facts["why"] == "LD_LIBRARY_PATH"


@pytest.mark.parametrize(
    ("variable", "inside"), [("CUDA_PATH", "lib64"), ("CUDA_HOME", "lib"), ("CUDA_PATH", "targets/x86_64-linux/lib")]
)
def test_below_the_cuda_path(stubs: Stubs, tmp_path: Path, variable: str, inside: str) -> None:
    folder = stubs.install(tmp_path / "cuda" / inside)
    assert loaded(**{variable: tmp_path / "cuda"})["path"] == str(folder)


def test_order_of_wheel_cuda_path_and_ld_library_path(stubs: Stubs, tmp_path: Path) -> None:
    wheel, cuda, ld = tmp_path / "site", tmp_path / "cuda", tmp_path / "ld"
    stubs.install(wheel / "nvidia/cudnn/lib", 90100)
    stubs.install(cuda / "lib64", 90200)
    stubs.install(ld, 90300)
    assert loaded(sites=(wheel,), CUDA_PATH=cuda, LD_LIBRARY_PATH=ld)["version"] == 90100
    assert loaded(CUDA_PATH=cuda, LD_LIBRARY_PATH=ld)["version"] == 90200


@pytest.mark.parametrize("inside", ["nvidia/cudnn/lib", "nvidia/cu13/lib"])
def test_any_site_folder_and_both_cuda_layouts(stubs: Stubs, tmp_path: Path, inside: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "nvidia/cu13/lib").mkdir(parents=True)
    (first / "nvidia/cudnn/lib").mkdir(parents=True)
    folder = stubs.install(second / inside)
    assert loaded(sites=(first, second))["path"] == str(folder)


def record(folder: Path, wheel: str) -> None:
    """Writes the RECORD of a wheel that installed a folder's files."""
    info = folder.parents[2] / f"{wheel}.dist-info"
    info.mkdir()
    lines = [f"nvidia/cudnn/lib/{file.name},sha256=x,{file.stat().st_size}" for file in folder.iterdir()]
    (info / "RECORD").write_text("\n".join(lines))


@pytest.mark.parametrize(("major", "version"), [(12, 90100), (13, 90200), (0, 90100)])
def test_wheel_of_the_cuda_major_of_cupy(stubs: Stubs, tmp_path: Path, major: int, version: int) -> None:
    sites = tmp_path / "twelve", tmp_path / "thirteen"
    for site, number, wheel in zip(
        sites, (90100, 90200), ("nvidia_cudnn_cu12-9.1.0.70", "nvidia_cudnn_cu13-9.2.0.1"), strict=True
    ):
        record(stubs.install(site / "nvidia/cudnn/lib", number), wheel)
    assert loaded(sites=sites, CUPY_MAJOR=major)["version"] == version


def test_two_cuda_runtimes_do_not_matter(stubs: Stubs, tmp_path: Path) -> None:
    folder = stubs.install(tmp_path / "cudnn")
    for major in (12, 13):
        shutil.copy(stubs.file("int dummy;", f"-Wl,-soname,libcudart.so.{major}"), tmp_path / f"libcudart.so.{major}")
    opened = "".join(f"ctypes.CDLL({str(tmp_path / f'libcudart.so.{major}')!r}, 256)\n" for major in (13, 12))
    assert loaded(f"{opened}show()", FLCUDA_CUDNN_PATH=folder)["version"] == 92800


def test_wheels_that_overwrote_each_other_in_part(stubs: Stubs, tmp_path: Path) -> None:
    folder = stubs.install(tmp_path / "site/nvidia/cudnn/lib")
    record(folder, "nvidia_cudnn_cu12-9.28.0.42")
    for name in ("ops", "cnn"):
        with (folder / f"libcudnn_{name}.so.9").open("ab") as file:
            file.write(b"another build")
    record(folder, "nvidia_cudnn_cu13-9.24.0.43")
    with (folder / "libcudnn_cnn.so.9").open("r+b") as file:
        file.truncate(stubs.part("cnn").stat().st_size)
    text = refused(sites=(tmp_path / "site",))
    assert "several wheels are mixed" in text
    assert "libcudnn_ops.so.9 is of nvidia_cudnn_cu13 9.24.0.43" in text


def test_copy_that_is_already_mapped_is_used(stubs: Stubs, tmp_path: Path) -> None:
    theirs = stubs.install(tmp_path / "theirs", 92100)
    site = tmp_path / "site"
    stubs.install(site / "nvidia/cudnn/lib", 92200)
    facts = loaded(f"ctypes.CDLL({str(theirs / 'libcudnn.so.9')!r}, 256)\nshow()", sites=(site,))
    assert facts["why"] == "already loaded"
    assert facts["version"] == 92100
    assert folders(facts) == {str(theirs)}


def test_given_path_that_differs_from_the_mapped_one_names_both(stubs: Stubs, tmp_path: Path) -> None:
    theirs = stubs.install(tmp_path / "theirs", 92100)
    ours = stubs.install(tmp_path / "ours", 92200)
    opened = f"ctypes.CDLL({str(theirs / 'libcudnn.so.9')!r}, 256)\n"
    for text in (
        refused(f"{opened}library.load({str(ours)!r})"),
        refused(f"{opened}show()", FLCUDA_CUDNN_PATH=ours),
        refused(f"library.load({str(theirs)!r})\nlibrary.load({str(ours)!r})"),
    ):
        assert str(theirs) in text
        assert str(ours) in text


def test_given_path_that_is_the_mapped_one_is_fine(stubs: Stubs, tmp_path: Path) -> None:
    folder = stubs.install(tmp_path / "real")
    link = tmp_path / "link"
    link.mkdir()
    for file in folder.iterdir():
        (link / file.name).symlink_to(file)
    opened = f"ctypes.CDLL({str(folder / 'libcudnn.so.9')!r}, 256)\n"
    assert loaded(f"{opened}show()", FLCUDA_CUDNN_PATH=link)["version"] == 92800


def test_older_major_mapped_by_somebody_else_is_left_alone(stubs: Stubs, tmp_path: Path) -> None:
    folder = stubs.install(tmp_path / "nine")
    eight = tmp_path / "eight" / "libcudnn.so.8"
    eight.parent.mkdir()
    shutil.copy(stubs.file("int eight;", "-Wl,-soname,libcudnn.so.8"), eight)
    assert loaded(f"ctypes.CDLL({str(eight)!r}, 256)\nshow()", FLCUDA_CUDNN_PATH=folder)["version"] == 92800


def test_jit_wheel_is_recognised_and_comes_last(stubs: Stubs, tmp_path: Path) -> None:
    jit, full = tmp_path / "jit", tmp_path / "full"
    left_out = ("ops", "cnn", "adv", "heuristic", "engines_precompiled")
    folder = stubs.install(jit / "nvidia/cudnn_jit/lib", 92700, leave_out=left_out)
    facts = loaded(sites=(jit,))
    assert facts["graph_only"] is True
    assert facts["path"] == str(folder)
    code = """
@library.bind(ctypes.c_int, status=True)
def cudnnAddTensor(): ...
try:
    cudnnAddTensor()
except CudnnNotSupportedError as error:
    print(json.dumps({"text": str(error)}))
"""
    text = str(loaded(code, sites=(jit,))["text"])
    assert "nvidia-cudnn-jit copy, which has no legacy API; pip install nvidia-cudnn-cu12 has it" in text
    stubs.install(full / "nvidia/cudnn/lib", 92800)
    assert loaded(sites=(jit, full))["graph_only"] is False


# --- after loading --------------------------------------------------------------------------------------------------


def test_load_is_idempotent_and_safe_from_threads(stubs: Stubs, tmp_path: Path) -> None:
    folder = stubs.install(tmp_path / "cudnn")
    code = """
from concurrent.futures import ThreadPoolExecutor
import threading
barrier = threading.Barrier(8)
def one(_):
    barrier.wait()
    return library.load()
assert not library.is_loaded()
with ThreadPoolExecutor(8) as pool:
    assert len({id(found) for found in pool.map(one, range(8))}) == 1
assert library.is_loaded()
show()
"""
    assert loaded(code, FLCUDA_CUDNN_PATH=folder)["version"] == 92800


def test_missing_symbol_fails_alone_and_names_the_version(stubs: Stubs, tmp_path: Path) -> None:
    folder = stubs.install(tmp_path / "cudnn", 90100)
    code = """
@library.bind(ctypes.c_int, ctypes.c_int, status=True, since="9.28.0")
def cudnnFromTheFuture(number): ...
@library.bind(ctypes.c_size_t, status=False)
def cudnnGetVersion(): ...
try:
    cudnnFromTheFuture(1)
except CudnnNotSupportedError as error:
    facts = {"text": str(error), "status": error.status, "function": error.function}
    print(json.dumps(facts | {"other": cudnnGetVersion()}))
"""
    facts = loaded(code, FLCUDA_CUDNN_PATH=folder)
    assert facts["function"] == "cudnnFromTheFuture"
    assert facts["status"] == 3000
    assert "9.28.0" in str(facts["text"])
    assert "9.1.0" in str(facts["text"])
    assert facts["other"] == 90100


def test_bound_function_checks_status_arguments_and_text(stubs: Stubs, tmp_path: Path) -> None:
    folder = stubs.install(tmp_path / "cudnn")
    code = """
@library.bind(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), status=True)
def cudnnCreate(handle): ...
found = {}
for name, arguments, keywords in (
    ("status", (ctypes.pointer(ctypes.c_void_p()),), {}),
    ("keyword", (), {"handle": ctypes.pointer(ctypes.c_void_p())}),
    ("type", (3.5,), {}),
    ("count", (), {}),
):
    try:
        cudnnCreate(*arguments, **keywords)
    except Exception as error:
        found[name] = [type(error).__name__, str(error), *getattr(error, "__notes__", [])]
print(json.dumps(found))
"""
    found = loaded(code, FLCUDA_CUDNN_PATH=folder)
    kind, text, note = found["status"]  # type: ignore[misc]
    assert kind == "CudnnError"
    assert text == "cudnnCreate: CUDNN_STATUS_STUB (1002): the stub says no"
    assert str(folder / "libcudnn_ops.so.9") in note
    assert found["keyword"] == found["status"]
    assert found["type"][0] == "TypeError"  # type: ignore[index]
    assert found["type"][1].startswith("cudnnCreate: handle: ")  # type: ignore[index]
    assert found["count"] == ["TypeError", "cudnnCreate(handle): missing a required argument: 'handle'"]


def test_importing_loads_nothing() -> None:
    code = """
import flcuda, flcuda.cudnn, flcuda.cudnn.bindings, flcuda.cudnn.resources, flcuda.device
assert "cupy" not in sys.modules
assert library.mapped_files() == []
assert not library.is_loaded()
print("{}")
"""
    assert loaded(code) == {}


@pytest.mark.parametrize(("number", "text"), [(92800, "9.28.0"), (90100, "9.1.0"), (8003, "8.0.3"), (100203, "10.2.3")])
def test_version_text(number: int, text: str) -> None:
    assert library.version_text(number) == text


def test_places_never_open_anything(stubs: Stubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stubs.install(tmp_path / "cudnn")
    before = library.mapped_files()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    opened: Callable[..., object] = library.search_places
    places = opened()
    assert [place for place in places if place.path == str(folder)][0].usable  # noqa: RUF015
    assert library.mapped_files() == before


# --- neighbours -------------------------------------------------------------------------------------------------------

BLAS = "int blas(void) { return 1; }"


def test_cublas_is_taken_from_another_site_folder(stubs: Stubs, tmp_path: Path) -> None:
    stubs.install(tmp_path / "a" / "nvidia" / "cudnn" / "lib")
    blas = tmp_path / "b" / "nvidia" / "cublas" / "lib" / "libcublasLt.so.12"
    blas.parent.mkdir(parents=True)
    shutil.copy(stubs.file(BLAS, "-Wl,-soname,libcublasLt.so.12"), blas)
    code = """
made = library.load()
made.require_cublas()
print(json.dumps({"cuda": made.cuda_version, "blas": library.mapped_files("libcublasLt.so")}))
"""
    facts = loaded(code, sites=(tmp_path / "a", tmp_path / "b"))
    assert facts == {"cuda": facts["cuda"], "blas": [str(blas)]}
    assert int(str(facts["cuda"])) // 1000 == 12


def test_cublas_that_is_nowhere_is_named_before_cudnn_could_end_the_process(stubs: Stubs, tmp_path: Path) -> None:
    stubs.install(tmp_path / "a" / "nvidia" / "cudnn" / "lib")
    text = refused("library.load().require_cublas()", sites=(tmp_path / "a",))
    assert "needs libcublasLt.so.12" in text
    assert "pip install nvidia-cublas-cu12" in text
