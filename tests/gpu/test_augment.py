"""The augmentation on a GPU: against its definition on the CPU, at any size, repeated and captured."""

import numpy as np
import pytest
from augment_cases import CASES, assert_like, case, exact, image, images, table
from helpers import to_numpy

from flcuda import device as devices
from flcuda.data import Augment, Draws, ImageBatch
from flcuda.errors import FlcudaError
from flcuda.ops import augment as ops


@pytest.fixture
def device():
    found = devices.resolve("cuda")
    with found.use():
        yield found


def sent(batch: ImageBatch) -> ImageBatch:
    cupy = devices.cupy()
    return ImageBatch(*(cupy.asarray(a) for a in (batch.pixels, batch.offsets, batch.sizes)), batch.channels)


@pytest.mark.parametrize(("size", "channels", "options"), CASES)
def test_the_definition(size, channels, options, device, rng) -> None:
    batch, parameters, description = case(rng, size, channels, options)
    wanted = exact(batch, parameters, description)
    found = ops.augment(sent(batch), parameters, description)
    assert devices.to_layout(found, description.layout) is found
    assert_like(to_numpy(found), wanted, description)
    out = devices.empty(found.shape, description.dtype, device=device, layout=description.layout)
    assert ops.augment(sent(batch), devices.cupy().asarray(parameters), description, out=out) is out
    assert to_numpy(out).tobytes() == to_numpy(found).tobytes()


@pytest.mark.parametrize("jitter", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_photographs_of_different_sizes(channels, jitter, device, rng) -> None:
    sizes = np.concatenate([rng.integers(1, 900, (30, 2)), [(375, 500), (3, 5000), (4000, 7), (1500, 2100)]])
    batch, parameters = images(rng, sizes, channels), table(rng, sizes, jitter=jitter)
    chances = {"brightness": 0.5, "contrast": 0.5, "saturation": 0.5, "hue": 0.5} if jitter else {}
    half = {"dtype": "float16", "layout": "nhwc"}
    for options in ({}, half, {**half, "channels": 8}, {"dtype": "bfloat16", "channels": 4}):
        description = Augment(224, **options, **chances)
        found = ops.augment(sent(batch), parameters, description)
        assert_like(to_numpy(found), exact(batch, parameters, description), description)


def test_random_sizes(device, rng) -> None:
    for _ in range(40):
        sizes = rng.integers(1, 80, (3, 2))
        channels = int(rng.choice([1, 3, 4]))
        description = Augment(tuple(rng.integers(1, 300, 2).tolist()))
        batch, parameters = images(rng, sizes, channels), table(rng, sizes)
        found = ops.augment(sent(batch), parameters, description)
        assert_like(to_numpy(found), exact(batch, parameters, description), description)


def test_offsets_beyond_four_gigabytes(device, rng) -> None:
    cupy = devices.cupy()
    free, _ = cupy.cuda.runtime.memGetInfo()
    offset = (1 << 32) + 48
    if free < 2 * offset:
        offset = free // 4 // 16 * 16
    pixels = image(rng, 40, 50, 3)
    memory = cupy.empty(offset + pixels.size, np.uint8)
    memory[offset:] = cupy.asarray(pixels.reshape(-1))
    batch = ImageBatch(memory, cupy.array([offset]), cupy.array([[40, 50]], np.int32), 3)
    parameters = table(rng, [(40, 50)])
    found = ops.augment(batch, parameters, Augment(24))
    assert_like(to_numpy(found), exact(ImageBatch.of([pixels]), parameters, Augment(24)), Augment(24))


def test_the_drawn_numbers_are_those_of_the_cpu(device, rng) -> None:
    batch = images(rng, [(60, 80), (91, 50), (33, 34)], 3)
    augment = Augment(24, "resize-then-crop", brightness=0.4, contrast=0.4, saturation=0.4, hue=0.2)
    draws = Draws(5, 2, np.array([7, 10**10, 3]))
    found = augment(sent(batch), draws)
    assert devices.is_cuda(found)
    assert_like(to_numpy(found), augment(batch, draws), augment)
    stacked = np.stack([image(rng, 20, 30, 3) for _ in range(3)])
    assert_like(to_numpy(augment(devices.cupy().asarray(stacked), draws)), augment(stacked, draws), augment)


def test_it_repeats_and_depends_on_no_batch(device, rng) -> None:
    batch, parameters, description = case(rng, (40, 51), 3, {"brightness": 0.4, "contrast": 0.4, "hue": 0.1})
    together = ops.augment(sent(batch), parameters, description).get()
    for _ in range(5):
        assert ops.augment(sent(batch), parameters, description).tobytes() == together.tobytes()
    for i in range(len(batch)):
        alone = ops.augment(sent(ImageBatch.of([batch.image(i)])), parameters[i : i + 1], description).get()
        np.testing.assert_array_equal(alone[0], together[i])


def test_bad_input_is_refused_before_anything_is_launched(device, rng, monkeypatch) -> None:
    batch, parameters, description = case(rng, (8, 8), 3, {})
    monkeypatch.setattr(ops, "launch_blocks", lambda *_: pytest.fail("launched"))
    cupy = devices.cupy()
    arrived = sent(batch)
    with pytest.raises(ValueError, match="out is on cpu and the images are on cuda:0"):
        ops.augment(arrived, parameters, description, out=np.empty((len(batch), 3, 8, 8), np.float32))
    with pytest.raises(ValueError, match="parameters is on cuda:0 and the images are on cpu"):
        ops.augment(batch, cupy.asarray(parameters), description)
    parameters[2, 0] = np.inf
    with pytest.raises(ValueError, match="parameters: all must be finite, not so for image 2"):
        ops.augment(arrived, parameters, description)


def test_a_captured_graph_augments_what_lies_in_its_tables(device, rng) -> None:
    cupy = devices.cupy()
    batch, parameters, description = case(rng, (24, 24), 3, {"contrast": 0.5, "brightness": 0.5})
    arrived, on_device = sent(batch), cupy.zeros(parameters.shape, np.float32)
    out = cupy.empty((len(batch), 3, 24, 24), np.float32)
    ops.augment(arrived, parameters, description, out=out)  # compiles
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc):
            ops.augment(arrived, on_device, description, out=out)
            stream.begin_capture()
            try:
                with pytest.raises(FlcudaError, match="parameters of the images to augment are on the host"):
                    ops.augment(arrived, parameters, description, out=out)
                ops.augment(arrived, on_device, description, out=out)
            finally:
                graph = stream.end_capture()
        on_device.set(parameters)
        out.fill(7)
        graph.launch(stream)
        stream.synchronize()
    assert_like(to_numpy(out), exact(batch, parameters, description), description)
