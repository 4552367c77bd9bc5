"""A stand-in for TensorRT's package, whose engines run in ONNX Runtime, on a stand-in for CUDA.

It refuses what TensorRT refuses, and overwrites its working memory.
"""

import ctypes
import weakref
from ctypes import byref, c_int, c_void_p
from enum import Enum
from types import SimpleNamespace
from typing import Any

from caller_networks import CallersNetworks
from fake_cudart import ALIGNMENT, FakeCudart

from tide_export.bundle.network_spec import BATCH, KEYS, TENSORRT_TYPES, TOKENS, NetworkSpec, RunSize, of_network
from tide_export.bundle.plan_fields import NetworksInfo, Profile
from tide_export.bundle.profiles import profiles_for

CONTEXT_BYTES = 1 << 20  # that a context keeps, beside the working memory
DTYPES = {dtype: name for name, dtype in TENSORRT_TYPES.items()}


class Bindings:
    """What of NVIDIA's package cuda-bindings is used, on the stand-in."""

    cudaError_t = SimpleNamespace(cudaSuccess=0, cudaErrorMemoryAllocation=2)

    def __init__(self, cudart: FakeCudart) -> None:
        self._functions = cudart.functions

    def cudaGetDeviceCount(self) -> tuple[int, int]:
        count = c_int()
        return self._functions.cudaGetDeviceCount(byref(count)), count.value

    def cudaSetDevice(self, gpu: int) -> tuple[int]:
        return (self._functions.cudaSetDevice(gpu),)

    def cudaMalloc(self, size: int) -> tuple[int, int | None]:
        address = c_void_p()
        return self._functions.cudaMalloc(byref(address), ctypes.c_size_t(size)), address.value

    def cudaFree(self, address: int) -> tuple[int]:
        return (self._functions.cudaFree(c_void_p(address)),)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        return (self._functions.cudaStreamSynchronize(c_void_p(stream)),)


class Context:
    """An execution context. What was recorded of it fails once its shapes or addresses have changed: TensorRT's
    documentation leaves undefined what it does then."""

    def __init__(self, engine: "FoundEngine", library: "Library") -> None:
        self._engine, self._library = engine, library
        self.memory: tuple[int, int] | None = None
        self.nvtx_verbosity = library.ProfilingVerbosity.DETAILED
        self._profile: Profile | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._last: RunSize | None = None
        self.changes = 0
        functions, address = library.cudart.functions, c_void_p()
        assert functions.cudaMalloc(byref(address), ctypes.c_size_t(CONTEXT_BYTES)) == 0, "out of memory"
        weakref.finalize(self, functions.cudaFree, address)

    def set_device_memory(self, address: int, size: int) -> None:
        self.memory = address, size

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._profile = self._engine.profiles[profile]
        return True

    def set_input_shape(self, name: str, dims: tuple[int, ...]) -> bool:
        self.changes += 1
        assert self._profile is not None
        most = {TOKENS: self._profile.max_tokens, BATCH: self._profile.batch_size, KEYS: self._engine.spec.keys}
        self._shapes[name] = dims
        return all(
            1 <= given <= most[size] if isinstance(size, str) else given == size
            for given, size in zip(dims, self._engine.spec.inputs[name].shape, strict=True)
        )

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.changes += 1
        self._addresses[name] = address
        return address % ALIGNMENT == 0

    def execute_async_v3(self, stream: int) -> bool:
        spec, sizes = self._engine.spec, {TOKENS: 1, BATCH: 1, KEYS: 1}
        for name, tensor in spec.inputs.items():
            sizes |= {size: dim for size, dim in zip(tensor.shape, self._shapes[name], strict=True) if size in sizes}
        run, cudart = RunSize(*sizes.values()), self._library.cudart
        assert all(tensor.dims(run) == self._shapes[name] for name, tensor in spec.inputs.items())
        if cudart.functions.fake_cuda_is_capturing(c_void_p(stream)) and self._last != run:
            return False
        if spec.name == self._library.copying and self._library.plugins is not None:
            self._library.plugins.copy(ctypes.c_long(1000 * run[1]))
        if self.nvtx_verbosity != self._library.ProfilingVerbosity.NONE:
            return False
        if self.memory is None or self.memory[1] < self._engine.device_memory_size_v2:
            return False
        (address, size), addresses, self._last = self.memory, dict(self._addresses), run
        captured = cudart.functions.fake_cuda_is_capturing(c_void_p(stream))
        context, changes, networks = weakref.ref(self), self.changes, self._library.networks

        def work() -> None:
            now = context()
            if captured and (now is None or now.changes != changes):
                raise RuntimeError("a recorded execution context was changed or destroyed")
            ctypes.memset(address, 0xFF, size)
            networks.run(spec.name, addresses, run, 0, False)

        cudart.queue(stream, work)
        return addresses.keys() == {*spec.inputs, *spec.outputs}


