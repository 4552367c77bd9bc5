// Generation for a list of prompts: sequences join the batch as places fall free and leave it when they end.
//
// `Engine::stream` comes here with a checked request. Every sequence has its own decoder, with its own random numbers,
// and its own statistics. A step runs what each decoder asks for, whatever the lengths; it gives a sequence a token, or
// in lossless mode a draft, or all that a verifying run makes certain.
#pragma once

#include "packed/batch.h"
#include "decoding/generation.h"

namespace tide {

// An empty batch of the bundle's kind of K/V cache. Where K/V are propagated nothing waits, so the last two say
// nothing. Throws GenerationError: there is no memory.
std::unique_ptr<Batch> empty_batch(std::shared_ptr<BatchSessions> sessions, Manifest const& manifest,
                                   std::vector<double> const& thresholds, std::int64_t max_pending,
                                   double compaction_threshold);

// Decodes the sequences, of which nothing has been generated yet, to their ends.
//
// batch: an empty one; holds as many sequences at once as it has places. progress, decoders: one per prompt; a decoder
// is let go when its sequence ends. on_token: as in `Engine::stream`, or nullptr.
void generate_batch(Batch& batch, std::vector<Progress>& progress, std::vector<std::unique_ptr<Decoder>>& decoders,
                    std::function<bool(std::size_t, Token const&)> const& on_token);

}  // namespace tide
