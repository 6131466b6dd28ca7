"""The command `flcuda`: one module a subcommand, each of which parses, calls the library and prints."""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

import flcuda
from flcuda.errors import FlcudaError

_COMMANDS = ("train", "find", "profile", "choices", "data", "info")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the arguments after the command's name; None takes the process's own.

    Returns:
        The exit status: 0, 2 for anything that the user can put right, 130 after Ctrl-C, 141 when whoever read the
        output has closed it, as `head` does.

    Raises:
        SystemExit: by argparse, for `--help`, `--version` (0) and arguments that it refuses (2).
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file's name that the terminal cannot show is no reason to stop.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        parser = argparse.ArgumentParser(
            prog="flcuda", description="Found cuDNN algorithms, and training on them; everything also runs on the CPU."
        )
        parser.add_argument("--version", action="version", version=f"flcuda {flcuda.__version__}")
        subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
        modules = {name: importlib.import_module(f"flcuda.cli.{name}") for name in _COMMANDS}
        for module in modules.values():
            module.configure(subparsers)
        args = parser.parse_args(argv)
        status = int(modules[args.command].run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Nothing went wrong here. What is left in the buffer must not fail again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (FlcudaError, ValueError, TypeError, OSError) as error:
        print(f"flcuda: error: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("flcuda: interrupted", file=sys.stderr)
        return 130
