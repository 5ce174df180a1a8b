"""How slabs of channels_last are spread over blocks: the configurations, and which one a problem gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import gcd, lcm
from typing import NamedTuple

from fusednorm.backends.hopper.config.resident import ASKED, SCRATCH_BYTES, Chunks, ResidentConfig, chunks_of, vector_of
from fusednorm.backends.triton.runs import power_of_two
from fusednorm.problem import Problem

#: Vectors of each position that a slab may have.
LANES = (16, 8, 32, 64, 4)
#: The most groups of a slab.
MOST_GROUPS = 64
#: The vectors of a tile that a thread has are a multiple of this.
REPEATS = 4
#: Numbers of a slab's groups that each block reads itself; of more, leaders merge them: the backward of (1, 512, 256,
#: 256) in 32 groups in bf16 with silu takes 85 us with leaders, and 96 where each block reads 1024.
MOST_READ = 512


@dataclass(frozen=True, slots=True)
class SlabsConfig(ResidentConfig):
    """And at most so many vectors of each position in a slab."""

    lanes: int


@dataclass(frozen=True, slots=True)
class SlabsSpread(Chunks):
    """Slabs of ``held`` vectors of each position, ``groups`` groups, ``bands`` of them to a sample, in chunks of
    ``rows`` positions, and chunks over blocks."""

    held: int
    bands: int
    rows: int
    groups: int

    @property
    def lanes(self) -> int:
        """The next power of 2 from ``held`` on."""
        return power_of_two(self.held)

    @property
    def read(self) -> int:
        """The numbers of a slab's groups that a block reads without leaders."""
        return power_of_two(self.groups) * power_of_two(self.parts)

    def filled(self, problem: Problem) -> float:
        """The share of their chunks that slabs fill."""
        return problem.view.spatial / (self.parts * self.rows)

    @property
    def leads(self) -> bool:
        """Whether leaders merge what all blocks publish."""
        return self.read > MOST_READ


