#include "decoding/drafts.h"

#include "bundle/drafter_fields.h"

namespace tide {

DraftsInfo drafts_info(DrafterInfo const& drafter) {
  DraftsInfo info;
  for (auto const& [first, last] : ranges_of(drafter.tokens)) {
    for (std::int64_t token = first; token <= last; ++token) info.tokens.push_back(token);
  }
  info.acceptance = drafter.acceptance;
  info.max_rows = drafter.max_tokens;
  info.width = static_cast<std::size_t>(drafter.state_size);
  info.catches_up = drafter.kv_layers.empty();
  info.block_size = drafter.block_size;
  return info;
}

}  // namespace tide
