"""channels_first where the channels of each position have statistics of their own, read once.

A block takes LANES vectors of 16 bytes of each of a sample's channels: all of them come into shared memory together,
and stay there while the block walks over them for the mean, for the squares of the distances to it, and for the output.
Several blocks share a multiprocessor, so that the copies of one overlap with the arithmetic of others. A thread reads
from shared memory what it copied there itself: a vector of some channels of each step of ROWS.
"""

from fusednorm.backends.hopper.kernels.chunks import affine
from fusednorm.backends.hopper.kernels.elements import columns_layout, values_of, words_of
from fusednorm.backends.hopper.kernels.moments import inverse_deviation, mean_of
from fusednorm.private.gluon_names import async_load, commit_group, gl, gluon, wait_group


@gluon.jit
def sample_of(blocks):
    """The sample of a block."""
    return (gl.program_id(0) // blocks).to(gl.int64)


@gluon.jit
def lanes_of(blocks, layout: gl.constexpr, LANES: gl.constexpr):
    """The vectors of each channel that a block has, some of which may be beyond the last one."""
    return gl.program_id(0) % blocks * LANES + gl.arange(0, LANES, layout)


@gluon.jit
def rows_of(step, layout: gl.constexpr, ROWS: gl.constexpr):
    """The channels of a step, some of which may be beyond the last one."""
    return step * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))


@gluon.jit
def words_at(p_words, vectors, stride, blocks, LANES: gl.constexpr, LAYOUT: gl.constexpr):
    """The words of a block's lanes in the first channel of its sample, and which of the lanes there are; those that
    there are not are the last one. ``stride`` is that of samples."""
    o_lane = lanes_of(blocks, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)), LANES)
    o_word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    o_vector = sample_of(blocks) * stride + gl.minimum(o_lane, vectors - 1)
    return p_words + (o_vector * 4)[None, :, None] + o_word, (o_lane < vectors)[None, :, None]


