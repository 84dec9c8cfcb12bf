"""What the KV connectors of all ranks report with a step, as one report. Pure.

Only the output rank's result goes to the driver; of the other ranks' results it is the
connector's part that counts (OUT-05, OUT-06). A request has been sent or received once as
many ranks say so as have to, which may take several steps. What a step reports whose
driver has gone goes out with the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from aexec.messages.batch import KVConnectorOutput, ModelRunnerOutput
from aexec.messages.step import StepResult

__all__ = ("MAX_UNFINISHED", "KVOutputs")

#: Requests that some ranks have reported and others have not; beyond it the oldest is forgotten.
MAX_UNFINISHED = 16_384


class KVOutputs:
    """The reports of one generation of workers.

    Args:
        world_size: Ranks that have to report a request, unless a connector expects another number.
        output_rank: Whose result is the step's.
    """

    def __init__(self, world_size: int, output_rank: int) -> None:
        self._world_size, self._output_rank = world_size, output_rank
        self._sending: dict[str, set[int]] = {}
        self._receiving: dict[str, set[int]] = {}
        self._ready: KVConnectorOutput | None = None  # collected, and not handed out yet

    def __repr__(self) -> str:
        return f"<KVOutputs: {len(self._sending)} sendings and {len(self._receiving)} receivings are incomplete>"

    def result(self, answers: Mapping[int, Any]) -> Any:
        """The output rank's answer, with what all connectors report; anything else passes unchanged."""
        answer = answers[self._output_rank]
        if self._world_size == 1:
            return answer
        for other in answers.values():
            if _part(other) is not None:
                self.collect(answers)
                break
        if self._ready is None or not isinstance(answer, StepResult) or not _is_output(answer.output):
            return answer
        ready, self._ready = self._ready, None
        output = msgspec.structs.replace(answer.output, kv_connector_output=ready)
        return msgspec.structs.replace(answer, output=output)

    def collect(self, answers: Mapping[int, Any]) -> None:
        """Add up the connectors' parts of one step's answers; :meth:`result` hands them out."""
        parts = {rank: part for rank in sorted(answers) if (part := _part(answers[rank])) is not None}
        if not parts:
            return
        expected = max(part.expected_finished_count for part in parts.values()) or self._world_size
        before = [] if self._ready is None else [self._ready]
        reports = [*before, *parts.values()]
        self._ready = KVConnectorOutput(
            finished_sending=_union(part.finished_sending for part in before)
            | _complete(self._sending, {rank: part.finished_sending for rank, part in parts.items()}, expected),
            finished_recving=_union(part.finished_recving for part in before)
            | _complete(self._receiving, {rank: part.finished_recving for rank, part in parts.items()}, expected),
            invalid_block_ids=frozenset(block for part in reports for block in part.invalid_block_ids),
            dropped=frozenset(key for part in reports for key in part.dropped),
            events=tuple(event for part in reports for event in part.events),
            stats=_sums(part.stats for part in reports),
            expected_finished_count=expected,
        )


def _part(answer: Any) -> KVConnectorOutput | None:
    output = answer.output if isinstance(answer, StepResult) else None
    if isinstance(output, ModelRunnerOutput):
        return output.kv_connector_output
    return output if isinstance(output, KVConnectorOutput) else None


def _is_output(output: Any) -> bool:
    return isinstance(output, ModelRunnerOutput)


def _union(groups: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset(request for group in groups for request in group)


def _complete(seen: dict[str, set[int]], reported: Mapping[int, frozenset[str]], expected: int) -> frozenset[str]:
    """The requests that enough ranks have reported by now; a rank that says so twice counts once."""
    done: set[str] = set()
    for rank, requests in reported.items():
        for request in requests:
            ranks = seen.setdefault(request, set())
            ranks.add(rank)
            if len(ranks) >= expected:
                done.add(request)
                del seen[request]
    while len(seen) > MAX_UNFINISHED:
        del seen[next(iter(seen))]
    return frozenset(done)


def _sums(groups: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for group in groups:
        for name, value in group.items():
            total[name] = total.get(name, 0.0) + value
    return total
