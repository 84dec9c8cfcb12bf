"""One instance of a worker class, whoever wrote it, and every way to call into it.

The host runs no thread and no loop. Its methods block and belong on the compute thread;
what it knows of the class (:meth:`WorkerHost.hello`) may be read anywhere once
:meth:`WorkerHost.construct` has returned.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Container
from functools import partial
from typing import Any, NamedTuple

from aexec.errors import ConfigError, UnknownMethod
from aexec.messages.batch import GrammarOutput, ModelRunnerOutput
from aexec.messages.control import CallMethod, Hello
from aexec.messages.step import ExecuteModel, StepId
from aexec.worker.context import WorkerContext
from aexec.worker.extend import extended
from aexec.worker.names import load, name_of

__all__ = ("HOOKS", "Target", "WorkerHost")

#: Called in this order, once, each if the class has it; ``shutdown`` follows at the end.
HOOKS = ("init_device", "load_model", "determine_available_memory", "initialize_cache", "compile_or_warm_up")


class Target(NamedTuple):
    """What a control call calls.

    Attributes:
        name: For phases, logs and errors.
        call: The bound method, or the callable with the worker bound.
        is_async: True for ``async def``: it belongs on the loop.
    """

    name: str
    call: Callable[..., Any]
    is_async: bool


class WorkerHost:
    """Holds the worker object of one rank.

    Args:
        context: The rank's place; ``context.config`` names the class.
    """

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.methods: dict[str, bool] = {}
        self.worker_name = ""
        self.samples = self.dynamic = False
        self.wants_inference_mode = True
        self._worker: Any = None
        self._is_output_rank = context.rank == context.output_rank

    def __repr__(self) -> str:
        return f"<WorkerHost rank {self.context.rank}: {self.worker_name or 'not constructed'}>"

    def at(self, phase: str) -> str:
        """A phase in the words of an error, as in ``__init__ of MyWorker``."""
        if phase != "__init__":
            return phase
        return f"__init__ of {self.worker_name}" if self.worker_name else "import"

    def prepare(self) -> None:
        """Run the ``worker_init`` functions, in order."""
        for entry in self.context.config.worker_init:
            function = load(entry, "worker_init") if isinstance(entry, str) else entry
            if not callable(function) or inspect.iscoroutinefunction(function):
                raise ConfigError(f"worker_init has {entry!r}: expected a plain function or 'package.module:function'")
            function()

    def construct(self) -> None:
        """Import the worker class and make the worker.

        Raises:
            ConfigError: The name leads to no class, an extension clashes, the arguments do
                not fit its signature, or its step methods are ``async def``.
        """
        config = self.context.config
        named = config.worker_cls
        worker_cls: Any = load(named, "worker_cls") if isinstance(named, str) else named
        if not _is_class(worker_cls):
            raise ConfigError(f"worker_cls is {named!r}: expected a class, or 'package.module:Class'")
        worker_cls = extended(worker_cls, config.worker_extension)
        self.worker_name = name_of(worker_cls)
        self.wants_inference_mode = bool(getattr(worker_cls, "inference_mode", True))
        _check_arguments(worker_cls, self.context, config.worker_kwargs)
        self._worker = worker_cls(self.context, **config.worker_kwargs)
        self.methods = _methods(self._worker)
        self.dynamic = hasattr(worker_cls, "__getattr__")
        for name in ("execute_model", "sample_tokens"):
            if self.methods.get(name):
                raise ConfigError(f"{self.worker_name}.{name} is async: steps run on the compute thread, use plain def")
        self.samples = callable(getattr(self._worker, "sample_tokens", None))

    def hello(self) -> Hello:
        """What the executor has to know of the worker."""
        return Hello(
            rank=self.context.rank,
            pid=os.getpid(),
            node=self.context.node_id,
            worker=self.worker_name,
            methods=self.methods,
            dynamic=self.dynamic,
            attributes=_attributes(self._worker, self.methods),
        )

    def target(self, method: str | Callable[..., Any]) -> Target:
        """Find a method by name, or bind a callable to the worker.

        Raises:
            UnknownMethod: The worker has no such method.
        """
        if not isinstance(method, str):
            return Target(name_of(method), partial(method, self._worker), inspect.iscoroutinefunction(method))
        found = None if method.startswith("__") else getattr(self._worker, method, None)
        if not callable(found):
            hello = self.hello()
            raise UnknownMethod(method, self.worker_name, hello.public_methods, method in hello.attributes)
        return Target(method, found, inspect.iscoroutinefunction(found))

    def target_of(self, message: CallMethod) -> Target:
        """What a control call calls; where its reply is not wanted there is none.

        Raises:
            UnknownMethod: The worker has no such method.
        """
        target = self.target(message.method)
        if message.reply_rank in (None, self.context.rank):
            return target
        return target._replace(call=partial(_await_only if target.is_async else _call_only, target.call))

    def execute_model(self, step: ExecuteModel) -> Any:
        """The worker's forward pass; what it returns goes as :meth:`sample_tokens` says."""
        found = getattr(self._worker, "execute_model", None)  # as it is now, since others may replace it
        output = found(step) if callable(found) else self.target("execute_model").call(step)
        return output if output is None or self._is_output_rank else _connector_part(output)

    def sample_tokens(self, step: StepId, grammar: GrammarOutput | None) -> Any:
        """The worker's sampling; of other ranks than the output rank only the KV connector's part leaves."""
        found = getattr(self._worker, "sample_tokens", None)
        output = found(step, grammar) if callable(found) else self.target("sample_tokens").call(step, grammar)
        return output if output is None or self._is_output_rank else _connector_part(output)

    def shutdown(self) -> None:
        """The worker's last hook, if it has one."""
        if "shutdown" in self.methods:
            self._worker.shutdown()


def _connector_part(output: Any) -> Any:
    return output.kv_connector_output if isinstance(output, ModelRunnerOutput) else None


def _call_only(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    value = call(*args, **kwargs)
    return _await_only(lambda: value) if inspect.isawaitable(value) else None


async def _await_only(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    await call(*args, **kwargs)


def _is_class(value: object) -> bool:
    return isinstance(value, type)


def _check_arguments(worker_cls: type[Any], context: WorkerContext, kwargs: Any) -> None:
    try:
        signature = inspect.signature(worker_cls)
    except ValueError:
        return  # a class written in C tells nothing: its constructor will
    try:
        signature.bind(context, **kwargs)
    except TypeError as error:
        wanted = str(signature).replace("'", "")  # annotations are texts here
        given = ", ".join(("context", *(f"{name}={value!r}" for name, value in kwargs.items())))
        raise ConfigError(
            f"worker_kwargs do not fit {worker_cls.__qualname__}: {error}. It was to be called with ({given}), "
            f"its signature is {worker_cls.__name__}{wanted}"
        ) from error


def _methods(worker: Any) -> dict[str, bool]:
    """Names of its methods, True for ``async def``; nothing is evaluated, no property runs."""
    found: dict[str, bool] = {}
    for name in dir(worker):
        static = inspect.getattr_static(worker, name, None)
        function: Any = getattr(static, "__func__", static)  # of static and class methods
        if callable(function) and not name.startswith("__"):
            found[name] = inspect.iscoroutinefunction(function)
    return found


def _attributes(worker: Any, methods: Container[str]) -> tuple[str, ...]:
    """Names of what it has besides methods; no property runs."""
    return tuple(name for name in dir(worker) if not name.startswith("_") and name not in methods)
