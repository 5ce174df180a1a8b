"""The view, the memory orders, bytes and flops, by table; nothing here runs a kernel."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

from fusednorm.activations import FORMULAS, Activation
from fusednorm.norm import FAMILIES, Family, norm_of
from fusednorm.problem import (
    DIRECTIONS,
    DTYPE_BYTES,
    Added,
    Layout,
    Order,
    Problem,
    View,
    dense_layout,
    layout_of,
    view_of,
)


def first(sample: int, channel: int) -> Layout:
    return Layout("channels_first", sample, channel, 1)


def last(sample: int, spatial: int) -> Layout:
    return Layout("channels_last", sample, 1, spatial)


# --- the view ---


@pytest.mark.parametrize(
    ("family", "shape", "num_groups", "channel_dim", "view"),
    [
        ("group_norm", (2, 6, 4, 5), 3, 1, View(2, 3, 2, 20)),
        ("group_norm", (2, 4, 5, 6), 3, -1, View(2, 3, 2, 20)),
        ("group_norm", (2, 6), 3, 1, View(2, 3, 2, 1)),
        ("group_norm", (2, 6), 3, -1, View(2, 3, 2, 1)),
        ("group_norm", (2, 6, 4), 1, 1, View(2, 1, 6, 4)),
        ("group_norm", (2, 6, 4), 6, 1, View(2, 6, 1, 4)),
        ("group_norm", (2, 6, 2, 3, 4, 5), 2, 1, View(2, 2, 3, 120)),
        ("instance_norm", (2, 6, 4, 5), 0, 1, View(2, 6, 1, 20)),
        ("instance_norm", (2, 4, 5, 6), 0, -1, View(2, 6, 1, 20)),
        ("batch_norm", (2, 6, 4, 5), 0, 1, View(2, 6, 1, 20)),
        ("batch_norm", (2, 6), 0, 1, View(2, 6, 1, 1)),
        ("layer_norm", (2, 3, 8), 1, 1, View(6, 1, 8, 1)),
        ("layer_norm", (2, 3, 8), 2, 1, View(2, 1, 24, 1)),
        ("layer_norm", (2, 3, 8), 3, 1, View(1, 1, 48, 1)),
        ("rms_norm", (8,), 1, 1, View(1, 1, 8, 1)),
        ("group_norm", (0, 6, 4), 3, 1, View(0, 3, 2, 4)),
        ("group_norm", (2, 6, 0), 3, 1, View(2, 3, 2, 0)),
        ("instance_norm", (2, 0, 4), 0, 1, View(2, 0, 0, 4)),
        ("layer_norm", (3, 0), 1, 1, View(3, 1, 0, 1)),
    ],
)
def test_view(family: Family, shape: tuple[int, ...], num_groups: int, channel_dim: int, view: View) -> None:
    found = view_of(norm_of(family, num_groups, channel_dim), shape)
    assert found == view
    assert found.numel == prod(shape)
    assert found.channels == view.groups * view.group_channels


# --- memory orders ---

# The shape is (N, C, *) with three groups where it has four dimensions or fewer; strides in elements.
LAYOUTS: list[tuple[str, tuple[int, ...], tuple[int, ...], int, Layout | None]] = [
    ("contiguous", (2, 6, 4, 5), (120, 20, 5, 1), 1, first(120, 20)),
    ("channels_last", (2, 6, 4, 5), (120, 1, 30, 6), 1, last(120, 6)),
    ("NHWC", (2, 4, 5, 6), (120, 30, 6, 1), -1, last(120, 6)),
    ("NHWC in channels_first memory", (2, 4, 5, 6), (120, 5, 1, 20), -1, first(120, 20)),
    ("tokens", (2, 9, 6), (54, 6, 1), -1, last(54, 6)),
    ("samples sliced", (2, 6, 4, 5), (240, 20, 5, 1), 1, first(240, 20)),
    ("channels sliced", (2, 6, 4, 5), (240, 40, 5, 1), 1, first(240, 40)),
    ("samples expanded", (2, 6, 4, 5), (0, 20, 5, 1), 1, first(0, 20)),
    ("channels_last, channels padded", (2, 6, 4, 5), (160, 1, 40, 8), 1, last(160, 8)),
    ("channels_last, samples sliced", (2, 6, 4, 5), (240, 1, 30, 6), 1, last(240, 6)),
    ("height and width exchanged", (2, 6, 4, 5), (120, 20, 1, 4), 1, first(120, 20)),
    ("channels_last, exchanged", (2, 6, 4, 5), (120, 1, 6, 24), 1, last(120, 6)),
    ("channels before samples", (2, 6, 4, 5), (20, 40, 5, 1), 1, first(20, 40)),
    ("rank 2", (5, 6), (6, 1), 1, last(6, 0)),
    ("rank 2, transposed", (5, 6), (1, 5), 1, first(1, 5)),
    ("rank 2, every second column", (5, 6), (12, 2), 1, first(12, 2)),
    ("one position", (2, 6, 1, 1), (6, 1, 1, 1), 1, last(6, 0)),
    ("one sample", (1, 6, 4, 5), (120, 20, 5, 1), 1, first(0, 20)),
    ("one channel", (2, 1, 4, 5), (20, 20, 5, 1), 1, first(20, 0)),
    ("one channel, every second position", (2, 1, 5), (10, 10, 2), 1, last(10, 2)),
    ("a size of 1 has no stride", (2, 6, 4, 1), (24, 4, 1, 999), 1, first(24, 4)),
    ("width sliced", (2, 6, 4, 5), (240, 40, 10, 2), 1, None),
    ("height sliced", (2, 6, 4, 5), (240, 40, 10, 1), 1, None),
    ("width padded", (2, 6, 4, 5), (144, 24, 6, 1), 1, None),
    ("channels expanded", (2, 6, 4, 5), (20, 0, 5, 1), 1, None),
    ("positions expanded", (2, 6, 4, 5), (6, 1, 0, 0), 1, None),
    ("one number", (2, 6, 4, 5), (0, 0, 0, 0), 1, None),
    ("samples fastest", (2, 6, 4, 5), (1, 40, 10, 2), 1, None),
    ("channels_last, channels strided", (2, 6, 4, 5), (240, 2, 60, 12), 1, None),
    ("channels_last, height sliced", (2, 6, 4, 5), (240, 1, 60, 6), 1, None),
]


@pytest.mark.parametrize(
    ("shape", "strides", "channel_dim", "layout"), [pytest.param(*row[1:], id=row[0]) for row in LAYOUTS]
)
def test_layout(shape: tuple[int, ...], strides: tuple[int, ...], channel_dim: int, layout: Layout | None) -> None:
    for family, groups in (("group_norm", 1), ("instance_norm", 0), ("batch_norm", 0)):
        assert layout_of(norm_of(family, groups, channel_dim), shape, strides) == layout  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "strides", "trailing", "layout"),
    [
        ((2, 3, 8), (24, 8, 1), 1, last(8, 0)),
        ((2, 3, 8), (24, 8, 1), 2, last(24, 0)),
        ((2, 3, 8), (48, 16, 1), 1, last(16, 0)),
        ((2, 3, 8), (48, 16, 2), 1, first(16, 2)),
        ((5, 8), (1, 5), 1, first(1, 5)),
        ((5, 8), (0, 1), 1, last(0, 0)),
        ((8,), (1,), 1, last(0, 0)),
        ((8,), (3,), 1, first(0, 3)),
        ((5, 1), (1, 1), 1, last(1, 0)),
        ((2, 3, 8), (8, 16, 1), 1, None),
        ((2, 3, 8), (48, 8, 1), 1, None),
        ((2, 3, 8), (48, 16, 1), 2, None),
        ((5, 8), (1, 0), 1, None),
    ],
    ids=str,
)
def test_layout_of_rows(shape: tuple[int, ...], strides: tuple[int, ...], trailing: int, layout: Layout | None) -> None:
    assert layout_of(norm_of("layer_norm", trailing), shape, strides) == layout
    assert layout_of(norm_of("rms_norm", trailing), shape, strides) == layout


def test_positions_are_walked_as_another_tensor_walks_them() -> None:
    """A gradient whose positions lie in another sequence than the input's is not native, though each alone is."""
    shape, rows, columns = (2, 6, 4, 5), (120, 20, 5, 1), (120, 20, 1, 4)
    assert layout_of(norm_of("group_norm", 3), shape, columns, like=columns) == first(120, 20)
    assert layout_of(norm_of("group_norm", 3), shape, columns, like=rows) is None
    assert layout_of(norm_of("group_norm", 3), shape, rows, like=columns) is None


