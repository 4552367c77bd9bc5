// Records the process that an object belongs to. A forked child has copies of all objects but none of the threads that they
// wait for, so it can neither use nor free them.
#pragma once

#include <unistd.h>

#include "tide/errors.h"

namespace tide {

// That which made it.
class Process {
 public:
  bool is_this() const { return ::getpid() == id_; }

  // Throws GenerationError: this is a child of it.
  void check() const {
    if (is_this()) return;
    throw GenerationError(
        "the engine was loaded before this process was forked, which has none of its threads: load the bundle in this "
        "process, or start it by spawn in place of fork");
  }

  // As a deleter: frees an object in its process alone.
  template <typename T>
  void operator()(T* object) const {
    if (is_this()) delete object;
  }

 private:
  ::pid_t id_ = ::getpid();
};

}  // namespace tide
