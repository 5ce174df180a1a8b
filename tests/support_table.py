"""The tables of docs/support.md, from the library's own answers: `python tests/support_table.py` writes them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import fusednorm
from fusednorm import choice
from fusednorm.activations import ALIASES, FORMULAS
from fusednorm.backends.cpu import instances as cpu
from fusednorm.backends.hopper import instances as hopper
from fusednorm.backends.triton import instances as triton
from fusednorm.dtypes import DTYPES
from fusednorm.inspection import ASKED, problem_of_call
from fusednorm.norm import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
IMAGES, TOKENS = (8, 256, 56, 56), (4096, 1024)
CHANNEL_FAMILIES = ("group_norm", "instance_norm", "batch_norm")


def calls() -> Iterator[tuple[str, str, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """A family, the shape, the memory order, and the call."""
    own: dict[str, tuple[Any, ...]] = {"group_norm": (32,), "instance_norm": (), "batch_norm": (None, None)}
    shape, statistics = ", ".join(map(str, IMAGES)), torch.empty(IMAGES[1])
    for family in FAMILIES:
        function = getattr(fusednorm, family)
        if family in ("layer_norm", "rms_norm"):
            tokens = torch.empty(TOKENS, device="meta")
            yield family, ", ".join(map(str, TOKENS)), "rows", function, (tokens, (TOKENS[1],)), {}
        for order, memory in (("contiguous", torch.contiguous_format), ("channels_last", torch.channels_last)):
            x = torch.empty(IMAGES, device="meta").to(memory_format=memory)
            if family in CHANNEL_FAMILIES:
                options = {"training": True} if family == "batch_norm" else {}
                yield family, shape, order, function, (x, *own[family]), options
            else:
                yield f"{family}, channel_dim=1", shape, order, function, (x, IMAGES[1:2]), {"channel_dim": 1}
            if family == "batch_norm":
                given = (x, statistics.to("meta"), statistics.to("meta"))
                yield "batch_norm, evaluation", shape, order, function, given, {}


def instance_table() -> Iterator[Sequence[str]]:
    yield "call", "input", "memory order", "direction", "on a CPU", "on a GPU"
    with ExitStack() as stack:
        for backend in (cpu, triton, hopper):  # as on a machine that has all
            stack.enter_context(patch.object(backend, "unavailable", lambda: None))
        for name, shape, order, function, arguments, options in calls():
            for direction in ASKED[:2]:
                problem = problem_of_call(function, *arguments, direction=direction, **options)
                cells = [able(replace(problem, device=device)) for device in ("cpu", "cuda")]
                yield f"`{name}`", f"({shape})", order, direction, *cells


def able(problem: Any) -> str:
    """The instances that can run a problem, the default first and in bold; the reference can run any."""
    default = choice.default(problem).name
    others = [one.instance.name for one in choice.instances(problem) if one.reason is None]
    return ", ".join([f"**{default}**", *(name for name in others if name not in (default, "reference"))])


def argument_table() -> Iterator[Sequence[str]]:
    yield "function", "fused arguments", "channels"
    for family in FAMILIES:
        parameters = inspect.signature(getattr(fusednorm, family)).parameters
        fused = [
            f"`{name}`"
            for name in ("activation", "scale", "shift", "pre_add", "pre_gate", "post_add", "out_dtype")
            if name in parameters
        ]
        channels = "`channel_dim` 1 or -1, by default 1"
        if parameters["channel_dim"].default == -1:
            channels = "the trailing dimensions, or dimension 1 by `channel_dim=1`"
        yield f"`{family}`", ", ".join(fused), channels


def activation_table() -> Iterator[Sequence[str]]:
    yield "activation", "parameter", "default"
    for name, formula in FORMULAS.items():
        names = [name, *(alias for alias, meant in ALIASES.items() if meant == name)]
        value = f"{formula.default:g}" if formula.parameter else ""
        yield ", ".join(f"`{each}`" for each in names), formula.parameter or "", value


def dtype_list() -> str:
    widest_first = sorted(DTYPES, key=lambda dtype: (-dtype.itemsize, str(dtype)))
    return ", ".join(f"`{str(dtype).removeprefix('torch.')}`" for dtype in widest_first)


def markdown(rows: Iterator[Sequence[str]]) -> str:
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, re.sub(r"[^|]+", " --- ", head), *body])


def renewed(text: str) -> str:
    """The page with its generated parts, between comments that name them, made anew."""
    parts = {
        "instances": markdown(instance_table()),
        "arguments": markdown(argument_table()),
        "activations": markdown(activation_table()),
        "dtypes": dtype_list(),
    }
    for name, part in parts.items():
        between = re.compile(f"(<!-- {name}:start -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
        text, times = between.subn(lambda found, part=part: f"{found[1]}{part}\n{found[2]}", text)
        assert times == 1, name
    return text


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
