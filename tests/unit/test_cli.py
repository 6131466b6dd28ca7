"""The command itself: help, versions, errors and exit statuses."""

import io
import subprocess
import sys
import types

import pytest

import flcuda
from flcuda import cli
from flcuda.cli import train
from flcuda.errors import DeviceNotFoundError, FlcudaError


def run_command(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> int:
    def run(args: object) -> int:
        if error is not None:
            raise error
        return 0

    monkeypatch.setattr(train, "run", run)
    return cli.main(["train", "--data", "digits"])


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for name in ("train", "find", "choices", "info"):
        assert name in text
    for name in ("train", "find", "choices", "info"):
        with pytest.raises(SystemExit) as stopped:
            cli.main([name, "--help"])
        assert stopped.value.code == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"flcuda {flcuda.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["fly"], ["train"], ["train", "--data", "digits", "--epochs", "0"]])
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: flcuda" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        FlcudaError("it went wrong"),
        DeviceNotFoundError("it went wrong"),
        ValueError("it went wrong"),
        TypeError("it went wrong"),
        OSError("it went wrong"),
    ],
)
def test_errors_become_one_line_and_their_notes(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error.add_note("forward n1 c1 4x4")
    assert run_command(monkeypatch, error) == 2
    output = capsys.readouterr()
    assert output.err == "flcuda: error: it went wrong\nforward n1 c1 4x4\n"
    assert output.out == ""


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "flcuda: interrupted\n"


def test_interrupted_while_the_commands_are_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert cli.main(["info"]) == 130
    assert capsys.readouterr().err == "flcuda: interrupted\n"


def test_names_that_the_terminal_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", terminal)

    def run(args: object) -> int:
        print("Bücher, \udcff")
        return 0

    monkeypatch.setattr(train, "run", run)
    assert cli.main(["train", "--data", "digits"]) == 0
    terminal.flush()
    assert terminal.buffer.getvalue() == b"B\\xfccher, \\udcff\n"


def test_our_own_faults_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(monkeypatch, ZeroDivisionError())
    assert run_command(monkeypatch, None) == 0


def test_help_imports_no_heavy_module() -> None:
    program = (
        "import sys\n"
        "from flcuda import cli\n"
        "try:\n"
        "    cli.main(['--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'cupy', 'numpy.linalg', 'sklearn', 'PIL', 'rich', 'flcuda.nn', 'flcuda.ops'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if {'cupy', 'sklearn', 'PIL', 'flcuda.nn', 'flcuda.ops'} & heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: flcuda" in done.stdout


def test_python_m_flcuda() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flcuda", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"flcuda {flcuda.__version__}\n")


def test_commands_are_modules() -> None:
    for name in ("train", "find", "choices", "info"):
        module = getattr(cli, name, None) or __import__(f"flcuda.cli.{name}", fromlist=["run"])
        assert isinstance(module, types.ModuleType)
        assert callable(module.configure)
        assert callable(module.run)


def test_a_reader_that_has_enough_is_no_error() -> None:
    # so much that it cannot all wait in the pipe
    code = (
        "import sys; import flcuda.cli as cli; from flcuda.cli import info; "
        "info.run = lambda args: print('x' * 10_000_000) or 0; sys.exit(cli.main(['info']))"
    )
    words = f'{sys.executable} -c "{code}" | head -c 1 > /dev/null; exit ${{PIPESTATUS[0]}}'
    ended = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (141, "")
