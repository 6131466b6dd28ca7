"""Finding, planning, falling to the next candidate: with fake sources, and with the reference source on the CPU."""

import contextlib
import json
import math
import subprocess
import sys
import threading
import time
import warnings
import weakref
from dataclasses import replace

import numpy as np
import pytest
from finder_fakes import PROBLEM, Fake, FakeSource, only

import flcuda
from flcuda import device as devices
from flcuda.errors import CudnnError, CudnnNotSupportedError, FlcudaError
from flcuda.finder import Candidate, ChoiceStore, Plan, Policy, default_store, find, plan, policy, search, sources
from flcuda.finder.choice import Choice
from flcuda.finder.graph_problem import GraphProblem
from flcuda.finder.problem import ConvolutionProblem
from flcuda.finder.report import FindReport
from flcuda.finder.sources import reference
from flcuda.finder.verify import Verification

REFUSED = CudnnNotSupportedError("cudnnConvolutionForward", 3000, "not for this shape")


def arrays(problem=PROBLEM, seed=0):
    return problem.random_arrays(seed=seed, device="cpu")


def run(made: Plan) -> float:
    """Runs a plan of fakes; returns the one value that it wrote."""
    out = made(**arrays())
    assert np.unique(out).size == 1
    return float(out.flat[0])


