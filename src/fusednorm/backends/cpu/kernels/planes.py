"""Kernels of the channels_first order, where each channel of each sample is a contiguous row of S elements.

A unit is what one statistic covers: the D rows of a group, or for batch_norm the N rows of a channel. With enough units
one kernel takes each unit from its statistics to its result while the unit lies in cache. With few units rows are cut
into pieces, and the statistics of all pieces are combined before the second pass.
"""

from __future__ import annotations

from functools import cache, partial

from fusednorm.backends.cpu.geometry import (
    BIAS_DTYPE,
    GRAD_SAMPLE,
    GRAD_STEP,
    GROUP_CHANNELS,
    GROUPS,
    INPUT_SAMPLE,
    INPUT_STEP,
    KEPT_WORKER,
    OUTPUT_SAMPLE,
    OUTPUT_STEP,
    PER_BATCH,
    PIECE,
    PIECES,
    POST_SAMPLE,
    POST_STEP,
    RMS,
    SAMPLES,
    SCALE_DTYPE,
    SCRATCH,
    SHIFT_DTYPE,
    SPATIAL,
    TRAINING,
    WANT_INPUT_GRAD,
    WEIGHT_DTYPE,
)
from fusednorm.backends.cpu.kernels.affine import affine, channel_affines, publish, reduced_count
from fusednorm.backends.cpu.kernels.device import exact
from fusednorm.backends.cpu.kernels.elements import Element, prefetch
from fusednorm.backends.cpu.kernels.elements import element as accesses
from fusednorm.backends.cpu.kernels.mathematics import identity
from fusednorm.backends.cpu.kernels.moments import merge, moments, strided_moments, units_together
from fusednorm.backends.cpu.kernels.operands import converting, rounded_number
from fusednorm.backends.cpu.kernels.plane_rows import (
    gradient_maker,
    kept_length,
    row_applier,
    row_keeper,
    row_summer,
)
from fusednorm.backends.cpu.kernels.variants import backwards
from fusednorm.problem import DTYPE_BYTES

FEW_ROWS = 4  # A and B of so few rows are made one by one: vector code would take longer to begin
#: Bytes of units of several rows, and of each row, up to which the next unit is fetched while a unit is written, and of
#: the tensor from which on: until that unit is read, memory would rest, and no cache has it. On an AMD processor
#: group_norm(32) of (91, 512, 9, 9) in float32 takes 1.08 ms so, and 1.40, (64, 256, 14, 14) 1.50 and 1.80, in bfloat16
#: (91, 512, 16, 16) 3.28 and 4.15. With the arithmetic of an activation in 16 bits memory does not wait ((64, 256, 14,
#: 14) with relu 0.90 and 0.87), and one long row is read as it comes ((64, 64, 48, 64) in float32 4.43 and 4.19).
FETCHED_UNIT, FETCHED_ROW, FETCHED_TENSOR = 16 << 10, 4 << 10, 6 << 20
LINE = 64  # bytes that are fetched at once


@exact
def rows_per_unit(geometry):
    return geometry[SAMPLES] if geometry[PER_BATCH] else geometry[GROUP_CHANNELS]


@exact
def locate(geometry, unit, row):
    """The sample and the channel of a unit's row."""
    if geometry[PER_BATCH]:
        return row, unit
    return unit // geometry[GROUPS], (unit % geometry[GROUPS]) * geometry[GROUP_CHANNELS] + row


@exact
def locate_piece(geometry, task):
    """The unit, row, first position and length of a piece."""
    row, piece = task // geometry[PIECES], task % geometry[PIECES]
    rows = rows_per_unit(geometry)
    first = piece * geometry[PIECE]
    return row // rows, row % rows, first, min(geometry[PIECE], geometry[SPATIAL] - first)


@cache
def fetches(element: Element):
    """fetched(geometry): how many elements of each row of the next unit are fetched; fetch(p, i, n): fetch n
    elements."""
    size = DTYPE_BYTES[element.dtype]
    step = LINE // size

    @exact
    def fetched(geometry):
        rows, row = rows_per_unit(geometry), geometry[SPATIAL] * size
        tensor = geometry[SAMPLES] * geometry[GROUPS] * geometry[GROUP_CHANNELS] * row
        small = rows * row <= FETCHED_UNIT and row <= FETCHED_ROW
        return geometry[SPATIAL] if rows > 1 and small and tensor >= FETCHED_TENSOR else 0

    @exact
    def fetch(p, i, n):
        for k in range(0, n, step):
            prefetch(p, i + k)

    return fetched, fetch


