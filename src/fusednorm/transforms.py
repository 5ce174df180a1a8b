"""Calls under torch.func's vmap and grad: the kernels run where a batch folds into the samples or into the channels.

What torch batches is one more dimension. Where statistics belong to a sample, and each member of the batch has the same
weight and bias, members are more samples. Otherwise they are more channels, and groups, each with parameters of its own
and a gradient of its own: those of single examples. Rows whose parameters, or gradients of parameters, differ run on
the reference, and so do forward derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusednorm import dispatch
from fusednorm.backends import reference
from fusednorm.choice import Selection, as_selected, lost, tuned_file
from fusednorm.gate import batched, straight_backward, straight_forward
from fusednorm.library import backward_op, forward_op
from fusednorm.norm import Norm, norm_of
from fusednorm.op_results import FiveTensors, FourTensors, five_tensors, four_tensors
from fusednorm.operands import BackwardOperands, Gradients, Operands, Results, Wanted
from fusednorm.private.torch_names import only_batches_and_gradients

Batched = tuple[Tensor, int | None]
Dims = tuple[int | None, ...]


def forward(norm: Norm, operands: Operands) -> Results:
    """The results of a forward of checked operands under a transform; statistics are constants to autograd."""
    if not only_batches_and_gradients():
        return reference.forward(norm, operands)
    output, mean, rstd, var = _Forward.apply(*operands.tensors(), norm)
    return Results(output, mean if norm.has_mean else None, rstd, var if norm.has_variance else None)


# --- the two ways to fold a batch away ---


@dataclass(frozen=True)
class _IntoSamples:
    """Members of the batch as samples, or as rows; parameters of channels are the same for all."""

    norm: Norm
    size: int

    @property
    def folded_norm(self) -> Norm:
        return self.norm

    def _first(self, tensor: Tensor, dim: int | None) -> Tensor:
        return tensor.expand(self.size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

    def image(self, tensor: Tensor, dim: int | None) -> Tensor:
        tensor = self._first(tensor, dim)
        return tensor if self.norm.row_family else tensor.flatten(0, 1)

    def modulation(self, tensor: Tensor, dim: int | None) -> Tensor:
        return self._first(tensor, dim).flatten(0, 1)

    def per_channel(self, tensor: Tensor, dim: int | None) -> Tensor:
        return tensor

    def statistic(self, tensor: Tensor, dim: int | None) -> Tensor:
        return tensor if self.norm.per_batch else self._first(tensor, dim).flatten(0, 1)

    def image_back(self, tensor: Tensor) -> Batched:
        return (tensor if self.norm.row_family else self._unfolded(tensor)), 0

    def modulation_back(self, tensor: Tensor) -> Batched:
        return self._unfolded(tensor), 0

    def per_channel_back(self, tensor: Tensor) -> Batched:
        return tensor, None

    def statistic_back(self, tensor: Tensor) -> Batched:
        return (tensor, None) if self.norm.per_batch else (self._unfolded(tensor), 0)

    def _unfolded(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (self.size, tensor.shape[0] // self.size))


@dataclass(frozen=True)
class _IntoChannels:
    """Members of the batch as channels, before those of a member."""

    norm: Norm
    size: int

    @property
    def folded_norm(self) -> Norm:
        norm = self.norm
        groups = norm.num_groups * self.size
        return norm_of(norm.family, groups, norm.channel_dim, norm.eps, norm.activation, norm.training)

    def _at(self, tensor: Tensor, dim: int | None, place: int) -> Tensor:
        tensor = tensor.expand(self.size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        return tensor.movedim(0, place)

    def image(self, tensor: Tensor, dim: int | None) -> Tensor:
        return self._at(tensor, dim, 1).flatten(1, 2) if self.norm.channel_dim == 1 else self._last(tensor, dim)

    def _last(self, tensor: Tensor, dim: int | None) -> Tensor:
        return self._at(tensor, dim, -2).flatten(-2)

    modulation = per_channel = statistic = _last

    def image_back(self, tensor: Tensor) -> Batched:
        if self.norm.channel_dim == 1:
            members = tensor.unflatten(1, (self.size, tensor.shape[1] // self.size))
            # Each member is packed, as torch's: a model may view its result otherwise.
            return (members.movedim(1, 0).contiguous(), 0) if tensor.is_contiguous() else (members, 1)
        return self._unfolded(tensor)

    def _unfolded(self, tensor: Tensor) -> Batched:
        unfolded = tensor.unflatten(-1, (self.size, tensor.shape[-1] // self.size))
        return unfolded, unfolded.dim() - 2

    modulation_back = per_channel_back = statistic_back = _unfolded


_Folding = _IntoSamples | _IntoChannels


def _folding(norm: Norm, size: int, parameters_differ: bool) -> _Folding | None:
    """How a batch folds; ``parameters_differ`` where a weight, a bias, a given statistic or a gradient of one has the
    batch's dimension. None where it does not fold."""
    if norm.row_family or norm.per_position:
        return None if parameters_differ else _IntoSamples(norm, size)
    if parameters_differ or (norm.per_batch and norm.training):
        return _IntoChannels(norm, size)
    return _IntoSamples(norm, size)


