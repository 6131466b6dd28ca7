"""Finds how to compute a Problem: asks the sources, measures, remembers, and makes live plans.

The functions `compare`, `plan`, `policy` and `problems` stand in front of the modules of these names, which are
imported by their full names (`from flcuda.finder.plan import Plan`).
"""

from flcuda.finder.candidate import Candidate, Runner
from flcuda.finder.choice import Choice, Key
from flcuda.finder.compare import Comparison, Repetition, compare, repeat
from flcuda.finder.graph_problem import GraphProblem, GraphTensor, Operation, Ref
from flcuda.finder.plan import Plan
from flcuda.finder.policy import Policy, current_policy, policy
from flcuda.finder.problem import ConvolutionProblem, Problem, output_shape
from flcuda.finder.problems import problems, read_problems
from flcuda.finder.report import FindReport, Row
from flcuda.finder.search import find, plan
from flcuda.finder.sources import Source, source
from flcuda.finder.store import ChoiceStore, default_store

__all__ = [
    "Candidate",
    "Choice",
    "ChoiceStore",
    "Comparison",
    "ConvolutionProblem",
    "FindReport",
    "GraphProblem",
    "GraphTensor",
    "Key",
    "Operation",
    "Plan",
    "Policy",
    "Problem",
    "Ref",
    "Repetition",
    "Row",
    "Runner",
    "Source",
    "compare",
    "current_policy",
    "default_store",
    "find",
    "output_shape",
    "plan",
    "policy",
    "problems",
    "read_problems",
    "repeat",
    "source",
]
