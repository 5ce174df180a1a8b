"""What the graph tests share: one small graph for every kind of node and for every pattern of fusion."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusednorm.activations import FORMULAS
from fusednorm.graph import Graph, TensorAttributes, channels_last_strides, draw

DIMS = (2, 8, 5, 6)
Build = Callable[["Describer"], None]


class Describer:
    """A graph under construction with data in one dtype and layout, float32 parameters."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        layout: str = "nchw",
        dims: tuple[int, ...] = DIMS,
        intermediate: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.dims, self.layout, self.dtype = dims, layout, dtype
        self.graph = Graph(dtype, intermediate, name="test", device=device)
        self.channel_dims = (1, dims[1], *[1] * (len(dims) - 2))

    def data(self, name: str) -> TensorAttributes:
        strides = channels_last_strides(self.dims) if self.layout == "nhwc" else None
        return self.graph.tensor(self.dims, strides, name=name)

    def channels(self, name: str) -> TensorAttributes:
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return self.graph.tensor(self.channel_dims, dtype=dtype, name=name)

    def statistic(self, name: str, dims: tuple[int, ...]) -> TensorAttributes:
        return self.graph.tensor(dims, dtype=torch.float64 if self.dtype == torch.float64 else torch.float32, name=name)

    def outputs(self, **tensors: TensorAttributes) -> None:
        for name, tensor in tensors.items():
            tensor.set_output().set_name(name)


def _batchnorm_inference(given: str) -> Build:
    def build(d: Describer) -> None:
        x, mean, spread = d.data("x"), d.channels("mean"), d.channels(given)
        scale, bias = d.channels("scale"), d.channels("bias")
        d.outputs(y=d.graph.batchnorm_inference(x, mean, scale=scale, bias=bias, **{given: spread}))

    return build


def _batchnorm(d: Describer) -> None:
    names = ("x", "scale", "bias", "prev_running_mean", "prev_running_variance")
    x, *parameters = d.data(names[0]), *(d.channels(name) for name in names[1:])
    results = d.graph.batchnorm(x, *parameters, momentum=0.3)
    outputs = ("y", "mean", "inv_variance", "next_running_mean", "next_running_variance")
    d.outputs(**dict(zip(outputs, results, strict=True)))


def _forward(kind: str, **attributes: object) -> Build:
    def build(d: Describer) -> None:
        results = getattr(d.graph, kind)(*_affine(d, kind), **attributes)
        d.outputs(**dict(zip(_forward_ports(kind), results, strict=True)))

    return build


def _forward_ports(kind: str) -> tuple[str, ...]:
    return ("y", "inv_variance") if kind == "rmsnorm" else ("y", "mean", "inv_variance")


def _affine(d: Describer, kind: str) -> list[TensorAttributes]:
    """x, scale and bias as a forward of this kind takes them."""
    if kind in ("layernorm", "rmsnorm"):
        dtype = torch.float64 if d.dtype == torch.float64 else torch.float32
        names = ("scale",) if kind == "rmsnorm" else ("scale", "bias")
        return [d.data("x"), *(d.graph.tensor(d.dims[-2:], dtype=dtype, name=name) for name in names)]
    return [d.data("x"), d.channels("scale"), d.channels("bias")]


def _statistics(d: Describer, kind: str) -> list[TensorAttributes]:
    dims = {
        "batchnorm": d.channel_dims,
        "groupnorm": (d.dims[0], 4),
        "instancenorm": (*d.dims[:2], *[1] * (len(d.dims) - 2)),
    }.get(kind, (*d.dims[:-2], 1, 1))
    names = ("inv_variance",) if kind == "rmsnorm" else ("mean", "inv_variance")
    return [d.statistic(name, dims) for name in names]


def _backward(kind: str, wanted: tuple[str, ...] = ("dx", "dscale", "dbias"), **attributes: object) -> Build:
    def build(d: Describer) -> None:
        x, scale, *_ = _affine_of_backward(d, kind)
        results = getattr(d.graph, f"{kind}_backward")(d.data("dy"), x, scale, *_statistics(d, kind), **attributes)
        named = dict(zip(("dx", "dscale", "dbias"), results, strict=False))
        d.outputs(**{name: tensor for name, tensor in named.items() if name in wanted})

    return build


def _affine_of_backward(d: Describer, kind: str) -> list[TensorAttributes]:
    if kind in ("layernorm", "rmsnorm"):
        dtype = torch.float64 if d.dtype == torch.float64 else torch.float32
        return [d.data("x"), d.graph.tensor(d.dims[-2:], dtype=dtype, name="scale")]
    return [d.data("x"), d.channels("scale")]


def _given(kind: str, **attributes: object) -> Build:
    """A norm with given statistics, in the inference phase."""

    def build(d: Describer) -> None:
        named = {tensor.name: tensor for tensor in (*_affine(d, kind), *_statistics(d, kind))}
        y, *rest = getattr(d.graph, kind)(**named, **attributes)
        assert not any(rest)
        d.outputs(y=y)

    return build


def _pointwise(mode: str, count: int) -> Build:
    def build(d: Describer) -> None:
        d.outputs(y=d.graph.pointwise(mode, *(d.data(f"in_{index}") for index in range(count))))

    return build


def _broadcast(d: Describer) -> None:
    d.outputs(y=d.graph.pointwise("mul", d.data("x"), d.channels("factor").set_dtype(d.dtype)))


