// TideCausalConv and TideRecurrence: layers with a recurrent state, over new tokens of any number of sequences, one after
// another. Each sequence has a place in the states of all (tide_export/compose/states.py says what is there), and tokens
// take their turn one by one, so that their outputs do not depend on which are computed at once.
//
// A run may be repeated after it failed, if it is no longer than the log: it begins with what it changes no more, and reads
// nothing that it has overwritten.
#include "recurrence.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "nodes.h"

namespace tide_ops {
namespace {

constexpr std::int64_t kChannels = 512;       // of a convolution, by one thread at a time
constexpr std::int64_t kFewFloats = 1 << 15;  // that are read; below, threads would cost more than they gain

// The new tokens of sequences, from inputs places [R, 2], lengths [R] and starts [R + 1], which one sequence needs not.
struct Runs {
  std::int64_t count;
  std::int64_t const *places, *lengths, *given;
  std::int64_t whole[2];

  std::int64_t const* starts() const { return given != nullptr ? given : whole; }
  std::int64_t place(std::int64_t i) const { return places[2 * i]; }
  std::int64_t tokens(std::int64_t i) const { return starts()[i + 1] - starts()[i]; }
  std::int64_t first_position(std::int64_t i) const { return lengths[i] - tokens(i); }
  // Tokens before the new ones that nobody will take back.
  std::int64_t settled(std::int64_t i) const { return std::min(places[2 * i + 1], first_position(i)); }
};

Status* runs_of(Tensor const& places, Tensor const& lengths, Tensor const& starts, std::int64_t rows,
                std::int64_t all_places, Runs& runs) {
  if (places.rank != 2 || places.dims[1] != 2 || lengths.rank != 1 || lengths.dims[0] != places.dims[0] ||
      (starts.data == nullptr ? places.dims[0] != 1 : starts.rank != 1 || starts.dims[0] != places.dims[0] + 1)) {
    return invalid("states take places [R, 2], lengths [R] and starts [R + 1], which one sequence needs not");
  }
  runs = {places.dims[0],
          static_cast<std::int64_t const*>(places.data),
          static_cast<std::int64_t const*>(lengths.data),
          static_cast<std::int64_t const*>(starts.data),
          {0, rows}};
  std::int64_t const* const first = runs.starts();
  if (first[0] != 0 || first[runs.count] != rows || !std::is_sorted(first, first + runs.count + 1)) {
    return invalid("states: the sequences' starts do not ascend from 0 to the number of new tokens");
  }
  for (std::int64_t i = 0; i < runs.count; ++i) {
    if (runs.place(i) < 0 || runs.place(i) >= all_places) return invalid("states: a sequence has a place that is none");
    if (runs.settled(i) < 0) return invalid("states: a sequence is shorter than its new tokens");
  }
  return nullptr;
}

// The states after the run: the memory of those before it where both are bound to it, else a copy.
Status* new_states_of(Operands const& operands, std::size_t output, Tensor const& states, float** data) {
  void* made;
  TIDE_RETURN_IF_FAILED(operands.output(output, states.dims, states.rank, &made));
  if (made == nullptr) return invalid("an operator with states has outputs for them");
  if (made != states.data) {
    std::size_t bytes = sizeof(float);
    for (std::size_t d = 0; d < states.rank; ++d) bytes *= static_cast<std::size_t>(states.dims[d]);
    std::memcpy(made, states.data, bytes);
  }
  *data = static_cast<float*>(made);
  return nullptr;
}

bool is_of(Tensor const& tensor, std::initializer_list<std::int64_t> dims) {
  return tensor.rank == dims.size() && std::equal(dims.begin(), dims.end(), tensor.dims);
}

class CausalConv : public Node {
 public:
  explicit CausalConv(Attributes const& attributes) : silu_(attributes.integer("silu", 0) != 0) {}

