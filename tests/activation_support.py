"""The activations at 50 digits, in plain torch, and by the functions that go into the CPU's kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import mpmath
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fusednorm.activations import FORMULAS

TORCH: dict[str, Callable[..., Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
}


def torchs(z: Tensor, name: str, parameter: float | None = None) -> tuple[Tensor, Tensor]:
    """Torch's own function and its gradient."""
    leaf = z.clone().requires_grad_()
    if name == "silu" and parameter not in (None, 1.0):
        value = leaf * torch.sigmoid(parameter * leaf)
    else:
        value = TORCH[name](leaf, parameter) if name == "leaky_relu" and parameter is not None else TORCH[name](leaf)
    (derivative,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), derivative


@cache
def _compiled(dtype: torch.dtype) -> Callable[[np.ndarray, str, float], tuple[np.ndarray, np.ndarray]]:
    """values and derivatives of an array of z, by the functions that go into the kernels, compiled in one piece."""
    from numba import njit

    from fusednorm.backends.cpu.kernels.mathematics import activation

    names = list(FORMULAS)
    functions = [activation(name, str(dtype).removeprefix("torch.")) for name in names]
    lines = ["def run(z, which, parameter, one, value, derivative):", "    for i in range(z.size):"]
    for place in range(len(names)):
        lines.append(f"        {'if' if place == 0 else 'elif'} which == {place}:")
        lines.append(f"            value[i] = value_{place}(z[i], parameter)")
        lines.append(f"            derivative[i] = pullback_{place}(one, z[i], parameter)")
    scope: dict[str, Any] = {}
    for place, (value, pullback) in enumerate(functions):
        scope |= {f"value_{place}": value, f"pullback_{place}": pullback}
    exec("\n".join(lines), scope)
    run = njit(scope["run"], error_model="numpy", fastmath={"contract"})
    number = np.float64 if dtype == torch.float64 else np.float32

    def evaluate(z: np.ndarray, name: str, parameter: float) -> tuple[np.ndarray, np.ndarray]:
        value, derivative = np.full_like(z, np.nan), np.full_like(z, np.nan)
        run(z, names.index(name), number(parameter), number(1.0), value, derivative)
        return value, derivative

    return evaluate


def ours(
    z: Tensor, name: str, parameter: float | None = None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The CPU kernels' value and derivative of z in the compute dtype, before a result is rounded to ``dtype``."""
    parameter = FORMULAS[name].default if parameter is None else parameter
    value, derivative = _compiled(dtype or z.dtype)(z.numpy(), name, parameter)
    return torch.from_numpy(value), torch.from_numpy(derivative)


# --- at 50 digits ---

_mp = mpmath.MPContext()
_mp.dps = 50
Number = Any


def _sigmoid(u: Number) -> Number:
    """Beyond 10,000 the exponent of the result has no place in float64, and little in memory."""
    return _mp.mpf(u > 0) if abs(u) > 1e4 else 1 / (1 + _mp.exp(-u))


def _slope(u: Number) -> Number:
    return _sigmoid(u) * _sigmoid(-u)


def _silu(z: Number, beta: Number) -> tuple[Number, Number]:
    s = _sigmoid(beta * z)
    return z * s, s + beta * z * _slope(beta * z)


def _gelu(z: Number, unused: Number) -> tuple[Number, Number]:
    if abs(z) > 1e3:
        return max(z, _mp.zero), _mp.mpf(z > 0)
    cdf, pdf = _mp.erfc(-z / _mp.sqrt(2)) / 2, _mp.exp(-z * z / 2) / _mp.sqrt(2 * _mp.pi)
    return z * cdf, cdf + z * pdf


def _gelu_tanh(z: Number, unused: Number) -> tuple[Number, Number]:
    factor, cube = 2 * _mp.sqrt(2 / _mp.pi), _mp.mpf("0.044715")
    u = factor * (z + cube * z**3)
    return z * _sigmoid(u), _sigmoid(u) + z * _slope(u) * factor * (1 + 3 * cube * z * z)


def _tanh(z: Number, unused: Number) -> tuple[Number, Number]:
    return _mp.tanh(z) if abs(z) < 1e4 else _mp.sign(z), 4 * _slope(2 * z)


def _hardswish(z: Number, unused: Number) -> tuple[Number, Number]:
    if abs(z) >= 3:
        return max(z, _mp.zero), _mp.mpf(z > 0)
    return z * (z + 3) / 6, z / 3 + _mp.mpf(0.5)


_AT_50_DIGITS: dict[str, Callable[[Number, Number], tuple[Number, Number]]] = {
    "silu": _silu,
    "relu": lambda z, unused: (max(z, _mp.zero), _mp.mpf(z > 0)),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "sigmoid": lambda z, unused: (_sigmoid(z), _slope(z)),
    "tanh": _tanh,
    "hardswish": _hardswish,
    "leaky_relu": lambda z, slope: (z if z > 0 else slope * z, _mp.one if z > 0 else slope),
}


def _error(got: float, right: Number, least: Number, tiny: float) -> float:
    """The relative error, or for a number below ``least`` that in its units; 0 below ``tiny``, infinite for a NaN."""
    if not np.isfinite(got):
        return np.inf
    error = abs(_mp.mpf(got) - right)
    return 0.0 if error <= tiny else float(error / max(abs(right), least))


@cache
def right(z: tuple[float, ...], name: str, parameter: float) -> list[tuple[Number, Number]]:
    """Values and derivatives at 50 digits."""
    return [_AT_50_DIGITS[name](_mp.mpf(at), _mp.mpf(parameter)) for at in z]


def errors(
    z: Tensor, got: tuple[Tensor, Tensor], name: str, parameter: float, tiny: float
) -> tuple[np.ndarray, np.ndarray]:
    """The errors of values and derivatives at each z, in machine epsilons of the result.

    They are relative; but relative to 1 for derivatives that may be near their zero, in -4 < z < 0. An error below
    ``tiny`` counts for none: exponentials below the normal numbers are 0.
    """
    points, epsilon = z.double().tolist(), torch.finfo(got[0].dtype).eps
    exact = right(tuple(points), name, parameter)
    values = [_error(y, e, _mp.zero, tiny) for y, (e, _) in zip(got[0].tolist(), exact, strict=True)]
    slopes = []
    for at, d, (_, e) in zip(points, got[1].tolist(), exact, strict=True):
        turning = -4 < at * (parameter if name == "silu" else 1.0) < 0
        slopes.append(_error(d, e, _mp.mpf(turning), tiny))
    return np.array(values) / epsilon, np.array(slopes) / epsilon
