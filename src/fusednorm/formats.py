"""The 8-bit formats of a quantized output, each once: what every backend needs to round to it.

q = saturate(round(y / scale)), ties to even. A float8 code is sign, exponent and mantissa; an int8 is a number. Below
its least normal number a float8 has a fixed unit, as an int8 has everywhere.

This module is pure Python: it imports neither torch nor a kernel language.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import pack, unpack

#: A row's scale is that of this amax at the least, as in torchao: a row of zeros has a scale that is not 0.
LEAST_AMAX = 1e-12


def float32_bits(value: float) -> int:
    """The bits of a float32, as an unsigned integer."""
    return int(unpack("<I", pack("<f", value))[0])


@dataclass(frozen=True, slots=True)
class Format:
    """``largest`` is what the amax of a row becomes, ``unit`` the exponent of the fixed unit, and ``mantissa`` the
    number of a float8's bits of mantissa, 0 for int8."""

    largest: float
    unit: int
    mantissa: int

    @property
    def is_float(self) -> bool:
        return self.mantissa > 0

    @property
    def most_negative(self) -> float:
        """The size of the most negative number: int8 has one more than there are positive ones."""
        return self.largest if self.is_float else self.largest + 1

    @property
    def least_normal(self) -> int:
        """The bits of the least normal number of a float8, as a float32."""
        return float32_bits(2.0 ** (self.unit + self.mantissa))

    @property
    def shift(self) -> int:
        """By how many bits a float32 has more mantissa."""
        return 23 - self.mantissa

    @property
    def rebias(self) -> int:
        """What a shifted float32 is above the code of a float8, whose exponents have another bias."""
        return (self.least_normal >> self.shift) - (1 << self.mantissa)

    @property
    def fixed(self) -> float:
        """The float32 whose last place is the fixed unit: numbers added to it are rounded to that, ties to even."""
        return float(2.0 ** (self.unit + 23))


FORMATS = {
    "float8_e4m3fn": Format(448.0, -9, 3),
    "float8_e5m2": Format(57344.0, -16, 2),
    "int8": Format(127.0, 0, 0),
}


@dataclass(frozen=True, slots=True)
class Quantized:
    """How a problem's output is quantized: the name of its dtype, and whether each row has a scale of its own, made
    from it, or all have the one that is given."""

    dtype: str
    per_row: bool

    @property
    def format(self) -> Format:
        return FORMATS[self.dtype]
