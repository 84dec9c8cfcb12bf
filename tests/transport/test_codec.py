from __future__ import annotations

import ast
import gc
import pickle
import subprocess
import sys
import threading
import types
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aexec.errors import MessageNotPortable
from aexec.messages import (
    CachedRequestData,
    ExecuteModel,
    ForwardLaunched,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SampleTokens,
    SamplingParams,
    SchedulerOutput,
    StepId,
    StepResult,
)  # fmt: skip
from aexec.messages.batch import KVConnectorOutput
from aexec.messages.control import CallMethod, Dump, Greet, Ping, Pong, Revoke, Shutdown
from aexec.messages.request import TokenLogprobs
from aexec.messages.step import PairedStep
from aexec.transport.callables import can_be_imported
from aexec.transport.codec import PICKLE, can_be_paired, decode, encode, paired
from aexec.transport.pickling import pickled

SCHEDULED = SchedulerOutput(
    new=[
        NewRequestData(
            request_id="a",
            token_ids=[1, 2, 3],
            num_prompt_tokens=3,
            block_ids=[4],
            num_computed_tokens=0,
            sampling=SamplingParams(seed=-(2**63), logit_bias={7: 1.5}, stop=("x",)),
            stop_token_ids=[9],
        )
    ],
    cached=CachedRequestData(request_ids=["b"], new_token_ids=[[5]], new_block_ids=[[]], num_computed_tokens=[8]),
    num_scheduled_tokens={"a": 3, "b": 1},
    finished_request_ids=["c"],
)
SAMPLED = ModelRunnerOutput(
    request_ids=["a"],
    sampled_token_ids=[[3]],
    logprobs=[TokenLogprobs(3, -0.5, 1, {3: -0.5, 4: float("-inf")}), None],
    prompt_logprobs={"a": [TokenLogprobs(1, -1.0, 2, {})]},
    errors={"z": "not a number"},
)
HOT = [
    ExecuteModel(StepId(1), SCHEDULED, 4),
    ExecuteModel(StepId(1)),
    ForwardLaunched(StepId(1)),
    StepResult(StepId(1), SAMPLED),
    StepResult(StepId(1), None),
    StepResult(StepId(1), [1, [2.5, None], "three", b"four", True]),
    StepResult(StepId(1), []),
    StepResult(StepId(1), 0),
    SampleTokens(StepId(1)),
    Ping(),
    Pong(rank=1, phase="idle", step=None, age=0.5),
    Greet(),
    Dump(),
    Revoke(4),
    Shutdown(2.5),
    CallMethod(call=1, method="echo", args=(1, [2]), kwargs={"x": (3,)}, after=7),
]
ODD = [
    ExecuteModel(StepId(1), {"anything": (1, 2)}, None),
    ExecuteModel(StepId(1), SchedulerOutput(num_scheduled_tokens={"a": np.int64(3)})),
    StepResult(StepId(1), (1, "a tuple")),
    StepResult(StepId(1), [1, (2, "a tuple within")]),
    StepResult(StepId(1), [2**70]),
    StepResult(StepId(1), {1: "a key that is no text"}),
    StepResult(StepId(1), ModelRunnerOutput(kv_connector_output=KVConnectorOutput(events=((1, 2),)))),
]


def there_and_back(value):
    encoded = encode(value)
    bulk = bytearray(encoded.num_bytes)
    for offset, buffer in encoded.buffers:
        bulk[offset : offset + len(buffer)] = buffer
    starts = [offset for offset, _ in encoded.buffers]
    pieces = len(starts) - len(encoded.lengths) + 1 if encoded.long_body else 1
    starts = starts[:1] + starts[pieces:] if encoded.lengths else []
    views = [memoryview(bulk)[start : start + length] for start, length in zip(starts, encoded.lengths, strict=True)]
    body = views.pop(0) if encoded.long_body else encoded.body
    return decode(encoded.codec, body, views)


@pytest.mark.parametrize("message", HOT, ids=lambda message: type(message).__name__)
def test_the_messages_of_a_step_are_structs_on_the_way(message):
    """They arrive equal, of the same type, and pickle has no part in it but for a call's arguments."""
    assert encode(message).codec != PICKLE
    assert there_and_back(message) == message
    assert type(there_and_back(message)) is type(message)


