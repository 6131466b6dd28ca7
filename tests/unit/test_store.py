"""The store: memory, folder, and everything that may be wrong with a folder. It never fails."""

import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from finder_fakes import PROBLEM, choice, key

from flcuda.finder import store as store_module
from flcuda.finder.choice import Choice
from flcuda.finder.policy import Policy
from flcuda.finder.problem import ConvolutionProblem
from flcuda.finder.store import ChoiceStore, default_folder, default_store


def stored(folder: Path) -> Path:
    return choice().pin(folder)


class TestMemoryAndFolder:
    def test_empty(self, tmp_path):
        store = ChoiceStore(tmp_path / "none")
        assert store.get(key()) is None
        assert not store.folder.exists()

    def test_another_store_of_the_folder_finds_it(self, tmp_path):
        ChoiceStore(tmp_path).put(choice())
        other = ChoiceStore(tmp_path)
        assert other.get(key()) == choice()
        assert other.get(key(policy=Policy(deterministic=True))) is None

    def test_memory_comes_first(self, tmp_path):
        store = ChoiceStore(tmp_path)
        store.put(choice())
        stored(tmp_path).unlink()
        assert store.get(key()) == choice()
        store.clear_memory()
        assert store.get(key()) is None

    def test_for_this_process_only(self, tmp_path):
        store = ChoiceStore(tmp_path)
        store.put(choice())
        store.put(choice(algo="fft"), folder=False)
        assert store.get(key()).algo == "fft"
        assert ChoiceStore(tmp_path).get(key()).algo == "im2col"

    def test_memory_is_bounded(self, tmp_path, monkeypatch):
        monkeypatch.setattr(store_module, "_MEMORY_LIMIT", 3)
        store = ChoiceStore(tmp_path)
        keys = [key(library_version=f"numpy {n}") for n in range(5)]
        for of in keys:
            store.put(choice(of), folder=False)
        assert [store.get(of) is not None for of in keys] == [False, False, True, True, True]

    def test_default_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("FLCUDA_CHOICES", str(tmp_path / "one"))
        one = default_store()
        assert one.folder == tmp_path / "one"
        assert default_store() is one
        monkeypatch.setenv("FLCUDA_CHOICES", str(tmp_path / "two"))
        assert default_store().folder == tmp_path / "two"
        monkeypatch.delenv("FLCUDA_CHOICES")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert default_folder() == tmp_path / "flcuda" / "choices"


