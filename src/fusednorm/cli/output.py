"""Shared by the commands: data to stdout, words to stderr, and the reading of arguments."""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TextIO

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable
from rich.text import Text

from fusednorm.bench.tables import Table
from fusednorm.cli.exits import CHECK_FAILED as CHECK_FAILED
from fusednorm.cli.exits import say as say
from fusednorm.cli.streams import UnwritableError
from fusednorm.machine.description import DeviceChoice, available_cores, name_of, resolve_device
from fusednorm.problem import DTYPE_BYTES
from fusednorm.text import printable

DeviceOption = Annotated[DeviceChoice, typer.Option(help="auto is the GPU where torch has one, the CPU otherwise.")]
# A pipe has no width; a table must not be cut to rich's 80 columns there.
_PIPE_WIDTH = 240
_DTYPE_ALIASES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}


class _Page(StringIO):
    """Text on its way to a stream, with the stream's encoding: rich draws plainer lines where that is narrow."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding


def _width(stream: TextIO) -> int:
    return shutil.get_terminal_size().columns if stream.isatty() else _PIPE_WIDTH


def emit(text: str) -> None:
    """Data on stdout, in lines."""
    print(printable(text, keep="\n\t"))


def print_table(table: Table, to_stderr: bool = False) -> None:
    """A table of words and right-aligned numbers."""
    stream = sys.stderr if to_stderr else sys.stdout
    page = _Page(stream.encoding or "utf-8")
    rich = RichTable(title=_cell(table.title), title_justify="left", box=box.SIMPLE_HEAD)
    for name in table.header:
        words = name in table.words
        rich.add_column(name, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for line in table.lines:
        rich.add_row(*map(_cell, line))
    Console(file=page, width=_width(stream), force_terminal=stream.isatty(), highlight=False).print(rich)
    stream.write(page.getvalue())
    stream.flush()


def _cell(text: str) -> Text:
    """Text that is neither markup nor commands to the terminal."""
    return Text(printable(text))


def print_json(value: Any) -> None:
    """JSON on stdout, with nothing else."""
    print(json.dumps(value, indent=1))


class Destination:
    """Where a file that was asked for goes, "-" being stdout.

    It is opened before the work, so that a place that cannot be written is reported first. A file that is already there
    keeps its content until :meth:`write`, and a new one is removed if nothing is written.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._new = False

    def __enter__(self) -> Destination:
        if self.path != "-":
            try:
                Path(self.path).parent.mkdir(parents=True, exist_ok=True)
                self._new = not os.path.lexists(self.path)
                # Without O_NONBLOCK the open of a pipe would wait for a reader.
                descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
                os.set_blocking(descriptor, True)
                self._file = os.fdopen(descriptor, "wb")
            except ValueError as error:  # a null byte, which no name of a file has
                raise typer.BadParameter(f"{self.path!r} is no path: {error}") from None
            except OSError as error:
                raise UnwritableError(self.path, error) from None
        return self

    def write(self, content: str | bytes) -> None:
        """The whole content, in place of what an earlier call wrote; text in UTF-8."""
        if self._file is None:
            assert isinstance(content, str)
            print(content.rstrip("\n"))
            return
        try:
            if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                self._file.seek(0)
                self._file.truncate()
            self._file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
            self._file.flush()
        except OSError as error:
            raise UnwritableError(self.path, error) from None
        self._new = False

    def __exit__(self, *_: object) -> None:
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as error:
            raise UnwritableError(self.path, error) from None
        finally:
            if self._new:
                os.unlink(self.path)


@contextmanager
def destinations(*paths: str | Path | None) -> Iterator[list[Destination | None]]:
    """A destination for each path, None for no path; the same path twice, stdout included, is a usage error."""
    given = [str(path) for path in paths if path]
    twice = sorted({path for path in given if given.count(path) > 1})
    if twice:
        name = "stdout" if twice[0] == "-" else twice[0]
        raise typer.BadParameter(f"{name} can take one result; give each a place of its own")
    with ExitStack() as stack:
        yield [stack.enter_context(Destination(str(path))) if path else None for path in paths]


@contextmanager
def progress(total: int) -> Iterator[Any]:
    """A progress bar on stderr; yields a function that shows a message and, with advance=True, moves the bar."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(file=sys.stderr, width=_width(sys.stderr), highlight=False)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)

        def show(message: str = "", advance: bool = False) -> None:
            bar.update(task, description=printable(message, keep=""), advance=int(advance))

        yield show


class TimeLimit:
    """Says which jobs start too late: none starts after so many seconds from now, or any where there is no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._last = math.inf if seconds is None else time.monotonic() + seconds

    def half_left(self) -> float | None:
        """Half of the seconds that are left, which compiling ahead may take."""
        return None if self._seconds is None else max(0.0, self._last - time.monotonic()) / 2

    def leaves_out(self, job: str) -> bool:
        over = time.monotonic() > self._last
        if over:
            say(f"not measured, as {self._seconds:g} s are over: {job}")
        return over


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
    """Sets torch's number of threads, which everything obeys; 0 leaves it as it is."""
    most = max(64, 4 * available_cores())
    if threads > most:  # OpenMP ends the process if the system refuses it a thread
        raise typer.BadParameter(f"threads: {threads} is more than {most}, which is enough for this machine")
    if threads:
        torch.set_num_threads(threads)


def finite(value: float) -> float:
    """The callback of an option that takes a number: neither nan nor infinite."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number")
    return value


def not_empty(context: typer.Context, option: typer.CallbackParam, value: str) -> str:
    """The callback of an option that means something by default: an empty value, such as a shell's unset variable, is
    an error and not that."""
    source = context.get_parameter_source(option.name or "")
    if not value.strip() and (source is None or source.name != "DEFAULT"):
        raise typer.BadParameter("the value is empty; leave the option out for its default")
    return value


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turns a ValueError about the arguments into a usage error, exit code 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
