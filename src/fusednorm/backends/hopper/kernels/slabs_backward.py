"""The backward of slabs of channels_last that stay on the chip: input and grad_output are read once.

Slabs, pieces, claims and leaders are those of ``slabs.py``; a chunk has its tiles twice, of the input and of
grad_output. A thread sums dz and dz xhat of each channel of its vector over the positions that it has of a chunk; the
threads that have the same vector add theirs up: p and q, which another launch makes the parameters' gradients of. The
block publishes the sums of A p and A q of each group over its chunk, leaders publish P / K and Q / K of a slab's
groups, and LAG chunks later the block stores dx = rstd (A dz - (P + xhat Q) / K). The numbers that a chunk is summed
with, its groups' statistics and its channels' A and B, are read when its copies begin.
"""

from fusednorm.backends.hopper.kernels.chunks import quotient
from fusednorm.backends.hopper.kernels.claims import claimed, first_pending, led_place, next_pending, pending_at
from fusednorm.backends.hopper.kernels.elements import tile_layout, values_of, words_of
from fusednorm.backends.hopper.kernels.exchange import peek, publish, settle
from fusednorm.backends.hopper.kernels.leaders import lead_sums, leaders_layout
from fusednorm.backends.hopper.kernels.moments import add_pairs
from fusednorm.backends.hopper.kernels.slab_tiles import (
    SlabPlaces,
    affine_of_slab,
    begin_copy,
    channels_of_slab,
    elements_of,
    groups_layout,
    merge_layout,
    of_pieces,
    of_threads,
    offsets_of_rows,
    products_of_repeats,
    rows_of,
    sides_layout,
    store_rows,
    sum_of_threads,
    sums_layout,
    words_of_rows,
)
from fusednorm.private.gluon_names import commit_group, gl, gluon, wait_group


@gluon.jit
def numbers_of_slab(
    p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, places, slab, channels, o_channel, o_final, held_groups,
    VECTOR: gl.constexpr,
):  # fmt: skip
    """A and B of the channels of a slab, the statistics of the groups of its pieces; of a slab beyond the last one,
    those of another."""
    slab = gl.minimum(slab, places.slabs - 1)
    gain, offset = affine_of_slab(p_weight, p_bias, p_scale, p_shift, places, slab, channels, o_channel, VECTOR)
    o_group = slab * held_groups + o_final
    return gain, offset, gl.load(p_mean + o_group), gl.load(p_rstd + o_group)


