"""Imports ONNX Runtime when needed; options, loading, checks and bindings that all sessions share."""

import contextlib
import ctypes
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import numpy as np

from tide_export import names
from tide_export.bundle.manifest import INT8_KV
from tide_export.bundle.opened import Bundle
from tide_export.errors import BundleError, ConfigError, ProviderError, TideError, first_line
from tide_export.runtime.onnxruntime.external_data import ELEMENT_SIZES, INT4, ExternalTensor, external_tensors
from tide_export.runtime.onnxruntime.huge_pages import huge_pages
from tide_export.runtime.onnxruntime.operators import register_operators, require_operators
from tide_export.runtime.segmented.network_spec import BATCH, TOKENS, NetworkSpec, Tensor
from tide_export.values import whole_number

# A worker thread spins so long for the next operator before it sleeps. If it slept at once, waking it would take longer
# than its half of a small matmul: two threads are then no faster than one. ONNX Runtime's default is milliseconds,
# which starves whatever else runs on the cores, another engine first of all (tools/benchmarks/threads.py).
SPIN_MICROSECONDS = 20
MAX_THREADS = 1024  # above the cores of most machines; ONNX Runtime starts all of them
FLOAT32_MATMULS = "1"  # the accuracy_level of MatMulNBits
# From 1.29 on official builds write an identifier into the home folder and send events about sessions to Microsoft,
# unless this is set before the first of them.
NO_TELEMETRY = ("ORT_DISABLE_TELEMETRY", "1")
FATAL = 4  # ONNX Runtime's log level: its errors reach the user as exceptions, not a second time on stderr


def import_onnxruntime() -> ModuleType:
    """The onnxruntime module.

    Raises:
        ProviderError: it is not installed.
    """
    os.environ.setdefault(*NO_TELEMETRY)
    try:
        import onnxruntime
    except ImportError as error:
        raise ProviderError(f"ONNX Runtime cannot be imported ({error}): pip install tide_export[cpu]") from None
    return onnxruntime


def check_threads(threads: int | None) -> None:
    """Raises ConfigError for a number of threads below 1 or above MAX_THREADS."""
    if threads is not None:
        whole_number("threads", threads, 1, MAX_THREADS, ConfigError)


def session_options(ort: ModuleType, threads: int | None) -> Any:
    """The options every session here is opened with.

    Raises:
        ConfigError: threads not in 1..1024.
    """
    check_threads(threads)
    options = ort.SessionOptions()
    options.log_severity_level = FATAL
    options.intra_op_num_threads = int(threads or 0)
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_MICROSECONDS))
    # By default it would round the inputs of dequantized matrices to 8 bits.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", FLOAT32_MATMULS)
    return options


def load_session(
    ort: ModuleType,
    bundle: Bundle,
    name: str,
    threads: int | None,
    providers: Sequence[str] = ("CPUExecutionProvider",),
    weights: str = names.WEIGHTS_FILE,
    graph: bytes | None = None,
    provider_options: Sequence[Mapping[str, str]] | None = None,
) -> Any:
    """The `InferenceSession` of a network of a bundle.

    ONNX Runtime gets the network and its weights from memory and opens no file. On the CPU, weights that it does not
    pack stay in the mapped file: they take no time to load, and all sessions and processes share them.

    Args:
        name: the network's file.
        weights: the file that holds its external weights.
        graph: what to load instead of the content of file `name`.
        provider_options: of every provider.

    Raises:
        BundleError: it does not load, or a file was changed since the bundle was opened.
        ConfigError: threads not in 1..1024.
    """
    if bundle.manifest.kv_dtype == INT8_KV:
        require_operators()
    file, location = bundle.file(name), PurePosixPath(weights).name
    graph = file.read_bytes() if graph is None else graph
    try:
        tensors = [tensor for tensor in external_tensors(graph) if tensor.location == location]
    except ValueError:
        tensors = []  # no ONNX model, as ONNX Runtime will say
    with bundle.file(weights).mapped() if tensors else contextlib.nullcontext(b"") as memory:
        arrays = [external_array(tensor, memory, str(file.path)) for tensor in tensors]
        try:
            values = {
                tensor.name: _ort_value(ort, tensor, array) for array, tensor in zip(arrays, tensors, strict=True)
            }

            def opened(folder: str, shared: bool) -> Any:
                options = session_options(ort, threads)
                # Where ONNX Runtime would look for weights that it is not given.
                options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
                register_operators(options, bundle.manifest.weights)
                if shared:
                    for tensor, value in values.items():
                        options.add_initializer(tensor, value)
                elif values:
                    options.add_external_initializers(list(values), list(values.values()))
                # On the CPU it would fall back to the CPU, and write that to stdout.
                falls_back = int("CPUExecutionProvider" not in providers)
                return ort.InferenceSession(
                    graph, options, list(providers), provider_options, enable_fallback=falls_back
                )

            session = None
            if values and "CPUExecutionProvider" in providers and not huge_pages():
                # An error: it computes something from a weight while it loads, and so reads the empty file.
                with contextlib.suppress(Exception), empty_file(location) as folder:
                    session = opened(folder, shared=True)
            if session is None:
                session, values = opened(os.devnull, shared=False), {}  # a folder that has no files
        except TideError:
            raise
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            raise BundleError(f"ONNX Runtime cannot load '{file.path}': {first_line(error)}") from error
        if values and hasattr(memory, "madvise"):
            memory.madvise(mmap.MADV_DONTNEED)  # the pages of weights that were packed; others are mapped again
    # `_sess` is the session itself, which is gone when this is called; its wrapper is not yet when it is finalized.
    weakref.finalize(session._sess, _release, values).atexit = False
    return session


