"""The command `ddpopt`. Each command imports what it needs when it runs, so that `ddpopt --help` is quick."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Less time lost to exchanging gradients in data-parallel training."""


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(help="Record files (*.jsonl), or directories that hold some.")],
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare two paths, before and after, instead of showing them together.")
    ] = False,
    markdown: Annotated[Path | None, typer.Option(help="Also write the tables to this file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Also draw throughput by rung, and by bucket capacity.")] = None,
) -> None:
    """Show the records of finished runs as tables: step times beside stock ddp's and a single device's."""
    from rich.console import Console

    from lightning_ddpopt.records import read_records
    from lightning_ddpopt.report.comparison import compare as compared
    from lightning_ddpopt.report.summary import sections
    from lightning_ddpopt.report.tables import comparison_table, tables

    if compare and len(paths) != 2:
        raise typer.BadParameter(f"--compare takes two paths, before and after; got {len(paths)}.")
    if compare and png is not None:
        raise typer.BadParameter("--png draws one set of records; leave out --compare.")
    try:
        sets = [read_records([path]) for path in paths] if compare else [read_records(paths)]
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from error
    for path, records in zip(paths, sets, strict=False):
        if not records:
            raise typer.BadParameter(f"no records in {path if compare else ', '.join(map(str, paths))}.")

    if compare:
        shown = [comparison_table(section) for section in compared(*sets)]
        if not shown:
            raise typer.BadParameter("the two sets have no workload in common (model, precision, measure).")
    else:
        found = sections(sets[0])
        shown = [table for section in found for table in tables(section)]
        if png is not None:
            from lightning_ddpopt.report.plots import save

            save(found, png)
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a file or a pipe has no width to keep to
    for table in shown:
        console.print(table)
    if markdown is not None:
        markdown.write_text("\n".join(table.markdown() for table in shown), encoding="utf-8")


if __name__ == "__main__":
    app()
