"""The random problems themselves, and the CPU's candidates on them."""

import numpy as np
import pytest
from random_problems import Case, correlate, random_problems

from flcuda.device import CPU
from flcuda.finder.policy import Policy
from flcuda.finder.problem import DIRECTIONS, ConvolutionProblem
from flcuda.finder.sources.reference import ReferenceSource

COUNT = 25


@pytest.mark.parametrize("part", range(4))
def test_every_candidate_of_the_cpu_is_exact(part, request):
    failures = []
    ran = 0
    for problem, rng in random_problems(request.config.getoption("--seed"), part, COUNT):
        case = Case(problem, rng, CPU)
        for candidate in ReferenceSource().candidates(problem, Policy(), CPU):
            if candidate.reason is not None:
                continue
            case.reset()
            candidate.build()(*case.arrays)
            ran += 1
            fault = case.fault()
            if fault is not None:
                failures.append(f"{problem}\n  {candidate.id}: {fault}")
    assert not failures, "\n".join(failures)
    assert ran >= COUNT


def test_there_are_problems_of_every_kind():
    found = [problem for part in range(10) for problem, _ in random_problems(0, part, 100)]
    assert len(set(found)) > 990
    assert {problem.direction for problem in found} == set(DIRECTIONS)
    assert {problem.precision for problem in found} == {"float64", "float32", "tf32", "float16", "bfloat16"}
    assert {len(problem.stride) for problem in found} == {1, 2, 3}
    for least, holds in (
        (200, lambda p: p.groups > 1),
        (60, lambda p: p.groups > 1 and p.w_shape[1] == 1),
        (180, lambda p: p.accumulate),
        (200, lambda p: p.padding_before != p.padding_after),
        (150, lambda p: "strided" in {p.layout_of(name) for name in p.operands}),
        (50, lambda p: {p.x_alignment, p.w_alignment, p.y_alignment} != {16}),
        (20, lambda p: p.dtype_of(p.operands[0]) != p.dtype_of(p.operands[2])),
    ):
        assert sum(map(holds, found)) >= least


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_wrong_missing_or_foreign_element_is_named(direction, rng):
    problem = ConvolutionProblem.parse(f"{direction} n2 c4 6x7 k3 3x2 p1 s2x1 float16 xs:500x1x63x8 ys:200x40x9x1")
    case = Case(problem, rng, CPU)
    out = case.arrays[2]
    assert "are wrong" in case.fault()
    out[...] = case.wanted
    assert case.fault() is None
    out[0, 1, 0, 1] += np.float16(0.125)
    assert case.fault().startswith(f"1 of {out.size} are wrong, first (0, 1, 0, 1)")
    assert case.fault(exact=False) is None
    out[0, 1, 0, 1] = np.nan
    assert "nan" in case.fault(exact=False)
    case.reset()
    assert np.isnan(out).all()
    out[...] = case.wanted
    memory = case._out.memory
    memory[case._out._start - 1] = 0
    memory[-1] = 0
    assert case.fault() == f"2 elements outside {problem.operands[2]} were written"


def test_correlate_is_the_definition(rng):
    problem = ConvolutionProblem.parse("forward n2 c4 5x6 k6 2x3 p1:0x2:1 s2x1 d1x2 g2 float64")
    x, w = (rng.standard_normal(problem.shape_of(name)) for name in ("x", "w"))
    y = correlate(problem, x, w)
    for n, k, i, j in np.ndindex(y.shape):
        total = 0.0
        for c, a, b in np.ndindex(w.shape[1:]):
            row, column = 2 * i + a - 1, j + 2 * b - 2
            if 0 <= row < 5 and 0 <= column < 6:
                total += x[n, k // 3 * 2 + c, row, column] * w[k, c, a, b]
        assert y[n, k, i, j] == pytest.approx(total, abs=1e-12)
    # The gradients are the transposes of the same linear map.
    dy = rng.standard_normal(y.shape)
    dx = correlate(problem.with_direction("backward_data"), dy, w)
    dw = correlate(problem.with_direction("backward_filter"), x, dy)
    assert (dx * x).sum() == pytest.approx((dy * y).sum())
    assert (dw * w).sum() == pytest.approx((dy * y).sum())
