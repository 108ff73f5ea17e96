"""The step loop: what happens, in which order, between a run's first and last update.

Everything random in step s is a function of (seed, s), so the state of a run is its weights, its
optimiser's moments, and a few counts (`Counts`). Whatever interrupts the loop, it goes on from
the last checkpoint as if nothing had happened.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from locality.data import Batch, Stream, eval_loader, keys, seed_generators, train_loader
from locality.errors import Interrupted, NonFiniteLoss, ProcessKilled, UserError
from locality.models import ImageClassifier
from locality.training.collectives import Processes
from locality.training.devices import exact
from locality.training.evaluation import evaluate
from locality.training.predictions import Collector
from locality.training.recorder import Recorder
from locality.training.resolved_run import Preview
from locality.training.run_folder import decisive
from locality.training.signals import Interruption
from locality.training.state import Components, Counts


def measured(loss: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """A batch's mean loss and its number of right answers, (2,).

    After mixing, the class that makes up most of an image counts as right. Of several candidates'
    logits the first ones count.
    """
    logits = logits[0] if logits.ndim == 3 else logits
    labels = targets if targets.ndim == 1 else targets.argmax(dim=1)
    right = (logits.argmax(dim=1) == labels).sum()
    kind = exact(loss.device)
    return torch.stack((loss.detach().to(kind), right.to(kind)))


def seed_pass(seed: int, rank: int, step: int, micro: int, device: torch.device) -> None:
    """Seed Python's, numpy's and torch's generators for pass `micro` of step `step`.

    Mixup, dropout and stochastic depth draw from global generators. Seeding these from (seed, step,
    micro-batch, rank) before every pass makes a resumed run draw what an uninterrupted one would.

    Args:
        seed: the run's.
        rank: of this process.
        step, micro: which pass.
        device: whose generator to seed beside the processor's.
    """
    key = int(keys(seed, Stream.STEP, rank, step, micro)[0])
    seed_generators(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key >> 1)
    elif device.type == "mps":
        torch.mps.manual_seed(key & 0xFFFF_FFFF)


class Loop:
    """Runs the steps of one process.

    Args:
        fabric: devices and processes.
        run: what it is to do.
        parts: model, optimiser and so on, on their device.
        recorder: writes and says things; only that of rank 0 does.
        interruption: whether a signal has come.
        at: how far it is; 0 steps unless given.
        fingerprint: of the data, kept in checkpoints.
    """

    def __init__(
        self,
        fabric: Fabric,
        run: Preview,
        parts: Components,
        recorder: Recorder,
        interruption: Interruption,
        at: Counts | None = None,
        fingerprint: str = "",
    ) -> None:
        self.fabric = fabric
        self.config, self.plan, self.splits = run.config, run.plan, run.splits
        self.autocast = run.autocast
        self.parts = parts
        self.recorder = recorder
        self.at = Counts() if at is None else at
        self.fingerprint = fingerprint
        self.processes = Processes(fabric, interruption)
        engine, data = self.config.engine, self.config.data
        self.layout = torch.channels_last if engine.channels_last else torch.preserve_format
        self._saved = self.at.step or -1  # step of the last checkpoint; there is none of step 0
        self._input = self.config.input.at(run.img_size)
        self._loading: dict[str, Any] = {
            "rank": fabric.global_rank,
            "world_size": fabric.world_size,
            "workers": data.workers,
            "max_bad_images": data.max_bad_images,
            "pin_memory": fabric.device.type == "cuda",
        }
        # Without gradients twice the training batch fits; for tiny batches larger is faster.
        batch = max(2 * run.micro_batch, 64)
        self._eval_rounds = math.ceil(len(self.splits.val) / (fabric.world_size * batch))
        self._eval_loader = eval_loader(
            self.splits.val,
            self._input,
            batch_size=batch,
            on_bad_image=data.on_bad(training=False),
            **self._loading,
        )

    def run(self) -> dict[str, Any]:
        """Train to the end.

        Returns:
            the evaluation of the weights that are kept: the last, or the best.

        Raises:
            Interrupted: if a signal came; the checkpoint is written.
            NonFiniteLoss: if a loss is not finite and none may be skipped any more.
            CheckpointNotSaved: if the disk is full.
        """
        at = self.at
        batches: Iterator[Batch] | None = None
        try:
            while True:
                # Before the evaluation, which may fail.
                if self._saved != at.step and self.plan.saves(at.step):
                    self._save()
                if at.evaluated < at.step and self.plan.evaluates(at.step):
                    try:
                        self._evaluate()
                    except (MemoryError, RuntimeError):
                        # No memory, a loading process killed: an evaluation changes no state.
                        if self.processes.alone:
                            self._keep()
                        raise
                self.recorder.look(at.step, self._evaluated_model())
                if at.step == self.plan.steps or self._no_longer_improves():
                    self.recorder.wait_until_saved()
                    return at.best or at.row
                if batches is None:
                    batches = iter(self._train_loader())
                if signum := self._step(batches):
                    raise Interrupted(signum, at.step)
        except Interrupted:
            self._keep()
            # Nobody leaves before the checkpoint is on disk: whoever started the processes may end
            # them all when the first is gone.
            self.fabric.barrier()
            raise
        except (UserError, ProcessKilled):
            # An image that cannot be read, a loading process killed; the step it was for has
            # changed nothing.
            if self.processes.alone:
                self._keep()
            raise
        finally:
            self._eval_loader.close()

    def _step(self, batches: Iterator[Batch]) -> int:
        """One update, and the signal that asks to stop, or 0."""
        parts, engine, at, device = self.parts, self.config.engine, self.at, self.fabric.device
        parts.schedule(at.step)
        alone = self.processes.alone
        total: Any = 0
        before = self._remembered_buffers()
        started = time.perf_counter()
        for micro in range(engine.accumulate):
            last = micro + 1 == engine.accumulate
            try:
                batch = next(batches)
            except (UserError, ProcessKilled):
                self._restore(before)
                raise
            seed_pass(self.config.seed, self.fabric.global_rank, at.step, micro, device)
            images = batch.images.to(device, non_blocking=True, memory_format=self.layout)
            labels = batch.targets.to(device, non_blocking=True)
            images, targets = parts.objective.mix(images, labels)
            with self.fabric.no_backward_sync(parts.forward, enabled=not last and not alone):
                with self.autocast():
                    logits = parts.forward(images)
                loss = parts.objective.loss(logits, targets, images)
                total = measured(loss, logits, targets) + total
                if last:
                    # Asked for before the backward pass, whose results the check does not need.
                    reading = self.processes.share(total)
                self.fabric.backward(parts.scaler.scale(loss / engine.accumulate))
        if at.step == 0:
            self._name_the_unreached()
        loss_sum, right, signum = reading()
        mean = loss_sum / (engine.accumulate * self.fabric.world_size)
        parts.scaler.unscale_(parts.optimizer)
        if not math.isfinite(mean):
            self._leave_out(f"the loss became {mean}", before)
        elif not self._clip() and parts.scaler.get_scale() <= 1:
            self._leave_out("the gradients are not finite", before)
        else:
            # Gradients that a scale above 1 made too large for half precision are no step.
            parts.scaler.step(parts.optimizer)
            if parts.ema is not None:
                parts.ema.update(parts.model, step=at.step + 1)
            at.loss_sum += mean * self.plan.batch_size
            at.right += right
            at.seen += self.plan.batch_size
        parts.scaler.update()
        parts.optimizer.zero_grad(set_to_none=True)
        at.step += 1
        self.recorder.stepped(at, time.perf_counter() - started)
        return signum

    def _name_the_unreached(self) -> None:
        """Say which trained parameters the first step's loss does not depend on."""
        idle: set[str] = getattr(self.parts.model, "idle_parameters", set)()
        names = [
            name
            for name, parameter in self.parts.model.named_parameters()
            if parameter.requires_grad
            and name not in idle
            and (parameter.grad is None or not parameter.grad.any())
        ]
        if names:
            self.recorder.say(
                f"step 1: no gradient reaches {len(names)} of the model's trained parameters: "
                f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}. Unless something behind "
                f"them starts at zero they will never learn; check model.overrides"
            )

    def _clip(self) -> bool:
        """Clip the gradients, if the run does; False if their norm shows that they are not finite.

        Without clipping no norm is computed. Gradients that are not finite then reach the weights:
        the next loss is not finite either, and such weights are never saved
        (`CheckpointFolder.save`).
        """
        clip = self.config.optim.clip_grad
        if clip is None:
            return True
        return bool(nn.utils.clip_grad_norm_(self.parts.model.parameters(), clip).isfinite())

    def _remembered_buffers(self) -> list[Tensor]:
        """Copies of the model's buffers, if this step may have to be undone.

        A forward pass changes running statistics before anybody knows that its loss is bad, or that
        the images of the next pass cannot be read.
        """
        if not self.config.engine.max_bad_losses and self.config.engine.accumulate == 1:
            return []
        return [buffer.clone() for buffer in self.parts.model.buffers()]

    def _restore(self, before: list[Tensor]) -> None:
        """Put back what `_remembered_buffers` has remembered, if it has anything."""
        for buffer, value in zip(self.parts.model.buffers(), before, strict=False):
            buffer.copy_(value)

    def _leave_out(self, reason: str, before: list[Tensor]) -> None:
        """Leave an update out if it may be, or stop before it."""
        at = self.at
        allowed = self.config.engine.max_bad_losses
        if at.bad_losses < allowed:
            at.bad_losses += 1
            self._restore(before)
            self.recorder.say(
                f"step {at.step + 1}: {reason}; update skipped "
                f"({at.bad_losses} of {allowed} allowed)"
            )
            return
        rate = self.parts.optimizer.param_groups[0]["lr"]
        skipped = f" after {at.bad_losses} skipped updates" if allowed else ""
        kept = "there is no checkpoint yet"
        if self._saved >= 0:
            kept = f"the last good checkpoint is that of step {self._saved}"
        raise NonFiniteLoss(
            f"{reason} in step {at.step + 1} at learning rate {rate:.3g}{skipped}; "
            f"the update was not made, and {kept}. Lower optim.lr, set "
            f"optim.clip_grad, or allow engine.max_bad_losses, in a new run folder"
        )

    # -- what happens between steps -----------------------------------------------------------

    def _evaluate(self) -> None:
        at, model = self.at, self._evaluated_model()
        self.recorder.wait_until_saved()
        started = time.perf_counter()
        # Running statistics differ between processes; rank 0's are the ones that are saved.
        self.processes.equalise(list(model.buffers()))
        collector = Collector(len(self.splits.val), self.fabric.device)
        with self.autocast():
            found = evaluate(
                model,
                self._eval_loader,
                self.fabric.device,
                label_sets=self.splits.val.label_sets,
                all_sum=self.processes.sum,
                rounds=self._eval_rounds,
                stop=self._stop_if_asked,
                layout=self.layout,
                seen=collector,
            )
        self.processes.sum(collector.table)
        row = {
            "step": at.step,
            "epoch": round(self.plan.epoch(at.step), 6),
            "images": at.step * self.plan.batch_size,
            "lr": self.parts.optimizer.param_groups[0]["lr"],
            "train_loss": at.loss_sum / at.seen if at.seen else None,
            "train_top1": 100 * at.right / at.seen if at.seen else None,
            "top1": found["top1"],
            "top5": found["top5"],
            "val_loss": found["loss"],
        }
        at.row, at.evaluated = row, at.step
        at.loss_sum, at.right, at.seen = 0.0, 0.0, 0
        self.recorder.evaluated(row, found["n"], time.perf_counter() - started)
        if self.plan.patience is None:
            self.recorder.keep_predictions(collector)
        elif not at.best or _goodness(row) > _goodness(at.best):
            at.best = row
            self.recorder.keep_best()
            self.recorder.keep_predictions(collector)

    def _stop_if_asked(self) -> None:
        if signum := self.processes.signal():
            raise Interrupted(signum, self.at.step)

    def _no_longer_improves(self) -> bool:
        at, patience = self.at, self.plan.patience
        if patience is None or at.evaluated != at.step or at.step - at.best["step"] < patience:
            return False
        self.recorder.say(
            f"step {at.step}: top-1 has not risen since step {at.best['step']}; training ends here"
        )
        return True

    def _save(self) -> None:
        self.processes.gather(self.at.skipped)
        if self.fabric.is_global_zero:
            self.recorder.save(
                {"step": self.at.step, "progress": asdict(self.at), "data": self.fingerprint}
                | {"config": decisive(self.config)}
                | self.parts.state()
            )
        self._saved = self.at.step

    def _keep(self) -> None:
        """Have the present state on disk."""
        if self._saved != self.at.step:
            self._save()
        self.recorder.wait_until_saved()

    def _evaluated_model(self) -> ImageClassifier:
        """The weights that the run is evaluated by: averaged ones if it keeps an average."""
        return self.parts.model if self.parts.ema is None else self.parts.ema.module

    def _train_loader(self) -> Any:
        config = self.config
        # Workers are forked, and a fork should find no thread at work.
        self.recorder.wait_until_saved()
        loader = train_loader(
            self.splits.train,
            config.augment,
            self._input,
            batch_size=self.plan.batch_size,
            seed=config.seed,
            start_step=self.at.step,
            stop_step=self.plan.steps,
            accumulate=config.engine.accumulate,
            on_bad_image=config.data.on_bad(training=True),
            **self._loading,
        )
        loader.skipped.update(self.at.skipped)
        self.at.skipped = loader.skipped
        return loader


def _goodness(row: dict[str, Any]) -> tuple[float, float]:
    """What evaluations are compared by: top-1 and, of equal ones, the loss."""
    return row["top1"], -row["val_loss"]