  Status* add(Operands const& operands, Run& run) override {
    enum { kX, kWeights, kStates, kPlaces, kLengths, kBias, kStarts, kInputs };
    Tensor in[kInputs];
    for (std::size_t i = 0; i < kInputs; ++i) TIDE_RETURN_IF_FAILED(operands.input(i, in[i]));
    Tensor const &x = in[kX], &weights = in[kWeights], &states = in[kStates];
    bool const fits = x.rank == 3 && x.dims[0] == 1 && weights.rank == 2 && weights.dims[1] == x.dims[2] &&
                      weights.dims[0] <= kTaps && states.rank == 3 && states.dims[2] == x.dims[2] &&
                      states.dims[1] >= weights.dims[0] && (in[kBias].rank == 0 || is_of(in[kBias], {x.dims[2]}));
    if (!fits) return invalid("a convolution takes x [1, N, D], weights [K, D], states [P, R, D], R >= K, and a bias [D]");
    std::int64_t const tokens = x.dims[1], channels = x.dims[2], taps = weights.dims[0], kept = states.dims[1];
    Runs runs;
    TIDE_RETURN_IF_FAILED(runs_of(in[kPlaces], in[kLengths], in[kStarts], tokens, states.dims[0], runs));
    void* made;
    float* all;
    TIDE_RETURN_IF_FAILED(operands.output(0, x.dims, 3, &made));
    TIDE_RETURN_IF_FAILED(new_states_of(operands, 1, states, &all));
    auto const inputs = data_of(x), filters = data_of(weights), bias = data_of(in[kBias]);
    std::int64_t const parts = (channels + kChannels - 1) / kChannels;
    run.add(runs.count * parts, [=, silu = silu_](std::int64_t part) {
      std::int64_t const i = part / parts, begin = part % parts * kChannels;
      std::int64_t const end = std::min(begin + kChannels, channels), first = runs.first_position(i);
      float* const ring = all + runs.place(i) * kept * channels;
      float const* const own = inputs + runs.starts()[i] * channels;
      float* const output = static_cast<float*>(made) + runs.starts()[i] * channels;
      for (std::int64_t token = 0; token < runs.tokens(i); ++token) {
        float const* rows[kTaps];
        for (std::int64_t tap = 0; tap < taps; ++tap) {
          std::int64_t const position = first + token - taps + 1 + tap;
          rows[tap] = position < 0       ? nullptr
                      : position < first ? ring + position % kept * channels
                                         : own + (position - first) * channels;
        }
        used_recurrence_kernel().convolve(rows, filters, bias, taps, channels, begin, end, silu, output + token * channels);
      }
      for (std::int64_t token = std::max<std::int64_t>(runs.tokens(i) - kept, 0); token < runs.tokens(i); ++token) {
        std::memcpy(ring + (first + token) % kept * channels + begin, own + token * channels + begin,
                    sizeof(float) * static_cast<std::size_t>(end - begin));
      }
    });
    if (tokens * channels * taps >= kFewFloats) run.needs_threads();
    return nullptr;
  }

 private:
  static constexpr std::int64_t kTaps = 64;  // at most

  bool const silu_;
};

// The run of one head over one sequence's new tokens.
struct Recurrence {
  RecurrenceKernel const& kernel;
  HeadShape shape;
  Runs runs;
  std::int64_t heads, key_heads, log_rows, log_width;
  float const *query, *key, *value, *decay, *beta;
  float *states, *logs, *output;

  // Rows of the log: decays and deltas of all heads, then keys.
  float* log(std::int64_t i, std::int64_t position) const {
    return logs + (runs.place(i) * log_rows + position % log_rows) * log_width;
  }
  std::int64_t state_floats() const { return shape.rows * shape.columns + 1; }
  std::int64_t key_head(std::int64_t head) const { return head / (heads / key_heads); }

  // A token that the log has, or a new one, whose decay and delta go there.
  HeadToken token(std::int64_t i, std::int64_t head, std::int64_t position) const {
    float* const row = log(i, position);
    float* const decays = row + head * shape.decays();
    float* const delta = row + heads * shape.decays() + head * shape.columns;
    float const* const logged_key = row + heads * (shape.decays() + shape.columns) + key_head(head) * shape.rows;
    std::int64_t const number = position - runs.first_position(i);
    if (number < 0) return {decays, logged_key, delta, nullptr, nullptr, nullptr, nullptr};
    std::int64_t const of_token = runs.starts()[i] + number, own = of_token * heads + head;
    std::int64_t const keys = (of_token * key_heads + key_head(head)) * shape.rows;
    return {decay + own * shape.decays(), key + keys, delta, output + own * shape.columns,
            query + keys, value + own * shape.columns, beta == nullptr ? nullptr : beta + own};
  }

  // Where the head's state stands: after so many tokens. A new sequence finds another's state.
  bool begin(std::int64_t i, std::int64_t head, float*& state, std::int64_t& at) const {
    state = states + (runs.place(i) * heads + head) * state_floats();
    if (runs.first_position(i) == 0) std::fill(state, state + state_floats(), 0.0f);
    at = static_cast<std::int64_t>(state[state_floats() - 1]);
    return at <= runs.first_position(i);
  }

  // The tokens that change the head's state, and a log row for each that is new, which those that the log is too short for
  // leave to later ones.
  void head(std::int64_t i, std::int64_t head, std::vector<HeadToken>& tokens, Buffer& scratch) const {
    if (runs.tokens(i) == 0) return;
    std::int64_t const end = runs.lengths[i];
    float* state;
    std::int64_t at;
    begin(i, head, state, at);
    tokens.clear();
    for (std::int64_t position = at; position < end; ++position) tokens.push_back(token(i, head, position));
    std::int64_t const settled = std::max({runs.settled(i), end - log_rows, at});
    auto const count = static_cast<std::int64_t>(tokens.size());
    HeadRun const all{shape, tokens.data(), count, settled - at, state};
    kernel.run(all, scratch.of(all.scratch_floats()));
    state[state_floats() - 1] = static_cast<float>(settled);
    for (std::int64_t position = std::max(runs.first_position(i), end - log_rows); position < end; ++position) {
      float const* const from = tokens[static_cast<std::size_t>(position - at)].decay;
      std::copy(from, from + shape.decays(), log(i, position) + head * shape.decays());
    }
  }

