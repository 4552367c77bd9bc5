// A CUDA runtime that starts nothing: it answers what the kernel asks before a launch, for a GPU that the test describes,
// and keeps what is launched. Linked with plugins/tide_exit/kernel.cu, for tests/plugins/test_exit_memory.py.
#include <cuda_runtime_api.h>

namespace {

constexpr size_t kUnasked = 48 * 1024;  // what a block may have without cudaFuncSetAttribute

size_t allowed = kUnasked;

}  // namespace

extern "C" {

// The GPU: version of the code for it, largest cluster, multiprocessors, and bytes of shared memory that a block may have.
int gpu_version = 90, gpu_cluster = 16, gpu_processors = 132;
long long gpu_shared = 227 * 1024;

// The launch: blocks, blocks to a cluster (0: no clusters), and bytes of shared memory of a block.
int launched_blocks = 0, launched_cluster = 0;
long long launched_shared = -1;

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void const*) {
  *attributes = {};
  attributes->ptxVersion = attributes->binaryVersion = gpu_version;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(void const*, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value > gpu_shared) return cudaErrorInvalidValue;
  allowed = static_cast<size_t>(value) > kUnasked ? static_cast<size_t>(value) : kUnasked;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxPotentialClusterSize(int* size, void const*, cudaLaunchConfig_t const* config) {
  *size = gpu_cluster;
  return config->dynamicSmemBytes > allowed ? cudaErrorInvalidValue : cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? gpu_processors : 0;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* config, void const*, void**) {
  if (config->dynamicSmemBytes > allowed) return cudaErrorInvalidValue;
  launched_blocks = static_cast<int>(config->gridDim.x);
  launched_cluster = 0;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      launched_cluster = static_cast<int>(config->attrs[i].val.clusterDim.x);
  launched_shared = static_cast<long long>(config->dynamicSmemBytes);
  return cudaSuccess;
}

// What nvcc's own code calls when a library is loaded, and would call for <<<>>>.
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterFunction(void**, char const*, char*, char const*, int, void*, void*, void*, void*, int*) {}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 1; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaErrorUnknown; }
cudaError_t __cudaGetKernel(cudaKernel_t*, void const*) { return cudaErrorUnknown; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return cudaErrorUnknown; }
cudaError_t cudaLaunchKernel(void const*, dim3, dim3, void**, size_t, cudaStream_t) { return cudaErrorUnknown; }

}  // extern "C"
