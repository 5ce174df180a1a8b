"""Whole units in the registers of a program, triton.whole and triton.held: pure functions of the problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fusednorm.backends.triton.config.device import (
    MOST_WARPS,
    PROCESSORS,
    SMALL_HELD,
    program_elements,
    thread_elements,
)
from fusednorm.backends.triton.config.kinds import HeldConfig, WholeConfig
from fusednorm.backends.triton.config.tiles import of_points, tiled
from fusednorm.backends.triton.runs import FEW, WIDE_LOAD, WIDEST_LOAD, alignment, load_bytes, power_of_two, unit_bytes
from fusednorm.problem import DTYPE_BYTES, Layout, Problem

#: Elements of a tile of whole units in the registers of 16 warps: 32 a thread. Units of LARGE_HELD elements keep their
#: multiprocessor busy even where their tiles are not full. Units that are neighbours in memory are read row by row, and
#: in FEW_CONTIGUOUS elements rows may be of any length.
MOST_HELD, LARGE_HELD, FEW_CONTIGUOUS = 16384, 4096, 1 << 16
#: Memory moves so many bytes at least, of which a unit of one channel of channels_last has its own element, and the
#: bytes that one program may so read: batch_norm of (2, 6, 73, 73) in bf16 takes 5.9 us held, and 4.5 in tiles.
SECTOR_BYTES, MOST_SECTORS = 32, 1 << 16
#: Elements of a unit up to which two programs share a multiprocessor.
SHARING_HELD = 8192
#: Elements of points with scale and shift whose backward is as fast held: (1000, 256) in fp16 takes 10.5 us held, and
#: 6.8 in tiles.
FEW_POINTS = 1 << 17
#: Elements of a unit that one program finishes before a second launch would start.
SMALL_UNIT = 4096
#: Elements of the units in one place of all samples that one program of a backward takes, which then needs no second
#: launch. In channels_last its rows are as short as a unit is wide, which pays in problems of few elements.
ALL_SAMPLES, ALL_SAMPLES_LAST = 2048, 1 << 14
#: Samples from which on batch_norm's spread planes fill tiles.
SPREAD_PAYS = 32
#: The samples, elements and channels from which on a backward of one position walks over the samples.
WALKED_SAMPLES, WALKED_ELEMENTS, WALKED_CHANNELS = 512, 1 << 18, 32
#: Threads of a program in a small problem: 8 warps, beyond which the sums over warps cost more. Elements of a program
#: of short units.
MOST_SMALL, SHORT_UNITS = 256, 512


@dataclass(frozen=True, slots=True)
class HeldUnits:
    """A problem's units as ``rows`` of ``columns`` contiguous elements, see kernels/held.py: ``in_sample`` units in
    each of the samples, in batch_norm one sample. ``across`` is the stride of a layout from row to row; ``channels`` of
    each sample have partials of their own."""

    samples: int
    in_sample: int
    channels: int
    rows: int
    columns: int
    affine: int
    across: Literal["sample", "channel", "spatial"]
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
    def contiguous(self) -> bool:
        """Whether neighbouring units are neighbours in memory, element by element."""
        layouts = self.input, self.output, self.grad, self.before, self.behind
        return self.columns == 1 and all(layout is None or self.steps(layout)[1] == 1 for layout in layouts)

    def load_bytes(self, problem: Problem) -> int:
        """The widest load along the contiguous elements of units, 16 bytes at most."""
        if self.contiguous:
            return load_bytes(problem)
        return min(load_bytes(problem), alignment(problem.dtype, self.columns) * DTYPE_BYTES[problem.dtype])

    @property
    def positions(self) -> bool:
        """Whether the rows are positions of channels_last."""
        return self.across == "spatial" and self.rows > 1

    @property
    def spans(self) -> bool:
        """Whether units of several samples share a program: neighbours in memory are of one sample."""
        return self.columns > 1

    def steps(self, layout: Layout) -> tuple[int, int, int]:
        """The strides of samples, units and rows, 0 where there is no second one."""
        unit = layout.channel * (self.channels // self.in_sample) if self.in_sample > 1 else 0
        row = getattr(layout, self.across) if self.rows > 1 else 0
        return (0 if self.across == "sample" else layout.sample), unit, row


def held_units(problem: Problem) -> HeldUnits | None:
    """The units of a problem, or None where strides do not make them rows."""
    seen, per_batch = problem.folded, problem.norm.per_batch
    view, layouts = seen.view, seen.layouts
    layout, *others = layouts
    assert layout is not None
    last, D = seen.layout.order == "channels_last", view.group_channels
    if per_batch and last and view.samples > 1:
        if view.spatial > 1:
            return None
        last = False
    samples = 1 if per_batch else view.samples
    across: Literal["sample", "channel", "spatial"] = "spatial"
    if last:
        rows, columns = view.spatial, D
    else:
        across = "sample" if per_batch else "channel"
        rows, columns = view.samples if per_batch else D, view.spatial
    affine = 3 if across == "sample" and problem.by_sample else 0 if D == 1 else 2 if last else 1
    if affine == 0 and all(layout is None or getattr(layout, across) == columns for layout in layouts):
        rows, columns = 1, rows * columns  # the samples of an only channel follow one another
    return HeldUnits(samples, view.groups, view.channels, rows, columns, affine, across, layout, *others)


def whole_forward_for(problem: Problem) -> WholeConfig:
    """At most 16 elements a thread; 32 of long units, and 64 where these fill no tile: 8192 x 5120 in bf16 takes 44 us
    on 4 warps, 51 on 8 and 60 on 16, and 8192 x 8192 takes 68 on 8. Units with a mean have 32 too where they fill no
    tile: layer_norm of 50000 x 1200 takes 63 us on 2 warps and 77 on 4, 182913 x 736 takes 132 on one and 146 on 2."""
    block, units = power_of_two(problem.reduced), problem.num_statistics
    narrow, size = unit_bytes(problem) < WIDE_LOAD, DTYPE_BYTES[problem.dtype]
    if block * units <= 2 * SMALL_HELD and block <= 8192:
        return _small_whole(block, units, narrow, size)
    if narrow and block <= 128:
        if problem.modulated and problem.view.spatial == 1:  # (65536, 11) in bf16 takes 5.2 us so, 7.2 on one warp
            return WholeConfig(SHORT_UNITS // block, 4)
        return _narrow_whole(block, size, problem.view.spatial == problem.view.groups == 1)
    if block <= 512:
        return _short_whole(problem, block, narrow)
    if 4096 <= block <= 8192 or (block == 16384 and narrow and size == 2):
        full = _fills(problem.reduced, block)
        thread = 64 if block > 4096 and units > 4 * PROCESSORS and size == 2 and not full else 32
    elif block > 8192:
        thread = 16
    else:
        sparse = problem.norm.has_mean and size == 2 and not _fills(problem.reduced, block)
        thread = thread_elements(block * units, 32 if sparse else 16, 32 if narrow else 16)
    return WholeConfig(1, max(1, min(16, block // (32 * thread))))


def whole_sum_for(problem: Problem) -> WholeConfig:
    """:func:`whole_forward_for` of a problem with sums around the norm, with 32 elements a thread at most, since two or
    three tensors are on their way to it. Not measured."""
    config, block = whole_forward_for(problem), power_of_two(problem.reduced)
    return WholeConfig(config.units, min(16, max(config.warps, block * config.units // (32 * 32))))


def _fills(length: int, block: int) -> bool:
    return 8 * length > 7 * block


def _short_whole(problem: Problem, block: int, narrow: bool) -> WholeConfig:
    """Many short units: one warp, with 32 elements a thread of 16 bits and 16 of 32. Where units fill their lanes two
    warps have wider runs of memory. In fp32 22790 x 158 takes 10.3 us on one warp and 15.1 on four, in bf16 32768 x 256
    takes 10.6 on two, 10.9 on one and 11.3 on four, 17826 x 512 12.1 on two with two rows, 13.4 on four with eight, but
    18972 x 64 takes 2.6 on four with 16 rows, and 2.8 on two with 32.
    With a mean, loads of less than 16 bytes are for one: layer_norm of 1105136 x 228 in fp16 takes 249 us on one, 280
    on two."""
    short, total = DTYPE_BYTES[problem.dtype] == 2, block * problem.num_statistics
    if total <= 4 * SMALL_HELD:
        return WholeConfig(SHORT_UNITS // block, 1)
    wide = not narrow and (not problem.norm.has_mean or unit_bytes(problem) >= WIDEST_LOAD)
    if _fills(problem.reduced, block) and wide and (block > 128 or problem.norm.activation is None):
        if short and total <= 8 * SMALL_HELD and block <= 128:
            return WholeConfig(1024 // block, 4)
        elements = 2048 if short and block < 512 else 1024
        return WholeConfig(elements // block, max(2, elements // 1024))
    if block <= 128 and short:
        return WholeConfig(1024 // block, 2)
    return WholeConfig((1024 if short or (block == 512 and not narrow) else SHORT_UNITS) // block, 1)


def _narrow_whole(block: int, size: int, shared: bool) -> WholeConfig:
    """Many short units of narrow loads, whose lanes lie side by side: one warp, since two would share each unit.
    (200, 900, 3, 3) in bf16 takes 7.0 us on one warp with 32 units, and 9.7 on two with 16. In fp32 (95, 504, 5, 5)
    takes 7.0 us on two warps with 8 units, and 7.5 with 16. Longer ones of 16 bits, whose parameters are ``shared``,
    are twice as many: 30000 x 77 in bf16 takes 5.7 us with 8, and 6.7 with 4."""
    if size > 2 and block < 64:
        return WholeConfig(SHORT_UNITS // 2 // block, 2)
    return WholeConfig((2 if size == 2 and block == 128 and shared else 1) * SHORT_UNITS // block, 1)


def _small_whole(block: int, units: int, narrow: bool, size: int) -> WholeConfig:
    """A warp to a unit, or several short units, as long as it fits: sums over warps wait for barriers. 200 x 200 in
    fp32 takes 1.66 us, and 1.81 with two warps. The many narrow loads of few units are spread over more, but those of
    short units are a warp's, which waits for no other: 3904 x 75 in fp16 takes 2.4 us with four units on one warp, and
    3.1 on four, 581 x 73 in bf16 1.7 with two on one, and 1.9 with four on four. The shortest in fp32 are two elements
    a thread: (6, 1800, 3, 3) takes 2.1 us with 16 units on four warps, and 2.8 with 32."""
    if block == 128 and narrow:
        return WholeConfig(min(SHORT_UNITS // block, power_of_two(max(1, units // (2 * PROCESSORS)))), 1)
    if block <= 128:
        together = min(SHORT_UNITS // block, power_of_two(units // PROCESSORS if narrow else units))
        together = max(together, 32 // block)  # values that lanes have in common move through shared memory
        warps = max(1, block * together // (32 * 4))
        return WholeConfig(together // 2 if narrow and size > 2 and block <= 16 and warps >= 4 else together, warps)
    if block <= 512 and not ((narrow or block == 512) and units < PROCESSORS // 4):
        return WholeConfig(1, 1)
    return WholeConfig(1, 4 if block <= 1024 else 8)


def fewest(unit: int, narrow: bool) -> int:
    """The elements of a thread in a small problem, whose time is that of one program from its first instruction to its
    last: fewer shorten the code, whose instructions come from memory too, and spread units over more warps."""
    return 2 if unit < 128 or (narrow and unit == 512) else 4


def early(programs: int, warps: int, elements: int) -> bool:
    """Whether parameters are loaded before the statistics of programs of so many elements, and wait for them in
    registers: where no program waits for another, the time of one access is saved."""
    return programs * warps <= PROCESSORS * MOST_WARPS and elements <= 32 * 32 * warps


def once(problem: Problem, config: WholeConfig, block: int) -> bool:
    """Whether the units of a program, which have the same parameters, share one load of them. Where a thread has few
    elements of each unit, each loads its own: no value then waits for another thread."""
    same = problem.view.groups == 1 and not problem.modulated
    return same and config.units > 1 and block * config.units > 32 * 8 * config.warps


def held_for(problem: Problem, seen: HeldUnits) -> HeldConfig:
    """Units to a program: one long one, short ones until they make a program's work. Neighbours in memory are together
    for 32 or 64 bytes of each row: (25, 1597, 45) in bf16 takes 6.4 us in rows of 32 bytes, and 5.0 in rows of 64."""
    size, total = DTYPE_BYTES[problem.dtype], seen.units * seen.elements
    narrow, small = seen.load_bytes(problem) < WIDE_LOAD, total <= SMALL_HELD
    if walks(problem, seen):
        modulated = problem.scale_dtype is not None or problem.shift_dtype is not None
        units = max(1, min(power_of_two(seen.in_sample), 1024 // seen.elements))
        return walk_of(seen, units, 1024, 8 if modulated else 16, 8)
    rows = seen.affine == 2 and seen.rows == 1  # a thread has one place of several samples
    most = ALL_SAMPLES if small and not rows else ALL_SAMPLES // 2 if total <= 4 * SMALL_HELD else 0
    if seen.positions and total > ALL_SAMPLES_LAST:
        most = 0
    if narrow and problem.norm.smooth:
        # (20, 11, 61) in fp16 with silu takes 3.1 us so, and 2.7 with partials of each sample, with scale and shift 6.0
        # and 3.2.
        most = min(most, ALL_SAMPLES // 2)
    if problem.backward and seen.samples > 1 and power_of_two(seen.samples) * seen.elements <= most:
        return _all_samples(seen, fewest(seen.elements, narrow), rows)
    if problem.backward and seen.positions and (not seen.contiguous or (seen.samples > 1 and total <= 4 * SMALL_HELD)):
        return _positions_backward(problem, seen)
    if narrow and not small and problem.backward and 32 <= seen.elements <= 512 and not seen.contiguous:
        return _short_narrow(problem, seen.elements, total > 4 * SMALL_HELD)
    fitting = power_of_two(seen.units if seen.spans else seen.in_sample)
    if small and seen.affine == 0 and seen.across != "sample" and seen.elements <= 512 and not seen.contiguous:
        if seen.samples == 1:  # and no second launch
            return _alone(problem, seen, narrow, fitting)
        units = max(1, min(256 // seen.elements, fitting))
        return HeldConfig(units, max(1, units * seen.elements // (32 * (16 if problem.backward else 2))))
    if problem.backward and seen.affine == 3 and seen.contiguous and seen.elements >= 512:
        # Four sums: in bf16 (900, 1024) takes 13.7 us with 8 units to a program and 16 elements a thread, 35 with 16.
        units = max(1, min(SHARING_HELD // seen.elements, 32 // size, fitting))
        return HeldConfig(units, max(1, units * seen.elements // (32 * 16)))
    least = _row_of_units(seen, size, total, _padded(problem, seen))
    alone = seen.across == "sample" and not seen.contiguous and (seen.affine == 3 or seen.elements >= 256)
    if seen.elements == 512 and seen.units > 4 * PROCESSORS and not narrow and seen.affine != 3:
        alone = False  # (8, 700, 6, 6) in bf16 takes 2.5 us backward with two units to a program, and 2.8 with one
    units = max(least, 1 if alone else program_elements(total, 1024) // seen.elements)
    units = max(1, min(units, fitting, MOST_HELD // seen.elements))
    thread = _held_thread(problem, seen, units * seen.elements, not seen.contiguous and least > 1)
    return HeldConfig(units, max(1, min(16, units * seen.elements // (32 * thread))))


def walks(problem: Problem, seen: HeldUnits) -> bool:
    """Whether a backward walks over the samples: many samples of one position, whose p and q would be more bytes than
    their elements. (65536, 768) in 32 groups in bf16 takes 111 us so, and 377 with p and q in memory, (8192, 1024) in
    fp32 30 and 76, but (65536, 11) in one group with gelu 28 and 14. Of several positions a walk is no faster: (4096,
    256, 3, 3) takes 58 us, and 53."""
    if not problem.backward or problem.added is not None or seen.across == "sample" or seen.affine == 3:
        return False
    many = seen.samples >= WALKED_SAMPLES and problem.view.numel > WALKED_ELEMENTS
    many = many and problem.view.channels >= WALKED_CHANNELS
    return problem.view.spatial == 1 and many and seen.elements <= SHARING_HELD


def walk_of(seen: HeldUnits, units: int, lanes: int, thread: int, warps: int) -> HeldConfig:
    """The walk with so many neighbouring units and ``lanes`` of a tile, elements of a thread, and warps to a
    multiprocessor."""
    samples = max(1, lanes // (units * seen.elements))
    program = max(1, min(16, units * samples * seen.elements // (32 * thread)))
    blocks = -(-seen.in_sample // units)
    chunks = max(1, PROCESSORS * warps // (program * blocks))
    return HeldConfig(units, program, samples=samples, steps=max(2, -(-seen.samples // (samples * chunks))))


def _all_samples(seen: HeldUnits, least: int, rows: bool) -> HeldConfig:
    """The units in one place of all samples, with so many elements a thread at least."""
    samples = power_of_two(seen.samples)
    thread = max(least, thread_elements(seen.units * seen.elements, 8))
    warps = max(1, min(8, samples * seen.elements // (32 * thread)))
    if rows:
        warps = max(2, samples * seen.elements // (32 * 16))
    return HeldConfig(samples, warps, all_samples=True)


def _alone(problem: Problem, seen: HeldUnits, narrow: bool, fitting: int) -> HeldConfig:
    """Few units of one sample: a warp to a unit, or to several where they are many; or short ones with 2 elements a
    thread, and 4 with scale and shift. In bf16 (1, 1607, 11) takes 1.6 us backward, and 2.1 with 8 a thread; in fp16
    (1, 400, 11, 11) 1.7, and 2.0 with two units and two warps, (1, 2048, 4, 4) with scale and shift 1.9, and 2.2 with
    2 a thread, in bf16 (1, 1024, 8, 8) 1.9, and 2.3 with a warp to a unit."""
    if seen.elements >= 64:
        return HeldConfig(max(1, min(256 // seen.elements, seen.in_sample // 256)), 1)
    units = max(1, min(256 // seen.elements, fitting))
    thread = 4 if problem.modulated and problem.backward else fewest(seen.elements, narrow)
    return HeldConfig(units, max(1, units * seen.elements // (32 * thread)))


def _positions_backward(problem: Problem, seen: HeldUnits) -> HeldConfig:
    """Groups of channels_last make 1024 elements or more, with 32 to a thread: it then sums the positions of its
    channels alone. (26, 2560, 1, 3) in 32 groups in fp16 takes 4.4 us with two groups on one warp, and 13.7 on four.
    Units of one channel are together for 64 bytes: (20, 756, 5, 5) in fp32 takes 4.8 us in instance_norm, and 11.6
    where a program has a channel of all samples."""
    size = DTYPE_BYTES[problem.dtype]
    if seen.contiguous:
        units, thread = min(64 // size, max(1, SMALL_UNIT // seen.elements)), 32
    else:
        units, thread = max(1024 // seen.elements, _row_of_groups(seen, size, False)), 16 if _uneven(seen) else 32
    units = max(1, min(units, power_of_two(seen.in_sample)))
    return HeldConfig(units, max(1, min(16, units * seen.elements // (32 * thread))))


def _held_thread(problem: Problem, seen: HeldUnits, program: int, rows: bool) -> int:
    """The elements of a thread, where a program has ``program``: 2 to 8 of a small problem, a warp to a small unit;
    where there are many elements 8 or 16, and more of a forward of 16 bits, where units are neighbours in memory, and
    where programs have ``rows`` of several short units."""
    size, total = DTYPE_BYTES[problem.dtype], seen.units * seen.elements
    narrow = seen.load_bytes(problem) < WIDE_LOAD
    if _padded(problem, seen):
        return 16
    if rows:
        return 16 if program <= 2048 or (problem.backward and program <= 4096) else 32
    if total <= SMALL_HELD:
        return max(_small_thread(problem, seen, narrow), min(32, program // _most_small(problem, seen)))
    if seen.contiguous:
        return thread_elements(total, 64 if size == 2 and not problem.backward else 32)
    if seen.affine == 3 or (seen.across == "sample" and seen.elements >= 8192):
        return 32 if total > 4 * SMALL_HELD else max(8, min(32, seen.elements // MOST_SMALL))
    if problem.backward and narrow and seen.affine == 0 and 1024 <= seen.elements <= 2048 and total > 4 * SMALL_HELD:
        # Loads of single elements, many to a thread: (34, 1280, 679) in bf16 takes 63 us with one warp, 76 with four.
        return 32 if size == 2 and problem.norm.activation is None else 16
    few = problem.backward and narrow and seen.elements < 2048
    return thread_elements(total, 8 if few else 16 if problem.backward or size > 2 or seen.flat else 32)


def _small_thread(problem: Problem, seen: HeldUnits, narrow: bool) -> int:
    """The elements of a thread in a small problem."""
    if seen.contiguous:
        return 2 if seen.elements <= 32 else 16 if problem.backward and seen.affine == 3 else 8
    if seen.across == "sample":
        if seen.elements <= 32 and seen.rows < 4:  # (2, 1177, 11) in fp32 takes 1.8 us with 2, and 2.0 with 4
            return 2
        return 8 if seen.elements == 256 and not narrow else 4
    return fewest(seen.elements, narrow)


def _most_small(problem: Problem, seen: HeldUnits) -> int:
    """The threads of a program in a small problem. A backward with scale and shift of each sample has four sums."""
    return 2 * MOST_SMALL if problem.backward and seen.affine == 3 else MOST_SMALL


def _padded(problem: Problem, seen: HeldUnits) -> bool:
    """Whether lanes of a forward hold no channel beside the few of a group. Then a program has few groups, and a thread
    few elements: (64, 105, 12, 12) in 21 groups in fp16 and channels_last takes 7.4 us with one, and 10.8 with two."""
    return _uneven(seen) and seen.positions and not problem.backward


def _uneven(seen: HeldUnits) -> bool:
    """Whether groups have few channels, and no power of two."""
    return seen.columns < power_of_two(seen.columns) <= 8


def _row_of_units(seen: HeldUnits, size: int, total: int, padded: bool) -> int:
    """The fewest units of a program whose rows lie side by side in memory. Short rows cost memory time, but a small
    problem has more programs with them."""
    if not seen.contiguous:
        return _row_of_groups(seen, size, padded)
    if total <= FEW_CONTIGUOUS:
        return max(1, min(4, 1024 // seen.elements))
    least = (64 if total > 4 * SMALL_HELD else 32) // size
    if seen.units < least * PROCESSORS // 4:  # short rows on many multiprocessors, not long on few
        return max(1, min(4, SMALL_UNIT // seen.elements))
    return least


def _row_of_groups(seen: HeldUnits, size: int, padded: bool) -> int:
    """The groups of a few channels whose positions make 32 bytes: (24, 64, 21, 21) in 32 groups in fp16 and
    channels_last takes 8.3 us with a group to a program, and 3.5 with eight."""
    if not seen.positions or seen.units * seen.elements <= FEW_CONTIGUOUS // 2:
        return 1
    least = max(1, 32 // (size * power_of_two(seen.columns)))
    if padded:
        return min(least, max(1, 2048 // seen.elements))
    return min(least, power_of_two(max(1, 2 * seen.units // PROCESSORS, 2048 // seen.elements)))


def _short_narrow(problem: Problem, unit: int, many: bool) -> HeldConfig:
    """Short units of narrow loads in a backward: one warp with 16 elements a thread, or 32 of longer units. In bf16
    (22, 2048, 5, 5, 5) takes 16 us with four units on one warp, and 29 with eight on four. The shortest have two warps:
    (120, 700, 27) in fp16 takes 14.9 us with them, and 17.9 with one. So have the longest in fp32: (45, 256, 315) takes
    14.4 us with them, and 17.5 with one."""
    if not many or unit <= 32:
        return HeldConfig(512 // unit, 2)
    if unit <= 256:
        return HeldConfig(512 // unit, 1)
    return HeldConfig(1024 // unit, DTYPE_BYTES[problem.dtype] // 2)


def holding_pays(problem: Problem, seen: HeldUnits) -> bool:
    """Whether units in registers are faster than tiles: one launch, and one read, but whole units to a program.

    Where a tile is not full its lanes are wasted: (16, 640, 13, 13) in 32 groups in bf16 takes 14 us held, 41 % full,
    and 6 whole. Rows of a few neighbouring units are short for memory: (16, 256, 56, 56) in fp32 and channels_last
    takes 87 us held, 4 units to a row, and 43 in tiles. Where lanes are few one launch is faster, full or not: in fp16
    and channels_last (2, 640, 17, 17) in 40 groups takes 3.6 us held, 56 % full, and 6.8 in tiles, (17, 640, 13, 3) in
    4 groups 4.6, 38 % full, and 7.2; (16, 480, 24, 24) in 32 groups 19.4, 53 % full, and 13.3. A large unit
    of narrow loads is not: (40, 591, 15, 3) in 3 groups takes 18 us held, and 8 in tiles. Loads of few channels
    are short where tiles have wide ones: (50, 48, 28, 28) in 16 groups takes 13.5 us held, and 8.8 in tiles.
    """
    size, small = DTYPE_BYTES[problem.dtype], problem.view.numel <= FEW
    full = seen.rows * seen.columns / seen.elements
    if problem.backward and of_points(problem) is not None and problem.view.numel > FEW_POINTS:
        return False
    if walks(problem, seen):
        return True
    if problem.backward and _few_large(problem, seen):
        return False
    if seen.contiguous:
        together = MOST_HELD // seen.elements
        if together >= seen.in_sample:
            return True
        if problem.view.numel <= FEW_CONTIGUOUS:
            return seen.rows * min(SECTOR_BYTES, size * seen.in_sample) <= MOST_SECTORS
        if small:
            narrow = seen.load_bytes(problem) < WIDE_LOAD
            return size * together >= 16 and seen.elements <= (1024 if narrow else 2048)
        return size * together >= 64 and full >= 0.75
    if seen.across == "sample":
        return _holding_samples_pays(problem, seen, full)
    lanes, shared = seen.units * seen.elements, seen.elements <= SHARING_HELD
    wide = seen.columns * size >= WIDEST_LOAD or load_bytes(problem) < WIDEST_LOAD or seen.across != "spatial"
    short = small and seen.elements <= LARGE_HELD and (wide or lanes <= FEW // 2)
    if not problem.backward:
        few = lanes <= FEW and (shared or load_bytes(problem) >= WIDE_LOAD)
        return short or full >= 0.6 or (wide and (few or (shared and full >= 0.5 and lanes <= 4 * FEW)))
    if problem.view.group_channels == 1 and seen.input.order == "channels_first":
        return short or full >= (0.55 if seen.elements == 1024 else 0.6) or size > 2
    short = short or (shared and wide and lanes <= FEW // 2)
    return short or (full >= 0.75 and (size > 2 or load_bytes(problem) >= WIDE_LOAD))


def _few_large(problem: Problem, seen: HeldUnits) -> bool:
    """Whether a few units keep few multiprocessors busy with narrow loads and a smooth activation: (1, 640, 5, 5, 5) in
    32 groups with gelu in bf16 takes 6.5 us held, and 3.9 in tiles."""
    few = seen.units < PROCESSORS // 2 and seen.elements >= LARGE_HELD
    return problem.norm.smooth and few and problem.view.group_channels > 1 and seen.load_bytes(problem) < WIDE_LOAD


def _holding_samples_pays(problem: Problem, seen: HeldUnits, full: float) -> bool:
    """:func:`holding_pays` of a channel of all samples: in bf16 (128, 2048, 7, 7) takes 53 us held, and 22 in tiles of
    spread planes. Few large channels leave multiprocessors idle: (13, 21, 29, 29) takes 5.4 us held backward, and 4.2
    in tiles. Each sample's scale and shift take registers: (38, 64, 5, 5, 7) took 58 us held backward, and 8 in tiles,
    and the forward of few such channels, (63, 8, 9, 9), takes 4.4 us held and 3.6 in tiles.
    Planes of some size, of channels that are not too many, are faster held: (16, 512, 19, 19) in bf16 takes 8.6 us, and
    11.3 in tiles, backward 10.1 and 13.8; but with relu the backward of (32, 512, 13, 13) takes 17.9 and 13.0. Odd
    planes that lie along one axis are faster held, unless many samples fill tiles of spread planes: (18, 700, 21, 21)
    takes 23.7 us, and 38.3 in tiles, (64, 200, 15, 15) 11.6 and 10.9, the backward of (128, 100, 11, 11) 8.5 and 11.4.
    """
    if problem.view.numel > FEW:
        if full >= 0.6 and seen.elements <= SHARING_HELD and seen.affine != 3:
            if not problem.backward and problem.view.numel <= 2 * FEW:
                return True
            if problem.norm.activation is None and seen.columns > 128 and problem.view.numel <= 3 * FEW // 2:
                return True
        long = seen.affine == 3 and seen.elements > 8192
        if seen.flat and full >= 0.75 and seen.rows < SPREAD_PAYS and not long:
            return seen.elements <= SHARING_HELD or not problem.backward
        return full >= 0.55 and not long and tiled(problem) is problem.folded
    if not problem.backward:
        few_modulated = seen.elements <= SHARING_HELD and seen.units >= 32
        return seen.elements <= LARGE_HELD or (full >= 0.4 and (seen.affine != 3 or few_modulated))
    if seen.affine == 3:
        return seen.elements <= (ALL_SAMPLES if seen.units >= 32 else ALL_SAMPLES // 2)
    if seen.columns % 2 == 1 and full >= 0.75 and seen.units >= 64:
        return True
    return seen.elements <= LARGE_HELD or (full >= 0.5 and seen.elements <= 8192)


def fuller_whole(problem: Problem, seen: HeldUnits) -> bool:
    """Whether a small unit fills a tile of one axis better than one of two: (43, 768, 3, 3) in 32 groups takes 2.5 us
    whole, 84 % full, and 3.5 held, 42 % full."""
    held, whole = problem.reduced / seen.elements, problem.reduced / power_of_two(problem.reduced)
    return problem.reduced <= SMALL_UNIT and held < 0.7 * whole


def holding_short_pays(problem: Problem) -> bool:
    """Whether the forward of few short units of one channel and narrow loads is faster held, with 2 elements a thread:
    its statistics lie where its elements do. (16, 100, 5, 5) in fp32 takes 1.7 us held, and 2.1 whole, (10, 325, 3, 3)
    with scale and shift 1.8 and 2.3, but (48, 192, 3, 3, 3) in bf16 2.4 both ways, and (128, 320, 9) less whole."""
    view, block = problem.view, power_of_two(problem.reduced)
    short = view.group_channels == 1 and view.spatial > 1 and block <= 32 and unit_bytes(problem) < WIDE_LOAD
    return short and not problem.backward and block * problem.num_statistics <= SMALL_HELD // 4


def whole_pays(problem: Problem) -> bool:
    """Whether units in one piece of memory are faster in the registers of one program than read twice.

    For a large unit of several channels an affine per element costs more than a second read: (32, 256, 56, 56) in
    bf16 took 86 us whole and 53 in tiles. A unit of one channel has one affine, and pays where it fills its block, in
    32 bits everywhere: (12, 64, 142, 142) takes 42 us whole and 50 in tiles. Of more than 16384 elements units must be
    many, and in 16 bits no activation needs registers too: (32, 24, 170, 170) takes 34 us whole and 39 in tiles, (36,
    24, 160, 160) with silu 46 and 37.
    """
    view, size, block = problem.view, DTYPE_BYTES[problem.dtype], power_of_two(problem.reduced)
    if problem.reduced <= SMALL_UNIT or view.spatial == 1:
        return True
    if view.group_channels > 1:
        return False
    if block <= 8192:
        return True
    fills, wide = fills_block(problem), load_bytes(problem) >= WIDE_LOAD
    if block == 16384:
        return size > 2 or fills
    pays = (wide or fills) if size > 2 else (wide and fills and not problem.norm.smooth)
    return pays and 2 * problem.num_statistics >= PROCESSORS


def fills_block(problem: Problem) -> bool:
    """Whether a long unit of one channel has elements for most lanes of a program that holds it: (111, 24, 106, 106) in
    bf16 takes 40 us whole and 45 in steps, (8, 300, 100, 100) 37 and 40, (53, 24, 132, 132) 40 and 34. Lanes that load
    single elements take longer: (138, 24, 95, 95) takes 83 us whole and 58 in tiles."""
    lanes = 16 * problem.reduced
    return lanes >= (9 if load_bytes(problem) >= WIDE_LOAD else 12) * power_of_two(problem.reduced)
