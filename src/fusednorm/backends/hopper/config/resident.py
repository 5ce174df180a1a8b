"""How a unit is spread over blocks: the configurations, what they make of a problem, and which one it gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from fusednorm.problem import DTYPE_BYTES, Problem

#: Problems whose default is kept: several questions about one follow each other, and its plan asks again.
ASKED = 8
VECTOR_BYTES = 16
#: Shared memory of a multiprocessor that blocks can have, and what the driver takes of it for each block.
SHARED_BYTES, DRIVER_BYTES = 228 << 10, 1 << 10
#: Shared memory in which a block adds up, at most.
SCRATCH_BYTES = 1 << 10
#: The most that the kernel is compiled for.
MOST_TILES, MOST_PARTS = 6, 1024
#: Vectors of the smallest tile, which divides all others.
LEAST_TILE = 256
#: Chunks of a unit from which on one block merges what all of them publish: 1x128x1024x1024 in bf16, 512 chunks, took
#: 211 us where each block does, and 170; 1x512x256x256, 128 chunks, 50 us and 54.
MANY_PARTS = 256
#: The part of the fullest chunks' share from which on chunks are full enough: on an H100 (1, 1948, 47, 13, 16) in bf16
#: with silu takes 46 us in chunks that are 60 % full, 39 in chunks that are 80 % full, and 36 in chunks that are 95 %
#: full.
FILLED = 0.85
#: Waves that are few.
FEW_WAVES = 4
#: Registers of a multiprocessor.
REGISTERS = 1 << 16


@dataclass(frozen=True, slots=True)
class ResidentConfig:
    """Tiles of so many vectors of 16 bytes, warps to a block, tiles to a chunk, waves between the sums of a chunk and
    its results, chunks that are copied ahead, and blocks to a multiprocessor."""

    vectors: int
    warps: int
    tiles: int
    lag: int
    ahead: int
    blocks: int

    @property
    def registers(self) -> int:
        """Registers that a thread may have where so many blocks share a multiprocessor."""
        return registers_of(self.warps, self.blocks)


@dataclass(frozen=True, slots=True)
class Waves:
    """Chunks over blocks: ``parts`` chunks to a unit, all of them in so many waves."""

    parts: int
    blocks: int
    waves: int
    lag: int
    ahead: int


def in_waves(
    units: int, parts: int, config: ResidentConfig, processors: int, *, tensors: int, least: int
) -> Waves | None:
    """The chunks of units over blocks that hold so many tensors of each chunk, or None where a unit does not fit the
    chip. Results come at least so many waves behind the sums."""
    blocks = min(processors * config.blocks, units * parts)
    if parts > min(blocks, MOST_PARTS):
        return None
    waves = -(-units * parts // blocks)
    lag, ahead = config.lag, config.ahead
    if waves == 1:
        lag = ahead = least
    elif lag == 1:  # whole units to a wave
        blocks -= blocks % parts
        waves = -(-units * parts // blocks)
    ahead = min(ahead, max(0, waves - 1 - lag))
    shared = tensors * (lag + 1 + ahead) * config.tiles * config.vectors * VECTOR_BYTES + SCRATCH_BYTES + DRIVER_BYTES
    return None if shared * config.blocks > SHARED_BYTES else Waves(parts, blocks, waves, lag, ahead)


@dataclass(frozen=True, slots=True)
class Spread(Waves):
    """Units of so many vectors in chunks, and chunks over blocks."""

    vectors: int
    chunk: int

    @property
    def even(self) -> bool:
        """Whether units fill all of their chunks."""
        return self.parts * self.chunk == self.vectors

    @property
    def filled(self) -> float:
        """The share of the chunks that units fill."""
        return self.vectors / (self.parts * self.chunk)

    def works(self, config: ResidentConfig, processors: int) -> float:
        """The share of what the chip could work on at a time that it does: of its blocks, and of their chunks."""
        return self.filled * self.blocks / (config.blocks * processors)

    @property
    def leads(self) -> bool:
        """Whether the block of a unit's first chunk leads; a leader merges in a wave behind that of the sums."""
        return self.parts >= MANY_PARTS and self.lag > 0


