"""The options of the server."""

from pydantic import BaseModel, ConfigDict, Field

from tide_export.serving.tool_forms import ToolParser


class ServerConfig(BaseModel):
    """How a bundle is served."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0: any that is free")
    model_name: str | None = Field(None, description="name of the model in requests; by default the bundle's folder")
    api_key: str | None = Field(None, min_length=1, description="asked of every request to /v1 (TIDE_API_KEY)")
    tool_parser: ToolParser = Field("auto", description="form of tool calls; auto: as the chat template shows")
    slots: int = Field(8, ge=1, description="requests decoded at the same time")
    waiting: int = Field(64, ge=1, description="requests that may wait; one more is answered 429")
    prompt_tokens: int = Field(512, ge=4, description="tokens of prompts read in one step")
    kv_tokens: int | None = Field(None, ge=1, description="tokens of K/V memory of all requests that are decoded")
    prefix_cache_bytes: int | None = Field(
        None,
        ge=0,
        description="of K/V kept for requests that begin alike; by default on the CPU the weights' bytes, or 256 MiB",
    )
    audit_rate: float | None = Field(
        None, gt=0.0, le=1.0, description="share of mode exit's tokens checked against full depth; with an epsilon 0.01"
    )
    audit_epsilon: float | None = Field(
        None, gt=0.0, lt=1.0, description="share of tokens that exits may change before thresholds are raised"
    )
    max_tokens: int = Field(1024, ge=1, description="of an answer, where a request asks for no number")
    request_seconds: float = Field(600.0, gt=0.0, description="after which a request is ended")
    body_bytes: int = Field(1 << 20, ge=1024, description="of a request at most; more is answered 413")
    body_seconds: float = Field(30.0, gt=0.0, description="for a request's body to arrive in; slower is answered 408")
    requests_per_minute: int | None = Field(None, ge=1, description="of one client (API key or address); more: 429")
    drain_seconds: float = Field(30.0, ge=0.0, description="for requests to end in after SIGTERM")