@gluon.jit
def begin_copies(
    slots, p_x, vectors, blocks, x_sample, x_channel,
    K: gl.constexpr, ROWS: gl.constexpr, LANES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Begin to copy all channels of the block's positions. Rows and lanes beyond the last ones copy these again."""
    p_first = words_at(p_x, vectors, x_sample, blocks, LANES, LAYOUT)[0]
    for step in range((K + ROWS - 1) // ROWS):
        o_channel = gl.minimum(rows_of(step, LAYOUT, ROWS), K - 1)
        p_words = p_first + (o_channel.to(gl.int64) * x_channel * 4)[:, None, None]
        async_load(slots.index(step), p_words)


@gluon.jit
def positions_of(vectors, blocks, layout: gl.constexpr, LANES: gl.constexpr, VECTOR: gl.constexpr):
    """The places of the block's positions (lanes, elements) among all positions, and which of them there are."""
    o_lane = lanes_of(blocks, gl.SliceLayout(1, layout), LANES)
    o_element = gl.arange(0, VECTOR, gl.SliceLayout(0, layout))
    o_position = ((sample_of(blocks) * vectors + o_lane) * VECTOR)[:, None] + o_element[None, :]
    return o_position, (o_lane < vectors)[:, None] & (o_element >= 0)[None, :]


@gluon.jit
def affine_of_rows(p_weight, p_bias, p_scale, p_shift, sample, o_row, K: gl.constexpr):
    """A and B of a step's channels, for all of their vectors."""
    o_channel = gl.minimum(o_row, K - 1)
    gain, offset = affine(p_weight, p_bias, p_scale, p_shift, o_channel, sample * K + o_channel)
    return gain[:, None, None], offset[:, None, None]


@gluon.jit
def store_rows(
    p_first, m_lane, step, b_values, channel,
    DTYPE: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """Store the values of a step's channels. ``channel`` is the stride of channels."""
    o_row = rows_of(step, WORDS, ROWS)
    p_words = p_first + (o_row.to(gl.int64) * channel * 4)[:, None, None]
    gl.store(p_words, words_of(b_values, WORDS, DTYPE), mask=(o_row < K)[:, None, None] & m_lane)


@gluon.jit(do_not_specialize=["vectors", "x_sample", "x_channel", "y_sample", "y_channel", "blocks", "inverse_count"])
def columns_forward(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd,
    vectors, x_sample, x_channel, y_sample, y_channel, blocks, inverse_count: gl.float32, eps: gl.float64,
    activation_parameter: gl.float64,
    RMS: gl.constexpr, VALUE: gl.constexpr, ALPHA: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr,
    LANES: gl.constexpr,
):  # fmt: skip
    """Statistics and results. ``vectors`` are those of a channel, in which the strides are counted too."""
    DTYPE: gl.constexpr = p_x.dtype.element_ty
    p_x = p_x.to(gl.pointer_type(gl.int32), bitcast=True)
    p_y = p_y.to(gl.pointer_type(gl.int32), bitcast=True)
    VECTOR: gl.constexpr = 128 // DTYPE.primitive_bitwidth  # elements
    STEPS: gl.constexpr = (K + ROWS - 1) // ROWS
    EVEN: gl.constexpr = K % ROWS == 0
    CORRECTED: gl.constexpr = VECTOR == 4 and not RMS  # 32-bit elements, as in held_moments
    WORDS: gl.constexpr = columns_layout(LANES, 4, gl.num_warps())
    VALUES: gl.constexpr = columns_layout(LANES, VECTOR, gl.num_warps())
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    slots = gl.allocate_shared_memory(gl.int32, [STEPS, ROWS, LANES, 4], SHARED)
    begin_copies(slots, p_x, vectors, blocks, x_sample, x_channel, K, ROWS, LANES, WORDS)
    commit_group()
    alpha = gl.cast(activation_parameter, gl.float32) if ALPHA is None else gl.to_tensor(ALPHA)
    epsilon = gl.cast(eps, gl.float32)
    wait_group(0)

    total = gl.zeros([ROWS, LANES, VECTOR], gl.float32, VALUES)
    if RMS:
        mean = gl.sum(total, 0)
    else:
        for step in range(STEPS):
            b_x = values_of(slots.index(step).load(WORDS), VALUES, DTYPE)
            if not EVEN:
                b_x = gl.where((rows_of(step, VALUES, ROWS) < K)[:, None, None], b_x, 0.0)
            total += b_x
        mean = mean_of(gl.sum(total, 0), gl.to_tensor(K).to(gl.float32))
    if CORRECTED:  # distances are counted in 2**64 where the mean is larger: their squares would else be infinite
        large = gl.abs(mean) > 2.0**64
        unit, inverse = gl.where(large, 2.0**64, 1.0), gl.where(large, 2.0**-64, 1.0)
    total = gl.zeros([ROWS, LANES, VECTOR], gl.float32, VALUES)
    squares = gl.zeros([ROWS, LANES, VECTOR], gl.float32, VALUES)
    for step in range(STEPS):
        b_x = values_of(slots.index(step).load(WORDS), VALUES, DTYPE)
        if not RMS:
            b_x -= mean[None, :, :]
        if not EVEN:
            b_x = gl.where((rows_of(step, VALUES, ROWS) < K)[:, None, None], b_x, 0.0)
        if CORRECTED:
            b_x *= inverse[None, :, :]
            total += b_x
        squares = gl.fma(b_x, b_x, squares)
    m2 = gl.sum(squares, 0)
    if CORRECTED:  # the mean of the distances is the rounding of the mean; of equal numbers there is nothing else
        more = gl.sum(total, 0)
        distance = more * inverse_count
        m2_of_all = m2 - more * distance
        m2 = gl.where(m2_of_all < m2 * 2.0**-18, 0.0, m2_of_all) * unit * unit
        mean += distance * unit
    rstd = inverse_deviation(m2 * inverse_count, epsilon)
    o_position, m_position = positions_of(vectors, blocks, gl.SliceLayout(0, VALUES), LANES, VECTOR)
    if p_mean is not None:
        gl.store(p_mean + o_position, mean, mask=m_position)
    if p_rstd is not None:
        gl.store(p_rstd + o_position, rstd, mask=m_position)

    sample = sample_of(blocks)
    p_first, m_lane = words_at(p_y, vectors, y_sample, blocks, LANES, WORDS)
    for step in range(STEPS):
        o_row = rows_of(step, VALUES, ROWS)
        gain, offset = affine_of_rows(p_weight, p_bias, p_scale, p_shift, sample, o_row, K)
        b_x = values_of(slots.index(step).load(WORDS), VALUES, DTYPE)
        b_z = gl.fma(b_x - mean[None, :, :], gain * rstd[None, :, :], offset)
        store_rows(p_first, m_lane, step, VALUE(b_z, alpha), y_channel, DTYPE, K, ROWS, WORDS)


@gluon.jit
def gradients_of_rows(
    x_slots, dy_slots, p_weight, p_bias, p_scale, p_shift, sample, step, o_row, mean, rstd, alpha, m_lane,
    DERIVATIVE: gl.constexpr, DTYPE: gl.constexpr, WHOLE: gl.constexpr, K: gl.constexpr, WORDS: gl.constexpr,
    VALUES: gl.constexpr,
):  # fmt: skip
    """dz, xhat and A of a step; dz is 0 where there is no such channel or position."""
    gain, offset = affine_of_rows(p_weight, p_bias, p_scale, p_shift, sample, o_row, K)
    centred = values_of(x_slots.index(step).load(WORDS), VALUES, DTYPE) - mean
    b_dy = values_of(dy_slots.index(step).load(WORDS), VALUES, DTYPE)
    dz = b_dy * DERIVATIVE(gl.fma(centred, gain * rstd, offset), alpha)
    if not WHOLE:
        dz = gl.where((o_row < K)[:, None, None] & m_lane, dz, 0.0)
    return dz, centred * rstd, gain


@gluon.jit(
    do_not_specialize=[
        "vectors", "dy_sample", "dy_channel", "x_sample", "x_channel", "dx_sample", "dx_channel", "blocks",
        "inverse_count",
    ]
)  # fmt: skip
def columns_backward(
    p_dy, p_x, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_partials, p_grad_weight, p_grad_bias,
    vectors, dy_sample, dy_channel, x_sample, x_channel, dx_sample, dx_channel, blocks, inverse_count: gl.float32,
    activation_parameter: gl.float64,
    DERIVATIVE: gl.constexpr, ALPHA: gl.constexpr, BIAS: gl.constexpr, WHOLE: gl.constexpr, K: gl.constexpr,
    ROWS: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """grad_input of the block's positions, and the sums of p and q over these. WHOLE: blocks and steps have no channel
    and no position beyond the last one."""
    DTYPE: gl.constexpr = p_x.dtype.element_ty
    p_dy = p_dy.to(gl.pointer_type(gl.int32), bitcast=True)
    p_x = p_x.to(gl.pointer_type(gl.int32), bitcast=True)
    VECTOR: gl.constexpr = 128 // DTYPE.primitive_bitwidth  # elements
    STEPS: gl.constexpr = (K + ROWS - 1) // ROWS
    SUMS: gl.constexpr = p_partials is not None or p_grad_weight is not None or p_grad_bias is not None
    WORDS: gl.constexpr = columns_layout(LANES, 4, gl.num_warps())
    VALUES: gl.constexpr = columns_layout(LANES, VECTOR, gl.num_warps())
    POSITIONS: gl.constexpr = gl.SliceLayout(0, VALUES)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    x_slots = gl.allocate_shared_memory(gl.int32, [STEPS, ROWS, LANES, 4], SHARED)
    dy_slots = gl.allocate_shared_memory(gl.int32, [STEPS, ROWS, LANES, 4], SHARED)
    begin_copies(x_slots, p_x, vectors, blocks, x_sample, x_channel, K, ROWS, LANES, WORDS)
    begin_copies(dy_slots, p_dy, vectors, blocks, dy_sample, dy_channel, K, ROWS, LANES, WORDS)
    commit_group()
    o_position, m_position = positions_of(vectors, blocks, POSITIONS, LANES, VECTOR)
    rstd = gl.load(p_rstd + o_position, mask=m_position, other=0.0)
    mean = gl.load(p_mean + o_position, mask=m_position, other=0.0) if p_mean is not None else rstd * 0.0
    b_rstd, b_mean = rstd[None, :, :], mean[None, :, :]
    sample = sample_of(blocks)
    m_lane = (lanes_of(blocks, gl.SliceLayout(0, gl.SliceLayout(2, VALUES)), LANES) < vectors)[None, :, None]
    alpha = gl.cast(activation_parameter, gl.float32) if ALPHA is None else gl.to_tensor(ALPHA)
    share, shares = gl.program_id(0).to(gl.int64), gl.num_programs(0).to(gl.int64)
    wait_group(0)

    total_p = gl.zeros([ROWS, LANES, VECTOR], gl.float32, VALUES)
    total_q = gl.zeros([ROWS, LANES, VECTOR], gl.float32, VALUES)
    for step in range(STEPS):
        o_row = rows_of(step, VALUES, ROWS)
        dz, xhat, gain = gradients_of_rows(
            x_slots, dy_slots, p_weight, p_bias, p_scale, p_shift, sample, step, o_row, b_mean, b_rstd, alpha, m_lane,
            DERIVATIVE, DTYPE, WHOLE, K, WORDS, VALUES,
        )  # fmt: skip
        total_p = gl.fma(dz, gain, total_p)
        total_q = gl.fma(dz * gain, xhat, total_q)
        if SUMS:
            q = gl.sum(gl.sum(dz * xhat, 2), 1)
            if p_partials is not None:
                gl.store(p_partials + (shares + share) * K + o_row, q, mask=o_row < K)
            if p_grad_weight is not None:
                gl.store(p_grad_weight + o_row, q.to(p_grad_weight.dtype.element_ty), mask=o_row < K)
            if BIAS:
                p = gl.sum(gl.sum(dz, 2), 1)
                if p_partials is not None:
                    gl.store(p_partials + share * K + o_row, p, mask=o_row < K)
                if p_grad_bias is not None:
                    gl.store(p_grad_bias + o_row, p.to(p_grad_bias.dtype.element_ty), mask=o_row < K)
    if p_dx is not None:
        p_dx = p_dx.to(gl.pointer_type(gl.int32), bitcast=True)
        mean_q = gl.sum(total_q, 0) * inverse_count
        mean_p = gl.sum(total_p, 0) * inverse_count if p_mean is not None else mean_q * 0.0
        b_mean_p, b_mean_q = mean_p[None, :, :], mean_q[None, :, :]
        p_first, m_stored = words_at(p_dx, vectors, dx_sample, blocks, LANES, WORDS)
        for step in range(STEPS):
            o_row = rows_of(step, VALUES, ROWS)
            dz, xhat, gain = gradients_of_rows(
                x_slots, dy_slots, p_weight, p_bias, p_scale, p_shift, sample, step, o_row, b_mean, b_rstd, alpha,
                m_lane, DERIVATIVE, DTYPE, WHOLE, K, WORDS, VALUES,
            )  # fmt: skip
            b_dx = (gl.fma(dz, gain, xhat * -b_mean_q) - b_mean_p) * b_rstd
            store_rows(p_first, m_stored, step, b_dx, dx_channel, DTYPE, K, ROWS, WORDS)