@pytest.mark.parametrize("message", ODD, ids=repr)
def test_what_a_struct_would_bend_is_left_to_pickle(message):
    """A payload of another kind arrives as it was, tuples and numpy's numbers too."""
    assert pickle.PROTO + b"\x05" in encode(message).body
    assert there_and_back(message) == message


@pytest.mark.parametrize("launch", HOT[:2])
@pytest.mark.parametrize("sampling", [1, 127, 128, 2**40])
def test_a_launch_becomes_both_halves_of_its_step(launch, sampling):
    """Without another look at it, whatever the call of the second half is."""
    encoded = encode(launch)
    assert can_be_paired(launch, encoded)
    assert decode(encoded.codec, paired(encoded.body, sampling), []) == PairedStep(launch, sampling)
    assert there_and_back(launch) == launch


@pytest.mark.parametrize("launch", ODD[:2])
def test_what_the_other_end_may_be_unable_to_read_stays_a_launch(launch):
    """A payload of a user's, or one that went by pickle: each half of such a step has an answer of its own."""
    assert not can_be_paired(launch, encode(launch))


@pytest.mark.parametrize("rows", [1, 500])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_bitmask_arrives_bit_by_bit(rows, order):
    """A small one in the body, a large one out of band, an odd one by pickle; it may be written to."""
    bitmask = np.asarray(np.arange(rows * 40, dtype=np.int32).reshape(rows, 40), order=order)
    sent = SampleTokens(StepId(3), GrammarOutput(request_ids=["a"] * rows, bitmask=bitmask))
    encoded = encode(sent)
    assert bool(encoded.lengths) == (bitmask.nbytes > 16384)
    got = there_and_back(sent)
    assert got.step == 3
    assert got.grammar.request_ids == sent.grammar.request_ids
    assert np.array_equal(got.grammar.bitmask, bitmask)
    assert got.grammar.bitmask.dtype == np.int32
    assert got.grammar.bitmask.flags.writeable


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
        lambda inner: (
            st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) | st.sets(st.text())
        ),
    )
)
def test_plain_data_arrives_equal(value):
    """Whatever it is."""
    got = there_and_back(value)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize("size", [0, 16_384, 16_385, 65_536, 400_000])
