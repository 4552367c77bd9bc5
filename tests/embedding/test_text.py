"""Text through tide.h: tokenizers of every kind are Python's own, and pieces and stop strings come out whatever the
tokens are."""

import ctypes
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from c_interface import CEngine, Hooks, Refused, hooks_of
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tide_export.bundle.file_names import MANIFEST_FILE, TOKENIZER_FILE
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.store import write_manifest
from tide_export.runtime.tokenizer import BundleTokenizer

TEXTS = [
    "Hello world",
    "  leading and trailing  ",
    "a\n\nb\r\n c\t\td\v\f",
    "naïve café ﬁ Å Å e\u0301 é",
    "日本語テキスト 生活的真谛是 ไทย हिन्दी مرحبا",
    "😀👩‍👩‍👧‍👦🇩🇪 🧑‍💻",
    "def f(x):\n    return x**2  # c\n",
    "1234567890 12,345.67 ²³½Ⅷ٣ \uff21\uff22\uff23",
    "I'm you're we'LL don't",
    "x<|endoftext|>y <|endoftext|><s></s>",
    "\u200b\u00a0\u3000\ufeff\u2028\u0085\u00ad",
    "\x01\x7f",
    "a" * 200 + " " * 40 + "\n" * 20,
    "",
    " ",
]
KINDS = ("demo", "split", "llama", "unigram")


def random_text(source: random.Random) -> str:
    pools = [range(32, 127), range(9, 14), range(0xA0, 0x250), range(0x370, 0x600), range(0x2000, 0x2070)]
    pools += [range(0x3040, 0x3100), range(0x4E00, 0x5000), range(0x1F300, 0x1F650), [32], [10], range(48, 58)]
    return "".join(chr(source.choice(source.choice(pools))) for _ in range(source.randrange(1, 25)))


def tokenizers_of_kinds() -> dict[str, Tokenizer]:
    """Small tokenizers of the kinds that models have."""
    text = [*TEXTS, *("the quick brown fox can't jump over 12345 lazy dogs ") * 3]
    special = ["<unk>", "<s>", "</s>"]
    gpt4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+"
    split = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(gpt4), "isolated"), byte_level])
    split.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    split.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet)
    )
    split.enable_truncation(3)
    split.enable_padding(length=9)
    llama = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    llama.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    llama.train_from_iterator(text[:4], trainers.BpeTrainer(vocab_size=400, special_tokens=special + bytes_))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    llama.decoder = decoders.Sequence(steps)
    llama.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    unigram = Tokenizer(models.Unigram())
    unigram.normalizer = normalizers.NFKC()
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    unigram.train_from_iterator(
        text, trainers.UnigramTrainer(vocab_size=150, special_tokens=special, unk_token="<unk>")
    )
    return {"split": split, "llama": llama, "unigram": unigram}


def with_tokenizer(bundle: Path, folder: Path, content: str) -> Path:
    shutil.copytree(bundle, folder)
    (folder / TOKENIZER_FILE).write_text(content)
    write_manifest(folder, Manifest.from_json((folder / MANIFEST_FILE).read_text()))
    return folder


