"""timm's Muon and AdaMuon, faster: one orthogonalisation for all matrices of a shape."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, cast

import timm.optim.muon as reference
import torch
from torch import Tensor
from torch.optim.adamw import adamw


def is_matrix(parameter: Tensor) -> bool:
    """timm's rule for what Muon may update: matrices, and kernels flattened to (out, in·h·w).

    Excludes vectors, depthwise kernels, embeddings (1, N, C) and whatever has fewer than four rows
    or columns, such as v_pos.
    """
    return bool(reference._is_suitable_for_muon(parameter))


class Muon(reference.Muon):
    """timm's Muon and AdaMuon: the same update and state in less time.

    Matrices of one shape are orthogonalised in one product: in bfloat16 on CUDA, as timm does
    everywhere, and in their own precision elsewhere, since most CPUs emulate bfloat16.

    Args:
        groups: each says with `use_muon` whether Muon or AdamW updates it.
        fused: use torch's fused AdamW.
        settings: of timm's class.
    """

    def __init__(self, groups: list[dict[str, Any]], fused: bool = False, **settings: Any) -> None:
        super().__init__([{"fused": fused} | group for group in groups], **settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not group["use_muon"]:
                self._adamw(parameters, group)
                continue
            shapes = defaultdict(list)
            for parameter in parameters:
                # Transposed matrices are orthogonalised to the same, transposed.
                shapes[tuple(sorted(parameter.flatten(1).shape))].append(parameter)
            for same in shapes.values():
                self._muon(same, group)
        return loss

    def _moments(self, parameters: list[Tensor], *names: str) -> list[list[Tensor]]:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] |= {name: torch.zeros_like(parameter) for name in names}
        return [[self.state[p][name] for p in parameters] for name in names]

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        means, squares = self._moments(parameters, "exp_avg", "exp_avg_sq")
        for p in parameters:
            if "step" not in self.state[p]:
                self.state[p]["step"] = torch.zeros((), device=p.device if group["fused"] else None)
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [p.grad for p in parameters],  # type: ignore[misc]
            means,
            squares,
            [],
            [self.state[p]["step"] for p in parameters],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _muon(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices of one shape, each as it is or transposed."""
        lr, eps, adaptive = group["lr"], group["eps"], group["algo"] == "adamuon"
        momenta, *squares = self._moments(parameters, "momentum_buffer", *["exp_avg_sq"] * adaptive)
        torch._foreach_lerp_(
            momenta, [cast(Tensor, p.grad) for p in parameters], 1 - group["momentum"]
        )
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        updates = _orthogonalised(momenta, group)
        if adaptive:
            beta2 = group["betas"][1]
            torch._foreach_mul_(squares[0], beta2)
            torch._foreach_addcmul_(squares[0], updates, updates, 1 - beta2)
            roots = torch._foreach_sqrt(squares[0])
            torch._foreach_add_(roots, eps)
            torch._foreach_div_(updates, roots)
            norms = torch._foreach_norm(updates)
            torch._foreach_add_(norms, eps)
            torch._foreach_div_(updates, norms)
            size = parameters[0].numel()
        else:
            size = max(parameters[0].flatten(1).shape)
        # An orthogonal matrix times 0.2 √(longer side) has the root mean square of Adam's updates.
        torch._foreach_add_(parameters, updates, alpha=-lr * 0.2 * size**0.5)


def _orthogonalised(matrices: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """U Vᵀ of each matrix U S Vᵀ, nearly, by timm's Newton-Schulz iteration over all at once."""
    flat = [matrix.flatten(1) for matrix in matrices]
    wide = torch.stack([m.mT if m.shape[0] > m.shape[1] else m for m in flat])
    found = reference.zeropower_via_newtonschulz(
        wide,
        group["ns_steps"],
        reference.resolve_ns_coefficients(group["ns_coefficients"], reference._COEFFICIENTS),
        eps=group["eps"],
        dtype=torch.bfloat16 if wide.is_cuda else wide.dtype,
    ).to(wide.dtype)
    return [
        (new if new.shape == old.shape else new.mT).reshape(matrix.shape)
        for new, old, matrix in zip(found, flat, matrices, strict=True)
    ]
