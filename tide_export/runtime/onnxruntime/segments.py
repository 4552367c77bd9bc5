"""The segment networks on ONNX Runtime: on the CPU, where they verify the networks that TensorRT builds, and on CUDA.

The sessions are shared; every set of buffers has its own bindings. Tensors are bound as bare addresses of its device.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tide_export import names
from tide_export.bundle.opened import Bundle
from tide_export.errors import GenerationError, ProviderError, first_line
from tide_export.runtime.onnxruntime.bindings import (
    check_tensors,
    import_onnxruntime,
    load_session,
)
from tide_export.runtime.segmented.backend import SegmentBackend
from tide_export.runtime.segmented.cuda import CudaDevice, select_gpu
from tide_export.runtime.segmented.device import Device, HostDevice
from tide_export.runtime.segmented.network_spec import NetworkSpec, specs

BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16, which numpy has no type for


def open_segments(bundle: Bundle, device: str = "cpu", threads: int | None = None, gpu: int = 0) -> SegmentBackend:
    """The bundle's segment networks in ONNX Runtime.

    Args:
        device: "cpu" or "cuda".
        threads: threads one run may use on the CPU; None leaves it to ONNX Runtime.
        gpu: the number of the GPU that "cuda" runs on.

    Raises:
        ProviderError: the bundle has no segment networks or none that run there, or ONNX Runtime or the GPU is missing.
        BundleError: a network does not load, or is not the manifest's.
    """
    manifest, info = bundle.manifest, bundle.manifest.networks
    if info is None:
        raise ProviderError(
            f"bundle '{bundle.path}' holds no segment networks: export it with --target tensorrt or tensorrt-rtx"
        )
    if info.weights == "bf16" and device == "cpu":
        raise ProviderError(
            f"the segment networks of bundle '{bundle.path}' are bfloat16, which ONNX Runtime does not run on the CPU"
        )
    ort = import_onnxruntime()
    providers = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider"]}[device]
    on_gpu = [{"device_id": str(gpu)}] if device == "cuda" else None
    if providers[0] not in ort.get_available_providers():
        raise ProviderError(f"this ONNX Runtime has no {providers[0]}: pip install tide_export[gpu]")
    if on_gpu is not None:
        select_gpu(gpu)
    expected = specs(manifest, info)
    weights = f"{names.SEGMENTS_FOLDER}/{names.SEGMENTS_WEIGHTS_FILE}"
    sessions = {}
    for name, spec in expected.items():
        file = names.network_file(name)
        path, session = (
            bundle.file(file).path,
            load_session(ort, bundle, file, threads, providers, weights, provider_options=on_gpu),
        )
        if session.get_providers()[0] != providers[0]:
            raise ProviderError(f"ONNX Runtime found no {device} device it can use for '{path}'")
        check_tensors(session, spec, str(path))
        sessions[name] = session

    def open_device() -> tuple[Device, Mapping[str, Any]]:
        if device == "cpu":
            return HostDevice(), {
                name: _OrtNetwork(session, expected[name], "cpu") for name, session in sessions.items()
            }
        queue = CudaDevice(False, gpu)  # ONNX Runtime runs on another stream
        return queue, {
            name: _OrtNetwork(session, expected[name], "cuda", queue, gpu) for name, session in sessions.items()
        }

    return SegmentBackend(manifest, info, expected, open_device, device)


class _OrtNetwork:
    """One session with the bindings of one set of buffers."""

    def __init__(
        self, session: Any, spec: NetworkSpec, device: str, queue: Device | None = None, number: int = 0
    ) -> None:
        """`number`: of the device."""
        self._session, self._spec, self._device, self._queue, self._number = session, spec, device, queue, number
        self._binding = session.io_binding()

    def run(self, addresses: Mapping[str, int], tokens: int, batch_size: int = 1) -> None:
        """Runs at once. On CUDA it first waits for queued work, because ONNX Runtime has another stream.

        Raises:
            GenerationError: ONNX Runtime failed.
        """
        binding = self._binding
        for bind, tensors in (
            (binding.bind_input, self._spec.inputs),
            (binding.bind_output, self._spec.outputs),
        ):
            for name, tensor in tensors.items():
                kind = BFLOAT16 if tensor.dtype == "bfloat16" else np.dtype(tensor.dtype).type
                bind(name, self._device, self._number, kind, tensor.dims(tokens, batch_size), addresses[name])
        if self._queue is not None:
            self._queue.synchronize()
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise GenerationError(f"ONNX Runtime failed in {self._spec.name}: {first_line(error)}") from error
