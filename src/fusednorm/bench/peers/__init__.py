"""Other libraries that run the same workloads, each imported only when asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusednorm.bench.contenders import Contender


def _jax() -> Contender:
    from fusednorm.bench.peers.xla import Jax

    return Jax()


def _onnx_runtime() -> Contender:
    from fusednorm.bench.peers.onnx_runtime import OnnxRuntime

    return OnnxRuntime()


def _openvino() -> Contender:
    from fusednorm.bench.peers.open_vino import OpenVino

    return OpenVino()


PEERS: dict[str, Callable[[], Contender]] = {"jax": _jax, "onnxruntime": _onnx_runtime, "openvino": _openvino}
