"""Models of other packages, as their packages build them and after ``fusednorm.convert_(model)``: time, memory, error.

    python benchmarks/packages.py --output benchmarks/results/packages-cpu.json

Each model runs eagerly and under torch.compile's default mode. Architectures have their real sizes and random weights,
and each run has a process of its own. "peak MB" is what a step needs beyond what the process holds between steps;
"once" is what the first step leaves there: libraries, compilers and compiled code. Compiled kernels of fusednorm come
from its cache on disk where they are there, code of torch.compile from none.

The error is the length of the difference to the unconverted eager model in float64, as a part of the result's length.
The converted model's may be twice the unconverted one's in the same mode, and in a training step 0.005 more: where a
rounding switches one ReLU on or off, a gradient moves by a part of a thousand. A package that is not installed, and a
model that torch.compile itself cannot take, are named and left out. It ends with exit code 1 if a converted model is
wrong.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import shlex
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor, nn

import fusednorm
from fusednorm.backends.cpu.memory import empty_cache
from fusednorm.bench.models.measuring import FACTOR, ROUNDINGS, relative_error
from fusednorm.bench.provenance import this_machine
from fusednorm.bench.runner import first_line
from fusednorm.bench.tables import Table, in_ms, in_times
from fusednorm.private.torch_names import fresh_compiler_cache

Inputs = tuple[Any, ...]
TRAINING, INFERENCE = "training step", "inference"
#: What errors may have beyond a multiple of the unconverted model's.
FLOOR = {TRAINING: 5e-3, INFERENCE: ROUNDINGS * torch.finfo(torch.float32).eps}


class Mode(StrEnum):
    EAGER = "eager"
    COMPILED = "compiled"


@dataclass(frozen=True)
class Model:
    """A model of a package, its inputs, and whether a training step is measured or a forward."""

    package: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    training: bool


def _images(*shape: int) -> Callable[[], Inputs]:
    return lambda: (torch.randn(*shape),)


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, **options)
        return model

    return build


def _torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
        return model

    return build


def _unet() -> nn.Module:
    """Stable Diffusion 1.5's."""
    from diffusers import UNet2DConditionModel

    model: nn.Module = UNet2DConditionModel(cross_attention_dim=768)
    return model


def _vae() -> nn.Module:
    """The decoder of Stable Diffusion's."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(
        block_out_channels=(128, 256, 512, 512), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=4, layers_per_block=2,
    )  # fmt: skip
    decoder: nn.Module = vae.decoder
    return decoder


def _dynunet() -> nn.Module:
    from monai.networks.nets import DynUNet

    model: nn.Module = DynUNet(3, 1, 2, (3,) * 5, (1, 2, 2, 2, 2), (2,) * 4, filters=(32, 64, 128, 256, 320))
    return model


def _swin_unetr() -> nn.Module:
    from monai.networks.nets import SwinUNETR

    model: nn.Module = SwinUNETR(1, 2, feature_size=24)
    return model


def _rcnn_head() -> nn.Module:
    """The box head of Faster R-CNN with normalized convolutions, on the features of 64 proposals."""
    from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead

    head: nn.Module = FastRCNNConvFCHead((256, 7, 7), [256] * 4, [1024], norm_layer=nn.BatchNorm2d)
    return head


MODELS: dict[str, Model] = {
    "UNet2DConditionModel": Model(
        "diffusers", _unet, lambda: (torch.randn(1, 4, 32, 32), torch.tensor([10]), torch.randn(1, 77, 768)), False
    ),
    "AutoencoderKL's decoder": Model("diffusers", _vae, _images(1, 4, 32, 32), False),
    "resnet50_gn": Model("timm", _timm("resnet50_gn"), _images(4, 3, 224, 224), True),
    "convnext_tiny": Model("timm", _timm("convnext_tiny"), _images(4, 3, 224, 224), True),
    "vit_base_patch16_224": Model("timm", _timm("vit_base_patch16_224"), _images(4, 3, 224, 224), True),
    "DynUNet": Model("monai", _dynunet, _images(1, 1, 64, 64, 64), True),
    "SwinUNETR": Model("monai", _swin_unetr, _images(1, 1, 64, 64, 64), True),
    "resnet50": Model("torchvision", _torchvision("resnet50"), _images(4, 3, 224, 224), True),
    "Faster R-CNN's box head": Model("torchvision", _rcnn_head, _images(64, 256, 7, 7), True),
}


@dataclass(frozen=True)
class Measured:
    """The least time of a step, the memory that a step needs and that the first one leaves, and convert_'s report."""

    ms: float
    peak_mb: float
    once_mb: float
    results: list[Tensor]
    report: str = ""


