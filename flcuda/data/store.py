"""Images decoded once and kept: on the device, in host memory, or on disk.

An image is stored whole, or reduced to a stated shorter side; crops are left to the transforms. The store is filled by
being read, or at once by `fill`. What no longer fits is decoded each time that it is asked for, and said.

On disk an image is one file, written beside its name and renamed, so that a killed process leaves no half of one. Its
name is made of the source's path, size and time, the shorter side and the channels: a changed source is another file. A
file that is damaged or not ours costs one decoding and one warning.
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

from flcuda.data.decode import DecodeError, Decoder, read_header
from flcuda.data.folder import ImageFiles
from flcuda.data.images import ALIGNMENT, ImageBatch, places_of
from flcuda.device import CPU, Array, cupy

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
_MAGIC = b"FLCUDAi1"
_HEAD = struct.Struct("<8sIIIIQ")
_SUFFIX = ".pixels"
_TEMPORARY = ".tmp"
_STALE_S = 24 * 3600

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
        fits: how many of the images fit.
        exact: whether all files were looked at, not a part of them.
    """

    images: int
    side: int | None
    height: float
    width: float
    image_bytes: float
    limit: int
    fits: int
    exact: bool


class DecodedStore:
    """A data set of image files that decodes each of them once.

    Sample i is `(image, label)`: uint8 (height, width, channels) on the host and an int64 number. A batch is an
    `ImageBatch` and int64 labels: on the device for `cache="device"`, else on the host.

    Args:
        source: the files.
        cache: "device": memory of the source's decoder's device; "host": this process's memory; "disk": `folder`.
        side: reduce larger images to this shorter side, by Pillow on the host with its antialiased bilinear filter;
            smaller ones stay. None: whole images.
        limit: bytes at most; None: half of what is free now.
        folder: of `cache="disk"`; default in the user's cache. Its files are left when the process ends.
        threads: that `fill` uses on the host; 0: one a core.

    Raises:
        ValueError: an unknown word or a number out of range; names it.
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
        if side is not None and side < 1:
            raise ValueError(f"side must be at least 1, not {side}")
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1, not {limit}")
        if threads < 0:
            raise ValueError(f"threads must be at least 0, not {threads}")
        if folder is not None and cache != "disk":
            raise ValueError(f"folder is for cache='disk', not {cache!r}")
        self.source = source
        self.cache = cache
        self.side = side
        self.threads = threads
        self.folder = Path(platformdirs.user_cache_dir("flcuda"), "images") if folder is None else Path(folder)
        self._asked_limit = limit
        self._start()

    def _start(self) -> None:
        decoder = self.source.decoder
        self.labels = self.source.labels
        self.device = decoder.device if self.cache == "device" else CPU
        # Reduced by Pillow, so decoded on the host; only whole images for the device are decoded there.
        here = self.device == decoder.device and (self.side is None or self.device == CPU)
        self.decoder = decoder if here else Decoder(CPU, channels=decoder.channels, on_error=decoder.on_error)
        self.limit = self._free() // _DEFAULT_SHARE if self._asked_limit is None else self._asked_limit
        self.plan = self._survey()
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
        self._files = _Files(self.folder, self.limit) if self.cache == "disk" else None

    def __getstate__(self) -> dict[str, Any]:
        names = ("source", "cache", "side", "threads", "folder", "_asked_limit")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        images, labels = self.batch(np.array([index % len(self)], np.int64), 0)
        image = images.image(0)
        return (image if self.device == CPU else image.get()), labels[0]

    @property
    def stored(self) -> int:
        """How many images this process knows to be stored."""
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
        return f"images {size} ({mean}) in {place}: {about}{fits} in {_gib(plan.limit)}; {self.stored:,} are there"

    def batch(self, indices: NDArray[np.int64], epoch: int) -> tuple[ImageBatch, NDArray[np.int64]]:  # noqa: ARG002
        """Returns the images of these indices and int64 labels (N,), a NumPy array.

        On the device copied on the current stream, in memory of their own.

        Raises:
            DecodeError: an image is broken; when the decoder skips, only if none of them is left.
        """
        indices = np.asarray(indices, np.int64)
        absent = indices if self._files is not None else indices[self._states[indices] != _STORED]
        fresh = self._fetch(np.unique(absent).tolist())
        broken = np.array([index in self._errors and index not in fresh for index in indices.tolist()], bool)
        kept = indices[~broken]
        if not len(kept):
            raise self._errors[int(indices[0])]
        return self._gathered(kept, fresh), self.labels[kept]

    def view(self, indices: NDArray[np.int64]) -> ImageBatch:
        """Returns images that are in memory without a copy: the pixels of the batch are those of the whole store.

        For kernels that read images by their offsets; whoever copied the pixels would copy the store. Do not write
        into them.

        Raises:
            ValueError: the store is on disk, or an image is not there.
        """
        indices = np.asarray(indices, np.int64)
        absent = np.flatnonzero(self._states[indices] != _STORED)
        if self._files is not None or len(absent):
            what = "the store is on disk" if self._files is not None else f"image {indices[absent[0]]} is not stored"
            raise ValueError(f"indices cannot be viewed: {what}")
        return ImageBatch(self._memory, self._offsets[indices], self._sizes[indices], self.decoder.channels)

    def _gathered(self, indices: NDArray[np.int64], fresh: dict[int, Array]) -> ImageBatch:
        images = [fresh[i] if i in fresh else self._view(i) for i in indices.tolist()]
        if self.device == CPU:
            return ImageBatch.of(images)
        sizes = np.array([image.shape[:2] for image in images], np.int32)
        offsets, total = places_of(sizes, self.decoder.channels)
        with self.device.use():
            pixels = self.device.xp.zeros(total, np.uint8)
            cuda = cupy().cuda
            stream, kind = cuda.get_current_stream().ptr, cuda.runtime.memcpyDeviceToDevice
            for image, offset in zip(images, offsets.tolist(), strict=True):
                # Half as long for the host as an assignment.
                cuda.runtime.memcpyAsync(pixels.data.ptr + offset, image.data.ptr, image.nbytes, kind, stream)
        return ImageBatch(pixels, offsets, sizes, self.decoder.channels)

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
        self._fetch(group)
        return len(group)

    def _is_full(self) -> bool:
        if self._files is not None:
            return self._files.is_full
        return self._refused and self._used + self.plan.image_bytes > len(self._memory)

    def _fetch(self, indices: Sequence[int]) -> dict[int, Array]:
        """Returns images that are not in memory; those that fit are there afterwards."""
        found: dict[int, Array] = {}
        for index in indices:
            if self._files is not None:
                image = self._files.read(self._file(index), self.decoder.channels)
                if image is not None:
                    found[index] = image
                    self._states[index] = _STORED
        left = [index for index in indices if index not in found and self._states[index] != _BROKEN]
        for start in range(0, len(left), self._group):
            found.update(self._decoded(left[start : start + self._group]))
        return found

    def _decoded(self, indices: Sequence[int]) -> dict[int, Array]:
        with self.device.use():
            images = self._decode(indices)
            claimed = []
            for index, image in images.items():
                if self._files is not None:
                    if self._files.write(self._file(index), image):
                        self._states[index] = _STORED
                elif self._claim(index, image.shape):
                    self._view(index)[...] = image
                    claimed.append(index)
            if self.device != CPU:
                # Only then may another stream read them.
                cupy().cuda.get_current_stream().synchronize()
            for index in claimed:
                self._states[index] = _STORED
        return images

    def _decode(self, indices: Sequence[int]) -> dict[int, Array]:
        """Returns images as they are stored, on this store's device."""
        files = [self.source.files[index] for index in indices]
        if self.decoder.device != CPU:
            decoded = self.decoder.decode(files)
            kept = [indices[place] for place in decoded.kept]
            failed = [index for index in indices if index not in kept]
            self._mark_broken(failed, decoded.errors)
            return {} if decoded.batch is None else dict(zip(kept, decoded.batch.images(), strict=True))
        images = {}
        for index, result in zip(indices, self.decoder.decode_on_host(files), strict=True):
            if isinstance(result, DecodeError):
                self._mark_broken([index], [result])
                continue
            height, width = stored_size(result.shape[0], result.shape[1], self.side)
            if (height, width) != result.shape[:2]:
                picture = Image.fromarray(result if result.shape[2] == 3 else result[:, :, 0])
                reduced = picture.resize((width, height), Image.Resampling.BILINEAR)
                result = np.array(reduced).reshape(height, width, result.shape[2])
            images[index] = self.device.xp.asarray(result)
        return images

    def _mark_broken(self, indices: Sequence[int], errors: Sequence[DecodeError]) -> None:
        with self._lock:
            for index, error in zip(indices, errors, strict=True):
                self._states[index] = _BROKEN
                self._errors[index] = error

    def _claim(self, index: int, shape: tuple[int, ...]) -> bool:
        """Takes a place for an image, unless another thread did or there is none."""
        size = -(-int(np.prod(shape)) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if self._memory is None:
                self._memory = self.device.xp.empty(self._needed(), np.uint8)
            if self._states[index] != _ABSENT:
                return False
            if self._used + size > len(self._memory):
                self._refused = True
                return False
            self._states[index] = _CLAIMED
            self._offsets[index] = self._used
            self._sizes[index] = shape[:2]
            self._used += size
        return True

    def _needed(self) -> int:
        """Returns the bytes of memory to take: of the host it becomes real only where it is written."""
        bytes_ = self.plan.image_bytes * self.plan.images
        if not self.plan.exact:
            bytes_ = bytes_ * _MARGIN + _MARGIN_BYTES
        return min(self.limit, int(bytes_) + ALIGNMENT) // ALIGNMENT * ALIGNMENT

    def _file(self, index: int) -> Path:
        path = self.source.files[index]
        try:
            found = path.stat()
            state = f"{found.st_size} {found.st_mtime_ns}"
        except OSError:
            # The decoder says what is wrong with it.
            state = "none"
        key = f"{os.path.abspath(path)}\n{state}\n{self.side}\n{self.decoder.channels}"  # noqa: PTH100 - resolves links
        name = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:40]
        return self.folder / name[:2] / (name[2:] + _SUFFIX)

    def _free(self) -> int:
        if self.cache == "disk":
            existing = next(folder for folder in (self.folder, *self.folder.absolute().parents) if folder.exists())
            return shutil.disk_usage(existing).free
        if self.device == CPU:
            return free_host_memory()
        with self.device.use():
            return int(cupy().cuda.runtime.memGetInfo()[0])

    def _survey(self) -> StorePlan:
        files = self.source.files
        step = max(1, -(-len(files) // _SURVEYED_HEADERS))
        sizes = []
        for file in files[::step]:
            # The decoder says what is wrong with it.
            with contextlib.suppress(DecodeError, OSError):
                header = read_header(file)
                size = (header.height, header.width) if header.orientation < 5 else (header.width, header.height)
                sizes.append(stored_size(*size, self.side))
        if not sizes:
            return StorePlan(len(files), self.side, 0.0, 0.0, 0.0, self.limit, 0, step == 1)
        channels = self.source.decoder.channels
        each = [-(-height * width * channels // ALIGNMENT) * ALIGNMENT for height, width in sizes]
        mean = float(np.mean(each))
        if step == 1:
            fits = int((np.cumsum(each) <= self.limit).sum()) + len(files) - len(sizes)
        else:
            fits = min(len(files), int(self.limit / mean))
        height, width = np.mean(np.array(sizes, np.float64), axis=0)
        return StorePlan(len(files), self.side, float(height), float(width), mean, self.limit, fits, step == 1)


class _Files:
    """The folder of a store on disk.

    Args:
        folder: made when the first image is written.
        limit: bytes at most, of all files in it.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self.is_full = False
        self._lock = threading.Lock()
        self._used: int | None = None

    @property
    def used(self) -> int:
        """Bytes of all files in the folder."""
        with self._lock:
            return self._known_used()

    def read(self, path: Path, channels: int) -> NDArray[np.uint8] | None:
        """Returns a stored image, or None: there is none, or it is damaged, which is warned of and removed."""
        try:
            with path.open("rb", buffering=0) as file:
                return _read_pixels(file, channels)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            warnings.warn(f"{path} is decoded anew: {error}", RuntimeWarning, stacklevel=2)
            with contextlib.suppress(OSError):
                path.unlink()
            return None

    def write(self, path: Path, image: NDArray[np.uint8]) -> bool:
        """Stores an image, unless the limit or the disk is reached; False when it did not."""
        size = _HEAD.size + image.nbytes
        if path.is_file():
            # By another thread, meanwhile.
            return True
        if not self._reserve(size):
            return False
        temporary = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(_TEMPORARY, dir=path.parent)
            with open(handle, "wb") as file:  # noqa: PTH123 - a descriptor
                height, width, channels = image.shape
                pixels = np.ascontiguousarray(image).reshape(-1)
                file.write(_HEAD.pack(_MAGIC, height, width, channels, zlib.crc32(pixels.data), 0))
                file.write(pixels.data)
            os.replace(temporary, path)  # noqa: PTH105 - a name
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)  # noqa: PTH108 - a name
            with self._lock:
                self._used = self._known_used() - size
                first = not self.is_full
                self.is_full = True
            if first:
                full = "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "cannot be written"
                message = f"{self.folder} {full}, no more images are stored: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
            return False
        return True

    def _known_used(self) -> int:
        if self._used is None:
            self._used = self._measured()
        return self._used

    def _reserve(self, size: int) -> bool:
        with self._lock:
            used = self._known_used()
            if self.is_full or used + size > self.limit:
                self.is_full = True
                return False
            self._used = used + size
            return True

    def _measured(self) -> int:
        total = 0
        now = time.time()
        for parent, _, names in os.walk(self.folder):
            for name in names:
                path = Path(parent, name)
                with contextlib.suppress(OSError):
                    found = path.stat()
                    if name.endswith(_TEMPORARY) and now - found.st_mtime > _STALE_S:
                        # Of a process that was killed.
                        path.unlink()
                    else:
                        total += found.st_size
        return total


def _read_pixels(file: Any, channels: int) -> NDArray[np.uint8]:
    size = os.fstat(file.fileno()).st_size
    head = file.read(_HEAD.size)
    if len(head) != _HEAD.size or not head.startswith(_MAGIC):
        raise ValueError("it is no stored image")
    _, height, width, found_channels, checksum, _ = _HEAD.unpack(head)
    expected = height * width * found_channels
    if found_channels != channels or not expected or size != _HEAD.size + expected:
        raise ValueError(f"it has {size} bytes, its header says {height}x{width}x{found_channels}")
    pixels = np.empty(expected, np.uint8)
    if file.readinto(pixels.data) != expected or zlib.crc32(pixels.data) != checksum:
        raise ValueError("its checksum is wrong")
    return pixels.reshape(height, width, channels)


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
