"""All that leans on private corners of ``transformers``, in one file; its minor version is pinned.

What is private here: ``post_init`` as the moment between "built on the meta device" and
"weights are read", at which a pipeline stage drops the layers it does not own, so that they
are never read; how tensor parallelism gets its mesh, expands its plan, and hangs itself into
``forward``; the duck type of a model's body; the marks that GGUF leaves on a model, and its
progress bar.
The conformance test runs over every architecture that we allow and guards all of it.

Source: transformers 5.24, ``modeling_utils.py``, ``from_pretrained`` and ``post_init``;
``distributed/mixin.py``.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Self

import torch
import transformers as _transformers
import transformers.modeling_gguf_pytorch_utils as _gguf_utils
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.distributed import tensor_parallel as _tensor_parallel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from aexec.errors import ModelLoadError
from aexec.model.base import LoadProgress
from aexec.parallel.stages import EndCosts, balanced_partition, checked_partition, layers_of_stage
from aexec.parallel.tensor import Split, TensorGroup

__all__ = (
    "Stage",
    "convert_gguf",
    "kv_heads_per_rank",
    "load_stage",
    "model_class_name",
    "read_config",
    "register_attention",
    "silent",
)

_LAST_NORM = re.compile(r"(ln_f|(final_)?(layer_?)?norm)")
transformers: Any = _transformers  # its annotations are partial
gguf_utils: Any = _gguf_utils
tensor_parallel: Any = _tensor_parallel
_silencing = threading.Lock()  # what it guards is global to transformers


class Identity(nn.Identity):
    """Stands where another stage's module would be; hands its first argument on."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden states as they came."""
        return args[0] if args else next(iter(kwargs.values()))


class Stage:
    """One pipeline rank's share of a model, and the way its input gets in.

    Attributes:
        rank: Place in the pipeline.
        size: Stages of the pipeline.
        partition: Layers of each stage; None balances them.
        ends: What the ends of the model cost, for balancing.
        incoming: Hidden states ``[1, num_tokens, hidden_size]`` from the stage before;
            set before each forward pass of any stage but the first.
    """

    def __init__(self, rank: int = 0, size: int = 1, partition: tuple[int, ...] | None = None) -> None:
        self.rank, self.size, self.partition = rank, size, partition
        self.ends = EndCosts()
        self.incoming: Tensor | None = None

    def __repr__(self) -> str:
        return f"<Stage {self.rank} of {self.size}>"

    @property
    def is_first(self) -> bool:
        """It embeds the tokens."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """It has the output head."""
        return self.rank == self.size - 1

    def layers(self, num_layers: int) -> range:
        """Which of ``num_layers`` are its own.

        Raises:
            ConfigError: The partition is of another number of layers, or there are too few for the stages.
        """
        if self.partition is None:
            partition = balanced_partition(num_layers, self.size, self.ends)
        else:
            partition = checked_partition(self.partition, num_layers)
        return layers_of_stage(partition, self.rank)

    def cut(self, model: Any) -> None:
        """Leave this stage's modules in a model without weights, under their own names."""
        config = model.config.get_text_config()
        base = getattr(model, model.base_model_prefix)
        body, layers = _find_layers(base, config.num_hidden_layers)
        own = self.layers(config.num_hidden_layers)
        for index in range(config.num_hidden_layers):
            if index not in own:
                layers[index] = Identity()
        if not self.is_first:
            # Before the first own layer, so that whatever ran until there (Gemma's scale, GPT-2's positions) is void.
            layers[own[0]].register_forward_pre_hook(self._take_incoming)
            if not (self.is_last and config.tie_word_embeddings):
                model.set_input_embeddings(Identity())
        if not self.is_last:
            for name in [name for name, _ in body.named_children() if _LAST_NORM.fullmatch(name)]:
                setattr(body, name, Identity())
            model.set_output_embeddings(Identity())
            model.all_tied_weights_keys = {}

    def _take_incoming(self, _layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.incoming, *args[1:])


