"""Agreement of truncated conversations and preferences with TRL's ``max_length`` and ``truncation_mode``.

These tests run only where TRL is installed (the extra ``bench-chat``).
"""

import numpy as np
import pytest

from batchloom.core.document import Conversation, LabelledConversation, PreferencePair
from batchloom.preparation import (
    ChatEncoder,
    ChatRecipe,
    encode_conversations,
    encode_labelled_answers,
    encode_preference_pairs,
)
from chat.conversations import CHATML

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

MODES = {"truncate": "keep_start", "truncate-left": "keep_end"}
ROWS = [
    ("hi", "hello there"),
    ("2 + 2?", "The quick brown fox jumps over the lazy dog. " * 3),
    ("The quick brown fox jumps over the lazy dog. " * 3, "ça va, 日本語 😀"),
    ("x" * 90, "y" * 90),
]
IDS = np.dtype("<i4")


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


CONVERSATIONS = [[user(q), assistant(a), user(a), assistant(q), user("and?"), assistant("no")] for q, a in ROWS]


def make_encoder(tokenizer, folder):
    (folder / "plain.jinja").write_text(CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    return ChatEncoder(tokenizer, str(folder / "plain.jinja"))


def prepare_with_trl(tokenizer, examples, folder, **settings):
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.eos_token_id, **sizes)
    arguments = trl.SFTConfig(output_dir=str(folder), report_to=[], use_cpu=True, bf16=False, **settings)
    trainer = trl.SFTTrainer(
        LlamaForCausalLM(config),
        args=arguments,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(examples),
    )
    return list(trainer.train_dataset)


def split_documents(encoded):
    cuts = np.cumsum(encoded.lengths)[:-1]
    labels = np.where(encoded.flags.trained, encoded.ids.astype(np.int64), -100)
    pairs = zip(np.split(encoded.ids, cuts), np.split(labels, cuts), strict=True)
    return [(ids.tolist(), document_labels.tolist()) for ids, document_labels in pairs if ids.size]


@pytest.mark.parametrize("limit", [1, 12, 40, 64])
@pytest.mark.parametrize("overlong", MODES)
@pytest.mark.parametrize("form", ["prompt-completion", "messages"])
def test_the_remaining_tokens_and_labels_are_those_of_the_sft_trainer(
    tokenizers, hf_tokenizers, tmp_path, form, overlong, limit
):
    tokenizer = hf_tokenizers["bytes"]
    tokenizer.pad_token, tokenizer.chat_template = tokenizer.eos_token, CHATML
    if form == "messages":
        examples = [{"messages": messages} for messages in CONVERSATIONS]
        conversations = [Conversation(messages) for messages in CONVERSATIONS]
        rules = ChatRecipe(train_on="assistant", max_tokens=limit, overlong=overlong)
    else:
        examples = [{"prompt": [user(q)], "completion": [assistant(a)]} for q, a in ROWS]
        conversations = [Conversation([user(q), assistant(a)], completion=1) for q, a in ROWS]
        rules = ChatRecipe(train_on="completion", max_tokens=limit, overlong=overlong)
    loss = {"assistant_only_loss": True} if form == "messages" else {"completion_only_loss": True}
    rows = prepare_with_trl(tokenizer, examples, tmp_path, max_length=limit, truncation_mode=MODES[overlong], **loss)
    # TRL keeps rows of which only the first token has a label, which no loss uses.
    expected = [(row["input_ids"], row["labels"]) for row in rows if any(n != -100 for n in row["labels"][1:])]
    encoded = encode_conversations(conversations, make_encoder(tokenizers["bytes"], tmp_path), rules)
    assert not encoded.faults
    assert split_documents(encoded) == expected
    assert len(expected) + len(encoded.dropped) == len(examples)


def collate_preferences(prompt, answers, limit, mode):
    """Return the ids and completion masks that TRL's collator makes of one pair."""
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    row = {"prompt_ids": prompt, "chosen_ids": answers[0], "rejected_ids": answers[1]}
    batch = DataCollatorForPreference(pad_token_id=0, max_length=limit, truncation_mode=mode)([row])
    sizes = batch["attention_mask"].sum(1).tolist()
    return [
        (batch["input_ids"][side, :size].tolist(), batch["completion_mask"][side, :size].tolist())
        for side, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("limit", [24, 40, 64, 100])
@pytest.mark.parametrize("overlong", MODES)
def test_pairs_are_those_of_the_dpo_collator(tokenizers, tmp_path, overlong, limit):
    encoder = make_encoder(tokenizers["bytes"], tmp_path)
    pairs = [
        PreferencePair(*(Conversation([user(q), assistant(text)], completion=1) for text in (a, "no: " + a[:9])))
        for q, a in ROWS
    ]
    whole = encode_preference_pairs(pairs, encoder, ChatRecipe(train_on="completion"), IDS)
    encoded = encode_preference_pairs(
        pairs, encoder, ChatRecipe(train_on="completion", max_tokens=limit, overlong=overlong), IDS
    )
    assert not encoded.faults
    whole_documents, documents = split_documents(whole), dict(enumerate(split_documents(encoded)))
    for place, number in enumerate(encoded.numbers[::2].tolist()):
        sides = whole_documents[2 * number : 2 * number + 2]
        start = sum(label == -100 for label in sides[0][1])
        expected = collate_preferences(sides[0][0][:start], [ids[start:] for ids, _ in sides], limit, MODES[overlong])
        kept = [documents[2 * place], documents[2 * place + 1]]
        kept = [(ids, [int(label != -100) for label in labels]) for ids, labels in kept]
        if overlong == "truncate":
            assert kept == expected
        else:
            # Here both sides keep the same prompt; TRL leaves more of it on the shorter side.
            longest = max((0, 1), key=lambda side: len(sides[side][0]))
            assert kept[longest] == expected[longest]
            assert kept[1 - longest][0] == expected[1 - longest][0][-len(kept[1 - longest][0]) :]
    prompts = [sum(label == -100 for label in labels) for _, labels in whole_documents[::2]]
    sizes = [max(len(ids) for ids, _ in whole_documents[2 * n : 2 * n + 2]) for n in range(len(pairs))]
    if overlong == "truncate":
        dropped = [n for n, prompt in enumerate(prompts) if prompt >= limit]
    else:
        dropped = [n for n, prompt in enumerate(prompts) if sizes[n] - limit >= prompt]
    assert [fault.number for fault in encoded.dropped] == dropped


@pytest.mark.parametrize("limit", [24, 64])
def test_labelled_answers_are_those_of_the_kto_collator(tokenizers, tmp_path, limit):
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    encoder = make_encoder(tokenizers["bytes"], tmp_path)
    labelled = [LabelledConversation(Conversation([user(q), assistant(a)], completion=1), label=True) for q, a in ROWS]
    whole = split_documents(encode_labelled_answers(labelled, encoder, ChatRecipe(train_on="completion"), IDS))
    encoded = encode_labelled_answers(
        labelled, encoder, ChatRecipe(train_on="completion", max_tokens=limit, overlong="truncate"), IDS
    )
    expected = []
    for ids, labels in whole:
        start = sum(label == -100 for label in labels)
        row = {"prompt_ids": ids[:start], "completion_ids": ids[start:], "label": True}
        batch = DataCollatorForUnpairedPreference(pad_token_id=0, max_length=limit)([row])
        if start < limit:  # KTOTrainer drops the others.
            completion = np.array(batch["completion_mask"][0]) != 0
            cut_ids = batch["input_ids"][0].tolist()
            expected.append((cut_ids, np.where(completion, cut_ids, -100).tolist()))
    assert split_documents(encoded) == expected