class FoundEngine:
    """An engine of a network, which runs in ONNX Runtime."""

    def __init__(self, library: "Library", spec: NetworkSpec, profiles: tuple[Profile, ...]) -> None:
        self._library, self.spec, self.profiles = library, spec, profiles
        self._described = {**spec.inputs, **spec.outputs}
        self._tensors = [*((name, "INPUT") for name in spec.inputs), *((name, "OUTPUT") for name in spec.outputs)]
        self.num_io_tensors, self.num_optimization_profiles = len(self._tensors), len(profiles)
        self.device_memory_size_v2 = 100_000 + 1000 * len(spec.inputs)
        self.contexts = weakref.WeakSet[Context]()

    def get_tensor_name(self, index: int) -> str:
        return self._tensors[index][0]

    def get_tensor_mode(self, name: str) -> Any:
        return SimpleNamespace(name=dict(self._tensors)[name])

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=DTYPES[self._described[name].dtype])

    def get_tensor_shape(self, name: str) -> list[int]:
        return [-1 if isinstance(dim, str) else dim for dim in self._described[name].shape]

    def get_aliased_input_tensor(self, name: str) -> None:
        return None

    def get_tensor_profile_shape(self, name: str, number: int) -> list[tuple[int, ...]]:
        profile = self.profiles[number]
        return [self.spec.inputs[name].dims(RunSize(profile.max_tokens, profile.batch_size, self.spec.keys))] * 3

    def create_runtime_config(self) -> Any:
        config = SimpleNamespace(strategy=None)
        config.set_execution_context_allocation_strategy = lambda strategy: setattr(config, "strategy", strategy)
        return config

    def create_execution_context(self, config: Any) -> Context | None:
        if config.strategy != self._library.ExecutionContextAllocationStrategy.USER_MANAGED:
            return None
        context = Context(self, self._library)
        self.contexts.add(context)
        return context


class Library:
    """What of the package `tensorrt` is used."""

    __version__ = "11.1"

    class ILogger:
        class Severity(Enum):
            INTERNAL_ERROR, ERROR = range(2)

    class ExecutionContextAllocationStrategy(Enum):
        STATIC, USER_MANAGED = range(2)

    class ProfilingVerbosity(Enum):
        LAYER_NAMES_ONLY, NONE, DETAILED = range(3)

    def __init__(self, cudart: FakeCudart, networks: CallersNetworks, info: Any) -> None:
        self.cudart, self.networks = cudart, networks
        self.plugins: ctypes.CDLL | None = None
        self.copying = ""  # the network whose plugin does not work in place
        self.build(info)

    def build(self, info: NetworksInfo) -> None:
        """Builds engines for runs of these sizes."""
        self.engines = {
            name: FoundEngine(self, spec, of_network(name, profiles_for(info), info))
            for name, spec in self.networks.specs.items()
        }

    def Runtime(self, log: Any) -> Any:
        return SimpleNamespace(deserialize_cuda_engine=lambda data: self.engines[bytes(data).decode()])

    def get_plugin_registry(self) -> Any:
        def load_library(path: str) -> None:
            self.plugins = ctypes.CDLL(path)

        return SimpleNamespace(get_creator=lambda *_: self.plugins, load_library=load_library)
