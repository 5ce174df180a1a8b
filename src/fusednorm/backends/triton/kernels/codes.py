"""Outputs of 8 bits: rows are scaled by amax / largest or by a given scale, rounded, and stored as bytes.

From sm_89 on NVIDIA's own conversions round and saturate. Elsewhere a float32 is rounded in integers, as on the CPU: to
fewer bits of mantissa by an addition to its bits, and below the least normal number, or to an int8, by the addition of
a number whose last place is the unit. Magnitudes are compared by their bits, of which those of NaN are the largest.
"""

import triton
import triton.language as tl

from fusednorm.formats import FORMATS, LEAST_AMAX, float32_bits

_LEAST_AMAX = tl.constexpr(LEAST_AMAX)
_MAGNITUDE, _INFINITY, _NAN_CODE = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000), tl.constexpr(0x7F)


def _facts(name):
    """largest, its bits and those of the most negative number, the unit's number and its bits; and of a float8 the bits
    of the least normal number, the shift and the rebias."""
    form = FORMATS[name]
    extremes = float32_bits(form.largest), float32_bits(form.most_negative)
    of_float = (form.least_normal, form.shift, form.rebias) if form.is_float else ()
    return tl.constexpr((form.largest, *extremes, form.fixed, float32_bits(form.fixed), *of_float))


E4M3, E5M2, INT8 = map(_facts, FORMATS)


@triton.constexpr_function
def fact(facts, place):
    return facts[place]


@triton.jit
def in_units(size, FACTS: tl.constexpr):
    """The bits of a magnitude as a number of units, rounded to nearest, ties to even."""
    return (size.to(tl.float32, bitcast=True) + fact(FACTS, 3)).to(tl.int32, bitcast=True) - fact(FACTS, 4)


@triton.jit
def float8_code(v, FACTS: tl.constexpr):
    bits = v.to(tl.int32, bitcast=True)
    size = bits & _MAGNITUDE
    held = tl.minimum(size, fact(FACTS, 1))
    half: tl.constexpr = (1 << (fact(FACTS, 6) - 1)) - 1
    rounded = ((held + ((held >> fact(FACTS, 6)) & 1) + half) >> fact(FACTS, 6)) - fact(FACTS, 7)
    code = tl.where(held >= fact(FACTS, 5), rounded, in_units(held, FACTS))
    return tl.where(size > _INFINITY, _NAN_CODE, code) | ((bits >> 24) & 0x80)


@triton.jit
def int8_code(v, FACTS: tl.constexpr):
    """NaN becomes 0."""
    bits = v.to(tl.int32, bitcast=True)
    size = bits & _MAGNITUDE
    number = in_units(tl.minimum(size, tl.where(bits < 0, fact(FACTS, 2), fact(FACTS, 1))), FACTS)
    number = tl.where(size > _INFINITY, 0, number)
    return tl.where(bits < 0, -number, number)


@triton.jit
def codes_of(v, OUT: tl.constexpr, NATIVE: tl.constexpr):
    if OUT == "int8":
        return int8_code(v, INT8).to(tl.int8)
    elif NATIVE and OUT == "float8_e4m3fn":
        return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif NATIVE:
        return v.to(tl.float8e5).to(tl.uint8, bitcast=True)
    elif OUT == "float8_e4m3fn":
        return float8_code(v, E4M3).to(tl.uint8)
    else:
        return float8_code(v, E5M2).to(tl.uint8)


@triton.jit
def scale_of(amax, FACTS: tl.constexpr):
    held = tl.where(amax < _LEAST_AMAX, _LEAST_AMAX, amax)  # a NaN stays
    return tl.div_rn(held, tl.full(amax.shape, fact(FACTS, 0), tl.float32))


@triton.jit
def row_scale(amax, OUT: tl.constexpr):
    if OUT == "int8":
        return scale_of(amax, INT8)
    elif OUT == "float8_e4m3fn":
        return scale_of(amax, E4M3)
    else:
        return scale_of(amax, E5M2)


@triton.jit
def store_codes(p_out, b_y, mask, p_scale, o_row, m_row, OUT: tl.constexpr, BY_ROW: tl.constexpr, NATIVE: tl.constexpr):
    """Stores the codes of rows, and with BY_ROW the scale of each, which is given otherwise."""
    b = b_y.to(tl.float32)
    if BY_ROW:
        size = tl.where(mask, b.to(tl.int32, bitcast=True) & _MAGNITUDE, 0)
        scale = row_scale(tl.max(size, 1).to(tl.float32, bitcast=True), OUT)
        tl.store(p_scale + o_row, scale, m_row)
        factor = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    else:
        factor = tl.div_rn(tl.full((), 1.0, tl.float32), tl.load(p_scale))
    tl.store(p_out, codes_of(b * factor, OUT, NATIVE), mask)
