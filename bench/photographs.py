"""Cuts photographs of about 500x375 pixels out of the pictures of two Debian packages: what bench_data.py reads.

Other benchmarks import how they are listed, repeated and served.

The packages are `mate-backgrounds` and `plasma-workspace-wallpapers`, installed or unpacked (`dpkg -x FILE.deb TO`).
Of their pictures those are taken that are photographs. Each cut is reduced 2 to 4.5 times where the picture is large
enough, has a size within an eighth of 500x375 (one in four upright), and is a baseline JPEG file with 4:2:0 as
ImageNet's are; its quality is chosen so that the file has the size that is asked for. Cuts that no usual quality brings
there are left out: sky and haze are too small. The same packages and the same version of Pillow give the same files.

Run: python bench/photographs.py FOLDER... --out .data/photos [--sizes 50:224 110:120]
Writes OUT/50/train/CLASS/NUMBER.jpg with eight classes, a picture's cuts all in one, and OUT/about.json.
"""

import argparse
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

from flcuda.data import Dataset, PrefetchDataset, ResampleDataset, Sample
from flcuda.data.prefetch import Iteration

CLASSES = 8
WIDTH, HEIGHT = 500, 375
SPREAD = 1 / 8
REDUCED = (2.0, 4.5)
QUALITIES = (40, 98)
TOLERANCE = 0.08
ATTEMPTS = 40
"""For each cut asked for: more mean that the pictures do not have them."""

PHOTOGRAPHS = (
    "backgrounds/mate/nature/YellowFlower.jpg",
    *(f"backgrounds/mate/nature/{name}.jpg" for name in ("Aqua", "Blinds", "Dune", "Garden", "GreenMeadow")),
    *(f"backgrounds/mate/nature/{name}.jpg" for name in ("LadyBird", "RainDrops", "Storm", "TwoWings", "Wood")),
    *(f"wallpapers/{name}/contents/images/2560x1600.jpg" for name in ("BytheWater", "ColdRipple", "ColorfulCups")),
    *(f"wallpapers/{name}/contents/images/2560x1600.jpg" for name in ("EveningGlow", "FallenLeaf", "Grey", "Kite")),
    *(f"wallpapers/{name}/contents/images/2560x1600.jpg" for name in ("OneStandsOut", "Path")),
)
SOURCE = "Debian's mate-backgrounds and plasma-workspace-wallpapers"


def listed(folder: Path, kib: int) -> tuple[list[Path], NDArray[np.int64]]:
    """Returns the photographs of one size and their classes, int64 (N,)."""
    files = sorted(Path(folder, str(kib), "train").glob("*/*.jpg"))
    if not files:
        raise FileNotFoundError(f"{folder}/{kib}/train has no CLASS/NAME.jpg: bench/photographs.py makes them")
    names = sorted({file.parent.name for file in files})
    return files, np.array([names.index(file.parent.name) for file in files], np.int64)


