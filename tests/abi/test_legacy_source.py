"""What of the legacy source needs no GPU: descriptors made from Problems, staged copies, and the refusals."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flcuda import cudnn
from flcuda import device as devices
from flcuda.cudnn.graph import NOTES
from flcuda.finder import errata
from flcuda.finder.policy import Policy
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem
from flcuda.finder.sources import legacy
from flcuda.finder.sources.legacy import Call, LegacyRunner, LegacySource
from flcuda.finder.sources.reference import Columns

LINES = [
    "n2 c3 8x8 k4 3x3 p1",
    "n2 c4 9x7 k6 3x2 p1:2x0 s2x1 g2",
    "n2 c4 9x7 k6 3x3 p0:3 d1x2",
    "n3 c2 11 k6 4 p1 s3",
    "n3 c2 11 k6 4 p2:1 d2",
    "n1 c4 5x6x7 k2 3x3x1 p1:0x1x0 s2",
    "n2 c1 6x6 k4 3x3 p1",
    "n2 c4 1x1 k4 1x1",
]
STRIDED = [
    "n2 c3 5x6 k4 3x3 p1 xs:400x100x14x2",
    "n2 c3 5x6 k4 3x3 p1:2 ws:1x4x16x50 ys:2000x3x200x13",
    "n2 c3 5x6 k4 3x3 p1 align:2x16x16",
    "n2 c3 5x6 k4 3x3 p1 align:2 ",
    "n2 c3 5 k4 3 p1:0 xs:100x30x2",
]


GPU = errata.Gpu(90, 91900)


def restored(problem, candidate, *, gpu=GPU, deterministic=False, **changes):
    """The candidate made again of what a stored Choice keeps of it."""
    names = ("algo", "math", "workspace", "deterministic", "parameters")
    choice = SimpleNamespace(
        **{name: getattr(candidate, name) for name in names} | changes, policy=Policy(deterministic=deterministic)
    )
    return LegacySource(gpu).restore(problem, choice, devices.Device("cuda"))


def output_dimensions(made, call):
    """What cuDNN makes of the descriptors."""
    shape = (ctypes.c_int * len(call.x.shape))()
    names = dict(zip((operand.name[-1] for operand in call.operands), range(3), strict=True))
    first, second = (
        (made.first, made.second) if call.problem.direction != "backward_data" else (made.second, made.first)
    )
    by_letter = {"xwy"["xwy".index(name)]: (first, second, made.out)[place] for name, place in names.items()}
    cudnn.cudnnGetConvolutionNdForwardOutputDim(
        made.convolution, by_letter["x"], by_letter["w"], len(call.x.shape), shape
    )
    return tuple(shape)


@pytest.mark.parametrize("layout", ["given", "nchw"])
@pytest.mark.parametrize("word", ["float32 nchw", "float64 nhwc", "tf32 nhwc", "float16 nhwc", "bfloat16 nchw"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("line", LINES)
def test_descriptors_say_what_the_problem_says(line, direction, word, layout):
    problem = ConvolutionProblem.parse(f"{direction} {line} {word}")
    call = Call.create(problem, layout)
    assert call.refusal() is None
    made = legacy.descriptors(call, legacy._math_asked(problem))
    y_shape = problem.y_shape
    raised = (*y_shape[:2], 1, *y_shape[2:]) if len(y_shape) == 3 else y_shape
    assert call.y.shape == raised
    assert output_dimensions(made, call) == raised
    math_type, groups = ctypes.c_int(), ctypes.c_int()
    cudnn.cudnnGetConvolutionMathType(made.convolution, ctypes.byref(math_type))
    cudnn.cudnnGetConvolutionGroupCount(made.convolution, ctypes.byref(groups))
    assert groups.value == problem.groups
    wanted = {"float32": 3, "float64": 3, "tf32": 0, "float16": 1, "bfloat16": 1}[word.split()[0]]
    assert math_type.value == wanted


def test_only_what_must_be_is_copied():
    plain = Call.create(ConvolutionProblem.parse("forward n2 c3 8x8 k4 3x3 p1 float16 nhwc"))
    assert plain.copies_nothing
    assert plain.filter_layout == "nhwc"
    padded = Call.create(ConvolutionProblem.parse("backward_data n2 c3 8x8 k4 3x3 p1:2x0:1"))
    assert [operand.staged for operand in padded.operands] == [False, False, True]
    assert padded.padding == (1, 0)
    assert padded.x.shape == (2, 3, 9, 9)
    strided = Call.create(ConvolutionProblem.parse("forward n2 c3 5x6 k4 3x3 xs:400x100x14x2"))
    assert strided.copies_nothing
    assert strided.x.strides == (400, 100, 14, 2)
    mixed = Call.create(ConvolutionProblem.parse("forward n2 c3 8x8 k4 3x3 nhwc ws:27x9x3x1"))
    assert [operand.staged for operand in mixed.operands] == [False, True, False]
    packed = Call.create(ConvolutionProblem.parse("forward n2 c3 8x8 k4 3x3 nhwc"), "nchw")
    assert [operand.staged for operand in packed.operands] == [True, True, True]
    unaligned = Call.create(ConvolutionProblem.parse("forward n2 c3 8x8 k4 3x3 align:16x8x16"))
    assert [operand.staged for operand in unaligned.operands] == [False, True, False]


class NumpyRunner(LegacyRunner):
    """Runs the descriptors' convolution in NumPy where cuDNN would be called: everything else is the real runner."""

    def __init__(self, call):
        self._call = call
        self._copies_nothing = call.copies_nothing

    def _launch(self, a, b, out):
        call = self._call
        views = []
        for operand, array in zip(call.operands, (a, b, out), strict=True):
            dtype = devices.DTYPES[operand.dtype]
            typed = array.view(dtype) if operand.staged else array
            views.append(
                np.lib.stride_tricks.as_strided(
                    typed, operand.shape, tuple(step * dtype.itemsize for step in operand.strides)
                )
            )
        lowered = ConvolutionProblem.create(
            call.problem.direction,
            call.x.shape,
            call.w.shape,
            dtype=call.problem.x_dtype,
            padding=call.padding,
            stride=call.stride,
            dilation=call.dilation,
            groups=call.problem.groups,
            accumulate=call.problem.accumulate,
        )
        algo = "col2im" if call.problem.direction == "backward_data" else "im2col"
        Columns(lowered, algo, 1 << 20)(*views)


