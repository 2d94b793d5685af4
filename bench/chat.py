"""Speed of encoding conversations with masks, against bare rendering and TRL.

    python bench/chat.py GSM8K.jsonl [--tokenizer FOLDER] [--peers]

Lines of the file have `question` and `answer`: two turns. Without a tokenizer folder, GPT-2's is
used with ChatML's control tokens added. Times are processor time (one core), alternating per
batch, so that other load affects both alike.
"""

import argparse
import copy
import itertools
import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from batchloom.chat.templates.chat_template import read_built_in
from batchloom.core.document import Conversation
from batchloom.preparation import ChatEncoder, ChatRecipe, encode_conversations
from batchloom.tokens import resolve_tokenizer

BATCH = 1024
MARKED = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}\
{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"""


def gpt2_folder(folder: Path) -> Path:
    """Save GPT-2's tokenizer with ChatML's control tokens, as transformers does."""
    raw = copy.deepcopy(resolve_tokenizer("gpt2").state()["tokenizer"])
    flags = {
        **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        "special": True,
    }
    for number, token in enumerate(("<|im_start|>", "<|im_end|>"), 50257):
        raw["added_tokens"].append({"id": number, "content": token, **flags})
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


def compare(encoder: ChatEncoder, text: str, conversations: list[Conversation]) -> None:
    """Print the speed of encoding and of transformers' bare template rendering."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    bare = _compile_jinja_template(text)
    encode_conversations(conversations[:BATCH], encoder, ChatRecipe())
    ours = theirs = 0.0
    for _ in range(3):
        for start in range(0, len(conversations), BATCH):
            part = conversations[start : start + BATCH]
            begin = time.process_time()
            made = encode_conversations(part, encoder, ChatRecipe())
            middle = time.process_time()
            for conversation in part:
                bare.render(messages=conversation.messages, tools=None, add_generation_prompt=False)
            theirs += time.process_time() - middle
            ours += middle - begin
            assert len(made.lengths) == len(part), (made.faults[:1], made.dropped[:1])
    count = 3 * len(conversations)
    print(
        f"template {encoder.renderer.name:8} {count / ours:9,.0f} conversations/s, all of it; "
        f"{theirs / ours:.0%} of bare rendering ({count / theirs:,.0f}/s)"
    )


def make_rows(lines: Iterable[str], count: int) -> list[dict[str, str]]:
    """Make questions and answers from the texts of JSONL lines."""
    texts = (json.loads(line)["text"] for line in lines)
    return [{"question": text[:300], "answer": text[300:1500] or "-"} for text in itertools.islice(texts, count)]


def make_conversations(rows: list[dict[str, str]]) -> list[Conversation]:
    """Make conversations of two turns."""
    return [
        Conversation(
            [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        )
        for row in rows
    ]


def batchloom_speed(folder: Path, rows: list[dict[str, str]]) -> float:
    """Measure conversations/s of the preparation with ChatML."""
    conversations = make_conversations(rows)
    encoder = ChatEncoder(resolve_tokenizer(str(folder)), "chatml")
    encode_conversations(conversations[:8], encoder, ChatRecipe())
    begin = time.process_time()
    for start in range(0, len(conversations), BATCH):
        encode_conversations(conversations[start : start + BATCH], encoder, ChatRecipe())
    return len(conversations) / (time.process_time() - begin)


def trl_speed(folder: Path, rows: list[dict[str, str]], work: Path) -> float:
    """Measure conversations/s of SFTTrainer's preparation with generation masks."""
    import datasets
    import trl
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>")
    tokenizer.pad_token, tokenizer.chat_template = "<|endoftext|>", MARKED
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 8)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_hidden_layers=1,
        num_attention_heads=1,
        pad_token_id=0,
        **sizes,
    )
    model = LlamaForCausalLM(config)
    arguments = trl.SFTConfig(
        str(work), max_length=None, report_to=[], use_cpu=True, bf16=False, assistant_only_loss=True
    )

    def seconds(some: list[dict[str, str]]) -> float:
        messages = [
            {
                "messages": [
                    {"role": "user", "content": row["question"]},
                    {"role": "assistant", "content": row["answer"]},
                ]
            }
            for row in some
        ]
        dataset = datasets.Dataset.from_list(messages)
        begin = time.process_time()
        trl.SFTTrainer(model, args=arguments, processing_class=tokenizer, train_dataset=dataset)
        return time.process_time() - begin

    seconds(rows[:8])
    return len(rows) / (seconds(rows) - seconds(rows[8:16]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--peers", action="store_true", help="TRL too")
    options = parser.parse_args()
    with options.data.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    conversations = make_conversations(rows)
    with tempfile.TemporaryDirectory(prefix="batchloom-bench-") as temporary:
        work = Path(temporary)
        folder = options.tokenizer or gpt2_folder(work / "gpt2")
        tokenizer = resolve_tokenizer(str(folder))
        chatml = ChatEncoder(tokenizer, "chatml")
        compare(chatml, read_built_in("chatml"), conversations)
        if tokenizer.chat.templates:
            own = ChatEncoder(tokenizer)
            compare(own, tokenizer.chat.templates["default"], conversations)
        if options.peers:
            ours = batchloom_speed(folder, rows)
            trl = trl_speed(folder, rows, work / "trl")
            print(f"TRL's SFTTrainer  {trl:9,.0f} conversations/s; batchloom is {ours / trl:.1f} x")


if __name__ == "__main__":
    main()
