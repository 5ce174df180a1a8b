"""A short form of the drawn search (drawn.py), and that its judge and its runner notice what is wrong."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path

import drawn
import pytest
import torch
from cpu_support import activation_for
from drawn_calls import make
from drawn_cases import DEFAULTS, INSTANCES, Case, draw_case, short
from drawn_formulas import Spec, compute
from drawn_judge import Judge, same_bits

from fusednorm.norm import norm_of
from fusednorm.problem import layout_of

SEED = 9
CASES, AT_ONCE = 200, 20
MOST_ELEMENTS = 20_000
FULL = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def with_a_compiled_kernel(case: Case) -> Case:
    """The case on an instance of its memory order, with an activation that the other tests compile there as well."""
    spec, dtype = case.spec, FULL[short(case.dtype)]
    inputs = make(replace(case, extra={}), case.operands, replace(spec, activation=None), "cpu")
    tensor = inputs.tensors["input"]
    assert tensor is not None
    layout = layout_of(norm_of(spec.family, spec.groups, spec.channel_dim), spec.shape, tensor.stride())  # type: ignore[arg-type]
    last = layout is not None and layout.order == "channels_last"
    names = ["cpu.slabs", "cpu.slabs_split"] if last else ["cpu.planes", "cpu.planes_split"]
    names = ["cpu.rows"] if last and spec.dims[3] == 1 and spec.family != "batch_norm" else names
    names = ["cpu.rows" if last else "cpu.columns"] if spec.per_position else names
    name = names[case.index % len(names)]
    activation = (None, activation_for(name, dtype))[case.index // 2 % 2]
    parameter = DEFAULTS.get(activation or "", 0.0)
    return replace(case, spec=replace(spec, activation=activation, parameter=parameter), instances=(name,))


@pytest.mark.parametrize("start", range(0, CASES, AT_ONCE))
def test_drawn_cases_are_right(start: int) -> None:
    found = []
    for index in range(start, start + AT_ONCE):
        drawn_case = draw_case(SEED, index)
        if prod(drawn_case.spec.shape) > MOST_ELEMENTS:
            continue
        case = with_a_compiled_kernel(drawn_case)
        found += [f"{case.describe()}: {fault}" for fault in drawn.run_case(case, "cpu", Counter())]
    assert found == []


@pytest.mark.gpu
def test_drawn_cases_are_right_on_a_gpu() -> None:
    """Few geometries, since each compiles kernels, with many values, dtypes of operands and alignments."""
    found = []
    for index in drawn.indices(160, 0, 8, 0, 1):
        found += drawn.run_index(SEED, index, "cuda", 8, Counter())
    assert found == []


@pytest.mark.parametrize("index", range(6))
def test_a_case_is_a_function_of_its_index(index: int) -> None:
    first, second = draw_case(SEED, index), draw_case(SEED, index)
    assert first == second != draw_case(SEED + 1, index)
    made, again = (make(case, case.operands, case.spec, "cpu").blocks for case in (first, second))
    assert all(same_bits(made[name], again[name]) for name in made)


def judged() -> tuple[Judge, dict[str, torch.Tensor]]:
    """A judge of a plain case, and the results that it must accept."""
    spec = Spec("group_norm", (2, 6, 5), 3, 1, True, 1e-5, "silu", 1.0)
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {"input": tensor(2, 6, 5), "grad_output": tensor(2, 6, 5), "weight": tensor(6), "scale": tensor(2, 6)}
    judge = Judge(spec, tensors, torch.float32, None)
    return judge, compute(spec, tensors, torch.float32, order=1).results


def test_the_judge_accepts_float32() -> None:
    judge, results = judged()
    assert [fault for fault in judge.faults(results) if not fault.soft] == []


@pytest.mark.parametrize("name", ["output", "grad_input", "grad_weight", "grad_bias", "grad_scale", "mean", "rstd"])
@pytest.mark.parametrize("change", ["scaled", "one element", "nan", "infinite", "shape"])
def test_the_judge_notices(name: str, change: str) -> None:
    judge, results = judged()
    wrong = results[name].clone()
    if change == "scaled":
        wrong *= 1 + 1e-4
    elif change == "one element":
        wrong.view(-1)[-1] += 1e-4
    elif change == "shape":
        wrong = wrong[:1]
    else:
        wrong.view(-1)[0] = float("nan" if change == "nan" else "inf")
    faults = judge.faults({**results, name: wrong})
    assert [fault.name for fault in faults if not fault.soft] == [name]


def test_a_process_that_dies_is_a_find_and_the_search_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, sys\n"
        "skip = int(sys.argv[sys.argv.index('--skip') + 1])\n"
        "for position in range(skip, 3):\n"
        "    print(json.dumps({'position': position, 'index': 10 + position}), flush=True)\n"
        "    if position == 1:\n"
        "        sys.exit('gone')\n"
        "    print(json.dumps({'tally': {'cases': 1}, 'finds': []}), flush=True)\n"
    )
    found: list[str] = []
    given = Namespace(cases=3, start=0, seed=1, jobs=1, device="cpu", pool=0)
    worker = drawn.Worker(0, given, found.append, str(script))
    worker.run()
    assert worker.tally["cases"] == 3
    assert len(found) == 1
    assert "gone" in found[0]
    assert "--case 11" in found[0]


def test_every_instance_is_drawn() -> None:
    from fusednorm.choice import all_instances

    assert {one.name for one in all_instances()} == {*INSTANCES["cpu"], *INSTANCES["cuda"]}