def output_of(result: Any) -> Tensor:
    found: Tensor = result if isinstance(result, Tensor) else result[0]
    return found


def step(network: nn.Module, inputs: Inputs, training: bool) -> list[Tensor]:
    """The output, or the gradients of all parameters."""
    if not training:
        with torch.inference_mode():
            return [output_of(network(*inputs))]
    network.zero_grad()
    output = output_of(network(*inputs))
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device)
    (output.flatten() * weights).sum().backward()
    return [parameter.grad for parameter in network.parameters() if parameter.grad is not None]


def placed(value: Any, device: str, dtype: torch.dtype) -> Any:
    return value.to(device, dtype if value.is_floating_point() else value.dtype)


def measure(name: str, mode: Mode, convert: bool, device: str, dtype: torch.dtype, runs: int, threads: int) -> Measured:
    """Build, convert and run a model; for a process of its own."""
    if threads:
        torch.set_num_threads(threads)
    model = MODELS[name]
    torch.manual_seed(0)
    network = model.build().train(model.training)
    for module in network.modules():
        if "Drop" in type(module).__name__:
            module.eval()
    inputs = model.inputs()
    report = str(fusednorm.convert_(network)) if convert else ""
    network = network.to(device, dtype)
    inputs = tuple(placed(one, device, dtype) for one in inputs)
    called = torch.compile(network) if mode is Mode.COMPILED else network
    before = _held(device)
    with fresh_compiler_cache() if mode is Mode.COMPILED else nullcontext():
        step(called, inputs, model.training)  # compiles or loads kernels
    network.zero_grad()
    between = _held(device)
    _forget_peak(device)
    seconds, results = [], []
    for _ in range(runs):
        results.clear()
        begin = time.perf_counter()
        results += step(called, inputs, model.training)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = _peak(device)
    results = [one.detach().to("cpu", torch.float64 if dtype == torch.float64 else torch.float32) for one in results]
    return Measured(1e3 * min(seconds), peak - between, between - before, results, report)


def _held(device: str) -> float:
    """MB in use, without what allocators keep for later."""
    gc.collect()
    if device == "cuda":
        return torch.cuda.memory_allocated() / 1e6
    empty_cache()
    ctypes.CDLL(None).malloc_trim(0)
    return _memory("VmRSS")


def _memory(what: str) -> float:
    """MB of the process, of those that Linux counts."""
    status = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in status if line.startswith(f"{what}:"))
    return int(kilobytes) * 1024 / 1e6


