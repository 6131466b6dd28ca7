"""The real nvImageCodec with no GPU: the arguments that the fake of the unit tests takes, and its CPU code's pixels."""

import io
import re
from types import ModuleType

import numpy as np
import pytest
from fake_nvimgcodec import FakeCupy, FakeNvimgcodec
from PIL import Image

from flcuda import data
from flcuda.data import nvimgcodec as nvimgcodec_module


@pytest.fixture(scope="module")
def nvimgcodec() -> ModuleType:
    with nvimgcodec_module._quiet():
        return pytest.importorskip("nvidia.nvimgcodec", reason="nvidia-nvimgcodec is not installed")


def encoded(image: Image.Image, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def photograph(height: int, width: int, seed: int) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def turned(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x112] = value
    return exif


def test_the_fake_takes_the_real_arguments(nvimgcodec: ModuleType) -> None:
    for name, arguments in FakeNvimgcodec(FakeCupy()).signatures():
        owner, method = name.split(".")
        text = getattr(getattr(nvimgcodec, owner), method).__doc__
        overloads = [line for line in text.splitlines() if re.match(rf"(\d+\. )?{method}\(self", line)]
        real = [re.findall(r"[(,] (?:\*, )?(\w+): ", line) for line in overloads]
        # An argument that an older version lacks is one that is not given.
        assert any(found == arguments[: len(found)] and found for found in real), f"{name}{arguments}: {real}"


def test_attributes_that_are_read(nvimgcodec: ModuleType) -> None:
    for kind in nvimgcodec_module.BACKENDS:
        nvimgcodec.Backend(getattr(nvimgcodec.BackendKind, kind), load_hint=1.0)
    stream = nvimgcodec.CodeStream(encoded(photograph(21, 34, 0)))
    found = (stream.codec_name, stream.precision, stream.num_channels, stream.height, stream.width)
    assert found == ("jpeg", 8, 3, 21, 34)
    for name in ("shape", "size", "capacity", "__cuda_array_interface__"):
        assert isinstance(getattr(nvimgcodec.Image, name), property)
    for broken in (b"", b"text", b"\xff\xd8\xff", encoded(photograph(21, 34, 0))[:100]):
        with pytest.raises(RuntimeError):
            nvimgcodec.CodeStream(broken).num_channels  # noqa: B018 - read when asked for


@pytest.mark.parametrize("channels", [1, 3])
def test_decodes_as_pillow_does(nvimgcodec: ModuleType, channels: int) -> None:
    """With our parameters, images to reuse at some of the places, and some that cannot be decoded."""
    colours = {3: nvimgcodec.ColorSpec.SRGB, 1: nvimgcodec.ColorSpec.GRAY}
    parameters = nvimgcodec.DecodeParams(
        apply_exif_orientation=True, color_spec=colours[channels], allow_any_depth=False
    )
    decoder = nvimgcodec.Decoder(
        device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
        max_num_cpu_threads=2,
        backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY, load_hint=1.0)],
        options=nvimgcodec_module._OPTIONS,
    )
    contents = [encoded(photograph(64, 112, 9), exif=turned(value)) for value in range(1, 9)]
    contents += [encoded(photograph(33 + k, 50 - k, k), subsampling=k % 3, progressive=k > 2) for k in range(6)]
    contents.append(encoded(photograph(30, 20, 5).convert("L")))
    kept: list[object] = [None] * len(contents)
    for turn in range(3):
        order = np.random.default_rng(turn).permutation(len(contents)).tolist()
        # Bytes are read into memory that is used again, of which an array is a view.
        sources = [contents[place] if place % 2 else np.frombuffer(contents[place], np.uint8) for place in order]
        streams = [nvimgcodec.CodeStream(source) for source in sources]
        images = decoder.decode(streams, images=kept, params=parameters, cuda_stream=0)
        for place, (image, index) in enumerate(zip(images, order, strict=True)):
            assert kept[place] is None or image is kept[place]
            kept[place] = image if place % 2 else None
            expected = data.decode(contents[index], channels).astype(int)
            assert np.asarray(image).shape == expected.shape
            # nvImageCodec's grey is the file's luma, Pillow's that of the colours.
            assert np.abs(np.asarray(image) - expected).max() <= (0 if channels == 3 else 8)
            assert image.capacity >= expected.size


def test_what_cannot_be_decoded_is_none(nvimgcodec: ModuleType) -> None:
    decoder = nvimgcodec.Decoder(
        device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
        backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY, load_hint=1.0)],
    )
    whole = encoded(photograph(64, 64, 0))
    damaged = bytearray(whole)
    # The lengths of the Huffman codes, of which there are too many.
    place = damaged.index(b"\xff\xc4")
    damaged[place + 5 : place + 21] = b"\xff" * 16
    images = decoder.decode([nvimgcodec.CodeStream(whole), nvimgcodec.CodeStream(bytes(damaged))])
    assert images[0] is not None
    assert images[1] is None
    # A backend that is not here.
    with pytest.raises(RuntimeError):
        nvimgcodec.Decoder(
            device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
            backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.HW_GPU_ONLY, load_hint=1.0)],
        )
