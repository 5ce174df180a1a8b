"""The Triton kernels that quantize, in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
from interpreter_support import interpreted

triton = pytest.importorskip("triton")

NUMERICS = """
import json
from itertools import product

import torch

import fusednorm
from fusednorm.backends.triton import instances
from fusednorm.backends.triton.config.kinds import StepsConfig
from quantization_support import OUT_DTYPES, drawn, error_of_float32, faults, wide

instances.rows_forward_for = lambda problem: StepsConfig(32, 4)  # several steps to a row
found = []
cases = [
    ("rms_norm", torch.float16, 33, 0), ("layer_norm", torch.float32, 100, 1), ("rms_norm", torch.float64, 1, 2),
    ("layer_norm", torch.float16, 3, 2), ("rms_norm", torch.float32, 64, 0),
]
for (family, dtype, size, place), instance, by_row in product(cases, ("triton.whole", "triton.rows"), (True, False)):
    if instance == "triton.rows" and by_row:
        continue
    x, weight = drawn(5, size, dtype=dtype), drawn(size, seed=1)
    bias = None if family == "rms_norm" else drawn(size, seed=2)
    given = (x, (size,), weight, *(() if family == "rms_norm" else (bias,)), 1e-5)
    out_dtype = OUT_DTYPES[place]
    with fusednorm.use_instance(instance):
        out_scale = "row" if by_row else torch.tensor(0.013)
        results = getattr(fusednorm, family)(*given, out_dtype=out_dtype, out_scale=out_scale)
    q, scale = results if by_row else (results, out_scale)
    y = wide(family, x, weight, bias)
    wrong = faults(q, scale, y, error_of_float32(family, x, weight, bias, y), by_row)
    found += [(family, str(dtype), size, instance, by_row, wrong)] if wrong else []

# Rows of samples, with a scale of their own, and a sum before the norm.
x, h, scale = drawn(2, 5, 24), drawn(2, 5, 24, seed=1), drawn(2, 24, seed=2)
y = wide("layer_norm", x + h, None, None, scale=scale.double())
keywords = {"scale": scale, "pre_add": h, "return_sum": True, "out_dtype": torch.int8}
with fusednorm.use_instance("triton.whole"):
    q, row_scale, s = fusednorm.layer_norm(x, (24,), None, None, 1e-5, **keywords)
found += faults(q, row_scale, y, 1e-5, True) + ([] if torch.equal(s, x + h) else ["s"])

# A sum before the norm, in its kernel.
x, h, gate, weight = drawn(3, 40), drawn(3, 40, seed=1), drawn(3, 1, seed=2), drawn(40, seed=3)
y = wide("rms_norm", x + gate * h, weight, None)
for out_dtype, out_scale in product(OUT_DTYPES, ("row", torch.tensor(0.02))):
    with fusednorm.use_instance("triton.whole"):
        fused = fusednorm.rms_norm(
            x, (40,), weight, 1e-5, pre_add=h, pre_gate=gate, return_sum=True, out_dtype=out_dtype, out_scale=out_scale
        )
    by_row = len(fused) == 3
    found += faults(fused[0], fused[1] if by_row else out_scale, y, 1e-5, by_row)
    found += [] if torch.allclose(fused[-1], x + gate * h, rtol=1e-6, atol=1e-6) else ["s"]

# Empty tensors, NaN, and rows of zeros.
x = drawn(3, 40)
x[0, 3], x[1] = torch.nan, 0.0
with fusednorm.use_instance("triton.whole"):
    q, row_scale = fusednorm.rms_norm(x, (40,), out_dtype=torch.float8_e4m3fn)
    empty, empty_scale = fusednorm.rms_norm(x[:0], (40,), out_dtype=torch.int8)
right = bool(row_scale[0].isnan()) and bool(q[0].float().isnan().all()) and bool((q[1].float() == 0).all())
right = right and float(row_scale[1]) > 0 and empty.shape == (0, 40) and empty_scale.shape == (0, 1)
print(json.dumps(found + ([] if right else ["special numbers"])))
"""

ROUNDING = """
import json

import torch

from fusednorm.backends import reference
from fusednorm.formats import Quantized
from quantization_kernel import codes
from quantization_support import OUT_DTYPES, bits, hard_numbers, name_of

found = []
for dtype in OUT_DTYPES:
    values, name = hard_numbers(dtype), name_of(dtype)
    right = bits(reference.codes(values, Quantized(name, True)))
    found += [name] * (not torch.equal(codes(values, name, False), right))
print(json.dumps(found))
"""


def test_numerics() -> None:
    assert interpreted(NUMERICS) == []


def test_the_kernels_round_every_number_as_torch_does() -> None:
    assert interpreted(ROUNDING) == []