@cache
def saved_statistics(element: Element):
    rounded, T = rounded_number(element), element.compute

    @exact
    def saved(given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, geometry, unit):
        """The mean and rstd that a unit's forward has saved, in the compute dtype."""
        centre = 0.0 if geometry[RMS] else rounded(given_mean, unit, given_mean_dtype)
        return T(centre), T(rounded(given_rstd, unit, given_rstd_dtype))

    return saved


@cache
def moments_of_units(element: Element):
    row_moments, column_moments = moments(element), strided_moments(element)

    @exact
    def unit_moments(x, origin, sample, step, geometry, unit):
        """Mean and M2 of a unit of a tensor with these strides between samples and channels; rows that touch are read
        as one, and rows of one element each at their step."""
        rows, length, rms = rows_per_unit(geometry), geometry[SPATIAL], geometry[RMS]
        if length == 1 and rows > 1:
            n, c = locate(geometry, unit, 0)
            return column_moments(x, origin + n * sample + c * step, sample if geometry[PER_BATCH] else step, rows, rms)
        if not geometry[PER_BATCH] and step == length:
            rows, length = 1, rows * length
        count, mean, m2 = 0, 0.0, 0.0
        for row in range(rows):
            n, c = locate(geometry, unit, row)
            row_mean, row_m2 = row_moments(x, origin + n * sample + c * step, length, rms)
            count, mean, m2 = merge(count, mean, m2, length, row_mean, row_m2)
        return mean, m2

    return unit_moments


@exact
def place_of(geometry, sample, step, n, c):
    """Where a row begins; ``sample`` and ``step`` are the fields of the geometry with the strides of its tensor."""
    return n * geometry[sample] + c * geometry[step]


@exact
def row_step(geometry, sample, step):
    """From a row of a unit to the next."""
    return geometry[sample] if geometry[PER_BATCH] else geometry[step]


@exact
def row_place(geometry, n, c, row):
    """The sample and channel so many rows further in a unit."""
    return (n + row, c) if geometry[PER_BATCH] else (n, c + row)


@cache
def _row_affines(element: Element):
    channel_affine, several, convert = affine(element), channel_affines(element), converting(element)
    scratch = accesses("float64").scratch

    @exact
    def row_affines(weight, bias, scale, shift, geometry, n, c, rows, gains, offsets):
        """A and B of so many rows of a unit, from channel c of sample n on."""
        modulated, per_batch = geometry[SCALE_DTYPE] + geometry[SHIFT_DTYPE] > 0, geometry[PER_BATCH] > 0
        if rows <= FEW_ROWS or (modulated and per_batch):
            for row in range(rows):
                gains[row], offsets[row] = channel_affine(weight, bias, scale, shift, geometry, n, c)
                n, c = (n + 1, c) if per_batch else (n, c + 1)
            return
        if not per_batch:
            several(weight, bias, scale, shift, geometry, n, c, rows, gains, offsets, scratch(), scratch())
            return
        convert(weight, c, geometry[WEIGHT_DTYPE], 1.0, gains, 0, 1)
        convert(bias, c, geometry[BIAS_DTYPE], 0.0, offsets, 0, 1)
        for row in range(1, rows):
            gains[row], offsets[row] = gains[0], offsets[0]

    return row_affines


def build_forward(element: Element, value, pullback):
    """Units start to stop, each or a few short ones from statistics to output."""
    unit_moments, keep, apply_row = moments_of_units(element), publish(element), row_applier(element, value)
    row_affines, scratch, at_once = _row_affines(element), accesses("float64").scratch, units_together(element)
    fetched, fetch = fetches(element)
    waits = value is identity or DTYPE_BYTES[element.dtype] > 2  # for memory, not for arithmetic

    def forward(
        x, y, mean, rstd, variance, weight, bias, scale, shift, geometry, eps, activation_parameter, start, stop
    ):
        gains, offsets, centres, inverses = scratch(), scratch(), scratch(), scratch()
        rows, length = rows_per_unit(geometry), geometry[SPATIAL]
        input_step = row_step(geometry, INPUT_SAMPLE, INPUT_STEP)
        output_step = row_step(geometry, OUTPUT_SAMPLE, OUTPUT_STEP)
        together = at_once(rows * length)
        ahead = together * rows * input_step
        length_ahead = fetched(geometry) if waits and not geometry[PER_BATCH] else 0
        for begin in range(start, stop, together):
            units = min(together, stop - begin)
            for u in range(units):
                centres[u], inverses[u] = unit_moments(
                    x, 0, geometry[INPUT_SAMPLE], geometry[INPUT_STEP], geometry, begin + u
                )
            for u in range(units):
                centres[u], inverses[u] = keep(mean, rstd, variance, geometry, eps, begin + u, centres[u], inverses[u])
            for u in range(units):
                centre, inverse = centres[u], inverses[u]
                n, c = locate(geometry, begin + u, 0)
                i = place_of(geometry, INPUT_SAMPLE, INPUT_STEP, n, c)
                j = place_of(geometry, OUTPUT_SAMPLE, OUTPUT_STEP, n, c)
                for first in range(0, rows, SCRATCH):
                    count = min(SCRATCH, rows - first)
                    m, d = row_place(geometry, n, c, first)
                    row_affines(weight, bias, scale, shift, geometry, m, d, count, gains, offsets)
                    for row in range(count):
                        if length_ahead:
                            fetch(x, i + ahead, length_ahead)
                        apply_row(x, i, y, j, length, centre, inverse, gains[row], offsets[row], activation_parameter)
                        i, j = i + input_step, j + output_step

    return forward


