"""Every name of Gluon, Triton's experimental language, that fusednorm uses beyond what kernels say of it.

Kernels call ``gl.arange``, ``gl.load``, ``gl.store``, ``gl.sum``, ``gl.reshape``, ``gl.join``, ``gl.split``,
``gl.convert_layout``, ``gl.inline_asm_elementwise``, the layouts, ``gl.allocate_shared_memory`` with ``index`` and
``load``, and the three functions of ``async_copy``. All have one meaning in 3.6, 3.8 and 3.9; ``async_load`` had
another name before 3.8, which 3.9 takes away. Without one of these modules, or of the names that are imported here: an
ImportError, and the backend says that it is unavailable. Without another name, or with other parameters: Triton's
CompilationError at a kernel's first launch.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import (  # noqa: F401
    allocate_shared_memory,
    arange,
    convert_layout,
    inline_asm_elementwise,
    join,
    load,
    reshape,
    split,
    store,
    sum,
)
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group

try:
    from triton.experimental.gluon.language.nvidia.ampere.async_copy import async_load
except ImportError:
    from triton.experimental.gluon.language.nvidia.ampere.async_copy import async_copy_global_to_shared as async_load

__all__ = ["async_load", "commit_group", "gl", "gluon", "wait_group"]
