"""Encoded images to pixels: one front for both devices.

Pillow decodes everything on the host, in as many threads as the caller has: it lets go of the interpreter meanwhile. On
CUDA with nvidia-nvimgcodec installed, whole baseline and progressive JPEG files of one grey or three YCbCr components
are decoded on the GPU: by its JPEG engine where there is one, else by its kernels with the host's help, else by
nvImageCodec's own CPU code. Everything else (PNG and the like, CMYK, RGB and cut-off JPEG files) and every file that
nvImageCodec refuses goes to Pillow, so that an odd file looks the same on both devices, or is named in the same error.

Note [processes]: on CUDA, files are read, and their headers looked at, by up to three helper processes; this one only
makes nvImageCodec's views of what lies in memory that it shares with them. To open, read and close 128 files takes 1.5
to 2.5 ms of Python, their headers another 0.7 to 1.3, and the GPU's JPEG engine no more than 4.9 for all of them: with
that in the same interpreter as the callers' threads, which all take from the same lock, the engine waits for Python.
Where no process can be had, before it has started, and for all files that it leaves, this one reads as follows.

Note [turns]: two threads that read at the same time hand the interpreter to each other at every system call and take
three times as long together. So they take turns, while the engine decodes for the others. Only files that are not in
the system's cache are read by all at once: there the waiting is long, and worth sharing.

Note [blocks]: what this process reads for nvImageCodec goes into blocks of memory that are used again and again. New
memory for each file costs several times what reading it does: the system clears it page by page, and takes it back from
all cores.
"""

import errno
import io
import os
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngImageFile

from flcuda.data.chain import whole_number
from flcuda.data.file_reader import FileReaders, FoundFile
from flcuda.data.images import ImageBatch
from flcuda.data.nvimgcodec import Nvimgcodec, PlacedImage, find_nvimgcodec, page_lock
from flcuda.device import CPU, Device, resolve
from flcuda.errors import DecodeError

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")
ON_ERROR = ("raise", "skip")

# The bytes of a file: an array's are in memory shared with a process that read it.
_Content: TypeAlias = bytes | memoryview | NDArray[np.uint8]
# What errors call the source at a place: worked out when there is one.
_NameOf: TypeAlias = Callable[[int], str]
_FORMAT_WORDS = "JPEG, PNG, BMP, GIF, TIFF or WebP"
_DECODER_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    EOFError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    # an error where warnings are errors
    Image.DecompressionBombWarning,
)
_SKIPPED = (DecodeError, OSError)
_ORIENTATION = 0x0112
_PNG_START = b"\x89PNG\r\n\x1a\n"
# EXIF's eight orientations: how to turn an image for the viewer.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_KEPT_ERRORS = 100
_READ_ONLY = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
# See Note [blocks]. A block has room for some hundred photographs; what is left at its end is not used when it is less
# than most of them take.
_BLOCK_BYTES = 8 << 20
_LEAST_ROOM = 256 << 10
# That are kept between batches: of three batches under way, each of 128 photographs of 150 KiB.
_KEPT_BLOCKS = 8
# Most photographs of data sets are smaller; a larger buffer costs more than it saves.
_FIRST_READ = 128 << 10
_LATER_READ = 4 << 20
# What files in the system's cache do not take, even while threads compete.
_SLOW_FILE_S = 200e-6


def decode(source: Path | str | bytes, channels: int = 3, name: str | None = None) -> NDArray[np.uint8]:
    """Decodes one image on the host.

    Grey, palette and CMYK images become what a viewer shows, turned as EXIF says; 16-bit values keep their high byte; a
    transparent image lies on white; of several pictures in one file the first counts. Values of signed and of 32-bit
    TIFF files are taken as they are when all are from 0 to 255, else refused: nobody knows which is white.

    Args:
        source: the path of a JPEG, PNG, BMP, GIF, TIFF or WebP file, or the bytes of one.
        channels: 3 for red, green, blue; 1 for grey.
        name: what an error calls it; default the file's path.

    Returns:
        uint8 (H, W, channels); owned by the caller.

    Raises:
        DecodeError: empty, truncated, or no image; names the file. It is a ValueError.
        ValueError: channels is neither 1 nor 3.
        TypeError: source is neither a path nor bytes.
        OSError: the file cannot be read.
    """
    image = pillow_image(source, channels, name)
    return np.array(image).reshape(image.height, image.width, channels)


