"""Helper processes that read files: what they read, and that none is left, whatever happens to whom."""

import contextlib
import gc
import io
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from flcuda.data import file_reader, reader_process
from flcuda.data.file_reader import FileReaders

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

# What a parent does that is to be killed, interrupted, and the like.
PARENT = """
import os, sys, time
from pathlib import Path
from flcuda.data.file_reader import FileReaders

paths = [Path(name) for name in sys.argv[1:]]
readers = FileReaders()

def read():
    for _ in range(1000):
        with readers.reading(paths) as found:
            if found:
                return [(place, content.tobytes()) for place, content, _, _ in found]
        time.sleep(0.01)
    raise SystemExit("never ready")

expected = [(place, path.read_bytes()) for place, path in enumerate(paths)]
assert read() == expected
(reader,) = readers._all
print(reader._process.pid, flush=True)
"""


def jpeg(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8 + number, 30), (number, 0, 0)).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / f"{number}.jpg" for number in range(20)]
    for number, path in enumerate(found):
        path.write_bytes(jpeg(number))
    return found


@pytest.fixture
def readers() -> Iterator[FileReaders]:
    made = FileReaders()
    yield made
    made.close()


def warm(readers: FileReaders, paths: Sequence[Path]) -> list[tuple[int, bytes, int, int]]:
    """Reads until a process does it; returns what it read."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with readers.reading(paths) as found:
            if found:
                return [(place, content.tobytes(), height, width) for place, content, height, width in found]
        time.sleep(0.002)
    raise AssertionError("no process gets ready")


def pids(readers: FileReaders) -> list[int]:
    return [reader._process.pid for reader in readers._all]


def slow_command(seconds: Callable[[int], float]) -> tuple[str, ...]:
    """Returns a command that reads as the real one does, and sleeps so long before the file of that number."""
    program = f"""
import os, sys, time
process = {{"__name__": "reader_process"}}
exec(compile(open({reader_process.__file__!r}).read(), "reader_process", "exec"), process)
real = process["_read"]
process["_PIECE_S"] = 0.1

def slow(path, memory, place):
    time.sleep({[seconds(place) for place in range(20)]}[int(os.path.basename(path).split(b".")[0])])
    return real(path, memory, place)

