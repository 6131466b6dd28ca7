"""Encoded images to pixels: one front for both devices.

Pillow decodes everything on the host, in as many threads as the caller has: it lets go of the interpreter meanwhile. On
CUDA with nvidia-nvimgcodec installed, whole baseline and progressive JPEG files of one grey or three YCbCr components
are decoded on the GPU: by its JPEG engine where there is one, else by its kernels with the host's help, else by
nvImageCodec's own CPU code. Everything else (PNG and the like, CMYK, RGB and cut-off JPEG files) and every file that
nvImageCodec refuses goes to Pillow, so that an odd file looks the same on both devices, or is named in the same error.
"""

import contextlib
import io
import os
import queue
import re
import struct
import tempfile
import threading
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from flcuda.data.images import ImageBatch, places_of
from flcuda.device import CPU, Array, Device, cupy, resolve
from flcuda.errors import FlcudaError

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")
ON_ERROR = ("raise", "skip")
BACKENDS = {"HW_GPU_ONLY": "JPEG engine", "HYBRID_CPU_GPU": "GPU and CPU", "CPU_ONLY": "CPU"}
"""nvImageCodec's kinds of backends in the order in which they are asked, with what they are called here."""

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
_ORIENTATION = 0x0112
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
# The last marker of a whole JPEG file is within so many bytes of its end; some programs pad or append a little.
_JPEG_TAIL = 4096
# Two batches under way keep the engine busy while the host prepares the next.
_INSTANCES = 2
# Device memory that nvImageCodec's own images may keep between batches.
_KEPT_BYTES = 1 << 30
_KEPT_ERRORS = 100


