"""The Problem: validation, the line that reads back, arrays in and out."""

import pickle
from dataclasses import fields, replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flcuda.device import contiguous_strides
from flcuda.finder.problem import (
    DIRECTIONS,
    ConvolutionProblem,
    is_broadcast,
    output_shape,
    padding_pair,
)

LINE = "forward n128 c64 56x56 k64 3x3 p1 s1 float16 nhwc"


@st.composite
def problems_of_any_kind(draw):
    """Every field varies: rank, sizes, strides, alignments, both paddings, mixed dtypes, math, accumulation."""
    rank = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 3))
    channels = groups * draw(st.integers(1, 3))
    filters = groups * draw(st.integers(1, 3))
    per_dimension = st.lists(st.integers(0, 3), min_size=rank, max_size=rank)
    before = tuple(draw(per_dimension))
    after = tuple(draw(per_dimension))
    stride = tuple(draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)))
    dilation = tuple(draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)))
    kernel = tuple(draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)))
    spatial = tuple(draw(st.lists(st.integers(1, 9), min_size=rank, max_size=rank)))
    x_shape = (draw(st.integers(1, 4)), channels, *spatial)
    w_shape = (filters, channels // groups, *kernel)
    assume(
        all(
            (r - 1) * d + 1 <= s + b + a for r, d, s, b, a in zip(kernel, dilation, spatial, before, after, strict=True)
        )
    )
    y_shape = output_shape(x_shape, w_shape, before, after, stride, dilation, groups)
    direction = draw(st.sampled_from(DIRECTIONS))
    dtype = draw(st.sampled_from(["float64", "float32", "float16", "bfloat16"]))
    dtypes = {"x": dtype, "w": dtype, "y": dtype}
    if dtype in ("float16", "bfloat16") and draw(st.booleans()):
        dtypes[{"forward": "y", "backward_data": "x", "backward_filter": "w"}[direction]] = "float32"
    alignment = st.sampled_from([1, 2, 4, 8, 16, 32])
    return ConvolutionProblem(
        direction=direction,
        x_shape=x_shape,
        w_shape=w_shape,
        x_strides=draw(strides_of(x_shape)),
        w_strides=draw(strides_of(w_shape)),
        y_strides=draw(strides_of(y_shape)),
        x_dtype=dtypes["x"],
        w_dtype=dtypes["w"],
        y_dtype=dtypes["y"],
        compute="float64" if dtype == "float64" else "float32",
        math="fma" if dtype == "float64" else draw(st.sampled_from(["fma", "tensor_op"])),
        padding_before=before,
        padding_after=after,
        stride=stride,
        dilation=dilation,
        groups=groups,
        accumulate=draw(st.booleans()),
        x_alignment=draw(alignment),
        w_alignment=draw(alignment),
        y_alignment=draw(alignment),
    )


@st.composite
def strides_of(draw, shape):
    """Either layout, or any order of the dimensions with gaps between them."""
    kind = draw(st.sampled_from(["nchw", "nhwc", "gaps"]))
    if kind != "gaps":
        return contiguous_strides(shape, kind)
    strides = [0] * len(shape)
    step = draw(st.integers(1, 3))
    for axis in draw(st.permutations(range(len(shape)))):
        strides[axis] = step
        step = step * shape[axis] + draw(st.integers(0, 2))
    return tuple(strides)


class TestLine:
    @given(problems_of_any_kind())
    def test_round_trip(self, problem):
        line = str(problem)
        again = ConvolutionProblem.parse(line)
        assert again == problem
        assert hash(again) == hash(problem)
        assert str(again) == line

    @given(problems_of_any_kind(), st.randoms(use_true_random=False))
    def test_words_in_any_order(self, problem, random):
        words = str(problem).split()
        sizes = [word for word in words if word[0].isdigit()]
        random.shuffle(words)
        in_order = iter(sizes)
        shuffled = " ".join(next(in_order) if word[0].isdigit() else word for word in words)
        assert ConvolutionProblem.parse(shuffled) == problem

    @given(problems_of_any_kind(), problems_of_any_kind())
    def test_equal_lines_mean_equal_problems(self, one, other):
        assert (str(one) == str(other)) == (one == other)

    @pytest.mark.parametrize("field", [field.name for field in fields(ConvolutionProblem)])
    def test_no_field_is_left_out_of_the_line(self, field):
        problem = ConvolutionProblem.parse("forward n2 c8 9x9 k4 3x3 p1 s1 float16 nchw")
        other = {
            "direction": "backward_data",
            "x_shape": (3, 8, 9, 9),
            "w_shape": (8, 8, 3, 3),
            "x_strides": contiguous_strides(problem.x_shape, "nhwc"),
            "w_strides": contiguous_strides(problem.w_shape, "nhwc"),
            "y_strides": contiguous_strides(problem.y_shape, "nhwc"),
            "math": "fma",
            "padding_before": (2, 1),
            "padding_after": (1, 2),
            "stride": (2, 2),
            "dilation": (2, 2),
            "accumulate": True,
            "x_alignment": 8,
            "w_alignment": 8,
            "y_alignment": 8,
            "y_dtype": "float32",
        }
        if field in ("x_dtype", "w_dtype", "compute"):
            changed = ConvolutionProblem.parse(str(problem).replace("float16", "bfloat16"))
        elif field == "groups":
            changed = replace(problem, groups=2, w_shape=(4, 4, 3, 3), w_strides=contiguous_strides((4, 4, 3, 3)))
        elif field in ("x_shape", "w_shape", "padding_before", "padding_after", "stride", "dilation"):
            values = {name: getattr(problem, name) for name in ("x_shape", "w_shape", "stride", "dilation")}
            values |= {"padding": list(zip(problem.padding_before, problem.padding_after, strict=True))}
            if field.startswith("padding"):
                pair = {"padding_before": problem.padding_before, "padding_after": problem.padding_after}
                pair[field] = other[field]
                values["padding"] = list(zip(pair["padding_before"], pair["padding_after"], strict=True))
            else:
                values[field] = other[field]
            changed = ConvolutionProblem.create("forward", dtype="float16", **values)
        else:
            changed = replace(problem, **{field: other[field]})
        assert changed != problem
        assert str(changed) != str(problem)
        assert ConvolutionProblem.parse(str(changed)) == changed

    def test_the_example(self):
        problem = ConvolutionProblem.parse(LINE)
        assert str(problem) == LINE
        assert problem == ConvolutionProblem.create(
            "forward", (128, 64, 56, 56), (64, 64, 3, 3), dtype="float16", layout="nhwc", padding=1
        )
        assert problem.math == "tensor_op"
        assert problem.compute == "float32"
        assert problem.y_shape == (128, 64, 56, 56)
        assert problem.flops == 2 * 128 * 64 * 56 * 56 * 64 * 9

    @pytest.mark.parametrize(
        ("line", "printed"),
        [
            ("forward n1 c2 9 k3 3", "forward n1 c2 9 k3 3 p0 s1 float32 nchw"),
            (
                "nhwc tf32 7x8 k4 backward_filter p1x0 3x2 s2x1 d1x2 c3 n2",
                "backward_filter n2 c3 7x8 k4 3x2 p1x0 s2x1 d1x2 tf32 nhwc",
            ),
            ("forward n1 c2 8x9 k3 3x3 p1x0:2 acc", "forward n1 c2 8x9 k3 3x3 p1x0:2 s1 float32 nchw acc"),
            ("forward n1 c2 8x8x9 k3 1x3x3 tf32", "forward n1 c2 8x8x9 k3 1x3x3 p0 s1 tf32 nchw"),
            ("forward n1 c2 9 k3 3 float32 tensor_op", "forward n1 c2 9 k3 3 p0 s1 tf32 nchw"),
            ("forward n1 c2 9 k3 3 float16 tensor_op", "forward n1 c2 9 k3 3 p0 s1 float16 nchw"),
            ("forward n1 c2 9 k3 3 bfloat16 fma", "forward n1 c2 9 k3 3 p0 s1 bfloat16 fma nchw"),
            ("forward n1 c2 9 k3 3 align:32", "forward n1 c2 9 k3 3 p0 s1 float32 nchw align:32"),
            ("forward n1 c2 9 k3 3 align:4x8x16", "forward n1 c2 9 k3 3 p0 s1 float32 nchw align:4x8x16"),
        ],
    )
    def test_defaults_and_short_forms(self, line, printed):
        assert str(ConvolutionProblem.parse(line)) == printed

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            (("3x3", "3x3q"), "'3x3q'"),
            (("3x3", ""), "kernel"),
            (("56x56", ""), "kernel"),
            (("3x3", "3"), "kernel '3'"),
            (("k64", ""), "k64"),
            (("n128", ""), "n128"),
            (("c64", ""), "c64"),
            (("forward", ""), "forward"),
            (("forward", "sideways"), "'sideways'"),
            (("p1", "p1 p2"), "'p2'"),
            (("p1", "p-1"), "'p-1'"),
            (("p1", "p1x1x1"), "'p1x1x1'"),
            (("s1", "s1x2x3"), "'s1x2x3'"),
            (("s1", "s0"), "stride"),
            (("s1", "d0"), "dilation"),
            (("s1", "g3"), "'g3'"),
            (("s1", "g0"), "'g0'"),
            (("float16", "float8"), "'float8'"),
            (("float16", "tf32 fma"), "tf32"),
            (("float16", "float64 tensor_op"), "tensor_op"),
            (("float16", "float32 out:float64"), "mixed"),
            (("nhwc", "nhcw"), "'nhcw'"),
            (("nhwc", "xs:1x2"), "x_strides"),
            (("nhwc", "align:24"), "alignment 24"),
            (("nhwc", "align:64"), "alignment 64"),
            (("nhwc", "align:16x16"), "align:16x16"),
            (("3x3", "3x3 3x3"), "'3x3'"),
        ],
    )
    def test_errors_name_the_word(self, change, named):
        with pytest.raises((ValueError, TypeError)) as caught:
            ConvolutionProblem.parse(LINE.replace(*change))
        assert named in str(caught.value)

    def test_not_a_line(self):
        with pytest.raises(TypeError, match="line"):
            ConvolutionProblem.parse(7)


