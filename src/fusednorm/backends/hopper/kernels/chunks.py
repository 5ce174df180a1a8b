"""The chunks of units that a block works on in turn: where they are, how they come into shared memory, their affine.

Sizes and strides come in vectors of 16 bytes, so that the compiler knows how wide the copies are. ``magic_groups`` and
``magic_channel`` are ceil(2^31 / n): the upper 32 bits of 2 i magic are i // n.
"""

from fusednorm.private.gluon_names import async_copy, gl, gluon


@gluon.jit
def quotient(dividend, magic):
    """dividend // n, where magic is ceil(2^31 / n) and dividend n is less than 2^31."""
    return gl.umulhi((2 * dividend).to(gl.uint32), magic).to(gl.int32)


@gluon.jit
def begin_copy(
    p_slot, p_x, chunk_unit, chunk_part, units, length, groups, x_sample, magic_groups, o_words,
    PLACE: gl.constexpr, TILES: gl.constexpr, TILE: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Begin to copy tile PLACE of a chunk, if there is such a chunk; the caller counts it (``commit_group``)."""
    if chunk_unit < units:
        first = (chunk_part * TILES + PLACE) * TILE
        sample = quotient(chunk_unit, magic_groups)
        begin = sample.to(gl.int64) * x_sample + (chunk_unit - sample * groups).to(gl.int64) * length + first
        p_words = p_x + begin * 4 + o_words
        if EVEN:
            async_copy.async_copy_global_to_shared(p_slot, p_words)
        else:
            async_copy.async_copy_global_to_shared(p_slot, p_words, mask=o_words < (length - first) * 4)


@gluon.jit
def load_words(p_words, begin, first, length, o_words, EVEN: gl.constexpr):
    """The words of a tile of a unit, from vector ``first`` of it on; the unit begins at vector ``begin``."""
    p_words += (begin + first) * 4 + o_words
    return gl.load(p_words) if EVEN else gl.load(p_words, mask=o_words < (length - first) * 4, other=0)


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
def following(chunk_unit, chunk_part, parts, step_unit, step_part):
    """The unit of a block's next chunk and its part of it."""
    chunk_unit += step_unit
    chunk_part += step_part
    over = chunk_part >= parts
    return gl.where(over, chunk_unit + 1, chunk_unit), gl.where(over, chunk_part - parts, chunk_part)


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
