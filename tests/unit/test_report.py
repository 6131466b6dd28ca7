"""The report: a table that fits a terminal, JSON, rows that can be run, pinned and ranked under another policy."""

import html.parser
import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from finder_fakes import PROBLEM, Fake, choice, key

from flcuda.device import CPU, Device
from flcuda.errors import FlcudaError
from flcuda.finder import peaks
from flcuda.finder import report as module
from flcuda.finder.choice import Choice
from flcuda.finder.policy import Policy
from flcuda.finder.problem import ConvolutionProblem, Problem
from flcuda.finder.report import AXES, FindReport, Row, labels, milliseconds, shortened
from flcuda.finder.store import ChoiceStore
from flcuda.finder.verify import Verification
from flcuda.timing import Clocks, Timing

LONG = ConvolutionProblem.parse(
    "backward_filter n128 c1024 112x112x112 k2048 3x5x7 p0:1x2x3:4 s2x1x1 d1x2x1 g512 "
    "bfloat16 out:float32 fma nhwc acc align:32"
)
H200 = peaks.of(90, 132, 1_980_000, 3_201_000, 6144)
LIMIT = 1 << 31


@pytest.fixture(autouse=True)
def no_gpu_is_asked(monkeypatch):
    monkeypatch.setattr(module.machine, "peaks", lambda device: None)
    monkeypatch.setattr(module.devices, "workspace_limit", lambda device: LIMIT)


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


BIG = Problem.parse("forward n128 c64 56x56 k64 3x3 p1 float16 nhwc")
KERNEL = "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_" + "tilesize128x64x64_" * 20 + "cudnn"
LARGE = LIMIT + 4096


def entry(algo, median, *, host_us=9.0, error=None, kernels=None, notes=(), repeats=True, queued=True, **fake) -> Row:
    """A row of a search on a GPU; `error` is a share of the results' root mean square."""
    made = row(Fake(algo, **fake), median, device=Device("cuda", 0), problem=BIG)
    seen = None
    if error is not None:
        seen = Verification(2 * error, 8 * error, repeats, None, error)
    return replace(
        made,
        candidate=replace(made.candidate, notes=notes),
        choice=Choice.of(key(BIG), made.candidate, median),
        timing=None if median is None else replace(made.timing, host_us=host_us, queued=queued),
        build_ms=12.0,
        first_run_ms=0.5,
        verification=seen,
        kernels=kernels,
    )


def searched(policy: Policy | None = None, **changes) -> FindReport:
    """A search under a policy on something like an H200: the fastest is not deterministic."""
    rows = [
        entry("62", 0.25, math="tensor_op", deterministic=False, error=3e-4, workspace=1 << 20, notes=("tensor_core",)),
        entry("25", 0.3125, math="tensor_op", error=4e-4, host_us=5.0, kernels=(KERNEL, "transpose")),
        entry("FFT", 0.5, error=1e-6, workspace=1 << 30),
        entry("GEMM", 1.0, error=2e-6, workspace=1 << 25, queued=False),
        replace(
            entry("BIG", None, workspace=LARGE, reported_ms=0.125),
            reason=f"workspace of {LARGE} bytes is above the limit of {LIMIT}",
        ),
        replace(entry("DIRECT", None), reason="CUDNN_STATUS_NOT_SUPPORTED (3000)"),
    ]
    found = FindReport(key(BIG, policy), Device("cuda", 0), rows, **changes)
    found.peaks = H200
    return found


def names(found: FindReport) -> list[str]:
    return [each.candidate.algo for each in found.usable]


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
            "30%",
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
        rows[0] = replace(rows[0], verification=Verification(0.5e-3, 2e-3, True, None, 3.14e-4))
        rows[1] = replace(rows[1], verification=Verification(0.0, 0.0, None, None))
        rows[3] = replace(rows[3], verification=Verification(math.inf, 1.0, False, rows[3].reason))
        verified = FindReport(key(), CPU, rows)
        lines = str(verified).split("\n")
        assert max(len(line) for line in lines) <= 80
        assert lines[3].split()[-1] == "error"
        assert [line.split()[-1] for line in lines if line[:2] in ("1 ", "2 ", "3 ")] == ["3.1e-04", "0.0e+00", "-"]
        assert "error" not in str(report())
        values = json.loads(verified.to_json())["rows"]
        assert (values[0]["error"], values[0]["bound"], values[0]["repeats"]) == (0.5e-3, 2e-3, True)
        assert (values[0]["error_of_bound"], values[0]["relative_error"]) == (0.25, 3.14e-4)
        assert values[1]["error_of_bound"] is None
        assert (values[2]["error"], values[2]["bound"], values[2]["repeats"]) == (None, None, None)
        assert (values[3]["error"], values[3]["bound"], values[3]["repeats"]) == (None, 1.0, False)

    def test_one_sample_has_no_spread(self):
        line = next(line for line in str(report()).split("\n") if "WINOGRAD" in line)
        assert line.split() == ["2", "legacy:WINOGRAD_NONFUSED", "12.50", "-", "11.0", "0.0", "no"]

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


