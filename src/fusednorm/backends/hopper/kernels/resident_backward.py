"""The backward of units of channels_first that stay on the chip: input and grad_output are read once.

Chunks, claims and packets are those of ``resident.py``; a chunk has its tiles twice, of the input and of grad_output. A
block sums dz and dz xhat of each tile, which has elements of one channel: p and q, which another launch makes the
parameters' gradients of. The last tile of a channel has what is left of it. The block publishes the sums of A p and A q
over its chunk. LAG chunks later it has P and Q of the unit, and stores dx = rstd (A dz - (P + xhat Q) / K). Where the
input is a sum, it adds the gradient that this has from elsewhere. The numbers that a tile is summed with, its unit's
statistics and its channel's A and B, are read when its copy begins: a block would wait for them each time.

Behind the norm there may be post_add. Then dz is its gradient: a block stores the dz of its tiles in memory, and in
shared memory in the place of grad_output, from where dx is made of it later.

SHIFTED: planes, a channel of a sample each, are no whole number of vectors, and begin anywhere in one. Then a tile is
of one plane, also where units are channels of all samples, and has whole vectors alone. What lies before the first
whole vector of a plane and behind the last one, its ends, a few threads load and store element by element, on the block
that has the first tile: when it is summed, and once more, from the L2, when its gradients are stored.
"""

from typing import Any, NamedTuple

from fusednorm.backends.hopper.kernels.chunks import (
    Places,
    affine,
    begin_copy,
    load_words,
    quotient,
    store_words,
    words_of_tile,
)
from fusednorm.backends.hopper.kernels.claims import claimed, first_pending, led_place, next_pending
from fusednorm.backends.hopper.kernels.elements import (
    offsets_of_ends,
    offsets_of_vectors,
    offsets_of_words,
    product_sums_of,
    sum_of,
    tile_layout,
    values_of,
    words_of,
)
from fusednorm.backends.hopper.kernels.exchange import peek, publish, settle
from fusednorm.backends.hopper.kernels.leaders import lead_sums, leaders_layout
from fusednorm.backends.hopper.kernels.moments import add_pairs
from fusednorm.private.gluon_names import async_load, commit_group, gl, gluon, wait_group


@gluon.jit
def add_triples(first, second, third, first_of_more, second_of_more, third_of_more):
    return first + first_of_more, second + second_of_more, third + third_of_more


class Tiling(NamedTuple):
    """The ``tiles`` of a unit: ``of_plane`` tiles of each of its ``planes``, the last of which has what is left. A
    plane is a channel, of ``length`` vectors, or ACROSS samples the unit. SHIFTED it is a channel of one sample, of
    ``length`` vectors and ``rest`` elements, and ``step`` planes lie from one of a unit to its next."""

    tiles: Any
    planes: Any
    of_plane: Any
    magic: Any
    length: Any
    rest: Any
    step: Any


class Tile(NamedTuple):
    """The channel of a unit that a tile is of, the tile's first vector, in the unit or, SHIFTED, in memory, and how
    many the plane has from there on: none in tiles beyond the unit. SHIFTED: the vector in which the plane begins, the
    place in it, and whether the tile is the first one of the plane."""

    within: Any
    first: Any
    left: Any
    start: Any
    shift: Any
    leads: Any


class Known(NamedTuple):
    """What a tile is summed with: A and B of its channel, the unit's statistics, the plane's ends, one a thread; where
    its partials are, and whether there is such a tile."""

    gain: Any
    offset: Any
    mean: Any
    rstd: Any
    end_x: Any
    end_dy: Any
    o_partial: Any
    there: Any


#: The numbers of a tile.
KNOWN = gl.constexpr(8)


@gluon.jit
def tile_of(unit, tile, tiling, TILE: gl.constexpr, VECTOR: gl.constexpr, ACROSS: gl.constexpr, SHIFTED: gl.constexpr):
    """Where a tile of a unit is."""
    zero = gl.to_tensor(0)
    if ACROSS and not SHIFTED:
        return Tile(zero, tile * TILE, tiling.length - tile * TILE, zero, zero, zero)
    else:
        within = gl.minimum(quotient(tile, tiling.magic), tiling.planes - 1)
        begin = (tile - within * tiling.of_plane) * TILE
        if SHIFTED:
            plane = unit + within * tiling.step if ACROSS else unit * tiling.planes + within
            shift = plane * tiling.rest
            start = plane * tiling.length + shift // VECTOR
            shift %= VECTOR
            first = start + (shift > 0) + begin
            left = tiling.length + (tiling.rest + shift) // VECTOR - (shift > 0) - begin
            return Tile(zero if ACROSS else within, first, left, start, shift, begin == 0)
        else:
            return Tile(within, within * tiling.length + begin, tiling.length - begin, zero, zero, zero)


