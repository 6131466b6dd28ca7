"""Rewritten convolutions on a GPU: the copies bit by bit, and every candidate against float64."""

import numpy as np
import pytest
from copy_cases import GUARD, bits, memory, random_copy

import flcuda
from flcuda import device as devices
from flcuda.errors import CudnnNotSupportedError
from flcuda.finder.choice import Choice, Key
from flcuda.finder.copies import Copy, launch_of
from flcuda.finder.plan import Plan
from flcuda.finder.policy import Policy
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem
from flcuda.finder.sources import REWRITES, source_named
from flcuda.finder.sources.rewrites import Padded, SpaceToDepth
from flcuda.finder.verify import Verifier


@pytest.fixture
def device():
    found = devices.resolve("cuda")
    with found.use():
        yield found


# --- copies -----------------------------------------------------------------------------------------------------------


def on_device(raw, array, alignment):
    """Moves an array with its guards to the device, aligned to 16 bytes or to exactly so many.

    Returns:
        The bytes on the device, and the array in them.
    """
    cupy = devices.cupy()
    begin = array.__array_interface__["data"][0] - raw.ctypes.data - GUARD
    start = GUARD + (alignment if alignment < 16 else 0)
    moved = cupy.zeros(raw.nbytes + 2 * GUARD, np.uint8)
    moved[start - GUARD : start - GUARD + raw.nbytes - begin] = cupy.asarray(raw[begin:])
    return moved, cupy.ndarray(array.shape, array.dtype, moved.data + start, array.strides)


def spread(copy, rng, *, numbers):
    dtype = devices.DTYPES[copy.dtype]
    operand = memory(copy.shape, copy.strides, dtype, copy.alignment, rng, numbers=numbers)
    staged = memory(copy.staged_shape, copy.staged_strides, dtype, 16, rng, numbers=numbers)
    return operand, staged


def same_bytes(moved, raw, array, alignment):
    begin = array.__array_interface__["data"][0] - raw.ctypes.data - GUARD
    start = GUARD + (alignment if alignment < 16 else 0)
    found = devices.cupy().asnumpy(moved[start - GUARD : start - GUARD + raw.nbytes - begin])
    return bool((found == raw[begin:]).all())


def agrees(copy, rng):
    """Compares the copy and both ways back with NumPy, gaps and guards too; returns the kernels that ran."""
    (raw, operand), (staged_raw, staged) = spread(copy, rng, numbers=False)
    moved, there = on_device(raw, operand, copy.alignment)
    staged_moved, staged_there = on_device(staged_raw, staged, 16)
    copy.gathering()(staged_there, there)
    copy.gathering()(staged, operand)
    used = {launch_of(copy, gather=True).function}
    assert same_bytes(staged_moved, staged_raw, staged, 16), f"{launch_of(copy, gather=True).function}: {copy}"
    assert same_bytes(moved, raw, operand, copy.alignment)
    for add in () if copy.overlaps else (False, True):
        (raw, operand), (staged_raw, staged) = spread(copy, rng, numbers=add)
        moved, there = on_device(raw, operand, copy.alignment)
        _, staged_there = on_device(staged_raw, staged, 16)
        copy.scattering(add=add)(there, staged_there)
        copy.scattering(add=add)(operand, staged)
        name = launch_of(copy, gather=False, add=add).function
        used.add(name)
        assert same_bytes(moved, raw, operand, copy.alignment), f"{name}, add {add}: {copy}"
    return used


@pytest.mark.parametrize("part", range(20))
def test_copies_are_those_of_numpy(part, device):
    used = set()
    for index in range(40):
        rng = np.random.default_rng([5, part, index])
        used |= agrees(random_copy(rng), rng)
    assert len(used) > 10


def packed(word, shape, layout, staged_layout, channels=None, **changes):
    changes = {"staged_shape": (shape[0], channels or shape[1], *shape[2:]), **changes}
    return Copy.create(shape, devices.contiguous_strides(shape, layout), word, layout=staged_layout, **changes)


