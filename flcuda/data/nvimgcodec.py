"""nvImageCodec on one CUDA device, and which JPEG files it is given.

Note [streams]: an image of nvImageCodec's belongs to the stream on which its memory was allocated, for good: reused on
another one it makes the host wait for the first, and freed after that one is gone it ends the process. The streams of
callers come and go (a prefetcher has new ones each epoch). So images are decoded on streams of this module's own, which
outlive them, and callers wait for them by events, as they do for the callers' copies; the host does not wait.

Note [engine]: a decoder with several backends gives its JPEG engine at most as many images as its first batch had,
whatever the later batches have, and the rest to the next backend. So the engine has a decoder of its own, and a second
one is asked for what the engine leaves.
"""

import contextlib
import io
import os
import queue
import re
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from flcuda.data.images import ImageBatch, places_of
from flcuda.data.reader_process import jpeg_frame
from flcuda.device import Device, cupy
from flcuda.ops.images import gather_images

BACKENDS = {"HW_GPU_ONLY": "JPEG engine", "HYBRID_CPU_GPU": "GPU and CPU", "CPU_ONLY": "CPU"}
"""nvImageCodec's kinds of backends in the order in which they are asked, with what they are called here."""

# The decoders of one instance: each is asked for what the one before it leaves. See Note [engine].
_STAGES = (("HW_GPU_ONLY",), ("HYBRID_CPU_GPU", "CPU_ONLY"))
# As Pillow does. The default has changed between versions.
_OPTIONS = ":fancy_upsampling=1"
# The engine's decoder has little for threads to do: with one a core they wake each other up for a quarter of the time
# of all, and each brings a stream with it.
_ENGINE_THREADS = 2
_ENGINE_OPTIONS = f"{_OPTIONS} :num_cuda_streams=1"
# Two batches under way keep the engine busy while the host prepares the next.
_INSTANCES = 2
# Device memory that an instance's images may keep between batches.
_KEPT_BYTES = 1 << 30
# Of an image that all backends take, also an engine that has a least size.
_PROBE_SIDE = 256
# Of the whole process: its standard error is one, and what two threads put back in turn would not be the first.
_QUIET_LOCK = threading.Lock()
_NO_MEMORY = (0, 0)
_UNUSED = re.compile("nvjpeg2|nvtiff", re.IGNORECASE)


class PlacedImage(NamedTuple):
    """Pixels in memory of nvImageCodec's, uint8 (height, width, channels): valid until its decoder is used again."""

    pointer: int
    row_bytes: int
    height: int
    width: int


@dataclass(eq=False)
class _Instance:
    """Decoders of nvImageCodec's, and the images that they write into again and again; for one thread at a time."""

    decoders: list[Any]
    # At each place of a batch, None where nothing was decoded yet.
    images: list[Any] = field(default_factory=list)
    # Of each image, its capacity and its address: it has other memory only when it has more.
    memories: list[tuple[int, int]] = field(default_factory=list)
    # The last here, and the last to go.
    stream: Any = None


