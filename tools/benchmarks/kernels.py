"""Times TideExit's kernel on a GPU, against the memory floor, and the same steps in PyTorch.

    python tools/benchmarks/kernels.py LIBRARY [--slots 1,2,4,8,16,64] [--hidden 4096]
                                      [--bottleneck 128] [--shortlist 256] [--lens-rank 64] [--json FILE] [--check]

LIBRARY is `libtide_kernels.so`. Work is queued while the GPU is kept busy, so what is timed
is the GPU going through it back to back, not Python; inputs rotate among so many copies that they do not fit into the
cache. The floor is the bytes that must move over the bandwidth of a large copy measured in the same run, and a launch
costs what an empty kernel does. `in a switch` is a call's time in the body of a switch node, where the GPU decides a
step's depth. Steps wait for each other, so the floor cannot be reached; the goals are 10 us for one slot, there too,
and half of PyTorch's time at up to 16. `--check` makes the exit code 1 where one is missed. Without a GPU it says so
and exits with 2.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "capi"))
import tide_kernels as tk
from switch_graph import SwitchGraph, load_cudart

DEVICE = "cuda"
TYPES = {torch.float32: tk.FLOAT32, torch.float16: tk.FLOAT16, torch.bfloat16: tk.BFLOAT16}
ROTATED = 256 * 2**20  # bytes of inputs to go through before the first comes again
EPSILON = 1e-6
GOAL = 10.0  # microseconds, for one slot


@dataclass
class Row:
    """One line of the table; times in microseconds; `floor` is memory's and a launch."""

    step: str
    slots: int
    floor: float
    ours: float
    switch: float
    torch: float

    def cells(self) -> list[str]:
        times = [f"{t:.1f}" for t in (self.floor, self.ours, self.switch, self.torch)]
        return [self.step, str(self.slots), *times, f"{self.ours / self.floor:.2f}x"]


HEADINGS = ["step", "slots", "memory + launch us", "ours us", "in a switch us", "torch us", "ours / floor"]


def time_of(call: Callable[[int], Any], copies: int, repeats: int = 15) -> float:
    """Microseconds of one `call(i)`, i = 0 .. copies - 1 in turn, when calls follow each other without a gap."""
    calls = max(20, copies)
    for i in range(copies):
        call(i)
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(40_000_000)  # about 20 ms in which the calls are queued
        start.record()
        for i in range(calls):
            call(i % copies)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return median(times)


