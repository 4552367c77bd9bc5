"""Generates classes from TensorRT's public headers that implement its interfaces with functions that end the process.
`fake_nvinfer.cpp` derives from them and defines only what cpp/src/tensorrt may call."""

import re
from pathlib import Path

CLASSES = {  # of the headers, and where they are
    "VRuntime": "NvInferImpl.h",
    "VCudaEngine": "NvInferImpl.h",
    "VExecutionContext": "NvInferImpl.h",
    "VRuntimeConfig": "NvInferImpl.h",
    "VRuntimeCache": "NvInferImpl.h",
    "IPluginRegistry": "NvInferRuntimeCommon.h",
}
FUNCTION = re.compile(r"virtual ([^;{}=]*?[\s*&])(\w+)\(([^;{}]*?)\)\s*(const)?\s*(noexcept)?\s*= 0;", re.DOTALL)


def stubs(include: Path) -> str:
    """A header: `Stub<Class>` of every class."""
    text = "#pragma once\n#include <NvInferRuntime.h>\n#include <cstdlib>\n"
    text += "using namespace nvinfer1;\nusing namespace apiv;\n"
    for name, file in CLASSES.items():
        source = re.sub(r"//[^\n]*", "", (include / file).read_text())
        body = re.search(rf"\nclass {name}\b[^;{{]*\{{(.*?)\n\}};", source, re.DOTALL)
        if body is None:  # TensorRT for RTX alone has a cache
            assert name == "VRuntimeCache", name
            continue
        lines = []
        for kind, function, arguments, const, noexcept in FUNCTION.findall(body[1]):
            types = re.sub(r"\s*=\s*[^,]+", "", " ".join(arguments.split()))  # without defaults
            if not function.startswith("~"):
                declaration = f"{kind.strip()} {function}({types}) {const} {noexcept} override"
                lines.append(f"  {' '.join(declaration.split())} {{ std::abort(); }}")
        text += f"struct Stub{name} : {name} {{\n" + "\n".join(lines) + "\n};\n"
    return text