class TestFind:
    def test_ranks_by_time_and_stores_the_best(self, monkeypatch):
        slow = Fake("slow", 1.0, delay=60)
        fast = Fake("fast", 2.0)
        only(monkeypatch, slow, fast)
        report = find(PROBLEM)
        assert [row.label for row in report.rows] == ["fake:fast", "fake:slow"]
        assert report.rows[0].timing.median_ms < report.rows[1].timing.median_ms
        assert report.best.algo == "fast"
        assert report.best.median_ms == report.rows[0].timing.median_ms
        assert ChoiceStore().get(report.key) == report.best

    def test_what_fails_is_reported_and_never_chosen(self, monkeypatch):
        only(
            monkeypatch,
            Fake("unbuildable", build_error=REFUSED),
            Fake("refuses", run_errors=lambda call: REFUSED),
            Fake("hungry", run_errors=lambda call: MemoryError("3 GB wanted")),
            Fake("known", reason="odd channels"),
            Fake("good", 5.0, delay=20),
        )
        report = find(PROBLEM)
        assert report.best.algo == "good"
        assert [row.label for row in report.usable] == ["fake:good"]
        reasons = {row.candidate.algo: row.reason for row in report.rows if row.reason}
        assert "not for this shape" in reasons["unbuildable"]
        assert "not for this shape" in reasons["refuses"]
        assert "3 GB wanted" in reasons["hungry"]
        assert reasons["known"] == "odd channels"

    def test_nothing_usable(self, monkeypatch):
        source = only(monkeypatch, Fake("a", build_error=REFUSED), Fake("b", reason="odd channels"))
        for ask in (find, plan):
            with pytest.raises(ValueError, match="no candidate can be used") as caught:
                ask(PROBLEM)
            for part in (str(PROBLEM), "not for this shape", "odd channels", "fake:a", "fake:b"):
                assert part in str(caught.value)
        assert list(default_store().folder.glob("*")) == []
        source.fakes.clear()
        with pytest.raises(ValueError, match="there is none"):
            find(PROBLEM)

    def test_nothing_usable_on_cuda_is_not_supported(self):
        error = search._nothing_usable(
            flcuda.finder.Key(PROBLEM, Policy(), (), "cudnn 9.0.0", ()), devices.Device("cuda", 0), "legacy:GEMM: no"
        )
        assert isinstance(error, CudnnNotSupportedError)
        assert "legacy:GEMM: no" in str(error)

    def test_a_source_that_refuses_altogether_is_a_row(self, monkeypatch):
        source = only(monkeypatch)

        def refuse(problem, policy, device):
            raise REFUSED

        source.candidates = refuse
        with pytest.raises(ValueError, match=r"fake:all: .*not for this shape"):
            find(PROBLEM)

    def test_the_row_of_a_source_that_refuses_keeps_nothing_alive(self, monkeypatch):
        source = only(monkeypatch, Fake("good"))
        refs = []

        def refuse(problem, policy, device):
            yield source.fakes[0].candidate("fake")
            scratch = np.zeros(3)
            refs.append(weakref.ref(scratch))
            try:
                scratch.reshape(2)
            except ValueError as error:
                raise CudnnNotSupportedError("cudnnFind", 3000, "not for this shape") from error

        source.candidates = refuse
        report = find(PROBLEM)
        assert refs[0]() is None

        def run_it():
            mine = np.zeros(3)
            refs.append(weakref.ref(mine))
            with pytest.raises(CudnnNotSupportedError, match="not for this shape"):
                report["fake:all"].plan()

        run_it()
        assert refs[1]() is None

    @pytest.mark.parametrize("error", [MemoryError("2 GB wanted"), CudnnError("cudnnCreate", 4000, "broken")])
    def test_an_error_of_the_search_itself_names_the_problem(self, monkeypatch, error):
        source = only(monkeypatch)

        def fail(problem, policy, device):
            raise error

        source.candidates = fail
        with pytest.raises(type(error)) as caught:
            find(PROBLEM)
        assert caught.value.__notes__ == [f"problem: {PROBLEM}"]

    def test_what_a_source_yields_before_it_refuses_counts(self, monkeypatch):
        source = only(monkeypatch)

        class Scratch:
            pass

        alive = weakref.WeakSet()

        def one_then_no_more(problem, policy, device):
            yield Fake("good", 3.0).candidate("fake")
            scratch = Scratch()
            alive.add(scratch)
            raise CudnnNotSupportedError("cudnnConvolutionForward", 3000, "not for this shape")

        source.candidates = one_then_no_more
        report = find(PROBLEM)
        assert report.best.algo == "good"
        assert "not for this shape" in report["fake:all"].reason
        # and the report does not keep what the source had allocated
        assert not alive

    def test_a_search_is_announced(self, monkeypatch, caplog):
        only(monkeypatch, Fake("a"))
        caplog.set_level("INFO", logger="flcuda.finder")
        plan(PROBLEM, device="cpu")
        plan(PROBLEM, device="cpu")
        begin, end = [record.getMessage() for record in caplog.records]
        assert begin == f"searching for {PROBLEM} on cpu"
        assert end.startswith(f"found fake:a for {PROBLEM} in ")

    def test_a_mistake_of_a_source_is_not_hidden(self, monkeypatch):
        only(monkeypatch, Fake("broken", run_errors=lambda call: ZeroDivisionError("oops")))
        with pytest.raises(ZeroDivisionError):
            find(PROBLEM)

    def test_deterministic(self, monkeypatch):
        only(monkeypatch, Fake("racy", deterministic=False), Fake("steady", delay=40))
        assert find(PROBLEM).best.algo == "racy"
        with policy(deterministic=True):
            report = find(PROBLEM)
            assert plan(PROBLEM).choice.algo == "steady"
        assert report.best.algo == "steady"
        assert report["fake:racy"].reason == "not deterministic"
        assert plan(PROBLEM).choice.algo == "racy"

    def test_workspace_limit(self, monkeypatch):
        big = Fake("big", workspace=1001, reported_ms=1e-6)
        only(monkeypatch, big, Fake("small", workspace=1000, delay=5))
        with pytest.warns(UserWarning, match="workspace limit excluded fake:big"):
            report = find(PROBLEM, policy=Policy(workspace_limit=1000))
        assert report.best.algo == "small"
        assert "1001" in report["fake:big"].reason
        assert big.calls == 0
        assert find(PROBLEM).best.algo == "big"

    @pytest.mark.parametrize("claimed", [None, 1e6])
    def test_no_warning_when_the_excluded_one_is_not_faster(self, monkeypatch, claimed):
        only(monkeypatch, Fake("big", workspace=1001, reported_ms=claimed), Fake("small"))
        assert find(PROBLEM, policy=Policy(workspace_limit=0)).best.algo == "small"

    def test_the_default_limit_is_the_devices(self, monkeypatch):
        limit = devices.workspace_limit(devices.CPU)
        only(monkeypatch, Fake("big", workspace=limit + 1), Fake("small", workspace=limit, delay=5))
        assert find(PROBLEM).best.algo == "small"

    def test_accumulating_operands_of_the_caller_are_never_touched(self, monkeypatch):
        """The search runs on scratch arrays, so the first accumulating call gives the right sum."""
        problem = ConvolutionProblem.parse(str(PROBLEM) + " acc")
        operands = arrays(problem)
        before = operands["out"].copy()
        made = plan(problem)
        assert np.array_equal(operands["out"], before)
        added = made(operands["x"], operands["w"], out=operands["out"]) - before
        plain = plan(PROBLEM)(operands["x"], operands["w"])
        np.testing.assert_allclose(added, plain, rtol=1e-4, atol=1e-4)

    def test_progress(self, monkeypatch):
        only(monkeypatch, Fake("a"), Fake("b"), Fake("c"))
        told = []
        find(PROBLEM, progress=lambda done, total: told.append((done, total)))
        assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]

    def test_rows_of_one_algo_have_names_of_their_own(self, monkeypatch):
        only(
            monkeypatch,
            Fake("gemm", 1.0, delay=30, math="fma"),
            Fake("gemm", 2.0, math="tensor_op"),
            Fake("fft", 3.0, delay=60, parameters=(("tile", 8),)),
            Fake("fft", 4.0, delay=90, parameters=(("tile", 16),)),
        )
        report = find(PROBLEM)
        assert sorted(row.label for row in report.rows) == [
            "fake:fft/tile=16",
            "fake:fft/tile=8",
            "fake:gemm/fma",
            "fake:gemm/tensor_op",
        ]
        assert report["fake:gemm"].label == "fake:gemm/tensor_op"
        assert run(report["fake:gemm"].plan()) == 2.0
        assert run(report["fake:fft/tile=16"].plan()) == 4.0
        with pytest.raises(KeyError, match="fake:gemm/fma"):
            report["fake:winograd"]

    def test_arguments(self, monkeypatch):
        with pytest.raises(TypeError, match="problem"):
            find("forward n1 c1 3 k1 3")
        with pytest.raises(ValueError, match="'pinned'"):
            find(PROBLEM, policy=Policy(mode="pinned"))
        with pytest.raises(ValueError, match="'nobody'"):
            find(PROBLEM, sources=["nobody"])
        with pytest.raises(ValueError, match="sources is empty"):
            find(PROBLEM, device="cpu", sources=[])
        only(monkeypatch, Fake("a"))
        monkeypatch.setattr(sources._registered["fake"], "devices", ("cuda",))
        with pytest.raises(ValueError, match="does not compute on cpu"):
            find(PROBLEM, device="cpu", sources=["fake"])

    def test_heuristic_lists_without_running(self, monkeypatch):
        fakes = [Fake("first", delay=50), Fake("second"), Fake("third", reason="no")]
        source = only(monkeypatch, *fakes)
        report = find(PROBLEM, policy=Policy(mode="heuristic"))
        assert [row.candidate.algo for row in report.rows] == ["first", "second", "third"]
        assert report.best.algo == "first"
        assert report.best.median_ms is None
        assert [fake.builds + fake.calls for fake in fakes] == [0, 0, 0]
        assert source.asked[0].mode == "heuristic"
        assert list(default_store().folder.glob("*")) == []


