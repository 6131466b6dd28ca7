"""Symptoms that users of such software have reported, and where each is held off; the reports by their references.

Search, workspace, "not supported"

CNTK PR#1516: tests/gpu/test_problem_reports.py::test_a_search_while_cupys_pool_holds_the_memory
CNTK PR#1516: tests/gpu/test_problem_reports.py::test_a_search_with_little_memory
CNTK PR#1516: tests/abi/test_legacy_source.py::test_the_workspace_of_find_is_halved_until_it_fits
pytorch#49207: tests/unit/test_problem_reports.py::test_a_limit_holds_for_search_and_heuristic
pytorch#49207: tests/gpu/test_problem_reports.py::test_the_limit_is_kept_by_what_is_really_allocated
pytorch#49207: tests/gpu/test_gpu_convolution.py::test_no_row_breaks_the_policy
pytorch PR#558: tests/unit/test_find.py::test_the_next_runs_and_is_remembered
pytorch PR#558: tests/gpu/test_problem_reports.py::test_out_of_memory_falls_to_what_needs_less
pytorch#1485: tests/unit/test_find.py::test_heuristic_takes_the_first_that_runs
pytorch#1485: tests/abi/test_legacy_source.py::test_each_reported_entry_becomes_a_candidate_with_its_own_math
pytorch#1485: tests/gpu/test_problem_reports.py::test_a_heuristics_first_that_does_not_run_is_passed_over
cupy PR#1428: tests/abi/test_legacy_source.py::test_each_reported_entry_becomes_a_candidate_with_its_own_math
cupy PR#1428: tests/gpu/test_problem_reports.py::test_candidates_of_different_math_may_take_turns
cudnn-frontend#116: tests/abi/test_graph.py::test_why_not_names_the_rule
cudnn-frontend#116: tests/abi/test_graph_source.py::test_why_not
cudnn-frontend#116: tests/unit/test_find.py::test_nothing_usable
cudnn-frontend#101: tests/unit/test_convolution.py::test_an_empty_batch_needs_no_source
cudnn-frontend#101: tests/gpu/test_gpu_convolution.py::test_an_empty_batch_calls_no_library
CUDA.jl#128: tests/abi/test_graph_source.py::test_padding_and_beta_reach_cudnn
CUDA.jl#128: tests/gpu/test_gpu_convolution.py::test_agrees_with_float64
CUDA.jl#128: tests/gpu/test_problem_reports.py::test_every_source_keeps_groups_and_sides_of_the_padding
TensorFlow#55633: tests/unit/test_problem_reports.py::test_padding_keeps_the_groups
TensorFlow#55633: tests/gpu/test_problem_reports.py::test_every_source_keeps_groups_and_sides_of_the_padding

Wrong results, precision, nondeterminism

mxnet PR#14310: tests/unit/test_errata.py::test_what_matches_in_everything_gets_the_reason
mxnet PR#14310: tests/unit/test_errata.py::test_what_differs_in_one_thing_is_left_alone
mxnet PR#14310: tests/unit/test_verify.py::test_wrong_results_are_caught
pytorch#163539: tests/unit/test_errata.py::test_3d
pytorch#163539: tests/gpu/test_verify.py::test_candidates_of_convolutions_are_right
TensorFlow#32836: tests/unit/test_verify.py::test_in_front_of_the_output
TensorFlow#32836: tests/gpu/test_verify.py::test_broken_runners_are_caught
TensorFlow#32836: tests/gpu/test_problem_reports.py::test_writing_beside_the_workspace_is_caught
jax#15976: tests/unit/test_problem_reports.py::test_candidates_that_disagree_are_told_apart
jax#15976: tests/gpu/test_problem_reports.py::test_candidates_that_disagree_are_told_apart_by_their_error
pytorch#107514: tests/unit/test_problem.py::test_math_by_default
pytorch#107514: tests/gpu/test_gpu_convolution.py::test_strict_float32_never_rounds_to_tf32
pytorch#107514: tests/abi/test_graph_source.py::test_fma_never_uses_tensor_cores
pytorch#188288: tests/unit/test_errata.py::test_engine_5_is_not_deterministic_on_8_6_only
pytorch#188288: tests/gpu/test_problem_reports.py::test_whoever_promises_the_same_bits_is_held_to_it
mxnet PR#13142: tests/unit/test_problem_reports.py::test_a_promise_of_the_same_bits_that_is_broken
mxnet PR#13142: tests/gpu/test_verify.py::test_other_bits_in_a_second_run_are_caught
mxnet PR#13142: tests/gpu/test_problem_reports.py::test_whoever_promises_the_same_bits_is_held_to_it
pytorch#28777: tests/unit/test_problem_reports.py::test_the_price_of_determinism_is_shown
pytorch#28777: tests/gpu/test_problem_reports.py::test_the_price_of_determinism_is_shown

Stored choices, cold start

pytorch#88410: tests/unit/test_find.py::test_a_second_process_and_another_batch_search_only_what_they_must
pytorch#88410: tests/unit/test_store.py::test_processes_and_a_kill
pytorch#88410: tests/unit/test_store.py::test_costs_one_warning
flashinfer#3566: tests/abi/test_graph_source.py::test_restore_gives_the_same_engine_and_knobs
flashinfer#3566: tests/abi/test_graph_source.py::test_restore_refuses_what_is_not_there_or_must_not_be_used
flashinfer#3566: tests/unit/test_find.py::test_a_stored_choice_that_no_longer_works_is_searched_again
cudnn-frontend#1066: tests/unit/test_find.py::test_building_and_the_first_run_are_told_apart

Threads, streams, devices, capture, exit

cupy#1109: tests/gpu/test_handle.py::test_threads_have_their_own_and_give_them_back
cupy#1109: tests/gpu/test_handle.py::test_stream_is_set_only_when_it_differs
cupy#1109: tests/gpu/test_threads.py::test_eight_threads_with_two_streams_give_the_serial_results
cupy#1109: tests/gpu/test_threads.py::test_plans_and_handles_are_not_shared_and_go_with_their_thread
pytorch#2523: tests/gpu/test_gpu_convolution.py::test_runs_on_the_callers_stream_and_in_a_capture
pytorch#2523: tests/gpu/test_plan_runtime.py::test_the_stream_is_followed_on_the_fast_path
onnxruntime-genai#1545: tests/unit/test_find.py::test_wrong_operands
onnxruntime-genai#1545: tests/gpu/test_handle.py::test_two_devices_are_told_apart
mstar PR#55: tests/unit/test_find.py::test_while_capturing
mstar PR#55: tests/gpu/test_gpu_convolution.py::test_a_search_inside_a_capture_is_an_error
pytorch PR#169153: tests/gpu/test_handle.py::test_process_ends_with_0
pytorch#104701: tests/unit/test_convolution.py::test_what_is_remembered_is_bounded
pytorch#104701: tests/unit/test_store.py::test_memory_is_bounded
pytorch#104701: tests/gpu/test_threads.py::test_two_thousand_shapes_leave_the_hosts_memory_flat

Outputs overwritten, accumulating calls

Theano PR#6368: tests/unit/test_find.py::test_accumulating_operands_of_the_caller_are_never_touched
Theano PR#6368: tests/unit/test_convolution.py::test_searching_does_not_touch_what_is_added_to
Theano PR#6368: tests/gpu/test_problem_reports.py::test_the_first_call_that_adds_gives_the_right_sum
Theano PR#6368: tests/gpu/test_problem_reports.py::test_the_sets_of_a_search_are_its_own
"""

