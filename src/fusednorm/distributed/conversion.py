"""From the batch norms of a model to synchronized ones, in place."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from fusednorm.distributed.modules import SyncBatchNorm
from fusednorm.private.torch_names import BatchNormBase

Model = TypeVar("Model", bound=torch.nn.Module)


def convert_sync_batchnorm_(model: Model, process_group: Any = None) -> Model:
    """Make every batch norm of ``model``, and ``model`` itself if it is one, a :class:`SyncBatchNorm`, in place.

    The modules stay the same objects, with their parameters, buffers, hooks, mode, and a fused activation, so that an
    optimizer made before goes on. torch.nn.SyncBatchNorm is converted too, and keeps its group where ``process_group``
    is None. A subclass with a forward of its own stays as it is, with a warning.

    Returns ``model``.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: a lazy batch norm that has not seen an input, and so has no parameters.

    >>> model = convert_sync_batchnorm_(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)))
    >>> type(model[1]).__name__
    'SyncBatchNorm'
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"convert_sync_batchnorm_: model is a {type(model).__name__}; expected a torch.nn.Module")
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, BatchNormBase)]
    for name, module in found:
        if isinstance(module, LazyModuleMixin):
            raise ValueError(
                f"convert_sync_batchnorm_: {name or 'the model'} is a {type(module).__name__} without parameters; call "
                "the model once, and convert it then"
            )
    for name, module in found:
        if not type(module).forward.__module__.startswith(("torch.nn.modules.", "fusednorm.")):
            warnings.warn(
                f"convert_sync_batchnorm_: {name or 'the model'} is a {type(module).__name__}, which has a forward of "
                "its own, and is not synchronized",
                stacklevel=2,
            )
            continue
        group: Any = process_group if process_group is not None else getattr(module, "process_group", None)
        module.__class__ = SyncBatchNorm
        module.process_group = group
    return model
