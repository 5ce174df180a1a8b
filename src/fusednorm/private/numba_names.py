"""Every private or undocumented name of Numba and llvmlite that fusednorm uses; importing this imports neither.

Each name says what it is for, since when it exists (Numba 0.63 to 0.68 and llvmlite 0.46 to 0.50 were searched, and
fusednorm needs the first of each), and what happens without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

from fusednorm.private.lookup import find

#: Options of njit that leave out the wrappers by which Python and C call a function: they would double the time to
#: compile it. In 0.63 to 0.68. Without: Numba's error at the first compilation names the option, and the reference
#: runs.
UNWRAPPED = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

#: The option of njit by which LLVM inlines a function wherever it is called. In 0.63 to 0.68. Without: as UNWRAPPED.
INLINED = {"forceinline": True}

#: How the symbols of Numba's runtime and of Python's C API begin: a kernel that refers to one cannot be kept on disk.
#: In 0.63 to 0.68. Without: such a kernel passes the check, and linking it fails with the symbol's name.
RUNTIME_PREFIXES = ("NRT_", "numba_", "Py", "_Py")

#: The type that a C callback without a result returns in Numba's IR, as a null pointer. In 0.63 to 0.68. Without:
#: LLVM's error at the first compilation, and the reference runs.
VOID_RESULT = "ptr"

#: Settings of ``numba.core.config``, at their defaults, that would otherwise change the kernels' code or make it need
#: Numba's runtime. Without: a setting that Numba does not have is left alone.
SETTINGS = {
    "DISABLE_JIT": 0,
    "CPU_NAME": None,
    "CPU_FEATURES": None,
    "ENABLE_AVX": True,
    "ENABLE_PROFILING": 0,
    "LLVM_PASS_TIMINGS": 0,
    "JIT_COVERAGE": 0,
    "BOUNDSCHECK": None,
    "EXTEND_VARIABLE_LIFETIMES": 0,
    "LOOP_VECTORIZE": 1,
    "SLP_VECTORIZE": 0,
    "LLVM_REFPRUNE_PASS": 1,
}
#: The setting of the level of optimization, a number of a type of its own; 3 is the default.
OPTIMIZATION = "OPT"
#: Passes over a function's Python that find nothing in those of kernels: contexts, closures, functions to inline,
#: literals, array expressions and what is unsupported. In 0.63 to 0.68. Without: nothing is left out.
NEEDLESS = (
    "WithLifting", "InlineClosureLikes", "RewriteDynamicRaises", "MakeFunctionToJitFunction", "InlineInlinables",
    "FindLiterallyCalls", "LiteralUnroll", "LiteralPropagationSubPipelinePass", "InlineOverloads", "NopythonRewrites",
    "NoPythonSupportedFeatureValidation", "DumpParforDiagnostics",
)  # fmt: skip
#: How the names of the settings begin that print amid the program's own output on stdout.
TALK = ("DEBUG", "DUMP_")


def void_value(context: Any) -> Any:
    """The value that an intrinsic without a result returns: ``BaseContext.get_dummy_value``, in 0.63 to 0.68.

    Without: AttributeError at the first compilation, and the reference runs.
    """
    return context.get_dummy_value()


def ir_type(context: Any, numba_type: Any) -> Any:
    """LLVM's type of a value of Numba's type: ``BaseContext.get_value_type``, in 0.63 to 0.68.

    Without: AttributeError at the first compilation, and the reference runs.
    """
    return context.get_value_type(numba_type)


@cache
def bfloat() -> Any:
    """LLVM's bfloat, which llvmlite's IR has no type for: a subclass of ``ir.Type`` that overrides ``_to_string``.

    In llvmlite 0.46 to 0.50. Without: NotImplementedError at the first compilation of a bfloat16 kernel on a processor
    with AVX512-BF16, and the reference runs.
    """
    from llvmlite import ir

    class BFloatType(ir.Type):
        def _to_string(self) -> str:
            return "bfloat"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, BFloatType)

        def __hash__(self) -> int:
            return hash(BFloatType)

    return BFloatType()


@contextmanager
def own_settings(features: str | None = None) -> Iterator[None]:
    """Numba as the kernels need it, whatever NUMBA_OPT and its like say for the program's own functions.

    Code is made for a processor with these ``features`` in LLVM's terms, by default for this one.
    Numba's own lock keeps other threads from compiling the program's functions meanwhile, so these keep its settings.
    """
    config = find("numba.core", "config")
    with _compiler_lock():
        settings = SETTINGS | {"CPU_FEATURES": features}
        pinned = {name: value for name, value in settings.items() if hasattr(config, name)}
        if hasattr(config, OPTIMIZATION):
            pinned[OPTIMIZATION] = type(getattr(config, OPTIMIZATION))(3)
        talk = [name for name in vars(config) if name.startswith(TALK)]
        pinned |= {name: 0 for name in talk if isinstance(getattr(config, name), int)}
        found = {name: getattr(config, name) for name in pinned}
        try:
            for name, value in pinned.items():
                setattr(config, name, value)
            with _own_code_generator(), _known_sizes(), _known_calls():
                yield
        finally:
            for name, value in found.items():
                setattr(config, name, value)


def _compiler_lock() -> AbstractContextManager[Any]:
    """The lock under which Numba compiles: ``numba.core.compiler_lock.global_compiler_lock``, in 0.63 to 0.68.

    Without: none, and a program's function that another thread compiles meanwhile gets the kernels' settings.
    """
    lock: AbstractContextManager[Any] = find("numba.core.compiler_lock", "global_compiler_lock", nullcontext())
    return lock


@contextmanager
def _own_code_generator() -> Iterator[None]:
    """A code generator for the kernels alone, since it keeps the processor and the level that it was made with.

    ``_internal_codegen`` of ``numba.core.registry.cpu_target.target_context``, in 0.63 to 0.68. Without: the program's
    own generator compiles the kernels, with the program's own NUMBA_CPU_NAME and NUMBA_OPT.
    """
    context = find("numba.core.registry", "cpu_target.target_context", None)
    generator = getattr(context, "_internal_codegen", None)
    own = None if generator is None else _code_generator()
    if own is None:
        yield
        return
    context._internal_codegen = own
    try:
        yield
    finally:
        context._internal_codegen = generator


@cache
def _code_generator() -> Any:
    """Numba's own generator, ``numba.core.codegen.JITCPUCodegen``, which here leaves each function's IR to itself.

    A kernel's IR is optimized as a whole (compiler.assemble), and its object made from that. Numba would optimize each
    function with all that it calls, by ``_optimize_final_module`` of the class that ``_library_class`` names. It would
    also make machine code of each: ``_add_module`` hands a finished module to LLVM's execution engine, which does that,
    and ``set_env`` writes into it. All in 0.63 to 0.68. Without the class of generators: None. Without the others:
    Numba optimizes, a third of the time to compile a kernel, or makes machine code.
    """
    kind = find("numba.core.codegen", "JITCPUCodegen", None)
    if kind is None:
        return None
    members: dict[str, Any] = {"_add_module": _nothing, "set_env": _nothing}
    library = find("numba.core.codegen", "JITCPUCodegen._library_class", None)
    if library is not None:
        members["_library_class"] = type("IRLibrary", (library,), {"_optimize_final_module": _nothing})
    return type("IRCodegen", (kind,), members)("fusednorm.exec")


@contextmanager
def _replaced(owner: Any, name: str, substitute: Any) -> Iterator[None]:
    """An attribute of a class or of an object, replaced meanwhile."""
    own, found = name in vars(owner), getattr(owner, name)
    setattr(owner, name, substitute)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, found)
        else:
            delattr(owner, name)


@contextmanager
def _known_sizes() -> Iterator[None]:
    """The size of each of LLVM's types asked for once: Numba parses a module of IR for the size of each variable.

    ``get_abi_sizeof`` of ``numba.core.registry.cpu_target.target_context``, in 0.63 to 0.68. Without: a module for each
    variable, 3 % of the time to compile a kernel.
    """
    size_of = find("numba.core.registry", "cpu_target.target_context.get_abi_sizeof", None)
    if size_of is None:
        yield
        return

    def known(llvm_type: Any) -> Any:
        name = str(llvm_type)
        if name not in _sizes:
            _sizes[name] = size_of(llvm_type)
        return _sizes[name]

    with _replaced(size_of.__self__, "get_abi_sizeof", known):
        yield


@contextmanager
def _known_calls() -> Iterator[None]:
    """The types of each call of Numba's own functions and operators looked up once: Numba tries the candidates for an
    operator, NumPy's ufuncs among them, up to six times for each use of it.

    ``numba.core.types.functions.BaseFunction.get_call_type(context, args, kws)``, which leaves in ``_impl_keys`` by
    which key the implementation is found, in 0.63 to 0.68. Without: Numba looks, a tenth of the time to compile a
    kernel.
    """
    kind = find("numba.core.types.functions", "BaseFunction", None)
    look_up = find("numba.core.types.functions", "BaseFunction.get_call_type", None)
    if look_up is None:
        yield
        return

    def known(self: Any, context: Any, args: Any, kws: Any) -> Any:
        if kws or not hasattr(self, "_impl_keys"):
            return look_up(self, context, args, kws)
        call = id(self), id(context), args
        if call not in _calls:
            signature = look_up(self, context, args, kws)
            _calls[call] = signature, self._impl_keys.get(signature.args), self, context  # the ids stay theirs
        signature, key, *_ = _calls[call]
        self._impl_keys[signature.args] = key
        return signature

    with _replaced(kind, "get_call_type", known):
        yield


_sizes: dict[str, Any] = {}
_calls: dict[Any, Any] = {}


@cache
def pipeline() -> Any:
    """A class of compilers for the option ``pipeline_class`` of njit and cfunc, which leaves out :data:`NEEDLESS`.

    ``Compiler``, ``define_pipelines``, which gives its lists of ``passes``, and their ``finalize``, of
    ``numba.core.compiler``, in 0.63 to 0.68. Without the class: None, and Numba takes its own, a tenth of the time to
    compile a kernel.
    """
    kind = find("numba.core.compiler", "Compiler", None)
    if kind is None:
        return None

    def define_pipelines(self: Any) -> Any:
        managers = kind.define_pipelines(self)
        for manager in managers:
            manager.passes = [item for item in manager.passes if item[0].__name__ not in NEEDLESS]
            manager.finalize()
        return managers

    return type("KernelCompiler", (kind,), {"define_pipelines": define_pipelines})


def _nothing(*_: Any) -> None:
    pass
