"""Devices, processes and precision, resolved from the settings; stop signals and collectives.

torchrun and srun start the processes, and end the others when one has ended.
"""

import contextlib
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning_fabric.strategies import DDPStrategy
from torch import Tensor

from locality.errors import RunFailed, UserError
from locality.training.config import EngineConfig

# On a CPU bfloat16 pays off for wide models on many tokens. Training steps on a Zen 5 core, fp32
# time over bf16 time: 1.3 to 1.5 for DeiT-Ti, ConViT-Ti and -S and 1.1 to 1.2 for CvT-13 at 224
# pixels, all above 10⁹ multiply-accumulates per image; 0.4 to 1.0 for the models of small images,
# all below, at any batch size.
_BF16_MIN_MACS = 1e9

# Silences Fabric's announcement on every start; runs print this information themselves.
logging.getLogger("lightning_fabric").setLevel(logging.WARNING)

# One Ctrl-C may arrive twice, from the terminal and from a launcher such as torchrun; a later one
# counts as a second.
_REPEATED_CTRL_C_SECONDS = 1.0

# Ctrl-C, batch systems and torchrun, SLURM's warning, a closed terminal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def resolve_accelerator(wanted: str) -> str:
    """ "auto" resolved: CUDA if there is a GPU, then MPS, then the CPU.

    Raises:
        UserError: if the accelerator is not available.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    available = [*(name for name, here in present.items() if here), "cpu"]
    if wanted != "auto" and wanted not in available:
        raise UserError(
            f"engine.accelerator is '{wanted}', which this machine does not have; "
            f"available: {', '.join(available)}"
        )
    return available[0] if wanted == "auto" else wanted


def process_layout() -> tuple[int, int]:
    """Processes per machine, each with one device, and number of machines, by torchrun or srun."""
    if TorchElasticEnvironment.detect():
        local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        return local, world // local
    if SLURMEnvironment.detect():
        tasks, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ.get("SLURM_NNODES", "1"))
        return tasks // nodes, nodes
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but neither torchrun nor srun has started "
            f"this process; start it by `torchrun --nproc-per-node=2 -m locality …`, or unset it"
        )
    return 1, 1


def choose_precision(wanted: str, device_type: str, macs_per_image: float) -> str:
    """Resolve "auto" to "fp32" or "bf16-mixed"; refuse "fp16-mixed" without an NVIDIA GPU.

    "auto" is bfloat16 if the hardware supports it natively: GPUs from Ampere on, and CPUs with
    AVX512-BF16 or AMX for models large enough to gain.

    Args:
        wanted: the setting.
        device_type: where training happens: "cpu", "cuda" or "mps".
        macs_per_image: multiply-accumulates of one image's forward pass.

    Raises:
        UserError: for "fp16-mixed" on another device.
    """
    if wanted == "fp16-mixed" and device_type != "cuda":
        raise UserError(
            f"precision is fp16-mixed, which needs an NVIDIA GPU, but the device is {device_type}; "
            f"give auto, fp32 or bf16-mixed"
        )
    if wanted != "auto":
        return wanted
    fast = False
    if device_type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device_type == "cpu":
        fast = has_fast_bf16() and macs_per_image >= _BF16_MIN_MACS
    return "bf16-mixed" if fast else "fp32"


def autocast(device_type: str, precision: str) -> torch.autocast:
    """torch.autocast for a resolved precision."""
    kind = torch.float16 if precision == "fp16-mixed" else torch.bfloat16
    return torch.autocast(device_type, kind, enabled=precision != "fp32")


def has_fast_bf16() -> bool:
    """Whether this CPU supports bfloat16 natively."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def create_fabric(engine: EngineConfig) -> Fabric:
    """Lightning Fabric for the devices and processes of a run."""
    device_type = resolve_accelerator(engine.accelerator)
    devices, nodes = process_layout()
    several = devices * nodes > 1
    strategy: Any = DDPStrategy(gradient_as_bucket_view=True) if several else "auto"
    if device_type == "cpu" and not torch.cuda.is_available():
        # Otherwise torch's optimisers look for GPUs in every step, which takes 2% of a small
        # model's step.
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    if engine.deterministic:
        # cuBLAS needs it to be deterministic; it is read when CUDA starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    return Fabric(accelerator=device_type, devices=devices, num_nodes=nodes, strategy=strategy)


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums: float64, which MPS lacks."""
    return torch.float32 if device.type == "mps" else torch.float64


class SignalHandler:
    """The first signal this process has received.

    Attributes:
        signum: its number; 0 if there was none.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._since = 0.0
        self._owner = os.getpid()

    @contextlib.contextmanager
    def installed(self) -> Iterator["SignalHandler"]:
        """Handle signals within the block, unless they are ignored (by nohup, say).

        Python allows it in the main thread only.
        """
        main = threading.current_thread() is threading.main_thread()
        before = {
            signum: signal.signal(signum, self._handle)
            for signum in SIGNALS
            if main and signal.getsignal(signum) not in (signal.SIG_IGN, None)
        }
        try:
            yield self
        finally:
            for signum, previous in before.items():
                signal.signal(signum, previous)

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if os.getpid() != self._owner:
            return  # a forked data worker: the training process decides
        if not self.signum:
            self.signum, self._since = signum, time.monotonic()
            again = "; again to stop at once, without saving" if signum == signal.SIGINT else ""
            # print() is not reentrant: this handler may interrupt it.
            with contextlib.suppress(OSError):  # the terminal was closed
                os.write(2, f"\nstopping after this step and saving{again}\n".encode())
        elif signum == signal.SIGINT and time.monotonic() - self._since > _REPEATED_CTRL_C_SECONDS:
            raise KeyboardInterrupt


class Collectives:
    """Collective operations; no-ops in a run of one process.

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
        """The signal that any process has received, or 0; every process must call this."""
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


_LOST = re.compile(r"gloo|nccl|connection (closed|reset)|broken pipe|timed out", re.I)


@contextlib.contextmanager
def translate_lost_process(world_size: int) -> Iterator[None]:
    """Replace torch's error for another process of the run that ended or never came.

    Raises:
        RunFailed: in its place.
    """
    try:
        yield
    except RuntimeError as error:
        if world_size == 1 or isinstance(error, RunFailed) or not _LOST.search(str(error)):
            raise
        raise RunFailed(
            "a process of this run ended without a message; it was probably killed (out of "
            "memory?); the same command resumes from the last checkpoint"
        ) from None


def leave_group() -> None:
    """Leave the process group; called at exit, since the same processes may train again.

    Its threads hold tensors, and releasing them while the interpreter finalises would abort the
    process.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