class DecodeError(FlcudaError, ValueError):
    """An image file is broken, or is none.

    Args:
        name: the file, or what the caller called the bytes.
        reason: what is wrong with it, such as "is empty".
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.name} {self.reason}"


def decode(source: Path | bytes, channels: int = 3, name: str | None = None) -> NDArray[np.uint8]:
    """Decodes one image on the host.

    Grey, palette and CMYK images become what a viewer shows, turned as EXIF says; 16-bit values keep their high byte; a
    transparent image lies on white; of several pictures in one file the first counts.

    Args:
        source: a JPEG, PNG, BMP, GIF, TIFF or WebP file, or the bytes of one.
        channels: 3 for red, green, blue; 1 for grey.
        name: what an error calls it; default the file's path.

    Returns:
        uint8 (H, W, channels); owned by the caller.

    Raises:
        DecodeError: empty, truncated, or no image; names the file. It is a ValueError.
        ValueError: channels is neither 1 nor 3.
        FileNotFoundError, PermissionError: the file cannot be opened.
    """
    image = pillow_image(source, channels, name)
    return np.array(image).reshape(image.height, image.width, channels)


def pillow_image(source: Path | bytes, channels: int, name: str | None = None) -> Image.Image:
    """Decodes like `decode`, to a Pillow image of mode RGB or L."""
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 or 3, not {channels}")
    name = _name_of(source) if name is None else name
    content = _content(source, name)
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as opened:
            opened.load()
            return _converted(_turned(opened), "RGB" if channels == 3 else "L")
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


def read_header(source: Path | bytes, name: str | None = None) -> Header:
    """Reads the header of an image file and decodes nothing.

    Raises:
        DecodeError: empty, or no image in a known format.
        FileNotFoundError, PermissionError: the file cannot be opened.
    """
    name = _name_of(source) if name is None else name
    try:
        with Image.open(source if isinstance(source, Path) else io.BytesIO(source), formats=FORMATS) as image:
            return Header(str(image.format), image.mode, image.height, image.width, _orientation(image))
    except (FileNotFoundError, PermissionError):
        raise
    except IsADirectoryError as error:
        raise DecodeError(name, "is a folder, not an image") from error
    except _DECODER_ERRORS as error:
        size = source.stat().st_size if isinstance(source, Path) else len(source)
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

    Args:
        device: where the pixels go; None is CUDA where there is a device.
        channels: 3 for red, green, blue; 1 for grey.
        on_error: "raise" a `DecodeError`, or "skip" the image and count it.
        threads: decode one batch in so many threads; 0: what Pillow decodes in the calling thread, what nvImageCodec
            decodes in as many as there are cores.
        nvimgcodec: None uses nvImageCodec where it is installed and the device is CUDA; False never.

    Raises:
        ValueError: an unknown word or number; names it.
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
        if threads < 0:
            raise ValueError(f"threads must be at least 0, not {threads}")
        self.device = resolve(device)
        self.channels = channels
        self.on_error = on_error
        self.threads = threads
        self._wanted = nvimgcodec is not False
        self._start()

    def _start(self) -> None:
        self.skipped = 0
        self.last_errors: deque[DecodeError] = deque(maxlen=_KEPT_ERRORS)
        self._lock = threading.Lock()
        self._engine: Nvimgcodec | None = None
        self._engine_sought = False
        self._pool: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        names = ("device", "channels", "on_error", "threads", "_wanted")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def description(self) -> str:
        """Who decodes, in words; on CUDA this loads nvImageCodec and tries which of its backends work."""
        engine = self._find_engine()
        if engine is None:
            return f"Pillow {PIL.__version__}"
        return f"nvImageCodec {engine.version} ({', '.join(engine.working_backends())}), Pillow {PIL.__version__}"

    def decode(self, sources: Sequence[Path | bytes], names: Sequence[str] | None = None) -> Decoded:
        """Decodes a batch.

        Args:
            sources: files, or the bytes of files; at least one.
            names: what errors call them; default the paths, or "image 3" for bytes.

        Returns:
            The images, in memory of their own; offsets and sizes are NumPy arrays on any device. On CUDA the pixels are
            written on the current stream: what follows on it need not wait, other streams must.

        Raises:
            DecodeError: an image is broken, and on_error is "raise"; the first of them.
            FileNotFoundError, PermissionError: a file cannot be opened, and on_error is "raise".
        """
        if not len(sources):
            raise ValueError("sources must be at least one")
        if names is None:
            names = [_name_of(source, place) for place, source in enumerate(sources)]
        engine = self._find_engine()
        if engine is not None:
            return self._decode_on_device(engine, sources, names)
        results = self._decode_all(sources, names, range(len(sources)))
        kept, errors = self._sort_out(results)
        if not len(kept):
            return Decoded(None, kept, errors)
        batch = ImageBatch.of([results[place] for place in kept])
        return Decoded(self._moved(batch), kept, errors)

    def decode_on_host(
        self, sources: Sequence[Path | bytes], names: Sequence[str] | None = None
    ) -> list[NDArray[np.uint8] | DecodeError]:
        """Decodes by Pillow whatever the device; uint8 (height, width, channels) or, skipped, the error of each source.

        Args:
            sources: as `decode`.
            names: as `decode`.

        Raises:
            DecodeError, FileNotFoundError, PermissionError: as `decode`.
        """
        if names is None:
            names = [_name_of(source, place) for place, source in enumerate(sources)]
        results = self._decode_all(sources, names, range(len(sources)))
        self._sort_out(results)
        return results

    def _decode_all(
        self, sources: Sequence[Path | bytes], names: Sequence[str], places: Sequence[int]
    ) -> list[NDArray[np.uint8] | DecodeError]:
        return self._map(lambda place: self._decode_one(sources[place], names[place]), places)

    def _decode_one(self, source: Path | bytes, name: str) -> NDArray[np.uint8] | DecodeError:
        try:
            return decode(source, self.channels, name)
        except DecodeError as error:
            if self.on_error == "raise":
                raise
            return error
        except OSError as error:
            if self.on_error == "raise":
                raise
            return DecodeError(name, f"cannot be read: {error.strerror or error}")

    def _decode_on_device(self, engine: "Nvimgcodec", sources: Sequence[Path | bytes], names: Sequence[str]) -> Decoded:
        results: list[Any] = [None] * len(sources)
        contents: list[bytes] = [b""] * len(sources)
        streams: dict[int, Any] = {}
        for place, (source, name) in enumerate(zip(sources, names, strict=True)):
            try:
                contents[place] = _content(source, name)
            except (DecodeError, OSError) as error:
                if self.on_error == "raise":
                    raise
                reason = error.reason if isinstance(error, DecodeError) else f"cannot be read: {error.strerror}"
                results[place] = DecodeError(name, reason)
                continue
            stream = engine.code_stream(contents[place])
            if stream is not None:
                streams[place] = stream
        xp = self.device.xp
        with self.device.use(), engine.decoded(list(streams.values()), self.channels) as images:
            results_on_device = dict(zip(streams, images, strict=True))
            for place, image in results_on_device.items():
                results[place] = image
            left = [place for place, result in enumerate(results) if result is None]
            for place, result in zip(left, self._decode_all(contents, names, left), strict=True):
                results[place] = result
            kept, errors = self._sort_out(results)
            if not len(kept):
                return Decoded(None, kept, errors)
            if not any(isinstance(results[place], PlacedImage) for place in kept):
                return Decoded(self._moved(ImageBatch.of([results[place] for place in kept])), kept, errors)
            sizes = np.array([results[place].shape[:2] for place in kept], np.int32)
            offsets, total = places_of(sizes, self.channels)
            pixels = xp.zeros(total, np.uint8)
            for place, offset in zip(kept, offsets.tolist(), strict=True):
                image = results[place]
                if isinstance(image, PlacedImage):
                    engine.copy(image, pixels, offset)
                else:
                    pixels[offset : offset + image.size] = xp.asarray(image.reshape(-1))
            batch = ImageBatch(pixels, offsets, sizes, self.channels)
        return Decoded(batch, kept, errors)

    def _sort_out(self, results: Sequence[Any]) -> tuple[NDArray[np.int64], tuple[DecodeError, ...]]:
        errors = tuple(result for result in results if isinstance(result, DecodeError))
        kept = np.array([i for i, result in enumerate(results) if not isinstance(result, DecodeError)], np.int64)
        if errors:
            with self._lock:
                self.skipped += len(errors)
                self.last_errors.extend(errors)
        return kept, errors

    def _moved(self, batch: ImageBatch) -> ImageBatch:
        """Copies a batch from the host to this decoder's device."""
        if self.device == CPU:
            return batch
        with self.device.use():
            return ImageBatch(self.device.xp.asarray(batch.pixels), batch.offsets, batch.sizes, batch.channels)

    def _map(self, function: Callable[[int], Any], places: Sequence[int]) -> list[Any]:
        if self.threads < 2 or len(places) < 2:
            return [function(place) for place in places]
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads, "flcuda-decode")
        return list(self._pool.map(function, places))

    def _find_engine(self) -> "Nvimgcodec | None":
        if self.device == CPU or not self._wanted:
            return None
        with self._lock:
            if not self._engine_sought:
                self._engine = find_nvimgcodec(self.device, self.threads)
                self._engine_sought = True
        return self._engine

    def close(self) -> None:
        """Ends the threads and frees what the decoders hold; the next batch starts anew."""
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown()
            self._pool = None
            self._engine = None
            self._engine_sought = False

    def __enter__(self) -> "Decoder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class PlacedImage:
    """Pixels in memory of nvImageCodec's, uint8 (height, width, channels): valid until its decoder is used again."""

    pointer: int
    row_bytes: int
    shape: tuple[int, int, int]


