"""From a network definition to a serialized engine and the report on its layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from fx_passes.errors import BackendUnavailableError, BuildError, InputError
from lowering.trt.bindings import BuilderLog, collect_log, has, trt
from lowering.trt.capabilities import offered, resolve_capabilities
from lowering.trt.layers import LayerReport, layer_report
from lowering.trt.network import Network, build_network
from lowering.trt.progress import progress_monitor, run_cancellable, wants_bar

__all__ = ["BuildOptions", "Engine", "build_engine"]


@dataclass(frozen=True)
class BuildOptions:
    """What the builder can be told.

    Args:
        optimization_level: 0 to 5; None: the builder's own.
        workspace_bytes: upper limit of scratch memory in bytes; None: the builder's own.
        version_compatible: the engine may be run by later TensorRT versions of the same major number.
        hardware_compatible: the engine runs on Ampere and newer GPUs (TensorRT; RTX engines are portable anyway).
        strip_weights: leave out weights that a refit can restore.
        refit: allow the weights to be replaced later.
        progress: show a bar; None: on a terminal only.
    """

    optimization_level: int | None = None
    workspace_bytes: int | None = None
    version_compatible: bool = False
    hardware_compatible: bool = False
    strip_weights: bool = False
    refit: bool = False
    progress: bool | None = None

    @classmethod
    def of(cls, settings: Any) -> BuildOptions:
        """Options from an object that has some of these attributes, such as `lowering.Settings`, or None."""
        if isinstance(settings, cls):
            return settings
        options: dict[str, Any] = {f.name: getattr(settings, f.name, f.default) for f in fields(cls)}
        return cls(**options)


@dataclass(frozen=True)
class Engine:
    """A serialized engine.

    Attributes:
        data: the bytes of the engine file.
        report: its kernels and bytes.
        compute_capabilities: what it was built for; None: portable (RTX), or this machine's GPU (TensorRT).
        log: everything TensorRT said while building.
    """

    data: bytes
    report: LayerReport
    compute_capabilities: tuple[str, ...] | None
    log: BuilderLog


def build_engine(
    network: Network, *, compute_capabilities: Any = None, settings: Any = None, report: bool = True
) -> Engine:
    """Build the engine of a network.

    Args:
        network: from `build_network`.
        compute_capabilities: "8.9", "sm89", "RTX 4090", or a list, all in one engine; None: one portable engine.
        settings: a `BuildOptions`, a `lowering.Settings` or None.
        report: a dynamic network is built a second time, static at its opt shape, to count the bytes it moves; False
            leaves that out (`activation_bytes` then counts free dimensions as 1).

    Raises:
        BuildError: TensorRT gives no engine; the text is the first error of its log and names the layer.
        InputError: a capability that this TensorRT does not offer.
        KeyboardInterrupt: Ctrl-C stops the build at its next step.
    """
    options = BuildOptions.of(settings)
    capabilities = _check_capabilities(network, compute_capabilities)
    data, log = _build(network, capabilities, options)
    opt_log = None
    if report and network.profiles and network.program is not None:
        static = build_network(network.program, name=network.name, static_at=network.profiles[0])
        opt_log = _build(static, capabilities, options)[1].text
    layers = layer_report(log.text, len(data), opt_log, capabilities)
    return Engine(data, layers, capabilities, log)


def _check_capabilities(network: Network, wanted: Any) -> tuple[str, ...] | None:
    capabilities = resolve_capabilities(wanted)
    if capabilities is not None and "7.5" in capabilities and len(capabilities) > 1 and network.quantized:
        # with SM75 in the list every target's convolutions are listed as Float
        raise InputError(
            "an int8 engine for 7.5 together with newer GPUs would run in float on all of them",
            hint="lower for 7.5 separately",
        )
    return capabilities


def _build(network: Network, capabilities: Sequence[str] | None, options: BuildOptions) -> tuple[bytes, BuilderLog]:
    cancelled = threading.Event()
    log = BuilderLog()
    config = network.builder.create_builder_config()
    with collect_log(log):
        _configure(network, config, capabilities, options, log)

    def work() -> bytes | None:
        with collect_log(log):
            plan = network.builder.build_serialized_network(network.definition, config)
        return None if plan is None else bytes(plan)

    with _bar(options) as bar:
        config.progress_monitor = progress_monitor(cancelled, bar)
        data = run_cancellable(work, cancelled)
    if data is None:
        raise _failure(network, log)
    return data, log


def _configure(
    network: Network, config: Any, capabilities: Sequence[str] | None, options: BuildOptions, log: BuilderLog
) -> None:
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    for flag, wanted in (
        ("VERSION_COMPATIBLE", options.version_compatible),
        ("STRIP_PLAN", options.strip_weights),
        ("REFIT", options.refit),
    ):
        if wanted:
            config.set_flag(getattr(trt.BuilderFlag, flag))
    if options.version_compatible and has("BuilderFlag.EXCLUDE_LEAN_RUNTIME"):
        config.set_flag(trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)  # the lean runtime is a library of its own, often absent
    if options.hardware_compatible and network.flavour != "rtx":
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    if capabilities and network.flavour == "rtx":
        known = offered()
        config.num_compute_capabilities = len(capabilities)
        for index, capability in enumerate(capabilities):
            config.set_compute_capability(getattr(trt.ComputeCapability, known[capability]), index)
    _add_profiles(network, config, log)
    if log.errors:
        raise BuildError(f"TensorRT refuses a build setting: {log.errors[0].strip()}")


def _add_profiles(network: Network, config: Any, log: BuilderLog) -> None:
    for index, shapes in enumerate(network.profiles):
        profile = network.builder.create_optimization_profile()
        for name, (smallest, typical, largest) in shapes.items():
            profile.set_shape(name, tuple(smallest), tuple(typical), tuple(largest))
        if config.add_optimization_profile(profile) < 0:
            text = log.errors[0].strip() if log.errors else "no reason given"
            raise BuildError(
                f"TensorRT refuses optimization profile {index}: {text}", hint="sizes must be min <= opt <= max"
            )


def _failure(network: Network, log: BuilderLog) -> BuildError | BackendUnavailableError:
    text = log.errors[0].strip() if log.errors else "no reason given"
    definition = network.definition
    layers = (definition.get_layer(i) for i in range(definition.num_layers))
    named = list(dict.fromkeys(layer.metadata.strip("[]") for layer in layers if layer.name in text))
    where = f" (in {', '.join(named[:3])})" if named else ""
    return BuildError(
        f"TensorRT gives no engine for network '{network.name}'{where}: {text}",
        hint="the whole log is at DEBUG level of the logger 'lowering.tensorrt'",
    )


@contextmanager
def _bar(options: BuildOptions) -> Iterator[Any]:
    if not wants_bar(options.progress):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        yield bar
