"""The conda recipe of the documentation says what setup.py says."""

from __future__ import annotations

from tests.packages.recipe import PAGE, ROOT, python_requires, required_by_recipe, required_by_setup


def test_the_recipe_requires_what_setup_requires() -> None:
    assert required_by_recipe() == {**required_by_setup(), "python": python_requires()}


def test_the_recipe_tests_what_it_installs_and_names_the_command() -> None:
    text = PAGE.read_text()
    for expected in ("- checkfreq = checkfreq.cli:main", "- iterators", "checkfreq --version"):
        assert expected in text
    assert 'license="MIT"' in (ROOT / "setup.py").read_text()
    assert "license: MIT" in text
