"""What instance.py promises of every plan, as checks that any instance on any device can be put through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fusednorm import dispatch
from fusednorm.backends import reference
from fusednorm.choice import instances
from fusednorm.dtypes import compute_dtype
from fusednorm.norm import Norm, norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problems import backward_direction, backward_problem, forward_problem

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EVERYTHING = (True, True, True, True, True)
#: Instances that have no backward, and those that always make grad_input.
FORWARD_ONLY, NO_GAMMA_BETA = (
    ("triton.whole", "triton.flat", "hopper.slabs"),
    ("hopper.resident", "hopper.columns", "hopper.rows", "hopper.row_parts"),
)
PARAMETERS = ("weight", "bias", "scale", "shift")
#: Relative to the largest value: a rounding to the dtype, and what the sums before it lose.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Subject:
    """An instance, a norm that it runs, and the memory that it runs it in; the instance of the forward where it runs
    the backward alone."""

    instance: str
    norm: Norm
    shape: tuple[int, ...]
    last: bool = False
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    modulated: bool = True
    forward: str = ""

    @property
    def evaluates(self) -> bool:
        """Whether the instance takes given statistics: those that hold units in one place until their output do not."""
        return self.norm.per_batch and self.modulated and self.instance != "triton.held"


SUBJECTS = (
    Subject("cpu.planes", norm_of("group_norm", 4, eps=1e-3), (3, 8, 5, 7)),
    Subject("cpu.planes", norm_of("instance_norm", eps=1e-3), (3, 19, 5, 7)),
    Subject("cpu.planes_split", norm_of("batch_norm", eps=1e-3), (3, 8, 5, 7)),
    Subject("cpu.slabs", norm_of("group_norm", 4, eps=1e-3), (3, 8, 5, 7), last=True),
    Subject("cpu.planes", norm_of("group_norm", 1, eps=1e-3), (17, 2, 3)),
    Subject("cpu.slabs", norm_of("group_norm", 1, eps=1e-3), (17, 8, 5, 7), last=True, modulated=False),
    Subject("cpu.slabs", norm_of("batch_norm", eps=1e-3), (3, 8, 5, 7), modulated=False),
    Subject("cpu.slabs_split", norm_of("batch_norm", eps=1e-3), (3, 8, 5, 7), last=True),
    Subject("cpu.rows", norm_of("layer_norm", 1, eps=1e-3), (9, 24)),
    Subject("cpu.columns", norm_of("layer_norm", 0, eps=1e-3), (3, 8, 5, 7)),
    Subject("cpu.columns", norm_of("rms_norm", 0, eps=1e-3), (3, 8, 5, 7), modulated=False),
    Subject("cpu.rows", norm_of("layer_norm", 0, eps=1e-3), (3, 8, 5, 7), last=True, modulated=False),
    Subject("cpu.rows", norm_of("layer_norm", 1, eps=1e-3), (3, 8200)),
    Subject("cpu.rows", norm_of("layer_norm", 0, eps=1e-3), (3, 8, 5, 7), last=True),
    Subject("triton.tiles", norm_of("group_norm", 4, eps=1e-3), (3, 8, 5, 7)),
    Subject("triton.tiles", norm_of("batch_norm", eps=1e-3), (3, 8, 5, 7), last=True),
    Subject("triton.whole", norm_of("group_norm", 4, eps=1e-3), (3, 8, 5, 7)),
    Subject("triton.held", norm_of("group_norm", 4, eps=1e-3), (3, 8, 5, 7)),
    Subject("triton.held", norm_of("instance_norm", eps=1e-3), (3, 8, 5, 7), last=True),
    Subject("triton.held", norm_of("batch_norm", eps=1e-3), (3, 8, 5, 7), modulated=False),
    Subject("triton.held", norm_of("batch_norm", eps=1e-3), (3, 8, 5, 7), last=True),
    Subject("triton.rows", norm_of("instance_norm", eps=1e-3), (3, 8, 5, 7)),
    Subject("triton.rows", norm_of("layer_norm", 1, eps=1e-3), (9, 24)),
    Subject("triton.rows", norm_of("rms_norm", 1, eps=1e-3), (9, 24)),
    Subject("triton.rows", norm_of("layer_norm", 0, eps=1e-3), (3, 8, 5, 7), last=True),
    Subject("triton.columns", norm_of("layer_norm", 0, eps=1e-3), (3, 8, 5, 7)),
    Subject("triton.columns", norm_of("rms_norm", 0, eps=1e-3), (3, 8, 5, 7), modulated=False),
    Subject("triton.flat", norm_of("batch_norm", eps=1e-3, training=False), (3, 8, 5, 7)),
    Subject("triton.flat", norm_of("batch_norm", eps=1e-3, training=False), (3, 8, 5, 7), last=True),
    Subject("hopper.resident", norm_of("group_norm", 4, eps=1e-3), (3, 8, 64, 64)),
    Subject("hopper.resident", norm_of("batch_norm", eps=1e-3), (3, 8, 5, 8), modulated=False),
    Subject("hopper.resident", norm_of("group_norm", 4, eps=1e-3), (3, 8, 37, 53), forward="triton.tiles"),
    Subject("hopper.resident", norm_of("batch_norm", eps=1e-3), (3, 8, 3, 7), modulated=False, forward="triton.tiles"),
    Subject("hopper.slabs", norm_of("group_norm", 4, eps=1e-3), (3, 32, 5, 7), last=True),
    Subject("hopper.columns", norm_of("layer_norm", 0, eps=1e-3), (3, 8, 5, 8)),
    Subject("hopper.columns", norm_of("rms_norm", 0, eps=1e-3), (3, 8, 5, 8), modulated=False),
    Subject("hopper.rows", norm_of("layer_norm", 1, eps=1e-3), (9, 24), forward="triton.rows"),
    Subject("hopper.rows", norm_of("rms_norm", 1, eps=1e-3), (9, 24), forward="triton.rows"),
    Subject("hopper.row_parts", norm_of("layer_norm", 1, eps=1e-3), (9, 43), forward="triton.rows"),
    Subject("hopper.row_parts", norm_of("rms_norm", 1, eps=1e-3), (9, 43), forward="triton.rows"),
    Subject("reference", norm_of("instance_norm", eps=1e-3), (3, 8, 5, 7)),
)


def _placed(values: Tensor, dtype: torch.dtype, device: str, last: bool = False, unaligned: bool = False) -> Tensor:
    """The values in memory of their own, which starts one element after an aligned address if so asked."""
    values = values.to(dtype)
    if last:
        values = values.contiguous(memory_format=torch.channels_last)
    block = torch.empty(values.numel() + 1, dtype=dtype, device=device)
    placed = block[int(unaligned) :][: values.numel()].as_strided(values.shape, values.stride(), int(unaligned))
    return placed.copy_(values)


def _operands(subject: Subject, dtypes: dict[str, torch.dtype] | None = None, unaligned: str = "") -> Operands:
    """A forward's operands, scale and shift too where the family and the instance take them; one of them unaligned."""
    generator, norm, shape = torch.Generator().manual_seed(7), subject.norm, subject.shape
    channels = shape[-1] if norm.row_family else shape[1]
    sizes = {"input": shape, "weight": (channels,), "bias": (channels,)}
    if not norm.row_family and subject.modulated:
        sizes |= {"scale": shape[:2], "shift": shape[:2]}
    if not norm.training:
        sizes |= {"mean": (channels,), "var": (channels,)}
    if not norm.has_mean:
        del sizes["bias"]
    given = {}
    for name, size in sizes.items():
        values = torch.randn(size, generator=generator, dtype=torch.float64) * (1.0 if name == "input" else 0.3)
        dtype = (dtypes or {}).get(name, subject.dtype)
        last = subject.last and name == "input"
        values = values.square() + 0.5 if name == "var" else values + (name == "weight")
        given[name] = _placed(values, dtype, subject.device, last, name == unaligned)
    return Operands(**given)


