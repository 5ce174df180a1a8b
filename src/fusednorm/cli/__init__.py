"""The command line: profile, bench, report, verify, run and doctor."""

from __future__ import annotations

import typer

from fusednorm.cli import bench, doctor, profile, report, run, verify

app = typer.Typer(
    name="fusednorm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fused normalizations: measure them, verify them, look at this machine. "
    "Exit codes: 0 right, 1 a check failed, 2 wrong usage.",
)
for command in (profile.profile, bench.bench, report.report, verify.verify, run.run, doctor.doctor):
    app.command()(command)


def main() -> None:
    """The entry point of the ``fusednorm`` script."""
    app()