def _quantize(d: Describer) -> None:
    d.outputs(y=d.graph.quantize(d.data("x"), d.statistic("scale", (1,)), dtype="int8"))


def _block_scale_quantize(d: Describer) -> None:
    y, scale = d.graph.block_scale_quantize(d.data("x"), dtype=torch.float8_e4m3fn)
    d.outputs(y=y, row_scale=scale)


NODES: dict[str, Build] = {
    "batchnorm_inference": _batchnorm_inference("inv_variance"),
    "batchnorm_inference_variance": _batchnorm_inference("variance"),
    "batchnorm": _batchnorm,
    "batchnorm_backward": _backward("batchnorm"),
    "groupnorm": _forward("groupnorm", num_groups=4),
    "groupnorm_given": _given("groupnorm", num_groups=4),
    "groupnorm_backward": _backward("groupnorm", num_groups=4),
    "groupnorm_backward_data": _backward("groupnorm", ("dx",), num_groups=4),
    "groupnorm_backward_gamma_beta": _backward("groupnorm", ("dscale", "dbias"), num_groups=4),
    "instancenorm": _forward("instancenorm"),
    "instancenorm_given": _given("instancenorm"),
    "instancenorm_backward": _backward("instancenorm"),
    "layernorm": _forward("layernorm"),
    "layernorm_given": _given("layernorm"),
    "layernorm_backward": _backward("layernorm"),
    "rmsnorm": _forward("rmsnorm"),
    "rmsnorm_given": _given("rmsnorm"),
    "rmsnorm_backward": _backward("rmsnorm"),
    **{name: _pointwise(name, 1) for name in FORMULAS},
    **{f"{name}_backward": _pointwise(f"{name}_backward", 2) for name in FORMULAS},
    "add": _pointwise("add", 2),
    "quantize": _quantize,
    "block_scale_quantize": _block_scale_quantize,
    "mul_broadcast": _broadcast,
}


def _norm_activation(d: Describer) -> None:
    z, mean, inv_variance = d.graph.groupnorm(*_affine(d, "groupnorm"), num_groups=4)
    d.outputs(y=d.graph.pointwise("silu", z), mean=mean, inv_variance=inv_variance)


def _norm_add_activation(d: Describer) -> None:
    z, _, _ = d.graph.groupnorm(*_affine(d, "groupnorm"), num_groups=4, phase="inference")
    d.outputs(y=d.graph.pointwise("silu", d.graph.pointwise("add", z, d.data("residual"))))


def _activation_backward_norm_backward(d: Describer) -> None:
    """Forward and backward in one graph: z is virtual, and both its readers are fused with a norm."""
    x, scale, bias = _affine(d, "groupnorm")
    z, mean, inv_variance = d.graph.groupnorm(x, scale, bias, num_groups=4)
    d.outputs(y=d.graph.pointwise("silu", z))
    dz = d.graph.pointwise("silu_backward", d.data("dy"), z)
    dx, dscale, dbias = d.graph.groupnorm_backward(dz, x, scale, mean, inv_variance, num_groups=4)
    d.outputs(dx=dx, dscale=dscale, dbias=dbias)


def _saved_backward(d: Describer) -> None:
    """The backward alone, z recomputed from saved statistics."""
    x, scale, bias = _affine(d, "groupnorm")
    mean, inv_variance = _statistics(d, "groupnorm")
    z, _, _ = d.graph.groupnorm(x, scale, bias, num_groups=4, mean=mean, inv_variance=inv_variance)
    dz = d.graph.pointwise("silu_backward", d.data("dy"), z)
    dx, dscale, dbias = d.graph.groupnorm_backward(dz, x, scale, mean, inv_variance, num_groups=4)
    d.outputs(dx=dx, dscale=dscale, dbias=dbias)


def _batchnorm_chain(d: Describer) -> None:
    """hipDNN's batchnorm inference, activation backward, batchnorm backward."""
    x, scale, bias = _affine(d, "batchnorm")
    mean, inv_variance = _statistics(d, "batchnorm")
    z = d.graph.batchnorm_inference(x, mean, inv_variance, scale, bias)
    dz = d.graph.pointwise("relu_backward", d.data("dy"), z)
    dx, dscale, dbias = d.graph.batchnorm_backward(dz, x, scale, mean, inv_variance)
    d.outputs(dx=dx, dscale=dscale, dbias=dbias)


PATTERNS: dict[str, Build] = {
    "norm_activation": _norm_activation,
    "norm_add_activation": _norm_add_activation,
    "activation_backward_norm_backward": _activation_backward_norm_backward,
    "saved_backward": _saved_backward,
    "batchnorm_chain": _batchnorm_chain,
}
GRAPHS = NODES | PATTERNS


def described(name: str, *arguments: object, **options: object) -> Graph:
    """The graph of that name."""
    describer = Describer(*arguments, **options)  # type: ignore[arg-type]
    GRAPHS[name](describer)
    return describer.graph


def run(graph: Graph, plan: str | None = None, seed: int = 0) -> dict[str, Tensor]:
    """Builds a graph, draws a variant pack and executes it with a workspace."""
    graph.build(plan)
    pack = draw(graph, seed)
    graph.execute(pack, torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=graph.device))
    return pack
