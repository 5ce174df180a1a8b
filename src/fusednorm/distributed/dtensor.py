"""Operands that are DTensors: each mesh dimension spreads the input over its ranks, or has it on each.

A call runs on the local tensors. Where a mesh dimension spreads what a statistic covers, its ranks merge their moments:
one exchange forward and one backward, as in :mod:`fusednorm.distributed.functional`. The output lies as the input lies,
and no element of the input moves. torch.compile records the local calls and the exchange.

============== ======================================== ==================
on a mesh dim  parameter that has the input's dimension  any other parameter
============== ======================================== ==================
``Shard(d)``   ``Shard`` of that dimension               ``Replicate``; gradient ``Partial``
``Replicate``  ``Replicate``                             ``Replicate``
============== ======================================== ==================

A parameter that lies otherwise is redistributed, and its gradient goes back the same way. An input that is ``Partial``,
or sharded in a way of torch's own, is first made ``Replicate``, as in torch's norms.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fusednorm import autograd
from fusednorm.autograd import normalize
from fusednorm.distributed.agreement import agree
from fusednorm.distributed.collective import exchange_device
from fusednorm.distributed.moments import Units
from fusednorm.distributed.rows import normalize_rows
from fusednorm.distributed.sharding import facts_of
from fusednorm.distributed.whole import normalize_channels
from fusednorm.norm import ROW_FAMILIES, Norm, norm_of_op
from fusednorm.operands import Operands, Results
from fusednorm.private.torch_names import keep_no_traces, mixes_with_dtensors
from fusednorm.problem import statistics_shape, view_of
from fusednorm.strides import packed_strides, slowest_first

_NAMES = ("input", "weight", "bias", "scale", "shift", "mean", "var")
_REMEDY = "every process of a mesh makes the same calls of tensors that lie alike"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the input of a call lies: ``axes[i]`` is the dimension that mesh dimension i shards, or None.

    ``merged`` are the mesh dimensions over which statistics are merged. The ranks of these hold groups of group_norm in
    parts where ``cut``; ``first`` is the index of this rank's first channel.
    """

    mesh: Any
    axes: tuple[int | None, ...]
    merged: tuple[int, ...]
    cut: bool
    first: int

    def placements(self, dims: Sequence[int], merged: Sequence[int] = ()) -> list[Any]:
        """Of a tensor that has these dimensions of the input; on the mesh dimensions ``merged`` it is on each rank."""
        from torch.distributed.tensor import Replicate, Shard

        return [
            Shard(dims.index(axis)) if axis in dims and each not in merged else Replicate()
            for each, axis in enumerate(self.axes)
        ]

    def grad_placements(self, dims: Sequence[int]) -> list[Any]:
        """Of the gradient of such a tensor: where a rank has its own part of the input, its part of the sum."""
        from torch.distributed.tensor import Partial

        return [
            Partial() if axis is not None and axis not in dims else placement
            for axis, placement in zip(self.axes, self.placements(dims), strict=True)
        ]

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """This rank's part of an input of this shape."""
        return tuple(self.part(axis, size)[1] for axis, size in enumerate(shape))

    def part(self, axis: int, size: int) -> tuple[int, int]:
        """The first index and the length of this rank's part of a dimension."""
        place = 0
        for each, shards in self._shards(axis):
            place = place * shards + self.mesh.get_local_rank(each)
        return self.parts(axis, size)[place]

    def parts(self, axis: int, size: int) -> list[tuple[int, int]]:
        """The first index and the length of the part of every rank, as ``torch.chunk`` cuts."""
        found = [(0, size)]
        for _, shards in self._shards(axis):
            found = [piece for start, length in found for piece in _chunks(start, length, shards)]
        return found

    def _shards(self, axis: int) -> list[tuple[int, int]]:
        return [(each, self.mesh.size(each)) for each, found in enumerate(self.axes) if found == axis]


