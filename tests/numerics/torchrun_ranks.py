"""What each rank does that torchrun has started for a test: ``torchrun ... torchrun_ranks.py DIRECTORY``.

``job.json`` in the directory lists engines to open one after the other, all in one process, and those to
open once there is a trainer's world; what this rank has seen goes to ``rank-N.json`` beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from aexec import AsyncLLM, SamplingParams

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


async def answers(llm, prompts, sampling):
    """All at once; prompts by their number."""
    asked = [llm.complete(prompts[number], SamplingParams(**sampling[number])) for number in prompts]
    return {number: each.token_ids for number, each in zip(prompts, await asyncio.gather(*asked), strict=True)}


def weights(directory):
    """What a trainer has after a step: the whole state, on every rank."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()


async def own_part(llm, layout, state):
    """A rank may give what its own stage has, and no more."""
    tp, pp = layout
    names = await llm.collective_rpc(lambda worker: sorted(worker.runner.operations._store.inventory().own))
    return {name: state[name] for name in names[RANK % (tp * pp)]}


def spread(state):
    """A trainer's state whose tensors are spread over all of its ranks."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in state.items()}


async def replace_weights(llm, job, says):
    """By RPC while paused; by the engine; and after the deepest sleep; what it says after each of them."""
    new, old = weights(job["new"]), weights(job["model"])
    own = await own_part(llm, job["layout"], new)
    await llm.pause()
    reports = await llm.collective_rpc("update_weights", (own,))
    await llm.resume()
    seen = {"rpc": await says(), "versions": [report.version for report in reports], "given": len(own), "all": len(new)}
    await llm.update_weights(spread(old) if job["spread"] else iter(old.items()), chunk_bytes=40_000)
    seen["back"] = await says()
    await llm.sleep(2)
    await llm.wake_up(["weights"])
    await llm.update_weights(new)
    await llm.wake_up(["kv_cache"])
    seen["woken"] = await says()
    await llm.load_weights()
    seen["files"] = await says()
    return seen


async def run(job):
    tp, pp = job["layout"]
    replica, num_replicas = RANK // (tp * pp), WORLD_SIZE // (tp * pp)
    prompts = dict(list(enumerate(job["prompts"]))[replica::num_replicas])
    settings = {"executor": "external_launcher", "num_blocks": 64, "max_num_batched_tokens": 24}
    async with AsyncLLM(job["model"], tensor_parallel_size=tp, pipeline_parallel_size=pp, **settings) as llm:
        seen = {"answers": await answers(llm, prompts, job["sampling"])}
        seen["parameters"] = [info.num_parameters for info in await llm.collective_rpc("model_info")]
        seen["blocks"] = [info.num_blocks for info in await llm.collective_rpc("model_info")]
        if job.get("new"):
            seen |= await replace_weights(llm, job, lambda: answers(llm, prompts, job["sampling"]))
    seen["world"] = dist.is_initialized()
    return seen


def main(directory):
    torch.set_num_threads(1)
    disable_progress_bar()
    jobs = json.loads((directory / "job.json").read_text())
    seen = [asyncio.run(run(job)) for job in jobs["engines"]]
    dist.init_process_group("gloo")
    seen += [asyncio.run(run(job)) for job in jobs["in_world"]]
    total = torch.ones(1)
    dist.all_reduce(total)
    seen.append(int(total))
    dist.destroy_process_group()
    seen.append(sorted(thread.name for thread in threading.enumerate()))
    (directory / f"rank-{RANK}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
