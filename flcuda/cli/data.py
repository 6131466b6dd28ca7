"""`flcuda data`: image folders: everything read once and what is broken listed, and the rate of each stage."""

import argparse
import collections
import contextlib
import io
import json
import os
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from flcuda.data import Decoder
    from flcuda.device import Device

BROKEN = 1
"""Exit status of a check that found something broken."""

# wide enough for any line where nobody reads it on a terminal
_ENDLESS = 1_000_000
# A bar is shown for what takes longer.
_PATIENCE_S = 1.0
_BATCH = 256
_SECONDS = 2.0
# Of the images that are trained with.
_SIDE = 224
_LARGEST_SAMPLE = 1024
_UPRIGHT = 1
_SUFFIXES = {
    "JPEG": (".jpg", ".jpeg"),
    "PNG": (".png",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "WEBP": (".webp",),
}


def configure(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand `data`.

    Args:
        subparsers: of the command's parser.
    """
    parser = subparsers.add_parser(
        "data",
        help="check a folder of images, and measure how fast it is read",
        description="Checks a folder of image files, and measures how fast it is read and decoded.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="read everything once and list what is broken",
        description="Reads and decodes every image file below a folder, by Pillow on the CPU, and lists what is "
        "broken and what is unusual. The exit status is 1 when something is broken.",
    )
    bench = actions.add_parser(
        "bench",
        help="print the rate of each stage",
        description="Measures each stage alone, from the files to a batch to train with. On a GPU nvImageCodec decodes "
        "where it is installed, else Pillow; the last line says which. Files that were read before come from the "
        "system's memory, not from the disk.",
    )
    for action in (check, bench):
        action.add_argument("path", type=Path, metavar="PATH", help="a folder of image files")
        action.add_argument("--workers", type=_count, metavar="N", help="threads (default: one a core)")
        action.add_argument("--json", action="store_true", help="print JSON")
    bench.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    bench.add_argument("--batch", type=_count, default=_BATCH, metavar="N", help=f"images a batch (default: {_BATCH})")
    bench.add_argument(
        "--seconds",
        type=_seconds,
        default=_SECONDS,
        metavar="S",
        help=f"how long each stage is measured, after two batches (default: {_SECONDS:g})",
    )
    check.set_defaults(act=_check)
    bench.set_defaults(act=_bench)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand.

    Args:
        args: what `configure` declared.

    Returns:
        The exit status: 0, or `BROKEN`.

    Raises:
        ValueError: no image file.
        OSError: the folder is not there or cannot be read.
        FlcudaError: no such device.
    """
    if not args.path.exists():
        raise FileNotFoundError(f"{args.path}: no such folder")
    if not args.path.is_dir():
        raise NotADirectoryError(f"{args.path} is not a folder")
    status: int = args.act(args)
    return status


# --- check ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Finding:
    """What is known of one file."""

    path: Path
    format: str = ""
    mode: str = ""
    height: int = 0
    width: int = 0
    fault: str = ""
    oddities: tuple[str, ...] = ()


def _check(args: argparse.Namespace) -> int:
    files, folders, others = _image_files(args.path)
    if not files and not folders:
        raise ValueError(f"{args.path}: no image files in it")
    with _Bar("checking", len(files)) as bar, warnings.catch_warnings():
        # Pillow's remarks on what it can nevertheless show.
        warnings.simplefilter("ignore")
        findings = list(_in_threads(_examined, files, args.workers, bar.advance))
    findings += [_Finding(folder, fault="is a folder, not an image") for folder in folders]
    broken = [finding for finding in findings if finding.fault]
    whole = [finding for finding in findings if not finding.fault]
    layout = _layout(args.path)
    if args.json:
        print(json.dumps(_check_json(args.path, whole, broken, others, layout), indent=2))
        return BROKEN if broken else 0
    kinds = collections.Counter((finding.format, finding.mode) for finding in whole)
    if kinds:
        _print_table(
            ("format", "pixels", "images"),
            [(kind, mode, f"{number:,}") for (kind, mode), number in kinds.most_common()],
        )
        short = [min(finding.height, finding.width) for finding in whole]
        _print(f"shorter side: {min(short)} to {max(short)}, median {statistics.median_low(short)}")
    odd = collections.Counter(oddity for finding in whole for oddity in finding.oddities)
    for oddity, number in odd.most_common():
        example = next(finding.path for finding in whole if oddity in finding.oddities)
        _print(f"{number:,} {oddity}, such as {example}")
    _print(layout)
    if others:
        _print(f"{others:,} other files were left alone")
    for finding in broken:
        _print(f"broken: {finding.path} {finding.fault}")
    _print(
        f"{len(broken):,} of {len(findings):,} files are broken" if broken else f"all {len(whole):,} images are whole"
    )
    return BROKEN if broken else 0


def _check_json(
    path: Path, whole: Sequence[_Finding], broken: Sequence[_Finding], others: int, layout: str
) -> dict[str, Any]:
    kinds = collections.Counter((finding.format, finding.mode) for finding in whole)
    return {
        "path": str(path),
        "images": len(whole),
        "broken": [{"file": str(finding.path), "fault": finding.fault} for finding in broken],
        "kinds": [{"format": kind, "mode": mode, "images": n} for (kind, mode), n in kinds.most_common()],
        "unusual": [
            {"file": str(finding.path), "what": list(finding.oddities)} for finding in whole if finding.oddities
        ],
        "sizes": [[finding.height, finding.width] for finding in whole],
        "other_files": others,
        "layout": layout,
    }


def _examined(path: Path) -> _Finding:
    from flcuda.data.decode import decode, read_header
    from flcuda.errors import DecodeError

    if path.exists() and not path.is_file():
        # Reading a pipe would wait for ever.
        return _Finding(path, fault="is no file")
    try:
        content = path.read_bytes()
        header = read_header(content, str(path))
        decode(content, name=str(path))
    except DecodeError as error:
        return _Finding(path, fault=error.reason)
    except OSError as error:
        return _Finding(path, fault=f"cannot be read: {error.strerror or error}")
    oddities = []
    if path.suffix.lower() not in _SUFFIXES[header.format]:
        oddities.append(f"{header.format} files named {path.suffix}")
    if header.orientation != _UPRIGHT:
        oddities.append("turned by EXIF")
    return _Finding(path, header.format, header.mode, header.height, header.width, oddities=tuple(oddities))


def _layout(path: Path) -> str:
    """Says how the folder would be divided for training."""
    from flcuda.data.folder import split_folder

    try:
        split = split_folder(path)
    except (ValueError, OSError) as error:
        return f"not to be trained from: {error}"
    train, test = len(split.train[0]), len(split.test[0])
    return f"{len(split.classes)} classes, {train:,} training and {test:,} test images: {split.note}"


# --- bench ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rate:
    """What one stage does a second."""

    stage: str
    images: int
    seconds: float
    bytes: int

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds

    @property
    def mib_per_second(self) -> float:
        return self.bytes / self.seconds / (1 << 20)


def _bench(args: argparse.Namespace) -> int:
    from flcuda.data.decode import Decoder
    from flcuda.device import resolve

    device = resolve(args.device)
    workers = args.workers or os.cpu_count() or 1
    files = [path for path in _image_files(args.path)[0] if path.is_file()]
    if not files:
        raise ValueError(f"{args.path}: no image files in it")
    step = max(1, len(files) // _LARGEST_SAMPLE)
    sample = files[::step][:_LARGEST_SAMPLE]
    # Where it warns of a nvImageCodec that does not start.
    final = _final_decoder(device, workers)
    with _Bar("measuring", 9 if device.kind == "cuda" else 7) as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        contents: list[bytes] = []
        with Decoder(threads=workers, on_error="skip") as decoder:
            for start in range(0, len(sample), args.batch):
                contents += _whole(decoder, sample[start : start + args.batch])
        broken = len(sample) - len(contents)
        bar.advance()
        if not contents:
            raise ValueError(f"{args.path}: none of {len(sample)} image files can be decoded")
        with device.use(), final:
            rates = list(_measured(sample, contents, args, workers, final, bar.advance))
            description = final.description
    mean = sum(map(len, contents)) / len(contents)
    if args.json:
        result = {
            "path": str(args.path),
            "files": len(files),
            "sample": len(contents),
            "broken": broken,
            "mean_file_bytes": mean,
            "device": str(device),
            "decoder": description,
            "workers": workers,
            "batch": args.batch,
            "stages": [
                {
                    "stage": rate.stage,
                    "images_per_second": rate.images_per_second,
                    "mib_per_second": rate.mib_per_second,
                    "images": rate.images,
                    "seconds": rate.seconds,
                }
                for rate in rates
            ],
        }
        print(json.dumps(result, indent=2))
        return BROKEN if broken else 0
    _print_table(
        ("stage", "images/s", "MiB/s"),
        [(rate.stage, f"{rate.images_per_second:,.0f}", f"{rate.mib_per_second:,.0f}") for rate in rates],
    )
    _print(f"{len(contents):,} of {len(files):,} files, {mean / 1024:.0f} KiB in the mean; {workers} threads")
    _print(f"{device}: {description}")
    if broken:
        _print(f"{broken:,} files cannot be read or decoded: see flcuda data check")
    return BROKEN if broken else 0


def _final_decoder(device: "Device", workers: int) -> "Decoder":
    """Returns the decoder whose images are trained with: it has threads of its own where Pillow decodes."""
    from flcuda.data.decode import Decoder

    decoder = Decoder(device, on_error="skip")
    return decoder if decoder.uses_nvimgcodec else Decoder(device, threads=workers, on_error="skip", nvimgcodec=False)


def _whole(decoder: "Decoder", files: Sequence[Path]) -> list[bytes]:
    """Reads files and returns those that are images."""
    from flcuda.errors import DecodeError

    contents = []
    for file in files:
        with contextlib.suppress(OSError):
            contents.append(file.read_bytes())
    images = decoder.decode_on_host(contents)
    return [content for content, image in zip(contents, images, strict=True) if not isinstance(image, DecodeError)]


def _measured(
    files: Sequence[Path],
    contents: Sequence[bytes],
    args: argparse.Namespace,
    workers: int,
    final: "Decoder",
    done: Callable[[], None],
) -> Iterator[_Rate]:
    """Measures the stages in the order of the data; each on what the one before it gives."""
    import numpy as np

    from flcuda.data.decode import Decoder
    from flcuda.data.folder import PHOTOGRAPH_MEAN, PHOTOGRAPH_STD
    from flcuda.data.images import ImageBatch
    from flcuda.data.transforms import Augment, Draws
    from flcuda.device import synchronize

    size, place = args.batch, final.device

    def timed(stage: str, size: int, items: Sequence[Any], work: Callable[[Sequence[Any]], int]) -> _Rate:
        rate = _timed(stage, args.seconds, size, items, work, lambda: synchronize(place))
        done()
        return rate

    with ThreadPoolExecutor(workers) as pool:
        yield timed(f"read files, {workers} threads", size, files, lambda part: sum(pool.map(_length, part)))
    yield timed("decode, Pillow, 1 thread", min(size, 32), contents, _decoding(Decoder(on_error="skip")))
    with Decoder(threads=workers, on_error="skip") as many:
        yield timed(f"decode, Pillow, {workers} threads", size, contents, _decoding(many))
        images = [i for i in many.decode_on_host(contents[:size]) if not isinstance(i, Exception)]
    batch = ImageBatch.of(images)
    yield timed("put a batch together", len(images), images, lambda part: ImageBatch.of(part).nbytes)

    def copy(_: Sequence[Any]) -> int:
        place.xp.asarray(batch.pixels)
        return batch.nbytes

    def augment(part: Sequence[bytes], decoded: ImageBatch | None = None) -> int:
        found = final.decode(part).batch if decoded is None else decoded
        if found is not None:
            change(found, Draws(0, 0, np.arange(len(found))))
        return sum(map(len, part))

    if place.kind == "cuda":
        yield timed("copy a batch to the device", len(images), images, copy)
        who = "nvImageCodec" if final.uses_nvimgcodec else f"Pillow, {workers} threads"
        yield timed(f"decode, {who}, to the device", size, contents, _decoding(final))
    change = Augment(_SIDE, mean=PHOTOGRAPH_MEAN, std=PHOTOGRAPH_STD)
    ready = final.decode(contents[:size]).batch
    stage = f"augment to {_SIDE}x{_SIDE}"
    yield timed(stage, size, contents[:size], lambda part: augment(part, ready))
    yield timed(f"decode and {stage}", size, contents, augment)


def _length(path: Path) -> int:
    try:
        return len(path.read_bytes())
    except OSError:
        return 0


def _decoding(decoder: "Decoder") -> Callable[[Sequence[bytes]], int]:
    def decode(part: Sequence[bytes]) -> int:
        decoder.decode(part)
        return sum(map(len, part))

    return decode


def _timed(
    stage: str,
    seconds: float,
    size: int,
    items: Sequence[Any],
    work: Callable[[Sequence[Any]], int],
    finish: Callable[[], None],
) -> _Rate:
    """Works on the items in batches, over and over, for so long; the first two batches are not counted.

    The device is waited for at the end only, as in training: it works on a batch while the host prepares the next.
    """
    batches = [items[start : start + size] for start in range(0, len(items), size)]
    for place in range(2):
        work(batches[place % len(batches)])
    finish()
    count = handled = place = 0
    start = time.perf_counter()
    while not place or time.perf_counter() - start < seconds:
        part = batches[place % len(batches)]
        handled += work(part)
        count += len(part)
        place += 1
    finish()
    return _Rate(stage, count, time.perf_counter() - start, handled)


# --- what they share --------------------------------------------------------------------------------------------------


def _image_files(path: Path) -> tuple[list[Path], list[Path], int]:
    """Lists image files and folders that are called like one, and counts other files; hidden ones are none of them."""
    from flcuda.data.decode import IMAGE_SUFFIXES

    files: list[Path] = []
    folders: list[Path] = []
    others = 0
    seen: set[tuple[int, int]] = set()
    for parent, names, found in os.walk(path, followlinks=True, onerror=_raise):
        state = Path(parent).stat()
        if (state.st_dev, state.st_ino) in seen:
            # A link back to a folder above.
            names.clear()
            continue
        seen.add((state.st_dev, state.st_ino))
        names[:] = sorted(name for name in names if not name.startswith("."))
        folders += [Path(parent, name) for name in names if Path(name).suffix.lower() in IMAGE_SUFFIXES]
        for name in sorted(found):
            if name.startswith("."):
                continue
            if Path(name).suffix.lower() in IMAGE_SUFFIXES:
                files.append(Path(parent, name))
            else:
                others += 1
    return files, folders, others


def _raise(error: OSError) -> None:
    raise error


def _in_threads(
    work: Callable[[Path], _Finding], items: Sequence[Path], workers: int | None, done: Callable[[], None]
) -> Iterator[_Finding]:
    """Works in threads, a few items ahead; the results come in the order of the items."""
    count = workers or os.cpu_count() or 1
    pool = ThreadPoolExecutor(count)
    try:
        ahead = collections.deque(pool.submit(work, item) for item in items[: 8 * count])
        for item in items[8 * count :]:
            yield ahead.popleft().result()
            done()
            ahead.append(pool.submit(work, item))
        while ahead:
            yield ahead.popleft().result()
            done()
    finally:
        pool.shutdown(cancel_futures=True)


class _Bar:
    """A progress bar on a terminal's standard error, for what takes longer than a second."""

    def __init__(self, words: str, total: int) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(words, total=total)
        self._timer = threading.Timer(_PATIENCE_S, self._bar.start)
        self._timer.daemon = True

    def __enter__(self) -> "_Bar":
        self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._timer.cancel()
        self._timer.join()
        self._bar.stop()

    def advance(self) -> None:
        """Counts one more."""
        self._bar.advance(self._task)


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table: within the terminal, or elsewhere a line a row."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        number = column in ("images", "images/s", "MiB/s")
        table.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    _print_lines(table)


def _print(text: str) -> None:
    """Prints a line: within the terminal, and without characters that a terminal would obey or cannot show."""
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    _print_lines(Text("".join(shown), overflow="fold"))


def _print_lines(content: Table | Text) -> None:
    text = io.StringIO()
    width = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else _ENDLESS
    console = Console(file=text, width=width or _ENDLESS, force_terminal=False, color_system=None, highlight=False)
    console.print(content)
    print("\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n")))


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds; write 2")
    return value
