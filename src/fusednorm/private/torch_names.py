"""Every private or undocumented name of torch that fusednorm uses, each once.

Each name says what it is for, the oldest version of torch in which it was found (2.0.1, 2.4.1, 2.8.0, 2.10.0, 2.11.0,
2.13.0 and 2.15.0 were searched), and what happens without it. A function that every operation calls is torch's own,
bound to a constant, and costs what it costs in torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, profiler

from fusednorm.private.lookup import find


def _assume_so() -> bool:
    """The safe answer to "may something listen to the dispatcher?": every call then goes through the operator."""
    return True


def _without_memory(tensor: Tensor) -> bool:
    """True for a tensor of torch's own class that has no memory to point to."""
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return False
    try:
        return tensor.numel() > 0 and tensor.data_ptr() == 0
    except RuntimeError:
        return True


def _module_or(module: Any, name: str, assumed: Any) -> Any:
    """A module whose variable is read at each call, or, where it has no such variable, a constant in its place."""
    return module if hasattr(module, name) else SimpleNamespace(**{name: assumed})


# --- who listens to the dispatcher; all are asked in every call ---

#: How many TorchDispatchModes are active. Since 2.0. Without: every call goes through the registered operator.
dispatch_modes: Callable[[], Any] = find("torch._C", "_len_torch_dispatch_stack", _assume_so)

#: Whether a TorchFunctionMode is active. Since 2.0. Without: every call goes through the registered operator.
function_modes: Callable[[], bool] = find("torch._C", "_is_torch_function_mode_enabled", _assume_so)

#: Whether a transform of torch.func is active. Since 2.0. Without: every call runs the reference, which every transform
#: can differentiate and batch.
transforms_active: Callable[[], bool] = find("torch._C", "_are_functorch_transforms_active", _assume_so)

#: What torch.jit.trace records into, None where nothing is traced. Since 2.0. Without: torch.jit.is_tracing.
tracing_state: Callable[[], Any] = find("torch._C", "_get_tracing_state", torch.jit.is_tracing)  # type: ignore[attr-defined]

#: ``_current_level``, -1 outside of every level of forward-mode AD. Since 2.0. Without: every call runs the reference,
#: which has forward derivatives.
_forward_ad = _module_or(forward_ad, "_current_level", 0)

#: ``_is_profiler_enabled``, whether a profiler records. Since 2.4. Without: every call goes through the operator.
_profiler = _module_or(profiler, "_is_profiler_enabled", True)


def profiled() -> bool:
    """True while a profiler records."""
    return bool(_profiler._is_profiler_enabled)


def unseen(tensor: Tensor) -> bool:
    """True where no mode, transform or trace waits for a dispatcher call; each test costs 40 to 70 ns."""
    return (
        (tensor.is_cpu or tensor.is_cuda)
        and not dispatch_modes()
        and not function_modes()
        and not transforms_active()
        and not tracing_state()
        and _forward_ad._current_level < 0
    )


def undisturbed(tensor: Tensor) -> bool:
    """:func:`unseen`, and no profiler records, which sees kernels but no call that goes past the dispatcher."""
    return unseen(tensor) and not _profiler._is_profiler_enabled


def watched() -> bool:
    """True where a mode, a level of forward-mode AD or a profiler waits for a call: what no :func:`guard` sees."""
    return (
        bool(dispatch_modes()) or function_modes() or _forward_ad._current_level >= 0 or _profiler._is_profiler_enabled
    )


#: The levels of torch.func's transforms. Since 2.0. Without: all of them run the reference.
_transform_levels: Callable[[], Any] = find("torch._C._functorch", "get_interpreter_stack", lambda: None)
#: What a level is. Since 2.0. Without: no level is a vmap or a gradient.
_transform_kinds: Any = find("torch._C._functorch", "TransformType", SimpleNamespace(Vmap=None, Grad=None))


def only_batches_and_gradients() -> bool:
    """True under torch.func's vmap, grad and vjp, in any order, with no transform or forward derivative besides."""
    levels = _transform_levels()
    kinds = (_transform_kinds.Vmap, _transform_kinds.Grad)
    return bool(levels) and all(level.key() in kinds for level in levels) and _forward_ad._current_level < 0


