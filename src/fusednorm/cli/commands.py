"""The application: every command, under one guard."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import fusednorm
from fusednorm.cli import bench, doctor, exits, output, profile, report, run, tune, verify


class _Guarded(TyperGroup):
    """Commands whose exceptions end in :func:`fusednorm.cli.exits.guarded`, in a process as in a test's runner."""

    def main(self, *args: Any, **options: Any) -> Any:
        ends_here = options.get("standalone_mode", True)
        options["standalone_mode"] = False

        def command() -> object:
            return super(_Guarded, self).main(*args, **options)

        if not ends_here:
            return command()
        sys.exit(exits.guarded(command))


app = typer.Typer(
    name="fusednorm",
    cls=_Guarded,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fused normalizations: measure them, verify them, look at this machine. "
    "Exit codes: 0 right, 1 a check failed, 2 wrong usage or an input or output that cannot be used, "
    "70 a defect of fusednorm, 130 interrupted, 141 the reader of the output is gone.",
)


def _version(wanted: bool) -> None:
    if wanted:
        output.emit(f"fusednorm {fusednorm.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """The options before a command."""


for command in (profile.profile, tune.tune, bench.bench, report.report, verify.verify, run.run, doctor.doctor):
    app.command()(command)
