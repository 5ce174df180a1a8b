"""An H200 for a machine without a GPU, as far as torch.compile needs one to generate code. Nothing runs on it.

It changes torch for the whole process, so it lives in processes of its own: ``inductor_support`` starts them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from types import SimpleNamespace
from typing import Any

if len(sys.argv) > 1:  # before torch asks for the first time whether there is a device
    ctypes.CDLL(sys.argv[1])
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import torch
from torch._dynamo import device_interface
from torch._inductor import codecache, compile_fx, config, graph
from torch._inductor.codegen import cpp_wrapper_gpu, wrapper
from torch._inductor.fx_passes import fuse_attention, joint_graph, misc_patterns, pad_mm
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    type="cuda",
    index=0,
    major=9,
    minor=0,
    cc=90,
    warp_size=32,
    multi_processor_count=132,
    total_memory=140 << 30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=60 << 20,
    gcnArchName="",
)


#: What the program has set in Inductor's configuration.
SETTINGS: dict[str, Any] = {}
#: Whether C++ code compiles its kernels when it is first called, without a device before.
COMPILES_LATER = hasattr(cpp_wrapper_gpu.DeferredTritonCallWrapper, "generate_lazy")


class Captured(BaseException):
    """Generated code is called, which nothing here can run."""


class OnCpu(TorchDispatchMode):
    """Makes tensors on the CPU, whatever device they are asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {name: "cpu" if name == "device" else value for name, value in (kwargs or {}).items()}
        return func(*args, **named)


class Utilities:
    def get_device_properties(self, *_: Any) -> dict[str, int]:
        return {"max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32}


class Driver:
    """Triton's driver."""

    utils = Utilities()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda:0")

    @staticmethod
    def is_active() -> bool:
        return True


class Worker(device_interface.CudaInterface.Worker):
    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: int) -> None:
        pass

    @staticmethod
    def get_device_properties(device: Any = None) -> Any:
        return PROPERTIES


def _memory_format(input: Any, weight: Any, backend: Any) -> torch.memory_format:
    """What cuDNN's convolution returns."""
    last = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
    given = any(suggest_memory_format(x) == last for x in (input, weight))
    return last if given else torch.contiguous_format


def install() -> list[str]:
    """Make torch believe in the device; the list gets the generated code of every graph."""
    answers: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "is_available": True, "is_initialized": True, "_lazy_init": None, "_is_compiled": True,
            "current_device": 0, "device_count": 1, "set_device": None, "synchronize": None,
            "_exchange_device": 0, "_maybe_exchange_device": 0, "get_device_capability": (9, 0),
            "get_device_properties": PROPERTIES, "get_device_name": PROPERTIES.name,
            "mem_get_info": (130 << 30, 140 << 30), "get_rng_state": torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": None, "get_rng_state_all": [], "is_current_stream_capturing": False,
        },
        torch._C: {
            "_cuda_getDevice": 0, "_cuda_setDevice": None, "_cuda_exchangeDevice": 0,
            "_cuda_maybeExchangeDevice": 0, "_cuda_getCurrentRawStream": 0,
            "_select_conv_backend": torch._C._ConvBackend.Cudnn,
        },
        # A build with CUDA opens the device before the first fake tensor of it.
        fake_tensor: {"init_gpu_context": None},
        # Patterns are traced with tensors of the device.
        fuse_attention: {"_sfdp_init": None}, pad_mm: {"_pad_mm_init": None},
        misc_patterns: {"_misc_patterns_init": None},
    }  # fmt: skip
    for owner, values in answers.items():
        for name, value in values.items():
            setattr(owner, name, lambda *_, value=value, **__: value)
    torch._C._conv_determine_backend_memory_format = _memory_format
    torch.version.cuda = "13.0"
    interface = device_interface.CudaInterface
    interface.Worker = Worker  # type: ignore[misc]
    for name, value in {
        "current_device": 0, "is_available": True, "synchronize": None, "get_compute_capability": 90,
        "get_raw_stream": 0, "get_device_properties": PROPERTIES,
    }.items():  # fmt: skip
        setattr(interface, name, staticmethod(lambda *_, value=value, **__: value))
    driver.set_active(Driver())
    # Constants are folded in tensors of the device.
    fold = joint_graph.UniformValueConstantFolder._deduce_value

    def deduce_value(self: Any, node: Any) -> Any:
        with OnCpu():
            return fold(self, node)

    joint_graph.UniformValueConstantFolder._deduce_value = deduce_value  # type: ignore[method-assign]
    torch._functorch.config.force_non_lazy_backward_lowering = True
    return generated_code()


def generated_code() -> list[str]:
    """A list that gets the code of every graph, which nothing then compiles or runs."""
    codes: list[str] = []
    running: list[Any] = []

    def call(arguments: Any) -> Any:
        if not running:  # and not as the first of two passes, which compiles the kernels of the second
            raise Captured

    def compile_to_module(self: Any) -> Any:
        if self.cpp_wrapper:
            running.append(self)
            try:
                code, _ = self.codegen_with_cpp_wrapper()
            finally:
                running.pop()
        else:
            code, _ = self.codegen()
        if not running:
            codes.append(code.value if hasattr(code, "value") else str(code))
        self.cache_path, self.cache_key, self.cache_linemap = None, "", []
        return SimpleNamespace(call=call, __file__=None, __path__=None, runner=None, recursively_apply_fns=None)

    def keep(graph: Any, code: str, *_: Any, **__: Any) -> Any:
        codes.append(code)
        raise Captured

    # Before C++ is written the device compiles the kernels, by a block of code or by a graph in Python.
    graph.GraphLowering.compile_to_module = graph.GraphLowering._compile_to_module = compile_to_module
    graph.defake = lambda tensor: tensor
    codecache.AotCodeCompiler.compile = keep
    wrapper.PythonWrapperCodegen.generate_and_run_autotune_block = lambda self: None

    written = cpp_wrapper_gpu.DeferredTritonCallWrapper.generate

    def generate(self: Any, wrapper: Any) -> None:
        if COMPILES_LATER and not config.triton.autotune_at_compile_time:
            written(self, wrapper)
        else:
            assert config.triton.store_cubin, "launches have kept no code of the kernels"

    cpp_wrapper_gpu.DeferredTritonCallWrapper.generate = generate

    # A backward is compiled when it first runs, and what torch.compile set for the forward is then no longer in place.
    # This one is compiled with the forward.
    names = ("cpp_wrapper", "triton.store_cubin", "triton.autotune_at_compile_time")
    plain = {name: getattr(config, name) for name in names}
    backward = compile_fx.compile_fx_backward

    def compile_fx_backward(*arguments: Any, **named: Any) -> Any:
        with config.patch(plain | SETTINGS):
            return backward(*arguments, **named)

    compile_fx.compile_fx_backward = compile_fx_backward
    return codes
