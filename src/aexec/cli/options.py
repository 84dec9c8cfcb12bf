"""Options that commands share, as dataclasses that cyclopts reads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from aexec.config import ExecutorConfig, Offload
from aexec.config.nodes import DEFAULT_ADDRESS, DEFAULT_PORT
from aexec.errors import InvalidRequest
from aexec.messages import SamplingParams, StructuredOutput

__all__ = ("EngineOptions", "Flag", "NodeFlags", "RayFlags", "SamplingOptions", "Texts")

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
Texts = Annotated[tuple[str, ...], Parameter(negative=(), allow_leading_hyphen=True, show_default=False)]


@Parameter(name="*", group="Ray (--executor ray)")
@dataclass(frozen=True, kw_only=True)
class RayFlags:
    """Where Ray places the ranks, and how a step reaches them.

    Attributes:
        ray_address: The cluster to join, as HOST:PORT or auto; local starts one on this machine, which ends with the
            command. By default what RAY_ADDRESS says, else local.
        ray_step_plane: How a step reaches the ranks: compiled_graph, Ray's, which carries hidden states too; or channel,
            the lines that mp has, where torch.distributed carries them.
        placement_group: Name of a placement group to use; by default one is made, and removed at the end.
        placement_strategy: How ranks are spread over the nodes.
        placement_timeout: Seconds to wait for the cluster to have room.
        ray_resource: What each rank takes: GPU, CPU, TPU or a resource of your own; by default GPU where the cluster
            has any, else CPU.
        ray_resource_per_worker: How much of it; 0.5 lets two ranks share a GPU.
        graph_transport: How a compiled graph carries hidden states: nccl from GPU to GPU, shm through host memory.
    """

    ray_address: str | None = None
    ray_step_plane: Literal["compiled_graph", "channel"] = "compiled_graph"
    placement_group: str | None = None
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    placement_timeout: float = 600.0
    ray_resource: str | None = None
    ray_resource_per_worker: float = 1.0
    graph_transport: Literal["auto", "nccl", "shm"] = "auto"


@Parameter(name="*", group="Several nodes (--executor mp)")
@dataclass(frozen=True, kw_only=True)
class NodeFlags:
    """Which machines besides this one, node 0, have ranks; each of them runs aexec worker.

    Attributes:
        nnodes: How many nodes there are, this one among them.
        master_addr: Address of this node, by which the others reach it; it listens there and nowhere else.
        master_port: Port on which it waits for the others; 0 takes one that is free.
        node_key_file: The file with the key of the nodes, the same on all of them; by default what AEXEC_NODE_KEY or
            AEXEC_NODE_KEY_FILE says.
        node_allow: An address or network, as in 10.0.0.0/24, that nodes may come from; may be given several times. By
            default any, for without the key nobody is heard.
        node_interface: Network interface whose address this node has for the others, as in eth1; by default what
            AEXEC_HOST_IP says, else that of --master-addr.
        node_timeout: Seconds without a sign of life after which a node counts as lost.
        ranks_per_node: Ranks of each node, in order: given once for each; by default equally many.
    """

    nnodes: int = 1
    master_addr: str = DEFAULT_ADDRESS
    master_port: int = DEFAULT_PORT
    node_key_file: Annotated[str | None, Parameter(show_default=False)] = None
    node_allow: Texts = ()
    node_interface: str | None = None
    node_timeout: float = 3.0
    ranks_per_node: Annotated[tuple[int, ...] | None, Parameter(negative=(), show_default=False)] = None


@Parameter(name="*", group="Engine")
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Which model, and how it runs.

    Attributes:
        model: smollm2, dummy (needs no torch), a directory in Hugging Face's layout, or a GGUF file.
        executor: How workers come to exist: uni, one worker in this process; mp, a process for each rank; ray, ranks
            on a Ray cluster; external_launcher, this process is a rank, as torchrun or srun has started it, and rank 0
            prints; or package.module:Class. By default uni for one rank and mp for several.
        tensor_parallel_size: Ranks that share each layer.
        pipeline_parallel_size: Stages of layers.
        dtype: Of weights and cache; auto is float32 on a CPU, the checkpoint's own on CUDA.
        device: As in cpu or cuda:0; auto takes CUDA where there is one.
        max_model_len: Tokens of a prompt and its output together; the model's own limit by default.
        num_blocks: Blocks of 16 tokens in the KV cache; what the memory holds by default.
        max_num_batched_tokens: Tokens of all prompts that one step runs at most.
        async_scheduling: Launch a step before the tokens of the last one are back; where possible by default.
        prefix_caching: Prompts that begin alike share what they begin with in the KV cache.
        kv_offload_directory: Keep the KV of prompts in files of this directory, and find it there again.
        kv_offload_bytes: What these files may take, 4 GiB by default; without a directory, host memory.
        divergence_check: With external_launcher: compare what the ranks do, so that one that differs ends all at once.
        ray: Where Ray places the ranks.
        nodes: Which other machines have ranks.
    """

    model: str
    executor: str | None = None
    tensor_parallel_size: Annotated[int, Parameter(name=("--tensor-parallel-size", "-tp"))] = 1
    pipeline_parallel_size: Annotated[int, Parameter(name=("--pipeline-parallel-size", "-pp"))] = 1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    num_blocks: int | None = None
    max_num_batched_tokens: int = 512
    async_scheduling: bool | None = None
    prefix_caching: bool = True
    kv_offload_directory: Path | None = None
    kv_offload_bytes: int | None = None
    divergence_check: bool = True
    ray: RayFlags = RayFlags()
    nodes: NodeFlags = NodeFlags()

    @property
    def executor_config(self) -> ExecutorConfig:
        """How workers come to exist; the layout is the engine's to say.

        Raises:
            ConfigError: The settings contradict each other.
        """
        ray, nodes = dataclasses.asdict(self.ray), dataclasses.asdict(self.nodes)
        return ExecutorConfig(backend=self.executor, divergence_check=self.divergence_check, **ray, **nodes)

    @property
    def kv_connector(self) -> Offload | None:
        """What keeps KV that the cache has no room for.

        Raises:
            ConfigError: It may hold nothing.
        """
        if self.kv_offload_directory is None and self.kv_offload_bytes is None:
            return None
        if self.kv_offload_bytes is None:
            return Offload(directory=self.kv_offload_directory)
        return Offload(directory=self.kv_offload_directory, bytes=self.kv_offload_bytes)


