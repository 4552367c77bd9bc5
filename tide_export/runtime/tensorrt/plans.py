"""Checks, opens and runs a bundle's plans on a GPU, with TensorRT or TensorRT for RTX.

`flavours` has the differences of the two. A plan runs on one version of one flavour and on the GPUs it was built
for; this is checked before it is loaded, because TensorRT's own messages are meant for its developers. libtide runs the
plans by callbacks (`callers_networks`). All execution contexts of a set of buffers share one workspace, because one
network runs at a time.
"""

import mmap
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from tide_export.bundle.file_names import plan_file
from tide_export.bundle.network_spec import NetworkSpec, RunSize, from_tensorrt, kv_aliases, of_network, specs
from tide_export.bundle.opened import Bundle
from tide_export.bundle.plan_fields import NetworksInfo, PlansInfo, Profile
from tide_export.errors import BundleError, GenerationError, ProviderError
from tide_export.names import segment_networks as names
from tide_export.names.networks import DRAFTER
from tide_export.runtime.callers_networks import load_networks
from tide_export.runtime.native import Owned
from tide_export.runtime.tensorrt.cudart import CudaMemory, select_gpu, synchronize
from tide_export.runtime.tensorrt.flavours import (
    FLAVOURS,
    TENSORRT,
    Flavour,
    capturable,
    check_header,
    configure,
    import_library,
    kernel_cache,
    warn_of_copies,
)
from tide_export.runtime.tensorrt.gpu import compute_capability
from tide_export.runtime.tensorrt.kernel_cache import KernelCache
from tide_export.runtime.tensorrt.plugins import CopyReport, plugins_to_load, register

ALIGNMENT = 256  # bytes; CUDA's allocations have it and TensorRT requires it

_Arguments = tuple[int, ...]  # of a run: tokens, sequences, addresses


def open_plans(
    bundle: Bundle, provider: str, options: dict[str, Any], plugins: str | os.PathLike[str] | None = None
) -> Owned:
    """Creates a tide_engine that runs the bundle's TensorRT plans.

    Args:
        provider: the flavour, tensorrt or tensorrt-rtx.
        options: the options of tide_load; "device" is the number of the GPU, by default 0.
        plugins: the plugin library, for plans that use plugins; None: the one that `find_plugins` finds.

    Raises:
        ProviderError: the bundle has no plans of that flavour, or they cannot run here; says what to do.
        BundleError: the plans differ from the manifest.
    """
    manifest, info, plans = bundle.manifest, *check_plans(bundle, provider)
    flavour, gpu = FLAVOURS[provider], options.get("device", 0)
    library = import_library(flavour)
    _check_machine(bundle, flavour, str(library.__version__), plans, gpu)
    copies = None
    if plans.plugins is not None:
        plugin_library = plugins_to_load(bundle.path, plans.plugins, str(library.__version__), plugins)
        register(library, plugin_library.path)
        copies = CopyReport(plugin_library.path)
    expected = specs(manifest, info)
    if plan_file(DRAFTER) not in manifest.files:  # the drafter came later than `tide-export build`
        expected.pop(DRAFTER, None)
    runtime = _Runtime(flavour, library)
    loaded = {}
    for name, spec in expected.items():
        file = bundle.file(plan_file(name))
        with file.mapped() as data:
            plan = runtime.load(data, str(file.path))
        _check_plan(plan, spec, of_network(name, plans.profiles, info), str(file.path))
        loaded[name] = plan
    warn_of_copies(flavour, plans.copied or {})
    cache = kernel_cache(flavour, str(library.__version__), gpu)
    size = max(ALIGNMENT, *(plan.device_memory_size_v2 for plan in loaded.values()))

    def opener(stream: int | None) -> TrtNetworks:
        assert stream is not None
        memory = CudaMemory(gpu, size)
        return TrtNetworks(
            {
                name: TrtNetwork(
                    *(flavour, library, plan, expected[name], of_network(name, plans.profiles, info)),
                    *(stream, memory, cache, copies),
                )
                for name, plan in loaded.items()
            },
            memory,
        )

    return load_networks(bundle, options, provider, opener, gpu)


def check_plans(bundle: Bundle, provider: str) -> tuple[NetworksInfo, PlansInfo]:
    """Returns the manifest's entries of the networks and of their plans of this flavour.

    Raises:
        ProviderError: the bundle has no such plans.
        BundleError: the plans were built from other weights.
    """
    manifest, info, plans = bundle.manifest, bundle.manifest.networks, bundle.manifest.engines
    if info is None or manifest.has_cuda_networks:
        raise ProviderError(
            f"bundle '{bundle.path}' holds no networks for provider '{provider}': export it with --target {provider}, "
            "or use provider 'cpu'"
        )
    if plans is None:
        raise ProviderError(
            f"bundle '{bundle.path}' holds no TensorRT plans: build them with `tide-export build {bundle.path} "
            f"--target {provider}`, or use provider 'cpu'"
        )
    if plans.flavour != provider:
        raise ProviderError(
            f"the plans of bundle '{bundle.path}' are of {FLAVOURS[plans.flavour].title}: use provider "
            f"'{plans.flavour}', or build others with `tide-export build {bundle.path} --target {provider}`"
        )
    if plans.weights_sha256 != manifest.model.weights_sha256:
        raise BundleError(
            f"the plans of bundle '{bundle.path}' were built from other weights than its model's "
            f"(sha256 {plans.weights_sha256[:12]}, not {manifest.model.weights_sha256[:12]}): build them again"
        )
    return info, plans


