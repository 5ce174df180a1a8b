"""Batch normalization from given statistics: y = (x - mean) inv_variance scale + bias."""

from __future__ import annotations

from sample import Case, main

from fusednorm.graph import Graph

TITLE, DIMS = "batchnorm inference", (16, 16, 16, 16)


def describe(graph: Graph, case: Case) -> None:
    x = case.data(graph, "x")
    mean, inv_variance = case.channels(graph, "mean"), case.channels(graph, "inv_variance")
    scale, bias = case.channels(graph, "scale"), case.channels(graph, "bias")
    y = graph.batchnorm_inference(x, mean, inv_variance, scale, bias, name="bn_inference")
    y.set_output().set_name("y")


if __name__ == "__main__":
    main(TITLE, describe, DIMS)
