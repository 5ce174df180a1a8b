"""The configurations of the instances: what a kernel is compiled and launched with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PassConfig:
    """A pass over tiles of so many channels and positions: tiles to a chunk, warps to a program, and how many tiles are
    in flight together. ``long``: ``channels`` are the lanes of a row that holds all channels of as many positions as
    fit, in a backward's pass that reads channels_last; a program sums these positions."""

    channels: int
    positions: int
    tiles: int = 1
    warps: int = 4
    stages: int = 1
    long: bool = False


@dataclass(frozen=True, slots=True)
class TilesConfig:
    """The pass that reads, and the pass that writes."""

    reduction: PassConfig
    output: PassConfig


@dataclass(frozen=True, slots=True)
class FlatConfig:
    """An evaluation in the order of memory: vectors to a program, elements of a vector, and warps."""

    vectors: int
    width: int
    warps: int


@dataclass(frozen=True, slots=True)
class WholeConfig:
    """Units to a program, and warps."""

    units: int
    warps: int


@dataclass(frozen=True, slots=True)
class HeldConfig:
    """Units to a program, warps, and whether these units are those in one place of all samples, in a backward.

    A backward of more than one of ``steps`` walks over the samples: a program takes ``units`` neighbours of so many
    ``samples`` at each step, with the loads of so many ``stages`` on their way, and sums p and q of all.
    """

    units: int
    warps: int
    all_samples: bool = False
    samples: int = 1
    steps: int = 1
    stages: int = 1


@dataclass(frozen=True, slots=True)
class StepsConfig:
    """A row, or a channel of a sample, to a program: elements to a step, and warps."""

    elements: int
    warps: int


@dataclass(frozen=True, slots=True)
class RowsBackwardConfig:
    """A backward of rows: rows to a step, warps, programs that share the rows, steps that are in flight together, and
    whether a step loads its rows twice."""

    rows: int
    warps: int
    programs: int
    stages: int = 1
    reload: bool = False


@dataclass(frozen=True, slots=True)
class PositionsConfig:
    """Positions with statistics of their own: positions to a program, channels to a step, and warps."""

    positions: int
    channels: int
    warps: int


@dataclass(frozen=True, slots=True)
class SpreadRowsConfig:
    """Rows whose elements are spread over processes: rows and elements of a tile, and warps."""

    rows: int
    elements: int
    warps: int


@dataclass(frozen=True, slots=True)
class ColumnsBackwardConfig:
    """A backward of long rows. The pass for totals: elements to a step, warps, and about how many programs, at least a
    row to a program. The pass by columns: columns to a program, steps of a row each, warps, and how many steps are in
    flight together."""

    row_elements: int
    row_warps: int
    row_programs: int
    elements: int
    steps: int
    warps: int
    stages: int = 1
