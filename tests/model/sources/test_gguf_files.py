"""GGUF files: converted once, whole or not at all."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import gguf as gguf_library
import numpy as np
import pytest
from safetensors.numpy import load_file

from aexec.errors import MissingExtra, ModelLoadError, ModelNotFound, OutOfMemory
from aexec.model.sources import gguf_files
from aexec.model.sources.gguf_files import converted
from aexec.model.sources.resolve import resolve_model
from aexec.model.transformer import hooks


def gguf(tmp_path: Path, contents: bytes = b"weights", name: str = "model.gguf") -> Path:
    path = tmp_path / name
    path.write_bytes(b"GGUF" + contents)
    return path


class FakeReader:
    """Finds 1000 elements in any file."""

    def __init__(self, path: Path) -> None:
        self.tensors = [SimpleNamespace(n_elements=1000)]


def fake_conversion(source: Path, target: Path) -> None:
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(source.read_bytes())


@pytest.fixture
def unread(monkeypatch) -> None:
    """Files of the test hold no tensors."""
    monkeypatch.setattr(gguf_library, "GGUFReader", FakeReader)


@pytest.fixture
def conversions(monkeypatch, unread):
    """Stands in for transformers; lists what was converted."""
    done: list[Path] = []

    def convert(source: Path, target: Path) -> None:
        done.append(source)
        fake_conversion(source, target)

    monkeypatch.setattr(hooks, "convert_gguf", convert)
    return done


def test_a_file_is_converted_once(tmp_path, conversions) -> None:
    """The second time its conversion is found, under whatever path the same file lies."""
    first = converted(gguf(tmp_path), cache_dir=tmp_path / "cache")
    copy = gguf(tmp_path, name="copy.gguf").rename(tmp_path / "cache" / "model.gguf")
    assert converted(copy, cache_dir=tmp_path / "cache") == first
    assert len(conversions) == 1
    assert (first / "config.json").is_file()


def test_a_changed_file_is_converted_anew(tmp_path, conversions) -> None:
    """The name of a conversion is made of the file's contents."""
    before = converted(gguf(tmp_path, b"one"), cache_dir=tmp_path / "cache")
    assert converted(gguf(tmp_path, b"two"), cache_dir=tmp_path / "cache") != before
    assert len(conversions) == 2


def test_two_at_once_end_with_one_whole_conversion(tmp_path, monkeypatch, unread) -> None:
    """Both write to a draft of their own; the first to finish wins and the other takes its result."""
    source, cache, both = gguf(tmp_path), tmp_path / "cache", threading.Barrier(2)

    def convert(source: Path, target: Path) -> None:
        both.wait(timeout=10)
        fake_conversion(source, target)

    monkeypatch.setattr(hooks, "convert_gguf", convert)
    monkeypatch.setattr(hooks, "silent", lambda *_: nullcontext())  # its lock is for one process; here are two
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(converted(source, cache_dir=cache))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert found[0] == found[1]
    assert [path.name for path in (cache / "models").iterdir()] == [found[0].name]
    assert (found[0] / "config.json").is_file()


