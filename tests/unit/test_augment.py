"""The augmentation: its definition against Pillow and colorsys, and its kernels, run on a processor, against that."""

import colorsys
import ctypes
import mmap
from dataclasses import replace

import host_kernels
import numpy as np
import pytest
from augment_cases import CASES, assert_like, case, exact, image, images, table
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from flcuda import device as devices
from flcuda import kernel_loader, reference
from flcuda.data import Augment, ImageBatch
from flcuda.errors import FlcudaError
from flcuda.ops import augment as ops

# --- resampling against Pillow ----------------------------------------------------------------------------------------


def by_pillow(pixels, box, size):
    """Channel by channel, since Pillow multiplies colours by alpha first."""
    top, left, height, width = box
    planes = [
        Image.fromarray(plane).resize(
            size[::-1], Image.Resampling.BILINEAR, box=(left, top, left + width, top + height), reducing_gap=None
        )
        for plane in np.ascontiguousarray(pixels.transpose(2, 0, 1))
    ]
    return np.stack([np.asarray(plane, np.float32) for plane in planes], axis=2)


def test_resampling_is_pillows(rng) -> None:
    furthest = []
    for _ in range(60):
        height, width = rng.integers(1, 300, 2)
        size = tuple(rng.integers(1, 90, 2).tolist())
        pixels = image(rng, height, width, int(rng.choice([1, 3, 4])))
        box = table(rng, [(height, width)])[0, :4].tolist()
        found = reference.resample(pixels, box, size)
        assert found.dtype == np.float32
        distance = np.abs(found - by_pillow(pixels, box, size))
        furthest.append(distance.max())
        assert np.abs(np.rint(found) - by_pillow(pixels, box, size)).max() <= 1
    assert max(furthest) <= 1.01
    assert np.mean(furthest) < 0.99


def test_a_crop_of_the_size_of_the_result_is_copied(rng) -> None:
    pixels = image(rng, 20, 30, 3)
    np.testing.assert_allclose(reference.resample(pixels, (3, 5, 9, 11), (9, 11)), pixels[3:12, 5:16], atol=1e-4)


def test_a_large_image_keeps_its_digits(rng) -> None:
    pixels = image(rng, 2, 40000, 1)
    box = (0.0, 39000.5, 2.0, 7.25)
    assert np.abs(reference.resample(pixels, box, (2, 29)) - by_pillow(pixels, box, (2, 29))).max() <= 1.01


# --- colours ----------------------------------------------------------------------------------------------------------


def test_hue_is_that_of_hsv(rng) -> None:
    levels = np.concatenate([image(rng, 8, 9, 3), np.full((8, 1, 3), 77, np.uint8)], axis=1).astype(np.float32)
    for shift in (-0.5, -0.21, 0.07, 0.5):
        found = reference.jitter(levels, 1, 1, 1, shift)
        for place in np.ndindex(8, 10):
            h, s, v = colorsys.rgb_to_hsv(*(levels[place] / 255).tolist())
            wanted = np.array(colorsys.hsv_to_rgb((h + shift) % 1.0, s, v)) * 255
            np.testing.assert_allclose(found[place], wanted, atol=2e-3)


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.7])
def test_brightness_contrast_and_saturation_are_pillows(factor, rng) -> None:
    pixels = image(rng, 30, 40, 3)
    whole = Image.fromarray(pixels)
    for enhance, factors in (
        (ImageEnhance.Brightness, (factor, 1, 1)),
        (ImageEnhance.Contrast, (1, factor, 1)),
        (ImageEnhance.Color, (1, 1, factor)),
    ):
        found = reference.jitter(pixels.astype(np.float32), *factors, 0)
        assert found.dtype == np.float32
        # Pillow rounds grey levels and their mean first.
        assert np.abs(found - np.asarray(enhance(whole).enhance(factor), np.float32)).max() <= 2


