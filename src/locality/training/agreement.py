"""What the processes of a run tell each other, and how a step's numbers reach the processor."""

from __future__ import annotations

import torch
from lightning_fabric import Fabric
from torch import Tensor

from locality.training.evaluation import EvaluationStopped, exact
from locality.training.signals import SIGNALS, Interruption


class Agreement:
    """Sums, signals and lists over all processes; what a single process knows, if it is alone.

    Args:
        fabric: devices and processes.
        interruption: whether a signal has come to this process.
    """

    def __init__(self, fabric: Fabric, interruption: Interruption) -> None:
        self.alone = fabric.world_size == 1
        self._device = fabric.device
        self._world_size = fabric.world_size
        self._interruption = interruption
        self._copy = _DelayedCopy(2 + len(SIGNALS)) if fabric.device.type == "cuda" else None

    def new_total(self) -> Tensor:
        """Zeros to add `measured` to."""
        return torch.zeros(2, dtype=exact(self._device), device=self._device)

    def share(self, total: Tensor) -> Reading:
        """Add up a step's totals and signals over all processes; the result arrives later."""
        if not self.alone:
            total = self.sum(torch.cat((total, total.new_tensor(self._flags()))))
        if self._copy is not None:
            return Reading(self._copy.send(total), self._interruption)
        return Reading(total.tolist(), self._interruption)

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` added up over all processes, in place."""
        if not self.alone:
            torch.distributed.all_reduce(tensor)
        return tensor

    def stop_if_asked(self) -> None:
        """Leave an evaluation, on all processes alike, if a signal has come to any of them.

        Raises:
            EvaluationStopped: with the signal's number.
        """
        signum = self._interruption.signum
        if not self.alone:
            flags = torch.tensor(self._flags(), device=self._device)
            signum = signal_of(self.sum(flags).tolist())
        if signum:
            raise EvaluationStopped(signum)

    def gather(self, known: dict[str, str]) -> None:
        """Add to `known` what the other processes know."""
        if self.alone:
            return
        gathered: list[dict[str, str] | None] = [None] * self._world_size
        torch.distributed.all_gather_object(gathered, known)
        for other in gathered:
            known.update(other or {})

    def equalise(self, buffers: list[Tensor]) -> None:
        """Give `buffers` the first process's values everywhere."""
        if not self.alone:
            for buffer in buffers:
                torch.distributed.broadcast(buffer, src=0)

    def _flags(self) -> list[float]:
        return [float(self._interruption.signum == signum) for signum in SIGNALS]


class Reading:
    """A step's totals on their way to the processor."""

    def __init__(self, numbers: list[float] | _DelayedCopy, interruption: Interruption) -> None:
        self._numbers = numbers
        self._interruption = interruption

    def values(self) -> tuple[float, float, int]:
        """Loss summed over passes and processes, right answers, and the signal to stop or 0."""
        numbers = self._numbers
        loss_sum, right, *flags = numbers if isinstance(numbers, list) else numbers.arrived()
        return loss_sum, right, signal_of(flags) if flags else self._interruption.signum


class _DelayedCopy:
    """Copies a few numbers from a GPU without waiting for what is queued after them."""

    def __init__(self, size: int) -> None:
        self._host = torch.empty(size, dtype=torch.float64, pin_memory=True)
        self._event = torch.cuda.Event()
        self._size = size

    def send(self, tensor: Tensor) -> _DelayedCopy:
        self._size = tensor.numel()
        self._host[: self._size].copy_(tensor, non_blocking=True)
        self._event.record()
        return self

    def arrived(self) -> list[float]:
        self._event.synchronize()
        return self._host[: self._size].tolist()


def measured(loss: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """A batch's mean loss and its number of right answers, (2,).

    After mixing, the class that makes up most of an image counts as right.
    """
    labels = targets if targets.ndim == 1 else targets.argmax(dim=1)
    right = (logits.argmax(dim=1) == labels).sum()
    kind = exact(loss.device)
    return torch.stack((loss.detach().to(kind), right.to(kind)))


def signal_of(counts: list[float]) -> int:
    """The signal that came to any process, 0 if none did."""
    return next((int(s) for s, count in zip(SIGNALS, counts, strict=True) if count), 0)