def transformed() -> bool:
    """True under torch.func's transforms and forward-mode AD, which work on the reference's torch operators."""
    return transforms_active() or _forward_ad._current_level >= 0


# --- tensors ---

#: Whether a tensor belongs to the vmap behind ``is_grads_batched``, which no mode announces. Since 2.4. Without: a
#: tensor of torch's own class without memory is taken for one.
is_batched: Callable[[Tensor], bool] = find("torch._C._functorch", "is_legacy_batchedtensor", _without_memory)

#: Whether a gradient is a zero without memory, as some derivatives of torch hand down. Since 2.0. Without: the address
#: of its memory tells.
is_zerotensor: Callable[[Tensor], bool] = find("torch", "Tensor._is_zerotensor", _without_memory)

#: ``check(*tensors)`` of an object of this class compares tensors with those that it was made for. In 2.11 and
#: 2.13. Without: None, and every call is checked anew.
_guards: Any = find("torch._C._dynamo.guards", "TensorGuards", None)


def _guard_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    sizes = [list(tensor.shape) for tensor in tensors]
    strides = [list(tensor.stride()) for tensor in tensors]
    check: Callable[..., bool] = _guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


@cache
def _guards_work() -> bool:
    """Whether a trial shows that a guard takes the like of its tensor and nothing else."""

    def dense(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    like = dense(2, 3, 2)[..., 0]
    others = [
        dense(2, 4, 2)[..., 0],
        dense(2, 3),
        dense(2, 3, 2, dtype=torch.float64)[..., 0],
        dense(2, 3, 2, device="meta")[..., 0],
        dense(2, 3, 2)[..., 0].requires_grad_(),
        nn.Parameter(dense(2, 3, 2)[..., 0], requires_grad=False),
        dense(2, 3, dtype=torch.complex64).conj().imag,  # which is negated lazily
    ]
    try:
        check = _guard_of([like])
        return check(dense(2, 3, 2)[..., 0]) and not any(map(check, others))
    except (TypeError, RuntimeError):
        return False


def guard(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """``check(*others)``: whether others have the class, dtype, device, sizes, strides, requires_grad and dispatch keys
    of these, under the thread's present keys; None where torch offers none, or where it does not take even these, as
    when one tensor is given twice. A nested tensor of torch's class makes it abort the process."""
    if _guards is None or not _guards_work():
        return None
    check = _guard_of(tensors)
    return check if check(*tensors) else None


#: The ``__torch_function__`` of a subclass that wants to be treated as a plain tensor. Since 2.0. Without: Parameter's,
#: which is the same object.
no_torch_function: Any = find("torch._C", "_disabled_torch_function_impl", nn.Parameter.__torch_function__)
#: That of jagged nested tensors, which takes a function for torch's of the same name. Since 2.4. Without: no tensor has
#: it.
jagged_torch_function: Any = getattr(
    find("torch.nested._internal.nested_tensor", "NestedTensor", None), "__torch_function__", None
)


# --- autograd ---

#: A context in which an operator's call skips the Autograd key, for the operator's own kernel there. Since 2.0.
#: Without: ImportError, since the call would come back to that kernel for ever.
below_autograd: Callable[[], AbstractContextManager[Any]] = find("torch._C", "_AutoDispatchBelowAutograd")

#: torch.set_grad_enabled in 0.14 us, where the class of that name takes 1.3. Since 2.0. Without: that class.
set_grad_enabled: Callable[[bool], Any] = find("torch._C", "_set_grad_enabled", torch.set_grad_enabled)

#: The hooks, or None, through which tensors are saved now; its argument says whether a trace hides them. Since 2.8.
#: Without: what was saved is checked in every backward.
saved_tensors_hooks: Callable[[bool], Any] = find(
    "torch._C._autograd", "_top_saved_tensors_default_hooks", lambda under_a_trace: True
)


def short_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for calls outside of torch.func, which is 2 of its 5 us: the method of Function's C base.

    Since 2.0; in 2.15 Function has no other. Without: ``function.apply``.
    """
    short = getattr(super(torch.autograd.Function, function), "apply", None)
    return function.apply if short is None else short


def short_backward(function: type[torch.autograd.Function]) -> None:
    """Let the engine call ``function.backward`` itself, not a method that looks for it, which takes 1 us.

    ``_backward_cls`` since 1.2: the class of the graph's nodes, whose ``apply`` the engine calls. Without: the method.
    """
    node: Any = getattr(function, "_backward_cls", None)
    if node is not None:
        node.apply = function.backward


# --- collectives ---


def traced_all_gather(values: Tensor, group: Any) -> Tensor:
    """The ``values`` of every rank along dimension 0, still to be waited for; a tracer records it as an operator.

    ``_c10d_functional.all_gather_into_tensor`` since 2.3; the functions of torch.distributed that call it have changed
    their names. Without: AttributeError where a graph is traced.
    """
    gathered: Tensor = torch.ops._c10d_functional.all_gather_into_tensor(values, group.size(), group.group_name)
    return gathered


def traced_wait(gathered: Tensor) -> Tensor:
    """What :func:`traced_all_gather` gave, once it has arrived. Since 2.3."""
    arrived: Tensor = torch.ops._c10d_functional.wait_tensor(gathered)
    return arrived


def keep_no_traces() -> bool:
    """Let torch.compile of this process keep no traces of AOTAutograd on disk; whether it would have kept them.

    ``torch._functorch.config.enable_autograd_cache`` since 2.6, on by default since 2.7. Without: False.
    """
    try:
        import torch._functorch.config as config
    except ImportError:
        return False
    kept = bool(getattr(config, "enable_autograd_cache", False))
    for name in ("enable_autograd_cache", "enable_remote_autograd_cache"):
        if getattr(config, name, None):
            setattr(config, name, False)
    return kept


def mixes_with_dtensors(kind: Any) -> bool:
    """Whether plain tensors beside DTensors are taken for replicated ones: in torch's ``implicit_replication()``.

    ``kind`` is the class DTensor. ``_op_dispatcher._allow_implicit_replication`` in 2.11 and 2.13. Without: False, and
    the mix is refused.
    """
    return getattr(getattr(kind, "_op_dispatcher", None), "_allow_implicit_replication", False) is True


# --- export ---


def offer_decomposition(op: Any, decomposition: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Tell torch's exporters what an op is in torch's own: ``torch.onnx.export`` decomposes each op that it has no node
    for and that stands in ``torch._decomp.decomposition_table``.

    A fake tensor whose size is a symbol would go to the decomposition as well; an op in ``torch._decomp.meta_table``
    goes to its fake. Both since 2.0, and the exporter reads the first in 2.11 and 2.13. Without one of the two: the
    exporter does not know the op, and a program has to be decomposed before it is given to the exporter.
    """
    tables: list[Any] = [find("torch._decomp", name, None) for name in ("decomposition_table", "meta_table")]
    if all(isinstance(table, dict) for table in tables):
        for table, function in zip(tables, (decomposition, fake), strict=True):
            table[op] = function


# --- CUDA; a build of torch without CUDA has none of these ---

#: The index of the current device. Since 2.0. Without: torch.cuda.current_device, which also starts CUDA.
current_device: Callable[[], int] = find("torch._C", "_cuda_getDevice", torch.cuda.current_device)


def _current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


#: The handle of a device's current stream. Since 2.0. Without: the same by torch.cuda.current_stream.
current_raw_stream: Callable[[int], int] = find("torch._C", "_cuda_getCurrentRawStream", _current_stream)

#: torch.empty_strided(shape, strides, dtype) on the current device, in 0.8 us of the host and not 2.2: what Inductor's
#: code calls. Since 2.4. Without: None, and torch.empty_strided is called.
empty_strided_cuda: Callable[..., Tensor] | None = find("torch._C._dynamo.guards", "_empty_strided_cuda", None)


# --- the CPU ---


def _empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


#: torch.empty_strided(shape, strides, dtype) on the CPU, in 0.4 us and not 1.5: what Inductor's code calls. In 2.11
#: and 2.13. Without: torch.empty_strided.
empty_strided_cpu: Callable[..., Tensor] = find("torch._C._dynamo.guards", "_empty_strided_cpu", _empty_strided)


# --- storages, for the memory of dead outputs (backends/cpu/memory.py); without any of the three no memory is kept ---

#: How many tensors and other C++ owners a storage has, by its handle. Since 2.4. Without: None.
storage_use_count: Any = find("torch._C", "_storage_Use_Count", None)

#: The handle of a storage, the address of its StorageImpl. Since 2.0. Without: AttributeError at its call.
storage_handle: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")

#: swap(a, b) exchanges the memory of two storages. Since 2.12: 2.11 has it not. Without: None.
swap_memory: Any = find("torch", "UntypedStorage._swap_data_ptr_", None)


# --- modules ---

#: The base of BatchNorm1d, 2d and 3d and SyncBatchNorm, by which torch's tools know batch norms; and the base of
#: InstanceNorm1d, 2d and 3d. Since 2.0. Without: the first base of BatchNorm1d, and of InstanceNorm1d.
try:
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.instancenorm import _InstanceNorm
except ImportError:
    _BatchNorm = nn.BatchNorm1d.__mro__[1]  # type: ignore[misc, assignment]
    _InstanceNorm = nn.InstanceNorm1d.__mro__[1]  # type: ignore[misc, assignment]
BatchNormBase = _BatchNorm
InstanceNormBase = _InstanceNorm


def input_check(kind: type[nn.Module]) -> Callable[[Any, Tensor], None]:
    """The method by which a class of batch or instance norms refuses inputs of another rank, ``_check_input_dim``.

    Since 2.0. Without: inputs of every rank are taken.
    """
    found: Callable[[Any, Tensor], None] = getattr(kind, "_check_input_dim", _accept)
    return found


def _accept(module: nn.Module, input: Tensor) -> None:
    pass


def unbatched_rank(kind: type[nn.Module]) -> Callable[[Any], int]:
    """The method that gives the rank of one sample to a class of instance norms, ``_get_no_batch_dim``.

    Since 2.0. Without: 2 for an InstanceNorm1d, 3 for an InstanceNorm2d and 4 for an InstanceNorm3d.
    """
    found: Callable[[Any], int] | None = getattr(kind, "_get_no_batch_dim", None)
    if found is not None:
        return found
    rank = 4 if issubclass(kind, nn.InstanceNorm3d) else 3 if issubclass(kind, nn.InstanceNorm2d) else 2
    return lambda module: rank


#: The method by which a module tells torch.jit.script what to compile in its place. Since 2.0. Without:
#: torch.jit.script fails on the module's source, with words of its own.
SCRIPT_HOOK = "__prepare_scriptable__"


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs hooks around its forward. ``_has_any_global_hook`` since 2.8, the others 2.0.

    Without: True, and a trace records the module's function in place of the module.
    """
    try:
        return bool(module._forward_hooks or module._forward_pre_hooks or nn.modules.module._has_any_global_hook())
    except AttributeError:
        return True


def watches_output(module: nn.Module) -> bool:
    """Whether hooks see what a module returns, or its gradient: a fused activation would change what they see.

    ``_forward_hooks``, ``_backward_hooks`` and ``_backward_pre_hooks`` since 2.0. Without: True, and nothing is fused.
    """
    try:
        return bool(module._forward_hooks or module._backward_hooks or module._backward_pre_hooks)
    except AttributeError:
        return True


def has_own_hooks(module: nn.Module) -> bool:
    """Whether any hook runs with a call of this module. ``_forward_pre_hooks`` since 2.0. Without: True."""
    try:
        return watches_output(module) or bool(module._forward_pre_hooks)
    except AttributeError:
        return True


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called. ``_compiled_call_impl`` since 2.4. Without: False, and a conversion of
    such a model leaves the recompilation to torch's guards."""
    return getattr(module, "_compiled_call_impl", None) is not None


def fuser_methods(loaded: dict[str, Any]) -> dict[Any, Callable[..., nn.Module]] | None:
    """torch.ao.quantization.fuse_modules' table from tuples of types to methods, where that module is in ``loaded``.

    Since 2.0. Without: None, and fuse_modules refuses fusednorm's modules with words of its own.
    """
    mappings = loaded.get("torch.ao.quantization.fuser_method_mappings")
    methods = getattr(mappings, "_DEFAULT_OP_LIST_TO_FUSER_METHOD", None)
    return methods if isinstance(methods, dict) else None


_MKLDNN = "makes an MKL-DNN batch norm of it"
#: Functions of torch that take a module apart and read its eps, by module and qualified name, each with what it makes
#: of the module. Inductor's since 2.4, the others 2.0; since 2.15 (not in 2.13) the MKL-DNN class is defined inside a
#: function. Without: a function under another name drops the activation unseen, so a test looks for each.
FOLDS = {
    ("torch.nn.utils.fusion", "fuse_conv_bn_eval"): "folds it into the convolution",
    ("torch.nn.utils.fusion", "fuse_linear_bn_eval"): "folds it into the linear layer",
    ("torch._inductor.fx_passes.efficient_conv_bn_eval", "efficient_conv_bn_eval"): "folds it into the convolution",
    ("torch.nn.modules.batchnorm", "SyncBatchNorm.convert_sync_batchnorm"): "makes a torch.nn.SyncBatchNorm of it",
    ("torch.utils.mkldnn", "MkldnnBatchNorm.__init__"): _MKLDNN,
    ("torch.utils.mkldnn", "_get_mkldnn_classes.<locals>.MkldnnBatchNorm.__init__"): _MKLDNN,
}
#: The fold that takes the last dimension for the channels.
FOLD_ALONG_THE_LAST = ("torch.nn.utils.fusion", "fuse_linear_bn_eval")
#: Functions that compare the eps of two norms: if equal they give the weights to a kernel of torch's, and else call the
#: modules. Since 2.0. Without: as FOLDS.
COMPARISONS = {
    ("torch.nn.modules.transformer", "TransformerEncoderLayer.forward"),
    ("torch.nn.modules.transformer", "TransformerEncoder.__init__"),
}

#: The method by which DistributedDataParallel refuses a model on CPUs that has a torch.nn.SyncBatchNorm, by module and
#: qualified name. Since 2.0. Without: a method under another name refuses fusednorm's modules too, with torch's words.
DDP_REFUSAL = (
    "torch.nn.parallel.distributed",
    "DistributedDataParallel._passing_sync_batchnorm_handle",
)


# --- what else torch brings ---


def keep_buffers() -> None:
    """From now on torch.compile makes backwards that can run again on the same saved tensors.

    ``torch._functorch.config.donated_buffer`` since 2.8. Without: nothing to switch off. A backward that runs reads it
    too: one that was compiled while it was off, and comes from a cache, is refused where it is on.
    """
    try:
        import torch._functorch.config as config
    except ImportError:
        return
    if hasattr(config, "donated_buffer"):
        config.donated_buffer = False


def watch_operators(seen: Callable[[Any, Sequence[Any], Any], None]) -> AbstractContextManager[Any]:
    """A context in which ``seen`` is told each operator that torch dispatches, its arguments and its results.

    ``torch.utils._python_dispatch.TorchDispatchMode`` since 2.0. Without: nothing is told.
    """
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:
        return nullcontext()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            results = function(*args, **(kwargs or {}))
            seen(function, (*args, *(kwargs or {}).values()), results)
            return results

    return Watch()


def fresh_compiler_cache() -> AbstractContextManager[Any]:
    """A context in which torch.compile finds nothing that it compiled before, on disk or in the process.

    ``torch._inductor.utils.fresh_cache`` since 2.8, ``fresh_inductor_cache`` before. Without: what is kept is found.
    """
    try:
        import torch._inductor.utils as utils

        fresh: Callable[[], AbstractContextManager[Any]] = (
            getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
        )
    except (ImportError, AttributeError):
        return nullcontext()
    return fresh()


def unkept_autotuning() -> AbstractContextManager[Any]:
    """A context in which Inductor writes code that keeps no choice of a kernel's configuration on disk: whoever runs it
    later measures the configurations for itself.

    ``torch._inductor.config.autotune_local_cache`` since 2.6. Without: choices are kept.
    """
    try:
        import torch._inductor.config as config

        patched: AbstractContextManager[Any] = config.patch(autotune_local_cache=False)
    except (ImportError, AttributeError):
        return nullcontext()
    return patched


def openmp_libraries() -> list[str]:
    """The OpenMP libraries that the process has loaded, torch's own first, which lies in torch's folder or beside it.

    As the wheels of 2.0 to 2.15 are built. Without: [], and the kernels run on threads of fusednorm.
    """
    home = Path(torch.__file__).resolve().parent.parent
    try:
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
    except OSError:
        return []
    found = [path for path in mapped if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))]
    return sorted(found, key=lambda path: (not path.startswith(f"{home}/torch"), path))
