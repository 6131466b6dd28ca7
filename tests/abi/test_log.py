"""cuDNN's log in Python's logging: levels, names, any thread, other callbacks, and the end of the interpreter."""

import ctypes
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graph_cases
import pytest

from flcuda import cudnn
from flcuda.cudnn import bindings, log
from flcuda.cudnn.device_properties import DeviceProperties
from flcuda.errors import CudnnError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    cudnn.log_to_python(None)
    assert callback()[1] is None


def callback() -> tuple[int, int | None]:
    """The mask, and the address of the callback that cuDNN has."""
    mask, data, function = ctypes.c_uint(), ctypes.c_void_p(), bindings.cudnnCallback_t()
    bindings.cudnnGetCallback(ctypes.byref(mask), ctypes.byref(data), ctypes.byref(function))
    address = ctypes.cast(function, ctypes.c_void_p).value
    return mask.value, None if address == ctypes.cast(log._silent(), ctypes.c_void_p).value else address


def fail() -> None:
    """Makes cuDNN log an error or a warning: it wants a tensor without data type finalized."""
    descriptor = bindings.cudnnBackendDescriptor_t()
    bindings.cudnnBackendCreateDescriptor(bindings.CUDNN_BACKEND_TENSOR_DESCRIPTOR, ctypes.byref(descriptor))
    try:
        with pytest.raises(CudnnError):
            bindings.cudnnBackendFinalize(descriptor)
    finally:
        bindings.cudnnBackendDestroyDescriptor(descriptor)


def test_warnings_and_errors_arrive_with_the_function(caplog: pytest.LogCaptureFixture) -> None:
    cudnn.log_to_python("warning")
    with caplog.at_level(logging.DEBUG, log.LOGGER):
        fail()
    assert {record.name for record in caplog.records} == {"flcuda.cudnn"}
    assert {record.levelno for record in caplog.records} <= {logging.WARNING, logging.ERROR}
    record = next(record for record in caplog.records if record.cudnn_function == "cudnnBackendFinalize")  # type: ignore[attr-defined]
    assert record.getMessage().startswith("cudnnBackendFinalize: ")
    assert "CUDNN_STATUS_BAD_PARAM" in record.getMessage()
    assert "Thread=" not in record.getMessage()


def test_info_is_every_call_and_comes_only_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, log.LOGGER):
        cudnn.log_to_python(logging.INFO)
        fail()
        called = [record.cudnn_function for record in caplog.records if record.levelno == logging.INFO]  # type: ignore[attr-defined]
        assert {"cudnnBackendCreateDescriptor", "cudnnBackendFinalize", "cudnnBackendDestroyDescriptor"} <= set(called)
        caplog.clear()
        cudnn.log_to_python("ERROR")
        fail()
        assert all(record.levelno >= logging.ERROR for record in caplog.records)
        caplog.clear()
        cudnn.log_to_python(None)
        fail()
        assert not caplog.records


def test_the_logger_decides(caplog: pytest.LogCaptureFixture) -> None:
    cudnn.log_to_python("INFO")
    with caplog.at_level(logging.CRITICAL, log.LOGGER):
        fail()
    assert not caplog.records


@pytest.mark.parametrize(
    ("level", "error"), [("LOUD", ValueError), (True, TypeError), (1.5, TypeError), (b"INFO", TypeError)]
)
def test_bad_levels(level: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="level: "):
        cudnn.log_to_python(level)


def test_a_foreign_callback_is_called_too_and_put_back(caplog: pytest.LogCaptureFixture) -> None:
    """With the severities that it asked for only, and with its own data."""
    received: list[tuple[int, int]] = []

    def receive(severity: int, data: int, debug: Any, message: bytes) -> None:
        received.append((severity, data))

    foreign = bindings.cudnnCallback_t(receive)
    bindings.cudnnSetCallback(bindings.CUDNN_SEV_ERROR_EN | bindings.CUDNN_SEV_WARNING_EN, 77, foreign)
    before = callback()
    try:
        with caplog.at_level(logging.DEBUG, log.LOGGER):
            cudnn.log_to_python("INFO")
            assert callback() != before
            cudnn.log_to_python("INFO")
            fail()
        assert any(record.levelno == logging.INFO for record in caplog.records)
        assert received
        assert {severity for severity, _ in received} <= {bindings.CUDNN_SEV_ERROR, bindings.CUDNN_SEV_WARNING}
        assert {data for _, data in received} == {77}
        cudnn.log_to_python(None)
        assert callback() == before
        # One that is set afterwards takes its place, and stays.
        cudnn.log_to_python("INFO")
        bindings.cudnnSetCallback(bindings.CUDNN_SEV_ERROR_EN, 78, foreign)
        replaced = callback()
        cudnn.log_to_python(None)
        assert callback() == replaced
    finally:
        bindings.cudnnSetCallback(0, None, None)


