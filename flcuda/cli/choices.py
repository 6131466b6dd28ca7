"""`flcuda choices`: the stored choices: shown, pinned into a folder that is committed, checked again, removed."""

import argparse
import contextlib
import fnmatch
import io
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from flcuda import device as devices
from flcuda.device import Device
from flcuda.errors import CudnnNotSupportedError, FlcudaError, LibraryNotFoundError
from flcuda.finder import measure, search
from flcuda.finder.choice import Choice, library_version
from flcuda.finder.policy import Policy
from flcuda.finder.problem import Problem
from flcuda.finder.ranking import cost_ms
from flcuda.finder.report import milliseconds
from flcuda.finder.sources import source_named
from flcuda.finder.store import FOLDER_VARIABLE, ChoiceStore, Entry
from flcuda.finder.verify import Verifier
from flcuda.timing import Timing

FAILED = 1
"""Exit status of a check that a choice did not pass, and of a removal that was not confirmed."""

_REGRET_PERCENT = 5.0
# wide enough for any line where nobody reads it on a terminal
_ENDLESS = 1_000_000
_PROBLEM_WIDTH = 20
_PATTERN_HELP = (
    "a shell pattern on the problem's line, such as 'forward*3x3*float16*', or the line of one problem (default: all)"
)

Machine = tuple[tuple[tuple[str, int | str], ...], str]


def configure(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand `choices`.

    Args:
        subparsers: of the command's parser.
    """
    parser = subparsers.add_parser(
        "choices",
        help="show, pin, check and clear the stored choices",
        description="What was found is stored, one small file a choice. This shows, pins, checks and clears them.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    stored = f"the folder of choices (default: ${FOLDER_VARIABLE}, else the user's cache)"

    show = actions.add_parser("show", help="list the stored choices", description="Lists the stored choices.")
    show.add_argument("pattern", nargs="*", help=_PATTERN_HELP)
    show.add_argument("--folder", type=Path, help=stored)

    pin = actions.add_parser(
        "pin",
        help="copy choices into a folder that can be committed",
        description="Copies the stored choices that hold for this machine into a folder that can be committed. With "
        f"${FOLDER_VARIABLE} set to it and the policy's mode 'pinned', they and nothing else are used.",
    )
    pin.add_argument("into", type=Path, metavar="FOLDER", help="where they are copied to; made when it is not there")
    pin.add_argument("pattern", nargs="*", help=_PATTERN_HELP)
    pin.add_argument("--folder", type=Path, help=f"where they come from: {stored}")

    check = actions.add_parser(
        "check",
        help="measure again whether the choices are still good",
        description="Finds anew what every choice for this machine and its libraries answers, under the policy of the "
        "choice, and stores nothing. What seems to have lost is measured twice. The exit status is 1 when a choice no "
        "longer works or has lost too much against today's best.",
    )
    check.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help=stored)
    check.add_argument(
        "--regret",
        type=_percent,
        default=_REGRET_PERCENT,
        metavar="PERCENT",
        help=f"how much longer than the best it may take (default: {_REGRET_PERCENT:g})",
    )

    clear = actions.add_parser(
        "clear",
        help="remove choices",
        description="Removes choices, also those of other machines and of other versions of flcuda; never another "
        "file.",
    )
    clear.add_argument("pattern", nargs="*", help=_PATTERN_HELP)
    clear.add_argument("--folder", type=Path, help=stored)
    clear.add_argument("--yes", action="store_true", help="do it; without, only say what would be removed")

    for action, function in ((show, _show), (pin, _pin), (check, _check), (clear, _clear)):
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(act=function)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand.

    Args:
        args: what `configure` declared.

    Returns:
        The exit status: 0, or `FAILED`.

    Raises:
        ValueError: no choice matches.
        OSError: a folder or file cannot be read, written or removed; the message names it.
        FlcudaError: a check cannot be carried out.
    """
    status: int = args.act(args)
    return status


# --- show -------------------------------------------------------------------------------------------------------------


def _show(args: argparse.Namespace) -> int:
    store = ChoiceStore(args.folder)
    entries = _matching(_entries(store, must_exist=args.folder is not None), args.pattern)
    choices = [entry.choice for entry in entries if entry.choice is not None]
    others = [entry for entry in entries if entry.choice is None]
    if args.json:
        print(json.dumps([_json(entry) for entry in entries], indent=2))
        return 0
    if not entries:
        print(f"no choice{_that_match(args.pattern)} is stored in {store.folder}")
        return 0
    rows = [
        {
            "problem": str(choice.problem),
            "policy": _policy_words(choice.policy),
            "choice": choice.id,
            "ms": _ms(choice.median_ms),
            "device": _device_name(choice),
            "library": choice.library_version,
            "date": str(choice.recorded.get("date", "-"))[:10],
        }
        for choice in choices
    ]
    # what is the same for all is said once: lines are long
    once = [name for name in ("policy", "device", "library") if len({row[name] for row in rows}) == 1]
    if rows:
        print(", ".join(filter(None, (rows[0][name] for name in once))))
        columns = [name for name in rows[0] if name not in once]
        _print_table(columns, [[row[name] for name in columns] for row in rows])
    print(f"{_count(len(choices))} in {store.folder}")
    for entry in others:
        print(f"not usable: {entry.path.name}: {entry.fault}")
    return 0


def _json(entry: Entry) -> dict[str, Any]:
    if entry.choice is None:
        return {"file": str(entry.path), "problem": entry.problem, "fault": entry.fault}
    whole = json.loads(entry.choice.to_json())
    return {"file": str(entry.path), **whole["key"], **whole["choice"], "recorded": whole["recorded"]}


# --- pin --------------------------------------------------------------------------------------------------------------


def _pin(args: argparse.Namespace) -> int:
    store = ChoiceStore(args.folder)
    here = _machines()
    entries = _matching(_entries(store, must_exist=args.folder is not None), args.pattern)
    choices = [entry.choice for entry in entries if entry.choice is not None]
    chosen = [choice for choice in choices if _machine(choice) in here]
    if not chosen:
        elsewhere = f"; {len(choices)} hold for other machines or libraries" if choices else ""
        raise ValueError(
            f"no choice{_that_match(args.pattern)} for this machine is stored in {store.folder}{elsewhere}"
        )
    paths = []
    for choice in chosen:
        try:
            paths.append(choice.pin(args.into))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(args.into / choice.key.file_name)) from error
    if args.json:
        print(json.dumps([str(path) for path in paths], indent=2))
        return 0
    print(f"{_count(len(paths))} pinned in {args.into}")
    print(f"to use nothing else: {FOLDER_VARIABLE}={args.into} and the policy's mode 'pinned'")
    return 0