def test_the_order_of_the_jitter(rng) -> None:
    levels = image(rng, 6, 7, 3).astype(np.float32)
    step = reference.jitter(levels, 1.5, 1, 1, 0)
    step = reference.jitter(step, 1, 0.5, 1, 0)
    step = reference.jitter(step, 1, 1, 1.6, 0)
    step = reference.jitter(step, 1, 1, 1, 0.3)
    np.testing.assert_array_equal(reference.jitter(levels, 1.5, 0.5, 1.6, 0.3), step)
    assert reference.jitter(levels, 1, 1, 1, 0) is levels


def test_grey_images_have_no_saturation_and_no_hue(rng) -> None:
    levels = image(rng, 6, 7, 1).astype(np.float32)
    assert reference.jitter(levels, 1, 1, 0.2, 0.3) is levels
    np.testing.assert_allclose(reference.jitter(levels, 1, 0, 1, 0), levels.mean(), rtol=1e-5)


# --- the op on the CPU ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "channels", "options"), CASES)
def test_on_the_cpu(size, channels, options, rng) -> None:
    batch, parameters, description = case(rng, size, channels, options)
    wanted = exact(batch, parameters, description)
    found = ops.augment(batch, parameters, description)
    assert_like(found, wanted, description)
    assert devices.to_layout(found, description.layout) is found
    out = devices.empty(wanted.shape, description.dtype, device="cpu", layout=description.layout)
    assert ops.augment(batch, parameters, description, out=out) is out
    np.testing.assert_array_equal(out, found)
    assert not found[:, channels:].any()


def test_images_of_one_size_need_no_batch_of_their_own(rng) -> None:
    stacked = np.stack([image(rng, 20, 30, 3) for _ in range(4)])
    parameters = table(rng, [(20, 30)] * 4)
    description = Augment((8, 9), std=(0.5, 0.6, 0.7))
    found = ops.augment(stacked, parameters, description)
    np.testing.assert_array_equal(found, ops.augment(ImageBatch.of(list(stacked)), parameters, description))
    mirrored = parameters.copy()
    mirrored[:, 4] = 1 - parameters[:, 4]
    np.testing.assert_array_equal(ops.augment(stacked, mirrored, description), found[..., ::-1])


def test_no_images_make_no_batch() -> None:
    empty = np.empty((0, 9), np.float32)
    assert ops.augment(np.empty((0, 5, 6, 3), np.uint8), empty, Augment(4)).shape == (0, 3, 4, 4)


# --- bad input --------------------------------------------------------------------------------------------------------


def changed(column, value):
    def change(parameters):
        parameters[1, column] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(0, np.nan), "must be finite, not so for image 1 of 9x12"),
        (changed(4, 0.5), "flip must be 0 or 1"),
        (changed(5, -0.1), "must not be negative"),
        (changed(8, 0.6), "hue must be from -0.5 to 0.5"),
        (changed(2, 0), "must have a height"),
        (changed(3, 13), r"inside of the image.*image 1 of 9x12: .*'width': 13"),
        (changed(1, -0.01), "inside of the image"),
    ],
)
def test_bad_parameters_are_named(change, message, rng) -> None:
    sizes = [(8, 8), (9, 12)]
    parameters = np.tile(np.array([0, 0, 8, 8, 0, 1, 1, 1, 0], np.float32), (2, 1))
    change(parameters)
    with pytest.raises(ValueError, match=f"^parameters: .*{message}"):
        ops.augment(images(rng, sizes, 3), parameters, Augment(4, brightness=0.2, hue=0.1))