def _backward_operands(
    subject: Subject, forward: Operands, dtypes: dict[str, torch.dtype] | None = None, unaligned: str = ""
) -> BackwardOperands:
    """The operands of the backward, with mean and rstd from float64."""
    norm, generator = subject.norm, torch.Generator().manual_seed(8)
    exact = reference.forward(norm, _wide(forward), compute_dtype=torch.float64)
    given: dict[str, Any] = {name: getattr(forward, name) for name in ("input", *PARAMETERS)}
    values = {
        "grad_output": torch.randn(subject.shape, generator=generator, dtype=torch.float64),
        "mean": exact.mean,
        "rstd": exact.rstd,
    }
    for name, value in values.items():
        dtype = subject.dtype if name == "grad_output" else torch.float32
        dtype, last = (dtypes or {}).get(name, dtype), subject.last and name == "grad_output"
        given[name] = None if value is None else _placed(value, dtype, subject.device, last, name == unaligned)
    return BackwardOperands(**given)


def _wide(operands: Any) -> Any:
    """The same values in float64."""
    wide = {field.name: getattr(operands, field.name) for field in fields(operands)}
    return replace(operands, **{name: value if value is None else value.double() for name, value in wide.items()})


def _plan(subject: Subject, operands: Any, wanted: Any = EVERYTHING) -> Any:
    """The instance's plan; None for a direction that it does not run."""
    if isinstance(operands, Operands):
        return dispatch.make_plan(forward_problem(subject.norm, operands), subject.forward or subject.instance)
    if subject.instance in FORWARD_ONLY:
        return None
    direction = backward_direction(wanted)
    if subject.instance in NO_GAMMA_BETA and direction == "backward_gamma_beta":
        return None
    problem = backward_problem(subject.norm, operands, direction)
    return dispatch.make_plan(problem, subject.instance)


