"""Threads that capture and lower at once, and what the process hears and keeps of it."""

from __future__ import annotations

import gc
import logging
import re
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.fx.experimental._config
from torch import nn

from fx_passes import fuse_fx, trace
from fx_passes.capture.exclusive import exclusive, in_turn, let_others
from fx_passes.capture.export import open_sizes
from fx_passes.capture.quiet import quiet_torch
from fx_passes.errors import LoweringError
from lowering import lower_to_onnx, lower_to_trt

LOGGERS = ("torch.export", "torch.onnx", "torch.fx.experimental.symbolic_shapes")
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        torch.manual_seed(channels)
        self.conv, self.norm = nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels)

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x)))
        if y.shape[2] > 100:
            raise RuntimeError("too large")
        return y.mean((2, 3))


class Refused(nn.Module):
    """Neither tracing nor torch.export takes it: both print what they have of it where they fail."""

    def forward(self, x):
        return x * 2 if bool((x.sum() > 0).item()) else x


def state() -> list[Any]:
    """What lowering must not leave changed in the process."""
    loggers = [logging.getLogger(name) for name in ("", "torch", *LOGGERS)]
    handlers = [[h for h in each.handlers if not type(h).__module__.startswith("_pytest")] for each in loggers]
    return [
        sys.stderr, sys.stdout, warnings.showwarning, list(warnings.filters), gc.isenabled(), nn.Module.__call__,
        [(each.level, each.disabled, list(each.filters)) for each in loggers], handlers,
        [list(h.filters) for each in loggers for h in each.handlers], list(logging.lastResort.filters),
        {k: v for k, v in vars(torch.fx.config).items() if k[0] != "_"}, torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.fx.experimental._config.backed_size_oblivious, torch.backends.mkldnn.enabled, torch.zeros,
        "print" in vars(sys.modules["torch.fx.graph_module"]), sys.getrecursionlimit(),
    ]  # fmt: skip


@pytest.fixture
def unchanged():
    lower_to_onnx(Net(2), IMAGES, precision="fp32")  # what is loaded for the first time stays loaded
    before = state()
    yield
    assert state() == before


def at_once(*work: Callable[[], Any]) -> list[Any]:
    """The results of functions that begin together, each on a thread of its own."""
    barrier = threading.Barrier(len(work))

    def begin(function: Callable[[], Any]) -> Any:
        barrier.wait()
        return function()

    with ThreadPoolExecutor(len(work)) as pool:
        return [future.result() for future in [pool.submit(begin, function) for function in work]]


# -- lowering on several threads --------------------------------------------------------------------------------------


def _onnx(count: int) -> float:
    worst = 0.0
    for channels in range(1, count + 1):
        model = Net(channels).eval()
        lowered = lower_to_onnx(model, IMAGES, precision="fp32", dynamic_batch=(1, 2, 4))
        assert (len(lowered.segments), lowered.fallbacks) == (1, [])
        worst = max(worst, float((lowered(IMAGES) - model(IMAGES)).detach().abs().max()))
    return worst


def _engine(precision: str) -> float:
    model = Net(4).eval()
    lowered = lower_to_trt(model, IMAGES, precision=precision, calibration=[IMAGES])
    assert (len(lowered.segments), lowered.fallbacks) == (1, [])
    return float((lowered.simulate(IMAGES) - model(IMAGES)).detach().abs().max())


def test_two_threads_lower_to_onnx(unchanged):
    assert max(at_once(lambda: _onnx(8), lambda: _onnx(8))) < 1e-5


def test_two_threads_lower_to_tensorrt(unchanged):
    pytest.importorskip("tensorrt_rtx")
    assert max(at_once(lambda: _engine("fp32"), lambda: _engine("int8"))) < 0.1


def test_two_threads_refuse(unchanged):
    def refused() -> list[str]:
        messages = []
        for _ in range(3):
            with pytest.raises(LoweringError) as error:
                lower_to_onnx(Refused(), IMAGES, precision="fp32")
            messages.append(str(error.value))
        return messages

    first, second = at_once(refused, refused)
    assert first == second
    assert len(set(first)) == 1


