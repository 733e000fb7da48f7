"""The state of a training run on disk: `resume.safetensors` and `history.json` in the stage's folder.

Parameters, AdamW moments and the best parameters so far. They are the same on all ranks, so a run goes on with any
number of them. The tensor file carries its step, so a pair that a kill tore apart is noticed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from qat.artifact import save_tensors

RESUME, HISTORY, TEACHER = "resume.safetensors", "history.json", "teacher"


def save_state(
    folder: Path,
    params: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    history: dict[str, Any],
    best: Mapping[str, Tensor],
) -> None:
    """Write parameters, AdamW moments, the best parameters (may be empty) and the history so far."""
    state: dict[str, Tensor] = {"step": torch.tensor(len(history["loss"]))}
    for name, p in params.items():
        state[f"{name}.param"] = p.detach()
        state.update({f"{name}.{k}": v for k, v in optimizer.state[p].items()})
    state |= {f"{name}.best": p for name, p in best.items()}
    temporary = folder / (HISTORY + ".part")
    temporary.write_text(json.dumps(history))
    save_tensors(state, folder / RESUME)
    temporary.replace(folder / HISTORY)


def load_state(
    folder: Path, params: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, best: dict[str, Tensor]
) -> dict[str, Any] | None:
    """Undo of `save_state`; None when there is nothing, or a pair that a kill tore apart (its part file still fits)."""
    if not (folder / RESUME).exists():
        return None
    with safe_open(folder / RESUME, framework="pt") as f:
        step = int(f.get_tensor("step"))
        for candidate in (folder / HISTORY, folder / (HISTORY + ".part")):
            history = json.loads(candidate.read_text()) if candidate.exists() else None
            if history and len(history["loss"]) == step:
                break
        else:
            return None
        held = set(f.keys())
        for name, p in params.items():
            p.data.copy_(f.get_tensor(f"{name}.param"))
            moments = {k: f.get_tensor(f"{name}.{k}") for k in ("step", "exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {k: v if k == "step" else v.to(p.device) for k, v in moments.items()}
            if f"{name}.best" in held:
                best[name] = f.get_tensor(f"{name}.best").to(p.device)
    return history


def clear_state(folder: Path) -> None:
    """Remove what `save_state` and cached teachers wrote."""
    for path in [folder / RESUME, folder / HISTORY, folder / (HISTORY + ".part"), *folder.glob(f"{TEACHER}-*")]:
        path.unlink(missing_ok=True)
