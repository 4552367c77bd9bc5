"""Text in C++: the tokenizer is Python's own, and pieces of text and stop strings come out as Python's do."""

import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cpp_builds import CppBuild
from cpp_engine import CppEngine, listed, prompts_of
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tide_export.bundle.manifest import Manifest
from tide_export.bundle.store import write_manifest
from tide_export.errors import BundleError, GenerationError, ProviderError
from tide_export.names import MANIFEST_FILE, TOKENIZER_FILE
from tide_export.runtime.engine import load
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
    "\x00\x01\x7f",
    "a" * 200 + " " * 40 + "\n" * 20,
    "",
    " ",
]


def random_text(source: random.Random) -> str:
    pools = [range(32, 127), range(9, 14), range(0xA0, 0x250), range(0x370, 0x600), range(0x2000, 0x2070)]
    pools += [range(0x3040, 0x3100), range(0x4E00, 0x5000), range(0x1F300, 0x1F650), [32], [10], range(48, 58)]
    return "".join(chr(source.choice(source.choice(pools))) for _ in range(source.randrange(1, 25)))


def kinds() -> dict[str, Tokenizer]:
    """Small tokenizers of the kinds that models have."""
    text = [*TEXTS, *("the quick brown fox can't jump over 12345 lazy dogs ") * 3]
    special = ["<unk>", "<s>", "</s>"]
    gpt4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+"
    split = Tokenizer(models.BPE())
    split.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(gpt4), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
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
    open_cpp: Callable[..., CppEngine],
    tokenizers_library: Path,
) -> dict[str, tuple[BundleTokenizer, CppEngine]]:
    """Tokenizers of every kind, in Python and in an engine of C++."""
    folder = tmp_path_factory.mktemp("tokenizers")
    bundles = {name: with_tokenizer(tiny_bundle, folder / name, one.to_str()) for name, one in kinds().items()}
    opened = {}
    for name, bundle in {"demo": demo_bundle, **bundles}.items():
        cpp = open_cpp(bundle, environment={"TIDE_TOKENIZERS": str(tokenizers_library)})
        cpp.call("tokenizer")
        opened[name] = BundleTokenizer(bundle), cpp
    return opened


def hexadecimal(text: str) -> str:
    return text.encode().hex() or "-"


@pytest.mark.parametrize("kind", ["demo", "split", "llama", "unigram"])
def test_ids_and_text(texts: dict[str, tuple[BundleTokenizer, CppEngine]], kind: str) -> None:
    python, cpp = texts[kind]
    source = random.Random(5)
    for text in [*TEXTS, *(random_text(source) for _ in range(150))]:
        ids = python.encode_plain(text)
        assert cpp.call("encode", hexadecimal(text), "0") == ids
        if ids:
            assert cpp.call("encode", hexadecimal(text), "1") == python.encode(text)
            assert cpp.call("decode", listed(ids), "0") == python.decode(ids)
    for _ in range(150):  # what no text gives, too
        ids = [source.randrange(300) for _ in range(source.randrange(1, 8))]
        assert cpp.call("decode", listed(ids), "0") == python.decode(ids)
        assert cpp.call("decode", listed(ids), "1") == python._tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", ["demo", "split", "llama", "unigram"])
def test_pieces(texts: dict[str, tuple[BundleTokenizer, CppEngine]], kind: str) -> None:
    """As tokens arrive, also from the middle of a character on and with bytes that are no character."""
    python, cpp = texts[kind]
    source = random.Random(6)
    for number in range(60):
        ids = python.encode_plain(source.choice(TEXTS) + random_text(source))
        if number % 3 == 0:
            ids = [source.randrange(300) for _ in range(12)]
        cut = source.randrange(len(ids))
        pieces = cpp.call("pieces", listed(ids[:cut]) or ",", listed(ids[cut:]))
        assert len(pieces) == len(ids) - cut + 1
        assert [piece for piece in pieces if piece] == list(python.stream(ids[:cut], ids[cut:]))


def test_refused(
    demo_bundle: Path, tiny_bundle: Path, tmp_path: Path, open_cpp: Callable[..., CppEngine], tokenizers_library: Path
) -> None:
    bare = open_cpp(tiny_bundle)
    with pytest.raises(BundleError, match=r"holds no tokenizer.json, so it can only be run on token ids"):
        bare.call("tokenizer", str(tokenizers_library))
    cpp = open_cpp(demo_bundle, environment={"TIDE_TOKENIZERS": ""})
    with pytest.raises(ProviderError, match=r"text needs a library with the C binding of tokenizers: .* cannot open"):
        cpp.call("tokenizer", "/no/such/library.so")
    with pytest.raises(ProviderError, match=r"is no library with the C binding of tokenizers: .*tokenizers_encode"):
        cpp.call("tokenizer", "libm.so.6")
    cpp.call("tokenizer", str(tokenizers_library))
    with pytest.raises(GenerationError, match="the prompt is not valid UTF-8"):
        cpp.call("encode", "61ff", "1")
    broken = open_cpp(with_tokenizer(tiny_bundle, tmp_path / "broken", '{"model": '))
    with pytest.raises(BundleError, match=r"tokenizer.json' is not a usable tokenizer: it is no JSON object"):
        broken.call("tokenizer", str(tokenizers_library))


STOPPED: list[dict[str, Any]] = [{"mode": "full"}, {"mode": "lossless", "threshold": 0.5, "max_pending": 3}]