def _folded(fold: Callable[[Tensor, int | None], Tensor], tensor: Tensor | None, dim: int | None) -> Tensor | None:
    return None if tensor is None else fold(tensor, dim)


def _back(unfold: Callable[[Tensor], Batched], tensor: Tensor, present: bool) -> Batched:
    return unfold(tensor) if present else (tensor, None)


# --- the forward and the backward, each differentiable and with a rule for vmap ---


class _Forward(torch.autograd.Function):
    """The op norm_forward as torch.func wants it."""

    @staticmethod
    def forward(*arguments: Any) -> FourTensors:
        *tensors, norm = arguments
        operands = Operands(*tensors)
        if batched(operands):
            return four_tensors(reference.forward(norm, operands))
        run = dispatch.forward if straight_forward(operands) else forward_op
        return four_tensors(run(norm, operands))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: FourTensors) -> None:
        *tensors, _, _, norm = inputs
        _, mean, rstd, var = output
        ctx.mark_non_differentiable(mean, rstd, var)
        ctx.save_for_backward(*tensors, mean, rstd)
        ctx.norm, ctx.tuned = norm, tuned_file()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *tensors, mean, rstd = ctx.saved_tensors
        input, *parameters = tensors
        wanted = ctx.needs_input_grad[:5]
        mean = mean if ctx.norm.has_mean else None
        found = _Backward.apply(grad_output, input, mean, rstd, *parameters, ctx.norm, ctx.tuned, wanted)
        return (*(gradient if want else None for gradient, want in zip(found, wanted, strict=True)), None, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: Dims, *arguments: Any) -> tuple[FourTensors, Dims]:
        *tensors, norm = arguments
        dims = in_dims[:7]
        _, weight, bias, _, _, mean, var = dims
        fold = _folding(norm, info.batch_size, any(dim is not None for dim in (weight, bias, mean, var)))
        if fold is None:
            composite = torch.vmap(lambda *each: four_tensors(reference.forward(norm, Operands(*each))), dims)
            return composite(*tensors), (0, 0, 0, 0)
        ways = (
            fold.image, fold.per_channel, fold.per_channel, fold.modulation, fold.modulation, fold.per_channel,
            fold.per_channel,
        )  # fmt: skip
        results = _Forward.apply(*map(_folded, ways, tensors, dims), fold.folded_norm)
        found = (
            fold.image_back(results[0]),
            _back(fold.statistic_back, results[1], norm.has_mean),
            fold.statistic_back(results[2]),
            _back(fold.statistic_back, results[3], norm.has_variance),
        )
        return tuple(zip(*found, strict=True))  # type: ignore[return-value]


