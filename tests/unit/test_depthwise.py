"""Depthwise convolutions by kernels of this package: what is offered, and the kernels themselves on a processor."""

import ctypes
import math
from dataclasses import replace

import host_kernels
import numpy as np
import pytest
from depthwise_cases import LARGE, PRECISIONS, exact, random_depthwise
from finder_fakes import choice as stored
from finder_fakes import key

from flcuda import device as devices
from flcuda import kernel_loader
from flcuda.device import Device
from flcuda.finder.choice import Choice
from flcuda.finder.policy import Policy
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem, Problem
from flcuda.finder.sources import source_named, sources_for
from flcuda.finder.sources.depthwise import FILTERS, DepthwiseSource, Launch, Work, direct, general, is_possible
from flcuda.finder.verify import Verifier

CUDA, CPU = Device("cuda"), Device("cpu")
SOURCE = DepthwiseSource()
SHAPES = [
    *LARGE,
    "n2 c8 300x350 k8 3x3 p1 g8",
    "n2 c8 500x512 k8 3x3 p1 s2 g8",
]


def parsed(line: str) -> ConvolutionProblem:
    return ConvolutionProblem.parse(line)


def offered(problem: Problem):
    return list(SOURCE.candidates(problem, Policy(), CUDA))


def algos(line: str) -> set[str]:
    return {candidate.algo for candidate in offered(parsed(line))}


def works(problem: ConvolutionProblem) -> list[Work]:
    """Everything that could be offered for a problem, the general way too."""
    found = [general(problem)]
    for rows in (7, 4, 2):
        for threads in (128, 256, 384):
            work = direct(problem, rows, threads)
            if work is not None and work not in found:
                found.append(work)
    return found


# --- what is offered --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_several_shapes_of_launch_are_offered_where_there_are_kernels(direction, shape) -> None:
    candidates = offered(parsed(f"{direction} {shape} float32 nchw"))
    assert 1 <= len(candidates) <= 3
    if "n2 c8" not in shape:
        assert len(candidates) >= 2
    assert len({candidate.identity for candidate in candidates}) == len(candidates)
    for candidate in candidates:
        assert candidate.id == "depthwise:direct"
        assert candidate.math == "fma"
        assert candidate.deterministic
        assert candidate.reason is None
        assert candidate.notes == ()
        assert all(isinstance(value, int) for _, value in candidate.parameters)
        assert (candidate.workspace > 0) == (direction == "backward_filter")
        assert candidate.workspace <= 32 << 20


@pytest.mark.parametrize(
    "line",
    [
        "forward n2 c6 9x8 k12 3x3 p1 g6 float32 nchw",
        "forward n2 c6 9x8 k6 3x5 p1 g6 float32 nchw",
        "forward n2 c6 9x8 k6 4x4 p1 g6 float16 nchw",
        "backward_data n2 c6 9x8 k6 3x3 p1 s3 g6 float32 nchw",
        "backward_data n2 c6 9x8 k6 3x3 p1 s1x2 g6 float32 nchw",
        "backward_filter n2 c6 9x8 k6 3x3 p2 d2 g6 bfloat16 nchw",
        "forward n2 c6 900 k6 3 p1 g6 float32 nchw",
        # wider than a block, and padded by more than shared memory holds
        "forward n2 c6 9x500 k6 3x3 p1 g6 float32 nchw",
        "forward n1 c6 9x9 k6 3x3 p3000 g6 float32 nchw",
    ],
)
def test_any_other_geometry_takes_the_general_kernels(line) -> None:
    assert [candidate.id for candidate in offered(parsed(line))] == ["depthwise:general"]