@Parameter(name="*", group="Sampling")
@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen.

    Attributes:
        n: Answers to each prompt, each drawn with a seed of its own; needs a temperature above 0.
        max_tokens: New tokens of each prompt at most.
        temperature: 0 takes the likeliest token, so that the same command prints the same text.
        top_k: Choose among the k likeliest tokens; 0 means all.
        top_p: Choose among the likeliest tokens that have this probability together.
        min_p: Leave out tokens below this share of the likeliest one's probability.
        seed: Makes what is drawn repeatable.
        stop: A text that ends the output and is not part of it; may be given several times.
        json_schema: The output is JSON that this schema validates; the schema itself, or @FILE.
        regex: The output matches this regular expression as a whole.
        choice: The output is one of these texts; may be given several times.
        grammar: The output is a text of this grammar, in Lark's notation or GBNF; or @FILE.
        on_overflow: Whether a prompt that is longer than the context is refused, or its last tokens are kept.
        timeout: Seconds that each prompt may take; no limit by default.
        priority: The lower, the earlier a prompt's turn comes.
        cache_salt: Share the prefix cache with prompts of the same salt only.
    """

    n: Annotated[int, Parameter(name=("--n", "-n"))] = 1
    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Texts = ()
    json_schema: str | None = None
    regex: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    choice: Texts = ()
    grammar: str | None = None
    on_overflow: Literal["refuse", "keep_last"] = "refuse"
    timeout: float | None = None
    priority: int = 0
    cache_salt: str | None = None

    def params(self) -> SamplingParams:
        """Return them as the engine takes them.

        Raises:
            InvalidRequest: A value is out of range, or a file cannot be read.
        """
        return SamplingParams(
            n=self.n,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop,
            on_overflow=self.on_overflow,
            structured=self._structured(),
        )

    def _structured(self) -> StructuredOutput | None:
        given = (self.json_schema, self.regex, self.choice or None, self.grammar)
        if not any(given):
            return None
        return StructuredOutput(
            json_schema=_text_of(self.json_schema),
            regex=self.regex,
            choice=self.choice or None,
            grammar=_text_of(self.grammar),
        )


def _text_of(value: str | None) -> str | None:
    """The text of an option, or of the file that it names."""
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{value} cannot be read: {error}") from error
