"""Units of channels_first, read once: a unit stays in shared memory until all of its blocks have its statistics.

A unit is K elements: D channels of S positions, which lie one behind the other, or ACROSS samples one channel of each
of them. A tile is TILE of them, and a chunk is TILES tiles of one unit. All blocks run at the same time, which the
launch guarantees, and claim chunks (``claims.py``). In turn a block

1. reads its newest chunk from shared memory, where copies have put it, and publishes its mean and M2;
2. merges the numbers of the unit of the chunk that it claimed LAG before, and stores the results of that one, which is
   in shared memory still;
3. claims the next chunk, whose tiles are copied to the places of those that are done.

Without a lag a block would wait for the numbers of the chunks that were claimed behind its own, each time. A lag of 1
suffices, but where a unit has as many chunks as half of the blocks, which are claimed long behind its first one: (1,
256, 512, 512) in bf16 takes 78 us with 2, and 80 with 1.

Each block merges the numbers of its unit; or where units have many chunks and there is a lag of 2 the block of the
first one leads (``leaders.py``), and the others read what it makes of them. What the first tile of results is made
with, its gains and offsets, is read before the sums, so that nobody waits for it.

Every thread reads from shared memory what it copied there itself. It sums its elements of a tile, takes the sum of the
squares of their distances to their own mean, and merges tiles by Chan's formula; threads, and then chunks, are merged
around the mean of all. So no cancellation occurs anywhere, however large the mean is.
"""

from fusednorm.backends.hopper.kernels.chunks import (
    Places,
    affine,
    begin_copy,
    channels_of_vectors,
    load_words,
    numbers_of_tile,
    quotient,
    store_words,
    words_of_tile,
)
from fusednorm.backends.hopper.kernels.claims import claimed, first_pending, led_place, next_pending
from fusednorm.backends.hopper.kernels.elements import (
    offsets_of_vectors,
    offsets_of_words,
    product_sum_of,
    product_sums_of,
    sum_of,
    tile_layout,
    values_of,
    words_of,
)
from fusednorm.backends.hopper.kernels.exchange import peek, publish, settle
from fusednorm.backends.hopper.kernels.leaders import lead_moments, leaders_layout
from fusednorm.backends.hopper.kernels.moments import inverse_deviation, mean_of, merge, merge_chunks, store_moments
from fusednorm.private.gluon_names import commit_group, gl, gluon, wait_group


@gluon.jit
def pool(mean, variance, mean_of_more, variance_of_more):
    """Mean and variance of two sets of as many elements."""
    distance = (mean_of_more - mean) * 0.5
    together = gl.fma(mean_of_more, 0.5, mean * 0.5)
    return together, gl.fma(distance, distance, (variance + variance_of_more) * 0.5)


