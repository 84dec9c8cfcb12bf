"""What has to be the same on all ranks, as a few bytes, and as words."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aexec.executor.external.digest import DIGEST_SIZE, describe, digest, step_of
from aexec.messages.batch import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from aexec.messages.control import CallMethod, Ping
from aexec.messages.request import SamplingParams
from aexec.messages.step import ExecuteModel, SampleTokens, StepId


def call(*args, method="add", number=1, **kwargs):
    return CallMethod(call=number, method=method, args=args, kwargs=kwargs)


@dataclasses.dataclass
class Settings:
    name: str
    parts: object


class Options:
    def __init__(self, size):
        self.size = size
        self._cache = object()


class Tensor:
    """What a tensor looks like from outside."""

    def __init__(self, shape, content=0):
        self.dtype, self.shape, self.content = "float32", shape, content

    def __repr__(self):
        raise AssertionError("nobody looks at what a tensor holds")


def plus_one(value):
    return value + 1


def plus_two(value):
    return value + 2


def batch(tokens=(1, 2, 3), order=("a", "b")):
    new = NewRequestData(
        request_id="a", token_ids=list(tokens), num_prompt_tokens=3, block_ids=[0], num_computed_tokens=0,
        sampling=SamplingParams(temperature=0.0),
    )  # fmt: skip
    return SchedulerOutput(new=[new], cached=CachedRequestData(), num_scheduled_tokens=dict.fromkeys(order, 3))


CYCLE: list[object] = []
CYCLE.append(CYCLE)
DIFFERENT = [
    call(),
    call(1),
    call(2),
    call(1.0),
    call(True),
    call("1"),
    call(b"1"),
    call(None),
    call(1, 2),
    call([1, [2]]),
    call(1, method="sub"),
    call(x=1),
    call(y=1),
    call({"a": 1}),
    call({"a": 2}),
    call({1: "a", (2, 3): None}),
    call({1: "a", (2, 3): 0}),
    call({1, "a"}),
    call({2, "a"}),
    call(2**80),
    call(2**80 + 1),
    call(1 + 2j),
    call(range(3)),
    call(slice(1, 3)),
    call(PurePosixPath("/models/a")),
    call(PurePosixPath("/models/b")),
    call(Settings("a", [1])),
    call(Settings("a", [2])),
    call(Settings("a", {(1, 2): 3})),
    call(Options(1)),
    call(Options(2)),
    call(np.arange(3)),
    call(np.arange(3)[::-1]),
    call(np.arange(3, dtype=np.int32)),
    call(np.int64(3)),
    call(np.float32(3)),
    call(Tensor((2, 3))),
    call(Tensor((3, 2))),
    call({"weight": Tensor((2, 3))}),
    call({"bias": Tensor((2, 3))}),
    call(plus_one),
    call(plus_two),
    call(functools.partial(plus_one, 1)),
    call(functools.partial(plus_one, 2)),
    call(lambda worker: worker.rank + 1),
    call(lambda worker: worker.rank + 2),
    call(lambda worker: worker.tp_rank + 1),
    call(Settings),
    call(CYCLE),
    call(method=plus_one),
    call(method=lambda worker: worker),
    ExecuteModel(StepId(7), batch(), 3),
    ExecuteModel(StepId(8), batch(), 3),
    ExecuteModel(StepId(7), batch((1, 2, 4)), 3),
    ExecuteModel(StepId(7), {"opaque": [1, 2]}),
    SampleTokens(StepId(7)),
    SampleTokens(StepId(8)),
    SampleTokens(StepId(7), GrammarOutput(request_ids=["a"], bitmask=np.zeros((1, 4), np.int32))),
    SampleTokens(StepId(7), GrammarOutput(request_ids=["a"], bitmask=np.ones((1, 4), np.int32))),
]


def test_what_differs_has_another_digest():
    """Arguments, their types, methods, steps, payloads, masks: each counts (G53)."""
    digests = [digest(message) for message in DIFFERENT]
    assert len(set(digests)) == len(DIFFERENT)
    assert {len(one) for one in digests} == {DIGEST_SIZE}


def test_what_is_equal_has_one_digest():
    """Whatever the order of dicts and sets, the local number of the call, and where the parts lie."""
    pairs = [
        (call({"a": 1, "b": 2}), call({"b": 2, "a": 1})),
        (call({1: "a", 2: "b"}), call({2: "b", 1: "a"})),
        (call({"x", "y", "z"}), call({"z", "y", "x"})),
        (call("word" * 2, "word" * 2), call(*["".join(pair) for pair in [("word", "word")] * 2])),
        (call(1, number=1), call(1, number=99)),
        (ExecuteModel(StepId(7), batch()), ExecuteModel(StepId(7), batch(order=("b", "a")))),
        (call(np.arange(6).reshape(2, 3).T), call(np.ascontiguousarray(np.arange(6).reshape(2, 3).T))),
        (call(Options(1)), call(Options(1))),
    ]
    for one, other in pairs:
        assert digest(one) == digest(other), one


def test_of_tensors_only_shape_and_dtype_count():
    """Their content may be on a device, and each rank may have another part of it."""
    assert digest(call({"w": Tensor((2, 3), 1)})) == digest(call({"w": Tensor((2, 3), 2)}))


def test_of_long_arguments_length_and_ends_count():
    """G09: neither the digest nor the words take the time that fifty megabytes of them would."""
    for whole in (bytes(50_000_000), bytearray(50_000_000), "x" * 50_000_000):
        asked = [call(whole), call(value=whole), call(whole[:-1]), call(whole[1:-1])]
        began = time.thread_time()
        assert len({digest(one) for one in asked}) == 4
        assert len(describe(asked[0])) <= 240
        assert time.thread_time() - began < 0.05


def test_arguments_can_be_each_ranks_own():
    """As when each loads its own part of the weights: method and addressees count nevertheless."""
    mine, theirs = call({"w": Tensor((2, 3))}), call({"w": Tensor((4, 3))})
    assert digest(mine, arguments=False) == digest(theirs, arguments=False)
    assert digest(mine, arguments=False) != digest(call(method="sub"), arguments=False)


def test_who_is_to_answer_counts():
    """A call for one rank is not the call for another, nor that for one reply of all."""
    one = msgspec.structs.replace(call(1), reply_rank=0)
    assert len({digest(call(1), (0,)), digest(call(1), (1,)), digest(call(1), (0, 1)), digest(one, (0, 1))}) == 4


def test_another_process_has_the_same_digests():
    """With another seed of its hashes: neither sets nor addresses show through."""
    program = f"import runpy; print(runpy.run_path({str(Path(__file__))!r})['portable']())"
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=30
    )
    assert answer.stdout.strip() == portable()


def portable():
    """Digests of what another process makes as well."""
    values = [{"b", "a", "c"}, {1, "x"}, {"k": {"m", "n"}}, Settings("a", {(1, 2)}), Options(3), plus_one, np.arange(4)]
    named = [one for one in values if one is not plus_one]  # the module has another name there
    return " ".join(digest(call(value)).hex() for value in named if not isinstance(value, (Settings, Options)))


def containers(parts):
    return st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=2) | st.integers(), parts, max_size=3)


texts = st.text(max_size=4) | st.binary(max_size=4)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts


@given(st.recursive(leaves, containers, max_leaves=8))
def test_a_digest_is_that_of_the_value(value):
    """A copy that shares nothing with the value has its digest."""
    assert digest(call(value)) == digest(call(copy_of(value)))


def copy_of(value):
    if isinstance(value, dict):
        return {key: copy_of(part) for key, part in reversed(value.items())}
    return [copy_of(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (call(1, "a", x=[1, 2]), "add(1, 'a', x=[1, 2])"),
        (call({"w": Tensor((2, 3))}), "add({'w': <Tensor float32 [2, 3]>})"),
        (call(np.zeros((2, 3)), object(), Settings), "add(<ndarray float64 [2, 3]>, <object>, Settings)"),
        (call(b"few", bytes(1000)), r"add(b'few', <1000 bytes b'\x00\x00\x00\x00\x00\x00\x00\x00'...>)"),
        (call(method=plus_one), "plus_one()"),
        (ExecuteModel(StepId(7), batch(), 3), "ExecuteModel(step 7, 3 tokens)"),
        (ExecuteModel(StepId(7)), "ExecuteModel(step 7)"),
        (SampleTokens(StepId(7)), "SampleTokens(step 7)"),
        (Ping(), "Ping"),
    ],
)
def test_what_is_asked_for_can_be_read(message, text):
    """In an error that names both sides."""
    assert describe(message) == text


def test_a_description_is_short():
    """Whatever is passed."""
    assert len(describe(call("x" * 10_000, list(range(10_000)), *["y" * 100] * 50))) <= 240


def test_only_steps_have_a_step():
    """Calls have none."""
    assert [step_of(one) for one in (ExecuteModel(StepId(7)), SampleTokens(StepId(8)), call())] == [7, 8, None]
