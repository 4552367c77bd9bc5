// Commands on one batch that is stepped by hand, which `tide::Engine` has no interface for. All answers are JSON.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sequence.h"

class BatchDriver {
 public:
  // batch_load BUNDLE, with a device its segment networks; batch_start COMPACTION_THRESHOLD SLOTS; batch_join THRESHOLDS
  // MAX_PENDING; batch_leave SLOT; batch_rewind SLOT LENGTH; batch_step, with SLOT KEEP FULL IDS for each
  // sequence (KEEP 0: it does not verify, IDS "none": no tokens). The answer describes all sequences and the results.
  std::string answer(std::string const& command, std::vector<std::string> const& words);

 private:
  std::string step(std::vector<std::string> const& words);
  std::string described() const;

  std::shared_ptr<tide::Backend> backend_;
  std::unique_ptr<tide::Batch> batch_;
  std::vector<bool> used_;  // by slot
};
