"""One rank of a few, as a process: runs the jobs of a file, and saves what it saw.

:func:`launch` starts them. A job is a model and requests, and a round is a layout and its
jobs; ranks beyond one replica of the layout form another one, and replicas take turns with
the jobs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from aexec.config import CacheConfig, ModelConfig
from aexec.model.build import build_runner
from aexec.model.memory import resident_host_bytes
from aexec.model.transformer.hooks import silent
from aexec.model.transformer.packed import PackedLinear
from aexec.parallel.groups import Groups, open_groups
from aexec.parallel.layout import RankLayout

TIMEOUT = 60.0


def launch(rounds: list[tuple[int, int, list[dict[str, Any]]]], home: Path, world: int, timeout: float) -> None:
    """Run rounds of (tensor, pipeline, jobs) on ``world`` ranks; each leaves ``JOB-RANK.pt`` in ``home``."""
    (home / "jobs.json").write_text(json.dumps(rounds))
    arguments = [str(Path(__file__)), str(home / "jobs.json"), f"file://{home}/rendezvous", str(world)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=timeout)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    assert [process.returncode for process in processes] == [0] * world, "\n".join(said)
    assert said == [""] * world, "ranks print nothing"


def toy_scheduler(**settings: Any) -> Any:
    spec = importlib.util.spec_from_file_location("model_conftest", Path(__file__).parents[1] / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["model_conftest"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ToyScheduler(**settings)


class Rank:
    """A runner that hands hidden states on, and tells the others of its replica what it sampled."""

    def __init__(self, job: dict[str, Any], groups: Groups, replica: Any) -> None:
        self.groups, self.replica = groups, replica
        self.model, self.checks = job["model"], job["checks"]
        layout, rank = groups.layout, groups.rank
        place = layout.place(rank)
        self.output_rank = layout.output_rank(place.dp_rank)
        self.before, self.after = layout.neighbour(rank, -1), layout.neighbour(rank, 1)
        self.runner: Any = build_runner(
            ModelConfig(model=job["model"], dtype=job["dtype"]),
            CacheConfig(num_blocks=64, block_size=8),
            tp_rank=place.tp_rank,
            tp_size=layout.tensor,
            pp_rank=place.pp_rank,
            pp_size=layout.pipeline,
            device="cpu",
        )
        self.before_bytes = resident_host_bytes()
        self.runner.join(groups.tensor)
        self.runner.load_model()
        self.runner.initialize_cache(self.runner.determine_available_memory())
        self.runner.compile_or_warm_up()
        self.logits: dict[str, list[torch.Tensor]] = {}

    def execute_model(self, batch: Any) -> None:
        num_tokens = batch.total_num_scheduled_tokens
        incoming = None
        if self.before is not None and num_tokens:
            incoming = self.runner.blank_hidden(num_tokens)
            dist.recv(incoming, self.before)
        hidden = self.runner.execute_stage(batch, incoming)
        if self.after is not None and num_tokens:
            dist.send(hidden.contiguous(), self.after)

    def sample_tokens(self, grammar: Any) -> Any:
        told: list[Any] = [None]
        if self.groups.rank == self.output_rank:
            pending = self.runner._pending[0]
            for row, state in enumerate(pending.sampled):
                self.logits.setdefault(state.request_id, []).append(pending.logits[row].clone())
            told = [self.runner.sample_tokens(grammar)]
        dist.broadcast_object_list(told, self.output_rank, group=self.replica)
        return told[0]

    def misread(self) -> list[str]:
        """Weights of this rank that are not what ``shard`` cuts out of the whole ones."""
        with silent():
            whole = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).state_dict()
        shard, own = self.runner._store.model.shard, dict(self.runner._store.weights.tensors())
        assert own.keys() <= whole.keys()
        return [name for name, tensor in own.items() if not torch.equal(shard(name, whole[name]), tensor)]

    def facts(self) -> dict[str, Any]:
        model = self.runner._store.model
        return {
            "parameters": self.runner.info().num_parameters,
            "kv_heads": sorted({shape.num_heads for shape in model.kv_shapes.values()}),
            "layers": list(model.kv_shapes),
            "misread": self.misread() if self.checks else [],
            "packed": [name for name, module in model.module.named_modules() if isinstance(module, PackedLinear)],
            "grown_bytes": resident_host_bytes() - self.before_bytes,
            "weight_bytes": self.runner._store.weights.nbytes,
        }


def run(job: dict[str, Any], groups: Groups, replica: Any) -> dict[str, Any]:
    rank = Rank(job, groups, replica)
    scheduler = toy_scheduler(block_size=8, budget=job["budget"])
    for name, prompt in job["prompts"].items():
        scheduler.add(name, prompt, job["num_new"], ignore_eos=True)
    outputs = scheduler.run(rank)
    logits = {name: torch.stack(rows) for name, rows in rank.logits.items()}
    return {"outputs": outputs, "logits": logits, **rank.facts()}


def main() -> None:
    jobs_file, rendezvous, world, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    whole = open_groups(RankLayout(data=world), rank, init_method=rendezvous, device="cpu", timeout=TIMEOUT)
    for tensor, pipeline, jobs in json.loads(jobs_file.read_text()):
        layout = RankLayout(tensor, pipeline, world // (tensor * pipeline))
        groups = Groups(layout, rank, TIMEOUT, backend="gloo", own_world=None)
        own = rank // layout.replica_size
        starts = range(0, layout.size, layout.replica_size)
        replicas = [dist.new_group(list(range(start, start + layout.replica_size))) for start in starts]
        for number, job in enumerate(jobs):
            if number % layout.data == own:
                torch.save(
                    run(job, groups, replicas[own]), jobs_file.parent / f"{job['name']}-{rank % layout.replica_size}.pt"
                )
    dist.barrier()
    whole.close()


if __name__ == "__main__":
    main()
