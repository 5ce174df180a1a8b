"""Where the tiles of kernels lie: their offsets, their masks, and the ends of chunks. tiles.py says what these are."""

import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.aggregates import Steps


@triton.jit
def divided(n, number, inverse):
    """n // number and n % number, for n from 0 to 2**31 - 1.

    A division by an argument takes some hundred cycles, for which a program's first load would wait. ``inverse`` is
    (2**64 - 1) // number, and the upper half of (n + 1) inverse is the quotient: that product is (n + 1) / number times
    2**64, less a little that does not reach 2**64 / number. A number that is compiled in needs no inverse.
    """
    if isinstance(number, int):
        return n // number, n % number
    else:
        factor = n.to(tl.uint32) + tl.full((), 1, tl.uint32)
        low, high = inverse.to(tl.uint32), (inverse.to(tl.int64) >> 32).to(tl.uint32)
        quotient = ((factor.to(tl.uint64) * high + tl.umulhi(factor, low)) >> 32).to(tl.int32)
        return quotient, n - quotient * number


@triton.jit
def locate(pid, blocks, by_blocks, chunks, by_chunks, LAST: tl.constexpr):
    """The sample, the block of channels and the chunk of a program; neighbouring programs take neighbouring memory."""
    if LAST:
        row, block = divided(pid, blocks, by_blocks)
        n, chunk = divided(row, chunks, by_chunks)
    else:
        row, chunk = divided(pid, chunks, by_chunks)
        n, block = divided(row, blocks, by_blocks)
    return n, block, chunk


@triton.jit
def aligned(value, ALIGN: tl.constexpr):
    """The value, of which the compiler now knows that ALIGN divides it. The width of loads and stores depends on that.
    Of an argument Triton asks whether 16 divides it, but 4 or 8 elements make the widest load too."""
    return value // ALIGN * ALIGN


@triton.jit
def wide_of(row):
    """A number of rows in 64 bits, in which it may be multiplied by a stride."""
    return tl.full((), 0, tl.int64) + row


@triton.jit
def no_wider(o, ALIGN: tl.constexpr):
    """Offsets, of which the compiler now knows no more than that ALIGN divides where they begin.

    It gives each load the layout of its own widest form. Parameters, which begin at 16 bytes, would have another layout
    than data that does not, and move between threads, with barriers, before they meet.
    """
    return o + (tl.num_programs(2) - 1) * ALIGN  # there is one program along that axis


@triton.jit
def again(o):
    """Places, of which the compiler does not know that it has met them before.

    What it made of them it would keep in registers, two for an address, from the loads to the stores behind them. Now
    it makes that again, and more programs share a multiprocessor.
    """
    return no_wider(o, 1)


@triton.jit
def within(o, length, BLOCK: tl.constexpr, LEADING: tl.constexpr, ALIGN: tl.constexpr):
    """Which places of an axis of BLOCK are within its length, which ALIGN divides.

    LEADING are the first one to three bits of the last place, or 0 where the compiler is not to know them. Places that
    differ from it in these bits then have no mask, or no loads: of 343 in 512 the bits 101 leave one eighth with masks.
    """
    if BLOCK == 1:
        return o < 1
    elif LEADING == 0:
        return o < aligned(length, ALIGN)
    else:
        PIECE: tl.constexpr = BLOCK // 8 if LEADING > 3 else BLOCK // 4 if LEADING > 1 else BLOCK // 2
        return o <= ((length - 1) & (PIECE - 1) | LEADING * PIECE)


@triton.jit
def steps_of(sample, channel, spatial, ALIGN: tl.constexpr, LAST: tl.constexpr):
    """The strides of a tensor; the one along contiguous memory is 1, and ALIGN divides the others."""
    if LAST:
        return Steps(aligned(sample, ALIGN), channel, aligned(spatial, ALIGN))
    else:
        return Steps(aligned(sample, ALIGN), aligned(channel, ALIGN), spatial)


@triton.jit
def tile_of(b_channels, b_positions, LAST: tl.constexpr):
    """Values of channels and values of positions, each along its axis of a tile."""
    if LAST:
        return b_channels[None, :], b_positions[:, None]
    else:
        return b_channels[:, None], b_positions[None, :]


@triton.jit
def offsets_of(o_c, o_s, steps, LAST: tl.constexpr):
    b_channel, b_spatial = tile_of(o_c.to(tl.int64) * steps.channel, o_s * steps.spatial, LAST)
    return b_channel + b_spatial


@triton.jit
def mask_of(o_c, o_s, C, S, EVEN: tl.constexpr, ALIGN: tl.constexpr, LAST: tl.constexpr):
    """The mask of a tile. EVEN: chunks divide the positions, which then need no mask."""
    if LAST:
        C = aligned(C, ALIGN)
    else:
        S = aligned(S, ALIGN)
    m_channel, m_spatial = tile_of(o_c < C, o_s < S, LAST)
    return m_channel if EVEN else m_channel & m_spatial


@triton.jit
def channels_of_lanes(o_lane, C, REPEAT: tl.constexpr):
    """The channels of the lanes of a row, and which lanes there are."""
    if REPEAT == 1:
        return o_lane, o_lane < C
    else:
        return o_lane % C, o_lane < C * REPEAT


@triton.jit
def bounds_of(wide, o_c, first, span, C, S, steps, WINDOW: tl.constexpr, REPEAT: tl.constexpr, ACROSS: tl.constexpr):
    """The lanes of a chunk at which the positions of each channel begin and end; with ACROSS the elements at which a
    sample begins and ends, counted from its first row."""
    if ACROSS:
        low = wide * S % REPEAT * C
        return low, low + wide_of(S) * C
    elif WINDOW == 1:
        return o_c, o_c  # not used
    else:
        low = ((wide * steps.sample + o_c.to(tl.int64) * steps.channel + first) % WINDOW).to(tl.int32)
        return low, tl.where(o_c < C, low + tl.minimum(S - first, span).to(tl.int32), 0)


