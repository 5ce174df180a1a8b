"""How blocks tell one another two numbers: packets in memory, without atomics, fences or barriers.

A packet is a number and a mark in 8 bytes, which memory writes and reads as a whole, so whoever reads the mark has the
number too. Each chunk has a pair of packets, which begins as zeros and is written once: nothing is overwritten that a
block may still have to read, however far one block is ahead of another.
"""

from fusednorm.private.gluon_names import gl, gluon

#: The upper half of a packet that has been written.
MARK = gl.constexpr(1)


@gluon.jit
def _packet(value):
    return (value.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF) | (MARK << 32)


@gluon.jit
def publish(pointer, first, second, mask=None):
    """Write a pair of packets."""
    gl.store(pointer, _packet(first), mask=mask)
    gl.store(pointer + 1, _packet(second), mask=mask)


@gluon.jit
def peek(b_pointers):
    """Read pairs of packets, which may not have been written yet, without waiting for the memory."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b64 $0, [$2]; ld.relaxed.gpu.global.b64 $1, [$2+8];",
        "=&l,=l,l",
        [b_pointers.to(gl.int64)],
        dtype=(gl.int64, gl.int64),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def settle(b_first, b_second, b_pointers):
    """The numbers of pairs of packets that were peeked at: read again until their marks have come."""
    b_first, b_second = gl.inline_asm_elementwise(
        """{
        .reg .pred late, absent;
        .reg .b32 one, two;
        .reg .b64 first, second;
        mov.b64 first, $2;
        mov.b64 second, $3;
        READ:
        mov.b64 {$0, one}, first;
        mov.b64 {$1, two}, second;
        setp.ne.b32 late, one, 1;
        setp.ne.or.b32 absent, two, 1, late;
        @!absent bra DONE;
        ld.relaxed.gpu.global.b64 first, [$4];
        ld.relaxed.gpu.global.b64 second, [$4+8];
        bra READ;
        DONE:
        }""",
        "=&r,=&r,l,l,l",
        [b_first, b_second, b_pointers.to(gl.int64)],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )
    return b_first.to(gl.float32, bitcast=True), b_second.to(gl.float32, bitcast=True)
