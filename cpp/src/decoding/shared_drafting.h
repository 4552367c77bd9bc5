// Holds what is known of drafts: by all sequences of an engine, and by those that are decoded together.
#pragma once

#include <cstddef>
#include <optional>

#include "decoding/acceptance.h"
#include "decoding/earlier_answers.h"
#include "decoding/exit_drafts.h"

namespace tide {

// What the sequences of an engine have shown.
struct DraftRecord {
  Balances balances;
  ExitShares exits;
};

// What those share that are decoded together.
struct SharedDrafting {
  // of_engine: what goes on after these sequences; null: it begins anew. answer_bytes: of earlier answers to draft
  // from; 0: none are kept.
  SharedDrafting(DraftRecord* of_engine, std::size_t answer_bytes) : record(of_engine == nullptr ? own : *of_engine) {
    if (answer_bytes > 0) answers.emplace(answer_bytes);
  }

  DraftRecord own;  // used where the engine has none for them
  DraftRecord& record;
  std::optional<EarlierAnswers> answers;
};

}  // namespace tide
