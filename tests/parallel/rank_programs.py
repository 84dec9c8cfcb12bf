"""What ranks do in tests: a process that loads torch once and then forks ranks, as often as it is asked to.

It reads lines such as ``sums 2 2 1`` (a function; tensor, pipeline and data parallel size) and answers each with a line.
Further words are the address at which the ranks meet, instead of a file, and ``0`` or ``1`` for ``USE_LIBUV``.

Every function takes a rank's open groups and returns something for JSON.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import torch
import torch.distributed as dist

from aexec.errors import AexecError, PeerLost
from aexec.parallel.groups import open_groups
from aexec.parallel.layout import RankLayout
from aexec.parallel.rendezvous import PortReservation
from aexec.parallel.transfer import TensorLink

TIMEOUT = 20.0


def hidden(step, num_tokens, dtype=torch.float32):
    """Hidden states that tell their step."""
    return torch.arange(num_tokens * 8, dtype=dtype).reshape(1, num_tokens, 8) + 1000 * step


def blank(num_tokens, dtype=torch.float32):
    return torch.zeros((1, num_tokens, 8), dtype=dtype)


def sums(groups):
    """Whom each group reaches."""
    found = {}
    for name, group in (("world", None), ("tensor", groups.tensor), ("pipeline", groups.pipeline)):
        if name == "world" or group is not None:
            total = torch.tensor([10.0**groups.rank])
            dist.all_reduce(total, group=group)
            found[name] = int(total)
    return {**found, "repr": repr(groups)}


def hand_on(groups):
    """Five steps through all stages, the first stage as far ahead as it may be."""
    link, layout = TensorLink(groups), groups.layout
    stage, seen = layout.place(groups.rank).pp_rank, []
    for step in range(1, 6):
        num_tokens = 3 * step
        states = link.receive(step, blank(num_tokens)) if stage else hidden(step, num_tokens)
        seen.append(torch.equal(states, hidden(step, num_tokens) + stage))
        if stage < layout.pipeline - 1:
            link.send(step, states + 1)
        if groups.tensor is not None:  # a collective in between, on the other group
            dist.all_reduce(torch.ones(1), group=groups.tensor)
    dist.barrier()
    return {"seen": seen, "sent": link.statistics().sent, "received": link.statistics().received}


def keep_dtype(groups):
    """bfloat16 as it is, and views that are not contiguous."""
    link = TensorLink(groups)
    states = hidden(1, 4, torch.bfloat16)
    if groups.rank == 0:
        link.send(1, states.transpose(1, 2).contiguous().transpose(1, 2))
        dist.barrier()
        return True
    found = torch.equal(link.receive(1, blank(4, torch.bfloat16)), states)
    dist.barrier()
    return found


def run_ahead(groups):
    """How far the first stage gets while the second one takes nothing: when it was through, and when that one began."""
    link = TensorLink(groups)
    if groups.rank == 0:
        for step in range(1, 5):
            link.send(step, hidden(step, 2))  # the fourth waits for the first to be taken
        answer = {"through": time.monotonic(), "in_flight": link.statistics().in_flight}
        dist.barrier()
        return answer
    time.sleep(0.5)
    answer = {"began": time.monotonic()}
    answer["received"] = [int(link.receive(step, blank(2))[0, 0, 0]) for step in range(1, 5)]
    dist.barrier()
    return answer


def fail_one_step(groups):
    """The first stage fails at step 1 and runs step 2."""
    link = TensorLink(groups)
    if groups.rank == 0:
        link.send_failure(1, blank(3))
        link.send(2, hidden(2, 3))
        dist.barrier()
        return None
    try:
        link.receive(1, blank(3))
    except PeerLost as error:
        text = str(error)
    second = torch.equal(link.receive(2, blank(3)), hidden(2, 3))
    dist.barrier()
    return [text, second]


def lose_a_peer(groups):
    """Rank 0 is killed while rank 1 waits for it."""
    link = TensorLink(groups)
    if groups.rank == 0:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        link.receive(7, blank(3))
    except PeerLost as error:
        return {"text": str(error), "peer": error.peer, "seconds": time.monotonic() - begun}
    return None


def wait_too_long(groups):
    """Rank 0 sends another step than the one that rank 1 is at."""
    groups.timeout = 0.3
    link = TensorLink(groups)
    if groups.rank == 0:
        link.send(8, hidden(8, 3))
        time.sleep(1.0)
        return None
    try:
        link.receive(7, blank(3))
    except PeerLost as error:
        return str(error)
    return None


def meet_twice(groups):
    """A world that is there already is used as it is, if it is the right one."""
    again = open_groups(groups.layout, groups.rank, init_method="", device="cpu", timeout=TIMEOUT)
    text, inner = repr(again), again.pipeline
    dist.barrier()  # gloo's meeting fails on a rank that has not ended it when another one leaves
    again.close()
    still_open = dist.is_initialized() and inner not in dist.distributed_c10d._world.pg_map
    try:
        open_groups(RankLayout(pipeline=3), groups.rank, init_method="", device="cpu", timeout=TIMEOUT)
    except AexecError as error:
        return [still_open, text, str(error)]
    return None


def lend_a_world(groups):
    """A trainer's world, and in it three engines one after the other; what they left in it, and that it still works."""
    seen = []
    for _ in range(3):
        engine = open_groups(groups.layout, groups.rank, init_method="", device="cpu", timeout=TIMEOUT)
        total = torch.tensor([10.0**groups.rank])
        dist.all_reduce(total, group=engine.tensor)
        engine.close()
        seen.append([int(total), len(dist.distributed_c10d._world.pg_map), repr(engine).endswith("closed>")])
    total = torch.ones(1)
    dist.all_reduce(total)
    return [*seen, int(total)]


