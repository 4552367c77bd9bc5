// Decodes in lossless mode: tokens that exit early are drafts, which one run of the deep segments over all pending tokens
// verifies.
//
// A draft costs the shallow segments and the head. Where no exit is expected to pay (`ExitShares`), the last segment runs over
// the pending tokens and gives full-depth logits for each. From these the sampler chooses each token as mode `full` does,
// with the same noise and processing; a draft, drawn with that noise too, is accepted if it is that token. So greedy and
// sampled tokens are those of `full` with the same seed. Rejected tokens are undone by lowering the lengths of the K/V buffers:
// nothing is copied. Self-speculative decoding with early exits is due to LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710);
// here the verifying run is the catch-up of lazy depth, so no layer runs twice for a token. The same run verifies prompt-lookup
// drafts and those of a bundle's drafter, which reads the final hidden states of verified tokens. `Acceptance` estimates
// whether a draft pays.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "decoding/decoder.h"
#include "decoding/draft_limits.h"
#include "decoding/sampling.h"

namespace tide {

// The decoder of lossless mode.
//
// depths: layers run at the end of each segment. context: tokens that the sequence may have; none: any number. stops: the
// tokens that end the generation: nothing is drafted after one. shared: with what is decoded beside it and after it.
// drafter: which outlives it; null: none. owner: whose earlier answers it drafts from. prediction: tokens that the text is
// expected to have, to draft from.
std::unique_ptr<Decoder> make_lossless_decoder(std::vector<std::int64_t> depths, std::optional<std::int64_t> context,
                                               Sampler sampler, DraftLimits const& limits,
                                               std::set<std::int64_t> const& stops,
                                               std::shared_ptr<SharedDrafting> shared,
                                               DraftsInfo const* drafter = nullptr,
                                               std::int64_t owner = 0, std::vector<std::int64_t> prediction = {});

}  // namespace tide