# --- check ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What a check says of one choice; times in milliseconds, regret as a share of the best time."""

    file: str
    problem: str
    choice: str
    verdict: str  # "good", "lost", "gone" or "not checked"
    reason: str | None = None
    stored_ms: float | None = None
    now_ms: float | None = None
    best: str | None = None
    best_ms: float | None = None
    regret: float | None = None

    @property
    def failed(self) -> bool:
        return self.verdict in ("lost", "gone")


def _check(args: argparse.Namespace) -> int:
    store = ChoiceStore(args.folder)
    entries = _entries(store, must_exist=True)
    if not entries:
        raise ValueError(f"no choice is stored in {store.folder}: there is nothing to check")
    here = _machines()
    limit = args.regret / 100
    verdicts = []
    with _progress(len(entries)) as progress:
        task = progress.task_ids[0]
        for entry in entries:
            progress.update(task, description=(entry.problem or entry.path.name).split(" ")[0])
            verdicts.append(_verdict(entry, here, limit))
            progress.advance(task)
    failed = sum(verdict.failed for verdict in verdicts)
    if args.json:
        value = {"folder": str(store.folder), "regret_limit": limit, "failed": failed}
        print(json.dumps({**value, "choices": [asdict(verdict) for verdict in verdicts]}, indent=2))
    else:
        _print_verdicts(verdicts, store.folder, args.regret)
    return FAILED if failed else 0


def _verdict(entry: Entry, here: dict[Machine, Device], limit: float) -> _Verdict:
    choice = entry.choice
    if choice is None:
        return _Verdict(str(entry.path), entry.problem or "-", "-", "gone", entry.fault)
    told = _Verdict(str(entry.path), str(choice.problem), choice.id, "not checked", None, stored_ms=choice.median_ms)
    device = here.get(_machine(choice))
    if device is None:
        return replace(told, reason=_elsewhere(choice, here))
    try:
        for name in choice.key.sources:
            source_named(name)
    except ValueError as error:
        return replace(told, reason=str(error))
    return _measured(told, choice, device, limit)


