"""The gradient of group normalization's input alone: dx = inv_variance (scale dy - (P + xhat Q) / K).

Of a backward node only what is an output is computed.
"""

from __future__ import annotations

from sample import Case, main

from fusednorm.graph import Graph

TITLE, DIMS, GROUPS = "groupnorm backward data", (8, 256, 16, 16), 32


def describe(graph: Graph, case: Case) -> None:
    dy, x, scale = case.data(graph, "dy"), case.data(graph, "x"), case.channels(graph, "scale")
    mean, inv_variance = case.per_group(graph, "mean"), case.per_group(graph, "inv_variance")
    dx, _, _ = graph.groupnorm_backward(dy, x, scale, mean, inv_variance, num_groups=case.groups)
    dx.set_output().set_name("dx")


if __name__ == "__main__":
    main(TITLE, describe, DIMS, GROUPS)
