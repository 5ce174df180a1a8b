"""The formulas once more, in plain torch, for the judge of the drawn search: neither fusednorm's nor torch's norms.

K elements lie under a statistic; with A = weight (1 + scale) and B = bias (1 + scale) + shift

    xhat = (x - mean) rstd      z = A xhat + B      y = phi(z)      dz = dy phi'(z)
    p = sum_S dz                q = sum_S dz xhat   P, Q = sums of A p, A q over the channels of a statistic
    dx = rstd (A dz - (P + xhat Q) / K)             dx = rstd A dz where the statistics are given

The same function in float64 is what is expected, and in float32 the plain computation that the rule compares with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import pi, prod, sqrt

import torch
from torch import Tensor

ROW_FAMILIES = ("layer_norm", "rms_norm")
KINKS = {"relu": (0.0,), "leaky_relu": (0.0,), "hardswish": (-3.0, 3.0)}
Tensors = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Spec:
    """One call: ``groups`` is the number of groups, or for rows that of the normalized trailing dimensions, where 0
    stands for the channels of each position, which then lie in ``channel_dim``."""

    family: str
    shape: tuple[int, ...]
    groups: int
    channel_dim: int
    training: bool
    eps: float
    activation: str | None
    parameter: float

    @property
    def rows(self) -> bool:
        return self.family in ROW_FAMILIES

    @property
    def per_position(self) -> bool:
        return self.rows and self.groups == 0

    @property
    def dims(self) -> tuple[int, int, int, int]:
        """(N, G, D, S); positions with statistics of their own are samples."""
        if self.per_position:
            return self.shape[0] * self.positions, 1, self.shape[self.channel_axis], 1
        if self.rows:
            split = len(self.shape) - self.groups
            return prod(self.shape[:split]), 1, prod(self.shape[split:]), 1
        rest = [size for axis, size in enumerate(self.shape) if axis not in (0, self.channel_axis)]
        channels = self.shape[self.channel_axis]
        groups = self.groups if self.family == "group_norm" else channels
        return self.shape[0], groups, channels // groups if groups else 0, prod(rest)

    @property
    def positions(self) -> int:
        return prod(size for axis, size in enumerate(self.shape) if axis not in (0, self.channel_axis))

    @property
    def modulation_shape(self) -> tuple[int, int]:
        """The shape of scale and shift."""
        return self.shape[0], self.shape[self.channel_axis]

    @property
    def channel_axis(self) -> int:
        return 1 if self.channel_dim == 1 else len(self.shape) - 1

    @property
    def count(self) -> int:
        """Elements under one statistic."""
        samples, _, depth, spatial = self.dims
        return depth * spatial * (samples if self.family == "batch_norm" else 1)

    @property
    def statistics_shape(self) -> tuple[int, ...]:
        samples, groups, _, _ = self.dims
        if self.per_position:
            return self.shape[0], self.positions
        return (groups,) if self.family == "batch_norm" else (samples, groups)

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        trailing = self.rows and not self.per_position
        return self.shape[-self.groups :] if trailing else (self.shape[self.channel_axis],)

    def to_view(self, tensor: Tensor) -> Tensor:
        """(N, G, D, S) of a tensor of the input's shape."""
        if self.per_position:
            return tensor.movedim(self.channel_axis, -1).reshape(self.dims)
        return (tensor if self.rows else tensor.movedim(self.channel_axis, 1)).reshape(self.dims)

    def from_view(self, tensor: Tensor) -> Tensor:
        if self.per_position:
            moved = [size for axis, size in enumerate(self.shape) if axis != self.channel_axis]
            return tensor.reshape(*moved, self.shape[self.channel_axis]).movedim(-1, self.channel_axis)
        if self.rows:
            return tensor.reshape(self.shape)
        moved = [self.shape[0], self.shape[self.channel_axis]]
        moved += [size for axis, size in enumerate(self.shape) if axis not in (0, self.channel_axis)]
        return tensor.reshape(moved).movedim(1, self.channel_axis)


