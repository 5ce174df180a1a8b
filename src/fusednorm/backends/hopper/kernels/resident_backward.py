"""The backward of units of channels_first that stay on the chip: input and grad_output are read once.

Waves, chunks and packets are those of ``resident.py``; a chunk has its tiles twice, of the input and of grad_output. A
wave sums dz and dz xhat of each tile, which has elements of one channel: p and q, which another launch makes the
parameters' gradients of. The last tile of a channel has what is left of it. The block publishes the sums of A p and A q
over its chunk. Two waves later it has P and Q of the unit, and stores dx = rstd (A dz - (P + xhat Q) / K). Where the
input is a sum, it adds the gradient that this has from elsewhere.

Behind the norm there may be post_add. Then dz is its gradient: a wave stores the dz of its tiles in memory, and in
shared memory in the place of grad_output, from where dx is made of it two waves later.
"""

from typing import Any, NamedTuple

from fusednorm.backends.hopper.kernels.chunks import (
    Places,
    affine,
    begin_copy,
    following,
    load_words,
    quotient,
    store_words,
    words_of_tile,
)
from fusednorm.backends.hopper.kernels.elements import (
    offsets_of_vectors,
    offsets_of_words,
    product_sum_of,
    sum_of,
    tile_layout,
    values_of,
    words_of,
)
from fusednorm.backends.hopper.kernels.exchange import peek, publish, settle
from fusednorm.backends.hopper.kernels.leaders import lead_sums, leaders_layout
from fusednorm.private.gluon_names import commit_group, gl, gluon, wait_group


@gluon.jit
def add_pairs(first, second, first_of_more, second_of_more):
    return first + first_of_more, second + second_of_more


@gluon.jit
def add_triples(first, second, third, first_of_more, second_of_more, third_of_more):
    return first + first_of_more, second + second_of_more, third + third_of_more


class Tiling(NamedTuple):
    """The ``tiles`` of a unit: ``of_channel`` tiles of each of D channels of ``length`` vectors, the last of which has
    what is left. A unit ACROSS samples is one channel."""

    tiles: Any
    of_channel: Any
    magic: Any
    D: Any
    length: Any


@gluon.jit
def place_of_tile(tile, tiling, TILE: gl.constexpr, ACROSS: gl.constexpr):
    """The channel of a unit that a tile is of, the tile's first vector in the unit, and how many the channel has from
    there on: none in tiles beyond the unit."""
    if ACROSS:
        return gl.to_tensor(0), tile * TILE, tiling.length - tile * TILE
    else:
        within = gl.minimum(quotient(tile, tiling.magic), tiling.D - 1)
        begin = (tile - within * tiling.of_channel) * TILE
        return within, within * tiling.length + begin, tiling.length - begin


@gluon.jit
def begin_copies(
    p_slot, p_grad_slot, p_x, p_dy, places, tiling, unit, tile, x_sample, dy_sample, o_vectors, o_words,
    TILE: gl.constexpr, FULL: gl.constexpr, ACROSS: gl.constexpr,
):  # fmt: skip
    """Begin to copy a tile of the input and of grad_output, which count as one copy."""
    if tile < tiling.tiles:
        _, first, left = place_of_tile(tile, tiling, TILE, ACROSS)
        begin_copy(p_slot, p_x, places, unit, first, left, x_sample, o_vectors, o_words, FULL, ACROSS)
        begin_copy(p_grad_slot, p_dy, places, unit, first, left, dy_sample, o_vectors, o_words, FULL, ACROSS)
    commit_group()


