"""Slabs of channels_last, read once: a slab stays in shared memory until its blocks have the statistics of its groups.

A slab is a band of neighbouring channels, whole groups, at all positions of a sample. A tile is ROWS positions of LANES
vectors of 16 bytes, and a chunk is TILES tiles of one slab. Blocks claim chunks, and do with each what they do in
``resident.py``. A slab may have hundreds of chunks and many groups. Then (LEAD) not every block merges all numbers of
its slab: each leads for some groups, for each chunk that it has of a slab. A leader merges the numbers of these and
publishes the mean and the inverse deviation, for which the others wait before they store.

A piece is SPAN neighbouring channels, the most that divide a vector and a group. Each thread has the same vector of
channels at some positions of each tile; it sums its elements of each piece, and the squares of their distances to their
own mean. Tiles, threads, pieces and chunks are merged around the mean of all, as in ``resident.py``.
"""

from fusednorm.backends.hopper.kernels.chunks import quotient
from fusednorm.backends.hopper.kernels.claims import claimed, first_pending, led_place, next_pending, pending_at
from fusednorm.backends.hopper.kernels.elements import tile_layout, values_of, words_of
from fusednorm.backends.hopper.kernels.exchange import peek, publish, settle
from fusednorm.backends.hopper.kernels.leaders import lead_moments, leaders_layout
from fusednorm.backends.hopper.kernels.moments import inverse_deviation, mean_of, merge, merge_chunks, store_moments
from fusednorm.backends.hopper.kernels.slab_tiles import (
    SlabPlaces,
    affine_of_slab,
    begin_copy,
    channels_of_slab,
    elements_of,
    groups_layout,
    load_rows,
    mask_of_rows,
    merge_layout,
    of_pieces,
    of_threads,
    offsets_of_rows,
    pieces_of,
    products_of_repeats,
    rows_of,
    sides_layout,
    store_rows,
    sums_layout,
    words_of_rows,
)
from fusednorm.private.gluon_names import commit_group, gl, gluon, wait_group


@gluon.jit
def moments_of_tile(b_x, elements: gl.constexpr, threads: gl.constexpr, PIECES: gl.constexpr):
    """Mean and M2 of each thread's elements of a piece, all of which are there."""
    each: gl.constexpr = b_x.shape[0] * b_x.shape[2] // PIECES
    b_mean = pieces_of(gl.sum(b_x, 0), threads, PIECES) * (1.0 / each)
    b_x -= elements_of(b_mean, elements, b_x.shape[2])[None, :, :]
    return b_mean, pieces_of(products_of_repeats(b_x, b_x, elements), threads, PIECES)


@gluon.jit
def moments_of_rows(
    b_x, left, o_summed, elements: gl.constexpr, threads: gl.constexpr, PIECES: gl.constexpr, ROWS: gl.constexpr
):
    """The same of a tile of which ``left`` positions are there, and the count of such elements."""
    span: gl.constexpr = b_x.shape[2] // PIECES
    if left >= ROWS:
        b_mean, b_m2 = moments_of_tile(b_x, elements, threads, PIECES)
        b_count = gl.zeros([b_x.shape[1], 1], gl.float32, threads) + span * b_x.shape[0]
    else:
        b_held = o_summed < left
        b_count = gl.sum(b_held.to(gl.float32), 0) * span
        b_count = gl.convert_layout(b_count, gl.SliceLayout(1, threads), assert_trivial=True)[:, None]
        b_held = b_held[:, :, None]
        b_sum = pieces_of(gl.sum(gl.where(b_held, b_x, 0.0), 0), threads, PIECES)
        b_mean = mean_of(b_sum, gl.maximum(b_count, 1.0))
        b_x = gl.where(b_held, b_x - elements_of(b_mean, elements, b_x.shape[2])[None, :, :], 0.0)
        b_m2 = pieces_of(products_of_repeats(b_x, b_x, elements), threads, PIECES)
    return b_mean, b_m2, b_count


