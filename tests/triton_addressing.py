"""Kernels that store what functions of kernels/addressing.py return, for test_triton_addressing.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.addressing import bounds_of, has_whole_rows, within
from fusednorm.backends.triton.kernels.rows import lanes_of_rows
from fusednorm.backends.triton.runs import leading_bits, power_of_two


@triton.jit
def mask_of_length(p_mask, length, BLOCK: tl.constexpr, LEADING: tl.constexpr, ALIGN: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p_mask + o, within(o, length, BLOCK, LEADING, ALIGN).to(tl.int8))


def wrong_masks(most: int) -> list[tuple[int, ...]]:
    """The lengths up to ``most``, with their bits and alignment, that get another mask than their own."""
    found = []
    for length in range(1, most + 1):
        block = power_of_two(length)
        expected = torch.arange(block) < length
        for bits, align in ((0, 1), (1, 1), (2, 1), (3, 1), (0, length & -length)):
            mask = torch.full((block,), 2, dtype=torch.int8)
            leading = leading_bits(length, block, bits) if bits else 0
            mask_of_length[(1,)](mask, length, block, leading, align)
            if not torch.equal(mask, expected.to(torch.int8)):
                found.append((length, bits, align))
    return found


@triton.jit
def bounds_and_wholeness(p_low, p_high, p_whole, C, S, span, REPEAT: tl.constexpr, ACROSS: tl.constexpr):
    n, chunk = tl.program_id(0), tl.program_id(1)
    low, high = bounds_of(n.to(tl.int64), 0, 0, span, C, S, None, 1, REPEAT, ACROSS)
    o = n * tl.num_programs(1) + chunk
    if ACROSS:
        tl.store(p_low + o, low)
        tl.store(p_high + o, high)
    tl.store(p_whole + o, has_whole_rows(n, chunk, span, C, S, REPEAT, ACROSS).to(tl.int8))


def wrong_rows(channels: int, positions: int, repeat: int, span: int, chunks: int) -> list[tuple[int | bool, ...]]:
    """The samples and chunks of rows of so many positions each, through three samples and in each of its own, whose
    bounds, or whole rows, are others than counted here."""
    found: list[tuple[int | bool, ...]] = []
    row = channels * repeat
    for across in (False, True):
        low, high = torch.zeros(3, chunks, dtype=torch.int64), torch.zeros(3, chunks, dtype=torch.int64)
        whole = torch.full((3, chunks), 2, dtype=torch.int8)
        bounds_and_wholeness[(3, chunks)](low, high, whole, channels, positions, span, repeat, across)
        for n in range(3):
            begin = n * positions % repeat * channels if across else 0
            end = begin + positions * channels
            for chunk in range(chunks):
                rows = begin <= chunk * span * row and (chunk + 1) * span * row <= end
                bounds = not across or (int(low[n, chunk]), int(high[n, chunk])) == (begin, end)
                if not bounds or int(whole[n, chunk]) != rows:
                    found.append((n, chunk, across))
    return found


@triton.jit
def store_lanes(
    p_lanes, sample, rows, K: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    n = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
    held, loaded, stored = lanes_of_rows(n, sample, rows, K, WINDOW, BLOCK)
    o = n * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(p_lanes + o, held.to(tl.int8) + 2 * loaded.to(tl.int8) + 4 * stored.to(tl.int8))


def wrong_lanes(length: int, sample: int, window: int) -> list[tuple[int, int]]:
    """The rows and lanes of a tile of eight, of which five are there, that are others than counted here."""
    found, rows, block = [], 5, power_of_two(length + window - 1)
    lanes = torch.full((8, block), -1, dtype=torch.int8)
    store_lanes[(1,)](lanes, sample, rows, length, window, 8, block)
    memory = (rows - 1) * sample + length
    for n in range(8):
        begin, end = n * sample, n * sample + length
        for lane in range(block):
            place = begin // window * window + lane
            first = place // window * window
            held, stored = begin <= place < end, begin <= first and first + window <= end
            loaded = first < end and first + window <= memory
            if int(lanes[n, lane]) != (held + 2 * loaded + 4 * stored if n < rows else 0):
                found.append((n, lane))
    return found
