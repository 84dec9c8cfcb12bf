"""Values of any kind: pickle 5, with what is large beside the stream instead of in it.

* Buffers of more than 16 KB (arrays, and tensors of the CPU, which torch itself would put
  into the stream) go out of band: nothing copies them here.
* Functions and classes travel by name where the other end can import them, else by value
  (cloudpickle).

torch is not imported: whoever sends a tensor has it loaded, whoever receives one needs it.
"""

from __future__ import annotations

import copyreg
import functools
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import cloudpickle  # pyright: ignore[reportMissingTypeStubs] - it ships no types
import numpy as np

from aexec.transport.callables import can_be_imported
from aexec.transport.frames import INLINE

__all__ = ("dumps", "is_plain", "loads", "pickled")

_PLAIN = frozenset((type(None), bool, int, float))
_TEXT = frozenset((str, bytes))
_type_of: Callable[[Any], type[object]] = type
_FEW = 16  # values: more of them are left to the pickler, which takes as long as looking at them


def dumps(value: Any) -> tuple[list[bytes], list[memoryview]]:
    """Pickle a value: the stream in pieces (large texts and bytes are pieces as they are), and its buffers.

    Raises:
        Exception: Whatever its parts raise.
    """
    if _is_simple(value):
        return [pickle.dumps(value, 5)], []
    _Pickler.look_around()
    pieces, buffers = _Pieces(), list[memoryview]()
    _Pickler(pieces, 5, buffer_callback=_beside(buffers)).dump(value)
    if len(pieces) > 1:
        return [piece if type(piece) is bytes else bytes(piece) for piece in pieces], buffers
    return pieces, buffers


def pickled(value: Any) -> bytes:
    """Pickle a value into one piece, for ``pickle.loads``.

    Raises:
        Exception: Whatever its parts raise.
    """
    pieces = _Pieces()
    _Pickler.look_around()
    _Pickler(pieces, 5).dump(value)
    return b"".join(pieces)


def loads(stream: Any, buffers: Sequence[Any]) -> Any:
    """Make the value; its buffers stay where they are."""
    return pickle.loads(stream, buffers=buffers)  # noqa: S301 - from a process of ours, see the package


def _is_simple(value: Any, depth: int = 3) -> bool:
    """True for what needs no pickler of ours, which takes longer to make than a small message to pickle."""
    kind = _type_of(value)
    if kind in _PLAIN:
        return True
    if kind in _TEXT:
        return len(value) <= INLINE
    if (kind is not tuple and kind is not list) or len(value) > _FEW or not depth:
        return False
    for part in value:  # noqa: SIM110 - a generator takes longer than all of this
        if not _is_simple(part, depth - 1):
            return False
    return True


def is_plain(value: Any, depth: int = 3) -> bool:
    """True for a few values of the types that msgpack knows exactly; no tuples, which it takes for lists."""
    kind = _type_of(value)
    if kind in _PLAIN:
        return True
    if kind in _TEXT:
        return len(value) <= INLINE
    if kind is not list or len(value) > _FEW or not depth:
        return False
    for part in value:  # noqa: SIM110 - as above
        if not is_plain(part, depth - 1):
            return False
    return True


class _Pieces(list[bytes]):
    """A file that keeps what it is given."""

    write: Any = list[Any].append  # called by pickle for each piece: no method of ours in between


def _beside(buffers: list[memoryview]) -> Callable[[pickle.PickleBuffer], bool]:
    """Keeps large buffers out of the stream.

    It does not know the pickler, which has to go with its last use: it holds whatever it
    has pickled, views of a peer's memory among it.
    """

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes <= INLINE:
            return True
        buffers.append(raw)
        return False

    return is_small


_cloudpickle: Any = cloudpickle
_reducer_override: Any = _cloudpickle.Pickler.reducer_override
_code_reducer: Any = _cloudpickle.Pickler.dispatch_table[types.CodeType]
_NO_FILE = "<dynamic-code>"  # cloudpickle's name of every file


class _Pickler(_cloudpickle.Pickler):  # type: ignore[misc]  # pyright: ignore[reportUntypedBaseClass] - no types there
    """By value what cannot be imported elsewhere, and CPU tensors out of band."""

    dispatch_table: ClassVar[dict[type, Callable[[Any], Any]]] = {}
    _seen: ClassVar[tuple[int, bool]] = (-1, False)

    __init__: Any = pickle.Pickler.__init__  # not cloudpickle's, which takes longer than a small message does
    dump: Any = pickle.Pickler.dump

    @functools.cached_property
    def globals_ref(self) -> dict[int, dict[str, Any]]:
        """What cloudpickle keeps while it takes functions apart."""
        return {}

    @classmethod
    def look_around(cls) -> None:
        """Take up reducers that were registered since, and torch, if it was loaded since."""
        now = (len(copyreg.dispatch_table), "torch" in sys.modules)
        if now != cls._seen:
            reducers: dict[type, Callable[[Any], Any]] = {
                **copyreg.dispatch_table,
                **_cloudpickle.Pickler.dispatch_table,
            }
            tensor = getattr(sys.modules.get("torch"), "Tensor", None)
            if tensor is not None:  # torch may be half imported on another thread
                reducers[tensor] = _reduce_tensor
                cls._seen = now
            elif not now[1]:
                cls._seen = now
            reducers[types.CodeType] = _reduce_code
            cls.dispatch_table = reducers

    def reducer_override(self, obj: Any) -> Any:
        """Asked for each object that is not of a built-in type."""
        if not isinstance(obj, type | types.FunctionType):
            return NotImplemented
        module = sys.modules.get(getattr(obj, "__module__", None) or "")
        if module is None or module.__name__ == "__main__" or can_be_imported(module.__name__):
            return _reducer_override(self, obj)
        return self._by_value(obj, module)

    def _by_value(self, obj: Any, module: types.ModuleType) -> Any:
        if module.__name__ in _cloudpickle.list_registry_pickle_by_value():
            return _reducer_override(self, obj)
        _cloudpickle.register_pickle_by_value(module)
        try:
            return _reducer_override(self, obj)
        finally:
            _cloudpickle.unregister_pickle_by_value(module)


def _reduce_code(code: types.CodeType) -> Any:
    """As cloudpickle does, but with the file that it leaves out: tracebacks show it."""
    make, parts = _code_reducer(code)
    return make, tuple(code.co_filename if _is_no_file(part) else part for part in parts)


def _is_no_file(part: Any) -> bool:
    return isinstance(part, str) and part == _NO_FILE


def _reduce_tensor(tensor: Any) -> Any:
    import torch

    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not plain or tensor.requires_grad or tensor.__dict__ or tensor.numel() == 0:
        return tensor.__reduce_ex__(5)
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _make_tensor, (pickle.PickleBuffer(flat), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _make_tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    if memoryview(buffer).readonly:  # by a way of its own, as from a cache of somebody's
        buffer = np.array(buffer)
    return torch.frombuffer(buffer, dtype=getattr(torch, dtype)).view(shape)
