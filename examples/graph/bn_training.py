"""Batch normalization in training: y, the saved statistics, and the running statistics that follow.

next_running = (1 - momentum) prev_running + momentum batch, with the unbiased variance of the batch.
"""

from __future__ import annotations

from sample import Case, main

from fusednorm.graph import Graph

TITLE, DIMS = "batchnorm training", (16, 16, 16, 16)


def describe(graph: Graph, case: Case) -> None:
    x, scale, bias = case.data(graph, "x"), case.channels(graph, "scale"), case.channels(graph, "bias")
    running_mean = case.channels(graph, "prev_running_mean")
    running_variance = case.channels(graph, "prev_running_variance")
    results = graph.batchnorm(
        x, scale, bias, running_mean, running_variance, epsilon=1e-5, momentum=0.1, name="bn_training"
    )
    names = ("y", "mean", "inv_variance", "next_running_mean", "next_running_variance")
    for tensor, name in zip(results, names, strict=True):
        tensor.set_output().set_name(name)


if __name__ == "__main__":
    main(TITLE, describe, DIMS)
