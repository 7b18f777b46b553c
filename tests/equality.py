"""Equality of nested results, bit for bit."""

from __future__ import annotations

import dataclasses

import torch

__all__ = ["same"]


def same(actual, expected, where="output"):
    """Equal structure, types and bits; says where not."""
    assert type(actual) is type(expected), f"{where}: {type(actual)} is not {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(actual, expected), f"{where}: differ by {(actual - expected).abs().max()}"
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key in expected:
            same(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            same(a, e, f"{where}[{i}]")
    elif dataclasses.is_dataclass(expected):
        same(vars(actual), vars(expected), where)
    else:
        assert actual == expected, where
