"""What surrounds a training step: mixed precision, checkpoints, data in several processes, shared weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_distributed import Found, load, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from training_network import CHANNELS, STEPS, batch, network, trained
from training_worker import KINDS

from fusednorm import nn

WORKER = Path(__file__).with_name("training_worker.py")


def test_training_takes_torchs_way() -> None:
    torch.testing.assert_close(trained(network()), trained(network(fused=False)), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return load(run(tmp_path_factory.mktemp("ranks"), "cpu", 2, worker=WORKER), 2)


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_take_the_way_of_one(kind: str, ranks: Found) -> None:
    states = [found[kind] for found in ranks]
    alone = network()
    trained(alone)
    assert list(states[0]) == list(alone.state_dict())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    torch.testing.assert_close(states[0], dict(alone.state_dict()), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of torch's own rms_norm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_a_gradient_scaler(dtype: torch.dtype) -> None:
    """A scaled loss overflows in one step, which the scaler leaves out, for both libraries."""
    results = []
    for fused in (True, False):
        model = network(fused)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        scales = []
        for count in range(STEPS):
            images, targets = batch(count)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = F.cross_entropy(model(images), targets)
            factor = float("inf") if count == 1 else 1.0
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        results.append((scales, [parameter.detach() for parameter in model.parameters()]))
    (scales, parameters), (expected_scales, expected) = results
    assert scales == expected_scales
    torch.testing.assert_close(parameters, expected, rtol=5e-2, atol=2e-2)


CHECKPOINTED: dict[str, Callable[[torch.nn.Sequential, Tensor], Tensor]] = {
    "whole": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "whole, reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True),
    "segments": lambda model, x: checkpoint_sequential(model, 3, x, use_reentrant=False),
    "segments, reentrant": lambda model, x: checkpoint_sequential(model, 3, x, use_reentrant=True),
    "each block": lambda model, x: [x := checkpoint(block, x, use_reentrant=False) for block in model][-1],
}


@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_a_checkpoint_changes_no_bit(kind: str) -> None:
    images, targets = batch(0)
    gradients = []
    for call in (torch.nn.Sequential.__call__, CHECKPOINTED[kind]):
        model = network()
        x = images.clone().requires_grad_()
        for _ in range(3):  # calls that repeat run differently
            x.grad = None
            model.zero_grad()
            F.cross_entropy(call(model, x), targets).backward()
        gradients.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_weights_that_two_norms_share_get_the_sum_of_both_gradients() -> None:
    found = []
    for library in (nn, torch.nn):
        torch.manual_seed(0)
        made: Any = library
        model = torch.nn.Sequential(
            made.LayerNorm(CHANNELS), torch.nn.Linear(CHANNELS, CHANNELS), made.LayerNorm(CHANNELS)
        )
        model[2].weight = model[0].weight
        x = torch.randn(5, CHANNELS)
        for _ in range(3):
            model.zero_grad()
            model(x).square().sum().backward()
        assert len(list(model.parameters())) == 5
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch fills new memory with NaN then, and refuses what is not deterministic."""
    plain = trained(network())
    torch.use_deterministic_algorithms(True)
    try:
        first, second = trained(network()), trained(network())
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, plain, rtol=0, atol=0)


@pytest.mark.parametrize("foreach", [True, False])
def test_clipped_gradients_and_a_fused_optimizer(foreach: bool) -> None:
    """Gradients are dense tensors like their parameters, which optimizers for several tensors at once want."""
    results = []
    for fused in (True, False):
        model = network(fused)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **({} if foreach else {"fused": True}))
        for count in range(STEPS):
            images, targets = batch(count)
            optimizer.zero_grad(set_to_none=False)
            F.cross_entropy(model(images), targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
            optimizer.step()
        results.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


def test_averaged_weights() -> None:
    """torch.optim.swa_utils copies a model and moves the copy's parameters and buffers."""
    model = network()
    averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    trained(model)
    averaged.update_parameters(model)
    images, _ = batch(0)
    torch.testing.assert_close(averaged(images), model(images))
