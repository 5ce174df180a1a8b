"""The backward of rows in parts, each on a block, which stay on the chip: input and grad_output are read once.

A team of blocks has a row at a time, and each block has the same columns of all of its team's rows. Thread t has of
these the vectors t, t + THREADS and so on, 16 bytes each: the sums of p and q over the team's rows stay in its
registers, and it reads from shared memory what it wrote or copied there itself. In one turn a block sums its part of a
row, keeps g = A dz in shared memory, where the input is, and publishes the two sums. Then it has those of the row
before from the other blocks, and stores the gradients of that one, while copies of the row behind come.

SHIFTED: rows are no whole number of vectors. Those of a team are a whole number of vectors apart, so that all of them
begin at the same place in a vector, and the columns of a thread are the same in all of them. What lies before the first
whole vector of a row and behind the last one, its ends, a few threads load and store element by element.
"""

from typing import Any, NamedTuple

from fusednorm.backends.hopper.kernels.elements import (
    neighbours_layout,
    offsets_of_ends,
    product_sum_of,
    sum_of,
    tile_layout,
    values_of,
    words_of,
)
from fusednorm.backends.hopper.kernels.exchange import peek, publish, settle
from fusednorm.backends.hopper.kernels.moments import add_pairs
from fusednorm.backends.hopper.kernels.rows import extended, gradients_of, statistics_of
from fusednorm.private.gluon_names import async_load, commit_group, gl, gluon, wait_group


class Part(NamedTuple):
    """The columns of a block: ``count`` vectors of a row from vector ``begin`` on, whose first column is ``column``."""

    begin: Any
    count: Any
    column: Any


class Ends(NamedTuple):
    """The columns of a row's ends, one a thread, which of them the block has, and their weight and bias."""

    o_column: Any
    m_column: Any
    gain: Any
    offset: Any


