"""One runtime that answers single prompts, with or without its drafts, in a process of its own (as runtime_process.py).

    python -P answer_process.py '{"runtime": "tide", "file": "BUNDLE:full", "threads": 2, "length": 1024, "batch": 1}'

To `{"do": "answer", "question": {"prompt": [ids], "tokens": n, "temperature": t, "top_k": k, "seed": s}}` it answers
the `seconds` between the first token and the last, the `tokens` of that time, and the `text`: ids, or a server's text.
An answer ends where the model ends it, or after n tokens. What drafts is the last word of the file's name:
`tide:BUNDLE:full`, `:lossless` (as the bundle says), `:ngrams` and `:drafter` (lossless, that source alone);
`llama.cpp:FILE:lookup`, `genai:FOLDER:ngrams`, `openvino:FOLDER:lookup`; a `server` drafts by its command's options.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))  # not added by itself: other environments run this with -P

from harness.runtime_process import Job, OpenVino, Question, Runtime, Server, Tide, main

# As llama-cpp-python's documentation advises for CPUs; the others' own defaults, where they have one.
LOOKUP_TOKENS, NGRAM, NGRAM_DRAFTS = 2, 3, 4
LOSSLESS: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    "lossless": {"mode": "lossless"},
    "ngrams": {"mode": "lossless", "max_pending": 0, "drafter": 0, "prompt_lookup": 15},
    "drafter": {"mode": "lossless", "max_pending": 0, "prompt_lookup": 0},
}


def answered(tokens: list[int], seconds: float) -> dict[str, Any]:
    return {"seconds": seconds, "tokens": len(tokens) - 1, "text": tokens}


class AnsweringTide(Tide):
    """tide_export at full depth, or losslessly with its drafts."""

    def answer(self, question: Question) -> dict[str, Any]:
        options = dict(LOSSLESS[self._mode])
        for part, name in (("drafter", "drafter"), ("checkpoints", "max_pending")):
            if not getattr(self._engine.manifest, part):
                options.pop(name, None)
        drawn: dict[str, Any] = {"temperature": question.temperature, "seed": question.seed}
        if question.temperature:
            drawn["top_k"] = question.top_k
        stream = self._engine.stream(question.prompt, max_new_tokens=question.tokens, **drawn, **options)
        tokens = [next(stream)]
        started = time.perf_counter()
        tokens += list(stream)
        return answered(tokens, time.perf_counter() - started)


class AnsweringLlamaCpp(Runtime):
    """llama-cpp-python's `Llama`, with its prompt lookup for `FILE:lookup`."""

    def __init__(self, job: Job) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self.version = f"llama_cpp_python {llama_cpp.__version__}"
        file = job.file.removesuffix(":lookup")
        draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS) if file != job.file else None
        threads = {"n_threads": job.threads, "n_threads_batch": job.threads}
        self._model = llama_cpp.Llama(file, n_ctx=job.length, draft_model=draft, verbose=False, **threads)
        self._is_end = llama_cpp.llama_vocab_is_eog
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model.model)

    def answer(self, question: Question) -> dict[str, Any]:
        self._model.reset()
        self._model.set_seed(question.seed)
        drawn = {"temp": question.temperature, "top_k": question.top_k, "top_p": 1.0, "min_p": 0.0}
        tokens: list[int] = []
        started = 0.0
        for token in self._model.generate(question.prompt, repeat_penalty=1.0, reset=True, **drawn):
            started = started or time.perf_counter()
            tokens.append(int(token))
            if len(tokens) == question.tokens or self._is_end(self._vocabulary, token):
                break
        return answered(tokens, time.perf_counter() - started)


class AnsweringGenai(Runtime):
    """ORT-GenAI's `Generator`, with its n-grams (greedy only) for `FOLDER:ngrams`."""

    def __init__(self, job: Job) -> None:
        from harness.runtime_process import Genai

        file = job.file.removesuffix(":ngrams")
        loaded = Genai(job._replace(file=file))
        self.version, self._api, self._model = loaded.version, loaded._api, loaded._model
        self._drafts = {"ngram_size": NGRAM, "max_draft_tokens": NGRAM_DRAFTS} if file != job.file else {}

    def answer(self, question: Question) -> dict[str, Any]:
        settings = self._api.GeneratorParams(self._model)
        drawn: dict[str, Any] = {"do_sample": False}
        if question.temperature:
            drawn = {"do_sample": True, "temperature": question.temperature, "top_k": question.top_k, "top_p": 1.0}
            drawn["random_seed"] = question.seed
        settings.set_search_options(batch_size=1, max_length=len(question.prompt) + question.tokens, **drawn)
        if self._drafts:
            settings.set_speculative_options(**self._drafts)
        generator = self._api.Generator(self._model, settings)
        generator.append_tokens(np.array([question.prompt], np.int32))
        generator.generate_next_token()
        started = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        seconds = time.perf_counter() - started
        return answered(generator.get_sequence(0)[len(question.prompt) :].tolist(), seconds)


class AnsweringOpenVino(OpenVino):
    """OpenVINO GenAI's `LLMPipeline`, with its prompt lookup for `FOLDER:lookup`."""

    def __init__(self, job: Job) -> None:
        file = job.file.removesuffix(":lookup")
        super().__init__(job._replace(file=file), **({"prompt_lookup": True} if file != job.file else {}))
        self._drafts = {"num_assistant_tokens": NGRAM_DRAFTS, "max_ngram_size": NGRAM} if file != job.file else {}

    def answer(self, question: Question) -> dict[str, Any]:
        drawn: dict[str, Any] = {"do_sample": False}
        if question.temperature:
            drawn = {"do_sample": True, "temperature": question.temperature, "top_k": question.top_k, "top_p": 1.0}
            drawn["rng_seed"] = question.seed
        config = self._api.GenerationConfig(max_new_tokens=question.tokens, **drawn, **self._drafts)
        result, total = self.run([question.prompt], config)
        return answered(list(result.tokens[0]), total - result.perf_metrics.get_ttft().mean / 1e3)


class AnsweringServer(Server):
    """llama-server, by what it says of its own time from the first token on."""

    def answer(self, question: Question) -> dict[str, Any]:
        wanted = {"prompt": question.prompt, "n_predict": question.tokens, "temperature": question.temperature}
        wanted |= {"top_k": question.top_k, "seed": question.seed, "samplers": ["top_k", "temperature"]}
        reply = self.complete(wanted if question.temperature else wanted | {"top_k": 1})
        timings = reply["timings"]
        seconds, tokens = timings["predicted_ms"] / 1e3, timings["predicted_n"] - 1
        return {"seconds": seconds, "tokens": tokens, "text": reply["content"]}


RUNTIMES = {"tide": AnsweringTide, "llama.cpp": AnsweringLlamaCpp, "genai": AnsweringGenai}
RUNTIMES |= {"openvino": AnsweringOpenVino, "server": AnsweringServer}

if __name__ == "__main__":
    main(RUNTIMES)