def registers_of(warps: int, blocks: int) -> int:
    """Registers that a thread may have where so many blocks of so many warps share a multiprocessor."""
    return min(255, REGISTERS // (32 * warps * blocks) // 8 * 8)


def magic(divisor: int) -> int:
    """ceil(2^31 / divisor), by which the kernels divide (``kernels/chunks.py``)."""
    return -(-(1 << 31) // divisor)


def divides(most: int, divisor: int) -> bool:
    """Whether that division is exact for all numbers up to ``most``."""
    return most * (magic(divisor) * divisor - (1 << 31)) < 1 << 31


def vector_of(problem: Problem) -> int:
    """The elements of a vector."""
    return VECTOR_BYTES // DTYPE_BYTES[problem.dtype]


def unit_vectors(problem: Problem) -> int:
    """The vectors of a unit."""
    return problem.reduced * DTYPE_BYTES[problem.dtype] // VECTOR_BYTES


def channel_vectors(problem: Problem) -> int:
    """The vectors of a channel."""
    return problem.view.spatial * DTYPE_BYTES[problem.dtype] // VECTOR_BYTES


def shifted(problem: Problem) -> bool:
    """Whether planes, a channel of a sample each, are no whole number of vectors, or do not begin at whole ones."""
    size, view = DTYPE_BYTES[problem.dtype], problem.view
    layouts = [layout for layout in problem.layouts if layout]
    return any(count * size % VECTOR_BYTES for count in (view.spatial, *(layout.sample for layout in layouts)))


def unit_tiles(problem: Problem, vectors: int) -> int:
    """The tiles of so many vectors of a unit. In a backward a tile is of one channel, and where planes are shifted of
    one sample, too."""
    view, per_batch = problem.view, problem.norm.per_batch
    planes = view.samples if per_batch else view.group_channels
    if problem.backward and (shifted(problem) or not per_batch):
        return planes * -(-channel_vectors(problem) // vectors)
    return -(-unit_vectors(problem) // vectors)


def spread(problem: Problem, config: ResidentConfig, processors: int) -> Spread | None:
    """The spread of a problem's units, or None where a configuration does not suit them."""
    vectors, units = unit_vectors(problem), problem.num_statistics
    chunk, tiles = config.vectors * config.tiles, unit_tiles(problem, config.vectors)
    tensors = 2 if problem.backward else 1
    found = in_waves(units, -(-tiles // config.tiles), config, processors, tensors=tensors, least=0)
    return None if found is None else Spread(**asdict(found), vectors=vectors, chunk=chunk)


def candidates() -> Iterator[ResidentConfig]:
    """Every configuration that was worth a try in some problem."""
    sizes = [(512, 4, 3), (512, 4, 4), (512, 4, 5), (1024, 4, 2), (1024, 4, 3), (1024, 8, 2), (512, 4, 2), (256, 4, 4)]
    sizes += [(512, 2, 4), (512, 2, 6), (256, 2, 8), (256, 1, 8)]
    for vectors, warps, blocks in sizes:
        for tiles in range(1, MOST_TILES + 1):
            for lag, ahead in ((2, 0), (1, 1), (1, 0), (2, 1), (3, 0), (3, 1)):
                yield ResidentConfig(vectors, warps, tiles, lag, ahead, blocks)


def configs(problem: Problem, processors: int) -> list[ResidentConfig]:
    """The configurations that suit a problem, the default first, and each spread once."""
    found: dict[object, ResidentConfig] = {}
    for config in (resident_for(problem, processors), *candidates()):
        if config is not None:
            place = spread(problem, config, processors)
            if place is not None:
                found.setdefault((config.vectors, config.warps, config.tiles, place), config)
    return list(found.values())


def _of_one_wave() -> Iterator[ResidentConfig]:
    """Chunks of few vectors first: batch_norm of (45, 128, 384) in bf16 takes 7.4 us in chunks of 768 vectors, 7.8 of
    512 by five blocks to a multiprocessor, and 8.2 of 1024."""
    sizes = [(512, tiles, blocks) for tiles in range(1, MOST_TILES + 1) for blocks in (4, 5)]
    for vectors, tiles, blocks in (sizes[0], (256, 3, 4), *sizes[1:]):
        yield ResidentConfig(vectors, 4, tiles, 2, 0, blocks)


@lru_cache(ASKED)
def resident_for(problem: Problem, processors: int) -> ResidentConfig | None:
    """The default: all chunks in one wave where they fit the chip, in chunks as small as that permits; else chunks of
    two tiles, two waves behind, or others that units fill better; None where a unit does not fit the chip."""
    if problem.backward:
        return _backward_for(problem, processors)
    for config in _of_one_wave():
        place = spread(problem, config, processors)
        if place is not None and place.waves == 1:
            return config
    order = [ResidentConfig(512, 4, 2, 2, 0, 4), ResidentConfig(512, 4, 3, 2, 0, 3), ResidentConfig(256, 4, 5, 1, 0, 4)]
    order += [ResidentConfig(512, 4, tiles, 1, 0, blocks) for tiles, blocks in ((3, 4), (4, 3))]
    found = _first_filled(problem, processors, order)
    return found and _of_few_waves(problem, found, processors)


def _of_few_waves(problem: Problem, config: ResidentConfig, processors: int) -> ResidentConfig:
    """A configuration with results one wave behind, not two, where that leaves no more waves, there are few, and nobody
    waits for a leader: (1, 256, 256, 256) in 32 groups in bf16 with silu takes 27.5 us so, and 28.7, (2, 128, 256, 256)
    27.5 and 28.5."""
    if DTYPE_BYTES[problem.dtype] != 2 or problem.added is not None:
        return config
    closer = replace(config, lag=1)
    before, place = spread(problem, config, processors), spread(problem, closer, processors)
    assert before is not None
    few = place is not None and place.waves == before.waves <= FEW_WAVES and not place.leads
    return closer if few else config


#: Configurations of a backward, and how fast they are beside one another where all blocks have full chunks: of units
#: that have up to FEW_PARTS chunks, and of others. Many small blocks hide from one another what each waits for: (32,
#: 512, 64, 64) in 32 groups in bf16 with silu takes 118 us on six blocks of two warps, and 126 on four of four. Long
#: chunks have fewer sums to make: (1, 512, 256, 256) takes 70 us in the longest, and 74, batch_norm of (47, 96, 104,
#: 108) in fp16 with relu 96 and 101. Of many short ones each block merges more.
FEW_PARTS = 100
BACKWARD = {
    ResidentConfig(512, 2, 1, 1, 0, 6): (1.06, 0.98),
    ResidentConfig(1024, 4, 1, 1, 0, 3): (1.05, 1.05),
    ResidentConfig(512, 4, 1, 2, 0, 4): (1.0, 1.0),
    ResidentConfig(256, 2, 1, 2, 0, 8): (0.98, 0.85),
    ResidentConfig(256, 4, 2, 2, 0, 4): (0.92, 0.85),
    ResidentConfig(256, 4, 3, 1, 0, 4): (0.9, 0.92),
}
#: Those of them that were measured with sums around the norm, whose tensors take registers.
BACKWARD_OF_SUMS = [config for config in BACKWARD if config.warps == 4 and config.vectors <= 512]


def _backward_for(problem: Problem, processors: int) -> ResidentConfig | None:
    """The fastest by the share of the blocks that work and of their chunks that units fill: (41, 320, 72, 72) in 32
    groups in fp16 with silu takes 148 us in chunks of 256 vectors, which are 84 % full, and 180 in chunks of 512, which
    are 63 % full, (2, 320, 256, 256) in bf16 87 us on all blocks, and 98 on 81 % of them. Chunks are twice as long, on
    half as many blocks, where a unit of float32 has many: (2, 64, 64, 96, 96), instance_norm with relu, takes 243 us
    so, and 306, (2, 96, 48, 61, 77) in 32 groups took 150 and 183."""
    known = BACKWARD if problem.added is None else BACKWARD_OF_SUMS
    places = {config: spread(problem, config, processors) for config in known}
    speeds = {
        config: BACKWARD[config][place.parts > FEW_PARTS] * place.works(config, processors)
        for config, place in places.items()
        if place is not None
    }
    if not speeds:
        return None
    found = max(speeds, key=speeds.__getitem__)
    place, larger = places[found], replace(found, tiles=2 * found.tiles, blocks=2)
    assert place is not None
    doubled = problem.dtype == "float32" and place.leads
    return larger if doubled and spread(problem, larger, processors) is not None else found


def _first_filled(problem: Problem, processors: int, order: Sequence[ResidentConfig]) -> ResidentConfig | None:
    """The first of some configurations whose chunks units fill, nearly as well as those of any."""
    fitting = [(config, place) for config in order if (place := spread(problem, config, processors)) is not None]
    fullest = max((place.filled for _, place in fitting), default=0.0)
    return next((config for config, place in fitting if place.filled >= FILLED * fullest), None)