@pytest.mark.parametrize("mode", STOPPED, ids=str)
def test_stop_strings(tiny_llama, open_cpp: Callable[..., CppEngine], mode: dict[str, Any]) -> None:
    """By a detokenizer of the caller's own: every string of the text, also across tokens, alone and in a list."""
    cpp = open_cpp(tiny_llama.exact)
    prompts, options = [[3, 14, 15], [2, 6]], {"max_new_tokens": 10, "stop_token_ids": [], **mode}
    letters = [*cpp.request(prompts[0], **options), "--detokenizer", "letters"]
    whole = cpp.call("generate", *letters)
    text, tokens = whole["text"], whole["tokens"]
    assert text == "".join(chr(97 + token % 26) * (1 + token % 2) for token in tokens)
    for start in range(0, len(text), 2):
        for stop in (text[start : start + 1], text[start : start + 3], text[start:]):
            out = cpp.call("generate", *letters, "--stop-hex", hexadecimal("no such"), "--stop-hex", hexadecimal(stop))
            at = text.index(stop)
            made = next(n for n in range(1, 11) if len(_letters(tokens[:n])) >= at + len(stop))
            assert (out["text"], out["tokens"], out["finish_reason"]) == (text[:at], tokens[:made], "stop")
    two = [*prompts_of(prompts), *letters[2:], "--stop-hex", hexadecimal(text[3:5])]
    first, second = cpp.call("generate_batch", *two)
    assert first["text"] == text[: text.index(text[3:5])]
    alone = cpp.call("generate", *cpp.request(prompts[1], **options), *two[-2:], "--detokenizer", "letters")
    assert (second["text"], second["tokens"]) == (alone["text"], alone["tokens"])
    for more, sentence in (
        (["--stop-hex", "61"], "stop needs a tokenizer: give one as GenerationConfig::detokenizer"),
        (
            ["--stop-hex", "61", "--stop-hex", "-"],
            r"stop must be a string or .*, none of them empty, not \['a', ''\]",
        ),
        (["--detokenizer", "throws"], "the detokenizer failed: no"),
    ):
        with pytest.raises(GenerationError, match=sentence):
            cpp.call("generate", *cpp.request(prompts[0], **options), *more)


def _letters(tokens: list[int]) -> str:
    return "".join(chr(97 + token % 26) * (1 + token % 2) for token in tokens)


PROMPT = "import os\nimport sys\n\n\ndef main():\n"


@pytest.mark.parametrize("mode", [{"mode": "full"}, {"mode": "lossless", "threshold": 0.3}], ids=str)
def test_stop_strings_as_in_python(
    demo_bundle: Path, texts: dict[str, tuple[BundleTokenizer, CppEngine]], mode: dict[str, Any]
) -> None:
    python, cpp = load(demo_bundle, threads=1), texts["demo"][1]
    ids, options = texts["demo"][0].encode(PROMPT), {"max_new_tokens": 24, "stop_token_ids": [], **mode}
    whole = python.generate(ids, detokenize=True, **options)
    assert whole.text
    middle = len(whole.text) // 2
    for stop in ((), (whole.text[middle : middle + 3],), ("no such", whole.text[-4:], whole.text[-6:-2])):
        words = [word for one in stop for word in ("--stop-hex", hexadecimal(one))]
        ours = cpp.call("generate", *cpp.request(ids, **options), "--detokenizer", "bundle", *words)
        theirs = python.generate(ids, stop=stop, detokenize=True, **options)
        assert ours["text"] == theirs.text
        assert (ours["tokens"], ours["finish_reason"]) == (theirs.tokens, theirs.finish_reason)
        assert (theirs.finish_reason == "stop") == bool(stop)


def test_a_grammar(demo_bundle: Path, texts: dict[str, tuple[BundleTokenizer, CppEngine]]) -> None:
    """llguidance's C API as the logits processor: lossless mode keeps its promise with it."""
    tokenizer, cpp = texts["demo"]
    ids, pattern = tokenizer.encode(PROMPT), r"    x = [0-9]{3}\n    return \(x, [a-f]+7\)"
    tokens = []
    for mode in ({"mode": "full"}, {"mode": "exit", "threshold": 0.3}, {"mode": "lossless", "threshold": 0.3}):
        words = ["--regex-hex", hexadecimal(pattern), "--regex-bundle", str(demo_bundle), "--detokenizer", "bundle"]
        out = cpp.call("generate", *cpp.request(ids, max_new_tokens=60, **mode), *words)
        if out["finish_reason"] == "stop":
            assert re.fullmatch(pattern, out["text"])
        else:
            assert re.match(r"    x = [0-9]{3}\n    return \(x, [a-f]*$", out["text"])
        tokens.append(out["tokens"])
    assert tokens[0] == tokens[2]


def test_the_example_program(cpp: CppBuild, demo_bundle: Path, tokenizers_library: Path) -> None:
    arguments = [cpp.program, demo_bundle, "--threads", "1", "--max-new-tokens", "8", "--prompt", "import os\n"]
    environment = {"TIDE_TOKENIZERS": str(tokenizers_library)}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    answer, tokenizer = json.loads(done.stdout), BundleTokenizer(demo_bundle)
    pieces = list(tokenizer.stream(tokenizer.encode("import os\n"), answer["tokens"]))
    assert answer["text"] == "".join(pieces)
    stop = answer["text"][2:5]
    done = subprocess.run([*arguments, "--stop", stop], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["text"] == answer["text"].partition(stop)[0]
    done = subprocess.run(arguments, env={}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "set TIDE_TOKENIZERS to one, or give token ids" in done.stderr
