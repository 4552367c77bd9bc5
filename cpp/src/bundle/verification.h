// Verifies the files of an open bundle while its engine opens, and remembers verified large files.
//
// Hashing the weights takes longer than mapping them. So a thread hashes large files in the background, and a file that this
// user has verified is not hashed again while it is the same inode with the same size and times. Its time of change (ctime)
// cannot be set back, so copies, edited and restored files are hashed. Only the newest records are kept.
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
