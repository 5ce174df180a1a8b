"""How a unit is spread over blocks: the configurations, what they make of a problem, and which one it gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
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
#: Vectors of the smallest tile of a single wave, which divides all others of these.
LEAST_TILE = 256
#: Chunks of a unit from which on one block merges what all of them publish, where results come two waves behind: of one
#: wave, others would wait for it: (1, 256, 512, 512) in bf16, 256 chunks, takes 79.5 us where each block merges, and
#: 91.6.
MANY_PARTS = 256
#: Chunks of a unit up to which they are few.
FEW_PARTS = 128
#: Registers of a multiprocessor.
REGISTERS = 1 << 16


@dataclass(frozen=True, slots=True)
class ResidentConfig:
    """Tiles of so many vectors of 16 bytes, warps to a block, tiles to a chunk, chunks of a block between the sums of
    one and its results, and blocks to a multiprocessor."""

    vectors: int
    warps: int
    tiles: int
    lag: int
    blocks: int

    @property
    def registers(self) -> int:
        """Registers that a thread may have where so many blocks share a multiprocessor."""
        return registers_of(self.warps, self.blocks)


@dataclass(frozen=True, slots=True)
class Chunks:
    """``parts`` chunks to a unit; blocks, each of which has about so many of all chunks, one in each of its waves; and
    the waves between the sums of a chunk and its results."""

    parts: int
    blocks: int
    waves: int
    lag: int


def chunks_of(
    units: int,
    parts: int,
    config: ResidentConfig,
    processors: int,
    *,
    tensors: int,
    least: int,
    scratch: int = SCRATCH_BYTES,
) -> Chunks | None:
    """The chunks of units, on blocks that hold so many tensors of each and add up in so many bytes of ``scratch``, or
    None where a unit does not fit the chip. The results of a single wave come ``least`` waves behind the sums."""
    blocks = min(processors * config.blocks, units * parts)
    if parts > min(blocks, MOST_PARTS):
        return None
    waves = -(-units * parts // blocks)
    lag = least if waves == 1 else config.lag
    shared = tensors * (lag + 1) * config.tiles * config.vectors * VECTOR_BYTES + scratch + DRIVER_BYTES
    return None if shared * config.blocks > SHARED_BYTES else Chunks(parts, blocks, waves, lag)


@dataclass(frozen=True, slots=True)
class Spread(Chunks):
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
        return self.parts >= MANY_PARTS and self.lag > 1


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
    found = chunks_of(units, -(-tiles // config.tiles), config, processors, tensors=tensors, least=0)
    return None if found is None else Spread(**asdict(found), vectors=vectors, chunk=chunk)


def candidates() -> Iterator[ResidentConfig]:
    """Every configuration that was worth a try in some problem."""
    sizes = [(512, 4, 3), (512, 4, 4), (512, 4, 5), (1024, 4, 2), (1024, 4, 3), (1024, 4, 4), (512, 4, 2), (256, 4, 4)]
    sizes += [(512, 2, 4), (512, 2, 6), (512, 2, 8), (256, 2, 6), (256, 2, 8), (128, 2, 8), (1024, 8, 2), (512, 8, 3)]
    for vectors, warps, blocks in sizes:
        for tiles in range(1, MOST_TILES + 1):
            for lag in (1, 2, 3):
                yield ResidentConfig(vectors, warps, tiles, lag, blocks)


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
        yield ResidentConfig(vectors, 4, tiles, 2, blocks)


#: Configurations, and how fast they are beside one another where all blocks have full chunks: of units of up to
#: FEW_PARTS chunks, of less than MANY_PARTS, and of more. Many small blocks hide from one another what each waits for,
#: long chunks have fewer sums to make, and of many short ones each block merges more. (32, 512, 64, 64) in 32 groups in
#: bf16 with silu takes 74 us on six blocks of two warps, and 78 on four of four, its backward 116 and 123. (1, 256,
#: 512, 512) takes 78 us with results two waves behind, and 80. batch_norm of (16, 96, 200, 200) in fp32 takes 133 us in
#: long chunks, and 138. Short chunks are the ones that planes of any length fill: instance_norm of (94, 128, 96, 96) in
#: fp16 with relu takes 122 us in five tiles of 2 KB, and 138 in three of 8 KB.
FORWARD = {
    ResidentConfig(512, 2, 2, 1, 6): (1.0, 0.96, 0.8),
    ResidentConfig(512, 2, 1, 1, 8): (0.975, 0.85, 0.7),
    ResidentConfig(512, 4, 4, 1, 3): (0.975, 0.945, 0.93),
    ResidentConfig(512, 4, 3, 1, 4): (0.965, 0.9, 0.8),
    ResidentConfig(1024, 4, 1, 2, 4): (0.965, 0.97, 0.98),
    ResidentConfig(256, 2, 3, 1, 8): (0.95, 0.8, 0.6),
    ResidentConfig(128, 2, 5, 1, 8): (0.945, 0.8, 0.6),
}
BACKWARD = {
    ResidentConfig(512, 2, 1, 1, 6): (1.0, 0.96, 0.8),
    ResidentConfig(1024, 4, 1, 1, 3): (1.005, 1.0, 0.9),
    ResidentConfig(512, 4, 1, 1, 4): (0.95, 0.93, 0.8),
    ResidentConfig(512, 4, 1, 2, 4): (0.93, 0.925, 0.96),
    ResidentConfig(256, 2, 1, 1, 8): (0.945, 0.85, 0.7),
    ResidentConfig(256, 4, 3, 1, 4): (0.93, 0.92, 0.9),
}
#: The same with sums around the norm, whose tensors take registers, so that threads have fewer elements.
FORWARD_OF_SUMS = {
    ResidentConfig(512, 4, 2, 2, 4): (1.0, 1.0, 1.0),
    ResidentConfig(512, 4, 3, 2, 3): (0.9, 0.9, 0.9),
    ResidentConfig(256, 4, 5, 1, 4): (0.88, 0.88, 0.88),
    ResidentConfig(512, 4, 3, 1, 4): (0.85, 0.85, 0.85),
    ResidentConfig(512, 4, 4, 1, 3): (0.85, 0.85, 0.85),
}
BACKWARD_OF_SUMS = {
    ResidentConfig(512, 4, 1, 2, 4): (1.0, 1.0, 1.0),
    ResidentConfig(256, 4, 2, 2, 4): (0.92, 0.85, 0.85),
    ResidentConfig(256, 4, 3, 1, 4): (0.9, 0.92, 0.92),
}
#: The speed of a forward with a smooth activation by chunks of several tiles beside those of one, where each vector of
#: a tile has a gain and an offset of its own, since tiles do not divide planes: (99, 256, 56, 56) in 4 groups in fp16
#: with silu takes 92 us in chunks of one tile, and 98 of two, but (436, 33, 80, 80) in one group without 103 and 99.
RAGGED = 0.95


@lru_cache(ASKED)
def resident_for(problem: Problem, processors: int) -> ResidentConfig | None:
    """The default: a forward's chunks in one wave where they fit the chip, in chunks as small as that permits; else the
    fastest by the share of the blocks that work and of their chunks that units fill: the backward of (41, 320, 72, 72)
    in 32 groups in fp16 with silu takes 148 us in chunks of 256 vectors, which are 84 % full, and 180 in chunks of 512,
    which are 63 % full. None where a unit does not fit the chip."""
    plain = problem.added is None
    if problem.backward:
        known = BACKWARD if plain else BACKWARD_OF_SUMS
    else:
        for config in _of_one_wave():
            place = spread(problem, config, processors)
            if place is not None and place.waves == 1:
                return config
        known = FORWARD if plain else FORWARD_OF_SUMS
    speeds = {}
    for config, of_parts in known.items():
        place = spread(problem, config, processors)
        if place is not None:
            speed = of_parts[(place.parts > FEW_PARTS) + (place.parts >= MANY_PARTS)]
            several = config.tiles > 1 and problem.norm.smooth and ragged(problem, config)
            speeds[config] = speed * place.works(config, processors) * (RAGGED if several else 1.0)
    return max(speeds, key=speeds.__getitem__) if speeds else None


def ragged(problem: Problem, config: ResidentConfig) -> bool:
    """Whether tiles of a forward have elements of several channels."""
    if problem.backward or problem.norm.per_batch:
        return False
    return channel_vectors(problem) % config.vectors != 0
