#include "allocations.h"

#include <onnxruntime_c_api.h>

#include <cerrno>
#include <cstdlib>
#include <new>

extern "C" OrtApiBase const* __real_OrtGetApiBase();

namespace {

thread_local std::int64_t next_number = 0;  // of the allocation that fails in the next call; 0: none
thread_local std::int64_t second = 0;       // of the one that fails after it; 0: none
thread_local std::int64_t remaining = 0;    // allocations until one fails; 0: none does
thread_local bool failed = false;

bool fails() {
  if (remaining == 0 || --remaining > 0) return false;
  remaining = second;
  second = 0;
  return failed = true;
}

OrtApi const* onnxruntime_api = nullptr;

OrtStatusPtr injected_failure() { return onnxruntime_api->CreateStatus(ORT_FAIL, "injected"); }

template <auto>
struct Failing;

template <typename... Arguments, OrtStatusPtr (*OrtApi::*member)(Arguments...) noexcept>
struct Failing<member> {
  static OrtStatusPtr call(Arguments... arguments) noexcept {
    return fails() ? injected_failure() : (onnxruntime_api->*member)(arguments...);
  }
};

// Fails before its work or after it.
OrtStatusPtr run_with_binding(OrtSession* session, OrtRunOptions const* options, OrtIoBinding const* binding) noexcept {
  if (fails()) return injected_failure();
  OrtStatusPtr const status = onnxruntime_api->RunWithBinding(session, options, binding);
  return status == nullptr && fails() ? injected_failure() : status;
}

template <auto... members>
void replace(OrtApi& api) {
  ((api.*members = Failing<members>::call), ...);
}

OrtApi const* failing_api(std::uint32_t version) noexcept {
  onnxruntime_api = __real_OrtGetApiBase()->GetApi(version);
  if (onnxruntime_api == nullptr) return nullptr;
  static OrtApi api = *onnxruntime_api;
  replace<&OrtApi::BindInput, &OrtApi::BindOutput, &OrtApi::BindOutputToDevice, &OrtApi::GetBoundOutputValues,
          &OrtApi::CreateTensorAsOrtValue, &OrtApi::CreateTensorWithDataAsOrtValue, &OrtApi::Run,
          &OrtApi::GetTensorTypeAndShape, &OrtApi::GetDimensions, &OrtApi::CreateIoBinding>(api);
  api.RunWithBinding = run_with_binding;
  return &api;
}

}  // namespace

void fail_allocation(std::int64_t number, std::int64_t again) {
  next_number = number;
  second = again;
}
bool allocation_failed() { return failed; }

void begin_injection() {
  failed = false;
  remaining = next_number;
  next_number = 0;
}

void end_injection() { remaining = second = 0; }

// The linker gives these to whoever calls the functions after `__wrap_`, in the driver and tide_runtime.
extern "C" {

void* __real_calloc(std::size_t count, std::size_t size);
void* __wrap_calloc(std::size_t count, std::size_t size) { return fails() ? nullptr : __real_calloc(count, size); }

void* __real__Znwm(std::size_t size);  // operator new
void* __wrap__Znwm(std::size_t size) {
  if (fails()) throw std::bad_alloc();
  return __real__Znwm(size);
}

OrtApiBase const* __wrap_OrtGetApiBase() {
  static OrtApiBase base = *__real_OrtGetApiBase();
  base.GetApi = failing_api;
  return &base;
}

int posix_memalign(void** memory, std::size_t alignment, std::size_t size) {
  void* const made = fails() ? nullptr : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (made == nullptr) return ENOMEM;
  *memory = made;
  return 0;
}
}
