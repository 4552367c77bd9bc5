/* Declares the runtime's C interface: load a bundle, generate, stream, and submit requests to a scheduler. Link libtide
 * (CMake: tide::tide). docs/guide/c.md shows its use from C and from Python's ctypes.
 *
 * Options are JSON objects with the names and defaults of the Python package, as UTF-8 text: {"mode": "exit",
 * "threshold": 0.85}. Unknown options and values out of range are errors. NULL: all defaults. Returned texts are UTF-8 and
 * end with a zero byte, which their size does not count.
 *
 * A function that returns a tide_status sets its last argument only if it returns TIDE_OK. No exception leaves a
 * function. Any thread may use an engine and a scheduler; one at a time may use any other object, and while one is in a call
 * that runs, TIDE_GENERATION_ERROR refuses the others (and a callback of that call). Each object is freed by its _free
 * function, in any order; NULL is allowed there. Other pointers may not be NULL unless stated.
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
typedef struct tide_generation tide_generation; /* the generated tokens, with statistics */
typedef struct tide_scheduler tide_scheduler;   /* decodes requests that arrive over time */
typedef struct tide_request tide_request;       /* a submitted request */
typedef struct tide_token_stream tide_token_stream; /* a generation that runs as it is read */
typedef struct tide_sequence tide_sequence;     /* one sequence that is stepped by hand */
typedef struct tide_batch tide_batch;           /* several sequences that are stepped together */
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
  TIDE_CONSTRAINT_ERROR = 9 /* the constraints of a request leave no next token */
} tide_status;

typedef struct {
  int64_t id;
  double logprob; /* from the model's unchanged logits */
} tide_logprob;

typedef struct {
  int64_t id;
  int64_t exit_layer; /* layers before its logits; 0: a draft by prompt lookup or a drafter */
  int64_t layers_run; /* layer passes of its step */
  /* With the option "logprobs": of this token, then of the most likely ones, best first; otherwise NULL and 0. Valid in
   * the callback, or until the next call for the request. */
  const tide_logprob* logprobs;
  size_t logprobs_count;
} tide_token;

/* Returns the release, such as "1.2.3". A program runs with any library of the same first two numbers. */
TIDE_API const char* tide_version(void);

/* Returns the error of the last call that failed in this thread: one sentence, valid until the next such call. */
TIDE_API const char* tide_last_error(void);

/* Sets the error sentence of a callback that is about to fail. */
TIDE_API void tide_set_error(const char* sentence);

/* Reports the status of a callback whose `reports` is not 0: its result counts only after TIDE_OK, and a callback that ends
 * without a report has failed. For languages that may end a callback before its first line, as a signal does in Python's
 * ctypes. */
TIDE_API void tide_report(tide_status status);

/* Sets the function that receives log sentences, such as a fallback or raised thresholds. NULL, the default: stderr. */
TIDE_API void tide_set_log(void (*log)(const char* sentence));

/* Return the bytes of memory that this process may have (the machine's, or what its control groups leave), and how many of
 * them it has not used yet. */
TIDE_API int64_t tide_memory_limit(void);
TIDE_API int64_t tide_memory_left(void);

/* Ends the use of the library by other threads than this one, for a process that is about to end: a call waits in them for
 * ever, and no callback is called. Waits until those that run a call or a step have ended it. Returns 1, or 0 if one had not
 * after `seconds`. */
TIDE_API int tide_leave(double seconds);

/* --- engines ------------------------------------------------------------------------------------------------------- */

/* Opens a bundle. A forked child lacks the engine's threads, so using it there is an error: load the bundle again. options:
 * "provider", "threads", "verify", "plugins", "device"; "onnxruntime": the path of ONNX Runtime's library, of which a process
 * opens one; by default the environment variable TIDE_ONNXRUNTIME, else the system's; "adapters": folders of low-rank
 * adapters (LoRA) as peft writes them, by the names that the option "adapter" of requests gives; "graphs": a folder
 * with networks that replace the bundle's; "tokenizers": a library, as described under "text"; "opened": of a bundle that
 * the caller has opened, {"manifest": the text of tide.json, "files": descriptors by name}, instead of opening it. */
TIDE_API tide_status tide_load(const char* bundle, const char* options, tide_engine** engine);
TIDE_API void tide_engine_free(tide_engine* engine);