class TestBadFiles:
    @pytest.mark.parametrize(
        "spoil",
        [
            lambda text: "",
            lambda text: text[: len(text) // 2],
            lambda text: "\0" * len(text),
            lambda text: "[1, 2]",
            lambda text: text.replace('"schema": 1', '"schema": 2'),
            lambda text: json.dumps({"plan": 7}),
            lambda text: text.replace("n2", "n0"),
            lambda text: "[" * 100000,
        ],
        ids=["empty", "truncated", "zeros", "list", "schema", "foreign", "problem", "deep"],
    )
    def test_costs_one_warning(self, tmp_path, spoil):
        path = stored(tmp_path)
        path.write_text(spoil(path.read_text()))
        store = ChoiceStore(tmp_path)
        with pytest.warns(UserWarning, match="searching again"):
            assert store.get(key()) is None
        assert store.get(key()) is None
        store.put(choice())
        assert ChoiceStore(tmp_path).get(key()) == choice()

    def test_not_text(self, tmp_path):
        stored(tmp_path).write_bytes(os.urandom(300))
        with pytest.warns(UserWarning, match="searching again"):
            assert ChoiceStore(tmp_path).get(key()) is None

    def test_the_digest_of_another_key(self, tmp_path):
        """A collision of file names gives a new search, never another convolution's algorithm."""
        other = key(ConvolutionProblem.parse(str(PROBLEM) + " d2"))
        choice(other).pin(tmp_path).rename(tmp_path / key().file_name)
        with pytest.warns(UserWarning, match="another key"):
            assert ChoiceStore(tmp_path).get(key()) is None

    def test_a_folder_in_its_place(self, tmp_path):
        (tmp_path / key().file_name).mkdir()
        store = ChoiceStore(tmp_path)
        with pytest.warns(UserWarning, match="cannot be read"):
            assert store.get(key()) is None
        with pytest.warns(UserWarning, match="cannot be stored"):
            store.put(choice())
        assert store.get(key()) == choice()
        assert [path.name for path in tmp_path.iterdir()] == [key().file_name]


class TestBadFolders:
    def test_a_file_in_the_way(self, tmp_path):
        (tmp_path / "file").write_text("")
        store = ChoiceStore(tmp_path / "file" / "choices")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert store.get(key()) is None
            store.put(choice())
            store.put(choice(algo="fft"))
        assert ["cannot be read" in str(entry.message) for entry in caught] == [True, False]
        assert store.get(key()).algo == "fft"

    @pytest.mark.parametrize(
        ("number", "text"), [(13, "Permission denied"), (28, "No space left on device"), (30, "Read-only file system")]
    )
    def test_writing_fails(self, tmp_path, monkeypatch, number, text):
        def fail(self, *_, **__):
            self.touch()
            raise OSError(number, text)

        monkeypatch.setattr(Path, "write_text", fail)
        store = ChoiceStore(tmp_path)
        with pytest.warns(UserWarning, match=text):
            store.put(choice())
        store.put(choice(key(policy=Policy(deterministic=True))))
        assert store.get(key()) == choice()
        assert list(tmp_path.iterdir()) == []

    def test_reading_fails(self, tmp_path, monkeypatch):
        stored(tmp_path)

        def fail(self):
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "read_bytes", fail)
        store = ChoiceStore(tmp_path)
        with pytest.warns(UserWarning, match="Permission denied"):
            assert store.get(key()) is None

    def test_a_file_size_limit_in_earnest(self, tmp_path):
        """The kernel refuses the write half way, as on a full disk."""
        script = (
            "import resource, signal, sys, warnings; sys.path.insert(0, sys.argv[1])\n"
            "from finder_fakes import choice, key\n"
            "from flcuda.finder.store import ChoiceStore\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n"
            "store = ChoiceStore(sys.argv[2])\n"
            "with warnings.catch_warnings(record=True) as caught:\n"
            "    warnings.simplefilter('always')\n"
            "    store.put(choice())\n"
            "assert store.get(key()) == choice()\n"
            "assert len(caught) == 1, caught\n"
        )
        subprocess.run(
            [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path)], check=True, timeout=120
        )
        assert list(tmp_path.iterdir()) == []


class TestManyWriters:
    def test_threads(self, tmp_path):
        """Readers see a whole choice at any moment."""
        ChoiceStore(tmp_path).put(choice())
        stop = threading.Event()
        errors = []

        def write(number):
            store = ChoiceStore(tmp_path)
            for turn in range(50):
                store.put(choice(algo=f"algo{number}-{turn}" + "x" * (turn * 100)))

        def read():
            with warnings.catch_warnings():
                while not stop.is_set():
                    try:
                        assert ChoiceStore(tmp_path).get(key()) is not None
                    except Exception as error:
                        errors.append(error)

        reader = threading.Thread(target=read)
        writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        reader.start()
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        stop.set()
        reader.join()
        assert errors == []
        assert [path.name for path in tmp_path.iterdir()] == [key().file_name]

    def test_processes_and_a_kill(self, tmp_path):
        script = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "from finder_fakes import choice\n"
            "from flcuda.finder.store import ChoiceStore\n"
            "store = ChoiceStore(sys.argv[2])\n"
            "print('ready', flush=True)\n"
            "while True:\n"
            "    for turn in range(100): store.put(choice(algo=f'algo{turn}' + 'x' * 20000))\n"
        )
        command = [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path)]
        writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
        try:
            for writer in writers:
                writer.stdout.readline()
            seen = 0
            for _ in range(200):
                seen += ChoiceStore(tmp_path).get(key()) is not None
        finally:
            for writer in writers:
                writer.kill()
                writer.wait()
                writer.stdout.close()
        assert seen > 0
        found = ChoiceStore(tmp_path).get(key())
        assert isinstance(found, Choice)
        assert len(found.algo) > 20000