def _compare(
    what: str, found: Tensor | None, exact: Tensor | None, dtype: torch.dtype, compute: torch.dtype
) -> Iterator[str]:
    """Faults of a result: it is there, of this dtype, and as right as the compute dtype allows."""
    if exact is None:
        return
    if found is None:
        yield f"{what} is missing"
    elif found.dtype != dtype:
        yield f"{what} is {found.dtype}, not {dtype}"
    else:
        error = (found.double() - exact).abs().max() / exact.abs().max()
        if not error <= max(TOLERANCE[dtype], TOLERANCE[compute]):
            yield f"{what} is off by {error:.1e}"


def _check_forward(subject: Subject, operands: Operands, what: str, **options: Any) -> Iterator[str]:
    found = _plan(subject, operands)(operands, **options)
    exact = reference.forward(subject.norm, _wide(operands), compute_dtype=torch.float64)
    compute = compute_dtype(subject.dtype)
    yield from _compare(f"{what}: output", found.output, exact.output, subject.dtype, compute)
    if options.get("statistics", True):
        for name in ("mean", "rstd", "var"):
            yield from _compare(f"{what}: {name}", getattr(found, name), getattr(exact, name), compute, compute)


def _check_backward(
    subject: Subject, operands: BackwardOperands, what: str, wanted: Any = EVERYTHING, **options: Any
) -> Iterator[str]:
    plan = _plan(subject, operands, wanted)
    if plan is None:
        return
    found = plan(operands, wanted, **options)
    exact = reference.backward(subject.norm, _wide(operands), compute_dtype=torch.float64)
    for name, want in zip(("input", *PARAMETERS), wanted, strict=True):
        operand = getattr(operands, name)
        if operand is not None and want:
            gradients = getattr(found, name), getattr(exact, name)
            yield from _compare(f"{what}: gradient of {name}", *gradients, operand.dtype, compute_dtype(subject.dtype))


def dtypes_of_parameters(subject: Subject) -> Iterator[str]:
    """Each parameter in each dtype, beside others in other dtypes."""
    for turn in range(len(DTYPES)):
        dtypes = {name: DTYPES[(turn + place) % len(DTYPES)] for place, name in enumerate(PARAMETERS)}
        operands = _operands(subject, dtypes)
        yield from _check_forward(subject, operands, f"parameters {dtypes}")
        yield from _check_backward(subject, _backward_operands(subject, operands), f"parameters {dtypes}")


