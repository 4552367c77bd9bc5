"""Damaged and foreign router files, weights and configs: a result or a `TideError`, in bounded memory."""

import json
import pickle
import resource
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutations import mutated_bytes, mutated_json
from settings import cases
from tiny_configs import small_llama
from transformers import LlamaForCausalLM

from tide_export.errors import TideError
from tide_export.model.source import SourceModel, load_model, wrap_model
from tide_export.pipeline.preflight import context_length
from tide_export.routers.router import Lens, Router
from tide_export.routers.router_set import RouterSet
from tide_export.trace.recurrence import refuse_unknown_state

MEMORY = 1 << 20  # KiB that the whole of a test may add
IDS = torch.tensor([[1, 2, 3]])
DTYPES = ("F32", "F16", "BF16", "F64", "I64", "I32", "U8", "BOOL", "F8_E4M3", "C64", "", "X")


@pytest.fixture(scope="module")
def source() -> SourceModel:
    torch.manual_seed(0)
    return wrap_model(LlamaForCausalLM(small_llama(vocab_size=13, width=8, layers=2, context=16)), "tiny")


@pytest.fixture
def folder(source: SourceModel, tmp_path: Path) -> Path:
    """A model whose files a test may write."""
    source.model.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def files(folder: Path) -> dict[str, bytes]:
    """Those of the folder before a test writes any."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def _memory_is_bounded():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY


@pytest.fixture(scope="module")
def router_files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """One of TIDE's form, one with a shortlist, one with lenses."""
    path = tmp_path_factory.mktemp("routers") / "routers.safetensors"
    torch.manual_seed(0)
    rows = torch.randn(4, 8)
    sets = [
        RouterSet({1: Router(8, 2)}, {"num_layers": 2, "report": {"1": {"agreement": 0.5}}}),
        RouterSet({1: Router(8, 2, rows), 3: Router(8, 2, rows)}),
        RouterSet({1: Router(8, 2)}, {}, {1: Lens(8, 2)}),
    ]
    files = []
    for routers in sets:
        routers.save(path)
        files.append(path.read_bytes())
    return files


def mutated_tensors(random: Random, data: bytes) -> bytes:
    """A safetensors file with a changed header, with another length of it, or with changed bytes."""
    if random.random() < 0.3:
        return mutated_bytes(random, data)
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    for _ in range(random.randint(0, 2)):
        entry = header[random.choice([key for key in header if key != "__metadata__"])]
        change = random.randrange(4)
        if change == 0:
            entry["dtype"] = random.choice(DTYPES)
        elif change == 1:
            entry["shape"] = random.choice(([], [0], [2**62, 4], [-1], entry["shape"][::-1], [*entry["shape"], 1]))
        elif change == 2:
            entry["data_offsets"] = [random.choice((0, 8, len(body), 2**63, -4)) for _ in range(2)]
        else:
            header[random.choice(("routers.2.x", "lenses.x.y", "extra", "shortlist", ""))] = dict(entry)
    text = mutated_json(random, header) if random.random() < 0.6 else json.dumps(header)
    encoded = text.encode("utf-8", "surrogatepass")
    size = random.choice((len(encoded),) * 6 + (0, 1, len(encoded) + 8, 2**40, 2**63, 2**64 - 1))
    return size.to_bytes(8, "little") + encoded + body


def outcome(work: Callable[[], None]) -> bool:
    """Whether `work` gives a result; False for a `TideError`. Any other exception is a failure."""
    try:
        work()
    except TideError:
        return False
    return True


@cases(200, 1000)
@given(random=st.randoms(use_true_random=False), which=st.integers(0, 2))
def test_router_files(
    random: Random, which: int, source: SourceModel, router_files: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(mutated_tensors(random, router_files[which]))

    def use() -> None:
        routers = RouterSet.load(path)
        routers.arrays(), routers.lens_arrays(), routers.sizes()
        routers.check(source, path)
        routers.check_quantization(source, path)

    outcome(use)


class Canary:
    """Writes a file when it is unpickled by anything that runs code."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def tide_file(random: Random, canary: Path) -> bytes:
    """TIDE's router.pt, as torch writes it, with a changed pickle, with one that runs code, or with changed bytes."""
    state = {0: {"down.weight": torch.ones(2, 8), "up.weight": torch.ones(1, 2)}}
    content: object = {"router_layers": state}
    kind = random.randrange(4)
    if kind == 0:
        poison = {"router_layers": state | {1: Canary(canary)}}
        content = random.choice((Canary(canary), poison, {"router_layers": Canary(canary)}))
    elif kind == 1:
        odd = (None, 1, "x", [], {}, {"x": {}}, {0: None}, {0: {"down.weight": 1}}, {0: {"up.weight": torch.ones(3)}})
        content = random.choice((*odd, *({"router_layers": value} for value in odd)))
    buffer = BytesIO()
    if random.random() < 0.2:
        pickle.dump(content, buffer)
    else:
        torch.save(content, buffer)
    if kind == 2 and zipfile.is_zipfile(buffer):
        return rewritten(random, buffer)
    return mutated_bytes(random, buffer.getvalue()) if kind == 3 else buffer.getvalue()


def rewritten(random: Random, buffer: BytesIO) -> bytes:
    """The archive with its pickle changed, and right again as an archive."""
    out = BytesIO()
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, mutated_bytes(random, data) if name.endswith(".pkl") else data)
    return out.getvalue()


@cases(150, 1000)
@given(random=st.randoms(use_true_random=False))
def test_tide_s_router_files_run_no_code(random: Random, tmp_path_factory: pytest.TempPathFactory) -> None:
    path, canary = tmp_path_factory.getbasetemp() / "fuzzed.pt", tmp_path_factory.getbasetemp() / "canary"
    path.write_bytes(tide_file(random, canary))
    outcome(lambda: RouterSet.load(path).arrays())
    assert not canary.exists()


def use_model(folder: Path) -> None:
    """What every command does with a loaded model, but for the trace."""
    source = load_model(folder)
    refuse_unknown_state(source)
    source.run(IDS % source.vocab_size, [1])
    context_length(source, None if source.context_length else 16)
    assert all(isinstance(token, int) for token in source.eos_token_ids)
    assert (source.hidden_size, source.vocab_size) == (8, 13)


@cases(50, 500)
@given(random=st.randoms(use_true_random=False))
def test_weights_of_a_model(random: Random, folder: Path, files: dict[str, bytes]) -> None:
    (folder / "model.safetensors").write_bytes(mutated_tensors(random, files["model.safetensors"]))
    outcome(lambda: use_model(folder))


NUMBERS = (0, -1, 1, 3, 7, 2**20, 2**31, 2**40, 2**62, 2**63, 10**30, 1.5, "x", None, True, [], {}, [2**40])


@cases(100, 1000)
@given(random=st.randoms(use_true_random=False))
def test_config_of_a_model(random: Random, folder: Path, files: dict[str, bytes]) -> None:
    values = json.loads(files["config.json"])
    if random.random() < 0.6:
        values[random.choice(list(values))] = random.choice(NUMBERS)
        text = json.dumps(values)
    else:
        text = mutated_json(random, values)
    if random.random() < 0.1:
        text = mutated_bytes(random, text.encode("utf-8", "surrogatepass")).decode("latin-1")
    (folder / "config.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    outcome(lambda: use_model(folder))
