"""The Triton instances, and which of them a problem gets: a pure function of the problem."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from fusednorm.backends.triton.config.columns import columns_for
from fusednorm.backends.triton.config.device import CACHED_BYTES, PROCESSORS
from fusednorm.backends.triton.config.flat import flat_for, flat_pays, is_dense, most_width
from fusednorm.backends.triton.config.held import held_for
from fusednorm.backends.triton.config.holding import (
    LARGE_HELD,
    fills_block,
    full_of_singles,
    fuller_whole,
    holding_pays,
    holding_short_pays,
    whole_pays,
    wider_held,
)
from fusednorm.backends.triton.config.kinds import (
    ColumnsBackwardConfig,
    FlatConfig,
    HeldConfig,
    PositionsConfig,
    RowsBackwardConfig,
    TilesConfig,
    WholeConfig,
)
from fusednorm.backends.triton.config.lists import (
    MOST_CONFIGS,
    columns_backwards,
    flat_forwards,
    held,
    passes,
    positions_configs,
    rows_backwards,
    steps_configs,
    whole_forwards,
)
from fusednorm.backends.triton.config.rows import (
    FEW_IN_WAVES,
    LONG_ROW,
    by_columns,
    columns_backward_for,
    holding_rows_pays,
    most_row,
    most_summed_row,
    plane_rows_backward_for,
    rows_backward_for,
    rows_forward_for,
    rows_gated_backward_for,
    rows_sum_backward_for,
)
from fusednorm.backends.triton.config.tiles import of_points, other_reads, passes_for, points_passes_for, tiled
from fusednorm.backends.triton.config.units import MOST_HELD, held_units
from fusednorm.backends.triton.config.whole import MORE_THAN_A_WAVE, whole_forward_for, whole_sum_for
from fusednorm.backends.triton.runs import (
    FEW,
    PAIR_LOAD,
    WIDE_LOAD,
    WIDEST_LOAD,
    load_bytes,
    power_of_two,
    single_floats,
)
from fusednorm.instance import Instance, Plan, SpreadBackwardPlan, SpreadForwardPlan
from fusednorm.norm import ROW_FAMILIES
from fusednorm.problem import DTYPE_BYTES, Layout, Problem

MOST_WHOLE = 32768  # elements of a unit in the registers of 16 warps: 64 a thread
#: From this length on, two reads of a 16-bit row, the second from the L1, are faster than one, where there are rows for
#: all multiprocessors. Of so few longer rows pieces to a program are faster than rows: 60 rows of 150528 in bf16 took
#: 18.5 us, and 42 in rows.
STEPPED_ROW, FEW_LONG_ROWS = 8192, 4 * PROCESSORS
#: Rows of so many elements or fewer, so few of which are faster held than whole.
HELD_ROWS = 32
#: STEPPED_ROW of rms_norm in 32 bits that fills no tile: (1050, 28672) with relu takes 64 us in steps, and 73 in one.
LONGEST_HELD = 24576
#: STEPPED_ROW of rms_norm without a smooth activation: 16384 x 4096 in bf16 takes 67.5 us in steps, and 71.6 in one,
#: (1912, 4096) with relu 9.1 and 10.0.
SIMPLE_ROW = 2560
#: STEPPED_ROW of rows of 32 bits that leave some of 4096 lanes empty, and the longest of these.
SPARSE_ROW, SPARSE_ROW_END = 3072, 3584
#: Elements of rows of 32-bit single loads up to which registers are faster than pieces, and rows up to which steps are.
LONGEST_SINGLES, SINGLES_IN_STEPS = 20480, 5 * PROCESSORS
#: With loads of two elements of 16 bits rows of so many elements at most are faster than their pieces:
#: 3021 x 22114 in bf16 took 118 us, and 79 by rows, 1875 x 50654 185 and 200; without a mean up to twice as many, 1377
#: x 59918 170 and 137.
LONGEST_OF_PAIRS = 32768
#: Elements of 16-bit rows of single loads with a mean beyond which steps are faster than registers: (5215, 13093) in
#: fp16 with gelu_tanh takes 133 us in steps, and 205 whole, (3000, 9001) 65 and 61, (12000, 15001) in bf16 336 and 430,
#: (1000, 12001) 24 and 33.
LONGEST_SINGLE = 11264
#: Elements of a plane from which on a program has work for several steps, and the bytes of one up to which the L2 holds
#: those in work.
LEAST_PLANE, LARGEST_PLANE = 2048, 160 << 10
#: Rows that share a gate, at least, where parameters have gradients: of 4 rows three sums take 12 bytes an element.
LEAST_GATED = 4
SINGLE = "each position has statistics of its own"


@cache
def unavailable() -> str | None:
    """None, or why no kernel of this backend can run on this machine."""
    from importlib.util import find_spec

    if find_spec("triton") is None:
        return "triton is not installed; install fusednorm[triton]"
    if interpreted():
        return None
    import torch

    return None if torch.cuda.is_available() else "torch.cuda.is_available() is False"


def interpreted() -> bool:
    """True under Triton's interpreter, in which tests run these instances on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _unquantized(problem: Problem) -> str | None:
    return None if problem.quantized is None else "gives no output of 8 bits"


