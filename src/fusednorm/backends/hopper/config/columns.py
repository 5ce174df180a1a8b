"""How a sample's positions are spread over blocks: the configurations, and which one a problem gets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from fusednorm.backends.hopper.config.resident import (
    ASKED,
    DRIVER_BYTES,
    SCRATCH_BYTES,
    SHARED_BYTES,
    VECTOR_BYTES,
    channel_vectors,
)
from fusednorm.backends.triton.runs import power_of_two
from fusednorm.problem import Problem

#: Vectors of a channel that a block may have, its warps, and the channels of a step that a thread may have.
LANES, WARPS, REPEATS = (8, 4, 16, 2, 1), (4, 8, 2), (4, 2, 1)
#: Bytes of a tensor in a block that has 8 lanes, and in one of 4, at most: several blocks share a multiprocessor.
MOST_WIDE, MOST_HALF = 40 << 10, 64 << 10
#: Vectors of a tensor in a block of 2 warps, and in one of 4, at most.
MOST_PAIR, MOST_FOUR = 1024, 3072


@dataclass(frozen=True, slots=True)
class ColumnsConfig:
    """Vectors of 16 bytes of each channel, warps to a block, and channels of a step that a thread has."""

    lanes: int
    warps: int
    repeats: int

    @property
    def rows(self) -> int:
        """The channels of a step."""
        return 32 // self.lanes * self.warps * self.repeats


def shared_bytes(problem: Problem, config: ColumnsConfig) -> int:
    """What a block takes of a multiprocessor's shared memory."""
    channels = -(-problem.view.channels // config.rows) * config.rows
    tensors = 2 if problem.backward else 1
    return tensors * channels * config.lanes * VECTOR_BYTES + SCRATCH_BYTES * config.warps + DRIVER_BYTES


def fits(problem: Problem, config: ColumnsConfig) -> bool:
    return shared_bytes(problem, config) <= SHARED_BYTES


def columns_configs(problem: Problem, processors: int) -> list[ColumnsConfig]:
    """The configurations that suit a problem, the default first."""
    default = columns_for(problem, processors)
    if default is None:
        return []
    found = (ColumnsConfig(*sizes) for sizes in product(LANES, WARPS, REPEATS))
    return list(dict.fromkeys((default, *(one for one in found if fits(problem, one)))))


@lru_cache(ASKED)
def columns_for(problem: Problem, processors: int) -> ColumnsConfig | None:
    """The default, or None where no block has room for all channels: lines of 128 bytes, which are fewer where several
    blocks would not fit a multiprocessor, or not every multiprocessor would have one."""
    vectors, channels, samples = channel_vectors(problem), problem.view.channels, problem.view.samples
    lanes = min(LANES[0], power_of_two(vectors))
    while lanes > 2 and (
        lanes * channels * VECTOR_BYTES > (MOST_WIDE if lanes > 4 else MOST_HALF)
        or samples * -(-vectors // lanes) < processors
    ):
        lanes //= 2
    warps = 2 if lanes * channels <= MOST_PAIR else 4 if lanes * channels <= MOST_FOUR else 8
    config = ColumnsConfig(lanes, warps, REPEATS[0])
    return config if fits(problem, config) else None