@pytest.mark.parametrize(
    ("shape", "strides", "wanted", "layout"),
    [
        ((2, 6, 4, 5), (120, 20, 5, 1), "channels_last", None),
        ((2, 6, 4, 5), (120, 1, 30, 6), "channels_first", None),
        ((5, 6), (6, 1), "channels_first", first(6, 1)),
        ((5, 6), (12, 2), "channels_last", None),
        ((2, 1, 5), (5, 5, 1), "channels_last", last(5, 1)),
        ((2, 1, 5), (10, 10, 2), "channels_first", None),
        ((2, 1, 1), (1, 1, 1), "channels_first", first(1, 0)),
    ],
    ids=str,
)
def test_layout_in_the_order_of_another_tensor(
    shape: tuple[int, ...], strides: tuple[int, ...], wanted: Order, layout: Layout | None
) -> None:
    assert layout_of(norm_of("group_norm", 1), shape, strides, wanted=wanted) == layout


@pytest.mark.parametrize("shape", [(0, 6, 4), (2, 6, 0), (2, 0, 4), (2, 6, 4, 0), (2, 6, 0, 4)], ids=str)
def test_nothing_has_a_layout(shape: tuple[int, ...]) -> None:
    for channel_dim in (1, -1):
        assert layout_of(norm_of("instance_norm", 0, channel_dim), shape, torch.empty(shape).stride()) is not None


