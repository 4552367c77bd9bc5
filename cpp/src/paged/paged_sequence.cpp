#include "paged/paged_sequence.h"

#include <algorithm>
#include <string>
#include <utility>

#include "request.h"
#include "tide/errors.h"

namespace tide {

PagedSequence::PagedSequence(Manifest const& manifest, PagePool& pool, ExitRule exit_rule)
    : Sequence(manifest, std::move(exit_rule)),
      pending(lengths.size()),
      pool_(pool),
      kept_from_(lengths.size()) {
  if (!manifest.model.states.empty()) pool.states.take(1, place_);
}

PagedSequence::~PagedSequence() {
  release_after(0);
  undo_failed();
  for (Page const place : place_) pool_.states.release(place);
}

void PagedSequence::rewind(std::int64_t length) {
  undo_failed();
  std::vector<std::int64_t> const before = lengths;
  std::int64_t from = 0;
  for (std::size_t k = 0; k < lengths.size(); ++k) {
    if (length < before[k]) from = std::max(from, kept_from_[k]);
  }
  if (0 < length && length < from && !place_.empty()) {
    throw GenerationError("a sequence with recurrent states cannot be rewound to " + std::to_string(length) +
                          " tokens: they are known after " + std::to_string(from) + " and more, or after none");
  }
  Sequence::rewind(length);
  if (length == 0) std::fill(kept_from_.begin(), kept_from_.end(), 0);
  auto const width = static_cast<std::size_t>(manifest_.model.hidden_size);
  for (std::size_t k = 1; k < lengths.size(); ++k) {
    auto const left = static_cast<std::size_t>(std::max<std::int64_t>(length - before[k], 0));
    pending[k].resize(std::min(pending[k].size(), left * width));
  }
  release_after(pages_of(length));
}

bool PagedSequence::knows(std::int64_t length) const {
  return length <= lengths.back() && *std::max_element(kept_from_.begin(), kept_from_.end()) <= length;
}

std::int64_t PagedSequence::reserve(std::size_t count) {
  std::int64_t const total = length_after(length(), count, context_of(manifest_));
  if (kept != kNoLimit) {  // the states after the next page must stay known until the last segment has run over it
    std::int64_t const known = *std::max_element(kept_from_.begin(), kept_from_.end());
    settled = std::min(settled, static_cast<std::int64_t>(pages_of(std::max(known, kept + 1))) * kPageTokens);
  }
  undo_failed();
  if (!place_.empty() && length() > 0 && total - lengths.back() > manifest_.model.undo()) {  // it runs on a copy
    before_ = place_;
    pool_.states.share(before_[0]);
  }
  for (Page& place : place_) pool_.states.make_own(place);
  // Deeper segments may still write what is pending before them.
  for (auto page = static_cast<std::size_t>(lengths.back() / kPageTokens); page < pages_.size(); ++page) {
    pool_.make_own(pages_[page]);
  }
  std::size_t const needed = pages_of(total);
  if (needed > pages_.size()) pool_.take(needed - pages_.size(), pages_);
  return total;
}

void PagedSequence::ran(std::size_t segments_run, std::int64_t total, std::vector<float> new_pending) noexcept {
  for (Page const place : before_) pool_.states.release(place);
  before_.clear();
  std::int64_t const undo = manifest_.model.undo();
  for (std::size_t k = 0; k < segments_run; ++k) {
    kept_from_[k] = std::max({kept_from_[k], std::min(settled, lengths[k]), total - undo});
    lengths[k] = total;
    pending[k].clear();
  }
  if (segments_run < lengths.size()) pending[segments_run] = std::move(new_pending);
}

// Takes back what a step that failed did to recurrent states, where a run of it again would not.
void PagedSequence::undo_failed() noexcept {
  if (before_.empty()) return;
  pool_.states.release(place_[0]);
  place_.swap(before_);
  before_.clear();
}

void PagedSequence::begin(std::vector<Page> const& shared, std::int64_t length, std::optional<Page> states) {
  pages_.reserve(shared.size());
  for (Page const page : shared) {
    pool_.share(page);
    pages_.push_back(page);
  }
  lengths.assign(lengths.size(), length);
  if (!states) return;
  pool_.states.share(*states);
  pool_.states.release(std::exchange(place_[0], *states));
  kept_from_ = lengths;
}

void PagedSequence::release_after(std::size_t count) noexcept {
  for (; pages_.size() > count; pages_.pop_back()) pool_.release(pages_.back());
}

}  // namespace tide
