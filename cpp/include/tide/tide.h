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
typedef struct tide_token_stream tide_token_stream; /* a generation that is made as it is read */
typedef struct tide_sequence tide_sequence;     /* one sequence that is stepped by hand */
typedef struct tide_batch tide_batch;           /* several that are stepped together */
typedef struct tide_text_stream tide_text_stream; /* converts token ids to text as they arrive */

typedef enum {
  TIDE_OK = 0,
  TIDE_ENDED = 1, /* there are no more tokens */
  TIDE_CONFIG_ERROR = 2,
  TIDE_BUNDLE_ERROR = 3,
  TIDE_GENERATION_ERROR = 4,
  TIDE_QUEUE_FULL = 5, /* submit again later */
  TIDE_PROVIDER_ERROR = 6,
  TIDE_NO_MEMORY = 7,
  TIDE_INTERNAL_ERROR = 8,
  TIDE_CONSTRAINT_ERROR = 9 /* what a request asks of its text leaves no next token */
} tide_status;

typedef struct {
  int64_t id;
  double logprob; /* by the model's own logits, before anything changes them */
} tide_logprob;

typedef struct {
  int64_t id;
  int64_t exit_layer; /* layers its logits went through; 0: a draft by prompt lookup or a drafter */
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

/* Sets the sentence of the error with which a function of the caller is about to fail, called by this library. */
TIDE_API void tide_set_error(const char* sentence);

/* Reports what a function of the caller comes to, whose `reports` is not 0: what it returns then counts only after TIDE_OK, and
 * one that ends without a report has failed. It is for languages that may end such a function before its first line, as a
 * signal ends one of Python's ctypes. */
TIDE_API void tide_report(tide_status status);

/* Receives the sentences that no error carries: what runs instead, what was raised. NULL, as at first: stderr. */
TIDE_API void tide_set_log(void (*log)(const char* sentence));

/* --- engines ------------------------------------------------------------------------------------------------------- */

/* Opens a bundle. In a child that this process forks, a use of the engine is an error, for its threads are missing there: load
 * the bundle again. options: "provider", "threads", "verify", "plugins", "device"; "onnxruntime": the path of its library, of
 * which a process opens one, none: that of the environment variable TIDE_ONNXRUNTIME, else where the system finds it;
 * "graph": a file whose graph is run in place of the bundle's; "tokenizers": see below. */
TIDE_API tide_status tide_load(const char* bundle, const char* options, tide_engine** engine);
TIDE_API void tide_engine_free(tide_engine* engine);

/* Segment networks that the caller runs, on an engine that this library does not know. `context` goes to all functions.
 *
 * gpu: the number of the GPU whose memory they run on; -1: the host's. provider: the engine's name.
 * open begins a set of networks whose work is queued on a CUDA stream (NULL on the host), and sets its number; close ends it.
 * run queues a run of a network over `tokens` tokens of each of `batch_size` sequences: its tensors by name, and their
 *     addresses. recording: 0, or the number of a recording that the run is part of, which is queued first and then, with the
 *     same arguments, captured: what it uses must not change after that, until forget. captured: whether the stream is captured.
 *     It returns TIDE_ENDED where it ran, but runs of this network cannot be recorded.
 * forget says that a recording is gone; it may be called while another run is queued. */
typedef struct {
  void* context;
  const char* provider;
  int gpu;
  tide_status (*open)(void* context, void* stream, int64_t* number);
  tide_status (*run)(void* context, int64_t number, const char* network, const char* const* tensors, void* const* addresses,
                     size_t count, int64_t tokens, int64_t batch_size, int64_t recording, int captured);
  void (*forget)(void* context, int64_t number, int64_t recording);
  void (*close)(void* context, int64_t number);
  int reports; /* whether open and run call tide_report */
} tide_networks;
TIDE_API tide_status tide_load_networks(const char* bundle, const char* options, const tide_networks* networks,
                                        tide_engine** engine);

/* Requests that a scheduler can decode at the same time; 1: there are no schedulers for this bundle. */
TIDE_API int64_t tide_max_batch_size(const tide_engine* engine);

/* The name of the provider that runs it: "cpu", "cuda", "tensorrt" or "tensorrt-rtx". */
TIDE_API const char* tide_provider(const tide_engine* engine);

/* The text of the bundle's tide.json, as it was read. */
TIDE_API const char* tide_manifest(const tide_engine* engine, size_t* size);

/* Checks the options of a generation, of a list of so many prompts (0: of one prompt), and writes, as a JSON object, what
 * they mean for this bundle: "mode", "thresholds" (above 1: off), "max_pending" (-1: no limit), "drafting" (null outside
 * mode lossless) and "compaction_threshold" (null for one prompt). Writes at most `room` bytes with the zero byte; where
 * `size` is not less than `room`, call again with more. */
TIDE_API tide_status tide_resolve(const tide_engine* engine, const char* options, size_t prompts, char* text, size_t room,
                                  size_t* size);

/* Receives each token as it is made, and the `context` of tide_stream; 0 ends the generation. */
typedef int (*tide_on_token)(void* context, const tide_token* token);

/* Functions of the caller that a generation calls, in the thread that does the steps. Each gets `context`, which is needed
 * until the generation or the request has ended; each may be NULL. They may use the engine, and wait for no request of the
 * scheduler that calls them: that is an error.
 *
 * process_logits changes the logits [vocabulary] from which the next token is chosen: one at -INFINITY cannot come. ids: the
 *     prompt's and those generated, in lossless mode with the drafts that follow them; it may be called again for fewer, for
 *     drafts were rejected. It returns TIDE_OK, or the status that the generation fails with.
 * allows_token says whether a token may follow `ids`: 0 keeps it from being drafted by n-grams, which saves time alone.
 * detokenize returns the text (UTF-8) of tokens without special ones, valid until the next call, and sets its size; NULL: it
 *     failed. Without it the options "stop" and "detokenize" use the bundle's tokenizer. */
typedef struct {
  void* context;
  tide_status (*process_logits)(void* context, const int64_t* ids, size_t count, float* logits, size_t vocabulary);
  int (*allows_token)(void* context, const int64_t* ids, size_t count, int64_t token);
  const char* (*detokenize)(void* context, const int64_t* ids, size_t count, size_t* size);
  int reports; /* whether they call tide_report */
} tide_hooks;

/* Generates the tokens that follow a prompt of `count` token ids. options: fields of GenerationConfig, and "drafting": how
 * lossless mode drafts, as in a manifest. hooks: may be NULL. */
TIDE_API tide_status tide_generate(const tide_engine* engine, const int64_t* prompt, size_t count, const char* options,
                                   const tide_hooks* hooks, tide_generation** generation);
TIDE_API tide_status tide_stream(const tide_engine* engine, const int64_t* prompt, size_t count, const char* options,
                                 const tide_hooks* hooks, tide_on_token on_token, void* context,
                                 tide_generation** generation);

/* The same, made as it is read. Each call of `step` writes at most `room` tokens, from the one of number `from` on; where
 * there are none it first runs one step, which gives some or, where tokens are drafted, none yet. It returns TIDE_OK while
 * more may follow, and TIDE_ENDED with the last. A step that failed has changed nothing: the next call tries it again. */
TIDE_API tide_status tide_token_stream_open(const tide_engine* engine, const int64_t* prompt, size_t count,
                                            const char* options, const tide_hooks* hooks, tide_token_stream** stream);
TIDE_API tide_status tide_token_stream_step(tide_token_stream* stream, size_t from, int64_t* ids, size_t room,
                                            size_t* count);
TIDE_API tide_status tide_token_stream_so_far(const tide_token_stream* stream, tide_generation** generation);
TIDE_API void tide_token_stream_free(tide_token_stream* stream);

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
/* "stop", "length", "context", "cancelled", "timeout"; NULL: it has not ended. */
TIDE_API const char* tide_generation_finish_reason(const tide_generation* generation);
TIDE_API const char* tide_generation_stats(const tide_generation* generation); /* a JSON object, as ExitStats.as_dict */
/* The text, up to a stop string; NULL without the options "stop" and "detokenize". */
TIDE_API const char* tide_generation_text(const tide_generation* generation, size_t* size);
/* float [count], the states one after the other, where option "states" asks for them: in mode "full" of all tokens that were
 * run, in mode "exit" of each new one, at its exit. */
TIDE_API const float* tide_generation_states(const tide_generation* generation, size_t* count);
/* Of the token of this number, as in tide_token. */
TIDE_API const tide_logprob* tide_generation_logprobs(const tide_generation* generation, size_t token, size_t* count);
/* Of the prompt's token after the one of this number, where option "prompt_logprobs" asks for them. */
TIDE_API const tide_logprob* tide_generation_prompt_logprobs(const tide_generation* generation, size_t token, size_t* count);
TIDE_API void tide_generation_free(tide_generation* generation);

/* --- schedulers ---------------------------------------------------------------------------------------------------- */

/* limits: "slots", "prompt_tokens", "waiting", "kv_tokens", "prefix_cache_bytes"; "compaction_threshold": of its batch;
 * "audit_rate", "audit_epsilon": see tide_scheduler_audit. */
TIDE_API tide_status tide_scheduler_create(const tide_engine* engine, const char* limits, tide_scheduler** scheduler);

/* Lets a thread do the steps. Without one whoever reads a request does them, or who calls tide_scheduler_step, which
 * returns 0 when there was nothing to do. */
TIDE_API tide_status tide_scheduler_start(tide_scheduler* scheduler);
TIDE_API int tide_scheduler_step(tide_scheduler* scheduler);

/* Requests without a slot, and with one; bytes in the prefix cache; whether it takes no more requests; whether this thread
 * does a step of it now, so that a hook asks. */
typedef struct {
  size_t waiting, running;
  int64_t prefix_cache_bytes;
  int closed;
  int in_step;
} tide_scheduler_state;
TIDE_API tide_scheduler_state tide_scheduler_describe(const tide_scheduler* scheduler);

/* Of the tokens of mode "exit", a share of audit_rate is chosen, and those that exited are made again at full depth; with
 * audit_epsilon, thresholds are raised when exits change a larger share. The bounds hold at every time at once, for the
 * tokens since thresholds were raised last. TIDE_ENDED: there is no audit. */
typedef struct {
  int64_t audited, checked, different, raises;
  double upper_bound, lower_bound;
} tide_audit;
TIDE_API tide_status tide_scheduler_audit(const tide_scheduler* scheduler, tide_audit* audit);

/* Writes a byte to a file descriptor, such as a pipe's or an eventfd, whenever requests got tokens or ended, so that an event
 * loop may wait for it. It must not block; it must be open until it is taken out again. */
TIDE_API tide_status tide_scheduler_watch(tide_scheduler* scheduler, int descriptor);
TIDE_API void tide_scheduler_unwatch(tide_scheduler* scheduler, int descriptor);

/* Takes no more requests, and returns when those submitted have ended; drain 0: these are cancelled. */
TIDE_API void tide_scheduler_close(tide_scheduler* scheduler, int drain);
TIDE_API void tide_scheduler_free(tide_scheduler* scheduler); /* cancels the requests that have not ended */

/* Puts a request into the queue. options, hooks: as tide_generate. timeout: seconds from now after which it is cancelled;
 * NULL: never. */
TIDE_API tide_status tide_submit(tide_scheduler* scheduler, const int64_t* prompt, size_t count, const char* options,
                                 const tide_hooks* hooks, const double* timeout, tide_request** request);

/* Waits for the next token. After the last it returns TIDE_ENDED, or the error of the request. */
TIDE_API tide_status tide_request_next(tide_request* request, tide_token* token);

/* Waits for the end. */
TIDE_API tide_status tide_request_result(tide_request* request, tide_generation** generation);

/* Waits until there are more tokens than `from`, or the end, or so many seconds have passed. */
TIDE_API void tide_request_wait(const tide_request* request, size_t from, double seconds);

/* Writes at most `room` ids, from the one of number `from` on, and returns how many. `status`: TIDE_OK while more may come,
 * TIDE_ENDED after the last of them, or the error of the request. */
TIDE_API size_t tide_request_read(const tide_request* request, size_t from, int64_t* ids, size_t room,
                                  tide_status* status);

/* What was generated so far; the mode that it is decoded in. */
TIDE_API tide_status tide_request_so_far(const tide_request* request, tide_generation** generation);
TIDE_API const char* tide_request_mode(const tide_request* request);

/* Tokens of the prompt whose K/V came from the prefix cache. */
TIDE_API int64_t tide_request_cached_tokens(const tide_request* request);

TIDE_API void tide_request_cancel(tide_request* request); /* before the next step; its tokens so far stay */
TIDE_API void tide_request_free(tide_request* request);   /* does not cancel it */

/* --- drafting ------------------------------------------------------------------------------------------------------ */

/* Seconds of one draft of the bundle's drafter for each of some sequences that have so many rows, the median of several
 * runs; NaN: there is no drafter that this provider runs. */
TIDE_API tide_status tide_time_drafter(const tide_engine* engine, size_t rows, size_t sequences, double* seconds);

/* Replays lossless mode on a recorded continuation of a prompt, without a model: what it would have drafted and verified.
 * drafting: a JSON object, as in a manifest, of which "thresholds" are not read. left [positions]: the checkpoint that each
 * position's token leaves at, `checkpoints` if it does not; early [positions, checkpoints] and full [positions]: the tokens
 * of an exit and of full depth. Sets counts [4]: drafted, accepted, and of both those by n-grams; exits [checkpoints]: drafts
 * made at each; runs [positions, 2]: of each verifying run after the first token the tokens that were pending, and the new
 * ones; unused ones are 0. */
TIDE_API tide_status tide_replay(const char* drafting, const int64_t* prompt, size_t count, const int64_t* left,
                                 const int64_t* early, const int64_t* full, size_t positions, size_t checkpoints,
                                 int64_t* counts, int64_t* exits, int64_t* runs);

/* --- stepping by hand ---------------------------------------------------------------------------------------------- */

/* The outcome of a step for the last token of a sequence. The memory is valid until the next step of its sequence or
 * batch. */
typedef struct {
  const float* logits;  /* [rows, vocabulary], of the last `rows` positions */
  size_t rows;          /* 1, unless more were asked for and the last segment ran */
  size_t vocabulary;
  int64_t exit_layer;   /* layers the last position's logits went through */
  int64_t segments_run; /* segments 0 .. segments_run - 1 ran in this step */
  const float* scores;  /* [checkpoints], NaN where the router was not reached or is off; NULL in a batch */
} tide_step;

/* An empty sequence. thresholds: one per checkpoint; above 1 turns it off. max_pending: pending tokens before a segment must
 * run; -1: the bundle's. A call that fails changes nothing. */
TIDE_API tide_status tide_sequence_create(const tide_engine* engine, const double* thresholds, size_t count,
                                          int64_t max_pending, tide_sequence** sequence);
/* Adds tokens. logits_to_keep: number of last positions to return logits for where the last segment runs. full: runs every
 * segment and lets nothing exit. */
TIDE_API tide_status tide_sequence_step(tide_sequence* sequence, const int64_t* ids, size_t count, int64_t logits_to_keep,
                                        int full, tide_step* result);
TIDE_API tide_status tide_sequence_rewind(tide_sequence* sequence, int64_t length); /* removes all tokens after these */
TIDE_API tide_status tide_sequence_set_thresholds(tide_sequence* sequence, const double* thresholds, size_t count);
/* By segment: tokens in its K/V, and tokens that it has run over. */
TIDE_API void tide_sequence_lengths(const tide_sequence* sequence, int64_t* lengths, int64_t* computed);
TIDE_API void tide_sequence_free(tide_sequence* sequence);

/* Chooses a token from logits [vocabulary] as a generation with these options does ("temperature", "top_k", "top_p", "min_p",
 * "seed"): the one at `position` of its sequence, the prompt's first token being at 0. */
TIDE_API tide_status tide_sample(const char* options, int64_t position, const float* logits, size_t vocabulary,
                                 int64_t* token);

/* One sequence's part of a step of a batch. logits_to_keep: as above, and the result is then that of full depth; 0: the
 * sequence has its own exit, whatever runs for others. */
typedef struct {
  size_t slot;
  const int64_t* ids;
  size_t count;
  int64_t logits_to_keep;
  int full;
} tide_slot_step;

/* An empty batch. compaction_threshold: when a smaller share of the sequences in a step than this needs a segment, only those
 * run it. slots: no more than tide_max_batch_size are taken. */
TIDE_API tide_status tide_batch_create(const tide_engine* engine, double compaction_threshold, int64_t slots,
                                       tide_batch** batch);
TIDE_API size_t tide_batch_free_slots(const tide_batch* batch);
TIDE_API tide_status tide_batch_join(tide_batch* batch, const double* thresholds, size_t count, int64_t max_pending,
                                     size_t* slot);
TIDE_API tide_status tide_batch_leave(tide_batch* batch, size_t slot);
/* Runs `count` parts, by ascending slots; `results` [count] are in their order. */
TIDE_API tide_status tide_batch_step(tide_batch* batch, const tide_slot_step* parts, size_t count, tide_step* results);
TIDE_API tide_status tide_batch_rewind(tide_batch* batch, size_t slot, int64_t length);
TIDE_API tide_status tide_batch_lengths(const tide_batch* batch, size_t slot, int64_t* lengths, int64_t* computed);
TIDE_API void tide_batch_free(tide_batch* batch);

#ifdef __cplusplus
}
#endif

#endif