def value(z: Tensor, name: str | None, parameter: float) -> Tensor:
    """phi(z), in forms that keep their tails."""
    if name is None:
        return z
    if name == "silu":
        return z * torch.sigmoid(parameter * z)
    if name == "relu":
        return torch.where(z <= 0, 0.0, z)
    if name == "gelu":
        return z * (0.5 * torch.erfc(z * -sqrt(0.5)))
    if name == "gelu_tanh":
        return z * torch.sigmoid(2 * sqrt(2 / pi) * (z + 0.044715 * z * z * z))
    if name == "sigmoid":
        return torch.sigmoid(z)
    if name == "tanh":
        return torch.tanh(z)
    if name == "hardswish":
        return z * ((z + 3).clamp(0, 6) / 6)
    assert name == "leaky_relu"
    return torch.where(z > 0, z, z * parameter)


def derivative(z: Tensor, name: str | None, parameter: float) -> Tensor:
    """phi'(z); at a kink and at NaN it is torch's."""
    if name is None:
        return torch.ones_like(z)
    if name == "silu":
        inner = parameter * z
        return torch.sigmoid(inner) * (1 + inner * torch.sigmoid(-inner))
    if name == "relu":
        return torch.where(z <= 0, 0.0, 1.0).to(z.dtype)
    if name == "gelu":
        return 0.5 * torch.erfc(z * -sqrt(0.5)) + z * torch.exp(-0.5 * z * z) / sqrt(2 * pi)
    if name == "gelu_tanh":
        inner = 2 * sqrt(2 / pi) * (z + 0.044715 * z * z * z)
        slope = 2 * sqrt(2 / pi) * (1 + 0.134145 * z * z)
        return torch.sigmoid(inner) * (1 + z * slope * torch.sigmoid(-inner))
    if name == "sigmoid":
        return torch.sigmoid(z) * torch.sigmoid(-z)
    if name == "tanh":
        return 4 * torch.sigmoid(2 * z) * torch.sigmoid(-2 * z)
    if name == "hardswish":
        return torch.where(z <= -3, 0.0, torch.where(z >= 3, 1.0, z / 3 + 0.5)).to(z.dtype)
    assert name == "leaky_relu"
    return torch.where(z > 0, 1.0, torch.tensor(parameter, dtype=z.dtype, device=z.device)).to(z.dtype)


def limits(z: Tensor, got: Tensor, name: str | None, parameter: float, of_derivative: bool) -> Tensor:
    """``got`` with its limits where z is so large that a formula overflows on the way."""
    if name not in ("silu", "gelu", "gelu_tanh", "hardswish"):
        return got
    rising = parameter if name == "silu" else 1.0
    if rising == 0.0:
        return got
    far = z.abs() > 1e30
    up = (z > 0) == (rising > 0)
    if of_derivative:
        return torch.where(far, up.to(z.dtype), got)
    return torch.where(far, torch.where(up, z, torch.zeros_like(z)), got)


@dataclass
class Computed:
    """The results by name, and what the comparison asks for: of the view, of each statistic and of their magnitudes."""

    results: dict[str, Tensor]
    z: Tensor
    mean: Tensor
    rstd: Tensor
    broken: Tensor  # statistics that are not finite, or whose deviation is beyond the dtype; (N or 1, G, 1, 1)
    offset: float
    magnitudes: dict[str, Tensor]


