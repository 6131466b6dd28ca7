"""Reads batches of files in helper processes, into memory shared with them; `reader_process` is what they run."""

import contextlib
import logging
import mmap
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from flcuda.data import reader_process

LEAST_FILES = 16
"""A batch of fewer files is not worth a process."""

MOST_PROCESSES = 3

# A plain tuple: there are many a batch.
FoundFile: TypeAlias = tuple[int, NDArray[np.uint8], int, int]
"""A JPEG file of the kind that nvImageCodec decodes, read by a process: which of the batch it is, its bytes in shared
memory, and the height and width that its header says."""

# Of the shared memory of one process, which takes as much as its largest batch did. Files beyond it are the caller's.
_ROOM = 64 << 20
# Of this file as a script: what it needs is in the standard library, and nothing of the user's is imported. The word is
# for who looks at the system's list of processes.
_COMMAND = ("-I", "-S", str(Path(reader_process.__file__).resolve()), "flcuda-file-reader")
# Far more than files take that are not in the system's cache. A process that is late is taken for hung.
_ANSWER_S = 120.0
# A process is killed to end it: it has nothing to save. Only a system that does not answer takes longer.
_END_S = 2.0
# To another process these are other files.
_OF_THIS_PROCESS = ("/proc/", "/dev/fd/", "/dev/std")
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)

_log = logging.getLogger(__name__)


class _ReaderError(Exception):
    """A process that does not do what it should; says what."""


class FileReaders:
    """Up to three processes that read files for threads of this one; to be used from any number of threads.

    A process is started when a batch comes that no other has time for, and serves the batches after that. The first
    that cannot be started, dies, hangs or talks nonsense ends them all: the caller then reads as it does without them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The last used last: its memory is the one in the processor's caches.
        self._free: list[_Reader] = []
        self._all: set[_Reader] = set()
        # Threads that read, or use what was read.
        self._users = 0
        self._is_over = False
        # At the end of this process too, which else would not wait for them.
        weakref.finalize(self, _end_all, self._all)
        _INSTANCES.add(self)

    @contextlib.contextmanager
    def reading(self, sources: Sequence[Path | bytes]) -> Iterator[list[FoundFile]]:
        """Has files read by a process.

        Yields:
            What was read, in order: valid inside the `with`. Nothing of the other files, for whatever reason: they are
            the caller's to read.
        """
        request = _request(sources)
        if request is None:
            yield []
            return
        with self._lock:
            self._users += 1
            reader = self._take()
        is_whole = False
        try:
            yield [] if reader is None else self._read(reader, request, len(sources))
            is_whole = True
        finally:
            self._give_back(reader, is_whole)

    def _take(self) -> "_Reader | None":
        """Returns a process that is ready, and starts one where more threads read than there are processes."""
        if self._is_over:
            return None
        try:
            for place in reversed(range(len(self._free))):
                if self._free[place].is_ready():
                    return self._free.pop(place)
            if len(self._all) < min(self._users, MOST_PROCESSES):
                reader = _Reader()
                self._all.add(reader)
                self._free.append(reader)
        except _ReaderError as error:
            self._fail(f"no process reads files: {error}")
        return None

    def _read(self, reader: "_Reader", request: bytes, count: int) -> list[FoundFile]:
        try:
            return reader.read(request, count)
        except _ReaderError as error:
            with self._lock:
                self._all.discard(reader)
                self._fail(f"no process reads files any more: {error}")
            reader.end()
            return []

    def _give_back(self, reader: "_Reader | None", is_whole: bool) -> None:
        with self._lock:
            self._users -= 1
            if reader is None or reader not in self._all:
                return
            if is_whole and not self._is_over:
                self._free.append(reader)
                return
            # After an error, who knows who still reads its memory.
            self._all.discard(reader)
        reader.end()

    def _fail(self, reason: str) -> None:
        if not self._is_over:
            _log.debug(reason)
        self._end()

    def _end(self) -> None:
        """Ends all that nobody uses now; the others when they are given back. To be called with the lock."""
        self._is_over = True
        while self._free:
            reader = self._free.pop()
            self._all.discard(reader)
            reader.end()

    def close(self) -> None:
        """Ends the processes, those in use when their batch is decoded."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """In a process that was forked from the one that started them: lets go of what is not its own."""
        self._lock = threading.Lock()
        for reader in self._all:
            reader.forget()
        self._free.clear()
        self._all.clear()
        self._users = 0


# Those whose sockets a forked process must not hold: their processes end when nobody does.
_INSTANCES: "weakref.WeakSet[FileReaders]" = weakref.WeakSet()


def _forget_all() -> None:
    for readers in list(_INSTANCES):
        readers.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _end_all(readers: "set[_Reader]") -> None:
    with contextlib.suppress(KeyError):
        while True:
            readers.pop().end()


class _Reader:
    """One process; for one thread at a time.

    Raises:
        _ReaderError: it cannot be started.
    """

    def __init__(self) -> None:
        name = Path(sys.executable or "").name
        if os.name != "posix" or getattr(sys, "frozen", False) or not name.startswith(("python", "pypy")):
            raise _ReaderError(f"{sys.executable!r} is not known to run a script")
        try:
            self._bytes, self._socket, self._process = _started()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise _ReaderError(f"{type(error).__name__}: {error}") from error
        self._is_ready = False
        self._due = time.monotonic() + _ANSWER_S
        self._socket.settimeout(_ANSWER_S)

    def is_ready(self) -> bool:
        """Whether it has started; _ReaderError when it says anything else than that, or nothing for long."""
        if not self._is_ready:
            waiting = select.poll()
            waiting.register(self._socket, select.POLLIN)
            if waiting.poll(0):
                # At once or not at all: nothing is waited for with the lock of all.
                if self._said() != reader_process.READY:
                    raise _ReaderError("it does not start as it should")
                self._is_ready = True
            elif time.monotonic() > self._due:
                raise _ReaderError(f"it has not started within {_ANSWER_S:g} seconds")
        return self._is_ready

    def _said(self) -> bytes:
        try:
            return self._socket.recv(len(reader_process.READY))
        except OSError as error:
            raise _ReaderError(f"it does not start: {error}") from error

    def read(self, request: bytes, count: int) -> list[FoundFile]:
        """Returns what it reads of so many files, until the next request; _ReaderError when it does not answer."""
        try:
            self._socket.sendall(request, _NO_SIGNAL)
        except OSError as error:
            raise _ReaderError(f"it takes no request: {error}") from error
        answer = np.frombuffer(self._received(reader_process.FOUND.size * count), np.uint32).reshape(count, 4)
        if (answer[:, :2].sum(axis=1, dtype=np.uint64) > _ROOM).any():
            raise _ReaderError("it talks nonsense")
        content = self._bytes
        return [
            (place, content[start : start + length], height, width)
            for place, (start, length, height, width) in enumerate(answer.tolist())
            if length
        ]

    def _received(self, size: int) -> bytearray:
        received = bytearray(size)
        place = 0
        with memoryview(received) as room:
            while place < size:
                try:
                    count = self._socket.recv_into(room[place:])
                except OSError as error:
                    raise _ReaderError(f"it does not answer: {error or type(error).__name__}") from error
                if not count:
                    raise _ReaderError("it has ended")
                place += count
        return received

    def end(self) -> None:
        """Ends the process; a thread that waits for its answer is told."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.kill()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            # Waits for a disk that does not answer, and is the system's to end.
            self._process.returncode = 0
        self._socket.close()

    def forget(self) -> None:
        """Closes what was inherited by a fork; the process goes on."""
        self._socket.close()
        # Of another process's child; else Popen would miss its end.
        self._process.returncode = 0


