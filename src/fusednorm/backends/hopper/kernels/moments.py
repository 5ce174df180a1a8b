"""Mean and M2 of sets of elements, and the inverse deviation."""

from fusednorm.private.gluon_names import gl, gluon


@gluon.jit
def mean_of(total, count):
    """The mean of ``count`` numbers, of which the quotient is rounded once, as in Triton's ``moments.mean_of``."""
    return gl.div_rn(total, count)


@gluon.jit
def merge(mean, m2, count, mean_of_more, m2_of_more, more):
    """Mean, M2 and count of two sets of elements together, each of which may be empty."""
    total = count + more
    share = gl.where(total > 0, more / gl.maximum(total, 1.0), 0.0)
    distance = mean_of_more - mean
    return mean + distance * share, m2 + m2_of_more + distance * distance * (count * share), total


@gluon.jit
def add_pairs(first, second, first_of_more, second_of_more):
    return first + first_of_more, second + second_of_more


@gluon.jit
def merge_chunks(b_mean, b_m2, b_count, elements, axis: gl.constexpr):
    """Mean and variance of the chunks of a statistic along an axis, of which those with a count of 0 are none. The mean
    is that of the means, corrected by that of their distances to it, so that it is rounded about once."""
    mean = mean_of(gl.sum(b_mean * b_count, axis), elements)
    b_distance = b_mean - (mean if axis == 0 else mean[:, None])
    b_m2 = gl.where(b_count > 0.0, b_m2 + b_distance * b_distance * b_count, 0.0)
    rest, m2 = gl.reduce((b_distance * b_count, b_m2), axis, add_pairs)
    return mean + rest / elements, m2 / elements


@gluon.jit
def store_moments(p_mean, p_rstd, p_var, o_statistic, mean, rstd, variance, mask=None):
    """Store what is wanted of some statistics."""
    if p_mean is not None:
        gl.store(p_mean + o_statistic, mean, mask=mask)
    if p_rstd is not None:
        gl.store(p_rstd + o_statistic, rstd, mask=mask)
    if p_var is not None:
        gl.store(p_var + o_statistic, variance, mask=mask)


@gluon.jit
def inverse_deviation(variance, eps):
    """(variance + eps)^(-1/2): an approximation, which Newton's step makes good to the last bit or two."""
    shifted = variance + eps
    root = gl.inline_asm_elementwise(
        "rsqrt.approx.f32 $0, $1;", "=f,f", [shifted], dtype=gl.float32, is_pure=True, pack=1
    )
    better = root * gl.fma(-0.5 * shifted * root, root, 1.5)
    return gl.where((root > 0.0) & (root < float("inf")), better, root)