def _check_machine(bundle: Bundle, flavour: Flavour, version: str, plans: PlansInfo, gpu: int) -> None:
    """Checks that the installed version and the GPU are those of the plans, and selects the GPU."""
    again = f"build them again with `tide-export build {bundle.path} --target {flavour.name}`"
    if plans.version != version:
        raise ProviderError(
            f"the plans of bundle '{bundle.path}' were built by {flavour.title} {plans.version} and run on no "
            f"other, but {version} is installed: {again}"
        )
    device = compute_capability(gpu)
    if device is None and (gpu == 0 or compute_capability(0) is None):
        raise ProviderError(f"{flavour.title} needs an NVIDIA GPU and its driver, and there is none here")
    built = plans.compute_capabilities or flavour.compute_capabilities
    here = None if device is None else f"{device[0]}.{device[1]}"
    if here is not None and here not in built:
        if here not in (flavour.compute_capabilities or (here,)):  # no plan of this flavour runs on it
            again = f"build others with `tide-export build {bundle.path} --target {TENSORRT.name}`"
        raise ProviderError(
            f"the plans of bundle '{bundle.path}' were built for GPUs of compute capability {', '.join(built)}, this "
            f"one has {here}: {again}"
        )
    select_gpu(gpu)


class _Runtime:
    """Loads plans, and keeps the errors that the library logs."""

    def __init__(self, flavour: Flavour, library: ModuleType) -> None:
        errors: list[str] = []
        self._flavour, self._library, self._errors = flavour, library, errors

        class Log(library.ILogger):  # type: ignore[name-defined]
            def __init__(self) -> None:
                library.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in (library.ILogger.Severity.ERROR, library.ILogger.Severity.INTERNAL_ERROR):
                    errors.append(" ".join(message.split()))

        self._runtime = library.Runtime(Log())

    def load(self, data: mmap.mmap | bytes, path: str) -> Any:
        """Loads the plan in `data`, which may be freed afterwards.

        Raises:
            ProviderError: it cannot run on this machine.
            BundleError: the library cannot read it; quotes its last error.
        """
        check_header(self._flavour, self._library, self._runtime, data, path, self._errors)
        plan = self._runtime.deserialize_cuda_engine(data)
        if plan is None:
            reason = self._errors[-1] if self._errors else "it does not say why"
            raise BundleError(f"cannot load plan '{path}': {reason}")
        return plan


def _check_plan(plan: Any, spec: NetworkSpec, profiles: tuple[Profile, ...], path: str) -> None:
    """Checks the tensors, K/V buffers updated in place, and profiles of a plan.

    Raises:
        BundleError: one of them differs; names it.
    """
    tensors: dict[bool, dict[str, tuple[str, list[int]]]] = {True: {}, False: {}}
    for index in range(plan.num_io_tensors):
        name = plan.get_tensor_name(index)
        is_input = plan.get_tensor_mode(name).name == "INPUT"
        tensors[is_input][name] = (plan.get_tensor_dtype(name).name, list(plan.get_tensor_shape(name)))
    spec.check(from_tensorrt(spec, tensors[True]), from_tensorrt(spec, tensors[False]), path)
    for output, entry in kv_aliases(spec).items():
        # Some versions list no aliases of a plan; the network was checked when it was built.
        if (plan.get_aliased_input_tensor(output) or entry) != entry:
            raise BundleError(f"plan '{path}' does not update {entry} in place")
    if plan.num_optimization_profiles != len(profiles):
        raise BundleError(
            f"plan '{path}' has {plan.num_optimization_profiles} optimization profiles, not the {len(profiles)} of "
            "its manifest"
        )
    indices = names.TOKEN_INDICES, names.KEY_INDICES
    entries = (*indices, names.PAST_LENGTHS, names.EXIT_STATES, names.ROWS, names.LOGITS)
    for number, profile in enumerate(profiles):
        for entry in (entry for entry in entries if entry in spec.inputs):
            largest = list(plan.get_tensor_profile_shape(entry, number)[-1])
            if largest != list(spec.inputs[entry].dims(RunSize(profile.max_tokens, profile.batch_size, spec.keys))):
                raise BundleError(
                    f"plan '{path}' takes {entry} of {largest} at most in profile {profile.name}, unlike its manifest"
                )