def compute(
    spec: Spec,
    tensors: Tensors,
    dtype: torch.dtype,
    *,
    order: int = 0,
    exact: bool = False,
    shown: Tensor | None = None,
    magnitudes: bool = False,
) -> Computed:
    """All results that the tensors determine, in ``dtype``; ``order`` is one of two orders of multiplication.

    ``exact`` takes limits where formulas overflow. ``shown`` is the output that a user saw, from which a rectifier's
    derivative follows at every element.
    """
    samples, groups, depth, _ = spec.dims
    per_batch = spec.family == "batch_norm"
    axes = (0, 2, 3) if per_batch else (2, 3)

    def get(name: str, *shape: int) -> Tensor | None:
        tensor = tensors.get(name)
        return None if tensor is None else tensor.to(dtype).reshape(shape)

    def parameter(name: str, rows: int, default: float) -> Tensor:
        found = get(name, rows, groups, depth, 1)
        return torch.full((1, 1, 1, 1), default, dtype=dtype, device=source.device) if found is None else found

    def modulation(name: str) -> Tensor:
        found = tensors.get(name)
        if found is None or not spec.per_position:
            return parameter(name, samples, 0.0)
        return found.to(dtype).repeat_interleave(spec.positions, 0).reshape(samples, groups, depth, 1)

    source = tensors["input"]
    assert source is not None
    x = spec.to_view(source.to(dtype))
    rows = 1 if per_batch or not spec.training else samples
    rstd, var = get("rstd", rows, groups, 1, 1), get("running_var", 1, groups, 1, 1)
    results: dict[str, Tensor] = {}
    if rstd is not None:
        mean = get("mean", rows, groups, 1, 1)
        mean = torch.zeros_like(rstd) if mean is None else mean
        broken = torch.zeros_like(rstd, dtype=torch.bool)
    else:
        if not spec.training:
            mean = get("running_mean", 1, groups, 1, 1)
            assert mean is not None
            assert var is not None
        elif spec.family == "rms_norm":
            var = x.square().mean(axes, keepdim=True)
            mean = torch.zeros_like(var)
        else:
            mean = x.mean(axes, keepdim=True)
            if dtype == torch.float64 and x.numel():
                mean = mean + (x - mean).mean(axes, keepdim=True)
                least, most = x.amin(axes, keepdim=True), x.amax(axes, keepdim=True)
                mean = torch.where(least == most, least, mean)
            var = (x - mean).square().mean(axes, keepdim=True)
        rstd = (var + spec.eps).rsqrt()
        broken = ~rstd.isfinite() | ~var.isfinite() | (rstd == 0) | ~mean.isfinite()
        if spec.training:
            results |= running(spec, tensors, mean, var, dtype)
        if spec.family != "rms_norm":
            results["mean"] = mean.reshape(spec.statistics_shape if spec.training else (groups,))
        results["rstd"] = rstd.reshape(spec.statistics_shape if spec.training else (groups,))
    gamma, beta = parameter("weight", 1, 1.0), parameter("bias", 1, 0.0)
    factor, shift = 1.0 + modulation("scale"), modulation("shift")
    if not x.numel():  # a sum of no terms is 0, also where a parameter is NaN
        gamma, beta, factor = torch.ones_like(gamma), torch.zeros_like(beta), torch.ones_like(factor)
    A, B = gamma * factor, beta * factor + shift
    centred = x - mean if spec.family != "rms_norm" else x
    xhat = centred * rstd
    z = A * xhat + B if order == 0 else centred * (A * rstd) + B
    y = value(z, spec.activation, spec.parameter)
    results["output"] = spec.from_view(limits(z, y, spec.activation, spec.parameter, False) if exact else y)
    product = (mean * rstd).abs()
    product = product[product.isfinite()]
    offset = max(1.0, float(product.max())) if product.numel() else 1.0
    sizes: dict[str, Tensor] = {}
    # A mean is as exact as its largest terms let it be: to a unit of a standard deviation or, beyond that, of itself.
    near = xhat.abs() + (mean * rstd).abs().clamp(min=0.0 if spec.family == "rms_norm" else 1.0)
    reach = A.abs() * near + B.abs() if magnitudes else z
    if magnitudes:
        steep = derivative(z, spec.activation, spec.parameter).abs()
        sizes["output"] = spec.from_view(y.abs() + steep * reach)
        sizes["z"] = reach
    dy = tensors.get("grad_output")
    if dy is None:
        return Computed(results, z, mean, rstd, broken, offset, sizes)

    dy = spec.to_view(dy.to(dtype))
    slope = derivative(z, spec.activation, spec.parameter)
    if exact:
        slope = limits(z, slope, spec.activation, spec.parameter, True)
    if shown is not None and spec.activation in ("relu", "leaky_relu"):
        seen = spec.to_view(shown).to(dtype)
        # What the output's dtype rounded to zero does not show its side.
        info = torch.finfo(shown.dtype)
        hidden = (seen == 0) & (z.abs() <= info.smallest_normal * info.eps)
        slope = torch.where(hidden, slope, derivative(seen, spec.activation, spec.parameter))
    dz = dy * slope
    terms = dz * xhat
    p, q = dz.sum(3, keepdim=True), terms.sum(3, keepdim=True)
    inner = (0, 2) if per_batch else (2,)
    P, Q = (A * p).sum(inner, keepdim=True), (A * q).sum(inner, keepdim=True)
    if spec.family == "rms_norm":
        P = torch.zeros_like(P)
    count = max(1, spec.count)
    if not spec.training:
        dx = rstd * (A * dz) if order == 0 else (rstd * A) * dz
    elif order == 0:
        dx = rstd * (A * dz - (P + xhat * Q) / count)
    else:
        dx = (rstd * A) * dz - rstd * (P / count) - xhat * (rstd * (Q / count))
    results["grad_input"] = spec.from_view(dx)
    results |= parameter_gradients(spec, gamma, beta, factor, p, q)
    if magnitudes:
        size = dy.abs() * (1.0 if spec.activation is None else 1.0 + reach)
        rough_p, rough_q = rooted(size, 3), rooted(size * near, 3)
        if spec.activation is not None and x.numel():
            # Where all z of a sum are the same number, so is the rounding of their slopes, and it does not average out.
            alike = z.amax(3, keepdim=True) == z.amin(3, keepdim=True)
            common = dy.sum(3, keepdim=True).abs() * (1.0 + reach.amax(3, keepdim=True))
            rough_p = torch.where(alike, torch.maximum(rough_p, common), rough_p)
        total = rooted(A * rough_p, *inner) + near * rooted(A * rough_q, *inner)
        sizes["grad_input"] = spec.from_view(rstd * (A.abs() * size + (total if spec.training else 0.0)))
        sizes |= parameter_gradients(spec, gamma.abs(), beta.abs(), factor.abs(), rough_p, rough_q, rooted)
    return Computed(results, z, mean, rstd, broken, offset, sizes)


