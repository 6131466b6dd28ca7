"""`flcuda profile`: where the time of a ResNet's training step goes, beside what the machine could do at best."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flcuda.device import Device
    from flcuda.training.step_profile import StepProfile

_MODELS = ("resnet18", "resnet34", "resnet50")
_PRECISIONS = ("float32", "tf32", "float16", "bfloat16", "float64")
_BATCH = {"cuda": 128, "cpu": 4}
# As `flcuda train` has it: below this size the model starts with a 3x3 convolution and no pooling.
_SMALL_IMAGE = 96


def configure(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand's parser."""
    parser = subparsers.add_parser(
        "profile",
        help="show where a training step's time goes, by layer and kind",
        description="Times the parts of a training step on random images: by device events on a GPU, by the clock on "
        "the CPU. Beside each part stands its floor: the bytes that it must move at the speed of a copy in the same "
        "run, or its operations at the GPU's peak, whichever take longer.",
    )
    parser.add_argument("--model", choices=_MODELS, default="resnet34", help="the network (default: resnet34)")
    parser.add_argument("--batch-size", type=_positive, metavar="N", help="images a step (default: 128, on the CPU 4)")
    parser.add_argument("--precision", choices=_PRECISIONS, default="float32", help="of the network (default: float32)")
    parser.add_argument("--device", default="auto", help="auto (default: a GPU where there is one), cpu, cuda, cuda:1")
    parser.add_argument(
        "--image-size", type=_positive, default=224, metavar="N", help="height and width (default: 224)"
    )
    parser.add_argument("--classes", type=_positive, default=1000, metavar="N", help="of the images (default: 1000)")
    parser.add_argument("--steps", type=_positive, default=10, metavar="N", help="steps that are timed (default: 10)")
    parser.add_argument("--every-part", action="store_true", help="also list every part, in order")
    parser.add_argument(
        "--regret",
        action="store_true",
        help="try the three best algorithms of the ten dearest convolutions within the step",
    )
    parser.add_argument("--no-capture", action="store_true", help="do not time the step as a CUDA graph")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", metavar="FILE", help="draw the times; the kind by its ending (png, svg, pdf)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Profiles a step and prints the profile.

    Args:
        args: what `configure` declared.

    Returns:
        0.

    Raises:
        FlcudaError: the device or cuDNN is not here, or a convolution cannot be computed.
        OSError: the plot cannot be written.
        ValueError: the plot's ending is of no kind that can be drawn, or matplotlib is not installed.
    """
    from flcuda import device as devices
    from flcuda.errors import FlcudaError
    from flcuda.finder.choice import library_version
    from flcuda.training.step_profile import profile_step, step_regret

    if args.plot is not None:
        _check_plot(Path(args.plot))
    device = devices.resolve(args.device)
    if device.kind == "cpu":
        missing = devices.cuda_missing_reason() if args.device == "auto" else None
        print(f"no GPU is used{f' ({missing})' if missing else ''}: the step runs on the CPU", file=sys.stderr)
    batch = args.batch_size or _BATCH[device.kind]
    with device.use():
        step, model, optimizer = _training(args, batch, device)
        captured = None if args.no_capture or device.kind == "cpu" else _captured(step)
        try:
            profile = profile_step(step, model, optimizer, captured=captured, steps=args.steps, images=batch)
        except FlcudaError as error:
            if captured is not None:
                error.add_note("if it is the capture that fails: --no-capture leaves it out")
            raise
        regret = step_regret(step, model, optimizer, captured=captured is not None) if args.regret else None
    settings = {
        "model": args.model,
        "batch_size": batch,
        "image_size": args.image_size,
        "classes": args.classes,
        "precision": args.precision,
        "device": dict(devices.device_model(device)),
        "library": library_version(device),
    }
    title = (
        f"{args.model}, {batch} images of 3x{args.image_size}x{args.image_size}, {args.precision}; "
        f"{settings['device']['name']}, {settings['library']}"
    )
    if args.plot is not None:
        profile.plot(args.plot, title)
    if args.json:
        found = {**settings, **profile.to_json(), "regret": None if regret is None else regret.to_json()}
        print(json.dumps(found, indent=2))
        return 0
    _print(title, profile, args.every_part)
    if regret is not None:
        print(f"\n{regret}")
    return 0


def _training(args: argparse.Namespace, batch: int, device: "Device") -> tuple[Callable[[], object], Any, Any]:
    """Returns a training step as `flcuda train` does it, its model and its optimizer."""
    import numpy as np

    from flcuda import Tensor, amp, models, nn, optim
    from flcuda import functional as F

    make: Callable[..., Any] = getattr(models, args.model)
    model = make(
        num_classes=args.classes,
        stem="small" if args.image_size < _SMALL_IMAGE else "imagenet",
        precision=args.precision,
        device=device,
    )
    optimizer = optim.SGD(model, lr=0.01, momentum=0.9, weight_decay=1e-4)
    scaler = amp.DynamicScaler() if args.precision == "float16" else None
    rng = np.random.default_rng(0)
    size = (batch, 3, args.image_size, args.image_size)
    # In the model's precision: who loads images has them so.
    images = nn.precision_of(args.precision).enter(Tensor(device.xp.asarray(rng.standard_normal(size, np.float32))))
    labels = Tensor(device.xp.asarray(rng.integers(0, args.classes, batch)))

    def step() -> Tensor:
        loss = F.cross_entropy(model(images), labels)
        if scaler is not None:
            scaler.step(optimizer, loss)
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step, model, optimizer


def _captured(step: Callable[[], object]) -> Callable[[], object]:
    import flcuda

    captured: Callable[[], object] = flcuda.capture(step)
    return captured


def _print(title: str, profile: "StepProfile", every_part: bool) -> None:
    print(f"{title}\n")
    if every_part:
        print(f"{profile.table()}\n")
    print(profile)


def _check_plot(path: Path) -> None:
    """Says before minutes of work what would fail after them."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'flcuda[plot]'")
    if not path.suffix:
        raise ValueError(f"--plot {path}: its ending must say the kind of picture, such as {path}.png")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"--plot {path}: its folder does not exist")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise PermissionError(f"--plot {path}: cannot be written")


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)