def bandwidth(device: str = DEVICE, copies: int = 20) -> float:
    """Bytes per microsecond that a copy of 1 GiB (on the CPU: 16 MiB) reads and writes."""
    source = torch.ones(2 ** (30 if device == DEVICE else 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    wait = torch.cuda.synchronize if device == DEVICE else lambda: None
    target.copy_(source)
    wait()
    started = time.perf_counter()
    for _ in range(copies):
        target.copy_(source)
    wait()
    return 2e-6 * source.nbytes * copies / (time.perf_counter() - started)


class Inputs:
    """`count` copies of a call's inputs, random, and the kernel's arguments for each."""

    def __init__(self, slots: int, hidden: int, bottleneck: int, shortlist: int, rank: int, dtype: torch.dtype):
        def random(*shape: int, like: torch.dtype = torch.float32) -> torch.Tensor:
            return (torch.randn(*shape, device=DEVICE) * shape[0] ** -0.5).to(like)

        state_bytes = 2 * slots * hidden * dtype.itemsize  # read, and written where all exit
        self.bytes = state_bytes + hidden * ((bottleneck + shortlist) * 4 + 2 * rank * dtype.itemsize)
        self.count = max(1, min(128, ROTATED // self.bytes))
        copies = range(self.count)
        self.states = [torch.randn(slots, 1, hidden, device=DEVICE).to(dtype) for _ in copies]
        self.down = [random(hidden, bottleneck) for _ in copies]
        self.head = [random(hidden, shortlist) for _ in copies] if shortlist else []
        self.lens = (
            [(random(hidden, rank, like=dtype), random(rank, hidden, like=dtype)) for _ in copies] if rank else []
        )
        self.lens_bias = random(hidden, like=dtype)
        self.confidence, self.up, self.bias = (
            random(2, bottleneck),
            random(bottleneck, 1),
            torch.zeros(1, device=DEVICE),
        )
        self.scale = (1 + random(hidden)).to(dtype)
        self.thresholds = torch.full((slots,), 0.5, device=DEVICE)
        self.last_tokens = torch.zeros(slots, device=DEVICE, dtype=torch.int64)
        self.exit_states = torch.zeros(slots, 2, hidden, device=DEVICE, dtype=dtype)
        self.scores = torch.empty(slots, device=DEVICE)
        self.exits = torch.empty(slots, device=DEVICE, dtype=torch.int32)
        norm = tk.NormArgs(kind=tk.NORM_RMS, epsilon=EPSILON, scale=self.scale.data_ptr())
        sizes = {"slots": slots, "tokens": 1, "hidden": hidden, "exit_rows": 2, "bottleneck": bottleneck}
        sizes |= {"shortlist": shortlist, "lens_rank": rank, "states_type": TYPES[dtype]}
        fixed = ("last_tokens", "thresholds", "up", "bias", "confidence", "lens_bias", "exit_states", "scores", "exits")
        self.args = [
            tk.ExitArgs(
                **sizes,
                norm=norm,
                **{name: getattr(self, name).data_ptr() for name in fixed},
                states=self.states[i].data_ptr(),
                down=self.down[i].data_ptr(),
                shortlist_weight=self.head[i].data_ptr() if shortlist else None,
                lens_down=self.lens[i][0].data_ptr() if rank else None,
                lens_up=self.lens[i][1].data_ptr() if rank else None,
            )
            for i in copies
        ]

    def in_torch(self, i: int) -> torch.Tensor:
        """The same steps, eagerly."""
        x = self.states[i][:, 0]
        if self.lens:
            x = x + x @ self.lens[i][0] @ self.lens[i][1] + self.lens_bias
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:], self.scale, EPSILON)
        x = normed.float()
        z = x @ self.down[i]
        if self.head:
            z = z + (x @ self.head[i]).log_softmax(-1).topk(2, -1).values @ self.confidence
        exits = (torch.sigmoid(torch.nn.functional.silu(z) @ self.up + self.bias) > self.thresholds[:, None])[:, 0]
        self.exit_states[:, 0] = torch.where(exits[:, None], normed, self.exit_states[:, 0])
        return exits


def in_a_switch(call: Callable[[int], Any], inputs: Inputs) -> float:
    """Microseconds of one call in the body of a switch node, which holds one for each copy of the inputs.

    Exits with a sentence where the calls find other scores there.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = SwitchGraph(load_cudart(), stream.cuda_stream, lambda: [call(i) for i in range(inputs.count)])
        call(inputs.count - 1)
        alone = inputs.scores.clone()
        inputs.scores.zero_()
        graph.launch()
        stream.synchronize()
        if not torch.equal(inputs.scores, alone):
            raise SystemExit(f"in a switch body the scores are {inputs.scores}, else {alone}: times would mean nothing")
        time = time_of(lambda _: graph.launch(), 1) / inputs.count
        graph.close()
    return time


def measure(kernels: tk.Kernels, sizes: argparse.Namespace, rate: float, launch: float) -> list[Row]:
    found = []
    forms = dict.fromkeys([(0, 0), (sizes.shortlist, 0), (sizes.shortlist, sizes.lens_rank)])
    for dtype in (torch.bfloat16, torch.float32):
        for shortlist, rank in forms:
            for slots in sizes.slots:
                inputs = Inputs(slots, sizes.hidden, sizes.bottleneck, shortlist, rank, dtype)
                size = kernels.exit_workspace(inputs.args[0])
                workspace = torch.empty(size, device=DEVICE, dtype=torch.uint8)
                counters = torch.zeros(tk.COUNTERS, device=DEVICE, dtype=torch.int32)

                def ours(i: int, inputs=inputs, workspace=workspace, size=size, counters=counters) -> None:
                    stream = torch.cuda.current_stream().cuda_stream
                    kernels.exit(inputs.args[i], workspace.data_ptr(), size, counters.data_ptr(), stream)

                ours(0)
                expected = inputs.in_torch(0)
                agree = float((expected == (inputs.exits != 0)).float().mean())
                if agree < 0.97 and slots > 32:  # scores near the threshold differ in 16 bits
                    raise SystemExit(f"kernel and torch agree on {agree:.0%} of the exits: times would mean nothing")
                step = f"{str(dtype).removeprefix('torch.')} states" + (f", shortlist {shortlist}" if shortlist else "")
                step += f", lens of rank {rank}" if rank else ""
                times = time_of(ours, inputs.count), in_a_switch(ours, inputs), time_of(inputs.in_torch, inputs.count)
                found.append(Row(step, slots, inputs.bytes / rate + launch, *times))
                print(" | ".join(found[-1].cells()), file=sys.stderr)
    return found


def goals_missed(table: list[Row]) -> list[str]:
    """Sentences about the project's goals for one slot and for up to 16."""
    late = [
        f"{row.step}, 1 slot: {max(row.ours, row.switch):.1f} us, not {GOAL:g}"
        for row in table
        if row.slots == 1 and max(row.ours, row.switch) > GOAL
    ]
    return late + [
        f"{row.step}, {row.slots} slots: {row.torch / row.ours:.2f}x as fast as PyTorch, not 2x"
        for row in table
        if row.slots <= 16 and row.ours > 0.5 * row.torch
    ]


def markdown(table: list[Row]) -> str:
    lines = [HEADINGS, ["---"] * len(HEADINGS), *(row.cells() for row in table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", type=Path, metavar="library", help="libtide_kernels.so")
    parser.add_argument("--slots", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8, 16, 64])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--bottleneck", type=int, default=128)
    parser.add_argument("--shortlist", type=int, default=256)
    parser.add_argument("--lens-rank", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = _arguments(words)
    missing = None if options.kernels.is_file() else f"library {options.kernels}: build it with the preset `plugins`"
    if not torch.cuda.is_available():
        missing = "GPU that PyTorch can use here, and times need one"
    if missing is not None:
        print(f"kernels: there is no {missing}", file=sys.stderr)
        return 2
    kernels = tk.Kernels(options.kernels)
    rate = bandwidth()
    one = torch.zeros(1, device=DEVICE)
    launch = time_of(lambda _: one.add_(1), 1)
    about: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    about |= {"cuda": torch.version.cuda, "copy_GB_per_s": rate / 1000, "empty_kernel_us": launch}
    table = measure(kernels, options, rate, launch)
    print(", ".join(f"{key} {value if isinstance(value, str) else f'{value:.1f}'}" for key, value in about.items()))
    print(markdown(table))
    missed = goals_missed(table)
    for sentence in missed:
        print(f"goal missed: {sentence}")
    if options.json:
        options.json.write_text(
            json.dumps({**about, "times": [asdict(row) for row in table], "missed": missed}, indent=1)
        )
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
