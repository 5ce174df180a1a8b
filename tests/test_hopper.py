"""The Hopper backend without a GPU: how units are spread over blocks, what is chosen, what is compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton_support import TARGETS, Made, source  # noqa: E402

from fusednorm import dispatch  # noqa: E402
from fusednorm.activations import FORMULAS, resolve  # noqa: E402
from fusednorm.backends.hopper import instances  # noqa: E402
from fusednorm.backends.hopper.config import columns, row_parts, rows, slabs  # noqa: E402
from fusednorm.backends.hopper.config import resident as config  # noqa: E402
from fusednorm.backends.hopper.config.resident import (  # noqa: E402
    ResidentConfig,
    candidates,
    magic,
    resident_for,
    spread,
    vector_of,
)
from fusednorm.backends.hopper.instances import RESIDENT  # noqa: E402
from fusednorm.backends.hopper.plans.columns import ColumnsBackward, ColumnsForward  # noqa: E402
from fusednorm.backends.hopper.plans.resident import (  # noqa: E402
    ResidentBackward,
    ResidentForward,
    ResidentSumBackward,
    ResidentSumForward,
)
from fusednorm.backends.hopper.plans.row_parts import RowPartsBackward  # noqa: E402
from fusednorm.backends.hopper.plans.rows import RowsBackward  # noqa: E402
from fusednorm.backends.hopper.plans.slabs import SlabsBackward, SlabsForward, SlabsSumForward  # noqa: E402
from fusednorm.backends.triton import instances as triton_instances  # noqa: E402
from fusednorm.backends.triton.launch import Launch  # noqa: E402
from fusednorm.backends.triton.plans.sums import SumBackward, SumForward  # noqa: E402
from fusednorm.backends.triton.plans.tiles import TilesSumBackward, TilesSumForward  # noqa: E402
from fusednorm.choice import choose  # noqa: E402
from fusednorm.instance import Instance, Plan  # noqa: E402
from fusednorm.norm import norm_of  # noqa: E402
from fusednorm.operands import BackwardOperands, Gradients, Operands, Results, Sums  # noqa: E402
from fusednorm.private.triton_names import REGISTERS  # noqa: E402
from fusednorm.problem import Added, Problem  # noqa: E402
from fusednorm.problems import backward_problem, forward_problem, sum_backward_problem, sum_forward_problem  # noqa: E402

PROCESSORS = 132


def problem_of(
    shape: tuple[int, ...],
    groups: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    activation: str | None = "silu",
    modulated: bool = False,
    last: bool = False,
    backward: bool = False,
) -> Problem:
    """A forward of group_norm on a GPU, or its backward."""
    form = torch.channels_last if last else torch.contiguous_format
    with torch.device("meta"):
        input = torch.empty(shape, dtype=dtype, memory_format=form)
        parameter, modulation = torch.empty(shape[1]), torch.empty(shape[:2]) if modulated else None
    norm = norm_of("group_norm", groups, eps=1e-5, activation=resolve(activation))
    if backward:
        statistics = torch.empty(shape[0], groups, device="meta")
        operands = BackwardOperands(input, input, statistics, statistics, parameter, parameter, modulation)
        return replace(backward_problem(norm, operands, "backward"), device="cuda")
    return replace(forward_problem(norm, Operands(input, parameter, parameter, modulation)), device="cuda")


def over_batch(
    shape: tuple[int, ...],
    activation: str | None = "relu",
    dtype: torch.dtype = torch.bfloat16,
    backward: bool = False,
    modulated: bool = False,
    training: bool = True,
    **sums: tuple[int, ...],
) -> Problem:
    """A forward of batch_norm on a GPU, or its backward, with sums around it or without."""
    with torch.device("meta"):
        input, parameter = torch.empty(shape, dtype=dtype), torch.empty(shape[1])
        scale = torch.empty(shape[:2]) if modulated else None
        added = {name: torch.empty(size, dtype=dtype) for name, size in sums.items()}
    norm = norm_of("batch_norm", activation=resolve(activation), training=training)
    if backward:
        gradient = BackwardOperands(input, input, parameter, parameter, parameter, parameter, scale)
        problem = backward_problem(norm, gradient, "backward")
        if added:
            problem = sum_backward_problem(norm, gradient, "backward", added.get("post_add"), "pre_add" in added)
        return replace(problem, device="cuda")
    operands = Operands(input, parameter, parameter, scale)
    problem = forward_problem(norm, operands)
    if added:
        problem = sum_forward_problem(norm, operands, Sums(**added), "pre_add" in added)
    return replace(problem, device="cuda")


def over_channels(
    shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, backward: bool = False, last: bool = False, **of: Any
) -> Problem:
    """A forward of layer_norm over the channels on a GPU, or its backward."""
    form = torch.channels_last if last else torch.contiguous_format
    with torch.device("meta"):
        input, parameter = torch.empty(shape, dtype=dtype, memory_format=form), torch.empty(shape[1])
        statistics = torch.empty(shape[0], *shape[2:])
    norm = norm_of("layer_norm", 0, **of)
    if backward:
        operands = BackwardOperands(input, input, statistics, statistics, parameter, parameter)
        return replace(backward_problem(norm, operands, "backward"), device="cuda")
    return replace(forward_problem(norm, Operands(input, parameter, parameter)), device="cuda")


def of_rows(
    count: int, size: int, dtype: torch.dtype = torch.bfloat16, family: Any = "layer_norm", **of: Any
) -> Problem:
    """A backward of rows on a GPU, with parameters of their dtype."""
    with torch.device("meta"):
        input, statistics, parameter = torch.empty(count, size, dtype=dtype), torch.empty(count, 1), torch.empty(size)
    mean, bias = (statistics, parameter.to(dtype)) if family == "layer_norm" else (None, None)
    operands = BackwardOperands(input, input, mean, statistics, parameter.to(dtype), bias)
    return replace(backward_problem(norm_of(family, 1, **of), operands, "backward"), device="cuda")


def summed(
    shape: tuple[int, ...],
    backward: bool = False,
    activation: str = "silu",
    keeps_sum: bool = True,
    last: bool = False,
    **sums: tuple[int, ...],
) -> Problem:
    """A forward of group_norm(32) on a GPU of a sum, by default of two tensors, or its backward with a gradient of the
    sum."""
    form = torch.channels_last if last else torch.contiguous_format
    with torch.device("meta"):
        input, parameter, statistics = (
            torch.empty(shape, dtype=torch.bfloat16, memory_format=form),
            torch.empty(shape[1]),
            torch.empty(shape[0], 32),
        )
        added = {name: torch.empty(size, dtype=torch.bfloat16) for name, size in (sums or {"pre_add": shape}).items()}
    added = {name: one.contiguous(memory_format=form) if one.dim() == 4 else one for name, one in added.items()}
    norm = norm_of("group_norm", 32, activation=resolve(activation))
    if backward:
        gradient = BackwardOperands(input, input, statistics, statistics, parameter, parameter)
        return replace(sum_backward_problem(norm, gradient, "backward", None, True), device="cuda")
    operands = Operands(input, parameter, parameter)
    return replace(sum_forward_problem(norm, operands, Sums(**added), keeps_sum), device="cuda")


def of_numbers(shape: tuple[int, ...], **of: Any) -> Problem:
    """A backward of a norm on a GPU, by default group_norm(32), that makes the gradient of a pre_add (N, C)."""
    norm = of.pop("norm", norm_of("group_norm", 32, activation=resolve("silu")))
    with torch.device("meta"):
        input, parameter = torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape[1])
        statistics = torch.empty(shape[0], 32)
    gradient = BackwardOperands(input, input, statistics, statistics, parameter, parameter)
    return replace(sum_backward_problem(norm, gradient, "backward", None, False, **of), device="cuda")


def before_activation(
    shape: tuple[int, ...], backward: bool = False, dtype: torch.dtype = torch.bfloat16, activation: str = "relu"
) -> Problem:
    """A forward of group_norm(32) on a GPU with a sum behind it, or its backward."""
    with torch.device("meta"):
        input, parameter = torch.empty(shape, dtype=dtype), torch.empty(shape[1])
        statistics = torch.empty(shape[0], 32)
    norm = norm_of("group_norm", 32, activation=resolve(activation))
    if backward:
        gradient = BackwardOperands(input, input, statistics, statistics, parameter, parameter)
        return replace(sum_backward_problem(norm, gradient, "backward", input, False), device="cuda")
    operands = Operands(input, parameter, parameter)
    return replace(sum_forward_problem(norm, operands, Sums(post_add=input), False), device="cuda")


def apart(problem: Problem, **further: int) -> Problem:
    """The problem with an input whose strides are so much longer."""
    steps = {step: getattr(problem.layout, step) + more for step, more in further.items()}
    return replace(problem, layout=replace(problem.layout, **steps))


def added_apart(problem: Problem, **further: int) -> Problem:
    """The same with what is added before the norm."""
    added = problem.added
    assert added is not None
    assert added.pre_layout is not None
    before = apart(replace(problem, layout=added.pre_layout), **further).layout
    return replace(problem, added=replace(added, pre_layout=before))


SHAPES = [
    (1, 512, 256, 256), (32, 512, 64, 64), (2, 320, 128, 128), (1, 128, 1024, 1024), (8, 256, 100, 76), (3, 64, 8),
]  # fmt: skip


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if there were a Hopper GPU."""
    instances.processors.cache_clear()
    for module in (instances, triton_instances):
        monkeypatch.setattr(module, "unavailable", lambda: None)
    yield
    instances.processors.cache_clear()