def pillow_image(source: Path | str | bytes, channels: int, name: str | None = None) -> Image.Image:
    """Decodes like `decode`, to a Pillow image of mode RGB or L."""
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 or 3, not {channels}")
    source = _checked_source(source)
    name = _name_of(source) if name is None else name
    content = _content(source, name, _read)
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as opened:
            opened.load()
            return _converted(_turned(opened), "RGB" if channels == 3 else "L", str(opened.format))
    except _DECODER_ERRORS as error:
        raise DecodeError(name, f"cannot be decoded: {reason_of(error)}") from error


@dataclass(frozen=True)
class Header:
    """What the beginning of an image file says.

    Attributes:
        format: one of `FORMATS`.
        mode: Pillow's name of its pixels, such as "RGB", "L", "P", "CMYK", "I;16".
        height, width: in pixels, as stored: not yet turned.
        orientation: EXIF's, 1 (upright) to 8.
    """

    format: str
    mode: str
    height: int
    width: int
    orientation: int


def read_header(source: Path | str | bytes, name: str | None = None) -> Header:
    """Reads the header of an image file and decodes nothing.

    Raises:
        DecodeError: empty, or no image in a known format.
        TypeError: source is neither a path nor bytes.
        OSError: the file cannot be read.
    """
    source = _checked_source(source)
    name = _name_of(source) if name is None else name
    if isinstance(source, bytes):
        return _header(io.BytesIO(source), name)
    try:
        with source.open("rb") as file:
            return _header(file, name)
    except IsADirectoryError as error:
        raise DecodeError(name, "is a folder, not an image") from error


def _header(file: BinaryIO, name: str) -> Header:
    try:
        with Image.open(file, formats=FORMATS) as image:
            # What phones make of several pictures is a JPEG file to everybody else.
            kind = "JPEG" if image.format == "MPO" else str(image.format)
            return Header(kind, image.mode, image.height, image.width, _orientation(image))
    except _DECODER_ERRORS as error:
        if _is_systems(error):
            raise
        size = file.seek(0, os.SEEK_END)
        raise DecodeError(name, f"cannot be decoded: {reason_of(error)}" if size else "is empty") from error


@dataclass(frozen=True, eq=False)
class Decoded:
    """A batch of decoded images.

    Attributes:
        batch: the images that could be decoded, in their order; None when none could.
        kept: int64, NumPy: which of the sources they are.
        errors: of the others.
    """

    batch: ImageBatch | None
    kept: NDArray[np.int64]
    errors: tuple[DecodeError, ...] = ()