class Nvimgcodec:
    """nvImageCodec on one CUDA device.

    Args:
        module: nvidia.nvimgcodec.
        device: the CUDA device.
        threads: of the host, for each batch under way, for what the JPEG engine leaves; 0: as many as there are cores.

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
        # The longest unused first: what it decoded is done when it is used again, also when one thread decodes.
        self._free: queue.SimpleQueue[_Instance] = queue.SimpleQueue()
        # At the end of the process as well, while CUDA is still there.
        weakref.finalize(self, _let_go, self._free)
        with device.use():
            for _ in range(_INSTANCES):
                self._free.put(self._new_instance())
            # An incompatible version shows now, not in the middle of an epoch; the second round reuses images.
            for _ in range(2 * _INSTANCES):
                with self.decoded([self.code_stream(_small_jpeg())], 3) as images:
                    if images[0] is None:
                        raise RuntimeError("it cannot decode a small JPEG image")

    def _new_instance(self) -> _Instance:
        decoders = []
        for kinds in _STAGES[:-1]:
            # No JPEG engine here.
            with contextlib.suppress(RuntimeError):
                decoders.append(self._new_decoder(kinds, self._threads))
        # Of what the engine leaves there may be nothing in all the data: made when it is needed.
        decoders.append(None if decoders else self._new_decoder(_STAGES[-1], self._threads))
        return _Instance(decoders, stream=cupy().cuda.Stream(non_blocking=True))

    def _new_decoder(self, kinds: Sequence[str], threads: int) -> Any:
        """Returns one of nvImageCodec's decoders; RuntimeError when it has none of these kinds of backends here."""
        module = self._module
        is_engine = kinds == _STAGES[0]
        return module.Decoder(
            device_id=self._device.index,
            max_num_cpu_threads=_ENGINE_THREADS if is_engine else threads,
            # A hint of 1: all that the backend can decode. What it cannot goes on to the next.
            backends=[module.Backend(getattr(module.BackendKind, kind), load_hint=1.0) for kind in kinds],
            options=_ENGINE_OPTIONS if is_engine else _OPTIONS,
        )

    def working_backends(self) -> list[str]:
        """Decodes a small image with each kind of backend alone; returns those that could, in words."""
        found = []
        for kind, words in BACKENDS.items():
            with contextlib.suppress(RuntimeError), self._device.use():
                decoder = self._new_decoder((kind,), 1)
                stream = self._module.CodeStream(_small_jpeg())
                if decoder.decode([stream], params=self._parameters[3])[0] is not None:
                    found.append(words)
        return found

    def code_stream(self, content: bytes | memoryview) -> Any:
        """Returns nvImageCodec's view of a file that it decodes as Pillow would; None of any other.

        Args:
            content: the file's bytes; borrowed by what is returned.
        """
        frame = jpeg_frame(content)
        if frame is None:
            return None
        return self.vetted_stream(content if isinstance(content, bytes) else np.frombuffer(content, np.uint8), *frame)

    def vetted_stream(self, content: bytes | NDArray[np.uint8], height: int, width: int) -> Any:
        """Returns nvImageCodec's view of a file of which `jpeg_frame` says height and width; None where none is made.

        Args:
            content: the file's bytes; borrowed by what is returned.
            height: in pixels.
            width: in pixels.
        """
        limit = Image.MAX_IMAGE_PIXELS
        if limit is not None and height * width > 2 * limit:
            return None
        try:
            return self._module.CodeStream(content)
        except RuntimeError:
            return None

    @contextlib.contextmanager
    def decoded(self, streams: Sequence[Any], channels: int) -> "Iterator[list[PlacedImage | None]]":
        """Decodes; the images may be read on the stream that is current now, by what is queued inside the `with`.

        Args:
            streams: of `code_stream`; borrowed.
            channels: 3 or 1.

        Yields:
            One a stream; None for what cannot be decoded.
        """
        if not streams:
            yield []
            return
        current = cupy().cuda.get_current_stream()
        instance = self._free.get()
        decoded = None
        try:
            try:
                found = self._decode(instance, streams, channels)
                event = _event(instance.stream)
                current.wait_event(event)
                yield found
                decoded = event
            finally:
                # Before the images are decoded into or freed, which is in the order of their own stream.
                instance.stream.wait_event(_event(current))
                size = sum(capacity for capacity, _ in instance.memories)
                # After an error, who knows what is still written: new images next time.
                if decoded is None or size > _KEPT_BYTES:
                    instance.images, instance.memories = [], []
                # Files in page-locked memory may still be read when nvImageCodec returns. Mostly this is long done.
                (decoded or instance.stream).synchronize()
        finally:
            self._free.put(instance)

    def _decode(self, instance: _Instance, streams: Sequence[Any], channels: int) -> list[PlacedImage | None]:
        found: list[PlacedImage | None] = [None] * len(streams)
        missing = len(streams) - len(instance.images)
        instance.images += [None] * missing
        instance.memories += [_NO_MEMORY] * missing
        images = instance.images
        left: Sequence[int] = range(len(streams))
        for stage, decoder in enumerate(instance.decoders):
            if decoder is None:
                with contextlib.suppress(RuntimeError):
                    decoder = instance.decoders[stage] = self._new_decoder(_STAGES[-1], self._threads)
                if decoder is None:
                    break
            results = decoder.decode(
                [streams[place] for place in left],
                images=[images[place] for place in left],
                params=self._parameters[channels],
                cuda_stream=instance.stream.ptr,
            )
            for place, image in zip(left, results, strict=True):
                if image is not None:
                    found[place] = _placed(instance, place, image, channels)
            left = [place for place in left if found[place] is None]
            if not left:
                break
        return found

    def gather(self, images: Sequence[PlacedImage], channels: int) -> ImageBatch:
        """Copies images of so many channels into a new batch on the current stream."""
        table = np.array(images, np.int64)
        sizes = table[:, 2:].astype(np.int32)
        offsets, total = places_of(sizes, channels)
        # The gaps between images may hold anything.
        pixels = cupy().empty(total, np.uint8)
        gather_images(pixels, offsets, table[:, 0], table[:, 2], channels * table[:, 3], table[:, 1])
        return ImageBatch(pixels, offsets, sizes, channels)


