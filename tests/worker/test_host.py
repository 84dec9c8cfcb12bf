from __future__ import annotations

import pickle

import pytest

from aexec.config import ExecutorConfig
from aexec.errors import ConfigError, UnknownMethod
from aexec.messages.step import ExecuteModel
from aexec.worker.context import place_worker
from aexec.worker.host import WorkerHost


class Plain:
    """What a user brings: no base class, whatever methods it likes."""

    scale = 2

    def __init__(self, context, *, offset=0):
        self.context, self.offset = context, offset

    def add(self, value):
        return value + self.offset

    async def wait(self):
        return "waited"

    @staticmethod
    def fixed():
        return 1

    @property
    def expensive(self):
        raise AssertionError("a property was evaluated")

    def execute_model(self, step):
        return step.payload

    def sample_tokens(self, step_id, grammar):
        return (step_id, grammar)


class Delegating(Plain):
    def __getattr__(self, name):
        if name == "made_up":
            return lambda: "made up"
        raise AttributeError(name)


class AsyncSteps:
    def __init__(self, context):
        pass

    async def execute_model(self, step):
        pass


def context_for(worker_cls, rank=0, **settings):
    config = ExecutorConfig(worker_cls=worker_cls, **settings)
    return place_worker(rank, config, generation=1, local_rank=rank, node_id="here", node_ip="127.0.0.1")


def construct(worker_cls=Plain, **settings):
    host = WorkerHost(context_for(worker_cls, **settings))
    host.prepare()
    host.construct()
    return host


def test_a_worker_is_made_from_its_context_and_kwargs():
    """Any class will do."""
    host = construct(worker_kwargs={"offset": 5})
    assert host.target("add").call(1) == 6
    assert repr(host) == "<WorkerHost rank 0: Plain>"


def test_the_class_may_be_given_by_name():
    """As ``package.module:Class``."""
    host = WorkerHost(context_for("collections:OrderedDict"))
    with pytest.raises(ConfigError, match="worker_cls is 'collections:namedtuple': expected a class"):
        construct("collections:namedtuple")
    assert repr(host) == "<WorkerHost rank 0: not constructed>"


def test_wrong_arguments_name_the_signature():
    """G52: before the constructor runs, with what was given and what is wanted."""
    with pytest.raises(ConfigError) as caught:
        construct(worker_kwargs={"ofset": 5})
    assert "got an unexpected keyword argument 'ofset'" in str(caught.value)
    assert "(context, ofset=5)" in str(caught.value)
    assert "Plain(context, *, offset=0)" in str(caught.value)


def test_methods_are_found_without_running_anything():
    """Properties stay unread; static methods count; attributes do not."""
    host = construct()
    assert host.methods == {
        "add": False,
        "wait": True,
        "fixed": False,
        "execute_model": False,
        "sample_tokens": False,
    }
    hello = host.hello()
    assert (hello.worker, hello.dynamic, hello.rank) == ("Plain", False, 0)


def test_an_unknown_method_is_named_with_those_there_are():
    """Dunder methods are nobody's business."""
    host = construct()
    with pytest.raises(UnknownMethod, match="Plain has no method 'nope'; it has add, "):
        host.target("nope")
    with pytest.raises(UnknownMethod):
        host.target("scale")
    with pytest.raises(UnknownMethod):
        host.target("__init__")


@pytest.mark.parametrize("name", ["scale", "offset"])
def test_an_attribute_is_no_method_and_the_error_says_how_to_read_it(name):
    """Whether it is the class's or the object's; the executor is told of them, and of properties, which do not run."""
    host = construct()
    with pytest.raises(
        UnknownMethod, match=f"no method .{name}. but an attribute, which `lambda worker: worker.{name}`"
    ):
        host.target(name)
    assert host.hello().attributes == ("context", "expensive", "offset", "scale")
    with pytest.raises(UnknownMethod, match="no method 'nope'; it has add") as caught:
        host.target("nope")
    assert not pickle.loads(pickle.dumps(caught.value)).is_attribute


def test_methods_may_be_made_up_by_the_worker():
    """A wrapper that delegates works, and says that its list is not all."""
    host = construct(Delegating)
    assert host.hello().dynamic
    assert host.target("made_up").call() == "made up"


def test_a_phase_is_named_as_an_author_of_workers_would():
    """The class whose constructor it was; before there is one, its import."""
    host = WorkerHost(context_for(Plain))
    assert (host.at("worker_init"), host.at("__init__")) == ("worker_init", "import")
    host.construct()
    assert host.at("__init__") == "__init__ of Plain"


def test_a_callable_takes_the_worker_first():
    """Then its own arguments."""

    async def later(worker, value):
        return worker.scale * value

    host = construct()
    target = host.target(lambda worker, value: worker.scale * value)
    assert (target.call(4), target.is_async) == (8, False)
    assert host.target(later).is_async


def test_worker_init_runs_before_the_class_is_imported():
    """G57: registrations and patches come first, in order."""
    calls = []
    host = WorkerHost(context_for("no.such.module:Worker", worker_init=[lambda: calls.append(1), "gc:collect"]))
    host.prepare()
    assert calls == [1]
    with pytest.raises(ConfigError, match="no module 'no'"):
        host.construct()


@pytest.mark.parametrize("entry", [3, Plain.wait])
def test_worker_init_takes_plain_functions(entry):
    """Anything else is refused by name."""
    with pytest.raises(ConfigError, match=r"worker_init has .*: expected a plain function"):
        construct(worker_init=[entry])


def test_step_methods_are_plain():
    """They run on the compute thread, so that an async one is refused at the start."""
    with pytest.raises(ConfigError, match=r"AsyncSteps\.execute_model is async: steps run on the compute thread"):
        construct(AsyncSteps)


def test_the_worker_gets_the_step_message():
    """Its payload is opaque to all before it."""
    host = construct()
    payload = object()
    assert host.execute_model(ExecuteModel(1, payload)) is payload
    assert host.sample_tokens(1, None) == (1, None)
    assert host.samples


def test_only_the_output_rank_sends_its_output():
    """What the others return stays with them."""
    from aexec.config import ParallelConfig

    host = construct(parallel=ParallelConfig(2, 2))
    assert host.context.output_rank == 2
    assert host.sample_tokens(1, None) is None
    assert host.execute_model(ExecuteModel(1, "own")) is None


def test_of_other_ranks_the_connectors_part_leaves():
    """OUT-06: and nothing else of their output."""
    from aexec.config import ParallelConfig
    from aexec.messages.batch import KVConnectorOutput, ModelRunnerOutput

    report = KVConnectorOutput(finished_sending=frozenset({"r"}))
    output = ModelRunnerOutput(request_ids=["r"], kv_connector_output=report)
    host = construct(parallel=ParallelConfig(2, 2))
    assert host.execute_model(ExecuteModel(1, output)) is report
    assert construct().execute_model(ExecuteModel(1, output)) is output