class Decoder:
    """Decodes batches of images onto one device; to be used from any number of threads.

    Where nvImageCodec decodes, batches of 16 paths and more are read by helper processes, one for each thread that
    decodes, at most three: `python ... flcuda-file-reader` in the system's list. They start with the first batches, run
    nothing of the user's and end with `close`, the decoder or this process, however it ends. What they read into is
    page-locked where the system allows it: 8 to 64 MiB for each, the next power of two to a batch's bytes. Without
    them everything is the same, but for the speed.

    Args:
        device: where the pixels go; None is CUDA where there is a device.
        channels: 3 for red, green, blue; 1 for grey.
        on_error: "raise" a `DecodeError`, or "skip" the image and count it.
        threads: decode one batch in so many threads; 0: what Pillow decodes in the calling thread, what nvImageCodec
            decodes in as many as there are cores. The GPU's JPEG engine needs two, and always has them.
        nvimgcodec: None uses nvImageCodec where it is installed and the device is CUDA; False never.

    Raises:
        ValueError: an unknown word or number; names it.
        TypeError: threads is no whole number.
        DeviceNotFoundError: no such device.
    """

    def __init__(
        self,
        device: Device | str | None = "cpu",
        *,
        channels: int = 3,
        on_error: str = "raise",
        threads: int = 0,
        nvimgcodec: bool | None = None,
    ) -> None:
        if channels not in (1, 3):
            raise ValueError(f"channels must be 1 or 3, not {channels}")
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error must be 'raise' or 'skip', not {on_error!r}")
        self.device = resolve(device)
        self.channels = channels
        self.on_error = on_error
        self.threads = whole_number("threads", threads, 0)
        self._wanted = nvimgcodec is not False
        self._start()

    def _start(self) -> None:
        self.skipped = 0
        self.last_errors: deque[DecodeError] = deque(maxlen=_KEPT_ERRORS)
        self._lock = threading.Lock()
        # See Note [turns].
        self._turn = threading.Lock()
        self._files_are_slow = False
        self._readers = self._new_readers()
        # Those that no batch is read into.
        self._blocks: list[memoryview] = []
        self._engine: Nvimgcodec | None = None
        self._engine_sought = False

    def _new_readers(self) -> FileReaders:
        return FileReaders(None if self.device == CPU else partial(page_lock, self.device))

    def __getstate__(self) -> dict[str, Any]:
        names = ("device", "channels", "on_error", "threads", "_wanted")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def uses_nvimgcodec(self) -> bool:
        """Whether nvImageCodec decodes what it can; on CUDA this loads it."""
        return self._find_engine() is not None

    @property
    def best_workers(self) -> int | None:
        """How many threads should decode batches at the same time; None where as many as there are cores.

        With nvImageCodec two, one of which prepares a batch while the GPU decodes the other's; more only compete for
        the driver's lock and Python's.
        """
        return 2 if self._find_engine() is not None else None

    @property
    def description(self) -> str:
        """Who decodes, in words; on CUDA this loads nvImageCodec and tries which of its backends work."""
        engine = self._find_engine()
        if engine is None:
            return f"Pillow {PIL.__version__}"
        return f"nvImageCodec {engine.version} ({', '.join(engine.working_backends())}), Pillow {PIL.__version__}"

    def decode(self, sources: Sequence[Path | str | bytes], names: Sequence[str] | None = None) -> Decoded:
        """Decodes a batch.

        Args:
            sources: paths of files, or the bytes of files; at least one.
            names: what errors call them, one a source; default the paths, or "image 3" for bytes.

        Returns:
            The images, in memory of their own; offsets and sizes are NumPy arrays on any device. On CUDA the pixels are
            written on the current stream: what follows on it need not wait, other streams must.

        Raises:
            DecodeError: an image is broken, and on_error is "raise"; the first of them.
            OSError: a file cannot be read, and on_error is "raise".
            TypeError: one source instead of several, or one that is neither a path nor bytes.
            ValueError: no source, or another number of names.
        """
        files, name_of = _checked_sources(sources, names)
        if not files:
            raise ValueError("sources must be at least one")
        engine = self._find_engine()
        if engine is not None:
            return self._decode_on_device(engine, files, name_of)
        results = self._decode_all(files, name_of, range(len(files)))
        kept, errors = self._sort_out(results, name_of)
        if not len(kept):
            return Decoded(None, kept, errors)
        batch = ImageBatch.of([results[place] for place in kept])
        return Decoded(self._moved(batch), kept, errors)

    def decode_on_host(
        self, sources: Sequence[Path | str | bytes], names: Sequence[str] | None = None
    ) -> list[NDArray[np.uint8] | DecodeError]:
        """Decodes by Pillow whatever the device; uint8 (height, width, channels) or, skipped, the error of each source.

        Args:
            sources: as `decode`.
            names: as `decode`.

        Raises:
            DecodeError, OSError, TypeError, ValueError: as `decode`; no source is no error.
        """
        files, name_of = _checked_sources(sources, names)
        results = self._decode_all(files, name_of, range(len(files)))
        self._sort_out(results, name_of)
        return results

    def _decode_all(self, sources: Sequence[Path | _Content], name_of: _NameOf, places: Sequence[int]) -> list[Any]:
        """Returns pixels, or the errors; where one is raised, nothing is decoded after it."""
        # The first that failed, where one is raised.
        first = [len(sources)]

        def one(place: int) -> Any:
            if place > first[0]:
                return None
            source = sources[place]
            try:
                return decode(source if isinstance(source, Path) else bytes(source), self.channels, name_of(place))
            except (DecodeError, OSError) as error:
                if self.on_error == "raise":
                    first[0] = min(first[0], place)
                return error

        return self._map(one, places)

    def _decode_on_device(self, engine: Nvimgcodec, sources: Sequence[Path | bytes], name_of: _NameOf) -> Decoded:
        with self._readers.reading(sources) as found:
            return self._decode_found(engine, found, sources, name_of)

    def _decode_found(
        self, engine: Nvimgcodec, found: Sequence[FoundFile], sources: Sequence[Path | bytes], name_of: _NameOf
    ) -> Decoded:
        """Decodes files of which a process has read some."""
        results: list[Any] = [None] * len(sources)
        contents: list[_Content] = [b""] * len(sources)
        memory = _FileMemory(self._blocks)
        if self._files_are_slow:
            left = self._read_left(memory, sources, name_of, found, contents, results)
            with self._turn:
                streams, others = _sorted_by_engine(engine, found, left)
        else:
            with self._turn:
                left = self._read_left(memory, sources, name_of, found, contents, results)
                streams, others = _sorted_by_engine(engine, found, left)
        # While nothing of nvImageCodec's is taken, which other threads wait for.
        _put(results, others, self._decode_all(contents, name_of, others))
        with self.device.use(), engine.decoded(list(streams.values()), self.channels) as images:
            _put(results, list(streams), images)
            refused = [place for place in streams if results[place] is None]
            _put(results, refused, self._decode_all(contents, name_of, refused))
            kept, errors = self._sort_out(results, name_of)
            batch = self._placed(engine, [results[place] for place in kept.tolist()]) if len(kept) else None
        # Not after an error: who knows who still reads them.
        memory.give_back()
        return Decoded(batch, kept, errors)

    def _read_left(
        self,
        memory: "_FileMemory",
        sources: Sequence[Path | bytes],
        name_of: _NameOf,
        found: Sequence[FoundFile],
        contents: list[_Content],
        results: list[Any],
    ) -> list[tuple[int, bytes | memoryview]]:
        """Fills in the contents of files, those that are found too, or results: the errors of those that fail.

        Returns:
            The places and bytes of those that were read here.
        """
        for place, content, _, _ in found:
            contents[place] = content
        if len(found) == len(sources):
            return []
        read_before = {place for place, _, _, _ in found}
        left = [place for place in range(len(sources)) if place not in read_before]
        read = []
        start = time.perf_counter()
        for place in left:
            try:
                whole = _content(sources[place], name_of(place), memory.read)
                contents[place] = whole
                read.append((place, whole))
            except (DecodeError, OSError) as error:
                results[place] = error
                if self.on_error == "raise":
                    # What comes before it may be broken as well, and is named then.
                    break
        self._files_are_slow = time.perf_counter() - start > _SLOW_FILE_S * len(left)
        return read

    def _placed(self, engine: Nvimgcodec, images: Sequence[Any]) -> ImageBatch:
        """Copies images of nvImageCodec's and of the host into a batch on the device."""
        on_host = [place for place, image in enumerate(images) if not isinstance(image, PlacedImage)]
        if len(on_host) == len(images):
            return self._moved(ImageBatch.of(images))
        if not on_host:
            return engine.gather(images, self.channels)
        moved = self._moved(ImageBatch.of([images[place] for place in on_host]))
        whole = list(images)
        for place, offset, (height, width) in zip(on_host, moved.offsets.tolist(), moved.sizes.tolist(), strict=True):
            pointer = int(moved.pixels.data.ptr) + offset
            whole[place] = PlacedImage(pointer, width * self.channels, height, width)
        return engine.gather(whole, self.channels)

    def _sort_out(self, results: list[Any], name_of: _NameOf) -> tuple[NDArray[np.int64], tuple[DecodeError, ...]]:
        """Returns the places of what was decoded, and the errors of what was skipped; or raises the first error."""
        kept = []
        errors = []
        for place, result in enumerate(results):
            if not isinstance(result, _SKIPPED):
                kept.append(place)
                continue
            if self.on_error == "raise":
                # Its traceback has the frames that have the list: no cycle, which would keep the files for longer.
                results.clear()
                try:
                    raise result
                finally:
                    del result
            # Without its traceback, which has the file's bytes.
            error = _unread(name_of(place), result) if isinstance(result, OSError) else result.fresh()
            results[place] = error
            errors.append(error)
        if errors:
            with self._lock:
                self.skipped += len(errors)
                self.last_errors.extend(errors)
        return np.array(kept, np.int64), tuple(errors)

    def _moved(self, batch: ImageBatch) -> ImageBatch:
        """Copies a batch from the host to this decoder's device."""
        if self.device == CPU:
            return batch
        with self.device.use():
            return ImageBatch(self.device.xp.asarray(batch.pixels), batch.offsets, batch.sizes, batch.channels)

    def _map(self, function: Callable[[int], Any], places: Sequence[int]) -> list[Any]:
        if self.threads < 2 or len(places) < 2:
            return [function(place) for place in places]
        # Threads cost a batch little, and none is left whenever and however its caller ends.
        with ThreadPoolExecutor(min(self.threads, len(places)), "flcuda-decode") as pool:
            return list(pool.map(function, places))

    def _find_engine(self) -> Nvimgcodec | None:
        if self.device == CPU or not self._wanted:
            return None
        with self._lock:
            if not self._engine_sought:
                self._engine = find_nvimgcodec(self.device, self.threads)
                self._engine_sought = True
        return self._engine

    def close(self) -> None:
        """Frees what nvImageCodec holds and what files were read into, by whom too; the next batch starts anew."""
        with self._lock:
            self._readers.close()
            self._readers = self._new_readers()
            self._blocks = []
            self._engine = None
            self._engine_sought = False

    def __enter__(self) -> "Decoder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _FileMemory:
    """Where the files of one batch are read into; see Note [blocks].

    Args:
        free: blocks that nobody uses: taken from here, and given back.
    """

    def __init__(self, free: list[memoryview]) -> None:
        self._free = free
        self._taken: list[memoryview] = []
        self._room = memoryview(b"")

    def read(self, path: Path) -> bytes | memoryview:
        """Returns a file's bytes; a view of a block is valid until `give_back`."""
        if len(self._room) < _LEAST_ROOM:
            try:
                # Other threads take some as well.
                self._room = self._free.pop()
            except IndexError:
                self._room = memoryview(bytearray(_BLOCK_BYTES))
            self._taken.append(self._room)
        room = self._room
        descriptor = os.open(path, _READ_ONLY)
        try:
            size = os.readv(descriptor, (room,))
            if size == len(room):
                return _with_rest(descriptor, bytes(room))
        finally:
            os.close(descriptor)
        self._room = room[size:]
        return room[:size]

    def give_back(self) -> None:
        """Ends the use of all that was read; of the blocks some are kept."""
        taken, self._taken = self._taken, []
        self._room = memoryview(b"")
        self._free += taken[: max(0, _KEPT_BLOCKS - len(self._free))]


