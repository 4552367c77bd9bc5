// Holds what all sequences that are decoded together know of drafts.
#pragma once

#include <cstddef>
#include <optional>

#include "decoding/acceptance.h"
#include "decoding/earlier_answers.h"

namespace tide {

struct SharedDrafting {
  // of_engine: balances that go on after these sequences; null: they begin anew. answer_bytes: of earlier answers to draft
  // from; 0: none are kept.
  SharedDrafting(Balances* of_engine, std::size_t answer_bytes) : balances(of_engine == nullptr ? own : *of_engine) {
    if (answer_bytes > 0) answers.emplace(answer_bytes);
  }

  Balances own;  // used where the engine has none for them
  Balances& balances;
  std::optional<EarlierAnswers> answers;
};

}  // namespace tide
