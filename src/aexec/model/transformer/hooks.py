"""All that leans on private corners of ``transformers``, in one file; its minor version is pinned.

What is private here: ``post_init`` as the moment between "built on the meta device" and
"weights are read", at which a pipeline stage drops the layers it does not own, so that they
are never read; the duck type of a model's body; the marks that GGUF leaves on a model, and
its progress bar.
The conformance test runs over every architecture that we allow and guards all of it.

Source: transformers 5.24, ``modeling_utils.py``, ``from_pretrained`` and ``post_init``.
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
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from aexec.errors import ModelLoadError
from aexec.model.base import LoadProgress

__all__ = ("Stage", "convert_gguf", "load_stage", "model_class_name", "register_attention", "silent")

_LAST_NORM = re.compile(r"(ln_f|(final_)?(layer_?)?norm)")
transformers: Any = _transformers  # its annotations are partial
gguf_utils: Any = _gguf_utils
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
        incoming: Hidden states ``[1, num_tokens, hidden_size]`` from the stage before;
            set before each forward pass of any stage but the first.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
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
        """Which of ``num_layers`` are its own; earlier stages take one more when it does not divide."""
        share, rest = divmod(num_layers, self.size)
        start = self.rank * share + min(self.rank, rest)
        return range(start, start + share + (self.rank < rest))

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


def load_stage(directory: Path, class_name: str, stage: Stage, *, dtype: torch.dtype, attention: str) -> Any:
    """Read one stage's weights; the others are never touched.

    Raises:
        ModelLoadError: A weight of this stage is missing, or the files do not fit the model.
    """
    model_class: Any = _cut_class(getattr(transformers, class_name), stage)
    try:
        model, report = model_class.from_pretrained(
            directory, local_files_only=True, output_loading_info=True, dtype=dtype, attn_implementation=attention
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelLoadError(f"{directory} could not be loaded as {class_name}: {error}") from error
    _refuse_gaps(directory, class_name, report)
    model.config.pad_token_id = None  # no row of ours is padding, and some models would warn of it in each process
    return model.eval()


def _cut_class(model_class: Any, stage: Stage) -> Any:
    """A subclass that keeps one stage only; the class itself when there is but one."""
    if stage.size == 1:
        return model_class

    def post_init(self: Any) -> None:
        model_class.post_init(self)
        stage.cut(self)

    # The module's name decides whether transformers takes it for custom code; for custom code it silently skips
    # the renaming of checkpoint keys, and a head would stay random.
    members = {"post_init": post_init, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), members)


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
