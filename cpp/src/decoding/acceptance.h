// How likely a draft is accepted, estimated from what verification showed before in the same sequence. The shares and
// the rule are those of tide_export/runtime/decoding/acceptance.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tide {

constexpr std::size_t kMaxNgram = 4;  // length of the longest n-gram that prompt lookup matches
constexpr std::size_t kExits = 0;     // the source of early exits; those of prompt-lookup drafts follow

// The source of a draft after a match of `length` tokens which the same token followed `agreements` times more.
std::size_t ngram_source(std::size_t length, std::int64_t agreements);

// Estimates of one sequence, by source.
class Acceptance {
 public:
  Acceptance();

  // Estimated probability that the next draft of a source is accepted if those before it are.
  double of(std::size_t source) const { return accepted_[source] / drafted_[source]; }

  // Whether early exits are worth drafting; once they are not, they stay off in this sequence.
  bool exits_pay() const;

  // Adds a verification: of drafts of these sources the first `accepted`. Those after the first rejected show nothing.
  void record(std::vector<std::size_t> const& sources, std::size_t accepted);

 private:
  std::vector<double> accepted_, drafted_;
};

}  // namespace tide