def pick_profile(profiles: tuple[Profile, ...], tokens: int, batch_size: int = 1) -> int:
    """Returns the index of the narrowest profile that takes `tokens` of each of `batch_size` sequences.

    Raises:
        GenerationError: no profile takes them.
    """
    for index, profile in enumerate(profiles):
        if profile.min_tokens <= tokens <= profile.max_tokens and batch_size <= profile.batch_size:
            return index
    max_tokens = max((profile.max_tokens for profile in profiles if batch_size <= profile.batch_size), default=0)
    if not max_tokens:
        max_batch_size = max(profile.batch_size for profile in profiles)
        raise GenerationError(
            f"a run over {batch_size} sequences exceeds the plan's profiles, which take {max_batch_size} at most"
        )
    of_each = f" of each of {batch_size} sequences" if batch_size > 1 else ""
    raise GenerationError(
        f"a run over {tokens} tokens{of_each} exceeds the plan's profiles, which take {max_tokens} at most"
    )


class TrtNetworks:
    """Runs the plans of a bundle on one stream (a `callers_networks.Networks`)."""

    def __init__(self, networks: Mapping[str, "TrtNetwork"], memory: CudaMemory) -> None:
        self._networks, self._memory = dict(networks), memory

    def run(self, name: str, addresses: Mapping[str, int], size: RunSize, recording: int, captured: bool) -> bool:
        return self._networks[name].run(addresses, size, recording, captured)

    def forget(self, recording: int) -> None:
        for network in self._networks.values():
            network.forget(recording)

    def close(self) -> None:
        self._networks.clear()
        self._memory.free()


class TrtNetwork:
    """Runs one plan on one stream.

    One execution context per profile serves runs that are not recorded. Recorded runs have one per size and addresses,
    because TensorRT does not define what a recording does after its context's shapes or addresses have changed; all
    recordings with such a run share it.
    """

    def __init__(
        self,
        flavour: Flavour,
        library: ModuleType,
        plan: Any,
        spec: NetworkSpec,
        profiles: tuple[Profile, ...],
        stream: int,
        memory: CudaMemory,
        cache: KernelCache | None = None,
        copies: CopyReport | None = None,
    ) -> None:
        self._flavour, self._library, self._plan, self._spec = flavour, library, plan, spec
        self._profiles, self._stream, self._memory, self._cache = profiles, stream, memory, cache
        self._copies = copies
        self._contexts: dict[int, Any] = {}  # by profile
        self._recorded: dict[_Arguments, Any] = {}
        self._recordings: dict[_Arguments, set[int]] = {}  # those with a run of `_recorded`

    def run(self, addresses: Mapping[str, int], size: RunSize, recording: int = 0, captured: bool = False) -> bool:
        """Queues a run on the stream, as `callers_networks.Networks.run` says.

        Raises:
            GenerationError: no profile takes these tokens and sequences, or TensorRT failed.
        """
        profile, arguments = pick_profile(self._profiles, size.tokens, size.batch_size), (*size, *addresses.values())
        contexts: dict[Any, Any] = self._recorded if recording else self._contexts
        key = arguments if recording else profile
        context = contexts.get(key)
        if context is None or not recording:
            if context is None:
                context = contexts[key] = self._new_context(profile)
            for name, tensor in self._spec.inputs.items():
                self._require(context.set_input_shape(name, tensor.dims(size)), f"the shape of {name}")
            for name in (*self._spec.inputs, *self._spec.outputs):
                self._require(context.set_tensor_address(name, addresses[name]), f"the address of {name}")
        if recording:
            self._recordings.setdefault(arguments, set()).add(recording)
        records = captured or capturable(self._flavour, context, self._stream)
        self._require(context.execute_async_v3(self._stream), f"a run over {size.tokens} tokens")
        if self._copies is not None:
            self._copies.after_run(self._spec.name, size.batch_size)
        return records

    def forget(self, recording: int) -> None:
        for arguments, recordings in list(self._recordings.items()):
            recordings.discard(recording)
            if not recordings:
                del self._recordings[arguments], self._recorded[arguments]

    def _new_context(self, profile: int) -> Any:
        config = configure(self._flavour, self._library, self._plan, self._cache)
        context = self._plan.create_execution_context(config)
        self._require(context is not None, "an execution context")
        context.nvtx_verbosity = self._library.ProfilingVerbosity.NONE  # plans name their layers for the build's log
        context.set_device_memory(self._memory.address, self._memory.size)
        self._require(context.set_optimization_profile_async(profile, self._stream), f"profile {profile}")
        synchronize(self._stream)
        return context

    def _require(self, worked: bool, what: str) -> None:
        if not worked:
            raise GenerationError(f"{self._flavour.title} refused {what} in {self._spec.name}")
