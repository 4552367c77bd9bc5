/* Uses tide.h from C: service BUNDLE, which has no tokenizer. Prints what it got, a line each, for test_c.py. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <tide/tide.h>

#define GREEDY "{\"mode\": \"full\", \"max_new_tokens\": 6, \"stop_token_ids\": []}"

#define DRAWN "{\"mode\": \"full\", \"max_new_tokens\": 12, \"stop_token_ids\": [], \"temperature\": 1.3, \"seed\": 7}"

#define LOGPROBS "{\"mode\": \"full\", \"max_new_tokens\": 2, \"stop_token_ids\": [], \"logprobs\": 1}"

static const int64_t kPrompt[] = {3, 14, 15};

static void print_generation(const char* name, tide_generation* generation) {
  size_t count;
  const int64_t* tokens = tide_generation_tokens(generation, &count);
  printf("%s %s", name, tide_generation_finish_reason(generation));
  for (size_t i = 0; i < count; ++i) printf(" %lld", (long long)tokens[i]);
  printf("\n");
  tide_generation_free(generation);
}

static int failed(const char* name, tide_status status) {
  if (status == TIDE_OK) return 0;
  printf("%s failed with %d: %s\n", name, (int)status, tide_last_error());
  return 1;
}

struct taken {
  int count;
  int64_t layers;
};

static tide_status only_seven(void* context, const int64_t* ids, size_t count, float* logits, size_t vocabulary) {
  size_t i;
  if (context != NULL && ids[count - 1] == 7) {
    tide_set_error("seven twice");
    return TIDE_GENERATION_ERROR;
  }
  for (i = 0; i < vocabulary; ++i) logits[i] = i == 7 ? 1.0f : -INFINITY;
  return TIDE_OK;
}

static int take(void* context, const tide_token* token) {
  struct taken* taken = context;
  taken->layers += token->layers_run;
  return ++taken->count < 4;
}

static int schedule(const tide_engine* engine) {
  tide_scheduler* scheduler;
  tide_request *first, *second, *third;
  tide_generation* generation;
  tide_token token;
  tide_status status;
  double timeout = 600;
  const tide_hooks sevens = {NULL, only_seven, NULL, NULL, 0};
  if (failed("scheduler", tide_scheduler_create(engine, "{\"slots\": 2, \"waiting\": 1}", &scheduler))) return 1;
  if (failed("submit", tide_submit(scheduler, kPrompt, 3, GREEDY, NULL, NULL, &first))) return 1;
  if (failed("submit", tide_submit(scheduler, kPrompt, 2, GREEDY, NULL, &timeout, &second))) return 1;
  if (failed("submit", tide_submit(scheduler, kPrompt, 1, GREEDY, &sevens, NULL, &third))) return 1;
  if (!tide_scheduler_step(scheduler)) return 1;
  tide_request_cancel(second);
  printf("read");
  while ((status = tide_request_next(first, &token)) == TIDE_OK) printf(" %lld", (long long)token.id);
  printf(" %s\n", status == TIDE_ENDED ? "ended" : "failed");
  if (failed("result", tide_request_result(second, &generation))) return 1;
  print_generation("cancelled", generation);
  tide_request_free(second);
  if (failed("start", tide_scheduler_start(scheduler))) return 1;
  tide_scheduler_close(scheduler, 1);
  if (!failed("closed", tide_submit(scheduler, kPrompt, 3, GREEDY, NULL, NULL, &second))) return 1;
  tide_scheduler_free(scheduler);
  if (failed("result", tide_request_result(third, &generation))) return 1;
  print_generation("drained", generation);
  tide_request_free(first);
  tide_request_free(third);
  return 0;
}

static int logprobs(const tide_engine* engine) {
  tide_generation* generation;
  const tide_logprob* values;
  size_t count;
  if (failed("logprobs", tide_generate(engine, kPrompt, 3, LOGPROBS, NULL, &generation))) return 1;
  values = tide_generation_logprobs(generation, 1, &count);
  printf("logprobs %zu %d\n", count, values[0].id == values[1].id && values[0].logprob < 0);
  if (tide_generation_logprobs(generation, 2, &count) != NULL || count != 0) return 1;
  if (tide_generation_text(generation, &count) != NULL || count != 0) return 1;
  tide_generation_free(generation);
  return 0;
}

/* The same by every way that there is. */
static int drawn(const tide_engine* engine) {
  tide_scheduler* scheduler;
  tide_request *first, *second;
  tide_generation* generation;
  if (failed("draw", tide_generate(engine, kPrompt, 3, DRAWN, NULL, &generation))) return 1;
  print_generation("drawn", generation);
  if (failed("scheduler", tide_scheduler_create(engine, NULL, &scheduler))) return 1;
  if (failed("submit", tide_submit(scheduler, kPrompt, 2, DRAWN, NULL, NULL, &first))) return 1;
  if (failed("submit", tide_submit(scheduler, kPrompt, 3, DRAWN, NULL, NULL, &second))) return 1;
  if (failed("result", tide_request_result(second, &generation))) return 1;
  print_generation("drawn", generation);
  tide_request_free(first);
  tide_request_free(second);
  tide_scheduler_free(scheduler);
  return 0;
}

static int hook_fails(const tide_engine* engine) {
  const tide_hooks once = {&engine, only_seven, NULL, NULL, 0};
  tide_generation* generation;
  return !failed("hook", tide_generate(engine, kPrompt, 3, GREEDY, &once, &generation));
}

static int text(const tide_engine* engine) {
  tide_text_stream* stream = NULL;
  char room[1];
  int64_t id;
  size_t count;
  if (!failed("encode", tide_encode(engine, "a", 1, &id, 1, &count))) return 1;
  if (tide_decode(engine, kPrompt, 3, 0, room, 1, &count) == TIDE_OK) return 1;
  if (tide_text_stream_create(engine, kPrompt, 3, &stream) == TIDE_OK || stream != NULL) return 1;
  tide_text_stream_free(stream);
  return 0;
}

int main(int count, char** arguments) {
  tide_engine* engine = NULL;
  tide_generation* generation = NULL;
  struct taken taken = {0, 0};
  if (count != 2) return 2;
  printf("version %s\n", tide_version());
  if (!failed("missing", tide_load("nowhere", NULL, &engine)) || engine != NULL) return 1;
  if (failed("load", tide_load(arguments[1], "{\"threads\": 1}", &engine))) return 1;
  printf("slots %lld\n", (long long)tide_max_batch_size(engine));
  if (failed("generate", tide_generate(engine, kPrompt, 3, GREEDY, NULL, &generation))) return 1;
  printf("stats %d\n", strstr(tide_generation_stats(generation), "\"total_tokens\": 6") != NULL);
  print_generation("generated", generation);
  if (failed("stream", tide_stream(engine, kPrompt, 3, GREEDY, NULL, take, &taken, &generation))) return 1;
  print_generation("streamed", generation);
  printf("taken %d %lld\n", taken.count, (long long)taken.layers);
  if (!failed("empty", tide_generate(engine, kPrompt, 0, NULL, NULL, &generation))) return 1;
  if (drawn(engine) || logprobs(engine) || hook_fails(engine) || text(engine) || schedule(engine)) return 1;
  tide_engine_free(engine);
  tide_engine_free(NULL);
  return 0;
}
