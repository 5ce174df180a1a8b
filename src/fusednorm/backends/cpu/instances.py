"""The CPU's instances, and which of them a problem gets: a pure function of the problem."""

from __future__ import annotations

import platform
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

from fusednorm.backends.cpu.geometry import (
    COSTLY_FLOPS,
    ROWS_FLUSHED,
    SCRATCH,
    VECTOR,
    by_vectors,
    fit_vectors,
    in_blocks,
    in_vectors,
    parameter_rows,
    repeat,
    summed_rows,
)
from fusednorm.backends.cpu.plans.base import KEPT_ELEMENTS
from fusednorm.backends.cpu.plans.columns import (
    ColumnsBackward,
    ColumnsForward,
    ColumnsSumBackward,
    ColumnsSumForward,
)
from fusednorm.backends.cpu.plans.planes import (
    PlanesBackward,
    PlanesForward,
    PlanesSplitBackward,
    PlanesSplitForward,
    PlanesSplitSumBackward,
    PlanesSplitSumForward,
    PlanesSumBackward,
    PlanesSumForward,
)
from fusednorm.backends.cpu.plans.quantized import RowsQuantizedForward
from fusednorm.backends.cpu.plans.rows import (
    FewRowsBackward,
    PointRowsBackward,
    PointRowsForward,
    RowsBackward,
    RowsForward,
    RowsSumBackward,
    RowsSumForward,
    SampleRowsBackward,
    SampleRowsForward,
    ShortRowsBackward,
    ShortRowsForward,
)
from fusednorm.backends.cpu.plans.slabs import (
    PointsBackward,
    PointsForward,
    SlabsBackward,
    SlabsForward,
    SlabsSumBackward,
    SlabsSumForward,
    as_positions,
    of_points,
)
from fusednorm.instance import Instance, Plan
from fusednorm.problem import DTYPE_BYTES, Problem

T = TypeVar("T")

