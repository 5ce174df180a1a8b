"""Units of channels_first, read once: a unit stays in shared memory until all of its blocks have its statistics.

A unit is K elements: D channels of S positions, which lie one behind the other, or ACROSS samples one channel of each
of them. A tile is TILE of them, and a chunk is TILES tiles of one unit. Block b takes the chunks b, b + blocks,
b + 2 blocks and so on, counted through all units: its chunk in wave w is b + w blocks. All blocks run at the same time,
which the launch guarantees. In each wave a block

1. reads the chunk of wave w from shared memory, where copies that began AHEAD waves and more before have put it, and
   publishes its mean and M2;
2. merges the numbers of the unit to which its chunk of wave w - LAG belongs, by then long published, and stores the
   results of that chunk, which is in shared memory still. Each tile that is done makes room for the copy of a tile to
   come.

Without the lag all blocks would wait in each wave for the slowest one and for the way of its numbers through the L2: on
1x512x256x256 in bf16 a forward takes 49 us with a lag of 1, and 47 with 2. A unit's chunks may lie in two waves, so the
lag is at least 2, or 1 where each wave has whole units, or 0 where there is one wave.

Each block merges the numbers of its unit, or where units have many chunks the block of the first one leads
(``leaders.py``) and the others read what it makes of them.

Every thread reads from shared memory what it copied there itself. It sums its elements of a tile, takes the sum of the
squares of their distances to their own mean, and merges tiles by Chan's formula; threads, and then chunks, are merged
around the mean of all. So no cancellation occurs anywhere, however large the mean is.
"""

