"""A drawn case as tensors in memory, and the calls of fusednorm that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from random import Random
from typing import Any, TypeVar

import torch
from drawn_cases import Case, Operand, Placement, shows
from drawn_formulas import KINKS, Spec, compute, near_a_kink, vanishing
from drawn_judge import same_bits
from torch import Tensor

import fusednorm
from fusednorm import Activation, functional, nn, ops
from fusednorm.norm import norm_of

Results = dict[str, Tensor]
GRADIENTS = ("input", "weight", "bias", "scale", "shift")
T = TypeVar("T")


def values(operand: Operand, shape: Sequence[int], spec: Spec, unit_axes: bool) -> Tensor:
    """The operand's values in float64; ``unit_axes`` where it has the input's shape, whose units may differ."""
    generator = torch.Generator().manual_seed(operand.seed)
    draw = Random(operand.seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    shape = tuple(shape)
    form, made = operand.form, None
    per_unit = (1 if spec.family == "batch_norm" else spec.dims[0], spec.dims[1], 1, 1)
    if form in ("zeros", "ones"):
        made = torch.zeros(shape, dtype=torch.float64) + (form == "ones")
    elif form == "uniform":
        made = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
    elif form == "few":
        made = torch.randint(-2, 3, shape, generator=generator).double()
    elif form == "positive":
        made = normal(*shape).abs() + 0.1
    elif form == "tail":
        made = torch.full(shape, draw.choice([-30.0, -12.0, -6.0, 8.0, 40.0]), dtype=torch.float64) + normal(*shape)
    elif form == "trend":
        made = torch.linspace(-1, 1, max(1, prod(shape)), dtype=torch.float64)[: prod(shape)].reshape(shape)
    elif form == "largest":
        largest = torch.finfo(torch.float32 if operand.dtype == torch.float64 else operand.dtype).max
        return normal(*shape).sign() * largest * draw.choice([1.0, 0.5, 0.01])
    if made is None:
        made = normal(*shape)
    if unit_axes and form in ("units", "constant", "some_constant"):
        view = spec.to_view(made)
        if form == "units":
            view = view * 10.0 ** (normal(*per_unit) * 1.5) + normal(*per_unit)
        else:
            flat = normal(*per_unit).expand(spec.dims)
            keep = form == "some_constant"
            view = torch.where(torch.rand(per_unit, generator=generator) < 0.5, flat, view) if keep else flat
        made = spec.from_view(view)
    made = (made + operand.offset) * operand.scale
    if made.numel() and form in ("spike", "poison"):
        flat = made.reshape(-1).clone()
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(flat.numel())
            poison = draw.choice([float("nan"), float("inf"), -float("inf")])
            flat[at] = flat[at] * draw.choice([30.0, -1e3, 1e4]) if form == "spike" else poison
        made = flat.reshape(shape)
    return made


def place(made: Tensor, dtype: torch.dtype, placement: Placement, device: str) -> tuple[Tensor, Tensor]:
    """The values in a block of NaN, as (the tensor, the block)."""
    shape, rank = tuple(made.shape), made.dim()
    if rank == 0 or made.numel() == 0:
        return made.to(dtype).to(device), made.to(dtype)
    if placement.overlap:
        strides = placement.steps
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
        block = torch.full((placement.offset + reach + 8,), torch.nan, dtype=dtype)
        flat = made.reshape(-1).to(dtype)
        block[placement.offset : placement.offset + reach] = flat.repeat(-(-reach // flat.numel()))[:reach]
        block = block.to(device)
        return block.as_strided(shape, strides, placement.offset), block
    extents = [
        placement.before[axis] + (size - 1) * placement.steps[axis] + 1 + placement.after[axis]
        for axis, size in enumerate(shape)
    ]
    strides, stride = [0] * rank, 1
    for axis in reversed(placement.order):
        strides[axis] = stride
        stride *= extents[axis]
    start = placement.offset + sum(before * step for before, step in zip(placement.before, strides, strict=True))
    steps = [step * stride for step, stride in zip(placement.steps, strides, strict=True)]
    block = torch.full((placement.offset + stride + 8,), torch.nan, dtype=dtype)
    written = [1 if step == 0 else size for step, size in zip(placement.steps, shape, strict=True)]
    source = made[tuple(slice(0, size) for size in written)].to(dtype)
    block.as_strided(written, steps, start).copy_(source)
    block = block.to(device)
    return block.as_strided(shape, steps, start), block


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)


@dataclass
class Inputs:
    """The tensors of a call, and the blocks of memory that they lie in."""

    tensors: dict[str, Tensor | None]
    blocks: dict[str, Tensor]
    kept: dict[str, Tensor] = field(default_factory=dict)

    def remember(self) -> None:
        self.kept = {name: block.clone() for name, block in self.blocks.items()}

    def changed(self) -> list[str]:
        return [name for name, block in self.blocks.items() if not same_bits(block, self.kept[name])]


def shape_of(name: str, spec: Spec) -> tuple[int, ...]:
    if name in ("input", "grad_output"):
        return spec.shape
    if name in ("scale", "shift"):
        return spec.shape[0], spec.parameter_shape[0]
    if name in ("mean", "rstd") and spec.training:
        return spec.statistics_shape
    return spec.parameter_shape


def make(case: Case, operands: Mapping[str, Operand], spec: Spec, device: str) -> Inputs:
    """The operands as tensors; given statistics may be those that a forward saves."""
    inputs = Inputs({}, {})

    def put(name: str, made: Tensor) -> None:
        operand = operands[name]
        inputs.tensors[name], inputs.blocks[name] = place(made, operand.dtype, operand.placement, device)

    for name, operand in operands.items():
        if operand.form != "saved":
            put(name, values(operand, shape_of(name, spec), spec, name in ("input", "grad_output")))
    if any(operand.form == "saved" for operand in operands.values()):
        alone = {"input": inputs.tensors["input"]}
        saved = compute(replace(spec, training=True), alone, torch.float64).results
        for name, operand in operands.items():
            if operand.form == "saved":
                samples = saved[name]
                if samples.shape != shape_of(name, spec):  # instance_norm's, as constants of each channel
                    samples = samples.mean(0)
                put(name, samples.cpu())
    if spec.training and "running_mean" in operands:
        # As torch's modules take a momentum of None: the first of a cumulative average, and for instance_norm 0.
        unset = 1.0 if spec.family == "batch_norm" else 0.0
        momentum = unset if case.momentum is None else case.momentum
        inputs.tensors["momentum"] = torch.tensor(momentum, dtype=torch.float64)
    _clear_kinks(case, spec, inputs)
    inputs.remember()
    return inputs


def _clear_kinks(case: Case, spec: Spec, inputs: Inputs) -> None:
    """A gradient of 0 where a rounding of z would choose the side of a kink, unless the output shows which it was."""
    gradient = inputs.tensors.get("grad_output")
    if gradient is None or spec.activation not in KINKS or gradient.numel() == 0:
        return
    if any(stride == 0 and size > 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True)):
        return
    if case.operands["grad_output"].placement.shared:
        return
    without = {name: tensor for name, tensor in inputs.tensors.items() if name != "grad_output"}
    expected = compute(spec, without, torch.float64, magnitudes=True)
    clear = vanishing(spec, expected, gradient.dtype)
    if not shows(spec, gradient.dtype, case.entry):
        clear = clear | near_a_kink(spec, expected, gradient.dtype)
    gradient.masked_fill_(spec.from_view(clear), 0.0)


# --- the call ---


def activation_of(spec: Spec) -> Activation | str | None:
    if spec.activation is None:
        return None
    if spec.activation in ("silu", "leaky_relu"):
        return Activation(spec.activation, spec.parameter)
    return spec.activation


@contextmanager
def on_instance(name: str | None) -> Iterator[None]:
    with nullcontext() if name is None else fusednorm.use_instance(name):
        yield


def on_first_able(names: Sequence[str], run: Callable[[], T]) -> T:
    """What ``run`` gives on the first of the instances that takes the problem, or on the default one."""
    for name in names:
        try:
            with on_instance(name):
                return run()
        except RuntimeError as error:
            if "cannot run this problem" not in str(error):
                raise
    return run()


def forward_arguments(spec: Spec, tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    arguments: dict[str, Any] = {"weight": tensors.get("weight"), "eps": spec.eps, "activation": activation_of(spec)}
    if spec.family != "rms_norm":
        arguments["bias"] = tensors.get("bias")
    if spec.per_position or not spec.rows:
        arguments["channel_dim"] = spec.channel_dim
    for name in ("scale", "shift"):
        if tensors.get(name) is not None:
            arguments[name] = tensors[name]
    return arguments


def call_functional(case: Case, spec: Spec, tensors: Mapping[str, Tensor | None]) -> Tensor:
    arguments, x = forward_arguments(spec, tensors), tensors["input"]
    momentum = 0.1 if case.momentum is None else case.momentum
    running = (tensors.get("running_mean"), tensors.get("running_var"))
    if spec.rows:
        function = getattr(functional, spec.family)
        return function(x, spec.parameter_shape, **arguments)
    if spec.family == "group_norm":
        return functional.group_norm(x, spec.groups, **arguments)
    if spec.family == "instance_norm":
        return functional.instance_norm(x, *running, use_input_stats=spec.training, momentum=momentum, **arguments)
    return functional.batch_norm(x, *running, training=spec.training, momentum=momentum, **arguments)


def call_module(case: Case, spec: Spec, tensors: Mapping[str, Tensor | None]) -> Tensor:
    channels = spec.parameter_shape[0]
    keywords: dict[str, Any] = {"eps": spec.eps, "activation": activation_of(spec)}
    affine, tracked = tensors.get("weight") is not None, tensors.get("running_mean") is not None
    module: Any
    if spec.per_position:
        keywords["channel_dim"] = spec.channel_dim
    if spec.family == "layer_norm":
        module = nn.LayerNorm(spec.parameter_shape, elementwise_affine=affine, **keywords)
    elif spec.family == "rms_norm":
        module = nn.RMSNorm(spec.parameter_shape, elementwise_affine=affine, **keywords)
    elif spec.family == "group_norm":
        module = nn.GroupNorm(spec.groups, channels, affine=affine, channel_dim=spec.channel_dim, **keywords)
    else:
        name = "BatchNorm" if spec.family == "batch_norm" else "InstanceNorm"
        made = getattr(nn, f"{name}{max(1, len(spec.shape) - 2)}d")
        module = made(
            channels, affine=affine, track_running_stats=tracked, momentum=case.momentum, channel_dim=spec.channel_dim,
            **keywords,
        )  # fmt: skip
        if tracked:
            module.running_mean, module.running_var = tensors["running_mean"], tensors["running_var"]
    for name in ("weight", "bias"):
        if affine and (name != "bias" or spec.family != "rms_norm"):
            del module._parameters[name]
            setattr(module, name, tensors[name])
    module.train(spec.training)
    parts = {name: tensors[name] for name in ("scale", "shift") if tensors.get(name) is not None}
    return module(tensors["input"], **parts)


def of_samples(spec: Spec, tensors: Mapping[str, Tensor | None]) -> bool:
    """Whether positions of samples have statistics of their own, and only the ops of all families take the call."""
    modulated = tensors.get("scale") is not None or tensors.get("shift") is not None
    return spec.per_position and (modulated or spec.channel_dim == -1)


def call_forward_op(case: Case, spec: Spec, tensors: Mapping[str, Tensor | None]) -> Results:
    arguments, x = forward_arguments(spec, tensors), tensors["input"]
    eps = arguments.pop("eps")
    weight, bias = arguments.pop("weight"), arguments.pop("bias", None)
    if of_samples(spec, tensors):
        name, parameter = norm_of("group_norm", activation=activation_of(spec)).op_arguments[-2:]
        modulation = tensors.get("scale"), tensors.get("shift")
        call = (None, None, spec.family, 0, spec.channel_dim, eps, name, parameter)
        output, mean, rstd, _ = ops.norm_forward(x, weight, bias, *modulation, *call)
        return {"output": output, "rstd": rstd} | ({} if spec.family == "rms_norm" else {"mean": mean})
    if spec.family == "rms_norm":
        output, rstd = ops.rms_norm_forward(x, spec.parameter_shape, weight, eps, **arguments)
        return {"output": output, "rstd": rstd}
    if spec.family == "layer_norm":
        found = ops.layer_norm_forward(x, spec.parameter_shape, weight, bias, eps, **arguments)
    elif spec.family == "group_norm":
        found = ops.group_norm_forward(x, spec.groups, weight, bias, eps, **arguments)
    elif not spec.training:
        running = (tensors["running_mean"], tensors["running_var"])
        return {"output": ops.batch_norm_inference(x, *running, weight, bias, eps, **arguments)}
    elif spec.family == "instance_norm":
        found = ops.instance_norm_forward(x, weight, bias, eps, **arguments)
    else:
        running = (tensors.get("running_mean"), tensors.get("running_var"))
        momentum = 0.1 if case.momentum is None else case.momentum
        found = ops.batch_norm_training(x, weight, bias, *running, momentum, eps, **arguments)
    return dict(zip(("output", "mean", "rstd"), found, strict=True))


def call_backward_op(case: Case, spec: Spec, tensors: Mapping[str, Tensor | None]) -> Results:
    dy, x, mean, rstd = (tensors.get(name) for name in ("grad_output", "input", "mean", "rstd"))
    parameters = [tensors.get(name) for name in GRADIENTS[1:]]
    weight, bias, scale, shift = parameters
    names = [f"grad_{name}" for name in GRADIENTS]
    if case.form == "norm_backward" or of_samples(spec, tensors):
        name, parameter = norm_of("group_norm", activation=activation_of(spec)).op_arguments[-2:]
        mask = tuple(one in case.wanted for one in GRADIENTS)
        given = rstd.new_empty(0) if mean is None else mean
        family = "batch_norm" if spec.family == "instance_norm" and not spec.training else spec.family
        found: Sequence[Tensor | None] = ops.norm_backward(
            dy, x, given, rstd, *parameters, family, spec.groups, spec.channel_dim, name, parameter, spec.training, mask
        )
        present = {f"grad_{one}" for one in case.wanted}
        return {name: one for name, one in zip(names, found, strict=True) if name in present}
    statistics = (rstd,) if spec.family == "rms_norm" else (mean, rstd)
    shape: tuple[Any, ...] = ()
    if spec.rows:
        shape = (spec.parameter_shape,)
    elif spec.family == "group_norm":
        shape = (spec.groups,)
    affine = (weight,) if spec.family == "rms_norm" else (weight, bias)
    keywords: dict[str, Any] = {"activation": activation_of(spec)}
    if spec.per_position:
        keywords["channel_dim"] = 1
    elif not spec.rows:
        keywords |= {"channel_dim": spec.channel_dim, "scale": scale, "shift": shift}
    if spec.family == "batch_norm":
        keywords["training"] = spec.training
    found = getattr(ops, f"{spec.family}_{case.form}")(dy, x, *statistics, *shape, *affine, **keywords)
    found = (found,) if isinstance(found, Tensor) or found is None else found
    start = 1 if case.form == "backward_gamma_beta" else 0
    return {name: one for name, one in zip(names[start:], found, strict=False) if one is not None}


def call_autograd(case: Case, spec: Spec, tensors: Mapping[str, Tensor | None]) -> Results:
    leaves = {
        name: tensors[name].detach().requires_grad_(name in case.wanted)
        for name in GRADIENTS
        if tensors.get(name) is not None
    }
    wanted = [name for name in leaves if leaves[name].requires_grad]
    entered = call_module if case.entry == "module" else call_functional
    output = on_first_able(case.instances, lambda: entered(case, spec, {**tensors, **leaves}))

    def gradients() -> Sequence[Tensor]:
        found: Sequence[Tensor] = torch.autograd.grad(
            output, [leaves[name] for name in wanted], tensors["grad_output"], retain_graph=True
        )
        return found

    found = on_first_able(case.instances[::-1], gradients) if wanted else ()
    return {"output": output.detach()} | {f"grad_{name}": one for name, one in zip(wanted, found, strict=True)}


def call(case: Case, spec: Spec, inputs: Inputs) -> Results:
    """All that the case's call gives; running statistics are updated in copies."""
    tensors = dict(inputs.tensors)
    updated: Results = {}
    for name in ("running_mean", "running_var"):
        if (buffer := tensors.get(name)) is not None and spec.training:
            tensors[name] = updated[name] = torch.empty_like(buffer).copy_(buffer)
    if case.entry in ("autograd", "module"):
        results = call_autograd(case, spec, tensors)
    elif case.entry == "functional":
        results = {"output": on_first_able(case.instances, lambda: call_functional(case, spec, tensors))}
    elif case.entry == "ops_forward":
        results = on_first_able(case.instances, lambda: call_forward_op(case, spec, tensors))
    else:
        results = on_first_able(case.instances, lambda: call_backward_op(case, spec, tensors))
    return results | (updated if spec.count > 1 and prod(spec.shape) else {})