@gluon.jit(
    do_not_specialize=[
        "length", "D", "groups", "x_sample", "dy_sample", "dx_sample", "behind_sample", "units", "parts", "waves",
        "step_unit", "step_part", "magic_groups", "channel_length", "magic_channel", "channel_tiles", "total",
        "inverse_count",
    ]
)  # fmt: skip
def resident_backward(
    p_dy, p_x, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_partials, p_packets,
    p_grad_sum, p_behind, p_grad_behind,
    length, D, groups, x_sample, dy_sample, dx_sample, behind_sample, units, parts, waves, step_unit, step_part,
    magic_groups: gl.uint32, channel_length, magic_channel: gl.uint32, channel_tiles, total, inverse_count: gl.float32,
    activation_parameter: gl.float64,
    DERIVATIVE: gl.constexpr, ALPHA: gl.constexpr, EVEN: gl.constexpr, FULL: gl.constexpr, ACROSS: gl.constexpr,
    TILE: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr, LAG: gl.constexpr, AHEAD: gl.constexpr,
    LEAD: gl.constexpr, TOLD: gl.constexpr, NUMBERS: gl.constexpr,
):  # fmt: skip
    """p and q of each tile, and grad_input.

    ``length``, TILE and ``channel_length`` are the vectors of a unit, a tile and a channel; ``channel_tiles`` are the
    tiles of a channel, and ``magic_channel`` is theirs. p of tile t of channel c is partial t of (n, c), and q lies
    ``total`` behind it. EVEN: chunks divide units. FULL: tiles divide channels, or ACROSS samples units. LEAD: the
    block of a unit's first chunk leads. TOLD: what lies behind is the output, which tells the activation's derivative,
    in the place of post_add. NUMBERS: the sum of xhat of a tile lies ``total`` behind q.

    ACROSS: a unit is a channel of all samples, ``channel_tiles`` are its tiles, and ``magic_channel`` is that of the
    vectors of one sample.
    """
    DTYPE: gl.constexpr = p_x.dtype.element_ty
    p_dy = p_dy.to(gl.pointer_type(gl.int32), bitcast=True)
    p_x = p_x.to(gl.pointer_type(gl.int32), bitcast=True)
    p_dx = p_dx.to(gl.pointer_type(gl.int32), bitcast=True)
    if p_grad_sum is not None:
        p_grad_sum = p_grad_sum.to(gl.pointer_type(gl.int32), bitcast=True)
    if p_behind is not None:
        p_behind = p_behind.to(gl.pointer_type(gl.int32), bitcast=True)
        p_grad_behind = p_grad_behind.to(gl.pointer_type(gl.int32), bitcast=True)
    VECTOR: gl.constexpr = 128 // DTYPE.primitive_bitwidth
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    REPEATS: gl.constexpr = TILE // THREADS
    SLOTS: gl.constexpr = LAG + 1 + AHEAD
    WORDS: gl.constexpr = tile_layout(REPEATS, 4, WARPS)
    VALUES: gl.constexpr = tile_layout(REPEATS, VECTOR, WARPS)
    EACH_THREAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, VALUES))
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    OF_LEADERS: gl.constexpr = leaders_layout(1, WARPS)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS * TILES, REPEATS, THREADS, 4], SHARED)
    grad_slots = gl.allocate_shared_memory(gl.int32, [SLOTS * TILES, REPEATS, THREADS, 4], SHARED)

    places = Places(units, length, groups, magic_groups, channel_length, magic_channel)
    tiling = Tiling(D * channel_tiles, channel_tiles, magic_channel, D, length if ACROSS else channel_length)
    o_vectors = offsets_of_vectors(WORDS, REPEATS, THREADS)
    o_words = offsets_of_words(o_vectors, WORDS)
    o_summed = offsets_of_vectors(VALUES, REPEATS, THREADS)
    o_part = gl.arange(0, PARTS, LANES)
    m_part = o_part < parts
    o_part = gl.where(m_part, o_part, 0)
    alpha = gl.cast(activation_parameter, gl.float32) if ALPHA is None else gl.to_tensor(ALPHA)

    block, blocks = gl.program_id(0), gl.num_programs(0)
    p_finals = p_packets + waves * blocks * 2
    copied_unit, copied_part = block // parts, block % parts
    summed_unit, summed_part = copied_unit, copied_part
    stored_unit, stored_part = copied_unit, copied_part
    for wave in gl.static_range(AHEAD + 1):
        for place in gl.static_range(TILES):
            begin_copies(
                slots.index(wave * TILES + place), grad_slots.index(wave * TILES + place), p_x, p_dy, places, tiling,
                copied_unit, copied_part * TILES + place, x_sample, dy_sample, o_vectors, o_words, TILE, FULL, ACROSS,
            )  # fmt: skip
        copied_unit, copied_part = following(copied_unit, copied_part, parts, step_unit, step_part)
    summed, stored, copied = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor((AHEAD + 1) % SLOTS)
    for wave in range(waves + LAG):
        lagging = wave - LAG
        due = (lagging >= 0) & (stored_unit < units)
        due_unit = gl.minimum(stored_unit, units - 1)
        if LEAD:
            p_pair = p_finals + due_unit * 2
            if due & (stored_part == 0):
                lead_sums(p_packets, p_pair, due_unit, parts, inverse_count, PARTS, OF_LEADERS)
        else:
            p_pair = p_packets + (due_unit * parts + o_part) * 2
        first_packet, second_packet = peek(p_pair)

        if wave < waves:
            chunk_p, chunk_q = gl.to_tensor(0.0), gl.to_tensor(0.0)
            for place in gl.static_range(TILES):
                tile = summed_part * TILES + place
                within, first, left = place_of_tile(tile, tiling, TILE, ACROSS)
                held = (summed_unit < units) & (tile < tiling.tiles)
                sample = quotient(summed_unit, magic_groups)
                if p_behind is not None:
                    p_words = words_of_tile(
                        p_behind, places, summed_unit, first, behind_sample, o_vectors, o_words, ACROSS
                    )
                    b_behind = load_words(p_words, gl.where(held, left, 0), o_words, False)
                wait_group((AHEAD + 1) * TILES - place - 1)
                if held:
                    channel = (summed_unit - sample * groups) * D + within
                    o_sample = sample * (groups * D) + channel
                    gain, offset = affine(p_weight, p_bias, p_scale, p_shift, channel, o_sample)
                    rstd = gl.load(p_rstd + summed_unit)
                    b_x = values_of(slots.index(summed * TILES + place).load(WORDS), VALUES, DTYPE)
                    b_dy = values_of(grad_slots.index(summed * TILES + place).load(WORDS), VALUES, DTYPE)
                    b_centred = b_x - gl.load(p_mean + summed_unit)
                    if p_behind is not None:
                        b_z = values_of(b_behind, VALUES, DTYPE)
                        if not TOLD:
                            b_z += gl.fma(b_centred, gain * rstd, offset)
                        b_dz = b_dy * DERIVATIVE(b_z, alpha)
                        b_kept = words_of(b_dz, WORDS, DTYPE)
                        grad_slots.index(summed * TILES + place).store(b_kept)
                        p_words = words_of_tile(
                            p_grad_behind, places, summed_unit, first, dx_sample, o_vectors, o_words, ACROSS
                        )
                        store_words(p_words, b_kept, left, o_words, FULL)
                    else:
                        b_dz = b_dy * DERIVATIVE(gl.fma(b_centred, gain * rstd, offset), alpha)
                    if not FULL:
                        b_there = (o_summed < left)[:, :, None]
                        b_dz, b_centred = gl.where(b_there, b_dz, 0.0), gl.where(b_there, b_centred, 0.0)
                    b_q = product_sum_of(b_dz, b_centred, EACH_THREAD)
                    if NUMBERS:
                        p, q, r = gl.reduce((sum_of(b_dz), b_q, sum_of(b_centred)), 0, add_triples)
                    else:
                        p, q = gl.reduce((sum_of(b_dz), b_q), 0, add_pairs)
                    q *= rstd
                    if p_partials is not None:
                        o_partial = o_sample.to(gl.int64) * channel_tiles + tile - within * channel_tiles
                        gl.store(p_partials + o_partial, p)
                        gl.store(p_partials + total + o_partial, q)
                        if NUMBERS:
                            gl.store(p_partials + 2 * total + o_partial, rstd * r)
                    chunk_p += gain * p
                    chunk_q += gain * q
            publish(p_packets + (wave * blocks + block) * 2, chunk_p, chunk_q)
            summed_unit, summed_part = following(summed_unit, summed_part, parts, step_unit, step_part)
            summed = gl.where(summed == SLOTS - 1, 0, summed + 1)

        if due:
            sample = quotient(stored_unit, magic_groups)
            group = stored_unit - sample * groups
            mean, rstd = gl.load(p_mean + stored_unit), gl.load(p_rstd + stored_unit)
            within, first, left = place_of_tile(stored_part * TILES, tiling, TILE, ACROSS)
            channel = group * D + within
            gain, offset = affine(p_weight, p_bias, p_scale, p_shift, channel, sample * (groups * D) + channel)
            if LEAD:
                unit_p, unit_q = settle(first_packet, second_packet, p_pair)
                scaled_p, scaled_q = rstd * unit_p, rstd * unit_q
            else:
                b_p, b_q = settle(first_packet, second_packet, p_pair)
                unit_p, unit_q = gl.reduce((gl.where(m_part, b_p, 0.0), gl.where(m_part, b_q, 0.0)), 0, add_pairs)
                scaled_p, scaled_q = rstd * (unit_p * inverse_count), rstd * (unit_q * inverse_count)
            for place in gl.static_range(TILES):
                if place > 0:
                    _, first, left = place_of_tile(stored_part * TILES + place, tiling, TILE, ACROSS)
                b_x = values_of(slots.index(stored * TILES + place).load(WORDS), VALUES, DTYPE)
                b_dy = values_of(grad_slots.index(stored * TILES + place).load(WORDS), VALUES, DTYPE)
                if p_grad_sum is not None:
                    p_words = words_of_tile(
                        p_grad_sum, places, stored_unit, first, x_sample, o_vectors, o_words, ACROSS
                    )
                    b_more = load_words(p_words, left, o_words, False)
                if place == 0 or not ACROSS:
                    gain *= rstd
                b_centred = b_x - mean
                if p_behind is not None:
                    b_dz = b_dy
                else:
                    b_dz = b_dy * DERIVATIVE(gl.fma(b_centred, gain, offset), alpha)
                b_dx = gl.fma(b_dz, gain, gl.fma(b_centred * rstd, -scaled_q, -scaled_p))
                if p_grad_sum is not None:
                    b_dx += values_of(b_more, VALUES, DTYPE)
                b_dx = words_of(b_dx, WORDS, DTYPE)
                if place < TILES - 1 and not ACROSS:
                    within, _, _ = place_of_tile(stored_part * TILES + place + 1, tiling, TILE, ACROSS)
                    channel = group * D + within
                    gain, offset = affine(p_weight, p_bias, p_scale, p_shift, channel, sample * (groups * D) + channel)
                begin_copies(
                    slots.index(copied * TILES + place), grad_slots.index(copied * TILES + place), p_x, p_dy, places,
                    tiling, copied_unit, copied_part * TILES + place, x_sample, dy_sample, o_vectors, o_words, TILE,
                    FULL, ACROSS,
                )  # fmt: skip
                p_words = words_of_tile(p_dx, places, stored_unit, first, dx_sample, o_vectors, o_words, ACROSS)
                store_words(p_words, b_dx, left, o_words, EVEN)
        if LAG > 0:
            if lagging < 0:
                for place in gl.static_range(TILES):
                    begin_copies(
                        slots.index(copied * TILES + place), grad_slots.index(copied * TILES + place), p_x, p_dy,
                        places, tiling, copied_unit, copied_part * TILES + place, x_sample, dy_sample, o_vectors,
                        o_words, TILE, FULL, ACROSS,
                    )  # fmt: skip
        if lagging >= 0:
            stored_unit, stored_part = following(stored_unit, stored_part, parts, step_unit, step_part)
            stored = gl.where(stored == SLOTS - 1, 0, stored + 1)
        copied_unit, copied_part = following(copied_unit, copied_part, parts, step_unit, step_part)
        copied = gl.where(copied == SLOTS - 1, 0, copied + 1)
