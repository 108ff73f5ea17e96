"""`train`: a run from its checks to its result, in all processes.

Lightning Fabric finds the device and makes the model data parallel; `locality.training.loop` has
the training loop.
"""

from __future__ import annotations

import atexit
import contextlib
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_fabric import Fabric

from locality.checkpoints.run_state import CheckpointFolder, DamagedCheckpoint, read_checkpoint
from locality.data.datasets import verify
from locality.data.loader import translate_killed_worker
from locality.errors import (
    Interrupted,
    NonFiniteLoss,
    ProcessKilled,
    UserError,
    prefix_errors,
)
from locality.files import write_atomic
from locality.machine import arithmetic_threads
from locality.progress import doing
from locality.runs import RunFolder, is_run_folder
from locality.settings import from_dict, replace, to_yaml
from locality.training.config import RunConfig, read_config
from locality.training.devices import SignalHandler, create_fabric, leave_group
from locality.training.folder_checks import (
    check_folder,
    check_images,
    check_places,
    check_same,
    check_space,
    writing,
)
from locality.training.loop import Loop
from locality.training.model import build_model
from locality.training.recorder import NoRecorder, Recorder
from locality.training.resolved_run import ResolvedRun
from locality.training.state import Components, TrainState


def train(
    config: RunConfig,
    folder: Path | str,
    *,
    quiet: bool = False,
    started: float | None = None,
    components: type[Components] = Components,
) -> dict[str, Any]:
    """Train in `folder`; resume an unfinished run, or return the result of a finished one.

    Everything that can be checked is checked before the first step.

    Args:
        config: the complete run.
        folder: the run folder; `locality.runs` lists its files.
        quiet: print nothing.
        started: when the command started, by `time.perf_counter`; now if None. The minutes of
            `schedule.minutes` begin then.
        components: the class of model, optimiser and objective, such as a supernet's.

    Returns:
        the content of result.json.

    Raises:
        UserError: if the run cannot work as configured, or the folder belongs to another run.
        Interrupted: if a signal stopped it; the checkpoint is written and the same call resumes.
        ProcessKilled: if a data loading process was killed, such as for lack of memory; the same
            call resumes.
        NonFiniteLoss: if the loss is not finite.
        DamagedCheckpoint: if all checkpoints are damaged.
        CheckpointNotSaved: if the disk is full.
    """
    started = time.perf_counter() if started is None else started
    run = RunFolder(folder)
    # A run of minutes keeps the decay that it recorded, whoever continues it.
    if config.schedule.minutes is not None and is_run_folder(folder):
        decay = read_config(folder).schedule.decay
        config = config if decay is None else replace(config, {"schedule.decay": decay})
    fabric = create_fabric(config.engine)
    fabric.launch()
    atexit.register(leave_group)
    try:
        with translate_killed_worker():
            outcome = _train(config, run, quiet, started, components, fabric)
    except BaseException as error:
        # The traceback holds the model, which holds the process group.
        _clear_frames(error)
        if isinstance(error, ProcessKilled):
            outcome = ProcessKilled(error.what, error.signum, resumes=True)
        elif isinstance(error, (Interrupted, NonFiniteLoss, DamagedCheckpoint)):
            outcome = error
        else:
            raise
    finally:
        run.lock.release()
    if isinstance(outcome, dict):
        return outcome
    if fabric.global_rank > 0 and not isinstance(outcome, ProcessKilled):
        raise SystemExit(getattr(outcome, "exit_code", 1))  # rank 0 says it
    raise outcome


