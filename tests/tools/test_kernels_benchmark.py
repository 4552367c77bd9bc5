"""`tools/benchmarks/kernels.py` as far as it goes without a GPU: it refuses, and its table and goals are right."""

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmark_kernels():
    import kernels as benchmark_kernels

    return benchmark_kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_refuses_without_a_gpu(benchmark_kernels, capsys, tmp_path):
    assert benchmark_kernels.main([str(tmp_path / "libtide_kernels.so")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_goals_are_about_one_slot_and_up_to_16(benchmark_kernels):
    row = benchmark_kernels.Row
    table = [
        row("bf16 states", 64, 2.0, 8.0, 8.0, 9.0),
        row("bf16 states", 16, 2.0, 2.9, 11.0, 9.0),
        row("fp32 states", 16, 2.0, 6.0, 6.0, 9.0),
        row("bf16 states, shortlist 256", 1, 2.0, 4.5, 11.0, 9.0),
        row("fp32 states, shortlist 256", 1, 2.0, 10.0, 9.0, 30.0),
    ]
    assert benchmark_kernels.goals_missed(table) == [
        "bf16 states, shortlist 256, 1 slot: 11.0 us, not 10",
        "fp32 states, 16 slots: 1.50x as fast as PyTorch, not 2x",
    ]


def test_the_table_has_the_ratio_to_the_floor(benchmark_kernels):
    table = benchmark_kernels.markdown([benchmark_kernels.Row("exit", 8, 2.0, 3.0, 4.0, 9.0)])
    assert table.splitlines()[-1] == "| exit | 8 | 2.0 | 3.0 | 4.0 | 9.0 | 1.50x |"
