"""From a network definition to a serialized engine and the report on its layers."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from fx_passes.capture.exclusive import let_others
from fx_passes.errors import BuildError, InputError
from lowering.trt.bindings import BuilderLog, collect_log, has, trt, version
from lowering.trt.builder.cache import EngineCache, engine_key
from lowering.trt.builder.capabilities import offered, resolve_capabilities
from lowering.trt.builder.layers import LayerReport, layer_report
from lowering.trt.builder.progress import progress_monitor, run_cancellable, wants_bar
from lowering.trt.builder.targets import EngineTarget
from lowering.trt.builder.terminal import quiet_stderr, terminal
from lowering.trt.builder.timing_cache import keep_timings, use_timings
from lowering.trt.define.definition import Network
from lowering.trt.define.network import build_network

if TYPE_CHECKING:
    from lowering.trt.reference import ReferenceNetwork

__all__ = ["BuildOptions", "Engine", "build_engine"]


_log = logging.getLogger("lowering.tensorrt")
_VERBOSITY = {"detailed": "DETAILED", "names": "LAYER_NAMES_ONLY", "none": "NONE"}


@dataclass(frozen=True)
class BuildOptions:
    """What the builder can be told; `lowering.Settings` has the same fields and says what they mean."""

    optimization_level: int | None = None
    workspace_bytes: int | None = None
    version_compatible: bool = False
    hardware_compatible: bool = False
    strip_weights: bool = False
    refit: bool = False
    profiling_verbosity: str = "detailed"
    timing_cache: str | os.PathLike[str] | None = None
    engine_cache: str | os.PathLike[str] | None = None
    engine_cache_bytes: int | None = 4 << 30
    progress: bool | None = None

    @classmethod
    def of(cls, settings: Any) -> BuildOptions:
        """Options from an object that has some of these attributes, such as `lowering.Settings`, or None."""
        if isinstance(settings, cls):
            return settings
        options: dict[str, Any] = {f.name: getattr(settings, f.name, f.default) for f in fields(cls)}
        return cls(**options)

    def for_key(self) -> dict[str, Any]:
        """Those that the engine's bytes depend on."""
        aside = ("timing_cache", "engine_cache", "engine_cache_bytes", "progress")
        return {key: value for key, value in asdict(self).items() if key not in aside}


@dataclass(frozen=True)
class Engine:
    """A serialized engine.

    Attributes:
        data: the bytes of the engine file.
        report: its kernels and bytes.
        target: what it was built with and for.
        log: everything TensorRT said while building; empty if the engine comes from the cache.
        cached: whether it comes from the engine cache.
    """

    data: bytes
    report: LayerReport
    target: EngineTarget
    log: BuilderLog = field(default_factory=BuilderLog)
    cached: bool = False

    @property
    def compute_capabilities(self) -> tuple[str, ...] | None:
        """What it was built for; None: portable (RTX)."""
        return self.target.compute_capabilities


def build_engine(
    network: Network,
    *,
    compute_capabilities: Any = None,
    settings: Any = None,
    report: bool = True,
    reference: ReferenceNetwork | None = None,
) -> Engine:
    """Build the engine of a network, or take it from the engine cache.

    Args:
        network: from `build_network`.
        compute_capabilities: "8.9", "sm89", "RTX 4090", or a list, all in one engine; None: one portable engine.
        settings: a `BuildOptions`, a `lowering.Settings` or None.
        report: a dynamic network is built a second time, static at its opt shape, to count the bytes it moves; False
            leaves that out (`activation_bytes` then counts free dimensions as 1).
        reference: the network read back, if that has been done: the cache's key is made from it.

    Raises:
        BuildError: TensorRT gives no engine; the text is the first error of its log and names the layer.
        InputError: a capability that this TensorRT does not offer.
        KeyboardInterrupt: Ctrl-C stops the build at its next step.
    """
    options = BuildOptions.of(settings)
    capabilities = _check_capabilities(network, compute_capabilities)
    target = _target(network, capabilities, options)
    if options.engine_cache is None:
        return _built(network, capabilities, options, target, report)
    kept = EngineCache(options.engine_cache, options.engine_cache_bytes)
    key = _key(network, options, target, report, reference)
    found = kept.get(key)
    if found is not None:
        data, record = found
        return Engine(data, LayerReport(**record), target, cached=True)
    engine = _built(network, capabilities, options, target, report)
    kept.put(key, engine.data, engine.report.as_dict())
    return engine


