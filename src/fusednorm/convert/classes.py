"""Which class becomes which, and the change of class itself.

A module stays the same object and changes its class: parameters, buffers, hooks, the training flag and every reference
to the module, two paths to it among them, stay by themselves. The class that it had is kept in the module, so that
copies and pickles of a converted model can be reverted too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from fusednorm import nn as ours
from fusednorm.activations import Activation
from fusednorm.convert.tree import has_attribute
from fusednorm.equivalents import module_activation, qualified_name
from fusednorm.private.torch_names import BatchNormBase, InstanceNormBase, watches_output

#: torch's classes and ours.
COUNTERPARTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.GroupNorm: ours.GroupNorm,
    nn.LayerNorm: ours.LayerNorm,
    nn.RMSNorm: ours.RMSNorm,
    nn.BatchNorm1d: ours.BatchNorm1d,
    nn.BatchNorm2d: ours.BatchNorm2d,
    nn.BatchNorm3d: ours.BatchNorm3d,
    nn.InstanceNorm1d: ours.InstanceNorm1d,
    nn.InstanceNorm2d: ours.InstanceNorm2d,
    nn.InstanceNorm3d: ours.InstanceNorm3d,
}
NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, BatchNormBase, InstanceNormBase)


@dataclass(frozen=True)
class Target:
    """What a module becomes; ``activation`` is what its own class runs behind the norm."""

    becomes: type[nn.Module]
    channel_dim: int
    activation: Activation | None = None
    acted: bool = False


def _target(becomes: type[nn.Module], channel_dim: int | None = None) -> Target:
    """A class of fusednorm.nn, along its own channel dimension where none is given."""
    own: int = becomes.channel_dim  # type: ignore[attr-defined]
    return Target(becomes, own if channel_dim is None else channel_dim)


@dataclass(frozen=True)
class Known:
    """A class of another package whose forward is torch's in other words.

    ``names`` are all the names that its forward may use: a release that computes anything else uses another name, and
    is left alone. ``acts`` says that it runs its children ``drop`` and ``act`` behind the norm.
    """

    target: Target
    names: frozenset[str]
    acts: bool = False


def _known(becomes: type[nn.Module], names: str, acts: bool = False, channel_dim: int | None = None) -> Known:
    used = frozenset(names.split()) | ({"drop", "act"} if acts else set())
    return Known(_target(becomes, channel_dim), used, acts)


def _channel_norm(becomes: type[nn.Module], names: str, acts: bool = False) -> Known:
    """A norm over the channels of (N, C, *), by permutations or by sums over the dimension."""
    return _known(becomes, f"{names} permute rms_norm2d fast_rms_norm2d", acts, channel_dim=1)


_AFFINE = "F weight bias eps"
_GROUP = f"{_AFFINE} _fast_norm fast_group_norm group_norm num_groups"
_LAYER = f"{_AFFINE} _fast_norm fast_layer_norm layer_norm normalized_shape"
_CAST = f"{_AFFINE} float to dtype layer_norm normalized_shape"
_RMS = "_fast_norm fast_rms_norm rms_norm normalized_shape weight eps"
_RMS_CAST = "float to dtype rms_norm normalized_shape weight eps"
_BATCH = (
    f"{_AFFINE} _assert ndim momentum training track_running_stats num_batches_tracked add_ float running_mean "
    "running_var batch_norm"
)
#: Classes by qualified name, whose packages are not imported here. Their casts to float32 and back are what every
#: kernel of ours does inside.
KNOWN: dict[str, Known] = {
    "timm.layers.norm.GroupNorm": _known(ours.GroupNorm, _GROUP),
    "timm.layers.norm.GroupNorm1": _known(ours.GroupNorm, _GROUP),
    "timm.layers.norm.LayerNorm": _known(ours.LayerNorm, _LAYER),
    "timm.layers.norm.LayerNormFp32": _known(ours.LayerNorm, _CAST),
    "timm.layers.norm.LayerNorm2d": _channel_norm(ours.LayerNorm2d, _LAYER),
    "timm.layers.norm.LayerNorm2dFp32": _channel_norm(ours.LayerNorm2d, _CAST),
    "timm.layers.norm.RmsNorm": _known(ours.RMSNorm, _RMS),
    "timm.layers.norm.RmsNormFp32": _known(ours.RMSNorm, _RMS_CAST),
    "timm.layers.norm.RmsNorm2d": _channel_norm(ours.RMSNorm, _RMS),
    "timm.layers.norm.RmsNorm2dFp32": _channel_norm(ours.RMSNorm, _RMS_CAST),
    "timm.layers.norm_act.BatchNormAct2d": _known(ours.BatchNorm2d, _BATCH, acts=True),
    "timm.layers.norm_act.GroupNormAct": _known(ours.GroupNorm, _GROUP, acts=True),
    "timm.layers.norm_act.GroupNorm1Act": _known(ours.GroupNorm, _GROUP, acts=True),
    "timm.layers.norm_act.LayerNormAct": _known(ours.LayerNorm, _LAYER, acts=True),
    "timm.layers.norm_act.LayerNormActFp32": _known(ours.LayerNorm, _CAST, acts=True),
    "timm.layers.norm_act.LayerNormAct2d": _channel_norm(ours.LayerNorm2d, _LAYER, acts=True),
    "timm.layers.norm_act.LayerNormAct2dFp32": _channel_norm(ours.LayerNorm2d, _CAST, acts=True),
    "timm.layers.norm_act.RmsNormAct": _known(ours.RMSNorm, _RMS, acts=True),
    "timm.layers.norm_act.RmsNormActFp32": _known(ours.RMSNorm, _RMS_CAST, acts=True),
    "timm.layers.norm_act.RmsNormAct2d": _channel_norm(ours.RMSNorm, _RMS, acts=True),
    "timm.layers.norm_act.RmsNormAct2dFp32": _channel_norm(ours.RMSNorm, _RMS_CAST, acts=True),
    "torchvision.models.convnext.LayerNorm2d": _channel_norm(ours.LayerNorm2d, _LAYER),
    "diffusers.models.normalization.FP32LayerNorm": _known(ours.LayerNorm, _CAST),
}

_PLAIN = {"__init__", "__doc__", "__module__", "__qualname__", "__annotations__", "__firstlineno__"}
_ORIGINAL = "_fusednorm_original"
#: What a module of ours keeps in itself beside what torch's does.
_OWN = ("activation", "channel_dim", "_eps")


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, NORMS) or qualified_name(type(module)) in KNOWN


def is_ours(module: nn.Module) -> bool:
    return type(module) in (*COUNTERPARTS.values(), ours.LayerNorm2d, ours.SyncBatchNorm)


def target_of(module: nn.Module, activations: bool) -> Target | str:
    """What a norm becomes, or the reason why it stays what it is."""
    kind = type(module)
    if "forward" in vars(module):
        return "its forward was replaced in the module itself"
    if parametrize.is_parametrized(module):
        return "it is parametrized, which gives it a class of its own; remove the parametrization first"
    if isinstance(module, tuple(COUNTERPARTS.values())):
        return "it is fusednorm's already"
    # Children, parameters and buffers are not in vars(module); constants of the class have a reason of their own.
    own = (name for name in _OWN if has_attribute(module, name))
    taken = next((name for name in own if name in vars(module) or not hasattr(kind, name)), None)
    if taken is not None:
        return f"it has an attribute {taken!r}, which fusednorm's module has too"
    if kind in COUNTERPARTS:
        return _target(COUNTERPARTS[kind])
    known = KNOWN.get(qualified_name(kind))
    if known is not None:
        if not (isinstance(kind.forward, FunctionType) and {*kind.forward.__code__.co_names} <= known.names):
            return f"the forward of {qualified_name(kind)} is not the one that fusednorm knows"
        return _with_own_activation(module, known, activations) if known.acts else known.target
    if issubclass(kind, LazyModuleMixin):
        return "it is lazy; call the model once first"
    if kind is nn.SyncBatchNorm:
        return "its statistics are those of several processes; fusednorm.convert_sync_batchnorm_ converts it"
    base = _base_of(kind)
    if base is None:
        return f"fusednorm.nn has no counterpart of {kind.__name__}"
    if any("forward" in vars(each) for each in _between(kind, base)):
        return f"{qualified_name(kind)} overrides forward"
    if not _only_renames(kind, base):
        return f"{qualified_name(kind)} adds to {base.__name__} more than a constructor"
    hidden = [name for name in _constants(kind, base) if name not in vars(module)]
    taken = next((name for name in hidden if hasattr(COUNTERPARTS[base], name)), None)
    if taken is not None:
        return f"{qualified_name(kind)} has a constant {taken!r}, which fusednorm's module has too"
    return _target(COUNTERPARTS[base])


def _base_of(kind: type) -> type | None:
    """The class of torch's that a class is, or adds to, and that has a counterpart."""
    return next((base for base in kind.__mro__ if base in COUNTERPARTS), None)