BLOCKS = {"step": (2, 2), "factor": (2, 2), "shift": (3, 3)}
FOLDED = {"step": (2, 2), "factor": (2, 7), "shift": (3, 3)}
KEPT = {"step": (1, 2), "factor": (1, 7), "shift": (3, 3)}
IMAGES = (128, 3, 224, 224)
LARGE = {
    "4 channels float16": packed("float16", IMAGES, "nhwc", "nhwc", 4),
    "4 channels float32": packed("float32", IMAGES, "nhwc", "nhwc", 4),
    "48 of windows float16": packed("float16", IMAGES, "nhwc", "nhwc", staged_shape=(128, 48, 115, 112), **FOLDED),
    "64 of windows float16": packed("float16", IMAGES, "nhwc", "nhwc", staged_shape=(128, 64, 115, 112), **FOLDED),
    "64 of windows float16 from nchw": packed(
        "float16", IMAGES, "nchw", "nhwc", staged_shape=(128, 64, 115, 112), **FOLDED
    ),
    "48 of windows float32": packed("float32", IMAGES, "nhwc", "nhwc", staged_shape=(128, 48, 115, 112), **FOLDED),
    "32 of windows float16, rows kept": packed(
        "float16", IMAGES, "nhwc", "nhwc", staged_shape=(128, 32, 229, 112), **KEPT
    ),
    "21 of windows float32 in nchw, rows kept": packed(
        "float32", IMAGES, "nchw", "nchw", staged_shape=(128, 21, 229, 112), **KEPT
    ),
    "stem float16": packed("float16", (128, 3, 224, 224), "nhwc", "nhwc", staged_shape=(128, 16, 115, 115), **BLOCKS),
    "stem float32": packed("float32", (128, 3, 224, 224), "nhwc", "nhwc", staged_shape=(128, 16, 115, 115), **BLOCKS),
    "stem float16 from nchw": packed(
        "float16", (128, 3, 224, 224), "nchw", "nhwc", staged_shape=(128, 16, 115, 115), **BLOCKS
    ),
    "stem float32 in nchw": packed(
        "float32", (128, 3, 224, 224), "nchw", "nchw", staged_shape=(128, 12, 115, 115), **BLOCKS
    ),
    "channels float16": packed("float16", (128, 3, 224, 224), "nhwc", "nhwc", 8),
    "more channels float16": packed("float16", (64, 56, 56, 56), "nhwc", "nhwc", 64),
    "to nhwc float16": packed("float16", (128, 64, 56, 56), "nchw", "nhwc"),
    "to nhwc float32": packed("float32", (128, 64, 56, 56), "nchw", "nhwc"),
    "to nchw float32": packed("float32", (128, 64, 56, 56), "nhwc", "nchw"),
    "every other position float16": packed(
        "float16", (128, 64, 56, 56), "nhwc", "nhwc", staged_shape=(128, 64, 28, 28), step=(2, 2)
    ),
    "long rows": packed("float16", (2, 3, 400_001), "nhwc", "nhwc", 8),
    "many rows": packed("float32", (512, 512, 3, 3), "nhwc", "nchw"),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_copies_are_those_of_numpy(name, device):
    copy = LARGE[name]
    rng = np.random.default_rng(1)
    cupy = devices.cupy()
    source = memory(copy.shape, copy.strides, devices.DTYPES[copy.dtype], 16, rng)[1]
    wanted = np.empty(copy.staged_shape, bits(source).dtype).view(source.dtype)
    copy.gathering()(wanted, source)
    extent = 1 + sum((size - 1) * step for size, step in zip(copy.shape, copy.strides, strict=True))
    flat = np.lib.stride_tricks.as_strided(bits(source), (extent,), (source.itemsize,))
    moved = cupy.asarray(np.ascontiguousarray(flat))
    there = cupy.ndarray(copy.shape, source.dtype, moved.data, source.strides)
    staged = copy.placing()(devices.workspace(copy.nbytes), 0)
    copy.gathering()(staged, there)
    np.testing.assert_array_equal(cupy.asnumpy(bits(staged)), bits(wanted))
    if copy.overlaps:
        return
    back = cupy.ndarray(copy.shape, source.dtype, cupy.zeros_like(moved).data, source.strides)
    copy.scattering(add=False)(back, staged)
    restored = np.empty_like(source)
    copy.scattering(add=False)(restored, wanted)
    np.testing.assert_array_equal(cupy.asnumpy(bits(back)), bits(restored))


# --- candidates -------------------------------------------------------------------------------------------------------

GEOMETRIES = [
    # first layers
    "n8 c3 64x64 k64 7x7 p3 s2",
    "n8 c3 33x31 k40 5x4 p2x1:2 s2x3",
    "n8 c1 32x32 k30 4x4 s4",
    "n4 c3 65 k32 9 p4 s2",
    "n2 c3 9x16x17 k16 3x5x4 p1x2x0 s2",
    # channels that no vector fits
    "n8 c3 32x32 k64 3x3 p1",
    "n4 c13 15x14 k61 3x3 p1",
    "n4 c12 15x14 k64 3x3 p1:2x0:1",
    "n4 c60 14x14 k64 1x1",
    # what only the layout is wrong for
    "n8 c64 14x14 k64 3x3 p1",
    "n4 c64 15x15 k64 3x3 p1 s2",
    "n4 c64 14x14 k64 3x3 p2 d2",
    "n4 c32 14x14 k64 3x3 p1 g4",
    "n2 c16 7x8x9 k32 3x3x3 p1",
    # matrix products
    "n8 c64 14x14 k128 1x1",
    "n8 c64 15x14 k128 1x1 s2",
    "n64 c128 1x1 k40 1x1",
    "n4 c64 14x14 k64 3x3 p1 align:4",
]
WORDS = [
    "float32 nchw",
    "float32 nhwc",
    "tf32 nhwc",
    "float16 nhwc",
    "float16 nchw",
    "bfloat16 nhwc",
    "float16 nhwc acc",
    "tf32 nchw acc",
]


def runs_right(problem, device, policy):
    """Verifies every candidate, and what the stored choice of a source's first restores; gives how many ran."""
    arrays = problem.random_arrays(seed=2, device=device)
    verifier = Verifier(problem, tuple(arrays[name] for name in problem.inputs), device)
    ran = 0
    for name in REWRITES:
        source = source_named(name)
        made = list(source.candidates(problem, policy, device))
        if made:
            choice = Choice.of(Key.of(problem, policy, device, (name,)), made[0])
            restored = source.restore(problem, Choice.from_json(choice.to_json()), device)
            assert restored.identity == made[0].identity
            made.append(restored)
        for candidate in made:
            try:
                runner = candidate.build()
                found = verifier.check(runner, deterministic=candidate.deterministic)
            except CudnnNotSupportedError:
                continue
            assert found.reason is None, f"{problem}: {candidate}: {found.reason}"
            assert found.repeats is not False, f"{problem}: {candidate}"
            ran += 1
    return ran


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_candidate_of_a_fast_search_is_right(direction, word, device):
    ran = 0
    for geometry in GEOMETRIES:
        ran += runs_right(ConvolutionProblem.parse(f"{direction} {geometry} {word}"), device, Policy())
    assert ran >= 10


@pytest.mark.parametrize("word", ["float16 nhwc", "bfloat16 nhwc", "tf32 nhwc", "float32 nchw"])
@pytest.mark.parametrize("direction", ["forward", "backward_filter"])
def test_every_form_of_a_first_layer_is_right(direction, word, device):
    for more in ("", " acc"):
        problem = ConvolutionProblem.parse(f"{direction} n8 c3 64x62 k64 7x7 p3 s2 {word}{more}")
        arrays = problem.random_arrays(seed=5, device=device)
        verifier = Verifier(problem, tuple(arrays[name] for name in problem.inputs), device)
        forms = set()
        for source in (SpaceToDepth(), Padded()):
            for candidate in source.candidates(problem, Policy(), device):
                try:
                    found = verifier.check(candidate.build(), deterministic=candidate.deterministic)
                except CudnnNotSupportedError:
                    continue
                assert found.reason is None, f"{problem}: {candidate}: {found.reason}"
                own = dict(candidate.parameters)
                forms.add((source.name, own["channels"], own.get("rows")))
                print(f"{problem}: {candidate.id} {own['channels']} {own.get('rows')}")
        if problem.math == "fma":
            wanted = {("space_to_depth", 12, None)}
            if direction == "forward":
                wanted.add(("space_to_depth", 21, "kept"))
        else:
            wanted = {("space_to_depth", 16, None), *(("space_to_depth", size, "folded") for size in (48, 64))}
            if direction == "forward":
                wanted.add(("space_to_depth", 32, "kept"))
            if word.startswith("float16"):
                wanted.add(("padded", 4, None))
        assert forms >= wanted


@pytest.mark.parametrize(
    "line",
    [
        "n8 c3 33x31 k40 5x4 p2x1:2 s2x3 float16 nhwc acc",
        "n8 c3 33x31 k40 5x4 p2x1:2 s2x3 tf32 nchw",
        "n8 c3 33x31 k40 5x4 p2x1:2 s2x3 float32 nhwc",
        "n4 c8 15x14 k61 3x3 p1 bfloat16 nchw",
        "n4 c32 14x14 k64 3x3 p1 g4 float16 nchw acc",
        "n4 c64 14x14 k64 3x3 p1 float64 nhwc",
    ],
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_candidate_of_a_wide_search_is_right(direction, line, device):
    assert runs_right(ConvolutionProblem.parse(f"{direction} {line}"), device, Policy(effort="wide")) > 0


@pytest.mark.parametrize("line", ["n8 c64 15x14 k128 1x1 s2 float16 nhwc acc", "n4 c32 9x9 k64 1x1 p1 s2 tf32 nchw"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_matrix_products_of_copies_are_right(direction, line, device):
    assert runs_right(ConvolutionProblem.parse(f"{direction} {line}"), device, Policy(effort="wide")) > 0


@pytest.mark.parametrize(
    "line",
    [
        "forward n8 c3 64x64 k64 7x7 p3 s2 float16 nhwc",
        "backward_filter n8 c3 64x64 k64 7x7 p3 s2 bfloat16 nhwc acc",
        "backward_data n8 c13 20x20 k32 3x3 p1 float16 nhwc",
        "forward n8 c64 14x14 k64 3x3 p1 float32 nhwc",
        "forward n8 c64 14x14 k128 1x1 float16 nhwc",
    ],
)
def test_a_rewritten_convolution_is_captured_and_replayed(line, device):
    cupy = devices.cupy()
    problem = ConvolutionProblem.parse(line)
    arrays = problem.random_arrays(seed=4, device=device)
    operands = (*(arrays[name] for name in problem.inputs), arrays["out"])
    before = bits(arrays["out"]).copy()
    captured = 0
    for name in REWRITES:
        for candidate in source_named(name).candidates(problem, Policy(effort="wide"), device):
            if not candidate.deterministic:
                continue
            try:
                runner = candidate.build()
                stream = cupy.cuda.Stream(non_blocking=True)
                cupy.cuda.get_current_stream().synchronize()
                with stream:
                    bits(arrays["out"])[...] = before
                    runner(*operands)
                    direct = bits(arrays["out"]).copy()
                    bits(arrays["out"])[...] = before
                    stream.synchronize()
                    stream.begin_capture()
                    runner(*operands)
                    graph = stream.end_capture()
                    graph.launch(stream)
                    stream.synchronize()
                    assert bool((bits(arrays["out"]) == direct).all()), candidate
            except CudnnNotSupportedError:
                continue
            captured += 1
    assert captured


def test_a_plan_of_a_rewrite_is_found_stored_and_restored(device):
    problem = ConvolutionProblem.parse("forward n16 c3 64x64 k64 7x7 p3 s2 float16 nhwc")
    report = flcuda.find(problem, sources=["space_to_depth", "padded"], verify=True)
    assert report.best.source in ("space_to_depth", "padded")
    arrays = problem.random_arrays(device=device)
    wanted = devices.cupy().asnumpy(bits(report.usable[0].plan()(arrays["x"], arrays["w"])))
    candidate = source_named(report.best.source).restore(problem, report.best, device)
    plan = Plan(report.best, device, candidate.build())
    np.testing.assert_array_equal(devices.cupy().asnumpy(bits(plan(arrays["x"], arrays["w"]))), wanted)
    assert flcuda.plan(problem).problem == problem


def test_a_run_allocates_once(device):
    cupy = devices.cupy()
    problem = ConvolutionProblem.parse("forward n8 c3 64x64 k60 7x7 p3 s2 float16 nhwc")
    arrays = problem.random_arrays(device=device)
    candidate = next(iter(SpaceToDepth().candidates(problem, Policy(), device)))
    runner = candidate.build()
    taken = []

    def allocate(size):
        taken.append(size)
        return pool.malloc(size)

    pool = cupy.get_default_memory_pool()
    with cupy.cuda.using_allocator(allocate):
        runner(arrays["x"], arrays["w"], arrays["out"])
    assert taken == [runner.workspace]
