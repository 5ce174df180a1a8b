"""What mypy says that calls of the public functions return; `make types` checks it, and test_typed_calls.py runs it."""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import Tensor

import fusednorm

Two = tuple[Tensor, Tensor]
Three = tuple[Tensor, Tensor, Tensor]
INT8 = torch.int8


def norms(x: Tensor, one: Tensor) -> tuple[Any, ...]:
    """x is (N, C, *); one result each."""
    running = torch.zeros(x.shape[1]), torch.ones(x.shape[1])
    return (
        assert_type(fusednorm.group_norm(x, 2, activation="silu", pre_add=x), Tensor),
        assert_type(fusednorm.instance_norm(x, *running, channel_dim=1, post_add=x), Tensor),
        assert_type(fusednorm.batch_norm(x, *running, training=True, scale=None), Tensor),
        assert_type(fusednorm.layer_norm(x, x.shape[-1:], None, None, 1e-5), Tensor),
        assert_type(fusednorm.rms_norm(x, x.shape[-1:], eps=1e-5, return_sum=False), Tensor),
        assert_type(fusednorm.layer_norm(x, x.shape[-1:], out_dtype=INT8, out_scale=one), Tensor),
        assert_type(fusednorm.rms_norm(x, x.shape[-1:], out_dtype=INT8, out_scale=one), Tensor),
    )


def pairs(x: Tensor, one: Tensor) -> tuple[Any, ...]:
    running = torch.zeros(x.shape[1]), torch.ones(x.shape[1])
    row = x.shape[-1:]
    return (
        assert_type(fusednorm.group_norm(x, 2, pre_add=x, return_sum=True), Two),
        assert_type(fusednorm.instance_norm(x, pre_add=x, pre_gate=one, return_sum=True), Two),
        assert_type(fusednorm.batch_norm(x, *running, pre_add=x, return_sum=True), Two),
        assert_type(fusednorm.layer_norm(x, row, pre_add=x, return_sum=True), Two),
        assert_type(fusednorm.rms_norm(x, row, pre_add=x, return_sum=True, activation=None), Two),
        assert_type(fusednorm.layer_norm(x, row, out_dtype=INT8), Two),
        assert_type(fusednorm.rms_norm(x, row, out_dtype=INT8, out_scale="row"), Two),
        assert_type(fusednorm.rms_norm(x, row, pre_add=x, return_sum=True, out_dtype=INT8, out_scale=one), Two),
    )


def triples(x: Tensor, one: Tensor) -> tuple[Any, ...]:
    row = x.shape[-1:]
    return (
        assert_type(fusednorm.layer_norm(x, row, pre_add=x, return_sum=True, out_dtype=INT8), Three),
        assert_type(fusednorm.rms_norm(x, row, pre_add=x, return_sum=True, out_dtype=INT8, out_scale="row"), Three),
    )


def known_later(x: Tensor, return_sum: bool) -> Any:
    return assert_type(fusednorm.group_norm(x, 2, pre_add=x, return_sum=return_sum), Any)
