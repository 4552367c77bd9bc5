// The fixed names of tensors and files, as tide_export/names.py has them.
#pragma once

#include <cstddef>
#include <string>

namespace tide {
namespace names {

// The branched graph's.
constexpr char const* kInputIds = "input_ids";                 // int64 [1, S]; of segment 0's network too
constexpr char const* kTotalLength = "total_sequence_length";  // int32 []
constexpr char const* kLogitsPositions = "logits_positions";             // int64 [m, 2], as [0, place from the end]
constexpr char const* kThresholds = "exit_thresholds";         // float32 [K-1]
constexpr char const* kLogits = "logits";                      // float32 [m, V]; of the head's network [1, m, V]
constexpr char const* kScores = "router_scores";               // float32 [1, K-1], NaN: not reached
constexpr char const* kNewPending = "new_pending_states";      // float32 [1, n, D]

std::string skip_threshold(std::size_t k);                 // float32 [1], of segment k >= 1
std::string pending(std::size_t k);                        // float32 [1, n_k, D], before segment k >= 1
std::string past(std::size_t layer, char const* kind);     // float32 [1, heads, C, head_dim]; kind: key, value
std::string present(std::size_t layer, char const* kind);  // the same buffer after the step

// Those of the networks of one segment each, and of the head. T is float32, float16 or bfloat16.
constexpr char const* kHiddenStates = "hidden_states";         // T [1, S, D], of segments behind the first
constexpr char const* kPastLengths = "past_lengths";           // int64 [1], tokens in the segment's K/V before the run
constexpr char const* kLastTokens = "last_tokens";             // int64 [1], place of the last real token, 0 .. S-1
constexpr char const* kExitThreshold = "exit_threshold";       // float32 [1], of all but the last segment
constexpr char const* kNewHiddenStates = "new_hidden_states";  // T [1, S, D], of all but the last segment
constexpr char const* kExitStates = "exit_states";             // T [1, 1, D'], what the head takes
constexpr char const* kFinalStates = "final_states";           // T [1, S, D'], of the last segment alone
constexpr char const* kRouterScore = "router_score";           // float32 [1, 1, 1], of all but the last segment
constexpr char const* kExitFlag = "exit_flag";                 // bool [1, 1, 1], score above threshold

constexpr char const* kHead = "head";
std::string two_digits(std::size_t number);  // as files are numbered, so that their names sort
std::string segment(std::size_t k);  // the name of segment k's network and engine

}  // namespace names

std::string network_file(std::string const& name);  // where a bundle keeps the network `segment(k)` or kHead
std::string engine_file(std::string const& name);   // and its engine

}  // namespace tide
