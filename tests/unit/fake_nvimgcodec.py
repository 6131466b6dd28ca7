"""nvImageCodec and the CUDA runtime as the decoder uses them, played on the host.

The fake takes what nvImageCodec's documentation allows and asserts the rest: whoever hands it a file that it would show
differently from Pillow fails the test. It is nvImageCodec 0.9's in what nobody sees on the host: which stream an image
belongs to, and how few images a JPEG engine is given that shares its decoder. tests/abi compares its arguments with the
real ones.
"""

import contextlib
import ctypes
import inspect
import io
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

ENGINE_BATCH = 7
"""A JPEG engine that shares its decoder is given a multiple of so many images: no fewer than the first batch had."""


class HostArray(np.ndarray):
    """An array whose memory has an address, as a CuPy array's has."""

    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self.ctypes.data)

    def get(self) -> np.ndarray:
        return np.array(self)


class Stream:
    """A stream: `log` is what was queued on it, in order."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr
        self.log: list[Any] = []
        # How much of it the host has waited for.
        self.done = 0

    @property
    def waited(self) -> list["Event"]:
        return [entry for entry in self.log if isinstance(entry, Event)]

    def wait_event(self, event: "Event") -> None:
        assert event.stream is not None, "an event is waited for that was never recorded"
        self.log.append(event)

    def synchronize(self, place: int | None = None) -> None:
        self.done = max(self.done, len(self.log) if place is None else place)


class Event:
    def __init__(self, disable_timing: bool = False) -> None:
        assert disable_timing
        self.stream: Stream | None = None
        self.place = 0

    def record(self, stream: Stream) -> None:
        self.stream = stream
        self.place = len(stream.log)

    def synchronize(self) -> None:
        assert self.stream is not None
        self.stream.synchronize(self.place)


class FakeCupy:
    """The few functions of CuPy that are called; `stream` is the current one."""

    def __init__(self) -> None:
        self.stream = Stream(0)
        self.streams: list[Stream] = [self.stream]
        self.copies = 0
        # Page-locked memory, bytes by address.
        self.locked: dict[int, int] = {}
        runtime = types.SimpleNamespace(
            memGetInfo=lambda: (1 << 20, 0),
            hostAllocPortable=1,
            hostRegister=self._lock,
            hostUnregister=self.locked.pop,
        )
        self.cuda = types.SimpleNamespace(
            runtime=runtime, Event=Event, Stream=self._new_stream, get_current_stream=lambda: self.stream
        )

    def _lock(self, address: int, nbytes: int, flags: int) -> None:
        assert address not in self.locked
        assert flags == 1
        self.locked[address] = nbytes

    def _new_stream(self, *, non_blocking: bool) -> Stream:
        assert non_blocking
        self.streams.append(Stream(1000 + len(self.streams)))
        return self.streams[-1]

    def gather_images(
        self,
        pixels: HostArray,
        offsets: ArrayLike,
        sources: ArrayLike,
        rows: ArrayLike,
        row_bytes: ArrayLike,
        pitches: ArrayLike | None = None,
    ) -> None:
        """Plays `flcuda.ops.images.gather_images`."""
        start = pixels.data.ptr
        columns = (offsets, sources, rows, row_bytes, row_bytes if pitches is None else pitches)
        for offset, source, count, size, pitch in zip(*(np.asarray(each).tolist() for each in columns), strict=True):
            for value in (offset, source, count, size, pitch):
                assert type(value) is int
            assert offset + count * size <= pixels.size
            self.copies += 1
            self.stream.log.append("copy")
            for row in range(count):
                ctypes.memmove(start + offset + row * size, source + row * pitch, size)

    @staticmethod
    def zeros(shape: Any, dtype: Any) -> HostArray:
        return np.zeros(shape, dtype).view(HostArray)

    @staticmethod
    def empty(shape: Any, dtype: Any) -> HostArray:
        return np.full(shape, 77, dtype).view(HostArray)

    @staticmethod
    def asarray(a: Any) -> HostArray:
        return np.array(a).view(HostArray)


@dataclass(frozen=True)
class FakeDevice:
    """A CUDA device, as far as one can be played."""

    cupy: FakeCupy
    kind: str = "cuda"
    index: int = 0

    def __str__(self) -> str:
        return "cuda:0"

    @property
    def xp(self) -> FakeCupy:
        return self.cupy

    def use(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class FakeImage:
    """An image whose memory belongs to a stream; a host image when that is None."""

    def __init__(self, pixels: np.ndarray, padding: int, stream: int | None) -> None:
        self.stream = stream
        self.memory = np.empty(0, np.uint8)
        self.fill(pixels, padding)

    def fill(self, pixels: np.ndarray, padding: int) -> None:
        height, width, channels = pixels.shape
        row_bytes = width * channels + padding
        self.size = height * row_bytes
        if self.size > self.capacity:
            self.memory = np.zeros(self.size, np.uint8)
        self.rows = self.memory[: self.size].reshape(height, row_bytes)
        self.rows[:, : width * channels] = pixels.reshape(height, -1)
        self.shape = pixels.shape

    @property
    def capacity(self) -> int:
        return self.memory.nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.stream is None:
            raise RuntimeError("Unable to initialize __cuda_array_interface__: Image buffer is not on device")
        strides = (self.rows.strides[0], self.shape[2], 1)
        contiguous = strides[0] == self.shape[1] * self.shape[2]
        data = (self.rows.ctypes.data, False)
        interface = {"shape": self.shape, "strides": None if contiguous else strides, "typestr": "|u1", "data": data}
        return {**interface, "version": 3, "stream": self.stream or 1}


class FakeNvimgcodec(types.ModuleType):
    """The module nvidia.nvimgcodec.

    Args:
        cupy: whose streams the decoders must be given.
        refused: files that the decoders cannot decode although their headers are right.
        absent: kinds of backends that this machine does not have.
        padding: bytes between the rows of its images.

    Attributes:
        batches: the number of images of each call.
        reused: how many of them were given an image to reuse.
        kinds: the backends of each decoder that was made.
        by: how many images each kind of backend decoded.
    """

    def __init__(
        self, cupy: FakeCupy, refused: tuple[bytes, ...] = (), absent: tuple[str, ...] = (), padding: int = 0
    ) -> None:
        super().__init__("nvidia.nvimgcodec")
        self.__version__ = "0.9.0"
        self.batches: list[int] = []
        self.reused: list[int] = []
        self.kinds: list[list[str]] = []
        self.by: dict[str, int] = {}
        fake = self

        class BackendKind:
            CPU_ONLY = "CPU_ONLY"
            GPU_ONLY = "GPU_ONLY"
            HYBRID_CPU_GPU = "HYBRID_CPU_GPU"
            HW_GPU_ONLY = "HW_GPU_ONLY"

        class Backend:
            def __init__(self, backend_kind: str, load_hint: float = 1.0, load_hint_policy: str = "FIXED") -> None:
                assert backend_kind in vars(BackendKind)
                assert load_hint == 1.0
                self.backend_kind = backend_kind

        class CodeStream:
            def __init__(self, bytes: Any, bitstream_offset: int | None = None) -> None:  # noqa: A002 - its name
                if isinstance(bytes, np.ndarray):
                    assert bytes.dtype == np.uint8
                    assert bytes.ndim == 1
                    assert bytes.flags.c_contiguous
                else:
                    assert hasattr(bytes, "startswith")
                # As it is when it is decoded: the bytes are not copied.
                self.source = bytes
                try:
                    # Not by Image.open, which refuses many pixels.
                    image = JpegImageFile(io.BytesIO(self.content))
                    self.codec_name = "jpeg"
                    self.width, self.height = image.size
                    self.num_channels = len(image.getbands())
                    self.precision = 8
                    self.progressive = bool(image.info.get("progressive"))
                except (OSError, SyntaxError) as error:
                    raise RuntimeError("Failed to get image info") from error

            @property
            def content(self) -> bytes:
                return self.source.tobytes() if isinstance(self.source, np.ndarray) else self.source

        @dataclass(frozen=True)
        class DecodeParams:
            apply_exif_orientation: bool = True
            color_spec: str = "SRGB"
            allow_any_depth: bool = False
            sample_format: str = "I_AUTO_COMPONENTS"

        class Decoder:
            def __init__(
                self, device_id: int = -1, max_num_cpu_threads: int = 0, backends: Any = None, options: str = ""
            ) -> None:
                assert device_id == 0
                assert max_num_cpu_threads >= 0
                asked = [backend.backend_kind for backend in backends]
                told = dict(option.split("=") for option in options.split())
                assert told.pop(":fancy_upsampling") == "1"
                # At most as many as threads, as nvImageCodec has it.
                streams = int(told.pop(":num_cuda_streams", 1))
                assert 1 <= streams <= (max_num_cpu_threads or streams)
                assert not told
                self.allowed = [kind for kind in asked if kind not in absent]
                if not self.allowed:
                    raise RuntimeError("Internal error - Could not create decoder. Code: 7")
                fake.kinds.append(asked)
                self.on_host = asked == ["CPU_ONLY"]
                self.engine_batch = 0
                self.busy = False

            def decode(self, srcs: Any, *, images: Any = None, params: Any = None, cuda_stream: int = 0) -> list[Any]:
                assert not self.busy, "a decoder is used by two threads"
                self.busy = True
                assert type(cuda_stream) is int
                assert type(srcs) is list
                assert all(isinstance(source, CodeStream) for source in srcs)
                if images is not None and len(images) != len(srcs):
                    raise ValueError(f"Size mismatch - images list has {len(images)} items, not {len(srcs)}")
                stream = next((stream for stream in cupy.streams if stream.ptr == cuda_stream), None)
                assert stream is not None, "nobody made this stream"
                stream.log.append("decode")
                given = [None] * len(srcs) if images is None else images
                fake.batches.append(len(srcs))
                fake.reused.append(sum(image is not None for image in given))
                # The first batch decides for all.
                self.engine_batch = self.engine_batch or -(-len(srcs) // ENGINE_BATCH) * ENGINE_BATCH
                room = self.engine_batch if len(self.allowed) > 1 else len(srcs)
                found = []
                for source, image in zip(srcs, given, strict=True):
                    kind = self._kind(source, room)
                    if kind is not None:
                        fake.by[kind] = fake.by.get(kind, 0) + 1
                        room -= kind == "HW_GPU_ONLY"
                    found.append(None if kind is None else self._one(source, params, image, cuda_stream))
                self.busy = False
                return found

            def _kind(self, source: CodeStream, room: int) -> str | None:
                """Which of the backends decodes it."""
                if source.content in refused:
                    return None
                for kind in ("HW_GPU_ONLY", "HYBRID_CPU_GPU", "CPU_ONLY"):
                    if kind in self.allowed and (kind != "HW_GPU_ONLY" or (room > 0 and not source.progressive)):
                        return kind
                return None

            def _one(self, source: CodeStream, params: Any, reused: Any, stream: int) -> Any:
                assert params.apply_exif_orientation
                assert not params.allow_any_depth
                with Image.open(io.BytesIO(source.content), formats=("JPEG",)) as opened:
                    assert opened.mode in ("RGB", "L"), "nvImageCodec was given CMYK"
                    if opened.mode == "RGB":
                        colours = opened.info.get("adobe_transform", 1)
                        assert opened.info.get("jfif") or colours == 1, "nvImageCodec was given an RGB JPEG"
                    # It knows EXIF's orientation only.
                    opened.info.pop("xmp", None)
                    image = ImageOps.exif_transpose(opened).convert("RGB" if params.color_spec == "SRGB" else "L")
                pixels = np.asarray(image).reshape(image.height, image.width, -1)
                if reused is None:
                    return FakeImage(pixels, padding, None if self.on_host else stream)
                assert reused.stream == stream, "the host waits for the stream of the image"
                reused.fill(pixels, padding)
                return reused

        self.BackendKind = BackendKind
        self.Backend = Backend
        self.CodeStream = CodeStream
        self.DecodeParams = DecodeParams
        self.Decoder = Decoder
        self.ColorSpec = types.SimpleNamespace(SRGB="SRGB", GRAY="GRAY")

    def signatures(self) -> Iterator[tuple[str, list[str]]]:
        """What tests/abi compares: the name of each callable, as nvImageCodec's documentation has it, and arguments."""
        for name in ("Backend", "CodeStream", "DecodeParams", "Decoder"):
            yield f"{name}.__init__", list(inspect.signature(getattr(self, name)).parameters)
        yield "Decoder.decode", list(inspect.signature(self.Decoder.decode).parameters)[1:]
