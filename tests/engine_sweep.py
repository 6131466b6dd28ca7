"""Runs every engine of the graph API that may be used for a problem, and its neighbours in knob space, against float64.

Known faults of cuDNN (flcuda/finder/errata.py) come from such sweeps::

    PYTHONPATH=. python tests/engine_sweep.py --seconds 600 --around 3 "forward n4 c20 13x11 k24 3x3 p1 float16 nhwc"

An engine may end the CUDA context, or the process. So the engines run in a process of their own, which prints what it
is about to run; the process is started again behind what ended it. Each line of the output is one fault: problem,
engine, knobs, what is wrong. Without problems, random ones are swept until the time is over.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from random_problems import random_problem

from flcuda import device as devices
from flcuda.errors import CudnnNotSupportedError, FlcudaError
from flcuda.finder.candidate import Candidate
from flcuda.finder.policy import Policy
from flcuda.finder.problem import ConvolutionProblem
from flcuda.finder.sources import graph
from flcuda.finder.verify import Verifier

ROOT = Path(__file__).parents[1]
SLACK_S = 60
"""A process that takes so much longer than it may hangs."""


@dataclass(frozen=True)
class Sweep:
    """What a sweep found.

    Attributes:
        ran: how many candidates ran.
        faults: a line each: problem, engine, knobs, what is wrong.
    """

    ran: int
    faults: tuple[str, ...]


def sweep(lines: Sequence[str], *, seconds: float, around: int = 1, compiled: int = 2, seed: int = 0) -> Sweep:
    """Sweeps problems in other processes.

    Args:
        lines: the problems; none for random ones.
        seconds: stop after so long, in the middle of a problem if need be.
        around: of so many candidates of each problem, one an engine, the neighbours are run too.
        compiled: plans that need a compiler, for each problem and for each of its candidates with neighbours.
        seed: of the random problems and of the data.

    Returns:
        What was found.

    Raises:
        RuntimeError: a process ended outside of any candidate.
    """
    end = time.monotonic() + seconds
    faults: list[str] = []
    done: list[str] = []
    ran = 0
    while True:
        left = end - time.monotonic()
        options = [
            "--seconds",
            f"{left:.1f}",
            "--around",
            str(around),
            "--compiled",
            str(compiled),
            "--seed",
            str(seed),
        ]
        command = [sys.executable, __file__, "--child", *options]
        asked = json.dumps({"lines": list(lines), "skipped": done})
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )
        try:
            out, err = process.communicate(asked, timeout=max(0.0, left) + SLACK_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err = f"hung; {err}"
        current = ""
        for line in out.splitlines():
            word, _, rest = line.partition(" ")
            if word == "run":
                current = rest
                done.append(rest)
            elif word == "fault":
                faults.append(f"{current}: {rest}")
            if word in ("right", "refused", "fault"):
                ran += word != "refused"
                current = ""
        if process.returncode == 0:
            return Sweep(ran, tuple(faults))
        if not current:
            raise RuntimeError(f"the sweep ended with {process.returncode} outside of any candidate: {err[-2000:]}")
        faults.append(f"{current}: ended the process with {process.returncode}: {err.strip()[-300:]}")
        if end <= time.monotonic():
            return Sweep(ran, tuple(faults))


def _problems(lines: Sequence[str], seed: int) -> Iterator[ConvolutionProblem]:
    yield from map(ConvolutionProblem.parse, lines)
    index = 0
    while not lines:
        yield random_problem(np.random.default_rng([seed, index]))
        index += 1


def _candidates(problem: ConvolutionProblem, around: int, device: devices.Device) -> Iterator[Candidate]:
    """Gives what a wide search is offered, then the neighbours of the first candidate of each of some engines."""
    source, policy = graph.GraphSource(), Policy(effort="wide")
    with source.climbing():
        try:
            offered = list(source.candidates(problem, policy, device))
        except CudnnNotSupportedError:
            return
        usable = [candidate for candidate in offered if candidate.reason is None]
        yield from usable
        first = {candidate.algo: candidate for candidate in reversed(usable) if candidate.parameters}
        for candidate in list(reversed(first.values()))[:around]:
            yield from source.around(problem, candidate, policy, device)


def _child(lines: Sequence[str], skipped: Sequence[str], end: float, around: int, seed: int) -> None:
    device = devices.resolve("cuda")
    with device.use():
        for problem in _problems(lines, seed):
            arrays = problem.random_arrays(seed=seed, device=device)
            verifier = Verifier(problem, tuple(arrays[name] for name in problem.inputs), device)
            for candidate in _candidates(problem, around, device):
                if time.monotonic() > end:
                    return
                name = f"{problem} | engine {candidate.algo} {json.dumps(dict(candidate.parameters))}"
                if name in skipped:
                    continue
                print(f"run {name}", flush=True)
                try:
                    found = verifier.check(candidate.build(), deterministic=candidate.deterministic)
                    devices.synchronize(device)
                except CudnnNotSupportedError as error:
                    print("refused", str(error).replace("\n", " "), flush=True)
                    continue
                except FlcudaError as error:
                    print("fault", str(error).replace("\n", " "), flush=True)
                    continue
                reason = found.reason
                if reason is None and found.repeats is False:
                    reason = "is called deterministic, and a second run gave other bits"
                print("right" if reason is None else f"fault {reason}".replace("\n", " "), flush=True)


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", nargs="*")
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after so long")
    parser.add_argument("--around", type=int, default=1, help="engines of each problem whose neighbours are run")
    parser.add_argument("--compiled", type=int, default=2, help="plans of each problem that need a compiler")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        graph.COMPILED = graph.COMPILED_AROUND = arguments.compiled
        asked = json.load(sys.stdin)
        end = time.monotonic() + arguments.seconds
        _child(asked["lines"], asked["skipped"], end, arguments.around, arguments.seed)
        return 0
    found = sweep(
        arguments.problems,
        seconds=arguments.seconds,
        around=arguments.around,
        compiled=arguments.compiled,
        seed=arguments.seed,
    )
    for line in found.faults:
        print(line)
    print(f"{found.ran} candidates ran, {len(found.faults)} faults")
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(_main())
