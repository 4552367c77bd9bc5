"""Converts between text and token ids with a bundle's tokenizer.json, also while tokens arrive.

Needs the small package `tokenizers` (in the extras `cpu` and `gpu`), not transformers. The rest of the runtime works on
token ids alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from weakref import WeakKeyDictionary

from tide_export.bundle.file_names import TOKENIZER_FILE
from tide_export.bundle.opened import Bundle, BundleFile
from tide_export.bundle.tokenizer_check import check_tokenizer, tokenizer_errors
from tide_export.common.values import check_text
from tide_export.errors import BundleError, GenerationError

MAX_BYTES = 1 << 27  # of tokenizer.json; large vocabularies take 35 MB
_tokenizers = WeakKeyDictionary[BundleFile, "BundleTokenizer"]()  # by file of an open bundle
LONG = 1 << 13  # characters: encoding more takes longer than others should wait
REPLACEMENT = "\ufffd"  # decoded from bytes that are not (yet) a complete UTF-8 character
CONTEXT = 6  # tokens of the prompt before the first new one, at least
LONGEST_CONTEXT = 16  # at most: more than CONTEXT only where they begin within a character
PENDING = 8  # tokens whose text may wait for more; a character has 4 bytes at most
UNCERTAIN = 3  # tokens that more may complete to a character, at most


class BundleTokenizer:
    """Encodes and decodes text with the tokenizer stored in a bundle."""

    def __init__(self, bundle: Bundle | Path):
        """Reads the tokenizer.json of an opened bundle, or of a folder.

        Raises:
            BundleError: it is missing or cannot be read, cannot encode every text, or lets text grow without bound.
        """
        from tokenizers import Tokenizer

        folder = bundle.path if isinstance(bundle, Bundle) else bundle
        path = folder / TOKENIZER_FILE
        file = bundle.files.get(TOKENIZER_FILE) if isinstance(bundle, Bundle) else path if path.is_file() else None
        if file is None:
            raise BundleError(
                f"bundle {folder} holds no {TOKENIZER_FILE}, so it can only be run on token ids from Python "
                "(tide_export.load)"
            )
        size = file.stat().st_size if isinstance(file, Path) else file.size
        if size > MAX_BYTES:
            raise BundleError(f"'{path}' is too large: a tokenizer has at most {MAX_BYTES} bytes")
        content = file.read_bytes()
        with tokenizer_errors(f"'{path}' is not a usable tokenizer", BundleError):
            self._tokenizer = Tokenizer.from_buffer(content)
            # A tokenizer file may hold the truncation and padding of the training.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        check_tokenizer(self._tokenizer, f"tokenizer '{path}'", BundleError)
        self._texts = dict[int, str]()  # of tokens that `token_text` was asked for

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of `text`, with the special tokens that the model puts around a prompt.

        Raises:
            GenerationError: the text has no tokens, or is not valid Unicode.
        """
        ids = self._encode(text)
        if not ids:
            raise GenerationError("the prompt is empty: it holds no token")
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Returns the token ids of `text` without special tokens.

        Raises:
            GenerationError: the text is not valid Unicode.
        """
        return self._encode(text, add_special_tokens=False)

    def prefix(self) -> list[int]:
        """Returns the tokens that `encode` puts before every prompt (the BOS token, if the model has one)."""
        plain, complete = self.encode_plain("a"), self._encode("a")
        starts = (n for n in range(len(complete) - len(plain) + 1) if complete[n : n + len(plain)] == plain)
        return complete[: next(starts, 0)] if plain else []

    def decode(self, ids: Sequence[int], shown: Sequence[int] = ()) -> str:
        """Returns the text of token ids, without special tokens other than those in `shown`."""
        left = [token for token in ids if token in shown or token not in self._special] if shown else list(ids)
        with tokenizer_errors("the bundle's tokenizer cannot decode the tokens", GenerationError):
            return self._tokenizer.decode(left, skip_special_tokens=not shown)

    def added_token(self, text: str) -> int | None:
        """Returns the id of the added token, special or not, whose text is `text`; None: there is none."""
        return self._added.get(text)

    def to_json(self) -> str:
        """Returns the content of a tokenizer.json."""
        return self._tokenizer.to_str()

    def token_text(self, token: int) -> str:
        """Returns the text of one token, also of a special one, in the middle of a text.

        Bytes of an incomplete character become U+FFFD.
        """
        if token not in self._texts:
            with tokenizer_errors("the bundle's tokenizer cannot decode the tokens", GenerationError):
                before, both = (
                    self._tokenizer.decode(ids, skip_special_tokens=False)
                    for ids in (self._letter, [*self._letter, token])
                )
            self._texts[token] = both[len(before) :]
        return self._texts[token]

    def stream(self, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
        """Yields pieces of text as `tokens` arrive; joined, they are the text that follows the prompt.

        A token may end in the middle of a character, and a tokenizer may spell a token differently after another one
        (leading spaces). So each piece is the difference between two decodings of a short window, and text that ends in
        an incomplete character waits for the next token. If the tokens end there, its bytes become U+FFFD.
        """
        text = TextStream(self, prompt)
        for token in tokens:
            if piece := text.push(token):
                yield piece
        if piece := text.finish():
            yield piece

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, one in added.items() if one.special)

    @cached_property
    def _added(self) -> dict[str, int]:
        return {one.content: token for token, one in self._tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def _letter(self) -> list[int]:
        return self.encode_plain("a")

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_text("the prompt", text)
        with tokenizer_errors("the bundle's tokenizer cannot encode the text", GenerationError):
            if len(text) < LONG:
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            # Of a list, which lets other threads run meanwhile.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def tokenizer_of(bundle: Bundle) -> BundleTokenizer:
    """Returns the tokenizer of an opened bundle, which is read once.

    Raises:
        BundleError: as `BundleTokenizer` raises it.
    """
    file = bundle.files.get(TOKENIZER_FILE)
    if file is None:
        return BundleTokenizer(bundle)  # raises
    if file not in _tokenizers:
        _tokenizers[file] = BundleTokenizer(bundle)
    return _tokenizers[file]


class TextStream:
    """Converts token ids to text as they arrive, as `BundleTokenizer.stream` does."""

    def __init__(self, tokenizer: BundleTokenizer, prompt: Sequence[int], shown: Sequence[int] = ()) -> None:
        """Starts after `prompt`; the text contains the special tokens in `shown`."""
        self._tokenizer, self._ids, self._special = tokenizer, list(prompt), shown
        # ids[start:shown] were returned, but for their last `held` characters; they are the context of the next token
        self._start, self._shown, self._held = _window_start(tokenizer, self._ids), len(self._ids), 0

    def push(self, token: int) -> str:
        """Returns the text that a token completes, often "" in the middle of a character."""
        self._ids.append(token)
        text = self.finish()
        if text and not text.endswith(REPLACEMENT):
            self._start, self._shown, self._held = self._shown, len(self._ids), 0
            return text
        pending = self._ids[self._shown :]
        if len(pending) <= PENDING:
            return ""
        # Special tokens are no text, however many; a space is none at the beginning of a text alone.
        self._ids[self._shown :] = [one for one in pending if self._tokenizer.decode([one] * 3, self._special)]
        count = len(self._ids)
        if count - self._shown <= PENDING:
            return ""
        # A decoder may make all bytes in a row U+FFFD until they end with a character: then the text is shortest.
        texts = [(self._until(end), end) for end in range(count - UNCERTAIN, count + 1)]
        text, end = min(texts, key=lambda one: len(one[0]))
        start = end - UNCERTAIN
        held = min(_incomplete(text), _incomplete(self._decoded(start, end)))
        self._start, self._shown, self._held = start, end, held
        return text[: len(text) - held]

    def finish(self) -> str:
        """Returns the remaining text when the tokens end; bytes of an incomplete character become U+FFFD."""
        return self._until(len(self._ids))

    def _until(self, end: int) -> str:
        """Returns the text of ids[:end] that was not returned."""
        before = self._decoded(self._start, self._shown)
        return self._decoded(self._start, end)[len(before) - self._held :]

    def _decoded(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], self._special)


class LateText:
    """Decodes the text of a generation when it is read."""

    def __init__(self, tokenizer: BundleTokenizer, prompt: Sequence[int], shown: Sequence[int] = ()) -> None:
        self._stream, self._count, self._text = TextStream(tokenizer, prompt, shown), 0, ""

    def of(self, tokens: Sequence[int], ended: bool) -> str:
        """Returns the text of `tokens`, which begin with those of the last call.

        Args:
            ended: no more tokens follow, so bytes of an incomplete character are included.
        """
        for token in tokens[self._count :]:
            self._text += self._stream.push(token)
        self._count = len(tokens)
        return self._text + self._stream.finish() if ended else self._text


def _window_start(tokenizer: BundleTokenizer, ids: Sequence[int]) -> int:
    """Returns the start of the last few prompt tokens that decode to complete characters.

    They are enough context for the first new token. If many tokens are no characters, the start is anywhere in them.
    """
    first = max(0, len(ids) - LONGEST_CONTEXT)
    starts = range(max(0, len(ids) - CONTEXT), first, -1)
    return next((start for start in starts if not tokenizer.decode(ids[start:]).startswith(REPLACEMENT)), first)


def _incomplete(text: str) -> int:
    """Returns how many U+FFFD a text ends with."""
    return len(text) - len(text.rstrip(REPLACEMENT))
