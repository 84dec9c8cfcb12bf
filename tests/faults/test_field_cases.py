"""The field cases that a backend with processes has to stand, and where each is pinned.

Those of Ray on workers of Ray's, those of launchers on the ranks of one.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from aexec.testing.contracts import EXECUTOR_CHECKS, NOT_REPLICATED

ROOT = Path(__file__).parents[2]

# What users of distributed executors have run into: the cases of the field log that are about
# backends with a process for each rank, or about all.
CASES = {
    "G01": "a call that is pending says which ranks are missing, and what they do",
    "G02": "a missed deadline is an error of that call; the next one works",
    "G03": "one budget for a call over all ranks",
    "G04": "a deadline that has passed fails at once, and nothing runs",
    "G05": "nobody ever gets another's answer",
    "G06": "the first error of any rank reaches the caller at once",
    "G07": "a death ends all waiters",
    "G08": "a death is seen from outside, and health says so",
    "G09": "the loop is not held by large messages",
    "G11": "idle is silent",
    "G12": "and so is a call now and then",
    "G13": "and so is a compiled graph",
    "G14": "many messages to readers of different speed: none lost, doubled or out of order",
    "G15": "any size up to the limit arrives",
    "G16": "a small /dev/shm is enough, and a full one is an error",
    "G17": "a hard kill leaves no shared memory",
    "G18": "workers end with their driver, however it ends",
    "G19": "Ctrl-C ends all, quietly",
    "G20": "no signal handlers, any thread",
    "G21": "starts in background threads",
    "G22": "starts inside multiprocessing.Pool",
    "G23": "never forks",
    "G24": "needs no main guard",
    "G25": "the blocking façade works where a loop runs",
    "G26": "one loop after the other; a foreign loop is refused",
    "G27": "a program that forgets to close ends",
    "G28": "cancelling one caller leaves the others alone",
    "G29": "cancelling frees the slot",
    "G30": "every way to die is told by its name",
    "G31": "a failure is no exit code 0",
    "G32": "a failed start says the root cause",
    "G33": "a start has a limit, and says where each rank was",
    "G34": "closing many times, and racing with calls",
    "G35": "the last hook has its budget, then force",
    "G36": "a drain with a limit",
    "G37": "a placement that never comes says what is missing",
    "G38": "a node is its id, not its address",
    "G39": "one rule for the environment of workers",
    "G40": "the list of devices is the user's",
    "G41": "a placement group of the user's, and fractions",
    "G42": "a backend that is asked for by name is taken",
    "G43": "many calls at once wait their turn",
    "G44": "a compiled graph goes with its executor",
    "G45": "a late stage is named",
    "G46": "a setting that is shown is the one that is used",
    "G47": "what is missing is told at the start",
    "G48": "a follower node that has lost its head ends",
    "G49": "many starts at the same time",
    "G50": "nothing listens, nothing to unpickle from strangers",
    "G51": "what cannot travel is an error of that call",
    "G52": "every message gets an answer",
    "G53": "ranks of a launcher stay in step, and who differs is an error on all of them",
    "G54": "a rank out of step is named",
    "G55": "states of sleep",
    "G56": "pause, new weights, resume",
    "G57": "registration code runs in workers",
    "G58": "own executors pass the same contract",
    "G59": "the rank is in each line from the first on",
    "G60": "stages see the same order; results come in order",
    "G61": "stages work at the same time",
    "G62": "a death ends a call whose other ranks sit in a collective",
    "G63": "failure callbacks, plain and async",
    "G64": "closing with dead, stopped and live workers",
    "G65": "the executor holds its workers",
    "G66": "no dashboard is needed",
    "G67": "restarts with a budget",
    "G68": "growing and shrinking",
    "G69": "a dump shows where the workers are",
}

# Those without a test yet, and why.
REASONS = {
    "G68": "the size of a group is fixed for its life; a restart rebuilds it at the same size",
}

# The field log gives these to backends that make processes themselves; all others are pinned on workers of Ray's too.
NOT_OF_RAY = {"G11", "G12", "G14", "G16", "G17", "G22", "G23", "G24", "G53"}
REASONS_ON_RAY = REASONS | {
    "G31": "the exit code is the driver's, whatever backend has lost a worker",
    "G54": "the driver counts the steps of all ranks, for all backends alike",
    "G58": "a backend of somebody else is not placed by Ray unless it says so",
    "G59": "Ray keeps the output of workers in its logs, a file for each; WorkerDied has the last lines, by tests of the group",
}

# The field log gives these to other backends alone; all others are pinned on the ranks of a launcher too.
NOT_OF_LAUNCHERS = {
    "G04",
    "G07",
    "G08",
    "G11",
    "G12",
    "G13",
    "G14",
    "G15",
    "G16",
    "G17",
    "G21",
    "G22",
    "G23",
    "G24",
    "G30",
    "G37",
    "G41",
    "G43",
    "G44",
    "G45",
    "G46",
    "G47",
    "G51",
    "G61",
    "G64",
    "G65",
    "G66",
    "G67",
    "G68",
}
REASONS_ON_LAUNCHERS = {
    "G59": "the launcher has made the processes, their titles and outputs are its own, and it puts the rank in front of "
    "lines (torchrun --tee, srun --label)",
}
ON_LAUNCHERS = re.compile(
    r"external|tests/engine/replicated/|tests/cli/test_launched\.py|tests/numerics/test_(torchrun|new_weights)\.py"
)
# The contract that runs on all ranks of a launcher (tests/contracts/test_replicated.py).
REPLICATED = {check.__name__ for check in EXECUTOR_CHECKS} - NOT_REPLICATED.keys()


@functools.cache
def citations() -> dict[str, set[str]]:
    """Where each case is cited: in the sentence of a test, or of a contract check."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("src/aexec/testing/*_checks.py")]:
        for name, sentence in rules(path):
            for case in re.findall(r"\bG\d\d\b", sentence):
                found[case].add(f"{path.relative_to(ROOT)}:{name}")
    return found


def rules(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, ast.get_docstring(node) or ""


@pytest.mark.parametrize("case", CASES)
def test_each_field_case_is_pinned_by_a_test(case):
    """By one whose sentence cites it, unless the reason for none is written down."""
    assert bool(citations()[case]) != (case in REASONS)


@pytest.mark.parametrize("case", sorted(CASES.keys() - NOT_OF_RAY))
def test_each_field_case_of_ray_is_pinned_on_ray(case):
    """By workers that Ray has placed, or by the contract that they pass, unless the reason for neither is written down."""
    on_ray = [where for where in citations()[case] if re.search(r"ray|_checks\.py|test_meeting\.py", where)]
    assert bool(on_ray) != (case in REASONS_ON_RAY)


@pytest.mark.parametrize("case", sorted(CASES.keys() - NOT_OF_LAUNCHERS))
def test_each_field_case_of_launchers_is_pinned_on_their_ranks(case):
    """By ranks of ``external_launcher``, or by the contract that they pass, unless the reason for neither is written down."""
    places = [where.split(":") for where in citations()[case]]
    on_ranks = [
        name for path, name in places if ON_LAUNCHERS.search(path) or ("_checks.py" in path and name in REPLICATED)
    ]
    assert bool(on_ranks) != (case in REASONS_ON_LAUNCHERS)
