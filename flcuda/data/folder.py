"""Folders of image files with a sub-folder a class, as ImageNet has them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flcuda.data.chain import checked_index, checked_indices
from flcuda.data.dataset import ImageData, epoch_order
from flcuda.data.decode import IMAGE_SUFFIXES, Decoder, Header, pillow_image, read_header
from flcuda.data.images import ImageBatch
from flcuda.data.transforms import Augment
from flcuda.device import Device
from flcuda.errors import DecodeError

LABELS_FILE = "labels.txt"
# Of ImageNet's training images, and customary for photographs; in units of the full scale.
PHOTOGRAPH_MEAN = (0.485, 0.456, 0.406)
PHOTOGRAPH_STD = (0.229, 0.224, 0.225)

# Headers are read of so many files when a folder is opened, evenly spread over it.
_SAMPLED_HEADERS = 10_000
# Images below this shorter side are trained at their own size; others at 224, like ImageNet.
_SMALL_SIDE = 96
_GREY_MODES = ("1", "L", "LA", "I;16", "I;16B", "I;16L", "I")


class ImageFiles:
    """Image files with labels, each served whole, at its own size.

    Sample i is `(image, label)`: uint8 (height, width, channels) on the host and an int64 number. A batch is decoded by
    `decoder` onto its device. What cannot be decoded is an error, or left out of the batch and counted when the decoder
    skips.

    Args:
        files: image files.
        labels: integers (N,), one a file.
        decoder: None decodes on the host, to three channels, and raises.

    Raises:
        TypeError: labels that are no integers.
        ValueError: labels that are not (N,), or different lengths.
    """

    def __init__(self, files: Sequence[Path], labels: ArrayLike, decoder: Decoder | None = None) -> None:
        numbers = np.asarray(labels)
        if numbers.ndim != 1:
            raise ValueError(f"labels must be (N,), not {numbers.shape}")
        if len(files) != len(numbers):
            raise ValueError(f"files and labels must have one length, not {len(files)} and {len(numbers)}")
        if len(numbers) and numbers.dtype.kind not in "iu":
            raise TypeError(f"labels must be integers, not {numbers.dtype}")
        self.files = tuple(files)
        self.labels: NDArray[np.int64] = numbers.astype(np.int64, copy=False)
        self.decoder = Decoder() if decoder is None else decoder

    def __len__(self) -> int:
        return len(self.files)

    @property
    def best_workers(self) -> int | None:
        """How many threads a loader should have: what the decoder says."""
        return self.decoder.best_workers

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        index = checked_index(index, len(self))
        image = pillow_image(self.files[index], self.decoder.channels)
        return np.array(image).reshape(image.height, image.width, self.decoder.channels), self.labels[index]

    def batch(self, indices: NDArray[np.int64], epoch: int) -> tuple[ImageBatch, NDArray[np.int64]]:  # noqa: ARG002
        """Returns the images of these indices and int64 labels (N,), a NumPy array.

        Raises:
            DecodeError: an image is broken; when the decoder skips, only if none of them is left.
            IndexError: an index out of range.
            ValueError: no index.
        """
        fields, kept, errors = self._decoded(indices)
        if not len(kept):
            raise errors[0].fresh()
        images, labels = fields
        return images, labels

    def batch_kept(self, indices: NDArray[np.int64], epoch: int) -> tuple[tuple[Any, ...], NDArray[np.int64]]:  # noqa: ARG002
        """Returns what is left of a batch, and which of the samples it is; see `KeepsSome`."""
        return self._decoded(indices)[:2]

    def _decoded(
        self, indices: NDArray[np.int64]
    ) -> tuple[tuple[Any, ...], NDArray[np.int64], tuple[DecodeError, ...]]:
        indices = some_indices(indices, len(self))
        decoded = self.decoder.decode([self.files[index] for index in indices])
        fields = () if decoded.batch is None else (decoded.batch, self.labels[indices[decoded.kept]])
        return fields, decoded.kept, decoded.errors


def some_indices(indices: ArrayLike, length: int) -> NDArray[np.int64]:
    """Returns indices as `checked_indices` does; ValueError when there is none."""
    places = checked_indices(indices, length)
    if not len(places):
        raise ValueError("indices must be at least one")
    return places


@dataclass(frozen=True)
class Split:
    """The files of a folder, divided.

    Attributes:
        train: files, and their labels int64 (N,).
        test: likewise.
        classes: the names, by label.
        note: how it was divided.
    """

    train: tuple[list[Path], NDArray[np.int64]]
    test: tuple[list[Path], NDArray[np.int64]]
    classes: tuple[str, ...]
    note: str


def split_folder(path: Path | str) -> Split:
    """Lists the image files of a folder with a sub-folder a class; no file but `labels.txt` is opened.

    PATH/train and PATH/val are taken where both are there. Otherwise a fifth of each class (at least one image, drawn
    once and for all) is the test. Labels follow the sorted names of the sub-folders; or, where there is a
    PATH/labels.txt, its lines `FOLDER,NAME`: the first is class 0. It may list classes that have no folder.

    Args:
        path: the folder.

    Raises:
        FileNotFoundError, NotADirectoryError: no such folder.
        ValueError: fewer than two classes, a class without images, a class for the test alone, or a line of labels.txt
            that is none.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such folder")
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is not a folder")
    listed = _read_labels(path / LABELS_FILE) if (path / LABELS_FILE).is_file() else None
    if (path / "train").is_dir() and (path / "val").is_dir():
        folders = _class_names(path / "train", 2)
        test_folders = _class_names(path / "val", 1)
        unknown = sorted(set(test_folders) - set(folders))
        if unknown:
            raise ValueError(f"{path / 'val' / unknown[0]}: no such class in {path / 'train'}")
        numbers = _numbers(folders, listed, path / "train")
        train = _class_files(path / "train", folders, numbers)
        test = _class_files(path / "val", test_folders, numbers)
        note = "train and val are the folders of these names"
    else:
        folders = _class_names(path, 2)
        numbers = _numbers(folders, listed, path)
        files, labels = _class_files(path, folders, numbers)
        train_places, test_places = _split(labels, {numbers[name]: name for name in folders}, path)
        train = ([files[place] for place in train_places], labels[train_places])
        test = ([files[place] for place in test_places], labels[test_places])
        note = "no train and val folders: a fifth of each class, drawn once and for all, is the test"
    return Split(train, test, folders if listed is None else tuple(listed.values()), note)


