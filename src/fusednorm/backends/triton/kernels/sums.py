"""The kernels with sums around the norm: s = x + gate pre_add is normalized, and post_add is added to z.

Each is a kernel of another module with more arguments. They are kernels of their own, since every argument costs the
launch of a call without sums time.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from fusednorm.backends.triton.kernels.aggregates import Added, AddedGradients, GatedGradients, Parameters
from fusednorm.backends.triton.kernels.columns import gradients_of_positions, normalize_positions
from fusednorm.backends.triton.kernels.held import held_units_backward, held_units_forward
from fusednorm.backends.triton.kernels.rows import gradients_of_rows
from fusednorm.backends.triton.kernels.tiles import apply_tiles, planes_moments, rows_moments
from fusednorm.backends.triton.kernels.tiles_backward import gradients_of_tiles, reduce_tiles
from fusednorm.backends.triton.kernels.whole import units_forward


@triton.jit(
    do_not_specialize=["units", "reciprocal", "gate_rows"],
    do_not_specialize_on_alignment=[
        "length", "positions", "x_sample", "x_unit", "y_sample", "y_unit", "before_sample", "before_unit",
        "behind_sample", "behind_unit", "gate_step",
    ],
)  # fmt: skip
def whole_sum_forward(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_var, p_out_scale, p_before, p_gate, p_behind,
    p_total, units, length, reciprocal, positions, x_sample, x_unit, y_sample, y_unit, before_sample, before_unit,
    behind_sample, behind_unit, gate_rows, gate_step, eps: tl.float64, activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, VALUE: tl.constexpr, ALPHA: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, S: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr, ONCE: tl.constexpr, PACKED: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, LEADING: tl.constexpr,
    PER_ELEMENT: tl.constexpr, BY_CHANNEL: tl.constexpr, OUT: tl.constexpr, BY_ROW: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """:func:`units_forward` with sums around the norm."""
    added = Added(
        p_before, p_gate, None, p_behind, p_total, before_sample, before_unit, 1, behind_sample, behind_unit, 1,
        gate_rows, gate_step,
    )  # fmt: skip
    units_forward(
        p_x, p_y, Parameters(p_weight, p_bias, p_scale, p_shift), p_mean, p_rstd, p_var, added, units, length,
        reciprocal, positions, x_sample, x_unit, y_sample, y_unit, eps, activation_parameter,
        OVERLAP, RMS, VALUE, ALPHA, G, D, S, EVEN, EARLY, ONCE, PACKED, ALIGN, BLOCK_U, BLOCK_K, LEADING,
        PER_ELEMENT, BY_CHANNEL, p_out_scale, OUT, BY_ROW, NATIVE,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=[
        "positions", "shares", "dy_sample", "dy_row", "x_sample", "x_row", "dx_sample", "dx_row", "behind_sample",
        "behind_row", "steps",
    ],
)  # fmt: skip
def rows_sum_backward(
    p_dy, p_x, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_behind, p_grad_total, p_grad_behind,
    p_partials, p_grad_weight, p_grad_bias,
    rows, positions, shares, dy_sample, dy_row, x_sample, x_row, dx_sample, dx_row, behind_sample, behind_row, steps,
    activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, BIAS: tl.constexpr, K: tl.constexpr,
    ALIGN: tl.constexpr, WINDOW: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    RELOAD: tl.constexpr,
):  # fmt: skip
    """:func:`gradients_of_rows` with sums around the norm."""
    EACH: tl.constexpr = p_scale is not None or p_shift is not None
    gradients_of_rows(
        p_dy, p_x, p_dx, Parameters(p_weight, p_bias, p_scale, p_shift), p_mean, p_rstd,
        AddedGradients(p_behind, p_grad_behind, p_grad_total, behind_sample, 1, behind_row),
        GatedGradients(None, None, None, None, 1, 1, 1, 1), p_partials, p_grad_weight, p_grad_bias, rows, positions,
        positions, shares, dy_sample, dy_row, x_sample, x_row, dx_sample, dx_row, steps, activation_parameter,
        OVERLAP, DERIVATIVE, ALPHA, BIAS, K, ALIGN, WINDOW, BLOCK_U, BLOCK_K, STAGES, RELOAD, EACH, False,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["rows", "gate_rows", "span"],
    do_not_specialize_on_alignment=[
        "positions", "shares", "dy_sample", "dy_row", "x_sample", "x_row", "dx_sample", "dx_row", "behind_sample",
        "behind_row", "before_sample", "before_row", "gate_step", "steps",
    ],
)  # fmt: skip
def rows_gated_backward(
    p_dy, p_x, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_behind, p_grad_total, p_grad_behind,
    p_gate, p_before, p_grad_before, p_gate_sums, p_partials, p_grad_weight, p_grad_bias,
    rows, positions, span, shares, dy_sample, dy_row, x_sample, x_row, dx_sample, dx_row, behind_sample, behind_row,
    before_sample, before_row, gate_rows, gate_step, steps,
    activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, BIAS: tl.constexpr, K: tl.constexpr,
    ALIGN: tl.constexpr, WINDOW: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    RELOAD: tl.constexpr, EACH: tl.constexpr, PER_ELEMENT: tl.constexpr,
):  # fmt: skip
    """:func:`gradients_of_rows` with sums around the norm, of which the one before it is of a product."""
    gradients_of_rows(
        p_dy, p_x, p_dx, Parameters(p_weight, p_bias, p_scale, p_shift), p_mean, p_rstd,
        AddedGradients(p_behind, p_grad_behind, p_grad_total, behind_sample, 1, behind_row),
        GatedGradients(
            p_gate, p_before, p_grad_before, p_gate_sums, before_sample, before_row, gate_rows, gate_step
        ), p_partials, p_grad_weight, p_grad_bias, rows, positions, span, shares, dy_sample, dy_row, x_sample, x_row,
        dx_sample, dx_row, steps, activation_parameter, OVERLAP, DERIVATIVE, ALPHA, BIAS, K, ALIGN, WINDOW, BLOCK_U,
        BLOCK_K, STAGES, RELOAD, EACH, PER_ELEMENT,
    )  # fmt: skip


@triton.jit(
    do_not_specialize_on_alignment=[
        "S", "x_sample", "x_channel", "x_spatial", "before_sample", "before_channel", "before_spatial", "s_sample",
        "s_channel", "s_spatial", "blocks", "by_blocks", "chunks", "by_chunks", "total",
    ],
)  # fmt: skip
def sum_moments_of_planes(
    p_x, p_partials, p_before, p_numbers, p_channels, p_total, C, S, x_sample, x_channel, x_spatial,
    before_sample, before_channel, before_spatial, s_sample, s_channel, s_spatial, blocks, by_blocks: tl.int64,
    chunks, by_chunks: tl.int64, total,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """:func:`planes_moments` of the sum before the norm."""
    added = Added(
        p_before, p_numbers, p_channels, None, p_total, before_sample, before_channel, before_spatial, 1, 1, 1, 1, 1
    )  # fmt: skip
    planes_moments(
        p_x, p_partials, added, C, S, x_sample, x_channel, x_spatial, s_sample, s_channel, s_spatial, blocks,
        by_blocks, chunks, by_chunks,
        total, OVERLAP, RMS, EVEN, ALIGN, WINDOW, BLOCK_C, BLOCK_S, EXACT,
    )  # fmt: skip


@triton.jit(
    do_not_specialize_on_alignment=[
        "S", "x_sample", "x_channel", "x_spatial", "before_sample", "before_channel", "before_spatial", "s_sample",
        "s_channel", "s_spatial", "blocks", "by_blocks", "chunks", "by_chunks", "tiles",
    ],
)  # fmt: skip
def sum_moments_of_rows(
    p_x, p_partials, p_before, p_numbers, p_channels, p_total, C, S, x_sample, x_channel, x_spatial,
    before_sample, before_channel, before_spatial, s_sample, s_channel, s_spatial, blocks, by_blocks: tl.int64,
    chunks, by_chunks: tl.int64, total, tiles,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, REPEAT: tl.constexpr,
    ACROSS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """:func:`rows_moments` of the sum before the norm."""
    added = Added(
        p_before, p_numbers, p_channels, None, p_total, before_sample, before_channel, before_spatial, 1, 1, 1, 1, 1
    )  # fmt: skip
    rows_moments(
        p_x, p_partials, added, C, S, x_sample, x_channel, x_spatial, s_sample, s_channel, s_spatial, blocks,
        by_blocks, chunks, by_chunks,
        total, tiles, OVERLAP, RMS, EVEN, ALIGN, REPEAT, ACROSS, BLOCK_C, BLOCK_S, DEPTH, STAGES, EXACT,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["programs", "partial_spatial", "partial_span"],
    do_not_specialize_on_alignment=[
        "S", "x_sample", "x_channel", "x_spatial", "y_sample", "y_channel", "y_spatial", "blocks", "by_blocks",
        "chunks", "by_chunks",
        "before_sample", "before_channel", "before_spatial", "behind_sample", "behind_channel", "behind_spatial",
        "partial_rows", "partial_chunks",
    ],
)  # fmt: skip
def sum_apply(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_var, p_partials, p_given_mean, p_given_var,
    p_before, p_numbers, p_channels, p_behind, p_total,
    G, D, C, S, x_sample, x_channel, x_spatial, y_sample, y_channel, y_spatial,
    before_sample, before_channel, before_spatial, behind_sample, behind_channel, behind_spatial,
    blocks, by_blocks: tl.int64, chunks, by_chunks: tl.int64, programs,
    total, partial_spatial, partial_rows, partial_chunks, partial_span, eps: tl.float64,
    activation_parameter: tl.float64, OVERLAP: tl.constexpr, RMS: tl.constexpr, VALUE: tl.constexpr,
    ALPHA: tl.constexpr, MERGE: tl.constexpr, GROUPED: tl.constexpr, SHARED: tl.constexpr,
    PER_BATCH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
    WINDOW: tl.constexpr, REPEAT: tl.constexpr, ACROSS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    TILES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, STORED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """:func:`apply_tiles` with sums around the norm. STORED: ``p_x`` is the s that the pass for the moments stores, so
    nothing of it is loaded before that pass has ended."""
    if OVERLAP and STORED:
        gdc_wait()
    added = Added(
        p_before, p_numbers, p_channels, p_behind, p_total, before_sample, before_channel, before_spatial,
        behind_sample, behind_channel, behind_spatial, 1, 1,
    )  # fmt: skip
    apply_tiles(
        p_x, p_y, Parameters(p_weight, p_bias, p_scale, p_shift), p_mean, p_rstd, p_var, p_partials, p_given_mean,
        p_given_var, added, G, D, C, S,
        x_sample, x_channel, x_spatial, y_sample, y_channel, y_spatial, blocks, by_blocks, chunks, by_chunks,
        programs, total,
        partial_spatial, partial_rows, partial_chunks, partial_span, eps, activation_parameter,
        OVERLAP, RMS, VALUE, ALPHA, MERGE, GROUPED, SHARED, PER_BATCH, LAST, EVEN, ALIGN, WINDOW, REPEAT, ACROSS,
        BLOCK_C, BLOCK_S, TILES, BLOCK_R, BLOCK_D, EXACT,
    )  # fmt: skip


@triton.jit(
    do_not_specialize_on_alignment=[
        "S", "dy_sample", "dy_channel", "dy_spatial", "x_sample", "x_channel", "x_spatial",
        "dx_sample", "dx_channel", "dx_spatial", "behind_sample", "behind_channel", "behind_spatial", "blocks",
        "by_blocks", "chunks", "by_chunks", "tiles",
    ],
)  # fmt: skip
def sum_reduce(
    p_dy, p_x, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_behind, p_grad_behind, p_partials,
    G, D, C, S, dy_sample, dy_channel, dy_spatial, x_sample, x_channel, x_spatial, dx_sample, dx_channel, dx_spatial,
    behind_sample, behind_channel, behind_spatial, blocks, by_blocks: tl.int64, chunks, by_chunks: tl.int64,
    total, tiles, activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, SHARED: tl.constexpr,
    PER_BATCH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    REPEAT: tl.constexpr, ACROSS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, FOLD: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """:func:`reduce_tiles` with sums around the norm."""
    reduce_tiles(
        p_dy, p_x, Parameters(p_weight, p_bias, p_scale, p_shift), p_mean, p_rstd, p_partials,
        AddedGradients(p_behind, p_grad_behind, None, behind_sample, behind_channel, behind_spatial), G, D, C, S,
        dy_sample, dy_channel, dy_spatial, x_sample, x_channel, x_spatial, dx_sample, dx_channel, dx_spatial,
        blocks, by_blocks, chunks, by_chunks, total, tiles, activation_parameter,
        OVERLAP, DERIVATIVE, ALPHA, SHARED, PER_BATCH, LAST, EVEN, ALIGN, WINDOW, REPEAT, ACROSS, BLOCK_C, BLOCK_S,
        DEPTH, STAGES, FOLD, NUMBERS,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["parameter_programs", "programs", "channel_programs", "N", "K"],
    do_not_specialize_on_alignment=[
        "S", "dy_sample", "dy_channel", "dy_spatial", "x_sample", "x_channel", "x_spatial",
        "dx_sample", "dx_channel", "dx_spatial", "behind_sample", "behind_channel", "behind_spatial", "blocks",
        "by_blocks", "chunks", "by_chunks", "partial_rows", "partial_chunks",
    ],
)  # fmt: skip
def sum_gradients(
    p_dy, p_x, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_behind, p_grad_total, p_grad_behind,
    p_totals, p_partials,
    p_grad_weight, p_grad_bias, p_grad_scale, p_grad_shift,
    parameter_programs, programs, channel_programs, N,
    G, D, C, S, dy_sample, dy_channel, dy_spatial, x_sample, x_channel, x_spatial, dx_sample, dx_channel, dx_spatial,
    behind_sample, behind_channel, behind_spatial,
    blocks, by_blocks: tl.int64, chunks, by_chunks: tl.int64, total, partial_rows, partial_chunks, K,
    activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, SHARED: tl.constexpr,
    PER_BATCH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    REPEAT: tl.constexpr, ACROSS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, TILES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_N: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """:func:`gradients_of_tiles` with sums around the norm. STORED: ``p_dy`` is the dz that the first pass stores, so
    nothing of it is loaded before that pass has ended."""
    if OVERLAP and STORED:
        gdc_wait()
    gradients_of_tiles(
        p_dy, p_x, p_dx, Parameters(p_weight, p_bias, p_scale, p_shift), p_mean, p_rstd,
        AddedGradients(p_behind, p_grad_behind, p_grad_total, behind_sample, behind_channel, behind_spatial),
        p_totals, p_partials,
        Parameters(p_grad_weight, p_grad_bias, p_grad_scale, p_grad_shift), parameter_programs, programs,
        channel_programs, N, G, D, C, S, dy_sample, dy_channel, dy_spatial, x_sample, x_channel, x_spatial,
        dx_sample, dx_channel, dx_spatial, blocks, by_blocks, chunks, by_chunks, total, partial_rows, partial_chunks, K,
        activation_parameter,
        OVERLAP, DERIVATIVE, ALPHA, SHARED, PER_BATCH, LAST, EVEN, ALIGN, WINDOW, REPEAT, ACROSS, BLOCK_C, BLOCK_S,
        TILES, BLOCK_R, BLOCK_D, CHANNELS, BLOCK_N,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["units", "rows"],
    do_not_specialize_on_alignment=[
        "inverse", "columns", "x_sample", "x_unit", "x_row", "y_sample", "y_unit", "y_row", "before_sample",
        "before_unit",
        "before_row", "behind_sample", "behind_unit", "behind_row",
    ],
)  # fmt: skip
def held_sum_forward(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_var, p_before, p_gate, p_channels, p_behind,
    p_total, units, G, inverse: tl.int64, C, rows, columns,
    x_sample, x_unit, x_row, y_sample, y_unit, y_row,
    before_sample, before_unit, before_row, behind_sample, behind_unit, behind_row, eps: tl.float64,
    activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, VALUE: tl.constexpr, ALPHA: tl.constexpr, AFFINE: tl.constexpr,
    ONE: tl.constexpr, PACKED: tl.constexpr, SPAN: tl.constexpr, APART: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    LEADING_R: tl.constexpr, LEADING_K: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """:func:`held_units_forward` with sums around the norm."""
    added = Added(
        p_before, p_gate, p_channels, p_behind, p_total, before_sample, before_unit, before_row, behind_sample,
        behind_unit, behind_row, 1, 1,
    )  # fmt: skip
    held_units_forward(
        p_x, p_y, Parameters(p_weight, p_bias, p_scale, p_shift), p_mean, p_rstd, p_var,
        added, units, G, inverse, C, rows, columns,
        x_sample, x_unit, x_row, y_sample, y_unit, y_row, eps, activation_parameter,
        OVERLAP, RMS, VALUE, ALPHA, AFFINE, ONE, PACKED, SPAN, APART, ALIGN, BLOCK_U, BLOCK_R, BLOCK_K, LEADING_R,
        LEADING_K, EXACT,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["units", "rows"],
    do_not_specialize_on_alignment=[
        "inverse", "columns", "dy_sample", "dy_unit", "dy_row", "x_sample", "x_unit", "x_row", "dx_sample", "dx_unit",
        "dx_row",
        "behind_sample", "behind_unit", "behind_row",
    ],
)  # fmt: skip
def held_sum_backward(
    p_dy, p_x, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_behind, p_grad_total, p_grad_behind,
    p_partials,
    p_grad_weight, p_grad_bias, p_grad_scale, p_grad_shift, units, G, inverse: tl.int64, C, rows, columns,
    dy_sample, dy_unit, dy_row, x_sample, x_unit, x_row, dx_sample, dx_unit, dx_row,
    behind_sample, behind_unit, behind_row, sums,
    activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, AFFINE: tl.constexpr, ONE: tl.constexpr,
    PACKED: tl.constexpr, SPAN: tl.constexpr, APART: tl.constexpr, ALL_SAMPLES: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    LEADING_R: tl.constexpr, LEADING_K: tl.constexpr,
):  # fmt: skip
    """:func:`held_units_backward` with sums around the norm."""
    held_units_backward(
        p_dy, p_x, p_dx, Parameters(p_weight, p_bias, p_scale, p_shift), p_mean, p_rstd,
        AddedGradients(p_behind, p_grad_behind, p_grad_total, behind_sample, behind_unit, behind_row),
        p_partials, p_grad_weight, p_grad_bias, p_grad_scale, p_grad_shift, units, G, inverse, C, rows, columns,
        dy_sample, dy_unit, dy_row, x_sample, x_unit, x_row, dx_sample, dx_unit, dx_row, sums, activation_parameter,
        OVERLAP, DERIVATIVE, ALPHA, AFFINE, ONE, PACKED, SPAN, APART, ALL_SAMPLES, ALIGN, BLOCK_U, BLOCK_R, BLOCK_K,
        LEADING_R, LEADING_K,
    )  # fmt: skip


@triton.jit(
    do_not_specialize_on_alignment=[
        "S", "x_sample", "x_channel", "y_sample", "y_channel", "before_sample", "before_channel", "behind_sample",
        "behind_channel", "blocks", "by_blocks",
    ]
)  # fmt: skip
def positions_sum_forward(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_before, p_numbers, p_behind, p_total,
    S, x_sample, x_channel, y_sample, y_channel, before_sample, before_channel, behind_sample, behind_channel, blocks,
    by_blocks: tl.int64,
    eps: tl.float64, activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, VALUE: tl.constexpr, ALPHA: tl.constexpr, K: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """:func:`normalize_positions` with sums around the norm."""
    added = Added(
        p_before, p_numbers, None, p_behind, p_total, before_sample, before_channel, 1, behind_sample, behind_channel,
        1, 1, 1,
    )  # fmt: skip
    normalize_positions(
        p_x, p_y, Parameters(p_weight, p_bias, p_scale, p_shift), p_mean, p_rstd, added, S, x_sample, x_channel,
        y_sample, y_channel, blocks, by_blocks, eps, activation_parameter, OVERLAP, RMS, VALUE, ALPHA, K, ALIGN,
        BLOCK_S, BLOCK_C,
    )  # fmt: skip


@triton.jit(
    do_not_specialize_on_alignment=[
        "S", "dy_sample", "dy_channel", "x_sample", "x_channel", "dx_sample", "dx_channel", "behind_sample",
        "behind_channel", "blocks", "by_blocks",
    ]
)  # fmt: skip
def positions_sum_backward(
    p_dy, p_x, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_behind, p_grad_total, p_grad_behind,
    p_partials, p_grad_weight, p_grad_bias,
    S, dy_sample, dy_channel, x_sample, x_channel, dx_sample, dx_channel, behind_sample, behind_channel, blocks,
    by_blocks: tl.int64,
    activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, BIAS: tl.constexpr, K: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """:func:`gradients_of_positions` with sums around the norm."""
    gradients_of_positions(
        p_dy, p_x, p_dx, Parameters(p_weight, p_bias, p_scale, p_shift), p_mean, p_rstd,
        AddedGradients(p_behind, p_grad_behind, p_grad_total, behind_sample, behind_channel, 1), p_partials,
        p_grad_weight, p_grad_bias, S, dy_sample, dy_channel, x_sample, x_channel, dx_sample, dx_channel, blocks,
        by_blocks,
        activation_parameter, OVERLAP, DERIVATIVE, ALPHA, BIAS, K, ALIGN, BLOCK_S, BLOCK_C,
    )  # fmt: skip
