"""The backward of long rows, which stay on the chip: input and grad_output are read once.

A block has a row at a time. Thread t has its vectors t, t + THREADS and so on, 16 bytes each, of the same columns in
all rows: the sums of p and q over the block's rows stay in its registers, and it reads from shared memory what it
copied there itself. In one turn a block stores the gradients of its last row, whose sums it has by then, and sums the
next row, while copies of the row behind come into shared memory: of SLOTS rows there, one is stored, one summed, and
one has been stored in the turn before. Threads meet before a copy begins, when one has come and before they leave their
sums, which nobody waits for until the next turn.
"""

from fusednorm.backends.hopper.kernels.elements import (
    neighbours_layout,
    product_sum_of,
    sum_of,
    tile_layout,
    values_of,
    words_of,
)
from fusednorm.private.gluon_names import async_load, commit_group, gl, gluon, wait_group


@gluon.jit
def extended(values, value):
    """A tuple with one value more."""
    return values + (value,)  # noqa: RUF005 (no unpacking in Gluon)


@gluon.jit
def words_at(p_words, row, rows, stride, step, K: gl.constexpr, WORDS: gl.constexpr, THREADS: gl.constexpr):
    """The words of a step of a row, and which of them there are."""
    o_vector = step * THREADS + gl.arange(0, THREADS, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    o_word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    p_row = p_words + row.to(gl.int64) * (stride * 4)
    m_words = ((row >= 0) & (row < rows)) & (o_word >= 0)[None, None, :]
    if (step + 1) * THREADS > K:
        m_words &= (o_vector < K)[None, :, None]
    return p_row + (o_vector * 4)[None, :, None] + o_word[None, None, :], m_words


@gluon.jit
def begin_copies(
    x_slots, dy_slots, slot, p_x, p_dy, row, rows, x_row, dy_row,
    STEPS: gl.constexpr, K: gl.constexpr, WORDS: gl.constexpr, THREADS: gl.constexpr,
):  # fmt: skip
    """Begin to copy a row of the input and of grad_output; where there is none, zeros. They count as one copy."""
    for step in gl.static_range(STEPS):
        p_words, m_words = words_at(p_x, row, rows, x_row, step, K, WORDS, THREADS)
        async_load(x_slots[step].index(slot), p_words, mask=m_words)
        p_words, m_words = words_at(p_dy, row, rows, dy_row, step, K, WORDS, THREADS)
        async_load(dy_slots[step].index(slot), p_words, mask=m_words)
    commit_group()


@gluon.jit
def statistics_of(p_mean, p_rstd, row, rows):
    """Mean and inverse deviation of a row, 0 where there is none."""
    rstd = gl.load(p_rstd + row, mask=row < rows, other=0.0)
    mean = gl.load(p_mean + row, mask=row < rows, other=0.0) if p_mean is not None else rstd * 0.0
    return mean, rstd


@gluon.jit
def columns_of(step, K: gl.constexpr, THREADS: gl.constexpr, VECTOR: gl.constexpr, layout: gl.constexpr):
    """The columns of a step, and which of them there are."""
    o_vector = step * THREADS + gl.arange(0, THREADS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    o_element = gl.arange(0, VECTOR, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    o_column = (o_vector * VECTOR)[None, :, None] + o_element[None, None, :]
    m_column = o_column >= 0
    if (step + 1) * THREADS > K:
        m_column &= (o_vector < K)[None, :, None]
    return o_column, m_column


@gluon.jit
def words_of_step(x_slots, dy_slots, stored, summed, step: gl.constexpr, WORDS: gl.constexpr):
    """The words of a step of the row that is stored and of the one that is summed."""
    return (
        x_slots[step].index(stored).load(WORDS), dy_slots[step].index(stored).load(WORDS),
        x_slots[step].index(summed).load(WORDS), dy_slots[step].index(summed).load(WORDS),
    )  # fmt: skip


@gluon.jit
def gradients_of(
    x_words, dy_words, mean, rstd, b_gain, b_offset, alpha,
    DERIVATIVE: gl.constexpr, DTYPE: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """dz and xhat of a step."""
    b_centred = values_of(x_words, VALUES, DTYPE) - mean
    b_dy = values_of(dy_words, VALUES, DTYPE)
    return b_dy * DERIVATIVE(gl.fma(b_centred, b_gain * rstd, b_offset), alpha), b_centred * rstd


@gluon.jit
def store_sums(
    p_sums, b_sums, K: gl.constexpr, THREADS: gl.constexpr, VECTOR: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Store the sums of columns over the block's rows, where they are wanted. Neighbouring threads store neighbours: of
    a thread's own vector of 16 bits, 32 bytes of sums, each store would fill half of a sector."""
    if p_sums is not None:
        dtype: gl.constexpr = p_sums.dtype.element_ty
        for step in gl.static_range(len(b_sums)):
            o_column, m_column = columns_of(step, K, THREADS, VECTOR, layout)
            gl.store(p_sums + o_column, gl.convert_layout(b_sums[step], layout).to(dtype), mask=m_column)


@gluon.jit
def sum_of_warps(b_each, WARPS: gl.constexpr):
    """The sums of each warp's values, one a thread."""
    return gl.sum(gl.reshape(b_each, [WARPS, 32]), 1)


@gluon.jit(do_not_specialize=["rows", "dy_row", "x_row", "dx_row", "inverse_count"])
def rows_backward(
    p_dy, p_x, p_dx, p_weight, p_bias, p_mean, p_rstd, p_partials, p_grad_weight, p_grad_bias,
    rows, dy_row, x_row, dx_row, inverse_count: gl.float32, activation_parameter: gl.float64,
    DERIVATIVE: gl.constexpr, ALPHA: gl.constexpr, BIAS: gl.constexpr, K: gl.constexpr, SLOTS: gl.constexpr,
    HELD: gl.constexpr,
):  # fmt: skip
    """grad_input, and the sums of p and q over the block's rows. K are the vectors of a row, in which the strides of
    rows are counted too. HELD: the weight is in shared memory."""
    DTYPE: gl.constexpr = p_x.dtype.element_ty
    p_dy = p_dy.to(gl.pointer_type(gl.int32), bitcast=True)
    p_x = p_x.to(gl.pointer_type(gl.int32), bitcast=True)
    p_dx = p_dx.to(gl.pointer_type(gl.int32), bitcast=True)
    VECTOR: gl.constexpr = 128 // DTYPE.primitive_bitwidth  # elements
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    STEPS: gl.constexpr = (K + THREADS - 1) // THREADS
    SUMS: gl.constexpr = p_partials is not None or p_grad_weight is not None or p_grad_bias is not None
    WORDS: gl.constexpr = tile_layout(1, 4, WARPS)
    VALUES: gl.constexpr = tile_layout(1, VECTOR, WARPS)
    NEIGHBOURS: gl.constexpr = neighbours_layout(VECTOR, WARPS)
    EACH: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, VALUES))
    ALL: gl.constexpr = gl.BlockedLayout([WARPS], [32], [WARPS], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # An allocation to each step: Triton has all threads meet between two copies to one allocation.
    x_slots, dy_slots, weights, sums_p, sums_q = (), (), (), (), ()
    for step in gl.static_range(STEPS):
        x_slots = extended(x_slots, gl.allocate_shared_memory(gl.int32, [SLOTS, 1, THREADS, 4], SHARED))
        dy_slots = extended(dy_slots, gl.allocate_shared_memory(gl.int32, [SLOTS, 1, THREADS, 4], SHARED))
        if HELD:
            o_column, m_column = columns_of(step, K, THREADS, VECTOR, VALUES)
            held = gl.allocate_shared_memory(p_weight.dtype.element_ty, [1, THREADS, VECTOR], SHARED)
            held.store(gl.load(p_weight + o_column, mask=m_column, other=0.0))
            weights = extended(weights, held)
        sums_p = extended(sums_p, gl.zeros([1, THREADS, VECTOR], gl.float32, VALUES))
        sums_q = extended(sums_q, gl.zeros([1, THREADS, VECTOR], gl.float32, VALUES))
    # Of each warp: p and q of the row that is summed, and of the one before it.
    totals = gl.allocate_shared_memory(gl.float32, [4, WARPS], FLAT)
    alpha = gl.cast(activation_parameter, gl.float32) if ALPHA is None else gl.to_tensor(ALPHA)
    block, blocks = gl.program_id(0), gl.num_programs(0)
    for slot in gl.static_range(SLOTS - 2):
        begin_copies(
            x_slots, dy_slots, slot, p_x, p_dy, block + slot * blocks, rows, x_row, dy_row, STEPS, K, WORDS, THREADS
        )
    mean, rstd = statistics_of(p_mean, p_rstd, block, rows)
    # Not those of the first row, since no row is stored yet: two values of a loop that begin as one stay one in MLIR.
    last_mean, last_rstd = gl.to_tensor(0.0), gl.to_tensor(1.0)
    copied, summed, stored, side = gl.to_tensor(SLOTS - 2), gl.to_tensor(0), gl.to_tensor(SLOTS - 1), gl.to_tensor(0)
    for row in range(block, rows + blocks, blocks):
        begin_copies(
            x_slots, dy_slots, copied, p_x, p_dy, row + (SLOTS - 2) * blocks, rows, x_row, dy_row, STEPS, K, WORDS,
            THREADS,
        )  # fmt: skip
        next_mean, next_rstd = statistics_of(p_mean, p_rstd, row + blocks, rows)
        wait_group(SLOTS - 2)
        factor = -inverse_count * last_rstd
        first = gl.sum(totals.index(2 - side).load(ALL), 0) * factor if p_mean is not None else 0.0
        second = gl.sum(totals.index(3 - side).load(ALL), 0) * factor
        total_p = gl.zeros([THREADS], gl.float32, EACH)
        total_q = gl.zeros([THREADS], gl.float32, EACH)
        new_p, new_q = (), ()
        words = words_of_step(x_slots, dy_slots, stored, summed, 0, WORDS)
        for step in gl.static_range(STEPS):
            o_column, m_column = columns_of(step, K, THREADS, VECTOR, VALUES)
            b_gain = gl.full([1, THREADS, VECTOR], 1.0, gl.float32, VALUES)
            b_offset = gl.zeros([1, THREADS, VECTOR], gl.float32, VALUES)
            if HELD:
                b_gain = weights[step].load(VALUES).to(gl.float32)
            elif p_weight is not None:
                b_gain = gl.load(p_weight + o_column, mask=m_column, other=0.0).to(gl.float32)
            if p_bias is not None:
                b_offset = gl.load(p_bias + o_column, mask=m_column, other=0.0).to(gl.float32)
            next_words = words_of_step(x_slots, dy_slots, stored, summed, min(step + 1, STEPS - 1), WORDS)
            b_dz, b_xhat = gradients_of(
                words[0], words[1], last_mean, last_rstd, b_gain, b_offset, alpha, DERIVATIVE, DTYPE, VALUES
            )
            b_dx = gl.fma(b_dz * b_gain, last_rstd, gl.fma(b_xhat, second, first))
            p_words, m_words = words_at(p_dx, row - blocks, rows, dx_row, step, K, WORDS, THREADS)
            gl.store(p_words, words_of(b_dx, WORDS, DTYPE), mask=m_words)
            b_dz, b_xhat = gradients_of(
                words[2], words[3], mean, rstd, b_gain, b_offset, alpha, DERIVATIVE, DTYPE, VALUES
            )
            b_g = b_dz * b_gain
            total_p += sum_of(b_g)
            total_q += product_sum_of(b_g, b_xhat, EACH)
            if SUMS:
                new_q = extended(new_q, gl.fma(b_dz, b_xhat, sums_q[step]))
                if BIAS:
                    new_p = extended(new_p, sums_p[step] + b_dz)
            words = next_words
        if SUMS:
            sums_q = new_q
            if BIAS:
                sums_p = new_p
        totals.index(side).store(sum_of_warps(total_p, WARPS))
        totals.index(side + 1).store(sum_of_warps(total_q, WARPS))
        last_mean, last_rstd, mean, rstd, side = mean, rstd, next_mean, next_rstd, 2 - side
        copied, summed, stored = stored, gl.where(summed == SLOTS - 1, 0, summed + 1), summed
    if SUMS:
        p_sums_p, p_sums_q = p_grad_bias, p_grad_weight
        if p_partials is not None:
            p_sums_p = p_partials + block.to(gl.int64) * (K * VECTOR)
            p_sums_q = p_sums_p + blocks.to(gl.int64) * (K * VECTOR)
        store_sums(p_sums_q, sums_q, K, THREADS, VECTOR, NEIGHBOURS)
        if BIAS:
            store_sums(p_sums_p, sums_p, K, THREADS, VECTOR, NEIGHBOURS)
