"""What the documents say exists, exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "benchmarks/README.md", *PAGES)
#: A path of ours in backquotes: it begins with a folder of the checkout or names a file there.
PATH = re.compile(
    r"`((?:checkfreq|iterators|benchmarks|tests|docker|docs)/[\w./-]*|[A-Z]\w+\.(?:md|txt|toml))`"
)


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", text_of("Makefile"), re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_named_in_a_document_exists(document: str) -> None:
    missing = [path for path in PATH.findall(text_of(document)) if not (ROOT / path).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_in_a_document_leads_somewhere(document: str) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text_of(document))
    folder = (ROOT / document).parent
    assert [link for link in links if not (folder / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_command_in_a_document_is_a_target(document: str) -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", text_of(document), re.MULTILINE))
    assert named <= make_targets()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_module_that_a_document_runs_exists(document: str) -> None:
    for module in re.findall(r"python3? -m (benchmarks(?:\.\w+)*)(?![.\w])", text_of(document)):
        path = ROOT / Path(*module.split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_test_named_in_a_document_exists(document: str) -> None:
    tests = (ROOT / "tests").rglob("test_*.py")
    there = {
        name for path in tests for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert set(re.findall(r"`(test_\w+)`", text_of(document))) <= there


@pytest.mark.parametrize(("document", "most"), [("README.md", 130), ("ARCHITECTURE.md", 200)])
def test_what_everybody_reads_is_short_enough_to_be_read(document: str, most: int) -> None:
    assert len(text_of(document).splitlines()) <= most


def test_every_direct_requirement_is_pinned() -> None:
    pinned = {line.split("==")[0] for line in text_of("constraints.txt").splitlines()}
    lists = re.findall(r'(?:[A-Z] = |requires=|"dali": )\[([^\]]*)\]', text_of("setup.py"))
    named = re.findall(r'"([a-z][\w-]*)', ",".join(lists))
    assert {"torch", "pytest", "torchvision", "nvidia-dali-cuda120"} <= set(named) <= pinned
