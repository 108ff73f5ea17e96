"""timm's Muon and AdaMuon with one orthogonalisation for all matrices of a shape."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import timm.optim.muon as reference
import torch
from torch import Tensor
from torch.optim.adamw import adamw


def is_matrix(parameter: Tensor) -> bool:
    """timm's rule for what Muon may update: matrices, and convolution kernels flattened to them.

    Vectors, depthwise kernels, embeddings (1, N, C) and what has fewer than 4 rows or columns, such
    as v_pos, are not.
    """
    return bool(reference._is_suitable_for_muon(parameter))


class Muon(reference.Muon):
    """timm's Muon and AdaMuon, the same update and state, in less time.

    Matrices of one shape are orthogonalised in one product: in bfloat16 on GPUs, as timm does
    everywhere, and in their own precision elsewhere, since most CPUs emulate bfloat16. Groups with
    `use_muon=False` are updated by torch's fused AdamW.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not group["use_muon"]:
                self._adamw(parameters, group)
                continue
            shapes = defaultdict(list)
            for parameter in parameters:
                # The update of a transposed matrix is the transposed update.
                shapes[tuple(sorted(parameter.flatten(1).shape))].append(parameter)
            for same in shapes.values():
                self._muon(same, group)
        return loss

    def _moments(self, parameters: list[Tensor], names: tuple[str, ...]) -> list[list[Tensor]]:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state |= {name: torch.zeros_like(parameter) for name in names}
                state["step"] = torch.zeros((), device=parameter.device)
        return [[self.state[p][name] for p in parameters] for name in (*names, "step")]

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        means, squares, steps = self._moments(parameters, ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            means,
            squares,
            [],
            steps,
            fused=parameters[0].device.type in ("cpu", "cuda"),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _muon(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices of the same shape, (m, n) or (n, m)."""
        adaptive, lr, eps = group["algo"] == "adamuon", group["lr"], group["eps"]
        names = ("momentum_buffer", "exp_avg_sq") if adaptive else ("momentum_buffer",)
        momenta, *rest = self._moments(parameters, names)
        grads = [parameter.grad for parameter in parameters]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        updates = _orthogonalized(momenta, group)
        if not adaptive:
            rows, columns = parameters[0].flatten(1).shape
            torch._foreach_add_(parameters, updates, alpha=-lr * 0.2 * max(rows, columns) ** 0.5)
            return
        squares, beta2 = rest[0], group["betas"][1]
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, updates, updates, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, eps)
        torch._foreach_div_(updates, roots)
        norms = torch._foreach_norm(updates)
        torch._foreach_add_(norms, eps)
        torch._foreach_div_(updates, norms)
        torch._foreach_add_(parameters, updates, alpha=-lr * 0.2 * parameters[0].numel() ** 0.5)


def _orthogonalized(matrices: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """The nearest orthogonal matrices, by timm's Newton-Schulz iteration over all at once."""
    tall = [m.shape[0] > m[0].numel() for m in matrices]
    flat = [m.flatten(1) for m in matrices]
    stacked = torch.stack([m.mT if t else m for m, t in zip(flat, tall, strict=True)])
    found = reference.zeropower_via_newtonschulz(
        stacked,
        group["ns_steps"],
        reference.resolve_ns_coefficients(group["ns_coefficients"], reference._COEFFICIENTS),
        eps=group["eps"],
        dtype=torch.bfloat16 if stacked.is_cuda else stacked.dtype,
    ).to(stacked.dtype)
    return [
        (new.mT if t else new).reshape(old.shape)
        for new, t, old in zip(found, tall, matrices, strict=True)
    ]
