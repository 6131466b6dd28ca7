"""Trains and evaluates a classifier; the host reads the device at display intervals only."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flcuda import device as devices
from flcuda import functional, nn
from flcuda.amp import DynamicScaler
from flcuda.autograd import Tensor, no_grad
from flcuda.data import (
    BatchDataset,
    Dataset,
    ImageBatch,
    PrefetchDataset,
    Sample,
    ShuffleDataset,
    Transform,
    epoch_order,
)
from flcuda.data.prefetch import DeviceTransform, Iteration
from flcuda.data.sample import RingMemory
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
    Where a data set leaves out what it cannot serve, batches are smaller, and a batch of nothing is no step.

    Batches are loaded ahead by threads and copied to the device while it works on those before; what is random about
    them does not depend on that. At the end of an epoch or a test, however it ends, no thread and no buffer is left.

    On CUDA the training step is captured in a CUDA graph (``flcuda.capture``), so the model's Python code runs in the
    first steps only; a model that cannot be captured is trained without, after a warning.

    Args:
        model: takes images (N, C, H, W) and returns logits (N, classes).
        optimizer: of the model's parameters.
        train: samples (image, label), labels integers; images float32 (C, H, W), or what the transforms make it of.
        test: likewise; None: nothing is tested.
        batch_size: images a step, at most the number of training images.
        schedule: learning rate of a step, counted from 0 over all epochs; None leaves the optimizer's.
        scaler: of the loss; None: the loss is not scaled.
        label_smoothing: of the training loss, 0 to 1.
        seed: of the order, and of the transforms' random numbers.
        report_interval: seconds between two looks at the device.
        transforms: of the fields of a training batch on the device, see `PrefetchDataset`.
        test_transforms: likewise, of a test batch.
        workers: threads that load batches. With 1 the data set is asked for one batch after another; None chooses, and
            the data set must bear several threads, as those of `flcuda.data` do; 0 loads when a batch is needed.
        capture: False: the training step is never captured, and the model's Python code runs in each.

    Attributes:
        history: the finished epochs.
        step: finished steps, those of interrupted epochs included.
        last_report: the newest report of all, for who was interrupted.
        loader_memory: what the buffers of the last batch's loader had allocated.

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
        transforms: Sequence[Transform | DeviceTransform | None] = (),
        test_transforms: Sequence[Transform | DeviceTransform | None] = (),
        workers: int | None = 1,
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
        self.transforms = tuple(transforms)
        self.test_transforms = tuple(test_transforms)
        self.workers = workers
        self.capture = capture
        self._classes: int | None = None
        self._batch: _Batch | None = None
        self._captured: CapturedStep[[Tensor, Any], tuple[Tensor, Any]] | None = None
        self._options: tuple[Any, ...] = ()  # those of the last epoch
        self.history: list[EpochResult] = []
        self.step = 0
        self.last_report: Report | None = None
        self.loader_memory = RingMemory()
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
            FlcudaError: the loss is no longer a finite number, no image of an epoch could be served, or the scaler
                skipped too many steps in a row.
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
            self._batch = None
            self._release()
        return self.history

    def evaluate(self, dataset: Dataset, *, on_report: Callable[[Report], None] | None = None) -> tuple[float, float]:
        """Returns mean loss and accuracy (0 to 1) over every image of a data set, in eval mode.

        Its batches go through the trainer's `test_transforms`. The model is left in the mode in which it was.
        """
        with self.device.use():
            return self._evaluate(dataset, _Reporter(self, "test", len(dataset), 0, 0, on_report))

    def _epoch(self, epoch: int, epochs: int, on_report: Callable[[Report], None] | None) -> EpochResult:
        start = time.perf_counter()
        self.model.train()
        options = self._step_options()
        if self._captured is not None and self._options not in ((), options):
            self._captured.reset()
        self._options = options
        steps = self.steps_per_epoch
        reporter = _Reporter(self, "train", steps * self.batch_size, epoch + 1, epochs, on_report)
        rate = math.nan
        with _Pass(self, self.train, self.transforms, epoch, shuffle=True) as batches:
            for batch in batches:
                if self.schedule is not None:
                    # By the place in the training: an interrupted epoch is repeated whole, at its own rates.
                    rate = self.schedule(epoch * steps + batch.step)
                    self.optimizer.lr = rate
                self._batch = batch
                if self._classes is not None:
                    # A replay runs no Python: it takes no labels that were not looked at.
                    batch.check_labels(self._classes)
                loss, correct = self._train(Tensor(batch.images), batch.target)
                self.step += 1
                reporter.add(loss, correct, len(batch.labels))
        reporter.finish()
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
            with no_grad(), _Pass(self, dataset, self.test_transforms, 0, shuffle=False) as batches:
                for batch in batches:
                    logits = self.model(Tensor(batch.images))
                    batch.check_labels(logits.shape[1])
                    loss = functional.cross_entropy(logits, batch.target)
                    reporter.add(loss, functional.correct_count(logits, batch.target), len(batch.labels))
        finally:
            self.model.train(was_training)
        reporter.finish()
        return reporter.meter.loss, reporter.meter.accuracy

    def _train(self, images: Tensor, target: Any) -> tuple[Tensor, Any]:
        """Does a step, captured where it can be; returns the loss and the number of right answers."""
        if self._captured is not None:
            try:
                return self._captured(images, target)
            except CaptureError as error:
                self._release()
                warnings.warn(f"training without a CUDA graph: {error}", UserWarning, stacklevel=callers_level())
        return self._step(images, target)

    def _step_options(self) -> tuple[Any, ...]:
        """Lists what the step's Python code reads and somebody may change between two epochs."""
        trained = tuple([p.requires_grad for p in self.model.parameters()])
        return (self.model, self.optimizer, self.scaler, self.label_smoothing, trained)

    def _release(self) -> None:
        """Gives back what the captured step has."""
        captured, self._captured = self._captured, None
        if captured is not None:
            captured.close()

    def _step(self, images: Tensor, target: Any) -> tuple[Tensor, Any]:
        # The model's first layer copies its input to its own dtype and layout.
        logits = self.model(images)
        self._classes = logits.shape[1]
        assert self._batch is not None
        self._batch.check_labels(self._classes)
        correct = self.device.xp.zeros(2, np.int64)
        loss = functional.cross_entropy(logits, target, label_smoothing=self.label_smoothing, correct=correct)
        self._update(loss)
        return loss, correct[:1].reshape(())

    def _update(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        if self.scaler is not None:
            self.scaler.step(self.optimizer, loss)
            return
        loss.backward()
        self.optimizer.step()


@dataclass(frozen=True)
class _Batch:
    """A batch on the device, until the next one is asked for.

    Attributes:
        step: its place in the epoch.
        images: (N, C, H, W).
        target: labels, int64 (N,).
        labels: the same on the host.
        numbers: which samples of the data set they are; asked for only where one of them is wrong.
    """

    step: int
    images: Any
    target: Any
    labels: NDArray[np.int64]
    numbers: Callable[[], NDArray[np.int64]]

    def check_labels(self, classes: int) -> None:
        """Raises ValueError where a label is no class; the device would only answer with a NaN."""
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= classes))
        if len(wrong):
            place = wrong[0]
            number = self.numbers()[place]
            raise ValueError(f"label {self.labels[place]} of sample {number} is no class: the model has {classes}")