def dtypes_of_statistics(subject: Subject) -> Iterator[str]:
    """mean and rstd of a backward, mean and var that a forward is given, in any dtype."""
    for turn in range(len(DTYPES)):
        dtypes = {"mean": DTYPES[turn], "rstd": DTYPES[(turn + 1) % len(DTYPES)]}
        operands = _backward_operands(subject, _operands(subject), dtypes)
        yield from _check_backward(subject, operands, f"statistics {dtypes}")
        norm = subject.norm
        evaluation = norm_of(norm.family, norm.num_groups or norm.num_dims, norm.channel_dim, norm.eps, training=False)
        given = _operands(subject)
        problem = forward_problem(evaluation, given)
        if any(one.instance.name == subject.instance and one.reason is None for one in instances(problem)):
            mean = torch.randn(
                problem.statistics_shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
            )
            given.mean = _placed(mean, dtypes["mean"], subject.device)
            given.var = _placed(mean.square() + 0.5, dtypes["rstd"], subject.device)
            alone = replace(subject, norm=evaluation)
            yield from _check_forward(alone, given, f"given statistics {dtypes}")
            yield from _check_forward(alone, given, f"given statistics {dtypes}, unkept", statistics=False)


def unaligned_addresses(subject: Subject) -> Iterator[str]:
    """Each operand one element after an aligned address, after a call with all of them aligned."""
    for name in ("", "input", *PARAMETERS):
        yield from _check_forward(subject, _operands(subject, unaligned=name), f"{name or 'nothing'} unaligned")
    for name in ("", "grad_output", "input", "mean", "rstd", *PARAMETERS):
        forward = _operands(subject, unaligned=name)
        yield from _check_backward(subject, _backward_operands(subject, forward, unaligned=name), f"{name} unaligned")


def wanted_or_not(subject: Subject) -> Iterator[str]:
    """Each result asked for alone, and left out alone; statistics wanted and not."""
    forward = _operands(subject)
    for statistics in (True, False):
        yield from _check_forward(subject, forward, f"statistics {statistics}", statistics=statistics)
    operands = _backward_operands(subject, forward)
    for place in range(5):
        alone = tuple(other == place for other in range(5))
        without = tuple(other != place for other in range(5))
        for wanted in (alone, without):
            yield from _check_backward(subject, operands, f"wanted {wanted}", wanted)


def memory_of_the_caller(subject: Subject) -> Iterator[str]:
    """out, mean_out and rstd_out receive the results, and nothing else is written."""
    operands = _operands(subject)
    plan = _plan(subject, operands)
    right = plan(operands)
    nan = float("nan")
    for statistics in (True, False):
        out, rstd_out = torch.full_like(right.output, nan), torch.full_like(right.rstd, nan)
        mean_out = None if right.mean is None else torch.full_like(right.mean, nan)
        found = plan(operands, statistics, out, mean_out, rstd_out)
        for name, given in (("output", out), ("mean", mean_out), ("rstd", rstd_out)):
            if given is None:
                continue
            if getattr(found, name).data_ptr() != given.data_ptr():
                yield f"{name} is not in the memory that was given, statistics {statistics}"
            if not torch.equal(given, getattr(right, name)):
                yield f"{name} in the memory that was given differs, statistics {statistics}"
    backward = _backward_operands(subject, operands)
    plan = _plan(subject, backward)
    if plan is None:
        return
    right, out = plan(backward, EVERYTHING), torch.full_like(backward.input, nan)
    found = plan(backward, EVERYTHING, out)
    if found.input is None or found.input.data_ptr() != out.data_ptr() or not torch.equal(out, right.input):
        yield "grad_input is not what it should be in the memory that was given"


def strided_operands(subject: Subject) -> Iterator[str]:
    """Each operand but the input and grad_output with a gap behind each element."""

    def spread(tensor: Tensor) -> Tensor:
        return torch.stack((tensor, torch.full_like(tensor, float("nan"))), -1)[..., 0]

    for name in PARAMETERS:
        operands = _operands(subject)
        if getattr(operands, name) is not None:
            backward = _backward_operands(subject, operands)
            for each in (operands, backward):
                setattr(each, name, spread(getattr(each, name)))
            yield from _check_forward(subject, operands, f"{name} with gaps")
            yield from _check_backward(subject, backward, f"{name} with gaps")
    for name in ("mean", "rstd"):
        backward = _backward_operands(subject, _operands(subject))
        if getattr(backward, name) is not None:
            setattr(backward, name, spread(getattr(backward, name)))
            yield from _check_backward(subject, backward, f"{name} with gaps")
    norm = subject.norm
    alone = replace(subject, norm=norm_of(norm.family, 0, norm.channel_dim, norm.eps, training=False))
    if subject.evaluates:
        for name in ("mean", "var"):
            given = _operands(subject)
            given.mean, given.var = (torch.rand(subject.shape[1]).add(0.5).to(subject.device) for _ in range(2))
            setattr(given, name, spread(getattr(given, name)))
            yield from _check_forward(alone, given, f"given {name} with gaps")


