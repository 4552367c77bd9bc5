#include "scheduling/kv_memory.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "memory_limit.h"
#include "paged/pool.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr std::int64_t kSpare = 16 << 20;  // bytes, and a twentieth of all

// Bytes that steps need beside K/V, roughly: rows of logits, a model's recurrent states, and what its layers compute, of which
// ONNX Runtime keeps some eight times the hidden states for each layer (48 to 100 for 12 layers, measured). None where no
// control group ends a process that takes more: there a machine may have enough for what is run.
std::int64_t step_bytes(Batch const& batch, Manifest const& manifest, SchedulerLimits const& limits) {
  if (memory_limit() == machine_memory()) return 0;
  constexpr std::int64_t kLogitsCopies = 3, kLayerCopies = 8;
  auto const slots = static_cast<std::int64_t>(batch.free_slots());
  ModelInfo const& model = manifest.model;
  std::int64_t numbers = slots * kLogitsCopies * model.vocab_size;
  numbers += (slots + limits.prompt_tokens) * kLayerCopies * model.num_layers * model.hidden_size;
  for (ModelInfo::State const& state : model.states) {
    numbers += std::accumulate(state.shape.begin(), state.shape.end(), slots, std::multiplies<>());
  }
  return numbers * static_cast<std::int64_t>(sizeof(float));
}

}  // namespace

std::int64_t kv_tokens_of(Batch const& batch, Manifest const& manifest, SchedulerLimits const& limits) {
  std::int64_t const limit = limits.kv_tokens.value_or(kNoLimit);
  if (batch.max_tokens() == kNoLimit) return limit;
  // Each has a page that is not full, and another while it copies one that the prefix cache has too.
  std::int64_t const token_bytes = std::max<std::int64_t>(manifest.kv_token_bytes(), 1);
  std::int64_t const unused = 2 * kPageTokens * static_cast<std::int64_t>(batch.free_slots());
  auto const spare = static_cast<std::int64_t>(memory_limit() / 20) + kSpare, left = static_cast<std::int64_t>(memory_left());
  std::int64_t const room = left - spare - step_bytes(batch, manifest, limits) - limits.prefix_cache_bytes;
  std::int64_t const fits = std::min(room, batch.max_tokens() * token_bytes - limits.prefix_cache_bytes) / token_bytes;
  if (fits <= unused) {
    throw GenerationError("not enough memory: of " + std::to_string(memory_limit() >> 20) + " MiB that this process may have, " +
                          std::to_string(left >> 20) + " are left, and " + std::to_string(batch.free_slots()) +
                          " slots and a prefix cache of " + std::to_string(limits.prefix_cache_bytes >> 20) +
                          " MiB need more: give fewer slots, or more memory");
  }
  return std::min(limit, fits - unused);
}

}  // namespace tide