import contextlib
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from finder_fakes import PROBLEM, Fake, only

import flcuda
from flcuda.device import CPU
from flcuda.finder import ConvolutionProblem, Policy, Problem, find, plan
from flcuda.finder.problem import DIRECTIONS
from flcuda.finder.sources import reference
from flcuda.finder.sources.reference import ReferenceSource
from flcuda.finder.sources.rewrites import Padded, Relayout

ROOT = Path(__file__).parents[2]

REFERENCES = """
CNTK PR#1516, pytorch#49207, pytorch PR#558, pytorch#1485, cupy PR#1428, cudnn-frontend#116, cudnn-frontend#101,
CUDA.jl#128, TensorFlow#55633, mxnet PR#14310, pytorch#163539, TensorFlow#32836, jax#15976, pytorch#107514,
pytorch#188288, mxnet PR#13142, pytorch#28777, pytorch#88410, flashinfer#3566, cudnn-frontend#1066, cupy#1109,
pytorch#2523, onnxruntime-genai#1545, mstar PR#55, pytorch PR#169153, pytorch#104701, Theano PR#6368
"""


def held() -> list[tuple[str, str, str]]:
    """The lines of the table: reference, file, test."""
    return re.findall(r"^(\S.*?): (tests/\S+\.py)::(\w+)$", __doc__, re.MULTILINE)


def test_every_report_is_held_by_a_test():
    references = [" ".join(entry.split()) for entry in REFERENCES.split(",")]
    assert {reference for reference, *_ in held()} == set(references)


@pytest.mark.parametrize("path", sorted({path for _, path, _ in held()}))
def test_the_tests_of_the_table_are_there(path):
    text = (ROOT / path).read_text()
    missing = [name for _, other, name in held() if other == path and f"def {name}(" not in text]
    assert not missing


@pytest.mark.parametrize("mode", ["find", "heuristic"])
@pytest.mark.parametrize("by", ["call", "context"])
def test_a_limit_holds_for_search_and_heuristic(mode, by, monkeypatch):
    big = Fake("big", 1.0, workspace=4097)
    only(monkeypatch, big, Fake("small", 2.0, delay=9, workspace=4096))
    limited = Policy(mode=mode, workspace_limit=4096)
    context = contextlib.nullcontext() if by == "call" else flcuda.policy(**limited.to_json())
    with context:
        made = plan(PROBLEM, policy=limited if by == "call" else None)
    assert made.choice.algo == "small"
    assert made.workspace == 4096
    assert big.builds == 0
    # what was chosen under a limit is no answer without it
    assert plan(PROBLEM, policy=Policy(mode=mode)).choice.algo == "big"