@contextlib.contextmanager
def empty_file(name: str) -> Iterator[str]:
    """Yields a folder with an empty file: ONNX Runtime insists on the file of weights that it is given from memory."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, name).touch()
        yield folder


def _release(values: dict[str, Any]) -> None:
    """Frees the weights that a session shared, after it is gone."""
    values.clear()
    return_free_memory()


def return_free_memory() -> None:
    """Returns freed memory to the system where the C library is glibc, which would keep most of a session's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def external_array(tensor: ExternalTensor, memory: Any, network: str) -> np.ndarray:
    """The data of `tensor` in the memory of its file, as unsigned integers of its size; of 4 bits, as bytes [n]."""
    packed = tensor.dtype == INT4
    size = 1 if packed else ELEMENT_SIZES.get(tensor.dtype)
    if size is None:
        raise BundleError(f"'{network}' keeps {tensor.name} in another file, in a type of tensor that no bundle has")
    shape = (-(-math.prod(tensor.shape) // 2),) if packed else tensor.shape
    if tensor.offset < 0 or math.prod(shape) * size > len(memory) - tensor.offset:
        raise BundleError(f"'{network}' has the tensor {tensor.name} outside of the file of its weights")
    return np.ndarray(shape, f"u{size}", memory, tensor.offset)


def _ort_value(ort: ModuleType, tensor: ExternalTensor, array: np.ndarray) -> Any:
    """The tensor, of which ONNX Runtime takes address, shape and type."""
    if tensor.dtype == INT4:  # ONNX Runtime reads half as many bytes as the shape has elements
        strides = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
        array = np.lib.stride_tricks.as_strided(array, tensor.shape, strides)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, tensor.dtype)


def check_tensors(session: Any, spec: NetworkSpec, file: str) -> None:
    """Checks names, types and shapes, because buffers are bound by name and bare address.

    Raises:
        BundleError: naming a tensor of the session of `file` that is not that of `spec`.
    """
    try:
        inputs, outputs = tensors_of(session.get_inputs()), tensors_of(session.get_outputs())
    except UnicodeDecodeError:
        raise BundleError(f"'{file}' has a tensor whose name is not UTF-8, which its manifest does not know") from None
    spec.check(inputs, outputs, file)


def tensors_of(entries: Iterable[Any]) -> dict[str, Tensor]:
    """A session's inputs or outputs; a dimension of any name but "batch" is TOKENS."""
    types = {"float": "float32", "double": "float64"}
    tensors = {}
    for entry in entries:
        dtype = entry.type.removeprefix("tensor(").removesuffix(")")
        dims = [BATCH if dim == "batch" else dim if isinstance(dim, int) else TOKENS for dim in entry.shape or ()]
        tensors[entry.name] = Tensor(types.get(dtype, dtype), tuple(dims))
    return tensors


class Binding:
    """The inputs and outputs of a session bound to NumPy arrays.

    An OrtValue made from a C-contiguous array uses the array's memory (tests/runtime/branched/test_sequence.py proves
    it for the pinned release): the session reads what is written to the array later, and writes to the array.

    Attributes:
        io: the session's IOBinding, which holds bare pointers.
        arrays: what it points to, by name.
    """

    def __init__(self, ort: ModuleType, session: Any) -> None:
        self._value = ort.OrtValue.ortvalue_from_numpy
        self.io = session.io_binding()
        self.arrays: dict[str, Any] = {}

    def input(self, name: str, array: Any) -> Any:
        """Binds an input to `array`, and returns it."""
        self.io.bind_ortvalue_input(name, self._value(array))
        self.arrays[name] = array
        return array

    def output(self, name: str, array: Any) -> Any:
        """Binds an output to `array`, and returns it."""
        self.io.bind_ortvalue_output(name, self._value(array))
        self.arrays[name] = array
        return array