# --- what was measured, and what it means ---------------------------------------------------------------------------


class TestNumbers:
    def test_rates_and_shares_of_the_peak(self):
        found = json.loads(searched().to_json())
        flops = 2 * 128 * 64 * 56 * 56 * 64 * 9
        moved = 2 * (2 * 128 * 64 * 56 * 56 + 64 * 64 * 9)
        assert (found["flops"], found["bytes"]) == (flops, moved)
        assert found["peaks"]["flops"]["float16"] == pytest.approx(1.0705e15, rel=1e-3)
        first = found["rows"][0]
        assert first["tflop_per_s"] == pytest.approx(flops / 0.25e-3 / 1e12)
        assert first["gb_per_s"] == pytest.approx(moved / 0.25e-3 / 1e9)
        arithmetic, memory = flops / 0.25e-3 / H200.flops["float16"], moved / 0.25e-3 / H200.bandwidth
        assert arithmetic > memory
        assert first["share_of_peak"] == pytest.approx(arithmetic)
        assert first["limit"] == "arithmetic"
        assert found["rows"][-1]["share_of_peak"] is None

    def test_memory_is_the_limit_of_little_arithmetic(self):
        problem = Problem.parse("forward n128 c64 56x56 k64 3x3 p1 g64 float16 nhwc")
        found = FindReport(key(problem), CPU, [row(Fake("GEMM"), 0.25, problem=problem)])
        found.peaks = H200
        assert json.loads(found.to_json())["rows"][0]["limit"] == "memory"
        assert "memory is the nearer peak" in " ".join(str(found).split())

    def test_no_peaks_are_known_of_a_cpu(self):
        value = json.loads(report().to_json())
        assert value["peaks"] is None
        assert value["rows"][0]["limit"] is None
        assert value["rows"][0]["gb_per_s"] > 0
        assert " peak " not in str(report())

    def test_every_number_of_a_row(self):
        value = json.loads(searched().to_json())["rows"][1]
        expected = {
            "id": "legacy:25",
            "source": "legacy",
            "algo": "25",
            "math": "tensor_op",
            "notes": [],
            "kernels": [KERNEL, "transpose"],
            "median_ms": 0.3125,
            "samples": 9,
            "launches": 1,
            "queued": True,
            "host_us": 5.0,
            "reported_ms": None,
            "build_ms": 12.0,
            "first_run_ms": 0.5,
            "workspace": 0,
            "deterministic": True,
            "repeats": True,
            "error": 8e-4,
            "error_of_bound": 0.25,
            "relative_error": 4e-4,
            "reason": None,
        }
        assert {name: value[name] for name in expected} == expected


