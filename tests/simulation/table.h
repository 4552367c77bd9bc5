// A causal LM that is a table: of each token with its prefix, a hidden state that is a number. So small that a step takes
// microseconds, and any token of a wrong page, position, state or adapter changes all that follow.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace table {

constexpr std::int64_t kSegments = 3, kVocabulary = 24, kContext = 112, kWidth = 2, kPage = 16, kUndo = 4, kDrafted = 20;

inline std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = a * 0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// A hidden state has 24 bits, so that a float holds it: the lowest five are the token that it makes likely.
inline std::int64_t likely(std::int64_t hidden) { return hidden & 31; }

inline std::int64_t follower(std::int64_t id) { return (id * 5 + 3) % kVocabulary; }

inline std::int64_t embedding(std::int64_t id) {
  return static_cast<std::int64_t>((mix(7, static_cast<std::uint64_t>(id)) & 0x7FFFF) << 5) | follower(id);
}

// What segment k makes of a hidden state. attention: of the tokens so far; state: a recurrent one.
inline std::int64_t layer(std::int64_t k, std::int64_t hidden, std::uint64_t attention, std::int64_t state,
                          std::int64_t adapter) {
  std::uint64_t const x = mix(mix(mix(static_cast<std::uint64_t>(hidden), attention), static_cast<std::uint64_t>(state)),
                              static_cast<std::uint64_t>(16 * adapter + k));
  bool const changes = (x >> 40) % (k == 0 ? 4 : 10) == 0;
  std::int64_t const token = changes ? static_cast<std::int64_t>((x >> 50) % kVocabulary) : likely(hidden);
  return static_cast<std::int64_t>((x & 0x7FFFF) << 5) | token;
}

inline std::int64_t key(std::int64_t k, std::int64_t hidden) {
  return static_cast<std::int64_t>(mix(static_cast<std::uint64_t>(hidden), static_cast<std::uint64_t>(k + 100)) & 0xFFFFFF);
}

inline std::uint64_t attends(std::int64_t key, std::int64_t position) {
  return mix(static_cast<std::uint64_t>(key), static_cast<std::uint64_t>(position));
}

inline std::int64_t next_state(std::int64_t state, std::int64_t hidden) {
  return static_cast<std::int64_t>(mix(static_cast<std::uint64_t>(state), static_cast<std::uint64_t>(hidden)) & 0xFFFFFF);
}

inline float score(std::int64_t hidden) { return static_cast<float>((hidden >> 5) & 0xFFFF) / 65536.0f; }

inline float logit(std::int64_t hidden, std::int64_t token) {
  std::uint64_t const x = mix(static_cast<std::uint64_t>(hidden), static_cast<std::uint64_t>(token + 1000));
  return static_cast<float>(x >> 40) / 5592405.0f + (likely(hidden) == token ? 2.5f : 0.0f);  // 0 .. 3, and 2.5
}

// The rule itself, without a cache: hidden states [kSegments] of the last of these tokens.
inline std::vector<std::int64_t> hidden_states(std::vector<std::int64_t> const& ids, bool recurrent, std::int64_t adapter) {
  std::vector<std::int64_t> hidden, last;
  for (std::int64_t const id : ids) hidden.push_back(embedding(id));
  for (std::int64_t k = 0; k < kSegments; ++k) {
    std::uint64_t attention = 0;
    std::int64_t state = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      std::int64_t const before = hidden[i];
      attention += attends(key(k, before), static_cast<std::int64_t>(i));
      if (recurrent) state = next_state(state, before);
      hidden[i] = layer(k, before, attention, state, adapter);
    }
    last.push_back(hidden.back());
  }
  return last;
}

// Counts runs of networks; set by who simulates.
struct Control {
  std::int64_t runs = 0;
  std::int64_t fail_at = -1;  // the number of a run that fails; -1: none
  bool failed_draft = false;  // whether the last one that failed was the drafter's
  double clock = 0;           // seconds, virtual
  double run_seconds = 0;     // of a run
};

}  // namespace table

extern "C" table::Control table_control;
