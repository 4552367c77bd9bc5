"""Runs kernels on NumPy arrays, on the CPU (emulated) or on a GPU, in memory that shows what a kernel should not do.

Everything a kernel may write starts as NaN bytes, every array lies between two guards that must be untouched, and the
workspace is exactly as large as asked for, filled with NaN. The counters are 0 before a call and after it.
"""

import ctypes
import ctypes.util
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "plugins" / "capi"))
import tide_kernels as tk  # noqa: E402

GUARD = 256  # bytes before and after each array, which keep its alignment
FILL = 0xFF  # NaN in all three float types, -1 in integers


def encode(values: np.ndarray, kind: int) -> np.ndarray:
    """float64 values as an array of a TideType; bfloat16 as its bits in uint16, rounded to nearest even."""
    if kind == tk.FLOAT16:
        return values.astype(np.float16)
    single = values.astype(np.float32)
    if kind == tk.FLOAT32:
        return single
    bits = single.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FC0), rounded).astype(np.uint16)


def decode(array: np.ndarray) -> np.ndarray:
    """The float64 values of an array from `encode`."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def rounded(values: np.ndarray, kind: int) -> np.ndarray:
    """float64 values rounded to a TideType."""
    return decode(encode(values, kind))


class HostMemory:
    """The emulation's device memory: the host's, aligned as cudaMalloc aligns."""

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None)
        self.blocks: list[int] = []

    def put(self, data: np.ndarray) -> int:
        # Not NumPy's memory: an allocation that ends where the data ends, so that an address sanitizer sees an overrun.
        address = ctypes.c_void_p()
        self.libc.posix_memalign(ctypes.byref(address), ctypes.c_size_t(256), ctypes.c_size_t(max(data.nbytes, 1)))
        assert address.value is not None
        self.blocks.append(address.value)
        ctypes.memmove(address.value, data.ctypes.data, data.nbytes)
        return address.value

    def get(self, address: int, size: int) -> np.ndarray:
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)).copy()

    def wait(self) -> None:
        pass

    def free(self) -> None:
        for address in self.blocks:
            self.libc.free(ctypes.c_void_p(address))
        self.blocks.clear()


class DeviceMemory:
    """A GPU's memory, through the CUDA runtime's C interface."""

    TO_DEVICE, TO_HOST = 1, 2

    def __init__(self) -> None:
        self.cudart = load_cudart()
        self.blocks: list[int] = []

    def put(self, data: np.ndarray) -> int:
        address = ctypes.c_void_p()
        self.check(self.cudart.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(max(data.nbytes, 1))))
        assert address.value is not None
        self.blocks.append(address.value)
        self.copy(address.value, data.ctypes.data, data.nbytes, self.TO_DEVICE)
        return address.value

    def get(self, address: int, size: int) -> np.ndarray:
        data = np.empty(size, np.uint8)
        self.copy(data.ctypes.data, address, size, self.TO_HOST)
        return data

    def wait(self) -> None:
        self.check(self.cudart.cudaDeviceSynchronize())

    def free(self) -> None:
        for address in self.blocks:
            self.check(self.cudart.cudaFree(ctypes.c_void_p(address)))
        self.blocks.clear()

    def check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"CUDA error {status}")

    def copy(self, target: int, source: int, size: int, direction: int) -> None:
        arguments = ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size), direction
        self.check(self.cudart.cudaMemcpy(*arguments))


def load_cudart() -> ctypes.CDLL:
    """The CUDA runtime library.

    Raises:
        OSError: there is none on the loader's path, in /usr/local/cuda or among Python's packages.
    """
    found = [ctypes.util.find_library("cudart"), *map(str, Path("/usr/local/cuda/lib64").glob("libcudart.so*"))]
    for folder in sys.path:
        found += map(str, Path(folder).glob("nvidia/**/libcudart.so*"))
    for name in filter(None, found):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError("no libcudart found")


class Runner:
    """Kernels of one library, on NumPy arrays; `guard` bytes before and after each (none leaves it to a sanitizer)."""

    def __init__(self, library: Path, memory_type: type[HostMemory | DeviceMemory] = HostMemory, guard: int = GUARD):
        self.kernels = tk.Kernels(library)
        self.memory_type = memory_type
        self.guard = guard

    def run(
        self,
        args: tk.ExitArgs,
        inputs: dict[str, np.ndarray],
        outputs: dict[str, np.ndarray],
        norm: dict[str, np.ndarray] | None = None,
    ) -> None:
        """Starts `tide_exit` with `inputs` and `outputs` as its pointers of those names, and waits for it.

        An array of `outputs` is what the memory holds beforehand, and takes what it holds afterwards.

        Raises:
            AssertionError: a guard or an input was written to.
            tk.KernelError: the arguments are unusable.
        """
        memory, guard = self.memory_type(), self.guard
        placed = []
        targets: list[tuple[ctypes.Structure, str, np.ndarray]]
        targets = [(args, key, value) for key, value in {**inputs, **outputs}.items()]
        targets += [(args.norm, key, value) for key, value in (norm or {}).items()]
        for owner, key, array in targets:
            start = -(-guard // array.itemsize) * array.itemsize  # no element lies across its own alignment
            data = np.full(start + array.nbytes + guard, FILL, np.uint8)
            data[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            address = memory.put(data)
            setattr(owner, key, address + start)
            placed.append((key, array, data, address, start))
        size = self.kernels.exit_workspace(args)
        workspace = memory.put(np.full(size + guard, FILL, np.uint8))
        counters = memory.put(np.zeros(tk.COUNTERS, np.uint32).view(np.uint8))
        self.kernels.exit(args, workspace, size, counters)
        memory.wait()
        assert not memory.get(counters, tk.COUNTERS * 4).any(), "tide_exit left counters that are not 0"

        for key, array, before, address, start in placed:
            after = memory.get(address, before.nbytes)
            if key in outputs:
                own = slice(start, start + array.nbytes)
                array.reshape(-1).view(np.uint8)[:] = after[own]
                after[own] = before[own]
            assert np.array_equal(before, after), f"tide_exit wrote outside its outputs, near or into {key}"
        assert (memory.get(workspace + size, guard) == FILL).all(), "tide_exit wrote after its workspace"
        memory.free()


def poison(shape: tuple[int, ...], dtype: type | np.dtype) -> np.ndarray:
    """An array of NaN bytes."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = FILL
    return array
