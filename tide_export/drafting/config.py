"""The settings of a drafter's training, validated once; the options of `tide-export draft` and their help."""

from pydantic import Field

from tide_export.config import Settings


class DraftConfig(Settings):
    """Settings of training a drafter on a model's own answers."""

    minutes: float = Field(
        60.0, gt=0.0, description="time for answers and training at most; it ends earlier where more would gain little"
    )
    prompts: str | None = Field(
        None,
        min_length=1,
        description="file of prompts that the model answers, such as logs: one a line, or .jsonl with a field prompt; "
        "otherwise shipped ones",
    )
    temperature: float = Field(
        0.8, ge=0.05, le=10.0, description="the answers are sampled at this, and acceptance is measured at it"
    )
    max_new_tokens: int = Field(192, ge=8, description="tokens of an answer at most")
    vocabulary: int = Field(8192, ge=16, description="tokens that the drafter can propose, the most frequent ones")
    seed: int = Field(0, ge=0, le=10**9, description="of the order of the prompts, the answers and the initial weights")


# A training may go on with other values of these; of the prompts the texts are compared.
CHANGEABLE = {"minutes", "prompts"}
