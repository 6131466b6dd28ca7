"""`flcuda.graph`: a Python function of tensors becomes one fused graph, with gradients.

The decorated function is called once with stand-ins for its arrays, which record what it does as a `GraphProblem`; the
finder plans it like any Problem. `flcuda.graph` is the decorator, and its methods are the operations::

    @flcuda.graph(compute="float32")
    def conv_bias_silu(x, w, b):
        return flcuda.graph.silu(flcuda.graph.conv(x, w, padding=1) + b)
"""

from flcuda.traced.function import GraphDecorator, GraphFunction
from flcuda.traced.operations import Traced

graph = GraphDecorator()
"""The decorator of traced functions, whose methods are their operations; `flcuda.graph`."""

__all__ = ["GraphDecorator", "GraphFunction", "Traced", "graph"]
