// ONNX Runtime's C interface over the networks of the table: a library that the runtime opens in its place
// (TIDE_ONNXRUNTIME). It has the functions that the runtime calls on a CPU, and no others.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "../../cpp/src/onnxruntime/functions.h"
#include "networks.h"
#include "table.h"

table::Control table_control;

namespace {

using namespace Ort;
using table::Info;
using table::Tensor;

struct Session {
  table::Network network;
  std::string text;
};

struct Binding {
  Session const* session;
  table::Bound bound;
};

template <typename To, typename From>
To* as(From* from) {
  return reinterpret_cast<To*>(const_cast<std::remove_const_t<From>*>(from));
}

RawStatus* failed(char const* what) { return as<RawStatus>(new std::string(what)); }

template <typename F>
RawStatus* guarded(F const& work) {
  try {
    work();
    return nullptr;
  } catch (std::exception const& error) {
    return failed(error.what());
  }
}

char* copied(std::string const& text) { return ::strdup(text.c_str()); }

// Runs a network in virtual time. One that is to fail fails before it writes, or after.
void run(Session const& session, table::Bound& bound) {
  std::int64_t const number = ++table_control.runs;
  table_control.clock += table_control.run_seconds;
  bool const fails = number == table_control.fail_at;
  if (fails) table_control.failed_draft = session.text == "drafter";
  if (fails && number % 2 == 0) throw std::runtime_error("a failure of the simulation");
  session.network.run(bound);
  if (fails) throw std::runtime_error("a failure of the simulation, late");
}

void bind(std::vector<table::Bound::Entry>& entries, table::Bound::Entry entry) {
  for (auto& known : entries) {
    if (known.name != entry.name) continue;
    known = std::move(entry);
    return;
  }
  entries.push_back(std::move(entry));
}

namespace functions {

char const* GetErrorMessage(RawStatus const* status) { return as<std::string>(status)->c_str(); }
RawStatus* CreateEnv(int, char const*, RawEnv** made) {
  return guarded([&] { *made = as<RawEnv>(new int); });
}
RawStatus* CreatePrepackedWeightsContainer(RawPackedWeights** made) {
  return guarded([&] { *made = as<RawPackedWeights>(new int); });
}
void ReleasePrepackedWeightsContainer(RawPackedWeights* made) { delete as<int>(made); }
RawStatus* CreateSessionFromArrayWithPrepackedWeightsContainer(RawEnv const*, void const* data, std::size_t size,
                                                               RawOptions const*, RawPackedWeights*,
                                                               RawSession** made) {
  return guarded([&] {
    std::string const text(static_cast<char const*>(data), size);
    *made = as<RawSession>(new Session{table::Network(text), text});
  });
}
RawStatus* Run(RawSession* session, RawRunOptions const*, char const* const* inputs, RawValue const* const* values,
               std::size_t count, char const* const* outputs, std::size_t output_count, RawValue** made) {
  return guarded([&] {
    table::Bound bound;
    for (std::size_t i = 0; i < count; ++i) bound.inputs.push_back({inputs[i], *as<Tensor>(values[i])});
    for (std::size_t i = 0; i < output_count; ++i) bound.outputs.push_back({outputs[i], {}, true});
    run(*as<Session>(session), bound);
    for (std::size_t i = 0; i < output_count; ++i) made[i] = as<RawValue>(new Tensor(bound.outputs[i].tensor));
  });
}
RawStatus* CreateSessionOptions(RawOptions** made) {
  return guarded([&] { *made = as<RawOptions>(new int); });
}
RawStatus* SetSessionLogSeverityLevel(RawOptions*, int) { return nullptr; }
RawStatus* SetIntraOpNumThreads(RawOptions*, int) { return nullptr; }
RawStatus* AddSessionConfigEntry(RawOptions*, char const*, char const*) { return nullptr; }
RawStatus* SessionGetInputCount(RawSession const* session, std::size_t* count) {
  *count = as<Session>(session)->network.inputs.size();
  return nullptr;
}
RawStatus* SessionGetOutputCount(RawSession const* session, std::size_t* count) {
  *count = as<Session>(session)->network.outputs.size();
  return nullptr;
}
RawStatus* SessionGetInputTypeInfo(RawSession const* session, std::size_t i, RawTypeInfo** info) {
  return guarded([&] { *info = as<RawTypeInfo>(new Info(as<Session>(session)->network.inputs[i])); });
}
RawStatus* SessionGetOutputTypeInfo(RawSession const* session, std::size_t i, RawTypeInfo** info) {
  return guarded([&] { *info = as<RawTypeInfo>(new Info(as<Session>(session)->network.outputs[i])); });
}
RawStatus* SessionGetInputName(RawSession const* session, std::size_t i, RawAllocator*, char** name) {
  *name = copied(as<Session>(session)->network.inputs[i].name);
  return nullptr;
}
RawStatus* SessionGetOutputName(RawSession const* session, std::size_t i, RawAllocator*, char** name) {
  *name = copied(as<Session>(session)->network.outputs[i].name);
  return nullptr;
}
RawStatus* CreateRunOptions(RawRunOptions** made) {
  return guarded([&] { *made = as<RawRunOptions>(new int); });
}
RawStatus* CreateTensorWithDataAsOrtValue(RawMemory const*, void* data, std::size_t bytes, std::int64_t const* shape,
                                          std::size_t dims, int type, RawValue** made) {
  return guarded([&] {
    auto tensor = std::make_unique<Tensor>(Tensor{{shape, shape + dims}, type, data, nullptr});
    if (table::bytes_of(tensor->shape, type) > bytes) throw std::logic_error("a tensor larger than its memory");
    *made = as<RawValue>(tensor.release());
  });
}
RawStatus* GetTensorMutableData(RawValue* value, void** data) {
  *data = as<Tensor>(value)->data;
  return nullptr;
}
RawStatus* CastTypeInfoToTensorInfo(RawTypeInfo const* info, RawShape const** shape) {
  *shape = as<RawShape>(info);
  return nullptr;
}
RawStatus* GetOnnxTypeFromTypeInfo(RawTypeInfo const*, int* kind) {
  *kind = kTensor;
  return nullptr;
}
RawStatus* GetTensorElementType(RawShape const* shape, int* type) {
  *type = as<Info>(shape)->type;
  return nullptr;
}
RawStatus* GetDimensionsCount(RawShape const* shape, std::size_t* count) {
  *count = as<Info>(shape)->shape.size();
  return nullptr;
}
RawStatus* GetDimensions(RawShape const* shape, std::int64_t* dims, std::size_t count) {
  std::copy_n(as<Info>(shape)->shape.begin(), count, dims);
  return nullptr;
}
RawStatus* GetSymbolicDimensions(RawShape const*, char const** names, std::size_t count) {
  std::fill_n(names, count, "");
  return nullptr;
}
RawStatus* GetTensorTypeAndShape(RawValue const* value, RawShape** shape) {
  return guarded([&] { *shape = as<RawShape>(new Info{"", as<Tensor>(value)->type, as<Tensor>(value)->shape}); });
}
RawStatus* CreateMemoryInfo(char const*, int, int, int, RawMemory** made) {
  return guarded([&] { *made = as<RawMemory>(new int); });
}
RawStatus* AllocatorFree(RawAllocator*, void* memory) {
  std::free(memory);
  return nullptr;
}
RawStatus* GetAllocatorWithDefaultOptions(RawAllocator** allocator) {
  static int one;
  *allocator = as<RawAllocator>(&one);
  return nullptr;
}
void ReleaseEnv(RawEnv* made) { delete as<int>(made); }
void ReleaseStatus(RawStatus* made) { delete as<std::string>(made); }
void ReleaseMemoryInfo(RawMemory* made) { delete as<int>(made); }
void ReleaseSession(RawSession* made) { delete as<Session>(made); }
void ReleaseValue(RawValue* made) { delete as<Tensor>(made); }
void ReleaseRunOptions(RawRunOptions* made) { delete as<int>(made); }
void ReleaseTypeInfo(RawTypeInfo* made) { delete as<Info>(made); }
void ReleaseTensorTypeAndShapeInfo(RawShape* made) { delete as<Info>(made); }
void ReleaseSessionOptions(RawOptions* made) { delete as<int>(made); }
RawStatus* SessionGetModelMetadata(RawSession const*, RawMetadata** made) {
  return guarded([&] { *made = as<RawMetadata>(new int); });
}
RawStatus* ModelMetadataLookupCustomMetadataMap(RawMetadata const*, RawAllocator*, char const* key, char** value) {
  std::string const name = key;
  *value = copied(name == "tide.checkpoints"      ? "1,2"
                  : name == "tide.context_length" ? std::to_string(table::kContext)
                                                  : std::to_string(table::kWidth));
  return nullptr;
}
void ReleaseModelMetadata(RawMetadata* made) { delete as<int>(made); }
RawStatus* RunWithBinding(RawSession* session, RawRunOptions const*, RawBinding const* binding) {
  return guarded([&] { run(*as<Session>(session), as<Binding>(binding)->bound); });
}
RawStatus* CreateIoBinding(RawSession* session, RawBinding** made) {
  return guarded([&] { *made = as<RawBinding>(new Binding{as<Session>(session), {}}); });
}
void ReleaseIoBinding(RawBinding* made) { delete as<Binding>(made); }
RawStatus* BindInput(RawBinding* binding, char const* name, RawValue const* value) {
  return guarded([&] { bind(as<Binding>(binding)->bound.inputs, {name, *as<Tensor>(value)}); });
}
RawStatus* BindOutput(RawBinding* binding, char const* name, RawValue const* value) {
  return guarded([&] { bind(as<Binding>(binding)->bound.outputs, {name, *as<Tensor>(value)}); });
}

}  // namespace functions

void missing() { std::abort(); }

abi::Function const* table_of(std::uint32_t) {
  static abi::Function table[300];
  if (table[0] != nullptr) return table;
  std::fill(std::begin(table), std::end(table), &missing);
#define ENTRY(name) table[decltype(Functions::name)::position] = reinterpret_cast<abi::Function>(&functions::name)
  ENTRY(GetErrorMessage), ENTRY(CreateEnv), ENTRY(CreatePrepackedWeightsContainer), ENTRY(Run);
  ENTRY(ReleasePrepackedWeightsContainer), ENTRY(CreateSessionFromArrayWithPrepackedWeightsContainer);
  ENTRY(CreateSessionOptions);
  ENTRY(SetSessionLogSeverityLevel), ENTRY(SetIntraOpNumThreads), ENTRY(AddSessionConfigEntry);
  ENTRY(SessionGetInputCount), ENTRY(SessionGetOutputCount), ENTRY(SessionGetInputTypeInfo);
  ENTRY(SessionGetOutputTypeInfo), ENTRY(SessionGetInputName), ENTRY(SessionGetOutputName), ENTRY(CreateRunOptions);
  ENTRY(CreateTensorWithDataAsOrtValue), ENTRY(GetTensorMutableData), ENTRY(CastTypeInfoToTensorInfo);
  ENTRY(GetOnnxTypeFromTypeInfo), ENTRY(GetTensorElementType), ENTRY(GetDimensionsCount), ENTRY(GetDimensions);
  ENTRY(GetSymbolicDimensions), ENTRY(GetTensorTypeAndShape), ENTRY(CreateMemoryInfo), ENTRY(AllocatorFree);
  ENTRY(GetAllocatorWithDefaultOptions), ENTRY(ReleaseEnv), ENTRY(ReleaseStatus), ENTRY(ReleaseMemoryInfo);
  ENTRY(ReleaseSession), ENTRY(ReleaseValue), ENTRY(ReleaseRunOptions), ENTRY(ReleaseTypeInfo);
  ENTRY(ReleaseTensorTypeAndShapeInfo), ENTRY(ReleaseSessionOptions), ENTRY(SessionGetModelMetadata);
  ENTRY(ModelMetadataLookupCustomMetadataMap), ENTRY(ReleaseModelMetadata), ENTRY(RunWithBinding);
  ENTRY(CreateIoBinding), ENTRY(ReleaseIoBinding), ENTRY(BindInput), ENTRY(BindOutput);
#undef ENTRY
  return table;
}

abi::ApiBase const base{&table_of, [] { return "a table"; }};

}  // namespace

extern "C" abi::ApiBase const* OrtGetApiBase() { return &base; }