/* Callbacks that run segment networks, for engines that this library cannot open itself. All receive `context`.
 *
 * gpu: the number of the GPU that they run on; -1: the host. provider: the engine's name.
 * open creates a set of networks whose work is queued on a CUDA stream (NULL on the host), and sets its number; close frees it.
 * run queues a run of a network over `tokens` tokens of each of `batch_size` sequences, whose attention reads the first `keys`
 *     tokens of the K/V buffers: its tensors by name, and their addresses. recording: 0, or the number of the recording that the
 *     run is part of: it is queued, then captured with the same arguments, and its context must not change until forget.
 *     captured: whether the stream is being captured. It returns TIDE_ENDED if the run was queued, but runs of this network
 *     cannot be recorded.
 * forget frees the contexts of a recording; it may be called while another run is queued. */
typedef struct {
  void* context;
  const char* provider;
  int gpu;
  tide_status (*open)(void* context, void* stream, int64_t* number);
  tide_status (*run)(void* context, int64_t number, const char* network, const char* const* tensors, void* const* addresses,
                     size_t count, int64_t tokens, int64_t batch_size, int64_t keys, int64_t recording, int captured);
  void (*forget)(void* context, int64_t number, int64_t recording);
  void (*close)(void* context, int64_t number);
  int reports; /* whether open and run call tide_report */
} tide_networks;
TIDE_API tide_status tide_load_networks(const char* bundle, const char* options, const tide_networks* networks,
                                        tide_engine** engine);

/* Returns the maximum of requests that a scheduler decodes at the same time. */
TIDE_API int64_t tide_max_batch_size(const tide_engine* engine);

/* Returns the provider that runs the bundle: "cpu", "cuda", "tensorrt" or "tensorrt-rtx". */
TIDE_API const char* tide_provider(const tide_engine* engine);

/* Returns the text of the bundle's tide.json. */
TIDE_API const char* tide_manifest(const tide_engine* engine, size_t* size);

/* Checks the options of a generation for a list of `prompts` (0: one prompt), and writes them with the bundle's defaults as a
 * JSON object: "mode", "thresholds" (above 1: off), "max_pending" (-1: no limit), "drafting" (null outside mode lossless) and
 * "compaction_threshold" (null for one prompt). Writes at most `room` bytes with the zero byte; if `size` is not less than
 * `room`, call again with more. */
TIDE_API tide_status tide_resolve(const tide_engine* engine, const char* options, size_t prompts, char* text, size_t room,
                                  size_t* size);

/* Receives each token as it is generated, and the `context` of tide_stream; returns 0 to end the generation. */
typedef int (*tide_on_token)(void* context, const tide_token* token);

/* Callbacks of a generation, called in the thread that runs the steps. Each may be NULL and receives `context`, which must be
 * valid until the generation or the request has ended. They may use the engine; waiting for a request of the scheduler that
 * calls them is an error.
 *
 * process_logits changes the logits [vocabulary] from which the next token is chosen; a token at -INFINITY is never chosen.
 *     ids: those of the prompt and the generated ones, in lossless mode followed by drafts; they may be fewer than in the call
 *     before, after drafts were rejected. It returns TIDE_OK, or the status with which the generation fails.
 * allows_token returns whether a token may follow `ids`: 0 prevents an n-gram draft, to save the time of verifying it.
 * detokenize returns the text (UTF-8) of tokens without special tokens, valid until the next call, and sets its size; NULL: it
 *     failed. Without it, the options "stop" and "detokenize" use the bundle's tokenizer. */
typedef struct {
  void* context;
  tide_status (*process_logits)(void* context, const int64_t* ids, size_t count, float* logits, size_t vocabulary);
  int (*allows_token)(void* context, const int64_t* ids, size_t count, int64_t token);
  const char* (*detokenize)(void* context, const int64_t* ids, size_t count, size_t* size);
  int reports; /* whether they call tide_report */
} tide_hooks;

/* Generates the tokens that follow a prompt of `count` token ids. options: fields of GenerationConfig, and "drafting": the
 * drafting of lossless mode, as in a manifest. hooks: may be NULL. */
TIDE_API tide_status tide_generate(const tide_engine* engine, const int64_t* prompt, size_t count, const char* options,
                                   const tide_hooks* hooks, tide_generation** generation);
TIDE_API tide_status tide_stream(const tide_engine* engine, const int64_t* prompt, size_t count, const char* options,
                                 const tide_hooks* hooks, tide_on_token on_token, void* context,
                                 tide_generation** generation);