class TestSummary:
    def text(self, found: FindReport) -> str:
        lines = str(found).split("\n")
        assert max(len(line) for line in lines) <= 80
        return " ".join(str(found).split())

    def test_the_price_of_determinism(self):
        assert "best deterministic: legacy:25 0.3125 ms, 1.25 times legacy:62 (0.2500 ms)" in self.text(searched())
        only = FindReport(key(BIG), Device("cuda", 0), searched().rows[:1])
        assert "no usable candidate is deterministic" in self.text(only)
        deterministic = FindReport(key(BIG), Device("cuda", 0), searched().rows[1:])
        assert "best deterministic" not in self.text(deterministic)

    def test_what_was_seen_to_differ_is_not_deterministic(self):
        rows = searched().rows
        rows[1] = entry("25", 0.3125, math="tensor_op", error=4e-4, repeats=False)
        assert "best deterministic: legacy:FFT 0.5000 ms" in self.text(FindReport(key(BIG), CPU, rows))

    def test_the_price_of_the_workspace_limit(self):
        text = self.text(searched())
        assert "workspace limit of 2147.5 MB: excludes 1 candidate, not measured; legacy:BIG claims 0.1250 ms" in text

    def test_clocks(self):
        assert "clocks and throttling were not noted" in self.text(searched())
        noted = searched(clocks=Clocks(1755, 1980, 3201, ("power cap", "hot")))
        assert "clocks: SM 1755 of 1980 MHz, memory 3201 MHz; throttled: power cap, hot" in self.text(noted)
        assert "not throttled" in self.text(searched(clocks=Clocks(1980, 1980, 3201, ())))
        assert json.loads(noted.to_json())["clocks"]["throttled"] == ["power cap", "hot"]
        assert "clocks" not in str(report())

    def test_seconds(self):
        found = searched(seconds={"build": 0.25, "measure": 1.5})
        assert "took: build 0.25 s, measure 1.50 s" in self.text(found)
        assert json.loads(found.to_json())["seconds"] == {"build": 0.25, "measure": 1.5}

    def test_notes_and_kernels(self):
        text = str(searched())
        assert " 1 legacy:62: tensor_core\n 2 legacy:25\n" in text
        assert KERNEL not in text
        assert KERNEL[:40] in text
        assert "notes and kernels" not in str(report())

    def test_the_time_of_the_host_is_marked(self):
        text = str(searched())
        assert "1.000*" in text
        assert "\n*: the host" in text
        rows = [replace(each, timing=each.timing and replace(each.timing, at_least=True)) for each in searched().rows]
        assert "*" not in str(FindReport(key(BIG), Device("cuda", 0), rows))

    def test_the_policy_is_named_where_it_is_not_the_default(self):
        assert "policy:" not in str(searched())
        assert "\npolicy: time both, l2 warm\n" in str(searched(Policy(time="both", l2="warm")))

    @pytest.mark.parametrize("width", [10, 11, 72])
    def test_shortened(self, width):
        assert len(shortened(KERNEL, width)) == width
        assert shortened("abc", width) == "abc"


class TestPareto:
    def test_the_default_is_time_and_workspace(self):
        assert [each.candidate.algo for each in searched().pareto()] == ["62", "25"]

    def test_more_axes_keep_more_rows(self):
        found = searched()
        assert {each.candidate.algo for each in found.pareto("median_ms", "relative_error")} == {"62", "FFT"}
        assert [each.candidate.algo for each in found.pareto("host_us")] == ["25"]
        # against the definition, over all rows and axes
        axes = ("median_ms", "relative_error", "host_us")
        points = {
            value["id"]: [value[name] for name in axes]
            for value in json.loads(found.to_json())["rows"]
            if value["reason"] is None
        }
        best = {
            name
            for name, point in points.items()
            if not any(
                all(a <= b for a, b in zip(other, point, strict=True)) and other != point for other in points.values()
            )
        }
        assert {each.label for each in found.pareto(*axes)} == best
        assert len(best) < len(points)

    def test_equals_stay_and_rows_without_a_value_go(self):
        rows = [row(Fake("a"), 1.0), row(Fake("b"), 1.0), row(Fake("c"), 2.0), row(Fake("d"), reason="broken")]
        found = FindReport(key(), CPU, rows)
        assert [each.candidate.algo for each in found.pareto()] == ["a", "b"]
        assert found.pareto("error") == []

    def test_an_unknown_axis(self):
        with pytest.raises(ValueError, match=r"'speed' must be one of median_ms, .*workspace"):
            searched().pareto("median_ms", "speed")
        assert set(AXES) <= set(json.loads(searched().to_json())["rows"][0])


