"""What cuDNN logs: into Python's `logging`, and for one thread into a list.

cuDNN has one log callback for the process. Whoever installs one here calls the callback that was there before, with the
severities that it had asked for, and puts it back in the end.

Note [any thread]: cuDNN calls from whatever thread it works on, and may hold locks of its own. So a callback takes
nothing but Python's interpreter lock and what the handlers of `logging` take; a message that cuDNN logs while a handler
handles one on the same thread is dropped; and no exception gets back into C.

Note [exit]: a callback into an interpreter that is gone ends the process in a crash. Therefore the callback is taken
out before the interpreter exits.

Note [silence]: a process in which nobody asked for a log has no callback and the mask 0, and cuDNN says nothing. Once a
callback was set that cannot be had again: cuDNN (9.28) always keeps errors in the mask, and without a callback prints
them to standard error. What is put back then is a function of C that does nothing.
"""

import atexit
import contextlib
import ctypes
import functools
import logging
import re
import threading
from collections.abc import Iterator
from typing import Any

from flcuda.cudnn import bindings

LOGGER = "flcuda.cudnn"
"""The name of the logger that gets cuDNN's messages."""

# With plain addresses: as a c_char_p the message would end at its first NUL, and it has several lines.
_RAW_CALLBACK: Any = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_LEVELS = {
    int(bindings.CUDNN_SEV_FATAL): logging.CRITICAL,
    int(bindings.CUDNN_SEV_ERROR): logging.ERROR,
    int(bindings.CUDNN_SEV_WARNING): logging.WARNING,
    int(bindings.CUDNN_SEV_INFO): logging.INFO,
}
# Fatal messages come whatever the mask says.
_MASKS = {
    logging.ERROR: bindings.CUDNN_SEV_ERROR_EN,
    logging.WARNING: bindings.CUDNN_SEV_WARNING_EN,
    logging.INFO: bindings.CUDNN_SEV_INFO_EN,
}
_MESSAGE_BYTES = 1 << 20  # where a message without an end is cut off
_lock = threading.Lock()


def message_lines(address: int | None) -> list[str]:
    """Reads a message of cuDNN's callback.

    Args:
        address: of lines that each end with NUL, an empty one at the end; None for no message.

    Returns:
        The lines; what is no UTF-8 is replaced.
    """
    lines: list[str] = []
    at = address or 0
    while at and at - (address or 0) < _MESSAGE_BYTES and (line := ctypes.string_at(at)):
        lines.append(line.decode(errors="replace"))
        at += len(line) + 1
    return lines


class _Callback:
    """A callback that can be put before another one, and taken out again."""

    def __init__(self) -> None:
        self._function = _RAW_CALLBACK(self._called)
        self._as_cudnn = ctypes.cast(self._function, bindings.cudnnCallback_t)
        self._previous: Any = None
        self._previous_mask = 0
        self._restored: tuple[int, Any, Any] = (0, None, None)
        self._here = threading.local()

    def receive(self, severity: int, message: int | None) -> None:
        """Takes one message."""
        raise NotImplementedError

    def _called(self, severity: int, data: int | None, debug: int | None, message: int | None) -> None:
        # See Note [any thread]. This also ends a circle of callbacks that call one another.
        if getattr(self._here, "busy", False):
            return
        self._here.busy = True
        try:
            # The callback before is called also when taking the message failed.
            with contextlib.suppress(Exception):
                self.receive(severity, message)
            previous = self._previous
            if previous is not None and (severity == bindings.CUDNN_SEV_FATAL or self._previous_mask >> severity & 1):
                previous(severity, data, debug, message)
        finally:
            self._here.busy = False

    def install(self, wanted: int) -> None:
        """Puts it in, for the severities of a mask and those that the callback before has asked for."""
        mask, data, previous = ctypes.c_uint(), ctypes.c_void_p(), bindings.cudnnCallback_t()
        bindings.cudnnGetCallback(ctypes.byref(mask), ctypes.byref(data), ctypes.byref(previous))
        there = bool(previous) and _address_of(previous) != _address_of(_silent())
        self._previous = ctypes.cast(previous, _RAW_CALLBACK) if there else None
        self._previous_mask = mask.value if there else 0
        # See Note [silence]. A mask without a callback is that of cuDNN's environment variables.
        silent = not there and (bool(previous) or mask.value == 0)
        self._restored = (0, None, _silent()) if silent else (mask.value, data, previous if there else None)
        bindings.cudnnSetCallback(wanted | mask.value, data, self._as_cudnn)

    def is_installed(self) -> bool:
        """Says whether it is the callback that cuDNN has now."""
        mask, data, now = ctypes.c_uint(), ctypes.c_void_p(), bindings.cudnnCallback_t()
        bindings.cudnnGetCallback(ctypes.byref(mask), ctypes.byref(data), ctypes.byref(now))
        return _address_of(now) == _address_of(self._function)

    def remove(self) -> None:
        """Puts back what was there before."""
        bindings.cudnnSetCallback(*self._restored)
        self._previous = None


