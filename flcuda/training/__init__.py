"""Training: the trainer, its meters and its learning rates."""

from flcuda.training.meters import Meter
from flcuda.training.schedules import WarmupCosine
from flcuda.training.trainer import EpochResult, Report, Trainer

__all__ = ["EpochResult", "Meter", "Report", "Trainer", "WarmupCosine"]
