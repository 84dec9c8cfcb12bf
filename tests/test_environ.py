from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from aexec import environ
from aexec.errors import ConfigError

SOURCES = Path(environ.__file__).parent


@pytest.mark.parametrize("variable", environ.VARIABLES, ids=lambda variable: variable.name)
def test_every_variable_has_a_default_that_parses_and_a_line_of_prose(variable: environ.Variable[object]) -> None:
    """An empty environment gives every variable its default."""
    assert variable.read({}) is not None
    assert variable.read({variable.name: ""}) == variable.read({})
    assert variable.name.startswith("AEXEC_")
    assert re.fullmatch(r"[A-Z][^\n]*\.", variable.prose)


def test_a_variable_that_cannot_be_parsed_names_itself_its_text_and_what_was_expected() -> None:
    """The user can mend it from the message alone."""
    with pytest.raises(ConfigError, match="AEXEC_LOG_LEVEL is 'loud': expected one of debug, info, warning"):
        environ.LOG_LEVEL.read({"AEXEC_LOG_LEVEL": "loud"})


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """AEXEC_CACHE_DIR first, then XDG_CACHE_HOME, then the home directory."""
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert environ.CACHE_DIR.read({}) == Path("/home/ada/.cache/aexec")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert environ.CACHE_DIR.read({}) == Path("/var/cache/aexec")
    assert environ.CACHE_DIR.read({"AEXEC_CACHE_DIR": "~/models"}) == Path("/home/ada/models")


def reads_the_environment(path: Path) -> bool:
    """Return True for a module that names os.environ or os.getenv in its code."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "environb" | "getenv" | "getenvb"):
                return True
            case ast.ImportFrom(module="os", names=names) if any("env" in alias.name for alias in names):
                return True
            case _:
                pass
    return False


def test_only_environ_reads_the_environment() -> None:
    """No other module of aexec looks at os.environ, so the table is complete."""
    readers = [str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py") if reads_the_environment(path)]
    assert readers == ["environ.py"]


def test_the_exclusion_files_say_what_workers_never_inherit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Several of them add up; the nodes' key is always kept back."""
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text('["HF_TOKEN", "MY_*"]', encoding="utf-8")
    other.write_text('["AWS_*"]', encoding="utf-8")
    monkeypatch.delenv("AEXEC_ENV_EXCLUDE_FILE", raising=False)
    assert environ.excluded() == ("AEXEC_NODE_KEY",)
    monkeypatch.setenv("AEXEC_ENV_EXCLUDE_FILE", f"{one}:{other}")
    assert environ.excluded() == ("AEXEC_NODE_KEY", "HF_TOKEN", "MY_*", "AWS_*")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (None, "cannot be read"),
        ("[", "cannot be read"),
        ('{"a": 1}', "expected a JSON list"),
        ("[1]", "expected a JSON"),
    ],
)
def test_an_exclusion_file_that_is_none_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, wrong: str
) -> None:
    """Nothing that was to be kept back goes out because of a typing error."""
    path = tmp_path / "names.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    monkeypatch.setenv("AEXEC_ENV_EXCLUDE_FILE", str(path))
    with pytest.raises(ConfigError, match=f"AEXEC_ENV_EXCLUDE_FILE: .*names.json.*{wrong}"):
        environ.excluded()
