"""Options that commands share, as dataclasses that cyclopts reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from aexec.messages import SamplingParams

__all__ = ("EngineOptions", "Flag", "SamplingOptions", "Texts")

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
Texts = Annotated[tuple[str, ...], Parameter(negative=(), allow_leading_hyphen=True, show_default=False)]


@Parameter(name="*", group="Engine")
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Which model, and how it runs.

    Attributes:
        model: smollm2, dummy (needs no torch), a directory in Hugging Face's layout, or a GGUF file.
        executor: How workers come to exist: uni, one worker in this process; mp, a process for each rank; or
            package.module:Class. By default uni for one rank and mp for several.
        tensor_parallel_size: Ranks that share each layer.
        pipeline_parallel_size: Stages of layers.
        dtype: Of weights and cache; auto is float32 on a CPU, the checkpoint's own on CUDA.
        device: As in cpu or cuda:0; auto takes CUDA where there is one.
        max_model_len: Tokens of a prompt and its output together; the model's own limit by default.
        num_blocks: Blocks of 16 tokens in the KV cache; what the memory holds by default.
        max_num_batched_tokens: Tokens of all prompts that one step runs at most.
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


@Parameter(name="*", group="Sampling")
@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen.

    Attributes:
        max_tokens: New tokens of each prompt at most.
        temperature: 0 takes the likeliest token, so that the same command prints the same text.
        top_k: Choose among the k likeliest tokens; 0 means all.
        top_p: Choose among the likeliest tokens that have this probability together.
        min_p: Leave out tokens below this share of the likeliest one's probability.
        seed: Makes what is drawn repeatable.
        stop: A text that ends the output and is not part of it; may be given several times.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Texts = ()

    def params(self) -> SamplingParams:
        """Return them as the engine takes them.

        Raises:
            InvalidRequest: A value is out of range.
        """
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop,
        )
