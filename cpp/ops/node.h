// What computes a node of a graph: alone, as an operator, or one of many in TideLayers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "phases.h"

namespace tide_ops {

// Where a node's tensors are.
class Operands {
 public:
  virtual ~Operands() = default;

  // An input that is absent has no data and rank 0.
  virtual Status* input(std::size_t index, Tensor& tensor) const = 0;
  // Makes an output; `data` stays null if nothing reads it.
  virtual Status* output(std::size_t index, std::int64_t const* dims, std::size_t rank, void** data) const = 0;
};

// What a node says about itself.
class Attributes {
 public:
  virtual ~Attributes() = default;

  virtual std::int64_t integer(char const* name, std::int64_t otherwise) const = 0;
  virtual float number(char const* name, float otherwise) const = 0;
  virtual std::string text(char const* name) const = 0;  // empty: it says nothing
};

// One run of an operator: its phases and their memory.
class Run {
 public:
  explicit Run(Context* context) : context_(context) {}

  template <typename Part>
  void add(std::int64_t count, Part part, Reading reading = {}) {
    phases_.add(count, std::move(part), reading);
  }
  // It is too much for one thread.
  void needs_threads() { alone_ = false; }
  Status* finish() { return phases_.run(context_, alone_); }

  // Does work of phases of its own, at once.
  template <typename Part>
  Status* now(std::int64_t count, Part part) const {
    Phases phases;
    phases.add(count, std::move(part));
    return phases.run(context_, count < 2);
  }

  // Memory for floats. What one node keeps in kFirst or kSecond is lost to the next one; kHidden is of all nodes.
  enum Place { kFirst, kSecond, kHidden, kPlaces };
  float* scratch(std::int64_t floats, Place place = kFirst) {
    static thread_local Buffer kept[kPlaces];
    return memory_[place].of(floats, kept[place]);
  }

 private:
  // Memory that is not moved when more is asked for: small, it is kept by the thread; larger, it lives as long as this.
  class Memory {
   public:
    float* of(std::int64_t floats, Buffer& kept) {
      constexpr std::int64_t kKept = 1 << 18;
      if (floats <= kKept) return kept.of(kKept);
      if (floats > largest_) {
        large_.emplace_back();
        largest_ = floats;
      }
      return large_.back().of(largest_);
    }

   private:
    std::vector<Buffer> large_;
    std::int64_t largest_ = 0;
  };

  Context* const context_;
  Phases phases_;
  Memory memory_[kPlaces];
  bool alone_ = true;
};

class Node {
 public:
  virtual ~Node() = default;
  // Adds the phases that compute the outputs. Throws std::bad_alloc.
  virtual Status* add(Operands const& operands, Run& run) = 0;
};

inline float const* data_of(Tensor const& tensor) { return static_cast<float const*>(tensor.data); }

inline Status* invalid(char const* message) { return api.CreateStatus(abi::kInvalidArgument, message); }

}  // namespace tide_ops
