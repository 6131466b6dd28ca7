"""The report: a table that fits a terminal, JSON, rows that can be run and pinned."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from finder_fakes import PROBLEM, Fake, choice, key

from flcuda.device import CPU, Device
from flcuda.errors import FlcudaError
from flcuda.finder.choice import Choice
from flcuda.finder.problem import ConvolutionProblem, Problem
from flcuda.finder.report import FindReport, Row, labels, milliseconds
from flcuda.finder.store import ChoiceStore
from flcuda.finder.verify import Verification
from flcuda.timing import Timing

LONG = ConvolutionProblem.parse(
    "backward_filter n128 c1024 112x112x112 k2048 3x5x7 p0:1x2x3:4 s2x1x1 d1x2x1 g512 "
    "bfloat16 out:float32 fma nhwc acc align:32"
)


def row(fake: Fake, median=None, reason=None, device=CPU, problem=PROBLEM, samples=9) -> Row:
    candidate = fake.candidate("legacy")
    timing = None if median is None else Timing(median, 0.9 * median, 1.2 * median, samples, 11.0)
    return Row(
        label=candidate.id,
        candidate=candidate,
        choice=Choice.of(key(problem), candidate, median),
        device=device,
        timing=timing,
        reason=reason,
    )


def report(problem=PROBLEM, device=CPU) -> FindReport:
    rows = [
        row(Fake("IMPLICIT_PRECOMP_GEMM", 3.0, workspace=98_400_000, math="tensor_op"), 0.08125, problem=problem),
        row(Fake("WINOGRAD_NONFUSED", deterministic=False), 12.5, problem=problem, samples=1),
        row(Fake("FFT_TILING", workspace=2_147_483_648, parameters=(("tile", 32), ("order", "rows"))), 1234.5),
        row(Fake("GEMM"), reason="CUDNN_STATUS_NOT_SUPPORTED (3000): " + "too long a reason for one line " * 5),
        row(Fake("DIRECT"), reason="not deterministic"),
    ]
    return FindReport(key(problem), device, rows)


class TestTable:
    @pytest.mark.parametrize("problem", [PROBLEM, LONG])
    @pytest.mark.parametrize("device", [CPU, Device("cuda", 0)])
    def test_fits_eighty_columns(self, problem, device):
        lines = str(report(problem, device)).split("\n")
        assert max(len(line) for line in lines) <= 80
        assert not any(line != line.rstrip() for line in lines)

    def test_says_what_there_is(self):
        text = str(report())
        assert text.startswith(str(PROBLEM) + "\ncpu: a processor, numpy 2.0.0\n")
        for part in (
            "IMPLICIT_PRECOMP_GEMM",
            "tensor_op",
            "0.0813",
            "0.0244",
            "98.4",
            "1234.5",
            "2147.5",
            "no",
            "tile=32",
        ):
            assert part in text
        assert "legacy:DIRECT: not deterministic" in text
        flat = " ".join(text.split())
        assert "legacy:GEMM: CUDNN_STATUS_NOT_SUPPORTED (3000): too long a reason" in flat
        order = [text.index(name) for name in ("IMPLICIT_PRECOMP", "WINOGRAD", "FFT_TILING", "GEMM: ", "DIRECT")]
        assert order == sorted(order)

    def test_the_line_of_a_graph_is_wrapped_and_reads_back(self):
        problem = Problem.parse(
            "graph float32 tensor_op; x float16 128x64x56x56 nhwc; w float16 64x64x3x3 nhwc; b float16 1x64x1x1 nhwc; "
            "t1 = convolution_forward(%x, %w, padding=1); t2 = add(%t1, -1e-5); t3 = mul(%t2, %b); y = silu(%t3); out y"
        )
        text = str(report(problem))
        assert max(len(line) for line in text.split("\n")) <= 80
        assert Problem.parse(text[: text.index("cpu: a processor")]) == problem

    def test_a_name_longer_than_a_line_is_not_broken(self):
        problem = Problem.parse(f"graph float32; {'x' * 90} float16 8x64; y = silu(%{'x' * 90}); out y")
        text = str(report(problem))
        assert Problem.parse(text[: text.index("cpu: a processor")]) == problem

    def test_errors_where_results_were_verified(self):
        rows = report().rows
        rows[0] = replace(rows[0], verification=Verification(0.5e-3, 2e-3, True, None))
        rows[1] = replace(rows[1], verification=Verification(0.0, 0.0, None, None))
        rows[3] = replace(rows[3], verification=Verification(math.inf, 1.0, False, rows[3].reason))
        verified = FindReport(key(), CPU, rows)
        lines = str(verified).split("\n")
        assert max(len(line) for line in lines) <= 80
        assert lines[3].split()[-1] == "error"
        assert [line.split()[-1] for line in lines if line[:2] in ("1 ", "2 ", "3 ")] == ["0.25", "0.0e+00", "-"]
        assert "error" not in str(report())
        values = json.loads(verified.to_json())["rows"]
        assert (values[0]["error"], values[0]["bound"], values[0]["repeats"]) == (0.5e-3, 2e-3, True)
        assert (values[2]["error"], values[2]["bound"], values[2]["repeats"]) == (None, None, None)
        assert (values[3]["error"], values[3]["bound"], values[3]["repeats"]) == (None, 1.0, False)

    def test_one_sample_has_no_spread(self):
        line = next(line for line in str(report()).split("\n") if "WINOGRAD" in line)
        assert line.split() == ["2", "legacy", "WINOGRAD_NONFUSED", "fma", "12.50", "-", "0.0", "no"]

    def test_the_cpu_says_so(self):
        assert "says nothing about a GPU" in str(report())
        assert "says nothing about a GPU" not in str(report(device=Device("cuda", 0)))

    def test_nothing_usable(self):
        empty = FindReport(key(), CPU, report().rows[3:])
        assert "no candidate can be used" in str(empty)
        with pytest.raises(FlcudaError, match="not deterministic"):
            _ = empty.best
        assert json.loads(empty.to_json())["best"] is None

    def test_a_terminal_with_colours_changes_nothing(self, monkeypatch):
        plain = str(report())
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "200")
        assert str(report()) == plain

    @pytest.mark.parametrize(
        ("value", "text"),
        [(0.00123, "0.0012"), (0.9999, "0.9999"), (1.5, "1.500"), (12.345, "12.35"), (512.04, "512.0")],
    )
    def test_milliseconds(self, value, text):
        assert milliseconds(value) == text


def test_json():
    value = json.loads(report().to_json())
    assert value["problem"] == str(PROBLEM)
    assert value["library_version"] == "numpy 2.0.0"
    assert value["device_model"]["name"] == "a processor"
    assert value["policy"]["mode"] == "find"
    assert value["best"] == "legacy:IMPLICIT_PRECOMP_GEMM"
    assert len(value["rows"]) == len(report()) == 5
    first, *_, last = value["rows"]
    assert first["median_ms"] == 0.08125
    assert first["spread_ms"] == pytest.approx(0.3 * 0.08125)
    assert first["workspace"] == 98_400_000
    assert first["reason"] is None
    assert last["median_ms"] is None
    assert last["reason"] == "not deterministic"


def test_rows_run_and_pin(tmp_path):
    found = report()
    arrays = PROBLEM.random_arrays(device="cpu")
    assert (found["legacy:IMPLICIT_PRECOMP_GEMM"].plan()(**arrays) == np.float32(3.0)).all()
    path = found.best.pin(tmp_path)
    assert ChoiceStore(tmp_path).get(key()) == found.best
    assert found["legacy:FFT_TILING"].pin(tmp_path) == path
    assert ChoiceStore(tmp_path).get(key()).algo == "FFT_TILING"
    with pytest.raises(FlcudaError, match="legacy:DIRECT cannot be pinned: not deterministic"):
        found["legacy:DIRECT"].pin(tmp_path)
    assert choice() != found.best


def test_labels_are_unique():
    fakes = [
        Fake("a"),
        Fake("b", math="fma"),
        Fake("b", math="tensor_op"),
        Fake("c", parameters=(("k", 1),)),
        Fake("c", parameters=(("k", 2),)),
        Fake("d"),
        Fake("d"),
        Fake("e", math="fma", parameters=(("k", 1),)),
        Fake("e", math="tensor_op", parameters=(("k", 1),)),
        Fake("e", math="tensor_op", parameters=(("k", 2),)),
    ]
    assert labels([fake.candidate("s") for fake in fakes]) == [
        "s:a",
        "s:b/fma",
        "s:b/tensor_op",
        "s:c/k=1",
        "s:c/k=2",
        "s:d#1",
        "s:d#2",
        "s:e/fma",
        "s:e/tensor_op/k=1",
        "s:e/tensor_op/k=2",
    ]
