"""Every kind of node in one table: its ports, attributes and formula.

A port has a role, from which its dims follow:

- ``data``: the dims of x.
- ``parameter``: one element per channel, (1, C, 1, ...) or (C,); for layernorm and rmsnorm the normalized dims, alone
  or behind ones.
- ``statistic``: one element per mean. batchnorm: as a parameter; groupnorm: (N, G, 1, ...) or (N, G); instancenorm:
  (N, C, 1, ...) or (N, C); layernorm and rmsnorm: the dims of x with 1 for each normalized one, or (rows, 1).
- ``operand``: at pointwise nodes; the result's dims are those of the operands, broadcast.
- ``codes``: the 8-bit result of a quantizing node, of the dims of x; ``single``: one element, the scale of all of x;
  ``block``: one element for each block of x.

The ports of norms have cuDNN's names, which graphs on disk and callers use: ``scale`` is γ, the functional API's
``weight``, and ``inv_variance`` is rstd. The functional API's ``scale`` and ``shift``, which modulate each sample and
channel, have no ports. :func:`by_operand` alone translates ports into the library's operands.

A node kind is one entry of :data:`KINDS`; validation, planning, serialization and the judge read it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite, prod
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

from fusednorm.activations import FORMULAS, Activation
from fusednorm.formats import FORMATS, Quantized
from fusednorm.graph.tensors import Dims, TensorAttributes
from fusednorm.norm import ROW_FAMILIES, Family
from fusednorm.text import printable

T = TypeVar("T")
Role = Literal["data", "parameter", "statistic", "operand", "codes", "single", "block"]
Operation = Literal["forward", "inference", "backward", "activation", "activation_backward", "arithmetic", "quantize"]


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a node kind; an output with ``along`` exists only where the input of that name is given."""

    name: str
    role: Role
    required: bool = True
    along: str | None = None
    training: bool = False  # an output of the training phase alone


@dataclass(frozen=True, slots=True)
class Attribute:
    """A number or name that a node carries; ``wrong(value)`` is None for a good value, else says what was expected."""

    name: str
    default: Any
    wrong: Callable[[Any], str | None]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of node: its formula, ports and attributes."""

    name: str
    operation: Operation
    formula: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: tuple[Attribute, ...] = ()
    family: Family | None = None

    @property
    def main(self) -> str:
        """The input that the others are measured against."""
        return "x" if any(port.name == "x" for port in self.inputs) else self.inputs[0].name


@dataclass(slots=True, eq=False)
class Node:
    """One node of a graph; the dicts go from port name to tensor."""

    kind: Kind
    name: str
    inputs: dict[str, TensorAttributes]
    outputs: dict[str, TensorAttributes]
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def activation(self) -> Activation | None:
        """The activation that a pointwise node applies or differentiates; None for any other node."""
        name = self.kind.name.removesuffix("_backward")
        if name not in FORMULAS or self.kind.family is not None:
            return None
        return Activation(name, self.attributes.get("parameter"))

    @property
    def quantized(self) -> Quantized | None:
        """The format to which a quantizing node rounds; None for any other node."""
        if self.kind.operation != "quantize":
            return None
        return Quantized(self.attributes["dtype"], "scale" not in self.inputs)

    def __str__(self) -> str:
        name = printable(self.name, keep="")
        return f"{name} ({self.kind.name})" if self.name != self.kind.name else name


# --- attributes ---


def _wrong_count(value: Any) -> str | None:
    good = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1
    return None if good else "an int of at least 1"


def _finite(value: Any) -> bool:
    """Whether float64 holds the value; a file may have an integer of a thousand digits, which it does not."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and isfinite(float(value))
    except OverflowError:
        return False


def _wrong_epsilon(value: Any) -> str | None:
    return None if _finite(value) else "a finite number, such as 1e-5"


def _wrong_momentum(value: Any) -> str | None:
    good = _finite(value) and 0 <= value <= 1
    return None if good else "a number from 0 to 1, such as 0.1"


def _wrong_phase(value: Any) -> str | None:
    return None if value in ("training", "inference") else "'training' or 'inference'"


def _wrong_activation_parameter(value: Any) -> str | None:
    return None if value is None or _finite(value) else "a finite number, or None for the default"