def build_moments(element: Element, value, pullback):
    """The statistics (mean, M2) of pieces start to stop."""
    piece_moments = moments(element)

    def moments_of_pieces(x, partials, geometry, start, stop):
        for task in range(start, stop):
            unit, row, first, length = locate_piece(geometry, task)
            n, c = locate(geometry, unit, row)
            i = n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP] + first
            partials[2 * task], partials[2 * task + 1] = piece_moments(x, i, length, geometry[RMS])

    return moments_of_pieces


def build_statistics(element: Element, value, pullback):
    """The statistics of units start to stop from their pieces' statistics, merged in order."""
    keep = publish(element)

    def statistics(partials, stats, mean, rstd, variance, geometry, eps, start, stop):
        tasks = rows_per_unit(geometry) * geometry[PIECES]
        for unit in range(start, stop):
            count, centre, m2 = 0, 0.0, 0.0
            for task in range(unit * tasks, (unit + 1) * tasks):
                _, _, _, length = locate_piece(geometry, task)
                count, centre, m2 = merge(count, centre, m2, length, partials[2 * task], partials[2 * task + 1])
            stats[2 * unit], stats[2 * unit + 1] = keep(mean, rstd, variance, geometry, eps, unit, centre, m2)

    return statistics


def build_apply(element: Element, value, pullback):
    """The output of pieces start to stop, in the order of memory, from finished statistics."""
    apply_row, channel_affine = row_applier(element, value), affine(element)

    def apply(x, y, stats, weight, bias, scale, shift, geometry, activation_parameter, start, stop):
        channels, pieces = geometry[GROUPS] * geometry[GROUP_CHANNELS], geometry[PIECES]
        plane, piece = start // pieces, start % pieces
        n, c = plane // channels, plane % channels
        for _ in range(start, stop):
            unit = c if geometry[PER_BATCH] else n * geometry[GROUPS] + c // geometry[GROUP_CHANNELS]
            first = piece * geometry[PIECE]
            gain, offset = channel_affine(weight, bias, scale, shift, geometry, n, c)
            apply_row(
                x, n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP] + first,
                y, n * geometry[OUTPUT_SAMPLE] + c * geometry[OUTPUT_STEP] + first,
                min(geometry[PIECE], geometry[SPATIAL] - first), stats[2 * unit], stats[2 * unit + 1], gain, offset,
                activation_parameter,
            )  # fmt: skip
            piece += 1
            if piece == pieces:
                piece, c = 0, c + 1
            if c == channels:
                n, c = n + 1, 0

    return apply


