"""Scheduler and block pool under any sequence of events, against a runner that believes nothing.

Requests come with prompts that begin alike, with several samples and with priorities; they are
aborted; steps are in flight meanwhile, with and without tokens that are not known yet; the KV
cache is lost, workers are lost, the prefix cache is reset. Whatever happens, no block is lost,
every position that is read holds the KV of exactly the tokens before it, and each request says
what it says alone.
"""

from __future__ import annotations

import itertools
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aexec.config import SchedulerConfig
from aexec.engine.blocks import BlockPool
from aexec.engine.request import Request, RequestStatus
from aexec.engine.samples import samples_of
from aexec.engine.scheduler import Scheduler
from aexec.errors import QueueFull
from aexec.messages.batch import PLACEHOLDER, KVTransfer, ModelRunnerOutput
from aexec.messages.request import SamplingParams

EOS = 2
SIZE = 4  # of a block
BUDGET = 9
DEPTH = 3


def token_after(tokens, seed):
    """A model: the next token depends on all before it and on the seed, and is sometimes EOS."""
    return (sum(tokens) * 31 + len(tokens) * 17 + seed % 97 * len(tokens)) % 13 + 2


def alone(prompt, seed, max_num_tokens):
    """What a request generates when nothing else runs."""
    tokens = list(prompt)
    while True:
        tokens.append(token_after(tokens, seed))
        if tokens[-1] == EOS or len(tokens) == max_num_tokens:
            return tokens[len(prompt) :]