def test_a_thread_lowers_while_another_runs_and_prints(unchanged, capfd, recwarn):
    """What is lowered already runs meanwhile, and its thread's words come through: all of them, in their order."""
    model = Net(4).eval()
    ready, expected = lower_to_onnx(model, IMAGES, precision="fp32"), model(IMAGES)
    logger = logging.getLogger("torch.export")
    done, heard, count = threading.Event(), [], 0
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    logger.addHandler(handler)

    def lower() -> None:
        try:
            _onnx(4)
            with pytest.raises(LoweringError):
                lower_to_onnx(Refused(), IMAGES, precision="fp32")
        finally:
            done.set()

    thread = threading.Thread(target=lower)
    try:
        thread.start()
        while not done.is_set() or count < 3:
            torch.testing.assert_close(ready(IMAGES), expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(model(IMAGES), expected)
            print(f"main {count}", file=sys.stderr)
            warnings.warn(f"main {count}", UserWarning, stacklevel=1)
            logger.warning("main %d", count)
            count += 1
    finally:
        thread.join()
        logger.removeHandler(handler)
    own = [f"main {i}" for i in range(count)]
    lines = capfd.readouterr().err.splitlines()  # its logger has a handler of torch's that writes there too
    assert all(re.search(r"main \d+$", line) for line in lines)  # nothing of the other thread's
    assert [line for line in lines if "test_turns.py" not in line] == own
    assert [str(w.message) for w in recwarn if w.category is UserWarning and "main" in str(w.message)] == own
    assert [record.getMessage() for record in heard] == own


def test_capturing_takes_its_turn_too(unchanged):
    def capture() -> list[int]:
        return [len(list(fuse_fx(trace(Net(4).eval(), IMAGES)).graph.nodes)) for _ in range(10)]

    first, second = at_once(capture, capture)
    assert first == second
    assert len(set(first)) == 1


# -- the turn ---------------------------------------------------------------------------------------------------------


def _can_take_it() -> bool:
    """Whether another thread could have the turn now."""
    taken = threading.Event()

    def take() -> None:
        with exclusive():
            taken.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    got = taken.wait(0.05)
    waiting.append(thread)
    return got


waiting: list[threading.Thread] = []


def test_a_turn_is_for_one_thread_and_can_be_given_away():
    @in_turn
    def inner() -> None:
        assert not _can_take_it()
        with let_others():
            assert _can_take_it()
            with exclusive():  # what is called meanwhile may need a turn of its own
                assert not _can_take_it()
        assert not _can_take_it()
        with pytest.raises(ValueError, match="as asked"), let_others():
            raise ValueError("as asked")
        assert not _can_take_it()

    with exclusive():
        inner()
        assert not _can_take_it()
    with let_others():  # without having it
        assert _can_take_it()
    assert _can_take_it()
    for thread in waiting:
        thread.join()


def test_sizes_stay_open_until_the_last_thread_is_done():
    """One that builds an engine gives its turn away inside, and may end before the other that took it."""
    switches = torch.fx.experimental._config
    before = switches.backed_size_oblivious
    first, second = open_sizes(), open_sizes()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert switches.backed_size_oblivious is True
    second.__exit__(None, None, None)
    assert switches.backed_size_oblivious is before


# -- silence ----------------------------------------------------------------------------------------------------------


def _speak(who: str) -> None:
    warnings.warn(f"{who} warns", UserWarning, stacklevel=1)
    logging.getLogger("torch.export._trace").error("%s logs", who)
    logging.getLogger("made.by.the.user").error("%s logs itself", who)
    vars(sys.modules["torch.fx.graph_module"]).get("print", print)(f"{who} prints", file=sys.stderr)


def _heard(captured: Any, records: Any, log: Any) -> list[str]:
    lines = [line for line in captured.readouterr().err.splitlines() if line.endswith("prints")]
    said = [str(w.message) for w in records] + [r.getMessage() for r in log.records] + lines
    records.clear()
    log.clear()
    return said


def test_silence_is_for_one_thread(unchanged, capsys, recwarn, caplog):
    everything = ["{} warns", "{} logs", "{} logs itself", "{} prints"]
    with quiet_torch():
        _speak("a")
        assert _heard(capsys, recwarn, caplog) == ["a logs itself"]
        with quiet_torch(stack_traces=True):
            _speak("b")
            assert getattr(torch.fx.config, "do_not_emit_stack_traces", False) is False  # torch 2.9 has no such switch
        assert getattr(torch.fx.config, "do_not_emit_stack_traces", True) is True
        _speak("c")  # still, behind the inner block
        at_once(lambda: _speak("d"))
        assert _heard(capsys, recwarn, caplog) == [*(t.format("d") for t in everything[:1]), "b logs itself",
                                                  "c logs itself", "d logs", "d logs itself", "d prints"]  # fmt: skip
    _speak("e")
    assert _heard(capsys, recwarn, caplog) == [t.format("e") for t in everything]


def test_silence_ends_with_an_exception(unchanged):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), quiet_torch(), quiet_torch():
            raise KeyboardInterrupt


def test_warnings_as_errors_do_not_reach_torch():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _onnx(1) < 1e-5
        with pytest.raises(UserWarning, match="a warns"):
            _speak("a")


def test_filters_that_another_thread_swaps_meanwhile_lose_the_silence():
    """`catch_warnings` of another thread puts a copy of the list in place, and the list back later."""
    entered, leave = threading.Event(), threading.Event()

    def swap() -> None:
        with warnings.catch_warnings():
            entered.set()
            leave.wait(10)

    before = list(warnings.filters)
    thread = threading.Thread(target=swap)
    with quiet_torch():
        thread.start()
        assert entered.wait(10)
    leave.set()
    thread.join()
    assert list(warnings.filters) == before
