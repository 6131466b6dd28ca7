"""What `Augment` draws, and that it is the same whatever the batch; its result against Pillow."""

import pickle

import numpy as np
import pytest
from augment_cases import image, images
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from flcuda.data import Augment, Draws, ImageBatch
from flcuda.ops.augment import PARAMETERS

FLIP = 4


def draws(count: int, *, seed: int = 3, epoch: int = 0, first: int = 0, stream: int = 0) -> Draws:
    return Draws(seed, epoch, np.arange(first, first + count), stream)


def sizes_of(count: int, height: int, width: int):
    return np.tile(np.array([height, width], np.int32), (count, 1))


# --- random parts -----------------------------------------------------------------------------------------------------


def test_random_parts_have_the_area_and_the_ratio_asked_for() -> None:
    count = 4000
    drawn = Augment(10, scale=(0.2, 0.6), ratio=(0.5, 3.0)).parameters(sizes_of(count, 400, 500), draws(count))
    top, left, height, width = drawn[:, :4].T
    np.testing.assert_array_equal(drawn[:, :4], np.rint(drawn[:, :4]))
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 400).all()
    assert (left + width <= 500).all()
    share, ratio = height * width / 200_000, width / height
    assert 0.197 < share.min() < 0.21
    assert 0.55 < share.max() < 0.603
    assert 0.49 < ratio.min() < 0.52
    # Parts that do not fit are drawn anew, which leaves fewer of the large and broad ones.
    assert 2.6 < ratio.max() < 3.03
    assert abs(np.log(ratio).mean() - np.log([0.5, 3]).mean()) < 0.2
    # Anywhere, evenly.
    for start, room in ((top, 400 - height), (left, 500 - width)):
        place = start[room > 40] / room[room > 40]
        assert abs(place.mean() - 0.5) < 0.02
        assert place.min() < 0.02
        assert place.max() > 0.98


def test_parts_are_drawn_as_torchvision_draws_them() -> None:
    """One at a time, with its ten attempts, from the same numbers."""
    augment = Augment(8, scale=(0.3, 1.0), ratio=(0.7, 1.6))
    rng = np.random.default_rng(5)
    sizes = rng.integers(1, 60, (300, 2)).astype(np.int32)
    found = augment.parameters(sizes, draws(300))
    attempts = [draws(300, stream=16 * (2 + attempt)).uniform() for attempt in range(10)]
    fallbacks = 0
    for i, (height, width) in enumerate(sizes.tolist()):
        for numbers in attempts:
            area = height * width * (0.3 + 0.7 * numbers[i, 0])
            ratio = np.exp(np.log(0.7) + numbers[i, 1] * (np.log(1.6) - np.log(0.7)))
            h, w = round(float(np.sqrt(area / ratio))), round(float(np.sqrt(area * ratio)))
            if 0 < w <= width and 0 < h <= height:
                top, left = int(numbers[i, 2] * (height - h + 1)), int(numbers[i, 3] * (width - w + 1))
                break
        else:
            fallbacks += 1
            h, w = height, width
            if width / height < 0.7:
                h = max(1, min(height, round(width / 0.7)))
            elif width / height > 1.6:
                w = max(1, min(width, round(height * 1.6)))
            top, left = (height - h) // 2, (width - w) // 2
        assert found[i, :4].tolist() == [top, left, h, w]
    assert 3 < fallbacks < 100


def test_the_middle_of_an_image_that_no_part_fits() -> None:
    sizes = np.array([[10, 1000], [1000, 10], [1, 1], [1, 5], [200, 200]], np.int32)
    drawn = Augment(8, scale=(1.0, 1.0), ratio=(0.9, 1.25)).parameters(sizes, draws(5))
    assert drawn[0, :4].tolist() == [0, 494, 10, 12]
    assert drawn[1, :4].tolist() == [494, 0, 11, 10]
    assert drawn[2, :4].tolist() == [0, 0, 1, 1]
    assert drawn[3, :4].tolist() == [0, 2, 1, 1]


# --- resize, then crop ------------------------------------------------------------------------------------------------


