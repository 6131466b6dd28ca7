"""Samples loaded ahead of their consumer by threads, and copied to the device while it works on those before.

Workers call the data set and write into pinned buffers, one more thread queues the copies and what `DeviceTransform`s
do on the device, and the consumer takes the samples in order. See sample.py for the buffers.

Note [ending]: an iteration ends when its last sample was taken and another is asked for, when its consumer leaves the
loop for whatever reason, and when it is closed. All of these lead to `_Pipeline.close`, on whatever thread the garbage
collector happens to run. The threads know the pipeline, and nothing of them knows the `Iteration`, whose end is what
closes the pipeline. A thread cannot be ended from outside: a worker ends when the data set has given the sample that it
is at; one that does not for `PATIENCE_S` is left behind, and ends by itself, having touched nothing any more. So is the
thread of the copies in a transform that does not return, whose result nobody gets. Only a caller of `close` waits for
so long. Who is interrupted, or lets go of the iteration (which Ctrl-C in a loop's body does: nobody can tell it from
`break`), waits for `HASTE_S`, and one more thread does the rest.

Note [errors]: whatever becomes of a thread, it publishes an outcome for the step that it is at: a step without one
would be waited for for ever.

Note [capture]: the threads allocate, launch, record and wait on streams of their own while the consumer may be
capturing a CUDA graph. That is allowed while the capture's mode is "relaxed" (CuPy's own) or "thread local", not
"global"; so is loading a kernel that a `DeviceTransform` needs for the first time, which mostly happens before the
consumer has its first sample. They never touch a stream of the consumer's. The consumer cannot take, release or first
read a sample within a capture.
"""

import contextlib
import enum
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from numpy.typing import NDArray

from flcuda import device as devices
from flcuda import rng
from flcuda.data.chain import Chain, Dataset, add_note, sample_kept, whole_number
from flcuda.data.sample import CudaLink, Finish, Link, Ring, RingMemory, Sample
from flcuda.data.transforms import Draws, Transform
from flcuda.device import Device
from flcuda.errors import FlcudaError

PATIENCE_S = 5.0
"""The end of an iteration waits at most so many seconds for a data set that is still at a sample."""

HASTE_S = 0.4
"""After Ctrl-C, and when the iteration is let go of, its end is waited for at most so many seconds."""

MOST_WORKERS = 8
"""Workers by default, unless there are fewer cores: each holds a sample in memory, and decoders have threads too."""

# For a lock that is held for microseconds: who cannot get it holds it itself, further down its own stack.
_LOCK_PATIENCE_S = 1.0
_SIGNAL_S = 0.2
_INDICES_NAMED = 8


@runtime_checkable
class DeviceTransform(Protocol):
    """A change of a batch whose random parameters are drawn on the host, by a worker, and travel with the sample.

    On a device it is applied ahead: while the consumer works on the sample before.
    """

    def parameters(self, batch: Any, draws: Draws) -> NDArray[Any]:
        """Returns the parameters of a batch as the data set gave it, (N, ...) on the host."""
        ...

    def apply(self, batch: Any, parameters: Any) -> Any:
        """Returns the changed batch.

        Called by the loader's thread that queues copies, by the consumer's without workers, one call at a time; context
        variables of the consumer's, such as a policy, are not set on the former. On the CPU device the consumer calls
        it, by `Sample.arrays`.

        Args:
            batch: on the device, to be read on the current stream, the loader's own; borrowed, and not to be written:
                what the data set gave on the device is here as it is.
            parameters: likewise.

        Returns:
            What is whole when the current stream comes to it, in memory allocated in that stream's order (CuPy's
            current allocator is the loader's); or `batch`, or parts of it. The loader takes the next batch into it
            once the consumer has released the sample, if nobody keeps it.
        """
        ...