@pytest.mark.parametrize(
    "line",
    [
        "forward n2 c6 9x8 k6 3x3 p1 float32 nchw",
        "forward n2 c6 9x8 k6 3x3 p1 g3 float32 nchw",
        "forward n2 c6 9x8 k6 3x3 p1 g6 float32 nhwc",
        "forward n2 c6 9x8 k6 3x3 p1 g6 float64 nchw",
        "forward n2 c6 5x9x8 k6 3x3x3 p1 g6 float32 nchw",
        "forward n2 c6 9x8 k6 3x3 p1 g6 float32 nchw xs:864x144x16x1",
        "forward n2 c6 9x8 k6 3x3 p1 g6 float32 nchw align:2",
        "forward n1 c1 40000x40000 k1 3x3 p1 g1 float32 nchw",
    ],
)
def test_what_the_kernels_do_not_take_is_not_offered(line) -> None:
    problem = parsed(line)
    assert not offered(problem)
    with pytest.raises(ValueError, match="depthwise has nothing for"):
        SOURCE.restore(problem, stored(source="depthwise", algo="general", parameters=()), CUDA)


def test_one_channel_is_depthwise_too() -> None:
    assert algos("forward n2 c1 9x8 k1 3x3 p1 float32 nchw") == {"direct"}
    assert algos("forward n2 c1 9x8 k4 3x3 p1 float32 nchw") == {"general"}


def test_another_kind_of_problem_is_not_offered() -> None:
    assert not offered(Problem())


def test_the_table_of_sources_has_it_last_and_on_cuda_only() -> None:
    problem = parsed("forward n2 c6 9x8 k6 3x3 p1 g6 float32 nchw")
    assert sources_for(CUDA, problem)[-1].name == "depthwise"
    assert "depthwise" not in {source.name for source in sources_for(CPU, problem)}
    assert isinstance(source_named("depthwise"), DepthwiseSource)


# --- stored choices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", [*SHAPES[:4], "n2 c6 9x8 k12 3x3 p1 g6"])
def test_every_candidate_is_restored(direction, shape) -> None:
    problem = parsed(f"{direction} {shape} float32 nchw")
    for candidate in offered(problem):
        choice = Choice(
            key(problem),
            candidate.source,
            candidate.algo,
            candidate.math,
            candidate.workspace,
            candidate.deterministic,
            candidate.parameters,
        )
        restored = SOURCE.restore(problem, Choice.from_json(choice.to_json()), CUDA)
        assert restored == candidate


@pytest.mark.parametrize(
    "changes",
    [
        {"algo": "other"},
        {"algo": "general"},
        {"math": "tensor_op"},
        {"parameters": ()},
        {"parameters": (("rows", 7),)},
        {"parameters": (("rows", 5), ("threads", 256))},
        {"parameters": (("rows", 7), ("threads", 1024))},
        {"parameters": (("rows", 7), ("threads", 0))},
        {"parameters": (("rows", 7), ("threads", 8))},
        {"parameters": (("rows", "7"), ("threads", 256))},
        {"parameters": (("rows", 7), ("threads", 256), ("more", 1))},
    ],
    ids=str,
)
def test_an_unknown_choice_is_refused(changes) -> None:
    problem = parsed("forward n2 c6 28x28 k6 3x3 p1 g6 float32 nchw")
    good = {"source": "depthwise", "algo": "direct", "math": "fma", "parameters": (("rows", 7), ("threads", 256))}
    assert SOURCE.restore(problem, stored(**good), CUDA).algo == "direct"
    with pytest.raises(ValueError, match="depthwise has no"):
        SOURCE.restore(problem, stored(**{**good, **changes}), CUDA)


# --- launches ---------------------------------------------------------------------------------------------------------


def names(prefix: str, size: int) -> list[str]:
    geometry = (
        "channels batch height width out_height out_width top left planes groups row_tiles images columns lead pitch "
        "plane_pitch vector"
    )
    return [*prefix.split(), *geometry.split()][:size]


