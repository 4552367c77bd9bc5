// Opens ONNX Runtime sessions and runs them on the caller's memory.
#pragma once

#include "onnxruntime/api.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bundle/store.h"
#include "segmented/network_spec.h"

namespace tide {

// As the first member of what holds sessions, returns freed memory to the system when they are gone, where the C library
// is glibc, which would keep most of it.
struct ReturnsFreeMemory {
  ReturnsFreeMemory() = default;
  ~ReturnsFreeMemory();
  ReturnsFreeMemory(ReturnsFreeMemory const&) = delete;
  ReturnsFreeMemory& operator=(ReturnsFreeMemory const&) = delete;
};

// What a session reads in the file of its weights as long as it lives.
struct SharedWeights {
  std::shared_ptr<Mapping const> memory;
  std::vector<Ort::Value> weights;
};

// How a session runs on a GPU, through ONNX Runtime's provider for CUDA: the GPU's number, the stream, and whether runs
// may be recorded as CUDA graphs.
struct OnCuda {
  int gpu;
  void* stream;
  bool records;
};

// A session with the weights that it shares; as the last base it is gone before them.
struct NetworkSession : SharedWeights, Ort::Session {
  NetworkSession() : Ort::Session(nullptr) {}
  NetworkSession(SharedWeights shared, Ort::Session session)
      : SharedWeights(std::move(shared)), Ort::Session(std::move(session)) {}
};

// Loads a network of a bundle, whose external weights are in the file `weights`. ONNX Runtime gets both from memory and
// opens no file. Weights that it does not pack stay in the mapped file: they take no time to load, and all sessions and
// processes share them. Throws BundleError: it does not load, or a file was changed since the bundle was opened.
//
// replacement: a graph to load in place of the file's, on the same weights; null: none.
// gpu: none: it runs on the CPU.
NetworkSession load_network(Ort::Env const& env, Bundle const& bundle, std::string const& name,
                            std::optional<std::int64_t> threads, char const* weights = kWeightsFile,
                            std::optional<OnCuda> gpu = std::nullopt, std::string const* replacement = nullptr);

// The inputs and outputs of a network; a dimension of any name but "batch" and "keys" is kTokens.
std::vector<Tensor> tensors_of(Ort::Session const& session);

// The type of this name in ONNX Runtime.
Ort::ElementType element_type(std::string const& dtype);

template <typename T>
Ort::ElementType element_type() {
  if (std::is_same_v<T, float>) return Ort::abi::kFloat;
  return std::is_same_v<T, std::int32_t> ? Ort::abi::kInt32 : Ort::abi::kInt64;
}

// A tensor on the caller's memory, which must outlive its use.
template <typename T>
Ort::Value view(Ort::MemoryInfo const& memory, T* data, std::vector<std::int64_t> const& shape) {
  std::size_t bytes = sizeof(T);
  for (std::int64_t const size : shape) bytes *= static_cast<std::size_t>(size);
  using Plain = std::remove_const_t<T>;
  return Ort::Value::on(memory, const_cast<Plain*>(data), bytes, shape.data(), shape.size(), element_type<Plain>());
}

}  // namespace tide
