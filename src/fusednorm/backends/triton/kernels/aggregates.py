"""Named tuples of arguments that belong together, for the functions that kernels call.

A kernel makes these tuples at its head. It does not take them as arguments: each would cost the host 0.3 us with Triton
3.6, and Triton specializes every integer in a tuple for the value 1 and for divisibility by 16, whatever
``do_not_specialize`` says.
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


class Channels(NamedTuple):
    """Pointers to the first channel of some positions, and the stride from a channel to the next."""

    begin: Any
    step: Any


class Parameters(NamedTuple):
    """Pointers to the parameters, or to their gradients; None for an absent parameter or an unwanted gradient."""

    weight: Any
    bias: Any
    scale: Any
    shift: Any


class Statistics(NamedTuple):
    """Pointers to the mean, None for rms_norm, and to the inverse deviation of each unit."""

    mean: Any
    rstd: Any


class Added(NamedTuple):
    """What is added around the norm of a forward's units: pointers, of which each may be None, to pre_add, to its gate,
    to a number for each channel and to post_add, where the sum is stored, and the strides of pre_add and post_add.
    ``gate_rows`` units share one gate, and the next one lies ``gate_step`` behind it.

    The strides are no tuple of their own: Triton 3.6 loses a 1 that is compiled in, three functions down.
    """

    before: Any
    gate: Any
    bias: Any
    behind: Any
    total: Any
    before_sample: Any
    before_channel: Any
    before_spatial: Any
    behind_sample: Any
    behind_channel: Any
    behind_spatial: Any
    gate_rows: Any
    gate_step: Any


class Numbers(NamedTuple):
    """What belongs to channels of what is added before a norm, along their axis of a tile: the gate, or what lies in
    its place, and the bias; None for what there is not."""

    gate: Any
    bias: Any


class AddedGradients(NamedTuple):
    """What a backward has of the sums around the norm: pointers, of which each may be None, to post_add, to its
    gradient and to the gradient of the sum, and the strides of post_add. Its gradient lies as grad_input does, that of
    the sum as the input."""

    behind: Any
    grad_behind: Any
    grad_total: Any
    behind_sample: Any
    behind_channel: Any
    behind_spatial: Any


class GatedGradients(NamedTuple):
    """What a backward of rows has of a product before the norm: pointers to the gate, to pre_add and to the gradient of
    pre_add, and to the sums of each program for the gradient of the gate, or to that gradient where a program has all
    of a gate's rows. Each may be None, the gate where there is no product. The strides are those of pre_add, whose
    gradient lies as grad_input does. ``rows`` rows share one gate, and the next one lies ``step`` behind it.
    """

    gate: Any
    before: Any
    grad_before: Any
    sums: Any
    before_sample: Any
    before_row: Any
    rows: Any
    step: Any


class Partials(NamedTuple):
    """Two numbers that a pass leaves for each sample, channel and chunk; the second lies ``total`` behind the first.

    ``groups`` are the groups as that pass saw them: it may take a whole group for one channel. A unit has ``rows`` rows
    of partials of its D channels: one for each chunk, in batch_norm for each chunk of each sample.
    """

    pointer: Any
    total: Any
    groups: Any
    rows: Any
    chunks: Any