class TestPlan:
    def test_memory_then_folder_then_find(self, monkeypatch):
        fast = Fake("fast", 2.0)
        source = only(monkeypatch, Fake("slow", 1.0, delay=60), fast)
        made = plan(PROBLEM)
        assert run(made) == 2.0
        assert len(source.asked) == 1
        assert fast.builds == 1
        assert run(plan(PROBLEM)) == 2.0
        default_store().clear_memory()
        again = plan(PROBLEM)
        assert run(again) == 2.0
        assert len(source.asked) == 1
        assert again.choice == made.choice

    def test_different_policies_sources_and_problems_are_searched_apart(self, monkeypatch):
        source = only(monkeypatch, Fake("one", 1.0))
        plan(PROBLEM)
        plan(PROBLEM, policy=Policy(deterministic=True))
        plan(PROBLEM.with_direction("backward_data"))
        plan(PROBLEM)
        assert len(source.asked) == 3

        @flcuda.source("another")
        def another(problem):
            yield Fake("mine", 7.0).candidate("another")

        plan(PROBLEM)
        assert len(source.asked) == 4

    def test_an_internal_error_of_what_was_measured_is_an_error(self, monkeypatch):
        best = Fake("best", 1.0)
        only(monkeypatch, best, Fake("other", 2.0))
        made = plan(PROBLEM)
        assert run(made) == 1.0
        broken = CudnnError("cudnnBackendExecute", 4000, "engine")
        best.run_errors = lambda call: broken
        with pytest.raises(CudnnError, match="4000"):
            run(made)

    def test_heuristic_takes_the_first_that_runs(self, monkeypatch):
        first = Fake("first", build_error=REFUSED)
        broken = CudnnError("cudnnBackendExecute", 4000, "engine")
        second = Fake("second", run_errors=lambda call: REFUSED)
        sick = Fake("sick", run_errors=lambda call: broken)
        third = Fake("third", 3.0)
        fourth = Fake("fourth", 4.0)
        source = only(monkeypatch, Fake("known", reason="no"), first, second, sick, third, fourth)
        with policy(mode="heuristic"):
            made = plan(PROBLEM)
            assert run(made) == 3.0
            assert made.choice.algo == "third"
            assert run(plan(PROBLEM)) == 3.0
        assert fourth.builds == 0
        assert len(source.asked) == 1
        assert list(default_store().folder.glob("*")) == []

    def test_heuristic_prefers_a_measured_choice(self, monkeypatch):
        only(monkeypatch, Fake("slow", 1.0, delay=60), Fake("fast", 2.0))
        find(PROBLEM)
        assert run(plan(PROBLEM, policy=Policy(mode="heuristic"))) == 2.0

    def test_a_heuristic_choice_is_no_answer_for_find(self, monkeypatch):
        only(monkeypatch, Fake("slow", 1.0, delay=60), Fake("fast", 2.0))
        assert run(plan(PROBLEM, policy=Policy(mode="heuristic"))) == 1.0
        assert run(plan(PROBLEM)) == 2.0

    def test_pinned(self, monkeypatch, tmp_path):
        fast = Fake("fast", 2.0)
        only(monkeypatch, Fake("slow", 1.0, delay=60), fast)
        with policy(mode="pinned"), pytest.raises(FlcudaError, match="no choice is stored") as caught:
            plan(PROBLEM)
        assert str(PROBLEM) in str(caught.value)
        find(PROBLEM)["fake:slow"].pin(tmp_path)
        monkeypatch.setenv("FLCUDA_CHOICES", str(tmp_path))
        with policy(mode="pinned"):
            made = plan(PROBLEM)
            assert run(made) == 1.0
            fast.value = 5.0
            made._runner.run_errors = lambda call: REFUSED
            with pytest.raises(CudnnNotSupportedError):
                run(made)

    def test_a_pinned_choice_that_no_longer_works(self, monkeypatch):
        source = only(monkeypatch, Fake("a"))
        find(PROBLEM)
        source.fakes[:] = [Fake("b")]
        with policy(mode="pinned"), pytest.raises(FlcudaError, match=r"fake:a .*does not work here"):
            plan(PROBLEM)

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda source: source.fakes.pop(0),
            lambda source: setattr(source.fakes[0], "build_error", REFUSED),
            lambda source: setattr(source.fakes[0], "build_error", CudnnError("cudnnBackendFinalize", 1002, "version")),
        ],
    )
    def test_a_stored_choice_that_no_longer_works_is_searched_again(self, monkeypatch, spoil):
        source = only(monkeypatch, Fake("a", 1.0), Fake("b", 2.0, delay=40))
        assert run(plan(PROBLEM)) == 1.0
        spoil(source)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert run(plan(PROBLEM)) == 2.0
            assert run(plan(PROBLEM)) == 2.0
        assert [str(entry.message)[:29] for entry in caught] == ["the stored choice fake:a for "]
        default_store().clear_memory()
        assert plan(PROBLEM).choice.algo == "b"

    def test_while_capturing(self, monkeypatch):
        source = only(monkeypatch, Fake("a", 1.0))
        monkeypatch.setattr(devices, "is_capturing", lambda: True)
        for ask in (find, plan):
            with pytest.raises(FlcudaError, match="captured"):
                ask(PROBLEM)
        assert source.asked == []
        monkeypatch.setattr(devices, "is_capturing", lambda: False)
        find(PROBLEM)
        monkeypatch.setattr(devices, "is_capturing", lambda: True)
        made = plan(PROBLEM)
        assert run(made) == 1.0
        source.fakes[0].run_errors = lambda call: REFUSED
        with pytest.raises(CudnnNotSupportedError) as caught:
            run(made)
        assert "captured" in "".join(caught.value.__notes__)

    def test_without_memory_to_search_the_first_that_runs_is_used(self, monkeypatch):
        """A search needs operands of its own; training that fits without them goes on."""
        fakes = [Fake("known", reason="no"), Fake("first", 1.0, delay=50), Fake("second", 2.0)]
        source = only(monkeypatch, *fakes)

        def no_memory(self, seed=0, device=None):
            raise MemoryError("2 GB wanted")

        operands = arrays()
        with monkeypatch.context() as full:
            full.setattr(ConvolutionProblem, "random_arrays", no_memory)
            with pytest.warns(UserWarning, match=r"memory does not suffice to search.*2 GB wanted"):
                made = plan(PROBLEM)
        assert np.unique(made(**operands)) == 1.0
        assert [asked.mode for asked in source.asked] == ["find", "heuristic"]
        assert list(default_store().folder.glob("*")) == []
        # not the answer for the mode "find": it is searched for when there is memory
        assert run(plan(PROBLEM)) == 2.0

    def test_without_memory_to_search_the_arrays_of_the_search_are_free_again(self, monkeypatch):
        refs = []

        def no_memory(problem, inputs, device):
            refs.extend(weakref.ref(array) for array in inputs)
            raise MemoryError("2 GB wanted")

        monkeypatch.setattr(search, "Verifier", no_memory)
        fake = Fake("a", inputs=3)
        source = only(monkeypatch, fake)
        candidate = fake.candidate("fake")
        alive = []

        def build():
            alive.extend(ref() is not None for ref in refs)
            return fake

        monkeypatch.setattr(source, "candidates", lambda *_: [replace(candidate, build=build)])
        with pytest.warns(UserWarning, match="memory does not suffice"):
            plan(GRAPH)
        assert alive == [False] * 3

    def test_an_error_of_building_names_the_problem(self, monkeypatch):
        only(monkeypatch, Fake("a", build_error=CudnnError("cudnnCreate", 4000, "broken")))
        with pytest.raises(CudnnError) as caught:
            plan(PROBLEM, policy=Policy(mode="heuristic"))
        assert caught.value.__notes__ == [f"problem: {PROBLEM}; candidate: fake:a"]

    def test_a_second_process_and_another_batch_search_only_what_they_must(self, tmp_path):
        code = """
import logging, sys
from flcuda.finder import plan
from flcuda.finder.problem import ConvolutionProblem
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
for batch in sys.argv[1:]:
    for direction in ("forward", "backward_data", "backward_filter"):
        plan(ConvolutionProblem.parse(f"{direction} n{batch} c2 6x6 k3 3x3"), device="cpu")
"""

        def searched(*batches):
            command = [sys.executable, "-c", code, *batches]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
            assert done.stderr == ""
            return [line.split()[2:4] for line in done.stdout.splitlines() if line.startswith("searching")]

        def all_of(batch):
            return [[direction, batch] for direction in ("forward", "backward_data", "backward_filter")]

        assert searched("4", "4") == all_of("n4")
        assert searched("4", "5", "4") == all_of("n5")
        assert searched("5", "4") == []

    def test_threads_search_once(self, monkeypatch):
        source = only(monkeypatch, Fake("a", 1.0, delay=10))
        barrier = threading.Barrier(6)
        found = []

        def ask():
            barrier.wait()
            found.append(run(plan(PROBLEM)))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [1.0] * 6
        assert len(source.asked) == 1