process["_read"] = slow
process["main"](int(sys.argv[1]), int(sys.argv[2]))
"""
    return ("-I", "-S", "-c", program)


def require_some_of_the_first(found: Sequence[file_reader.FoundFile], paths: Sequence[Path]) -> None:
    """The first files, whole and in order, and not all: what a process had read when it went."""
    places = [place for place, *_ in found]
    assert places == list(range(len(places)))
    assert 8 < len(places) < 18
    assert [content.tobytes() for _, content, _, _ in found] == [path.read_bytes() for path in paths[: len(places)]]


def wait_until_over(readers: FileReaders, paths: Sequence[Path]) -> None:
    end = time.monotonic() + 60
    while not readers._is_over:
        assert time.monotonic() < end
        with readers.reading(paths) as found:
            assert not found
        time.sleep(0.002)


def replaced(readers: FileReaders, paths: Sequence[Path], pid: int) -> int:
    """Waits for a process that is not this one; returns its number."""
    assert warm(readers, paths) == expected(paths)
    (other,) = pids(readers)
    assert other != pid
    return other


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_for_end(pid: int) -> None:
    end = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < end, "the process is left"
        time.sleep(0.01)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def expected(paths: Sequence[Path]) -> list[tuple[int, bytes, int, int]]:
    return [(place, path.read_bytes(), 30, 8 + int(path.stem)) for place, path in enumerate(paths)]


class TestReading:
    def test_reads(self, readers: FileReaders, paths: list[Path]) -> None:
        for order in (paths, paths[::-1], paths * 3):
            assert warm(readers, order) == expected(order)
        assert len(pids(readers)) == 1

    def test_what_is_the_callers(self, readers: FileReaders, paths: list[Path], tmp_path: Path) -> None:
        odd = [tmp_path / name for name in ("none", "empty", "text", "folder", "cut", "12bits", "secret")]
        odd[1].write_bytes(b"")
        odd[2].write_bytes(b"text")
        odd[3].mkdir()
        odd[4].write_bytes(jpeg(3)[:-2])
        bits = bytearray(jpeg(3))
        bits[bits.index(b"\xff\xc0") + 4] = 12
        odd[5].write_bytes(bits)
        # As root nothing is unreadable.
        odd[6].symlink_to(odd[6])
        mixed = [path for pair in zip(odd, paths, strict=False) for path in pair] + paths[7:]
        assert [entry[0] for entry in warm(readers, mixed)] == [1, 3, 5, 7, 9, 11, 13, *range(14, 27)]
        assert [entry[1] for entry in warm(readers, mixed)] == [path.read_bytes() for path in paths]

    def test_pipes_and_sockets_are_the_callers(self, readers: FileReaders, paths: list[Path], tmp_path: Path) -> None:
        pipe = tmp_path / "pipe.jpg"
        os.mkfifo(pipe)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(tmp_path / "socket.jpg"))
            warm(readers, paths)
            for reader in readers._all:
                reader._socket.settimeout(5.0)
            with readers.reading([*paths[:3], pipe, tmp_path / "socket.jpg", *paths[3:]]) as found:
                assert [place for place, *_ in found] == [0, 1, 2, *range(5, 22)]
                assert [content.tobytes() for _, content, _, _ in found] == [path.read_bytes() for path in paths]

    def test_slow_files_are_waited_for(
        self, readers: FileReaders, paths: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only silence is taken for a fault: the files take longer together."""
        monkeypatch.setattr(file_reader, "_COMMAND", slow_command(lambda place: 0.08))
        warm(readers, paths[:16])
        for reader in readers._all:
            reader._socket.settimeout(0.8)
        start = time.monotonic()
        with readers.reading(paths) as found:
            assert [place for place, *_ in found] == list(range(20))
        assert time.monotonic() - start > 1.5
        assert not readers._is_over

    def test_answers_are_in_pieces_where_files_are_slow(
        self, paths: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = pace = 0.0
        written: list[bytes] = []
        monkeypatch.setattr(reader_process, "_write", written.append)
        monkeypatch.setattr(reader_process, "time", SimpleNamespace(monotonic=lambda: now))
        real = reader_process._read

        def slow(*arguments: object) -> int:
            nonlocal now
            now += pace
            return real(*arguments)

        monkeypatch.setattr(reader_process, "_read", slow)
        names = [os.fsencode(path) for path in paths]
        whole = None
        for seconds, pieces in ((0.0, 1), (0.04, 1), (0.3, 6), (30.0, 21)):
            pace = seconds
            written.clear()
            reader_process._answer(names, memoryview(bytearray(1 << 20)))
            assert len(written) == pieces
            assert not any(len(piece) % reader_process.FOUND.size for piece in written)
            whole = whole or b"".join(written)
            assert b"".join(written) == whole
        assert len(whole) == 20 * reader_process.FOUND.size

    def test_what_does_not_fit(
        self, readers: FileReaders, paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        size = len(jpeg(0))
        monkeypatch.setattr(file_reader, "_ROOM", 10 * size)
        huge = tmp_path / "huge.jpg"
        huge.write_bytes(jpeg(0)[:-2] + bytes(20 * size) + b"\xff\xd9")
        found = warm(readers, [*paths[:3], huge, *paths[3:]])
        assert [place for place, *_ in found][:4] == [0, 1, 2, 4]
        assert 6 < len(found) < 10
        assert all(content == jpeg(width - 8) for _, content, _, width in found)

    def test_large_files_are_read_whole(self, readers: FileReaders, tmp_path: Path) -> None:
        paths = []
        for number, size in enumerate((1 << 20, (1 << 20) - 1, (1 << 20) + 1, 2 << 20, 3_000_000)):
            start = jpeg(number)[:-2]
            noise = np.random.default_rng(number).integers(0, 255, size - len(start) - 2, np.uint8).tobytes()
            paths.append(tmp_path / f"{number}.jpg")
            paths[-1].write_bytes(start + noise + b"\xff\xd9")
        order = (paths * 4)[:16]
        assert warm(readers, order) == expected(order)

    def test_odd_names(self, readers: FileReaders, tmp_path: Path) -> None:
        names = [b"new\nline", b"\xff\xfe\x80", "\u00e9\u732b".encode(), b" ", b"-c", b"a\\b", b"'\"$(x)", b"\t\r"]
        paths = [Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)) for name in names * 2]
        for place, path in enumerate(paths):
            path.write_bytes(jpeg(place))
        assert [entry[1] for entry in warm(readers, paths)] == [path.read_bytes() for path in paths]

    def test_relative_paths_are_of_the_folder_at_that_time(
        self, readers: FileReaders, paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        relative = [Path(path.name) for path in paths]
        monkeypatch.chdir(tmp_path)
        assert warm(readers, relative) == expected(paths)
        monkeypatch.chdir("/")
        assert warm(readers, [path.relative_to("/") for path in paths]) == expected(paths)
        other = tmp_path / "other"
        other.mkdir()
        for number, path in enumerate(relative):
            (other / path).write_bytes(jpeg(number + 50))
        monkeypatch.chdir(other)
        mixed = [*relative[:18], *paths[18:]]
        assert [width for *_, width in warm(readers, mixed)] == [*range(58, 76), 26, 27]
        gone = tmp_path / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        with readers.reading(relative) as found:
            assert not found

    @pytest.mark.parametrize("odd", ["/proc/self/fd/0", "/dev/fd/0", "/dev/stdin", "a\0b", "/\0/", "\0/", "\ud800"])
    def test_names_that_no_other_process_should_open(self, odd: str, readers: FileReaders, paths: list[Path]) -> None:
        warm(readers, paths)
        with readers.reading([*paths, Path(odd)]) as found:
            assert not found
        with readers.reading([Path(odd), *paths]) as found:
            assert not found
        assert warm(readers, paths) == expected(paths)

    @pytest.mark.parametrize(
        ("path", "is_asked"),
        [
            ("/data/proc/1.jpg", True),
            ("/home/dev/std_images/1.jpg", True),
            ("/home/dev/fd/1.jpg", True),
            ("/process/1.jpg", True),
            ("/dev/shm/1.jpg", True),
            ("/data/../other/1.jpg", True),
            ("../other/1.jpg", True),
            ("/proc/self/cwd/1.jpg", False),
            ("//proc/self/cwd/1.jpg", False),
            ("//server/1.jpg", False),
            ("/data/../proc/self/cwd/1.jpg", False),
            ("/dev/shm/../fd/3", False),
            ("/dev/stdin", False),
        ],
    )
    def test_only_the_beginning_of_a_path_says_whose_it_is(
        self, path: str, is_asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for place in (0, 7, 15):
            paths = [Path("/data/0.jpg")] * 16
            paths[place] = Path(path)
            assert (file_reader._request(paths) is not None) == is_asked

    def test_relative_paths_below_proc(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir("/proc/self")
        assert file_reader._request([Path("cmdline")] * 16) is None

    def test_a_zero_byte_does_not_stand_for_bytes(self, readers: FileReaders, paths: list[Path]) -> None:
        warm(readers, paths)
        with readers.reading([Path(f"{paths[0]}\0{paths[1]}"), jpeg(3), *paths[2:]]) as found:
            assert not found

    def test_what_no_process_is_started_for(self, readers: FileReaders, paths: list[Path]) -> None:
        for sources in (paths[:15], [b"content"] * 20, [*paths, b"content"], [*paths, b""]):
            with readers.reading(sources) as found:
                assert not found
        assert not pids(readers)

    def test_threads_have_processes_of_their_own(self, readers: FileReaders, paths: list[Path]) -> None:
        failed: list[BaseException] = []
        most: list[int] = []

        def work(first: int) -> None:
            try:
                for turn in range(60):
                    order = [paths[(first + turn + k) % len(paths)] for k in range(18)]
                    with readers.reading(order) as found:
                        time.sleep(0.003)
                        most.append(len(pids(readers)))
                        for place, content, _, width in found:
                            assert content.tobytes() == jpeg(width - 8) == order[place].read_bytes()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(7 * place,)) for place in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed
        assert max(most) == file_reader.MOST_PROCESSES
        assert not readers._is_over

    def test_what_is_in_use_is_not_written_over(self, readers: FileReaders, paths: list[Path]) -> None:
        warm(readers, paths)
        with readers.reading(paths) as outer:
            for _ in range(5):
                warm(readers, paths[::-1])
            assert [content.tobytes() for _, content, _, _ in outer] == [path.read_bytes() for path in paths]
        assert len(pids(readers)) == 2

    def test_without_memfd(self, readers: FileReaders, paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*_: object) -> None:
            raise OSError("not here")

        monkeypatch.setattr(os, "memfd_create", refused)
        assert warm(readers, paths) == expected(paths)
        monkeypatch.delattr(os, "memfd_create")
        other = FileReaders()
        assert warm(other, paths) == expected(paths)
        other.close()

    def test_without_poll(self, readers: FileReaders, paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        """As libraries leave it that replace what waits."""
        monkeypatch.delattr(select, "poll")
        assert warm(readers, paths) == expected(paths)

    def test_with_a_default_timeout(self, readers: FileReaders, paths: list[Path]) -> None:
        socket.setdefaulttimeout(30.0)
        try:
            assert warm(readers, paths) == expected(paths)
        finally:
            socket.setdefaulttimeout(None)
        assert readers._restarts == file_reader._MOST_RESTARTS

    @pytest.mark.parametrize("is_memfd", [True, False])
    def test_without_standard_streams(self, is_memfd: bool, paths: list[Path], tmp_path: Path) -> None:
        without = "" if is_memfd else "del os.memfd_create\n"
        program = PARENT.replace("paths = ", f"os.closerange(0, 3)\n{without}paths = ", 1)
        program = program.partition("print(")[0] + "Path(sys.argv[1]).with_name('done').touch()"
        subprocess.run([sys.executable, "-c", program, *map(str, paths)], check=True, timeout=60)
        assert (tmp_path / "done").exists()


class Locks:
    """Page-locked memory, bytes by address, and how often each was asked for."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.asked: list[int] = []

    def __call__(self, address: int, nbytes: int) -> Callable[[], object]:
        assert not any(start < address + nbytes and address < start + size for start, size in self.held.items())
        self.asked.append(nbytes)
        self.held[address] = nbytes
        return lambda: self.held.pop(address)


class TestPageLock:
    def test_grows_with_what_is_read_and_goes_with_its_last_view(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(file_reader, "_LEAST_LOCKED", 1 << 12)
        locks = Locks()
        readers = FileReaders(locks)
        small, large = tmp_path / "small.jpg", tmp_path / "large.jpg"
        small.write_bytes(jpeg(3))
        large.write_bytes(jpeg(4)[:-2] + bytes(100_000) + jpeg(4)[-2:])
        for paths, expected in (([small] * 16, 1 << 14), ([large] * 16, 1 << 21), ([small] * 16, 1 << 21)):
            assert len(small.read_bytes()) * 16 < 1 << 14
            assert warm(readers, paths)
            (reader,) = readers._all
            assert locks.held == {reader._bytes.ctypes.data: expected}
        assert locks.asked == [1 << 14, 1 << 21]
        with readers.reading([large] * 16) as found:
            view = found[-1][1][5:50]
        wanted = view.copy()
        readers.close()
        del reader, readers, found
        gc.collect()
        assert len(locks.held) == 1
        np.testing.assert_array_equal(view, wanted)
        del view
        gc.collect()
        assert not locks.held

    def test_no_more_than_there_is(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(file_reader, "_ROOM", 3 << 20)
        locks = Locks()
        readers = FileReaders(locks)
        path = tmp_path / "large.jpg"
        path.write_bytes(jpeg(4)[:-2] + bytes(150_000) + jpeg(4)[-2:])
        assert warm(readers, [path] * 16)
        assert locks.asked == [3 << 20]
        readers.close()

    def test_one_that_cannot_is_asked_once(self, paths: list[Path]) -> None:
        asked = []

        def refuse(address: int, nbytes: int) -> Callable[[], object]:
            asked.append(nbytes)
            raise RuntimeError("operation not supported")

        readers = FileReaders(refuse)
        for _ in range(3):
            assert warm(readers, paths) == expected(paths)
        assert len(asked) == 1
        readers.close()

    def test_a_forked_process_leaves_it(self, paths: list[Path]) -> None:
        locks = Locks()
        readers = FileReaders(locks)
        warm(readers, paths)
        readers.forget()
        gc.collect()
        assert len(locks.held) == 1


class TestEnd:
    def test_nothing_is_left(self, paths: list[Path]) -> None:
        before = descriptors(), children(), threading.active_count()
        for ending in ("close", "collect", "error"):
            readers = FileReaders()
            warm(readers, paths)
            with readers.reading(paths), readers.reading(paths):
                pass
            warm(readers, paths)
            assert len(children()) == len(before[1]) + 2
            if ending == "close":
                readers.close()
                readers.close()
            elif ending == "error":
                for _ in range(2):
                    with contextlib.suppress(KeyError), readers.reading(paths), readers.reading(paths):
                        raise KeyError
                readers.close()
            del readers
            gc.collect()
            assert (descriptors(), children(), threading.active_count()) == before

    def test_in_use_while_closed(self, paths: list[Path]) -> None:
        readers = FileReaders()
        warm(readers, paths)
        with readers.reading(paths) as found:
            readers.close()
            (pid,) = pids(readers)
            assert [content.tobytes() for _, content, _, _ in found] == [path.read_bytes() for path in paths]
        assert not is_running(pid)
        with readers.reading(paths) as found:
            assert not found

    def test_after_an_error_another_is_used(self, readers: FileReaders, paths: list[Path]) -> None:
        warm(readers, paths)
        first = pids(readers)
        with pytest.raises(KeyError), readers.reading(paths):
            raise KeyError
        assert not is_running(*first)
        assert warm(readers, paths) == expected(paths)
        assert pids(readers) != first

    @pytest.mark.parametrize("where", ["_started", "is_ready"])
    def test_interrupts_leave_no_user(
        self, where: str, readers: FileReaders, paths: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        if where == "is_ready":
            warm(readers, paths)
        with monkeypatch.context() as patch:
            patch.setattr(file_reader._Reader if where == "is_ready" else file_reader, where, interrupted)
            for _ in range(5):
                with pytest.raises(KeyboardInterrupt), readers.reading(paths):
                    pass
        assert not readers._users
        for _ in range(5):
            warm(readers, paths)
        assert len(pids(readers)) == 1

    @pytest.mark.parametrize("what", ["geteuid", "getegid", "getgroups"])
    def test_rights_that_have_changed(
        self, what: str, readers: FileReaders, paths: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        warm(readers, paths)
        with readers.reading(paths), readers.reading(paths):
            pass
        warm(readers, paths)
        first = pids(readers)
        changed = [4321] if what == "getgroups" else 4321
        for _ in range(2):
            before = pids(readers)
            with monkeypatch.context() as patch:
                patch.setattr(os, what, lambda: changed)
                with readers.reading(paths) as found:
                    assert not found
                assert not any(is_running(pid) for pid in before)
                assert warm(readers, paths) == expected(paths)
            assert warm(readers, paths) == expected(paths)
        assert len(first) == 2
        assert not set(first) & set(pids(readers))
        assert readers._restarts == file_reader._MOST_RESTARTS

    @pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="gives up root's rights")
    def test_rights_that_were_given_up(self, paths: list[Path]) -> None:
        for path in paths:
            path.chmod(0o600)
        then = """
sys.stdin.readline()
others = FileReaders()
readers, others = others, readers
assert read() == expected
readers, others = others, readers
os.setresuid(65534, 65534, 65534)
# Others may not be able to start Python here.
import warnings
warnings.simplefilter("ignore")
for _ in range(20):
    with readers.reading(paths) as found:
        assert not found
    time.sleep(0.01)
readers.close()
others.close()
assert not others._all and not others._free
"""
        process, pid = self.start(paths, then)
        assert process.communicate("go\n", timeout=60)[1] == ""
        assert process.returncode == 0
        wait_for_end(pid)

    def test_what_may_not_be_killed_ends_with_its_socket(
        self, paths: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(*_: object) -> None:
            raise PermissionError("not allowed")

        readers = FileReaders()
        warm(readers, paths)
        (pid,) = pids(readers)
        monkeypatch.setattr(subprocess.Popen, "kill", refused)
        readers.close()
        assert not is_running(pid)
        assert not readers._all

    @staticmethod
    def start(paths: list[Path], then: str, **options: object) -> "tuple[subprocess.Popen[str], int]":
        command = [sys.executable, "-W", "error", "-c", PARENT + then, *map(str, paths)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True, **options
        )
        line = process.stdout.readline()
        if not line:
            raise AssertionError(process.communicate()[1])
        return process, int(line)

    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
    def test_a_parent_that_is_killed(self, how: signal.Signals, paths: list[Path]) -> None:
        process, pid = self.start(paths, "time.sleep(60)")
        assert is_running(pid)
        process.send_signal(how)
        process.communicate()
        wait_for_end(pid)

    @pytest.mark.parametrize(
        "then",
        [
            "",
            "sys.exit(0)",
            "os._exit(0)",
            "import threading; threading.Thread(target=lambda: (time.sleep(0.2), read())).start()",
            "entered = readers.reading(paths); entered.__enter__()",
            "import threading; threading.Thread(target=lambda: [read() for _ in iter(int, 1)], daemon=True).start()",
        ],
    )
    def test_a_parent_that_ends(self, then: str, paths: list[Path]) -> None:
        process, pid = self.start(paths, then)
        _, said = process.communicate(timeout=60)
        assert (process.returncode, said) == (0, "")
        wait_for_end(pid)

    def test_ctrl_c_is_the_parents(self, paths: list[Path]) -> None:
        then = """
try:
    print("waits", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    assert read() == expected
    assert [reader._process.pid for reader in readers._all] == [reader._process.pid]
    print("goes on")
"""
        process, pid = self.start(paths, then, start_new_session=True)
        assert process.stdout.readline() == "waits\n"
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=60) == ("goes on\n", "")
        wait_for_end(pid)

    def test_ctrl_c_while_one_starts(self, paths: list[Path]) -> None:
        then = """
import signal
signal.signal(signal.SIGINT, lambda *_: None)
readers = FileReaders()
with readers.reading(paths):
    (reader,) = readers._all
os.killpg(0, signal.SIGINT)
assert read() == expected
assert list(readers._all) == [reader]
"""
        process, _ = self.start(paths, then, start_new_session=True)
        _, said = process.communicate(timeout=60)
        assert (process.returncode, said) == (0, "")

    def test_signals_of_schedulers_are_the_parents(self, paths: list[Path]) -> None:
        """To the group, and to each process of a job."""
        then = """
import signal
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(number, lambda *_: None)
    os.killpg(0, number)
    os.kill(reader._process.pid, number)
    time.sleep(0.1)
    assert read() == expected
assert list(readers._all) == [reader]
assert os.getpgid(reader._process.pid) == reader._process.pid
"""
        process, _ = self.start(paths, then, start_new_session=True)
        _, said = process.communicate(timeout=60)
        assert (process.returncode, said) == (0, "")

    def test_fork(self, paths: list[Path]) -> None:
        """The forked process has processes of its own, ends none of the other's, and does not keep them from ending."""
        then = """
sys.stdout.flush()
forked = os.fork()
if not forked:
    assert not readers._all
    assert read() == expected
    (own,) = readers._all
    assert own._process.pid != reader._process.pid
    assert not [fd for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and fd == str(reader._socket.fileno())]
    print("forked", own._process.pid, flush=True)
    if sys.stdin.readline() == "end\\n":
        sys.exit(0)
    sys.exit(3)
sys.stdin.close()
assert read() == expected
time.sleep(60)
"""
        process, pid = self.start(paths, then)
        word, own = process.stdout.readline().split()
        assert word == "forked"
        assert is_running(pid)
        process.kill()
        process.wait()
        # Although the forked process is there.
        wait_for_end(pid)
        assert is_running(int(own))
        process.stdin.write("end\n")
        process.stdin.flush()
        wait_for_end(int(own))
        assert process.communicate()[1] == ""

    def test_a_forked_process_that_ends_leaves_the_parents(self, paths: list[Path]) -> None:
        then = """
import warnings
forked = os.fork()
if not forked:
    sys.exit(0)
assert os.waitpid(forked, 0)[1] == 0
assert read() == expected
assert list(readers._all) == [reader]
"""
        process, pid = self.start(paths, then)
        _, said = process.communicate(timeout=60)
        assert (process.returncode, said) == (0, "")
        wait_for_end(pid)

    def test_is_seen_in_the_list_of_processes(self, readers: FileReaders, paths: list[Path]) -> None:
        warm(readers, paths)
        (pid,) = pids(readers)
        assert Path(f"/proc/{pid}/comm").read_text() == "flcuda-reader\n"
        assert b"flcuda-file-reader" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
        # The three of standard streams, and the memory.
        assert len(list(Path(f"/proc/{pid}/fd").iterdir())) == 4

    def test_starts_with_little(self) -> None:
        program = "import sys; exec(open(sys.argv[1]).read(), {'__name__': 'x'}); print(*sys.modules)"
        command = [sys.executable, "-I", "-S", "-c", program, reader_process.__file__]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "mmap" in done.stdout.split()
        assert not {"typing", "socket", "subprocess", "logging", "threading", "numpy"} & set(done.stdout.split())


class TestFailures:
    @pytest.fixture(autouse=True)
    def warned(self, monkeypatch: pytest.MonkeyPatch) -> list[object]:
        """What was warned of; each test is another process."""
        said: list[object] = []

        def warn(message: str, kind: type[Warning], stacklevel: int) -> None:
            said.append((message, kind))

        monkeypatch.setattr(file_reader, "warnings", SimpleNamespace(warn=warn))
        monkeypatch.setattr(file_reader, "_WARNED", threading.Event())
        return said

    def check(
        self,
        readers: FileReaders,
        paths: list[Path],
        caplog: pytest.LogCaptureFixture,
        warned: list[object],
        words: str,
        *,
        restarts: int = 0,
        is_quiet: bool = False,
    ) -> None:
        assert readers._is_over
        assert not readers._all
        for _ in range(3):
            with readers.reading(paths) as found:
                assert not found
        *before, last = [record.getMessage() for record in caplog.records]
        assert {(record.levelno, record.name) for record in caplog.records} == {
            (logging.DEBUG, "flcuda.data.file_reader")
        }
        assert all(message.startswith("another process is to read files: it has ended ") for message in before)
        assert len(before) == restarts
        assert last.startswith("no helper process reads files: ")
        assert words in last
        assert not readers._all
        told = [] if is_quiet else [(f"{last}; this process reads them itself, which is slower", RuntimeWarning)]
        assert warned == told
        # Another one's end is not told again.
        other = FileReaders()
        with other._lock:
            other._blame(file_reader._ReaderError("it does nothing"))
        with other.reading(paths) as found:
            assert not found
        assert warned == told or is_quiet

    @pytest.fixture(autouse=True)
    def nothing_is_left(self, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
        caplog.set_level(logging.DEBUG, "flcuda.data.file_reader")
        gc.collect()
        before = descriptors(), children()
        yield
        gc.collect()
        assert (descriptors(), children()) == before

    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
    def test_killed(
        self, how: signal.Signals, paths: list[Path], caplog: pytest.LogCaptureFixture, warned: list[object]
    ) -> None:
        readers = FileReaders()
        pid = 0
        for _ in range(file_reader._MOST_RESTARTS + 1):
            pid = replaced(readers, paths, pid)
            assert not warned
            os.kill(pid, how)
            wait_for_end(pid)
            with readers.reading(paths) as found:
                assert not found
        words = f"it has ended by signal {how.value}"
        self.check(readers, paths, caplog, warned, words, restarts=file_reader._MOST_RESTARTS)

    def test_killed_while_it_starts(self, paths: list[Path]) -> None:
        readers = FileReaders()
        with readers.reading(paths):
            (pid,) = pids(readers)
            os.kill(pid, signal.SIGKILL)
        replaced(readers, paths, pid)
        readers.close()

    def test_killed_while_it_reads(self, paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        """What it has read is kept."""
        monkeypatch.setattr(file_reader, "_COMMAND", slow_command(lambda place: 60.0 if place == 17 else 0.02))
        readers = FileReaders()
        warm(readers, paths[:16])
        (pid,) = pids(readers)
        timer = threading.Timer(1.0, os.kill, (pid, signal.SIGKILL))
        timer.start()
        with readers.reading(paths) as found:
            require_some_of_the_first(found, paths)
        timer.join()
        assert not readers._all
        assert not readers._is_over
        monkeypatch.undo()
        replaced(readers, paths, pid)
        readers.close()

    def test_hangs_while_it_reads(
        self,
        paths: list[Path],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        warned: list[object],
    ) -> None:
        """What it has read is kept."""
        monkeypatch.setattr(file_reader, "_COMMAND", slow_command(lambda place: 60.0 if place == 17 else 0.02))
        readers = FileReaders()
        warm(readers, paths[:16])
        (pid,) = pids(readers)
        for reader in readers._all:
            reader._socket.settimeout(0.8)
        del reader
        with readers.reading(paths) as found:
            require_some_of_the_first(found, paths)
        del found
        assert not is_running(pid)
        self.check(readers, paths, caplog, warned, "it does not answer: timed out")

    def test_warns(self, paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(file_reader, "warnings", warnings)
        monkeypatch.setattr(sys, "executable", "/nowhere/python3")
        readers = FileReaders()
        words = "no helper process reads files: FileNotFoundError"
        with pytest.warns(RuntimeWarning, match=words), readers.reading(paths) as found:
            assert not found
        for again in (readers, FileReaders()):
            with again.reading(paths) as found:
                assert not found

    def test_late(
        self,
        paths: list[Path],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        warned: list[object],
    ) -> None:
        monkeypatch.setattr(file_reader, "_ANSWER_S", 3.0)
        readers = FileReaders()
        warm(readers, paths)
        (pid,) = pids(readers)
        os.kill(pid, signal.SIGSTOP)
        for reader in readers._all:
            reader._socket.settimeout(0.1)
        del reader
        with readers.reading(paths) as found:
            assert not found
        assert not is_running(pid)
        self.check(readers, paths, caplog, warned, "it does not answer: timed out")

    def test_stopped_with_more_to_take_than_there_is_room_for(
        self, paths: list[Path], caplog: pytest.LogCaptureFixture, warned: list[object]
    ) -> None:
        readers = FileReaders()
        warm(readers, paths)
        os.kill(*pids(readers), signal.SIGSTOP)
        for reader in readers._all:
            reader._socket.settimeout(0.1)
        del reader
        with readers.reading(paths * 2000) as found:
            assert not found
        self.check(readers, paths, caplog, warned, "it takes no request: timed out")

    @pytest.mark.parametrize(
        ("program", "words"),
        [
            ("import os; os.write(1, b'hello')", "it does not start as it should"),
            ("import os; os.write(1, bytes(1000)); os.read(0, 1)", "it does not start as it should"),
            ("pass", "it has ended with status 0"),
            ("raise SystemExit(3)", "it has ended with status 3"),
            ("import os; os.close(0); os.close(1); os.kill(os.getpid(), 9)", "it has ended by signal 9"),
            ("import os; os.write(1, READY); os.read(0, 9999); os.write(1, b'\\xff' * 9999)", "it talks nonsense"),
            ("import os; os.write(1, READY); os.read(0, 9999); os.write(1, b'\\xff')", "it has ended with status 0"),
            ("import os; os.write(1, READY)", "it has ended with status 0"),
            ("import os; os.write(1, READY); os.read(0, 1)", "it has ended with status 0"),
            ("import os; os.write(1, READY); os.close(0); os.close(1)", "it has ended "),
        ],
    )
    def test_nonsense(
        self,
        program: str,
        words: str,
        paths: list[Path],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        warned: list[object],
    ) -> None:
        program = program.replace("READY", repr(reader_process.READY))
        monkeypatch.setattr(file_reader, "_COMMAND", ("-I", "-S", "-c", program))
        readers = FileReaders()
        wait_until_over(readers, paths)
        restarts = file_reader._MOST_RESTARTS if "ended" in words else 0
        self.check(readers, paths, caplog, warned, words, restarts=restarts)

    def test_never_ready(
        self, paths: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, warned: list[object]
    ) -> None:
        monkeypatch.setattr(file_reader, "_ANSWER_S", 0.2)
        monkeypatch.setattr(file_reader, "_COMMAND", ("-I", "-S", "-c", "import time; time.sleep(60)"))
        readers = FileReaders()
        wait_until_over(readers, paths)
        self.check(readers, paths, caplog, warned, "it has not started within 0.2 seconds")

    @pytest.mark.parametrize(
        "what", ["none", "empty", "absent", "another", "frozen", "archive", "no process", "no memory", "other types"]
    )
    def test_cannot_be_started(
        self,
        what: str,
        paths: list[Path],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        warned: list[object],
    ) -> None:
        def refused(*_: object, **__: object) -> None:
            raise PermissionError("not allowed here")

        def other(command: object, **only: object) -> None:
            raise TypeError("unexpected argument")

        is_quiet = what in ("none", "empty", "another", "frozen", "archive")
        words = "is not known to run a script"
        if what in ("none", "empty", "another"):
            monkeypatch.setattr(sys, "executable", {"none": None, "empty": "", "another": "/usr/bin/blender"}[what])
        elif what == "frozen":
            monkeypatch.setattr(sys, "frozen", True, raising=False)
        elif what == "archive":
            monkeypatch.setattr(file_reader, "_SCRIPT", paths[0] / "flcuda" / "data" / "reader_process.py")
            words = "is no file"
        elif what == "other types":
            monkeypatch.setattr(subprocess, "Popen", other)
            words = "TypeError: unexpected argument"
        elif what == "absent":
            monkeypatch.setattr(sys, "executable", "/nowhere/python3")
            words = "FileNotFoundError"
        elif what == "no process":
            monkeypatch.setattr(subprocess, "Popen", refused)
            words = "PermissionError: not allowed here"
        else:
            monkeypatch.setattr(os, "ftruncate", refused)
            words = "PermissionError: not allowed here"
        readers = FileReaders()
        with readers.reading(paths) as found:
            assert not found
        self.check(readers, paths, caplog, warned, words, is_quiet=is_quiet)
