"""NMS."""

from __future__ import annotations

import torch

from lowering.trt.reference.kernel import Kernel, Layer

__all__ = ["nms"]


def nms(layer: Layer) -> Kernel:
    """Inputs: boxes (B, N, 4) or (B, N, C, 4), scores (B, N, C), boxes per class (0-D), IoU and score thresholds.

    Gives rows (batch, class, box) by batch, then by falling score, and their number.
    """
    name = str(layer.record.attributes.get("indices_type", "INT32"))
    index_type = {"INT32": torch.int32, "INT64": torch.int64}[name]
    centered, limit = layer["bounding_box_format"] == "CENTER_SIZES", int(layer["topk_box_limit"])

    def run(
        boxes: torch.Tensor,
        scores: torch.Tensor,
        per_class: torch.Tensor,
        iou: torch.Tensor | None = None,
        threshold: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        most, overlap = int(per_class), 0.0 if iou is None else float(iou)
        least = float("-inf") if threshold is None else float(threshold)
        rows: list[tuple[int, int, int]] = []
        for batch in range(scores.shape[0]):
            found: list[tuple[float, int, int]] = []
            for label in range(scores.shape[2]):
                own = boxes[batch, :, label] if boxes.ndim == 4 else boxes[batch]
                score = scores[batch, :, label]
                kept = _suppress(_corners(own, centered), score, most, overlap, least, limit)
                found += [(float(score[i]), label, i) for i in kept]
            found.sort(key=lambda item: -item[0])
            rows += [(batch, label, box) for _, label, box in found]
        selected = torch.tensor(rows, dtype=index_type).reshape(-1, 3)
        return selected, torch.tensor(len(rows), dtype=torch.int32)

    return Kernel(run, (name, "INT32"), exact=True)


def _corners(boxes: torch.Tensor, centered: bool) -> torch.Tensor:
    """(N, 4) as lower and upper corners, whichever diagonal was given."""
    first, second = boxes[:, :2], boxes[:, 2:]
    if centered:
        first, second = first - second / 2, first + second / 2
    return torch.cat((torch.minimum(first, second), torch.maximum(first, second)), 1)


def _suppress(
    corners: torch.Tensor, scores: torch.Tensor, most: int, overlap: float, least: float, limit: int
) -> list[int]:
    """Indices of the boxes that no better box overlaps by more than `overlap`."""
    order = torch.sort(scores, descending=True, stable=True).indices
    order = order[scores[order] > least][:limit]
    area = (corners[:, 2:] - corners[:, :2]).prod(1)
    kept: list[int] = []
    while order.numel() and len(kept) < most:
        best, order = int(order[0]), order[1:]
        kept.append(best)
        low = torch.maximum(corners[best, :2], corners[order, :2])
        high = torch.minimum(corners[best, 2:], corners[order, 2:])
        common = (high - low).clamp(min=0).prod(1)
        union = area[best] + area[order] - common
        order = order[~(common > overlap * union)]
    return kept
