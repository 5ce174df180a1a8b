"""The judge: it runs a graph node by node through the reference on the CPU, and holds results against float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fusednorm.backends import reference
from fusednorm.formats import Quantized
from fusednorm.graph.nodes import PORT_OF_GRADIENT, Node, by_operand, groups_or_dims_of
from fusednorm.graph.tensors import TensorAttributes
from fusednorm.norm import norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.text import printable
from fusednorm.tolerance import Verdict, judge, offset_of

Tensors = dict[TensorAttributes, Tensor]


@dataclass(frozen=True)
class Verification:
    """The verdict on every output by name; true where all are right."""

    verdicts: Mapping[str, Verdict]

    @property
    def ok(self) -> bool:
        return all(verdict.ok for verdict in self.verdicts.values())

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        parts = [
            f"{printable(name, keep='')} {'ok' if one.ok else 'WRONG'}, error {one.error:.2e} of {one.allowed:.2e}"
            + (f" ({one.fault})" if one.fault else "")
            for name, one in self.verdicts.items()
        ]
        return "verification " + ("successful: " if self.ok else "failed: ") + "; ".join(parts)


def constants(tensors: Sequence[TensorAttributes]) -> Tensors:
    """The numbers that the graph itself has."""
    held = [tensor for tensor in tensors if tensor.value is not None]
    return {one: torch.full(one.dims or (), one.value or 0.0, dtype=one.dtype, device="cpu") for one in held}


def evaluate(
    order: Sequence[Node], given: Mapping[TensorAttributes, Tensor], dtype: torch.dtype, rounded: bool = False
) -> Tensors:
    """Every tensor of a graph in ``dtype`` on the CPU; with ``rounded`` nodes read rounded results."""
    values: Tensors = {tensor: value.detach().cpu() for tensor, value in given.items()}
    read = dict(values)
    with torch.no_grad():
        for node in order:
            for port, value in _node(node, {port: read[one] for port, one in node.inputs.items()}, dtype).items():
                if port not in node.outputs:
                    continue
                tensor = node.outputs[port]
                assert tensor.dims is not None and tensor.dtype is not None
                value = value.reshape(tensor.dims).to(dtype)
                values[tensor] = value
                read[tensor] = value.to(tensor.dtype).to(dtype) if rounded else value
    return values


def _node(node: Node, given: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The results of one node by port."""
    if node.kind.family is None:
        return _pointwise(node, {port: tensor.to(dtype) for port, tensor in given.items()})
    operands = by_operand(given)
    x, weight, mean, rstd = operands["input"], operands.get("weight"), operands.get("mean"), operands.get("rstd")
    family, groups_or_dims = node.kind.family, groups_or_dims_of(node, tuple(x.shape))
    if node.kind.operation == "backward":
        assert rstd is not None
        bias = weight  # gives dbias its shape; its values do not matter without an activation
        gradients = reference.backward(
            norm_of(family, groups_or_dims),
            BackwardOperands(operands["grad_output"], x, mean, rstd, weight, bias),
            compute_dtype=dtype,
        )
        named = {port: getattr(gradients, operand) for operand, port in PORT_OF_GRADIENT.items()}
        return {port: gradient for port, gradient in named.items() if gradient is not None}
    eps, var = float(node.attributes["epsilon"]), operands.get("var")
    if rstd is not None:
        eps, var = 0.0, rstd.double().pow(-2)
        mean = torch.zeros_like(rstd) if mean is None else mean
    forward = reference.forward(
        norm_of(family, groups_or_dims, eps=eps, training=var is None),
        Operands(x, weight, operands.get("bias"), mean=mean, var=var),
        compute_dtype=dtype,
    )
    y, rstd, var = forward.output, forward.rstd, forward.var
    assert rstd is not None
    mean = torch.zeros_like(rstd) if forward.mean is None else forward.mean
    if not x.numel():  # the library gives an empty batch statistics of 0, where a mean would be NaN
        mean, rstd = torch.zeros_like(mean), torch.zeros_like(rstd)
    results = {"y": y, "mean": mean, "inv_variance": rstd}
    if "prev_running_mean" in given:
        momentum, elements = float(node.attributes["momentum"]), x.numel() // x.shape[1] if x.numel() else 0
        assert var is not None
        unbiased = var * (elements / (elements - 1)) if elements else var
        for what, value in (("mean", mean), ("variance", unbiased)):
            previous = given[f"prev_running_{what}"].to(dtype).reshape(-1)
            results[f"next_running_{what}"] = torch.lerp(previous, value, momentum) if elements else previous
    return results


