// Mode `exit` with some of its tokens made again at full depth: what `Audit` counts.
//
// A token that is chosen and exited is made as ever. Then its position is undone and run again through every segment, and the
// positions that are pending before it get their deep K/V in the same run, sooner than they would have. So the tokens that
// follow are those without an audit. No check waits for a catch-up, which comes sooner after some tokens than after others,
// and for the last ones never: every token has the same chance to be checked.
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
