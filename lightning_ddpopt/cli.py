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
    for file in (markdown, png):
        if file is not None and not file.absolute().parent.is_dir():
            raise typer.BadParameter(f"{file}: its folder does not exist.")
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


@app.command()
def verdict(
    path: Annotated[Path, typer.Argument(help="ddpopt_verdict.json, which a tuned run leaves among its files.")],
    png: Annotated[Path | None, typer.Option(help="Also draw a step by default and as tuned.")] = None,
) -> None:
    """Show what the tuner tried, and what it kept and why."""
    from rich.console import Console

    from lightning_ddpopt.report.verdict_page import draw, trials_table
    from lightning_ddpopt.tuning.verdict import Verdict

    if png is not None and not png.absolute().parent.is_dir():
        raise typer.BadParameter(f"{png}: its folder does not exist.")
    try:
        found = Verdict.load(path)
        if png is not None:
            draw(found, png)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(trials_table(found))


@app.command()
def analyze(
    reports: Annotated[
        list[Path],
        typer.Argument(help="Traces of one run, one a rank: .nsys-rep, .sqlite, .json, .json.gz; or a directory."),
    ],
    baseline: Annotated[
        list[Path] | None, typer.Option(help="A trace, or a directory of some, of the run before; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page that needs no network to this file.")] = None,
) -> None:
    """Show where a step's time goes, from traces of nsys or torch.profiler, and what to change."""
    try:
        import pandas  # noqa: F401
    except ModuleNotFoundError as error:
        raise typer.BadParameter("this needs pandas: pip install 'lightning_ddpopt[profile]'.") from error
    import json

    from rich.console import Console

    from lightning_ddpopt.profiling.analysis import analyze as analyzed
    from lightning_ddpopt.profiling.findings import as_dict, findings
    from lightning_ddpopt.profiling.tables import before_after_table, findings_text, tables
    from lightning_ddpopt.profiling.traces import TraceError, load

    if html is not None and not html.parent.is_dir():
        raise typer.BadParameter(f"--html {html}: there is no folder {html.parent}.")
    try:
        after = analyzed(load(reports))
        before = analyzed(load(baseline)) if baseline else None
    except TraceError as error:
        raise typer.BadParameter(str(error)) from error
    if html is not None:
        from lightning_ddpopt.profiling.page import page

        html.write_text(page(after, before), encoding="utf-8")
    if as_json:
        made = as_dict(after) | ({"baseline": as_dict(before)} if before is not None else {})
        typer.echo(json.dumps(made, indent=2, allow_nan=False))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a file or a pipe has no width to keep to
    for table in tables(after):
        console.print(table)
    console.print(findings_text(findings(after)))
    if before is not None:
        console.print(before_after_table(before, after))


@app.command(context_settings={"allow_interspersed_args": False})
def nsys(
    program: Annotated[list[str], typer.Argument(help="After `--`: the program and its arguments, as train.py ARGS.")],
    nproc: Annotated[int | None, typer.Option(help="Ranks; else one per GPU, without a GPU one.")] = None,
    output: Annotated[str, typer.Option(help="Beginning of the reports' names; _rank_N is added.")] = "ddpopt",
    trace: Annotated[
        str | None, typer.Option(help="nsys's --trace; else cuda,nvtx, and nccl where it is known.")
    ] = None,
    warmup_steps: Annotated[int, typer.Option(help="Optimizer steps before those that are recorded.")] = 10,
    profile_steps: Annotated[int, typer.Option(help="Optimizer steps that are recorded.")] = 3,
    nccl_debug: Annotated[str | None, typer.Option(help="Keep NCCL's log at this level, as INFO.")] = None,
    profiler: Annotated[str, typer.Option(help="nsys; or torch, which needs no nsys and works on a CPU.")] = "nsys",
) -> None:
    """Run a program under torchrun, every rank with a profiler of its own: a report a rank."""
    import shlex

    import torch
    from rich.console import Console

    from lightning_ddpopt.machine.transport import transports_in
    from lightning_ddpopt.profiling import nsys as runner

    if profiler not in ("nsys", "torch"):
        raise typer.BadParameter(f"--profiler {profiler}: must be nsys or torch.")
    gpus, console = torch.cuda.device_count(), Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        profile = runner.Profile(
            program=tuple(program),
            nproc=max(1, gpus) if nproc is None else nproc,
            output=output,
            trace=trace,
            warmup_steps=warmup_steps,
            profile_steps=profile_steps,
            nccl_debug=nccl_debug,
            uses_cuda=gpus > 0,
        )
        path = runner.find_nsys() if profiler == "nsys" else None
        of = runner.nsys_version(path) if path is not None else (0, 0)
        warning = runner.too_old(of, runner.release(torch.version.cuda)) if path is not None and gpus else None
        if warning is not None:
            console.print(f"[yellow]{warning}[/]")
        reports = runner.run(profile, profiler, path, of)
    except runner.NsysError as error:
        console.print(f"[red]ddpopt nsys:[/] {error}")
        raise typer.Exit(1) from error
    if nccl_debug is not None:
        logs = "".join(log.read_text(errors="replace") for log in profile.nccl_logs())
        console.print(f"transport: {', '.join(transports_in(logs)) or 'none that NCCL tells'}")
    console.print("Reports:", *reports, sep="\n  ")
    console.print(f"Next: ddpopt analyze {shlex.join(reports)}")


if __name__ == "__main__":
    app()
