"""scale and shift of layer_norm and rms_norm: a norm of trailing dimensions as one over the channels of samples.

    y = phi(z)        z = x̂ weight (1 + scale) + bias (1 + scale) + shift

The leading dimensions up to the last one along which scale or shift change are the samples, those after it positions;
the K normalized elements are the channels of (samples, *positions, K), and scale and shift are (samples, K). All of this
is views of the tensors, where their strides permit it, so that autograd sums the gradients of what was broadcast.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from fusednorm.arguments import check_modulation
from fusednorm.norm import Family, norm_of
from fusednorm.operands import Operands
from fusednorm.strides import output_order, reordered


def in_samples(function: str, operands: Operands, num_dims: int) -> Operands:
    """The operands of a norm of ``num_dims`` trailing dimensions, checked but for scale and shift, as those of the norm
    over the channels of (samples, *positions, K).

    Raises ValueError or TypeError where scale or shift do not broadcast against the input; (B, K) means (B, 1, ..., K).
    """
    o = operands
    leading = o.input.dim() - num_dims
    shapes = {
        name: check_modulation(function, name, value, o.input, leading)
        for name, value in (("scale", o.scale), ("shift", o.shift))
        if value is not None
    }
    split = max(_last_change(shape[:leading]) for shape in shapes.values())
    if any(value is not None and value.dim() == 2 for value in (o.scale, o.shift)) and leading:
        split = max(split, 1)
    outer, inner, trailing = o.input.shape[:split], o.input.shape[split:leading], o.input.shape[leading:]
    samples, channels = prod(outer), prod(trailing)

    def per_sample(name: str, value: Tensor | None) -> Tensor | None:
        if value is None or tuple(value.shape) == (samples, channels):
            return value
        shape = shapes[name]
        spread = value.reshape(*shape[:split], *shape[leading:]).expand(*outer, *trailing)
        return spread.reshape(samples, channels)

    def flat(parameter: Tensor | None) -> Tensor | None:
        return parameter if parameter is None or num_dims == 1 else parameter.reshape(channels)

    direct = split == num_dims == 1
    input = o.input if direct else o.input.reshape(samples, *inner, channels)
    return Operands(input, flat(o.weight), flat(o.bias), per_sample("scale", o.scale), per_sample("shift", o.shift))


def _last_change(shape: tuple[int, ...]) -> int:
    """The number of dimensions up to the last one that is not 1."""
    return max((place + 1 for place, size in enumerate(shape) if size != 1), default=0)


def in_shape(family: Family, output: Tensor, input: Tensor, num_dims: int) -> Tensor:
    """The output of a norm of samples in the shape and the memory order of the call's input."""
    if output.shape == input.shape:
        return output
    trailing = norm_of(family, num_dims)
    return reordered(output.view(input.shape), output_order(trailing, input))
