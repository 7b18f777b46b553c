"""What an engine's layer report adds up to, for people: kernels, int8 share, kernels that only quantize, the floor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowering.roofline import engine_floor

__all__ = ["engine_facts"]


def engine_facts(report: Mapping[str, Any], gpu: str | None = None) -> dict[str, str]:
    """Name and value of everything that tells how good an engine is, in the order to show it in.

    Args:
        report: a `LayerReport` as plain data.
        gpu: name of the GPU to give the roofline floor on.

    Raises:
        InputError: an unknown GPU, or rows of an older version, which no floor can be computed from.
    """
    int8, others, rows = report["int8_compute"], report["float_compute"], report["rows"]
    facts = {
        "kernels": str(report["kernels"]),
        "convolutions and matmuls in int8": f"{int8} of {int8 + others}",
    }
    for kind, text in (("quantize", "kernels that only quantize"), ("reformat", "kernels that only move or cast")):
        found = [row["bytes"] for row in rows if row.get("overhead") == kind]
        facts[text] = f"{len(found)}, {sum(found) / 1e6:.2f} MB"
    facts["activations moved"] = f"{report['activation_bytes'] / 1e6:.1f} MB"
    facts["weights"] = f"{report['weight_bytes'] / 1e6:.1f} MB"
    if gpu is not None:
        floor = engine_floor(rows, gpu)
        facts[f"floor on {floor.gpu}"] = f"{floor.total_us:.1f} us"
        facts["  to move the bytes"] = f"{floor.memory_us:.1f} us"
        facts["  to do the operations"] = f"{floor.compute_us:.1f} us"
        facts["  to launch the kernels"] = f"{floor.launch_us:.1f} us"
    return facts
