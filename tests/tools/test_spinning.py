"""`harness.spinning`: what the runtime asks ONNX Runtime for, and what that gets instead."""

import json
import subprocess
import sys
from pathlib import Path

from tiny_engines import TinyLlama

# Functions that are replaced stay so: a process of its own.
SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from harness.spinning import KEY, SPIN_MICROSECONDS, replace_entry, spin
from tide_export.runtime.engine import load
asked, given = [], []
def note(values):
    def change(key, value):
        values.extend([value.decode()] * (key == KEY))
        return value
    return change
replace_entry(note(given))
spin(7)
replace_entry(note(asked))
tokens = load(sys.argv[2], "cpu", 2).generate([3, 5, 7], max_new_tokens=4, mode="full").tokens
print(json.dumps([tokens, asked, given, str(SPIN_MICROSECONDS)]))
"""


def test_onnxruntime_gets_another_time_than_the_runtime_sets(tiny_llama: TinyLlama) -> None:
    from tide_export.runtime.engine import load

    tools = Path(__file__).parents[2] / "tools" / "benchmarks"
    line = [sys.executable, "-c", SCRIPT, str(tools), str(tiny_llama.exact)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    tokens, asked, given, ours = json.loads(done.stdout)
    assert tokens == load(tiny_llama.exact, "cpu").generate([3, 5, 7], max_new_tokens=4, mode="full").tokens
    assert (set(asked), set(given)) == ({ours}, {"7"})
