"""The commands in the order in which they are used: groups, summaries, basic options and examples."""

from typing import NamedTuple


class Command(NamedTuple):
    """A command as `--help` describes it.

    Attributes:
        summary: what it does, in one sentence.
        examples: commands without the program's name; the first one follows an error about missing arguments.
        basic: destinations of the options that `--help` shows; `--help-all` shows all. None: all.
    """

    summary: str
    examples: tuple[str, str, str]
    basic: tuple[str, ...] | None = None


TEXT = "calibration/text/python-stdlib.jsonl"
HELD_OUT = "calibration/text/python-stdlib-validation.jsonl"
EXPORT_BASIC = "output calibration_dataset weights checkpoints targets recipe max_length overwrite"
CALIBRATE_BASIC = "output calibration_dataset checkpoints calibration_samples exit_strategy report cache recipe"

GROUPS: dict[str, dict[str, Command]] = {
    "know your model": {
        "probe": Command(
            "Predict in minutes, without text, what each mode gains.",
            ("probe demo/demo-llama", "probe Qwen/Qwen2.5-Coder-0.5B-Instruct", "probe model.Q4_K_M.gguf --json"),
        ),
    },
    "make a bundle": {
        "export": Command(
            "Make a bundle of a model; calibrates first unless --routers is given.",
            (
                f"export demo/demo-llama -o out/demo --dataset {TEXT} --checkpoints 3,6,9",
                'export Qwen/Qwen2.5-Coder-0.5B-Instruct -o out/qwen --weights int4 --dataset "my-texts/*.jsonl"',
                "export model.Q4_K_M.gguf -o out/gguf --weights int4 --checkpoints none",
            ),
            tuple(EXPORT_BASIC.split()),
        ),
        "build": Command(
            "Build a bundle's TensorRT plans for this machine's GPU and versions.",
            ("build out/qwen", "build out/qwen --target tensorrt-rtx", "build out/qwen --batch-size 16"),
        ),
    },
    "check it": {
        "inspect": Command(
            "Print what is in a bundle.",
            ("inspect out/demo", "inspect out/demo --json", "inspect out/qwen --roofline H100-SXM --context 2048"),
        ),
        "validate": Command(
            "Compare a bundle with its model and with TIDE's rule, token for token; exit code 1 when they differ.",
            (
                "validate out/demo --model demo/demo-llama",
                f"validate out/demo --model demo/demo-llama --dataset {HELD_OUT} --quality",
                "validate out/qwen --model Qwen/Qwen2.5-Coder-0.5B-Instruct --threshold 0.7,0.9 --json",
            ),
            ("model_name", "dataset", "prompts", "new_tokens", "thresholds", "quality", "provider", "json"),
        ),
        "bench": Command(
            "Time prefill and decoding at full depth, with exits, and with every token exiting.",
            ("bench out/demo", "bench out/demo --threshold 0.7 --new-tokens 128", "bench out/qwen --threads 4 --json"),
            ("prompt", "prompt_tokens", "new_tokens", "repeat", "threshold", "provider", "threads", "json"),
        ),
    },
    "use it": {
        "generate": Command(
            "Continue a prompt; text to stdout as it comes, statistics to stderr.",
            (
                'generate out/demo --prompt "def read_lines(path):"',
                'generate out/qwen --chat --prompt "What is a heap?" --temperature 0.7 --max-new-tokens 256',
                "generate out/demo --prompts prompts.txt --json",
            ),
            ("prompt", "prompts", "chat", "mode", "max_new_tokens", "temperature", "seed", "json"),
        ),
        "serve": Command(
            "Serve a bundle over HTTP with OpenAI's API until SIGTERM or Ctrl-C.",
            (
                "serve out/demo --port 8000",
                "serve out/qwen --host 0.0.0.0 --api-key secret --slots 16",
                "serve out/qwen --adapter support=adapters/support --json",
            ),
            ("host", "port", "api_key", "model_name", "slots", "adapters", "provider", "threads"),
        ),
        "triton": Command(
            "Add a bundle to a model repository of NVIDIA Triton.",
            (
                "triton out/demo --repository out/models",
                "triton out/demo --repository out/models --slots 8",
                "triton out/demo --repository out/models --name demo --copy",
            ),
        ),
    },
    "make it faster": {
        "draft": Command(
            "Train a drafter on a bundle's answers, to make `lossless` mode faster.",
            (
                "draft demo/demo-llama out/demo --minutes 0.2",
                "draft Qwen/Qwen2.5-Coder-0.5B-Instruct out/qwen --minutes 60 --cache drafts",
                "draft Qwen/Qwen2.5-Coder-0.5B-Instruct out/qwen --prompts logs.jsonl --temperature 0.8",
            ),
        ),
        "tune": Command(
            "Find and store thresholds with a guarantee of how many tokens are changed; or, with --mode lossless, the "
            "fastest drafting settings on this machine.",
            (
                f"tune out/demo --dataset {HELD_OUT} --epsilon 0.05 --delta 0.1",
                f"tune out/demo --dataset {HELD_OUT} --mode lossless",
                f"tune out/demo --dataset {HELD_OUT} --mode lossless --slots 4,8 --dry-run",
            ),
            ("dataset", "mode", "epsilon", "delta", "prompts", "slots", "dry_run", "json"),
        ),
        "calibrate": Command(
            "Fit one router per checkpoint on text and save them.",
            (
                f"calibrate demo/demo-llama -o out/routers.safetensors --dataset {TEXT} --checkpoints 3,6,9",
                "calibrate Qwen/Qwen2.5-Coder-0.5B-Instruct -o qwen.safetensors --report qwen.html",
                "calibrate Qwen/Qwen2.5-Coder-0.5B-Instruct -o qwen.safetensors --from-tide router.pt",
            ),
            tuple(CALIBRATE_BASIC.split()),
        ),
        "adapt": Command(
            "Train a model to exit early with few changed tokens.",
            (
                f"adapt demo/demo-llama -o out/adapted --dataset {TEXT} --checkpoints 3,6,9",
                'adapt Qwen/Qwen2.5-Coder-0.5B-Instruct -o out/adapted --dataset "my-texts/*.jsonl" --lora-rank 16',
                "adapt Qwen/Qwen2.5-Coder-0.5B-Instruct -o out/adapted --tokens 20000000 --cache out/snapshot",
            ),
            ("output", "dataset", "tokens", "checkpoints", "lora_rank", "learning_rate", "cache", "json"),
        ),
    },
    "share it": {
        "push": Command(
            "Upload a bundle to the Hugging Face hub, with a model card.",
            ("push out/demo me/demo", "push out/demo me/demo --private", "push out/demo me/demo --revision int4"),
        ),
        "pull": Command(
            "Download a bundle from the Hugging Face hub, and check every file.",
            ("pull me/demo", "pull me/demo out/pulled", "pull me/demo out/pulled --revision int4 --overwrite"),
        ),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