def page_lock(device: Device, address: int, nbytes: int) -> Callable[[], None]:
    """Page-locks memory, which the device then reads by itself; returns what ends that.

    Of files in other memory the driver makes a copy first, one by one, with its lock.
    """
    runtime = cupy().cuda.runtime
    with device.use():
        # For all contexts, as where it allocates such memory.
        runtime.hostRegister(address, nbytes, runtime.hostAllocPortable)

    def unlock() -> None:
        with device.use():
            runtime.hostUnregister(address)

    return unlock


def _let_go(free: "queue.SimpleQueue[_Instance]") -> None:
    """Frees what instances hold, the streams last; see Note [streams]."""
    with contextlib.suppress(queue.Empty):
        while True:
            instance = free.get_nowait()
            instance.images.clear()
            instance.decoders.clear()


def _event(stream: Any) -> Any:
    """Returns an event after what is queued on a stream."""
    event = cupy().cuda.Event(disable_timing=True)
    event.record(stream)
    return event


def find_nvimgcodec(device: Device, threads: int) -> Nvimgcodec | None:
    """Returns nvImageCodec on a CUDA device, or None when it is not installed; one warning when it does not start."""
    try:
        with _quiet() as said:
            from nvidia import nvimgcodec

            return Nvimgcodec(nvimgcodec, device, threads)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in ("nvidia", "nvidia.nvimgcodec"):
            return None
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
    Image.new("RGB", (_PROBE_SIDE, _PROBE_SIDE), (200, 100, 50)).save(stored, "JPEG")
    return stored.getvalue()


def _placed(instance: _Instance, place: int, image: Any, channels: int) -> PlacedImage | None:
    """Returns where an image that was decoded at a place of an instance lies; None where it is not as was asked for.

    What `__cuda_array_interface__` says takes some microseconds and lets go of Python's lock twice, for each image.
    """
    height, width, depth = image.shape
    row_bytes = width * channels
    capacity, pointer = instance.memories[place]
    if image is not instance.images[place] or image.capacity != capacity or image.size != height * row_bytes:
        interface = image.__cuda_array_interface__
        pointer, strides = interface["data"][0], interface.get("strides")
        if strides is not None:
            row_bytes = strides[0]
        if interface["typestr"] not in ("|u1", "<u1"):
            return None
        instance.images[place], instance.memories[place] = image, (image.capacity, pointer)
    return PlacedImage(pointer, row_bytes, height, width) if depth == channels else None
