"""cuDNN from Python with nothing to compile.

Importing flcuda needs no GPU, no CuPy and no cuDNN: the public names below are imported on first use.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# public name -> (module, attribute; None: the module itself)
_PUBLIC: dict[str, tuple[str, str | None]] = {
    "amp": ("flcuda.amp", None),
    "autograd": ("flcuda.autograd", None),
    "cudnn": ("flcuda.cudnn", None),
    "data": ("flcuda.data", None),
    "functional": ("flcuda.functional", None),
    "models": ("flcuda.models", None),
    "nn": ("flcuda.nn", None),
    "optim": ("flcuda.optim", None),
    "training": ("flcuda.training", None),
    "Tensor": ("flcuda.autograd", "Tensor"),
    "no_grad": ("flcuda.autograd", "no_grad"),
    "Parameter": ("flcuda.parameters", "Parameter"),
    "ChoiceStore": ("flcuda.finder", "ChoiceStore"),
    "ConvolutionProblem": ("flcuda.finder", "ConvolutionProblem"),
    "GraphProblem": ("flcuda.finder", "GraphProblem"),
    "Policy": ("flcuda.finder", "Policy"),
    "Problem": ("flcuda.finder", "Problem"),
    "capture": ("flcuda.training.step_graph", "capture"),
    "compare": ("flcuda.finder", "compare"),
    "find": ("flcuda.finder", "find"),
    "graph": ("flcuda.traced", "graph"),
    "plan": ("flcuda.finder", "plan"),
    "policy": ("flcuda.finder", "policy"),
    "problems": ("flcuda.finder", "problems"),
    "read_problems": ("flcuda.finder", "read_problems"),
    "repeat": ("flcuda.finder", "repeat"),
    "source": ("flcuda.finder", "source"),
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Imports a public name on its first use."""
    try:
        module_name, attribute = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module 'flcuda' has no attribute {name!r}") from None
    module = importlib.import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names."""
    return sorted(__all__)
