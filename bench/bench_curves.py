"""Loss curves of flcuda beside PyTorch's, in every precision: does it train as it should?

Both train the same network from the same initial values, one training a seed, with the same batches in the same order
and SGD with momentum and weight decay; float16 with loss scaling. The loss of each step is read. The first of each
seed's curves must agree, since nothing was trained yet; then rounding drives all apart, and what is compared is the
mean over windows of steps: flcuda's mean over its seeds must lie between the least and the greatest of PyTorch's
seeds, in every window. `outside` is by how much it does not, as a share of PyTorch's mean. Of two sides that train
alike, a window is outside by chance with a probability of 0.14 with five seeds of each, 0.012 with ten (normally
distributed losses), which is why there are ten.

The data are images of noise over a pattern that is the label's, turned around at random, with a tenth of the labels
drawn anew, so that the loss does not go to zero; or Fashion-MNIST from the folder of its four files (`--data`), with
the stem for small images.

Run: python bench/bench_curves.py [--precision float16 ...] [--data /usr/share/datasets/fashion-mnist] [--json]
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench_resnet34 import PRECISIONS, Row, add_pythons, count, note, pythons_of
from numpy.typing import NDArray
from peer_process import Told, ask_side
from record import machine, machine_line
from steps import BLOCKS, MOMENTUM, WEIGHT_DECAY, Request

from flcuda import data

Answer = dict[str, Any]
Ask = Callable[..., Told]

OURS = "flcuda:captured"
THEIRS = "torch:eager"

FIRST_ERROR = {"float32": 1e-4, "tf32": 5e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""By how much the first losses may differ, as a share: they come of the same weights and the same batch."""

CLASSES = 10


# --- data -------------------------------------------------------------------------------------------------------------


def patterns(images: int, size: int, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Draws images uint8 (N, 3, size, size), and labels."""
    generator = np.random.default_rng(seed)
    coarse = generator.standard_normal((CLASSES, 3, 8, 8), np.float32)
    side = -(-size // 8)
    pattern = coarse.repeat(side, 2).repeat(side, 3)[:, :, :size, :size]
    labels = generator.integers(0, CLASSES, images, np.int64)
    shifts = generator.integers(0, size, (images, 2))
    found = np.empty((images, 3, size, size), np.uint8)
    for place in range(images):
        noise = generator.standard_normal((3, size, size), np.float32)
        turned = np.roll(pattern[labels[place]], shifts[place], (1, 2))
        found[place] = np.clip(128.0 + 32.0 * (0.7 * turned + noise), 0.0, 255.0)
    anew = generator.random(images) < 0.1
    labels[anew] = generator.integers(0, CLASSES, int(anew.sum()))
    return found, labels


def fashion_mnist(folder: Path, images: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Reads the first training images, uint8 (N, 1, 28, 28), and labels."""

    def path(name: str) -> Path:
        plain = folder / name
        return plain if plain.is_file() else folder / f"{name}.gz"

    found = data.read_idx(path("train-images-idx3-ubyte"), 3)[:images, None]
    return found, data.read_idx(path("train-labels-idx1-ubyte"), 1)[:images].astype(np.int64)


# --- comparison -------------------------------------------------------------------------------------------------------


def windows(losses: Sequence[float], window: int) -> NDArray[np.float64]:
    """Gives the means over windows of so many steps; what is left over at the end belongs to the last."""
    values = np.asarray(losses, np.float64)
    cuts = range(window, len(values) - window + 1, window)
    return np.array([part.mean() for part in np.split(values, cuts)])


def compared(
    ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]], *, window: int, first_error: float
) -> Answer:
    """Compares the curves of the same seeds.

    Args:
        ours: losses by seed.
        theirs: likewise.
        window: steps.
        first_error: that the first losses may have, as a share.

    Raises:
        ValueError: there are no curves, or they are not of the same seeds and as long.
    """
    if not ours or sorted(ours) != sorted(theirs):
        raise ValueError(f"curves of the seeds {sorted(ours)} and {sorted(theirs)}")
    lengths = {len(each) for each in (*ours.values(), *theirs.values())}
    if len(lengths) != 1:
        raise ValueError(f"curves of {', '.join(map(str, sorted(lengths)))} steps: one has ended early")
    our_windows = np.stack([windows(each, window) for each in ours.values()])
    their_windows = np.stack([windows(each, window) for each in theirs.values()])
    mean = our_windows.mean(0)
    low, high, middle = their_windows.min(0), their_windows.max(0), their_windows.mean(0)
    outside = np.maximum(np.maximum(low - mean, mean - high), 0.0) / np.abs(middle)
    first = max(abs(ours[seed][0] - theirs[seed][0]) / abs(theirs[seed][0]) for seed in theirs)
    return {
        "windows": [
            {"step": place * window, "ours": float(a), "mean": float(b), "low": float(c), "high": float(d)}
            for place, (a, b, c, d) in enumerate(zip(mean, middle, low, high, strict=True))
        ],
        "outside": float(outside.max()),
        "outside_windows": int((outside > 0.0).sum()),
        "first_difference": first,
        "first_agree": first <= first_error,
        "learnt": bool(mean[-1] < 0.8 * mean[0]),
        "within": bool(not outside.any()),
    }


# --- measurement ------------------------------------------------------------------------------------------------------


def trained(request: Request, row: Row, args: argparse.Namespace, ask: Ask) -> Told:
    def on_line(line: Answer) -> None:
        if "losses" in line:
            note(f"{row}, {request.precision}, seed {line['seed']}: the last loss is {line['losses'][-1]:.4f}")

    return ask(row.side, request, pythons=args.python, limit_s=args.seconds, caches=args.caches, on_line=on_line)


