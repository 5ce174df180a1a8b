"""The public functions beside torch's: signatures, values, dtypes, running statistics, and a light import."""

from __future__ import annotations

import doctest
import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusednorm
from fusednorm import functional, nn, ops
from fusednorm.norm import FAMILIES

# Two units in the last place of the output, and what fp32 statistics of a few dozen elements leave.
TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def call(module: Any, family: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, **extra: Any) -> Tensor:
    if family == "group_norm":
        return module.group_norm(x, 4, weight, bias, **extra)
    if family == "instance_norm":
        return module.instance_norm(x, None, None, weight, bias, **extra)
    if family == "layer_norm":
        return module.layer_norm(x, weight.shape, weight, bias, **extra)
    if family == "rms_norm":
        return module.rms_norm(x, weight.shape, weight, **extra)
    return module.batch_norm(x, None, None, weight, bias, True, **extra)


def parameters(family: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    size = shape[-1:] if family in ("layer_norm", "rms_norm") else shape[1:2]
    return torch.randn(size), torch.randn(size)


@pytest.mark.parametrize("family", FAMILIES)
def test_signature_is_torchs_with_keyword_only_extras(family: str) -> None:
    ours = inspect.signature(getattr(fusednorm, family)).parameters
    theirs = inspect.signature(getattr(F, family)).parameters
    positional = [name for name, each in ours.items() if each.kind is not each.KEYWORD_ONLY]
    assert positional == list(theirs)
    assert [ours[name].default for name in positional] == [each.default for each in theirs.values()]
    assert ours["activation"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_torchs_in_every_dtype(family: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 8, 5, 7).to(dtype)
    weight, bias = parameters(family, x.shape)
    output = call(fusednorm, family, x, weight, bias, activation="silu")
    expected = F.silu(call(F, family, x.double(), weight.double(), bias.double()))
    assert output.dtype == dtype
    torch.testing.assert_close(output, expected.to(dtype), **TOLERANCE[dtype])


@pytest.mark.parametrize("shape", [(6, 8), (3, 8, 5), (2, 8, 3, 4), (2, 8, 2, 3, 4), (2, 8, 2, 1, 3, 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_2_to_6(family: str, shape: tuple[int, ...]) -> None:
    if family == "instance_norm" and len(shape) == 2:
        pytest.skip("one position for each channel is an error")
    x = torch.randn(shape)
    weight, bias = parameters(family, shape)
    torch.testing.assert_close(call(fusednorm, family, x, weight, bias), call(F, family, x, weight, bias))


@pytest.mark.parametrize("num_groups", [1, 2, 8])
def test_channels_last_and_channel_dim_agree_with_torch(num_groups: int) -> None:
    x, weight, bias = torch.randn(2, 8, 5, 6), torch.randn(8), torch.randn(8)
    expected = F.group_norm(x, num_groups, weight, bias)
    last = x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(fusednorm.group_norm(last, num_groups, weight, bias), expected)
    nhwc = fusednorm.group_norm(x.movedim(1, -1).contiguous(), num_groups, weight, bias, channel_dim=-1)
    assert nhwc.is_contiguous()
    torch.testing.assert_close(nhwc.movedim(-1, 1), expected)


@pytest.mark.parametrize("family", ["group_norm", "instance_norm", "batch_norm"])
def test_scale_and_shift_taken_from_one_tensor(family: str) -> None:
    x, (weight, bias) = torch.randn(2, 8, 4, 4), parameters(family, (2, 8, 4, 4))
    scale, shift = torch.randn(2, 16).chunk(2, dim=1)
    assert not scale.is_contiguous()
    output = call(fusednorm, family, x, weight, bias, scale=scale, shift=shift, activation="gelu")
    normalized = call(F, family, x, weight, bias)
    torch.testing.assert_close(output, F.gelu(normalized * (1 + scale[..., None, None]) + shift[..., None, None]))
    only = call(fusednorm, family, x, weight, bias, shift=shift)
    torch.testing.assert_close(only, normalized + shift[..., None, None])


def test_parameters_of_any_strides() -> None:
    x = torch.randn(2, 8, 4)
    weight, bias = torch.randn(8, 3)[:, 1], torch.ones(1).expand(8)
    torch.testing.assert_close(
        fusednorm.group_norm(x, 4, weight, bias), F.group_norm(x, 4, weight.clone(), bias.clone())
    )
    weight, bias = torch.randn(4, 8).t(), torch.randn(16, 4)[::2]
    torch.testing.assert_close(fusednorm.layer_norm(x, (8, 4), weight, bias), F.layer_norm(x, (8, 4), weight, bias))


def test_activations_by_alias_and_object() -> None:
    x = torch.randn(2, 8, 4)
    assert torch.equal(fusednorm.group_norm(x, 4, activation="swish"), fusednorm.group_norm(x, 4, activation="silu"))
    z = F.group_norm(x, 4)
    quick = fusednorm.group_norm(x, 4, activation=fusednorm.Activation("silu", 1.702))
    torch.testing.assert_close(quick, z * torch.sigmoid(1.702 * z))
    flat = fusednorm.group_norm(x, 4, activation=fusednorm.Activation("silu", 0.0))
    torch.testing.assert_close(flat, z / 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rms_norm_without_eps_takes_torchs(dtype: torch.dtype) -> None:
    x = torch.full((2, 8), 1e-3, dtype=dtype)  # small enough for eps to matter
    torch.testing.assert_close(fusednorm.rms_norm(x, (8,)), F.rms_norm(x, (8,)))


@pytest.mark.parametrize("shape", [(0, 8, 4), (2, 8, 0), (0, 8, 0)])
@pytest.mark.parametrize("family", FAMILIES)
def test_empty_inputs(family: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    weight, bias = (each.requires_grad_() for each in parameters(family, shape))
    output = call(fusednorm, family, x, weight, bias, activation="silu")
    assert output.shape == x.shape
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_an_empty_batch_leaves_the_running_statistics() -> None:
    mean, var = torch.randn(8), torch.rand(8)
    before = mean.clone(), var.clone()
    fusednorm.batch_norm(torch.randn(0, 8, 4), mean, var, training=True)
    fusednorm.instance_norm(torch.randn(0, 8, 4), mean, var)
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])


@pytest.mark.parametrize("buffers", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_running_statistics_follow_torchs_over_several_steps(dtype: torch.dtype, buffers: torch.dtype) -> None:
    ours = torch.zeros(8, dtype=buffers), torch.ones(8, dtype=buffers)
    theirs = torch.zeros(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    for step in range(4):
        x = (torch.randn(4, 8, 6) * (step + 1) + step).to(dtype)
        fusednorm.batch_norm(x, *ours, training=True, momentum=0.3)
        F.batch_norm(x.double(), *theirs, training=True, momentum=0.3)
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.dtype == buffers
        tolerance = {"rtol": 2e-2, "atol": 1e-2} if buffers == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(mine.double(), expected, **tolerance)


def test_instance_norm_with_running_statistics() -> None:
    ours, theirs = (torch.zeros(8), torch.ones(8)), (torch.zeros(8), torch.ones(8))
    for step in range(3):
        x = torch.randn(4, 8, 6) * (step + 1) + step
        torch.testing.assert_close(fusednorm.instance_norm(x, *ours), F.instance_norm(x, *theirs))
        torch.testing.assert_close(ours, theirs)
    x = torch.randn(4, 8, 6)
    inference = fusednorm.instance_norm(x, *ours, use_input_stats=False, activation="relu")
    torch.testing.assert_close(inference, F.relu(F.instance_norm(x, *theirs, use_input_stats=False)))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_keeps_the_inputs_dtype(family: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 8, 4, dtype=dtype, requires_grad=True)
    weight, bias = parameters(family, x.shape)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = call(fusednorm, family, x, weight, bias)
    assert output.dtype == dtype
    assert torch.equal(output, call(fusednorm, family, x, weight, bias))


@pytest.mark.parametrize("family", FAMILIES)
def test_meta_and_fake_tensors(family: str) -> None:
    x, (weight, bias) = torch.randn(2, 8, 4, 4), parameters(family, (2, 8, 4, 4))
    x = x.to(memory_format=torch.channels_last)
    real = call(fusednorm, family, x, weight, bias)
    meta = call(fusednorm, family, *(tensor.to("meta") for tensor in (x, weight, bias)))
    with FakeTensorMode() as mode:
        fake = call(fusednorm, family, *(mode.from_tensor(tensor) for tensor in (x, weight, bias)))
    for tensor in (meta, fake):
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (real.shape, real.stride(), real.dtype)


def test_a_large_fp16_input_does_not_overflow() -> None:
    x = (torch.randn(2, 8, 64).clamp(-2, 2) * 5000).half()
    output = fusednorm.group_norm(x, 4)
    torch.testing.assert_close(output, F.group_norm(x.double(), 4).half(), rtol=2e-3, atol=2e-3)


def test_nan_stays_in_its_group() -> None:
    x = torch.randn(2, 8, 16)
    x[1, 3, 5] = float("nan")
    bad = fusednorm.group_norm(x, 4, activation="silu").isnan().view(2, 4, -1)
    assert bad.all(2).tolist() == [[False] * 4, [False, True, False, False]]
    assert bad.any(2).tolist() == bad.all(2).tolist()


def test_a_profile_names_the_op() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        fusednorm.group_norm(torch.randn(2, 8, 4), 4)
    assert "fusednorm::norm_forward" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("module", [functional, nn, ops], ids=lambda module: module.__name__)
def test_examples_in_the_docstrings(module: Any) -> None:
    tests = doctest.DocTestFinder().find(module, module.__name__)
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert runner.tries > 0
    assert runner.failures == 0


HEAVY = (
    "numba", "llvmlite", "triton", "matplotlib", "typer", "rich", "hypothesis", "sklearn", "pandas",
    "torch.distributed.tensor",
)  # fmt: skip

IMPORT = """
    import json, sys
    import torch
    before = set(sys.modules)
    import {module}
    found = set(sys.modules) - before
    print(json.dumps(sorted(found & {{"torch.distributed.tensor"}} | {{name.split(".")[0] for name in found}})))
"""


def fresh_import(module: str) -> set[str]:
    """The packages that an import adds to those of `import torch` in a new process."""
    program = textwrap.dedent(IMPORT).format(module=module)
    source = str(Path(fusednorm.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_the_import_is_light() -> None:
    assert fresh_import("fusednorm").isdisjoint(HEAVY)


def test_the_light_import_test_can_fail() -> None:
    assert not fresh_import("numba").isdisjoint(HEAVY)


@pytest.mark.parametrize("name", fusednorm.__all__)
def test_public_names(name: str) -> None:
    assert getattr(fusednorm, name) is not None
    assert name in dir(fusednorm)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'grup_norm'"):
        fusednorm.grup_norm  # noqa: B018


def test_determinism() -> None:
    x, weight = torch.randn(3, 32, 17, 13), torch.randn(32)
    call_: Callable[[], Tensor] = lambda: fusednorm.group_norm(x, 8, weight, activation="silu")  # noqa: E731
    assert all(torch.equal(call_(), call_()) for _ in range(3))
