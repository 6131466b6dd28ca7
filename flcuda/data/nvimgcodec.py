"""nvImageCodec on one CUDA device, and which JPEG files it is given."""

import contextlib
import io
import os
import queue
import re
import struct
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from PIL import Image

from flcuda.device import Array, Device, cupy

BACKENDS = {"HW_GPU_ONLY": "JPEG engine", "HYBRID_CPU_GPU": "GPU and CPU", "CPU_ONLY": "CPU"}
"""nvImageCodec's kinds of backends in the order in which they are asked, with what they are called here."""

# The last marker of a whole JPEG file is within so many bytes of its end; some programs pad or append a little.
_JPEG_TAIL = 4096
# Two batches under way keep the engine busy while the host prepares the next.
_INSTANCES = 2
# Device memory that nvImageCodec's own images may keep between batches.
_KEPT_BYTES = 1 << 30
# Of the whole process: its standard error is one, and what two threads put back in turn would not be the first.
_QUIET_LOCK = threading.Lock()
_UNUSED = re.compile("nvjpeg2|nvtiff", re.IGNORECASE)


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
    Standard error is the whole process's: what other threads write to it meanwhile comes late, in one piece.
    """
    variable = "PYNVIMGCODEC_VERBOSITY"
    kept = ""
    with _QUIET_LOCK, tempfile.TemporaryFile() as file:
        chosen = os.environ.get(variable)
        os.environ.setdefault(variable, "0")
        saved = None
        # No standard error, nothing to keep back.
        with contextlib.suppress(OSError):
            saved = os.dup(2)
            os.dup2(file.fileno(), 2)
        failed = True
        try:
            yield lambda: kept
            failed = False
        finally:
            if saved is not None:
                os.dup2(saved, 2)
                os.close(saved)
            if chosen is None:
                os.environ.pop(variable, None)
            file.seek(0)
            kept = file.read().decode(errors="replace")
            if not failed and saved is not None:
                with contextlib.suppress(OSError):
                    os.write(2, _others(kept).encode())


def _others(text: str) -> str:
    """Returns the lines that are not about libraries of nvImageCodec's that are not used here."""
    return "".join(line for line in text.splitlines(keepends=True) if not _UNUSED.search(line))


def _remarks(text: str) -> str:
    """Returns lines of nvImageCodec's, each once, without colours and without libraries that are not used here."""
    return "; ".join(line for line in dict.fromkeys(re.sub(r"\x1b\[[0-9;]*m", "", _others(text)).splitlines()) if line)


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
