"""The language model inside transformers: Auto classes, generate with a cache, Trainer, routing statistics, and back."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.utils import logging

import raytraced as rt
from raytraced.integrations.transformers import RaytracedConfig, RaytracedForCausalLM
from raytraced.models.gpt import KVCache
from raytraced.models.registry import MODELS
from raytraced.tasks.text.tokens import read_tokenizer

SMALL = {"dim": 16, "num_heads": 2, "context": 24}
GRID = {"hidden": 8, "num_experts": 3}
ROUTERS = [name for name, info in MODELS.items() if info.model is None]

logging.disable_progress_bar()


def language_model(name="mre", **given):
    torch.manual_seed(0)
    options = {} if name in ("dense", "mlp-total", "mlp-avg") else GRID
    return rt.build(f"gpt-{name}", **SMALL, **options, **given).eval()


@pytest.fixture
def tokens():
    return torch.randint(1, 256, (3, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model():
    return RaytracedForCausalLM.from_gpt(language_model())


@torch.no_grad()
@pytest.mark.parametrize("name", ROUTERS)
def test_auto_classes_read_the_folder_that_a_language_model_saves(name, tokens, tmp_path):
    gpt = language_model(name)
    rt.save_pretrained(gpt, tmp_path)
    model, problems = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(model, RaytracedForCausalLM)
    assert not any(problems.values()), problems
    assert torch.equal(model(tokens).logits, gpt(tokens).logits)
    assert model.model.card == gpt.card


@torch.no_grad()
def test_a_model_goes_to_transformers_and_back(tokens, tmp_path):
    gpt = language_model()
    model = RaytracedForCausalLM.from_gpt(gpt)
    assert model.model is gpt
    model.save_pretrained(tmp_path / "theirs")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").model
    assert again.card == gpt.card
    rt.save_pretrained(again, tmp_path / "ours")
    assert torch.equal(rt.load(tmp_path / "ours")(tokens).logits, gpt(tokens).logits)
    assert AutoConfig.from_pretrained(tmp_path / "theirs").card() == gpt.card


TEXTS = ["Hello, Ā wörld\n\t é 你好 \x00x", "", " a  b", "don't , ."]


@pytest.mark.parametrize("write", [rt.save_pretrained, lambda gpt, folder: from_gpt(gpt).save_pretrained(folder)])
def test_the_tokenizer_of_a_byte_model_gives_bytes_and_takes_them_back(write, tmp_path):
    write(language_model(), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert tokenizer(text).input_ids == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.model_max_length == 24
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 0, 0)
    padded = tokenizer(["ab", "abcd"], padding=True)
    assert padded["input_ids"] == [[0, 0, 97, 98], [97, 98, 99, 100]]
    assert padded["attention_mask"] == [[0, 0, 1, 1], [1, 1, 1, 1]]
    read_tokenizer(str(tmp_path / "tokenizer.json"))  # may be an option of training, too


def from_gpt(gpt):
    return RaytracedForCausalLM.from_gpt(gpt)


def trained_tokenizer(special=(), zeros=False):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 280, "initial_alphabet": alphabet, "special_tokens": list(special)}
    texts = [text if zeros else text.replace("\x00", "") for text in TEXTS] * 9
    made.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(show_progress=False, **options))
    return made


@pytest.mark.parametrize(
    ("special", "end"), [((), "\x00"), (("<pad>", "</s>", "<x>"), "</s>"), (("<a>", "<b>"), "<b>")]
)
def test_the_tokenizer_in_the_card_is_shipped_with_the_same_numbers(special, end, tmp_path):
    own = trained_tokenizer(special)
    gpt = language_model(vocab_size=own.get_vocab_size(), tokenizer=own.to_str())
    rt.save_pretrained(gpt, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, *special):
        assert tokenizer(text).input_ids == own.encode(text).ids
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token == tokenizer.pad_token == end
    assert len(tokenizer) == gpt.vocab_size
    assert rt.load(tmp_path).tokenizer == own.to_str()  # the card keeps it as it is


def test_a_tokenizer_that_joins_byte_0_to_others_keeps_its_numbers_and_has_no_end(tmp_path):
    own = trained_tokenizer(zeros=True)
    assert any("Ā" in token and token != "Ā" for token in own.get_vocab())
    rt.save_pretrained(language_model(vocab_size=own.get_vocab_size(), tokenizer=own.to_str()), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert [tokenizer(text).input_ids for text in TEXTS] == [own.encode(text).ids for text in TEXTS]
    assert tokenizer.eos_token is None


def test_no_tokenizer_is_shipped_where_there_is_none(tmp_path):
    rt.save_pretrained(language_model(vocab_size=300), tmp_path / "without")
    assert not [file for file in (tmp_path / "without").iterdir() if "tokenizer" in file.name]


@pytest.mark.parametrize(
    "stored", ["", "[]", "null", "[" * 100_000, '{"model": 3}', '{"added_tokens": 7, "model": {}}', {"model": {}}]
)
def test_a_card_whose_tokenizer_is_none_is_refused_in_one_line(stored, tmp_path):
    gpt = language_model()
    gpt.card.spec["tokenizer"] = stored
    with pytest.raises(ValueError, match=r"^gpt-mre: its tokenizer is not a tokenizer.json \(\w+\)$"):
        rt.save_pretrained(gpt, tmp_path / "folder")
    assert not (tmp_path / "folder" / "config.json").exists()


def test_a_tokenizer_that_is_in_the_folder_stays(model, tmp_path):
    (tmp_path / "tokenizer.json").write_text("theirs")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "theirs"


def test_a_pipeline_continues_texts_as_the_model_does(tmp_path):
    gpt = language_model()
    rt.save_pretrained(gpt, tmp_path)
    generate = pipeline("text-generation", str(tmp_path), device="cpu")
    options = {"max_new_tokens": 4, "do_sample": False, "return_tensors": True}
    prompts = ["To be", "a"]
    answers = generate(prompts, batch_size=2, **options)
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        own = [int(drawn.tokens) for drawn in gpt.generate(torch.tensor([list(prompt.encode())]), 4, temperature=0)]
        assert [token for token in answer["generated_token_ids"] if token] == [*prompt.encode(), *own]
    assert generate("To be", max_new_tokens=2)[0]["generated_text"].startswith("To be")


TRUSTING = """
import sys
from transformers import AutoModelForCausalLM
assert "raytraced" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
model.save_pretrained(sys.argv[2])
print(type(model).__name__, model.model.card.model)
"""


@pytest.mark.slow  # a process that imports transformers, which the tests above do in this one
def test_a_program_that_never_imports_raytraced_reads_the_folder_if_it_trusts_its_code(tmp_path):
    """As lm-evaluation-harness does with `trust_remote_code=True`."""
    rt.save_pretrained(language_model(), tmp_path / "one")
    env = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", TRUSTING, str(tmp_path / "one"), str(tmp_path / "two")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "RaytracedForCausalLM gpt-mre\n", done.stderr
    code = [(tmp_path / folder / "modeling_raytraced.py").read_text() for folder in ("one", "two")]
    assert code[0] == code[1]
    assert "pip install" not in code[0]  # whoever reads it has no clone, and pip knows no raytraced
    assert not (tmp_path / "two" / "transformers.py").exists()  # the package's own code is not copied


def say_more(model):
    """Other weights: fresh ones repeat the last token, so that every text and every guess is right."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)


