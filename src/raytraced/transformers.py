"""The language model as one of transformers: import this file, and its Auto classes know the folders that models are saved in.

Axes: B batch, T tokens, S tokens with those of the cache, D width, V vocabulary, C blocks, L layers, N experts a layer.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raytraced.hub import card_of, config_values
from raytraced.models.card import ModelCard
from raytraced.models.gpt import GPT, Block
from raytraced.models.output import Output
from raytraced.models.table import build, complete_options
from raytraced.saving import known_card
from raytraced.words import require

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
    from transformers.utils.generic import can_return_tuple
    from transformers.utils.output_capturing import capture_outputs
except ImportError as error:
    raise ImportError("raytraced.transformers: needs transformers; pip install 'raytraced[transformers]'") from error

IGNORED = -100  # a label that is none


@strict
class RaytracedConfig(PreTrainedConfig):
    """What a card tells of a language model, in the words of transformers; `layer_options` are those of its routed layers."""

    model_type = "raytraced"
    keys_to_ignore_at_inference = ["past_key_values", "num_experts", "expert_load", "router_loss"]  # noqa: RUF012

    vocab_size: int = 256
    hidden_size: int = 96
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    max_position_embeddings: int = 128
    layer: str = "mre"
    layer_options: dict[str, Any] | None = None
    tokenizer: str | None = None
    task: str | None = None
    data: str | None = None
    training: dict[str, Any] | None = None
    calibration: dict[str, Any] | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        require(self.tie_word_embeddings, "tie_word_embeddings", False, "must be true: logits come from the embedding")
        options = complete_options(f"gpt-{self.layer}", {**(self.layer_options or {}), "dim": self.hidden_size})
        self.layer_options = {key: value for key, value in options.items() if key != "dim"}
        super().__post_init__(**kwargs)

    def card(self) -> ModelCard:
        """As the raytraced model has it."""
        return card_of(self.to_dict())


@dataclass
class RaytracedOutput(CausalLMOutputWithPast):
    """Loss, logits, cache, and what the routed layers did."""

    num_experts: Tensor | None = None  # (B, T), how many each token ran, all blocks together
    expert_load: Tensor | None = None  # (B, C, L, N), the share of a text's tokens that ran each; padding is none
    router_loss: Tensor | None = None  # of routers that have one; part of the loss


class RaytracedForCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder of raytraced, `model.model`, with the methods of transformers around it."""

    config_class = RaytracedConfig
    config: RaytracedConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _input_embed_layer = "embedding"  # its weights are the output's too
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    _can_record_outputs = {"hidden_states": Block}  # noqa: RUF012

    def __init__(self, config: RaytracedConfig) -> None:
        super().__init__(config)
        card = config.card()
        gpt = build(card.model, **card.spec, **card.options)
        assert isinstance(gpt, GPT)  # as every name that begins with gpt- is
        self.model, gpt.card = gpt, card
        self.post_init()

    @classmethod
    def from_gpt(cls, gpt: GPT) -> Self:
        """The same decoder, not a copy, for transformers; `.model` is the way back."""
        if not isinstance(gpt, GPT):
            raise ValueError(f"{type(gpt).__name__}: must be a language model, one whose name begins with gpt-")
        values = config_values(known_card(gpt, "used"))
        with torch.device("meta"):
            made = cls(RaytracedConfig(**values))
        made.model = gpt
        return made.train(gpt.training)

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
        **kwargs: Any,
    ) -> RaytracedOutput:
        """Tokens (B, T) or their vectors (B, T, D) -> logits (B, T, V); each block runs at most `max_experts` a token."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: give exactly one of them")
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        assert inputs is not None
        if use_cache is None:
            use_cache = self.config.use_cache and labels is None
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None:
            rule = "must grow: a cache of fixed size is not supported; leave cache_implementation out"
            require(not past_key_values.is_compileable, "past_key_values", type(past_key_values).__name__, rule)
        num_cached = 0 if past_key_values is None else past_key_values.get_seq_length()
        mask_BS = whole_mask(attention_mask, inputs, num_cached)
        check_positions(position_ids, mask_BS)
        judge = None if labels is None or not self.training else lambda logits_BTV: text_losses(logits_BTV, labels)
        out: Output = self.model(inputs, mask=mask_BS, cache=past_key_values, max_experts=max_experts, judge=judge)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=out.logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            if out.loss is not None:
                num_items = kwargs.get("num_items_in_batch")  # of all the batches that make up a step
                num_here = (labels[:, 1:] != IGNORED).sum()
                loss = loss + out.loss * (1 if num_items is None else num_here / num_items)
        active_BCTLN = torch.stack([route.active.detach() for route in out.routes], 1)
        num_tokens: Tensor | int = inputs.shape[1]
        if mask_BS is not None:
            num_tokens = mask_BS[:, -inputs.shape[1] :].sum(1).clamp_min(1)[:, None, None, None]
        return RaytracedOutput(
            loss=loss,
            logits=out.logits,
            past_key_values=past_key_values if use_cache else None,
            num_experts=out.num_experts,
            expert_load=active_BCTLN.sum(2) / num_tokens,
            router_loss=out.loss,
        )

    def resize_token_embeddings(self, *args: Any, **options: Any) -> nn.Module:
        """As transformers does it; the decoder and its card are told."""
        embedding: nn.Module = super().resize_token_embeddings(*args, **options)
        self.model.vocabulary = self.config.vocab_size
        self.model.card = self.config.card()
        return embedding

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Weights that a file lacks, drawn as the model's own classes draw them; those that it has stay."""
        held = (*module.parameters(), *module.buffers())
        loaded = [(own, own.clone()) for own in held if getattr(own, "_is_hf_initialized", False)]
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        elif isinstance(module, nn.ParameterDict) and "weight" in module:  # the entry gate
            bound = module["weight"].shape[-1] ** -0.5
            for parameter in module.values():
                nn.init.uniform_(parameter, -bound, bound)
        for own, value in loaded:
            own.copy_(value)


def whole_mask(attention_mask: Tensor | None, inputs: Tensor, num_cached: int) -> Tensor | None:
    """Which of all tokens are no padding (B, S), or None where none is."""
    if attention_mask is None:
        return None
    expected = (len(inputs), num_cached + inputs.shape[1])
    shape = tuple(attention_mask.shape)
    require(shape == expected, "attention_mask", shape, f"must be {expected}: all tokens, those of the cache first")
    return None if bool(attention_mask.all()) else attention_mask.bool()


def check_positions(position_ids: Tensor | None, mask_BS: Tensor | None) -> None:
    """Refuse positions that jump: only their differences count, and they are taken to be one."""
    if position_ids is None or position_ids.shape[-1] < 2:
        return
    jumps_BT = position_ids.diff() != 1
    if mask_BS is not None:
        kept_BT = mask_BS[:, -position_ids.shape[-1] :]
        jumps_BT = jumps_BT & kept_BT[:, 1:] & kept_BT[:, :-1]
    require(not bool(jumps_BT.any()), "position_ids", "some that jump", "must count up by one; texts cannot be packed")


def text_losses(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """The mean loss of each text (B,)."""
    targets_BT = labels_BT[:, 1:]
    losses_BT = cross_entropy(logits_BTV[:, :-1].mT.float(), targets_BT, ignore_index=IGNORED, reduction="none")
    return losses_BT.sum(1) / (targets_BT != IGNORED).sum(1).clamp_min(1)


AutoConfig.register("raytraced", RaytracedConfig)
AutoModelForCausalLM.register(RaytracedConfig, RaytracedForCausalLM)
