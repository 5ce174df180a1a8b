"""The instances for Hopper and later, and which problems get them: a pure function of problem and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fusednorm.backends.hopper.config.columns import ColumnsConfig, columns_configs, columns_for
from fusednorm.backends.hopper.config.resident import (
    LEAST_TILE,
    VECTOR_BYTES,
    ResidentConfig,
    channel_vectors,
    configs,
    divides,
    ragged,
    resident_for,
    shifted,
    spread,
    unit_vectors,
    vector_of,
)
from fusednorm.backends.hopper.config.row_parts import RowPartsConfig, row_parts_for
from fusednorm.backends.hopper.config.row_parts import configs as row_parts_configs
from fusednorm.backends.hopper.config.rows import RowsConfig, rows_for
from fusednorm.backends.hopper.config.rows import configs as rows_configs
from fusednorm.backends.hopper.config.slabs import SlabsConfig, slabs_for, span
from fusednorm.backends.hopper.config.slabs import configs as slabs_configs
from fusednorm.backends.hopper.config.slabs import spread as slabs_spread
from fusednorm.backends.triton import instances as triton
from fusednorm.backends.triton.runs import WIDE_LOAD, load_bytes, stores_dz
from fusednorm.instance import Instance, Plan
from fusednorm.problem import DTYPE_BYTES, Problem

#: The share of their chunks that slabs whose channels are groups fill at least.
LEAST_FILLED = 0.85
#: The vectors of each position that slabs have at least, where they have not all of them: instance_norm of (3, 200,
#: 105, 335) in fp16 takes 119 us in slabs of one, and 41 in two reads.
LEAST_HELD = 4
#: The least input, in bytes, whose chunks take several waves; that of a backward of channels_first, which has two
#: tensors to hold: (6, 512, 4547) in 32 groups in bf16 with relu, 28 MB, takes 37 us so, and 41 in two reads,
#: instance_norm of (4, 4, 731, 600) in fp32 with silu 31 and 39, of (3, 5, 832, 832) in fp16 with relu, 21 MB, 25.3 and
#: 27.1, but of (8, 8, 149191) in bf16 with relu, 19 MB, 28 and 26; and that of narrow loads of 32 bits: (26, 320, 593)
#: in 32 groups with scale and shift, 20 MB, takes 27 us so, and 31, (27, 128, 1401), 19 MB, 22.8 and 26.3, but (9, 256,
#: 1023), 9 MB, 14.1 and 12.4.
LEAST_BYTES, LEAST_BACKWARD_BYTES, LEAST_NARROW_BACKWARD_BYTES = 30 << 20, 20_000_000, 15_000_000
#: Bytes of batch_norm's planes that are short, of elements of 16 bits, and the tiles of a chunk that are few.
SHORT_PLANE, FEW_TILES = 4 << 10, 3
#: The part of a multiprocessor's blocks that the chunks of a full wave take, and the tiles of such a chunk at most.
FULL_WAVE, FULL_WAVE_TILES = 0.95, 4
#: Operations of an activation that take a part of the time of a second read of 16-bit elements, those of a sigmoid, and
#: that take about all of it, more than those of silu.
BUSY, DEAR = 14, 17
#: The share of the blocks that work and of their chunks that units fill from which on a backward in one read is faster,
#: of elements of 16 bits and of 32: batch_norm of (188, 60, 57, 57) in fp16 with leaky_relu, at 79 %, takes 95 us so,
#: and 103 in two reads, of (77, 60, 49, 49), at 57 %, 37 and 35, in fp32 of (106, 512, 33, 33) with relu, at 53 %, 278
#: and 325, (59, 512, 560) in 8 groups with relu, at 55 %, 71 and 88. Narrow loads take longer in two reads: (33, 512,
#: 1163) in 32 groups in bf16, at 57 %, takes 50 us so, and 59, (41, 512, 1409) in fp16 with relu, at 69 %, 69 and 87,
#: (12, 512, 3039) in bf16 with silu, at 74 %, 52 and 59, but (72, 128, 2147) in fp16 with silu, at 52 %, 66 and 62.
LEAST_WORKING, LEAST_WORKING_BUSY, LEAST_WORKING_WIDE = 0.75, 0.7, 0.53
#: Vectors of chunks that divide units of 16 bits whose activation takes about the time of a second read.
LONG_CHUNK = 1024
#: Elements of a row beyond which Triton's backward reads twice, and rows to a multiprocessor among which the first and
#: the last turn are short: 1000 x 16384 in bf16 took 53 us, and 55 in two reads, 500 x 12288 32 and 24. The same of
#: rows with a mean, which others take in parts: 1000 x 12288 takes 38 us, and 34 in parts, 4096 x 16384 115 and 131.
LONG_ROW, LEAST_ROWS, LEAST_MEAN_ROWS = 8192, 8, 16
#: Elements of a row up to which the registers of 16 warps hold two sums of each and an activation's values.
MOST_ACTIVATED = 12288
#: Elements of a row beyond which Triton's backward reads twice whatever the row is, and the least input, in bytes, from
#: which one read in parts is faster then, of narrow loads and of others: layer_norm of (260, 16387) in fp16 takes 18.5
#: us so, and 21.7, of (132, 25001) 18.0 and 18.4, rms_norm of (264, 24576) in bf16 22.1 and 24.0, but layer_norm of
#: (66, 65536) 21.2 and 19.6. Of a dear activation it is less: layer_norm of (132, 16387) in fp16 with gelu takes 18.5
#: us so, and 19.5, rms_norm of (40, 61593) in bf16 with gelu 16.8 and 18.6, but of (47, 61182) with silu 17.1 and 14.4.
LONGEST_ROW, LEAST_DEAR_PARTS, LEAST_NARROW_PARTS, LEAST_PARTS = 16384, 4 << 20, 6 << 20, 10 << 20
#: The same of shorter rows: with a mean or of 32 bits, of rows that are longer than NARROW_ROW alone, and of 16 bits
#: without a mean.
LEAST_MEAN_PARTS, NARROW_ROW, LEAST_SHORT_PARTS, LEAST_RMS_PARTS = 16 << 20, 4096, 24 << 20, 28 << 20
#: The same of rows of more than LONG_ROW elements with narrow loads and a smooth activation, with a mean and without:
#: layer_norm of (300, 9001) in fp16 with silu takes 17.0 us so, and 22.3, of (200, 9001) 18.1 and 16.4, rms_norm of
#: (900, 9001) with gelu 33.3 and 41.5, of (400, 12001) in bf16 with silu 22.1 and 23.0. The last one is that of rows
#: with one of the two and a mean: layer_norm of (700, 9001) in bf16 takes 23.9 us so, and 29.6, of (700, 9000) with
#: silu 25.9 and 31.2, of (472, 11008) in fp16 with silu 22.5 and 26.4.
LEAST_BOTH_PARTS, LEAST_BOTH_RMS_PARTS, LEAST_EITHER_PARTS = 5 << 20, 9 << 20, 19 << 19
#: Elements of a plane up to which a second read of it comes from the L1: in steps the backward of (55, 909, 48, 105) in
#: fp16 with relu took 386 us, and 505 in one read, of (20, 256, 10400) with silu 113 and 132, of (32, 256, 96, 100)
#: 136 and 146, of (20, 256, 12000) in bf16 109 and 111, but of (12, 256, 20000) with relu 121 and 120.
MOST_STEPPED = 16384
#: Multiprocessors of the device on which all of these figures were measured.
PROCESSORS = 132


@cache
def unavailable() -> str | None:
    """None, or why no kernel of this backend can run on this machine."""
    reason = triton.unavailable()
    if reason is not None:
        return reason
    if triton.interpreted():
        return "Triton's interpreter runs blocks one after another, these wait for one another"
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None or torch.cuda.get_device_capability() < (9, 0):
        return "needs an NVIDIA GPU of compute capability 9.0 or later"
    try:
        from fusednorm.private import gluon_names  # noqa: F401
    except ImportError:
        return "this release of Triton has no Gluon"
    return None


@cache
def processors() -> int:
    """The multiprocessors of the current device; without one, those of the device that was measured."""
    import torch

    if not torch.cuda.is_available():
        return PROCESSORS
    count: int = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return count


def _unsupported(problem: Problem) -> str | None:
    """What no instance of this backend runs, or None."""
    if problem.direction not in ("forward", "backward", "backward_data"):
        return f"runs no {problem.direction}"
    if problem.quantized is not None:
        return "gives no output of 8 bits"
    if problem.dtype == "float64":
        return "computes in float32"
    if problem.view.numel == 0:
        return "there are no elements"
    return None


def _other_order(problem: Problem, order: str) -> str | None:
    """What memory order an instance needs, if not the problem's, or None. Of one position there is none."""
    return None if problem.layout.order == order and problem.view.spatial > 1 else f"needs {order}"


