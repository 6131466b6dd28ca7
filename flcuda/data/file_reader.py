"""Reads batches of files in helper processes, into memory shared with them; `reader_process` is what they run."""

import contextlib
import logging
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
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

PageLock: TypeAlias = Callable[[int, int], Callable[[], object]]
"""Page-locks memory, given its address and bytes, and returns what ends that; raises where it cannot."""

# Of the shared memory of one process, which takes as much as its largest batch did. Files beyond it are the caller's.
_ROOM = 64 << 20
# Page-locked at first; to lock more of it costs some milliseconds, so it is done in powers of two.
_LEAST_LOCKED = 8 << 20
# Of this file as a script: what it needs is in the standard library, and nothing of the user's is imported. The word is
# for who looks at the system's list of processes.
_SCRIPT = Path(getattr(reader_process, "__file__", None) or "").resolve()
_COMMAND = ("-I", "-S", str(_SCRIPT), "flcuda-file-reader")
# Far more than a file takes that is not in the system's cache. A process that says nothing for so long is taken for
# hung.
_ANSWER_S = 120.0
# A process is killed to end it: it has nothing to save. Only a system that does not answer takes longer.
_END_S = 2.0
# In the life of one `FileReaders`, of processes that have died: of a signal, or for want of memory.
_MOST_RESTARTS = 3
# How absolute paths begin, after a zero byte, that are other files to another process. What two slashes mean is the
# system's.
_OF_THIS_PROCESS = ("\0/proc/", "\0/dev/fd/", "\0/dev/std", "\0//")
# What else leads there from elsewhere.
_UPWARDS = "/../"
_PERHAPS_OF_THIS_PROCESS = ("/proc/", "/dev/")
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)

_log = logging.getLogger(__name__)
# Whether the one warning of this process was given.
_WARNED = threading.Event()


class _ReaderError(Exception):
    """A process that does not do what it should; says what."""


class _NoReaderError(_ReaderError):
    """There are no such processes here, nor should there be."""


class _DiedError(_ReaderError):
    """A process has ended, and another one may do better."""


class FileReaders:
    """Up to three processes that read files for threads of this one; to be used from any number of threads.

    A process is started when a batch comes that no other has time for, and serves the batches after that. One that dies
    is replaced, a few times. The first that cannot be started, hangs, talks nonsense or dies after that ends them all:
    the caller then reads as it does without them, and one warning says so. A process has the user and groups that this
    one had when it was started, and is ended where these have changed.

    Args:
        page_lock: of the memory that is read into; None for none. Where it raises, that memory is as it is.
    """

    def __init__(self, page_lock: PageLock | None = None) -> None:
        self._page_lock = page_lock
        self._lock = threading.Lock()
        # The last used last: its memory is the one in the processor's caches.
        self._free: list[_Reader] = []
        self._all: set[_Reader] = set()
        # Those that read, or use what was read; nothing that is counted, which an interrupt would leave wrong.
        self._users: set[object] = set()
        self._restarts = _MOST_RESTARTS
        self._over = threading.Event()
        # What the caller is to be warned of.
        self._untold: str | None = None
        # At the end of this process too, which else would not wait for them.
        weakref.finalize(self, _end_all, self._all, self._over)
        _INSTANCES.add(self)

    @property
    def _is_over(self) -> bool:
        return self._over.is_set()

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
        user = object()
        reader = None
        is_whole = False
        try:
            with self._lock:
                self._users.add(user)
                reader = self._take()
            found = [] if reader is None else self._read(reader, request, len(sources))
            self._warn()
            yield found
            is_whole = True
        finally:
            self._give_back(user, reader, is_whole)

    def _take(self) -> "_Reader | None":
        """Returns a process that is ready, and starts one where more threads read than there are processes."""
        if self._is_over:
            return None
        identity = _identity()
        for reader in [reader for reader in self._free if reader.identity != identity]:
            # It may open what this process may not any more.
            self._drop(reader)
        for reader in reversed(self._free.copy()):
            try:
                if reader.is_ready():
                    self._free.remove(reader)
                    return reader
            except _ReaderError as error:
                self._drop(reader)
                if not self._blame(error):
                    return None
        if len(self._all) < min(len(self._users), MOST_PROCESSES):
            try:
                reader = _Reader(self._page_lock)
                self._all.add(reader)
                self._free.append(reader)
            except _ReaderError as error:
                self._blame(error)
        return None

    def _read(self, reader: "_Reader", request: bytes, count: int) -> list[FoundFile]:
        found, error = reader.read(request, count)
        if error is not None:
            with self._lock:
                self._all.discard(reader)
                self._blame(error)
            reader.end()
        return found

    def _give_back(self, user: object, reader: "_Reader | None", is_whole: bool) -> None:
        with self._lock:
            self._users.discard(user)
            if reader is None or reader not in self._all:
                return
            if is_whole and not self._is_over:
                self._free.append(reader)
                return
            # After an error, who knows who still reads its memory.
            self._all.discard(reader)
        reader.end()

    def _drop(self, reader: "_Reader") -> None:
        """Ends one that nobody uses. To be called with the lock."""
        self._free.remove(reader)
        self._all.discard(reader)
        reader.end()

    def _blame(self, error: _ReaderError) -> bool:
        """Ends all for good, or not yet; returns whether any goes on. To be called with the lock."""
        if self._is_over:
            return False
        if isinstance(error, _DiedError) and self._restarts:
            self._restarts -= 1
            _log.debug(f"another process is to read files: {error}")
            return True
        reason = f"no helper process reads files: {error}"
        _log.debug(reason)
        if not isinstance(error, _NoReaderError):
            self._untold = reason
        self._end()
        return False

    def _warn(self) -> None:
        reason, self._untold = self._untold, None
        if reason is not None and not _WARNED.is_set():
            _WARNED.set()
            message = f"{reason}; this process reads them itself, which is slower"
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _end(self) -> None:
        """Ends all that nobody uses now; the others when they are given back. To be called with the lock."""
        self._over.set()
        while self._free:
            self._drop(self._free[-1])

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
        self._users = set()


