"""The training loop: optimizers, schedule, checkpoints, and the cores that share the work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from demo.model import Model

WARM_UP = 0.02
FINAL_RATE = 0.02
CHECKPOINT_S = 240.0
REPORT_S = 30.0
STEP_PIECES = 4
MUON_PARTS = 2


def device() -> torch.device:
    """A GPU if torch finds one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def precision(where: torch.device) -> AbstractContextManager:
    """bfloat16 for matrix products where the hardware has them: 1.5 to 2 times as fast on such a CPU."""
    fast = where.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.autocast(where.type, dtype=torch.bfloat16, enabled=fast)


class Crew:
    """Threads that each take whole pieces of a step. They meet once per step, not once per matrix product, so that a
    machine with other work on it doesn't make one core wait for another all the time."""

    def __init__(self, size: int) -> None:
        torch.set_num_threads(1)
        self.size = size
        self._pool = ThreadPoolExecutor(size, initializer=torch.set_num_threads, initargs=(1,))

    def map(self, work: Callable, pieces: Iterable) -> list:
        """`work` done on each of `pieces`."""
        return list(self._pool.map(work, pieces))


class Optimizer:
    """Muon for the matrices of the blocks, AdamW for the embedding and the norms; one cosine schedule for both."""

    def __init__(self, model: Model, matrix_rate: float, table_rate: float, crew: Crew) -> None:
        self.crew = crew
        matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
        norms = [p for p in model.parameters() if p.ndim == 1]
        groups = [
            {"params": [model.embed.weight], "weight_decay": 0.01},
            {"params": norms, "weight_decay": 0.0},
        ]
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, lr=table_rate, betas=(0.9, 0.97), fused=True)
        ]
        for i in range(MUON_PARTS):
            share = matrices[i::MUON_PARTS]
            muon = torch.optim.Muon(share, lr=matrix_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
            self.parts.append(muon)
        self.rates = [table_rate] + [matrix_rate] * MUON_PARTS

    def step(self, progress: float) -> None:
        """One update at `progress` (0 to 1) of the run."""
        warm = min(1.0, progress / WARM_UP)
        cosine = FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress))
        for part, rate in zip(self.parts, self.rates, strict=True):
            for group in part.param_groups:
                group["lr"] = rate * max(warm, 0.01) * cosine
        self.crew.map(lambda part: part.step(), self.parts)


def gradients(model: Model, crew: Crew, loss_of: Callable[[float], tuple[Tensor, int]], progress: float) -> float:
    """Fills the gradients of `model` from `STEP_PIECES` batches; returns the mean loss per counted token."""
    parameters = list(model.parameters())

    def piece(_number: int) -> tuple[float, int, tuple[Tensor, ...]]:
        loss, tokens = loss_of(progress)
        return loss.item(), tokens, torch.autograd.grad(loss, parameters)

    done = crew.map(piece, range(STEP_PIECES))
    tokens = sum(n for _, n, _ in done)
    for i, parameter in enumerate(parameters):
        parameter.grad = torch.stack([grads[i] for *_, grads in done]).sum(0) / tokens
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    return sum(loss for loss, *_ in done) / tokens if torch.isfinite(norm) else float("nan")


def fit(
    model: Model,
    optimizer: Optimizer,
    loss_of: Callable[[float], tuple[Tensor, int]],
    minutes: float,
    checkpoint: Path,
    state: dict[str, Callable],
    probe: Callable[[], str],
    say: Callable[[str], None],
) -> float:
    """Trains `model` for `minutes` of wall-clock time and returns the minutes used, earlier runs included.

    `loss_of(progress)` draws a batch and gives its summed loss and how many tokens that counts. `state` has "get" and
    "set" for the sampler's own state. A checkpoint at `checkpoint` is taken up where it stopped.
    """
    spent, step = 0.0, 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(saved["model"])
        for part, values in zip(optimizer.parts, saved["optimizer"], strict=True):
            part.load_state_dict(values)
        state["set"](saved["state"])
        spent, step = saved["spent"], saved["step"]
        say(f"resumed {checkpoint.name} at step {step}, {spent / 60:.1f} min")

    def save() -> None:
        parts = [part.state_dict() for part in optimizer.parts]
        values = {"model": model.state_dict(), "optimizer": parts, "state": state["get"]()}
        partial = checkpoint.with_suffix(".tmp")
        torch.save(values | {"spent": spent, "step": step}, partial)
        partial.replace(checkpoint)

    budget = minutes * 60
    last = saved_at = reported = time.monotonic()
    losses: list[float] = []
    reports = 0
    model.train()
    while spent < budget:
        progress = spent / budget
        losses.append(gradients(model, optimizer.crew, loss_of, progress))
        optimizer.step(progress)
        step += 1
        now = time.monotonic()
        spent, last = spent + now - last, now
        if now - reported > REPORT_S:
            reports += 1
            figures = f"  {probe()}" if reports % 4 == 0 else ""
            say(f"step {step}  {spent / 60:5.1f}/{minutes:.1f} min  loss {sum(losses) / len(losses):.4f}{figures}")
            losses.clear()
            reported = time.monotonic()
        if now - saved_at > CHECKPOINT_S:
            save()
            saved_at = now
    save()
    model.eval()
    say(f"done after {step} steps, {spent / 60:.1f} min; {probe()}")
    return spent / 60