def _wrong_shape(value: Any) -> str | None:
    good = isinstance(value, (tuple, list)) and value and all(_wrong_count(size) is None for size in value)
    return None if value is None or good else "a tuple of sizes such as (768,), or None to take scale's"


def _wrong_format(value: Any) -> str | None:
    return None if isinstance(value, str) and value in FORMATS else f"one of {', '.join(FORMATS)}"


NUM_GROUPS = Attribute("num_groups", None, _wrong_count)
EPSILON = Attribute("epsilon", 1e-5, _wrong_epsilon)
MOMENTUM = Attribute("momentum", 0.1, _wrong_momentum)
PHASE = Attribute("phase", "training", _wrong_phase)
SHAPE = Attribute("normalized_shape", None, _wrong_shape)
FORMAT = Attribute("dtype", None, _wrong_format)
ACTIVATION_PARAMETER = Attribute("parameter", None, _wrong_activation_parameter)

# --- ports ---


def _statistic_port(name: str, required: bool = True) -> Port:
    return Port(name, "statistic", required)


X, DY, Y, DX = Port("x", "data"), Port("dy", "data"), Port("y", "data"), Port("dx", "data")
SCALE, BIAS = Port("scale", "parameter", False), Port("bias", "parameter", False)
DSCALE, DBIAS = Port("dscale", "parameter", along="scale"), Port("dbias", "parameter", along="scale")
MEAN, INV = _statistic_port("mean"), _statistic_port("inv_variance")
GIVEN = (_statistic_port("mean", False), _statistic_port("inv_variance", False))
SAVED = (Port("mean", "statistic", training=True), Port("inv_variance", "statistic", training=True))
PREVIOUS = (_statistic_port("prev_running_mean", False), _statistic_port("prev_running_variance", False))
NEXT = (
    Port("next_running_mean", "statistic", along="prev_running_mean"),
    Port("next_running_variance", "statistic", along="prev_running_variance"),
)

# The field of Operands or BackwardOperands for each port of a norm, and the port for each field of Gradients.
OPERAND_OF_PORT = {
    "x": "input",
    "dy": "grad_output",
    "scale": "weight",
    "bias": "bias",
    "mean": "mean",
    "variance": "var",
    "inv_variance": "rstd",
}
PORT_OF_GRADIENT = {"input": "dx", "weight": "dscale", "bias": "dbias"}


def by_operand(given: Mapping[str, T]) -> dict[str, T]:
    """A norm's tensors by the library's names of its operands; running statistics, which are none, are left out."""
    return {OPERAND_OF_PORT[port]: value for port, value in given.items() if port in OPERAND_OF_PORT}


# --- the table ---

_AFFINE = "y = (x - mean) inv_variance scale + bias"
_GRADIENT = "dx = inv_variance (scale dy - (P + xhat Q) / K), dscale = sum dy xhat, dbias = sum dy"


def _norm(name: str, family: Family, *attributes: Attribute) -> tuple[Kind, Kind]:
    """The forward and backward of a family whose statistics stay within a sample."""
    rms = family == "rms_norm"
    bias, given, saved = ((), GIVEN[1:], SAVED[1:]) if rms else ((BIAS,), GIVEN, SAVED)
    means, dbias = ((INV,), ()) if rms else ((MEAN, INV), (DBIAS,))
    forward = (X, SCALE, *bias, *given)
    return (
        Kind(name, "forward", _AFFINE, forward, (Y, *saved), (*attributes, EPSILON, PHASE), family),
        Kind(
            f"{name}_backward", "backward", _GRADIENT, (DY, X, SCALE, *means), (DX, DSCALE, *dbias), attributes, family
        ),
    )


def _activation(name: str) -> tuple[Kind, Kind]:
    """An activation and its backward, dx = dy phi'(x)."""
    attributes = (ACTIVATION_PARAMETER,) if FORMULAS[name].parameter else ()
    x, dy, y, dx = (Port(port, "operand") for port in ("x", "dy", "y", "dx"))
    return (
        Kind(name, "activation", f"y = {name}(x)", (x,), (y,), attributes),
        Kind(f"{name}_backward", "activation_backward", f"dx = dy {name}'(x)", (dy, x), (dx,), attributes),
    )


