"""The trainer on the CPU device: meters, order, learning, evaluation, clear errors."""

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flcuda import amp, autograd, data, functional, nn, optim, training
from flcuda.errors import FlcudaError
from flcuda.training import Meter, Report, Trainer, WarmupCosine


class Recorder:
    """A data set that remembers which samples were asked for, in which epoch."""

    def __init__(self, dataset: data.TensorDataset) -> None:
        self.dataset = dataset
        self.asked: list[tuple[int, list[int]]] = []

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[object, ...]:
        return self.dataset[index]

    def batch(self, indices: np.ndarray, epoch: int) -> tuple[np.ndarray, ...]:
        self.asked.append((epoch, [int(index) for index in indices]))
        return self.dataset.batch(indices, epoch)


def blobs(rng: np.random.Generator, count: int, classes: int = 3) -> data.TensorDataset:
    """Images (1, 4, 4) with one bright row a class, and noise."""
    labels = rng.integers(0, classes, count)
    images = rng.normal(size=(count, 1, 4, 4)).astype(np.float32) * 0.5
    images[np.arange(count), 0, labels] += 2.0
    return data.TensorDataset(images, labels)


def small_model(precision: str = "float32", classes: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2D(1, 8, 3, padding=1, precision=precision, device="cpu", seed=1),
        nn.BatchNorm2D(8, precision=precision, device="cpu"),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, classes, precision=precision, device="cpu", seed=2),
    )


def make_trainer(
    train: data.Dataset,
    test: data.Dataset | None = None,
    precision: str = "float32",
    lr: float = 0.05,
    **options: object,
) -> Trainer:
    model = small_model(precision)
    optimizer = optim.SGD(model, lr=lr, momentum=0.9)
    return Trainer(model, optimizer, train, test, **{"batch_size": 16, **options})


def raise_interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


class TestMeter:
    def test_weighted_by_images(self, rng: np.random.Generator) -> None:
        meter = Meter()
        assert math.isnan(meter.loss)
        assert math.isnan(meter.accuracy)
        losses, sizes = rng.uniform(1, 3, 7).astype(np.float32), [16, 16, 16, 3, 16, 1, 5]
        right = [int(rng.integers(0, size + 1)) for size in sizes]
        for place, (loss, size, count) in enumerate(zip(losses, sizes, right, strict=True)):
            meter.add(np.array(loss), np.array(count), size)
            if place == 3:
                meter.collect()
                assert meter.images == 51
        assert meter.images == 51
        meter.collect()
        meter.collect()
        assert meter.images == sum(sizes)
        assert meter.loss == pytest.approx(np.average(losses, weights=sizes), rel=1e-6)
        assert meter.accuracy == sum(right) / sum(sizes)

    def test_borrows_the_arrays(self) -> None:
        loss, correct = np.array(2.0, np.float32), np.array(3)
        meter = Meter()
        meter.add(loss, correct, 4)
        meter.add(loss, correct, 4)
        meter.collect()
        assert (float(loss), int(correct)) == (2.0, 3)


