"""The short forms of Triton's plans: calls that repeat give what first ones give, by launches that were taped."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from interpreter_support import interpreted
from torch import Tensor

from fusednorm.backends.triton.tape import ALIGNMENT, Tape, on_tape, taping

#: The kinds of call: the instance, the module, the input's shape, its dtype and the kernels of forward and backward.
CALLS: dict[str, tuple[str, str, tuple[int, ...], str]] = {
    "rows": ("triton.rows", "LayerNorm(24, activation='silu')", (5, 24), "float32"),
    "rms rows": ("triton.rows", "RMSNorm(24)", (3, 4, 24), "bfloat16"),
    "half rows": ("triton.rows", "LayerNorm(24, bias=False)", (5, 24), "float16"),
    "held": ("triton.held", "GroupNorm(4, 12, activation='silu')", (3, 12, 3, 3), "float32"),
    "held of odd statistics": ("triton.held", "InstanceNorm1d(3, affine=True)", (3, 3, 7), "float64"),
    "planes": ("triton.tiles", "GroupNorm(4, 12)", (3, 12, 5, 5), "bfloat16"),
    "without parameters": ("triton.tiles", "GroupNorm(4, 12, affine=False)", (3, 12, 5, 5), "float32"),
    "many planes": ("triton.tiles", "InstanceNorm1d(5, affine=True)", (2, 5, 300), "float32"),
    "channels": ("triton.columns", "LayerNorm2d(12)", (3, 12, 4, 4), "float32"),
    "batch": ("triton.tiles", "BatchNorm2d(12, activation='relu')", (3, 12, 4, 4), "float32"),
    "batch in registers": ("triton.held", "BatchNorm2d(12, momentum=0.3)", (3, 12, 4, 4), "bfloat16"),
    "cumulative batch": ("triton.tiles", "BatchNorm2d(12, momentum=None)", (3, 12, 4, 4), "float32"),
    "batch without buffers": ("triton.tiles", "BatchNorm1d(12, track_running_stats=False)", (9, 12), "float32"),
    "evaluation": ("triton.tiles", "BatchNorm2d(12, activation='silu').eval()", (3, 12, 4, 4), "float32"),
}  # fmt: skip

CODE = """
import json, torch, fusednorm, short_support
from fusednorm.nn import *
short_support.install()
FOUND = []

def outputs(module, x, added):
    found = module(x, **added)
    return found if isinstance(found, tuple) else (found,)

def step(module, x, dys, buffers, added):
    module.load_state_dict(buffers)
    versions = {name: buffer._version for name, buffer in module.named_buffers()}
    x = x.detach().requires_grad_()
    added = {name: each.detach().requires_grad_() if name != "return_sum" else each for name, each in added.items()}
    tensors = [each for name, each in added.items() if name != "return_sum"]
    ys = outputs(module, x, added)
    gradients = torch.autograd.grad(ys, (x, *module.parameters(), *tensors), dys[:len(ys)])
    state = {name: value.clone() for name, value in module.state_dict().items()}
    written = [buffer._version > versions[name] for name, buffer in module.named_buffers()]
    with torch.no_grad():
        module.load_state_dict(buffers)
        plain = outputs(module, x, added)
    again = {name: value.clone() for name, value in module.state_dict().items()}
    return [*(y.detach() for y in ys), *plain, *gradients, *state.values(), *again.values()], written

def check(instance, text, shape, dtype, names="", offset=0):
    short_support.forget()
    torch.manual_seed(0)
    dtype = getattr(torch, dtype)
    module = eval(text).to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    buffers = {name: value.clone() for name, value in module.state_dict().items()}
    count = torch.Size(shape).numel()
    data = lambda: torch.randn(count + offset).to(dtype)[offset:].view(shape)
    numbers = lambda: torch.randn(shape[:2]).to(dtype)
    made = {"pre_add": data, "post_add": data, "pre_gate": numbers, "numbers": numbers, "return_sum": lambda: True}
    with fusednorm.use_instance(instance):
        for number in range(5):
            x, dys = data(), (data(), data())
            added = {name.replace("numbers", "pre_add"): made[name]() for name in names.split()}
            (got, written), kernels = short_support.replayed(lambda: step(module, x, dys, buffers, added))
            calls = short_support.forget()
            wanted, as_first = step(module, x, dys, buffers, added)
            short_support.remember(calls)
            same = all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
            FOUND.append((same, written == as_first, kernels))