@gluon.jit
def words_at(p_words, row, stride, part, step, VECTOR: gl.constexpr, WORDS: gl.constexpr, THREADS: gl.constexpr):
    """The words of a step of a row, and which of them there are."""
    o_vector = step * THREADS + gl.arange(0, THREADS, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    o_word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    p_row = p_words + (row.to(gl.int64) * stride // VECTOR + part.begin) * 4
    m_words = (o_vector < part.count)[None, :, None] & (o_word >= 0)[None, None, :]
    return p_row + (o_vector * 4)[None, :, None] + o_word[None, None, :], m_words


@gluon.jit
def begin_copies(
    x_slots, dy_slots, x_slot, dy_slot, p_x, p_dy, row, rows, x_row, dy_row, part,
    STEPS: gl.constexpr, VECTOR: gl.constexpr, WORDS: gl.constexpr, THREADS: gl.constexpr,
):  # fmt: skip
    """Begin to copy the part of a row, if there is one, of the input and of grad_output. They count as one copy."""
    for step in gl.static_range(STEPS):
        p_words, m_words = words_at(p_x, row, x_row, part, step, VECTOR, WORDS, THREADS)
        async_load(x_slots[step].index(x_slot), p_words, mask=m_words & (row < rows))
        p_words, m_words = words_at(p_dy, row, dy_row, part, step, VECTOR, WORDS, THREADS)
        async_load(dy_slots[step].index(dy_slot), p_words, mask=m_words & (row < rows))
    commit_group()


@gluon.jit
def columns_of(part, step, VECTOR: gl.constexpr, THREADS: gl.constexpr, layout: gl.constexpr):
    """The columns of a step, and which of them there are."""
    o_vector = step * THREADS + gl.arange(0, THREADS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    o_element = gl.arange(0, VECTOR, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    o_column = part.column + (o_vector * VECTOR)[None, :, None] + o_element[None, None, :]
    return o_column, (o_vector < part.count)[None, :, None] & (o_element >= 0)[None, None, :]


@gluon.jit
def held(p_numbers, part, step, VECTOR: gl.constexpr, THREADS: gl.constexpr, NEIGHBOURS: gl.constexpr):
    """The numbers of a step's columns in shared memory."""
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    o_column, m_column = columns_of(part, step, VECTOR, THREADS, NEIGHBOURS)
    numbers = gl.allocate_shared_memory(p_numbers.dtype.element_ty, [1, THREADS, VECTOR], SHARED)
    numbers.store(gl.load(p_numbers + o_column, mask=m_column, other=0.0))
    return numbers


@gluon.jit
def words_of_step(x_slots, dy_slots, x_slot, dy_slot, step: gl.constexpr, WORDS: gl.constexpr):
    """The words of a step of the row in these slots."""
    return x_slots[step].index(x_slot).load(WORDS), dy_slots[step].index(dy_slot).load(WORDS)


@gluon.jit
def affine_of_step(
    weights, biases, step: gl.constexpr, THREADS: gl.constexpr, VECTOR: gl.constexpr, VALUES: gl.constexpr
):
    """The weight and bias of a step's columns."""
    b_gain = gl.full([1, THREADS, VECTOR], 1.0, gl.float32, VALUES)
    b_offset = gl.zeros([1, THREADS, VECTOR], gl.float32, VALUES)
    if len(weights) > 0:
        b_gain = weights[step].load(VALUES).to(gl.float32)
    if len(biases) > 0:
        b_offset = biases[step].load(VALUES).to(gl.float32)
    return b_gain, b_offset


@gluon.jit
def ends_of(
    p_weight, p_bias, place, parts, shift,
    K: gl.constexpr, VECTOR: gl.constexpr, THREADS: gl.constexpr, EACH: gl.constexpr,
):  # fmt: skip
    """The first part has those before the first whole vector, the last part those behind the last one."""
    o_column, before, behind = offsets_of_ends(shift, K, VECTOR, THREADS, EACH)
    m_column = (before & (place == 0)) | (behind & (place == parts - 1))
    gain, offset = gl.full([THREADS], 1.0, gl.float32, EACH), gl.zeros([THREADS], gl.float32, EACH)
    if p_weight is not None:
        gain = gl.load(p_weight + o_column, mask=m_column, other=0.0).to(gl.float32)
    if p_bias is not None:
        offset = gl.load(p_bias + o_column, mask=m_column, other=0.0).to(gl.float32)
    return Ends(o_column, m_column, gain, offset)


@gluon.jit
def load_ends(p_x, p_dy, row, rows, x_row, dy_row, ends):
    """The ends of a row of the input and of grad_output, 0 where there are none."""
    m_ends = ends.m_column & (row < rows)
    o_row = row.to(gl.int64)
    b_x = gl.load(p_x + o_row * x_row + ends.o_column, mask=m_ends, other=0.0)
    b_dy = gl.load(p_dy + o_row * dy_row + ends.o_column, mask=m_ends, other=0.0)
    return b_x.to(gl.float32), b_dy.to(gl.float32)


@gluon.jit
def gradients_of_ends(b_x, b_dy, mean, rstd, ends, alpha, DERIVATIVE: gl.constexpr):
    """dz and xhat of a row's ends."""
    b_centred = b_x - mean
    return b_dy * DERIVATIVE(gl.fma(b_centred, ends.gain * rstd, ends.offset), alpha), b_centred * rstd


@gluon.jit
def packet_of(p_packets, row, parts, place):
    """The packet of a part of a row."""
    return p_packets + row.to(gl.int64) * parts + place


@gluon.jit
def sums_of_row(b_packets, p_parts, m_part, factor, MEAN: gl.constexpr):
    """The sums of a row, times ``factor``, of those that its parts published, whose packets were peeked at."""
    b_first, b_second = settle(b_packets, p_parts)
    row_p, row_q = gl.reduce((gl.where(m_part, b_first, 0.0), gl.where(m_part, b_second, 0.0)), 0, add_pairs)
    return row_p * factor if MEAN else factor * 0.0, row_q * factor


@gluon.jit
def store_row(
    p_dx, row, dx_row, part, x_slots, slot, gradients, side, mean, rstd, first, second, end_g, end_xhat, ends,
    SHIFTED: gl.constexpr, WORDS: gl.constexpr, VALUES: gl.constexpr, THREADS: gl.constexpr,
):  # fmt: skip
    """Store the gradients of a part of a row: g rstd + xhat second + first."""
    DTYPE: gl.constexpr = p_dx.dtype.element_ty
    VECTOR: gl.constexpr = 128 // DTYPE.primitive_bitwidth
    scaled = second * rstd
    for step in gl.static_range(len(x_slots)):
        b_centred = values_of(x_slots[step].index(slot).load(WORDS), VALUES, DTYPE) - mean
        b_dx = gl.fma(gradients[step].index(side).load(VALUES), rstd, gl.fma(b_centred, scaled, first))
        p_words = p_dx.to(gl.pointer_type(gl.int32), bitcast=True)
        p_words, m_words = words_at(p_words, row, dx_row, part, step, VECTOR, WORDS, THREADS)
        gl.store(p_words, words_of(b_dx, WORDS, DTYPE), mask=m_words)
    if SHIFTED:
        b_dx = gl.fma(end_g, rstd, gl.fma(end_xhat, second, first))
        gl.store(p_dx + row.to(gl.int64) * dx_row + ends.o_column, b_dx.to(DTYPE), mask=ends.m_column)


@gluon.jit
def store_sums(
    p_sums, b_sums, end_sums, part, ends,
    SHIFTED: gl.constexpr, VECTOR: gl.constexpr, THREADS: gl.constexpr, NEIGHBOURS: gl.constexpr,
):  # fmt: skip
    """Store the sums of columns over the team's rows, where they are wanted. Neighbouring threads store neighbours: a
    thread's vector, of 4 bytes each, would take as many stores, of as many sectors each, as it has elements, which were
    a quarter of the time of (132, 65536)."""
    if p_sums is not None:
        dtype: gl.constexpr = p_sums.dtype.element_ty
        for step in gl.static_range(len(b_sums)):
            o_column, m_column = columns_of(part, step, VECTOR, THREADS, NEIGHBOURS)
            gl.store(p_sums + o_column, gl.convert_layout(b_sums[step], NEIGHBOURS).to(dtype), mask=m_column)
        if SHIFTED:
            gl.store(p_sums + ends.o_column, end_sums.to(dtype), mask=ends.m_column)


@gluon.jit(do_not_specialize=["rows", "dy_row", "x_row", "dx_row", "parts", "teams", "chunk", "inverse_count"])
def row_parts_backward(
    p_dy, p_x, p_dx, p_weight, p_bias, p_mean, p_rstd, p_partials, p_grad_weight, p_grad_bias, p_packets,
    rows, dy_row, x_row, dx_row, parts, teams, chunk, inverse_count: gl.float32, activation_parameter: gl.float64,
    DERIVATIVE: gl.constexpr, ALPHA: gl.constexpr, BIAS: gl.constexpr, K: gl.constexpr, SHIFTED: gl.constexpr,
    PARTS: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """grad_input, and the sums of p and q over a team's rows. K are the elements of a row, in which the strides of rows
    are counted too, ``chunk`` the vectors of a part."""
    DTYPE: gl.constexpr = p_x.dtype.element_ty
    w_dy = p_dy.to(gl.pointer_type(gl.int32), bitcast=True)
    w_x = p_x.to(gl.pointer_type(gl.int32), bitcast=True)
    VECTOR: gl.constexpr = 128 // DTYPE.primitive_bitwidth  # elements
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    MEAN: gl.constexpr = p_mean is not None
    SUMS: gl.constexpr = p_partials is not None or p_grad_weight is not None or p_grad_bias is not None
    WORDS: gl.constexpr = tile_layout(1, 4, WARPS)
    VALUES: gl.constexpr = tile_layout(1, VECTOR, WARPS)
    NEIGHBOURS: gl.constexpr = neighbours_layout(VECTOR, WARPS)
    EACH: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, VALUES))
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])

    block = gl.program_id(0)
    team, place = block // parts, block % parts
    shift = team * (x_row % VECTOR) % VECTOR if SHIFTED else gl.to_tensor(0)
    begin = place * chunk + (shift + VECTOR - 1) // VECTOR
    part = Part(begin, gl.minimum(chunk, (K + shift) // VECTOR - begin), begin * VECTOR - shift)
    o_part = gl.arange(0, PARTS, LANES)
    m_part = o_part < parts
    o_part = gl.where(m_part, o_part, 0)
    alpha = gl.cast(activation_parameter, gl.float32) if ALPHA is None else gl.to_tensor(ALPHA)

    # An allocation to each step: Triton has all threads meet between two copies to one allocation.
    x_slots, dy_slots, gradients, weights, biases, sums_p, sums_q = (), (), (), (), (), (), ()
    for _ in gl.static_range(STEPS):
        x_slots = extended(x_slots, gl.allocate_shared_memory(gl.int32, [3, 1, THREADS, 4], SHARED))
        dy_slots = extended(dy_slots, gl.allocate_shared_memory(gl.int32, [2, 1, THREADS, 4], SHARED))
        gradients = extended(gradients, gl.allocate_shared_memory(gl.float32, [2, 1, THREADS, VECTOR], SHARED))
        sums_p = extended(sums_p, gl.zeros([1, THREADS, VECTOR], gl.float32, VALUES))
        sums_q = extended(sums_q, gl.zeros([1, THREADS, VECTOR], gl.float32, VALUES))
    for slot in gl.static_range(2):
        begin_copies(
            x_slots, dy_slots, slot, slot, w_x, w_dy, team + slot * teams, rows, x_row, dy_row, part, STEPS, VECTOR,
            WORDS, THREADS,
        )  # fmt: skip
    for step in gl.static_range(STEPS):
        if p_weight is not None:
            weights = extended(weights, held(p_weight, part, step, VECTOR, THREADS, NEIGHBOURS))
        if p_bias is not None:
            biases = extended(biases, held(p_bias, part, step, VECTOR, THREADS, NEIGHBOURS))
    ends, end_p, end_q, end_g, end_xhat = Ends(None, None, None, None), None, None, None, None
    if SHIFTED:
        ends = ends_of(p_weight, p_bias, place, parts, shift, K, VECTOR, THREADS, EACH)
        end_p = gl.zeros([THREADS], gl.float32, EACH)
        end_q, end_g, end_xhat = end_p, end_p, end_p
        end_x, end_dy = load_ends(p_x, p_dy, team, rows, x_row, dy_row, ends)
    mean, rstd = statistics_of(p_mean, p_rstd, team, rows)
    # Not those of the first row, since no row is stored yet: two values of a loop that begin as one stay one in MLIR.
    last_mean, last_rstd = gl.to_tensor(0.0), gl.to_tensor(1.0)
    summed, coming, stored, side = gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(2), gl.to_tensor(0)
    for row in range(team, rows, teams):
        last = row - teams
        p_parts = packet_of(p_packets, gl.maximum(last, 0), parts, o_part)
        b_packets = peek(p_parts)
        next_mean, next_rstd = statistics_of(p_mean, p_rstd, row + teams, rows)
        if SHIFTED:
            next_x, next_dy = load_ends(p_x, p_dy, row + teams, rows, x_row, dy_row, ends)
        wait_group(1)
        total_p = gl.zeros([THREADS], gl.float32, EACH)
        total_q = gl.zeros([THREADS], gl.float32, EACH)
        new_p, new_q = (), ()
        for step in gl.static_range(STEPS):
            b_gain, b_offset = affine_of_step(weights, biases, step, THREADS, VECTOR, VALUES)
            x_words, dy_words = words_of_step(x_slots, dy_slots, summed, side, step, WORDS)
            b_dz, b_xhat = gradients_of(
                x_words, dy_words, mean, rstd, b_gain, b_offset, alpha, DERIVATIVE, DTYPE, VALUES
            )
            b_g = b_dz * b_gain
            gradients[step].index(side).store(b_g)
            if MEAN:
                total_p += sum_of(b_g)
            total_q += product_sum_of(b_g, b_xhat, EACH)
            if SUMS:
                new_q = extended(new_q, gl.fma(b_dz, b_xhat, sums_q[step]))
                if BIAS:
                    new_p = extended(new_p, sums_p[step] + b_dz)
        if SUMS:
            sums_q = new_q
            if BIAS:
                sums_p = new_p
        last_end_g, last_end_xhat = end_g, end_xhat
        if SHIFTED:
            b_dz, end_xhat = gradients_of_ends(end_x, end_dy, mean, rstd, ends, alpha, DERIVATIVE)
            end_g = b_dz * ends.gain
            total_p += end_g
            total_q = gl.fma(end_g, end_xhat, total_q)
            end_p += b_dz
            end_q = gl.fma(b_dz, end_xhat, end_q)
            end_x, end_dy = next_x, next_dy
        part_p, part_q = gl.reduce((total_p, total_q), 0, add_pairs)
        publish(packet_of(p_packets, row, parts, place), part_p, part_q)
        if last >= 0:
            factor = -inverse_count * last_rstd
            first, second = sums_of_row(b_packets, p_parts, m_part, factor, MEAN)
            store_row(
                p_dx, last, dx_row, part, x_slots, stored, gradients, 1 - side, last_mean, last_rstd, first, second,
                last_end_g, last_end_xhat, ends, SHIFTED, WORDS, VALUES, THREADS,
            )  # fmt: skip
        begin_copies(
            x_slots, dy_slots, stored, side, w_x, w_dy, row + 2 * teams, rows, x_row, dy_row, part, STEPS, VECTOR,
            WORDS, THREADS,
        )  # fmt: skip
        last_mean, last_rstd, mean, rstd, side = mean, rstd, next_mean, next_rstd, 1 - side
        summed, coming, stored = coming, stored, summed
    turns = (rows - team + teams - 1) // teams
    if turns > 0:
        last = team + (turns - 1) * teams
        p_parts = packet_of(p_packets, last, parts, o_part)
        b_packets = peek(p_parts)
        factor = -inverse_count * last_rstd
        first, second = sums_of_row(b_packets, p_parts, m_part, factor, MEAN)
        store_row(
            p_dx, last, dx_row, part, x_slots, stored, gradients, 1 - side, last_mean, last_rstd, first, second, end_g,
            end_xhat, ends, SHIFTED, WORDS, VALUES, THREADS,
        )  # fmt: skip
    if SUMS:
        p_sums_p, p_sums_q = p_grad_bias, p_grad_weight
        if p_partials is not None:
            p_sums_p = p_partials + team.to(gl.int64) * K
            p_sums_q = p_sums_p + teams.to(gl.int64) * K
        store_sums(p_sums_q, sums_q, end_q, part, ends, SHIFTED, VECTOR, THREADS, NEIGHBOURS)
        if BIAS:
            store_sums(p_sums_p, sums_p, end_p, part, ends, SHIFTED, VECTOR, THREADS, NEIGHBOURS)
