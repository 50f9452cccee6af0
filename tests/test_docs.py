"""The documentation agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.cli.docs import configuration
from cluster.cli.docs_parameters import DESCRIPTIONS, HEX_LLM_NOTES
from cluster.cli.main import COMMANDS, USAGE
from cluster.ingress.protocol.chat import ChatRequest
from cluster.ingress.protocol.completion import CompletionRequest
from cluster.ingress.protocol.vertex import VertexInstance
from engine.config import ConfigError, EngineConfig

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
NOT_YET = {
    "enable_lora": "true",
}


def test_configuration_is_up_to_date() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == configuration(), "run `make docs`"


def test_every_request_parameter_is_described_and_none_besides() -> None:
    models = (ChatRequest, CompletionRequest, VertexInstance)
    assert set(DESCRIPTIONS) == {name for model in models for name in model.model_fields}


def test_what_the_docs_call_unavailable_is_refused() -> None:
    assert {name for name, note in HEX_LLM_NOTES.items() if note.startswith("Not available")} == set(NOT_YET)
    for name, value in NOT_YET.items():
        with pytest.raises(ConfigError, match="not available yet"):
            EngineConfig.from_args({name: value})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_options_named_in_the_readme_exist() -> None:
    known = {"host", "port", *EngineConfig.model_fields, "max_running_seqs"}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for line in re.findall(r"sliceserve serve[^`\n]*", text):
        for flag in re.findall(r"--([a-z_-]+)", line):
            assert flag.replace("-", "_") in known, line


def test_usage_lists_every_command() -> None:
    assert re.findall(r"^  (\w+) ", USAGE, flags=re.MULTILINE) == list(COMMANDS)