@pytest.mark.parametrize("layout", ["given", "nchw"])
@pytest.mark.parametrize("word", ["float64 nchw", "bfloat16 nhwc", "float64 nchw acc", "bfloat16 nhwc acc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("line", [*LINES, *STRIDED])
def test_staged_copies_give_the_same_result(line, direction, word, layout, rng, monkeypatch):
    monkeypatch.setattr(devices, "cupy", lambda: np)
    problem = ConvolutionProblem.parse(f"{direction} {line} {word}")
    first, second, out = (problem.empty(name, devices.CPU) for name in problem.operands)
    for a in (first, second):
        a[...] = rng.standard_normal(a.shape)
    out[...] = rng.standard_normal(out.shape) if problem.accumulate else np.nan
    wanted = out.copy()
    algo = "col2im" if direction == "backward_data" else "im2col"
    Columns(problem, algo, 1 << 20)(first, second, wanted)
    NumpyRunner(Call.create(problem, layout))(first, second, out)
    np.testing.assert_array_equal(out.astype(np.float64), wanted.astype(np.float64))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(DIRECTIONS),
    st.integers(1, 3),
    st.data(),
)
def test_cudnn_agrees_on_the_output_shape(direction, ndim, data):
    def numbers(low, high):
        return tuple(data.draw(st.integers(low, high)) for _ in range(ndim))

    kernel, dilation = numbers(1, 4), numbers(1, 3)
    before, after = numbers(0, 3), numbers(0, 3)
    size = tuple(
        max(1, (r - 1) * d + 1 - b - a) + more
        for r, d, b, a, more in zip(kernel, dilation, before, after, numbers(0, 9), strict=True)
    )
    groups = data.draw(st.integers(1, 3))
    problem = ConvolutionProblem.create(
        direction,
        (2, 2 * groups, *size),
        (3 * groups, 2, *kernel),
        layout=data.draw(st.sampled_from(["nchw", "nhwc"])),
        padding=tuple(zip(before, after, strict=True)),
        stride=numbers(1, 4),
        dilation=dilation,
        groups=groups,
    )
    call = Call.create(problem)
    made = legacy.descriptors(call, cudnn.CUDNN_FMA_MATH)
    assert output_dimensions(made, call) == call.y.shape


def test_the_table_names_functions_and_enums_that_exist():
    for row in legacy._DIRECTIONS.values():
        for function in (row.find, row.get, row.workspace, row.run, row.entry):
            assert callable(getattr(cudnn, function))
        names = [member.name for member in type(getattr(cudnn, row.count))]
        assert all(name.startswith(row.prefix) for name in names)
        assert len(names) == int(getattr(cudnn, row.count)) + 1


def test_each_reported_entry_becomes_a_candidate_with_its_own_math():
    row = legacy._DIRECTIONS["forward"]
    call = Call.create(ConvolutionProblem.parse("forward n2 c4 8x8 k4 3x3 tf32 nhwc"))
    strict = Call.create(ConvolutionProblem.parse("forward n2 c4 8x8 k4 3x3 float32 nchw"))

    def made(which, **fields):
        return legacy._candidate(row, which, cudnn.cudnnConvolutionFwdAlgoPerf_t(**fields), True)

    plain = made(call, algo=1, status=0, time=0.25, memory=4096, determinism=1, mathType=0)
    assert (plain.algo, plain.math, plain.workspace) == ("IMPLICIT_PRECOMP_GEMM", "tensor_op", 4096)
    assert plain.deterministic
    assert plain.reported_ms == 0.25
    assert dict(plain.parameters) == {"math_type": "DEFAULT"}
    assert made(call, algo=1, status=0, mathType=3).math == "fma"
    assert not made(call, algo=1, status=0, mathType=1, determinism=0).deterministic
    # ALLOW_CONVERSION would round float32 operands to float16.
    assert made(call, algo=1, status=0, mathType=2) is None
    assert made(strict, algo=7, status=0, mathType=3).math == "fma"
    assert dict(made(strict, algo=7, status=0, mathType=0).parameters) == {"math_type": "FMA"}
    assert made(strict, algo=7, status=0, mathType=1) is None
    refused = made(strict, algo=6, status=3000)
    assert refused.algo == "WINOGRAD"
    assert "NOT_SUPPORTED" in refused.reason
    newer = made(strict, algo=99, status=0, mathType=3)
    assert newer.algo == "ALGO_99"
    assert restored(strict.problem, newer).identity == newer.identity
    wide = Call.create(ConvolutionProblem.parse("forward n2 c4 8x8 k4 5x5 p2 float32 nchw"))
    assert made(strict, algo=7, status=0, mathType=3).reason is None
    assert "less exact than TF32" in made(wide, algo=7, status=0, mathType=3).reason


def test_candidates_are_restored_by_what_a_choice_keeps():
    problem = ConvolutionProblem.parse("backward_filter n2 c4 8x8 k4 3x3 tf32 nhwc")
    entry = cudnn.cudnnConvolutionBwdFilterAlgoPerf_t(algo=6, status=0, memory=64, determinism=1, mathType=3)
    for layout in ("given", "nchw"):
        candidate = legacy._candidate(legacy._DIRECTIONS["backward_filter"], Call.create(problem, layout), entry, True)
        again = restored(problem, candidate)
        assert again.identity == candidate.identity
        assert again == candidate
    for changes in ({"algo": "FAST"}, {"parameters": ()}, {"parameters": (("math_type", "FMA"), ("layout", "cl"))}):
        with pytest.raises(ValueError, match="choice"):
            restored(problem, candidate, **changes)


def test_a_known_fault_is_not_restored(monkeypatch):
    problem = ConvolutionProblem.parse("forward n2 c4 8x8x8 k4 3x3x3 tf32 nhwc")
    entry = cudnn.cudnnConvolutionFwdAlgoPerf_t(algo=1, status=0, memory=64, determinism=1, mathType=0)
    candidate = legacy._candidate(legacy._DIRECTIONS["forward"], Call.create(problem), entry, True)
    assert restored(problem, candidate) == candidate
    with pytest.raises(ValueError, match=r"must not be used for forward n2 .*TF32 kernel for 3-D convolutions"):
        restored(problem, candidate, gpu=errata.Gpu(90, 91002))
    racy = errata.Erratum("differs", "a test", 90000, 99999, algos=("IMPLICIT_PRECOMP_GEMM",), nondeterministic=True)
    monkeypatch.setattr(errata, "ERRATA", (racy,))
    assert not restored(problem, candidate).deterministic
    with pytest.raises(ValueError, match="not deterministic"):
        restored(problem, candidate, deterministic=True)


def test_what_is_offered_passes_the_known_faults(monkeypatch):
    problem = ConvolutionProblem.parse("forward n2 c4 8x8x8 k4 3x3x3 tf32 nhwc")
    row = legacy._DIRECTIONS["forward"]

    def offered(call, measure, limit):
        entries = [
            cudnn.cudnnConvolutionFwdAlgoPerf_t(algo=algo, status=0, mathType=math) for algo, math in ((1, 0), (0, 3))
        ]
        return [legacy._candidate(row, call, entry, measure) for entry in entries]

    monkeypatch.setattr(legacy, "_offered", offered)
    for gpu, reasons in ((GPU, [False, False]), (errata.Gpu(90, 91002), [True, False])):
        found = LegacySource(gpu).candidates(problem, Policy(workspace_limit=0), devices.Device("cuda"))
        assert [candidate.reason is not None for candidate in found] == reasons


class Lists:
    """Answers for cuDNN, which has no handle without a GPU; notes what was asked."""

    def __init__(self, monkeypatch, entries, sizes):
        self.asked = []
        self._entries = entries
        self._sizes = sizes
        monkeypatch.setattr(legacy, "_get", self._get)
        monkeypatch.setattr(legacy, "_find", self._find)
        monkeypatch.setattr(legacy, "_workspaces", self._workspaces)

    def _get(self, row, made, entries, returned):
        self.asked.append("get")
        for place, fields in enumerate(self._entries):
            entries[place] = getattr(cudnn, row.entry)(**fields)
        returned.value = len(self._entries)

    def _find(self, row, call, made, entries, returned, workspace):
        self._get(row, made, entries, returned)
        self.asked[-1] = f"find {workspace}"

    def _workspaces(self, row, made, algos):
        return {algo: self._sizes[algo] for algo in algos if algo in self._sizes}

    def offered(self, line, **policy):
        problem = ConvolutionProblem.parse(line)
        chosen = Policy(**{"workspace_limit": 1000, **policy})
        return list(LegacySource(GPU).candidates(problem, chosen, devices.Device("cuda")))


LISTED = [
    {"algo": 1, "status": 0, "time": -1, "memory": 40, "determinism": 1, "mathType": 3},
    {"algo": 7, "status": 0, "time": -1, "memory": 2000, "determinism": 1, "mathType": 3},
    {"algo": 0, "status": 3000, "mathType": 3},
    {"algo": 2, "status": 3000, "mathType": 3},
]


def test_without_measuring_every_algorithm_with_a_workspace_size_is_offered(monkeypatch):
    lists = Lists(monkeypatch, LISTED, {0: 0, 1: 99, 4: 5000, 5: 600, 7: 99})
    line = "forward n2 c4 8x8 k4 3x3 float32 nchw"
    for mode in ("find", "heuristic"):
        found = lists.offered(line, mode=mode)
        assert lists.asked.pop() == "get"
        assert [candidate.algo for candidate in found] == [
            "IMPLICIT_PRECOMP_GEMM",
            "WINOGRAD_NONFUSED",
            "GEMM",
            "IMPLICIT_GEMM",
            "FFT",
            "FFT_TILING",
        ]
        # what cuDNN's list says of an algorithm counts, else its workspace size
        assert [candidate.workspace for candidate in found] == [40, 2000, 0, 0, 5000, 600]
        reasons = [candidate.reason for candidate in found]
        assert [reason is None for reason in reasons] == [True, False, False, True, False, True]
        assert "above the limit" in reasons[1]
        assert "NOT_SUPPORTED" in reasons[2]
        assert "above the limit" in reasons[4]
        assert all(candidate.reported_ms is None for candidate in found)
        assert all(candidate.math == "fma" for candidate in found)
    assert lists.offered(line, effort="wide", mode="heuristic") == found
    assert lists.asked.pop() == "get"


@pytest.mark.parametrize("precision", ["float16", "tf32"])
def test_a_fast_search_leaves_out_what_uses_no_tensor_cores_where_others_do(monkeypatch, precision):
    lists = Lists(monkeypatch, [], {0: 0, 1: 99, 2: 0, 4: 500, 7: 99})
    line = f"forward n2 c{{}} 8x8 k8 3x3 {precision} nhwc{{}}"

    def algos(channels, more="", **policy):
        return {candidate.algo for candidate in lists.offered(line.format(channels, more), **policy)}

    hopeful = {"IMPLICIT_PRECOMP_GEMM", "FFT", "WINOGRAD_NONFUSED"}
    everything = hopeful | {"IMPLICIT_GEMM", "GEMM"}
    assert algos(8) == hopeful
    assert algos(8, mode="heuristic") == everything
    # few channels in a group, on either side
    assert algos(7) == everything
    assert algos(16, " g2") == everything
    # nothing else works
    lists = Lists(monkeypatch, [], {0: 0, 2: 0})
    assert algos(8) == {"IMPLICIT_GEMM", "GEMM"}


def test_with_the_effort_wide_cudnn_measures(monkeypatch):
    lists = Lists(monkeypatch, [{**LISTED[0], "time": 0.5}, LISTED[2]], {0: 0, 1: 99, 4: 5000, 5: 600})
    found = lists.offered("forward n2 c4 8x8 k4 3x3 float32 nchw", effort="wide")
    # the largest workspace within the limit
    assert lists.asked == ["find 600"]
    assert [(candidate.algo, candidate.reported_ms) for candidate in found] == [
        ("IMPLICIT_PRECOMP_GEMM", 0.5),
        ("IMPLICIT_GEMM", None),
    ]


@pytest.mark.parametrize(
    ("direction", "racy"),
    [("forward", set()), ("backward_data", {"ALGO_0"}), ("backward_filter", {"ALGO_0", "ALGO_3"})],
)
@pytest.mark.parametrize(("word", "math"), [("float32 nchw", "fma"), ("tf32 nhwc", "tensor_op")])
def test_what_is_added_to_the_list_is_what_the_header_says(monkeypatch, direction, racy, word, math):
    count = int(getattr(cudnn, legacy._DIRECTIONS[direction].count))
    lists = Lists(monkeypatch, [], dict.fromkeys(range(count), 8))
    found = lists.offered(f"{direction} n2 c4 8x8 k4 3x3 {word}")
    assert len(found) == count
    assert {candidate.algo for candidate in found if not candidate.deterministic} == racy
    assert {candidate.math for candidate in found} == {math}
    for candidate in found:
        assert restored(ConvolutionProblem.parse(f"{direction} n2 c4 8x8 k4 3x3 {word}"), candidate) == candidate


def test_an_empty_list_is_a_reason(monkeypatch):
    lists = Lists(monkeypatch, [], {})
    (row,) = lists.offered("forward n2 c4 8x8 k4 3x3 float32 nchw")
    assert row.reason == "cudnnGetConvolutionForwardAlgorithm_v7 returned no algorithm"


@pytest.mark.parametrize(
    ("algo", "math", "deterministic", "words"),
    [
        ("WINOGRAD_NONFUSED", "fma", True, ("winograd",)),
        ("FFT_TILING", "tensor_op", True, ("fft", "tensor_core")),
        ("FFT", "fma", True, ("fft",)),
        ("ALGO_0", "fma", False, ("nondeterministic",)),
        ("IMPLICIT_GEMM", "fma", True, ()),
    ],
)
def test_notes_are_the_graph_apis_words(algo, math, deterministic, words):
    assert legacy._notes(algo, math, deterministic) == words
    assert set(words) <= set(NOTES)


def test_the_workspace_counts_the_copies():
    row = legacy._DIRECTIONS["forward"]
    entry = cudnn.cudnnConvolutionFwdAlgoPerf_t(algo=1, status=0, memory=64, determinism=1, mathType=3)
    padded = Call.create(ConvolutionProblem.parse("forward n2 c3 8x8 k4 3x3 p1:2x0:1"))
    assert legacy._candidate(row, padded, entry, True).workspace == 64 + 2 * 3 * 9 * 9 * 4
    plain = Call.create(ConvolutionProblem.parse("forward n2 c3 8x8 k4 3x3 p1"))
    assert legacy._candidate(row, plain, entry, True).workspace == 64


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("forward n65536 c64 32x32 k1 1x1", "2\\^31-1"),
        ("forward n2 c2 4x4 k2 1x1 float16 out:float32", "float16"),
        ("forward n2 c2 4x4 k2 1x1 xs:3000000000x16x4x1", "strides"),
        # The operands fit; the padded copy does not.
        ("forward n1 c1 46000x46000 k1 1x1 p0:400", "2\\^31-1"),
    ],
)
def test_what_no_descriptor_holds_is_refused_by_name(line, text):
    problem = ConvolutionProblem.parse(line)
    with pytest.raises(legacy.CudnnNotSupportedError, match=text) as caught:
        list(LegacySource().candidates(problem, Policy(), devices.Device("cuda")))
    assert str(problem) in str(caught.value)


