"""Image files: decoding as a person expects, and folders with a sub-folder a class."""

import io
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from flcuda.data.dataset import ImageData, TransformDataset, epoch_order
from flcuda.data.transforms import Draws, Normalize

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")
# Of ImageNet's training images, and customary for photographs; in units of the full scale.
PHOTOGRAPH_MEAN = (0.485, 0.456, 0.406)
PHOTOGRAPH_STD = (0.229, 0.224, 0.225)

# Headers are read of so many files when a folder is opened, evenly spread over it.
_SAMPLED_HEADERS = 10_000
# Images below this shorter side are trained at their own size; others at 224, like ImageNet.
_SMALL_SIDE = 96
_GREY_MODES = ("1", "L", "LA", "I;16", "I;16B", "I;16L", "I")
_DECODER_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)


def decode(source: Path | bytes, channels: int = 3) -> NDArray[np.uint8]:
    """Decodes a JPEG or PNG image.

    Grey, palette and CMYK images become what a viewer shows, turned as EXIF says; 16-bit values keep their high byte; a
    transparent image lies on white.

    Args:
        source: a file, or the bytes of one.
        channels: 3 for red, green, blue; 1 for grey.

    Returns:
        uint8 (H, W, channels); owned by the caller.

    Raises:
        ValueError: empty, truncated, or not a JPEG or PNG image; names the file.
        FileNotFoundError, PermissionError: the file cannot be opened.
    """
    image = _open(source, channels)
    return np.array(image).reshape(image.height, image.width, channels)


