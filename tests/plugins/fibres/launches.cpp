// What the CUDA runtime does for the kernel's host code: what it refuses, and what was launched.
#include <cuda_runtime.h>

#include <string>

#include "machine.h"

namespace fibres {
namespace {

constexpr size_t kLargestShared = 48 * 1024;  // that a block may have unasked

std::string launches;  // JSON

std::string pair(const char* name, int64_t value) { return "\"" + std::string(name) + "\": " + std::to_string(value); }

}  // namespace

cudaError_t launch(const cudaLaunchConfig_t& config, Code code) {
  const Launch launch{config.gridDim.x, config.blockDim.x, config.dynamicSmemBytes};
  if (launch.blocks == 0 || launch.threads == 0 || launch.threads > 1024) return cudaErrorInvalidConfiguration;
  if (launch.shared > kLargestShared) return cudaErrorInvalidValue;
  run(launch, code);
  launches += (launches.empty() ? "" : ", ") + std::string("{") + pair("blocks", launch.blocks) + ", " +
              pair("threads", launch.threads) + ", " + pair("shared", static_cast<int64_t>(launch.shared)) + "}";
  return machine.problem.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace fibres

namespace tide {

Emulation& emulation() {
  static Emulation settings;
  return settings;
}

}  // namespace tide

extern "C" {

__attribute__((visibility("default"))) void fibres_set_resident(int blocks) {
  fibres::machine.resident = static_cast<unsigned>(blocks);
}

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
