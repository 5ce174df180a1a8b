"""The suite that is drawn and not listed: shapes that models use beside shapes that nobody tuned a kernel for.

The draws depend on the seed and the limit of bytes alone, on every machine: since of Python's generators only
``random()`` gives the same numbers in every version, all draws are made from it. A longer sweep begins with the
workloads of a shorter one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from random import Random
from typing import TypeVar

from fusednorm.bench.workloads import LayoutName, Workload
from fusednorm.norm import FAMILIES, ROW_FAMILIES, Family
from fusednorm.problem import DTYPE_BYTES

SWEEP = "sweep"
COUNT = 100
MOST_COUNT = 100_000
LEAST_BYTES = 1000
MOST_BYTES = {"cpu": 64 * 10**6, "cuda": 512 * 10**6}
# To judge larger tensors in fp64 takes longer than to time them.
JUDGED_BYTES = 4 * 10**6

DTYPES = ("float32", "float16", "bfloat16")
RANKS = (2, 3, 4, 4, 4, 5)
MOST_SAMPLES = 128
# A tensor of rank 2 has no positions: it is a batch of points, and there may be many of them.
MOST_POINTS = 65536
SHORTEST_ROW, LONGEST_ROW = 64, 65536
MOST_CHANNELS = 2560
CHANNELS = (3, 16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 960, 1024, 1280, 2048, 2560)
EXTENTS = (7, 8, 14, 16, 28, 32, 56, 64, 112, 128, 224, 256, 512, 1024)
ROWS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 8192, 11008, 12288, 16384, 28672, 65536)
# Half of the workloads have none, and few kinds are drawn: on a GPU each is another kernel to compile.
ACTIVATIONS = (*[None] * 8, "silu", "silu", "silu", "relu", "relu", "gelu", "gelu_tanh", "leaky_relu")
LAYOUTS: tuple[LayoutName, ...] = ("nchw", "nhwc")

T = TypeVar("T")


class _Draws:
    """Choices made from one seeded generator."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def pick(self, values: Sequence[T]) -> T:
        return values[int(self._random.random() * len(values))]

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def size(self, least: int, most: int) -> int:
        """A whole number from ``least`` to ``most``, as likely between 10 and 20 as between 1000 and 2000."""
        return min(most, max(least, int(least * (max(least, most) / least) ** self._random.random() + 0.5)))

    def usual_or_any(self, usual: Sequence[int], least: int, most: int) -> int:
        """One of the usual sizes, or, in half of the draws and where all are too large, any size within the bounds."""
        fitting = [size for size in usual if size <= most]
        return self.pick(fitting) if self.chance(0.5) and fitting else self.size(least, most)


def drawn_workloads(seed: int, count: int, most_bytes: int) -> list[Workload]:
    """``count`` distinct workloads whose inputs have 1 KB to ``most_bytes``, the families in turn."""
    draws = _Draws(seed)
    found: dict[str, Workload] = {}
    while len(found) < count:
        workload = _workload(draws, FAMILIES[len(found) % len(FAMILIES)], most_bytes)
        if LEAST_BYTES <= workload.bytes_per_transfer <= most_bytes and _terms(workload) > 1:
            found.setdefault(workload.key, workload)
    return list(found.values())


def _terms(workload: Workload) -> int:
    """The elements under one statistic; torch refuses to normalize one element by itself."""
    samples, channels, *positions = workload.shape
    if workload.row_family:
        return prod(workload.parameter_shape)
    if workload.family == "batch_norm":
        return samples * prod(positions)
    return prod(positions) * (channels // workload.groups if workload.family == "group_norm" else 1)


def _workload(draws: _Draws, family: Family, most_bytes: int) -> Workload:
    dtype = draws.pick(DTYPES)
    elements = draws.size(LEAST_BYTES, most_bytes) // DTYPE_BYTES[dtype]
    activation = draws.pick(ACTIVATIONS)
    if family in ROW_FAMILIES:
        shape, normalized = _rows(draws, elements)
        return Workload(family, shape, normalized, dtype, activation=activation)
    rank = draws.pick(RANKS)
    shape = _image(draws, elements, rank) if rank > 2 else _points(draws, elements)
    return Workload(
        family,
        shape,
        _groups(draws, shape[1]) if family == "group_norm" else 0,
        dtype,
        draws.pick(LAYOUTS) if rank > 2 else "nchw",
        activation,
        modulated=draws.chance(0.2),
        training=family != "batch_norm" or draws.chance(0.75),
    )


def _points(draws: _Draws, elements: int) -> tuple[int, ...]:
    """A shape (N, C) of about so many elements."""
    channels = draws.usual_or_any(CHANNELS, 1, min(MOST_CHANNELS, elements))
    return min(MOST_POINTS, elements // channels), channels


def _image(draws: _Draws, elements: int, rank: int) -> tuple[int, ...]:
    """A shape (N, C, *) of about so many elements."""
    samples = draws.size(1, min(MOST_SAMPLES, elements))
    channels = draws.usual_or_any(CHANNELS, 1, min(MOST_CHANNELS, max(1, elements // samples)))
    axes = rank - 2
    positions = elements / (samples * channels)
    if draws.chance(0.5):
        return (samples, channels, *[_extent(draws, positions ** (1 / axes))] * axes)
    extents = []
    for left in range(axes, 0, -1):
        # Along one axis at most twice its share, so that the last axis gets positions too.
        extents.append(_extent(draws, positions ** (1 / left) * (draws.size(50, 200) / 100 if left > 1 else 1)))
        positions /= extents[-1]
    return samples, channels, *extents


def _extent(draws: _Draws, near: float) -> int:
    """An extent at most ``near``: a usual extent or a multiple of 8, or in half of the draws an odd number."""
    size = max(1, int(near))
    choice = draws.pick((EXTENTS, (size // 8 * 8,), (), ()))
    return max((extent for extent in choice if 0 < extent <= size < 2 * extent), default=size | 1)


def _groups(draws: _Draws, channels: int) -> int:
    """32 groups where these divide the channels, as in most models, or any number that does."""
    if channels % 32 == 0 and draws.chance(0.6):
        return 32
    return draws.pick([groups for groups in range(1, channels + 1) if channels % groups == 0])


def _rows(draws: _Draws, elements: int) -> tuple[tuple[int, ...], int]:
    """A shape of about so many elements, and how many of its trailing dimensions make a row."""
    length = draws.usual_or_any(ROWS, SHORTEST_ROW, min(LONGEST_ROW, elements))
    rank = draws.pick((2, 2, 3, 3, 4, 5))
    rows = max(1, elements // length)
    trailing: tuple[int, ...] = (length,)
    if rank > 2 and draws.chance(0.2):
        first = draws.pick([size for size in range(1, 65) if length % size == 0])
        trailing = (first, length // first)
    leading: list[int] = []
    for _ in range(rank - len(trailing) - 1):
        leading.append(draws.size(1, min(MOST_SAMPLES, rows)))
        rows //= leading[-1]
    return (*leading, max(1, rows), *trailing), len(trailing)
