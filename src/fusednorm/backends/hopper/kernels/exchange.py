"""How blocks tell one another two numbers: packets in memory, without atomics, fences or barriers.

A packet is a number and a tag in 8 bytes, which memory writes and reads as a whole, so whoever reads the tag that he
waits for has the number too. The tag of the first exchange is 1, and memory for packets begins as zeros. A block has
PLACES pairs of packets and uses them in turn: no block is so far ahead of another that it writes a pair which the other
has yet to read.
"""

from fusednorm.private.gluon_names import gl, gluon

#: Pairs of packets that a block has.
PLACES = gl.constexpr(8)


@gluon.jit
def _packet(value, tag):
    return (tag.to(gl.int64) << 32) | (value.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF)


@gluon.jit
def publish(pointer, first, second, tag):
    """Write a pair of packets."""
    gl.store(pointer, _packet(first, tag))
    gl.store(pointer + 1, _packet(second, tag))


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
def settle(b_first, b_second, b_pointers, b_tag):
    """The numbers of pairs of packets that were peeked at: read again until their tags have come."""
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
        setp.ne.b32 late, one, $5;
        setp.ne.or.b32 absent, two, $5, late;
        @!absent bra DONE;
        ld.relaxed.gpu.global.b64 first, [$4];
        ld.relaxed.gpu.global.b64 second, [$4+8];
        bra READ;
        DONE:
        }""",
        "=&r,=&r,l,l,l,r",
        [b_first, b_second, b_pointers.to(gl.int64), b_tag],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )
    return b_first.to(gl.float32, bitcast=True), b_second.to(gl.float32, bitcast=True)
