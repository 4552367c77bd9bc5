#include "tide/tide.h"

#include "capi/objects.h"
#include "capi/options.h"
#include "memory_limit.h"

using namespace tide::capi;

namespace {

// Sets what a function of a text stream returns.
template <typename F>
tide_status put_piece(tide_text_stream* stream, char const** piece, std::size_t* size, F const& make) noexcept {
  return alone(stream, [&] {
    stream->piece = make();
    *piece = stream->piece.c_str();
    *size = stream->piece.size();
  });
}

// The log-probabilities of the token of this number, where there are any.
tide_logprob const* put_logprobs(std::vector<tide::Logprobs> const& all, std::size_t token, std::size_t* count) {
  bool const there = token < all.size();
  *count = there ? all[token].size() : 0;
  return there ? all[token].data() : nullptr;
}

}  // namespace

char const* tide_version() { return TIDE_EXPORT_VERSION; }

void tide_set_log(void (*log)(char const*)) { set_log(log); }
std::int64_t tide_memory_limit() { return static_cast<std::int64_t>(tide::memory_limit()); }
std::int64_t tide_memory_left() { return static_cast<std::int64_t>(tide::memory_left()); }
int tide_leave(double seconds) { return tide::leave(seconds) ? 1 : 0; }

tide_status tide_load(char const* bundle, char const* options, tide_engine** engine) {
  return create(engine, [&] {
    auto [load, tokenizers] = tide::open_options(options);
    load.log = log();
    tide::Engine const opened = tide::Engine::load(bundle, load);
    return tide_engine{opened, std::make_shared<tide::Text>(opened, tokenizers)};
  });
}

void tide_engine_free(tide_engine* engine) { delete engine; }

std::int64_t tide_max_batch_size(tide_engine const* engine) { return engine->engine.max_batch_size(); }

char const* tide_manifest(tide_engine const* engine, std::size_t* size) {
  *size = engine->engine.manifest_text().size();
  return engine->engine.manifest_text().c_str();
}

char const* tide_provider(tide_engine const* engine) { return engine->engine.provider().c_str(); }

tide_status tide_resolve(tide_engine const* engine, char const* options, std::size_t prompts, char* text,
                         std::size_t room, std::size_t* size) {
  return guarded([&] {
    tide::GenerationConfig config = config_of(*engine->text, options, nullptr);
    config = engine->engine.checked(config, prompts == 0 ? std::nullopt : std::optional(prompts));
    put_text(tide::json_of(engine->engine, config), text, room, size);
  });
}

tide_status tide_generate(tide_engine const* engine, std::int64_t const* prompt, std::size_t count, char const* options,
                          tide_hooks const* hooks, tide_generation** generation) {
  return create(generation, [&] {
    return tide_generation(engine->engine.generate(vector_of(prompt, count), config_of(*engine->text, options, hooks)));
  });
}

tide_status tide_stream(tide_engine const* engine, std::int64_t const* prompt, std::size_t count, char const* options,
                        tide_hooks const* hooks, tide_on_token on_token, void* context,
                        tide_generation** generation) {
  return create(generation, [&] {
    tide::GenerationConfig const config = config_of(*engine->text, options, hooks);
    return tide_generation(engine->engine.stream(vector_of(prompt, count), config, [&](tide::Token const& made) {
      tide::Logprobs const logprobs = logprobs_of(made.id, made.logprobs);
      tide_token const token = token_of(made, logprobs);
      return on_token(context, &token) != 0;
    }));
  });
}

tide_status tide_token_stream_open(tide_engine const* engine, std::int64_t const* prompt, std::size_t count,
                                   char const* options, tide_hooks const* hooks, tide_token_stream** stream) {
  return create(stream, [&] {
    tide::GenerationConfig const config = config_of(*engine->text, options, hooks);
    return tide_token_stream{engine->engine.open_stream(vector_of(prompt, count), config)};
  });
}

tide_status tide_token_stream_step(tide_token_stream* stream, std::size_t from, std::int64_t* ids, std::size_t room,
                                   std::size_t* count) {
  *count = 0;
  return alone(stream, [&] {
    tide::TokenStream& tokens = stream->stream;
    auto const& made = tokens.tokens();
    if (from >= made.size()) tokens.step();
    for (; *count < room && from < made.size(); ++*count) ids[*count] = made[from++].id;
    return tokens.ended() && from >= made.size() ? TIDE_ENDED : TIDE_OK;
  });
}

tide_status tide_token_stream_so_far(tide_token_stream const* stream, tide_generation** generation) {
  return alone(stream, [&] {
    return create(generation, [&] { return tide_generation(stream->stream.so_far(), stream->stream.ended()); });
  });
}

void tide_token_stream_free(tide_token_stream* stream) { delete stream; }

tide_status tide_encode(tide_engine const* engine, char const* text, int special_tokens, std::int64_t* ids,
                        std::size_t room, std::size_t* count) {
  return guarded([&] {
    auto const all = engine->text->tokenizer().encode(text, special_tokens != 0);
    std::copy_n(all.begin(), std::min(room, all.size()), ids);
    *count = all.size();
  });
}

tide_status tide_decode(tide_engine const* engine, std::int64_t const* tokens, std::size_t count, int special_tokens,
                        char* text, std::size_t room, std::size_t* size) {
  return guarded([&] {
    put_text(engine->text->tokenizer().decode(vector_of(tokens, count), special_tokens != 0), text, room, size);
  });
}

tide_status tide_text_stream_create(tide_engine const* engine, std::int64_t const* prompt, std::size_t count,
                                    tide_text_stream** stream) {
  return create(stream, [&] {
    return tide_text_stream{tide::TextStream(engine->text->tokenizer(), vector_of(prompt, count))};
  });
}

tide_status tide_text_stream_push(tide_text_stream* stream, std::int64_t token, char const** piece, std::size_t* size) {
  return put_piece(stream, piece, size, [&] { return stream->stream.push(token); });
}

tide_status tide_text_stream_finish(tide_text_stream* stream, char const** piece, std::size_t* size) {
  return put_piece(stream, piece, size, [&] { return stream->stream.finish(); });
}

void tide_text_stream_free(tide_text_stream* stream) { delete stream; }

std::int64_t const* tide_generation_tokens(tide_generation const* generation, std::size_t* count) {
  *count = generation->generation.tokens.size();
  return generation->generation.tokens.data();
}

char const* tide_generation_finish_reason(tide_generation const* generation) {
  return generation->ended ? name_of(generation->generation.finish_reason).data() : nullptr;  // of a literal
}

char const* tide_generation_stats(tide_generation const* generation) { return generation->stats.c_str(); }

char const* tide_generation_text(tide_generation const* generation, std::size_t* size) {
  auto const& text = generation->generation.text;
  *size = text ? text->size() : 0;
  return text ? text->c_str() : nullptr;
}

float const* tide_generation_states(tide_generation const* generation, std::size_t* count) {
  *count = generation->generation.states.size();
  return generation->generation.states.data();
}

tide_logprob const* tide_generation_logprobs(tide_generation const* generation, std::size_t token, std::size_t* count) {
  return put_logprobs(generation->logprobs, token, count);
}

tide_logprob const* tide_generation_prompt_logprobs(tide_generation const* generation, std::size_t token,
                                                    std::size_t* count) {
  return put_logprobs(generation->prompt_logprobs, token, count);
}

void tide_generation_free(tide_generation* generation) { delete generation; }
