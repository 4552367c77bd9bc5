"""Answers /tokenize, /detokenize and /tokenizer_info, with vLLM's fields."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from tide_export.bundle.file_names import TEMPLATE_FILE
from tide_export.errors import GenerationError
from tide_export.runtime.chat_template import special_tokens
from tide_export.serving.protocol import ApiError, ChatRequest, Nullable, refusal
from tide_export.serving.service import Service


class TokenizeRequest(Nullable):
    """POST /tokenize: a prompt, or messages, tokenized as by /v1/chat/completions."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: Literal[True] = True
    return_token_strs: bool = False


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(strict=True, ge=0)]]


def tokenize(service: Service, request: TokenizeRequest) -> dict[str, Any]:
    """Answers /tokenize.

    Raises:
        ApiError: the request names another model, does not give exactly one of prompt and messages, or is refused.
    """
    if request.model is not None:
        service.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give one of prompt and messages")
    try:
        if request.prompt is None:
            asked = {"model": service.model, "messages": request.messages, "tools": request.tools}
            tokens = service.conversation(ChatRequest.model_validate(asked))
        elif request.add_special_tokens:
            tokens = service.tokenizer.encode(request.prompt)
        else:
            tokens = service.tokenizer.encode_plain(request.prompt)
    except ValidationError as error:
        raise refusal(error) from None
    except GenerationError as error:
        raise ApiError(400, str(error)) from None
    texts = [service.tokenizer.token_text(token) for token in tokens] if request.return_token_strs else None
    context = service.engine.manifest.model.context_length
    return {"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": texts}


def detokenize(service: Service, request: DetokenizeRequest) -> dict[str, Any]:
    """Answers /detokenize; the text contains special tokens.

    Raises:
        ApiError: the request names another model, or a token outside the vocabulary.
    """
    if request.model is not None:
        service.check_model(request.model)
    vocabulary = range(service.engine.manifest.model.vocab_size)
    if outside := next((token for token in request.tokens if token not in vocabulary), None):
        raise ApiError(400, f"tokens holds token id {outside}, outside the vocabulary 0..{len(vocabulary) - 1}")
    return {"prompt": service.tokenizer.decode(request.tokens, shown=vocabulary)}


def tokenizer_info(service: Service) -> dict[str, Any]:
    """Answers /tokenizer_info: the special tokens and the chat template, if there are any."""
    ends, template = service.engine.manifest.model.eos_token_ids, service.engine.bundle.text(TEMPLATE_FILE)
    info = {"eos_token": service.tokenizer.token_text(ends[0]) if ends else None}
    return info | special_tokens(service.engine.bundle) | ({} if template is None else {"chat_template": template})