class PrefetchDataset:
    """A data set served in order and ahead of time: iterating gives one epoch of `Sample`s.

    An item of the data set is a sample: for training one of batches. `set_epoch` says which epoch the next iteration
    is of; it never changes by itself. Iterations do not share anything: threads, stream and buffers belong to one and
    end with it, see `Iteration`.

    The samples of an epoch are the same whatever the depth, the workers and the device. Memory is bounded: `depth`
    pinned and device buffers as large as the largest sample and an eighth, and a sample in each worker; what
    `DeviceTransform`s make of `depth` samples, and of one more while the consumer still has arrays of the last; of
    fields that the data set makes on the device, as many samples more as there are buffers, twice as many where a
    `DeviceTransform` returns what it was given. Fields of the device that such a transform takes are in no buffer.

    A batch that the data set could serve in part (see `flcuda.data.chain.KeepsSome`) is served so, and `Sample.kept`
    says what is left; one of which nothing is left is passed over and counted, see `Iteration.skipped`.

    A data set of one's own is called from several threads. If it keeps the epoch as a state, its `set_epoch` must not
    be called while an iteration runs.

    Args:
        dataset: any data set; fields are numbers, arrays and `ImageBatch`es, of the host or of the device.
        device: as in `flcuda.device.resolve`.
        depth: slots of the ring. 1 copies only once the consumer has released the sample before.
        workers: threads that call the data set; None asks it, or the first of those that it is made of, for
            `best_workers`, and takes one a core, at most 8, where nobody says; 0 loads and copies when the consumer
            asks.
        transforms: the i-th changes the i-th field on the device; None and a missing one leave it as it is. A
            `Transform` is called when the sample's arrays are asked for, on the consumer's current stream and thread. A
            `DeviceTransform` is applied ahead, on the stream of the copies, as soon as one of the buffers is free;
            what it raises ends the iteration. The data set must be one of batches.
        start: step at which the first iteration begins, to take up an interrupted epoch; later ones begin at 0.
        seed: of the transforms' random numbers, which are those that a `TransformDataset` would have used.

    Attributes:
        start: step at which the next iteration begins.

    Raises:
        ValueError: an argument out of range; names it.
        TypeError: a number that is not whole, or transforms for a data set that is not one of batches.
        DeviceNotFoundError: the device is not here.
    """

    def __init__(
        self,
        dataset: Dataset,
        device: str | Device | None = None,
        depth: int = 2,
        workers: int | None = None,
        transforms: Sequence[Transform | DeviceTransform | None] = (),
        start: int = 0,
        *,
        seed: int = 0,
    ) -> None:
        self.depth = whole_number("depth", depth, 1)
        asked = None if workers is None else whole_number("workers", workers, 0)
        self.transforms = tuple(transforms)
        is_changed = any(transform is not None for transform in self.transforms)
        if is_changed and not callable(getattr(dataset, "draws", None)):
            raise TypeError(
                f"transforms need a data set of batches, such as BatchDataset, not a {type(dataset).__name__}"
            )
        self.start = whole_number("start", start, 0)
        if self.start > len(dataset):
            raise ValueError(f"start must be at most the {len(dataset)} steps of an epoch, not {start}")
        self.dataset = dataset
        self.seed = rng.checked_seed(seed)
        self.device = devices.resolve(device)
        # Last, as a decoder that is asked makes itself ready.
        self.workers = whole_number("best_workers", _best_workers(dataset), 0) if asked is None else asked
        self._epoch = 0
        self._iterations: weakref.WeakSet[Iteration] = weakref.WeakSet()

    def __len__(self) -> int:
        """Returns the number of samples of a whole epoch."""
        return len(self.dataset)

    @property
    def epoch(self) -> int:
        """Which epoch the next iteration is of."""
        # Another's attribute of this name may be anything.
        return self.dataset.epoch if isinstance(self.dataset, Chain) else self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next iteration is of, here and in the data set.

        Args:
            epoch: counted from 0.

        Raises:
            ValueError: a negative epoch.
        """
        self._epoch = whole_number("epoch", epoch, 0)
        below = getattr(self.dataset, "set_epoch", None)
        if callable(below):
            below(self._epoch)

    def __iter__(self) -> "Iteration":
        start, self.start = whole_number("start", self.start, 0), 0
        count = len(self.dataset)
        if start > count:
            raise ValueError(f"start must be at most the {count} steps of an epoch, not {start}")
        link = self._new_link()
        load = _Load(self.dataset, self.transforms, self.seed, self.epoch, link)
        iteration = Iteration(_Pipeline(load, Ring(link, self.depth), start, count, self.workers), start, count)
        self._iterations.add(iteration)
        return iteration

    @property
    def memory(self) -> RingMemory:
        """What the buffers of the running iterations have allocated; nothing when none runs."""
        return sum((iteration.memory for iteration in self._iterations), RingMemory())

    def _new_link(self) -> Link | None:
        return None if self.device.kind == "cpu" else CudaLink(self.device)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_iterations"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _iterations=weakref.WeakSet())


class Iteration(Iterator[Sample]):
    """One pass over an epoch, for one consumer.

    The sample before is released when the next is taken. The end of the pass, an exception of the data set, `close`,
    and letting go of the iteration (a `break` out of the loop, an exception in it) release all samples, end all
    threads and free all buffers.

    Attributes:
        skipped: steps so far that were passed over because the data set could serve nothing of them.
    """

    def __init__(self, pipeline: "_Pipeline", start: int, stop: int) -> None:
        self._pipeline = pipeline
        self._step = start
        self._stop = stop
        self._sample: Sample | None = None
        self.skipped = 0
        self._finalizer = weakref.finalize(self, pipeline.close, HASTE_S)
        try:
            pipeline.start()
        except BaseException as error:
            # The traceback keeps `self`.
            self._close(_patience(error))
            raise

    @property
    def memory(self) -> RingMemory:
        """What its buffers have allocated."""
        return self._pipeline.ring.memory

    def __next__(self) -> Sample:
        """Releases the last sample and returns the next, waiting for its copy and its transforms ahead to be queued.

        Raises:
            FlcudaError: the current stream captures a graph.
            Exception: what the data set or a transform ahead raised, with a note that says for which sample; the
                iteration has ended.
        """
        if not self._finalizer.alive:
            raise StopIteration
        if self._sample is not None:
            self._sample.release()
            self._sample = None
        while self._step < self._stop:
            try:
                outcome = self._pipeline.take(self._step)
            except BaseException as error:
                self._close(_patience(error))
                raise
            if isinstance(outcome, BaseException):
                self._close(_patience(outcome))
                try:
                    raise outcome
                finally:
                    # The traceback has this frame: no cycle, which would keep what it refers to for longer.
                    del outcome
            self._step += 1
            if isinstance(outcome, Sample):
                outcome.skipped = self.skipped
                self._sample = outcome
                return outcome
            self.skipped += 1
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Ends the iteration now; idempotent."""
        self._close(PATIENCE_S)

    def _close(self, patience_s: float) -> None:
        self._sample = None
        self._pipeline.close(patience_s)
        self._finalizer.detach()

    def __enter__(self) -> "Iteration":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._close(_patience(error))


