"""A launch as a kernel of its own, for the code that torch's Inductor generates.

Inductor writes the source of a user's kernel, and of the functions that it calls, into the code that it generates. It
cannot write ours: they take functions as constants and named tuples as arguments, and some are made from formulas. So a
launch becomes an :class:`Entry`, a kernel of one line that calls ours with every number filled in, and whose source
imports it::

    def fusednorm_whole_forward(p_x, p_y, p_weight, p_bias, p_mean, p_rstd):
        whole.whole_forward(p_x, p_y, p_weight, p_bias, None, None, p_mean, ..., RMS=False, BLOCK_K=1024)

    from fusednorm.backends.triton.kernels import activations, whole

An entry takes addresses alone, so starting it costs the host little.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import triton.language as tl
from torch import Tensor
from triton import JITFunction

from fusednorm.backends.triton.kernels import activations
from fusednorm.backends.triton.launch import Launch
from fusednorm.private.inductor_names import COMPILED_WITH, ORIGIN, own_origin
from fusednorm.private.triton_names import FP_FUSION

_KERNELS = "fusednorm.backends.triton.kernels"
#: How the names of kernels begin in generated code, and so in a profile.
PREFIX = "fusednorm_"


#: The pointers that each kernel writes to, where they are given; ``apply`` also writes the statistics that it makes.
WRITES: dict[str, tuple[str, ...]] = {
    "moments_of_planes": ("p_partials",),
    "moments_of_rows": ("p_partials",),
    "finalize": ("p_mean", "p_rstd", "p_var"),
    "apply": ("p_y",),
    "points_apply": ("p_y",),
    "points_reduce": ("p_partials", "p_grad_scale", "p_grad_shift"),
    "points_gradients": ("p_dx",),
    "whole_forward": ("p_y", "p_mean", "p_rstd", "p_var"),
    "held_forward": ("p_y", "p_mean", "p_rstd", "p_var"),
    "rows_forward": ("p_y", "p_mean", "p_rstd", "p_var"),
    "flat_forward": ("p_y", "p_mean", "p_rstd"),
    "reduce": ("p_partials",),
    "fold": ("p_folded",),
    "combine": ("p_totals", "p_grad_weight", "p_grad_bias", "p_grad_scale", "p_grad_shift"),
    "gradients": ("p_dx", "p_grad_weight", "p_grad_bias", "p_grad_scale", "p_grad_shift"),
    "held_samples_backward": ("p_dx", "p_partials", "p_grad_scale", "p_grad_shift"),
    "held_backward": ("p_dx", "p_partials", "p_grad_weight", "p_grad_bias", "p_grad_scale", "p_grad_shift"),
    "plane_rows_backward": ("p_dx", "p_partials", "p_grad_weight", "p_grad_bias", "p_grad_scale", "p_grad_shift"),
    "rows_backward": ("p_dx", "p_partials", "p_grad_weight", "p_grad_bias"),
    "row_totals": ("p_totals",),
    "positions_forward": ("p_y", "p_mean", "p_rstd"),
    "positions_backward": ("p_dx", "p_partials", "p_grad_weight", "p_grad_bias"),
    "columns_backward": ("p_dx", "p_partials", "p_grad_weight", "p_grad_bias"),
    "whole_sum_forward": ("p_y", "p_mean", "p_rstd", "p_var", "p_total"),
    "held_sum_forward": ("p_y", "p_mean", "p_rstd", "p_var", "p_total"),
    "rows_sum_backward": ("p_dx", "p_grad_behind", "p_partials", "p_grad_weight", "p_grad_bias"),
    "rows_gated_backward": (
        "p_dx",
        "p_grad_behind",
        "p_grad_before",
        "p_gate_sums",
        "p_partials",
        "p_grad_weight",
        "p_grad_bias",
    ),
    "held_sum_backward": (
        "p_dx",
        "p_grad_behind",
        "p_partials",
        "p_grad_weight",
        "p_grad_bias",
        "p_grad_scale",
        "p_grad_shift",
    ),
    "sum_moments_of_planes": ("p_partials", "p_total"),
    "sum_moments_of_rows": ("p_partials", "p_total"),
    "sum_apply": ("p_y", "p_total"),
    "positions_sum_forward": ("p_y", "p_mean", "p_rstd", "p_total"),
    "positions_sum_backward": ("p_dx", "p_grad_behind", "p_partials", "p_grad_weight", "p_grad_bias"),
    "sum_reduce": ("p_grad_behind", "p_partials"),
    "pack_moments": ("p_packed",),
    "merge_ranks": ("p_mean", "p_rstd", "p_var", "p_count", "p_running_mean", "p_running_var", "p_counter"),
    "move_statistics": ("p_running_mean", "p_running_var", "p_counter"),
    "sum_ranks": ("p_sums", "p_means"),
    "pack_sums": ("p_packed",),
    "pack_group_moments": ("p_packed",),
    "pack_group_sums": ("p_packed",),
    "spread_groups": ("p_one_out", "p_other_out"),
    "row_moments": ("p_partials",),
    "row_results": ("p_y",),
    "row_sums": ("p_partials",),
    "row_gradients": ("p_dx", "p_partials", "p_grad_weight", "p_grad_bias"),
    "gradients_of_numbers": ("p_grad_numbers",),
    "sum_gradients": ("p_dx", "p_grad_behind", "p_grad_weight", "p_grad_bias", "p_grad_scale", "p_grad_shift"),
}
_STATISTICS = ("p_mean", "p_rstd", "p_var")


class Entry(JITFunction):
    """A kernel that calls one of ours. Its ``src``, which Inductor copies, imports what it calls.

    The function itself only reads and writes what ours does: Inductor compiles it twice for every launch to see that,
    and ours would take it 0.1 s each time.
    """

    def __init__(self, call: str, summary: str, module: str) -> None:
        digest = hashlib.sha256(f"{call}{summary}".encode()).hexdigest()  # the same in every process
        file, lines = f"<fusednorm {digest[:16]}>", summary.splitlines(keepends=True)
        linecache.cache[file] = (len(summary), None, lines, file)  # Triton asks for the source of a function
        scope: dict[str, Any] = {"tl": tl}
        exec(compile(summary, file, "exec"), scope)
        super().__init__(scope[summary.removeprefix("def ").partition("(")[0]])
        self.call, self.imports = call, f"activations, {module}"

    @property
    def src(self) -> str:
        return f"""{self.call}

