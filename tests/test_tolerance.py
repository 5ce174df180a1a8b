"""The rule that judges results: each of its terms, just inside and just outside, largest and root mean square."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fusednorm.tolerance import OURS, PEER, Allowance, Verdict, judge, offset_of

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")
#: Values of a case: so many that one alone leaves the root mean square a hundredth of itself.
COUNT = 10000
LARGE = COUNT // 2  # the place of the one that is not 0
#: Half a unit of each dtype.
HALF = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24, FP64: 2.0**-53}


@dataclass(frozen=True)
class Case:
    """Values of a magnitude; errors of the plain computation and of the intermediate; what the rule then allows."""

    dtype: torch.dtype
    unit: float  # allowed for each of the magnitude
    added: float = 0.0  # allowed on top of that
    magnitude: float = 1.0
    plain: float = 0.0
    intermediate: float | None = None
    allowance: Allowance = OURS
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "float32: its rounding, and one of the computation": Case(FP32, 2 * HALF[FP32]),
    "float16": Case(FP16, HALF[FP16] + HALF[FP32]),
    "bfloat16": Case(BF16, HALF[BF16] + HALF[FP32]),
    "float64: both roundings, for the judge's as well": Case(FP64, 2 * 2 * HALF[FP64]),
    "in proportion to the result": Case(FP32, 2 * HALF[FP32], magnitude=16.0),
    "twice the plain error": Case(FP32, 2 * HALF[FP32], 2 * 1e-3, plain=1e-3),
    "the plain error of float64, scaled": Case(FP64, 4 * HALF[FP64], 2 * 1e-3 * 2.0**-29, plain=1e-3),
    "twice the intermediate's error": Case(FP32, 2 * HALF[FP32], 2 * 1e-2, intermediate=1e-2),
    "both": Case(FP32, 2 * HALF[FP32], 2 * (1e-3 + 1e-2), plain=1e-3, intermediate=1e-2),
    "the intermediate's error of float64, as it is": Case(FP64, 4 * HALF[FP64], 2 * 1e-2, intermediate=1e-2),
    "a mean of many deviations": Case(FP32, 1001 * HALF[FP32], options={"offset": 1000.0}),
    "the same for a short dtype": Case(BF16, HALF[BF16] + 1000 * HALF[FP32], options={"offset": 1000.0}),
    "a sum of 1024 terms": Case(FP32, 12 * HALF[FP32], options={"terms": 1024}),
    "a sum of terms with a mean": Case(FP32, 111 * HALF[FP32], options={"terms": 1024, "offset": 100.0}),
    "a sum in float64": Case(FP64, 2 * 12 * HALF[FP64], options={"terms": 1024}),
    "a sum of no terms": Case(FP32, 2 * HALF[FP32], options={"terms": 0}),
    "a factor": Case(FP32, 2 * HALF[FP32], 5 * 1e-3, plain=1e-3, allowance=Allowance(factor=5.0)),
    "roundings": Case(FP32, 3 * 2 * HALF[FP32], allowance=Allowance(roundings=3.0)),
    "a peer": Case(BF16, 8 * (HALF[BF16] + HALF[FP32]), 16 * 1e-3, plain=1e-3, allowance=PEER),
    "a peer's intermediates": Case(
        FP32, 8 * (HALF[BF16] + HALF[FP32]), allowance=PEER, options={"input_dtype": BF16}
    ),
    "a peer's wider input": Case(BF16, 8 * (HALF[BF16] + HALF[FP32]), allowance=PEER, options={"input_dtype": FP32}),
    "a peer of unknown input": Case(FP32, 8 * 2 * HALF[FP32], allowance=PEER),
    "our own intermediates": Case(FP32, 2 * HALF[FP32], options={"input_dtype": BF16}),
}  # fmt: skip


def _judge(case: Case, errors: Tensor, at: Tensor) -> Verdict:
    """The verdict on errors of values that are all 0 but for one; the plain computation and the intermediate are off
    where ``at`` is 1."""
    expected = errors.clone()
    expected[LARGE] = -case.magnitude
    got = torch.zeros(COUNT, dtype=case.dtype)
    got[LARGE] = -case.magnitude
    intermediate = None if case.intermediate is None else expected - case.intermediate * at
    plain = expected + case.plain * at
    return judge(got, expected, plain, case.allowance, intermediate=intermediate, **case.options)


def _one(place: int) -> Tensor:
    values = torch.zeros(COUNT, dtype=FP64)
    values[place] = 1.0
    return values


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_largest_error(case: Case) -> None:
    """One value is off; the plain computation is wrong in one other."""
    allowed = case.unit * case.magnitude + case.added
    for sign in (1.0, -1.0):
        inside, outside = (_judge(case, sign * share * allowed * _one(3), _one(LARGE)) for share in (0.999, 1.001))
        assert inside.ok, inside
        assert inside.allowed == pytest.approx(allowed, rel=1e-4)
        assert inside.error == pytest.approx(0.999 * allowed)
        assert inside.plain_error == pytest.approx(case.plain * (2.0**-29 if case.dtype is FP64 else 1.0))
        assert not outside.ok
        assert outside.fault == f"error {outside.error:.2e} exceeds {outside.allowed:.2e}"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_root_mean_square(case: Case) -> None:
    """All values are off by less than one may be, since one of them is large, and wrong in the plain computation."""
    allowed = (case.unit * case.magnitude + case.added) / COUNT**0.5
    errors = torch.ones(COUNT, dtype=FP64)
    errors[::2], errors[LARGE] = -1.0, 0.0
    inside, outside = (_judge(case, share * allowed * errors, _one(LARGE)) for share in (0.99, 1.01))
    assert inside.ok, inside
    assert not outside.ok
    assert outside.error < outside.allowed
    assert outside.fault is not None
    assert outside.fault.startswith("root mean square error ")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_largest_error_where_plain_torch_is_as_wrong_everywhere(case: Case) -> None:
    allowed = case.unit * case.magnitude + case.added
    inside, outside = (_judge(case, share * allowed * _one(3), torch.ones(COUNT)) for share in (0.999, 1.001))
    assert inside.ok, inside
    assert outside.fault is not None
    assert outside.fault.startswith("error ")


@pytest.mark.parametrize("dtype", [FP64, FP32, FP16])
@pytest.mark.parametrize("roundings", [1.0, 8.0])
def test_half_a_subnormal(dtype: torch.dtype, roundings: float) -> None:
    """What cannot be stored may become zero."""
    half = roundings * torch.finfo(dtype).smallest_normal * HALF[dtype]
    got = torch.zeros(4, dtype=dtype)
    for share, ok in ((0.98, True), (1.02, False)):
        expected = torch.full((4,), share * half, dtype=FP64)
        if dtype is FP64:  # half a subnormal of float64 is none of its numbers
            expected = torch.full((4,), 0.0 if ok else (1 + roundings) * 5e-324, dtype=FP64)
        assert judge(got, expected, expected, Allowance(roundings=roundings)).ok is ok


def test_spread_is_the_least_magnitude() -> None:
    """The mean of centred data is near zero, and may be off by a rounding of their deviation."""
    expected = torch.full((COUNT,), 1e-9, dtype=FP64)
    got = torch.zeros(COUNT)
    assert not judge(got, expected, expected).ok
    assert judge(got, expected, expected, spread=1.02e-9 / (2 * HALF[FP32])).ok
    assert not judge(got, expected, expected, spread=0.98e-9 / (2 * HALF[FP32])).ok
    large = judge(got + 4, torch.full((COUNT,), 4.0, dtype=FP64), got + 4, spread=1.0)
    assert large.allowed == pytest.approx(4 * 2 * HALF[FP32])


@pytest.mark.parametrize(
    ("got", "expected"),
    [(NAN, 1.0), (INF, 1.0), (1.0, NAN), (1.0, INF), (INF, NAN), (NAN, INF), (-INF, INF), (INF, -INF), (1e38, 1e39)],
)
def test_what_is_not_finite_is_where_it_belongs(got: float, expected: float) -> None:
    fp64 = torch.tensor([0.0, expected, 2.0], dtype=FP64)
    verdict = judge(torch.tensor([0.0, got, 2.0]), fp64, fp64)
    assert verdict.fault == "1 of 3 values differ in being NaN or infinite"
    assert verdict.error == INF
    assert verdict.allowed == verdict.plain_error == 0.0


@pytest.mark.parametrize(("got", "expected"), [(NAN, NAN), (INF, INF), (-INF, -INF), (INF, 1e39), (-INF, -1e39)])
def test_the_others_are_judged_beside_what_is_not_finite(got: float, expected: float) -> None:
    """Neither the magnitude nor any error is that of the values that are not finite."""
    fp64 = torch.tensor([1.0, expected], dtype=FP64)
    plain = torch.tensor([1.0, 7.0], dtype=FP64)
    for intermediate in (None, plain):
        for error, ok in ((0.98, True), (1.02, False)):
            values = torch.tensor([1.0, got])
            off = fp64 - torch.tensor([error * 2 * HALF[FP32], 0.0], dtype=FP64)
            exact = off.where(off.isfinite(), plain)
            verdict = judge(values, off, exact, intermediate=None if intermediate is None else exact)
            assert verdict.ok is ok


def test_an_intermediates_error_counts_beside_what_is_not_finite() -> None:
    expected = torch.tensor([1.0, INF], dtype=FP64)
    rounded = torch.tensor([1.01, INF], dtype=FP64)
    for got, ok in ((1.0199, True), (1.0201, False)):
        assert judge(torch.tensor([got, INF]), expected, expected, intermediate=rounded).ok is ok


def test_several_that_differ_are_counted_once_each() -> None:
    expected = torch.tensor([NAN, 1.0, INF, 4.0], dtype=FP64)
    verdict = judge(torch.tensor([0.0, NAN, -INF, 4.0]), expected, expected)
    assert verdict.fault == "3 of 4 values differ in being NaN or infinite"


def test_a_plain_computation_without_a_result_excuses_nothing() -> None:
    expected = torch.ones(3, dtype=FP64)
    assert not judge(torch.ones(3), expected, torch.full((3,), NAN, dtype=FP64)).ok


def test_shapes() -> None:
    verdict = judge(torch.ones(2, 3), torch.ones(3, 2, dtype=FP64), torch.ones(3, 2))
    assert verdict == Verdict(INF, 0.0, 0.0, "shape (2, 3), expected (3, 2)")
    assert not judge(torch.ones(1), torch.ones((), dtype=FP64), torch.ones(())).ok
    nothing = judge(torch.ones(0, 3), torch.ones(0, 3, dtype=FP64), torch.ones(0, 3))
    assert nothing.ok
    assert nothing.error == nothing.plain_error == 0.0
    assert judge(torch.ones(0), torch.ones(0, dtype=FP64), torch.ones(0), Allowance(factor=0.0, roundings=0.0)).ok
    assert judge(torch.full((2,), INF), torch.full((2,), INF, dtype=FP64), torch.ones(2)).ok


def test_the_rule_is_the_projects() -> None:
    assert Allowance() == OURS == Allowance(2.0, 1.0, False)
    assert Allowance(16.0, 8.0, True) == PEER
    assert Verdict(1.0, 2.0, 0.5, None).ok
    assert not Verdict(1.0, 2.0, 0.5, "wrong").ok


def test_offset() -> None:
    """The largest |mean| in standard deviations, of those that are finite, and at least 1."""
    mean, rstd = torch.tensor([3.0, -50.0, 0.5]), torch.tensor([2.0, 4.0, 1.0])
    assert offset_of(mean, rstd) == 200.0
    assert offset_of(mean[2:], rstd[2:]) == 1.0
    assert offset_of(torch.tensor([NAN, INF, -3.0]), torch.ones(3)) == 3.0
    assert offset_of(torch.tensor([NAN, INF]), torch.ones(2)) == 1.0
    assert offset_of(torch.tensor([1e30]), torch.tensor([1e30])) == pytest.approx(1e60)  # more than float32 holds
    assert offset_of(None, rstd) == offset_of(mean, None) == offset_of(mean[:0], rstd[:0]) == 1.0
