"""Which weights are zero: gradual pruning, and RigL."""

from __future__ import annotations

import math
from typing import List

import torch
from torch import nn

from .sizes import targets


class Pruning:
    """Zhu and Gupta's schedule: the sparsity rises with a cubic curve from step 0 to three quarters of training."""

    every = 10

    def __init__(self, model: nn.Module, kept: int, steps: int) -> None:
        self.weights, self.kept, self.end = targets(model), kept, max(1, int(0.75 * steps))
        self.masks = [torch.ones_like(weight) for weight in self.weights]

    def before(self, step: int) -> None:
        """Pruned weights get gradients, and are set to zero after the step."""

    @torch.no_grad()
    def after(self, step: int) -> None:
        if step == self.end or (step < self.end and step % self.every == 0):
            # One threshold for all layers. What was pruned is zero, so it stays pruned.
            sizes = torch.cat([weight.abs().reshape(-1) for weight in self.weights])
            kept = self.kept + int((len(sizes) - self.kept) * (1 - step / self.end) ** 3)
            chosen = torch.zeros_like(sizes).index_fill_(0, sizes.topk(kept).indices, 1.0)
            pieces = chosen.split([weight.numel() for weight in self.weights])
            self.masks = [piece.reshape(weight.shape) for piece, weight in zip(pieces, self.weights)]
        for weight, mask in zip(self.weights, self.masks):
            weight.mul_(mask)


class RigL:
    """A sparse net from the start: now and then its smallest weights go, and those with the largest gradients come."""

    every, fraction = 20, 0.3

    def __init__(self, model: nn.Module, kept: int, steps: int) -> None:
        self.weights, self.end = targets(model), int(0.75 * steps)
        self.masks = []
        for weight, count in zip(self.weights, self.erdos_renyi(kept)):
            mask = torch.zeros(weight.numel())
            mask[torch.randperm(weight.numel())[:count]] = 1
            self.masks.append(mask.reshape(weight.shape))
            weight.data.mul_(self.masks[-1])

    def erdos_renyi(self, kept: int) -> List[int]:
        """Numbers of weights per layer: density in proportion to (sum of the shape) / (product of the shape), 1 at most."""
        raw = [float(sum(weight.shape)) for weight in self.weights]  # density times size
        full = [False] * len(raw)
        while True:
            free = kept - sum(w.numel() for w, f in zip(self.weights, full) if f)
            factor = free / sum(r for r, f in zip(raw, full) if not f)
            over = [not f and factor * r > w.numel() for w, r, f in zip(self.weights, raw, full)]
            if not any(over):
                return [w.numel() if f else int(factor * r) for w, r, f in zip(self.weights, raw, full)]
            full = [f or o for f, o in zip(full, over)]

    @torch.no_grad()
    def before(self, step: int) -> None:
        """Drop and grow, then no gradient outside the mask."""
        for index, weight in enumerate(self.weights):
            mask = self.masks[index].reshape(-1)
            count = int(self.fraction / 2 * (1 + math.cos(math.pi * step / self.end)) * mask.sum())
            count = min(count, int((1 - mask).sum()))
            if 0 < step < self.end and step % self.every == 0 and count:
                size = weight.abs().reshape(-1).masked_fill(mask == 0, math.inf)
                gradient = weight.grad.abs().reshape(-1).masked_fill(mask == 1, -math.inf)  # type: ignore[union-attr]
                mask[size.topk(count, largest=False).indices] = 0
                mask[gradient.topk(count).indices] = 1
                weight.mul_(self.masks[index])  # the new ones are zero already
            weight.grad.mul_(self.masks[index])  # type: ignore[union-attr]

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Adam's momentum moves dropped weights too."""
        for weight, mask in zip(self.weights, self.masks):
            weight.mul_(mask)
