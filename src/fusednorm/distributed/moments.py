"""Count, mean and M2 (the sum of squared deviations) of each rank's part, and of the whole that the parts make.

All are float64. A count is exact in it up to 2⁵³, in float32 only up to 2²⁴, and the merge adds nothing to the rounding
of the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class Moments:
    """The moments of C statistics: ``count`` of shape (), ``mean`` and ``m2`` of shape (C,)."""

    count: Tensor
    mean: Tensor
    m2: Tensor

    def var(self) -> Tensor:
        """The biased variance; 0 where there are no elements."""
        return self.m2 / self.count.clamp(min=1)

    def unbiased_var(self) -> Tensor:
        """The unbiased variance, of which torch's running variance is an average."""
        return self.m2 / (self.count - 1)


def pack(count: int, mean: Tensor, var: Tensor) -> Tensor:
    """A rank's part as one vector (2 C + 1,) to be exchanged; ``var`` is biased."""
    channels = mean.numel()
    values = torch.empty(2 * channels + 1, dtype=torch.float64, device=mean.device)
    values[:channels] = mean
    values[channels:-1] = var
    values[channels:-1] *= count
    values[-1] = count
    return values


def merge_in_order(parts: Tensor) -> Moments:
    """The moments of the whole, from packed parts of shape (ranks, 2 C + 1); any of them may be empty.

    The parts are merged one after the other in the order of the ranks, so every rank gets the same bits:
    delta = mean_b - mean_a, mean = mean_a + delta n_b / n, M2 = M2_a + M2_b + delta² n_a n_b / n.

    Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
    """
    channels = parts.shape[1] // 2
    counts = parts[:, -1]
    # The sums of the first counts, exact in any order. cumsum is refused on GPUs under deterministic algorithms.
    totals = counts.expand(len(counts), -1).tril().sum(1)
    shares = counts / totals.clamp(min=1)
    weights = (totals - counts) * shares
    mean, m2 = parts[0, :channels], parts[0, channels:-1]
    for rank in range(1, len(parts)):
        delta = parts[rank, :channels] - mean
        mean = mean + delta * shares[rank]
        m2 = m2 + parts[rank, channels:-1] + delta * delta * weights[rank]
    return Moments(totals[-1], mean, m2)