"""


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_repeats_gives_what_a_first_one_gives(name: str) -> None:
    found = interpreted(f"{CODE}\ncheck{CALLS[name]}\nprint(json.dumps(FOUND))")
    assert [(same, written) for same, written, _ in found] == [(True, True)] * 5
    *_, before, last = [kernels for *_, kernels in found]
    assert last == before
    assert len(last) >= 3, last  # of a forward with a backward, and of one without
    assert found[0][2] == []
    assert last.count("move_statistics") == (2 if name == "batch" else 0)


PLANES = ["sum_moments_of_planes", "sum_apply"]
BATCH = ["moments_of_planes", "finalize", "sum_apply", "move_statistics"]
#: The same with what is around the norm, and the kernels of the replays, of a forward and of a backward.
SUMS: dict[str, tuple[tuple[str, str, tuple[int, ...], str, str], list[str], list[str]]] = {
    "rows and the sum": (
        ("triton.rows", "LayerNorm(24, activation='silu')", (5, 24), "float32", "pre_add return_sum"),
        ["whole_sum_forward"], ["rows_sum_backward"],
    ),
    "rows of a sum": (
        ("triton.rows", "RMSNorm(24)", (5, 24), "float16", "pre_add"), ["whole_sum_forward"], ["rows_backward"]
    ),
    "planes with everything": (
        ("triton.tiles", "GroupNorm(4, 12)", (3, 12, 5, 5), "float16", "pre_add post_add return_sum"),
        PLANES, ["sum_reduce", "sum_gradients"],
    ),
    "planes of numbers": (
        ("triton.tiles", "GroupNorm(4, 12, activation='silu')", (3, 12, 5, 5), "float32", "numbers"),
        PLANES, ["reduce", "gradients"],
    ),
    "a gate, whose numbers are made by torch": (
        ("triton.tiles", "GroupNorm(4, 12, activation='silu')", (3, 12, 5, 5), "float32", "pre_add pre_gate"),
        [], ["reduce", "gradients"],
    ),
    "held": (
        ("triton.held", "GroupNorm(4, 12, activation='relu')", (3, 12, 3, 3), "float16", "post_add"),
        ["held_sum_forward"], ["held_sum_backward"],
    ),
    "held without an activation": (
        ("triton.held", "InstanceNorm1d(3, affine=True)", (3, 3, 7), "float64", "post_add"),
        ["held_sum_forward"], ["held_backward"],
    ),
    "batch": (
        ("triton.tiles", "BatchNorm2d(12, activation='relu')", (3, 12, 4, 4), "float32", "post_add"),
        BATCH, ["sum_reduce", "sum_gradients"],
    ),
    "cumulative batch": (
        ("triton.held", "BatchNorm2d(12, momentum=None, activation='silu')", (3, 12, 4, 4), "float32", "post_add"),
        ["held_sum_forward"], ["held_sum_backward"],
    ),
    "evaluation": (
        ("triton.tiles", "BatchNorm2d(12, activation='silu').eval()", (3, 12, 4, 4), "float32", "post_add"),
        ["sum_apply"], ["sum_reduce", "combine", "sum_gradients"],
    ),
}  # fmt: skip


def test_a_call_with_sums_that_repeats_gives_what_a_first_one_gives() -> None:
    checks = "\n".join(f"check{call}" for call, *_ in SUMS.values())
    found = interpreted(f"{CODE}\n{checks}\nprint(json.dumps(FOUND))")
    for number, (name, (_, forward, backward)) in enumerate(SUMS.items()):
        five = found[5 * number : 5 * number + 5]
        assert [(same, written) for same, written, _ in five] == [(True, True)] * 5, name
        first, *_, last = [kernels for *_, kernels in five]
        assert first == [], name
        assert last == [*forward, *backward, *forward], name


@pytest.mark.parametrize(("name", "around"), [("rows", ""), ("batch", ""), ("rows", "pre_add return_sum")])
def test_tensors_that_are_not_aligned_go_through_the_plan(name: str, around: str) -> None:
    found = interpreted(f"{CODE}\ncheck{(*CALLS[name], around, 1)}\nprint(json.dumps(FOUND))")
    assert found == [[True, True, []]] * 5


def test_blocks_that_cannot_run_together_send_a_call_through_the_plan() -> None:
    code = f"""{CODE}
