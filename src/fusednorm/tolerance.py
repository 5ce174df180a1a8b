"""The one rule that says whether a result is right, derived from the data.

The error against fp64 may be at most ``factor`` times the error that the same formula has in plain torch with fp32
statistics, plus the roundings that nothing avoids:

    error <= factor * plain_error + roundings * (unit_out + unit_compute * (offset + tree)) * |expected|
             + half a subnormal

The largest error must keep the rule with the largest |expected|, the root mean square error with the root mean square
of expected. The roundings are there because the plain computation can be lucky, most of all in a result of few values:

- ``offset``, the largest |mean| in standard deviations: the rounding of a mean kept in fp32 moves every normalized
  value by half a unit of the offset, whatever the kernel does;
- ``tree``, log2 of the number of terms of a sum: a sum in pairs rounds each term ``tree`` times.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

import torch
from torch import Tensor


@dataclass(frozen=True)
class Allowance:
    """How far a result may be from fp64: a factor on the plain error, and how many roundings to the dtype it may make.

    The defaults are the project's rule. A peer is checked for being right, not for being accurate: it may sum in
    another order, and round every intermediate (statistics, affine, activation: up to eight of them) to the result's
    dtype, or with ``intermediates`` to the input's where that is narrower, as for the gradient of an fp32 weight.
    """

    factor: float = 2.0
    roundings: float = 1.0
    intermediates: bool = False


OURS = Allowance()
PEER = Allowance(factor=16.0, roundings=8.0, intermediates=True)


@dataclass(frozen=True)
class Verdict:
    """A result's largest error against fp64, the allowed one, the plain computation's own, and the fault or None."""

    error: float
    allowed: float
    plain_error: float
    fault: str | None

    @property
    def ok(self) -> bool:
        return self.fault is None


def offset_of(mean: Tensor | None, rstd: Tensor | None) -> float:
    """The largest |mean| in standard deviations, at least 1."""
    if mean is None or rstd is None or mean.numel() == 0:
        return 1.0
    product = (mean.double() * rstd.double()).abs()
    return max(1.0, float(product[product.isfinite()].max())) if bool(product.isfinite().any()) else 1.0


def _errors(got: Tensor, expected: Tensor) -> tuple[float, float]:
    """The largest and the root mean square difference."""
    if got.numel() == 0:
        return 0.0, 0.0
    difference = (got.double() - expected).abs()
    return float(difference.max()), float(difference.square().mean().sqrt())


def judge(
    got: Tensor,
    expected: Tensor,
    plain: Tensor,
    allowance: Allowance = OURS,
    *,
    offset: float = 1.0,
    terms: int = 1,
    spread: float = 0.0,
    intermediate: Tensor | None = None,
    input_dtype: torch.dtype | None = None,
    in_float32: bool = False,
) -> Verdict:
    """Whether ``got`` is within the rule, given the fp64 result and the plain one with fp32 statistics.

    ``terms`` is the number of terms of a sum. ``spread`` is the least magnitude to take for |expected|: one standard
    deviation for a mean, since the mean of centred data is near zero, and for a sum what terms of random signs sum to.
    ``intermediate`` is the fp64 result with the virtual tensors rounded to the dtypes that the user chose for them; the
    factor applies to its error too.

    ``plain`` is in the compute dtype, not rounded to the dtype of ``got``. For an fp64 ``got``, which is as exact as
    ``expected``, ``plain`` is still computed in fp32: its error is scaled by the ratio of the units, and the roundings
    are allowed twice, once for ``got`` and once for ``expected``. Not so ``in_float32``: then what an fp64 ``got`` is
    made of is fp32, and so were its statistics.
    """
    if got.shape != expected.shape:
        return Verdict(float("inf"), 0.0, 0.0, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    info, compute = torch.finfo(got.dtype), torch.finfo(torch.float32)
    exact = got.dtype == torch.float64 and not in_float32
    if exact:
        compute = info
    rounded = expected.to(got.dtype)
    finite = rounded.isfinite()
    special = ~(finite & got.isfinite())
    wrong = int((special & (got != rounded) & ~(got.isnan() & rounded.isnan())).sum())
    if wrong:
        return Verdict(float("inf"), 0.0, 0.0, f"{wrong} of {got.numel()} values differ in being NaN or infinite")
    if not bool(finite.all()):
        got, expected, plain = got[finite], expected[finite], plain[finite]
        intermediate = None if intermediate is None else intermediate[finite]
    largest, rms = _errors(got, expected)
    plain_largest, plain_rms = _errors(plain, expected)
    if exact:
        scale = info.eps / torch.finfo(torch.float32).eps
        plain_largest, plain_rms = plain_largest * scale, plain_rms * scale
    chosen_largest, chosen_rms = (0.0, 0.0) if intermediate is None else _errors(intermediate, expected)
    eps = info.eps
    if allowance.intermediates and input_dtype is not None:
        eps = max(eps, torch.finfo(input_dtype).eps)
    unit = allowance.roundings * (eps / 2 + compute.eps / 2 * (offset + log2(max(1, terms))))
    if exact:
        unit *= 2
    floor = allowance.roundings * info.tiny * info.eps / 2
    magnitude = expected.abs()
    top = max(spread, float(magnitude.max()) if magnitude.numel() else 0.0)
    typical = max(spread, float(magnitude.square().mean().sqrt()) if magnitude.numel() else 0.0)
    allowed = allowance.factor * (plain_largest + chosen_largest) + unit * top + floor
    allowed_rms = allowance.factor * (plain_rms + chosen_rms) + unit * typical + floor
    fault = None
    if not largest <= allowed:
        fault = f"error {largest:.2e} exceeds {allowed:.2e}"
    elif not rms <= allowed_rms:
        fault = f"root mean square error {rms:.2e} exceeds {allowed_rms:.2e}"
    return Verdict(largest, allowed, plain_largest, fault)
