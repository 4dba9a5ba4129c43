"""Language models of raytraced as models of transformers.

Importing this file registers them with transformers' Auto classes, which then read the folders that
`raytraced.save_pretrained` writes.

Axes: B batch, T tokens, S tokens with those of the cache, D width, V vocabulary, L blocks, N experts per block.
"""

import math
import os
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raytraced.errors import did_you_mean, install_extra, printable, require
from raytraced.files import write_file
from raytraced.io.hub import TRANSFORMERS_NAMES, card_of, config_values, transformers_files
from raytraced.io.saving import known_card, limit_tensors
from raytraced.models.card import ModelCard, translate_old_names
from raytraced.models.gpt import GPT, Block
from raytraced.models.output import Output
from raytraced.models.registry import build, complete_options, find_model
from raytraced.plugins import missing_plugins
from raytraced.sequence import StopPerRow

try:
    from huggingface_hub.dataclasses import strict
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        DynamicCache,
        GenerationMixin,
        PreTrainedConfig,
        PreTrainedModel,
    )
    from transformers.cache_utils import Cache
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.utils.generic import TransformersKwargs, can_return_tuple
    from transformers.utils.output_capturing import capture_outputs
except ImportError as error:
    raise ImportError(
        f"raytraced.integrations.transformers: needs transformers; {install_extra('transformers')}"
    ) from error

IGNORED = -100  # label of a token without a target
# Limits of a configuration, which may come from elsewhere: a model beyond them would take hours to build.
MOST_BLOCKS, MOST_PARTS, MOST_TENSORS = 1_000, 10_000_000, 1_000  # MOST_TENSORS: of five blocks


