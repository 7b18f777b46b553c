"""What the tests of capture share: a seeded input, and what a graph calls."""

from __future__ import annotations

import torch

__all__ = ["image", "targets"]


def image(n=2, c=3, h=4, w=5, seed=0):
    return torch.randn(n, c, h, w, generator=torch.Generator().manual_seed(seed))


def targets(gm):
    return [n.target for n in gm.graph.nodes]
