"""The store: memory, folder, and everything that may be wrong with a folder. It never fails."""

import errno
import json
import multiprocessing
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from finder_fakes import PROBLEM, choice, key

from flcuda.finder import store as store_module
from flcuda.finder.choice import SCHEMA, Choice, Key
from flcuda.finder.policy import Policy
from flcuda.finder.problem import ConvolutionProblem
from flcuda.finder.store import ChoiceStore, default_folder, default_store

UNFINISHED = f".{key().file_name}.12345.0123abcd.tmp"


def stored(folder: Path) -> Path:
    return choice().pin(folder)


def keys(count: int) -> list[Key]:
    return [key(library_version=f"numpy {n}") for n in range(count)]


def run_script(script: str, folder: Path, *, before: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> None:
    """Runs lines that have `choice`, `key`, `keys`, `warned` and a `store` of the folder, in a process of their own."""
    lines = (
        "import os, sys, warnings; sys.path.insert(0, sys.argv[1])\n"
        "from finder_fakes import choice, key\n"
        "from flcuda.finder.store import ChoiceStore\n"
        "store = ChoiceStore(sys.argv[2])\n"
        "warned = []\n"
        "warnings.showwarning = lambda message, *_: warned.append(str(message))\n"
        "warnings.simplefilter('always')\n"
    )
    command = [*before, sys.executable, "-c", lines + script, str(Path(__file__).parent), str(folder), *after]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, timeout=120, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
        for of in keys(5):
            store.put(choice(of), folder=False)
        assert [store.get(of) is not None for of in keys(5)] == [False, False, True, True, True]

    def test_what_was_used_last_stays_in_memory(self, tmp_path, monkeypatch):
        monkeypatch.setattr(store_module, "_MEMORY_LIMIT", 3)
        store = ChoiceStore(tmp_path)
        for of in keys(3):
            store.put(choice(of), folder=False)
        assert store.get(keys(1)[0]) is not None
        store.put(choice(keys(4)[3]), folder=False)
        assert [store.get(of) is not None for of in keys(4)] == [True, False, True, True]

    def test_what_memory_has_dropped_comes_from_the_folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(store_module, "_MEMORY_LIMIT", 1)
        store = ChoiceStore(tmp_path)
        for of in keys(3):
            store.put(choice(of))
        assert [store.get(of).key for of in keys(3)] == keys(3)

    def test_a_pickled_choice_is_found_by_its_key(self, tmp_path):
        """Also by a process that hashes words otherwise."""
        (tmp_path / "pickled").write_bytes(pickle.dumps(choice()))
        run_script(
            "import pickle\n"
            "other = pickle.load(open(sys.argv[3], 'rb'))\n"
            "store.put(other, folder=False)\n"
            "assert store.get(key()) == other == choice()\n"
            "assert hash(other) == hash(choice())\n",
            tmp_path / "choices",
            after=(str(tmp_path / "pickled"),),
        )

    def test_default_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("FLCUDA_CHOICES", str(tmp_path / "one"))
        one = default_store()
        assert one.folder == tmp_path / "one"
        assert default_store() is one
        monkeypatch.setenv("FLCUDA_CHOICES", str(tmp_path / "two"))
        assert default_store().folder == tmp_path / "two"
        monkeypatch.delenv("FLCUDA_CHOICES")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert default_folder() == default_store().folder == tmp_path / "flcuda" / "choices"
        monkeypatch.setenv("FLCUDA_CHOICES", "")
        assert default_store().folder == tmp_path / "flcuda" / "choices"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert default_folder() == default_store().folder == tmp_path / "home" / ".cache" / "flcuda" / "choices"


class TestBadFiles:
    @pytest.mark.parametrize(
        "spoil",
        [
            lambda text: "",
            lambda text: text[: len(text) // 2],
            lambda text: "\0" * len(text),
            lambda text: "[1, 2]",
            lambda text: text.replace(f'"schema": {SCHEMA}', '"schema": 1'),
            lambda text: text.replace(f'"schema": {SCHEMA}', '"schema": 99'),
            lambda text: text.replace(f'"schema": {SCHEMA}', f'"schema": {SCHEMA}.0'),
            lambda text: json.dumps({"plan": 7}),
            lambda text: text.replace("n2", "n0"),
            lambda text: "[" * 100000,
            lambda text: text + " " * (1 << 23),
        ],
        ids=[
            "empty",
            "truncated",
            "zeros",
            "list",
            "older",
            "newer",
            "schema",
            "foreign",
            "problem",
            "deep",
            "huge",
        ],
    )
    def test_costs_one_warning(self, tmp_path, spoil):
        path = stored(tmp_path)
        path.write_text(spoil(path.read_text()))
        store = ChoiceStore(tmp_path)
        with pytest.warns(UserWarning, match="searching again") as caught:
            assert store.get(key()) is None
        assert len(caught) == 1
        assert str(path) in str(caught[0].message)
        assert store.get(key()) is None
        store.put(choice())
        assert ChoiceStore(tmp_path).get(key()) == choice()

    def test_not_text(self, tmp_path):
        stored(tmp_path).write_bytes(os.urandom(300))
        with pytest.warns(UserWarning, match="searching again"):
            assert ChoiceStore(tmp_path).get(key()) is None

    @pytest.mark.parametrize(
        ("spoil", "said"),
        [
            (lambda text: text.replace(f'"schema": {SCHEMA}', '"schema": 1'), "an older flcuda"),
            (lambda text: text.replace(f'"schema": {SCHEMA}', '"schema": 99'), "a newer flcuda"),
            (lambda text: text[:100], "not a choice"),
        ],
        ids=["older", "newer", "truncated"],
    )
    def test_a_folder_full_of_them_costs_one_warning(self, tmp_path, spoil, said):
        for of in keys(20):
            path = choice(of).pin(tmp_path)
            path.write_text(spoil(path.read_text()))
        store = ChoiceStore(tmp_path)
        with pytest.warns(UserWarning, match=said) as caught:
            assert [store.get(of) for of in keys(20)] == [None] * 20
        assert len(caught) == 1

    def test_each_kind_has_its_own_warning(self, tmp_path):
        older, newer, empty = (choice(of).pin(tmp_path) for of in keys(3))
        older.write_text(older.read_text().replace(f'"schema": {SCHEMA}', '"schema": 1'))
        newer.write_text(newer.read_text().replace(f'"schema": {SCHEMA}', '"schema": 99'))
        empty.write_text("")
        store = ChoiceStore(tmp_path)
        with pytest.warns(UserWarning, match="searching again") as caught:
            assert [store.get(of) for of in keys(3)] == [None] * 3
        assert len(caught) == 3

    def test_the_digest_of_another_key(self, tmp_path):
        """A collision of file names gives a new search, never another convolution's algorithm."""
        other = key(ConvolutionProblem.parse(str(PROBLEM) + " d2"))
        choice(other).pin(tmp_path).rename(tmp_path / key().file_name)
        with pytest.warns(UserWarning, match="another key"):
            assert ChoiceStore(tmp_path).get(key()) is None

    def test_a_folder_in_its_place(self, tmp_path):
        (tmp_path / key().file_name).mkdir()
        store = ChoiceStore(tmp_path)
        with pytest.warns(UserWarning, match="no regular file"):
            assert store.get(key()) is None
        with pytest.warns(UserWarning, match="cannot be stored"):
            store.put(choice())
        assert store.get(key()) == choice()
        assert [path.name for path in tmp_path.iterdir()] == [key().file_name]

    @pytest.mark.timeout(20)
    def test_a_pipe_in_its_place(self, tmp_path):
        """Nobody writes into it: to wait for that would be for ever."""
        os.mkfifo(tmp_path / key().file_name)
        store = ChoiceStore(tmp_path)
        with pytest.warns(UserWarning, match="no regular file"):
            assert store.get(key()) is None
        store.put(choice())
        assert ChoiceStore(tmp_path).get(key()) == choice()

    def test_a_socket_in_its_place(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)  # a socket's path may have some hundred characters only
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(key().file_name)
            with pytest.warns(UserWarning, match="cannot be read"):
                assert ChoiceStore(tmp_path).get(key()) is None

    def test_the_zeros_of_a_device_in_its_place(self, tmp_path):
        (tmp_path / key().file_name).symlink_to("/dev/zero")
        with pytest.warns(UserWarning, match="no regular file"):
            assert ChoiceStore(tmp_path).get(key()) is None


class TestLinks:
    def test_to_a_choice_is_followed_and_never_written_through(self, tmp_path):
        target = stored(tmp_path / "elsewhere")
        before = target.read_bytes()
        link = tmp_path / "choices" / key().file_name
        link.parent.mkdir()
        link.symlink_to(target)
        store = ChoiceStore(link.parent)
        assert store.get(key()) == choice()
        store.put(choice(algo="fft"))
        assert target.read_bytes() == before
        assert not link.is_symlink()
        assert ChoiceStore(link.parent).get(key()).algo == "fft"

    def test_to_nothing_is_no_choice(self, tmp_path):
        link = tmp_path / key().file_name
        link.symlink_to(tmp_path / "nothing")
        store = ChoiceStore(tmp_path)
        assert store.get(key()) is None
        store.put(choice())
        assert [path.name for path in tmp_path.iterdir()] == [key().file_name]
        assert ChoiceStore(tmp_path).get(key()) == choice()

    def test_to_itself(self, tmp_path):
        (tmp_path / key().file_name).symlink_to(tmp_path / key().file_name)
        with pytest.warns(UserWarning, match="symbolic links"):
            assert ChoiceStore(tmp_path).get(key()) is None

    def test_a_linked_folder(self, tmp_path):
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        ChoiceStore(tmp_path / "link").put(choice())
        assert ChoiceStore(tmp_path / "real").get(key()) == choice()

    def test_a_folder_that_is_a_link_to_nothing(self, tmp_path):
        (tmp_path / "link").symlink_to("nothing")
        store = ChoiceStore(tmp_path / "link")
        assert store.get(key()) is None
        with pytest.warns(UserWarning, match="cannot be stored"):
            store.put(choice())
        assert store.get(key()) == choice()


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

    def test_a_file_in_place_of_the_folder(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        store = ChoiceStore(tmp_path / "file")
        with pytest.warns(UserWarning, match="cannot be read"):
            assert store.get(key()) is None
        with pytest.warns(UserWarning, match="cannot be stored"):
            store.put(choice())
        assert (tmp_path / "file").read_text() == "mine"

    def test_a_folder_that_goes_away(self, tmp_path):
        store = ChoiceStore(tmp_path / "choices")
        store.put(choice())
        shutil.rmtree(store.folder)
        store.clear_memory()
        assert store.get(key()) is None
        store.put(choice())
        assert ChoiceStore(store.folder).get(key()) == choice()

    @pytest.mark.parametrize(
        "number", [errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT]
    )
    @pytest.mark.parametrize("where", ["mkdir", "open", "replace", "replace and unlink"])
    def test_writing_fails(self, tmp_path, monkeypatch, number, where):
        def fail(self, *_, **__):
            raise OSError(number, os.strerror(number), str(self))

        for name in where.split(" and "):
            monkeypatch.setattr(Path, name, fail)
        store = ChoiceStore(tmp_path)
        with pytest.warns(UserWarning, match=os.strerror(number)) as caught:
            store.put(choice())
        assert str(tmp_path) in str(caught[0].message)
        store.put(choice(key(policy=Policy(deterministic=True))))
        assert store.get(key()) == choice()
        assert ("unlink" in where) == (list(tmp_path.iterdir()) != [])

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
    def test_reading_fails(self, tmp_path, monkeypatch, number):
        for of in keys(2):
            choice(of).pin(tmp_path)

        def fail(path, *_, **__):
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(store_module.os, "open", fail)
        store = ChoiceStore(tmp_path)
        with pytest.warns(UserWarning, match=os.strerror(number)) as caught:
            assert [store.get(of) for of in keys(2)] == [None, None]
        assert len(caught) == 1

    def test_a_file_replaced_on_the_server_is_asked_for_again(self, tmp_path, monkeypatch):
        stored(tmp_path)
        opened = os.open
        calls = []

        def first_fails(path, *how):
            calls.append(path)
            if len(calls) == 1:
                raise OSError(errno.ESTALE, "Stale file handle", str(path))
            return opened(path, *how)

        monkeypatch.setattr(store_module.os, "open", first_fails)
        assert ChoiceStore(tmp_path).get(key()) == choice()

    def test_a_file_size_limit_in_earnest(self, tmp_path):
        """The kernel refuses the write half way, as on a full disk."""
        run_script(
            "import resource, signal\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n"
            "store.put(choice())\n"
            "assert store.get(key()) == choice()\n"
            "assert len(warned) == 1, warned\n",
            tmp_path,
        )
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("options", "script", "said"),
        [
            (
                "size=16k",
                "for n in range(100): store.put(choice(key(library_version=f'numpy {n}')))\n"
                "assert all(store.get(key(library_version=f'numpy {n}')) for n in range(100))\n"
                "other = ChoiceStore(sys.argv[2])\n"
                "whole = sum(other.get(key(library_version=f'numpy {n}')) is not None for n in range(100))\n"
                "assert 0 < whole < 100 and whole == len(os.listdir(sys.argv[2])), whole\n",
                "No space left on device",
            ),
            (
                "ro",
                "assert store.get(key()) is None\n"
                "for _ in range(2): store.put(choice())\n"
                "assert store.get(key()) == choice()\n",
                "Read-only file system",
            ),
        ],
        ids=["full", "read-only"],
    )
    def test_a_disk_in_earnest(self, tmp_path, options, script, said):
        """A disk in memory that only one process sees."""
        mount = f'mount -t tmpfs -o {options} none "{tmp_path}"'
        before = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh")
        if shutil.which("unshare") is None or subprocess.run([*before, "true"], capture_output=True).returncode != 0:
            pytest.skip("this system lets no user mount a disk in memory")
        run_script(f"{script}assert len(warned) == 1 and '{said}' in warned[0], warned\n", tmp_path, before=before)


class TestUnfinished:
    def made(self, folder: Path, name: str, age_s: float) -> Path:
        path = folder / name
        path.write_text("half")
        then = time.time() - age_s
        os.utime(path, (then, then))
        return path

    def test_what_a_killed_process_left_goes_after_a_day(self, tmp_path):
        old = self.made(tmp_path, UNFINISHED, 25 * 3600)
        young = self.made(tmp_path, UNFINISHED.replace("12345", "6"), 23 * 3600)
        foreign = [
            self.made(tmp_path, name, 1e8)
            for name in ("notes.tmp", f"{key().file_name}.tmp", f"x{UNFINISHED}", ".hidden", "forward-1.json")
        ]
        store = ChoiceStore(tmp_path)
        assert store.get(key()) is None
        assert old.exists()
        store.put(choice())
        assert not old.exists()
        assert all(path.exists() for path in (young, *foreign))
        assert ChoiceStore(tmp_path).get(key()) == choice()

    def test_is_looked_for_once_a_process(self, tmp_path, monkeypatch):
        swept = []
        monkeypatch.setattr(store_module, "_sweep", swept.append)
        store = ChoiceStore(tmp_path)
        for of in keys(3):
            store.put(choice(of))
        assert len(swept) == 1

    def test_what_cannot_be_removed_stays(self, tmp_path):
        (tmp_path / UNFINISHED).mkdir()
        os.utime(tmp_path / UNFINISHED, (0, 0))
        ChoiceStore(tmp_path).put(choice())
        assert ChoiceStore(tmp_path).get(key()) == choice()

    def test_a_kill_in_the_middle_of_writing_leaves_no_half_choice(self, tmp_path):
        """The writer stops before the rename, with half of the file on the disk, and is killed there."""
        stored(tmp_path)
        script = (
            "import sys, time; sys.path.insert(0, sys.argv[1])\n"
            "from pathlib import Path\n"
            "from finder_fakes import choice\n"
            "from flcuda.finder.store import ChoiceStore\n"
            "def replace(self, target):\n"
            "    self.write_text(self.read_text()[:50])\n"
            "    print('half', flush=True)\n"
            "    time.sleep(600)\n"
            "Path.replace = replace\n"
            "ChoiceStore(sys.argv[2]).put(choice(algo='fft'))\n"
        )
        writer = subprocess.Popen(
            [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path)], stdout=subprocess.PIPE
        )
        with writer:
            assert writer.stdout.readline() == b"half\n"
            writer.kill()
        assert ChoiceStore(tmp_path).get(key()) == choice()
        (left,) = (path for path in tmp_path.iterdir() if path.name != key().file_name)
        os.utime(left, (0, 0))
        ChoiceStore(tmp_path).put(choice(algo="fft"))
        assert [path.name for path in tmp_path.iterdir()] == [key().file_name]


def _put_and_get(folder: str, number: int, turns: int, failures) -> None:
    """Writes and reads the same few keys as others do; what is wrong is put into the queue."""
    warnings.simplefilter("error")
    try:
        store = ChoiceStore(folder)
        for turn in range(turns):
            for of in keys(4):
                store.put(choice(of, algo=f"{number}-{turn}-", source="s" * (1 + 997 * number)))
                store.clear_memory()
                found = store.get(of)
                writer = int(found.algo.split("-")[0])
                assert len(found.source) == 1 + 997 * writer, found.algo
                assert found.key == of
    except BaseException as error:
        failures.put(repr(error))
        raise


class TestManyAtOnce:
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

    def test_threads_of_one_store(self, tmp_path, monkeypatch):
        """More keys than memory holds: each thread always gets the choice of the key that it asks for."""
        monkeypatch.setattr(store_module, "_MEMORY_LIMIT", 5)
        store = ChoiceStore(tmp_path)
        errors = []

        def use(first):
            try:
                for turn in range(20):
                    for of in keys(12)[first:] + keys(12)[:first]:
                        if turn % 5 == first % 5:
                            store.put(choice(of))
                        found = store.get(of)
                        assert found is None or found.key == of
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=use, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(store._memory) == 5
        assert len(list(tmp_path.iterdir())) == 12

    def test_eight_processes_write_and_read_the_same_keys(self, tmp_path):
        """Never an error or a warning, never a part of one choice and a part of another."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["flcuda.finder.store", "finder_fakes"])
        failures = context.Queue()
        processes = [
            context.Process(target=_put_and_get, args=(str(tmp_path), number, 25, failures)) for number in range(8)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        said = [] if failures.empty() else [failures.get()]
        assert said == []
        assert [process.exitcode for process in processes] == [0] * 8
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(of.file_name for of in keys(4))

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


class TestEntries:
    def test_only_files_with_a_choice_s_name(self, tmp_path):
        good = stored(tmp_path)
        for name in ("notes.json", "README", UNFINISHED, "forward-12.json"):
            (tmp_path / name).write_text(choice().to_json())
        (entry,) = ChoiceStore(tmp_path).entries()
        assert (entry.path, entry.problem, entry.choice, entry.fault) == (good, str(PROBLEM), choice(), None)

    def test_faults(self, tmp_path):
        older, empty, moved, pipe, dangling = (choice(of).pin(tmp_path) for of in keys(5))
        older.write_text(older.read_text().replace(f'"schema": {SCHEMA}', '"schema": 1'))
        empty.write_text("")
        other = choice(key(library_version="another")).pin(tmp_path)
        moved.write_text(other.read_text())
        pipe.unlink()
        os.mkfifo(pipe)
        dangling.unlink()
        dangling.symlink_to("nothing")
        found = {entry.path: entry for entry in ChoiceStore(tmp_path).entries()}
        assert set(found) == {older, empty, moved, pipe, other}
        assert [path for path, entry in found.items() if entry.choice is not None] == [other]
        assert found[older].problem == str(PROBLEM)
        assert "older" in found[older].fault
        assert found[empty].problem is None
        assert found[moved].fault == "it holds the choice of another key"
        assert found[pipe].fault == "it is no regular file"

    def test_no_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="none"):
            ChoiceStore(tmp_path / "none").entries()

    def test_remove(self, tmp_path):
        store = ChoiceStore(tmp_path)
        store.put(choice())
        (entry,) = store.entries()
        store.remove(entry)
        assert store.get(key()) is None
        assert list(tmp_path.iterdir()) == []
        store.remove(entry)