# --- the spread of units over blocks ---


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_spread_covers_each_unit_once_and_no_unit_has_more_chunks_than_there_are_blocks(
    shape: tuple[int, ...], backward: bool
) -> None:
    problem = problem_of(shape, backward=backward)
    vectors, units = config.unit_vectors(problem), shape[0] * 32
    found = 0
    for candidate in candidates():
        place = spread(problem, candidate, PROCESSORS)
        if place is None:
            continue
        found += 1
        chunks = units * place.parts
        tiles = -(-vectors // candidate.vectors)
        if backward:  # a tile is of one channel
            channels = shape[1] // 32
            tiles = channels * -(-vectors // (channels * candidate.vectors))
        assert (place.parts - 1) * candidate.tiles < tiles <= place.parts * candidate.tiles
        assert place.even == (vectors == place.parts * place.chunk)
        assert (place.waves - 1) * place.blocks < chunks <= place.waves * place.blocks
        assert place.blocks <= PROCESSORS * candidate.blocks
        # Blocks that wait have more chunks of a unit than it has, so one of them is complete.
        assert place.parts <= place.blocks
        assert place.lag >= (place.waves > 1)
        assert not place.leads or place.lag > 1
    assert found or vectors < 512 or (backward and shape[-1] == 1024)  # for the chip, with grad_output


@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_spread_fits_the_shared_memory_and_the_registers_of_a_multiprocessor(
    shape: tuple[int, ...], tensors: int
) -> None:
    problem = problem_of(shape, backward=tensors == 2)
    for candidate in candidates():
        place = spread(problem, candidate, PROCESSORS)
        if place is not None:
            slots = tensors * (place.lag + 1) * place.chunk * 16
            assert candidate.blocks * (slots + config.SCRATCH_BYTES + config.DRIVER_BYTES) <= 228 << 10
        assert candidate.blocks * candidate.warps * 32 * candidate.registers <= 1 << 16
        assert candidate.registers % 8 == 0 or candidate.registers == 255  # which come by eights


BLOCKS, ONE_TILE, LONG, SHORT = (
    ResidentConfig(512, 2, 2, 1, 6),
    ResidentConfig(512, 2, 1, 1, 8),
    ResidentConfig(512, 4, 4, 1, 3),
    ResidentConfig(128, 2, 5, 1, 8),
)
BEHIND, OF_SUMS = ResidentConfig(1024, 4, 1, 2, 4), ResidentConfig(512, 4, 2, 2, 4)


@pytest.mark.parametrize(
    ("problem", "chosen"),
    [
        (problem_of((32, 512, 64, 64)), BLOCKS),
        (problem_of((8, 128, 256, 256)), BLOCKS),
        (problem_of((16, 320, 64, 64)), BLOCKS),
        (problem_of((1, 512, 256, 256)), BLOCKS),  # 128 chunks
        (problem_of((4, 256, 128, 128), dtype=torch.float32), BLOCKS),
        (problem_of((1, 256, 512, 512)), BEHIND),
        (problem_of((1, 128, 1024, 1024)), BEHIND),
        (problem_of((1, 128, 20, 256, 256)), LONG),  # two waves behind it does not fit the chip
        (over_batch((16, 96, 200, 200), None, torch.float32), BEHIND),
        (problem_of((99, 256, 56, 56), 4, torch.float16), ONE_TILE),
        (problem_of((41, 320, 72, 72), 32, torch.float16), ONE_TILE),
        (problem_of((94, 128, 96, 96), 128, torch.float16, "relu"), SHORT),
        (problem_of((436, 33, 80, 80), 1, activation=None), BLOCKS),
        (summed((32, 512, 64, 64)), OF_SUMS),
        (summed((1, 256, 512, 512)), OF_SUMS),
    ],
)
def test_a_forward_has_the_fastest_chunks(problem: Problem, chosen: ResidentConfig) -> None:
    assert resident_for(problem, PROCESSORS) == chosen


def test_a_unit_that_the_chip_cannot_hold_has_no_configuration() -> None:
    assert resident_for(problem_of((1, 32, 4096, 4096)), PROCESSORS) is None
    half_full = problem_of((1, 1948, 47, 13, 16), 1948)  # two chunks of 1024 vectors for 1222, or two of 640
    assert resident_for(half_full, PROCESSORS) == SHORT
    assert resident_for(problem_of((1, 128, 20, 256, 256)), PROCESSORS) is not None
    assert resident_for(problem_of((2, 64, 96, 96, 64), 8), PROCESSORS) is not None


@pytest.mark.parametrize(
    ("shape", "groups", "held", "lag", "parts"),
    [
        ((32, 512, 64, 64), 32, 8, 1, 16), ((1, 512, 256, 256), 32, 8, 2, 342), ((4, 256, 128, 128), 32, 16, 2, 171),
        ((8, 128, 256, 256), 32, 8, 2, 342), ((16, 320, 64, 64), 32, 5, 1, 16), ((16, 1920, 40, 40), 32, 15, 2, 25),
        ((2, 384, 9, 7), 1, 48, 1, 2), ((3, 72, 31, 33), 72, 3, 1, 2),
    ],
)  # fmt: skip
def test_a_slab_has_whole_groups_and_its_chunks_cover_it_once(
    shape: tuple[int, ...], groups: int, held: int, lag: int, parts: int
) -> None:
    problem = problem_of(shape, groups, last=True)
    default = slabs.slabs_for(problem, PROCESSORS)
    assert default is not None
    place = slabs.spread(problem, default, PROCESSORS)
    assert place is not None
    assert (place.held, place.lag, place.parts) == (held, lag, parts)
    check_slabs(problem)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((32, 512, 64, 64), 32), ((1, 512, 256, 256), 32), ((8, 128, 100, 150), 128), ((16, 1920, 40, 40), 32),
     ((2, 192, 9, 7), 1), ((3, 72, 31, 33), 72)],
)  # fmt: skip
def test_slabs_of_a_backward_hold_two_tensors(shape: tuple[int, ...], groups: int, dtype: torch.dtype) -> None:
    check_slabs(problem_of(shape, groups, dtype, last=True, backward=True))


