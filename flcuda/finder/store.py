"""Where choices are kept: this process's memory, then a folder with one small JSON file a key.

The store never fails: a folder or a file that cannot be read, written or understood costs one warning and a new search.
"""

import os
import threading
import warnings
from collections import OrderedDict
from pathlib import Path

import platformdirs

from flcuda.finder.choice import Choice, Key

FOLDER_VARIABLE = "FLCUDA_CHOICES"
_MEMORY_LIMIT = 4096


def default_folder() -> Path:
    """Returns the folder of choices: $FLCUDA_CHOICES, else `choices` in the user's cache folder of flcuda."""
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given) if given else Path(platformdirs.user_cache_dir("flcuda")) / "choices"


class ChoiceStore:
    """Choices by key, shared by all threads of this process and, through the folder, by processes.

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
            choice.pin(self.folder)
        except OSError as error:
            self._warn(
                f"write {error.errno}",
                f"the choice for {choice.problem} cannot be stored in {self.folder}: {error}; it is kept in "
                f"memory only, and the next process searches again (set {FOLDER_VARIABLE} to another folder)",
            )

    def clear_memory(self) -> None:
        """Forgets what is in memory; files stay."""
        with self._lock:
            self._memory.clear()

    def _remember(self, choice: Choice) -> None:
        with self._lock:
            self._memory[choice.key] = choice
            self._memory.move_to_end(choice.key)
            while len(self._memory) > _MEMORY_LIMIT:
                self._memory.popitem(last=False)

    def _read(self, key: Key) -> Choice | None:
        path = self.folder / key.file_name
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"read {error.errno}", f"{path} cannot be read: {error}; searching again")
            return None
        try:
            choice = Choice.from_json(text)
        except ValueError as error:
            self._warn(f"content {path}", f"{path} is not a choice that can be read: {error}; searching again")
            return None
        if choice.key.text != key.text:
            self._warn(f"content {path}", f"{path} holds the choice of another key, {choice.key.text}; searching again")
            return None
        return choice

    def _warn(self, cause: str, message: str) -> None:
        """Warns once a cause."""
        with self._lock:
            if cause in self._warned:
                return
            self._warned.add(cause)
        warnings.warn(message, UserWarning, stacklevel=4)


_default: ChoiceStore | None = None
_default_lock = threading.Lock()


def default_store() -> ChoiceStore:
    """Returns this process's store of the default folder; a new one when $FLCUDA_CHOICES has changed since."""
    global _default
    folder = default_folder()
    with _default_lock:
        if _default is None or _default.folder != folder:
            _default = ChoiceStore(folder)
        return _default