def _common(problem: Problem) -> str | None:
    if problem.added is not None:
        return problem.added.obstacle or "adds nothing before or behind the norm"
    if problem.constant:
        return "each statistic covers one element, so dx is 0, which only the reference makes exact"
    return _elsewhere(problem)


def _elsewhere(problem: Problem) -> str | None:
    if problem.device != "cuda" and not (problem.device == "cpu" and interpreted()):
        return f"runs on cuda, the tensor is on {problem.device}"
    return unavailable()


def _adding(problem: Problem, gates: bool = False, biases: bool = False, numbers: bool = False) -> str | None:
    """:func:`_common` of an instance that fuses the sums around the norm; ``gates`` where it makes their gradients,
    ``biases`` where it adds one to the channels of planes, ``numbers`` where it makes the gradient of a number for
    each sample and channel."""
    if problem.added is None:
        return _common(problem)
    if "pre_bias" in problem.added.names and not (biases and problem.numbered):
        return "adds no bias before the norm"
    if problem.gated_backward and not gates:
        return "makes no gradient of a gate"
    if problem.added.grad_numbers and not numbers:
        return "sums no gradient of a number for each sample and channel"
    return problem.added.obstacle or _common(replace(problem, added=None))


def _adding_numbers(problem: Problem, numbers: bool = False) -> str | None:
    """:func:`_adding` of an instance whose gates have a number for each sample and channel."""
    if problem.added is not None and "pre_gate" in problem.added.names and _are_rows(problem):
        return "has no gate of rows"
    return _adding(problem, biases=True, numbers=numbers)


def _of_planes(problem: Problem) -> bool:
    """Whether the statistics are a sample's own, of planes."""
    return problem.norm.training and not problem.norm.per_batch and problem.view.spatial > 1


@dataclass(frozen=True, slots=True)
class TilesInstance:
    """Any problem: the statistics of all tiles, combined, then the results of all, with the sums around the norm."""

    name: str = "triton.tiles"

    def supports(self, problem: Problem) -> str | None:
        if problem.norm.per_position:
            return SINGLE
        return _unquantized(problem) or _adding_numbers(problem, numbers=_of_planes(problem))

    def configs(self, problem: Problem) -> Sequence[TilesConfig]:
        sample = of_points(problem)
        if sample is not None:
            return passes(sample, points_passes_for(sample))
        seen = tiled(problem)
        default = passes_for(seen)
        return passes(seen, default, other_reads(seen, default))

    def plan(self, problem: Problem, config: TilesConfig | None = None) -> Plan:
        from fusednorm.backends.triton.plans import points
        from fusednorm.backends.triton.plans import tiles as plans

        sample = of_points(problem)
        if sample is not None:
            kind = points.PointsBackward if problem.backward else points.PointsForward
            return kind(problem, sample, config or points_passes_for(sample))
        make: Any
        seen = tiled(problem)
        if problem.added is None:
            make = plans.TilesBackward if problem.backward else plans.TilesForward
        else:
            make = plans.TilesSumBackward if problem.backward else plans.TilesSumForward
        return make(problem, seen, config or passes_for(seen))

    def spread(self, problem: Problem) -> SpreadForwardPlan | SpreadBackwardPlan | None:
        """The plan of a part of an input that is spread over processes; None where this instance has none."""
        from fusednorm.backends.triton.plans.spread import SpreadBackward, SpreadForward
        from fusednorm.backends.triton.plans.spread_rows import SpreadRowsBackward, SpreadRowsForward

        if "input" in problem.copies or _elsewhere(problem):
            return None
        if problem.norm.family in ROW_FAMILIES:
            return (SpreadRowsBackward if problem.backward else SpreadRowsForward)(problem)
        seen = tiled(problem)
        return (SpreadBackward if problem.backward else SpreadForward)(problem, seen, passes_for(seen))