  // Copies the keys of a sequence's new tokens to its log, when no head reads older ones any more.
  void keep_keys(std::int64_t i) const {
    std::int64_t const width = key_heads * shape.rows, tokens = runs.tokens(i);
    for (std::int64_t number = std::max<std::int64_t>(tokens - log_rows, 0); number < tokens; ++number) {
      float const* const from = key + (runs.starts()[i] + number) * width;
      std::copy(from, from + width, log(i, runs.first_position(i) + number) + log_width - width);
    }
  }
};

class RecurrenceNode : public Node {
 public:
  Status* add(Operands const& operands, Run& run) override {
    enum { kQuery, kKey, kValue, kDecay, kStates, kLog, kPlaces, kLengths, kBeta, kStarts, kInputs };
    Tensor in[kInputs];
    for (std::size_t i = 0; i < kInputs; ++i) TIDE_RETURN_IF_FAILED(operands.input(i, in[i]));
    Tensor const &key = in[kKey], &value = in[kValue], &decay = in[kDecay], &states = in[kStates], &log = in[kLog];
    if (value.rank != 4 || value.dims[0] != 1 || key.rank != 4) return wrong();
    std::int64_t const tokens = value.dims[1], heads = value.dims[2], columns = value.dims[3];
    std::int64_t const key_heads = key.dims[2], rows = key.dims[3];
    bool const one = is_of(decay, {1, tokens, heads}), by_row = is_of(decay, {1, tokens, heads, rows});
    if (!one && !by_row && !is_of(decay, {1, tokens, heads, rows, columns})) return wrong();
    HeadShape const shape{rows, columns, one ? Decay::kOne : by_row ? Decay::kRows : Decay::kAll};
    std::int64_t const width = heads * (shape.decays() + columns) + key_heads * rows;
    bool const fits = key_heads > 0 && heads % key_heads == 0 && is_of(key, {1, tokens, key_heads, rows}) &&
                      is_of(in[kQuery], {1, tokens, key_heads, rows}) && states.rank == 3 && log.rank == 3 &&
                      is_of(states, {states.dims[0], heads, rows * columns + 1}) && log.dims[1] > 0 &&
                      is_of(log, {states.dims[0], log.dims[1], width}) &&
                      (in[kBeta].rank == 0 || is_of(in[kBeta], {1, tokens, heads}));
    if (!fits) return wrong();
    Runs runs;
    TIDE_RETURN_IF_FAILED(runs_of(in[kPlaces], in[kLengths], in[kStarts], tokens, states.dims[0], runs));
    void* made;
    float *all_states, *logs;
    TIDE_RETURN_IF_FAILED(operands.output(0, value.dims, 4, &made));
    TIDE_RETURN_IF_FAILED(new_states_of(operands, 1, states, &all_states));
    TIDE_RETURN_IF_FAILED(new_states_of(operands, 2, log, &logs));
    Recurrence const all{used_recurrence_kernel(), shape, runs, heads, key_heads, log.dims[1], width, data_of(in[kQuery]),
                         data_of(key), data_of(value), data_of(decay), data_of(in[kBeta]), all_states, logs,
                         static_cast<float*>(made)};
    for (std::int64_t i = 0; i < runs.count; ++i) {
      float* state;
      std::int64_t at;
      for (std::int64_t head = 0; head < heads; ++head) {
        if (!all.begin(i, head, state, at)) return invalid("states: a sequence was taken back further than its log holds");
      }
    }
    run.add(runs.count * heads, [=](std::int64_t part) {
      static thread_local Buffer scratch;
      static thread_local std::vector<HeadToken> of_head;
      all.head(part / heads, part % heads, of_head, scratch);
    });
    run.add(runs.count, [=](std::int64_t i) { all.keep_keys(i); });
    if (tokens * heads * rows * columns >= kFewFloats) run.needs_threads();
    return nullptr;
  }

 private:
  static Status* wrong() {
    return invalid(
        "a recurrence takes queries and keys [1, N, H, K], values [1, N, G H, V], decays [1, N, G H (, K (, V))], states "
        "[P, G H, K V + 1], a log [P, L, ..] and beta [1, N, G H]");
  }
};

}  // namespace

std::unique_ptr<Node> causal_conv_node(Attributes const& attributes) { return std::make_unique<CausalConv>(attributes); }

std::unique_ptr<Node> recurrence_node() { return std::make_unique<RecurrenceNode>(); }

}  // namespace tide_ops
