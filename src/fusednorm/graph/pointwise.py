"""Pointwise operations as calls of torch into given memory, in one dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusednorm.activations import Activation
from fusednorm.backends.reference import DERIVATIVES, VALUES, row_scales
from fusednorm.backends.reference import codes as reference_codes
from fusednorm.formats import Quantized
from fusednorm.norm import norm_of

aten = torch.ops.aten
Run = Callable[..., Any]

# torch's hardswish is missing: on CUDA it divides by 6 in float32, also for float64.
_VALUES: dict[str, Run] = {
    "relu": lambda x, _, out: torch.clamp_min(x, 0.0, out=out),
    "gelu": lambda x, _, out: aten.gelu.out(x, out=out),
    "gelu_tanh": lambda x, _, out: aten.gelu.out(x, approximate="tanh", out=out),
    "sigmoid": lambda x, _, out: torch.sigmoid(x, out=out),
    "tanh": lambda x, _, out: torch.tanh(x, out=out),
    "leaky_relu": lambda x, slope, out: aten.leaky_relu.out(x, slope, out=out),
}
_GRADIENTS: dict[str, Run] = {
    "relu": lambda dy, x, _, out: aten.threshold_backward.grad_input(dy, x, 0.0, grad_input=out),
    "gelu": lambda dy, x, _, out: aten.gelu_backward.grad_input(dy, x, grad_input=out),
    "gelu_tanh": lambda dy, x, _, out: aten.gelu_backward.grad_input(dy, x, approximate="tanh", grad_input=out),
    "leaky_relu": lambda dy, x, slope, out: aten.leaky_relu_backward.grad_input(dy, x, slope, False, grad_input=out),
}


def value(activation: Activation) -> Run:
    """run(x, out) for y = phi(x)."""
    activation_parameter = activation.parameter
    native = _VALUES.get(activation.name)
    if activation.name == "silu" and activation_parameter == 1.0:
        return lambda x, out: aten.silu.out(x, out=out)
    if native is not None:
        return lambda x, out: native(x, activation_parameter, out)
    return lambda x, out: out.copy_(VALUES[activation.name](_wide(x), activation_parameter))


def gradient(activation: Activation) -> Run:
    """run(dy, x, out) for dx = dy phi'(x)."""
    activation_parameter = activation.parameter
    native = _GRADIENTS.get(activation.name)
    if activation.name == "silu" and activation_parameter == 1.0:
        return lambda dy, x, out: aten.silu_backward.grad_input(dy, x, grad_input=out)
    if native is not None:
        return lambda dy, x, out: native(dy, x, activation_parameter, out)
    return lambda dy, x, out: out.copy_(_wide(dy) * DERIVATIVES[activation.name](_wide(x), activation_parameter))


def arithmetic(name: str) -> Run:
    """run(a, b, out) for the sum or product, broadcast."""
    function: Run = torch.add if name == "add" else torch.mul
    return lambda a, b, out: function(a, b, out=out)


def quantize(quantized: Quantized) -> Run:
    """run(x, scale, codes, scales): codes by a given scale, or by those of the last dim's blocks, which it writes."""
    rows = norm_of("layer_norm", 1)

    def run(x: Tensor, scale: Tensor | None, codes: Tensor | None, scales: Tensor | None) -> None:
        wide = x.float()
        if scale is None:
            scale = row_scales(rows, wide, quantized)
            if scales is not None:
                scales.copy_(scale)
        if codes is not None:
            codes.copy_(reference_codes(wide * scale.float().reciprocal(), quantized))

    return run


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in float32 at least, in which a formula of several steps rounds 16-bit data once."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
