"""explain and instances say what a call comes to."""

from __future__ import annotations

import pytest
import torch

import fusednorm
from fusednorm import inspection

X = torch.randn(2, 32, 8, 8)
WEIGHT, BIAS = torch.ones(32), torch.zeros(32)


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 10 GB/s and 1 Tflop/s, so that nothing is measured and every figure is known."""
    monkeypatch.setattr(inspection, "copy_bandwidth", lambda nbytes, device: 1e10)
    monkeypatch.setattr(inspection, "peak_flops", lambda dtype, device: 1e12)


def test_explanation_of_a_forward() -> None:
    found = fusednorm.explain(fusednorm.group_norm, X, 4, WEIGHT, BIAS, activation="silu")
    problem = found.problem
    assert (problem.family, problem.direction, problem.view.groups) == ("group_norm", "forward", 4)
    # Two transfers of x, a weight and a bias, and a mean and an rstd of each of the 2 x 4 groups.
    assert found.bytes == 4 * (2 * X.numel() + 2 * 32 + 2 * 8)
    assert found.least_seconds == found.bytes / 1e10
    assert (found.balance, found.bound, found.copies) == (100, "memory", ())
    assert found.intensity == found.flops / found.bytes


def test_instance_named_is_the_one_that_runs() -> None:
    found = fusednorm.explain(fusednorm.group_norm, X, 4)
    candidates = fusednorm.instances(fusednorm.group_norm, X, 4)
    able = [candidate.instance.name for candidate in candidates if candidate.reason is None]
    assert found.instance in able
    assert {one.instance: one.reason for one in found.rejected} == {
        candidate.instance.name: candidate.reason for candidate in candidates if candidate.reason is not None
    }
    with fusednorm.use_instance("reference"):
        forced = fusednorm.explain(fusednorm.group_norm, X, 4)
    assert forced.instance == "reference"
    assert "use_instance" in forced.reason


def test_strides_that_force_a_copy_are_named() -> None:
    odd = torch.randn(2, 32, 16, 24)[:, :, ::2, ::3]
    assert fusednorm.explain(fusednorm.group_norm, odd, 4).copies == ("input",)
    channels_last = X.to(memory_format=torch.channels_last)
    assert fusednorm.explain(fusednorm.group_norm, channels_last, 4).problem.layout.order == "channels_last"
    assert fusednorm.explain(fusednorm.group_norm, channels_last, 4, direction="backward").copies == ()


@pytest.mark.parametrize("direction", inspection.ASKED)
def test_every_direction_of_every_function(direction: inspection.Asked) -> None:
    calls = [
        (fusednorm.group_norm, (X, 4)),
        (fusednorm.instance_norm, (X,)),
        (fusednorm.layer_norm, (X, (8, 8))),
        (fusednorm.rms_norm, (X, (8,))),
        (fusednorm.batch_norm, (X, None, None, None, None, True)),
    ]
    for function, arguments in calls:
        problem = fusednorm.explain(function, *arguments, direction=direction).problem
        assert (problem.family, problem.direction) == (function.__name__, direction)


@pytest.mark.parametrize("function", [fusednorm.batch_norm, fusednorm.instance_norm])
def test_given_statistics_are_batch_norm_inference(function: object) -> None:
    assert callable(function)
    options = {"use_input_stats": False} if function is fusednorm.instance_norm else {}
    found = fusednorm.explain(function, X, BIAS, WEIGHT, **options)
    assert (found.problem.family, found.problem.direction) == ("batch_norm", "inference")
    backward = fusednorm.explain(function, X, BIAS, WEIGHT, direction="backward", **options)
    assert backward.problem.norm.training is False


def test_running_statistics_are_left_alone() -> None:
    mean, var = torch.zeros(32), torch.ones(32)
    fusednorm.explain(fusednorm.batch_norm, X, mean, var, training=True)
    assert torch.equal(mean, torch.zeros(32))
    assert torch.equal(var, torch.ones(32))


def test_compute_bounds_where_the_arithmetic_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "peak_flops", lambda dtype, device: 1e9)
    assert fusednorm.explain(fusednorm.group_norm, X, 4, activation="gelu").bound == "compute"


def test_text_says_it_all() -> None:
    text = str(fusednorm.explain(fusednorm.group_norm, X, 4, WEIGHT, BIAS, activation="silu"))
    found = fusednorm.explain(fusednorm.group_norm, X, 4, WEIGHT, BIAS, activation="silu")
    for part in (
        "group_norm + silu, forward, float32",
        found.instance,
        "memory",
        "10 GB/s",
        "copies     none",
        *(one.reason for one in found.rejected),
    ):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((fusednorm.group_norm, X, 5), ValueError, "num_groups"),
        ((torch.relu, X), TypeError, "function"),
        ((fusednorm.group_norm, X), TypeError, "num_groups"),
    ],
)
def test_bad_calls(arguments: tuple[object, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fusednorm.explain(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="direction"):
        fusednorm.explain(fusednorm.group_norm, X, 4, direction="sideways")  # type: ignore[arg-type]