def build_backward(element: Element, value, pullback, keeps=False, adds_behind=False, adds_gradient=False):
    """Units start to stop: p and q of each row, then the input's gradient. Meanwhile the rows of batch_norm's next
    channel, which lie far apart, are fetched: on an AMD processor (16, 1024, 14, 14) in float32 with relu takes 2.33 ms
    so, and 3.10, in bfloat16 1.75 and 1.65.

    Where dz is kept, ``kept`` has room for a unit per worker. With ``adds_behind`` it is the gradient of z + post_add,
    and is stored too; with ``adds_gradient`` dx gets ``grad_total``.
    """
    keep_row, row_sums = row_keeper(element, pullback, adds_behind), row_summer(element, pullback, keeps)
    gradient_row = gradient_maker(element, pullback, keeps, adds_gradient)
    row_affines, saved, scratch = _row_affines(element), saved_statistics(element), accesses("float64").scratch
    fetched, fetch = fetches(element)
    waits = element.dtype != "bfloat16"

    def backward(
        grad, x, dx, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, scale, shift, sums,
        kept, post_add, grad_total, grad_post_add, geometry, activation_parameter, worker, start, stop,
    ):  # fmt: skip
        gains, offsets = scratch(), scratch()
        channels, length, rows = geometry[GROUPS] * geometry[GROUP_CHANNELS], geometry[SPATIAL], rows_per_unit(geometry)
        count, training, rms = reduced_count(geometry), geometry[TRAINING], geometry[RMS]
        input_step = row_step(geometry, INPUT_SAMPLE, INPUT_STEP)
        grad_step = row_step(geometry, GRAD_SAMPLE, GRAD_STEP)
        output_step = row_step(geometry, OUTPUT_SAMPLE, OUTPUT_STEP)
        post_step, sums_step = row_step(geometry, POST_SAMPLE, POST_STEP), 2 * channels if geometry[PER_BATCH] else 1
        kept_step = kept_length(length)
        slot = worker * geometry[KEPT_WORKER]
        length_ahead = fetched(geometry) if waits and geometry[PER_BATCH] else 0
        for unit in range(start, stop):
            centre, inverse = saved(given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, geometry, unit)
            n, c = locate(geometry, unit, 0)
            first_i = i = place_of(geometry, INPUT_SAMPLE, INPUT_STEP, n, c)
            first_g = g = place_of(geometry, GRAD_SAMPLE, GRAD_STEP, n, c)
            first_o = o = place_of(geometry, OUTPUT_SAMPLE, OUTPUT_STEP, n, c)
            r, p_of, s = slot, place_of(geometry, POST_SAMPLE, POST_STEP, n, c), 2 * n * channels + c
            total_p, total_q = 0.0, 0.0
            for first in range(0, rows, SCRATCH):
                block = min(SCRATCH, rows - first)
                m, d = row_place(geometry, n, c, first)
                row_affines(weight, bias, scale, shift, geometry, m, d, block, gains, offsets)
                for row in range(block):
                    gain, offset = gains[row], offsets[row]
                    if keeps:
                        keep_row(
                            grad, g, x, i, kept, r, post_add, p_of, grad_post_add, o, length, centre, inverse, gain,
                            offset, activation_parameter,
                        )  # fmt: skip
                    p, q = row_sums(
                        grad, g, x, i, kept, r, length, centre, inverse, gain, offset, activation_parameter
                    )  # fmt: skip
                    sums[s], sums[s + channels] = p, q
                    total_p += gain * p
                    total_q += gain * q
                    i, g, o, r = i + input_step, g + grad_step, o + output_step, r + kept_step
                    p_of, s = p_of + post_step, s + sums_step
            if not geometry[WANT_INPUT_GRAD]:
                continue
            mean_p = 0.0 if rms else total_p / count
            mean_q = total_q / count
            i, g, o, r = first_i, first_g, first_o, slot
            for first in range(0, rows, SCRATCH):
                block = min(SCRATCH, rows - first)
                if rows > SCRATCH:
                    m, d = row_place(geometry, n, c, first)
                    row_affines(weight, bias, scale, shift, geometry, m, d, block, gains, offsets)
                for row in range(block):
                    if length_ahead:
                        fetch(x, i + geometry[INPUT_STEP], length_ahead)
                        fetch(grad, g + geometry[GRAD_STEP], length_ahead)
                        fetch(dx, o + geometry[OUTPUT_STEP], length_ahead)
                    gradient_row(
                        grad, g, x, i, dx, o, kept, r, length, centre, inverse, gains[row], offsets[row],
                        activation_parameter, mean_p, mean_q, training, grad_total,
                    )  # fmt: skip
                    i, g, o, r = i + input_step, g + grad_step, o + output_step, r + kept_step

    return backward