@pytest.mark.parametrize(("order", "layout"), [("channels_first", first(120, 20)), ("channels_last", last(120, 6))])
def test_dense_layout_is_that_of_a_dense_tensor(order: Order, layout: Layout) -> None:
    memory_format = torch.contiguous_format if order == "channels_first" else torch.channels_last
    x = torch.empty(2, 6, 4, 5).contiguous(memory_format=memory_format)
    assert dense_layout(View(2, 3, 2, 20), order) == layout_of(norm_of("group_norm", 3), x.shape, x.stride()) == layout


# --- a problem ---


def problem(family: Family = "group_norm", activation: str | None = None, **changes: Any) -> Problem:
    view = View(4, 3, 2, 10) if family == "group_norm" else View(4, 6, 1, 10)
    if family in ("layer_norm", "rms_norm"):
        view = View(4, 1, 60, 1)
    made = Problem(
        norm_of(family, activation=activation), "forward", view, dense_layout(view, "channels_first"), "float32"
    )
    return replace(made, **changes)


def test_a_problem_is_a_key() -> None:
    assert problem() == problem()
    assert len({problem(), problem(), problem(dtype="float16"), problem(scale_dtype="float32")}) == 3
    with pytest.raises(FrozenInstanceError):
        problem().dtype = "float16"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("family", "statistics", "reduced"),
    [
        ("group_norm", 12, 20),
        ("instance_norm", 24, 10),
        ("batch_norm", 6, 40),
        ("layer_norm", 4, 60),
        ("rms_norm", 4, 60),
    ],
)
def test_statistics_and_the_elements_under_each(family: Family, statistics: int, reduced: int) -> None:
    asked = problem(family)
    assert (asked.num_statistics, asked.reduced) == (statistics, reduced)
    assert asked.num_statistics * asked.reduced == asked.view.numel


def test_only_batch_norm_has_statistics_over_the_samples_and_only_rms_norm_no_mean() -> None:
    assert [family for family in FAMILIES if norm_of(family).per_batch] == ["batch_norm"]
    assert [family for family in FAMILIES if not norm_of(family).has_mean] == ["rms_norm"]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_directions(direction: str) -> None:
    assert problem(direction=direction).backward == direction.startswith("backward")


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_the_compute_dtype_is_fp32_and_fp64_for_fp64(dtype: str) -> None:
    assert problem(dtype=dtype).compute_dtype == ("float64" if dtype == "float64" else "float32")
    assert DTYPE_BYTES[dtype] == getattr(torch, dtype).itemsize


