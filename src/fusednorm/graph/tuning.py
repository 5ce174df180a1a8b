"""Timing the plans of a graph, and the rankings kept on disk.

Each ranking has a file of its own, named by a digest of all that it depends on, and replaced as a whole: a reader sees
the old ranking or the new. A damaged file is ignored with a warning.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusednorm.graph.logs import logger_of
from fusednorm.graph.packs import VariantPack
from fusednorm.graph.serialization import as_dict
from fusednorm.graph.workspace import ALIGNMENT
from fusednorm.machine.description import cpu_model
from fusednorm.storage import cache_root, contents, replace_file

if TYPE_CHECKING:
    from fusednorm.graph.graph import Graph

logger = logger_of(__name__)

VERSION = 1
SECONDS = 0.1  # spent on timing each plan


def measure(graph: Graph, variant_pack: VariantPack, workspace: Tensor | None) -> dict[str, float]:
    """Seconds per execution of every plan that can run, from the fastest."""
    from torch.utils.benchmark import Timer

    chosen = graph._plan
    seconds: dict[str, float] = {}
    for plan in graph._plans:
        if plan.reason is not None:
            continue
        graph._select(plan)
        needed = graph._workspace.size
        memory = workspace
        if needed and (memory is None or memory.numel() < needed):
            memory = torch.empty(needed + ALIGNMENT, dtype=torch.uint8, device=graph.device)

        def run(memory: Tensor | None = memory) -> None:
            graph.execute(variant_pack, memory)

        run()  # the first launch may compile
        timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
        seconds[plan.name] = timer.blocked_autorange(min_run_time=SECONDS).median
        logger.info("graph %s: autotune: %s takes %.4g ms", graph.name, plan.name, seconds[plan.name] * 1e3)
    if chosen is not None:
        graph._select(chosen)
    return dict(sorted(seconds.items(), key=lambda item: item[1]))


def cache_directory() -> Path:
    """The folder of the rankings, below the cache's root."""
    return cache_root() / "graph-plans"


def _key(graph: Graph) -> dict[str, Any]:
    """All that a ranking depends on; names of tensors and nodes do not matter."""
    from fusednorm import __version__

    described = as_dict(graph)
    for entry in described["tensors"] + described["nodes"]:
        entry.pop("name", None)
        entry.pop("uid", None)
    for key in ("name", "plan", "device"):
        described.pop(key)
    device = graph.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()
    plans = sorted(plan.name for plan in graph._plans if plan.reason is None)
    versions = {"fusednorm": __version__, "torch": str(torch.__version__)}
    threads = torch.get_num_threads()
    return {"graph": described, "device": name, "threads": threads, "versions": versions, "plans": plans}


def _file(graph: Graph) -> Path:
    digest = hashlib.sha256(json.dumps(_key(graph), sort_keys=True).encode()).hexdigest()[:32]
    return cache_directory() / f"{digest}.json"


def read(graph: Graph) -> dict[str, float] | None:
    """The kept ranking, from the fastest plan, or None."""
    supported = {plan.name for plan in graph._plans if plan.reason is None}
    for path, content in contents(_file(graph)):
        try:
            found = json.loads(content.decode())
            ranking = {entry["plan"]: float(entry["seconds"]) for entry in found["ranking"]}
            if found["version"] == VERSION and ranking and set(ranking) == supported:
                return dict(sorted(ranking.items(), key=lambda item: item[1]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        logger.warning("ignoring the damaged tuning cache file %s", path)
    return None


def write(graph: Graph, seconds: dict[str, float]) -> None:
    """Keep a ranking; a directory that cannot be written is no error."""
    path = _file(graph)
    ranking = [{"plan": name, "seconds": value} for name, value in seconds.items()]
    content = json.dumps({"version": VERSION, "graph": graph.name, "ranking": ranking}, indent=1)
    try:
        replace_file(path, content.encode())
    except OSError as error:
        logger.info("the tuning cache %s cannot be written (%s); each process tunes anew", path.parent, error)
