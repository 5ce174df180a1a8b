"""How torch's own tools treat the modules: tracing, folding, quantization, scripting.

A tool that knows torch's class runs or rewrites a module without its ``forward``, and so without the activation. Here
each such tool either keeps the activation or is refused with a remedy. Tools that compare types exactly leave the
modules alone: ``torch.fx.experimental.optimization.fuse``, the fusions of FX graph mode quantization and of Inductor.
"""

# Annotations are evaluated here: torch.fx cannot pickle a graph whose inputs have them as strings.

import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from fusednorm.operands import Sums
from fusednorm.private.torch_names import (
    COMPARISONS,
    DDP_REFUSAL,
    FOLD_ALONG_THE_LAST,
    FOLDS,
    BatchNormBase,
    fuser_methods,
    has_hooks,
)

Forward = TypeVar("Forward", bound=Callable[..., Any])


def eps_for(module: Any, eps: Any, reader: FrameType) -> Any:
    """The eps of a module with fused parts, for the frame ``reader``; RuntimeError where it would drop those parts.

    The frame tells a fold from a person who prints eps. To replace torch's folding functions would not reach a program
    that imported them before fusednorm.
    """
    name = (reader.f_globals.get("__name__", ""), reader.f_code.co_qualname)
    if name in COMPARISONS:
        return float("nan")  # it equals no other eps, so torch calls the module itself
    if name in FOLDS and (module.activation is not None or name != FOLD_ALONG_THE_LAST):
        _refuse(module, f"{name[1]} {FOLDS[name]}", name[1] == "SyncBatchNorm.convert_sync_batchnorm")
    return eps


def _refuse(module: Any, what: str, synchronizes: bool = False) -> NoReturn:
    kind = type(module).__name__
    if synchronizes:
        dropped = "channel_dim=-1" if module.activation is None else f"its activation {module.activation.name!r}"
        raise RuntimeError(
            f"{kind}: {what}, which would drop {dropped}; call fusednorm.convert_sync_batchnorm_ in its place, which "
            "keeps it"
        )
    if module.activation is not None:
        raise RuntimeError(
            f"{kind}: {what}, which would drop its activation {module.activation.name!r}; set the module's activation "
            "to None and put the activation behind it as a module of its own, e.g. torch.nn.ReLU()"
        )
    raise RuntimeError(
        f"{kind}: {what}, which takes dimension 1 for the channels; this module has channel_dim=-1; use a module with "
        "channel_dim=1"
    )


# --- tracing ---


def leaf(
    module: Any,
    input: Any,
    pre_add: Any = None,
    pre_gate: Any = None,
    return_sum: bool = False,
    post_add: Any = None,
    **others: Any,
) -> Any:
    """The one call that torch.fx records of a module, as of torch's own; None for an input that is no Proxy.
    ``others`` are further keywords that the forward takes, such as scale and shift.

    Tracers take a module for a leaf by the package of its class, so they trace into ours. Two modules must be traced
    into: the traced module itself, whose graph cannot call it, and a module with hooks, which are being traced around
    this call and would run again with it. There torch.fx records the function that ``forward`` calls: the result is
    None, or that of ``_normalize`` where ``forward`` would look at its input's shape, which a Proxy has not. Of the
    sums around the norm the call gets those that were given.
    """
    if not isinstance(input, torch.fx.Proxy):
        return None
    tracer = input.tracer
    if not isinstance(tracer, torch.fx.Tracer):
        return None
    given = {name: part for name, part in others.items() if part is not None}
    given |= Sums(pre_add, pre_gate, post_add, return_sum).keywords()
    path = tracer.path_of_module(module)
    if path and not has_hooks(module):
        return tracer.create_proxy("call_module", path, (input,), given)
    normalize = getattr(module, "_normalize", None)
    return None if normalize is None else normalize(input, **given)


def traced_alone(forward: Forward) -> Forward:
    """A module's ``forward``, of which torch.fx sees the first parameter where it traces the module itself.

    torch.fx makes an input of each parameter, and would take the sums around the norm for given. It looks at the
    function behind ``__wrapped__``; ``__signature__`` keeps the whole for everybody else.
    """

    def of_input(self: Any, input: Tensor) -> Any: ...
    def of_x(self: Any, x: Tensor) -> Any: ...

    signature = inspect.signature(forward)
    forward.__signature__ = signature  # type: ignore[attr-defined]
    forward.__wrapped__ = of_x if "x" in signature.parameters else of_input  # type: ignore[attr-defined]
    return forward


# --- DistributedDataParallel ---


def looked_for_by_ddp(frame: FrameType | None) -> bool:
    """Whether a walk over a model's modules, in whose generators ``frame`` is, is DistributedDataParallel's search for
    a torch.nn.SyncBatchNorm, because of which it refuses a model on CPUs."""
    while frame is not None and frame.f_code.co_name in ("modules", "named_modules"):
        frame = frame.f_back
    return frame is not None and (frame.f_globals.get("__name__", ""), frame.f_code.co_qualname) == DDP_REFUSAL


# --- scripting ---


def refuse_script(module: Any) -> NoReturn:
    raise RuntimeError(
        f"torch.jit.script cannot compile fusednorm's {type(module).__name__}, which chooses its kernels in Python; "
        "use torch.compile, torch.export or torch.jit.trace, or script the model with torch.nn's module in its place"
    )


# --- eager mode quantization ---


def as_torch(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """The same parameters, buffers and hooks as a module of torch's class, without the fused parts."""
    plain = kind.__new__(kind)
    own = "activation", "channel_dim", "_eps"
    plain.__dict__ = {name: value for name, value in vars(module).items() if name not in own}
    return plain


def _fuse(
    methods: dict[tuple[type, ...], Callable[..., nn.Module]],
    types: tuple[type, ...],
    is_qat: bool,
    *modules: nn.Module,
) -> nn.Module:
    """The module that torch's method for ``types`` makes, with a fused ReLU as the next module of the pattern."""
    plain = list(modules)
    for index, (module, kind) in enumerate(zip(modules, types, strict=True)):
        activation = getattr(module, "activation", None)
        if not issubclass(kind, BatchNormBase):
            continue
        if getattr(module, "channel_dim", 1) != 1:
            _refuse(module, "fuse_modules folds it into another module")
        plain[index] = as_torch(module, kind)
        if activation is None:
            continue
        followed = types[index + 1 :] == (nn.ReLU,)
        method = methods.get(types if followed else (*types, nn.ReLU))
        if activation.name != "relu" or method is None:
            _refuse(module, "fuse_modules folds it into another module")
        if not followed:
            types, plain = (*types, nn.ReLU), [*plain, nn.ReLU().train(module.training)]
        break
    return methods[types](is_qat, *plain)


def register_fusions(classes: dict[type, type]) -> None:
    """Tell torch.ao.quantization.fuse_modules, which knows types by identity, of our batch norms.

    ``classes`` maps torch's classes to ours. Where torch has not loaded its quantization, or keeps its table elsewhere,
    fuse_modules itself refuses our modules.
    """
    methods = fuser_methods(sys.modules)
    if methods is None:
        return
    for types in list(methods):
        ours = tuple(classes.get(kind, kind) for kind in types)
        if ours != types:
            methods[ours] = partial(_fuse, methods, types)
