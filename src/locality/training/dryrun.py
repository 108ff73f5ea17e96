"""A dry run: everything checked, and what the run will cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from locality import checks
from locality.training.config import RunConfig
from locality.training.resolved_run import ResolvedRun
from locality.training.run_folder import RunFolder
from locality.training.speed import Speed, format_duration, measure_speed


@dataclass(frozen=True)
class DryRun:
    """What a run will cost.

    Attributes:
        run: its data, plan, parameters, MACs and memory.
        images_per_second: training speed over all processes.
        speed: set if it was measured on this machine.
    """

    run: ResolvedRun
    images_per_second: float
    speed: Speed | None = None

    @property
    def hours(self) -> float:
        """Training time without evaluations."""
        return self.run.plan.images / self.images_per_second / 3600

    def __str__(self) -> str:
        run = self.run
        here = "" if self.speed is None else ", measured here"
        rates = "" if self.speed is None else f"\nspeed   {self.speed.bottleneck}"
        time = (
            f"{format_duration(3600 * self.hours)} at {self.images_per_second:.4g} images/s{here} "
            f"({self.hours:.3g} h)"
        )
        return (
            f"{run}\n"
            f"memory  {run.activation_bytes / 1e9:.3g} GB of activations and "
            f"{run.state_bytes / 1e9:.3g} GB of weights and moments per process\n"
            f"disk    {run.checkpoint_bytes / 1e9:.3g} GB per checkpoint\n"
            f"cost    {6 * run.macs * run.plan.images:.3g} operations\n"
            f"time    {time}{rates}"
        )


def dry_run(
    config: RunConfig, folder: Path | str | None = None, images_per_second: float | None = None
) -> DryRun:
    """Check a run and estimate its cost.

    Args:
        config: the run.
        folder: the run's folder, checked if it exists; nothing is written.
        images_per_second: training speed over all processes; measured here unless given.

    Raises:
        UserError: whatever `train` would refuse.
    """
    if images_per_second is not None:
        checks.number("images_per_second", images_per_second, 0, above=True)
    run_folder = None if folder is None else RunFolder(folder)
    run = ResolvedRun(config, resumes=run_folder is not None and run_folder.has_progress())
    if run_folder is not None:
        run_folder.check(config)
    run.check_memory()
    if images_per_second is None:
        speed = measure_speed(run)
        return DryRun(run, 1 / speed.training, speed)
    return DryRun(run, images_per_second)
