"""Writes which CUDA kernels the installed onnxruntime-gpu has, for `tide_export/lower/cuda/kernels.py`.

    python tools/cuda_kernels.py > tide_export/lower/cuda/kernels.txt

A line per operator and range of versions: operator, domain or `-`, first version, last version or `-`, and the types of
each type constraint. Before them, for operators that are not ONNX's, the type constraint of each input. Asks ONNX
Runtime itself, as its own docs/OperatorKernels.md does; that opens the CUDA provider, so the libraries that it links to
must be found.
"""

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

OLDEST = 24  # version of ONNX's operators that a kernel must reach
OPEN = 2**31 - 1  # last version of a kernel without one

Types = dict[str, frozenset[str]]


def merged(kernels: list[Types]) -> list[Types]:
    """Joins kernels that differ in the types of one constraint alone."""
    for i, one in enumerate(kernels):
        for j in range(i + 1, len(kernels)):
            other = kernels[j]
            if one.keys() == other.keys() and sum(one[name] != other[name] for name in one) <= 1:
                joined = {name: one[name] | other[name] for name in one}
                return merged([*kernels[:i], joined, *kernels[i + 1 : j], *kernels[j + 1 :]])
    return kernels


def main() -> None:
    kernels: dict[tuple[str, str, int, int], list[Types]] = {}
    for kernel in state.get_all_opkernel_def():
        first, last = kernel.version_range
        if kernel.provider != "CUDAExecutionProvider" or kernel.domain not in ("", "com.microsoft") or last < OLDEST:
            continue
        plain = {name: [str(one) for one in types] for name, types in kernel.type_constraints.items()}
        types = {
            name: frozenset(one[7:-1] for one in every if one.startswith("tensor(")) for name, every in plain.items()
        }
        kernels.setdefault((kernel.domain, kernel.op_name, first, last), []).append(types)
    print(f"# CUDA kernels of onnxruntime-gpu {onnxruntime.__version__}, by tools/cuda_kernels.py")
    for schema in sorted(state.get_all_operator_schema(), key=lambda one: one.name):
        if any((schema.domain, schema.name) == (domain, name) for domain, name, _, _ in kernels if domain):
            print(f"{schema.name} {schema.domain} inputs {' '.join(item.typeStr for item in schema.inputs)}")
    for (domain, operator, first, last), listed in sorted(kernels.items()):
        for types in merged(listed):
            shown = " ".join(f"{name}={','.join(sorted(types[name]))}" for name in sorted(types))
            print(f"{operator} {domain or '-'} {first} {'-' if last == OPEN else last} {shown}".rstrip())


if __name__ == "__main__":
    main()