@functools.cache
def _silent() -> Any:
    """Gives a function that does nothing, and is there until the process ends: see Note [silence]."""
    return ctypes.cast(ctypes.CDLL(None).abs, bindings.cudnnCallback_t)


def _address_of(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


# --- for one thread, into a list --------------------------------------------------------------------------------------


class _Listener(_Callback):
    """Collects what one thread gets."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = 0
        self.lines: list[str] = []

    def receive(self, severity: int, message: int | None) -> None:
        """Keeps the lines of the thread that listens."""
        # Others may have asked for the log of every call.
        if severity != bindings.CUDNN_SEV_INFO and threading.get_ident() == self.thread:
            self.lines += message_lines(message)


_listener: _Listener | None = None


@contextlib.contextmanager
def listen() -> Iterator[list[str]]:
    """Collects the warnings and errors that cuDNN logs on this thread inside the block; one block at a time.

    Yields:
        The list into which the lines go.
    """
    global _listener
    with _lock:
        if _listener is None:
            _listener = _Listener()
        _listener.thread = threading.get_ident()
        _listener.lines = []
        _listener.install(bindings.CUDNN_SEV_WARNING_EN | bindings.CUDNN_SEV_ERROR_EN)
        try:
            yield _listener.lines
        finally:
            _listener.remove()


# --- into Python's logging --------------------------------------------------------------------------------------------


class _Forwarder(_Callback):
    """Gives messages to the logger."""

    def __init__(self) -> None:
        super().__init__()
        self.level = logging.CRITICAL
        self._logger = logging.getLogger(LOGGER)

    def receive(self, severity: int, message: int | None) -> None:
        """Makes a record of a message."""
        level = _LEVELS.get(severity, logging.INFO)
        if level < self.level or not self._logger.isEnabledFor(level):
            return
        lines = message_lines(message)
        found = re.search(r"function (cudnn\w+)\(", lines[0]) if lines else None
        function = found[1] if found else ""
        details = [line.strip(" ;") for line in (lines[1:] if found else lines) if not _is_frame(line)]
        text = "; ".join(detail for detail in details if detail)
        self._logger.log(level, "%s: %s", function or "cuDNN", text, extra={"cudnn_function": function})


def _is_frame(line: str) -> bool:
    """Says whether a line tells time, process and thread, which a record of `logging` has itself."""
    return line.startswith(("Time: ", "Process="))


_forwarder: _Forwarder | None = None


def log_to_python(level: int | str | None = "WARNING") -> None:
    """Sends what cuDNN logs to the logger "flcuda.cudnn" from now on; loads cuDNN.

    Fatal messages of cuDNN become CRITICAL, errors ERROR, warnings WARNING, and its log of every call INFO, which makes
    each call much slower. A record's attribute `cudnn_function` is the name of the C function, its message says what
    that function has to say. `logging` decides what becomes of it; nothing is added to its configuration.

    A callback that the program set by `cudnnSetCallback` before is called as well, and put back by
    `log_to_python(None)`; one that it sets afterwards takes this one's place.

    Args:
        level: the least level to send, as a number or a name of `logging`; None to stop.

    Raises:
        TypeError, ValueError: level is no level.
        LibraryNotFoundError: there is no cuDNN.
    """
    global _forwarder
    least = None if level is None else _level(level)
    with _lock:
        if _forwarder is None:
            if least is None:
                return
            _forwarder = _Forwarder()
        _forwarder.level = logging.CRITICAL + 1  # not the calls that are made here
        if _forwarder.is_installed():
            _forwarder.remove()
        if least is None:
            return
        _forwarder.install(sum(mask for each, mask in _MASKS.items() if each >= least))
        _forwarder.level = least
    # See Note [exit]; registering it again moves it to the front.
    atexit.unregister(_stop)
    atexit.register(_stop)


def _stop() -> None:
    with contextlib.suppress(Exception):
        log_to_python(None)


def _level(level: int | str) -> int:
    if isinstance(level, bool) or not isinstance(level, int | str):
        raise TypeError(f"level: expected a level of logging or None, got {level!r}")
    if isinstance(level, int):
        return level
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"level: {level!r} is no level of logging: CRITICAL, ERROR, WARNING, INFO")
    return number
