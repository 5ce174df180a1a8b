"""What the tests of quantized outputs share: the judge in float64, and what a format rounds a number to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fusednorm
from fusednorm.backends import reference
from fusednorm.formats import FORMATS, Quantized
from fusednorm.norm import Family, norm_of
from fusednorm.operands import Operands

OUT_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
EPS32 = torch.finfo(torch.float32).eps


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rounded(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """What a format makes of scaled numbers, by torch's conversions, in float64."""
    return reference.codes(scaled.float(), Quantized(name_of(dtype), True)).double()


def bits(tensor: Tensor) -> Tensor:
    """The bytes of 8-bit numbers, which compare as such."""
    return tensor.view(torch.uint8)


def steps(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between the neighbours of scaled numbers in a format."""
    form = FORMATS[name_of(dtype)]
    if not form.is_float:
        return torch.ones_like(scaled)
    exponent = scaled.abs().clamp(min=2.0**-60).log2().floor() - form.mantissa
    return 2.0 ** exponent.clamp(min=float(form.unit))


def wide(family: Family, x: Tensor, weight: Tensor | None, bias: Tensor | None, **keywords: Any) -> Tensor:
    """y in float64."""
    given = [None if each is None else each.double() for each in (x, weight, bias)]
    with fusednorm.use_instance("reference"):
        if family == "rms_norm":
            return fusednorm.rms_norm(given[0], x.shape[-1:], given[1], 1e-5, **keywords)
        return fusednorm.layer_norm(given[0], x.shape[-1:], given[1], given[2], 1e-5, **keywords)


def faults(q: Tensor, scale: Tensor, y: Tensor, error: float, by_row: bool) -> list[str]:
    """What is wrong with q and its scale, where y is the float64 output and a float32 one may err by ``error``."""
    form, found = FORMATS[name_of(q.dtype)], []
    got, wide_scale = q.double(), scale.double()
    if by_row:
        right = y.abs().amax(-1, keepdim=True) / form.largest
        if not bool(((wide_scale - right).abs() <= error / form.largest + 2 * EPS32 * right).all()):
            found.append("the scale is not amax / largest")
    scaled = y / wide_scale
    slack = error / wide_scale + 4 * EPS32 * scaled.abs()
    low, high = rounded(scaled - slack, q.dtype), rounded(scaled + slack, q.dtype)
    if not bool(((low <= got) & (got <= high)).all()):
        found.append("a code is not what the float32 output rounds to")
    inside = scaled.abs() < form.largest
    distance = (got - scaled).abs()[inside]
    if not bool((distance <= (steps(scaled, q.dtype) / 2 * (1 + 1e-12) + slack)[inside]).all()):
        found.append("a code is more than half a step away")
    return found


def error_of_float32(family: Family, x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor) -> float:
    """Twice the largest error of the formula in float32, as the library's tolerance allows, and a rounding."""
    norm = norm_of(family, 1, 1, 1e-5)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    plain = reference.forward(norm, Operands(x, weight, bias), compute_dtype=dtype).output
    return 2 * float((plain.double() - y).abs().max()) + 4 * EPS32 * float(y.abs().max()) if y.numel() else 0.0


def hard_numbers(out_dtype: torch.dtype) -> Tensor:
    """All bfloat16 and float16 numbers, all numbers of the format, their middles, and what lies beside these."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    numbers = [every.view(torch.bfloat16).float(), every.view(torch.float16).float()]
    own = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(out_dtype).float()
    own = own[own.isfinite()].sort().values
    exact = torch.cat([own, (own[1:] + own[:-1]) / 2])
    infinity = torch.tensor(torch.inf)
    numbers += [exact, torch.nextafter(exact, infinity), torch.nextafter(exact, -infinity)]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**31), 2**31, (1 << 18,), generator=generator).to(torch.int32)
    return torch.cat([*numbers, drawn.view(torch.float32)])