class TestSchedule:
    def test_rises_and_falls(self) -> None:
        schedule = WarmupCosine(0.4, 100, 10, final=0.04)
        rates = [schedule(step) for step in range(101)]
        np.testing.assert_allclose(rates[:10], 0.04 * np.arange(1, 11))
        assert rates[10] == 0.4
        assert rates[55] == pytest.approx(0.22)
        assert rates[100] == schedule(500) == pytest.approx(0.04)
        assert all(before > after for before, after in itertools.pairwise(rates[10:]))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((math.nan, 5), "peak must be a finite rate"),
            ((-1.0, 5), "peak must be a finite rate of at least 0, not -1.0"),
            ((1.0, 0), "steps must be at least 1, not 0"),
            ((1.0, 5, 6), "warmup must be between 0 and steps 5, not 6"),
        ],
    )
    def test_refuses(self, arguments: tuple[float, ...], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            WarmupCosine(*arguments)  # type: ignore[arg-type]


class TestTraining:
    @pytest.mark.parametrize("precision", ["float64", "float32", "float16", "bfloat16"])
    def test_learns(self, rng: np.random.Generator, precision: str) -> None:
        scaler = amp.DynamicScaler() if precision == "float16" else None
        trainer = make_trainer(blobs(rng, 160), blobs(rng, 50), precision, scaler=scaler)
        history = trainer.fit(4)
        assert history[-1].test_accuracy is not None
        assert history[-1].test_accuracy >= 0.9
        assert history[-1].train_loss < history[0].train_loss
        assert [result.epoch for result in history] == [1, 2, 3, 4]
        assert trainer.step == 40

    def test_an_optimizer_that_leaves_a_parameter_out(self, rng: np.random.Generator) -> None:
        model = small_model()
        optimizer = optim.SGD(model, lr=0.1)
        Trainer(model, optimizer, blobs(rng, 4), batch_size=4)
        # A new head, as for another number of classes.
        setattr(model, "4", nn.Linear(128, 5, device="cpu", seed=2))
        with pytest.raises(ValueError, match=r"optimizer: does not update the model's '4\.weight'"):
            Trainer(model, optimizer, blobs(rng, 4), batch_size=4)
        for parameter in model[4].parameters():
            parameter.requires_grad = False
        Trainer(model, optimizer, blobs(rng, 4), batch_size=4)

    @pytest.mark.parametrize("precision", ["float32", "float16"])
    def test_an_interrupted_step_leaves_nothing_behind(
        self, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, precision: str
    ) -> None:
        dataset = blobs(rng, 48)
        states = []
        for interrupted in (False, True):
            scaler = amp.DynamicScaler() if precision == "float16" else None
            trainer = make_trainer(dataset, precision=precision, scaler=scaler)
            if interrupted:
                with monkeypatch.context() as patch:
                    patch.setattr(optim.SGD, "apply", raise_interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        trainer.fit(1)
            trainer.fit(1)
            states.append(trainer.model.state_dict())
        for name, value in states[0].items():
            np.testing.assert_array_equal(states[1][name], value, err_msg=name)

    def test_rates_follow_the_place_in_the_training(self, rng: np.random.Generator) -> None:
        asked: list[int] = []

        def schedule(step: int) -> float:
            asked.append(step)
            return 0.01

        trainer = make_trainer(blobs(rng, 48), schedule=schedule, report_interval=0.0)
        trainer.fit(1)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(2, on_report=raise_interrupt)
        trainer.fit(2)
        assert asked == [0, 1, 2, 3, 3, 4, 5]
        assert trainer.step == 7

    def test_order_is_the_permutation_of_seed_and_epoch(self, rng: np.random.Generator) -> None:
        recorder = Recorder(blobs(rng, 40))
        make_trainer(recorder, seed=6).fit(2)
        expected = [
            (epoch, [int(i) for i in part])
            for epoch in (0, 1)
            for part in data.batch_indices(40, 16, seed=6, epoch=epoch, last="skip-last")
        ]
        assert recorder.asked == expected

    def test_the_test_takes_every_image_and_weights_the_loss(self, rng: np.random.Generator) -> None:
        train, test = blobs(rng, 32), Recorder(blobs(rng, 37))
        trainer = make_trainer(train, test)
        trainer.fit(1)
        assert [len(part) for _, part in test.asked] == [16, 16, 5]
        images, labels = test.dataset.fields
        trainer.model.eval()
        with autograd.no_grad():
            logits = trainer.model(autograd.Tensor(images)).data.astype(np.float64)
        trainer.model.train()
        shifted = logits - logits.max(1, keepdims=True)
        losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(37), labels]
        assert trainer.history[0].test_loss == pytest.approx(losses.mean(), rel=1e-5)
        assert trainer.history[0].test_accuracy == (logits.argmax(1) == labels).mean()

    def test_evaluation_changes_nothing(self, rng: np.random.Generator) -> None:
        trainer = make_trainer(blobs(rng, 32))
        trainer.fit(1)
        before = {name: value.copy() for name, value in trainer.model.state_dict().items()}
        first = trainer.evaluate(blobs(rng, 21))
        assert trainer.model.training
        for name, value in trainer.model.state_dict().items():
            np.testing.assert_array_equal(value, before[name])
        assert 0 <= first[1] <= 1

    def test_same_seed_same_training(self, rng: np.random.Generator) -> None:
        train, test = blobs(rng, 48), blobs(rng, 20)
        runs = []
        for seed in (0, 0, 1):
            history = make_trainer(train, test, seed=seed).fit(2)
            runs.append([(result.train_loss, result.test_loss) for result in history])
        assert runs[0] == runs[1] != runs[2]

    def test_going_on_equals_going_through(self, rng: np.random.Generator) -> None:
        train = blobs(rng, 48)
        through, parted = make_trainer(train), make_trainer(train)
        through.fit(3)
        parted.fit(1)
        parted.fit(3)
        assert [r.train_loss for r in through.history] == [r.train_loss for r in parted.history]

    def test_schedule_reaches_the_optimizer(self, rng: np.random.Generator) -> None:
        rates = []

        def schedule(step: int) -> float:
            rates.append(step)
            return 0.25 / (step + 1)

        trainer = make_trainer(blobs(rng, 32), schedule=schedule)
        trainer.fit(2)
        assert rates == [0, 1, 2, 3]
        assert float(trainer.optimizer.lr) == pytest.approx(0.0625)
        assert trainer.history[-1].lr == 0.0625

    def test_reports(self, rng: np.random.Generator) -> None:
        reports: list[Report] = []
        epochs: list[training.EpochResult] = []
        trainer = make_trainer(blobs(rng, 40), blobs(rng, 5), report_interval=0.0)
        trainer.fit(1, on_report=reports.append, on_epoch=epochs.append)
        assert [(r.phase, r.done, r.images) for r in reports] == [("train", 16, 32), ("train", 32, 32), ("test", 5, 5)]
        assert epochs == trainer.history
        assert "epoch 1: train loss" in str(epochs[0])
        assert epochs[0].train_loss == reports[1].loss
        assert trainer.last_report == reports[-1]

    def test_without_a_test(self, rng: np.random.Generator) -> None:
        result = make_trainer(blobs(rng, 10)).fit(1)[0]
        assert (result.test_loss, result.test_accuracy) == (None, None)
        assert "test" not in str(result)

    def test_a_batch_is_never_larger_than_the_data_set(self, rng: np.random.Generator) -> None:
        trainer = make_trainer(blobs(rng, 10), batch_size=64)
        trainer.fit(1)
        assert (trainer.batch_size, trainer.step, trainer.last_report.done) == (10, 1, 10)  # type: ignore[union-attr]

    def test_interrupt_keeps_what_was_reached(self, rng: np.random.Generator) -> None:
        def interrupt(report: Report) -> None:
            if report.epoch == 2 and report.done == 32:
                raise KeyboardInterrupt

        trainer = make_trainer(blobs(rng, 48), report_interval=0.0)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(3, on_report=interrupt)
        assert len(trainer.history) == 1
        assert dataclasses.asdict(trainer.last_report)["done"] == 32  # type: ignore[arg-type]


def shades(seed: int = 5) -> data.ImageData:
    """Images of eight bits with a bright row a class, padded, cropped and mirrored at random."""
    rng = np.random.default_rng(seed)

    def images(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = rng.integers(0, 3, count)
        pixels = rng.integers(0, 120, (count, 1, 4, 4), np.uint8)
        pixels[np.arange(count), 0, labels] += 100
        return pixels, labels

    augment = (data.PadCrop(1), data.Flip())
    return data.image_data("shades", images(83), images(37), tuple("abc"), augment=augment, seed=9)


class Photographs:
    """Images of many sizes; those of `broken` are left out, where the loader can do without them."""

    def __init__(self, count: int, broken: tuple[int, ...] = ()) -> None:
        rng = np.random.default_rng(3)
        sizes = rng.integers(4, 9, (count, 2))
        self.images = [rng.integers(0, 256, (height, width, 1), np.uint8) for height, width in sizes]
        self.labels = rng.integers(0, 3, count)
        self.broken = broken

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self.images[index], self.labels[index]

    def batch_kept(self, indices: np.ndarray, epoch: int) -> tuple[tuple[Any, ...], np.ndarray]:
        kept = np.flatnonzero(~np.isin(indices, self.broken))
        if not len(kept):
            return (), kept
        left = indices[kept]
        return (data.ImageBatch.of([self.images[i] for i in left]), self.labels[left]), kept


def loaders() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flcuda prefetch")]


AUGMENT = data.Augment(4, "resize-then-crop", sides=(4, 6), mean=(0.5,), std=(0.25,))
CENTRE = data.Augment(4, "centre", sides=4, flip=0.0, mean=(0.5,), std=(0.25,))


class TestLoading:
    @pytest.mark.parametrize("workers", [0, 1, 3, None])
    def test_equals_a_loop_that_loads_nothing_ahead(self, workers: int | None) -> None:
        split = shades()
        trainer = make_trainer(split.train, split.test, seed=4, workers=workers)
        trainer.fit(3)

        model = small_model()
        optimizer = optim.SGD(model, lr=0.05, momentum=0.9)
        for epoch in range(3):
            meter = Meter()
            for part in data.batch_indices(83, 16, seed=4, epoch=epoch, last="skip-last"):
                images, labels = data.fetch(split.train, part, epoch)
                logits = model(autograd.Tensor(images))
                loss = functional.cross_entropy(logits, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                meter.add(loss.data, functional.correct_count(logits, labels), len(labels))
            meter.collect()
            assert (meter.loss, meter.accuracy) == (
                trainer.history[epoch].train_loss,
                trainer.history[epoch].train_accuracy,
            )
        for name, value in model.state_dict().items():
            np.testing.assert_array_equal(trainer.model.state_dict()[name], value, err_msg=name)

    def test_losses_of_old(self) -> None:
        """Those of a trainer that fetched each batch when it needed it; nearly, as libraries of mathematics differ."""
        split = shades()
        history = make_trainer(split.train, split.test, seed=4).fit(3)
        expected = [
            (1.2709453582763672, 0.7093029537716428),
            (1.19437837600708, 0.7851308358682169),
            (0.9792351722717285, 1.7302749221389357),
        ]
        for result, (train_loss, test_loss) in zip(history, expected, strict=True):
            assert result.train_loss == pytest.approx(train_loss, rel=1e-4)
            assert result.test_loss == pytest.approx(test_loss, rel=1e-4)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_transforms_of_a_batch_are_those_of_its_samples(self, workers: int) -> None:
        photographs, tests = Photographs(40), Photographs(21)
        ahead = make_trainer(
            photographs, tests, seed=6, transforms=(AUGMENT,), test_transforms=(CENTRE,), workers=workers
        )
        before = make_trainer(
            data.TransformDataset(photographs, AUGMENT, seed=6), data.TransformDataset(tests, CENTRE), seed=6
        )
        results = [
            [(r.train_loss, r.train_accuracy, r.test_loss, r.test_accuracy) for r in trainer.fit(2)]
            for trainer in (ahead, before)
        ]
        assert results[0] == results[1]

    def test_no_more_is_loaded_than_there_is_room_for(self, rng: np.random.Generator) -> None:
        recorder = Recorder(blobs(rng, 320))
        ahead: list[int] = []

        def look(report: Report) -> None:
            ahead.append(len(recorder.asked) - report.done // 16)

        make_trainer(recorder, report_interval=0.0).fit(1, on_report=look)
        assert len(recorder.asked) == 20
        # One staged and one sent in each of the two slots, less that of the step itself; and one the worker is at.
        assert max(ahead) <= 4

    def test_nothing_is_left_however_it_ends(self, rng: np.random.Generator) -> None:
        dataset = blobs(rng, 320)
        images, labels = dataset.fields
        wrong = labels.copy()
        wrong[:] = 7

        class Failing(Recorder):
            def batch(self, indices: np.ndarray, epoch: int) -> tuple[np.ndarray, ...]:
                if 77 in indices:
                    raise OSError("the disk is gone")
                return super().batch(indices, epoch)

        def interrupt_the_test(report: Report) -> None:
            if report.phase == "test":
                raise KeyboardInterrupt

        ends: list[tuple[data.Dataset, type[BaseException], Callable[..., None] | None]] = [
            (dataset, KeyboardInterrupt, raise_interrupt),
            (dataset, KeyboardInterrupt, interrupt_the_test),
            (data.TensorDataset(images, wrong), ValueError, None),
            (Failing(dataset), OSError, None),
        ]
        for train, error, on_report in ends:
            trainer = make_trainer(train, dataset, report_interval=0.0, workers=2)
            with pytest.raises(error) as caught:
                trainer.fit(1, on_report=on_report)
            assert caught.traceback  # it keeps the frames, and nothing else
            assert loaders() == []
            assert trainer.model.training
        trainer = make_trainer(dataset, dataset)
        trainer.fit(2)
        trainer.evaluate(dataset)
        assert loaders() == []

    def test_a_data_set_that_leaves_samples_out(self) -> None:
        options: dict[str, Any] = {
            "transforms": (AUGMENT,),
            "test_transforms": (CENTRE,),
            "batch_size": 4,
            "report_interval": 0.0,
        }
        # All of the second batch of the test, and one of the third.
        trainer = make_trainer(Photographs(12), Photographs(12, broken=(4, 5, 6, 7, 9)), **options)
        done: list[int] = []
        trainer.evaluate(trainer.test, on_report=lambda report: done.append(report.done))  # type: ignore[arg-type]
        assert done == [4, 7]

        broken = Photographs(12, broken=(3,))
        broken.labels[8] = 5
        with pytest.raises(ValueError, match="label 5 of sample 8 is no class"):
            make_trainer(broken, **options).fit(1)
        with pytest.raises(ValueError, match="label 5 of sample 8 is no class"):
            make_trainer(Photographs(4), **options).evaluate(broken)
        with pytest.raises(FlcudaError, match="none of the 12 images of the training could be served"):
            make_trainer(Photographs(12, broken=tuple(range(12))), **options).fit(1)

    def test_images_of_many_sizes_need_a_transform(self) -> None:
        with pytest.raises(ValueError, match=r"need a transform that makes them one size, such as data\.Augment"):
            make_trainer(Photographs(8), batch_size=4).fit(1)
        assert loaders() == []


class TestErrors:
    def test_a_bad_label_is_named(self, rng: np.random.Generator) -> None:
        images, labels = blobs(rng, 32).fields
        for wrong in (3, -1):
            changed = labels.copy()
            changed[21] = wrong
            with pytest.raises(ValueError, match=f"label {wrong} of sample 21 is no class: the model has 3"):
                make_trainer(data.TensorDataset(images, changed)).fit(1)

    def test_labels_must_be_integers(self, rng: np.random.Generator) -> None:
        images, labels = blobs(rng, 32).fields
        with pytest.raises(ValueError, match="labels must be one integer a sample, not float64"):
            make_trainer(data.TensorDataset(images, labels.astype(np.float64))).fit(1)
        with pytest.raises(ValueError, match=r"a sample must be \(image, label\), not 3 fields"):
            make_trainer(data.TensorDataset(images, labels, labels)).fit(1)

    def test_divergence_is_an_error(self, rng: np.random.Generator) -> None:
        images, labels = blobs(rng, 64).fields
        images = images.copy()
        images[40, 0, 2, 1] = np.nan
        trainer = make_trainer(data.TensorDataset(images, labels), lr=0.125)
        with pytest.raises(FlcudaError, match=r"the loss is nan by epoch 1, step 4.*0\.125"):
            trainer.fit(1)
        assert not trainer.history

    def test_bad_arguments(self, rng: np.random.Generator) -> None:
        empty = data.TensorDataset(np.zeros((0, 1, 4, 4), np.float32), np.zeros(0, np.int64))
        with pytest.raises(ValueError, match="train has no samples"):
            make_trainer(empty)
        with pytest.raises(ValueError, match="test has no samples"):
            make_trainer(blobs(rng, 5), empty)
        with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
            make_trainer(blobs(rng, 5), batch_size=0)
        with pytest.raises(ValueError, match="epochs must not be negative, not -1"):
            make_trainer(blobs(rng, 5)).fit(-1)