class _Backward(torch.autograd.Function):
    """The op norm_backward as torch.func wants it. Where it is differentiated, mean and rstd are functions of the
    input; it never is in mean or rstd themselves."""

    @staticmethod
    def forward(*arguments: Any) -> FiveTensors:
        *tensors, norm, tuned, wanted = arguments
        operands = BackwardOperands(*tensors)
        if lost(tuned):
            with as_selected(Selection(None, tuned)):
                return five_tensors(_gradients(norm, operands, wanted), operands.input)
        return five_tensors(_gradients(norm, operands, wanted), operands.input)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: FiveTensors) -> None:
        *tensors, norm, _, wanted = inputs
        ctx.save_for_backward(*tensors)
        ctx.norm, ctx.wanted = norm, wanted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        norm: Norm = ctx.norm
        tensors = ctx.saved_tensors
        # mean and rstd, the third and the fourth, are constants or functions of the input.
        places = [place for place, tensor in enumerate(tensors) if tensor is not None and place not in (2, 3)]
        wanted = [want and (place == 0 or tensors[3 + place] is not None) for place, want in enumerate(ctx.wanted)]

        def wanted_gradients(*present: Tensor) -> tuple[Tensor, ...]:
            all_tensors = list(tensors)
            for place, tensor in zip(places, present, strict=True):
                all_tensors[place] = tensor
            operands = BackwardOperands(*all_tensors)
            if norm.training:
                operands.mean, operands.rstd = reference.saved_statistics(norm, operands.input)
            found = five_tensors(reference.backward(norm, operands), operands.input)
            return tuple(gradient for gradient, want in zip(found, wanted, strict=True) if want)

        _, pull_back, *_ = torch.func.vjp(wanted_gradients, *(tensors[place] for place in places))
        pulled = pull_back(tuple(grad for grad, want in zip(grads, wanted, strict=True) if want))
        found: list[Tensor | None] = [None] * 11
        for place, gradient in zip(places, pulled, strict=True):
            found[place] = gradient
        return tuple(found)

    @staticmethod
    def vmap(info: Any, in_dims: Dims, *arguments: Any) -> tuple[FiveTensors, Dims]:
        *tensors, norm, tuned, wanted = arguments
        dims = in_dims[:8]
        present = (True, *(parameter is not None for parameter in tensors[4:]))
        wanted = tuple(want and there for want, there in zip(wanted, present, strict=True))
        mean, rstd, weight, bias = (dim is not None for dim in dims[2:6])
        differ = wanted[1] or wanted[2] or weight or bias or (norm.per_batch and (mean or rstd))
        fold = _folding(norm, info.batch_size, differ)
        if fold is None:
            composite = torch.vmap(lambda *each: _reference_gradients(norm, BackwardOperands(*each), wanted), dims)
            return composite(*tensors), (0, 0, 0, 0, 0)
        ways = (
            fold.image, fold.image, fold.statistic, fold.statistic, fold.per_channel, fold.per_channel,
            fold.modulation, fold.modulation,
        )  # fmt: skip
        gradients = _Backward.apply(*map(_folded, ways, tensors, dims), fold.folded_norm, tuned, wanted)
        backs = (
            fold.image_back, fold.per_channel_back, fold.per_channel_back, fold.modulation_back, fold.modulation_back,
        )  # fmt: skip
        return tuple(zip(*map(_back, backs, gradients, wanted), strict=True))  # type: ignore[return-value]


def _reference_gradients(norm: Norm, operands: BackwardOperands, wanted: Wanted) -> FiveTensors:
    """The gradients of one member, differentiable by torch, to which saved statistics would be constants."""
    if norm.training:
        operands.mean, operands.rstd = reference.saved_statistics(norm, operands.input)
    found = five_tensors(reference.backward(norm, operands), operands.input)
    empty = operands.input.new_empty(0)
    a, b, c, d, e = (gradient if want else empty for gradient, want in zip(found, wanted, strict=True))
    return a, b, c, d, e


def _gradients(norm: Norm, operands: BackwardOperands, wanted: Wanted) -> Gradients:
    if batched(operands):
        return reference.backward(norm, operands)
    run = dispatch.backward if straight_backward(operands) else backward_op
    return run(norm, operands, wanted)
