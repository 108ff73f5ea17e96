"""The training loop: steps, evaluations and checkpoints.

All randomness in step s is a function of (seed, s). The state of a run is therefore its weights,
optimiser moments and a few counters (`TrainState`), and a resumed run repeats an uninterrupted one.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import nn

from locality.data import Batch, eval_loader, train_loader
from locality.data.sampling import Stream, hash_seed, seed_generators
from locality.errors import Interrupted, NonFiniteLoss, ProcessKilled, UserError, some
from locality.models import ImageClassifier
from locality.training.config import identity
from locality.training.devices import Collectives, SignalHandler
from locality.training.evaluation import PredictionCollector, evaluate
from locality.training.job import Job
from locality.training.optim import UNDECIDED, create_schedule
from locality.training.recorder import Recorder
from locality.training.state import Components, TrainState

# The share of a run's minutes of training after which its decay begins. What follows the last step,
# baselines and summary, takes half as long as the start, but is given no more than this share.
_DECAY, _ENDING = 2 / 3, 0.08
# Steps that tell how long one takes: the first after a start is slower.
_TIMED = 10
# Between checkpoints of a run of minutes, whose evaluations become rare.
_SAVE_SECONDS = 60.0
# Passes over the images after which fine-tuned weights have left their classifier's first fit.
_MANY_PASSES = 20


def seed_pass(seed: int, rank: int, step: int, micro: int, device: torch.device) -> None:
    """Seed Python's, numpy's and torch's generators for pass `micro` of step `step`.

    Mixup, dropout and stochastic depth draw from global generators. Seeding these from (seed, step,
    micro-batch, rank) before every pass makes a resumed run draw what an uninterrupted one would.

    Args:
        seed: the run's seed.
        rank: the rank of this process.
        step, micro: the pass.
        device: the device whose generator is seeded besides the CPU's.
    """
    key = int(hash_seed(seed, Stream.STEP, rank, step, micro)[0])
    seed_generators(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key >> 1)
    elif device.type == "mps":
        torch.mps.manual_seed(key & 0xFFFF_FFFF)


@dataclass(eq=False)
class Loop:
    """The training loop of one process.

    Attributes:
        fabric: devices and processes.
        job: the run.
        parts: model, optimiser and so on, on their device.
        recorder: writes logs and checkpoints; `NoRecorder` on ranks other than 0.
        signals: the signals this process has received.
        state: the counters, new or from a checkpoint.
        started: when the command started, by `time.perf_counter`.
    """

    fabric: Fabric
    job: Job
    parts: Components
    recorder: Recorder
    signals: SignalHandler
    state: TrainState
    started: float

    def __post_init__(self) -> None:
        fabric, run = self.fabric, self.job
        self.config, self.plan, self.splits = run.config, run.plan, run.splits
        self.state.decay = self.config.schedule.decay
        self.collectives = Collectives(fabric, self.signals)
        self._saved = self.state.step or -1  # step of the last checkpoint; step 0 has none
        self._begun = self._saved_at = time.perf_counter()
        self._first_step, self._evaluation = self.state.step, 0.0  # seconds of the last one
        self._spent = self.state.spent  # before this process
        self._input = self.config.input.at(run.img_size)
        self._loading: dict[str, Any] = {
            "rank": fabric.global_rank,
            "world_size": fabric.world_size,
            "pin_memory": fabric.device.type == "cuda",
        }
        # Without gradients twice the training batch fits; for tiny batches larger is faster.
        batch = max(2 * run.micro_batch, 64)
        self._eval_batches = math.ceil(len(self.splits.val) / (fabric.world_size * batch))
        loading = self.config.data.loading(training=False) | self._loading
        self._eval_loader = eval_loader(self.splits.val, self._input, batch_size=batch, **loading)

    def run(self) -> dict[str, Any]:
        """Train to the end.

        Returns:
            the evaluation of the kept weights: the last, or the best.

        Raises:
            Interrupted: if a signal arrived; the checkpoint is written.
            NonFiniteLoss: if a loss or the gradients are not finite.
            CheckpointNotSaved: if the disk is full.
        """
        state = self.state
        batches: Iterator[Batch] | None = None
        try:
            while True:
                due = self._watch_clock() or self.plan.saves(state.step)
                # Before the evaluation, which may fail.
                if self._saved != state.step and due:
                    self._save()
                if state.evaluated < state.step and self.plan.evaluates(state.step):
                    try:
                        self._evaluate()
                    except (MemoryError, RuntimeError):
                        # Out of memory, or a loading process killed: the state is unchanged.
                        if self.collectives.is_single:
                            self._save_now()
                        raise
                self.recorder.save_snapshot(state.step, self._eval_model())
                if state.step == self.plan.steps or self._should_stop_early():
                    self.recorder.wait_until_saved()
                    return state.best or state.row
                if batches is None:
                    batches = self.train_batches()
                if signum := self.train_step(batches):
                    raise Interrupted(signum, state.step)
        except Interrupted:
            self._save_now()
            # No process ends before the checkpoint is on disk: a launcher may kill the others when
            # the first has ended.
            self.fabric.barrier()
            raise
        except (UserError, ProcessKilled):
            # An image cannot be read, or a loading process was killed; the step changed nothing.
            if self.collectives.is_single:
                self._save_now()
            raise
        finally:
            self._eval_loader.close()

    def _watch_clock(self) -> bool:
        """In a run of minutes, begin the decay when it is time; whether to save a checkpoint."""
        if self.config.schedule.minutes is None:
            return False
        rank0 = self.fabric.is_global_zero
        decay, saves = self.fabric.broadcast(self._look_at_clock() if rank0 else (None, False))
        if decay is not None:
            self.job.set_decay(decay)
            self.state.decay = decay
            self.config, self.plan = self.job.config, self.job.plan
            self.parts.schedule = create_schedule(self.parts.optimizer, self.plan)
            # An evaluation records the rate of the last step, which a new schedule resets.
            self.parts.schedule.step_update(self.state.step - 1)
            self.recorder.begin_decay()
        return saves

    def _look_at_clock(self) -> tuple[tuple[int, int] | None, bool]:
        """The decay if it begins at this step, and whether a checkpoint is due."""
        now, step = time.perf_counter(), self.state.step
        saves, steps = now - self._saved_at > _SAVE_SECONDS, step - self._first_step
        if self.plan.steps != UNDECIDED or not steps:
            return None, saves
        per_step = (now - self._begun) / steps
        # A forward pass takes a third of a step.
        predicted = per_step * len(self.splits.val) / self.plan.batch_size / 3
        evaluation = self._evaluation or predicted
        seconds = 60 * self.config.schedule.length
        ending = evaluation + min((self._begun - self.started) / 2, _ENDING * seconds)
        end, begun = self.started - self._spent + seconds - ending, self._begun - self._spent
        # A run that resumes late first times some steps, if there is time for them.
        few = steps < _TIMED and now + _TIMED * per_step < end
        if few or now - begun < _DECAY * (end - begun):
            return None, saves
        return (step, step + max(1, round((end - now) / per_step))), saves

    def train_step(self, batches: Iterator[Batch]) -> int:
        """Make one update; returns the signal that asks to stop, or 0."""
        parts, engine, state = self.parts, self.config.engine, self.state
        device = self.fabric.device
        parts.schedule.step_update(state.step)
        is_single = self.collectives.is_single
        total: Any = 0
        # A forward pass changes running statistics before the next micro-batch is known to be
        # readable.
        buffers = [] if engine.accumulate == 1 else list(parts.model.buffers())
        before = [buffer.clone() for buffer in buffers]
        started = time.perf_counter()
        for micro in range(engine.accumulate):
            last = micro + 1 == engine.accumulate
            try:
                batch = next(batches)
            except (UserError, ProcessKilled):
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)
                raise
            seed_pass(self.config.seed, self.fabric.global_rank, state.step, micro, device)
            images = batch.images.to(device, non_blocking=True)
            labels = batch.targets.to(device, non_blocking=True)
            images, targets = parts.objective.mix(images, labels)
            with self.fabric.no_backward_sync(parts.forward, enabled=not last and not is_single):
                with self.job.autocast():
                    outputs = parts.forward(images)
                    loss = parts.objective.loss(outputs, targets, images)
                total = parts.objective.batch_metrics(loss, outputs, targets) + total
                if last:
                    # Before the backward pass, to overlap with it.
                    read_metrics = self.collectives.all_reduce_metrics(total)
                self.fabric.backward(parts.scaler.scale(loss / engine.accumulate))
        if state.step == 0:
            self._warn_unused_parameters()
        loss_sum, correct, signum = read_metrics()
        mean = loss_sum / (engine.accumulate * self.fabric.world_size)
        parts.scaler.unscale_(parts.optimizer)
        if not math.isfinite(mean):
            raise self._diverged(f"the loss became {mean} in step {state.step + 1}")
        if not self._clip() and parts.scaler.get_scale() <= 1:
            raise self._diverged(f"the gradients are not finite in step {state.step + 1}")
        # The scaler skips gradients that its scale made too large for float16.
        parts.scaler.step(parts.optimizer)
        if parts.ema is not None:
            parts.ema.update(parts.model, step=state.step + 1)
        state.loss_sum += mean * self.plan.batch_size
        state.num_correct += correct
        state.num_images += self.plan.batch_size
        parts.scaler.update()
        parts.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        self.recorder.log_step(state, time.perf_counter() - started)
        return signum

    def _warn_unused_parameters(self) -> None:
        """Warn of trainable parameters that get no gradient in the first step."""
        idle: set[str] = getattr(self.parts.model, "unused_parameters", set)()
        names = [
            name
            for name, parameter in self.parts.model.named_parameters()
            if parameter.requires_grad
            and name not in idle
            and (parameter.grad is None or not parameter.grad.any())
        ]
        if names:
            self.recorder.log(
                f"step 1: no gradient reaches {len(names)} of the model's trained parameters: "
                f"{some(names, 3)}. Unless a later layer starts at zero, they will never learn; "
                f"check the model's settings"
            )

    def _clip(self) -> bool:
        """Clip the gradients if enabled; False if their norm is not finite.

        Without clipping no norm is computed. Non-finite gradients then reach the weights: the next
        loss is not finite either, and these weights are never saved (`CheckpointFolder.save`).
        """
        clip = self.config.optim.clip_grad
        if clip is None:
            return True
        return bool(nn.utils.clip_grad_norm_(self.parts.model.parameters(), clip).isfinite())

    def _diverged(self, what: str) -> NonFiniteLoss:
        rate, saved = self.parts.optimizer.param_groups[0]["lr"], self._saved
        kept = f"the checkpoint of step {saved} is kept" if saved >= 0 else "no checkpoint exists"
        return NonFiniteLoss(
            f"{what}; {kept}. Lower optim.lr (the learning rate is {rate:.3g}) or set "
            f"optim.clip_grad, in a new run folder"
        )

    def _evaluate(self) -> None:
        state, model = self.state, self._eval_model()
        self.recorder.wait_until_saved()
        self.recorder.evaluating(len(self.splits.val))
        started = time.perf_counter()
        # Running statistics differ between processes; those of rank 0 are saved.
        self.collectives.broadcast(list(model.buffers()))
        collector = PredictionCollector(len(self.splits.val), self.fabric.device)
        with self.job.autocast():
            found = evaluate(
                model,
                self._eval_loader,
                self.fabric.device,
                all_reduce=self.collectives.all_reduce,
                num_batches=self._eval_batches,
                before_batch=self._raise_if_signalled,
                on_batch=collector,
            )
        if not math.isfinite(found["loss"]):
            raise self._diverged(
                f"the loss on {found['n']} validation images is {found['loss']} after step "
                f"{state.step}"
            )
        self.collectives.all_reduce(collector.table)
        row = {
            "step": state.step,
            "epoch": round(self.plan.epoch(state.step), 6),
            "images": state.step * self.plan.batch_size,
            "lr": self.parts.optimizer.param_groups[0]["lr"],
            "train_loss": state.loss_sum / state.num_images if state.num_images else None,
            "train_top1": 100 * state.num_correct / state.num_images if state.num_images else None,
            "top1": found["top1"],
            "top5": found["top5"],
            "val_loss": found["loss"],
        }
        state.row, state.evaluated = row, state.step
        state.loss_sum, state.num_correct, state.num_images = 0.0, 0.0, 0
        self._evaluation = time.perf_counter() - started
        if not state.step:
            self._begun = time.perf_counter()  # the probe is no step
        self.recorder.log_evaluation(row, found["n"], self._evaluation)
        predictions = collector.predictions(self.splits.val, self.splits.classes)
        # For the choice of the weights, no columns of metrics.csv.
        if self.config.objective.class_weights:
            row["balanced_accuracy"] = predictions.macro["balanced_accuracy"]
        elif self.plan.probes:
            row["right"] = predictions.right.tolist()
        if not self.plan.keeps_best:
            self.recorder.write_predictions(predictions)
        elif not state.best or self._is_kept(row):
            state.best = row
            self.recorder.keep_best()
            self.recorder.write_predictions(predictions)

    def _is_kept(self, row: dict[str, Any]) -> bool:
        """Whether an evaluation's weights replace the best so far.

        Without patience, the last replace the probe's after many passes over the images, unless
        they are worse by more than the standard error of the difference, paired by image: few
        validation images seldom tell the two apart, and of those a probe may have all. After few
        passes, only if they are better by more than that. With class weights, unless the mean
        accuracy of the classes is lower.
        """
        best = self.state.best
        if self.plan.patience is not None:
            return _selection_key(row) > _selection_key(best)
        if row["step"] < self.plan.steps:
            return False
        if self.config.objective.class_weights:
            return row["balanced_accuracy"] >= best["balanced_accuracy"]
        if "right" not in best:  # validation images have changed
            return row["top1"] >= best["top1"]
        changes = [now - was for now, was in zip(row["right"], best["right"], strict=True)]
        error = math.sqrt(sum(map(abs, changes)))
        few = row["epoch"] < _MANY_PASSES
        return sum(changes) > error if few else sum(changes) >= -error

    def _raise_if_signalled(self) -> None:
        if signum := self.collectives.any_signal():
            raise Interrupted(signum, self.state.step)

    def _should_stop_early(self) -> bool:
        state, patience = self.state, self.plan.patience
        if patience is None or state.evaluated != state.step:
            return False
        if state.step - state.best["step"] < patience:
            return False
        self.recorder.log(
            f"step {state.step}: accuracy has not risen since step {state.best['step']}: stopping"
        )
        return True

    def _save(self) -> None:
        self.collectives.all_gather(self.state.skipped)
        if self.config.schedule.minutes is not None:
            self.state.spent = self._spent + time.perf_counter() - self.started
        if self.fabric.is_global_zero:
            checkpoint = {"step": self.state.step, "progress": asdict(self.state)}
            checkpoint |= {"config": identity(self.config, "resume")}
            self.recorder.save(checkpoint | self.parts.state())
        self._saved, self._saved_at = self.state.step, time.perf_counter()

    def _save_now(self) -> None:
        """Save a checkpoint and wait until it is on disk."""
        if self._saved != self.state.step:
            self._save()
        self.recorder.wait_until_saved()

    def _eval_model(self) -> ImageClassifier:
        """The model that is evaluated: the moving average if the run keeps one."""
        return self.parts.model if self.parts.ema is None else self.parts.ema.module

    def train_batches(self) -> Iterator[Batch]:
        """The batches of this process, from the next step on."""
        config = self.config
        # Loading processes are forked, when no thread should be running.
        self.recorder.wait_until_saved()
        loader = train_loader(
            self.splits.train,
            config.augment,
            self._input,
            batch_size=self.plan.batch_size,
            seed=config.seed,
            start_step=self.state.step,
            stop_step=self.plan.steps,
            accumulate=config.engine.accumulate,
            **config.data.loading(training=True),
            **self._loading,
        )
        loader.skipped.update(self.state.skipped)
        self.state.skipped = loader.skipped
        return iter(loader)


def _selection_key(row: dict[str, Any]) -> tuple[float, float]:
    """The sort key of evaluations, largest for the best: top-1, then the loss.

    With class weights, the mean accuracy of the classes is in top-1's place.
    """
    return row.get("balanced_accuracy", row["top1"]), -row["val_loss"]