@dataclass(frozen=True, slots=True)
class WholeInstance:
    """The forward of units in one piece of memory that fit the registers of one program: one read, with the sums around
    the norm."""

    name: str = "triton.whole"

    def supports(self, problem: Problem) -> str | None:
        if problem.direction != "forward" or problem.norm.per_batch:
            return "the statistics are not made of single units"
        if problem.norm.per_position and (problem.layout.order == "channels_first" or problem.reduced == 1):
            return SINGLE
        most = _most_whole(problem)
        if problem.reduced > most:
            return f"holds units of {most} elements, these have {problem.reduced}"
        if not all(_flat(problem, layout) for layout in problem.layouts):
            return "a group's elements do not follow one another"
        return _adding(problem)

    def configs(self, problem: Problem) -> Sequence[WholeConfig]:
        seen = _rows(problem)
        return whole_forwards(seen, _whole_config(problem))

    def plan(self, problem: Problem, config: WholeConfig | None = None) -> Plan:
        from fusednorm.backends.triton.plans.quantized import QuantizedSumWhole, QuantizedWhole
        from fusednorm.backends.triton.plans.whole import WholeForward, WholeSumForward

        make: Any
        if problem.quantized is None:
            make = WholeForward if problem.added is None else WholeSumForward
        else:
            make = QuantizedWhole if problem.added is None else QuantizedSumWhole
        return make(problem, config or _whole_config(problem))


def _whole_config(problem: Problem) -> WholeConfig:
    return (whole_forward_for if problem.added is None else whole_sum_for)(_rows(problem))


@dataclass(frozen=True, slots=True)
class HeldInstance:
    """Units of any memory order that fit the registers of one program: one read, with the sums around the norm."""

    name: str = "triton.held"

    def supports(self, problem: Problem) -> str | None:
        if problem.direction == "inference" or not problem.norm.training:
            return "the statistics are given"
        if problem.norm.per_position:
            return SINGLE
        seen = held_units(problem)
        most = MOST_HELD // 2 if problem.dtype == "float64" else MOST_HELD
        if seen.elements > most:
            return f"holds units of {most} elements, these take {seen.elements} of a tile"
        return _unquantized(problem) or _adding_numbers(problem)

    def configs(self, problem: Problem) -> Sequence[HeldConfig]:
        seen = held_units(problem)
        return held(problem, seen, held_for(problem, seen))

    def plan(self, problem: Problem, config: HeldConfig | None = None) -> Plan:
        from fusednorm.backends.triton.plans import held as plans

        seen = held_units(problem)
        config = config or held_for(problem, seen)
        make: Any
        if problem.added is not None:
            make = plans.HeldSumBackward if problem.backward else plans.HeldSumForward
        elif config.steps > 1:
            make = plans.HeldSamplesBackward
        else:
            make = plans.HeldBackward if problem.backward else plans.HeldForward
        return make(problem, seen, config)


