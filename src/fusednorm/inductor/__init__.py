"""How the ops become code under torch.compile's default backend, Inductor.

``library``'s ops are what a graph holds while torch differentiates it. Before Inductor makes code of it, a pass
(``passes.py``) puts leaner ops in their place, without a kernel for autograd. On a GPU these become plain launches in
the generated code (``lowering.py``); on a CPU, and where a size is not known, one call of a Python function.
"""

from __future__ import annotations

import torch

# The lean ops exist in every process that imports fusednorm: code that was compiled in another one may call them.
from fusednorm import compiled  # noqa: F401
from fusednorm.private.inductor_names import FORGETS, Nodes, graph_pass, keep_calls, loaded_config


def prepare() -> None:
    """Make sure that Inductor, where it is loaded, runs our pass. The ops' fakes call this, so every trace does.

    It must be so before torch looks into its caches of compiled graphs, whose keys hold the pass's ``uuid``; tracing by
    Dynamo, which comes first, sees to that. A process without Inductor pays for a look into ``sys.modules``.
    """
    for op in (torch.ops.fusednorm.norm_forward, torch.ops.fusednorm.norm_quantized):
        keep_calls(op.default)
    config = loaded_config()
    if config is not None:
        from fusednorm.inductor.passes import install

        install(config)


def described() -> str:
    """What becomes of calls under torch.compile's default backend, with this release of torch. It imports Inductor."""
    try:
        Nodes()
        graph_pass()
    except ImportError as error:
        return f"calls of the operators: {error}"
    if loaded_config() is None:
        return "calls of the operators: Inductor's configuration has no place for a pass"
    forgotten = "; a backward calls the operators where cpp_wrapper is an option of torch.compile" if FORGETS else ""
    return f"launches in the generated code on GPUs, calls of functions elsewhere{forgotten}"