def build_reduce(element: Element, value, pullback, keeps=False, adds_behind=False):
    """p and q of pieces start to stop. Where dz is kept, ``kept`` has room for all pieces. With ``adds_behind`` it is
    the gradient of z + post_add and is stored too, and ``kept`` has room for a piece per worker."""
    made = keeps or adds_behind
    keep_row, row_sums = row_keeper(element, pullback, adds_behind), row_summer(element, pullback, made)
    channel_affine, saved = affine(element), saved_statistics(element)

    def reduce(
        grad, x, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, scale, shift, partials,
        kept, post_add, grad_post_add, geometry, activation_parameter, worker, start, stop,
    ):  # fmt: skip
        for task in range(start, stop):
            slot = task * kept_length(geometry[PIECE]) if keeps else worker * geometry[KEPT_WORKER]
            unit, row, first, length = locate_piece(geometry, task)
            n, c = locate(geometry, unit, row)
            centre, inverse = saved(given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, geometry, unit)
            gain, offset = channel_affine(weight, bias, scale, shift, geometry, n, c)
            g = n * geometry[GRAD_SAMPLE] + c * geometry[GRAD_STEP] + first
            i = n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP] + first
            if made:
                keep_row(
                    grad, g, x, i, kept, slot, post_add, n * geometry[POST_SAMPLE] + c * geometry[POST_STEP] + first,
                    grad_post_add, n * geometry[OUTPUT_SAMPLE] + c * geometry[OUTPUT_STEP] + first, length, centre,
                    inverse, gain, offset, activation_parameter,
                )  # fmt: skip
            partials[2 * task], partials[2 * task + 1] = row_sums(
                grad, g, x, i, kept, slot, length, centre, inverse, gain, offset, activation_parameter
            )

    return reduce


def build_combine(element: Element, value, pullback):
    """p and q of each row, and P / K and Q / K of units start to stop, from the pieces in order."""
    channel_affine = affine(element)

    def combine(partials, weight, bias, scale, shift, sums, totals, geometry, start, stop):
        channels, pieces = geometry[GROUPS] * geometry[GROUP_CHANNELS], geometry[PIECES]
        rows, count = rows_per_unit(geometry), reduced_count(geometry)
        for unit in range(start, stop):
            total_p, total_q = 0.0, 0.0
            for row in range(rows):
                n, c = locate(geometry, unit, row)
                p, q = 0.0, 0.0
                for task in range((unit * rows + row) * pieces, (unit * rows + row + 1) * pieces):
                    p += partials[2 * task]
                    q += partials[2 * task + 1]
                i = 2 * n * channels + c
                sums[i], sums[i + channels] = p, q
                gain, _ = channel_affine(weight, bias, scale, shift, geometry, n, c)
                total_p += gain * p
                total_q += gain * q
            totals[2 * unit], totals[2 * unit + 1] = 0.0 if geometry[RMS] else total_p / count, total_q / count

    return combine


def build_input_gradient(element: Element, value, pullback, keeps=False, adds_behind=False, adds_gradient=False):
    """The input's gradient of pieces start to stop, for a kernel without an activation from dz that was kept, or with
    ``adds_behind`` is there as the gradient of z + post_add; with ``adds_gradient`` dx gets ``grad_total``."""
    gradient_row = gradient_maker(element, pullback, keeps, adds_gradient)
    channel_affine, saved = affine(element), saved_statistics(element)
    sample, step = (OUTPUT_SAMPLE, OUTPUT_STEP) if adds_behind else (GRAD_SAMPLE, GRAD_STEP)

    def input_gradient(
        grad, x, dx, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, scale, shift, totals,
        kept, grad_total, grad_post_add, geometry, activation_parameter, start, stop,
    ):  # fmt: skip
        dz = grad_post_add if adds_behind else grad
        for task in range(start, stop):
            unit, row, first, length = locate_piece(geometry, task)
            n, c = locate(geometry, unit, row)
            centre, inverse = saved(given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, geometry, unit)
            gain, offset = channel_affine(weight, bias, scale, shift, geometry, n, c)
            gradient_row(
                dz, n * geometry[sample] + c * geometry[step] + first,
                x, n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP] + first,
                dx, n * geometry[OUTPUT_SAMPLE] + c * geometry[OUTPUT_STEP] + first,
                kept, task * kept_length(geometry[PIECE]) if keeps else 0, length, centre, inverse, gain, offset,
                activation_parameter, totals[2 * unit], totals[2 * unit + 1], geometry[TRAINING], grad_total,
            )  # fmt: skip

    return input_gradient


BUILDERS = {
    "forward": build_forward,
    "moments": build_moments,
    "statistics": build_statistics,
    "apply": build_apply,
    **backwards(build_backward),
    "reduce": build_reduce,
    "reduce_kept": partial(build_reduce, keeps=True),
    "reduce_behind": partial(build_reduce, adds_behind=True),
    "combine": build_combine,
    "input_gradient": build_input_gradient,
    "input_gradient_kept": partial(build_input_gradient, keeps=True),
    "input_gradient_behind": partial(build_input_gradient, adds_behind=True),
    "input_gradient_total": partial(build_input_gradient, adds_gradient=True),
    "input_gradient_behind_total": partial(build_input_gradient, adds_behind=True, adds_gradient=True),
}