def test_greedy_generation_is_the_decoders_own_with_a_cache_and_without(model, tokens):
    say_more(model)
    own = torch.stack([drawn.tokens for drawn in model.model.generate(tokens, 12, temperature=0)], 1)
    for options in ({}, {"use_cache": False}, {"past_key_values": DynamicCache()}):
        assert torch.equal(model.generate(tokens, max_new_tokens=12, do_sample=False, **options)[:, 9:], own)
    own = torch.stack([drawn.tokens for drawn in model.model.generate(tokens, 6, temperature=0, max_experts=1)], 1)
    assert torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False, max_experts=1)[:, 9:], own)


def test_paths_of_two_tokens_are_the_same_with_a_cache_with_beams_and_after_padding(tokens, tmp_path):
    model = RaytracedForCausalLM.from_gpt(language_model(path_tokens=2))
    say_more(model)
    own = torch.stack([drawn.tokens for drawn in model.model.generate(tokens, 12, temperature=0)], 1)
    mask = torch.arange(9) >= torch.tensor([[0], [2], [3]])
    for options in ({}, {"num_beams": 3}, {"attention_mask": mask, "pad_token_id": 0}):
        found = [
            model.generate(tokens, max_new_tokens=12, do_sample=False, use_cache=use_cache, **options)[:, 9:]
            for use_cache in (True, False)
        ]
        assert torch.equal(*found)
        assert options or torch.equal(found[0], own)
    model.save_pretrained(tmp_path)
    assert RaytracedForCausalLM.from_pretrained(tmp_path).model.path_tokens == 2


