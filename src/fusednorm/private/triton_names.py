"""Every private or undocumented name of Triton that fusednorm uses, each once; importing this imports no Triton.

Each name says what it is for, since when it exists (3.6, 3.7, 3.8 and 3.9 were searched, and fusednorm needs 3.6), and
what happens without it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

#: The launch option that keeps a compiler from fusing products and sums by itself. In 3.6 to 3.9, for CUDA and for HIP.
#: Without: Triton's KeyError at the first launch, which names the option.
FP_FUSION = "enable_fp_fusion"

#: The launch option by which a kernel may start before the one before it has ended, on CUDA. In 3.6 to 3.9. Without:
#: Triton's KeyError at the first launch that asks for it, which names the option.
DEPENDENT_LAUNCH = "launch_pdl"

#: The launch option by which all blocks of a kernel run at the same time, or none, on CUDA. In 3.6 to 3.9. Without:
#: Triton's KeyError at the first launch that asks for it, which names the option.
COOPERATIVE_LAUNCH = "launch_cooperative_grid"

#: The launch option for the most registers that a thread has, on CUDA. In 3.6 to 3.9. Without: Triton's KeyError at the
#: first launch that asks for it, which names the option.
REGISTERS = "maxnreg"

#: What the error of a launch says whose blocks cannot all run at the same time: the driver's text, which Triton passes
#: on. With another text: the error reaches the caller.
TOO_MANY_BLOCKS = "too many blocks in cooperative launch"

#: Starts a compiled kernel on a stream with these addresses.
Start = Callable[[int, list[int | None]], Any]


def start_of(compiled: Any, programs: int, addresses: list[int | None], tail: tuple[Any, ...]) -> Start | None:
    """The shortest way to start ``compiled``, which Triton's launch of a kernel returned; None where there is none.

    ``compiled.run``, ``compiled.function`` and ``compiled.packed_metadata``, in 3.6 to 3.9, are called as run(x, y, z,
    stream, function, metadata, launch_metadata, enter_hook, exit_hook, \\*arguments). ``run`` wraps a launcher in C,
    ``launch``, and takes 1 us to work out its arguments anew in each call. Here they are kept if they have a known
    form: in 3.6 the kernel's arguments come last, from 3.7 on the last argument is a tuple of them.

    With another form of ``launch``, such as HIP's, which takes the grid later: ``run`` is called. Without one of the
    three names, or with other parameters of ``run``: None, and every call goes through Triton's launch.
    """
    try:
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        stream, arguments = object(), (*addresses, *tail)
        given = _passed_on(run, (programs, 1, 1, stream, function, metadata, None, None, None, *arguments))
    except (AttributeError, TypeError):
        return None
    if given[:4] == (programs, 1, 1, stream):
        launch, end = run.launch, len(given) - len(arguments)
        if given[end:] == arguments:
            fixed = given[4:end]
            return lambda stream, addresses: launch(programs, 1, 1, stream, *fixed, *addresses, *tail)
        if given[-1] == arguments:
            fixed = given[4:-1]
            return lambda stream, addresses: launch(programs, 1, 1, stream, *fixed, (*addresses, *tail))
    return lambda stream, addresses: run(
        programs, 1, 1, stream, function, metadata, None, None, None, *addresses, *tail
    )


def _passed_on(run: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments that ``run`` passes on to its launcher in C, which is not called; () where they cannot be seen.

    A kernel that needs scratch memory gets new memory in each call, so none of its arguments can be kept.
    """
    found: list[tuple[Any, ...]] = []
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1):
        return ()
    recorder = copy.copy(run)
    recorder.launch = lambda *passed: found.append(passed)
    recorder(*arguments)
    return found[0] if len(found) == 1 else ()