@dataclass(eq=False)
class _Instance:
    """One of nvImageCodec's decoders with the images that it writes into again and again."""

    decoder: Any
    images: list[Any] = field(default_factory=list)
    # The last copy out of those images, and its stream.
    done: Any = None
    stream: int = 0


class Nvimgcodec:
    """nvImageCodec on one CUDA device.

    Args:
        module: nvidia.nvimgcodec.
        device: the CUDA device.
        threads: of the host, for each batch under way; 0: as many as there are cores.

    Raises:
        Exception: whatever nvImageCodec raises when not even its CPU backend can be had.

    Source: https://docs.nvidia.com/cuda/nvimagecodec/py_api.html; images to reuse came with version 0.7.
    """

    def __init__(self, module: ModuleType, device: Device, threads: int) -> None:
        self._module = module
        self._device = device
        self._threads = threads
        self.version = str(getattr(module, "__version__", "unknown"))
        self._parameters = {
            3: module.DecodeParams(
                apply_exif_orientation=True, color_spec=module.ColorSpec.SRGB, allow_any_depth=False
            ),
            1: module.DecodeParams(
                apply_exif_orientation=True, color_spec=module.ColorSpec.GRAY, allow_any_depth=False
            ),
        }
        self._free: queue.LifoQueue[_Instance] = queue.LifoQueue()
        for _ in range(_INSTANCES):
            self._free.put(_Instance(self._new_decoder(tuple(BACKENDS))))
        # An incompatible version shows now, not in the middle of an epoch; and twice, since the second reuses images.
        for _ in range(2):
            with device.use(), self.decoded([self.code_stream(_small_jpeg())], 3) as images:
                if images[0] is None:
                    raise RuntimeError("it cannot decode a small JPEG image")

    def _new_decoder(self, kinds: Sequence[str]) -> Any:
        module = self._module
        # A backend that this GPU lacks is left out by nvImageCodec, but some versions refuse it.
        for first in range(len(kinds)):
            # A hint of 1: all that the backend can decode. What it cannot goes on to the next.
            backends = [module.Backend(getattr(module.BackendKind, kind), load_hint=1.0) for kind in kinds[first:]]
            try:
                return module.Decoder(
                    device_id=self._device.index,
                    max_num_cpu_threads=self._threads,
                    backends=backends,
                    # As Pillow does. The default has changed between versions.
                    options=":fancy_upsampling=1",
                )
            except RuntimeError:
                if first + 1 == len(kinds):
                    raise
        raise ValueError("kinds must be at least one")

    def working_backends(self) -> list[str]:
        """Decodes a small image with each kind of backend alone; returns those that could, in words."""
        found = []
        for kind, words in BACKENDS.items():
            with contextlib.suppress(RuntimeError), self._device.use():
                decoder = self._new_decoder((kind,))
                stream = self._module.CodeStream(_small_jpeg())
                if decoder.decode([stream], params=self._parameters[3])[0] is not None:
                    found.append(words)
        return found

    def code_stream(self, content: bytes) -> Any:
        """Returns nvImageCodec's view of a file that it decodes as Pillow would; None of any other."""
        if not is_whole_ycc_jpeg(content):
            return None
        try:
            stream = self._module.CodeStream(content)
            limit = Image.MAX_IMAGE_PIXELS
            plain = (
                stream.codec_name == "jpeg"
                and stream.precision in (0, 8)
                and stream.num_channels in (1, 3)
                and (limit is None or stream.height * stream.width <= 2 * limit)
            )
        except RuntimeError:
            return None
        return stream if plain else None

    @contextlib.contextmanager
    def decoded(self, streams: Sequence[Any], channels: int) -> "Iterator[list[PlacedImage | None]]":
        """Decodes; the images may be read on the current stream inside the `with`.

        Args:
            streams: of `code_stream`; borrowed.
            channels: 3 or 1.

        Yields:
            One a stream; None for what cannot be decoded.
        """
        if not streams:
            yield []
            return
        module = cupy()
        current = module.cuda.get_current_stream()
        instance = self._free.get()
        try:
            if instance.done is not None and instance.stream != current.ptr:
                current.wait_event(instance.done)
            reused = instance.images[: len(streams)] if len(instance.images) >= len(streams) else None
            options = {} if reused is None else {"images": reused}
            images = instance.decoder.decode(
                list(streams), params=self._parameters[channels], cuda_stream=current.ptr, **options
            )
            if reused is None and all(image is not None for image in images):
                instance.images = list(images)
            yield [None if image is None else _placed(image, channels) for image in images]
            instance.done = module.cuda.Event(disable_timing=True)
            instance.done.record(current)
            instance.stream = current.ptr
            if sum(image.capacity for image in instance.images) > _KEPT_BYTES:
                instance.images = []
        except BaseException:
            # Who knows what is still written or read; new images next time.
            instance.images = []
            raise
        finally:
            self._free.put(instance)

    def copy(self, image: PlacedImage, pixels: Array, offset: int) -> None:
        """Copies an image into a batch's pixels on the current stream."""
        height, width, channels = image.shape
        row = width * channels
        cuda = cupy().cuda
        to = pixels.data.ptr + offset
        stream = cuda.get_current_stream().ptr
        kind = cuda.runtime.memcpyDeviceToDevice
        if image.row_bytes == row:
            cuda.runtime.memcpyAsync(to, image.pointer, row * height, kind, stream)
        else:
            cuda.runtime.memcpy2DAsync(to, row, image.pointer, image.row_bytes, row, height, kind, stream)