class ImageFolder:
    """Image files with labels, resized by the shorter side and cropped to one size.

    Args:
        files: JPEG or PNG.
        labels: int64 (N,), one a file.
        size: height and width of the images served.
        sides: shorter side before the crop, from and to; drawn anew by (seed, epoch, index) when training.
        train: random side, random crop and random flip; else the lower side and the centre crop.
        channels: 3 or 1.
        seed: of the random numbers.
    """

    def __init__(
        self,
        files: Sequence[Path],
        labels: NDArray[np.int64],
        *,
        size: int,
        sides: tuple[int, int],
        train: bool,
        channels: int = 3,
        seed: int = 0,
    ) -> None:
        if len(files) != len(labels):
            raise ValueError(f"files and labels must have one length, not {len(files)} and {len(labels)}")
        if not size <= sides[0] <= sides[1]:
            raise ValueError(f"sides must rise from at least size {size}, not {sides}")
        self.files = tuple(files)
        self.labels = labels
        self.size = size
        self.sides = sides
        self.train = train
        self.channels = channels
        self.seed = seed

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        images, labels = self.batch(np.array([index % len(self)], np.int64), 0)
        return images[0], labels[0]

    def batch(self, indices: NDArray[np.int64], epoch: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Returns uint8 (N, channels, size, size) and int64 labels (N,)."""
        images = np.empty((len(indices), self.channels, self.size, self.size), np.uint8)
        draws = Draws(self.seed, epoch, indices).uniform() if self.train else None
        low, high = self.sides
        for place, index in enumerate(indices):
            image = _open(self.files[index], self.channels)
            if draws is None:
                width, height = _resized(image, low)
                left, top = (width - self.size) // 2, (height - self.size) // 2
            else:
                side, across, down, mirror = draws[place]
                width, height = _resized(image, low + int(side * (high - low + 1)))
                left = int(across * (width - self.size + 1))
                top = int(down * (height - self.size + 1))
            # Resized and cropped at once: most pixels of the resized image are never computed, and a long thin image
            # does not become a huge one.
            box = (
                left * image.width / width,
                top * image.height / height,
                (left + self.size) * image.width / width,
                (top + self.size) * image.height / height,
            )
            cropped = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
            pixels = np.asarray(cropped).reshape(self.size, self.size, self.channels)
            if draws is not None and mirror < 0.5:
                pixels = pixels[:, ::-1]
            images[place] = pixels.transpose(2, 0, 1)
        return images, self.labels[indices]


def image_folder(path: Path | str, seed: int = 0) -> ImageData:
    """Returns the images of a folder with a sub-folder a class.

    PATH/train and PATH/val are taken where both are there. Otherwise a fifth of each class (at least one image, drawn
    once and for all) is the test. Labels follow the sorted names of the sub-folders. Images are served at 224x224 like
    ImageNet's, or at their own size when it is small; grey only when all of them are.

    Args:
        path: the folder.
        seed: of the augmentation.

    Raises:
        FileNotFoundError, NotADirectoryError: no such folder.
        ValueError: fewer than two classes, a class without images, a class for the test alone, or a broken file.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such folder")
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is not a folder")
    if (path / "train").is_dir() and (path / "val").is_dir():
        classes = _class_names(path / "train", 2)
        test_classes = _class_names(path / "val", 1)
        unknown = sorted(set(test_classes) - set(classes))
        if unknown:
            raise ValueError(f"{path / 'val' / unknown[0]}: no such class in {path / 'train'}")
        train = _class_files(path / "train", classes)
        test_files, test_labels = _class_files(path / "val", test_classes)
        test = (test_files, np.array([classes.index(name) for name in test_classes], np.int64)[test_labels])
        note = "train and val are the folders of these names"
    else:
        classes = _class_names(path, 2)
        files, labels = _class_files(path, classes)
        train_places, test_places = _split(labels, classes, path)
        train = ([files[place] for place in train_places], labels[train_places])
        test = ([files[place] for place in test_places], labels[test_places])
        note = "no train and val folders: a fifth of each class, drawn once and for all, is the test"
    side, channels = _survey([*train[0], *test[0]])
    small = side < _SMALL_SIDE
    size = side if small else 224
    # For photographs as in Krizhevsky et al. 2012 and He et al. 2015: 256 to 480 for training, 256 for the test.
    train_sides = (size, round(size * 9 / 8)) if small else (256, 480)
    test_sides = (size, size) if small else (256, 256)
    train_images = ImageFolder(*train, size=size, sides=train_sides, train=True, channels=channels, seed=seed)
    test_images = ImageFolder(*test, size=size, sides=test_sides, train=False, channels=channels)
    normalize = (
        Normalize(PHOTOGRAPH_MEAN, PHOTOGRAPH_STD)
        if channels == 3
        else Normalize([float(np.mean(PHOTOGRAPH_MEAN))], [float(np.mean(PHOTOGRAPH_STD))])
    )
    return ImageData(
        f"folder:{path}",
        TransformDataset(train_images, normalize, seed=seed),
        TransformDataset(test_images, normalize),
        classes,
        (channels, size, size),
        note,
    )


def _open(source: Path | bytes, channels: int) -> Image.Image:
    """Returns a decoded image of mode RGB or L, turned as EXIF says."""
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 or 3, not {channels}")
    name = "the image" if isinstance(source, bytes) else str(source)
    content = source if isinstance(source, bytes) else source.read_bytes()
    if not content:
        raise ValueError(f"{name} is empty")
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as opened:
            opened.load()
            image = ImageOps.exif_transpose(opened)
            return _converted(image, "RGB" if channels == 3 else "L")
    except _DECODER_ERRORS as error:
        raise ValueError(f"{name} cannot be decoded: {_reason(error)}") from error


def _resized(image: Image.Image, side: int) -> tuple[int, int]:
    """Returns the size that the image would have if its shorter side had `side` pixels."""
    scale = side / min(image.size)
    return max(side, round(image.width * scale)), max(side, round(image.height * scale))


def _reason(error: Exception) -> str:
    return "not a JPEG or PNG image" if isinstance(error, UnidentifiedImageError) else str(error)


def _converted(image: Image.Image, mode: str) -> Image.Image:
    if image.mode.startswith("I"):
        # 16-bit grey: Pillow would clip it at 255.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(ground, image)
    return image if image.mode == mode else image.convert(mode)


def _class_names(folder: Path, least: int) -> tuple[str, ...]:
    names = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")))
    if len(names) < least:
        raise ValueError(f"{folder}: {len(names)} sub-folders: expected one a class, and at least {least}")
    return names


def _class_files(folder: Path, classes: Sequence[str]) -> tuple[list[Path], NDArray[np.int64]]:
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(
            entry
            for entry in (folder / name).iterdir()
            if entry.suffix.lower() in IMAGE_SUFFIXES and not entry.name.startswith(".") and entry.is_file()
        )
        if not found:
            raise ValueError(f"{folder / name}: no JPEG or PNG files ({', '.join(IMAGE_SUFFIXES)}) right in it")
        files.extend(found)
        labels.extend([label] * len(found))
    return files, np.array(labels, np.int64)


def _split(
    labels: NDArray[np.int64], classes: Sequence[str], folder: Path
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    train = []
    test = []
    for label, name in enumerate(classes):
        members = np.flatnonzero(labels == label)
        if len(members) < 2:
            raise ValueError(f"{folder / name}: one image cannot be divided into training and test images")
        members = members[epoch_order(len(members), 0, label)]
        held_out = max(1, len(members) // 5)
        test.append(np.sort(members[:held_out]))
        train.append(np.sort(members[held_out:]))
    return np.concatenate(train), np.concatenate(test)


def _survey(files: Sequence[Path]) -> tuple[int, int]:
    """Returns the median shorter side of evenly spread files, and 1 channel when every file is one of them and grey."""
    step = max(1, -(-len(files) // _SAMPLED_HEADERS))
    sides = []
    grey = step == 1
    for file in files[::step]:
        try:
            with Image.open(file, formats=("JPEG", "PNG")) as image:
                sides.append(min(image.size))
                grey = grey and image.mode in _GREY_MODES
        except (FileNotFoundError, PermissionError):
            raise
        except _DECODER_ERRORS as error:
            message = f"cannot be decoded: {_reason(error)}" if file.stat().st_size else "is empty"
            raise ValueError(f"{file} {message}") from error
    return int(np.median(sides)), 1 if grey else 3
