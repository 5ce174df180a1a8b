"""Which chunks a block works on: each claims the next one that no block has, when it has room for it.

The first chunk of a block is the one of its number; further ones it claims by a counter in memory, in the order of all
chunks of all units. With equal shares a block would wait for the slowest one of each of its units, and in the end all
for the slowest multiprocessor. So the faster blocks take more chunks, and those of a unit are on their way at about the
same time. No number depends on which block makes it: the bits are the same each time.

A block keeps LAG + 1 chunks, whose results are yet to be stored: its pending ones. No block waits for ever. It
publishes the sums of its newest chunk before it waits for others', and claims the next one behind that. So where all
blocks wait, all claimed chunks are published, and the first unit that lacks some has chunks that nobody has claimed.
But every block waits to store a result of that unit, and has LAG + 1 chunks of it then: more than the unit has, which
has no more than there are blocks. The same holds for a leader, which reads the numbers of a whole unit for others: it
waits behind the sums of its newest chunk, too, or that chunk is of a later unit, which nobody waits for before this
one.
"""

import triton

from fusednorm.backends.hopper.kernels.rows import extended
from fusednorm.private.gluon_names import gl, gluon


@triton.constexpr_function
def led_place(lag):
    """Where among a block's pending chunks that one is whose unit it leads: the second one where there are three or
    more, since the results of others wait for a leader; else the first."""
    return 2 if lag > 1 else 0


@gluon.jit
def first_pending(unit, part, LAG: gl.constexpr):
    """The units and parts of a block's pending chunks, the last of which is to be summed. At first there is that one
    alone; the others' units are -1."""
    pending = ()
    for _ in gl.static_range(LAG):
        pending = extended(extended(pending, gl.to_tensor(-1)), gl.to_tensor(0))
    return extended(extended(pending, unit), part)


@gluon.jit
def next_pending(pending, unit, part):
    """The same without the first one, and with a chunk more."""
    later = ()
    for place in gl.static_range(2, len(pending)):
        later = extended(later, pending[place])
    return extended(extended(later, unit), part)


@gluon.jit
def pending_at(pending, place):
    """The unit and part of one of them."""
    unit, part = pending[0], pending[1]
    for later in gl.static_range(1, len(pending) // 2):
        unit = gl.where(place == later, pending[2 * later], unit)
        part = gl.where(place == later, pending[2 * later + 1], part)
    return unit, part


@gluon.jit
def claimed(p_claims, last_unit, units, parts, blocks):
    """The unit and part of the next chunk that no block has, where the last claim was one of a unit; or of a unit that
    there is not. The counter ``p_claims`` begins at 0, and every block has a chunk by its number."""
    there = last_unit < units
    claim = gl.atomic_add(p_claims, gl.to_tensor(1).to(gl.int64), mask=there, sem="relaxed", scope="gpu")
    chunk = blocks + claim.to(gl.int32)
    unit = chunk // parts
    return gl.where(there, unit, units), gl.where(there, chunk - unit * parts, 0)
