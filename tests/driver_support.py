"""A CUDA driver library that launches nothing and writes down what it was asked to, for Triton's own launcher in C.

``python tests/driver_support.py FOLDER`` builds the library in the folder, makes Triton use it as the driver of a GPU
of compute capability 9.0, starts kernels by Triton's launch and the short way, and prints what reached the driver.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: The functions whose results Triton reads. All others of the driver succeed and do nothing.
ANSWERS = r"""
#include <stdio.h>
#include <string.h>
#include "cuda.h"

static char record[1 << 14];
static int sizes[64], count;
static size_t handles = 0x1000;

void fake_expect(int n, const int *given) { count = n; memcpy(sizes, given, n * sizeof(int)); record[0] = 0; }
const char *fake_record(void) { return record; }

CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)0x10; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)0x10; return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = 232448; return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)(handles += 16); return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)(handles += 16); return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0; return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer; return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "no error"; return CUDA_SUCCESS; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  char *end = record + strlen(record);
  end += sprintf(end, "{\"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %u, ", config->gridDimX,
                 config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY, config->blockDimZ,
                 config->sharedMemBytes);
  end += sprintf(end, "\"stream\": %zu, \"function\": %zu, \"attributes\": [", (size_t)config->hStream,
                 (size_t)function);
  for (unsigned i = 0; i < config->numAttrs; i++)
    end += sprintf(end, "%s[%d, %d]", i ? ", " : "", (int)config->attrs[i].id,
                   config->attrs[i].value.programmaticStreamSerializationAllowed);
  end += sprintf(end, "], \"parameters\": [");
  for (int i = 0; i < count; i++) {
    unsigned long long value = 0;
    memcpy(&value, parameters[i], sizes[i]);
    end += sprintf(end, "%s%llu", i ? ", " : "", value);
  }
  sprintf(end, "]}\n");
  return CUDA_SUCCESS;
}
"""
STREAM = 0x5000


def build(folder: Path) -> Path:
    """libcuda.so.1 with every function of the driver that Triton's sources name."""
    import triton.backends.nvidia as backend

    sources = Path(backend.__file__).parent
    text = "\n".join((sources / name).read_text() for name in ("driver.c", "driver.py"))
    named = set(re.findall(r"\bcu[A-Z]\w*(?=\()", text)) | set(re.findall(r"dlsym\(\w+, \"(cu\w+)\"", text))
    answered = set(re.findall(r"^CUresult (cu\w+)\(", ANSWERS, re.MULTILINE))
    (folder / "answers.c").write_text(ANSWERS)
    (folder / "others.c").write_text(
        "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(named - answered))
    )
    library = folder / "libcuda.so.1"
    command = ["-shared", "-fPIC", "-w", f"-I{sources / 'include'}", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run(
        [os.environ.get("CC", "gcc"), *command, str(folder / "answers.c"), str(folder / "others.c")], check=True
    )
    return library


def activate(library: Path) -> Callable[[list[int]], Callable[[], list[Any]]]:
    """Make Triton use the library; returns what starts a record of launches with parameters of so many bytes each."""
    os.environ["TRITON_LIBCUDA_PATH"] = str(library.parent)
    driver_library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    driver_library.fake_record.restype = ctypes.c_char_p
    import triton
    from triton.backends.nvidia.driver import CudaDriver

    driver = CudaDriver()
    driver.get_current_device = lambda: 0
    driver.set_current_device = lambda device: None
    driver.get_current_stream = lambda device: STREAM
    driver.get_device_capability = lambda device=0: (9, 0)
    triton.runtime.driver.set_active(driver)

    def start(sizes: list[int]) -> Callable[[], list[Any]]:
        driver_library.fake_expect(len(sizes), (ctypes.c_int * len(sizes))(*sizes))
        return lambda: [json.loads(line) for line in driver_library.fake_record().decode().splitlines()]

    return start


#: Bytes of a kernel's parameter, by its type in the signature of what Triton compiled; pointers have 8.
BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "fp32": 4, "fp64": 8}


def bits(value: Any, kind: str) -> int:
    """The bits of a parameter as an unsigned number."""
    if kind.startswith("fp"):
        return int.from_bytes(struct.pack("<d" if kind == "fp64" else "<f", value), "little")
    return int(value) & ((1 << 8 * BYTES.get(kind, 8)) - 1)


def compare(name: str, launch: Any, tensors: list[Any], record: Callable[[list[int]], Callable[[], list[Any]]]) -> Any:
    """What the driver gets of a launch on two sets of tensors, each the short way and by Triton's own launch."""
    import torch
    from triton.backends.nvidia.driver import CudaLauncher

    from fusednorm.backends.triton import launch as launches

    def tensors_like() -> list[Any]:
        return [None if one is None else torch.zeros(64, dtype=one.dtype) for one in tensors]

    def asked(call: Callable[[], Any]) -> list[Any]:
        read = record([*(BYTES.get(kind, 8) for kind in kinds.values()), 8, 8])  # and two kinds of scratch memory
        call()
        return read()

    def passed(given: list[Any]) -> list[int]:
        values = dict(zip(launch.kernel.arg_names, [*given, *launch.scalars], strict=False))
        values = {name: one.data_ptr() if isinstance(one, torch.Tensor) else one for name, one in values.items()}
        return [bits(values[name], kind) for name, kind in kinds.items()]

    compiled: list[Any] = []
    start_of = launches.start_of
    launches.start_of = lambda kernel, *rest: compiled.append(kernel) or start_of(kernel, *rest)
    record([])
    launch(*tensors_like())
    launches.start_of = start_of
    kinds = {name: kind for name, kind in compiled[0].src.signature.items() if kind != "constexpr"}
    sets, grid = (tensors_like(), tensors_like()), (launch.programs, 1, 1)
    official = CudaLauncher.__call__
    worked_out: list[Any] = []
    CudaLauncher.__call__ = lambda *arguments: worked_out.append(name) or official(*arguments)
    try:
        short = [asked(lambda given=given: launch(*given)) for given in sets]
    finally:
        CudaLauncher.__call__ = official
    own = [
        asked(lambda given=given: launch.kernel[grid](*given, *launch.scalars, **launch.constants, **launch.options))
        for given in sets
    ]
    return {
        "name": name,
        "parameters": [passed(given) for given in sets],
        "programs": launch.programs,
        "warps": launch.options["num_warps"],
        "dependent": launch.options.get("launch_pdl", False),
        "short": short,
        "triton's": own,
        "worked out again": worked_out,
        "kept": len(launch.starts),
    }


def main(folder: Path) -> None:
    record = activate(build(folder))
    from triton_support import TILES, Case, capabilities, operations

    from fusednorm.backends.triton import launch as launches

    launches.current_raw_stream = lambda device: STREAM
    cases = [Case("group_norm", 8, (2, 24, 33, 31), activation="silu", modulated=True, instance=TILES)]
    cases.append(Case("layer_norm", 1, (4096, 1024)))
    able = capabilities("sm_90")
    early, late = operations(able, cases), operations(able._replace(overlaps=False), cases[1:])
    made = [each for operation in (*early, *late) for each in operation]
    print(json.dumps([compare(each.kernel, each.launch, list(each.tensors), record) for each in made]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
