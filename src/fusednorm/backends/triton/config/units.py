"""Units as rows of columns, which triton.held and triton.whole hold in registers: pure functions of the problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fusednorm.backends.triton.runs import WIDE_LOAD, alignment, load_bytes, power_of_two
from fusednorm.problem import DTYPE_BYTES, Layout, Problem

#: Elements of a tile of whole units in the registers of 16 warps, 32 a thread; of a unit up to which two programs share
#: a multiprocessor; and of one that a program finishes before a second launch would start.
MOST_HELD, SHARING_HELD, SMALL_UNIT = 16384, 8192, 4096
#: Units of so few elements, and so few of them, whose statistics are counted from an element of each: the time of a
#: sum across threads is saved, and M2 loses so many roundings of float32 at most. Of many short units the loads of that
#: element take as long: group_norm(1) of (65536, 11) in fp16 takes 4.1 us without and 4.5 with them, instance_norm of
#: (6, 960, 5, 5) in bf16 2.5 and 2.7.
PIVOTED_ELEMENTS, PIVOTED_UNITS, PIVOTED_SHORT, SHORT_PIVOTED = 1 << 11, 1 << 13, 1 << 11, 64


@dataclass(frozen=True, slots=True)
class HeldUnits:
    """A problem's units as ``rows`` of ``columns`` contiguous elements, see kernels/held.py: ``in_sample`` units in
    each of the samples, in batch_norm one sample. ``across`` is the stride of a layout from row to row; ``channels`` of
    each sample have partials of their own. Where columns lie ``apart``, they are the positions of channels_last."""

    samples: int
    in_sample: int
    channels: int
    rows: int
    columns: int
    affine: int
    across: Literal["sample", "channel", "spatial"]
    apart: bool
    input: Layout
    output: Layout | None
    grad: Layout | None
    before: Layout | None = None
    behind: Layout | None = None

    @property
    def units(self) -> int:
        return self.samples * self.in_sample

    @property
    def flat(self) -> bool:
        """Whether the rows of a channel lie along one axis of a tile: rows of odd lengths, which no wide load reads,
        where two axes would leave more lanes empty. (10, 2234, 9, 9) in batch_norm fills 79 % of them so, and else 40.
        """
        odd = self.columns > 1 and self.columns % 2 == 1 and self.rows > 1 and self.affine == 0
        return odd and power_of_two(self.rows * self.columns) < power_of_two(self.rows) * power_of_two(self.columns)

    @property
    def block(self) -> tuple[int, int]:
        """The rows and columns of a unit, as a tile holds it; no rows where it is flat."""
        if self.flat:
            return 0, power_of_two(self.rows * self.columns)
        return power_of_two(self.rows), power_of_two(self.columns)

    @property
    def elements(self) -> int:
        """Of a unit, as a tile holds it."""
        rows, columns = self.block
        return max(1, rows) * columns

    @property
    def full(self) -> float:
        """The part of a tile's lanes that hold an element."""
        return self.rows * self.columns / self.elements

    @property
    def contiguous(self) -> bool:
        """Whether neighbouring units are neighbours in memory, element by element."""
        layouts = self.input, self.output, self.grad, self.before, self.behind
        alone = self.columns == 1 or self.apart
        return alone and all(layout is None or self.steps(layout)[1] == 1 for layout in layouts)

    def load_bytes(self, problem: Problem) -> int:
        """The widest load along the contiguous elements of units, 16 bytes at most."""
        if self.contiguous:
            return load_bytes(problem)
        return min(load_bytes(problem), alignment(problem.dtype, self.columns) * DTYPE_BYTES[problem.dtype])

    def narrow(self, problem: Problem) -> bool:
        """Whether no wide load reads the contiguous elements of units."""
        return self.load_bytes(problem) < WIDE_LOAD

    @property
    def positions(self) -> bool:
        """Whether the rows are positions of channels_last."""
        return self.across == "spatial" and self.rows > 1

    @property
    def spans(self) -> bool:
        """Whether units of several samples share a program: neighbours in memory are of one sample."""
        return self.columns > 1

    def steps(self, layout: Layout) -> tuple[int, int, int]:
        """The strides of samples, units and rows, 0 where there is no second one; of columns that lie apart theirs in
        place of the samples', which are the rows."""
        unit = layout.channel * (self.channels // self.in_sample) if self.in_sample > 1 else 0
        row = getattr(layout, self.across) if self.rows > 1 else 0
        if self.apart:
            return layout.spatial, unit, row
        return (0 if self.across == "sample" else layout.sample), unit, row


def held_units(problem: Problem) -> HeldUnits:
    """The units of a problem."""
    seen, per_batch = problem.folded, problem.norm.per_batch
    view, layouts = seen.view, seen.layouts
    layout, *others = layouts
    assert layout is not None
    last, D = seen.layout.order == "channels_last", view.group_channels
    apart = per_batch and last and view.samples > 1 and view.spatial > 1
    if per_batch and view.samples > 1:
        last = False
    samples = 1 if per_batch else view.samples
    across: Literal["sample", "channel", "spatial"] = "spatial"
    if last:
        rows, columns = view.spatial, D
    else:
        across = "sample" if per_batch else "channel"
        rows, columns = view.samples if per_batch else D, view.spatial
    affine = 3 if across == "sample" and problem.by_sample else 0 if D == 1 else 2 if last else 1
    if affine == 0 and not apart and all(layout is None or getattr(layout, across) == columns for layout in layouts):
        rows, columns = 1, rows * columns  # the samples of an only channel follow one another
    return HeldUnits(samples, view.groups, view.channels, rows, columns, affine, across, apart, layout, *others)


def pivots(problem: Problem) -> bool:
    """Whether the statistics of held units are counted from an element of each. Of 32 bits it would cost accuracy."""
    most = PIVOTED_UNITS if problem.reduced >= SHORT_PIVOTED else PIVOTED_SHORT
    few = problem.reduced <= PIVOTED_ELEMENTS and problem.num_statistics <= most
    return few and DTYPE_BYTES[problem.dtype] == 2