def _between(kind: type, base: type) -> tuple[type, ...]:
    """A class and its bases before ``base``."""
    return kind.__mro__[: kind.__mro__.index(base)]


def _only_renames(kind: type, base: type) -> bool:
    """Whether all that stands between a class and torch's is a constructor and constants."""
    return all(
        name in _PLAIN or (not name.startswith("__") and isinstance(value, (int, float, str, tuple, type(None))))
        for each in _between(kind, base)
        for name, value in vars(each).items()
    )


def _constants(kind: type, base: type) -> dict[str, Any]:
    """The constants that stand between a class and torch's, those of the nearest class of a name."""
    found: dict[str, Any] = {}
    for each in reversed(_between(kind, base)):
        found |= {name: value for name, value in vars(each).items() if name not in _PLAIN}
    return found


def _own_constants(kind: type) -> dict[str, Any]:
    """Those of a class that :func:`become` replaces, none where it is torch's own or another package's."""
    base = _base_of(kind)
    return {} if base is None or qualified_name(kind) in KNOWN else _constants(kind, base)


def _with_own_activation(module: nn.Module, known: Known, activations: bool) -> Target | str:
    children = dict(module.named_children())
    drop, act = getattr(module, "drop", None), getattr(module, "act", None)
    name = type(module).__name__
    if type(drop) is not nn.Identity or act is None or watches_output(drop):
        return f"{name} runs a {type(drop).__name__} between the norm and the activation"
    if not children.keys() <= {"drop", "act"}:
        return f"{name} has other children than drop and act"
    if watches_output(act):
        return f"the activation of {name} has hooks"
    if type(act) is nn.Identity:
        return replace(known.target, acted=True)
    activation = module_activation(act)
    if activation is None:
        return f"{name} runs {type(act).__name__}, which has no fused form"
    if not activations:
        return f"{name} is a norm and an activation in one, and activations=False"
    return replace(known.target, activation=activation, acted=True)


def become(module: nn.Module, kind: type[nn.Module], original: Any = None) -> None:
    """Change a module's class, or keep ``original`` in a module that stands in for another. The constants of a class
    that only renames torch's, which a model may read, stay in the module."""
    vars(module).setdefault(_ORIGINAL, type(module) if original is None else original)
    for name, value in _own_constants(type(module)).items() if original is None else ():
        vars(module).setdefault(name, value)
    module.__class__ = kind


def original_of(module: nn.Module) -> Any:
    """What :func:`become` kept: a class, or the module in whose place this one stands; None elsewhere."""
    return vars(module).get(_ORIGINAL)


def restore(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module the class that it had, and take away what fusednorm's class added."""
    for name in (_ORIGINAL, *_OWN):
        if name == _ORIGINAL or is_ours(module):
            vars(module).pop(name, None)
    for name, value in _own_constants(kind).items():
        if vars(module).get(name) is value:
            del vars(module)[name]
    module.__class__ = kind
