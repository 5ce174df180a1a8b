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
def inverse_deviation(variance, eps):
    """(variance + eps)^(-1/2): an approximation, which Newton's step makes good to the last bit or two."""
    shifted = variance + eps
    root = gl.inline_asm_elementwise(
        "rsqrt.approx.f32 $0, $1;", "=f,f", [shifted], dtype=gl.float32, is_pure=True, pack=1
    )
    better = root * gl.fma(-0.5 * shifted * root, root, 1.5)
    return gl.where((root > 0.0) & (root < float("inf")), better, root)