@gluon.jit(
    do_not_specialize=[
        "length", "D", "groups", "x_sample", "y_sample", "before_sample", "behind_sample", "units", "parts",
        "magic_groups", "channel_length", "magic_channel", "elements",
    ]
)  # fmt: skip
def resident_forward(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_var, p_packets,
    p_before, p_numbers, p_behind, p_total,
    length, D, groups, x_sample, y_sample, before_sample, behind_sample, units, parts,
    magic_groups: gl.uint32, channel_length, magic_channel: gl.uint32, elements: gl.float32, eps: gl.float64,
    activation_parameter: gl.float64,
    VALUE: gl.constexpr, ALPHA: gl.constexpr, EVEN: gl.constexpr, IN_CHANNEL: gl.constexpr, SHORT: gl.constexpr,
    ACROSS: gl.constexpr, TILE: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr, LAG: gl.constexpr,
    LEAD: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """Statistics and results, of z + post_add where ``p_behind`` is there, and of a sum where ``p_before`` or
    ``p_numbers`` is: x + number, x + pre_add, or x + number pre_add, by numbers of channels. ``p_total`` gets the sum.

    ``length``, TILE and ``channel_length`` are the vectors of a unit, a tile and a channel. EVEN: chunks divide units.
    IN_CHANNEL: tiles divide channels, and ``magic_channel`` is that of the tiles of a channel; elsewhere it is that of
    the vectors of a channel, where channels are SHORT, which means shorter than a tile. PARTS is the next power of 2
    from the chunks of a unit on. LEAD: the block of a unit's first chunk leads. MORE: there are more chunks than
    blocks. ACROSS: a unit is a channel of all samples, and ``magic_channel`` is that of the vectors of one of them.
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
    SLOTS: gl.constexpr = LAG + 1  # chunks in shared memory
    LED: gl.constexpr = led_place(LAG)
    WORDS: gl.constexpr = tile_layout(REPEATS, 4, WARPS)
    VALUES: gl.constexpr = tile_layout(REPEATS, VECTOR, WARPS)
    EACH_VECTOR: gl.constexpr = gl.SliceLayout(2, VALUES)
    EACH_THREAD: gl.constexpr = gl.SliceLayout(0, EACH_VECTOR)
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
    p_finals = p_packets + units * parts
    p_claims = p_finals + units
    unit, part = block // parts, block % parts
    for place in gl.static_range(TILES):
        first = (part * TILES + place) * TILE
        begin_copy(
            slots.index(place), p_x, places, unit, first, length - first, x_sample, o_placed, o_words, EVEN, ACROSS,
        )  # fmt: skip
        commit_group()
    alpha = gl.cast(activation_parameter, gl.float32) if ALPHA is None else gl.to_tensor(ALPHA)
    epsilon = gl.cast(eps, gl.float32)
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
        # What the first tile of results is made with, on its way while a chunk is summed.
        sample = quotient(due_unit, magic_groups)
        group = due_unit - sample * groups
        channel = group * D
        modulated = sample.to(gl.int64) * (groups * D)
        if IN_CHANNEL:
            o_channel = channel if ACROSS else channel + quotient(due_part * TILES, magic_channel)
        else:
            o_channel = channel + channels_of_vectors(
                due_part * (TILES * TILE), o_vectors, channel_length, magic_channel, D, SHORT
            )
        gain, offset = affine(p_weight, p_bias, p_scale, p_shift, o_channel, modulated + o_channel)

        if summed_unit < units:
            if p_before is not None:  # on its way while copies are awaited
                first = summed_part * (TILES * TILE)
                p_words = words_of_tile(p_before, places, summed_unit, first, before_sample, o_placed, o_words, ACROSS)
                b_before = load_words(p_words, length - first, o_words, False)
            for place in gl.static_range(TILES):
                wait_group(TILES - place - 1)
                b_x = values_of(slots.index(summed * TILES + place).load(WORDS), VALUES, DTYPE)
                first = (summed_part * TILES + place) * TILE
                if not EVEN:
                    m_vector = o_vectors < length - first
                if ADDS:
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
                            b_before = load_words(p_words, length - first - TILE, o_words, False)
                        b_x = b_x + b_added if p_numbers is None else gl.fma(b_number, b_added, b_x)
                    else:
                        b_x += b_number
                    b_sum = words_of(b_x, WORDS, DTYPE)
                    slots.index(summed * TILES + place).store(b_sum)
                    if p_total is not None:
                        p_words = words_of_tile(
                            p_total, places, summed_unit, first, y_sample, o_placed, o_words, ACROSS
                        )
                        store_words(p_words, b_sum, length - first, o_words, False)
                    b_x = values_of(b_sum, VALUES, DTYPE)
                    if not EVEN:  # where zeros were copied
                        b_x = gl.where(m_vector[:, :, None], b_x, 0.0)
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
                    b_count = gl.sum(m_vector.to(gl.float32), 0) * VECTOR
                    b_mean = mean_of(sum_of(b_x), gl.maximum(b_count, 1.0))
                    b_x -= b_mean[None, :, None]
                    b_m2 = gl.where(m_vector, product_sums_of(b_x, b_x, EACH_VECTOR), 0.0)
                    b_m2 = gl.convert_layout(gl.sum(b_m2, 0), EACH_THREAD, assert_trivial=True)
                    if place == 0:
                        mean, m2, count = b_mean, b_m2, b_count
                    else:
                        mean, m2, count = merge(mean, m2, count, b_mean, b_m2, b_count)
            if EVEN:
                chunk_mean, variance = gl.reduce((mean, m2 * (1.0 / (TILES * EACH))), 0, pool)
                chunk_m2 = variance * (TILES * EACH * THREADS)
            else:
                vectors = gl.minimum(length - summed_part * (TILES * TILE), TILES * TILE)
                chunk_mean = mean_of(gl.sum(mean * count, 0), (vectors * VECTOR).to(gl.float32))
                distance = mean - chunk_mean
                chunk_m2 = gl.sum(m2 + distance * distance * count, 0)
            publish(p_packets + summed_unit * parts + summed_part, chunk_mean, chunk_m2)
        if LEAD:
            led, led_part = pending[LED], pending[LED + 1]
            if (led >= 0) & (led < units) & (led_part == 0):
                lead_moments(
                    p_packets, p_finals, p_mean, p_rstd, p_var, led, 1, 0, 1, parts, length, VECTOR, elements, epsilon,
                    TILES * TILE, PARTS, 1, OF_LEADERS,
                )  # fmt: skip

        if due:
            if p_behind is not None:  # on its way while the unit's numbers are awaited
                first = due_part * (TILES * TILE)
                p_words = words_of_tile(p_behind, places, due_unit, first, behind_sample, o_placed, o_words, ACROSS)
                b_behind = load_words(p_words, length - first, o_words, EVEN)
            if LEAD:
                unit_mean, rstd = settle(b_packet, p_packet)
            else:
                b_mean, b_m2 = settle(b_packet, p_packet)
                unit_mean, variance = merge_chunks(b_mean, b_m2, c_part, elements, 0)
                rstd = inverse_deviation(variance, epsilon)
                if due_part == 0:
                    store_moments(p_mean, p_rstd, p_var, due_unit, unit_mean, rstd, variance)
            if MORE:
                unit, part = claimed(p_claims, summed_unit, units, parts, blocks)
            else:
                unit, part = units + 0, gl.to_tensor(0)
            for place in gl.static_range(TILES):
                first = (due_part * TILES + place) * TILE
                if place < TILES - 1 and not ACROSS:
                    if IN_CHANNEL:
                        o_channel = channel + gl.minimum(quotient(due_part * TILES + place + 1, magic_channel), D - 1)
                    else:
                        o_channel = channel + channels_of_vectors(
                            first + TILE, o_vectors, channel_length, magic_channel, D, SHORT
                        )
                    next_gain, next_offset = affine(
                        p_weight, p_bias, p_scale, p_shift, o_channel, modulated + o_channel
                    )
                b_x = values_of(slots.index(freed * TILES + place).load(WORDS), VALUES, DTYPE)
                if IN_CHANNEL:
                    b_z = gl.fma(b_x - unit_mean, gain * rstd, offset)
                else:
                    b_gain = gain * rstd
                    b_z = gl.fma(b_x - unit_mean, b_gain[:, :, None], offset[:, :, None])
                if place < TILES - 1 and not ACROSS:
                    gain, offset = next_gain, next_offset
                if p_behind is not None:
                    b_z += values_of(b_behind, VALUES, DTYPE)
                    if place < TILES - 1:
                        p_words = words_of_tile(
                            p_behind, places, due_unit, first + TILE, behind_sample, o_placed, o_words, ACROSS
                        )
                        b_behind = load_words(p_words, length - first - TILE, o_words, EVEN)
                b_y = words_of(VALUE(b_z, alpha), WORDS, DTYPE)
                if MORE:
                    begun = (part * TILES + place) * TILE
                    begin_copy(
                        slots.index(freed * TILES + place), p_x, places, unit, begun, length - begun, x_sample,
                        o_placed, o_words, EVEN, ACROSS,
                    )  # fmt: skip
                    commit_group()
                p_words = words_of_tile(p_y, places, due_unit, first, y_sample, o_placed, o_words, ACROSS)
                store_words(p_words, b_y, length - first, o_words, EVEN)
        else:
            if MORE:
                unit, part = claimed(p_claims, summed_unit, units, parts, blocks)
            else:
                unit, part = units + 0, gl.to_tensor(0)
            for place in gl.static_range(TILES):
                if MORE:
                    begun = (part * TILES + place) * TILE
                    begin_copy(
                        slots.index(freed * TILES + place), p_x, places, unit, begun, length - begun, x_sample,
                        o_placed, o_words, EVEN, ACROSS,
                    )  # fmt: skip
                    commit_group()
        pending = next_pending(pending, unit, part)
        summed = freed