class Rounded:
    """The right result, to fewer digits."""

    workspace = 0

    def __init__(self, digits: int | None) -> None:
        self._run = reference.Columns(PROBLEM, "im2col", reference.CHUNK)
        self._digits = digits

    def __call__(self, x, w, out) -> None:
        self._run(x, w, out)
        if self._digits is not None:
            out *= 1 + 10.0**-self._digits


def offer(monkeypatch, **builds) -> None:
    """Makes candidates of these names the only ones there are; the first is the quickest."""
    fakes = [Fake(name) for name in builds]
    source = only(monkeypatch, *fakes)
    candidates = [
        replace(fake.candidate("fake"), build=build) for fake, build in zip(fakes, builds.values(), strict=True)
    ]
    monkeypatch.setattr(source, "candidates", lambda *_: candidates)


def test_candidates_that_disagree_are_told_apart(monkeypatch):
    offer(monkeypatch, rough=lambda: Rounded(1), less_exact=lambda: Rounded(6), exact=lambda: Rounded(None))
    report = find(PROBLEM, verify=True, store=False)
    # wrong by a tenth: no candidate, whatever its time
    assert report["fake:rough"].verification.relative > 0.03
    assert "is" in report["fake:rough"].reason
    errors = {name: report[f"fake:{name}"].verification.relative for name in ("less_exact", "exact")}
    assert errors["exact"] < errors["less_exact"] < 1e-5
    assert {row.candidate.algo for row in report.usable} == {"less_exact", "exact"}
    limit = (errors["exact"] + errors["less_exact"]) / 2
    assert find(PROBLEM, policy=Policy(max_error=limit), store=False).best.algo == "exact"
    assert str(report).count("less_exact") >= 1


class Unsteady(Rounded):
    """Right results whose last bits differ from run to run."""

    def __init__(self) -> None:
        super().__init__(None)
        self._calls = 0

    def __call__(self, x, w, out) -> None:
        super().__call__(x, w, out)
        self._calls += 1
        out[0, 0, 0, 0] *= 1 + 2.0**-22 * self._calls


def test_a_promise_of_the_same_bits_that_is_broken(monkeypatch):
    offer(monkeypatch, racy=Unsteady, steady=lambda: Rounded(None))
    report = find(PROBLEM, verify=True, store=False)
    assert report["fake:racy"].verification.repeats is False
    assert report["fake:racy"].reason is None
    assert not report["fake:racy"].candidate.deterministic
    assert report["fake:steady"].candidate.deterministic
    strict = find(PROBLEM, policy=Policy(deterministic=True), verify=True, store=False)
    assert strict.best.algo == "steady"
    assert "a second run gave other bits" in strict["fake:racy"].reason


def test_the_price_of_determinism_is_shown(monkeypatch):
    dilated = ConvolutionProblem.parse("forward n1 c2 9x9 k2 3x3 p2 d2 float32 nchw")
    only(monkeypatch, Fake("racy", deterministic=False, delay=1), Fake("steady", delay=40))
    printed = str(find(dilated, store=False))
    assert re.search(r"best deterministic: fake:steady 40.00 ms, 39.9", printed.replace("\n", " "))
    strict = str(find(dilated, policy=Policy(deterministic=True), store=False))
    assert "fake:racy" in strict


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("line", ["n2 c6 7x6 k10 3x3 p1", "n2 c9 7x6 k3 3x3 p1 s2", "n2 c5 7x6 k5 1x1"])
def test_padding_keeps_the_groups(line, direction):
    """Channels are padded where there is one group only; the others are offered with their groups, or not at all."""
    inner = [ReferenceSource()]
    policy = Policy(effort="wide")
    plain = Problem.parse(f"{direction} {line} tf32 nhwc")
    assert list(Padded(inner).candidates(plain, policy, CPU))
    channels, filters = plain.x_shape[1], plain.w_shape[0]
    for groups in (math.gcd(channels, filters), 1):
        problem = Problem.parse(f"{plain} g{groups}")
        arrays = problem.random_arrays(seed=3, device="cpu")
        inputs = [arrays[name] for name in problem.inputs]
        (expected, *_) = find(problem, device="cpu", sources=["reference"], store=False).usable
        expected = expected.plan()(*inputs)
        for source in (Padded(inner), Relayout(inner)):
            for candidate in source.candidates(problem, policy, CPU):
                assert candidate.source != "padded" or groups == 1
                out = np.full_like(expected, np.nan)
                candidate.build()(*inputs, out)
                np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