/* Opens a generation that runs as it is read. Each call of `step` writes up to `room` tokens, beginning with number `from`; if
 * there are none, it first runs one step, which generates some or, in lossless mode, possibly none yet. It returns TIDE_OK
 * while more may follow, and TIDE_ENDED with the last. A failed step changes nothing: the next call tries it again. */
TIDE_API tide_status tide_token_stream_open(const tide_engine* engine, const int64_t* prompt, size_t count,
                                            const char* options, const tide_hooks* hooks, tide_token_stream** stream);
TIDE_API tide_status tide_token_stream_step(tide_token_stream* stream, size_t from, int64_t* ids, size_t room,
                                            size_t* count);
TIDE_API tide_status tide_token_stream_so_far(const tide_token_stream* stream, tide_generation** generation);
TIDE_API void tide_token_stream_free(tide_token_stream* stream);

/* --- text ---------------------------------------------------------------------------------------------------------- */

/* Encode and decode text with the bundle's tokenizer.json, by a library with the C binding of Hugging Face's tokenizers: the
 * option "tokenizers" of tide_load, else the environment variable TIDE_TOKENIZERS, else libtokenizers_c.so. It is opened when
 * first needed. special_tokens: add those that the model puts around a prompt; in text, include them.
 *
 * Both write up to `room` values and set `count` or `size` to the number of all: if that is more than `room` (for a text: not
 * less), call again with more room. */
TIDE_API tide_status tide_encode(const tide_engine* engine, const char* text, int special_tokens, int64_t* ids,
                                 size_t room, size_t* count);
TIDE_API tide_status tide_decode(const tide_engine* engine, const int64_t* ids, size_t count, int special_tokens,
                                 char* text, size_t room, size_t* size);

/* Converts tokens to text as they arrive after a prompt. A token may end in the middle of a character: its piece is "", and
 * the text comes with a later token. `finish` returns the rest at the end. A piece is valid until the next call. */
TIDE_API tide_status tide_text_stream_create(const tide_engine* engine, const int64_t* prompt, size_t count,
                                             tide_text_stream** stream);
TIDE_API tide_status tide_text_stream_push(tide_text_stream* stream, int64_t token, const char** piece, size_t* size);
TIDE_API tide_status tide_text_stream_finish(tide_text_stream* stream, const char** piece, size_t* size);
TIDE_API void tide_text_stream_free(tide_text_stream* stream);

/* --- generations --------------------------------------------------------------------------------------------------- */

/* These functions return memory that is valid until the generation is freed. */
TIDE_API const int64_t* tide_generation_tokens(const tide_generation* generation, size_t* count);
/* Returns "stop", "length", "context", "cancelled" or "timeout"; NULL: it has not ended. */
TIDE_API const char* tide_generation_finish_reason(const tide_generation* generation);
TIDE_API const char* tide_generation_stats(const tide_generation* generation); /* a JSON object, as ExitStats.as_dict */
/* Returns the text up to a stop string; NULL without the options "stop" and "detokenize". */
TIDE_API const char* tide_generation_text(const tide_generation* generation, size_t* size);
/* Returns the hidden states, float [count], with option "states": in mode "full" of all tokens that were run, in mode "exit"
 * of each new token at its exit. */
TIDE_API const float* tide_generation_states(const tide_generation* generation, size_t* count);
/* Returns the log-probabilities of the token with this number, as in tide_token. */
TIDE_API const tide_logprob* tide_generation_logprobs(const tide_generation* generation, size_t token, size_t* count);
/* Returns those of the prompt's token number `token` + 1, with option "prompt_logprobs"; the first has none. */
TIDE_API const tide_logprob* tide_generation_prompt_logprobs(const tide_generation* generation, size_t token, size_t* count);
TIDE_API void tide_generation_free(tide_generation* generation);

/* --- schedulers ---------------------------------------------------------------------------------------------------- */

/* Creates a scheduler. limits: "slots", "prompt_tokens", "waiting", "kv_tokens", "prefix_cache_bytes", "answer_bytes",
 * "compaction_threshold"; "audit_rate", "audit_epsilon": described at tide_scheduler_audit. */
TIDE_API tide_status tide_scheduler_create(const tide_engine* engine, const char* limits, tide_scheduler** scheduler);

