"""How blocks tell one another two numbers: packets in memory, without atomics, fences or barriers.

A packet is two numbers in 8 bytes, which memory writes and reads as a whole, and which are 0 until somebody has written
them. Each chunk has a packet, written once: nothing is overwritten that a block may still have to read, however far one
block is ahead of another.
"""

from fusednorm.private.gluon_names import gl, gluon

#: What a number's bits are combined with, so that a packet that has been written is not 0. Two numbers with these bits
#: would make one: a signalling NaN, which no arithmetic results in.
KEY = gl.constexpr(0xFFBADBAD - (1 << 32))


@gluon.jit
def publish(pointer, first, second, mask=None):
    """Write a packet."""
    b_first, b_second = first.to(gl.int32, bitcast=True) ^ KEY, second.to(gl.int32, bitcast=True) ^ KEY
    gl.store(pointer, (b_first.to(gl.int64) & 0xFFFFFFFF) | (b_second.to(gl.int64) << 32), mask=mask)


@gluon.jit
def peek(b_pointers):
    """Read packets, which may not have been written yet, without waiting for the memory."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b64 $0, [$1];",
        "=l,l",
        [b_pointers.to(gl.int64)],
        dtype=gl.int64,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def settle(b_packets, b_pointers):
    """The two numbers of packets that were peeked at: read again until they have been written."""
    b_first, b_second = gl.inline_asm_elementwise(
        """{
        .reg .pred written;
        .reg .b64 packet;
        mov.b64 packet, $2;
        READ:
        setp.ne.b64 written, packet, 0;
        @written bra DONE;
        ld.relaxed.gpu.global.b64 packet, [$3];
        bra READ;
        DONE:
        mov.b64 {$0, $1}, packet;
        }""",
        "=r,=r,l,l",
        [b_packets, b_pointers.to(gl.int64)],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )
    b_first, b_second = b_first ^ KEY, b_second ^ KEY
    return b_first.to(gl.float32, bitcast=True), b_second.to(gl.float32, bitcast=True)