@strict
class RaytracedConfig(PreTrainedConfig):
    """Configuration of a language model: its card, under the names of transformers.

    Args:
        vocab_size: Number of tokens.
        hidden_size: Width of the decoder.
        num_hidden_layers: Number of decoder blocks.
        num_attention_heads: Number of attention heads per block.
        max_position_embeddings: Largest number of tokens of a text.
        layer: Name of the router, for example "mre" or "top-k".
        layer_options: Options of the router and the experts; defaults are filled in, old names are translated.
        routing_input: What the router reads; see `raytraced.GPT`.
        routing_dim: Width of the routing embedding, where there is one.
        path_tokens: How many tokens determine a path; see `raytraced.GPT`.
        tokenizer: Content of a tokenizer file; None for bytes.
        task: Task of the model's card.
        data: Name of the data set that the model was trained on.
        training: Options of the training run.
        calibration: Confidence threshold and its figures.
        plugins: What the model needs besides raytraced, such as "package NAME VERSION"; nothing is imported for it.
        dial: The table of budgets.
        use_cache: Whether `generate` keeps keys and values.
        tie_word_embeddings: Must be true.
        bos_token_id: Token that begins a text.
        eos_token_id: Token or tokens that end a text.
        pad_token_id: Token that fills shorter texts.
    """

    model_type = "raytraced"
    keys_to_ignore_at_inference = ["past_key_values", "num_experts", "expert_load", "router_loss"]  # noqa: RUF012

    vocab_size: int = 256
    hidden_size: int = 96
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    max_position_embeddings: int = 128
    layer: str = "mre"
    layer_options: dict[str, Any] | None = None
    routing_input: str | None = None
    routing_dim: int | None = None
    path_tokens: int | None = None
    tokenizer: str | None = None
    task: str | None = None
    data: str | None = None
    training: dict[str, Any] | None = None
    calibration: dict[str, Any] | None = None
    plugins: list[str] | None = None
    dial: dict[str, Any] | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        require(self.tie_word_embeddings, "tie_word_embeddings", False, "must be true: logits come from the embedding")
        self.training, self.calibration = translate_old_names(self.training), translate_old_names(self.calibration)
        stored_options = translate_old_names(self.layer_options or {})
        if repeated := [name for name in stored_options if name in TRANSFORMERS_NAMES]:
            rule = f"a configuration states it as {TRANSFORMERS_NAMES[repeated[0]]}; leave it out here"
            raise ValueError(f"layer_options holds {repeated[0]}: {rule}")
        try:
            find_model(f"gpt-{self.layer}")
        except ValueError as error:
            if not self.plugins:
                raise
            raise ValueError(f"layer={printable(self.layer)}: is not known; {missing_plugins(self.plugins)}") from error
        options = complete_options(f"gpt-{self.layer}", {**stored_options, "dim": self.hidden_size})
        self.layer_options = {key: value for key, value in options.items() if key != "dim"}
        super().__post_init__(**kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing to do: the code is in a package, so it is not copied into folders."""

    def card(self) -> ModelCard:
        """The card of the raytraced model."""
        return card_of(self.to_dict())


@dataclass
class RaytracedOutput(CausalLMOutputWithPast):
    """Loss, logits and cache, as transformers' output has them, and the routing."""

    num_experts: Tensor | None = None  # (B, T), number of experts that each token ran, summed over the blocks
    expert_load: Tensor | None = None  # (B, L, N), share of a text's tokens that ran each expert, without padding
    router_loss: Tensor | None = None  # (), the routers' own loss where they have one; part of `loss`


class RaytracedForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model of raytraced with the methods of transformers; `model.model` is the decoder itself.

    Args:
        config: The configuration; one that describes a model too large for this machine is refused.
    """

    config_class = RaytracedConfig
    config: RaytracedConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _input_embed_layer = "embedding"  # its weights are those of the output layer, too
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    _can_record_outputs = {"hidden_states": Block}  # noqa: RUF012
    draft_experts: int | None = None  # of an assistant: limits `max_experts` of every call

    def __init__(self, config: RaytracedConfig) -> None:
        super().__init__(config)
        card = config.card()
        check_size_of_config(card)
        gpt = build(card.model, **card.spec, **card.options)
        assert isinstance(gpt, GPT)  # every model whose name begins with gpt- is one
        self.model, gpt.card = gpt, card
        self.post_init()

    @classmethod
    def from_gpt(cls, gpt: GPT) -> Self:
        """Wrap a decoder, without copying it.

        Args:
            gpt: A language model made by `raytraced.build` or `raytraced.load`.

        Returns:
            The model for transformers; its attribute `model` is `gpt`.
        """
        if not isinstance(gpt, GPT):
            raise ValueError(f"{type(gpt).__name__}: must be a language model, one whose name begins with gpt-")
        values = config_values(known_card(gpt, "used"))
        with torch.device("meta"):
            made = cls(RaytracedConfig(**values))
        made.model = gpt
        return made.train(gpt.training)

    def assistant(self, max_experts: int) -> "RaytracedForCausalLM":
        """The same model with a small budget, for `generate(..., assistant_model=model.assistant(2))`.

        Args:
            max_experts: Largest number of experts that a drafted token runs, all blocks together.

        Returns:
            A model that shares the weights.
        """
        able, rule = self.model.answers_along_the_way, f"{self.model.name} has no smaller budget"
        require(able, "max_experts", max_experts, rule)
        require(max_experts >= 0, "max_experts", max_experts, "must not be negative")
        made = type(self).from_gpt(self.model)
        made.generation_config, made.draft_experts = deepcopy(self.generation_config), max_experts
        return made

    @capture_outputs
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        max_experts: int | None = None,
        stop: StopPerRow | None = None,
        experts: float | None = None,
        effort: float | None = None,
        **kwargs: Any,
    ) -> RaytracedOutput:
        """Compute the logits of the token after each token.

        Args:
            input_ids: Tokens (B, T).
            attention_mask: (B, S), 0 where there is padding, for all tokens including those of the cache.
            position_ids: Positions (B, T) or (1, T); must count up by one.
            past_key_values: A cache that grows; one of fixed size is refused.
            inputs_embeds: Vectors (B, T, D) in place of tokens.
            labels: Targets (B, T), -100 where there is none; with them the output has a loss.
            use_cache: Whether to return the cache; the configuration's choice by default, False with labels.
            max_experts: Largest number of experts that a token runs, all blocks together.
            stop: How much the output node's rate counts: a number, or one per text (B,); smaller values run more experts.
            experts: In place of `stop`: the mean number of experts per token that a calibrated model runs.
            effort: In place of `stop`: a share of a calibrated model's full cost, up to 1.
            **kwargs: Options that transformers passes to every model, such as `num_items_in_batch`; others are refused.

        Returns:
            RaytracedOutput with logits (B, T, V), num_experts (B, T) and expert_load (B, L, N).
        """
        check_names(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: give exactly one of them")
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        assert inputs is not None
        recomputes = self.model.gradient_checkpointing and self.training
        if use_cache is None:
            use_cache = self.config.use_cache and labels is None and not recomputes
        rule = (
            "must be False with gradient checkpointing in training: a block that runs twice would fill the cache twice"
        )
        require(not (use_cache and recomputes), "use_cache", use_cache, rule)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None:
            rule = "must grow: a cache of fixed size is not supported; leave cache_implementation out"
            require(not past_key_values.is_compileable, "past_key_values", type(past_key_values).__name__, rule)
        if self.draft_experts is not None:
            max_experts = self.draft_experts if max_experts is None else min(max_experts, self.draft_experts)
        num_cached = 0 if past_key_values is None else past_key_values.get_seq_length()
        mask_BS = whole_mask(attention_mask, inputs, num_cached)
        check_positions(position_ids, mask_BS)
        sample_loss_fn = (
            None if labels is None or not self.training else lambda logits_BTV: text_losses(logits_BTV, labels)
        )
        out: Output = self.model(
            inputs,
            mask=mask_BS,
            cache=past_key_values,
            max_experts=max_experts,
            stop=stop,
            experts=experts,
            effort=effort,
            sample_loss_fn=sample_loss_fn,
        )
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=out.logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            if out.loss is not None:
                num_items = kwargs.get("num_items_in_batch")  # targets of all batches that make up a step
                num_here = (labels[:, 1:] != IGNORED).sum()
                loss = loss + out.loss * (1 if num_items is None else num_here / num_items)
        active_BTLN = out.routes[0].active.detach()
        num_tokens: Tensor | int = inputs.shape[1]
        if mask_BS is not None:
            num_tokens = mask_BS[:, -inputs.shape[1] :].sum(1).clamp_min(1)[:, None, None]
        return RaytracedOutput(
            loss=loss,
            logits=out.logits,
            past_key_values=past_key_values if use_cache else None,
            num_experts=out.num_experts,
            expert_load=active_BTLN.sum(1) / num_tokens,
            router_loss=out.loss,
        )

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **options: Any) -> None:
        """As in transformers, and with the tokenizer of the model's card, unless the folder holds one already.

        Args:
            save_directory: The folder.
            args: As in transformers.
            options: As in transformers.
        """
        super().save_pretrained(save_directory, *args, **options)
        if options.get("is_main_process", True):
            for name, content in transformers_files(self.config.card()).items():
                if not (path := Path(save_directory) / name).exists():
                    write_file(path, content)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModelForCausalLM") -> None:
        """Nothing to do: the code is in a package, so it is not copied into folders."""

    def _set_gradient_checkpointing(
        self, enable: bool = True, *args: Any, every_n_layers: int = 1, **kind: Any
    ) -> None:
        """Called by transformers; how blocks are computed again is the decoder's choice."""
        rule = "must be 1: all blocks are computed again, or none"
        require(every_n_layers == 1, "every_n_layers", every_n_layers, rule)
        self.model.gradient_checkpointing = enable

    def resize_token_embeddings(self, *args: Any, **options: Any) -> nn.Module:
        """As in transformers; the decoder and its card get the new size.

        Args:
            args: As in transformers.
            options: As in transformers.

        Returns:
            The embedding (V, D).
        """
        embedding: nn.Module = super().resize_token_embeddings(*args, **options)
        self.model.vocab_size = self.config.vocab_size
        self.model.resize_routing_embedding()
        self.model.card = self.config.card()
        return embedding

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the weights that a file lacks, as the model's own classes draw them; loaded weights stay as they are."""
        held = (*module.parameters(), *module.buffers())
        loaded = [(own, own.clone()) for own in held if getattr(own, "_is_hf_initialized", False)]
        if module is self.model.embedding:
            nn.init.normal_(self.model.embedding.weight, std=self.model.embedding.embedding_dim**-0.5)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        elif isinstance(module, nn.ParameterDict) and "weight" in module:  # the entry gate
            bound = module["weight"].shape[-1] ** -0.5
            for parameter in module.values():
                nn.init.uniform_(parameter, -bound, bound)
        for own, value in loaded:
            own.copy_(value)


def check_size_of_config(card: ModelCard) -> None:
    """Refuse a card whose model cannot be built here, in little time and without allocating its weights."""
    depth = card.spec["depth"]
    require(depth <= MOST_BLOCKS, "num_hidden_layers", depth, f"must be at most {MOST_BLOCKS:,}")
    counts = {name: value for name, value in card.options.items() if name.startswith("num_") and isinstance(value, int)}
    num_parts = math.prod(max(1, count) for count in counts.values())
    largest = max(counts, key=lambda name: counts[name], default="layer_options")
    rule = f"the layer would have {num_parts:,} parts; must be at most {MOST_PARTS:,}"
    require(num_parts <= MOST_PARTS, largest, counts.get(largest), rule)
    with torch.device("meta"), limit_tensors(MOST_TENSORS):
        shallow = [build(card.model, **card.spec | {"depth": few}, **card.options) for few in (2, 3)]
    if hasattr(os, "sysconf"):  # not on Windows
        two, three = (sum(parameter.nbytes for parameter in one.parameters()) for one in shallow)
        num_bytes = two + (depth - 2) * (three - two)  # beyond two blocks, every block adds the same
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        sizes = f"its weights take {num_bytes / 1e9:,.0f} GB, the machine has {available / 1e9:,.0f} GB"
        require(num_bytes <= available, "model", card.model, f"{sizes}; make it smaller")


def check_names(options: dict[str, Any]) -> None:
    """Refuse options of a call that neither the model nor transformers has: ignored, a budget would seem to be kept."""
    known = TransformersKwargs.__optional_keys__
    if unknown := [name for name, value in options.items() if value is not None and name not in known]:
        own = signature(RaytracedForCausalLM.forward).parameters
        names = [name for name in own if name not in ("self", "kwargs")]
        rule = did_you_mean(unknown[0], names, "leave it out")
        raise ValueError(f"{unknown[0]}: a language model has no such option; {rule}")


def whole_mask(attention_mask: Tensor | None, inputs: Tensor, num_cached: int) -> Tensor | None:
    """True where a token is not padding (B, S), or None where no token is padding."""
    if attention_mask is None:
        return None
    expected = (len(inputs), num_cached + inputs.shape[1])
    shape = tuple(attention_mask.shape)
    require(shape == expected, "attention_mask", shape, f"must be {expected}: all tokens, those of the cache first")
    return None if bool(attention_mask.all()) else attention_mask.bool()


def check_positions(position_ids: Tensor | None, mask_BS: Tensor | None) -> None:
    """Refuse positions that do not count up by one: the model uses their differences only, and assumes that they do."""
    if position_ids is None or position_ids.shape[-1] < 2:
        return
    jumps_BT = position_ids.diff() != 1
    if mask_BS is not None:
        kept_BT = mask_BS[:, -position_ids.shape[-1] :]
        jumps_BT = jumps_BT & kept_BT[:, 1:] & kept_BT[:, :-1]
    require(not bool(jumps_BT.any()), "position_ids", "[…]", "must count up by one; texts cannot be packed")


def text_losses(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """The mean loss of each text (B,)."""
    targets_BT = labels_BT[:, 1:]
    losses_BT = cross_entropy(logits_BTV[:, :-1].mT.float(), targets_BT, ignore_index=IGNORED, reduction="none")
    return losses_BT.sum(1) / (targets_BT != IGNORED).sum(1).clamp_min(1)


AutoConfig.register("raytraced", RaytracedConfig)
AutoModelForCausalLM.register(RaytracedConfig, RaytracedForCausalLM)
