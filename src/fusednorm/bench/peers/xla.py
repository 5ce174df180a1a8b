"""JAX: the workload as flax writes it, jitted on the CPU; channels_last as NHWC-shaped arrays."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

# XLA's CPU client sizes its thread pool from NPROC, once, when it is first used.
os.environ.setdefault("NPROC", str(torch.get_num_threads()))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from fusednorm.activations import resolve
from fusednorm.bench.contenders import Prepared
from fusednorm.bench.judging import Asked, Results
from fusednorm.bench.peers.arrays import from_array_order, to_array_order, view_of_array
from fusednorm.bench.workloads import EPS, Inputs, Workload
from fusednorm.tolerance import PEER

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": lambda z: jax.nn.gelu(z, approximate=False),
    "gelu_tanh": lambda z: jax.nn.gelu(z, approximate=True),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "hardswish": jax.nn.hard_swish,
    "leaky_relu": jax.nn.leaky_relu,
}


def _norm(workload: Workload, given: tuple[Any, Any]) -> Callable[..., Any]:
    """The forward on arrays; statistics in fp32 from E[x²] - E[x]², which is flax's default and its fastest.

    ``given`` are the mean and variance of batch_norm in inference, both None otherwise.
    """
    view = view_of_array(workload)
    modulation = (workload.shape[0], *view.parameter[1:])
    activation = resolve(workload.activation)

    def mean_and_variance(values: Any) -> tuple[Any, Any]:
        if not workload.training:
            return given[0].reshape(view.parameter), given[1].reshape(view.parameter)
        mean = jnp.mean(values, view.axes, keepdims=True)
        square = jnp.mean(values * values, view.axes, keepdims=True)
        return mean, jnp.maximum(square - mean * mean, 0)

    def forward(x: Any, weight: Any, bias: Any, scale: Any, shift: Any) -> Any:
        values = x.reshape(view.shape).astype(jnp.float32)
        if workload.family == "rms_norm":
            z = values * jax.lax.rsqrt(jnp.mean(values * values, view.axes, keepdims=True) + EPS)
        else:
            mean, var = mean_and_variance(values)
            z = (values - mean) * jax.lax.rsqrt(var + EPS)
        z = z * weight.reshape(view.parameter).astype(jnp.float32)
        if bias is not None:
            z = z + bias.reshape(view.parameter).astype(jnp.float32)
        if scale is not None:
            z = z * (1 + scale.reshape(modulation).astype(jnp.float32)) + shift.reshape(modulation).astype(jnp.float32)
        if activation is not None:
            z = ACTIVATIONS[activation.name](z)
        return z.astype(x.dtype).reshape(x.shape)

    return forward


def _forward_backward(forward: Callable[..., Any]) -> Callable[..., Any]:
    def both(grad_output: Any, *leaves: Any) -> Any:
        output, pull_back = jax.vjp(forward, *leaves)
        return output, *pull_back(grad_output)

    return both


class Jax:
    """jax.jit on the CPU."""

    name = "jax"
    allowance = PEER

    def refusal(self, workload: Workload, asked: Asked) -> str | None:
        if asked == "backward":
            return "jax's backward includes its forward"
        if workload.dtype == "float64" and not jax.config.jax_enable_x64:
            return "jax computes in fp32 unless jax_enable_x64 is set"
        return None

    def prepare(self, workload: Workload, inputs: Inputs, asked: Asked) -> Prepared:
        def image(tensor: Tensor) -> Any:
            return jax.dlpack.from_dlpack(to_array_order(tensor, workload))

        *parameters, mean, var = [
            None if tensor is None else jax.dlpack.from_dlpack(tensor)
            for tensor in (inputs.weight, inputs.bias, inputs.scale, inputs.shift, inputs.mean, inputs.var)
        ]
        leaves = (image(inputs.input), *parameters)
        forward = _norm(workload, (mean, var))
        if asked == "forward":
            compiled = jax.jit(forward)
            return Prepared(
                lambda: compiled(*leaves).block_until_ready(),
                lambda result: {"output": from_array_order(from_dlpack(result), workload)},
            )
        both, grad_output = jax.jit(_forward_backward(forward)), image(inputs.grad_output)
        names = ("output", "grad_input", "grad_weight", "grad_bias", "grad_scale", "grad_shift")

        def results(values: Any) -> Results:
            found = {name: from_dlpack(value) for name, value in zip(names, values, strict=True) if value is not None}
            return found | {name: from_array_order(found[name], workload) for name in ("output", "grad_input")}

        return Prepared(lambda: jax.block_until_ready(both(grad_output, *leaves)), results)
