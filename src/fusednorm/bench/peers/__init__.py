"""Other libraries that run the same workloads, each imported only when asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


def _liger() -> Contender:
    from fusednorm.bench.peers.liger import Liger

    return Liger()


@dataclass(frozen=True)
class Peer:
    """The device type on which a library is measured, and a function that imports it, or raises ImportError."""

    device: str
    load: Callable[[], Contender]


PEERS: dict[str, Peer] = {
    "jax": Peer("cpu", _jax),
    "onnxruntime": Peer("cpu", _onnx_runtime),
    "openvino": Peer("cpu", _openvino),
    "liger": Peer("cuda", _liger),
}
