"""lm-evaluation-harness scores a served language model: what it reports is what the model itself says."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import raytraced

LM_EVAL = shutil.which(os.environ.get("LM_EVAL", "lm_eval"))
REASON = "lm_eval is not installed: pip install 'lm-eval[api]', or set LM_EVAL to its command"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(LM_EVAL is None, reason=REASON)]

CHOICES = """task: endings
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{endings}}}}"
doc_to_target: "{{{{label}}}}"
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
TEXTS = """task: continuations
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{endings[0]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 5, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
ROWS = [
    {"text": "To be,", "endings": [" or", "qqq"], "label": 0},
    {"text": "Hail", "endings": ["zx", " Sir"], "label": 1},
    {"text": "é is", "endings": ["ab", "a", "c"], "label": 2},
]


def write_byte_tokenizer(folder: Path) -> None:
    """A tokenizer of transformers whose tokens are bytes, as those of a model without a tokenizer are."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [one for one in range(256) if one not in printable]
    names = {one: chr(one) for one in printable} | {one: chr(256 + place) for place, one in enumerate(others)}
    made = Tokenizer(models.BPE({names[one]: one for one in range(256)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=names[10]).save_pretrained(folder)


@torch.no_grad()
def test_scores_and_texts_are_those_of_the_model(address, files, tmp_path):
    write_byte_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "tasks").mkdir()
    for name, task in (("endings", CHOICES), ("continuations", TEXTS)):
        (tmp_path / "tasks" / f"{name}.yaml").write_text(task.format(file=tmp_path / "rows.jsonl"))
    arguments = f"model=gpt-mre,base_url={address}/v1/completions,tokenizer={tmp_path}/tokenizer,max_length=16"
    command = [LM_EVAL, "--model", "local-completions", "--model_args", arguments, "--tasks", "endings,continuations"]
    command += ["--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / "out"), "--log_samples"]
    settings = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
    ended = subprocess.run(command, env=known, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    model = raytraced.load(files / "gpt-mre.safetensors")
    samples = {}
    for path in (tmp_path / "out").rglob("samples_*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        samples[path.name.split("_")[1]] = sorted(rows, key=lambda row: row["doc_id"])
    assert len(samples["endings"]) == len(samples["continuations"]) == len(ROWS)
    for row, scored in zip(ROWS, samples["endings"], strict=True):
        start = len(row["text"].encode())
        for ending, ((found, is_likeliest),) in zip(row["endings"], scored["resps"], strict=True):
            tokens = torch.tensor([list((row["text"] + ending).encode())])
            logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
            expected = logprobs.gather(1, tokens[0, 1:, None])[start - 1 :]
            assert float(found) == pytest.approx(float(expected.sum()), abs=1e-3)
            likeliest = logprobs.argmax(-1)[start - 1 :]
            assert str(is_likeliest) == str(bool((likeliest == tokens[0, start:]).all()))
    for row, written in zip(ROWS, samples["continuations"], strict=True):
        prompt = torch.tensor([list(row["text"].encode())])
        drawn = bytes(int(one.tokens) for one in model.generate(prompt, 5, temperature=0.0))
        assert written["resps"][0][0] == drawn.split(b"\n")[0].decode(errors="replace")