def _measured(told: _Verdict, choice: Choice, device: Device, limit: float) -> _Verdict:
    """Finds anew; what seems to have lost once more, since it may have been disturbed."""
    try:
        found = _found_anew(told, choice, device, limit)
        if found.verdict != "lost":
            return found
        again = _found_anew(told, choice, device, limit)
    except MemoryError as error:
        raise FlcudaError(f"memory does not suffice to check {told.file} ({choice.problem}): {error}") from error
    better = again.verdict != "lost" or (again.regret or 0.0) < (found.regret or 0.0)
    return again if better else found


def _found_anew(told: _Verdict, choice: Choice, device: Device, limit: float) -> _Verdict:
    # what a heuristic chose is measured too: it may be no worse than what can be had
    policy = replace(choice.policy, mode="find")
    try:
        asked = choice.key.sources
        report = search.find(choice.problem, policy=policy, device=device, sources=asked, store=False, details=False)
    except (CudnnNotSupportedError, ValueError) as error:
        return replace(told, verdict="gone", reason=str(error))
    best = report.usable[0]
    if best.timing is None:
        raise AssertionError(f"{best.label} was not measured")
    best_ms = _cost(best.timing, policy, device)
    mine = next((row for row in report.rows if row.candidate.identity == choice.identity), None)
    if mine is not None:
        timing, reason = mine.timing, mine.reason
    else:
        timing, reason = _measured_alone(choice, policy, device)
    told = replace(told, best=best.label, best_ms=best_ms)
    if reason is not None or timing is None:
        return replace(told, verdict="gone", reason=reason)
    now_ms = _cost(timing, policy, device)
    # a tie goes to the lower name, so that the first need not be the fastest
    regret = max(0.0, now_ms / best_ms - 1)
    if regret <= limit:
        return replace(told, verdict="good", now_ms=now_ms, regret=regret)
    return replace(told, verdict="lost", reason=f"the best is {best.label}", now_ms=now_ms, regret=regret)


def _measured_alone(choice: Choice, policy: Policy, device: Device) -> tuple[Timing | None, str | None]:
    """Measures a choice that the search did not come by, as a wide one may miss what another one found; or says why."""
    problem = choice.problem
    with device.use():
        try:
            candidate = source_named(choice.source).restore(problem, choice, device)
        except (FlcudaError, ValueError, LookupError) as error:
            return None, f"it is no longer offered: {error}"
        sets = measure.with_memory(lambda: measure.operand_sets(problem, device, policy), device)
        inputs = sets[0][: len(problem.inputs)]
        verifier = measure.with_memory(lambda: Verifier(problem, inputs, device), device)
        (found,) = measure.measure([candidate], sets, device, policy, verifier)
    return found.timing, found.reason


def _cost(timing: Timing, policy: Policy, device: Device) -> float:
    """Gives what a search ranks by."""
    return timing.low_ms if device.kind == "cpu" else cost_ms(timing, policy)


def _print_verdicts(verdicts: Sequence[_Verdict], folder: Path, percent: float) -> None:
    columns = ["problem", "choice", "verdict", "ms", "now ms", "regret"]
    _print_table(
        columns,
        [
            [
                verdict.problem,
                verdict.choice,
                verdict.verdict,
                _ms(verdict.stored_ms),
                _ms(verdict.now_ms),
                "-" if verdict.regret is None else f"{100 * verdict.regret:.1f} %",
            ]
            for verdict in verdicts
        ],
    )
    for verdict in verdicts:
        if verdict.reason is not None:
            print(f"{verdict.verdict}: {Path(verdict.file).name}: {verdict.reason}")
    counts = {word: sum(verdict.verdict == word for verdict in verdicts) for word in ("good", "lost", "gone")}
    skipped = sum(verdict.verdict == "not checked" for verdict in verdicts)
    print(
        f"{folder}: {counts['good']} good, {counts['lost']} lost more than {percent:g} %, {counts['gone']} gone, "
        f"{skipped} not checked"
    )