def check_slabs(problem: Problem) -> None:
    """All configurations of slabs, of which the first is the default."""
    view, vector, tensors = problem.view, vector_of(problem), 2 if problem.backward else 1
    assert slabs.configs(problem, PROCESSORS)[0] == slabs.slabs_for(problem, PROCESSORS)
    few = slabs.SlabsConfig(512, 8, 1, 2, 2, 8)  # two vectors of a tile to a thread, where sums take four
    assert slabs.spread(problem, few, PROCESSORS) is None
    for candidate in slabs.configs(problem, PROCESSORS):
        place = slabs.spread(problem, candidate, PROCESSORS)
        assert place is not None
        assert place.held <= candidate.lanes
        assert place.held * vector * place.bands == view.channels
        assert place.held * vector == place.groups * view.group_channels
        assert (place.parts - 1) * place.rows < problem.view.spatial <= place.parts * place.rows
        chunks = view.samples * place.bands * place.parts
        assert (place.waves - 1) * place.blocks < chunks <= place.waves * place.blocks
        assert place.parts <= place.blocks
        assert place.lag > 0  # a leader's numbers are awaited behind the next sums
        slots = tensors * (place.lag + 1) * candidate.tiles * candidate.vectors * 16
        assert candidate.blocks * (slots + slabs.scratch(problem, candidate) + config.DRIVER_BYTES) <= 228 << 10


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 32, 100, 511, 8125])
def test_the_kernel_divides_by_a_product(divisor: int) -> None:
    for dividend in {*range(3 * divisor + 2), *(k * divisor - 1 for k in range(1, 200)), (1 << 31) // divisor - 1}:
        if dividend * divisor < 1 << 31 or config.divides(dividend, divisor):
            assert (2 * dividend * magic(divisor)) >> 32 == dividend // divisor


def test_which_numbers_the_kernel_divides() -> None:
    assert config.divides((1 << 31) - 1, 512)  # by shifting
    assert config.divides(1 << 20, 392)
    assert not config.divides(1 << 24, 1000)
    assert all((2 * one * magic(392)) >> 32 == one // 392 for one in range((1 << 20) - 3000, 1 << 20))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shape", [(32, 256, 56, 56), (16, 320, 128, 128), (300, 16, 4, 10), (3, 5, 8)])
def test_channels_of_all_samples_are_spread_as_units(shape: tuple[int, ...], backward: bool) -> None:
    """Each has the vectors of its planes, whether tiles divide them or not; and the partials of all samples are those
    of one."""
    problem = over_batch(shape, backward=backward)
    default = resident_for(problem, PROCESSORS)
    assert default is not None
    plan: Any = (ResidentBackward if backward else ResidentForward)(problem, default, PROCESSORS)
    vectors = problem.view.numel // shape[1] // 8
    assert (plan.place.vectors, plan.units) == (vectors, shape[1])
    assert plan.place.parts == -(-vectors // plan.place.chunk)
    assert plan.walk[-1] == magic(shape[1])
    constants = plan.launch.constants
    assert constants["ACROSS"]
    if backward:
        assert plan.partials.total == shape[1] * -(-vectors // default.vectors)
        assert constants["FULL"] is (vectors % default.vectors == 0)
    else:
        assert constants["IN_CHANNEL"]


def arguments(plan: Any, *tensors: Any) -> dict[str, Any]:
    """The arguments of a plan's kernel by their names."""
    return dict(zip(plan.launch.kernel.arg_names, (*tensors, *plan.launch.scalars), strict=False))


def test_the_kernel_of_a_forward_gets_what_is_around_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """pre_add and post_add of larger batches, each with the distance between its own samples."""
    with torch.device("meta"):
        x = torch.empty(8, 256, 64, 64, dtype=torch.bfloat16)
        before, behind = (torch.empty(8, size, 64, 64, dtype=torch.bfloat16)[:, :256] for size in (264, 272))
        weight, gate, total = torch.empty(256), torch.empty(8, 256), torch.empty_like(x)
    sums = Sums(pre_add=before, pre_gate=gate, post_add=behind)
    norm = norm_of("group_norm", 32, activation=resolve("relu"))
    problem = replace(sum_forward_problem(norm, Operands(x, weight, weight), sums, True), device="cuda")
    default = resident_for(problem, PROCESSORS)
    assert default is not None
    plan = ResidentSumForward(problem, default, PROCESSORS)
    monkeypatch.setattr(plan, "packets", lambda: None)
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Launch, "__call__", lambda launch, *tensors: launched.append(tensors))
    nothing = None, None, None
    plan.add(x, x, (weight, weight, None, None), nothing, nothing, (before, gate, None, behind, total))
    found = arguments(plan, *launched[0])
    assert [found[f"p_{name}"] is one for name, one in
            (("before", before), ("numbers", gate), ("behind", behind), ("total", total))] == [True] * 4  # fmt: skip
    samples = [found[f"{name}_sample"] for name in ("x", "y", "before", "behind")]
    assert samples == [channels * 64 * 64 // 8 for channels in (256, 256, 264, 272)]


@pytest.mark.parametrize("backward", [False, True])
def test_the_kernel_divides_by_planes_where_units_are_channels_of_all_samples(backward: bool) -> None:
    """Elsewhere by the tiles of a channel, where they divide it."""
    make: Any = ResidentBackward if backward else ResidentForward
    tensors = [None] * 14
    for problem, divisor in (
        (over_batch((32, 256, 64, 64), backward=backward), 512),
        (over_batch((32, 256, 56, 56), backward=backward), 392),
        (problem_of((32, 256, 64, 128), backward=backward), 2),
    ):
        found = arguments(make(problem, ResidentConfig(512, 4, 1, 2, 4), PROCESSORS), *tensors)
        assert found["magic_channel"] == magic(divisor)


@pytest.mark.parametrize(
    ("shape", "groups", "leads"),
    [((1, 128, 1024, 1024), 32, True), ((1, 512, 256, 256), 32, False), ((1, 32, 160, 240), 1, False)],
)
def test_the_blocks_of_many_chunks_have_a_leader(shape: tuple[int, ...], groups: int, leads: bool) -> None:
    """But in a single wave, where a leader would wait for its own block."""
    problem = problem_of(shape, groups)
    default = resident_for(problem, PROCESSORS)
    assert default is not None
    plan = ResidentForward(problem, default, PROCESSORS)
    assert plan.launch.constants["LEAD"] is plan.place.leads is leads
    assert plan.launch.constants["MORE"] is (plan.place.waves > 1) is (shape[1] > 32)
    assert plan.words == shape[0] * groups * (plan.place.parts + 1) + 1


def test_each_chunk_of_a_slab_has_packets_for_each_group_and_a_leader_for_its_own() -> None:
    problem = problem_of((32, 512, 64, 64), last=True)
    default = slabs.slabs_for(problem, PROCESSORS)
    assert default is not None
    assert SlabsForward(problem, default, PROCESSORS).words == 32 * 32 * (16 + 1) + 1


@pytest.mark.parametrize(
    ("problem", "lanes", "parts", "leads"),
    [
        (problem_of((32, 512, 64, 64), last=True), 8, 16, False),
        (problem_of((32, 256, 56, 56), last=True), 16, 49, True),  # with 8 lanes chunks would not be full
        (problem_of((16, 128, 128, 128), last=True), 16, 171, True),
        (problem_of((4, 512, 160, 160), last=True), 8, 134, True),  # with 16 lanes 267 chunks of 396 blocks
        (problem_of((54, 960, 26, 26), 960, last=True), 4, 2, False),
        (problem_of((30, 256, 32, 32), 256, torch.float32, last=True), 8, 4, False),
        (problem_of((32, 512, 64, 64), last=True, backward=True), 8, 32, False),
        (problem_of((32, 256, 56, 56), last=True, backward=True), 8, 49, False),
        (problem_of((1, 512, 256, 256), last=True, backward=True), 4, 512, True),
        (problem_of((64, 512, 28, 28), 512, last=True, backward=True), 4, 7, False),
        (problem_of((40, 512, 50, 50), 512, last=True, backward=True), 4, 20, True),  # 32 x 32 numbers
    ],
)
def test_which_slabs_have_leaders(problem: Problem, lanes: int, parts: int, leads: bool) -> None:
    chosen = slabs.slabs_for(problem, PROCESSORS)
    assert chosen is not None
    place = slabs.spread(problem, chosen, PROCESSORS)
    assert place is not None
    assert (chosen.lanes, place.parts, place.leads) == (lanes, parts, leads)
    plan: Any = (SlabsBackward if problem.backward else SlabsForward)(problem, chosen, PROCESSORS)
    assert plan.launch.constants["LEAD"] is leads
    assert plan.launch.constants["ALONE"] is (problem.view.group_channels == slabs.span(problem))


# --- what is chosen ---


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (problem_of((8, 128, 256, 256)), "hopper.resident"),
        (problem_of((8, 128, 256, 256), activation=None, modulated=True), "hopper.resident"),
        (problem_of((4, 256, 128, 128), dtype=torch.float32), "hopper.resident"),
        (problem_of((8, 128, 256, 256), activation="gelu"), "hopper.resident"),
        (problem_of((6, 48, 300, 300), 8, torch.float16, "gelu"), "triton.tiles"),
        (problem_of((2, 320, 192, 192), 320, torch.float16, "gelu"), "triton.tiles"),
        (problem_of((2, 320, 192, 192), 320, torch.float16), "hopper.resident"),
        (problem_of((1, 512, 128, 128)), "hopper.resident"),  # a full wave of full chunks
        (problem_of((2, 640, 64, 64), dtype=torch.float16, activation=None, modulated=True), "hopper.resident"),
        (problem_of((2, 128, 32, 32, 32), 128, activation="leaky_relu"), "hopper.resident"),
        (problem_of((1, 480, 128, 128)), "hopper.resident"),
        (problem_of((11, 32, 96, 96), 16), "hopper.resident"),  # chunks of three small tiles
        (problem_of((1, 512, 100, 152)), "triton.tiles"),  # units that no tile divides
        (problem_of((7, 60, 80, 128), 30), "triton.tiles"),  # a third chunk that is half full
        (problem_of((1, 500, 128, 128), 20), "triton.tiles"),  # 5 % of the blocks have none
        (problem_of((8, 320, 64, 64)), "triton.tiles"),  # chunks of five tiles
        (problem_of((2, 640, 64, 64), activation="gelu"), "triton.tiles"),
        (problem_of((1, 256, 128, 128), dtype=torch.float32), "triton.tiles"),
        (problem_of((1, 416, 256, 128)), "triton.tiles"),  # 26 MB: four waves
        (problem_of((1, 256, 64, 128), backward=True), "triton.tiles"),
        (problem_of((2, 640, 64, 64), last=True), "triton.tiles"),
        (summed((2, 640, 64, 64)), "triton.tiles"),
        (problem_of((1, 32, 4096, 4096)), "triton.tiles"),
        (problem_of((8, 128, 255, 255)), "triton.tiles"),
        (problem_of((8, 128, 256, 256), last=True), "hopper.slabs"),
        (problem_of((4, 256, 128, 128), dtype=torch.float32, modulated=True, last=True), "hopper.slabs"),
        (problem_of((16, 320, 128, 128), last=True), "triton.tiles"),
        (problem_of((8, 64, 256, 256), 64, last=True), "triton.tiles"),
        (problem_of((1, 512, 128, 128), last=True), "triton.tiles"),
        (problem_of((1, 512, 512, 512), last=True), "triton.tiles"),
        (problem_of((8, 128, 256, 256), last=True, backward=True), "hopper.slabs"),
        (problem_of((8, 128, 256, 256), activation="gelu", last=True, backward=True), "triton.tiles"),
        (problem_of((16, 320, 64, 64), last=True, backward=True), "triton.tiles"),  # 5 lanes of 8
        (problem_of((24, 64, 96, 96), 1, last=True, backward=True), "triton.tiles"),  # small
        (problem_of((64, 512, 28, 28), 512, torch.float16, "relu", last=True, backward=True), "hopper.slabs"),
        (problem_of((64, 512, 28, 28), 512, torch.float16, "relu", last=True), "triton.tiles"),  # chunks are 77 % full
        (problem_of((40, 512, 50, 50), 512, last=True, backward=True), "triton.tiles"),  # with leaders
        (problem_of((40, 512, 50, 50), 512, last=True), "hopper.slabs"),
        (problem_of((86, 128, 56, 43), activation="gelu", last=True), "triton.tiles"),
        (problem_of((4, 128, 300, 300), activation=None, last=True), "triton.tiles"),  # leaders one wave behind
        (problem_of((6, 256, 283, 283), 64, torch.float16, None, last=True), "triton.tiles"),
        (problem_of((3, 256, 250, 250), 64, torch.float16, None, last=True), "hopper.slabs"),
        (problem_of((86, 128, 56, 43), activation="relu", last=True), "hopper.slabs"),
        (problem_of((30, 2, 512, 607), 2), "hopper.resident"),  # planes that tiles do not divide
        (problem_of((30, 2, 512, 607), 2, activation="relu"), "hopper.resident"),
        (problem_of((8, 10, 240, 520), 10, torch.float32, "gelu_tanh"), "triton.tiles"),
        (problem_of((8, 10, 240, 520), 10, torch.float32), "hopper.resident"),
        (problem_of((3, 768, 128, 64), activation="gelu", backward=True), "triton.tiles"),
        (problem_of((3, 768, 128, 64), activation="relu", backward=True), "hopper.resident"),
        (problem_of((64, 256, 28, 28)), "triton.held"),
        (problem_of((8, 128, 256, 256), backward=True), "hopper.resident"),
        (problem_of((4, 256, 128, 128), dtype=torch.float32, activation=None, backward=True), "hopper.resident"),
        (problem_of((1, 512, 256, 256), backward=True), "hopper.resident"),
        (problem_of((1, 256, 512, 512), backward=True), "hopper.resident"),
        (problem_of((1, 256, 512, 512), activation="relu", backward=True), "hopper.resident"),
        (over_batch((128, 64, 112, 112), backward=True), "hopper.resident"),
        (problem_of((1, 128, 20, 256, 256)), "hopper.resident"),
        (problem_of((9, 256, 100, 76), backward=True), "hopper.resident"),  # 93 % of the chunks are full
        (problem_of((32, 256, 56, 56), backward=True), "hopper.resident"),  # 77 %
        (problem_of((60, 128, 58, 40), 16, backward=True), "triton.tiles"),  # 57 %
        (problem_of((5, 5, 32, 128, 305), 5, torch.float32, None, backward=True), "hopper.resident"),
        (problem_of((6, 8, 560, 1000), 2, activation="relu", backward=True), "hopper.resident"),  # 366 chunks
        (problem_of((16, 128, 128, 160), 128, backward=True), "hopper.resident"),
        (problem_of((30, 64, 144, 144), 64, backward=True), "hopper.resident"),
        (problem_of((55, 909, 48, 105), 909, torch.float16, "relu", backward=True), "triton.rows"),  # short planes
        (problem_of((12, 256, 200, 100), 256, activation="relu", backward=True), "hopper.resident"),
        (problem_of((20, 64, 80, 80), dtype=torch.float32, last=True), "triton.tiles"),  # halves of vectors of 32 bits
        (over_batch((32, 256, 56, 56)), "hopper.resident"),
        (problem_of((32, 256, 56, 56)), "hopper.resident"),  # planes that tiles do not divide
        (summed((32, 256, 56, 56)), "triton.tiles"),
        (problem_of((32, 256, 56, 56), activation="gelu"), "triton.tiles"),
        (over_batch((32, 256, 56, 56), backward=True), "hopper.resident"),
        (over_batch((32, 256, 56, 56), modulated=True), "triton.tiles"),
        (over_batch((32, 256, 56, 56), backward=True, training=False), "triton.tiles"),
        (over_batch((8, 256, 56, 56)), "triton.tiles"),
        (over_batch((33, 256, 55, 55)), "triton.tiles"),
        (over_batch((47, 96, 109, 109), "relu", torch.float16, backward=True), "hopper.resident"),  # shifted planes
        (over_batch((188, 60, 57, 57), "leaky_relu", torch.float16, backward=True), "hopper.resident"),  # 79 %
        (over_batch((97, 192, 23, 49), "relu", backward=True), "triton.tiles"),  # 55 %
        (problem_of((59, 512, 560), 8, torch.float32, "relu", backward=True), "hopper.resident"),
        (over_batch((230, 512, 31, 17), None, torch.float32, backward=True), "triton.tiles"),  # 52 %
        (problem_of((38, 192, 177, 177), 192, activation=None, backward=True), "hopper.resident"),
        (problem_of((16, 256, 57, 57), activation=None, backward=True), "hopper.resident"),  # 27 MB
        (problem_of((8, 8, 149191), 8, activation="relu", backward=True), "triton.tiles"),  # 19 MB
        (problem_of((4, 4, 731, 600), 4, torch.float32, "silu", backward=True), "hopper.resident"),
        (problem_of((26, 320, 593), 32, torch.float32, None, modulated=True, backward=True), "hopper.resident"),
        (problem_of((9, 64, 4200), 8, torch.float32, None, modulated=True, backward=True), "triton.tiles"),
        (problem_of((33, 512, 1163), 32, activation=None, modulated=True, backward=True), "hopper.resident"),  # 57 %
        (problem_of((72, 128, 2147), 32, torch.float16, "silu", backward=True), "triton.tiles"),  # 52 %
        (problem_of((12, 512, 3039), 32, backward=True), "hopper.resident"),  # 74 %
        (problem_of((58, 128, 4019), 32, activation=None, backward=True), "hopper.resident"),
        (problem_of((3, 768, 160, 160), 768, torch.float16, None), "hopper.resident"),
        (problem_of((30, 128, 140, 144), 128), "hopper.resident"),
        (problem_of((3, 768, 120, 120), 768, torch.float16, None), "triton.whole"),
        (problem_of((3, 768, 160, 160), 768, torch.float32, None), "triton.whole"),
        (problem_of((3, 200, 105, 335), 200, torch.float16, None, last=True), "triton.tiles"),  # slabs of a vector
        (over_batch((60, 64, 32, 32), dtype=torch.float16), "hopper.resident"),  # short planes in one wave
        (over_batch((100, 128, 24, 24), None), "hopper.resident"),
        (over_batch((60, 64, 32, 32), "gelu"), "triton.tiles"),
        (over_batch((60, 16, 1024, 1), None, torch.float32), "triton.tiles"),
        (over_batch((60, 64, 32, 32), backward=True), "triton.tiles"),
        (over_batch((60, 64, 32, 32), modulated=True), "triton.tiles"),
        (over_batch((45, 256, 28, 28)), "triton.tiles"),  # chunks of five tiles
        (over_batch((100, 512, 16, 16), None), "triton.tiles"),  # several waves
        (over_batch((60, 64, 32, 32), post_add=(60, 64, 32, 32)), "triton.tiles"),
        (over_batch((32, 64, 56, 56)), "triton.tiles"),  # longer planes
        (over_batch((8, 64, 64, 32)), "triton.held"),
        (over_batch((6, 48, 304, 300), "silu", torch.float16), "hopper.resident"),
        (over_channels((2, 96, 8, 8)), "hopper.columns"),
        (over_channels((2, 96, 7, 12), torch.float32, backward=True), "hopper.columns"),
        (over_channels((2, 96, 7, 7)), "triton.columns"),
        (over_channels((1, 7000, 16, 16), backward=True), "triton.columns"),
        (of_rows(4096, 16384), "hopper.rows"),
        (of_rows(8220, 10240, torch.float16, activation="gelu"), "hopper.row_parts"),
        (of_rows(8220, 10240, activation="relu"), "hopper.rows"),
        (of_rows(8220, 14336, activation="relu"), "hopper.row_parts"),
        (of_rows(4096, 16384, family="rms_norm", activation="relu"), "hopper.rows"),
        (of_rows(4096, 14336, family="rms_norm"), "hopper.rows"),
        (of_rows(4096, 8192), "triton.rows"),
        (of_rows(1000, 16384), "hopper.row_parts"),
        (of_rows(1600, 8193), "hopper.row_parts"),
        (of_rows(400, 16384), "triton.rows"),  # little input
        (of_rows(260, 16387, torch.float16), "hopper.row_parts"),  # narrow loads
        (of_rows(66, 65536), "triton.rows"),
        (of_rows(40, 61593, family="rms_norm", activation="gelu"), "hopper.row_parts"),
        (of_rows(20, 61593, family="rms_norm", activation="gelu"), "triton.rows"),
        (of_rows(47, 61182, family="rms_norm", activation="silu"), "triton.rows"),
        (of_rows(1056, 16384), "hopper.row_parts"),
        (of_rows(1056, 16384, family="rms_norm"), "hopper.rows"),
        (of_rows(264, 24576, family="rms_norm"), "hopper.row_parts"),
        (of_rows(952, 55435, family="rms_norm", activation="silu"), "hopper.row_parts"),
        (of_rows(40, 250001), "triton.rows"),  # more parts than there are blocks for the teams of odd rows
        (of_rows(1000, 16384, family="rms_norm", activation="silu"), "hopper.row_parts"),
        (of_rows(1000, 16384, family="rms_norm"), "triton.rows"),
        (of_rows(5000, 9914, family="rms_norm"), "hopper.row_parts"),
        (of_rows(700, 12292, family="rms_norm", activation="silu"), "triton.rows"),
        (of_rows(300, 9001, torch.float16, activation="silu"), "hopper.row_parts"),
        (of_rows(200, 9001, activation="silu"), "triton.rows"),  # little input
        (of_rows(700, 9001), "hopper.row_parts"),
        (of_rows(700, 9000, activation="silu"), "hopper.row_parts"),
        (of_rows(300, 9001), "triton.rows"),
        (of_rows(472, 11008, torch.float16, activation="silu"), "hopper.row_parts"),
        (of_rows(452, 11008, torch.float16, activation="silu"), "triton.rows"),
        (of_rows(700, 9000), "triton.rows"),
        (of_rows(400, 12001, family="rms_norm", activation="silu"), "hopper.row_parts"),
        (of_rows(300, 12001, family="rms_norm", activation="silu"), "triton.rows"),
        (of_rows(400, 12001, family="rms_norm"), "triton.rows"),
        (of_rows(1500, 12001, family="rms_norm"), "hopper.row_parts"),
        (of_rows(1000, 12288, torch.float32, activation="relu"), "hopper.row_parts"),
        (of_rows(300, 12288, torch.float32, activation="relu"), "triton.rows"),
        (of_rows(2000, 8196, torch.float32, "rms_norm"), "triton.rows"),
        (of_rows(2000, 16384, torch.float32, "rms_norm"), "hopper.row_parts"),
        (of_rows(9157, 5491, torch.float32, "rms_norm", activation="silu"), "hopper.row_parts"),
        (of_rows(4000, 5002, torch.float32), "triton.rows"),  # pairs
        (of_rows(3000, 6144, torch.float32, activation="gelu"), "triton.rows"),
        (of_rows(9000, 4001, torch.float32, activation="gelu"), "triton.rows"),
        (of_rows(5000, 5003, activation="silu"), "hopper.row_parts"),
        (of_rows(2000, 5003, activation="silu"), "triton.rows"),
        (of_rows(5000, 5003), "triton.rows"),
        (of_rows(3000, 8192, activation="silu"), "triton.rows"),
        (of_rows(9000, 3001, activation="silu"), "triton.rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_read_is_chosen_where_it_pays(problem: Problem, name: str) -> None:
    assert choose(problem).name == name
    assert choose(problem, alone=False).name.startswith("triton.")


LARGE = (8, 128, 256, 256)


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize(
    ("problem", "default"),
    [
        (problem_of(LARGE), resident_for),
        (problem_of((8, 256, 128, 128), last=True), slabs.slabs_for),
        (of_rows(300, 9001, torch.float16, activation="silu"), row_parts.row_parts_for),
        (over_channels((2, 96, 8, 8)), columns.columns_for),
    ],
    ids=("resident", "slabs", "row_parts", "columns"),
)
def test_a_new_problem_looks_for_its_default_once(problem: Problem, default: Any) -> None:
    default.cache_clear()
    choose(problem).plan(problem)
    assert default.cache_info().misses == 1
    assert default.cache_info().hits >= 1


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (summed(LARGE), ResidentSumForward),
        (summed(LARGE, keeps_sum=False, pre_add=LARGE[:2]), ResidentSumForward),
        (summed(LARGE, pre_add=LARGE, pre_gate=LARGE[:2], post_add=LARGE), ResidentSumForward),
        (summed(LARGE, activation="gelu", pre_add=LARGE, pre_bias=LARGE[1:2]), TilesSumForward),
        (summed(LARGE, backward=True), ResidentSumBackward),
        (before_activation(LARGE), ResidentSumForward),
        (before_activation(LARGE, backward=True), ResidentSumBackward),
        (before_activation(LARGE, backward=True, activation="silu"), TilesSumBackward),
        (before_activation((4, 256, 128, 128), True, torch.float32, "silu"), ResidentSumBackward),
        (over_batch(LARGE, pre_add=LARGE), ResidentSumForward),
        (over_batch(LARGE, post_add=LARGE, backward=True), ResidentSumBackward),
        (summed(LARGE, last=True), SlabsSumForward),
        (summed(LARGE, last=True, backward=True), TilesSumBackward),
        (of_numbers(LARGE, grad_numbers=True), ResidentSumBackward),
    ],
    ids=[
        "before",
        "numbers",
        "product",
        "bias",
        "gradient",
        "behind",
        "backward",
        "rounded",
        "single",
        "batch",
        "batch, backward",
        "slabs",
        "slabs, backward",
        "gradient of numbers",
    ],
)
def test_the_sums_around_a_large_norm_are_fused(problem: Problem, expected: type) -> None:
    """By the instance that reads once where it can: a sum before the norm, its gradient, and what is behind the norm,
    where dz is not rounded."""
    last = problem.layout.order == "channels_last"
    assert choose(replace(problem, added=None)).name == ("hopper.slabs" if last else "hopper.resident")
    assert type(dispatch._sum_plan(("a large norm", problem), problem)) is expected
    assert choose(problem, alone=False).name == "triton.tiles"


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (problem_of((2, 64, 64, 64), dtype=torch.float64), "float32"),
        (problem_of((2, 64, 64, 64), last=True), "channels_first"),
        (problem_of((2, 64, 31, 31)), "vectors of 16 bytes, which the forward needs"),
        (apart(problem_of((2, 64, 64, 64)), sample=4), "vectors of 16 bytes"),
        (apart(problem_of((2, 64, 64, 64)), channel=8), "not packed"),
        (summed((2, 64, 31, 31), backward=True), "which sums around the norm need"),
        (problem_of((2, 64, 3, 5), backward=True), "shorter than two"),
        (apart(problem_of((2, 64, 31, 31), backward=True), sample=4), "samples are not packed"),
        (problem_of((1 << 14, 1 << 14, 3, 7), backward=True), "too many of these"),
        (added_apart(summed((2, 64, 64, 64)), sample=4), "vectors of 16 bytes"),
        (replace(problem_of((2, 64, 64, 64)), device="cpu"), "runs on cuda"),
        (problem_of((1, 32, 4096, 4096)), "does not fit"),
        (problem_of((0, 32, 8, 8)), "no elements"),
        (replace(problem_of((8, 128, 256, 256), backward=True), direction="backward_gamma_beta"), "gamma_beta"),
        (problem_of((1, 1 << 17, 8, 8), 1 << 16), "too many groups"),
        (over_batch((32, 256, 56, 56), modulated=True), "scale and shift"),
        (over_batch((32, 256, 56, 56), backward=True, training=False), "are given"),
        (over_batch((400, 4, 300, 304)), "too long"),
        (of_numbers(LARGE, norm=norm_of("batch_norm"), grad_numbers=True), "over all samples"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unsupported_problem_is_told_why(problem: Problem, words: str) -> None:
    reason = RESIDENT.supports(problem)
    assert reason is not None
    assert words in reason


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (problem_of((2, 64, 8, 8), dtype=torch.float64, last=True), "float32"),
        (problem_of((2, 64, 8, 8)), "channels_last"),
        (problem_of((2, 36, 8, 8), 4, last=True), "16 bytes"),
        (apart(problem_of((2, 64, 8, 8), last=True), sample=4), "16 bytes"),
        (apart(problem_of((2, 64, 8, 8), last=True), spatial=4), "16 bytes"),
        (added_apart(summed((2, 64, 8, 8), last=True), sample=4), "16 bytes"),
        (replace(problem_of((2, 64, 8, 8), last=True), device="cpu"), "runs on cuda"),
        (problem_of((1, 512, 512, 512), last=True), "does not fit"),
        (summed((2, 64, 8, 8), last=True, backward=True), "adds nothing around the norm"),
        (replace(problem_of((2, 64, 8, 8), last=True), added=summed((2, 64, 8, 8)).added), "not neighbours"),
        (summed((2, 64, 8, 8), last=True, pre_add=(2, 64, 8, 8), pre_bias=(64,)), "adds no bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unsupported_norm_of_channels_last_is_told_why(problem: Problem, words: str) -> None:
    reason = instances.SLABS.supports(problem)
    assert reason is not None
    assert words in reason


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (over_channels((2, 64, 4, 4), torch.float64), "float32"),
        (over_channels((2, 64, 4, 4), last=True), "channels_first"),
        (over_channels((2, 64, 5, 5)), "vectors of 16 bytes"),
        (apart(over_channels((2, 64, 4, 4)), sample=4), "begin at 16 bytes"),
        (apart(over_channels((2, 64, 4, 4)), channel=4), "begin at 16 bytes"),
        (apart(over_channels((2, 64, 4, 4)), spatial=1), "begin at 16 bytes"),
        (replace(over_channels((2, 64, 4, 4)), device="cpu"), "runs on cuda"),
        (over_channels((2, 7000, 4, 4), torch.float32, backward=True), "do not fit"),
        (problem_of((2, 64, 64, 64)), "single positions"),
        (replace(over_channels((2, 64, 4, 4), backward=True), direction="backward_gamma_beta"), "gamma_beta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unsupported_norm_over_channels_is_told_why(problem: Problem, words: str) -> None:
    reason = instances.COLUMNS.supports(problem)
    assert reason is not None
    assert words in reason


NO_ROWS = [
    (of_rows(9, 64, torch.float64), "float32"),
    (apart(of_rows(9, 64), channel=1), "packed memory"),
    (replace(of_rows(9, 64), device="cpu"), "runs on cuda"),
    (of_rows(0, 64), "no elements"),
    (replace(of_rows(9, 64), direction="backward_gamma_beta"), "gamma_beta"),
    (replace(of_rows(9, 64), direction="forward", grad_layout=None), "runs the backward"),
    (problem_of((2, 64, 64, 64), backward=True), "takes rows"),
]


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize(
    ("instance", "problem", "words"),
    [
        *((instance, *case) for instance in (instances.ROWS, instances.ROW_PARTS) for case in NO_ROWS),
        (instances.ROWS, of_rows(9, 12289), "16 bytes"),
        (instances.ROWS, of_rows(1, 63), "16 bytes"),
        (instances.ROWS, apart(of_rows(9, 64), sample=4), "16 bytes"),
        (instances.ROWS, of_rows(9, 16392), "do not fit"),
        (instances.ROW_PARTS, of_rows(9, 15), "two vectors"),
        (instances.ROW_PARTS, of_rows(9, 7, torch.float32), "two vectors"),
        (instances.ROW_PARTS, apart(of_rows(9, 65), sample=4), "begin at other places"),
        (instances.ROW_PARTS, of_rows(9, 250001), "do not fit"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "name", ""),
)
def test_unsupported_rows_are_told_why(instance: Instance, problem: Problem, words: str) -> None:
    reason = instance.supports(problem)
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize(
    ("problem", "warps", "slots", "held", "many"),
    [
        (of_rows(9, 16384), 16, 3, True, 2),
        (replace(of_rows(9, 16384), weight_dtype="float32"), 16, 3, False, 2),
        (of_rows(9, 12288), 8, 3, True, 2),
        (of_rows(9, 10240), 8, 4, True, 2),
        (of_rows(9, 64), 8, 4, True, 11),
    ],
)
def test_rows_share_memory_with_their_weight_where_both_fit(
    problem: Problem, warps: int, slots: int, held: bool, many: int
) -> None:
    found = rows.configs(problem)
    assert found[0] == rows.rows_for(problem) == rows.RowsConfig(warps, slots, held)
    assert len(set(found)) == len(found) > many
    assert all(rows.shared_bytes(problem, one) <= config.SHARED_BYTES for one in found)
    without = rows.rows_for(replace(problem, weight_dtype=None))
    assert without is not None
    assert not without.held


@pytest.mark.usefixtures("available")
def test_rows_of_tensors_that_lie_whole_vectors_farther_apart_than_others_are_taken() -> None:
    assert instances.ROW_PARTS.supports(apart(of_rows(9, 65), sample=8)) is None


PARTED = [
    of_rows(952, 55435, family="rms_norm", activation="silu"),
    of_rows(1, 65536),
    of_rows(7, 16386, torch.float16),
    of_rows(3000, 5003, activation="gelu"),
    of_rows(31, 100001, torch.float32),
    of_rows(270, 20004, torch.float32, "rms_norm"),
    of_rows(40, 33),
    replace(of_rows(500, 12289), weight_dtype="float32"),
]


@pytest.mark.parametrize("count", [PROCESSORS, 60, 148])
@pytest.mark.parametrize("problem", PARTED)
def test_teams_have_rows_that_begin_at_one_place_and_parts_cover_them(problem: Problem, count: int) -> None:
    found, each = row_parts.configs(problem, count), row_parts.apart(problem)
    assert found[0] == row_parts.row_parts_for(problem, count)
    assert len(set(found)) == len(found) > 1
    assert max(Counter((one.warps, one.blocks) for one in found).values()) <= 4
    vector = 16 // (4 if problem.dtype == "float32" else 2)
    for one in found:
        assert one.teams * problem.layout.sample % vector == 0
        assert one.parts * one.teams <= count * one.blocks
        assert one.registers * 32 * one.warps * one.blocks <= 1 << 16
        chunk = row_parts.chunk(problem, one)
        assert one.parts * chunk * vector >= problem.view.channels - problem.view.channels % vector
        assert (row_parts.steps(problem, one) - 1) * 32 * one.warps < chunk
        assert chunk <= row_parts.steps(problem, one) * 32 * one.warps
        assert row_parts.shared_bytes(problem, one) * one.blocks <= config.SHARED_BYTES
        # as few teams as take as many turns, and no more turns than the blocks need
        turns, most = -(-problem.view.samples // one.teams), count * one.blocks // one.parts // each * each
        assert turns == -(-problem.view.samples // most)
        assert one.teams == each or -(-problem.view.samples // (one.teams - each)) > turns


@pytest.mark.parametrize(
    ("problem", "ends"),
    [
        (of_rows(9, 64), False),
        (of_rows(9, 60), True),
        (of_rows(9, 60, torch.float32), False),
        (apart(of_rows(9, 64), sample=4), True),
        (apart(of_rows(9, 60), sample=4), True),
        (apart(of_rows(9, 64), sample=8), False),
    ],
)
def test_rows_have_ends_where_they_or_their_distances_are_no_whole_vectors(problem: Problem, ends: bool) -> None:
    assert row_parts.shifted(problem) is ends


@pytest.mark.parametrize(
    ("problem", "parts", "teams", "warps", "blocks"),
    [
        (of_rows(6057, 31620, torch.float16), 8, 32, 4, 2),
        (of_rows(1000, 16384), 4, 63, 4, 2),
        (of_rows(4000, 12288, activation="silu"), 4, 66, 4, 2),
        (of_rows(24986, 9914, activation="gelu"), 5, 104, 4, 4),
        (of_rows(70, 131075, torch.float32, "rms_norm"), 33, 4, 8, 1),
    ],
)
def test_parts_and_teams_are_those_that_were_fast(
    problem: Problem, parts: int, teams: int, warps: int, blocks: int
) -> None:
    assert row_parts.row_parts_for(problem, PROCESSORS) == row_parts.RowPartsConfig(parts, teams, warps, blocks)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("shape", "lanes"),
    [
        ((16, 320, 128, 128), 8), ((2, 1024, 64, 64), 4), ((1, 2048, 48, 48), 2), ((1, 256, 64, 64), 2),
        ((64, 32, 2, 4), 1), ((150, 32, 4, 6), 4),
    ],
)  # fmt: skip
def test_a_block_has_fewer_positions_where_channels_are_many_or_blocks_few(
    shape: tuple[int, ...], lanes: int, backward: bool
) -> None:
    problem = over_channels(shape, backward=backward)
    found = columns.columns_configs(problem, PROCESSORS)
    assert found[0] == columns.columns_for(problem, PROCESSORS)
    assert found[0].lanes == lanes
    assert len(set(found)) == len(found) > 15
    assert all(columns.shared_bytes(problem, one) <= config.SHARED_BYTES for one in found)


def test_a_backward_has_the_chunks_that_its_channels_fill() -> None:
    """And those on as many blocks as have work, and larger ones where a unit of float32 has many."""
    many_blocks, long_chunks = ResidentConfig(512, 2, 1, 1, 6), ResidentConfig(1024, 4, 1, 1, 3)
    short_chunks, three_tiles = ResidentConfig(256, 2, 1, 1, 8), ResidentConfig(256, 4, 3, 1, 4)
    for shape, groups, dtype, chosen in (
        ((32, 512, 64, 64), 32, "bfloat16", many_blocks),
        ((16, 320, 64, 64), 32, "bfloat16", many_blocks),
        ((8, 128, 256, 256), 32, "bfloat16", long_chunks),
        ((38, 192, 177, 177), 192, "bfloat16", long_chunks),
        ((41, 320, 72, 72), 32, "float16", short_chunks),  # 84 % full, and others 63 %
        ((1, 512, 256, 256), 32, "bfloat16", long_chunks),
        ((1, 256, 512, 512), 32, "bfloat16", SMALL),  # two waves behind, with leaders
        ((2, 320, 256, 256), 32, "bfloat16", long_chunks),
        ((5, 320, 112, 112), 4, "float32", three_tiles),  # which planes fill best
    ):
        problem = problem_of(shape, groups, getattr(torch, dtype), backward=True)
        assert resident_for(problem, PROCESSORS) == chosen, shape
    assert resident_for(over_batch((47, 96, 104, 108), backward=True), PROCESSORS) == long_chunks
    assert resident_for(over_batch((47, 96, 109, 109), backward=True), PROCESSORS) == many_blocks
    assert resident_for(summed((32, 512, 64, 64), backward=True), PROCESSORS) == SMALL
    assert resident_for(summed((16, 320, 100, 100), backward=True), PROCESSORS) == ResidentConfig(256, 4, 2, 2, 4)
    assert resident_for(problem_of((7, 40, 80, 80, 80), 4, backward=True), PROCESSORS) is None


@pytest.mark.usefixtures("available")
def test_the_first_configuration_is_the_default_and_each_spread_comes_once() -> None:
    problem = problem_of((1, 512, 256, 256))
    found = RESIDENT.configs(problem)
    assert found[0] == resident_for(problem, PROCESSORS)
    spreads = Counter((one.vectors, one.warps, one.tiles, spread(problem, one, PROCESSORS)) for one in found)
    assert len(found) > 20
    assert max(spreads.values()) == 1


# --- what is compiled ---


def compiled(problem: Problem, chosen: ResidentConfig, target: str, drop: tuple[int, ...] = ()) -> Any:
    """The kernel of a plan, compiled with no GPU present; ``drop`` are the operands that the call does not have."""
    plan: Any = RESIDENT.plan(problem, chosen)
    data, fp32 = torch.empty(16, dtype=getattr(torch, problem.dtype)), torch.empty(16)
    tensors: list[torch.Tensor | None]
    tensors = [*[data] * (3 if problem.backward else 2), *[fp32] * 7, torch.empty(16, dtype=torch.int64)]
    added = problem.added or Added()
    behind = None if added.post_layout is None else data
    if problem.backward:
        tensors += [data if added.grad_sum else None, behind, behind]
    else:
        before, numbers = None if added.pre_layout is None else data, fp32 if problem.numbered else None
        tensors += [before, numbers, behind, data if added.keeps_sum else None]
    return compiled_launch(plan.launch, tensors, target, drop)


def compiled_launch(launch: Launch, tensors: Sequence[torch.Tensor | None], target: str, drop: tuple[int, ...]) -> Any:
    present = tuple(None if place in drop else tensor for place, tensor in enumerate(tensors))
    like = source(Made(launch, present))
    made = GluonASTSource(launch.kernel, like.signature, like.constants, like.attrs)
    return triton.compile(made, target=TARGETS[target], options=launch.options)


SMALL = ResidentConfig(512, 4, 1, 2, 4)
NO_MODULATION, NO_PARAMETERS = (4, 5, 8), (2, 3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize(
    ("problem", "chosen", "drop", "target"),
    [
        (problem_of((8, 128, 256, 256)), ResidentConfig(512, 4, 2, 2, 4), NO_MODULATION, "sm_90"),
        (problem_of((8, 256, 100, 76), dtype=torch.float16, activation="gelu"), SMALL, (), "sm_90"),
        (problem_of((8, 256, 52, 50), dtype=torch.float32, activation=None), SMALL, NO_PARAMETERS, "sm_90"),
        (problem_of((1, 128, 1024, 1024)), ResidentConfig(1024, 4, 2, 2, 2), NO_MODULATION, "sm_100"),
        (problem_of((2, 320, 128, 128), activation="leaky_relu"), ResidentConfig(512, 4, 5, 2, 4), (), "sm_100"),
        (problem_of((8, 128, 256, 256), backward=True), SMALL, (5, 6), "sm_90"),
        (problem_of((8, 256, 100, 76), backward=True), SMALL, (5, 6), "sm_90"),
        (
            problem_of((3, 96, 64, 64), 32, torch.float16, "gelu", backward=True),
            ResidentConfig(512, 4, 2, 2, 2),
            (),
            "sm_90",
        ),
        (problem_of((8, 128, 256, 256), activation=None, backward=True), SMALL, (3, 4, 5, 6, 9), "sm_100"),
        (summed((8, 128, 256, 256), backward=True), SMALL, (5, 6), "sm_90"),
        (of_numbers((8, 256, 64, 64), grad_numbers=True), SMALL, (5, 6), "sm_90"),
        (over_batch((32, 256, 56, 56), None), ResidentConfig(512, 4, 2, 2, 4), NO_MODULATION[:2], "sm_90"),
        (
            over_batch((32, 256, 56, 56), pre_add=(32, 256), post_add=(32, 256, 56, 56)),
            ResidentConfig(512, 4, 2, 2, 4),
            NO_MODULATION[:2],
            "sm_90",
        ),
        (over_batch((32, 256, 56, 56), "silu", backward=True), SMALL, (5, 6), "sm_90"),
        (over_batch((32, 256, 64, 64), backward=True, post_add=(32, 256, 64, 64)), SMALL, (5, 6), "sm_100"),
        (problem_of((8, 256, 81, 81), backward=True), SMALL, (5, 6), "sm_90"),
        (problem_of((4, 96, 45, 45), 32, torch.float32, "gelu", backward=True), SMALL, (), "sm_90"),
        (over_batch((25, 64, 13, 169), None, backward=True), ResidentConfig(128, 4, 4, 2, 4), (5, 6), "sm_100"),
        (summed((8, 128, 256, 256)), ResidentConfig(512, 4, 2, 2, 4), NO_MODULATION, "sm_90"),
        (
            summed((8, 256, 100, 76), keeps_sum=False, pre_add=(8, 256)),
            ResidentConfig(512, 4, 2, 2, 4),
            NO_MODULATION,
            "sm_90",
        ),
        (
            summed((8, 256, 52, 50), pre_add=(8, 256, 52, 50), pre_gate=(8, 256), post_add=(8, 256, 52, 50)),
            SMALL,
            (),
            "sm_100",
        ),
        (before_activation((8, 256, 100, 76)), SMALL, NO_MODULATION, "sm_90"),
        (before_activation((8, 128, 256, 256), True), ResidentConfig(512, 4, 2, 2, 2), (5, 6), "sm_90"),
        (before_activation((4, 256, 128, 128), True, torch.float32, "silu"), SMALL, (5, 6), "sm_100"),
    ],
    ids=[
        "even",
        "uneven",
        "short",
        "large",
        "one wave",
        "backward",
        "tiles that channels do not fill, backward",
        "uneven backward",
        "data alone",
        "gradient of a sum",
        "gradient of numbers",
        "across samples",
        "across samples, with sums",
        "across samples, backward",
        "across samples, behind, backward",
        "shifted planes, backward",
        "shifted planes in float32, backward",
        "shifted planes across samples, backward",
        "sum",
        "sum with numbers",
        "sum with a product, and behind",
        "behind",
        "behind, backward",
        "behind, backward in float32",
    ],
)
def test_compiles(problem: Problem, chosen: ResidentConfig, drop: tuple[int, ...], target: str) -> None:
    """Copies and stores are 16 bytes wide, and the registers suffice for the blocks of a multiprocessor."""
    found = compiled(problem, chosen, target, drop)
    text = found.asm["ptx"]
    assert "cp.async.cg.shared.global" in text
    assert " 0x10, " in text.replace("[ ", "[")
    assert "st.global.v4.b32" in text
    assert "cp.async.ca" not in text
    place = spread(problem, chosen, PROCESSORS)
    assert place is not None
    slots = (2 if problem.backward else 1) * (place.lag + 1) * place.chunk * 16
    assert slots <= found.metadata.shared <= slots + config.SCRATCH_BYTES
    assert found.metadata.launch_cooperative_grid


@pytest.mark.parametrize(
    ("problem", "drop", "target"),
    [
        (over_channels((4, 320, 64, 64)), (4, 5), "sm_90"),
        (over_channels((4, 100, 9, 20), torch.float32, activation="silu"), (), "sm_100"),
        (over_channels((4, 320, 64, 64), torch.float16, activation="gelu", backward=True), (5, 6, 10, 11), "sm_90"),
        (over_channels((4, 33, 9, 8), backward=True), (3, 4, 5, 6, 7, 9, 10, 11), "sm_90"),
    ],
    ids=["even", "uneven", "backward", "data alone"],
)
def test_norms_over_channels_compile(problem: Problem, drop: tuple[int, ...], target: str) -> None:
    """Copies and stores are 16 bytes wide, and a block takes the shared memory that its configuration says."""
    chosen = columns.columns_for(problem, PROCESSORS)
    assert chosen is not None
    plan = (ColumnsBackward if problem.backward else ColumnsForward)(problem, chosen)
    data, fp32 = torch.empty(16, dtype=getattr(torch, problem.dtype)), torch.empty(16)
    tensors = [*[data] * (3 if problem.backward else 2), *[fp32] * (9 if problem.backward else 6)]
    found = compiled_launch(plan.launch, tensors, target, drop)
    text = found.asm["ptx"]
    assert "cp.async.cg.shared.global" in text
    assert "st.global.v4.b32" in text
    assert "cp.async.ca" not in text
    assert found.metadata.shared <= columns.shared_bytes(problem, chosen)


@pytest.mark.parametrize(
    ("problem", "drop", "target"),
    [
        (of_rows(4096, 16384), (8, 9), "sm_90"),
        (of_rows(4096, 9000, torch.float16, "rms_norm", activation="gelu"), (4, 5, 8, 9), "sm_90"),
        (replace(of_rows(9, 8192, torch.float32), weight_dtype=None), (3, 4, 7), "sm_100"),
    ],
    ids=["even", "uneven", "the gradients of the only block"],
)
def test_rows_compile(problem: Problem, drop: tuple[int, ...], target: str) -> None:
    """Copies and stores are 16 bytes wide, a block takes the shared memory that its configuration says, and threads
    meet twice a turn, before the two sums that warps leave, and twice before the first sums of columns are stored.
    Before Triton 3.9 they meet between the two sums of warps too."""
    chosen = rows.rows_for(problem)
    assert chosen is not None
    data, fp32 = torch.empty(16, dtype=getattr(torch, problem.dtype)), torch.empty(16)
    tensors = [*[data] * 5, *[fp32] * 5]
    found = compiled_launch(RowsBackward(problem, chosen, PROCESSORS).launch, tensors, target, drop)
    text = found.asm["ptx"]
    assert "cp.async.cg.shared.global" in text
    assert "st.global.v4.b32" in text
    assert "cp.async.ca" not in text
    assert found.metadata.shared == rows.shared_bytes(problem, chosen) - config.DRIVER_BYTES
    turns, *stores = text.split("st.global.b32")
    assert stores  # neighbouring threads store neighbours
    assert turns.count("bar.sync") in (5, 6)


@pytest.mark.parametrize(
    ("problem", "drop", "target", "single"),
    [
        (of_rows(4096, 32768), (4, 8, 9), "sm_90", False),
        (of_rows(952, 55435, torch.float16, "rms_norm", activation="gelu"), (4, 5, 8, 9), "sm_90", True),
        (of_rows(999, 20001, activation="silu"), (8, 9), "sm_90", True),
        (replace(of_rows(1, 40000, torch.float32), weight_dtype=None), (3, 4, 7), "sm_100", False),
    ],
    ids=["even", "ends", "ends and bias", "the gradients of the only team"],
)
def test_rows_in_parts_compile(problem: Problem, drop: tuple[int, ...], target: str, single: bool) -> None:
    """Copies and stores are 16 bytes wide, but for the ends of odd rows, and a block takes no more shared memory than
    its configuration says."""
    chosen = row_parts.row_parts_for(problem, PROCESSORS)
    assert chosen is not None
    data, fp32 = torch.empty(16, dtype=getattr(torch, problem.dtype)), torch.empty(16)
    tensors = [*[data] * 5, *[fp32] * 5, torch.empty(16, dtype=torch.int64)]
    plan = RowPartsBackward(problem, chosen)
    found = compiled_launch(plan.launch, tensors, target, drop)
    text = found.asm["ptx"]
    assert "cp.async.cg.shared.global" in text
    assert "cp.async.ca" not in text
    assert "st.global.v4.b32" in text
    assert ("st.global.b16" in text) is single
    assert 0 < row_parts.shared_bytes(problem, chosen) - config.DRIVER_BYTES - found.metadata.shared <= 1 << 10
    assert plan.launch.programs == chosen.parts * chosen.teams
    assert plan.launch.options[REGISTERS] == chosen.registers
    assert plan.launch.constants["BIAS"] is (problem.bias_dtype is not None)
    assert plan.words == problem.view.samples * chosen.parts


def test_a_backward_of_parts_that_cannot_run_together_goes_to_another_instance(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = row_parts.RowPartsConfig(4, 8, 4, 2)
    made = RowPartsBackward(of_rows(9, 40), chosen)
    made.on_gpu = False
    ones = lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype).fill_(1)  # noqa: E731
    calls: list[object] = []

    def refuse(*tensors: Any) -> None:
        assert tensors[4] is None  # without an activation no z is asked for, and no bias
        assert tensors[-1].numel() == 9 * 4
        assert not tensors[-1].any()
        raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")

    monkeypatch.setattr(made, "allocate", ones)
    monkeypatch.setattr(made, "launch", refuse)
    made.__dict__["other"] = lambda *arguments: calls.append(arguments) or Gradients(None, None, None, None, None)
    data, saved = torch.zeros(9, 40, dtype=torch.bfloat16), torch.zeros(9, 1)
    for _ in range(2):
        made(BackwardOperands(data, data, saved, saved, data[0], data[0]), (True,) * 3 + (False,) * 2)
    assert len(calls) == 2
    (message,) = caplog.messages
    assert message.startswith("hopper.row_parts: 32 blocks cannot run at the same time here; triton.")


@pytest.mark.parametrize(
    ("problem", "drop", "target"),
    [
        (problem_of((32, 512, 64, 64), last=True), NO_MODULATION, "sm_90"),
        (problem_of((9, 320, 31, 33), dtype=torch.float16, activation="gelu", modulated=True, last=True), (), "sm_90"),
        (problem_of((3, 128, 31, 33), 64, torch.float32, None, last=True), NO_PARAMETERS, "sm_100"),
        (problem_of((9, 64, 64, 64), 64, last=True), NO_MODULATION, "sm_90"),
        (summed(LARGE, last=True), NO_MODULATION, "sm_90"),
        (summed((8, 128, 96, 100), keeps_sum=False, last=True, pre_add=(8, 128)), NO_MODULATION, "sm_90"),
        (summed(LARGE, last=True, pre_add=LARGE, pre_gate=LARGE[:2], post_add=LARGE), (), "sm_100"),
    ],
    ids=["even", "uneven", "two lanes to a group", "as many groups as there may be", "sum", "numbers", "product"],
)
def test_slabs_compile(problem: Problem, drop: tuple[int, ...], target: str) -> None:
    """Copies and stores are 16 bytes wide, and a block takes the shared memory that its configuration says."""
    chosen = slabs.slabs_for(problem, PROCESSORS)
    assert chosen is not None
    place = slabs.spread(problem, chosen, PROCESSORS)
    assert place is not None
    added, data, fp32 = problem.added or Added(), torch.empty(16, dtype=getattr(torch, problem.dtype)), torch.empty(16)
    tensors = [*[data] * 2, *[fp32] * 7, torch.empty(16, dtype=torch.int64), data, fp32, data, data]
    there = added.pre_layout is not None, problem.numbered, added.post_layout is not None, added.keeps_sum
    absent = (place for place, one in enumerate(there, 10) if not one)
    found = compiled_launch(SlabsForward(problem, chosen, PROCESSORS).launch, tensors, target, (*drop, *absent))
    text = found.asm["ptx"]
    assert "cp.async.cg.shared.global" in text
    assert "st.global.v4.b32" in text
    assert "cp.async.ca" not in text
    slots = (place.lag + 1) * chosen.tiles * chosen.vectors * 16
    assert slots <= found.metadata.shared <= slots + slabs.scratch(problem, chosen)
    assert found.metadata.launch_cooperative_grid


@pytest.mark.parametrize(
    ("problem", "drop", "target"),
    [
        (problem_of((32, 512, 64, 64), last=True, backward=True), (5, 6), "sm_90"),
        (problem_of((32, 256, 75, 75), 32, torch.float16, "relu", last=True, backward=True), (5, 6), "sm_90"),
        (problem_of((9, 320, 31, 33), activation="gelu", modulated=True, last=True, backward=True), (6,), "sm_90"),
        (problem_of((3, 128, 31, 33), 64, torch.float32, None, last=True, backward=True), (3, 4, 5, 6), "sm_100"),
        (problem_of((9, 64, 64, 64), 64, last=True, backward=True), (5, 6, 9), "sm_90"),
        (problem_of((1, 512, 256, 256), last=True, backward=True), (5, 6), "sm_100"),
    ],
    ids=["even", "uneven", "two lanes to a group", "without parameters", "channels", "leaders"],
)
def test_slabs_of_a_backward_compile(problem: Problem, drop: tuple[int, ...], target: str) -> None:
    """The same of both tensors."""
    chosen = slabs.slabs_for(problem, PROCESSORS)
    assert chosen is not None
    place = slabs.spread(problem, chosen, PROCESSORS)
    assert place is not None
    data, fp32 = torch.empty(16, dtype=getattr(torch, problem.dtype)), torch.empty(16)
    tensors = [*[data] * 3, *[fp32] * 7, torch.empty(16, dtype=torch.int64)]
    found = compiled_launch(SlabsBackward(problem, chosen, PROCESSORS).launch, tensors, target, drop)
    text = found.asm["ptx"]
    assert "cp.async.cg.shared.global" in text
    assert "st.global.v4.b32" in text
    assert "cp.async.ca" not in text
    slots = 2 * (place.lag + 1) * chosen.tiles * chosen.vectors * 16
    assert slots <= found.metadata.shared <= slots + slabs.scratch(problem, chosen)
    assert found.metadata.launch_cooperative_grid


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_compiles_with_every_activation(name: str, dtype: torch.dtype) -> None:
    compiled(problem_of((8, 128, 256, 256), dtype=dtype, activation=name), SMALL, "sm_90")


def test_compiles_with_the_longest_formula() -> None:
    compiled(problem_of((8, 128, 256, 256), activation="gelu"), SMALL, "sm_90")


# --- calls that the plan passes on ---


class Other:
    """A plan that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, operands: Operands, *others: Any) -> Results:
        self.calls += 1
        return Results(operands.input, None, None, None)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> ResidentForward:
    """A plan whose operands are on the CPU, and which launches nothing."""
    made = ResidentForward(problem_of((8, 128, 256, 256)), SMALL, PROCESSORS)
    made.on_gpu, made.shape, made.strides = False, (64,), (1,)
    empty = lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(made, "allocate", empty)
    monkeypatch.setattr(made, "launch", lambda *tensors: None)
    made.__dict__["other"] = Other()
    return made


def called(plan: Plan, input: torch.Tensor, out: torch.Tensor | None = None) -> int:
    assert isinstance(plan, ResidentForward)
    plan(Operands(input), True, out)
    calls: int = plan.other.calls
    return calls


def test_tensors_that_begin_between_16_bytes_go_to_another_instance(
    plan: ResidentForward, caplog: pytest.LogCaptureFixture
) -> None:
    block = torch.zeros(72, dtype=torch.bfloat16)
    assert called(plan, block[:64]) == 0
    assert called(plan, block[1:65]) == 1
    assert called(plan, block[:64], torch.zeros(72, dtype=torch.bfloat16)[4:68]) == 2
    assert caplog.messages == ["hopper.resident: tensors do not begin at 16 bytes; triton.tiles runs"]


def test_blocks_that_cannot_run_together_go_to_another_instance(
    plan: ResidentForward, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refused:
        programs, calls = 528, 0

        def __call__(self, *tensors: Any) -> None:
            self.calls += 1
            raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")

    refused = Refused()
    monkeypatch.setattr(plan, "launch", refused)
    input = torch.zeros(64, dtype=torch.bfloat16)
    assert [called(plan, input) for _ in range(3)] == [1, 2, 3]
    assert refused.calls == 1
    assert caplog.messages == ["hopper.resident: 528 blocks cannot run at the same time here; triton.tiles runs"]


def test_a_backward_goes_to_another_instance_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ResidentBackward(problem_of((8, 128, 256, 256), backward=True), SMALL, PROCESSORS)
    made.on_gpu, made.shape, made.strides = False, (64,), (1,)
    empty = lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(made, "allocate", empty)
    monkeypatch.setattr(made, "launch", lambda *tensors: None)
    calls: list[object] = []
    made.__dict__["other"] = lambda *arguments: calls.append(arguments) or Gradients(None, None, None, None, None)
    block = torch.zeros(72, dtype=torch.bfloat16)
    wanted = (True, False, False, False, False)
    for grad_output, out, count in ((block[:64], None, 0), (block[2:66], None, 1), (block[:64], block[4:68], 2)):
        made(BackwardOperands(grad_output, block[:64], torch.zeros(1), torch.zeros(1)), wanted, out)
        assert len(calls) == count


@pytest.mark.parametrize("unaligned", ["input", "pre_add", "post_add", "out", "sum_out", None])
def test_each_tensor_of_a_forward_with_sums_begins_at_16_bytes(
    unaligned: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = 8, 128, 256, 256
    plan = ResidentSumForward(summed(shape, pre_add=shape, post_add=shape), SMALL, PROCESSORS)
    monkeypatch.setattr(SumForward, "__call__", lambda *arguments: "itself")
    plan.__dict__["other"] = lambda *arguments: "the other"
    block = torch.zeros(72, dtype=torch.bfloat16)
    names = "input", "pre_add", "post_add", "out", "sum_out"
    input, pre_add, post_add, *into = (block[4:68] if name == unaligned else block[:64] for name in names)
    found = plan(Operands(input), Sums(pre_add=pre_add, post_add=post_add), True, *into)
    assert found == ("itself" if unaligned is None else "the other")


@pytest.mark.parametrize("unaligned", ["input", "grad_output", "behind", "grad_sum", "out", "post_out", None])
def test_each_tensor_of_a_backward_with_sums_begins_at_16_bytes(
    unaligned: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ResidentSumBackward(before_activation((8, 128, 256, 256), backward=True), SMALL, PROCESSORS)
    monkeypatch.setattr(SumBackward, "__call__", lambda *arguments: "itself")
    plan.__dict__["other"] = lambda *arguments: "the other"
    block, one = torch.zeros(72, dtype=torch.bfloat16), torch.zeros(1)
    names = "input", "grad_output", "behind", "grad_sum", "out", "post_out"
    tensors = [block[4:68] if name == unaligned else block[:64] for name in names]
    input, grad_output, behind, grad_sum, *into = tensors
    operands, wanted = BackwardOperands(grad_output, input, one, one), (True, False, False, False, False)
    found = plan(operands, wanted, behind, grad_sum, None, *into)
    assert found == ("itself" if unaligned is None else "the other")


def test_other_errors_of_a_launch_reach_the_caller(plan: ResidentForward, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*tensors: Any) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(plan, "launch", fails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        called(plan, torch.zeros(64, dtype=torch.bfloat16))
