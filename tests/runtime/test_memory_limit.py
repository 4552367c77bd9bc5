"""Control groups limit the memory that lists, schedulers and servers take: they fit, or say before what is missing."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import tiers

MIB = 1 << 20
ROUNDS, TOKENS = tiers.sized((1, 60), (4, 400))  # all of them have more K/V than there is room for
LIST = """
import sys
from tide_export.runtime.engine import load

prompts = [[(37 * i + j) % 500 + 3 for j in range(100)] for i in range(150)]
done = load(sys.argv[1], threads=1).generate(prompts, max_new_tokens=30, mode="full", stop_token_ids=[])
print(len(done), sum(len(one.tokens) for one in done))
"""


@contextlib.contextmanager
def control_group(limit: int) -> Iterator[list[str]]:
    """The beginning of a command that runs in a control group of so many bytes."""
    first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, file = (first, "memory.limit_in_bytes") if first.is_dir() else (second, "memory.max")
    group = root / f"tide-test-{os.getpid()}-{limit}"
    within = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    try:
        try:
            (group / file).write_text(str(limit))
            subprocess.run([*within, "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no control group can be made here: {error}")
        yield within
    finally:
        group.rmdir()


def run(limit: int, *command: object) -> subprocess.CompletedProcess[str]:
    with control_group(limit) as within:
        return subprocess.run([*within, *map(str, command)], capture_output=True, text=True, check=False, timeout=120)


def test_a_list_fits_or_is_refused_before_it_runs(demo_bundle: Path) -> None:
    done = run(300 * MIB, sys.executable, "-c", LIST, demo_bundle)
    assert (done.returncode, done.stdout) == (0, "150 4500\n"), done.stderr
    done = run(120 * MIB, sys.executable, "-c", LIST, demo_bundle)
    assert done.returncode == 1
    says = (
        r"not enough memory: of 120 MiB that this process may have, \d+ are left, and 32 slots and a prefix cache of 0 "
    )
    assert re.search(says, done.stderr)


def test_a_server_with_defaults_fits(demo_bundle: Path) -> None:
    """Eight requests at once, whose K/V and cached prompts would have more than there is."""
    served = "serve", str(demo_bundle), "--port", "0", "--model-name", "demo"
    with control_group(300 * MIB) as within, ThreadPoolExecutor(8) as pool:
        server = subprocess.Popen(
            [*within, sys.executable, "-m", "tide_export.cli.main", *served], stderr=subprocess.PIPE, text=True
        )
        assert server.stderr is not None
        try:
            log = list[str]()
            while not log or "running on" not in log[-1]:
                log.append(server.stderr.readline())
                assert log[-1], log  # it has ended
            address = log[-1].split("http://")[1].split()[0].rstrip("/")
            memory = next(line for line in log if "memory: " in line)
            left, limit, cached, tokens = map(int, re.findall(r"\d+", memory.split("memory: ")[1]))
            assert limit == 300
            assert cached <= left / 3
            asked = {"model": "demo", "max_tokens": TOKENS, "temperature": 0, "mode": "full", "ignore_eos": True}

            def answered(number: int) -> tuple[int, int]:
                prompt = [(37 * number + place) % 500 + 3 for place in range(500)]
                answer = httpx.post(f"http://{address}/v1/completions", json=asked | {"prompt": prompt}, timeout=120)
                return answer.status_code, answer.json()["usage"]["completion_tokens"]

            for _ in range(ROUNDS):
                assert set(pool.map(answered, range(8))) == {(200, TOKENS)}
            assert tokens > 8 * 900 / 4
        finally:
            server.terminate()
            server.communicate(timeout=60)
    assert server.returncode == 0