def find_nvimgcodec(device: Device, threads: int) -> Nvimgcodec | None:
    """Returns nvImageCodec on a CUDA device, or None when it is not installed; one warning when it does not start."""
    try:
        with _quiet() as said:
            from nvidia import nvimgcodec

            return Nvimgcodec(nvimgcodec, device, threads)
    except ModuleNotFoundError:
        return None
    except Exception as error:
        words = _remarks(said())
        message = f"nvImageCodec does not start, Pillow decodes on the CPU instead: {error}"
        warnings.warn(f"{message} ({words})" if words else message, RuntimeWarning, stacklevel=2)
        return None


@contextlib.contextmanager
def _quiet() -> "Iterator[Callable[[], str]]":
    """Keeps back what nvImageCodec writes to standard error when it starts: that optional libraries are absent.

    The variable makes it silent later: what it would say of a broken file is in our error. A value of the user's wins.
    """
    variable = "PYNVIMGCODEC_VERBOSITY"
    chosen = os.environ.get(variable)
    os.environ.setdefault(variable, "0")
    kept = ""
    with tempfile.TemporaryFile() as file:
        saved = None
        # No standard error, nothing to keep back.
        with contextlib.suppress(OSError):
            saved = os.dup(2)
            os.dup2(file.fileno(), 2)
        try:
            yield lambda: kept
        finally:
            if saved is not None:
                os.dup2(saved, 2)
                os.close(saved)
            if chosen is None:
                os.environ.pop(variable, None)
            file.seek(0)
            kept = file.read().decode(errors="replace")