def _started() -> tuple[NDArray[np.uint8], socket.socket, subprocess.Popen[bytes]]:
    """Returns memory, a socket, and the process that shares both."""
    memory = _shared_memory()
    try:
        # Closed by the system when the last view of it goes.
        content = np.frombuffer(mmap.mmap(memory, _ROOM), np.uint8)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    (sys.executable, *_COMMAND, str(memory), str(_ROOM)),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    pass_fds=(memory,),
                )
            except BaseException:
                ours.close()
                raise
        return content, ours, process
    finally:
        os.close(memory)


def _shared_memory() -> int:
    """Returns the descriptor of a file of `_ROOM` bytes without a name, which take memory once they are written to."""
    try:
        descriptor = os.memfd_create("flcuda-files")
    except (AttributeError, OSError):
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, _ROOM)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _request(sources: Sequence[Path | bytes]) -> bytes | None:
    """Returns what a process is asked; None where it cannot or should not read these files."""
    if len(sources) < LEAST_FILES:
        return None
    try:
        paths = [str(source) for source in sources if isinstance(source, Path)]
        text = "\0".join(paths)
        if f"\0{text}".count("\0/") < len(paths):
            # The process's own folder is another one.
            text = "\0".join([str(Path.cwd() / path) for path in paths])
        content = os.fsencode(text)
    except (OSError, UnicodeError):
        # Nobody knows where this process is, or the system has no such names.
        return None
    # Some are the bytes of files, or no names of files.
    if text.count("\0") != len(sources) - 1 or any(part in text for part in _OF_THIS_PROCESS):
        return None
    return reader_process.LENGTH.pack(len(content)) + content