def one_statistic_of_the_caller(subject: Subject) -> Iterator[str]:
    """mean_out without rstd_out, and rstd_out without mean_out, where nobody wants statistics."""
    operands = _operands(subject)
    plan = _plan(subject, operands)
    right = plan(operands)
    for name in ("mean", "rstd"):
        if getattr(right, name) is not None:
            out = torch.full_like(getattr(right, name), float("nan"))
            plan(operands, False, **{f"{name}_out": out})
            if not torch.equal(out, getattr(right, name)):
                yield f"{name} in the memory that was given alone differs"


def another_eps(subject: Subject) -> Iterator[str]:
    """eps is the norm's own: one value after another, each by its own plan."""
    norm, operands = subject.norm, _operands(subject)
    dims = norm.num_groups or norm.num_dims
    for eps in (0.5, 1e-5, 2.0, 0.5):
        changed = replace(subject, norm=norm_of(norm.family, dims, norm.channel_dim, eps, training=norm.training))
        yield from _check_forward(changed, operands, f"eps {eps}")


def nothing_to_normalize(subject: Subject) -> Iterator[str]:
    """Each size 0 in turn, and long rows: an output of the input's shape, given statistics, and gradients of 0."""
    shapes = [tuple(0 if axis == place else size for axis, size in enumerate(subject.shape)) for place in range(2)]
    if subject.norm.row_family:
        shapes.append((0, 20000))
    else:
        shapes.append((*subject.shape[:-1], 0))
    for shape in shapes:
        empty = replace(subject, shape=shape)
        operands = _operands(empty)
        problem = forward_problem(empty.norm, operands)
        if not any(one.instance.name == subject.instance and one.reason is None for one in instances(problem)):
            continue
        found = _plan(empty, operands)(operands)
        if found.output.shape != shape:
            yield f"an output of {tuple(found.output.shape)} from {shape}"
        backward = BackwardOperands(
            operands.input, operands.input, found.mean, found.rstd, operands.weight, operands.bias, operands.scale
        )
        plan = _plan(empty, backward)
        if plan is not None:
            gradients = plan(backward, EVERYTHING)
            for name in ("weight", "bias", "scale"):
                gradient = getattr(gradients, name)
                if gradient is not None and gradient.count_nonzero():
                    yield f"a gradient of {name} from {shape}"
        if not subject.evaluates:
            continue
        given = _operands(empty)
        given.mean, given.var = torch.full((shape[1],), 3.0), torch.full((shape[1],), 4.0)
        given.mean, given.var = given.mean.to(subject.device), given.var.to(subject.device)
        alone = replace(empty, norm=norm_of("batch_norm", eps=0.0, training=False))
        kept = _plan(alone, given)(given)
        if not bool((kept.mean == 3.0).all() and (kept.rstd == 0.5).all()):
            yield f"other statistics than those given from {shape}"
        for name, right in (("mean", kept.mean), ("rstd", kept.rstd)):
            out = torch.full_like(right, float("nan"))
            _plan(alone, given)(given, False, **{f"{name}_out": out})
            if not torch.equal(out, right):
                yield f"{name} in the memory that was given alone differs from {shape}"


def another_device(subject: Subject) -> Iterator[str]:
    """The tensors lie on the device after the current one."""
    other = replace(subject, device="cuda:1")
    with torch.cuda.device(0):
        operands = _operands(other)
        yield from _check_forward(other, operands, "another device")
        yield from _check_backward(other, _backward_operands(other, operands), "another device")


CHECKS: tuple[Callable[[Subject], Iterator[str]], ...] = (
    dtypes_of_parameters,
    dtypes_of_statistics,
    unaligned_addresses,
    wanted_or_not,
    memory_of_the_caller,
    one_statistic_of_the_caller,
    strided_operands,
    another_eps,
    nothing_to_normalize,
)


def faults(check: Callable[[Subject], Iterator[str]], subject: Subject) -> list[str]:
    return [f"{subject.instance}, {subject.norm.family}: {fault}" for fault in check(subject)]
