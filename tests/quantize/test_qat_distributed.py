"""Quantization-aware training under DistributedDataParallel, in two gloo processes."""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor, nn

from fx_passes import convert_fx, prepare_qat_fx

torch.set_num_threads(1)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))


def _batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(4, 3, 8, 8, generator=generator) * (i + 1) for i in range(6)]


def _trained(rank: int, learned: bool) -> tuple[bool, dict[str, Any]]:
    """Whether the conversion gives what was validated, and the weights, the scales and the outputs."""
    from torch.nn.parallel import DistributedDataParallel

    qat = prepare_qat_fx(_net(), target="onnxruntime", learned_step=learned).train()
    model = DistributedDataParallel(qat)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for batch in _batches()[rank::2]:
        optimizer.zero_grad()
        (model(batch) - 1.0).square().mean().backward()
        optimizer.step()
    x = _batches()[0]
    with torch.no_grad():
        validated = model.eval()(x)  # which takes over the buffers of rank 0, as those of a BatchNorm
    kept = {key: value.tolist() for key, value in qat.state_dict().items() if key.endswith(("weight", "scale", "step"))}
    return torch.equal(convert_fx(qat)(x), validated), {**kept, "output": validated.tolist()}


def _worker(rank: int, port: int, answers: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        answers.put((rank, [_trained(rank, learned) for learned in (False, True)]))
    finally:
        dist.destroy_process_group()


def test_ranks_train_one_model():
    """With ranges that follow the data, and with learned ones, whose first values come from different batches."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")  # autograd's threads do not survive a fork
    answers = context.Queue()
    processes = [context.Process(target=_worker, args=(rank, port, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=240) for _ in processes)
    for process in processes:
        process.join(timeout=60)
    for (exact, first), (other_exact, second) in zip(found[0], found[1], strict=True):
        assert exact and other_exact
        assert first == second
