"""Devices, processes and precision, resolved from the settings."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning_fabric.strategies import DDPStrategy

from locality.errors import UserError
from locality.training.config import EngineConfig

# On a CPU bfloat16 pays off for wide models on many tokens. Training steps on a Zen 5 core, fp32
# time over bf16 time: 1.3 to 1.5 for DeiT-Ti, ConViT-Ti and -S and 1.1 to 1.2 for CvT-13 at 224
# pixels, all above 10⁹ multiply-accumulates per image; 0.4 to 1.0 for the models of small images,
# all below, at any batch size.
_BF16_MIN_MACS = 1e9

# Silences Fabric's announcement on every start; runs print this information themselves.
logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
# But not which process has failed, before it kills the others.
logging.getLogger("lightning_fabric.strategies.launchers.subprocess_script").setLevel(logging.INFO)
# Silences torch's message that it ends the other processes when one has ended.
logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)


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


def launched_externally() -> bool:
    """Whether torchrun or srun started this process."""
    return TorchElasticEnvironment.detect() or SLURMEnvironment.detect()


def process_layout(engine: EngineConfig, device_type: str) -> tuple[int, int]:
    """Processes per machine and number of machines; torchrun and srun override the setting.

    Raises:
        UserError: if there are fewer GPUs than `engine.devices`.
    """
    if TorchElasticEnvironment.detect():
        local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        return local, world // local
    if SLURMEnvironment.detect():
        tasks, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ.get("SLURM_NNODES", "1"))
        return tasks // nodes, nodes
    count = torch.cuda.device_count() if device_type == "cuda" else 1
    if device_type == "cuda" and engine.devices > count:
        raise UserError(f"engine.devices is {engine.devices}, but there are {count} GPUs")
    return engine.devices or count, 1


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
    devices, nodes = process_layout(engine, device_type)
    strategy: Any = "auto"
    if devices * nodes > 1 or engine.strategy != "auto":
        start: Any = "fork" if engine.strategy == "ddp_fork" else "popen"
        strategy = DDPStrategy(start_method=start, gradient_as_bucket_view=True)
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