@triton.jit
def offsets_of_lanes(wide, o_c, lanes, first, steps, WINDOW: tl.constexpr):
    """The offsets of lanes of channels in a chunk that begins at position ``first``."""
    start = wide * steps.sample + o_c.to(tl.int64) * steps.channel + first
    return aligned(start, WINDOW)[:, None] + lanes


@triton.jit
def offsets_of_tile(
    wide, o_c, o_s, first, S, steps, WINDOW: tl.constexpr, REPEAT: tl.constexpr, ACROSS: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """The offsets of the first tile of a chunk that begins at position, or row, ``first``."""
    if ACROSS:
        return offsets_of(o_c, wide * S // REPEAT + first + o_s, steps, LAST)
    elif WINDOW == 1:
        return wide * steps.sample + offsets_of(o_c, first + o_s, steps, LAST)
    else:
        return offsets_of_lanes(wide, o_c, o_s[None, :], first, steps, WINDOW)


@triton.jit
def mask_of_tile(
    o_lane, o_s, first, low, high, C, S,
    EVEN: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr, REPEAT: tl.constexpr, ACROSS: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """The mask of a tile, or of its whole windows."""
    if ACROSS:
        row, window = (first + o_s) * (C * REPEAT), aligned(o_lane, ALIGN)[None, :]
        begin = tl.minimum(tl.maximum(low - row, 0), C * REPEAT).to(tl.int32)
        end = tl.minimum(tl.maximum(high - row, 0), C * REPEAT).to(tl.int32)
        return (window >= begin[:, None]) & (window + ALIGN <= end[:, None])
    elif REPEAT > 1:
        left = S.to(tl.int64) * C - (first + o_s) * (C * REPEAT)
        left = tl.minimum(tl.maximum(left, 0), C * REPEAT).to(tl.int32)
        return o_lane[None, :] < aligned(left, ALIGN)[:, None]
    elif WINDOW == 1:
        return mask_of(o_lane, first + o_s, C, S, EVEN, ALIGN, LAST)
    else:
        window = aligned(o_s, WINDOW)[None, :]
        return (window >= low[:, None]) & (window + WINDOW <= high[:, None])


@triton.jit
def whole_steps(
    first, low, high, C, S, tiles, STEP: tl.constexpr, EVEN: tl.constexpr, REPEAT: tl.constexpr, ACROSS: tl.constexpr
):
    """The first step of a chunk of channels_last of which every row is whole, which is 0, or 1 where a sample begins
    within its first row, and the one behind the last. Behind these no more than one step has rows."""
    if EVEN:
        return 0, tiles
    else:
        head = 0
        if ACROSS:
            head, end = ((first == 0) & (low > 0)).to(tl.int32), high // (C * REPEAT)
        else:
            end = wide_of(S) // REPEAT
        whole = tl.minimum(tl.maximum((end - first) // STEP, 0), tiles).to(tl.int32)
        return head, tl.maximum(whole, head)


@triton.jit
def has_whole_rows(n, chunk, span, C, S, REPEAT: tl.constexpr, ACROSS: tl.constexpr):
    """Whether each row of a chunk of channels_last, of which each has several positions, is a whole row of a sample."""
    first = chunk.to(tl.int64) * span
    if ACROSS:
        low = n.to(tl.int64) * S % REPEAT * C
        return (first * (C * REPEAT) >= low) & ((first + span) * (C * REPEAT) <= low + wide_of(S) * C)
    else:
        return (first + span) * REPEAT <= S


@triton.jit
def lanes_of_whole_rows(o_lane, C, ALIGN: tl.constexpr, REPEAT: tl.constexpr):
    """The mask of a tile of whole rows of channels."""
    return (o_lane < aligned(C * REPEAT, ALIGN))[None, :]


@triton.jit
def ends_of(
    o_lane, first, span, low, high, C,
    ALIGN: tl.constexpr, WINDOW: tl.constexpr, REPEAT: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Where the ends of a chunk are, and which elements there are in a window that is not whole: lanes of its first and
    its last window; with ACROSS the first and the last row of a sample, all lanes of each."""
    if ACROSS:
        row = tl.arange(0, 2)[:, None] * ((high - 1) // (C * REPEAT))
        element, window = row * (C * REPEAT) + o_lane[None, :], row * (C * REPEAT) + aligned(o_lane, ALIGN)[None, :]
        broken = (window < low) | (window + ALIGN > high)
        held = (element >= low) & (element < high) & (o_lane < C * REPEAT)[None, :]
        return row, held & broken & (row >= first) & (row < first + span)
    else:
        low, high = low[:, None], high[:, None]
        o_end = tl.arange(0, 2 * WINDOW)[None, :]
        lanes = tl.where(o_end < WINDOW, o_end, aligned(high, WINDOW) + o_end - WINDOW)
        window = aligned(lanes, WINDOW)
        broken = (window < low) | (window + WINDOW > high)
        return lanes, (lanes >= low) & (lanes < high) & broken & ((o_end < WINDOW) | (window > 0))


@triton.jit
def offsets_of_ends(
    wide, o_lane, o_end, first, S, steps, WINDOW: tl.constexpr, REPEAT: tl.constexpr, ACROSS: tl.constexpr
):
    """The offsets of the ends of a chunk, as :func:`ends_of` says where they are."""
    if ACROSS:
        return (wide * S // REPEAT + o_end) * steps.spatial + o_lane[None, :]
    else:
        return offsets_of_lanes(wide, o_lane, o_end, first, steps, WINDOW)
