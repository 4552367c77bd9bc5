// Computes what drafting and verifying cost one of several sequences that are decoded together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tide {

// What the step of a sequence runs beside it, as far as it is known.
struct Company {
  std::size_t sequences = 0;  // that write
  std::size_t tokens = 0;     // of theirs: one each, and their drafts
  std::int64_t later = 0;     // tokens by which the last of them ends later at most, where only its end counts
};

// What steps cost, in steps of full depth over one token.
struct StepCosts {
  std::vector<double> exits;   // of one that exits, at each checkpoint
  std::vector<double> verify;  // of running 1, 2, 4, 8 and 16 tokens more than one
  double drafter = 0;          // of a draft of the drafter
};

constexpr std::size_t kVerifyCosts = 5;

// Of running so many tokens more than one.
double further_cost(std::vector<double> const& verify, std::size_t tokens);

// The unit is what a step without drafts costs each sequence: with one this is a step of full depth.
class DraftCosts {
 public:
  explicit DraftCosts(StepCosts const& costs) : verify_(costs.verify), drafter_(costs.drafter) {}

  // Of verifying so many drafts.
  double verify(Company const& others, std::size_t drafts) const;

  // Of one draft more.
  double marginal(Company const& others, std::size_t drafts) const {
    return verify(others, drafts + 1) - verify(others, drafts);
  }

  // Of a draft of the drafter, which runs for so many sequences at once, this one among them.
  double draft(Company const& others, std::size_t sharing) const;

  // Of running the drafter over so many tokens more.
  double rows(Company const& others, std::size_t count) const;

 private:
  double more(std::size_t tokens) const { return further_cost(verify_, tokens); }
  double step(Company const& others) const;  // the unit, in steps over one token

  std::vector<double> verify_;
  double drafter_;
};

}  // namespace tide
