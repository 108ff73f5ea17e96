"""`train`: a run from its checks to its result, in all processes.

Lightning Fabric finds the device and makes the model data parallel; `locality.training.loop` has
the training loop.
"""

import atexit
import contextlib
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_fabric import Fabric
from torch.distributed.constants import default_pg_timeout

from locality.checkpoints.run_state import CheckpointFolder, DamagedCheckpoint, read_checkpoint
from locality.data.loader import translate_killed_worker
from locality.errors import Interrupted, NonFiniteLoss, ProcessKilled, UserError, prefix_errors
from locality.files import write_atomic
from locality.machine import arithmetic_threads
from locality.progress import doing
from locality.runs import is_run_folder
from locality.settings import replace, to_yaml
from locality.training import devices, folder_checks
from locality.training.config import RunConfig, read_config
from locality.training.job import Job
from locality.training.loop import Loop
from locality.training.model import build_model
from locality.training.recorder import NoRecorder, OnEvaluation, Recorder
from locality.training.state import Components, TrainState


def train(config: RunConfig, folder: Path | str, **options: Any) -> dict[str, Any]:
    """Train in `folder`; resume an unfinished run, or return the result of a finished one.

    Everything that can be checked is checked before the first step.

    Args:
        config: the complete run.
        folder: the run folder; `locality.runs` lists its files.
        options: those of `train_job`, which has its errors, too.

    Returns:
        the content of result.json.
    """
    return train_job(Job(config, folder), **options)


def train_job(
    job: Job,
    *,
    quiet: bool = False,
    started: float | None = None,
    components: type[Components] = Components,
    on_evaluation: OnEvaluation | None = None,
) -> dict[str, Any]:
    """Train a run; see `train`.

    Args:
        job: the run; opened here.
        quiet: print nothing.
        started: when the command started, by `time.perf_counter`; now if None. The minutes of
            `schedule.minutes` begin then.
        components: the class of model, optimiser and objective, such as a supernet's.
        on_evaluation: called on rank 0 with each row of metrics.csv.

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
    fabric = devices.create_fabric(job.config.engine)
    waiting = f"waiting for all {fabric.world_size} processes, at most {default_pg_timeout}"
    with doing(waiting, quiet or fabric.world_size == 1, at_once=False):
        fabric.launch()
    atexit.register(devices.leave_group)
    try:
        with translate_killed_worker(), devices.translate_lost_process(fabric.world_size):
            return _train(job, quiet, started, components, fabric, on_evaluation)
    except BaseException as error:
        # The traceback holds the model, which holds the process group.
        _clear_frames(error)
        if isinstance(error, ProcessKilled):
            raise ProcessKilled(error.what, error.signum, resumes=True) from None
        if isinstance(error, (Interrupted, NonFiniteLoss)) and fabric.global_rank:
            raise SystemExit(error.exit_code) from None  # rank 0 says it
        raise
    finally:
        job.folder.lock.release()


def _clear_frames(error: BaseException | None) -> None:
    """Release the local variables that the tracebacks of an error and its causes hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _train(
    job: Job,
    quiet: bool,
    started: float,
    components: type[Components],
    fabric: Fabric,
    on_evaluation: OnEvaluation | None,
) -> dict[str, Any]:
    folder, checkpoint = job.folder, None

    def check() -> tuple[RunConfig, dict[str, Any] | None, str]:
        nonlocal checkpoint
        with doing("checking images and settings", quiet, at_once=False):
            result, name, checkpoint = _check(job)
        return job.config, result, name

    config, result, name = _on_rank0(fabric, check)
    if result is not None:
        if fabric.is_global_zero and not quiet:
            print(f"run {folder.path} is finished: top-1 {result['top1']:.2f}%")
        return result
    if not fabric.is_global_zero:  # after rank 0 has checked everything
        job.config = config
        job.open()
        if name:
            checkpoint = read_checkpoint(folder.checkpoints / name)
    with arithmetic_threads(config.engine.threads), devices.SignalHandler().installed() as signals:
        # A resumed run takes its weights from the checkpoint, whatever it started from.
        if checkpoint is None:
            model, changes = job.starting_model
            job.notes += changes
            if job.plan.probes:
                probe = _on_rank0(fabric, lambda: job.fit_probe(quiet))
                job.notes.append(probe.copy_to(model))
        else:
            model = build_model(config, len(job.splits.classes))
        parts = components(fabric, job, model)
        state = TrainState() if checkpoint is None else parts.load(checkpoint)
        _on_rank0(fabric, lambda: _begin(job, state.step, str(fabric.device)))
        recorder: Any = NoRecorder()
        if fabric.is_global_zero:
            metrics = "" if checkpoint is None else checkpoint["metrics"]
            recorder = Recorder(job, state, metrics, quiet, on_evaluation)
        with contextlib.closing(recorder):
            if state.step:
                job.notes.insert(0, f"resumed after step {state.step:,}")
            lines = [f"run {folder.path}, seed {config.seed}", *str(job).splitlines()]
            recorder.log("\n  ".join(lines))
            loop = Loop(fabric, job, parts, recorder, signals, state, started)
            return fabric.broadcast(recorder.finish(loop.run()))


