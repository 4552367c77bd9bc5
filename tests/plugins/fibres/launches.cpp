// What the CUDA runtime does for the kernels' host code: a GPU's properties, what it refuses, and what was launched.
#include <cuda_runtime.h>

#include <map>
#include <string>

#include "machine.h"

namespace fibres {
namespace {

int processors = 64;
std::string launches;  // JSON

struct Attributes {
  int largest_shared = 48 * 1024;
  int non_portable = 0;
};
std::map<const void*, Attributes> attributes_of;

int largest_shared() { return (tide::emulation().compute_capability >= 12 ? 99 : 227) * 1024; }
int most_in_cluster() { return tide::emulation().compute_capability > 10 ? 8 : 16; }

std::string pair(const char* name, int64_t value) { return "\"" + std::string(name) + "\": " + std::to_string(value); }

}  // namespace

cudaError_t set_attribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  Attributes& attributes = attributes_of[kernel];
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value > largest_shared()) return cudaErrorInvalidValue;
    attributes.largest_shared = value;
  } else {
    attributes.non_portable = value;
  }
  return cudaSuccess;
}

cudaError_t largest_cluster(int* size, const void* kernel) {
  *size = attributes_of[kernel].non_portable ? most_in_cluster() : 8;
  return cudaSuccess;
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, Code code) {
  const Attributes attributes = attributes_of[kernel];
  Launch launch{config.gridDim.x, config.blockDim.x, 1, config.dynamicSmemBytes, false, false};
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const auto& value = config.attrs[i].val;
    if (config.attrs[i].id == cudaLaunchAttributeCooperative) launch.cooperative = value.cooperative;
    if (config.attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization)
      launch.overlaps = value.programmaticStreamSerializationAllowed;
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) {
      launch.cluster = value.clusterDim.x;
      if (value.clusterDim.y != 1 || value.clusterDim.z != 1) return cudaErrorInvalidConfiguration;
    }
  }
  const int largest = attributes.non_portable ? most_in_cluster() : 8;
  if (launch.blocks == 0 || launch.threads == 0 || launch.threads > 1024 || launch.cluster == 0 ||
      static_cast<int>(launch.cluster) > largest || launch.blocks % launch.cluster != 0)
    return cudaErrorInvalidConfiguration;
  if (launch.shared > static_cast<size_t>(attributes.largest_shared)) return cudaErrorInvalidValue;
  if (launch.cooperative && static_cast<int>(launch.blocks) > processors) return cudaErrorCooperativeLaunchTooLarge;
  run(launch, code);
  launches += (launches.empty() ? "" : ", ") + std::string("{") + pair("blocks", launch.blocks) + ", " +
              pair("threads", launch.threads) + ", " + pair("cluster", launch.cluster) + ", " +
              pair("shared", static_cast<int64_t>(launch.shared)) + ", " + pair("cooperative", launch.cooperative) +
              ", " + pair("overlaps", launch.overlaps) + ", " + pair("largest_shared", attributes.largest_shared) +
              ", " + pair("non_portable", attributes.non_portable) + "}";
  return machine.problem.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace fibres

namespace tide {

Emulation& emulation() {
  static Emulation settings;
  return settings;
}

}  // namespace tide

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = fibres::processors;
  return cudaSuccess;
}

extern "C" {

__attribute__((visibility("default"))) void fibres_set_processors(int count) { fibres::processors = count; }

// Deletes a barrier or a statement; 0, none.
__attribute__((visibility("default"))) void fibres_delete(int site) { fibres::machine.mutant = site; }

// What was wrong with the last launch; nothing, if nothing was.
__attribute__((visibility("default"))) const char* fibres_problem() { return fibres::machine.problem.c_str(); }

// The launches since the last call, a JSON list.
__attribute__((visibility("default"))) const char* fibres_launches() {
  static std::string list;
  list = "[" + fibres::launches + "]";
  fibres::launches.clear();
  return list.c_str();
}

}  // extern "C"
