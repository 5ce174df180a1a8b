"""Compares what a drawn case gave with float64, by the rule of tolerance.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2, prod, sqrt

import torch
from drawn_formulas import Computed, Spec, Tensors, compute
from torch import Tensor

from fusednorm.tolerance import judge

PER_ELEMENT = ("output", "grad_input")


@dataclass(frozen=True)
class Fault:
    name: str
    text: str
    soft: bool = False


class Judge:
    """Compares results with float64, by the rule of tolerance.py and what it needs where values leave a dtype's range.

    The rule wants NaN and infinity exactly where the exact result, rounded to the dtype, has them. Beyond that:

    - Where the plain float32 computation itself breaks (a statistic, or a value under it, is not finite though the
      exact one is; or its rstd is 0), a value under that statistic may be NaN or infinite, or right, or the plain
      computation's own, or what an rstd of 0 gives where the sum of squares alone is beyond float32 (as torch's own
      norms do). A finite value that is none of these is wrong.
    - A value within one part in 200 of the dtype's largest may be infinite or finite.

    Where the rule finds a fault, it is asked again with a plain computation in another order of multiplication, whose
    error may be the larger, and with two roundings of the largest intermediate instead of the largest result (a result
    of few values can be small by cancellation, and the plain one lucky): what then passes is a soft fault, which is
    counted and not reported.
    """

    def __init__(self, spec: Spec, tensors: Tensors, input_dtype: torch.dtype, shown: Tensor | None) -> None:
        self.spec, self.tensors, self.input_dtype, self.shown = spec, tensors, input_dtype, shown
        self.wide = input_dtype == torch.float64
        self.names: tuple[str, ...] = PER_ELEMENT
        self.expected = compute(spec, tensors, torch.float64, exact=True, shown=shown)
        self.plain = compute(spec, tensors, torch.float32, shown=shown)
        self._second: Computed | None = None
        self._magnitudes: dict[str, Tensor] | None = None

    def faults(self, got: Mapping[str, Tensor]) -> list[Fault]:
        self.names = tuple(name for name in PER_ELEMENT if name in got)
        # An empty set has no mean: torch says 0 or NaN, by family and release.
        asked = got if self.spec.count else {name: one for name, one in got.items() if name not in ("mean", "rstd")}
        found = (self._fault(name, result) for name, result in asked.items())
        return [fault for fault in found if fault is not None]

    def _second_plain(self) -> Computed:
        if self._second is None:
            self._second = compute(self.spec, self.tensors, torch.float32, order=1, shown=self.shown)
        return self._second

    def _saturated(self) -> Computed:
        """What follows where only the sum of squares is beyond float32: an rstd of 0, so that y = phi(B)."""
        largest = torch.finfo(torch.float32).max / max(1, self.spec.count)
        mean, rstd = self.expected.mean, self.expected.rstd
        rstd = torch.where(rstd.square() * largest < 1, 0.0, rstd)
        return compute(self.spec, {**self.tensors, "mean": mean, "rstd": rstd}, torch.float64, shown=self.shown)

    def _magnitude(self, name: str) -> Tensor | None:
        if self._magnitudes is None:
            computed = compute(self.spec, self.tensors, torch.float64, shown=self.shown, magnitudes=True)
            self._magnitudes = computed.magnitudes
        return self._magnitudes.get(name)

    def _reach(self) -> float:
        """The largest of 1, the inverse deviations and the inputs: what a rounded product may yet be multiplied by."""
        input, rstd = self.tensors["input"], self.expected.rstd
        assert input is not None
        finite = [tensor[tensor.isfinite()].abs() for tensor in (input.double(), rstd)]
        return max([1.0, *(float(tensor.max()) for tensor in finite if tensor.numel())])

    def _lenient(self, name: str, plain: Computed) -> Tensor:
        """Where a result may be NaN or infinite because the plain one is, in the result's shape."""
        result = plain.results[name]
        broken = self._broken(plain)
        if name in PER_ELEMENT:
            return self.spec.from_view(broken.expand(self.spec.dims))
        if name in ("mean", "rstd") and self.spec.training:
            return broken.reshape(result.shape) | ~result.isfinite()
        return ~result.isfinite() | broken.any()

    def _broken(self, plain: Computed) -> Tensor:
        axes = (0, 2, 3) if self.spec.family == "batch_norm" else (2, 3)
        if self.wide:
            # float64 reaches beyond all magnitudes drawn: what overflows there overflows in any order.
            naive = compute(self.spec, self.tensors, torch.float64, shown=self.shown)
            broken = naive.broken & ~self.expected.broken
            pairs = [naive.results[name] for name in self.names]
        else:
            broken = plain.broken & ~self.expected.broken
            pairs = [plain.results[name] for name in self.names]
        exact = [self.expected.results[name] for name in self.names]
        largest = torch.finfo(torch.float64 if self.wide else torch.float32).max
        for result, wanted in zip(pairs, exact, strict=True):
            lost = self.spec.to_view(~result.isfinite() & (wanted.abs() <= largest))
            if not self.spec.training:
                broken = broken | lost
            elif lost.numel():
                broken = broken | lost.amax(axes, keepdim=True)
        return broken

    def _fault(self, name: str, got: Tensor) -> Fault | None:
        expected = self.expected.results[name]
        if got.shape != expected.shape:
            return Fault(name, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
        if got.dtype == torch.float64 and not self.wide:
            got = got.float()  # accumulated in float32, whatever the dtype it is kept in
        text = self._compare(name, got, expected, self.plain)
        if text is None:
            return None
        again = self._compare(name, got, expected, self._second_plain(), soft=True)
        return Fault(name, text if again is None else again, again is None)

    def _compare(self, name: str, got: Tensor, expected: Tensor, plain: Computed, soft: bool = False) -> str | None:
        info = torch.finfo(got.dtype)
        rounded, beside = expected.to(got.dtype), plain.results[name].double()
        same = torch.where(rounded.isfinite(), got.isfinite(), (got == rounded) | (got.isnan() & rounded.isnan()))
        compared = rounded.isfinite() & got.isfinite()
        if not bool(same.all()) or not bool(beside.isfinite().all()) or bool(plain.broken.any()):
            edge = (expected.abs() > 0.995 * info.max) & (expected.abs() < 1.005 * info.max)
            lenient = self._lenient(name, plain)
            accepted = same | (edge & (got.abs() >= 0.99 * info.max)) | (lenient & ~got.isfinite())
            as_plain = (got == beside.to(got.dtype)) | (got.isnan() & beside.isnan())
            accepted |= (lenient | ~rounded.isfinite()) & as_plain
            if not bool(accepted.all()) and name in ("output", "grad_input"):
                saturated = self._saturated().results[name]
                accepted |= lenient & ((got.double() - saturated).abs() <= 0.02 * saturated.abs())
            magnitude = None if bool(accepted.all()) or self.wide else self._magnitude(name)
            if magnitude is not None:  # what the terms' rounding comes to may be beyond the result's dtype
                rounding = 2.0 * torch.finfo(torch.float32).eps * magnitude
                accepted |= got.isinf() & (expected.abs() + rounding > info.max)
            if name.startswith("grad"):  # which of NaN and infinity an undefined derivative gives is the formula's
                accepted |= rounded.isnan() & ~got.isfinite()
            if not bool(accepted.all()):
                where = (~accepted).nonzero()[0].tolist()
                at = tuple(where)
                return (
                    f"{int((~accepted).sum())} of {got.numel()} values differ in being NaN or infinite, at {at} "
                    f"{float(got[at]):.6g} for {float(expected[at]):.6g}, plain {float(beside[at]):.6g}"
                )
            if bool(lenient.any()):
                text = self._coarse(name, got, expected, beside, lenient & compared)
                if text is not None:
                    return text
                compared = compared & ~lenient
            beside = torch.where(beside.isfinite(), beside, expected)
        if not bool(compared.any()):
            return None
        got, expected, beside = got[compared], expected[compared], beside[compared]
        terms = 1 if name in PER_ELEMENT else max(1, prod(self.spec.shape) // max(1, rounded.numel()))
        spread = 0.0
        if name in ("mean", "running_mean") and "rstd" in self.expected.results:
            deviations = self.expected.results["rstd"]
            deviations = deviations[deviations.isfinite()]
            spread = 1.0 / max(float(deviations.max()), 1e-300) if deviations.numel() else 0.0
        verdict = judge(got, expected, beside, offset=self.expected.offset, terms=terms, spread=spread)
        if verdict.fault is None or not soft:
            return verdict.fault
        magnitude = self._magnitude(name)
        if magnitude is None:
            return verdict.fault
        size = magnitude[compared]
        # Of float64 results the judge makes as many roundings as they do.
        unit = 4.0 * torch.finfo(torch.float64).eps if self.wide else 2.0 * torch.finfo(torch.float32).eps
        unit *= 1 + 0.25 * log2(terms)
        # A product that underflows loses up to half a subnormal in each term, and a later factor enlarges that.
        floor = sqrt(terms) * info.smallest_normal * info.eps * self._reach()
        error = (got.double() - expected).abs()
        worst = float(error.max()) <= verdict.allowed + unit * float(size.max()) + floor
        root = float(error.square().mean().sqrt())
        allowed = info.eps * float(expected.square().mean().sqrt()) + unit * float(size.square().mean().sqrt()) + floor
        return None if worst and (root <= allowed or "root" not in verdict.fault) else verdict.fault

    def _coarse(self, name: str, got: Tensor, expected: Tensor, plain: Tensor, chosen: Tensor) -> str | None:
        """Whether what came out finite where the plain computation breaks is right, or the plain one's, roughly."""
        info = torch.finfo(got.dtype)
        got, expected, plain = got.double()[chosen], expected[chosen], plain[chosen]
        if not got.numel():
            return None
        magnitude = self._magnitude(name)
        size = 0.0 if magnitude is None else float(magnitude[chosen].nan_to_num(0.0, 0.0, 0.0).max())
        close = 0.02 * float(expected.abs().max()) + 1e-5 * size + max(1e-30, info.smallest_normal * info.eps)
        near = ((got - expected).abs() <= close) | ((got - plain).abs() <= 0.02 * plain.abs() + 1e-30)
        if not bool(near.all()) and name not in ("mean", "running_mean", "running_var"):
            saturated = self._saturated().results.get(name)
            if saturated is not None:
                near |= (got - saturated[chosen]).abs() <= 0.02 * saturated[chosen].abs() + 1e-5 * size + 1e-30
        if bool(near.all()):
            return None
        at = int((~near).nonzero()[0])
        return f"{int((~near).sum())} finite values are wrong: {float(got[at]):.6g} for {float(expected[at]):.6g}, " + (
            f"plain {float(plain[at]):.6g}"
        )


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Equal as bits, but that any NaN equals any other."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    equal = first.contiguous().view(kind) == second.contiguous().view(kind)
    return bool((equal | (first.isnan() & second.isnan())).all())


def other_units(spec: Spec, unit: Sequence[int]) -> Tensor:
    """The elements of the view that share no statistic with a unit (n, g, d, s), which given ones make one element."""
    samples, groups, depth, spatial = spec.dims
    mask = torch.ones(samples, groups, depth, spatial, dtype=torch.bool)
    if not spec.training:
        mask[tuple(unit)] = False
    elif spec.family == "batch_norm":
        mask[:, unit[1]] = False
    else:
        mask[unit[0], unit[1]] = False
    return mask