def _arithmetic(name: str, sign: str) -> Kind:
    a, b, y = (Port(port, "operand") for port in "aby")
    return Kind(name, "arithmetic", f"y = a {sign} b", (a, b), (y,))


def _quantize() -> tuple[Kind, Kind]:
    """By a scale for all of x, or by scales of its blocks, which are the elements along the last dim."""
    x, y = Port("x", "operand"), Port("y", "codes")
    formula, blocks = "y = saturate(round(x / scale))", "scale = amax |x| / largest of each block along the last dim"
    return (
        Kind("quantize", "quantize", formula, (x, Port("scale", "single")), (y,), (FORMAT,)),
        Kind(
            "block_scale_quantize", "quantize", f"{formula}, {blocks}", (x,), (y, Port("scale", "block")), (FORMAT,),
        ),
    )  # fmt: skip


_VARIANCE = _statistic_port("variance", False)
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "batchnorm_inference", "inference", _AFFINE, (X, MEAN, GIVEN[1], _VARIANCE, SCALE, BIAS), (Y,),
            (EPSILON,), "batch_norm",
        ),
        Kind(
            "batchnorm", "forward", _AFFINE, (X, SCALE, BIAS, *PREVIOUS), (Y, *SAVED, *NEXT), (EPSILON, MOMENTUM),
            "batch_norm",
        ),
        Kind(
            "batchnorm_backward", "backward", _GRADIENT, (DY, X, SCALE, MEAN, INV), (DX, DSCALE, DBIAS), (),
            "batch_norm",
        ),
        *_norm("groupnorm", "group_norm", NUM_GROUPS),
        *_norm("instancenorm", "instance_norm"),
        *_norm("layernorm", "layer_norm", SHAPE),
        *_norm("rmsnorm", "rms_norm", SHAPE),
        *(kind for name in FORMULAS for kind in _activation(name)),
        _arithmetic("add", "+"),
        _arithmetic("mul", "*"),
        *_quantize(),
    )
}  # fmt: skip
POINTWISE = tuple(name for name, kind in KINDS.items() if kind.family is None and kind.operation != "quantize")


# --- dims ---


def trailing(node: Node, dims: Dims) -> Dims | str:
    """The normalized dims of a layernorm or rmsnorm node, or a message where there are none."""
    given = node.attributes.get("normalized_shape")
    scale = node.inputs.get("scale")
    if given is not None:
        shape = tuple(given)
    elif scale is not None and scale.dims:
        shape = scale.dims
        if len(shape) == len(dims):
            lead = next((axis for axis, size in enumerate(shape) if size != 1), len(shape) - 1)
            shape = shape[lead:]
    else:
        return "neither normalized_shape nor scale says which dims are normalized"
    if len(shape) > len(dims) or dims[len(dims) - len(shape) :] != shape:
        return f"the normalized dims {shape} are not the last of x's {dims}"
    return shape


def groups_or_dims_of(node: Node, dims: Dims) -> int:
    """The ``groups_or_dims`` of a node's Norm: its groups, or the number of normalized trailing dims."""
    if node.kind.family in ROW_FAMILIES:
        return len(trailing(node, dims))
    return int(node.attributes.get("num_groups") or 0)


def accepted_dims(node: Node, role: Role, dims: Dims) -> tuple[Dims, ...]:
    """The dims that a port of this role may have where x has ``dims``; an output gets the first of them."""
    if role == "data":
        return (dims,)
    ones = (1,) * (len(dims) - 2)
    if node.kind.family in ROW_FAMILIES:
        shape = trailing(node, dims)
        assert not isinstance(shape, str)  # validation has looked
        lead = dims[: len(dims) - len(shape)]
        if role == "parameter":
            return ((1,) * len(lead) + shape, shape)
        return (lead + (1,) * len(shape), (prod(lead), 1))
    if role == "parameter" or node.kind.family == "batch_norm":
        return ((1, dims[1], *ones), (dims[1],))
    num_groups = int(node.attributes["num_groups"]) if node.kind.family == "group_norm" else dims[1]
    return ((dims[0], num_groups, *ones), (dims[0], num_groups))
