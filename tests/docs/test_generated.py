"""The pages of the reference that are generated are those that the code gives, and name all that is public."""

import importlib.util
from types import ModuleType

import pytest
from documents import ROOT, name

import tide_export
from tide_export.cli.main import COMMANDS


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generated", ROOT / "docs" / "generated.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_what_the_code_declares(generated: ModuleType) -> None:
    differ = [name(path) for path, text in generated.pages().items() if path.read_text() != text]
    assert not differ, "run: python docs/generated.py"


def test_they_name_every_command_and_every_public_name() -> None:
    cli, api = ((ROOT / "docs" / "reference" / page).read_text() for page in ("cli.md", "api.md"))
    assert [command for command in COMMANDS if f"\n### tide-export {command}\n" not in cli] == []
    public = [one for one in tide_export.__all__ if one != "__version__"]
    assert [one for one in public if f"tide_export.{one}" not in api and f"| `{one}` |" not in api] == []


def test_long_signatures_have_a_parameter_a_line_and_text_keeps_its_signs(generated: ModuleType) -> None:
    page = generated.api()
    assert "tide_export.load(\n    bundle: str | os.PathLike[str],\n    provider: str = 'auto',\n" in page
    assert "- `prompt_tokens` (`512`): " in page, "a constant's value"
    assert generated._escaped("a <b> * `<c>`") == "a \\<b> \\* `<c>`"
