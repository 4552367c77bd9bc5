// One run of the attention operators: stores new tokens in pages, and cuts what attends into tasks for threads.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "attention.h"
#include "node.h"

namespace tide_ops {

constexpr std::int64_t kTaskQueries = 32;        // that share the keys that are widened
constexpr std::int64_t kSpanTokens = 64;         // of a span, at most
constexpr std::int64_t kPartialFloats = 1 << 20;  // of partial results at a time
constexpr std::int64_t kFewFloats = 1 << 13;      // of keys read; below, threads would cost more than they gain

// The rotation of heads by tables [.., half] of cosines and sines: of their first 2 half numbers.
struct Rotation {
  float const *cos, *sin;
  std::int64_t half;  // 0: none
  bool interleaved;

  void apply(float const* x, std::int64_t position, std::int64_t head_dim, float scale, float* __restrict to) const {
    if (interleaved) {
      by_step<2>(x, x + 1, position, scale, to, to + 1);
    } else {
      by_step<1>(x, x + half, position, scale, to, to + half);
    }
    for (std::int64_t d = 2 * half; d < head_dim; ++d) to[d] = x[d] * scale;
  }

 private:
  template <int kStep>
  void by_step(float const* first, float const* second, std::int64_t position, float scale,
               float* __restrict to_first, float* __restrict to_second) const {
    float const *const c = cos + position * half, *const s = sin + position * half;
    for (std::int64_t i = 0; i < half; ++i) {
      float const x = first[i * kStep], y = second[i * kStep];
      to_first[i * kStep] = (x * c[i] - y * s[i]) * scale;
      to_second[i * kStep] = (y * c[i] + x * s[i]) * scale;
    }
  }
};

// Sequences and their new tokens.
struct Sequences {
  std::int64_t count, longest_table;
  std::int32_t const* pages;    // [count, longest_table]
  std::int64_t const* lengths;  // with the new tokens
  std::int64_t const* given;    // starts [count + 1]; null: of a single one
  std::int64_t whole[2];        // its starts

  std::int64_t const* starts() const { return given != nullptr ? given : whole; }
  std::int64_t tokens(std::int64_t sequence) const { return starts()[sequence + 1] - starts()[sequence]; }
  std::int64_t first_position(std::int64_t sequence) const { return lengths[sequence] - tokens(sequence); }
};

// New tokens' heads, which are rotated: queries to memory, keys and values to pages.
struct NewTokens {
  AttentionKernel const& kernel;
  Attention attention;
  Sequences sequences;
  Rotation rotation;
  float scale;
  float const *query, *key, *value;       // a token's heads, [.., head_dim]; null: no new keys and values
  std::int64_t query_stride, key_stride;  // floats from one token to the next
  char *keys, *values;                    // pages
  float* queries;                         // spans of [kv_heads, tokens, group, width]

  void take(std::int64_t begin, std::int64_t end) const {
    std::int64_t const* const starts = sequences.starts();
    std::int64_t sequence = std::upper_bound(starts, starts + sequences.count, begin) - starts - 1;
    for (std::int64_t token = begin; token < end; ++token) {
      while (token >= starts[sequence + 1]) ++sequence;
      std::int64_t const position = sequences.first_position(sequence) + token - starts[sequence];
      rotate(sequence, token, position);
      if (key != nullptr) store(sequences.pages + sequence * sequences.longest_table, token, position);
    }
  }

 private:
  void rotate(std::int64_t sequence, std::int64_t token, std::int64_t position) const {
    Attention const& a = attention;
    std::int64_t const* const starts = sequences.starts();
    std::int64_t const row = (token - starts[sequence]) % kSpanTokens, first = token - row;
    std::int64_t const tokens = std::min(kSpanTokens, starts[sequence + 1] - first);
    for (std::int64_t head = 0; head < a.heads; ++head) {
      std::int64_t const in_span = (head / a.group() * tokens + row) * a.group() + head % a.group();
      float* const to = queries + (first * a.heads + in_span) * a.width;
      rotation.apply(query + token * query_stride + head * a.head_dim, position, a.head_dim, scale, to);
      std::fill(to + a.head_dim, to + a.width, 0.0f);
    }
  }

  void store(std::int32_t const* pages, std::int64_t token, std::int64_t position) const {
    static thread_local Buffer kept;
    Attention const& a = attention;
    std::int64_t const page = pages[position / a.page_tokens], row = position % a.page_tokens;
    float* const rotated = a.int8 ? kept.of(a.head_dim) : nullptr;
    for (std::int64_t head = 0; head < a.kv_heads; ++head) {
      std::int64_t const from = token * key_stride + head * a.head_dim;
      std::int64_t const to = ((page * a.kv_heads + head) * a.page_tokens + row) * a.row_bytes();
      if (a.int8) {
        rotation.apply(key + from, position, a.head_dim, 1, rotated);
        kernel.store_int8(rotated, a.head_dim, keys + to);
        kernel.store_int8(value + from, a.head_dim, values + to);
      } else {
        rotation.apply(key + from, position, a.head_dim, 1, reinterpret_cast<float*>(keys + to));
        std::memcpy(values + to, value + from, 4 * static_cast<std::size_t>(a.head_dim));
      }
    }
  }
};

// Up to kSpanTokens new tokens of a sequence, and consecutive chunks of its keys. A unit is some of the queries of one
// head of keys, and a task is one of its chunks.
struct Span {
  Queries queries;     // of the first head; those of the others follow
  std::int64_t rows;   // of a unit, at most
  std::int64_t units;  // of all heads
  Chunks chunks;
  std::int64_t task, unit, partial;  // the first ones

