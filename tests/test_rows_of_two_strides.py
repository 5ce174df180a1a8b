"""Rows that two strides describe and one does not: heads of packed queries, keys and values, a part of the tokens."""

from __future__ import annotations

import pytest
import torch
from test_modulated_rows import ACTIVATED, DTYPES, FAMILIES, called, differentiated, drawn, faults, given, last
from torch import Tensor

import fusednorm
from fusednorm.norm import norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problems import backward_problem, forward_problem


def heads(*sizes: int, index: int = 0, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Queries, keys or values of (B, L, H, D), packed beside one another."""
    B, L, H, D = sizes
    return drawn(B, L, 3, H, D, dtype=dtype, seed=seed)[:, :, index]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_heads(family: str, dtype: torch.dtype) -> None:
    for sizes in ((2, 7, 4, 16), (1, 70, 5, 33), (3, 1, 2, 130)):
        tensors = given(family, sizes, 1, (), (), dtype)
        del tensors["scale"], tensors["shift"]
        for gradient in (tensors["grad_output"], heads(*sizes, index=1, dtype=dtype, seed=7)):
            tensors |= {"input": heads(*sizes, dtype=dtype), "grad_output": gradient}
            found = differentiated(lambda t: called(family, t, 1, ACTIVATED[dtype]), tensors)
            assert faults(family, tensors, found, 1, ACTIVATED[dtype]) == [], sizes
            assert found["output"].is_contiguous()
            assert found["grad_input"].is_contiguous()


def test_packed_heads_are_not_copied() -> None:
    q, norm, plain = heads(2, 7, 4, 16), norm_of("rms_norm", 1), drawn(2, 7, 4, 16)
    rstd = torch.ones(56, 1)
    for device in ("cpu", "meta"):
        x, dense = torch.empty_strided(q.shape, q.stride(), device=device), plain.to(device)
        assert forward_problem(norm, Operands(x)).copies == ()
        for gradient in (dense, x):
            problem = backward_problem(norm, BackwardOperands(gradient, x, None, rstd))
            assert problem.copies == ()
            assert problem.statistics_shape == (56, 1)
    assert backward_problem(norm, BackwardOperands(q, plain, None, rstd)).copies == ()
    transposed = plain.transpose(1, 2).contiguous().transpose(1, 2)
    assert backward_problem(norm, BackwardOperands(transposed, q, None, rstd)).copies == ("grad_output",)
    assert fusednorm.explain(fusednorm.rms_norm, q, (16,)).instance == "cpu.rows"


def test_a_part_of_the_tokens_is_not_copied() -> None:
    x = drawn(2, 12, 24)[:, 3:10]
    assert forward_problem(norm_of("layer_norm", 1), Operands(x)).copies == ()
    found = fusednorm.explain(fusednorm.layer_norm, x, (24,), scale=drawn(2, 24))
    assert found.copies == ()
    image = last(drawn(2, 24, 12, 5))[:, :, 3:10]
    assert forward_problem(norm_of("layer_norm", 0), Operands(image)).copies == ()
    tensors = given("layer_norm", (2, 7, 24), 1, (2, 24), (2, 24)) | {"input": x}
    assert faults("layer_norm", tensors, differentiated(lambda t: called("layer_norm", t, 1), tensors)) == []
    del tensors["scale"], tensors["shift"]
    assert faults("layer_norm", tensors, differentiated(lambda t: called("layer_norm", t, 1), tensors)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_that_overlap(family: str) -> None:
    """Neighbouring rows lie one element apart, as the elements of a row do."""
    sizes = (2, 9, 4)
    tensors = given(family, sizes, 1, (), ()) | {"input": drawn(2, 12).unfold(1, 4, 1)}
    del tensors["scale"], tensors["shift"]
    assert tensors["input"].stride() == (12, 1, 1)
    assert faults(family, tensors, differentiated(lambda t: called(family, t, 1), tensors)) == []
    assert forward_problem(norm_of("layer_norm", 1), Operands(tensors["input"])).copies == ()