#: Units below which one kernel for each would leave threads idle; those, forward and backward, and the bytes of each,
#: where a unit is read a second time from a core's cache, and pieces from memory. On two threads, us whole and in
#: pieces: batch_norm of (16, 12, 64, 64) in bfloat16 148 and 187, backward 233 and 265, group_norm of (1, 256, 96, 96)
#: in 8 groups 611 and 760, of (5, 3, 209, 209) in one with silu 282 and 259, backward 460 and 596, but of (1, 512,
#: 256, 256) in 8 groups 26500 and 21800.
MINIMUM_UNITS, CACHED_UNITS, CACHED_UNITS_BACKWARD, CACHED_UNIT_BYTES = 16, 8, 5, 1 << 21
SMALL_BYTES = 1 << 18  # inputs that one thread takes alone
#: Few units of so many elements, half as many in a backward, whose planes have SPLIT_PLANE at most, are not split: each
#: piece costs 40 ns. Four units of 1024 planes of 33 took 178 us forward in pieces on two threads, and take 67.
WHOLE_UNIT, SPLIT_PLANE = 1 << 18, 1024
#: batch_norm's planes of SHORT_PLANE elements at most, in 16 bits LONGEST_NARROW, may be taken in slabs, where a loop
#: over each alone would start for little work. A row of several planes is to have WIDE_ROW elements, and has SHORT_ROW
#: at least, or SHORTEST_ROW where it is the whole sample.
SHORT_PLANE, LONGEST_NARROW, WIDE_ROW, SHORT_ROW, SHORTEST_ROW = 128, 320, 512, 128, 16
#: Elements in 32 bits from which on a forward of planes longer than half of SHORT_PLANE is worth slabs.
FEWEST_IN_SLABS = 3 << 17
#: Elements of a segment of rows that are worth a thread's while, and tasks of a backward over columns at most.
FEWEST_ELEMENTS, MOST_TASKS = 16384, 64
#: Elements of a slab at least and at most.
LEAST_SLAB, MOST_SLAB = 1 << 17, 1 << 18
#: Blocks of batch_norm's channels of which there are enough for equal shares, and the elements of a block that one
#: thread takes from cache sooner than several take it in steps.
ENOUGH_BLOCKS, BLOCK_ELEMENTS = 8, 65536
#: Rows that are few, at most, and the least of their elements, with which a backward by blocks of channels, which reads
#: all twice, is faster than by segments of rows, each of which leaves two rows of float64. On two threads in float32
#: 8 x 2500 takes 28 us in blocks and 15 in segments, 16 x 4096 50 and 61, 48 x 4096 with relu 166 and 143, 96 x 8192
#: 243 and 311, 64 x 32768 905 and 1388, 128 x 32768 2666 and 2300, in float16 24 x 4096 40 and 42, 24 x 8192 54 and 66,
#: with relu 16 x 8192 97 and 96, 24 x 16384 155 and 221, 96 x 16384 420 and 597, 96 x 32768 1050 and 790. Blocks make
#: an exponential twice: 4 x 8192 with silu takes 60 us in blocks and 64 in segments, 8 x 8192 83 and 78.
FEW_ROWS, LONG_ROW = 24, 4096
FEW_LONGER_ROWS, LONGER_ROW, FEW_ELEMENTS = 128, 8192, 1 << 21
FEW_SHORT_ROWS, LONGEST_ROW = 96, 12288
FEW_COSTLY_ROWS, FEW_GROUPED_ROWS = 6, 8
#: Elements of a row up to which a segment has four times as many elements.
SEGMENTED_ROW = 2048
BLOCKS_SUMMED = 8  # blocks of short groups at least whose sums for the parameters' gradients make a segment
#: Rows that share a gate, at least, where its gradient is summed beside those of the parameters.
LEAST_GATED = 4
FEWEST_SEGMENTS = 16  # of rows, so that so many threads have one
ROW_PIECE = 4096  # elements of a row that a backward of few rows sums at a time
NO_BLOCKS = "the statistics run over the samples, and planes do not make rows of several channels"
CACHED_SAMPLE_BYTES = 4 << 20  # a channels_last sample that stays in cache from its statistics to its output
#: Samples of channels_last from which on a thread takes a whole one of up to so many bytes, though more threads than
#: samples would be idle: pieces cost two waits of all threads. On two threads, us whole and in pieces, with silu: in 8
#: groups in float32 (4, 256, 12, 12) 35 and 45, backward 65 and 73, (6, 256, 11, 11) 37 and 50, 67 and 86, in 32 groups
#: (4, 1024, 5, 6) 44 and 58, 74 and 88, in bfloat16 47 and 67, 73 and 87.
FEWEST_WHOLE, WHOLE_SAMPLE_BYTES = 4, 128 << 10
#: A backward takes planes shorter than a vector as rows, those of a vector too but for an activation without an
#: exponential in 32 and 64 bits, and without an activation planes of so many elements at most; of so many samples at
#: least. In one thread group_norm(32) of (64, 384, 3, 3) in float32 takes 0.13 ms so, and 0.35 in tiles, of (128, 512,
#: 4, 4) in bfloat16 0.70 and 1.01 plane by plane, but instance_norm of (64, 512, 8, 8) in float32 2.2 and 1.7,
#: group_norm(16) of (64, 128, 4, 4) with relu 0.18 and 0.15.
LONGEST_FLAT, FEWEST_FLAT = 32, 4
#: Elements of a sample of one group in channels_last up to which it is a row, where there are so many samples. In one
#: thread (3640, 2, 3, 3) in float32 with silu takes 92 us forward and 184 backward so, in slabs 407 and 1219, (44, 30,
#: 7, 7) 16 and 71, and 28 and 89, but (32, 8, 16, 16) 22 and 95, and 19 and 76.
LONGEST_SAMPLE, FEWEST_SAMPLES = 1536, 16
#: Samples from which on an evaluation takes planes shorter than a vector as rows, and elements in all of longer ones.
FEWEST_SHORT, FEWEST_EVALUATED = 8, 1 << 17


@dataclass(frozen=True, slots=True)
class Pieces:
    """Rows of channels_first are cut into pieces of so many elements."""

    elements: int = 16384

    def positions(self, problem: Problem) -> int:
        return min(self.elements, problem.view.spatial)


