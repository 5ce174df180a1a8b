"""Calls that differ in a number, or in a length, run the same compiled kernels, counted with no GPU present."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

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


# --- lengths ---

DRAWN = 200


def _lengths(most: int, least: int = 1) -> list[int]:
    """Half of them of any order of magnitude, and half drawn evenly."""
    draw = Random(0)
    small = [int(least * (most / least) ** draw.random()) for _ in range(DRAWN // 2)]
    return small + [draw.randint(least, most) for _ in range(DRAWN // 2)]


#: A problem of any length, how long it gets, and the most compiled kernels of one kind that all its lengths may need.
#: Tiles of short lengths are powers of two. Each may be masked or not, with runs at multiples of 1, 2, 4 or 8 elements.
FAMILIES: dict[str, tuple[Callable[[int], Case], int, int]] = {
    "layer_norm": (lambda n: Case("layer_norm", 1, (n, 4096)), 65536, 9),
    "layer_norm of 1000": (lambda n: Case("layer_norm", 1, (n, 1000)), 65536, 16),
    "layer_norm of long rows": (lambda n: Case("layer_norm", 1, (n, 20000)), 8192, 8),
    "rms_norm": (lambda n: Case("rms_norm", 1, (n, 768), FP32), 65536, 9),
    "group_norm": (lambda n: Case("group_norm", 32, (2, 320, n), activation="silu"), 1 << 18, 40),
    "group_norm, last": (lambda n: Case("group_norm", 32, (2, 320, n, 1), last=True), 1 << 18, 10),
    "instance_norm": (lambda n: Case("instance_norm", 0, (4, 64, n)), 480_000, 40),
    "batch_norm": (lambda n: Case("batch_norm", 0, (16, 80, n), activation="relu"), 100_000, 50),
    "batch_norm, last": (lambda n: Case("batch_norm", 0, (32, 64, n, 1), last=True), 50_000, 13),
    "batch_norm of samples": (lambda n: Case("batch_norm", 0, (n, 64, 28, 28)), 256, 9),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_lengths_share_few_kernels(name: str) -> None:
    case, most, bound = FAMILIES[name]
    found = {kernel: len(keys) for kernel, keys in _kernels(map(case, _lengths(most))).items()}
    assert max(found.values()) <= bound, found


@pytest.mark.parametrize("name", FAMILIES)
def test_lengths_of_one_magnitude_share_fewer(name: str) -> None:
    """Recordings between half of the longest and the longest: masked or not, at multiples of 1, 2, 4 or 8."""
    case, most, _ = FAMILIES[name]
    found = {kernel: len(keys) for kernel, keys in _kernels(map(case, _lengths(most, most // 2))).items()}
    assert max(found.values()) <= 8, found


@pytest.mark.parametrize("last", [False, True])
def test_a_length_that_tiles_divide_needs_no_mask(last: bool) -> None:
    for length, even in ((4096, True), (4099, False)):
        for operation in operations(HOPPER, [Case("group_norm", 32, (2, 320, length, 1), last=last, instance=TILES)]):
            for made in operation:
                assert made.launch.constants.get("EVEN", even) is even
    ((made,),) = operations(HOPPER, [Case("layer_norm", 1, (64, 128), instance=WHOLE)])
    assert made.launch.constants["EVEN"]


def test_a_position_has_its_channel() -> None:
    """whole.channel_of's product, at the ends of each channel, for each length that a unit may have."""
    for positions in range(2, 32769):
        reciprocal = -(-(1 << 31) // positions)
        assert reciprocal < 1 << 31
        starts = torch.arange(0, 32768, positions)
        for place in (starts, starts[1:] - 1):
            assert torch.equal((2 * place * reciprocal) >> 32, place // positions)
