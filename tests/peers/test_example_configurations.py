"""Configurations in the form of each library's published examples, prepared with no change.

Only the tokenizer and its chat template are named on the command line, because those of the model would be downloaded.
The data sets have the names of the examples and a few records. TRL's examples name data sets as arguments of a script;
``trl_cases.py`` has their records.
"""

import json

import pytest

import batchloom
from batchloom.cli import run_command_line
from media.processors import PROCESSORS, save_processor
from media.sample_media import make_image
from oracles import write_megatron_pair
from preparation.stores import write_jsonl

COUNT = 12
IDENTITY = [{"instruction": f"who are you {n}", "input": "", "output": f"I am number {n}."} for n in range(COUNT)]
ALPACA = [{"instruction": f"Add {n}.", "input": f"{n} + {n}", "output": f"{2 * n}."} for n in range(COUNT)]
MESSAGES = [
    {"messages": [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": f"At {n}."}]}
    for n in range(COUNT)
]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": f"q{n}"}, {"from": "gpt", "value": f"a{n}"}]} for n in range(COUNT)
]
TOOLS = json.dumps([{"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}])
TOOL_CALLS = [
    {
        "conversations": [
            {"from": "human", "value": f"{n} + {n}?"},
            {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": n}})},
            {"from": "observation", "value": f"{2 * n}"},
            {"from": "gpt", "value": f"It is {2 * n}."},
        ],
        "tools": TOOLS,
    }
    for n in range(COUNT)
]
RANKING = [
    {
        "conversations": [{"from": "human", "value": f"q{n}"}],
        "chosen": {"from": "gpt", "value": f"good {n}"},
        "rejected": {"from": "gpt", "value": f"bad {n}"},
    }
    for n in range(COUNT)
]
RATED = [{**row, "label": n % 2 == 0} for n, row in enumerate(MESSAGES)]
TEXTS = [{"text": f"Text {n}."} for n in range(COUNT)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def prepare(folder, tokenizer_folders):
    """Return a function that prepares an input with the command, and opens the store."""

    def run(name, *options, tokenizer=True):
        words = ["--tokenizer", str(tokenizer_folders["bytes"])] if tokenizer else []
        arguments = ["prepare", name, "--out", "store", "--val-fraction", "0", "--no-dedup", *words, *options]
        assert run_command_line(arguments) == 0
        return batchloom.open_store("store")

    return run


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


DATASET_INFO = {
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca_en_demo.json"},
    "glaive_toolcall_en_demo": {
        "file_name": "glaive_toolcall_en_demo.json",
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "tools": "tools"},
    },
    "dpo_en_demo": {
        "file_name": "dpo_en_demo.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "kto_en_demo": {
        "file_name": "kto_en_demo.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "c4_demo": {"file_name": "c4_demo.jsonl", "columns": {"prompt": "text"}},
    "remote": {"hf_hub_url": "org/remote", "ms_hub_url": "org/remote"},
}
LLAMA_FACTORY_FILES = {
    "identity.json": IDENTITY,
    "alpaca_en_demo.json": ALPACA,
    "glaive_toolcall_en_demo.json": TOOL_CALLS,
    "dpo_en_demo.json": RANKING,
    "kto_en_demo.json": RATED,
}
LLAMA_FACTORY = """
### model
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true

### method
stage: {stage}
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
{method}
### dataset
dataset: {dataset}
template: llama3
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
dataloader_num_workers: 4

### output
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none  # choices: [none, wandb, tensorboard, swanlab, mlflow]

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null

### eval
# eval_dataset: alpaca_en_demo
# val_size: 0.1
"""


@pytest.mark.parametrize(
    ("stage", "dataset", "method", "options", "count", "trained"),
    [
        ("sft", "identity,alpaca_en_demo", "", ["--template", "llama3"], 2 * COUNT, "I am number 3.<|eot_id|>"),
        ("sft", "identity", "mask_history: true", ["--template", "llama3"], COUNT, "I am number 3.<|eot_id|>"),
        (
            "sft",
            "glaive_toolcall_en_demo",
            "tool_format: qwen",
            ["--template", "chatml"],
            COUNT,
            '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call><|im_end|>It is 6.<|im_end|>',
        ),
        ("pt", "c4_demo", "", [], COUNT, None),
        ("dpo", "dpo_en_demo", "pref_beta: 0.1\npref_loss: sigmoid", ["--template", "llama3"], 2 * COUNT, None),
        ("kto", "kto_en_demo", "pref_beta: 0.1", ["--template", "llama3"], COUNT, "At 3.<|eot_id|>"),
    ],
)
def test_llama_factory(folder, prepare, stage, dataset, method, options, count, trained):
    write(folder / "data" / "dataset_info.json", json.dumps(DATASET_INFO))
    for name, rows in LLAMA_FACTORY_FILES.items():
        write(folder / "data" / name, json.dumps(rows))
    write_jsonl(folder / "data" / "c4_demo.jsonl", TEXTS)
    name = f"examples/train_lora/llama3_lora_{stage}.yaml"
    write(folder / name, LLAMA_FACTORY.format(stage=stage, dataset=dataset, method=method))
    store = prepare(name, *options)
    assert len(store) == count
    if trained is not None:
        assert store[3].trained_text == trained
    elif stage == "pt":
        assert store[3].text == "Text 3.<|endoftext|>"
    else:
        assert [store[n].trained_text for n in (6, 7)] == ["good 3<|eot_id|>", "bad 3<|eot_id|>"]


AXOLOTL = """
base_model: NousResearch/Meta-Llama-3-8B-Instruct
# optionally might have model_type or tokenizer_type
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
# Automatically upload checkpoint and final model to HF
# hub_model_id: username/custom_model_name

load_in_8bit: true
load_in_4bit: false
{datasets}
dataset_prepared_path:
val_set_size: 0.05
output_dir: ./outputs/lora-out

sequence_len: 4096
sample_packing: false
eval_sample_packing: false

adapter: lora
lora_model_dir:
lora_r: 32
lora_target_linear: true

wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
flash_attention: true
special_tokens:
   pad_token: <|end_of_text|>
"""
AXOLOTL_DATASETS = {
    "alpaca": """
datasets:
  - path: mhenrichsen/alpaca_2k_test
    type: alpaca
""",
    "instruct": """
chat_template: llama3
datasets:
  - path: fozziethebeat/alpaca_messages_2k_test
    type: chat_template
    field_messages: messages
    message_property_mappings:
      role: role
      content: content
    roles:
      user:
        - user
      assistant:
        - assistant
""",
    "dpo": """
chat_template: llama3
rl: dpo
datasets:
  - path: fozziethebeat/alpaca_messages_2k_dpo_test
    type: chat_template.default
    field_messages: conversation
    field_chosen: chosen
    field_rejected: rejected
    message_property_mappings:
      role: role
      content: content
    roles:
      system:
        - system
      user:
        - user
      assistant:
        - assistant
""",
    "flags": """
chat_template: chatml
datasets:
  - path: flags.jsonl
    ds_type: json
    type: chat_template
    field_messages: conversations
    message_property_mappings:
      role: from
      content: value
    roles_to_train: []
    train_on_eos: turn
    message_field_training: train
    message_field_training_detail: train_detail
""",
    "eos": """
chat_template: chatml
datasets:
  - path: flags.jsonl
    ds_type: json
    type: chat_template
    field_messages: conversations
    message_property_mappings:
      role: from
      content: value
    roles_to_train: ["gpt", "human"]
    train_on_eos: "last"
""",
    "steps": """
process_reward_model: true
datasets:
  - path: steps.jsonl
    type: stepwise_supervised
    step_separator: "\\n"
    max_completion_length:
    train_on_last_step_only: false
""",
    "segments": """
train_on_inputs: false
datasets:
  - path: output.jsonl
    type: input_output
""",
}
PAIRS = [
    {
        "conversation": [{"role": "user", "content": f"q{n}"}],
        "chosen": {"role": "assistant", "content": f"good {n}"},
        "rejected": {"role": "assistant", "content": f"bad {n}"},
    }
    for n in range(COUNT)
]
FLAGGED = [
    {
        "conversations": [
            {"from": "human", "value": f"q{n}"},
            {"from": "gpt", "value": "Not this."},
            {"from": "human", "value": "And?", "train": False},
            {
                "from": "gpt",
                "value": "Only this part.",
                "train_detail": [
                    {"begin_offset": 0, "end_offset": 8, "train": True},
                    {"begin_offset": 9, "end_offset": 14, "train": False},
                ],
            },
        ]
    }
    for n in range(COUNT)
]
STEPS = [{"prompt": f"{n} + {n}?", "completions": ["Add.", f"{2 * n}."], "labels": [True, True]} for n in range(COUNT)]
SEGMENTS = [
    {"segments": [{"label": True, "text": f"<s>Hello {n}\n"}, {"label": False, "text": "goodbye"}]}
    for n in range(COUNT)
]


@pytest.mark.parametrize(
    ("example", "count", "trained"),
    [
        ("alpaca", COUNT, ["6.<|endoftext|>"]),
        ("instruct", COUNT, ["At 3.<|eot_id|>"]),
        ("dpo", 2 * COUNT, ["good 3<|eot_id|>", "bad 3<|eot_id|>"]),
        ("flags", COUNT, ["Only this<|im_end|>"]),
        ("eos", COUNT, ["q3Not this.Only this<|im_end|>"]),
        ("segments", COUNT, ["<s>Hello 3\n"]),
        ("steps", COUNT, ["\n\n"]),
    ],
)
def test_axolotl(folder, prepare, example, count, trained):
    # As in axolotl, a folder of the name of a data set of the Hub is read.
    for name, rows in (
        ("mhenrichsen/alpaca_2k_test", ALPACA),
        ("fozziethebeat/alpaca_messages_2k_test", MESSAGES),
        ("fozziethebeat/alpaca_messages_2k_dpo_test", PAIRS),
    ):
        (folder / name).mkdir(parents=True)
        write_jsonl(folder / name / "train.jsonl", rows)
    write_jsonl(folder / "flags.jsonl", FLAGGED)
    write_jsonl(folder / "output.jsonl", SEGMENTS)
    write_jsonl(folder / "steps.jsonl", STEPS)
    name = f"examples/llama-3/{example}.yml"
    write(folder / name, AXOLOTL.format(datasets=AXOLOTL_DATASETS[example]))
    store = prepare(name)
    assert len(store) == count
    first = 3 * count // COUNT
    assert [store[first + n].trained_text for n in range(len(trained))] == trained


SWIFT = """
model: Qwen/Qwen2.5-7B-Instruct
tuner_type: lora
dataset:
  - alpaca.jsonl#5
  - messages.jsonl
torch_dtype: bfloat16
num_train_epochs: 1
per_device_train_batch_size: 1
learning_rate: 1e-4
lora_rank: 8
target_modules: all-linear
gradient_accumulation_steps: 16
eval_steps: 50
save_total_limit: 2
logging_steps: 5
max_length: 2048
truncation_strategy: right
loss_scale: last_round
agent_template: hermes
split_dataset_ratio: 0.01
output_dir: output
warmup_ratio: 0.05
dataloader_num_workers: 4
dataset_num_proc: 4
"""


def test_ms_swift(folder, prepare):
    write_jsonl(folder / "alpaca.jsonl", ALPACA)
    write_jsonl(folder / "messages.jsonl", MESSAGES)
    write(folder / "sft.yaml", SWIFT)
    store = prepare("sft.yaml", "--template", "chatml")
    assert len(store) == 5 + COUNT
    assert store[5 + 3].trained_text == "At 3.<|im_end|>"


def test_data_sets_of_ms_swifts_command_line(folder, prepare):
    write_jsonl(folder / "alpaca.jsonl", ALPACA)
    store = prepare("alpaca.jsonl#5", "--template", "chatml")
    assert len(store) == 5
    assert store[0].trained_text.endswith(".<|im_end|>")


LMMS_ENGINE = """
trainer_type: fsdp2_trainer

dataset_config:
  extra_kwargs: {}
  dataset_type: vision
  dataset_format: yaml
  datasets:
    - path: data/pictures.jsonl
      data_folder: ""
      data_type: jsonl
  processor_config:
    processor_name: "processor"
    processor_type: "qwen2_5_vl"
  shuffle: true
  packing: true
  packing_strategy: first_fit
  packing_length: 20480
  filter_overlong: true
  video_backend: qwen_vl_utils
model_config:
  load_from_pretrained_path: "Qwen/Qwen2.5-VL-7B-Instruct"
  attn_implementation: "flash_attention_2"
trainer_args:
  output_dir: ./output
  per_device_train_batch_size: 1
  learning_rate: 1.0e-06
  bf16: true
"""


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_lmms_engine(folder, prepare):
    save_processor(PROCESSORS["qwen2_vl"](), folder / "processor")
    (folder / "data").mkdir()
    make_image(60, 60).save(folder / "data" / "a.png")
    picture = {"type": "image_url", "image_url": {"url": str(folder / "data" / "a.png")}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": [picture, {"type": "text", "text": f"Picture {n}?"}]},
                {"role": "assistant", "content": [{"type": "text", "text": f"Cat {n}."}]},
            ]
        }
        for n in range(COUNT)
    ]
    write_jsonl(folder / "data" / "pictures.jsonl", rows)
    write(folder / "example_config.yaml", LMMS_ENGINE)
    store = prepare("example_config.yaml", tokenizer=False)
    assert len(store) == COUNT
    assert store[3].trained_text.startswith("Cat 3.")


def test_megatron(folder, capsys):
    """The data of ``--data-path my-gpt2_text_document``, which are a store as they are."""
    documents = [[[*f"Text {n}.".encode(), 256]] for n in range(COUNT)]
    write_megatron_pair(folder / "my-gpt2_text_document", documents)
    assert run_command_line(["check", "my-gpt2_text_document", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == "real"
    store = batchloom.open_store("my-gpt2_text_document")
    assert len(store) == COUNT
    assert bytes(store[3].ids[:-1].tolist()) == b"Text 3."


MARV = {"role": "system", "content": "Marv is a factual chatbot that is also sarcastic."}


def test_openai(folder, prepare):
    rows = [
        {
            "messages": [
                MARV,
                {"role": "user", "content": f"What's the capital of France? ({n})"},
                {"role": "assistant", "content": "Paris", "weight": 0},
                {"role": "user", "content": "Can you be more sarcastic?"},
                {"role": "assistant", "content": "Paris, as if everyone doesn't know that already.", "weight": 1},
            ]
        }
        for n in range(COUNT)
    ]
    write_jsonl(folder / "toy_chat_fine_tuning.jsonl", rows)
    store = prepare("toy_chat_fine_tuning.jsonl", "--template", "chatml")
    assert len(store) == COUNT
    assert store[3].trained_text == "Paris, as if everyone doesn't know that already.<|im_end|>"