def _on_rank0(fabric: Fabric, function: Callable[[], Any]) -> Any:
    """The value of `function` on rank 0, in every process; its error ends all, rank 0 says it."""
    value: Any = None
    error: Exception | None = None
    if fabric.is_global_zero:
        try:
            value = function()
        except (UserError, OSError, DamagedCheckpoint) as failure:
            error = failure
    value, error = fabric.broadcast((value, error))
    if error is not None:
        raise error if fabric.is_global_zero else SystemExit(getattr(error, "exit_code", 1))
    return value


def _check(job: Job) -> tuple[dict[str, Any] | None, str, dict[str, Any] | None]:
    """Open a run and check everything without writing, and lock the folder if it is a run's.

    Returns:
        the result of a finished run, else the name and content of the checkpoint to resume, if any.

    Raises:
        UserError: if the run cannot work as configured, or cannot continue with its images.
        DamagedCheckpoint: if all checkpoints are damaged.
    """
    folder, config = job.folder, job.config
    if is_run_folder(folder.path) and config.schedule.minutes is not None:
        # A run of minutes keeps the decay that it recorded, whoever continues it.
        decay = read_config(folder.path).schedule.decay
        config = job.config = replace(config, {"schedule.decay": decay or config.schedule.decay})
    job.open().check_start()
    if is_run_folder(folder.path):
        folder.lock.acquire()
        folder_checks.check_folder(folder.path, config)
    result = folder.read_result(whole=True)
    if result is not None:
        folder_checks.check_decay(folder, config, int(result["steps"]))
        folder_checks.check_images(folder, config.data, job.images, result.get("images"))
        return result, "", None
    folder_checks.check_space(folder, job.checkpoint_bytes, best=job.plan.keeps_best)
    checkpoint, name, passed_over = CheckpointFolder(folder.checkpoints).load()
    job.notes += [f"{reason}; continuing from the one before it" for reason in passed_over]
    if checkpoint is None and folder.metrics_file.exists():
        job.notes.append(f"{folder.path} has metrics but no checkpoint: starting again")
    if checkpoint is not None:
        with prefix_errors(folder.config_file):  # it may have been edited
            before = replace(RunConfig(), checkpoint["config"])
            folder_checks.check_same(folder.path, before, config)
        progress = checkpoint["progress"]
        folder_checks.check_decay(folder, config, progress["step"], progress.get("decay"))
        changed = folder_checks.check_images(folder, config.data, job.images, checkpoint["data"])
        classes = job.splits.classes
        if changed and (folder.classes() != classes or checkpoint["step"] > job.plan.steps):
            raise UserError(
                f"{changed[0]}, and so have the classes or the number of steps, so the run cannot "
                f"continue; restore them or start in a new folder"
            )
        if changed:
            progress["best"].pop("right", None)  # of other images
        job.notes += changed
    return None, name, checkpoint


def _begin(job: Job, step: int, device: str) -> None:
    """Lock and write the folder: the run's settings, classes and images, and this start.

    Raises:
        UserError: if another run has taken the folder, or it cannot be written to.
    """
    folder, splits = job.folder, job.splits
    with folder_checks.writing(folder.path):
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        if not folder.lock.is_held:
            folder.lock.acquire()
            folder_checks.check_folder(folder.path, job.config)
            if is_run_folder(folder.path):
                raise UserError(f"another process just started {folder.path}; repeat the command")
        CheckpointFolder(folder.checkpoints).tidy()
        write_atomic(folder.config_file, to_yaml(job.config))
    write_atomic(folder.images_file, job.images.table)
    folder.write_json(folder.classes_file, splits.classes)
    folder.write_json(folder.counts_file, splits.train.counts(splits.classes))
    start = {"workers": job.config.data.workers, "device": device, "precision": job.precision}
    folder.record_start(job.config.seed, step=step, **start)
