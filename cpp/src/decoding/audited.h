// Decodes in mode `exit`, and computes chosen tokens again at full depth for `Audit` to count.
//
// If a chosen token exited, its position is then undone and run again through every segment, and the positions pending before
// it get their deep K/V in the same run, earlier than they would have. So later tokens are those without an audit. Waiting for
// a regular catch-up instead would check some tokens more often than others, and the last ones never.
#pragma once

#include <memory>
#include <vector>

#include "decoding/decoder.h"
#include "decoding/sampling.h"

namespace tide {

// The decoder of a sequence whose K/V cache is exact. depths: layers run at the end of each segment.
std::unique_ptr<Decoder> make_audited_decoder(Sampler sampler, std::vector<std::int64_t> depths,
                                              std::shared_ptr<Audit> audit);

}  // namespace tide