def resized_and_cropped(pixels, side, place, size):
    """By Pillow, all of it; height and width of the resized image as well."""
    height, width = pixels.shape[:2]
    scale = side / min(height, width)
    resized = max(side, round(height * scale)), max(side, round(width * scale))
    whole = Image.fromarray(pixels).resize(resized[::-1], Image.Resampling.BILINEAR)
    top, left = place(resized[0] - size, resized[1] - size)
    return np.asarray(whole, np.float32)[top : top + size, left : left + size]


def test_resize_then_crop_is_pillows(rng) -> None:
    sizes = [(60, 80), (91, 50), (33, 34), (300, 41), (16, 16)]
    batch = images(rng, sizes, 3)
    augment = Augment(24, "resize-then-crop", sides=(24, 50))
    numbers = draws(5).uniform()
    np.testing.assert_array_equal(numbers, draws(5).uniforms(3)[0])
    np.testing.assert_array_equal(draws(5, stream=32).uniform(), draws(5).uniforms(3)[2])
    found = augment(batch, draws(5)) * 255
    sides = set()
    for i in range(5):
        side = 24 + int(numbers[i, 0] * 27)
        sides.add(side)
        wanted = resized_and_cropped(
            batch.image(i),
            side,
            lambda down, across, row=numbers[i]: (int(row[2] * (down + 1)), int(row[1] * (across + 1))),
            24,
        )
        if numbers[i, 3] < 0.5:
            wanted = wanted[:, ::-1]
        assert np.abs(found[i] - wanted.transpose(2, 0, 1)).max() <= 1.01
    assert len(sides) > 2


def test_the_centre_is_pillows(rng) -> None:
    batch = images(rng, [(60, 80), (91, 50), (33, 35)], 3)
    found = Augment(28, "centre", flip=0)(batch, draws(3)) * 255
    for i in range(3):
        wanted = resized_and_cropped(batch.image(i), 32, lambda down, across: (down // 2, across // 2), 28)
        assert np.abs(found[i] - wanted.transpose(2, 0, 1)).max() <= 1.01


def test_sides_are_those_of_the_original_unless_given() -> None:
    assert Augment(224, "resize-then-crop").shorter_sides == (256, 480)
    assert Augment(224, "centre").shorter_sides == (256, 256)
    assert Augment((32, 28), "centre", sides=40).shorter_sides == (40, 40)


def test_windows_lie_inside_of_every_image() -> None:
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 3000, (500, 2)).astype(np.int32)
    for size in (1, 7, (64, 32)):
        drawn = Augment(size, "resize-then-crop").parameters(sizes, draws(500)).astype(np.float64)
        assert (drawn[:, :2] >= 0).all()
        assert (drawn[:, :2] + drawn[:, 2:4] <= sizes * (1 + 2**-20)).all()


# --- flips and colours ------------------------------------------------------------------------------------------------


def test_flips_and_factors_are_drawn_evenly() -> None:
    count = 4000
    augment = Augment(8, flip=0.3, brightness=0.4, contrast=1.5, saturation=0.2, hue=0.1)
    drawn = dict(zip(PARAMETERS, augment.parameters(sizes_of(count, 9, 9), draws(count)).T, strict=True))
    assert set(drawn["flip"].tolist()) == {0, 1}
    assert abs(drawn["flip"].mean() - 0.3) < 0.03
    for name, low, high in (
        ("brightness", 0.6, 1.4),
        ("contrast", 0, 2.5),
        ("saturation", 0.8, 1.2),
        ("hue", -0.1, 0.1),
    ):
        values = drawn[name]
        reach = high - low
        assert low - 1e-6 <= values.min() < low + reach / 100
        assert high - reach / 100 < values.max() <= high + 1e-6
        assert abs(values.mean() - (low + high) / 2) < reach / 40
    columns = np.stack(list(drawn.values()))[4:]
    assert np.abs(np.corrcoef(columns) - np.eye(5)).max() < 0.08


def test_nothing_is_jittered_unless_asked_for() -> None:
    drawn = Augment(8, flip=0).parameters(sizes_of(50, 9, 9), draws(50))
    np.testing.assert_array_equal(drawn[:, 4:], np.tile([0, 1, 1, 1, 0], (50, 1)))
    assert Augment(8, flip=1).parameters(sizes_of(50, 9, 9), draws(50))[:, FLIP].all()


# --- the same sample, the same augmentation ---------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 1000),
    order=st.permutations(range(12)),
    cut=st.integers(1, 11),
    crop=st.sampled_from(["random-resized", "resize-then-crop", "centre"]),
)
def test_a_sample_is_augmented_alike_in_any_batch(seed, epoch, order, cut, crop) -> None:
    augment = Augment(8, crop, brightness=0.4, contrast=0.3, saturation=0.2, hue=0.5, scale=(0.3, 1.0))
    sizes = np.random.default_rng(seed).integers(1, 40, (12, 2)).astype(np.int32)
    indices = np.arange(100, 112) * 10**9
    together = augment.parameters(sizes, Draws(seed, epoch, indices))
    order = np.array(order)
    for part in (order[:cut], order[cut:]):
        alone = augment.parameters(sizes[part], Draws(seed, epoch, indices[part]))
        np.testing.assert_array_equal(alone, together[part])


