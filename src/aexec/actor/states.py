"""The states that an actor declares for itself, and moves through: ``self.state = "ready"``.

They are not its life (starting, running, ...; see ``lifecycle``), which the system moves
it through, and which ``ref.statistics().state`` tells. Messages of a ``when=`` handler
wait for one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from aexec.actor.table import HandlerTable

if TYPE_CHECKING:
    from aexec.actor.actor import Actor

__all__ = ("ActorState", "check_states")


class ActorState:
    """The attribute ``state`` of actors that declare ``states``; they begin in the first one."""

    def __get__(self, actor: Actor | None, owner: type[Actor]) -> Any:
        if actor is None:
            return self
        return actor.__dict__.get("state", owner.states[0])

    def __set__(self, actor: Actor, state: str) -> None:
        known = type(actor).states
        if state not in known:
            raise ValueError(f"{type(actor).__name__} has no state {state!r}: its states are {', '.join(known)}")
        if state != actor.state:
            actor.__dict__["state"] = state
            actor.__entered__(state)


def check_states(actor: type, declared: object, table: HandlerTable) -> None:
    """Look whether a class declares the states that its handlers name.

    Raises:
        TypeError: It does not.
    """
    states = cast("tuple[str, ...]", declared)
    if not (isinstance(declared, tuple) and all(isinstance(state, str) for state in states)):
        raise TypeError(f'{actor.__name__}.states is {declared!r}: expected names, as in ("starting", "ready")')
    for handler in table:
        if unknown := sorted((handler.when or frozenset()) - set(states)):
            raise TypeError(
                f"{actor.__name__}.{handler.name} is for when={', '.join(map(repr, unknown))}, and the states of "
                f"{actor.__name__} are {', '.join(map(repr, states)) or 'not declared'}: "
                'declare them, as in states = ("starting", "ready")'
            )