# Those whose sockets a forked process must not hold: their processes end when nobody does.
_INSTANCES: "weakref.WeakSet[FileReaders]" = weakref.WeakSet()


def _forget_all() -> None:
    for readers in list(_INSTANCES):
        readers.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _end_all(readers: "set[_Reader]", over: threading.Event) -> None:
    # A thread that still reads at the end of this process starts no other.
    over.set()
    with contextlib.suppress(KeyError):
        while True:
            readers.pop().end()


class _SharedMemory:
    """Memory that a process writes to, uint8 (`_ROOM`,): as an array, whose views keep this, the locks with it.

    Not page-locked memory that is given back to the system would be, for CUDA, where it was, whatever lies there later.

    Args:
        descriptor: of a file of so many bytes; may be closed.
        page_lock: as of `FileReaders`.
    """

    def __init__(self, descriptor: int, page_lock: PageLock | None) -> None:
        self._page_lock = page_lock
        self._unlock: Callable[[], object] | None = None
        self._locked = 0
        self._map = mmap.mmap(descriptor, _ROOM)
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data
        self.__array_interface__ = {"shape": (_ROOM,), "typestr": "|u1", "data": (self._address, False), "version": 3}

    def lock(self, nbytes: int) -> None:
        """Page-locks so many bytes from the beginning, while nobody reads any."""
        if self._page_lock is None or nbytes <= self._locked:
            return
        size = min(max(_LEAST_LOCKED, 1 << (nbytes - 1).bit_length()), _ROOM)
        try:
            # In one piece: a copy that begins in one and ends in another is refused.
            self._end_lock()
            self._unlock = self._page_lock(self._address, size)
            self._locked = size
        except Exception as error:
            _log.debug(f"memory that files are read into is not page-locked: {error}")
            self._page_lock = None

    def forget(self) -> None:
        """In a process that was forked: the lock is the other one's."""
        self._unlock = None

    def _end_lock(self) -> None:
        unlock, self._unlock = self._unlock, None
        self._locked = 0
        if unlock is not None:
            unlock()

    def __del__(self) -> None:
        # Before the memory goes, with what refers to it. At the end of the process CUDA may have gone first.
        with contextlib.suppress(Exception):
            self._end_lock()


