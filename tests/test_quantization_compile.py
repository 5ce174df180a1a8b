"""The Triton kernels that quantize compile ahead of time, with NVIDIA's conversions or in integers."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
import torch

triton = pytest.importorskip("triton")

from triton_support import BF16, FP16, FP32, TARGETS, Made, capabilities, source  # noqa: E402

from fusednorm.backends.triton import instances  # noqa: E402
from fusednorm.backends.triton.instances import ROWS, WHOLE  # noqa: E402
from fusednorm.backends.triton.launch import Launch  # noqa: E402
from fusednorm.backends.triton.plans import base  # noqa: E402
from fusednorm.formats import FORMATS, Quantized  # noqa: E402
from fusednorm.norm import norm_of  # noqa: E402
from fusednorm.operands import Operands  # noqa: E402
from fusednorm.problems import forward_problem, quantized_problem  # noqa: E402

CONVERSION = {"float8_e4m3fn": "cvt.rn.satfinite.e4m3x2.f32", "float8_e5m2": "cvt.rn.satfinite.e5m2x2.f32"}


def _launches(target: str) -> list[tuple[str, Made]]:
    """The launches of quantizing forwards for a target, by the format of their output."""
    able, found = capabilities(target), []
    native = able.approximates and TARGETS[target].arch >= 89
    cases = [
        (WHOLE, True, BF16, 4096),
        (WHOLE, False, FP16, 1001),
        (WHOLE, True, FP32, 128),
        (ROWS, False, BF16, 20000),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__call__", lambda launch, *tensors: found.append((name, Made(launch, tensors))))
        patch.setattr(base, "approximates", lambda: able.approximates)
        patch.setattr(base, "overlaps", lambda: able.overlaps)
        patch.setattr(base, "converts", lambda: native)
        patch.setattr(instances, "_common", lambda problem: None)
        for name, (instance, per_row, dtype, size) in product(FORMATS, cases):
            x, weight = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((4096, size), (size,)))
            operands, norm = Operands(x, weight), norm_of("rms_norm", 1)
            problem = quantized_problem(norm, operands, None, Quantized(name, per_row))
            instance.plan(problem)(operands, None, None if per_row else torch.empty((), device="meta"))
    return found


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_compiles(target: str) -> None:
    for name, made in _launches(target):
        compiled = triton.compile(source(made), target=TARGETS[target], options=made.launch.options)
        if TARGETS[target].backend == "cuda":
            conversions = set(re.findall(r"cvt\.rn\.satfinite\.\S+", compiled.asm["ptx"]))
            native = TARGETS[target].arch >= 89 and name in CONVERSION
            assert conversions == ({CONVERSION[name]} if native else set())


def test_a_plain_call_takes_no_argument_for_the_scale() -> None:
    """Every part of the switch is a constant of the compiled kernel."""
    made: list[Made] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__call__", lambda launch, *tensors: made.append(Made(launch, tensors)))
        patch.setattr(instances, "_common", lambda problem: None)
        x = torch.empty((4096, 1024), dtype=BF16, device="meta")
        problem = forward_problem(norm_of("rms_norm", 1), Operands(x))
        for instance in (WHOLE, ROWS):
            instance.plan(replace(problem, device="meta"))(Operands(x))
    for one in made:
        given = source(one)
        for name in ("p_out_scale", "OUT", "NATIVE"):
            assert given.signature[name] == "constexpr"
