"""A model on ranks that torchrun has started: each of them says, token for token, what one process says (T)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from manual import SLOW_CALLBACK

from aexec import LLM, SamplingParams
from aexec.testing.tiny_models import save_tiny_model

pytestmark = pytest.mark.timeout(200)

ROOT = Path(__file__).parents[2]
RANKS = Path(__file__).with_name("torchrun_ranks.py")
GREEDY = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
#: Longer than a step's budget, so that chunks of prompts and decodes share steps; every third one is drawn by chance.
PROMPTS = [[(7 * place + 31 * number) % 512 for place in range(3 + 9 * number)] for number in range(6)]
SAMPLING = [
    {**GREEDY, "temperature": 0.9, "top_p": 0.9, "seed": number} if number % 3 == 2 else GREEDY for number in range(6)
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two tiny random Llamas of the same shapes."""
    home = tmp_path_factory.mktemp("torchrun")
    return [str(save_tiny_model("llama", home / str(seed), seed=seed)) for seed in range(2)]


@pytest.fixture(scope="module")
def alone(models):
    """What one rank in this process says, of either model, freshly started; and how large the model is."""
    sampling, said = [SamplingParams(**each) for each in SAMPLING], []
    for model in models:
        with LLM(model, num_blocks=64, max_num_batched_tokens=24) as llm:
            said.append([list(each.token_ids) for each in llm.generate(PROMPTS, sampling)])
            num_parameters = llm.model_info.num_parameters
    return *said, num_parameters


def run_engines(torchrun, directory, num_ranks, engines, in_world):
    """What each rank has seen of the engines, of those in a trainer's world, and what it has at its end."""
    common = {"prompts": PROMPTS, "sampling": SAMPLING}
    job = {
        "engines": [{**common, "spread": False, **engine} for engine in engines],
        "in_world": [{**common, "spread": True, **engine} for engine in in_world],
    }
    (directory / "job.json").write_text(json.dumps(job))
    torchrun(num_ranks, RANKS, directory)
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]


def numbered(answers, replica=0, num_replicas=1):
    """Answers of a replica, by the number of the prompt, as JSON has them."""
    return {str(number): answers[number] for number in range(replica, len(answers), num_replicas)}


def check_weights(seen, old, new):
    """After each way of giving new weights, what a fresh start on them says."""
    assert seen["answers"] == old
    assert seen["rpc"] == new
    assert set(seen["versions"]) == {2}
    assert seen["back"] == old
    assert seen["woken"] == new
    assert seen["files"] == old


def test_four_ranks_say_what_one_says_and_take_new_weights(torchrun, tmp_path, models, alone):
    """TP 2 x PP 2, then TP 2 x DP 2, then the same in a world that a trainer has made: in one run of the processes.

    All ranks have the same tokens, of their own prompts (G53), with new weights by RPC while paused,
    by the engine, and after the deepest sleep (G55).
    """
    old, new, num_parameters = alone
    given = {"model": models[0], "new": models[1]}
    engines = [{"layout": [2, 2], **given}, {"layout": [2, 1], **given}]
    in_world = [{"layout": [2, 1], **given}, {"layout": [2, 1], "model": models[1]}]
    for rank, seen in enumerate(run_engines(torchrun, tmp_path, 4, engines, in_world)):
        stages, replicas, shared, again, total, threads = seen
        check_weights(stages, numbered(old), numbered(new))
        assert all(each < 0.5 * num_parameters for each in stages["parameters"])
        assert stages["given"] < stages["all"]
        assert len(set(stages["blocks"])) == 1
        for two in (replicas, shared):
            check_weights(two, numbered(old, rank // 2, 2), numbered(new, rank // 2, 2))
            assert len(two["parameters"]) == 2
            assert all(each < 0.8 * num_parameters for each in two["parameters"])
        assert again["answers"] == numbered(new, rank // 2, 2)
        assert [each["world"] for each in (stages, replicas, shared, again)] == [False, False, True, True]
        assert total == 4  # the trainer's world is as it was
        assert not any("aexec" in name for name in threads)


def test_the_example_finds_its_answers_equal_on_every_rank(torchrun):
    """``--check`` compares with one process alone; that stages and replicas say the same is the test before this one."""
    lines = torchrun(2, ROOT / "examples" / "torchrun_offline.py", "--check").splitlines()
    checks = sorted(line for line in lines if line.startswith("rank"))
    assert checks == [f"rank {rank}: 8 answers, equal to one process's" for rank in range(2)]
    assert len([line for line in lines if "->" in line]) == 8


def rewards(printed):
    """By step."""
    return [float(reward) for reward in re.findall(r"^step \d+: reward (\S+)$", printed, re.MULTILINE)]


@pytest.mark.parametrize("arguments", [(), ("mp", "2")], ids=["uni", "mp"])
def test_the_loop_learns(arguments):
    """The engine samples, the trainer of the same process learns, and the reward rises; nothing is said on stderr.

    But by asyncio's debug mode of callbacks that take 0.1 s: of torch's objects a full collection takes thrice that,
    and it may fall into any.
    """
    command = [sys.executable, "-X", "dev", "-W", "error", str(ROOT / "examples" / "ppo_loop.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, SLOW_CALLBACK.sub("", done.stderr)) == (0, "")
    found = rewards(done.stdout)
    assert len(found) == 10
    assert found[-1] > found[0] + 0.25


def test_the_loop_learns_where_trainer_and_engine_share_their_processes(torchrun):
    """Each rank trains on half of the samples and gives the engine the weights: the reward rises."""
    found = rewards(torchrun(2, ROOT / "examples" / "ppo_loop.py"))
    assert len(found) == 10
    assert found[-1] > found[0] + 0.25