@gluon.jit
def merge_pieces(b_mean, b_m2, b_count, m_piece, pieces):
    """Mean and M2 of groups of those of their ``pieces``, which have the same count."""
    mean = mean_of(gl.sum(gl.where(m_piece, b_mean[None, :], 0.0), 1), pieces)
    b_distance = b_mean[None, :] - mean[:, None]
    return mean, gl.sum(gl.where(m_piece, b_m2[None, :] + b_distance * b_distance * b_count, 0.0), 1)


@gluon.jit(
    do_not_specialize=[
        "positions", "D", "channels", "x_sample", "x_row", "y_sample", "y_row", "before_sample", "before_row",
        "behind_sample", "behind_row", "held", "held_groups", "bands", "slabs", "parts", "magic_bands", "elements",
    ]
)  # fmt: skip
def slabs_forward(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_var, p_packets,
    p_before, p_numbers, p_behind, p_total,
    positions, D, channels, x_sample, x_row, y_sample, y_row, before_sample, before_row, behind_sample, behind_row,
    held, held_groups, bands, slabs, parts, magic_bands: gl.uint32, elements: gl.float32,
    eps: gl.float64, activation_parameter: gl.float64,
    VALUE: gl.constexpr, ALPHA: gl.constexpr, EVEN: gl.constexpr, FULL: gl.constexpr, SPAN: gl.constexpr,
    LANES: gl.constexpr, GROUPS: gl.constexpr, ALONE: gl.constexpr, TILE: gl.constexpr, TILES: gl.constexpr,
    PARTS: gl.constexpr, LEAD: gl.constexpr, LED: gl.constexpr, LAG: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """Statistics and results, of z + post_add where ``p_behind`` is there, and of a sum where ``p_before`` or
    ``p_numbers`` is: x + number, x + pre_add, or x + number pre_add, by numbers of channels. ``p_total`` gets the sum.

    A slab has ``held`` vectors of each position, which are ``held_groups`` groups; LANES and GROUPS are the next powers
    of 2 from there on. FULL: there are LANES vectors. EVEN: chunks divide slabs. Strides come in vectors. PARTS is the
    next power of 2 from the chunks of a slab on. MORE: there are more chunks than blocks. LED is the groups that a
    leader merges at a time.
    """
    DTYPE: gl.constexpr = p_x.dtype.element_ty
    p_x = p_x.to(gl.pointer_type(gl.int32), bitcast=True)
    p_y = p_y.to(gl.pointer_type(gl.int32), bitcast=True)
    if p_before is not None:
        p_before = p_before.to(gl.pointer_type(gl.int32), bitcast=True)
    if p_total is not None:
        p_total = p_total.to(gl.pointer_type(gl.int32), bitcast=True)
    if p_behind is not None:
        p_behind = p_behind.to(gl.pointer_type(gl.int32), bitcast=True)
    VECTOR: gl.constexpr = 128 // DTYPE.primitive_bitwidth  # elements
    PIECES: gl.constexpr = VECTOR // SPAN  # of a vector
    ALL_PIECES: gl.constexpr = LANES * PIECES
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    REPEATS: gl.constexpr = TILE // THREADS
    SIDE: gl.constexpr = THREADS // LANES  # threads that have the same vector of channels
    ROWS: gl.constexpr = REPEATS * SIDE
    EACH: gl.constexpr = REPEATS * SPAN  # elements of a piece that a thread has in a tile
    SLOTS: gl.constexpr = LAG + 1  # chunks in shared memory
    AT: gl.constexpr = led_place(LAG)
    WORDS: gl.constexpr = tile_layout(REPEATS, 4, WARPS)
    VALUES: gl.constexpr = tile_layout(REPEATS, VECTOR, WARPS)
    ELEMENTS: gl.constexpr = gl.SliceLayout(0, VALUES)
    OF_THREADS: gl.constexpr = gl.BlockedLayout([1, PIECES], [32, 1], [WARPS, 1], [1, 0])
    OF_CHANNELS: gl.constexpr = sides_layout(VECTOR, LANES, WARPS)
    OF_PIECES: gl.constexpr = sides_layout(PIECES, LANES, WARPS)
    SUMS: gl.constexpr = sums_layout(ALL_PIECES, SIDE, WARPS)
    MERGED: gl.constexpr = merge_layout(GROUPS, PARTS, WARPS)
    OF_GROUPS: gl.constexpr = groups_layout(ALL_PIECES, WARPS)
    OF_LEADERS: gl.constexpr = leaders_layout(LED, WARPS)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS * TILES, REPEATS, THREADS, 4], SHARED)

    o_words = offsets_of_rows(x_row, WORDS, REPEATS, THREADS, LANES)
    o_stored = offsets_of_rows(y_row, WORDS, REPEATS, THREADS, LANES)
    o_before = offsets_of_rows(before_row, WORDS, REPEATS, THREADS, LANES)
    o_behind = offsets_of_rows(behind_row, WORDS, REPEATS, THREADS, LANES)
    o_row = rows_of(WORDS, REPEATS, THREADS, LANES)
    m_lane = (gl.arange(0, THREADS, gl.SliceLayout(0, gl.SliceLayout(2, WORDS))) % LANES < held)[None, :]
    places = SlabPlaces(slabs, bands, magic_bands, held, positions, m_lane, o_row)
    o_summed = rows_of(VALUES, REPEATS, THREADS, LANES)
    o_channel = channels_of_slab(held, gl.SliceLayout(0, OF_CHANNELS), LANES, VECTOR)
    o_final = gl.arange(0, ALL_PIECES, gl.SliceLayout(0, OF_PIECES)) * SPAN // D
    o_final = gl.minimum(o_final, held_groups - 1)
    o_group = gl.arange(0, GROUPS, gl.SliceLayout(1, OF_GROUPS))
    o_of_piece = gl.arange(0, ALL_PIECES, gl.SliceLayout(0, OF_GROUPS)) * SPAN // D
    m_piece = o_group[:, None] == o_of_piece[None, :]
    pieces = (D // SPAN).to(gl.float32)
    o_merged = gl.arange(0, GROUPS, gl.SliceLayout(1, MERGED))
    m_merged = o_merged < held_groups
    o_merged = gl.minimum(o_merged, held_groups - 1)
    o_part = gl.arange(0, PARTS, gl.SliceLayout(0, MERGED))
    c_part = (gl.minimum(gl.maximum(positions - o_part * (TILES * ROWS), 0), TILES * ROWS) * D).to(gl.float32)[None, :]
    o_part = gl.where(o_part < parts, o_part, 0)
    p_finals = p_packets + slabs * held_groups * parts
    p_claims = p_finals + slabs * held_groups

    block, blocks = gl.program_id(0), gl.num_programs(0)
    slab, part = block // parts, block % parts
    for place in gl.static_range(TILES):
        begin_copy(
            slots.index(place), p_x, places, slab, part, x_sample, x_row, o_words, place, TILES, ROWS, EVEN, FULL
        )
        commit_group()
    alpha = gl.cast(activation_parameter, gl.float32) if ALPHA is None else gl.to_tensor(ALPHA)
    epsilon = gl.cast(eps, gl.float32)
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
        # A block leads for all of its chunks of a slab at once; with a lag of 1 before its next sums, if those are of
        # another slab.
        led, leads = pending[AT], (pending[AT] >= 0) & (pending[AT] < slabs) & (pending[AT] != led_slab)
        led_slab = gl.where(leads, led, led_slab)
        if LEAD and LAG == 1:
            if leads & (led != summed_slab):
                lead_moments(
                    p_packets, p_finals, p_mean, p_rstd, p_var, led * held_groups, held_groups, due_part, parts,
                    parts, positions, D, elements, epsilon, TILES * ROWS, PARTS, LED, OF_LEADERS,
                )  # fmt: skip
        b_packet = peek(p_packet)
        # On their way while the next chunk is summed.
        gain, offset = affine_of_slab(p_weight, p_bias, p_scale, p_shift, places, due_slab, channels, o_channel, VECTOR)

        if summed_slab < slabs:
            if p_numbers is not None:
                of_sample = quotient(summed_slab, magic_bands)
                o_number = (summed_slab - of_sample * bands) * held * VECTOR + o_channel
                b_numbers = gl.load(p_numbers + of_sample.to(gl.int64) * channels + o_number).to(gl.float32)
                b_numbers = of_threads(b_numbers, OF_CHANNELS, ELEMENTS, SIDE, THREADS)[None, :, :]
            if p_before is not None:  # on its way while copies are awaited
                b_before = load_rows(
                    p_before, places, summed_slab, summed_part * (TILES * ROWS), positions, before_sample, before_row,
                    o_before,
                )  # fmt: skip
            for place in gl.static_range(TILES):
                wait_group(TILES - place - 1)
                b_x = values_of(slots.index(summed * TILES + place).load(WORDS), VALUES, DTYPE)
                if p_before is not None or p_numbers is not None:
                    first = (summed_part * TILES + place) * ROWS
                    if p_before is not None:
                        b_added = values_of(b_before, VALUES, DTYPE)
                        if place < TILES - 1:
                            b_before = load_rows(
                                p_before, places, summed_slab, first + ROWS, positions, before_sample, before_row,
                                o_before,
                            )  # fmt: skip
                        b_x = b_x + b_added if p_numbers is None else gl.fma(b_numbers, b_added, b_x)
                    else:
                        b_x += b_numbers
                    b_sum = words_of(b_x, WORDS, DTYPE)
                    slots.index(summed * TILES + place).store(b_sum)
                    if p_total is not None:
                        p_words = words_of_rows(p_total, places, summed_slab, first, y_sample, y_row, o_stored)
                        gl.store(p_words, b_sum, mask=mask_of_rows(places, first, positions, o_stored))
                    b_x = values_of(b_sum, VALUES, DTYPE)
                if EVEN:
                    b_mean, b_m2 = moments_of_tile(b_x, ELEMENTS, OF_THREADS, PIECES)
                    if place == 0:
                        mean, m2 = b_mean, b_m2
                    else:
                        distance = b_mean - mean
                        m2 += b_m2 + distance * distance * (EACH * place / (place + 1))
                        mean += distance * (1 / (place + 1))
                else:
                    left = positions - (summed_part * TILES + place) * ROWS
                    b_mean, b_m2, b_count = moments_of_rows(b_x, left, o_summed, ELEMENTS, OF_THREADS, PIECES, ROWS)
                    if place == 0:
                        mean, m2, count = b_mean, b_m2, b_count
                    else:
                        mean, m2, count = merge(mean, m2, count, b_mean, b_m2, b_count)
            b_mean = gl.convert_layout(gl.reshape(mean, [SIDE, ALL_PIECES]), SUMS)
            b_m2 = gl.convert_layout(gl.reshape(m2, [SIDE, ALL_PIECES]), SUMS)
            if EVEN:
                piece_count = gl.to_tensor(TILES * ROWS * SPAN).to(gl.float32)
                piece_mean = gl.sum(b_mean, 0) * (1.0 / SIDE)
                b_distance = b_mean - piece_mean[None, :]
                piece_m2 = gl.sum(b_m2 + b_distance * b_distance * (TILES * EACH), 0)
            else:
                rows = gl.minimum(positions - summed_part * (TILES * ROWS), TILES * ROWS)
                piece_count = (rows * SPAN).to(gl.float32)
                b_count = gl.convert_layout(gl.reshape(gl.broadcast(count, mean)[0], [SIDE, ALL_PIECES]), SUMS)
                piece_mean = mean_of(gl.sum(b_mean * b_count, 0), piece_count)
                b_distance = b_mean - piece_mean[None, :]
                piece_m2 = gl.sum(b_m2 + b_distance * b_distance * b_count, 0)
            piece_mean = gl.convert_layout(piece_mean, gl.SliceLayout(0, OF_GROUPS))
            piece_m2 = gl.convert_layout(piece_m2, gl.SliceLayout(0, OF_GROUPS))
            if ALONE:
                p_chunk = p_packets + (summed_slab * held_groups + o_of_piece) * parts + summed_part
                publish(p_chunk, piece_mean, piece_m2, o_of_piece < held_groups)
            else:
                chunk_mean, chunk_m2 = merge_pieces(piece_mean, piece_m2, piece_count, m_piece, pieces)
                p_chunk = p_packets + (summed_slab * held_groups + o_group) * parts + summed_part
                publish(p_chunk, chunk_mean, chunk_m2, o_group < held_groups)
        if LEAD:
            if leads & ((LAG > 1) | (led == summed_slab)):
                for turn in range(AT // 2, LAG + 1):
                    of_turn, led_part = pending_at(pending, turn)
                    if of_turn == led:
                        lead_moments(
                            p_packets, p_finals, p_mean, p_rstd, p_var, led * held_groups, held_groups, led_part, parts,
                            parts, positions, D, elements, epsilon, TILES * ROWS, PARTS, LED, OF_LEADERS,
                        )  # fmt: skip

        if due:
            if p_behind is not None:  # on its way while the groups' numbers are awaited
                b_behind = load_rows(
                    p_behind, places, due_slab, due_part * (TILES * ROWS), positions, behind_sample, behind_row,
                    o_behind,
                )  # fmt: skip
            if LEAD:
                b_mean, b_rstd = settle(b_packet, p_packet)
            else:
                b_mean, b_m2 = settle(b_packet, p_packet)
                unit_mean, variance = merge_chunks(b_mean, b_m2, c_part, elements, 1)
                rstd = inverse_deviation(variance, epsilon)
                if due_part == 0:
                    o_unit = due_slab * held_groups + o_merged
                    store_moments(p_mean, p_rstd, p_var, o_unit, unit_mean, rstd, variance, m_merged)
                b_mean = of_pieces(unit_mean, m_piece, OF_GROUPS, gl.SliceLayout(0, OF_PIECES), ALONE)
                b_rstd = of_pieces(rstd, m_piece, OF_GROUPS, gl.SliceLayout(0, OF_PIECES), ALONE)
            b_mean = of_threads(b_mean, OF_PIECES, OF_THREADS, SIDE, THREADS)
            b_mean = elements_of(b_mean, ELEMENTS, VECTOR)[None, :, :]
            b_rstd = of_threads(b_rstd, OF_PIECES, OF_THREADS, SIDE, THREADS)
            b_gain = of_threads(gain, OF_CHANNELS, ELEMENTS, SIDE, THREADS) * elements_of(b_rstd, ELEMENTS, VECTOR)
            b_gain, b_offset = b_gain[None, :, :], of_threads(offset, OF_CHANNELS, ELEMENTS, SIDE, THREADS)[None, :, :]
            if MORE:
                slab, part = claimed(p_claims, summed_slab, slabs, parts, blocks)
            else:
                slab, part = slabs + 0, gl.to_tensor(0)
            for place in gl.static_range(TILES):
                first = (due_part * TILES + place) * ROWS
                b_x = values_of(slots.index(freed * TILES + place).load(WORDS), VALUES, DTYPE)
                b_z = gl.fma(b_x - b_mean, b_gain, b_offset)
                if p_behind is not None:
                    b_z += values_of(b_behind, VALUES, DTYPE)
                    if place < TILES - 1:
                        b_behind = load_rows(
                            p_behind, places, due_slab, first + ROWS, positions, behind_sample, behind_row, o_behind
                        )
                b_y = words_of(VALUE(b_z, alpha), WORDS, DTYPE)
                if MORE:
                    begin_copy(
                        slots.index(freed * TILES + place), p_x, places, slab, part, x_sample, x_row, o_words,
                        place, TILES, ROWS, EVEN, FULL,
                    )  # fmt: skip
                    commit_group()
                p_words = words_of_rows(p_y, places, due_slab, first, y_sample, y_row, o_stored)
                store_rows(p_words, b_y, places, first, o_stored, ROWS, EVEN, FULL)
        else:
            if MORE:
                slab, part = claimed(p_claims, summed_slab, slabs, parts, blocks)
            else:
                slab, part = slabs + 0, gl.to_tensor(0)
            for place in gl.static_range(TILES):
                if MORE:
                    begin_copy(
                        slots.index(freed * TILES + place), p_x, places, slab, part, x_sample, x_row, o_words,
                        place, TILES, ROWS, EVEN, FULL,
                    )  # fmt: skip
                    commit_group()
        pending = next_pending(pending, slab, part)
        summed = freed