def test_epochs_seeds_and_samples_differ() -> None:
    augment = Augment(8, brightness=0.4, contrast=0.3, saturation=0.2, hue=0.5)
    sizes = sizes_of(20, 300, 400)
    first = augment.parameters(sizes, draws(20))
    assert len(np.unique(first, axis=0)) == 20
    for other in (draws(20, epoch=1), draws(20, seed=4), draws(20, first=20), draws(20, stream=256)):
        assert not (augment.parameters(sizes, other)[:, :4] == first[:, :4]).all(axis=1).any()


def test_calls_are_parameters_then_apply(rng) -> None:
    augment = Augment((8, 6), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), layout="nhwc", channels=4, hue=0.2)
    batch = images(rng, [(9, 20), (30, 12)], 3)
    found = augment(batch, draws(2))
    parameters = augment.parameters(batch, draws(2))
    np.testing.assert_array_equal(parameters, augment.parameters(batch.sizes, draws(2)))
    np.testing.assert_array_equal(found, augment.apply(batch, parameters))
    out = np.empty((2, 8, 6, 4), np.float32).transpose(0, 3, 1, 2)
    assert augment.apply(batch, parameters, out=out) is out
    np.testing.assert_array_equal(out, found)
    assert (out[:, 3] == 0).all()


def test_images_of_one_size_may_be_stacked(rng) -> None:
    stacked = np.stack([image(rng, 20, 30, 3) for _ in range(4)])
    augment = Augment(8)
    np.testing.assert_array_equal(augment.parameters(stacked, draws(4))[:, FLIP], draws(4).uniform()[:, 3] < 0.5)
    np.testing.assert_array_equal(augment(stacked, draws(4)), augment(ImageBatch.of(list(stacked)), draws(4)))