/* Starts a thread that runs the steps. Without it they run in the thread that reads a request or calls tide_scheduler_step,
 * which returns 0 if there was nothing to do. */
TIDE_API tide_status tide_scheduler_start(tide_scheduler* scheduler);
TIDE_API int tide_scheduler_step(tide_scheduler* scheduler);

typedef struct {
  size_t waiting; /* requests without a slot */
  size_t running; /* requests with a slot */
  int64_t prefix_cache_bytes;
  int64_t kv_tokens; /* of K/V that requests with a slot may have together, by the limits and by memory */
  int closed;  /* whether new requests are refused */
  int in_step; /* whether this thread is running a step, so that a hook is asking */
} tide_scheduler_state;
TIDE_API tide_scheduler_state tide_scheduler_describe(const tide_scheduler* scheduler);

/* Reads the audit: a share audit_rate of the tokens of mode "exit" is chosen, and those that exited are computed again at full
 * depth; with audit_epsilon, thresholds are raised when exits change a larger share. The bounds hold at all times together,
 * for the tokens since thresholds were last raised. TIDE_ENDED: there is no audit. */
typedef struct {
  int64_t audited, checked, different, raises;
  double upper_bound, lower_bound;
} tide_audit;
TIDE_API tide_status tide_scheduler_audit(const tide_scheduler* scheduler, tide_audit* audit);

/* Writes a byte to a file descriptor, such as a pipe's or an eventfd, whenever requests got tokens or ended, so that an event
 * loop can wait for it. It must not block, and must stay open until tide_scheduler_unwatch. */
TIDE_API tide_status tide_scheduler_watch(tide_scheduler* scheduler, int descriptor);
TIDE_API void tide_scheduler_unwatch(tide_scheduler* scheduler, int descriptor);

/* Refuses new requests and waits until those submitted have ended; drain 0: they are cancelled. */
TIDE_API void tide_scheduler_close(tide_scheduler* scheduler, int drain);
/* Cancels the requests that have not ended. Not to be called in a hook of one of them: close the scheduler there. */
TIDE_API void tide_scheduler_free(tide_scheduler* scheduler);

/* Puts a request into the queue. options, hooks: as tide_generate. timeout: seconds from now after which it is cancelled;
 * NULL: never. */
TIDE_API tide_status tide_submit(tide_scheduler* scheduler, const int64_t* prompt, size_t count, const char* options,
                                 const tide_hooks* hooks, const double* timeout, tide_request** request);

/* Waits for the next token. After the last one it returns TIDE_ENDED, or the error of the request. */
TIDE_API tide_status tide_request_next(tide_request* request, tide_token* token);

/* Waits for the end of a request. */
TIDE_API tide_status tide_request_result(tide_request* request, tide_generation** generation);

/* Waits until there are more tokens than `from`, the request has ended, or `seconds` have passed. */
TIDE_API void tide_request_wait(const tide_request* request, size_t from, double seconds);

/* Writes up to `room` ids, beginning with number `from`, and returns their number. `status`: TIDE_OK while more may follow,
 * TIDE_ENDED after the last one, or the error of the request. */
TIDE_API size_t tide_request_read(const tide_request* request, size_t from, int64_t* ids, size_t room,
                                  tide_status* status);

/* Writes up to `room` of a generated token's log-probabilities, its own first, and returns how many there are; 0: none, or the
 * token is not generated yet. */
TIDE_API size_t tide_request_logprobs(const tide_request* request, size_t token, tide_logprob* entries, size_t room);

/* Writes up to `room` bytes of the text so far from byte `from` on, which no stop string can take back, without a zero byte, and
 * returns how many there are. */
TIDE_API size_t tide_request_text(const tide_request* request, size_t from, char* text, size_t room);

/* Return the generation so far, and the mode of decoding. */
TIDE_API tide_status tide_request_so_far(const tide_request* request, tide_generation** generation);
TIDE_API const char* tide_request_mode(const tide_request* request);

/* Returns the number of prompt tokens whose K/V came from the prefix cache. */
TIDE_API int64_t tide_request_cached_tokens(const tide_request* request);

TIDE_API void tide_request_cancel(tide_request* request); /* before the next step; its tokens so far stay */
TIDE_API void tide_request_free(tide_request* request);   /* does not cancel it */

/* --- drafting ------------------------------------------------------------------------------------------------------ */