def _patience(error: BaseException | None) -> float:
    return HASTE_S if isinstance(error, KeyboardInterrupt) else PATIENCE_S


class _Nothing(enum.Enum):
    """The outcome of a step of which nothing could be served."""

    LEFT = enum.auto()


_T = TypeVar("_T")
_Outcome = Sample | BaseException | _Nothing
_Change = tuple[int, Callable[[list[Any]], None]]  # of the field at a place, in the list of all


class _Load:
    """Makes a sample and its fields of a step; called by several threads."""

    def __init__(
        self,
        dataset: Dataset,
        transforms: Sequence[Transform | DeviceTransform | None],
        seed: int,
        epoch: int,
        link: Link | None,
    ) -> None:
        self._dataset: Any = dataset
        self._transforms = [(place, transform) for place, transform in enumerate(transforms) if transform is not None]
        self._seed = seed
        self._epoch = epoch
        self._link = link

    def __call__(self, step: int) -> tuple[Sample, list[Any]] | None:
        """Returns a sample and what is to be staged for it: its fields and the parameters of its transforms.

        None when nothing of the step is left.
        """
        served, kept = sample_kept(self._dataset, step, self._epoch)
        if kept is not None and not len(kept):
            return None
        fields = list(served)
        if not self._transforms:
            return Sample(step, self._epoch, self._link, kept=kept), fields
        count = len(fields)
        ahead: list[_Change] = []
        later: list[_Change] = []
        taken: list[int] = []
        for place, transform in self._transforms:
            if place >= count:
                raise ValueError(f"transforms[{place}] has no field: the samples have {count}")
            # As in a TransformDataset.
            draws = self._dataset.draws(step, self._epoch, self._seed).with_stream(256 * place)
            if kept is not None:
                draws = draws.take(kept)
            if len(draws.indices) != len(fields[place]):
                raise ValueError(
                    f"transforms[{place}]: field {place} has {len(fields[place])} rows and the batch "
                    f"{len(draws.indices)} samples: its random numbers cannot be told apart; a data set that leaves "
                    "samples out must say by batch_kept which are left"
                )
            if isinstance(transform, DeviceTransform):
                changes = later if self._link is None else ahead
                changes.append((place, _changed(place, transform, len(fields))))
                taken += [place, len(fields)]
                fields.append(transform.parameters(fields[place], draws))
            else:
                later.append((place, _transformed(place, transform, draws)))
        sample = Sample(
            step,
            self._epoch,
            self._link,
            self._finish(step, later, count) if later else None,
            ahead=self._finish(step, ahead, count) if ahead else None,
            taken=taken,
            kept=kept,
        )
        return sample, fields

    def _finish(self, step: int, changes: Sequence[_Change], count: int) -> Finish:
        """Returns what makes changes to the fields of a step, and leaves the first `count`."""

        def finish(arrived: list[Any]) -> list[Any]:
            arrived = list(arrived)
            for place, change in changes:
                try:
                    change(arrived)
                except Exception as error:
                    note = f"while transforms[{place}] changed field {place} of sample {step} of epoch {self._epoch}"
                    add_note(error, note + self._names(step), "transforms")
                    raise
            return arrived[:count]

        return finish

    def explain(self, error: BaseException, step: int) -> BaseException:
        """Returns an error with a note that says where it comes from, fit to be raised out of `__next__`."""
        if isinstance(error, StopIteration):
            # It would end the consumer's loop without a word.
            cause, error = error, RuntimeError("StopIteration was raised for a sample")
            error.__cause__ = cause
        note = f"while sample {step} of epoch {self._epoch} of a {type(self._dataset).__name__} was loaded"
        add_note(error, note + self._names(step), "prefetch")
        return error

    def _names(self, step: int) -> str:
        indices = getattr(self._dataset, "indices", None)
        if not callable(indices):
            return ""
        try:
            numbers = indices(step, self._epoch).tolist()
        except Exception:  # it explains an error, and must not become another
            return ""
        more = ", ..." if len(numbers) > _INDICES_NAMED else ""
        return f": a batch of samples {', '.join(str(number) for number in numbers[:_INDICES_NAMED])}{more}"