@dataclass(frozen=True, slots=True)
class RowsInstance:
    """Rows: the forward in steps, one program a row, or a channel of a sample, whose backward is so too; that of rows
    with the sums of a program's rows in registers, or by columns where rows are too long for that. With sums around the
    norm rows are in registers in both, and channels of samples that are too long for them in tiles."""

    name: str = "triton.rows"

    def supports(self, problem: Problem) -> str | None:
        view = problem.view
        if problem.direction == "inference" or problem.norm.per_batch or not problem.norm.training:
            return "the statistics are not those of single units"
        if problem.quantized is not None and problem.quantized.per_row:
            return "holds no row until its scale is known"
        if problem.added is not None:
            if _planes_in_rows(problem) and _summing(problem) is TILES:
                return TILES.supports(problem)
            if problem.reduced > _most_summed(problem):
                return f"adds before and behind the norms of rows of {_most_summed(problem)} elements at most"
        if problem.gated_backward and _short_gate(problem):
            return f"sums no parameters' gradients of so few rows as share a gate, fewer than {LEAST_GATED}"
        if problem.norm.per_position:
            return _adding(problem, gates=True) if problem.layout.order == "channels_last" else SINGLE
        if not _planes_in_rows(problem):
            if view.spatial != 1 or view.groups != 1 or problem.modulated:
                return "takes rows, of one group and one position, without modulation, and packed planes of one channel"
            if problem.norm.has_variance:
                return "keeps no variance"
        if not all(_flat(problem, layout) for layout in problem.layouts):
            return "a row's elements do not follow one another"
        return _adding(problem, gates=True)

    def configs(self, problem: Problem) -> Sequence[Any]:
        if problem.added is not None:
            return self._summed_configs(problem)
        problem = _rows(problem)
        if not problem.backward:
            return steps_configs(problem, rows_forward_for(problem))
        if _planes_in_rows(problem):
            return steps_configs(problem, plane_rows_backward_for(problem))
        first = by_columns(problem)
        columns = columns_backwards(problem, columns_backward_for(problem)) if first or _between(problem) else ()
        by_rows = rows_backwards(problem, rows_backward_for(problem)) if not first or _between(problem) else ()
        if not columns or not by_rows:
            return columns or by_rows
        half = MOST_CONFIGS // 2
        return (*columns[:half], *by_rows[:half]) if first else (*by_rows[:half], *columns[:half])

    @staticmethod
    def _summed_configs(problem: Problem) -> Sequence[Any]:
        summing = _summing(problem)
        if summing is not None:
            return summing.configs(problem)
        return rows_backwards(_rows(problem), _summed_rows_config(problem))

    def plan(self, problem: Problem, config: Any = None) -> Plan:
        from fusednorm.backends.triton.plans.quantized import QuantizedRows
        from fusednorm.backends.triton.plans.rows import (
            LongRowsBackward,
            PlaneRowsBackward,
            RowsBackward,
            RowsForward,
            RowsGatedBackward,
            RowsSumBackward,
        )

        seen = _rows(problem)
        if problem.quantized is not None and problem.added is None:
            return QuantizedRows(problem, config or rows_forward_for(seen))
        if problem.added is not None:
            summing: Any = _summing(problem)
            if summing is not None:
                return summing.plan(problem, config if isinstance(config, WholeConfig | TilesConfig) else None)
            fits = isinstance(config, RowsBackwardConfig)
            summed = RowsGatedBackward if problem.gated_backward else RowsSumBackward
            return summed(problem, config if fits else _summed_rows_config(problem))
        if not problem.backward:
            return RowsForward(problem, config or rows_forward_for(seen))
        if _planes_in_rows(problem):
            return PlaneRowsBackward(problem, config or plane_rows_backward_for(problem))
        if config is None:
            config = (columns_backward_for if by_columns(seen) else rows_backward_for)(seen)
        make = LongRowsBackward if isinstance(config, ColumnsBackwardConfig) else RowsBackward
        return make(problem, config)


def _are_rows(problem: Problem) -> bool:
    """Whether units are rows: of one group and one position, or positions of channels_last."""
    view = problem.view
    return view.spatial == view.groups == 1 or (problem.norm.per_position and problem.layout.order == "channels_last")


def _short_gate(problem: Problem) -> bool:
    """Whether the rows of a gate, whose programs take no others, are fewer than pay for their sums of p and q."""
    assert problem.added is not None
    view, gate = problem.view, problem.added.gate
    summed = view.spatial if problem.modulated else view.samples * view.spatial
    return problem.direction == "backward" and gate is not None and gate.rows < min(summed, LEAST_GATED)


def _most_summed(problem: Problem) -> int:
    """The longest rows with sums around the norm, which are in the registers of a program."""
    return most_summed_row(problem) if problem.backward else _most_whole(problem)


def _summed_rows_config(problem: Problem) -> RowsBackwardConfig:
    return (rows_gated_backward_for if problem.gated_backward else rows_sum_backward_for)(_rows(problem))


def _summing(problem: Problem) -> Instance | None:
    """What runs triton.rows with sums around the norm: other instances forwards, and the backward of planes; None for
    triton.rows itself."""
    if problem.backward:
        return TILES if _planes_in_rows(problem) else None
    return WHOLE if problem.reduced <= _most_whole(problem) else TILES


def _rows(problem: Problem) -> Problem:
    """The problem for which configurations are chosen: of positions with statistics of their own, that of rows."""
    return problem.in_rows if problem.norm.per_position else problem


