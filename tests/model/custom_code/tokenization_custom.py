"""The tokenizer of such a model: one of transformers' under a name of its own."""

from transformers import PreTrainedTokenizerFast


class CustomTokenizerFast(PreTrainedTokenizerFast):
    pass