def test_reasons_are_still_found_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    built = graph_cases.convolution().build(device=DeviceProperties.from_profile("h200"))
    expected = built.why_not()
    with caplog.at_level(logging.DEBUG, log.LOGGER):
        cudnn.log_to_python("WARNING")
        forwarding = callback()
        assert built.why_not() == expected
        assert callback() == forwarding
        cudnn.log_to_python("INFO")
        assert built.why_not() == expected
    assert any("Engine" in record.getMessage() for record in caplog.records)


def test_handlers_that_fail_or_call_cudnn_do_no_harm() -> None:
    class Wild(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record)
            fail()
            raise RuntimeError("a handler's own fault")

    seen: list[logging.LogRecord] = []
    logger = logging.getLogger(log.LOGGER)
    wild = Wild()
    logger.addHandler(wild)
    try:
        cudnn.log_to_python("WARNING")
        fail()
        fail()
    finally:
        logger.removeHandler(wild)
    assert len(seen) >= 2


def test_from_many_threads(caplog: pytest.LogCaptureFixture) -> None:
    together = threading.Barrier(4)

    def work() -> None:
        together.wait(30)
        for _ in range(20):
            fail()
        together.wait(30)

    with caplog.at_level(logging.DEBUG, log.LOGGER):
        cudnn.log_to_python("INFO")
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    made = [record for record in caplog.records if record.cudnn_function == "cudnnBackendDestroyDescriptor"]  # type: ignore[attr-defined]
    assert len({record.thread for record in made}) == 4
    assert len(made) >= 80


def test_text_that_is_no_text() -> None:
    memory = ctypes.create_string_buffer(b"I! function cudnnX() called:\0  a \xff\xfe b\0\0never read\0")
    lines = log.message_lines(ctypes.addressof(memory))
    assert lines == ["I! function cudnnX() called:", "  a \ufffd\ufffd b"]
    assert log.message_lines(None) == []


def test_the_end_of_the_interpreter() -> None:
    """A thread that calls cuDNN all the time must not crash the process when it exits."""
    script = """
import ctypes, logging, threading
from flcuda import cudnn
from flcuda.cudnn import bindings
logging.basicConfig(level="INFO", filename="/dev/null")
cudnn.log_to_python("INFO")
def work():
    while True:
        descriptor = bindings.cudnnBackendDescriptor_t()
        bindings.cudnnBackendCreateDescriptor(bindings.CUDNN_BACKEND_TENSOR_DESCRIPTOR, ctypes.byref(descriptor))
        bindings.cudnnBackendDestroyDescriptor(descriptor)
threading.Thread(target=work, daemon=True).start()
work_for = threading.Event()
work_for.wait(0.3)
print("done", flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("level", ["", "1", "2"])
def test_what_cudnn_prints_is_as_before(level: str) -> None:
    """Nothing, or what cuDNN's environment variables ask for."""
    script = """
import ctypes, sys
from flcuda import cudnn
from flcuda.cudnn import bindings, log
def fail():
    sys.stderr.write("then\\n")
    sys.stderr.flush()
    descriptor = bindings.cudnnBackendDescriptor_t()
    bindings.cudnnBackendCreateDescriptor(bindings.CUDNN_BACKEND_TENSOR_DESCRIPTOR, ctypes.byref(descriptor))
    try:
        bindings.cudnnBackendFinalize(descriptor)
    except cudnn_error:
        bindings.cudnnBackendDestroyDescriptor(descriptor)
def mask():
    found, data, function = ctypes.c_uint(), ctypes.c_void_p(), bindings.cudnnCallback_t()
    bindings.cudnnGetCallback(ctypes.byref(found), ctypes.byref(data), ctypes.byref(function))
    return found.value
from flcuda.errors import CudnnError as cudnn_error
before = mask()
fail()
for _ in range(2):
    with log.listen() as lines:
        fail()
    assert lines
    fail()
cudnn.log_to_python("INFO")
cudnn.log_to_python(None)
fail()
assert before in (0, mask())
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    for name in [name for name in environment if name.startswith("CUDNN_LOG")]:
        del environment[name]
    if level:
        environment |= {"CUDNN_LOGLEVEL_DBG": level, "CUDNN_LOGDEST_DBG": "stderr"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    printed = ["CuDNN" in part for part in done.stderr.split("then\n")[1:]]
    # Before, twice while it is listened to and after, and at the end.
    heard = bool(level)
    assert printed == [heard, False, heard, False, heard, heard]


def test_nothing_is_loaded_by_the_name() -> None:
    code = (
        "import sys; from flcuda import cudnn; cudnn.log_to_python\n"
        "cudnn.log_to_python; print(cudnn.is_loaded(), 'log_to_python' in dir(cudnn))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "False True\n", done.stderr
