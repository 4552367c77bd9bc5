// Lets a process end while its threads use the library: they wait outside, so that its objects can be freed.
#pragma once

namespace tide {

// Held by a thread while it runs a call or a step.
class Inside {
 public:
  enum Otherwise { wait, refuse };

  // Once the process ends, this waits for ever or is refused, but in the thread that ends it.
  explicit Inside(Otherwise otherwise = wait) noexcept;
  ~Inside();
  Inside(Inside const&) = delete;
  Inside& operator=(Inside const&) = delete;

  explicit operator bool() const { return admitted_; }

 private:
  bool admitted_ = true;
};

// Ends the process's use of the library by other threads than this one. Returns whether all had left after `seconds`.
bool leave(double seconds) noexcept;

}  // namespace tide
