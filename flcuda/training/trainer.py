"""Trains and evaluates a classifier; the host reads the device at display intervals only."""

import functools
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flcuda import device as devices
from flcuda import functional, nn
from flcuda.amp import DynamicScaler
from flcuda.autograd import Tensor, no_grad
from flcuda.data import Dataset, batch_indices, fetch
from flcuda.errors import CaptureError, FlcudaError
from flcuda.finder.plan import callers_level
from flcuda.optim import Optimizer
from flcuda.training.meters import Meter
from flcuda.training.step_graph import CapturedStep


@dataclass(frozen=True)
class Report:
    """Where a running epoch has got to.

    Attributes:
        phase: "train" or "test".
        epoch: counted from 1.
        epochs: how many this call of `fit` trains up to.
        done: images done in this phase.
        images: images of this phase.
        loss: mean over the images done so far.
        accuracy: share of right answers of them, 0 to 1.
        images_per_second: since the last report.
    """

    phase: str
    epoch: int
    epochs: int
    done: int
    images: int
    loss: float
    accuracy: float
    images_per_second: float


@dataclass(frozen=True)
class EpochResult:
    """A finished epoch.

    Attributes:
        epoch: counted from 1.
        lr: of its last step.
        train_loss: mean over the training images, while they were trained on.
        train_accuracy: likewise, 0 to 1.
        test_loss: mean over all test images after the epoch; None without a test.
        test_accuracy: likewise, 0 to 1.
        images_per_second: of the training.
        seconds: of training and test together.
    """

    epoch: int
    lr: float
    train_loss: float
    train_accuracy: float
    test_loss: float | None
    test_accuracy: float | None
    images_per_second: float
    seconds: float

    def __str__(self) -> str:
        parts = [f"epoch {self.epoch}: train loss {self.train_loss:.4f}, accuracy {self.train_accuracy:.4f}"]
        if self.test_loss is not None:
            parts.append(f"test loss {self.test_loss:.4f}, accuracy {self.test_accuracy:.4f}")
        parts.append(f"{self.images_per_second:,.0f} images/s, {self.seconds:.1f} s")
        return "; ".join(parts)


