"""Not a test: runs export and calibrate in forked children that die, or find the disk full, at many moments.

    python interrupted_runs.py FOLDER KILLS FULL SEED

PyTorch is loaded, and the model traced, once. A moment is a file-system operation (as `sys.addaudithook` reports it) on
something inside FOLDER: the child sends itself SIGKILL before it (KILLS times), or can write no file beyond 16 bytes
from then on (FULL times). Prints the number of runs that left the output "absent", "old" or "new", for both commands,
as JSON; raises where it is anything else.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import torch
from bundles import names_in
from matplotlib.figure import Figure
from tiny_configs import small_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tide_export.bundle.opened import open_bundle
from tide_export.calibration import hidden_store
from tide_export.cli.main import main as command
from tide_export.model.source import SourceModel, load_model
from tide_export.pipeline import calibrate as calibration
from tide_export.pipeline import flow
from tide_export.report import plots
from tide_export.routers.random_routers import random_routers
from tide_export.routers.router_set import RouterSet

OPERATIONS = ("open", "os.", "shutil.", "fcntl.flock", "ctypes.dlsym")
LIMIT = 16  # bytes of a file on a "full" disk
COMPLETE_EVERY = 5  # so many interrupted runs, then one that must succeed and remove what they left
TEXT = "".join(
    f" = {title} = \n" + f"Early exits skip the layers that {title} do not need.\n" * 9 for title in "ABCDEFGH"
)
LENGTH = 32


@dataclass(frozen=True)
class Action:
    """A command under test.

    Attributes:
        arguments: of the run with this number; its result shows the number.
        number: the number of the run whose result is at the output; None where there is none. Raises if it is damaged.
        complete: checks everything in the folder after a run that succeeded.
    """

    arguments: Callable[[int], list[str]]
    number: Callable[[], int | None]
    complete: Callable[[], None]


def main() -> None:
    folder, kills, full, seed = sys.argv[1:]
    draw = random.Random(int(seed))
    outcomes = {}
    for action in (export, calibrate):
        given, out = (Path(folder) / action.__name__ / name for name in ("in", "out"))
        for inner in (given, out):
            inner.mkdir(parents=True)
        runs = Interrupted(action(given, out), out)
        for how, moments in (("killed", int(kills)), ("full", int(full))):
            outcomes[f"{action.__name__} {how}"] = runs.run(how, moments, draw)
    print(json.dumps(outcomes))


class Interrupted:
    """Runs an action again and again, interrupted each time at another moment."""

    def __init__(self, action: Action, out: Path):
        self.action, self.out, self.runs = action, out, 0

    def run(self, how: str, moments: int, draw: random.Random) -> dict[str, int]:
        """Interrupts `moments` runs, spread over all operations of an undisturbed run.

        A third each starts from nothing, from a complete output, and from what the run before it left.
        """
        operations = self._succeed()
        outcomes: Counter[str] = Counter()
        for index in range(moments):
            moment = 1 + int((index + draw.random()) * operations / moments)
            if index % 3:
                shutil.rmtree(self.out)
                shutil.copytree(self.out.parent / "complete", self.out) if index % 3 == 1 else self.out.mkdir()
            before = self.action.number()
            status = self._fork(how, moment)
            after = self.action.number()
            assert status in (-signal.SIGKILL if how == "killed" else 2, 0), status  # 0: it had fewer operations
            assert after in (before, self.runs), f"{after} after moment {moment}, neither {before} nor {self.runs}"
            outcomes["new" if after == self.runs else "absent" if after is None else "old"] += 1
            if index % COMPLETE_EVERY == COMPLETE_EVERY - 1:
                self._succeed()
        self._succeed()
        return outcomes

    def _succeed(self) -> int:
        """Runs to the end; returns the number of operations."""
        status = self._fork()
        assert status == 0, status
        assert self.action.number() == self.runs
        self.action.complete()
        shutil.copytree(self.out, self.out.parent / "complete", dirs_exist_ok=True)
        return int((self.out.parent / "operations").read_text())

    def _fork(self, how: str = "", moment: int = 0) -> int:
        self.runs += 1
        process = os.fork()
        if process == 0:
            self._child(how, moment)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    def _child(self, how: str, moment: int) -> None:
        code = 99
        try:
            operations = self._interrupt(how, moment)
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as stderr:
                code = command(self.action.arguments(self.runs))
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            said = stderr.getvalue()
            assert code in (0, 2)
            assert said.count("error: ") == (code == 2), said
            assert "Traceback" not in said, said
            if code == 2:
                assert "no space left on the disk" in said, said
                assert str(self.out) in said, said
                # The routers are written before their report.
                assert self.action.number() != self.runs or "report" in said, said
            (self.out.parent / "operations").write_text(str(operations[0]))
        except BaseException:
            traceback.print_exc(file=sys.stdout)
            code = 99
        finally:
            sys.stdout.flush()
            os._exit(code)

    def _interrupt(self, how: str, moment: int) -> list[int]:
        """Interrupts this process before operation number `moment` (0: never); returns the count, kept up to date."""
        count, inside = [0], os.fsencode(self.out)

        def hook(event: str, arguments: tuple) -> None:
            if not event.startswith(OPERATIONS):
                return
            paths = [os.fsencode(a) for a in arguments if isinstance(a, str | bytes | os.PathLike)]
            if event in ("fcntl.flock", "ctypes.dlsym") or any(path.startswith(inside) for path in paths):
                count[0] += 1
                if count[0] == moment and how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif count[0] == moment:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))

        sys.addaudithook(hook)
        return count


# --- the actions ------------------------------------------------------------------------------------------------------


def export(given: Path, out: Path) -> Action:
    model = tiny_model(given)
    routers, bundle = given / "routers.safetensors", out / "bundle"
    source = load_model(model)
    random_routers(source, (1, 2), range(3, 60)).save(routers)
    pieces = flow.trace_and_cut(source, flow.ExportRequest(model, bundle), (1, 2), 64)
    flow.load_model = lambda *_, **options: source
    flow.trace_and_cut = lambda *_: pieces
    SourceModel.release = lambda self: None

    def arguments(number: int) -> list[str]:
        options = ["--routers", str(routers), "--min-layers", "1", "--overwrite", "-q", "--max-length", "64"]
        return ["export", model, "-o", str(bundle), "--exit-threshold", str(number / 1e6), "--no-validate", *options]

    def number() -> int | None:
        return round(open_bundle(bundle).manifest.thresholds[0] * 1e6) if bundle.exists() else None

    def complete() -> None:
        assert names_in(out) == {"bundle"}, names_in(out)

    return Action(arguments, number, complete)


def calibrate(given: Path, out: Path) -> Action:
    model, text = tiny_model(given), given / "text.txt"
    text.write_text(TEXT)
    routers, report, cache = out / "r.safetensors", out / "r.html", out / "cache"
    source = load_model(model)
    calibration.load_model = lambda *_, **options: source
    hidden_store.FLUSH_SECONDS = 0.0  # batches are marked done one by one
    empty = plots._bytes(Figure())
    plots._bytes = lambda figure: empty  # drawing a report takes seconds
    first: list[RouterSet] = []

    def arguments(number: int) -> list[str]:
        # A setting that changes no router; the report is one more page for each.
        options = {"checkpoints": "1,2", "dataset": text, "exit-threshold": number / 1e6, "min-layers": 1}
        few = {"calibration-samples": 6, "calibration-length": LENGTH, "calibration-batch": 1, "router-epochs": 1}
        more = [f"--{name}={value}" for name, value in (options | few).items()]
        return ["calibrate", model, "-o", str(routers), "--cache", str(cache), "--report", str(report), "-q", *more]

    def number() -> int | None:
        for file, end in ((report, b"</html>\n"), (report.with_suffix(".png"), b"IEND\xaeB`\x82")):
            assert not file.exists() or file.read_bytes().endswith(end), file
        if not routers.exists():
            return None
        return round(RouterSet.load(routers).provenance["config"]["exit_threshold"] * 1e6)

    def complete() -> None:
        """A resumed calibration gives the routers of an undisturbed one."""
        assert names_in(out) == {"cache", "r.html", "r.png", "r.safetensors"}, names_in(out)
        made = RouterSet.load(routers)
        first.append(made)
        for name, tensor in first[0].tensors().items():
            assert torch.equal(tensor, made.tensors()[name]), name
        kept = {"lock", "plan.json", "done.npy", *(f"states_{layers}.npy" for layers in (1, 2, 3))}
        for folder in cache.iterdir():
            assert names_in(folder) == kept, names_in(folder)

    return Action(arguments, number, complete)


def tiny_model(folder: Path) -> str:
    """Writes a model of 3 layers and a tokenizer of bytes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = Tokenizer(
        models.BPE({char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")
    LlamaForCausalLM(small_llama(vocab_size=256, width=32, layers=3, context=64)).save_pretrained(folder / "model")
    return str(folder / "model")


if __name__ == "__main__":
    main()