@dataclass(frozen=True, slots=True)
class ColumnsInstance:
    """channels_first with statistics for each position: a block of positions to a program, with the sums around the
    norm."""

    name: str = "triton.columns"

    def supports(self, problem: Problem) -> str | None:
        if not problem.norm.per_position or not problem.norm.training:
            return "the statistics are not those of single positions"
        if problem.layout.order != "channels_first":
            return f"needs channels_first, the tensor is {problem.layout.order}"
        return _unquantized(problem) or _adding(problem)

    def configs(self, problem: Problem) -> Sequence[PositionsConfig]:
        return positions_configs(problem, columns_for(problem))

    def plan(self, problem: Problem, config: PositionsConfig | None = None) -> Plan:
        from fusednorm.backends.triton.plans import columns as plans

        make: Any
        if problem.added is None:
            make = plans.ColumnsBackward if problem.backward else plans.ColumnsForward
        else:
            make = plans.ColumnsSumBackward if problem.backward else plans.ColumnsSumForward
        return make(problem, config or columns_for(problem))


@dataclass(frozen=True, slots=True)
class FlatInstance:
    """Evaluations of batch_norm over dense tensors: their elements in the order of memory."""

    name: str = "triton.flat"

    def supports(self, problem: Problem) -> str | None:
        if problem.direction != "inference":
            return "the statistics are not given"
        if not problem.norm.per_batch:
            return "takes one mean and one variance of each channel, and the samples have their own"
        if not is_dense(problem):
            return "the elements of input and output do not follow one another in the same order"
        if problem.view.numel >= 1 << 31:
            return "counts its elements in 32 bits"
        if problem.added is not None:
            return "adds nothing before or behind the norm"
        return _unquantized(problem) or _common(problem)

    def configs(self, problem: Problem) -> Sequence[FlatConfig]:
        return flat_forwards(flat_for(problem), most_width(problem))

    def plan(self, problem: Problem, config: FlatConfig | None = None) -> Plan:
        from fusednorm.backends.triton.plans.flat import FlatForward

        return FlatForward(problem, config or flat_for(problem))


def _planes_in_rows(problem: Problem) -> bool:
    """Whether units are single channels that follow one another in memory."""
    view = problem.view
    if view.group_channels > 1 or view.spatial == 1:
        return False
    layouts = [layout for layout in problem.layouts if layout is not None]
    follow = view.samples == 1 or all(layout.sample == view.channels * layout.channel for layout in layouts)
    return follow and all(layout.spatial == 1 for layout in layouts)


def _between(problem: Problem) -> bool:
    """Whether a backward of rows may go both by rows and by columns."""
    return most_row(problem) // 4 < problem.reduced <= most_row(problem)


def _most_whole(problem: Problem) -> int:
    return MOST_WHOLE // 2 if problem.dtype == "float64" else MOST_WHOLE


def _flat(problem: Problem, layout: Layout | None) -> bool:
    view = problem.view
    if layout is None or problem.norm.per_position:
        return True
    positions = view.spatial == 1 or layout.spatial == 1
    return positions and (view.group_channels == 1 or layout.channel == view.spatial)


TILES, WHOLE, HELD, ROWS = TilesInstance(), WholeInstance(), HeldInstance(), RowsInstance()
COLUMNS, FLAT = ColumnsInstance(), FlatInstance()
INSTANCES = (WHOLE, HELD, ROWS, COLUMNS, FLAT, TILES)


def choose(problem: Problem) -> Instance:
    """The instance for a problem that this backend can run: rows, and units that pay to be held or taken whole, are
    read by one program each, other units in tiles, twice."""
    view = problem.view
    if problem.norm.per_position:
        return COLUMNS if problem.layout.order == "channels_first" else _for_positions(problem)
    if FLAT.supports(problem) is None and flat_pays(problem):
        return FLAT
    if view.spatial == view.groups == 1 and ROWS.supports(problem) is None:
        return _for_rows_backward(problem) if problem.backward else _for_rows(problem)
    whole = WHOLE.supports(problem) is None
    stepped = not problem.backward and view.group_channels == 1 and not whole_pays(problem) and _steps_pay(problem)
    if stepped and ROWS.supports(problem) is None:
        return ROWS
    if holding_short_pays(problem) and HELD.supports(problem) is None:
        return HELD
    if whole and (view.group_channels == 1 or view.spatial == 1):  # one affine to a unit, or one to an element
        return WHOLE if whole_pays(problem) else TILES
    if HELD.supports(problem) is None and holding_pays(problem, held_units(problem)):
        return WHOLE if whole and fuller_whole(problem, held_units(problem)) else HELD
    if problem.backward and ROWS.supports(problem) is None and _plane_rows_pay(problem):
        return ROWS
    if whole and whole_pays(problem):
        held = HELD.supports(problem) is None and wider_held(problem, held_units(problem))
        return HELD if held else WHOLE
    return TILES