class _Reader:
    """One process; for one thread at a time.

    Args:
        page_lock: as of `FileReaders`.

    Raises:
        _ReaderError: it cannot be started.
    """

    def __init__(self, page_lock: PageLock | None) -> None:
        name = Path(sys.executable or "").name
        if os.name != "posix" or getattr(sys, "frozen", False) or not name.startswith(("python", "pypy")):
            raise _NoReaderError(f"{sys.executable!r} is not known to run a script")
        try:
            if not _SCRIPT.is_file():
                # In an archive.
                raise _NoReaderError(f"{_SCRIPT} is no file")
            # Before the start: it never has more rights than this says.
            self.identity = _identity()
            self._memory, self._socket, self._process = _started(page_lock)
            self._bytes = np.asarray(self._memory)
        except (OSError, ValueError, RuntimeError, TypeError, subprocess.SubprocessError) as error:
            # Types are wrong where other libraries have replaced the standard library's functions.
            raise _ReaderError(f"{type(error).__name__}: {error}") from error
        self._is_ready = False
        self._due = time.monotonic() + _ANSWER_S
        # Nothing is waited for with the lock of all.
        self._socket.setblocking(False)

    def is_ready(self) -> bool:
        """Whether it has started; _ReaderError when it says anything else than that, or nothing for long."""
        if not self._is_ready:
            try:
                said = self._socket.recv(len(reader_process.READY))
            except BlockingIOError:
                if time.monotonic() > self._due:
                    raise _ReaderError(f"it has not started within {_ANSWER_S:g} seconds") from None
                return False
            except OSError as error:
                raise self._died() from error
            if not said:
                raise self._died()
            # At once or not at all.
            if said != reader_process.READY:
                raise _ReaderError("it does not start as it should")
            self._socket.settimeout(_ANSWER_S)
            self._is_ready = True
        return True

    def read(self, request: bytes, count: int) -> tuple[list[FoundFile], _ReaderError | None]:
        """Returns what it reads of so many files, until the next request, and why it is of no further use if so."""
        answer = bytearray(reader_process.FOUND.size * count)
        place = 0
        error = None
        try:
            self._send(request)
            with memoryview(answer) as room:
                while place < len(answer):
                    place += self._received(room[place:])
        except _ReaderError as raised:
            # A new one: with its traceback it would keep this frame, and with it the memory.
            error = type(raised)(str(raised))
        entries = np.frombuffer(answer, np.uint32).reshape(count, 4)[: place // reader_process.FOUND.size]
        end = int(entries[:, :2].sum(axis=1, dtype=np.uint64).max(initial=0))
        if end > _ROOM:
            return [], _ReaderError("it talks nonsense")
        self._memory.lock(end)
        content = self._bytes
        found = [
            (place, content[start : start + length], height, width)
            for place, (start, length, height, width) in enumerate(entries.tolist())
            if length
        ]
        return found, error

    def _send(self, request: bytes) -> None:
        try:
            self._socket.sendall(request, _NO_SIGNAL)
        except TimeoutError as error:
            raise _ReaderError(f"it takes no request: {error}") from error
        except OSError as error:
            raise self._died() from error

    def _received(self, room: memoryview) -> int:
        """Returns how many bytes came, which is at least one; each time the whole wait is granted."""
        try:
            count = self._socket.recv_into(room)
        except TimeoutError as error:
            raise _ReaderError(f"it does not answer: {error}") from error
        except OSError as error:
            raise self._died() from error
        if not count:
            raise self._died()
        return count

    def _died(self) -> _DiedError:
        self.end()
        status = self._process.returncode
        return _DiedError(f"it has ended by signal {-status}" if status < 0 else f"it has ended with status {status}")

    def end(self) -> None:
        """Ends the process; a thread that waits for its answer is told."""
        try:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            # Not allowed where this process has given up the rights that it had. It ends with its socket then.
            with contextlib.suppress(OSError):
                self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        finally:
            if self._process.returncode is None:
                # Waits for a disk that does not answer, and is the system's to end.
                self._process.returncode = 0
            self._socket.close()

    def forget(self) -> None:
        """Closes what was inherited by a fork; the process goes on."""
        self._memory.forget()
        self._socket.close()
        # Of another process's child; else Popen would miss its end.
        self._process.returncode = 0


def _identity() -> tuple[int, int, list[int]] | None:
    """Returns what says which files this process may read."""
    return (os.geteuid(), os.getegid(), os.getgroups()) if os.name == "posix" else None


def _started(page_lock: PageLock | None) -> tuple[_SharedMemory, socket.socket, subprocess.Popen[bytes]]:
    """Returns memory, a socket, and the process that shares both."""
    memory = _shared_memory()
    try:
        # Closed by the system when the last view of it goes.
        content = _SharedMemory(memory, page_lock)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # Whatever socket.setdefaulttimeout says.
                theirs.setblocking(True)
                process = subprocess.Popen(
                    (sys.executable, *_COMMAND, str(memory), str(_ROOM)),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    pass_fds=(memory,),
                    # A signal to this process's group is this process's to answer.
                    process_group=0,
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
    if descriptor <= 2:
        # The process has its standard streams there, where this one has closed its own.
        import fcntl

        lower = descriptor
        try:
            descriptor = fcntl.fcntl(lower, fcntl.F_DUPFD_CLOEXEC, 3)
        finally:
            os.close(lower)
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
    paths = [str(source) for source in sources if isinstance(source, Path)]
    if len(paths) != len(sources):
        # Some are the bytes of files.
        return None
    text = "\0" + "\0".join(paths)
    try:
        if text.count("\0/") < len(paths):
            # The process's own folder is another one.
            here = str(Path.cwd()).rstrip("/") + "/"
            text = "\0" + "\0".join([path if path.startswith("/") else here + path for path in paths])
        content = os.fsencode(text[1:])
    except (OSError, UnicodeError):
        # Nobody knows where this process is, or the system has no such names.
        return None
    if text.count("\0") != len(paths) or any(start in text for start in _OF_THIS_PROCESS):
        return None
    if _UPWARDS in text and any(part in text for part in _PERHAPS_OF_THIS_PROCESS):
        return None
    return reader_process.LENGTH.pack(len(content)) + content