class TestUnder:
    def test_the_same_policy_changes_nothing(self):
        found = searched()
        again = found.under(Policy())
        assert [each.label for each in again.rows] == [each.label for each in found.rows]
        assert [each.reason for each in again.rows] == [each.reason for each in found.rows]
        assert again.best == found.best
        assert (again.peaks, again.key) == (H200, found.key)

    def test_the_policy_refuses_and_ranks(self):
        found = searched(seconds={"measure": 1.0})
        assert names(found) == ["62", "25", "FFT", "GEMM"]
        assert names(found.under(Policy(deterministic=True))) == ["25", "FFT", "GEMM"]
        assert names(found.under(Policy(max_error=1e-5))) == ["FFT", "GEMM"]
        assert names(found.under(Policy(workspace_limit=1 << 25))) == ["62", "25", "GEMM"]
        assert names(found.under(Policy(time="host")))[0] == "25"
        assert found.under(Policy(time="host")).seconds == {"measure": 1.0}

    def test_a_coarse_look_is_no_better_than_a_fine_one(self):
        rows = searched().rows
        few = entry("lucky", 0.125, host_us=4.0)
        rows.insert(2, replace(few, timing=replace(few.timing, samples=1)))
        found = FindReport(key(BIG), Device("cuda", 0), rows)
        assert names(found.under(Policy(deterministic=True)))[0] == "25"
        # what the search did not rank by has not been looked at
        assert names(found.under(Policy(time="host")))[0] == "lucky"

    def test_ties_go_to_the_lower_id(self):
        rows = [entry("9", 1.0), entry("10", 1.004), entry("3", 1.005), entry("2", 1.02)]
        found = FindReport(key(BIG), Device("cuda", 0), rows)
        assert names(found.under(Policy(deterministic=True))) == ["3", "9", "10", "2"]

    def test_the_choice_has_the_other_policys_key(self, tmp_path):
        policy = Policy(deterministic=True)
        best = searched().under(policy).best
        assert best.key == key(BIG, policy)
        best.pin(tmp_path)
        assert ChoiceStore(tmp_path).get(key(BIG, policy)).algo == "25"
        assert ChoiceStore(tmp_path).get(key(BIG)) is None

    def test_there_and_back(self):
        found = searched()
        for policy in (Policy(deterministic=True), Policy(max_error=1e-5), Policy(workspace_limit=0)):
            back = found.under(policy).under(Policy())
            assert names(back) == names(found)
            assert back.best == found.best

    def test_what_was_not_measured_cannot_come_back(self):
        wider = searched().under(Policy(workspace_limit=1 << 40))
        row = wider["legacy:BIG"]
        assert row.reason.startswith("not measured, since the policy of the search forbade it: workspace of")
        assert wider["legacy:DIRECT"].reason == "CUDNN_STATUS_NOT_SUPPORTED (3000)"

    def test_what_another_policy_forbids_is_priced(self):
        text = " ".join(str(searched().under(Policy(deterministic=True, workspace_limit=1 << 29))).split())
        assert "determinism: excludes 1 candidate; the best is legacy:25 0.3125 ms, 1.25 times legacy:62" in text
        assert "workspace limit of 536.9 MB: excludes 2 candidates; the best is legacy:25" in text

    def test_what_was_seen_to_differ_comes_back(self):
        rows = searched().rows
        seen = entry("25", 0.125, error=4e-4, repeats=False, deterministic=False)
        rows[1] = replace(seen, reason="not deterministic: a second run gave other bits")
        found = FindReport(key(BIG, Policy(deterministic=True)), Device("cuda", 0), [*rows[1:], rows[0]])
        assert found.under(Policy())["legacy:25"].reason is None
        assert found.under(Policy()).best.algo == "25"

    def test_wrong_results_never_come_back(self):
        rows = searched().rows
        wrong = Verification(1.0, 1e-3, True, "y at (0, 0) is 1, not 2", 0.5)
        rows[0] = replace(rows[0], verification=wrong, reason=wrong.reason)
        found = FindReport(key(BIG, Policy(deterministic=True)), Device("cuda", 0), [*rows[1:], rows[0]])
        assert found.under(Policy())["legacy:62"].reason == wrong.reason

    def test_what_was_not_verified_is_not_used_with_a_largest_error(self):
        rows = searched().rows
        rows[2] = replace(rows[2], verification=None)
        found = FindReport(key(BIG), Device("cuda", 0), rows)
        strict = found.under(Policy(max_error=1e-5))
        assert names(strict) == ["GEMM"]
        assert "not verified" in strict["legacy:FFT"].reason
        assert names(strict.under(Policy())) == names(found)

    @pytest.mark.parametrize(
        ("policy", "text"),
        [
            (Policy(l2="warm"), r"policy.l2 'warm': this report was measured with 'cold'"),
            (Policy(effort="wide"), r"policy.effort 'wide'"),
            (Policy(mode="pinned"), r"policy.mode 'pinned'"),
            (Policy(mode="heuristic"), r"policy.mode 'heuristic'"),
        ],
    )
    def test_what_needs_another_search(self, policy, text):
        with pytest.raises(ValueError, match=text):
            searched().under(policy)

    def test_what_needs_verification_or_a_measurement(self):
        with pytest.raises(ValueError, match=r"policy.max_error 0.001: no result of this report was verified"):
            report().under(Policy(max_error=1e-3))
        listed = FindReport(key(policy=Policy(mode="heuristic")), CPU, [row(Fake("GEMM"))])
        with pytest.raises(ValueError, match="nothing was measured"):
            listed.under(Policy())
        assert "GEMM" in str(listed)

    def test_on_the_cpu_the_order_stays(self):
        # ranked by the smallest sample, which is not kept
        rows = [row(Fake("a"), 2.0), row(Fake("b", workspace=10), 1.0), row(Fake("c", workspace=99), 1.5)]
        found = FindReport(key(), CPU, rows)
        assert names(found.under(Policy(deterministic=True))) == ["a", "b", "c"]
        small = found.under(Policy(workspace_limit=50))
        assert names(small) == ["a", "b"]
        assert names(small.under(Policy())) == ["c", "a", "b"]