@gluon.jit
def words_from(p_words, first, o_words):
    """Pointers to the words of a tile that begins at vector ``first`` of memory."""
    return p_words + first.to(gl.int64) * 4 + o_words


@gluon.jit
def ends_of(where, there, length, VECTOR: gl.constexpr, THREADS: gl.constexpr, EACH_THREAD: gl.constexpr):
    """The elements of the ends of a tile's plane in memory, one a thread, and which threads have one."""
    o_end, before, behind = offsets_of_ends(where.shift, length, VECTOR, THREADS, EACH_THREAD)
    return where.start.to(gl.int64) * VECTOR + where.shift + o_end, (before | behind) & where.leads & there


@gluon.jit
def load_ends(p_x, p_dy, o_ends, m_ends):
    """The ends of the input and of grad_output, 0 where there are none."""
    return gl.load(p_x + o_ends, mask=m_ends, other=0.0), gl.load(p_dy + o_ends, mask=m_ends, other=0.0)


@gluon.jit
def begin_tile(
    p_slot, p_grad_slot, p_x, p_dy, e_x, e_dy, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, places, tiling,
    unit, tile, D, length, channel_tiles, x_sample, dy_sample, o_vectors, o_words,
    TILE: gl.constexpr, VECTOR: gl.constexpr, FULL: gl.constexpr, ACROSS: gl.constexpr, SHIFTED: gl.constexpr,
    THREADS: gl.constexpr, EACH_THREAD: gl.constexpr,
):  # fmt: skip
    """Begin to copy a tile of the input and of grad_output, which count as one copy. In a slot there are zeros behind
    what is left of a plane. What the tile is summed with, which is on its way as well."""
    where = tile_of(unit, tile, tiling, TILE, VECTOR, ACROSS, SHIFTED)
    first, left = where.first, where.left
    there = (unit < places.units) & (tile < tiling.tiles)
    if there:
        if SHIFTED:
            m_words = o_words < left * 4
            async_load(p_slot, words_from(p_x, first, o_words), m_words)
            async_load(p_grad_slot, words_from(p_dy, first, o_words), m_words)
        else:
            begin_copy(p_slot, p_x, places, unit, first, left, x_sample, o_vectors, o_words, FULL, ACROSS)
            begin_copy(p_grad_slot, p_dy, places, unit, first, left, dy_sample, o_vectors, o_words, FULL, ACROSS)
    commit_group()
    unit = gl.minimum(unit, places.units - 1)
    sample = quotient(unit, places.magic_groups)
    channel = (unit - sample * places.groups) * D + where.within
    gain, offset = affine(p_weight, p_bias, p_scale, p_shift, channel, sample * (places.groups * D) + channel)
    mean, rstd = gl.load(p_mean + unit), gl.load(p_rstd + unit)
    end_x, end_dy = offset, offset
    if SHIFTED:
        o_ends, m_ends = ends_of(where, there, length, VECTOR, THREADS, EACH_THREAD)
        end_x, end_dy = load_ends(e_x, e_dy, o_ends, m_ends)
    o_partial = (sample * (places.groups * D) + channel) * channel_tiles + tile - where.within * channel_tiles
    return (gain, offset, mean, rstd, end_x, end_dy, o_partial, there)