def _changed(place: int, transform: DeviceTransform, parameters: int) -> Callable[[list[Any]], None]:
    def change(fields: list[Any]) -> None:
        fields[place] = transform.apply(fields[place], fields[parameters])

    return change


def _transformed(place: int, transform: Transform, draws: Draws) -> Callable[[list[Any]], None]:
    def change(fields: list[Any]) -> None:
        fields[place] = transform(fields[place], draws)

    return change


class _Pipeline:
    """The threads of one iteration and what they share.

    A step's outcome is a sample or an exception. It goes from a worker by `_staged` to the thread that queues copies
    and what is made ahead, and from there by `_ready` to the consumer, each in the order of the steps.
    """

    def __init__(self, load: _Load, ring: Ring, start: int, stop: int, workers: int) -> None:
        self.ring = ring
        self._load = load
        self._link = ring.link
        self._depth = len(ring.slots)
        self._start = start
        self._stop = stop
        self._workers = min(workers, stop - start)
        self._is_synchronous = not workers
        self._condition = threading.Condition(threading.Lock())
        self._stopping = False
        self._next = start
        # Which step may be staged in each slot: the copy of the one before is queued.
        self._turn = [start + (place - start) % self._depth for place in range(self._depth)]
        self._staged: dict[int, _Outcome] = {}
        self._ready: dict[int, _Outcome] = {}
        self._threads: tuple[threading.Thread, ...] = ()
        self._ending = threading.RLock()
        self._own_stream: Any = None  # to load on, of a consumer that loads by itself

    def start(self) -> None:
        """Begins to load."""
        if not self._workers:
            return
        bodies = [("copies", self._send_all), *((f"worker {i}", self._work) for i in range(self._workers))]
        # Daemons: the interpreter's end must not wait for them before it comes to closing the iteration.
        self._threads = tuple(
            threading.Thread(target=body, name=f"flcuda prefetch {name}", daemon=True) for name, body in bodies
        )
        for thread in self._threads:
            thread.start()

    def take(self, step: int) -> _Outcome:
        """Waits for a step's outcome. All samples before it have been released."""
        if self._is_synchronous:
            outcome = self._load_now(step)
        else:
            with self._condition:
                if not self._wait_for(lambda: step in self._ready):
                    raise FlcudaError(f"the iteration was closed by another thread while sample {step} was waited for")
                outcome = self._ready.pop(step)
        # Here, as workers at later steps may have raised the same exception.
        return self._load.explain(outcome, step) if isinstance(outcome, BaseException) else outcome

    def notify(self) -> None:
        """Wakes the threads up: a sample was released."""
        with self._condition:
            self._condition.notify_all()

    def close(self, patience_s: float) -> None:
        """Ends everything; idempotent. See Note [ending].

        Args:
            patience_s: how long to wait for the threads; what is left to do then is another thread's.
        """
        self._stopping = True
        now = time.monotonic()
        deadline = now + PATIENCE_S
        is_own = threading.current_thread() in self._threads
        if is_own or not self._condition.acquire(timeout=min(patience_s, _LOCK_PATIENCE_S)):
            # The garbage collector has chosen a thread that cannot be waited for, or the holder of the lock.
            self._end_elsewhere(deadline)
            return
        self._condition.release()
        self.notify()
        if patience_s < PATIENCE_S and not self._are_over(now + patience_s):
            # Here and now, as whoever reads them is here.
            self.ring.abandon()
            self._end_elsewhere(deadline)
            return
        self._end(deadline)

    def _end_elsewhere(self, deadline: float) -> None:
        # At the interpreter's end no thread can be started, and nothing needs to be freed.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._end, args=(deadline,), name="flcuda prefetch end", daemon=True).start()

    def _end(self, deadline: float) -> None:
        with self._ending:
            self.notify()
            self._are_over(deadline)
            busy = [thread.name for thread in self._threads if thread.is_alive()]
            self._threads = ()
            self._staged.clear()
            self._ready.clear()
            self.ring.close()
        if busy:
            # Of the thread of the copies only what it calls for the user can take so long.
            waited = "a transform" if all(name.endswith("copies") for name in busy) else "the data set"
            message = f"{waited} has not returned for {PATIENCE_S:g} s: {', '.join(busy)} will end when it does"
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _are_over(self, deadline: float) -> bool:
        """Waits until the threads have ended, at most until the deadline; says whether they have."""
        threads = [thread for thread in self._threads if thread.is_alive()]  # not one that could not be started
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _wait_for(self, is_so: Callable[[], bool]) -> bool:
        """Waits, with the lock held, until something is so; False when the iteration ends."""
        while not (self._stopping or is_so()):
            # Not for ever: a signal that the system gives to another thread does not wake this one, and Ctrl-C is
            # raised here.
            self._condition.wait(_SIGNAL_S)
        return not self._stopping

    def _load_now(self, step: int) -> _Outcome:
        if self._link is not None and self._own_stream is None:
            self._own_stream = self._link.new_stream()
        with _used(self._link, self._own_stream):
            outcome = _caught(self._stage_now, step)
        if isinstance(outcome, Sample):
            with _used(self._link):
                outcome = _caught(lambda step: self.ring.slot(step).send(), step)
        return outcome

    def _stage_now(self, step: int) -> _Outcome:
        loaded = self._load(step)
        if loaded is None:
            return _Nothing.LEFT
        self.ring.slot(step).stage(*loaded)
        return loaded[0]

    def _work(self) -> None:
        stream = None
        while (step := self._take_step()) is not None:
            outcome: _Outcome | None = FlcudaError(f"the worker that loaded sample {step} has died")
            try:
                try:
                    if self._link is not None and stream is None:
                        stream = self._link.new_stream()
                    with _used(self._link, stream):
                        outcome = _caught(self._stage, step)
                except BaseException as error:
                    outcome = error
            finally:
                if outcome is not None:
                    with self._condition:
                        if isinstance(outcome, BaseException):
                            self._next = self._stop  # nothing after it will be asked for
                        if not self._stopping:
                            self._staged[step] = outcome
                        self._condition.notify_all()
            if outcome is None:
                return
            # A traceback has this frame: no cycle, which would keep what it refers to for longer.
            outcome = None

    def _take_step(self) -> int | None:
        with self._condition:
            if self._stopping or self._next >= self._stop:
                return None
            step = self._next
            self._next += 1
            return step

    def _stage(self, step: int) -> _Outcome | None:
        """Loads a step and writes it into its slot when it is its turn; None when the iteration ends."""
        loaded = self._load(step)
        if loaded is None:
            return _Nothing.LEFT
        sample, fields = loaded
        with self._condition:
            if not self._wait_for(lambda: self._turn[step % self._depth] == step):
                return None
            slot = self.ring.slot(step)
        slot.stage(sample, fields)
        sample._on_release = self.notify
        return sample

    def _send_all(self) -> None:
        for step in range(self._start, self._stop):
            outcome: _Outcome | None = FlcudaError(f"the thread that sent sample {step} has died")
            try:
                try:
                    outcome = self._send(step)
                except BaseException as error:
                    outcome = error
            finally:
                if outcome is not None:
                    with self._condition:
                        self._turn[step % self._depth] = step + self._depth
                        # Of one that comes too late nothing is kept.
                        if not self._stopping:
                            self._ready[step] = outcome
                        self._condition.notify_all()
            if outcome is None or isinstance(outcome, BaseException):
                return

    def _send(self, step: int) -> _Outcome | None:
        """Sends a step on its way when it is staged and its slot is free; None when the iteration ends."""
        with self._condition:
            if not self._wait_for(lambda: step in self._staged):
                return None
            outcome = self._staged.pop(step)
            if not isinstance(outcome, Sample):
                return outcome
            slot = self.ring.slot(step)
            if not self._wait_for(lambda: slot.is_free):
                return None
        with _used(self._link):
            return _caught(lambda _: slot.send(), step)


def _caught(act: Callable[[int], _T], step: int) -> _T | BaseException:
    """Returns what is made of a step, or the exception.

    For the inside of `_used`: a context manager sets the traceback of what passes it, which some exceptions refuse.
    """
    try:
        return act(step)
    except BaseException as error:
        return error


def _used(link: Link | None, stream: Any = None) -> Any:
    return devices.CPU.use() if link is None else link.use(stream)


def _best_workers(dataset: Any) -> int:
    """Returns what a data set says of itself, or the first below it that does."""
    while dataset is not None:
        told = getattr(dataset, "best_workers", None)
        if isinstance(told, int):
            return told
        dataset = getattr(dataset, "dataset", None)
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)))