def _for_positions(problem: Problem) -> Instance:
    """The rows of samples, which neither triton.held nor triton.tiles take."""
    return WHOLE if WHOLE.supports(problem) is None and _for_rows(_rows(problem)) is WHOLE else ROWS


def _for_rows_backward(problem: Problem) -> Instance:
    holds = HELD.supports(problem) is None and holding_rows_pays(problem, held_units(problem))
    return HELD if holds else ROWS


def _steps_pay(problem: Problem) -> bool:
    """Whether channels of samples are faster in steps, with a second read from the L1 or the L2, than in tiles, with
    one from memory: where they are many, and those in work at a time fit the L2. Of fuller blocks some of the second
    reads come from memory: (30, 24, 176, 176) in fp16 with silu takes 41 us in steps and 37 in tiles. Narrow loads of
    32 bits are as many in tiles: on an H100 (10, 100, 20001) takes 69 us in steps, and 85 in tiles."""
    wide = load_bytes(problem) >= WIDE_LOAD or (problem.dtype == "float32" and problem.reduced > MOST_WHOLE // 2)
    many = problem.num_statistics >= 2 * PROCESSORS and wide
    return many and STEPPED_ROW < problem.reduced <= MOST_WHOLE and not fills_block(problem)


def _plane_rows_pay(problem: Problem) -> bool:
    """Whether the backward of channels of samples is faster with a second read from the L1 or the L2 than in tiles: on
    an H100 (28, 619, 48, 87) in fp16 with relu takes 164 us so, and 252 in tiles, (9, 43, 20049) in fp32 49 and 56, (4,
    200, 211, 212) in fp16 88 and 125, but (5, 80, 200, 250) in bf16 with silu 77 and 72."""
    wide = load_bytes(problem) >= PAIR_LOAD or full_of_singles(problem)
    many = problem.num_statistics >= 2 * PROCESSORS and wide
    large = load_bytes(problem) >= WIDE_LOAD and not problem.norm.smooth
    most = max(MOST_WHOLE, LARGEST_PLANE // DTYPE_BYTES[problem.dtype]) if large else MOST_WHOLE
    return many and problem.view.group_channels == 1 and LEAST_PLANE <= problem.reduced <= most


def _for_rows(problem: Problem) -> Instance:
    """The forward of rows: in one program, in registers or in steps, or by pieces of few long rows. Programs with a row
    of 32 bits and a mean fill a multiprocessor each, so that few of them end with idle ones: layer_norm of 404 x 12288
    takes 16 us in registers and 14 in steps, 2000 x 12288 52 and 55. (500, 65536) takes 109 us in steps, 130 in pieces.
    Without a mean those of 384 x 16384 with silu take 21.7 us in registers and 19.0 in steps, 600 x 16384 28.2, and
    28.9.
    """
    length, count = problem.reduced, problem.view.samples
    wide = load_bytes(problem) >= WIDE_LOAD
    short = DTYPE_BYTES[problem.dtype] == 2
    simple = not (problem.norm.has_mean or problem.norm.smooth)
    if problem.dtype == "float32" and load_bytes(problem) < WIDEST_LOAD and length > 2 * STEPPED_ROW:
        found = _for_long_rows_of_narrow_loads(problem)
        if found is not None:
            return found
    if problem.norm.has_mean:
        # (437, 8192) with silu takes 9.7 us in steps, and 12.2 in registers.
        # (232, 8192) takes 6.3 us in registers, and 7.1 in steps.
        # (200, 12002) takes 9.0 us in registers, and 13.2 in steps.
        least = PROCESSORS * (2 if length <= LONG_ROW else 1)
        waves = not short and length >= STEPPED_ROW and least < count <= 4 * PROCESSORS
    else:
        waves = not short and LONG_ROW < length <= LONGEST_HELD and 2 * PROCESSORS < count <= 3 * PROCESSORS
        # On an H100 (230, 28672) takes 21 us in steps, and 26 in registers, (207, 39560) 27, and 31 in pieces.
        fp32 = problem.dtype == "float32" and load_bytes(problem) == WIDEST_LOAD
        waves = waves or (fp32 and length > LONGEST_HELD and PROCESSORS < count <= 2 * PROCESSORS)
    least = MOST_WHOLE if not short else SIMPLE_ROW if simple else STEPPED_ROW
    if not short and not problem.norm.has_mean and problem.dtype == "float32" and 8 * length <= 7 * MOST_WHOLE:
        least = LONGEST_HELD
    # On an H100 (200, 40960) in bf16 takes 16.1 us in steps, and 17.2 in pieces, (250, 65536) with silu 30.6 and 34.5.
    fewest = 3 * PROCESSORS // 2 if short and length > MOST_WHOLE else 2 * PROCESSORS
    if short and LONGEST_HELD < length <= MOST_WHOLE and not problem.norm.has_mean:
        fewest = PROCESSORS  # (183, 28672) in fp16 with silu takes 9.5 us in steps, and 12.8 in registers
    if short and problem.norm.has_mean and 8 * length > 7 * 2 * STEPPED_ROW:
        fewest = PROCESSORS  # (138, 16384) in bf16 takes 6.4 us in steps, and 7.9 in registers
    if short and 0 < length <= 4096:  # rms_norm of (342, 3072) in bf16 takes 2.7 us in registers, and 3.1 in steps
        fewest = max(fewest, FEW // length)
    stepped = wide and (waves or (length > least and count >= fewest))
    if short and problem.norm.has_mean and not problem.norm.smooth and length == STEPPED_ROW:
        # (714, 8192) in bf16 with relu takes 9.3 us in steps, and 12.0 in registers, (5000, 8192) 45.7, and 47.1, but
        # (300, 8192) 6.0 both ways, (714, 8192) with silu 10.7, and 10.3.
        stepped = stepped or 2 * PROCESSORS < count <= 40 * PROCESSORS
    if problem.dtype == "float32" and SPARSE_ROW < length <= SPARSE_ROW_END and not problem.norm.smooth:
        # (3000, 3300) without a mean takes 21.0 us in steps, and 22.7 in registers, (20000, 3300) 124 and 132, with one
        # 126 and 133.
        stepped = stepped or (load_bytes(problem) == WIDEST_LOAD and count >= 16 * PROCESSORS)
    if problem.dtype == "float32" and LARGE_HELD < length <= STEPPED_ROW and load_bytes(problem) == WIDEST_LOAD:
        # rms_norm of (1610, 5420) takes 19.5 us in steps, and 21.0 in registers, of (1500, 7000) with silu 23.2 and
        # 24.9, layer_norm of (3360, 8192) with relu 55.3 and 59.4, but rms_norm of (700, 5420) 11.1, and 10.5.
        stepped = stepped or count >= 8 * PROCESSORS
    if PAIR_LOAD <= load_bytes(problem) < WIDE_LOAD and short and STEPPED_ROW < length <= 2 * STEPPED_ROW:
        # rms_norm of (470, 14310) in bf16 takes 10.1 us in steps, and 13.2 in registers, but (700, 12002) is as fast.
        stepped = stepped or (not problem.norm.has_mean and 2 * PROCESSORS < count <= 4 * PROCESSORS)
    if load_bytes(problem) < PAIR_LOAD and LONGEST_SINGLE < length <= MOST_WHOLE // 2 and count >= 2 * PROCESSORS:
        if problem.norm.has_mean and 2 * DTYPE_BYTES[problem.dtype] * problem.view.numel <= CACHED_BYTES:
            # (354, 14333) in bf16 with relu takes 14.7 us so, and 18.7 in steps, (300, 15001) with gelu 15.9 and 16.5.
            return TILES
        stepped = stepped or problem.norm.has_mean
    if load_bytes(problem) < PAIR_LOAD and length > LONGEST_SINGLE and count <= PROCESSORS // 3 and not stepped:
        # rms_norm of (36, 15457) in bf16 with silu takes 4.7 us so, and 5.1 in registers, (62, 14321) in fp16 4.5 in
        # registers, and 5.1.
        return TILES
    if simple and short and wide and 2 * STEPPED_ROW < length <= MOST_WHOLE and count > PROCESSORS // 3:
        stepped = True  # rms_norm of (50, 28672) in fp16 takes 4.3 us in steps, and 5.5 in pieces
    uneven = short and load_bytes(problem) < PAIR_LOAD and STEPPED_ROW < length <= 2 * STEPPED_ROW
    if uneven and problem.norm.has_mean and PROCESSORS < count <= MORE_THAN_A_WAVE:
        # (166, 11443) in fp16 with silu takes 8.0 us so, and 10.5 in registers, (150, 10001) in bf16 with relu 7.0 and
        # 9.1, (200, 12001) 8.6 and 9.8.
        return TILES
    if count <= PROCESSORS // 8 and STEPPED_ROW < length <= 2 * STEPPED_ROW and _pieces_pay(problem):
        return TILES
    if short and problem.norm.has_mean and LONGEST_HELD < length <= MOST_WHOLE and PROCESSORS < count <= 3 * PROCESSORS:
        # (192, 28672) in bf16 takes 11.1 us so, and 12.3 in registers, (300, 30000) 15.5, and 17.8 in steps, but (400,
        # 28672) in fp16 17.7, and 16.9.
        return TILES
    odd = single_floats(problem) and not problem.norm.has_mean
    if odd and LARGE_HELD // 2 < length <= LARGE_HELD and count > 4 * PROCESSORS and HELD.supports(problem) is None:
        return HELD  # rms_norm of (2000, 3001) takes 13.6 us so, and 15.8 whole
    few = count <= HELD_ROWS and LARGE_HELD // 2 < length <= STEPPED_ROW and not problem.norm.smooth and wide
    few = few and (8 * length >= 7 * power_of_two(length) or (short and length <= LARGE_HELD))
    few = few and problem.dtype != "float64"
    if few and not stepped and HELD.supports(problem) is None:
        # (8, 8192) in bf16 with relu takes 2.7 us so, and 2.9 whole, (13, 8192) in fp32 2.9 and 3.1, rms_norm of (4,
        # 4096) in bf16 1.8 and 1.9, but of (3, 5120) in fp32 2.1, and 2.0.
        return HELD
    if WHOLE.supports(problem) is None and not stepped and (length <= 2 * STEPPED_ROW or (wide and count > PROCESSORS)):
        return WHOLE
    longest = LONGEST_OF_PAIRS if problem.norm.has_mean else 2 * LONGEST_OF_PAIRS
    pairs = load_bytes(problem) >= PAIR_LOAD and length <= longest and count >= 2 * PROCESSORS
    return ROWS if stepped or pairs or (count > FEW_LONG_ROWS and (wide or not short)) else TILES


def _pieces_pay(problem: Problem) -> bool:
    """Whether very few rows are faster in pieces than in the registers of 16 warps: in fp32 layer_norm of (12, 13098)
    takes 3.7 us so, and 4.3 in registers, in bf16 (1, 16384) with leaky_relu 3.2 and 3.6, (1, 9231) with silu 3.7 and
    4.1, but (7, 16384) in fp16 without an activation 3.3 and 3.2, rms_norm of (2, 11008) with silu 3.3 and 2.8."""
    if not problem.norm.has_mean:
        return False
    if problem.dtype == "float32":
        return True
    single = load_bytes(problem) < PAIR_LOAD and problem.norm.smooth
    return problem.norm.activation is not None and (single or 8 * problem.reduced > 7 * 2 * STEPPED_ROW)


def _for_long_rows_of_narrow_loads(problem: Problem) -> Instance | None:
    """The forward of rows of 32 bits beyond 16384 elements whose loads are narrow; None where rows of the widest are as
    fast. Pieces are read twice, the second time from the L2, where that holds all rows: layer_norm of (288, 16967) with
    silu takes 21 us so, 27 in registers and 36 in steps, (1837, 20521) with gelu 131, 149 and 195, (1000, 26001) 84,
    101 and 128, but (1000, 20001) 86, 80 and 91, (600, 24001) 63, 67 and 54, rms_norm of (600, 40001) 107 and 93 in
    steps."""
    length, count, mean = problem.reduced, problem.view.samples, problem.norm.has_mean
    if load_bytes(problem) == DTYPE_BYTES[problem.dtype]:
        held_by_cache = DTYPE_BYTES[problem.dtype] * problem.view.numel <= CACHED_BYTES
        if held_by_cache or count < 2 * PROCESSORS or (mean and length > MOST_WHOLE):
            return TILES
        if not mean:
            return ROWS  # (1785, 16991) takes 76.8 us in steps, and 85.3 in registers
        if problem.norm.smooth:
            return TILES
        if length <= LONGEST_SINGLES and WHOLE.supports(problem) is None:
            return WHOLE
        return ROWS if count <= SINGLES_IN_STEPS else TILES
    # Pairs in one wave and little more: (300, 16390) takes 20.0 us in pieces, 23.4 in registers and 25.8 in steps, and
    # the longest: (190, 42650) 26 and 33 in steps, (366, 61598) 72 and 76.
    return TILES if mean and (length > MOST_WHOLE or 2 * PROCESSORS < count <= FEW_IN_WAVES) else None
