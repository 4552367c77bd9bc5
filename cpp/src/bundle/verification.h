// Verifies the files of an open bundle while an engine is made of it, and remembers large ones that it verified.
//
// Hashing the weights takes longer than mapping them. So a thread hashes large files meanwhile, and a file that this user
// verified before is not hashed again: it is the same inode with the same size and times. Its time of change (ctime) cannot
// be set back, so that copies, edits and restored files are hashed. The newest notes are kept; a file whose note is gone is
// hashed again.
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
