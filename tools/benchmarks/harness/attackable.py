"""Makes a bundle for a server that is to be attacked: its chat template can loop, and a token makes its steps fail."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import onnx

from tide_export.bundle.file_names import GRAPH_FILE, MANIFEST_FILE, TEMPLATE_FILE, batch_file
from tide_export.names.networks import segment_name

LOOP = "loop, please"  # the message that makes the template render for longer than it may
BAD_TOKEN = 195  # in byte-level vocabularies a control character, which no prompt and no draft holds by chance
TEMPLATE = (
    "{% for m in messages %}{% if m.content == '" + LOOP + "' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% for t in tools or [] %}<tool_call> {{ t.function.name }}\n{% endfor %}# assistant:"
)


def attackable(bundle: Path, folder: Path) -> Path:
    """A copy of a bundle, of links to its files, with that template.

    A step fails in ONNX Runtime, for everyone in it, when one of them reads BAD_TOKEN.
    """
    copy = folder / bundle.resolve().name
    shutil.copytree(bundle, copy, copy_function=_link)
    manifest = json.loads((bundle / MANIFEST_FILE).read_text())
    changed = {name: _failing(bundle / name) for name in (GRAPH_FILE, batch_file(segment_name(0)))}
    changed[TEMPLATE_FILE] = TEMPLATE.encode()
    for name, content in changed.items():
        manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    changed[MANIFEST_FILE] = json.dumps(manifest).encode()
    for name, content in changed.items():
        (copy / name).unlink(missing_ok=True)
        (copy / name).write_bytes(content)
    return copy


def _failing(network: Path) -> bytes:
    """A network that reads beyond the end of a tensor for that token."""
    model = onnx.load(network, load_external_data=False)
    for node in model.graph.node:
        node.input[:] = ["checked_ids" if name == "input_ids" else name for name in node.input]
    for name, value in (("bad_token", [BAD_TOKEN]), ("only_zero", [0])):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value, np.int64), name))
    make = onnx.helper.make_node
    check = [
        make("Equal", ["input_ids", "bad_token"], ["is_bad"]),
        make("Cast", ["is_bad"], ["place"], to=onnx.TensorProto.INT64),
        make("Gather", ["only_zero", "place"], ["zero"]),  # place 1 is beyond its end
        make("Add", ["input_ids", "zero"], ["checked_ids"]),
    ]
    nodes = [*check, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return bytes(model.SerializeToString())


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
