"""`flcuda find`: the candidates for a convolution, measured and ranked."""

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flcuda import device as devices
from flcuda.finder import search
from flcuda.finder.policy import Policy
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(" + "|".join(_UNITS) + ")")
# a bar for a search that ends at once would only flicker
_SHOW_AFTER_S = 1.0


def configure(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand `find`.

    Args:
        subparsers: of the command's parser.
    """
    parser = subparsers.add_parser(
        "find",
        help="measure and rank every algorithm for a convolution",
        description="Measures every candidate for a convolution, prints them ranked and stores the best.",
        epilog='Example: flcuda find "all n128 c64 56x56 k64 3x3 p1 float16 nhwc"',
    )
    parser.add_argument(
        "problem",
        nargs="+",
        help="a line such as 'forward n128 c64 56x56 k64 3x3 p1 float32 nchw'; the direction is forward, "
        "backward_data, backward_filter, or all for the three",
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--json", action="store_true", help="print JSON: an object; with all, a list")
    parser.add_argument("--deterministic", action="store_true", help="only what gives the same bits in each run")
    parser.add_argument("--workspace-limit", type=_bytes, metavar="SIZE", help="largest workspace, such as 512MiB")
    parser.add_argument("--mode", choices=("find", "heuristic"), default="find", help="heuristic: do not measure")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand.

    Args:
        args: what `configure` declared.

    Returns:
        The exit status: 0.

    Raises:
        ValueError: the line is no Problem, or on the CPU nothing can be used.
        FlcudaError: the device is not here, or on CUDA nothing can be used.
    """
    problems = _problems(" ".join(args.problem))
    device = devices.resolve(args.device)
    if device.kind == "cpu":
        missing = devices.cuda_missing_reason() if args.device == "auto" else None
        why = f" ({missing})" if missing else ""
        print(f"no GPU is used{why}: the reference source runs on the CPU", file=sys.stderr)
    policy = Policy(mode=args.mode, deterministic=args.deterministic, workspace_limit=args.workspace_limit)
    reports = []
    for problem in problems:
        with _progress(problem) as progress:
            reports.append(search.find(problem, policy=policy, device=device, progress=progress))
        if not args.json:
            if len(reports) > 1:
                print()
            print(reports[-1], flush=True)
    if args.json:
        texts = [report.to_json() for report in reports]
        print(texts[0] if len(problems) == 1 else "[" + ",\n".join(texts) + "]")
    return 0


def _problems(line: str) -> list[ConvolutionProblem]:
    words = line.split()
    if "all" not in words:
        return [ConvolutionProblem.parse(line)]
    words.remove("all")
    return [ConvolutionProblem.parse(" ".join([direction, *words])) for direction in DIRECTIONS]


def _bytes(text: str) -> int:
    """Reads a size: a number with or without a unit."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 512MiB, 2GiB or a number of bytes")
    return int(float(match.group(1)) * _UNITS[match.group(2)])


@contextlib.contextmanager
def _progress(problem: ConvolutionProblem) -> Iterator[search.Progress]:
    """Yields the callback of a search, which shows a bar on a terminal's standard error once the search takes long."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn(problem.direction),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task(problem.direction, total=None)
    begin = time.monotonic()
    started = False

    def tell(done: int, total: int) -> None:
        nonlocal started
        if not started and time.monotonic() - begin > _SHOW_AFTER_S:
            bar.start()
            started = True
        bar.update(task, completed=done, total=total)

    try:
        yield tell
    finally:
        if started:
            bar.stop()