def _chunks(start: int, length: int, shards: int) -> list[tuple[int, int]]:
    step = -(-length // shards)
    edges = [min(each * step, length) for each in range(shards + 1)]
    return [(start + one, other - one) for one, other in pairwise(edges)]


def forward(norm: Norm, operands: Operands, wants_statistics: bool) -> Results:
    """The results of a forward of checked operands, DTensors of one mesh, as DTensors.

    Raises:
        TypeError: plain tensors among the operands, several meshes, or statistics wanted of rows.
        ValueError: a local tensor whose shape is not its part of the whole's; a process outside of the mesh.
        RuntimeError: ranks that do not make the same call, as far as they can tell.
    """
    if wants_statistics and norm.family in ROW_FAMILIES:
        raise TypeError(f"{norm.family}: the statistics of rows are no DTensor; call fusednorm.{norm.family}")
    operands = _on_one_mesh(norm, operands)
    place = _place(norm, operands.input)
    local = _local_operands(norm, operands, place)
    if type(local.input) is not Tensor:
        _trace(norm, operands, place)
    groups = [place.mesh.get_group(each) for each in place.merged]
    _check(norm, operands, local.input, place, groups)
    if not groups:
        results = normalize(_own_norm(norm, operands.input, local.input), local, wants_statistics)
    else:
        results = _merged(norm, operands, local, place, groups)
    return _distributed(norm, operands.input, results, place, wants_statistics)


autograd.forward_on_mesh = forward


def _dims(norm: Norm, rank: int, name: str) -> list[int]:
    """The dimensions of the input that an operand has, in the operand's order."""
    if name == "input":
        return list(range(rank))
    if norm.row_family:
        return list(range(rank - norm.num_dims, rank))
    channel = norm.channel_dim % rank
    return [0, channel] if name in ("scale", "shift") else [channel]


def _on_one_mesh(norm: Norm, operands: Operands) -> Operands:
    """The operands as DTensors of one mesh; plain tensors are refused where torch refuses them."""
    from torch.distributed.tensor import DTensor, Replicate

    found = {name: getattr(operands, name) for name in _NAMES if getattr(operands, name) is not None}
    mesh = next(tensor.device_mesh for tensor in found.values() if isinstance(tensor, DTensor))
    for name, tensor in found.items():
        if isinstance(tensor, DTensor):
            if tensor.device_mesh != mesh:
                raise TypeError(
                    f"{norm.family}: {_called(name)} lies on {tensor.device_mesh}, another argument on {mesh}"
                )
        elif mixes_with_dtensors(DTensor):
            found[name] = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
        else:
            raise TypeError(
                f"{norm.family}: {_called(name)} is no DTensor, and another argument is; make it one by "
                "torch.distributed.tensor.distribute_tensor, and the parameters and buffers of a module by "
                "distribute_module, or call within torch.distributed.tensor.experimental.implicit_replication()"
            )
    return Operands(**found)


def _called(name: str) -> str:
    """An operand's name in the public functions."""
    return f"running_{name}" if name in ("mean", "var") else name


def _place(norm: Norm, input: Any) -> Place:
    from torch.distributed.tensor import Shard

    mesh = input.device_mesh
    if mesh.get_coordinate() is None:
        raise ValueError(f"{norm.family}: this process is no member of {mesh}; call it in the mesh's processes alone")
    # Not isinstance: torch has kinds of Shard whose elements lie in another order.
    axes = tuple(each.dim % input.dim() if type(each) is Shard else None for each in input.placements)
    place = Place(mesh, axes, (), False, 0)
    channel, cut, first = norm.channel_dim % max(input.dim(), 1), False, 0
    if norm.family == "group_norm" and norm.training:
        channels, size = input.shape[channel], _group_channels(norm, input.shape)
        cut = any(start % size or length % size for start, length in place.parts(channel, channels) if size)
        first = place.part(channel, channels)[0] if cut else 0
    covered = _covered(norm, input.dim(), cut) if input.numel() else set()
    merged = tuple(each for each, axis in enumerate(axes) if axis in covered and mesh.size(each) > 1)
    return replace(place, merged=merged, cut=cut, first=first)


def _covered(norm: Norm, rank: int, cut: bool) -> set[int]:
    """The dimensions of the input that one statistic covers, or a part of which it covers."""
    if not norm.training:
        return set()
    channel = norm.channel_dim % rank
    if norm.family in ROW_FAMILIES:
        return set(_dims(norm, rank, "weight"))
    positions = set(range(1, rank)) - {channel}
    if norm.per_batch:
        return positions | {0}
    return positions | {channel} if cut else positions


def _local_operands(norm: Norm, operands: Operands, place: Place) -> Operands:
    """Each operand's local tensor, through which autograd goes back to the DTensor."""
    rank = operands.input.dim()

    def local(name: str) -> Tensor | None:
        tensor: Any = getattr(operands, name)
        if tensor is None:
            return None
        dims = _dims(norm, rank, name)
        wanted = place.placements(dims)
        if list(tensor.placements) != wanted:
            tensor = tensor.redistribute(place.mesh, wanted)
        found: Tensor = tensor.to_local(grad_placements=place.grad_placements(dims))
        return found

    input = local("input")
    assert input is not None
    return Operands(input, *map(local, _NAMES[1:]))


def _check(norm: Norm, operands: Operands, local: Tensor, place: Place, groups: list[Any]) -> None:
    """The local tensor is this rank's part of the input, and the ranks that merge statistics make the same call.

    The header is sent for tensors of the CPU at each call. A GPU would wait for it, so there only the first call of its
    kind sends one; a graph that is traced, none.
    """
    expected = place.local_shape(operands.input.shape)
    refusal: Exception | None = None
    if tuple(local.shape) != expected:
        refusal = ValueError(
            f"{norm.family}: the local tensor has shape {tuple(local.shape)}; expected {expected}, this process's part "
            f"of the {tuple(operands.input.shape)} with placements {tuple(operands.input.placements)}; DTensor cuts as "  # type: ignore[attr-defined]
            "torch.chunk does"
        )
    captured = local.is_cuda and torch.cuda.is_current_stream_capturing()
    if type(local) is Tensor and groups and not captured:
        facts = facts_of(
            operands,
            -1,
            norm.eps,
            norm.activation,
            num_groups=norm.num_groups,
            num_dims=norm.num_dims,
            channel_dim=norm.channel_dim,
            mesh_axes=place.axes,
        )
        key = repr(facts)
        if not local.is_cuda or any(key not in _agreed.get(group, ()) for group in groups):
            refusal = _agreement(norm, None if refusal else facts, groups, refusal)
            if refusal is None and local.is_cuda:
                for group in groups:
                    _agreed.setdefault(group, set()).add(key)
    if refusal is not None:
        raise refusal


def _trace(norm: Norm, operands: Operands, place: Place) -> None:
    """Let no rank run another's graph, where the graphs differ.

    torch keeps traces on disk by what is in a graph before the DTensors in it become local tensors. In 2.13 two ranks
    have one key, and one of them computes by the other's sizes and offsets: wrong results, without an error.
    """
    rank, shape = operands.input.dim(), operands.input.shape
    # In pairs, since a tracer's sizes may be symbols, which cannot be hashed.
    neighbours = (pair for each in range(rank) for pair in pairwise(place.parts(each, shape[each])))
    uneven = any(one != other for (_, one), (_, other) in neighbours)
    found: list[tuple[str, Any]] = [(name, getattr(operands, name)) for name in _NAMES]
    moved = any(
        tensor is not None and placement.is_shard() and placement != tensor.placements[each]
        for name, tensor in found
        for each, placement in enumerate(place.placements(_dims(norm, rank, name)))
    )
    if (uneven or moved or place.cut) and keep_no_traces():
        warnings.warn(
            f"{norm.family}: the graphs of the ranks differ, and torch.compile would take a graph that one rank left "
            "on disk for another's; torch._functorch.config.enable_autograd_cache is False from here on",
            stacklevel=2,
        )


#: The calls of GPUs about which a group's ranks have agreed.
_agreed: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def _agreement(norm: Norm, facts: Any, groups: list[Any], refusal: Exception | None) -> Exception | None:
    """What is wrong, if anything. A rank that knows of a fault tells the ranks of its other groups as well."""
    for group in groups:
        try:
            agree(norm.family, facts if refusal is None else None, 0, exchange_device(group), group, _REMEDY)
        except RuntimeError as error:
            refusal = refusal or error
    return refusal


def _group_channels(norm: Norm, shape: Sequence[int]) -> int:
    return shape[norm.channel_dim] // norm.num_groups


def _own_norm(norm: Norm, whole: Tensor, local: Tensor) -> Norm:
    """The norm of this rank's input, of whole groups."""
    size = _group_channels(norm, whole.shape) if norm.family == "group_norm" else 0
    if not size:
        return norm
    groups = max(local.shape[norm.channel_dim] // size, 1)
    return norm_of_op(norm.family, groups, *norm.op_arguments[2:], norm.training)


def _merged(norm: Norm, operands: Operands, local: Operands, place: Place, groups: list[Any]) -> Results:
    """The results of this rank, by statistics that are merged over the ranks of all ``groups``."""
    if norm.family in ROW_FAMILIES:
        last = norm.per_position and norm.channel_dim == -1
        rows = replace(local, input=local.input.movedim(-1, 1)) if last else local
        output = normalize_rows(norm.family, groups, rows, norm.num_dims, norm.eps, norm.activation, norm.has_mean)
        return Results(output.movedim(1, -1) if last else output)
    channels = (operands if place.cut else local).input.shape[norm.channel_dim]
    size = _group_channels(norm, operands.input.shape) if norm.family == "group_norm" else 1
    units = Units(channels, norm.per_batch, size, place.first)
    found = normalize_channels(norm.family, groups, local, units, False, norm.eps, norm.activation, norm.channel_dim)
    mean, var = (each.flatten() if norm.per_batch else each for each in (found.mean, found.var))
    return Results(found.output, mean, (var + norm.eps).rsqrt(), var if norm.has_variance else None)


def _distributed(norm: Norm, input: Any, results: Results, place: Place, wants_statistics: bool) -> Results:
    """The results as DTensors. The statistics of a rank's rows need not be a chunk of those of all rows."""
    dims = _dims(norm, input.dim(), "input")
    output = _from_local(place, results.output, place.placements(dims), input.shape)
    if not wants_statistics or not norm.training:
        return Results(output)
    shape = statistics_shape(norm, view_of(norm, input.shape))
    covered = _dims(norm, input.dim(), "weight" if norm.per_batch else "scale")
    placements = place.placements(covered, place.merged)
    mean, rstd, var = (
        None if each is None else _from_local(place, each, placements, shape)
        for each in (results.mean, results.rstd, results.var if norm.has_variance else None)
    )
    return Results(output, mean, rstd, var)


def _from_local(place: Place, local: Tensor, placements: list[Any], shape: Sequence[int]) -> Tensor:
    """The DTensor of this shape, in the local tensor's order of memory."""
    from torch.distributed.tensor import DTensor

    order = slowest_first(local.stride(), range(local.dim()))
    packed = packed_strides([shape[axis] for axis in order])
    stride = tuple(packed[order.index(axis)] for axis in range(local.dim()))
    whole: Tensor = DTensor.from_local(
        local, place.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return whole