# 240 elements, 12 statistics (mean and rstd of 4 bytes), 6 channels.
STATISTICS = 12 * 2 * 4
BOTH = {"weight_dtype": "float32", "bias_dtype": "float32"}
MODULATED = {"scale_dtype": "float32", "shift_dtype": "float32"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 2 * 240 * 4 + STATISTICS),
        ({"direction": "inference"}, 2 * 240 * 4 + STATISTICS),
        ({"direction": "backward"}, 3 * 240 * 4 + STATISTICS),
        ({"direction": "backward_data"}, 3 * 240 * 4 + STATISTICS),
        ({"direction": "backward_gamma_beta"}, 2 * 240 * 4 + STATISTICS),
        ({"dtype": "bfloat16"}, 2 * 240 * 2 + STATISTICS),
        ({"dtype": "float64"}, 2 * 240 * 8 + 2 * STATISTICS),
        (BOTH, 2 * 240 * 4 + STATISTICS + 2 * 6 * 4),
        ({**BOTH, "weight_dtype": "bfloat16"}, 2 * 240 * 4 + STATISTICS + 6 * 2 + 6 * 4),
        ({**BOTH, "direction": "backward"}, 3 * 240 * 4 + STATISTICS + 2 * 2 * 6 * 4),
        ({**BOTH, "direction": "backward_data"}, 3 * 240 * 4 + STATISTICS + 2 * 6 * 4),
        ({**MODULATED}, 2 * 240 * 4 + STATISTICS + 2 * 24 * 4),
        ({"scale_dtype": "float32", "direction": "backward"}, 3 * 240 * 4 + STATISTICS + 2 * 24 * 4),
        ({"activation": "silu"}, 2 * 240 * 4 + STATISTICS),
    ],
    ids=str,
)
def test_bytes(changes: dict[str, Any], expected: int) -> None:
    assert problem(**changes).bytes == expected


def test_sums_add_transfers() -> None:
    """Only tensors like the input: a backward reads post_add and writes its gradient."""
    like = problem().layout
    for direction, added, transfers in (
        ("forward", Added(like, None, None, True, names=("pre_add",)), 4),
        ("forward", Added(names=("pre_add", "pre_gate")), 2),
        ("forward", Added(post_layout=like, names=("post_add",)), 3),
        ("backward", Added(grad_sum=True), 4),
        ("backward", Added(post_layout=like, names=("post_add",)), 5),
    ):
        changes = {"direction": direction, "added": added}
        assert problem(**changes).bytes == transfers * 240 * 4 + STATISTICS


def test_rms_norm_has_half_the_statistics() -> None:
    assert problem("rms_norm").bytes == problem("layer_norm").bytes - 4 * 4


@pytest.mark.parametrize(
    ("changes", "per_element"),
    [
        ({}, 7),
        ({"direction": "inference"}, 3),
        ({"direction": "backward"}, 9),
        ({"direction": "backward_data"}, 9),
        ({"direction": "backward_gamma_beta"}, 4),
        ({"activation": "silu"}, 7 + 16),
        ({"activation": "silu", "direction": "inference"}, 3 + 16),
        ({"activation": "silu", "direction": "backward"}, 9 + 3 + 20),
        ({"activation": "relu", "direction": "backward_gamma_beta"}, 4 + 3 + 1),
    ],
    ids=str,
)
def test_flops(changes: dict[str, Any], per_element: int) -> None:
    assert problem(**changes).flops == per_element * 240


@pytest.mark.parametrize("name", FORMULAS)
def test_an_activation_adds_flops_and_no_bytes(name: str) -> None:
    plain, activated = problem(), problem(activation=name)
    assert activated.bytes == plain.bytes
    assert activated.flops > plain.flops
    assert activated.intensity > plain.intensity


def test_intensity_is_flops_per_byte() -> None:
    asked = problem(activation="gelu")
    assert asked.intensity == asked.flops / asked.bytes


def test_nothing_has_no_intensity() -> None:
    assert problem(view=View(0, 3, 2, 10)).flops == 0
    assert problem(view=View(0, 3, 2, 10)).intensity == 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_norms_are_one_object_and_so_are_their_copies(family: Family) -> None:
    norm = norm_of(family, 2, eps=1e-3, activation=Activation("silu", 2.0))
    assert norm_of(family, np.int64(2), 1.0, np.float64(1e-3), Activation("silu", 2), 1) is norm  # type: ignore[arg-type]
    for copied in (copy.copy(norm), copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert copied is norm
