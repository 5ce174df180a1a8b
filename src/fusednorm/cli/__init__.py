"""The command line: profile, tune, bench, report, verify, run and doctor.

:mod:`fusednorm.cli.exits` turns an exception of a command into an exit code. The commands are imported at the first
use, so that it answers a missing package too.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

_MODULES = (
    "bench",
    "commands",
    "doctor",
    "exits",
    "models",
    "output",
    "profile",
    "report",
    "run",
    "streams",
    "tune",
    "verify",
)


def main() -> None:
    """The entry point of the ``fusednorm`` script."""
    from fusednorm.cli import exits, streams

    if not streams.install():
        exits.say("Error: stdout is closed; to run without output, redirect it to /dev/null")
        sys.exit(exits.UNUSABLE)

    def run() -> object:
        from fusednorm.cli.commands import app

        return app()

    sys.exit(exits.guarded(run))


def __getattr__(name: str) -> Any:
    if name == "app":
        from fusednorm.cli.commands import app

        return app
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