def _remarks(text: str) -> str:
    """Returns lines of nvImageCodec's, each once, without colours and without libraries that are not used here."""
    lines = dict.fromkeys(re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines())
    return "; ".join(line for line in lines if line and not re.search("nvjpeg2|nvtiff", line, re.IGNORECASE))


def _small_jpeg() -> bytes:
    stored = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 100, 50)).save(stored, "JPEG")
    return stored.getvalue()


def _placed(image: Any, channels: int) -> PlacedImage | None:
    interface = image.__cuda_array_interface__
    shape = tuple(interface["shape"])
    if len(shape) != 3 or shape[2] != channels or interface["typestr"] not in ("|u1", "<u1"):
        return None
    strides = interface.get("strides")
    return PlacedImage(interface["data"][0], strides[0] if strides else shape[1] * channels, shape)


def is_whole_ycc_jpeg(content: bytes) -> bool:
    """Says whether bytes are a JPEG file with its end whose colours, if any, are YCbCr.

    libjpeg's rules: JFIF says YCbCr; else Adobe's marker says it, if there is one; else the components' numbers.
    """
    if not content.startswith(b"\xff\xd8\xff"):
        return False
    if content.rfind(b"\xff\xd9", max(2, len(content) - _JPEG_TAIL)) < 0:
        return False
    if content[3] == 0xE0 and content[6:11] == b"JFIF\0":
        return True
    return _is_ycc(content)


def _is_ycc(content: bytes) -> bool:
    place = 2
    adobe = None
    while place + 4 <= len(content):
        if content[place] != 0xFF:
            return False
        marker = content[place + 1]
        if marker == 0xFF:
            place += 1
            continue
        (length,) = struct.unpack_from(">H", content, place + 2)
        body = content[place + 4 : place + 2 + length]
        if marker == 0xE0 and body.startswith(b"JFIF\0"):
            return True
        if marker == 0xEE and body.startswith(b"Adobe") and len(body) >= 12:
            adobe = body[11]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if len(body) < 6:
                return False
            count = body[5]
            if count == 1:
                return True
            if count != 3:
                return False
            return bytes(body[6::3][:3]) != b"RGB" if adobe is None else adobe == 1
        place += 2 + length
    return False


def reason_of(error: Exception) -> str:
    """Returns what a decoder's exception says, in words for the user."""
    if isinstance(error, UnidentifiedImageError):
        return f"not a {_FORMAT_WORDS} image"
    return str(error) or type(error).__name__


def _name_of(source: Path | bytes, place: int | None = None) -> str:
    if isinstance(source, bytes):
        return "the image" if place is None else f"image {place}"
    return str(source)


def _content(source: Path | bytes, name: str) -> bytes:
    if isinstance(source, bytes):
        content = source
    else:
        try:
            content = source.read_bytes()
        except IsADirectoryError as error:
            raise DecodeError(name, "is a folder, not an image") from error
    if not content:
        raise DecodeError(name, "is empty")
    return content


def _orientation(image: Image.Image) -> int:
    """Returns EXIF's orientation, 1 when there is none or it cannot be read: then a viewer shows the image as it is."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except _DECODER_ERRORS:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _turned(image: Image.Image) -> Image.Image:
    turn = _TURNS.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _converted(image: Image.Image, mode: str) -> Image.Image:
    """Returns the image in a mode, as a viewer shows it."""
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, of which nobody knows which is white")
    if image.mode.startswith("I"):
        # 16-bit grey: Pillow would clip it at 255.
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError("its pixels have more than 16 bits, of which nobody knows which is white")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(ground, image)
    return image if image.mode == mode else image.convert(mode)