class TestFalling:
    """Out of memory or not supported when a plan runs."""

    def failing(self, monkeypatch, error, **values):
        """A best candidate that was measured and then fails, and others."""
        best = Fake("best", 1.0, workspace=100, **values)
        fakes = [best, Fake("same", 2.0, delay=20, workspace=100), Fake("less", 3.0, delay=60, workspace=99)]
        only(monkeypatch, *fakes)
        return best, plan(PROBLEM)

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (REFUSED, 2.0),
            (MemoryError("full"), 3.0),
            (CudnnError("cudnnConvolutionForward", 4002, "device allocation"), 3.0),
        ],
    )
    def test_the_next_runs_and_is_remembered(self, monkeypatch, error, expected):
        best, made = self.failing(monkeypatch, error)
        assert run(made) == 1.0
        best.run_errors = lambda call: error
        with pytest.warns(UserWarning, match="is used instead"):
            assert run(made) == expected
        calls = best.calls
        assert run(made) == expected
        assert run(plan(PROBLEM)) == expected
        assert best.calls == calls
        best.run_errors = lambda call: None
        default_store().clear_memory()
        assert run(plan(PROBLEM)) == 1.0

    def test_what_a_failed_run_allocated_is_free_for_the_next(self, monkeypatch):
        """The traceback of the first error must not keep its copies of operands while others are tried."""
        _, made = self.failing(monkeypatch, None)
        copies = weakref.WeakSet()

        class Copy:
            pass

        def fails(a, b, out):
            copy = Copy()
            copies.add(copy)
            raise MemoryError("full")

        def looks(call):
            assert not copies

        made._runner = type("Hungry", (), {"workspace": 100, "__call__": staticmethod(fails)})()
        least = sources._registered["fake"].fakes[2]
        least.run_errors = looks
        with pytest.warns(UserWarning, match="fake:less is used instead"):
            assert run(made) == 3.0

    def test_a_restored_plan_falls_too(self, monkeypatch):
        best, _ = self.failing(monkeypatch, REFUSED)
        made = plan(PROBLEM)
        best.run_errors = lambda call: REFUSED
        with pytest.warns(UserWarning, match="fake:same is used instead"):
            assert run(made) == 2.0

    def test_a_measured_choice_that_fails_is_remembered_in_the_mode_heuristic_too(self, monkeypatch):
        best, _ = self.failing(monkeypatch, REFUSED)
        best.run_errors = lambda call: REFUSED
        quick = Policy(mode="heuristic")
        with pytest.warns(UserWarning, match="fake:same is used instead"):
            assert run(plan(PROBLEM, policy=quick)) == 2.0
        calls = best.calls
        assert run(plan(PROBLEM, policy=quick)) == 2.0
        assert run(plan(PROBLEM)) == 2.0
        assert best.calls == calls

    def test_nothing_left(self, monkeypatch):
        source = only(monkeypatch, Fake("a", 1.0), Fake("b", 2.0, delay=30))
        made = plan(PROBLEM)
        for fake in source.fakes:
            fake.run_errors = lambda call: REFUSED
        for _ in range(2):
            with pytest.raises(CudnnNotSupportedError) as caught:
                run(made)
            assert str(PROBLEM) in "".join(caught.value.__notes__)

    def test_another_error_is_the_callers(self, monkeypatch):
        best, made = self.failing(monkeypatch, REFUSED)
        best.run_errors = lambda call: CudnnError("cudnnConvolutionForward", 5000, "execution failed")
        with pytest.raises(CudnnError, match="5000") as caught:
            run(made)
        assert str(PROBLEM) in "".join(caught.value.__notes__)
        assert made.choice.algo == "best"

    def test_a_row_runs_only_itself(self, monkeypatch):
        best, _ = self.failing(monkeypatch, REFUSED)
        made = find(PROBLEM)["fake:best"].plan()
        best.run_errors = lambda call: REFUSED
        with pytest.raises(CudnnNotSupportedError):
            run(made)


