"""One model on ranks of two nodes: token for token what one process says."""

from __future__ import annotations

import pytest
from nodes import nodes as nodes

from aexec import LLM, SamplingParams
from aexec.testing.tiny_models import save_tiny_model

pytestmark = pytest.mark.timeout(200)

OPTIONS = {"max_num_batched_tokens": 24, "num_blocks": 64}
GREEDY = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
SAMPLING = [{**GREEDY, "temperature": 0.9, "top_p": 0.9, "seed": 7}, *[GREEDY] * 4]
PROMPTS = [[(7 * place + 31 * number) % 512 for place in range(3 + 11 * number)] for number in range(5)]

LEADER = """
async def main():
    model, options, prompts, sampling = (PLACE.pop(name) for name in ("model", "options", "prompts", "sampling"))
    spread = ExecutorConfig(backend="mp", parallel=ParallelConfig(2, 2), env={"OMP_NUM_THREADS": "1"}, **PLACE)
    async with AsyncLLM(model, executor=spread, **options) as llm:
        asked = [llm.complete(prompt, SamplingParams(**each)) for prompt, each in zip(prompts, sampling)]
        say(
            answers=[list(each.token_ids) for each in await asyncio.gather(*asked)],
            nodes=[each.node for each in llm.executor.ranks],
            handed_on=[each.sent for each in await llm.executor.collective_rpc("pipeline_statistics")],
        )

asyncio.run(main())
"""


def test_ranks_of_two_nodes_say_what_one_alone_says(nodes, tmp_path):
    """TP 2 x PP 2 with a stage on each node: greedy and seeded tokens are those of ``uni``."""
    model = str(save_tiny_model("llama", tmp_path / "llama"))
    leader = nodes.lead(LEADER, model=model, options=OPTIONS, prompts=PROMPTS, sampling=SAMPLING)
    follower = nodes.follow()
    with LLM(model, **OPTIONS) as llm:
        expected = [
            list(each.token_ids) for each in llm.generate(PROMPTS, [SamplingParams(**each) for each in SAMPLING])
        ]
    found = leader.hear(90.0)
    assert found["answers"] == expected
    assert [node[:6] for node in found["nodes"]] == ["node 0", "node 0", "node 1", "node 1"]
    assert min(found["handed_on"][:2]) > 0
    assert (leader.finish(), follower.finish()) == (0, 0)
