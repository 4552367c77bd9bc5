/* The runtime for C, and for languages that call C: load a bundle, generate, stream, and submit requests to a scheduler.
 * Link libtide (CMake: tide::tide). docs/guide/c.md shows it from C and from Python's ctypes.
 *
 * Options are JSON objects with the names and defaults of the Python package, as UTF-8 text: {"mode": "exit",
 * "threshold": 0.85}. An option that is unknown or out of range is an error. NULL: all defaults. Texts that are returned
 * are UTF-8 and end with a zero byte, which their size does not count.
 *
 * A function that returns a tide_status sets its last argument only where it returns TIDE_OK. No exception leaves a
 * function. Any thread may use an engine and a scheduler; one at a time may use any other object. Each object is
 * freed by its _free function, which takes NULL too, in any order. No other pointer may be NULL unless that is said.
 */
#ifndef TIDE_TIDE_H
#define TIDE_TIDE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define TIDE_API __attribute__((visibility("default")))
#else
#define TIDE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tide_engine tide_engine;         /* a loaded bundle */
typedef struct tide_generation tide_generation; /* the tokens of a prompt, with statistics */
typedef struct tide_scheduler tide_scheduler;   /* decodes requests that come and go */
typedef struct tide_request tide_request;       /* a submitted request */
typedef struct tide_text_stream tide_text_stream; /* converts token ids to text as they arrive */

typedef enum {
  TIDE_OK = 0,
  TIDE_ENDED = 1, /* of tide_request_next: there are no more tokens */
  TIDE_CONFIG_ERROR = 2,
  TIDE_BUNDLE_ERROR = 3,
  TIDE_GENERATION_ERROR = 4,
  TIDE_QUEUE_FULL = 5, /* submit again later */
  TIDE_PROVIDER_ERROR = 6,
  TIDE_NO_MEMORY = 7,
  TIDE_INTERNAL_ERROR = 8
} tide_status;

typedef struct {
  int64_t id;
  double logprob; /* by the model's own logits, before anything changes them */
} tide_logprob;

typedef struct {
  int64_t id;
  int64_t exit_layer; /* layers its logits went through; 0: a prompt-lookup draft */
  int64_t layers_run; /* layer passes it cost */
  /* With the option "logprobs": of this token, then of the most likely ones, best first; otherwise NULL and 0. Valid in
   * the callback, or until the next call for the request. */
  const tide_logprob* logprobs;
  size_t logprobs_count;
} tide_token;

/* The release, such as "1.2.3". A program runs with any library of the same first two numbers. */
TIDE_API const char* tide_version(void);

/* Why the last call that failed in this thread failed: one sentence, valid until the next such call. */
TIDE_API const char* tide_last_error(void);

/* --- engines ------------------------------------------------------------------------------------------------------- */

/* Opens a bundle. options: "provider", "threads", "verify", "plugins", "device"; "tokenizers": see below. */
TIDE_API tide_status tide_load(const char* bundle, const char* options, tide_engine** engine);
TIDE_API void tide_engine_free(tide_engine* engine);

/* Requests that a scheduler can decode at the same time; 1: there are no schedulers for this bundle. */
TIDE_API int64_t tide_max_batch_size(const tide_engine* engine);

/* Receives each token as it is made, and the `context` of tide_stream; 0 ends the generation. */
typedef int (*tide_on_token)(void* context, const tide_token* token);

/* Changes the logits [vocabulary] from which the next token is chosen: one at -INFINITY cannot come. ids: the prompt's and
 * those generated, in lossless mode with the drafts that follow them; it may be called again for fewer, for drafts were
 * rejected. It is called in the thread that does the steps, and `context` is its own. 0: the generation fails. */
typedef int (*tide_process_logits)(void* context, const int64_t* ids, size_t count, float* logits, size_t vocabulary);

typedef struct {
  tide_process_logits process;
  void* context; /* needed until the generation or the request has ended */
} tide_logits_processor;

/* Generates the tokens that follow a prompt of `count` token ids. options: fields of GenerationConfig; "stop" and
 * "detokenize" use the bundle's tokenizer. processor: may be NULL. */
TIDE_API tide_status tide_generate(const tide_engine* engine, const int64_t* prompt, size_t count, const char* options,
                                   const tide_logits_processor* processor, tide_generation** generation);
