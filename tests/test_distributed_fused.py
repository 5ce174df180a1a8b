"""SyncBatchNorm and the functions over processes by Triton's kernels: in its interpreter, and in CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

import numpy as np  # noqa: E402
import test_distributed  # noqa: E402
import test_dtensor  # noqa: E402
import test_spread  # noqa: E402
from fused_worker import DTENSORS, FUNCTIONS, MODULES  # noqa: E402
from test_distributed import Found, load, run  # noqa: E402

WORKER = Path(__file__).with_name("fused_worker.py")
GRAPHS = Path(__file__).with_name("graphs_worker.py")
OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)


def in_interpreter(folder: Path, worker: Path) -> Found:
    """What each of two ranks found in Triton's interpreter."""
    if OLD and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("triton < 3.8 with numpy >= 2.4 has no interpreter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        return load(run(folder, "cpu", 2, worker=worker), 2)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return in_interpreter(tmp_path_factory.mktemp("ranks"), WORKER)


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_those_of_the_whole_in_one_process(ranks: Found, name: str) -> None:
    test_distributed.check_results(ranks, name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_those_of_the_whole_in_one_process(ranks: Found, name: str) -> None:
    test_spread.check_results(ranks, name)


@pytest.mark.parametrize("name", DTENSORS)
def test_dtensors_are_those_of_one_process(ranks: Found, name: str) -> None:
    test_dtensor.check_results([found["DTensors"] for found in ranks], name)


@pytest.mark.parametrize("name", [*MODULES, *FUNCTIONS])
def test_what_ranks_share_has_the_same_bits_on_each(ranks: Found, name: str) -> None:
    first, second = (found[name][0] for found in ranks)
    keys = ["running_mean", "running_var"]
    if name in FUNCTIONS:
        case = test_spread.CASES[name]
        keys += [key for key in case.operands if test_spread.shares(case, key) and key not in case.frozen]
    for key in keys:
        if key in first:
            assert torch.equal(first[key], second[key])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False")
@pytest.mark.parametrize("count", [2, 4])
def test_graphs_hold_the_exchange_over_nccl(tmp_path: Path, count: int) -> None:
    """A replay has the bits of an eager call of the same input."""
    for found in load(run(tmp_path, "cuda", count, worker=GRAPHS), count):
        assert list(found) == ["SyncBatchNorm", "group_norm", "batch_norm", "cut", "layer_norm"]
        for name, (replayed, eager) in found.items():
            assert len(replayed) == len(eager) > 0
            for one, other in zip(replayed, eager, strict=True):
                assert torch.isfinite(one).all(), name
                assert torch.equal(one, other), name