def test_bad_arguments_are_named(rng) -> None:
    batch = images(rng, [(8, 8), (9, 12)], 3)
    parameters = table(rng, [(8, 8), (9, 12)])
    plain = Augment(4)
    for wrong, error, message in (
        (batch.pixels.reshape(-1, 4), ValueError, r"batch: expected \(n, height, width, channels\)"),
        (np.zeros((2, 4, 4, 3), np.float32), TypeError, "batch: expected an array of uint8, got float32"),
        (np.zeros((2, 4, 4, 3), np.uint8)[:, ::2], ValueError, "batch: expected a C-contiguous"),
        (np.zeros((2, 9, 12, 2), np.uint8), ValueError, "batch: images must have 1, 3 or 4 channels, not 2"),
        ([1, 2], TypeError, "expected a NumPy or CuPy array, got list"),
    ):
        with pytest.raises(error, match=message):
            ops.augment(wrong, parameters, plain)
    for wrong, error, message in (
        (parameters[:, :8], ValueError, r"parameters: expected shape \(2, 9\), got \(2, 8\)"),
        (parameters.astype(np.float64), TypeError, "parameters: expected an array of float32, got float64"),
        (parameters[:1], ValueError, r"parameters: expected shape \(2, 9\), got \(1, 9\)"),
    ):
        with pytest.raises(error, match=message):
            ops.augment(batch, wrong, plain)
    for description, message in (
        (Augment(4, channels=2), "description: channels 2 are fewer than the images' 3"),
        (Augment(4, mean=(0.5,)), r"description: mean \(0.5,\) must have one number for each of 3 channels"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.augment(batch, parameters, description)
    parameters[1, 6] = 1.5
    with pytest.raises(ValueError, match=r"contrast must be 1\.0, which the description says, not so for image 1"):
        ops.augment(batch, parameters, Augment(4, brightness=0.5))
    alpha = images(rng, [(8, 8), (9, 12)], 4)
    with pytest.raises(ValueError, match="4 channels cannot be jittered"):
        ops.augment(alpha, parameters, Augment(4, contrast=0.5))


def test_a_wrong_result_array_is_named(rng) -> None:
    batch = images(rng, [(8, 8), (9, 12)], 3)
    parameters = table(rng, [(8, 8), (9, 12)])
    for out, error, message in (
        (np.empty((2, 3, 4, 5), np.float32), ValueError, r"out: expected shape \(2, 3, 4, 4\)"),
        (np.empty((2, 3, 4, 4), np.float16), TypeError, "out: expected an array of float32"),
        (np.empty((2, 4, 4, 3), np.float32).transpose(0, 3, 1, 2), ValueError, "out: expected the layout nchw"),
    ):
        with pytest.raises(error, match=message):
            ops.augment(batch, parameters, Augment(4), out=out)
    grey = images(rng, [(8, 8), (9, 12)], 1)
    assert ops.augment(grey, parameters, Augment(4, layout="nhwc"), out=np.empty((2, 1, 4, 4), np.float32)).any()


class Places:
    """A batch that nothing has checked."""

    def __init__(self, batch, **changes):
        self.pixels, self.offsets, self.sizes, self.channels = batch.pixels, batch.offsets, batch.sizes, batch.channels
        vars(self).update(changes)


def test_an_image_outside_of_the_pixels_is_named(rng) -> None:
    batch = images(rng, [(8, 8), (9, 12)], 3)
    parameters = table(rng, [(8, 8), (9, 12)])
    with pytest.raises(ValueError, match=r"offsets: image 1 of 9x12 at byte 400 is outside of 528 bytes"):
        ops.augment(Places(batch, offsets=np.array([0, 400])), parameters, Augment(4))
    with pytest.raises(ValueError, match="sizes: image 0 is 0x8"):
        ops.augment(Places(batch, sizes=np.array([[0, 8], [9, 12]], np.int32)), parameters, Augment(4))


# --- the kernels ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return host_kernels.build("augment", tmp_path_factory.mktemp("augment"))


def send_to_host(host, monkeypatch):
    """Sends the op's launches to the host's build of the kernels; gives the names of those launched."""
    launched = []

    def launch(name, function, grid, block, *arguments):
        assert name == "augment"
        assert block[0] % 32 == 0
        assert block[0] * block[1] <= ops._THREADS
        if 0 not in grid:
            host_kernels.run(host, function, grid, block, arguments)
            launched.append(function)

    def new(shape, dtype, layout="nchw"):
        result = devices.empty(shape, dtype, device="cpu", layout=layout)
        result.fill(np.nan)
        return result

    monkeypatch.setattr(ops, "on_cuda", lambda **_: True)
    monkeypatch.setattr(ops, "new", new)
    monkeypatch.setattr(ops, "_on_device", lambda *tables: tables)
    monkeypatch.setattr(ops, "launch_blocks", launch)
    return launched


@pytest.fixture
def on_host(host, monkeypatch):
    return send_to_host(host, monkeypatch)


@pytest.mark.parametrize(("size", "channels", "options"), CASES)
def test_the_kernels_give_the_definition(size, channels, options, on_host, rng) -> None:
    batch, parameters, description = case(rng, size, channels, options)
    assert_like(ops.augment(batch, parameters, description), exact(batch, parameters, description), description)
    kind = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[description.dtype]
    means = [f"augment_means_{channels}"] if description.contrast else []
    word = "jitter_" if ops.jitters(description) else ""
    assert on_host == [*means, f"augment_{word}{kind}_{channels}"]


@pytest.mark.parametrize(
    ("sizes", "size"),
    [
        # more columns than shared memory holds: for one group of threads, and for several with a share each
        ([(6, 3500), (3, 513)], (5, 24)),
        ([(2, 11000)], (2, 2)),
        ([(6, 1700), (9, 40)], (70, 24)),
        # few and many rows of the output at once; very many rows for one
        ([(300, 70)], (40, 3)),
        ([(2000, 3)], (3, 3)),
        ([(40, 50), (9, 4)], (67, 97)),
        ([(3, 700)], (2, 600)),
        # coarser one way and finer the other
        ([(5, 700), (31, 60)], (90, 20)),
        ([(700, 5), (60, 31)], (20, 90)),
        # a row of the output more and less than a thread makes
        ([(50, 40)], (ops._LINES - 1, 8)),
        ([(50, 40)], (ops._LINES + 1, 8)),
        ([(50, 40)], (2 * ops._LINES, 8)),
        # a column more than a tile has
        ([(9, 300)], (4, ops._THREADS)),
        ([(9, 300)], (4, ops._THREADS + 1)),
    ],
)
def test_the_kernels_on_unusual_sizes(sizes, size, on_host, rng) -> None:
    for channels in (1, 3, 4):
        description = Augment(size, layout="nhwc")
        batch, parameters = images(rng, sizes, channels), table(rng, sizes)
        assert_like(ops.augment(batch, parameters, description), exact(batch, parameters, description), description)


@pytest.mark.parametrize("down", [0.3, 1.0, 1.9])
@pytest.mark.parametrize("across", [0.2, 1.0, 1.01, 1.5, 1.51, 2.0, 2.01, 2.5, 2.51, 3.1, 40.0])
def test_any_number_of_pixels_under_one(across, down, on_host, rng) -> None:
    size = (21, 36)
    for channels in (1, 3, 4):
        sizes = [(max(1, round(down * size[0])), max(1, round(across * size[1]) + more)) for more in (0, 1)]
        description = Augment(size)
        batch, parameters = images(rng, sizes, channels), table(rng, sizes)
        parameters[:, 2] = np.minimum(sizes[0][0], np.float32(down * size[0]))
        parameters[:, 3] = np.minimum(sizes[0][1], np.float32(across * size[1]))
        parameters[:, :2] = 0
        assert_like(ops.augment(batch, parameters, description), exact(batch, parameters, description), description)


@given(
    seed=st.integers(0, 2**32),
    size=st.tuples(st.integers(1, 40), st.integers(1, 70)),
    scale=st.tuples(*(st.floats(-4, 7).map(lambda power: 2**power),) * 2),
)
def test_the_kernels_on_any_scale(seed, size, scale, host) -> None:
    rng = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        send_to_host(host, patch)
        sides = np.maximum(np.array(size) * scale, 1).astype(np.int64)
        sizes = [tuple(np.minimum(sides, 3000).tolist())]
        channels = int(rng.choice([1, 3, 4]))
        dtype = str(rng.choice(["float32", "float16", "bfloat16"]))
        description = Augment(size, dtype=dtype, layout="nhwc")
        batch, parameters = images(rng, sizes, channels), table(rng, sizes)
        assert_like(ops.augment(batch, parameters, description), exact(batch, parameters, description), description)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("width", [4, 20, 32, 36, 64, 100, 228, 6, 33])
def test_four_pixels_are_stored_together(width, dtype, on_host, rng) -> None:
    sizes = [(20, 30), (9, 300)]
    description = Augment((18, width), dtype=dtype, layout="nhwc", std=(0.5, 0.6, 0.7))
    batch, parameters = images(rng, sizes, 3), table(rng, sizes)
    parameters[:, 4] = 0, 1
    wanted = exact(batch, parameters, description)
    assert_like(ops.augment(batch, parameters, description), wanted, description)
    # At any address of an element, and nothing is written beside it.
    guard = np.full((wanted.size + 9), 7, ops.numpy_dtype(dtype))
    for start in range(1, 5):
        guard[:] = 7
        flat = guard[start : start + wanted.size]
        out = flat.reshape(2, 18, width, 3).transpose(0, 3, 1, 2)
        assert ops.augment(batch, parameters, description, out=out) is out
        assert_like(out, wanted, description)
        beside = np.concatenate([guard[:start], guard[start + wanted.size :]])
        assert (beside == 7).all()


def test_which_pixels_are_stored_together() -> None:
    def vector(shape, channels=3, dtype="float16", layout="nhwc", start=0):
        count = int(np.prod(shape))
        memory = np.empty(count + 32, ops.numpy_dtype(dtype))
        place = -memory.ctypes.data % 16 // memory.itemsize + start
        flat = memory[place : place + count]
        n, c, h, w = shape
        out = flat.reshape(n, h, w, c).transpose(0, 3, 1, 2) if layout == "nhwc" else flat.reshape(shape)
        return int(ops.arguments(out, (0.0,) * channels, (1.0,) * channels, 8, 1, 1)[10])

    assert vector((2, 3, 5, 8)) == 6
    assert vector((2, 3, 5, 8), start=4) == 6
    assert vector((2, 3, 5, 8), start=2) == 0
    assert vector((2, 3, 5, 6)) == 0
    assert vector((2, 3, 5, 8), channels=1) == 0
    assert vector((2, 3, 5, 8), dtype="float32") == 0
    assert vector((2, 3, 5, 8), layout="nchw") == 0
    assert vector((2, 4, 5, 7)) == 8
    assert vector((2, 4, 5, 7), dtype="float32") == 16
    assert vector((2, 4, 5, 7), start=2) == 0


@given(seed=st.integers(0, 2**32), height=st.integers(1, 70), width=st.integers(1, 70))
def test_the_kernels_on_any_size(seed, height, width, host) -> None:
    rng = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        send_to_host(host, patch)
        sizes = rng.integers(1, 60, (2, 2))
        channels = int(rng.choice([1, 3, 4]))
        jitter = {"brightness": 0.5, "contrast": 0.5, "saturation": 0.5, "hue": 0.5} if channels < 4 else {}
        description = Augment((height, width), **jitter)
        batch, parameters = images(rng, sizes, channels), table(rng, sizes, jitter=bool(jitter))
        assert_like(ops.augment(batch, parameters, description), exact(batch, parameters, description), description)


def fenced(nbytes: int):
    """Memory that ends where a page ends behind which nothing may be read."""
    page = mmap.PAGESIZE
    whole = -(-nbytes // page) * page
    pages = mmap.mmap(-1, whole + page)
    memory = np.frombuffer(pages, np.uint8)
    library = ctypes.CDLL(None, use_errno=True)
    assert library.mprotect(ctypes.c_void_p(memory.ctypes.data + whole), ctypes.c_size_t(page), 0) == 0
    return memory[whole - nbytes : whole]


def test_images_at_any_address_and_nothing_read_behind_them(on_host, rng) -> None:
    parameters = np.array([[0, 0, 0, 0, 0, 1, 1, 1, 0]], np.float32)
    for height, width, channels in ((13, 11, 3), (1, 1, 1), (2, 90, 1), (5, 1, 3)):
        pixels = image(rng, height, width, channels)
        parameters[0, 2:4] = height, width
        wanted = reference.resample(pixels, (0, 0, height, width), (9, 9)).transpose(2, 0, 1)[None] / 255
        for behind in range(5):
            memory = fenced(pixels.size + behind)
            memory[:] = rng.integers(0, 256, memory.size)
            memory[: pixels.size] = pixels.reshape(-1)
            batch = Places(ImageBatch.of([pixels]), pixels=memory, offsets=np.zeros(1, np.int64))
            assert_like(ops.augment(batch, parameters, Augment(9)), wanted, Augment(9))


def test_results_do_not_depend_on_the_batch(on_host, rng) -> None:
    batch, parameters, description = case(rng, (20, 17), 3, {"brightness": 0.4, "contrast": 0.4, "hue": 0.1})
    together = ops.augment(batch, parameters, description)
    for i in range(len(batch)):
        alone = ops.augment(batch.image(i)[None], parameters[i : i + 1], description)
        np.testing.assert_array_equal(alone[0], together[i])


def test_jitter_that_the_description_excludes_is_left_out_of_a_table_on_the_device(on_host, rng, monkeypatch) -> None:
    batch, parameters, description = case(rng, (20, 17), 3, {"brightness": 0.4, "contrast": 0.4})
    monkeypatch.setattr(ops, "_check_parameters", lambda *_: None)
    found = ops.augment(batch, parameters, replace(description, contrast=0.0))
    parameters[:, 6] = 1
    assert_like(found, exact(batch, parameters, description), description)


def test_a_crop_outside_of_the_image_gives_nan(on_host, rng, monkeypatch) -> None:
    monkeypatch.setattr(ops, "_check_parameters", lambda *_: None)
    parameters = np.tile(np.array([0, 0, 8, 8, 0, 1, 1, 1, 0], np.float32), (4, 1))
    parameters[0, 1], parameters[1, 0], parameters[2, 1] = 1e4, -1e9, 1e30
    found = ops.augment(images(rng, [(8, 8)] * 4, 3), parameters, Augment(5))
    assert np.isnan(found[:3]).all()
    assert np.isfinite(found[3]).all()


def test_too_many_blocks_for_one_launch_are_refused() -> None:
    with pytest.raises(ValueError, match="batch: 40000000 images of 1024x1024 are too many"):
        ops.launch_shape(40_000_000, 1024, 1024)


def test_tables_of_the_host_are_refused_while_capturing(monkeypatch) -> None:
    monkeypatch.setattr(ops, "is_capturing", lambda: True)
    tables = (np.zeros(1, np.int64), np.zeros((1, 2), np.int32), np.zeros((1, 9), np.float32))
    with pytest.raises(FlcudaError, match="offsets, sizes, parameters of the images to augment are on the host"):
        ops._on_device(*tables)


def test_tables_of_the_host_go_in_one_copy(monkeypatch, rng) -> None:
    copied = []

    class FakeCupy:
        @staticmethod
        def asarray(array):
            copied.append(array)
            return array

    monkeypatch.setattr(ops, "is_capturing", lambda: False)
    monkeypatch.setattr(ops, "cupy", lambda: FakeCupy)
    tables = (
        rng.integers(0, 2**40, 3),
        rng.integers(1, 99, (3, 2)).astype(np.int32),
        rng.random((3, 9), np.float32),
    )
    for found, wanted in zip(ops._on_device(*tables), tables, strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert found.dtype == wanted.dtype
    assert len(copied) == 1
    monkeypatch.setattr(ops, "is_cuda", lambda array: array is tables[0])
    assert ops._on_device(*tables)[0] is tables[0]


def test_the_constants_are_those_of_the_kernels() -> None:
    text = (kernel_loader.kernel_dir() / "augment.cu").read_text(encoding="utf-8")
    assert f"const int THREADS = {ops._THREADS};" in text
    assert f"const int LINES = {ops._LINES};" in text
    assert f"const int PARAMETERS = {len(ops.PARAMETERS)};" in text
