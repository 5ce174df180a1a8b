"""A model as paths and places, and the models that are refused."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator

import torch
from torch import nn

from fusednorm.private.torch_names import is_compiled

#: Wrappers by the name of a class among a module's bases: most live in packages that are loaded only where they are
#: used. What a wrapper holds of the model, such as a flat parameter or compiled code, would not follow a conversion.
WRAPPERS = {
    "OptimizedModule": "torch.compile",
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
    "ScriptModule": "torch.jit.script or torch.jit.trace",
}


class Tree:
    """The modules of a model by path, and where each stands: as which child of which module."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._path: dict[int, str] = {}
        self._children: dict[int, dict[str, nn.Module]] = {}
        self._places: dict[int, dict[tuple[int, str], nn.Module]] = {}
        paths = dict(model.named_modules(remove_duplicate=False))
        self.every_path: dict[int, list[str]] = {}
        for path, module in paths.items():
            self._path.setdefault(id(module), path)
            self.every_path.setdefault(id(module), []).append(path)
            if path:
                above, _, key = path.rpartition(".")
                parent = paths[above]
                self._children.setdefault(id(parent), {})[key] = module
                self._places.setdefault(id(module), {})[id(parent), key] = parent

    def path(self, module: nn.Module) -> str:
        """A module's first path."""
        return self._path[id(module)]

    def children(self, module: nn.Module) -> dict[str, nn.Module]:
        """All children by key; a module that stands under two keys is there twice."""
        return self._children.get(id(module), {})

    def places(self, module: nn.Module) -> list[tuple[nn.Module, str]]:
        """Every parent and key of a module. A parent at two paths is one place: its code calls the child either way."""
        return [(parent, key) for (_, key), parent in self._places.get(id(module), {}).items()]

    def modules(self) -> Iterator[nn.Module]:
        """Every module once, parents first."""
        return self.model.modules()


def check_model(function: str, model: object) -> None:
    """Refuse what cannot be converted, before anything is changed."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model is a {type(model).__name__}; expected a torch.nn.Module")
    for path, module in model.named_modules():
        found = next((WRAPPERS[base.__name__] for base in type(module).__mro__ if _is_wrapper(base)), None)
        if found is None and is_compiled(module):
            found = "Module.compile"
        if found is not None:
            what = f"its module {path!r}" if path else "it"
            then = found.rpartition(" or ")[2]  # of the two of torch.jit the one that takes fusednorm's modules
            raise ValueError(
                f"{function}: the model cannot change any more: {what} was made by {found}; call {function} first, and "
                f"then {then}"
            )


def _is_wrapper(base: type) -> bool:
    return base.__name__ in WRAPPERS and base.__module__.partition(".")[0] == torch.__name__


def has_attribute(module: nn.Module, name: str) -> bool:
    """Whether a module has an attribute of its own, a parameter, a buffer or a child of that name, or its class has
    one; none of their code runs for the answer."""
    kept = (module.named_parameters(recurse=False), module.named_buffers(recurse=False), module.named_children())
    absent = object()
    found = inspect.getattr_static(module, name, absent)
    return found is not absent or any(name == key for each in kept for key, _ in each)


def may_be_asked(value: object) -> bool:
    """Whether an object is no weak proxy, which raises at any question when its object is gone."""
    return type(value) not in weakref.ProxyTypes
