"""The generated code of calls that are compiled for an H200 which is not there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.cpp_extension import include_paths

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Generated:
    """The code of a call's graphs, forward and then backward, and what fusednorm said meanwhile."""

    codes: list[str]
    words: list[str]

    def bodies(self) -> list[str]:
        """What each graph does, without the definitions of its kernels."""
        return [code.partition("def call(")[2] for code in self.codes]

    def launches(self) -> list[list[str]]:
        """The kernels that each graph launches, in order, without the numbers that Inductor gives to them."""
        return [re.findall(r"(\w+?)(?:_\d+)?\.run\(", body) for body in self.bodies()]

    def ours(self) -> list[list[str]]:
        """Our kernels that each graph launches, in order."""
        prefix = "fusednorm_"
        return [[name.removeprefix(prefix) for name in graph if name.startswith(prefix)] for graph in self.launches()]

    def cpp_launches(self) -> list[list[str]]:
        """Our kernels that each graph launches from C++."""
        return [re.findall(r"\bcall_fusednorm_(\w+?)_\d+\(\w", code) for code in self.codes]

    def calls(self) -> list[list[str]]:
        """What each graph calls besides."""
        pattern = r"= ((?:torch\.ops|extern_kernels|aten|fusednorm)[\w.]+)\("
        return [re.findall(pattern, body) for body in self.bodies()]

    def fused(self) -> list[list[tuple[str, ...]]]:
        """How many loads, stores and reductions each of Inductor's own kernels has, graph by graph."""
        pattern = re.compile(r"'num_load': (\d+), 'num_store': (\d+), 'num_reduction': (\d+)")
        return [pattern.findall(code) for code in self.codes]

    def kernels(self) -> dict[str, str]:
        """The source of our kernels."""
        pattern = re.compile(r"async_compile\.triton\('(fusednorm\w+)', '''(.*?)'''", re.DOTALL)
        return {name: source for code in self.codes for name, source in pattern.findall(code)}


def guard(folder: Path) -> Path:
    """The library that gives torch a device of CUDA, compiled; skips where there is no compiler."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("a C++ compiler is needed to fake a GPU")
    if torch.cuda.is_available():
        pytest.skip("where there is a GPU, none is faked")
    libraries = Path(torch.__file__).parent / "lib"
    path = folder / "fake_cuda.so"
    options = ["-shared", "-fPIC", "-O0", "-std=c++20", *(f"-I{path}" for path in include_paths())]
    # In a build with CUDA torch's own device is registered first, and ours takes its place.
    own = ["-Wl,--no-as-needed", "-ltorch_cuda"] if (libraries / "libtorch_cuda.so").exists() else []
    linked = [f"-L{libraries}", *own, "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    subprocess.run([compiler, *options, HERE / "fake_cuda.cpp", "-o", path, *linked], check=True)
    return path


def generate(library: Path, *names: str, **environment: str) -> dict[str, Generated]:
    """The generated code of cases, by default of all of them, by a process of its own."""
    path = os.pathsep.join([str(HERE.parent / "src"), str(HERE)])
    done = subprocess.run(
        [sys.executable, HERE / "inductor_cases.py", library, *names],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"} | environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {name: Generated(**one) for name, one in found.items()}


@cache
def all_generated(folder: Path) -> dict[str, Generated]:
    return generate(guard(folder))
