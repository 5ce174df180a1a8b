"""What belongs together, as the functions of kernels take it: named tuples, which Triton flattens from 3.6 on.

A kernel makes them of its arguments at its head. As arguments they would cost the host, with Triton 3.6 0.3 us each,
and Triton compiles every integer in one for the value 1 and for divisibility by 16, whatever the kernel says.
"""

from typing import Any, NamedTuple


class Groups(NamedTuple):
    """The channels of a view: G groups of D channels, C in all."""

    G: Any
    D: Any
    C: Any


class Steps(NamedTuple):
    """The strides of a tensor in its view, in elements."""

    sample: Any
    channel: Any
    spatial: Any


class Parameters(NamedTuple):
    """Pointers to the parameters, or to their gradients; None for each that a problem has not, or nobody wants."""

    weight: Any
    bias: Any
    scale: Any
    shift: Any


class Statistics(NamedTuple):
    """Pointers to the mean, None for rms_norm, and to the inverse deviation of each unit."""

    mean: Any
    rstd: Any


class Partials(NamedTuple):
    """What a pass leaves: one number for each sample, channel and chunk, and another one ``total`` behind it.

    ``groups`` are those of the pass that sums, to which a group may be one channel. A unit has ``rows`` of partials of
    its D channels: its chunks, those of all samples in batch_norm.
    """

    pointer: Any
    total: Any
    groups: Any
    rows: Any
    chunks: Any
