// Runs the bundle's drafter for the jobs of a step.
#include <algorithm>

#include "machine.h"
#include "scheduling/step_loop.h"

namespace tide {

// Tells a job what its step runs beside it.
void StepLoop::show_others(Job& job) const noexcept {
  if (job.reads_prompt()) return;
  std::int64_t const later = last_ > 0 ? last_ - job.left() : 0;
  job.decoder().run_beside({writing_ - 1, tokens_ - 1 - job.decoder().planned(), later});
}

// Runs the drafter for the jobs that ask it, all at once, until none does. Returns whether the step goes on.
bool StepLoop::draft() noexcept {
  writing_ = tokens_ = 0;
  last_ = 0;
  bool const together = together_ && waiting() == 0;
  for (auto const& job : slots_) {
    if (job == nullptr || job->reads_prompt()) continue;
    ++writing_;
    tokens_ += 1 + job->decoder().planned();
    if (together) last_ = std::max(last_, job->left());
  }
  while (drafts_ != nullptr) {
    std::vector<std::size_t> asking;
    try {
      for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
        if (slots_[slot] == nullptr || slots_[slot]->reads_prompt()) continue;
        show_others(*slots_[slot]);
        asking.push_back(slot);
      }
      for (std::size_t sharing = 0; sharing != asking.size();) {  // those that would ask alone with these, and so on
        sharing = asking.size();
        auto const declines = [&](std::size_t slot) { return !slots_[slot]->decoder().asks_drafter(sharing); };
        asking.erase(std::remove_if(asking.begin(), asking.end(), declines), asking.end());
      }
      if (asking.empty()) return true;
      std::vector<SlotDraft> rows;
      for (std::size_t const slot : asking) rows.push_back({slot, slots_[slot]->decoder().draft_rows()});
      double const started = seconds_now();
      std::vector<DraftResult> const results = drafts_->run(rows);
      if (rows.size() == 1 && rows[0].rows.ids.size() == 1) backend_->costs().drafted(seconds_now() - started);
      for (std::size_t i = 0; i < asking.size(); ++i) {
        Decoder& decoder = slots_[asking[i]]->decoder();
        std::size_t const before = decoder.planned();
        try {
          show_others(*slots_[asking[i]]);
          decoder.take_draft(results[i], asking.size());
          tokens_ += decoder.planned() - before;
        } catch (...) {  // of a hook
          fail(asking[i], std::current_exception());
          if (is_stream_) return false;
        }
      }
    } catch (...) {
      for (std::size_t const slot : asking) {  // perhaps twice, where it was thrown while some were removed
        if (slots_[slot] != nullptr) fail(slot, std::current_exception());
      }
      return !is_stream_;
    }
  }
  return true;
}

}  // namespace tide
