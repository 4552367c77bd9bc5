"""Memory bandwidths of GPUs, for predictions."""

import re

from tide_export.common.values import shown
from tide_export.errors import ConfigError

# Memory bandwidth in bytes per second, as NVIDIA's data sheets give it.
GPUS = {
    "B200": 8.0e12,
    "H200": 4.8e12,
    "H100-SXM": 3.35e12,
    "H100-PCIe": 2.0e12,
    "A100-80GB": 2.04e12,
    "A100-40GB": 1.56e12,
    "L40S": 0.864e12,
    "L4": 0.3e12,
    "A10": 0.6e12,
    "T4": 0.32e12,
    "RTX-PRO-6000": 1.79e12,
    "RTX-5090": 1.79e12,
    "RTX-4090": 1.008e12,
    "RTX-3090": 0.936e12,
    "Orin-AGX": 0.205e12,
}
BANDWIDTH = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?([GT])B/s", re.IGNORECASE)


def bandwidth_of(gpu: str) -> tuple[str, float]:
    """Returns name and memory bandwidth, in bytes per second, of a GPU or of text such as `1.2TB/s`.

    Raises:
        ConfigError: the text is neither a known GPU nor a bandwidth in TB/s or GB/s.
    """
    for name, known in GPUS.items():
        if _letters(name) == _letters(gpu):
            return name, known
    bandwidth = BANDWIDTH.fullmatch(gpu.strip())
    if bandwidth is None or float(bandwidth[1]) <= 0:
        raise ConfigError(f"no GPU is known as {shown(gpu)}: give {', '.join(GPUS)}, or a bandwidth such as 1.2TB/s")
    return "a GPU", float(bandwidth[1]) * {"G": 1e9, "T": 1e12}[bandwidth[2].upper()]


def _letters(name: str) -> str:
    return "".join(character for character in name.casefold() if character.isalnum())
