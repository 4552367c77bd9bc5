"""Small tokenizer files of every kind of model, with every kind of component, to mutate."""

from random import Random
from typing import Any

LETTERS = {"[UNK]": 0, "a": 1, "b": 2, "ab": 3, "##a": 4, "Ġ": 5, "Ġa": 6, "▁": 7, "1": 8, "x": 9, "[X]": 10}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def template(*pieces: str, defined: tuple[str, ...] = ("[X]",)) -> dict[str, Any]:
    """A template of special tokens, and "$" for the text; those `defined` have ids."""
    texts = {"$": {"Sequence": {"id": "A", "type_id": 0}}, "$B": {"Sequence": {"id": "B", "type_id": 0}}}
    single = [texts.get(piece, {"SpecialToken": {"id": piece, "type_id": 0}}) for piece in pieces]
    tokens = {name: {"id": name, "ids": [10], "tokens": [name]} for name in defined}
    return {"type": "TemplateProcessing", "single": single, "pair": [texts["$"], texts["$B"]], "special_tokens": tokens}


def sequence(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(steps)}


def tokenizer(model: dict[str, Any] | None = None, **components: Any) -> dict[str, Any]:
    """The contents of a tokenizer.json; its model is a BPE, if not given."""
    made = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    made |= {"pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model or bpe()}
    return made | components


def bpe(**options: Any) -> dict[str, Any]:
    made = {"type": "BPE", "dropout": None, "unk_token": "[UNK]", "continuing_subword_prefix": None}
    made |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return made | {"vocab": LETTERS, "merges": [["a", "b"], ["Ġ", "a"]]} | options


def word_piece(**options: Any) -> dict[str, Any]:
    made = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    return made | {"max_input_chars_per_word": 100, "vocab": LETTERS} | options


def unigram(**options: Any) -> dict[str, Any]:
    pieces = [[piece, -float(number)] for piece, number in LETTERS.items()]
    return {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False} | options


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
SPACES = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
SPLIT = {"type": "Split", "pattern": {"Regex": "\\s+|[a-z]+"}, "behavior": "Isolated", "invert": False}
ADDED = {
    "id": 10,
    "content": "[X]",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
BERT = {
    "type": "BertNormalizer",
    "clean_text": True,
    "handle_chinese_chars": True,
    "strip_accents": None,
    "lowercase": True,
}
TRUNCATION = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 8},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "a",
}

FILES = [
    tokenizer(pre_tokenizer=BYTES, decoder=BYTES, post_processor=BYTES, added_tokens=[ADDED], truncation=TRUNCATION),
    tokenizer(
        word_piece(),
        normalizer=BERT,
        pre_tokenizer={"type": "BertPreTokenizer"},
        post_processor=template("[X]", "$", "[X]"),
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
        padding=PADDING,
    ),
    tokenizer(
        unigram(),
        normalizer=sequence(
            "normalizers",
            {"type": "NFKC"},
            replace(" {2,}", " ", "Regex"),
            {"type": "Prepend", "prepend": "▁"},
            replace(" ", "▁"),
        ),
        pre_tokenizer=SPACES,
        decoder=sequence(
            "decoders",
            replace("▁", " "),
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ),
    ),
    tokenizer(
        {"type": "WordLevel", "vocab": LETTERS, "unk_token": "[UNK]"},
        normalizer=sequence("normalizers", {"type": "Lowercase"}, {"type": "StripAccents"}, {"type": "NFD"}),
        pre_tokenizer=sequence(
            "pretokenizers",
            SPLIT,
            {"type": "Digits", "individual_digits": True},
            {"type": "Punctuation", "behavior": "Isolated"},
        ),
        post_processor=sequence("processors", BYTES, template("[X]", "$")),
        decoder={"type": "CTC", "pad_token": "a", "word_delimiter_token": "|", "cleanup": True},
    ),
]

MODELS = [file["model"] for file in FILES]
STEPS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "normalizer": (
        "normalizers",
        [
            BERT,
            BYTES,
            replace("a", "ab"),
            replace("b", ""),
            replace("", "-"),
            replace("a*", "aa", "Regex"),
            replace("[^a]", "\ufdfa", "Regex"),
            replace(" ", "▁"),
            *({"type": kind} for kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt")),
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "Prepend", "prepend": "▁"},
        ],
    ),
    "pre_tokenizer": (
        "pretokenizers",
        [
            BYTES,
            SPACES,
            SPLIT,
            SPLIT | {"pattern": {"Regex": "(?=a)|b*"}, "behavior": "MergedWithNext"},
            SPLIT | {"pattern": {"String": "a"}, "behavior": "Removed", "invert": True},
            *({"type": kind} for kind in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "UnicodeScripts")),
            {"type": "CharDelimiterSplit", "delimiter": "a"},
            {"type": "Digits", "individual_digits": True},
            {"type": "Punctuation", "behavior": "Contiguous"},
        ],
    ),
    "post_processor": (
        "processors",
        [
            BYTES,
            template("[X]", "$", "[X]"),
            template("$", "$"),
            template("[X]"),
            {"type": "BertProcessing", "sep": ["[X]", 10], "cls": ["a", 1]},
            {
                "type": "RobertaProcessing",
                "sep": ["[X]", 10],
                "cls": ["a", 1],
                "trim_offsets": True,
                "add_prefix_space": True,
            },
        ],
    ),
    "decoder": (
        "decoders",
        [
            BYTES,
            SPACES,
            replace("a", "ab"),
            replace("a*", "bb", "Regex"),
            *({"type": kind} for kind in ("ByteFallback", "Fuse")),
            {"type": "WordPiece", "prefix": "##", "cleanup": True},
            {"type": "BPEDecoder", "suffix": "a"},
            {"type": "CTC", "pad_token": "a", "word_delimiter_token": "|", "cleanup": True},
            {"type": "Strip", "content": "a", "start": 3, "stop": 3},
        ],
    ),
}


def combined(random: Random) -> dict[str, Any]:
    """A file of components drawn from all of these, in sequences of up to 12."""
    made: dict[str, Any] = {}
    for part, (kind, steps) in STEPS.items():
        drawn = [random.choice(steps) for _ in range(random.choice((0, 1, 1, 2, 3, 12)))]
        made[part] = None if not drawn else drawn[0] if len(drawn) == 1 else sequence(kind, *drawn)
    return tokenizer(random.choice(MODELS), added_tokens=[ADDED] if random.random() < 0.5 else [], **made)