@pytest.mark.parametrize("kind", [bytes, bytearray, lambda data: data.decode("latin-1")])
def test_long_bytes_and_texts_arrive_equal(size, kind):
    """Also several of them, and the stream in pieces."""
    value = [kind(bytes(range(256)) * (size // 256) + b"x" * (size % 256))] * 2 + [{"and": 1}]
    assert there_and_back(value) == value


def test_a_large_array_is_not_copied_by_encoding():
    """It is the very memory of the sender."""
    array = np.zeros(100_000, np.uint8)
    encoded = encode({"a": array})
    array[3] = 7
    ((_, buffer),) = encoded.buffers
    assert buffer[3] == 7
    assert repr(encoded).startswith("<Encoded dict: ")


torch = pytest.importorskip("torch")
TENSORS = {
    "bf16": torch.arange(30_000).to(torch.bfloat16),
    "fp8": torch.arange(30_000).to(torch.float8_e4m3fn),
    "bool": torch.arange(30_000) % 3 == 0,
    "complex": torch.randn(9_000, dtype=torch.complex64).conj(),
    "0-dim": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "small": torch.arange(6).reshape(2, 3),
    "strided": torch.randn(300, 400)[::2, 3::7],
    "transposed": torch.randn(300, 400).T,
    "expanded": torch.randn(1, 400).expand(300, 400),
    "leaf": torch.randn(200, 200, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.randn(200, 200)),
    "sparse": torch.eye(200).to_sparse(),
    "meta": torch.empty(5000, 3, device="meta"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_arrive_bit_by_bit(name):
    """Of any type, shape and layout, of the same class, and with the same wish for a gradient."""
    tensor = TENSORS[name]
    got = there_and_back({"t": tensor})["t"]
    assert type(got) is type(tensor)
    assert (got.dtype, got.shape, got.requires_grad, got.device) == (
        tensor.dtype, tensor.shape, tensor.requires_grad, tensor.device,
    )  # fmt: skip
    if name != "meta":
        ours, theirs = (t.detach().to_dense().resolve_conj().contiguous().reshape(-1) for t in (tensor, got))
        assert ours.view(torch.uint8).tolist() == theirs.view(torch.uint8).tolist()


def test_a_large_tensor_goes_out_of_band_and_may_be_written_to():
    """Torch itself would copy it into the stream; the receiver's is its own."""
    tensor = torch.zeros(30_000)
    assert len(encode([tensor]).buffers) == 1
    (got,) = there_and_back([tensor])
    got += 1
    assert got.sum() == 30_000


def test_what_cannot_travel_is_named():
    """The part, its type, and what pickle says."""
    with pytest.raises(MessageNotPortable, match=r"its args\[1\]\['lock'\] is a lock") as caught:
        encode(CallMethod(call=1, method="f", args=(1, {"lock": threading.Lock()})))
    assert caught.value.what == "CallMethod"


def test_callables_that_nobody_can_import_travel_by_value():
    """Lambdas, closures, local classes, and all that a made-up module holds."""
    made_up = types.ModuleType("made_up_by_a_test")
    sys.modules[made_up.__name__] = made_up
    try:
        exec("def twice(x):\n    return 2 * x\nclass Box:\n    size = 3", vars(made_up))
        sent = pickled([made_up.twice, made_up.Box, lambda x: x + 1, ast.parse])
    finally:
        del sys.modules[made_up.__name__]
    twice, box, increment, parse = pickle.loads(sent)
    assert (twice(4), box.size, increment(1), parse) == (8, 3, 2, ast.parse)


def test_a_script_may_send_what_it_defines():
    """The other process never runs its ``__main__``."""
    script = "import sys\nfrom aexec.transport.pickling import pickled\ndef f(x):\n    return x + OFFSET\nOFFSET = 40\n"
    script += "class C:\n    name = 'c'\nsys.stdout.buffer.write(pickled((f, C, C())))"
    sent = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=50).stdout
    function, kind, instance = pickle.loads(sent)
    assert (function(2), kind.name, type(instance)) == (42, "c", kind)


@pytest.mark.parametrize(
    "name", ["os", "posixpath", "builtins", "numpy", "numpy.linalg", "aexec.messages.step", "torch._C"]
)
def test_modules_that_a_fresh_interpreter_finds(name):
    """What they hold travels by name."""
    __import__(name)
    assert can_be_imported(name)


@pytest.mark.parametrize("name", ["__main__", "no.such.module", __name__ + "_not"])
def test_modules_that_it_does_not_find(name):
    """What they hold travels by value."""
    assert not can_be_imported(name)


def test_a_module_of_another_file_is_not_the_same(monkeypatch):
    """A name that leads elsewhere in a fresh interpreter is no name to send."""
    impostor = types.ModuleType("this")
    impostor.__file__ = "/nowhere/this.py"
    monkeypatch.setitem(sys.modules, "this", impostor)
    assert not can_be_imported("this")


def test_torch_is_not_imported_for_data():
    """Sending arrays and messages leaves it alone."""
    script = "import sys, numpy\nfrom aexec.transport.codec import encode\nencode([numpy.zeros(9999)])\n"
    script += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=50)


def test_an_unknown_codec_is_an_error():
    """It does not pass for a value."""
    with pytest.raises(ValueError, match="codec 9 is unknown"):
        decode(9, b"", [])
    with pytest.raises(ValueError, match="codec 200 is unknown"):
        decode(200, b"", [])


def test_encoding_keeps_nothing():
    """No cycle holds what was sent until somebody collects garbage."""
    array = np.zeros(50_000)
    watch = weakref.ref(array)
    gc.disable()
    try:
        encode({"a": array, "f": lambda: 1})
        encode(array)
        del array
        assert watch() is None
    finally:
        gc.enable()


def test_a_function_by_value_keeps_the_name_of_its_file():
    """A traceback in the other process shows where the line is."""
    space = {"__name__": "made up"}
    exec(compile("def f():\n    raise ValueError\n", "my_program.py", "exec"), space)
    found = pickle.loads(pickled(space["f"]))
    assert found.__code__.co_filename == "my_program.py"