from fusednorm.private.triton_names import TOO_MANY_BLOCKS
x, h, module = torch.randn(5, 24), torch.randn(5, 24), LayerNorm(24)
found = []
def failing(call):
    wanted = call()
    for failure in (None, None, None, TOO_MANY_BLOCKS, None, None, "another error"):
        short_support.FAILURE[:] = [] if failure is None else [failure]
        try:
            got, kernels = short_support.replayed(call)
            found.append((torch.equal(got, wanted), kernels))
        except RuntimeError as error:
            found.append(str(error))
with fusednorm.use_instance("triton.rows"), torch.no_grad():
    failing(lambda: module(x))
    failing(lambda: module(x, pre_add=h))
print(json.dumps(found))
"""
    found = interpreted(code)
    for seven, kernel in ((found[:7], "rows_forward"), (found[7:], "whole_sum_forward")):
        first, second, third, refused, fourth, fifth, raised = seven
        assert first == second == refused == fourth == [True, []]
        assert third == fifth == [True, [kernel]]
        assert raised == "another error"


def test_a_tensor_that_is_given_twice_is_not_taped() -> None:
    code = f"""{CODE}
x, weight, bias = torch.randn(5, 24), torch.rand(24), torch.rand(24)
found = []
with fusednorm.use_instance("triton.rows"):
    wanted = [fusednorm.layer_norm(x, (24,), weight, other) for other in (bias, weight)]
    for twice in (False, False, True, True, False, False, True):
        got = fusednorm.layer_norm(x, (24,), weight, weight if twice else bias)
        found.append(torch.equal(got, wanted[twice]))
print(json.dumps(found))
"""
    assert interpreted(code) == [True] * 7


def start(stream: int, addresses: Any) -> None:
    STARTED.append((stream, addresses))


STARTED: list[Any] = []


def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    made = torch.ones(shape, dtype=dtype)
    MADE.append(made)
    return made


MADE: list[Tensor] = []


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    MADE.clear()
    STARTED.clear()
    monkeypatch.setattr("fusednorm.backends.triton.tape.current_raw_stream", lambda device: 7)


def test_workspaces_share_a_tensor_and_zeros_have_their_own() -> None:
    tape, x, y = Tape(), torch.zeros(3), torch.zeros(3)
    rooms = [torch.zeros(count, dtype=torch.float64) for count in (5, 64, 40)]
    tape.allocated(rooms[0], False)
    tape.allocated(rooms[1], True)
    tape.launched(start, (x, None, rooms[1], rooms[0]))
    tape.allocated(rooms[2], False)
    tape.launched(start, (rooms[2], y))
    replay = tape.replay((x, None, y), allocate)
    assert replay is not None
    replay(0, [None, 16, None, 32])
    shared, zeros = MADE
    assert shared.nbytes == ALIGNMENT + 2 * ALIGNMENT
    assert zeros.nbytes == rooms[1].nbytes
    assert not zeros.any()
    assert shared.all()
    first = shared.data_ptr()
    one, other = STARTED
    assert one == (7, (16, None, zeros.data_ptr(), first))
    assert other == (7, (first + ALIGNMENT, 32))


@pytest.mark.parametrize("stranger", [True, False])
def test_a_launch_of_another_tensor_or_without_a_start_cannot_be_made_again(stranger: bool) -> None:
    tape, x, y = Tape(), torch.zeros(3), torch.zeros(3)
    tape.launched(start if stranger else None, (x, y))
    assert tape.replay((x,) if stranger else (x, y), allocate) is None


def test_a_tape_ends_with_its_call() -> None:
    assert taping() is None
    tape = Tape()
    with on_tape(tape):
        assert taping() is tape
    assert taping() is None
