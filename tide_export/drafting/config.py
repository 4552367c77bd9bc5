"""Settings of a drafter's training, which are also the options of `tide-export draft`."""

from pydantic import Field

from tide_export.calibration.config import Settings


class DraftConfig(Settings):
    """Settings for training a drafter on a model's own answers."""

    minutes: float = Field(
        60.0, gt=0.0, description="maximum time for answers and training; it ends early when more would gain little"
    )
    prompts: str | None = Field(
        None,
        min_length=1,
        description="file of prompts for the model to answer, such as logs: one per line, or .jsonl with a field "
        "`prompt` (a message) or `text` (a beginning to continue, without chat template); by default shipped prompts",
    )
    temperature: float = Field(
        0.8, ge=0.05, le=10.0, description="temperature at which answers are sampled and acceptance is measured"
    )
    max_new_tokens: int = Field(192, ge=8, description="maximum tokens of an answer")
    vocabulary: int = Field(8192, ge=16, description="tokens that the drafter can propose: the most frequent ones")
    seed: int = Field(0, ge=0, le=10**9, description="seed of the prompt order, the answers and the initial weights")


# Settings that may change when a run resumes. Prompts are compared by their text, not by the file's name.
CHANGEABLE = {"minutes", "prompts"}