class _Pass:
    """The batches of one epoch, or of one test, loaded ahead; a context, which ends the loading."""

    def __init__(
        self,
        trainer: Trainer,
        dataset: Dataset,
        transforms: Sequence[Transform | DeviceTransform | None],
        epoch: int,
        *,
        shuffle: bool,
    ) -> None:
        order = ShuffleDataset(dataset, trainer.seed) if shuffle else dataset
        self._dataset = dataset
        self._epoch = epoch
        self._order_seed = trainer.seed if shuffle else None
        self._batches = _LabelledBatches(order, trainer.batch_size, "skip-last" if shuffle else "include-last")
        self._loader = PrefetchDataset(
            self._batches, trainer.device, workers=trainer.workers, transforms=transforms, seed=trainer.seed
        )
        self._loader.set_epoch(epoch)
        self._trainer = trainer
        self._iteration: Iteration | None = None

    def __enter__(self) -> Iterator[_Batch]:
        self._iteration = iter(self._loader)
        return map(self._batch, self._iteration)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            # Told of the error: an interrupted training does not wait for a data set that is slow.
            iteration.__exit__(kind, error, traceback)

    def _batch(self, sample: Sample) -> _Batch:
        self._trainer.loader_memory = self._loader.memory
        labels = self._batches.labels.pop(sample.index)
        images, target = sample.arrays()
        if isinstance(images, ImageBatch):
            raise ValueError(
                "images of different sizes need a transform that makes them one size, such as data.Augment"
            )
        kept = slice(None) if sample.kept is None else sample.kept
        return _Batch(sample.index, images, target, labels, lambda: self._numbers(sample.index)[kept])

    def _numbers(self, step: int) -> NDArray[np.int64]:
        indices = self._batches.indices(step, self._epoch)
        if self._order_seed is None:
            return indices
        return epoch_order(len(self._dataset), self._order_seed, self._epoch)[indices]


class _LabelledBatches(BatchDataset):
    """Batches of (images, labels), labels int64 (N,), which are kept on the host as well until they are taken.

    Attributes:
        labels: by step, those of the batches that were loaded; as many as there are loaded ahead.
    """

    def __init__(self, dataset: Dataset, batch_size: int, policy: str) -> None:
        super().__init__(dataset, batch_size, policy)
        self.labels: dict[int, NDArray[np.int64]] = {}

    def sample_kept(self, index: int, epoch: int) -> tuple[tuple[Any, ...], NDArray[np.int64] | None]:
        """Returns the images and labels of what is left of a batch, and which of its `indices` that is."""
        fields, kept = super().sample_kept(index, epoch)
        if kept is not None and not len(kept):
            return fields, kept
        if len(fields) != 2:
            raise ValueError(f"a sample must be (image, label), not {len(fields)} fields")
        images, labels = fields
        if isinstance(labels, ImageBatch):
            raise ValueError("labels must be one integer a sample, not images")
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise ValueError(f"labels must be one integer a sample, not {labels.dtype} {labels.shape[1:]}")
        on_host = labels.get() if devices.is_cuda(labels) else np.asarray(labels)
        labels = on_host.astype(np.int64, copy=False)
        self.labels[index] = labels
        return (images, labels), kept


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

    def finish(self) -> None:
        """Reports what is left to report of a phase that has ended."""
        self.report()
        if not self.meter.images:
            phase = "training" if self._phase == "train" else "test"
            raise FlcudaError(f"none of the {self._images} images of the {phase} could be served")

    def _divergence(self) -> str:
        place = f"epoch {self._epoch}, step {self._trainer.step}"
        if self._phase == "test":
            return f"the loss on the test images is {self.meter.loss} after {place}"
        rate = float(self._trainer.optimizer.lr)
        return (
            f"the loss is {self.meter.loss} by {place}: the training has diverged; try a learning rate below {rate:g}"
        )
