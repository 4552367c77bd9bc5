#include "allocations.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "onnxruntime/functions.h"

namespace abi = Ort::abi;
using Ort::RawStatus;

namespace {

thread_local std::int64_t remaining = 0;  // allocations until one fails; 0: none does
thread_local std::int64_t second = 0;     // from that one to the one that fails after it; 0: none
thread_local bool failed = false;

bool fails() {
  if (remaining == 0 || --remaining > 0) return false;
  remaining = second;
  second = 0;
  return failed = true;
}

constexpr int kCopied = decltype(abi::Api::KernelContext_ParallelFor)::position + 1;  // the last that is called
constexpr int kFail = 1;                                                              // ORT_FAIL
abi::Function const* table = nullptr;  // that of the library
abi::ApiBase const* (*library_base)() = nullptr;

RawStatus* injected_failure() {
  return reinterpret_cast<RawStatus* (*)(int, char const*)>(table[0])(kFail, "injected");  // CreateStatus
}

// A function of the library that fails in place of its work.
template <int position, typename Signature>
struct Failing;
template <int position, typename... Arguments>
struct Failing<position, RawStatus*(Arguments...)> {
  static RawStatus* call(Arguments... arguments) {
    return fails() ? injected_failure() : reinterpret_cast<RawStatus* (*)(Arguments...)>(table[position])(arguments...);
  }
};

// Fails before its work or after it.
RawStatus* run_with_binding(Ort::RawSession* session, Ort::RawRunOptions const* options, Ort::RawBinding const* binding) {
  RawStatus* const status = Failing<133, decltype(run_with_binding)>::call(session, options, binding);
  return status == nullptr && fails() ? injected_failure() : status;
}

template <int position, typename Signature>
void replace(abi::Function* copy, abi::Entry<position, Signature> const Ort::Functions::*) {
  copy[position] = reinterpret_cast<abi::Function>(Failing<position, Signature>::call);
}

abi::Function const* failing_api(std::uint32_t version) {
  table = library_base()->GetApi(version);
  if (table == nullptr) return nullptr;
  static abi::Function copy[kCopied];
  std::copy_n(table, kCopied, copy);
  using F = Ort::Functions;
  replace(copy, &F::BindInput);
  replace(copy, &F::BindOutput);
  replace(copy, &F::CreateTensorWithDataAsOrtValue);
  replace(copy, &F::Run);
  replace(copy, &F::GetTensorTypeAndShape);
  replace(copy, &F::GetDimensions);
  replace(copy, &F::CreateIoBinding);
  copy[133] = reinterpret_cast<abi::Function>(run_with_binding);
  return copy;
}

abi::ApiBase const* failing_base() {
  static abi::ApiBase const base{failing_api, library_base()->GetVersionString};
  return &base;
}

}  // namespace

void fail_allocation(std::int64_t number, std::int64_t again) {
  failed = false;
  remaining = number;
  second = again;
}

bool end_failures() {
  remaining = second = 0;
  return failed;
}

// The linker gives these to whoever calls the functions after `__wrap_`, in the program, the runtime and the C++ library.
extern "C" {

void* __real_calloc(std::size_t count, std::size_t size);
void* __wrap_calloc(std::size_t count, std::size_t size) { return fails() ? nullptr : __real_calloc(count, size); }

void* __real__Znwm(std::size_t size);  // operator new
void* __wrap__Znwm(std::size_t size) {
  if (fails()) throw std::bad_alloc();
  return __real__Znwm(size);
}

void* __real_dlsym(void* library, char const* name);
void* __wrap_dlsym(void* library, char const* name) {
  void* const found = __real_dlsym(library, name);
  if (found == nullptr || std::strcmp(name, "OrtGetApiBase") != 0) return found;
  library_base = reinterpret_cast<abi::ApiBase const* (*)()>(found);
  return reinterpret_cast<void*>(failing_base);
}

int posix_memalign(void** memory, std::size_t alignment, std::size_t size) {
  void* const made = fails() ? nullptr : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (made == nullptr) return ENOMEM;
  *memory = made;
  return 0;
}
}