from fusednorm.backends.hopper.kernels.chunks import (
    Places,
    affine,
    begin_copy,
    channels_of_vectors,
    following,
    load_words,
    numbers_of_tile,
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
from fusednorm.backends.hopper.kernels.leaders import lead_moments, leaders_layout
from fusednorm.backends.hopper.kernels.moments import inverse_deviation, mean_of, merge
from fusednorm.private.gluon_names import commit_group, gl, gluon, wait_group


@gluon.jit(
    do_not_specialize=[
        "length", "D", "groups", "x_sample", "y_sample", "before_sample", "behind_sample", "units", "parts", "waves",
        "step_unit", "step_part", "magic_groups", "channel_length", "magic_channel", "elements",
    ]
)  # fmt: skip
def resident_forward(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_var, p_packets,
    p_before, p_numbers, p_behind, p_total,
    length, D, groups, x_sample, y_sample, before_sample, behind_sample, units, parts, waves, step_unit, step_part,
    magic_groups: gl.uint32, channel_length, magic_channel: gl.uint32, elements: gl.float32, eps: gl.float64,
    activation_parameter: gl.float64,
    VALUE: gl.constexpr, ALPHA: gl.constexpr, EVEN: gl.constexpr, IN_CHANNEL: gl.constexpr, SHORT: gl.constexpr,
    ACROSS: gl.constexpr, TILE: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr, LAG: gl.constexpr,
    AHEAD: gl.constexpr, LEAD: gl.constexpr,
):  # fmt: skip
    """Statistics and results, of z + post_add where ``p_behind`` is there, and of a sum where ``p_before`` or
    ``p_numbers`` is: x + number, x + pre_add, or x + number pre_add, by numbers of channels. ``p_total`` gets the sum.

    ``length``, TILE and ``channel_length`` are the vectors of a unit, a tile and a channel. EVEN: chunks divide units.
    IN_CHANNEL: tiles divide channels, and ``magic_channel`` is that of the tiles of a channel; elsewhere it is that of
    the vectors of a channel, where channels are SHORT, which means shorter than a tile. PARTS is the next power of 2
    from the chunks of a unit on. LEAD: the block of a unit's first chunk leads. ACROSS: a unit is a channel of all
    samples, and ``magic_channel`` is that of the vectors of one of them.
    """
    DTYPE: gl.constexpr = p_x.dtype.element_ty
    p_x = p_x.to(gl.pointer_type(gl.int32), bitcast=True)
    p_y = p_y.to(gl.pointer_type(gl.int32), bitcast=True)
    ADDS: gl.constexpr = p_before is not None or p_numbers is not None
    if p_before is not None:
        p_before = p_before.to(gl.pointer_type(gl.int32), bitcast=True)
    if p_total is not None:
        p_total = p_total.to(gl.pointer_type(gl.int32), bitcast=True)
    if p_behind is not None:
        p_behind = p_behind.to(gl.pointer_type(gl.int32), bitcast=True)
    VECTOR: gl.constexpr = 128 // DTYPE.primitive_bitwidth  # elements
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    REPEATS: gl.constexpr = TILE // THREADS
    EACH: gl.constexpr = VECTOR * REPEATS  # elements of a tile that a thread has
    SLOTS: gl.constexpr = LAG + 1 + AHEAD  # chunks in shared memory
    WORDS: gl.constexpr = tile_layout(REPEATS, 4, WARPS)
    VALUES: gl.constexpr = tile_layout(REPEATS, VECTOR, WARPS)
    EACH_THREAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, VALUES))
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    OF_LEADERS: gl.constexpr = leaders_layout(1, WARPS)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS * TILES, REPEATS, THREADS, 4], SHARED)

    places = Places(units, length, groups, magic_groups, channel_length, magic_channel)
    o_placed = offsets_of_vectors(WORDS, REPEATS, THREADS)
    o_words = offsets_of_words(o_placed, WORDS)
    o_vectors = offsets_of_vectors(VALUES, REPEATS, THREADS)
    o_part = gl.arange(0, PARTS, LANES)
    c_part = gl.minimum(gl.maximum(length - o_part * (TILES * TILE), 0), TILES * TILE) * VECTOR
    c_part = gl.where(o_part < parts, c_part, 0).to(gl.float32)
    o_part = gl.where(o_part < parts, o_part, 0)

    block, blocks = gl.program_id(0), gl.num_programs(0)
    p_finals = p_packets + waves * blocks * 2
    copied_unit, copied_part = block // parts, block % parts
    stored_unit, stored_part = copied_unit, copied_part
    summed_unit, summed_part = copied_unit, copied_part
    for wave in gl.static_range(AHEAD + 1):
        for place in gl.static_range(TILES):
            first = (copied_part * TILES + place) * TILE
            begin_copy(
                slots.index(wave * TILES + place), p_x, places, copied_unit, first, length - first, x_sample, o_placed,
                o_words, EVEN, ACROSS,
            )  # fmt: skip
            commit_group()
        copied_unit, copied_part = following(copied_unit, copied_part, parts, step_unit, step_part)
    alpha = gl.cast(activation_parameter, gl.float32) if ALPHA is None else gl.to_tensor(ALPHA)
    epsilon = gl.cast(eps, gl.float32)
    summed, stored, copied = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor((AHEAD + 1) % SLOTS)
    for wave in range(waves + LAG):
        # The packets of the unit, some of which a neighbour publishes in the wave before or after.
        lagging = wave - LAG
        due = (lagging >= 0) & (stored_unit < units)
        due_unit = gl.minimum(stored_unit, units - 1)
        if LEAD:
            if due & (stored_part == 0):
                lead_moments(
                    p_packets, p_finals, p_mean, p_rstd, p_var, due_unit, 1, 0, 1, parts, length, VECTOR,
                    elements, epsilon, TILES * TILE, PARTS, 1, OF_LEADERS,
                )  # fmt: skip
            p_pair = p_finals + due_unit * 2
        else:
            p_pair = p_packets + (due_unit * parts + o_part) * 2
        first_packet, second_packet = peek(p_pair)

        if wave < waves:
            end = gl.where(summed_unit < units, length, 0)
            if p_before is not None:  # on its way while copies are awaited
                first = summed_part * (TILES * TILE)
                p_words = words_of_tile(p_before, places, summed_unit, first, before_sample, o_placed, o_words, ACROSS)
                b_before = load_words(p_words, end - first, o_words, False)
            for place in gl.static_range(TILES):
                wait_group((AHEAD + 1) * TILES - place - 1)
                b_x = values_of(slots.index(summed * TILES + place).load(WORDS), VALUES, DTYPE)
                if ADDS:
                    first = (summed_part * TILES + place) * TILE
                    if p_numbers is not None:
                        b_number = numbers_of_tile(
                            p_numbers, places, summed_unit, first, D, o_vectors, TILE, IN_CHANNEL, SHORT, ACROSS
                        )
                    if p_before is not None:
                        b_added = values_of(b_before, VALUES, DTYPE)
                        if place < TILES - 1:
                            p_words = words_of_tile(
                                p_before, places, summed_unit, first + TILE, before_sample, o_placed, o_words, ACROSS
                            )
                            b_before = load_words(p_words, end - first - TILE, o_words, False)
                        b_x = b_x + b_added if p_numbers is None else gl.fma(b_number, b_added, b_x)
                    else:
                        b_x += b_number
                    b_sum = words_of(b_x, WORDS, DTYPE)
                    slots.index(summed * TILES + place).store(b_sum)
                    if p_total is not None:
                        p_words = words_of_tile(
                            p_total, places, summed_unit, first, y_sample, o_placed, o_words, ACROSS
                        )
                        store_words(p_words, b_sum, end - first, o_words, False)
                    b_x = values_of(b_sum, VALUES, DTYPE)
                if EVEN:
                    b_mean = sum_of(b_x) * (1.0 / EACH)
                    b_x -= b_mean[None, :, None]
                    b_m2 = product_sum_of(b_x, b_x, EACH_THREAD)
                    if place == 0:
                        mean, m2 = b_mean, b_m2
                    else:
                        distance = b_mean - mean
                        m2 += b_m2 + distance * distance * (EACH * place / (place + 1))
                        mean += distance * (1 / (place + 1))
                else:
                    left = length - (summed_part * TILES + place) * TILE
                    b_held = (o_vectors < left)[:, :, None]
                    b_count = gl.sum((o_vectors < left).to(gl.float32), 0) * VECTOR
                    b_mean = mean_of(sum_of(gl.where(b_held, b_x, 0.0)), gl.maximum(b_count, 1.0))
                    b_x = gl.where(b_held, b_x - b_mean[None, :, None], 0.0)
                    b_m2 = product_sum_of(b_x, b_x, EACH_THREAD)
                    if place == 0:
                        mean, m2, count = b_mean, b_m2, b_count
                    else:
                        mean, m2, count = merge(mean, m2, count, b_mean, b_m2, b_count)
            if EVEN:
                chunk_mean = gl.sum(mean, 0) * (1.0 / THREADS)
                distance = mean - chunk_mean
                chunk_m2 = gl.sum(m2 + distance * distance * (TILES * EACH), 0)
            else:
                vectors = gl.minimum(gl.maximum(length - summed_part * (TILES * TILE), 1), TILES * TILE)
                chunk_mean = mean_of(gl.sum(mean * count, 0), (vectors * VECTOR).to(gl.float32))
                distance = mean - chunk_mean
                chunk_m2 = gl.sum(m2 + distance * distance * count, 0)
            publish(p_packets + (wave * blocks + block) * 2, chunk_mean, chunk_m2)
            summed_unit, summed_part = following(summed_unit, summed_part, parts, step_unit, step_part)
            summed = gl.where(summed == SLOTS - 1, 0, summed + 1)

        if due:
            sample = quotient(stored_unit, magic_groups)
            group = stored_unit - sample * groups
            channel = group * D
            modulated = sample.to(gl.int64) * (groups * D)
            if p_behind is not None:  # on its way while the unit's numbers are awaited
                first = stored_part * (TILES * TILE)
                p_words = words_of_tile(p_behind, places, stored_unit, first, behind_sample, o_placed, o_words, ACROSS)
                b_behind = load_words(p_words, length - first, o_words, EVEN)
            if IN_CHANNEL:
                o_channel = channel if ACROSS else channel + quotient(stored_part * TILES, magic_channel)
                gain, offset = affine(p_weight, p_bias, p_scale, p_shift, o_channel, modulated + o_channel)
            if LEAD:
                unit_mean, rstd = settle(first_packet, second_packet, p_pair)
            else:
                b_mean, b_m2 = settle(first_packet, second_packet, p_pair)
                unit_mean = mean_of(gl.sum(b_mean * c_part, 0), elements)
                b_distance = b_mean - unit_mean
                b_m2 = gl.where(c_part > 0.0, b_m2 + b_distance * b_distance * c_part, 0.0)
                variance = gl.sum(b_m2, 0) / elements
                rstd = inverse_deviation(variance, epsilon)
                if stored_part == 0:
                    if p_mean is not None:
                        gl.store(p_mean + stored_unit, unit_mean)
                    if p_rstd is not None:
                        gl.store(p_rstd + stored_unit, rstd)
                    if p_var is not None:
                        gl.store(p_var + stored_unit, variance)
            for place in gl.static_range(TILES):
                first = (stored_part * TILES + place) * TILE
                b_x = values_of(slots.index(stored * TILES + place).load(WORDS), VALUES, DTYPE)
                if IN_CHANNEL:
                    b_z = gl.fma(b_x - unit_mean, gain * rstd, offset)
                    if place < TILES - 1 and not ACROSS:
                        o_channel = channel + quotient(stored_part * TILES + place + 1, magic_channel)
                        o_channel = gl.minimum(o_channel, channel + D - 1)
                        gain, offset = affine(p_weight, p_bias, p_scale, p_shift, o_channel, modulated + o_channel)
                else:
                    o_channel = channel
                    o_channel += channels_of_vectors(first, o_vectors, channel_length, magic_channel, D, SHORT)
                    b_gain, b_offset = affine(p_weight, p_bias, p_scale, p_shift, o_channel, modulated + o_channel)
                    b_gain *= rstd
                    b_z = gl.fma(b_x - unit_mean, b_gain[:, :, None], b_offset[:, :, None])
                if p_behind is not None:
                    b_z += values_of(b_behind, VALUES, DTYPE)
                    if place < TILES - 1:
                        p_words = words_of_tile(
                            p_behind, places, stored_unit, first + TILE, behind_sample, o_placed, o_words, ACROSS
                        )
                        b_behind = load_words(p_words, length - first - TILE, o_words, EVEN)
                b_y = words_of(VALUE(b_z, alpha), WORDS, DTYPE)
                begun = (copied_part * TILES + place) * TILE
                begin_copy(
                    slots.index(copied * TILES + place), p_x, places, copied_unit, begun, length - begun, x_sample,
                    o_placed, o_words, EVEN, ACROSS,
                )  # fmt: skip
                commit_group()
                p_words = words_of_tile(p_y, places, stored_unit, first, y_sample, o_placed, o_words, ACROSS)
                store_words(p_words, b_y, length - first, o_words, EVEN)
        if LAG > 0:
            if lagging < 0:
                for place in gl.static_range(TILES):
                    begun = (copied_part * TILES + place) * TILE
                    begin_copy(
                        slots.index(copied * TILES + place), p_x, places, copied_unit, begun, length - begun, x_sample,
                        o_placed, o_words, EVEN, ACROSS,
                    )  # fmt: skip
                    commit_group()
        if lagging >= 0:
            stored_unit, stored_part = following(stored_unit, stored_part, parts, step_unit, step_part)
            stored = gl.where(stored == SLOTS - 1, 0, stored + 1)
        copied_unit, copied_part = following(copied_unit, copied_part, parts, step_unit, step_part)
        copied = gl.where(copied == SLOTS - 1, 0, copied + 1)