from {_KERNELS} import {self.imports}
from {__name__} import as_written

as_written(globals())
"""


def as_written(module: dict[str, Any]) -> None:
    """Called at the end of a generated module: its kernel has products and sums fused where they are written so, and
    nowhere else, as :class:`~fusednorm.backends.triton.launch.Launch` has, and is started as Inductor's own are.

    Inductor passes on no option for either."""
    origin = own_origin()
    for found in list(module.values()):
        options = getattr(found, COMPILED_WITH, None)
        if isinstance(options, dict):
            options[FP_FUSION] = False
            if origin is not None and hasattr(found, ORIGIN):
                setattr(found, ORIGIN, origin)


@lru_cache(4096)
def _entry(call: str, summary: str, module: str) -> Entry:
    """One for equal launches, so that generated code has their kernel once."""
    return Entry(call, summary, module)


def written(launch: Launch, given: Collection[str]) -> list[str]:
    """Those of the given pointers that a launch writes to."""
    names: tuple[str, ...] = WRITES[launch.kernel.__name__]
    if launch.constants.get("MERGE") or "p_given_var" in given:
        names += _STATISTICS
    return [name for name in names if name in given]


def entry(launch: Launch, tensors: Sequence[Tensor | None]) -> tuple[Entry, dict[str, Tensor]]:
    """The entry of a launch, and its tensors by their names."""
    kernel = launch.kernel
    pointers = [parameter.name for parameter in kernel.params[: len(tensors)]]
    numbers = zip(kernel.params[len(tensors) :], launch.scalars, strict=False)
    given = {name: tensor for name, tensor in zip(pointers, tensors, strict=True) if tensor is not None}
    arguments = [
        *(name if name in given else "None" for name in pointers),
        *(_number(number, parameter) for parameter, number in numbers),
        *(f"{name}={_constant(value)}" for name, value in launch.constants.items()),
    ]
    head, module = f"def {PREFIX}{kernel.__name__}({', '.join(given)}):", kernel.__module__.removeprefix(f"{_KERNELS}.")
    stored = written(launch, given)
    accesses = [f"tl.store({name}, 0.0)" if name in stored else f"tl.load({name})" for name in given]
    call = f"{head}\n    {module}.{kernel.__name__}({', '.join(arguments)})\n"
    return _entry(call, "\n    ".join([head, *accesses]) + "\n", module), given


def _number(number: int | float, parameter: Any) -> str:
    """A number in the type that Triton gives to an argument; a 1 is a constant, unless the kernel wants none."""
    if isinstance(number, float):
        return f"tl.full((), {number!r}, tl.float64)"
    if number == 1 and not parameter.do_not_specialize:
        return "1"
    return f"tl.full((), {number}, tl.int{32 if -(2**31) <= number < 2**31 else 64})"


def _constant(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    return f"activations.{activations.name_of(value)}"
