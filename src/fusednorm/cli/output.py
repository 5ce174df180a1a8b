"""What the commands share: data to stdout, words to stderr, and the reading of arguments."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from fusednorm.bench.machine import DeviceChoice, name_of, resolve_device
from fusednorm.bench.summary import Table
from fusednorm.problem import DTYPE_BYTES

CHECK_FAILED = 1
DeviceOption = Annotated[DeviceChoice, typer.Option(help="auto is the GPU where torch has one, the CPU otherwise.")]
# A pipe has no width; a table must not be cut to rich's 80 columns there.
_PIPE_WIDTH = 240
_DTYPE_ALIASES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}


def console(to_stderr: bool = False) -> Console:
    """A console on stdout for data, or on stderr for words."""
    stream = sys.stderr if to_stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH, highlight=False)


def say(message: str) -> None:
    """Words for the person at the terminal."""
    console(to_stderr=True).print(message, markup=False)


def print_table(table: Table, to_stderr: bool = False) -> None:
    """A table of words and right-aligned numbers."""
    rich = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in table.header:
        words = name in table.words
        rich.add_column(name, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for line in table.lines:
        rich.add_row(*(cell.replace("[", r"\[") for cell in line))
    console(to_stderr).print(rich)


def print_json(value: Any) -> None:
    """JSON on stdout, with nothing else."""
    typer.echo(json.dumps(value, indent=1))


def write_text(path: str, text: str) -> None:
    """Writes a file, or stdout for "-"."""
    if path == "-":
        typer.echo(text.rstrip("\n"))
    else:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)


@contextmanager
def progress(total: int) -> Iterator[Any]:
    """A progress bar on stderr; yields a function that shows a message and, with advance=True, moves the bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(to_stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)

        def show(message: str = "", advance: bool = False) -> None:
            bar.update(task, description=message, advance=int(advance))

        yield show


def parse_shape(text: str) -> tuple[int, ...]:
    """Sizes from "2,320,64,64" or "2x320x64x64"."""
    try:
        return tuple(int(size) for size in text.replace("x", ",").split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of sizes; write them as 2,320,64,64") from None


def parse_dtype(text: str) -> str:
    """A dtype's name from itself or a short form such as bf16."""
    name = _DTYPE_ALIASES.get(text, text)
    if name not in DTYPE_BYTES:
        known = ", ".join([*DTYPE_BYTES, *_DTYPE_ALIASES])
        raise typer.BadParameter(f"{text!r} is unknown; expected one of {known}")
    return name


def chosen_device(choice: DeviceChoice) -> str:
    """The device type of an option, named on stderr, since auto depends on the machine; a usage error if missing."""
    with usage_errors():
        device = resolve_device(choice)
    say(f"on {name_of(device)} ({device})")
    return device


def set_threads(threads: int) -> None:
    """torch's number of threads, which everything obeys; 0 leaves it as it is."""
    if threads:
        torch.set_num_threads(threads)


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turns a ValueError about the arguments into a usage error, exit code 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