class Tables(html.parser.HTMLParser):
    """Collects the cells of a table and every tag."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not attrs
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.rows and self.tags[-1] in ("td", "th") and self.rows[-1]:
            self.rows[-1][-1] += data


class TestNotebook:
    def test_all_columns_and_rows(self):
        tables = Tables()
        tables.feed(searched()._repr_html_())
        head, *rows = tables.rows
        assert len(rows) == len(searched())
        assert all(len(cells) == len(head) for cells in rows)
        first = dict(zip(head, rows[0], strict=True))
        assert first["id"] == "legacy:62"
        assert first["median_ms"] == "0.25"
        assert first["relative_error"] == "0.0003"
        assert first["deterministic"] == "False"
        assert dict(zip(head, rows[1], strict=True))["kernels"] == f"{KERNEL}, transpose"
        assert dict(zip(head, rows[-1], strict=True))["reason"] == "CUDNN_STATUS_NOT_SUPPORTED (3000)"
        # of the columns only those that nobody has a value for are missing
        values = json.loads(searched().to_json())["rows"]
        assert head == [name for name in values[0] if any(value[name] is not None for value in values)]

    def test_nothing_is_taken_for_html(self):
        rows = searched().rows
        rows[1] = replace(rows[1], kernels=("gemm<float, 4>&x</td><script>alert(1)</script>",))
        text = FindReport(key(BIG), Device("cuda", 0), rows)._repr_html_()
        assert "<script" not in text
        assert "gemm&lt;float, 4&gt;&amp;x" in text
        assert "http" not in text

    def test_no_rows(self):
        assert "<table>" in FindReport(key(), CPU, [])._repr_html_()


def test_pandas_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        searched().to_pandas()


def test_matplotlib_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'flcuda\[plot\]'"):
        searched().plot()
    with pytest.raises(ValueError, match="y: 'speed'"):
        searched().plot(y="speed")


def test_to_pandas():
    pandas = pytest.importorskip("pandas")
    frame = searched().to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    values = json.loads(searched().to_json())["rows"]
    assert list(frame.columns) == list(values[0])
    assert list(frame["id"]) == [value["id"] for value in values]
    assert frame["median_ms"].dtype == np.float64
    assert frame["median_ms"].min() == 0.25
    assert frame.loc[1, "kernels"] == f"{KERNEL}, transpose"
    assert frame.attrs["problem"] == str(BIG)
    assert frame[frame.reason.isna()].sort_values("workspace").iloc[-1].algo == "FFT"
    parameters = report().to_pandas().set_index("algo").parameters
    assert parameters["FFT_TILING"] == "tile=32 order=rows"


class TestPlot:
    @pytest.fixture(autouse=True)
    def library(self):
        pytest.importorskip("matplotlib")

    def test_points_labels_and_title(self, tmp_path):
        figure = searched().plot(tmp_path / "choice.svg")
        (axes,) = figure.axes
        assert sum(len(collection.get_offsets()) for collection in axes.collections) == 4
        assert {text.get_text() for text in axes.texts} == {"legacy:62", "legacy:25"}
        assert axes.get_title().startswith(str(BIG))
        assert "numpy 2.0.0" in axes.get_title()
        assert (axes.get_xscale(), axes.get_yscale()) == ("symlog", "log")
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("workspace, bytes", "median time, ms")
        assert (tmp_path / "choice.svg").read_text().lstrip().startswith("<?xml")

    def test_other_axes(self):
        (axes,) = searched().plot(x="relative_error", y="host_us").axes
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert {text.get_text() for text in axes.texts} == {"legacy:25", "legacy:FFT"}

    def test_nothing_to_draw(self):
        with pytest.raises(ValueError, match="no usable row has both values"):
            report().plot(x="error")