/* Replays lossless mode on a recorded continuation of a prompt, without a model. drafting: a JSON object, as in a manifest,
 * whose "thresholds" are one per checkpoint. scores [positions, checkpoints]: of the routers; early [positions, checkpoints]
 * and full [positions]: the tokens of each exit and of full depth. Sets counts [4]: tokens drafted, accepted, drafted by
 * n-grams, and accepted of these; exits [checkpoints]: drafts at each; runs [positions, 2]: the pending and the new tokens
 * of each verifying run after the first token, unused ones 0. */
TIDE_API tide_status tide_replay(const char* drafting, const int64_t* prompt, size_t count, const float* scores,
                                 const int64_t* early, const int64_t* full, size_t positions, size_t checkpoints,
                                 int64_t* counts, int64_t* exits, int64_t* runs);

/* --- stepping by hand ---------------------------------------------------------------------------------------------- */

/* The result of a step for the last token of a sequence. The memory is valid until the next step of its sequence or batch. */
typedef struct {
  const float* logits;  /* [rows, vocabulary], of the last `rows` positions */
  size_t rows;          /* 1, unless more were requested and the last segment ran */
  size_t vocabulary;
  int64_t exit_layer;   /* layers before the last position's logits */
  int64_t segments_run; /* segments 0 .. segments_run - 1 ran in this step */
  const float* scores;  /* [checkpoints], NaN where the router was not reached or is off; NULL in a batch */
} tide_step;

/* Creates an empty sequence; a call on it that fails changes nothing. thresholds: one per checkpoint; above 1: off.
 * max_pending: pending tokens before a segment must run; -1: the bundle's. adapter: the name of one that the bundle was loaded
 * with; NULL: none. */
TIDE_API tide_status tide_sequence_create(const tide_engine* engine, const double* thresholds, size_t count,
                                          int64_t max_pending, const char* adapter, tide_sequence** sequence);
/* Adds tokens. logits_to_keep: number of last positions to return logits for if the last segment runs. full: run every segment
 * and let no token exit. */
TIDE_API tide_status tide_sequence_step(tide_sequence* sequence, const int64_t* ids, size_t count, int64_t logits_to_keep,
                                        int full, tide_step* result);
TIDE_API tide_status tide_sequence_rewind(tide_sequence* sequence, int64_t length); /* removes all tokens after these */
TIDE_API tide_status tide_sequence_set_thresholds(tide_sequence* sequence, const double* thresholds, size_t count);
/* Writes the tokens in each segment's K/V, shallowest first. */
TIDE_API tide_status tide_sequence_lengths(const tide_sequence* sequence, int64_t* lengths);
TIDE_API void tide_sequence_free(tide_sequence* sequence);

/* Chooses a token from logits [vocabulary] as a generation with these options does. position: index of the token in its sequence;
 * the prompt's first token is 0. */
TIDE_API tide_status tide_sample(const char* options, int64_t position, const float* logits, size_t vocabulary,
                                 int64_t* token);

/* One sequence's part of a batch step. logits_to_keep: as in tide_sequence_step, and the result is then that of full depth; 0:
 * the result is that of the token's exit. */
typedef struct {
  size_t slot;
  const int64_t* ids;
  size_t count;
  int64_t logits_to_keep;
  int full;
} tide_slot_step;

/* Creates an empty batch. compaction_threshold: if a smaller share of a step's sequences needs a segment, only those run it.
 * slots: at most tide_max_batch_size. */
TIDE_API tide_status tide_batch_create(const tide_engine* engine, double compaction_threshold, int64_t slots,
                                       tide_batch** batch);
TIDE_API size_t tide_batch_free_slots(const tide_batch* batch);
TIDE_API tide_status tide_batch_join(tide_batch* batch, const double* thresholds, size_t count, int64_t max_pending,
                                     const char* adapter, size_t* slot);
TIDE_API tide_status tide_batch_leave(tide_batch* batch, size_t slot);
/* Runs `count` parts, by ascending slots; `results` [count] have the same order. */
TIDE_API tide_status tide_batch_step(tide_batch* batch, const tide_slot_step* parts, size_t count, tide_step* results);
TIDE_API tide_status tide_batch_rewind(tide_batch* batch, size_t slot, int64_t length);
TIDE_API tide_status tide_batch_lengths(const tide_batch* batch, size_t slot, int64_t* lengths);
TIDE_API void tide_batch_free(tide_batch* batch);

#ifdef __cplusplus
}
#endif

#endif