@pytest.fixture(scope="module")
def texts(
    demo_bundle: Path,
    tiny_bundle: Path,
    tmp_path_factory: pytest.TempPathFactory,
    c_library: ctypes.CDLL,
    tokenizers_library: Path,
) -> Iterator[dict[str, tuple[BundleTokenizer, CEngine]]]:
    """Tokenizers of every kind, Python's and tide.h's."""
    folder, kinds = tmp_path_factory.mktemp("tokenizers"), tokenizers_of_kinds()
    bundles = {name: with_tokenizer(tiny_bundle, folder / name, one.to_str()) for name, one in kinds.items()}
    opened = {
        name: (BundleTokenizer(bundle), CEngine(c_library, bundle, tokenizers=str(tokenizers_library)))
        for name, bundle in {"demo": demo_bundle, **bundles}.items()
    }
    yield opened
    for _, engine in opened.values():
        engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text(texts: dict[str, tuple[BundleTokenizer, CEngine]], kind: str) -> None:
    python, ours = texts[kind]
    source = random.Random(5)
    for text in [*TEXTS, *(random_text(source) for _ in range(150))]:
        ids = python.encode_plain(text)
        assert ours.encode(text, False) == ids
        if ids:
            assert ours.encode(text) == python.encode(text)
            assert ours.decode(ids) == python.decode(ids)
    for _ in range(150):  # what no text gives, too
        ids = [source.randrange(300) for _ in range(source.randrange(1, 8))]
        assert ours.decode(ids) == python.decode(ids)
        assert ours.decode(ids, True) == python.decode(ids, shown=ids)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces(texts: dict[str, tuple[BundleTokenizer, CEngine]], kind: str) -> None:
    """As tokens arrive, also from the middle of a character on and with bytes that are no character."""
    python, ours = texts[kind]
    source = random.Random(6)
    for number in range(60):
        ids = python.encode_plain(source.choice(TEXTS) + random_text(source))
        if number % 3 == 0:
            ids = [source.randrange(300) for _ in range(12)]
        cut = source.randrange(len(ids))
        pieces = list(ours.pieces(ids[:cut], ids[cut:]))
        assert len(pieces) == len(ids) - cut + 1
        assert [piece for piece in pieces if piece] == list(python.stream(ids[:cut], ids[cut:]))


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_many_tokens_that_are_no_character(
    texts: dict[str, tuple[BundleTokenizer, CEngine]], kind: str
) -> None:
    python, ours = texts[kind]
    source, ends = random.Random(7), sorted(python._special)[-1:]
    pool = [token for token in range(300) if INCOMPLETE in python.token_text(token)] or [5]
    for _ in range(12):
        ids = [source.choice(pool)] * 40 + [source.choice(pool) for _ in range(40)] + ends * 20
        ids += python.encode_plain(" a" + source.choice(TEXTS))
        cut = source.randrange(len(ids))
        pieces = list(ours.pieces(ids[:cut], ids[cut:]))
        assert [piece for piece in pieces if piece] == list(python.stream(ids[:cut], ids[cut:]))


def test_what_is_refused(
    c_library: ctypes.CDLL, demo_bundle: Path, tiny_bundle: Path, tmp_path: Path, tokenizers_library: Path
) -> None:
    broken = with_tokenizer(tiny_bundle, tmp_path / "broken", '{"model": ')
    given = str(tokenizers_library)
    for bundle, library, status, sentence in [
        (tiny_bundle, given, 3, r"holds no tokenizer.json, so it can only be run on token ids"),
        (demo_bundle, "/no/such.so", 6, r"text needs a library with the C binding of tokenizers: .* cannot open"),
        (demo_bundle, "libm.so.6", 6, r"is no library with the C binding of tokenizers: .*tokenizers_encode"),
        (broken, given, 3, r"tokenizer.json' is not a usable tokenizer: it is no JSON object"),
    ]:
        engine = CEngine(c_library, bundle, tokenizers=library)
        for _ in range(2):
            with pytest.raises(Refused, match=sentence) as refused:
                engine.encode("a")
            assert refused.value.status == status
        engine.close()
    engine = CEngine(c_library, demo_bundle, tokenizers=given)
    ids, count = (ctypes.c_int64 * 9)(), ctypes.c_size_t()
    with pytest.raises(Refused, match="the prompt is not valid UTF-8"):
        engine.call("encode", engine.handle, b"a\xff", 1, ids, ctypes.c_size_t(9), ctypes.byref(count))
    engine.close()


# --- stop strings, by a detokenizer of the caller's own ---------------------------------------------------------------

PIECES = ("a", "b", "ab", "ba b", "", "\n", "é")  # of tokens 0, 1, ...
FIRST, SECOND = 7, 8  # of two tokens that are one character
INCOMPLETE = "\ufffd"


def decoded(ids: list[int]) -> str:
    """The text of tokens."""
    text, known = "", dict(enumerate(PIECES)) | {SECOND: INCOMPLETE}
    for number, token in enumerate(ids):
        if token == FIRST:
            text += "日" if ids[number + 1 : number + 2] == [SECOND] else INCOMPLETE
        elif token != SECOND or ids[max(number - 1, 0)] != FIRST:
            text += known.get(token, "x")
    return text


def stopped(plan: list[int], stops: list[str]) -> tuple[str, list[int], str]:
    """The text, the tokens and the end of a generation whose tokens are planned."""

    def cut(text: str) -> str | None:
        ends = [text.index(stop) for stop in stops if stop in text]
        return text[: min(ends)] if ends else None

    shown = ""
    for count in range(1, len(plan) + 1):
        text = decoded(plan[:count])
        shown = shown if text.endswith(INCOMPLETE) else text
        if (found := cut(shown)) is not None:
            return found, plan[:count], "stop"
    whole = decoded(plan)
    return whole if (found := cut(whole)) is None else found, plan, "length"


