"""The backward of batch normalization with a ReLU behind it, fused into one kernel.

The graph is hipDNN's: batchnorm inference gives z again from the saved statistics, the ReLU's backward turns dy into
dz, and batchnorm's backward turns dz into dx, dscale and dbias. z and dz are virtual, and the kernel keeps both in
registers.
"""

from __future__ import annotations

from sample import Case, main

from fusednorm.graph import Graph

TITLE, DIMS = "batchnorm backward", (16, 16, 16, 16)


def describe(graph: Graph, case: Case) -> None:
    dy, x = case.data(graph, "dy"), case.data(graph, "x")
    scale, bias = case.channels(graph, "scale"), case.channels(graph, "bias")
    mean, inv_variance = case.channels(graph, "mean"), case.channels(graph, "inv_variance")
    z = graph.batchnorm_inference(x, mean, inv_variance, scale, bias, name="bn_inference")
    dz = graph.pointwise("relu_backward", dy, z, name="relu_backward")
    results = graph.batchnorm_backward(dz, x, scale, mean, inv_variance, name="bn_backward")
    for tensor, name in zip(results, ("dx", "dscale", "dbias"), strict=True):
        tensor.set_output().set_name(name)


if __name__ == "__main__":
    main(TITLE, describe, DIMS)
