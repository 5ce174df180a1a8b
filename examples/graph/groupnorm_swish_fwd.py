"""Group normalization with swish behind it, in one kernel, and the statistics that a backward needs."""

from __future__ import annotations

from sample import Case, main

from fusednorm.graph import Graph

TITLE, DIMS, GROUPS = "groupnorm swish forward", (8, 256, 16, 16), 32


def describe(graph: Graph, case: Case) -> None:
    x, scale, bias = case.data(graph, "x"), case.channels(graph, "scale"), case.channels(graph, "bias")
    z, mean, inv_variance = graph.groupnorm(x, scale, bias, num_groups=case.groups, epsilon=1e-5, name="groupnorm")
    graph.pointwise("silu", z, name="swish").set_output().set_name("y")
    mean.set_output().set_name("mean")
    inv_variance.set_output().set_name("inv_variance")


if __name__ == "__main__":
    main(TITLE, describe, DIMS, GROUPS)
