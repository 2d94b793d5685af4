"""Finetuning of Hugging Face models."""

import json
import shutil
import socket

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from batchloom import InputError, Loader, SettingsError, StateError, open_store
from batchloom.cli import run_command_line
from batchloom.core.errors import TrainError
from batchloom.testing import write_store
from batchloom.train import (
    PretrainedSettings,
    RunFolder,
    apply_finetuning_defaults,
    explain_memory_errors,
    make_settings,
)
from batchloom.train.model import build_meta_model, load_pretrained, pretrained
from batchloom.train.model.pretrained import compute_summed_loss
from processes import run_two_ranks
from train.gradients import compute_first_gradient
from train.model_folders import CONFIGS, write_chat_store, write_model
from train.runs import read_steps, run_training

SIZES = {"steps": 20, "seq_len": 32, "global_batch_size": 4, "batch_size": 2, "eval_interval": 10}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_chat_store(tmp_path_factory.mktemp("store") / "chat")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    write_model(folder)
    return folder


def finetune(store, init, out, changes=None, **run_options):
    settings = {"model": PretrainedSettings(str(init)), **SIZES, "optim": {"lr": 0.01}, **(changes or {})}
    return run_training(store, out, settings, **run_options)


@pytest.fixture(scope="module")
def full_run(store, llama, tmp_path_factory):
    """Uninterrupted run of 20 steps."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, *finetune(store, llama, out)


def load_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


def test_it_learns_and_transformers_loads_the_result(store, full_run):
    out, outcome, lines = full_run
    losses = [loss for _, loss, *_ in read_steps(out)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1
    assert any("LlamaForCausalLM of" in line for line in lines)
    assert any("packed documents do not see each other" in line for line in lines)
    trained = store.contents.trained_tokens / store.tokens
    assert any(f"{trained:.1%} of them trained" in line for line in lines)

    model = load_model(out / "model")
    for name, weight in model.named_parameters():
        assert torch.equal(weight, outcome.model.model.get_parameter(name)), name
    total = count = 0
    for document, mask in read_documents(open_store(store.path, "val")):
        with torch.no_grad():
            scores = model(document[None]).logits[0, :-1]
        trained_mask = mask[1:]
        total += float(functional.cross_entropy(scores[trained_mask], document[1:][trained_mask], reduction="sum"))
        count += int(trained_mask.sum())
    assert outcome.val_loss == pytest.approx(total / count, rel=1e-5)


def read_documents(store):
    """Yield the ids and the loss mask of every document, from its shards."""
    import numpy as np

    numbers = np.arange(len(store))
    lengths = store.lengths.slice(0, len(store)).astype(np.int64)
    spans = (numbers, np.zeros_like(numbers), lengths)
    for ids, mask in zip(store.read(*spans), store.mask(*spans), strict=True):
        yield torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(mask.copy())


@pytest.mark.slow
def test_resuming_is_the_same_to_the_last_bit(store, llama, full_run, tmp_path):
    reference, outcome, _ = full_run
    # The run depends on the content of the model folder, not on its path.
    moved = shutil.copytree(llama, tmp_path / "moved")
    finetune(store, llama, tmp_path / "run", stop_at=10)
    resumed, lines = finetune(store, moved, tmp_path / "run", resume=True)
    assert "resume from the checkpoint after 10 steps" in lines
    assert read_steps(tmp_path / "run") == read_steps(reference)
    assert resumed.val_loss == outcome.val_loss
    newest = [RunFolder(folder).find_newest_checkpoint() for folder in (reference, tmp_path / "run")]
    files = [folder / "model.safetensors" for folder in newest]
    files += [folder / "model" / "model.safetensors" for folder in (reference, tmp_path / "run")]
    assert len({file.read_bytes()[-4096:] for file in files[:2]}) == 1
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[2].read_bytes() == files[3].read_bytes()


def test_resuming_from_another_model_is_refused(store, llama, full_run, tmp_path):
    reference, _, _ = full_run
    out = shutil.copytree(reference, tmp_path / "run")
    with pytest.raises(StateError, match=r"init.fingerprint was"):
        finetune(store, reference / "model", out, resume=True)


def test_a_missing_model_folder_is_written_again(store, llama, full_run, tmp_path):
    reference, _, _ = full_run
    out = shutil.copytree(reference, tmp_path / "run")
    shutil.rmtree(out / "model")
    finetune(store, llama, out, resume=True)
    rewritten, original = (folder / "model" / "model.safetensors" for folder in (out, reference))
    assert rewritten.read_bytes() == original.read_bytes()
    assert not list(out.glob("*.partial"))


ISOLATING_MODELS = ["llama", "tied", "qwen2", "qwen2-window", "qwen3", "mistral-window", "gemma", "gemma2"]
ISOLATING_MODELS += ["gemma3", "gpt2", "neox"]


# One with and without positions in its attention, and one whose layers have windows; the others are alike.
FAST_KINDS = ("llama", "gemma3", "opt", "mamba")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in FAST_KINDS else pytest.mark.slow) for kind in CONFIGS]
)
def test_models_that_mix_packed_documents_are_refused(store, tmp_path, kind):
    write_model(tmp_path / "m", kind)
    if kind in ISOLATING_MODELS:
        outcome, _ = finetune(store, tmp_path / "m", tmp_path / "run", {"steps": 1})
        assert compute_packed_loss(outcome.model, store) == pytest.approx(
            compute_single_loss(outcome.model, store), rel=1e-5
        )
        return
    with pytest.raises(TrainError, match=r"ForCausalLM with .* see each other.*--packing none"):
        finetune(store, tmp_path / "m", tmp_path / "run", {"steps": 1})
    assert not (tmp_path / "run").exists()
    finetune(store, tmp_path / "m", tmp_path / "run", {"steps": 1, "order": {"packing": "none"}})


def compute_packed_loss(model, store):
    with torch.no_grad():
        return sum(float(model(**part)) for part in Loader(store, seq_len=32, global_batch_size=4))


def compute_single_loss(model, store):
    total = 0.0
    for ids, mask in read_documents(store):
        labels = ids.where(mask, torch.tensor(-100))
        with torch.no_grad():
            total += float(model(ids[None], labels[None], torch.arange(len(ids))[None]))
    return total


def count_sequences(store, packing):
    return len(Loader(store, seq_len=32, global_batch_size=1, packing=packing))


@pytest.fixture(scope="module")
def rank_gradients(store, llama, tmp_path_factory):
    """Loss, trained tokens and gradients of one step on two ranks, by model."""
    folder = tmp_path_factory.mktemp("ranks")
    run_two_ranks("-m", "train.gradients", store.path, count_sequences(store, "best_fit"), folder, llama)
    results = {}
    for model in ("gpt", "llama"):
        gradients = load_file(folder / f"{model}.safetensors")
        results[model] = (float(gradients.pop("loss")), int(gradients.pop("trained")), gradients)
    return results


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_layout_does_not_change_the_gradient(store, llama, rank_gradients, model):
    """One step over all documents: one pass, many, two ranks, unpacked rows."""
    shape = {"model": {"init": str(llama)}} if model == "llama" else {}
    packed, single = count_sequences(store, "best_fit"), count_sequences(store, "none")
    assert packed < single == len(store)
    assert packed % 2 == 0, "two ranks share the rows"
    layouts = [
        {"global_batch_size": packed},
        {"global_batch_size": packed, "batch_size": 1},
        {"global_batch_size": single, "batch_size": 15, "order": {"packing": "none"}},
    ]
    loss, trained, expected = compute_first_gradient(store.path, {**shape, **layouts[0]})
    results = [compute_first_gradient(store.path, {**shape, **layout}) for layout in layouts[1:]]
    results.append(rank_gradients[model])
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for layout_loss, layout_trained, gradients in results:
        assert layout_trained == trained
        assert layout_loss == pytest.approx(loss, rel=1e-5)
        for name, gradient in expected.items():
            assert float((gradients[name] - gradient).abs().max()) < 1e-5 * scale, name


@pytest.mark.parametrize("weights", [None, torch.rand(33)], ids=["", "weighted"])
def test_a_loss_in_parts_is_the_loss(monkeypatch, weights):
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50)
    hidden = torch.randn(33, 8, requires_grad=True)
    targets = torch.randint(0, 50, (33,))
    loss = compute_summed_loss(head, hidden, targets, weights)
    expected = torch.autograd.grad(loss, (hidden, head.weight, head.bias))
    monkeypatch.setattr(pretrained, "_MAX_SCORES", 50 * 7)
    parts_loss = compute_summed_loss(head, hidden, targets, weights)
    assert parts_loss.detach().item() == pytest.approx(loss.detach().item(), rel=1e-6)
    for actual, gradient in zip(
        torch.autograd.grad(parts_loss, (hidden, head.weight, head.bias)), expected, strict=True
    ):
        torch.testing.assert_close(actual, gradient, rtol=1e-5, atol=1e-6)
    nothing = compute_summed_loss(head, hidden[:0], targets[:0])
    assert nothing.detach().item() == 0
    assert not torch.autograd.grad(nothing, hidden)[0].any()


def test_capped_logits_are_not_computed_in_parts(store, tmp_path):
    """Gemma 2 caps its logits, so a plain linear head would give another loss."""
    write_model(tmp_path / "m", "gemma2", final_logit_softcapping=0.5)
    settings = PretrainedSettings(str(tmp_path / "m"))
    model = load_pretrained(settings, build_meta_model(settings))
    batch = Loader(store, seq_len=32, global_batch_size=4)[0]
    with torch.no_grad():
        before = float(model(**batch))
        model.detect_linear_head(batch["input_ids"][0], "the store")
        assert float(model(**batch)) == pytest.approx(before, rel=1e-6)


def test_weights_are_saved_in_the_dtype_of_the_model(store, tmp_path):
    write_model(tmp_path / "m", "tied", torch.bfloat16)
    finetune(store, tmp_path / "m", tmp_path / "run", {"steps": 2})
    model = load_model(tmp_path / "run" / "model")
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in weights
    # Training itself uses float32.
    checkpoint = load_file(RunFolder(tmp_path / "run").find_newest_checkpoint() / "model.safetensors")
    assert {weight.dtype for weight in checkpoint.values()} == {torch.float32}


def delete_file(folder, name):
    (folder / name).unlink()


def change_json(folder, name, **entries):
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "is not a folder.* hf download"),
        (lambda f: delete_file(f, "config.json"), "config.json does not exist"),
        (lambda f: delete_file(f, "model.safetensors"), "has no model.safetensors"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "that is a pickle, which can run code .*save_pretrained",
        ),
        (
            lambda f: change_json(f, "config.json", auto_map={"AutoModelForCausalLM": "x.Y"}),
            "auto_map: it needs code",
        ),
        (
            lambda f: change_json(f, "config.json", attn_implementation="org/kernel"),
            "'org/kernel': it needs code",
        ),
        (lambda f: change_json(f, "config.json", quantization_config={}), "are quantized"),
        (lambda f: change_json(f, "config.json", model_type="lama"), "cannot load .*lama"),
        (
            lambda f: change_json(f, "config.json", architectures=["BertForMaskedLM"]),
            "holds BertForMaskedLM, which is not a causal",
        ),
        (lambda f: change_json(f, "config.json", num_hidden_layers=3), "lack 9 of those"),
        (lambda f: change_json(f, "config.json", hidden_size=64), "cannot load|lack"),
        (lambda f: change_json(f, "config.json", hidden_size="wide"), "cannot load"),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 100),
            "cannot load .*(header|Header)",
        ),
    ],
)
def test_folders_that_cannot_be_finetuned(store, llama, tmp_path, change, message):
    folder = shutil.copytree(llama, tmp_path / "m")
    change(folder)
    with pytest.raises(InputError, match=message):
        finetune(store, folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_weights_in_several_files(store, llama, tmp_path):
    load_model(llama).save_pretrained(tmp_path / "m", max_shard_size="20KB")
    index = tmp_path / "m" / "model.safetensors.index.json"
    finetune(store, tmp_path / "m", tmp_path / "run", {"steps": 1})
    names = json.loads(index.read_text())["weight_map"]
    for weight_map, message in (
        ({**names, "lm_head.weight": "../x.safetensors"}, "names '../x.safetensors', which is not a file in this"),
        ({**names, "lm_head.weight": "x.safetensors"}, "names 'x.safetensors', which is not a file in this folder"),
        ({}, "names no file"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(InputError, match=message):
            finetune(store, tmp_path / "m", tmp_path / "other", {"steps": 1})
    index.write_text("{")
    with pytest.raises(InputError, match="index.json is not JSON"):
        finetune(store, tmp_path / "m", tmp_path / "other", {"steps": 1})


def test_sizes_that_do_not_fit_the_model(store, llama, tmp_path):
    with pytest.raises(SettingsError, match="65 is more than the 64 positions .* --seq-len 64"):
        finetune(store, llama, tmp_path / "run", {"seq_len": 65})
    write_model(tmp_path / "few", vocab_size=200, bos_token_id=1, eos_token_id=2)
    with pytest.raises(TrainError, match=r"ids up to 256 and the model in .* has 200.*--tokenizer"):
        finetune(store, tmp_path / "few", tmp_path / "run")


def test_nothing_trained_is_refused(llama, tmp_path):
    documents = [[1, 2, 3], [4, 5, 6, 7]]
    for number, trained in enumerate(([[0] * 3, [0] * 4], [[1, 0, 0], [1, 0, 0, 0]])):
        store = write_store(tmp_path / f"s{number}", documents, trained=trained)
        with pytest.raises(TrainError, match="no sequence .* a trained token after another"):
            finetune(store, llama, tmp_path / "run")


VOCABULARY = {"a": 0, "b": 1, "c": 2, "d": 3, "<|endoftext|>": 4}


def write_word_tokenizer(folder, vocabulary):
    """Write the tokenizer.json of a vocabulary of words; return the folder."""
    end = {"id": vocabulary["<|endoftext|>"], "content": "<|endoftext|>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
    definition = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None}
    definition |= {"added_tokens": [{**end, **flags}], "post_processor": None, "decoder": None}
    definition |= {"pre_tokenizer": {"type": "Whitespace"}, "model": model}
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    return folder


def test_another_tokenizer_is_refused_and_missing_words_are_reported(llama, tmp_path):
    store_tokenizer = write_word_tokenizer(tmp_path / "own", VOCABULARY)
    store = write_store(tmp_path / "s", [[0, 1, 2, 3, 4]] * 8, tokenizer=str(store_tokenizer))
    same_model, other_model = (shutil.copytree(llama, tmp_path / name) for name in ("same", "other"))
    write_word_tokenizer(same_model, VOCABULARY)
    _, lines = finetune(store, same_model, tmp_path / "run", {"steps": 1})
    assert not any(line.startswith("note") for line in lines)
    assert (tmp_path / "run" / "model" / "tokenizer.json").is_file()

    write_word_tokenizer(same_model, {word: n for word, n in VOCABULARY.items() if word != "d"})
    _, lines = finetune(store, same_model, tmp_path / "run2", {"steps": 1})
    assert any("1 are not in it" in line for line in lines)

    write_word_tokenizer(other_model, {**VOCABULARY, "a": 3, "d": 0})
    with pytest.raises(TrainError, match=r"2 of 5 ids .*id 0 is 'a' in the store and 'd'.*Prepare"):
        finetune(store, other_model, tmp_path / "run3", {"steps": 1})

    # Ids of bytes are other tokens in a model of words.
    bytes_store = write_store(tmp_path / "bytes", [[0, 1, 2, 3, 256]] * 8)
    write_word_tokenizer(other_model, {**VOCABULARY, **{f"w{n}": n for n in range(5, 257)}})
    with pytest.raises(TrainError, match=r"257 of 257 ids .*'bytes'.*id 0 is '.x00' in the store and 'a'.*Prepare"):
        finetune(bytes_store, other_model, tmp_path / "run5", {"steps": 1})
    assert not (tmp_path / "run5" / "run.json").exists()

    # A folder without a tokenizer gets that of the store.
    _, lines = finetune(store, llama, tmp_path / "run4", {"steps": 1})
    assert any("has no tokenizer.json, so the tokenizers of the data and the model cannot be" in line for line in lines)
    definition = json.loads((tmp_path / "run4" / "model" / "tokenizer.json").read_text())
    assert definition["model"]["vocab"] == VOCABULARY


def test_the_command_line(store, llama, tmp_path, capsys, monkeypatch):
    def refuse(*_):
        raise AssertionError("no network is needed")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    out = tmp_path / "run"
    args = ["train", "--data", store.path, "--device", "cpu", "--out", out]
    start_args = [*args, "--init", llama, "--max-iters", 4, "--global-batch-size", 4]
    assert run_command_line(list(map(str, [*start_args, "--stop-at", 2]))) == 0
    settings = json.loads((out / "run.json").read_text())
    assert settings["optim"]["lr"] == 1e-5
    assert (settings["seq_len"], settings["steps"]) == (64, 4)
    assert settings["model"] == {"init": str(llama), "attn_implementation": None}
    assert "  trained 5" in capsys.readouterr().out
    # The run records its model.
    assert run_command_line(list(map(str, [*args, "--resume"]))) == 0
    assert [step for step, *_ in read_steps(out)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--init", "x", "--model-name", "tiny"], "--model-name and --init exclude each other"),
        (["--init", "Qwen/Qwen3-0.6B"], "Qwen/Qwen3-0.6B is not a folder"),
        (["--init", "LLAMA", "--config-file", "shape.json"], "--init exclude each other"),
        (["--init", "LLAMA", "--attn-implementation", "sdpaa"], "'sdpaa' is none of 'sdpa'"),
        (["--attn-implementation", "sdpa"], "--attn-implementation: requires --init"),
    ],
)
def test_options_that_contradict(store, llama, tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shape.json").write_text('{"model": {"layers": 1, "heads": 1, "width": 8}}')
    args = [str(llama) if word == "LLAMA" else word for word in args]
    assert run_command_line(["train", "--data", str(store.path), "--device", "cpu", *args]) != 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_defaults_of_finetuning_go_under_a_configuration():
    plain = apply_finetuning_defaults({"model": {"init": "m"}, "optim": {"lr": 2e-4}, "steps": 7}, 1024)
    settings = make_settings(plain, {})
    assert (settings.steps, settings.seq_len) == (7, 1024)
    assert (settings.optim.lr, settings.optim.weight_decay) == (2e-4, 0.0)
    with pytest.raises(SettingsError, match=r"model.widht: unknown setting; did you mean 'width'"):
        make_settings({"model": {"layers": 1, "heads": 1, "widht": 8}}, {})
    with pytest.raises(SettingsError, match=r"model.innit: unknown setting; did you mean 'init'"):
        make_settings({"model": {"innit": "m", "attn_implementation": "sdpa"}}, {})


def test_transformers_is_asked_for_by_its_extra(store, llama, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "find_spec", lambda _name: None)
    with pytest.raises(ImportError, match=r"pip install 'batchloom\[train,hf\]'"):
        finetune(store, llama, tmp_path / "run")


def test_running_out_of_memory_names_a_smaller_model(llama):
    settings = make_settings({"model": {"init": str(llama)}, "seq_len": 64}, {})
    with (
        pytest.raises(TrainError, match="lower --batch-size .*; or give --init a smaller model"),
        explain_memory_errors(settings, 10**9),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.")
