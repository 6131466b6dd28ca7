"""Running loss and accuracy, weighted by images and summed on the device."""

from typing import Any

from flcuda import device as devices
from flcuda.ops import elementwise


class Meter:
    """Mean loss and share of right answers of the batches added since it was made.

    Adding launches work on the batch's device and never waits for it; `collect` does, and is the only one that does.
    """

    def __init__(self) -> None:
        self.images = 0
        self._pending_images = 0
        self._loss_sum: Any = None
        self._correct_sum: Any = None
        self._loss_total = 0.0
        self._correct_total = 0

    def add(self, loss: Any, correct: Any, images: int) -> None:
        """Adds a batch.

        Args:
            loss: 0-d array, the mean over the batch; borrowed, read on the current stream.
            correct: 0-d array, the number of right answers; borrowed.
            images: size of the batch.
        """
        if self._loss_sum is None:
            place = devices.device_of(loss)
            self._loss_sum = devices.zeros((), loss.dtype, device=place)
            self._correct_sum = devices.zeros((), correct.dtype, device=place)
        elementwise.accumulate_(self._loss_sum, elementwise.scale(loss, float(images)))
        self._correct_sum += correct
        self._pending_images += images

    def collect(self) -> None:
        """Reads what was added since the last call: waits for the device.

        The sums on the device stay short, so float32 suffices there; the totals are kept in double precision here.
        """
        if self._loss_sum is None:
            return
        self._loss_total += float(self._loss_sum)
        self._correct_total += int(self._correct_sum)
        self.images += self._pending_images
        self._loss_sum = None
        self._correct_sum = None
        self._pending_images = 0

    @property
    def loss(self) -> float:
        """Mean loss an image of what was collected; NaN before the first image."""
        return self._loss_total / self.images if self.images else float("nan")

    @property
    def accuracy(self) -> float:
        """Share of right answers of what was collected, 0 to 1; NaN before the first image."""
        return self._correct_total / self.images if self.images else float("nan")