def _elsewhere(choice: Choice, here: dict[Machine, Device]) -> str:
    """Says what about a choice is not here."""
    versions = sorted({version for model, version in here if model == choice.key.device_model})
    if versions:
        return f"it is of {choice.library_version}, here is {', '.join(versions)}"
    words = ", ".join(f"{name} {value}" for name, value in choice.key.device_model if name != "name")
    return f"it is of another machine: {_device_name(choice)} ({words})"


# --- clear ------------------------------------------------------------------------------------------------------------


def _clear(args: argparse.Namespace) -> int:
    store = ChoiceStore(args.folder)
    entries = _matching(_entries(store, must_exist=args.folder is not None), args.pattern)
    # a file with a choice's name that is none of any version may be anybody's
    ours = [entry for entry in entries if entry.problem is not None]
    others = [entry for entry in entries if entry.problem is None]
    if args.yes:
        for entry in ours:
            store.remove(entry)
    if args.json:
        print(json.dumps({"removed": args.yes, "files": [str(entry.path) for entry in ours]}, indent=2))
    else:
        for entry in ours:
            print(f"{'removed' if args.yes else 'would remove'} {entry.path.name}: {entry.problem}")
        for entry in others:
            print(f"left {entry.path.name}: {entry.fault}")
        if not ours:
            print(f"no choice{_that_match(args.pattern)} is stored in {store.folder}")
    if args.yes or not ours:
        return 0
    print(f"nothing was removed from {store.folder}: say --yes to remove {_count(len(ours))}", file=sys.stderr)
    return FAILED


# --- what they share --------------------------------------------------------------------------------------------------


def _entries(store: ChoiceStore, *, must_exist: bool) -> list[Entry]:
    """Reads the folder; the default one need not be there yet."""
    try:
        return store.entries()
    except FileNotFoundError:
        if must_exist:
            raise
        return []


def _matching(entries: Iterable[Entry], words: Sequence[str]) -> list[Entry]:
    """Gives the entries whose problem's line matches; without words all."""
    if not words:
        return list(entries)
    pattern = " ".join(words)
    whole = None
    # a line of a problem need not be written as it is stored
    with contextlib.suppress(ValueError, TypeError):
        whole = str(Problem.parse(pattern))
    return [
        entry
        for entry in entries
        if entry.problem is not None and (entry.problem == whole or fnmatch.fnmatchcase(entry.problem, pattern))
    ]


def _that_match(words: Sequence[str]) -> str:
    return f" that matches {' '.join(words)!r}" if words else ""


def _machine(choice: Choice) -> Machine:
    return choice.key.device_model, choice.key.library_version


def _machines() -> dict[Machine, Device]:
    """Gives what choices hold for here: the models of the devices, each with the library that computes on it."""
    found: dict[Machine, Device] = {}
    places = [devices.CPU]
    if devices.cuda_available():
        count = devices.cupy().cuda.runtime.getDeviceCount()
        places += [Device("cuda", index) for index in range(count)]
    for place in places:
        try:
            version = library_version(place)
        except LibraryNotFoundError as error:
            print(f"without cuDNN, {place} is left out: {error}", file=sys.stderr)
            continue
        found.setdefault((tuple(sorted(devices.device_model(place).items())), version), place)
    return found


def _device_name(choice: Choice) -> str:
    return str(choice.device_model.get("name", "unknown"))


def _policy_words(policy: Policy) -> str:
    """Says what a policy asks beyond the default one."""
    default = Policy().to_json()
    asked = {name: value for name, value in policy.to_json().items() if value != default[name]}
    return " ".join(name if value is True else f"{name}={value}" for name, value in asked.items())


def _ms(value: float | None) -> str:
    return "-" if value is None else milliseconds(value)


def _count(number: int) -> str:
    return f"{number} choice{'' if number == 1 else 's'}"


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table: as wide as the terminal, or elsewhere a line a row, for other programs to read."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        number = column in ("ms", "now ms", "regret")
        table.add_column(
            column,
            justify="right" if number else "left",
            no_wrap=number or column == "date",
            overflow="fold",
            min_width=_PROBLEM_WIDTH if column == "problem" else None,
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    text = io.StringIO()
    width = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else _ENDLESS
    Console(file=text, width=width, force_terminal=False, color_system=None, highlight=False).print(table)
    print("\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n")))


def _progress(total: int) -> Progress:
    """Makes the bar of a check, shown on a terminal's standard error."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    bar.add_task("", total=total)
    return bar


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage; write 5")
    return value