def _built(
    network: Network, capabilities: tuple[str, ...] | None, options: BuildOptions, target: EngineTarget, report: bool
) -> Engine:
    data, log = _build(network, capabilities, options)
    listing, opt_log = log, None
    detailed = replace(options, profiling_verbosity="detailed")
    if report and options != detailed:
        listing = _build(network, capabilities, detailed)[1]
    if report and network.profiles and network.program is not None:
        static = build_network(network.program, name=network.name, static_at=network.profiles[0])
        opt_log = _build(static, capabilities, detailed)[1].text
    layers = layer_report(listing.text, len(data), opt_log, target.compute_capabilities)
    return Engine(data, layers, target, log)


def _target(network: Network, capabilities: tuple[str, ...] | None, options: BuildOptions) -> EngineTarget:
    gpu = None
    if network.flavour != "rtx":  # built for the GPU of this machine
        gpu = torch.cuda.get_device_name()
        capabilities = capabilities or ("{}.{}".format(*torch.cuda.get_device_capability()),)
    compatible = options.hardware_compatible and network.flavour != "rtx"
    return EngineTarget(network.flavour, version(), capabilities, gpu, options.version_compatible, compatible)


def _key(
    network: Network, options: BuildOptions, target: EngineTarget, report: bool, reference: ReferenceNetwork | None
) -> str:
    from lowering.trt.reference import read_network

    record = (reference or read_network(network.definition)).record
    profiles = [{name: [list(size) for size in sizes] for name, sizes in p.items()} for p in network.profiles]
    build = {"target": asdict(target), "options": options.for_key(), "profiles": profiles, "report": report}
    return engine_key(record, **build)


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
    timings = options.timing_cache if network.flavour != "rtx" else None
    if timings is not None:
        use_timings(config, timings)

    def work() -> bytes | None:
        with collect_log(log):
            plan = network.builder.build_serialized_network(network.definition, config)
        return None if plan is None else bytes(plan)

    with let_others(), quiet_stderr(), _bar(options) as bar:
        config.progress_monitor = progress_monitor(cancelled, bar)
        data = run_cancellable(work, cancelled)
    if data is None:
        raise _failure(network, options, log)
    if timings is not None:
        keep_timings(config, timings)
    return data, log


def _configure(
    network: Network, config: Any, capabilities: Sequence[str] | None, options: BuildOptions, log: BuilderLog
) -> None:
    config.profiling_verbosity = getattr(trt.ProfilingVerbosity, _VERBOSITY[options.profiling_verbosity])
    if network.flavour == "rtx":
        _say_what_rtx_ignores(options)
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


def _say_what_rtx_ignores(options: BuildOptions) -> None:
    if options.timing_cache is not None:
        _log.warning("settings.timing_cache is not used: TensorRT-RTX measures nothing while it builds")
    if options.hardware_compatible:
        _log.warning("settings.hardware_compatible is not used: a TensorRT-RTX engine is portable if it has no list")


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


def _failure(network: Network, options: BuildOptions, log: BuilderLog) -> BuildError:
    text = log.errors[0].strip() if log.errors else "no reason given"
    definition = network.definition
    layers = (definition.get_layer(i) for i in range(definition.num_layers))
    named = list(dict.fromkeys(layer.metadata.strip("[]") for layer in layers if layer.name in text))
    where = f" (in {', '.join(named[:3])})" if named else ""
    hint = "the whole log is at DEBUG level of the logger 'lowering.tensorrt'"
    if (options.refit or options.strip_weights) and not torch.cuda.is_available():
        hint = f"refit and strip_weights need a CUDA driver on the building machine, and there is none; {hint}"
    return BuildError(f"TensorRT gives no engine for network '{network.name}'{where}: {text}", hint=hint)


@contextmanager
def _bar(options: BuildOptions) -> Iterator[Any]:
    if not wants_bar(options.progress):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with terminal() as file, Progress(console=Console(file=file), transient=True) as bar:
        yield bar