class Trainer:
    """Trains a classifier with cross-entropy.

    The order of an epoch's images is a permutation of (seed, epoch). Training batches all have one size: what is left
    over at the end of an epoch waits for another order. The test takes every image, the last partial batch included.
    On CUDA the training step is captured in a CUDA graph (``flcuda.capture``), so the model's Python code runs in the
    first steps only; a model that cannot be captured is trained without, after a warning.

    Args:
        model: takes images (N, C, H, W) and returns logits (N, classes).
        optimizer: of the model's parameters.
        train: samples (image, label), images float32 (C, H, W), labels integers.
        test: likewise; None: nothing is tested.
        batch_size: images a step, at most the number of training images.
        schedule: learning rate of a step, counted from 0 over all epochs; None leaves the optimizer's.
        scaler: of the loss; None: the loss is not scaled.
        label_smoothing: of the training loss, 0 to 1.
        seed: of the order.
        report_interval: seconds between two looks at the device.
        capture: False: the training step is never captured, and the model's Python code runs in each.

    Attributes:
        history: the finished epochs.
        step: finished steps, those of interrupted epochs included.
        last_report: the newest report of all, for who was interrupted.

    Raises:
        ValueError: an empty data set, a batch size below 1, or an optimizer that leaves a parameter out.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        train: Dataset,
        test: Dataset | None = None,
        *,
        batch_size: int,
        schedule: Callable[[int], float] | None = None,
        scaler: DynamicScaler | None = None,
        label_smoothing: float = 0.0,
        seed: int = 0,
        report_interval: float = 0.5,
        capture: bool = True,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        for name, dataset in (("train", train), ("test", test)):
            if dataset is not None and not len(dataset):
                raise ValueError(f"{name} has no samples")
        updated = {id(p) for arena in optimizer.arenas for p in arena.parameters}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in updated:
                raise ValueError(f"optimizer: does not update the model's {name!r}; make it last, of this model")
        self.model = model
        self.optimizer = optimizer
        self.train = train
        self.test = test
        self.batch_size = min(batch_size, len(train))
        self.schedule = schedule
        self.scaler = scaler
        self.label_smoothing = label_smoothing
        self.seed = seed
        self.report_interval = report_interval
        self.capture = capture
        self._classes: int | None = None
        self._check: Callable[[int], None] | None = None
        self._captured: CapturedStep[[Tensor, Any], tuple[Tensor, Any]] | None = None
        self.history: list[EpochResult] = []
        self.step = 0
        self.last_report: Report | None = None
        self.device = optimizer.device

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch."""
        return len(self.train) // self.batch_size

    def fit(
        self,
        epochs: int,
        *,
        on_report: Callable[[Report], None] | None = None,
        on_epoch: Callable[[EpochResult], None] | None = None,
    ) -> list[EpochResult]:
        """Trains on until `epochs` epochs are finished, those before this call included.

        After an interruption another call goes on, and repeats the unfinished epoch.

        Args:
            epochs: to be finished in all.
            on_report: called at display intervals.
            on_epoch: called after each epoch, with what is then the last entry of `history`.

        Returns:
            `history`.

        Raises:
            ValueError: a label that is no class; names the sample.
            FlcudaError: the loss is no longer a finite number, or the scaler skipped too many steps in a row.
        """
        if epochs < 0:
            raise ValueError(f"epochs must not be negative, not {epochs}")
        self._classes = None
        self._captured = CapturedStep(self._step) if self.capture and self.device.kind == "cuda" else None
        try:
            with self.device.use():
                while len(self.history) < epochs:
                    try:
                        result = self._epoch(len(self.history), epochs, on_report)
                    except BaseException:
                        # An unfinished step leaves nothing behind.
                        self.optimizer.zero_grad()
                        self.model.discard_statistics()
                        raise
                    self.history.append(result)
                    if on_epoch is not None:
                        on_epoch(result)
        finally:
            self._release()
        return self.history

    def evaluate(self, dataset: Dataset, *, on_report: Callable[[Report], None] | None = None) -> tuple[float, float]:
        """Returns mean loss and accuracy (0 to 1) over every image of a data set, in eval mode.

        The model is left in the mode in which it was.
        """
        with self.device.use():
            return self._evaluate(dataset, _Reporter(self, "test", len(dataset), 0, 0, on_report))

    def _epoch(self, epoch: int, epochs: int, on_report: Callable[[Report], None] | None) -> EpochResult:
        start = time.perf_counter()
        self.model.train()
        parts = batch_indices(len(self.train), self.batch_size, seed=self.seed, epoch=epoch, last="skip-last")
        reporter = _Reporter(self, "train", len(parts) * self.batch_size, epoch + 1, epochs, on_report)
        rate = math.nan
        for place, part in enumerate(parts):
            if self.schedule is not None:
                # By the place in the training: an interrupted epoch is repeated whole, at its own rates.
                rate = self.schedule(epoch * self.steps_per_epoch + place)
                self.optimizer.lr = rate
            images, labels = self._load(self.train, part, epoch)
            # A replay runs no Python: it takes no labels that were not looked at.
            self._check = functools.partial(_check_labels, labels, part)
            if self._classes is not None:
                self._check(self._classes)
            loss, correct = self._train(Tensor(self._upload(images)), self._upload(labels))
            self.step += 1
            reporter.add(loss, correct, len(labels))
        reporter.report()
        if self.scaler is not None:
            # The host has just waited, and an error that is on its way should not come in the next epoch.
            self.scaler.check()
        trained = time.perf_counter() - start
        meter = reporter.meter
        tested: tuple[float | None, float | None] = (None, None)
        if self.test is not None:
            tested = self._evaluate(self.test, _Reporter(self, "test", len(self.test), epoch + 1, epochs, on_report))
        return EpochResult(
            epoch + 1,
            float(self.optimizer.lr) if self.schedule is None else rate,
            meter.loss,
            meter.accuracy,
            *tested,
            meter.images / trained,
            time.perf_counter() - start,
        )

    def _evaluate(self, dataset: Dataset, reporter: "_Reporter") -> tuple[float, float]:
        was_training = self.model.training
        self.model.eval()
        try:
            with no_grad():
                for part in batch_indices(len(dataset), self.batch_size):
                    images, labels = self._load(dataset, part, 0)
                    logits = self.model(Tensor(self._upload(images)))
                    _check_labels(labels, part, logits.shape[1])
                    target = self._upload(labels)
                    loss = functional.cross_entropy(logits, target)
                    reporter.add(loss, functional.correct_count(logits, target), len(labels))
        finally:
            self.model.train(was_training)
        reporter.report()
        return reporter.meter.loss, reporter.meter.accuracy

    def _load(self, dataset: Dataset, indices: NDArray[np.int64], epoch: int) -> tuple[Any, NDArray[np.int64]]:
        """Returns the images of these samples and their labels, int64 (N,), in host memory."""
        fields = fetch(dataset, indices, epoch)
        if len(fields) != 2:
            raise ValueError(f"a sample must be (image, label), not {len(fields)} fields")
        images, labels = fields
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise ValueError(f"labels must be one integer a sample, not {labels.dtype} {labels.shape[1:]}")
        return images, labels.astype(np.int64, copy=False)

    def _train(self, images: Tensor, target: Any) -> tuple[Tensor, Any]:
        """Does a step, captured where it can be; returns the loss and the number of right answers."""
        if self._captured is not None:
            try:
                return self._captured(images, target)
            except CaptureError as error:
                self._release()
                warnings.warn(f"training without a CUDA graph: {error}", UserWarning, stacklevel=callers_level())
        return self._step(images, target)

    def _release(self) -> None:
        """Gives back what the captured step has."""
        captured, self._captured = self._captured, None
        if captured is not None:
            captured.close()

    def _step(self, images: Tensor, target: Any) -> tuple[Tensor, Any]:
        # The model's first layer copies its input to its own dtype and layout.
        logits = self.model(images)
        self._classes = logits.shape[1]
        assert self._check is not None
        self._check(self._classes)
        loss = functional.cross_entropy(logits, target, label_smoothing=self.label_smoothing)
        correct = functional.correct_count(logits, target)
        self._update(loss)
        return loss, correct

    def _upload(self, array: NDArray[Any]) -> Any:
        return array if self.device.kind == "cpu" else devices.cupy().asarray(array)

    def _update(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        if self.scaler is not None:
            self.scaler.step(self.optimizer, loss)
            return
        loss.backward()
        self.optimizer.step()


def _check_labels(labels: NDArray[np.int64], indices: NDArray[np.int64], classes: int) -> None:
    """Looks on the host, where the labels still are: the device would only answer with a NaN."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        place = wrong[0]
        raise ValueError(f"label {labels[place]} of sample {indices[place]} is no class: the model has {classes}")


class _Reporter:
    """Collects a phase's meter at display intervals, and passes on what it says."""

    def __init__(
        self,
        trainer: Trainer,
        phase: str,
        images: int,
        epoch: int,
        epochs: int,
        on_report: Callable[[Report], None] | None,
    ) -> None:
        self.meter = Meter()
        self._trainer = trainer
        self._phase = phase
        self._images = images
        self._epoch = epoch
        self._epochs = epochs
        self._on_report = on_report
        self._time = time.perf_counter()

    def add(self, loss: Tensor, correct: Any, images: int) -> None:
        self.meter.add(loss.data, correct, images)
        if time.perf_counter() - self._time >= self._trainer.report_interval:
            self.report()

    def report(self) -> None:
        before = self.meter.images
        self.meter.collect()
        now = time.perf_counter()
        if self.meter.images == before:
            return
        if not math.isfinite(self.meter.loss):
            raise FlcudaError(self._divergence())
        rate = (self.meter.images - before) / max(now - self._time, 1e-9)
        self._time = now
        meter = self.meter
        report = Report(
            self._phase, self._epoch, self._epochs, meter.images, self._images, meter.loss, meter.accuracy, rate
        )
        self._trainer.last_report = report
        if self._on_report is not None:
            self._on_report(report)

    def _divergence(self) -> str:
        place = f"epoch {self._epoch}, step {self._trainer.step}"
        if self._phase == "test":
            return f"the loss on the test images is {self.meter.loss} after {place}"
        rate = float(self._trainer.optimizer.lr)
        return (
            f"the loss is {self.meter.loss} by {place}: the training has diverged; try a learning rate below {rate:g}"
        )
