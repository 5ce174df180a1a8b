"""From a kernel written in Python to machine code that a process can call, with a cache on disk.

Numba compiles a kernel to LLVM IR once; the object code made from it is kept on disk. A later process loads that object
through llvmlite alone: importing Numba costs 0.3 s, loading an object 5 ms.

Every kernel ends up as ``run(frame, start, stop, worker)``: it reads its arguments from the frame of the call, each
from the place of its name (frame.py), and does the tasks from start to stop as one of the workers that share a loop.
One form for all lets native code run all kernels of a call one after the other (threads.py).

The folder of cached objects is named by a digest of everything that the machine code depends on, so that a stale
object is never found, and each file starts with the digest of its content, so that a damaged one is never used.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import logging
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

try:
    import llvmlite.binding as llvm
except ImportError:  # then instances.unavailable says so, and nothing here is called
    llvm = None

from fusednorm.activations import __file__ as _ACTIVATIONS_FILE
from fusednorm.backends.cpu.frame import ARGUMENTS, FORMATS, PLACES
from fusednorm.formats import __file__ as _FORMATS_FILE
from fusednorm.instance import CompilationError
from fusednorm.private.numba_names import RUNTIME_PREFIXES, VOID_RESULT, own_settings, pipeline
from fusednorm.private.numba_names import __file__ as _NUMBA_NAMES_FILE
from fusednorm.storage import cache_root, contents, problem, readonly_root, replace_file

logger = logging.getLogger(__name__)

#: New objects after which Python looks for cycles among them while Numba compiles; 700 or 2000 by default.
COLLECTED = 20_000

_IR_TYPES = {"Q": "ptr", "d": "double", "q": "i64"}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One specialization of a kernel: where it is built, for which dtype and activation.

    A ``parametric`` kernel takes the activation's parameter as an argument; others have the default compiled in.
    """

    module: str
    function: str
    dtype: str
    activation: str | None = None
    parametric: bool = False

    @property
    def name(self) -> str:
        activation = (self.activation or "identity") + ("_parametric" if self.parametric else "")
        return "-".join((self.module, self.function, self.dtype, activation))


_lock = threading.RLock()
_loaded: dict[Kernel, int] = {}
_failed: dict[Kernel, str] = {}
_libraries: dict[str, Any] = {}  # a library that is collected takes its machine code with it
_links = itertools.count()  # LLVM gives a library's name once, also where a Ctrl-C arrives before the library is kept


def _hold_lock() -> None:
    _lock.acquire()


def _release_lock() -> None:
    _lock.release()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    # A fork waits for a compilation in another thread: the child would have Numba's and LLVM's locks locked for ever.
    os.register_at_fork(before=_hold_lock, after_in_parent=_release_lock, after_in_child=_renew_lock)


def load(kernel: Kernel) -> int:
    """The address of a kernel's run: from this process, from the disk, or compiled now.

    Raises CompilationError where compiling fails, which no argument of a call can cause.
    """
    address = _loaded.get(kernel)
    if address is None:
        with _lock:
            address = _loaded.get(kernel)
            if address is None:
                address = _loaded[kernel] = _materialize(kernel)
    return address


def _materialize(kernel: Kernel) -> int:
    entry = _read(kernel)
    if entry is None:
        entry = _compile_or_say_why(kernel)
        _write(kernel, entry)
    symbol, code = entry
    return link(code, symbol, kernel.name)


def _compile_or_say_why(kernel: Kernel) -> tuple[str, bytes]:
    reason = _failed.get(kernel)
    if reason is None:
        try:
            return _compile(kernel)
        except MemoryError:
            raise
        except Exception as error:  # whatever Numba and LLVM raise
            logger.info("compiling %s", kernel.name, exc_info=True)
            first = (str(error).strip().splitlines() or [""])[0]
            versions = ", ".join(f"{name} {version(name)}" for name in ("numba", "llvmlite", "numpy"))
            reason = _failed[kernel] = (
                f"the CPU kernel {kernel.name} cannot be compiled ({type(error).__name__}: {first}) with {versions}; "
                "see that they fit each other and which NUMBA_* variables are set, and by FUSEDNORM_LOG_LEVEL=info "
                "where it failed"
            )
    raise CompilationError(reason)


def link(code: bytes, symbol: str, name: str) -> int:
    """The address of a symbol of some object code, which stays loaded; each name is linked once."""
    with _lock:
        library = _libraries.get(name)
        if library is None:
            builder = llvm.JITLibraryBuilder().add_object_img(code).export_symbol(symbol).add_current_process()
            library = _libraries[name] = builder.link(_jit(), f"fusednorm-{name}-{next(_links)}")
        return int(library[symbol])


def assemble(ir: str, public: str) -> bytes:
    """Object code of a module in which only one function stays visible."""
    with _lock:
        module = llvm.parse_assembly(ir)
        for item in module.functions:
            if not item.is_declaration and item.name != public:
                item.linkage = "internal"
        _optimize(module)
        foreign = [
            item.name for item in module.functions if item.is_declaration and item.name.startswith(RUNTIME_PREFIXES)
        ]
        if foreign:
            raise RuntimeError(f"the kernel {public} needs Numba's runtime ({', '.join(foreign)})")
        return bytes(target_machine().emit_object(module))


