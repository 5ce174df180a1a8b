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
    """The moments of some statistics: ``mean`` and ``m2`` of one shape, ``count`` of that shape or of one element."""

    count: Tensor
    mean: Tensor
    m2: Tensor

    def var(self) -> Tensor:
        """The biased variance; 0 where there are no elements."""
        return self.m2 / self.count.clamp(min=1)

    def unbiased_var(self) -> Tensor:
        """The unbiased variance, of which torch's running variance is an average."""
        return self.m2 / (self.count - 1)

    def packed(self) -> Tensor:
        """The moments as one vector to be exchanged: all means, all M2, then one count or all counts."""
        return torch.cat((self.mean.flatten(), self.m2.flatten(), self.count.flatten()))


def moments_of(count: int, mean: Tensor, var: Tensor) -> Moments:
    """A part of ``count`` elements for each statistic; ``var`` is biased."""
    elements = torch.full((1,), count, dtype=torch.float64, device=mean.device)
    return Moments(elements, mean.double(), var.double() * count)


def merge_in_order(parts: Tensor, statistics: int) -> Moments:
    """The moments of the whole, as vectors, from the packed parts of all ranks; any of them may be empty.

    ``parts`` has a row for each rank, of means and M2 of so many ``statistics``, and of one count or as many.
    The parts are merged one after the other in the order of the ranks, so every rank gets the same bits:
    delta = mean_b - mean_a, mean = mean_a + delta n_b / n, M2 = M2_a + M2_b + delta² n_a n_b / n.

    Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
    """
    means, m2s, counts = (list(each.unbind()) for each in parts.tensor_split((statistics, 2 * statistics), 1))
    mean, m2, total = means[0], m2s[0], counts[0]
    for rank in range(1, len(parts)):
        before, total = total, total + counts[rank]
        share = counts[rank] / total.clamp(min=1)
        delta = means[rank] - mean
        mean = mean + delta * share
        m2 = m2 + m2s[rank] + delta * delta * (before * share)
    return Moments(total, mean, m2)


@dataclass(frozen=True, slots=True)
class Units:
    """Which of a rank's (n, c), samples and channels, share a statistic of the whole.

    ``over_samples`` is batch_norm's. A group has ``group_channels`` of the whole's ``channels``, of which this rank has
    some, from the one of index ``first`` on.
    """

    channels: int
    over_samples: bool = False
    group_channels: int = 1
    first: int = 0

    def sums(self, values: Tensor) -> Tensor:
        """From (*, N, C) of this rank to the statistics of the whole, (*, N or 1, channels / group_channels)."""
        if self.over_samples:
            values = values.sum(-2, keepdim=True)
        missing = self.channels - self.first - values.shape[-1]
        if self.first or missing:
            values = torch.nn.functional.pad(values, (self.first, missing))
        if self.group_channels > 1:
            values = values.unflatten(-1, (-1, self.group_channels)).sum(-1)
        return values

    def spread(self, values: Tensor, channels: int) -> Tensor:
        """From the statistics of the whole, (*, N or 1, groups), to (*, N or 1, C) of this rank's ``channels``."""
        if self.group_channels > 1:
            values = values.unsqueeze(-1).expand(*values.shape, self.group_channels).flatten(-2)
        return values.narrow(-1, self.first, channels)

    def merge(self, part: Moments) -> Moments:
        """This rank's part of the statistics of the whole, from the moments of its (n, c).

        The count stays one number where every statistic has as many elements: where this rank has all channels.
        """
        channels = part.mean.shape[-1]
        complete = self.first == 0 and channels == self.channels and not (self.over_samples and len(part.mean) > 1)
        if complete and self.group_channels == 1:
            return part
        counts = part.count if complete else part.count.expand(part.mean.shape)
        count = counts * self.group_channels if complete else self.sums(counts)
        elements = count.clamp(min=1)
        mean = self.sums(counts * part.mean) / elements
        # The mean of the deviations corrects the rounding of the mean: the mean of equal numbers is then that number.
        mean = mean + self.sums(counts * (part.mean - self.spread(mean, channels))) / elements
        delta = part.mean - self.spread(mean, channels)
        return Moments(count, mean, self.sums(part.m2 + counts * delta * delta))