class TestShapes:
    @given(problems_of_any_kind())
    def test_output_shape_by_counting(self, problem):
        """Counts the kernel's positions one by one instead of using a formula."""
        geometry = zip(
            problem.x_shape[2:],
            problem.w_shape[2:],
            problem.padding_before,
            problem.padding_after,
            problem.stride,
            problem.dilation,
            problem.y_shape[2:],
            strict=True,
        )
        for size, kernel, before, after, stride, dilation, found in geometry:
            taps = range(0, kernel * dilation, dilation)
            counted = sum(
                all(start + tap < size + after for tap in taps) for start in range(-before, size + after, stride)
            )
            assert found == counted

    def test_the_collision_of_a_key_without_dilation(self):
        plain = ConvolutionProblem.create("forward", (1, 1, 8, 8), (1, 1, 3, 3), padding=1, stride=4)
        dilated = ConvolutionProblem.create("forward", (1, 1, 8, 8), (1, 1, 3, 3), padding=1, stride=4, dilation=2)
        assert plain.y_shape == dilated.y_shape == (1, 1, 2, 2)
        assert plain != dilated
        assert str(plain) != str(dilated)

    def test_an_empty_batch_has_a_shape_and_no_problem(self):
        assert output_shape((0, 4, 9), (6, 4, 3), (1,), (1,), (2,), (1,), 1) == (0, 6, 5)
        with pytest.raises(ValueError, match=r"x_shape \(0, 4, 9\).*empty batch"):
            ConvolutionProblem.create("forward", (0, 4, 9), (6, 4, 3))

    def test_more_than_two_to_the_31_elements(self):
        problem = ConvolutionProblem.create("forward", (70000, 64, 224, 224), (64, 64, 3, 3), padding=1)
        assert problem.x_strides[0] * problem.x_shape[0] > 2**31
        assert ConvolutionProblem.parse(str(problem)) == problem

    @pytest.mark.parametrize(
        ("x_shape", "w_shape", "options", "named"),
        [
            ((4, 3), (2, 3), {}, "x_shape (4, 3)"),
            ((4, 3, 8, 8), (2, 3, 3), {}, "w_shape (2, 3, 3)"),
            ((4, 3, 8, 8), (2, 4, 3, 3), {}, "w_shape (2, 4, 3, 3)"),
            ((4, 4, 8, 8), (6, 2, 3, 3), {"groups": 3}, "groups 3"),
            ((4, 4, 8, 8), (5, 2, 3, 3), {"groups": 2}, "groups 2 does not divide the 5 filters"),
            ((4, 4, 8, 8), (4, 4, 3, 3), {"groups": 0}, "groups 0"),
            ((4, 4, 8, 8), (4, 4, 3, 3), {"groups": 1.5}, "groups"),
            ((4, 3, 2, 8), (2, 3, 5, 3), {"padding": 1}, "w_shape (2, 3, 5, 3)"),
            ((4, 3, 8, 8), (2, 3, 5, 5), {"dilation": 2}, "dilation 2"),
            ((4, 3, 8, 8), (2, 3, 3, 3), {"padding": -1}, "padding_before (-1, -1)"),
            ((4, 3, 8, 8), (2, 3, 3, 3), {"padding": [(0, 1), (0, -1)]}, "padding_after (1, -1)"),
            ((4, 3, 8, 8), (2, 3, 3, 3), {"padding": [1, 2, 3]}, "padding [1, 2, 3]"),
            ((4, 3, 8, 8), (2, 3, 3, 3), {"padding": [(1, 2, 3), 1]}, "padding"),
            ((4, 3, 8, 8), (2, 3, 3, 3), {"padding": "same"}, "padding"),
            ((4, 3, 8, 8), (2, 3, 3, 3), {"stride": 0}, "stride (0, 0)"),
            ((4, 3, 8, 8), (2, 3, 3, 3), {"stride": (1, 2, 3)}, "stride (1, 2, 3)"),
            ((4, 3, 8, 8), (2, 3, 3, 3), {"stride": 1.5}, "stride"),
            ((4, 3, 8, 8), (2, 3, 3, 3), {"dilation": (1, 0)}, "dilation (1, 0)"),
            ((4, 3, 0, 8), (2, 3, 3, 3), {"padding": 3}, "x_shape (4, 3, 0, 8)"),
            ((4, 3, 8, 8), (0, 3, 3, 3), {}, "w_shape (0, 3, 3, 3)"),
            ((-4, 3, 8, 8), (2, 3, 3, 3), {}, "x_shape (-4, 3, 8, 8)"),
            ((4, 3, 2**70, 8), (2, 3, 3, 3), {}, "64 bits"),
            ((4, 3, "8", 8), (2, 3, 3, 3), {}, "x_shape"),
            ((4, 3, 8, 8), (2, 3, 3, 3), {"dtype": "int8"}, "int8"),
            ((4, 3, 8, 8), (2, 3, 3, 3), {"dtype": "float64", "math": "tensor_op"}, "tensor_op"),
            ((4, 3, 8, 8), (2, 3, 3, 3), {"math": "fast"}, "math 'fast'"),
            ((4, 3, 8, 8), (2, 3, 3, 3), {"layout": "chwn"}, "chwn"),
            ((4, 3, 8, 8), (2, 3, 3, 3), {"accumulate": 1}, "accumulate"),
        ],
    )
    def test_errors_name_argument_and_value(self, x_shape, w_shape, options, named):
        with pytest.raises((ValueError, TypeError)) as caught:
            ConvolutionProblem.create("forward", x_shape, w_shape, **options)
        assert named in str(caught.value)

    def test_direction(self):
        with pytest.raises(ValueError, match="direction 'back'"):
            ConvolutionProblem.create("back", (1, 1, 3), (1, 1, 3))

    def test_padding_forms(self):
        assert padding_pair(2, 3) == ((2, 2, 2), (2, 2, 2))
        assert padding_pair((1, 2), 2) == ((1, 2), (1, 2))
        assert padding_pair([(1, 2), 3], 2) == ((1, 3), (2, 3))


