"""The runs of contiguous elements in a problem's tensors: how they are aligned, and how tiles take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from fusednorm.problem import DTYPE_BYTES, Layout, Problem, View

#: Bytes of a load of two elements of 16 bits, of one that can be in flight ahead of its use, and of the widest one.
PAIR_LOAD, WIDE_LOAD, WIDEST_LOAD = 4, 8, 16
#: A problem of so many elements is small: launches, and the partials that they leave one another, decide; or else the
#: time of a program.
FEW = 1 << 21
#: Elements of 16 bits in a wide load, and the positions of a plane from which on its tiles begin at such windows. For
#: elements of 32 bits they cost more than they gain: 48.7 us, not 41.6, on (8, 640, 49, 49) in 32 groups.
WINDOW, SHORTEST_WINDOWED, SHORTEST_WINDOWED_ROW = 8, 32, 384
#: Channels of a tile of channels_last in a pass that reads.
READ_CHANNELS = 64
#: The fewest rows of several positions in a tensor of channels_last, and the lanes of such a row where the channels are
#: few. Rows fill tiles where FILLED of the lanes are full; single positions do not below HALF_FULL: 70 channels fill
#: 55 % of two blocks of 64.
LEAST_ROWS, MOST_LANES, FILLED, HALF_FULL = 8, 1024, 0.9, 0.6
#: Elements beyond which such rows pay where single positions have narrow loads, and where they fill few lanes: each
#: position of a row has partials of its own. An evaluation has none. batch_norm of (1, 33, 303, 160) in bf16 takes 10.7
#: us in rows of 16 positions and 14.9 in single ones, (4, 100, 40, 40) in fp16 9.0 and 7.3.
REPEATED, REPEATED_EVALUATED = (1 << 20, 1 << 22), (1 << 18, 1 << 19)
#: Elements of 16 bits beyond which they pay for several groups of more than a few channels whose single positions fill
#: more lanes, but for the arithmetic of a smooth activation's derivative: (46, 25, 45, 27) in 25 groups in fp16 takes
#: 10.2 us in single ones and 14.1 in rows, backward 10.5 and 11.9, (30, 42, 33, 33) in bf16 with silu 9.3 and 14.1,
#: backward 13.6, and 12.3. One group is a run of memory for the moments: (40, 45, 31, 31) takes 8.7 us in single ones,
#: and 7.8. batch_norm of (65536, 22) in bf16 takes 8.7, and 7.8, of (80000, 20) backward 11.3, and 9.8.
REPEATED_GROUPS = 1 << 21


def power_of_two(number: int) -> int:
    """The least power of two that is not below a number."""
    return 1 << max(0, number - 1).bit_length()


def divisor(number: int) -> tuple[int, int]:
    """A number, and the inverse by which kernels divide, see ``divided`` of kernels/addressing.py, as 64 bits with a
    sign."""
    number = max(1, number)
    inverse = ((1 << 64) - 1) // number
    return number, inverse if number > 1 else -1


def alignment(dtype: str, *numbers: int) -> int:
    """The elements, a power of two and at most 16 bytes of them, that divide all the numbers."""
    return gcd(16 // DTYPE_BYTES[dtype], *numbers)


def leading_bits(length: int, block: int, bits: int) -> int:
    """The first bits of the last place of a length, in a block that is the power of two of it, see ``within`` of
    kernels/addressing.py."""
    return (length - 1) >> max(0, block.bit_length() - 1 - bits)


def alignment_of_runs(dtype: str, view: View, layouts: Sequence[Layout]) -> int:
    """The alignment of every run of contiguous elements in tensors of a view: of its beginning and its end."""
    found = 0
    for layout in layouts:
        last = layout.order == "channels_last"
        run, step = (view.channels, layout.spatial) if last else (view.spatial, layout.channel)
        found = gcd(found, run, step, layout.sample)
    return alignment(dtype, found)


def load_bytes(problem: Problem) -> int:
    """The widest load that the strides of all tensors allow, 16 bytes at most."""
    return alignment_of_runs(problem.dtype, problem.view, layouts_of(problem)) * DTYPE_BYTES[problem.dtype]


def single_floats(problem: Problem) -> bool:
    """Whether each load is of one element of 32 bits."""
    return problem.dtype == "float32" and load_bytes(problem) == DTYPE_BYTES["float32"]


def unit_bytes(problem: Problem) -> int:
    """The widest load along units in one piece of memory, 16 bytes at most."""
    samples = [layout.sample for layout in layouts_of(problem) if problem.view.samples > 1]
    return alignment(problem.dtype, problem.reduced, *samples) * DTYPE_BYTES[problem.dtype]


def layouts_of(problem: Problem) -> list[Layout]:
    """Of the input, the output and grad_output, as far as the problem has them."""
    all_three = problem.layout, problem.output_layout, problem.grad_layout
    return [layout for layout in all_three if layout is not None]


def window_of(dtype: str, view: View, layouts: Sequence[Layout]) -> int:
    """The elements of a window, see kernels/tiles.py; 1 where tiles begin at their first position.

    All tensors must lie alike in their windows.
    """
    size, first = DTYPE_BYTES[dtype], layouts[0]
    narrow = alignment_of_runs(dtype, view, layouts) * size < WIDE_LOAD
    if size != 2 or first.order == "channels_last" or not narrow or view.spatial < SHORTEST_WINDOWED:
        return 1
    alike = all(
        (layout.sample - first.sample) % WINDOW == (layout.channel - first.channel) % WINDOW == 0 for layout in layouts
    )
    return WINDOW if alike else 1


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs that the tiles of a pass hold, see kernels/tiles.py: those of ``view`` and ``layouts``, which have the
    channels of ``repeat`` positions for one of channels_last, counted through the samples with ``across``. ALIGN,
    ``alignment``, divides where runs begin and end."""

    repeat: int
    across: bool
    alignment: int
    view: View
    layouts: Sequence[Layout]


