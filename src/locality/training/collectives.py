"""Collective operations: what the processes of a run tell each other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning_fabric import Fabric
from torch import Tensor

from locality.training.signals import SIGNALS, SignalHandler


class Collectives:
    """Sums, signals and lists over all processes; what a single process knows, if it is alone.

    Args:
        fabric: devices and processes.
        interruption: whether a signal has come to this process.
    """

    def __init__(self, fabric: Fabric, signals: SignalHandler) -> None:
        self.is_single = fabric.world_size == 1
        self._fabric = fabric
        self._signals = signals

    def all_reduce_metrics(self, total: Tensor) -> Callable[[], tuple[float, float, int]]:
        """Add up what was `measured` of a step, and signals, over all processes.

        Returns:
            what waits for the sums, which a GPU copies without waiting for what is queued after
            them: the loss of all micro-batches, right answers, and the signal to stop or 0.
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
            loss_sum, right, *flags = total.tolist()
            return loss_sum, right, _first_signal(flags) if flags else self._signals.signum

        return values

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """`tensor` added up over all processes, in place."""
        if not self.is_single:
            torch.distributed.all_reduce(tensor)
        return tensor

    def any_signal(self) -> int:
        """The signal that has come to any process, or 0; all have to ask."""
        if self.is_single:
            return self._signals.signum
        flags = torch.tensor(self._flags(), device=self._fabric.device)
        return _first_signal(self.all_reduce(flags).tolist())

    def all_gather(self, known: dict[str, str]) -> None:
        """Add to `known` what the other processes know."""
        if self.is_single:
            return
        gathered: list[dict[str, str]] = [{}] * self._fabric.world_size
        torch.distributed.all_gather_object(gathered, known)
        for other in gathered:
            known.update(other)

    def broadcast(self, buffers: list[Tensor]) -> None:
        """Give `buffers` the first process's values everywhere."""
        if not self.is_single:
            for buffer in buffers:
                torch.distributed.broadcast(buffer, src=0)

    def _flags(self) -> list[float]:
        return [float(self._signals.signum == signum) for signum in SIGNALS]


def _first_signal(counts: list[float]) -> int:
    return next((int(s) for s, count in zip(SIGNALS, counts, strict=True) if count), 0)
