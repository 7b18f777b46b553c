"""Ctrl-C during a build, in a process of its own: `python tests/interrupts.py work|build` (see `test_trt_build`)."""

from __future__ import annotations

import signal
import sys
import threading
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn
from trt_checks import lower

from lowering.trt.builder import build as build_module
from lowering.trt.builder import progress as progress_module
from lowering.trt.builder.build import build_engine
from lowering.trt.builder.progress import run_cancellable

IMAGE = torch.randn(1, 3, 8, 8)


def network():
    return lower(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), IMAGE)


def work() -> None:
    """The work is told to stop, waited for, and KeyboardInterrupt raised."""
    cancelled, main = threading.Event(), threading.get_ident()
    stopped: list[float] = []

    def body() -> None:
        time.sleep(0.05)
        assert main != threading.get_ident()
        signal.pthread_kill(main, signal.SIGINT)
        assert cancelled.wait(5)
        stopped.append(time.monotonic())

    with pytest.raises(KeyboardInterrupt):
        run_cancellable(body, cancelled)
    assert len(stopped) == 1


def build() -> None:
    """A real build stops, and the next one works."""
    main = threading.get_ident()

    class Bar:
        """Told of the first phase, it does what Ctrl-C does, and waits until that has arrived."""

        task_ids: tuple[int, ...] = ()
        interrupted = False

        def add_task(self, name: str, total: int) -> int:
            if not self.interrupted:
                Bar.interrupted = True
                signal.pthread_kill(main, signal.SIGINT)
                time.sleep(0.2)
            return 0

        def update(self, task: int, **progress: float) -> None:
            pass

    with (
        mock.patch.object(build_module, "_bar", lambda options: nullcontext(Bar())),
        mock.patch.object(progress_module, "_finished", lambda bar, task: None),
        pytest.raises(KeyboardInterrupt),
    ):
        build_engine(network(), report=False)
    assert Bar.interrupted
    assert build_engine(network(), report=False).data


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with the signal ignored
    {"work": work, "build": build}[sys.argv[1]]()
    print("as it should be")
