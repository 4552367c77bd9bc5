"""Our CUDA kernels as operators of the segment networks in PyTorch, over the interface of plugins/capi."""

import ctypes
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "plugins" / "capi"))
import tide_kernels

tk: Any = tide_kernels  # which kernels there are depends on its version
TYPES = {torch.float32: tk.FLOAT32, torch.float16: tk.FLOAT16, torch.bfloat16: tk.BFLOAT16}
NORMS = {"none": tk.NORM_NONE, "rms": tk.NORM_RMS, "layer": tk.NORM_LAYER}


def kernels_of(library: Path) -> Mapping[tuple[str, str], Callable[..., Any]]:
    """The operators that the kernels of `library` compute, for `open_torch`."""
    if not hasattr(tk, "ExitArgs"):
        sys.exit("torch_kernels: the kernels of this version have no TideExit")
    kernels = tk.Kernels(library)

    def tide_exit(
        states: torch.Tensor,
        last_tokens: torch.Tensor,
        thresholds: torch.Tensor,
        exit_states: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        bias: torch.Tensor,
        *more: torch.Tensor,
        norm: str,
        epsilon: float,
        lens: int,
        shortlist: int,
        **plugin: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`exit_states` with the states of slots that exit written in place, scores and exits."""
        slots, tokens, hidden = states.shape
        scores = torch.empty(slots, device=states.device)
        exits = torch.empty(slots, dtype=torch.int32, device=states.device)
        given = {
            "states": states.contiguous(),
            "last_tokens": last_tokens,
            "thresholds": thresholds,
            "down": down,
            "up": up,
            "bias": bias,
            "exit_states": exit_states,
            "scores": scores,
            "exits": exits,
        }
        rest = list(more)
        if shortlist:
            given |= {"shortlist_weight": rest.pop(0), "confidence": rest.pop(0)}
        if lens:
            given |= {name: rest.pop(0) for name in ("lens_down", "lens_up", "lens_bias")}
        scale, shift = ([weight.data_ptr() for weight in rest] + [None, None])[:2]
        args = tk.ExitArgs(
            states_type=TYPES[states.dtype],
            slots=slots,
            tokens=tokens,
            hidden=hidden,
            exit_rows=exit_states.shape[2],
            bottleneck=down.shape[1],
            shortlist=given["shortlist_weight"].shape[1] if shortlist else 0,
            lens_rank=given["lens_down"].shape[1] if lens else 0,
            norm=tk.NormArgs(NORMS[norm], epsilon, scale, shift),
            **{name: ctypes.c_void_p(tensor.data_ptr()) for name, tensor in given.items()},
        )
        workspace = torch.empty(kernels.exit_workspace(args), dtype=torch.uint8, device=states.device)
        stream = torch.cuda.current_stream().cuda_stream if states.is_cuda else None
        kernels.exit(args, workspace.data_ptr(), workspace.nbytes, stream)
        return exit_states, scores, exits

    return {("tide", "TideExit"): tide_exit}
