"""The chunks of units that a block works on in turn: where they are, how they come into shared memory, their affine.

Sizes and strides come in vectors of 16 bytes, so that the compiler knows how wide the copies are. ``magic_groups`` and
``magic_channel`` are ceil(2^31 / n): the upper 32 bits of 2 i magic are i // n.
"""

from typing import Any, NamedTuple

from fusednorm.private.gluon_names import async_load, gl, gluon


class Places(NamedTuple):
    """Where the ``units`` lie, each of ``length`` vectors. A unit is one of the ``groups`` of a sample, which lie one
    behind the other; or, ACROSS samples, one of ``groups`` channels, of which each sample has ``channel`` vectors."""

    units: Any
    length: Any
    groups: Any
    magic_groups: Any
    channel: Any
    magic_channel: Any


@gluon.jit
def quotient(dividend, magic):
    """dividend // n, where magic is ceil(2^31 / n) and dividend n is less than 2^31, or ``config.divides`` says so."""
    return gl.umulhi((2 * dividend).to(gl.uint32), magic).to(gl.int32)


@gluon.jit
def words_of_tile(p_words, places, unit, first, step, o_vectors, o_words, ACROSS: gl.constexpr):
    """Pointers to the words of the tile that begins at vector ``first`` of a unit, in a tensor whose samples are
    ``step`` vectors apart."""
    if ACROSS:
        o_sample = quotient(first + o_vectors, places.magic_channel)
        begin = unit.to(gl.int64) * places.channel + first
        o_begin = begin + o_sample.to(gl.int64) * (step - places.channel)
        return p_words + o_begin[:, :, None] * 4 + o_words
    else:
        sample = quotient(unit, places.magic_groups)
        begin = sample.to(gl.int64) * step + (unit - sample * places.groups).to(gl.int64) * places.length + first
        return p_words + begin * 4 + o_words


@gluon.jit
def begin_copy(
    p_slot, p_x, places, unit, first, left, step, o_vectors, o_words, EVEN: gl.constexpr, ACROSS: gl.constexpr
):
    """Begin to copy a tile from vector ``first`` of a unit on, if there is such a unit, ``left`` vectors at most; the
    caller counts it (``commit_group``). EVEN: all tiles are full."""
    if unit < places.units:
        p_words = words_of_tile(p_x, places, unit, first, step, o_vectors, o_words, ACROSS)
        if EVEN:
            async_load(p_slot, p_words)
        else:
            async_load(p_slot, p_words, mask=o_words < left * 4)


@gluon.jit
def load_words(p_words, left, o_words, EVEN: gl.constexpr):
    """The words of such a tile, and 0 beyond."""
    return gl.load(p_words) if EVEN else gl.load(p_words, mask=o_words < left * 4, other=0)


@gluon.jit
def store_words(p_words, b_words, left, o_words, EVEN: gl.constexpr):
    """Store the words of such a tile."""
    if EVEN:
        gl.store(p_words, b_words)
    else:
        gl.store(p_words, b_words, mask=o_words < left * 4)


@gluon.jit
def channels_of_vectors(first, o_vectors, channel_length, magic_channel, D, SHORT: gl.constexpr):
    """The channels of a group in which vectors of a tile lie, whose first one is vector ``first`` of the group. SHORT:
    a channel is shorter than a tile."""
    o_vector = first % channel_length + o_vectors
    if SHORT:
        o_channel = first // channel_length + quotient(o_vector, magic_channel)
    else:
        o_channel = first // channel_length + (o_vector >= channel_length)
    return gl.minimum(o_channel, D - 1)


@gluon.jit
def numbers_of_tile(
    p_numbers, places, unit, first, D, o_vectors,
    TILE: gl.constexpr, IN_CHANNEL: gl.constexpr, SHORT: gl.constexpr, ACROSS: gl.constexpr,
):  # fmt: skip
    """Numbers for each sample and channel: those of a tile's vectors, or the one that all of them have."""
    unit = gl.minimum(unit, places.units - 1)
    if ACROSS:
        o_sample = quotient(gl.minimum(first + o_vectors, places.length - 1), places.magic_channel)
        return gl.load(p_numbers + o_sample * places.groups + unit).to(gl.float32)[:, :, None]
    elif IN_CHANNEL:
        o_channel = gl.minimum(quotient(first // TILE, places.magic_channel), D - 1)
        return gl.load(p_numbers + unit * D + o_channel).to(gl.float32)
    else:
        o_channel = channels_of_vectors(first, o_vectors, places.channel, places.magic_channel, D, SHORT)
        return gl.load(p_numbers + unit * D + o_channel).to(gl.float32)[:, :, None]


@gluon.jit
def affine(p_weight, p_bias, p_scale, p_shift, o_channel, o_modulation):
    """A = weight (1 + scale) and B = bias (1 + scale) + shift of channels."""
    offset = o_channel.to(gl.float32) * 0.0
    gain = offset + 1.0
    if p_weight is not None:
        gain = gl.load(p_weight + o_channel).to(gl.float32)
    if p_bias is not None:
        offset = gl.load(p_bias + o_channel).to(gl.float32)
    if p_scale is not None:
        factor = 1.0 + gl.load(p_scale + o_modulation).to(gl.float32)
        gain *= factor
        offset *= factor
    if p_shift is not None:
        offset += gl.load(p_shift + o_modulation).to(gl.float32)
    return gain, offset
