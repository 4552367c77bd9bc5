// What drafts of one sequence gain and cost, by what verification showed before in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tide {

constexpr std::size_t kMaxNgram = 3;  // length of the longest n-gram that prompt lookup matches

// The source of a draft after a match of `length` tokens which the same token followed `agreements` times more.
std::size_t ngram_source(std::size_t length, std::int64_t agreements);

// What drafts of one kind may still lose in a sequence, in steps of full depth.
class Balance {
 public:
  double steps() const { return steps_; }

  // Adds a verification: of `accepted` drafts, each of which saved a step, at a cost; the sequence grew by `tokens`.
  void settle(std::size_t accepted, double cost, std::size_t tokens);

 private:
  double steps_ = 0.5;
};

// Estimated shares of prompt-lookup drafts that are accepted, by source.
class Acceptance {
 public:
  Acceptance();

  // Estimated probability that the next draft of a source is accepted if those before it are.
  double of(std::size_t source) const { return accepted_[source] / drafted_[source]; }

  // Adds a verification: of drafts of these sources the first `accepted`. Those after the first rejected show nothing.
  void record(std::vector<std::size_t> const& sources, std::size_t accepted);

 private:
  std::vector<double> accepted_, drafted_;
};

}  // namespace tide
