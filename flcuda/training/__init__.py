"""Training: the trainer, its meters and its learning rates, steps as CUDA graphs, and where a step's time goes."""

from flcuda.training.meters import Meter
from flcuda.training.schedules import WarmupCosine
from flcuda.training.step_graph import CapturedStep
from flcuda.training.step_profile import StepProfile, profile_step, step_regret
from flcuda.training.trainer import EpochResult, Report, Trainer

__all__ = [
    "CapturedStep",
    "EpochResult",
    "Meter",
    "Report",
    "StepProfile",
    "Trainer",
    "WarmupCosine",
    "profile_step",
    "step_regret",
]
