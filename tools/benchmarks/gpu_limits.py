"""Measures what bounds a token on a GPU: a copy's bandwidth and cuBLAS at one row, or a step's switch nodes.

    python tools/benchmarks/gpu_limits.py [BUNDLE]

For every matrix that a MatMul or Gemm of BUNDLE's networks reads, the product of one row in PyTorch (bfloat16), and the
share of the copy's bandwidth at which it reads the matrix. Without BUNDLE: the time of graphs of 1 to 8 switch nodes,
one after the other, with nothing in them: a step has one for a checkpoint where the GPU decides. Without a GPU it says
so and exits with 2.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from kernels import DEVICE, ROTATED, bandwidth, time_of
from switch_graph import SwitchGraph, load_cudart

Shape = tuple[int, ...]  # inputs, outputs
SMALLEST = 64  # of either


def matrices(segments: Path) -> list[Shape]:
    """The shapes of the matrices that the first segment and the head multiply by."""
    import onnx

    found = dict.fromkeys(list[Shape]())
    for name in ("segment_00", "head"):
        graph = onnx.load(str(segments / f"{name}.onnx"), load_external_data=False).graph
        dims = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        dims |= {value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim) for value in graph.input}
        for node in graph.node:
            shape = dims.get(node.input[1], ()) if node.op_type in ("MatMul", "Gemm") else ()
            if len(shape) == 2 and min(shape) >= SMALLEST:
                transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
                found[shape[::-1] if transposed else shape] = None
    return list(found)


def products(shapes: list[Shape]) -> None:
    rate = bandwidth()
    print(f"a copy moves {rate / 1e3:.0f} GB/s")
    for inputs, outputs in shapes:
        count = max(1, min(128, ROTATED // (2 * inputs * outputs)))
        weights = [torch.randn(inputs, outputs, device=DEVICE, dtype=torch.bfloat16) for _ in range(count)]
        row = torch.randn(1, inputs, device=DEVICE, dtype=torch.bfloat16)
        taken = time_of(partial(_product, row, weights), count)
        share = 2 * inputs * outputs / taken / rate
        print(f"1 x {inputs} by {inputs} x {outputs}: {taken:.1f} us, {share:.0%} of the copy's bandwidth", flush=True)


def _product(row: torch.Tensor, weights: list[torch.Tensor], i: int) -> torch.Tensor:
    return row @ weights[i]


def _launch(graph: SwitchGraph, _: int) -> None:
    graph.launch()


def switches() -> None:
    one, stream = torch.zeros(1, device=DEVICE), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        print(f"an empty kernel: {time_of(lambda _: one.add_(1), 1):.1f} us", flush=True)
        for count in (1, 2, 4, 8):
            graph = SwitchGraph(load_cudart(), stream.cuda_stream, lambda: None, count)
            print(f"{count} empty switch nodes: {time_of(partial(_launch, graph), 1):.1f} us", flush=True)
            graph.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path, nargs="?", help="of which only networks are read; none: switch nodes")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_limits: there is no GPU that PyTorch can use here", file=sys.stderr)
        return 2
    if options.bundle is None:
        switches()
    else:
        products(matrices(options.bundle / "segments"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