def scratch(problem: Problem, config: SlabsConfig) -> int:
    """Shared memory in which the threads of a block add up numbers of each piece of their vectors or, backward, of each
    channel."""
    vector = vector_of(problem)
    return max(SCRATCH_BYTES, 4 * 32 * config.warps * (vector if problem.backward else vector // span(problem)))


def span(problem: Problem) -> int:
    """The neighbouring channels of a piece: the most that divide a vector and a group."""
    return gcd(problem.view.group_channels, vector_of(problem))


def held_vectors(problem: Problem, most: int) -> int | None:
    """The vectors of each position in a slab: whole groups, slabs that divide the channels; at most so many, or
    None."""
    view, vector = problem.view, vector_of(problem)
    least = lcm(view.group_channels, vector)
    if view.channels % least:
        return None
    together = view.channels // least
    counts = (count * least // vector for count in range(together, 0, -1) if together % count == 0)
    return next((held for held in counts if held <= most), None)


def spread(problem: Problem, config: SlabsConfig, processors: int) -> SlabsSpread | None:
    """The spread of a problem's slabs, or None where a configuration does not suit them."""
    view, vector = problem.view, vector_of(problem)
    held = held_vectors(problem, config.lanes)
    if held is None:
        return None
    lanes = power_of_two(held)
    if config.vectors % (REPEATS * 32 * config.warps):
        return None
    if lanes > 32 * config.warps or held * vector // view.group_channels > MOST_GROUPS:
        return None
    bands, rows = view.channels // (held * vector), config.vectors // lanes * config.tiles
    found = chunks_of(
        view.samples * bands,
        -(-view.spatial // rows),
        config,
        processors,
        tensors=2 if problem.backward else 1,
        least=1,
        scratch=scratch(problem, config),
    )
    groups = view.groups // bands
    return None if found is None else SlabsSpread(**asdict(found), held=held, bands=bands, rows=rows, groups=groups)


def candidates() -> Iterator[SlabsConfig]:
    """Every configuration that was worth a try in some problem."""
    sizes = [(512, 4, 2), (512, 4, 3), (512, 4, 4), (1024, 4, 2), (1024, 8, 2), (1024, 8, 3)]
    sizes += [(512, 2, 3), (512, 2, 4), (512, 2, 6), (1024, 4, 3), (256, 2, 6)]
    for lanes in LANES:
        for vectors, warps, blocks in sizes:
            for tiles in (1, 2, 3, 4):
                for lag in (2, 1):
                    yield SlabsConfig(vectors, warps, tiles, lag, blocks, lanes)


def configs(problem: Problem, processors: int) -> list[SlabsConfig]:
    """The configurations that suit a problem, the default first, and each spread once."""
    found: dict[object, SlabsConfig] = {}
    for config in (slabs_for(problem, processors), *candidates()):
        place = None if config is None else spread(problem, config, processors)
        if config is not None and place is not None:
            found.setdefault((config.vectors, config.warps, config.tiles, place), config)
    return list(found.values())


class Limits(NamedTuple):
    """Which problems a configuration is for: chunks of a slab, as a share of the blocks, at most; numbers that a block
    reads at most; and the share of their chunks that slabs fill at least."""

    parts: float = 1.0
    read: int = 1 << 30
    filled: float = 0.0

    def hold(self, problem: Problem, place: SlabsSpread) -> bool:
        few = place.parts <= self.parts * place.blocks and place.read <= self.read
        return few and place.filled(problem) >= self.filled


#: Configurations in the order in which they are tried. Blocks that read all numbers of a slab themselves are fastest:
#: (16, 256, 64, 64) in 32 groups in fp16 takes 21.7 us so, in full chunks of lines of 128 bytes, and 23.6 with leaders
#: and lines of 256. Of slabs of more chunks long lines are: (32, 256, 56, 56) in bf16 with silu takes 35.7 us, and 37.7
#: with lines of 128 bytes, (10, 128, 16384) in fp32 47.4 and 53.0. Of more chunks than that lines of 128 bytes leave
#: fewer to a slab.
FORWARD = (
    (SlabsConfig(512, 4, 4, 1, 3, 8), Limits(1 / 6, 256, 0.97)),
    (SlabsConfig(512, 4, 2, 2, 4, 16), Limits(0.15)),
    (SlabsConfig(512, 4, 3, 2, 3, 16), Limits(0.5)),
    (SlabsConfig(512, 4, 3, 2, 3, 8), Limits()),
    *((SlabsConfig(512, 4, 4, 2, 2, lanes), Limits()) for lanes in LANES[:4]),
    *((SlabsConfig(512, 4, 4, 1, 3, lanes), Limits()) for lanes in LANES[:2]),
)
#: The same where each channel is a group, whose numbers take registers.
FORWARD_OF_CHANNELS = (
    (SlabsConfig(512, 4, 4, 1, 3, 8), Limits(1.0, MOST_READ, 0.97)),
    (SlabsConfig(512, 4, 3, 1, 4, 4), Limits(1.0, MOST_READ, 0.85)),
    (SlabsConfig(512, 4, 2, 2, 4, 8), Limits(1.0, MOST_READ, 0.9)),
    (SlabsConfig(512, 4, 2, 2, 4, 4), Limits()),
)
#: With a tensor added before the norm, whose words take registers: x + h of (16, 256, 128, 128) in bf16, with s kept,
#: takes 155 us so, and 164 in chunks twice as large, in two reads 178.
FORWARD_OF_SUMS = ((SlabsConfig(512, 4, 2, 2, 3, 16), Limits()), *FORWARD)
#: Backward: (16, 256, 64, 64) in 32 groups in fp16 takes 36 us in tiles of 16 KB, and 39 in tiles of 8 KB; but (2, 512,
#: 128, 128) in bf16 with silu, of which a slab has a third as many chunks as there are blocks, more than 50 and 47.
BACKWARD = (
    (SlabsConfig(1024, 4, 1, 1, 3, 8), Limits(0.2, MOST_READ, 1.0)),
    (SlabsConfig(512, 4, 1, 2, 4, 8), Limits(0.7)),
    (SlabsConfig(512, 2, 1, 2, 4, 8), Limits()),
    (SlabsConfig(512, 2, 1, 2, 4, 4), Limits()),
    *((SlabsConfig(512, 4, 1, 1, 4, lanes), Limits()) for lanes in LANES[:4]),
)
BACKWARD_OF_CHANNELS = (
    (SlabsConfig(1024, 4, 1, 1, 3, 8), Limits(1.0, 256, 1.0)),
    (SlabsConfig(512, 2, 1, 1, 4, 4), Limits(1.0, MOST_READ)),
    (SlabsConfig(512, 2, 1, 2, 4, 4), Limits()),
)


@lru_cache(ASKED)
def slabs_for(problem: Problem, processors: int) -> SlabsConfig | None:
    """The default: the first configuration whose limits hold; None where no slab fits the chip."""
    alone = problem.view.group_channels == 1
    if problem.backward:
        order = BACKWARD_OF_CHANNELS if alone else BACKWARD
    elif problem.added is not None and problem.added.pre_layout is not None:
        order = FORWARD_OF_SUMS
    else:
        order = FORWARD_OF_CHANNELS if alone else FORWARD
    for config, limits in order:
        place = spread(problem, config, processors)
        if place is not None and limits.hold(problem, place):
            return config
    return None
