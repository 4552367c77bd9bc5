"""The example of a service, examples/embed_cpp, links the installed runtime and streams Python's own tokens."""

import subprocess
from pathlib import Path

from cpp_builds import FLAGS, ROOT, CppBuild, run

from tide_export.runtime.engine import load


def test_the_example_of_a_service(cpp: CppBuild, demo_bundle: Path, tmp_path: Path) -> None:
    example = ["-S", str(ROOT / "examples" / "embed_cpp"), "-B", str(tmp_path)]
    run(["cmake", *example, f"-DCMAKE_PREFIX_PATH={cpp.prefix}", *FLAGS])
    run(["cmake", "--build", str(tmp_path)])
    service = [str(tmp_path / "tide_service"), str(demo_bundle)]
    lines = run([*service, "5", "17", "3"]).splitlines()
    out = load(demo_bundle, threads=1).generate([5, 17, 3], max_new_tokens=16, threshold=0.7)
    pairs = zip(out.tokens, out.stats.exit_layer, strict=True)
    assert lines == [f"{token} after {layers} layers" for token, layers in pairs]
    refused = subprocess.run([*service, "-1"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith("tide_service: ")
