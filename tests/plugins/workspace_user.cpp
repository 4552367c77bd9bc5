// Runs the plugin class on a kernel that does nothing, and checks the size of the workspace that it tells the kernel, and the
// counters that it gives it: for tests/plugins/test_plugin_workspace.py. Ends with 0, or says what went wrong.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "tide_exit/plugin.h"

using namespace nvinfer1;

namespace {

constexpr int64_t kEach = 1000;  // bytes for a slot
int64_t told = -1;
uint32_t* counters = nullptr;
int allocations = 0, memory_left = 0;  // blocks of memory
bool has_memory = true;
std::string logged;

void expect(bool condition, char const* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

}  // namespace

extern "C" int64_t tide_exit_workspace(TideExitArgs const* args) { return args->slots * kEach; }

extern "C" cudaError_t tide_exit(TideExitArgs const* args, void*, int64_t bytes, uint32_t* given, cudaStream_t) {
  told = bytes;
  counters = given;
  return bytes < tide_exit_workspace(args) || args->slots == 5 ? cudaErrorInvalidValue : cudaSuccess;
}

extern "C" cudaError_t cudaMemcpyAsync(void*, void const*, size_t, cudaMemcpyKind, cudaStream_t) { return cudaSuccess; }

extern "C" cudaError_t cudaMalloc(void** memory, size_t size) {
  if (!has_memory) return cudaErrorMemoryAllocation;
  *memory = std::malloc(size);
  std::memset(*memory, 0xFF, size);
  ++allocations, ++memory_left;
  return cudaSuccess;
}

extern "C" cudaError_t cudaMemsetAsync(void* memory, int value, size_t size, cudaStream_t) {
  std::memset(memory, value, size);
  return cudaSuccess;
}

extern "C" cudaError_t cudaFree(void* memory) {
  memory_left -= memory != nullptr ? 1 : 0;
  std::free(memory);
  return cudaSuccess;
}

void tide::log_error(char const*, char const* text) noexcept { logged = text; }

int main() {
  constexpr int64_t kMost = 9;
  auto made = std::make_unique<tide::TideExit>(tide::TideExit::defaults());
  tide::TideExit& plugin = *made;
  DynamicPluginTensorDesc dynamic[7]{};
  PluginTensorDesc desc[7]{};
  void const* inputs[7]{};
  void* outputs[3]{};
  char workspace[1];
  for (int64_t slots = 1; slots <= kMost; ++slots) {
    Dims const shapes[] = {{3, {slots, 2, 8}}, {1, {slots}}, {1, {slots}}, {4, {slots, 1, 3, 8}},
                           {2, {8, 4}},        {2, {4, 1}},  {1, {1}}};
    for (int i = 0; i < 7; ++i) {
      desc[i].type = i == 1 ? DataType::kINT64 : DataType::kFLOAT;
      desc[i].dims = shapes[i];
      dynamic[i].desc = desc[i];
      dynamic[i].max = shapes[i];
      if (i < 4) dynamic[i].desc.dims.d[0] = -1, dynamic[i].max.d[0] = kMost;  // as in an engine for several sequences
    }
    size_t const given = plugin.getWorkspaceSize(dynamic, 7, dynamic, 3);
    expect(given == kMost * kEach, "the builder is asked for the workspace of the most sequences");
    plugin.onShapeChange(desc, 7, desc, 3);
    bool const done = plugin.enqueue(desc, desc, inputs, outputs, workspace, nullptr) == 0;
    expect(told == slots * kEach, "the kernel is told what these sequences need");
    expect(told <= static_cast<int64_t>(given), "the kernel is told more than there is");
    expect(done == (slots != 5), "the kernel's answer is not the plugin's");
  }
  expect(logged == "CUDA error 1", "the refusal is not logged");
  expect(allocations == 1, "counters are allocated once");
  expect(std::all_of(counters, counters + TIDE_EXIT_COUNTERS, [](uint32_t one) { return one == 0; }), "counters are not 0");
  uint32_t* const first = counters;
  std::unique_ptr<IPluginV3> copy(plugin.attachToContext(nullptr));
  auto* runtime = static_cast<IPluginV3OneRuntime*>(copy->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
  runtime->onShapeChange(desc, 7, desc, 3);
  has_memory = false;
  expect(runtime->enqueue(desc, desc, inputs, outputs, workspace, nullptr) != 0, "no memory is no error");
  expect(logged == "CUDA error 2", "a lack of memory is not logged");
  has_memory = true;
  expect(runtime->enqueue(desc, desc, inputs, outputs, workspace, nullptr) == 0, "it does not run once there is memory");
  expect(counters != first, "two contexts have the same counters");
  copy.reset();
  made.reset();
  expect(memory_left == 0, "counters are left behind");
  return 0;
}