class Runner:
    """Keeps, for each slot of the cache, the tokens up to the one whose KV it holds."""

    def __init__(self):
        self.known, self.tables, self.computed, self.seeds, self.kv = {}, {}, {}, {}, {}

    def run(self, batch):
        for name in batch.finished_request_ids:
            for facts in (self.known, self.tables, self.computed):
                facts.pop(name, None)  # whom it never heard of, if a step was lost on the way
        if batch.kv_transfer is not None:
            self.move(batch.kv_transfer)
        for new in batch.new:
            name = new.request_id
            assert name not in self.known
            self.known[name], self.tables[name] = list(new.token_ids), list(new.block_ids)
            self.computed[name], self.seeds[name] = new.num_computed_tokens, new.sampling.seed or 0
        columns = batch.cached
        for name, tokens, blocks, computed in zip(
            columns.request_ids,
            columns.new_token_ids,
            columns.new_block_ids,
            columns.num_computed_tokens,
            strict=True,
        ):
            assert self.computed[name] == computed
            self.tables[name] += blocks
            self.learn(name, tokens)
        for name, count in batch.num_scheduled_tokens.items():
            self.write(name, self.computed[name], self.computed[name] + count)
        sampled = {}
        for name, count in batch.num_scheduled_tokens.items():
            self.computed[name] += count
            self.read(name)
            if self.computed[name] == len(self.known[name]):
                sampled[name] = [token_after(self.known[name], self.seeds[name])]
        self.last = {**getattr(self, "last", {}), **{name: tokens[0] for name, tokens in sampled.items()}}
        return ModelRunnerOutput(request_ids=list(sampled), sampled_token_ids=list(sampled.values()))

    def learn(self, name, tokens):
        self.known[name] += [self.last[name] if token == PLACEHOLDER else token for token in tokens]

    def slot(self, name, position):
        return self.tables[name][position // SIZE], position % SIZE

    def write(self, name, start, end):
        assert end <= len(self.known[name])
        for position in range(start, end):
            self.kv[self.slot(name, position)] = tuple(self.known[name][: position + 1])

    def read(self, name):
        for position in range(self.computed[name]):
            block, offset = self.slot(name, position)
            assert block != 0
            assert self.kv.get((block, offset)) == tuple(self.known[name][: position + 1])

    def move(self, transfer):
        """Keeps nothing elsewhere."""
        raise AssertionError(transfer)


class Keeping(Runner):
    """Moves blocks out and in, as a connector has it."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def move(self, transfer):
        for block, block_hash in zip(transfer.store_block_ids, transfer.store_keys, strict=True):
            self.kept[block_hash] = [self.kv[block, offset] for offset in range(SIZE)]
        for block, block_hash in zip(transfer.load_block_ids, transfer.load_keys, strict=True):
            for offset, content in enumerate(self.kept[block_hash]):
                self.kv[block, offset] = content


class Connector:
    """Keeps all that is given away."""

    def __init__(self):
        self.kept, self.promised = {}, set()

    def match(self, hashes):
        return sum(1 for _ in itertools.takewhile(self.promised.__contains__, hashes))

    def plan(self, evicted, loads):
        self.promised.update(block_hash for _, block_hash in evicted)
        if not evicted and not loads:
            return None
        return KVTransfer(
            epoch=0,
            store_block_ids=[block for block, _ in evicted],
            store_keys=[block_hash for _, block_hash in evicted],
            load_block_ids=[block for block, _ in loads],
            load_keys=[block_hash for _, block_hash in loads],
        )

    def request_finished(self, request_id):
        """Nothing is kept by request."""

    def detach(self, *, afresh=False):
        self.promised.clear()


class Machine(RuleBasedStateMachine):
    """Any sequence of events."""

    overlaps = prefix_caching = keeps = False

    def __init__(self):
        super().__init__()
        self.seeds, self.numbers = itertools.count(1), itertools.count()
        self.requests: list[Request] = []
        self.prompts: dict[str, list[int]] = {}
        self.flights = deque()

    @initialize(num_blocks=st.integers(9, 24), num_seqs=st.integers(1, 5))
    def begin(self, num_blocks, num_seqs):
        config = SchedulerConfig(max_num_batched_tokens=BUDGET, max_num_seqs=num_seqs, max_num_waiting=12)
        connector = Connector() if self.keeps else None
        self.runner = Keeping(connector.kept) if connector else Runner()
        self.scheduler = Scheduler(
            config,
            BlockPool(num_blocks, SIZE),
            lambda: next(self.seeds),
            prefix_caching=self.prefix_caching,
            connector=connector,
            overlaps=self.overlaps,
        )

    @rule(
        family=st.integers(0, 1),
        num_prompt=st.integers(1, 22),
        max_tokens=st.integers(1, 9),
        n=st.integers(1, 3),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "x"]),
    )
    def add(self, family, num_prompt, max_tokens, n, priority, salt):
        name = f"r{next(self.numbers)}"
        prompt = [(family + place) % 7 + 3 for place in range(num_prompt)]
        sampling = SamplingParams(max_tokens=max_tokens, n=n, temperature=1.0)
        first = Request(
            name, prompt, num_prompt, sampling, frozenset([EOS]), num_prompt + max_tokens,
            priority=priority, cache_salt=salt,
        )  # fmt: skip
        samples = samples_of(first)
        try:
            self.scheduler.add(*samples)
        except QueueFull:
            assert self.scheduler.statistics().num_waiting + n > 12
        else:
            self.requests += samples
            self.prompts |= {sample.request_id: list(prompt) for sample in samples}

    @rule(admits=st.sampled_from([True, True, False]), most=st.sampled_from([None, None, 1, 2]))
    def launch(self, admits=True, most=None):
        if not self.scheduler.has_work or len(self.flights) == (DEPTH if self.overlaps else 2):
            return
        batch = self.scheduler.schedule(admits=admits, max_num_requests=most)
        assert batch.total_num_scheduled_tokens <= BUDGET
        assert most is None or len(batch.num_scheduled_tokens) <= most
        assert len(batch.num_scheduled_tokens) <= self.scheduler._config.max_num_seqs
        if not batch.num_scheduled_tokens and not batch.finished_request_ids:
            assert self.flights or not admits  # somebody waits for a token, or all would wait for ever
        self.flights.append((batch, self.runner.run(batch)))

    @precondition(lambda self: self.flights)
    @rule()
    def land(self):
        batch, output = self.flights.popleft()
        if batch.num_scheduled_tokens:
            self.scheduler.update(batch, output)

    @rule()
    def alone(self):
        """Only one request runs for a step."""
        live = [request for request in self.requests if not request.is_finished and request.is_ready]
        if live and not self.flights:
            batch = self.scheduler.schedule(alone=live[0].request_id)
            assert set(batch.num_scheduled_tokens) == {live[0].request_id}
            self.flights.append((batch, self.runner.run(batch)))

    @precondition(lambda self: self.flights)
    @rule()
    def fail(self):
        """The tokens of a step are lost, and with it the requests that it ran."""
        batch, _ = self.flights.popleft()
        for request_id in self.scheduler.lose(batch):
            self.scheduler.finish(request_id, RequestStatus.FINISHED_FAILED)

    @precondition(lambda self: not self.flights)
    @rule()
    def fail_to_launch(self):
        """The runners have not heard of a step."""
        if self.scheduler.has_work:
            for request_id in self.scheduler.lose(self.scheduler.schedule()):
                self.scheduler.finish(request_id, RequestStatus.FINISHED_FAILED)

    @rule(data=st.data())
    def abort(self, data):
        live = [request.request_id for request in self.requests if not request.is_finished]
        if live:
            self.scheduler.finish(data.draw(st.sampled_from(live)), RequestStatus.FINISHED_ABORTED)

    @rule()
    def reset(self):
        self.scheduler.reset_prefix_cache()

    @precondition(lambda self: not self.flights)
    @rule()
    def lose_kv(self):
        self.scheduler.preempt_all()
        self.runner.kv.clear()

    @rule()
    def lose_workers(self):
        self.flights.clear()
        self.scheduler.recover()
        kept = getattr(self.runner, "kept", None)
        self.runner = Runner() if kept is None else Keeping(kept)

    @invariant()
    def all_is_well(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler._blocks.check_integrity()
        running = [request.rank for request in self.scheduler._running.values()]
        assert running == sorted(running)
        for request in self.requests:
            output = request.token_ids[request.num_prompt_tokens :]
            prompt, seed = self.prompts[request.request_id], request.sampling.seed
            wanted = alone(prompt, seed, request.max_num_tokens)
            done = request.status in {RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH}
            assert output == (wanted if done else wanted[: len(output)])

    def teardown(self):
        """All that is left comes to its end."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not self.flights and not self.scheduler.has_work:
                break
            self.launch()
            if self.flights:
                self.land()
        self.all_is_well()
        assert all(request.is_finished for request in self.requests)
        statistics = self.scheduler.statistics()
        assert statistics.blocks.num_free_blocks == statistics.blocks.num_blocks
        assert statistics.num_finished == len(self.requests)


KINDS = {
    "plain": {},
    "overlapped": {"overlaps": True},
    "prefixes": {"prefix_caching": True},
    "prefixes, overlapped": {"prefix_caching": True, "overlaps": True},
    "connector, overlapped": {"prefix_caching": True, "overlaps": True, "keeps": True},
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_happens_loses_a_block_or_changes_a_token(kind):
    """Blocks are lent as counted, KV is read where it was written, and each request says what it says alone."""
    case = type("Kind", (Machine,), KINDS[kind]).TestCase
    most = 25 if settings().max_examples <= 100 else 2000  # the profile ci, or nightly
    case.settings = settings(max_examples=most, stateful_step_count=40, deadline=None)
    case("runTest").runTest()
