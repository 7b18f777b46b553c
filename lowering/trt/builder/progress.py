"""The builder's progress as a bar on the terminal, and the way to stop a build."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from lowering.trt.bindings import trt

__all__ = ["progress_monitor", "wants_bar"]


def wants_bar(setting: bool | None) -> bool:
    """Whether to draw a bar: as set, or on a terminal only."""
    return sys.stderr.isatty() if setting is None else setting


def progress_monitor(cancelled: threading.Event, bar: Any = None) -> Any:
    """An `IProgressMonitor` that ends the build at its next step once `cancelled` is set.

    Args:
        cancelled: set by whoever wants the build to stop; TensorRT then gives no engine.
        bar: a started `rich.progress.Progress`, or None to show nothing.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._tasks: dict[str, Any] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if bar is not None:
                indent = "  " if parent_phase else ""
                self._tasks[phase_name] = bar.add_task(indent + phase_name, total=num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if bar is not None and phase_name in self._tasks:
                bar.update(self._tasks[phase_name], completed=step + 1)
            return not cancelled.is_set()

        def phase_finish(self, phase_name: str) -> None:
            if bar is not None and phase_name in self._tasks:
                _finished(bar, self._tasks.pop(phase_name))

    return Monitor()


def _finished(bar: Any, task: Any) -> None:
    bar.update(task, completed=bar.tasks[bar.task_ids.index(task)].total)


def run_cancellable(work: Callable[[], Any], cancelled: threading.Event) -> Any:
    """`work()` in a thread of its own, so that Ctrl-C reaches this one: it sets `cancelled`, waits, and goes on.

    A KeyboardInterrupt raised inside one of TensorRT's callbacks would be swallowed there.
    """
    done = threading.Event()
    outcome: dict[str, Any] = {}

    def body() -> None:
        try:
            outcome["value"] = work()
        except BaseException as error:  # handed to the waiting thread, raised there
            outcome["error"] = error
        finally:
            done.set()

    thread = threading.Thread(target=body, name="tensorrt-build", daemon=True)
    try:
        thread.start()
        done.wait()
    except BaseException:
        cancelled.set()
        if thread.ident is not None:  # it did start
            done.wait()
        raise
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]
