"""Devices and processes: which there are, what they tell each other, and how they end.

A signal raises a flag, and training stops at the next step boundary.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning_fabric.strategies import DDPStrategy
from torch import Tensor

from locality.errors import UserError
from locality.training.config import EngineConfig

# How Fabric calls what `engine.strategy` says.
_START_METHODS = {"ddp_spawn": "spawn", "ddp_fork": "fork"}

# On a processor bfloat16 pays for wide models on many tokens. Training steps on a Zen 5 core, fp32
# time over bf16 time: 1.3 to 1.5 for DeiT-Ti, ConViT-Ti and -S and 1.1 to 1.2 for CvT-13 at 224
# pixels, all above 10⁹ multiply-accumulates per image; 0.4 to 1.0 for the models of small images,
# all below, in whatever batch.
_WORTHWHILE_MACS = 1e9

# Fabric announces on every start what a run prints itself.
logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
# And torch that it ends the other processes when one has.
logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)

# Both a terminal and a launcher such as torchrun pass Ctrl-C on; only what comes later than this
# is a second one.
_SAME_CTRL_C_SECONDS = 1.0

# What asks a run to stop: Ctrl-C, batch systems, torchrun, a closed terminal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def resolve_accelerator(wanted: str) -> str:
    """ "auto" resolved: CUDA if there is a GPU, then Apple's, then the processor.

    Raises:
        UserError: if the one asked for is not there.
    """
    there = ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()
    there.append("cpu")
    if wanted != "auto" and wanted not in there:
        raise UserError(
            f"engine.accelerator is '{wanted}', which this machine does not have; "
            f"available: {', '.join(there)}"
        )
    return there[0] if wanted == "auto" else wanted


def launched_from_outside() -> bool:
    """Whether torchrun or srun has started this process, and the others if there are any."""
    return TorchElasticEnvironment.detect() or SLURMEnvironment.detect()


def layout(engine: EngineConfig, device_type: str) -> tuple[int, int]:
    """Processes per machine, and machines; torchrun and srun know better than the settings.

    Raises:
        UserError: if there are fewer devices than asked for.
    """
    if TorchElasticEnvironment.detect():
        local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        return local, world // local
    if SLURMEnvironment.detect():
        tasks, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ.get("SLURM_NNODES", "1"))
        return tasks // nodes, nodes
    there = torch.cuda.device_count() if device_type == "cuda" else 1
    if device_type == "cuda" and engine.devices > there:
        raise UserError(f"engine.devices is {engine.devices} and there are {there} GPUs")
    return engine.devices or there, engine.num_nodes


def choose_precision(wanted: str, device_type: str, macs_per_image: float) -> str:
    """Resolve "auto" to "fp32" or "bf16-mixed", and refuse "fp16-mixed" without a GPU of NVIDIA's.

    bfloat16 where the hardware multiplies it natively: GPUs from Ampere on, processors with
    AVX512-BF16 or AMX, the latter only for models large enough to gain from it.

    Args:
        wanted: "auto", or a choice already made.
        device_type: where training happens: "cpu", "cuda" or "mps".
        macs_per_image: multiply-accumulates of one image's forward pass.

    Raises:
        UserError: for "fp16-mixed" elsewhere.
    """
    if wanted == "fp16-mixed" and device_type != "cuda":
        raise UserError(
            f"precision is fp16-mixed, which needs an NVIDIA GPU, and this is for {device_type}; "
            f"give auto, fp32 or bf16-mixed"
        )
    if wanted != "auto":
        return wanted
    fast = False
    if device_type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device_type == "cpu":
        fast = has_fast_bf16() and macs_per_image >= _WORTHWHILE_MACS
    return "bf16-mixed" if fast else "fp32"


def autocast(device_type: str, precision: str) -> torch.autocast:
    """The block in which a model computes in a precision, resolved."""
    kind = torch.float16 if precision == "fp16-mixed" else torch.bfloat16
    return torch.autocast(device_type, kind, enabled=precision != "fp32")


def has_fast_bf16() -> bool:
    """Whether this processor multiplies bfloat16 natively."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def create_fabric(engine: EngineConfig) -> Fabric:
    """Lightning Fabric for the devices and processes of a run."""
    device_type = resolve_accelerator(engine.accelerator)
    devices, nodes = layout(engine, device_type)
    strategy: Any = "auto"
    if devices * nodes > 1 or engine.strategy != "auto":
        strategy = DDPStrategy(
            start_method=_START_METHODS.get(engine.strategy, "popen"),  # type: ignore[arg-type]
            gradient_as_bucket_view=True,
        )
    if device_type == "cpu" and not torch.cuda.is_available():
        # torch's optimisers ask for GPUs on every step. Where there are none, looking for NVIDIA's
        # library each time costs 2% of a small model's step; told that none is visible, they ask
        # no further.
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    if engine.deterministic:
        # Read when CUDA starts; without it cuBLAS may choose another algorithm each time.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    return Fabric(accelerator=device_type, devices=devices, num_nodes=nodes, strategy=strategy)


