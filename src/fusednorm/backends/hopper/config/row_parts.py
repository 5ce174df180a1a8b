"""How rows are spread over teams of blocks: the configurations, and which one a problem gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from fusednorm.backends.hopper.config.resident import (
    ASKED,
    DRIVER_BYTES,
    SCRATCH_BYTES,
    SHARED_BYTES,
    VECTOR_BYTES,
    registers_of,
    vector_of,
)
from fusednorm.problem import DTYPE_BYTES, Problem

#: Warps of a block, blocks to a multiprocessor, and elements that a thread has of a row, at most: two sums of each are
#: in its registers.
SIZES = ((4, 2, 32), (8, 1, 32), (4, 3, 16), (4, 4, 16))
#: Parts of a row, at most: each thread of a warp reads the sums of two.
MOST_PARTS = 64
#: Slots of the input, of grad_output, and of the gradients before the norm.
X_SLOTS, GRAD_SLOTS, KEPT = 3, 2, 2
#: What a turn takes beside its elements, in those that 8 warps have, 8 a thread; turns that a launch takes beside those
#: of its rows; and how much longer elements take where a thread has many of them and an activation.
TURN, LAUNCH, CROWDED = 2.0, 8.0, 1.1


@dataclass(frozen=True, slots=True)
class RowPartsConfig:
    """Blocks to a team, which have a row at a time, and teams; warps to a block, and blocks to a multiprocessor."""

    parts: int
    teams: int
    warps: int
    blocks: int

    @property
    def registers(self) -> int:
        """Registers that a thread may have where so many blocks share a multiprocessor."""
        return registers_of(self.warps, self.blocks)


def apart(problem: Problem) -> int:
    """The fewest rows that are a whole number of vectors apart."""
    vector = vector_of(problem)
    return vector // gcd(problem.layout.sample, vector)


def shifted(problem: Problem) -> bool:
    """Whether rows have ends beside their whole vectors."""
    return apart(problem) > 1 or problem.view.channels % vector_of(problem) > 0


def chunk(problem: Problem, config: RowPartsConfig) -> int:
    """The whole vectors of a part."""
    return -(-problem.view.channels // vector_of(problem) // config.parts)


def steps(problem: Problem, config: RowPartsConfig) -> int:
    """The vectors that a thread has of a row."""
    return -(-chunk(problem, config) // (32 * config.warps))


def shared_bytes(problem: Problem, config: RowPartsConfig) -> int:
    """What a block takes of a multiprocessor's shared memory, at most."""
    parameters = (problem.weight_dtype, problem.bias_dtype if problem.norm.activation else None)
    element = 4 * KEPT + sum(DTYPE_BYTES[dtype] for dtype in parameters if dtype)
    vector = (X_SLOTS + GRAD_SLOTS) * VECTOR_BYTES + element * vector_of(problem)
    return steps(problem, config) * 32 * config.warps * vector + SCRATCH_BYTES + DRIVER_BYTES


def _spread(problem: Problem, parts: int, blocks: int) -> int:
    """The teams of so many blocks, as few as take as many turns; 0 where none fits."""
    each, rows = apart(problem), problem.view.samples
    most = blocks // parts // each * each
    if most == 0:
        return 0
    turns = -(-rows // most)
    return -(-rows // (turns * each)) * each


def _candidates(problem: Problem, processors: int) -> Iterator[RowPartsConfig]:
    vector = vector_of(problem)
    for warps, blocks, elements in SIZES:
        for parts in range(1, MOST_PARTS + 1):
            config = RowPartsConfig(parts, _spread(problem, parts, processors * blocks), warps, blocks)
            few = steps(problem, config) * vector <= elements
            if config.teams and few and shared_bytes(problem, config) * blocks <= SHARED_BYTES:
                yield config


def _cost(problem: Problem, config: RowPartsConfig) -> float:
    """The time that a problem takes, up to a factor."""
    warps = config.warps * config.blocks / 8
    elements = steps(problem, config) * vector_of(problem) / 8
    turns = -(-problem.view.samples // config.teams) + LAUNCH
    crowded = CROWDED if elements > 3 and problem.norm.activation else 1.0
    return turns * (elements * warps * crowded + TURN * warps**0.7)


def configs(problem: Problem, processors: int) -> list[RowPartsConfig]:
    """The configurations that suit a problem, the default first: for each size of blocks the best few."""
    order = sorted(_candidates(problem, processors), key=lambda config: _cost(problem, config))
    sizes: dict[tuple[int, int], int] = {}
    found = []
    for config in order:
        size = config.warps, config.blocks
        sizes[size] = sizes.get(size, 0) + 1
        if sizes[size] <= 4:
            found.append(config)
    return found


@lru_cache(ASKED)
def row_parts_for(problem: Problem, processors: int) -> RowPartsConfig | None:
    """The default, or None where a row does not fit the chip."""
    return min(_candidates(problem, processors), key=lambda config: _cost(problem, config), default=None)
