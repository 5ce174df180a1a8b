"""A CUDA driver library that launches nothing and writes down what it was asked to, for Triton's own launcher in C.

``python tests/driver_support.py FOLDER`` builds the library in the folder, makes Triton use it as the driver of a GPU
of compute capability 9.0, starts kernels by Triton's launch and the short way, and prints what reached the driver.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
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


def compare(name: str, launch: Any, tensors: list[Any], record: Callable[[list[int]], Callable[[], list[Any]]]) -> Any:
    """What the driver gets by a launch's first call, by its second on other tensors, and by Triton's launch on them."""
    import torch
    from triton.backends.nvidia.driver import CudaLauncher

    def tensors_like() -> list[Any]:
        return [None if one is None else torch.zeros(64, dtype=one.dtype) for one in tensors]

    def asked(call: Callable[[], Any]) -> list[Any]:
        sizes = [8] * sum(one is not None for one in tensors) + [4] * sum(one != 1 for one in launch.scalars)
        read = record([*sizes, 8, 8])  # the scratch memory of the kernel and of a profiler
        call()
        return read()

    one, other = tensors_like(), tensors_like()
    first = asked(lambda: launch(*one))
    official = CudaLauncher.__call__
    worked_out: list[Any] = []
    CudaLauncher.__call__ = lambda *arguments: worked_out.append(name) or official(*arguments)
    try:
        second = asked(lambda: launch(*other))
    finally:
        CudaLauncher.__call__ = official
    grid = (launch.programs, 1, 1)
    own = asked(lambda: launch.kernel[grid](*other, *launch.scalars, **launch.constants, **launch.options))
    return {
        "name": name,
        "addresses": [[one.data_ptr() for one in given if one is not None] for given in (one, other)],
        "scalars": [one for one in launch.scalars if one != 1],
        "programs": launch.programs,
        "warps": launch.options["num_warps"],
        "dependent": launch.options.get("launch_pdl", False),
        "first": first,
        "second": second,
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
    made = [each for operation in operations(capabilities("sm_90"), cases) for each in operation]
    print(json.dumps([compare(each.kernel, each.launch, list(each.tensors), record) for each in made]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
