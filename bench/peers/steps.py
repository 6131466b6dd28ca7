"""What the processes that train a ResNet for the benchmarks have in common: flcuda's own, PyTorch's and JAX's.

Each reads one JSON object from standard input, a Request, and prints one JSON object a line, at once, so that what was
measured survives a process that is ended when its time is up:

    {"stage": ...}          what is being done now
    {"import_s": ...}       and other figures, each under its name
    {"sample": {...}}       one timed run of `steps` steps
    {"seed": ..., "losses": [...]}    one training of a curve
    {"done": true}          the last

All draw the same images and labels from the same seed, and none needs another's library: this file needs NumPy alone.
Whatever a library prints goes to standard error.
"""

import dataclasses
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

LR = 1e-4
"""So small that the one batch is not learnt by heart: its gradients would become zeros, which are cheap."""

MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
INIT_SCALE = 65536.0
"""Of the loss in float16; it doubles after 2000 good steps and halves after a bad one."""

BLOCKS = {"resnet10": (1, 1, 1, 1), "resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3)}
"""Blocks of each stage. resnet10 is for trials; resnet50 is of bottleneck blocks, stride in the 3x3 convolution."""

BOTTLENECK = frozenset({"resnet50"})

Answer = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What a process is to do.

    Attributes:
        network: of BLOCKS.
        precision: "float32" (strict: no TF32), "tf32", "float16" or "bfloat16".
        batch: images a step.
        how: the mode, in the words of the library.
        options: of the mode.
        device: "cuda" or "cpu".
        size: pixels of an image's side.
        in_channels: of an image.
        classes: of the labels.
        stem: "imagenet" or "small".
        lr: learning rate.
        warmup: steps between the first and the timed ones.
        samples: timed runs; 0: all ends with the first step.
        steps: in each of them.
        spawned: when the process was started, seconds since the epoch.
        curve: for a curve: {"data": file, "states": {seed: file or None}, "steps": number}.
    """

    network: str
    precision: str
    batch: int
    how: str
    options: tuple[str, ...] = ()
    device: str = "cuda"
    size: int = 224
    in_channels: int = 3
    classes: int = 1000
    stem: str = "imagenet"
    lr: float = LR
    warmup: int = 10
    samples: int = 7
    steps: int = 30
    spawned: float | None = None
    curve: dict[str, Any] | None = None

    def to_json(self) -> Answer:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Answer) -> "Request":
        return cls(**{**value, "options": tuple(value["options"])})


class Side(Protocol):
    """A model in training."""

    def settings(self) -> Answer:
        """Says versions, and what else the figures depend on."""

    def put(self, images: NDArray[np.float32], labels: NDArray[np.int64]) -> Any:
        """Brings a batch, (N, C, H, W) and (N,), to the device, in the layout in which the side is fastest."""

    def step(self, batch: Any) -> Any:
        """Does one step; gives the loss, valid until the next one, and does not wait."""

    def value(self, loss: Any) -> float:
        """Reads a loss."""

    def wait(self) -> None:
        """Waits for the device."""

    def load(self, state: dict[str, NDArray[Any]]) -> None:
        """Sets parameters and running statistics, by torchvision's keys."""

    def scale(self) -> float | None:
        """Reads the scale of the loss; None without one."""

    def settled(self) -> None:
        """Is told that the first step is done, with all searches: the peak of memory counts from here."""

    def warm(self) -> None:
        """Is told that the next steps are timed."""

    def memory(self) -> Answer:
        """Says bytes: "allocated_peak" since `settled`, "allocated_peak_all", "device_used"; None: not known."""

    def convolve(self, x: NDArray[np.float32], w: NDArray[np.float32]) -> NDArray[Any]:
        """Computes one convolution without padding, (N, C, H, W) and (K, C, R, S), as the model would."""


Make = Callable[[Request], Side]


def batch_of(request: Request) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Draws the batch that all are given: standard normal images, and labels."""
    generator = np.random.default_rng(0)
    shape = (request.batch, request.in_channels, request.size, request.size)
    images = generator.standard_normal(shape, np.float32)
    return images, generator.integers(0, request.classes, request.batch, np.int64)


# --- how exact a convolution is: what tells float32 from TF32 -------------------------------------------------------


def probe_operands() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    generator = np.random.default_rng(1)
    x = generator.standard_normal((16, 64, 14, 14), np.float32)
    return x, generator.standard_normal((64, 64, 3, 3), np.float32)


def convolution(x: NDArray[Any], w: NDArray[Any]) -> NDArray[np.float64]:
    """Convolves without padding, in float64."""
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), w.shape[2:], (2, 3))
    return np.tensordot(windows, w.astype(np.float64), ((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2)


def probe_error(side: Side) -> float:
    """Gives the relative error of a convolution, in the norm: below 1e-5 only of float32 without TF32."""
    x, w = probe_operands()
    right = convolution(x, w)
    found = np.asarray(side.convolve(x, w), np.float64)
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


# --- timing -----------------------------------------------------------------------------------------------------------

Say = Callable[..., None]


def timed(side: Side, batch: Any, steps: int, clock: Callable[[], float] = time.perf_counter) -> Answer:
    """Times so many steps by the wall clock, with one wait at the end; seconds a step, and the host's part of it."""
    side.wait()
    start = clock()
    for _ in range(steps):
        side.step(batch)
    issued = clock()
    side.wait()
    return {"step_s": (clock() - start) / steps, "host_s": (issued - start) / steps}


def measure(request: Request, make: Make, say: Say, clock: Callable[[], float] = time.perf_counter) -> None:
    """Builds, does the first step, warms up and takes the samples."""
    images, labels = batch_of(request)
    say(stage="building")
    start = clock()
    side = make(request)
    batch = side.put(images, labels)
    side.wait()
    say(build_s=clock() - start, settings=side.settings(), stage="first step")
    start = clock()
    loss = side.step(batch)
    side.wait()
    say(first_step_s=clock() - start)
    if request.spawned is not None:
        say(process_s=time.time() - request.spawned)
    say(first_loss=side.value(loss), stage="warming up")
    if not request.samples:
        return
    side.settled()
    # At least one: the last loss tells whether all of it was a training.
    start = clock()
    for turn in range(max(request.warmup, 1)):
        loss = side.step(batch)
        if turn == 0:
            side.wait()
            say(second_step_s=clock() - start)
    side.wait()
    side.warm()
    say(stage="samples")
    for _ in range(request.samples):
        say(sample=timed(side, batch, request.steps, clock))
    loss = side.step(batch)
    say(last_loss=side.value(loss), scale=side.scale(), memory=side.memory(), stage="probe")
    say(probe_error=probe_error(side))


# --- curves -----------------------------------------------------------------------------------------------------------


def batches(images: NDArray[np.uint8], labels: NDArray[np.int64], batch: int, steps: int) -> Iterator[tuple[Any, Any]]:
    """Gives float32 images, normalized over all of them, and labels: in an order that is the same for all."""
    mean, deviation = float(images.mean()), float(images.std())
    generator = np.random.default_rng(2)
    order = np.empty(0, np.int64)
    for _ in range(steps):
        while len(order) < batch:
            order = np.concatenate([order, generator.permutation(len(labels))])
        part, order = order[:batch], order[batch:]
        yield (images[part].astype(np.float32) - np.float32(mean)) / np.float32(deviation), labels[part]


def curves(request: Request, make: Make, say: Say) -> None:
    """Trains once from each state, with the same batches; tells the loss of every step."""
    assert request.curve is not None
    with np.load(request.curve["data"]) as data:
        images, labels = data["images"], data["labels"]
    for seed, path in request.curve["states"].items():
        say(stage=f"seed {seed}")
        side = make(request)
        if path is not None:
            with np.load(path) as state:
                side.load(dict(state))
        losses = []
        for each in batches(images, labels, request.batch, request.curve["steps"]):
            losses.append(side.value(side.step(side.put(*each))))
            if not math.isfinite(losses[-1]):
                break
        say(seed=seed, losses=losses, settings=side.settings())
        # A model and its step hold each other: without this the next one would come beside it.
        del side
        gc.collect()


# --- the process ------------------------------------------------------------------------------------------------------


def serve(make: Make, began: float) -> None:
    """Does what standard input asks.

    Args:
        make: makes the model.
        began: by time.perf_counter, before the libraries were imported.
    """
    import_s = time.perf_counter() - began
    request = Request.from_json(json.load(sys.stdin))
    # Only what is said here may be read as an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    say(import_s=import_s)
    if request.curve is None:
        measure(request, make, say)
    else:
        curves(request, make, say)
    say(done=True)