def _of_units(problem: Problem, across: bool = False) -> str | None:
    """Why the statistics are not means and deviations of groups of a sample, or of channels ``across`` samples, or
    None."""
    if (problem.norm.per_batch and not across) or problem.norm.per_position:
        return "the statistics are not those of single units"
    return None if problem.norm.has_mean else "takes norms with a mean"


def _across(problem: Problem) -> str | None:
    """Why hopper.resident does not take channels of all samples, where they are the units, or None."""
    if not problem.norm.per_batch:
        return None
    if not problem.norm.training:
        return "the statistics are given"
    if problem.modulated:
        return "takes no scale and shift of the samples that share a statistic"
    # Beyond a unit's end, where a division may be wrong, the kernels load and store nothing.
    return (
        None if shifted(problem) or divides(unit_vectors(problem), channel_vectors(problem)) else "a unit is too long"
    )


def _shifted(problem: Problem) -> str | None:
    """Why hopper.resident does not take channels that are no whole number of vectors of 16 bytes, or None."""
    whole = "a channel is no whole number of vectors of 16 bytes, "
    if not problem.backward:
        return whole + "which the forward needs"
    if problem.added is not None:
        return whole + "which sums around the norm need"
    if problem.view.spatial < 2 * vector_of(problem):
        return whole + "and shorter than two of these"
    view = problem.view
    for layout in filter(None, problem.layouts):
        if view.samples > 1 and layout.sample != view.channels * view.spatial:
            return whole + "and samples are not packed in memory"
    # The kernel counts vectors, and elements beyond whole ones, in 32 bits.
    few = view.samples * view.channels * (view.spatial // vector_of(problem) + vector_of(problem)) < 1 << 31
    return None if few else whole + "and there are too many of these"


def _no_rows(problem: Problem) -> str | None:
    """Why a problem is not the backward of rows, of one group and one position each, or None."""
    if not problem.backward:
        return "runs the backward"
    view = problem.view
    rows = view.spatial == view.groups == 1 and not problem.norm.per_batch
    if not rows or problem.modulated or problem.norm.has_variance:
        return "takes rows, of one group and one position, without modulation"
    if problem.added is not None:
        return "adds nothing around the norm"
    if view.channels > 1 and any(layout.channel != 1 for layout in problem.layouts if layout):
        return "the elements of a row are not neighbours in packed memory"
    return None


def _elsewhere(problem: Problem) -> str | None:
    """Why no kernel of this backend runs on the problem's device, or None."""
    return unavailable() if problem.device == "cuda" else f"runs on cuda, the tensor is on {problem.device}"


def _vectors(problem: Problem, count: int) -> bool:
    return count * DTYPE_BYTES[problem.dtype] % VECTOR_BYTES == 0


def _unadded(problem: Problem) -> str | None:
    """What is around a norm that units on the chip do not add, or None."""
    added = problem.added
    if added is None:
        return None
    if problem.gated_backward:
        return "makes no gradient of a gate"
    if "pre_bias" in added.names:
        return "adds no bias of a convolution"
    if added.grad_numbers and problem.norm.per_batch:
        return "sums no gradient of a number for each sample and channel over all samples"
    if added.obstacle is not None or added.post_layout is None or not problem.backward:
        return added.obstacle
    return None if stores_dz(problem) else "keeps dz as it is stored, and this activation's is rounded"


@dataclass(frozen=True, slots=True)
class ResidentInstance:
    """Norms of channels_first whose units, groups of a sample or channels of all samples, fit the chip, forward and
    backward: a unit stays in the shared memory of its blocks until they have its statistics."""

    name: str = "hopper.resident"

    def supports(self, problem: Problem) -> str | None:
        view = problem.view
        reason = _unsupported(problem) or _other_order(problem, "channels_first") or _of_units(problem, across=True)
        if reason is not None:
            return reason
        reason = _unadded(problem)
        if reason is not None:
            return reason
        for layout in filter(None, problem.layouts):
            if view.channels > 1 and layout.channel != view.spatial:
                return "channels are not packed in memory"
        reason = _shifted(problem) if shifted(problem) else None
        if reason is not None:
            return reason
        reason = _across(problem)
        if reason is not None:
            return reason
        if view.samples * view.groups * view.groups >= 1 << 31:
            return "too many groups"
        reason = _elsewhere(problem)
        if reason is None and resident_for(problem, processors()) is None:
            return "a unit does not fit the shared memory of the chip"
        return reason

    def configs(self, problem: Problem) -> Sequence[ResidentConfig]:
        return configs(problem, processors())

    def plan(self, problem: Problem, config: ResidentConfig | None = None) -> Plan:
        from fusednorm.backends.hopper.plans import resident as plans

        chosen = config or resident_for(problem, processors())
        assert chosen is not None
        make: Any = plans.ResidentForward if problem.added is None else plans.ResidentSumForward
        if problem.backward:
            make = plans.ResidentBackward if problem.added is None else plans.ResidentSumBackward
        return make(problem, chosen, processors())


@dataclass(frozen=True, slots=True)
class SlabsInstance:
    """Norms of channels_last whose slabs, bands of whole groups of a sample, fit the chip, forward and backward: a slab
    stays in the shared memory of its blocks until they have its statistics, or its sums."""

    name: str = "hopper.slabs"

    def supports(self, problem: Problem) -> str | None:
        view = problem.view
        reason = _unsupported(problem) or _other_order(problem, "channels_last") or _of_units(problem)
        if reason is not None:
            return reason
        if problem.backward and problem.added is not None:
            return "adds nothing around the norm"
        reason = _unadded(problem)
        if reason is not None:
            return reason
        for layout in filter(None, problem.layouts):
            if view.channels > 1 and layout.channel != 1:
                return "channels are not neighbours"
            if not _vectors(problem, layout.spatial) or not _vectors(problem, layout.sample):
                return "positions do not begin at 16 bytes"
        if view.samples * view.groups * view.groups >= 1 << 31:
            return "too many groups"
        if slabs_for(problem, processors()) is None:
            return "a slab does not fit the shared memory of the chip"
        return _elsewhere(problem)

    def configs(self, problem: Problem) -> Sequence[SlabsConfig]:
        return slabs_configs(problem, processors())

    def plan(self, problem: Problem, config: SlabsConfig | None = None) -> Plan:
        from fusednorm.backends.hopper.plans import slabs as plans

        chosen = config or slabs_for(problem, processors())
        assert chosen is not None
        if problem.backward:
            return plans.SlabsBackward(problem, chosen, processors())
        return (plans.SlabsForward if problem.added is None else plans.SlabsSumForward)(problem, chosen, processors())


@dataclass(frozen=True, slots=True)
class ColumnsInstance:
    """channels_first with statistics for each position, forward and backward: all channels of a block's positions stay
    in its shared memory."""

    name: str = "hopper.columns"

    def supports(self, problem: Problem) -> str | None:
        reason = _unsupported(problem) or _other_order(problem, "channels_first")
        if reason is not None:
            return reason
        if not problem.norm.per_position:
            return "the statistics are not those of single positions"
        if problem.added is not None:
            return "adds nothing around the norm"
        if not _vectors(problem, problem.view.spatial):
            return "a channel is no whole number of vectors of 16 bytes"
        for layout in filter(None, problem.layouts):
            if layout.spatial != 1 or not _vectors(problem, layout.sample) or not _vectors(problem, layout.channel):
                return "channels do not begin at 16 bytes"
        if columns_for(problem, processors()) is None:
            return "the channels do not fit the shared memory of a multiprocessor"
        return _elsewhere(problem)

    def configs(self, problem: Problem) -> Sequence[ColumnsConfig]:
        return columns_configs(problem, processors())

    def plan(self, problem: Problem, config: ColumnsConfig | None = None) -> Plan:
        from fusednorm.backends.hopper.plans.columns import ColumnsBackward, ColumnsForward

        chosen = config or columns_for(problem, processors())
        assert chosen is not None
        return (ColumnsBackward if problem.backward else ColumnsForward)(problem, chosen)


@dataclass(frozen=True, slots=True)
class RowsInstance:
    """The backward of rows: a row of the input and of grad_output stays in the shared memory of a block until it has
    its sums."""

    name: str = "hopper.rows"

    def supports(self, problem: Problem) -> str | None:
        reason = _unsupported(problem) or _no_rows(problem)
        if reason is not None:
            return reason
        for layout in filter(None, problem.layouts):
            if not _vectors(problem, problem.view.channels) or not _vectors(problem, layout.sample):
                return "a row is no whole number of vectors of 16 bytes in packed memory"
        if rows_for(problem) is None:
            return "rows do not fit the shared memory of a multiprocessor"
        return _elsewhere(problem)

    def configs(self, problem: Problem) -> Sequence[RowsConfig]:
        return rows_configs(problem)

    def plan(self, problem: Problem, config: RowsConfig | None = None) -> Plan:
        from fusednorm.backends.hopper.plans.rows import RowsBackward

        chosen = config or rows_for(problem)
        assert chosen is not None
        return RowsBackward(problem, chosen, processors())


@dataclass(frozen=True, slots=True)
class RowPartsInstance:
    """The backward of rows of any length: parts of a row stay in the shared memory of a team's blocks until they have
    the row's sums."""

    name: str = "hopper.row_parts"

    def supports(self, problem: Problem) -> str | None:
        reason = _unsupported(problem) or _no_rows(problem)
        if reason is not None:
            return reason
        if problem.view.channels < 2 * vector_of(problem):
            return "rows are shorter than two vectors of 16 bytes"
        for layout in filter(None, problem.layouts):
            if not _vectors(problem, layout.sample - problem.layout.sample):
                return "rows begin at other places in vectors of 16 bytes in one tensor than in another"
        if row_parts_for(problem, processors()) is None:
            return "rows do not fit the shared memory of the chip"
        return _elsewhere(problem)

    def configs(self, problem: Problem) -> Sequence[RowPartsConfig]:
        return row_parts_configs(problem, processors())

    def plan(self, problem: Problem, config: RowPartsConfig | None = None) -> Plan:
        from fusednorm.backends.hopper.plans.row_parts import RowPartsBackward

        chosen = config or row_parts_for(problem, processors())
        assert chosen is not None
        return RowPartsBackward(problem, chosen)


RESIDENT, SLABS, COLUMNS, ROWS, ROW_PARTS = (
    ResidentInstance(),
    SlabsInstance(),
    ColumnsInstance(),
    RowsInstance(),
    RowPartsInstance(),
)
INSTANCES = (RESIDENT, SLABS, COLUMNS, ROWS, ROW_PARTS)


def _suits_slabs(problem: Problem) -> bool:
    """Whether slabs are faster in one read: where all threads have channels, and pieces are halves of vectors or more,
    or channels; 32x512x64x64 in bf16 takes 79 us, and 107 in two reads; 16x320x64x64, pieces of 2 channels and 10 lanes
    of 16, 41 and 35. In 32 bits halves of vectors are too little: (20, 64, 80, 80) in 32 groups with silu took 33, and
    28, (20, 64, 100, 100) 47 and 41, (20, 32, 120, 120) in 16 35 and 30. Channels that are groups must not need
    leaders, which would merge one for each: instance_norm of 12x128x112x112 in bf16 with relu takes 56, and 32, nor
    leave chunks empty, of 64x512x28x28 in fp16 44 and 43. Nor may others wait for a leader one wave behind:
    4x128x300x300 in bf16 with silu takes 79, and 75. Nor is there a gain with arithmetic that hides a second read:
    86x128x56x43 in 32 groups in bf16 with gelu took 64, and 47."""
    if _dear(problem):
        return False
    config = slabs_for(problem, processors())
    assert config is not None
    place = slabs_spread(problem, config, processors())
    assert place is not None
    if place.held & (place.held - 1) or (place.held < LEAST_HELD and place.bands > 1):
        return False
    if problem.view.group_channels == 1:
        return not place.leads and place.filled(problem) >= LEAST_FILLED
    if place.leads and place.lag == 1:
        return False
    halves = 2 if DTYPE_BYTES[problem.dtype] == 2 else 1
    return halves * span(problem) >= vector_of(problem)


def _suits_rows(problem: Problem) -> bool:
    """Whether one read of rows is faster: 8220 x 14336 in bf16 took 213 us, and 362 in two. Not with the arithmetic of
    a smooth activation, once for each of the two sums and once for the gradient, nor where two sums of each column
    leave no registers for any: layer_norm of 2396 x 13168 in bf16 with silu took 173 us, and 114 in two reads. Nor in
    32 bits: rms_norm of 2000 x 8196 took 83 us, and 54 in the registers of Triton's programs."""
    norm, channels = problem.norm, problem.view.channels
    if DTYPE_BYTES[problem.dtype] != 2 or norm.smooth or channels <= LONG_ROW:
        return False
    if norm.activation is not None and norm.has_mean and channels > MOST_ACTIVATED:
        return False
    return problem.view.samples >= (LEAST_MEAN_ROWS if norm.has_mean else LEAST_ROWS) * processors()


def _suits_row_parts(problem: Problem) -> bool:
    """Whether one read of rows in parts is faster: layer_norm of (1500, 30002) in fp16 takes 99 us so, and 148 in two
    reads, of (512, 32768) in bf16 with gelu 64 and 101, of (1600, 8193) 39 and 66, of (1000, 12288) 34 and 37. Where
    Triton reads rows once, it pays with arithmetic that it does with too few registers, or with narrow loads: rms_norm
    of (1000, 16384) in bf16 with silu takes 40.8 us so, and 51.6, of (5000, 9914) 113 and 150, but of (1000, 16384)
    38.2 and 38.3, of (700, 12288) in fp16 24.4 and 24.1. In 32 bits layer_norm of (4000, 6001) with relu takes 90 us
    so, and 100, of (3000, 4097) 54 and 60, of (600, 12289) with silu 37 and 59, but rms_norm of (2000, 8196) 65 and 54,
    layer_norm of (3000, 6144) with gelu 73 and 62. Of shorter rows of 16 bits rms_norm of (5000, 4099) with gelu takes
    93 us so, and 108, layer_norm of (5000, 5003) with silu 78 and 86, but of (4000, 7001) with leaky_relu 75 and 75,
    rms_norm of (1500, 7501) 32 and 26."""
    norm, length, size = problem.norm, problem.view.channels, DTYPE_BYTES[problem.dtype]
    total, narrow = problem.view.numel * size, load_bytes(problem) < WIDE_LOAD
    if length > LONGEST_ROW:
        return total >= (LEAST_DEAR_PARTS if _dear(problem) else LEAST_NARROW_PARTS if narrow else LEAST_PARTS)
    if size == 4:
        least = NARROW_ROW if narrow else LONG_ROW
        if not (norm.has_mean or norm.smooth):
            least = LONGEST_ROW * 3 // 4
        return length > least and total >= LEAST_MEAN_PARTS
    both, either = narrow and norm.smooth, narrow or norm.smooth
    if length > LONG_ROW and norm.has_mean:
        return total >= (LEAST_BOTH_PARTS if both else LEAST_EITHER_PARTS if either else LEAST_MEAN_PARTS)
    if length > LONG_ROW:
        return either and total >= (LEAST_BOTH_RMS_PARTS if both else LEAST_RMS_PARTS)
    return both and length > NARROW_ROW and total >= LEAST_SHORT_PARTS


def choose(problem: Problem) -> Instance | None:
    """The instance for a problem, or None where Triton's are faster.

    One read pays where the chunks of a problem take several waves, so that the copies of one overlap with the sums and
    the results of others: 8x128x256x256 in bf16 takes 75 us, and 101 in two reads, its backward with relu 107 and 161.
    In a single wave nothing overlaps, and a second read, from the L2, is as fast. But batch_norm of short planes has
    one launch for two: (45, 128, 384) in bf16 with relu takes 7.4 us so, and 8.7 in two reads, (60, 64, 32, 32) in fp16
    9.2 and 10.4, (100, 128, 24, 24) in bf16 14.4 and 15.8, but in chunks of five tiles (45, 256, 28, 28) in fp16 with
    silu 19.4, and 18.6, of longer planes (32, 64, 56, 56) in bf16 14.2, and 13.5, in fp32 (23, 16, 64, 64) 8.5, and
    7.8. And a full wave of full chunks is faster: (2, 640, 64, 64) in 32 groups in bf16 with silu takes 10.5 us so, and
    12.3 in two reads, (2, 320, 128, 128) 17.4 and 18.2, instance_norm of (2, 128, 32, 32, 32) with leaky_relu 13.2 and
    14.1, but (8, 320, 64, 64) in chunks of five tiles 17.8, and 17.7. Arithmetic hides a second read too: instance_norm
    of (2, 320, 192, 192) in fp16 with gelu, whose last chunks were half full, took 51 us, and 41 in tiles, of (8, 10,
    240, 520) in fp32 with scale and shift and gelu_tanh 32 and 30, the backward of (3, 768, 128, 64) in 32 groups in
    bf16 with these and gelu 68 and 58. That of silu does not: (32, 256, 56, 56) in 32 groups in bf16, whose planes no
    tile divides, takes 38 us, and 45 in two reads.
    """
    if problem.norm.per_position:
        return COLUMNS if COLUMNS.supports(problem) is None else None
    if _no_rows(problem) is None:  # what suits is asked first, since parts are slow to find
        if _suits_rows(problem) and ROWS.supports(problem) is None:
            return ROWS
        return ROW_PARTS if _suits_row_parts(problem) and ROW_PARTS.supports(problem) is None else None
    small = problem.view.numel * DTYPE_BYTES.get(problem.dtype, 0) < _least_bytes(problem)
    if small and not _may_take_one_wave(problem):
        return None
    chosen = triton.choose(problem)
    if chosen is not triton.TILES and not _are_long_planes(problem, chosen):
        return None
    if SLABS.supports(problem) is None:
        return SLABS if _suits_slabs(problem) else None
    if RESIDENT.supports(problem) is not None:
        return None
    config = resident_for(problem, processors())
    assert config is not None
    place = spread(problem, config, processors())
    assert place is not None
    if small:
        full = place.even and place.works(config, processors()) >= FULL_WAVE
        pays = config.tiles <= FEW_TILES if problem.norm.per_batch else full and config.tiles <= FULL_WAVE_TILES
        return RESIDENT if place.waves == 1 and pays else None
    if problem.backward:
        return None if place.works(config, processors()) < _least_working(problem) or _dear(problem) else RESIDENT
    dear = _dear(problem) and unit_vectors(problem) % LONG_CHUNK != 0
    if ragged(problem, config):
        dear = dear or problem.norm.activation_flops >= DEAR or (problem.added is not None and _busy(problem))
    return None if dear else RESIDENT


def _are_long_planes(problem: Problem, chosen: Instance) -> bool:
    """Whether Triton walks over planes in steps, or holds them whole, that are long for that: in one read of blocks
    together the forward of (3, 768, 160, 160) in fp16 takes 66 us, and 79 whole, of (8, 256, 168, 168) in bf16 62 and
    72, of (12, 96, 150, 152) in fp16 32 and 40, of (20, 128, 136, 136) with relu 57, and 63 in steps, of (30, 128, 140,
    144) in bf16 with silu 88 and 100."""
    if problem.reduced <= MOST_STEPPED:
        return False
    if problem.backward:
        return chosen is triton.ROWS
    alone = problem.added is None and DTYPE_BYTES[problem.dtype] == 2
    return alone and chosen in (triton.ROWS, triton.WHOLE)


def _may_take_one_wave(problem: Problem) -> bool:
    """Whether a small problem is a forward of 16 bits in contiguous memory, without sums around it or a dear
    activation, of batch_norm over short planes or of other units that whole tiles divide: spreading others over blocks
    would take 0.1 ms for each new problem."""
    size = DTYPE_BYTES.get(problem.dtype, 0)
    if size != 2 or problem.direction != "forward" or problem.added is not None or _dear(problem):
        return False
    if problem.norm.per_batch:
        return problem.view.spatial * size <= SHORT_PLANE
    return problem.layout.order == "channels_first" and unit_vectors(problem) % LEAST_TILE == 0


def _least_bytes(problem: Problem) -> int:
    """The least input whose chunks take several waves."""
    if not problem.backward or problem.layout.order != "channels_first":
        return LEAST_BYTES
    narrow = problem.dtype == "float32" and load_bytes(problem) < WIDE_LOAD and not problem.norm.per_batch
    return LEAST_NARROW_BACKWARD_BYTES if narrow else LEAST_BACKWARD_BYTES


def _least_working(problem: Problem) -> float:
    """The share of blocks and chunks that work from which on a backward of units is faster in one read."""
    if DTYPE_BYTES[problem.dtype] != 2:
        return LEAST_WORKING_WIDE
    if problem.norm.per_batch or load_bytes(problem) >= WIDE_LOAD:
        return LEAST_WORKING
    return LEAST_WORKING_BUSY if _busy(problem) else LEAST_WORKING_WIDE


def _busy(problem: Problem) -> bool:
    """Whether an activation takes a part of the time of a second read."""
    return problem.norm.activation_flops >= (BUSY if DTYPE_BYTES[problem.dtype] == 2 else DEAR)


def _dear(problem: Problem) -> bool:
    """Whether an activation takes as long as a second read of 16 bits."""
    return problem.norm.activation_flops >= DEAR and DTYPE_BYTES[problem.dtype] == 2
