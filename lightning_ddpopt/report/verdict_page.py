"""A verdict of the tuner, as a table and as a picture of one step by default and as tuned."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from lightning_ddpopt.plan import Plan
from lightning_ddpopt.tuning.simulator import buckets_of, simulate
from lightning_ddpopt.tuning.verdict import Trial, Verdict

MIB = 2**20


def trials_table(verdict: Verdict) -> Table:
    """One row for each plan that was tried."""
    table = Table(title=str(verdict), title_justify="left")
    table.add_column("plan")
    for name in ("buckets", "steps", "step ms", "± ms", "against default", "predicted ms"):
        table.add_column(name, justify="right")
    default = verdict.trial_of(verdict.default)
    for trial in verdict.trials:
        against = "" if default is None or trial is default else f"{trial.median_ms - default.median_ms:+.2f} ms"
        table.add_row(
            f"{trial.plan}{' (kept)' if trial.plan == verdict.plan else ''}",
            str(len(trial.bucket_bytes)),
            str(len(trial.steps_ms)),
            f"{trial.median_ms:.2f}",
            f"{trial.error_ms:.2f}",
            against,
            "" if trial.predicted_ms is None else f"{trial.predicted_ms:.2f}",
        )
    return table


def draw(verdict: Verdict, path: str | Path) -> None:
    """Write a PNG: for the default and the best other plan, backward and reductions as lanes, as the model sees them.

    Raises:
        ValueError: the verdict holds no timeline, since nothing was measured.

    """
    if verdict.timeline is None or verdict.link is None:
        raise ValueError("this verdict holds no timeline: nothing was tuned there")
    others = [  # the model knows the bytes of one hook only
        trial
        for trial in verdict.trials
        if trial.plan.bucket_cap_mb != verdict.default.bucket_cap_mb and trial.plan.hook == verdict.default.hook
    ]
    kept = verdict.trial_of(verdict.plan)
    shown: list[tuple[str, Plan, Trial | None]] = [("default", verdict.default, verdict.trial_of(verdict.default))]
    if kept is not None and kept in others:
        shown.append(("tuned", verdict.plan, kept))
    elif others:
        best = min(others, key=lambda trial: trial.median_ms)
        shown.append(("tried, not kept", best.plan, best))
    figure = Figure(figsize=(12, 1.3 + 1.7 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, plan, trial) in zip(panels, shown, strict=True):
        _draw_step(axes, verdict, plan)
        measured = f", measured {trial.median_ms:.2f} ms a step" if trial is not None else ""
        axes.set_title(f"{name}: {plan}{measured}", fontsize=9, loc="left")
    panels[-1].set_xlabel("ms after the start of backward (model)")
    figure.savefig(path, format="png", dpi=120)


def _draw_step(axes: Axes, verdict: Verdict, plan: Plan) -> None:
    """Backward above, reductions below, exposed communication shaded."""
    assert verdict.timeline is not None
    assert verdict.link is not None
    assert verdict.interference is not None
    gradients = verdict.timeline.gradients
    buckets = buckets_of(gradients, plan.bucket_cap_mb)
    step = simulate(verdict.timeline, buckets, verdict.link, verdict.interference, verdict.payload_factor)
    end = step.backward_ms + step.exposed_ms
    axes.broken_barh([(0, step.backward_ms)], (1.1, 0.8), color="C4", alpha=0.5)
    axes.text(0, 1.5, " backward", va="center", fontsize=7)
    rest = verdict.timeline.rest_ms
    axes.broken_barh([(end, rest)], (1.1, 0.8), color="C8", alpha=0.6)
    for index, (start, stop) in enumerate(step.reductions):
        axes.broken_barh([(start, stop - start)], (0.1, 0.8), color=("C0", "C9")[index % 2])
        size = sum(gradients[gradient].payload_bytes for gradient in buckets[index]) / MIB
        if stop - start > 0.04 * (end + rest):
            axes.text((start + stop) / 2, 0.5, f"{size:.3g} MiB", ha="center", va="center", fontsize=6)
    axes.axvspan(step.backward_ms, end, color="C3", alpha=0.2)
    axes.text(step.backward_ms, 2.0, f"exposed {step.exposed_ms:.2f} ms", fontsize=7, color="C3", va="bottom")
    axes.set_ylim(0, 2.3)
    axes.set_yticks([0.5, 1.5], [f"{len(buckets)} reductions", "compute"], fontsize=7)