def test_generation_computes_each_token_once(model, tokens, monkeypatch):
    lengths = []
    answer = model.model.answer
    monkeypatch.setattr(
        model.model,
        "answer",
        lambda tokens, *call, **own: lengths.append(tokens.shape[1]) or answer(tokens, *call, **own),
    )
    model.generate(tokens, max_new_tokens=5, do_sample=False)
    assert lengths == [9, 1, 1, 1, 1]


def test_padding_on_the_left_changes_nothing(model, tokens):
    padded = torch.cat((torch.zeros(3, 4, dtype=torch.long), tokens), 1)
    mask = (torch.arange(13) >= 4).long().expand(3, -1)
    expected = model.generate(tokens, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(padded, attention_mask=mask, max_new_tokens=8, do_sample=False)[:, 4:], expected)
    out, alone = model(padded, attention_mask=mask), model(tokens)
    torch.testing.assert_close(out.logits[:, 4:], alone.logits, rtol=0, atol=1e-5)
    assert not out.num_experts[:, :4].any()
    assert torch.equal(out.num_experts[:, 4:], alone.num_experts)
    torch.testing.assert_close(out.expert_load, alone.expert_load)


@torch.no_grad()
def test_padding_and_a_cache_go_together_token_by_token(model, tokens):
    """Several tokens after cached ones, some of which are padding: the decoder's own mask over all of them."""
    mask = torch.arange(9) >= torch.tensor([[0], [2], [3]])
    cache = KVCache()
    first = model.model(tokens[:, :5], mask=mask[:, :5], cache=cache).logits
    rest = model.model(tokens[:, 5:], mask=mask, cache=cache).logits
    whole = model.model(tokens, mask=mask).logits
    torch.testing.assert_close(torch.cat((first, rest), 1)[mask], whole[mask], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"^mask=torch.Size\(\[3, 4\]\): must be \(3, 9\), all tokens so far$"):
        model.model(tokens[:, 5:], mask=mask[:, 5:], cache=cache_of(model, tokens))


def cache_of(model, tokens):
    cache = KVCache()
    model.model(tokens[:, :5], cache=cache)
    return cache


@pytest.mark.parametrize(
    "options",
    [{"do_sample": True}, {"num_beams": 3, "do_sample": False}, {"num_return_sequences": 2, "do_sample": True}],
)
def test_other_ways_to_generate_work(model, tokens, options):
    out = model.generate(tokens, max_new_tokens=5, return_dict_in_generate=True, output_logits=True, **options)
    assert out.sequences.shape == (3 * options.get("num_return_sequences", 1), 14)
    assert out.past_key_values.get_seq_length() == 13


