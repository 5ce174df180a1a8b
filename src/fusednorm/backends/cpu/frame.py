"""The frame of a call: the arguments of all its kernels, each at a fixed place, and the workspace that they share.

A kernel's function names its arguments as :data:`ARGUMENTS` does, so one frame serves all kernels of a call. A plan
keeps its frames and uses them again: a call writes the addresses of its tensors into a frame, which takes 0.5 us; a
vector for each kernel and a new workspace took 2 us or more.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from fusednorm.backends.cpu.memory import SMALLEST, empty_strided, limit

#: The first words of a frame are the driver's (threads.DRIVER).
HEAD = 6
#: Bytes of two cache lines, which processors fetch together: what one core writes lies so far from what another does.
LINES = 128
#: Words from one thread's claims to the next's.
CLAIM = LINES // 8
#: Bytes of the large workspaces that idle frames keep together, of all plans.
LARGE_ROOMS = 1 << 26

#: What kernels are given: each argument's kind, in the order of their places behind the head. Kinds are "element",
#: pointer to the input's dtype; "compute", pointer to the compute dtype; "operand", pointer to any dtype, which a code
#: names (geometry.DTYPE_CODES), or to bytes; "single", "double" and "geometry", pointers to float32, float64 and int64;
#: "float" and "integer".
ARGUMENTS = {
    # Of a forward.
    "y": "element",
    "mean": "compute",
    "rstd": "compute",
    "variance": "compute",
    "eps": "float",
    # Of both directions.
    "x": "element",
    "weight": "operand",
    "bias": "operand",
    "scale": "operand",
    "shift": "operand",
    # Statistics that the caller gives: mean and variance to a forward, mean and rstd to a backward.
    "given_mean": "operand",
    "given_mean_dtype": "integer",
    "given_rstd": "operand",
    "given_rstd_dtype": "integer",
    # Of a backward; a gradient at address 0 is not wanted.
    "grad": "element",
    "dx": "element",
    "grad_weight": "operand",
    "grad_bias": "operand",
    "grad_scale": "operand",
    "grad_shift": "operand",
    # Of a forward with given statistics.
    "given_variance": "operand",
    "given_variance_dtype": "integer",
    # Of the sums around a norm: s, which a kernel writes and reads; what it is made of; what is added to z; gradients.
    "total": "element",
    "pre_add": "element",
    "pre_gate": "compute",
    "post_add": "element",
    "grad_total": "element",
    "grad_post_add": "element",
    "grad_pre_add": "element",
    "grad_pre_gate": "operand",
    "grad_pre_gate_dtype": "integer",
    # Of a quantized output: its bytes, and the scale of all, or those of the rows.
    "codes": "operand",
    "out_scale": "single",
    # Running statistics, which move towards mean and factor · variance by a share; a number of calls grows by 1.
    "running_mean": "operand",
    "running_mean_dtype": "integer",
    "running_variance": "operand",
    "running_variance_dtype": "integer",
    "factor": "float",
    "share": "float",
    "counter": "geometry",
    "counts": "integer",
    # The same in all calls of a plan.
    "geometry": "geometry",
    "activation_parameter": "float",
    # Workspace.
    "partials": "double",
    "stats": "double",
    "sums": "double",
    "totals": "double",
    "coefficients": "compute",
    "running": "compute",
    "wide_weight": "compute",
    "wide_bias": "compute",
    "kept": "compute",
    "gate_running": "compute",
    "gate_sums": "double",
}
#: An argument's place in words.
PLACES = {name: HEAD + index for index, name in enumerate(ARGUMENTS)}
WORDS = HEAD + len(ARGUMENTS)
#: Each kind's format in struct's terms.
FORMATS = dict.fromkeys(("element", "compute", "operand", "single", "double", "geometry"), "Q") | {
    "float": "d",
    "integer": "q",
}


def writer(first: str, last: str) -> tuple[Callable[..., None], int]:
    """(write, place): write(frame.words, place, first, ..., last) puts the arguments between two names into a frame."""
    names = list(ARGUMENTS)
    names = names[names.index(first) : names.index(last) + 1]
    layout = struct.Struct("".join(FORMATS[ARGUMENTS[name]] for name in names))
    return layout.pack_into, 8 * PLACES[first]


def template(constants: Mapping[str, float]) -> bytes:
    """The words of a new frame: the constant arguments, and zeros."""
    words = bytearray(8 * WORDS)
    for name, value in constants.items():
        struct.pack_into(FORMATS[ARGUMENTS[name]], words, 8 * PLACES[name], value)
    return bytes(words)


class Frame:
    """The arguments and the workspace of one call at a time."""

    __slots__ = ("_claims", "_pin", "address", "block", "kept", "room", "words")

    def __init__(self, words: bytes) -> None:
        memory = bytearray(words)
        self.words = memoryview(memory)
        self._pin = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(self._pin)
        self._claims: tuple[memoryview, bytes, int] | None = None
        self.block: torch.Tensor | None = None
        self.room = 0  # bytes of workspace
        self.kept = False  # the workspace is large, and is kept between calls

    def clear_claims(self, threads: int) -> int:
        """The address of a zero for each thread's range of tasks."""
        size = LINES * threads
        if self._claims is None or len(self._claims[1]) != size:
            memory = bytearray(size + LINES)
            start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            first = -start % LINES
            self._claims = memoryview(memory)[first : first + size], bytes(size), start + first
        claims, zeros, address = self._claims
        claims[:] = zeros
        return address

    def make_room(self, room: int, arrays: Mapping[str, int]) -> None:
        """Get so many bytes of workspace, in which the named arrays start at these offsets."""
        count = -(-room // 8)
        if room < SMALLEST:
            self.block = torch.empty(count, dtype=torch.float64, device="cpu")
        else:
            self.block = empty_strided(torch.Size((count,)), (1,), torch.float64)
        self.room, self.kept, start = room, False, self.block.data_ptr()
        for name, offset in arrays.items():
            struct.pack_into("Q", self.words, 8 * PLACES[name], start + offset)

    def drop_room(self) -> None:
        self.block, self.room = None, 0


#: The idle frames with a large workspace, each with the idle ones of its plan. Changed by atomic operations alone, as
#: the blocks of large outputs are (memory.py).
_large: deque[tuple[list[Frame], Frame]] = deque()


def keep_room(frame: Frame, idle: list[Frame]) -> bool:
    """Whether a frame that goes back to the ``idle`` ones of its plan keeps a workspace that is large. A new one costs
    a call 5 us or more: the backward of layer_norm of (69, 1024) in float16 takes 47 us with it, and 40 with one that
    is kept. Where those of all plans would be more than LARGE_ROOMS, all that are idle are dropped."""
    if frame.kept:
        return True
    most = min(LARGE_ROOMS, limit())
    if frame.room >= SMALLEST or frame.room > most:
        return False
    if sum(each.room for _, each in tuple(_large)) + frame.room > most:
        drop_rooms()
    frame.kept = True  # first: a thread that drops it then takes this back
    _large.append((idle, frame))
    return True


def drop_rooms() -> None:
    """Forget the idle frames that keep a large workspace; those in use are looked at when they are released."""
    while _large:
        with suppress(IndexError, ValueError):  # another thread was first, or the frame is in use
            idle, frame = _large.popleft()
            frame.kept = False
            idle.remove(frame)
