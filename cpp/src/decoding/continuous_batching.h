// Continuous batching of a list of prompts: sequences join the batch as slots become free and leave it when they end.
//
// Every sequence has its own decoder, random numbers and statistics. A step runs what each decoder requests, whatever
// the lengths; it gives a sequence a token, or in lossless mode a draft, or all tokens that a verifying run accepts.
#pragma once

#include "decoding/generation.h"
#include "packed/batch.h"

namespace tide {

// An empty batch for the bundle's kind of K/V cache. Throws GenerationError: not enough memory.
std::unique_ptr<PackedBatch> empty_batch(std::shared_ptr<BatchSessions> sessions, Manifest const& manifest,
                                         Request const& request);

// Decodes sequences that have not begun to their ends.
//
// batch: an empty one; holds as many sequences at once as it has slots.
// progress, decoders: one per prompt; a decoder is destroyed when its sequence ends.
// on_token: as in `Engine::stream`, or nullptr.
void generate_batch(PackedBatch& batch, std::vector<Progress>& progress,
                    std::vector<std::unique_ptr<Decoder>>& decoders,
                    std::function<bool(std::size_t, Token const&)> const& on_token);

}  // namespace tide
