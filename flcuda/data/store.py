"""Images decoded once and kept: on the device, in host memory, or on disk.

An image is stored whole, or reduced to a stated shorter side; crops are left to the transforms. The store is filled by
being read, or at once by `fill`. What no longer fits is decoded each time that it is asked for, and warned of once.

On disk an image is one file, written beside its name and renamed, so that a killed process leaves no half of one. Its
name is made of the source's path, the shorter side and the channels; the source's size and time are in it, and where
they have changed it is removed and written anew. A file that is damaged or not ours costs one decoding and one warning.
Files of sources that are gone, or of sides no longer asked for, stay until somebody removes the folder.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import struct
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from numpy.typing import NDArray
from PIL import Image

from flcuda.data.chain import checked_index, checked_indices, whole_number
from flcuda.data.decode import Decoder, read_header
from flcuda.data.folder import ImageFiles, some_indices
from flcuda.data.images import ALIGNMENT, ImageBatch, places_of
from flcuda.device import CPU, Array, cupy
from flcuda.errors import DecodeError
from flcuda.ops.images import gather_images

CACHES = ("device", "host", "disk")
PLACES = {"device": "device memory", "host": "host memory", "disk": "disk"}

# Of what is free when the store is made.
_DEFAULT_SHARE = 2
_SURVEYED_HEADERS = 2000
# What the memory of a store is larger than the mean of the surveyed files says.
_MARGIN = 1.1
_MARGIN_BYTES = 16 << 20
_HOST_GROUP = 32
_DEVICE_GROUP = 128
_MAGIC = b"FLCUDAi2"
# Then height, width, channels, the checksum of the pixels, and the state of the source.
_HEAD = struct.Struct("<8sIIIIQ")
_SUFFIX = ".pixels"
_TEMPORARY = ".tmp"
_STALE_S = 24 * 3600
# What other processes write is seen when half of what is left was written here, while that is this part of the limit.
_LEAST_ROOM = 64
# No image will be written any more; other errors are one image's.
_LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)

_ABSENT, _CLAIMED, _STORED, _BROKEN = range(4)


@dataclass(frozen=True)
class StorePlan:
    """What a store can hold.

    Attributes:
        images: number of images of the data set.
        side: the shorter side to which larger images are reduced; None keeps them whole.
        height, width: mean size of the stored images, in pixels.
        image_bytes: mean, with what aligns the next.
        limit: bytes that the store may take.
        fits: how many of the images fit; on disk beside what else is in the folder, with those that are there.
        exact: whether all files were looked at, not a part of them.
        present: how many of the images were there when the store was made.
    """

    images: int
    side: int | None
    height: float
    width: float
    image_bytes: float
    limit: int
    fits: int
    exact: bool
    present: int = 0


class DecodedStore:
    """A data set of image files that decodes each of them once.

    Sample i is `(image, label)`: uint8 (height, width, channels) on the host and an int64 number. A batch is an
    `ImageBatch` and int64 labels: on the device for `cache="device"`, else on the host.

    Args:
        source: the files.
        cache: "device": memory of the source's decoder's device; "host": this process's memory; "disk": `folder`.
        side: reduce larger images to this shorter side, by Pillow on the host with its antialiased bilinear filter;
            smaller ones stay. None: whole images.
        limit: bytes at most; None: half of what is free now, on disk half of what is free or in the folder. On disk it
            counts all that is in the folder. Of processes that fill one folder at a time each sees only now and then
            what the others write, so that together they may pass it; by little when they are two.
        folder: of `cache="disk"`; default in the user's cache. Its files are left when the process ends: remove it to
            be rid of them.
        threads: that `fill` uses on the host; 0: one a core.

    Raises:
        ValueError: an unknown word or a number out of range; names it.
        TypeError: a number that is not whole; names it.
    """

    def __init__(
        self,
        source: ImageFiles,
        cache: str = "host",
        *,
        side: int | None = None,
        limit: int | None = None,
        folder: Path | str | None = None,
        threads: int = 0,
    ) -> None:
        if cache not in CACHES:
            raise ValueError(f"cache must be one of {', '.join(CACHES)}, not {cache!r}")
        if folder is not None and cache != "disk":
            raise ValueError(f"folder is for cache='disk', not {cache!r}")
        self.source = source
        self.cache = cache
        self.side = None if side is None else whole_number("side", side, 1)
        self.threads = whole_number("threads", threads, 0)
        self._asked_limit = None if limit is None else whole_number("limit", limit, 1)
        self.folder = Path(platformdirs.user_cache_dir("flcuda"), "images") if folder is None else Path(folder)
        self._start()

    def _start(self) -> None:
        decoder = self.source.decoder
        self.labels = self.source.labels
        self.device = decoder.device if self.cache == "device" else CPU
        # Reduced by Pillow, so decoded on the host; only whole images for the device are decoded there.
        here = self.device == decoder.device and (self.side is None or self.device == CPU)
        self.decoder = decoder if here else Decoder(CPU, channels=decoder.channels, on_error=decoder.on_error)
        self._lock = threading.Lock()
        self._states = np.zeros(len(self.source), np.int8)
        self._offsets = np.zeros(len(self.source), np.int64)
        self._sizes = np.zeros((len(self.source), 2), np.int32)
        self._errors: dict[int, DecodeError] = {}
        self._memory: Array = None
        self._used = 0
        self._refused = False
        # An engine wants large batches; threads want many.
        self._group = _HOST_GROUP if self.decoder.device == CPU else _DEVICE_GROUP
        self._files = _Files(self.folder) if self.cache == "disk" else None
        if self._asked_limit is None:
            taken = 0 if self._files is None else self._files.used
            self.limit = (self._free() + taken) // _DEFAULT_SHARE
        else:
            self.limit = self._asked_limit
        if self._files is not None:
            self._files.limit = self.limit
        self.plan = self._survey()

    def __getstate__(self) -> dict[str, Any]:
        names = ("source", "cache", "side", "threads", "folder", "_asked_limit")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __len__(self) -> int:
        return len(self.source)

    @property
    def best_workers(self) -> int | None:
        """How many threads a loader should have: what the decoder says."""
        return self.decoder.best_workers

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        images, labels = self.batch(np.array([checked_index(index, len(self))], np.int64), 0)
        image = images.image(0)
        return (image if self.device == CPU else image.get()), labels[0]

    @property
    def stored(self) -> int:
        """How many images this process knows to be stored; on disk others may be, see `plan.present`."""
        return int((self._states == _STORED).sum())

    @property
    def nbytes(self) -> int:
        """Bytes that the stored images take; on disk, with what was there before."""
        return self._used if self._files is None else self._files.used

    def __str__(self) -> str:
        plan = self.plan
        size = "whole" if plan.side is None else f"at shorter side {plan.side}"
        about = "" if plan.exact else "about "
        fits = (
            f"all {plan.images:,} images fit" if plan.fits == plan.images else f"{plan.fits:,} of {plan.images:,} fit"
        )
        mean = f"mean {plan.height:.0f}x{plan.width:.0f}, {plan.image_bytes / 1024:.0f} KiB"
        place = f"{PLACES[self.cache]} ({self.device})" if self.cache == "device" else PLACES[self.cache]
        stored = self.stored
        there = f"{stored:,}" if plan.exact or stored >= plan.present else f"about {plan.present:,}"
        return f"images {size} ({mean}) in {place}: {about}{fits} in {_gib(plan.limit)}; {there} are there"

    def batch(self, indices: NDArray[np.int64], epoch: int) -> tuple[ImageBatch, NDArray[np.int64]]:  # noqa: ARG002
        """Returns the images of these indices and int64 labels (N,), a NumPy array.

        On the device copied on the current stream, in memory of their own.

        Raises:
            DecodeError: an image is broken; when the decoder skips, only if none of them is left.
            IndexError: an index out of range.
            ValueError: no index.
        """
        fields, kept, failed = self._served(indices)
        if not len(kept):
            raise failed[int(indices[0]) % len(self)].fresh()
        images, labels = fields
        return images, labels

    def batch_kept(self, indices: NDArray[np.int64], epoch: int) -> tuple[tuple[Any, ...], NDArray[np.int64]]:  # noqa: ARG002
        """Returns what is left of a batch, and which of the samples it is; see `KeepsSome`."""
        return self._served(indices)[:2]

    def _served(self, indices: NDArray[np.int64]) -> tuple[tuple[Any, ...], NDArray[np.int64], dict[int, DecodeError]]:
        indices = some_indices(indices, len(self))
        absent = indices if self._files is not None else indices[self._states[indices] != _STORED]
        fresh, failed = self._fetch(np.unique(absent).tolist())
        kept = np.flatnonzero([index not in failed for index in indices.tolist()])
        left = indices[kept]
        return (self._gathered(left, fresh), self.labels[left]) if len(kept) else (), kept, failed

    def view(self, indices: NDArray[np.int64]) -> ImageBatch:
        """Returns images that are in memory without a copy: the pixels of the batch are those of the whole store.

        For kernels that read images by their offsets; whoever copied the pixels would copy the store. Do not write
        into them.

        Raises:
            ValueError: the store is on disk, or an image is not there.
            IndexError: an index out of range.
        """
        indices = checked_indices(indices, len(self))
        absent = np.flatnonzero(self._states[indices] != _STORED)
        if self._files is not None or len(absent):
            what = "the store is on disk" if self._files is not None else f"image {indices[absent[0]]} is not stored"
            raise ValueError(f"indices cannot be viewed: {what}")
        return ImageBatch(self._memory, self._offsets[indices], self._sizes[indices], self.decoder.channels)

    def _gathered(self, indices: NDArray[np.int64], fresh: dict[int, Array]) -> ImageBatch:
        if self.device == CPU:
            return ImageBatch.of([fresh[i] if i in fresh else self._view(i) for i in indices.tolist()])
        channels = self.decoder.channels
        sizes = self._sizes[indices]
        sources = self._offsets[indices] + (0 if self._memory is None else self._memory.data.ptr)
        for place, index in enumerate(indices.tolist()):
            if index in fresh:
                sizes[place] = fresh[index].shape[:2]
                sources[place] = fresh[index].data.ptr
        offsets, total = places_of(sizes, channels)
        with self.device.use():
            # The gaps between images are whatever is there: nobody reads them.
            pixels = self.device.xp.empty(total, np.uint8)
            heights, widths = sizes.T
            gather_images(pixels, offsets, sources, heights, widths * channels)
        return ImageBatch(pixels, offsets, sizes, channels)

    def _view(self, index: int) -> Array:
        height, width = self._sizes[index].tolist()
        channels = self.decoder.channels
        start = int(self._offsets[index])
        return self._memory[start : start + height * width * channels].reshape(height, width, channels)

    def fill(self, progress: Callable[[int, int], object] | None = None) -> None:
        """Decodes what is not there yet, until the store is full.

        Args:
            progress: called with the number of images done and of all.

        Raises:
            DecodeError: an image is broken, and the decoder raises.
        """
        left = np.flatnonzero(self._states != _STORED)
        groups = [left[start : start + self._group].tolist() for start in range(0, len(left), self._group)]
        done = len(self) - len(left)
        # The GPU's decoder divides a batch itself; two threads read files meanwhile.
        threads = self.threads or (2 if self.decoder.device != CPU else os.cpu_count() or 1)
        for group in _ahead(groups, self._fetch_group, threads):
            done += group
            if progress is not None:
                progress(done, len(self))
            if self._is_full():
                return

    def _fetch_group(self, group: list[int]) -> int:
        self._fetch([index for index in group if self._files is None or not self._is_present(index)])
        return len(group)

    def _is_present(self, index: int) -> bool:
        """Whether an image is on disk, by the beginning of its file."""
        assert self._files is not None
        found = self._files.size(*self._file(index)) > 0
        if found:
            self._states[index] = _STORED
        return found

    def _is_full(self) -> bool:
        if self._files is not None:
            return self._files.is_full
        return self._refused and self._used + self.plan.image_bytes > len(self._memory)

    def _fetch(self, indices: Sequence[int]) -> tuple[dict[int, Array], dict[int, DecodeError]]:
        """Returns images that are not in memory, and why others cannot be had; those that fit are there afterwards."""
        found: dict[int, Array] = {}
        failed: dict[int, DecodeError] = {}
        for index in indices:
            if self._files is not None:
                image = self._files.read(*self._file(index), self.decoder.channels)
                if image is not None:
                    found[index] = image
                    self._states[index] = _STORED
        left = []
        for index in indices:
            if index in found:
                continue
            if self._states[index] == _BROKEN:
                failed[index] = self._errors[index]
            else:
                left.append(index)
        for start in range(0, len(left), self._group):
            images, errors = self._decoded(left[start : start + self._group])
            found.update(images)
            failed.update(errors)
        return found, failed

    def _decoded(self, indices: Sequence[int]) -> tuple[dict[int, Array], dict[int, DecodeError]]:
        # Before the sources are read: one that changes meanwhile is not stored as what it has become.
        places = {} if self._files is None else {index: self._file(index) for index in indices}
        with self.device.use():
            images, errors = self._decode(indices)
            claimed = []
            for index, image in images.items():
                if self._files is not None:
                    if self._files.write(*places[index], image):
                        self._states[index] = _STORED
                elif self._claim(index, image.shape):
                    self._view(index)[...] = image
                    claimed.append(index)
            if self.device != CPU:
                # Only then may another stream read them.
                cupy().cuda.get_current_stream().synchronize()
            for index in claimed:
                self._states[index] = _STORED
        with self._lock:
            for index, error in errors.items():
                # What could not be read may be readable next time.
                if not error.unread:
                    self._errors[index] = error
                    self._states[index] = _BROKEN
        return images, errors

    def _decode(self, indices: Sequence[int]) -> tuple[dict[int, Array], dict[int, DecodeError]]:
        """Returns images as they are stored, on this store's device, and the errors of the others."""
        files = [self.source.files[index] for index in indices]
        if self.decoder.device != CPU:
            decoded = self.decoder.decode(files)
            kept = [indices[place] for place in decoded.kept]
            left = [index for index in indices if index not in kept]
            errors = dict(zip(left, decoded.errors, strict=True))
            return {} if decoded.batch is None else dict(zip(kept, decoded.batch.images(), strict=True)), errors
        images = {}
        errors = {}
        for index, result in zip(indices, self.decoder.decode_on_host(files), strict=True):
            if isinstance(result, DecodeError):
                errors[index] = result
                continue
            height, width = stored_size(result.shape[0], result.shape[1], self.side)
            if (height, width) != result.shape[:2]:
                picture = Image.fromarray(result if result.shape[2] == 3 else result[:, :, 0])
                reduced = picture.resize((width, height), Image.Resampling.BILINEAR)
                result = np.array(reduced).reshape(height, width, result.shape[2])
            images[index] = self.device.xp.asarray(result)
        return images, errors

    def _claim(self, index: int, shape: tuple[int, ...]) -> bool:
        """Takes a place for an image, unless another thread did or there is none."""
        size = -(-int(np.prod(shape)) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if self._memory is None:
                self._memory = self.device.xp.empty(self._needed(), np.uint8)
            if self._states[index] != _ABSENT:
                return False
            fits = self._used + size <= len(self._memory)
            if fits:
                self._states[index] = _CLAIMED
                self._offsets[index] = self._used
                self._sizes[index] = shape[:2]
                self._used += size
            first = not fits and not self._refused
            self._refused |= not fits
        if first:
            message = f"the store in {PLACES[self.cache]} is full at {_gib(len(self._memory))}"
            warnings.warn(f"{message}: images that are not in it are decoded each time", RuntimeWarning, stacklevel=2)
        return fits

    def _needed(self) -> int:
        """Returns the bytes of memory to take: of the host it becomes real only where it is written."""
        bytes_ = self.plan.image_bytes * self.plan.images
        if not self.plan.exact:
            bytes_ = bytes_ * _MARGIN + _MARGIN_BYTES
        return min(self.limit, int(bytes_) + ALIGNMENT) // ALIGNMENT * ALIGNMENT

    def _file(self, index: int) -> tuple[Path, int]:
        """Returns where on disk an image is, and the state of its source."""
        path = self.source.files[index]
        try:
            found = path.stat()
            state = f"{found.st_size} {found.st_mtime_ns}"
        except OSError:
            # The decoder says what is wrong with it.
            state = "none"
        key = f"{os.path.abspath(path)}\n{self.side}\n{self.decoder.channels}"  # noqa: PTH100 - resolves links
        name = _digest(key)[:20].hex()
        return self.folder / name[:2] / (name[2:] + _SUFFIX), int.from_bytes(_digest(state)[:8], "little")

    def _free(self) -> int:
        if self.cache == "disk":
            existing = next(folder for folder in (self.folder, *self.folder.absolute().parents) if folder.exists())
            return shutil.disk_usage(existing).free
        if self.device == CPU:
            return free_host_memory()
        with self.device.use():
            return int(cupy().cuda.runtime.memGetInfo()[0])

    def _survey(self) -> StorePlan:
        count = len(self.source)
        step = max(1, -(-count // _SURVEYED_HEADERS))
        sizes = []
        there = []
        for index in range(0, count, step):
            # The decoder says what is wrong with it.
            with contextlib.suppress(DecodeError, OSError):
                header = read_header(self.source.files[index])
                size = (header.height, header.width) if header.orientation < 5 else (header.width, header.height)
                sizes.append(stored_size(*size, self.side))
                there.append(self._files is not None and self._is_present(index))
        if not sizes:
            return StorePlan(count, self.side, 0.0, 0.0, 0.0, self.limit, 0, step == 1)
        pixels = np.array(sizes, np.int64).prod(axis=1) * self.source.decoder.channels
        each = -(-pixels // ALIGNMENT) * ALIGNMENT if self._files is None else pixels + _HEAD.size
        mean = float(each.mean())
        room = max(0, self.limit - (0 if self._files is None else self._files.used))
        if step == 1:
            present = sum(there)
            fits = int((np.cumsum(each[~np.array(there)]) <= room).sum()) + present + count - len(sizes)
        else:
            present = round(float(np.mean(there)) * count)
            fits = present + min(count - present, int(room / mean))
        height, width = np.mean(np.array(sizes, np.float64), axis=0)
        return StorePlan(count, self.side, float(height), float(width), mean, self.limit, fits, step == 1, present)


class _Files:
    """The folder of a store on disk; made when the first image is written.

    Attributes:
        limit: bytes at most, of all files in it.
        is_full: no more images are written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.limit = 0
        self.is_full = False
        self._lock = threading.Lock()
        # Bytes of the folder's files, without those that are being written; None: not measured yet.
        self._measured: int | None = None
        self._used_when_measured = 0
        self._written_since = 0
        # Files that are being written, and the bytes of all of them.
        self._writing: set[str] = set()
        self._reserved = 0
        self._warned = False
        self._lasting = False
        self._told: set[int | None] = set()

    @property
    def used(self) -> int:
        """Bytes of all files in the folder, with those that are being written."""
        with self._lock:
            return (self._measure() if self._measured is None else self._measured) + self._reserved

    def size(self, path: Path, state: int) -> int:
        """Returns the bytes of a stored image of a source in this state, 0 when there is none."""
        try:
            with path.open("rb", buffering=0) as file:
                size, found, _, _ = _read_head(file)
        except (OSError, ValueError):
            return 0
        return size if found == state else 0

    def read(self, path: Path, state: int, channels: int) -> NDArray[np.uint8] | None:
        """Returns a stored image, or None: there is none, or it is damaged, which is warned of.

        What is damaged, or made of the source as it was, is removed; not what cannot be read now.
        """
        found = None
        try:
            with path.open("rb", buffering=0) as file:
                found = os.fstat(file.fileno())
                pixels = _read_pixels(file, state, channels)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            if found is not None and isinstance(error, ValueError):
                self._remove(path, found)
            warnings.warn(f"{path} is decoded anew: {error}", RuntimeWarning, stacklevel=2)
            return None
        if pixels is None:
            self._remove(path, found)
        return pixels

    def write(self, path: Path, state: int, image: NDArray[np.uint8]) -> bool:
        """Stores an image, unless the limit or the disk is reached; False when it did not."""
        size = _HEAD.size + image.nbytes
        if self.size(path, state):
            # By another thread, meanwhile.
            return True
        if not self._reserve(size):
            return False
        temporary = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(_TEMPORARY, dir=path.parent)
            with self._lock:
                self._writing.add(temporary)
            with open(handle, "wb") as file:  # noqa: PTH123 - a descriptor
                height, width, channels = image.shape
                pixels = np.ascontiguousarray(image).reshape(-1)
                file.write(_HEAD.pack(_MAGIC, height, width, channels, zlib.crc32(pixels.data), state))
                file.write(pixels.data)
            with self._lock:
                before = _size(path)
                os.replace(temporary, path)  # noqa: PTH105 - a name
                if self._measured is not None:
                    self._measured += size - before
                self._written_since += size
            return True
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)  # noqa: PTH108 - a name
            self._warn_of(path, error)
            return False
        finally:
            with self._lock:
                self._reserved -= size
                self._writing.discard(temporary or "")

    def _warn_of(self, path: Path, error: OSError) -> None:
        with self._lock:
            lasting = error.errno in _LASTING
            first = not self._lasting if lasting else error.errno not in self._told
            self._told.add(error.errno)
            self._lasting |= lasting
            self.is_full |= lasting
        if not first:
            return
        if not lasting:
            warnings.warn(f"{path} is not stored: {error}", RuntimeWarning, stacklevel=3)
        else:
            full = "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "cannot be written"
            message = f"{self.folder} {full}, no more images are stored: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def _reserve(self, size: int) -> bool:
        with self._lock:
            if self.is_full:
                return False
            used = (self._measure() if self._measured is None else self._measured) + self._reserved
            left = self.limit - self._used_when_measured
            if used + size > self.limit or (self._written_since > left // 2 and left > self.limit // _LEAST_ROOM):
                used = self._measure() + self._reserved
            if used + size <= self.limit:
                self._reserved += size
                return True
            self.is_full = True
            first = not self._warned
            self._warned = True
        if first:
            message = f"{self.folder} has reached its limit of {_gib(self.limit)}"
            message = f"{message}: images that are not in it are decoded each time; give a larger limit, or remove the"
            warnings.warn(f"{message} folder if other data sets or sides filled it", RuntimeWarning, stacklevel=3)
        return False

    def _remove(self, path: Path, found: os.stat_result) -> None:
        """Removes a file, unless it has been replaced since it was found so."""
        with self._lock, contextlib.suppress(OSError):
            now = path.stat()
            if (now.st_ino, now.st_mtime_ns) == (found.st_ino, found.st_mtime_ns):
                path.unlink()
                if self._measured is not None:
                    self._measured -= now.st_size
                self.is_full = self._lasting

    def _measure(self) -> int:
        """Adds up the folder; the lock is held."""
        total = 0
        now = time.time()
        for parent, _, names in os.walk(self.folder):
            for name in names:
                path = Path(parent, name)
                if str(path) in self._writing:
                    continue
                with contextlib.suppress(OSError):
                    found = path.stat()
                    if name.endswith(_TEMPORARY) and now - found.st_mtime > _STALE_S:
                        # Of a process that was killed.
                        path.unlink()
                    else:
                        total += found.st_size
        self._measured = total
        self._used_when_measured = total + self._reserved
        self._written_since = 0
        return total


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_pixels(file: Any, state: int, channels: int) -> NDArray[np.uint8] | None:
    """Returns the pixels of a stored image, None when its source was another; ValueError when it is damaged."""
    _, found_state, shape, checksum = _read_head(file)
    if shape[2] != channels:
        raise ValueError(f"it has {shape[2]} channels, not {channels}")
    if found_state != state:
        return None
    pixels = np.empty(shape, np.uint8)
    if file.readinto(pixels.reshape(-1).data) != pixels.size or zlib.crc32(pixels.reshape(-1).data) != checksum:
        raise ValueError("its checksum is wrong")
    return pixels


def _read_head(file: Any) -> tuple[int, int, tuple[int, int, int], int]:
    """Returns a stored image's bytes, state of the source, shape and checksum; ValueError when it is damaged."""
    size = os.fstat(file.fileno()).st_size
    head = file.read(_HEAD.size)
    if len(head) != _HEAD.size or not head.startswith(_MAGIC):
        raise ValueError("it is no stored image")
    _, height, width, channels, checksum, state = _HEAD.unpack(head)
    expected = height * width * channels
    if not expected or size != _HEAD.size + expected:
        raise ValueError(f"it has {size} bytes, its header says {height}x{width}x{channels}")
    return size, state, (height, width, channels), checksum


def stored_size(height: int, width: int, side: int | None) -> tuple[int, int]:
    """Returns the size of an image reduced to a shorter side; its own when it is not larger."""
    if side is None or min(height, width) <= side:
        return height, width
    scale = side / min(height, width)
    return max(side, round(height * scale)), max(side, round(width * scale))


def free_host_memory() -> int:
    """Returns the bytes of host memory that this process can still take, by the system and its control group."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(free, 1)


def _ahead(groups: Sequence[list[int]], work: Callable[[list[int]], int], threads: int) -> Iterator[int]:
    """Does the work on groups in threads, a few ahead of who takes the results; ends at once when that one leaves."""
    if threads < 2:
        yield from map(work, groups)
        return
    pool = ThreadPoolExecutor(threads, "flcuda-store")
    try:
        pending: list[Future[int]] = []
        for group in groups:
            pending.append(pool.submit(work, group))
            if len(pending) >= 2 * threads:
                yield pending.pop(0).result()
        while pending:
            yield pending.pop(0).result()
    finally:
        # Waits for what is being decoded, so that nothing is written after this.
        pool.shutdown(cancel_futures=True)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
