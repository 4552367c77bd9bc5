// Verifies the files of an open bundle while an engine is made of it, and remembers large ones that it verified, as the
// Python package does (tide_export/bundle/verification.py), with the same notes.
#pragma once

#include <future>

#include "bundle/store.h"

namespace tide {

class Verification {
 public:
  // Compares the sha256 of small files with the manifest, and starts a thread for large ones that were not verified
  // before. Throws BundleError: one is corrupt.
  explicit Verification(Bundle const& bundle);

  // Waits for the large files. Throws BundleError: one is corrupt.
  void wait();

 private:
  std::future<void> large_;  // waits for its thread when it is destroyed
};

}  // namespace tide