TIDE_API tide_status tide_stream(const tide_engine* engine, const int64_t* prompt, size_t count, const char* options,
                                 const tide_logits_processor* processor, tide_on_token on_token, void* context,
                                 tide_generation** generation);

/* --- text ---------------------------------------------------------------------------------------------------------- */

/* The bundle's tokenizer.json, which is opened when it is first needed, by a library with the C binding of Hugging Face's
 * tokenizers: the path that the option "tokenizers" of tide_load or the environment variable TIDE_TOKENIZERS gives, else
 * libtokenizers_c.so. special_tokens: with those that the model puts around a prompt; in text, whether they are shown.
 *
 * Both write at most `room` values and set `count` or `size` to what all would be: where that is more than `room` (of a
 * text: not less), call again with more room. */
TIDE_API tide_status tide_encode(const tide_engine* engine, const char* text, int special_tokens, int64_t* ids,
                                 size_t room, size_t* count);
TIDE_API tide_status tide_decode(const tide_engine* engine, const int64_t* ids, size_t count, int special_tokens,
                                 char* text, size_t room, size_t* size);

/* The text of tokens as they arrive, after a prompt. A token may end in the middle of a character, whose text then comes
 * with a later one: the piece is "". `finish` is what is left at the end. A piece is valid until the next call. */
TIDE_API tide_status tide_text_stream_create(const tide_engine* engine, const int64_t* prompt, size_t count,
                                             tide_text_stream** stream);
TIDE_API tide_status tide_text_stream_push(tide_text_stream* stream, int64_t token, const char** piece, size_t* size);
TIDE_API tide_status tide_text_stream_finish(tide_text_stream* stream, const char** piece, size_t* size);
TIDE_API void tide_text_stream_free(tide_text_stream* stream);

/* --- generations --------------------------------------------------------------------------------------------------- */

/* These are valid until the generation is freed. */
TIDE_API const int64_t* tide_generation_tokens(const tide_generation* generation, size_t* count);
TIDE_API const char* tide_generation_finish_reason(const tide_generation* generation); /* "stop", "length", ... */
TIDE_API const char* tide_generation_stats(const tide_generation* generation); /* a JSON object, as ExitStats.as_dict */
/* The text, up to a stop string; NULL without the options "stop" and "detokenize". */
TIDE_API const char* tide_generation_text(const tide_generation* generation, size_t* size);
/* Of the token of this number, as in tide_token. */
TIDE_API const tide_logprob* tide_generation_logprobs(const tide_generation* generation, size_t token, size_t* count);
TIDE_API void tide_generation_free(tide_generation* generation);

/* --- schedulers ---------------------------------------------------------------------------------------------------- */

/* limits: "slots", "prompt_tokens", "waiting", "kv_tokens", "prefix_cache_bytes". */
TIDE_API tide_status tide_scheduler_create(const tide_engine* engine, const char* limits, tide_scheduler** scheduler);

/* Lets a thread do the steps. Without one whoever reads a request does them, or who calls tide_scheduler_step, which
 * returns 0 when there was nothing to do. */
TIDE_API tide_status tide_scheduler_start(tide_scheduler* scheduler);
TIDE_API int tide_scheduler_step(tide_scheduler* scheduler);

/* Takes no more requests, and returns when those submitted have ended; drain 0: these are cancelled. */
TIDE_API void tide_scheduler_close(tide_scheduler* scheduler, int drain);
TIDE_API void tide_scheduler_free(tide_scheduler* scheduler); /* cancels the requests that have not ended */

/* Puts a request into the queue. options, processor: as tide_generate. timeout: seconds from now after which it is cancelled;
 * NULL: never. */
TIDE_API tide_status tide_submit(tide_scheduler* scheduler, const int64_t* prompt, size_t count, const char* options,
                                 const tide_logits_processor* processor, const double* timeout, tide_request** request);

/* Waits for the next token. After the last it returns TIDE_ENDED, or the error of the request. */
TIDE_API tide_status tide_request_next(tide_request* request, tide_token* token);

/* Waits for the end. */
TIDE_API tide_status tide_request_result(tide_request* request, tide_generation** generation);

/* Tokens of the prompt whose K/V came from the prefix cache. */
TIDE_API int64_t tide_request_cached_tokens(const tide_request* request);

TIDE_API void tide_request_cancel(tide_request* request); /* before the next step; its tokens so far stay */
TIDE_API void tide_request_free(tide_request* request);   /* does not cancel it */

#ifdef __cplusplus
}
#endif

#endif