def lose_a_peer_of_the_second_replica(groups):
    """Its first rank ends, and its second one says so by the numbers of the replica."""
    if groups.rank == 2:
        return None
    if groups.rank == 3:
        link = TensorLink(groups)
        try:
            link.receive(7, blank(3))
        except PeerLost as error:
            return [str(error), error.rank, error.peer]
    return None


def start_at_once(groups):
    """20 rounds in which all ranks take a port at the same time, each for a store of its own; their ports, by round."""
    rounds = []
    for _ in range(20):
        groups.together.wait(TIMEOUT)
        with contextlib.closing(PortReservation("127.0.0.1")) as reservation:
            groups.together.wait(TIMEOUT)
            limit = dt.timedelta(seconds=TIMEOUT)
            store = dist.TCPStore("127.0.0.1", reservation.port, 1, True, limit, wait_for_workers=False)
            store.set("rank", str(groups.rank))
            assert store.get("rank") == str(groups.rank).encode()
            rounds.append(reservation.port)
            groups.together.wait(TIMEOUT)
            del store
    return rounds


def _be(rank, layout, init_method, program, together, report):
    torch.set_num_threads(1)
    groups = open_groups(layout, rank, init_method=init_method, device="cpu", timeout=TIMEOUT)
    groups.together = together
    answer = program(groups)
    os.write(report, json.dumps([rank, answer]).encode() + b"\n")
    groups.close()


def _fork(rank, *args):
    pid = os.fork()
    if pid:
        return pid
    try:
        _be(rank, *args)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


@contextlib.contextmanager
def _meeting(host):
    """Where the ranks meet: a file, or a port that this process holds while they do."""
    if host:
        with contextlib.closing(PortReservation(host)) as reservation:
            yield reservation.init_method
        return
    file = os.memfd_create("meeting")
    yield f"file:///proc/{os.getpid()}/fd/{file}"
    os.close(file)


def run(name, tensor, pipeline, data, host="", libuv="1"):
    """What the function returned on each rank; None where it returned nothing, or was killed."""
    layout = RankLayout(int(tensor), int(pipeline), int(data))
    os.environ["USE_LIBUV"] = libuv
    with _meeting(host) as init_method:
        return _run(layout, init_method, globals()[name])


def _run(layout, init_method, program):
    report, write = os.pipe()
    together = multiprocessing.get_context("fork").Barrier(layout.size)  # cheaper than one of gloo
    pids = [_fork(rank, layout, init_method, program, together, write) for rank in range(layout.size)]
    os.close(write)
    with os.fdopen(report) as lines:
        answers = dict(json.loads(line) for line in lines)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if not set(codes) <= {0, -signal.SIGKILL}:
        return {"codes": codes}
    return [answers.get(rank) for rank in range(layout.size)]


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(*line.split())) + "\n")
        sys.stdout.flush()
