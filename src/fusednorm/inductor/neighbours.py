"""Whether a call in a compiled graph runs our kernels or torch's own formula, as Inductor compiles it.

Inductor fuses a norm with the pointwise operations before and after it, which ours leave to passes of their own over
memory; ours pass over memory less often within the norm. So the choice is a sum of passes, a pure function of the
problem and of its neighbours. A pass is one read or one write of a tensor as large as the input.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fusednorm.private.inductor_names import VALUE
from fusednorm.problem import DTYPE_BYTES, Problem

#: What a GPU moves in a microsecond, and what one more launch costs it and its host: an H200.
BYTES, LAUNCH = 4.2e6, 3.0
#: Ours are chosen where they take no more than so much of the time of Inductor's: it also saves launches that no sum of
#: passes sees.
MARGIN = 0.97
#: The passes and launches of a forward, ours and Inductor's, from device times in benchmarks/results/gpu-h200.json as
#: multiples of a plain copy, which is two passes. Rows are layer_norm's and rms_norm's.
ROWS = ((2.1, 1), (2.2, 1))
PLANES = ((3.0, 2), (4.2, 2))
LAST = ((3.5, 3), (5.7, 3))
GIVEN = ((2.0, 1), (2.0, 1))  # with given statistics a norm is pointwise itself
#: The same of planes whose units fit the registers of a program, and the instances that hold them there.
HELD, HOLDING = (2.3, 1), ("triton.held", "triton.whole")
#: On a CPU a call takes 8 to 13 us besides its work, and Inductor fuses nothing with it; large inputs gain more than
#: that.
CALLED_BYTES = 1 << 19


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The passes that Inductor saves when it fuses what makes the input, and what takes the output.

    Two where a tensor between them then need not be in memory at all, one where only the norm's own access is saved.
    """

    before: int = 0
    after: int = 0
    #: Whether a convolution of images takes the output.
    convolved: bool = False


def neighbours_of(norm: Node) -> Neighbours:
    """The neighbours of a norm whose first argument is its input and whose first result is its output."""
    source = norm.args[0]
    assert isinstance(source, Node)
    before = 0
    if is_pointwise(source):
        before = 2 if len(source.users) == 1 else 1
    takers = [
        user for output in norm.users if output.target is operator.getitem and output.args[1] == 0
        for user in output.users
    ]  # fmt: skip
    fused = [user for user in takers if is_pointwise(user)]
    after = 0 if not fused else 2 if len(fused) == len(takers) else 1
    convolved = any(taker.target is torch.ops.aten.convolution.default and _is_image(norm.args[0]) for taker in takers)
    return Neighbours(before, after, convolved)


def _is_image(node: Any) -> bool:
    value = node.meta.get(VALUE)
    return isinstance(value, Tensor) and value.dim() == 4


def transposed_behind(problem: Problem, neighbours: Neighbours) -> Neighbours:
    """The neighbours where Inductor gives images that convolutions take channels_last: an output that ours leave in
    channels_first is then transposed in a pass of its own, and Inductor's own loops write it so."""
    if not neighbours.convolved or problem.layout.order != "channels_first" or problem.view.spatial == 1:
        return neighbours
    return replace(neighbours, after=neighbours.after + 2)


def is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def ours_pay(problem: Problem, neighbours: Neighbours, instance: str = "") -> bool:
    """Whether a forward is faster by our kernels, those of the ``instance``, on a GPU; a backward that is still an op
    here always is."""
    if problem.backward:
        return True
    if problem.copies:  # Inductor reads an input in any strides
        return False
    if problem.direction == "inference":
        own, other = GIVEN
    elif problem.norm.row_family or (problem.norm.per_position and problem.layout.order == "channels_last"):
        own, other = ROWS
    else:
        own, other = PLANES if problem.layout.order == "channels_first" else LAST
        if instance in HOLDING:
            own = HELD
    size = problem.view.numel * DTYPE_BYTES[problem.dtype]
    # Two reads of an input that is computed on the fly compute it twice.
    before = neighbours.before - (1 if neighbours.before and other[0] > 3 else 0)
    launches = own[1] + (neighbours.before > 0) + (neighbours.after > 0)
    ours = (own[0] + before + neighbours.after) * size / BYTES + launches * LAUNCH
    inductors = other[0] * size / BYTES + other[1] * LAUNCH
    return ours <= MARGIN * inductors


def training_pays(problem: Problem, input: Node) -> bool:
    """Whether our backward of rows, and so their forward, is faster on a GPU than torch's formula of both.

    The gradients of weight and bias are sums over rows, for which Inductor reads both tensors again; without parameters
    ours save nothing. What a launch reads must be in memory in the order of its rows: of a permuted input that is a
    transpose, and an input that torch could compute anew in the backward is kept for it.
    """
    parameters = problem.weight_dtype is not None or problem.bias_dtype is not None
    return parameters and not is_permuted(input)


def is_permuted(node: Node) -> bool:
    """Whether a tensor has its dimensions in another order than the one that it is computed in."""
    aten = torch.ops.aten
    while node.target in (aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor):
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node.target in (aten.permute.default, aten.transpose.int, aten.t.default)


ALONE = Neighbours()


def calls_pay(problem: Problem, neighbours: Neighbours = ALONE) -> bool:
    """Whether a call on a CPU is faster than the formula in Inductor's loops.

    A forward whose input need not be in memory is faster by the formula: of pointwise operations alone before it, calls
    were 0.43 to 0.97 times as fast as torch's own norms in float32, formulas 0.8 to 1.1 times. Groups of channels_last
    are not: there torch's loops run over the channels of one group at a time.

    ``neighbours`` are given where a forward has no backward in its graph. Where it has one, both depend on the problem
    alone, and on nothing in which they differ, so that both make z of the same operations.
    """
    if problem.view.numel * DTYPE_BYTES[problem.dtype] < CALLED_BYTES:
        return False
    groups = problem.norm.family in ("group_norm", "instance_norm") and problem.layout.order == "channels_last"
    return neighbours.before < 2 or groups