class Interruption:
    """Remembers the first signal that came.

    Attributes:
        signum: its number; 0 while none has come.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._since = 0.0
        self._owner = os.getpid()

    @contextlib.contextmanager
    def listening(self) -> Iterator[Interruption]:
        """Handle signals within the block, in the main thread only (Python allows no other)."""
        with _handled(self._handle):
            yield self

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if os.getpid() != self._owner:
            return  # a forked data worker: the training process decides
        if not self.signum:
            self.signum, self._since = signum, time.monotonic()
            again = "; again to stop at once, without saving" if signum == signal.SIGINT else ""
            # print() may be interrupted by this very handler and is not reentrant.
            with contextlib.suppress(OSError):  # nobody reads it when the terminal was closed
                os.write(2, f"\nstopping after this step and saving{again}\n".encode())
        elif signum == signal.SIGINT and time.monotonic() - self._since > _SAME_CTRL_C_SECONDS:
            raise KeyboardInterrupt


def forwarded_to_children() -> AbstractContextManager[None]:
    """Within the block, pass signals on to the processes this one has started, and live on."""

    def forward(signum: int, _: FrameType | None) -> None:
        for child in multiprocessing.active_children():
            if child.pid is not None:
                os.kill(child.pid, signum)

    return _handled(forward)


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within the block, `handler` gets the signals that are not ignored (by nohup, say)."""
    main = threading.current_thread() is threading.main_thread()  # the only one that may
    before = {
        signum: signal.signal(signum, handler)
        for signum in SIGNALS
        if main and signal.getsignal(signum) not in (signal.SIG_IGN, None)
    }
    try:
        yield
    finally:
        for signum, previous in before.items():
            signal.signal(signum, previous)


class Processes:
    """Sums, signals and lists over all processes; what a single process knows, if it is alone.

    Args:
        fabric: devices and processes.
        interruption: whether a signal has come to this process.
    """

    def __init__(self, fabric: Fabric, interruption: Interruption) -> None:
        self.alone = fabric.world_size == 1
        self._fabric = fabric
        self._interruption = interruption

    def share(self, total: Tensor) -> Callable[[], tuple[float, float, int]]:
        """Add up what was `measured` of a step, and signals, over all processes.

        Returns:
            what waits for the sums, which a GPU copies without waiting for what is queued after
            them: the loss of all micro-batches, right answers, and the signal to stop or 0.
        """
        if not self.alone:
            total = self.sum(torch.cat((total, total.new_tensor(self._flags()))))
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
            return loss_sum, right, _signal_of(flags) if flags else self._interruption.signum

        return values

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` added up over all processes, in place."""
        if not self.alone:
            torch.distributed.all_reduce(tensor)
        return tensor

    def signal(self) -> int:
        """The signal that has come to any process, or 0; all have to ask."""
        if self.alone:
            return self._interruption.signum
        flags = torch.tensor(self._flags(), device=self._fabric.device)
        return _signal_of(self.sum(flags).tolist())

    def gather(self, known: dict[str, str]) -> None:
        """Add to `known` what the other processes know."""
        if self.alone:
            return
        gathered: list[dict[str, str]] = [{}] * self._fabric.world_size
        torch.distributed.all_gather_object(gathered, known)
        for other in gathered:
            known.update(other)

    def equalise(self, buffers: list[Tensor]) -> None:
        """Give `buffers` the first process's values everywhere."""
        if not self.alone:
            for buffer in buffers:
                torch.distributed.broadcast(buffer, src=0)

    def _flags(self) -> list[float]:
        return [float(self._interruption.signum == signum) for signum in SIGNALS]


def _signal_of(counts: list[float]) -> int:
    return next((int(s) for s, count in zip(SIGNALS, counts, strict=True) if count), 0)


def measured(loss: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """A batch's mean loss and its number of right answers, (2,).

    After mixing, the class that makes up most of an image counts as right.
    """
    labels = targets if targets.ndim == 1 else targets.argmax(dim=1)
    right = (logits.argmax(dim=1) == labels).sum()
    kind = exact(loss.device)
    return torch.stack((loss.detach().to(kind), right.to(kind)))


def exact(device: torch.device) -> torch.dtype:
    """The dtype to add up in: float64, which Apple's GPUs do not have."""
    return torch.float32 if device.type == "mps" else torch.float64