@pytest.mark.parametrize("assistant", ["itself", "another", "the prompt"])
def test_tokens_that_are_guessed_and_checked_are_the_greedy_ones(model, tokens, assistant):
    """A guess that is refused is taken out of the cache again; several tokens come after cached ones."""
    other = RaytracedForCausalLM.from_gpt(language_model())
    say_more(model)
    say_more(other)
    options = {"prompt_lookup_num_tokens": 2} if assistant == "the prompt" else {"assistant_model": other}
    if assistant == "itself":
        options = {"assistant_model": model}
    prompt = tokens[:1].repeat(1, 2)[:, :12]  # it repeats itself, so that prompt lookup finds something
    settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected, found = model.generate(prompt, **settings), model.generate(prompt, **settings, **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["tokens", "vectors"])
def test_generation_continues_from_a_cache_that_it_returned(tokens, kind):
    model = RaytracedForCausalLM.from_gpt(language_model(routing_input="first-block"))

    def generate(inputs, mask, **options):
        start = {"input_ids": inputs} if kind == "tokens" else {"inputs_embeds": model.get_input_embeddings()(inputs)}
        return model.generate(
            **start, attention_mask=mask, do_sample=False, return_dict_in_generate=True, pad_token_id=0, **options
        )

    mask = torch.arange(9) >= torch.tensor([[0], [2], [3]])
    whole, first = generate(tokens, mask, max_new_tokens=6), generate(tokens, mask, max_new_tokens=4)
    text = torch.cat((tokens, first.sequences[:, -4:]), 1)
    longer = torch.cat((mask, torch.ones(3, 4, dtype=torch.bool)), 1)
    last = generate(text, longer, max_new_tokens=2, past_key_values=first.past_key_values)
    assert torch.equal(last.sequences[:, -2:], whole.sequences[:, -2:])
    for ours, theirs in zip(last.past_key_values.layers, whole.past_key_values.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_every_step_of_generation_gives_its_logits_hidden_states_and_cache(model, tokens, num_beams):
    outputs = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    out = model.generate(
        tokens, max_new_tokens=4, do_sample=False, num_beams=num_beams, return_dict_in_generate=True, **outputs
    )
    rows = 3 * num_beams
    assert [step.shape for step in (*out.scores, *out.logits)] == [(rows, 256)] * 8
    assert [[states.shape for states in step] for step in out.hidden_states] == [
        [(rows, 1 if step else 9, 16)] * 3 for step in range(4)
    ]
    assert [layer.keys.shape for layer in out.past_key_values.layers] == [(rows, 2, 12, 8)] * 2


def test_without_a_prompt_generation_begins_at_the_first_token(model):
    generated = model.generate(bos_token_id=7, max_new_tokens=5, do_sample=False)
    assert torch.equal(generated, model.generate(torch.tensor([[7]]), max_new_tokens=5, do_sample=False))


@torch.no_grad()
@pytest.mark.parametrize("routing_input", ["embedding", "first-block"])
def test_vectors_in_place_of_tokens_give_the_same(routing_input, tokens):
    model = RaytracedForCausalLM.from_gpt(language_model(routing_input=routing_input))
    vectors = model.get_input_embeddings()(tokens)
    assert torch.equal(model(inputs_embeds=vectors).logits, model(tokens).logits)
    for options in ({}, {"num_beams": 2}):
        expected = model.generate(tokens, max_new_tokens=5, do_sample=False, **options)
        alone = model.generate(inputs_embeds=vectors, max_new_tokens=5, do_sample=False, **options)
        assert torch.equal(alone, expected[:, 9:])


def test_routing_statistics_are_those_of_the_routes(model, tokens):
    out, own = model(tokens, output_hidden_states=True), model.model(tokens)
    assert torch.equal(out.num_experts, own.num_experts)
    assert out.expert_load.shape == (3, 2, 3)
    torch.testing.assert_close(out.expert_load, own.routes[0].active.mean(1))
    assert len(out.hidden_states) == 3
    assert model(tokens, return_dict=False)[0].shape == (3, 9, 256)
    assert model(tokens, max_experts=1).num_experts.max() == 1  # all blocks together


@pytest.mark.parametrize("name", ["top-any", "ada-k"])
def test_the_loss_has_the_routers_own_part_in_proportion(name, tokens):
    model = RaytracedForCausalLM.from_gpt(language_model(name)).train()
    torch.manual_seed(3)
    out = model(tokens, labels=tokens)
    torch.manual_seed(3)
    half = model(tokens, labels=tokens, num_items_in_batch=torch.tensor(2 * 3 * 8))
    assert out.router_loss is not None
    torch.testing.assert_close(half.loss, out.loss / 2)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected + out.router_loss)


