"""Where choices are kept: this process's memory, then a folder with one small JSON file a key.

The store never fails: a folder or a file that cannot be read, written or understood costs one warning a cause and a new
search. Only a network folder that does not answer at all cannot be helped: the kernel holds every process that touches
it until it answers again. Set $FLCUDA_CHOICES to a folder on a local disk then.

Note [many at once]: any number of threads and processes may use one folder. Each file is written whole and renamed
(`Choice.pin`), so that a reader sees an old choice or a new one, never a part of one, and nobody waits for a lock,
which a killed process or a network folder might keep. Of several that write the same key the last one stays. What a
process has in memory it does not read again.
"""

import contextlib
import errno
import os
import stat
import threading
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from flcuda.finder.choice import Choice, Key, SchemaError, is_file_name, is_unfinished_name

FOLDER_VARIABLE = "FLCUDA_CHOICES"
# Choices in memory: some 5 KiB each.
_MEMORY_LIMIT = 4096
# Bytes of the largest file that may be a choice: they have some thousand, that of a large graph has a hundred thousand.
_LARGEST_FILE = 1 << 22
# Seconds after which a file that a writer has not finished belongs to nobody.
_UNFINISHED_AFTER_S = 24 * 3600.0


def default_folder() -> Path:
    """Returns the folder of choices: $FLCUDA_CHOICES, else `choices` in the user's cache folder of flcuda."""
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given) if given else Path(platformdirs.user_cache_dir("flcuda")) / "choices"


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a folder of choices that has a choice's name.

    Attributes:
        path: the file.
        problem: the line of its Problem; None when the file is no choice of any version of flcuda.
        choice: what it holds; None when that cannot be read or belongs to another name.
        fault: why there is no choice, in words; else None.
    """

    path: Path
    problem: str | None
    choice: Choice | None
    fault: str | None = None


class ChoiceStore:
    """Choices by key, shared by all threads of this process and, through the folder, by processes.

    See Note [many at once].

    Attributes:
        folder: where the files are.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Opens a store; touches no file.

        Args:
            folder: where the files are; by default `default_folder()`. It is made when the first choice is stored.
        """
        self.folder = default_folder() if folder is None else Path(folder)
        self._memory: OrderedDict[Key, Choice] = OrderedDict()
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self._swept = False

    def get(self, key: Key) -> Choice | None:
        """Returns the choice for a key, from memory, else from the folder; None when there is none that can be read."""
        with self._lock:
            choice = self._memory.get(key)
            if choice is not None:
                self._memory.move_to_end(key)
                return choice
        choice = self._read(key)
        if choice is not None:
            self._remember(choice)
        return choice

    def put(self, choice: Choice, *, folder: bool = True) -> None:
        """Stores a choice that has run, replacing the one of its key.

        Args:
            choice: what to store.
            folder: also write its file; False when it holds for this process only.
        """
        self._remember(choice)
        if not folder:
            return
        try:
            path = choice.pin(self.folder)
        except OSError as error:
            self._warn(
                f"write {error.errno}",
                f"the choice for {choice.problem} cannot be stored in {self.folder}: {error}; it is kept in "
                f"memory only, and the next process searches again (set {FOLDER_VARIABLE} to another folder)",
            )
            return
        with self._lock:
            swept, self._swept = self._swept, True
        if not swept:
            _sweep(path)

    def clear_memory(self) -> None:
        """Forgets what is in memory; files stay."""
        with self._lock:
            self._memory.clear()

    def entries(self) -> list[Entry]:
        """Reads every file of the folder that has a choice's name, sorted by Problem; other files are none of ours.

        Raises:
            OSError: the folder is not there or cannot be read; the message names it.
        """
        paths = [path for path in self.folder.iterdir() if is_file_name(path.name)]
        found = [_entry(path) for path in paths]
        # A file that another process has removed meanwhile.
        present = [entry for entry in found if entry is not None]
        return sorted(present, key=lambda entry: (entry.problem or "", entry.path.name))

    def remove(self, entry: Entry) -> None:
        """Removes a file that `entries` gave, and forgets its choice.

        Raises:
            OSError: it cannot be removed; the message names it. It is no error when it is gone.
        """
        if entry.choice is not None:
            with self._lock:
                self._memory.pop(entry.choice.key, None)
        entry.path.unlink(missing_ok=True)

    def _remember(self, choice: Choice) -> None:
        with self._lock:
            self._memory[choice.key] = choice
            self._memory.move_to_end(choice.key)
            while len(self._memory) > _MEMORY_LIMIT:
                self._memory.popitem(last=False)

    def _read(self, key: Key) -> Choice | None:
        path = self.folder / key.file_name
        try:
            choice = _read_file(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"read {error.errno}", f"{path} cannot be read: {error}; searching again")
            return None
        except SchemaError as error:
            self._warn(
                f"schema {error.schema}", f"{path} cannot be used: {error}; searching again, also for others like it"
            )
            return None
        except ValueError as error:
            self._warn(
                "content",
                f"{path} is not a choice that can be read: {error}; searching again, also for others like it",
            )
            return None
        if choice.key.text != key.text:
            self._warn("key", f"{path} holds the choice of another key, {choice.key.text}; searching again")
            return None
        return choice

    def _warn(self, cause: str, message: str) -> None:
        """Warns once a cause: a folder may hold hundreds of files with the same fault."""
        with self._lock:
            if cause in self._warned:
                return
            self._warned.add(cause)
        warnings.warn(message, UserWarning, stacklevel=4)


def _read_file(path: Path) -> Choice:
    """Reads a choice; raises OSError, or ValueError when the file is none."""
    try:
        return Choice.from_json(_read_bytes(path))
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    # On a network folder, another machine has replaced the file since it was looked up: asked again, the new one comes.
    return Choice.from_json(_read_bytes(path))


def _read_bytes(path: Path) -> bytes:
    # Not blocking: to open a pipe would wait for who writes into it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_size > _LARGEST_FILE:
            raise ValueError(f"it has {status.st_size} bytes, and no choice has more than {_LARGEST_FILE}")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(_LARGEST_FILE)
    finally:
        os.close(descriptor)


def _entry(path: Path) -> Entry | None:
    try:
        choice = _read_file(path)
    except FileNotFoundError:
        return None
    except SchemaError as error:
        return Entry(path, error.problem, None, str(error))
    except OSError as error:
        return Entry(path, None, None, f"it cannot be read: {error.strerror}")
    except ValueError as error:
        return Entry(path, None, None, str(error))
    if choice.key.file_name != path.name:
        return Entry(path, None, None, "it holds the choice of another key")
    return Entry(path, str(choice.problem), choice)


def _sweep(written: Path) -> None:
    """Removes what killed processes have left unfinished in a folder, a day after.

    Args:
        written: a file of the folder, just written: its time is now, by the clock of the machine that has the folder.
    """
    # Nothing depends on it, and another process may be doing the same.
    with contextlib.suppress(OSError):
        now = written.stat().st_mtime
        for path in written.parent.iterdir():
            if is_unfinished_name(path.name) and now - path.lstat().st_mtime > _UNFINISHED_AFTER_S:
                path.unlink(missing_ok=True)


# Which environment variables named the folder, and its store.
_default: tuple[tuple[str | None, ...], ChoiceStore] | None = None
_default_lock = threading.Lock()


def default_store() -> ChoiceStore:
    """Returns this process's store of the default folder; a new one when $FLCUDA_CHOICES has changed since."""
    global _default
    # `default_folder` takes longer than the rest of a lookup; these decide what it returns.
    given = os.environ.get(FOLDER_VARIABLE)
    place = (given,) if given else (None, os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"))
    known = _default
    if known is not None and known[0] == place:
        return known[1]
    with _default_lock:
        if _default is None or _default[0] != place:
            _default = (place, ChoiceStore())
        return _default[1]