def test_a_copy_is_the_same() -> None:
    augment = Augment(8, std=(0.5, 0.5, 0.5))
    again = pickle.loads(pickle.dumps(augment))
    assert again == augment
    assert hash(again) == hash(augment)
    assert again != Augment(9, std=(0.5, 0.5, 0.5))


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size must be positive, one number or two, not 0"),
        ({"size": (4, 4, 4)}, r"size must be one whole number or two, not \(4, 4, 4\)"),
        ({"crop": "middle"}, "crop must be .* not 'middle'"),
        ({"scale": (0.0, 1.0)}, r"scale must rise from above 0 to at most 1, not \(0.0, 1.0\)"),
        ({"scale": (0.5, 1.1)}, "scale must rise"),
        ({"ratio": (2.0, 1.0)}, r"ratio must rise from above 0, not \(2.0, 1.0\)"),
        ({"sides": 9}, "sides must be None for crop 'random-resized', not 9"),
        ({"crop": "centre", "sides": 7}, "sides must rise from at least 8, the larger of size, not 7"),
        ({"crop": "centre", "sides": (8, 9)}, "sides must be one number for crop 'centre'"),
        ({"crop": "resize-then-crop", "sides": (20, 19)}, "sides must rise"),
        ({"flip": 1.5}, "flip must be from 0 to 1, not 1.5"),
        ({"brightness": -0.1}, "brightness must be from 0 on, not -0.1"),
        ({"contrast": float("nan")}, "contrast must be from 0 on, not nan"),
        ({"saturation": float("inf")}, "saturation must be from 0 on, not inf"),
        ({"hue": 0.6}, "hue must be from 0 to 0.5, not 0.6"),
        ({"std": (1.0, 0.0)}, r"std must be positive, not \(1.0, 0.0\)"),
        ({"mean": (float("nan"),)}, "mean must be finite"),
        ({"mean": (0.5,), "std": (0.5, 0.5)}, "mean and std must have one number a channel each"),
        ({"dtype": "float64"}, "dtype must be one of float32, float16, bfloat16, not 'float64'"),
        ({"layout": "hwc"}, "layout must be 'nchw' or 'nhwc', not 'hwc'"),
        ({"channels": 0}, "channels must be at least 1, not 0"),
    ],
)
def test_bad_arguments_are_named(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        Augment(**{"size": 8, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 16.5}, "size must be one whole number or two, not 16.5"),
        ({"size": "16"}, "size must be one whole number or two, not '16'"),
        ({"size": (16, 16.0)}, r"size must be one whole number or two, not \(16, 16.0\)"),
        ({"size": None}, "size must be one whole number or two, not None"),
        ({"size": True}, "size must be one whole number or two, not True"),
        ({"crop": "centre", "sides": 20.5}, "sides must be one whole number or two, not 20.5"),
        ({"scale": 0.5}, "scale must be two numbers, the least and the largest, not 0.5"),
        ({"ratio": ("1", 2)}, r"ratio must be two numbers, the least and the largest, not \('1', 2\)"),
        ({"flip": "yes"}, "flip must be a number, not 'yes'"),
        ({"hue": None}, "hue must be a number, not None"),
        ({"brightness": (0.1, 0.2)}, r"brightness must be a number, not \(0.1, 0.2\)"),
        ({"std": 0.5}, "std must be a sequence of numbers, one a channel, not 0.5"),
        ({"mean": 0.5}, "mean must be a sequence of numbers, one a channel, not 0.5"),
        ({"mean": "abc"}, "mean must be a sequence of numbers, one a channel, not 'abc'"),
        ({"channels": 4.0}, "channels must be a whole number, not 4.0"),
    ],
)
def test_arguments_of_another_kind_are_named(arguments, message) -> None:
    with pytest.raises(TypeError, match=message):
        Augment(**{"size": 8, **arguments})


def test_numbers_of_numpy_are_numbers() -> None:
    plain = Augment((8, 9), crop="centre", sides=12, flip=0.25, mean=(0.5, 0.25), std=(1.0, 0.5), channels=4)
    same = Augment(
        np.array([8, 9]), crop="centre", sides=np.int64(12), flip=np.float32(0.25), mean=np.array([0.5, 0.25]),
        std=[1, np.float64(0.5)], channels=np.int8(4),
    )  # fmt: skip
    assert same == plain
    assert hash(same) == hash(plain)
    assert repr(same) == repr(plain)
    assert Augment(np.int64(16)) == Augment(16)
    assert Augment(np.int64(16)).shape == (16, 16)


def test_copies_of_a_sample_in_one_batch_have_each_its_own_epoch(rng) -> None:
    """Draws of several epochs at once are those of each."""
    sizes = rng.integers(3, 60, (8, 2)).astype(np.int32)
    epochs, indices = np.array([0, 1, 2, 5, 5, 2, 1, 0]), np.array([3, 3, 3, 1, 2, 2, 9, 9])
    for crop in ("random-resized", "resize-then-crop", "centre"):
        augment = Augment(8, crop=crop, scale=(0.7, 1.0), brightness=0.3, hue=0.1)
        found = augment.parameters(sizes, Draws(4, epochs, indices, 256))
        for row in range(8):
            one = Draws(4, int(epochs[row]), indices[row : row + 1], 256)
            np.testing.assert_array_equal(found[row : row + 1], augment.parameters(sizes[row : row + 1], one))


def test_bad_batches_are_named(rng) -> None:
    with pytest.raises(ValueError, match="draws are of 3 samples, and there are 2 images"):
        Augment(8)(images(rng, [(9, 9), (9, 9)], 3), draws(3))
    with pytest.raises(ValueError, match=r"batch must be an ImageBatch, \(N, H, W, channels\), .*not \(9, 9, 3\)"):
        Augment(8)(image(rng, 9, 9, 3), draws(1))
    with pytest.raises(ValueError, match=r"images with pixels, not of the sizes \[\[0, 3\]\]"):
        Augment(8).parameters(np.array([[0, 3]], np.int32), draws(1))