@gluon.jit
def known_of(known, place: gl.constexpr):
    """What a tile is summed with, of those of several tiles."""
    first: gl.constexpr = KNOWN * place
    return Known(
        known[first], known[first + 1], known[first + 2], known[first + 3], known[first + 4], known[first + 5],
        known[first + 6], known[first + 7],
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "length", "D", "groups", "x_sample", "dy_sample", "dx_sample", "behind_sample", "units", "parts",
        "magic_groups", "channel_length", "magic_channel", "channel_tiles",
        "plane_tiles", "total", "inverse_count",
    ]
)  # fmt: skip
def resident_backward(
    p_dy, p_x, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_partials, p_packets,
    p_grad_sum, p_behind, p_grad_behind,
    length, D, groups, x_sample, dy_sample, dx_sample, behind_sample, units, parts,
    magic_groups: gl.uint32, channel_length, magic_channel: gl.uint32, channel_tiles, plane_tiles, total,
    inverse_count: gl.float32, activation_parameter: gl.float64,
    DERIVATIVE: gl.constexpr, ALPHA: gl.constexpr, EVEN: gl.constexpr, FULL: gl.constexpr, ACROSS: gl.constexpr,
    SHIFTED: gl.constexpr, TILE: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr, LAG: gl.constexpr,
    LEAD: gl.constexpr, MORE: gl.constexpr, SMOOTH: gl.constexpr, TOLD: gl.constexpr, NUMBERS: gl.constexpr,
):  # fmt: skip
    """p and q of each tile, and grad_input.

    ``length``, TILE and ``channel_length`` are the vectors of a unit, a tile and a channel; ``channel_tiles`` are the
    tiles of a channel, and ``magic_channel`` is theirs. p of tile t of channel c is partial t of (n, c), and q lies
    ``total`` behind it. EVEN: chunks divide units. FULL: tiles divide channels, or ACROSS samples units. LEAD: the
    block of a unit's first chunk leads. MORE: there are more chunks than blocks. SMOOTH: the slope of the activation is
    no constant. TOLD: what lies behind is the output, which tells the activation's derivative, in the place of
    post_add. NUMBERS: the sum of xhat of a tile lies ``total`` behind q.

    ACROSS: a unit is a channel of all samples, ``channel_tiles`` are its tiles, and ``magic_channel`` is that of the
    vectors of one sample. SHIFTED: ``channel_length`` are elements, ``plane_tiles`` are the tiles of a channel of one
    sample, and ``magic_channel`` is theirs; all tensors are packed.
    """
    DTYPE: gl.constexpr = p_x.dtype.element_ty
    e_dy, e_x, e_dx = p_dy, p_x, p_dx
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
    SLOTS: gl.constexpr = LAG + 1
    LED: gl.constexpr = led_place(LAG)
    WORDS: gl.constexpr = tile_layout(REPEATS, 4, WARPS)
    VALUES: gl.constexpr = tile_layout(REPEATS, VECTOR, WARPS)
    EACH_VECTOR: gl.constexpr = gl.SliceLayout(2, VALUES)
    EACH_THREAD: gl.constexpr = gl.SliceLayout(0, EACH_VECTOR)
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    OF_LEADERS: gl.constexpr = leaders_layout(1, WARPS)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS * TILES, REPEATS, THREADS, 4], SHARED)
    grad_slots = gl.allocate_shared_memory(gl.int32, [SLOTS * TILES, REPEATS, THREADS, 4], SHARED)

    places = Places(units, length, groups, magic_groups, channel_length, magic_channel)
    planes, plane_length, rest = D, channel_length, 0
    if SHIFTED:
        plane_length, rest = channel_length // VECTOR, channel_length % VECTOR
        if ACROSS:
            planes = channel_tiles // plane_tiles
    elif ACROSS:
        plane_length = length
    tiling = Tiling(D * channel_tiles, planes, plane_tiles, magic_channel, plane_length, rest, groups)
    o_vectors = offsets_of_vectors(WORDS, REPEATS, THREADS)
    o_words = offsets_of_words(o_vectors, WORDS)
    o_summed = offsets_of_vectors(VALUES, REPEATS, THREADS)
    o_part = gl.arange(0, PARTS, LANES)
    m_part = o_part < parts
    o_part = gl.where(m_part, o_part, 0)
    alpha = gl.cast(activation_parameter, gl.float32) if ALPHA is None else gl.to_tensor(ALPHA)

    block, blocks = gl.program_id(0), gl.num_programs(0)
    p_finals = p_packets + units * parts
    p_claims = p_finals + units
    unit, part = block // parts, block % parts
    known = ()
    for place in gl.static_range(TILES):
        known = known + begin_tile(
            slots.index(place), grad_slots.index(place), p_x, p_dy, e_x, e_dy, p_weight, p_bias, p_scale, p_shift,
            p_mean, p_rstd, places, tiling, unit, part * TILES + place, D, channel_length, channel_tiles, x_sample,
            dy_sample, o_vectors, o_words, TILE, VECTOR, FULL, ACROSS, SHIFTED, THREADS, EACH_THREAD,
        )  # fmt: skip
    pending = first_pending(unit, part, LAG)
    summed = gl.to_tensor(0)
    while pending[0] < units:
        summed_unit, summed_part = pending[2 * LAG], pending[2 * LAG + 1]
        due, due_unit, due_part = pending[0] >= 0, gl.maximum(pending[0], 0), pending[1]
        freed = gl.where(summed == SLOTS - 1, 0, summed + 1)
        if LEAD:
            p_packet = p_finals + due_unit
        else:
            p_packet = p_packets + due_unit * parts + o_part
        b_packet = peek(p_packet)

        if summed_unit < units:
            chunk_p, chunk_q = gl.to_tensor(0.0), gl.to_tensor(0.0)
            for place in gl.static_range(TILES):
                of_tile = known_of(known, place)
                if p_behind is not None or NUMBERS or (SMOOTH and not FULL):
                    tile = summed_part * TILES + place
                    _, first, left, _, _, _ = tile_of(summed_unit, tile, tiling, TILE, VECTOR, ACROSS, SHIFTED)
                if p_behind is not None:
                    p_words = words_of_tile(
                        p_behind, places, summed_unit, first, behind_sample, o_vectors, o_words, ACROSS
                    )
                    b_behind = load_words(p_words, gl.where(of_tile.there, left, 0), o_words, False)
                wait_group(TILES - place - 1)
                if of_tile.there:
                    gain, offset, mean, rstd = of_tile.gain, of_tile.offset, of_tile.mean, of_tile.rstd
                    b_x = values_of(slots.index(summed * TILES + place).load(WORDS), VALUES, DTYPE)
                    b_dy = values_of(grad_slots.index(summed * TILES + place).load(WORDS), VALUES, DTYPE)
                    b_centred = b_x - mean  # beyond the plane too, where grad_output is 0, and so is dz
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
                    b_p, b_q = gl.sum(b_dz, 2), product_sums_of(b_dz, b_centred, EACH_VECTOR)
                    if SMOOTH and not FULL:  # a slope far from 0 may be no number, and no number times 0 is none
                        b_p, b_q = gl.where(o_summed < left, b_p, 0.0), gl.where(o_summed < left, b_q, 0.0)
                    b_p = gl.sum(b_p, 0)
                    b_q = gl.convert_layout(gl.sum(b_q, 0), EACH_THREAD, assert_trivial=True)
                    if SHIFTED:
                        end_centred = of_tile.end_x.to(gl.float32) - mean
                        end_z = gl.fma(end_centred, gain * rstd, offset)
                        end_dy = of_tile.end_dy.to(gl.float32)
                        end_dz = end_dy * DERIVATIVE(end_z, alpha)
                        if SMOOTH:  # of the threads that have no end
                            end_dz = gl.where(end_dy == 0.0, 0.0, end_dz)
                        b_p += end_dz
                        b_q = gl.fma(end_dz, end_centred, b_q)
                    if NUMBERS:
                        b_there = (o_summed < left)[:, :, None]
                        b_r = sum_of(gl.where(b_there, b_centred, 0.0))
                        p, q, r = gl.reduce((b_p, b_q, b_r), 0, add_triples)
                    else:
                        p, q = gl.split(gl.sum(gl.join(b_p, b_q), 0))
                    q *= rstd
                    if p_partials is not None:
                        o_partial = of_tile.o_partial.to(gl.int64)
                        gl.store(p_partials + o_partial, p)
                        gl.store(p_partials + total + o_partial, q)
                        if NUMBERS:
                            gl.store(p_partials + 2 * total + o_partial, rstd * r)
                    chunk_p += gain * p
                    chunk_q += gain * q
            publish(p_packets + summed_unit * parts + summed_part, chunk_p, chunk_q)
        if LEAD:
            led, led_part = pending[LED], pending[LED + 1]
            if (led >= 0) & (led < units) & (led_part == 0):
                lead_sums(p_packets, p_finals, led, 1, 0, 1, parts, inverse_count, PARTS, 1, OF_LEADERS)

        if due:
            sample = quotient(due_unit, magic_groups)
            group = due_unit - sample * groups
            mean, rstd = gl.load(p_mean + due_unit), gl.load(p_rstd + due_unit)
            where = tile_of(due_unit, due_part * TILES, tiling, TILE, VECTOR, ACROSS, SHIFTED)
            if SHIFTED:  # on their way while the unit's numbers are awaited
                o_ends, m_ends = ends_of(
                    where, due_part * TILES < tiling.tiles, channel_length, VECTOR, THREADS, EACH_THREAD
                )
                end_x, end_dy = load_ends(e_x, e_dy, o_ends, m_ends)
            channel = group * D + where.within
            gain, offset = affine(p_weight, p_bias, p_scale, p_shift, channel, sample * (groups * D) + channel)
            if LEAD:
                unit_p, unit_q = settle(b_packet, p_packet)
                scaled_p, scaled_q = rstd * unit_p, rstd * unit_q
            else:
                b_p, b_q = settle(b_packet, p_packet)
                unit_p, unit_q = gl.reduce((gl.where(m_part, b_p, 0.0), gl.where(m_part, b_q, 0.0)), 0, add_pairs)
                scaled_p, scaled_q = rstd * (unit_p * inverse_count), rstd * (unit_q * inverse_count)
            if MORE:
                unit, part = claimed(p_claims, summed_unit, units, parts, blocks)
                known = ()
            else:
                unit, part = units + 0, gl.to_tensor(0)
            for place in gl.static_range(TILES):
                first, left = where.first, where.left
                b_x = values_of(slots.index(freed * TILES + place).load(WORDS), VALUES, DTYPE)
                b_dy = values_of(grad_slots.index(freed * TILES + place).load(WORDS), VALUES, DTYPE)
                if p_grad_sum is not None:
                    p_words = words_of_tile(p_grad_sum, places, due_unit, first, x_sample, o_vectors, o_words, ACROSS)
                    b_more = load_words(p_words, left, o_words, False)
                if place == 0 or not ACROSS:
                    gain *= rstd
                b_centred = b_x - mean
                if p_behind is not None:
                    b_dz = b_dy
                else:
                    b_dz = b_dy * DERIVATIVE(gl.fma(b_centred, gain, offset), alpha)
                b_dx = gl.fma(b_dz, gain, gl.fma(b_centred * rstd, -scaled_q, -scaled_p))
                if SHIFTED:
                    end_centred = end_x.to(gl.float32) - mean
                    end_dz = end_dy.to(gl.float32) * DERIVATIVE(gl.fma(end_centred, gain, offset), alpha)
                    end_dx = gl.fma(end_dz, gain, gl.fma(end_centred * rstd, -scaled_q, -scaled_p))
                    gl.store(e_dx + o_ends, end_dx.to(DTYPE), mask=m_ends)
                if p_grad_sum is not None:
                    b_dx += values_of(b_more, VALUES, DTYPE)
                b_dx = words_of(b_dx, WORDS, DTYPE)
                if place < TILES - 1:
                    tile = due_part * TILES + place + 1
                    where = tile_of(due_unit, tile, tiling, TILE, VECTOR, ACROSS, SHIFTED)
                    if SHIFTED:
                        o_ends, m_ends = ends_of(
                            where, tile < tiling.tiles, channel_length, VECTOR, THREADS, EACH_THREAD
                        )
                        end_x, end_dy = load_ends(e_x, e_dy, o_ends, m_ends)
                    if not ACROSS:
                        channel = group * D + where.within
                        o_sample = sample * (groups * D) + channel
                        gain, offset = affine(p_weight, p_bias, p_scale, p_shift, channel, o_sample)
                if MORE:
                    known = known + begin_tile(
                        slots.index(freed * TILES + place), grad_slots.index(freed * TILES + place), p_x, p_dy, e_x,
                        e_dy, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, places, tiling, unit,
                        part * TILES + place, D, channel_length, channel_tiles, x_sample, dy_sample, o_vectors, o_words,
                        TILE, VECTOR, FULL, ACROSS, SHIFTED, THREADS, EACH_THREAD,
                    )  # fmt: skip
                if SHIFTED:
                    p_words = words_from(p_dx, first, o_words)
                else:
                    p_words = words_of_tile(p_dx, places, due_unit, first, dx_sample, o_vectors, o_words, ACROSS)
                store_words(p_words, b_dx, left, o_words, EVEN)
        else:
            if MORE:
                unit, part = claimed(p_claims, summed_unit, units, parts, blocks)
                known = ()
            else:
                unit, part = units + 0, gl.to_tensor(0)
            for place in gl.static_range(TILES):
                if MORE:
                    known = known + begin_tile(
                        slots.index(freed * TILES + place), grad_slots.index(freed * TILES + place), p_x, p_dy, e_x,
                        e_dy, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, places, tiling, unit,
                        part * TILES + place, D, channel_length, channel_tiles, x_sample, dy_sample, o_vectors, o_words,
                        TILE, VECTOR, FULL, ACROSS, SHIFTED, THREADS, EACH_THREAD,
                    )  # fmt: skip
        pending = next_pending(pending, unit, part)
        summed = freed
