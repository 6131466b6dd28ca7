"""1000 random convolutions by both CUDA sources, compared for equality. See tests/random_problems.py.

Of each tenth problem every candidate of a fast search runs; of the others the first three that run of each source, in
the order without measuring. Problems are spread over threads, each with a handle and a stream of its own, because most
of the time goes into building plans.
"""

import concurrent.futures
import os
import re
import traceback

import pytest
from random_problems import Case, random_problems

from flcuda import device as devices
from flcuda.cudnn import resources
from flcuda.errors import CudnnNotSupportedError
from flcuda.finder.policy import Policy
from flcuda.finder.sources.graph import GraphSource, operation_graph
from flcuda.finder.sources.legacy import LegacySource

PARTS = 10
COUNT = 100
FIRST = 3
LONGEST_LIST = 40


@pytest.fixture(scope="module")
def workers():
    # Threads that stay keep their handles.
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        yield pool


def inexact(problem, candidate):
    """Whether a candidate transforms what it multiplies."""
    if candidate.source == "legacy":
        return re.search("FFT|WINOGRAD", candidate.algo) is not None
    engine = operation_graph(problem, resources.handle()).engine(int(candidate.algo))
    return any(re.search("fft|winograd", note) for note in engine.numerical_notes)


def fault_of(case, candidate, stream):
    """Runs a candidate and says what is wrong with its result."""
    case.reset()
    candidate.build()(*case.arrays)
    stream.synchronize()
    fault = case.fault()
    if fault is not None and inexact(case.problem, candidate):
        fault = case.fault(exact=False)
    return fault


def work(problem, rng, thorough):
    """Runs the candidates of a problem; returns how many ran, and what is wrong with which."""
    device = devices.resolve("cuda")
    wrong = []
    ran = 0
    with device.use(), devices.cupy().cuda.Stream(non_blocking=True) as stream:
        case = Case(problem, rng, device)
        for source in (LegacySource(), GraphSource()):
            try:
                found = list(source.candidates(problem, Policy("find" if thorough else "heuristic"), device))
            except CudnnNotSupportedError:
                continue
            done = 0
            for candidate in found:
                if candidate.reason is not None or (done == FIRST and not thorough):
                    continue
                try:
                    fault = fault_of(case, candidate, stream)
                except CudnnNotSupportedError:
                    # What has not been measured may turn out not to run.
                    continue
                except Exception as error:
                    fault = f"{type(error).__name__}: {error}"
                done += 1
                if fault is not None:
                    wrong.append(f"{candidate.id} {candidate.math} {dict(candidate.parameters)}: {fault}")
            ran += done
        # Nothing of this thread may be in use when its memory is handed on.
        stream.synchronize()
    return ran, wrong


@pytest.mark.parametrize("part", range(PARTS))
def test_every_result_is_exact(part, request, workers):
    seed = request.config.getoption("--seed")
    problems = list(random_problems(seed, part, COUNT))
    running = [workers.submit(work, problem, rng, index % 10 == 0) for index, (problem, rng) in enumerate(problems)]
    failures = []
    total = 0
    for (problem, _), future in zip(problems, running, strict=True):
        try:
            ran, wrong = future.result()
        except Exception:
            ran, wrong = 0, [traceback.format_exc(limit=-3)]
        first, _, out = problem.operands
        if not ran and not wrong and problem.dtype_of(out) == problem.dtype_of(first):
            wrong = ["nothing ran"]
        failures += [f"{problem}\n  {each}" for each in wrong]
        total += ran
    text = "\n".join(failures[:LONGEST_LIST])
    assert not failures, f"seed {seed}, part {part}: {len(failures)} of {total} runs are wrong\n{text}"
    assert total > 2 * COUNT