def _forget_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _peak(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    return _memory("VmHWM")


@dataclass(frozen=True)
class Row:
    """One model in one mode: time, memory and error before and after conversion, and what was converted."""

    model: str
    package: str
    direction: str
    mode: str
    dtype: str
    ms_before: float
    ms_after: float
    peak_mb_before: float
    peak_mb_after: float
    once_mb_before: float
    once_mb_after: float
    error_before: float
    error_after: float
    converted: str

    @property
    def right(self) -> bool:
        return self.error_after <= FACTOR * self.error_before + FLOOR[self.direction]


def in_a_process(*arguments: Any) -> Measured:
    """:func:`measure` in a process that has measured nothing before."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, *arguments).result()


def fastest(measured: list[Measured]) -> Measured:
    """The last of several measurements, with the least time of all."""
    return replace(measured[-1], ms=min(one.ms for one in measured))


def run(name: str, modes: list[Mode], device: str, runs: int, rounds: int, threads: int, console: Console) -> list[Row]:
    """The rows of a model, one for each mode that torch.compile can take. The model before and after takes turns, since
    a machine is faster at one time than at another."""
    model = MODELS[name]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    expected = in_a_process(name, Mode.EAGER, False, "cpu", torch.float64, 1, threads).results
    rows = []
    for mode in modes:
        measured: dict[bool, list[Measured]] = {False: [], True: []}
        try:
            for convert in rounds * (False, True):
                measured[convert].append(in_a_process(name, mode, convert, device, dtype, runs, threads))
        except Exception as error:  # whatever torch.compile raises
            if mode is Mode.EAGER or measured[False]:
                raise
            console.print(f"{name}: torch.compile cannot take it: {first_line(error)}")
            continue
        plain, ours = fastest(measured[False]), fastest(measured[True])
        errors = [relative_error([one.double() for one in each.results], expected) for each in (plain, ours)]
        row = Row(
            name, model.package, TRAINING if model.training else INFERENCE, mode, str(dtype).removeprefix("torch."),
            plain.ms, ours.ms, plain.peak_mb, ours.peak_mb, plain.once_mb, ours.once_mb, *errors,
            ours.report.splitlines()[0],
        )  # fmt: skip
        if not rows:
            print(f"{name}\n{ours.report}\n")
        console.print(f"{name}, {mode}: {row.ms_before:.1f} ms before, {row.ms_after:.1f} after")
        rows.append(row)
    return rows


def table_of(rows: list[Row], title: str) -> Table:
    words = ("model", "package", "direction", "mode", "dtype", "converted")
    lines = tuple(
        (
            row.model, row.package, row.direction, row.mode, row.dtype, in_ms(row.ms_before), in_ms(row.ms_after),
            in_times(row.ms_before / row.ms_after), f"{row.peak_mb_before:.0f}", f"{row.peak_mb_after:.0f}",
            f"{row.once_mb_before:.0f}", f"{row.once_mb_after:.0f}", f"{row.error_before:.1e}",
            f"{row.error_after:.1e}", row.converted,
        )
        for row in rows
    )  # fmt: skip
    header = (
        *words[:5], "ms before", "after", "ratio", "peak MB before", "after", "once MB before", "after",
        "error before", "after", words[5],
    )  # fmt: skip
    return Table(title, header, lines, words)


def main(
    match: Annotated[str, typer.Option(help="Only models whose name contains this.")] = "",
    mode: Annotated[list[Mode] | None, typer.Option(help="Repeatable; both by default.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Steps of each model in a round; the fastest of all counts.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Processes for each model before, and after.")] = 2,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where torch has one.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves torch's choice.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write JSON to this file.")] = None,
) -> None:
    """Measure models of other packages before and after convert_."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    console = Console()
    rows: list[Row] = []
    for name, model in MODELS.items():
        if match not in name:
            continue
        if find_spec(model.package) is None:
            console.print(f"{name}: {model.package} is not installed")
            continue
        rows += run(name, mode or list(Mode), device, runs, rounds, threads, console)
        if output is not None:
            command = shlex.join(["python", "benchmarks/packages.py", *sys.argv[1:]])
            machine = replace(this_machine(device, ""), command=command)
            output.write_text(json.dumps({"machine": asdict(machine), "rows": [asdict(one) for one in rows]}, indent=1))
    print(table_of(rows, "").to_markdown())
    if not all(row.right for row in rows):
        console.print("FAILED: " + ", ".join(f"{row.model} {row.mode}" for row in rows if not row.right))
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