def test_the_workspace_of_find_is_halved_until_it_fits(monkeypatch):
    asked = []

    def workspace(size):
        asked.append(size)
        if size > 300:
            raise MemoryError(size)
        return np.empty(size, np.uint8)

    freed = []

    class Pool:
        @staticmethod
        def free_all_blocks():
            freed.append(len(asked))

    monkeypatch.setattr(devices, "workspace", workspace)
    monkeypatch.setattr(devices, "cupy", lambda: type("FakeCupy", (), {"get_default_memory_pool": lambda: Pool}))
    assert legacy._scratch(1000).nbytes == 250
    assert asked == [1000, 1000, 500, 500, 250]
    assert freed == [1, 3]
    assert legacy._scratch(0).nbytes == 0


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_find_measures_on_numbers_that_are_not_zeros(dtype, monkeypatch):
    monkeypatch.setattr(devices, "cupy", lambda: np)
    operand = Call.create(ConvolutionProblem.parse(f"forward n4 c3 9x9 k2 1x1 {dtype}")).x
    with np.errstate(over="ignore"):  # the hash wraps round, as it should
        numbers = legacy._random(operand).view(devices.DTYPES[dtype]).astype(np.float64)
    assert numbers.shape == (operand.extent,)
    assert np.abs(numbers).max() <= 1
    assert 0.5 < numbers.std() < 0.65  # uniform in [-1, 1): 0.577
    assert np.abs(numbers.mean()) < 0.05
