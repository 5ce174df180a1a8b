"""Calls that differ in a number, or in a length, run the same compiled kernels, counted with no GPU present."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton_support import FP32, FP64, TARGETS, Case, capabilities, compile_key, operations, source  # noqa: E402

from fusednorm.backends.triton.instances import ROWS, TILES, WHOLE  # noqa: E402

HOPPER = capabilities("sm_90")


def _kernels(cases: Iterable[Case]) -> dict[str, set[Any]]:
    """The keys of the compiled kernels that all cases run, by the kernels' names."""
    found: dict[str, set[Any]] = {}
    for operation in operations(HOPPER, cases):
        for made in operation:
            found.setdefault(made.kernel, set()).add(compile_key(made))
    return found


# --- numbers ---

NUMBERS = (
    Case("group_norm", 8, (2, 64, 32, 32), activation="silu", instance=TILES),
    Case("group_norm", 8, (2, 64, 32, 32), FP64, "leaky_relu", last=True, instance=TILES),
    Case("layer_norm", 1, (64, 512), FP32, "silu", instance=WHOLE),
    Case("rms_norm", 1, (64, 512), activation="leaky_relu", instance=ROWS),
    Case("layer_norm", 1, (64, 20000), activation="silu", instance=ROWS),
    Case("batch_norm", 0, (2, 64, 32, 32), activation="silu", training=False, instance=TILES),
)


@pytest.mark.parametrize("case", NUMBERS)
def test_another_eps_compiles_nothing(case: Case) -> None:
    one = _kernels([case])
    many = _kernels(replace(case, eps=eps) for eps in (1e-5, 0, 0.0, -0.5, 1, 1e-40, float("inf"), float("nan")))
    assert many == one


@pytest.mark.parametrize("case", NUMBERS)
def test_an_activations_parameter_makes_two_kernels_at_most(case: Case) -> None:
    """One has the default compiled in, and the other reads any value."""
    found = _kernels(replace(case, activation_parameter=value) for value in (1.0, 0.01, 1.702, -3.0, 0.0, 1e300))
    for name, keys in found.items():
        assert len(keys) == (1 if name in ("moments_of_planes", "moments_of_rows", "finalize", "combine") else 2)


@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_numbers_reach_a_float64_kernel_as_float64(dtype: Any) -> None:
    """Triton makes float32 of a Python float unless a kernel says otherwise."""
    case = Case("layer_norm", 1, (64, 128), dtype, "silu", instance=WHOLE, activation_parameter=1.1)
    ((made,),) = operations(HOPPER, [case])
    code = triton.compile(source(made), target=TARGETS["sm_90"], options=made.launch.options).asm["ptx"]
    assert ("cvt.rn.f32.f64" in code) is (dtype is FP32)
