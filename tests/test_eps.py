"""eps: what torch accepts is accepted, in every family, with torch's results, NaN included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusednorm
from fusednorm import nn, ops

NAN, INF = float("nan"), float("inf")
MEAN, VAR = torch.linspace(-1, 1, 8), torch.linspace(0.1, 2, 8)

# The same call of the two libraries, as functions of the input and eps.
CALLS: dict[str, Callable[[Any, Tensor, Any], Tensor]] = {
    "group_norm": lambda lib, x, eps: lib.group_norm(x, 4, eps=eps),
    "layer_norm": lambda lib, x, eps: lib.layer_norm(x, (6,), eps=eps),
    "rms_norm": lambda lib, x, eps: lib.rms_norm(x, (6,), eps=eps),
    "instance_norm": lambda lib, x, eps: lib.instance_norm(x, eps=eps),
    "instance_norm given": lambda lib, x, eps: lib.instance_norm(x, MEAN, VAR, use_input_stats=False, eps=eps),
    "batch_norm training": lambda lib, x, eps: lib.batch_norm(x, None, None, training=True, eps=eps),
    "batch_norm given": lambda lib, x, eps: lib.batch_norm(x, MEAN, VAR, eps=eps),
}


@pytest.fixture
def x() -> Tensor:
    """Variances on both sides of 0.5, and none near it."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 3, 6)
    x[:, ::2] *= 0.1
    return x.requires_grad_()


@pytest.mark.parametrize("eps", [-0.5, -INF, 0, 0.0, -0.0, 1, True, 1e-40, INF, NAN])
@pytest.mark.parametrize("name", CALLS)
def test_values_are_torchs(name: str, eps: float, x: Tensor) -> None:
    call = CALLS[name]
    if name.startswith("batch_norm") and (eps < 0 or (eps == 0 and "training" in name)):
        with pytest.raises(ValueError, match="eps is"):
            call(fusednorm, x, eps)
        return
    if name == "batch_norm given" and eps == 0:  # which torch 2.11 takes in its operator, not in its function
        expected = torch.batch_norm(x, None, None, MEAN, VAR, False, 0.1, eps, False)
    else:
        expected = call(F, x, eps)
    torch.testing.assert_close(call(fusednorm, x, eps), expected, rtol=1e-3, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("eps", [-0.5, 0.0, INF, NAN])
@pytest.mark.parametrize("name", ["group_norm", "layer_norm", "rms_norm", "instance_norm"])
def test_gradients_are_those_of_the_formula(name: str, eps: float, x: Tensor) -> None:
    dims = {"group_norm": (2, 3, 4), "instance_norm": (2, 3)}.get(name, (3,))
    view = x.double().view(2, 4, 2, 3, 6) if name == "group_norm" else x.double()
    centred = view if name == "rms_norm" else view - view.mean(dims, keepdim=True)
    plain = (centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()).view(x.shape)
    dy = torch.randn_like(x)
    (expected,) = torch.autograd.grad(plain, x, dy.double())
    (got,) = torch.autograd.grad(CALLS[name](fusednorm, x, eps), x, dy)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize(
    "eps",
    [
        np.float64(0.1),
        np.float32(0.1),
        np.float16(0.1),
        np.int64(1),
        np.bool_(True),
        torch.tensor(0.1),
        torch.tensor(1),
    ],
    ids=lambda eps: f"{type(eps).__name__} {getattr(eps, 'dtype', '')}",
)
@pytest.mark.parametrize("name", CALLS)
def test_scalars_of_numpy_and_torch(name: str, eps: Any, x: Tensor) -> None:
    call = CALLS[name]
    torch.testing.assert_close(call(fusednorm, x, eps), call(F, x, eps), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "eps", ["1e-5", [1e-5], 1j, torch.tensor([1e-5]), torch.tensor(1e-5, requires_grad=True), torch.tensor(1j)]
)
@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_number_is_refused(name: str, eps: Any, x: Tensor) -> None:
    with pytest.raises(TypeError, match=r"eps .*expected a number"):
        CALLS[name](fusednorm, x, eps)


def test_modules_and_ops_take_them_too(x: Tensor) -> None:
    for name in ("GroupNorm", "LayerNorm", "RMSNorm", "InstanceNorm2d"):
        arguments: Any = {"GroupNorm": (4, 8), "InstanceNorm2d": (8,)}.get(name, (6,))
        got, expected = (getattr(module, name)(*arguments, eps=-0.5)(x) for module in (nn, torch.nn))
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5, equal_nan=True)
    output, _, rstd = ops.group_norm_forward(x, 4, None, None, -0.5)
    assert output.isnan().any()
    assert rstd.isnan().any()
    output, mean, rstd, _ = torch.ops.fusednorm.norm_forward(
        x, None, None, None, None, None, None, "instance_norm", 0, 1, -0.5, "relu", 0.0
    )
    assert rstd.isnan().any()
    assert rstd.isfinite().any()
    assert not mean.isnan().any()
    assert torch.equal(output.isnan().all(3).all(2), rstd.isnan())


def test_a_graph_takes_a_negative_epsilon(x: Tensor) -> None:
    graph = fusednorm.graph.Graph(torch.float32)
    tensor = graph.tensor(x.shape)
    y = graph.layernorm(tensor, normalized_shape=(6,), epsilon=-0.5, phase="inference")[0].set_output()
    graph.build()
    out = torch.empty_like(x)
    graph.execute({tensor: x.detach(), y: out})
    torch.testing.assert_close(out, F.layer_norm(x.detach(), (6,), eps=-0.5), rtol=1e-3, atol=1e-5, equal_nan=True)
