"""Every Triton kernel at small shapes in Triton's interpreter on the CPU, in a process of its own.

TRITON_INTERPRET must be set before triton is imported, which another test of this process may have done.
"""

from __future__ import annotations

import numpy as np
import pytest
from cpu_support import fresh_process

triton = pytest.importorskip("triton")

CODE = """
import json
from pathlib import Path
import sys
sys.path.insert(0, {tests!r})
from cpu_support import backward, faults, forward
from fusednorm.backends.triton import instances
from fusednorm.backends.triton.config import Columns
from fusednorm.bench.workloads import Workload, draw

# Few programs, so that each takes several of a long row's few neighbours.
instances.columns_backward_for = lambda problem: Columns(4096, 16, 1024, 4, 40)
found = []
for instance, family, shape, groups, dtype, layout, activation, modulated in (
    ("triton.tiles", "group_norm", (2, 12, 5, 7), 3, "float32", "nchw", "silu", True),
    ("triton.tiles", "group_norm", (2, 12, 5, 7), 3, "float64", "nhwc", "gelu", True),
    ("triton.tiles", "batch_norm", (3, 5, 4, 4), 0, "float32", "nhwc", "tanh", False),
    ("triton.tiles", "batch_norm", (3, 5, 4, 4), 0, "float32", "nchw", "gelu_tanh", False),
    ("triton.tiles", "instance_norm", (2, 3, 5, 5, 5), 0, "float16", "nchw", "leaky_relu", False),
    ("triton.tiles", "group_norm", (2, 160, 3, 3), 2, "float32", "nchw", None, False),
    ("triton.rows", "layer_norm", (5, 24), 1, "float32", "rows", "hardswish", False),
    ("triton.rows", "layer_norm", (5, 600), 1, "float16", "rows", None, False),
    ("triton.rows", "layer_norm", (2, 8200), 1, "float16", "rows", None, False),
    ("triton.rows", "rms_norm", (5, 24), 1, "float32", "rows", None, False),
    ("triton.rows", "rms_norm", (2, 2100), 1, "float64", "rows", "silu", False),
    ("triton.rows", "layer_norm", (5, 16500), 1, "float16", "rows", "silu", False),
    ("triton.rows", "layer_norm", (6, 5, 20), 2, "float32", "rows", "silu", False),
    ("triton.rows", "rms_norm", (3, 9000), 1, "float64", "rows", None, False),
    ("triton.whole", "layer_norm", (5, 600), 1, "float32", "rows", "hardswish", False),
    ("triton.whole", "rms_norm", (5, 24), 1, "float16", "rows", None, False),
    ("triton.whole", "group_norm", (2, 12, 3, 3), 4, "float32", "nchw", "silu", True),
):
    workload = Workload(family, shape, groups, dtype=dtype, layout=layout, activation=activation, modulated=modulated)
    inputs = draw(workload)
    results = forward(workload, inputs, instance)
    back = None if instance == "triton.whole" else instance
    results |= backward(workload, inputs, results["mean"], results["rstd"], back)
    found += [(instance, workload.key, fault) for fault in faults(workload, inputs, results)]
print(json.dumps(found))
"""


OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)


@pytest.mark.skipif(OLD and np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton < 3.8 with numpy >= 2.4")
def test_every_kernel() -> None:
    from pathlib import Path

    assert fresh_process(CODE.format(tests=str(Path(__file__).parent)), TRITON_INTERPRET="1") == []