@gluon.jit
def next_chunk(
    p_claims, last_slab, parts, blocks, known, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, places, channels,
    o_channel, o_final, held_groups, VECTOR: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """The next chunk, and what it is summed with; a slab that there is not where there are no more chunks than
    blocks."""
    if MORE:
        slab, part = claimed(p_claims, last_slab, places.slabs, parts, blocks)
        known = numbers_of_slab(
            p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, places, slab, channels, o_channel, o_final,
            held_groups, VECTOR,
        )  # fmt: skip
    else:
        slab, part = places.slabs + 0, gl.to_tensor(0)
    return slab, part, known


@gluon.jit
def begin_tiles(
    slots, grad_slots, slot, p_x, p_dy, places, slab, part, x_sample, x_row, dy_sample, dy_row, o_x, o_dy,
    PLACE: gl.constexpr, TILES: gl.constexpr, ROWS: gl.constexpr, EVEN: gl.constexpr, FULL: gl.constexpr,
):  # fmt: skip
    """Begin to copy tile PLACE of a chunk, of the input and of grad_output, which count as one copy."""
    p_slot, p_grad_slot = slots.index(slot * TILES + PLACE), grad_slots.index(slot * TILES + PLACE)
    begin_copy(p_slot, p_x, places, slab, part, x_sample, x_row, o_x, PLACE, TILES, ROWS, EVEN, FULL)
    begin_copy(p_grad_slot, p_dy, places, slab, part, dy_sample, dy_row, o_dy, PLACE, TILES, ROWS, EVEN, FULL)
    commit_group()


@gluon.jit(
    do_not_specialize=[
        "positions", "D", "channels", "x_sample", "x_row", "dy_sample", "dy_row", "dx_sample", "dx_row", "held",
        "held_groups", "bands", "slabs", "parts", "magic_bands", "total", "inverse_count",
    ]
)  # fmt: skip
def slabs_backward(
    p_dy, p_x, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_partials, p_packets,
    positions, D, channels, x_sample, x_row, dy_sample, dy_row, dx_sample, dx_row, held, held_groups, bands,
    slabs, parts, magic_bands: gl.uint32, total, inverse_count: gl.float32, activation_parameter: gl.float64,
    DERIVATIVE: gl.constexpr, ALPHA: gl.constexpr, EVEN: gl.constexpr, FULL: gl.constexpr, SPAN: gl.constexpr,
    LANES: gl.constexpr, GROUPS: gl.constexpr, ALONE: gl.constexpr, TILE: gl.constexpr, TILES: gl.constexpr,
    PARTS: gl.constexpr, LEAD: gl.constexpr, LED: gl.constexpr, LAG: gl.constexpr, MORE: gl.constexpr,
    SMOOTH: gl.constexpr,
):  # fmt: skip
    """p and q of each chunk, and grad_input.

    p of part k of channel c of sample n is partial (n, k, c), and q lies ``total`` behind it. ALONE: a piece is a
    group. SMOOTH: the slope of the activation is no constant. The others are those of ``slabs_forward``.
    """
    DTYPE: gl.constexpr = p_x.dtype.element_ty
    p_dy = p_dy.to(gl.pointer_type(gl.int32), bitcast=True)
    p_x = p_x.to(gl.pointer_type(gl.int32), bitcast=True)
    p_dx = p_dx.to(gl.pointer_type(gl.int32), bitcast=True)
    VECTOR: gl.constexpr = 128 // DTYPE.primitive_bitwidth  # elements
    PIECES: gl.constexpr = VECTOR // SPAN  # of a vector
    ALL_PIECES: gl.constexpr = LANES * PIECES
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    REPEATS: gl.constexpr = TILE // THREADS
    SIDE: gl.constexpr = THREADS // LANES  # threads that have the same vector of channels
    ROWS: gl.constexpr = REPEATS * SIDE
    SLOTS: gl.constexpr = LAG + 1  # chunks in shared memory
    AT: gl.constexpr = led_place(LAG)
    WORDS: gl.constexpr = tile_layout(REPEATS, 4, WARPS)
    VALUES: gl.constexpr = tile_layout(REPEATS, VECTOR, WARPS)
    ELEMENTS: gl.constexpr = gl.SliceLayout(0, VALUES)
    OF_THREADS: gl.constexpr = gl.BlockedLayout([1, PIECES], [32, 1], [WARPS, 1], [1, 0])
    OF_CHANNELS: gl.constexpr = sides_layout(VECTOR, LANES, WARPS)
    SUMS: gl.constexpr = sums_layout(LANES * VECTOR, SIDE, WARPS)
    OF_PIECES: gl.constexpr = sides_layout(PIECES, LANES, WARPS)
    OF_GROUPS: gl.constexpr = groups_layout(ALL_PIECES, WARPS)
    MERGED: gl.constexpr = merge_layout(GROUPS, PARTS, WARPS)
    OF_LEADERS: gl.constexpr = leaders_layout(LED, WARPS)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS * TILES, REPEATS, THREADS, 4], SHARED)
    grad_slots = gl.allocate_shared_memory(gl.int32, [SLOTS * TILES, REPEATS, THREADS, 4], SHARED)

    o_x = offsets_of_rows(x_row, WORDS, REPEATS, THREADS, LANES)
    o_dy = offsets_of_rows(dy_row, WORDS, REPEATS, THREADS, LANES)
    o_dx = offsets_of_rows(dx_row, WORDS, REPEATS, THREADS, LANES)
    o_row = rows_of(WORDS, REPEATS, THREADS, LANES)
    m_lane = (gl.arange(0, THREADS, gl.SliceLayout(0, gl.SliceLayout(2, WORDS))) % LANES < held)[None, :]
    places = SlabPlaces(slabs, bands, magic_bands, held, positions, m_lane, o_row)
    o_summed = rows_of(VALUES, REPEATS, THREADS, LANES)
    o_channel = channels_of_slab(held, gl.SliceLayout(0, OF_CHANNELS), LANES, VECTOR)
    o_sum = gl.arange(0, LANES * VECTOR, gl.SliceLayout(0, SUMS))
    m_sum = o_sum // VECTOR < held
    o_piece = gl.arange(0, ALL_PIECES, gl.SliceLayout(0, OF_PIECES))
    o_final = gl.minimum(o_piece * SPAN // D, held_groups - 1)
    o_group = gl.arange(0, GROUPS, gl.SliceLayout(1, OF_GROUPS))
    o_of_piece = gl.arange(0, ALL_PIECES, gl.SliceLayout(0, OF_GROUPS)) * SPAN // D
    m_piece = o_group[:, None] == o_of_piece[None, :]
    o_merged = gl.minimum(gl.arange(0, GROUPS, gl.SliceLayout(1, MERGED)), held_groups - 1)
    o_part = gl.arange(0, PARTS, gl.SliceLayout(0, MERGED))
    m_part = (o_part < parts)[None, :]
    o_part = gl.where(o_part < parts, o_part, 0)
    p_finals = p_packets + slabs * held_groups * parts
    p_claims = p_finals + slabs * held_groups

    block, blocks = gl.program_id(0), gl.num_programs(0)
    slab, part = block // parts, block % parts
    for place in gl.static_range(TILES):
        begin_tiles(
            slots, grad_slots, 0, p_x, p_dy, places, slab, part, x_sample, x_row, dy_sample, dy_row, o_x, o_dy, place,
            TILES, ROWS, EVEN, FULL,
        )  # fmt: skip
    known = numbers_of_slab(
        p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, places, slab, channels, o_channel, o_final, held_groups,
        VECTOR,
    )  # fmt: skip
    alpha = gl.cast(activation_parameter, gl.float32) if ALPHA is None else gl.to_tensor(ALPHA)
    pending = first_pending(slab, part, LAG)
    summed, led_slab = gl.to_tensor(0), gl.to_tensor(-1)
    while pending[0] < slabs:
        summed_slab, summed_part = pending[2 * LAG], pending[2 * LAG + 1]
        due, due_slab, due_part = pending[0] >= 0, gl.maximum(pending[0], 0), pending[1]
        freed = gl.where(summed == SLOTS - 1, 0, summed + 1)
        if LEAD:
            p_packet = p_finals + due_slab * held_groups + o_final
        else:
            p_packet = p_packets + (due_slab * held_groups + o_merged)[:, None] * parts + o_part[None, :]
        led, leads = pending[AT], (pending[AT] >= 0) & (pending[AT] < slabs) & (pending[AT] != led_slab)
        led_slab = gl.where(leads, led, led_slab)
        if LEAD and LAG == 1:
            if leads & (led != summed_slab):
                lead_sums(
                    p_packets, p_finals, led * held_groups, held_groups, due_part, parts, parts, inverse_count, PARTS,
                    LED, OF_LEADERS,
                )  # fmt: skip
        b_packet = peek(p_packet)

        if summed_slab < slabs:
            gain, offset, mean, rstd = known
            sum_gain, _ = affine_of_slab(
                p_weight, None, p_scale, None, places, summed_slab, channels, gl.where(m_sum, o_sum, 0), VECTOR
            )
            b_rstd = elements_of(of_threads(rstd, OF_PIECES, OF_THREADS, SIDE, THREADS), ELEMENTS, VECTOR)
            b_gain = (of_threads(gain, OF_CHANNELS, ELEMENTS, SIDE, THREADS) * b_rstd)[None, :, :]
            b_offset = of_threads(offset, OF_CHANNELS, ELEMENTS, SIDE, THREADS)[None, :, :]
            b_mean = of_threads(mean, OF_PIECES, OF_THREADS, SIDE, THREADS)
            b_mean = elements_of(b_mean, ELEMENTS, VECTOR)[None, :, :]
            for place in gl.static_range(TILES):
                wait_group(TILES - place - 1)
                b_centred = values_of(slots.index(summed * TILES + place).load(WORDS), VALUES, DTYPE) - b_mean
                b_dy = values_of(grad_slots.index(summed * TILES + place).load(WORDS), VALUES, DTYPE)
                b_dz = b_dy * DERIVATIVE(gl.fma(b_centred, b_gain, b_offset), alpha)
                if SMOOTH and not EVEN:  # a slope far from 0 may be no number, and no number times 0 is none
                    left = positions - (summed_part * TILES + place) * ROWS
                    if left < ROWS:
                        b_dz = gl.where((o_summed < left)[:, :, None], b_dz, 0.0)
                tile_p, tile_q = gl.sum(b_dz, 0), products_of_repeats(b_dz, b_centred, ELEMENTS)
                if place == 0:
                    b_p, b_q = tile_p, tile_q
                else:
                    b_p, b_q = b_p + tile_p, b_q + tile_q
            p, q = sum_of_threads(b_p, SUMS, SIDE), sum_of_threads(b_q * b_rstd, SUMS, SIDE)
            if p_partials is not None:
                sample = quotient(summed_slab, magic_bands)
                o_partial = (sample.to(gl.int64) * parts + summed_part) * channels
                o_partial += (summed_slab - sample * bands) * held * VECTOR + o_sum
                gl.store(p_partials + o_partial, p, mask=m_sum)
                gl.store(p_partials + total + o_partial, q, mask=m_sum)
            piece_p = gl.sum(gl.reshape(sum_gain * p, [ALL_PIECES, SPAN]), 1)
            piece_q = gl.sum(gl.reshape(sum_gain * q, [ALL_PIECES, SPAN]), 1)
            piece_p = gl.convert_layout(piece_p, gl.SliceLayout(0, OF_GROUPS))
            piece_q = gl.convert_layout(piece_q, gl.SliceLayout(0, OF_GROUPS))
            if ALONE:
                p_chunk = p_packets + (summed_slab * held_groups + o_of_piece) * parts + summed_part
                publish(p_chunk, piece_p, piece_q, o_of_piece < held_groups)
            else:
                group_p = gl.sum(gl.where(m_piece, piece_p[None, :], 0.0), 1)
                group_q = gl.sum(gl.where(m_piece, piece_q[None, :], 0.0), 1)
                p_chunk = p_packets + (summed_slab * held_groups + o_group) * parts + summed_part
                publish(p_chunk, group_p, group_q, o_group < held_groups)
        if LEAD:
            if leads & ((LAG > 1) | (led == summed_slab)):
                for turn in range(AT // 2, LAG + 1):
                    of_turn, led_part = pending_at(pending, turn)
                    if of_turn == led:
                        lead_sums(
                            p_packets, p_finals, led * held_groups, held_groups, led_part, parts, parts, inverse_count,
                            PARTS, LED, OF_LEADERS,
                        )  # fmt: skip

        if due:
            gain, offset, mean, rstd = numbers_of_slab(
                p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, places, due_slab, channels, o_channel, o_final,
                held_groups, VECTOR,
            )  # fmt: skip
            unit_p, unit_q = settle(b_packet, p_packet)
            if not LEAD:
                unit_p = gl.where(m_part, unit_p, 0.0)
                unit_p, unit_q = gl.reduce((unit_p, gl.where(m_part, unit_q, 0.0)), 1, add_pairs)
                unit_p = of_pieces(unit_p * inverse_count, m_piece, OF_GROUPS, gl.SliceLayout(0, OF_PIECES), ALONE)
                unit_q = of_pieces(unit_q * inverse_count, m_piece, OF_GROUPS, gl.SliceLayout(0, OF_PIECES), ALONE)
            scaled_p = of_threads(-rstd * unit_p, OF_PIECES, OF_THREADS, SIDE, THREADS)
            scaled_q = of_threads(-rstd * unit_q, OF_PIECES, OF_THREADS, SIDE, THREADS)
            scaled_p = elements_of(scaled_p, ELEMENTS, VECTOR)[None, :, :]
            scaled_q = elements_of(scaled_q, ELEMENTS, VECTOR)[None, :, :]
            b_rstd = elements_of(of_threads(rstd, OF_PIECES, OF_THREADS, SIDE, THREADS), ELEMENTS, VECTOR)
            b_gain = (of_threads(gain, OF_CHANNELS, ELEMENTS, SIDE, THREADS) * b_rstd)[None, :, :]
            b_offset = of_threads(offset, OF_CHANNELS, ELEMENTS, SIDE, THREADS)[None, :, :]
            b_rstd = b_rstd[None, :, :]
            b_mean = of_threads(mean, OF_PIECES, OF_THREADS, SIDE, THREADS)
            b_mean = elements_of(b_mean, ELEMENTS, VECTOR)[None, :, :]
            slab, part, known = next_chunk(
                p_claims, summed_slab, parts, blocks, known, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, places,
                channels, o_channel, o_final, held_groups, VECTOR, MORE,
            )  # fmt: skip
            for place in gl.static_range(TILES):
                first = (due_part * TILES + place) * ROWS
                b_centred = values_of(slots.index(freed * TILES + place).load(WORDS), VALUES, DTYPE) - b_mean
                b_dy = values_of(grad_slots.index(freed * TILES + place).load(WORDS), VALUES, DTYPE)
                b_dz = b_dy * DERIVATIVE(gl.fma(b_centred, b_gain, b_offset), alpha)
                b_dx = gl.fma(b_dz, b_gain, gl.fma(b_centred * b_rstd, scaled_q, scaled_p))
                b_dx = words_of(b_dx, WORDS, DTYPE)
                if MORE:
                    begin_tiles(
                        slots, grad_slots, freed, p_x, p_dy, places, slab, part, x_sample, x_row, dy_sample, dy_row,
                        o_x, o_dy, place, TILES, ROWS, EVEN, FULL,
                    )  # fmt: skip
                p_words = words_of_rows(p_dx, places, due_slab, first, dx_sample, dx_row, o_dx)
                store_rows(p_words, b_dx, places, first, o_dx, ROWS, EVEN, FULL)
        else:
            slab, part, known = next_chunk(
                p_claims, summed_slab, parts, blocks, known, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, places,
                channels, o_channel, o_final, held_groups, VECTOR, MORE,
            )  # fmt: skip
            for place in gl.static_range(TILES):
                if MORE:
                    begin_tiles(
                        slots, grad_slots, freed, p_x, p_dy, places, slab, part, x_sample, x_row, dy_sample, dy_row,
                        o_x, o_dy, place, TILES, ROWS, EVEN, FULL,
                    )  # fmt: skip
        pending = next_pending(pending, slab, part)
        summed = freed