def _sorted_by_engine(
    engine: Nvimgcodec, found: Sequence[FoundFile], left: Sequence[tuple[int, bytes | memoryview]]
) -> tuple[dict[int, Any], list[int]]:
    """Returns nvImageCodec's views of the files that it decodes, by place, and the places of the others.

    Args:
        engine: nvImageCodec.
        found: files of which a process says that nvImageCodec decodes them.
        left: places and bytes of files of which nobody knows yet.
    """
    streams = {place: engine.vetted_stream(content, height, width) for place, content, height, width in found}
    streams |= {place: engine.code_stream(content) for place, content in left}
    others = [place for place, stream in streams.items() if stream is None]
    for place in others:
        del streams[place]
    return streams, others


def _put(results: list[Any], places: Sequence[int], found: Sequence[Any]) -> None:
    for place, result in zip(places, found, strict=True):
        results[place] = result


def reason_of(error: Exception) -> str:
    """Returns what a decoder's exception says, in words for the user."""
    if isinstance(error, UnidentifiedImageError):
        return f"not a {_FORMAT_WORDS} image"
    return str(error) or type(error).__name__


def _checked_source(source: object, place: int | None = None) -> Path | bytes:
    if isinstance(source, bytes | Path):
        return source
    if isinstance(source, str):
        return Path(source)
    what = "source" if place is None else f"sources[{place}]"
    raise TypeError(f"{what} must be the path of a file or bytes, not {type(source).__name__}")


