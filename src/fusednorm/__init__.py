"""Normalizations for PyTorch in the fewest passes over memory, with the activation and the modulation fused in."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fusednorm import distributed, export, functional, nn, ops
from fusednorm.activations import Activation
from fusednorm.choice import use_instance, use_tuned
from fusednorm.distributed import convert_sync_batchnorm_
from fusednorm.export import decompositions
from fusednorm.functional import batch_norm, group_norm, instance_norm, layer_norm, rms_norm

if TYPE_CHECKING:
    from fusednorm import graph
    from fusednorm.convert import Report, convert_, revert_
    from fusednorm.inspection import explain, instances
    from fusednorm.rewriting import compile_pass

__version__ = "0.1.0"
__all__ = [
    "Activation",
    "Report",
    "__version__",
    "batch_norm",
    "compile_pass",
    "convert_",
    "convert_sync_batchnorm_",
    "decompositions",
    "distributed",
    "explain",
    "export",
    "functional",
    "graph",
    "group_norm",
    "instance_norm",
    "instances",
    "layer_norm",
    "nn",
    "ops",
    "revert_",
    "rms_norm",
    "use_instance",
    "use_tuned",
]

# Names that only some programs need, each imported at its first use.
_LAZY = {
    "Report": "fusednorm.convert",
    "compile_pass": "fusednorm.rewriting",
    "convert_": "fusednorm.convert",
    "explain": "fusednorm.inspection",
    "instances": "fusednorm.inspection",
    "revert_": "fusednorm.convert",
}


def __getattr__(name: str) -> Any:
    if name == "graph":
        return import_module("fusednorm.graph")
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
