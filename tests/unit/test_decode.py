"""Decoding as a person expects, on the host and by nvImageCodec, which a fake plays."""

import contextlib
import copy
import errno
import gc
import io
import os
import pickle
import struct
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_nvimgcodec import FakeCupy, FakeDevice, FakeImage, FakeNvimgcodec, Stream
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from flcuda import data
from flcuda.data import DecodeError, Decoder, file_reader, reader_process
from flcuda.data import nvimgcodec as nvimgcodec_module
from flcuda.data.file_reader import FileReaders
from flcuda.data.reader_process import jpeg_frame
from flcuda.device import CPU

decode_module = sys.modules["flcuda.data.decode"]


LOSSLESS: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 100, "subsampling": 0},
    "PNG": {},
    "BMP": {},
    "GIF": {},
    "TIFF": {},
    "WEBP": {"lossless": True},
}
FILES = sorted(LOSSLESS)
MAGICS = (b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"II*\0", b"MM\0*", b"RIFF\0\0\0\0WEBPVP8 ")


def smooth(height: int, width: int, channels: int = 3) -> np.ndarray:
    """A gradient that JPEG keeps well."""
    rows = np.linspace(20, 230, height)[:, None, None]
    columns = np.linspace(0, 25, width)[None, :, None]
    return np.clip(rows + columns * np.arange(1, channels + 1) / channels, 0, 255).astype(np.uint8)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    """A part of a PNG file."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png16(values: np.ndarray, transparent: int | None = None) -> bytes:
    """A 16-bit grey PNG, chunk by chunk."""
    height, width = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", width, height, 16, 0, 0, 0, 0)
    clear = b"" if transparent is None else chunk(b"tRNS", struct.pack(">H", transparent))
    pixels = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + clear + pixels + chunk(b"IEND", b"")


class TestDecode:
    def test_rgb_png_is_exact(self, rng: np.random.Generator) -> None:
        pixels = rng.integers(0, 256, (5, 7, 3), np.uint8)
        np.testing.assert_array_equal(data.decode(encoded(Image.fromarray(pixels), "PNG")), pixels)

    @pytest.mark.parametrize("progressive", [False, True])
    def test_jpeg(self, progressive: bool) -> None:
        pixels = smooth(33, 21)
        content = encoded(Image.fromarray(pixels), "JPEG", quality=95, subsampling=0, progressive=progressive)
        assert np.abs(data.decode(content).astype(int) - pixels).max() <= 6

    def test_grey(self, rng: np.random.Generator) -> None:
        pixels = rng.integers(0, 256, (4, 6), np.uint8)
        content = encoded(Image.fromarray(pixels), "PNG")
        np.testing.assert_array_equal(data.decode(content), np.repeat(pixels[:, :, None], 3, axis=2))
        np.testing.assert_array_equal(data.decode(content, channels=1), pixels[:, :, None])

    def test_sixteen_bits_keep_the_high_byte(self, rng: np.random.Generator) -> None:
        values = rng.integers(0, 1 << 16, (4, 6), np.uint16)
        np.testing.assert_array_equal(data.decode(png16(values), 1)[:, :, 0], values >> 8)

    def test_one_bit(self, rng: np.random.Generator) -> None:
        bits = rng.integers(0, 2, (5, 9)).astype(bool)
        np.testing.assert_array_equal(data.decode(encoded(Image.fromarray(bits), "PNG"), 1)[:, :, 0], bits * 255)

    def test_cmyk_jpeg_looks_like_its_rgb(self) -> None:
        pixels = smooth(32, 32)
        content = encoded(Image.fromarray(pixels).convert("CMYK"), "JPEG", quality=95)
        assert np.abs(data.decode(content).astype(int) - pixels).max() <= 10

    def test_palette(self, rng: np.random.Generator) -> None:
        palette = rng.integers(0, 256, (4, 3), np.uint8)
        indices = rng.integers(0, 4, (6, 5), np.uint8)
        image = Image.fromarray(indices)
        image.putpalette(palette.tobytes())
        assert image.mode == "P"
        np.testing.assert_array_equal(data.decode(encoded(image, "PNG")), palette[indices])

    def test_transparency_lies_on_white(self) -> None:
        pixels = np.zeros((2, 2, 4), np.uint8)
        pixels[0, 0] = (10, 20, 30, 255)
        result = data.decode(encoded(Image.fromarray(pixels), "PNG"))
        np.testing.assert_array_equal(result[0, 0], (10, 20, 30))
        np.testing.assert_array_equal(result[1], np.full((2, 3), 255))

    def test_transparent_palette(self) -> None:
        image = Image.fromarray(np.array([[0, 1]], np.uint8))
        image.putpalette([9, 8, 7, 1, 2, 3])
        result = data.decode(encoded(image, "PNG", transparency=0))
        np.testing.assert_array_equal(result, [[[255, 255, 255], [1, 2, 3]]])

    @pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_exif_orientation(self, orientation: int, kind: str) -> None:
        # Brighter to the right and far brighter downwards: every turn of it is another image.
        pixels = np.add.outer(np.arange(24) * 8, np.arange(40)).astype(np.uint8)[:, :, None].repeat(3, axis=2)
        upright = {
            1: pixels,
            2: pixels[:, ::-1],
            3: pixels[::-1, ::-1],
            4: pixels[::-1],
            5: pixels.transpose(1, 0, 2),
            6: np.rot90(pixels, 3),
            7: pixels[::-1, ::-1].transpose(1, 0, 2),
            8: np.rot90(pixels, 1),
        }[orientation]
        content = encoded(Image.fromarray(pixels), kind, exif=orientation_of(orientation), **LOSSLESS[kind])
        result = data.decode(content)
        assert result.shape == upright.shape
        assert np.abs(result.astype(int) - upright).max() <= (3 if kind == "JPEG" else 0)

    def test_a_broken_exif_is_no_broken_image(self) -> None:
        pixels = smooth(9, 7)
        for exif in (b"Exif\0\0nonsense", b"Exif\0\0MM\0*\xff\xff\xff\xff", orientation_of(77).tobytes()):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert data.decode(encoded(Image.fromarray(pixels), "JPEG", exif=exif)).shape == (9, 7, 3)

    @pytest.mark.parametrize("kind", ["BMP", "GIF", "TIFF", "WEBP", "PNG"])
    def test_other_formats(self, kind: str, rng: np.random.Generator) -> None:
        # Few colours, which a GIF keeps.
        pixels = (rng.integers(0, 4, (9, 13, 3)) * 80).astype(np.uint8)
        result = data.decode(encoded(Image.fromarray(pixels), kind, **LOSSLESS[kind]))
        np.testing.assert_array_equal(result, pixels)

    @pytest.mark.parametrize("kind", ["GIF", "TIFF", "WEBP", "PNG"])
    def test_the_first_of_several_pictures_counts(self, kind: str) -> None:
        first, second = Image.new("RGB", (6, 5), (250, 0, 0)), Image.new("RGB", (6, 5), (0, 0, 250))
        content = encoded(first, kind, save_all=True, append_images=[second], **LOSSLESS[kind])
        np.testing.assert_array_equal(data.decode(content), np.asarray(first))

    def test_several_pictures_in_a_jpeg(self) -> None:
        first, second = Image.fromarray(smooth(16, 8)), Image.new("RGB", (6, 5))
        content = encoded(first, "MPO", save_all=True, append_images=[second], quality=95, subsampling=0)
        assert np.abs(data.decode(content).astype(int) - np.asarray(first)).max() <= 6

    def test_ycck(self) -> None:
        # Pillow writes CMYK inverted and without a transform; a patched marker says that it is YCCK. Its red, green and
        # blue are then the inverted ink, and there is no black.
        pixels = smooth(32, 32)
        raw = np.dstack([np.asarray(Image.fromarray(pixels).convert("YCbCr")), np.full((32, 32), 255, np.uint8)])
        content = bytearray(encoded(Image.fromarray(255 - raw, "CMYK"), "JPEG", quality=100, subsampling=0))
        place = content.index(b"Adobe") + 11
        assert content[place] == 0
        content[place] = 2
        assert np.abs(data.decode(bytes(content)).astype(int) - (255 - pixels.astype(int))).max() <= 8

    def test_rgb_stored_as_such(self) -> None:
        pixels = smooth(16, 24)[:, :, ::-1]
        content = encoded(Image.fromarray(pixels), "JPEG", quality=100, keep_rgb=True)
        assert np.abs(data.decode(content).astype(int) - pixels).max() <= 3

    def test_sixteen_bits_of_other_formats(self, rng: np.random.Generator) -> None:
        values = rng.integers(0, 1 << 16, (5, 6), np.uint16)
        content = encoded(Image.fromarray(values), "TIFF")
        np.testing.assert_array_equal(data.decode(content, 1)[:, :, 0], values >> 8)
        for odd, message in ((values.astype(np.float32), "floating-point"), (values.astype(np.int32) * 9, "16 bits")):
            with pytest.raises(DecodeError, match=message):
                data.decode(encoded(Image.fromarray(odd), "TIFF"))

    def test_thirty_two_bits_are_taken_as_they_are_where_they_fit(self, rng: np.random.Generator) -> None:
        values = rng.integers(0, 256, (5, 6), np.int32)
        for bits in (values, values.astype(np.int16)):
            content = encoded(Image.fromarray(bits), "TIFF") if bits is values else tiff_of_signed(bits)
            np.testing.assert_array_equal(data.decode(content, 1)[:, :, 0], values)
        values[2, 3] = 256
        for bits in (values, -values):
            with pytest.raises(DecodeError, match="signed or have more than 16 bits, of which nobody knows which is"):
                data.decode(encoded(Image.fromarray(bits), "TIFF"))

    def test_a_transparent_value_of_sixteen_bits(self) -> None:
        values = np.array([[0x1234, 0x1235, 0xFFFF, 0]], np.uint16)
        for channels in (1, 3):
            result = data.decode(png16(values, 0x1234), channels)
            np.testing.assert_array_equal(result[0, :, 0], [255, 0x12, 255, 0])

    def test_a_path_may_be_text(self, tmp_path: Path) -> None:
        path = tmp_path / "x.png"
        Image.fromarray(smooth(4, 5)).save(path)
        np.testing.assert_array_equal(data.decode(str(path)), smooth(4, 5))
        assert decode_module.read_header(str(path)).width == 5
        np.testing.assert_array_equal(Decoder().decode([str(path)]).batch.image(0), smooth(4, 5))
        with pytest.raises(FileNotFoundError):
            data.decode("none.png")
        for wrong in (None, 3, bytearray(b"x")):
            with pytest.raises(TypeError, match="must be the path of a file or bytes, not "):
                data.decode(wrong)
            with pytest.raises(TypeError, match=r"sources\[1\] must be the path of a file or bytes, not "):
                Decoder().decode([path, wrong])
        for single in (str(path), path, path.read_bytes()):
            with pytest.raises(TypeError, match=r"sources must be several, such as \[PATH\]"):
                Decoder().decode(single)

    def test_grey_with_alpha(self) -> None:
        pixels = np.array([[[40, 255], [40, 0]]], np.uint8)
        np.testing.assert_array_equal(data.decode(encoded(Image.fromarray(pixels, "LA"), "PNG"), 1), [[[40], [255]]])

    def test_broken_files_are_named(self, tmp_path: Path) -> None:
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
        jpeg, png = (encoded(Image.fromarray(noise), kind) for kind in ("JPEG", "PNG"))
        cases = {
            "empty.jpg": (b"", "is empty"),
            "text.jpg": (b"not an image at all", "cannot be decoded: not a JPEG, PNG, BMP, GIF, TIFF or WebP image"),
            "ico.png": (
                encoded(Image.fromarray(noise), "ICO"),
                "cannot be decoded: not a JPEG, PNG, BMP, GIF, TIFF or",
            ),
            "cut.jpg": (jpeg[: len(jpeg) // 2], "cannot be decoded: "),
            "cut.png": (png[: len(png) // 2], "cannot be decoded: "),
            "head.png": (png[:20], "cannot be decoded: "),
        }
        for name, (content, message) in cases.items():
            path = tmp_path / name
            path.write_bytes(content)
            with pytest.raises(ValueError, match=f"{path} {message}"):
                data.decode(path)
        with pytest.raises(FileNotFoundError):
            data.decode(tmp_path / "none.jpg")
        with pytest.raises(ValueError, match="channels must be 1 or 3, not 4"):
            data.decode(png, channels=4)

    def test_a_folder_is_no_image(self, tmp_path: Path) -> None:
        (tmp_path / "x.jpg").mkdir()
        with pytest.raises(DecodeError, match=r"x.jpg is a folder, not an image"):
            data.decode(tmp_path / "x.jpg")
        with pytest.raises(DecodeError, match=r"x.jpg is a folder, not an image"):
            decode_module.read_header(tmp_path / "x.jpg")

    def test_bytes_can_be_named(self) -> None:
        with pytest.raises(
            DecodeError, match=r"^member 7 of the archive is empty; replace or remove it, or .*on_error='skip'"
        ) as caught:
            data.decode(b"", name="member 7 of the archive")
        assert (caught.value.name, caught.value.reason) == ("member 7 of the archive", "is empty")
        second = pickle.loads(pickle.dumps(caught.value))
        assert (second.name, second.reason, str(second)) == (caught.value.name, caught.value.reason, str(caught.value))

    def test_too_many_pixels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        content = encoded(Image.new("L", (400, 300)), "PNG")
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50_000)
        with pytest.raises(DecodeError, match=r"the image cannot be decoded: Image size \(120000 pixels\) exceeds"):
            data.decode(content)

    @given(place=st.floats(0, 1, exclude_max=True), kind=st.sampled_from(sorted(set(LOSSLESS))), seed=st.integers(0, 3))
    @settings(max_examples=300)
    def test_cut_anywhere(self, place: float, kind: str, seed: int) -> None:
        pixels = np.random.default_rng(seed).integers(0, 256, (24, 40, 3), np.uint8)
        content = encoded(Image.fromarray(pixels), kind, **LOSSLESS[kind])
        whole = data.decode(content)
        cut = content[: int(place * len(content))]
        result = None
        with warnings.catch_warnings(), contextlib.suppress(DecodeError):
            # Pillow's remarks on what it reads nevertheless.
            warnings.simplefilter("ignore")
            result = data.decode(cut)
        if result is not None:
            # Nothing but an end that carries no pixels was lost.
            np.testing.assert_array_equal(result, whole)

    @given(noise=st.binary(max_size=200), start=st.sampled_from(MAGICS))
    @settings(max_examples=300)
    def test_nonsense(self, noise: bytes, start: bytes) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(DecodeError, match=r"^nonsense "):
                data.decode(start + noise, name="nonsense")


def tiff_of_signed(values: np.ndarray) -> bytes:
    """A TIFF file of 16 signed bits, which Pillow reads and does not write."""
    buffer = io.BytesIO()
    image = Image.fromarray(values.astype(np.uint16))
    image.save(buffer, "TIFF", tiffinfo={339: 2})
    assert Image.open(io.BytesIO(buffer.getvalue())).mode == "I"
    return buffer.getvalue()


def orientation_of(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


class TestHeader:
    def test_reads_what_the_file_says(self, tmp_path: Path) -> None:
        path = tmp_path / "x.jpg"
        Image.fromarray(smooth(10, 20)).save(path, exif=orientation_of(6))
        for source in (path, path.read_bytes()):
            header = decode_module.read_header(source)
            assert (header.format, header.mode, header.height, header.width, header.orientation) == (
                "JPEG",
                "RGB",
                10,
                20,
                6,
            )
        path.write_bytes(b"")
        with pytest.raises(DecodeError, match=f"{path} is empty"):
            decode_module.read_header(path)
        with pytest.raises(FileNotFoundError):
            decode_module.read_header(tmp_path / "none")

    def test_several_pictures_of_a_phone_are_a_jpeg(self) -> None:
        first = Image.fromarray(smooth(16, 8))
        content = encoded(first, "MPO", save_all=True, append_images=[first])
        header = decode_module.read_header(content)
        assert (header.format, header.height, header.width) == ("JPEG", 16, 8)

    @pytest.mark.parametrize("where", ["before", "after", "none", "xmp", "profile"])
    def test_pngs_are_not_decoded(self, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        content = encoded(Image.fromarray(smooth(10, 20)), "PNG")
        exif = chunk(b"eXIf", orientation_of(6).tobytes()[6:])
        xmp = chunk(b"iTXt", b'XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation="6"/>')
        profile = b"\nexif\n      32\n" + orientation_of(6).tobytes().hex().encode()
        end = len(content) - 12
        content = {
            "before": content[:33] + exif + content[33:],
            "after": content[:end] + exif + content[end:],
            "none": content,
            "xmp": content[:33] + xmp + content[33:],
            "profile": content[:end] + chunk(b"tEXt", b"Raw profile type exif\0" + profile) + content[end:],
        }[where]
        path = tmp_path / "x.png"
        path.write_bytes(content)
        turned = where != "none"
        assert data.decode(path).shape == ((20, 10, 3) if turned else (10, 20, 3))
        loaded: list[tuple[int, int]] = []
        real = PngImageFile.load

        def load(image: PngImageFile) -> Any:
            loaded.append(image.size)
            return real(image)

        monkeypatch.setattr(PngImageFile, "load", load)
        for source in (path, content):
            header = decode_module.read_header(source)
            assert (header.height, header.width, header.orientation) == (10, 20, 6 if turned else 1)
        assert (20, 10) not in loaded

    def test_what_cannot_be_read_now_is_not_called_broken(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "x.png"
        Image.fromarray(smooth(10, 20)).save(path)

        def refused(*_: object, **__: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(Path, "open", refused)
        with pytest.raises(OSError, match="Too many open files") as caught:
            decode_module.read_header(path)
        assert not isinstance(caught.value, DecodeError)

    @given(
        place=st.floats(0, 1, exclude_max=True), value=st.binary(min_size=1, max_size=8), kind=st.sampled_from(FILES)
    )
    @settings(max_examples=300)
    def test_damaged_anywhere(self, place: float, value: bytes, kind: str) -> None:
        content = bytearray(encoded(Image.fromarray(smooth(10, 20)), kind, **LOSSLESS[kind]))
        start = int(place * min(len(content), 300))
        content[start : start + len(value)] = value
        with warnings.catch_warnings(), tempfile.NamedTemporaryFile() as file:
            warnings.simplefilter("ignore")
            file.write(content)
            file.flush()
            # An error of a file is one of its content, however it is read.
            with contextlib.suppress(DecodeError):
                decode_module.read_header(Path(file.name))


def mixture() -> list[bytes]:
    """Files of every kind: what the GPU decodes, what it must not, and what nobody can."""
    rng = np.random.default_rng(3)
    photo = Image.fromarray(smooth(21, 34))
    noise = Image.fromarray(rng.integers(0, 256, (40, 24, 3), np.uint8))
    jpeg = encoded(noise, "JPEG", quality=90)
    return [
        encoded(photo, "JPEG"),
        encoded(photo.convert("L"), "JPEG"),
        encoded(noise, "JPEG", progressive=True),
        encoded(photo, "JPEG", exif=orientation_of(6)),
        encoded(photo.convert("CMYK"), "JPEG"),
        encoded(photo, "JPEG", keep_rgb=True),
        encoded(photo, "PNG"),
        encoded(noise.convert("P"), "GIF"),
        jpeg + b"\0" * 50,
        b"",
        b"text",
        jpeg[: len(jpeg) // 2],
        jpeg[:-2],
    ]


BROKEN = (9, 10, 11)


class TestDecoder:
    @pytest.mark.parametrize("threads", [0, 3])
    def test_batch_on_the_host(self, threads: int) -> None:
        contents = mixture()
        with Decoder(on_error="skip", threads=threads) as decoder:
            decoded = decoder.decode(contents)
            assert decoder.skipped == 3
            # None is left, although the decoder is.
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("flcuda-decode")]
        assert [error.name for error in decoded.errors] == [f"image {place}" for place in BROKEN]
        np.testing.assert_array_equal(decoded.kept, [i for i in range(13) if i not in BROKEN])
        for place, index in enumerate(decoded.kept.tolist()):
            np.testing.assert_array_equal(decoded.batch.image(place), data.decode(contents[index]))

    def test_the_first_error_is_raised(self, tmp_path: Path) -> None:
        good = tmp_path / "good.jpg"
        good.write_bytes(mixture()[0])
        for threads in (0, 2):
            with Decoder(threads=threads) as decoder:
                with pytest.raises(DecodeError, match="image 1 is empty"):
                    decoder.decode([good, b"", b"text"])
                with pytest.raises(FileNotFoundError):
                    decoder.decode([good, tmp_path / "none.jpg"])
                with pytest.raises(DecodeError, match="the second cannot be decoded"):
                    decoder.decode([good, b"text"], names=["the first", "the second"])

    def test_files_that_cannot_be_read_are_skipped(self, tmp_path: Path) -> None:
        (tmp_path / "folder.jpg").mkdir()
        decoded = Decoder(on_error="skip").decode([tmp_path / "none.jpg", tmp_path / "folder.jpg"])
        assert decoded.batch is None
        assert [error.reason for error in decoded.errors] == [
            "cannot be read: No such file or directory",
            "is a folder, not an image",
        ]
        assert [error.unread for error in decoded.errors] == [True, False]
        assert pickle.loads(pickle.dumps(decoded.errors[0])).unread

    def test_pickles(self) -> None:
        decoder = Decoder(channels=1, on_error="skip", threads=2)
        decoder.decode(mixture())
        second = pickle.loads(pickle.dumps(decoder))
        found = (second.channels, second.on_error, second.threads, second.device, second.skipped)
        assert found == (1, "skip", 2, CPU, 0)
        assert len(second.decode(mixture()).kept) == 10
        decoder.close()
        second.close()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"channels": 4}, "channels must be 1 or 3, not 4"),
            ({"on_error": "ignore"}, "on_error must be 'raise' or 'skip', not 'ignore'"),
            ({"threads": -1}, "threads must be at least 0, not -1"),
            ({"device": "tpu"}, "tpu"),
        ],
    )
    def test_bad_arguments(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Decoder(**options)

    def test_threads_that_are_no_number(self) -> None:
        with pytest.raises(TypeError, match=r"threads must be a whole number, not 1\.5"):
            Decoder(threads=1.5)

    def test_no_source(self) -> None:
        with pytest.raises(ValueError, match="sources must be at least one"):
            Decoder().decode([])

    @pytest.mark.parametrize("names", [[], ["one"], ["one", "two", "three"]])
    def test_names_for_other_sources(self, names: list[str]) -> None:
        for decode in (Decoder().decode, Decoder().decode_on_host):
            with pytest.raises(ValueError, match=f"names must be one a source: 2, not {len(names)}"):
                decode(mixture()[:2], names=names)


class Here:
    """A CUDA device and nvImageCodec, both played."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.cupy = FakeCupy()
        self.module = FakeNvimgcodec(self.cupy, **options)
        device = FakeDevice(self.cupy)
        monkeypatch.setattr(decode_module, "resolve", lambda _: device)
        monkeypatch.setattr(nvimgcodec_module, "cupy", lambda: self.cupy)
        monkeypatch.setattr(nvimgcodec_module, "gather_images", self.cupy.gather_images)
        package = types.ModuleType("nvidia")
        package.nvimgcodec = self.module
        monkeypatch.setitem(sys.modules, "nvidia", package)
        monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", self.module)