def _checked_sources(
    sources: Sequence[Path | str | bytes], names: Sequence[str] | None
) -> tuple[list[Path | bytes], _NameOf]:
    if isinstance(sources, str | bytes | Path):
        raise TypeError("sources must be several, such as [PATH], not one path or one file's bytes")
    files = [_checked_source(source, place) for place, source in enumerate(sources)]
    if names is None:
        return files, lambda place: _name_of(files[place], place)
    if len(names) != len(files):
        raise ValueError(f"names must be one a source: {len(files)}, not {len(names)}")
    return files, names.__getitem__


def _unread(name: str, error: OSError) -> DecodeError:
    return DecodeError(name, f"cannot be read: {error.strerror or error}", unread=True)


def _is_systems(error: Exception) -> bool:
    """Whether the file could not be read; a place that the file names and that is none is the file's fault."""
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL, errno.EOVERFLOW)


def _name_of(source: Path | bytes, place: int | None = None) -> str:
    if isinstance(source, bytes):
        return "the image" if place is None else f"image {place}"
    return str(source)


def _content(source: Path | bytes, name: str, read: Callable[[Path], bytes | memoryview]) -> bytes | memoryview:
    try:
        content = source if isinstance(source, bytes) else read(source)
    except IsADirectoryError as error:
        raise DecodeError(name, "is a folder, not an image") from error
    if not content:
        raise DecodeError(name, "is empty")
    return content


