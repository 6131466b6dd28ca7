"""`flcuda train`: trains a ResNet on a data set known by name, on a folder of images or on noise."""

import argparse
import json
import math
import os
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from flcuda.data import ImageData
    from flcuda.device import Device
    from flcuda.training import EpochResult, Report, Trainer

_PRECISIONS = ("float32", "tf32", "float16", "bfloat16", "float64")
_MODELS = ("resnet18", "resnet34", "resnet50")
_STDOUT = "-"
# Below this height or width the model starts with a 3x3 convolution and no pooling.
_SMALL_IMAGE = 96

_DATA_HELP = """digits: scikit-learn's handwritten digits;
fashion-mnist[:FOLDER]: idx files, by default those of Debian's package dataset-fashion-mnist;
folder:PATH: JPEG and PNG files in a sub-folder a class, divided as PATH/train and PATH/val where these exist;
synthetic[:N]: N images of noise (224x224, 1000 classes), for timing"""

_EMULATED = {
    "tf32": "the CPU has no TF32: tf32 computes in plain float32 here",
    "float16": "the CPU only emulates float16: it computes in float32 and rounds the results, slower than float32",
    "bfloat16": "the CPU only emulates bfloat16: it computes in float32 and rounds the results, slower than float32",
}


@dataclass(frozen=True)
class Recipe:
    """What a data set is trained with unless the command says otherwise.

    Attributes:
        model: one of _MODELS.
        epochs: of the whole training.
        batch_size: images a step.
        lr: highest learning rate at this batch size; it grows with another batch size in proportion.
        weight_decay: of the optimizer.
        warmup_epochs: epochs (or a part of one) in which the rate rises; at most a quarter of the training.
        label_smoothing: of the training loss.
    """

    model: str
    epochs: int
    batch_size: int
    lr: float
    weight_decay: float
    warmup_epochs: float
    label_smoothing: float = 0.0


