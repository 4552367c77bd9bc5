"""Defines the options of the server."""

from pydantic import BaseModel, ConfigDict, Field

from tide_export.serving.tool_forms import ToolParser


class ServerConfig(BaseModel):
    """Options of `tide-export serve`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0: any that is free")
    model_name: str | None = Field(None, description="name of the model in requests; by default the bundle's folder")
    api_key: str | None = Field(
        None, min_length=1, description="key that requests must give, but for /health, /ready, /metrics (TIDE_API_KEY)"
    )
    allow_origin: tuple[str, ...] = Field(
        (), description="origin whose web pages may send requests, as https://example.org; may be repeated; *: any"
    )
    tool_parser: ToolParser = Field("auto", description="form of tool calls; auto: as the chat template shows")
    slots: int = Field(8, ge=1, description="requests decoded at the same time")
    waiting: int = Field(64, ge=1, description="requests that may wait; more: 429")
    prompt_tokens: int = Field(512, ge=1, description="prompt tokens of one step")
    kv_tokens: int | None = Field(None, ge=1, description="tokens of K/V memory of all decoded requests")
    prefix_cache_bytes: int | None = Field(
        None,
        ge=0,
        description="bytes of K/V and states for requests that begin alike; on the CPU the weights' size or 256 MiB",
    )
    answer_bytes: int = Field(
        1 << 24, ge=0, description="bytes of earlier answers that mode lossless drafts from; 0: none"
    )
    private_cache: bool = Field(
        False, description="yes: a request shares cached prompts and answers only with others of the same cache_salt"
    )
    audit_rate: float | None = Field(
        None, gt=0.0, le=1.0, description="share of mode exit's tokens checked against full depth; with an epsilon 0.01"
    )
    audit_epsilon: float | None = Field(
        None, gt=0.0, lt=1.0, description="share of tokens that exits may change before thresholds are raised"
    )
    max_tokens: int = Field(1024, ge=1, description="tokens of an answer if the request sets no limit")
    request_seconds: float = Field(600.0, gt=0.0, description="time limit of a request")
    body_bytes: int = Field(1 << 20, ge=1024, description="largest request; larger: 413")
    body_seconds: float = Field(
        30.0,
        gt=0.0,
        description="time limit of a request's headers, and body (slower: 408), and of 16 KiB of an answer to be read",
    )
    connections: int = Field(512, ge=1, description="open connections; more: 503")
    requests_per_minute: int | None = Field(None, ge=1, description="limit per client (API key or address); more: 429")
    drain_seconds: float = Field(30.0, ge=0.0, description="time for open requests to end after SIGTERM")
