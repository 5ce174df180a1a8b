"""The standard streams of a process, whatever it was started with: closed, full, broken or of a narrow encoding.

Data goes to stdout, and a command whose stdout cannot be written ends with :class:`UnwritableError`. Words go to
stderr, and are dropped where nobody can read them.
"""

from __future__ import annotations

import io
import logging
import os
import sys

STDOUT = "stdout"


class UnwritableError(Exception):
    """A result has nowhere to go: stdout, or a file that was asked for, cannot be written."""

    def __init__(self, where: str, error: OSError) -> None:
        super().__init__(f"{where} cannot be written: {error.strerror or error}")
        self.reader_gone = where == STDOUT and isinstance(error, BrokenPipeError)


class _Data(io.TextIOWrapper):
    """stdout; it raises no OSError, which typer and rich would turn into an exit code of their own."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            _discard(self)
            raise UnwritableError(STDOUT, error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            _discard(self)
            raise UnwritableError(STDOUT, error) from None


class _Words(io.TextIOWrapper):
    """stderr; a message that cannot be written changes nothing."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            _discard(self)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            _discard(self)


def _discard(stream: io.TextIOWrapper) -> None:
    """Send all that a stream holds, or is given later, to the null device: the interpreter flushes it once more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def install() -> bool:
    """Puts the streams of this process in order; False where stdout was closed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file opened would take its number, and all that is printed
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this
    present = sys.stdout is not None
    if sys.stdin is None:
        sys.stdin = _null("r")
    sys.stdout = _rewrapped(sys.stdout, _Data)
    before, sys.stderr = sys.stderr, _rewrapped(sys.stderr, _Words)
    _move_logs(before, sys.stderr)
    return present


def _move_logs(before: object, words: io.TextIOWrapper) -> None:
    """Hand the new stderr to the handlers that log to the detached one; torch made its own when it was imported."""
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                handler.stream = words  # setStream would flush the detached one


def _null(mode: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(open(os.devnull, mode + "b"), encoding="utf-8")


def _rewrapped(stream: object, kind: type[io.TextIOWrapper]) -> io.TextIOWrapper:
    """The same stream, as line-buffered as before; characters that its encoding lacks are written as escapes."""
    if not isinstance(stream, io.TextIOWrapper):
        stream = _null("w")
    encoding, line_buffering = stream.encoding, stream.line_buffering
    return kind(stream.detach(), encoding, "backslashreplace", line_buffering=line_buffering)