def rooted(tensor: Tensor, *axes: int) -> Tensor:
    """The size that independent errors of these terms have in their sum."""
    return tensor.square().sum(axes, keepdim=True).sqrt()


def total(tensor: Tensor, *axes: int) -> Tensor:
    return tensor.sum(axes, keepdim=True)


def parameter_gradients(
    spec: Spec, gamma: Tensor, beta: Tensor, factor: Tensor, p: Tensor, q: Tensor, summed: Callable[..., Tensor] = total
) -> dict[str, Tensor]:
    found = {
        "grad_weight": summed(factor * q, 0).reshape(spec.parameter_shape),
        "grad_bias": summed(factor * p, 0).reshape(spec.parameter_shape),
    }
    if spec.rows and not spec.per_position:
        return found

    def of_samples(gradient: Tensor) -> Tensor:
        if not spec.per_position:
            return gradient.reshape(spec.modulation_shape)
        samples, channels = spec.modulation_shape
        return summed(gradient.reshape(samples, spec.positions, channels), 1).reshape(spec.modulation_shape)

    return found | {"grad_scale": of_samples(gamma * q + beta * p), "grad_shift": of_samples(p)}


def running(spec: Spec, tensors: Tensors, mean: Tensor, var: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The running statistics after a call in training, with ``momentum`` as a tensor of one element."""
    before, momentum = tensors.get("running_mean"), tensors.get("momentum")
    if before is None or momentum is None or spec.count < 2 or not prod(spec.shape):
        return {}
    variance = tensors["running_var"]
    assert variance is not None
    share = float(momentum)
    unbiased = var * (spec.count / (spec.count - 1))
    means, variances = (one.mean(0).reshape(-1) for one in (mean, unbiased))
    return {
        "running_mean": (1 - share) * before.to(dtype) + share * means,
        "running_var": (1 - share) * variance.to(dtype) + share * variances,
    }


def near_a_kink(spec: Spec, expected: Computed, dtype: torch.dtype) -> Tensor:
    """The elements of the view whose z may fall on either side of a kink, or vanish in the output's dtype."""
    reach = expected.magnitudes["z"]
    unit = 2e-15 if dtype == torch.float64 else 4e-6
    close = torch.zeros_like(expected.z, dtype=torch.bool)
    for kink in KINKS.get(spec.activation or "", ()):
        close |= (expected.z - kink).abs() <= unit * (reach + abs(kink))
    return close


def vanishing(spec: Spec, expected: Computed, dtype: torch.dtype) -> Tensor:
    """The elements of the view that the output's dtype may round to zero."""
    return (expected.z != 0) & (expected.z.abs() <= 4 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
