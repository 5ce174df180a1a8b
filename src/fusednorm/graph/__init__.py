"""The graph API: describe normalizations and the operations around them once, plan, and execute many times.

tensors.py         a graph's tensors            nodes.py          every kind of node, in one table
building.py        tensors and nodes            validation.py     mistakes, and inferred values
surroundings.py    what is around a norm        fusion.py         which nodes run as one
calls.py           an operation as a call       plans.py          the combinations of instances
lowering.py        a plan as steps over slots   pointwise.py      the steps that torch runs
packs.py           the tensors of an execution  workspace.py      the memory of virtual tensors
graph.py           Graph: the stages, execute   tuning.py         autotune and its cache
verification.py    the reference, the verdicts  drawing.py        inputs for a graph
serialization.py   JSON                         diagrams.py       explain and Mermaid
errors.py          GraphError and its kinds     logs.py           logging as the environment asks
"""

from __future__ import annotations

from fusednorm.graph.drawing import draw
from fusednorm.graph.errors import (
    GraphError,
    GraphFormatError,
    InvalidGraphError,
    Mistake,
    StageError,
    UnknownPlanError,
    UnsupportedGraphError,
    VariantPackError,
)
from fusednorm.graph.graph import STAGES, Graph
from fusednorm.graph.logs import configure as _configure
from fusednorm.graph.nodes import KINDS
from fusednorm.graph.plans import ExecutionPlan
from fusednorm.graph.tensors import TensorAttributes, channels_last_strides
from fusednorm.graph.verification import Verification

__all__ = [
    "KINDS",
    "STAGES",
    "ExecutionPlan",
    "Graph",
    "GraphError",
    "GraphFormatError",
    "InvalidGraphError",
    "Mistake",
    "StageError",
    "TensorAttributes",
    "UnknownPlanError",
    "UnsupportedGraphError",
    "VariantPackError",
    "Verification",
    "channels_last_strides",
    "draw",
]

_configure()
