"""What an installed wheel has to do; `make dist` runs this outside of the sources, by the environment's own Python.

It needs nothing but what the wheel requires. The first failure ends it.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

import torch
import torch.nn.functional as F

import fusednorm


def check_where() -> None:
    assert Path(fusednorm.__file__).is_relative_to(sysconfig.get_path("purelib")), fusednorm.__file__


def check_metadata() -> None:
    found = distribution("fusednorm")
    assert found.version == fusednorm.__version__
    assert found.metadata["License-Expression"] == "Apache-2.0"
    assert found.metadata["Description-Content-Type"] == "text/markdown"
    licences = found.metadata.get_all("License-File")
    assert licences == ["LICENSE"]
    assert "Apache License" in (found.read_text("licenses/LICENSE") or "")
    assert "Typing :: Typed" in found.metadata.get_all("Classifier")
    assert files("fusednorm").joinpath("py.typed").is_file()


def check_calls() -> None:
    """Each family on the CPU, forward and backward, against torch."""
    x, weight, bias = torch.randn(4, 8, 5, 6), torch.randn(8), torch.randn(8)
    row = torch.randn(6)
    calls = {
        "group_norm": (lambda x: fusednorm.group_norm(x, 4, weight, bias), lambda x: F.group_norm(x, 4, weight, bias)),
        "instance_norm": (fusednorm.instance_norm, F.instance_norm),
        "layer_norm": (lambda x: fusednorm.layer_norm(x, (6,), row), lambda x: F.layer_norm(x, (6,), row)),
        "rms_norm": (lambda x: fusednorm.rms_norm(x, (6,), row), lambda x: F.rms_norm(x, (6,), row)),
        "batch_norm": (
            lambda x: fusednorm.batch_norm(x, None, None, training=True),
            lambda x: F.batch_norm(x, None, None, training=True),
        ),
    }
    for ours, theirs in calls.values():
        results = []
        for call in (ours, theirs):
            leaf = x.clone().requires_grad_()
            y = call(leaf)
            y.square().mul(leaf.detach()).sum().backward()
            results.append((y.detach(), leaf.grad))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    found = fusednorm.instances(fusednorm.group_norm, x, 4)
    assert any(each.reason is None and each.instance.name.startswith("cpu.") for each in found), found


def check_commands() -> None:
    command = Path(sys.executable).parent / "fusednorm"
    version = subprocess.run([command, "--version"], check=True, capture_output=True, text=True).stdout
    assert fusednorm.__version__ in version, version
    doctor = subprocess.run([command, "doctor"], check=True, capture_output=True, text=True).stdout
    assert "cpu" in doctor, doctor


if __name__ == "__main__":
    for check in (check_where, check_metadata, check_calls, check_commands):
        check()
        print(f"{check.__name__}: passed")
