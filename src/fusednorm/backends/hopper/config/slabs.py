"""How slabs of channels_last are spread over blocks: the configurations, and which one a problem gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import gcd, lcm

from fusednorm.backends.hopper.config.resident import ASKED, SCRATCH_BYTES, Chunks, ResidentConfig, chunks_of, vector_of
from fusednorm.backends.triton.runs import power_of_two
from fusednorm.problem import Problem

#: Vectors of each position that a slab may have.
LANES = (16, 8, 32, 64, 4)
#: The most groups of a slab.
MOST_GROUPS = 64
#: Numbers of a slab's groups that each block reads itself.
MOST_READ = 512
#: Partials of a slab's groups, all of which each of its blocks merges: 9x128x32x32x32 in 32 groups in bf16 takes 84 us
#: with 8192 of them, and 63 in slabs half as wide with 2048.
MOST_MERGED = 4096
#: Chunks of a slab up to which many small blocks are fastest: (8, 128, 256, 256) in 32 groups in bf16 with silu takes
#: 144 us with 512 chunks of lines of 128 bytes, nearly as many as there are blocks, and 97 with 256 on half of these.
FEW_PARTS = 300


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
    def leads(self) -> bool:
        """Whether leaders merge what all blocks publish; else each block merges the numbers of its slab."""
        return power_of_two(self.groups) * power_of_two(self.parts) > MOST_READ


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
    sizes += [(512, 2, 3), (512, 2, 4), (512, 2, 6), (1024, 4, 3), (256, 2, 6), (512, 8, 3)]
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


@lru_cache(ASKED)
def slabs_for(problem: Problem, processors: int) -> SlabsConfig | None:
    """The default: lines of 256 bytes on four blocks to a multiprocessor, where slabs do not have too many chunks for
    that: (32, 512, 64, 64) in 32 groups in bf16 with silu takes 82 us so, and 91 one wave behind; else lines of 128
    bytes on three, (1, 512, 256, 256) 48, and 50 on two; else chunks as long as slabs need to fit the chip; None where
    none fits. With a tensor added before the norm, fewer blocks: x + h of (16, 256, 128, 128) in bf16, with s kept,
    takes 155 us, and 164 in chunks twice as large, in two reads 178."""
    added = problem.added
    if problem.backward:
        order = [SlabsConfig(512, 2, 1, 1, 6, lanes) for lanes in (16, 8, 4)]
        order += [SlabsConfig(1024, 4, tiles, 1, 2, lanes) for tiles in (1, 2) for lanes in (8, 4)]
        return next((config for config in order if spread(problem, config, processors) is not None), None)
    if added is not None and added.pre_layout is not None:
        small = SlabsConfig(512, 4, 2, 2, 3, LANES[0])
        if spread(problem, small, processors) is not None:
            return small
    few = SlabsConfig(512, 4, 2, 2, 4, LANES[0])
    place = spread(problem, few, processors)
    if place is not None and place.parts <= FEW_PARTS and merged(problem, place) <= MOST_MERGED:
        return few
    order = [SlabsConfig(512, 4, 3, 2, 3, LANES[1])]
    order += [SlabsConfig(512, 4, 4, 2, 2, lanes) for lanes in LANES]
    order += [SlabsConfig(512, 4, 4, 1, 3, lanes) for lanes in LANES[:2]]
    found = [(config, place) for config in order if (place := spread(problem, config, processors)) is not None]
    light = (config for config, place in found if merged(problem, place) <= MOST_MERGED)
    return next(light, found[0][0] if found else None)


def merged(problem: Problem, place: SlabsSpread) -> int:
    """The partials that a block merges: those of all groups of its slab."""
    return place.parts * place.held * vector_of(problem) // problem.view.group_channels
