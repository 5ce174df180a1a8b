"""Problem: the view that every normalization shares, with dtypes and memory order, and the facts that follow.

An input is seen as (N, G, D, S): N samples, G groups, D channels per group, S spatial positions. :func:`view_of` turns
a torch-style shape into a :class:`View`; a :class:`Problem` adds the :class:`~fusednorm.norm.Norm`, dtypes and memory
order. Bytes, flops and the choice of kernel follow from it.

This module is pure Python: it imports neither torch nor a kernel language.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal, get_args

from fusednorm.formats import Quantized
from fusednorm.norm import Family, Norm, norm_of

Direction = Literal["forward", "inference", "backward", "backward_data", "backward_gamma_beta"]
Order = Literal["channels_first", "channels_last"]

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
#: How many tensors as large as the input a direction reads and writes.
TRANSFERS: dict[str, int] = {
    "forward": 2, "inference": 2, "backward": 3, "backward_data": 3, "backward_gamma_beta": 2,
}  # fmt: skip
DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class View:
    """The (N, G, D, S) view of an input; C = G * D channels in all."""

    samples: int
    groups: int
    group_channels: int
    spatial: int

    @property
    def channels(self) -> int:
        return self.groups * self.group_channels

    @property
    def numel(self) -> int:
        return self.samples * self.channels * self.spatial


def view_of(norm: Norm, shape: Sequence[int]) -> View:
    """The norm's view of a shape."""
    if norm.row_family:
        split = len(shape) - norm.num_dims
        return View(prod(shape[:split]), 1, prod(shape[split:]), 1)
    if norm.channel_dim == 1:
        channels, spatial = shape[1], prod(shape[2:])
    else:
        channels, spatial = shape[-1], prod(shape[1:-1])
    groups = 1 if norm.per_position else norm.num_groups if norm.family == "group_norm" else channels
    return View(shape[0], groups, channels // groups if groups else 0, spatial)


def statistics_shape(norm: Norm, view: View) -> tuple[int, ...]:
    """The shape of the mean, of rstd and of the variance."""
    if norm.per_position:
        return view.samples, view.spatial
    return (view.channels,) if norm.per_batch else (view.samples, view.groups)


def scale_shape(norm: Norm, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the scales of rows, which broadcasts against the input: a norm of trailing dimensions, or of the
    channels of (N, *, C)."""
    split = len(shape) - (norm.num_dims or 1)
    return (*shape[:split], *(1,) * (len(shape) - split))


def spread_shape(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """The shape (N, 1, ..., C, ..., 1) in which an (N, C) broadcasts against a shape with channels in ``axis``."""
    axis %= len(shape)
    return tuple(size if place in (0, axis) else 1 for place, size in enumerate(shape))


def gate_shape(shape: Sequence[int], axis: int, gate: Sequence[int]) -> tuple[int, ...] | None:
    """The shape, of the input's rank, in which a gate broadcasts against the input; None where it does not.

    An (N, C) is one number per sample and channel, whatever else it could mean; anything else follows torch's rule.
    """
    if len(gate) == 2 and len(shape) > 2 and tuple(gate) == (shape[0], shape[axis]):
        return spread_shape(shape, axis)
    if len(gate) > len(shape):
        return None
    aligned = (1,) * (len(shape) - len(gate)) + tuple(gate)
    # Not by "in": Dynamo of torch 2.13 finds no symbol in a tuple, also where it knows the symbol's value.
    fits = all(one == 1 or one == size for one, size in zip(aligned, shape, strict=True))
    return aligned if fits else None


@dataclass(frozen=True, slots=True)
class Layout:
    """A memory order of the view and the element strides of (sample, channel, spatial) in it.

    channels_first has spatial stride 1, channels_last has channel stride 1.
    """

    order: Order
    sample: int
    channel: int
    spatial: int


def _collapse(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of several dimensions seen as one; None where they cannot be, 0 where there is no second element."""
    if 0 in sizes:
        return 0
    step: int | None = None
    expected = 0
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if step is None:
            step = stride
        elif stride != expected:
            return None
        expected = stride * size
    return 0 if step is None else step


def layout_of(
    norm: Norm,
    shape: Sequence[int],
    strides: Sequence[int],
    like: Sequence[int] | None = None,
    wanted: Order | None = None,
) -> Layout | None:
    """The native layout of a strided tensor, or None where it fits neither memory order without a copy.

    A norm may walk the spatial positions in any order that all its tensors share: that of the strides ``like``, which
    are the input's, by default the tensor's own. ``wanted`` is the memory order that the tensor must have, the input's:
    with one channel or one position a tensor has both. Where each position has statistics of its own, positions come in
    their own order, in which these are returned.
    """
    rank = len(shape)
    order = strides if like is None else like
    if norm.row_family:
        split = rank - norm.num_dims
        sample = _collapse(shape[:split], strides[:split])
        channel = _collapse(shape[split:], strides[split:])
        spatial: int | None = 0
    else:
        channel_axis = 1 if norm.channel_dim == 1 else rank - 1
        axes = [axis for axis in range(1, rank) if axis != channel_axis]
        if not norm.per_position:
            axes.sort(key=lambda axis: -order[axis])
        sample = strides[0] if shape[0] > 1 else 0
        channel = strides[channel_axis] if shape[channel_axis] > 1 else 0
        spatial = _collapse([shape[axis] for axis in axes], [strides[axis] for axis in axes])
    if sample is None or channel is None or spatial is None:
        return None
    view = view_of(norm, shape)
    one_channel, one_position = view.channels <= 1, view.spatial <= 1
    last = (channel == 1 or one_channel) and (one_position or spatial >= 1)
    first = (spatial == 1 or one_position) and (one_channel or channel >= 1)
    if wanted is None:
        # With one position per channel the channels are contiguous: a row, which is channels_last.
        rows = one_position or spatial >= max(view.channels, 2) or not first
        wanted = "channels_last" if last and rows else "channels_first"
    if wanted == "channels_last":
        return Layout(wanted, sample, 1, spatial) if last else None
    return Layout(wanted, sample, channel, 1) if first else None


def rows_in_samples(
    norm: Norm, shape: Sequence[int], tensors: Sequence[Sequence[int]]
) -> tuple[tuple[int, int, int], list[tuple[int, int, int]]] | None:
    """The rows of a norm of trailing dimensions as positions of samples: the shape (samples, positions, elements), and
    each tensor's strides in it. None where the leading dimensions of some tensor are not two.

    A head of packed queries, keys and values is such rows: (B, L, H, D) with the strides (3 L H D, 3 H D, D, 1).
    """
    split = len(shape) - norm.num_dims
    for cut in range(1, split):
        parts = slice(0, cut), slice(cut, split), slice(split, None)
        found = [tuple(_collapse(shape[part], strides[part]) for part in parts) for strides in tensors]
        if all(None not in steps and steps[2] in (0, 1) for steps in found):
            samples, positions, elements = (prod(shape[part]) for part in parts)
            return (samples, positions, elements), found  # type: ignore[return-value]
    return None


def rows_across(
    norm: Norm, shape: Sequence[int], tensors: Sequence[Sequence[int]]
) -> tuple[tuple[int, int, int], list[tuple[int, int, int]]] | None:
    """The rows of a norm of trailing dimensions as channels of positions, where in every tensor the elements of a row
    lie apart and neighbouring rows side by side: the shape (samples, elements, positions), and each tensor's strides
    in it; None elsewhere.

    Tokens of an image are such rows: (N, C, H, W) as (N, H W, C), by a flatten and a transpose without a copy.
    """
    split = len(shape) - norm.num_dims
    parts = slice(0, 1), slice(split, None), slice(1, split)
    samples, elements, positions = (prod(shape[part]) for part in parts)
    if split < 2 or elements < 2 or positions < 2:
        return None
    found = [tuple(_collapse(shape[part], strides[part]) for part in parts) for strides in tensors]
    if any(None in steps or steps[1] < 2 or steps[2] != 1 for steps in found):  # type: ignore[operator]
        return None
    return (samples, elements, positions), found  # type: ignore[return-value]


def dense_layout(view: View, order: Order) -> Layout:
    """The layout of a dense tensor in the given order."""
    channels, spatial = view.channels, view.spatial
    if order == "channels_first":
        return Layout(order, channels * spatial, spatial, 1)
    return Layout(order, channels * spatial, 1, channels)


def positions_follow(layout: Layout, view: View) -> bool:
    """Whether the positions of channels_last follow one another through all samples."""
    steps = view.samples > 1 and view.spatial > 1 and view.channels > 0
    return not steps or layout.sample == view.spatial * layout.spatial


def row_layout(layout: Layout, view: View) -> Layout:
    """The layout of channels_last whose positions are seen as rows."""
    return Layout("channels_last", layout.sample if view.spatial == 1 else layout.spatial, 1, 0)


@dataclass(frozen=True, slots=True)
class Gate:
    """How a gate lies against rows: ``rows`` of them share one, which has a number for each element or one for all, and
    the next lies ``step`` numbers behind it."""

    rows: int
    step: int
    per_element: bool


@dataclass(frozen=True, slots=True)
class Added:
    """What is added around a problem's norm: s = input + bias + gate · pre_add is normalized, and post_add is added to
    z.

    ``names`` are the call's tensors that are added. A layout is None where nothing is added. ``keeps_sum`` says that a
    forward writes s, ``grad_sum`` that a backward, whose input is s, is given a gradient of s. ``obstacle`` is None, or
    why no kernel can add: shapes, dtypes or strides.

    A backward has a gate where the gradient of the gate or of pre_add is made, and has a pre_add where that of the gate
    is; ``grad_pre_add`` says that the gradient of pre_add is made, ``grad_numbers`` that of a pre_add of a number for
    each sample and channel, without a gate.
    """

    pre_layout: Layout | None = None
    gate: Gate | None = None
    post_layout: Layout | None = None
    keeps_sum: bool = False
    grad_sum: bool = False
    grad_pre_add: bool = False
    grad_numbers: bool = False
    obstacle: str | None = None
    names: tuple[str, ...] = ()

    @property
    def before(self) -> bool:
        """Whether anything is added to the input."""
        return "pre_add" in self.names or "pre_bias" in self.names

    @property
    def exact(self) -> bool:
        """Whether a forward, of a compiled graph, takes s as it is: where it is no result, Inductor's own loops do not
        round it either. In eager mode a forward rounds s with a backward and without."""
        return not self.keeps_sum and "pre_bias" in self.names

    def transfers(self, direction: Direction) -> int:
        """How many tensors as large as the input the sums read and write beyond those of the norm.

        A ``pre_add`` of a number per sample and channel, which has no layout, is none. A backward reads post_add and
        writes its gradient.
        """
        behind = 0 if self.post_layout is None else TRANSFERS[direction] - 1
        return (self.pre_layout is not None) + behind + self.keeps_sum + self.grad_sum + self.grad_pre_add


def gate_of(norm: Norm, shape: Sequence[int], gate: Sequence[int], order: Order) -> Gate | None:
    """A gate in the shape of :func:`gate_shape`, against rows of one position per channel, or of a position whose
    channels come last in memory and have statistics of their own; None where no rows share it one after the other, and
    for rows whose elements lie apart. Where there are other positions, a gate is a number for each plane of them, or
    None."""
    if norm.row_family and order == "channels_first":
        return None
    positions = norm.per_position and order == "channels_last"
    if not norm.row_family and not positions and view_of(norm, shape).spatial != 1:
        planes = spread_shape(shape, norm.channel_axis)
        return Gate(1, 1, False) if all(one in (1, size) for one, size in zip(gate, planes, strict=True)) else None
    if positions and norm.channel_dim == 1:
        if gate[1] > 1 and prod(gate[2:]) > 1:  # its numbers lie channel by channel
            return None
        shape, gate = ((*each[:1], *each[2:], each[1]) for each in (shape, gate))
    split = len(shape) - norm.num_dims if norm.row_family else len(shape) - 1 if positions else 1
    outer, inner = gate[:split], gate[split:]
    shared = next((place for place in reversed(range(split)) if outer[place] != 1), -1) + 1
    whole = prod(inner) != 1
    if tuple(outer[:shared]) != tuple(shape[:shared]) or (whole and tuple(inner) != tuple(shape[split:])):
        return None
    return Gate(max(1, prod(shape[shared:split])), (prod(inner) if prod(outer) > 1 else 0), whole)


@dataclass(frozen=True)
class Problem:
    """One normalization to run: the norm, the view, its dtypes and memory order, and which operands there are.

    ``shape`` and ``layout`` are the input's, ``output_strides`` and ``output_layout`` the output's or grad_input's,
    ``grad_layout`` grad_output's (None in the forward directions); all layouts have one order. ``dense`` says that the
    output has the input's strides. ``weight_dtype``, ``bias_dtype``, ``scale_dtype`` and ``shift_dtype`` are None
    without the operand. ``copies`` names the tensors that are copied first, as their strides fit neither memory order.
    ``made_of`` is the call's norm where ``norm`` and the view are not: its positions are seen as rows, or its rows as
    the positions of samples. ``added`` is None where nothing is added around the norm, ``quantized`` where the output
    has the input's dtype.
    """

    norm: Norm
    direction: Direction
    view: View
    layout: Layout
    dtype: str
    weight_dtype: str | None = None
    bias_dtype: str | None = None
    scale_dtype: str | None = None
    shift_dtype: str | None = None
    device: str = "cpu"
    shape: tuple[int, ...] = ()
    output_strides: tuple[int, ...] = ()
    output_layout: Layout | None = None
    grad_layout: Layout | None = None
    dense: bool = True
    copies: tuple[str, ...] = ()
    made_of: Norm | None = None
    added: Added | None = None
    quantized: Quantized | None = None

    @property
    def called(self) -> Norm:
        """The norm of the call."""
        return self.made_of or self.norm

    @property
    def family(self) -> Family:
        return self.norm.family

    @property
    def modulated(self) -> bool:
        return self.scale_dtype is not None or self.shift_dtype is not None

    @property
    def of_positions(self) -> bool:
        """Whether rows are positions of samples: channels_last, each position with statistics of its own."""
        return self.norm.per_position and self.layout.order == "channels_last"

    @property
    def numbered(self) -> bool:
        """Whether units that are no rows get a number for each channel: a gate, a pre_add of (N, C), or a bias; or give
        its gradient."""
        added, view = self.added, self.view
        if added is None:
            return False
        if self.norm.per_position:
            rows = self.of_positions
        else:
            rows = view.spatial == view.groups == 1 and not self.norm.per_batch
        numbers = "pre_add" in added.names and added.pre_layout is None
        return not rows and (numbers or added.grad_numbers or "pre_gate" in added.names or "pre_bias" in added.names)

    @property
    def gated_backward(self) -> bool:
        """Whether this is a backward that makes the gradients of a product before the norm."""
        return self.backward and self.added is not None and "pre_gate" in self.added.names

    @property
    def by_sample(self) -> bool:
        """Whether a channel has other numbers in each sample: a scale, a shift, or what is added to it."""
        return self.modulated or self.numbered

    @property
    def constant(self) -> bool:
        """True for a backward whose statistics cover one element each: then x - mean is 0, and dx is 0.

        Kernels form the two terms of dx = rstd A dz - rstd A dz in different ways, and would leave roundings of
        eps^(-1/2).
        """
        return self.backward and self.norm.training and self.reduced == 1 and self.norm.has_mean

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """The shape of weight and bias."""
        if self.called.row_family:
            return self.shape[len(self.shape) - self.called.num_dims :]
        return (self.view.channels,)

    @property
    def statistics_shape(self) -> tuple[int, ...]:
        """The shape of the mean, of rstd and of the variance."""
        if self.made_of is not None:
            return statistics_shape(self.made_of, view_of(self.made_of, self.shape))
        return statistics_shape(self.norm, self.view)

    @property
    def num_statistics(self) -> int:
        """The number of means (and of inverse standard deviations)."""
        return prod(self.statistics_shape)

    @cached_property
    def folded(self) -> Problem:
        """The problem with batch_norm's channels_last samples as positions of one sample, where strides permit that and
        nothing differs by sample (:attr:`by_sample`); else the problem itself."""
        view, layouts = self.view, self.layouts
        if not self.norm.per_batch or self.by_sample or self.layout.order == "channels_first":
            return self
        steps = view.samples > 1 and view.spatial > 1
        if steps and any(layout and layout.sample != view.spatial * layout.spatial for layout in layouts):
            return self

        def one_sample(layout: Layout | None) -> Layout | None:
            return layout if layout is None or view.spatial > 1 else replace(layout, spatial=layout.sample)

        whole = View(1, view.groups, view.group_channels, view.samples * view.spatial)
        return self._seen_as(self.norm, whole, *map(one_sample, layouts))

    @cached_property
    def spread(self) -> Problem | None:
        """:meth:`spread_over` one sample."""
        return self.spread_over(1)

    def spread_over(self, blocks: int) -> Problem | None:
        """batch_norm's channels_first as group_norm's channels_last: a sample for each of so many blocks of channels,
        the elements that a block has of a sample as channels, a group for each channel, and the samples as positions.
        None where strides do not permit that, and where anything differs by sample.
        """
        view, layouts = self.view, self.layouts
        if not self.norm.per_batch or self.by_sample or self.layout.order == "channels_last":
            return None
        if view.channels > 1 and any(layout and layout.channel != view.spatial for layout in layouts):
            return None
        channels, norm = view.channels // blocks, self.norm
        grouped = norm_of("group_norm", channels, 1, norm.eps, norm.activation, norm.training)

        def across(layout: Layout | None) -> Layout | None:
            return layout and Layout("channels_last", channels * view.spatial if blocks > 1 else 0, 1, layout.sample)

        whole = View(blocks, channels, view.spatial, view.samples)
        return self._seen_as(grouped, whole, *map(across, layouts))

    @cached_property
    def flat(self) -> Problem | None:
        """Samples as rows, in which each element is a channel. None where strides do not permit that, for groups that
        lie across one another, for batch_norm, with given statistics, and where anything differs by sample."""
        view, norm = self.view, self.norm
        if norm.per_batch or norm.per_position or not norm.training or self.by_sample or self.added is not None:
            return None
        last = self.layout.order == "channels_last"
        if last and view.groups > 1:
            return None
        for layout in self.layouts:
            if layout and (layout.spatial != view.channels if last else layout.channel != view.spatial):
                return None

        def row(layout: Layout | None) -> Layout | None:
            return layout and Layout("channels_last", layout.sample, 1, 0)

        whole = View(view.samples, view.groups, view.group_channels * view.spatial, 1)
        return self._seen_as(norm, whole, *map(row, self.layouts))

    @property
    def layouts(self) -> tuple[Layout | None, ...]:
        """Those of all tensors: input, output, grad_output, pre_add and post_add."""
        added = (None, None) if self.added is None else (self.added.pre_layout, self.added.post_layout)
        return self.layout, self.output_layout, self.grad_layout, *added

    def _seen_as(self, norm: Norm, view: View, layout: Layout | None, *others: Layout | None) -> Problem:
        """The problem as another norm of another view; the layouts are those of :attr:`layouts`."""
        assert layout is not None
        output, grad, pre, post = others
        added = None if self.added is None else replace(self.added, pre_layout=pre, post_layout=post)
        return replace(self, norm=norm, view=view, layout=layout, output_layout=output, grad_layout=grad, added=added)

    @property
    def are_rows(self) -> bool:
        """Whether a norm with statistics for each position is one of rows: the samples' positions follow one another,
        and no scale or shift differs by sample."""
        view, layouts = self.view, (self.layout, self.output_layout, self.grad_layout)
        if self.modulated or not self.norm.per_position or self.layout.order == "channels_first":
            return False
        return all(one is None or positions_follow(one, view) for one in layouts)

    @property
    def in_rows(self) -> Problem:
        """The channels_last problem of a norm with statistics for each position as that of rows, each a position."""
        view, norm = self.view, self.norm
        trailing = norm_of(norm.family, 1, 1, norm.eps, norm.activation, norm.training)

        layouts = (self.layout, self.output_layout, self.grad_layout)
        layout, output, grad = (each and row_layout(each, view) for each in layouts)
        assert layout is not None
        rows = View(view.samples * view.spatial, 1, view.channels, 1)
        return replace(
            self, norm=trailing, view=rows, layout=layout, output_layout=output, grad_layout=grad, made_of=self.called
        )

    @property
    def backward(self) -> bool:
        return self.direction.startswith("backward")

    @property
    def compute_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @cached_property
    def reduced(self) -> int:
        """K, the number of elements under one statistic."""
        view = self.view
        if self.norm.per_position:
            return view.channels
        return (view.samples if self.norm.per_batch else view.group_channels) * view.spatial

    @cached_property
    def bytes(self) -> int:
        """The fewest bytes that the operation can move: each tensor read or written once."""
        view = self.view
        transfers = TRANSFERS[self.direction] + (0 if self.added is None else self.added.transfers(self.direction))
        total = transfers * view.numel * DTYPE_BYTES[self.dtype]
        if self.quantized is not None:
            total -= view.numel * (DTYPE_BYTES[self.dtype] - 1)
            total += 4 * (self.num_statistics if self.quantized.per_row else 1)
        stat_bytes = DTYPE_BYTES[self.compute_dtype]
        total += self.num_statistics * stat_bytes * (2 if self.norm.has_mean else 1)
        parameter_transfers = 2 if self.direction in ("backward", "backward_gamma_beta") else 1
        for dtype in (self.weight_dtype, self.bias_dtype):
            if dtype is not None:
                total += parameter_transfers * view.channels * DTYPE_BYTES[dtype]
        for dtype in (self.scale_dtype, self.shift_dtype):
            if dtype is not None:
                total += parameter_transfers * view.samples * view.channels * DTYPE_BYTES[dtype]
        return total

    @cached_property
    def flops(self) -> int:
        """Floating-point operations, an fma counted as two, an activation as its formula's operations."""
        activation = self.norm.activation
        value = activation.flops if activation else 0
        derivative = activation.derivative_flops if activation else 0
        # Statistics: x - pivot, a sum, an fma. Apply: x - mean, an fma. Reduction: x - mean, (z), a product with dy, a
        # sum, an fma. Gradient: the reduction without its sums, then two fmas.
        per_element = {
            "forward": 4 + 3 + value,
            "inference": 3 + value,
            "backward": 4 + (3 + derivative if activation else 0) + 5,
            "backward_data": 4 + (3 + derivative if activation else 0) + 5,
            "backward_gamma_beta": 4 + (3 + derivative if activation else 0),
        }[self.direction]
        return per_element * self.view.numel

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in flops per byte."""
        return self.flops / self.bytes if self.bytes else 0.0