class TestNvimgcodec:
    @pytest.mark.parametrize("padding", [0, 5])
    @pytest.mark.parametrize("channels", [1, 3])
    def test_decodes_as_pillow_does(self, monkeypatch: pytest.MonkeyPatch, padding: int, channels: int) -> None:
        here = Here(monkeypatch, padding=padding)
        contents = mixture()
        decoder = Decoder("cuda", channels=channels, on_error="skip")
        for turn in range(3):
            order = np.random.default_rng(turn).permutation(len(contents))
            decoded = decoder.decode([contents[i] for i in order])
            assert sorted(order[decoded.kept]) == [i for i in range(13) if i not in BROKEN]
            assert len(decoded.errors) == 3
            for place, index in enumerate(order[decoded.kept]):
                expected = data.decode(contents[index], channels)
                # nvImageCodec's grey of a JPEG is its Y; the fake's is Pillow's of the colours.
                assert np.abs(decoded.batch.image(place).astype(int) - expected).max() <= 1
        # Baseline, grey, turned, and one with padding at its end are the engine's; a progressive one is not.
        warm_up = 4
        assert here.module.batches[warm_up:] == [5, 1] * 3
        assert here.module.by == {"HW_GPU_ONLY": warm_up + 4 * 3, "HYBRID_CPU_GPU": 3}
        # Two instances in turn, each with images of its own.
        assert here.module.reused[warm_up::2][2] == 5
        assert here.module.kinds == [["HW_GPU_ONLY"]] * 2 + [["HYBRID_CPU_GPU", "CPU_ONLY"]] * 2
        assert decoder.skipped == 9
        assert all(error.__traceback__ is None for error in decoder.last_errors)

    def test_what_it_refuses_goes_to_pillow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        contents = mixture()
        Here(monkeypatch, refused=(contents[0], contents[2]))
        decoded = Decoder("cuda").decode(contents[:4])
        for place in range(4):
            np.testing.assert_array_equal(decoded.batch.image(place), data.decode(contents[place]))

    def test_nothing_for_the_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = Here(monkeypatch)
        decoded = Decoder("cuda").decode([mixture()[6], mixture()[7]])
        np.testing.assert_array_equal(decoded.batch.image(0), smooth(21, 34))
        assert here.module.batches == [1] * 4

    def test_the_engine_gets_all_that_it_can_decode(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However small the first batch was."""
        here = Here(monkeypatch)
        decoder = Decoder("cuda")
        decoder.decode(mixture()[:1])
        decoder.decode(mixture()[:1] * 50)
        assert here.module.by == {"HW_GPU_ONLY": 4 + 51}

    def test_images_stay_on_the_stream_that_they_were_made_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The callers' streams do not outlive an epoch; the fake refuses to reuse an image on another stream."""
        here = Here(monkeypatch)
        decoder = Decoder("cuda")
        assert decoder.uses_nvimgcodec
        contents = mixture()[:4]
        for epoch in range(6):
            here.cupy.stream = stream = Stream(7 + epoch % 3)
            decoded = decoder.decode(contents)
            for place, content in enumerate(contents):
                np.testing.assert_array_equal(decoded.batch.image(place), data.decode(content))
            # The copies wait for the decoding, and what comes on its stream for the copies.
            (decoded_at,) = stream.waited
            assert stream.log == [decoded_at] + ["copy"] * 4
            own = decoded_at.stream
            assert own.log[decoded_at.place - 1] == "decode"
            assert own.log[-1].stream is stream
            assert own.log[-1].place == len(stream.log)
        assert len({id(stream) for stream in here.cupy.streams}) == 1 + 2

    def test_closing_frees_the_images(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Here(monkeypatch)
        decoder = Decoder("cuda")
        for _ in range(2):
            for _ in range(3):
                decoder.decode(mixture()[:4])
            assert any(isinstance(found, FakeImage) for found in gc.get_objects())
            decoder.close()
            assert not any(isinstance(found, FakeImage) for found in gc.get_objects())

    def test_an_error_gives_everything_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        contents = mixture()
        here = Here(monkeypatch, refused=(contents[0],))
        decoder = Decoder("cuda")
        broken = contents[0][:-2] + b"\0\0"
        for _ in range(3):
            with pytest.raises(DecodeError, match="image 1 cannot be decoded"):
                decoder.decode([contents[1], broken, b""])
            with pytest.raises(DecodeError, match="image 0 is empty"):
                decoder.decode([b"", contents[0][:-2]])
        # Images are freed in the order of their stream: after it waits for the copies that were queued.
        freed: list[bool] = []
        own = here.cupy.streams[1:]
        real = FakeImage.__init__

        def watched(image: FakeImage, pixels: np.ndarray, padding: int, stream: int) -> None:
            real(image, pixels, padding, stream)
            of = next(other for other in own if other.ptr == stream)
            weakref.finalize(image, lambda: freed.append(bool(of.log) and of.log[-1] != "decode"))

        monkeypatch.setattr(FakeImage, "__init__", watched)
        monkeypatch.setattr(nvimgcodec_module, "gather_images", None)
        for _ in range(3):
            with pytest.raises(TypeError):
                decoder.decode([contents[1]])
        gc.collect()
        assert len(freed) == 3
        assert all(freed)

    def test_errors_are_pillows(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        Here(monkeypatch)
        cut = tmp_path / "cut.jpg"
        cut.write_bytes(mixture()[11])
        with pytest.raises(DecodeError) as expected:
            data.decode(cut)
        with pytest.raises(DecodeError) as found:
            Decoder("cuda").decode([mixture()[0], cut])
        assert str(found.value) == str(expected.value)
        with pytest.raises(FileNotFoundError):
            Decoder("cuda").decode([tmp_path / "none.jpg"])
        decoded = Decoder("cuda", on_error="skip").decode([tmp_path / "none.jpg", b""])
        assert decoded.batch is None
        assert len(decoded.errors) == 2

    def test_too_many_pixels_are_pillows_to_refuse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = Here(monkeypatch)
        decoder = Decoder("cuda")
        decoder.decode([mixture()[0]])
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50_000)
        with pytest.raises(DecodeError, match="exceeds limit"):
            decoder.decode([encoded(Image.new("L", (400, 300)), "JPEG")])
        assert here.module.batches == [1] * 5

    def test_what_xmp_turns_is_pillows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = Here(monkeypatch)
        content = mixture()[0]
        images = []
        for attribute in (b'tiff:Orientation="6"', b'tiff:Orientation="1"', b"<tiff:Orientation>3</tiff:Orientation>"):
            body = b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta " + attribute + b"/>"
            segment = b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body
            images.append(content[:20] + segment + content[20:])
        decoded = Decoder("cuda").decode(images)
        for place, image in enumerate(images):
            np.testing.assert_array_equal(decoded.batch.image(place), data.decode(image))
        height, width = decoded.batch.sizes[1]
        assert tuple(decoded.batch.sizes[0]) == (width, height)
        assert here.module.by == {"HW_GPU_ONLY": 4 + 1}

    def test_kept_images_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = Here(monkeypatch)
        monkeypatch.setattr(nvimgcodec_module, "_KEPT_BYTES", 5_000)
        decoder = Decoder("cuda")
        for _ in range(4):
            decoder.decode(mixture()[:4])
        # The engine's batches: what was kept is dropped each time, the image of the start too.
        assert here.module.reused[4::2][2:] == [0, 0]

    def test_threads_never_share_a_decoder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = Here(monkeypatch)
        decoder = Decoder("cuda")
        contents = mixture()[:4]
        expected = [data.decode(content) for content in contents]
        with ThreadPoolExecutor(6) as pool:
            for decoded in pool.map(decoder.decode, [contents] * 40):
                for place in range(4):
                    np.testing.assert_array_equal(decoded.batch.image(place), expected[place])
        # Two instances, each made once, with a decoder for the engine and one for the progressive image.
        assert len(here.module.kinds) == 4

    def test_describes_what_works(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Here(monkeypatch)
        assert Decoder("cuda").description.startswith("nvImageCodec 0.9.0 (JPEG engine, GPU and CPU, CPU), Pillow ")

    def test_without_an_engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = Here(monkeypatch, absent=("HW_GPU_ONLY",))
        decoder = Decoder("cuda")
        assert "(GPU and CPU, CPU)" in decoder.description
        assert here.module.kinds[0] == ["HYBRID_CPU_GPU", "CPU_ONLY"]
        np.testing.assert_array_equal(decoder.decode(mixture()[:1]).batch.image(0), data.decode(mixture()[0]))

    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Here(monkeypatch)
        monkeypatch.setitem(sys.modules, "nvidia", None)
        decoder = Decoder("cuda")
        assert decoder.description.startswith("Pillow ")
        np.testing.assert_array_equal(decoder.decode(mixture()[:1]).batch.image(0), data.decode(mixture()[0]))

    def test_a_wheel_without_this_pythons_module_is_warned_of(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = Here(monkeypatch)

        def absent(**options: Any) -> None:
            name = "nvidia.nvimgcodec.nvimgcodec_impl"
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        here.module.Decoder = absent
        with pytest.warns(RuntimeWarning, match="does not start, Pillow decodes .* No module named .*nvimgcodec_impl"):
            Decoder("cuda").decode(mixture()[:1])

    def test_broken_installation_is_warned_of_once(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        here = Here(monkeypatch)

        def broken(**options: Any) -> None:
            os.write(2, b"Failed to load nvjpeg library!\n")
            raise RuntimeError("Could not create decoder")

        here.module.Decoder = broken
        decoder = Decoder("cuda")
        with pytest.warns(RuntimeWarning, match="Pillow decodes .* Could not create decoder .Failed to load nvjpeg"):
            decoder.decode(mixture()[:1])
        decoder.decode(mixture()[:1])
        assert capfd.readouterr().err == ""
        assert "PYNVIMGCODEC_VERBOSITY" not in os.environ

    def test_what_others_write_meanwhile_is_not_lost(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        here = Here(monkeypatch)
        real = here.module.Decoder
        where = os.fstat(2)

        def slow(**options: Any) -> Any:
            os.write(2, b"[WARNING] Failed to load libnvtiff.so\n")
            os.write(2, b"a line of another thread\n")
            time.sleep(0.02)
            return real(**options)

        here.module.Decoder = slow
        decoders = [Decoder("cuda") for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda decoder: decoder.decode(mixture()[:1]), decoders))
        assert (os.fstat(2).st_dev, os.fstat(2).st_ino) == (where.st_dev, where.st_ino)
        assert capfd.readouterr().err == "a line of another thread\n" * 8
        assert "PYNVIMGCODEC_VERBOSITY" not in os.environ

    def test_an_old_version_is_found_out_at_the_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = Here(monkeypatch)
        real = here.module.Decoder

        class Old(real):
            def decode(self, srcs: Any, *, params: Any = None, cuda_stream: int = 0) -> list[Any]:
                return super().decode(srcs, params=params, cuda_stream=cuda_stream)

        here.module.Decoder = Old
        with pytest.warns(RuntimeWarning, match="nvImageCodec does not start"):
            Decoder("cuda").decode(mixture()[:1])


@pytest.mark.parametrize("size", [0, 1, 131071, 131072, 131073, 131072 + (4 << 20), 5_000_000])
def test_files_of_all_sizes_are_read_whole(size: int, tmp_path: Path) -> None:
    content = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    path = tmp_path / "file"
    path.write_bytes(content)
    assert decode_module._read(path) == content


class TestFileMemory:
    """Files of a batch are read into blocks that later batches use again."""

    @given(sizes=st.lists(st.sampled_from([0, 1, 37, 999, 1000, 1001, 2500, 4000]), min_size=1, max_size=12))
    def test_reads_whole_files(self, sizes: list[int]) -> None:
        draws = np.random.default_rng(len(sizes))
        free: list[memoryview] = []
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode_module, "_BLOCK_BYTES", 2500)
            patch.setattr(decode_module, "_LEAST_ROOM", 1000)
            for turn in range(3):
                memory = decode_module._FileMemory(free)
                read = []
                for place, size in enumerate(sizes):
                    path = Path(folder, f"{turn}-{place}")
                    path.write_bytes(draws.bytes(size))
                    read.append((path, memory.read(path)))
                # All at once: none is written over another.
                assert all(content == path.read_bytes() for path, content in read)
                memory.give_back()
                if turn == 0:
                    kept = {id(block.obj) for block in free}
                assert {id(block.obj) for block in free} == kept
                assert all(len(block) == 2500 for block in free)
        assert 1 <= len(kept) <= 12

    def test_keeps_no_more_than_stated(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(decode_module, "_BLOCK_BYTES", 100)
        monkeypatch.setattr(decode_module, "_LEAST_ROOM", 100)
        (tmp_path / "file").write_bytes(b"content")
        free: list[memoryview] = []
        memories = [decode_module._FileMemory(free) for _ in range(3)]
        for memory in memories:
            for _ in range(5):
                memory.read(tmp_path / "file")
        for memory in memories:
            memory.give_back()
        assert len(free) == decode_module._KEPT_BLOCKS
        assert len({id(block.obj) for block in free}) == len(free)

    def test_of_a_batch_that_failed_is_not_used_again(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        Here(monkeypatch)
        (tmp_path / "whole.jpg").write_bytes(mixture()[0])
        (tmp_path / "broken.jpg").write_bytes(mixture()[0][:300])
        decoder = Decoder("cuda")
        with pytest.raises(DecodeError, match=r"broken\.jpg"):
            decoder.decode([tmp_path / "whole.jpg", tmp_path / "broken.jpg"])
        assert not decoder._blocks
        decoder.decode([tmp_path / "whole.jpg"])
        assert len(decoder._blocks) == 1
        decoder.close()
        assert not decoder._blocks

    def test_batches_under_way_do_not_share(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """The pixels of each file say which one it is, whatever is read while it is decoded."""
        Here(monkeypatch)
        paths = [tmp_path / f"{place}.jpg" for place in range(24)]
        for place, path in enumerate(paths):
            path.write_bytes(encoded(Image.new("RGB", (24, 16), (10 * place, 0, 0)), "JPEG", quality=95))
        decoder = Decoder("cuda")
        failed: list[BaseException] = []

        def work(first: int) -> None:
            try:
                for turn in range(30):
                    places = [(first + 5 * turn + k) % len(paths) for k in range(6)]
                    batch = decoder.decode([paths[place] for place in places]).batch
                    reds = [float(image[..., 0].mean()) for image in batch.images()]
                    assert np.abs(np.array(reds) - 10 * np.array(places)).max() < 4, (places, reds)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(7 * place,)) for place in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed


class TestTurns:
    """Two threads do not read at the same time, but for files that are slow."""

    @pytest.mark.parametrize("slow", [False, True])
    def test_reading(self, slow: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        Here(monkeypatch)
        monkeypatch.setattr(decode_module, "_SLOW_FILE_S", 1e-9 if slow else 1e9)
        paths = [tmp_path / f"{place}.jpg" for place in range(4)]
        for path in paths:
            path.write_bytes(mixture()[0])
        real = decode_module._FileMemory.read
        reading: list[int] = []
        most: list[int] = []

        def watched(memory: Any, path: Path) -> bytes | memoryview:
            reading.append(1)
            most.append(len(reading))
            time.sleep(0.01)
            content = real(memory, path)
            reading.pop()
            return content

        monkeypatch.setattr(decode_module._FileMemory, "read", watched)
        decoder = Decoder("cuda")
        decoder.decode(paths[:1])
        most.clear()
        failed: list[BaseException] = []

        def work() -> None:
            try:
                assert len(decoder.decode(paths).batch) == 4
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert max(most) == (2 if slow else 1)


class TestReaders:
    """Files that helper processes read are decoded as those that this process reads, and named in the same errors."""

    @staticmethod
    def folder(tmp_path: Path) -> list[Path]:
        contents = mixture()
        bits = bytearray(contents[0])
        bits[bits.index(b"\xff\xc0") + 4] = 12
        huge = contents[0][:-2] + bytes(40_000) + b"\xff\xd9"
        paths = []
        for place, content in enumerate([*contents, huge, png16(np.full((5, 6), 0x1234, np.uint16)), bytes(bits)]):
            paths.append(tmp_path / f"{place}")
            paths[-1].write_bytes(content)
        (tmp_path / "folder").mkdir()
        return [*paths, tmp_path / "folder", tmp_path / "none"]

    @staticmethod
    def warm(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Waits for a process; returns a list that is to have how many files the processes read of each batch."""
        path = Path("/nowhere/none")
        found: list[int] = []
        real = FileReaders._read

        def watched(*arguments: Any) -> Any:
            result = real(*arguments)
            found.append(len(result))
            return result

        monkeypatch.setattr(FileReaders, "_read", watched)
        end = time.monotonic() + 60
        while not found:
            assert time.monotonic() < end
            with decoder._readers.reading([path] * 16):
                time.sleep(0.002)
        found.clear()
        return found

    def test_any_order(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        Here(monkeypatch)
        monkeypatch.setattr(file_reader, "_ROOM", 30_000)
        paths = self.folder(tmp_path)
        with Decoder("cuda", on_error="skip") as decoder, Decoder("cuda", on_error="skip") as other:
            other._readers.close()
            found = self.warm(decoder, monkeypatch)
            for seed in range(25):
                draws = np.random.default_rng(seed)
                order = [paths[place] for place in draws.integers(0, len(paths), 16 + seed)]
                decoded, expected = decoder.decode(order), other.decode(order)
                np.testing.assert_array_equal(decoded.kept, expected.kept)
                assert [str(error) for error in decoded.errors] == [str(error) for error in expected.errors]
                np.testing.assert_array_equal(decoded.batch.sizes, expected.batch.sizes)
                for image, wanted in zip(decoded.batch.images(), expected.batch.images(), strict=True):
                    np.testing.assert_array_equal(image, wanted)
                good = [int(path.name) in (0, 1, 2, 3, 8) for path in order if path.name.isdigit()]
                assert found[-1] == sum(good) > 0
            assert len(found) == 25

    def test_the_first_error_is_raised(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        Here(monkeypatch)
        paths = self.folder(tmp_path)
        good = [paths[place] for place in (0, 1, 2, 3, 6, 8)]
        bad = [paths[place] for place in (9, 10, 11, 15, 16, 17)]
        with Decoder("cuda") as decoder, Decoder("cuda") as other:
            other._readers.close()
            for seed in range(12):
                found = self.warm(decoder, monkeypatch)
                draws = np.random.default_rng(seed)
                order = [good[place] for place in draws.integers(0, len(good), 16)]
                for place in draws.integers(0, 16, 3):
                    order[place] = bad[draws.integers(len(bad))]
                errors = []
                for each in (other, decoder):
                    with pytest.raises((DecodeError, OSError)) as caught:
                        each.decode(order)
                    errors.append((caught.type, str(caught.value)))
                assert errors[0] == errors[1]
                assert found[0] > 0
                # After an error, who knows who still reads the memory.
                assert not decoder._readers._free

    def test_what_nvimgcodec_refuses_goes_to_pillow(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        contents = mixture()
        here = Here(monkeypatch, refused=(contents[2],))
        paths = self.folder(tmp_path)[:4] * 4
        with Decoder("cuda") as decoder:
            found = self.warm(decoder, monkeypatch)
            batch = decoder.decode(paths).batch
            for place in range(16):
                np.testing.assert_array_equal(batch.image(place), data.decode(contents[place % 4]))
            # Pillow's setting is this process's.
            here.module.batches.clear()
            monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40 * 24)
            assert len(decoder.decode(paths).batch) == 16
            monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 21 * 34 // 2 - 1)
            with pytest.raises(DecodeError, match="exceeds limit"):
                decoder.decode(paths)
            assert here.module.batches == [16, 4]
            assert found == [16] * 3

    def test_memory_is_in_use_until_all_is_decoded(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """The pixels of each file say which one it is, whatever is read while it is decoded."""
        Here(monkeypatch)
        paths = [tmp_path / f"{place}.jpg" for place in range(24)]
        for place, path in enumerate(paths):
            path.write_bytes(encoded(Image.new("RGB", (24, 16), (10 * place, 0, 0)), "JPEG", quality=95))
        decoder = Decoder("cuda")
        found = self.warm(decoder, monkeypatch)

        def work(first: int) -> None:
            for turn in range(20):
                places = [(first + 5 * turn + k) % len(paths) for k in range(17)]
                batch = decoder.decode([paths[place] for place in places]).batch
                reds = [float(image[..., 0].mean()) for image in batch.images()]
                assert np.abs(np.array(reds) - 10 * np.array(places)).max() < 4, (places, reds)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(0, 28, 7)))
        assert found.count(17) > 20
        assert len(decoder._readers._all) <= 3
        decoder.close()
        assert not decoder._readers._all

    def test_memory_is_page_locked_while_it_is_there(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """And the host waits for whoever may still read it when nvImageCodec returns, before it is given back."""
        here = Here(monkeypatch)
        paths = self.folder(tmp_path)[:4] * 4
        give_back = file_reader.FileReaders._give_back
        waited = []

        def watched(readers: file_reader.FileReaders, user: object, reader: Any, is_whole: bool) -> None:
            decoded = [(stream.log, stream.done) for stream in here.cupy.streams if "decode" in stream.log]
            last = [len(log) - log[::-1].index("decode") for log, _ in decoded]
            waited.append(all(done >= place for (_, done), place in zip(decoded, last, strict=True)))
            give_back(readers, user, reader, is_whole)

        decoder = Decoder("cuda")
        self.warm(decoder, monkeypatch)
        monkeypatch.setattr(file_reader.FileReaders, "_give_back", watched)
        for _ in range(3):
            decoder.decode(paths)
        (reader,) = decoder._readers._all
        assert here.cupy.locked == {reader._bytes.ctypes.data: 8 << 20}
        monkeypatch.setattr(nvimgcodec_module, "gather_images", None)
        with pytest.raises(TypeError):
            decoder.decode(paths)
        assert waited == [True] * 4
        del reader
        decoder.close()
        gc.collect()
        assert not here.cupy.locked

    def test_memory_that_cannot_be_page_locked(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        here = Here(monkeypatch)
        here.cupy.cuda.runtime.hostRegister = None
        contents = mixture()
        paths = self.folder(tmp_path)[:4] * 4
        with Decoder("cuda") as decoder:
            found = self.warm(decoder, monkeypatch)
            batch = decoder.decode(paths).batch
            assert found == [16]
        for place in range(16):
            np.testing.assert_array_equal(batch.image(place), data.decode(contents[place % 4]))

    def test_copies_start_their_own(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        Here(monkeypatch)
        monkeypatch.setattr(FakeDevice, "__deepcopy__", lambda device, _: device, raising=False)
        paths = self.folder(tmp_path)[:4] * 4
        with Decoder("cuda") as decoder:
            self.warm(decoder, monkeypatch)
            with copy.deepcopy(decoder) as other:
                assert other._readers is not decoder._readers
                assert not other._readers._all
                assert len(other.decode(paths).batch) == 16
            assert len(decoder.decode(paths).batch) == 16
            assert "_readers" not in decoder.__getstate__()

    def test_on_the_host_none_is_started(self, tmp_path: Path) -> None:
        decoder = Decoder(on_error="skip")
        decoder.decode(self.folder(tmp_path))
        assert not decoder._readers._all


class TestWholeJpeg:
    """Which files are left to nvImageCodec: those that it shows as libjpeg does."""

    def test_by_kind(self) -> None:
        expected = [True, True, True, True, False, False, False, False, True, False, False, False, False]
        assert [jpeg_frame(content) is not None for content in mixture()] == expected

    def test_without_jfif_the_components_decide(self) -> None:
        content = bytearray(encoded(Image.fromarray(smooth(8, 8)), "JPEG"))
        assert content[2:4] == b"\xff\xe0"
        without = bytes(content[:2] + content[20:])
        assert jpeg_frame(without)
        # SOF0: length, precision, height, width, 3, then (number, sampling, table) for each.
        place = without.index(b"\xff\xc0") + 10
        named = bytearray(without)
        named[place : place + 9 : 3] = b"RGB"
        assert not jpeg_frame(bytes(named))
        grey = encoded(Image.fromarray(smooth(8, 8)).convert("L"), "JPEG")
        assert jpeg_frame(grey[:2] + grey[20:])

    @given(cut=st.integers(0, 400))
    def test_cut_headers(self, cut: int) -> None:
        content = encoded(Image.fromarray(smooth(8, 8)), "JPEG")
        jpeg_frame(content[:2] + content[20 : 20 + cut] + b"\xff\xd9")

    @staticmethod
    def check_walk(content: bytes) -> None:
        """Asserts that a common beginning says what steps from marker to marker do; a comment in front makes them."""
        with_comment = content[:2] + b"\xff\xfe\x00\x04me" + content[2:]
        assert not reader_process._COMMON_JPEG.match(with_comment)
        found = jpeg_frame(content)
        assert found == jpeg_frame(memoryview(content))
        assert found == jpeg_frame(with_comment)

    @pytest.mark.parametrize("mode", ["L", "RGB"])
    @pytest.mark.parametrize("progressive", [False, True])
    def test_any_frame(self, mode: str, progressive: bool) -> None:
        image = Image.fromarray(smooth(300, 41)).convert(mode)
        content = encoded(image, "JPEG", progressive=progressive)
        assert reader_process._COMMON_JPEG.match(content)
        assert jpeg_frame(content) == (300, 41)
        start = content.index(b"\xff\xc2" if progressive else b"\xff\xc0")
        # The marker, the length, the precision, and the number of components.
        for place in (0, 1, 2, 3, 4, 9):
            for value in range(256):
                changed = bytearray(content)
                changed[start + place] = value
                self.check_walk(bytes(changed))

    @settings(max_examples=300)
    @given(
        mode=st.sampled_from(["L", "RGB"]),
        quality=st.sampled_from([30, 95]),
        damage=st.lists(st.tuples(st.integers(4, 199), st.integers(0, 255)), max_size=2),
        cut=st.integers(4, 220) | st.none(),
    )
    def test_any_beginning(self, mode: str, quality: int, damage: list[tuple[int, int]], cut: int | None) -> None:
        content = bytearray(encoded(Image.fromarray(smooth(9, 70)).convert(mode), "JPEG", quality=quality))
        for place, value in damage:
            content[place] = value
        self.check_walk(bytes(content if cut is None else content[:cut] + b"\xff\xd9"))