def loss_and_gradients(model, tokens, **options):
    model.zero_grad()
    torch.manual_seed(3)
    out = model(tokens, labels=tokens, **options)
    out.loss.backward()
    return out.loss.detach(), {name: own.grad for name, own in model.named_parameters() if own.grad is not None}


CHECKPOINTED = [(name, None) for name in ROUTERS] + [("mre", "embedding"), ("mre", "first-block")]


@pytest.mark.parametrize(("name", "routing_input"), CHECKPOINTED)
def test_gradients_are_the_same_with_gradient_checkpointing_and_blocks_run_twice(name, routing_input, tokens):
    options = {} if routing_input is None else {"routing_input": routing_input}
    model = from_gpt(language_model(name, depth=3, **options)).train()
    padding = {"attention_mask": (torch.arange(9) >= torch.tensor([[0], [2], [0]])).long()}
    calls = [0, 0, 0]
    for number, block in enumerate(model.model.blocks):
        block.attention.register_forward_hook(lambda *_, n=number: calls.__setitem__(n, calls[n] + 1))
    start = {key: value.clone() for key, value in model.state_dict().items()}
    plain = [loss_and_gradients(model, tokens, **kept) for kept in ({}, padding)]
    end = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(start)  # some routers move a bias in every pass
    assert calls == [2, 2, 2]
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    again = [loss_and_gradients(model, tokens, **kept) for kept in ({}, padding)]
    kept_first = routing_input == "first-block" or name in ("dense", "mlp-total", "mlp-avg")
    first = 4 if kept_first else 6  # a first block whose vectors decide on all blocks is kept
    assert calls == [first, 6, 6]
    assert all(torch.equal(value, end[key]) for key, value in model.state_dict().items())
    for (loss, gradients), (expected_loss, expected) in zip(again, plain, strict=True):
        assert torch.equal(loss, expected_loss)
        assert gradients.keys() == expected.keys()
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[parameter], rtol=1e-5, atol=1e-7)
    model.gradient_checkpointing_disable()
    loss_and_gradients(model, tokens)
    assert calls == [first + 1, 7, 7]


class Lines(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        text = torch.arange(index, index + 12) % 8
        return {"input_ids": text, "labels": text}


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
def test_trainer_trains_it(model, tmp_path):
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=60, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Lines(), eval_dataset=Lines())
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 4
    assert trainer.predict(Lines()).predictions.shape == (32, 12, 256)
    trainer.save_model(tmp_path / "trained")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    prompt = torch.arange(8)[None]
    assert again.generate(prompt, max_new_tokens=6, do_sample=False)[0, 8:].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_larger_vocabulary_reaches_decoder_and_card(model, tokens, tmp_path):
    model.resize_token_embeddings(260, mean_resizing=False)
    assert model(tokens).logits.shape[-1] == 260
    rt.save_pretrained(model.model, tmp_path)
    assert rt.load(tmp_path).vocab_size == 260


def test_weights_that_a_file_lacks_are_drawn_and_the_others_stay(tmp_path):
    model = RaytracedForCausalLM.from_gpt(rt.build("gpt-mre", **SMALL, **GRID, depth=3))
    model.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    lacking = "model.layer.router.routing.gate_first"
    without = {name: tensor for name, tensor in held.items() if name != lacking}
    save_file(without, tmp_path / "model.safetensors", {"format": "pt"})
    found = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in without.items())
    assert found[lacking].isfinite().all()
    assert (
        found[lacking][:, -1].mean() < found[lacking][:, :-1].mean() - 2
    )  # lower towards the output node by output_logit_offset, as fresh ones are