@dataclass(frozen=True)
class ImageTree:
    """The images of a folder, whole.

    Attributes:
        train: files with labels.
        test: likewise.
        classes: the names, by label.
        side: the median shorter side of the files.
        note: how they were divided.
    """

    train: ImageFiles
    test: ImageFiles
    classes: tuple[str, ...]
    side: int
    note: str


def image_files(path: Path | str, decoder: Decoder | None = None, *, device: Device | str | None = "cpu") -> ImageTree:
    """Returns the images of a folder with a sub-folder a class, at their own sizes; see `split_folder`.

    Args:
        path: the folder.
        decoder: None raises what is broken, and decodes to one channel when all files are grey, else three: by
            nvImageCodec onto `device` where it is there, else by Pillow on the host.
        device: onto which to decode when no decoder is given.

    Raises:
        FileNotFoundError, NotADirectoryError: no such folder.
        ValueError: no classes or images to divide; a broken file, or none but broken ones where the decoder skips.
        DeviceNotFoundError: no such device.
    """
    split = split_folder(path)
    skip = decoder is not None and decoder.on_error == "skip"
    side, channels = _survey([*split.train[0], *split.test[0]], skip=skip)
    if decoder is None:
        decoder = Decoder(device, channels=channels)
        if not decoder.uses_nvimgcodec:
            # A prefetcher copies faster from the host than the decoder does: from page-locked memory.
            decoder = Decoder(channels=channels)
    return ImageTree(
        ImageFiles(*split.train, decoder), ImageFiles(*split.test, decoder), split.classes, side, split.note
    )


def image_folder(path: Path | str, device: Device | str | None = "cpu") -> ImageData:
    """Returns the images of a folder with a sub-folder a class, whole, with transforms that make batches of them.

    Training images are resized to a random shorter side, cropped at a random place and mirrored or not; those of the
    test are resized and cropped in the middle. Images come out at 224x224 like ImageNet's, or at their own size when it
    is small; grey only when all of them are. Samples are those of `ImageFiles`; the note says who decodes them.

    Args:
        path: the folder, see `split_folder`.
        device: where nvImageCodec decodes, if it is there; see `image_files`.

    Raises:
        FileNotFoundError, NotADirectoryError: no such folder.
        ValueError: fewer than two classes, a class without images, a class for the test alone, or a broken file.
        DeviceNotFoundError: no such device.
    """
    tree = image_files(path, device=device)
    channels = tree.train.decoder.channels
    size, train_sides, test_side = _served_sizes(tree.side)
    mean, std = _photograph_statistics(channels)
    return ImageData(
        f"folder:{path}",
        tree.train,
        tree.test,
        tree.classes,
        (channels, size, size),
        f"{tree.note}; decoded by {tree.train.decoder.description}",
        (Augment(size, "resize-then-crop", sides=train_sides, mean=mean, std=std),),
        (Augment(size, "centre", sides=test_side, flip=0.0, mean=mean, std=std),),
    )


