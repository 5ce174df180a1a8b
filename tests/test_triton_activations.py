"""Triton's activations: their tails in the interpreter against 50 digits, and what they become on NVIDIA."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from activation_support import errors
from interpreter_support import interpreted
from test_activation_tails import TINY, grid

from fusednorm.activations import FORMULAS
from fusednorm.backends import reference
from fusednorm.tolerance import judge

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fusednorm.backends.triton.kernels.activations import activation  # noqa: E402

OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)
can_interpret = pytest.mark.skipif(
    OLD and np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton < 3.8 with numpy >= 2.4"
)

# Values and derivatives of z by the functions of a dtype. NVIDIA's instructions are not in the interpreter: what stands
# in for them errs by what the PTX manual allows, ever to the same side.
CODE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import numpy as np, torch, triton, triton.language as tl
from fusednorm.activations import FORMULAS
from fusednorm.backends.triton.kernels import activations

@triton.jit
def power(t):
    return tl.exp2(t) * 1.00000024

@triton.jit
def reciprocal(y):
    return 1.00000012 / y

activations.power_nvidia, activations.reciprocal_nvidia = power, reciprocal

@triton.jit
def evaluate(z, value, slope, VALUE: tl.constexpr, SLOPE: tl.constexpr, PARAMETER: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    b_z = tl.load(z + i)
    parameter = tl.full((), PARAMETER, b_z.dtype)
    tl.store(value + i, VALUE(b_z, parameter))
    tl.store(slope + i, SLOPE(b_z, parameter))

block = 16384
for name in FORMULAS:
    z = torch.from_numpy(np.load({points!r}))
    padded = torch.zeros(-(-z.numel() // block) * block, dtype=z.dtype)
    padded[: z.numel()] = z
    value, slope = torch.empty_like(padded), torch.empty_like(padded)
    functions = activations.activation(name, {dtype!r}, {nvidia})
    evaluate[(padded.numel() // block,)](padded, value, slope, *functions, FORMULAS[name].default, block)
    np.save({results!r} + name, torch.stack([value, slope])[:, : z.numel()].numpy())
print(json.dumps(True))
"""


def _evaluate(z: torch.Tensor, dtype: str, nvidia: bool, folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    np.save(folder / "z.npy", z.numpy())
    names = {"points": str(folder / "z.npy"), "results": str(folder / "of_"), "dtype": dtype, "nvidia": nvidia}
    script = folder / "evaluate.py"  # Triton reads the source of a function from its file
    script.write_text(CODE.format(**names))
    assert interpreted(f"import runpy; runpy.run_path({str(script)!r})") is True
    found = {name: torch.from_numpy(np.load(folder / f"of_{name}.npy")) for name in FORMULAS}
    return {name: (both[0], both[1]) for name, both in found.items()}


@can_interpret
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 260.0), ("float64", 1500.0)])
def test_tails(dtype: str, bound: float, tmp_path: Path) -> None:
    """In machine epsilons, relative: a rounding of the exponential's argument counts up to 87 or 700 times."""
    number = getattr(torch, dtype)
    z = grid(number)[::3]
    for name, got in _evaluate(z, dtype, False, tmp_path).items():
        parameter = torch.tensor(FORMULAS[name].default, dtype=number).item()
        for error in errors(z, got, name, parameter, TINY[number]):
            assert error.max() <= bound, f"{name}: {error.max()} at {z[error.argmax()]}"


@can_interpret
def test_sums_with_the_errors_of_nvidias_instructions(tmp_path: Path) -> None:
    """A bias of two units of the exponential and of one of the reciprocal stays within the rule over 165,000 terms."""
    channels, terms = 4, 165_000
    generator = torch.Generator().manual_seed(0)
    xhat = torch.randn(channels, terms, generator=generator).half().float()
    z = xhat * 1.5 + 0.25
    noise = torch.randn(channels, terms, generator=generator).double()
    for name, (_, derivative) in _evaluate(z.view(-1), "float16", True, tmp_path).items():
        exact = reference.DERIVATIVES[name](z.double(), FORMULAS[name].default)
        plain = reference.DERIVATIVES[name](z, FORMULAS[name].default)
        for grad in (torch.ones_like(noise), noise):
            for factor in (grad, grad * xhat):
                parts = (derivative.view(z.shape), exact, plain)
                got, right, torchs = ((factor * part.double()).sum(1) for part in parts)
                verdict = judge(got.float(), right, torchs, terms=terms)
                assert verdict.ok, f"{name}: {verdict.fault}"


@triton.jit
def _apply(z, result, FUNCTION: tl.constexpr):
    i = tl.arange(0, 128)
    b_z = tl.load(z + i)
    tl.store(result + i, FUNCTION(b_z, tl.full((), 1.0, b_z.dtype)))


def _ptx(function: object) -> str:
    names = {"z": "*fp32", "result": "*fp32", "FUNCTION": "constexpr"}
    source = ASTSource(_apply, names, {(2,): function}, {})
    options = {"enable_fp_fusion": False}
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_instructions_on_nvidia(dtype: str, name: str) -> None:
    """One exponential and one reciprocal an element, no division; tanh.approx for the value of a bf16 tanh."""
    value, derivative = map(_ptx, activation(name, dtype, True))
    assert ("tanh.approx" in value) == (name == "tanh" and dtype == "bfloat16")
    assert "tanh.approx" not in derivative
    for code in (value, derivative):
        assert "div." not in code
        assert len(re.findall(r"ex2\.approx", code)) == len(re.findall(r"ex2\.approx\.ftz", code)) <= 1
        assert len(re.findall(r"rcp\.approx\.ftz", code)) <= 1