def _find_layers(base: nn.Module, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    for body in base.modules():
        for child in body.children():
            if isinstance(child, nn.ModuleList) and len(child) == num_layers:
                return body, child
    raise ModelLoadError(f"{type(base).__name__} keeps its {num_layers} layers in no list: it cannot be cut in stages")


def model_class_name(model_type: str) -> str | None:
    """The causal language model of a ``model_type``; None when ``transformers`` has none."""
    name: str | None = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return name


def register_attention(name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    """Let models be loaded with ``attn_implementation=name``.

    No mask function of that name is registered, so that ``transformers`` makes no masks.
    """
    transformers.AttentionInterface.register(name, function)


def read_config(directory: Path) -> Any:
    """The configuration of a model's text part; ``base_model_tp_plan`` is its plan for tensor parallelism, or None."""
    return transformers.AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config()


def kv_heads_per_rank(plan: dict[str, str], num_heads: int, size: int) -> int | None:
    """Key/value heads that each rank of a tensor-parallel group stores; None: they cannot be shared out."""
    heads: int | None = tensor_parallel.get_kv_heads_per_rank(plan, num_heads, size)
    return heads


def load_stage(
    directory: Path,
    class_name: str,
    stage: Stage,
    *,
    dtype: torch.dtype,
    attention: str,
    device: torch.device,
    tensor: TensorGroup | None = None,
    blank: dict[str, Tensor] | None = None,
) -> tuple[Any, dict[str, Split]]:
    """Read one stage's weights, or this rank's part of them; the others are never touched.

    With ``blank``, which has all weights of the whole model, no file is read: somebody else
    fills the model.

    Returns:
        The model, and how its weights are shared out, by name. With ``tensor`` its weights
        are plain tensors, this rank's parts, in modules that are as large as the whole by
        their own account; see ``shards.share_out``.

    Raises:
        ModelLoadError: A weight of this stage is missing, or the files do not fit the model.
    """
    model_class: Any = _cut_class(getattr(transformers, class_name), stage)
    more: dict[str, Any] = {}
    if tensor is not None:
        model_class = _split_class(model_class, tensor, device)
        more["distributed_config"] = DistributedConfig(tp_size=tensor.size)
    if blank is not None:
        more |= {
            "state_dict": blank,
            "config": transformers.AutoConfig.from_pretrained(directory, local_files_only=True),
        }
    try:
        model, report = model_class.from_pretrained(
            None if blank is not None else directory, local_files_only=True, output_loading_info=True, dtype=dtype, attn_implementation=attention,
            **more,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelLoadError(f"{directory} could not be loaded as {class_name}: {error}") from error
    _refuse_gaps(directory, class_name, report)
    if blank is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # memory of its own, to be filled
    model.config.pad_token_id = None  # no row of ours is padding, and some models would warn of it in each process
    return model.to(device).eval(), {} if tensor is None else _make_local(model)


def _cut_class(model_class: Any, stage: Stage) -> Any:
    """A subclass that keeps one stage only; the class itself when there is but one."""
    if stage.size == 1:
        return model_class

    def post_init(self: Any) -> None:
        model_class.post_init(self)
        stage.cut(self)

    return _subclass(model_class, post_init=post_init)


def _split_class(model_class: Any, tensor: TensorGroup, device: torch.device) -> Any:
    """A subclass that reads this rank's part of each weight.

    ``transformers`` would build a mesh of its own, over all of the world, and on CUDA wherever
    there is CUDA. Ours is the group that we have already.
    """

    def prepare(_class: Any, config: Any, device_map: Any = None) -> tuple[Any, Any, Any]:  # noqa: ARG001  # its signature
        mesh = DeviceMesh.from_group(tensor.process_group, device.type, mesh_dim_names=("tp",))
        return config, device, _OneMesh(mesh)

    def expand(self: Any, plan: dict[str, str]) -> dict[str, str]:
        absent = {name for name, module in self.named_modules() if isinstance(module, Identity)}
        rules: dict[str, str] = model_class._expand_parallel_plan(self, plan)  # noqa: SLF001  # see above
        return {name: style for name, style in rules.items() if name not in absent}

    return _subclass(model_class, prepare_distribute_model=classmethod(prepare), _expand_parallel_plan=expand)


def _subclass(model_class: Any, **members: Any) -> Any:
    # The module's name decides whether transformers takes it for custom code; for custom code it silently skips
    # the renaming of checkpoint keys, and a head would stay random.
    return type(model_class.__name__, (model_class,), {**members, "__module__": model_class.__module__})


class _OneMesh:
    """Stands where ``transformers`` has a mesh for each kind of parallelism; there is one kind here."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def get_mesh(self, _dims: object) -> DeviceMesh:
        return self._mesh


def _make_local(model: Any) -> dict[str, Split]:
    """Take ``transformers``' exchanges out of the model, and make plain tensors of its distributed ones."""
    made: dict[Any, nn.Parameter] = {}  # tied ones stay tied
    splits: dict[str, Split] = {}
    for path, module in model.named_modules():
        if getattr(module, "_is_hooked", False):
            module.__dict__.pop("forward", None)  # not there when only parameters of its are split
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                if parameter not in made:
                    made[parameter] = nn.Parameter(parameter.to_local().detach(), requires_grad=False)
                module.register_parameter(name, made[parameter])
                splits |= {f"{path}.{name}": split for split in _splits(parameter)}
    model.config.__dict__.pop("distributed_config", None)
    return splits


def _splits(parameter: DTensor) -> list[Split]:
    """One, or none if the parameter is whole on all ranks."""
    placements: Any = parameter.placements
    return [Split(each.dim, getattr(each, "split_factor", 1)) for each in placements if hasattr(each, "dim")]


def convert_gguf(source: Path, target: Path) -> None:
    """Write a GGUF file as safetensors with configuration and tokenizer, dequantised to float32.

    Raises:
        ModelLoadError: A weight is missing.
    """
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    transformers.AutoTokenizer.from_pretrained(source.parent, **where).save_pretrained(target)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, dtype=torch.float32, output_loading_info=True, **where
    )
    _refuse_gaps(source, type(model).__name__, report)
    # save_pretrained refuses a model that still looks quantised.
    model.hf_quantizer = None
    for mark in ("is_quantized", "quantization_method"):
        model.__dict__.pop(mark, None)
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(target)


def _refuse_gaps(source: Path, class_name: str, report: dict[str, Any]) -> None:
    bad = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ModelLoadError(
            f"{source} lacks weights of {class_name}, or has them in another shape: {', '.join(bad[:5])}{more}"
        )


class _Bar:
    """Stands where ``transformers`` would put a progress bar; reports to a callback."""

    def __init__(
        self, progress: LoadProgress | None, phase: str, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self._items: Any = args[0] if args else options.get("iterable")
        sized = self._items if isinstance(self._items, Sized) else ()
        self._total = float(options.get("total") or len(sized))
        self._progress, self._phase, self._done = progress, phase, 0.0

    def __iter__(self) -> Iterator[Any]:
        for item in self._items or ():
            yield item
            self.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to put away."""

    def update(self, count: float = 1) -> None:
        self._done += count
        if self._progress is not None and self._total:
            self._progress(self._phase, self._done, self._total)

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_args, **_options: None


def _make(bar: Callable[..., _Bar], *args: Any, **options: Any) -> _Bar:
    return bar(None, args, options)


@contextmanager
def silent(progress: LoadProgress | None = None, phase: str = "weights") -> Generator[None]:
    """Keep ``transformers``' bars and warnings off the terminal; the first bar becomes calls of ``progress``.

    Bars after the first are of quick work that nobody waits for. Its settings are global, so loads of one process take turns; all is put back at the end.
    """
    listeners = chain([progress], repeat(None))

    def bar(_factory: object, args: tuple[Any, ...], options: dict[str, Any]) -> _Bar:
        return _Bar(next(listeners), phase, args, options)

    with _silencing, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verbosity = transformers_logging.get_verbosity()
        hook, tqdm = transformers_logging.set_tqdm_hook(bar), gguf_utils.tqdm
        gguf_utils.tqdm = partial(_make, bar)  # the one bar that asks no hook
        transformers_logging.set_verbosity_error()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            transformers_logging.set_tqdm_hook(hook)
            gguf_utils.tqdm = tqdm
