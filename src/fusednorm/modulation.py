"""scale and shift of layer_norm and rms_norm: a norm of trailing dimensions as one over the channels of samples.

    y = phi(z)        z = x̂ weight (1 + scale) + bias (1 + scale) + shift

The leading dimensions up to the last one along which scale or shift change are the samples, those after it positions;
the K normalized elements are the channels of (samples, *positions, K), and scale and shift are (samples, K). All these
are views where strides permit them, and autograd sums the gradients of what was broadcast.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from fusednorm.arguments import check_modulation
from fusednorm.norm import Family, norm_of
from fusednorm.operands import Operands, Sums
from fusednorm.problem import gate_shape
from fusednorm.strides import output_order, reordered


def in_samples(function: str, operands: Operands, num_dims: int) -> Operands:
    """The operands of a norm of ``num_dims`` trailing dimensions, checked but for scale and shift, as those of the norm
    over the channels of (samples, *positions, K): the same object where these are that already.

    Raises ValueError or TypeError where scale or shift do not broadcast against the input; (B, K) means (B, 1, ..., K).
    """
    o = operands
    leading = o.input.dim() - num_dims
    shapes, split = [], 0
    for name, value in (("scale", o.scale), ("shift", o.shift)):
        shape = () if value is None else check_modulation(function, name, value, o.input, leading)
        rows = value is not None and value.dim() == 2 and leading > 0
        shapes.append(shape)
        split = max(split, _last_change(shape[:leading]), int(rows))
    outer, inner, trailing = o.input.shape[:split], o.input.shape[split:leading], o.input.shape[leading:]
    samples, channels = prod(outer), prod(trailing)

    def per_sample(value: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
        if value is None or value.shape == (samples, channels):
            return value
        own = shape[:split] + shape[leading:]
        if own != (*outer, *trailing):  # the sum of many gradients is rounded once
            value = value.to(torch.promote_types(value.dtype, torch.float32))
        return value.reshape(own).expand(*outer, *trailing).reshape(samples, channels)

    def flat(parameter: Tensor | None) -> Tensor | None:
        return parameter if parameter is None or num_dims == 1 else parameter.reshape(channels)

    scale, shift = per_sample(o.scale, shapes[0]), per_sample(o.shift, shapes[1])
    if split == num_dims == 1:
        same = scale is o.scale and shift is o.shift
        return operands if same else Operands(o.input, o.weight, o.bias, scale, shift)
    return Operands(o.input.reshape(samples, *inner, channels), flat(o.weight), flat(o.bias), scale, shift)


def sums_in_samples(sums: Sums, shape: torch.Size, num_dims: int, seen: torch.Size) -> Sums:
    """Checked sums around a norm of ``num_dims`` trailing dimensions of an input of this shape, as those around the
    norm of samples that :func:`in_samples` sees."""
    leading = len(shape) - num_dims
    split = leading - (len(seen) - 2)  # so many dimensions are samples

    def whole(added: Tensor | None) -> Tensor | None:
        return added if added is None else added.reshape(seen)

    gate = sums.pre_gate
    if gate is not None:
        aligned = gate_shape(shape, -1, gate.shape)
        assert aligned is not None
        parts = (aligned[:split], shape[:split]), (aligned[leading:], shape[leading:])
        outer, trailing = (own if prod(own) == 1 else full for own, full in parts)
        inner = aligned[split:leading]
        gate = gate.reshape(aligned).expand(*outer, *inner, *trailing).reshape(prod(outer), *inner, prod(trailing))
    return Sums(whole(sums.pre_add), gate, whole(sums.post_add), sums.return_sum)


def _last_change(shape: tuple[int, ...]) -> int:
    """The number of dimensions up to the last one that is not 1."""
    dims = len(shape)
    while dims and shape[dims - 1] == 1:
        dims -= 1
    return dims


def in_shape(family: Family, output: Tensor, input: Tensor, num_dims: int) -> Tensor:
    """The output of a norm of samples in the shape and the memory order of the call's input."""
    if output.shape == input.shape:
        return output
    trailing = norm_of(family, num_dims)
    return reordered(output.view(input.shape), output_order(trailing, input))
