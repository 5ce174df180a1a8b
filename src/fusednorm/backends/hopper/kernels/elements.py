"""Elements as words of 32 bits in shared memory and in registers: two of 16 bits, or one of 32.

A word is moved as it is, and its elements become float32 by one instruction each. Triton would take two for the upper
element of a word.
"""

import triton

from fusednorm.private.gluon_names import gl, gluon


@triton.constexpr_function
def tile_layout(repeats, each, warps):
    """The layout of a tile (repeats, threads, words or elements): a thread has ``each`` neighbours, 16 bytes of memory,
    of each repeat."""
    return gl.BlockedLayout([repeats, 1, each], [1, 32, 1], [1, warps, 1], [2, 1, 0])


@triton.constexpr_function
def neighbours_layout(each, warps):
    """The layout of a tile (1, threads, elements) whose neighbouring elements are those of neighbouring threads."""
    return gl.BlockedLayout([1, 1, 1], [1, 32 // each, each], [1, warps, 1], [2, 1, 0])


@triton.constexpr_function
def columns_layout(lanes, each, warps):
    """The layout of a step (channels, lanes, words or elements): a thread has ``each`` neighbours, 16 bytes of memory,
    of every channel that is so many channels behind its first one as all threads have at a time."""
    return gl.BlockedLayout([1, 1, each], [32 // lanes, lanes, 1], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def offsets_of_vectors(layout: gl.constexpr, REPEATS: gl.constexpr, THREADS: gl.constexpr):
    """The places of a tile's vectors in memory (repeats, threads), counted from its first one."""
    o_repeat = gl.arange(0, REPEATS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None]
    o_thread = gl.arange(0, THREADS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :]
    return o_repeat * THREADS + o_thread


@gluon.jit
def offsets_of_words(o_vectors, layout: gl.constexpr):
    """The places of a tile's words in memory (repeats, threads, words)."""
    o_word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return o_vectors[:, :, None] * 4 + o_word


@gluon.jit
def offsets_of_ends(shift, length, VECTOR: gl.constexpr, THREADS: gl.constexpr, layout: gl.constexpr):
    """Of ``length`` neighbours, the first of which is element ``shift`` of a vector, those in no whole vector, one for
    each thread: which it is, whether it lies before the first whole vector, and whether behind the last one."""
    o_thread = gl.arange(0, THREADS, layout)
    o_last = length - (length + shift) % VECTOR + o_thread - VECTOR
    before = o_thread < (VECTOR - shift) % VECTOR
    behind = (o_thread >= VECTOR) & (o_last < length)
    return gl.where(o_thread < VECTOR, o_thread, o_last), before, behind


@gluon.jit
def _halves(b_words):
    """The two float16 of each word as float32."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
        "=f,=f,r",
        [b_words],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def values_of(b_words, layout: gl.constexpr, dtype: gl.constexpr):
    """The elements of words (repeats, threads, words) as float32 (repeats, threads, elements)."""
    if dtype == gl.float32:
        return b_words.to(gl.float32, bitcast=True)
    else:
        if dtype == gl.bfloat16:
            b_low = (b_words << 16).to(gl.float32, bitcast=True)
            b_high = (b_words & -65536).to(gl.float32, bitcast=True)
        else:
            b_low, b_high = _halves(b_words)
        shape: gl.constexpr = [b_words.shape[0], b_words.shape[1], 2 * b_words.shape[2]]
        return gl.convert_layout(gl.reshape(gl.join(b_low, b_high), shape), layout, assert_trivial=True)


@gluon.jit
def words_of(b_values, layout: gl.constexpr, dtype: gl.constexpr):
    """Float32 values as words of elements, rounded to nearest even; the inverse of :func:`values_of`."""
    if dtype == gl.float32:
        return b_values.to(gl.int32, bitcast=True)
    else:
        shape: gl.constexpr = [b_values.shape[0], b_values.shape[1], b_values.shape[2] // 2, 2]
        b_low, b_high = gl.split(gl.reshape(b_values, shape))
        to: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
        b_words = gl.inline_asm_elementwise(
            "cvt.rn." + to + ".f32 $0, $2, $1;", "=r,f,f", [b_low, b_high], dtype=gl.int32, is_pure=True, pack=1
        )
        return gl.convert_layout(b_words, layout, assert_trivial=True)


@gluon.jit
def sum_of(b_values):
    """The sum over each thread's values (repeats, threads, elements), one a thread."""
    return gl.sum(gl.sum(b_values, 2), 0)


@gluon.jit
def product_sums_of(b_one, b_other, layout: gl.constexpr):
    """The sums of the products of each thread's neighbours (repeats, threads). It takes an instruction and a quarter
    for each, where products and their sum would take two."""
    repeats: gl.constexpr = b_one.shape[0]
    threads: gl.constexpr = b_one.shape[1]
    vector: gl.constexpr = b_one.shape[2]
    b_even, b_odd = gl.split(gl.reshape(b_one, [repeats, threads, vector // 2, 2]))
    c_even, c_odd = gl.split(gl.reshape(b_other, [repeats, threads, vector // 2, 2]))
    b_a, b_b = gl.split(gl.reshape(b_even, [repeats, threads, vector // 4, 2]))
    c_a, c_b = gl.split(gl.reshape(c_even, [repeats, threads, vector // 4, 2]))
    b_c, b_d = gl.split(gl.reshape(b_odd, [repeats, threads, vector // 4, 2]))
    c_c, c_d = gl.split(gl.reshape(c_odd, [repeats, threads, vector // 4, 2]))
    b_sum = gl.sum(gl.fma(b_d, c_d, gl.fma(b_c, c_c, gl.fma(b_b, c_b, b_a * c_a))), 2)
    return gl.convert_layout(b_sum, layout, assert_trivial=True)


@gluon.jit
def product_sum_of(b_one, b_other, layout: gl.constexpr):
    """The sum of the products of each thread's values, in the layout of :func:`sum_of`."""
    EACH: gl.constexpr = gl.SliceLayout(2, layout.parent.parent)
    return gl.convert_layout(gl.sum(product_sums_of(b_one, b_other, EACH), 0), layout, assert_trivial=True)
