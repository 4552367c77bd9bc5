"""Compares what tide_export uses of TensorRT's Python package with the package that is imported here.

    python tensorrt_uses.py MODULE

reads the sources below, finds every attribute of MODULE's objects in them, and prints as JSON which there are, which
the module does not have, and which calls give another number of arguments than it takes. An object's class is known by
its name in the source (OBJECTS), and by what it is an attribute or result of (GIVES).
"""

import ast
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "tide_export"
MODULE = "module"
# Of each source: objects by their names, and the classes they may be of.
OBJECTS: dict[str, dict[str, tuple[str, ...]]] = {
    "plans/worker.py": {
        "trt": (MODULE,),
        "config": ("IBuilderConfig",),
        "network": ("INetworkDefinition",),
        "layer": ("ILayer", "IAttentionInputLayer", "IConstantLayer"),
        "tensor": ("ITensor",),
        "weights": ("Weights",),
    },
    "plans/build.py": {"library": (MODULE,)},
    "runtime/tensorrt/plans.py": {
        "library": (MODULE,),
        "self._library": (MODULE,),
        "self._runtime": ("Runtime",),
        "plan": ("ICudaEngine",),
        "self._plan": ("ICudaEngine",),
        "context": ("IExecutionContext",),
    },
    "runtime/tensorrt/flavours.py": {
        "library": (MODULE,),
        "runtime": ("Runtime",),
        "plan": ("ICudaEngine",),
        "context": ("IExecutionContext",),
        "config": ("IRuntimeConfig",),
    },
    "runtime/tensorrt/kernel_cache.py": {"config": ("IRuntimeConfig",), "cache": ("IRuntimeCache",)},
    "runtime/tensorrt/plugins.py": {"library": (MODULE,), "registry": ("IPluginRegistry",)},
}
GIVES = {
    "get_input": "ITensor",
    "get_output": "ITensor",
    "dtype": "DataType",
    "get_tensor_dtype": "DataType",
    "get_tensor_mode": "TensorIOMode",
    "attention": "IAttention",
}


class Uses(ast.NodeVisitor):
    """Of one source."""

    def __init__(self, module: Any, objects: dict[str, tuple[str, ...]]) -> None:
        self.module, self.objects = module, objects
        self.used: set[str] = set()
        self.missing: set[str] = set()
        self.misused: set[str] = set()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        self.look_up(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        found = self.look_up(node.func) if isinstance(node.func, ast.Attribute) else None
        plain = not node.keywords and not any(isinstance(argument, ast.Starred) for argument in node.args)
        functions = [of for of in found or () if not isinstance(of, type)] if plain else []
        if functions and not any(takes(function, len(node.args)) for function in functions):
            self.misused.add(f"{ast.unparse(node)}: {functions[0].__doc__}")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """What a class of ours overrides, the base has."""
        self.generic_visit(node)
        bases = [of for base in node.bases if isinstance(base, ast.Attribute) for of in self.look_up(base) or ()]
        functions = [each.name for each in node.body if isinstance(each, ast.FunctionDef) and each.name[0] != "_"]
        for base in bases:
            for name in functions:
                self.note([base], name)

    def look_up(self, node: ast.expr) -> list[Any] | None:
        """What the expression may be, as found in the module; None: nothing of the module's, or it is not known."""
        if (known := self.objects.get(ast.unparse(node))) is not None:
            return [self.module] if known == (MODULE,) else self.classes(known)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found, name = self.look_up(node.func), node.func.attr
        elif isinstance(node, ast.Attribute):
            owners, name = self.look_up(node.value), node.attr
            if owners is None or (name.startswith("__") and name != "__version__"):  # Python's
                return None
            found = self.note(owners, name)
        else:
            return None
        # The name of a function gives the function, and its call what GIVES says.
        gives = found and name in GIVES and (isinstance(node, ast.Call) or not name.startswith("get_"))
        return self.classes((GIVES[name],)) if gives else found

    def classes(self, names: tuple[str, ...]) -> list[Any] | None:
        found = [getattr(self.module, name) for name in names if hasattr(self.module, name)]
        self.missing.update(() if found else names)
        return found or None

    def note(self, owners: list[Any], name: str) -> list[Any] | None:
        use = name if owners[0] is self.module else f"{owners[0].__name__}.{name}"
        self.used.add(use)
        found = [getattr(owner, name) for owner in owners if hasattr(owner, name)]
        if not found:
            self.missing.add(use)
        return found or None


def takes(function: Any, count: int) -> bool:
    """Whether one of the signatures in the function's description takes `count` arguments besides the object."""
    found = re.findall(r"\w+\(self: [\w.]+(.*)\) -> ", function.__doc__ or "")
    for signature in found:
        parameters = re.findall(r", (\w+): ([^=]*?)(?= = |, \w+: |$)( = )?", signature)
        required = sum(not default for _, _, default in parameters)
        if required <= count <= len(parameters):
            return True
    return not found


def main(name: str) -> None:
    module = importlib.import_module(name)
    result: dict[str, set[str]] = {"used": set(), "missing": set(), "misused": set()}
    for source, objects in OBJECTS.items():
        uses = Uses(module, objects)
        uses.visit(ast.parse((PACKAGE / source).read_text()))
        for kind in result:
            result[kind] |= getattr(uses, kind)
    print(json.dumps({"version": module.__version__} | {kind: sorted(found) for kind, found in result.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
