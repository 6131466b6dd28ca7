"""nvImageCodec and the CUDA runtime as the decoder uses them, played on the host.

The fake takes what nvImageCodec's documentation allows and asserts the rest: whoever hands it a file that it would show
differently from Pillow fails the test.
"""

import contextlib
import ctypes
import io
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile


class HostArray(np.ndarray):
    """An array whose memory has an address, as a CuPy array's has."""

    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self.ctypes.data)

    def get(self) -> np.ndarray:
        return np.array(self)


class Stream:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr
        self.waited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)

    def synchronize(self) -> None:
        pass


class Event:
    def __init__(self, disable_timing: bool) -> None:
        self.stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.stream = stream


class FakeCupy:
    """The few functions of CuPy that are called; `stream` is the current one."""

    def __init__(self) -> None:
        self.stream = Stream(0)
        self.copies = 0
        runtime = types.SimpleNamespace(
            memcpyDeviceToDevice=3,
            memcpyAsync=self._copy,
            memcpy2DAsync=self._copy_rows,
            memGetInfo=lambda: (1 << 20, 0),
        )
        self.cuda = types.SimpleNamespace(runtime=runtime, Event=Event, get_current_stream=lambda: self.stream)

    def _copy(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        assert (kind, stream) == (3, self.stream.ptr)
        self.copies += 1
        ctypes.memmove(to, source, size)

    def _copy_rows(
        self, to: int, to_pitch: int, source: int, pitch: int, width: int, height: int, kind: int, stream: int
    ) -> None:
        for row in range(height):
            self._copy(to + row * to_pitch, source + row * pitch, width, kind, stream)

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
    def __init__(self, pixels: np.ndarray, padding: int) -> None:
        self.fill(pixels, padding)

    def fill(self, pixels: np.ndarray, padding: int) -> None:
        height, width, channels = pixels.shape
        self.rows = np.zeros((height, width * channels + padding), np.uint8)
        self.rows[:, : width * channels] = pixels.reshape(height, -1)
        self.shape = pixels.shape

    @property
    def capacity(self) -> int:
        return self.rows.nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        strides = (self.rows.strides[0], self.shape[2], 1)
        data = (self.rows.ctypes.data, False)
        return {"shape": self.shape, "strides": strides, "typestr": "|u1", "data": data, "version": 3}


class FakeNvimgcodec(types.ModuleType):
    """The module nvidia.nvimgcodec.

    Args:
        cupy: whose current stream the decoders must be given.
        refused: files that the decoders cannot decode although their headers are right.
        absent: kinds of backends with which no decoder can be made.
        padding: bytes between the rows of its images.
    """

    def __init__(
        self, cupy: FakeCupy, refused: tuple[bytes, ...] = (), absent: tuple[str, ...] = (), padding: int = 0
    ) -> None:
        super().__init__("nvidia.nvimgcodec")
        self.__version__ = "0.9.0"
        self.batches: list[int] = []
        self.reused: list[int] = []
        self.kinds: list[list[str]] = []
        fake = self

        class BackendKind:
            HW_GPU_ONLY = "HW_GPU_ONLY"
            HYBRID_CPU_GPU = "HYBRID_CPU_GPU"
            CPU_ONLY = "CPU_ONLY"

        class Backend:
            def __init__(self, backend_kind: str, load_hint: float = 1.0) -> None:
                assert load_hint == 1.0
                self.kind = backend_kind

        class CodeStream:
            def __init__(self, content: bytes) -> None:
                assert isinstance(content, bytes)
                self.content = content
                try:
                    # Not by Image.open, which refuses many pixels.
                    image = JpegImageFile(io.BytesIO(content))
                    self.codec_name = "jpeg"
                    self.width, self.height = image.size
                    self.num_channels = len(image.getbands())
                    self.precision = 8
                except (OSError, SyntaxError) as error:
                    raise RuntimeError("Failed to get image info") from error

        @dataclass(frozen=True)
        class DecodeParams:
            apply_exif_orientation: bool = True
            color_spec: str = "SRGB"
            allow_any_depth: bool = False

        class Decoder:
            def __init__(
                self, device_id: int = -1, max_num_cpu_threads: int = 0, backends: Any = None, options: str = ""
            ) -> None:
                assert device_id == 0
                kinds = [backend.kind for backend in backends]
                if set(kinds) & set(absent):
                    raise RuntimeError("Could not create decoder")
                fake.kinds.append(kinds)
                self.busy = False

            def decode(
                self, streams: Any, *, images: Any = None, params: Any = None, cuda_stream: int = 0
            ) -> list[Any]:
                assert not self.busy, "a decoder is used by two threads"
                self.busy = True
                assert cuda_stream == cupy.stream.ptr
                assert images is None or len(images) == len(streams)
                fake.batches.append(len(streams))
                fake.reused.append(0 if images is None else len(images))
                found = [
                    self._one(stream, params, None if images is None else images[place])
                    for place, stream in enumerate(streams)
                ]
                self.busy = False
                return found

            @staticmethod
            def _one(stream: Any, params: Any, reused: Any) -> Any:
                if stream.content in refused:
                    return None
                assert params.apply_exif_orientation
                assert not params.allow_any_depth
                with Image.open(io.BytesIO(stream.content), formats=("JPEG",)) as opened:
                    assert opened.mode in ("RGB", "L"), "nvImageCodec was given CMYK"
                    if opened.mode == "RGB":
                        colours = opened.info.get("adobe_transform", 1)
                        assert opened.info.get("jfif") or colours == 1, "nvImageCodec was given an RGB JPEG"
                    image = ImageOps.exif_transpose(opened).convert("RGB" if params.color_spec == "SRGB" else "L")
                pixels = np.asarray(image).reshape(image.height, image.width, -1)
                if reused is None:
                    return FakeImage(pixels, padding)
                reused.fill(pixels, padding)
                return reused

        self.BackendKind = BackendKind
        self.Backend = Backend
        self.CodeStream = CodeStream
        self.DecodeParams = DecodeParams
        self.Decoder = Decoder
        self.ColorSpec = types.SimpleNamespace(SRGB="SRGB", GRAY="GRAY")
