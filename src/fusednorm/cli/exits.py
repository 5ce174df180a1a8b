"""How a command ends: the one place where exceptions become exit codes and words."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from fusednorm.bench.memory import is_out_of_memory
from fusednorm.cli.streams import UnwritableError
from fusednorm.graph.errors import GraphError
from fusednorm.text import printable

OK = 0
CHECK_FAILED = 1
UNUSABLE = 2  # wrong usage; an input, an output or a device that cannot be used; a package that is missing
DEFECT = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130  # 128 + SIGINT, as a shell says it
PIPE_CLOSED = 141  # 128 + SIGPIPE


def say(message: str) -> None:
    """Words for the person at the terminal, on stderr."""
    print(printable(message), file=sys.stderr)


def guarded(command: Callable[[], object]) -> int:
    """Runs a command, flushes its output, and returns the exit code; says on stderr what went wrong."""
    try:
        result = command()
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        return ending(error)
    return result if isinstance(result, int) else OK


def ending(error: BaseException) -> int:
    """The exit code of a command that raised; says on stderr what went wrong."""
    if isinstance(error, KeyboardInterrupt) or _is(error, "Abort"):
        return INTERRUPTED
    if isinstance(error, UnwritableError) and error.reader_gone:
        return PIPE_CLOSED  # the reader has what it wanted
    if _is(error, "ClickException"):
        return _wrong_usage(error)
    if isinstance(error, ModuleNotFoundError) and (package := _package(error)) is not None:
        say(f"Error: the command line needs {package}, which is not installed; pip install {package}")
        return UNUSABLE
    if is_out_of_memory(error):
        say(f"Error: not enough memory: {error}")
        return UNUSABLE
    if isinstance(error, (UnwritableError, GraphError, OSError)):
        say(f"Error: {error}")
        return UNUSABLE
    say("".join(traceback.format_exception(error)))
    say("This is a defect of fusednorm, not of its input; please report it with the lines above.")
    return DEFECT


def _is(error: BaseException, name: str) -> bool:
    """Whether an exception has this name in typer, or in click, from which earlier releases of typer took it."""
    return any(
        kind.__name__ == name and kind.__module__.split(".")[0] in ("click", "typer") for kind in type(error).__mro__
    )


def _wrong_usage(error: BaseException) -> int:
    message = getattr(error, "message", None)
    if isinstance(message, str):
        error.message = printable(message)  # type: ignore[attr-defined]
    error.show(file=sys.stderr)  # type: ignore[attr-defined]
    return int(getattr(error, "exit_code", UNUSABLE))


def _package(error: ModuleNotFoundError) -> str | None:
    """The package that is missing; None for a module of fusednorm, whose absence is a defect."""
    package = (error.name or "").partition(".")[0]
    return package if package not in ("", "fusednorm") else None