  Queries of_unit(Attention const& a, std::int64_t at) const {
    std::int64_t const of_head = units / a.kv_heads, head = at / of_head, row = at % of_head * rows;
    std::int64_t const token = row / a.group(), first = head * queries.count + row;
    return {queries.pages,
            head,
            queries.position + token,
            std::min(rows, queries.count - row),
            queries.rows + first * a.width,
            queries.softmax + 2 * first,
            queries.distance_bias + token * a.heads * a.extent,
            queries.output + token * a.heads * a.head_dim};
  }
};

// Spans that are computed at once, whose partial results fit kPartialFloats.
struct SpanGroup {
  std::vector<Span> spans;
  std::int64_t tasks = 0, units = 0, partials = 0, keys = 0;

  static Span const& of(std::vector<Span> const& all, std::int64_t index, std::int64_t Span::*first) {
    auto const after = [first](std::int64_t at, Span const& span) { return at < span.*first; };
    return *(std::upper_bound(all.begin(), all.end(), index, after) - 1);
  }
};

// All spans of a run, in groups.
class Spans {
 public:
  explicit Spans(Attention const& attention) : attention_(attention), groups_(1) {}

  // `queries`: of the first head; those of the others follow.
  void add(Queries const& queries) {
    Attention const& a = attention_;
    std::int64_t const last = queries.position + queries.count / a.group() - 1;
    std::int64_t const oldest = a.window > 0 ? std::max<std::int64_t>(queries.position + 1 - a.window, 0) : 0;
    std::int64_t const first = oldest / kChunk, end = last / kChunk + 1;
    std::int64_t const rows = std::min(queries.count, std::max(a.group(), kTaskQueries / a.group() * a.group()));
    std::int64_t const units = (queries.count + rows - 1) / rows * a.kv_heads, floats = units * partial_floats(a, rows);
    for (std::int64_t chunk = first, count; chunk < end; chunk += count) {
      if (groups_.back().partials + floats > kPartialFloats && groups_.back().tasks > 0) groups_.emplace_back();
      SpanGroup& group = groups_.back();
      count = std::max<std::int64_t>(std::min((kPartialFloats - group.partials) / floats, end - chunk), 1);
      Chunks const chunks{chunk, count, chunk == first, chunk + count == end};
      group.spans.push_back({queries, rows, units, chunks, group.tasks, group.units, group.partials});
      group.tasks += units * count;
      group.units += units;
      group.partials += floats * count;
      group.keys += a.kv_heads * (std::min((chunk + count) * kChunk, last + 1) - std::max(chunk * kChunk, oldest));
    }
  }

  // Of partial results at a time.
  std::int64_t floats() const {
    std::int64_t most = 0;
    for (SpanGroup const& group : groups_) most = std::max(most, group.partials);
    return most;
  }

  // Adds the phases that compute all of them. partials: of `floats`.
  void add_phases(Run& run, AttentionKernel const& kernel, float* partials) && {
    for (SpanGroup& each : groups_) {
      auto const group = std::make_shared<SpanGroup const>(std::move(each));
      auto const attend = [=, &kernel, a = attention_](std::int64_t task) {
        static thread_local Buffer scratch;
        // One chunk of keys for all queries of its span after another: it stays in a cache, and its heads share pages.
        Span const& span = group->of(group->spans, task, &Span::task);
        std::int64_t const chunk = (task - span.task) / span.units, unit = (task - span.task) % span.units;
        Queries const queries = span.of_unit(a, unit);
        std::int64_t const stride = partial_floats(a, span.rows);
        float* const partial = partials + span.partial + (unit * span.chunks.count + chunk) * stride;
        kernel.attend(a, queries, span.chunks.first + chunk, partial, scratch.of(scratch_floats(a, queries.count)));
      };
      auto const merge = [=, &kernel, a = attention_](std::int64_t index) {
        Span const& span = group->of(group->spans, index, &Span::unit);
        std::int64_t const unit = index - span.unit, stride = partial_floats(a, span.rows);
        kernel.merge(a, span.of_unit(a, unit), span.chunks,
                     partials + span.partial + unit * span.chunks.count * stride, stride);
      };
      run.add(group->tasks, attend);
      run.add(group->units, merge);
      if (group->keys * attention_.head_dim >= kFewFloats) run.needs_threads();
    }
  }

 private:
  Attention const attention_;
  std::vector<SpanGroup> groups_;
};

}  // namespace tide_ops
