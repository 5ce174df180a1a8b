"""torch's activations, and those of other packages, as the activations that a norm can take in, and the way back.

Names and parameters are those of :mod:`fusednorm.activations`; a parameter is read under its own name there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusednorm.activations import FORMULAS, Activation

MODULES: dict[type[nn.Module], str] = {
    nn.SiLU: "silu",
    nn.ReLU: "relu",
    nn.GELU: "gelu",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
    nn.Hardswish: "hardswish",
    nn.LeakyReLU: "leaky_relu",
}

#: Classes by qualified name, whose packages are not imported here, each with what it computes.
NAMED_MODULES: dict[str, Callable[[Any], Activation]] = {
    "timm.layers.activations.Swish": lambda module: Activation("silu"),
    "timm.layers.activations.GELU": lambda module: Activation("gelu"),
    "timm.layers.activations.GELUTanh": lambda module: Activation("gelu_tanh"),
    "timm.layers.activations.QuickGELU": lambda module: Activation("silu", 1.702),
    "timm.layers.activations.Sigmoid": lambda module: Activation("sigmoid"),
    "timm.layers.activations.Tanh": lambda module: Activation("tanh"),
    "monai.networks.blocks.activation.Swish": lambda module: Activation("silu", module.alpha),
    "monai.networks.blocks.activation.MemoryEfficientSwish": lambda module: Activation("silu"),
}

FUNCTIONS: dict[Callable[..., Any], str] = {
    F.silu: "silu",
    F.relu: "relu",
    F.relu_: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    torch.Tensor.relu: "relu",
    torch.Tensor.relu_: "relu",
    F.gelu: "gelu",
    F.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    torch.Tensor.sigmoid: "sigmoid",
    torch.Tensor.sigmoid_: "sigmoid",
    F.tanh: "tanh",
    torch.tanh: "tanh",
    torch.Tensor.tanh: "tanh",
    torch.Tensor.tanh_: "tanh",
    F.hardswish: "hardswish",
    F.leaky_relu: "leaky_relu",
    F.leaky_relu_: "leaky_relu",
}

#: What each activation is in torch, of z and its parameter.
TORCH_FUNCTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "silu": lambda z, beta: F.silu(z) if beta == 1.0 else z * torch.sigmoid(beta * z),
    "relu": lambda z, _: F.relu(z),
    "gelu": lambda z, _: F.gelu(z),
    "gelu_tanh": lambda z, _: F.gelu(z, approximate="tanh"),
    "sigmoid": lambda z, _: torch.sigmoid(z),
    "tanh": lambda z, _: torch.tanh(z),
    "hardswish": lambda z, _: F.hardswish(z),
    "leaky_relu": lambda z, slope: F.leaky_relu(z, slope),
}


def activated(z: Tensor, activation: Activation) -> Tensor:
    """An activation by torch's functions."""
    return TORCH_FUNCTIONS[activation.name](z, activation.parameter or 0.0)


def qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def module_activation(module: nn.Module) -> Activation | None:
    """What an activation module computes, or None where that is nothing that a norm can take in.

    Only exact classes count: a subclass may compute anything.
    """
    named = NAMED_MODULES.get(qualified_name(type(module)))
    if named is not None:
        return named(module)
    name = MODULES.get(type(module))
    return None if name is None else _with_options(name, vars(module))


def function_activation(function: Any, options: Mapping[str, Any]) -> Activation | None:
    """What a call of a function with these keywords computes; None as above."""
    try:
        name = FUNCTIONS.get(function)
    except TypeError:  # no function: it cannot be hashed
        return None
    if name is None or not options.keys() <= {"inplace", "approximate", FORMULAS[name].parameter}:
        return None
    return _with_options(name, options)


def _with_options(name: str, options: Mapping[str, Any]) -> Activation | None:
    if name == "gelu":
        form = {"none": "gelu", "tanh": "gelu_tanh"}.get(options.get("approximate", "none"))
        return None if form is None else Activation(form)
    parameter = FORMULAS[name].parameter
    try:
        return Activation(name, options.get(parameter) if parameter else None)
    except (TypeError, ValueError):  # a parameter that is a tensor, or not finite
        return None


def is_activation(module: nn.Module) -> bool:
    """Whether a module is one of torch's activations, foldable or not: so that a report can name it."""
    return type(module).__module__ == nn.ReLU.__module__ and not isinstance(module, nn.MultiheadAttention)