OLD_NAMES = {"input_rank": "sight_rank", "output_logit_offset": "reach", "exit_loss": "look_loss"}


@torch.no_grad()
def test_a_folder_of_an_old_version_is_read(tokens, tmp_path):
    gpt = language_model()
    gpt.card = replace(gpt.card, training={"exit_loss": 0.5}, calibration={"confidence": 0.9, "exit_every": "layer"})
    rt.save_pretrained(gpt, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["layer_options"] = {OLD_NAMES.get(name, name): value for name, value in config["layer_options"].items()}
    config |= {"training": {"look_loss": 0.5}, "calibration": {"sure": 0.9, "look": "layer"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "sight_rank" in config["layer_options"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model(tokens).logits, gpt(tokens).logits)
    assert model.model.card == gpt.card


HUGE = {
    "many layers": ({"layer_options": {"num_layers": 10**9}}, "num_layers=1000000000: gpt-mre has one grid for all"),
    "many experts": (
        {"layer_options": {"num_experts": 10**9}},
        "num_experts=1000000000: the layer would have .* parts",
    ),
    "many gates": (
        {"layer": "chain", "layer_options": {"num_rounds": 10**5}},
        "it describes a model of many more tensors",
    ),
    "many blocks": ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be at most 1,000"),
    "wide": ({"hidden_size": 10**6}, r"model=gpt-mre: its weights take \d.* GB, the machine has .* GB"),
}


@pytest.mark.parametrize("case", HUGE)
def test_a_configuration_of_a_huge_model_is_refused_at_once(case):
    change, message = HUGE[case]
    began = time.process_time()
    with pytest.raises(ValueError, match=message) as raised:
        RaytracedForCausalLM(RaytracedConfig(**change))
    assert time.process_time() - began < 5  # building it would take hours, or all memory
    assert "\n" not in str(raised.value)


def test_bad_input_is_refused_in_one_line(model, tokens, tmp_path):
    cases = {
        "input_ids, inputs_embeds: give exactly one of them": lambda: model(),
        "tokens=25: must be at most context=24": lambda: model(tokens.repeat(1, 3)[:, :25]),
        "routing_input=token: routes by tokens; give these, not embeddings": lambda: model(inputs_embeds=torch.zeros(3, 9, 16)),
        "attention_mask=(3, 4): must be (3, 9): all tokens, those of the cache first": lambda: model(tokens, attention_mask=torch.zeros(3, 4)),
        "attention_mask=(3, 10): must be (3, 9): all tokens, those of the cache first": lambda: model(tokens, attention_mask=torch.ones(3, 10)),
        "position_ids=[…]: must count up by one; texts cannot be packed": lambda: model(tokens, position_ids=torch.arange(9)[None] % 5),
        "past_key_values=StaticCache: must grow: a cache of fixed size is not supported; leave cache_implementation out":
            lambda: model.generate(tokens, max_new_tokens=2, cache_implementation="static"),
        "every_n_layers=2: must be 1: all blocks are computed again, or none": lambda: model.gradient_checkpointing_enable(every_n_layers=2),
        "use_cache=True: must be False with gradient checkpointing in training: a block that runs twice would fill the cache twice":
            lambda: recomputing()(tokens, use_cache=True),
        "cache=KVCache: leave it out with gradient_checkpointing: a block that runs twice would fill it twice":
            lambda: recomputing().model(tokens, cache=KVCache()),
        "tie_word_embeddings=False: must be true: logits come from the embedding": lambda: RaytracedConfig(tie_word_embeddings=False),
        "model=gpt-mer: no such model; did you mean gpt-mre?": lambda: RaytracedConfig(layer="mer"),
        "layer_options holds dim: a configuration states it as hidden_size; leave it out here": lambda: RaytracedConfig(layer_options={"dim": 4}),
        "layer_options holds depth: a configuration states it as num_hidden_layers; leave it out here": lambda: RaytracedConfig(layer_options={"depth": 10**6}),
        "model option hiden: gpt-mre has no such option; did you mean hidden?": lambda: RaytracedConfig(layer_options={"hiden": 3}),
        "Classifier: must be a language model, one whose name begins with gpt-":
            lambda: RaytracedForCausalLM.from_gpt(rt.load("mre-digits")),
        "Linear: must be a language model, one whose name begins with gpt-": lambda: RaytracedForCausalLM.from_gpt(torch.nn.Linear(2, 2)),
        "GPT: has no card; only a model made by raytraced.build or load can be used": lambda: RaytracedForCausalLM.from_gpt(without_card()),
    }  # fmt: skip
    for message, call in cases.items():
        with pytest.raises(ValueError) as raised:
            call()
        assert str(raised.value) == message
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="foreign: has pt, not raytraced-model-2"):
        rt.load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "raytraced"


DIAL = [
    {"stop": 4.0, "experts": 1.5, "macs": 100.0, "loss": 2.0},
    {"stop": 0.01, "experts": 4.5, "macs": 300.0, "loss": 1.0},
]


@torch.no_grad()
@pytest.mark.parametrize("budget", [{"stop": 1e-3}, {"stop": 4.0}, {"experts": 1.5}, {"effort": 1.0}])
def test_a_budget_reaches_the_decoder_in_a_call_and_in_generation(model, tokens, budget):
    say_more(model)
    model.model.card = replace(model.model.card, dial={"rows": DIAL})
    out, own, plain = model(tokens, **budget), model.model(tokens, **budget), model(tokens)
    assert torch.equal(out.logits, own.logits)
    assert not torch.equal(out.num_experts, plain.num_experts)
    expected = torch.stack([drawn.tokens for drawn in model.model.generate(tokens, 6, temperature=0, **budget)], 1)
    assert torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False, **budget)[:, 9:], expected)