@dataclass(frozen=True, slots=True)
class Slabs:
    """channels_last is cut into equal slabs of at most about so many elements, in whole rows, 64 of them at least."""

    elements: int

    def rows(self, problem: Problem) -> int:
        view = problem.view
        rows = max(64, self.elements // max(1, view.channels) // 64 * 64)
        equal = -(-view.spatial // max(1, -(-view.spatial // rows)))
        together = max(4, repeat(problem))  # both are powers of two; four rows are summed together
        return min(-(-equal // together) * together, view.spatial)


def slabs_for(problem: Problem) -> Slabs:
    """A sixteenth of the tensor within bounds: each slab leaves two numbers of float64 for each of its channels, which
    cost as much as some of its rows. On two threads batch_norm of (3000, 960) in fp16 takes 299 us forward and 698
    backward in 24 slabs, 337 and 761 in 47, (2000, 512) in fp32 112 and 229 in 8, and 140 and 287 in 32."""
    return Slabs(min(MOST_SLAB, max(LEAST_SLAB, problem.view.numel // 16)))


@dataclass(frozen=True, slots=True)
class Segments:
    """The gradients of the parameters are summed over so many segments of rows at most, of so many rows at least; of
    fewer long rows where there would be less than FEWEST_SEGMENTS. Each segment leaves two rows of float64: on two
    threads layer_norm of (500, 4096) in bf16 takes 0.98 ms in 64 segments, and 0.58 in 16, in fp32 1.02 and 0.77."""

    count: int = 64
    rows: int = 32

    def size(self, problem: Problem) -> int:
        """The rows of a segment; segments have equally many."""
        rows, summed = summed_rows(problem)
        # Segments of few long rows are short, so that each thread has some.
        elements = FEWEST_ELEMENTS * (4 if problem.view.channels <= SEGMENTED_ROW else 1)
        least = max(4, elements // max(1, problem.view.channels), rows // FEWEST_SEGMENTS)
        least = min(self.rows, least)
        segments = max(1, summed // max(least, -(-rows // self.count)))
        return max(1, -(-summed // segments))


@dataclass(frozen=True, slots=True)
class Columns:
    """The positions of channels_first are cut into equal blocks, which have about so many elements at most."""

    elements: int = 65536

    def positions(self, problem: Problem) -> int:
        view = problem.view
        most = max(64, min(SCRATCH, self.elements // max(1, view.channels) // VECTOR * VECTOR))
        equal = -(-view.spatial // max(1, -(-view.spatial // most)))
        return min(-(-equal // VECTOR) * VECTOR, view.spatial)


#: The configurations of each kind; of pieces and segments the first is the default.
PIECES = tuple(map(Pieces, (16384, 4096, 8192, 32768, 65536)))
SLABS_OF = tuple(map(Slabs, (131072, 32768, 65536, 262144, 524288)))
COLUMNS_OF = tuple(map(Columns, (65536, 16384, 32768, 131072, 262144)))
SEGMENTS = (Segments(), Segments(16), Segments(32), Segments(128), Segments(64, 8), Segments(64, 128))


@cache
def unavailable() -> str | None:
    """None, or why no kernel of this backend can run on this machine."""
    try:
        import llvmlite.binding as llvm
    except ImportError as error:
        return f"llvmlite cannot be imported ({error}); install fusednorm with its dependencies"
    from importlib.util import find_spec

    if find_spec("numba") is None:
        return "numba is not installed"
    if platform.machine().lower() in ("x86_64", "amd64") and not llvm.get_host_cpu_features().get("f16c", False):
        return "this x86 processor has no F16C, the conversions between fp16 and fp32"
    return None


def _common(problem: Problem, adds: bool = False, quantizes: bool = False, gates: bool = False) -> str | None:
    if problem.quantized is not None and not quantizes:
        return "gives no output of 8 bits"
    if problem.gated_backward and not gates:
        return "makes no gradient of a gate"
    if problem.added is not None and (problem.added.obstacle or not adds):
        return problem.added.obstacle or "adds nothing before or behind the norm"
    if problem.added is not None and "pre_bias" in problem.added.names:
        return "adds no bias before the norm"
    if problem.added is not None and problem.added.grad_numbers:
        return "sums no gradient of a number for each sample and channel"
    if problem.constant:
        return "each statistic covers one element, so dx is 0, which only the reference makes exact"
    if problem.device != "cpu":
        return f"runs on cpu, the tensor is on {problem.device}"
    return unavailable()


def _pieces(problem: Problem, piece: int) -> tuple[int, int]:
    """How many pieces of so many positions there are, and their size."""
    piece = max(1, piece)
    return -(-problem.view.spatial // piece) if problem.view.spatial else 1, piece


def _distinct(configs: Iterable[T], size: Callable[[T], Hashable]) -> tuple[T, ...]:
    """The first configuration of each size."""
    found: dict[Hashable, T] = {}
    for config in configs:
        found.setdefault(size(config), config)
    return tuple(found.values())


def _as_rows(problem: Problem) -> Problem | None:
    """The backward of channels_first as that of rows, or None where planes are not so short, or samples too few for the
    sums of all elements."""
    flat, spatial = problem.flat if problem.backward else None, problem.view.spatial
    if flat is None or problem.view.samples < FEWEST_FLAT or problem.reduced < VECTOR:
        return None
    activation, simple = problem.norm.activation, problem.dtype in ("float32", "float64")
    most = LONGEST_FLAT if activation is None else VECTOR
    if activation is not None and simple and activation.derivative_flops <= COSTLY_FLOPS:
        most = VECTOR - 1
    short = spatial < VECTOR or (spatial <= most and fit_vectors(flat))
    return flat if spatial > 1 and short else None


@dataclass(frozen=True, slots=True)
class PlanesInstance:
    """channels_first: one kernel takes each unit from its statistics to its result, with the sums around the norm."""

    name: str = "cpu.planes"

    def supports(self, problem: Problem) -> str | None:
        if problem.direction == "inference":
            return "there are no statistics to keep in cache; cpu.planes_split applies the given ones"
        return _shared(problem) or _common(problem, adds=True) or _needs(problem, "channels_first")

    def configs(self, problem: Problem) -> Sequence[None]:
        return (None,)

    def plan(self, problem: Problem, config: None = None) -> Plan:
        flat = None if by_vectors(problem) else _as_rows(problem)
        if flat is not None:
            rows = SEGMENTS[0].size(flat)
            return SampleRowsBackward(flat, max(1, -(-problem.view.samples // rows)), rows, problem)
        if problem.added is None:
            return PlanesBackward(problem) if problem.backward else PlanesForward(problem)
        if problem.view.numel > KEPT_ELEMENTS * max(1, problem.num_statistics):
            return PLANES_SPLIT.plan(problem)  # s and dz of a unit are more than the cache holds
        return PlanesSumBackward(problem) if problem.backward else PlanesSumForward(problem)


@dataclass(frozen=True, slots=True)
class PlanesSplitInstance:
    """channels_first: the statistics of all pieces, combined, then the results of all pieces, with the sums around the
    norm."""

    name: str = "cpu.planes_split"

    def supports(self, problem: Problem) -> str | None:
        return _shared(problem) or _common(problem, adds=True) or _needs(problem, "channels_first")

    def configs(self, problem: Problem) -> Sequence[Pieces]:
        return _distinct(PIECES, lambda config: config.positions(problem))

    def plan(self, problem: Problem, config: Pieces | None = None) -> Plan:
        make: Any
        if problem.added is None:
            make = PlanesSplitBackward if problem.backward else PlanesSplitForward
        else:
            make = PlanesSplitSumBackward if problem.backward else PlanesSplitSumForward
        return make(problem, *_pieces(problem, (config or PIECES[0]).positions(problem)))


def _spread(problem: Problem) -> Problem | None:
    """batch_norm's channels_first with short planes seen as channels_last, in blocks of channels that lie in cache and
    make rows of some length; None where it cannot be."""
    view = problem.view
    if not (problem.norm.training or problem.direction == "inference"):
        return None
    if not view.numel:
        return problem.spread_over(1)
    most = min(view.channels, 8 * WIDE_ROW)
    sizes = [size for size in range(1, most + 1) if view.channels % size == 0]
    long = [size for size in sizes if WIDE_ROW <= size * view.spatial <= 8 * WIDE_ROW]
    short = [size for size in sizes if size * view.spatial < WIDE_ROW]
    size = (long or short[::-1] or [1])[0]
    least = SHORTEST_ROW if size == view.channels else SHORT_ROW
    return problem.spread_over(view.channels // size) if size * view.spatial >= least else None


def _cannot_in_slabs(problem: Problem) -> str | None:
    reason = _shared(problem) or _common(problem, adds=True) or _needs(problem, "channels_last")
    if reason is not None or problem.added is None:
        return reason
    return "adds nothing to rows, which cpu.rows takes" if problem.called.row_family else None


def _in_slabs(problem: Problem, pieces: tuple[int, int], whole: bool, made_for: Problem | None = None) -> Plan:
    make: Any
    if problem.added is None:
        make = SlabsBackward if problem.backward else SlabsForward
    else:
        make = SlabsSumBackward if problem.backward else SlabsSumForward
    return make(problem, *pieces, whole, made_for)


def _short_samples(problem: Problem) -> Problem | None:
    """Many short samples of one group in channels_last as rows, or None for others."""
    few = problem.view.samples < FEWEST_SAMPLES or problem.reduced > LONGEST_SAMPLE
    return None if few or problem.norm.has_variance else problem.flat


@dataclass(frozen=True, slots=True)
class SlabsInstance:
    """channels_last: a few samples at a time go from their statistics to their results, many short ones of one group as
    rows; batch_norm's channels_first, as blocks of a few channels."""

    name: str = "cpu.slabs"

    def supports(self, problem: Problem) -> str | None:
        if problem.direction == "inference":
            return "there are no statistics to keep in cache; cpu.slabs_split applies the given ones"
        if problem.norm.per_batch:
            if _spread(problem) is None:
                numbers = problem.numbered and _spread(replace(problem, added=None)) is not None
                # cpu.planes could add them, but one short plane after the other takes twice as long as torch's sum.
                return "adds no number per sample and channel to blocks of channels" if numbers else NO_BLOCKS
            return _common(problem, adds=True)
        return _cannot_in_slabs(problem)

    def configs(self, problem: Problem) -> Sequence[Slabs | None]:
        if _short_samples(problem) is not None:
            return (None,)
        seen = self._seen(problem)
        return _distinct((slabs_for(seen), *SLABS_OF), lambda config: config.rows(seen))

    def plan(self, problem: Problem, config: Slabs | None = None) -> Plan:
        flat = _short_samples(problem)
        if flat is not None and not problem.backward:
            return SampleRowsForward(flat, problem)
        if flat is not None:
            rows = SEGMENTS[0].size(flat)
            return SampleRowsBackward(flat, max(1, -(-problem.view.samples // rows)), rows, problem)
        seen = self._seen(problem)
        pieces = _pieces(seen, (config or slabs_for(seen)).rows(seen))
        # Few blocks of channels would leave threads idle: all slabs are taken at once.
        many = seen.view.samples >= ENOUGH_BLOCKS or problem.view.numel <= BLOCK_ELEMENTS * seen.view.samples
        whole = not problem.norm.per_batch or many
        return _in_slabs(seen, pieces, whole, problem)

    @staticmethod
    def _seen(problem: Problem) -> Problem:
        return (_spread(problem) if problem.norm.per_batch else None) or problem


@dataclass(frozen=True, slots=True)
class SlabsSplitInstance:
    """channels_last: the statistics of all slabs, combined, then the results of all slabs."""

    name: str = "cpu.slabs_split"

    def supports(self, problem: Problem) -> str | None:
        if problem.direction == "inference" and _spread(problem) is not None:
            return _common(problem, adds=True)
        return _cannot_in_slabs(problem)

    def configs(self, problem: Problem) -> Sequence[Slabs]:
        seen = self._seen(problem)
        return _distinct((slabs_for(seen), *SLABS_OF), lambda config: config.rows(seen))

    def plan(self, problem: Problem, config: Slabs | None = None) -> Plan:
        seen = self._seen(problem)
        rows = (config or slabs_for(seen)).rows(seen)
        if of_points(problem):
            together = max(1, problem.view.spatial)
            pieces = _pieces(seen, -(-rows // together) * together)
            return (PointsBackward if problem.backward else PointsForward)(problem, *pieces)
        return _in_slabs(seen, _pieces(seen, rows), whole=False, made_for=problem)

    @staticmethod
    def _seen(problem: Problem) -> Problem:
        if of_points(problem):
            return as_positions(problem)
        spread = _spread(problem) if problem.direction == "inference" else None
        return spread or problem.folded


@dataclass(frozen=True, slots=True)
class RowsInstance:
    """One position per channel, or statistics for each position of channels_last: each row from its statistics to its
    result, with the sums around the norm."""

    name: str = "cpu.rows"

    def supports(self, problem: Problem) -> str | None:
        if problem.direction == "inference" or problem.norm.per_batch:
            return "the statistics are not those of single rows"
        if problem.norm.has_variance:
            return "keeps no variance"
        if problem.view.spatial != 1 and not problem.norm.per_position:
            return f"needs one position per channel, there are {problem.view.spatial}"
        gate = None if problem.added is None else problem.added.gate
        gates = gate is not None and gate.rows >= LEAST_GATED
        return _common(problem, adds=True, quantizes=True, gates=gates) or _needs(problem, "channels_last")

    def configs(self, problem: Problem) -> Sequence[Segments | None]:
        if not problem.backward or (problem.added is None and self._few(problem)):
            return (None,)
        if in_blocks(problem):
            return _distinct(SEGMENTS, lambda config: self._segment_of_blocks(problem, config))
        return _distinct(SEGMENTS, lambda config: min(config.size(problem), summed_rows(problem)[1]))

    def plan(self, problem: Problem, config: Segments | None = None) -> Plan:
        if problem.quantized is not None:
            return RowsQuantizedForward(problem)
        if in_blocks(problem):
            return self._in_blocks(problem, config or SEGMENTS[0])
        if problem.modulated and problem.view.spatial == 1 and problem.added is None:
            if not problem.backward:
                return PointRowsForward(problem)
            rows = self._segment_of_points(problem, config or SEGMENTS[0])
            return PointRowsBackward(problem, max(1, -(-problem.view.samples // rows)), rows)
        if not problem.backward:
            return RowsForward(problem) if problem.added is None else RowsSumForward(problem)
        if problem.added is None and self._few(problem):
            pieces = max(1, -(-problem.view.group_channels // ROW_PIECE))
            return FewRowsBackward(problem, pieces, ROW_PIECE)
        make = RowsBackward if problem.added is None else RowsSumBackward
        rows = (config or SEGMENTS[0]).size(problem)
        return make(problem, max(1, -(-summed_rows(problem)[1] // rows)), rows)

    @staticmethod
    def _segment_of_points(problem: Problem, config: Segments) -> int:
        """The rows of a segment of points, whose parameters' gradients are sums of all."""
        return config.size(replace(problem, scale_dtype=None, shift_dtype=None))

    @staticmethod
    def _segment_of_blocks(problem: Problem, config: Segments) -> int:
        """The rows of a segment of blocks; sums of more than ROWS_FLUSHED rows are read in float64."""
        rows = -(-parameter_rows(problem)[0] // config.count)
        return max(ROWS_FLUSHED + 1, rows, BLOCKS_SUMMED * SCRATCH // problem.view.channels)

    def _in_blocks(self, problem: Problem, config: Segments) -> Plan:
        if not problem.backward:
            return ShortRowsForward(problem)
        segment = self._segment_of_blocks(problem, config)
        return ShortRowsBackward(problem, max(1, -(-parameter_rows(problem)[0] // segment)), segment)

    @staticmethod
    def _few(problem: Problem) -> bool:
        """Whether rows are few and long."""
        if problem.modulated or problem.direction == "backward_gamma_beta":
            return False
        rows, length, activation = summed_rows(problem)[0], problem.view.channels, problem.norm.activation
        size = DTYPE_BYTES[problem.dtype]
        most, least = FEW_ROWS, LONG_ROW
        if activation is not None and activation.derivative_flops > COSTLY_FLOPS:
            most, least = FEW_COSTLY_ROWS, LONGER_ROW
        elif size == 2:
            most = FEW_SHORT_ROWS if problem.view.numel <= FEW_ELEMENTS else FEW_ROWS
            least = LONGER_ROW if activation is None else LONGEST_ROW
        elif length >= LONGER_ROW and problem.view.numel <= FEW_ELEMENTS:
            most = FEW_LONGER_ROWS
        if problem.view.groups > 1 and in_vectors(problem):
            most = min(most, FEW_GROUPED_ROWS)
        return rows <= most and length >= least


def _needs(problem: Problem, order: str) -> str | None:
    if problem.layout.order != order:
        return f"needs {order}, the tensor is {problem.layout.order}"
    return None


def _shared(problem: Problem) -> str | None:
    return "each position has statistics of its own" if problem.norm.per_position else None


@dataclass(frozen=True, slots=True)
class ColumnsInstance:
    """channels_first with statistics for each position: a block of positions from its statistics to its result, with
    the sums around the norm."""

    name: str = "cpu.columns"

    def supports(self, problem: Problem) -> str | None:
        if not problem.norm.per_position or not problem.norm.training:
            return "the statistics are not those of single positions"
        return _common(problem, adds=True) or _needs(problem, "channels_first")

    def configs(self, problem: Problem) -> Sequence[Columns]:
        return _distinct(COLUMNS_OF, lambda config: config.positions(problem))

    def plan(self, problem: Problem, config: Columns | None = None) -> Plan:
        pieces = _pieces(problem, (config or COLUMNS_OF[0]).positions(problem))
        if problem.backward:
            make = ColumnsBackward if problem.added is None else ColumnsSumBackward
            return make(problem, *pieces, MOST_TASKS)
        return (ColumnsForward if problem.added is None else ColumnsSumForward)(problem, *pieces)


ROWS, SLABS, SLABS_SPLIT = RowsInstance(), SlabsInstance(), SlabsSplitInstance()
PLANES, PLANES_SPLIT, COLUMNS = PlanesInstance(), PlanesSplitInstance(), ColumnsInstance()
INSTANCES = (PLANES, PLANES_SPLIT, SLABS, SLABS_SPLIT, ROWS, COLUMNS)


def _cheap_whole(problem: Problem) -> bool:
    """Whether one thread takes a unit of channels_first sooner than several take it in pieces."""
    if problem.view.spatial == 1:
        return True  # pieces of one element would be merged one by one
    units = problem.num_statistics
    most = WHOLE_UNIT // 2 * (units > 1) if problem.backward else WHOLE_UNIT
    return problem.view.spatial <= SPLIT_PLANE and problem.view.numel <= most * units


def _many_short_planes(problem: Problem) -> bool:
    """Whether an evaluation of channels_first has so many planes to a channel that numbers for each element of a sample
    are made sooner than a loop begins for each plane, whose last elements fill no vector. On two threads, us so and
    plane by plane: in float32 (32, 512, 9) 44 and 93, (84, 1024, 20) 408 and 502, (84, 1024, 49) 845 and 795, with silu
    (84, 1024, 25) 621 and 920; in bfloat16 (84, 1024, 25) 388 and 603, (40, 256, 49) 88 and 111, (128, 512, 64) 885 and
    722, with silu (84, 1024, 49) 1085 and 2109, (64, 256, 100) 524 and 727, (64, 256, 64) 355 and 386."""
    view, activated = problem.view, problem.norm.activation is not None
    samples, plane = view.samples, view.spatial
    if plane < VECTOR:
        return samples >= FEWEST_SHORT
    if view.numel < FEWEST_EVALUATED or problem.dtype == "float64":
        return False
    if problem.dtype == "float32":
        return plane < (2 if activated else 1.5) * VECTOR
    if activated and plane % VECTOR:
        return plane <= (SHORT_PLANE if samples >= 2 * FEWEST_SHORT else SHORT_PLANE // 2)
    return plane <= 2 * VECTOR or (plane % VECTOR > 0 and plane <= 3.5 * VECTOR and samples >= 5 * FEWEST_SHORT)


def _few_for_slabs(problem: Problem) -> bool:
    """Whether batch_norm's planes are too few, or too long, to be taken in slabs: a slab leaves two numbers for each
    channel, which its samples have to repay. On two threads, us in planes and in slabs: forward in float32
    (4, 2048, 64) 115 and 218, (16, 2048, 16) 124 and 141, (16, 512, 64) 114 and 123, (32, 1820, 9) 153 and 166,
    (128, 113, 36) 278 and 161, (48, 143, 81) 320 and 234, (48, 143, 121) 360 and 379, (48, 143, 144) 391 and 345; in
    bfloat16 (16, 512, 64) 162 and 157, (4, 2048, 64) 189 and 203, (48, 143, 169) 446 and 342, (112, 143, 144) 740 and
    485, (40, 256, 256) 618 and 690; backward in float32 (4, 2048, 64) 124 and 229, (16, 3640, 9) 355 and 240, (32, 256,
    64) 113 and 169, (8, 4096, 16) 305 and 427, in bfloat16 (64, 143, 20) 107 and 100, and (64, 143, 28) 112 and 182;
    backward in float32 with silu (52, 639, 72) 2180 and 1420, (32, 143, 144) 451 and 409, (64, 512, 169) 4230 and 3190,
    with leaky_relu (24, 143, 72) 167 and 134, but (128, 143, 169) 1380 and 1580, and with silu (16, 143, 81) 125 and
    164."""
    samples, plane, narrow = problem.view.samples, problem.view.spatial, DTYPE_BYTES[problem.dtype] == 2
    if problem.backward:
        many = samples >= 32 and problem.view.channels >= 256
        longest = 3 * SHORT_PLANE // 2 if many else SHORT_PLANE + VECTOR
        activated = problem.dtype == "float32" and problem.norm.activation is not None
        if activated and SHORT_PLANE // 2 < plane <= longest:
            return samples < 24
        if by_vectors(problem) and not (narrow and (plane <= 3 * VECTOR // 2 or problem.norm.activation is not None)):
            return True
        return plane > SHORT_PLANE // (2 if narrow else 4) or samples < max(8, plane // (4 if narrow else 2))
    if plane < VECTOR:
        return samples < 12 * plane
    if narrow:
        return samples < 16 or plane > min(4 * samples, LONGEST_NARROW)
    vectors = plane % VECTOR == 0 and plane <= 10 * VECTOR
    some = SHORT_PLANE // 2 < plane <= min(2 * samples, SHORT_PLANE)
    many = problem.dtype == "float32" and problem.view.numel >= FEWEST_IN_SLABS and plane > SHORT_PLANE // 2
    if many and ((some and samples >= 40) or (vectors and samples >= 48)):
        return False
    return samples < 16 or plane > min(samples, 63)


def choose(problem: Problem) -> Instance:
    """The instance for a problem that this backend can run.

    Few units would leave threads idle, so they are split, unless they, or the input, are too small to be worth that. A
    channels_last sample beyond the cache gains nothing from staying with one thread.
    """
    view = problem.view
    size = view.numel * DTYPE_BYTES[problem.dtype]
    if ROWS.supports(problem) is None:
        return ROWS
    if problem.norm.per_position:
        return COLUMNS
    inference = problem.direction == "inference"
    if problem.layout.order == "channels_first":
        if problem.norm.per_batch and not _few_for_slabs(problem) and SLABS.supports(problem) is None:
            return SLABS
        if inference and _many_short_planes(problem) and SLABS_SPLIT.supports(problem) is None:
            return SLABS_SPLIT
        least = CACHED_UNITS_BACKWARD if problem.backward else CACHED_UNITS
        if size > CACHED_UNIT_BYTES * problem.num_statistics:
            least = MINIMUM_UNITS
        few = problem.num_statistics < least and size > SMALL_BYTES
        return PLANES_SPLIT if inference or (few and not _cheap_whole(problem)) else PLANES
    if inference or problem.norm.per_batch:
        return SLABS_SPLIT
    few = FEWEST_WHOLE <= view.samples and size <= WHOLE_SAMPLE_BYTES * view.samples
    many = view.samples >= 8 and size <= CACHED_SAMPLE_BYTES * view.samples
    return SLABS if few or many or size <= SMALL_BYTES else SLABS_SPLIT
