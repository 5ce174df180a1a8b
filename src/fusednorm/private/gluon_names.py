"""Every name of Gluon, Triton's experimental language, that fusednorm uses beyond what kernels say of it.

Kernels call ``gl.arange``, ``gl.load``, ``gl.store``, ``gl.sum``, ``gl.reshape``, ``gl.join``, ``gl.split``,
``gl.convert_layout``, ``gl.inline_asm_elementwise``, the layouts, ``gl.allocate_shared_memory`` with ``index`` and
``load``, and the three functions of ``async_copy``. All are in 3.6 and in 3.8, with one meaning. Without one of these
modules: an ImportError, and the backend says that it is unavailable. Without a name in them, or with other parameters:
Triton's CompilationError at a kernel's first launch.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

__all__ = ["async_copy", "gl", "gluon"]
