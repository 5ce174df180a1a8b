"""The gradients of group normalization's parameters alone: dscale = sum dy xhat, dbias = sum dy."""

from __future__ import annotations

from sample import Case, main

from fusednorm.graph import Graph

TITLE, DIMS, GROUPS = "groupnorm backward gamma beta", (8, 256, 16, 16), 32


def describe(graph: Graph, case: Case) -> None:
    dy, x, scale = case.data(graph, "dy"), case.data(graph, "x"), case.channels(graph, "scale")
    mean, inv_variance = case.per_group(graph, "mean"), case.per_group(graph, "inv_variance")
    _, dscale, dbias = graph.groupnorm_backward(dy, x, scale, mean, inv_variance, num_groups=case.groups)
    dscale.set_output().set_name("dscale")
    dbias.set_output().set_name("dbias")


if __name__ == "__main__":
    main(TITLE, describe, DIMS, GROUPS)