def configure(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand's parser."""
    parser = subparsers.add_parser(
        "train",
        help="train a ResNet and print how well it does",
        description="Trains a ResNet. What is not given is chosen for the data set, and printed.",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--data", required=True, metavar="DATA", help=_DATA_HELP)
    parser.add_argument("--device", default="auto", help="auto (default: a GPU where there is one), cpu, cuda, cuda:1")
    parser.add_argument("--model", choices=_MODELS, help="the network")
    parser.add_argument("--epochs", type=_positive_int, metavar="N", help="times each image is trained on")
    parser.add_argument("--batch-size", type=_positive_int, metavar="N", help="images a step")
    parser.add_argument("--lr", type=_positive_float, metavar="RATE", help="highest learning rate")
    parser.add_argument("--precision", choices=_PRECISIONS, default="float32", help="of the network (default: float32)")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of everything random (default: 0)")
    parser.add_argument(
        "--json",
        nargs="?",
        const=_STDOUT,
        metavar="FILE",
        help="write the summary as JSON to FILE; without FILE to standard output, and all else to standard error",
    )


def run(args: argparse.Namespace) -> int:
    """Trains as the arguments say and prints the summary.

    Returns:
        0, or 130 when it was interrupted; what had been reached is printed then, too.
    """
    from rich.console import Console

    from flcuda import device as devices

    if args.json not in (None, _STDOUT):
        _check_writable(Path(args.json))
    device = devices.resolve(args.device)
    console = Console(stderr=args.json == _STDOUT, highlight=False)
    if args.device == "auto" and device.kind == "cpu":
        _say(console, f"No GPU was found, training on the CPU ({devices.cuda_missing_reason()})")
    if device.kind == "cpu" and args.precision in _EMULATED:
        _say(console, f"Warning: {_EMULATED[args.precision]}.")
    with warnings.catch_warnings(), device.use():
        # Pillow's remarks on files that it reads all the same: odd EXIF, many pixels.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        return _train(args, _open_data(args.data, device, args.seed), device, console)


def _train(args: argparse.Namespace, data: "ImageData", device: "Device", console: "Console") -> int:
    from flcuda import models, optim
    from flcuda.amp import DynamicScaler
    from flcuda.training import Trainer, WarmupCosine

    recipe = _recipe(data, device)
    model_name = args.model or recipe.model
    epochs = args.epochs or recipe.epochs
    batch_size = min(args.batch_size or recipe.batch_size, len(data.train))
    lr = args.lr or recipe.lr * batch_size / recipe.batch_size
    stem = "small" if min(data.image_shape[1:]) < _SMALL_IMAGE else "imagenet"
    make: Callable[..., Any] = getattr(models, model_name)
    model = make(
        num_classes=len(data.classes),
        in_channels=data.image_shape[0],
        stem=stem,
        precision=args.precision,
        device=device,
        seed=args.seed,
    )
    steps = epochs * (len(data.train) // batch_size)
    # At most a quarter, so that a single epoch has a fall as well.
    warmup = min(round(recipe.warmup_epochs * steps / epochs), steps // 4)
    optimizer = optim.SGD(model, lr=lr, momentum=0.9, nesterov=True, weight_decay=recipe.weight_decay)
    trainer = Trainer(
        model,
        optimizer,
        data.train,
        data.test,
        batch_size=batch_size,
        schedule=WarmupCosine(lr, steps, warmup),
        scaler=DynamicScaler() if args.precision == "float16" else None,
        label_smoothing=recipe.label_smoothing,
        seed=args.seed,
        transforms=data.transforms,
        test_transforms=data.test_transforms,
        workers=None,
    )
    settings = {
        "data": data.name,
        "train_images": len(data.train),
        "test_images": len(data.test),
        "image_shape": list(data.image_shape),
        "classes": len(data.classes),
        "model": model_name,
        "stem": stem,
        "parameters": sum(math.prod(parameter.shape) for parameter in model.parameters()),
        "precision": args.precision,
        "device": _describe(device),
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "momentum": 0.9,
        "weight_decay": recipe.weight_decay,
        "label_smoothing": recipe.label_smoothing,
        "seed": args.seed,
    }
    _say(
        console,
        f"{model_name} ({settings['parameters']:,} parameters, {stem} stem, {args.precision}) on {settings['device']}\n"
        f"{data.name}: {len(data.train):,} training and {len(data.test):,} test images of "
        f"{'x'.join(map(str, data.image_shape))}, {len(data.classes)} classes"
        + (f"; {data.note}" if data.note else "")
        + f"\n{epochs} epoch{'s' if epochs > 1 else ''}, batch size {batch_size}, "
        f"learning rate {lr:g} (warm-up, then cosine), weight decay {recipe.weight_decay:g}, seed {args.seed}\n"
        "The first steps take longer where a shape is new: its algorithms are measured once, and the choice is kept.",
    )
    start = time.perf_counter()
    interrupted = False
    display = _display(console, epochs)
    try:
        with display:
            trainer.fit(epochs, on_report=display.report, on_epoch=display.epoch)
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.perf_counter() - start
    summary = {
        **settings,
        "interrupted": interrupted,
        "seconds": seconds,
        "history": [asdict(result) for result in trainer.history],
        "loader_memory": asdict(trainer.loader_memory),
        "versions": _versions(device),
    }
    _print_summary(console, summary, trainer)
    if args.json is not None:
        _write(args.json, json.dumps(summary, indent=2) + "\n")
    return 130 if interrupted else 0


def _open_data(spec: str, device: "Device", seed: int) -> "ImageData":
    from flcuda import data

    name, colon, rest = spec.partition(":")
    # A shell leaves the tilde of folder:~/images alone.
    folder = Path(rest).expanduser()
    if name == "digits" and not colon:
        return data.digits(seed)
    if name == "fashion-mnist":
        return data.fashion_mnist(folder, seed) if rest else data.fashion_mnist(seed=seed)
    if name == "folder" and rest:
        return data.image_folder(folder, device)
    if name == "synthetic":
        if rest and not (rest.isdecimal() and int(rest)):
            raise ValueError(f"--data synthetic:N needs a whole number of at least 1, not {rest!r}")
        return data.synthetic(int(rest) if rest else (12800 if device.kind == "cuda" else 64))
    known = "digits, fashion-mnist, fashion-mnist:FOLDER, folder:PATH, synthetic or synthetic:N"
    raise ValueError(f"--data must be {known}, not {spec!r}")


def _recipe(data: "ImageData", device: "Device") -> Recipe:
    cuda = device.kind == "cuda"
    if data.name == "digits":
        return Recipe("resnet18", 8, 64, 0.03, 5e-4, 1.0)
    if data.name == "fashion-mnist":
        # An epoch takes about half an hour on two CPU cores.
        return Recipe("resnet18", 15, 128, 0.1, 5e-4, 1.0) if cuda else Recipe("resnet18", 1, 128, 0.05, 5e-4, 0.1)
    if data.name == "synthetic":
        return Recipe("resnet34", 1, 128 if cuda else 16, 0.05 if cuda else 0.00625, 1e-4, 0.0)
    small = min(data.image_shape[1:]) < _SMALL_IMAGE
    if small:
        return Recipe("resnet18", 30, 64, 0.05, 5e-4, 2.0)
    return Recipe("resnet34" if cuda else "resnet18", 60, 64, 0.05, 1e-4, 5.0, 0.1)


class _Lines:
    """One plain line an epoch, for logs."""

    def __init__(self, console: "Console", epochs: int) -> None:
        self._console = console
        self._epochs = epochs

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def report(self, report: "Report") -> None:
        """Leaves reports within an epoch out."""

    def epoch(self, result: "EpochResult") -> None:
        """Prints a finished epoch."""
        _say(self._console, str(result))


class _Bar:
    """A progress bar over the images of an epoch, on a terminal; finished epochs stay above it."""

    def __init__(self, console: "Console", epochs: int) -> None:
        from rich import progress

        self._console = console
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=None),
            progress.TaskProgressColumn(),
            progress.TextColumn("{task.fields[figures]}"),
            progress.TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        # Until the first report, which comes after the first step.
        self._task = self._progress.add_task(f"epoch 1/{epochs}", total=None, figures="finding algorithms")

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def report(self, report: "Report") -> None:
        """Moves the bar."""
        name = f"epoch {report.epoch}/{report.epochs}" + (" test" if report.phase == "test" else "")
        figures = f"loss {report.loss:.4f} acc. {report.accuracy:.4f} {report.images_per_second:,.0f} images/s"
        self._progress.update(
            self._task, description=name, completed=report.done, total=report.images, figures=figures, refresh=True
        )

    def epoch(self, result: "EpochResult") -> None:
        """Prints a finished epoch above the bar."""
        _say(self._console, str(result))


def _display(console: "Console", epochs: int) -> _Lines | _Bar:
    return _Bar(console, epochs) if console.is_terminal else _Lines(console, epochs)


def _print_summary(console: "Console", summary: dict[str, Any], trainer: "Trainer") -> None:
    from rich import box
    from rich.table import Table

    report = trainer.last_report
    if summary["interrupted"]:
        _say(console, f"Interrupted after {len(trainer.history)} of {summary['epochs']} epochs.")
        if report is not None and report.epoch > len(trainer.history):
            _say(
                console,
                f"Epoch {report.epoch} had reached image {report.done:,} of {report.images:,} ({report.phase}): "
                f"loss {report.loss:.4f}, accuracy {report.accuracy:.4f}.",
            )
    if trainer.history:
        table = Table(box=box.SIMPLE, pad_edge=False)
        for heading in ("epoch", "train loss", "train acc.", "test loss", "test acc.", "images/s", "s"):
            table.add_column(heading, justify="right")
        for result in trainer.history:
            table.add_row(
                str(result.epoch),
                f"{result.train_loss:.4f}",
                f"{result.train_accuracy:.4f}",
                f"{result.test_loss:.4f}",
                f"{result.test_accuracy:.4f}",
                f"{result.images_per_second:,.0f}",
                f"{result.seconds:.1f}",
            )
        console.print(table)
        if trainer.loader_memory.slots and trainer.device.kind == "cuda":
            _say(console, f"The loader held {trainer.loader_memory}")
        _say(console, f"Test accuracy {trainer.history[-1].test_accuracy:.4f} after {summary['seconds']:.1f} s")
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    _say(console, f"{summary['precision']} on {summary['device']}; {versions}")


def _versions(device: "Device") -> dict[str, str]:
    import numpy as np

    import flcuda

    versions = {"flcuda": flcuda.__version__, "python": platform.python_version(), "numpy": np.__version__}
    if device.kind == "cuda":
        from flcuda import device as devices
        from flcuda.cudnn import library

        versions["cupy"] = devices.cupy().__version__
        number = library.load().version
        versions["cudnn"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return versions


def _describe(device: "Device") -> str:
    from flcuda import device as devices

    model = devices.device_model(device)
    if device.kind == "cuda":
        return f"{device} ({model['name']})"
    return f"cpu ({model['name']}, {model['cores']} cores)"


def _say(console: "Console", text: str) -> None:
    # No markup: names may hold brackets. A terminal gets lines broken between words, a log gets them whole.
    console.print(text, markup=False, soft_wrap=not console.is_terminal)


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"--json {path} is a folder")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"--json {path}: its folder does not exist")
    if not os.access(path.absolute().parent, os.W_OK):
        raise PermissionError(f"--json {path}: its folder cannot be written to")


def _write(target: str, text: str) -> None:
    if target == _STDOUT:
        print(text, end="")
        return
    path = Path(target)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        # A link or a device (/dev/null, /dev/stdout) is written to, never replaced.
        path.write_text(text)
        return
    # Whole or not at all.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _positive_int(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**64:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2^64 - 1, not {text!r}")
    return int(text)
