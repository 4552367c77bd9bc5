"""`tools/benchmarks/kernels.py` as far as it goes without a GPU: it refuses, and its table and goals are right."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmark_kernels():
    sys.path.insert(0, str(ROOT / "tools" / "benchmarks"))
    try:
        import kernels as benchmark_kernels
    finally:
        sys.path.pop(0)
    return benchmark_kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_refuses_without_a_gpu(benchmark_kernels, capsys, tmp_path):
    assert benchmark_kernels.main([str(tmp_path / "libtide_kernels.so")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_goals_are_about_the_router_at_512_rows(benchmark_kernels):
    row, nan = benchmark_kernels.Row, float("nan")
    table = [
        row("route bf16 states", 64, 1.0, 5.0, 9.0, 9.0),
        row("route bf16 states", 512, 2.0, 2.9, 9.0, 30.0),
        row("route fp32 states", 512, 2.0, 4.0, 9.0, 30.0),
        row("route bf16 states, shortlist 256", 512, 2.0, 2.0, 9.0, nan),
        row("compact bf16", 512, 1.0, 5.0, 9.0, 9.0),
    ]
    assert benchmark_kernels.goals_missed(table) == [
        "route fp32 states: 7.5x TIDE's speed, not 10x",
        "route fp32 states: 2.00x the memory floor, not 1.5x",
    ]


def test_the_table_leaves_out_what_was_not_measured(benchmark_kernels):
    table = benchmark_kernels.markdown([benchmark_kernels.Row("route", 8, 2.0, 3.0, 9.0, float("nan"))])
    assert table.splitlines()[-1] == "| route | 8 | 2.0 | 3.0 | 9.0 |  | 1.50x |  |"