def test_an_option_that_does_not_exist_is_refused_and_those_of_transformers_are_not(model, tokens):
    cases = {"max_expert": "did you mean max_experts?", "zzz": "leave it out", "select": "leave it out"}
    for name, remedy in cases.items():
        with pytest.raises(ValueError) as raised:
            model(tokens, **{name: 1})
        assert str(raised.value) == f"{name}: a language model has no such option; {remedy}"
    given = {"return_dict": True, "output_attentions": False, "output_hidden_states": True, "token_type_ids": None}
    assert torch.equal(model(tokens, **given).logits, model(tokens).logits)
    with pytest.raises(ValueError, match="max_expert"):
        model.generate(tokens, max_new_tokens=2, max_expert=1)


def recomputing():
    model = from_gpt(language_model()).train()
    model.gradient_checkpointing_enable()
    return model


def without_card():
    gpt = language_model()
    gpt.card = None
    return gpt


def test_an_assistant_with_a_small_budget_leaves_the_likeliest_text_as_it_is(model, tokens, monkeypatch):
    expected = model.generate(tokens[:1], max_new_tokens=12, do_sample=False)
    assistant, budgets, run = model.assistant(1), [], model.model.forward
    assert assistant.model is model.model
    monkeypatch.setattr(
        model.model, "forward", lambda *args, **options: budgets.append(options["max_experts"]) or run(*args, **options)
    )
    found = model.generate(tokens[:1], max_new_tokens=12, do_sample=False, assistant_model=assistant)
    assert torch.equal(found, expected)
    assert set(budgets) == {None, 1}
    with pytest.raises(ValueError, match="max_experts=-1: must not be negative"):
        model.assistant(-1)
    with pytest.raises(ValueError, match="max_experts=1: gpt-top-k has no smaller budget"):
        RaytracedForCausalLM.from_gpt(language_model("top-k")).assistant(1)
