"""The int64 vector that tells a kernel the view, the strides and the parts: its fields, in order.

Kernels read a field as ``geometry[SAMPLES]``; :func:`geometry` makes the vector from a problem.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fusednorm.problem import Layout, Problem, View

SAMPLES, GROUPS, GROUP_CHANNELS, SPATIAL = range(4)
PER_BATCH, RMS, TRAINING = range(4, 7)
#: The dtypes of the operands and of their gradients, as DTYPE_CODES; 0 where the problem has no such operand.
WEIGHT_DTYPE, BIAS_DTYPE, SCALE_DTYPE, SHIFT_DTYPE = range(7, 11)
#: Strides in elements between samples and between steps: channels in channels_first, positions in channels_last.
INPUT_SAMPLE, INPUT_STEP, OUTPUT_SAMPLE, OUTPUT_STEP, GRAD_SAMPLE, GRAD_STEP = range(11, 17)
#: The fixed partition of the work, a function of the problem alone: the number of pieces and their size.
PIECES, PIECE = 17, 18
#: Which results are wanted.
WANT_VARIANCE, WANT_INPUT_GRAD = 19, 20
#: How many positions channels_last takes as one row, where their few channels follow one another in all tensors.
REPEAT = 21
#: Whether the channels of a group share its weight and bias: batch_norm's positions, seen as channels.
SHARED = 22
#: How many short planes of channels_first make a tile, and how many units are taken together.
TILE_PLANES, TILE_UNITS = 23, 24
#: Rows that a backward sums in the compute dtype before the sums go to float64.
ROWS_FLUSHED = 64
#: How many blocks of positions make a task where each position has statistics of its own.
BLOCKS = 25
#: Of rows and columns: the dtypes of weight and bias where loops read these, or 0 where they read the modulated ones,
#: and how many elements further those of the next sample are.
GAIN_DTYPE, OFFSET_DTYPE, MODULATION = 26, 27, 28
#: Of how many rows, or blocks of positions, the parameters' gradients are summed together: those of a sample where
#: scale or shift differ by sample, or all; of rows that have one gate, where its gradient is made.
SUMMED = 29
#: Strides between rows of what is added before and behind a norm, and of s. Where nobody keeps s, each worker has room
#: for one row of it, TOTAL_WORKER behind that of the worker before.
PRE_SAMPLE, POST_SAMPLE, TOTAL_SAMPLE, TOTAL_WORKER = range(30, 34)
#: Whether a gate has an element for each of a row's, how many rows share one gate, and the step to the next.
GATE_PER_ELEMENT, GATE_ROWS, GATE_STEP = range(34, 37)
#: The same between planes of channels_first, and between those of the one unit of s for which each worker has room.
PRE_STEP, POST_STEP, TOTAL_STEP, TOTAL_ROW = range(37, 41)
#: Of a backward with a gate: whether the gradients of pre_add and of the gate are wanted.
WANT_PRE_GRAD, WANT_GATE_GRAD = 41, 42
#: How many segments of rows make the gradients of the parameters, and that of a gate.
SEGMENTS, GATE_SEGMENTS = 43, 44
#: Of points: the dtypes of scale and shift, which differ by position and not by sample, and of how many positions
#: together.
POINT_SCALE_DTYPE, POINT_SHIFT_DTYPE, TOGETHER = 45, 46, 47
#: Of how many samples each worker keeps the coefficients of channels_last, or 0 where those of all samples are kept.
SLOTS = 48
#: Whether a slab of channels_last is a run of one group's elements.
RUN = 49
#: Into how many parts, of whole groups, a segment of rows is cut.
PARTS = 50
#: Of rows made of samples: the elements of a plane, which share their weight and bias, and the step from one to the
#: next.
PLANE, PLANE_STEP = 51, 54
#: How many elements of the compute dtype the weight and bias that each worker has converted for itself lie behind those
#: of the worker before, and 0 where all read the same; and what it keeps.
WIDE_WORKER, KEPT_WORKER = 52, 53
#: Whether a sample's planes begin where those of the sample before end, so that units of several are taken together.
SPANS = 55
FIELDS = 56
#: Groups of rows that a backward takes together, the elements of a tensor in float32 up to which it does, and those of
#: a group under an exponential.
TOGETHER_ROWS, MOST_TOGETHER, SHORT_TOGETHER = 16, 3 << 19, 80
#: An activation, or a derivative, of more operations has an exponential.
COSTLY_FLOPS = 8
#: Elements of the arrays that kernels keep on the stack: three of float32 take 6 KB of the L1 cache.
SCRATCH = 512
#: Channels that a backward of few rows takes together, whose sums, in the compute dtype, fit such arrays.
COLUMNS = SCRATCH
#: Planes of at most so many elements are taken in tiles (:func:`in_tiles` says which of the two numbers holds when),
#: and the longer ones of batch_norm in float32 over so many samples at least.
TILED_PLANE, ALWAYS_TILED_PLANE, FEWEST_TILED = 64, 32, 8
#: Planes of so many elements at most, each a unit, are taken together in a forward.
FEW_VECTORS = {"float64": 64, "float32": 100, "float16": 256, "bfloat16": 256}
#: The same in a backward, and of units of a few planes, which are longer than those that rows take; without an
#: activation, and with one.
FEW_VECTORS_BACKWARD = {
    False: {"float64": 100, "float32": 256, "float16": 256, "bfloat16": 256},
    True: {"float64": 16, "float32": 144, "float16": 256, "bfloat16": 256},
}
FEW_PLANES, FEWEST_GROUPED = 4, 32
MOST_GROUPED = {
    False: {"float64": 0, "float32": 144, "float16": 256, "bfloat16": 256},
    True: {"float64": 0, "float32": 81, "float16": 144, "bfloat16": 144},
}
#: batch_norm's in a backward, and elements of the compute dtype that it keeps of an activation.
FEW_VECTORS_BATCH = {
    False: {"float64": 49, "float32": 100, "float16": 144, "bfloat16": 144},
    True: {"float64": 27, "float32": 64, "float16": 100, "bfloat16": 100},
}
MOST_KEPT_BATCH = 1 << 18
NO_VECTORS = dict.fromkeys(FEW_VECTORS, 0)
#: Groups of rows of at most so many elements are taken by blocks of groups, or of so many with an exponential: in
#: float32 341 x 32 groups of 24 take 114 us in blocks and 99 one by one, but backward with silu 152 and 300.
SHORT_GROUP, COSTLY_SHORT_GROUP = 20, 31
#: Units of at most so many elements are short to the backward of an activation.
SHORT_UNIT = 256
#: Channels that are few; the elements of a vector, those that a row of several positions is to have, and the rows of a
#: sample at least. A loop over a row begins with 40 cycles: the backward of 5 x 19 x 12495 in bfloat16 took 531 us
#: position by position, and takes 143.
FEW_CHANNELS, VECTOR, ROW_ELEMENTS, FEWEST_ROWS = 64, 16, 256, 8

FLOAT32, FLOAT64, FLOAT16, BFLOAT16 = range(1, 5)
DTYPE_CODES = {None: 0, "float32": FLOAT32, "float64": FLOAT64, "float16": FLOAT16, "bfloat16": BFLOAT16}

#: The coefficients that channels_last keeps per (n, c): mean, a, b and rstd, and for the gradient c2 and c3.
COEFFICIENTS = 6


def parameter_rows(problem: Problem) -> tuple[int, int]:
    """How many rows, those of each position, a problem of rows has, and how many share all parameters."""
    view = problem.view
    rows = view.samples * view.spatial
    return rows, view.spatial if problem.modulated else rows


def summed_rows(problem: Problem) -> tuple[int, int]:
    """How many rows a problem of rows has, and of how many sums are taken together: of all that share their parameters,
    and a gate whose gradient is made. A gate's rows are those of some samples, or a part of one's."""
    rows, summed = parameter_rows(problem)
    if problem.gated_backward:
        assert problem.added is not None and problem.added.gate is not None
        summed = min(summed, problem.added.gate.rows)
    return rows, summed


def _strides(view: View, layout: Layout) -> tuple[int, int]:
    """Between samples, and between channels or positions; from the only channel of a sample to that of the next, and
    from an only one to its end."""
    if layout.order == "channels_last":
        return layout.sample, layout.spatial
    if view.channels > 1:
        return layout.sample, layout.channel
    return layout.sample, layout.sample if view.samples > 1 else view.spatial


def repeat(problem: Problem) -> int:
    """How many positions of channels_last make a row: loops over rows of few elements would take one at a time."""
    view, layouts = problem.view, problem.layouts
    if problem.layout.order == "channels_first" or not 0 < view.channels <= FEW_CHANNELS:
        return 1
    if any(layout is not None and layout.spatial != view.channels for layout in layouts):
        return 1
    most = max(1, view.spatial // FEWEST_ROWS)
    together = 1
    while together * view.channels < ROW_ELEMENTS and 2 * together <= most:
        together *= 2
    return together


def is_run(problem: Problem) -> bool:
    """Whether the positions of channels_last follow one another and belong to one group, whose statistics are then
    those of a run of elements; what has a sum before it lies elsewhere."""
    view, last = problem.view, problem.layout.order == "channels_last"
    one = view.groups == 1 and not problem.norm.per_batch and problem.added is None
    return last and one and (view.spatial == 1 or problem.layout.spatial == view.channels)


def in_blocks(problem: Problem) -> bool:
    """Whether the groups of rows are so short that blocks of groups take them, which follow one another in memory."""
    view, activation = problem.view, problem.norm.activation
    most = COSTLY_SHORT_GROUP if activation is not None and activation.flops > 8 else SHORT_GROUP
    if problem.added is not None or problem.quantized is not None or not 1 < view.group_channels <= most:
        return False
    if problem.modulated and view.spatial > 1:
        return False
    layouts = [layout for layout in problem.layouts if layout is not None]
    close = view.spatial == 1 or all(layout.spatial == view.channels for layout in layouts)
    return close and (view.samples == 1 or all(each.sample == view.channels * view.spatial for each in layouts))


def fit_vectors(problem: Problem) -> bool:
    """Whether the backward of rows can take sixteen groups together, by vectors: short groups around which nothing is
    added. Of fp16 and an activation without an exponential LLVM makes scalar code there."""
    activation, length = problem.norm.activation, problem.view.group_channels
    scalar = problem.dtype == "float16" and activation is not None and activation.derivative_flops <= COSTLY_FLOPS
    return problem.added is None and VECTOR <= length <= SHORT_UNIT and not scalar


def in_vectors(problem: Problem) -> bool:
    """Whether the backward of rows takes groups together: one to a row in 16 bits; in float32 those of rows that lie in
    cache, and short ones under an exponential, but not under relu and leaky_relu, of which LLVM makes scalar code.
    On two threads, together and row by row, in us: layer_norm of (8000, 75) 186 and 224, with silu 325 and 399,
    (20000, 75) 410 and 518, (10000, 200) 678 and 498, (100000, 75) 3038 and 2659, with silu 4246 and 4784, (60000, 100)
    3627 and 3244; group_norm of (1000, 600) in 4 groups in one thread 244 and 279, with relu 623 and 333, of (8000,
    1000) in 8 8680 and 5310. In one thread layer_norm of (20000, 128) in bfloat16 takes 1.6 ms together, and 1.9."""
    view, activation = problem.view, problem.norm.activation
    flops = 0 if activation is None else activation.derivative_flops
    if problem.dtype != "float32":
        pays = view.groups == 1 and problem.dtype in ("float16", "bfloat16")
    elif flops == 1:
        pays = False
    else:
        pays = view.numel <= MOST_TOGETHER or (flops > COSTLY_FLOPS and view.group_channels <= SHORT_TOGETHER)
    return pays and fit_vectors(problem)


def padded(n: int) -> int:
    """A number of elements in whole vectors."""
    return (n + VECTOR - 1) // VECTOR * VECTOR


def by_vectors(problem: Problem) -> bool:
    """Whether channels_first's planes of one vector or a few are taken together: those that are units of their own, and
    in a backward units of a few and batch_norm's. In one thread, us together and plane by plane: forward of (42, 1111,
    100) in float16 with relu 1170 and 2120, (42, 1111, 81) in float32 1670 and 2070, (22, 1111, 128) 1390 and 1130, in
    bfloat16 780 and 1300, (42, 1111, 81) in float64 5740 and 3230; backward of (83, 64, 49) in float32 150 and 290, in
    groups of two 160 and 210, of 8 150 and 146, (28, 64, 144) 107 and 145, in bfloat16 130 and 166, in groups of two in
    float64 195 and 160, (83, 256, 49) with relu in float32 710 and 1090, in bfloat16 710 and 1320, (20, 256, 256) in
    float32 760 and 520, with silu (50, 256, 64) in bfloat16 690 and 1010, batch_norm of (6, 1024, 27) in float32 126
    and 163, with relu 154 and 209."""
    view, longest = problem.view, _longest_by_vectors(problem)
    if problem.added is not None or not VECTOR <= view.spatial <= longest[problem.dtype]:
        return False
    if not problem.backward:
        return problem.norm.has_mean
    if problem.norm.per_batch and problem.norm.activation is not None:
        return VECTOR * (1 + view.samples) * padded(view.spatial) <= MOST_KEPT_BATCH
    return problem.norm.training


def _longest_by_vectors(problem: Problem) -> dict[str, int]:
    """The elements of the longest planes that are taken together, by dtype."""
    view, activated = problem.view, problem.norm.activation is not None
    if problem.norm.per_batch:
        by_vectors = problem.backward and problem.norm.training and not problem.by_sample
        return FEW_VECTORS_BATCH[activated] if by_vectors else NO_VECTORS
    if view.group_channels == 1:
        return FEW_VECTORS_BACKWARD[activated] if problem.backward else FEW_VECTORS
    few = problem.backward and 1 < view.group_channels <= FEW_PLANES and view.spatial > FEWEST_GROUPED
    return MOST_GROUPED[activated] if few else NO_VECTORS


def in_tiles(problem: Problem) -> bool:
    """Whether the planes of channels_first are so short that tiles of many take them.

    A plane that fills a vector is taken by vectors (lanes.py) where no activation, or none but a derivative, is
    computed; units are not to be so short that what each takes by itself costs more than its elements. Elsewhere, to
    spread coefficients over planes of more than 32 elements costs what the loops over tiles save; of more than 64 where
    scalar code would compute an exponential, and in a forward where units are so short as well. In one thread, us in
    tiles and plane by plane: instance_norm forward of (8, 963, 33) in float32 244 and 278, (8, 512, 64) 173 and 154, in
    bfloat16 176 and 174, (8, 404, 81) 238 and 158; group_norm with relu of (8, 1310, 25) in fours in float32 231 and
    158, in bfloat16 232 and 205, with silu 275 and 381; batch_norm of (12, 546, 40) in float32 114 and 140, in bfloat16
    125 and 182, of (6, 1213, 36) 166 and 144, and 169 and 183.
    """
    activation, spatial, backward = problem.norm.activation, problem.view.spatial, problem.backward
    exponential = activation is not None and activation.flops > COSTLY_FLOPS
    if not backward and 0 < problem.reduced <= TILED_PLANE:
        return True
    if not backward and problem.norm.per_batch:
        several = problem.view.samples >= FEWEST_TILED or problem.dtype in ("float16", "bfloat16")
        return 0 < spatial <= (TILED_PLANE if several else ALWAYS_TILED_PLANE)
    by_vectors = (activation is None or problem.reduced > SHORT_UNIT) if backward else not exponential
    if problem.added is None and by_vectors:
        return 0 < spatial < VECTOR
    costly = exponential and (backward or problem.dtype != "float32")
    return 0 < spatial <= (TILED_PLANE if costly else ALWAYS_TILED_PLANE)


def spans(problem: Problem) -> bool:
    """Whether units of several samples are taken together: one after another (7281, 1, 9) in one group in float32 took
    600 us, and eager torch 240."""
    view = problem.view
    alone = not problem.norm.per_batch and problem.added is None and problem.layout.order == "channels_first"
    strides = [_strides(view, layout) for layout in problem.layouts if layout is not None]
    return alone and all(sample == view.channels * step for sample, step in strides)


def tile(problem: Problem) -> tuple[int, int]:
    """How many planes make a tile, and how many units are taken together: 1 and 1 where planes do not touch."""
    view = problem.view
    steps = [_strides(view, layout)[1] for layout in problem.layouts if layout is not None]
    touch = problem.layout.order == "channels_first" and all(step == view.spatial for step in steps)
    if not touch or not in_tiles(problem):
        return 1, 1
    planes = SCRATCH // view.spatial
    units = planes if problem.norm.per_batch else max(1, planes // max(1, view.group_channels))
    return planes, units - units % VECTOR if units >= VECTOR else units  # sums are made of VECTOR units at a time


def geometry(problem: Problem, pieces: int, piece: int) -> np.ndarray:
    """The vector of a problem whose work is cut into so many pieces of so many elements, positions or rows."""
    fields = np.zeros(FIELDS, np.int64)
    view = problem.view
    fields[: SPATIAL + 1] = view.samples, view.groups, view.group_channels, view.spatial
    norm = problem.norm
    fields[PER_BATCH : TRAINING + 1] = norm.per_batch, not norm.has_mean, norm.training
    operands = (problem.weight_dtype, problem.bias_dtype, problem.scale_dtype, problem.shift_dtype)
    fields[WEIGHT_DTYPE : SHIFT_DTYPE + 1] = [DTYPE_CODES[dtype] for dtype in operands]
    fields[INPUT_SAMPLE:OUTPUT_SAMPLE] = _strides(view, problem.layout)
    if problem.output_layout is not None:
        fields[OUTPUT_SAMPLE:GRAD_SAMPLE] = _strides(view, problem.output_layout)
    if problem.grad_layout is not None:
        fields[GRAD_SAMPLE:PIECES] = _strides(view, problem.grad_layout)
    fields[PIECES], fields[PIECE] = pieces, piece
    fields[GAIN_DTYPE : MODULATION + 1] = (
        (0, 0, view.channels) if problem.modulated else (*fields[WEIGHT_DTYPE : BIAS_DTYPE + 1], 0)
    )
    fields[WANT_INPUT_GRAD] = problem.direction != "backward_gamma_beta"
    fields[REPEAT], fields[RUN] = repeat(problem), is_run(problem)
    fields[TILE_PLANES : TILE_UNITS + 1], fields[SPANS] = tile(problem), spans(problem)
    added = problem.added
    if added is not None:
        if added.pre_layout is not None:
            fields[PRE_SAMPLE], fields[PRE_STEP] = _strides(view, added.pre_layout)
        if added.post_layout is not None:
            fields[POST_SAMPLE], fields[POST_STEP] = _strides(view, added.post_layout)
        if added.gate is not None:
            fields[GATE_PER_ELEMENT : GATE_STEP + 1] = added.gate.per_element, added.gate.rows, added.gate.step
        fields[WANT_PRE_GRAD : WANT_GATE_GRAD + 1] = added.grad_pre_add, added.pre_layout is not None
    return fields
