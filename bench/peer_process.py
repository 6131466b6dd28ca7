"""Runs the scripts of `peers/` that train a ResNet, each in a process of its own that ends when its time is up."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

PEERS = Path(__file__).parent / "peers"
ROOT = Path(__file__).parents[1]

sys.path.insert(0, str(PEERS))

from steps import Request  # noqa: E402

SIDES = ("flcuda", "torch", "jax")
SCRIPTS = {side: PEERS / f"{side}_resnet.py" for side in SIDES}

EXIT_S = 15.0
"""Seconds that a process may take to end after its last answer."""

Answer = dict[str, Any]


@dataclass
class Told:
    """What a process said.

    Attributes:
        values: the figures by name; the newest counts.
        samples: in order.
        curves: losses by seed.
        why: why it said no more; None: it was done.
        ended: "done", "timeout" or "error".
        wall_s: from its start to its end.
    """

    values: Answer = field(default_factory=dict)
    samples: list[Answer] = field(default_factory=list)
    curves: dict[str, list[float]] = field(default_factory=dict)
    why: str | None = None
    ended: str = "done"
    wall_s: float = 0.0

    def add(self, line: Answer) -> None:
        line = dict(line)
        if "sample" in line:
            self.samples.append(line.pop("sample"))
        if "losses" in line:
            self.curves[str(line.pop("seed"))] = line.pop("losses")
        self.values.update(line)


def environment(caches: Path | None, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Gives a process's variables.

    Args:
        caches: where every library keeps what it compiled or found; None: where they always do.
        more: counts before all.
    """
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join(part for part in (str(ROOT), found.get("PYTHONPATH")) if part)
    # cuDNN's legacy path is a mode: what is set outside must not choose it.
    found.pop("TORCH_CUDNN_V8_API_DISABLED", None)
    if caches is not None:
        places = {
            "FLCUDA_CHOICES": "choices",
            "TORCHINDUCTOR_CACHE_DIR": "inductor",
            "TRITON_CACHE_DIR": "triton",
            "JAX_COMPILATION_CACHE_DIR": "jax",
        }
        found.update({name: str(caches / folder) for name, folder in places.items()})
    return {**found, **(more or {})}


def last_line(errors: IO[bytes]) -> str:
    """Gives the last line that a process wrote to standard error, which of an exception is what it says."""
    errors.seek(0)
    lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][-600:] if lines else ""


def end(process: "subprocess.Popen[Any]") -> None:
    """Ends a process and all that it started, which are a group of their own."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            continue
    # Those that it left behind, too.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def ask(
    command: Sequence[str],
    request: Answer,
    *,
    env: Mapping[str, str],
    limit_s: float,
    on_line: Callable[[Answer], None] | None = None,
) -> Told:
    """Runs a process on a request until it is done, fails, or its time is up.

    Args:
        command: of the process.
        request: a `steps.Request`, by its fields; "spawned" is added.
        env: all of its variables.
        limit_s: seconds.
        on_line: is given each answer as it comes.
    """
    told = Told()
    start = time.perf_counter()
    lines: queue.Queue[bytes | None] = queue.Queue()
    with tempfile.TemporaryFile() as errors:
        spawned = time.time()
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=env,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        output = process.stdout

        def read() -> None:
            for line in output:
                lines.put(line)
            lines.put(None)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps({**request, "spawned": spawned}).encode())
                process.stdin.close()
            _listen(told, lines, start + limit_s, on_line)
            if told.ended != "timeout":
                # It is about to end by itself: its output has, or it was done.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(EXIT_S)
            else:
                told.why = f"its {limit_s:.0f} s were used up while: {told.values.get('stage', 'importing')}"
        finally:
            end(process)
            reader.join(5.0)
            output.close()
        if told.ended == "error":
            told.why = f"exit status {process.returncode}: {last_line(errors)}"
    told.wall_s = time.perf_counter() - start
    return told


def _listen(
    told: Told, lines: "queue.Queue[bytes | None]", until: float, on_line: Callable[[Answer], None] | None
) -> None:
    while True:
        try:
            line = lines.get(timeout=max(until - time.perf_counter(), 0.0))
        except queue.Empty:
            told.ended = "timeout"
            return
        if line is None:
            told.ended = "error"
            return
        answer = json.loads(line)
        told.add(answer)
        if on_line is not None:
            on_line(answer)
        if answer.get("done"):
            return


def ask_side(
    side: str,
    request: Request,
    *,
    pythons: Mapping[str, str],
    limit_s: float,
    caches: Path | None,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[Answer], None] | None = None,
) -> Told:
    """Asks one of SIDES; `env` are variables of the mode."""
    variables = dict(env or {})
    if side == "torch" and "legacy" in request.options:
        variables["TORCH_CUDNN_V8_API_DISABLED"] = "1"
    if side == "jax":
        variables.setdefault("JAX_PLATFORMS", request.device)
        # A program that compiled fast is kept too, so that the cache is full after one run.
        variables.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    command = [pythons.get(side, sys.executable), str(SCRIPTS[side])]
    return ask(command, request.to_json(), env=environment(caches, variables), limit_s=limit_s, on_line=on_line)