def _served_sizes(side: int) -> tuple[int, tuple[int, int], int]:
    """Returns the size of the images served, and what their shorter side becomes: from and to, and for the test."""
    if side < _SMALL_SIDE:
        return side, (side, round(side * 9 / 8)), side
    # For photographs as in Krizhevsky et al. 2012 and He et al. 2015: 256 to 480 for training, 256 for the test.
    return 224, (256, 480), 256


def _photograph_statistics(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and standard deviation, one number a channel."""
    if channels == 3:
        return PHOTOGRAPH_MEAN, PHOTOGRAPH_STD
    return (float(np.mean(PHOTOGRAPH_MEAN)),), (float(np.mean(PHOTOGRAPH_STD)),)


def _class_names(folder: Path, least: int) -> tuple[str, ...]:
    names = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")))
    if len(names) < least:
        raise ValueError(f"{folder}: {len(names)} sub-folders: expected one a class, and at least {least}")
    return names


def _read_labels(file: Path) -> dict[str, str]:
    """Returns the class names by sub-folder, in the order of the lines."""
    names: dict[str, str] = {}
    try:
        # Some editors begin a file with a mark of its encoding.
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be UTF-8: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        folder, comma, name = (part.strip() for part in line.partition(","))
        if not comma or not folder or not name:
            raise ValueError(f"{file}, line {number}: {line!r} must be FOLDER,NAME")
        if folder in names:
            raise ValueError(f"{file}, line {number}: {folder} is listed twice")
        names[folder] = name
    if not names:
        raise ValueError(f"{file} is empty")
    return names


def _numbers(folders: Sequence[str], listed: dict[str, str] | None, folder: Path) -> dict[str, int]:
    """Returns the labels by sub-folder."""
    numbers = {name: label for label, name in enumerate(folders if listed is None else listed)}
    unknown = [name for name in folders if name not in numbers]
    if unknown:
        raise ValueError(f"{folder / unknown[0]}: {LABELS_FILE} does not list it")
    return numbers


def _class_files(folder: Path, classes: Sequence[str], numbers: dict[str, int]) -> tuple[list[Path], NDArray[np.int64]]:
    files: list[Path] = []
    labels: list[int] = []
    for name in classes:
        found = sorted(
            entry
            for entry in (folder / name).iterdir()
            if entry.suffix.lower() in IMAGE_SUFFIXES and not entry.name.startswith(".") and entry.is_file()
        )
        if not found:
            raise ValueError(f"{folder / name}: no image files ({', '.join(IMAGE_SUFFIXES)}) right in it")
        files.extend(found)
        labels.extend([numbers[name]] * len(found))
    return files, np.array(labels, np.int64)


def _split(
    labels: NDArray[np.int64], names: dict[int, str], folder: Path
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    train = []
    test = []
    for label, name in names.items():
        members = np.flatnonzero(labels == label)
        if len(members) < 2:
            raise ValueError(f"{folder / name}: one image cannot be divided into training and test images")
        members = members[epoch_order(len(members), 0, label)]
        held_out = max(1, len(members) // 5)
        test.append(np.sort(members[:held_out]))
        train.append(np.sort(members[held_out:]))
    return np.concatenate(train), np.concatenate(test)


def _survey(files: Sequence[Path], *, skip: bool = False) -> tuple[int, int]:
    """Returns the median shorter side of evenly spread files, and 1 channel when every file is one of them and grey.

    Args:
        files: at least one.
        skip: leave out what cannot be read, unless it is all.
    """
    step = max(1, -(-len(files) // _SAMPLED_HEADERS))
    headers: list[Header] = []
    first: DecodeError | OSError | None = None
    for file in files[::step]:
        try:
            headers.append(read_header(file))
        except (DecodeError, OSError) as error:
            if not skip:
                raise
            first = first or error
    if not headers and first is not None:
        raise first
    grey = step == 1 and all(header.mode in _GREY_MODES for header in headers)
    return int(np.median([min(header.height, header.width) for header in headers])), 1 if grey else 3