class TestCall:
    def test_call_forms(self):
        made = plan(PROBLEM)
        given = arrays()
        expected = made(given["x"], given["w"])
        assert np.array_equal(made(x=given["x"], w=given["w"]), expected)
        assert np.array_equal(made(given["x"], w=given["w"]), expected)
        assert made(**given) is given["out"]
        assert np.array_equal(given["out"], expected)
        assert np.isfinite(expected).all()
        assert "reference" in repr(made)
        assert made.workspace >= 0

    @pytest.mark.parametrize("layout", ["nchw", "nhwc"])
    def test_a_new_output_has_the_problems_layout(self, layout):
        problem = ConvolutionProblem.create("backward_filter", (2, 3, 6, 5), (4, 3, 3, 3), layout=layout)
        out = plan(problem)(**{k: v for k, v in arrays(problem).items() if k != "out"})
        assert tuple(step // 4 for step in out.strides) == problem.w_strides

    @pytest.mark.parametrize(
        ("change", "error", "named"),
        [
            (lambda a: a | {"x": a["x"][:1]}, ValueError, "x has shape"),
            (lambda a: a | {"w": a["w"].astype(np.float64)}, TypeError, "w has dtype float64"),
            (lambda a: a | {"w": a["w"].astype(np.int8)}, TypeError, "w has dtype int8"),
            (lambda a: a | {"x": np.asfortranarray(a["x"])}, ValueError, "x has strides"),
            (lambda a: a | {"x": a["x"].tolist()}, TypeError, "x"),
            (lambda a: a | {"out": a["out"][:, :2]}, ValueError, "out has shape"),
            (lambda a: a | {"out": np.broadcast_to(a["out"][:1], a["out"].shape)}, ValueError, "out has strides"),
            (lambda a: {k: v for k, v in a.items() if k != "w"}, TypeError, "needs w"),
            (lambda a: a | {"y": a["out"]}, TypeError, "no input 'y'"),
        ],
    )
    def test_wrong_operands(self, change, error, named):
        made = plan(PROBLEM)
        with pytest.raises(error, match=named):
            made(**change(arrays()))

    def test_wrong_forms(self):
        made = plan(PROBLEM)
        given = arrays()
        with pytest.raises(TypeError, match="out="):
            made(given["x"], given["w"], given["out"])
        with pytest.raises(TypeError, match="'x' is given twice"):
            made(given["x"], given["w"], x=given["x"])
        given["out"].flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            made(**given)
        with pytest.raises(ValueError, match="out is None"):
            plan(ConvolutionProblem.parse(str(PROBLEM) + " acc"))(given["x"], given["w"])

    def test_alignment(self):
        memory = np.zeros(PROBLEM.x_shape[0] * 90 + 8, np.float32)
        offset = (-memory.ctypes.data // 4) % 4 + 1
        x = memory[offset:][:180].reshape(PROBLEM.x_shape)
        with pytest.raises(ValueError, match="x is not aligned to the 16 bytes"):
            plan(PROBLEM)(x, arrays()["w"])

    def test_another_thread(self):
        made = plan(PROBLEM)
        errors = []

        def call():
            try:
                made(**arrays())
            except FlcudaError as error:
                errors.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert "another thread" in errors[0]


class TestUserSource:
    def test_ranked_stored_and_restored(self, monkeypatch):
        monkeypatch.setattr(sources, "_registered", {})
        fake = Fake("instant", 7.0)

        @flcuda.source("mine")
        def mine(problem):
            """Docstring."""
            assert problem == PROBLEM
            yield fake.candidate("mine")

        assert mine.__doc__ == "Docstring."
        report = find(PROBLEM, device="cpu")
        assert isinstance(report, FindReport)
        assert {row.candidate.source for row in report.rows} == {"mine", "reference"}
        assert run(find(PROBLEM, device="cpu", sources=["mine"])["mine:instant"].plan()) == 7.0
        chosen = report["mine:instant"].choice
        assert sources.source_named("mine").restore(PROBLEM, chosen, devices.CPU).identity == chosen.identity
        fake.algo = "other"
        with pytest.raises(LookupError, match="no longer yields"):
            sources.source_named("mine").restore(PROBLEM, chosen, devices.CPU)
        del sources._registered["mine"]
        with pytest.raises(ValueError, match="'mine' is not known"):
            sources.source_named("mine")

    def test_bad_registrations(self, monkeypatch):
        monkeypatch.setattr(sources, "_registered", {})
        for name in ("legacy", "reference", "a b", ""):
            with pytest.raises(ValueError, match="source name"):
                flcuda.source(name)
        with pytest.raises(ValueError, match="'tpu'"):
            flcuda.source("mine", devices=("tpu",))
        for argument in ("devices", "problems"):
            with pytest.raises(ValueError, match=f"{argument} is empty"):
                flcuda.source("mine", **{argument: ()})
        with pytest.raises(TypeError, match=r"problems .* must be a tuple of classes, \(GraphProblem,\)"):
            flcuda.source("mine", problems=GraphProblem)

        @flcuda.source("mine", devices=("cpu",))
        def mine(problem):
            yield Candidate("yours", "a", "fma", 0, True, build=lambda: None)

        with pytest.raises(ValueError, match="'yours'"):
            find(PROBLEM, device="cpu")

    def test_the_devices_of_a_source(self, monkeypatch):
        monkeypatch.setattr(sources, "_registered", {})
        flcuda.source("gpu-only", devices=("cuda",))(lambda problem: ())
        assert [source.name for source in sources.sources_for(devices.CPU, PROBLEM)] == ["reference"]
        names = [source.name for source in sources.sources_for(devices.Device("cuda"), PROBLEM)]
        assert names == ["graph", "legacy", *sources.REWRITES, "depthwise", "gpu-only"]


@pytest.mark.parametrize("direction", ["forward", "backward_data", "backward_filter"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_every_reference_candidate_computes_the_same(direction, dtype):
    """The rows of a report are different ways to one result."""
    problem = ConvolutionProblem.create(
        direction, (2, 4, 9, 7), (6, 2, 3, 3), dtype=dtype, padding=[(1, 0), (2, 1)], stride=(2, 1), groups=2
    )
    report = find(problem, device="cpu")
    given = {k: v for k, v in arrays(problem).items() if k != "out"}
    results = [row.plan()(**given).astype(np.float64) for row in report.rows]
    assert np.abs(results[0]).max() > 1
    tolerance = {"float64": 1e-12, "float32": 1e-4, "float16": 3e-2}[dtype]
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=tolerance, atol=tolerance)


GRAPH = GraphProblem.parse(
    "graph; x float32 2x3x4x5; b float32 1x3x1x1; s float32 1x3x1x1; t = add(%x, %b); y = mul(%t, %s); z = tanh(%y); "
    "out z; out y"
)


class Verdicts:
    """A verifier that says what the test wants of each candidate."""

    def __init__(self, monkeypatch, **verdicts) -> None:
        self.verdicts = verdicts
        self.made = []
        self.checked = []
        monkeypatch.setattr(search, "Verifier", self)

    def __call__(self, problem, inputs, device):
        self.made.append((problem, [array.shape for array in inputs], device))
        return self

    def check(self, runner, *, deterministic):
        self.checked.append((runner.algo, deterministic, runner.calls))
        verdict = self.verdicts.get(runner.algo, Verification(0.25, 1.0, True, None))
        if isinstance(verdict, Exception):
            raise verdict
        return verdict


class TestVerify:
    def test_what_is_wrong_is_never_chosen(self, monkeypatch):
        wrong = Verification(math.inf, 1e-6, None, "largest error inf at y[0, 1, 2, 3]")
        verdicts = Verdicts(monkeypatch, fast=wrong)
        fakes = [Fake("fast", deterministic=False), Fake("slow", delay=5), Fake("known", reason="no")]
        only(monkeypatch, *fakes)
        report = find(PROBLEM, verify=True)
        assert verdicts.made == [(PROBLEM, [PROBLEM.shape_of("x"), PROBLEM.shape_of("w")], devices.CPU)]
        assert verdicts.checked == [("fast", False, 1), ("slow", True, 1)]
        assert report.best.algo == "slow"
        assert fakes[0].calls == 1
        assert report["fake:fast"].reason == "largest error inf at y[0, 1, 2, 3]"
        assert report["fake:fast"].runner is None
        assert report["fake:fast"].verification is wrong
        assert report["fake:known"].verification is None
        rows = {row["algo"]: row for row in json.loads(report.to_json())["rows"]}
        assert (rows["slow"]["error"], rows["slow"]["bound"], rows["slow"]["repeats"]) == (0.25, 1.0, True)
        assert (rows["fast"]["error"], rows["fast"]["bound"]) == (None, 1e-6)
        assert (rows["known"]["error"], rows["known"]["bound"]) == (None, None)
        assert "largest error inf" in str(report)

    def test_by_default_graphs_only(self, monkeypatch):
        verdicts = Verdicts(monkeypatch)
        only(monkeypatch, Fake("a", inputs=2))
        find(PROBLEM)
        plan(PROBLEM.with_direction("backward_data"))
        assert verdicts.made == []
        only(monkeypatch, Fake("a", inputs=3))
        find(GRAPH, verify=False)
        assert verdicts.made == []
        find(GRAPH)
        assert [entry[0] for entry in verdicts.made] == [GRAPH]
        default_store().clear_memory()
        for path in default_store().folder.glob("graph-*.json"):
            path.unlink()
        plan(GRAPH)
        assert [entry[0] for entry in verdicts.made] == [GRAPH, GRAPH]

    def test_what_was_not_verified_is_no_answer_for_a_plan_that_is(self, monkeypatch):
        Verdicts(monkeypatch, fast=Verification(3.0, 1.0, True, "y at (0, 0) is 3, not 0"))
        only(monkeypatch, Fake("fast", inputs=3), Fake("right", delay=3, inputs=3))
        assert find(GRAPH, verify=False).best.algo == "fast"
        assert plan(GRAPH).choice.algo == "right"
        find(GRAPH, verify=False)
        default_store().clear_memory()
        assert plan(GRAPH).choice.algo == "right"
        # a convolution is not verified by a plan either
        find(PROBLEM, verify=False)
        assert len(list(default_store().folder.glob("forward-*.json"))) == 1

    @pytest.mark.parametrize("error", [REFUSED, MemoryError("no room")])
    def test_what_fails_meanwhile_is_a_reason(self, monkeypatch, error):
        Verdicts(monkeypatch, first=error)
        only(monkeypatch, Fake("first"), Fake("second", delay=3))
        report = find(PROBLEM, verify=True)
        assert report.best.algo == "second"
        assert str(error) in report["fake:first"].reason

    def test_nothing_right(self, monkeypatch):
        Verdicts(monkeypatch, a=Verification(3.0, 1.0, True, "guard bytes were written behind y"))
        only(monkeypatch, Fake("a", inputs=3))
        for ask in (find, plan):
            with pytest.raises(ValueError, match="fake:a: guard bytes were written behind y"):
                ask(GRAPH)
        assert list(default_store().folder.glob("*")) == []

    def test_not_in_the_mode_heuristic(self, monkeypatch):
        verdicts = Verdicts(monkeypatch)
        only(monkeypatch, Fake("a"))
        with pytest.raises(ValueError, match="verify is True"):
            find(PROBLEM, policy=Policy(mode="heuristic"), verify=True)
        find(PROBLEM, policy=Policy(mode="heuristic"))
        assert verdicts.made == []

    def test_a_wrong_answer_is_found_for_real(self, monkeypatch):
        right = reference.Columns(PROBLEM, "im2col", reference.CHUNK)
        source = only(monkeypatch, Fake("wrong", 2.0))
        candidate = Fake("right").candidate("fake")
        monkeypatch.setattr(
            source,
            "candidates",
            lambda *_: [source.fakes[0].candidate("fake"), replace(candidate, build=lambda: right)],
        )
        report = find(PROBLEM, verify=True)
        assert report.best.algo == "right"
        assert report["fake:wrong"].reason is not None
        found = report["fake:right"].verification
        assert found.error <= found.bound


class Climbing(FakeSource):
    """A source whose candidates have neighbours: one knob lower, down to where it is fastest."""

    open = 0

    @contextlib.contextmanager
    def climbing(self):
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def around(self, problem, candidate, policy, device):
        assert self.open == 1
        self.looked = [*getattr(self, "looked", []), candidate.algo]
        for step in (-1, 1):
            number = int(candidate.algo) + step
            yield Fake(str(number), delay=abs(number - 3)).candidate(self.name)


class TestWide:
    def climbing(self, monkeypatch, *fakes):
        only(monkeypatch)
        source = Climbing(list(fakes))
        monkeypatch.setattr(sources, "_registered", {source.name: source})
        return source

    def test_it_climbs_to_where_nothing_new_leads(self, monkeypatch):
        Verdicts(monkeypatch)
        source = self.climbing(monkeypatch, Fake("6", delay=3), Fake("50", delay=47))
        seen = []
        report = find(PROBLEM, policy=Policy(effort="wide"), progress=lambda done, total: seen.append((done, total)))
        assert report.best.algo == "3"
        assert len(source.looked) == len(set(source.looked))
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1] == len(report.rows)
        assert len({row.label for row in report.rows}) == len(report.rows)

    def test_fast_climbs_too_from_two_leaders(self, monkeypatch):
        source = self.climbing(monkeypatch, Fake("30", delay=27), Fake("6", delay=3), Fake("40", delay=37))
        assert find(PROBLEM).best.algo == "3"
        assert source.looked[:2] == ["6", "30"]
        assert "40" not in source.looked
        assert source.open == 0

    def test_a_search_that_fails_leaves_none_open(self, monkeypatch):
        source = self.climbing(monkeypatch, Fake("6", delay=3))
        monkeypatch.setattr(search.measure, "operand_sets", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            find(PROBLEM)
        assert source.open == 0

    def test_it_ends(self, monkeypatch):
        Verdicts(monkeypatch)
        self.climbing(monkeypatch, Fake("600", delay=900))
        report = find(PROBLEM, policy=Policy(effort="wide"))
        assert int(report.best.algo) == 600 - search.ROUNDS

    def test_what_may_win_is_verified(self, monkeypatch):
        wrong = Verification(math.inf, 1e-6, None, "wrong at y[0, 1, 2, 3]")
        verdicts = Verdicts(monkeypatch, **{"3": wrong})
        self.climbing(monkeypatch, Fake("4", delay=1))
        report = find(PROBLEM, policy=Policy(effort="wide"))
        assert report["fake:3"].reason == "wrong at y[0, 1, 2, 3]"
        assert report.best.algo in ("2", "4")
        assert {algo for algo, *_ in verdicts.checked} >= {"3", report.best.algo}

    def test_a_neighbour_that_the_policy_forbids_is_a_row_with_the_reason(self, monkeypatch):
        Verdicts(monkeypatch)
        source = self.climbing(monkeypatch, Fake("4", delay=1))
        monkeypatch.setattr(
            source, "around", lambda *args: [Fake("3", workspace=5000).candidate(source.name)], raising=False
        )
        report = find(PROBLEM, policy=Policy(effort="wide", workspace_limit=4999))
        assert report.best.algo == "4"
        assert report["fake:3"].reason == "workspace of 5000 bytes is above the limit of 4999"


class TestMaxError:
    def test_what_is_less_exact_is_not_chosen(self, monkeypatch):
        rough = Verification(0.25, 1.0, True, None, 1e-3)
        Verdicts(monkeypatch, rough=rough)
        only(monkeypatch, Fake("rough"), Fake("exact", delay=5))
        assert find(PROBLEM, policy=Policy(max_error=1e-4)).best.algo == "exact"
        report = find(PROBLEM, policy=Policy(max_error=1e-4))
        assert "error of 0.001 is above the 0.0001" in report["fake:rough"].reason
        assert find(PROBLEM, policy=Policy(max_error=1e-2)).best.algo == "rough"
        assert plan(PROBLEM, policy=Policy(max_error=1e-5)).choice.algo == "exact"

    def test_it_needs_verification(self, monkeypatch):
        only(monkeypatch, Fake("a"))
        with pytest.raises(ValueError, match=r"verify is False, and policy.max_error 0.1 needs"):
            find(PROBLEM, policy=Policy(max_error=0.1), verify=False)


class TestStoring:
    def test_not_when_told_so(self, monkeypatch):
        only(monkeypatch, Fake("a"))
        report = find(PROBLEM, store=False)
        assert default_store().get(report.key) is None
        find(PROBLEM)
        assert default_store().get(report.key) == report.best


class TestGraph:
    def test_operands_in_order_and_several_outputs(self, monkeypatch):
        Verdicts(monkeypatch)
        fake = Fake("a", 3.0, inputs=3)
        only(monkeypatch, fake)
        report = find(GRAPH)
        assert [array.shape for array in fake.operands] == [GRAPH.shape_of(name) for name in GRAPH.operands]
        assert len(list(default_store().folder.glob("graph-*.json"))) == 1
        default_store().clear_memory()
        assert plan(GRAPH).choice == report.best
        again = Choice.from_json(report.best.to_json())
        assert again == report.best
        assert again.problem == GRAPH

    def test_a_restored_plan_falls_to_what_is_verified_only(self, monkeypatch):
        verdicts = Verdicts(monkeypatch)
        best = Fake("best", inputs=3)
        only(monkeypatch, best, Fake("wrong", delay=5, inputs=3), Fake("right", delay=5, inputs=3))
        find(GRAPH)
        default_store().clear_memory()
        made = plan(GRAPH)
        assert made.choice.algo == "best"
        verdicts.verdicts["wrong"] = Verification(math.inf, 1e-6, None, "y is nan")
        best.run_errors = lambda call: REFUSED
        arrays = GRAPH.random_arrays(device="cpu")
        with pytest.warns(UserWarning, match="fake:right is used instead"):
            made(*(arrays[name] for name in GRAPH.inputs))
        assert made.choice.algo == "right"

    def test_a_source_that_does_not_know_it_is_not_asked(self, monkeypatch):
        Verdicts(monkeypatch)
        source = only(monkeypatch, Fake("a", inputs=3))
        source.kinds = (ConvolutionProblem,)
        with pytest.raises(ValueError, match="there is none"):
            find(GRAPH)
        with pytest.raises(ValueError, match="sources: 'fake' does not know a GraphProblem"):
            find(GRAPH, sources=["fake"])
        source.kinds = (GraphProblem,)
        assert find(GRAPH).best.algo == "a"
        assert [entry.name for entry in sources.sources_for(devices.CPU, PROBLEM)] == []

    def test_a_users_source(self, monkeypatch):
        Verdicts(monkeypatch)
        only(monkeypatch, Fake("a", inputs=3))
        seen = []

        @flcuda.source("convolutions")
        def convolutions(problem):
            seen.append(problem)
            return ()

        @flcuda.source("graphs", problems=(GraphProblem,))
        def graphs(problem):
            yield Fake("mine", inputs=3).candidate("graphs")

        assert len(find(GRAPH)) == 2
        assert seen == []
        with pytest.raises(TypeError, match="'graph' is no class of Problems"):
            flcuda.source("more", problems=("graph",))

    def test_only_tensor_cores(self, monkeypatch):
        only(monkeypatch, Fake("62", math="tensor_op", reason="uses tensor cores, which math 'fma' forbids", inputs=3))
        with pytest.raises(ValueError, match=r"need a Problem of math 'tensor_op' \(TF32 on float32 operands\)"):
            find(GRAPH)

    def test_building_and_the_first_run_are_told_apart(self, monkeypatch):
        def slowly(call):
            if call == 1:
                time.sleep(0.02)

        only(monkeypatch, Fake("a", prepared_ms=500.0, run_errors=slowly), Fake("b", reason="no"))
        report = find(PROBLEM)
        row = report["fake:a"]
        assert 500.0 <= row.build_ms < 515.0
        assert row.first_run_ms >= 20.0
        assert report["fake:b"].build_ms is None
        assert report["fake:b"].first_run_ms is None
        value = json.loads(report.to_json())["rows"][0]
        assert (value["build_ms"], value["first_run_ms"]) == (row.build_ms, row.first_run_ms)


def test_an_index_is_an_operand():
    """What a pooling took, written by one graph and read by another."""
    forward = GraphProblem.parse(
        "graph; x float32 2x3x6x6; y, i = resample_forward(max, %x, window=2, stride=2, index=True); out y; out i"
    )
    backward = GraphProblem.parse(
        "graph; dy float32 2x3x3x3; i int8 2x3x3x3; "
        "dx = resample_backward(max, %dy, (2, 3, 6, 6), window=2, stride=2, index=%i); out dx"
    )
    x = forward.random_arrays(device="cpu")["x"]
    y, index = plan(forward, device="cpu")(x)
    windows = x.reshape(2, 3, 3, 2, 3, 2)
    assert index.dtype == np.int8
    assert (y == windows.max(axis=(3, 5))).all()
    dy = backward.random_arrays(device="cpu")["dy"]
    dx = plan(backward, device="cpu")(dy, index)
    assert (dx.reshape(windows.shape).sum(axis=(3, 5)) == dy).all()
    assert (dx[dx != 0].size, (x * (dx != 0)).sum()) == (dy.size, pytest.approx(y.sum(), rel=1e-5))
    with pytest.raises(TypeError, match="i has dtype int32, the plan needs int8"):
        plan(backward, device="cpu")(dy, index.astype(np.int32))