class TestStrides:
    problem = ConvolutionProblem.create("forward", (2, 3, 4, 5), (3, 3, 1, 1))

    @pytest.mark.parametrize(
        ("strides", "named"),
        [
            ((60, 20, 5, -1), "positive"),
            ((60, 20, 5, 0), "broadcast"),
            ((1, 1, 1, 1), "overlap"),
            ((60, 20, 4, 1), "overlap"),
            ((59, 20, 5, 1), "overlap"),
            ((60, 20, 5), "4 entries"),
        ],
    )
    @pytest.mark.parametrize("tensor", ["x_strides", "y_strides"])
    def test_refused(self, tensor, strides, named):
        with pytest.raises(ValueError, match=tensor) as caught:
            replace(self.problem, **{tensor: strides})
        assert named in str(caught.value)

    @given(
        st.lists(st.integers(1, 4), min_size=3, max_size=4),
        st.lists(st.integers(1, 14), min_size=4, max_size=4),
    )
    @settings(max_examples=300)
    def test_exactly_the_arrays_that_do_not_overlap(self, shape, strides):
        shape = tuple(shape)
        strides = tuple(strides[: len(shape)])
        offsets = {sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(shape)}
        overlaps = len(offsets) < np.prod(shape)
        w_shape = (1, shape[1], *(1,) * (len(shape) - 2))
        plain = ConvolutionProblem.create("forward", shape, w_shape)
        if overlaps:
            with pytest.raises(ValueError, match="overlap"):
                replace(plain, x_strides=strides)
        else:
            assert replace(plain, x_strides=strides).x_strides == strides

    def test_interleaved_dimensions_of_a_huge_array(self):
        plain = ConvolutionProblem.create("forward", (2, 3, 1 << 20), (1, 3, 1))
        with pytest.raises(ValueError, match="too large to prove"):
            replace(plain, x_strides=(3, 2 << 20, 2))


