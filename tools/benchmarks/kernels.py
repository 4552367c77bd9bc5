"""Times of the CUDA kernels on a GPU, against the memory floor, the same steps in PyTorch and TIDE's own kernels.

    python tools/benchmarks/kernels.py LIBRARY [--tide FOLDER] [--rows 1,8,64,512] [--hidden 4096] [--bottleneck 128]
                                      [--shortlist 256] [--json FILE] [--check]

LIBRARY is `libtide_kernels.so`; FOLDER is TIDE 0.2.1's source distribution (`pip download --no-binary :all:
tide-inference`), unpacked, whose kernels are compiled here. Work is queued while the GPU is kept busy, so what is timed
is the GPU going through it back to back, not Python; inputs rotate among so many copies that they do not fit into the
cache. The floor is the bytes that must move over the bandwidth of a large copy measured in the same run, and a launch
costs what an empty kernel does. `--check` makes the exit code 1 where a goal of the project is missed: at 512 rows 10x
TIDE's router, and within 1.5x of the floor. Without a GPU it says so and exits with 2.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "capi"))
import tide_kernels as tk

DEVICE = "cuda"
TYPES = {torch.float32: tk.FLOAT32, torch.float16: tk.FLOAT16, torch.bfloat16: tk.BFLOAT16}
ROTATED = 256 * 2**20  # bytes of inputs to go through before the first comes again
EPSILON = 1e-6


@dataclass
class Row:
    """One line of the table; times in microseconds, NaN where not measured."""

    step: str
    rows: int
    floor: float
    ours: float
    torch: float
    tide: float

    def cells(self) -> list[str]:
        def shown(value: float) -> str:
            return "" if value != value else f"{value:.1f}"

        def ratio(a: float, b: float) -> str:
            return "" if a != a or b != b else f"{a / b:.2f}x"

        times = [shown(t) for t in (self.floor, self.ours, self.torch, self.tide)]
        return [self.step, str(self.rows), *times, ratio(self.ours, self.floor), ratio(self.tide, self.ours)]


HEADINGS = ["step", "rows", "floor us", "ours us", "torch us", "TIDE us", "ours / floor", "TIDE / ours"]


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


def bandwidth() -> float:
    """Bytes per microsecond that a copy of 1 GiB reads and writes."""
    source = torch.randn(2**28, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_of(lambda _: target.copy_(source), 1)


class Inputs:
    """`count` copies of a router's inputs, random, and the kernel's arguments for each."""

    def __init__(
        self, rows: int, hidden: int, bottleneck: int, shortlist: int, dtype: torch.dtype, weights: torch.dtype
    ):
        def random(*shape: int, like: torch.dtype = weights) -> torch.Tensor:
            return (torch.randn(*shape, device=DEVICE) * shape[0] ** -0.5).to(like)

        self.bytes = rows * hidden * dtype.itemsize + hidden * (bottleneck + shortlist) * weights.itemsize
        self.count = max(1, min(128, ROTATED // self.bytes))
        self.states = [torch.randn(rows, hidden, device=DEVICE).to(dtype) for _ in range(self.count)]
        self.down = [random(hidden, bottleneck) for _ in range(self.count)]
        self.head = [random(hidden, shortlist) for _ in range(self.count)] if shortlist else []
        self.confidence = random(2, bottleneck)
        self.up, self.bias = random(bottleneck, 1), torch.zeros(1, device=DEVICE, dtype=weights)
        self.scale = (1 + random(hidden)).to(weights)
        self.threshold = torch.full((1,), 0.5, device=DEVICE)
        self.scores = torch.empty(rows, device=DEVICE)
        self.exits = torch.empty(rows, device=DEVICE, dtype=torch.int32)
        norm = tk.NormArgs(kind=tk.NORM_RMS, epsilon=EPSILON, scale=self.scale.data_ptr())
        self.args = [
            tk.RouteArgs(
                states_type=TYPES[dtype],
                weights_type=TYPES[weights],
                rows=rows,
                hidden=hidden,
                bottleneck=bottleneck,
                shortlist=shortlist,
                states_stride=hidden,
                norm=norm,
                states=self.states[i].data_ptr(),
                down=self.down[i].data_ptr(),
                up=self.up.data_ptr(),
                bias=self.bias.data_ptr(),
                shortlist_weight=self.head[i].data_ptr() if shortlist else None,
                confidence=self.confidence.data_ptr(),
                threshold=self.threshold.data_ptr(),
                scores=self.scores.data_ptr(),
                exits=self.exits.data_ptr(),
            )
            for i in range(self.count)
        ]

    def in_torch(self, i: int) -> torch.Tensor:
        """The same steps, eagerly."""
        x = self.states[i].to(self.down[i].dtype)
        x = torch.nn.functional.rms_norm(x, x.shape[-1:], self.scale, EPSILON)
        z = x @ self.down[i]
        if self.head:
            z = z + (x @ self.head[i]).log_softmax(-1).topk(2, -1).values @ self.confidence
        return torch.sigmoid(torch.nn.functional.silu(z) @ self.up + self.bias) > self.threshold


def measure_route(kernels: tk.Kernels, sizes: argparse.Namespace, rate: float) -> list[Row]:
    found = []
    kinds = [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)]
    for dtype, weights in kinds:
        for shortlist in sorted({0, sizes.shortlist}):
            for rows in sizes.rows:
                inputs = Inputs(rows, sizes.hidden, sizes.bottleneck, shortlist, dtype, weights)
                size = kernels.workspace("tide_route", inputs.args[0])
                workspace = torch.empty(size, device=DEVICE, dtype=torch.uint8)
                stream = torch.cuda.current_stream().cuda_stream

                def ours(i: int, inputs=inputs, workspace=workspace, size=size, stream=stream) -> None:
                    kernels.start("tide_route", inputs.args[i], workspace.data_ptr(), size, stream)

                ours(0)
                expected = inputs.in_torch(0)
                agree = float((expected.flatten() == (inputs.exits != 0)).float().mean())
                if agree < 0.97:  # scores near the threshold differ in 16 bits
                    raise SystemExit(f"kernel and torch agree on {agree:.0%} of the exits: times would mean nothing")
                tide = float("nan")
                if sizes.tide and not shortlist and weights == torch.float32:
                    tide = time_of(partial(tide_route, inputs), inputs.count)
                name = f"route {_short(dtype)} states, {_short(weights)} weights"
                times = time_of(ours, inputs.count), time_of(inputs.in_torch, inputs.count)
                found.append(
                    Row(
                        name + (f", shortlist {shortlist}" if shortlist else ""),
                        rows,
                        inputs.bytes / rate,
                        *times,
                        tide,
                    )
                )
                print(" | ".join(found[-1].cells()), file=sys.stderr)
    return found


def tide_route(inputs: Inputs, i: int) -> torch.Tensor:
    return torch.ops.tide.fused_layernorm_route(inputs.states[i], inputs.scale, inputs.down[i], inputs.up, EPSILON)


def tide_compact(states: list[torch.Tensor], exits: torch.Tensor, i: int) -> list[torch.Tensor]:
    return torch.ops.tide.batch_compact(states[i], exits)


def measure_compact(kernels: tk.Kernels, sizes: argparse.Namespace, rate: float) -> list[Row]:
    """A split of rows, half of which leave; TIDE's allocates and waits for the GPU, so it is timed with its waits."""
    found = []
    for rows in sizes.rows:
        width = sizes.hidden * 2
        count = max(1, min(128, ROTATED // (rows * width)))
        states = [torch.randn(rows, sizes.hidden, device=DEVICE).to(torch.bfloat16) for _ in range(count)]
        exits = (torch.rand(rows, device=DEVICE) < 0.5).to(torch.int32)
        outputs = [torch.empty(rows * width, device=DEVICE, dtype=torch.uint8) for _ in range(2)]
        numbers = [torch.empty(rows, device=DEVICE, dtype=torch.int32) for _ in range(2)]
        counts = torch.empty(2, device=DEVICE, dtype=torch.int64)
        args = [
            tk.CompactArgs(
                rows=rows,
                row_bytes=width,
                states_stride=width,
                states=x.data_ptr(),
                exits=exits.data_ptr(),
                staying=outputs[0].data_ptr(),
                leaving=outputs[1].data_ptr(),
                staying_rows=numbers[0].data_ptr(),
                leaving_rows=numbers[1].data_ptr(),
                staying_size=counts.data_ptr(),
                leaving_size=counts.data_ptr() + 8,
            )
            for x in states
        ]
        size = kernels.workspace("tide_compact", args[0])
        workspace = torch.empty(size, device=DEVICE, dtype=torch.uint8)
        stream = torch.cuda.current_stream().cuda_stream

        def ours(i: int, args=args, workspace=workspace, size=size, stream=stream) -> None:
            kernels.start("tide_compact", args[i], workspace.data_ptr(), size, stream)

        def in_torch(i: int, states=states, exits=exits) -> Any:
            order = exits.argsort(stable=True)
            return states[i][order], order, exits.sum()

        tide = float("nan")
        if sizes.tide:
            tide = time_of(partial(tide_compact, states, exits), count)
        times = time_of(ours, count), time_of(in_torch, count)
        found.append(Row("compact bf16", rows, 2 * rows * width / rate, *times, tide))
        print(" | ".join(found[-1].cells()), file=sys.stderr)
    return found


def build_tide(folder: Path) -> None:
    """Compiles TIDE's kernels as its own setup.py does, for this GPU, so that `torch.ops.tide` holds them.

    Raises:
        SystemExit: `folder` is not its source distribution.
    """
    from torch.utils.cpp_extension import load

    names = ["fused_layernorm_route", "batch_compact", "exit_scatter", "exit_projection"]
    sources = [folder / "csrc" / "kernels" / f"{name}.cu" for name in names]
    sources.append(folder / "csrc" / "extensions" / "torch_bindings.cpp")
    missing = [str(source) for source in sources if not source.is_file()]
    if missing:
        raise SystemExit(f"--tide {folder} is not TIDE's source distribution: there is no {missing[0]}")
    flags = ["-O3", "--use_fast_math"]
    load("tide_own_kernels", [str(s) for s in sources], extra_cuda_cflags=flags, is_python_module=False)


def goals_missed(table: list[Row]) -> list[str]:
    """Sentences about the project's goals for the router at 512 rows."""
    missed = []
    for row in table:
        if row.rows != 512 or not row.step.startswith("route"):
            continue
        if row.tide == row.tide and row.tide < 10 * row.ours:
            missed.append(f"{row.step}: {row.tide / row.ours:.1f}x TIDE's speed, not 10x")
        if row.ours > 1.5 * row.floor:
            missed.append(f"{row.step}: {row.ours / row.floor:.2f}x the memory floor, not 1.5x")
    return missed


def markdown(table: list[Row]) -> str:
    lines = [HEADINGS, ["---"] * len(HEADINGS), *(row.cells() for row in table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", type=Path, metavar="library", help="libtide_kernels.so")
    parser.add_argument("--tide", type=Path, help="TIDE's source distribution, unpacked")
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 64, 512])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--bottleneck", type=int, default=128)
    parser.add_argument("--shortlist", type=int, default=256)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = _arguments(words)
    if not torch.cuda.is_available():
        print("benchmark_kernels: there is no GPU that PyTorch can use here, and times need one", file=sys.stderr)
        return 2
    if not options.kernels.is_file():
        print(
            f"benchmark_kernels: there is no library {options.kernels}; build it with the preset `plugins`",
            file=sys.stderr,
        )
        return 2
    kernels = tk.Kernels(options.kernels)
    if options.tide:
        build_tide(options.tide)
    rate = bandwidth()
    one = torch.zeros(1, device=DEVICE)
    about = {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "copy_GB_per_s": rate / 1000,
        "empty_kernel_us": time_of(lambda _: one.add_(1), 1),
    }
    table = measure_route(kernels, options, rate) + measure_compact(kernels, options, rate)
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
