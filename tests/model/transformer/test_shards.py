"""Parts of layers, and the exchanges around them; ranks are threads here."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from aexec.errors import UnsupportedModel
from aexec.model.transformer.packed import PackedLinear, pack_linears
from aexec.model.transformer.shards import STYLES, SummedEmbedding, SummedLayer, share_out, whole_name
from aexec.parallel.tensor import Split, TensorGroup

SIZE = 3
INPUTS = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(3))


class ThreadGroup(TensorGroup):
    """Ranks that are threads and lay their tensors on one table."""

    def __init__(self, rank: int, size: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._table, self._barrier = rank, size, table, barrier

    def _all(self, part: torch.Tensor) -> list[torch.Tensor]:
        self._table[self.rank] = part.clone()
        self._barrier.wait()
        parts = list(self._table)
        self._barrier.wait()
        return parts

    def sum(self, part):
        return torch.stack(self._all(part)).sum(0)

    def joined(self, part, size):
        return torch.cat(self._all(part), -1)

    def joined_on_first(self, part, size):
        whole = self.joined(part, size)
        return whole if self.rank == 0 else whole[..., :0]


class Net(nn.Module):
    """A layer of each kind; no size divides by three."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=10)
        self.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(8, 13), "down": nn.Linear(13, 8)})])
        self.fused = nn.Linear(8, 10)
        self.mixed = nn.Linear(10, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)
        self.requires_grad_(False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(token_ids)
        layer = self.layers[0]
        hidden = hidden + layer["down"](layer["up"](hidden).relu())
        hidden = hidden + self.mixed(self.fused(hidden).relu())
        return self.head(self.norm(hidden))


PLAN = {
    "embed": "embedding_rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "fused": "colwise_gather_output",
    "mixed": "rowwise_split_input",
    "norm": "replicated_with_grad_allreduce",
    "head": "colwise_gather_output",
}
ROWS, COLUMNS = Split(0), Split(1)
SPLITS = {"up": ROWS, "fused": ROWS, "head": ROWS, "embed": ROWS, "down": COLUMNS, "mixed": COLUMNS}


def part_of(net: Net, group: TensorGroup) -> Net:
    """As loading leaves it: local weights in modules of the whole's sizes."""
    local = copy.deepcopy(net)
    for path, module in local.named_modules():
        split = SPLITS.get(path.rpartition(".")[2])
        for name, parameter in list(module.named_parameters(recurse=False)):
            if split is not None and split.dim < parameter.ndim:
                module.register_parameter(name, nn.Parameter(group.part(parameter, split), requires_grad=False))
    share_out(local, PLAN, group)
    return local


def on_ranks(run) -> list[Any]:
    table, barrier = [None] * SIZE, threading.Barrier(SIZE, timeout=20)
    groups = [ThreadGroup(rank, SIZE, table, barrier) for rank in range(SIZE)]
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(run, groups))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(1)
    return Net()


@pytest.mark.parametrize("packed", [False, True])
def test_parts_together_are_the_layer(net, packed) -> None:
    """Styles of all kinds, biases, uneven parts: the first rank has the whole output, packed or not."""

    def run(group):
        local = part_of(net, group)
        with torch.inference_mode():
            if packed:
                assert pack_linears(local, lambda _: None) == 5
            return local(INPUTS)

    first, *others = on_ranks(run)
    torch.testing.assert_close(first, net(INPUTS), rtol=1e-5, atol=1e-5)
    assert [each.shape for each in others] == [(2, 5, 0)] * 2


def test_a_bias_is_added_once(net) -> None:
    """By the first rank; the others have none where outputs are summed."""
    parts = on_ranks(lambda group: part_of(net, group))
    assert [part.layers[0]["down"].shard.bias is None for part in parts] == [False, True, True]
    assert all(part.layers[0]["up"].bias is not None for part in parts)


def test_parts_know_their_own_sizes(net) -> None:
    """Packing, and whoever prints a model, go by them."""
    last = on_ranks(lambda group: part_of(net, group))[-1]
    assert isinstance(last.layers[0]["down"], SummedLayer)
    assert repr(last.layers[0]["up"]) == "Linear(in_features=8, out_features=3, bias=True)"
    assert repr(last.layers[0]["down"].shard) == "Linear(in_features=3, out_features=8, bias=False)"
    assert last.head.out_features == 11
    assert isinstance(last.embed, SummedEmbedding)
    assert last.embed.shard.num_embeddings == 3


def test_a_packed_part_is_inside_its_exchange(net) -> None:
    """Replacing the wrapper itself would lose the sum, and nobody would notice but the reader."""

    def run(group):
        local = part_of(net, group)
        with torch.inference_mode():
            pack_linears(local, lambda _: None)
        return local

    for part in on_ranks(run):
        assert isinstance(part.layers[0]["down"], SummedLayer)
        assert isinstance(part.layers[0]["down"].shard, PackedLinear)


def test_a_style_without_a_meaning_here_is_refused(net) -> None:
    """It names the layer and the style."""
    table, barrier = [None], threading.Barrier(1)
    with pytest.raises(
        UnsupportedModel, match=r"Net wants layers\.0\.up split by 'sequence_parallel': expected one of"
    ):
        share_out(net, {"layers.*.up": "sequence_parallel"}, ThreadGroup(0, 1, table, barrier))
    assert "sequence_parallel" not in STYLES


def test_what_another_stage_has_is_left_alone(net) -> None:
    """It has no weights here, and takes part in no exchange."""
    net.head = nn.Identity()
    part = on_ranks(lambda group: part_of(net, group))[1]
    assert type(part.head) is nn.Identity


def test_names_of_checkpoints_are_found_again() -> None:
    """Wrappers add a step to a name, and this takes it out."""
    assert whole_name("model.layers.3.self_attn.o_proj.shard.weight") == "model.layers.3.self_attn.o_proj.weight"
    assert whole_name("model.norm.weight") == "model.norm.weight"
