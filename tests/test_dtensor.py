"""DTensors in 2, 3 and 4 processes on one machine, against the whole in one process and in float64.

The processes of each world size start once and make the calls of all cases; the tests judge what they left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dtensor_cases import CASES, Case, drawn, results
from test_distributed import load, run
from torch import Tensor

import fusednorm
from fusednorm.tolerance import judge, offset_of

WORKER = Path(__file__).with_name("dtensor_worker.py")
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("ranks"), "cpu", 2, 3, 4, worker=WORKER)


def whole(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same call in one process, in torch's operators."""
    tensors = {name: value.to(dtype) for name, value in drawn(case).items()}
    with fusednorm.use_instance("reference"):
        return results(case, tensors)


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_whole_in_one_process(folder: Path, name: str) -> None:
    check_results(load(folder, torch.Size(CASES[name].mesh).numel()), name)


def offset_of_statistics(case: Case) -> float:
    """The largest |mean| in standard deviations."""
    x = drawn(case)["input"].double()
    channel = case.channel_dim % x.dim()
    if case.family in ("layer_norm", "rms_norm"):
        dims = list(range(x.dim() - case.groups_or_dims, x.dim())) or [channel]
    else:
        dims = [dim for dim in range(x.dim()) if dim not in (0, channel)]
    return offset_of(x.mean(dims), x.std(dims).reciprocal())


def check_results(ranks: Found, name: str) -> None:
    case = CASES[name]
    exact, rough = whole(case, torch.float64), whole(case, torch.float32)
    offset, terms = offset_of_statistics(case), torch.Size(case.shape).numel()
    for rank, found in enumerate(ranks):
        for key, expected in exact.items():
            got = found[name][0][key][0]
            spread = 1.0 if key == "running_mean" else 0.0
            verdict = judge(got, expected, rough[key], offset=offset, terms=terms, spread=spread)
            assert verdict.ok, f"rank {rank}, {key}: {verdict.fault}"
            assert torch.equal(got, ranks[0][name][0][key][0])
            assert torch.equal(got, found[name][1][key][0])
        assert found[name][0]["output"][0].dtype == case.dtype


def lying(axes: Any, otherwise: str = "R") -> str:
    return " ".join(otherwise if axis is None else f"S({axis})" for axis in axes)


@pytest.mark.parametrize("name", CASES)
def test_no_element_moves_and_no_sum_is_made_that_can_wait(folder: Path, name: str) -> None:
    case = CASES[name]
    axes = [each if each is None else int(each) % len(case.shape) for each in case.expected or case.placements]
    for found in load(folder, torch.Size(case.mesh).numel()):
        lies = {key: where for key, (_, where) in found[name][0].items()}
        assert lies["output"] == lying(axes)
        if case.expected is None:
            assert lies["input"] == lying(axes)
        for key in case.operands:
            dims, place = case.axes(key), dict(case.placed).get(key)
            if place is not None:  # the gradient goes back to where the parameter lies
                assert lies[key].endswith(f"S({place})")
            elif all(axis is None or axis not in dims for axis in axes):
                assert lies[key] == " ".join("R" if axis is None else "P(sum)" for axis in axes)
        for key in ("running_mean", "running_var") if case.running else ():
            assert lies[key] == lying([None] * len(axes))


def test_compiled_calls_have_the_bits_of_eager_ones(folder: Path) -> None:
    for found in load(folder, 2):
        for eager, compiled in found["compiled"]:
            assert eager.keys() == compiled.keys()
            for key, (one, lies) in eager.items():
                assert torch.equal(compiled[key][0], one)
                assert compiled[key][1] == lies


def test_modules_are_those_of_one_process(folder: Path) -> None:
    for found in load(folder, 3):
        assert len(found["modules"]) == 6
        for name, pairs in found["modules"].items():
            for one, other in pairs:
                torch.testing.assert_close(
                    one, other, rtol=1e-4, atol=1e-4, msg=lambda words, name=name: f"{name}: {words}"
                )


def test_parameters_of_fsdp_and_of_tokens_in_parts(folder: Path) -> None:
    for found in load(folder, 4):
        assert len(found["fsdp"]) == 2
        for one, other in found["fsdp"]:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("mistake", "others", "last"),
    [
        ("plain weight", "TypeError: group_norm: weight is no DTensor, and another argument is", ""),
        ("plain input", "TypeError: group_norm: input is no DTensor, and another argument is", ""),
        ("other mesh", "TypeError: group_norm: weight lies on", ""),
        ("distributed", "TypeError: distributed.group_norm: input is a DTensor, which says itself", ""),
        ("rows", "TypeError: layer_norm: the statistics of rows are no DTensor", ""),
        (
            "local shape",
            "RuntimeError: group_norm: rank 2 of the group refused its arguments",
            "ValueError: group_norm: the local tensor has shape (2, 6, 1, 4); expected (2, 6, 2, 4)",
        ),
        ("eps", "RuntimeError: group_norm: the ranks of the group do not make the same call: rank 0: eps 1e-05", ""),
        ("shape", "RuntimeError: group_norm: the ranks of the group do not make the same call: rank 0: shape (1,", ""),
        (
            "function",
            "do not make the same call: rank 0: function layer_norm; rank 1: function layer_norm; rank 2: f",
            "",
        ),
        (
            "placement",
            "do not make the same call: rank 0: mesh_axes (2,); rank 1: mesh_axes (2,); rank 2: mesh_axes (3,)",
            "",
        ),
        ("no member", "", "ValueError: group_norm: this process is no member of DeviceMesh("),
        ("no call", "RuntimeError: group_norm: the exchange with the other 2 processes of the group failed", "-"),
    ],
)
def test_a_mistake_is_an_error_on_every_rank(folder: Path, mistake: str, others: str, last: str) -> None:
    ranks = load(folder, 3)
    for found in ranks[:-1]:
        assert others in found["errors"][mistake]
    if last != "-":
        assert (last or others) in ranks[-1]["errors"][mistake]


@pytest.mark.parametrize("call", ["implicit", "nothing"])
def test_no_mistake_is_no_error(folder: Path, call: str) -> None:
    assert [found["errors"][call] for found in load(folder, 3)] == ["", "", ""]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False")
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_over_nccl(tmp_path: Path, count: int) -> None:
    ranks = load(run(tmp_path, "cuda", count, worker=WORKER), count)
    made = [name for name in CASES if name in ranks[0]]
    assert len(made) >= 23
    for name in made:
        check_results(ranks, name)