def test_a_failed_conversion_leaves_nothing(tmp_path, monkeypatch, unread) -> None:
    """The error names the file, and the next attempt starts afresh."""

    def convert(_source: Path, target: Path) -> None:
        (target / "half").touch()
        raise KeyError("blk.0.attn_q.weight")

    monkeypatch.setattr(hooks, "convert_gguf", convert)
    with pytest.raises(ModelLoadError, match=r"model.gguf could not be converted: KeyError: 'blk.0.attn_q.weight'"):
        converted(gguf(tmp_path), cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_leftovers_of_killed_conversions_are_swept(tmp_path, conversions) -> None:
    """Old drafts go, young ones may still be written to."""
    home = tmp_path / "cache" / "models"
    for name in (".draft-old", ".draft-young"):
        (home / name).mkdir(parents=True)
    os.utime(home / ".draft-old", (1, 1))
    converted(gguf(tmp_path), cache_dir=tmp_path / "cache")
    assert sorted(path.name for path in home.glob(".draft-*")) == [".draft-young"]


def test_what_is_no_gguf_file_is_refused(tmp_path) -> None:
    """By its first bytes; its name proves nothing."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04....")
    with pytest.raises(ModelLoadError, match=r"is no GGUF file: it begins with b'PK.*expected b'GGUF'"):
        converted(path, cache_dir=tmp_path)


def test_a_damaged_gguf_file_is_refused(tmp_path) -> None:
    """What the libraries raise over it comes out as one error of ours, with the file's name."""
    with pytest.raises(ModelLoadError, match=r"model.gguf could not be converted"):
        converted(gguf(tmp_path, b"\x03\x00\x00\x00"), cache_dir=tmp_path / "cache")


def test_a_missing_library_names_the_extra(tmp_path, monkeypatch) -> None:
    """And the command that installs it."""

    def import_module(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(gguf_files.importlib, "import_module", import_module)
    with pytest.raises(MissingExtra, match=r"accelerate is not installed.*pip install 'aexec\[models\]'"):
        converted(gguf(tmp_path), cache_dir=tmp_path / "cache")


def test_a_conversion_that_does_not_fit_in_memory_is_refused_before_it_starts(
    tmp_path, conversions, monkeypatch
) -> None:
    """One and a half times the weights in float32; need and have are told."""
    monkeypatch.setattr(gguf_files, "free_host_bytes", lambda: 5999)
    with pytest.raises(OutOfMemory, match=r"converting model\.gguf needs") as caught:
        converted(gguf(tmp_path), cache_dir=tmp_path / "cache")
    assert (caught.value.need_bytes, caught.value.have_bytes) == (6000, 5999)
    assert conversions == []


def test_a_conversion_that_does_not_fit_on_disk_is_refused_before_it_starts(tmp_path, conversions, monkeypatch) -> None:
    """With the variable that moves the cache to a larger disk."""
    monkeypatch.setattr(gguf_files.shutil, "disk_usage", lambda _path: SimpleNamespace(free=3999))
    with pytest.raises(ModelLoadError, match=r"where 0\.0 MiB are free: set AEXEC_CACHE_DIR elsewhere"):
        converted(gguf(tmp_path), cache_dir=tmp_path / "cache")
    assert conversions == []


def test_a_cache_that_cannot_be_written_says_which_variable_moves_it(tmp_path) -> None:
    """A file stands where the directory should be."""
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(ModelLoadError, match=r"set AEXEC_CACHE_DIR elsewhere"):
        converted(gguf(tmp_path), cache_dir=tmp_path / "cache")


def test_an_empty_conversion_is_not_taken_for_a_model(tmp_path, monkeypatch, unread) -> None:
    """The result is opened like any directory."""
    monkeypatch.setattr(hooks, "convert_gguf", lambda _source, _target: None)
    with pytest.raises(ModelNotFound, match=r"holds no config.json"):
        resolve_model(str(gguf(tmp_path)), cache_dir=tmp_path / "cache")


def write_tiny_gguf(path: Path, *, leave_out: str = "") -> dict[str, np.ndarray]:
    """A llama of two layers with a tokenizer that merges a and b; returns its tensors."""
    hidden, inner, heads, vocab = 32, 48, 2, 259
    writer = gguf_library.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_block_count(2)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<pad>", "<s>", "</s>", "a", "b", "ab", *(f"<{number}>" for number in range(vocab - 6))])
    writer.add_token_types([3, 3, 3, *[1] * (vocab - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)
    shapes = {"token_embd.weight": (vocab, hidden), "output.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    for layer in range(2):
        names = {"attn_q": (hidden, hidden), "attn_k": (hidden, hidden), "attn_v": (hidden, hidden)}
        names |= {"attn_output": (hidden, hidden), "attn_norm": (hidden,), "ffn_norm": (hidden,)}
        names |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in names.items()}
    tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if name != leave_out:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_converted_model_holds_the_very_weights(tmp_path, ready_runner, toy_scheduler, capfd) -> None:
    """It is loaded and runs, its progress was told in order, and nothing was printed."""
    tensors = write_tiny_gguf(tmp_path / "tiny.gguf")
    told: list[tuple[str, float, float]] = []
    files = resolve_model(
        str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache", progress=lambda *each: told.append(each)
    )
    weights = load_file(files.weights[0])
    assert np.array_equal(weights["model.embed_tokens.weight"], tensors["token_embd.weight"])
    assert np.array_equal(weights["model.layers.1.mlp.up_proj.weight"], tensors["blk.1.ffn_up.weight"])
    assert told == [("convert", float(done), float(len(tensors))) for done in range(1, len(tensors) + 1)]
    scheduler = toy_scheduler()
    scheduler.add("a", [5, 6, 7], 4)
    assert len(scheduler.run(ready_runner(files.directory))["a"]) == 4
    assert (files.directory / "tokenizer.json").is_file()
    assert capfd.readouterr() == ("", "")


def test_a_gguf_file_without_one_of_its_weights_is_refused(tmp_path) -> None:
    """Else the conversion would fix a random weight for ever."""
    write_tiny_gguf(tmp_path / "tiny.gguf", leave_out="blk.1.ffn_down.weight")
    with pytest.raises(ModelLoadError, match=r"lacks weights of LlamaForCausalLM.*layers\.1\.mlp\.down_proj"):
        converted(tmp_path / "tiny.gguf", cache_dir=tmp_path / "cache")