def repeated(dataset: Dataset, total: int, seed: int = 0) -> ResampleDataset:
    """Returns a data set of `total` samples: all of another in one random order, then in another one, and so on."""
    count = len(dataset)
    passes = np.tile(np.arange(count), (-(-total // count), 1))
    order = np.random.default_rng(seed).permuted(passes, axis=1)
    return ResampleDataset(dataset, order.reshape(-1)[:total])


class Endless:
    """The samples of a loader, one epoch after the other; a context, which ends the loading."""

    def __init__(self, loader: PrefetchDataset) -> None:
        self.loader = loader
        self._iteration: Iteration | None = None

    def __enter__(self) -> "Endless":
        self._iteration = iter(self.loader)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            iteration.__exit__(kind, error, traceback)

    def take(self) -> Sample:
        """Releases the sample before and returns the next."""
        assert self._iteration is not None
        sample = next(self._iteration, None)
        if sample is None:
            self.loader.set_epoch(self.loader.epoch + 1)
            self._iteration = iter(self.loader)
            sample = next(self._iteration)
        return sample


def jpeg(image: Image.Image, quality: int) -> bytes:
    stored = io.BytesIO()
    image.save(stored, "JPEG", quality=quality, subsampling="4:2:0")
    return stored.getvalue()


def nearest_quality(size_of: Callable[[int], int], target: int, low: int, high: int) -> int:
    """Returns the quality, from low to high, whose size is nearest to a target; sizes rise with the quality."""
    while high - low > 1:
        middle = (low + high) // 2
        if size_of(middle) <= target:
            low = middle
        else:
            high = middle
    return min((low, high), key=lambda quality: abs(size_of(quality) - target))


def sized(image: Image.Image, target: int) -> tuple[bytes, int] | None:
    """Returns the file nearest to so many bytes, and its quality; None when it is not near, see TOLERANCE."""
    made: dict[int, bytes] = {}

    def size_of(quality: int) -> int:
        if quality not in made:
            made[quality] = jpeg(image, quality)
        return len(made[quality])

    quality = nearest_quality(size_of, target, *QUALITIES)
    return (made[quality], quality) if abs(size_of(quality) - target) <= TOLERANCE * target else None


def cut(image: Image.Image, draws: np.random.Generator) -> Image.Image:
    """Returns a part of a picture at a random place."""
    width, height = (round(side * draws.uniform(1 - SPREAD, 1 + SPREAD)) for side in (WIDTH, HEIGHT))
    if draws.random() < 0.25:
        width, height = height, width
    most = min(image.width / width, image.height / height, REDUCED[1])
    scale = draws.uniform(min(REDUCED[0], most), most)
    left = draws.uniform(0, image.width - width * scale)
    top = draws.uniform(0, image.height - height * scale)
    box = (left, top, left + width * scale, top + height * scale)
    return image.resize((width, height), Image.Resampling.LANCZOS, box=box)


def found_pictures(folders: Sequence[Path]) -> list[Path]:
    """Returns the photographs of the packages; FileNotFoundError names one that is missing."""
    files = {path for folder in folders for path in folder.rglob("*.jpg") if path.is_file()}
    pictures = []
    for name in PHOTOGRAPHS:
        matching = sorted(path for path in files if path.as_posix().endswith("/" + name))
        if not matching:
            raise FileNotFoundError(f"{name} is in none of {', '.join(map(str, folders))}: are both packages there?")
        pictures.append(matching[0])
    return pictures


def cuts(pictures: Sequence[Image.Image], target: int, count: int, seed: int) -> Iterator[tuple[int, bytes, int]]:
    """Yields (number of the picture, file, quality), from one picture after the other."""
    draws = np.random.default_rng(seed)
    done = 0
    for attempt in range(ATTEMPTS * count):
        number = attempt % len(pictures)
        made = sized(cut(pictures[number], draws), target)
        if made is not None:
            yield (number, *made)
            done += 1
            if done == count:
                return
    raise RuntimeError(f"only {done} of {count} cuts of {target} bytes were found in {ATTEMPTS * count} attempts")


def write(pictures: Sequence[Image.Image], out: Path, kib: int, count: int) -> dict[str, Any]:
    """Writes the cuts of one size; returns what is said about them."""
    sizes = []
    qualities = []
    for place, (number, content, quality) in enumerate(cuts(pictures, kib * 1024, count, seed=kib)):
        folder = out / str(kib) / "train" / f"class{number % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{place:04}.jpg").write_bytes(content)
        sizes.append(len(content))
        qualities.append(quality)
    return {
        "kib": kib,
        "images": count,
        "mean_bytes": float(np.mean(sizes)),
        "range_bytes": [min(sizes), max(sizes)],
        "median_quality": float(np.median(qualities)),
        "range_quality": [min(qualities), max(qualities)],
        "bytes": sum(sizes),
    }


def size_and_count(text: str) -> tuple[int, int]:
    kib, colon, count = text.partition(":")
    if not colon or not kib.isdecimal() or not count.isdecimal() or not int(kib) or not int(count):
        raise argparse.ArgumentTypeError(f"{text!r} must be KIB:COUNT, such as 50:224")
    return int(kib), int(count)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="/usr/share, or where they are")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", nargs="+", type=size_and_count, default=[(50, 224), (110, 120)], metavar="KIB:COUNT")
    args = parser.parse_args(words)
    pictures = []
    for path in found_pictures(args.folders):
        with Image.open(path) as image:
            pictures.append(image.convert("RGB"))
    about: dict[str, Any] = {"source": SOURCE, "pictures": len(pictures), "pillow": PIL.__version__, "sizes": []}
    for kib, count in args.sizes:
        about["sizes"].append(write(pictures, args.out, kib, count))
        print(json.dumps(about["sizes"][-1]), file=sys.stderr, flush=True)
    (args.out / "about.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
