"""Tokenizers of model directories, made here: byte-level and byte-fallback ones."""

from __future__ import annotations

import json

import pytest

from aexec.engine.hub_text import load_tokenizer, read_eos_token_ids
from aexec.errors import InvalidRequest, ModelLoadError

tokenizers = pytest.importorskip("tokenizers")

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no ' ~ m.role) }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def sentencepiece_like():
    """Words with a leading space mark, all bytes as a fallback, begin-of-text in front."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁hello", "▁world", "▁"]
    vocabulary = {word: place for place, word in enumerate(words)}
    tokens = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokens.add_special_tokens(["<s>", "</s>"])
    decoders = tokenizers.decoders
    tokens.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokens


@pytest.fixture
def directory(tmp_path):
    sentencepiece_like().save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": TEMPLATE, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    return tmp_path


def byte(value):
    return 3 + value


def decode_one_by_one(tokenizer, prompt, token_ids, **options):
    decoder = tokenizer.decoder(prompt, **({"skip_special_tokens": True} | options))
    return [decoder.step(token_id) for token_id in token_ids]


def test_a_character_of_many_tokens_is_shown_once_it_is_whole(directory):
    """Bytes wait for the last byte of their character."""
    pieces = decode_one_by_one(load_tokenizer(directory), [259], [byte(each) for each in "é🙂".encode()])
    assert pieces == ["", "é", "", "", "", "🙂"]


def test_the_first_word_keeps_the_space_that_parts_it_from_the_prompt(directory):
    """Text is decoded as a continuation of the prompt."""
    assert decode_one_by_one(load_tokenizer(directory), [1, 259], [260, 259]) == [" world", " hello"]


def test_a_prompt_that_ends_within_a_character_is_not_said_again(directory):
    """The output is what comes after the prompt, and nothing of the prompt."""
    pieces = decode_one_by_one(load_tokenizer(directory), [259, byte(0xC3)], [260, 259])
    assert "".join(pieces).replace("\N{REPLACEMENT CHARACTER}", "").split() == ["world", "hello"]


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_shown_only_when_asked_for(directory, skip):
    """``skip_special_tokens`` decides."""
    pieces = decode_one_by_one(load_tokenizer(directory), [259], [260, 2], skip_special_tokens=skip)
    assert "".join(pieces) == (" world" if skip else " world</s>")


def test_bytes_that_are_no_text_end_nothing(directory):
    """Any sequence of tokens can be decoded, and words after rubbish are shown."""
    tokens = [byte(0xFF), byte(0xE2), 260, byte(0xC3), 2, 99_999, 259, byte(0x80), 260]
    assert "".join(decode_one_by_one(load_tokenizer(directory), [259], tokens)).endswith("world")


def test_a_prompt_gets_one_begin_of_text_token(directory):
    """Whether the text brings it (as chat prompts do) or not."""
    tokenizer = load_tokenizer(directory)
    assert [tokenizer.encode(text)[:2].count(1) for text in ("▁hello", "<s>▁hello")] == [1, 1]


def test_a_conversation_becomes_a_prompt_by_the_models_template(directory):
    """With the special tokens that the template names."""
    prompt = load_tokenizer(directory).chat_prompt([{"role": "user", "content": "Hello"}])
    assert prompt == "<s>[user]Hello[assistant]"


def test_a_template_may_refuse_a_message(directory):
    """What it raises is the caller's error."""
    with pytest.raises(InvalidRequest, match="chat template does not take these messages: no robot"):
        load_tokenizer(directory).chat_prompt([{"role": "robot", "content": "Hello"}])


def test_a_template_in_a_file_of_its_own_wins(directory):
    """``chat_template.jinja`` is where newer models keep it."""
    (directory / "chat_template.jinja").write_text("{{ messages[0].content | tojson }}")
    assert load_tokenizer(directory).chat_prompt([{"role": "user", "content": "é"}]) == '"é"'


def test_one_of_several_templates_is_the_default(directory):
    """The configuration may hold a list of named templates."""
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert load_tokenizer(directory).chat_prompt([{"role": "user", "content": "x"}]) == "plain"


def test_a_model_without_a_template_says_so(directory):
    """The remedy is in the text."""
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(InvalidRequest, match="no chat template: pass a plain prompt"):
        load_tokenizer(directory).chat_prompt([{"role": "user", "content": "x"}])


def test_a_directory_without_a_tokenizer_has_none(tmp_path):
    """That is no error: the engine then takes token ids."""
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_named(directory, name):
    """The error says which file it is."""
    (directory / name).write_text("{")
    with pytest.raises(ModelLoadError, match=f"{name} is damaged"):
        load_tokenizer(directory)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(None, (2,)), ({"eos_token_id": 5}, (5,)), ({"eos_token_id": [5, 6]}, (5, 6)), ({}, (2,))],
)
def test_end_tokens_are_those_that_transformers_takes(directory, generation, expected):
    """The generation configuration wins over the model's."""
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    assert read_eos_token_ids(directory) == expected