def runs_of(problem: Problem, view: View, layouts: Sequence[Layout], *, across: bool = True, lanes: int = 0) -> Runs:
    """The runs of a pass over a view, which reads and writes tensors of these layouts. ``across``: whether the pass may
    take rows of the whole tensor. ``lanes``: those of a long row of channels_last, which holds as many positions as
    fit, or 0."""
    dtype = problem.dtype
    repeat = _most_positions(dtype, view, layouts, lanes) if lanes else _repeat(problem, view, layouts)
    rows, samples = alignment(dtype, view.channels * repeat), _alignment_of_samples(dtype, view, layouts)
    whole = samples * DTYPE_BYTES[dtype] < WIDEST_LOAD and _packed(view, layouts)
    if repeat == 1 or (whole and not across):
        return Runs(1, False, alignment_of_runs(dtype, view, layouts), view, layouts)
    across = whole
    positions = view.spatial + (repeat - 1 if across else 0)
    seen = View(view.samples, view.groups, view.group_channels * repeat, -(-positions // repeat))
    repeated = [replace(layout, spatial=view.channels * repeat) for layout in layouts]
    return Runs(repeat, across, rows if across else min(rows, samples), seen, repeated)


def _repeat(problem: Problem, view: View, layouts: Sequence[Layout]) -> int:
    """The positions whose channels make one row of a tile of channels_last: one, or as many as give rows that begin at
    16 bytes, or that fill the tiles, in tensors of more elements than the least for either."""
    dtype, C, S = problem.dtype, view.channels, view.spatial
    evaluated = problem.direction == "inference"
    least_narrow, least_empty = REPEATED_EVALUATED if evaluated else REPEATED
    if not _dense(view, layouts) or C % READ_CHANNELS == 0 or S < LEAST_ROWS or view.numel <= least_narrow:
        return 1
    now, most_wide = alignment_of_runs(dtype, view, layouts), WIDEST_LOAD // DTYPE_BYTES[dtype]
    widest = _widest(dtype, view, layouts)

    def full(repeat: int) -> float:
        return filled(repeat * C, min(READ_CHANNELS, power_of_two(repeat * C)))

    empty = full(1) < HALF_FULL
    groups = view.groups > 1 and not problem.norm.per_batch and READ_CHANNELS // 4 < C and DTYPE_BYTES[dtype] == 2
    if groups and not (evaluated or empty or (problem.backward and problem.norm.smooth)):
        least_narrow = REPEATED_GROUPS
    narrow = now < widest == most_wide and view.numel > least_narrow
    if not (narrow or (empty and view.numel > least_empty)):
        return 1
    most = min(S // LEAST_ROWS, max(8, MOST_LANES // C))
    usable = [repeat for repeat in range(1, most + 1) if repeat * C % widest == 0]
    return next((repeat for repeat in usable if full(repeat) >= FILLED), max(usable, key=full, default=1))


def _most_positions(dtype: str, view: View, layouts: Sequence[Layout], lanes: int) -> int:
    """The most positions whose channels are in so many lanes, and make rows that begin at 16 bytes where they can."""
    if not _dense(view, layouts):
        return 1
    widest, most = _widest(dtype, view, layouts), min(view.spatial, lanes // view.channels)
    return next((repeat for repeat in range(most, 0, -1) if repeat * view.channels % widest == 0), 1)


def _dense(view: View, layouts: Sequence[Layout]) -> bool:
    """Whether nothing lies between the positions of channels_last."""
    return all(layout.order == "channels_last" and layout.spatial == view.channels for layout in layouts)


def _widest(dtype: str, view: View, layouts: Sequence[Layout]) -> int:
    """The elements of the widest load that rows of several positions may have."""
    packed = _packed(view, layouts)
    return WIDEST_LOAD // DTYPE_BYTES[dtype] if packed else _alignment_of_samples(dtype, view, layouts)


def _packed(view: View, layouts: Sequence[Layout]) -> bool:
    """Whether nothing lies between the samples."""
    return view.samples == 1 or all(layout.sample == view.channels * view.spatial for layout in layouts)


def _alignment_of_samples(dtype: str, view: View, layouts: Sequence[Layout]) -> int:
    samples = (layout.sample for layout in layouts if view.samples > 1)
    return alignment(dtype, view.channels * view.spatial, *samples)


def row_window(problem: Problem) -> int:
    """The elements of a window of rows, see :func:`window_of`; a program holds one such row at a time."""
    layouts = layouts_of(problem)
    size = DTYPE_BYTES[problem.dtype]
    # A window holds elements of the next row, where there is one.
    apart = all(layout.sample >= problem.view.channels for layout in layouts)
    alike = apart and all((layout.sample - layouts[0].sample) % WINDOW == 0 for layout in layouts)
    narrow = load_bytes(problem) < WIDE_LOAD and problem.view.samples > 1
    return WINDOW if size == 2 and alike and narrow and problem.view.channels >= SHORTEST_WINDOWED_ROW else 1


def length_of_runs(problem: Problem) -> int:
    """The lanes of a tile of channels_first that holds all positions of a plane."""
    return problem.view.spatial + window_of(problem.dtype, problem.view, layouts_of(problem)) - 1


def for_moments(problem: Problem) -> Problem:
    """A forward's problem as the pass for the moments sees it: batch_norm in channels_last without what differs by
    sample in the results, so with all samples as one, and other norms with groups as channels (:func:`_grouped`). Its
    output is the sum before the norm where that pass stores it."""
    if problem.norm.per_batch and not problem.numbered:
        problem = replace(problem, scale_dtype=None, shift_dtype=None).folded
    stored = problem.output_layout if stores_sum_first(problem) else None
    return _grouped(replace(problem, output_layout=stored))


def _grouped(problem: Problem) -> Problem:
    """A problem with each group as one channel, where a group's elements follow one another in memory and have the same
    numbers added: in channels_last an only group's do."""
    view, added = problem.view, problem.added
    before = None if added is None else added.pre_layout
    layouts = [layout for layout in (problem.layout, problem.output_layout, before) if layout is not None]
    alike = all(_groups_follow(view, layout) for layout in layouts) and not problem.numbered
    if not alike or problem.norm.per_batch or view.group_channels == 1:
        return problem
    length = view.group_channels * view.spatial

    def run(layout: Layout | None) -> Layout | None:
        return layout and Layout("channels_first", layout.sample, length, 1)

    input = run(problem.layout)
    assert input is not None
    return replace(
        problem,
        view=View(view.samples, view.groups, 1, length),
        layout=input,
        output_layout=run(problem.output_layout),
        added=added and replace(added, pre_layout=run(before)),
    )


def stores_sum_first(problem: Problem) -> bool:
    """Whether a forward's pass for the moments stores the sum before the norm, which the pass for the output then reads
    in place of the input and pre_add. Where only numbers of channels are added, both passes read the input alone, and
    the second one stores the sum."""
    added = problem.added
    return added is not None and added.keeps_sum and added.pre_layout is not None and problem.direction == "forward"


def stores_dz(problem: Problem) -> bool:
    """Whether a backward's pass for p and q stores dz, the gradient of post_add, which the pass for grad_input then
    reads in place of grad_output and post_add: seven transfers, not eight, and no second derivative. (32, 256, 56, 56)
    in bf16 with relu takes 95 us, and 112 without, in channels_last 102 and 115.

    grad_input is made of dz as it is stored, which must not be rounded: rounded to 16 bits, with silu's derivative, it
    left grad_input up to 1.8 times as far from fp64 as the tolerance permits.
    """
    added, activation = problem.added, problem.norm.activation
    if added is None or added.post_layout is None or activation is None or not problem.norm.training:
        return False
    return DTYPE_BYTES[problem.dtype] > 2 or activation.hardly_rounds


def _groups_follow(view: View, layout: Layout) -> bool:
    """Whether the elements of a group follow one another in memory."""
    if layout.order == "channels_first" or view.spatial == view.groups == 1:
        return layout.channel == view.spatial
    return view.groups == layout.channel == 1 and layout.spatial == view.channels


def filled(length: int, positions: int) -> float:
    """How much of a plane's tiles of so many positions is full."""
    return length / (-(-length // positions) * positions)