def check(problem: ConvolutionProblem, work: Work) -> None:
    """What the contract of the kernels says of a launch."""
    for launch in (work.first, work.second):
        if launch is None:
            continue
        threads = math.prod(launch.block)
        assert 1 <= threads <= 384
        assert all(1 <= blocks < 2**31 for blocks in launch.grid)
        assert launch.grid[1] <= 65535
        assert launch.shared <= 48 << 10
    launch = work.first
    if not launch.defines:
        return
    kind = int(launch.defines[0][-1])
    spreads = kind == 1 and launch.defines[2].endswith("2")
    prefix = "taps row_length parts" if kind == 2 else "add" if spreads else "add staged"
    given = dict(zip(names(prefix, len(launch.arguments)), map(int, launch.arguments), strict=True))
    rows = int(launch.function[-1])
    filter_size, stride = (int(launch.defines[place][-1]) for place in (1, 2))
    assert given["planes"] * given["groups"] * given["columns"] <= launch.block[0]
    assert given["planes"] == 1 or given["row_tiles"] == 1
    tile_rows = given["groups"] * rows
    step = stride if kind != 1 else 1
    height = tile_rows + filter_size // 2 if spreads else (tile_rows - 1) * step + filter_size
    assert given["plane_pitch"] == height * given["pitch"]
    assert given["lead"] + given["width"] <= given["pitch"]
    floats = given["planes"] * given["plane_pitch"]
    if kind == 2:
        assert given["taps"] >= 1
        assert given["row_length"] >= launch.block[0]
        sums = given["taps"] * (given["row_length"] + given["planes"] * given["parts"])
        assert launch.shared >= 4 * max(floats, sums)
    else:
        if spreads or given["staged"]:
            floats += given["planes"] * tile_rows * given["out_width"] * (2 if spreads else 1)
        assert launch.shared >= 4 * floats
    if spreads:
        assert given["lead"] >= filter_size // 2 - given["left"] // 2
        assert given["lead"] + given["left"] // 2 + given["columns"] <= given["pitch"]
    else:
        start = given["lead"] - given["left"]
        assert start >= 0
        assert start + (given["columns"] - 1) * step + filter_size <= given["pitch"]
        if step == 2:
            assert given["pitch"] % 2 == 0
    if given["vector"]:
        assert not given["lead"] % 4
        assert not given["pitch"] % 4
        assert not given["width"] * devices.DTYPES[problem.dtype_of(problem.operands[0])].itemsize % 16
    shares = -(-given["channels"] // given["planes"])
    chunks = -(-given["batch"] // given["images"])
    assert launch.grid == (given["row_tiles"] * shares * chunks, 1)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("word", PRECISIONS)
def test_launches_keep_what_the_kernels_need(direction, word) -> None:
    for line in SHAPES:
        problem = parsed(f"{direction} {line} {word} nchw")
        for work in works(problem):
            check(problem, work)
    for seed in range(60):
        problem = random_depthwise(np.random.default_rng(seed), square=True, words=(word,))
        for work in works(replace(problem, direction=direction) if word[-7:] != "float32" else problem):
            check(problem, work)


def has_nvrtc() -> bool:
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError):
        return False
    return True


@pytest.mark.skipif(not has_nvrtc(), reason="no NVRTC here")
@pytest.mark.parametrize("arch", [kernel_loader.ARCHITECTURES[0], 90, kernel_loader.ARCHITECTURES[-1]])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_kernel_that_is_launched_exists(direction, stride, arch) -> None:
    types = {90: {3: "bfloat16", 5: "float16", 7: "float32"}}.get(arch, {7: "float16 out:float32"})
    assert set(types) <= set(FILTERS)
    for size, word in types.items():
        problem = parsed(f"{direction} n2 c6 28x28 k6 {size}x{size} p2 s{stride} g6 {word} nchw")
        cubins = {}
        for candidate in offered(problem):
            given = dict(candidate.parameters)
            work = direct(problem, given["rows"], given["threads"])
            for launch in (work.first, work.second):
                if launch is not None and launch.defines:
                    if launch.defines not in cubins:
                        cubins[launch.defines] = kernel_loader.compile_to_cubin(
                            "depthwise", arch, defines=launch.defines
                        )
                    assert launch.function.encode() + b"\0" in cubins[launch.defines]


@pytest.mark.skipif(not has_nvrtc(), reason="no NVRTC here")
def test_every_general_kernel_exists() -> None:
    cubin = kernel_loader.compile_to_cubin("depthwise", 80)
    for direction in DIRECTIONS:
        for word in PRECISIONS:
            work = general(parsed(f"{direction} n2 c6 9x8 k12 3x3 p1 g6 {word} nchw"))
            for launch in (work.first, work.second):
                assert launch is None or launch.function.encode() + b"\0" in cubin


# --- the kernels on a processor ---------------------------------------------------------------------------------------


class HostRunner:
    """What a DepthwiseRunner does, by kernels that are compiled for the processor, on NumPy arrays."""

    def __init__(self, library, work: Work) -> None:
        self._library = library
        self._work = work
        self.workspace = work.workspace

    def __call__(self, *operands) -> None:
        first, second, out = operands
        if self._work.second is None:
            self._run(self._work.first, out, first, second)
            return
        partial = np.full(self.workspace // 4 + 32, np.nan, np.float32)
        self._run(self._work.first, partial, first, second)
        assert np.isnan(partial[self.workspace // 4 :]).all()
        assert not np.isnan(partial[: self.workspace // 4]).any()
        self._run(self._work.second, out, partial)

    def _run(self, launch: Launch, *arrays) -> None:
        name = launch.function
        if launch.defines:
            given = dict(each.split("=") for each in launch.defines)
            direction = DIRECTIONS[int(given["DEPTHWISE_KIND"])]
            types = (given["DEPTHWISE_IN"], given["DEPTHWISE_OUT"])
            if direction == "backward_filter" and types[0] == "__half":
                types = ("__half", "__half")
            parts = (direction, *types, given["DEPTHWISE_FILTER"], given["DEPTHWISE_STRIDE"], name[-1])
            name = "_".join(parts)
        shared = np.ctypeslib.as_array(
            ctypes.cast(self._library.shared_memory(), ctypes.POINTER(ctypes.c_uint32)), (4 * 3072 + 256,)
        )
        # NaN, in which what was written behind the end is seen too
        shared[...] = 0x7FC5A5A5
        host_kernels.run(self._library, name, launch.grid, launch.block, (*arrays, *launch.arguments))
        assert (shared[launch.shared // 4 :] == 0x7FC5A5A5).all(), f"{name}: shared memory"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    loaded = host_kernels.build("depthwise", tmp_path_factory.mktemp("kernels"))
    loaded.shared_memory.restype = ctypes.c_void_p
    return loaded


def placed(shape, dtype, alignment, rng):
    """Whole numbers, which every sum holds exactly, with NaN around them, aligned to exactly so many bytes."""
    count = math.prod(shape)
    raw = np.full(count * dtype.itemsize + 512, 0xFF, np.uint8)
    start = 256 - (raw.ctypes.data % 16) + (alignment if alignment < 16 else 0)
    array = raw[start : start + count * dtype.itemsize].view(dtype).reshape(shape)
    array[...] = rng.integers(-3, 4, shape).astype(np.float32).astype(dtype)
    return raw, array


def agrees(library, problem: ConvolutionProblem, rng) -> list[str]:
    """Compares all ways to compute a problem with float64, bit by bit; gives the names of the kernels."""
    first, second, out = problem.operands
    arrays = {
        name: placed(problem.shape_of(name), devices.DTYPES[problem.dtype_of(name)], problem.alignment_of(name), rng)
        for name in problem.operands
    }
    inputs = [arrays[name][1] for name in (first, second)]
    wanted = exact(problem, *(array.astype(np.float64) for array in inputs))
    raw, target = arrays[out]
    if problem.accumulate:
        wanted = wanted + target.astype(np.float64)
    wanted = wanted.astype(np.float32).astype(target.dtype)
    before = raw.copy()
    used = []
    for work in works(problem):
        raw[...] = before
        if not problem.accumulate:
            target.view(f"u{target.itemsize}")[...] = 2 ** (8 * target.itemsize) - 1
        HostRunner(library, work)(*inputs, target)
        np.testing.assert_array_equal(target.astype(np.float32), wanted.astype(np.float32), f"{problem} {work.first}")
        start = target.__array_interface__["data"][0] - raw.ctypes.data
        np.testing.assert_array_equal(raw[:start], before[:start])
        np.testing.assert_array_equal(raw[start + target.nbytes :], before[start + target.nbytes :])
        used.append(work.first.function)
    return used


@pytest.mark.parametrize("part", range(8))
def test_kernels_for_square_filters_are_exact(library, part) -> None:
    used = set()
    for index in range(8):
        rng = np.random.default_rng([11, part, index])
        used |= set(agrees(library, random_depthwise(rng, square=True, words=("float32",)), rng))
    assert len(used) > 2


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("word", PRECISIONS)
def test_general_kernels_are_exact(library, part, word) -> None:
    for index in range(6):
        rng = np.random.default_rng([12, part, index])
        problem = random_depthwise(rng, square=False, words=(word,))
        problem = replace(problem, direction=DIRECTIONS[index % 3]) if "out" not in word else problem
        if not algos(str(problem)) <= {"general"}:
            continue
        agrees(library, problem, rng)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "line",
    [
        # vectors of 4 and 8, several planes, several tiles of rows, several images
        "n3 c5 16x24 k5 5x5 p2 g5 float16",
        "n3 c70 7x7 k70 5x5 p2 g70 float16 acc",
        "n3 c3 33x40 k3 5x5 p2:1 s2 g3 float16",
        "n3 c5 16x24 k5 3x3 p1 g5 bfloat16 out:float32 acc",
        "n3 c5 17x25 k5 3x3 p1 s2 g5 bfloat16 out:float32",
        "n2 c3 61x60 k3 7x7 p3 g3 float32",
        "n2 c3 61x60 k3 7x7 p3 s2 g3 float32 acc",
        "n70 c2 7x6 k2 3x3 p1 g2 float32",
        # padding beyond the filter, and positions that no output reads
        "n2 c9 7x8 k9 3x3 p4 g9 float32",
        "n2 c9 8x8 k9 3x3 p5:3 s2 g9 float32",
        "n2 c9 12x8 k9 3x3 s2 g9 float32",
        "n2 c9 3x3 k9 3x3 g9 float32",
        "n1 c2 5x260 k2 3x3 p1 g2 float32",
    ],
)
def test_kernels_at_the_edges_are_exact(library, direction, line) -> None:
    agrees(library, parsed(f"{direction} {line} nchw"), np.random.default_rng(13))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sums_are_as_good_as_float32_permits(library, direction) -> None:
    for line in ("n4 c3 28x28 k3 7x7 p3 g3 float32", "n4 c3 29x27 k3 5x5 p2 s2 g3 float32", "n4 c3 9x9 k6 2x3 g3 tf32"):
        problem = parsed(f"{direction} {line} nchw")
        arrays = problem.random_arrays(seed=3, device="cpu")
        verifier = Verifier(problem, tuple(arrays[name] for name in problem.inputs), CPU)
        for work in works(problem):
            found = verifier.check(HostRunner(library, work), deterministic=True)
            assert found.reason is None
            assert found.repeats
            assert found.relative < 1e-5


def test_many_images_are_summed_by_several_blocks(library, monkeypatch) -> None:
    from flcuda.finder.sources import depthwise

    for full in (1, 8, 64):
        monkeypatch.setattr(depthwise, "_FULL", full)
        monkeypatch.setattr(depthwise, "_FULL_OF_SUMS", full)
        for line in ("n23 c3 9x10 k3 3x3 p1 g3", "n23 c3 20x12 k3 5x5 p2 s2 g3"):
            for direction in DIRECTIONS:
                agrees(library, parsed(f"{direction} {line} float32 nchw"), np.random.default_rng(14))


def test_is_possible_says_what_is_offered() -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        problem = random_depthwise(rng, square=seed % 2 == 0, words=("float32", "float16"))
        assert is_possible(problem)
        assert offered(problem)