def curves(precision: str, args: argparse.Namespace, request: Request, ask: Ask) -> Answer:
    """Trains both sides in a precision and compares them; an error is kept with what there is."""
    found: Answer = {"precision": precision, "curves": {}, "settings": {}, "errors": {}}
    for name in (args.ours, THEIRS):
        row = Row.parse(name)
        mine = Request(**{**vars(request), "precision": precision, "how": row.how, "options": row.options})
        told = trained(mine, row, args, ask)
        found["curves"][name] = told.curves
        found["settings"][name] = told.values.get("settings")
        if told.why is not None:
            found["errors"][name] = told.why
            note(f"{name}, {precision}: {told.why}")
    try:
        found.update(
            compared(
                found["curves"][args.ours],
                found["curves"][THEIRS],
                window=args.window,
                first_error=FIRST_ERROR[precision],
            )
        )
    except ValueError as error:
        found["errors"]["comparison"] = str(error)
        found["within"] = False
    return found


def initial_states(request: Request, seeds: int, folder: Path) -> dict[str, str]:
    """Writes the initial values of each seed, which are flcuda's, for both sides."""
    from flcuda_resnet import model_of

    found = {}
    for seed in range(seeds):
        path = folder / f"state-{seed}.npz"
        np.savez(
            path, **model_of(Request(**{**vars(request), "device": "cpu", "precision": "float32"}), seed).state_dict()
        )
        found[str(seed)] = str(path)
    return found


def run(args: argparse.Namespace, ask: Ask = ask_side) -> Answer:
    begin = time.perf_counter()
    if args.data is None:
        images, labels = patterns(args.images, args.size)
        stem = "imagenet"
    else:
        images, labels = fashion_mnist(args.data, args.images)
        stem = "small"
    with tempfile.TemporaryDirectory(prefix="flcuda-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        args.caches = folder / "caches"
        np.savez(folder / "data.npz", images=images, labels=labels)
        request = Request(
            args.network,
            args.precision[0],
            args.batch,
            "eager",
            device=args.device,
            size=images.shape[2],
            in_channels=images.shape[1],
            classes=CLASSES,
            stem=stem,
            lr=args.lr,
        )
        states = initial_states(request, args.seeds, folder)
        curve = {"data": str(folder / "data.npz"), "states": states, "steps": args.steps}
        request = Request(**{**vars(request), "curve": curve})
        tables = [curves(precision, args, request, ask) for precision in args.precision]
    return {
        "network": args.network,
        "batch": args.batch,
        "data": "patterns" if args.data is None else "fashion-mnist",
        "images": len(images),
        "image": list(images.shape[1:]),
        "optimizer": {"name": "SGD", "lr": args.lr, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY},
        "steps": args.steps,
        "window": args.window,
        "seeds": args.seeds,
        "ours": args.ours,
        "theirs": THEIRS,
        "device": args.device,
        "trial": args.trial,
        "tables": tables,
        "within": all(each["within"] for each in tables),
        "wall_s": time.perf_counter() - begin,
        "machine_line": machine_line(machine()),
    }


def show(result: Answer) -> None:
    print(result["machine_line"])
    print(
        f"{result['network']}, batch {result['batch']}, {result['data']} {'x'.join(map(str, result['image']))}, "
        f"{result['steps']} steps, {result['seeds']} seeds of {result['ours']} and {result['theirs']}"
    )
    if result["trial"]:
        print("A TRIAL: its figures mean nothing")
    for each in result["tables"]:
        print(f"\n{each['precision']}")
        for name, why in each["errors"].items():
            print(f"  {name}: {why}")
        if "windows" not in each:
            continue
        print("  from step   flcuda     torch: mean, least, greatest")
        for row in each["windows"]:
            values = "  ".join(format(row[name], "8.4f") for name in ("ours", "mean", "low", "high"))
            print(f"  {row['step']:9d}  {values}{'' if row['low'] <= row['ours'] <= row['high'] else '  OUTSIDE'}")
        print(f"  within: {'yes' if each['within'] else 'NO'}; outside by at most {100 * each['outside']:.2f} %")
        agree = "" if each["first_agree"] else ", WHICH IS TOO MUCH"
        print(f"  first losses differ by {each['first_difference']:.1e}{agree}; learnt: {each['learnt']}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--network", choices=BLOCKS, default="resnet34")
    made.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    made.add_argument("--ours", default=OURS, help="a row of flcuda's of bench_resnet34.py")
    made.add_argument("--seeds", type=lambda text: count(text, 2), default=10)
    made.add_argument("--steps", type=count, default=300)
    made.add_argument("--window", type=count, default=25, help="steps")
    made.add_argument("--batch", type=count, default=128)
    made.add_argument("--lr", type=float, default=0.02)
    made.add_argument("--data", type=Path, help="folder of Fashion-MNIST")
    made.add_argument("--images", type=count, default=8192)
    made.add_argument("--size", type=count, default=64, help="pixels of an image's side, without --data")
    made.add_argument("--seconds", type=float, default=120.0, help="for one side in one precision")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_pythons(made)
    made.add_argument("--trial", action="store_true", help="everything small, on the CPU")
    made.add_argument("--json", action="store_true")
    return made


TRIAL = {
    "network": "resnet10",
    "device": "cpu",
    "seeds": 2,
    "steps": 6,
    "window": 2,
    "batch": 8,
    "images": 32,
    "size": 48,
}


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    args = parser().parse_args(words)
    args.python = pythons_of(args)
    if args.trial:
        vars(args).update(TRIAL)
    return args


def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    result = run(args)
    if args.json:
        json.dump(result, sys.stdout, indent=1)
        print()
    else:
        show(result)


if __name__ == "__main__":
    main()
