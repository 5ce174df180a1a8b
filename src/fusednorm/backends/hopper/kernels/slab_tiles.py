"""Tiles of slabs of channels_last: where they are, how they come into shared memory, and the sums over their pieces.

A piece is SPAN neighbouring channels, the most that divide a vector and a group. A thread has the same vector of
channels at some positions of each tile.
"""

from typing import Any, NamedTuple

import triton

from fusednorm.backends.hopper.kernels.chunks import affine, quotient
from fusednorm.private.gluon_names import async_load, gl, gluon


class SlabPlaces(NamedTuple):
    """Where the ``slabs`` lie: ``bands`` of them in a sample, each of ``held`` vectors of so many ``positions``. Of a
    tile's words, which vectors a slab has, and their positions in the tile."""

    slabs: Any
    bands: Any
    magic_bands: Any
    held: Any
    positions: Any
    m_lane: Any
    o_row: Any


@triton.constexpr_function
def sides_layout(each, lanes, warps):
    """The layout of (threads that have the same vector, ``each`` numbers of every vector of a position)."""
    across = min(lanes, 32)
    return gl.BlockedLayout([1, each], [32 // across, across], [warps * across // lanes, lanes // across], [1, 0])


@triton.constexpr_function
def sums_layout(count, side, warps):
    """The layout of (threads that have the same vector, so many channels or pieces) in which a thread has few of these
    of as many of those threads as can be."""
    threads = 32 * warps
    share = max(1, threads // count)
    within = min(share, 32)
    return gl.BlockedLayout(
        [side // share, max(1, count // threads)],
        [within, 32 // within],
        [share // within, warps * within // share],
        [1, 0],
    )


@triton.constexpr_function
def groups_layout(pieces, warps):
    """The layout of (groups, pieces)."""
    across = min(pieces, 32)
    return gl.BlockedLayout([1, 1], [32 // across, across], [warps, 1], [1, 0])


@triton.constexpr_function
def merge_layout(groups, parts, warps):
    """The layout of (groups, chunks) of the numbers that a block merges."""
    across = min(parts, 32)
    down = min(warps, max(1, groups * across // 32))
    return gl.BlockedLayout([1, 1], [32 // across, across], [down, warps // down], [1, 0])


@gluon.jit
def products_of_repeats(b_one, b_other, layout: gl.constexpr):
    """The products of each thread's values (repeats, threads, elements), summed over the repeats, which 4 divides. It
    takes an instruction and a quarter for each, where products and their sum would take two."""
    repeats: gl.constexpr = b_one.shape[0]
    threads: gl.constexpr = b_one.shape[1]
    vector: gl.constexpr = b_one.shape[2]
    b_even, b_odd = gl.split(gl.reshape(gl.permute(b_one, [1, 2, 0]), [threads, vector, repeats // 2, 2]))
    c_even, c_odd = gl.split(gl.reshape(gl.permute(b_other, [1, 2, 0]), [threads, vector, repeats // 2, 2]))
    b_a, b_b = gl.split(gl.reshape(b_even, [threads, vector, repeats // 4, 2]))
    c_a, c_b = gl.split(gl.reshape(c_even, [threads, vector, repeats // 4, 2]))
    b_c, b_d = gl.split(gl.reshape(b_odd, [threads, vector, repeats // 4, 2]))
    c_c, c_d = gl.split(gl.reshape(c_odd, [threads, vector, repeats // 4, 2]))
    b_sum = gl.sum(gl.fma(b_d, c_d, gl.fma(b_c, c_c, gl.fma(b_b, c_b, b_a * c_a))), 2)
    return gl.convert_layout(b_sum, layout, assert_trivial=True)


@gluon.jit
def pieces_of(b_elements, layout: gl.constexpr, PIECES: gl.constexpr):
    """The sums of numbers of each thread's vector (threads, elements) over its pieces."""
    threads: gl.constexpr = b_elements.shape[0]
    span: gl.constexpr = b_elements.shape[1] // PIECES
    b_sum = gl.sum(gl.reshape(b_elements, [threads, PIECES, span]), 2)
    return gl.convert_layout(b_sum, layout, assert_trivial=True)


@gluon.jit
def elements_of(b_pieces, layout: gl.constexpr, VECTOR: gl.constexpr):
    """Numbers of pieces (threads, pieces), for each element of a thread's vector."""
    threads: gl.constexpr = b_pieces.shape[0]
    if b_pieces.shape[1] == VECTOR:
        return gl.convert_layout(b_pieces, layout, assert_trivial=True)
    else:
        twice: gl.constexpr = 2 * b_pieces.shape[1]
        return elements_of(gl.reshape(gl.join(b_pieces, b_pieces), [threads, twice]), layout, VECTOR)


@gluon.jit
def of_threads(b_numbers, sides: gl.constexpr, layout: gl.constexpr, SIDE: gl.constexpr, THREADS: gl.constexpr):
    """Numbers of the channels or the pieces of a position's vectors, for each thread those of its vector (threads,
    numbers), which it has already."""
    count: gl.constexpr = b_numbers.shape[0]
    b_all, _ = gl.broadcast(b_numbers[None, :], gl.zeros([SIDE, count], gl.float32, sides))
    b_all = gl.reshape(b_all, [THREADS, SIDE * count // THREADS])
    return gl.convert_layout(b_all, layout, assert_trivial=True)


@gluon.jit
def of_pieces(b_groups, m_piece, groups: gl.constexpr, pieces: gl.constexpr, ALONE: gl.constexpr):
    """Numbers of groups, for each of their pieces."""
    if ALONE:
        return gl.convert_layout(b_groups, pieces)
    else:
        b_groups = gl.convert_layout(b_groups, gl.SliceLayout(1, groups))[:, None]
        return gl.convert_layout(gl.sum(gl.where(m_piece, b_groups, 0.0), 0), pieces)


@gluon.jit
def sum_of_threads(b_numbers, layout: gl.constexpr, SIDE: gl.constexpr):
    """Numbers of threads (threads, elements), summed for each channel over those that have the same vector."""
    count: gl.constexpr = b_numbers.shape[0] * b_numbers.shape[1] // SIDE
    return gl.sum(gl.convert_layout(gl.reshape(b_numbers, [SIDE, count]), layout), 0)


@gluon.jit
def offsets_of_rows(row, layout: gl.constexpr, REPEATS: gl.constexpr, THREADS: gl.constexpr, LANES: gl.constexpr):
    """The places of a tile's words in memory where rows are so many vectors long."""
    o_row = rows_of(layout, REPEATS, THREADS, LANES)[:, :, None]
    o_lane = (gl.arange(0, THREADS, gl.SliceLayout(0, gl.SliceLayout(2, layout))) % LANES)[None, :, None]
    o_word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return (o_row * row + o_lane) * 4 + o_word


@gluon.jit
def rows_of(layout: gl.constexpr, REPEATS: gl.constexpr, THREADS: gl.constexpr, LANES: gl.constexpr):
    """The positions of a tile (repeats, threads)."""
    o_repeat = gl.arange(0, REPEATS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None]
    o_thread = gl.arange(0, THREADS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :]
    return o_repeat * (THREADS // LANES) + o_thread // LANES


@gluon.jit
def words_of_rows(p_words, places, slab, first, sample_step, row_step, o_words):
    """Pointers to the words of the tile that begins at position ``first`` of a slab, in a tensor whose samples and rows
    are so many vectors apart."""
    sample = quotient(slab, places.magic_bands)
    begin = sample.to(gl.int64) * sample_step + first.to(gl.int64) * row_step
    return p_words + (begin + (slab - sample * places.bands) * places.held) * 4 + o_words


@gluon.jit
def channels_of_slab(held, layout: gl.constexpr, LANES: gl.constexpr, VECTOR: gl.constexpr):
    """The channels of a slab's LANES vectors, counted from its first one; beyond its last vector those of that one, in
    vectors, so that the compiler knows how wide the loads are."""
    o_channel = gl.arange(0, LANES * VECTOR, layout)
    return gl.minimum(o_channel // VECTOR, held - 1) * VECTOR + o_channel % VECTOR


@gluon.jit
def affine_of_slab(p_weight, p_bias, p_scale, p_shift, places, slab, channels, o_channel, VECTOR: gl.constexpr):
    """A and B of channels of a slab."""
    sample = quotient(slab, places.magic_bands)
    channel = (slab - sample * places.bands) * places.held * VECTOR + o_channel
    return affine(p_weight, p_bias, p_scale, p_shift, channel, sample.to(gl.int64) * channels + channel)


@gluon.jit
def mask_of_rows(places, first, end, o_words):
    """Which words of such a tile are those of the slab, at positions before ``end``."""
    return (places.m_lane & (places.o_row < end - first))[:, :, None] & (o_words >= 0)


@gluon.jit
def copy_rows(p_slot, p_words, places, o_words, FULL: gl.constexpr):
    """Begin to copy a tile all of whose positions are there."""
    if FULL:
        async_load(p_slot, p_words)
    else:
        async_load(p_slot, p_words, mask=places.m_lane[:, :, None] & (o_words >= 0))


@gluon.jit
def begin_copy(
    p_slot, p_x, places, slab, part, sample_step, row_step, o_words,
    PLACE: gl.constexpr, TILES: gl.constexpr, ROWS: gl.constexpr, EVEN: gl.constexpr, FULL: gl.constexpr,
):  # fmt: skip
    """Begin to copy tile PLACE of a chunk, if there is such a chunk; the caller counts it."""
    if slab < places.slabs:
        first = (part * TILES + PLACE) * ROWS
        p_words = words_of_rows(p_x, places, slab, first, sample_step, row_step, o_words)
        if EVEN:  # noqa: SIM114 -- known to the compiler, the next one is not
            copy_rows(p_slot, p_words, places, o_words, FULL)
        elif places.positions - first >= ROWS:
            copy_rows(p_slot, p_words, places, o_words, FULL)
        else:
            async_load(p_slot, p_words, mask=mask_of_rows(places, first, places.positions, o_words))


@gluon.jit
def store_full_rows(p_words, b_words, places, o_words, FULL: gl.constexpr):
    """Store a tile all of whose positions are there."""
    if FULL:
        gl.store(p_words, b_words)
    else:
        gl.store(p_words, b_words, mask=places.m_lane[:, :, None] & (o_words >= 0))


@gluon.jit
def store_rows(p_words, b_words, places, first, o_words, ROWS: gl.constexpr, EVEN: gl.constexpr, FULL: gl.constexpr):
    """Store the words of the tile that begins at position ``first``."""
    if EVEN:  # noqa: SIM114 -- known to the compiler, the next one is not
        store_full_rows(p_words, b_words, places, o_words, FULL)
    elif places.positions - first >= ROWS:
        store_full_rows(p_words, b_words, places, o_words, FULL)
    else:
        gl.store(p_words, b_words, mask=mask_of_rows(places, first, places.positions, o_words))


@gluon.jit
def load_rows(p_words, places, slab, first, end, sample_step, row_step, o_words):
    """The words of a tile, 0 where there are none."""
    p_words = words_of_rows(p_words, places, slab, first, sample_step, row_step, o_words)
    return gl.load(p_words, mask=mask_of_rows(places, first, end, o_words), other=0)
