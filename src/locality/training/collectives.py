"""Collective operations over the processes of a run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning_fabric import Fabric
from torch import Tensor

from locality.training.signals import SIGNALS, SignalHandler


class Collectives:
    """Collective operations; without effect in a run of one process.

    Args:
        fabric: devices and processes.
        signals: the signals this process has received.
    """

    def __init__(self, fabric: Fabric, signals: SignalHandler) -> None:
        self.is_single = fabric.world_size == 1
        self._fabric = fabric
        self._signals = signals

    def all_reduce_metrics(self, total: Tensor) -> Callable[[], tuple[float, float, int]]:
        """Sum `Objective.batch_metrics` and the signals over all processes.

        Returns:
            a function that waits for the sums, which a GPU copies in the background: the loss of
            all micro-batches, the correct predictions, and the signal to stop, or 0.
        """
        if not self.is_single:
            total = self.all_reduce(torch.cat((total, total.new_tensor(self._flags()))))
        arrived = None
        if total.is_cuda:
            pinned = torch.empty_like(total, device="cpu", pin_memory=True)
            total = pinned.copy_(total, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()

        def values() -> tuple[float, float, int]:
            if arrived is not None:
                arrived.synchronize()
            loss_sum, correct, *flags = total.tolist()
            return loss_sum, correct, _first_signal(flags) if flags else self._signals.signum

        return values

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all processes, in place."""
        if not self.is_single:
            torch.distributed.all_reduce(tensor)
        return tensor

    def any_signal(self) -> int:
        """The signal that any process has received, or 0; every process has to call this."""
        if self.is_single:
            return self._signals.signum
        flags = torch.tensor(self._flags(), device=self._fabric.device)
        return _first_signal(self.all_reduce(flags).tolist())

    def all_gather(self, known: dict[str, str]) -> None:
        """Add the items of all processes to `known`."""
        if self.is_single:
            return
        gathered: list[dict[str, str]] = [{}] * self._fabric.world_size
        torch.distributed.all_gather_object(gathered, known)
        for other in gathered:
            known.update(other)

    def broadcast(self, buffers: list[Tensor]) -> None:
        """Copy the `buffers` of rank 0 to all processes."""
        if not self.is_single:
            for buffer in buffers:
                torch.distributed.broadcast(buffer, src=0)

    def _flags(self) -> list[float]:
        return [float(self._signals.signum == signum) for signum in SIGNALS]


def _first_signal(counts: list[float]) -> int:
    return next((int(s) for s, count in zip(SIGNALS, counts, strict=True) if count), 0)