def following(plan: list[int], prompt: int, decode: Callable[[list[int]], str] = decoded) -> Hooks:
    def process(ids: list[int], logits: np.ndarray) -> int:
        wanted = plan[len(ids) - prompt] if len(ids) - prompt < len(plan) else 0  # after it there are drafts alone
        logits[:] = -np.inf
        logits[wanted] = 0
        return 0

    return hooks_of(process, decode)


@pytest.mark.parametrize(
    "mode", [{"mode": "full"}, {"mode": "lossless", "threshold": 0.0, "prompt_lookup": 3}], ids=str
)
def test_the_first_stop_string_that_is_complete_ends_the_text(loaded: CEngine, mode: dict[str, Any]) -> None:
    """Whatever the tokens are: across them, in the middle of them, and of a character."""
    order, reasons = random.Random(0), set[str]()
    for _ in range(150):
        plan = [order.choice((0, 1, 2, 3, 4, 5, 6, FIRST, SECOND)) for _ in range(12)]
        stops = ["".join(order.choice("aabb\né日") for _ in range(order.randint(1, 3))) for _ in range(2)]
        options = mode | {"max_new_tokens": 12, "stop_token_ids": [], "stop": stops}
        made = loaded.generate([3], following(plan, 1), **options)
        assert (made.text, made.tokens, made.finish_reason) == stopped(plan, stops)
        reasons.add(made.finish_reason)
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("token", [SECOND, 4])
def test_what_is_no_character_is_decoded_a_few_tokens_at_a_time(loaded: CEngine, token: int) -> None:
    """Or no text."""
    counts = list[int]()

    def decode(ids: list[int]) -> str:
        counts.append(len(ids))
        return decoded(ids)

    plan, options = [token] * 40 + [1], {"mode": "full", "max_new_tokens": 41, "stop_token_ids": [], "stop": ["never"]}
    made = loaded.generate([token] * 40, following(plan, 40, decode), **options)
    assert (made.text, made.tokens) == (decoded(plan), plan)
    assert max(counts) <= 16 + 8 + 1


def test_requests_of_a_scheduler_stop_as_one_prompt_does(loaded: CEngine) -> None:
    order, asked = random.Random(1), []
    scheduler = loaded.scheduler(slots=3)
    for _ in range(20):
        plan = [order.choice((0, 1, 2, 3, FIRST, SECOND)) for _ in range(12)]
        options = {"mode": "full", "max_new_tokens": 12, "stop_token_ids": [], "stop": ["bb", "日a"]}
        asked.append((plan, scheduler.submit([3, 4], following(plan, 2), **options)))
    for plan, request in asked:
        made = request.result()
        assert (made.text, made.tokens, made.finish_reason) == stopped(plan, ["bb", "日a"])
        request.close()
    scheduler.close()


def test_a_cancelled_request_has_all_its_text(loaded: CEngine) -> None:
    """What may become a stop string, and half a character."""
    scheduler = loaded.scheduler(slots=1)
    plan = [0, 1, FIRST, 0, 0]
    options = {"mode": "full", "max_new_tokens": 5, "stop_token_ids": [], "stop": "ab日never"}
    request = scheduler.submit([3], following(plan, 1), **options)
    for _ in range(3):
        scheduler.step()
    request.cancel()
    made = request.result()
    assert (made.text, made.tokens, made.finish_reason) == ("ab" + INCOMPLETE, plan[:3], "cancelled")
    request.close()
    scheduler.close()


@pytest.mark.parametrize(
    ("decode", "stop", "sentence"),
    [
        (lambda ids: None, "a", "the detokenizer failed: it returned 4"),
        (decoded, ["a", ""], r"stop must be a string or a list of strings, none of them empty, not \['a', ''\]"),
        (None, "a", "holds no tokenizer.json, so it can only be run on token ids"),
    ],
)
def test_stop_strings_that_are_refused(
    loaded: CEngine, decode: Callable[[list[int]], str | None] | None, stop: Any, sentence: str
) -> None:
    for _ in range(2):
        with pytest.raises(Refused, match=sentence):
            loaded.generate([3], hooks_of(None, decode), stop=stop, max_new_tokens=3)
    assert loaded.generate([3], max_new_tokens=3, stop_token_ids=[]).tokens
