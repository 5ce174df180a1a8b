"""The public functions against fp64 on this machine: every family, dtype, layout, direction and activation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import get_args

from fusednorm.activations import FORMULAS
from fusednorm.bench.contenders import FusedNorm
from fusednorm.bench.judging import Asked, Judge, worst
from fusednorm.bench.memory import is_out_of_memory, require
from fusednorm.bench.runner import first_line, workload_needs
from fusednorm.bench.tables import Table
from fusednorm.bench.workloads import Init, LayoutName, Workload, draw
from fusednorm.norm import FAMILIES, ROW_FAMILIES, Family
from fusednorm.problem import DTYPE_BYTES
from fusednorm.tolerance import Verdict

ACTIVATIONS: tuple[str | None, ...] = (None, *FORMULAS)
IMAGE_LAYOUTS: tuple[LayoutName, ...] = get_args(LayoutName)[:3]
# Centred, a mean of 1000 standard deviations, and |x| up to 1e4.
INITS: tuple[Init, ...] = ("normal", "offset", "large")
# Small, with odd sizes that leave a tail after every vector width, in ranks 3, 4 and 5.
_IMAGE_SHAPES: tuple[tuple[int, ...], ...] = ((2, 24, 37), (3, 16, 9, 11), (2, 64, 33, 17), (2, 8, 5, 6, 7))
_ROW_SHAPES: tuple[tuple[int, ...], ...] = ((37, 65), (3, 11, 256), (5, 4, 6, 30))


@dataclass(frozen=True)
class Check:
    """The verdicts on one workload under one kind of input; ``backward`` is None for inference."""

    workload: Workload
    init: Init
    forward: Verdict
    backward: Verdict | None

    @property
    def fault(self) -> str | None:
        return self.forward.fault or (self.backward.fault if self.backward else None)


def _workload(
    family: Family,
    index: int,
    dtype: str,
    layout: LayoutName,
    activation: str | None,
    modulated: bool,
    training: bool = True,
) -> Workload:
    # 16-bit activations beside fp32 weights are how mixed precision runs; every third case has them.
    weight_dtype = "float32" if index % 3 == 1 and DTYPE_BYTES[dtype] == 2 else None
    if family in ROW_FAMILIES:
        shape = _ROW_SHAPES[index % len(_ROW_SHAPES)]
        dims = 1 if modulated else max(1, len(shape) - 2)
        return Workload(family, shape, dims, dtype, "rows", activation, modulated, weight_dtype=weight_dtype)
    shape = _IMAGE_SHAPES[index % len(_IMAGE_SHAPES)]
    return Workload(family, shape, 4, dtype, layout, activation, modulated, training, weight_dtype)


def covering_workloads() -> Iterator[Workload]:
    """Each family with every dtype in every layout, and with every activation; half of the cases are modulated."""
    for family in FAMILIES:
        for index, (dtype, layout) in enumerate(product(DTYPE_BYTES, IMAGE_LAYOUTS)):
            yield _workload(family, index, dtype, layout, ACTIVATIONS[index % len(ACTIVATIONS)], index % 2 == 1)
    for index, dtype in enumerate(DTYPE_BYTES):
        yield _workload("batch_norm", index, dtype, IMAGE_LAYOUTS[index % 3], "silu", False, training=False)


def all_workloads() -> Iterator[Workload]:
    """The whole product of family, dtype, layout, activation and modulation."""
    for family in FAMILIES:
        rows = family in ROW_FAMILIES
        cases = product(
            DTYPE_BYTES,
            IMAGE_LAYOUTS[:1] if rows else IMAGE_LAYOUTS,
            ACTIVATIONS,
            (False, True),
            (True, False) if family == "batch_norm" else (True,),
        )
        for index, (dtype, layout, activation, modulated, training) in enumerate(cases):
            yield _workload(family, index, dtype, layout, activation, modulated, training)


def check(workload: Workload, init: Init, device: str = "cpu") -> Check:
    """Runs forward and backward through the public function and holds both against fp64."""
    asked: Asked = "forward_backward" if workload.training else "forward"
    require(workload_needs(workload, asked, 1, 1), device, workload.key, "free some")
    inputs = draw(workload, init, device=device)
    try:
        prepared = FusedNorm().prepare(workload, inputs, asked)
        verdicts = Judge(workload, inputs, asked).verdicts(prepared.results(prepared.call()))
    except Exception as error:  # Reported as a failed check, so that the table shows the others too.
        if is_out_of_memory(error):
            raise
        failed = Verdict(float("inf"), 0.0, 0.0, f"{type(error).__name__}: {first_line(error)}")
        return Check(workload, init, failed, None)
    forward = verdicts.pop("output")
    return Check(workload, init, forward, worst(verdicts.values()) if verdicts else None)


def _share(checks: Iterable[Verdict | None]) -> str:
    found = worst(verdict for verdict in checks if verdict is not None)
    return f"{found.error / found.allowed:.0%}" if found.allowed else "0%" if found.ok else "∞"


def _table(title: str, header: tuple[str, ...], groups: dict[tuple[str, ...], list[Check]]) -> Table:
    lines = []
    for group, members in groups.items():
        faults = [f"{one.workload.key}, {one.init}: {one.fault}" for one in members if one.fault]
        lines.append(
            (
                *group,
                str(len(members)),
                _share(one.forward for one in members),
                _share(one.backward for one in members),
                f"WRONG ({len(faults)}): {faults[0]}" if faults else "ok",
            )
        )
    columns = (*header, "checks", "forward", "backward", "result")
    return Table(title, columns, tuple(lines), (*header, "result"))


def check_tables(checks: Iterable[Check]) -> tuple[Table, Table]:
    """The worst error as a share of the allowed one, by dtype and layout and by activation, and the first fault."""
    by_layout: dict[tuple[str, ...], list[Check]] = {}
    by_activation: dict[tuple[str, ...], list[Check]] = {}
    for one in checks:
        workload = one.workload
        by_layout.setdefault((workload.family, workload.dtype, workload.layout), []).append(one)
        by_activation.setdefault((workload.family, workload.activation or "none"), []).append(one)
    return (
        _table("largest error / allowed error", ("family", "dtype", "layout"), by_layout),
        _table("the same checks by activation", ("family", "activation"), by_activation),
    )