class TestPrecision:
    def test_mixed_inputs(self):
        problem = ConvolutionProblem.create("forward", (1, 2, 5), (2, 2, 3))
        with pytest.raises(TypeError, match="x is float32, w is float16"):
            replace(problem, w_dtype="float16")
        with pytest.raises(TypeError, match="output y is float16"):
            replace(problem, y_dtype="float16")
        with pytest.raises(ValueError, match="compute 'float16'"):
            replace(problem, compute="float16")
        with pytest.raises(ValueError, match="x_dtype 'float8'"):
            replace(problem, x_dtype="float8")

    def test_math_by_default(self):
        for dtype, math in [("float64", "fma"), ("float32", "fma"), ("tf32", "tensor_op"), ("bfloat16", "tensor_op")]:
            problem = ConvolutionProblem.create("forward", (1, 2, 5), (2, 2, 3), dtype=dtype)
            assert problem.math == math
            assert problem.precision == dtype


class TestArrays:
    @given(problems_of_any_kind())
    @settings(deadline=None)
    def test_random_arrays_have_the_problems_layout(self, problem):
        arrays = problem.random_arrays(seed=3, device="cpu")
        first, second, out = problem.operands
        assert set(arrays) == {first, second, "out"}
        for name, array in [(first, arrays[first]), (second, arrays[second]), (out, arrays["out"])]:
            assert array.shape == problem.shape_of(name)
            assert array.dtype.name == problem.dtype_of(name)
            for size, step, expected in zip(array.shape, array.strides, problem.strides_of(name), strict=True):
                assert size == 1 or step == expected * array.itemsize
        assert np.isfinite(arrays[first].astype(np.float64)).all()
        finite = np.isfinite(arrays["out"].astype(np.float64))
        assert finite.all() if problem.accumulate else not finite.any()

    def test_random_arrays_are_normal_and_seeded(self):
        problem = ConvolutionProblem.parse("backward_filter n8 c16 16x16 k16 3x3 p1 float32 nhwc acc")
        one, again, other = (problem.random_arrays(seed=seed, device="cpu") for seed in (1, 1, 2))
        assert all(np.array_equal(one[name], again[name]) for name in one)
        # the caller's own arrays, though the numbers are kept
        again["x"][...] = again["dy"][...] = 0
        assert np.array_equal(problem.random_arrays(seed=1, device="cpu")["x"], one["x"])
        assert not np.array_equal(one["x"], other["x"])
        assert not np.array_equal(one["x"], one["dy"])
        assert abs(one["x"].mean()) < 0.02
        assert abs(one["x"].std() - 1) < 0.02

    @pytest.mark.parametrize("direction", DIRECTIONS)
    @pytest.mark.parametrize("layout", ["nchw", "nhwc"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("kernel", [1, 3])
    def test_from_arrays_equals_create(self, direction, layout, dtype, kernel):
        problem = ConvolutionProblem.create(
            direction, (2, 6, 9, 7), (8, 3, kernel, kernel), dtype=dtype, layout=layout, padding=1, stride=2, groups=2
        )
        arrays = problem.random_arrays(device="cpu")
        first, second, out = problem.operands
        tensors = {name[-1]: arrays[name] for name in (first, second)}
        without_out = ConvolutionProblem.from_arrays(
            direction, **{"x": (2, 6, 9, 7), "w": (8, 3, kernel, kernel), **tensors}, padding=1, stride=2, groups=2
        )
        tensors[out[-1]] = arrays["out"]
        with_out = ConvolutionProblem.from_arrays(direction, **tensors, padding=1, stride=2, groups=2)
        assert without_out == with_out == problem

    def test_from_arrays_reads_strides_alignment_and_dtype(self):
        memory = np.zeros(4096, np.float16)
        offset = (-memory.ctypes.data // 2) % 8 + 2
        x = memory[offset:][: 2 * 3 * 4 * 10].reshape(2, 3, 4, 10)[..., :5]
        w = np.zeros((4, 3, 3, 3), np.float16)
        y = np.zeros((2, 4, 2, 3), np.float32)
        problem = ConvolutionProblem.from_arrays("forward", x=x, w=w, y=y)
        assert problem.x_strides == (120, 40, 10, 1)
        assert problem.x_alignment == 4
        assert problem.w_alignment == 16
        assert problem.y_dtype == "float32"
        assert problem.math == "tensor_op"
        assert problem.layout_of("x") == "strided"

    def test_from_arrays_refuses(self):
        x = np.zeros((2, 3, 4, 5), np.float32)
        w = np.zeros((4, 3, 3, 3), np.float32)
        broadcast = np.broadcast_to(x[:, :1], x.shape)
        assert is_broadcast(broadcast)
        assert not is_broadcast(x)
        with pytest.raises(ValueError, match=r"x .*broadcast"):
            ConvolutionProblem.from_arrays("forward", x=broadcast, w=w)
        with pytest.raises(ValueError, match=r"x_strides .*positive"):
            ConvolutionProblem.from_arrays("forward", x=x[..., ::-1], w=w)
        with pytest.raises(ValueError, match="y has shape"):
            ConvolutionProblem.from_arrays("forward", x=x, w=w, y=x)
        with pytest.raises(TypeError, match="x has dtype int32"):
            ConvolutionProblem.from_arrays("forward", x=x.astype(np.int32), w=w)
        with pytest.raises(TypeError, match="mixed"):
            ConvolutionProblem.from_arrays("forward", x=x, w=w.astype(np.float64))
        with pytest.raises(TypeError, match="mixed"):
            ConvolutionProblem.from_arrays("forward", x=x, w=w.astype(ml_dtypes.bfloat16))
        with pytest.raises(TypeError, match="dy must be an array"):
            ConvolutionProblem.from_arrays("backward_data", x=x, w=w, y=(2, 4, 2, 3))
        with pytest.raises(TypeError, match="x must be an array or a shape"):
            ConvolutionProblem.from_arrays("backward_data", x=None, w=w, y=x)

    def test_a_field_of_a_structured_array_is_refused(self):
        packed = np.zeros((2, 3, 7), np.dtype([("a", "f4"), ("b", "u1")]))["a"]
        with pytest.raises(ValueError, match="x: "):
            ConvolutionProblem.from_arrays("forward", x=packed, w=np.zeros((3, 3, 2), np.float32))


class TestValue:
    def test_frozen_hashable_picklable(self):
        problem = ConvolutionProblem.parse(LINE)
        assert pickle.loads(pickle.dumps(problem)) == problem
        assert len({problem, ConvolutionProblem.parse(LINE)}) == 1
        with pytest.raises(AttributeError):
            problem.groups = 2

    def test_operands(self):
        problem = ConvolutionProblem.parse(LINE)
        assert problem.operands == ("x", "w", "y")
        assert problem.with_direction("backward_data").operands == ("dy", "w", "dx")
        assert problem.with_direction("backward_filter").operands == ("x", "dy", "dw")
        assert problem.shape_of("dw") == (64, 64, 3, 3)
        assert problem.layout_of("dx") == "nhwc"

    def test_numpy_integers_become_plain(self):
        problem = ConvolutionProblem.create("forward", np.array([1, 2, 5]), np.array([2, 2, 3]), stride=np.int64(2))
        assert all(type(entry) is int for entry in (*problem.x_shape, *problem.stride))