def _optimize(module: Any) -> None:
    """Run LLVM's passes over the functions of a kernel, which Numba has simplified one by one."""
    builder = llvm.create_pass_builder(target_machine(), llvm.create_pipeline_tuning_options(speed_level=0))
    passes = builder.getModulePassManager()
    # Loops are rotated before they are inlined: of some that were not, LLVM made twice the code.
    passes.add_loop_rotate_pass()
    passes.add_instruction_combine_pass()
    passes.add_jump_threading_pass()
    passes.run(module, builder)
    builder = llvm.create_pass_builder(target_machine(), llvm.create_pipeline_tuning_options(speed_level=3))
    passes = builder.getModulePassManager()
    # Now that the kernel's status code is known to be constant, it reaches the wrapper that Numba makes.
    passes.add_ipsccp_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, builder)


@cache
def target_machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=_cpu_features(), opt=3, reloc="pic", codemodel="small"
    )


@cache
def _jit() -> Any:
    # JITLink lays code and constants side by side. LLVM's other linker takes memory for each where the system has some,
    # and aborts the process where that is more than 2 GB apart.
    return llvm.create_lljit_compiler(target_machine(), use_jit_link=True)


def _cpu_features() -> str:
    """The processor's features, and vectors of 512 bits where it has them.

    By itself LLVM takes 256 bits on most of Intel's, and 16-bit dtypes and exponentials then take up to twice the time.
    """
    try:
        features = str(llvm.get_host_cpu_features().flatten())
    except RuntimeError:  # LLVM cannot tell on this system; the processor's name implies what it needs
        return ""
    return f"{features},-prefer-256-bit" if "+avx512f" in features.split(",") else features


def _compile(kernel: Kernel) -> tuple[str, bytes]:
    """Compile a kernel; return its symbol and the object code."""
    from numba import cfunc  # costs 0.3 s, paid only where there is something to compile

    with own_settings(_cpu_features()), _rare_collections():
        from fusednorm.backends.cpu import kernels

        function, names = kernels.build(kernel)
        compiled = cfunc(
            kernels.numba_signature(names, kernel.dtype), pipeline_class=pipeline(), error_model="numpy",
            fastmath=kernels.FASTMATH,
        )(function)  # fmt: skip
    # The kernel's constant status code makes the wrapper's error handling, which would need Numba's runtime, fold away.
    symbol = "fusednorm_" + hashlib.sha256(kernel.name.encode()).hexdigest()[:16]
    ir = compiled.inspect_llvm() + _entry(symbol, compiled.native_name, names)
    return symbol, assemble(ir, symbol)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Numba makes objects by the million, few of them in cycles: looking for these took a tenth of the time."""
    found = gc.get_threshold()
    if 0 < found[0] < COLLECTED:
        gc.set_threshold(COLLECTED, *found[1:])
    try:
        yield
    finally:
        gc.set_threshold(*found)


def _entry(symbol: str, function: str, names: tuple[str, ...]) -> str:
    """The IR of run(frame, start, stop, worker), which reads a compiled kernel's arguments and calls the kernel."""
    lines, operands = [], []
    for name in names:
        if name in ARGUMENTS:
            kind = _IR_TYPES[FORMATS[ARGUMENTS[name]]]
            lines.append(f"  %p.{name} = getelementptr i64, ptr %frame, i64 {PLACES[name]}")
            lines.append(f"  %a.{name} = load {kind}, ptr %p.{name}")
            operands.append(f"{kind} %a.{name}")
        else:
            operands.append(f"i64 %{name}")
    head = f"define void @{symbol}(ptr %frame, i64 %start, i64 %stop, i64 %worker) {{"
    call = f'  call {VOID_RESULT} @"{function}"({", ".join(operands)})'
    return "\n".join(["", head, *lines, call, "  ret void", "}", ""])


# --- the cache on disk ---


def cache_directory() -> Path:
    """The folder of this machine's objects: below the cache's root, named by a digest."""
    return cache_root() / f"cpu-{_digest()}"


def describe_caches() -> dict[str, str]:
    """Where kernels are kept and whether that works, for ``fusednorm doctor``."""
    directory, readonly = cache_directory(), readonly_root()
    found = {"kernel cache": (directory, problem(directory))}
    if readonly is not None:
        directory = readonly / directory.name
        found["read-only kernel cache"] = (directory, problem(directory, readonly=True))
    return {name: f"{path} (not used: {reason})" if reason else str(path) for name, (path, reason) in found.items()}


@cache
def _digest() -> str:
    """A digest of all that the machine code depends on: sources, compiler and processor."""
    digest = hashlib.sha256()
    outside = (_ACTIVATIONS_FILE, _FORMATS_FILE, _NUMBA_NAMES_FILE)
    for file in [*sorted(Path(__file__).parent.rglob("*.py")), *map(Path, outside)]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    parts = (version("numba"), version("llvmlite"), platform.python_version(), platform.machine())
    digest.update("\0".join((*parts, llvm.get_host_cpu_name(), _cpu_features())).encode())
    return digest.hexdigest()[:24]


def _read(kernel: Kernel) -> tuple[str, bytes] | None:
    for path, content in contents(cache_directory() / kernel.name):
        try:
            digest, symbol, code = content.split(b"\n", 2)
            if hashlib.sha256(b"\n".join((symbol, code))).hexdigest().encode() == digest:
                return symbol.decode(), code
        except ValueError:
            pass
        logger.warning("ignoring the damaged kernel cache file %s", path)
    return None


def _write(kernel: Kernel, entry: tuple[str, bytes]) -> None:
    symbol, code = entry
    content = b"\n".join((symbol.encode(), code))
    content = hashlib.sha256(content).hexdigest().encode() + b"\n" + content
    directory = cache_directory()
    try:
        replace_file(directory / kernel.name, content)
    except OSError as error:
        logger.info("the kernel cache %s cannot be written (%s); each process compiles its kernels", directory, error)