def _clear_frames(error: BaseException | None) -> None:
    """Release the local variables that the tracebacks of an error and its causes hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _train(
    config: RunConfig,
    folder: RunFolder,
    quiet: bool,
    started: float,
    components: type[Components],
    fabric: Fabric,
) -> dict[str, Any] | Exception:
    opened: _Opened | None = None

    def check() -> dict[str, Any] | str:
        nonlocal opened
        with doing("checking images and settings", quiet, at_once=False):
            shared, opened = _check(config, folder)
        return shared

    shared = _on_rank0(fabric, check)
    if isinstance(shared, Exception):
        return shared
    if isinstance(shared, dict):
        if fabric.is_global_zero and not quiet:
            print(f"run {folder.path} is finished: top-1 {shared['top1']:.2f}%")
        return shared
    if opened is None:  # another rank, after rank 0 has checked everything
        resumed = read_checkpoint(folder.checkpoints / shared) if shared else None
        opened = ResolvedRun(config, classes=folder.recorded_classes()), resumed
    run, checkpoint = opened
    with arithmetic_threads(config.engine.threads), SignalHandler().installed() as signals:
        # A resumed run takes its weights from the checkpoint, whatever it started from.
        if checkpoint is None:
            model, changes = run.starting_model
            run.notes += changes
        else:
            model = build_model(config, len(run.splits.classes))
        parts = components(fabric, run, model)
        state = TrainState() if checkpoint is None else parts.load(checkpoint)
        if error := _on_rank0(fabric, lambda: _begin(folder, run)):
            return error
        recorder: Any = NoRecorder()
        if fabric.is_global_zero:
            metrics = "" if checkpoint is None else checkpoint["metrics"]
            recorder = Recorder(folder, run, state, metrics, quiet)
        with contextlib.closing(recorder):
            if fabric.is_global_zero:
                folder.record_start(
                    config.seed,
                    step=state.step,
                    workers=config.data.workers,
                    device=str(fabric.device),
                    precision=run.precision,
                )
                if state.step:
                    run.notes.insert(0, f"resumed after step {state.step:,}")
                lines = [f"run {folder.path}, seed {config.seed}", *str(run).splitlines()]
                recorder.log("\n  ".join(lines))
            loop = Loop(fabric, run, parts, recorder, signals, state, started)
            return fabric.broadcast(recorder.finish(loop.run()))


def _on_rank0(fabric: Fabric, function: Callable[[], Any]) -> Any:
    """The value of `function` on rank 0, or the error it raised, in every process."""
    outcome: Any = None
    if fabric.is_global_zero:
        try:
            outcome = function()
        except (UserError, OSError, DamagedCheckpoint) as error:
            outcome = error
    return fabric.broadcast(outcome)


_Opened = tuple[ResolvedRun, dict[str, Any] | None]


def _check(config: RunConfig, folder: RunFolder) -> tuple[dict[str, Any] | str, _Opened | None]:
    """Check everything without writing, and lock the folder if it is a run's.

    Returns:
        for every rank, the result of a finished run, or the name of the checkpoint to resume, ""
        for none; for rank 0, the run and the checkpoint.

    Raises:
        UserError: if the run cannot work as configured, or cannot continue with its images.
        DamagedCheckpoint: if all checkpoints are damaged.
    """
    check_places(config, folder.path)
    run = ResolvedRun(config, classes=folder.recorded_classes())
    run.check_start()
    if is_run_folder(folder.path):
        folder.lock.acquire()
        check_folder(folder.path, config)
    result = folder.read_result(whole=True)
    if result is not None:
        check_images(folder, config.data, run.images, result.get("images"))
        return result, None
    check_space(folder, run.checkpoint_bytes, best=run.plan.patience is not None)
    checkpoint, name, passed_over = CheckpointFolder(folder.checkpoints).load()
    run.notes += [f"{reason}; continuing from the one before it" for reason in passed_over]
    if checkpoint is None and folder.metrics_file.exists():
        run.notes.append(f"{folder.path} has metrics but no checkpoint: starting again")
    if checkpoint is not None:
        with prefix_errors(folder.config_file):  # it may have been edited
            check_same(folder.path, from_dict(RunConfig, checkpoint["config"]), config)
        changed = check_images(folder, config.data, run.images, checkpoint["data"])
        classes = run.splits.classes
        if changed and (folder.classes() != classes or checkpoint["step"] > run.plan.steps):
            raise UserError(
                f"{changed[0]}, and so have the classes or the number of steps, so the run cannot "
                f"continue; restore them or start in a new folder"
            )
        run.notes += changed
    elif config.data.on_bad(training=False) == "error":
        checked = verify(run.splits.val)
        run.notes += [checked] if checked else []
    return name, (run, checkpoint)


def _begin(folder: RunFolder, run: ResolvedRun) -> None:
    """Lock and write the folder: the run's settings, classes and images.

    Raises:
        UserError: if another run has taken the folder, or it cannot be written to.
    """
    with writing(folder.path):
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        if not folder.lock.is_held:
            folder.lock.acquire()
            check_folder(folder.path, run.config)
            if is_run_folder(folder.path):
                raise UserError(
                    f"another process has just started {folder.path}; repeat the command"
                )
        CheckpointFolder(folder.checkpoints).tidy()
        write_atomic(folder.config_file, to_yaml(run.config))
    splits = run.splits
    write_atomic(folder.images_file, run.images.table)
    folder.write_json(folder.classes_file, splits.classes)
    folder.write_json(folder.counts_file, splits.train.counts(splits.classes))
