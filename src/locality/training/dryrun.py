"""A dry run: everything checked, and what the run will cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from locality import checks
from locality.training.config import RunConfig
from locality.training.resolved_run import Preview, check_memory
from locality.training.run_folder import RunFolder
from locality.training.speed import Speed, measure, span


@dataclass(frozen=True)
class DryRun:
    """What a run comes to.

    Attributes:
        preview: data, plan, parameters, MACs and memory.
        images_per_second: as given or measured, over all processes.
        speed: where it comes from, if it was measured on this machine.
    """

    preview: Preview
    images_per_second: float
    speed: Speed | None = None

    @property
    def hours(self) -> float:
        """Training time; evaluations come on top."""
        return self.preview.plan.images / self.images_per_second / 3600

    def __str__(self) -> str:
        seen = self.preview
        here = "" if self.speed is None else ", measured here"
        rates = "" if self.speed is None else f"\nspeed   {self.speed.bottleneck}"
        time = (
            f"{span(3600 * self.hours)} at {self.images_per_second:.4g} images/s{here} "
            f"({self.hours:.3g} h)"
        )
        return (
            f"{seen}\n"
            f"memory  {seen.activation_bytes / 1e9:.3g} GB of activations and "
            f"{seen.state_bytes / 1e9:.3g} GB of weights and moments per process\n"
            f"disk    {seen.checkpoint_bytes / 1e9:.3g} GB per checkpoint\n"
            f"cost    {6 * seen.macs * seen.plan.images:.3g} operations\n"
            f"time    {time}{rates}"
        )


def dry_run(
    config: RunConfig, folder: Path | str | None = None, images_per_second: float | None = None
) -> DryRun:
    """Check a run and count what it will cost.

    Args:
        config: the run.
        folder: checked for belonging to this configuration, if it exists. Nothing is written.
        images_per_second: training speed over all processes, for the estimate of time; None
            measures it on this machine, in a few seconds.

    Raises:
        UserError: whatever `train` would refuse.
    """
    if images_per_second is not None:
        checks.number("images_per_second", images_per_second, 0, above=True)
    run = None if folder is None else RunFolder(folder)
    seen = Preview(config, resumes=run is not None and run.has_begun())
    if run is not None:
        run.check(config)
    check_memory(seen)
    if images_per_second is None:
        speed = measure(seen)
        return DryRun(seen, 1 / speed.training, speed)
    return DryRun(seen, images_per_second)