def _read(path: Path) -> bytes:
    """Returns a file's bytes, with half the system calls of `Path.read_bytes`."""
    descriptor = os.open(path, _READ_ONLY)
    try:
        start = os.read(descriptor, _FIRST_READ)
        return start if len(start) < _FIRST_READ else _with_rest(descriptor, start)
    finally:
        os.close(descriptor)


def _with_rest(descriptor: int, start: bytes) -> bytes:
    """Returns the beginning of a file with all that comes after it: only the end is less than was asked for."""
    parts = [start, os.read(descriptor, _LATER_READ)]
    while len(parts[-1]) == _LATER_READ:
        parts.append(os.read(descriptor, _LATER_READ))
    return b"".join(parts)


def _orientation(image: Image.Image) -> int:
    """Returns EXIF's orientation, 1 when there is none or it cannot be read: then a viewer shows the image as it is."""
    try:
        exif = _png_exif(image) if isinstance(image, PngImageFile) else image.getexif()
        value = exif.get(_ORIENTATION, 1)
    except _DECODER_ERRORS as error:
        if _is_systems(error):
            raise
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _png_exif(image: PngImageFile) -> Image.Exif:
    """Returns the EXIF of an opened PNG file without its pixels: they may come before it, and Pillow decodes them then.

    What the file says besides pixels is put into a PNG file of one pixel, for Pillow to read by its rules.
    """
    if image.fp is None or "exif" in image.info:
        return image.getexif()
    file, place = image.fp, image.fp.tell()
    file.seek(len(_PNG_START))
    said = []
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
            said.append(head + file.read(length + 4))
        elif kind == b"IEND":
            break
        else:
            file.seek(length + 4, os.SEEK_CUR)
    file.seek(place)
    small = io.BytesIO()
    Image.new("1", (1, 1)).save(small, "PNG")
    content = small.getvalue()
    after_header = len(_PNG_START) + 25
    with Image.open(
        io.BytesIO(content[:after_header] + b"".join(said) + content[after_header:]), formats=("PNG",)
    ) as other:
        return other.getexif()


def _turned(image: Image.Image) -> Image.Image:
    turn = _TURNS.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _converted(image: Image.Image, mode: str, kind: str) -> Image.Image:
    """Returns the image of a kind of file in a mode, as a viewer shows it."""
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, of which nobody knows which is white")
    if image.mode.startswith("I"):
        image = _from_integers(image, kind)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(ground, image)
    return image if image.mode == mode else image.convert(mode)


def _from_integers(image: Image.Image, kind: str) -> Image.Image:
    """Returns grey of more than 8 bits in 8, which Pillow would clip at 255."""
    values = np.asarray(image)
    # Some versions of Pillow have 16 unsigned bits in "I" too, of PNG files.
    if image.mode == "I" and kind == "TIFF":
        if values.min() < 0 or values.max() > 0xFF:
            raise ValueError("its pixels are signed or have more than 16 bits, of which nobody knows which is white")
        return Image.fromarray(values.astype(np.uint8))
    if values.min() < 0 or values.max() > 0xFFFF:
        raise ValueError("its pixels have more than 16 bits, of which nobody knows which is white")
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey
