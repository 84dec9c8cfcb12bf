from __future__ import annotations

from aexec.config import ExecutorConfig, ParallelConfig
from aexec.executor.ray.actors import actor_names, runtime_env

LAYOUT = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)


def test_actors_are_named_for_their_ranks():
    """RV2-05: by the layout, wherever their bundles are, with the generation; no two groups share a name."""
    config = ExecutorConfig(parallel=LAYOUT)
    names = actor_names(config, 3, order=(2, 3, 0, 1))
    group = names[0].rpartition("-g3-")[0]
    assert group.startswith("aexec-")
    assert names == [f"{group}-g3-{place}" for place in ("pp1-tp0", "pp1-tp1", "pp0-tp0", "pp0-tp1")]
    assert actor_names(config, 3, order=(0, 1, 2, 3))[0].rpartition("-g3-")[0] != group


def test_a_profiler_comes_with_the_runtime_environment():
    """RAY-26: with options of one's own; what the user gave stays, and none is given where none is asked for."""
    given = {"pip": ["mine"]}
    assert runtime_env(ExecutorConfig()) == {}
    assert runtime_env(ExecutorConfig(ray_runtime_env=given)) == given
    profiled = runtime_env(ExecutorConfig(ray_runtime_env=given, ray_nsight={"t": "cuda"}))
    assert profiled["pip"] == ["mine"]
    assert profiled["nsight"]["t"] == "cuda"
    assert "o" in runtime_env(ExecutorConfig(ray_nsight=True))["nsight"]