def _pointwise(node: Node, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    activation = node.activation
    if node.kind.operation == "quantize":
        return _scaled(node, given)
    if activation is None:
        a, b = given["a"], given["b"]
        return {"y": a + b if node.kind.name == "add" else a * b}
    if node.kind.operation == "activation":
        return {"y": reference.VALUES[activation.name](given["x"], activation.parameter)}
    return {"dx": given["dy"] * reference.DERIVATIVES[activation.name](given["x"], activation.parameter)}


def _scaled(node: Node, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is rounded to codes, not yet rounded, and the scales of blocks."""
    quantized, x = node.quantized, given["x"]
    assert quantized is not None
    scale = given["scale"] if "scale" in given else reference.row_scales(norm_of("layer_norm", 1), x, quantized)
    return {"y": x / scale, "scale": scale}


def judge_codes(got: Tensor, expected: Tensor, plain: Tensor, chosen: Tensor, quantized: Quantized) -> Verdict:
    """Whether 8-bit codes are those of numbers within the allowed error of ``expected``, as :func:`judge` allows it of
    a float32 result, of which the codes are made."""
    if not expected.numel():
        return Verdict(0.0, 0.0, 0.0, None)
    form, wide = quantized.format, got.double()
    limited = expected.clamp(-form.most_negative, form.largest)
    error, plain_error = (float((one - expected).abs().max()) for one in (chosen, plain))
    slack = 2 * (error + plain_error) + 4 * torch.finfo(torch.float32).eps * expected.abs()
    low, high = (reference.codes((expected + by).float(), quantized).double() for by in (-slack, slack))
    wrong = int(((wide < low) | (wide > high)).sum())
    fault = f"{wrong} of {got.numel()} codes are not those of the result" if wrong else None
    allowed = float(torch.maximum((low - limited).abs(), (high - limited).abs()).max())
    return Verdict(float((wide - limited).abs().max()), allowed, plain_error, fault)


def verify(
    order: Sequence[Node], given: Mapping[TensorAttributes, Tensor], got: Mapping[TensorAttributes, Tensor]
) -> Verification:
    """The verdict on every result, by the rule of :mod:`fusednorm.tolerance`."""
    expected = evaluate(order, given, torch.float64)
    plain = evaluate(order, given, torch.float32)
    rounded = evaluate(order, given, torch.float64, rounded=True)
    makers = {tensor: (node, port) for node in order for port, tensor in node.outputs.items()}
    offset = max((_offset(node, expected) for node in order), default=1.0)
    # A norm computes in float32 where a virtual tensor of that dtype is its input.
    narrow = any(tensor.is_virtual and tensor.dtype != torch.float64 for tensor in makers)
    verdicts = {}
    for tensor, value in got.items():
        node, port = makers[tensor]
        largest = max((prod(one.dims or ()) for one in node.inputs.values()), default=1)
        terms = largest // value.numel() if value.numel() else 1
        spread = 0.0
        if port in ("mean", "next_running_mean") and value.numel():
            rstd = _rstd(node, expected)
            spread = 1.0 / float(rstd.max()) if rstd is not None and bool(rstd.any()) else 0.0
        result = value.detach().cpu()
        if node.quantized is not None and port == "y":
            plain_codes, chosen = plain[tensor].double(), rounded[tensor]
            verdicts[tensor.name] = judge_codes(result, expected[tensor], plain_codes, chosen, node.quantized)
            continue
        verdicts[tensor.name] = judge(
            result,
            expected[tensor],
            plain[tensor].double(),
            offset=offset,
            terms=terms,
            spread=spread,
            intermediate=rounded[tensor],
            in_float32=narrow,
        )
    return Verification(verdicts)


def _rstd(node: Node, values: Tensors) -> Tensor | None:
    tensor = node.outputs.get("inv_variance") or node.inputs.get("inv_variance")
    return None if tensor is None else values.get(tensor)


def _offset(node: Node, values: Tensors) -> float:
    """One node's largest |mean| in standard deviations, to which the rounding of a float32 mean is proportional."""
    mean = node.outputs.get("mean") or node.inputs.get("mean")
    rstd = _rstd(node, values)
    if mean is None or node.kind.family in (None, "rms_norm"):
        return 1.0
    if rstd is None:
        variance = values.get(node.inputs.get("variance"))  # type: ignore[arg-type]
        rstd = None if variance is None else (variance.double() + float(node.attributes["epsilon"])).rsqrt()
    return offset_of(values[mean], rstd)
